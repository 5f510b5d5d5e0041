//! Measures, for `steersman calibrate`, which early exits and which skipped feed-forward blocks a
//! model tolerates, on text of its own.
//!
//! Each case is one pass over the text, compared with the whole model: how often the first N layers
//! predict the same token, and by how many nats a token the predictions diverge (Kullback-Leibler)
//! without a block. Blocks are skipped in the order of their cost alone; the cost of a set of blocks
//! is measured, not added up.
//!
//! Source: early exit as drafter, LayerSkip (arXiv:2404.16710); importance of a layer by the effect of
//! leaving it out, ShortGPT (arXiv:2403.03853).

use std::path::Path;
use std::time::Instant;

use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis};
use mlx_rs::ops::{concatenate, exp, logsumexp_axis};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::verify::plain_text;
use crate::cache::Span;
use crate::decode::Decoder;
pub use crate::decode::{Calibration, Skip};
use crate::error::{Error, Result};
use crate::model::Pass;
use crate::nn::token_ids;
use crate::request::Request;

/// Depth of the drafts by which early exits are compared.
const DRAFTED: usize = 4;

/// Rows whose logits are compared at once: a row can have 250,000 columns.
const BLOCK: i32 = 64;

/// A text and the whole model's hidden states, [1, T, D].
struct Text {
    tokens: Vec<u32>,
    hidden: Array,
}

/// Least expected speed of an early exit over plain decoding.
const GAIN: f32 = 1.05;

/// Measures on `requests` and the model's own replies to them, of at most `tokens` tokens, and
/// writes the calibration file. Calls `progress` with the number of finished measurements and of
/// all measurements.
///
/// # Errors
/// When a request cannot be admitted or run; [`Error::Model`] when the file cannot be written.
pub fn calibrate(
    decoder: &mut Decoder,
    requests: &[Request],
    tokens: usize,
    mut progress: impl FnMut(usize, usize),
) -> Result<Calibration> {
    let depth = decoder.network().model().depth();
    // No model is useful without half of its blocks.
    let most_skipped = depth / 2;
    let all = requests.len() + depth - 1 + depth + most_skipped;
    let mut done = 0;
    let mut step = || {
        done += 1;
        progress(done, all);
    };
    // The reference is the whole model, even if the configuration skips blocks.
    decoder.network_mut().skip_nothing();
    let mut texts = Vec::new();
    for request in requests {
        let tokens = plain_text(decoder, request, tokens)?;
        let hidden = hidden(decoder, &tokens, Pass::WHOLE)?;
        texts.push(Text { tokens, hidden });
        step();
    }
    let count = texts.iter().map(|text| text.tokens.len()).sum();
    let mut found = Calibration { tokens: count, ..Calibration::default() };
    for layers in 1..depth {
        let pass = Pass { exit: Some(layers), ..Pass::WHOLE };
        found.exits.push(mean(decoder, &texts, pass, agreement)?);
        step();
    }
    found.exit_layers = best_exit(decoder, &found.exits)?;

    let mut alone = Vec::new();
    for layer in 0..depth {
        let pass = Pass { skip: &[layer], ..Pass::WHOLE };
        alone.push((mean(decoder, &texts, pass, divergence)?, layer));
        step();
    }
    alone.sort_by(|a, b| a.0.total_cmp(&b.0));
    for count in 1..=most_skipped {
        let mut layers: Vec<usize> = alone[..count].iter().map(|&(_, layer)| layer).collect();
        layers.sort_unstable();
        let kl = mean(decoder, &texts, Pass { skip: &layers, ..Pass::WHOLE }, divergence)?;
        // Activations may overflow without a block.
        if kl.is_finite() {
            found.skips.push(Skip { layers, kl });
        }
        step();
    }
    found.write(decoder.speculation().calibration_path())?;
    Ok(found)
}

/// Path of the calibration file of the loaded model.
pub fn calibration_path(decoder: &Decoder) -> &Path {
    decoder.speculation().calibration_path()
}

/// The number of layers whose early-exit drafts commit the most tokens a second; `None` if plain
/// decoding is as fast.
fn best_exit(decoder: &Decoder, exits: &[f32]) -> Result<Option<usize>> {
    let Some(costs) = decoder.costs().drafts() else { return Ok(None) };
    let depth = exits.len() + 1;
    let mut best = (GAIN / costs.plain(1), None);
    for (layers, acceptance) in (1..depth).zip(exits) {
        let drafting = DRAFTED as f32 * time_exit(decoder, layers)?;
        let tokens: f32 = (0..=DRAFTED as i32).map(|i| acceptance.powi(i)).sum();
        let speed = tokens / (drafting + costs.pass(1, DRAFTED + 1));
        if speed > best.0 {
            best = (speed, Some(layers));
        }
    }
    Ok(best.1)
}

/// Seconds that a token takes through the first `layers` layers and the head, the least of four
/// runs.
fn time_exit(decoder: &Decoder, layers: usize) -> Result<f32> {
    let mut cache = decoder.empty_cache();
    let token = Array::from_slice(&[0u32], &[1]);
    let mut least = f32::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        let pass = Pass { exit: Some(layers), ..Pass::WHOLE };
        let span = Span { rows: 1, cache: &mut cache };
        let hidden = decoder.network().model().forward(&token, &mut [span], pass)?;
        eval([&decoder.network().model().logits(&hidden)?])?;
        least = least.min(start.elapsed().as_secs_f32());
    }
    Ok(least)
}

/// Hidden states of all tokens of `text`, [1, T, D], computed in chunks like a prompt.
fn hidden(decoder: &Decoder, text: &[u32], pass: Pass<'_>) -> Result<Array> {
    let mut cache = decoder.empty_cache();
    let mut parts = Vec::new();
    for chunk in text.chunks(decoder.chunk()) {
        let ids = token_ids(chunk);
        let span = Span { rows: ids.dim(0), cache: &mut cache };
        let hidden = decoder.network().model().forward(&ids, &mut [span], pass)?;
        eval([&hidden])?;
        parts.push(hidden);
    }
    Ok(concatenate(&parts, 1)?)
}

/// Mean over all tokens of `measure`, which gets the whole model's logits and those of `pass`,
/// both [R, V], and returns a sum over rows.
fn mean(
    decoder: &Decoder,
    texts: &[Text],
    pass: Pass<'_>,
    measure: fn(&Array, &Array) -> Result<Array>,
) -> Result<f32> {
    let (mut total, mut tokens) = (0.0, 0);
    for text in texts {
        let found = hidden(decoder, &text.tokens, pass)?;
        let rows = found.dim(1);
        for start in (0..rows).step_by(BLOCK as usize) {
            let block = |hidden: &Array| -> Result<Array> {
                let part = hidden.try_index((.., start..rows.min(start + BLOCK), ..))?;
                Ok(decoder
                    .network()
                    .model()
                    .logits(&part)?
                    .squeeze_axes(&[0])?
                    .as_dtype(Dtype::Float32)?)
            };
            let value = measure(&block(&text.hidden)?, &block(&found)?)?;
            let value = value.try_item_exact::<f32>();
            total += value.map_err(Error::from)?;
        }
        tokens += rows;
    }
    Ok(total / tokens.max(1) as f32)
}

/// Number of rows that predict the same token.
fn agreement(whole: &Array, part: &Array) -> Result<Array> {
    let same = argmax_axis(whole, -1, None)?.eq(argmax_axis(part, -1, None)?)?;
    Ok(same.as_dtype(Dtype::Float32)?.sum(None)?)
}

/// Sum over rows of the divergence of `part` from `whole`, in nats.
fn divergence(whole: &Array, part: &Array) -> Result<Array> {
    let nats = |logits: &Array| logits.subtract(logsumexp_axis(logits, -1, true)?);
    let whole = nats(whole)?;
    Ok(exp(&whole)?.multiply(whole.subtract(nats(part)?)?)?.sum(None)?)
}
