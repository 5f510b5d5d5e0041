//! gpt-oss: Llama's blocks with attention sinks, biases, windows in every other layer, and experts of
//! clamped SwiGLU, whose weights are published in MXFP4.
//!
//! Reads the published checkpoints (`experts.gate_up_proj_blocks`, with the rows of gate and up in turn)
//! and those of MLX's converter (`experts.gate_proj.weight`).
//!
//! # Why
//! mlx-lm rounds the ends of YaRN's ramp to whole dimensions, also where the config says
//! `truncate: false`, as gpt-oss does. This file follows the config, like `transformers`.
//!
//! Source: OpenAI's "gpt-oss-120b & gpt-oss-20b Model Card"; `transformers` `models/gpt_oss`; mlx-lm
//! `models/gpt_oss.py`, checked by the reference logits in `tests/fixtures`.

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::llama::{self, AttentionConfig, Llama, PRE_NORM};
use super::{Model, Weights};
use crate::error::Result;
use crate::nn::{Experts, Gate, Mlp, Moe, SWIGLU_LIMIT};

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    llama: llama::Config,
    num_experts: usize,
    num_experts_per_tok: i32,
    #[serde(default = "default_limit")]
    swiglu_limit: f32,
}

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 150_000.0;

fn default_limit() -> f32 {
    SWIGLU_LIMIT
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    if config.swiglu_limit != SWIGLU_LIMIT {
        let problem =
            format!("swiglu_limit {} is not supported, only {SWIGLU_LIMIT}", config.swiglu_limit);
        return Err(weights.problem("config.json", problem));
    }
    let llama = &config.llama;
    let window = |layer: usize| match llama.layer_types {
        Some(_) => llama.window(layer),
        None => llama.sliding_window.filter(|_| layer.is_multiple_of(2)),
    };
    let count = i32::try_from(config.num_experts).unwrap_or(i32::MAX);
    let mlp = |weights: &mut Weights, at: &str| {
        divide_fused(weights, &format!("{at}.experts"))?;
        Ok(Mlp::Sparse(Box::new(Moe {
            gate: weights.linear_to(&format!("{at}.router"), count)?,
            experts: Experts(
                weights
                    .gated_experts(&format!("{at}.experts"), Gate::ClampedSilu, config.num_experts)?
                    .into(),
            ),
            top_k: config.num_experts_per_tok,
            // The softmax over the chosen experts alone.
            norm_topk_prob: true,
            scale: 1.0,
            groups: None,
            shared: None,
            ranks: weights.ranks().clone(),
        })))
    };
    let whole = llama.attention(ROPE_THETA);
    let attention = |layer| AttentionConfig { window: window(layer), ..whole.clone() };
    Ok(Box::new(Llama::load(llama, weights, PRE_NORM, attention, mlp)?))
}

/// Renames the published tensors of the experts at `at`, and divides those of gate and up: `_blocks` [E,
/// 2 F, D / 32, 16] and `_scales` [E, 2 F, D / 32] (u8), `_bias` [E, 2 F].
fn divide_fused(weights: &mut Weights, at: &str) -> Result<()> {
    if !weights.has(&format!("{at}.gate_up_proj_blocks")) {
        return Ok(());
    }
    // Two 4-bit floats a byte, eight in each of MLX's words.
    let words = |blocks: Array| -> Result<Array> {
        let [e, rows, groups] = [blocks.dim(0), blocks.dim(1), blocks.dim(2)];
        Ok(blocks.view_dtype(Dtype::Uint32)?.reshape(&[e, rows, groups * 4])?)
    };
    for (part, published) in [("weight", "blocks"), ("scales", "scales"), ("bias", "bias")] {
        let mut take = |name: &str| -> Result<Array> {
            let name = format!("{at}.{name}_{published}");
            let array = weights.remove(&name)?;
            if part != "weight" {
                return Ok(array);
            }
            if array.ndim() != 4 || array.dim(3) != 16 {
                let shape = array.shape();
                let problem = format!("`{name}` has the shape {shape:?}, not that of blocks of 16");
                return Err(weights.problem("", problem));
            }
            words(array)
        };
        let (fused, down) = (take("gate_up_proj")?, take("down_proj")?);
        let mut shape = fused.shape().to_vec();
        shape.splice(1..2, [shape[1] / 2, 2]);
        let fused = fused.reshape(&shape)?;
        for (name, i) in [("gate_proj", 0), ("up_proj", 1)] {
            let half = fused.try_index((.., .., i))?.contiguous()?;
            weights.insert(format!("{at}.{name}.{part}"), half);
        }
        weights.insert(format!("{at}.down_proj.{part}"), down);
    }
    Ok(())
}
