//! Who runs next: requests of the queue, preempted sequences, choices and requests behind a prefix start in the
//! turns of their profiles, and no profile keeps the others out.
//!
//! The queue has the order (`queue.rs`); this module decides which of them may start. A body asks for as many
//! sequences as it has texts and choices, up to several hundred, each of which may run for an hour. So that it never
//! delays a request of another profile by more than a turn:
//!
//! - Each sequence but the first of a body waits for a turn of its profile, also a choice whose prompt has run
//!   already (`choices.rs`). The profile with the fewest running sequences comes first.
//! - If there is no slot or no memory for it, and another profile runs at least two sequences more, one of these is
//!   preempted (`preempt.rs`). It resumes in a turn of its own without a changed token. The difference shrinks each
//!   time, so this ends.
//! - `limits.requests` bounds the sequences of a profile that run ([`Request::running_limit`]).
//! - Rows of prompt in a step are shared among profiles (`plan.rs`), and so is memory: the sequence that is preempted
//!   for the next step is one of the profile with the most.
//!
//! A candidate for which no other profile has to make room blocks all candidates behind it until there is room, even
//! those that would fit. So a single sequence that takes all memory, or the only slot, delays others until it ends.
//!
//! [`Request::running_limit`]: crate::request::Request::running_limit

use std::collections::BTreeMap;

use super::plan::{self, Candidate as Victim};
use super::queue::{Candidate, Claim, Decision, Next};
use super::{Resources, Schedule};
use crate::request::Request;
use crate::sequence::Sequence;
use crate::sequence::prepare::Prepared;

/// The sequences of each profile.
#[derive(Default)]
struct Counts<'a>(BTreeMap<&'a str, Count>);

#[derive(Debug, Clone, Copy, Default)]
struct Count {
    /// Number of running sequences of the profile.
    running: usize,
    /// Requests that wait for a prefix which one of them computes.
    awaiting: usize,
}

impl Counts<'_> {
    fn of(&self, profile: &str) -> Count {
        self.0.get(profile).copied().unwrap_or_default()
    }

    /// The profile with the most running sequences, if it has at least two more than `profile`.
    fn owing(&self, profile: &str) -> Option<&str> {
        let (most, count) = self.0.iter().max_by_key(|(_, count)| count.running)?;
        (count.running >= self.of(profile).running + 2).then_some(*most)
    }
}

/// What has a turn.
pub enum Claimed {
    /// A preempted sequence, which resumes.
    Preempted(Box<Sequence>),
    /// A request whose prefix is computed no longer, which starts.
    Due(Box<Prepared>),
}

impl Schedule {
    /// The next turn, and the profile that makes room for it.
    pub fn next_turn(&self, resources: Resources<'_>) -> (Next, Option<String>) {
        let counts = self.counts();
        let preempted = self.preempted.iter().map(|s| (s.request().profile.as_str(), s.since()));
        let due = self.due_requests().map(|at| &self.awaiting[at]);
        let due = due.map(|waiting| (waiting.prepared.request.profile.as_str(), waiting.since));
        let claims = preempted.chain(due).map(|(profile, since)| Claim { profile, since });
        let claims: Vec<Claim<'_>> = claims.collect();
        let has_slot = self.has_slot(resources.finishing);
        let (mut is_blocked, mut owing) = (false, None);
        let running = |profile: &str| counts.of(profile).running;
        let next = self.queue.next(&claims, running, |candidate| {
            if is_blocked || !self.may_run(candidate, &counts) {
                return Decision::Wait;
            }
            if has_slot && self.has_memory_for(candidate, resources) {
                return Decision::Start;
            }
            is_blocked = true;
            owing = counts.owing(&self.request_of(candidate).profile).map(str::to_string);
            if owing.is_some() { Decision::MakeRoom } else { Decision::Wait }
        });
        (next, owing)
    }

    /// Returns true if another sequence may run. Those whose `on-finish` is being called count, but one may always run:
    /// the loop must not spin while threads finish others.
    fn has_slot(&self, finishing: usize) -> bool {
        let running = self.running.len();
        running == 0 || running + finishing < self.max_running
    }

    /// Returns true if the limits on sequences and on instances of policies let it run.
    fn may_run(&self, candidate: Candidate<'_>, counts: &Counts<'_>) -> bool {
        let Request { profile, running_limit, .. } = self.request_of(candidate);
        let Count { running, awaiting } = counts.of(profile);
        let is_new = matches!(candidate, Candidate::Ready(_));
        let own = running + if is_new { awaiting } else { 0 };
        // Requests behind a prefix hold instances of their policies, as those that run.
        let held = self.running.len() + self.awaiting.len();
        let may_hold = !is_new || own == 0 || held < self.max_running;
        may_hold && (*running_limit == 0 || own < *running_limit)
    }

    fn request_of<'a>(&'a self, candidate: Candidate<'a>) -> &'a Request {
        match candidate {
            Candidate::Ready(prepared) => &prepared.request,
            Candidate::Claim(claim) => match self.preempted.get(claim) {
                Some(sequence) => sequence.request(),
                None => &self.due_request(claim).request,
            },
        }
    }

    fn has_memory_for(&self, candidate: Candidate<'_>, resources: Resources<'_>) -> bool {
        match candidate {
            Candidate::Ready(prepared) => self.has_room_for(prepared, resources),
            Candidate::Claim(claim) => match self.preempted.get(claim) {
                Some(sequence) => self.has_room_to_resume(sequence, resources),
                None => self.has_room_for(self.due_request(claim), resources),
            },
        }
    }

    /// The request behind a prefix with this number among the claims.
    fn due_request(&self, claim: usize) -> &Prepared {
        let at = self.due_requests().nth(claim - self.preempted.len());
        &self.awaiting[at.expect("a claim is a preempted sequence or a due request")].prepared
    }

    /// Takes the claim that has a turn.
    pub fn take_claim(&mut self, claim: usize) -> Claimed {
        let since = self.queue.stamp();
        let (body, claimed) = match self.preempted.remove(claim) {
            Some(sequence) => (sequence.body(), Claimed::Preempted(Box::new(sequence))),
            None => {
                let at = self.due_requests().nth(claim - self.preempted.len());
                let at = at.expect("a claim is a preempted sequence or a due request");
                let prepared = self.awaiting.remove(at).prepared;
                (prepared.body, Claimed::Due(Box::new(prepared)))
            }
        };
        // The rest of the body waits behind all others. A sequence that was preempted for memory stays first.
        for sequence in self.preempted.iter_mut().filter(|s| s.body() == body && s.since() > 0) {
            sequence.wait_since(since);
        }
        claimed
    }

    fn counts(&self) -> Counts<'_> {
        let mut counts = Counts::default();
        for sequence in &self.running {
            counts.0.entry(&sequence.request().profile).or_default().running += 1;
        }
        for waiting in &self.awaiting {
            counts.0.entry(&waiting.prepared.request.profile).or_default().awaiting += 1;
        }
        counts
    }

    /// Returns true if a choice of this request may start without waiting for its turn: nobody waits, or there is a slot
    /// for everybody who does.
    pub fn may_start_choice(&self, choice: &Prepared, resources: Resources<'_>) -> bool {
        let limit = choice.request.running_limit;
        let taken = self.running.len() + resources.finishing + self.queue.waiting();
        taken < self.max_running
            && self.preempted.is_empty()
            && self.awaiting.is_empty()
            && (limit == 0 || self.counts().of(&choice.request.profile).running < limit)
            && self.has_room_for(choice, resources)
    }

    /// Takes the sequence of `profile` that makes room for a request of another one, if `profile` has the most sequences. It
    /// waits for a turn from now on.
    pub fn take_displaced(&mut self, profile: &str) -> Option<Sequence> {
        let of_profile = |(_, sequence): &(usize, &Sequence)| sequence.request().profile == profile;
        let (places, running): (Vec<usize>, Vec<Victim>) =
            self.running.iter().enumerate().filter(of_profile).map(victim).unzip();
        let at = places[plan::victim(&running)?];
        let mut sequence = self.running.remove(at);
        sequence.wait_since(self.queue.stamp());
        Some(sequence)
    }

    /// Takes the sequence to preempt for memory. It comes first when its profile has a turn. `None` if there is only one.
    pub fn take_victim(&mut self) -> Option<Sequence> {
        let counts = self.counts();
        let victim = |entry: (usize, &Sequence)| {
            let of_profile = counts.of(&entry.1.request().profile).running;
            Victim { of_profile, ..victim(entry).1 }
        };
        let victims: Vec<Victim> = self.running.iter().enumerate().map(victim).collect();
        let mut sequence = self.running.remove(plan::victim(&victims)?);
        sequence.wait_since(0);
        Some(sequence)
    }
}

fn victim((at, sequence): (usize, &Sequence)) -> (usize, Victim) {
    let (computed, preempted) = (sequence.timeline().position(), sequence.preemptions());
    (at, Victim { computed, preempted, of_profile: 0 })
}
