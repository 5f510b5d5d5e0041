//! The parameters of the policy: `[profiles.NAME.params]`, read once a hook that needs them.

use std::str::FromStr;

use steersman_policy::LoopRule;

use super::head::{Answer, JsonHead};
use super::noise::Strip;

/// Whether to think where the client does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reasoning {
    /// Think if the model can.
    On,
    /// Do not think.
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
    /// `reasoning_budget`: most tokens of a thought; a client may ask for less.
    pub reasoning_budget: u32,
    /// `answer_reserve`: tokens of the context kept for the answer of a request that says no
    /// `max_tokens`.
    pub answer_reserve: u32,
    /// `answer`: what the answer shall be.
    pub answer: Answer,
    /// `json_head`: what a JSON answer begins with after a thought that was cut.
    pub json_head: JsonHead,
    /// `strip`: what is taken out of the front of system text.
    pub strip: Strip,
    /// `loop_max_period`, `loop_repeats`, `loop_min_tokens`, `loop_similarity`: when a thought is
    /// a loop.
    pub loops: LoopRule,
    /// `escapes`: loops in a thought that are rewound before one closes it; 0 rewinds none.
    pub escapes: u32,
    /// `escape_text`: what stands in place of the repeats.
    pub escape_text: String,
    /// `checkpoint_every`: tokens between two places that a rewind starts from.
    pub checkpoint_every: u32,
    /// `answer_loop_tokens`: tokens that exact repeats must cover in an answer before it is
    /// stopped; 0 never stops.
    pub answer_loop_tokens: u32,
    /// `tool_repeats`: equal results of a call, in a row, after which it is not made again; 0 lets
    /// it be made as often as the model likes.
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
            loops: LoopRule { max_period: 1024, repeats: 3, min_tokens: 96, similarity: 0.87 },
            escapes: 1,
            escape_text: "\n\nI have been over this already. What follows from it: ".into(),
            checkpoint_every: 128,
            answer_loop_tokens: 2048,
            tool_repeats: 2,
        }
    }
}

impl Settings {
    /// The parameters, and complaints about those that cannot be used. A mistyped parameter leaves
    /// its default in force: it must not end every request of the profile.
    pub fn read(params: &[(String, String)]) -> (Self, Vec<String>) {
        let mut settings = Self::default();
        let mut complaints = Vec::new();
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
