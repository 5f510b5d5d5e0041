//! Samples the next token of every row of a pass, inside MLX's graph, so that nothing waits for it. Where logits are in
//! the host's memory, [`super::host`] does the same there.
//!
//! A [`Row`] holds the parameters of one sample: everything that changes the logits of a row is data in it,
//! so that rows of different requests are sampled in one graph. Rows of the same
//! [`Kind`] are computed together, and a row is sampled as if it were alone.
//!
//! Order of the filters: temperature, top-k, top-p over the remaining tokens, min-p.
//!
//! The largest of logits plus Gumbel noise is a sample of their softmax. Two models that use the same
//! noise tend to sample the same token, which raises the acceptance rate of drafts.

use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis, put_along_axis, take_along_axis};
use mlx_rs::ops::{
    arange, argpartition_axis, argsort_axis, broadcast_to, concatenate, select, softmax_axis,
};
use mlx_rs::{Array, Dtype};

use super::adjust::adjusted;
use super::noise::{bits, gumbel};
use super::row::{Row, is_greedy};
use crate::error::Result;
use crate::request::Sampling;

/// Rows with at most this top-k sort only as many columns, which are selected first. Sorting a whole row
/// costs several times as much.
const FEW: i32 = 64;

/// What is computed for a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The largest logit.
    Greedy,
    /// Noise, no filters.
    Warm,
    /// Filters that leave at most [`FEW`] tokens.
    Few,
    /// Other filters.
    Filtered,
}

const KINDS: [Kind; 4] = [Kind::Greedy, Kind::Warm, Kind::Few, Kind::Filtered];

/// What is computed for `row` over `vocabulary` logits.
fn kind(row: &Row, vocabulary: i32) -> Kind {
    let top_k = row.sampling.top_k;
    if is_greedy(&row.sampling) {
        Kind::Greedy
    } else if (1..=FEW as u32).contains(&top_k) && FEW < vocabulary {
        Kind::Few
    } else if row.sampling.has_filters() {
        Kind::Filtered
    } else {
        Kind::Warm
    }
}

/// The first `vocabulary` columns of `logits` [.., V]: some models pad their head to a round number,
/// and two models sample with the same noise only over the same number of columns.
pub fn within(logits: Array, vocabulary: i32) -> Result<Array> {
    if logits.dim(-1) <= vocabulary {
        return Ok(logits);
    }
    let parts = logits.split_at_indices(&[vocabulary], -1)?;
    Ok(parts[0].clone())
}

/// Samples a token after each row of `logits` [R, V]: u32 [R].
pub fn sample(logits: &Array, rows: &[Row]) -> Result<Array> {
    Ok(sample_rows(logits, rows, false)?.0)
}

/// [`sample`] that also returns the margin of each token over the second best, relative to the largest
/// logit of its row: f32 [R]. A margin below rounding error is a near-tie.
pub fn sample_with_margins(logits: &Array, rows: &[Row]) -> Result<(Array, Array)> {
    let (tokens, leads) = sample_rows(logits, rows, true)?;
    let leads = leads.expect("asked for");
    // The error comes from the model's logits: offsets are exact.
    let largest = logits.abs()?.max_axis(-1, None)?.as_dtype(Dtype::Float32)?;
    // Division by the temperature scales the rounding error as well.
    let scale = |row: &Row| match &row.sampling {
        sampling if is_greedy(sampling) => 1.0,
        sampling => sampling.temperature,
    };
    let scales: Vec<f32> = rows.iter().map(scale).collect();
    let margins = leads.multiply(Array::from_slice(&scales, &[scales.len() as i32]))?;
    Ok((tokens, margins.divide(largest)?))
}

/// Tokens u32 [R] and, if `leads` are wanted, how far the score of each is above the second best: f32 [R].
fn sample_rows(logits: &Array, rows: &[Row], leads: bool) -> Result<(Array, Option<Array>)> {
    let logits = adjusted(logits, rows)?;
    let kinds: Vec<Kind> = rows.iter().map(|row| kind(row, logits.dim(1))).collect();
    if kinds.iter().all(|&kind| kind == kinds[0]) {
        return sample_kind(kinds[0], &logits, &rows.iter().collect::<Vec<_>>(), leads);
    }
    let (mut order, mut tokens, mut all_leads) = (Vec::new(), Vec::new(), Vec::new());
    for kind in KINDS {
        let members: Vec<usize> = (0..rows.len()).filter(|&i| kinds[i] == kind).collect();
        if members.is_empty() {
            continue;
        }
        let indices: Vec<i32> = members.iter().map(|&i| i as i32).collect();
        let own = logits.take_axis(Array::from_slice(&indices, &[indices.len() as i32]), 0)?;
        let own_rows: Vec<&Row> = members.iter().map(|&i| &rows[i]).collect();
        let (own_tokens, own_leads) = sample_kind(kind, &own, &own_rows, leads)?;
        tokens.push(own_tokens);
        all_leads.extend(own_leads);
        order.extend(members);
    }
    // Where the result of each row is.
    let mut places = vec![0; rows.len()];
    (0i32..).zip(order).for_each(|(place, row)| places[row] = place);
    let places = Array::from_slice(&places, &[places.len() as i32]);
    let sorted = |parts: &[Array]| concatenate(parts, 0)?.take_axis(&places, 0);
    let all_leads = leads.then(|| sorted(&all_leads)).transpose()?;
    Ok((sorted(&tokens)?, all_leads))
}

/// [`sample_rows`] for rows of one kind.
fn sample_kind(
    kind: Kind,
    logits: &Array,
    rows: &[&Row],
    leads: bool,
) -> Result<(Array, Option<Array>)> {
    let (scores, order) = scores(kind, logits, rows)?;
    let best = argmax_axis(&scores, -1, true)?;
    let tokens = match &order {
        Some(order) => take_along_axis(order, &best, -1)?,
        None => best.clone(),
    };
    let tokens = tokens.squeeze_axes(&[1])?.as_dtype(Dtype::Uint32)?;
    if !leads {
        return Ok((tokens, None));
    }
    let best_score = take_along_axis(&scores, &best, -1)?;
    let never = Array::from_f32(f32::NEG_INFINITY).as_dtype(scores.dtype())?;
    let others = put_along_axis(&scores, &best, broadcast_to(never, best.shape())?, -1)?;
    let second = others.max_axis(-1, true)?.as_dtype(Dtype::Float32)?;
    let leads = best_score.as_dtype(Dtype::Float32)?.subtract(second)?.squeeze_axes(&[1])?;
    Ok((tokens, Some(leads)))
}

/// Scores [R, C] of rows of one kind, of which the largest in each row is sampled. If columns are not
/// tokens, the second array [R, C] holds the token of each column.
fn scores(kind: Kind, logits: &Array, rows: &[&Row]) -> Result<(Array, Option<Array>)> {
    let order = match kind {
        Kind::Greedy => return Ok((logits.clone(), None)),
        Kind::Warm => None,
        Kind::Few => {
            let negative = logits.negative()?;
            let few = argpartition_axis(&negative, FEW - 1, -1)?.try_index((.., ..FEW))?;
            let order = argsort_axis(take_along_axis(&negative, &few, -1)?, -1)?;
            Some(take_along_axis(&few, order, -1)?)
        }
        Kind::Filtered => Some(argsort_axis(logits.negative()?, -1)?),
    };
    let keys: Vec<u64> = rows.iter().map(|row| row.key).collect();
    let bits = bits(&keys, logits.dim(1))?;
    let warm = |logits: &Array| -> Result<Array> {
        let temperatures = column(rows, |sampling| sampling.temperature);
        Ok(logits.as_dtype(Dtype::Float32)?.divide(temperatures)?)
    };
    let Some(order) = order else {
        return Ok((warm(logits)?.add(gumbel(&bits)?)?, None));
    };
    let sorted = filtered(&warm(&take_along_axis(logits, &order, -1)?)?, rows)?;
    let noise = gumbel(&take_along_axis(&bits, &order, -1)?)?;
    Ok((sorted.add(noise)?, Some(order)))
}

/// One parameter of each row, f32 [R, 1].
fn column(rows: &[&Row], parameter: impl Fn(&Sampling) -> f32) -> Array {
    let values: Vec<f32> = rows.iter().map(|row| parameter(&row.sampling)).collect();
    Array::from_slice(&values, &[values.len() as i32, 1])
}

/// `sorted` [R, C], most likely token first, with minus infinity for tokens that the filters drop.
/// The first token always stays. A filter that a row does not have keeps all of its tokens.
fn filtered(sorted: &Array, rows: &[&Row]) -> Result<Array> {
    let any = |has: fn(&Sampling) -> bool| rows.iter().any(|row| has(&row.sampling));
    let never = Array::from_f32(f32::NEG_INFINITY);
    let mut sorted = sorted.clone();
    if any(|sampling| sampling.top_k > 0) {
        // Vocabularies are far smaller than 2^24, up to which f32 holds every integer.
        let ranks = arange::<_, f32>(None, sorted.dim(1), None)?;
        let keep =
            ranks.lt(column(rows, |s| if s.top_k > 0 { s.top_k as f32 } else { f32::MAX }))?;
        sorted = select(keep, &sorted, &never)?;
    }
    if any(|sampling| sampling.top_p < 1.0) {
        let probabilities = softmax_axis(&sorted, -1, true)?;
        // A token stays while the mass before it is below p, so the first always does.
        let before = probabilities.cumsum(-1, None, false)?;
        let least = column(rows, |s| if s.top_p < 1.0 { s.top_p } else { f32::INFINITY });
        sorted = select(before.lt(least)?, &sorted, &never)?;
    }
    if any(|sampling| sampling.min_p > 0.0) {
        // The logarithm of 0 is minus infinity, which every token reaches.
        let least = sorted.try_index((.., ..1))?.add(column(rows, |s| s.min_p.ln()))?;
        sorted = select(sorted.ge(least)?, &sorted, &never)?;
    }
    Ok(sorted)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::super::noise::mix;
    use super::*;

    fn sampled(logits: &Array, sampling: Sampling, seed: u64, index: u64) -> u32 {
        sample(logits, &[Row::new(sampling, mix(seed, index))]).unwrap().item_exact::<u32>()
    }

    /// Frequencies of 4,000 samples from these probabilities.
    fn frequencies(probabilities: &[f32], sampling: Sampling) -> Vec<f32> {
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln()).collect();
        let size = i32::try_from(logits.len()).unwrap();
        let logits = Array::from_slice(&logits, &[1, size]);
        let mut counts = vec![0u32; probabilities.len()];
        for index in 0..4000 {
            counts[sampled(&logits, sampling, 7, index) as usize] += 1;
        }
        counts.into_iter().map(|count| count as f32 / 4000.0).collect()
    }

    fn check(sampling: Sampling, expected: &[f32]) {
        let found = frequencies(&[0.1, 0.5, 0.05, 0.35], sampling);
        for (found, expected) in found.iter().zip(expected) {
            // Five standard deviations of a frequency over 4,000 samples.
            assert!((found - expected).abs() < 0.04, "{sampling:?}: {found} is not {expected}");
            assert!(*expected > 0.0 || *found == 0.0, "{sampling:?} sampled a dropped token");
        }
    }

    /// 1e-40 sampled garbage: logits divided by it are infinite.
    #[test]
    fn a_temperature_near_zero_is_greedy() {
        let logits = Array::from_slice(&[3.0f32, 40.0, -5.0, 39.0], &[1, 4]);
        for temperature in [0.0, f32::MIN_POSITIVE / 2.0, 1e-40, 1e-38, 1e-30, 1e-8, 1e-4] {
            for filter in [Sampling::default(), Sampling { top_p: 0.9, ..Sampling::default() }] {
                let sampling = Sampling { temperature, ..filter };
                let tokens = (0..20).map(|index| sampled(&logits, sampling, 7, index));
                assert!(tokens.into_iter().all(|token| token == 1), "{sampling:?}");
            }
        }
    }

    #[test]
    fn samples_follow_the_filtered_distribution() {
        let plain = Sampling { temperature: 1.0, ..Sampling::default() };
        check(plain, &[0.1, 0.5, 0.05, 0.35]);
        check(Sampling { top_k: 2, ..plain }, &[0.0, 0.588, 0.0, 0.412]);
        check(Sampling { top_p: 0.9, ..plain }, &[0.105, 0.526, 0.0, 0.368]);
        check(Sampling { top_p: 0.5, ..plain }, &[0.0, 1.0, 0.0, 0.0]);
        check(Sampling { min_p: 0.5, ..plain }, &[0.0, 0.588, 0.0, 0.412]);
        // Half the temperature squares the probabilities.
        check(Sampling { temperature: 0.5, ..plain }, &[0.026, 0.6494, 0.0065, 0.3182]);
    }

    #[test]
    fn tokens_that_swap_ranks_keep_their_noise() {
        let filtered = Sampling { temperature: 1.0, top_k: 3, ..Sampling::default() };
        let sampled = |logits: [f32; 4], index| {
            sampled(&Array::from_slice(&logits, &[1, 4]), filtered, 7, index)
        };
        for index in 0..200 {
            let one = sampled([1.0, 1.000_001, 0.5, 0.0], index);
            assert_eq!(one, sampled([1.000_001, 1.0, 0.5, 0.0], index), "sample {index}");
        }
    }

    #[test]
    fn greedy_samples_the_most_likely_token() {
        check(Sampling::default(), &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn seed_determines_the_samples() {
        let logits = Array::from_slice(&[0.0f32; 1000], &[1, 1000]);
        let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
        let samples = |seed| -> Vec<u32> {
            (0..20).map(|index| sampled(&logits, sampling, seed, index)).collect()
        };
        assert_eq!(samples(1), samples(1));
        assert_ne!(samples(1), samples(2));
    }

    /// Rows of every kind, with offsets and ties, in random order: tokens and margins are equal to the
    /// last bit, whoever else is sampled.
    #[test]
    fn rows_sampled_together_equal_rows_alone() {
        let warm = Sampling { temperature: 0.7, ..Sampling::default() };
        let samplings = [
            Sampling::default(),
            warm,
            Sampling { top_k: 20, top_p: 0.95, ..warm },
            Sampling { temperature: 1.3, top_k: 1, ..warm },
            Sampling { top_k: 64, min_p: 0.05, ..warm },
            Sampling { top_p: 0.9, ..warm },
            Sampling { top_k: 100, ..warm },
            Sampling { temperature: 0.1, min_p: 0.2, ..warm },
        ];
        let mut random = steersman_test_support::Random(4);
        for (vocabulary, dtype) in
            [(500, Dtype::Float32), (501, Dtype::Bfloat16), (40, Dtype::Float32)]
        {
            for count in [1, 2, 7, 33] {
                let rows: Vec<Row> = (0..count)
                    .map(|i| {
                        let offsets: Rc<[(u32, f32)]> = match random.below(3) {
                            0 => Rc::new([(3, 2.5), (7, f32::NEG_INFINITY), (9999, 1.0)]),
                            _ => Rc::default(),
                        };
                        let sampling = samplings[random.below(samplings.len())];
                        Row { offsets, ..Row::new(sampling, mix(5, i)) }
                    })
                    .collect();
                let values: Vec<f32> = (0..count as usize * vocabulary)
                    .map(|_| random.below(200) as f32 / 20.0 - 5.0)
                    .collect();
                let logits = Array::from_slice(&values, &[count as i32, vocabulary as i32]);
                let logits = logits.as_dtype(dtype).unwrap();
                let (tokens, margins) = sample_with_margins(&logits, &rows).unwrap();
                assert_eq!(
                    tokens.as_slice::<u32>(),
                    sample(&logits, &rows).unwrap().as_slice::<u32>()
                );
                for (i, row) in rows.iter().enumerate() {
                    let own = logits.try_index(i as i32..i as i32 + 1).unwrap();
                    let alone = sample_with_margins(&own, std::slice::from_ref(row)).unwrap();
                    let together = (tokens.as_slice::<u32>()[i], margins.as_slice::<f32>()[i]);
                    let alone = (alone.0.item_exact::<u32>(), alone.1.item_exact::<f32>());
                    assert_eq!(together, alone, "{row:?} of {count}, {vocabulary} tokens");
                    assert!(row.offsets.is_empty() || together.0 != 7, "a banned token");
                }
            }
        }
    }
}
