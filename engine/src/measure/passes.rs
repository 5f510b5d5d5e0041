//! Measures passes of a model, for `steersman bench model`: the times of prefill, of steps, of the verification of drafts
//! and of steps of several sequences.
//!
//! Cases take turns, so that what else the machine does affects all of them. The first round is not counted: it compiles
//! kernels. Tokens are arbitrary, as times do not depend on them but for mixtures of experts.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::{Duration, Instant};

use mlx_rs::memory::{peak_memory, reset_peak_memory};
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::ones_dtype;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, Span};
use crate::decode::Decoder;
use crate::draft::{greedy_pass, probe_tokens};
use crate::error::Result;
use crate::lazy::{pending_operations, submit};
use crate::nn::token_ids;
use crate::request::Sampling;
use crate::sample::row::Row;
use crate::sample::rows::sample;
use crate::schedule::memory;

/// Steps whose mean is one measurement.
const STEPS: usize = 16;

/// Steps before these, in which caches grow and get buffers of their own.
const FIRST_STEPS: usize = 3;

/// Sums whose mean is one measurement: about those of a step of a large model.
const SUMS: usize = 128;

/// Tokens before the rows of a draft, and before steps of several sequences.
const CONTEXT: usize = 64;

/// Bytes that are added up to measure the bandwidth of a GPU.
const BANDWIDTH_BYTES: i32 = 1 << 30;

/// What is measured.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Lengths of prompts.
    pub prefill: Vec<usize>,
    /// Tokens before steps of one sequence.
    pub contexts: Vec<usize>,
    /// Rows of passes that verify drafts.
    pub rows: Vec<usize>,
    /// Numbers of sequences that step together.
    pub streams: Vec<usize>,
    /// Rows of hidden states that ranks sum. Measured if there are several ranks.
    pub sums: Vec<usize>,
    /// Measurements of each.
    pub rounds: usize,
}

/// One of the cases of a [`Plan`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "case", content = "size", rename_all = "snake_case")]
pub enum Case {
    /// A prompt of this many tokens, until its first token is sampled.
    Prefill(usize),
    /// A step of one sequence, after this many tokens.
    Decode(usize),
    /// A pass over this many rows after 64 tokens: the last token and a draft.
    Verify(usize),
    /// A step of this many sequences, each after 64 tokens.
    Streams(usize),
    /// A sum over all ranks of the hidden states of this many rows.
    Sum(usize),
}

/// Seconds of one pass. Where the CPU computes, most of a pass runs while its graph is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// All.
    pub total: f64,
    /// Until its graph is made.
    pub build: f64,
    /// Then, until MLX has given it to the device. 0 if the pass was not queued.
    pub encode: f64,
    /// Then, until the result of the pass before, or of this one, was there.
    pub wait: f64,
}

/// Measurements of a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// What was measured.
    #[serde(flatten)]
    pub case: Case,
    /// One for each round.
    pub times: Vec<Times>,
    /// Operations of MLX that a pass is made of. 0 where passes run while they are made.
    pub operations: usize,
    /// Most bytes of all arrays during the measurements.
    pub peak_bytes: u64,
}

impl Plan {
    fn cases(&self) -> Vec<Case> {
        let of = |sizes: &[usize], case: fn(usize) -> Case| -> Vec<Case> {
            sizes.iter().copied().map(case).collect()
        };
        [
            of(&self.prefill, Case::Prefill),
            of(&self.contexts, Case::Decode),
            of(&self.rows, Case::Verify),
            of(&self.streams, Case::Streams),
            of(&self.sums, Case::Sum),
        ]
        .concat()
    }
}

impl Case {
    /// Tokens before what is measured.
    fn context(self) -> usize {
        match self {
            Self::Prefill(_) | Self::Sum(_) => 0,
            Self::Decode(context) => context,
            Self::Verify(_) | Self::Streams(_) => CONTEXT,
        }
    }
}

/// Measures all cases of `plan`. Calls `progress` with the number of measurements that are done, and of all.
///
/// # Errors
/// [`crate::Error::Array`] if a pass fails, for instance as it takes more memory than there is.
pub fn measure_passes(
    decoder: &mut Decoder,
    plan: &Plan,
    mut progress: impl FnMut(usize, usize),
) -> Result<Vec<Measured>> {
    let cases = plan.cases();
    let mut contexts = BTreeMap::new();
    for case in &cases {
        if let Entry::Vacant(place) = contexts.entry(case.context()) {
            let mut cache = decoder.empty_cache();
            prefill(decoder, &mut cache, case.context())?;
            place.insert(cache);
        }
    }
    let new = |&case: &Case| Measured { case, times: Vec::new(), operations: 0, peak_bytes: 0 };
    let mut measured: Vec<Measured> = cases.iter().map(new).collect();
    let all = (plan.rounds + 1) * cases.len();
    for round in 0..=plan.rounds {
        for (i, own) in measured.iter_mut().enumerate() {
            progress(round * cases.len() + i, all);
            let before = &contexts[&own.case.context()];
            reset_peak_memory()?;
            let (times, operations) = match own.case {
                Case::Prefill(tokens) => measure_prompt(decoder, before.clone(), tokens)?,
                Case::Verify(rows) => measure_verification(decoder, before.clone(), rows)?,
                Case::Decode(_) => measure_steps(decoder, &mut [before.clone()])?,
                Case::Streams(count) => measure_steps(decoder, &mut vec![before.clone(); count])?,
                Case::Sum(rows) => measure_sums(decoder, rows)?,
            };
            own.operations = operations;
            if round > 0 {
                own.times.push(times);
                own.peak_bytes = own.peak_bytes.max(peak_memory()? as u64);
            }
            memory::release_buffers();
        }
    }
    progress(all, all);
    Ok(measured)
}

/// Bytes a second that a GPU reads, the best of several sums over an array. `None` on a CPU.
///
/// # Errors
/// [`crate::Error::Array`] if the device has no memory for it.
pub fn measure_bandwidth(decoder: &Decoder) -> Result<Option<f64>> {
    if !decoder.is_on_gpu() {
        return Ok(None);
    }
    let array = ones_dtype(&[BANDWIDTH_BYTES / 4], Dtype::Float32)?;
    eval([&array])?;
    let mut least = f64::INFINITY;
    for _ in 0..8 {
        let start = Instant::now();
        eval([&array.sum(None)?])?;
        least = least.min(start.elapsed().as_secs_f64());
    }
    Ok(Some(f64::from(BANDWIDTH_BYTES) / least))
}

/// Runs `count` tokens in the chunks of a prompt; returns the hidden state of the last one, which is evaluated.
fn prefill(decoder: &mut Decoder, cache: &mut Cache, count: usize) -> Result<Option<Array>> {
    let tokens = probe_tokens(count);
    let mut last = None;
    for chunk in tokens.chunks(decoder.chunk()) {
        decoder.network_mut().set_threads(chunk.len());
        let ids = token_ids(chunk);
        let mut spans = [Span { rows: ids.dim(0), cache }];
        let hidden = decoder.network().forward(&ids, &mut spans)?;
        eval(cache.arrays()?.iter().chain([&hidden]))?;
        last = Some(hidden.try_index((.., -1.., ..))?);
    }
    Ok(last)
}

fn measure_prompt(decoder: &mut Decoder, mut cache: Cache, count: usize) -> Result<(Times, usize)> {
    let start = Instant::now();
    if let Some(hidden) = prefill(decoder, &mut cache, count)? {
        eval([&next_tokens(decoder, &hidden)?])?;
    }
    let total = start.elapsed().as_secs_f64();
    Ok((Times { total, wait: total, ..Times::default() }, 0))
}

fn measure_verification(
    decoder: &mut Decoder,
    mut cache: Cache,
    rows: usize,
) -> Result<(Times, usize)> {
    let (mut sum, mut operations) = (Times::default(), 0);
    let tokens = probe_tokens(rows);
    decoder.network_mut().set_threads(rows);
    for step in 0..FIRST_STEPS + STEPS {
        cache.mark_draft();
        let start = Instant::now();
        let (_, sampled) =
            greedy_pass(decoder.network().model(), decoder.network().pass(), &mut cache, &tokens)?;
        let built = start.elapsed();
        if step < FIRST_STEPS {
            operations = pending_operations(&sampled);
        }
        let waiting = Instant::now();
        eval([&sampled])?;
        let times = [built, waiting.elapsed()].map(|time| time.as_secs_f64());
        cache.rewind_draft(CONTEXT)?;
        if step >= FIRST_STEPS {
            sum.add(times[0], 0.0, times[1]);
        }
    }
    Ok((sum.mean(), operations))
}

/// Steps as the engine runs them: each is queued before the token of the one before is read.
fn measure_steps(decoder: &mut Decoder, caches: &mut [Cache]) -> Result<(Times, usize)> {
    let (mut sum, mut operations) = (Times::default(), 0);
    decoder.network_mut().set_threads(caches.len());
    let mut last = token_ids(&probe_tokens(caches.len()));
    for step in 0..FIRST_STEPS + STEPS {
        let start = Instant::now();
        let mut spans: Vec<_> = caches.iter_mut().map(|cache| Span { rows: 1, cache }).collect();
        let hidden = decoder.network().forward(&last, &mut spans)?;
        let next = next_tokens(decoder, &hidden)?;
        let built = start.elapsed();
        if step + 1 == FIRST_STEPS {
            operations = pending_operations(&next);
        }
        let start = Instant::now();
        submit([&next])?;
        let encoded = start.elapsed();
        eval([&last])?;
        let waited = start.elapsed() - encoded;
        let times = [built, encoded, waited].map(|time| time.as_secs_f64());
        if step >= FIRST_STEPS {
            sum.add(times[0], times[1], times[2]);
        }
        last = next;
    }
    eval([&last])?;
    Ok((sum.mean(), operations))
}

/// One of a chain of sums, as the layers of a pass have them.
fn measure_sums(decoder: &Decoder, rows: usize) -> Result<(Times, usize)> {
    let ids = token_ids(&probe_tokens(rows));
    let mut cache = decoder.empty_cache();
    let like =
        decoder.network().forward(&ids, &mut [Span { rows: ids.dim(0), cache: &mut cache }])?;
    eval([&like])?;
    let start = Instant::now();
    let Some(last) = decoder.network().model().sums(&like, SUMS)? else {
        return Ok((Times::default(), 0));
    };
    let built = start.elapsed();
    eval([&last])?;
    let total = start.elapsed();
    let each = |time: Duration| time.as_secs_f64() / SUMS as f64;
    let times =
        Times { total: each(total), build: each(built), encode: 0.0, wait: each(total - built) };
    Ok((times, 0))
}

/// The likeliest token after each row of hidden states [1, R, D]: u32 [R].
fn next_tokens(decoder: &Decoder, hidden: &Array) -> Result<Array> {
    let logits = decoder.network().logits(hidden)?.squeeze_axes(&[0])?;
    let rows = vec![Row::new(Sampling::default(), 0); logits.dim(0) as usize];
    sample(&logits, &rows)
}

impl Times {
    fn add(&mut self, build: f64, encode: f64, wait: f64) {
        self.build += build;
        self.encode += encode;
        self.wait += wait;
        self.total += build + encode + wait;
    }

    /// The mean, where `self` is the sum of [`STEPS`] passes.
    fn mean(self) -> Self {
        let mean = |sum: f64| sum / STEPS as f64;
        let Self { total, build, encode, wait } = self;
        Self { total: mean(total), build: mean(build), encode: mean(encode), wait: mean(wait) }
    }
}
