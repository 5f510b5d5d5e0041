//! Policies advise: they see a request and its steps, and answer with plans and actions.
//!
//! This file is the contract in plain Rust, the mirror of `wit/`; [`wasm`] is the only door to
//! wasmtime. A policy never sees an array, a cache or the store, and cannot call the engine: it
//! answers, and `decode` decides what to do with the answer. It can trap, loop or lie, and the
//! request still ends within its limits.
//!
//! [`registry`] gives each request its [`chain`] of instances; [`guarded`] stands between each and a
//! failing guest, which a [`breaker`] remembers; [`native`] is what then remains. [`trace`] records
//! what they decide, and [`golden`] asks the same questions again.

pub mod breaker;
pub mod chain;
pub mod disk;
pub mod golden;
pub mod guarded;
pub mod native;
pub mod prompt;
pub mod registry;
pub mod trace;
pub mod validate;
pub mod wasm;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Result;

pub use registry::{Policies, Steering};

/// One instance of a policy, living as long as one request.
///
/// Every hook fails with [`crate::Error::Policy`], or [`crate::Error::PolicyLate`], when the policy
/// failed and its profile fails closed.
pub trait Policy {
    /// May replace spans of system text before the conversation is rendered. Called once, first.
    ///
    /// # Errors
    /// As above.
    fn on_prompt(&mut self, prompt: &PromptView) -> Result<Vec<Replacement>> {
        let _ = prompt;
        Ok(Vec::new())
    }

    /// Plans a request, before its prompt is rendered. Called once.
    ///
    /// # Errors
    /// As above.
    fn on_request(&mut self, request: &RequestView) -> Result<Plan>;

    /// Sees the tokens committed since the last call; the actions apply before the next token.
    ///
    /// # Errors
    /// As above.
    fn on_step(&mut self, step: &Step) -> Result<Vec<Action>>;

    /// Judges a call of a tool, before the client gets it.
    ///
    /// # Errors
    /// As above.
    fn on_tool_call(&mut self, call: &ToolCallView) -> Result<Verdict> {
        let _ = call;
        Ok(Verdict::Accept)
    }

    /// Sees how the request ended. Called once, last; a failure changes nothing any more.
    ///
    /// # Errors
    /// As above.
    fn on_finish(&mut self, summary: &Summary) -> Result<()> {
        let _ = summary;
        Ok(())
    }

    /// Remarks about the policy itself since the last call (that it failed, and what replaced
    /// it), for the reply's notes. Best taken once, after [`Policy::on_finish`].
    fn take_notes(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// What the last hook took.
    fn cost(&self) -> Cost {
        Cost::default()
    }

    /// What the host answered to the calls that the last hook made of it, in order, for traces; those
    /// of the start function come with the first hook.
    fn take_imports(&mut self) -> Vec<ImportCall> {
        Vec::new()
    }
}

/// A call that a policy made of its host, and the answer: what a replay needs to be exact. Of
/// `kv.get`, `kv.set`, `kv.delete`, `tokenizer.encode` and `tokenizer.decode`; the rest answers
/// nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportCall {
    /// Interface and function, `kv.get`.
    pub call: String,
    /// Its arguments; lists of tokens as JSON.
    pub arguments: Vec<String>,
    /// `kv.get`: the value. `kv.set`: why it was refused (`bad-key`, `full`), `None` where it was
    /// not. `kv.delete`: `true` or `false`. `tokenizer.encode`: the tokens as JSON.
    /// `tokenizer.decode`: the text.
    pub answer: Option<String>,
}

/// What a call of a hook took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// About one unit a Wasm instruction; deterministic.
    pub fuel: u64,
    /// Time of the call.
    pub nanoseconds: u64,
}

/// What policies need of the served model's tokenizer.
pub trait Vocabulary: Send + Sync {
    /// Tokens of a text, special tokens off; `None` when the tokenizer fails.
    fn encode(&self, text: &str) -> Option<Vec<u32>>;

    /// Text of tokens; those that there are not are left out.
    fn decode(&self, tokens: &[u32]) -> String;

    /// One more than the largest token.
    fn size(&self) -> u32;
}

/// A vocabulary for where there is no model: any token may be named, and none has text.
pub fn no_vocabulary() -> Arc<dyn Vocabulary> {
    struct None;

    impl Vocabulary for None {
        fn encode(&self, _: &str) -> Option<Vec<u32>> {
            Some(Vec::new())
        }

        fn decode(&self, _: &[u32]) -> String {
            String::new()
        }

        fn size(&self) -> u32 {
            u32::MAX
        }
    }

    Arc::new(None)
}

/// What a policy may see of a prompt before it is rendered.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PromptView {
    /// The profile that chose this policy.
    pub profile: String,
    /// `[profiles.NAME.params]`, values as text, sorted by key.
    pub params: BTreeMap<String, String>,
    /// The text of each system (or developer) message, cut to its first [`SYSTEM_BYTES`] bytes at a
    /// character boundary.
    pub system: Vec<String>,
}

/// Most bytes of each system message that a policy sees.
pub const SYSTEM_BYTES: usize = 256 * 1024;

/// A span of system text to be replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replacement {
    /// Which text of [`PromptView::system`].
    pub message: u32,
    /// The span, verbatim and not empty: its first occurrence is replaced.
    pub old: String,
    /// What stands there instead.
    pub new: String,
}

/// Most replacements in one answer of `on_prompt`; more is a failure of the policy.
pub const REPLACEMENTS: usize = 16;

/// How tokens are drawn; `None` leaves a value as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingChange {
    /// 0 is greedy; at most [`TEMPERATURE`].
    pub temperature: Option<f32>,
    /// Smallest set of tokens with at least this probability mass, in (0, 1].
    pub top_p: Option<f32>,
    /// Only the k likeliest tokens; 0 is all.
    pub top_k: Option<u32>,
    /// Only tokens at least this fraction as likely as the likeliest, in [0, 1].
    pub min_p: Option<f32>,
}

/// Highest temperature that a policy may ask for.
pub const TEMPERATURE: f32 = 10.0;

/// What a policy may see of a request.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
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
    /// What the client said about sampling.
    pub sampling: SamplingChange,
    /// Seed of the draws.
    pub seed: u64,
}

/// Most bytes of the last user message that a policy sees.
pub const USER_BYTES: usize = 16 * 1024;

/// A policy's plan for a request; `None` leaves the choice to the engine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Plan {
    /// Whether the model shall think.
    pub thinking: Option<bool>,
    /// Most tokens of the thought; when they are used up, `on_step` sees `budget_reached`.
    pub think_budget: Option<u32>,
    /// Tokens of the context kept free for the answer: the thought ends when only these are left.
    pub answer_reserve: Option<u32>,
    /// How tokens are drawn, whatever the client asked for.
    pub sampling: SamplingChange,
    /// Thresholds of the native loop detectors; `None` turns them off.
    pub loops: Option<LoopRule>,
    /// `on_step` is called every this many tokens; 0 calls it on events alone, which costs
    /// nothing in the steps between.
    pub every: u32,
    /// Tokens of the reply between two checkpoints that `rewind` goes back to, at least
    /// [`CHECKPOINT_EVERY`]; 0 keeps none.
    pub checkpoint_every: u32,
    /// A remark for the log and the reply's notes.
    pub note: Option<String>,
    /// What of this request's state is kept: `None` all that the engine thinks worth it, a list only
    /// what it names.
    pub keep: Option<Vec<Keep>>,
}

/// Fewest tokens between two checkpoints of a reply.
pub const CHECKPOINT_EVERY: u32 = 16;

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
#[serde(default)]
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

/// What a policy wants done before the next token. Whatever their order in the list, at most
/// [`ACTIONS`] a call: first the longest rewind; then sampling, biases and bans; then text and
/// closed thoughts, in the order given; then stop, behind which everything is dropped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// This text goes in as if the model had written it. It is tokenised with special tokens
    /// off, so it cannot forge a turn or a marker.
    Inject(String),
    /// Ends the thought (the engine writes the marker), then this text. No effect outside one.
    CloseThinking(String),
    /// Forgets the last so many tokens, at most those of the current phase.
    Rewind(u32),
    /// These tokens are not drawn.
    Ban(Ban),
    /// These tokens are drawn more or less often.
    Bias(Bias),
    /// Tokens are drawn otherwise.
    Sampling(Resample),
    /// Ends the request, with this reason.
    Stop(String),
}

/// Tokens that may not be drawn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ban {
    /// At most [`TOKENS`].
    pub tokens: Vec<u32>,
    /// For how many of the next tokens; 0 is for the rest of the reply.
    #[serde(default)]
    pub steps: u32,
}

/// What is added to logits before a token is drawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bias {
    /// At most [`TOKENS`].
    pub tokens: Vec<TokenBias>,
    /// For how many of the next tokens; 0 is for the rest of the reply.
    #[serde(default)]
    pub steps: u32,
}

/// What is added to a token's logit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TokenBias {
    /// The token.
    pub token: u32,
    /// In -[`BIAS`] to [`BIAS`].
    pub bias: f32,
}

/// Another way to draw.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Resample {
    /// The values that change.
    pub sampling: SamplingChange,
    /// For how many of the next tokens; 0 is for the rest of the reply.
    #[serde(default)]
    pub steps: u32,
}

/// Most tokens of one [`Ban`] or [`Bias`]; more is a failure of the policy.
pub const TOKENS: usize = 256;

/// Largest bias.
pub const BIAS: f32 = 100.0;

/// Most actions in one answer of `on_step`; more is a failure of the policy.
pub const ACTIONS: usize = 16;

/// A call of a tool that the model has just written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ToolCallView {
    /// The tool.
    pub name: String,
    /// The arguments: a JSON object, cut to its first [`ARGUMENT_BYTES`] bytes.
    pub arguments: String,
    /// Digest of the arguments, 16 hex digits.
    pub digest: String,
    /// How many calls this reply has made before.
    pub index: u32,
    /// Earlier calls of the conversation, oldest first, this reply's included; at most
    /// [`EARLIER_CALLS`], the newest.
    pub earlier: Vec<EarlierCall>,
}

/// Most bytes of a call's arguments that a policy sees.
pub const ARGUMENT_BYTES: usize = 16 * 1024;

/// Most earlier calls that a policy sees.
pub const EARLIER_CALLS: usize = 64;

/// A call of a tool that was made earlier in the conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EarlierCall {
    /// The tool.
    pub name: String,
    /// Digest of its arguments: the same for equal ones, in whatever order and spacing.
    pub arguments: String,
    /// Digest of its result; `None` while there is none.
    pub answered: Option<String>,
}

/// What becomes of a call of a tool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The client gets it.
    #[default]
    Accept,
    /// It is taken back, and this text goes in instead; at most [`REPAIRS`] times a request.
    Repair(String),
    /// The request ends, with this reason.
    Stop(String),
}

/// Most calls that are taken back in one request.
pub const REPAIRS: u32 = 4;

/// How a request ended, for `on_finish`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
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
    /// Calls of tools that the client got.
    pub tool_calls: u32,
}
