//! ERNIE 4.5, dense: Llama whose neighbouring dimensions rotate together.
//!
//! Source: `transformers` `models/ernie4_5`; mlx-lm `models/ernie4_5.py`, checked by the reference logits in
//! `tests/fixtures`.

use serde_json::Value;

use super::llama::{Config, Llama, PRE_NORM, dense_mlp};
use super::{Model, Weights};
use crate::error::Result;

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 500_000.0;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let mut config: Config = weights.config(config)?;
    config.rope.rope_traditional = true;
    let whole = config.attention(ROPE_THETA);
    Ok(Box::new(Llama::load(&config, weights, PRE_NORM, |_| whole.clone(), dense_mlp)?))
}
