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

use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::gemma2::{Gemma, Layer, plain_norms};
use super::llama::AttentionConfig;
use super::{Model, Weights};
use crate::error::Result;
use crate::nn::{Rope, RopeConfig, RopeParameters, Scores};

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
    /// Base of the rotary embedding of full attention, like `rope_scaling`.
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
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            eps: self.rms_norm_eps,
            rope: Some(self.rope(sliding)),
            norm_after_rope: false,
            growth: None,
            scores: Scores {
                scale: self.query_pre_attn_scalar.powf(-0.5),
                softcap: None,
                sinks: None,
            },
            window: sliding.then_some(self.sliding_window),
        }
    }
}

/// Context of the models, except the smallest ones, which state theirs. Multimodal checkpoints may
/// omit it.
const CONTEXT: u64 = 131_072;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let text = config.get("text_config").unwrap_or(config);
    let config: Config = weights.config(text)?;
    weights.keep_language_model();
    weights.set_hidden(config.hidden_size);
    plain_norms(weights)?;
    let eps = config.rms_norm_eps;
    let attention = |layer| config.attention(layer);
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    Ok(Box::new(Gemma {
        layers: Layer::load_all(weights, config.num_hidden_layers, eps, attention)?,
        norm: weights.norm("model.norm", eps)?,
        lm_head: weights.lm_head(&embed_tokens, false)?,
        embed_tokens,
        embed_scale: bf16((config.hidden_size as f32).sqrt())?,
        final_logit_softcapping: None,
        context: Some(CONTEXT),
    }))
}

/// Rounds to bf16, the dtype of training, whatever the dtype of inference is.
fn bf16(x: f32) -> Result<f32> {
    let rounded = Array::from_f32(x).as_dtype(Dtype::Bfloat16)?;
    Ok(rounded.as_dtype(Dtype::Float32)?.item_exact::<f32>())
}
