//! Command R7B and Command A (Cohere 2): attention and feed-forward block read the same norm, three of four
//! layers have a window and positions, the others neither.
//!
//! Inside a layer the hidden states are followed by their norm, [1, R, 2 D], for the block that comes second.
//!
//! Source: arXiv:2504.00698; `transformers` `models/cohere2`; mlx-lm `models/cohere2.py`, checked by the
//! reference logits in `tests/fixtures`.

use mlx_rs::Array;
use mlx_rs::ops::concatenate;
use serde::Deserialize;
use serde_json::Value;

use super::llama::{self, AttentionConfig, SelfAttn};
use super::{Model, Weights};
use crate::cache::{Cache, Span};
use crate::error::Result;
use crate::nn::{Embedding, Gate, GatedMlp, LayerNorm, Linear, scaled};

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    llama: llama::Config,
    logit_scale: Option<f32>,
    /// Every `n`th layer uses full attention if there are no `layer_types`.
    #[serde(default = "default_pattern")]
    sliding_window_pattern: usize,
}

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 50_000.0;

/// Factor of the logits if the config does not give one.
const LOGIT_SCALE: f32 = 0.0625;

fn default_pattern() -> usize {
    4
}

impl Config {
    /// The window of `layer`; `None` for full attention.
    fn window(&self, layer: usize) -> Option<i32> {
        match self.llama.layer_types {
            Some(_) => self.llama.window(layer),
            None => self
                .llama
                .sliding_window
                .filter(|_| !(layer + 1).is_multiple_of(self.sliding_window_pattern)),
        }
    }
}

struct Cohere2 {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: LayerNorm,
    /// The embeddings.
    lm_head: Linear,
    logit_scale: f32,
}

/// `x + self_attn(norm x) + mlp(norm x)`
struct Layer {
    input_layernorm: LayerNorm,
    self_attn: SelfAttn,
    mlp: GatedMlp,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let mut config = config.clone();
    // The epsilon of layer normalisation, under the name of the other families.
    if let Some(eps) = config.get("layer_norm_eps").cloned() {
        config["rms_norm_eps"] = eps;
    }
    let mut config: Config = weights.config(&config)?;
    config.llama.rope.rope_traditional = true;
    let whole = config.llama.attention(ROPE_THETA);
    let eps = config.llama.rms_norm_eps;
    let norm = |weights: &mut Weights, name: &str| -> Result<LayerNorm> {
        Ok(LayerNorm { weight: weights.norm(name, eps)?.weight, eps })
    };
    let mut layers = Vec::with_capacity(config.llama.num_hidden_layers);
    for i in 0..config.llama.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        let window = config.window(i);
        let rope = whole.rope.clone().filter(|_| window.is_some());
        let attention = AttentionConfig { window, rope, ..whole.clone() };
        layers.push(Layer {
            input_layernorm: norm(weights, &at("input_layernorm"))?,
            self_attn: SelfAttn::load(weights, &at("self_attn"), attention)?,
            mlp: weights.gated_mlp(&at("mlp"), Gate::Silu)?,
        });
    }
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    Ok(Box::new(Cohere2 {
        lm_head: weights.lm_head(&embed_tokens, true)?,
        embed_tokens,
        layers,
        norm: norm(weights, "model.norm")?,
        logit_scale: config.logit_scale.unwrap_or(LOGIT_SCALE),
    }))
}

impl Model for Cohere2 {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn new_cache(&self) -> Result<Cache> {
        Ok(Cache::new(self.layers.iter().map(|layer| layer.self_attn.new_cache()).collect()))
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        self.embed_tokens.forward(tokens)
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let Layer { input_layernorm, self_attn, .. } = &self.layers[layer];
        let normed = input_layernorm.forward(x)?;
        let x = x.add(self_attn.forward(&normed, spans, layer)?)?;
        Ok(concatenate(&[x, normed], -1)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let parts = x.split_equal(2, -1)?;
        let y = parts[0].add(self.layers[layer].mlp.forward(&parts[1])?)?;
        Ok(concatenate(&[&y, &parts[1]], -1)?)
    }

    fn end_layer(&self, _layer: usize, x: Array, _inputs: Option<&Array>) -> Result<Array> {
        Ok(x.split_equal(2, -1)?.swap_remove(0))
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.norm.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        scaled(&self.lm_head.forward(hidden)?, self.logit_scale)
    }
}
