//! Wired memory: on a Mac, the arrays of a model in use stay in memory.
//!
//! macOS pages out what no program has touched for a while, and a model that takes more than half of the memory between two
//! requests. MLX keeps its arrays in a residency set of Metal, up to a limit that is 0 by default (macOS 15 and later;
//! earlier versions ignore it, and so does MLX on other systems). The limit here is 0 while all engines wait for requests
//! for longer than `engine.wired_idle_s`: other programs can have the memory then.
//!
//! All engines share MLX's one allocator, so there is one [`Keeper`]. An engine is in use from [`begin`] on, except while
//! it waits ([`InUse::while_idle`]).

use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Sets MLX's limit on wired bytes.
type SetLimit = fn(u64) -> Result<(), String>;

/// The keeper of this process.
static KEEPER: Keeper = Keeper::new(set_limit);

fn set_limit(bytes: u64) -> Result<(), String> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    mlx_rs::memory::set_wired_limit(bytes).map(drop).map_err(|error| error.to_string())
}

/// Sets what is wired while an engine is in use, and for how long after that. With no bytes or no time nothing is wired.
pub fn configure(bytes: u64, idle: Duration) {
    KEEPER.configure(bytes, idle);
}

/// Marks the calling engine as in use until the result is dropped.
pub fn begin() -> InUse {
    KEEPER.begin()
}

/// What wires and releases memory.
struct Keeper {
    state: Mutex<State>,
    /// Signals that the last engine has begun to wait.
    all_wait: Condvar,
    set_limit: SetLimit,
}

struct State {
    /// Bytes to wire while an engine is in use.
    bytes: u64,
    /// Time after the last use until they are released.
    idle: Duration,
    /// Engines in use.
    in_use: usize,
    /// Uses since the start, by which the thread sees that there was another one.
    uses: u64,
    /// Bytes that are wired now.
    wired: u64,
    has_thread: bool,
}

impl Keeper {
    const fn new(set_limit: SetLimit) -> Self {
        let state = State {
            bytes: 0,
            idle: Duration::ZERO,
            in_use: 0,
            uses: 0,
            wired: 0,
            has_thread: false,
        };
        Self { state: Mutex::new(state), all_wait: Condvar::new(), set_limit }
    }

    fn configure(&'static self, bytes: u64, idle: Duration) {
        let mut state = self.state.lock();
        (state.bytes, state.idle) = (if idle.is_zero() { 0 } else { bytes }, idle);
        if state.in_use > 0 {
            self.wire(&mut state);
        }
    }

    fn begin(&'static self) -> InUse {
        let mut state = self.state.lock();
        self.enter(&mut state);
        InUse(self)
    }

    fn enter(&'static self, state: &mut State) {
        state.in_use += 1;
        state.uses += 1;
        self.wire(state);
    }

    fn leave(&self, state: &mut State) {
        state.in_use -= 1;
        if state.in_use == 0 {
            self.all_wait.notify_all();
        }
    }

    /// Wires the bytes that are configured.
    fn wire(&'static self, state: &mut State) {
        if state.bytes > 0 && !state.has_thread {
            let thread = thread::Builder::new().name("wired".into());
            match thread.spawn(|| self.release_when_idle()) {
                Ok(_) => state.has_thread = true,
                // Without it, memory would stay wired for ever.
                Err(error) => return tracing::warn!(%error, "memory is not wired"),
            }
        }
        if state.wired != state.bytes {
            self.set(state, state.bytes);
        }
    }

    fn set(&self, state: &mut State, bytes: u64) {
        match (self.set_limit)(bytes) {
            Ok(()) => {
                state.wired = bytes;
                tracing::debug!(bytes, "wired memory");
            }
            Err(error) => {
                // It would fail at each request.
                state.bytes = state.wired;
                tracing::warn!(bytes, error, "memory is not wired");
            }
        }
    }

    /// Releases memory whenever all engines have waited for the configured time.
    fn release_when_idle(&self) {
        let mut state = self.state.lock();
        loop {
            while state.in_use > 0 || state.wired == 0 {
                self.all_wait.wait(&mut state);
            }
            let (uses, idle) = (state.uses, state.idle);
            let is_over = self.all_wait.wait_for(&mut state, idle).timed_out();
            if is_over && state.uses == uses && state.in_use == 0 {
                self.set(&mut state, 0);
                if state.wired > 0 {
                    // It cannot be released, and trying again would not help.
                    return;
                }
            }
        }
    }
}

/// An engine in use.
pub struct InUse(&'static Keeper);

impl InUse {
    /// Calls `wait`, during which the engine is not in use.
    pub fn while_idle<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.0.leave(&mut self.0.state.lock());
        // Counted again after a panic of `wait` as well: it is dropped then.
        let _entered = Enter(self.0);
        wait()
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.leave(&mut self.0.state.lock());
    }
}

/// Marks an engine as in use when it is dropped.
struct Enter(&'static Keeper);

impl Drop for Enter {
    fn drop(&mut self) {
        self.0.enter(&mut self.0.state.lock());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const IDLE: Duration = Duration::from_millis(50);

    fn leaked(set_limit: SetLimit) -> &'static Keeper {
        Box::leak(Box::new(Keeper::new(set_limit)))
    }

    fn accept(_: u64) -> Result<(), String> {
        Ok(())
    }

    fn wired(keeper: &Keeper) -> u64 {
        keeper.state.lock().wired
    }

    /// Waits until `bytes` are wired; a busy machine may need long for it.
    fn expect(keeper: &Keeper, bytes: u64) {
        let start = Instant::now();
        while wired(keeper) != bytes {
            assert!(start.elapsed() < Duration::from_secs(60), "{} bytes are wired", wired(keeper));
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn memory_is_wired_while_an_engine_is_in_use_and_released_when_all_wait() {
        let keeper = leaked(accept);
        keeper.configure(7, IDLE);
        assert_eq!(wired(keeper), 0);
        let (first, second) = (keeper.begin(), keeper.begin());
        assert_eq!(wired(keeper), 7);
        first.while_idle(|| {
            // The other one is in use.
            thread::sleep(3 * IDLE);
            assert_eq!(wired(keeper), 7);
            second.while_idle(|| {
                expect(keeper, 0);
            });
            assert_eq!(wired(keeper), 7, "the next request wires it before it runs");
        });
        drop((first, second));
        expect(keeper, 0);
    }

    #[test]
    fn without_bytes_or_time_nothing_is_wired() {
        fn refuse(_: u64) -> Result<(), String> {
            panic!("nothing is to be wired")
        }
        let keeper = leaked(refuse);
        for (bytes, idle) in [(0, IDLE), (7, Duration::ZERO)] {
            keeper.configure(bytes, idle);
            keeper.begin().while_idle(|| {});
            assert!(!keeper.state.lock().has_thread);
        }
    }

    /// A request runs all the same, and the next one does not try again.
    #[test]
    fn a_system_that_refuses_is_asked_once() {
        let keeper = leaked(|_| Err("not allowed".into()));
        keeper.configure(7, IDLE);
        keeper.begin().while_idle(|| {});
        let state = keeper.state.lock();
        assert_eq!((state.wired, state.bytes), (0, 0));
    }
}
