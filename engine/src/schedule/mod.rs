//! Scheduling: who runs next, how much of it, and within how much memory.
//!
//! [`Schedule`] has the sequences. [`queue`] has the requests that have not started, and their order. [`turns`] decides which of them, of
//! the preempted sequences and of those that wait for a prefix may start; [`memory`], [`saved`] and [`preempt`] whether there is
//! room; [`plan`] which rows of prompt run in a step, and [`debt`] what they have taken from the streams.

pub mod await_prefix;
pub mod debt;
pub mod memory;
pub mod plan;
pub mod preempt;
pub mod queue;
pub mod saved;
pub mod turns;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use self::await_prefix::AwaitingPrefix;
use self::debt::Debt;
use self::memory::PassBytes;
use self::plan::{Budget, PassCosts, Pending};
use self::queue::Queue;
use self::saved::SavedState;
use crate::sequence::Sequence;

/// All requests of an engine: those in the queue, those that wait for a prefix, running and preempted sequences.
pub struct Schedule {
    queue: Arc<Queue>,
    /// Running sequences, in the order of admission.
    running: Vec<Sequence>,
    /// Preempted sequences, in the order in which they were preempted. Those of one profile resume in this order.
    preempted: VecDeque<Sequence>,
    /// Requests that wait for a prefix which a running sequence computes.
    awaiting: Vec<AwaitingPrefix>,
    /// Number of sequences so far.
    started: u64,
    /// Most sequences that run at the same time; further requests wait in the queue.
    max_running: usize,
    /// Most rows of prompt in a pass.
    chunk: usize,
    /// The longest time of a pass beside streams; see [`Budget`].
    stall: Duration,
    debt: Debt,
}

/// What decides besides the sequences whether another one may run.
#[derive(Clone, Copy)]
pub struct Resources<'a> {
    /// The prefix cache, and the memory that is left.
    pub saved: &'a SavedState,
    /// Bytes of a pass.
    pub bytes: &'a PassBytes,
    /// Calls of `on-finish` that have not ended; each counts as a running sequence.
    pub finishing: usize,
}

impl Schedule {
    /// No sequences, and the requests of `queue`.
    pub fn new(queue: Arc<Queue>, max_running: usize, chunk: usize, stall: Duration) -> Self {
        Self {
            queue,
            running: Vec::new(),
            preempted: VecDeque::new(),
            awaiting: Vec::new(),
            started: 0,
            max_running,
            chunk,
            stall,
            debt: Debt::default(),
        }
    }

    /// The requests that have not started.
    pub fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    /// Running sequences, in the order of admission.
    pub fn running(&self) -> &[Sequence] {
        &self.running
    }

    /// Running sequences, to be changed.
    pub fn running_mut(&mut self) -> &mut Vec<Sequence> {
        &mut self.running
    }

    /// Takes the running sequences for a step, which gives them back ([`Schedule::set_running`]).
    pub fn take_running(&mut self) -> Vec<Sequence> {
        std::mem::take(&mut self.running)
    }

    /// Replaces the running sequences after a step.
    pub fn set_running(&mut self, running: Vec<Sequence>) {
        self.running = running;
    }

    /// Adds a sequence that runs from now on.
    pub fn push(&mut self, sequence: Sequence) {
        self.running.push(sequence);
    }

    /// Preempted sequences, in the order in which they resume.
    pub fn preempted(&self) -> &VecDeque<Sequence> {
        &self.preempted
    }

    /// Adds a preempted sequence, which resumes after those of its profile that were preempted before.
    pub fn push_preempted(&mut self, sequence: Sequence) {
        self.preempted.push_back(sequence);
    }

    /// Number of requests that wait for a prefix.
    pub fn awaiting_count(&self) -> usize {
        self.awaiting.len()
    }

    /// Returns true if no sequence is running or preempted.
    pub fn has_no_sequence(&self) -> bool {
        self.running.is_empty() && self.preempted.is_empty()
    }

    /// Takes all sequences, running and preempted.
    pub fn take_all(&mut self) -> Vec<Sequence> {
        self.running.drain(..).chain(self.preempted.drain(..)).collect()
    }

    /// Takes the sequences whose client has disconnected or whose deadline has passed.
    pub fn take_unwanted(&mut self) -> Vec<Sequence> {
        let is_wanted = |sequence: &Sequence| !sequence.is_cancelled() && !sequence.is_late();
        let (running, unwanted): (Vec<_>, Vec<_>) = self.running.drain(..).partition(is_wanted);
        let (preempted, also): (VecDeque<_>, VecDeque<_>) =
            self.preempted.drain(..).partition(is_wanted);
        (self.running, self.preempted) = (running, preempted);
        unwanted.into_iter().chain(also).collect()
    }

    /// The number of a new sequence.
    pub fn next_number(&mut self) -> u64 {
        self.started += 1;
        self.started
    }

    /// Most sequences that run at the same time.
    pub fn max_running(&self) -> usize {
        self.max_running
    }

    /// Most rows of prompt in a pass.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Replaces the most rows of prompt in a pass, and returns the number before.
    pub fn set_chunk(&mut self, chunk: usize) -> usize {
        std::mem::replace(&mut self.chunk, chunk)
    }

    /// The longest time of a pass beside streams.
    pub fn stall(&self) -> Duration {
        self.stall
    }

    /// What profiles owe the streams.
    pub fn debt(&self) -> Debt {
        self.debt.clone()
    }

    /// Replaces what profiles owe the streams.
    pub fn set_debt(&mut self, debt: Debt) {
        self.debt = debt;
    }

    /// Counts a pass that took `seconds`, with rows of prompt of these profiles, beside streams or without.
    pub fn count_pass(
        &mut self,
        costs: &PassCosts,
        prompts: &[(String, usize)],
        seconds: f32,
        has_streams: bool,
    ) {
        self.debt.count(costs, prompts, seconds, has_streams);
    }

    /// The rows of prompt that each of `running` runs in this step.
    pub fn plan_prefill(&self, running: &[Sequence], costs: &PassCosts) -> Vec<usize> {
        let profile = |sequence: &Sequence| {
            let is_of = |other: &Sequence| other.request().profile == sequence.request().profile;
            running.iter().position(is_of).unwrap_or_default()
        };
        let pending = |sequence: &Sequence| Pending {
            // Others wait for a part of the prompt only.
            rows: sequence.prompt_rows().min(self.awaited_rows(sequence).unwrap_or(usize::MAX)),
            decodes: sequence.decodes(),
            may_wait: sequence.is_away() || sequence.has_ended(),
            passed_over: sequence.passed_over(),
            profile: profile(sequence),
            owes: self.debt.is_of(&sequence.request().profile),
        };
        let pending: Vec<Pending> = running.iter().map(pending).collect();
        let runs =
            |profile: &str| running.iter().any(|sequence| sequence.request().profile == profile);
        let budget =
            Budget { stall: self.stall, chunk: self.chunk, is_awaited: self.queue.has_other(runs) };
        plan::prefill_rows(&pending, costs, budget)
    }
}

#[cfg(test)]
impl Schedule {
    /// Replaces the most sequences that run at the same time.
    pub fn set_max_running(&mut self, most: usize) {
        self.max_running = most;
    }
}
