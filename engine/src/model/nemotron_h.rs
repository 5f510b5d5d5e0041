//! Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention without positions, a feed-forward block
//! of squared ReLU, or experts of it, which in large models work in a smaller space.
//!
//! # Why
//! `transformers` 5.23 bounds the steps of Mamba-2 by `time_step_min`, with which training only initialised
//! them. mlx-lm, vLLM and this file take the bounds of `time_step_limit`.
//!
//! Source: arXiv:2504.03624; `transformers` `models/nemotron_h`; mlx-lm `models/nemotron_h.py`, checked by the
//! reference logits in `tests/fixtures`.

use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::llama::{self, AttentionConfig, ROPE_THETA, SelfAttn};
use super::mamba2::{Mixer, MixerConfig, TimeStepLimit};
use super::{Model, Weights, experts};
use crate::cache::{Cache, Span};
use crate::error::Result;
use crate::nn::{Activation, Embedding, Experts, Groups, Linear, Moe, PlainMlp, RmsNorm};

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    hidden_size: i32,
    num_attention_heads: i32,
    num_key_value_heads: i32,
    head_dim: Option<i32>,
    layer_norm_epsilon: f32,
    mamba_num_heads: i32,
    mamba_head_dim: i32,
    n_groups: i32,
    ssm_state_size: i32,
    time_step_limit: Option<TimeStepLimit>,
    /// A letter a layer: `M`, `*`, `-` or `E`.
    hybrid_override_pattern: Option<String>,
    /// A word a layer, since transformers 5.
    #[serde(alias = "layer_types")]
    layers_block_type: Option<Vec<String>>,
    /// `n_routed_experts`
    num_experts: Option<usize>,
    num_experts_per_tok: Option<i32>,
    #[serde(default)]
    norm_topk_prob: bool,
    n_group: Option<i32>,
    topk_group: Option<i32>,
    routed_scaling_factor: Option<f32>,
    /// Size of the rows of experts, if it is not that of hidden states.
    moe_latent_size: Option<i32>,
}

impl Config {
    /// A letter a layer; the error names what is unknown.
    fn pattern(&self) -> std::result::Result<Vec<char>, String> {
        let letter = |word: &String| match word.as_str() {
            "linear_attention" | "mamba" | "conv" => Ok('M'),
            "full_attention" | "attention" => Ok('*'),
            "mlp" => Ok('-'),
            "moe" => Ok('E'),
            other => Err(format!("layers_block_type `{other}` is not supported")),
        };
        match (&self.hybrid_override_pattern, &self.layers_block_type) {
            (Some(pattern), _) => Ok(pattern.chars().collect()),
            (None, Some(words)) => words.iter().map(letter).collect(),
            (None, None) => Err("hybrid_override_pattern and layers_block_type are missing".into()),
        }
    }
}

struct NemotronH {
    embeddings: Embedding,
    layers: Vec<Layer>,
    norm_f: RmsNorm,
    lm_head: Linear,
    dtype: Dtype,
}

/// `x + mixer(norm x)`
struct Layer {
    norm: RmsNorm,
    mixer: Kind,
}

#[allow(clippy::large_enum_variant, reason = "there is one in a layer")]
enum Kind {
    /// With its entry in the cache.
    Mamba(Mixer, usize),
    /// With its entry in the cache.
    SelfAttn(SelfAttn, usize),
    Mlp(PlainMlp),
    Moe(Box<LatentMoe>),
}

/// `fc2(experts(fc1 x)) + shared_experts(x)`
struct LatentMoe {
    moe: Moe,
    fc1_latent_proj: Option<Linear>,
    fc2_latent_proj: Option<Linear>,
    shared_experts: Option<PlainMlp>,
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    let problem = |problem| weights.problem("config.json", problem);
    let pattern = config.pattern().map_err(problem)?;
    // transformers 5 names the backbone `model` and saves experts in one tensor; MLX's converter numbers
    // their matrices.
    weights.rename(|name| {
        let name = match name.strip_prefix("model.") {
            Some(rest) => format!("backbone.{rest}"),
            None => name.into(),
        };
        Some(match name.strip_suffix("_proj").and_then(|at| at.rsplit_once(".experts.")) {
            Some((at, matrix)) => format!("{at}.switch_mlp.{matrix}_proj.weight"),
            None => name.replace(".fc1.", ".up_proj.").replace(".fc2.", ".down_proj."),
        })
    });
    let (hidden, eps) = (config.hidden_size, config.layer_norm_epsilon);
    let mut entries = 0..;
    let mut entry = || entries.next().expect("a model has few layers");
    let mut layers = Vec::with_capacity(pattern.len());
    for (i, letter) in pattern.into_iter().enumerate() {
        let at = format!("backbone.layers.{i}.mixer");
        layers.push(Layer {
            norm: weights.norm_of(&format!("backbone.layers.{i}.norm"), eps, &[hidden])?,
            mixer: match letter {
                'M' => Kind::Mamba(Mixer::load(weights, &at, mixer(&config))?, entry()),
                '*' => Kind::SelfAttn(SelfAttn::load(weights, &at, attention(&config))?, entry()),
                '-' => Kind::Mlp(weights.plain_mlp(&at, Activation::Relu2)?),
                'E' => Kind::Moe(Box::new(LatentMoe::load(&config, weights, &at)?)),
                other => {
                    let problem =
                        format!("hybrid_override_pattern has the unknown letter `{other}`");
                    return Err(weights.problem("config.json", problem));
                }
            },
        });
    }
    let embeddings = weights.embedding("backbone.embeddings")?;
    Ok(Box::new(NemotronH {
        layers,
        norm_f: weights.norm_of("backbone.norm_f", eps, &[hidden])?,
        lm_head: weights.lm_head(&embeddings, false)?,
        embeddings,
        dtype: weights.dtype(),
    }))
}

fn mixer(config: &Config) -> MixerConfig {
    MixerConfig {
        hidden: config.hidden_size,
        heads: config.mamba_num_heads,
        head_dim: config.mamba_head_dim,
        groups: config.n_groups,
        state: config.ssm_state_size,
        eps: config.layer_norm_epsilon,
        time_step_limit: config.time_step_limit,
    }
}

fn attention(config: &Config) -> AttentionConfig {
    let llama = llama::Config {
        hidden_size: config.hidden_size,
        num_hidden_layers: 0,
        num_attention_heads: config.num_attention_heads,
        num_key_value_heads: Some(config.num_key_value_heads),
        head_dim: config.head_dim,
        rms_norm_eps: config.layer_norm_epsilon,
        tie_word_embeddings: false,
        rope: Default::default(),
        layer_types: None,
        sliding_window: None,
    };
    AttentionConfig { rope: None, ..llama.attention(ROPE_THETA) }
}

impl LatentMoe {
    fn load(config: &Config, weights: &mut Weights, at: &str) -> Result<Self> {
        let at = |name: &str| format!("{at}.{name}");
        let (Some(count), Some(top_k)) = (config.num_experts, config.num_experts_per_tok) else {
            let problem = "`n_routed_experts` or `num_experts_per_tok` is missing; the pattern \
                           has experts";
            return Err(weights.problem("config.json", problem.into()));
        };
        experts::stack(weights, count, &at("experts"), &at("switch_mlp"))?;
        let hidden = config.hidden_size;
        let inputs = config.moe_latent_size.unwrap_or(hidden);
        let mut optional = |name: &str, shape: [i32; 2]| {
            let present = weights.has(&at(&format!("{name}.weight")));
            present.then(|| weights.linear_of(&at(name), shape)).transpose()
        };
        let fc1_latent_proj = optional("fc1_latent_proj", [inputs, hidden])?;
        let fc2_latent_proj = optional("fc2_latent_proj", [hidden, inputs])?;
        let has_shared = weights.has(&at("shared_experts.up_proj.weight"));
        let rows = i32::try_from(count).unwrap_or(i32::MAX);
        let groups = Groups {
            bias: weights.vector_f32(&at("gate.e_score_correction_bias"), rows)?,
            count: config.n_group.unwrap_or(1),
            chosen: config.topk_group.unwrap_or(1),
        };
        Ok(Self {
            moe: Moe {
                gate: weights.linear_of(&at("gate"), [rows, hidden])?,
                experts: Experts(
                    weights
                        .plain_experts(&at("switch_mlp"), Activation::Relu2, count, inputs)?
                        .into(),
                ),
                top_k,
                norm_topk_prob: config.norm_topk_prob,
                scale: config.routed_scaling_factor.unwrap_or(1.0),
                groups: Some(groups),
                shared: None,
                ranks: weights.ranks().clone(),
            },
            fc1_latent_proj,
            fc2_latent_proj,
            shared_experts: if has_shared {
                Some(weights.plain_mlp(&at("shared_experts"), Activation::Relu2)?)
            } else {
                None
            },
        })
    }

    /// `x` [1, R, D], same shape back.
    fn forward(&self, x: &Array) -> Result<Array> {
        let through = |linear: &Option<Linear>, x: &Array| match linear {
            Some(linear) => linear.forward(x),
            None => Ok(x.clone()),
        };
        let (chosen, shares) = self.moe.choose(x)?;
        let latent = through(&self.fc1_latent_proj, x)?;
        let y = self.moe.ranks.sum(self.moe.experts.sum(&latent, &chosen, &shares)?)?;
        let y = through(&self.fc2_latent_proj, &y)?;
        match &self.shared_experts {
            Some(shared) => Ok(y.add(shared.forward(x)?)?),
            None => Ok(y),
        }
    }
}

impl Model for NemotronH {
    fn depth(&self) -> usize {
        self.layers.len()
    }

    fn new_cache(&self) -> Result<Cache> {
        let layers = self.layers.iter().filter_map(|layer| match &layer.mixer {
            Kind::Mamba(mixer, _) => Some(mixer.new_cache(self.dtype)),
            Kind::SelfAttn(attention, _) => Some(Ok(attention.new_cache())),
            Kind::Mlp(_) | Kind::Moe(_) => None,
        });
        Ok(Cache::new(layers.collect::<Result<_>>()?))
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        self.embeddings.forward(tokens)
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        let Layer { norm, mixer } = &self.layers[layer];
        let y = match mixer {
            Kind::Mamba(mixer, entry) => mixer.forward(&norm.forward(x)?, spans, *entry)?,
            Kind::SelfAttn(attention, entry) => {
                attention.forward(&norm.forward(x)?, spans, *entry)?
            }
            Kind::Mlp(_) | Kind::Moe(_) => return Ok(x.clone()),
        };
        Ok(x.add(y)?)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        let Layer { norm, mixer } = &self.layers[layer];
        match mixer {
            Kind::Mlp(mlp) => Ok(x.add(mlp.forward(&norm.forward(x)?)?)?),
            Kind::Moe(moe) => Ok(x.add(moe.forward(&norm.forward(x)?)?)?),
            Kind::Mamba(..) | Kind::SelfAttn(..) => Ok(x.clone()),
        }
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        self.norm_f.forward(x)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        self.lm_head.forward(hidden)
    }
}
