//! Phi-3, Phi-4 and Phi-4-mini: Llama with queries, keys and values in one matrix, gate and up in another,
//! and frequencies stretched pair by pair.
//!
//! Loading divides the fused matrices, dense or packed: rows are quantized separately.
//!
//! # Why
//! `transformers` chooses the stretch by the length of each prompt, so that the same position has different
//! keys in a short and in a long one. Saved state could not be shared. mlx-lm, vLLM and this file use the
//! factors of long contexts wherever the context was extended. mlx-lm ignores `sliding_window`; this file
//! follows it, like `transformers`.
//!
//! Source: arXiv:2404.14219, arXiv:2412.08905; `transformers` `models/phi3`; mlx-lm `models/phi3.py`,
//! checked by the reference logits in `tests/fixtures`.

use std::ops::Range;

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use serde_json::Value;

use super::llama::{AttentionConfig, Config, Llama, PRE_NORM, ROPE_THETA, dense_mlp};
use super::{Model, Weights};
use crate::error::Result;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    let whole = AttentionConfig { window: window(&config), ..config.attention(ROPE_THETA) };
    let (queries, keys) = (whole.heads * whole.head_dim, whole.kv_heads * whole.head_dim);
    for i in 0..config.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        let parts = ["q_proj", "k_proj", "v_proj"].map(|name| at(&format!("self_attn.{name}")));
        weights.divide(&at("self_attn.qkv_proj"), &parts, |rows| {
            let ends = [queries, queries + keys];
            Ok([
                part(rows, 0..ends[0])?,
                part(rows, ends[0]..ends[1])?,
                part(rows, ends[1]..rows.dim(0))?,
            ])
        })?;
        let parts = ["gate_proj", "up_proj"].map(|name| at(&format!("mlp.{name}")));
        weights.divide(&at("mlp.gate_up_proj"), &parts, |rows| {
            let half = rows.dim(0) / 2;
            Ok([part(rows, 0..half)?, part(rows, half..2 * half)?])
        })?;
    }
    Ok(Box::new(Llama::load(&config, weights, PRE_NORM, |_| whole.clone(), dense_mlp)?))
}

/// The window of all layers. Phi-3 128k declares one that is longer than its context.
fn window(config: &Config) -> Option<i32> {
    let context = config.rope.max_position_embeddings.unwrap_or(f64::INFINITY);
    config.sliding_window.filter(|&window| f64::from(window) < context)
}

/// Rows of a matrix. A view would be copied in each product.
fn part(matrix: &Array, rows: Range<i32>) -> Result<Array> {
    Ok(matrix.try_index(rows)?.contiguous()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The reference ignores windows here, so this tests the rule of `transformers`.
    #[test]
    fn windows_within_the_context_apply_to_all_layers() {
        let check = |sliding_window: Value, expected: Option<i32>| {
            let config: Config = serde_json::from_value(json!({
                "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
                "sliding_window": sliding_window,
            }))
            .unwrap();
            assert_eq!(window(&config), expected);
        };
        check(json!(2047), Some(2047));
        check(json!(262_144), None);
        check(json!(null), None);
    }
}
