//! Models compute: token rows and a cache in, hidden states and logits out.
//!
//! A model has no request state, does no I/O after loading, never samples or logs, and knows
//! nothing of policies or persistence. **A family is one file and one row of [`FAMILIES`].** It
//! states the formula of each layer; [`Pass`] decides which layers run.

mod apertus;
mod check;
mod cohere2;
mod deepseek_v3;
mod digest;
mod ernie4_5;
mod exaone4;
mod experts;
mod falcon_h1;
mod follow;
mod fp8;
#[cfg(test)]
mod fuzz;
mod gemma;
mod gemma2;
mod gemma3;
mod gemma3n;
mod gemma4;
mod gguf;
mod glm4_moe;
mod gpt_oss;
mod granitemoehybrid;
mod hunyuan;
mod kimi_linear;
mod lead;
mod lfm2;
mod llama;
mod load;
mod mamba2;
mod minimax_m2;
mod mistral;
mod mixtral;
mod nemotron_h;
mod olmo;
#[cfg(test)]
mod parts;
mod pass;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_next;
#[cfg(test)]
mod shapes;
mod smollm3;
mod storage;
#[cfg(test)]
mod tests;
mod weights;

pub use digest::WeightsDigest;
pub use follow::follow;
pub use lead::Lead;
pub use load::{Loaded, choose_device, enable_kernels, load, load_part, on_cpu};
pub use pass::Pass;
pub use weights::{Cut, Weights};

use mlx_rs::Array;
use serde_json::Value;

use crate::cache::{Cache, Span};
use crate::error::Result;

/// A language model: weights, and the formula of each layer.
///
/// `<dyn Model>::forward` runs the layers: `embed`, then `mix`, `feed_forward` and `end_layer` of
/// each layer, then `final_norm`. Hidden states `x` are [1, R, D]; residuals are added here.
pub trait Model {
    /// Number of layers.
    fn depth(&self) -> usize;

    /// Positions it was trained for, in families whose `config.json` may leave that out.
    fn context(&self) -> Option<u64> {
        None
    }

    /// An empty cache with an entry for each layer that keeps state.
    fn new_cache(&self) -> Result<Cache>;

    /// Tells other ranks of a pass. Returns the tokens as all of them have them; `None` if there are no others.
    fn tell(&self, _tokens: &Array, _spans: &[Span<'_>], _pass: Pass<'_>) -> Result<Option<Array>> {
        Ok(None)
    }

    /// Hidden states before the first layer: `tokens` [R] (u32) to [1, R, D].
    fn embed(&self, tokens: &Array) -> Result<Array>;

    /// What `end_layer` needs of the tokens besides the hidden states (Gemma 4).
    fn layer_inputs(&self, _tokens: &Array, _embedded: &Array) -> Result<Option<Array>> {
        Ok(None)
    }

    /// Attention or recurrence of `layer`, which mixes the rows of each span and appends them to
    /// its cache.
    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array>;

    /// Feed-forward block of `layer`.
    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array>;

    /// What `layer` does after its feed-forward block, even if that was skipped.
    fn end_layer(&self, _layer: usize, x: Array, _inputs: Option<&Array>) -> Result<Array> {
        Ok(x)
    }

    /// Norm after the last layer.
    fn final_norm(&self, x: &Array) -> Result<Array>;

    /// Logits of hidden states after the final norm: [1, R, D] to [1, R, V].
    fn logits(&self, hidden: &Array) -> Result<Array>;

    /// `times` sums over all ranks of arrays like `like` [1, R, D], one after the other. `None` if one rank computes alone.
    fn sums(&self, _like: &Array, _times: usize) -> Result<Option<Array>> {
        Ok(None)
    }

    /// The multi-token-prediction layer, if the checkpoint has one.
    fn mtp(&self) -> Option<&dyn Mtp> {
        None
    }
}

/// A multi-token-prediction layer: drafts from the model's own hidden states.
///
/// Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2).
pub trait Mtp {
    /// An empty cache of this layer alone.
    fn new_cache(&self) -> Result<Cache>;

    /// `hidden` [1, R, D] of the rows of `spans`, as the model's pass returned it, and `tokens` [R]
    /// (u32), the token that follows each row. Returns [1, R, D], from which [`Model::logits`]
    /// makes the logits of the token after that. It can replace `hidden` for the next token.
    fn forward(&self, hidden: &Array, tokens: &Array, spans: &mut [Span<'_>]) -> Result<Array>;
}

/// A family of models that share a formula.
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Builds the model from its `config.json` and weights.
    pub load: fn(&Value, &mut Weights) -> Result<Box<dyn Model>>,
}

/// `model_type` of every family that can be loaded.
pub fn model_types() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.model_type).collect()
}

/// Every family that can be loaded.
pub const FAMILIES: &[Family] = &[
    Family { model_type: "apertus", load: apertus::load },
    Family { model_type: "cohere2", load: cohere2::load },
    Family { model_type: "deepseek_v3", load: deepseek_v3::load },
    Family { model_type: "ernie4_5", load: ernie4_5::load },
    Family { model_type: "exaone4", load: exaone4::load },
    Family { model_type: "falcon_h1", load: falcon_h1::load },
    Family { model_type: "gemma", load: gemma::load },
    Family { model_type: "gemma2", load: gemma2::load },
    Family { model_type: "gemma3", load: gemma3::load },
    Family { model_type: "gemma3_text", load: gemma3::load },
    Family { model_type: "gemma3n", load: gemma3n::load },
    Family { model_type: "gemma3n_text", load: gemma3n::load },
    Family { model_type: "gemma4", load: gemma4::load },
    Family { model_type: "gemma4_text", load: gemma4::load },
    Family { model_type: "gemma4_unified", load: gemma4::load },
    Family { model_type: "glm4_moe", load: glm4_moe::load },
    Family { model_type: "glm4_moe_lite", load: deepseek_v3::load },
    Family { model_type: "gpt_oss", load: gpt_oss::load },
    Family { model_type: "granite", load: granitemoehybrid::load },
    Family { model_type: "granitemoe", load: granitemoehybrid::load },
    Family { model_type: "granitemoehybrid", load: granitemoehybrid::load },
    Family { model_type: "hunyuan_v1_dense", load: hunyuan::load },
    Family { model_type: "kimi_k2", load: deepseek_v3::load },
    Family { model_type: "kimi_linear", load: kimi_linear::load },
    Family { model_type: "lfm2", load: lfm2::load },
    Family { model_type: "lfm2_moe", load: lfm2::load },
    Family { model_type: "llama", load: llama::load },
    Family { model_type: "mamba2", load: mamba2::load },
    Family { model_type: "minimax_m2", load: minimax_m2::load },
    Family { model_type: "ministral3", load: mistral::load },
    Family { model_type: "mistral", load: mistral::load },
    Family { model_type: "mistral3", load: mistral::load },
    Family { model_type: "mixtral", load: mixtral::load },
    Family { model_type: "nemotron_h", load: nemotron_h::load },
    Family { model_type: "olmo2", load: olmo::load },
    Family { model_type: "olmo3", load: olmo::load },
    Family { model_type: "olmoe", load: qwen3::load },
    Family { model_type: "phi3", load: phi3::load },
    Family { model_type: "qwen2", load: qwen2::load },
    Family { model_type: "qwen2_5_vl", load: qwen2::load },
    Family { model_type: "qwen2_moe", load: qwen3::load },
    Family { model_type: "qwen2_vl", load: qwen2::load },
    Family { model_type: "qwen3", load: qwen3::load },
    Family { model_type: "qwen3_5", load: qwen3_5::load },
    Family { model_type: "qwen3_5_moe", load: qwen3_5::load },
    Family { model_type: "qwen3_5_moe_text", load: qwen3_5::load },
    Family { model_type: "qwen3_5_text", load: qwen3_5::load },
    Family { model_type: "qwen3_moe", load: qwen3::load },
    Family { model_type: "qwen3_next", load: qwen3_next::load },
    Family { model_type: "qwen3_vl", load: qwen3::load },
    Family { model_type: "qwen3_vl_moe", load: qwen3::load_vl_moe },
    Family { model_type: "seed_oss", load: llama::load },
    Family { model_type: "smollm3", load: smollm3::load },
];
