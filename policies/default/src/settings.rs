//! The parameters of the policy: `[profiles.NAME.params]`, read once a request.

use std::str::FromStr;

use steersman_policy::{LoopRule, RequestView};

/// Whether to think where neither the client nor the needle routing says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reasoning {
    /// Think if the model can: today the same as `On`, but free to become cleverer.
    Auto,
    /// Think if the model can.
    On,
    /// Do not think.
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
    /// `reasoning_budget`: most tokens of a thought; a client may ask for less.
    pub reasoning_budget: u32,
    /// `answer_reserve`: tokens of the context kept for the answer of a request that says no
    /// `max_tokens`.
    pub answer_reserve: u32,
    /// `needle_system_chars`: from more characters of system text on, a short question is a search
    /// in it; 0 turns this routing off.
    pub needle_system_chars: u32,
    /// `needle_user_chars`: a question of fewer characters is short.
    pub needle_user_chars: u32,
    /// `needle_reasoning_budget`: most tokens of the thought that such a search gets.
    pub needle_reasoning_budget: u32,
    /// `loop_max_period`, `loop_repeats`, `loop_min_tokens`, `loop_similarity`: when a thought is
    /// a loop.
    pub loops: LoopRule,
    /// `answer_loop_tokens`: tokens that exact repeats must cover in an answer before it is
    /// stopped, since long tables of equal rows are legitimate; 0 never stops.
    pub answer_loop_tokens: u32,
    /// `hint_json`, `hint_code` ...: see [`super::hint`].
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
            loops: LoopRule { max_period: 1024, repeats: 3, min_tokens: 96, similarity: 0.87 },
            answer_loop_tokens: 2048,
            hints: Vec::new(),
        }
    }
}

impl Settings {
    /// The parameters of a request, and complaints about those that cannot be used. A mistyped
    /// parameter leaves its default in force: it must not end every request of the profile.
    pub fn read(request: &RequestView) -> (Self, Vec<String>) {
        let mut settings = Self::default();
        let mut complaints = Vec::new();
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
                    complaints.push(format!("unknown parameter `{name}`"));
                    continue;
                }
            };
            if !done {
                complaints.push(format!("parameter `{name}` cannot be `{value}`"));
            }
        }
        (settings, complaints)
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
        let (settings, complaints) =
            read(&[("reasoning", "off"), ("reasoning_budget", " 100 "), ("hint_json", "J")]);
        assert_eq!(settings.reasoning, Reasoning::Off);
        assert_eq!(settings.reasoning_budget, 100);
        assert_eq!(settings.hints, [("hint_json".into(), "J".into())]);
        assert_eq!(complaints, [""; 0]);
    }

    #[test]
    fn a_mistyped_parameter_is_reported_and_leaves_the_default() {
        let (settings, complaints) = read(&[("reasoning_budget", "many"), ("thinkbudget", "9")]);
        assert_eq!(settings, Settings::default());
        assert_eq!(
            complaints,
            ["parameter `reasoning_budget` cannot be `many`", "unknown parameter `thinkbudget`"]
        );
    }
}
