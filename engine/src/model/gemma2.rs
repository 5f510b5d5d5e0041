//! Gemma 2: every other layer looks no further back than a window, norms stand on both sides of
//! attention and feed-forward block, and the scores of both attention and head are capped.
//!
//! Reads checkpoints as Hugging Face publishes them and as MLX converts them: names and (1 + w)
//! norms are the same in both.
//!
//! # Why
//! mlx-lm lets every layer look at everything, which differs from the model as it was trained once
//! a context is longer than the window. This file follows `transformers`.
//!
//! Source: arXiv:2408.00118; `transformers` `models/gemma2`; mlx-lm `models/gemma2.py`, checked by
//! the reference logits in `tests/fixtures`, for which that file's masks are put right.

use mlx_rs::Array;
use serde::Deserialize;
use serde_json::Value;

use super::{Model, Pass, Weights};
use crate::cache::{Cache, Full, LayerCache, Sliding, Span};
use crate::error::Result;
use crate::nn::{
    Embedding, GeGlu, Linear, RmsNorm, Rope, RopeConfig, Scores, attention, by_span, scaled,
    softcap,
};

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
    /// The attention's scale is this to the power of -0.5, which need not be the head's size.
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

/// Base of the frequencies where the config does not give one.
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
}

struct Gemma2 {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// What embeddings are multiplied with: the square root of their size.
    embed_scale: f32,
    final_logit_softcapping: Option<f32>,
}

struct Layer {
    input_layernorm: RmsNorm,
    self_attn: SelfAttn,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: GeGlu,
    post_feedforward_layernorm: RmsNorm,
}

/// Builds the model.
pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    sanitize(weights)?;
    let eps = config.rms_norm_eps;
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for i in 0..config.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        layers.push(Layer {
            input_layernorm: weights.norm(&at("input_layernorm"), eps)?,
            self_attn: SelfAttn::load(&config, weights, i)?,
            post_attention_layernorm: weights.norm(&at("post_attention_layernorm"), eps)?,
            pre_feedforward_layernorm: weights.norm(&at("pre_feedforward_layernorm"), eps)?,
            mlp: GeGlu {
                gate_proj: weights.linear(&at("mlp.gate_proj"))?,
                up_proj: weights.linear(&at("mlp.up_proj"))?,
                down_proj: weights.linear(&at("mlp.down_proj"))?,
            },
            post_feedforward_layernorm: weights.norm(&at("post_feedforward_layernorm"), eps)?,
        });
    }
    Ok(Box::new(Gemma2 {
        embed_tokens: Embedding(weights.linear("model.embed_tokens")?),
        layers,
        norm: weights.norm("model.norm", eps)?,
        embed_scale: (config.hidden_size as f32).sqrt(),
        final_logit_softcapping: config.final_logit_softcapping,
    }))
}

/// Makes plain factors of the (1 + w) norms.
fn sanitize(weights: &mut Weights) -> Result<()> {
    let dtype = weights.dtype();
    weights.map(|name, array| {
        if name.ends_with("norm.weight") {
            // After the cast: the reference adds 1 at run time, in the type it computes with.
            return Ok(array.as_dtype(dtype)?.add(Array::from_f32(1.0).as_dtype(dtype)?)?);
        }
        Ok(array)
    })
}

impl Model for Gemma2 {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers.iter().map(|layer| {
            let attn = &layer.self_attn;
            match attn.window {
                Some(window) => {
                    LayerCache::Sliding(Sliding::new(attn.kv_heads, attn.head_dim, window))
                }
                None => LayerCache::Full(Full::new(attn.kv_heads, attn.head_dim)),
            }
        });
        Ok(Cache::new(layers.collect()))
    }

    fn forward(&self, tokens: &Array, spans: &mut [Span<'_>], pass: Pass<'_>) -> Result<Array> {
        let mut x = scaled(&self.embed_tokens.forward(tokens)?, self.embed_scale)?;
        for (i, layer) in self.layers.iter().enumerate().take(pass.layers(self.depth())) {
            let y = layer.self_attn.forward(&layer.input_layernorm.forward(&x)?, spans, i)?;
            x = x.add(layer.post_attention_layernorm.forward(&y)?)?;
            if pass.skips(i) {
                continue;
            }
            let y = layer.mlp.forward(&layer.pre_feedforward_layernorm.forward(&x)?)?;
            x = x.add(layer.post_feedforward_layernorm.forward(&y)?)?;
        }
        for span in spans {
            span.cache.position += span.rows as usize;
        }
        self.norm.forward(&x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let logits = self.embed_tokens.as_linear(hidden)?;
        match self.final_logit_softcapping {
            Some(cap) => softcap(&logits, cap),
            None => Ok(logits),
        }
    }
}

struct SelfAttn {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    rope: Rope,
    scores: Scores,
    /// Positions that one position sees; `None` for all.
    window: Option<i32>,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
}

impl SelfAttn {
    fn load(config: &Config, weights: &mut Weights, layer: usize) -> Result<Self> {
        let mut linear =
            |name: &str| weights.linear(&format!("model.layers.{layer}.self_attn.{name}"));
        Ok(Self {
            q_proj: linear("q_proj")?,
            k_proj: linear("k_proj")?,
            v_proj: linear("v_proj")?,
            o_proj: linear("o_proj")?,
            rope: config.rope.rope(config.head_dim, ROPE_THETA),
            scores: Scores {
                scale: config.query_pre_attn_scalar.powf(-0.5),
                softcap: config.attn_logit_softcapping,
            },
            window: config.is_sliding(layer).then_some(config.sliding_window),
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
        })
    }

    fn forward(&self, x: &Array, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        let rows = x.dim(1);
        let (h, h_kv, d) = (self.heads, self.kv_heads, self.head_dim);
        let q = self.q_proj.forward(x)?.reshape(&[1, rows, h, d])?;
        let k = self.k_proj.forward(x)?.reshape(&[1, rows, h_kv, d])?;
        let v = self.v_proj.forward(x)?.reshape(&[1, rows, h_kv, d])?;
        let mixed = by_span([q, k, v], spans, |[q, k, v], span| {
            let offset = span.offset();
            let q = self.rope.forward(&q.swap_axes(1, 2)?, offset)?;
            let k = self.rope.forward(&k.swap_axes(1, 2)?, offset)?;
            let v = v.swap_axes(1, 2)?;
            let y = attention(&q, &k, &v, self.scores, &mut span.cache.layers[layer])?;
            Ok(y.swap_axes(1, 2)?.reshape(&[1, span.rows, h * d])?)
        })?;
        self.o_proj.forward(&mixed)
    }
}
