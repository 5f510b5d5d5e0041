//! Going back further than a checkpoint: to where a snapshot was taken.
//!
//! Keys and values of all positions are cut anywhere. What exists at one position alone is kept for
//! the position to go back to. That costs handles, no copies: MLX writes to a buffer in place only
//! while nothing else holds it, so that a window which a snapshot shares is copied by the next row,
//! once.

use mlx_rs::Array;

use super::{Cache, LayerCache};
use crate::error::Result;

/// What of a cache exists at one position alone, as it was there.
#[derive(Debug, Clone)]
pub struct Snapshot {
    position: usize,
    fixed: Vec<Array>,
}

impl Snapshot {
    /// Rows that had gone through the model.
    pub fn position(&self) -> usize {
        self.position
    }

    /// All that is held, to have it computed.
    pub fn arrays(&self) -> &[Array] {
        &self.fixed
    }
}

impl Cache {
    /// What [`Cache::back_to`] needs to come back here.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects a slice.
    pub fn snapshot(&self) -> Result<Snapshot> {
        Ok(Snapshot { position: self.position, fixed: self.fixed()? })
    }

    /// Forgets all rows since `snapshot`, which is one of this cache, or of one that has seen the
    /// same rows up to there. Ends a checkpoint.
    ///
    /// # Errors
    /// [`crate::Error::SavedState`] when it is another model's; [`crate::Error::Array`] when MLX rejects
    /// the shapes. The cache is then of no further use.
    ///
    /// # Panics
    /// When it lies ahead.
    pub fn back_to(&mut self, snapshot: &Snapshot) -> Result<()> {
        assert!(snapshot.position <= self.position, "a snapshot of what was never seen");
        let len = snapshot.position as i32;
        let mut fixed = snapshot.fixed.iter();
        for layer in &mut self.layers {
            match layer {
                LayerCache::Full(full) => full.rewind(len),
                LayerCache::Quantized(quantized) => quantized.rewind(len),
                LayerCache::Sliding(sliding) => {
                    let (keys, values) = super::pair(&mut fixed)?;
                    sliding.restore(keys, values, len)?;
                }
                LayerCache::Recurrent(recurrent) => {
                    let (state, tail) = super::pair(&mut fixed)?;
                    recurrent.restore(state.clone(), tail.clone())?;
                }
            }
        }
        (self.position, self.mark) = (snapshot.position, None);
        Ok(())
    }

    /// Forgets all rows from `position` on, in a cache that can resume anywhere. Ends a checkpoint.
    ///
    /// # Panics
    /// When it cannot: see [`Cache::has_fixed`].
    pub fn cut(&mut self, position: usize) {
        for layer in &mut self.layers {
            match layer {
                LayerCache::Full(full) => full.rewind(position as i32),
                LayerCache::Quantized(quantized) => quantized.rewind(position as i32),
                LayerCache::Sliding(_) | LayerCache::Recurrent(_) => {
                    panic!("what exists at one position alone cannot be cut")
                }
            }
        }
        (self.position, self.mark) = (self.position.min(position), None);
    }
}
