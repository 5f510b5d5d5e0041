//! Llama 1 to 3.3 and what is built like it (SmolLM2, TinyLlama, Yi ...): pre-norm blocks of
//! grouped-query attention and SwiGLU.
//!
//! [`Llama`] also runs the families whose files say only how they deviate: `mistral.rs` (windows),
//! `qwen2.rs` (biases), `qwen3.rs` (norms of queries and keys, experts).
//!
//! Source: arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783; `transformers` `models/llama`;
//! mlx-lm `models/llama.py`, checked by the reference logits in `tests/fixtures`.

use mlx_rs::ops::{arange, floor, log1p};
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{Model, Pass, Weights, experts};
use crate::cache::{Cache, Full, LayerCache, Sliding, Span};
use crate::error::Result;
use crate::nn::{Embedding, Linear, Mlp, RmsNorm, Rope, RopeConfig, Scores, attention, by_span};

/// The keys of `config.json` that these families share. `attention_bias` and `mlp_bias` are not
/// read: the checkpoint has the biases or has them not.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Config {
    pub hidden_size: i32,
    pub num_hidden_layers: usize,
    pub num_attention_heads: i32,
    /// As many as there are queries, where it is not given.
    pub num_key_value_heads: Option<i32>,
    /// `hidden_size / num_attention_heads`, where it is not given.
    pub head_dim: Option<i32>,
    pub rms_norm_eps: f32,
    #[serde(default)]
    pub tie_word_embeddings: bool,
    #[serde(flatten)]
    pub rope: RopeConfig,
    /// Which layers are `sliding_attention`, where any are.
    pub layer_types: Option<Vec<String>>,
    /// Positions that such a layer sees.
    pub sliding_window: Option<i32>,
}

impl Config {
    /// Size of a head.
    pub fn head_dim(&self) -> i32 {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }

    /// Positions that a layer sees, where they are limited.
    pub fn window(&self, layer: usize) -> Option<i32> {
        let kind = self.layer_types.as_ref().and_then(|kinds| kinds.get(layer));
        self.sliding_window.filter(|_| kind.is_some_and(|kind| kind == "sliding_attention"))
    }
}

/// Base of the frequencies where the config does not give one.
pub(super) const ROPE_THETA: f32 = 10_000.0;

/// Builds the model.
pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    let rope = config.rope.rope(config.head_dim(), ROPE_THETA);
    Ok(Box::new(Llama::load(&config, weights, |weights, i| {
        let at = format!("model.layers.{i}");
        let self_attn = SelfAttn::load(&config, weights, &at, &rope, config.window(i))?;
        let mlp = Mlp::Dense(experts::dense(weights, &format!("{at}.mlp"))?);
        Layer::load(&config, weights, &at, self_attn, mlp)
    })?))
}

/// A decoder of pre-norm blocks.
pub(super) struct Llama {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// `None` where the embedding is the head.
    lm_head: Option<Linear>,
}

/// `x + self_attn(norm x)`, then `x + mlp(norm x)`.
pub(super) struct Layer {
    input_layernorm: RmsNorm,
    self_attn: SelfAttn,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl Llama {
    /// Takes everything but the layers, and each layer from `layer`.
    pub fn load(
        config: &Config,
        weights: &mut Weights,
        mut layer: impl FnMut(&mut Weights, usize) -> Result<Layer>,
    ) -> Result<Self> {
        let tied = config.tie_word_embeddings || !weights.has("lm_head.weight");
        Ok(Self {
            embed_tokens: Embedding(weights.linear("model.embed_tokens")?),
            layers: (0..config.num_hidden_layers)
                .map(|i| layer(weights, i))
                .collect::<Result<_>>()?,
            norm: weights.norm("model.norm", config.rms_norm_eps)?,
            lm_head: if tied { None } else { Some(weights.linear("lm_head")?) },
        })
    }
}

impl Layer {
    /// Takes the norms.
    pub fn load(
        config: &Config,
        weights: &mut Weights,
        at: &str,
        self_attn: SelfAttn,
        mlp: Mlp,
    ) -> Result<Self> {
        Ok(Self {
            input_layernorm: weights.norm(&format!("{at}.input_layernorm"), config.rms_norm_eps)?,
            self_attn,
            post_attention_layernorm: weights
                .norm(&format!("{at}.post_attention_layernorm"), config.rms_norm_eps)?,
            mlp,
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

    fn forward(&self, tokens: &Array, spans: &mut [Span<'_>], pass: Pass<'_>) -> Result<Array> {
        let mut x = self.embed_tokens.forward(tokens)?;
        for (i, layer) in self.layers.iter().enumerate().take(pass.layers(self.depth())) {
            let normed = layer.input_layernorm.forward(&x)?;
            x = x.add(layer.self_attn.forward(&normed, spans, i)?)?;
            if pass.skips(i) {
                continue;
            }
            let normed = layer.post_attention_layernorm.forward(&x)?;
            x = x.add(layer.mlp.forward(&normed)?)?;
        }
        for span in spans {
            span.cache.position += span.rows as usize;
        }
        self.norm.forward(&x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        match &self.lm_head {
            Some(head) => head.forward(hidden),
            None => self.embed_tokens.as_linear(hidden),
        }
    }
}

/// Grouped-query attention (arXiv:2305.13245).
pub(super) struct SelfAttn {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    /// Of each head's query, where the checkpoint has it (Qwen3).
    q_norm: Option<RmsNorm>,
    /// Of each head's key, likewise.
    k_norm: Option<RmsNorm>,
    rope: Rope,
    /// Growth of queries with their position, where there is any.
    pub growth: Option<Growth>,
    /// Positions that one position sees, where they are limited.
    window: Option<i32>,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
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
    /// Takes what is at `AT.self_attn`; `window` as in [`Config::window`].
    pub fn load(
        config: &Config,
        weights: &mut Weights,
        at: &str,
        rope: &Rope,
        window: Option<i32>,
    ) -> Result<Self> {
        let at = format!("{at}.self_attn");
        let mut head_norm = |name: &str| {
            let name = format!("{at}.{name}");
            let there = weights.has(&format!("{name}.weight"));
            there.then(|| weights.norm(&name, config.rms_norm_eps)).transpose()
        };
        let (q_norm, k_norm) = (head_norm("q_norm")?, head_norm("k_norm")?);
        Ok(Self {
            q_proj: weights.linear(&format!("{at}.q_proj"))?,
            k_proj: weights.linear(&format!("{at}.k_proj"))?,
            v_proj: weights.linear(&format!("{at}.v_proj"))?,
            o_proj: weights.linear(&format!("{at}.o_proj"))?,
            q_norm,
            k_norm,
            rope: rope.clone(),
            growth: None,
            window,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads.unwrap_or(config.num_attention_heads),
            head_dim: config.head_dim(),
        })
    }

    fn new_cache(&self) -> LayerCache {
        let (heads, dim) = (self.kv_heads, self.head_dim);
        match self.window {
            Some(window) => LayerCache::Sliding(Sliding::new(heads, dim, window)),
            None => LayerCache::Full(Full::new(heads, dim)),
        }
    }

    fn forward(&self, x: &Array, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        let rows = x.dim(1);
        let (h, h_kv, d) = (self.heads, self.kv_heads, self.head_dim);
        let normed = |norm: &Option<RmsNorm>, x: Array| match norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        };
        let q = normed(&self.q_norm, self.q_proj.forward(x)?.reshape(&[1, rows, h, d])?)?;
        let k = normed(&self.k_norm, self.k_proj.forward(x)?.reshape(&[1, rows, h_kv, d])?)?;
        let v = self.v_proj.forward(x)?.reshape(&[1, rows, h_kv, d])?;
        let mixed = by_span([q, k, v], spans, |[q, k, v], span| {
            let offset = span.offset();
            let mut q = self.rope.forward(&q.swap_axes(1, 2)?, offset)?;
            if let Some(growth) = self.growth {
                q = q.multiply(growth.factors(offset, span.rows, q.dtype())?)?;
            }
            let k = self.rope.forward(&k.swap_axes(1, 2)?, offset)?;
            let v = v.swap_axes(1, 2)?;
            let scores = Scores { scale: (d as f32).powf(-0.5), softcap: None };
            let y = attention(&q, &k, &v, scores, &mut span.cache.layers[layer])?;
            Ok(y.swap_axes(1, 2)?.reshape(&[1, span.rows, h * d])?)
        })?;
        self.o_proj.forward(&mixed)
    }
}

impl Growth {
    /// [T, 1] for positions from `offset` on.
    fn factors(self, offset: i32, rows: i32, dtype: Dtype) -> Result<Array> {
        let steps = floor(
            arange::<_, f32>(offset, offset + rows, None)?.divide(Array::from_f32(self.trained))?,
        )?;
        let factors =
            log1p(steps)?.multiply(Array::from_f32(self.beta))?.add(Array::from_f32(1.0))?;
        Ok(factors.as_dtype(dtype)?.expand_dims(1)?)
    }
}
