//! The thread that advances wasmtime's epoch, which interrupts calls past their deadline.
//!
//! One for each [`super::Host`]. It sleeps while no instance is alive, so an idle server has no
//! wake-ups. It never touches a store.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use wasmtime::Engine;

/// Ticks in `policy.deadline_ms`: a call is interrupted at most two ticks late.
const TICKS: u64 = 5;

/// Shortest tick, so that a tiny deadline does not keep a core busy.
const SHORTEST_TICK: Duration = Duration::from_micros(200);

fn tick(deadline_ms: u64) -> Duration {
    Duration::from_micros(deadline_ms.saturating_mul(1000) / TICKS).max(SHORTEST_TICK)
}

/// Time limit of a call.
#[derive(Clone, Copy)]
pub struct Deadline {
    /// In milliseconds.
    pub ms: u64,
    /// In ticks of the epoch, from the current one.
    pub ticks: u64,
}

impl Deadline {
    /// A deadline in `ms` milliseconds, in ticks whose period follows from `deadline_ms`, the value of
    /// `policy.deadline_ms`.
    pub fn new(ms: u64, deadline_ms: u64) -> Self {
        let ticks = Duration::from_millis(ms).as_micros().div_ceil(tick(deadline_ms).as_micros());
        // The current tick has already begun: without one more the deadline could come early.
        Self { ms, ticks: u64::try_from(ticks).unwrap_or(u64::MAX).saturating_add(1) }
    }
}

/// Owner of the thread, which ends when this is dropped.
pub struct Ticker(Arc<Shared>);

struct Shared {
    state: Mutex<TickerState>,
    changed: Condvar,
}

#[derive(Default)]
struct TickerState {
    alive: usize,
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

    /// Keeps the epoch advancing while the returned value lives; `None` if `most` of them do already.
    pub fn watch(self: &Arc<Self>, most: usize) -> Option<Alive> {
        let mut state = self.0.state.lock();
        if state.alive >= most {
            return None;
        }
        state.alive += 1;
        self.0.changed.notify_one();
        Some(Alive(self.clone()))
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    /// Waits for an instance; returns false when the thread must end.
    fn wait_until_needed(&self) -> bool {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |state| state.alive == 0 && !state.closed);
        !state.closed
    }
}

/// Held by each instance.
pub struct Alive(Arc<Ticker>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.0.state.lock().alive -= 1;
    }
}
