//! Falcon-H1: in each layer a Mamba-2 mixer and attention, side by side, read the same norm. Constants scale
//! the inputs and outputs of every part; loading multiplies the weights with them.
//!
//! Reads published checkpoints, and those of MLX's converter, whose weights are multiplied already.
//!
//! # Why
//! mlx-lm leaves out the constants of keys and values. This file applies them, like `transformers`, also to
//! converted checkpoints, which lack them: to the weights, or to scores and outputs where the format of the
//! weights takes no factor.
//!
//! Source: arXiv:2507.22448; `transformers` `models/falcon_h1`; mlx-lm `models/falcon_h1.py`, checked by the
//! reference logits in `tests/fixtures`.

use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::llama::{self, SelfAttn};
use super::mamba2::{Mixer, MixerConfig, TimeStepLimit};
use super::{Model, Weights};
use crate::cache::{Cache, Span};
use crate::error::Result;
use crate::nn::{Embedding, Gate, GatedMlp, Linear, RmsNorm, scaled};

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    llama: llama::Config,
    mamba_n_heads: i32,
    mamba_d_head: i32,
    mamba_n_groups: i32,
    mamba_d_state: i32,
    #[serde(default)]
    mamba_rms_norm: bool,
    #[serde(default)]
    mamba_norm_before_gate: bool,
    time_step_limit: Option<TimeStepLimit>,
    embedding_multiplier: f32,
    lm_head_multiplier: f32,
    attention_in_multiplier: f32,
    attention_out_multiplier: f32,
    key_multiplier: f32,
    ssm_in_multiplier: f32,
    ssm_out_multiplier: f32,
    /// Multipliers of the gate, x, B, C and the steps.
    ssm_multipliers: [f32; 5],
    /// Multipliers of the gate and of the output.
    mlp_multipliers: [f32; 2],
}

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 1e11;

struct FalconH1 {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    final_layernorm: RmsNorm,
    lm_head: Linear,
    /// Factor of the logits, if the embeddings are the head.
    head_scale: Option<f32>,
    dtype: Dtype,
}

/// `x + mamba(norm x) + self_attn(norm x)`, then `x + feed_forward(norm x)`.
///
/// In the cache, layer `i` has the entries `2 i` and `2 i + 1`.
struct Layer {
    input_layernorm: RmsNorm,
    mamba: Mixer,
    self_attn: SelfAttn,
    /// Factor of what `self_attn` returns, if the weights of its values cannot be multiplied.
    attention_factor: Option<f32>,
    pre_ff_layernorm: RmsNorm,
    feed_forward: GatedMlp,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    if config.mamba_rms_norm && config.mamba_norm_before_gate {
        let problem = "mamba_norm_before_gate is not supported together with mamba_rms_norm";
        return Err(weights.problem("config.json", problem.into()));
    }
    let fixed = fixed(&config, weights);
    multiply(&config, weights, &fixed)?;
    let (hidden, eps) = (config.llama.hidden_size, config.llama.rms_norm_eps);
    let mixer = MixerConfig {
        hidden,
        heads: config.mamba_n_heads,
        head_dim: config.mamba_d_head,
        groups: config.mamba_n_groups,
        state: config.mamba_d_state,
        eps,
        time_step_limit: config.time_step_limit,
    };
    let attention = config.llama.attention(ROPE_THETA);
    let mut layers = Vec::with_capacity(config.llama.num_hidden_layers);
    for (i, [fixed_keys, fixed_values]) in fixed.into_iter().enumerate() {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        let mut attention = attention.clone();
        if fixed_keys {
            attention.scores.scale *= config.key_multiplier;
        }
        layers.push(Layer {
            attention_factor: fixed_values.then_some(config.attention_in_multiplier),
            input_layernorm: weights.norm(&at("input_layernorm"), eps)?,
            mamba: Mixer::load(weights, &at("mamba"), mixer)?,
            self_attn: SelfAttn::load(weights, &at("self_attn"), attention)?,
            pre_ff_layernorm: weights.norm(&at("pre_ff_layernorm"), eps)?,
            feed_forward: weights.gated_mlp(&at("feed_forward"), Gate::Silu)?,
        });
    }
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    let tied = config.llama.tie_word_embeddings;
    Ok(Box::new(FalconH1 {
        layers,
        final_layernorm: weights.norm("model.final_layernorm", eps)?,
        lm_head: weights.lm_head(&embed_tokens, tied)?,
        embed_tokens,
        head_scale: tied.then(|| config.lm_head_multiplier / config.embedding_multiplier),
        dtype: weights.dtype(),
    }))
}

/// Whether the weights of keys and of values of each layer cannot be multiplied: in MLX's float formats
/// (mxfp4, mxfp8, nvfp4) the scales of groups are powers of two or floats of 8 bits.
fn fixed(config: &Config, weights: &Weights) -> Vec<[bool; 2]> {
    let is_fixed = |i: usize, matrix: &str| {
        let scales = format!("model.layers.{i}.self_attn.{matrix}.scales");
        weights.get(&scales).is_some_and(|array| !array.dtype().is_float())
    };
    let layers = 0..config.llama.num_hidden_layers;
    layers.map(|i| ["k_proj", "v_proj"].map(|matrix| is_fixed(i, matrix))).collect()
}

/// Multiplies weights with the constants of what they are multiplied with, but for the `fixed` ones.
fn multiply(config: &Config, weights: &mut Weights, fixed: &[[bool; 2]]) -> Result<()> {
    let first = "model.layers.0.mamba.conv1d.weight";
    // Published as [C, 1, K].
    let is_published = weights.get(first).is_some_and(|array| array.dim(1) == 1);
    for (i, &[fixed_keys, fixed_values]) in fixed.iter().enumerate() {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        if !fixed_values {
            weights.multiply(&at("self_attn.v_proj"), config.attention_in_multiplier)?;
        }
        if is_published {
            weights.multiply(&at("self_attn.q_proj"), config.attention_in_multiplier)?;
            weights.multiply(&at("self_attn.k_proj"), config.attention_in_multiplier)?;
            weights.multiply(&at("self_attn.o_proj"), config.attention_out_multiplier)?;
            weights.multiply(&at("mamba.out_proj"), config.ssm_out_multiplier)?;
            weights.multiply(&at("feed_forward.gate_proj"), config.mlp_multipliers[0])?;
            weights.multiply(&at("feed_forward.down_proj"), config.mlp_multipliers[1])?;
            let name = at("mamba.in_proj.weight");
            let matrix = weights.remove(&name)?;
            let rows = scaled(&parts(config)?.as_dtype(matrix.dtype())?, config.ssm_in_multiplier)?;
            weights.expect(&name, &matrix, &[rows.dim(0), config.llama.hidden_size])?;
            weights.insert(name, matrix.multiply(rows.expand_dims(1)?)?);
        }
        if !fixed_keys {
            weights.multiply(&at("self_attn.k_proj"), config.key_multiplier)?;
        }
    }
    if is_published {
        weights.multiply("model.embed_tokens", config.embedding_multiplier)?;
        weights.multiply("lm_head", config.lm_head_multiplier)?;
    }
    Ok(())
}

/// The constant of each row of `in_proj`.
fn parts(config: &Config) -> Result<Array> {
    let inner = config.mamba_n_heads * config.mamba_d_head;
    let group = config.mamba_n_groups * config.mamba_d_state;
    let sizes = [inner, inner, group, group, config.mamba_n_heads];
    let parts = sizes.iter().zip(config.ssm_multipliers);
    let parts = parts.map(|(&size, factor)| Array::full::<f32>(&[size], Array::from_f32(factor)));
    let parts: Vec<Array> = parts.collect::<std::result::Result<_, _>>()?;
    Ok(concatenate(&parts, 0)?)
}

impl Model for FalconH1 {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn new_cache(&self) -> Result<Cache> {
        let mut entries = Vec::with_capacity(2 * self.layers.len());
        for layer in &self.layers {
            entries.push(layer.mamba.new_cache(self.dtype)?);
            entries.push(layer.self_attn.new_cache());
        }
        Ok(Cache::new(entries))
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        self.embed_tokens.forward(tokens)
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let Layer { input_layernorm, mamba, self_attn, attention_factor, .. } = &self.layers[layer];
        let normed = input_layernorm.forward(x)?;
        let y = mamba.forward(&normed, spans, 2 * layer)?;
        let attended = self_attn.forward(&normed, spans, 2 * layer + 1)?;
        let attended = attention_factor.map_or(Ok(attended.clone()), |f| scaled(&attended, f))?;
        Ok(x.add(y)?.add(attended)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let Layer { pre_ff_layernorm, feed_forward, .. } = &self.layers[layer];
        Ok(x.add(feed_forward.forward(&pre_ff_layernorm.forward(x)?)?)?)
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.final_layernorm.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let logits = self.lm_head.forward(hidden)?;
        match self.head_scale {
            Some(scale) => scaled(&logits, scale),
            None => Ok(logits),
        }
    }
}
