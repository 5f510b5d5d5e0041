//! Samples the next token from logits, inside MLX's graph, so that nothing waits for it.
//!
//! Order of the filters: temperature, top-k, top-p over the remaining tokens, min-p. Every position
//! has its own random key, made of the request's seed and the index of the position, so earlier and
//! discarded samples do not change later ones.

use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis, put_along_axis, take_along_axis};
use mlx_rs::ops::{argsort_axis, broadcast_to, concatenate, select, softmax_axis};
use mlx_rs::{Array, Dtype, random};

use crate::error::Result;
use crate::request::Sampling;

/// The first `vocabulary` columns of `logits` [.., V]: some models pad their head to a round number,
/// and two models sample with the same noise only over the same number of columns.
pub fn within(logits: Array, vocabulary: i32) -> Result<Array> {
    if logits.dim(-1) <= vocabulary {
        return Ok(logits);
    }
    let parts = logits.split_at_indices(&[vocabulary], -1)?;
    Ok(parts[0].clone())
}

/// Samples a token after each row of `logits` [R, V]; returns u32 [R]. The first row's token gets
/// position `index`.
pub fn sample(logits: &Array, sampling: &Sampling, seed: u64, index: u64) -> Result<Array> {
    let (scores, order) = scores(logits, sampling, seed, index)?;
    tokens_at(&argmax_axis(&scores, -1, true)?, order.as_ref())
}

/// [`sample`] from `logits` with `offsets` [V] added. Also returns the margin of each token over the
/// second best, relative to the largest logit of its row: f32 [R]. A margin below rounding error is
/// a near-tie.
pub fn sample_with_margin(
    logits: &Array,
    offsets: Option<&Array>,
    sampling: &Sampling,
    seed: u64,
    index: u64,
) -> Result<(Array, Array)> {
    let shifted = offsets.map(|offsets| logits.add(offsets)).transpose()?;
    let (scores, order) = scores(shifted.as_ref().unwrap_or(logits), sampling, seed, index)?;
    let best = argmax_axis(&scores, -1, true)?;
    let best_score = take_along_axis(&scores, &best, -1)?;
    let never = Array::from_f32(f32::NEG_INFINITY).as_dtype(scores.dtype())?;
    let others = put_along_axis(&scores, &best, broadcast_to(never, best.shape())?, -1)?;
    let margin = best_score.subtract(others.max_axis(-1, true)?)?.as_dtype(Dtype::Float32)?;
    // The error comes from the model's logits: offsets are exact.
    let largest = logits.abs()?.max_axis(-1, true)?.as_dtype(Dtype::Float32)?;
    // Division by the temperature scales the rounding error as well.
    let scale = if sampling.temperature > 0.0 { sampling.temperature } else { 1.0 };
    let margin = margin.multiply(Array::from_f32(scale))?.divide(largest)?;
    Ok((tokens_at(&best, order.as_ref())?, margin.squeeze_axes(&[1])?))
}

/// Scores [R, V], of which the largest in each row is sampled. Filters sort the row; the second array
/// [R, V] then holds the token of each column.
///
/// The largest of logits plus Gumbel noise is a sample of their softmax. Two models that use the same
/// noise tend to sample the same token, which raises the acceptance rate of drafts.
fn scores(
    logits: &Array,
    sampling: &Sampling,
    seed: u64,
    index: u64,
) -> Result<(Array, Option<Array>)> {
    if sampling.temperature <= 0.0 {
        return Ok((logits.clone(), None));
    }
    let shape = [1, logits.dim(1)];
    let noise = (0..logits.dim(0) as u64)
        .map(|row| random::gumbel::<f32>(&shape[..], &random::key(mix(seed, index + row))?));
    let noise = concatenate(&noise.collect::<std::result::Result<Vec<_>, _>>()?, 0)?;
    let logits = logits.as_dtype(Dtype::Float32)?.divide(Array::from_f32(sampling.temperature))?;
    if !filters(sampling) {
        return Ok((logits.add(noise)?, None));
    }
    let order = argsort_axis(logits.negative()?, -1)?;
    let sorted = filtered(&take_along_axis(&logits, &order, -1)?, sampling)?;
    // Noise belongs to tokens, not to ranks: two tokens that swap ranks within rounding error keep it.
    let noise = take_along_axis(&noise, &order, -1)?;
    Ok((sorted.add(noise)?, Some(order)))
}

/// Tokens u32 [R] of the columns [R, 1].
fn tokens_at(columns: &Array, order: Option<&Array>) -> Result<Array> {
    let tokens = match order {
        Some(order) => take_along_axis(order, columns, -1)?,
        None => columns.clone(),
    };
    Ok(tokens.squeeze_axes(&[1])?.as_dtype(Dtype::Uint32)?)
}

fn filters(sampling: &Sampling) -> bool {
    sampling.top_k > 0 || sampling.top_p < 1.0 || sampling.min_p > 0.0
}

/// `sorted` [R, V], most likely token first, with minus infinity for tokens that the filters drop.
/// The first token always stays.
fn filtered(sorted: &Array, sampling: &Sampling) -> Result<Array> {
    let never = Array::from_f32(f32::NEG_INFINITY);
    let vocabulary = sorted.dim(1);
    let mut sorted = sorted.clone();
    if sampling.top_k > 0 && i64::from(sampling.top_k) < i64::from(vocabulary) {
        let rank = mlx_rs::ops::arange::<_, u32>(None, vocabulary, None)?;
        let keep = rank.lt(Array::from_slice(&[sampling.top_k], &[1]))?;
        sorted = select(keep, &sorted, &never)?;
    }
    if sampling.top_p < 1.0 {
        let probabilities = softmax_axis(&sorted, -1, true)?;
        // A token stays while the mass before it is below p, so the first always does.
        let before = probabilities.cumsum(-1, None, false)?;
        let keep = before.lt(Array::from_f32(sampling.top_p))?;
        sorted = select(keep, &sorted, &never)?;
    }
    if sampling.min_p > 0.0 {
        let least = sorted.try_index((.., ..1))?.add(Array::from_f32(sampling.min_p.ln()))?;
        sorted = select(sorted.ge(least)?, &sorted, &never)?;
    }
    Ok(sorted)
}

/// SplitMix64's finalizer over seed and index: neighbouring positions get unrelated keys.
fn mix(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frequencies of 4,000 samples from these probabilities.
    fn frequencies(probabilities: &[f32], sampling: &Sampling) -> Vec<f32> {
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln()).collect();
        let size = i32::try_from(logits.len()).unwrap();
        let logits = Array::from_slice(&logits, &[1, size]);
        let mut counts = vec![0u32; probabilities.len()];
        for index in 0..4000 {
            let token = sample(&logits, sampling, 7, index).unwrap().item_exact::<u32>();
            counts[token as usize] += 1;
        }
        counts.into_iter().map(|count| count as f32 / 4000.0).collect()
    }

    fn check(sampling: Sampling, expected: &[f32]) {
        let found = frequencies(&[0.1, 0.5, 0.05, 0.35], &sampling);
        for (found, expected) in found.iter().zip(expected) {
            // Five standard deviations of a frequency over 4,000 samples.
            assert!((found - expected).abs() < 0.04, "{sampling:?}: {found} is not {expected}");
            assert!(*expected > 0.0 || *found == 0.0, "{sampling:?} sampled a dropped token");
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
            let logits = Array::from_slice(&logits, &[1, 4]);
            sample(&logits, &filtered, 7, index).unwrap().item_exact::<u32>()
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
            (0..20)
                .map(|i| sample(&logits, &sampling, seed, i).unwrap().item_exact::<u32>())
                .collect()
        };
        assert_eq!(samples(1), samples(1));
        assert_ne!(samples(1), samples(2));
    }
}
