//! What a request remembers, a layer at a time.
//!
//! A cache holds no weights; `Model::forward` alone advances it. It knows nothing of tokens: which
//! tokens its rows came from is `decode`'s business.

mod full;
mod recurrent;

pub use full::Full;
pub use recurrent::Recurrent;

use mlx_rs::Array;

use crate::error::{Error, Result};

/// The memory of one layer.
#[derive(Debug, Clone)]
pub enum LayerCache {
    /// Keys and values of every position.
    Full(Full),
    /// A fixed-size state that every position changes.
    Recurrent(Recurrent),
}

/// Everything that a request remembers.
#[derive(Debug, Clone)]
pub struct Cache {
    /// One entry a layer, in the model's order.
    pub layers: Vec<LayerCache>,
    /// Rows that went through the model so far.
    pub position: usize,
}

/// Neighbouring rows of one sequence.
pub struct Span<'a> {
    /// How many rows.
    pub rows: i32,
    /// What the sequence remembers of the rows before.
    pub cache: &'a mut Cache,
}

impl Cache {
    /// The state as plain arrays, layer by layer; [`Cache::restore`] reads them back.
    ///
    /// Cheap: arrays are shared, not copied.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX rejects a slice.
    pub fn state(&self) -> Result<Vec<Array>> {
        let mut arrays = Vec::with_capacity(2 * self.layers.len());
        for layer in &self.layers {
            arrays.extend(match layer {
                LayerCache::Full(full) => full.state()?,
                LayerCache::Recurrent(recurrent) => recurrent.state(),
            });
        }
        Ok(arrays)
    }

    /// Puts the state of `position` rows in place, as [`Cache::state`] returned it.
    ///
    /// # Errors
    /// [`Error::Store`] when number or shapes of the arrays are not those of this model; the cache
    /// is then unchanged.
    pub fn restore(&mut self, arrays: Vec<Array>, position: usize) -> Result<()> {
        let mut layers = self.layers.clone();
        let mut arrays = arrays.into_iter();
        for layer in &mut layers {
            let (Some(a), Some(b)) = (arrays.next(), arrays.next()) else {
                return Err(Error::Store("a snapshot has too few tensors".into()));
            };
            match layer {
                LayerCache::Full(full) => full.restore(a, b, position)?,
                LayerCache::Recurrent(recurrent) => recurrent.restore(a, b)?,
            }
        }
        if arrays.next().is_some() {
            return Err(Error::Store("a snapshot has too many tensors".into()));
        }
        *self = Self { layers, position };
        Ok(())
    }
}

/// Refuses a tensor whose shape is not what the layer has.
fn expect_shape(array: &Array, shape: &[i32]) -> Result<()> {
    if array.shape() == shape {
        return Ok(());
    }
    Err(Error::Store(format!(
        "a snapshot has a tensor of shape {:?}, not {shape:?}",
        array.shape()
    )))
}
