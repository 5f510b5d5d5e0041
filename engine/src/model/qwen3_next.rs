//! Qwen3-Next, the predecessor of Qwen3.5: the same arithmetic with other names and layouts.
//!
//! Its GatedDeltaNet layers project with two matrices, whose rows are grouped by key head
//! (`in_proj_qkvz`, `in_proj_ba`). Loading converts them to the four of Qwen3.5, dense or packed:
//! rows are quantized separately, so they can be reordered.
//!
//! Source: `transformers` `models/qwen3_next`; mlx-lm `models/qwen3_next.py`, checked by the
//! reference logits in `tests/fixtures`.

use mlx_rs::Array;
use mlx_rs::ops::concatenate;
use serde::Deserialize;
use serde_json::Value;

use super::{Model, Weights, qwen3_5};
use crate::error::Result;

/// The keys of `config.json` that define the order of rows; `qwen3_5.rs` reads the others.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    num_hidden_layers: usize,
    linear_num_key_heads: i32,
    linear_num_value_heads: i32,
    linear_key_head_dim: i32,
    linear_value_head_dim: i32,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    sanitize(&weights.config(config)?, weights)?;
    qwen3_5::load(config, weights)
}

fn sanitize(config: &Config, weights: &mut Weights) -> Result<()> {
    let heads = config.linear_num_key_heads;
    let per_head = config.linear_num_value_heads / heads;
    let (keys, values) = (config.linear_key_head_dim, per_head * config.linear_value_head_dim);
    for i in 0..config.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.linear_attn.{name}");
        let (qkvz, ba) = (at("in_proj_qkvz"), at("in_proj_ba"));
        if weights.has(&format!("{qkvz}.weight")) {
            weights.divide(&qkvz, &[at("in_proj_qkv"), at("in_proj_z")], |rows| {
                let ends = [keys, 2 * keys, 2 * keys + values];
                let [q, k, v, z] = ungroup(rows, heads, ends)?;
                Ok([concatenate(&[q, k, v], 0)?, z])
            })?;
            weights.divide(&ba, &[at("in_proj_b"), at("in_proj_a")], |rows| {
                ungroup(rows, heads, [per_head])
            })?;
        }
    }
    Ok(())
}

/// Splits rows [heads * (n_0 + n_1 + ..), W], grouped by head, into N arrays [heads * n_i, W].
/// `ends` holds the ends of a head's parts, except the last one.
fn ungroup<const ENDS: usize, const N: usize>(
    rows: &Array,
    heads: i32,
    ends: [i32; ENDS],
) -> Result<[Array; N]> {
    let width = rows.dim(1);
    let parts = rows.reshape(&[heads, -1, width])?.split_at_indices(&ends, 1)?;
    let flat: Vec<Array> = parts
        .iter()
        .map(|part| part.reshape(&[-1, width]))
        .collect::<std::result::Result<_, _>>()?;
    Ok(flat.try_into().expect("one more part than ends"))
}
