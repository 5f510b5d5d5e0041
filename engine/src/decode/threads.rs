//! Threads of the matrix products on a CPU: those of OpenBLAS, and those of our own kernels.
//!
//! OpenBLAS's threads spin while they wait for one another. On a quiet machine they make prefill faster. A
//! step of one row is too short for them on a small model, and their spinning takes the cores of MLX
//! and of the engine thread. If another process takes a core from one of them, each product waits for
//! the scheduler: 30 ms instead of 0.3 ms for 4 rows of 1536 x 512 on two busy cores.
//!
//! So numbers are measured on the loaded model, for one row, for a few (several sequences, or a draft) and for a chunk of
//! a prompt: two threads are no faster than one for one row of the bundled model, and 1.6 times as fast for 8. While the
//! process is preempted often, OpenBLAS's products run on one thread. Those of our own kernels do not: their threads take
//! small pieces, and the process preempts itself with several streams. On two cores, 8 streams made 948 tokens/s on two
//! threads and 713 on one; beside two busy processes 368 and 413.
//!
//! The number of threads did not change a bit of any product of 1 to 256 rows (OpenBLAS 0.3.34, x86-64 with
//! AVX-512).

use std::time::{Duration, Instant};

use mlx_rs::transforms::eval;
use nix::sys::resource::{UsageWho, getrusage};

use crate::cache::Cache;
use crate::config::DEPTH;
use crate::draft::{greedy_pass, probe_tokens};
use crate::error::Result;
use crate::kernels;
use crate::lazy;
use crate::model::{Model, Pass};

/// Rows of the passes that are measured. A number of threads holds for passes of up to as many rows, the last one for all
/// larger passes.
pub const ROWS: [usize; 3] = [1, DEPTH + 1, 64];

/// Numbers of threads, for each of [`ROWS`].
pub type Counts = [usize; ROWS.len()];

/// Time for measuring one of [`ROWS`]. All numbers of threads are measured once, except those below a number that is
/// slower than another when the time is over: on a large model, one thread would take minutes.
const MEASURING: Duration = Duration::from_millis(600);

/// Most rounds, each of which measures all numbers of threads. The least time counts, as other work only adds to it.
const ROUNDS: usize = 5;

/// Passes of one measurement.
const PASSES: usize = 6;

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
    /// The threads of a model on a CPU or not, with or without matrices for our own kernels.
    pub fn of(on_cpu: bool, own_kernels: bool) -> Self {
        match (on_cpu, own_kernels) {
            (true, true) => Self::Own,
            (true, false) if mlx_sys::blas().is_some() => Self::Blas,
            _ => Self::Other,
        }
    }

    /// Sets the threads of the products of a pass over `rows` rows, and returns those of OpenBLAS: one while the cores are
    /// `contended`.
    fn set(self, threads: usize, rows: usize, contended: bool) -> usize {
        // OpenBLAS's products in a step are too small for several threads, which would spin on the cores of ours.
        let many = self == Self::Blas || rows > DEPTH + 1;
        let blas = if many && !contended { threads } else { 1 };
        // Another engine in the process may have set its own.
        if blas != mlx_sys::blas_threads() {
            mlx_sys::set_blas_threads(blas);
        }
        if self == Self::Own {
            kernels::cpu::set_threads(threads);
        }
        blas
    }
}

/// The numbers of threads of one model.
#[derive(Debug)]
pub struct Threads {
    products: Products,
    /// Threads of OpenBLAS in use.
    blas: usize,
    counts: Counts,
    checked: Instant,
    preemptions: i64,
    single_until: Instant,
    retreat: Duration,
}

impl Threads {
    /// The threads of `products`; `None` if the products are of neither kind, or the user has set their threads. Takes
    /// the numbers that `measure` returns.
    pub fn choose(
        products: Products,
        measure: impl FnOnce(Products) -> Result<Counts>,
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
        let counts = measure(products)?;
        let blas = products.set(counts[0], 1, false);
        let now = Instant::now();
        Ok(Some(Self {
            products,
            blas,
            counts,
            checked: now,
            preemptions: preemptions(),
            single_until: now,
            retreat: RETREAT[0],
        }))
    }

    /// The chosen numbers.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Measures `part` of `model` with an empty `cache`.
    pub fn measure(
        model: &dyn Model,
        part: Pass<'_>,
        cache: &Cache,
        products: Products,
    ) -> Result<Counts> {
        let start = Instant::now();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let powers = (0..).map(|i| 1 << i).take_while(|&threads| threads < cores);
        let candidates: Vec<usize> = powers.chain([cores]).collect();
        let mut counts = [1; ROWS.len()];
        for (rows, count) in ROWS.into_iter().zip(&mut counts) {
            let run = |threads| {
                products.set(threads, rows, false);
                seconds(model, part, cache, rows)
            };
            // The first pass loads the weights and allocates the buffers for this number of rows.
            products.set(cores, rows, false);
            eval([&greedy_pass(model, part, &mut cache.clone(), &probe_tokens(rows))?.1])?;
            *count = fastest(&candidates, MEASURING, run)?;
        }
        tracing::debug!(cores, rows = ?ROWS, ?counts, elapsed = ?start.elapsed(), "threads of matrix products measured");
        Ok(counts)
    }

    /// Sets the threads for a pass over `rows` rows.
    pub fn set_for(&mut self, rows: usize) {
        let now = Instant::now();
        self.check(now);
        let class = ROWS.iter().position(|&most| rows <= most).unwrap_or(ROWS.len() - 1);
        let threads = self.counts[class];
        self.blas = self.products.set(threads, rows, now < self.single_until);
    }

    /// Retreats to one thread of OpenBLAS while the process is preempted often.
    fn check(&mut self, now: Instant) {
        let elapsed = now - self.checked;
        if elapsed < CHECK {
            return;
        }
        let before = std::mem::replace(&mut self.preemptions, preemptions());
        self.checked = now;
        // With one thread of OpenBLAS, the rate says nothing about several.
        if self.blas == 1 {
            return;
        }
        let rate = (self.preemptions - before) as f64 / elapsed.as_secs_f64();
        if rate > PREEMPTIONS {
            tracing::debug!(rate, duration = ?self.retreat, "cores are contended, OpenBLAS runs on one thread");
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

/// The one of `candidates`, which ascend, with the least time that `seconds` measures, or a smaller one that takes hardly
/// longer.
fn fastest(
    candidates: &[usize],
    limit: Duration,
    mut seconds: impl FnMut(usize) -> Result<f32>,
) -> Result<usize> {
    let start = Instant::now();
    let mut least = vec![f32::MAX; candidates.len()];
    'rounds: for round in 0..ROUNDS {
        for i in (0..candidates.len()).rev() {
            let tried = &least[i + 1..];
            let slower = tried.iter().any(|&other| other < tried[0]);
            if start.elapsed() > limit && (round > 0 || slower) {
                break 'rounds;
            }
            least[i] = least[i].min(seconds(candidates[i])?);
        }
    }
    let mut best = 0;
    for i in 1..candidates.len() {
        if least[i] * GAIN < least[best] {
            best = i;
        }
    }
    Ok(candidates[best])
}

/// Seconds of a pass over `rows` rows with the next one queued meanwhile, as in decoding.
fn seconds(model: &dyn Model, part: Pass<'_>, cache: &Cache, rows: usize) -> Result<f32> {
    let (tokens, mut cache) = (probe_tokens(rows), cache.clone());
    let start = Instant::now();
    let mut step = || {
        let sampled = greedy_pass(model, part, &mut cache, &tokens)?.1;
        lazy::submit([&sampled])?;
        Ok::<_, crate::Error>(sampled)
    };
    let mut previous = step()?;
    let mut passes = 1;
    while passes < PASSES && start.elapsed() < MEASURING / 2 {
        let following = step()?;
        eval([&previous])?;
        previous = following;
        passes += 1;
    }
    eval([&previous])?;
    Ok(start.elapsed().as_secs_f32() / passes as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is chosen of 1, 2 and 4 threads if round after round takes these times, and how often each was measured.
    fn choice(limit: Duration, times: [[f32; 3]; ROUNDS]) -> (usize, [usize; 3]) {
        let mut calls = [0; 3];
        let run = |threads: usize| {
            let i = threads.ilog2() as usize;
            calls[i] += 1;
            Ok(times[calls[i] - 1][i])
        };
        (fastest(&[1, 2, 4], limit, run).unwrap(), calls)
    }

    /// The least of all rounds decides, and more threads must be faster by [`GAIN`].
    #[test]
    fn fewer_threads_are_chosen_unless_more_are_faster() {
        let chosen = |times| choice(Duration::MAX, times);
        assert_eq!(chosen([[1.0, 0.98, 0.97]; ROUNDS]), (1, [ROUNDS; 3]));
        assert_eq!(chosen([[1.0, 0.6, 0.59]; ROUNDS]).0, 2);
        assert_eq!(chosen([[1.0, 0.6, 0.4]; ROUNDS]).0, 4);
        let mut disturbed = [[1.0, 0.6, 0.7]; ROUNDS];
        disturbed[0][1] = 3.0;
        assert_eq!(chosen(disturbed).0, 2);
    }

    /// Without time, a number that is slower than another ends the measurement; before it, all are measured once.
    #[test]
    fn a_large_model_is_not_measured_on_few_threads() {
        let chosen = |times| choice(Duration::ZERO, [times; ROUNDS]);
        assert_eq!(chosen([4.0, 2.0, 1.0]), (4, [0, 1, 1]));
        assert_eq!(chosen([0.5, 1.0, 2.0]), (1, [1, 1, 1]));
    }
}
