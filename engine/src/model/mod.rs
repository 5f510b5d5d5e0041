//! Models compute: token rows and a cache in, hidden states and logits out.
//!
//! A model has no request state, does no I/O after loading, never samples or logs, and knows
//! nothing of quantization, policies or persistence. **A family is one file and one row of
//! [`FAMILIES`].**

mod load;
mod qwen3_5;
mod weights;

pub use load::{Loaded, load};
pub use weights::Weights;

use mlx_rs::Array;
use serde_json::Value;

use crate::cache::{Cache, Span};
use crate::error::Result;

/// A language model: weights and the formula that uses them.
pub trait Model {
    /// An empty cache, one layer of it for each layer of the model.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot make it.
    fn new_cache(&self) -> Result<Cache>;

    /// Runs `tokens` [R] (u32) through all layers and advances the caches.
    ///
    /// Rows of several sequences are joined, not padded: the first `spans[0].rows` tokens go on
    /// where `spans[0].cache` stands, the next ones belong to `spans[1]`, and so on. Returns
    /// the hidden states after the final norm, [1, R, D].
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects a shape; the caches are then of no further use.
    fn forward(&self, tokens: &Array, spans: &mut [Span<'_>]) -> Result<Array>;

    /// Logits of hidden states: [1, R, D] to [1, R, V].
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects a shape.
    fn logits(&self, hidden: &Array) -> Result<Array>;
}

/// A family of models that share a formula.
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Builds the model from its `config.json` and weights.
    pub load: fn(&Value, &mut Weights) -> Result<Box<dyn Model>>,
}

/// Every family that can be loaded.
pub const FAMILIES: &[Family] = &[Family { model_type: "qwen3_5", load: qwen3_5::load }];
