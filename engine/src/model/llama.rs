//! Llama 1 to 3.3 and models built like it (SmolLM2, TinyLlama, Yi ...): pre-norm blocks of
//! grouped-query attention and SwiGLU.
//!
//! [`Llama`] also runs the families that deviate little: `mistral.rs` (windows), `qwen2.rs`
//! (biases), `qwen3.rs` (norms of queries and keys, experts), `gpt_oss.rs` (sinks, experts).
//! [`SelfAttn`] serves Gemma 2 and 3 as well.
//!
//! Source: arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783; `transformers` `models/llama`;
//! mlx-lm `models/llama.py`, checked by the reference logits in `tests/fixtures`.

use mlx_rs::ops::{arange, floor, log1p};
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{Model, Weights};
use crate::cache::{Cache, LayerCache, Span};
use crate::error::Result;
use crate::nn::{
    Embedding, Joined, Linear, Mlp, RmsNorm, Rope, RopeConfig, Scores, attention, by_span, swiglu,
};

/// The keys of `config.json` that these families share. `attention_bias` and `mlp_bias` are not
/// read: the checkpoint shows whether there are biases.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Config {
    pub hidden_size: i32,
    pub num_hidden_layers: usize,
    pub num_attention_heads: i32,
    /// Default: `num_attention_heads`.
    pub num_key_value_heads: Option<i32>,
    /// Default: `hidden_size / num_attention_heads`.
    pub head_dim: Option<i32>,
    pub rms_norm_eps: f32,
    #[serde(default)]
    pub tie_word_embeddings: bool,
    #[serde(flatten)]
    pub rope: RopeConfig,
    /// `sliding_attention` marks layers with a window.
    pub layer_types: Option<Vec<String>>,
    /// Positions in the window.
    pub sliding_window: Option<i32>,
}

impl Config {
    /// The window of `layer`; `None` for full attention.
    pub fn window(&self, layer: usize) -> Option<i32> {
        let kind = self.layer_types.as_ref().and_then(|kinds| kinds.get(layer));
        self.sliding_window.filter(|_| kind.is_some_and(|kind| kind == "sliding_attention"))
    }

    /// Attention of these families with full context; `theta` is the default base.
    pub fn attention(&self, theta: f32) -> AttentionConfig {
        let head_dim = self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads);
        AttentionConfig {
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim,
            eps: self.rms_norm_eps,
            rope: self.rope.rope(head_dim, theta),
            growth: None,
            scores: Scores { scale: (head_dim as f32).powf(-0.5), softcap: None, sinks: None },
            window: None,
        }
    }
}

/// Base of the rotary frequencies if the config does not give one.
pub(super) const ROPE_THETA: f32 = 10_000.0;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    let attention = config.attention(ROPE_THETA);
    let window = |layer| config.window(layer);
    Ok(Box::new(Llama::load(&config, weights, &attention, window, dense_mlp)?))
}

/// The feed-forward block at `at` of families without experts.
pub(super) fn dense_mlp(weights: &mut Weights, at: &str) -> Result<Mlp> {
    Ok(Mlp::Dense(weights.gated_mlp(at, swiglu)?))
}

/// A decoder of pre-norm blocks.
pub(super) struct Llama {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
}

/// `x + self_attn(norm x)`, then `x + mlp(norm x)`.
struct Layer {
    input_layernorm: RmsNorm,
    self_attn: SelfAttn,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl Llama {
    /// Layers share `attention` but for their `window`; `mlp` takes the feed-forward block at a
    /// name.
    pub fn load(
        config: &Config,
        weights: &mut Weights,
        attention: &AttentionConfig,
        window: impl Fn(usize) -> Option<i32>,
        mlp: impl Fn(&mut Weights, &str) -> Result<Mlp>,
    ) -> Result<Self> {
        let eps = config.rms_norm_eps;
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for i in 0..config.num_hidden_layers {
            let at = |name: &str| format!("model.layers.{i}.{name}");
            let attention = AttentionConfig { window: window(i), ..attention.clone() };
            layers.push(Layer {
                input_layernorm: weights.norm(&at("input_layernorm"), eps)?,
                self_attn: SelfAttn::load(weights, &at("self_attn"), attention)?,
                post_attention_layernorm: weights.norm(&at("post_attention_layernorm"), eps)?,
                mlp: mlp(weights, &at("mlp"))?,
            });
        }
        let embed_tokens = weights.embedding("model.embed_tokens")?;
        Ok(Self {
            layers,
            norm: weights.norm("model.norm", eps)?,
            lm_head: weights.lm_head(&embed_tokens, config.tie_word_embeddings)?,
            embed_tokens,
        })
    }
}

impl Model for Llama {
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
        Ok(x.add(self_attn.forward(&input_layernorm.forward(x)?, spans, layer)?)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let Layer { post_attention_layernorm, mlp, .. } = &self.layers[layer];
        Ok(x.add(mlp.forward(&post_attention_layernorm.forward(x)?)?)?)
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.norm.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        self.lm_head.forward(hidden)
    }
}

/// Shape and options of a layer's attention.
#[derive(Debug, Clone)]
pub(super) struct AttentionConfig {
    /// Size of the hidden states.
    pub hidden: i32,
    pub heads: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    /// Epsilon of the norms of queries and keys.
    pub eps: f32,
    pub rope: Rope,
    /// Growth of queries with their position.
    pub growth: Option<Growth>,
    pub scores: Scores,
    /// Positions in the window; `None` for full attention.
    pub window: Option<i32>,
}

/// Grouped-query attention (arXiv:2305.13245).
pub(super) struct SelfAttn {
    /// `q_proj`, `k_proj` and `v_proj`.
    qkv: Joined<3>,
    o_proj: Linear,
    /// Norms of each head's query and key, if the checkpoint has them (Qwen3, Gemma 3).
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    config: AttentionConfig,
}

/// Queries grow with the logarithm of their position, so that scores stay sharp in long contexts:
/// factor `1 + beta ln(1 + floor(position / trained))`.
///
/// Source: Llama 4 (`attn_temperature_tuning`), with Ministral 3's constants.
#[derive(Debug, Clone, Copy)]
pub(super) struct Growth {
    /// `llama_4_scaling_beta`
    pub beta: f32,
    /// `original_max_position_embeddings`
    pub trained: f32,
}

impl SelfAttn {
    /// Takes the layer at `at`, with norms of heads, biases and sinks if the checkpoint has them.
    pub fn load(weights: &mut Weights, at: &str, mut config: AttentionConfig) -> Result<Self> {
        let mut head_norm = |name: &str| {
            let name = format!("{at}.{name}");
            let present = weights.has(&format!("{name}.weight"));
            present.then(|| weights.norm(&name, config.eps)).transpose()
        };
        let (q_norm, k_norm) = (head_norm("q_norm")?, head_norm("k_norm")?);
        let AttentionConfig { hidden, heads, kv_heads, head_dim, .. } = config;
        let sinks = format!("{at}.sinks");
        if weights.has(&sinks) {
            config.scores.sinks = Some(weights.take(&sinks)?);
        }
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        Ok(Self {
            qkv: Joined::new([
                weights.linear_of(&format!("{at}.q_proj"), [queries, hidden])?,
                weights.linear_of(&format!("{at}.k_proj"), [keys, hidden])?,
                weights.linear_of(&format!("{at}.v_proj"), [keys, hidden])?,
            ])?,
            o_proj: weights.linear_of(&format!("{at}.o_proj"), [hidden, queries])?,
            q_norm,
            k_norm,
            config,
        })
    }

    pub fn new_cache(&self) -> LayerCache {
        LayerCache::attention(self.config.kv_heads, self.config.head_dim, self.config.window)
    }

    /// `x` [1, R, D], same shape back. Advances entry `layer` of each span's cache.
    pub fn forward(&self, x: &Array, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        let AttentionConfig { heads: h, kv_heads: h_kv, head_dim: d, ref rope, .. } = self.config;
        let rows = x.dim(1);
        let normed = |norm: &Option<RmsNorm>, x: Array| match norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        };
        let [q, k, v] = self.qkv.forward(x)?;
        let q = normed(&self.q_norm, q.reshape(&[1, rows, h, d])?)?;
        let k = normed(&self.k_norm, k.reshape(&[1, rows, h_kv, d])?)?;
        let v = v.reshape(&[1, rows, h_kv, d])?;
        let (mut q, k) = (rope.forward(&q, spans)?, rope.forward(&k, spans)?);
        if let Some(growth) = self.config.growth {
            q = by_span([q], spans, |[q], span| {
                Ok(q.multiply(growth.factors(span.offset(), span.rows, q.dtype())?)?)
            })?;
        }
        let mixed = attention([&q, &k, &v], &self.config.scores, spans, layer)?;
        self.o_proj.forward(&mixed)
    }
}

impl Growth {
    /// [T, 1, 1] for positions from `offset` on.
    fn factors(self, offset: i32, rows: i32, dtype: Dtype) -> Result<Array> {
        let steps = floor(
            arange::<_, f32>(offset, offset + rows, None)?.divide(Array::from_f32(self.trained))?,
        )?;
        let factors =
            log1p(steps)?.multiply(Array::from_f32(self.beta))?.add(Array::from_f32(1.0))?;
        Ok(factors.as_dtype(dtype)?.reshape(&[rows, 1, 1])?)
    }
}
