//! Requests that wait for a prefix which a running sequence computes, and then share it.
//!
//! Agents start others with the same long instructions, all at once. Each would compute them, and hold them in memory. So a
//! request whose prompt begins like one that is being computed waits until that sequence has saved the common prefix, and
//! resumes from there. If the sequence ends before, or is preempted, the request no longer waits for it.

use std::time::Instant;

use super::Schedule;
use super::saved::SavedState;
use crate::error::{Error, RequestError};
use crate::job::fail_all;
use crate::sequence::Sequence;
use crate::sequence::prepare::Prepared;

/// Distance from the end of the common prefix at which another save point of the sequence will do.
const NEAR: usize = 64;

/// A request that waits.
pub struct AwaitingPrefix {
    pub prepared: Prepared,
    /// Since when it waits, by the queue's stamp.
    pub since: u64,
    /// The number of the sequence that computes the prefix.
    computed_by: u64,
    /// Tokens after which that sequence saves its state.
    tokens: usize,
}

impl AwaitingPrefix {
    fn fail(self, error: Error) {
        fail_all(self.prepared.channels(), error);
    }
}

impl Schedule {
    /// Lets a request wait for the first `tokens` tokens of the running sequence at `at`.
    pub fn await_prefix(&mut self, prepared: Prepared, at: usize, tokens: usize) {
        let since = self.queue.stamp();
        let sequence = &mut self.running[at];
        sequence.timeline_mut().add_save_point(tokens);
        let computed_by = sequence.number();
        self.awaiting.push(AwaitingPrefix { prepared, since, computed_by, tokens });
    }

    /// Indices of the requests whose prefix is computed no longer: they may start.
    pub fn due_requests(&self) -> impl Iterator<Item = usize> {
        let is_due = |waiting: &AwaitingPrefix| !self.running.iter().any(|s| computes(s, waiting));
        let waiting = self.awaiting.iter().enumerate();
        waiting.filter(move |(_, waiting)| is_due(waiting)).map(|(at, _)| at)
    }

    /// Lets the requests that may start share the KV of sequences that have computed their prefixes.
    pub fn share_computed_prefixes(&mut self, saved: &mut SavedState) {
        for at in self.due_requests().collect::<Vec<_>>() {
            let waiting = &self.awaiting[at];
            let has_computed = |s: &&mut Sequence| {
                s.number() == waiting.computed_by && s.timeline().position() >= waiting.tokens
            };
            if let Some(sequence) = self.running.iter_mut().find(has_computed) {
                saved.share_prefix(sequence);
            }
        }
    }

    /// The sequence that will have computed most of the prompt that is not known yet, if that is worth waiting for, and the
    /// number of tokens.
    pub fn computing_prefix_of(
        &self,
        prepared: &Prepared,
        saved: &SavedState,
    ) -> Option<(usize, usize)> {
        if prepared.request.needs_whole_prompt() {
            return None;
        }
        let common =
            |(at, sequence): (usize, &Sequence)| Some((at, will_save(sequence, &prepared.prompt)?));
        let (at, tokens) =
            self.running.iter().enumerate().filter_map(common).max_by_key(|&(_, n)| n)?;
        let is_worth =
            saved.is_worth_awaiting(&prepared.prompt, self.running[at].timeline().cache(), tokens);
        is_worth.then_some((at, tokens))
    }

    /// Rows until the first position of the prompt of `sequence` that a request waits for; `None` if none does.
    pub fn awaited_rows(&self, sequence: &Sequence) -> Option<usize> {
        let awaited = self.awaiting.iter().filter(|waiting| computes(sequence, waiting));
        awaited.map(|waiting| waiting.tokens - sequence.timeline().position()).min()
    }

    /// Ends the waiting requests whose client has disconnected or whose deadline has passed.
    pub fn end_unwanted_awaiting(&mut self) {
        self.awaiting.retain(|waiting| !waiting.prepared.events.is_closed());
        let now = Instant::now();
        let is_late = |waiting: &mut AwaitingPrefix| {
            waiting.prepared.request.deadline.is_some_and(|deadline| now >= deadline)
        };
        for late in self.awaiting.extract_if(.., is_late).collect::<Vec<_>>() {
            late.fail(RequestError::Deadline { stage: "waiting" }.into());
        }
    }

    /// Ends all waiting requests: the engine stops.
    pub fn stop_awaiting(&mut self) {
        self.awaiting.drain(..).for_each(|waiting| waiting.fail(Error::Stopped));
    }
}

/// Whether a sequence still computes the prefix that a request waits for.
fn computes(sequence: &Sequence, waiting: &AwaitingPrefix) -> bool {
    sequence.number() == waiting.computed_by
        && sequence.timeline().position() < waiting.tokens
        && !sequence.has_ended()
        && !sequence.is_away()
}

/// The number of tokens after which the prompt of a sequence, which is being computed, can be saved for a request with this
/// prompt.
fn will_save(sequence: &Sequence, prompt: &[u32]) -> Option<usize> {
    // A policy may permit some save points only.
    if sequence.has_ended() || sequence.is_away() || !sequence.saves_anywhere() {
        return None;
    }
    let timeline = sequence.timeline();
    let pairs = timeline.tokens()[..timeline.prompt()].iter().zip(&prompt[..prompt.len() - 1]);
    let common = pairs.take_while(|(a, b)| a == b).count();
    let points = timeline.save_points();
    let near = points.filter(|at| *at <= common && common - at < NEAR).max();
    let tokens = near.unwrap_or(common);
    (tokens > timeline.position()).then_some(tokens)
}
