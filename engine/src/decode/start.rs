//! Starts: requests are admitted, sequences are preempted and resume, as `schedule/turns.rs` decides.

use mlx_rs::transforms::eval;

use super::{Decoder, admit};
use crate::error::{Result, catch_panic};
use crate::live::Stage;
use crate::prefix::Retention;
use crate::request::{Event, Request};
use crate::schedule::Resources;
use crate::schedule::preempt::resumes_whole;
use crate::schedule::queue::Next;
use crate::schedule::turns::Claimed;
use crate::sequence::Sequence;
use crate::sequence::prepare::{Prepared, log_refused};

impl Decoder {
    /// What decides besides the sequences whether another one may run.
    pub(super) fn resources(&self) -> Resources<'_> {
        let finishing = self.policies.finishing();
        Resources { saved: &self.saved, bytes: self.costs.bytes(), finishing }
    }

    /// Starts and resumes requests while there is room, in the turns of their profiles.
    pub(super) fn start_requests(&mut self) {
        loop {
            self.schedule.share_computed_prefixes(&mut self.saved);
            let (next, owing) = self.schedule.next_turn(self.resources());
            match next {
                Next::Start(prepared) => {
                    match self.schedule.computing_prefix_of(&prepared, &self.saved) {
                        Some((at, tokens)) => self.schedule.await_prefix(*prepared, at, tokens),
                        None => self.start_request(*prepared),
                    }
                }
                Next::Resume(claim) => match self.schedule.take_claim(claim) {
                    Claimed::Preempted(sequence) => self.resume(*sequence),
                    Claimed::Due(prepared) => self.start_request(*prepared),
                },
                Next::MakeRoom => {
                    match owing.and_then(|profile| self.schedule.take_displaced(&profile)) {
                        Some(sequence) => self.displace(sequence),
                        None => return,
                    }
                }
                Next::Nothing | Next::End => return,
            }
        }
    }

    /// Admits a request, which runs from the next step on.
    pub(super) fn start_request(&mut self, prepared: Prepared) {
        self.prefetch.interrupt(self.schedule.queue());
        let Request { id, span, .. } = &prepared.request;
        let (id, span, events) = (id.clone(), span.clone(), prepared.events.clone());
        match catch_panic("being admitted", || admit::admit(self, prepared)) {
            Ok(sequence) => self.schedule.push(sequence),
            Err(error) => {
                span.log(|| log_refused(&id, &error));
                self.recover_from(&error);
                let _ = events.send(Event::Failed(error));
            }
        }
    }

    /// Preempts a sequence for a request of another profile. There is memory for its state, unless that
    /// is what the other one needs.
    fn displace(&mut self, mut sequence: Sequence) {
        let timeline = sequence.timeline();
        let runs = timeline.position() <= timeline.len() && !timeline.is_stale();
        if runs && sequence.saves_anywhere() && !sequence.is_away() {
            let saved = catch_panic("being preempted", || {
                self.saved.save(&sequence, Retention::default());
                Ok(())
            });
            if let Err(error) = saved {
                return self.fail(&mut sequence, error);
            }
        }
        self.preempt(sequence);
    }

    /// Makes room for the next step of all sequences: evicts saved state, then preempts sequences. The
    /// last one fails if its step does not fit.
    pub(super) fn make_room_for_step(&mut self) {
        loop {
            let running = self.schedule.running();
            let planned = self.schedule.plan_prefill(running, self.costs.passes());
            let needed = self.saved.expect_step(running, &planned, self.costs.bytes()).bytes;
            self.activity.update(|activity| activity.bytes.step = needed);
            let Err(error) = self.saved.make_room(needed) else { return };
            match self.schedule.take_victim() {
                Some(victim) => self.preempt(victim),
                None => {
                    if let Some(mut last) = self.schedule.running_mut().pop() {
                        self.fail(&mut last, error);
                    }
                    return;
                }
            }
        }
    }

    /// Preempts a sequence, unless that ends it.
    fn preempt(&mut self, mut sequence: Sequence) {
        if let Err(error) = catch_panic("being preempted", || self.drop_state(&mut sequence)) {
            return self.fail(&mut sequence, error);
        }
        if let Some(mut sequence) = self.unless_ended(sequence) {
            if sequence.has_ended() {
                // The verdict on its last call is away. Its state is not saved.
                sequence.forget_reply();
                sequence.drop_arrays(self.saved.empty());
            }
            let (tokens, id) = (sequence.timeline().len(), &sequence.request().id);
            tracing::debug!(id, tokens, "request preempted");
            self.activity.update(|activity| activity.preemptions += 1);
            sequence.request().live.set_stage(Stage::Preempted);
            self.schedule.push_preempted(sequence);
        }
    }

    /// Commits the sampled token, so that there is one to run after the saved state, and drops the arrays
    /// of the sequence. A call of its policy that is away continues.
    pub(crate) fn drop_state(&mut self, sequence: &mut Sequence) -> Result<()> {
        // It is not committed before the policy has answered, but sampled again.
        let sampled = sequence.timeline_mut().take_sampled().filter(|_| !sequence.is_away());
        if let Some(sampled) = sampled {
            self.commit_sampled(sequence, sampled)?;
        }
        if sequence.has_ended() {
            return Ok(());
        }
        // Arrays that are still being computed would not be freed.
        eval(&sequence.timeline().cache().arrays()?)?;
        if let Err(error) = self.saved.save_on_disk(sequence) {
            let id = &sequence.request().id;
            let span = &sequence.request().span;
            span.log(|| tracing::warn!(id, %error, "saving a preempted request failed"));
        }
        self.speculation.keep_learned_stats(sequence);
        sequence.drop_arrays(self.saved.empty());
        sequence.count_preemption();
        Ok(())
    }

    /// Resumes a preempted sequence.
    fn resume(&mut self, mut sequence: Sequence) {
        if sequence.has_ended() {
            // It waits for a verdict only.
            return self.schedule.push(sequence);
        }
        match catch_panic("being resumed", || self.restore_state(&mut sequence)) {
            Ok(()) => self.schedule.push(sequence),
            Err(error) => self.fail(&mut sequence, error),
        }
    }

    /// Restores the cache of a preempted sequence from saved state, so that its other tokens run again.
    pub(crate) fn restore_state(&mut self, sequence: &mut Sequence) -> Result<()> {
        let (tokens, is_whole) = (sequence.timeline().tokens(), resumes_whole(sequence));
        let (chunk, bytes) = (self.schedule.chunk(), self.costs.bytes());
        self.saved.make_room_for(tokens, is_whole, chunk, bytes)?;
        let (cache, cached) = match is_whole {
            true => (self.saved.empty(), 0),
            false => self.saved.prefixes_mut().resume(tokens)?,
        };
        if sequence.drafting().is_governed() {
            let drafters = self.speculation.new_drafters(&self.network, tokens)?;
            sequence.drafting_mut().set_drafters(drafters);
        }
        sequence.restore(cache);
        let tokens = sequence.timeline().len();
        let id = &sequence.request().id;
        tracing::debug!(id, tokens, cached, "request resumed");
        Ok(())
    }
}
