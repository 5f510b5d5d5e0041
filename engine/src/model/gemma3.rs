//! Gemma 3: five layers that look no further back than a window to one that sees everything, each
//! kind with its own rotary base, norms on both sides of attention and feed-forward block, and
//! norms of queries and keys in place of Gemma 2's caps.
//!
//! Reads checkpoints as Hugging Face publishes them (text alone, or the language part of a
//! multimodal one) and as MLX converts them.
//!
//! Source: arXiv:2503.19786; `transformers` `models/gemma3`; mlx-lm `models/gemma3_text.py`, checked
//! by the reference logits in `tests/fixtures`.

use std::collections::HashMap;

use mlx_rs::ops::clip;
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{Model, Pass, Weights};
use crate::cache::{Cache, Full, LayerCache, Sliding, Span};
use crate::error::Result;
use crate::nn::{
    Embedding, GeGlu, Linear, RmsNorm, Rope, RopeConfig, RopeParameters, Scores, attention,
    by_span, scaled,
};

/// `text_config` of `config.json` (or all of it, in text-only checkpoints). Multimodal checkpoints
/// state little beyond sizes; the defaults are those of `transformers`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: usize,
    num_attention_heads: i32,
    num_key_value_heads: i32,
    head_dim: i32,
    rms_norm_eps: f32,
    /// The attention's scale is this to the power of -0.5, which need not be the head's size.
    query_pre_attn_scalar: f32,
    sliding_window: i32,
    /// Every so many-th layer sees everything, where `layer_types` does not say.
    #[serde(alias = "_sliding_window_pattern")]
    sliding_window_pattern: usize,
    layer_types: Vec<String>,
    /// Of the layers that see everything; `rope_scaling`, too.
    rope_theta: f32,
    rope_local_base_freq: f32,
    rope_scaling: Option<RopeParameters>,
    /// In place of these three, by kind of layer, since transformers 5.
    rope_parameters: HashMap<String, RopeParameters>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            hidden_size: 2304,
            num_hidden_layers: 26,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 256,
            rms_norm_eps: 1e-6,
            query_pre_attn_scalar: 256.0,
            sliding_window: 4096,
            sliding_window_pattern: 6,
            layer_types: Vec::new(),
            rope_theta: 1_000_000.0,
            rope_local_base_freq: 10_000.0,
            rope_scaling: None,
            rope_parameters: HashMap::new(),
        }
    }
}

impl Config {
    fn is_sliding(&self, layer: usize) -> bool {
        match self.layer_types.get(layer) {
            Some(kind) => kind == "sliding_attention",
            None => !(layer + 1).is_multiple_of(self.sliding_window_pattern),
        }
    }

    fn rope(&self, sliding: bool) -> Rope {
        let (kind, theta, rope_scaling) = if sliding {
            ("sliding_attention", self.rope_local_base_freq, None)
        } else {
            ("full_attention", self.rope_theta, self.rope_scaling.clone())
        };
        let rope_parameters = self.rope_parameters.get(kind).cloned();
        let config = RopeConfig { rope_scaling, rope_parameters, ..RopeConfig::default() };
        config.rope(self.head_dim, theta)
    }
}

/// Positions that the models are made for, the smallest ones aside, which say so. Multimodal
/// checkpoints need not say it.
const CONTEXT: u64 = 131_072;

struct Gemma3 {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// `None` where the embedding is the head.
    lm_head: Option<Linear>,
    /// What embeddings are multiplied with: the square root of their size.
    embed_scale: f32,
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
    let text = config.get("text_config").unwrap_or(config);
    let config: Config = weights.config(text)?;
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
    let tied = !weights.has("lm_head.weight");
    Ok(Box::new(Gemma3 {
        embed_tokens: Embedding(weights.linear("model.embed_tokens")?),
        layers,
        norm: weights.norm("model.norm", eps)?,
        lm_head: if tied { None } else { Some(weights.linear("lm_head")?) },
        embed_scale: bf16((config.hidden_size as f32).sqrt())?,
    }))
}

/// Rounds to bf16, in which the model was trained, whatever it is computed in.
fn bf16(x: f32) -> Result<f32> {
    let rounded = Array::from_f32(x).as_dtype(Dtype::Bfloat16)?;
    Ok(rounded.as_dtype(Dtype::Float32)?.item_exact::<f32>())
}

/// Brings the names of all kinds of checkpoint to `model.*` and `lm_head.*`, and makes plain
/// factors of the (1 + w) norms.
fn sanitize(weights: &mut Weights) -> Result<()> {
    weights.rename(|name| {
        let inner = name.strip_prefix("model.").unwrap_or(name);
        if inner.starts_with("vision_tower") || inner.starts_with("multi_modal_projector") {
            return None;
        }
        Some(
            match (name.strip_prefix("model.language_model."), name.strip_prefix("language_model."))
            {
                (Some(rest), _) => format!("model.{rest}"),
                (_, Some(rest)) => rest.to_string(),
                _ => name.to_string(),
            },
        )
    });
    let dtype = weights.dtype();
    weights.map(|name, array| {
        if name.ends_with("norm.weight") {
            // After the cast: the reference adds 1 at run time, in the type it computes with.
            return Ok(array.as_dtype(dtype)?.add(Array::from_f32(1.0).as_dtype(dtype)?)?);
        }
        Ok(array)
    })
}

impl Model for Gemma3 {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn context(&self) -> Option<u64> {
        Some(CONTEXT)
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
            x = add(&x, &layer.post_attention_layernorm.forward(&y)?)?;
            if pass.skips(i) {
                continue;
            }
            let y = layer.mlp.forward(&layer.pre_feedforward_layernorm.forward(&x)?)?;
            x = add(&x, &layer.post_feedforward_layernorm.forward(&y)?)?;
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

/// `x + y`, kept finite: Gemma 3's hidden states grow beyond what f16 holds.
fn add(x: &Array, y: &Array) -> Result<Array> {
    const LARGEST_F16: f32 = 65_504.0;
    if x.dtype() != Dtype::Float16 {
        return Ok(x.add(y)?);
    }
    let sum = x.as_dtype(Dtype::Float32)?.add(y.as_dtype(Dtype::Float32)?)?;
    Ok(clip(&sum, (-LARGEST_F16, LARGEST_F16))?.as_dtype(Dtype::Float16)?)
}

struct SelfAttn {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    rope: Rope,
    scale: f32,
    /// Positions that one position sees; `None` for all.
    window: Option<i32>,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
}

impl SelfAttn {
    fn load(config: &Config, weights: &mut Weights, layer: usize) -> Result<Self> {
        let at = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let eps = config.rms_norm_eps;
        let sliding = config.is_sliding(layer);
        Ok(Self {
            q_proj: weights.linear(&at("q_proj"))?,
            k_proj: weights.linear(&at("k_proj"))?,
            v_proj: weights.linear(&at("v_proj"))?,
            o_proj: weights.linear(&at("o_proj"))?,
            q_norm: weights.norm(&at("q_norm"), eps)?,
            k_norm: weights.norm(&at("k_norm"), eps)?,
            rope: config.rope(sliding),
            scale: config.query_pre_attn_scalar.powf(-0.5),
            window: sliding.then_some(config.sliding_window),
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
        })
    }

    fn forward(&self, x: &Array, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        let rows = x.dim(1);
        let (h, h_kv, d) = (self.heads, self.kv_heads, self.head_dim);
        let q = self.q_norm.forward(&self.q_proj.forward(x)?.reshape(&[1, rows, h, d])?)?;
        let k = self.k_norm.forward(&self.k_proj.forward(x)?.reshape(&[1, rows, h_kv, d])?)?;
        let v = self.v_proj.forward(x)?.reshape(&[1, rows, h_kv, d])?;
        let mixed = by_span([q, k, v], spans, |[q, k, v], span| {
            let offset = span.offset();
            let q = self.rope.forward(&q.swap_axes(1, 2)?, offset)?;
            let k = self.rope.forward(&k.swap_axes(1, 2)?, offset)?;
            let v = v.swap_axes(1, 2)?;
            let scores = Scores { scale: self.scale, softcap: None };
            let y = attention(&q, &k, &v, scores, &mut span.cache.layers[layer])?;
            Ok(y.swap_axes(1, 2)?.reshape(&[1, span.rows, h * d])?)
        })?;
        self.o_proj.forward(&mixed)
    }
}
