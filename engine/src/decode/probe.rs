//! What passes cost on this machine: read from the machine profile, or measured when the model is loaded.

use std::time::Instant;

use mlx_rs::transforms::eval;

use super::Decoder;
use super::network::Network;
use super::speculate::Speculation;
use super::threads::Products;
use crate::cache::Cache;
use crate::draft::{Costs, ROWS};
use crate::error::{Error, Result};
use crate::nn::DENSE_ROWS;
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

/// Finds threads, costs and the limit on memory. What the machine profile lacks is measured, and saved there.
///
/// # Errors
/// [`Error::Config`] if the model takes more memory than the limit already.
pub fn find_machine_costs(decoder: &mut Decoder, loading: &Loading<'_>) -> Result<()> {
    let Decoder { network, saved, speculation, costs, schedule, activity, .. } = decoder;
    let (known, empty) = (costs.known(), saved.empty());
    let threads = network.choose_threads(loading.products, known.threads, &empty)?;
    if let Some(found) = find_draft_costs(network, speculation, &empty, known.costs)? {
        costs.set_drafts(found);
    }
    let passes = match known.prefill {
        Some(costs) => costs,
        None => measure_prefill(network, &empty, TIMED_ROWS[usize::from(!loading.on_cpu)])?,
    };
    costs.set_passes(passes, schedule.chunk());
    // Weights are evaluated at their first use: those of the head count from now on.
    let mut cache = empty.clone();
    eval([&network.logits(&network.run_probe(1, &mut cache)?)?])?;
    saved.prefixes_mut().share_from(cache.is_shareable().then_some(SHORTEST_SHARED));
    // A GPU compiles kernels for these passes, which the first request must not wait for.
    let pass = match known.pass_bytes.filter(|_| loading.on_cpu) {
        Some(bytes) => bytes,
        None => measure_pass_bytes(network, &empty, loading)?,
    };
    let (limit, set_by) = memory::find_limit(loading.memory_limit)?;
    let used = memory::active()?;
    if limit <= used {
        return Err(memory::too_small(set_by, used, limit));
    }
    saved.set_limit(limit)?;
    let weights = used.saturating_sub(loading.before_weights);
    activity.update(|activity| {
        (activity.bytes.limit, activity.bytes.weights) = (limit, weights);
    });
    tracing::info!(limit_bytes = limit, set_by, used_bytes = used, "memory limit");
    tracing::debug!(?pass, "bytes of passes");
    costs.set_bytes(pass);
    costs.save_measured(threads);
    Ok(())
}

/// The costs of passes and drafts on this machine, if there are drafters: those that are `known`, or measured ones.
fn find_draft_costs(
    network: &mut Network,
    speculation: &Speculation,
    empty: &Cache,
    known: Option<Costs>,
) -> Result<Option<Costs>> {
    let mut drafters = speculation.new_drafters(network, &[])?;
    if drafters.is_empty() || known.is_some() {
        return Ok(known.filter(|_| !drafters.is_empty()));
    }
    let start = Instant::now();
    let costs = network.with_threads(|network, set_threads| {
        let networks = speculation.networks(network);
        let exact = speculation.is_exact();
        Costs::measure(&networks, empty.clone(), &mut drafters, exact, set_threads)
    })?;
    let drafters: Vec<_> = drafters.iter().map(|drafter| drafter.kind().name()).collect();
    let passes = [1, 2, 4, 8, 16, 32, ROWS].map(|rows| (rows, costs.pass(1, rows)));
    let (step, drafting) = (costs.plain(1), costs.draft);
    let elapsed = start.elapsed();
    tracing::debug!(?drafters, step, ?passes, ?drafting, ?elapsed, "speculation costs measured");
    Ok(Some(costs))
}

/// Measures passes with two numbers of rows on this machine. The first run of each compiles kernels, which
/// the first request need not wait for then.
fn measure_prefill(network: &mut Network, empty: &Cache, rows: [usize; 2]) -> Result<PassCosts> {
    let mut measure = |rows: usize| -> Result<(usize, f32)> {
        network.set_threads(rows);
        network.run_probe(rows, &mut empty.clone())?;
        let start = Instant::now();
        network.run_probe(rows, &mut empty.clone())?;
        Ok((rows, start.elapsed().as_secs_f32()))
    };
    let passes = [measure(rows[0])?, measure(rows[1])?];
    tracing::debug!(?passes, "prefill measured");
    Ok(PassCosts::measured(passes))
}

/// Bytes of passes, measured on two of them.
fn measure_pass_bytes(
    network: &Network,
    empty: &Cache,
    loading: &Loading<'_>,
) -> Result<PassBytes> {
    let probes = PROBES[usize::from(!loading.on_cpu)];
    let measure =
        |rows| Ok::<_, Error>((rows, measure_pass(network, empty, rows, loading.section)?));
    Ok(PassBytes::measured([measure(probes[0])?, measure(probes[1])?]))
}

/// Bytes that a pass of `rows` rows takes besides weights and cache: the least of some attempts, if other
/// engines allocate meanwhile.
fn measure_pass(network: &Network, empty: &Cache, rows: usize, loading: &Section) -> Result<u64> {
    let mut least = u64::MAX;
    for _ in 0..ATTEMPTS {
        let section = Section::begin(Some(loading));
        let (mut cache, before) = (empty.clone(), Before::now()?);
        let _hidden = network.run_probe(rows, &mut cache)?;
        least = least.min(before.transient()?);
        if section.is_alone() {
            break;
        }
    }
    Ok(least)
}
