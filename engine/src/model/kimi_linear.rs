//! Kimi Linear: three layers of Kimi Delta Attention to one of latent attention that knows no positions, and
//! experts chosen by sigmoids beside one for all rows. The first layers are dense.
//!
//! # Why
//! The norm of the latent has an epsilon of 1e-6 whatever `rms_norm_eps` says, as in `transformers` and the published
//! code; mlx-lm gives it that of the other norms. Layers with experts are those with a router in the checkpoint.
//!
//! Source: arXiv:2510.26692; `transformers` `models/kimi_linear`; mlx-lm `models/kimi_linear.py`, checked by the
//! reference logits in `tests/fixtures`.

use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::deepseek_v3::{LatentAttention, LatentConfig};
use super::{Cut, Model, Weights, experts, mixtral};
use crate::cache::{Cache, LayerCache, Span};
use crate::error::Result;
use crate::nn::{Embedding, Joined, KimiDelta, Linear, Mlp, RmsNorm, sigmoid_gated};

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: usize,
    num_attention_heads: i32,
    rms_norm_eps: f32,
    #[serde(default)]
    tie_word_embeddings: bool,
    kv_lora_rank: i32,
    q_lora_rank: Option<i32>,
    qk_nope_head_dim: i32,
    qk_rope_head_dim: i32,
    v_head_dim: i32,
    /// Whether latent attention knows no positions. There is no published model in which it does.
    mla_use_nope: Option<bool>,
    #[serde(flatten)]
    experts: experts::Config,
    moe_router_activation_func: Option<String>,
    model_max_length: Option<u64>,
    linear_attn_config: Option<LinearConfig>,
    /// In place of `linear_attn_config` where `transformers` saved the checkpoint.
    linear_num_heads: Option<i32>,
    linear_head_dim: Option<i32>,
    layer_types: Option<Vec<String>>,
}

/// Shape of the layers with Kimi Delta Attention, and which they are.
#[derive(Debug, Clone, Deserialize)]
struct LinearConfig {
    num_heads: i32,
    head_dim: i32,
    /// Numbers of layers, from 1 on.
    #[serde(default)]
    kda_layers: Vec<usize>,
}

impl Config {
    /// Why the keys cannot be used.
    fn problem(&self) -> Option<&'static str> {
        let is_sigmoid = self.moe_router_activation_func.as_deref().is_none_or(|f| f == "sigmoid");
        if self.mla_use_nope == Some(false) {
            Some("mla_use_nope is false: latent attention with positions is not supported")
        } else if !is_sigmoid {
            Some("moe_router_activation_func must be `sigmoid`; no other function is supported")
        } else if self.linear().is_none() {
            Some("`linear_attn_config` is missing (or `linear_num_heads` and `linear_head_dim`)")
        } else if self.layer_types.is_none() && self.linear_attn_config.is_none() {
            Some("`linear_attn_config` or `layer_types` must say which layers are linear")
        } else {
            None
        }
    }

    /// Heads of the layers with Kimi Delta Attention, and their dimension.
    fn linear(&self) -> Option<[i32; 2]> {
        match &self.linear_attn_config {
            Some(linear) => Some([linear.num_heads, linear.head_dim]),
            None => Some([self.linear_num_heads?, self.linear_head_dim?]),
        }
    }

    fn is_linear(&self, layer: usize) -> bool {
        let kind = self.layer_types.as_ref().and_then(|kinds| kinds.get(layer));
        match (kind, &self.linear_attn_config) {
            (Some(kind), _) => kind == "linear_attention",
            (None, Some(linear)) => linear.kda_layers.contains(&(layer + 1)),
            (None, None) => false,
        }
    }

    fn latent(&self) -> LatentConfig {
        LatentConfig {
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            latent: self.kv_lora_rank,
            query_rank: self.q_lora_rank,
            nope: self.qk_nope_head_dim,
            rotated: self.qk_rope_head_dim,
            values: self.v_head_dim,
            scale: ((self.qk_nope_head_dim + self.qk_rope_head_dim) as f32).powf(-0.5),
            rope: None,
        }
    }
}

struct KimiLinear {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
    context: Option<u64>,
    dtype: Dtype,
}

/// `x + self_attn(norm x)`, then `x + mlp(norm x)`.
struct Layer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

#[allow(clippy::large_enum_variant, reason = "there is one in a layer")]
enum Attention {
    Latent(LatentAttention),
    Delta(DeltaAttention),
}

/// `o_proj(sigmoid(g_b g_a x) * o_norm(delta(x)))`
struct DeltaAttention {
    /// `q_proj`, `k_proj`, `v_proj`, `f_a_proj`, `g_a_proj` and `b_proj`.
    projections: Joined<6>,
    /// [H D, D]: from `f_a_proj` to the input of the decay.
    f_b_proj: Linear,
    /// [H D, D]: from `g_a_proj` to the gate.
    g_b_proj: Linear,
    delta: KimiDelta,
    /// [D]
    o_norm: RmsNorm,
    o_proj: Linear,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    if let Some(problem) = config.problem() {
        return Err(weights.problem("config.json", problem.into()));
    }
    mixtral::rename_experts(weights);
    // MLX's converter names the convolutions in its own way.
    weights.rename(|name| Some(name.replace("_conv.conv.", "_conv1d.")));
    let eps = config.rms_norm_eps;
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for i in 0..config.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        layers.push(Layer {
            input_layernorm: weights.norm(&at("input_layernorm"), eps)?,
            self_attn: if config.is_linear(i) {
                Attention::Delta(DeltaAttention::load(&config, weights, &at("self_attn"))?)
            } else {
                let latent = LatentAttention::load(config.latent(), weights, &at("self_attn"))?;
                Attention::Latent(latent)
            },
            post_attention_layernorm: weights.norm(&at("post_attention_layernorm"), eps)?,
            mlp: config.experts.load(weights, &at("mlp"), true)?,
        });
    }
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    Ok(Box::new(KimiLinear {
        layers,
        norm: weights.norm("model.norm", eps)?,
        lm_head: weights.lm_head(&embed_tokens, config.tie_word_embeddings)?,
        embed_tokens,
        context: config.model_max_length,
        dtype: weights.dtype(),
    }))
}

impl DeltaAttention {
    /// How a layer of so many heads is cut among ranks.
    fn cuts(heads: i32) -> [(&'static str, Cut); 12] {
        let outputs = [
            "q_proj", "k_proj", "v_proj", "f_b_proj", "g_b_proj", "b_proj", "q_conv1d", "k_conv1d",
            "v_conv1d", "A_log", "dt_bias", "o_proj",
        ];
        outputs.map(|name| match name {
            "o_proj" => (name, Cut::Inputs(heads)),
            _ => (name, Cut::Outputs(heads)),
        })
    }

    fn load(config: &Config, weights: &mut Weights, at: &str) -> Result<Self> {
        let [heads, dim] = config.linear().expect("checked by `Config::problem`");
        weights.cut(at, Self::cuts(heads));
        let at = |name: &str| format!("{at}.{name}");
        let hidden = config.hidden_size;
        let width = heads * dim;
        let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|name| (name, width));
        let mut layers = Vec::with_capacity(6);
        for (name, rows) in [q, k, v, ("f_a_proj", dim), ("g_a_proj", dim), ("b_proj", heads)] {
            layers.push(weights.linear_of(&at(name), [rows, hidden])?);
        }
        let projections = layers.try_into().expect("there are six");
        let [q, k, v] = ["q_conv1d", "k_conv1d", "v_conv1d"].map(&at);
        let [q, k, v] =
            [weights.taps(&q, width)?, weights.taps(&k, width)?, weights.taps(&v, width)?];
        if q.len() != k.len() || q.len() != v.len() {
            let problem =
                format!("the convolutions of `{}` have different lengths", at("q_conv1d"));
            return Err(weights.problem("", problem));
        }
        let taps = q.iter().zip(&k).zip(&v).map(|((q, k), v)| concatenate(&[q, k, v], 0));
        Ok(Self {
            projections: Joined::new(projections)?,
            f_b_proj: weights.linear_of(&at("f_b_proj"), [width, dim])?,
            g_b_proj: weights.linear_of(&at("g_b_proj"), [width, dim])?,
            delta: KimiDelta {
                conv1d: taps.collect::<std::result::Result<_, _>>()?,
                a_log: weights.flat_f32(&at("A_log"), heads)?,
                dt_bias: weights.flat_f32(&at("dt_bias"), width)?,
                heads: weights.ranks().share(heads),
                head_dim: dim,
            },
            o_norm: weights.norm_of(&at("o_norm"), config.rms_norm_eps, &[dim])?,
            o_proj: weights.linear_of(&at("o_proj"), [hidden, width])?,
        })
    }

    /// `x` [1, R, D], same shape back. Advances entry `layer` of each span's cache.
    fn forward(&self, x: &Array, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        let [q, k, v, decay, gate, b] = self.projections.forward(x)?;
        let qkv = concatenate(&[q, k, v], 2)?;
        let decay = self.f_b_proj.forward(&decay)?;
        let y = self.delta.forward([&qkv, &decay, &b], spans, layer)?;
        let heads = [1, y.dim(1), self.delta.heads, self.delta.head_dim];
        let normed = self.o_norm.forward(&y.reshape(&heads)?)?.reshape(y.shape())?;
        self.o_proj.forward(&sigmoid_gated(self.g_b_proj.forward(&gate)?, normed)?)
    }
}

impl Model for KimiLinear {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn context(&self) -> Option<u64> {
        self.context
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers.iter().map(|layer| match &layer.self_attn {
            Attention::Latent(attention) => Ok(attention.new_cache()),
            Attention::Delta(attention) => {
                Ok(LayerCache::Recurrent(attention.delta.new_cache(self.dtype)?))
            }
        });
        Ok(Cache::new(layers.collect::<Result<_>>()?))
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        self.embed_tokens.forward(tokens)
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let Layer { input_layernorm, self_attn, .. } = &self.layers[layer];
        let normed = input_layernorm.forward(x)?;
        let y = match self_attn {
            Attention::Latent(attention) => attention.forward(&normed, spans, layer)?,
            Attention::Delta(attention) => attention.forward(&normed, spans, layer)?,
        };
        Ok(x.add(y)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let Layer { post_attention_layernorm, mlp, .. } = &self.layers[layer];
        mlp.residual(x, post_attention_layernorm)
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.norm.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        self.lm_head.forward(hidden)
    }
}
