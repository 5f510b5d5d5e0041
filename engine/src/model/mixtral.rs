//! Mixtral: Mistral with experts, whose chosen few share by the softmax of their scores.
//!
//! # Why
//! mlx-lm ignores `sliding_window`. This file follows the config, like `transformers`; published Mixtral
//! models set none.
//!
//! Source: arXiv:2401.04088; `transformers` `models/mixtral`; mlx-lm `models/mixtral.py`, checked by the
//! reference logits in `tests/fixtures`.

use serde_json::Value;

use super::experts::SparseLlama;
use super::llama::{AttentionConfig, Llama, PRE_NORM};
use super::{Model, Weights};
use crate::error::Result;

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 1_000_000.0;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let SparseLlama { llama, experts } = weights.config(config)?;
    rename_experts(weights);
    let window = llama.sliding_window;
    let whole = AttentionConfig { window, ..llama.attention(ROPE_THETA) };
    // The softmax of the chosen scores is the chosen part of the softmax of all, scaled to a sum of 1.
    let mlp = |weights: &mut Weights, at: &str| experts.load(weights, at, true);
    Ok(Box::new(Llama::load(&llama, weights, PRE_NORM, |_| whole.clone(), mlp)?))
}

/// Names experts as in other families.
pub(super) fn rename_experts(weights: &mut Weights) {
    weights.rename(|name| {
        let name = name.replace(".block_sparse_moe.", ".mlp.");
        let names = [(".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")];
        Some(names.iter().fold(name, |name, (published, ours)| name.replace(published, ours)))
    });
}
