//! The thread that advances wasmtime's epoch, so that a call past its deadline is interrupted.
//!
//! One for each [`super::Host`]. It sleeps while no instance is alive: an idle server wakes up for
//! nothing. It never touches a store.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wasmtime::Engine;

/// Ticks of the epoch in `policy.deadline_ms`: a call is interrupted at most two `TICKS`-ths late.
const TICKS: u64 = 5;

/// Shortest tick, so that a tiny deadline does not keep a core busy.
const TICK_LEAST: Duration = Duration::from_micros(200);

/// Length of a tick where `policy.deadline_ms` is `deadline_ms`.
fn tick(deadline_ms: u64) -> Duration {
    Duration::from_micros(deadline_ms.saturating_mul(1000) / TICKS).max(TICK_LEAST)
}

/// Longest that a call may take.
#[derive(Clone, Copy)]
pub struct Deadline {
    /// In milliseconds.
    pub ms: u64,
    /// In ticks of the epoch, from the moment on at which it is set.
    pub ticks: u64,
}

impl Deadline {
    /// `ms`, where `policy.deadline_ms` is `deadline_ms`.
    pub fn new(ms: u64, deadline_ms: u64) -> Self {
        let ticks = Duration::from_millis(ms).as_micros().div_ceil(tick(deadline_ms).as_micros());
        // The current tick has begun already: without one more the deadline could come early.
        Self { ms, ticks: u64::try_from(ticks).unwrap_or(u64::MAX).saturating_add(1) }
    }
}

/// Owner of the thread, which ends when this is dropped.
pub struct Ticker(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    alive: u32,
    closed: bool,
}

impl Ticker {
    /// Starts the thread.
    pub fn start(engine: Engine, deadline_ms: u64) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let tick = tick(deadline_ms);
        let ticker = Self(shared.clone());
        std::thread::Builder::new().name("policy-epoch".into()).spawn(move || {
            while shared.wait_until_needed() {
                std::thread::sleep(tick);
                engine.increment_epoch();
            }
        })?;
        Ok(ticker)
    }

    /// Keeps the epoch advancing while the returned value lives.
    pub fn watch(self: &Arc<Self>) -> Alive {
        self.0.lock().alive += 1;
        self.0.changed.notify_one();
        Alive(self.clone())
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    /// False when the thread shall end.
    fn wait_until_needed(&self) -> bool {
        let idle = |state: &mut State| state.alive == 0 && !state.closed;
        let state = self.changed.wait_while(self.lock(), idle);
        !state.unwrap_or_else(PoisonError::into_inner).closed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing can panic between two changes of the state, so it is whole even when poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says that an instance lives.
pub struct Alive(Arc<Ticker>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.0.lock().alive -= 1;
    }
}
