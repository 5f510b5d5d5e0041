//! What passes and drafts cost on this machine, in seconds: measured at the start, and learned while
//! requests are served.

use std::time::{Duration, Instant};

use mlx_rs::Array;
use mlx_rs::transforms::eval;
use serde::{Deserialize, Serialize};

use super::{Drafter, HiddenRows, Member, Networks, propose};
use crate::cache::{Cache, Span};
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::kernels::cpu;
use crate::lazy::{reshape, submit};
use crate::model::{Model, Pass};
use crate::nn::token_ids;
use crate::request::Sampling;
use crate::sample::row::Row;
use crate::sample::rows::sample;
use crate::sample::sampler::Sampler;
use crate::sample::samples::{Logits, Samples};

/// Most rows of a pass with drafts. The logits of all its rows are in memory at once.
pub const ROWS: usize = 64;

/// Time for measuring passes at the start, a tenth of it for each number of rows; a slow machine gets
/// one pass of each, or as many as fit.
const MEASURING: Duration = Duration::from_secs(4);

/// After this time no further kernels are compiled only to be measured: on CUDA those for one number
/// of rows can take 15 seconds, once a machine.
const COMPILING: Duration = Duration::from_secs(40);

/// Numbers of rows in the order of measuring, so that those left out can be interpolated.
const MEASURED: [usize; 11] = [1, 8, 4, 2, 6, 3, 5, 7, 16, 32, ROWS];

/// Rows in the cache while costs are measured.
const CONTEXT: usize = 64;

/// Measurements of each cost. The least counts, as other work on the machine only adds to it.
const REPEATS: usize = 5;

/// Weight of the newest measurement.
const NEWEST: f32 = 0.05;

/// Least cost of a further row, relative to a plain step: the estimate must be able to grow again.
const LEAST_ROW: f32 = 0.01;

/// Seconds that passes and drafts take.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// A plain step of 1, 2, .. sequences, with the next one queued meanwhile; 0 if it is not known.
    #[serde(with = "as_list")]
    plain: [f32; ROWS],
    /// What a pass takes longer if its result is read before the next one is queued.
    wait: f32,
    /// What each row adds to a pass; the first adds nothing.
    #[serde(with = "as_list")]
    row: [f32; ROWS],
    /// Drafting for one sequence, by kind.
    pub draft: [DraftCost; DraftKind::ALL.len()],
}

/// Seconds that drafting takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct DraftCost {
    /// The first token, with the rows that the drafter reads before it.
    pub first: f32,
    /// Each further token.
    pub more: f32,
}

impl DraftCost {
    pub fn tokens(self, depth: usize) -> f32 {
        if depth == 0 { 0.0 } else { self.first + self.more * (depth - 1) as f32 }
    }
}

impl Costs {
    /// Costs from a plain step of one sequence, and passes over 1 to [`ROWS`] rows whose results are
    /// waited for.
    pub fn of(plain: f32, passes: &[f32; ROWS]) -> Self {
        let mut costs = Self {
            plain: [0.0; ROWS],
            wait: (passes[0] - plain).max(0.0),
            row: [0.0; ROWS],
            draft: Default::default(),
        };
        costs.plain[0] = plain;
        for rows in 1..ROWS {
            costs.row[rows] = (passes[rows] - passes[rows - 1]).max(0.0);
        }
        costs
    }

    /// Whether all numbers are possible.
    pub fn is_sound(&self) -> bool {
        let drafts = self.draft.iter().flat_map(|draft| [draft.first, draft.more]);
        let all = self.plain.into_iter().chain(self.row).chain([self.wait]).chain(drafts);
        self.plain[0] > 0.0 && all.into_iter().all(|seconds| seconds.is_finite() && seconds >= 0.0)
    }

    /// Costs that have not been measured. No governor that chooses by costs works with them.
    pub fn unknown() -> Self {
        Self::of(1.0, &[1.0; ROWS])
    }

    /// Measures `networks.model` on an empty `cache`, and new `drafters`. `prepare` is called with the number of rows before
    /// a pass and before a draft, as in decoding. `with_margins`: near-ties in drafts are detected.
    pub fn measure(
        networks: &Networks<'_>,
        mut cache: Cache,
        drafters: &mut [Box<dyn Drafter>],
        with_margins: bool,
        mut prepare: impl FnMut(usize),
    ) -> Result<Self> {
        let tokens = probe_tokens(2 * CONTEXT);
        let Networks { model, part, vocabulary, .. } = *networks;
        prepare(CONTEXT);
        let (hidden, sampled) = greedy_pass(model, part, &mut cache, &tokens[..CONTEXT])?;
        let hidden = HiddenRows::all(&hidden);
        eval([&sampled])?;

        let mut stopwatch = Stopwatch { spent: Duration::ZERO, start: Instant::now() };
        let mut passes = [0.0; ROWS];
        let mut longer = cache.clone();
        for rows in MEASURED {
            passes[rows - 1] = stopwatch.least_of(|| {
                // As with a draft of which no token is accepted. On a GPU, the next pass computes what the rewind leaves.
                let position = longer.position;
                longer.mark_draft();
                prepare(rows);
                let start = Instant::now();
                let hidden = forward(model, part, &mut longer, &tokens[..rows])?;
                let _at_once = cpu::run_at_once(&hidden)?;
                let logits = model.logits(&hidden)?;
                let logits = reshape(&logits, &[logits.dim(1), logits.dim(2)])?;
                let sampled = vec![Row::new(Sampling::default(), 0); rows];
                let logits = Logits::new(logits, vocabulary);
                Samples::after(&logits, 0, &sampled, with_margins && rows > 1)?.read()?;
                longer.rewind_draft(position + 1)?;
                Ok(Some(start.elapsed()))
            })?;
        }
        interpolate(&mut passes);

        cache.mark_draft();
        let mut previous = sampled.clone();
        prepare(1);
        let plain = stopwatch.least_of(|| {
            let start = Instant::now();
            let next = greedy_pass(model, part, &mut cache, &tokens[..1])?.1;
            submit([&next])?;
            eval([&previous])?;
            previous = next;
            Ok(Some(start.elapsed()))
        })?;
        eval([&previous])?;
        cache.rewind_draft(CONTEXT)?;

        let plain = if plain > 0.0 { plain.min(passes[0]) } else { passes[0] };
        let mut costs = Self::of(plain, &passes);
        for drafter in drafters {
            drafter.observe(&hidden, 0);
            let row = hidden.first(1);
            let mut sampler = Sampler::new(Sampling::default(), 0);
            // One more token is committed before each draft, as in decoding.
            let mut length = CONTEXT;
            let mut least = |depth| {
                stopwatch.least_of(|| {
                    length += 1;
                    let (cache, sampler) = (&mut cache, &mut sampler);
                    let tokens = &tokens[..length];
                    let member = Member { drafter: &mut **drafter, cache, tokens, sampler, depth };
                    let start = Instant::now();
                    let Some(draft) = propose(networks, &mut [member])?.remove(0) else {
                        return Ok(None);
                    };
                    draft.read()?;
                    let elapsed = start.elapsed();
                    drafter.learn(0, 0)?;
                    drafter.observe(&row, length - 1);
                    Ok(Some(elapsed))
                })
            };
            let (first, all) = (least(1)?, least(DEPTH)?);
            let more = (all - first).max(0.0) / (DEPTH - 1) as f32;
            costs.draft[drafter.kind() as usize] = DraftCost { first, more };
        }
        Ok(costs)
    }

    /// Costs of the next step if the tokens of the queued pass must be read before it: the device then idles twice, until
    /// they are read and until the step is queued.
    pub fn behind_queued_pass(&self) -> Self {
        Self { wait: 2.0 * self.wait, ..*self }
    }

    /// A plain step of `streams` sequences. If none has run yet, as many further rows as it has more
    /// streams than the largest one that has.
    pub fn plain(&self, streams: usize) -> f32 {
        let streams = streams.clamp(1, ROWS);
        let known = (1..=streams).rev().find(|&s| self.plain[s - 1] > 0.0).unwrap_or(1);
        self.plain[known - 1] + self.row[known..streams].iter().sum::<f32>()
    }

    /// A pass of `streams` sequences over `rows` rows, including the wait for its result.
    pub fn pass(&self, streams: usize, rows: usize) -> f32 {
        self.plain(streams) + self.wait + self.further(streams, rows)
    }

    /// What a pass over `rows` rows takes longer than one over a row for each of `streams` sequences.
    fn further(&self, streams: usize, rows: usize) -> f32 {
        self.row[streams.min(ROWS)..rows.min(ROWS)].iter().sum()
    }

    /// What row number `row` adds to a pass, counted from 0.
    pub fn row(&self, row: usize) -> f32 {
        self.row[row.min(ROWS - 1)]
    }

    /// Drafting `depth` tokens for each of `sequences` sequences together. A network that drafts is
    /// assumed to take longer with more rows as the model does.
    fn drafting(&self, kind: DraftKind, sequences: usize, depth: usize) -> f32 {
        if sequences == 0 {
            return 0.0;
        }
        let longer = (self.plain[0] + self.further(1, sequences)) / self.plain[0].max(1e-9);
        self.draft[kind as usize].tokens(depth) * longer
    }

    /// All drafting for a pass.
    pub fn all_drafting(&self, drafted: &Drafted) -> f32 {
        let each = DraftKind::ALL.into_iter().zip(drafted);
        each.map(|(kind, &(sequences, depth))| self.drafting(kind, sequences, depth)).sum()
    }

    /// Learns from a plain step of `streams` sequences. Whatever slows it down (a longer context, a
    /// hotter chip) slows down every pass.
    pub fn learn_plain(&mut self, streams: usize, seconds: f32) {
        let streams = streams.clamp(1, ROWS);
        let mut cost = self.plain(streams);
        let known = self.plain[streams - 1] > 0.0;
        if known {
            learn(&mut cost, seconds);
        } else {
            // The first step of a number of sequences may compile kernels.
            cost = seconds.min(2.0 * cost);
        }
        self.plain[streams - 1] = cost;
    }

    /// Learns from a step in which `streams` sequences ran `rows` rows with drafts. `drafted`: how many of
    /// them drafted with each kind, and their greatest depth.
    ///
    /// N-gram drafts are free, so theirs is the cost of the pass. The cost of a further row is then
    /// learned for all numbers of rows together: those that are not in use would never be corrected
    /// if they were measured at a bad moment. With other drafters the difference is attributed to
    /// drafting: after an accepted draft the drafter has more to read, after a rejected one more to
    /// rewind.
    pub fn learn_drafts(&mut self, streams: usize, rows: usize, drafted: &Drafted, seconds: f32) {
        let pass = self.pass(streams, rows);
        let networks: Vec<DraftKind> = DraftKind::ALL
            .into_iter()
            .filter(|&kind| kind != DraftKind::Ngram && drafted[kind as usize].0 > 0)
            .collect();
        if networks.is_empty() {
            let mut learned = pass;
            learn(&mut learned, seconds);
            let least = LEAST_ROW * self.plain[0];
            let before = self.further(streams, rows).max(least);
            let ratio = (before + learned - pass).max(least) / before;
            for (i, cost) in self.row.iter_mut().enumerate().skip(1) {
                let ran = (streams..rows).contains(&i);
                *cost = cost.max(least / ROWS as f32) * if ran { ratio } else { ratio.sqrt() };
            }
            return;
        }
        let expected = pass + self.all_drafting(drafted);
        let mut learned = expected;
        learn(&mut learned, seconds);
        let share = (learned - expected) / networks.len() as f32;
        for kind in networks {
            let cost = &mut self.draft[kind as usize].first;
            *cost = (*cost + share).max(0.0);
        }
    }
}

/// Serde's form of an array that is longer than those that serde knows.
mod as_list {
    use serde::de::{Deserialize, Deserializer, Error};
    use serde::ser::{Serialize, Serializer};

    use super::ROWS;

    pub fn serialize<S: Serializer>(list: &[f32; ROWS], serializer: S) -> Result<S::Ok, S::Error> {
        list.as_slice().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<[f32; ROWS], D::Error> {
        let list = Vec::deserialize(from)?;
        let wrong = |list: Vec<f32>| D::Error::invalid_length(list.len(), &"a number for each row");
        list.try_into().map_err(wrong)
    }
}

/// For each kind of drafter, the number of sequences that draft with it and their greatest depth.
pub type Drafted = [(usize, usize); DraftKind::ALL.len()];

/// Moves a cost a little towards a measurement. Outliers are clamped: a stall changes little.
fn learn(cost: &mut f32, seconds: f32) {
    *cost += NEWEST * (seconds.clamp(0.0, 2.0 * *cost) - *cost);
}

/// Tokens of a pass that is measured. The values matter in a mixture of experts alone, where varied tokens are more like
/// text than one token repeated.
pub fn probe_tokens(rows: usize) -> Vec<u32> {
    (0..rows as u32).map(|i| 3 + i % 61).collect()
}

/// A pass that samples a token after each row: hidden states [1, R, D], and tokens u32 [R].
pub fn greedy_pass(
    model: &dyn Model,
    part: Pass<'_>,
    cache: &mut Cache,
    tokens: &[u32],
) -> Result<(Array, Array)> {
    let hidden = forward(model, part, cache, tokens)?;
    let logits = model.logits(&hidden)?.squeeze_axes(&[0])?;
    let rows = vec![Row::new(Sampling::default(), 0); tokens.len()];
    Ok((hidden, sample(&logits, &rows)?))
}

/// Hidden states [1, R, D] of a pass.
fn forward(model: &dyn Model, part: Pass<'_>, cache: &mut Cache, tokens: &[u32]) -> Result<Array> {
    let ids = token_ids(tokens);
    model.forward(&ids, &mut [Span { rows: ids.dim(0), cache }], part)
}

/// Measures within the time limits [`MEASURING`] and [`COMPILING`].
struct Stopwatch {
    spent: Duration,
    start: Instant,
}

impl Stopwatch {
    /// The least of several runs, in seconds; 0 if there is no time left or the run returns `None`.
    ///
    /// The first run is not counted: it may compile kernels, for half a minute on CUDA.
    fn least_of(&mut self, mut run: impl FnMut() -> Result<Option<Duration>>) -> Result<f32> {
        let mut least = Duration::MAX;
        let share = self.spent + MEASURING / 10;
        let late = self.spent > MEASURING || self.start.elapsed() > COMPILING;
        if late || run()?.is_none() {
            return Ok(0.0);
        }
        for _ in 0..REPEATS {
            let Some(elapsed) = run()? else { return Ok(0.0) };
            least = least.min(elapsed);
            self.spent += elapsed;
            if self.spent > share {
                break;
            }
        }
        Ok(least.as_secs_f32())
    }
}

/// Fills in the numbers of rows that were not measured: linearly between measured ones, and a whole
/// pass more for each row beyond them, so that nothing is expected of them.
fn interpolate(passes: &mut [f32; ROWS]) {
    let measured: Vec<usize> = (0..ROWS).filter(|&i| passes[i] > 0.0).collect();
    for i in 0..ROWS {
        let below = measured.iter().rev().find(|&&m| m <= i).copied().unwrap_or(0);
        passes[i] = match measured.iter().find(|&&m| m >= i) {
            Some(&above) if above > below => {
                let share = (i - below) as f32 / (above - below) as f32;
                passes[below] + share * (passes[above] - passes[below])
            }
            Some(&above) => passes[above],
            None => passes[below] + (i - below) as f32 * passes[0],
        };
    }
    // Other work on the machine only adds time, and more rows never cost less than fewer.
    for i in (0..ROWS - 1).rev() {
        passes[i] = passes[i].min(passes[i + 1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes over these numbers of rows; the others were not measured.
    fn measured(times: &[(usize, f32)]) -> [f32; ROWS] {
        let mut passes = [0.0; ROWS];
        times.iter().for_each(|&(rows, time)| passes[rows - 1] = time);
        interpolate(&mut passes);
        passes
    }

    #[test]
    fn unmeasured_costs_are_interpolated_or_too_high_to_pay() {
        let passes = measured(&[(1, 1.0), (4, 1.6), (8, 2.0), (16, 4.0)]);
        let expected = [1.0, 1.2, 1.4, 1.6, 1.7, 1.8, 1.9, 2.0, 2.25];
        let near = |(a, b): (&f32, f32)| (a - b).abs() < 1e-5;
        assert!(passes.iter().zip(expected).all(near), "{passes:?}");
        assert!(near((&passes[16], 5.0)) && near((&passes[63], 52.0)), "{passes:?}");
        let passes = measured(&[(1, 2.0)]);
        assert_eq!(passes[..4], [2.0, 4.0, 6.0, 8.0]);
        // Noise: four rows do not cost more than eight.
        let passes = measured(&[(1, 1.0), (4, 9.0), (8, 2.0)]);
        assert!(passes.is_sorted() && passes[3] == 2.0, "{passes:?}");
    }

    /// Costs follow what is observed, for numbers of streams and rows that were never measured as well.
    #[test]
    fn costs_follow_the_steps() {
        let mut costs = Costs::of(1.0, &measured(&[(1, 1.2), (8, 1.9), (64, 7.5)]));
        assert!((costs.plain(8) - 1.7).abs() < 1e-4 && (costs.pass(1, 8) - 1.9).abs() < 1e-4);
        for _ in 0..200 {
            costs.learn_plain(8, 3.0);
            costs.learn_drafts(8, 20, &Drafted::default(), 5.0);
        }
        assert!((costs.plain(8) - 3.0).abs() < 1e-2, "{}", costs.plain(8));
        assert!((costs.pass(8, 20) - 5.0).abs() < 0.05, "{}", costs.pass(8, 20));
        // A larger number of streams is expected to take longer than the largest one that is known.
        assert!(costs.plain(12) > 3.0);
        // A stall changes little.
        costs.learn_drafts(8, 20, &Drafted::default(), 500.0);
        assert!(costs.pass(8, 20) < 6.0, "{}", costs.pass(8, 20));
    }

    #[test]
    fn time_beyond_the_pass_is_that_of_drafting() {
        let mut costs = Costs::of(1.0, &measured(&[(1, 1.0), (64, 2.0)]));
        costs.draft[DraftKind::Mtp as usize] = DraftCost { first: 0.1, more: 0.1 };
        let mut drafted = Drafted::default();
        drafted[DraftKind::Mtp as usize] = (4, 2);
        let expected = costs.pass(4, 12) + 0.8;
        (0..400).for_each(|_| costs.learn_drafts(4, 12, &drafted, expected));
        let found = costs.pass(4, 12) + costs.all_drafting(&drafted);
        assert!((found - expected).abs() < 0.01, "{found} {expected}");
        assert!(costs.draft[DraftKind::Model as usize].first == 0.0);
    }
}
