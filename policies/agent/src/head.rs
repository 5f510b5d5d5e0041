//! What comes after a thought that was cut: the contract first, the words second.
//!
//! A bare `</think>` does not end a loop, which goes on in the answer; the head of the right answer
//! does. Where tools are offered it must leave open whether a call or an answer comes next.

use std::str::FromStr;

use super::settings::Settings;

/// What the operator says that answers shall be: the parameter `answer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// As tools and the words of the request say.
    Auto,
    /// JSON, even where tools are offered.
    Json,
    /// Text.
    Text,
}

impl FromStr for Answer {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "json" => Ok(Self::Json),
            "text" => Ok(Self::Text),
            _ => Err(()),
        }
    }
}

/// How a JSON answer begins: the parameter `json_head`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JsonHead {
    /// `{`: the whole answer is what a strict reader takes.
    Bare,
    /// `[`, likewise, for clients that want lists.
    List,
    /// The head of a fenced block, for clients that look for one.
    Fence,
}

impl FromStr for JsonHead {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "bare" => Ok(Self::Bare),
            "list" => Ok(Self::List),
            "fence" => Ok(Self::Fence),
            _ => Err(()),
        }
    }
}

/// What comes after the thought of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Form {
    /// A call of a tool or an answer.
    Step,
    /// JSON.
    Json,
    /// Text.
    #[default]
    Text,
}

/// What comes after the thought.
pub fn form(answer: Answer, has_tools: bool, wants_json: bool) -> Form {
    match answer {
        Answer::Json => Form::Json,
        Answer::Text => Form::Text,
        Answer::Auto if has_tools => Form::Step,
        Answer::Auto if wants_json => Form::Json,
        Answer::Auto => Form::Text,
    }
}

/// Its head.
pub fn text(form: Form, settings: &Settings) -> &'static str {
    match (form, settings.json_head) {
        (Form::Step, _) => "**Next Step:**\n\n",
        (Form::Json, JsonHead::Bare) => "{",
        (Form::Json, JsonHead::List) => "[",
        (Form::Json, JsonHead::Fence) => "```json\n",
        (Form::Text, _) => "**Final Answer:**\n\n",
    }
}

/// Bytes of a text that are looked at, from its start and from its end: what the answer shall be
/// stands there.
const LOOKED_AT: usize = 8192;

/// Whether a text asks for JSON: in one sentence the word and one for replying, or for no more.
pub fn wants_json(text: &str) -> bool {
    #[rustfmt::skip]
    const ASKING: &[&str] = &[
        "answer", "answers", "reply", "replies", "respond", "response", "responses", "return",
        "output", "outputs", "produce", "emit", "only", "strictly", "valid", "must", "extract",
        "antworte", "antwort", "gib", "ausschließlich", "nur", "réponds", "répondez", "réponse",
        "uniquement", "responde", "respuesta", "solo", "rispondi", "risposta",
    ];
    let start = &text[..text.floor_char_boundary(LOOKED_AT)];
    let end_at = text.len().saturating_sub(LOOKED_AT).max(start.len());
    let end = &text[text.ceil_char_boundary(end_at)..];
    [start, end].iter().any(|part| {
        part.split(['.', '!', '?', '\n', ';']).filter(|s| mentions_json(s)).any(|sentence| {
            let mut words = sentence.split(|c: char| !c.is_alphanumeric());
            // "this JSON" is a source, as in "Return the names that this JSON holds".
            !sentence.to_lowercase().contains("this json")
                && words.any(|word| ASKING.contains(&word.to_lowercase().as_str()))
        })
    })
}

fn mentions_json(sentence: &str) -> bool {
    sentence.split(|c: char| !c.is_alphanumeric()).any(|word| word.eq_ignore_ascii_case("json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_asked_for_by_the_word_and_one_for_replying() {
        let cases = [
            ("You are a router. Respond only with JSON.", true),
            ("Output must be a JSON object with the keys a and b", true),
            ("Antworte ausschließlich als JSON!", true),
            ("Répondez en JSON", true),
            ("You can read JSON files. Reply in English.", false),
            ("Return the names that this JSON holds.", false),
            ("What is JSON?", false),
            ("Return the names.", false),
        ];
        for (text, expected) in cases {
            assert_eq!(wants_json(text), expected, "{text}");
        }
        let long = format!("{}. Reply in JSON.", "ä".repeat(20_000));
        assert!(wants_json(&long));
        let hidden = format!("{0}. Reply in JSON. {0}", "ä".repeat(20_000));
        assert!(!wants_json(&hidden));
    }

    #[test]
    fn the_operator_goes_before_tools_and_tools_go_before_words() {
        let cases = [
            ((Answer::Auto, true, true), Form::Step),
            ((Answer::Auto, false, true), Form::Json),
            ((Answer::Auto, false, false), Form::Text),
            ((Answer::Json, true, false), Form::Json),
            ((Answer::Text, true, true), Form::Text),
        ];
        for ((answer, tools, words), expected) in cases {
            assert_eq!(form(answer, tools, words), expected, "{answer:?} {tools} {words}");
        }
    }
}
