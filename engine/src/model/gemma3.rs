//! Gemma 3: five layers with a sliding window to one with full attention, each kind with its own
//! rotary base, norms that surround attention and feed-forward block, and norms of queries and keys
//! instead of Gemma 2's caps.
//!
//! Reads checkpoints of Hugging Face (text-only, or the language part of a multimodal one) and of
//! MLX's converter.
//!
//! Source: arXiv:2503.19786; `transformers` `models/gemma3`; mlx-lm `models/gemma3_text.py`, checked
//! by the reference logits in `tests/fixtures`.

use std::collections::HashMap;

use mlx_rs::ops::clip;
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::gemma2::plain_norms;
use super::llama::{AttentionConfig, SelfAttn};
use super::{Model, Weights};
use crate::cache::{Cache, Span};
use crate::error::Result;
use crate::nn::{
    Embedding, GatedMlp, Linear, RmsNorm, Rope, RopeConfig, RopeParameters, Scores, geglu, scaled,
};

/// `text_config` of `config.json`, or all of it in text-only checkpoints. Multimodal checkpoints
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
    /// Attention's scale is this to the power of -0.5. It may differ from `head_dim`.
    query_pre_attn_scalar: f32,
    sliding_window: i32,
    /// Every `n`th layer uses full attention if there are no `layer_types`.
    #[serde(alias = "_sliding_window_pattern")]
    sliding_window_pattern: usize,
    layer_types: Vec<String>,
    /// Of full attention, like `rope_scaling`.
    rope_theta: f32,
    rope_local_base_freq: f32,
    rope_scaling: Option<RopeParameters>,
    /// By kind of layer; replaces these three since transformers 5.
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

    fn attention(&self, layer: usize) -> AttentionConfig {
        let sliding = self.is_sliding(layer);
        AttentionConfig {
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            eps: self.rms_norm_eps,
            rope: self.rope(sliding),
            growth: None,
            scores: Scores { scale: self.query_pre_attn_scalar.powf(-0.5), softcap: None },
            window: sliding.then_some(self.sliding_window),
        }
    }
}

/// Context of the models, except the smallest ones, which state theirs. Multimodal checkpoints may
/// omit it.
const CONTEXT: u64 = 131_072;

struct Gemma3 {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
    /// Factor of the embeddings: the square root of their dimension.
    embed_scale: f32,
}

struct Layer {
    input_layernorm: RmsNorm,
    self_attn: SelfAttn,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: GatedMlp,
    post_feedforward_layernorm: RmsNorm,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let text = config.get("text_config").unwrap_or(config);
    let config: Config = weights.config(text)?;
    weights.keep_language_model();
    plain_norms(weights)?;
    let eps = config.rms_norm_eps;
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for i in 0..config.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        layers.push(Layer {
            input_layernorm: weights.norm(&at("input_layernorm"), eps)?,
            self_attn: SelfAttn::load(weights, &at("self_attn"), config.attention(i))?,
            post_attention_layernorm: weights.norm(&at("post_attention_layernorm"), eps)?,
            pre_feedforward_layernorm: weights.norm(&at("pre_feedforward_layernorm"), eps)?,
            mlp: weights.gated_mlp(&at("mlp"), geglu)?,
            post_feedforward_layernorm: weights.norm(&at("post_feedforward_layernorm"), eps)?,
        });
    }
    let embed_tokens = Embedding(weights.linear("model.embed_tokens")?);
    Ok(Box::new(Gemma3 {
        layers,
        norm: weights.norm("model.norm", eps)?,
        lm_head: weights.lm_head(&embed_tokens, false)?,
        embed_tokens,
        embed_scale: bf16((config.hidden_size as f32).sqrt())?,
    }))
}

/// Rounds to bf16, the dtype of training, whatever the dtype of inference is.
fn bf16(x: f32) -> Result<f32> {
    let rounded = Array::from_f32(x).as_dtype(Dtype::Bfloat16)?;
    Ok(rounded.as_dtype(Dtype::Float32)?.item_exact::<f32>())
}

impl Model for Gemma3 {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn context(&self) -> Option<u64> {
        Some(CONTEXT)
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
        self.lm_head.forward(hidden)
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
