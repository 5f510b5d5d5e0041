//! Gemma 1: Llama with GEGLU, (1 + w) norms, and embeddings that are scaled and serve as the head.
//!
//! # Why
//! mlx-lm computes GELU with the error function. The models were trained with its tanh approximation, which
//! `transformers` uses also where the config says `gelu`, and so does this file.
//!
//! Source: arXiv:2403.08295; `transformers` `models/gemma`; mlx-lm `models/gemma.py`, checked by the
//! reference logits in `tests/fixtures`.

use serde_json::Value;

use super::gemma2::plain_norms;
use super::llama::{Config, Llama, PRE_NORM, ROPE_THETA};
use super::{Model, Weights};
use crate::error::Result;
use crate::nn::{Gate, Mlp};

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config = Config { tie_word_embeddings: true, ..weights.config(config)? };
    plain_norms(weights)?;
    let whole = config.attention(ROPE_THETA);
    let mlp =
        |weights: &mut Weights, at: &str| Ok(Mlp::Dense(weights.gated_mlp(at, Gate::Gelu)?.into()));
    let mut llama = Llama::load(&config, weights, PRE_NORM, |_| whole.clone(), mlp)?;
    llama.embed_scale = Some((config.hidden_size as f32).sqrt());
    Ok(Box::new(llama))
}
