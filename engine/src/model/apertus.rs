//! Apertus: Llama with norms of each head's queries and keys, and feed-forward blocks of xIELU, whose shape
//! each layer learned.
//!
//! Source: arXiv:2509.14233, arXiv:2411.13010; `transformers` `models/apertus`; mlx-lm `models/apertus.py`,
//! checked by the reference logits in `tests/fixtures`.

use mlx_rs::Array;
use serde_json::Value;

use super::llama::{Config, Llama, Norms, PRE_NORM};
use super::{Model, Weights};
use crate::error::Result;
use crate::nn::{Activation, Mlp};

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 12_000_000.0;

/// `beta` and `eps` of xIELU, if the checkpoint does not have them.
const BETA: f32 = 0.5;
const EPS: f32 = -1e-6;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    let norms = Norms {
        before_attention: Some("attention_layernorm"),
        before_mlp: Some("feedforward_layernorm"),
        ..PRE_NORM
    };
    let whole = config.attention(ROPE_THETA);
    let mlp = |weights: &mut Weights, at: &str| {
        let mut number = |name: &str, default: Option<f32>| match default {
            Some(default) if !weights.has(&format!("{at}.act_fn.{name}")) => {
                Ok(Array::from_f32(default))
            }
            _ => weights.flat_f32(&format!("{at}.act_fn.{name}"), 1),
        };
        let activation = Activation::Xielu {
            alpha_p: number("alpha_p", None)?,
            alpha_n: number("alpha_n", None)?,
            beta: number("beta", Some(BETA))?,
            eps: number("eps", Some(EPS))?,
        };
        Ok(Mlp::Dense(weights.plain_mlp(at, activation)?.into()))
    };
    Ok(Box::new(Llama::load(&config, weights, norms, |_| whole.clone(), mlp)?))
}
