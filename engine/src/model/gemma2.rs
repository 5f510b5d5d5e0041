//! Gemma 2: every other layer has a sliding window, norms surround attention and feed-forward
//! block, and the scores of attention and head are capped. [`Gemma`] also runs Gemma 3.
//!
//! Reads checkpoints of Hugging Face and of MLX's converter: names and (1 + w) norms are equal in
//! both.
//!
//! # Why
//! mlx-lm gives every layer full attention, which differs from the trained model once a context is
//! longer than the window. This file follows `transformers`.
//!
//! Source: arXiv:2408.00118; `transformers` `models/gemma2`; mlx-lm `models/gemma2.py`, checked by
//! the reference logits in `tests/fixtures`, which are made with corrected masks.

use mlx_rs::ops::clip;
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::llama::{AttentionConfig, SelfAttn};
use super::{Model, Weights};
use crate::cache::{Cache, Span};
use crate::error::Result;
use crate::nn::{Embedding, Gate, GatedMlp, Linear, RmsNorm, RopeConfig, Scores, scaled, softcap};

/// `config.json`. Defaults are those of `transformers`.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: usize,
    num_attention_heads: i32,
    num_key_value_heads: i32,
    head_dim: i32,
    rms_norm_eps: f32,
    #[serde(flatten)]
    rope: RopeConfig,
    /// Attention's scale is this to the power of -0.5. It may differ from `head_dim`.
    query_pre_attn_scalar: f32,
    #[serde(default = "default_attn_softcap")]
    attn_logit_softcapping: Option<f32>,
    #[serde(default = "default_final_softcap")]
    final_logit_softcapping: Option<f32>,
    #[serde(default = "default_window")]
    sliding_window: i32,
    #[serde(default)]
    layer_types: Vec<String>,
}

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 10_000.0;

fn default_attn_softcap() -> Option<f32> {
    Some(50.0)
}

fn default_final_softcap() -> Option<f32> {
    Some(30.0)
}

fn default_window() -> i32 {
    4096
}

impl Config {
    fn is_sliding(&self, layer: usize) -> bool {
        match self.layer_types.get(layer) {
            Some(kind) => kind == "sliding_attention",
            None => layer.is_multiple_of(2),
        }
    }

    fn attention(&self, layer: usize) -> AttentionConfig {
        AttentionConfig {
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            eps: self.rms_norm_eps,
            rope: Some(self.rope.rope(self.head_dim, ROPE_THETA)),
            norm_after_rope: false,
            growth: None,
            scores: Scores {
                scale: self.query_pre_attn_scalar.powf(-0.5),
                softcap: self.attn_logit_softcapping,
                sinks: None,
            },
            window: self.is_sliding(layer).then_some(self.sliding_window),
        }
    }
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    plain_norms(weights)?;
    let eps = config.rms_norm_eps;
    let attention = |layer| config.attention(layer);
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    Ok(Box::new(Gemma {
        layers: Layer::load_all(weights, config.num_hidden_layers, eps, attention)?,
        norm: weights.norm("model.norm", eps)?,
        lm_head: weights.lm_head(&embed_tokens, true)?,
        embed_tokens,
        embed_scale: (config.hidden_size as f32).sqrt(),
        final_logit_softcapping: config.final_logit_softcapping,
        context: None,
    }))
}

/// Turns the (1 + w) norms of Gemma 2 and 3 into plain factors.
pub(super) fn plain_norms(weights: &mut Weights) -> Result<()> {
    let dtype = weights.dtype();
    weights.map(|name, array| {
        if name.ends_with("norm.weight") {
            // After the cast: the reference adds 1 at run time, in the type it computes with.
            let one = Array::from_f32(1.0).as_dtype(dtype)?;
            return Ok(Some(array.as_dtype(dtype)?.add(one)?));
        }
        Ok(None)
    })
}

/// A decoder of blocks with norms on both sides, of Gemma 2 and 3.
pub(super) struct Gemma {
    pub embed_tokens: Embedding,
    pub layers: Vec<Layer>,
    pub norm: RmsNorm,
    pub lm_head: Linear,
    /// Factor of the embeddings: the square root of their dimension.
    pub embed_scale: f32,
    pub final_logit_softcapping: Option<f32>,
    /// Trained context, in families that may omit it in `config.json`.
    pub context: Option<u64>,
}

/// `x + norm(self_attn(norm x))`, then `x + norm(mlp(norm x))`.
pub(super) struct Layer {
    input_layernorm: RmsNorm,
    self_attn: SelfAttn,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: GatedMlp,
    post_feedforward_layernorm: RmsNorm,
}

impl Layer {
    pub fn load_all(
        weights: &mut Weights,
        layers: usize,
        eps: f32,
        attention: impl Fn(usize) -> AttentionConfig,
    ) -> Result<Vec<Self>> {
        let layer = |i| {
            let at = |name: &str| format!("model.layers.{i}.{name}");
            Ok(Self {
                input_layernorm: weights.norm(&at("input_layernorm"), eps)?,
                self_attn: SelfAttn::load(weights, &at("self_attn"), attention(i))?,
                post_attention_layernorm: weights.norm(&at("post_attention_layernorm"), eps)?,
                pre_feedforward_layernorm: weights.norm(&at("pre_feedforward_layernorm"), eps)?,
                mlp: weights.gated_mlp(&at("mlp"), Gate::Gelu)?,
                post_feedforward_layernorm: weights.norm(&at("post_feedforward_layernorm"), eps)?,
            })
        };
        (0..layers).map(layer).collect()
    }
}

impl Model for Gemma {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn context(&self) -> Option<u64> {
        self.context
    }

    fn new_cache(&self) -> Result<Cache> {
        Ok(Cache::new(self.layers.iter().map(|layer| layer.self_attn.new_cache()).collect()))
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        scaled(&self.embed_tokens.forward(tokens)?, self.embed_scale)
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let Layer { input_layernorm, self_attn, post_attention_layernorm, .. } =
            &self.layers[layer];
        let y = self_attn.forward(&input_layernorm.forward(x)?, spans, layer)?;
        add(x, &post_attention_layernorm.forward(&y)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let Layer { pre_feedforward_layernorm, mlp, post_feedforward_layernorm, .. } =
            &self.layers[layer];
        let y = mlp.forward(&pre_feedforward_layernorm.forward(x)?)?;
        add(x, &post_feedforward_layernorm.forward(&y)?)
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.norm.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let logits = self.lm_head.forward(hidden)?;
        match self.final_logit_softcapping {
            Some(cap) => softcap(&logits, cap),
            None => Ok(logits),
        }
    }
}

/// `x + y`, clipped in f16, which Gemma 3's hidden states overflow.
fn add(x: &Array, y: &Array) -> Result<Array> {
    const LARGEST_F16: f32 = 65_504.0;
    if x.dtype() != Dtype::Float16 {
        return Ok(x.add(y)?);
    }
    let sum = x.as_dtype(Dtype::Float32)?.add(y.as_dtype(Dtype::Float32)?)?;
    Ok(clip(&sum, (-LARGEST_F16, LARGEST_F16))?.as_dtype(Dtype::Float16)?)
}
