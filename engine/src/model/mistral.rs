//! Mistral, Ministral 3, and the language part of Mistral Small 3.1 and other `mistral3`
//! checkpoints: Llama with windows, or with queries that grow with their position.
//!
//! Source: arXiv:2310.06825; `transformers` `models/mistral`, `models/ministral3`; mlx-lm
//! `models/ministral3.py` and `models/mistral3.py`, checked by the reference logits in
//! `tests/fixtures`.

use serde::Deserialize;
use serde_json::Value;

use super::llama::{self, AttentionConfig, Growth, Llama, PRE_NORM, ROPE_THETA, dense_mlp};
use super::{Model, Weights};
use crate::error::Result;

/// `config.json`, or its `text_config` in multimodal checkpoints.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    /// Some multimodal checkpoints leave it out of their `text_config`.
    #[serde(default = "default_type")]
    model_type: String,
    #[serde(flatten)]
    llama: llama::Config,
}

fn default_type() -> String {
    "mistral".into()
}

impl Config {
    /// The window of `layer`; `None` for full attention. Mistral 7B has windows on all layers;
    /// later models set `sliding_window` to `null` or list the layers.
    fn window(&self, layer: usize) -> Option<i32> {
        match self.llama.layer_types {
            Some(_) => self.llama.window(layer),
            None => self.llama.sliding_window,
        }
    }

    fn growth(&self) -> Option<Growth> {
        let rope = &self.llama.rope;
        let beta = rope.parameters().and_then(|parameters| parameters.llama_4_scaling_beta)?;
        Some(Growth { beta, trained: rope.trained() as f32 })
    }
}

/// The model types that a `text_config` can have.
const TEXT: [&str; 2] = ["mistral", "ministral3"];

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config.get("text_config").unwrap_or(config))?;
    if !TEXT.contains(&config.model_type.as_str()) {
        let problem = format!(
            "text_config.model_type `{}` is not supported; supported are: {}",
            config.model_type,
            TEXT.join(", ")
        );
        return Err(weights.problem("config.json", problem));
    }
    weights.keep_language_model();
    let whole = AttentionConfig { growth: config.growth(), ..config.llama.attention(ROPE_THETA) };
    let attention = |layer| AttentionConfig { window: config.window(layer), ..whole.clone() };
    Ok(Box::new(Llama::load(&config.llama, weights, PRE_NORM, attention, dense_mlp)?))
}
