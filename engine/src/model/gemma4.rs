//! Gemma 4: layers with a sliding window and layers with full attention, which differ in head
//! dimension and rotation. In small models the last layers reuse the keys and values of earlier
//! ones, and each layer has its own embedding of the token. One model has experts beside a
//! feed-forward block that serves all rows.
//!
//! Reads checkpoints of Hugging Face (text-only, or the language part of a multimodal one) and of
//! MLX's converter. Unlike in Gemma 3, norms are plain factors.
//!
//! Source: `transformers` `models/gemma4`; mlx-lm `models/gemma4_text.py`, checked by the reference
//! logits in `tests/fixtures`.

use std::collections::HashMap;

use mlx_rs::Array;
use mlx_rs::fast::rms_norm;
use mlx_rs::ops::indexing::{TryIndexOp, take_along_axis};
use mlx_rs::ops::{argpartition_axis, softmax_axis};
use serde::Deserialize;
use serde_json::Value;

use super::{Cut, Model, Weights, experts};
use crate::cache::{Cache, LayerCache, Span};
use crate::error::Result;
use crate::nn::{
    Embedding, Experts, Gate, GatedMlp, Linear, RmsNorm, Rope, RopeConfig, RopeParameters, Scaling,
    Scores, attend_appended, attention, geglu, scaled, softcap,
};
use crate::ranks::Ranks;

/// `text_config` of `config.json`, or all of it in text-only checkpoints. Defaults are those of
/// mlx-lm.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: usize,
    num_attention_heads: i32,
    num_key_value_heads: i32,
    head_dim: i32,
    rms_norm_eps: f32,
    sliding_window: i32,
    /// Every `n`th layer uses full attention if there are no `layer_types`.
    sliding_window_pattern: usize,
    layer_types: Option<Vec<String>>,
    /// By kind of layer.
    rope_parameters: Option<HashMap<String, RopeParameters>>,
    /// Head dimension of full attention, if it differs.
    global_head_dim: Option<i32>,
    /// Sizes of single layers, by index; replaces the keys of full attention since transformers 5.23.
    per_layer_config: Option<HashMap<String, LayerConfig>>,
    /// Key heads of full attention if its values are its keys.
    num_global_key_value_heads: Option<i32>,
    /// Whether the values of full attention are its keys.
    attention_k_eq_v: bool,
    /// Number of last layers that reuse the keys and values of earlier ones.
    num_kv_shared_layers: usize,
    /// Dimension of a token's embedding for each layer; 0 if there is none.
    hidden_size_per_layer_input: i32,
    /// Tokens that have one.
    vocab_size_per_layer_input: Option<i32>,
    final_logit_softcapping: Option<f32>,
    tie_word_embeddings: bool,
    enable_moe_block: bool,
    num_experts: Option<usize>,
    /// Experts a row.
    top_k_experts: Option<i32>,
}

/// The sizes of a layer that differ from those of the others.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
struct LayerConfig {
    head_dim: Option<i32>,
    num_key_value_heads: Option<i32>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            hidden_size: 1536,
            num_hidden_layers: 35,
            num_attention_heads: 8,
            num_key_value_heads: 1,
            head_dim: 256,
            rms_norm_eps: 1e-6,
            sliding_window: 512,
            sliding_window_pattern: 5,
            layer_types: None,
            rope_parameters: None,
            global_head_dim: Some(512),
            per_layer_config: None,
            num_global_key_value_heads: None,
            attention_k_eq_v: false,
            num_kv_shared_layers: 20,
            hidden_size_per_layer_input: 256,
            vocab_size_per_layer_input: None,
            final_logit_softcapping: Some(30.0),
            tie_word_embeddings: true,
            enable_moe_block: false,
            num_experts: None,
            top_k_experts: None,
        }
    }
}

impl Config {
    fn is_sliding(&self, layer: usize) -> bool {
        match self.layer_types.as_ref().and_then(|kinds| kinds.get(layer)) {
            Some(kind) => kind == "sliding_attention",
            None => !(layer + 1).is_multiple_of(self.sliding_window_pattern),
        }
    }

    /// Head dimension and key heads of `layer`.
    fn sizes(&self, layer: usize) -> [i32; 2] {
        let full = !self.is_sliding(layer);
        if let Some(layers) = &self.per_layer_config {
            let own = layers.get(&layer.to_string()).copied().unwrap_or_default();
            let kv_heads = own.num_key_value_heads.unwrap_or(self.num_key_value_heads);
            return [own.head_dim.unwrap_or(self.head_dim), kv_heads];
        }
        let head_dim = self.global_head_dim.filter(|_| full);
        let kv_heads = self.num_global_key_value_heads.filter(|_| full && self.attention_k_eq_v);
        [head_dim.unwrap_or(self.head_dim), kv_heads.unwrap_or(self.num_key_value_heads)]
    }

    /// Number of layers with their own keys and values, which are the first ones.
    fn own_kv(&self) -> usize {
        self.num_hidden_layers.saturating_sub(self.num_kv_shared_layers)
    }

    /// The layer that provides the keys and values of `layer`: itself, or the last layer of its kind
    /// that has its own.
    fn source(&self, layer: usize) -> Option<usize> {
        if layer < self.own_kv() {
            return Some(layer);
        }
        let sliding = self.is_sliding(layer);
        (0..self.own_kv()).rev().find(|&earlier| self.is_sliding(earlier) == sliding)
    }

    fn per_layer(&self, weights: &mut Weights) -> Result<Option<PerLayer>> {
        let size = self.hidden_size_per_layer_input;
        if size == 0 {
            return Ok(None);
        }
        let layers = i32::try_from(self.num_hidden_layers).expect("a model has few layers");
        let shape = [self.vocab_size_per_layer_input, Some(layers.saturating_mul(size))];
        let table = weights.embedding_of(PER_LAYER, shape)?;
        let sizes = [layers, size, self.hidden_size];
        Ok(Some(PerLayer::load(weights, table, sizes, self.rms_norm_eps)?))
    }

    fn rope(&self, sliding: bool, head_dim: i32) -> Rope {
        let (kind, theta) =
            if sliding { ("sliding_attention", 1e4) } else { ("full_attention", 1e6) };
        let proportional = || RopeParameters {
            partial_rotary_factor: Some(0.25),
            scaling: Scaling::Proportional { factor: 1.0 },
            ..RopeParameters::default()
        };
        let rope_parameters = match &self.rope_parameters {
            Some(parameters) => parameters.get(kind).cloned(),
            None => (!sliding).then(proportional),
        };
        RopeConfig { rope_parameters, ..RopeConfig::default() }.rope(head_dim, theta)
    }
}

/// Context of the models. Multimodal checkpoints may omit it.
const CONTEXT: u64 = 131_072;

struct Gemma4 {
    embed_tokens: Embedding,
    per_layer: Option<PerLayer>,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
    hidden_size: i32,
    final_logit_softcapping: Option<f32>,
    /// Number of layers with their own keys and values.
    own_kv: usize,
}

struct Layer {
    input_layernorm: RmsNorm,
    self_attn: SelfAttn,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: GatedMlp,
    /// Experts, whose output is added to that of `mlp`.
    moe: Option<Moe>,
    post_feedforward_layernorm: RmsNorm,
    per_layer_input: Option<PerLayerInput>,
    /// [1]
    layer_scalar: Option<Array>,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let text = config.get("text_config").unwrap_or(config);
    let config: Config = weights.config(text)?;
    weights.keep_language_model();
    weights.set_hidden(config.hidden_size);
    let eps = config.rms_norm_eps;
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for i in 0..config.num_hidden_layers {
        layers.push(Layer::load(&config, weights, i)?);
    }
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    Ok(Box::new(Gemma4 {
        per_layer: config.per_layer(weights)?,
        layers,
        norm: weights.norm("model.norm", eps)?,
        lm_head: weights.lm_head(&embed_tokens, config.tie_word_embeddings)?,
        embed_tokens,
        hidden_size: config.hidden_size,
        final_logit_softcapping: config.final_logit_softcapping,
        own_kv: config.own_kv(),
    }))
}

impl Model for Gemma4 {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn context(&self) -> Option<u64> {
        Some(CONTEXT)
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers[..self.own_kv].iter().map(|layer| {
            let attn = &layer.self_attn;
            LayerCache::attention(attn.kv_heads, attn.head_dim, attn.window)
        });
        Ok(Cache::new(layers.collect()))
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        scaled(&self.embed_tokens.forward(tokens)?, (self.hidden_size as f32).sqrt())
    }

    /// [1, R, L, P]
    fn layer_inputs(&self, tokens: &Array, embedded: &Array) -> Result<Option<Array>> {
        self.per_layer.as_ref().map(|per_layer| per_layer.forward(tokens, embedded)).transpose()
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let Layer { input_layernorm, self_attn, post_attention_layernorm, .. } =
            &self.layers[layer];
        let y = self_attn.forward(&input_layernorm.forward(x)?, spans)?;
        Ok(x.add(post_attention_layernorm.forward(&y)?)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let layer = &self.layers[layer];
        let mut y = layer.mlp.forward(&layer.pre_feedforward_layernorm.forward(x)?)?;
        if let Some(moe) = &layer.moe {
            y = moe.post_feedforward_layernorm_1.forward(&y)?.add(moe.forward(x)?)?;
        }
        Ok(x.add(layer.post_feedforward_layernorm.forward(&y)?)?)
    }

    fn end_layer(&self, layer: usize, mut x: Array, inputs: Option<&Array>) -> Result<Array> {
        let Layer { per_layer_input, layer_scalar, .. } = &self.layers[layer];
        if let (Some(own), Some(inputs)) = (per_layer_input, inputs) {
            x = own.forward(&x, &inputs.try_index((.., .., layer as i32))?)?;
        }
        if let Some(scalar) = layer_scalar {
            x = x.multiply(scalar)?;
        }
        Ok(x)
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.norm.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let logits = self.lm_head.forward(hidden)?;
        match self.final_logit_softcapping {
            Some(cap) => softcap(&logits, cap),
            None => Ok(logits),
        }
    }
}

impl Layer {
    fn load(config: &Config, weights: &mut Weights, layer: usize) -> Result<Self> {
        let eps = config.rms_norm_eps;
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let scalar = at("layer_scalar");
        let (hidden, inputs) = (config.hidden_size, config.hidden_size_per_layer_input);
        Ok(Self {
            input_layernorm: weights.norm(&at("input_layernorm"), eps)?,
            self_attn: SelfAttn::load(config, weights, layer)?,
            post_attention_layernorm: weights.norm(&at("post_attention_layernorm"), eps)?,
            pre_feedforward_layernorm: weights.norm(&at("pre_feedforward_layernorm"), eps)?,
            mlp: weights.gated_mlp(&at("mlp"), Gate::Gelu)?,
            moe: if config.enable_moe_block {
                Some(Moe::load(config, weights, layer)?)
            } else {
                None
            },
            post_feedforward_layernorm: weights.norm(&at("post_feedforward_layernorm"), eps)?,
            per_layer_input: if config.hidden_size_per_layer_input == 0 {
                None
            } else {
                let post_norm = at("post_per_layer_input_norm");
                Some(PerLayerInput {
                    per_layer_input_gate: weights
                        .linear_of(&at("per_layer_input_gate"), [inputs, hidden])?,
                    per_layer_projection: weights
                        .linear_of(&at("per_layer_projection"), [hidden, inputs])?,
                    post_per_layer_input_norm: weights.norm(&post_norm, eps)?,
                })
            },
            layer_scalar: if weights.has(&scalar) {
                Some(weights.vector(&scalar, 1)?)
            } else {
                None
            },
        })
    }
}

/// Experts, with the additional norms of their layers.
struct Moe {
    post_feedforward_layernorm_1: RmsNorm,
    pre_feedforward_layernorm_2: RmsNorm,
    router: Router,
    experts: Experts,
    post_feedforward_layernorm_2: RmsNorm,
    /// The ranks that have parts of the experts.
    ranks: Ranks,
}

/// Chooses experts by scores of normed rows. Their shares are the softmax over the chosen ones,
/// times a factor of each expert.
struct Router {
    /// `scale`, divided by the square root of D.
    norm: RmsNorm,
    /// [E, D]
    proj: Linear,
    /// [E]
    per_expert_scale: Array,
    top_k: i32,
}

impl Moe {
    fn load(config: &Config, weights: &mut Weights, layer: usize) -> Result<Self> {
        let eps = config.rms_norm_eps;
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let (Some(top_k), Some(count)) = (config.top_k_experts, config.num_experts) else {
            let problem = "top_k_experts or num_experts is missing, but enable_moe_block is set";
            return Err(weights.problem("config.json", problem.into()));
        };
        let stacked = at("experts.switch_glu");
        experts::divide_fused(weights, &at("experts"), &stacked)?;
        let rows = i32::try_from(count).unwrap_or(i32::MAX);
        let scale = weights.vector(&at("router.scale"), config.hidden_size)?;
        let scale = scaled(&scale, (config.hidden_size as f32).powf(-0.5))?;
        Ok(Self {
            post_feedforward_layernorm_1: weights.norm(&at("post_feedforward_layernorm_1"), eps)?,
            pre_feedforward_layernorm_2: weights.norm(&at("pre_feedforward_layernorm_2"), eps)?,
            router: Router {
                norm: RmsNorm { weight: scale, eps },
                proj: weights.linear_to(&at("router.proj"), rows)?,
                per_expert_scale: weights.vector(&at("router.per_expert_scale"), rows)?,
                top_k,
            },
            experts: Experts(weights.gated_experts(&stacked, Gate::Gelu, count)?.into()),
            post_feedforward_layernorm_2: weights.norm(&at("post_feedforward_layernorm_2"), eps)?,
            ranks: weights.ranks().clone(),
        })
    }

    /// `x` [1, R, D], same shape back.
    fn forward(&self, x: &Array) -> Result<Array> {
        let (chosen, shares) = self.router.forward(x)?;
        let normed = self.pre_feedforward_layernorm_2.forward(x)?;
        let y = self.ranks.sum(self.experts.sum(&normed, &chosen, &shares)?)?;
        self.post_feedforward_layernorm_2.forward(&y)
    }
}

impl Router {
    /// Chosen experts of `x` [1, R, D] and their shares, [1, R, K] each.
    fn forward(&self, x: &Array) -> Result<(Array, Array)> {
        let scores = self.proj.forward(&self.norm.forward(x)?)?;
        let order = argpartition_axis(&scores, -self.top_k, -1)?;
        let chosen = order.try_index((.., .., -self.top_k..))?;
        let shares = softmax_axis(take_along_axis(&scores, &chosen, -1)?, -1, true)?;
        let shares = shares.multiply(self.per_expert_scale.take_axis(&chosen, 0)?)?;
        Ok((chosen, shares))
    }
}

/// Inputs of each layer from the tokens, besides the hidden states.
pub(super) struct PerLayer {
    /// [V, L * P]: an embedding for each layer, side by side.
    embed_tokens_per_layer: Embedding,
    per_layer_model_projection: Linear,
    per_layer_projection_norm: RmsNorm,
    layers: i32,
    /// P
    size: i32,
}

/// The name of [`PerLayer::embed_tokens_per_layer`].
pub(super) const PER_LAYER: &str = "model.embed_tokens_per_layer";

impl PerLayer {
    /// Takes what belongs to the embedding [V, L P] of layers, in a model with hidden states of the size `hidden`.
    pub fn load(
        weights: &mut Weights,
        embed_tokens_per_layer: Embedding,
        [layers, size, hidden]: [i32; 3],
        eps: f32,
    ) -> Result<Self> {
        let (projection, width) =
            ("model.per_layer_model_projection", embed_tokens_per_layer.0.shape()[1]);
        Ok(Self {
            embed_tokens_per_layer,
            per_layer_model_projection: weights.linear_of(projection, [width, hidden])?,
            per_layer_projection_norm: weights.norm_of(
                "model.per_layer_projection_norm",
                eps,
                &[size],
            )?,
            layers,
            size,
        })
    }

    /// [1, R, L, P] of `tokens` [R] and their scaled embeddings `x` [1, R, D].
    pub fn forward(&self, tokens: &Array, x: &Array) -> Result<Array> {
        let shape = [1, x.dim(1), self.layers, self.size];
        let embedded = self.embed_tokens_per_layer.forward(tokens)?;
        let embedded = scaled(&embedded, (self.size as f32).sqrt())?.reshape(&shape)?;
        let projected = self.per_layer_model_projection.forward(x)?;
        let projected = scaled(&projected, (x.dim(2) as f32).powf(-0.5))?.reshape(&shape)?;
        let projected = self.per_layer_projection_norm.forward(&projected)?;
        scaled(&projected.add(embedded)?, std::f32::consts::FRAC_1_SQRT_2)
    }
}

/// How one layer adds its input.
struct PerLayerInput {
    per_layer_input_gate: Linear,
    per_layer_projection: Linear,
    post_per_layer_input_norm: RmsNorm,
}

impl PerLayerInput {
    /// `x` [1, R, D] and this layer's `input` [1, R, P]; [1, R, D] back.
    fn forward(&self, x: &Array, input: &Array) -> Result<Array> {
        let gated = geglu(self.per_layer_input_gate.forward(x)?, input.clone())?;
        let y = self.per_layer_projection.forward(&gated)?;
        Ok(x.add(self.post_per_layer_input_norm.forward(&y)?)?)
    }
}

struct SelfAttn {
    q_proj: Linear,
    q_norm: RmsNorm,
    /// `None` if the layer reuses those of another one.
    kv: Option<KvProj>,
    o_proj: Linear,
    rope: Rope,
    /// The cache entry with its keys and values.
    source: usize,
    /// Positions in the window; `None` for full attention.
    window: Option<i32>,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
}

/// Norms of queries and keys replace the scale.
const SCORES: Scores = Scores { scale: 1.0, softcap: None, sinks: None };

/// How attention is cut among ranks, by heads: also in Gemma 3n.
pub(super) fn attention_cuts(heads: i32, kv_heads: i32) -> [(&'static str, Cut); 4] {
    [
        ("q_proj", Cut::Outputs(heads)),
        ("k_proj", Cut::Repeated(kv_heads)),
        ("v_proj", Cut::Repeated(kv_heads)),
        ("o_proj", Cut::Inputs(heads)),
    ]
}

impl SelfAttn {
    fn load(config: &Config, weights: &mut Weights, layer: usize) -> Result<Self> {
        let eps = config.rms_norm_eps;
        let at = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let sliding = config.is_sliding(layer);
        let Some(source) = config.source(layer) else {
            let problem = format!(
                "num_kv_shared_layers: layer {layer} has no earlier layer of its kind to share with"
            );
            return Err(weights.problem("config.json", problem));
        };
        let k_eq_v = config.attention_k_eq_v && !sliding;
        let [head_dim, kv_heads] = config.sizes(layer);
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        weights.cut(&format!("model.layers.{layer}.self_attn"), attention_cuts(heads, kv_heads));
        Ok(Self {
            q_proj: weights.linear_of(&at("q_proj"), [queries, hidden])?,
            q_norm: weights.norm_of(&at("q_norm"), eps, &[head_dim])?,
            kv: if source == layer {
                Some(KvProj {
                    k_proj: weights.linear_of(&at("k_proj"), [keys, hidden])?,
                    v_proj: if k_eq_v {
                        None
                    } else {
                        Some(weights.linear_of(&at("v_proj"), [keys, hidden])?)
                    },
                    k_norm: weights.norm_of(&at("k_norm"), eps, &[head_dim])?,
                })
            } else {
                None
            },
            o_proj: weights.linear_of(&at("o_proj"), [hidden, queries])?,
            rope: config.rope(sliding, head_dim),
            source,
            window: sliding.then_some(config.sliding_window),
            heads: weights.ranks().share(heads),
            kv_heads: weights.ranks().share_or_one(kv_heads),
            head_dim,
        })
    }

    fn forward(&self, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let (rows, h, d) = (x.dim(1), self.heads, self.head_dim);
        let q = self.q_norm.forward(&self.q_proj.forward(x)?.reshape(&[1, rows, h, d])?)?;
        let q = self.rope.forward(&q, spans)?;
        let mixed = if let Some(kv) = &self.kv {
            let (k, v) = kv.forward(x, &[1, rows, self.kv_heads, d])?;
            let k = self.rope.forward(&k, spans)?;
            attention([&q, &k, &v], &SCORES, spans, self.source)?
        } else {
            attend_appended(&q, None, &SCORES, spans, self.source)?
        };
        self.o_proj.forward(&mixed)
    }
}

struct KvProj {
    k_proj: Linear,
    /// `None` if the values are the keys before norm and rotation.
    v_proj: Option<Linear>,
    k_norm: RmsNorm,
}

impl KvProj {
    /// Keys and values of `x`, each of `shape` [1, R, H_kv, D]. Values pass a norm without weights.
    fn forward(&self, x: &Array, shape: &[i32]) -> Result<(Array, Array)> {
        let k = self.k_proj.forward(x)?.reshape(shape)?;
        let v = match &self.v_proj {
            Some(v_proj) => v_proj.forward(x)?.reshape(shape)?,
            None => k.clone(),
        };
        Ok((self.k_norm.forward(&k)?, rms_norm(&v, None, self.k_norm.eps)?))
    }
}
