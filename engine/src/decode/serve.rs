//! The engine thread's loop: requests are started, advanced step by step, and ended.
//!
//! What fails for one request ends that request: an error, a panic, a deadline, too little memory. After
//! a panic, nothing of its sequence is used any more, and the prefix cache, which it may have left
//! halfway through a change, is emptied: that costs time only.

use std::time::{Duration, Instant};

use super::choices::start_choices;
use super::{Decoder, memory, preparation};
use crate::activity::MemoryUse;
use crate::device::wired;
use crate::error::{Error, RequestError, catch_panic};
use crate::grammar::Grammars;
use crate::request::Request;
use crate::schedule::queue::{Next, Queue};
use crate::sequence::Sequence;
use crate::sequence::hooks::ENDING;

/// Longest wait for an answer of a policy, after which clients that have disconnected and deadlines are
/// noticed.
const POLL: Duration = Duration::from_millis(5);

impl Decoder {
    /// Serves requests until every handle is dropped or the engine is stopped, then flushes the store.
    pub fn run(mut self) {
        let (queue, preparer) = (self.schedule.queue().clone(), self.policies.preparer().clone());
        // Also after a panic: nobody may wait for this thread then.
        let _ended = Ended { queue: &queue, grammars: &preparer.grammars };
        for lane in preparation::THREADS {
            // Nobody joins it: one that tokenizes a long text ends after it, and an engine that stops does not wait for that.
            let thread = std::thread::Builder::new().name("prepare".into());
            let (queue, preparer) = (queue.clone(), preparer.clone());
            let spawned = thread.spawn(move || preparation::serve(&preparer, &queue, lane));
            spawned.expect("the system has room for another thread");
        }
        self.serve();
        while self.policies.finishing() > 0 {
            self.schedule.queue().wait_unless(|| false, POLL);
        }
        self.costs.save_learned();
        if let Err(error) = self.saved.prefixes().flush() {
            tracing::warn!(%error, "flushing the prefix store failed");
        }
    }

    fn serve(&mut self) {
        let wired = wired::begin();
        loop {
            let nothing_runs = self.schedule.has_no_sequence();
            if nothing_runs && self.policies.finishing() >= self.schedule.max_running() {
                self.schedule.queue().wait_unless(|| false, POLL);
                self.end_unwanted();
                if self.schedule.queue().is_stopping() {
                    self.schedule.stop_awaiting();
                }
                continue;
            }
            self.activity.set_busy(true);
            if nothing_runs && self.schedule.awaiting_count() == 0 {
                let next = match self.schedule.queue().first() {
                    Next::Nothing if self.prefetch_chunk() => continue,
                    Next::Nothing => {
                        self.activity.set_busy(false);
                        let next = wired.while_idle(|| self.schedule.queue().wait_for_next());
                        self.activity.set_busy(true);
                        next
                    }
                    next => next,
                };
                match next {
                    Next::Start(prepared) => self.start_request(*prepared),
                    Next::Resume(_) | Next::MakeRoom | Next::Nothing => continue,
                    Next::End => return,
                }
            }
            if self.schedule.queue().is_stopping() {
                for sequence in &mut self.schedule.take_all() {
                    self.fail(sequence, Error::Stopped);
                }
                self.schedule.stop_awaiting();
            }
            self.wait_for_policies(self.schedule.running());
            self.step();
        }
    }

    /// Waits for a moment if all `running` sequences wait for their policies.
    pub(crate) fn wait_for_policies(&self, running: &[Sequence]) {
        if !running.is_empty() && running.iter().all(|sequence| sequence.is_away()) {
            let is_back = || running.iter().any(|sequence| sequence.is_back());
            self.schedule.queue().wait_unless(is_back, POLL);
        }
    }

    /// Computes one chunk of a prefix while no request runs; false if there is nothing to prefetch.
    fn prefetch_chunk(&mut self) -> bool {
        let context = self.policies.preparer().context;
        let queue = self.schedule.queue();
        let Self { prefetch, network, saved, costs, .. } = self;
        prefetch.compute_chunk(network, saved, costs.bytes(), queue, context)
    }

    /// Runs one step of every sequence: one token, one draft, or one chunk of the prompt.
    pub(super) fn step(&mut self) {
        self.end_unwanted();
        self.start_requests();
        self.make_room_for_step();
        let mut running = self.schedule.take_running();
        if !running.is_empty() {
            self.run_step(&mut running);
        }
        self.schedule.set_running(running);
        // Before those that have ended are dropped: the reply to a prompt may be empty.
        start_choices(self);
        let running = self.schedule.take_running();
        let running = running.into_iter().filter_map(|s| self.unless_ended(s)).collect();
        self.schedule.set_running(running);
        self.report_sequences();
    }

    /// Runs the step of all sequences. If its pass fails, all sequences fail: every cache may be damaged.
    fn run_step(&mut self, running: &mut Vec<Sequence>) {
        let (stage, start) = (running[0].stage(), Instant::now());
        let decodes = running.iter().any(|sequence| sequence.prompt_rows() == 0);
        let length = |running: &[Sequence]| {
            running.iter().map(|sequence| sequence.reply().len()).sum::<usize>()
        };
        let before = length(running);
        if let Err(error) = catch_panic(stage, || self.advance(running)) {
            for mut sequence in running.drain(..) {
                self.fail(&mut sequence, error.shared());
            }
        }
        // A policy may have rewound more than was committed.
        self.activity.add_tokens(length(running).saturating_sub(before));
        if decodes && start.elapsed() > self.schedule.stall() {
            self.activity.update(|activity| activity.stalls += 1);
        }
    }

    /// Publishes the sequences and their bytes to other threads.
    fn report_sequences(&self) {
        let arrays = memory::active().unwrap_or_default();
        let (sequences, memory) = (self.schedule.running(), self.saved.memory());
        let own: u64 = sequences.iter().map(|s| memory.of_cache(s.timeline().cache())).sum();
        let running = own + self.saved.prefixes().shared_bytes();
        let prefix_cache = self.saved.prefixes().bytes();
        let awaiting_policy = sequences.iter().filter(|s| s.is_away()).count();
        let (preempted, awaiting_prefix) =
            (self.schedule.preempted().len(), self.schedule.awaiting_count());
        self.activity.update(|activity| {
            (activity.running, activity.preempted) = (sequences.len(), preempted);
            (activity.awaiting_policy, activity.awaiting_prefix) =
                (awaiting_policy, awaiting_prefix);
            activity.bytes = MemoryUse { arrays, running, prefix_cache, ..activity.bytes };
        });
    }

    /// Finishes a request that has ended; returns one that has not, or whose policy is called on a thread.
    pub(super) fn unless_ended(&mut self, mut sequence: Sequence) -> Option<Sequence> {
        if let Some(error) = sequence.take_failure() {
            self.fail(&mut sequence, error);
            return None;
        }
        if !sequence.has_ended() || sequence.is_away() {
            return Some(sequence);
        }
        match catch_panic(ENDING, || sequence.complete(self.network.text())) {
            Ok(false) => return Some(sequence),
            Ok(true) if self.end(&mut sequence, Sequence::finish) => self.save_reply(&mut sequence),
            Ok(true) => {}
            Err(error) => self.fail(&mut sequence, error),
        }
        None
    }

    /// Ends requests whose client has disconnected or whose deadline has passed.
    fn end_unwanted(&mut self) {
        self.schedule.end_unwanted_awaiting();
        for mut sequence in self.schedule.take_unwanted() {
            if sequence.is_cancelled() {
                self.end(&mut sequence, Sequence::cancel);
            } else {
                let error = RequestError::Deadline { stage: sequence.stage() }.into();
                self.fail(&mut sequence, error);
            }
        }
    }

    /// Ends a request with an error; its sequence is dropped afterwards.
    pub(super) fn fail(&mut self, sequence: &mut Sequence, error: Error) {
        if let Error::Panic { .. } = error {
            self.recover_from(&error);
            sequence.abandon(error);
        } else {
            self.end(sequence, |sequence| sequence.fail(error));
        }
    }

    /// Calls `end` on a sequence that is dropped afterwards; false if that panicked, which fails the
    /// request.
    fn end(&mut self, sequence: &mut Sequence, end: impl FnOnce(&mut Sequence)) -> bool {
        let ended = catch_panic(ENDING, || {
            end(sequence);
            Ok(())
        });
        let ok = ended.is_ok();
        if let Err(error) = ended {
            self.fail(sequence, error);
        }
        ok
    }

    /// Saves the state at the end of a reply, and what was learned from it.
    fn save_reply(&mut self, sequence: &mut Sequence) {
        let saved = catch_panic(ENDING, || {
            self.speculation.keep_learned_stats(sequence);
            if let Some(retention) = sequence.reply_retention() {
                self.saved.save(sequence, retention);
                self.prefetch.expect_turn(self.schedule.queue(), sequence, retention);
            }
            Ok(())
        });
        if let Err(error) = saved {
            let Request { id, span, .. } = sequence.request();
            span.log(|| tracing::error!(id, %error, "saving state failed"));
            self.recover_from(&error);
        }
    }

    /// Empties the prefix cache after a panic, which may have left it halfway through a change.
    pub(super) fn recover_from(&mut self, error: &Error) {
        self.saved.recover_from(error);
    }
}

/// Marks the queue as ended when it is dropped, after a panic too, and ends the waits of the threads that prepare
/// requests.
struct Ended<'a> {
    queue: &'a Queue,
    grammars: &'a Grammars,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.grammars.end();
        self.queue.end();
    }
}
