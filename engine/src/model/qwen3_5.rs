//! Qwen3.5 and 3.6, dense and with experts: three GatedDeltaNet layers to one of gated full
//! attention.
//!
//! Reads checkpoints of Hugging Face ((1 + w) norms, conv1d [C, 1, K]) and of MLX's converter. Of
//! multimodal checkpoints it loads the language part. It also loads the multi-token-prediction layer
//! (`mtp.*`), which mlx-lm drops.
//!
//! Source: `transformers` `models/qwen3_5`; mlx-lm `models/qwen3_5.py` and
//! `models/qwen3_5_moe.py`, checked by the reference logits in `tests/fixtures`.

use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{Cut, Model, Mtp, Weights, experts};
use crate::cache::{Cache, LayerCache, Span};
use crate::error::Result;
use crate::kernels::cpu;
use crate::nn::{
    Embedding, GatedDelta, Heads, Input, Joined, Linear, Mlp, RmsNorm, Rope, RopeConfig, Scores,
    beside,
};

/// `text_config` of `config.json`, or all of it in text-only checkpoints.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: usize,
    num_attention_heads: i32,
    num_key_value_heads: i32,
    head_dim: i32,
    rms_norm_eps: f32,
    #[serde(default)]
    tie_word_embeddings: bool,
    /// The sections of multimodal rope are ignored: the three positions of text are equal.
    #[serde(flatten)]
    rope: RopeConfig,
    #[serde(flatten)]
    experts: experts::Config,
    linear_num_key_heads: i32,
    linear_num_value_heads: i32,
    linear_key_head_dim: i32,
    linear_value_head_dim: i32,
    #[serde(default = "default_interval")]
    full_attention_interval: usize,
    #[serde(default)]
    layer_types: Vec<String>,
}

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 100_000.0;

/// Rotated part of a head if the config does not give one.
const PARTIAL_ROTARY_FACTOR: f32 = 0.25;

fn default_interval() -> usize {
    4
}

impl Config {
    fn is_linear(&self, layer: usize) -> bool {
        match self.layer_types.get(layer) {
            Some(kind) => kind == "linear_attention",
            None => !(layer + 1).is_multiple_of(self.full_attention_interval),
        }
    }
}

struct Qwen35 {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
    mtp: Option<MtpLayers>,
    dtype: Dtype,
}

struct Layer {
    input_layernorm: RmsNorm,
    mixer: Mixer,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

enum Mixer {
    SelfAttn(SelfAttn),
    LinearAttn(LinearAttn),
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let text = config.get("text_config").unwrap_or(config);
    let mut config: Config = weights.config(text)?;
    config.rope.partial_rotary_factor.get_or_insert(PARTIAL_ROTARY_FACTOR);
    sanitize(weights)?;
    let layers = (0..config.num_hidden_layers)
        .map(|i| Layer::load(&config, weights, &format!("model.layers.{i}"), config.is_linear(i)));
    let layers = layers.collect::<Result<_>>()?;
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    Ok(Box::new(Qwen35 {
        layers,
        norm: weights.norm("model.norm", config.rms_norm_eps)?,
        lm_head: weights.lm_head(&embed_tokens, config.tie_word_embeddings)?,
        mtp: MtpLayers::load(&config, weights, &embed_tokens)?,
        embed_tokens,
        dtype: weights.dtype(),
    }))
}

/// Converts names and layouts of both kinds of checkpoint: norms to plain factors, conv1d to [C, K].
fn sanitize(weights: &mut Weights) -> Result<()> {
    weights.keep_language_model();
    // Published checkpoints have [C, 1, K]; MLX's converter writes [C, K, 1].
    let published = weights
        .iter()
        .any(|(name, array)| name.ends_with("conv1d.weight") && array.shape().last() != Some(&1));
    weights.map(|name, array| {
        if name.ends_with("conv1d.weight") && array.ndim() == 3 {
            let [channels, taps] = [array.dim(0), array.dim(1).max(array.dim(2))];
            return Ok(Some(array.reshape(&[channels, taps])?));
        }
        let plus_one = [
            "layernorm.weight",
            "q_norm.weight",
            "k_norm.weight",
            "model.norm.weight",
            "mtp.norm.weight",
            "pre_fc_norm_embedding.weight",
            "pre_fc_norm_hidden.weight",
        ];
        if published && plus_one.iter().any(|n| name.ends_with(n)) {
            // In the stored dtype, as the reference rounds it.
            return Ok(Some(array.add(Array::from_f32(1.0).as_dtype(array.dtype())?)?));
        }
        Ok(None)
    })
}

impl Model for Qwen35 {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers.iter().map(|layer| match &layer.mixer {
            Mixer::SelfAttn(a) => Ok(LayerCache::attention(a.kv_heads, a.head_dim, None)),
            Mixer::LinearAttn(a) => Ok(LayerCache::Recurrent(a.delta.new_cache(self.dtype)?)),
        });
        Ok(Cache::new(layers.collect::<Result<_>>()?))
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        self.embed_tokens.forward(tokens)
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        self.layers[layer].mix(x, spans, layer)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        self.layers[layer].feed_forward(x)
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.norm.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        self.lm_head.forward(hidden)
    }

    fn mtp(&self) -> Option<&dyn Mtp> {
        self.mtp.as_ref().map(|mtp| mtp as &dyn Mtp)
    }
}

impl Layer {
    fn load(config: &Config, weights: &mut Weights, at: &str, is_linear: bool) -> Result<Self> {
        let norm = |weights: &mut Weights, name: &str| {
            weights.norm(&format!("{at}.{name}"), config.rms_norm_eps)
        };
        Ok(Self {
            input_layernorm: norm(weights, "input_layernorm")?,
            mixer: if is_linear {
                Mixer::LinearAttn(LinearAttn::load(config, weights, &format!("{at}.linear_attn"))?)
            } else {
                Mixer::SelfAttn(SelfAttn::load(config, weights, &format!("{at}.self_attn"))?)
            },
            post_attention_layernorm: norm(weights, "post_attention_layernorm")?,
            mlp: config.experts.load(weights, &format!("{at}.mlp"), true)?,
        })
    }

    fn mix(&self, x: &Array, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        self.mixer.residual(x, &self.input_layernorm, spans, layer)
    }

    fn feed_forward(&self, x: &Array) -> Result<Array> {
        self.mlp.residual(x, &self.post_attention_layernorm)
    }
}

impl Mixer {
    /// `x + mixer(norm x)`
    fn residual(
        &self,
        x: &Array,
        norm: &RmsNorm,
        spans: &mut [Span<'_>],
        layer: usize,
    ) -> Result<Array> {
        match self {
            Self::SelfAttn(attn) => attn.residual(x, norm, spans, layer),
            Self::LinearAttn(attn) => attn.residual(x, norm, spans, layer),
        }
    }
}

/// Full attention; the second half of `q_proj` gates its output.
struct SelfAttn {
    /// `q_proj`, `k_proj` and `v_proj`.
    qkv: Joined<3>,
    o_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    rope: Rope,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
}

impl SelfAttn {
    fn load(config: &Config, weights: &mut Weights, at: &str) -> Result<Self> {
        let &Config { hidden_size: hidden, head_dim, .. } = config;
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        weights.cut(
            at,
            [
                ("q_proj", Cut::Outputs(heads)),
                ("k_proj", Cut::Repeated(kv_heads)),
                ("v_proj", Cut::Repeated(kv_heads)),
                ("o_proj", Cut::Inputs(heads)),
            ],
        );
        Ok(Self {
            qkv: Joined::new([
                weights.linear_of(&format!("{at}.q_proj"), [2 * queries, hidden])?,
                weights.linear_of(&format!("{at}.k_proj"), [keys, hidden])?,
                weights.linear_of(&format!("{at}.v_proj"), [keys, hidden])?,
            ])?,
            o_proj: weights.linear_of(&format!("{at}.o_proj"), [hidden, queries])?,
            q_norm: weights.norm_of(&format!("{at}.q_norm"), config.rms_norm_eps, &[head_dim])?,
            k_norm: weights.norm_of(&format!("{at}.k_norm"), config.rms_norm_eps, &[head_dim])?,
            rope: config.rope.rope(config.head_dim, ROPE_THETA),
            heads: weights.ranks().share(heads),
            kv_heads: weights.ranks().share_or_one(kv_heads),
            head_dim: config.head_dim,
        })
    }

    /// `x + self_attn(norm x)`
    fn residual(
        &self,
        x: &Array,
        norm: &RmsNorm,
        spans: &mut [Span<'_>],
        layer: usize,
    ) -> Result<Array> {
        let heads = Heads {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            // Each head's q_proj rows are its query, then its gate.
            gated: true,
            q_norm: Some(&self.q_norm),
            k_norm: Some(&self.k_norm),
            rope: Some(&self.rope),
        };
        let scale = (self.head_dim as f32).powf(-0.5);
        let scores = Scores { scale, softcap: None, sinks: None };
        let projected = self.qkv.outputs(Input::Normed(x, norm.view()))?;
        let mixed = heads.attend(projected, &self.qkv, &scores, spans, layer)?;
        self.o_proj.apply(Input::Rows(&mixed), Some(x))
    }
}

/// GatedDeltaNet.
struct LinearAttn {
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`.
    in_proj: Joined<4>,
    delta: GatedDelta,
    out_proj: Linear,
}

impl LinearAttn {
    /// How the layer is cut among ranks: by heads of values, and those of keys that they belong to.
    fn cuts(config: &Config) -> [(&'static str, Cut); 8] {
        let (key_heads, heads) = (config.linear_num_key_heads, config.linear_num_value_heads);
        let keys = (key_heads * config.linear_key_head_dim, Cut::Repeated(key_heads));
        let values = (heads * config.linear_value_head_dim, Cut::Outputs(heads));
        let qkv = Cut::Segments(vec![keys.clone(), keys, values]);
        [
            ("in_proj_qkv", qkv.clone()),
            ("conv1d", qkv),
            ("in_proj_z", Cut::Outputs(heads)),
            ("in_proj_b", Cut::Outputs(heads)),
            ("in_proj_a", Cut::Outputs(heads)),
            ("A_log", Cut::Outputs(heads)),
            ("dt_bias", Cut::Outputs(heads)),
            ("out_proj", Cut::Inputs(heads)),
        ]
    }

    fn load(config: &Config, weights: &mut Weights, at: &str) -> Result<Self> {
        let &Config { hidden_size: hidden, linear_num_value_heads: heads, .. } = config;
        let keys = config.linear_num_key_heads * config.linear_key_head_dim;
        let values = heads * config.linear_value_head_dim;
        weights.cut(at, Self::cuts(config));
        Ok(Self {
            delta: GatedDelta {
                conv1d: weights.taps(&format!("{at}.conv1d"), 2 * keys + values)?,
                a_log: weights.vector_f32(&format!("{at}.A_log"), heads)?,
                dt_bias: weights.vector(&format!("{at}.dt_bias"), heads)?,
                norm: weights.norm_of(
                    &format!("{at}.norm"),
                    config.rms_norm_eps,
                    &[config.linear_value_head_dim],
                )?,
                key_heads: weights.ranks().share_or_one(config.linear_num_key_heads),
                value_heads: weights.ranks().share(heads),
                key_dim: config.linear_key_head_dim,
                value_dim: config.linear_value_head_dim,
            },
            in_proj: Joined::new([
                weights.linear_of(&format!("{at}.in_proj_qkv"), [2 * keys + values, hidden])?,
                weights.linear_of(&format!("{at}.in_proj_z"), [values, hidden])?,
                weights.linear_of(&format!("{at}.in_proj_b"), [heads, hidden])?,
                weights.linear_of(&format!("{at}.in_proj_a"), [heads, hidden])?,
            ])?,
            out_proj: weights.linear_of(&format!("{at}.out_proj"), [hidden, values])?,
        })
    }

    /// `x + linear_attn(norm x)`
    fn residual(
        &self,
        x: &Array,
        norm: &RmsNorm,
        spans: &mut [Span<'_>],
        layer: usize,
    ) -> Result<Array> {
        let projected = self.in_proj.outputs(Input::Normed(x, norm.view()))?;
        let mixed = self.delta.forward(&projected, spans, layer)?;
        self.out_proj.apply(Input::Rows(&mixed), Some(x))
    }
}

/// The multi-token-prediction layers: `fc` joins a row's hidden state with the embedding of the
/// token that follows; then come blocks like the model's own attention layers.
struct MtpLayers {
    embed_tokens: Embedding,
    pre_fc_norm_embedding: RmsNorm,
    pre_fc_norm_hidden: RmsNorm,
    fc: Linear,
    layers: Vec<Layer>,
    norm: RmsNorm,
    kv_heads: i32,
    head_dim: i32,
}

impl MtpLayers {
    fn load(
        config: &Config,
        weights: &mut Weights,
        embed_tokens: &Embedding,
    ) -> Result<Option<Self>> {
        if !weights.has("mtp.fc.weight") {
            return Ok(None);
        }
        let eps = config.rms_norm_eps;
        let mut layers = Vec::new();
        while weights.has(&format!("mtp.layers.{}.input_layernorm.weight", layers.len())) {
            let at = format!("mtp.layers.{}", layers.len());
            layers.push(Layer::load(config, weights, &at, false)?);
        }
        Ok(Some(Self {
            embed_tokens: embed_tokens.clone(),
            pre_fc_norm_embedding: weights.norm("mtp.pre_fc_norm_embedding", eps)?,
            pre_fc_norm_hidden: weights.norm("mtp.pre_fc_norm_hidden", eps)?,
            fc: weights.linear_of("mtp.fc", [config.hidden_size, 2 * config.hidden_size])?,
            layers,
            norm: weights.norm("mtp.norm", eps)?,
            kv_heads: weights.ranks().share_or_one(config.num_key_value_heads),
            head_dim: config.head_dim,
        }))
    }
}

impl Mtp for MtpLayers {
    fn new_cache(&self) -> Result<Cache> {
        let full = || LayerCache::attention(self.kv_heads, self.head_dim, None);
        Ok(Cache::new(self.layers.iter().map(|_| full()).collect()))
    }

    fn forward(&self, hidden: &Array, tokens: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let _at_once = cpu::run_at_once_after(tokens)?;
        let embedding = self.pre_fc_norm_embedding.forward(&self.embed_tokens.forward(tokens)?)?;
        let hidden = self.pre_fc_norm_hidden.forward(hidden)?;
        let mut x = self.fc.forward(&beside(&embedding, &hidden)?)?;
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.mix(&x, spans, i)?;
            x = layer.feed_forward(&x)?;
        }
        spans.iter_mut().for_each(Span::advance);
        self.norm.forward(&x)
    }
}
