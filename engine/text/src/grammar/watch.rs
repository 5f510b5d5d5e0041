//! Ends masks that take too long.
//!
//! A mask is computed on the engine's thread, and its fuel does not count all of its work: sorting alternatives of
//! long repetitions takes a thousand times as long as others. A thread cancels a mask at its deadline, which llguidance
//! notices between two transitions of its lexer. That reply ends with an error, and the others go on.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;
use parking_lot::{Condvar, Mutex};

/// Elapsed time of a mask, or of committing a token. Masks of common forms take microseconds, of large ones some
/// milliseconds.
pub const LIMIT: Duration = Duration::from_secs(2);

/// Elapsed time of the first mask, which is computed on a thread of its own.
pub const FIRST: Duration = Duration::from_secs(10);

/// How often the thread looks while something is watched.
const TICK: Duration = Duration::from_millis(100);

#[derive(Default)]
struct Watch {
    state: Mutex<State>,
    began: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    /// By number, its deadline, and what cancels it.
    running: BTreeMap<u64, (Instant, CancellationHandle)>,
    sleeps: bool,
}

/// An operation that is watched until this is dropped.
pub struct Watched(u64);

/// Cancels an operation through `handle` if it runs longer than `limit`.
pub fn watch(handle: CancellationHandle, limit: Duration) -> Watched {
    let watch = the_watch();
    let mut state = watch.state.lock();
    state.next += 1;
    let number = state.next;
    state.running.insert(number, (Instant::now() + limit, handle));
    if state.sleeps {
        watch.began.notify_one();
    }
    Watched(number)
}

impl Drop for Watched {
    fn drop(&mut self) {
        the_watch().state.lock().running.remove(&self.0);
    }
}

fn the_watch() -> &'static Watch {
    static WATCH: OnceLock<&'static Watch> = OnceLock::new();
    WATCH.get_or_init(|| {
        let watch: &'static Watch = Box::leak(Box::default());
        let thread = std::thread::Builder::new().name("form-watch".into());
        // Without a thread nothing is cancelled; the fuel ends masks, later.
        if let Err(error) = thread.spawn(|| run(watch)) {
            tracing::warn!(%error, "no thread watches the masks of forms");
        }
        watch
    })
}

fn run(watch: &Watch) {
    let mut state = watch.state.lock();
    loop {
        if state.running.is_empty() {
            state.sleeps = true;
            watch.began.wait(&mut state);
            state.sleeps = false;
        }
        watch.began.wait_for(&mut state, TICK);
        for (deadline, handle) in state.running.values() {
            if Instant::now() > *deadline {
                handle.cancel();
            }
        }
    }
}
