//! LFM2, dense and with experts: gated short convolutions, and attention in a few layers.
//!
//! A convolution mixes a row with the few before it, so its whole state is the tail of its inputs.
//!
//! Source: arXiv:2511.23404; `transformers` `models/lfm2` and `models/lfm2_moe`; mlx-lm files of these names,
//! checked by the reference logits in `tests/fixtures`.

use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::llama::{self, SelfAttn};
use super::{Cut, Model, Weights, experts};
use crate::cache::{Cache, Element, LayerCache, Recurrent, Span};
use crate::error::Result;
use crate::kernels::REWIND;
use crate::nn::{Embedding, Linear, Mlp, RmsNorm, by_run, convolve};

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    llama: llama::Config,
    #[serde(flatten)]
    experts: experts::Config,
    /// Layers with attention, in configs without `layer_types`.
    #[serde(default)]
    full_attn_idxs: Vec<usize>,
}

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 1_000_000.0;

impl Config {
    fn is_attention(&self, layer: usize) -> bool {
        match self.llama.layer_types.as_ref().and_then(|kinds| kinds.get(layer)) {
            Some(kind) => kind == "full_attention",
            None => self.full_attn_idxs.contains(&layer),
        }
    }
}

struct Lfm2 {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    embedding_norm: RmsNorm,
    lm_head: Linear,
    dtype: Dtype,
}

/// `x + mixer(norm x)`, then `x + feed_forward(norm x)`.
struct Layer {
    operator_norm: RmsNorm,
    mixer: Kind,
    ffn_norm: RmsNorm,
    feed_forward: Mlp,
}

#[allow(clippy::large_enum_variant, reason = "there is one in a layer")]
enum Kind {
    SelfAttn(SelfAttn),
    Conv(ShortConv),
}

/// `out_proj(c * conv(b * x))`, where b, c and x are the thirds of `in_proj`.
struct ShortConv {
    in_proj: Linear,
    /// One [D] for each tap, oldest first.
    conv: Vec<Array>,
    /// [D]
    bias: Option<Array>,
    out_proj: Linear,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let mut config = config.clone();
    // The epsilon of all norms, and a key that some configs have in place of ours.
    for (theirs, ours) in [("norm_eps", "rms_norm_eps"), ("tie_embedding", "tie_word_embeddings")] {
        if let Some(value) = config.get(theirs).cloned() {
            config[ours] = value;
        }
    }
    let mut config: Config = weights.config(&config)?;
    config.llama.tie_word_embeddings = !weights.has("lm_head.weight");
    weights.rename(|name| {
        const NAMES: [(&str, &str); 6] = [
            (".self_attn.out_proj.", ".self_attn.o_proj."),
            (".q_layernorm.", ".q_norm."),
            (".k_layernorm.", ".k_norm."),
            (".w1.", ".gate_proj."),
            (".w2.", ".down_proj."),
            (".w3.", ".up_proj."),
        ];
        Some(NAMES.iter().fold(name.to_string(), |name, (theirs, ours)| name.replace(theirs, ours)))
    });
    let (hidden, eps) = (config.llama.hidden_size, config.llama.rms_norm_eps);
    let attention = config.llama.attention(ROPE_THETA);
    let mut layers = Vec::with_capacity(config.llama.num_hidden_layers);
    for i in 0..config.llama.num_hidden_layers {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        layers.push(Layer {
            operator_norm: weights.norm_of(&at("operator_norm"), eps, &[hidden])?,
            mixer: if config.is_attention(i) {
                Kind::SelfAttn(SelfAttn::load(weights, &at("self_attn"), attention.clone())?)
            } else {
                Kind::Conv(ShortConv::load(weights, &at("conv"), hidden)?)
            },
            ffn_norm: weights.norm_of(&at("ffn_norm"), eps, &[hidden])?,
            feed_forward: config.experts.load(weights, &at("feed_forward"), true)?,
        });
    }
    let embed_tokens = weights.embedding("model.embed_tokens")?;
    Ok(Box::new(Lfm2 {
        layers,
        embedding_norm: weights.norm_of("model.embedding_norm", eps, &[hidden])?,
        lm_head: weights.lm_head(&embed_tokens, config.llama.tie_word_embeddings)?,
        embed_tokens,
        dtype: weights.dtype(),
    }))
}

impl Model for Lfm2 {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers.iter().map(|layer| match &layer.mixer {
            Kind::SelfAttn(attention) => Ok(attention.new_cache()),
            Kind::Conv(conv) => Ok(LayerCache::Recurrent(conv.new_cache(self.dtype)?)),
        });
        Ok(Cache::new(layers.collect::<Result<_>>()?))
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        self.embed_tokens.forward(tokens)
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let Layer { operator_norm, mixer, .. } = &self.layers[layer];
        let normed = operator_norm.forward(x)?;
        let y = match mixer {
            Kind::SelfAttn(attention) => attention.forward(&normed, spans, layer)?,
            Kind::Conv(conv) => conv.forward(&normed, spans, layer)?,
        };
        Ok(x.add(y)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let Layer { ffn_norm, feed_forward, .. } = &self.layers[layer];
        Ok(x.add(feed_forward.forward(&ffn_norm.forward(x)?)?)?)
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.embedding_norm.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        self.lm_head.forward(hidden)
    }
}

impl ShortConv {
    /// How a layer is cut among ranks: by channels.
    fn cuts(channels: i32) -> [(&'static str, Cut); 4] {
        let third = (channels, Cut::Outputs(channels));
        [
            ("in_proj", Cut::Segments(vec![third.clone(), third.clone(), third])),
            ("conv", Cut::Outputs(channels)),
            ("conv.bias", Cut::Outputs(channels)),
            ("out_proj", Cut::Inputs(channels)),
        ]
    }

    fn load(weights: &mut Weights, at: &str, hidden: i32) -> Result<Self> {
        weights.cut(at, Self::cuts(hidden));
        let at = |name: &str| format!("{at}.{name}");
        let bias = at("conv.bias");
        Ok(Self {
            in_proj: weights.linear_of(&at("in_proj"), [3 * hidden, hidden])?,
            conv: weights.taps(&at("conv"), hidden)?,
            bias: if weights.has(&bias) { Some(weights.vector(&bias, hidden)?) } else { None },
            out_proj: weights.linear_of(&at("out_proj"), [hidden, hidden])?,
        })
    }

    fn new_cache(&self, dtype: Dtype) -> Result<Recurrent> {
        let taps = i32::try_from(self.conv.len()).expect("a convolution has a few taps");
        let tail = [1, taps - 1, self.conv[0].dim(0)];
        Ok(Recurrent::convolution(&tail, dtype)?.with_kernels(&REWIND))
    }

    /// `x` [1, R, D], same shape back. Advances entry `layer` of each span's cache.
    fn forward(&self, x: &Array, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        let parts = self.in_proj.forward(x)?.split_equal(3, -1)?;
        let gated = parts[0].multiply(&parts[2])?;
        let y = by_run([&gated, &parts[1]], spans, layer, |[x, c], caches| {
            let rows = x.dim(1);
            let tail = Element::stack(caches.iter().map(|cache| cache.state().1))?;
            let joined = concatenate(&[&tail, &x], 1)?;
            for (cache, x) in caches.iter_mut().zip(Element::all_of(x)) {
                cache.record(x, None);
            }
            let tails = Element::all_of(joined.try_index((.., rows.., ..))?);
            for (cache, tail) in caches.iter_mut().zip(tails) {
                let matrix = cache.state().0.clone();
                cache.advance(matrix, tail);
            }
            let mut y = convolve(&joined, &self.conv, rows)?;
            if let Some(bias) = &self.bias {
                y = y.add(bias)?;
            }
            Ok(y.multiply(c)?)
        })?;
        self.out_proj.forward(&y)
    }
}
