//! The pass over a model's layers: the one place that knows of early exits and skipped layers.

use mlx_rs::Array;

use super::Model;
use crate::cache::Span;
use crate::error::Result;
use crate::kernels::cpu;

/// Which layers a pass runs: all of them, unless it drafts or trades accuracy for time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pass<'a> {
    /// Exit after this many layers. The caches of the others lag behind until a rewind.
    pub exit: Option<usize>,
    /// Layers that skip their feed-forward block. It keeps no state, so caches stay complete.
    pub skip: &'a [usize],
}

impl Pass<'_> {
    /// Every layer.
    pub const WHOLE: Pass<'static> = Pass { exit: None, skip: &[] };
}

impl dyn Model + '_ {
    /// Runs `tokens` [R] (u32) through the layers of `pass` and advances the caches.
    ///
    /// Rows of several sequences are joined without padding: the first `spans[0].rows` tokens
    /// follow `spans[0].cache`, the next ones belong to `spans[1]`, and so on. Returns the hidden
    /// states after the final norm, [1, R, D].
    ///
    /// # Errors
    /// [`crate::Error::Array`] if MLX rejects a shape; the caches are then unusable.
    pub fn forward(&self, tokens: &Array, spans: &mut [Span<'_>], pass: Pass<'_>) -> Result<Array> {
        let told = self.tell(tokens, spans, pass)?;
        let tokens = told.as_ref().unwrap_or(tokens);
        let mut x = self.embed(tokens)?;
        let _at_once = cpu::run_at_once(&x)?;
        let inputs = self.layer_inputs(tokens, &x)?;
        for layer in 0..self.depth().min(pass.exit.unwrap_or(usize::MAX)) {
            x = self.mix(layer, &x, spans)?;
            if !pass.skip.contains(&layer) {
                x = self.feed_forward(layer, &x)?;
            }
            x = self.end_layer(layer, x, inputs.as_ref())?;
        }
        for span in spans {
            span.advance();
        }
        self.final_norm(&x)
    }
}
