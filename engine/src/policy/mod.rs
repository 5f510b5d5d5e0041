//! Policies advise: they see a request and its steps, and answer with plans and actions.
//!
//! This file is the contract in plain Rust, the mirror of `wit/`; [`wasm`] is the only door to
//! wasmtime. A policy never sees an array, a cache or the store, and cannot call the engine: it
//! answers, and `decode` decides what to do with the answer. It can trap, loop or lie, and the
//! request still ends within its limits.
//!
//! [`registry`] gives each request its instance; [`guarded`] stands between it and a failing
//! guest; [`native`] is what then remains.

pub mod guarded;
pub mod native;
pub mod registry;
pub mod wasm;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::Result;

pub use registry::Policies;

/// One instance of a policy, living as long as one request.
pub trait Policy {
    /// Plans a request, before its prompt is rendered. Called once.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when the policy failed and its profile fails closed.
    fn on_request(&mut self, request: &RequestView) -> Result<Plan>;

    /// Sees the tokens committed since the last call; the actions apply before the next token.
    ///
    /// # Errors
    /// As [`Policy::on_request`].
    fn on_step(&mut self, step: &Step) -> Result<Vec<Action>>;

    /// Sees how the request ended. Called once, last; failures are logged and change nothing.
    fn on_finish(&mut self, summary: &Summary);

    /// Remarks about the policy itself since the last call (that it failed, and what replaced
    /// it), for the reply's notes. Best taken once, after [`Policy::on_finish`].
    fn take_notes(&mut self) -> Vec<String> {
        Vec::new()
    }
}

/// What a policy may see of a request.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RequestView {
    /// The request's name in logs.
    pub id: String,
    /// The profile that chose this policy.
    pub profile: String,
    /// Name of the served model.
    pub model: String,
    /// Its family (`model_type`).
    pub family: String,
    /// `[profiles.NAME.params]`, values as text, sorted by key.
    pub params: BTreeMap<String, String>,
    /// Tokens of the rendered prompt (with thinking as the client asked, else on).
    pub prompt_tokens: u32,
    /// Tokens that the context holds beyond the prompt.
    pub context_left: u32,
    /// How many messages the conversation has.
    pub messages: u32,
    /// Characters of all system messages together.
    pub system_chars: u32,
    /// The last user message, cut to its first [`USER_BYTES`] bytes at a character boundary.
    pub user: String,
    /// Names of the tools offered.
    pub tools: Vec<String>,
    /// Whether the model can think at all (its template and vocabulary have thoughts).
    pub can_think: bool,
    /// Whether the client asked for a thought, or for none.
    pub thinking: Option<bool>,
    /// The client's bound on thought tokens.
    pub think_budget: Option<u32>,
    /// The client's bound on answer tokens.
    pub max_tokens: Option<u32>,
}

/// Most bytes of the last user message that a policy sees.
pub const USER_BYTES: usize = 16 * 1024;

/// A policy's plan for a request; `None` leaves the choice to the engine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Whether the model shall think.
    pub thinking: Option<bool>,
    /// Most tokens of the thought; when they are used up, `on_step` sees `budget_reached`.
    pub think_budget: Option<u32>,
    /// Tokens of the context kept free for the answer: the thought ends when only these are left.
    pub answer_reserve: Option<u32>,
    /// Thresholds of the native loop detectors; `None` turns them off.
    pub loops: Option<LoopRule>,
    /// `on_step` is called every this many tokens; 0 calls it on events alone, which costs
    /// nothing in the steps between.
    pub every: u32,
    /// A remark for the log and the reply's notes.
    pub note: Option<String>,
    /// What of this request's state is kept: `None` all that the engine thinks worth it, a list only
    /// what it names.
    pub keep: Option<Vec<Keep>>,
}

/// Most entries of [`Plan::keep`]; more is a failure of the policy.
pub const KEEPS: usize = 16;

/// State that is to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// Where.
    pub at: Anchor,
    /// Seconds for which it is not evicted, at most [`KEEP_SECONDS`] and within half of the
    /// operator's budget; 0 keeps it as long as it is used.
    pub seconds: u32,
}

/// Most seconds of a [`Keep`]; more is clamped.
pub const KEEP_SECONDS: u32 = 24 * 60 * 60;

/// A place in a conversation at which state may be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Anchor {
    /// The end of tools and system text.
    System,
    /// The ends of earlier messages, and in long ones every so many tokens.
    Turns,
    /// The end of the last message.
    Prompt,
    /// The end of the reply, and what the next turn will begin with.
    Reply,
}

/// Thresholds of the native loop detectors. Values out of range are clamped by them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LoopRule {
    /// Longest period, in tokens, that counts as a loop; at most 1,024.
    pub max_period: u32,
    /// Consecutive repeats that make a loop, the first occurrence included; at least 2.
    pub repeats: u32,
    /// Fewest tokens that the repeats must cover together, so that "ha ha ha" is no loop.
    pub min_tokens: u32,
    /// Share of equal tokens at which blocks count as near-repeats, in [0.5, 1]; 1 turns
    /// near-repeats off. Near-repeats need twice the repeats and twice the tokens of exact ones,
    /// since a list of similar lines is often meant.
    pub similarity: f32,
}

/// Where a sequence stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Between `<think>` and `</think>`.
    Think,
    /// Everything the user reads.
    #[default]
    Answer,
    /// Inside a tool call.
    ToolCall,
}

/// What happened since the last call of `on_step`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Tokens committed so far, thoughts and injected text included.
    pub index: u32,
    /// Phase after the last of `tokens`.
    pub phase: Phase,
    /// Thought tokens so far.
    pub think_tokens: u32,
    /// Answer tokens so far.
    pub answer_tokens: u32,
    /// Thought tokens left in the budget.
    pub think_left: u32,
    /// Tokens committed since the last call, at most [`STEP_TOKENS`] (the newest are kept).
    pub tokens: Vec<u32>,
    /// Their text, as far as it is whole characters.
    pub text: String,
    /// A loop in the current phase: reported when it is found, and again with every further
    /// `min_tokens` tokens that it goes on, so that a policy may wait until it is sure.
    pub loop_found: Option<LoopReport>,
    /// The thought has used its budget up: unless the policy closes it now, the engine does.
    pub budget_reached: bool,
}

/// Most tokens that one call of `on_step` sees.
pub const STEP_TOKENS: usize = 1024;

/// A loop, as the detector saw it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LoopReport {
    /// Tokens from one repeat to the next.
    pub period: u32,
    /// How often the block stood in a row.
    pub repeats: u32,
    /// Whether all repeats were equal; false for near-repeats.
    pub exact: bool,
}

/// What a policy wants done before the next token. Applied in order; at most
/// [`ACTIONS`] a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// This text goes in as if the model had written it. It is tokenised with special tokens
    /// off, so it cannot forge a turn or a marker.
    Inject(String),
    /// Ends the thought (the engine writes the marker), then this text. No effect outside one.
    CloseThinking(String),
    /// Ends the request, with this reason.
    Stop(String),
}

/// Most actions in one answer of `on_step`; more is a failure of the policy.
pub const ACTIONS: usize = 16;

/// How a request ended, for `on_finish`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// `stop`, `length`, `tool-calls`, `policy`, `cancelled` or `error`.
    pub reason: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Thought tokens.
    pub think_tokens: u32,
    /// Answer tokens.
    pub answer_tokens: u32,
    /// Reports of loops.
    pub loops: u32,
}
