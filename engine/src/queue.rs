//! Requests from their arrival until the engine thread starts them: waiting, being prepared, or ready.
//!
//! Each holds a place until it is started or refused, its client disconnects, or its deadline passes.
//! The threads of `decode/prepare.rs` take requests in order and return them prepared; the engine thread
//! starts the first that is ready. A request whose preparation takes long therefore delays no other.
//!
//! Profiles take turns: the earliest request of each profile comes first, then the second of each, and so
//! on. Of requests in the same round, that of the profile comes first of which none has been started for
//! the longest time. So between two requests of a profile at most one of each other profile is started,
//! however many of them wait.
//!
//! Nothing here renders, tokenizes or computes: every method but those that wait returns at once.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::{mpsc, watch};

use crate::decode::{Expected, Prefix, Prepared};
use crate::error::{Error, RequestError, Result};
use crate::grammar::Grammars;
use crate::request::{Event, Request};

/// Requests at the front of the order that are prepared ahead of the engine thread. Each holds an instance
/// of its policies.
const AHEAD: usize = 4;

/// Most prefixes that wait to be prefetched.
const EXPECTED: usize = 64;

/// A request and the channel for its events.
pub struct Job {
    /// The request.
    pub request: Request,
    /// Dropping its receiver cancels the request. Unbounded, so that a slow reader cannot block the
    /// engine: it holds at most one reply, which `max_tokens` limits.
    pub events: mpsc::UnboundedSender<Event>,
}

impl Job {
    /// Whether the request is still wanted, before more is done for it.
    ///
    /// # Errors
    /// [`RequestError::Cancelled`] if its client has disconnected, [`RequestError::Deadline`] if its
    /// time is over.
    pub fn check(&self, stage: &'static str) -> Result<()> {
        if self.events.is_closed() {
            return Err(RequestError::Cancelled.into());
        }
        match self.request.deadline {
            Some(deadline) if Instant::now() >= deadline => {
                Err(RequestError::Deadline { stage }.into())
            }
            _ => Ok(()),
        }
    }
}

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
    /// Those without a form, which never wait for the compilation of one.
    WithoutForm,
}

/// A request that is being prepared, and its place.
pub struct Taken {
    /// Identifies the place.
    pub place: u64,
    /// The request.
    pub job: Job,
    /// The other choices of the same request, which share its place.
    pub others: Vec<Job>,
}

/// What the engine thread does next.
pub(crate) enum Next {
    /// Starts this request.
    Start(Box<Prepared>),
    /// No request is ready.
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
    /// By place, since when requests are being prepared, those included whose clients have disconnected.
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

struct Entry {
    place: u64,
    profile: String,
    /// Of the request, then of its other choices. Weak: a channel closes when its request is dropped.
    events: Vec<mpsc::WeakUnboundedSender<Event>>,
    deadline: Option<Instant>,
    /// Whether a form is compiled when it is prepared.
    has_form: bool,
    stage: Stage,
}

enum Stage {
    Waiting(Box<Job>, Vec<Job>),
    Preparing,
    Ready(Box<Prepared>),
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
        let mut receivers = self.add_choices(request, Vec::new())?;
        Ok(receivers.pop().expect("a request has a channel"))
    }

    /// Adds a request and the `others` of its choices, which take one place together and are started
    /// together. Returns a receiver for each.
    ///
    /// # Errors
    /// As [`Queue::add`].
    pub fn add_choices(
        &self,
        request: Request,
        others: Vec<Request>,
    ) -> Result<Vec<mpsc::UnboundedReceiver<Event>>> {
        let mut state = self.lock();
        if state.phase >= Phase::Stopping {
            return Err(Error::Stopped);
        }
        if state.entries.len() >= self.places {
            return Err(Error::Request(RequestError::QueueFull { limit: self.places }));
        }
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        let mut job = |request| {
            let (events, receiver) = mpsc::unbounded_channel();
            senders.push(events.downgrade());
            receivers.push(receiver);
            Job { request, events }
        };
        state.newest += 1;
        let (profile, deadline) = (request.profile.clone(), request.deadline);
        let has_form = Grammars::has_form(&request);
        let first = Box::new(job(request));
        let others = others.into_iter().map(job).collect();
        let place = state.newest;
        let stage = Stage::Waiting(first, others);
        state.entries.push(Entry { place, profile, events: senders, deadline, has_form, stage });
        self.changed.notify_all();
        Ok(receivers)
    }

    /// Number of places taken.
    pub fn waiting(&self) -> usize {
        self.lock().entries.len()
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

    /// Returns a request prepared. Drops it if its place is gone: its client has disconnected, or its
    /// deadline has passed.
    pub(crate) fn ready(&self, place: u64, prepared: Box<Prepared>) {
        let mut state = self.lock();
        state.preparing.remove(&place);
        if let Some(entry) = state.entries.iter_mut().find(|entry| entry.place == place) {
            entry.stage = Stage::Ready(prepared);
        }
        self.changed.notify_all();
    }

    /// Frees a place; false if it is free already.
    pub fn leave(&self, place: u64) -> bool {
        let mut state = self.lock();
        state.preparing.remove(&place);
        let before = state.entries.len();
        state.entries.retain(|entry| entry.place != place);
        self.changed.notify_all();
        state.entries.len() < before
    }

    /// Takes the next request that is ready, if it `fits`. If not, it keeps its place and those behind
    /// it wait too: they would take the room that it waits for.
    pub(crate) fn next(&self, fits: impl FnOnce(&Prepared) -> bool) -> Next {
        let next = self.lock().next(fits);
        self.changed.notify_all();
        next
    }

    /// [`Queue::next`], which waits until there is something to do, or a prefix to compute.
    pub(crate) fn wait_for_next(&self) -> Next {
        let mut state = self.lock();
        loop {
            match state.next(|_| true) {
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
                entry.fail(Error::Stopped);
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
    /// Frees the places of clients that have disconnected, and of requests past their deadline, which
    /// are told so.
    fn sweep(&mut self) {
        let now = Instant::now();
        self.entries.retain(|entry| {
            let first = entry.events.first().and_then(mpsc::WeakUnboundedSender::upgrade);
            if first.is_none_or(|events| events.is_closed()) {
                return false;
            }
            let in_time = entry.deadline.is_none_or(|deadline| now < deadline);
            if !in_time {
                let stage = entry.stage.name();
                entry.fail(RequestError::Deadline { stage }.into());
            }
            in_time
        });
    }

    /// Indices of the entries in the order in which they are started.
    fn order(&self) -> Vec<usize> {
        let mut rounds: BTreeMap<&str, usize> = BTreeMap::new();
        let mut order = Vec::with_capacity(self.entries.len());
        for (i, Entry { profile, place, .. }) in self.entries.iter().enumerate() {
            let round = rounds.entry(profile).or_default();
            *round += 1;
            let turn = self.turns.get(profile).copied().unwrap_or(0);
            order.push((*round, turn, *place, i));
        }
        order.sort_unstable();
        order.into_iter().map(|(.., i)| i).collect()
    }

    fn take(&mut self, lane: Lane) -> Option<Taken> {
        let waits = |&i: &usize| matches!(self.entries[i].stage, Stage::Waiting(..));
        let is_in_lane = |&i: &usize| match lane {
            Lane::All => true,
            Lane::WithoutForm => {
                !self.entries[i].has_form || matches!(self.entries[i].stage, Stage::Ready(_))
            }
        };
        let first = self.order().into_iter().filter(is_in_lane).take(AHEAD).find(waits)?;
        let entry = &mut self.entries[first];
        self.preparing.insert(entry.place, Instant::now());
        match std::mem::replace(&mut entry.stage, Stage::Preparing) {
            Stage::Waiting(job, others) => Some(Taken { place: entry.place, job: *job, others }),
            Stage::Preparing | Stage::Ready(_) => unreachable!("found as waiting"),
        }
    }

    fn next(&mut self, fits: impl FnOnce(&Prepared) -> bool) -> Next {
        let is_ready = |&i: &usize| matches!(self.entries[i].stage, Stage::Ready(_));
        if let Some(first) = self.order().into_iter().find(is_ready)
            && let Stage::Ready(prepared) = &self.entries[first].stage
        {
            if !fits(prepared) {
                return Next::Nothing;
            }
            let Entry { profile, stage, .. } = self.entries.remove(first);
            self.started += 1;
            self.turns.insert(profile, self.started);
            if let Stage::Ready(prepared) = stage {
                return Next::Start(prepared);
            }
        }
        if self.phase >= Phase::Stopping || (self.phase == Phase::Closed && self.entries.is_empty())
        {
            return Next::End;
        }
        Next::Nothing
    }
}

impl Entry {
    fn fail(&self, error: Error) {
        let channels = self.events.iter().filter_map(mpsc::WeakUnboundedSender::upgrade);
        fail_all(channels.collect(), error);
    }
}

impl Stage {
    /// For [`RequestError::Deadline`].
    fn name(&self) -> &'static str {
        match self {
            Self::Waiting(..) | Self::Ready(_) => "waiting",
            Self::Preparing => "being prepared",
        }
    }
}

/// Ends the choices of a request with `error`, the first of them first.
pub(crate) fn fail_all(channels: Vec<mpsc::UnboundedSender<Event>>, error: Error) {
    let copies: Vec<Error> = channels.iter().skip(1).map(|_| error.shared()).collect();
    for (events, error) in channels.into_iter().zip(std::iter::once(error).chain(copies)) {
        // Fails if the client has disconnected.
        let _ = events.send(Event::Failed(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Form, ResponseFormat};

    fn failure(events: &mut mpsc::UnboundedReceiver<Event>) -> Error {
        match events.try_recv() {
            Ok(Event::Failed(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    /// Before, clients that had hung up kept their places until the running request ended: with all 32
    /// gone, a new client got 429.
    #[test]
    fn clients_that_disconnect_free_their_places_at_once() {
        let queue = Queue::new(3);
        let _first = queue.add(Request::default()).unwrap();
        let preparing = queue.add(Request::default()).unwrap();
        let waiting = queue.add(Request::default()).unwrap();
        let _taken = [queue.try_take().unwrap(), queue.try_take().unwrap()];
        assert!(matches!(
            queue.add(Request::default()),
            Err(Error::Request(RequestError::QueueFull { limit: 3 }))
        ));
        drop(preparing);
        drop(waiting);
        assert_eq!(queue.waiting(), 1);
        let _fourth = queue.add(Request::default()).unwrap();
        assert_eq!(queue.waiting(), 2);
    }

    #[test]
    fn a_request_past_its_deadline_is_told_so_and_frees_its_place() {
        let queue = Queue::new(2);
        let soon = || Request { deadline: Some(Instant::now()), ..Request::default() };
        let later = Some(Instant::now() + Duration::from_secs(3600));
        let mut expired = queue.add(soon()).unwrap();
        let _other = queue.add(Request { deadline: later, ..Request::default() }).unwrap();
        assert_eq!(queue.waiting(), 1);
        let error = failure(&mut expired);
        let expected = RequestError::Deadline { stage: "waiting" };
        assert_eq!(error.to_string(), expected.to_string());
        // The engine thread wakes up for deadlines when it waits for requests.
        let mut expired = queue.add(soon()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(matches!(queue.wait_for_next(), Next::End)));
            assert!(matches!(expired.blocking_recv(), Some(Event::Failed(_))));
            queue.stop();
        });
    }

    /// A2: two forms that took long to compile kept both threads that prepare requests, so that no other request
    /// was answered, and `/health` said "ok" all the while, also after their clients had hung up.
    #[test]
    fn requests_without_a_form_pass_those_that_are_compiled() {
        let queue = Queue::new(100);
        let form = ResponseFormat { field: "format", form: Form::JsonObject };
        let formed = || Request { response_format: Some(form.clone()), ..Request::default() };
        let mut events: Vec<_> = (0..10).map(|_| queue.add(formed()).unwrap()).collect();
        events.push(queue.add(Request::default()).unwrap());
        assert_eq!(queue.preparing_for(), None);
        let taken: Vec<_> = std::iter::from_fn(|| queue.try_take()).collect();
        assert_eq!(taken.len(), AHEAD);
        let plain = queue.lock().take(Lane::WithoutForm).unwrap();
        assert!(plain.job.request.response_format.is_none());
        assert!(queue.lock().take(Lane::WithoutForm).is_none());
        events.clear();
        drop(plain.job);
        assert_eq!(queue.waiting(), 0);
        assert!(queue.preparing_for().is_some());
        for taken in taken.iter().map(|taken| taken.place).chain([plain.place]) {
            queue.leave(taken);
        }
        assert_eq!(queue.preparing_for(), None);
    }

    /// Before, 30 requests of one profile ran before the first of another.
    #[test]
    fn requests_of_profiles_take_turns() {
        let queue = Queue::new(100);
        let add = |profile: &str| {
            queue.add(Request { profile: profile.into(), ..Request::default() }).unwrap()
        };
        let mut events: Vec<_> = (0..30).map(|_| add("a")).collect();
        // Prepared, and not started.
        let taken: Vec<_> = std::iter::from_fn(|| queue.try_take()).collect();
        assert_eq!(taken.len(), AHEAD);
        events.extend(["b", "b", "c"].map(add));
        // Those of others are prepared at once, though enough are ready.
        let others: Vec<_> = std::iter::from_fn(|| queue.try_take()).collect();
        let profiles = others.iter().map(|taken| taken.job.request.profile.as_str());
        assert_eq!(profiles.collect::<String>(), "bc");
        let order = || -> String {
            let state = queue.lock();
            state.order().into_iter().map(|i| state.entries[i].profile.as_str()).collect()
        };
        assert!(order().starts_with("abcabaaa"), "{}", order());
        // Whose turn was last comes last in its round.
        queue.lock().turns = BTreeMap::from([("a".into(), 2), ("b".into(), 1), ("c".into(), 3)]);
        assert!(order().starts_with("bacbaaaa"), "{}", order());
        // Clients that disconnect give up no turn of their profile.
        events.drain(..29);
        assert_eq!(order(), "bacb");
    }

    #[test]
    fn a_stopped_engine_ends_waiting_requests_with_an_error() {
        let queue = Queue::new(2);
        let mut waiting = queue.add(Request::default()).unwrap();
        let mut preparing = queue.add(Request::default()).unwrap();
        let taken = queue.try_take().unwrap();
        queue.stop();
        for events in [&mut waiting, &mut preparing] {
            assert!(matches!(failure(events), Error::Stopped));
        }
        assert!(!queue.leave(taken.place));
        assert!(matches!(queue.add(Request::default()), Err(Error::Stopped)));
        assert!(matches!(queue.next(|_| true), Next::End));
        assert!(!*queue.ended().borrow());
        queue.end();
        assert!(*queue.ended().borrow());
    }
}
