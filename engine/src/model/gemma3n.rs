//! Gemma 3n, the text part: several streams of hidden states of which each layer computes one and predicts the
//! others (AltUp), a low-rank map beside attention (LAuReL), an embedding of the token for each layer,
//! activations of which a few are kept, and last layers that reuse the keys and values of earlier ones.
//!
//! Hidden states between layers are the A streams side by side, [1, R, A D]. Within a layer the result of the
//! computed stream follows them, so that a pass may leave its feed-forward block out.
//!
//! # Why
//! Coefficients are not clipped to `altup_coef_clip`, and magnitudes are at least the root of 1e-5, as in
//! `transformers`; mlx-lm clips, which changes no trained model, and has no least magnitude.
//!
//! Source: `transformers` `models/gemma3n`; AltUp (arXiv:2301.13310), LAuReL (arXiv:2411.07501); mlx-lm
//! `models/gemma3n.py`, checked by the reference logits in `tests/fixtures`.

use std::collections::HashMap;

use mlx_rs::fast::rms_norm;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, erfinv, matmul, maximum, select, tanh};
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::gemma4::{PER_LAYER, PerLayer, attention_cuts};
use super::{Model, Weights};
use crate::cache::{Cache, LayerCache, Span};
use crate::error::Result;
use crate::nn::{
    Embedding, Gate, GatedMlp, Linear, RmsNorm, Rope, RopeConfig, RopeParameters, Scores,
    attend_appended, attention, geglu, scaled, softcap,
};
use crate::ranks::Ranks;

/// `text_config` of `config.json`, or all of it in text-only checkpoints. Defaults are those of
/// `transformers`.
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
    /// Without them every fifth layer uses full attention.
    layer_types: Option<Vec<String>>,
    /// Base of the rotary embedding of full attention.
    rope_theta: f32,
    rope_local_base_freq: f32,
    rope_scaling: Option<RopeParameters>,
    /// By kind of layer; replaces these three since transformers 5.
    rope_parameters: HashMap<String, RopeParameters>,
    /// Number of last layers that reuse the keys and values of earlier ones.
    num_kv_shared_layers: usize,
    /// Dimension of a token's embedding for each layer, and tokens that have one.
    hidden_size_per_layer_input: i32,
    vocab_size_per_layer_input: u32,
    final_logit_softcapping: Option<f32>,
    /// Share of a layer's activations that become 0; one for all layers, or one for each.
    activation_sparsity_pattern: Option<Sparsity>,
    /// A, the number of streams, and the one that layers compute.
    altup_num_inputs: i32,
    altup_active_idx: i32,
    altup_correct_scale: bool,
    laurel_rank: i32,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Sparsity {
    Each(Vec<f32>),
    All(f32),
}

impl Default for Config {
    fn default() -> Self {
        Self {
            hidden_size: 2048,
            num_hidden_layers: 35,
            num_attention_heads: 8,
            num_key_value_heads: 2,
            head_dim: 256,
            rms_norm_eps: 1e-6,
            sliding_window: 512,
            layer_types: None,
            rope_theta: 1_000_000.0,
            rope_local_base_freq: 10_000.0,
            rope_scaling: None,
            rope_parameters: HashMap::new(),
            num_kv_shared_layers: 15,
            hidden_size_per_layer_input: 256,
            vocab_size_per_layer_input: 262_144,
            final_logit_softcapping: Some(30.0),
            activation_sparsity_pattern: None,
            altup_num_inputs: 4,
            altup_active_idx: 0,
            altup_correct_scale: true,
            laurel_rank: 64,
        }
    }
}

/// Every `n`th layer uses full attention if there are no `layer_types`.
const FULL_ATTENTION_INTERVAL: usize = 5;

/// Layers that are sparse, and how sparse, if the config does not say it and there are more layers than these.
const SPARSE_LAYERS: (usize, f32) = (10, 0.95);

/// The least mean square of a stream.
const LEAST_MEAN_SQUARE: f32 = 1e-5;

/// Context of the models. Multimodal checkpoints may omit it.
const CONTEXT: u64 = 32_768;

impl Config {
    fn problem(&self) -> Option<&'static str> {
        let (streams, active) = (self.altup_num_inputs, self.altup_active_idx);
        if !(1..=64).contains(&streams) || !(0..streams).contains(&active) {
            return Some(
                "altup_num_inputs must be from 1 to 64, and altup_active_idx less than it",
            );
        }
        let is_share = |layer| (0.0..1.0).contains(&self.sparsity(layer));
        let in_range = (0..self.num_hidden_layers).all(is_share);
        (!in_range).then_some("activation_sparsity_pattern must be from 0 to less than 1")
    }

    fn is_sliding(&self, layer: usize) -> bool {
        match self.layer_types.as_ref().and_then(|kinds| kinds.get(layer)) {
            Some(kind) => kind == "sliding_attention",
            None => !(layer + 1).is_multiple_of(FULL_ATTENTION_INTERVAL),
        }
    }

    fn sparsity(&self, layer: usize) -> f32 {
        match &self.activation_sparsity_pattern {
            Some(Sparsity::Each(shares)) => shares.get(layer).copied().unwrap_or(0.0),
            Some(Sparsity::All(share)) => *share,
            None if self.num_hidden_layers > SPARSE_LAYERS.0 && layer < SPARSE_LAYERS.0 => {
                SPARSE_LAYERS.1
            }
            None => 0.0,
        }
    }

    /// Number of layers with their own keys and values, which are the first ones.
    fn own_kv(&self) -> usize {
        self.num_hidden_layers.saturating_sub(self.num_kv_shared_layers)
    }

    /// The layer that provides the keys and values of `layer`: itself, or the last layer of its kind that has its
    /// own.
    fn source(&self, layer: usize) -> Option<usize> {
        if layer < self.own_kv() {
            return Some(layer);
        }
        let sliding = self.is_sliding(layer);
        (0..self.own_kv()).rev().find(|&earlier| self.is_sliding(earlier) == sliding)
    }

    fn per_layer(&self, weights: &mut Weights) -> Result<PerLayer> {
        let layers = i32::try_from(self.num_hidden_layers).expect("a model has few layers");
        let size = self.hidden_size_per_layer_input;
        let rows = i32::try_from(self.vocab_size_per_layer_input).unwrap_or(i32::MAX);
        // Not an embedding that bounds the tokens.
        let table = weights.linear_of(PER_LAYER, [rows, layers.saturating_mul(size)])?;
        let sizes = [layers, size, self.hidden_size];
        PerLayer::load(weights, Embedding(table), sizes, self.rms_norm_eps)
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

struct Gemma3n {
    embed_tokens: Embedding,
    per_layer: PerLayer,
    /// From the embedding to each stream but the first, and back after the layers.
    altup_projections: Vec<Linear>,
    altup_unembed_projections: Vec<Linear>,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// The embeddings.
    lm_head: Linear,
    config: Config,
    ranks: Ranks,
}

struct Layer {
    altup: AltUp,
    laurel: Laurel,
    input_layernorm: RmsNorm,
    self_attn: SelfAttn,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: GatedMlp,
    /// Standard deviations above the mean from which a gate is kept, in sparse layers.
    cutoff: Option<f32>,
    post_feedforward_layernorm: RmsNorm,
    per_layer_input_gate: Linear,
    per_layer_projection: Linear,
    post_per_layer_input_norm: RmsNorm,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let text = config.get("text_config").unwrap_or(config);
    let config: Config = weights.config(text)?;
    if let Some(problem) = config.problem() {
        return Err(weights.problem("config.json", problem.into()));
    }
    weights.keep_language_model();
    weights.set_hidden(config.hidden_size);
    let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for i in 0..config.num_hidden_layers {
        layers.push(Layer::load(&config, weights, i)?);
    }
    let mut projections = |name: &str| -> Result<Vec<Linear>> {
        (1..config.altup_num_inputs)
            .map(|i| weights.linear_of(&format!("model.{name}.{}", i - 1), [hidden, hidden]))
            .collect()
    };
    let altup_projections = projections("altup_projections")?;
    let altup_unembed_projections = projections("altup_unembed_projections")?;
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    Ok(Box::new(Gemma3n {
        altup_projections,
        altup_unembed_projections,
        per_layer: config.per_layer(weights)?,
        layers,
        norm: weights.norm("model.norm", eps)?,
        lm_head: weights.lm_head(&embed_tokens, true)?,
        embed_tokens,
        config,
        ranks: weights.ranks().clone(),
    }))
}

impl Gemma3n {
    /// The streams of `x` [1, R, A D].
    fn streams(&self, x: &Array) -> Result<Vec<Array>> {
        Ok(x.split_equal(self.config.altup_num_inputs, 2)?)
    }
}

impl Model for Gemma3n {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn context(&self) -> Option<u64> {
        Some(CONTEXT)
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers[..self.config.own_kv()].iter().map(|layer| {
            let attn = &layer.self_attn;
            LayerCache::attention(attn.kv_heads, attn.head_dim, attn.window)
        });
        Ok(Cache::new(layers.collect()))
    }

    /// [1, R, A D]
    fn embed(&self, tokens: &Array) -> Result<Array> {
        let embedded = self.embed_tokens.forward(tokens)?;
        let first = scaled(&embedded, (self.config.hidden_size as f32).sqrt())?;
        let mut streams = vec![first.clone()];
        for projection in &self.altup_projections {
            streams.push(with_magnitude_of(&first, &projection.forward(&first)?)?);
        }
        Ok(concatenate(&streams, 2)?)
    }

    /// [1, R, L, P]
    fn layer_inputs(&self, tokens: &Array, embedded: &Array) -> Result<Option<Array>> {
        let first = embedded.try_index((.., .., ..self.config.hidden_size))?;
        // Tokens beyond the table have the embedding of token 0.
        let beyond = Array::from_slice(&[self.config.vocab_size_per_layer_input], &[1]);
        let tokens = select(tokens.lt(&beyond)?, tokens, Array::from_slice(&[0u32], &[1]))?;
        Ok(Some(self.per_layer.forward(&tokens, &first)?))
    }

    /// [1, R, (A + 1) D]
    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let layer = &self.layers[layer];
        let mut streams = layer.altup.predict(&self.streams(x)?)?;
        let active = &streams[layer.altup.active];
        let normed = layer.input_layernorm.forward(active)?;
        let attn = layer.self_attn.forward(&normed, spans)?;
        let attn = active.add(layer.post_attention_layernorm.forward(&attn)?)?;
        let both = attn.add(layer.laurel.forward(&normed)?)?;
        streams.push(scaled(&both, std::f32::consts::FRAC_1_SQRT_2)?);
        Ok(concatenate(&streams, 2)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let layer = &self.layers[layer];
        let parts = x.split_at_indices(&[x.dim(2) - self.config.hidden_size], 2)?;
        let normed = layer.pre_feedforward_layernorm.forward(&parts[1])?;
        let y = match layer.cutoff {
            None => layer.mlp.forward(&normed)?,
            Some(cutoff) => {
                let [gate, up] = layer.mlp.gate_up.forward(&normed)?;
                let kept = above(&gate, cutoff, &self.ranks)?;
                layer.mlp.down_proj.forward(&geglu(kept, up)?)?
            }
        };
        let y = parts[1].add(layer.post_feedforward_layernorm.forward(&y)?)?;
        Ok(concatenate(&[&parts[0], &y], 2)?)
    }

    /// [1, R, A D]
    fn end_layer(&self, index: usize, x: Array, inputs: Option<&Array>) -> Result<Array> {
        let layer = &self.layers[index];
        let parts = x.split_at_indices(&[x.dim(2) - self.config.hidden_size], 2)?;
        let mut streams = layer.altup.correct(&self.streams(&parts[0])?, &parts[1])?;
        let inputs = inputs.expect("`layer_inputs` makes them");
        let input = inputs.try_index((.., .., index as i32))?;
        let first = layer.altup.output(&streams[layer.altup.active])?;
        let gated = geglu(layer.per_layer_input_gate.forward(&first)?, input)?;
        let y = layer.per_layer_projection.forward(&gated)?;
        let y = layer.post_per_layer_input_norm.forward(&y)?;
        for stream in &mut streams[1..] {
            *stream = stream.add(&y)?;
        }
        Ok(concatenate(&streams, 2)?)
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        let streams = self.streams(x)?;
        let mut sum = streams[0].clone();
        for (projection, stream) in self.altup_unembed_projections.iter().zip(&streams[1..]) {
            sum = sum.add(with_magnitude_of(&streams[0], &projection.forward(stream)?)?)?;
        }
        self.norm.forward(&scaled(&sum, 1.0 / self.config.altup_num_inputs as f32)?)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        let logits = self.lm_head.forward(hidden)?;
        match self.config.final_logit_softcapping {
            Some(cap) => softcap(&logits, cap),
            None => Ok(logits),
        }
    }
}

/// Mean square of each row, [1, R, 1], in `x`'s dtype.
fn mean_square(x: &Array) -> Result<Array> {
    Ok(x.square()?.mean_axis(-1, true)?)
}

/// `x` with the magnitude that the same row of `other` has; both [1, R, D].
fn with_magnitude_of(other: &Array, x: &Array) -> Result<Array> {
    let least = Array::from_f32(LEAST_MEAN_SQUARE).as_dtype(x.dtype())?;
    let own = maximum(mean_square(x)?, least)?.sqrt()?;
    Ok(x.multiply(mean_square(other)?.sqrt()?.divide(own)?)?)
}

/// What `x` [1, R, F] has above the mean of its row and `cutoff` standard deviations. Each of `ranks` has a part of the row.
fn above(x: &Array, cutoff: f32, ranks: &Ranks) -> Result<Array> {
    let mean = ranks.mean(x.mean_axis(-1, true)?)?;
    let deviation = ranks.mean(mean_square(&x.subtract(&mean)?)?)?.sqrt()?;
    let least = mean.add(scaled(&deviation, cutoff)?)?;
    Ok(maximum(x.subtract(least)?, Array::from_f32(0.0).as_dtype(x.dtype())?)?)
}

impl Layer {
    fn load(config: &Config, weights: &mut Weights, layer: usize) -> Result<Self> {
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let (inputs, rank) = (config.hidden_size_per_layer_input, config.laurel_rank);
        Ok(Self {
            altup: AltUp::load(config, weights, &at("altup"))?,
            laurel: Laurel {
                linear_left: weights.linear_of(&at("laurel.linear_left"), [rank, hidden])?,
                linear_right: weights.linear_of(&at("laurel.linear_right"), [hidden, rank])?,
                post_laurel_norm: weights.norm_of(
                    &at("laurel.post_laurel_norm"),
                    eps,
                    &[hidden],
                )?,
            },
            input_layernorm: weights.norm(&at("input_layernorm"), eps)?,
            self_attn: SelfAttn::load(config, weights, layer)?,
            post_attention_layernorm: weights.norm(&at("post_attention_layernorm"), eps)?,
            pre_feedforward_layernorm: weights.norm(&at("pre_feedforward_layernorm"), eps)?,
            mlp: weights.gated_mlp(&at("mlp"), Gate::Gelu)?,
            cutoff: cutoff(config.sparsity(layer))?,
            post_feedforward_layernorm: weights.norm(&at("post_feedforward_layernorm"), eps)?,
            per_layer_input_gate: weights
                .linear_of(&at("per_layer_input_gate"), [inputs, hidden])?,
            per_layer_projection: weights
                .linear_of(&at("per_layer_projection"), [hidden, inputs])?,
            post_per_layer_input_norm: weights.norm_of(
                &at("post_per_layer_input_norm"),
                eps,
                &[hidden],
            )?,
        })
    }
}

/// Standard deviations below which the `share` of a normal distribution lies; `None` for no share.
fn cutoff(share: f32) -> Result<Option<f32>> {
    if share == 0.0 {
        return Ok(None);
    }
    let quantile = erfinv(Array::from_f32(2.0 * share - 1.0))?.item_exact::<f32>();
    Ok(Some(std::f32::consts::SQRT_2 * quantile))
}

/// Alternating updates: a layer computes one of the streams. Those after it are predicted as mixtures of those before
/// it, and corrected by what the computed one differs from its prediction.
struct AltUp {
    router_norm: RmsNorm,
    /// [A, D]
    modality_router: Linear,
    /// f32 [A, A A], transposed.
    prediction_coefs: Array,
    /// f32 [A, A], transposed.
    correction_coefs: Array,
    /// [D], factor of the corrected stream where it meets the layer's input, if there is one.
    correct_output_scale: Option<Array>,
    /// The stream that is computed.
    active: usize,
}

impl AltUp {
    fn load(config: &Config, weights: &mut Weights, at: &str) -> Result<Self> {
        let at = |name: &str| format!("{at}.{name}");
        let (streams, hidden) = (config.altup_num_inputs, config.hidden_size);
        let mut coefficients = |name: &str, rows: i32| -> Result<Array> {
            let matrix = weights.linear_of(&at(name), [rows, streams])?.dense()?;
            Ok(matrix.as_dtype(Dtype::Float32)?.t().contiguous()?)
        };
        let prediction_coefs = coefficients("prediction_coefs", streams * streams)?;
        let correction_coefs = coefficients("correction_coefs", streams)?;
        let scale = at("correct_output_scale");
        Ok(Self {
            prediction_coefs,
            correction_coefs,
            router_norm: weights.norm_of(&at("router_norm"), config.rms_norm_eps, &[hidden])?,
            modality_router: weights.linear_of(&at("modality_router"), [streams, hidden])?,
            correct_output_scale: if config.altup_correct_scale {
                Some(weights.vector(&scale, hidden)?)
            } else {
                None
            },
            active: usize::try_from(config.altup_active_idx).expect("checked by `problem`"),
        })
    }

    /// f32 [1, R, A] of a stream [1, R, D].
    fn modalities(&self, x: &Array) -> Result<Array> {
        let normed = scaled(&self.router_norm.forward(x)?, 1.0 / x.dim(2) as f32)?;
        Ok(tanh(self.modality_router.forward(&normed)?.as_dtype(Dtype::Float32)?)?)
    }

    /// The streams after the layer from those before it.
    fn predict(&self, streams: &[Array]) -> Result<Vec<Array>> {
        let count = streams.len() as i32;
        let coefficients = matmul(self.modalities(&streams[self.active])?, &self.prediction_coefs)?;
        // [1, R, A, A]: row i mixes the streams to the i-th.
        let coefficients = coefficients.reshape(&[1, -1, count, count])?;
        let wide: Vec<Array> = streams
            .iter()
            .map(|stream| stream.as_dtype(Dtype::Float32)?.expand_dims(2))
            .collect::<std::result::Result<_, _>>()?;
        let before = concatenate(&wide, 2)?;
        let after = matmul(coefficients, &before)?.add(before)?;
        let after = after.as_dtype(streams[0].dtype())?.split_equal(count, 2)?;
        let one = |stream: &Array| stream.squeeze_axes(&[2]);
        Ok(after.iter().map(one).collect::<std::result::Result<_, _>>()?)
    }

    /// The predicted `streams`, corrected by the `computed` one.
    fn correct(&self, streams: &[Array], computed: &Array) -> Result<Vec<Array>> {
        let coefficients = matmul(self.modalities(computed)?, &self.correction_coefs)?;
        let coefficients = coefficients.add(Array::from_f32(1.0))?;
        let innovation = computed.subtract(&streams[self.active])?.as_dtype(Dtype::Float32)?;
        let corrected = (0i32..).zip(streams).map(|(i, stream)| {
            let factor = coefficients.try_index((.., .., i..i + 1))?;
            let stream = stream.as_dtype(Dtype::Float32)?.add(innovation.multiply(factor)?)?;
            Ok(stream.as_dtype(computed.dtype())?)
        });
        corrected.collect()
    }

    /// The computed stream, corrected, as it meets the layer's input.
    fn output(&self, x: &Array) -> Result<Array> {
        match &self.correct_output_scale {
            Some(scale) => Ok(x.multiply(scale)?),
            None => Ok(x.clone()),
        }
    }
}

/// `x + norm(right left x)`
struct Laurel {
    linear_left: Linear,
    linear_right: Linear,
    post_laurel_norm: RmsNorm,
}

impl Laurel {
    fn forward(&self, x: &Array) -> Result<Array> {
        let y = self.linear_right.forward(&self.linear_left.forward(x)?)?;
        Ok(x.add(self.post_laurel_norm.forward(&y)?)?)
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

struct KvProj {
    k_proj: Linear,
    v_proj: Linear,
    k_norm: RmsNorm,
}

/// Norms of queries and keys replace the scale.
const SCORES: Scores = Scores { scale: 1.0, softcap: None, sinks: None };

impl SelfAttn {
    fn load(config: &Config, weights: &mut Weights, layer: usize) -> Result<Self> {
        let at = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let &Config { hidden_size: hidden, head_dim, rms_norm_eps: eps, .. } = config;
        let sliding = config.is_sliding(layer);
        let Some(source) = config.source(layer) else {
            let problem = format!(
                "num_kv_shared_layers: layer {layer} has no earlier layer of its kind to share with"
            );
            return Err(weights.problem("config.json", problem));
        };
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        weights.cut(&format!("model.layers.{layer}.self_attn"), attention_cuts(heads, kv_heads));
        Ok(Self {
            q_proj: weights.linear_of(&at("q_proj"), [queries, hidden])?,
            q_norm: weights.norm_of(&at("q_norm"), eps, &[head_dim])?,
            kv: if source == layer {
                Some(KvProj {
                    k_proj: weights.linear_of(&at("k_proj"), [keys, hidden])?,
                    v_proj: weights.linear_of(&at("v_proj"), [keys, hidden])?,
                    k_norm: weights.norm_of(&at("k_norm"), eps, &[head_dim])?,
                })
            } else {
                None
            },
            o_proj: weights.linear_of(&at("o_proj"), [hidden, queries])?,
            rope: config.rope(sliding),
            source,
            window: sliding.then_some(config.sliding_window),
            heads: weights.ranks().share(heads),
            kv_heads: weights.ranks().share_or_one(kv_heads),
            head_dim,
        })
    }

    /// `x` [1, R, D], same shape back. Values pass a norm without weights.
    fn forward(&self, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let (rows, h, d) = (x.dim(1), self.heads, self.head_dim);
        let q = self.q_norm.forward(&self.q_proj.forward(x)?.reshape(&[1, rows, h, d])?)?;
        let q = self.rope.forward(&q, spans)?;
        let mixed = if let Some(KvProj { k_proj, v_proj, k_norm }) = &self.kv {
            let shape = [1, rows, self.kv_heads, d];
            let k = k_norm.forward(&k_proj.forward(x)?.reshape(&shape)?)?;
            let k = self.rope.forward(&k, spans)?;
            let v = rms_norm(v_proj.forward(x)?.reshape(&shape)?, None, k_norm.eps)?;
            attention([&q, &k, &v], &SCORES, spans, self.source)?
        } else {
            attend_appended(&q, None, &SCORES, spans, self.source)?
        };
        self.o_proj.forward(&mixed)
    }
}
