//! The parameters of the policy (`[profiles.NAME.params]`), read once per request.

use std::str::FromStr;

use steersman_policy::{LoopRule, RequestView};

/// Whether the model reasons if neither the client nor needle routing decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reasoning {
    /// Reason if the model supports it; at present the same as `On`.
    Auto,
    /// Reason if the model supports it.
    On,
    /// Do not reason.
    Off,
}

impl FromStr for Reasoning {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(()),
        }
    }
}

/// The parameters with their defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// `reasoning`: `auto`, `on` or `off`.
    pub reasoning: Reasoning,
    /// `reasoning_budget`: limit on reasoning tokens; the client can lower it.
    pub reasoning_budget: u32,
    /// `answer_reserve`: tokens reserved for the answer, at most half of those that the context and the limit of
    /// the reply allow; a limit of the answer alone takes its place.
    pub answer_reserve: u32,
    /// `needle_system_chars`: needle routing applies to system text of more characters; 0 disables it.
    pub needle_system_chars: u32,
    /// `needle_user_chars`: and to questions of fewer characters.
    pub needle_user_chars: u32,
    /// `needle_reasoning_budget`: limit on reasoning tokens of such a question.
    pub needle_reasoning_budget: u32,
    /// `loop_max_period`, `loop_repeats`, `loop_min_tokens`, `loop_similarity`: thresholds of the loop
    /// detectors.
    pub loops: LoopRule,
    /// `answer_loop_tokens`: tokens that an exact loop in an answer must cover before it is stopped,
    /// since a table may have many equal rows; 0 never stops.
    pub answer_loop_tokens: u32,
    /// `hint_json`, `hint_code`, ...: see [`super::hint`].
    pub hints: Vec<(String, String)>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            reasoning: Reasoning::Auto,
            reasoning_budget: 32_768,
            answer_reserve: 1024,
            needle_system_chars: 3000,
            needle_user_chars: 200,
            needle_reasoning_budget: 2048,
            loops: LoopRule { max_period: 1024, repeats: 2, min_tokens: 128, similarity: 0.87 },
            answer_loop_tokens: 2048,
            hints: Vec::new(),
        }
    }
}

impl Settings {
    /// The parameters of a request, and problems with unusable ones. An unusable parameter keeps its
    /// default: a typo must not end every request of the profile.
    pub fn read(request: &RequestView) -> (Self, Vec<String>) {
        let mut settings = Self::default();
        let mut problems = Vec::new();
        for (name, value) in &request.params {
            let s = &mut settings;
            let done = match name.as_str() {
                "reasoning" => set(&mut s.reasoning, value),
                "reasoning_budget" => set(&mut s.reasoning_budget, value),
                "answer_reserve" => set(&mut s.answer_reserve, value),
                "needle_system_chars" => set(&mut s.needle_system_chars, value),
                "needle_user_chars" => set(&mut s.needle_user_chars, value),
                "needle_reasoning_budget" => set(&mut s.needle_reasoning_budget, value),
                "loop_max_period" => set(&mut s.loops.max_period, value),
                "loop_repeats" => set(&mut s.loops.repeats, value),
                "loop_min_tokens" => set(&mut s.loops.min_tokens, value),
                "loop_similarity" => set(&mut s.loops.similarity, value),
                "answer_loop_tokens" => set(&mut s.answer_loop_tokens, value),
                _ if super::hint::NAMES.contains(&name.as_str()) => {
                    s.hints.push((name.clone(), value.clone()));
                    true
                }
                _ => {
                    problems.push(format!("unknown parameter `{name}`"));
                    continue;
                }
            };
            if !done {
                problems.push(format!("parameter `{name}` cannot be `{value}`"));
            }
        }
        (settings, problems)
    }
}

fn set<T: FromStr>(slot: &mut T, text: &str) -> bool {
    match text.trim().parse() {
        Ok(value) => {
            *slot = value;
            true
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(params: &[(&str, &str)]) -> (Settings, Vec<String>) {
        let params = params.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        Settings::read(&RequestView { params, ..RequestView::default() })
    }

    #[test]
    fn parameters_replace_defaults() {
        let (settings, problems) =
            read(&[("reasoning", "off"), ("reasoning_budget", " 100 "), ("hint_json", "J")]);
        assert_eq!(settings.reasoning, Reasoning::Off);
        assert_eq!(settings.reasoning_budget, 100);
        assert_eq!(settings.hints, [("hint_json".into(), "J".into())]);
        assert_eq!(problems, [""; 0]);
    }

    #[test]
    fn an_unusable_parameter_is_reported_and_keeps_its_default() {
        let (settings, problems) = read(&[("reasoning_budget", "many"), ("thinkbudget", "9")]);
        assert_eq!(settings, Settings::default());
        assert_eq!(
            problems,
            ["parameter `reasoning_budget` cannot be `many`", "unknown parameter `thinkbudget`"]
        );
    }
}
