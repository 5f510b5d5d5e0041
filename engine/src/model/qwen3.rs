//! Qwen3, dense and with experts: Llama with norms of each head's queries and keys.
//!
//! Source: arXiv:2505.09388; `transformers` `models/qwen3` and `models/qwen3_moe`; mlx-lm
//! `models/qwen3.py` and `models/qwen3_moe.py`, checked by the reference logits in
//! `tests/fixtures`.

use serde::Deserialize;
use serde_json::Value;

use super::llama::Llama;
use super::qwen2::{self, ROPE_THETA};
use super::{Model, Weights, experts};
use crate::error::Result;

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    dense: qwen2::Config,
    #[serde(flatten)]
    experts: experts::Config,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let Config { dense, experts } = weights.config(config)?;
    let attention = dense.llama.attention(ROPE_THETA);
    let window = |layer| dense.window(layer);
    // `norm_topk_prob` is false by default in `transformers`.
    let mlp = |weights: &mut Weights, at: &str| experts.load(weights, at, false);
    Ok(Box::new(Llama::load(&dense.llama, weights, &attention, window, mlp)?))
}
