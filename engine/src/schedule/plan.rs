//! Plans one step: which rows of prompt run beside the decode rows, and who is preempted.
//!
//! Sequences that have caught up run in every step, so prefill never stops them. A pass that also
//! prefills takes longer, and every stream waits for it. The rows of prompt are limited so that the
//! pass is expected to take at most [`Budget::stall`], or twice what prefill of one row takes, but never
//! fewer than [`LEAST_ROWS`], so decoding never stops prefill either. The same holds for a stream whose
//! policy is called, as its answer comes soon, for a request of another profile that is being prepared,
//! and for a short prompt beside those of other profiles, of which the long ones get [`LEAST_ROWS`] together.
//!
//! A request that arrives during a pass waits for its end, and then for the rows that share the pass of its own
//! prompt. Both together are expected to take at most [`TURN`] stalls, which limits the rows of a pass that
//! nobody waits for yet. Such a pass takes longer only where the fixed cost of shorter ones would slow prefill.
//!
//! Such passes in a row would still make every stream as slow as the longest stall permits, for as long as a long prompt
//! takes. So a profile owes the streams what its prompts take beyond a share of the streams' own time ([`Debt`]). While it
//! does, its prompts longer than a chunk wait for all streams, and its other prompts for the streams of other
//! profiles: many short prompts are a long one to these.
//!
//! [`Debt`]: super::debt::Debt
//!
//! The shortest remaining prompt runs first: a short prompt after a long one waits for one step. A
//! sequence that was passed over [`AGING`] times runs before shorter ones.
//!
//! Pure functions of their arguments: knows neither the model nor the sequences.
//!
//! Source: mixed steps of prefill chunks and decodes are those of Sarathi-Serve (arXiv:2403.02310).

use std::cmp::Reverse;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::prefix::ComputeCosts;

/// Fewest rows of prompt in a step with prefill: the chunk of the gated delta rule, which costs the
/// same for fewer rows.
pub const LEAST_ROWS: usize = 64;

/// Steps without a row after which a sequence runs before those with shorter prompts.
pub const AGING: u32 = 8;

/// Longest expected time that a request which has just arrived waits for the prompts of others, in multiples of
/// [`Budget::stall`].
pub const TURN: u32 = 2;

/// Part of a turn that passes are planned for. One in a hundred takes an eighth longer than is expected of it.
const PLANNED: f32 = 0.875;

/// Least cost of the rows of a pass that nobody waits for, in multiples of what prefill of any length takes: shorter passes would slow
/// prefill by more than an eighth.
const TURN_ROWS: f32 = 8.0;

/// A sequence, as the plan sees it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pending {
    /// Rows that it must run before its next token can be sampled; 0 if it has caught up.
    pub rows: usize,
    /// Whether it decodes in this step: a stream that waits for the pass.
    pub decodes: bool,
    /// Whether its client may wait for the pass all the same: its policy is called meanwhile, or its reply has ended
    /// and is not finished.
    pub may_wait: bool,
    /// Steps in a row in which it had such rows and ran none.
    pub passed_over: u32,
    /// A number for its profile.
    pub profile: usize,
    /// Whether its profile owes the streams time.
    pub owes: bool,
}

/// Limits of one step.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Longest expected time of a pass while a sequence decodes.
    pub stall: Duration,
    /// Most rows of prompt in a pass.
    pub chunk: usize,
    /// Whether a request of a profile without a sequence waits to be prepared, or to start.
    pub is_awaited: bool,
}

/// Seconds that passes take on this machine: measured at the start, and learned while it serves.
///
/// A pass that prefills takes `prefill + row * rows` longer than one that only decodes. On a GPU the first
/// part, which is the same for any number of rows, is the larger one for short prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PassCosts {
    /// A pass without prefill; 0 if none has run.
    decode: f32,
    /// What any pass with prefill takes in addition.
    prefill: f32,
    /// Each row of prompt in addition; 0 if none has run.
    row: f32,
}

impl PassCosts {
    /// Weight of the newest pass.
    const NEWEST: f32 = 0.2;

    /// Weight of a pass that was faster than expected: the first passes compile kernels.
    const NEWEST_FASTER: f32 = 0.5;

    /// Rows whose cost is learned as fast as that of the pass.
    const ROWS: f32 = 256.0;

    /// Costs from two measured passes over a prompt: rows and seconds of a short one and of a long one.
    pub fn measured([short, long]: [(usize, f32); 2]) -> Self {
        let row = ((long.1 - short.1) / (long.0 - short.0) as f32).max(0.0);
        Self { prefill: (short.1 - row * short.0 as f32).max(0.0), row, decode: 0.0 }
    }

    /// Whether all numbers are possible.
    pub fn is_sound(&self) -> bool {
        [self.decode, self.prefill, self.row].iter().all(|s| s.is_finite() && *s >= 0.0)
    }

    /// What a prompt costs in passes over `chunk` rows.
    pub fn of_prompts(&self, chunk: usize) -> ComputeCosts {
        ComputeCosts { token: self.row, pass: self.prefill, pass_tokens: chunk.max(1) }
    }

    /// What a pass that only decodes takes.
    pub(super) fn decode(&self) -> f32 {
        self.decode
    }

    /// What `rows` rows of prompt are expected to add to a pass.
    pub(super) fn prefill_of(&self, rows: usize) -> f32 {
        if rows == 0 { 0.0 } else { self.prefill + self.row * rows as f32 }
    }

    /// Learns from a pass that took `seconds`, of which `rows` were rows of prompt.
    pub fn learn(&mut self, rows: usize, seconds: f32) {
        let weight = |error: f32| if error < 0.0 { Self::NEWEST_FASTER } else { Self::NEWEST };
        if rows == 0 {
            let error = seconds - self.decode;
            self.decode += if self.decode > 0.0 { weight(error) * error } else { error };
            return;
        }
        let added = (seconds - self.decode).max(0.0);
        let expected = self.prefill_of(rows);
        if expected == 0.0 {
            self.row = added / rows as f32;
            return;
        }
        // A single slow pass has compiled a kernel or waited for a busy machine: it counts as twice as slow at most.
        let error = (added - expected).min(expected);
        // Normalized least mean squares over (1, rows / ROWS): both parts change, none below zero.
        let (change, scaled) = (weight(error) * error, rows as f32 / Self::ROWS);
        let of_prefill = (change / (1.0 + scaled * scaled)).max(-self.prefill);
        let of_rows = (change - of_prefill).max(-self.row * rows as f32);
        self.prefill = (self.prefill + change - of_rows).max(0.0);
        self.row += of_rows / rows as f32;
    }

    /// Number of rows of prompt with which a pass takes `seconds`, or more if their cost would be less than
    /// `least` times the fixed cost of prefill: fewer rows would stop the streams more often. `None`
    /// before the first pass.
    fn rows_within(&self, seconds: f32, least: f32) -> Option<usize> {
        let left = seconds - self.decode - self.prefill;
        (self.row > 0.0).then(|| (left.max(least * self.prefill) / self.row) as usize)
    }
}

/// The rows of prompt that each sequence runs in this step. 0 for those that have caught up, and for
/// those that wait. Profiles have equal shares of the rows, and what one leaves goes to the others: thirty
/// long prompts of a profile delay a short one of another by no step.
pub fn prefill_rows(sequences: &[Pending], costs: &PassCosts, budget: Budget) -> Vec<usize> {
    let has_streams = sequences.iter().any(|sequence| sequence.decodes);
    let waits = |waiting: &Pending| {
        let is_other = |other: &Pending| other.decodes && other.profile != waiting.profile;
        let is_long = waiting.rows > budget.chunk;
        waiting.owes && (is_long && has_streams || sequences.iter().any(is_other))
    };
    let runs = |&i: &usize| sequences[i].rows > 0 && !waits(&sequences[i]);
    let mut order: Vec<usize> = (0..sequences.len()).filter(runs).collect();
    order.sort_by_key(|&i| {
        let Pending { rows, passed_over, .. } = sequences[i];
        (Reverse(if passed_over >= AGING { passed_over } else { 0 }), rows)
    });
    let mut profiles: Vec<usize> = order.iter().map(|&i| sequences[i].profile).collect();
    profiles.sort_unstable();
    profiles.dedup();
    let least = LEAST_ROWS.min(budget.chunk);
    // Whole chunks of the gated delta rule: a part of one costs as much.
    let chunks = |rows: usize| (rows - rows % LEAST_ROWS).clamp(least, budget.chunk);
    let stall = budget.stall.as_secs_f32();
    let within_stall = chunks(costs.rows_within(stall, 1.0).unwrap_or(LEAST_ROWS));
    let alone = PLANNED * TURN as f32 * stall - costs.row * least as f32;
    let within_turn = costs.rows_within(alone, TURN_ROWS).map_or(budget.chunk, chunks);
    let ends_soon = |&i: &usize| sequences[i].rows <= within_stall / profiles.len();
    let has_short = profiles.len() > 1 && order.iter().any(ends_soon);
    let is_awaited = budget.is_awaited
        || has_streams
        || has_short
        || sequences.iter().any(|sequence| sequence.may_wait);
    let mut left = if is_awaited { within_stall } else { within_turn };
    // A short prompt would wait for the other rows of its pass.
    let mut long = if has_short { least } else { left };
    let share = left / profiles.len().max(1);
    let mut shares = vec![share; profiles.len()];
    let mut planned = vec![0; sequences.len()];
    for within_share in [true, false] {
        for i in &order {
            let Ok(profile) = profiles.binary_search(&sequences[*i].profile) else { continue };
            let mut more = (sequences[*i].rows - planned[*i]).min(left);
            if within_share {
                more = more.min(shares[profile]);
            }
            if !ends_soon(i) {
                more = more.min(long);
                long -= more;
            }
            planned[*i] += more;
            left -= more;
            shares[profile] -= more.min(shares[profile]);
        }
    }
    planned
}

/// A running sequence, as the choice of whom to preempt sees it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Candidate {
    /// Rows in its cache, which run again when it resumes.
    pub computed: usize,
    /// How often it was preempted.
    pub preempted: u32,
    /// Number of running sequences of its profile.
    pub of_profile: usize,
}

/// The sequence to preempt: one of the profile with the most sequences, of these one that was preempted least
/// often, of these the one with the least rows to run again, and of equal ones the last. `None` if there is only
/// one: it would never end.
pub fn victim(running: &[Candidate]) -> Option<usize> {
    if running.len() < 2 {
        return None;
    }
    let key = |&i: &usize| {
        let Candidate { computed, preempted, of_profile } = running[i];
        (Reverse(of_profile), preempted, computed)
    };
    (0..running.len()).rev().min_by_key(key)
}

#[cfg(test)]
mod tests {
    use steersman_test_support::Random;

    use super::*;

    const BUDGET: Budget =
        Budget { stall: Duration::from_millis(100), chunk: 512, is_awaited: false };

    fn costs(decode: f32, row: f32) -> PassCosts {
        PassCosts { decode, prefill: 0.0, row }
    }

    fn pending(rows: &[usize]) -> Vec<Pending> {
        let pending = |&rows: &usize| Pending { rows, decodes: rows == 0, ..Pending::default() };
        rows.iter().map(pending).collect()
    }

    #[test]
    fn a_pass_with_streams_is_expected_to_end_within_the_stall() {
        let cheap = costs(0.010, 0.000_3);
        assert_eq!(prefill_rows(&pending(&[0, 9000]), &cheap, BUDGET), [0, 256]);
        // Nobody waits for this pass.
        assert_eq!(prefill_rows(&pending(&[9000]), &cheap, BUDGET), [448]);
        // Prefill goes on even if it takes longer than a stall.
        assert_eq!(prefill_rows(&pending(&[0, 9000]), &costs(0.3, 0.01), BUDGET), [0, 64]);
        // Nothing is known yet.
        let unknown = PassCosts::default();
        assert_eq!(prefill_rows(&pending(&[0, 9000]), &unknown, BUDGET), [0, 64]);
    }

    #[test]
    fn a_pass_that_nobody_waits_for_and_the_rows_beside_the_next_prompt_take_a_turn() {
        let planned = |costs, budget| prefill_rows(&pending(&[9000]), &costs, budget)[0];
        assert_eq!(planned(costs(0.01, 0.000_5), BUDGET), 256);
        assert_eq!(planned(costs(0.01, 0.000_1), BUDGET), 512);
        assert_eq!(planned(costs(0.01, 0.01), BUDGET), 64);
        // Short passes would take longer than their rows.
        let fixed = PassCosts { decode: 0.01, prefill: 0.05, row: 0.001 };
        assert_eq!(planned(fixed, BUDGET), 384);
        // A request of another profile is being prepared.
        let awaited = Budget { is_awaited: true, ..BUDGET };
        assert_eq!(planned(costs(0.01, 0.000_5), awaited), 128);
        // Nothing is known yet.
        assert_eq!(planned(PassCosts::default(), BUDGET), 512);
    }

    #[test]
    fn a_short_prompt_runs_before_a_long_one() {
        let rows = pending(&[32_000, 100, 20, 0]);
        assert_eq!(prefill_rows(&rows, &costs(0.01, 0.0004), BUDGET), [72, 100, 20, 0]);
    }

    /// Thirty texts of an embedding that have waited long beside a short prompt of another profile.
    #[test]
    fn a_short_prompt_runs_beside_the_long_ones_of_another_profile() {
        let long = Pending { rows: 1000, passed_over: 50, ..Pending::default() };
        let mut sequences = vec![long; 30];
        sequences.push(Pending { rows: 40, profile: 7, ..Pending::default() });
        let planned = prefill_rows(&sequences, &costs(0.01, 0.0004), BUDGET);
        assert_eq!((planned[0], planned[30], planned.iter().sum()), (64, 40, 104));
        // Nobody is kept from a first token, or a short prompt is of the same profile.
        for (rows, profile) in [(2000, 7), (40, 0)] {
            sequences[30] = Pending { rows, profile, ..Pending::default() };
            assert_eq!(
                prefill_rows(&sequences, &costs(0.01, 0.0004), BUDGET).iter().sum::<usize>(),
                320
            );
        }
        let one = Candidate { computed: 9000, preempted: 3, of_profile: 2 };
        let other = Candidate { computed: 10, preempted: 0, of_profile: 1 };
        assert_eq!(victim(&[one, other, one]), Some(2));
    }

    #[test]
    fn the_least_computed_sequence_is_preempted_and_none_twice_before_all_others() {
        let running = |all: &[(u32, usize)]| -> Vec<Candidate> {
            let of = |&(preempted, computed): &(u32, usize)| Candidate {
                computed,
                preempted,
                of_profile: all.len(),
            };
            all.iter().map(of).collect()
        };
        assert_eq!(victim(&running(&[(0, 500), (0, 40), (0, 300)])), Some(1));
        assert_eq!(victim(&running(&[(0, 40), (0, 40), (0, 300)])), Some(1));
        assert_eq!(victim(&running(&[(0, 9000), (1, 40), (2, 0)])), Some(0));
        assert_eq!(victim(&running(&[(0, 40)])), None);
        assert_eq!(victim(&[]), None);
    }

    #[test]
    fn a_long_prompt_waits_for_streams_that_its_profile_owes_time() {
        let cheap = costs(0.01, 0.0004);
        let owing = |rows: &[usize]| {
            let owes = |pending| Pending { owes: true, ..pending };
            pending(rows).into_iter().map(owes).collect::<Vec<_>>()
        };
        assert_eq!(prefill_rows(&owing(&[0, 9000, 100]), &cheap, BUDGET), [0, 0, 100]);
        assert_eq!(prefill_rows(&owing(&[0, 9000]), &cheap, BUDGET), [0, 0]);
        // Without a stream there is nobody to wait for.
        assert_eq!(prefill_rows(&owing(&[9000]), &cheap, BUDGET), [320]);
        // A policy may take long to answer.
        let mut policy_is_called = owing(&[0, 9000]);
        (policy_is_called[0].decodes, policy_is_called[0].may_wait) = (false, true);
        assert_eq!(prefill_rows(&policy_is_called, &cheap, BUDGET), [0, 192]);
        // Another profile has taken nothing.
        let mut other = owing(&[0, 9000, 9000]);
        (other[2].profile, other[2].owes) = (1, false);
        assert_eq!(prefill_rows(&other, &cheap, BUDGET), [0, 0, 192]);
    }

    #[test]
    fn prompts_of_a_profile_that_owes_time_wait_for_streams_of_others_only() {
        let cheap = costs(0.01, 0.0004);
        let text = Pending { rows: 40, profile: 1, owes: true, ..Pending::default() };
        let planned = |streams: &[usize], prompts: &[Pending]| {
            let stream = |&profile| Pending { decodes: true, profile, ..Pending::default() };
            let all: Vec<_> = streams.iter().map(stream).chain(prompts.iter().copied()).collect();
            prefill_rows(&all, &cheap, BUDGET).split_off(streams.len())
        };
        assert_eq!(planned(&[0], &[text; 3]), [0, 0, 0]);
        assert_eq!(planned(&[0], &[text]), [0]);
        assert_eq!(planned(&[1], &[text; 3]), [40, 40, 40]);
        assert_eq!(planned(&[], &[text; 3]), [40, 40, 40]);
        let other = Pending { profile: 2, owes: false, ..text };
        assert_eq!(planned(&[0, 1], &[text, text, other, other]), [0, 0, 40, 40]);
    }

    #[test]
    fn costs_follow_the_passes() {
        let mut costs = PassCosts::default();
        for i in 0..200 {
            costs.learn(0, 0.02);
            let rows = [64, 200, 512][i % 3];
            costs.learn(rows, 0.02 + 0.04 + 0.000_1 * rows as f32);
        }
        assert!((costs.decode - 0.02).abs() < 1e-4, "{costs:?}");
        assert!((costs.prefill - 0.04).abs() < 1e-3, "{costs:?}");
        assert!((costs.row - 0.000_1).abs() < 1e-5, "{costs:?}");
        costs.learn(100, 0.01);
        assert!(costs.row >= 0.0 && costs.prefill >= 0.0);
    }

    #[test]
    fn a_few_slow_passes_are_forgotten() {
        let start = PassCosts::measured([(64, 0.045), (512, 0.09)]);
        assert!((start.prefill - 0.038_571).abs() < 1e-5, "{start:?}");
        assert!((start.row - 0.000_100).abs() < 1e-6, "{start:?}");
        // Compiling kernels, once or from the first pass on.
        for mut costs in [start, PassCosts::default()] {
            costs.learn(66, 10.0);
            (0..12).for_each(|_| costs.learn(66, 0.045));
            assert!((costs.prefill + 66.0 * costs.row - 0.045).abs() < 0.005, "{costs:?}");
        }
    }

    /// Short passes would stop the streams almost as long as these, and more often.
    #[test]
    fn a_pass_whose_cost_hardly_depends_on_its_rows_runs_many() {
        let costs = PassCosts { decode: 0.01, prefill: 0.12, row: 0.000_1 };
        assert_eq!(prefill_rows(&pending(&[0, 66, 66, 66]), &costs, BUDGET), [0, 66, 66, 66]);
        assert_eq!(prefill_rows(&pending(&[0, 9000]), &costs, BUDGET), [0, 512]);
    }

    /// Random arrivals and lengths. Every step keeps to its limits, every prompt gets rows again within
    /// a bounded number of steps, and rows of prompt run whenever there are any.
    #[test]
    fn random_sequences_keep_the_laws() {
        let mut random = Random(14);
        for _ in 0..200 {
            let costs = costs(random.below(50) as f32 / 1000.0, random.below(1000) as f32 / 1e6);
            let budget = Budget { chunk: 1 + random.below(1000), ..BUDGET };
            let mut sequences: Vec<Pending> = Vec::new();
            for _ in 0..300 {
                if sequences.len() < 12 && random.below(3) == 0 {
                    let rows = [0, 1, 50, 700, 9000][random.below(5)];
                    let profile = random.below(3);
                    sequences.push(Pending {
                        rows,
                        decodes: rows == 0,
                        profile,
                        ..Pending::default()
                    });
                }
                let planned = prefill_rows(&sequences, &costs, budget);
                assert_eq!(planned.len(), sequences.len());
                let total: usize = planned.iter().sum();
                assert!(total <= budget.chunk);
                let waiting: usize = sequences.iter().map(|sequence| sequence.rows).sum();
                assert!(total >= waiting.min(LEAST_ROWS).min(budget.chunk));
                for (sequence, rows) in sequences.iter_mut().zip(planned) {
                    assert!(rows <= sequence.rows);
                    let passed_over = sequence.rows > 0 && rows == 0;
                    sequence.passed_over = if passed_over { sequence.passed_over + 1 } else { 0 };
                    sequence.rows -= rows;
                    sequence.decodes = sequence.rows == 0;
                    // At most eleven others age at the same time.
                    assert!(sequence.passed_over <= AGING + 12, "{sequence:?}");
                }
                if random.below(20) == 0 {
                    sequences.retain(|sequence| sequence.rows > 0);
                }
            }
        }
    }
}
