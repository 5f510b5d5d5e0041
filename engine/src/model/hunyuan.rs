//! Hunyuan, dense: Llama with norms of each head's queries and keys after their rotation.
//!
//! Source: `transformers` `models/hunyuan_v1_dense`; mlx-lm `models/hunyuan_v1_dense.py`, checked by the
//! reference logits in `tests/fixtures`.

use serde_json::Value;

use super::llama::{AttentionConfig, Config, Llama, PRE_NORM, ROPE_THETA, dense_mlp};
use super::{Model, Weights};
use crate::error::Result;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    weights.rename(|name| {
        let name = name.replace(".query_layernorm.", ".q_norm.");
        Some(name.replace(".key_layernorm.", ".k_norm."))
    });
    let whole = AttentionConfig { norm_after_rope: true, ..config.attention(ROPE_THETA) };
    Ok(Box::new(Llama::load(&config, weights, PRE_NORM, |_| whole.clone(), dense_mlp)?))
}
