//! Threads that share the pieces of one product at a time.
//!
//! The caller works too, and pieces are claimed one by one: a thread that the scheduler takes its core from delays the
//! product by its own piece only. Threads wait for the next product for some microseconds and then sleep, as they
//! must not take a core from whatever runs between two products.

#![allow(unsafe_code, reason = "a piece of work is borrowed by threads that outlive it")]

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Most threads, the caller included.
const MAX_THREADS: usize = 64;

/// How long a thread looks for the next product before it sleeps. Waking it takes about as long as this.
const SPIN: Duration = Duration::from_micros(20);

/// Times that the caller looks whether the others have finished before it offers its core.
const LOOKS: usize = 2_000;

/// Products of elements from which [`run_if_large`] divides the work between threads.
const SHARED: usize = 1 << 15;

/// The number of threads of each further product.
static THREADS: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Threads that a product may have: the cores that the process may use.
pub fn max_threads() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS))
}

/// Sets the number of threads of each further product, at least 1 and at most [`max_threads`].
pub fn set_threads(threads: usize) {
    THREADS.store(threads.max(1), Ordering::Relaxed);
}

/// The number of threads of a product; all cores unless [`set_threads`] was called.
pub fn threads() -> usize {
    THREADS.load(Ordering::Relaxed).min(max_threads())
}

/// The pieces of one product.
struct Job {
    /// Called with the number of each piece. Points to the caller's stack; valid until all pieces are done.
    run: *const (dyn Fn(usize) + Sync),
    pieces: usize,
    /// The next piece that nobody has claimed.
    next: AtomicUsize,
    done: AtomicUsize,
    /// Threads that may still join the caller.
    helpers: AtomicUsize,
}

// SAFETY: `run` points to a `Sync` closure that outlives every call; see `Job::work`.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    /// Runs pieces until all are claimed.
    fn work(&self) {
        loop {
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            if piece >= self.pieces {
                return;
            }
            // SAFETY: `Pool::run` returns only when `done` counts all pieces, and this one is not counted yet. So
            // the caller's stack frame, which `run` points to, still exists.
            unsafe { (*self.run)(piece) };
            self.done.fetch_add(1, Ordering::Release);
        }
    }
}

struct Pool {
    /// Held by the product that uses the threads.
    turn: Mutex<()>,
    job: Mutex<Option<Arc<Job>>>,
    changed: Condvar,
    /// Number of jobs so far; changes with `job`.
    jobs: AtomicU64,
}

/// Calls `run` with each number below `pieces`, on up to [`threads`] threads.
pub fn run(pieces: usize, run: &(dyn Fn(usize) + Sync)) {
    let threads = threads().min(pieces);
    if threads > 1
        && let Some(pool) = pool()
        // Another engine's product runs: its threads have the cores.
        && let Some(_turn) = pool.turn.try_lock()
    {
        return pool.run(pieces, threads - 1, run);
    }
    (0..pieces).for_each(run);
}

/// As [`run`], on one thread if the work has few products of elements: waking others would take longer.
pub fn run_if_large(products: usize, pieces: usize, piece: &(dyn Fn(usize) + Sync)) {
    if products < SHARED { (0..pieces).for_each(piece) } else { run(pieces, piece) }
}

fn pool() -> Option<&'static Pool> {
    static POOL: OnceLock<Option<&'static Pool>> = OnceLock::new();
    *POOL.get_or_init(|| {
        let pool: &'static Pool = Box::leak(Box::new(Pool {
            turn: Mutex::new(()),
            job: Mutex::new(None),
            changed: Condvar::new(),
            jobs: AtomicU64::new(0),
        }));
        let started = (1..max_threads()).take_while(|i| {
            let name = format!("product-{i}");
            thread::Builder::new().name(name).spawn(|| pool.help()).is_ok()
        });
        // Without threads (a limit of the process), the callers work alone.
        (started.count() > 0).then_some(pool)
    })
}

impl Pool {
    fn run(&self, pieces: usize, helpers: usize, run: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes, and `Job::work` uses the pointer only while `run` is borrowed.
        let run = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync)>(run)
        };
        let job = Arc::new(Job {
            run,
            pieces,
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            helpers: AtomicUsize::new(helpers),
        });
        {
            let mut slot = self.job.lock();
            *slot = Some(job.clone());
            self.jobs.fetch_add(1, Ordering::Release);
        }
        self.changed.notify_all();
        // Waits even if a piece panics here, as the others still use `run`.
        let wait = Finish(&job);
        job.work();
        drop(wait);
        *self.job.lock() = None;
    }

    /// The life of a thread.
    fn help(&self) {
        let mut seen = 0;
        loop {
            let start = Instant::now();
            while self.jobs.load(Ordering::Acquire) == seen && start.elapsed() < SPIN {
                std::hint::spin_loop();
            }
            let job = {
                let mut slot = self.job.lock();
                while self.jobs.load(Ordering::Acquire) == seen {
                    self.changed.wait(&mut slot);
                }
                seen = self.jobs.load(Ordering::Acquire);
                slot.clone()
            };
            let Some(job) = job else { continue };
            let join = |left: usize| left.checked_sub(1);
            if job.helpers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, join).is_ok() {
                let abort = AbortOnPanic;
                job.work();
                std::mem::forget(abort);
            }
        }
    }
}

/// Waits until all claimed pieces are done.
struct Finish<'a>(&'a Job);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            // The piece that panicked is never done: this would not return.
            std::process::abort();
        }
        let mut looks = 0;
        while self.0.done.load(Ordering::Acquire) < self.0.pieces {
            if looks < LOOKS {
                looks += 1;
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }
}

/// Aborts the process when a piece panics on a thread: it is never done, and the caller would not return.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_runs_once() {
        for pieces in [0, 1, 2, 3, 1000] {
            for _ in 0..200 {
                let counts: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                run(pieces, &|piece| {
                    counts[piece].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    /// Several engines in a process compute at the same time.
    #[test]
    fn callers_do_not_wait_for_one_another() {
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        run(8, &|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 500 * 8);
    }
}
