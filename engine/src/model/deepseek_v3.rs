//! DeepSeek-V3 and R1, Kimi K2, and GLM-4.7 Flash: multi-head latent attention, and experts chosen by
//! sigmoids beside one for all rows. The first layers are dense.
//!
//! Keys and values of all heads are products of one short vector a row, the latent. What is cached is the
//! latent and the rotated part of the keys; the matrices that make keys and values of it are applied to
//! queries and outputs instead, so all heads attend to the same vectors.
//!
//! # Why
//! The cache holds each vector twice, as key and as value, because its layers have both. Expanded keys and
//! values would take 36 times as much in DeepSeek-V3.
//!
//! Its multi-token-prediction layer is not read.
//!
//! Source: arXiv:2405.04434 (section 2.1), arXiv:2412.19437; `transformers` `models/deepseek_v3` and
//! `models/glm4_moe_lite`; mlx-lm files of these names, checked by the reference logits in `tests/fixtures`.

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, matmul};
use serde::Deserialize;
use serde_json::Value;

use super::{Cut, Model, Weights, experts};
use crate::cache::{Cache, LayerCache, Span};
use crate::error::Result;
use crate::nn::{Embedding, Linear, Mlp, RmsNorm, Rope, RopeConfig, Scaling, Scores, attention};

/// `config.json`. `first_k_dense_replace` is not read: layers with experts have a router in the checkpoint.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: usize,
    num_attention_heads: i32,
    rms_norm_eps: f32,
    #[serde(default)]
    tie_word_embeddings: bool,
    /// Size of the latent.
    kv_lora_rank: i32,
    /// Size that queries pass through; small models have none.
    q_lora_rank: Option<i32>,
    /// The part of a head's query and key that is not rotated, and the part that is.
    qk_nope_head_dim: i32,
    qk_rope_head_dim: i32,
    v_head_dim: i32,
    #[serde(flatten)]
    rope: RopeConfig,
    #[serde(flatten)]
    experts: experts::Config,
}

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 10_000.0;

/// Epsilon of the norms inside of attention, a constant of the reference implementation.
const LATENT_EPS: f32 = 1e-6;

impl Config {
    fn rope(&self) -> Rope {
        // Only the rotated part of a head is passed to it.
        let rope = RopeConfig { rope_traditional: true, ..self.rope.clone() };
        rope.rope(self.qk_rope_head_dim, ROPE_THETA)
    }

    /// Factor of the scores. YaRN sharpens them in its own way.
    fn scale(&self) -> f32 {
        let scale = ((self.qk_nope_head_dim + self.qk_rope_head_dim) as f32).powf(-0.5);
        match self.rope.parameters().map(|parameters| &parameters.scaling) {
            Some(&Scaling::Yarn { sharpening, .. }) => scale * (sharpening * sharpening) as f32,
            _ => scale,
        }
    }

    fn attention(&self) -> LatentConfig {
        LatentConfig {
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            latent: self.kv_lora_rank,
            query_rank: self.q_lora_rank,
            nope: self.qk_nope_head_dim,
            rotated: self.qk_rope_head_dim,
            values: self.v_head_dim,
            scale: self.scale(),
            rope: Some(self.rope()),
        }
    }
}

/// Shape of a layer with latent attention.
#[derive(Debug, Clone)]
pub(super) struct LatentConfig {
    pub hidden: i32,
    pub heads: i32,
    /// Size of the latent.
    pub latent: i32,
    /// Size that queries pass through, if they do.
    pub query_rank: Option<i32>,
    /// The part of a head's query and key that is made of the latent, and the part that all heads share.
    pub nope: i32,
    pub rotated: i32,
    /// Size of a head's values.
    pub values: i32,
    /// Factor of the scores.
    pub scale: f32,
    /// Rotates the shared part; `None` if the layer does not know positions.
    pub rope: Option<Rope>,
}

struct DeepSeek {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
}

/// `x + self_attn(norm x)`, then `x + mlp(norm x)`.
struct Layer {
    input_layernorm: RmsNorm,
    self_attn: LatentAttention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

/// Multi-head latent attention.
pub(super) struct LatentAttention {
    queries: Queries,
    /// [L + P, D]: the latent, and the rotated part of the keys.
    kv_a_proj_with_mqa: Linear,
    kv_a_layernorm: RmsNorm,
    /// [H, N, L]: from a query to what it is compared with in a latent.
    embed_q: Array,
    /// [H, L, V]: from a mixture of latents to a value.
    unembed_out: Array,
    o_proj: Linear,
    rope: Option<Rope>,
    scores: Scores,
    heads: i32,
    latent: i32,
    nope: i32,
}

/// Queries, [H (N + P), D].
#[allow(clippy::large_enum_variant, reason = "there is one in a layer")]
enum Queries {
    Direct(Linear),
    /// `b(norm(a x))`
    LowRank {
        a: Linear,
        norm: RmsNorm,
        b: Linear,
    },
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    let eps = config.rms_norm_eps;
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for i in 0..config.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        layers.push(Layer {
            input_layernorm: weights.norm(&at("input_layernorm"), eps)?,
            self_attn: LatentAttention::load(config.attention(), weights, &at("self_attn"))?,
            post_attention_layernorm: weights.norm(&at("post_attention_layernorm"), eps)?,
            mlp: config.experts.load(weights, &at("mlp"), true)?,
        });
    }
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    Ok(Box::new(DeepSeek {
        layers,
        norm: weights.norm("model.norm", eps)?,
        lm_head: weights.lm_head(&embed_tokens, config.tie_word_embeddings)?,
        embed_tokens,
    }))
}

impl LatentConfig {
    /// How a layer is cut among ranks: by heads. All ranks have the latents.
    fn cuts(&self) -> [(&'static str, Cut); 6] {
        [
            ("q_proj", Cut::Outputs(self.heads)),
            ("q_b_proj", Cut::Outputs(self.heads)),
            ("kv_b_proj", Cut::Outputs(self.heads)),
            ("embed_q", Cut::Stack(self.heads)),
            ("unembed_out", Cut::Stack(self.heads)),
            ("o_proj", Cut::Inputs(self.heads)),
        ]
    }
}

impl LatentAttention {
    pub fn load(config: LatentConfig, weights: &mut Weights, at: &str) -> Result<Self> {
        weights.cut(at, config.cuts());
        let at = |name: &str| format!("{at}.{name}");
        let LatentConfig { hidden, heads, latent, query_rank, nope, rotated, values, .. } = config;
        let queries = heads * (nope + rotated);
        let queries = match query_rank {
            None => Queries::Direct(weights.linear_of(&at("q_proj"), [queries, hidden])?),
            Some(rank) => Queries::LowRank {
                a: weights.linear_of(&at("q_a_proj"), [rank, hidden])?,
                norm: weights.norm_of(&at("q_a_layernorm"), LATENT_EPS, &[rank])?,
                b: weights.linear_of(&at("q_b_proj"), [queries, rank])?,
            },
        };
        // Published as one matrix, and by MLX's converter as two stacks.
        let published = at("kv_b_proj");
        let (embed_q, unembed_out) = if weights.has(&format!("{published}.weight")) {
            let rows = heads * (nope + values);
            let both = weights.linear_of(&published, [rows, latent])?.dense()?;
            let parts = both.reshape(&[-1, nope + values, latent])?.split_at_indices(&[nope], 1)?;
            (parts[0].clone(), parts[1].swap_axes(1, 2)?)
        } else {
            let embed_q = weights.stack_of(&at("embed_q"), heads, [latent, nope])?.dense()?;
            let unembed_out =
                weights.stack_of(&at("unembed_out"), heads, [values, latent])?.dense()?;
            (embed_q.swap_axes(1, 2)?, unembed_out.swap_axes(1, 2)?)
        };
        let kv_a = latent + rotated;
        Ok(Self {
            queries,
            kv_a_proj_with_mqa: weights.linear_of(&at("kv_a_proj_with_mqa"), [kv_a, hidden])?,
            kv_a_layernorm: weights.norm_of(&at("kv_a_layernorm"), LATENT_EPS, &[latent])?,
            embed_q: embed_q.contiguous()?,
            unembed_out: unembed_out.contiguous()?,
            o_proj: weights.linear_of(&at("o_proj"), [hidden, heads * values])?,
            rope: config.rope,
            scores: Scores { scale: config.scale, softcap: None, sinks: None },
            heads: weights.ranks().share(heads),
            latent,
            nope,
        })
    }

    pub fn new_cache(&self) -> LayerCache {
        let rotated = self.kv_a_proj_with_mqa.shape()[0] - self.latent;
        LayerCache::attention(1, self.latent + rotated, None)
    }

    /// `x` [1, R, D], same shape back. Advances entry `layer` of each span's cache.
    pub fn forward(&self, x: &Array, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        let &Self { heads, latent, nope, .. } = self;
        let rows = x.dim(1);
        let rotate = |x: &Array, spans: &[Span<'_>]| match &self.rope {
            Some(rope) => rope.forward(x, spans),
            None => Ok(x.clone()),
        };
        let q = match &self.queries {
            Queries::Direct(q_proj) => q_proj.forward(x)?,
            Queries::LowRank { a, norm, b } => b.forward(&norm.forward(&a.forward(x)?)?)?,
        };
        let q = q.reshape(&[1, rows, heads, -1])?.split_at_indices(&[nope], 3)?;
        // [1, R, H, N] times [H, N, L], head by head.
        let compared = matmul(q[0].swap_axes(1, 2)?, &self.embed_q)?.swap_axes(1, 2)?;
        let q = concatenate(&[compared, rotate(&q[1], spans)?], 3)?;

        let kv = self.kv_a_proj_with_mqa.forward(x)?.split_at_indices(&[latent], 2)?;
        let rotated = rotate(&kv[1].reshape(&[1, rows, 1, -1])?, spans)?;
        let latents = self.kv_a_layernorm.forward(&kv[0])?.reshape(&[1, rows, 1, latent])?;
        let k = concatenate(&[latents, rotated], 3)?;

        let mixed = attention([&q, &k, &k], &self.scores, spans, layer)?;
        let mixed = mixed.reshape(&[1, rows, heads, -1])?.try_index((.., .., .., ..latent))?;
        let y = matmul(mixed.swap_axes(1, 2)?, &self.unembed_out)?.swap_axes(1, 2)?;
        self.o_proj.forward(&y.reshape(&[1, rows, -1])?)
    }
}

impl Model for DeepSeek {
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
