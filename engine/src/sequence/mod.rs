//! One request while it is decoded: its tokens, cache, policy and reply.
//!
//! Never runs the model: [`crate::decode::Decoder`] asks for the next input, runs it, and commits the sampled
//! token. Its arrays are the cache and its checkpoints, the sampled token with its logits, and the
//! state of the drafters.
//!
//! Positions and counts of tokens fit i32, which casts rely on: `Decoder::load` limits the context.
//!
//! [`self::steer`] does what follows a commit: [`self::apply`] and [`self::rewind`] carry out the
//! policy's actions, [`self::tool_calls`] its verdicts. [`self::hooks`] calls it.

pub mod apply;
pub mod constrain;
pub mod expected;
pub mod hooks;
pub mod limits;
pub mod logprobs;
pub mod next_token;
pub mod outlet;
pub mod prepare;
pub mod rewind;
pub mod save_points;
pub mod steer;
pub mod tool_calls;
pub mod unsteered;

use std::collections::VecDeque;
use std::time::Instant;

use mlx_rs::Array;
use tokio::sync::mpsc::UnboundedSender;

use self::constrain::Constraint;
use self::hooks::Hooks;
use self::limits::Limits;
use self::next_token::{Draft, NextLogits, Sampled};
use self::outlet::Outlet;
use self::prepare::Prepared;
use self::rewind::{PhaseStart, ReplyCheckpoint, ReplyState};
use self::steer::{Committed, Injection, Todo};
use crate::cache::Cache;
use crate::config::{DEPTH, DraftKind};
use crate::draft::{Costs, Governor, Offer};
use crate::draft::{Drafter, HiddenRows};
use crate::error::{Error, Result};
use crate::job::fail_all;
use crate::live::Stage;
use crate::policy::events::Watch;
use crate::policy::loops::Detector;
use crate::policy::{DrawnToken, LoopReport, Summary};
use crate::prefix::Retention;
use crate::request::{Event, FinishReason, Finished, Message, Request, ToolCall, Usage};
use crate::sample::logprobs::Logprobs;
use crate::sample::sampler::Sampler;
use crate::text::{Phase, Piece, Text};

/// Most notes of one reply; one more says that further notes were dropped.
const NOTES: usize = 256;

/// Most rows of a step of a sequence that has caught up: the last token and a draft.
pub const STEP_ROWS: usize = DEPTH + 1;

/// One request being decoded.
pub struct Sequence {
    pub request: Request,
    /// Whether the prompt was rendered for reasoning; `None` if the model cannot reason.
    pub reasoning: Option<bool>,
    /// Closed when the client disconnects. Unbounded, so that a slow reader cannot block others: it
    /// holds at most one reply, which `limits` bounds.
    pub events: UnboundedSender<Event>,
    /// Counts the sequences of the decoder.
    pub number: u64,
    /// Prompt and reply. Tokens from `cache.position` on have not run yet.
    pub tokens: Vec<u32>,
    /// Number of prompt tokens.
    pub prompt: usize,
    /// Prompt tokens restored from the prefix cache.
    pub cached: usize,
    pub cache: Cache,
    /// Save points of the prompt that are still to come, ascending.
    pub save_points: VecDeque<(usize, Retention)>,
    /// Whether the plan allows others.
    pub saves_anywhere: bool,
    /// Retention of the state at the end of the reply; `None` if it is not saved.
    pub reply_retention: Option<Retention>,
    /// Ascending by position.
    pub checkpoints: Vec<ReplyCheckpoint>,
    /// Set when tokens were rewound: the rows of `cache` from this position on may be of other tokens.
    pub stale_from: Option<usize>,
    /// The next token, sampled and not committed.
    pub sampled: Option<Sampled>,
    pub next_logits: Option<NextLogits>,
    /// Whether its next pass runs without other sequences, because of a near-tie.
    pub runs_alone: bool,
    pub drafters: Vec<Box<dyn Drafter>>,
    /// `None` without speculation.
    pub governor: Option<Governor>,
    /// The draft that this step verifies.
    pub draft: Option<Draft>,
    /// Plain steps in a row: of one row, queued while the previous one was computed or run at once.
    pub plain_steps: u32,
    /// Steps in a row in which its prompt waited for those of others.
    pub passed_over: u32,
    /// Since when the mask of its next token waits for those of others; no row of the sequence runs until it is
    /// computed.
    pub awaits_mask: Option<Instant>,
    /// How often it was preempted.
    pub preempted: u32,
    /// Since when it waits for a turn, by the queue's stamp; 0 is before all others of its profile.
    pub since: u64,
    /// Identifies the body that asks for it.
    pub body: u64,
    /// Number of layers with a skipped feed-forward block, for the usage.
    pub skipped_layers: u32,
    pub sampler: Sampler,
    /// The form of the reply; `None` if it is free.
    pub constraint: Option<Constraint>,
    /// Of the sampled token, if they are reported.
    pub logprobs: Option<Logprobs>,
    /// Tokens of the prompt that the client has received, if they are reported.
    pub reported: usize,
    /// Sum of the hidden states so far, f32 [1, D], if it becomes an embedding.
    pub pooled: Option<Array>,
    pub reply_state: ReplyState,
    /// The reply is not rewound past this.
    pub phase_start: PhaseStart,
    /// The reply is not rewound past this position either: the client has a tool call before it, or a
    /// part of one.
    pub rewind_limit: usize,
    /// The policies. While a call of them is away, no row of the sequence runs.
    pub hooks: Hooks,
    /// What is left to do for the committed tokens.
    pub todo: Todo,
    /// The text that is being injected.
    pub injection: Option<Injection>,
    pub detector: Option<Detector>,
    /// `None` if the plan names no texts and tokens.
    pub watch: Option<Watch>,
    /// `None` if no policy sees the text of the answer.
    pub outlet: Option<Outlet>,
    pub limits: Limits,
    pub progress: Progress,
    /// The other choices of the same request, until its prompt has run.
    pub others: Vec<Prepared>,
    /// `prefill`, and then `decode`.
    pub phase_span: tracing::Span,
    /// Whether that is `decode`.
    pub is_decoding: bool,
}

/// What one request has done so far.
#[derive(Debug, Default)]
pub struct Progress {
    pub injected: usize,
    pub rewound: usize,
    /// End of the tokens whose probabilities the client has.
    pub reported_end: usize,
    /// Tokens that ran again after rewinds.
    pub rerun: usize,
    pub repairs: u32,
    pub loops: u32,
    /// Bytes of reasoning sent to the client.
    pub reasoning: usize,
    /// The answer as sent to the client, which will send it back in the next turn.
    pub answer: String,
    pub tool_calls: Vec<ToolCall>,
    /// Id of the newest call that the client has a part of, until it has the whole.
    pub open_call: Option<String>,
    /// Number of calls that the client has a part of, and not the whole.
    pub open_calls: usize,
    /// Pieces of the last token from a tool call on that has no verdict yet.
    pub waiting: VecDeque<Piece>,
    /// The pieces before them, which are sent together with them.
    pub judged: Vec<Piece>,
    drafted: u32,
    accepted: u32,
    /// Tokens that drafts added to passes: those accepted, less rows that run again.
    gained: i32,
    /// Tokens that the form left no choice about.
    pub forced: u32,
    /// Passes that verified a draft.
    verified: u32,
    /// Tokens, prompt included, that the policy has seen or injected.
    pub seen: usize,
    /// Drawn tokens that the policies have not seen.
    pub drawn: Vec<DrawnToken>,
    /// The phase when `on-step` could last be called; `None` before the first token.
    pub phase: Option<Phase>,
    end: Option<FinishReason>,
    failure: Option<Error>,
    /// Actions of the policy, for display.
    notes: Vec<String>,
}

impl Progress {
    /// The start of a reply to a prompt of `seen` tokens, with the notes of admission.
    pub fn new(notes: Vec<String>, seen: usize) -> Self {
        Self { notes, seen, ..Self::default() }
    }
}

impl Sequence {
    /// What it could draft in the next pass, of `streams` sequences, once its sampled token is committed.
    pub fn offer_draft(&self, costs: &Costs, streams: usize) -> Option<Offer> {
        let unread = self.sampled.is_some();
        // The last committed token has not run, and nothing else.
        let is_ready = self.cache.position + usize::from(!unread) == self.tokens.len();
        if !is_ready
            || self.samples_late()
            || self.runs_alone
            || self.has_ended()
            || self.hooks.is_away()
        {
            return None;
        }
        let room = self.tokens_left().saturating_sub(1);
        self.governor.as_ref()?.offer(costs, streams, &self.drafters, room, unread)
    }

    /// Drafts with drafters of this kind alone, `depth` tokens in every step; never without a kind or a depth.
    pub fn draft_always(&mut self, kind: Option<DraftKind>, depth: usize) {
        self.drafters.retain(|drafter| Some(drafter.kind()) == kind);
        self.governor = kind.and_then(|_| Governor::always(depth));
    }

    /// Passes the hidden states of rows from `position` on to the drafters.
    pub fn observe(&mut self, hidden: &HiddenRows, position: usize) {
        self.drafters.iter_mut().for_each(|drafter| drafter.observe(hidden, position));
    }

    /// The reply as the client will send it back in the next turn: without the reasoning.
    pub fn reply_message(&self) -> Message {
        Message {
            role: "assistant".into(),
            content: self.progress.answer.clone(),
            tool_calls: self.progress.tool_calls.clone(),
            ..Message::default()
        }
    }

    /// Tokens drafted, tokens accepted, and passes that verified them.
    pub fn draft_counts(&self) -> [usize; 3] {
        let Progress { drafted, accepted, verified, .. } = self.progress;
        [drafted, accepted, verified].map(|count| count as usize)
    }

    /// Tokens that drafts added to passes: those accepted, less rows that run again.
    pub fn gained(&self) -> i32 {
        self.progress.gained
    }

    /// Counts a verified draft. `run_again`: its last row runs again.
    pub fn count_draft(&mut self, drafted: usize, accepted: usize, run_again: bool) {
        // At most DEPTH tokens a draft.
        self.progress.gained += accepted as i32 - i32::from(run_again);
        self.progress.drafted += drafted as u32;
        self.progress.accepted += accepted as u32;
        self.progress.verified += 1;
    }

    /// Rows of the prompt, or of a long text after a rewind, that must run before the next token can be
    /// sampled. 0 if there are so few that they run as a step, or none may run.
    pub fn prompt_rows(&self) -> usize {
        let rows = self.tokens.len().saturating_sub(self.cache.position);
        if rows > STEP_ROWS && !self.has_ended() && !self.hooks.is_away() { rows } else { 0 }
    }

    /// Ends the span `prefill` if the prompt has run; true if it has just done so.
    pub fn begin_decode(&mut self) -> bool {
        let begins = !self.is_decoding && self.cache.position >= self.prompt;
        if begins {
            self.is_decoding = true;
            self.phase_span = self.request.span.decode();
        }
        begins
    }

    /// Whether all committed tokens have run, so that the next one can be sampled.
    pub fn is_caught_up(&self) -> bool {
        self.cache.position >= self.tokens.len()
    }

    /// Whether its next token is sampled in the next step.
    pub fn decodes(&self) -> bool {
        self.prompt_rows() == 0 && !self.has_ended() && !self.hooks.is_away()
    }

    /// Whether the client has disconnected.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// Whether its deadline has passed.
    pub fn is_late(&self) -> bool {
        self.request.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// What is done for the request, for errors.
    pub fn stage(&self) -> &'static str {
        if self.cache.position < self.prompt { "in prefill" } else { "being decoded" }
    }

    pub fn has_ended(&self) -> bool {
        self.progress.end.is_some() || self.progress.failure.is_some()
    }

    /// Ends the request if `result` is an error.
    pub fn check(&mut self, result: Result<()>) {
        if let Err(error) = result {
            self.progress.failure = Some(error);
        }
    }

    /// Whether an error has ended the request.
    pub fn has_failed(&self) -> bool {
        self.progress.failure.is_some()
    }

    /// The error that ended the request, if any.
    pub fn take_failure(&mut self) -> Option<Error> {
        self.progress.failure.take()
    }

    /// Commits a sampled token: sends its text, calls the policy if it is due, and applies the
    /// answer.
    ///
    /// Injected text is committed here as well; the token sampled in the meantime is dropped, like a
    /// rejected draft. A policy that fails closed ends the request.
    pub fn commit_sampled(&mut self, token: u32, text: &Text) {
        let committed = self.commit_and_steer(token, text);
        self.check(committed);
    }

    fn commit_and_steer(&mut self, token: u32, text: &Text) -> Result<()> {
        if !self.sampler.count_step(token) {
            // The cache may have run the token already.
            self.stale_from = Some(self.tokens.len());
            let reason = "all tokens are banned";
            self.note(format!("stopped after {} tokens: {reason}", self.reply_len()));
            self.end(FinishReason::Policy(reason.into()));
            return Ok(());
        }
        if !self.is_allowed(token) {
            self.stale_from = Some(self.tokens.len());
            return self.end_without_token();
        }
        if text.eos().contains(&token) {
            if self.awaits_form() {
                // The cache may have run the token already.
                self.stale_from = Some(self.tokens.len());
                self.close_reasoning("", "the model ended its turn before the answer", text)?;
                return self.steer(text);
            }
            // Clients that score a prompt count one token after it, whichever it is.
            if self.request.prompt.is_some() {
                self.report_logprobs(token, text)?;
            }
            self.end_turn(token);
            return self.steer(text);
        }
        self.report_logprobs(token, text)?;
        let was_late = self.samples_late();
        let reply = &self.reply_state.reply;
        let (phase, length) = (reply.phase(), reply.untaken_text().len());
        self.progress.phase.get_or_insert(phase);
        let loop_found = self.append(token);
        if !was_late && self.samples_late() {
            // It was sampled without the mask.
            self.sampled = None;
        }
        let new = self.reply_state.reply.untaken_text().get(length..);
        let newline = self.limits.on_newline && new.is_some_and(|new| new.contains('\n'));
        let (texts_found, token_found) =
            self.watch.as_mut().map(|watch| watch.found(token)).unwrap_or_default();
        self.todo = Todo::Committed(Committed { loop_found, newline, texts_found, token_found });
        self.steer(text)
    }

    /// Appends one token to the reply and sends the text that it completes; returns a loop if it
    /// completes one. Completed tool calls wait for a verdict.
    pub fn append(&mut self, token: u32) -> Option<LoopReport> {
        let before = self.reply_state.reply.phase();
        self.tokens.push(token);
        self.drafters.iter_mut().for_each(|drafter| drafter.read(&self.tokens));
        let length = self.reply_state.reply.untaken_text().len();
        let pieces = self.reply_state.push(token);
        if let Some(watch) = &mut self.watch {
            watch.read(self.reply_state.reply.untaken_text().get(length..).unwrap_or_default());
        }
        if pieces.iter().any(|piece| self.is_new_call(piece)) {
            self.progress.waiting = pieces.into();
        } else {
            self.send(pieces);
        }
        let now = self.reply_state.reply.phase();
        let reasoning_changed = (before == Phase::Reasoning) != (now == Phase::Reasoning);
        // A call without a verdict may still be rewound, to before the header that ended the reasoning.
        if reasoning_changed && now != Phase::ToolCall && self.progress.waiting.is_empty() {
            self.start_phase();
        }
        let detector = self.detector.as_mut()?;
        if now != before {
            detector.reset();
            return None;
        }
        detector.push(token)
    }

    /// Number of tokens of the reply.
    pub fn reply_len(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    pub fn check_limits(&mut self) {
        if !self.has_ended() && self.tokens_left() == 0 {
            self.end(FinishReason::Length);
        }
    }

    pub fn end(&mut self, reason: FinishReason) {
        self.progress.end = Some(reason);
    }

    /// Adds a note on an action of the policy.
    pub fn note(&mut self, note: String) {
        if self.progress.notes.len() < NOTES {
            let tokens = self.reply_len() as u32;
            let _ = self.events.send(Event::Note { tokens, note: note.clone() });
        }
        add_note(&mut self.progress.notes, note);
    }

    /// Publishes stage and position for other threads.
    pub fn report_progress(&self) {
        let position = self.cache.position;
        let stage = match self.reply_state.reply.phase() {
            _ if position < self.prompt => Stage::Prefill,
            Phase::Reasoning => Stage::Reasoning,
            Phase::Answer => Stage::Answer,
            Phase::ToolCall => Stage::ToolCall,
        };
        self.request.live.set(stage, position.min(self.prompt), self.reply_len());
    }

    /// Adds the policy's own notes.
    pub fn note_policy(&mut self) {
        self.hooks.take_notes().into_iter().for_each(|note| self.note(note));
    }

    /// Whether this is a tool call that the client does not have.
    pub fn is_new_call(&self, piece: &Piece) -> bool {
        let Piece::ToolCall(call) = piece else { return false };
        // A call is parsed again after a rewind of its closing tag.
        !self.progress.tool_calls.iter().any(|sent| sent.id == call.id)
    }

    /// Sends pieces to the client.
    pub fn send_at_once(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            let is_new_call = self.is_new_call(&piece);
            let is_left_out =
                self.request.tool_choice.is_single && !self.progress.tool_calls.is_empty();
            let event = match piece {
                Piece::Reasoning(text) => {
                    self.progress.reasoning += text.len();
                    Event::Reasoning(text)
                }
                Piece::Answer(text) => {
                    self.progress.answer.push_str(&text);
                    Event::Answer(text)
                }
                Piece::ToolCall(_) if !is_new_call => continue,
                Piece::Note(note) => {
                    self.note(note);
                    continue;
                }
                Piece::CallDelta(_) if is_left_out => continue,
                Piece::CallDelta(delta) => {
                    self.rewind_limit = self.tokens.len();
                    if delta.name.is_some() {
                        self.progress.open_calls += 1;
                        self.progress.open_call = Some(delta.id.clone());
                    }
                    Event::CallDelta(delta)
                }
                Piece::ToolCall(call) if is_left_out => {
                    let name = call.function.name;
                    self.note(format!("left out a call of `{name}`: parallel_tool_calls is false"));
                    continue;
                }
                Piece::ToolCall(call) => {
                    if self.progress.open_call.take_if(|id| *id == call.id).is_some() {
                        self.progress.open_calls -= 1;
                    }
                    self.progress.tool_calls.push(call.clone());
                    Event::ToolCall(call)
                }
            };
            // Fails if the client has disconnected; the next step checks that.
            let _ = self.events.send(event);
        }
    }

    /// Ends the request after [`Sequence::complete`]: calls `on-finish`. Leaves the cache as it is.
    pub fn finish(&mut self) {
        let reason = self.progress.end.clone().unwrap_or(FinishReason::Stop);
        // The end of the reply may have completed a call.
        let reason = match reason {
            // The client has part of a call, which it must not run.
            FinishReason::Stop | FinishReason::StopString(_) | FinishReason::ToolCalls
                if self.progress.open_calls > 0 =>
            {
                FinishReason::Length
            }
            FinishReason::Stop | FinishReason::StopString(_)
                if !self.progress.tool_calls.is_empty() =>
            {
                FinishReason::ToolCalls
            }
            reason => reason,
        };
        let summary = self.summary(match &reason {
            FinishReason::Stop | FinishReason::StopString(_) => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool-calls",
            FinishReason::Policy(_) => "policy",
        });
        let (usage, events, request_id) =
            (self.usage(), self.events.clone(), self.request.id.clone());
        let span = self.request.span.clone();
        let entered = span.clone();
        let _entered = entered.0.enter();
        tracing::debug!(
            request_id,
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.cached_tokens,
            reasoning_tokens = usage.reasoning_tokens,
            answer_tokens = usage.answer_tokens,
            drafted = usage.drafted_tokens,
            accepted = usage.accepted_tokens,
            verified = self.progress.verified,
            reason = ?reason,
            notes = ?self.progress.notes,
            "request finished"
        );
        let mut notes = std::mem::take(&mut self.progress.notes);
        self.hooks.finish(summary, move |finished| match finished {
            Ok((of_policy, labels)) => {
                of_policy.into_iter().for_each(|note| add_note(&mut notes, note));
                let _ = events.send(Event::Finished(Finished { reason, usage, notes, labels }));
            }
            Err(error) => {
                span.log(|| tracing::error!(request_id, %error, "request panicked"));
                let _ = events.send(Event::Failed(error));
            }
        });
    }

    /// Ends the request with an error.
    pub fn fail(&mut self, error: Error) {
        let id = &self.request.id;
        self.request.span.log(|| tracing::debug!(request_id = id, %error, "request failed"));
        let (summary, events) = (self.summary("error"), self.take_receivers());
        self.hooks.finish(summary, move |_| fail_all(events, error));
    }

    /// Ends the request after a panic: nothing of the sequence is used any more, its policy included.
    pub fn abandon(&mut self, error: Error) {
        let id = &self.request.id;
        self.request.span.log(|| tracing::error!(request_id = id, %error, "request panicked"));
        fail_all(self.take_receivers(), error);
    }

    /// Ends the request after its client has disconnected.
    pub fn cancel(&mut self) {
        tracing::debug!(
            request_id = self.request.id,
            tokens = self.tokens.len(),
            "request cancelled"
        );
        self.hooks.finish(self.summary("cancelled"), |_| ());
    }

    /// For `on-finish`.
    fn summary(&self, reason: &str) -> Summary {
        Summary {
            reason: reason.into(),
            prompt_tokens: self.prompt as u32,
            reasoning_tokens: self.reply_state.reasoning_tokens,
            answer_tokens: self.reply_state.answer_tokens,
            loops: self.progress.loops,
            tool_calls: self.progress.tool_calls.len() as u32,
        }
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt as u32,
            cached_tokens: self.cached as u32,
            reasoning_tokens: self.reply_state.reasoning_tokens,
            answer_tokens: self.reply_state.answer_tokens,
            drafted_tokens: self.progress.drafted,
            accepted_tokens: self.progress.accepted,
            forced_tokens: self.progress.forced,
            skipped_layers: self.skipped_layers,
        }
    }
}

fn add_note(notes: &mut Vec<String>, note: String) {
    if notes.len() < NOTES {
        notes.push(note);
    } else if notes.len() == NOTES {
        notes.push("further notes dropped".into());
    }
}
