//! The policy `language`: answers stay in the script of the language that was asked for.
//!
//! Small models slip into another script in the middle of an answer. A token that completes a letter of a foreign
//! script is rewound and banned for the rest of the reply, up to a limit. `on-text` holds the text of such a token
//! back, so that this works for clients that stream, too.
//!
//! The script is that of most letters of the last user message, or that of the parameter `language`, which also asks for
//! the language in the system text. Latin letters are never foreign: names and code have them. A message that asks
//! for a translation sets no limit.

use steersman_policy::{
    Action, Ban, Labels, ParamsView, Phase, Plan, Policy, PreparedParams, PromptEdit, PromptView,
    RequestView, Step, Summary, TextVerdict, TextView, note, read_params,
};

/// Tokens that are rewound without the parameter `times`.
const TIMES: u32 = 64;

/// Words of a message that asks for text in another language.
const TRANSLATES: [&str; 6] = ["translat", "übersetz", "traduc", "tradui", "перевед", "翻译"];

/// A writing system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Script {
    Latin,
    Greek,
    Cyrillic,
    Hebrew,
    Arabic,
    Devanagari,
    Thai,
    /// Chinese and Japanese.
    Han,
    Hangul,
}

impl Script {
    /// The script of a letter; `None` for what every text may have.
    fn of(c: char) -> Option<Self> {
        Some(match u32::from(c) {
            0x41..=0x5A | 0x61..=0x7A | 0xC0..=0x24F => Self::Latin,
            0x370..=0x3FF => Self::Greek,
            0x400..=0x52F => Self::Cyrillic,
            0x590..=0x5FF => Self::Hebrew,
            0x600..=0x6FF | 0x750..=0x77F => Self::Arabic,
            0x900..=0x97F => Self::Devanagari,
            0xE00..=0xE7F => Self::Thai,
            0x3040..=0x30FF | 0x3400..=0x4DBF | 0x4E00..=0x9FFF | 0x20000..=0x2FFFF => Self::Han,
            0x1100..=0x11FF | 0xAC00..=0xD7AF => Self::Hangul,
            _ => return None,
        })
    }

    /// The script of a language by its English name.
    fn of_language(name: &str) -> Option<Self> {
        Some(match name.to_lowercase().as_str() {
            "english" | "german" | "french" | "spanish" | "italian" | "portuguese" | "dutch"
            | "polish" | "czech" | "turkish" | "vietnamese" | "swedish" | "danish" | "finnish"
            | "norwegian" | "romanian" | "hungarian" | "indonesian" => Self::Latin,
            "greek" => Self::Greek,
            "russian" | "ukrainian" | "bulgarian" => Self::Cyrillic,
            "hebrew" => Self::Hebrew,
            "arabic" | "persian" | "urdu" => Self::Arabic,
            "hindi" => Self::Devanagari,
            "thai" => Self::Thai,
            "chinese" | "japanese" => Self::Han,
            "korean" => Self::Hangul,
            _ => return None,
        })
    }

    /// The script of most letters of a text.
    fn most(text: &str) -> Option<Self> {
        let mut counts: Vec<(Self, usize)> = Vec::new();
        for script in text.chars().filter_map(Self::of) {
            match counts.iter_mut().find(|(other, _)| *other == script) {
                Some((_, count)) => *count += 1,
                None => counts.push((script, 1)),
            }
        }
        counts.into_iter().max_by_key(|(_, count)| *count).map(|(script, _)| script)
    }
}

/// The policy `language`, with the state of one request.
#[derive(Default)]
pub struct Language {
    /// `None` permits every script.
    script: Option<Script>,
    times: u32,
    /// Tokens that were rewound.
    rewound: u32,
    /// Tokens since the last complete character.
    incomplete: Vec<u32>,
}

/// The parameters.
struct Settings {
    language: Option<String>,
    times: u32,
    problems: Vec<String>,
}

impl Settings {
    fn parse(params: &[(String, String)]) -> Self {
        let mut settings = Self { language: None, times: TIMES, problems: Vec::new() };
        settings.problems = read_params(params, |name, text| match name {
            "language" => {
                let is_known = text == "auto" || Script::of_language(text).is_some();
                settings.language = Some(text.to_owned()).filter(|_| is_known && text != "auto");
                Some(is_known)
            }
            "times" => Some(text.parse().map(|times| settings.times = times).is_ok()),
            _ => None,
        });
        settings
    }
}

impl Language {
    /// Whether a text has a letter of a foreign script.
    fn is_foreign(&self, text: &str) -> bool {
        let Some(own) = self.script else { return false };
        let mut scripts = text.chars().filter_map(Script::of);
        scripts.any(|script| script != own && script != Script::Latin)
    }
}

impl Policy for Language {
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        let problems = Settings::parse(&params.params).problems;
        PreparedParams { problems, ..PreparedParams::default() }
    }

    fn on_prompt(&mut self, prompt: PromptView) -> Vec<PromptEdit> {
        let language = Settings::parse(&prompt.params).language;
        let gap = if prompt.system.iter().all(String::is_empty) { "" } else { "\n\n" };
        let words = language.map(|language| format!("{gap}Answer in {language}."));
        words.into_iter().map(PromptEdit::End).collect()
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        let settings = Settings::parse(&request.params);
        let user = request.user.to_lowercase();
        let translates = TRANSLATES.iter().any(|word| user.contains(word));
        self.script = match &settings.language {
            Some(language) => Script::of_language(language),
            None if translates => None,
            None => Script::most(&request.user),
        };
        self.times = settings.times;
        let every = u32::from(self.script.is_some());
        Plan { every, note: note(&settings.problems), ..Plan::default() }
    }

    fn on_step(&mut self, step: Step) -> Vec<Action> {
        if step.phase != Phase::Answer {
            self.incomplete.clear();
            return Vec::new();
        }
        self.incomplete.extend(&step.tokens);
        if step.text.is_empty() {
            // A part of a character.
            return Vec::new();
        }
        let tokens = std::mem::take(&mut self.incomplete);
        if !self.is_foreign(&step.text) || self.rewound == self.times {
            return Vec::new();
        }
        let Some(&first) = tokens.first() else { return Vec::new() };
        self.rewound += 1;
        let count = tokens.len() as u32;
        vec![Action::Rewind(count), Action::Ban(Ban { tokens: vec![first], steps: 0 })]
    }

    fn on_text(&mut self, view: TextView) -> TextVerdict {
        // `on-step` follows, and rewinds it.
        if self.rewound == self.times || !self.is_foreign(&view.text) {
            return TextVerdict::Pass;
        }
        TextVerdict::Hold(view.text.len() as u32)
    }

    fn on_finish(&mut self, _: Summary) -> Labels {
        match self.rewound {
            0 => Labels::new(),
            rewound => vec![("foreign_tokens".into(), rewound.to_string())],
        }
    }
}

steersman_policy::export!(Language, without on_tool_call, with on_text);

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(user: &str, params: &[(&str, &str)]) -> (Language, Plan) {
        let mut policy = Language::default();
        let params = params.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect();
        let request = RequestView { user: user.into(), params, ..RequestView::default() };
        let plan = policy.on_request(request);
        (policy, plan)
    }

    fn step(tokens: &[u32], text: &str) -> Step {
        Step { tokens: tokens.to_vec(), text: text.into(), ..Step::default() }
    }

    #[test]
    fn a_foreign_letter_is_held_rewound_and_banned() {
        let (mut policy, plan) = asked("Wo ist der Fluss?", &[("times", "1")]);
        assert_eq!(plan.every, 1);
        let view = TextView { text: "河".into(), ..TextView::default() };
        assert_eq!(policy.on_text(view.clone()), TextVerdict::Hold(3));
        assert_eq!(policy.on_step(step(&[7], "Der ")), []);
        // A character of two tokens.
        assert_eq!(policy.on_step(step(&[8], "")), []);
        let ban = Action::Ban(Ban { tokens: vec![8], steps: 0 });
        assert_eq!(policy.on_step(step(&[9], "河")), [Action::Rewind(2), ban]);
        // The limit is reached.
        assert_eq!(policy.on_step(step(&[9], "河")), []);
        assert_eq!(policy.on_text(view), TextVerdict::Pass);
        assert_eq!(policy.on_finish(Summary::default())[0].1, "1");
    }

    #[test]
    fn the_script_is_that_of_the_question_or_of_the_parameter() {
        let is_foreign = |user: &str, params: &[(&str, &str)], text: &str| {
            asked(user, params).0.is_foreign(text)
        };
        assert!(!is_foreign("Где река?", &[], "Река — river"));
        assert!(is_foreign("Где река?", &[], "河"));
        assert!(!is_foreign("Translate `river` to Chinese.", &[], "河"));
        assert!(!is_foreign("Where?", &[("language", "Chinese")], "河"));
        assert!(is_foreign("河在哪里?", &[("language", "German")], "河"));
        assert!(!is_foreign("1 + 1", &[], "2 河"));
        assert_eq!(
            asked("", &[("language", "Elvish")]).1.note.unwrap(),
            "parameter `language` cannot be `Elvish`"
        );
    }
}
