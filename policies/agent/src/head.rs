//! The head: text that follows reasoning that was closed early, and begins the answer.
//!
//! A bare `</think>` does not end a loop, which continues in the answer; the beginning of a fitting
//! answer does. If the request has tools the head must fit both a call and an answer.

use std::str::FromStr;

use super::settings::Settings;

/// The form of answers that the operator sets: the parameter `answer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Chosen by the tools and words of the request.
    Auto,
    /// JSON, even if the request has tools.
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
    /// `{`: the answer as a whole is JSON, for strict parsers.
    Bare,
    /// `[`: likewise, for clients that expect a list.
    List,
    /// A fenced block, for clients that search for one.
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

/// What follows the reasoning of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Form {
    /// A tool call or an answer.
    Step,
    /// JSON.
    Json,
    /// Text.
    #[default]
    Text,
}

/// The form of what follows the reasoning.
pub fn form(answer: Answer, has_tools: bool, wants_json: bool) -> Form {
    match answer {
        Answer::Json => Form::Json,
        Answer::Text => Form::Text,
        Answer::Auto if has_tools => Form::Step,
        Answer::Auto if wants_json => Form::Json,
        Answer::Auto => Form::Text,
    }
}

/// The head for a form.
pub fn text(form: Form, settings: &Settings) -> &'static str {
    match (form, settings.json_head) {
        (Form::Step, _) => "**Next Step:**\n\n",
        (Form::Json, JsonHead::Bare) => "{",
        (Form::Json, JsonHead::List) => "[",
        (Form::Json, JsonHead::Fence) => "```json\n",
        (Form::Text, _) => "**Final Answer:**\n\n",
    }
}

/// Bytes examined at the start and at the end of a text, which usually state the form of the answer.
const EXAMINED_BYTES: usize = 8192;

/// Whether a text asks for JSON: a sentence has the word JSON and a word for replying or "only".
pub fn wants_json(text: &str) -> bool {
    #[rustfmt::skip]
    const ASKING: &[&str] = &[
        "answer", "answers", "reply", "replies", "respond", "response", "responses", "return",
        "output", "outputs", "produce", "emit", "only", "strictly", "valid", "must", "extract",
        "antworte", "antwort", "gib", "ausschließlich", "nur", "réponds", "répondez", "réponse",
        "uniquement", "responde", "respuesta", "solo", "rispondi", "risposta",
    ];
    let start = &text[..text.floor_char_boundary(EXAMINED_BYTES)];
    let end_at = text.len().saturating_sub(EXAMINED_BYTES).max(start.len());
    let end = &text[text.ceil_char_boundary(end_at)..];
    [start, end].iter().any(|part| {
        part.split(['.', '!', '?', '\n', ';']).filter(|s| mentions_json(s)).any(|sentence| {
            let mut words = sentence.split(|c: char| !c.is_alphanumeric());
            // "this JSON" is a source: "Return the names that this JSON holds".
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
    fn json_is_recognized_by_the_word_and_a_verb_of_replying() {
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
    fn the_operator_takes_precedence_over_tools_and_tools_over_words() {
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
