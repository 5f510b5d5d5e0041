//! MiniMax M2: Llama with norms of the queries and keys of all heads together, partly rotated heads, and
//! experts chosen by sigmoids.
//!
//! Source: `transformers` `models/minimax_m2`; mlx-lm `models/minimax.py`, checked by the reference logits in
//! `tests/fixtures`.

use serde::Deserialize;
use serde_json::Value;

use super::experts::SparseLlama;
use super::llama::{Llama, PRE_NORM};
use super::{Model, Weights, mixtral};
use crate::error::Result;

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    sparse: SparseLlama,
    /// Rotated dimensions of a head, where there is no `partial_rotary_factor`.
    rotary_dim: Option<i32>,
}

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 5_000_000.0;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let Config { sparse, rotary_dim } = weights.config(config)?;
    let SparseLlama { mut llama, experts } = sparse;
    mixtral::rename_experts(weights);
    let head_dim = llama.attention(ROPE_THETA).head_dim;
    if let Some(dims) = rotary_dim {
        llama.rope.partial_rotary_factor.get_or_insert(dims as f32 / head_dim as f32);
    }
    let whole = llama.attention(ROPE_THETA);
    let mlp = |weights: &mut Weights, at: &str| experts.load(weights, at, true);
    Ok(Box::new(Llama::load(&llama, weights, PRE_NORM, |_| whole.clone(), mlp)?))
}
