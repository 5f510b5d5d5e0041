//! What a request remembers, a layer at a time.
//!
//! A cache holds no weights; `Model::forward` alone advances it. It knows nothing of tokens: which
//! tokens its rows came from is `decode`'s business.
//!
//! It can go back: after [`Cache::checkpoint`] every kind of layer can be rewound to any row since.
//! That is how drafted rows that were rejected are forgotten.

mod full;
mod quantized;
mod recurrent;
mod rows;
mod sliding;

pub use full::Full;
pub use quantized::{Quantized, QuantizedRows};
pub use recurrent::{Recurrent, Writes, delta_step};
pub use sliding::Sliding;

use mlx_rs::Array;

use crate::error::{Error, Result};

/// The memory of one layer.
#[derive(Debug, Clone)]
pub enum LayerCache {
    /// Keys and values of every position.
    Full(Full),
    /// Keys and values of every position, in fewer bits from some position on.
    Quantized(Quantized),
    /// Keys and values of the last positions.
    Sliding(Sliding),
    /// A fixed-size state that every position changes.
    Recurrent(Recurrent),
}

/// Everything that a request remembers.
#[derive(Debug, Clone)]
pub struct Cache {
    /// One entry for each layer that remembers something, in the model's order.
    pub layers: Vec<LayerCache>,
    /// Rows that went through the model so far: the position of the next one.
    pub position: usize,
    mark: Option<usize>,
}

/// Neighbouring rows of one sequence.
pub struct Span<'a> {
    /// How many rows.
    pub rows: i32,
    /// What the sequence remembers of the rows before.
    pub cache: &'a mut Cache,
}

impl Span<'_> {
    /// Position of the first row.
    pub fn offset(&self) -> i32 {
        i32::try_from(self.cache.position).expect("contexts are far shorter: checked at admission")
    }
}

impl Cache {
    /// An empty cache of these empty layers.
    pub fn new(layers: Vec<LayerCache>) -> Self {
        Self { layers, position: 0, mark: None }
    }

    /// Keeps keys and values of full attention in `bits` bits from position `from` on. Lossy.
    ///
    /// # Errors
    /// [`Error::Invalid`] when heads of this size cannot be quantized.
    pub fn quantize(&mut self, bits: i32, from: i32) -> Result<()> {
        for layer in &mut self.layers {
            if let LayerCache::Full(full) = layer {
                *layer = LayerCache::Quantized(Quantized::new(full, bits, from)?);
            }
        }
        Ok(())
    }

    /// From here on [`Cache::rewind`] can come back. Replaces an earlier checkpoint.
    ///
    /// Recurrent layers keep what each row writes until then, so a checkpoint wants an end.
    pub fn checkpoint(&mut self) {
        for layer in &mut self.layers {
            match layer {
                LayerCache::Full(_) | LayerCache::Quantized(_) => {}
                LayerCache::Sliding(sliding) => sliding.checkpoint(),
                LayerCache::Recurrent(recurrent) => recurrent.checkpoint(),
            }
        }
        self.mark = Some(self.position);
    }

    /// Forgets all rows from `position` on, and ends the checkpoint.
    ///
    /// Layers that an early exit left behind the others stay where they are, so that a rewind to
    /// the checkpoint itself brings all of them together again.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX rejects it; the cache is then of no further use.
    ///
    /// # Panics
    /// When `position` does not lie between the checkpoint and now.
    pub fn rewind(&mut self, position: usize) -> Result<()> {
        let mark = self.mark.take().expect("a rewind follows a checkpoint");
        assert!((mark..=self.position).contains(&position), "rewound to where it never was");
        for layer in &mut self.layers {
            match layer {
                LayerCache::Full(full) => full.rewind(position as i32),
                LayerCache::Quantized(quantized) => quantized.rewind(position as i32),
                LayerCache::Sliding(sliding) => sliding.rewind(position as i32),
                LayerCache::Recurrent(recurrent) => recurrent.rewind((position - mark) as i32)?,
            }
        }
        self.position = position;
        Ok(())
    }

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
                LayerCache::Quantized(quantized) => quantized.state()?,
                LayerCache::Sliding(sliding) => sliding.state()?,
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
        let len = i32::try_from(position).unwrap_or(i32::MAX);
        for layer in &mut layers {
            if let LayerCache::Quantized(quantized) = layer {
                quantized.restore(&mut arrays, len)?;
                continue;
            }
            let (Some(a), Some(b)) = (arrays.next(), arrays.next()) else {
                return Err(Error::Store("a snapshot has too few tensors".into()));
            };
            match layer {
                LayerCache::Full(full) => full.restore(&a, &b, len)?,
                LayerCache::Sliding(sliding) => sliding.restore(&a, &b, len)?,
                LayerCache::Recurrent(recurrent) => recurrent.restore(a, b)?,
                LayerCache::Quantized(_) => unreachable!("restored above"),
            }
        }
        if arrays.next().is_some() {
            return Err(Error::Store("a snapshot has too many tensors".into()));
        }
        *self = Self { layers, position, mark: None };
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
