//! Qwen3, dense and with experts: Llama with norms of each head's queries and keys. Also Qwen2-MoE, which has
//! biases in their place and a shared expert, OLMoE, whose norms are of all heads together, and the text part
//! of Qwen3-VL, for whose three positions of text are equal.
//!
//! # Why
//! mlx-lm ignores `norm_topk_prob` in Qwen2-MoE, where `transformers` honours it, and so does this file.
//!
//! Source: arXiv:2505.09388, arXiv:2407.10671; `transformers` `models/qwen3`, `models/qwen3_moe`,
//! `models/qwen2_moe`, `models/olmoe`, `models/qwen3_vl` and `models/qwen3_vl_moe`; mlx-lm files of these names, checked
//! by the reference logits in `tests/fixtures`.

use serde::Deserialize;
use serde_json::Value;

use super::llama::{AttentionConfig, Llama, PRE_NORM};
use super::qwen2::{self, ROPE_THETA};
use super::{Model, Weights, experts};
use crate::error::Result;

/// `config.json`, or its `text_config` in multimodal checkpoints.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    dense: qwen2::Config,
    #[serde(flatten)]
    experts: experts::Config,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let text = config.get("text_config").unwrap_or(config);
    let Config { dense, experts } = weights.config(text)?;
    weights.keep_language_model();
    let whole = dense.llama.attention(ROPE_THETA);
    let attention = |layer| AttentionConfig { window: dense.window(layer), ..whole.clone() };
    // `norm_topk_prob` is false by default in `transformers`.
    let mlp = |weights: &mut Weights, at: &str| experts.load(weights, at, false);
    Ok(Box::new(Llama::load(&dense.llama, weights, PRE_NORM, attention, mlp)?))
}

/// Qwen3-VL with experts: published with the matrices of the experts transposed.
pub(super) fn load_vl_moe(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    weights.map(|name, array| {
        let fused = [".experts.gate_up_proj", ".experts.down_proj"];
        if fused.iter().any(|part| name.ends_with(part)) {
            return Ok(Some(array.swap_axes(-1, -2)?.contiguous()?));
        }
        Ok(None)
    })?;
    load(config, weights)
}
