//! One request on its way: its tokens, its cache, its policy, and what it has said so far.
//!
//! Holds no arrays but its cache and snapshots of it, the token that was drawn and not read yet with
//! what it was drawn from, and what its drafts remember. It never runs the model: [`super::Decoder`]
//! asks what rows it needs next, runs them, and commits what was drawn.
//!
//! What the policy's actions do is in [`super::apply`] and [`super::rewind`], what becomes of calls
//! of tools in [`super::tool_calls`].

use std::collections::VecDeque;

use mlx_rs::Array;
use mlx_rs::ops::concatenate;
use tokio::sync::mpsc::UnboundedSender;

use super::adjust::Adjust;
use super::draft::Draft;
use super::governor::{Choice, Costs, Governor};
use super::loops::Detector;
use super::rewind::{Floor, Said, Standing};
use super::speculate::Drafted;
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::policy::{LoopReport, Policy, Summary};
use crate::prefix::Retention;
use crate::request::{Event, FinishReason, Finished, Message, Request, ToolCall, Usage};
use crate::text::{Phase, Piece, Text};

/// Most notes of one reply, and one that says that there were more.
const NOTES: usize = 256;

/// One request being decoded.
pub struct Sequence {
    /// What was asked.
    pub request: Request,
    /// Whether the prompt was rendered for a thought, where the model can think.
    pub thinking: Option<bool>,
    /// Where its events go; closed when the client hangs up. Unbounded, so that a slow reader
    /// cannot hold up others: it fills at most with one answer, which `limits` bounds.
    pub events: UnboundedSender<Event>,
    /// Prompt and output, committed. Those from `cache.position` on have not run yet.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt.
    pub prompt: usize,
    /// How many of these came out of the store.
    pub cached: usize,
    /// What the model remembers of the tokens that have run.
    pub cache: Cache,
    /// Positions of the prompt at which state is saved, those ahead.
    pub anchors: VecDeque<(usize, Retention)>,
    /// For how long the state at the reply's end is kept, where it is.
    pub reply_kept: Option<Retention>,
    /// Snapshots of it, ascending.
    pub standings: Vec<Standing>,
    /// Tokens from here on are others than those that `cache` has seen: it is to go back.
    pub stale: Option<usize>,
    /// The next token: drawn, not committed.
    pub drawn: Option<Drawn>,
    /// Logits [1, V], and the position whose token is drawn from them.
    pub row: Option<(usize, Array)>,
    /// Guess further tokens.
    pub drafts: Vec<Box<dyn Draft>>,
    /// Decides which of them does; none where speculation is off.
    pub governor: Option<Governor>,
    /// What this turn's pass verifies.
    pub drafted: Option<Drafted>,
    /// Plain steps in a row, each queued behind the one before.
    pub queued: u32,
    /// Layers whose feed-forward block is left out, for the usage.
    pub skipped_layers: u32,
    /// How tokens are drawn.
    pub adjust: Adjust,
    /// Seed of the draws.
    pub seed: u64,
    /// What the tokens of the reply say.
    pub said: Said,
    /// Where the current phase began: the reply is rewound no further.
    pub floor: Floor,
    /// Nor further than this, where a call that the client has stands behind the floor.
    pub kept: usize,
    /// Steers this request.
    pub policy: Box<dyn Policy>,
    /// Finds loops in what is said.
    pub detector: Option<Detector>,
    /// Bounds of what may be said.
    pub limits: Limits,
    /// What was said and done so far.
    pub progress: Progress,
}

/// Bounds of one request.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Tokens of the thought.
    pub think: u32,
    /// Tokens of the answer.
    pub answer: u32,
    /// Tokens of prompt, thought and answer together.
    pub context: usize,
    /// The policy is called every this many tokens, 0 on events alone.
    pub every: u32,
    /// Tokens of the reply between two snapshots of the cache; 0 takes none.
    pub checkpoint_every: usize,
}

/// What one request has said so far.
#[derive(Debug, Default)]
pub struct Progress {
    pub(super) injected: usize,
    pub(super) rewound: usize,
    pub(super) repairs: u32,
    pub(super) loops: u32,
    /// Bytes of the thought that the client has been told.
    pub(super) reasoning: usize,
    /// What the client has been told: the message that it will send back.
    pub(super) answer: String,
    pub(super) tool_calls: Vec<ToolCall>,
    /// What the last token said, where that is a call which is still to be judged.
    pub(super) waiting: Vec<Piece>,
    drafted: u32,
    accepted: u32,
    /// Passes that verified drafts.
    verified: u32,
    /// Tokens, the prompt included, that the policy has seen or put in itself.
    pub(super) seen: usize,
    end: Option<FinishReason>,
    failure: Option<Error>,
    /// What the policy did, in words.
    notes: Vec<String>,
}

impl Progress {
    /// Nothing said yet behind a prompt of `seen` tokens; `notes` are what the policy did while it
    /// planned.
    pub fn new(notes: Vec<String>, seen: usize) -> Self {
        Self { notes, seen, ..Self::default() }
    }
}

/// A token that was drawn.
#[derive(Debug, Clone)]
pub enum Drawn {
    /// u32 [1], perhaps still being computed, not read.
    Computing(Array),
    /// Read already, as verifying drafts has to.
    Known(u32),
}

impl Drawn {
    /// Waits for the token.
    ///
    /// # Errors
    /// [`Error::Array`] when computing it fails.
    pub fn read(self) -> Result<u32> {
        match self {
            Self::Computing(token) => {
                token.try_item_exact::<u32>().map_err(|e| Error::Array(e.to_string()))
            }
            Self::Known(token) => Ok(token),
        }
    }
}

/// Rows that a sequence needs to run next.
pub enum Rows {
    /// Tokens that are known: a chunk of the prompt, or text that a policy injected.
    Known(Vec<u32>),
    /// The token that was drawn last, u32 [1].
    Drawn(Array),
    /// The last committed token and drafts behind it, u32 [m + 1].
    Drafted(Array),
    /// None: the drawn token is the last, whatever it is.
    None,
}

impl Sequence {
    /// What to run next, at most `chunk` rows of it.
    ///
    /// # Errors
    /// [`Error::Array`] when drafts cannot be joined.
    pub fn next_rows(&self, chunk: usize) -> Result<Rows> {
        let at = self.cache.position;
        if self.has_ended() {
            return Ok(Rows::None);
        }
        if let Some(drafted) = &self.drafted {
            let last = Array::from_slice(&self.tokens[at..], &[1]);
            return Ok(Rows::Drafted(concatenate(&[&last, &drafted.tokens], 0)?));
        }
        if at < self.tokens.len() {
            let anchor = self.anchors.front().map_or(usize::MAX, |&(at, _)| at);
            let floor = if at < self.floor.at { self.floor.at } else { usize::MAX };
            let stop = if self.takes_snapshots() { anchor.min(floor) } else { anchor };
            let end = self.tokens.len().min(at + chunk).min(stop);
            return Ok(Rows::Known(self.tokens[at..end].to_vec()));
        }
        match &self.drawn {
            Some(Drawn::Computing(token)) if !self.ends_with_next() => {
                Ok(Rows::Drawn(token.clone()))
            }
            _ => Ok(Rows::None),
        }
    }

    /// What drafts next, if anything should; `unread` as for [`Governor::choose`].
    pub fn choose(&self, costs: &Costs, unread: bool) -> Option<Choice> {
        // Verified rows are drawn alike; what lasts for a few tokens is drawn one by one.
        if self.adjust.is_passing() {
            return None;
        }
        let context = self.limits.context.saturating_sub(self.tokens.len() + 1);
        let answer = self.limits.answer.saturating_sub(self.said.answer_tokens + 1) as usize;
        let thinking = self.said.reply.phase() == Phase::Think;
        let room = if thinking { context } else { context.min(answer) };
        self.governor.as_ref()?.choose(costs, &self.drafts, room, unread)
    }

    /// Shows the drafts what the model said of rows from `position` on.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX rejects a slice.
    pub fn observe(&mut self, hidden: &Array, position: usize) -> Result<()> {
        self.drafts.iter_mut().try_for_each(|draft| draft.observe(hidden, position))
    }

    /// What the client has been told, as it will send it back: without the thought.
    pub fn reply_message(&self) -> Message {
        Message {
            role: "assistant".into(),
            content: self.progress.answer.clone(),
            tool_calls: self.progress.tool_calls.clone(),
            ..Message::default()
        }
    }

    /// Tokens drafted, tokens accepted, and passes that verified them.
    pub fn drafted_so_far(&self) -> [usize; 3] {
        let Progress { drafted, accepted, verified, .. } = self.progress;
        [drafted, accepted, verified].map(|count| count as usize)
    }

    /// `accepted` of `drafted` tokens were right.
    pub fn verified(&mut self, drafted: usize, accepted: usize) {
        self.progress.drafted += drafted as u32;
        self.progress.accepted += accepted as u32;
        self.progress.verified += 1;
    }

    /// Whether the next token is the last one in any case, so that running it would be in vain.
    fn ends_with_next(&self) -> bool {
        let full = self.tokens.len() + 1 >= self.limits.context;
        full || (self.said.reply.phase() != Phase::Think
            && self.said.answer_tokens + 1 >= self.limits.answer)
    }

    /// Whether all committed tokens have run, so that the last row's logits draw the next one.
    pub fn is_caught_up(&self) -> bool {
        self.cache.position >= self.tokens.len()
    }

    /// Whether the client has hung up.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// Whether the request has come to its end.
    pub fn has_ended(&self) -> bool {
        self.progress.end.is_some() || self.progress.failure.is_some()
    }

    /// What ended the request, where that was an error.
    pub fn take_failure(&mut self) -> Option<Error> {
        self.progress.failure.take()
    }

    /// Commits a token that the model drew: passes it on, asks the policy where there is reason
    /// to, and applies what it answers.
    ///
    /// Text that goes in instead of the model's own next token is committed here too; the token
    /// drawn in the meantime is dropped, like a draft that was rejected. A policy that fails closed
    /// ends the request.
    pub fn commit_drawn(&mut self, token: u32, text: &Text) {
        if let Err(error) = self.take_drawn(token, text) {
            self.progress.failure = Some(error);
        }
    }

    fn take_drawn(&mut self, token: u32, text: &Text) -> Result<()> {
        if !self.adjust.draw(token) {
            // The cache may have seen it already.
            self.stale = Some(self.tokens.len());
            let reason = "every token there is is banned";
            self.note(format!("stopped after {} tokens: {reason}", self.replied()));
            self.end(FinishReason::Policy(reason.into()));
            return Ok(());
        }
        if text.eos().contains(&token) {
            return self.end_turn(token, text);
        }
        let mut loop_found = self.commit(token);
        if self.judge(text)? {
            loop_found = None;
        }
        if self.said.reply.stopped() && !self.has_ended() {
            self.end(FinishReason::Stop);
        }
        self.check_limits();
        if !self.has_ended() {
            self.ask_policy(loop_found, text)?;
            self.check_limits();
        }
        Ok(())
    }

    /// Adds one token to what was said; returns a loop if it completes one. Calls that it completes
    /// wait to be judged.
    pub(super) fn commit(&mut self, token: u32) -> Option<LoopReport> {
        let before = self.said.reply.phase();
        self.tokens.push(token);
        self.drafts.iter_mut().for_each(|draft| draft.read(&self.tokens));
        let pieces = self.said.push(token);
        if pieces.iter().any(|piece| self.is_new_call(piece)) {
            self.progress.waiting = pieces;
        } else {
            self.send(pieces);
        }
        let now = self.said.reply.phase();
        let parted = now != before && (before == Phase::Think || now == Phase::Think);
        // A call that waits may yet be taken back.
        if parted && self.progress.waiting.is_empty() {
            self.set_floor();
        }
        let detector = self.detector.as_mut()?;
        if now != before {
            detector.reset();
            return None;
        }
        detector.push(token)
    }

    /// Tokens of the reply so far.
    pub(super) fn replied(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    fn check_limits(&mut self) {
        let answered = self.said.answer_tokens >= self.limits.answer;
        let thinking = self.said.reply.phase() == Phase::Think;
        if !self.has_ended()
            && ((answered && !thinking) || self.tokens.len() >= self.limits.context)
        {
            self.end(FinishReason::Length);
        }
    }

    pub(super) fn end(&mut self, reason: FinishReason) {
        self.progress.end = Some(reason);
    }

    /// Remarks on what the policy did.
    pub(super) fn note(&mut self, note: String) {
        let notes = &mut self.progress.notes;
        if notes.len() < NOTES {
            notes.push(note);
        } else if notes.len() == NOTES {
            notes.push("and more".into());
        }
    }

    /// The policy's remarks about itself.
    pub(super) fn note_policy(&mut self) {
        self.policy.take_notes().into_iter().for_each(|note| self.note(note));
    }

    /// Whether this is a call that the client does not have.
    pub(super) fn is_new_call(&self, piece: &Piece) -> bool {
        let Piece::ToolCall(call) = piece else { return false };
        // A call is read again where its closing tag was taken back.
        !self.progress.tool_calls.iter().any(|sent| sent.id == call.id)
    }

    /// Tells the client.
    pub(super) fn send(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            let is_new_call = self.is_new_call(&piece);
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
                Piece::ToolCall(call) => {
                    self.progress.tool_calls.push(call.clone());
                    Event::ToolCall(call)
                }
            };
            // A closed channel is a client that hung up; the next turn sees to that.
            let _ = self.events.send(event);
        }
    }

    /// Says the last words and tells the policy; the cache stays as it is.
    pub fn finish(&mut self) {
        let pieces = self.said.reply.finish();
        match self.judge_last(pieces) {
            Ok(pieces) => self.send(pieces),
            Err(error) => return self.fail(error),
        }
        let reason = self.progress.end.clone().unwrap_or(FinishReason::Stop);
        // Only now are all calls known: the end of the turn completes one, too.
        let reason = match reason {
            FinishReason::Stop if !self.progress.tool_calls.is_empty() => FinishReason::ToolCalls,
            reason => reason,
        };
        self.tell_policy(match &reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool-calls",
            FinishReason::Policy(_) => "policy",
        });
        let usage = self.usage();
        tracing::debug!(
            request_id = self.request.id,
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.cached_tokens,
            reasoning_tokens = usage.reasoning_tokens,
            answer_tokens = usage.answer_tokens,
            drafted = usage.drafted_tokens,
            accepted = usage.accepted_tokens,
            verified = self.progress.verified,
            reason = ?reason,
            notes = ?self.progress.notes,
            "finished"
        );
        let notes = std::mem::take(&mut self.progress.notes);
        let _ = self.events.send(Event::Finished(Finished { reason, usage, notes }));
    }

    /// Ends the request with an error.
    pub fn fail(&mut self, error: Error) {
        tracing::debug!(request_id = self.request.id, %error, "failed");
        self.tell_policy("error");
        let _ = self.events.send(Event::Failed(error));
    }

    /// Ends a request whose client hung up.
    pub fn cancel(&mut self) {
        tracing::debug!(request_id = self.request.id, tokens = self.tokens.len(), "cancelled");
        self.tell_policy("cancelled");
    }

    fn tell_policy(&mut self, reason: &str) {
        let ended = self.policy.on_finish(&Summary {
            reason: reason.into(),
            prompt_tokens: self.prompt as u32,
            think_tokens: self.said.think_tokens,
            answer_tokens: self.said.answer_tokens,
            loops: self.progress.loops,
            tool_calls: self.progress.tool_calls.len() as u32,
        });
        if let Err(error) = ended {
            self.note(error.to_string());
        }
        self.note_policy();
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt as u32,
            cached_tokens: self.cached as u32,
            reasoning_tokens: self.said.think_tokens,
            answer_tokens: self.said.answer_tokens,
            drafted_tokens: self.progress.drafted,
            accepted_tokens: self.progress.accepted,
            skipped_layers: self.skipped_layers,
        }
    }
}
