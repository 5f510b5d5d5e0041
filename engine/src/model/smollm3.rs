//! SmolLM3: Llama, whose every fourth layer does not know positions.
//!
//! Source: `transformers` `models/smollm3`; mlx-lm `models/smollm3.py`, checked by the reference logits in
//! `tests/fixtures`.

use serde::Deserialize;
use serde_json::Value;

use super::llama::{AttentionConfig, Llama, PRE_NORM, dense_mlp};
use super::{Model, Weights, qwen2};
use crate::error::Result;

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    dense: qwen2::Config,
    /// 0 for layers without positions, despite its name.
    no_rope_layers: Option<Vec<u8>>,
    /// Every `n`th layer knows no positions if there are no `no_rope_layers`.
    #[serde(default = "default_interval")]
    no_rope_layer_interval: usize,
}

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 2_000_000.0;

fn default_interval() -> usize {
    4
}

impl Config {
    fn has_rope(&self, layer: usize) -> bool {
        match self.no_rope_layers.as_ref().and_then(|layers| layers.get(layer)) {
            Some(&rope) => rope != 0,
            None => !(layer + 1).is_multiple_of(self.no_rope_layer_interval),
        }
    }
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    let whole = config.dense.llama.attention(ROPE_THETA);
    let attention = |layer| AttentionConfig {
        rope: whole.rope.clone().filter(|_| config.has_rope(layer)),
        window: config.dense.window(layer),
        ..whole.clone()
    };
    Ok(Box::new(Llama::load(&config.dense.llama, weights, PRE_NORM, attention, dense_mlp)?))
}
