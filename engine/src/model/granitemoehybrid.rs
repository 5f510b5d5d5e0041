//! Granite 4: Mamba-2 layers and a few of attention, mostly without positions; each is followed by experts, a
//! block for all rows, or both. Factors scale embeddings, residuals, scores and logits. Also Granite 3, which
//! has the factors and attention only.
//!
//! Reads published checkpoints (`input_linear` with gate and up) and those of MLX's converter.
//!
//! # Why
//! mlx-lm bounds the steps to 0.001..100 if the config does not, `transformers` not at all, and so does this
//! file.
//!
//! Source: `transformers` `models/granitemoehybrid`, `models/granite` and `models/granitemoe`; mlx-lm files of
//! these names, checked by the reference logits in `tests/fixtures`.

use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::llama::{self, AttentionConfig, ROPE_THETA, SelfAttn};
use super::mamba2::{Mixer, MixerConfig, TimeStepLimit};
use super::{Model, Weights, experts};
use crate::cache::{Cache, Span};
use crate::error::Result;
use crate::nn::{Embedding, Gate, GatedMlp, Linear, Mlp, RmsNorm, Scores, scaled};

/// `config.json`. Dense models without Mamba-2 layers leave the keys of these out.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    llama: llama::Config,
    #[serde(flatten)]
    experts: experts::Config,
    attention_multiplier: f32,
    embedding_multiplier: f32,
    logits_scaling: f32,
    residual_multiplier: f32,
    /// `nope` or `rope`
    position_embedding_type: Option<String>,
    #[serde(default)]
    mamba_n_heads: i32,
    #[serde(default)]
    mamba_d_head: i32,
    #[serde(default)]
    mamba_n_groups: i32,
    #[serde(default)]
    mamba_d_state: i32,
    time_step_limit: Option<TimeStepLimit>,
}

impl Config {
    fn is_attention(&self, layer: usize) -> bool {
        let kind = self.llama.layer_types.as_ref().and_then(|kinds| kinds.get(layer));
        kind.is_none_or(|kind| ["attention", "full_attention"].contains(&kind.as_str()))
    }

    fn attention(&self) -> AttentionConfig {
        let attention = self.llama.attention(ROPE_THETA);
        let has_rope = self.position_embedding_type.as_deref() != Some("nope");
        AttentionConfig {
            rope: attention.rope.filter(|_| has_rope),
            scores: Scores { scale: self.attention_multiplier, ..attention.scores },
            ..attention
        }
    }

    fn mixer(&self) -> MixerConfig {
        MixerConfig {
            hidden: self.llama.hidden_size,
            heads: self.mamba_n_heads,
            head_dim: self.mamba_d_head,
            groups: self.mamba_n_groups,
            state: self.mamba_d_state,
            eps: self.llama.rms_norm_eps,
            time_step_limit: self.time_step_limit,
        }
    }
}

struct Granite {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
    embedding_multiplier: f32,
    logits_scaling: f32,
    residual_multiplier: f32,
    dtype: Dtype,
}

/// `x + m mixer(norm x)`, then `x + m (mlp(norm x) + shared_mlp(norm x))`.
struct Layer {
    input_layernorm: RmsNorm,
    mixer: Kind,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
    /// Beside experts.
    shared_mlp: Option<GatedMlp>,
}

#[allow(clippy::large_enum_variant, reason = "there is one in a layer")]
enum Kind {
    SelfAttn(SelfAttn),
    Mamba(Mixer),
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    sanitize(&config, weights)?;
    let eps = config.llama.rms_norm_eps;
    let mut layers = Vec::with_capacity(config.llama.num_hidden_layers);
    for i in 0..config.llama.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        let has_shared = weights.has(&at("shared_mlp.gate_proj.weight"));
        layers.push(Layer {
            input_layernorm: weights.norm(&at("input_layernorm"), eps)?,
            mixer: if config.is_attention(i) {
                Kind::SelfAttn(SelfAttn::load(weights, &at("self_attn"), config.attention())?)
            } else {
                Kind::Mamba(Mixer::load(weights, &at("mamba"), config.mixer())?)
            },
            post_attention_layernorm: weights.norm(&at("post_attention_layernorm"), eps)?,
            // The softmax of the chosen scores is the chosen part of the softmax of all, scaled to 1.
            mlp: config.experts.load(weights, &at("mlp"), true)?,
            shared_mlp: if has_shared {
                Some(weights.gated_mlp(&at("shared_mlp"), Gate::Silu)?)
            } else {
                None
            },
        });
    }
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    Ok(Box::new(Granite {
        layers,
        norm: weights.norm("model.norm", eps)?,
        lm_head: weights.lm_head(&embed_tokens, config.llama.tie_word_embeddings)?,
        embed_tokens,
        embedding_multiplier: config.embedding_multiplier,
        logits_scaling: config.logits_scaling,
        residual_multiplier: config.residual_multiplier,
        dtype: weights.dtype(),
    }))
}

/// Divides gate and up, and names experts and blocks as in other families: `mlp` holds the experts, or the
/// only block of dense models.
fn sanitize(config: &Config, weights: &mut Weights) -> Result<()> {
    let has_experts = weights.has("model.layers.0.block_sparse_moe.router.layer.weight");
    weights.rename(|name| {
        let name = name.replace(".block_sparse_moe.router.layer.", ".mlp.gate.");
        let name = name.replace(".block_sparse_moe.output_linear.", ".mlp.switch_mlp.down_proj.");
        let name = name.replace(".block_sparse_moe.", ".mlp.");
        let name = name.replace(".shared_mlp.output_linear.", ".shared_mlp.down_proj.");
        Some(if has_experts { name } else { name.replace(".shared_mlp.", ".mlp.") })
    });
    let halves = |rows: &Array| -> Result<[Array; 2]> {
        let halves = rows.split_equal(2, -2)?;
        // A view into both halves would be copied by the kernels at each step.
        Ok([halves[0].contiguous()?, halves[1].contiguous()?])
    };
    for i in 0..config.llama.num_hidden_layers {
        for (block, stack) in
            [("mlp", "mlp.switch_mlp"), ("mlp", "mlp"), ("shared_mlp", "shared_mlp")]
        {
            let stack = if block == "mlp" && !has_experts { "mlp" } else { stack };
            let parts =
                ["gate_proj", "up_proj"].map(|name| format!("model.layers.{i}.{stack}.{name}"));
            weights.divide(&format!("model.layers.{i}.{block}.input_linear"), &parts, halves)?;
        }
    }
    Ok(())
}

impl Model for Granite {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers.iter().map(|layer| match &layer.mixer {
            Kind::SelfAttn(attention) => Ok(attention.new_cache()),
            Kind::Mamba(mixer) => mixer.new_cache(self.dtype),
        });
        Ok(Cache::new(layers.collect::<Result<_>>()?))
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        scaled(&self.embed_tokens.forward(tokens)?, self.embedding_multiplier)
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let Layer { input_layernorm, mixer, .. } = &self.layers[layer];
        let normed = input_layernorm.forward(x)?;
        let y = match mixer {
            Kind::SelfAttn(attention) => attention.forward(&normed, spans, layer)?,
            Kind::Mamba(mixer) => mixer.forward(&normed, spans, layer)?,
        };
        Ok(x.add(scaled(&y, self.residual_multiplier)?)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let Layer { post_attention_layernorm, mlp, shared_mlp, .. } = &self.layers[layer];
        let normed = post_attention_layernorm.forward(x)?;
        let mut y = mlp.forward(&normed)?;
        if let Some(shared) = shared_mlp {
            y = y.add(shared.forward(&normed)?)?;
        }
        Ok(x.add(scaled(&y, self.residual_multiplier)?)?)
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.norm.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        scaled(&self.lm_head.forward(hidden)?, self.logits_scaling.recip())
    }
}
