//! Threads of the matrix products on a CPU: those of OpenBLAS, and those of our own kernels for packed weights.
//!
//! OpenBLAS's threads spin while they wait for one another. On a quiet machine they make prefill faster. A
//! step of one row is too short for them on a small model, and their spinning takes the cores of MLX
//! and of the engine thread. If another process takes a core from one of them, each product waits for
//! the scheduler: 30 ms instead of 0.3 ms for 4 rows of 1536 x 512 on two busy cores.
//!
//! So the numbers for steps and for chunks of a prompt are measured on the loaded model, and while the
//! process is preempted often, products run on one thread. The number of threads did not change a bit
//! of any product of 1 to 256 rows (OpenBLAS 0.3.34, x86-64 with AVX-512).

use std::time::{Duration, Instant};

use mlx_rs::transforms::{async_eval, eval};
use nix::sys::resource::{UsageWho, getrusage};

use super::governor::greedy_pass;
use crate::cache::Cache;
use crate::config::DEPTH;
use crate::error::Result;
use crate::kernels;
use crate::model::{Model, Pass};

/// Time for measuring one number of threads, for steps and for prefill each.
const MEASURING: Duration = Duration::from_millis(400);

/// Most steps of one measurement.
const STEPS: usize = 24;

/// Rows of the chunk with which prefill is measured.
const CHUNK: u32 = 64;

/// Fewer threads are chosen unless more are faster by this factor: they also take cores from others.
const GAIN: f32 = 1.05;

/// Interval of checks whether the process is preempted.
const CHECK: Duration = Duration::from_millis(100);

/// Preemptions a second beyond which the cores are contended. The scheduler's slices are some
/// milliseconds, so a thread that shares its core is preempted more often than this.
const PREEMPTIONS: f64 = 60.0;

/// First and longest time on one thread before more are tried again; doubled each time.
const RETREAT: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(32)];

/// What computes the matrix products of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// OpenBLAS.
    Blas,
    /// Kernels of our own multiply with the weights, OpenBLAS with keys and values.
    Own,
    /// Neither: a GPU, or another BLAS.
    Other,
}

impl Products {
    /// Those of a model on a CPU or not, with or without matrices for our own kernels.
    pub fn of(on_cpu: bool, own_kernels: bool) -> Self {
        match (on_cpu, own_kernels) {
            (true, true) => Self::Own,
            (true, false) if mlx_sys::blas().is_some() => Self::Blas,
            _ => Self::Other,
        }
    }

    /// Sets the threads of the products of a step, or of prefill.
    fn set(self, threads: usize, prefill: bool) {
        // OpenBLAS's products in a step are too small for several threads, which would spin on the cores of ours.
        let blas = if self == Self::Blas || prefill { threads } else { 1 };
        // Another engine in the process may have set its own.
        if blas != mlx_sys::blas_threads() {
            mlx_sys::set_blas_threads(blas);
        }
        if self == Self::Own {
            kernels::cpu::set_threads(threads);
        }
    }
}

/// The numbers of threads of one model.
#[derive(Debug)]
pub struct Threads {
    products: Products,
    /// The number in use.
    current: usize,
    /// Of passes over up to [`DEPTH`] + 1 rows.
    step: usize,
    /// Of passes over more rows.
    prefill: usize,
    checked: Instant,
    preemptions: i64,
    single_until: Instant,
    retreat: Duration,
}

impl Threads {
    /// Measures `part` of `model` with an empty `cache`. `None` if the products are of neither
    /// kind, or the user has set their threads.
    pub fn measure(
        model: &dyn Model,
        part: Pass<'_>,
        cache: &Cache,
        products: Products,
    ) -> Result<Option<Self>> {
        let set_by_user = ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"];
        let set_by_user = set_by_user.iter().find_map(std::env::var_os);
        if let Some(number) = set_by_user {
            if let Some(threads) = number.to_str().and_then(|number| number.trim().parse().ok())
                && products == Products::Own
            {
                kernels::cpu::set_threads(threads);
            }
            return Ok(None);
        }
        if products == Products::Other {
            return Ok(None);
        }
        let start = Instant::now();
        // The first pass reads the weights into memory.
        prefill_seconds(model, part, cache)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (mut step, mut prefill) = ((1, f32::MAX), (1, f32::MAX));
        let mut threads = 1;
        while threads <= cores {
            products.set(threads, false);
            let seconds = step_seconds(model, part, cache.clone())?;
            if seconds * GAIN < step.1 {
                step = (threads, seconds);
            }
            products.set(threads, true);
            let seconds = prefill_seconds(model, part, cache)?;
            if seconds * GAIN < prefill.1 {
                prefill = (threads, seconds);
            }
            let all = threads == cores;
            threads = if all { cores + 1 } else { cores.min(threads * 2) };
        }
        let (step, prefill) = (step.0, prefill.0);
        tracing::info!(cores, step, prefill, elapsed = ?start.elapsed(), "threads of matrix products chosen");
        products.set(step, false);
        let now = Instant::now();
        Ok(Some(Self {
            products,
            current: step,
            step,
            prefill,
            checked: now,
            preemptions: preemptions(),
            single_until: now,
            retreat: RETREAT[0],
        }))
    }

    /// Sets the threads for a pass over `rows` rows.
    pub fn set_for(&mut self, rows: usize) {
        let now = Instant::now();
        self.check(now);
        let chosen = if rows <= DEPTH + 1 { self.step } else { self.prefill };
        let threads = if now < self.single_until { 1 } else { chosen };
        self.products.set(threads, rows > DEPTH + 1);
        self.current = threads;
    }

    /// Retreats to one thread while the process is preempted often.
    fn check(&mut self, now: Instant) {
        let elapsed = now - self.checked;
        if elapsed < CHECK {
            return;
        }
        let before = std::mem::replace(&mut self.preemptions, preemptions());
        self.checked = now;
        // With one thread, the rate says nothing about several.
        if self.current == 1 {
            return;
        }
        let rate = (self.preemptions - before) as f64 / elapsed.as_secs_f64();
        if rate > PREEMPTIONS {
            tracing::debug!(rate, duration = ?self.retreat, "cores are contended, matrix products run on one thread");
            self.single_until = now + self.retreat;
            self.retreat = (self.retreat * 2).min(RETREAT[1]);
        } else {
            self.retreat = (self.retreat / 2).max(RETREAT[0]);
        }
    }
}

/// How often the scheduler has taken a core from a thread of this process.
fn preemptions() -> i64 {
    getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| usage.involuntary_context_switches())
}

/// Seconds of a step with the next one queued meanwhile, as in decoding.
fn step_seconds(model: &dyn Model, part: Pass<'_>, mut cache: Cache) -> Result<f32> {
    let mut next = || Ok::<_, crate::Error>(greedy_pass(model, part, &mut cache, &[3])?.1);
    let mut previous = next()?;
    eval([&previous])?;
    let start = Instant::now();
    let mut steps = 0;
    while steps < STEPS && start.elapsed() < MEASURING {
        let following = next()?;
        async_eval([&following])?;
        eval([&previous])?;
        previous = following;
        steps += 1;
    }
    eval([&previous])?;
    Ok(start.elapsed().as_secs_f32() / steps as f32)
}

/// Seconds of a chunk of a prompt.
fn prefill_seconds(model: &dyn Model, part: Pass<'_>, cache: &Cache) -> Result<f32> {
    // In a mixture of experts the time depends on the tokens.
    let tokens: Vec<u32> = (0..CHUNK).map(|i| 3 + i % 61).collect();
    let start = Instant::now();
    let mut chunks = 0;
    while chunks < 3 && start.elapsed() < MEASURING {
        eval([&greedy_pass(model, part, &mut cache.clone(), &tokens)?.1])?;
        chunks += 1;
    }
    Ok(start.elapsed().as_secs_f32() / chunks as f32)
}
