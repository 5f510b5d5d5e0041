//! Qwen3, dense and with experts: Llama whose queries and keys are normalised head by head.
//!
//! Source: arXiv:2505.09388; `transformers` `models/qwen3` and `models/qwen3_moe`; mlx-lm
//! `models/qwen3.py` and `models/qwen3_moe.py`, checked by the reference logits in
//! `tests/fixtures`.

use serde::Deserialize;
use serde_json::Value;

use super::llama::{Layer, Llama, SelfAttn};
use super::qwen2::ROPE_THETA;
use super::{Model, Weights, experts, qwen2};
use crate::error::Result;

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    dense: qwen2::Config,
    #[serde(flatten)]
    experts: experts::Config,
}

/// Builds the model.
pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let Config { dense, experts } = weights.config(config)?;
    let llama = &dense.llama;
    let rope = llama.rope.rope(llama.head_dim(), ROPE_THETA);
    Ok(Box::new(Llama::load(llama, weights, |weights, i| {
        let at = format!("model.layers.{i}");
        let attn = SelfAttn::load(llama, weights, &at, &rope, dense.window(i))?;
        // Not scaled to 1 unless the config says so: the default of `transformers`.
        let mlp = experts.load(weights, &format!("{at}.mlp"), false)?;
        Layer::load(llama, weights, &at, attn, mlp)
    })?))
}
