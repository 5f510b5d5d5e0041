//! Requests from their arrival until the engine thread starts them: waiting, being prepared, or ready.
//!
//! All requests of a body hold one place together until the last of them is started or refused, its client
//! disconnects, or its deadline passes. The threads of `decode/preparation.rs` take requests in order and return
//! them prepared; the engine thread starts the first that is ready. A request whose preparation takes long
//! therefore delays no other.
//!
//! # Turns
//! Profiles take turns: the earliest of each profile comes first, then the second of each, and so on. Of
//! requests in the same round, that of the profile comes first of which none has been started for the longest
//! time. So between two requests of a profile at most one of each other profile is started, however many of
//! them wait, and whatever bodies they come from: each text of a body, and each choice that waits for room,
//! takes a turn of its profile. The sequences of a profile that run count as its first rounds: a profile with
//! fewer than another comes first until it has as many. The engine thread adds what it has taken from here
//! already and what waits for room as [`Claim`]s.
//!
//! Within a profile, the bodies take turns in the same way: one of which a request has been started goes behind
//! those that wait. So a small request beside a large one of its profile waits for at most one request of it.
//!
//! Nothing here renders, tokenizes or computes: every method but those that wait returns at once.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::{mpsc, watch};

use crate::error::{Error, RequestError, Result};
use crate::grammar::Grammars;
use crate::job::{Job, OtherChoice, fail_all};
use crate::request::{Choices, Event, Request};
use crate::sequence::expected::{Expected, Prefix};
use crate::sequence::prepare::Prepared;

/// Requests at the front of the order that are prepared ahead of the engine thread. Each holds an instance
/// of its policies.
const AHEAD: usize = 4;

/// Texts of a body that are prepared ahead: embeddings have no policies, and many run in one step.
const TEXTS_AHEAD: usize = 32;

/// Most prefixes that wait to be prefetched.
const EXPECTED: usize = 64;

/// What a preparing thread does next.
pub(crate) enum Work {
    /// Prepares a request.
    Request(Taken),
    /// Tokenizes a prefix.
    Prefix(Expected),
}

/// The requests that a preparing thread takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// All, and prefixes.
    All,
    /// Requests without a form, which never wait for the compilation of one.
    WithoutForm,
}

/// A request that is being prepared.
pub struct Taken {
    /// Identifies it in the queue.
    pub number: u64,
    /// Identifies its body.
    pub body: u64,
    /// The request.
    pub job: Job,
    /// Its other choices.
    pub others: Vec<OtherChoice>,
}

/// A request that the engine thread has taken from the queue and that waits for room: a preempted one, a
/// choice, or one behind a prefix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claim<'a> {
    /// Its profile.
    pub profile: &'a str,
    /// Since when it waits, by [`Queue::stamp`].
    pub since: u64,
}

/// Who may start next.
#[derive(Clone, Copy)]
pub(crate) enum Candidate<'a> {
    /// A request that is ready.
    Ready(&'a Prepared),
    /// The claim with this index.
    Claim(usize),
}

/// What the engine thread decides about a [`Candidate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It starts now.
    Start,
    /// It waits; the next one is asked about.
    Wait,
    /// Room is made for it first.
    MakeRoom,
}

/// What the engine thread does next.
pub(crate) enum Next {
    /// Starts this request.
    Start(Box<Prepared>),
    /// Starts the claim with this index.
    Resume(usize),
    /// Makes room, and asks again.
    MakeRoom,
    /// No request is ready, or none may start.
    Nothing,
    /// Ends.
    End,
}

/// The queue of an engine.
pub struct Queue {
    places: usize,
    state: Mutex<State>,
    /// Signalled whenever the state changes.
    changed: Condvar,
    ended: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    /// In order of arrival.
    entries: Vec<Entry>,
    newest: u64,
    /// Number of requests started so far.
    started: u64,
    /// By profile, `started` when one of its requests was started last.
    turns: BTreeMap<String, u64>,
    /// By number, since when requests are being prepared, those included whose clients have disconnected.
    preparing: BTreeMap<u64, Instant>,
    /// Prefixes to prefetch, the newest last; tokenized when there is nothing else to prepare.
    expected: VecDeque<Expected>,
    /// Tokenized ones.
    prefixes: Vec<Prefix>,
    phase: Phase,
}

/// How far the engine is from its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    #[default]
    Open,
    /// No handle is left: the engine ends after the requests it has.
    Closed,
    /// The engine ends its requests with [`Error::Stopped`].
    Stopping,
    /// The engine thread has ended.
    Ended,
}

/// The requests of a body that have not been started.
struct Entry {
    /// Identifies the body.
    body: u64,
    profile: String,
    deadline: Option<Instant>,
    /// When it arrived, or one of its requests was started last, by [`State::stamp`].
    since: u64,
    /// Whether they are texts without policies.
    has_texts: bool,
    /// Whether a form is compiled when they are prepared.
    has_form: bool,
    waiting: VecDeque<Waiting>,
    preparing: Vec<Preparing>,
    ready: VecDeque<Box<Prepared>>,
}

struct Waiting {
    job: Job,
    others: Vec<OtherChoice>,
}

struct Preparing {
    /// [`Taken::number`]
    number: u64,
    /// The channels of its choices, the first one first. Weak: a channel closes when its request is dropped.
    events: Vec<mpsc::WeakUnboundedSender<Event>>,
}

impl Queue {
    /// A queue with `places` places.
    pub fn new(places: usize) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { places, state, changed, ended: watch::Sender::new(false) }
    }

    /// Adds a request.
    ///
    /// # Errors
    /// [`RequestError::QueueFull`] if no place is free; [`Error::Stopped`] if the engine accepts no
    /// requests any more.
    pub fn add(&self, request: Request) -> Result<mpsc::UnboundedReceiver<Event>> {
        let mut receivers = self.add_all(vec![request.into()])?;
        Ok(receivers.pop().expect("a request has a channel"))
    }

    /// Adds the requests of a body, which have one profile and one deadline and hold one place together.
    /// Returns a receiver for each choice, request by request.
    ///
    /// # Errors
    /// As [`Queue::add`].
    pub fn add_all(&self, body: Vec<Choices>) -> Result<Vec<mpsc::UnboundedReceiver<Event>>> {
        let mut state = self.lock();
        if state.phase >= Phase::Stopping {
            return Err(Error::Stopped);
        }
        if state.entries.len() >= self.places {
            return Err(Error::Request(RequestError::QueueFull { limit: self.places }));
        }
        let Some(Choices { request, .. }) = body.first() else { return Ok(Vec::new()) };
        let (profile, deadline) = (request.profile.clone(), request.deadline);
        let has_texts = request.embedding.is_some();
        let has_form = Grammars::has_form(request);
        let mut receivers = Vec::new();
        let mut channel = || {
            let (events, receiver) = mpsc::unbounded_channel();
            receivers.push(receiver);
            events
        };
        let waiting = |Choices { request, others }| {
            let job = Job { request, events: channel() };
            let other = |choice| OtherChoice { choice, events: channel() };
            Waiting { job, others: others.into_iter().map(other).collect() }
        };
        let waiting = body.into_iter().map(waiting).collect();
        let since = state.stamp();
        state.entries.push(Entry {
            body: since,
            profile,
            deadline,
            since,
            has_texts,
            has_form,
            waiting,
            preparing: Vec::new(),
            ready: VecDeque::new(),
        });
        self.changed.notify_all();
        Ok(receivers)
    }

    /// Number of places taken.
    pub fn waiting(&self) -> usize {
        self.lock().entries.len()
    }

    /// Returns true if a request waits, or is being prepared, whose profile is not one of `these`.
    pub fn has_other(&self, these: impl Fn(&str) -> bool) -> bool {
        self.lock().entries.iter().any(|entry| !these(&entry.profile))
    }

    /// Takes the first waiting request, to prepare it. `None` if there is none, or enough requests before
    /// it are being prepared or ready.
    pub fn try_take(&self) -> Option<Taken> {
        self.lock().take(Lane::All)
    }

    /// How long the request has been prepared whose preparation has taken longest.
    pub fn preparing_for(&self) -> Option<Duration> {
        self.lock().preparing.values().min().map(Instant::elapsed)
    }

    /// Waits for a request, or a prefix to prefetch. `None` when the engine has ended.
    pub(crate) fn take(&self, lane: Lane) -> Option<Work> {
        let mut state = self.lock();
        loop {
            if state.phase == Phase::Ended {
                return None;
            }
            if let Some(taken) = state.take(lane) {
                return Some(Work::Request(taken));
            }
            // The newest conversation is the most likely to continue.
            if lane == Lane::All
                && state.prefixes.is_empty()
                && let Some(expected) = state.expected.pop_back()
            {
                return Some(Work::Prefix(expected));
            }
            self.changed.wait(&mut state);
        }
    }

    /// Adds a prefix to prefetch; the oldest is dropped if there are too many.
    pub(crate) fn expect(&self, expected: Expected) {
        let mut state = self.lock();
        if state.expected.len() == EXPECTED {
            state.expected.pop_front();
        }
        state.expected.push_back(expected);
        self.changed.notify_all();
    }

    /// Returns a prefix tokenized, or one whose computation was interrupted.
    pub(crate) fn add_prefix(&self, prefix: Prefix) {
        self.lock().prefixes.push(prefix);
        self.changed.notify_all();
    }

    /// Takes a prefix to compute.
    pub(crate) fn take_prefix(&self) -> Option<Prefix> {
        let prefix = self.lock().prefixes.pop();
        self.changed.notify_all();
        prefix
    }

    /// Returns the request `number` prepared. Drops it if it is gone: its client has disconnected, or its
    /// deadline has passed.
    pub(crate) fn ready(&self, number: u64, prepared: Box<Prepared>) {
        let mut state = self.lock();
        state.preparing.remove(&number);
        if let Some(entry) = state.prepared(number) {
            entry.ready.push_back(prepared);
        }
        self.changed.notify_all();
    }

    /// Drops the request `number`, which is being prepared; false if it is gone already.
    pub fn leave(&self, number: u64) -> bool {
        let mut state = self.lock();
        state.preparing.remove(&number);
        let was_there = state.prepared(number).is_some();
        state.sweep();
        self.changed.notify_all();
        was_there
    }

    /// Takes the next request that is ready, or one of the `claims`, in the order of the turns: the first
    /// that `decide` starts. `running` is the number of sequences of a profile.
    pub(crate) fn next(
        &self,
        claims: &[Claim<'_>],
        running: impl Fn(&str) -> usize,
        decide: impl FnMut(Candidate<'_>) -> Decision,
    ) -> Next {
        let next = self.lock().next(claims, running, decide);
        self.changed.notify_all();
        next
    }

    /// A number larger than all before, which orders by arrival what begins to wait now.
    pub(crate) fn stamp(&self) -> u64 {
        self.lock().stamp()
    }

    /// Counts a turn of `profile`, of which a request was started that did not wait.
    pub(crate) fn count_turn(&self, profile: &str) {
        self.lock().count_turn(profile);
    }

    /// [`Queue::next`] while nothing runs, without waiting.
    pub(crate) fn first(&self) -> Next {
        self.next(&[], |_| 0, |_| Decision::Start)
    }

    /// [`Queue::first`], which waits until there is something to do, or a prefix to compute.
    pub(crate) fn wait_for_next(&self) -> Next {
        let mut state = self.lock();
        loop {
            match state.next(&[], |_| 0, |_| Decision::Start) {
                Next::Nothing if state.prefixes.is_empty() => {}
                next => {
                    self.changed.notify_all();
                    return next;
                }
            }
            match state.entries.iter().filter_map(|entry| entry.deadline).min() {
                Some(deadline) => drop(self.changed.wait_until(&mut state, deadline)),
                None => self.changed.wait(&mut state),
            }
            state.sweep();
        }
    }

    /// Wakes the engine thread from [`Queue::wait_unless`].
    pub(crate) fn wake(&self) {
        // The lock: the engine thread has either seen what changed, or waits.
        let _state = self.state.lock();
        self.changed.notify_all();
    }

    /// Waits for any change, [`Queue::wake`] or `timeout`, unless something `is_due` already.
    pub(crate) fn wait_unless(&self, is_due: impl FnOnce() -> bool, timeout: Duration) {
        let mut state = self.lock();
        if !is_due() {
            self.changed.wait_for(&mut state, timeout);
        }
    }

    /// Whether running requests end with [`Error::Stopped`].
    pub fn is_stopping(&self) -> bool {
        self.lock().phase >= Phase::Stopping
    }

    /// Accepts no further requests; those that are running or waiting are served.
    pub fn close(&self) {
        self.advance(Phase::Closed);
    }

    /// Ends all requests with [`Error::Stopped`], and then the engine.
    pub fn stop(&self) {
        self.advance(Phase::Stopping);
    }

    /// The engine thread has ended. Requests that it has not started end with [`Error::Stopped`].
    pub fn end(&self) {
        self.advance(Phase::Ended);
        self.ended.send_replace(true);
    }

    /// Becomes true when the engine thread has ended.
    pub fn ended(&self) -> watch::Receiver<bool> {
        self.ended.subscribe()
    }

    fn advance(&self, phase: Phase) {
        let mut state = self.lock();
        state.phase = state.phase.max(phase);
        state.expected.clear();
        state.prefixes.clear();
        if phase >= Phase::Stopping {
            for entry in state.entries.drain(..) {
                entry.fail(&Error::Stopped);
            }
        }
        self.changed.notify_all();
    }

    /// The state, without requests that have ended.
    fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        state.sweep();
        state
    }
}

impl State {
    fn stamp(&mut self) -> u64 {
        self.newest += 1;
        self.newest
    }

    fn count_turn(&mut self, profile: &str) {
        self.started += 1;
        self.turns.insert(profile.into(), self.started);
    }

    /// Drops the requests of clients that have disconnected, and of those past their deadline, who are told
    /// so. A body without requests leaves its place.
    fn sweep(&mut self) {
        let now = Instant::now();
        self.entries.retain_mut(|entry| {
            entry.drop_unwanted();
            let in_time = entry.deadline.is_none_or(|deadline| now < deadline);
            if !in_time {
                let stage = entry.stage();
                entry.fail(&RequestError::Deadline { stage }.into());
            }
            in_time && !entry.is_empty()
        });
    }

    /// The entry of a request that is being prepared, which it leaves.
    fn prepared(&mut self, number: u64) -> Option<&mut Entry> {
        let holds = |entry: &Entry| entry.preparing.iter().any(|one| one.number == number);
        let entry = self.entries.iter_mut().find(|entry| holds(entry))?;
        entry.preparing.retain(|preparing| preparing.number != number);
        Some(entry)
    }

    /// The entries and the `claims`, which have the indices behind them, in the order of the turns.
    fn order(&self, claims: &[Claim<'_>], running: impl Fn(&str) -> usize) -> Vec<usize> {
        let entries = self.entries.iter().map(|entry| (entry.since, entry.profile.as_str()));
        let claims = claims.iter().map(|claim| (claim.since, claim.profile));
        let mut lines: Vec<(u64, usize, &str)> =
            entries.chain(claims).enumerate().map(|(i, (since, name))| (since, i, name)).collect();
        lines.sort_unstable();
        let mut rounds: BTreeMap<&str, usize> = BTreeMap::new();
        let mut order = Vec::with_capacity(lines.len());
        for (since, i, profile) in lines {
            let turn = self.turns.get(profile).copied().unwrap_or(0);
            let round = rounds.entry(profile).or_insert_with(|| running(profile));
            *round += 1;
            order.push((*round, turn, since, i));
        }
        order.sort_unstable();
        order.into_iter().map(|(.., i)| i).collect()
    }

    fn take(&mut self, lane: Lane) -> Option<Taken> {
        // A thread of the lane without forms passes over requests with one, and takes what stands behind them.
        let is_in_lane = |&i: &usize| {
            let entry = &self.entries[i];
            let is_prepared = entry.waiting.is_empty() && !entry.ready.is_empty();
            lane == Lane::All || !entry.has_form || is_prepared
        };
        let order: Vec<usize> = self.order(&[], |_| 0).into_iter().filter(is_in_lane).collect();
        let is_first = |&i: &usize| {
            let entry = &self.entries[i];
            !entry.waiting.is_empty() && entry.ahead() == 0
        };
        let with_policies = self.entries.iter().filter(|entry| !entry.has_texts);
        let ahead: usize = with_policies.map(Entry::ahead).sum();
        let may_follow = |&i: &usize| {
            let entry = &self.entries[i];
            let has_room = match entry.has_texts {
                true => entry.ahead() < TEXTS_AHEAD,
                false => ahead < AHEAD,
            };
            !entry.waiting.is_empty() && has_room
        };
        let first = order.iter().copied().take(AHEAD).find(is_first);
        let index = first.or_else(|| order.into_iter().find(may_follow))?;
        let number = self.stamp();
        self.preparing.insert(number, Instant::now());
        let entry = &mut self.entries[index];
        let Waiting { job, others } = entry.waiting.pop_front()?;
        let events = std::iter::once(&job.events).chain(others.iter().map(|other| &other.events));
        let events = events.map(mpsc::UnboundedSender::downgrade).collect();
        entry.preparing.push(Preparing { number, events });
        Some(Taken { number, body: entry.body, job, others })
    }

    fn next(
        &mut self,
        claims: &[Claim<'_>],
        running: impl Fn(&str) -> usize,
        mut decide: impl FnMut(Candidate<'_>) -> Decision,
    ) -> Next {
        // What has been taken from here is ended by the engine thread.
        if self.phase >= Phase::Stopping {
            return Next::End;
        }
        for index in self.order(claims, running) {
            let candidate = match self.entries.get(index) {
                None => Candidate::Claim(index - self.entries.len()),
                Some(entry) => match entry.ready.front() {
                    Some(prepared) => Candidate::Ready(prepared),
                    None => continue,
                },
            };
            match decide(candidate) {
                Decision::Wait => continue,
                Decision::MakeRoom => return Next::MakeRoom,
                Decision::Start => {}
            }
            let Some(entry) = self.entries.get_mut(index) else {
                let claim = index - self.entries.len();
                self.count_turn(claims[claim].profile);
                return Next::Resume(claim);
            };
            let Some(prepared) = entry.ready.pop_front() else { continue };
            let (profile, is_last) = (entry.profile.clone(), entry.is_empty());
            self.count_turn(&profile);
            if is_last {
                self.entries.remove(index);
            } else {
                let since = self.stamp();
                self.entries[index].since = since;
            }
            return Next::Start(prepared);
        }
        if self.phase == Phase::Closed && self.entries.is_empty() {
            return Next::End;
        }
        Next::Nothing
    }
}

impl Entry {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.preparing.is_empty() && self.ready.is_empty()
    }

    /// Number of requests that are prepared or being prepared.
    fn ahead(&self) -> usize {
        self.preparing.len() + self.ready.len()
    }

    /// Drops requests whose client has disconnected from the first choice.
    fn drop_unwanted(&mut self) {
        self.waiting.retain(|waiting| !waiting.job.events.is_closed());
        self.ready.retain(|prepared| !prepared.events.is_closed());
        self.preparing.retain(|preparing| {
            let first = preparing.events.first().and_then(mpsc::WeakUnboundedSender::upgrade);
            first.is_some_and(|events| !events.is_closed())
        });
    }

    /// Ends its requests with `error`.
    fn fail(&self, error: &Error) {
        for Waiting { job, others } in &self.waiting {
            let others = others.iter().map(|other| other.events.clone());
            fail_all(std::iter::once(job.events.clone()).chain(others).collect(), error.shared());
        }
        for Preparing { events, .. } in &self.preparing {
            let channels = events.iter().filter_map(mpsc::WeakUnboundedSender::upgrade);
            fail_all(channels.collect(), error.shared());
        }
        for prepared in &self.ready {
            fail_all(prepared.channels(), error.shared());
        }
    }

    /// For [`RequestError::Deadline`].
    fn stage(&self) -> &'static str {
        if self.preparing.is_empty() { "waiting" } else { "being prepared" }
    }
}
