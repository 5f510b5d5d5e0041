//! The engine thread's loop: requests are started, advanced step by step, and ended.
//!
//! What fails for one request ends that request: an error, a panic, a deadline, too little memory. After
//! a panic, nothing of its sequence is used any more, and the prefix cache, which it may have left
//! halfway through a change, is emptied: that costs time only.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::preparation;
use super::{Decoder, memory};
use crate::activity::MemoryUse;
use crate::error::{Error, RequestError, catch_panic};
use crate::grammar::Grammars;
use crate::request::{Event, Request};
use crate::schedule::queue::{Next, Queue};
use crate::sequence::Sequence;
use crate::sequence::expected::Expected;
use crate::sequence::hooks::ENDING;
use crate::sequence::prepare::{Prepared, log_refused};

/// Longest wait for an answer of a policy, after which clients that have disconnected and deadlines are
/// noticed.
const POLL: Duration = Duration::from_millis(5);

impl Decoder {
    /// Serves requests until every handle is dropped or the engine is stopped, then flushes the store.
    pub fn run(mut self) {
        let (queue, preparer) = (self.queue.clone(), self.preparer.clone());
        std::thread::scope(|scope| {
            // Also after a panic: nobody may wait for this thread then.
            let _ended = Ended { queue: &queue, grammars: &preparer.grammars };
            for lane in preparation::THREADS {
                let thread = std::thread::Builder::new().name("prepare".into());
                let (queue, preparer) = (&queue, &preparer);
                let spawned =
                    thread.spawn_scoped(scope, move || preparation::serve(preparer, queue, lane));
                spawned.expect("the system has room for another thread");
            }
            self.serve();
            while self.hook_threads.finishing() > 0 {
                self.queue.wait_unless(|| false, POLL);
            }
            self.machine.learned(self.costs);
            if let Err(error) = self.prefixes.flush() {
                tracing::warn!(%error, "flushing the prefix store failed");
            }
        });
    }

    fn serve(&mut self) {
        loop {
            let nothing_runs = self.sequences.is_empty() && self.preempted.is_empty();
            if nothing_runs && self.hook_threads.finishing() >= self.max_running {
                self.queue.wait_unless(|| false, POLL);
                self.end_unwanted();
                if self.queue.is_stopping() {
                    self.stop_awaiting();
                }
                continue;
            }
            if nothing_runs && self.awaiting_prefix.is_empty() {
                let next = match self.queue.first() {
                    Next::Nothing if self.prefetch_chunk() => continue,
                    Next::Nothing => self.queue.wait_for_next(),
                    next => next,
                };
                match next {
                    Next::Start(prepared) => self.start_request(*prepared),
                    Next::Resume(_) | Next::MakeRoom | Next::Nothing => continue,
                    Next::End => return,
                }
            }
            if self.queue.is_stopping() {
                for sequence in &mut self.take_all() {
                    self.fail(sequence, Error::Stopped);
                }
                self.stop_awaiting();
            }
            self.wait_for_policies(&self.sequences);
            self.step();
        }
    }

    /// Waits for a moment if all `running` sequences wait for their policies.
    pub(crate) fn wait_for_policies(&self, running: &[Sequence]) {
        if !running.is_empty() && running.iter().all(|sequence| sequence.hooks.is_away()) {
            let is_back = || running.iter().any(|sequence| sequence.hooks.is_back());
            self.queue.wait_unless(is_back, POLL);
        }
    }

    /// Whether another sequence may run. Those whose `on-finish` is being called count, but one may always run:
    /// the loop must not spin while threads finish others.
    pub(crate) fn has_slot(&self) -> bool {
        let running = self.sequences.len();
        running == 0 || running + self.hook_threads.finishing() < self.max_running
    }

    /// All sequences, running and preempted.
    fn take_all(&mut self) -> Vec<Sequence> {
        self.sequences.drain(..).chain(self.preempted.drain(..)).collect()
    }

    pub(crate) fn start_request(&mut self, prepared: Prepared) {
        self.interrupt_prefetch();
        let Request { id, span, .. } = &prepared.request;
        let (id, span, events) = (id.clone(), span.clone(), prepared.events.clone());
        match catch_panic("being admitted", || self.admit(prepared)) {
            Ok(sequence) => self.sequences.push(sequence),
            Err(error) => {
                span.log(|| log_refused(&id, &error));
                self.recover_from(&error);
                let _ = events.send(Event::Failed(error));
            }
        }
    }

    /// Runs one step of every sequence: one token, one draft, or one chunk of the prompt.
    pub(crate) fn step(&mut self) {
        self.end_unwanted();
        self.start_requests();
        self.make_room_for_step();
        let mut running = std::mem::take(&mut self.sequences);
        if !running.is_empty() {
            self.run_step(&mut running);
        }
        self.sequences = running;
        // Before those that have ended are dropped: the reply to a prompt may be empty.
        self.start_choices();
        let running = std::mem::take(&mut self.sequences);
        self.sequences = running.into_iter().filter_map(|s| self.unless_ended(s)).collect();
        self.report_sequences();
    }

    /// Runs the step of all sequences. If their pass fails, so do all: every cache may be damaged.
    fn run_step(&mut self, running: &mut Vec<Sequence>) {
        let (stage, start) = (running[0].stage(), Instant::now());
        let decodes = running.iter().any(|sequence| sequence.prompt_rows() == 0);
        let length = |running: &[Sequence]| running.iter().map(Sequence::reply_len).sum::<usize>();
        let before = length(running);
        if let Err(error) = catch_panic(stage, || self.advance(running)) {
            for mut sequence in running.drain(..) {
                self.fail(&mut sequence, error.shared());
            }
        }
        // A policy may have rewound more than was committed.
        self.activity.add_tokens(length(running).saturating_sub(before));
        if decodes && start.elapsed() > self.stall {
            self.activity.update(|activity| activity.stalls += 1);
        }
    }

    /// Publishes the sequences and their bytes to other threads.
    fn report_sequences(&self) {
        let arrays = memory::active().unwrap_or_default();
        let own: u64 = self.sequences.iter().map(|s| self.memory.of_cache(&s.cache)).sum();
        let running = own + self.prefixes.shared_bytes();
        let prefix_cache = self.prefixes.bytes();
        let awaiting_policy = self.sequences.iter().filter(|s| s.hooks.is_away()).count();
        let awaiting_prefix = self.awaiting_prefix.len();
        self.activity.update(|activity| {
            (activity.running, activity.preempted) = (self.sequences.len(), self.preempted.len());
            (activity.awaiting_policy, activity.awaiting_prefix) =
                (awaiting_policy, awaiting_prefix);
            activity.bytes = MemoryUse { arrays, running, prefix_cache, ..activity.bytes };
        });
    }

    /// Finishes a request that has ended; returns one that has not, or whose policy is called on a thread.
    pub(crate) fn unless_ended(&mut self, mut sequence: Sequence) -> Option<Sequence> {
        if let Some(error) = sequence.take_failure() {
            self.fail(&mut sequence, error);
            return None;
        }
        if !sequence.has_ended() || sequence.hooks.is_away() {
            return Some(sequence);
        }
        match catch_panic(ENDING, || sequence.complete(&self.text)) {
            Ok(false) => return Some(sequence),
            Ok(true) if self.end(&mut sequence, Sequence::finish) => self.save_reply(&mut sequence),
            Ok(true) => {}
            Err(error) => self.fail(&mut sequence, error),
        }
        None
    }

    /// Ends requests whose client has disconnected or whose deadline has passed.
    fn end_unwanted(&mut self) {
        self.end_unwanted_awaiting();
        let is_wanted = |sequence: &Sequence| !sequence.is_cancelled() && !sequence.is_late();
        let (running, unwanted): (Vec<_>, Vec<_>) = self.sequences.drain(..).partition(is_wanted);
        let (preempted, also): (VecDeque<_>, VecDeque<_>) =
            self.preempted.drain(..).partition(is_wanted);
        (self.sequences, self.preempted) = (running, preempted);
        for mut sequence in unwanted.into_iter().chain(also) {
            if sequence.is_cancelled() {
                self.end(&mut sequence, Sequence::cancel);
            } else {
                let error = RequestError::Deadline { stage: sequence.stage() }.into();
                self.fail(&mut sequence, error);
            }
        }
    }

    /// Ends a request with an error; its sequence is dropped afterwards.
    pub(crate) fn fail(&mut self, sequence: &mut Sequence, error: Error) {
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
            self.keep_learned_stats(sequence);
            if let Some(retention) = sequence.reply_retention {
                self.save(sequence, retention);
                // The next turn after a raw prompt is unknown: no template rendered it.
                if self.prefetch_turns && sequence.request.prompt.is_none() {
                    self.queue.expect(Expected::after(sequence, retention));
                }
            }
            Ok(())
        });
        if let Err(error) = saved {
            let Request { id, span, .. } = &sequence.request;
            span.log(|| tracing::error!(request_id = id, %error, "saving state failed"));
            self.recover_from(&error);
        }
    }

    /// Empties the prefix cache after a panic, which may have left it halfway through a change.
    pub(crate) fn recover_from(&mut self, error: &Error) {
        if let Error::Panic { .. } = error {
            self.prefixes.clear_memory();
        }
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
