//! Which models of a process are loaded.
//!
//! A model is loaded when the first request asks for it, and unloaded when it has not been used for its
//! `keep_alive`, or when another one needs its room. The room is a budget of bytes, which loaded models
//! never exceed together.
//!
//! ```text
//! on disk --(request, there is room)--> loading --> loaded --(idle, room or time)--> unloading --> on disk
//! ```
//!
//! - A request holds a [`Lease`]. A model with leases is never unloaded.
//! - Requests whose model is loaded get a lease at once. The others wait in order. The first of them makes
//!   room: it unloads the models that have not been used for the longest time, and only if that suffices.
//! - If models are in use without a pause, the first request would wait for ever: after [`PATIENCE`] they
//!   get no new leases until its model is loaded.
//! - One model is loaded at a time: two would measure each other.
//! - A withdrawn model gets no new leases, and is unloaded when those that it has are returned. It keeps its index.
//!
//! Knows nothing of engines: a [`Starter`] loads and unloads.

mod report;
mod withdraw;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

pub use self::report::{Refusal, Report, Settings, State};

/// Time after which a request that waits for room keeps others from the models that are in its way.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Loads and unloads models, which are known by their index.
pub trait Starter: Send + Sync + 'static {
    /// What serves a loaded model.
    type Engine: Clone + Send + 'static;

    /// Bytes that model `index` will take. Blocks while it reads files.
    ///
    /// # Errors
    /// If its files are not here.
    fn bytes(&self, index: usize) -> anyhow::Result<u64>;

    /// Loads model `index`. Blocks.
    ///
    /// # Errors
    /// If that fails; then nothing of it is left in memory.
    fn start(&self, index: usize) -> anyhow::Result<Self::Engine>;

    /// Unloads model `index`, which no request uses. Blocks until its memory is free.
    fn stop(&self, index: usize, engine: Self::Engine);
}

/// The models of a process. Cheap to clone.
pub struct Pool<S: Starter>(Arc<Shared<S>>);

struct Shared<S: Starter> {
    starter: S,
    budget: u64,
    /// How long a request waits while there is no room.
    wait: Duration,
    inner: Mutex<Inner<S::Engine>>,
    /// Changes whenever a request that waits may get further.
    changed: watch::Sender<()>,
}

struct Inner<E> {
    entries: Vec<Entry<E>>,
    /// Requests whose model is not loaded, the first to be served first.
    waiting: VecDeque<u64>,
    newest: u64,
    /// Number of uses so far: a clock may stand still between two of them.
    uses: u64,
}

struct Entry<E> {
    settings: Settings,
    /// [`Settings::keep_alive`], unless the newest request has set another.
    keep_alive: Option<Duration>,
    phase: Phase<E>,
    /// Bytes it counts with while it is not on disk.
    bytes: u64,
    leases: usize,
    last_used: Instant,
    /// [`Inner::uses`] at that time.
    last_use: u64,
    /// Gets no new leases: another model waits for its room.
    closing: bool,
    /// Gets no new leases: it is not served any more.
    withdrawn: bool,
    loads: u64,
    unloads: u64,
    load_time: Option<Duration>,
    /// Number of loads that failed, and why the last did.
    failures: u64,
    failure: String,
}

enum Phase<E> {
    OnDisk,
    Loading,
    Loaded(E),
    Unloading,
}

/// The right to use a loaded model, until it is dropped.
pub struct Lease<S: Starter> {
    /// Dropped before the lease counts as returned.
    engine: Option<S::Engine>,
    index: usize,
    shared: Arc<Shared<S>>,
}

/// What a request does next.
enum Step<E> {
    /// It has its model.
    Use(E),
    /// It waits for a load or an unload.
    Wait,
    /// It waits for others to end.
    WaitForRoom,
}

impl<S: Starter> Clone for Pool<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Starter> Pool<S> {
    /// Models on disk, of which loaded ones take at most `budget` bytes together. A request waits for
    /// `wait` while there is no room for its model.
    pub fn new(starter: S, models: Vec<Settings>, budget: u64, wait: Duration) -> Self {
        let entries = models.into_iter().map(Entry::new).collect();
        let inner = Inner { entries, waiting: VecDeque::new(), newest: 0, uses: 0 };
        let (inner, changed) = (Mutex::new(inner), watch::Sender::new(()));
        Self(Arc::new(Shared { starter, budget, wait, inner, changed }))
    }

    /// Adds a model that is loaded already and stays so; returns its index.
    pub fn add_loaded(&self, name: &str, engine: S::Engine, bytes: u64) -> usize {
        let inner = &mut *self.0.inner.lock();
        let settings = Settings { name: name.into(), keep_alive: None, pinned: true };
        let phase = Phase::Loaded(engine);
        inner.entries.push(Entry { phase, bytes, ..Entry::new(settings) });
        inner.entries.len() - 1
    }

    /// Adds a model on disk; returns its index.
    pub fn add(&self, settings: Settings) -> usize {
        let inner = &mut *self.0.inner.lock();
        inner.entries.push(Entry::new(settings));
        inner.entries.len() - 1
    }

    /// What starts the models.
    pub fn starter(&self) -> &S {
        &self.0.starter
    }

    /// Most bytes of all loaded models.
    pub fn budget(&self) -> u64 {
        self.0.budget
    }

    /// The engine of model `index` if it is loaded, for a moment: it may be unloaded at any time.
    pub fn loaded(&self, index: usize) -> Option<S::Engine> {
        match &self.0.inner.lock().entries[index].phase {
            Phase::Loaded(engine) => Some(engine.clone()),
            _ => None,
        }
    }

    /// All models, by index.
    pub fn report(&self) -> Vec<Report> {
        self.0.inner.lock().entries.iter().map(Entry::report).collect()
    }

    /// How long model `index` stays loaded after the requests so far; `None` for no limit. Returns whether it is not
    /// one that stays in any case.
    pub fn keep(&self, index: usize, keep_alive: Option<Duration>) -> bool {
        let inner = &mut *self.0.inner.lock();
        let entry = &mut inner.entries[index];
        entry.keep_alive = keep_alive;
        self.0.changed.send_replace(());
        !entry.settings.pinned
    }

    /// Waits until model `index` is loaded, and keeps it so for a request. Loads it if it is on disk.
    ///
    /// # Errors
    /// If that is not possible, or `deadline` is over.
    pub async fn acquire(&self, index: usize, deadline: Instant) -> Result<Lease<S>, Refusal> {
        if let Some(lease) = self.acquire_loaded(index) {
            return Ok(lease);
        }
        let bytes = self.bytes(index).await?;
        let mut place = Place::take(&self.0);
        let mut changed = self.0.changed.subscribe();
        let failures = self.0.inner.lock().entries[index].failures;
        let (mut no_room_since, mut insists) = (None, false);
        loop {
            changed.mark_unchanged();
            let until = match self.step(index, bytes, place.id, failures, insists)? {
                Step::Use(engine) => {
                    place.leave();
                    return Ok(Lease { engine: Some(engine), index, shared: self.0.clone() });
                }
                Step::Wait => deadline,
                Step::WaitForRoom => {
                    let since = *no_room_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= self.0.wait {
                        return Err(self.no_room(index));
                    }
                    let patience = if insists { self.0.wait } else { PATIENCE.min(self.0.wait) };
                    insists |= since.elapsed() >= PATIENCE;
                    deadline.min(since + patience)
                }
            };
            if Instant::now() >= deadline {
                let model = self.name(index);
                return Err(Refusal::Deadline { model });
            }
            // The sender lives as long as the pool.
            let _ = timeout_at(until, changed.changed()).await;
        }
    }

    /// A lease if the model is loaded.
    fn acquire_loaded(&self, index: usize) -> Option<Lease<S>> {
        let engine = self.0.inner.lock().lease(index)?;
        Some(Lease { engine: Some(engine), index, shared: self.0.clone() })
    }

    async fn bytes(&self, index: usize) -> Result<u64, Refusal> {
        let shared = self.0.clone();
        let bytes = tokio::task::spawn_blocking(move || shared.starter.bytes(index)).await;
        let bytes = bytes.map_err(|panic| anyhow!("{panic}")).and_then(|bytes| bytes);
        bytes.map_err(|error| Refusal::Absent {
            model: self.name(index),
            problem: format!("{error:#}"),
        })
    }

    /// Does what can be done for a request that waits for model `index`.
    fn step(
        &self,
        index: usize,
        bytes: u64,
        place: u64,
        failures: u64,
        insists: bool,
    ) -> Result<Step<S::Engine>, Refusal> {
        let inner = &mut *self.0.inner.lock();
        if let Some(engine) = inner.lease(index) {
            return Ok(Step::Use(engine));
        }
        let entry = &inner.entries[index];
        let model = || entry.settings.name.clone();
        if entry.withdrawn {
            return Err(Refusal::Withdrawn { model: model() });
        }
        if entry.failures > failures {
            return Err(Refusal::Failed { model: model(), problem: entry.failure.clone() });
        }
        match entry.phase {
            Phase::OnDisk => {}
            // Closing.
            Phase::Loaded(_) => return Ok(Step::WaitForRoom),
            Phase::Loading | Phase::Unloading => return Ok(Step::Wait),
        }
        let budget = self.0.budget;
        let free = budget.saturating_sub(inner.sum(|entry| entry.settings.pinned));
        if bytes > free {
            return Err(Refusal::TooLarge { model: model(), bytes, free, budget });
        }
        let loads = inner.entries.iter().any(|entry| matches!(entry.phase, Phase::Loading));
        if loads || inner.waiting.front() != Some(&place) {
            return Ok(Step::Wait);
        }
        let taken = inner.sum(|_| true);
        if taken + bytes <= budget {
            let entry = &mut inner.entries[index];
            (entry.phase, entry.bytes) = (Phase::Loading, bytes);
            inner.entries.iter_mut().for_each(|entry| entry.closing = false);
            self.spawn_load(index);
            return Ok(Step::Wait);
        }
        // What is being unloaded will be free.
        let leaving = inner.sum(|entry| matches!(entry.phase, Phase::Unloading));
        let needed = (taken + bytes - leaving).saturating_sub(budget);
        if needed == 0 {
            return Ok(Step::Wait);
        }
        if let Some(idle) = inner.oldest(needed, |entry| entry.leases == 0) {
            for index in idle {
                if let Some(engine) = inner.entries[index].unload() {
                    self.spawn_unload(index, engine, "room");
                }
            }
            return Ok(Step::Wait);
        }
        if insists && let Some(used) = inner.oldest(needed, |_| true) {
            used.into_iter().for_each(|index| inner.entries[index].closing = true);
        }
        Ok(Step::WaitForRoom)
    }

    fn spawn_load(&self, index: usize) {
        let pool = self.clone();
        tokio::spawn(async move {
            let started = Instant::now();
            let shared = pool.0.clone();
            let load = tokio::task::spawn_blocking(move || shared.starter.start(index)).await;
            let loaded = load.map_err(|panic| anyhow!("{panic}")).and_then(|loaded| loaded);
            let is_kept = {
                let inner = &mut *pool.0.inner.lock();
                inner.use_now(index);
                let entry = &mut inner.entries[index];
                let (model, elapsed) = (entry.settings.name.as_str(), started.elapsed());
                let elapsed_ms = elapsed.as_millis() as u64;
                match loaded {
                    Ok(engine) => {
                        entry.loads += 1;
                        entry.load_time = Some(elapsed);
                        entry.phase = Phase::Loaded(engine);
                        // Not that of the request before, which may be zero: the request that waits would never
                        // get the model.
                        entry.keep_alive = entry.settings.keep_alive;
                        let bytes = entry.bytes;
                        tracing::info!(model, bytes, elapsed_ms, "model loaded on demand");
                        entry.settings.pinned
                    }
                    Err(error) => {
                        tracing::error!(model, elapsed_ms, error = %format!("{error:#}"), "loading failed");
                        entry.failures += 1;
                        entry.failure = format!("{error:#}");
                        entry.phase = Phase::OnDisk;
                        true
                    }
                }
            };
            pool.0.changed.send_replace(());
            if !is_kept {
                pool.unload_when_idle(index).await;
            }
        });
    }

    /// Unloads model `index` when it has not been used for its `keep_alive`. Ends when it is unloaded.
    async fn unload_when_idle(self, index: usize) {
        let mut changed = self.0.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let expires = {
                let inner = &mut *self.0.inner.lock();
                let entry = &mut inner.entries[index];
                if !matches!(entry.phase, Phase::Loaded(_)) {
                    return;
                }
                // A time that is too far is never.
                let expires = entry.idle_time().and_then(|time| entry.last_used.checked_add(time));
                let expires = expires.filter(|_| entry.leases == 0);
                if expires.is_some_and(|expires| Instant::now() >= expires) {
                    if let Some(engine) = entry.unload() {
                        self.spawn_unload(index, engine, "keep_alive");
                    }
                    return;
                }
                expires
            };
            match expires {
                Some(expires) => tokio::select! {
                    () = sleep_until(expires) => {}
                    _ = changed.changed() => {}
                },
                None => drop(changed.changed().await),
            }
        }
    }

    fn spawn_unload(&self, index: usize, engine: S::Engine, reason: &'static str) {
        let pool = self.clone();
        tokio::spawn(async move {
            let started = Instant::now();
            let shared = pool.0.clone();
            let stop =
                tokio::task::spawn_blocking(move || shared.starter.stop(index, engine)).await;
            {
                let inner = &mut *pool.0.inner.lock();
                let entry = &mut inner.entries[index];
                let model = entry.settings.name.as_str();
                let elapsed_ms = started.elapsed().as_millis() as u64;
                let panicked = stop.is_err();
                let bytes = entry.bytes;
                tracing::info!(model, bytes, elapsed_ms, reason, panicked, "model unloaded");
                entry.unloads += 1;
                entry.phase = Phase::OnDisk;
            }
            pool.0.changed.send_replace(());
        });
    }

    fn no_room(&self, index: usize) -> Refusal {
        let inner = self.0.inner.lock();
        let used = inner.entries.iter().filter(|entry| entry.leases > 0 && !entry.settings.pinned);
        let used: Vec<_> = used.map(|entry| format!("`{}`", entry.settings.name)).collect();
        let in_use = if used.is_empty() { "other models".into() } else { used.join(", ") };
        Refusal::NoRoom { model: inner.entries[index].settings.name.clone(), in_use }
    }

    fn name(&self, index: usize) -> String {
        self.0.inner.lock().entries[index].settings.name.clone()
    }
}

impl<E> Inner<E> {
    fn use_now(&mut self, index: usize) {
        self.uses += 1;
        let entry = &mut self.entries[index];
        (entry.last_used, entry.last_use) = (Instant::now(), self.uses);
    }

    /// Bytes of the models that are not on disk and `count`.
    fn sum(&self, count: impl Fn(&Entry<E>) -> bool) -> u64 {
        let entries = self.entries.iter().filter(|entry| !matches!(entry.phase, Phase::OnDisk));
        entries.filter(|entry| count(entry)).map(|entry| entry.bytes).sum()
    }

    /// The loaded models to unload for `needed` bytes, those first that have not been used for the longest
    /// time. `None` if those that `may` be unloaded do not suffice.
    fn oldest(&self, needed: u64, may: impl Fn(&Entry<E>) -> bool) -> Option<Vec<usize>> {
        let is_candidate = |entry: &Entry<E>| {
            matches!(entry.phase, Phase::Loaded(_)) && !entry.settings.pinned && may(entry)
        };
        let mut candidates: Vec<_> =
            (0..self.entries.len()).filter(|&index| is_candidate(&self.entries[index])).collect();
        candidates.sort_by_key(|&index| self.entries[index].last_use);
        let mut freed = 0;
        let mut chosen = Vec::new();
        for index in candidates {
            if freed >= needed {
                break;
            }
            freed += self.entries[index].bytes;
            chosen.push(index);
        }
        (freed >= needed).then_some(chosen)
    }
}

impl<E> Entry<E> {
    fn new(settings: Settings) -> Self {
        Self {
            keep_alive: settings.keep_alive,
            settings,
            phase: Phase::OnDisk,
            bytes: 0,
            leases: 0,
            last_used: Instant::now(),
            last_use: 0,
            closing: false,
            withdrawn: false,
            loads: 0,
            unloads: 0,
            load_time: None,
            failures: 0,
            failure: String::new(),
        }
    }

    /// Takes the engine of a model that is to be unloaded.
    fn unload(&mut self) -> Option<E> {
        self.closing = false;
        match std::mem::replace(&mut self.phase, Phase::Unloading) {
            Phase::Loaded(engine) => Some(engine),
            phase => {
                self.phase = phase;
                None
            }
        }
    }

    fn report(&self) -> Report {
        let state = match self.phase {
            Phase::OnDisk => State::OnDisk,
            Phase::Loading => State::Loading,
            Phase::Loaded(_) => State::Loaded,
            Phase::Unloading => State::Unloading,
        };
        let idle = state == State::Loaded && self.leases == 0 && !self.settings.pinned;
        let expires = self.idle_time().filter(|_| idle);
        Report {
            state,
            bytes: self.bytes,
            requests: self.leases,
            expires: expires.map(|time| time.saturating_sub(self.last_used.elapsed())),
            loads: self.loads,
            unloads: self.unloads,
            load_time: self.load_time,
            withdrawn: self.withdrawn,
        }
    }

    /// How long it stays loaded without a request; `None` for no limit.
    fn idle_time(&self) -> Option<Duration> {
        if self.withdrawn { Some(Duration::ZERO) } else { self.keep_alive }
    }
}

impl<E: Clone> Inner<E> {
    /// The engine of a model for another request, if that may have it.
    fn lease(&mut self, index: usize) -> Option<E> {
        let entry = &self.entries[index];
        let Phase::Loaded(engine) = &entry.phase else { return None };
        if entry.closing || entry.withdrawn {
            return None;
        }
        let engine = engine.clone();
        let entry = &mut self.entries[index];
        entry.leases += 1;
        entry.keep_alive = entry.settings.keep_alive;
        self.use_now(index);
        Some(engine)
    }
}

impl<S: Starter> Lease<S> {
    /// What serves the model.
    pub fn engine(&self) -> &S::Engine {
        self.engine.as_ref().expect("taken when the lease is dropped only")
    }

    /// Index of the model.
    pub fn index(&self) -> usize {
        self.index
    }
}

impl<S: Starter> Drop for Lease<S> {
    fn drop(&mut self) {
        // An engine ends after its last handle.
        drop(self.engine.take());
        let inner = &mut *self.shared.inner.lock();
        inner.entries[self.index].leases -= 1;
        inner.use_now(self.index);
        self.shared.changed.send_replace(());
    }
}

/// The place of a request among those that wait.
struct Place<'a, S: Starter> {
    shared: &'a Shared<S>,
    id: u64,
    left: bool,
}

impl<'a, S: Starter> Place<'a, S> {
    fn take(shared: &'a Shared<S>) -> Self {
        let inner = &mut *shared.inner.lock();
        inner.newest += 1;
        inner.waiting.push_back(inner.newest);
        Self { shared, id: inner.newest, left: false }
    }

    fn leave(&mut self) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        let inner = &mut *self.shared.inner.lock();
        let was_first = inner.waiting.front() == Some(&self.id);
        inner.waiting.retain(|id| *id != self.id);
        if was_first {
            // They were kept from others for this request.
            inner.entries.iter_mut().for_each(|entry| entry.closing = false);
        }
        self.shared.changed.send_replace(());
    }
}

impl<S: Starter> Drop for Place<'_, S> {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests;
