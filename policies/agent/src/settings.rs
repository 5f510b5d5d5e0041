//! The parameters of the policy (`[profiles.NAME.params]`).

use std::str::FromStr;

use steersman_policy::LoopRule;

use super::head::{Answer, JsonHead};
use super::noise::Strip;

/// Whether the model reasons if the client does not choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reasoning {
    /// Reason if the model supports it.
    On,
    /// Do not reason.
    Off,
}

impl FromStr for Reasoning {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(()),
        }
    }
}

/// The parameters with their defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// `reasoning`: `on` or `off`.
    pub reasoning: Reasoning,
    /// `reasoning_budget`: limit on reasoning tokens; the client can lower it.
    pub reasoning_budget: u32,
    /// `answer_reserve`: tokens reserved for the answer, at most half of those that the context or the
    /// limit of the reply allows; a limit of the answer alone takes its place.
    pub answer_reserve: u32,
    /// `answer`: form of the answer.
    pub answer: Answer,
    /// `json_head`: beginning of a JSON answer after closed reasoning.
    pub json_head: JsonHead,
    /// `strip`: lines to remove from the front of system text.
    pub strip: Strip,
    /// `loop_max_period`, `loop_repeats`, `loop_min_tokens`, `loop_similarity`: thresholds of the loop
    /// detectors.
    pub loops: LoopRule,
    /// `escapes`: loops in reasoning that are rewound; the next one closes it. 0 rewinds none.
    pub escapes: u32,
    /// `escape_text`: text injected in place of the repeats.
    pub escape_text: String,
    /// `checkpoint_every`: tokens between two checkpoints.
    pub checkpoint_every: u32,
    /// `answer_loop_tokens`: tokens that an exact loop in an answer must cover before it is stopped;
    /// 0 never stops.
    pub answer_loop_tokens: u32,
    /// `tool_repeats`: consecutive equal results of the same call that make a tool loop; 0 disables
    /// the check.
    pub tool_repeats: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            reasoning: Reasoning::On,
            reasoning_budget: 1024,
            answer_reserve: 1024,
            answer: Answer::Auto,
            json_head: JsonHead::Bare,
            strip: Strip::default(),
            loops: LoopRule { max_period: 1024, repeats: 2, min_tokens: 128, similarity: 0.87 },
            escapes: 1,
            escape_text: "\n\nI have been over this already. What follows from it: ".into(),
            checkpoint_every: 128,
            answer_loop_tokens: 2048,
            tool_repeats: 2,
        }
    }
}

impl Settings {
    /// The parameters, and problems with unusable ones. An unusable parameter keeps its default: a
    /// typo must not end every request of the profile.
    pub fn read(params: &[(String, String)]) -> (Self, Vec<String>) {
        let mut settings = Self::default();
        let mut problems = Vec::new();
        for (name, value) in params {
            let s = &mut settings;
            let done = match name.as_str() {
                "reasoning" => set(&mut s.reasoning, value),
                "reasoning_budget" => set(&mut s.reasoning_budget, value),
                "answer_reserve" => set(&mut s.answer_reserve, value),
                "answer" => set(&mut s.answer, value),
                "json_head" => set(&mut s.json_head, value),
                "strip" => set(&mut s.strip, value),
                "loop_max_period" => set(&mut s.loops.max_period, value),
                "loop_repeats" => set(&mut s.loops.repeats, value),
                "loop_min_tokens" => set(&mut s.loops.min_tokens, value),
                "loop_similarity" => set(&mut s.loops.similarity, value),
                "escapes" => set(&mut s.escapes, value),
                "escape_text" => {
                    s.escape_text.clone_from(value);
                    true
                }
                "checkpoint_every" => set(&mut s.checkpoint_every, value),
                "answer_loop_tokens" => set(&mut s.answer_loop_tokens, value),
                "tool_repeats" => set(&mut s.tool_repeats, value),
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
