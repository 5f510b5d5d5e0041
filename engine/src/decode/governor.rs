//! Chooses the drafter and the depth that commit the most tokens a second. Often that is none.
//!
//! It knows the cost of passes on this machine ([`Costs`], measured at the start) and the acceptance
//! rates in this text ([`Drafter::acceptance_rates`]). A draft of depth m with acceptance rates a_i
//! commits 1 + a_1 + a_1 a_2 + ... tokens in the time of m drafted tokens and a pass over m + 1 rows;
//! the fastest choice wins, plain decoding included.
//!
//! A drafter that is not used learns nothing, so each one is tried again from time to time, less and
//! less often if it still does not pay.
//!
//! Source: the expected gain is that of arXiv:2211.17192, section 3.3.

use std::time::{Duration, Instant};

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::{async_eval, eval};

use super::draft::{DraftContext, Drafter, MovingRate};
use super::sample::{Row, sample};
use super::sampler::Sampler;
use super::token_ids;
use crate::cache::{Cache, Span};
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::{Model, Pass};
use crate::request::Sampling;

/// Least expected speed over plain decoding: the expectation is an estimate.
const GAIN: f32 = 1.1;

/// Fewest and most steps between trials of a drafter that is not in use. A trial costs about one
/// token (the drafter may have to catch up first), so the longest wait costs a few thousandths.
const TRIAL_INTERVAL: [u32; 2] = [8, 512];

/// After this many accepted trials in a row, trials that still do not pay become rarer again.
const ACCEPTED_TRIALS: u32 = 4;

/// Time for measuring passes at the start, a tenth of it for each number of rows; a slow machine gets
/// one pass of each, or as many as fit.
const MEASURING: Duration = Duration::from_secs(4);

/// After this time no further kernels are compiled only to be measured: on CUDA those for one number
/// of rows can take 15 seconds, once a machine.
const COMPILING: Duration = Duration::from_secs(40);

/// Numbers of rows in the order of measuring, so that those left out can be interpolated.
const MEASURED: [usize; DEPTH + 1] = [1, 8, 4, 2, 6, 3, 5, 7];

/// Rows in the cache while costs are measured.
const CONTEXT: usize = 64;

/// Measurements of each cost. The least counts, as other work on the machine only adds to it.
const REPEATS: usize = 5;

/// Seconds that passes take on this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Costs {
    /// A plain step, with the next one queued meanwhile.
    pub plain: f32,
    /// A pass over 1 to DEPTH + 1 rows, including the wait for its result; index is rows - 1.
    pub verify: [f32; DEPTH + 1],
    /// Drafting, by kind.
    pub draft: [Drafting; DraftKind::ALL.len()],
}

/// Seconds that drafting takes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Drafting {
    /// The first token, with the rows that the drafter reads before it.
    pub first: f32,
    /// Each further token.
    pub more: f32,
}

impl Drafting {
    fn tokens(self, depth: usize) -> f32 {
        self.first + self.more * (depth - 1) as f32
    }
}

impl Costs {
    /// Measures `part` of `model` on an empty `cache`, and new `drafters`.
    pub fn measure(
        model: &dyn Model,
        part: Pass<'_>,
        mut cache: Cache,
        drafters: &mut [Box<dyn Drafter>],
    ) -> Result<Self> {
        // The values matter in a mixture of experts alone, where varied tokens are more like text
        // than one token repeated.
        let tokens: Vec<u32> = (0..2 * CONTEXT as u32).map(|i| 3 + i % 61).collect();
        let pass = |cache: &mut _, tokens: &[u32]| greedy_pass(model, part, cache, tokens);
        let (hidden, sampled) = pass(&mut cache, &tokens[..CONTEXT])?;
        eval([&sampled])?;

        let mut stopwatch = Stopwatch { spent: Duration::ZERO, start: Instant::now() };
        let mut verify = [0.0; DEPTH + 1];
        for rows in MEASURED {
            verify[rows - 1] = stopwatch.least_of(|| {
                cache.mark_draft();
                let start = Instant::now();
                eval([&pass(&mut cache, &tokens[..rows])?.1])?;
                let elapsed = start.elapsed();
                cache.rewind_draft(CONTEXT)?;
                Ok(Some(elapsed))
            })?;
        }
        interpolate(&mut verify);

        cache.mark_draft();
        let mut previous = sampled.clone();
        let plain = stopwatch.least_of(|| {
            let start = Instant::now();
            let next = pass(&mut cache, &tokens[..1])?.1;
            async_eval([&next])?;
            eval([&previous])?;
            previous = next;
            Ok(Some(start.elapsed()))
        })?;
        eval([&previous])?;
        cache.rewind_draft(CONTEXT)?;

        let plain = if plain > 0.0 { plain.min(verify[0]) } else { verify[0] };
        let mut costs = Self { plain, verify, ..Self::default() };
        for drafter in drafters {
            drafter.observe(&hidden, 0)?;
            let row = hidden.try_index((.., ..1))?;
            let mut sampler = Sampler::new(Sampling::default(), 0);
            // One more token is committed before each draft, as in decoding.
            let mut length = CONTEXT;
            let mut least = |depth| {
                stopwatch.least_of(|| {
                    length += 1;
                    let mut context = DraftContext {
                        model,
                        part,
                        cache: &mut cache,
                        tokens: &tokens[..length],
                        sampler: &mut sampler,
                        vocabulary: i32::MAX,
                    };
                    let start = Instant::now();
                    let Some(draft) = drafter.propose(&mut context, depth)? else {
                        return Ok(None);
                    };
                    eval([&draft])?;
                    let elapsed = start.elapsed();
                    drafter.learn(0, 0)?;
                    drafter.observe(&row, length - 1)?;
                    Ok(Some(elapsed))
                })
            };
            let (first, all) = (least(1)?, least(DEPTH)?);
            let more = (all - first).max(0.0) / (DEPTH - 1) as f32;
            costs.draft[drafter.kind() as usize] = Drafting { first, more };
        }
        Ok(costs)
    }

    /// Tokens a second of the best depth at these acceptance rates, and that depth.
    ///
    /// `confident` is the share of rows without a near-tie. The pass ends at a near-tie, and a plain
    /// pass samples the token there.
    fn best_depth(&self, kind: DraftKind, rates: &[f32], confident: f32) -> (f32, usize) {
        // `reached`: the probability that all rows before are accepted.
        let (mut tokens, mut near_ties, mut reached) = (confident, 1.0 - confident, confident);
        let mut best = (0.0, 1);
        for (i, rate) in rates.iter().enumerate() {
            reached *= rate;
            tokens += reached * confident;
            near_ties += reached * (1.0 - confident);
            reached *= confident;
            let depth = i + 1;
            let drafting = self.draft[kind as usize].tokens(depth);
            let time = drafting + self.verify[depth] + near_ties * self.plain;
            let speed = (tokens + near_ties) / time;
            if speed > best.0 {
                best = (speed, depth);
            }
        }
        best
    }

    /// Learns from a plain step. Whatever slows it down (a longer context, a hotter chip) slows down
    /// every pass.
    pub fn learn_plain(&mut self, seconds: f32) {
        let before = self.plain;
        learn(&mut self.plain, seconds);
        let longer = self.plain - before;
        for cost in &mut self.verify {
            *cost = (*cost + longer).max(self.plain);
        }
    }

    /// Learns from the time of drafting `rows - 1` tokens and verifying them.
    ///
    /// N-gram drafts are free, so theirs is the cost of the pass. The cost of a further row is then
    /// learned for all numbers of rows together: those that are not in use would never be corrected
    /// if they were measured at a bad moment. With other drafters the difference is attributed to
    /// drafting: after an accepted draft the drafter has more to read, after a rejected one more to
    /// rewind.
    pub fn learn_verify(&mut self, kind: DraftKind, rows: usize, seconds: f32) {
        let mut cost = self.verify[rows - 1];
        if kind != DraftKind::Ngram {
            let drafting = &mut self.draft[kind as usize];
            let mut step = drafting.tokens(rows - 1) + cost;
            let before = step;
            learn(&mut step, seconds);
            drafting.first = (drafting.first + step - before).max(0.0);
            return;
        }
        let further = |cost: f32| (cost - self.plain).max(0.01 * self.plain);
        let before = further(cost);
        learn(&mut cost, seconds);
        let ratio = further(cost) / before;
        for (i, cost) in self.verify.iter_mut().enumerate().skip(1) {
            let share = if i == rows - 1 { ratio } else { ratio.sqrt() };
            *cost = self.plain + (*cost - self.plain).max(0.01 * self.plain) * share;
        }
    }
}

/// Moves a cost a little towards a measurement. Outliers are clamped: a stall changes little.
fn learn(cost: &mut f32, seconds: f32) {
    *cost += 0.05 * (seconds.clamp(0.0, 2.0 * *cost) - *cost);
}

/// A pass that samples a token after each row: hidden states [1, R, D], and tokens u32 [R].
pub fn greedy_pass(
    model: &dyn Model,
    part: Pass<'_>,
    cache: &mut Cache,
    tokens: &[u32],
) -> Result<(Array, Array)> {
    let ids = token_ids(tokens);
    let hidden = model.forward(&ids, &mut [Span { rows: ids.dim(0), cache }], part)?;
    let logits = model.logits(&hidden)?.squeeze_axes(&[0])?;
    let rows = vec![Row::new(Sampling::default(), 0); tokens.len()];
    Ok((hidden, sample(&logits, &rows)?))
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
fn interpolate(verify: &mut [f32; DEPTH + 1]) {
    let measured: Vec<usize> = (0..=DEPTH).filter(|&i| verify[i] > 0.0).collect();
    for i in 0..=DEPTH {
        let below = measured.iter().rev().find(|&&m| m <= i).copied().unwrap_or(0);
        verify[i] = match measured.iter().find(|&&m| m >= i) {
            Some(&above) if above > below => {
                let share = (i - below) as f32 / (above - below) as f32;
                verify[below] + share * (verify[above] - verify[below])
            }
            Some(&above) => verify[above],
            None => verify[below] + (i - below) as f32 * verify[0],
        };
    }
    // Other work on the machine only adds time, and more rows never cost less than fewer.
    for i in (0..DEPTH).rev() {
        verify[i] = verify[i].min(verify[i + 1]);
    }
}

/// The drafter of a step, by its index in the sequence's drafters, and the depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    pub drafter: usize,
    /// Most tokens to draft.
    pub depth: usize,
    /// Whether this is a trial of a drafter whose rates are old.
    pub is_trial: bool,
}

/// How the governor chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By costs and acceptance rates.
    Auto,
    /// The first drafter that can draft, always at this depth: for tests and measurements.
    Always(usize),
}

/// Chooses for one sequence.
#[derive(Debug, Clone)]
pub struct Governor {
    mode: Mode,
    depth: usize,
    /// Share of verified rows without a near-tie.
    confident: MovingRate,
    trials: [Trial; DraftKind::ALL.len()],
}

/// When a drafter is tried again.
#[derive(Debug, Clone, Copy)]
struct Trial {
    /// Steps between trials.
    interval: u32,
    /// Steps since it drafted last.
    since: u32,
    /// Accepted trials in a row, each of which brings the next one early.
    accepted: u32,
}

impl Governor {
    /// A governor that has learned nothing. Drafts are at most `depth` deep.
    pub fn new(mode: Mode, depth: usize) -> Self {
        let trial = Trial { interval: TRIAL_INTERVAL[0], since: 0, accepted: 0 };
        let trials = [trial; DraftKind::ALL.len()];
        Self { mode, depth, confident: MovingRate::prior(1.0), trials }
    }

    /// Chooses the drafter of the next step, to draft at most `room` tokens; `None` for a plain step.
    ///
    /// `unread`: the sampled token is still being computed. Drafting waits for it and loses what a
    /// plain step gains by not waiting, so an n-gram must predict that token too.
    pub fn choose(
        &self,
        costs: &Costs,
        drafters: &[Box<dyn Drafter>],
        room: usize,
        unread: bool,
    ) -> Option<Choice> {
        let room = room.min(self.depth);
        if room == 0 {
            return None;
        }
        if let Mode::Always(depth) = self.mode {
            let drafter = drafters.iter().position(|d| d.acceptance_rates()[0] > 0.0)?;
            return Some(Choice { drafter, depth: depth.min(room), is_trial: false });
        }
        let mut best: Option<(f32, Choice)> = None;
        let mut overdue: Option<(u32, Choice)> = None;
        for (drafter, source) in drafters.iter().enumerate() {
            let (kind, rates) = (source.kind(), source.acceptance_rates());
            if rates[0] == 0.0 {
                continue;
            }
            let (mut speed, depth) = costs.best_depth(kind, &rates[..room], self.confident.value());
            let choice = Choice { drafter, depth, is_trial: false };
            if unread && kind == DraftKind::Ngram {
                // If the token is not the predicted one, the wait bought nothing but that token.
                speed = rates[0] * speed + (1.0 - rates[0]) / costs.verify[0];
            }
            if best.is_none_or(|(most, _)| speed > most) {
                best = Some((speed, choice));
            }
            let trial = self.trials[kind as usize];
            let interval = if trial.accepted > 0 { TRIAL_INTERVAL[0] } else { trial.interval };
            let late = trial.since.saturating_sub(interval);
            if late > 0 {
                let choice = Choice { drafter, depth: depth.min(2), is_trial: true };
                if overdue.is_none_or(|(most, _)| late > most) {
                    overdue = Some((late, choice));
                }
            }
        }
        match best {
            Some((speed, choice)) if speed * costs.plain > GAIN => Some(choice),
            _ => overdue.map(|(_, choice)| choice),
        }
    }

    /// Counts a plain step.
    pub fn count_step(&mut self) {
        for trial in &mut self.trials {
            trial.since += 1;
        }
    }

    /// Learns from a draft of `drafter`. `any_accepted`: its first token was accepted; `confident`:
    /// rows without a near-tie; `near_tie`: whether a near-tie ended the pass.
    ///
    /// Returns whether the time of this step is typical: the drafter had nothing to catch up on.
    pub fn learn(
        &mut self,
        costs: &Costs,
        drafter: &dyn Drafter,
        any_accepted: bool,
        confident: usize,
        near_tie: bool,
    ) -> bool {
        for _ in 0..confident {
            self.confident.learn(true);
        }
        if near_tie {
            self.confident.learn(false);
        }
        self.count_step();
        let (kind, rates) = (drafter.kind(), drafter.acceptance_rates());
        let (speed, _) = costs.best_depth(kind, &rates[..self.depth], self.confident.value());
        let [shortest, longest] = TRIAL_INTERVAL;
        let trial = &mut self.trials[kind as usize];
        let in_use = trial.since == 1;
        trial.since = 0;
        let pays = speed * costs.plain > GAIN;
        // A few accepted trials in a row mean that the text has changed. If drafts still do not pay
        // after them, acceptance is not enough on this machine.
        if pays {
            (trial.interval, trial.accepted) = (shortest, 0);
        } else if any_accepted && trial.accepted < ACCEPTED_TRIALS {
            trial.accepted += 1;
        } else {
            (trial.interval, trial.accepted) = ((trial.interval * 2).min(longest), 0);
        }
        in_use || kind == DraftKind::Ngram
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::draft::discount_rates;

    /// Drafts nothing, but learns acceptance rates as real drafters do.
    struct Fake {
        kind: DraftKind,
        rates: [MovingRate; DEPTH],
    }

    impl Drafter for Fake {
        fn kind(&self) -> DraftKind {
            self.kind
        }

        fn acceptance_rates(&self) -> [f32; DEPTH] {
            self.rates.map(MovingRate::value)
        }

        fn learned_rates(&mut self) -> &mut [MovingRate] {
            &mut self.rates
        }

        fn propose(&mut self, _: &mut DraftContext<'_>, _: usize) -> Result<Option<Array>> {
            unreachable!("the governor asks for rates only")
        }

        fn learn(&mut self, judged: usize, accepted: usize) -> Result<()> {
            for (i, rate) in self.rates.iter_mut().enumerate().take(judged) {
                rate.learn(i < accepted);
            }
            Ok(())
        }
    }

    fn fake(kind: DraftKind, rate: f32) -> Box<dyn Drafter> {
        Box::new(Fake { kind, rates: [MovingRate::prior(rate); DEPTH] })
    }

    const fn cost(token: f32) -> Drafting {
        Drafting { first: token, more: token }
    }

    /// As on two CPU cores: eight rows cost twice as much as one.
    const COSTS: Costs = Costs {
        plain: 1.0,
        verify: [1.0, 1.15, 1.3, 1.4, 1.6, 1.8, 1.9, 2.0],
        draft: [cost(0.0), cost(0.15), cost(0.3), cost(0.5)],
    };

    fn governor() -> Governor {
        Governor::new(Mode::Auto, DEPTH)
    }

    #[test]
    fn drafts_run_only_where_and_as_deep_as_they_pay() {
        let choose = |kind, rate| governor().choose(&COSTS, &[fake(kind, rate)], 100, false);
        assert_eq!(choose(DraftKind::Ngram, 0.0), None);
        assert_eq!(choose(DraftKind::Ngram, 0.1), None);
        assert_eq!(choose(DraftKind::Model, 0.3), None);
        let shallow = choose(DraftKind::Ngram, 0.5).unwrap().depth;
        let deep = choose(DraftKind::Ngram, 0.95).unwrap().depth;
        assert!(shallow < deep && deep == DEPTH, "{shallow} {deep}");
    }

    #[test]
    fn unmeasured_costs_are_interpolated_or_too_high_to_pay() {
        let mut verify = [1.0, 0.0, 0.0, 1.6, 0.0, 0.0, 0.0, 2.0];
        interpolate(&mut verify);
        let expected = [1.0, 1.2, 1.4, 1.6, 1.7, 1.8, 1.9, 2.0];
        assert!(verify.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{verify:?}");
        let mut verify = [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        interpolate(&mut verify);
        assert_eq!(verify, [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]);
        // Noise: four rows do not cost more than eight.
        let mut verify = [1.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 2.0];
        interpolate(&mut verify);
        assert!(verify.is_sorted() && verify[3] == 2.0, "{verify:?}");
    }

    #[test]
    fn cheaper_drafter_wins_and_depth_fits_the_room() {
        let drafters = [fake(DraftKind::Model, 0.9), fake(DraftKind::Mtp, 0.9)];
        assert_eq!(governor().choose(&COSTS, &drafters, 100, false).unwrap().drafter, 1);
        assert_eq!(governor().choose(&COSTS, &drafters, 1, false).unwrap().depth, 1);
        assert_eq!(governor().choose(&COSTS, &drafters, 0, false), None);
    }

    /// Runs 2,000 steps in which a drafted token is right with `acceptance` percent and a row is a
    /// near-tie with `near_ties` percent. Returns the time, in plain steps, and the tokens committed.
    fn simulate(
        governor: &mut Governor,
        drafters: &mut [Box<dyn Drafter>],
        acceptance: u32,
        near_ties: u32,
    ) -> [f32; 2] {
        let (mut time, mut tokens) = (0.0, 0.0);
        let mut noise = 1u32;
        let mut happens = |percent: u32| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (noise >> 8) % 100 < percent
        };
        for _ in 0..2000 {
            let choice = governor.choose(&COSTS, drafters, 100, false);
            let Some(Choice { drafter, depth, is_trial }) = choice else {
                time += 1.0;
                tokens += 1.0;
                governor.count_step();
                continue;
            };
            let drafter = &mut *drafters[drafter];
            if is_trial {
                discount_rates(drafter);
            }
            time += COSTS.verify[depth] + COSTS.draft[drafter.kind() as usize].tokens(depth);
            let mut accepted = 0;
            let mut near_tie = happens(near_ties);
            while !near_tie && accepted < depth && happens(acceptance) {
                accepted += 1;
                near_tie = happens(near_ties);
            }
            tokens += accepted as f32 + 1.0;
            time += f32::from(u8::from(near_tie));
            let rejected = !near_tie && accepted < depth;
            drafter.learn(accepted + usize::from(rejected), accepted).unwrap();
            let confident = accepted + usize::from(!near_tie);
            governor.learn(&COSTS, drafter, accepted > 0, confident, near_tie);
        }
        [time, tokens]
    }

    #[test]
    fn useless_drafters_cost_little_and_return_when_the_text_changes() {
        let mut governor = governor();
        let mut drafters = [fake(DraftKind::Mtp, 0.7), fake(DraftKind::Model, 0.6)];
        for acceptance in [0, 5, 15] {
            let [time, tokens] = simulate(&mut governor, &mut drafters, acceptance, 0);
            assert!(time / tokens < 1.02, "{acceptance} %: {time} steps for {tokens} tokens");
        }
        let [time, tokens] = simulate(&mut governor, &mut drafters, 100, 0);
        assert!(tokens / time > 1.8, "{time} steps for {tokens} tokens");
        let [time, tokens] = simulate(&mut governor, &mut drafters, 0, 0);
        assert!(time / tokens < 1.03, "{time} steps for {tokens} tokens");
    }

    /// Between useless and useful, and with rows that run again: never much slower.
    #[test]
    fn drafters_near_break_even_cost_little() {
        for acceptance in [20, 30, 40, 50, 60, 70] {
            for near_ties in [0, 10, 30, 60] {
                let mut governor = governor();
                let mut drafters = [fake(DraftKind::Mtp, 0.7), fake(DraftKind::Model, 0.6)];
                let [time, tokens] = simulate(&mut governor, &mut drafters, acceptance, near_ties);
                assert!(
                    time / tokens < 1.03,
                    "{acceptance} %, {near_ties} % near-ties: {time} steps for {tokens} tokens"
                );
            }
        }
    }
}
