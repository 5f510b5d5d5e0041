//! Mamba-2 (Mamba-Codestral), and [`Mixer`], its layer in hybrids: Granite 4, Nemotron-H, Falcon-H1.
//!
//! # Why
//! mlx-lm normalises the output of all groups together in this family and in Granite; the trained models and
//! `transformers` normalise each group by itself, and so does this file.
//!
//! Source: arXiv:2405.21060; `transformers` `models/mamba2`; mlx-lm `models/mamba2.py`, checked by the
//! reference logits in `tests/fixtures`.

use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{Cut, Model, Weights};
use crate::cache::{Cache, LayerCache, Span};
use crate::error::Result;
use crate::nn::{Embedding, GatedNorm, GroupPart, Linear, Mamba2, RmsNorm, silu};

/// Least and largest step; `null` is infinity.
pub(super) type TimeStepLimit = (Option<f32>, Option<f32>);

/// Shape of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct MixerConfig {
    pub hidden: i32,
    pub heads: i32,
    pub head_dim: i32,
    /// Groups of heads that share B and C.
    pub groups: i32,
    pub state: i32,
    pub eps: f32,
    pub time_step_limit: Option<TimeStepLimit>,
}

impl MixerConfig {
    /// How a layer is cut among ranks: by heads, and the groups that they belong to.
    fn cuts(&self) -> [(&'static str, Cut); 8] {
        let heads = Cut::Outputs(self.heads);
        let inner = (self.heads * self.head_dim, heads.clone());
        let group = (self.groups * self.state, Cut::Repeated(self.groups));
        let mixed = [inner.clone(), group.clone(), group];
        let convolved = Cut::Segments(mixed.to_vec());
        let all = [inner].into_iter().chain(mixed).chain([(self.heads, heads.clone())]);
        [
            ("in_proj", Cut::Segments(all.collect())),
            ("conv1d", convolved.clone()),
            ("conv1d.bias", convolved),
            ("A_log", heads.clone()),
            ("dt_bias", heads.clone()),
            ("D", heads.clone()),
            ("norm", heads),
            ("out_proj", Cut::Inputs(self.heads)),
        ]
    }
}

/// A Mamba-2 layer from projection to projection.
pub(super) struct Mixer {
    /// The gate [H P], the inputs of the convolution [H P + 2 G N], and of the steps [H], in this order.
    in_proj: Linear,
    ssm: Mamba2,
    /// Some sizes of Falcon-H1 have none.
    norm: Option<GatedNorm>,
    out_proj: Linear,
}

impl Mixer {
    /// Takes the layer at `at`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] with both shapes if a tensor has another one than `config` makes.
    pub fn load(weights: &mut Weights, at: &str, config: MixerConfig) -> Result<Self> {
        let MixerConfig { hidden, heads, head_dim, groups, state, eps, .. } = config;
        weights.cut(at, config.cuts());
        let ranks = weights.ranks().clone();
        let at = |name: &str| format!("{at}.{name}");
        let inner = heads * head_dim;
        let channels = inner + 2 * groups * state;
        let conv_bias = at("conv1d.bias");
        let norm = at("norm");
        let norm = if weights.has(&format!("{norm}.weight")) {
            let is_spread = (1..ranks.count()).contains(&groups);
            let part = is_spread.then(|| GroupPart { ranks: ranks.clone(), groups });
            Some(GatedNorm {
                norm: weights.norm_of(&norm, eps, &[inner])?,
                groups: ranks.share_or_one(groups),
                part,
            })
        } else {
            None
        };
        let (least, most) = config.time_step_limit.unwrap_or_default();
        Ok(Self {
            in_proj: weights.linear_of(&at("in_proj"), [inner + channels + heads, hidden])?,
            ssm: Mamba2 {
                conv1d: weights.taps(&at("conv1d"), channels)?,
                conv_bias: if weights.has(&conv_bias) {
                    Some(weights.vector(&conv_bias, channels)?)
                } else {
                    None
                },
                a_log: weights.vector_f32(&at("A_log"), heads)?,
                dt_bias: weights.vector_f32(&at("dt_bias"), heads)?,
                d: weights.vector_f32(&at("D"), heads)?,
                heads: ranks.share(heads),
                groups: ranks.share_or_one(groups),
                head_dim,
                state,
                dt_limit: [least.unwrap_or(0.0), most.unwrap_or(f32::INFINITY)],
            },
            norm,
            out_proj: weights.linear_of(&at("out_proj"), [hidden, inner])?,
        })
    }

    pub fn new_cache(&self, dtype: Dtype) -> Result<LayerCache> {
        Ok(LayerCache::Recurrent(self.ssm.new_cache(dtype)?))
    }

    /// `x` [1, R, D], same shape back. Advances entry `layer` of each span's cache.
    pub fn forward(&self, x: &Array, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        let inner = self.ssm.heads * self.ssm.head_dim;
        let ends = [inner, self.in_proj.shape()[0] - self.ssm.heads];
        let parts = self.in_proj.forward(x)?.split_at_indices(&ends, -1)?;
        let y = self.ssm.forward([&parts[1], &parts[2]], spans, layer)?;
        let y = match &self.norm {
            Some(norm) => norm.forward(y, parts[0].clone())?,
            None => y.multiply(silu(&parts[0])?)?,
        };
        self.out_proj.forward(&y)
    }
}

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    hidden_size: i32,
    num_hidden_layers: usize,
    num_heads: i32,
    head_dim: i32,
    n_groups: i32,
    state_size: i32,
    layer_norm_epsilon: f32,
    time_step_limit: Option<TimeStepLimit>,
    #[serde(default)]
    tie_word_embeddings: bool,
}

/// Context of Mamba-Codestral, the longest that was evaluated. The config states none, and nothing in the
/// model depends on it.
const CONTEXT: u64 = 262_144;

struct Mamba {
    embeddings: Embedding,
    layers: Vec<Layer>,
    norm_f: RmsNorm,
    lm_head: Linear,
    dtype: Dtype,
}

/// `x + mixer(norm x)`, without a feed-forward block.
struct Layer {
    norm: RmsNorm,
    mixer: Mixer,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    let (hidden, eps) = (config.hidden_size, config.layer_norm_epsilon);
    let mixer = MixerConfig {
        hidden,
        heads: config.num_heads,
        head_dim: config.head_dim,
        groups: config.n_groups,
        state: config.state_size,
        eps,
        time_step_limit: config.time_step_limit,
    };
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for i in 0..config.num_hidden_layers {
        let at = |name: &str| format!("backbone.layers.{i}.{name}");
        layers.push(Layer {
            norm: weights.norm_of(&at("norm"), eps, &[hidden])?,
            mixer: Mixer::load(weights, &at("mixer"), mixer)?,
        });
    }
    let embeddings = weights.embedding("backbone.embeddings")?;
    Ok(Box::new(Mamba {
        layers,
        norm_f: weights.norm_of("backbone.norm_f", eps, &[hidden])?,
        lm_head: weights.lm_head(&embeddings, config.tie_word_embeddings)?,
        embeddings,
        dtype: weights.dtype(),
    }))
}

impl Model for Mamba {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn context(&self) -> Option<u64> {
        Some(CONTEXT)
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers.iter().map(|layer| layer.mixer.new_cache(self.dtype));
        Ok(Cache::new(layers.collect::<Result<_>>()?))
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        self.embeddings.forward(tokens)
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let Layer { norm, mixer } = &self.layers[layer];
        Ok(x.add(mixer.forward(&norm.forward(x)?, spans, layer)?)?)
    }

    fn feed_forward(&self, _layer: usize, x: &Array) -> Result<Array> {
        Ok(x.clone())
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.norm_f.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        self.lm_head.forward(hidden)
    }
}
