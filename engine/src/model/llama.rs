//! Llama 1 to 3.3 and models built like it (SmolLM2, TinyLlama, Yi ...): pre-norm blocks of
//! grouped-query attention and SwiGLU.
//!
//! [`Llama`] also runs the families that deviate little, which their files state: windows, biases, norms
//! in other places, experts, other activations, layers without positions. [`SelfAttn`] serves Gemma 2 and
//! 3 and the hybrids as well.
//!
//! Source: arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783; `transformers` `models/llama`;
//! mlx-lm `models/llama.py`, checked by the reference logits in `tests/fixtures`.

use mlx_rs::ops::{arange, floor, log1p};
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{Cut, Model, Weights};
use crate::cache::{Cache, LayerCache, Span};
use crate::error::Result;
use crate::nn::{
    Embedding, Gate, Heads, Input, Joined, Linear, Mlp, Outputs, RmsNorm, Rope, RopeConfig, Scores,
    attention, by_span, mean_square, scaled,
};
use crate::ranks::Ranks;

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
            rope: Some(self.rope.rope(head_dim, theta)),
            norm_after_rope: false,
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
    let whole = config.attention(ROPE_THETA);
    let attention = |layer| AttentionConfig { window: config.window(layer), ..whole.clone() };
    Ok(Box::new(Llama::load(&config, weights, PRE_NORM, attention, dense_mlp)?))
}

/// The feed-forward block at `at` of families without experts.
pub(super) fn dense_mlp(weights: &mut Weights, at: &str) -> Result<Mlp> {
    Ok(Mlp::Dense(weights.gated_mlp(at, Gate::Silu)?.into()))
}

/// Names of a layer's norms, in the order of its computation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Norms {
    pub before_attention: Option<&'static str>,
    pub after_attention: Option<&'static str>,
    pub before_mlp: Option<&'static str>,
    pub after_mlp: Option<&'static str>,
}

/// Norms of the inputs of each block.
pub(super) const PRE_NORM: Norms = Norms {
    before_attention: Some("input_layernorm"),
    after_attention: None,
    before_mlp: Some("post_attention_layernorm"),
    after_mlp: None,
};

/// Norms of the outputs of each block (OLMo 2, EXAONE 4).
pub(super) const POST_NORM: Norms = Norms {
    before_attention: None,
    after_attention: Some("post_attention_layernorm"),
    before_mlp: None,
    after_mlp: Some("post_feedforward_layernorm"),
};

/// A decoder of blocks of attention and a feed-forward block.
pub(super) struct Llama {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
    /// Factor of the embeddings.
    pub embed_scale: Option<f32>,
}

/// `x + norm(self_attn(norm x))`, then `x + norm(mlp(norm x))`, with the norms that the family has.
struct Layer {
    before_attention: Option<RmsNorm>,
    self_attn: SelfAttn,
    after_attention: Option<RmsNorm>,
    before_mlp: Option<RmsNorm>,
    mlp: Mlp,
    after_mlp: Option<RmsNorm>,
}

impl Llama {
    /// `attention` is that of a layer; `mlp` takes the feed-forward block at a name.
    pub fn load(
        config: &Config,
        weights: &mut Weights,
        norms: Norms,
        attention: impl Fn(usize) -> AttentionConfig,
        mlp: impl Fn(&mut Weights, &str) -> Result<Mlp>,
    ) -> Result<Self> {
        let eps = config.rms_norm_eps;
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for i in 0..config.num_hidden_layers {
            let at = |name: &str| format!("model.layers.{i}.{name}");
            let norm = |weights: &mut Weights, name: Option<&str>| {
                name.map(|name| weights.norm(&at(name), eps)).transpose()
            };
            layers.push(Layer {
                before_attention: norm(weights, norms.before_attention)?,
                self_attn: SelfAttn::load(weights, &at("self_attn"), attention(i))?,
                after_attention: norm(weights, norms.after_attention)?,
                before_mlp: norm(weights, norms.before_mlp)?,
                mlp: mlp(weights, &at("mlp"))?,
                after_mlp: norm(weights, norms.after_mlp)?,
            });
        }
        let embed_tokens = weights.embedding("model.embed_tokens")?;
        Ok(Self {
            layers,
            norm: weights.norm("model.norm", eps)?,
            lm_head: weights.lm_head(&embed_tokens, config.tie_word_embeddings)?,
            embed_tokens,
            embed_scale: None,
        })
    }
}

/// `norm(x)`, or `x` if there is no norm.
fn normed(norm: &Option<RmsNorm>, x: &Array) -> Result<Array> {
    match norm {
        Some(norm) => norm.forward(x),
        None => Ok(x.clone()),
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
        let embedded = self.embed_tokens.forward(tokens)?;
        self.embed_scale.map_or(Ok(embedded.clone()), |scale| scaled(&embedded, scale))
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let Layer { before_attention, self_attn, after_attention, .. } = &self.layers[layer];
        if let (Some(norm), None) = (before_attention, after_attention) {
            return self_attn.residual(x, norm, spans, layer);
        }
        let y = self_attn.forward(&normed(before_attention, x)?, spans, layer)?;
        Ok(x.add(normed(after_attention, &y)?)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let Layer { before_mlp, mlp, after_mlp, .. } = &self.layers[layer];
        if let (Some(norm), None) = (before_mlp, after_mlp) {
            return mlp.residual(x, norm);
        }
        let y = mlp.forward(&normed(before_mlp, x)?)?;
        Ok(x.add(normed(after_mlp, &y)?)?)
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
    /// `None` if the layer does not know positions (arXiv:2305.19466).
    pub rope: Option<Rope>,
    /// Whether queries and keys are rotated before their norms.
    pub norm_after_rope: bool,
    /// Growth of queries with their position.
    pub growth: Option<Growth>,
    pub scores: Scores,
    /// Positions in the window; `None` for full attention.
    pub window: Option<i32>,
}

impl AttentionConfig {
    /// How a layer is cut among ranks: by heads.
    fn cuts(&self) -> [(&'static str, Cut); 5] {
        [
            ("q_proj", Cut::Outputs(self.heads)),
            ("k_proj", Cut::Repeated(self.kv_heads)),
            ("v_proj", Cut::Repeated(self.kv_heads)),
            ("sinks", Cut::Outputs(self.heads)),
            ("o_proj", Cut::Inputs(self.heads)),
        ]
    }

    /// How norms of all heads together are cut.
    fn norm_cuts(&self) -> [(&'static str, Cut); 2] {
        [("q_norm", Cut::Outputs(self.heads)), ("k_norm", Cut::Repeated(self.kv_heads))]
    }

    /// What one of `ranks` has of the heads.
    fn part(self, ranks: &Ranks) -> Self {
        let (heads, kv_heads) = (ranks.share(self.heads), ranks.share_or_one(self.kv_heads));
        Self { heads, kv_heads, ..self }
    }
}

/// Grouped-query attention (arXiv:2305.13245).
pub(super) struct SelfAttn {
    /// `q_proj`, `k_proj` and `v_proj`.
    qkv: Joined<3>,
    o_proj: Linear,
    /// Norms of queries and keys, if the checkpoint has them: [D], of each head (Qwen3, Gemma 3), or
    /// [H D], of all heads together (OLMo 2).
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    /// Whether the norms are of all heads together.
    norms_are_whole: bool,
    /// The configuration of the heads that this rank has.
    config: AttentionConfig,
    ranks: Ranks,
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
    /// Takes the layer at `at`, with norms, biases and sinks if the checkpoint has them.
    pub fn load(weights: &mut Weights, at: &str, mut config: AttentionConfig) -> Result<Self> {
        let AttentionConfig { hidden, heads, kv_heads, head_dim, eps, .. } = config;
        weights.cut(at, config.cuts());
        // Both norms are of each head, or of all heads together.
        let q_norm = weights.get(&format!("{at}.q_norm.weight"));
        let norms_are_whole = q_norm.is_some_and(|norm| norm.shape() != [head_dim]);
        if norms_are_whole {
            weights.cut(at, config.norm_cuts());
        }
        let mut norm = |name: &str, sizes: &[i32]| {
            let name = format!("{at}.{name}");
            let present = weights.has(&format!("{name}.weight"));
            present.then(|| weights.norm_of(&name, eps, sizes)).transpose()
        };
        let q_norm = norm("q_norm", &[head_dim, heads * head_dim])?;
        let size = if norms_are_whole { kv_heads * head_dim } else { head_dim };
        let k_norm = norm("k_norm", &[size])?;
        let sinks = format!("{at}.sinks");
        if weights.has(&sinks) {
            config.scores.sinks = Some(weights.vector(&sinks, heads)?);
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
            norms_are_whole,
            config: config.part(weights.ranks()),
            ranks: weights.ranks().clone(),
        })
    }

    pub fn new_cache(&self) -> LayerCache {
        LayerCache::attention(self.config.kv_heads, self.config.head_dim, self.config.window)
    }

    /// `x` [1, R, D], same shape back. Advances entry `layer` of each span's cache.
    pub fn forward(&self, x: &Array, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        self.o_proj.forward(&self.mix(self.qkv.outputs(Input::Rows(x))?, spans, layer)?)
    }

    /// `x + self_attn(norm x)`, as [`SelfAttn::forward`].
    pub fn residual(
        &self,
        x: &Array,
        norm: &RmsNorm,
        spans: &mut [Span<'_>],
        layer: usize,
    ) -> Result<Array> {
        let mixed = self.mix(self.qkv.outputs(Input::Normed(x, norm.view()))?, spans, layer)?;
        self.o_proj.apply(Input::Rows(&mixed), Some(x))
    }

    /// Attention of projected rows, [1, R, H_q D].
    fn mix(&self, projected: Outputs<3>, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        let norms_are_usual =
            !self.norms_are_whole && (!self.config.norm_after_rope || self.q_norm.is_none());
        if norms_are_usual && self.config.growth.is_none() {
            let AttentionConfig { heads, kv_heads, head_dim, rope, scores, .. } = &self.config;
            let heads = Heads {
                heads: *heads,
                kv_heads: *kv_heads,
                head_dim: *head_dim,
                gated: false,
                q_norm: self.q_norm.as_ref(),
                k_norm: self.k_norm.as_ref(),
                rope: rope.as_ref(),
            };
            return heads.attend(projected, &self.qkv, scores, spans, layer);
        }
        let &AttentionConfig { heads: h, kv_heads: h_kv, head_dim: d, ref rope, .. } = &self.config;
        let [q, k, v] = self.qkv.split(projected)?;
        let rows = q.dim(1);
        let heads = |x: &Array, norm: &Option<RmsNorm>, heads: i32| -> Result<Array> {
            let shape = [1, rows, heads, d];
            match norm {
                Some(norm) if self.norms_are_whole => {
                    Ok(self.norm_whole(norm, x)?.reshape(&shape)?)
                }
                Some(norm) if !self.config.norm_after_rope => norm.forward(&x.reshape(&shape)?),
                _ => Ok(x.reshape(&shape)?),
            }
        };
        let [mut q, mut k] = [heads(&q, &self.q_norm, h)?, heads(&k, &self.k_norm, h_kv)?];
        let v = v.reshape(&[1, rows, h_kv, d])?;
        if let Some(rope) = rope {
            (q, k) = (rope.forward(&q, spans)?, rope.forward(&k, spans)?);
        }
        if self.config.norm_after_rope {
            (q, k) = (normed(&self.q_norm, &q)?, normed(&self.k_norm, &k)?);
        }
        if let Some(growth) = self.config.growth {
            q = by_span([q], spans, |[q], span| {
                Ok(q.multiply(growth.factors(span.offset(), span.rows, q.dtype())?)?)
            })?;
        }
        attention([&q, &k, &v], &self.config.scores, spans, layer)
    }

    /// The norm of all heads together, of which `x` [1, R, H D] has those of this rank.
    fn norm_whole(&self, norm: &RmsNorm, x: &Array) -> Result<Array> {
        if !self.ranks.are_several() {
            return norm.forward(x);
        }
        // Heads of keys that ranks share are in it as often as one another.
        norm.forward_by(x, &self.ranks.mean(mean_square(x)?)?)
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
