//! GLM-4.5 to 4.7: Llama with biases, partly rotated heads, and experts chosen by sigmoids, beside one for all
//! rows. The first layers are dense, which the checkpoint shows.
//!
//! Its multi-token-prediction layers are not read.
//!
//! Source: arXiv:2508.06471; `transformers` `models/glm4_moe`; mlx-lm `models/glm4_moe.py`, checked by the
//! reference logits in `tests/fixtures`.

use serde_json::Value;

use super::experts::SparseLlama;
use super::llama::{Llama, PRE_NORM};
use super::{Model, Weights};
use crate::error::Result;

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 1_000_000.0;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let SparseLlama { llama, experts } = weights.config(config)?;
    let whole = llama.attention(ROPE_THETA);
    let mlp = |weights: &mut Weights, at: &str| experts.load(weights, at, true);
    Ok(Box::new(Llama::load(&llama, weights, PRE_NORM, |_| whole.clone(), mlp)?))
}
