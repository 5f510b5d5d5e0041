//! Samples on the host, where the logits are in its memory: what [`super::rows`] does with operations of MLX.
//!
//! Its operations sort whole vocabularies, and compute the noise of each token. Here few tokens are sorted, and noise is computed
//! for tokens that can win with it. Both sample the same token, except where rounding decides: whether a token at
//! the edge of top-p is kept, and which of two scores that differ in the last bit is larger. Of equal logits at the edge
//! of top-k, the host keeps the smallest token and the graph any of them.

use std::borrow::Cow;
use std::cmp::Ordering;

use steersman_cpu_kernels::{random_bits, random_bits_at, sum_exp};

use super::adjust::adjusted_on_host;
use super::row::{Row, is_greedy};
use crate::request::Sampling;

/// Most tokens that are collected before those below the `k` best of them are dropped, in multiples of `k`.
const COLLECTED: usize = 4;

/// Samples a token after one row of logits: the token, and its margin over the second best, relative to the largest logit.
pub fn sample(logits: &[f32], row: &Row) -> (u32, f32) {
    let (most, least) = bounds(logits);
    let changed = adjusted_on_host(logits, row);
    let most_changed = match &changed {
        Cow::Borrowed(_) => most,
        Cow::Owned(changed) => bounds(changed).0,
    };
    let Sampling { temperature, .. } = row.sampling;
    let (best, scale) = if is_greedy(&row.sampling) {
        (largest(&changed, most_changed), 1.0)
    } else if row.sampling.has_filters() {
        (filtered(&changed, most_changed, row), temperature)
    } else {
        (warm(&changed, row), temperature)
    };
    // The error comes from the model's logits. Division by the temperature scales it as well.
    (best.token, best.lead() * scale / most.abs().max(least.abs()))
}

/// The best token so far.
struct Best {
    token: u32,
    score: f32,
    /// Score of the second best.
    second: f32,
}

impl Best {
    const NONE: Self = Self { token: 0, score: f32::NEG_INFINITY, second: f32::NEG_INFINITY };

    /// Takes the token if its score is higher. The first of several with one score wins.
    fn see(&mut self, token: u32, score: f32) {
        if score > self.score || (score == self.score && token < self.token) {
            *self = Self { token, score, second: self.score };
        } else if score > self.second {
            self.second = score;
        }
    }

    fn lead(&self) -> f32 {
        self.score - self.second
    }
}

/// The first of the largest logits, which are `score`.
fn largest(logits: &[f32], score: f32) -> Best {
    let place = logits.iter().position(|x| *x == score).unwrap_or(0);
    let others = [&logits[..place], logits.get(place + 1..).unwrap_or_default()];
    let [before, after] = others.map(|logits| bounds(logits).0);
    Best { token: place as u32, score, second: before.max(after) }
}

/// The largest and the smallest number; a NaN is neither.
fn bounds(numbers: &[f32]) -> (f32, f32) {
    // Several at a time, in vectors.
    let (chunks, rest) = numbers.as_chunks::<16>();
    let (mut most, mut least) = ([f32::NEG_INFINITY; 16], [f32::INFINITY; 16]);
    for chunk in chunks {
        for ((most, least), x) in most.iter_mut().zip(&mut least).zip(chunk) {
            *most = if x > most { *x } else { *most };
            *least = if x < least { *x } else { *least };
        }
    }
    let most = most.iter().chain(rest).fold(f32::NEG_INFINITY, |most, x| most.max(*x));
    (most, least.iter().chain(rest).fold(f32::INFINITY, |least, x| least.min(*x)))
}

/// The token with the largest logit over temperature plus noise.
fn warm(logits: &[f32], row: &Row) -> Best {
    let mut bits = vec![0; logits.len()];
    random_bits(row.key, &mut bits);
    let temperature = row.sampling.temperature;
    let mut best = Best::NONE;
    for ((token, logit), bits) in (0..).zip(logits).zip(bits) {
        let logit = logit / temperature;
        // Two logarithms for the few that can win.
        if logit + most_gumbel(bits) >= best.second {
            best.see(token, logit + gumbel(bits));
        }
    }
    best
}

/// The same among the tokens that the filters keep. `most`: the largest logit.
fn filtered(logits: &[f32], most: f32, row: &Row) -> Best {
    let mut best = Best::NONE;
    for (logit, token) in kept(logits, most, &row.sampling) {
        let bits = random_bits_at(row.key, logits.len(), token as usize);
        best.see(token, logit + gumbel(bits));
    }
    if best.score == f32::NEG_INFINITY {
        // Logits that are not finite have no probabilities. The likeliest token stays, as in the graph.
        return largest(logits, most);
    }
    best
}

/// Logits over temperature, and tokens, that the filters keep. `most`: the largest logit.
fn kept(logits: &[f32], most: f32, sampling: &Sampling) -> Vec<(f32, u32)> {
    let &Sampling { temperature, top_p, top_k, min_p } = sampling;
    let most = most / temperature;
    // The logarithm of 0 is minus infinity, which every token reaches.
    let min_p = most + min_p.ln();
    let mut kept: Vec<(f32, u32)>;
    if top_k > 0 {
        kept = likeliest(logits, temperature, top_k as usize);
        if top_p < 1.0 {
            let sum = kept.iter().map(|(logit, _)| f64::from(logit - most).exp()).sum();
            keep_mass(&mut kept, most, sum, top_p);
        }
    } else if top_p < 1.0 {
        // All tokens below this have together less than what top-p drops.
        let sum = sum_exp(logits, temperature, most);
        let least = (f64::from(1.0 - top_p) / logits.len() as f64 * sum).ln() as f32 + most;
        kept = at_least(logits, temperature, least);
        kept.sort_unstable_by(likelier);
        keep_mass(&mut kept, most, sum, top_p);
    } else {
        kept = at_least(logits, temperature, min_p);
    }
    kept.retain(|(logit, _)| *logit >= min_p);
    kept
}

/// The likelier token first, the smaller one of equal ones.
fn likelier(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Tokens with a logit over temperature of at least `least`.
fn at_least(logits: &[f32], temperature: f32, least: f32) -> Vec<(f32, u32)> {
    let tokens = (0..).zip(logits).map(|(token, logit)| (logit / temperature, token));
    tokens.filter(|(logit, _)| *logit >= least).collect()
}

/// The `count` likeliest tokens, the likeliest first.
fn likeliest(logits: &[f32], temperature: f32, count: usize) -> Vec<(f32, u32)> {
    let mut found: Vec<(f32, u32)> = Vec::new();
    let mut least = f32::NEG_INFINITY;
    let (chunks, rest) = logits.as_chunks::<16>();
    let parts = chunks.iter().map(<[f32; 16]>::as_slice).chain([rest]);
    for (start, part) in (0..).step_by(16).zip(parts) {
        // Most chunks have none. Division keeps the order, so logits are compared before it.
        if !part.iter().fold(false, |any, logit| any | (*logit > least)) {
            continue;
        }
        let own = (start..).zip(part).filter(|(_, logit)| **logit > least);
        found.extend(own.map(|(token, logit)| (*logit, token)));
        if found.len() >= COLLECTED * count.max(16) {
            found.select_nth_unstable_by(count - 1, likelier);
            found.truncate(count);
            least = found[count - 1].0;
        }
    }
    found.sort_unstable_by(likelier);
    found.truncate(count);
    found.iter_mut().for_each(|(logit, _)| *logit /= temperature);
    found
}

/// Keeps the first of `tokens`, the likeliest first, until those before one have a mass of `top_p`. `sum`: of the
/// exponentials of all logits less `most`.
fn keep_mass(tokens: &mut Vec<(f32, u32)>, most: f32, sum: f64, top_p: f32) {
    let mut before = 0.0;
    let count = tokens.iter().take_while(|(logit, _)| {
        let stays = before < f64::from(top_p);
        before += f64::from(logit - most).exp() / sum;
        stays
    });
    let count = count.count();
    tokens.truncate(count);
}

/// The noise of random bits, as [`super::noise::gumbel`] computes it.
fn gumbel(bits: u32) -> f32 {
    let uniform = (bits as f32 / u32::MAX as f32).min(1.0f32.next_down());
    -(-uniform.ln()).ln()
}

/// At least the noise of random bits, without a logarithm: for a number u below 1 - 2^-k, it is at most k ln 2.
fn most_gumbel(bits: u32) -> f32 {
    // A half for rounding.
    (bits.leading_ones().min(23) + 1) as f32 * std::f32::consts::LN_2 + 0.5
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use mlx_rs::{Array, Dtype};
    use steersman_test_support::Random;

    use super::super::noise::{self, mix};
    use super::super::penalties::Penalty;
    use super::super::rows::sample_with_margins;
    use super::*;

    /// `count` logits with the spread of a model's, none of them equal.
    fn logits(random: &mut Random, count: usize) -> Vec<f32> {
        let spread =
            |random: &mut Random| (random.below(1 << 20) as f32 / (1 << 20) as f32).powi(3);
        (0..count).map(|_| 24.0 * spread(random) - 8.0).collect()
    }

    #[test]
    fn noise_is_that_of_the_graph() {
        for columns in [1, 2, 7, 64, 1001] {
            let mut bits = vec![0; columns];
            random_bits(mix(3, 5), &mut bits);
            let graph = noise::bits(&[mix(3, 5)], columns as i32).unwrap();
            assert_eq!(bits, graph.as_slice::<u32>(), "{columns} columns");
            let expected = noise::gumbel(&graph).unwrap();
            for (bits, expected) in bits.iter().zip(expected.as_slice::<f32>()) {
                assert!((gumbel(*bits) - expected).abs() < 2e-6 * expected.abs().max(1.0));
                assert!(most_gumbel(*bits) > *expected);
            }
        }
        let ends = [0, 1, u32::MAX >> 1, u32::MAX - 1, u32::MAX];
        assert!(ends.iter().all(|bits| most_gumbel(*bits) > gumbel(*bits)));
    }

    /// Rows of every kind, with each change of logits: the token is that of the graph, and so is its margin.
    #[test]
    fn tokens_are_those_of_the_graph() {
        let mut random = Random(11);
        let plain = Sampling::default();
        let warm = Sampling { temperature: 0.8, ..plain };
        let samplings = [
            plain,
            warm,
            Sampling { temperature: 2.0, ..warm },
            Sampling { top_k: 1, ..warm },
            Sampling { top_k: 20, top_p: 0.8, ..warm },
            Sampling { top_k: 700, ..warm },
            Sampling { top_k: 700, top_p: 0.95, min_p: 0.02, ..warm },
            Sampling { top_p: 0.95, ..warm },
            Sampling { top_p: 0.3, temperature: 1.5, ..warm },
            Sampling { top_p: 0.999, min_p: 0.001, ..warm },
            Sampling { min_p: 0.05, ..warm },
        ];
        for vocabulary in [37, 1000, 5003] {
            for i in 0..200u64 {
                let values = logits(&mut random, vocabulary);
                let mut row = Row::new(samplings[i as usize % samplings.len()], mix(7, i));
                if random.below(3) == 0 {
                    row.offsets = Rc::from([(3, 2.5), (7, f32::NEG_INFINITY), (99_999, 1.0)]);
                }
                if random.below(3) == 0 {
                    let penalty = |token, factor, offset| Penalty { token, factor, offset };
                    row.penalties = Rc::from([penalty(1, 1.3, 0.5), penalty(9, 0.7, -1.0)]);
                }
                if random.below(3) == 0 {
                    let words = (0..vocabulary / 32).map(|i| [0x0F0F_00FF, u32::MAX, 0][i % 3]);
                    row.mask = Some(words.collect());
                }
                let array = Array::from_slice(&values, &[1, vocabulary as i32]);
                assert_eq!(array.dtype(), Dtype::Float32);
                let (token, margin) =
                    sample_with_margins(&array, std::slice::from_ref(&row)).unwrap();
                let expected = (token.item_exact::<u32>(), margin.item_exact::<f32>());
                let found = sample(&values, &row);
                assert_eq!(found.0, expected.0, "{row:?} of {vocabulary} tokens");
                let near = (found.1 - expected.1).abs() < 1e-5 || found.1 == expected.1;
                assert!(near, "{row:?} of {vocabulary} tokens: {} {}", found.1, expected.1);
            }
        }
    }

    /// The first of equal ones, wherever they are.
    #[test]
    fn the_largest_logit_is_that_of_the_graph() {
        let mut logits: Vec<f32> = (0..1003i64).map(|i| (i * 7919 % 1009) as f32 - 500.0).collect();
        let greedy = [Row::new(Sampling::default(), 0)];
        for (place, value) in
            [(5, 600.0), (16, 600.0), (1002, 600.5), (0, 600.5), (7, -9e3), (3, f32::NAN)]
        {
            logits[place] = value;
            let array = Array::from_slice(&logits, &[1, 1003]);
            let (token, margin) = sample_with_margins(&array, &greedy).unwrap();
            let (found, lead) = sample(&logits, &greedy[0]);
            assert_eq!(found, token.item_exact::<u32>(), "after {place}");
            // MLX's largest magnitude of a row with a NaN is one.
            assert!(value.is_nan() || lead == margin.item_exact::<f32>(), "after {place}: {lead}");
        }
    }

    /// A token is sampled in any case, and not a banned one if there is another.
    #[test]
    fn logits_that_are_not_finite_leave_the_likeliest_token() {
        for value in [f32::NAN, f32::INFINITY] {
            let mut logits = vec![1.0; 40];
            (logits[0], logits[9]) = (f32::NEG_INFINITY, 3.0);
            logits[20] = value;
            let expected = if value.is_nan() { 9 } else { 20 };
            for filter in [
                Sampling { top_p: 0.9, ..Sampling::default() },
                Sampling { top_k: 5, ..Sampling::default() },
            ] {
                let row = Row::new(Sampling { temperature: 0.01, ..filter }, 1);
                assert_eq!(sample(&logits, &row).0, expected, "{value} {filter:?}");
            }
        }
    }

    /// Ties are between tokens of equal noise only by chance; the smallest of those that fit in top-k are kept.
    #[test]
    fn equal_logits_are_kept_in_order() {
        let row = Row::new(Sampling { temperature: 1.0, top_k: 3, ..Sampling::default() }, 5);
        let tokens = (0..300).map(|i| sample(&[2.0; 50], &Row { key: mix(1, i), ..row.clone() }).0);
        let mut tokens: Vec<u32> = tokens.collect();
        tokens.sort_unstable();
        tokens.dedup();
        assert_eq!(tokens, [0, 1, 2]);
    }

    #[test]
    fn a_row_without_a_possible_token_has_one() {
        for temperature in [0.0, 1.0] {
            let row = Row::new(Sampling { temperature, top_p: 0.9, ..Sampling::default() }, 1);
            assert_eq!(sample(&[f32::NEG_INFINITY; 40], &row).0, 0);
        }
    }
}
