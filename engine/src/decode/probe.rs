//! What passes cost on this machine: read from the machine profile, or measured when the model is loaded.

use std::time::Instant;

use mlx_rs::Array;
use mlx_rs::transforms::eval;

use super::Decoder;
use super::machine_profile::MachineProfile;
use super::threads::{Products, Threads};
use crate::cache::{Cache, Span};
use crate::draft::{Costs, ROWS};
use crate::error::{Error, Result};
use crate::nn::{DENSE_ROWS, token_ids};
use crate::prefix::SHORTEST_SHARED;
use crate::schedule::memory::{self, Before, PassBytes, Section};
use crate::schedule::plan::{self, PassCosts};

/// Rows of the passes whose times are measured at the start, on a CPU and on a GPU.
const TIMED_ROWS: [[usize; 2]; 2] = [[8, 32], [plan::LEAST_ROWS, 512]];

/// Rows of the passes that are measured at the start, on a CPU and on a GPU. Both passes take the same form of every
/// layer, so that what the second takes more is due to its rows: the chunked form of recurrent layers, and on a GPU
/// matrices that are dequantized ([`DENSE_ROWS`]). On a CPU, long passes of a large model would take minutes.
const PROBES: [[usize; 2]; 2] = [[16, 48], [DENSE_ROWS as usize, 512]];

/// Most repetitions of a measurement while others allocate.
const ATTEMPTS: usize = 5;

/// What loading knows of the machine and the model.
pub struct Loading<'a> {
    /// What computes the matrix products of the model.
    pub products: Products,
    /// Whether the model computes on a CPU.
    pub on_cpu: bool,
    /// `engine.memory_limit_bytes`.
    pub memory_limit: u64,
    /// Bytes of arrays before weights were read.
    pub before_weights: u64,
    /// The section that began before weights were read.
    pub section: &'a Section,
}

impl Decoder {
    /// Finds threads, costs and the limit on memory. What the machine profile lacks is measured, and saved there.
    ///
    /// # Errors
    /// [`Error::Config`] if the model takes more memory than the limit already.
    pub(crate) fn find_machine_costs(&mut self, loading: &Loading<'_>) -> Result<()> {
        let known = self.machine.profile();
        self.threads = Threads::choose(loading.products, |products| match known.threads {
            Some(counts) => Ok(counts),
            None => Threads::measure(&*self.model, self.pass(), &self.prefixes.empty(), products),
        })?;
        self.find_costs(known.costs)?;
        self.pass_costs = match known.prefill {
            Some(costs) => costs,
            None => self.measure_prefill(TIMED_ROWS[usize::from(!loading.on_cpu)])?,
        };
        // As measured on a machine that does nothing else: not what prompts take beside other requests.
        let costs = self.pass_costs.of_prompts(self.prefill_chunk);
        self.prefixes.set_compute_costs(costs);
        // A GPU compiles kernels for these passes, which the first request must not wait for.
        let known_bytes = known.pass_bytes.filter(|_| loading.on_cpu);
        let pass_bytes = self.measure_memory(known_bytes, loading)?;
        self.machine.measured(MachineProfile {
            threads: self.threads.as_ref().map(Threads::counts).or(known.threads),
            costs: self.costs.or(known.costs),
            prefill: Some(self.pass_costs),
            pass_bytes: Some(pass_bytes),
        });
        Ok(())
    }

    /// Sets the costs of passes and drafts on this machine, if there are drafters: those that are `known`, or measured ones.
    fn find_costs(&mut self, known: Option<Costs>) -> Result<()> {
        let mut drafters = self.new_drafters(&[])?;
        if drafters.is_empty() {
            return Ok(());
        }
        if known.is_some() {
            self.costs = known;
            return Ok(());
        }
        let start = Instant::now();
        let empty = self.prefixes.empty();
        let mut threads = self.threads.take();
        let prepare = |rows| threads.iter_mut().for_each(|threads| threads.set_for(rows));
        let costs = Costs::measure(
            &self.networks(),
            empty,
            &mut drafters,
            self.speculation.exact,
            prepare,
        )?;
        self.threads = threads;
        let drafters: Vec<_> = drafters.iter().map(|drafter| drafter.kind().name()).collect();
        let passes = [1, 2, 4, 8, 16, 32, ROWS].map(|rows| (rows, costs.pass(1, rows)));
        let (step, drafting) = (costs.plain(1), costs.draft);
        let elapsed = start.elapsed();
        tracing::info!(?drafters, step, ?passes, ?drafting, ?elapsed, "speculation costs measured");
        self.costs = Some(costs);
        Ok(())
    }

    /// Measures passes with two numbers of rows on this machine. The first run of each compiles kernels, which
    /// the first request need not wait for then.
    fn measure_prefill(&mut self, rows: [usize; 2]) -> Result<PassCosts> {
        let mut measure = |rows: usize| -> Result<(usize, f32)> {
            self.set_threads(rows);
            self.run_probe(rows, &mut self.prefixes.empty())?;
            let start = Instant::now();
            self.run_probe(rows, &mut self.prefixes.empty())?;
            Ok((rows, start.elapsed().as_secs_f32()))
        };
        let passes = [measure(rows[0])?, measure(rows[1])?];
        tracing::info!(?passes, "prefill measured");
        Ok(PassCosts::measured(passes))
    }

    /// Runs a pass of `rows` equal tokens, to measure it; returns its hidden states.
    fn run_probe(&self, rows: usize, cache: &mut Cache) -> Result<Array> {
        let ids = token_ids(&vec![0; rows]);
        let mut span = [Span { rows: ids.dim(0), cache }];
        let hidden = self.model.forward(&ids, &mut span, self.pass())?;
        eval(cache.arrays()?.iter().chain([&hidden]))?;
        Ok(hidden)
    }

    /// Sets the limit on memory, and measures passes unless their bytes are `known`; returns these bytes.
    ///
    /// # Errors
    /// [`Error::Config`] if the model takes more than the limit already.
    fn measure_memory(
        &mut self,
        known: Option<PassBytes>,
        loading: &Loading<'_>,
    ) -> Result<PassBytes> {
        // Weights are evaluated at their first use: those of the head count from now on.
        let mut cache = self.prefixes.empty();
        eval([&self.logits(&self.run_probe(1, &mut cache)?)?])?;
        self.prefixes.share_from(cache.is_shareable().then_some(SHORTEST_SHARED));
        let pass = known.map_or_else(|| self.measure_pass_bytes(loading.section), Ok)?;
        let (limit, set_by) = memory::find_limit(loading.memory_limit)?;
        let used = memory::active()?;
        if limit <= used {
            return Err(memory::too_small(set_by, used, limit));
        }
        self.memory.set_limit(limit, &self.prefixes.empty(), pass)?;
        let weights = used.saturating_sub(loading.before_weights);
        self.activity.update(|activity| {
            (activity.bytes.limit, activity.bytes.weights) = (limit, weights);
        });
        tracing::info!(limit, set_by, used, ?pass, "memory limit");
        Ok(pass)
    }

    /// Bytes of passes, measured on two of them.
    fn measure_pass_bytes(&self, loading: &Section) -> Result<PassBytes> {
        let probes = PROBES[usize::from(self.memory.on_gpu)];
        let measure = |rows| Ok::<_, Error>((rows, self.measure_pass(rows, loading)?));
        Ok(PassBytes::measured([measure(probes[0])?, measure(probes[1])?]))
    }

    /// Bytes that a pass of `rows` rows takes besides weights and cache: the least of some attempts, if other
    /// engines allocate meanwhile.
    fn measure_pass(&self, rows: usize, loading: &Section) -> Result<u64> {
        let mut least = u64::MAX;
        for _ in 0..ATTEMPTS {
            let section = Section::begin(Some(loading));
            let (mut cache, before) = (self.prefixes.empty(), Before::now()?);
            let _hidden = self.run_probe(rows, &mut cache)?;
            least = least.min(before.transient()?);
            if section.is_alone() {
                break;
            }
        }
        Ok(least)
    }
}
