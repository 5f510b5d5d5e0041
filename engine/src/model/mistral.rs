//! Mistral, Ministral 3, and the language part of Mistral Small 3.1 and other `mistral3`
//! checkpoints: Llama with windows, or with queries that grow with their position.
//!
//! Source: arXiv:2310.06825; `transformers` `models/mistral`, `models/ministral3`; mlx-lm
//! `models/ministral3.py` and `models/mistral3.py`, checked by the reference logits in
//! `tests/fixtures`.

use serde::Deserialize;
use serde_json::Value;

use super::llama::{self, Growth, Layer, Llama, ROPE_THETA, SelfAttn};
use super::{Model, Weights, experts};
use crate::error::Result;
use crate::nn::Mlp;

/// `config.json`, or `text_config` of it in multimodal checkpoints.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    model_type: String,
    #[serde(flatten)]
    llama: llama::Config,
}

impl Config {
    /// Positions that a layer sees, where they are limited. Mistral 7B had windows on all layers;
    /// later models say `null`, or which layers.
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

/// What a `text_config` may be.
const TEXT: [&str; 2] = ["mistral", "ministral3"];

/// Builds the model.
pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config.get("text_config").unwrap_or(config))?;
    if !TEXT.contains(&config.model_type.as_str()) {
        let kind = &config.model_type;
        let problem =
            format!("text_config.model_type `{kind}` is not known; known are: {}", TEXT.join(", "));
        return Err(weights.problem("config.json", problem));
    }
    sanitize(weights);
    let llama = &config.llama;
    let rope = llama.rope.rope(llama.head_dim(), ROPE_THETA);
    Ok(Box::new(Llama::load(llama, weights, |weights, i| {
        let at = format!("model.layers.{i}");
        let mut attn = SelfAttn::load(llama, weights, &at, &rope, config.window(i))?;
        attn.growth = config.growth();
        let mlp = Mlp::Dense(experts::dense(weights, &format!("{at}.mlp"))?);
        Layer::load(llama, weights, &at, attn, mlp)
    })?))
}

/// Drops what sees, and brings the rest to `model.*` and `lm_head.*`.
fn sanitize(weights: &mut Weights) {
    weights.rename(|name| {
        if name.contains("vision_tower") || name.contains("multi_modal_projector") {
            return None;
        }
        let name = name.strip_prefix("language_model.").unwrap_or(name);
        Some(match name.strip_prefix("model.language_model.") {
            Some(rest) => format!("model.{rest}"),
            None => name.to_string(),
        })
    });
}
