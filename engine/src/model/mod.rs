//! Models compute: token rows and a cache in, hidden states and logits out.
//!
//! A model has no request state, does no I/O after loading, never samples or logs, and knows
//! nothing of quantization, policies or persistence. **A family is one file and one row of
//! [`FAMILIES`].**

mod experts;
mod fp8;
mod gemma2;
mod gemma3;
mod gemma4;
mod llama;
mod load;
mod mistral;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_next;
mod weights;

pub use load::{Loaded, load};
pub use weights::Weights;

use mlx_rs::Array;
use serde_json::Value;

use crate::cache::{Cache, Span};
use crate::error::Result;

/// A language model: weights and the formula that uses them.
pub trait Model {
    /// How many layers it has.
    fn depth(&self) -> usize;

    /// Positions it was trained for, in families whose `config.json` may leave that out.
    fn context(&self) -> Option<u64> {
        None
    }

    /// An empty cache, one layer of it for each layer of the model that remembers something.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot make it.
    fn new_cache(&self) -> Result<Cache>;

    /// Runs `tokens` [R] (u32) through all layers and advances the caches.
    ///
    /// Rows of several sequences are joined, not padded: the first `spans[0].rows` tokens go on
    /// where `spans[0].cache` stands, the next ones belong to `spans[1]`, and so on. `pass` says
    /// which layers run. Returns the hidden states after the final norm, [1, R, D].
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects a shape; the caches are then of no further use.
    fn forward(&self, tokens: &Array, spans: &mut [Span<'_>], pass: Pass<'_>) -> Result<Array>;

    /// Logits of hidden states: [1, R, D] to [1, R, V].
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects a shape.
    fn logits(&self, hidden: &Array) -> Result<Array>;

    /// The layer that predicts the token after the next one, where the checkpoint has one.
    fn mtp(&self) -> Option<&dyn Mtp> {
        None
    }
}

/// Which layers run in a pass: all, unless it drafts or saves time at a stated loss.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pass<'a> {
    /// Leave after so many layers; the caches of the others stay behind until a rewind.
    pub exit: Option<usize>,
    /// Layers whose feed-forward block is left out. It remembers nothing, so caches stay whole.
    pub skip: &'a [usize],
}

impl Pass<'_> {
    /// Every layer.
    pub const WHOLE: Pass<'static> = Pass { exit: None, skip: &[] };

    /// How many of `depth` layers run.
    pub fn layers(&self, depth: usize) -> usize {
        self.exit.unwrap_or(depth).min(depth)
    }

    /// Whether the feed-forward block of `layer` is left out.
    pub fn skips(&self, layer: usize) -> bool {
        self.skip.contains(&layer)
    }
}

/// A multi-token-prediction layer: drafts from the model's own hidden states.
///
/// Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2).
pub trait Mtp {
    /// An empty cache of this layer alone.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot make it.
    fn new_cache(&self) -> Result<Cache>;

    /// `hidden` [1, R, D] as `Model::forward` returned it for R neighbouring rows, and `tokens` [R]
    /// (u32), the token that follows each of them. Returns [1, R, D], which [`Model::logits`] turns
    /// into logits of the token after that; it can stand for `hidden` again, one token further.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects a shape.
    fn forward(&self, hidden: &Array, tokens: &Array, span: &mut Span<'_>) -> Result<Array>;
}

/// A family of models that share a formula.
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Builds the model from its `config.json` and weights.
    pub load: fn(&Value, &mut Weights) -> Result<Box<dyn Model>>,
}

/// Every family that can be loaded.
pub const FAMILIES: &[Family] = &[
    Family { model_type: "gemma2", load: gemma2::load },
    Family { model_type: "gemma3", load: gemma3::load },
    Family { model_type: "gemma3_text", load: gemma3::load },
    Family { model_type: "gemma4", load: gemma4::load },
    Family { model_type: "gemma4_text", load: gemma4::load },
    Family { model_type: "llama", load: llama::load },
    Family { model_type: "ministral3", load: mistral::load },
    Family { model_type: "mistral", load: mistral::load },
    Family { model_type: "mistral3", load: mistral::load },
    Family { model_type: "qwen2", load: qwen2::load },
    Family { model_type: "qwen3", load: qwen3::load },
    Family { model_type: "qwen3_5", load: qwen3_5::load },
    Family { model_type: "qwen3_5_moe", load: qwen3_5::load },
    Family { model_type: "qwen3_moe", load: qwen3::load },
    Family { model_type: "qwen3_next", load: qwen3_next::load },
];
