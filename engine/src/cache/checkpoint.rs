//! Checkpoints: rewinding further than a draft mark.
//!
//! KV can be truncated at any position. A checkpoint holds the recurrent state of one position: a
//! handle of each matrix, which no row changes in place, and copies of what are views of larger
//! buffers. A view of a sliding window would hold twice the window, and make the next row copy the
//! buffer, because MLX writes in place only if nothing else holds it; a view of a convolution's tail
//! would hold the inputs of a whole chunk.

use std::ops::Deref;

use mlx_rs::Array;

use super::{Cache, LayerCache, owned, row};
use crate::error::Result;
use crate::ranks::{Id, Mirror, Operation};

/// The recurrent state of a cache at one position.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    position: usize,
    recurrent: RecurrentState,
    /// The number under which other ranks have theirs.
    mirror: Mirror,
}

/// The recurrent state of a cache at one position, two arrays a layer.
#[derive(Debug, Clone, Default)]
pub struct State {
    arrays: Vec<Array>,
    /// The number under which other ranks have theirs.
    mirror: Mirror,
}

impl State {
    pub(super) fn new(arrays: Vec<Array>, mirror: Mirror) -> Self {
        Self { arrays, mirror }
    }

    /// Copies everything to memory of its own.
    pub fn owned(self) -> Result<Self> {
        self.mirror.note(|object| Operation::Own { object });
        Ok(Self { arrays: owned(&self.arrays)?, ..self })
    }

    /// The number under which other ranks have theirs.
    pub(super) fn id(&self) -> Option<Id> {
        self.mirror.id()
    }
}

impl From<Vec<Array>> for State {
    /// A state that was read. Other ranks do not have it.
    fn from(arrays: Vec<Array>) -> Self {
        Self { arrays, mirror: Mirror::default() }
    }
}

impl Deref for State {
    type Target = [Array];

    fn deref(&self) -> &[Array] {
        &self.arrays
    }
}

#[derive(Debug, Clone)]
enum RecurrentState {
    /// Copies of the arrays of [`Cache::recurrent_state`].
    Copied(Vec<Array>),
    /// The layers that cannot be truncated, as they were.
    Shared(Vec<LayerCache>),
}

impl Checkpoint {
    /// Number of rows before it.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Copied arrays, to evaluate them.
    pub fn arrays(&self) -> &[Array] {
        match &self.recurrent {
            RecurrentState::Copied(arrays) => arrays,
            RecurrentState::Shared(_) => &[],
        }
    }
}

impl Cache {
    /// A checkpoint of the current position. Evaluate its arrays, or it holds what they are copied
    /// from.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        // Shares a buffer that is at most 16 KiB larger than the array.
        let compact = |array: &Array| array.contiguous();
        let arrays = self.recurrent_arrays()?;
        let recurrent = arrays.iter().map(compact).collect::<std::result::Result<_, _>>()?;
        let recurrent = RecurrentState::Copied(recurrent);
        Ok(Checkpoint { position: self.position, recurrent, mirror: self.checkpoint_mirror(true) })
    }

    /// A checkpoint of the current position that copies nothing. It holds whole buffers, which the next
    /// rows then cannot be written to in place, so it must be dropped after a few steps.
    pub fn brief_checkpoint(&self) -> Checkpoint {
        let shared = |layer: &&LayerCache| {
            matches!(layer, LayerCache::Sliding(_) | LayerCache::Recurrent(_))
        };
        let layers = self.layers.iter().filter(shared).cloned().collect();
        let recurrent = RecurrentState::Shared(layers);
        Checkpoint { position: self.position, recurrent, mirror: self.checkpoint_mirror(false) }
    }

    fn checkpoint_mirror(&self, copied: bool) -> Mirror {
        self.mirror.make(|cache, new| Operation::Checkpoint { cache, copied, new })
    }

    /// Drops all rows after `checkpoint`, which was taken from this cache or from one that has seen
    /// the same rows up to there. Clears the draft mark.
    ///
    /// # Errors
    /// [`crate::Error::SavedState`] if it belongs to another model. The cache is unusable after an error.
    ///
    /// # Panics
    /// If the checkpoint is after the current position.
    pub fn rewind_to(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        assert!(
            checkpoint.position <= self.position,
            "the checkpoint is after the current position"
        );
        if let Some(checkpoint) = checkpoint.mirror.id() {
            self.mirror.note(|cache| Operation::RewindTo { cache, checkpoint });
        }
        let len = row(checkpoint.position);
        let (mut copied, mut shared) = match &checkpoint.recurrent {
            RecurrentState::Copied(arrays) => (arrays.iter(), [].iter()),
            RecurrentState::Shared(layers) => ([].iter(), layers.iter()),
        };
        for layer in &mut self.layers {
            match layer {
                LayerCache::Full(full) => full.truncate(len),
                LayerCache::Quantized(quantized) => quantized.truncate(len),
                LayerCache::Sliding(_) | LayerCache::Recurrent(_) => match shared.next() {
                    Some(old) => *layer = old.clone(),
                    None => layer.restore_recurrent(&mut copied, len)?,
                },
            }
        }
        (self.position, self.draft_mark) = (checkpoint.position, None);
        Ok(())
    }

    /// Drops rows `position..`. Clears the draft mark.
    ///
    /// # Panics
    /// If the cache is not truncatable: see [`Cache::is_truncatable`].
    pub fn truncate(&mut self, position: usize) {
        self.mirror.note(|cache| Operation::Truncate { cache, position });
        for layer in &mut self.layers {
            match layer {
                LayerCache::Full(full) => full.truncate(row(position)),
                LayerCache::Quantized(quantized) => quantized.truncate(row(position)),
                LayerCache::Sliding(_) | LayerCache::Recurrent(_) => {
                    panic!("recurrent state cannot be truncated")
                }
            }
        }
        (self.position, self.draft_mark) = (self.position.min(position), None);
    }
}
