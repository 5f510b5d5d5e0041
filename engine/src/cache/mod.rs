//! What a request remembers, a layer at a time.
//!
//! A cache holds no weights; `Model::forward` alone advances it. It knows nothing of tokens: which
//! tokens its rows came from is `decode`'s business.
//!
//! It can go back: after [`Cache::checkpoint`] every kind of layer can be rewound to any row since.
//! That is how drafted rows that were rejected are forgotten. A [`Snapshot`] leads further back, to
//! one position: that is how a policy rewinds.

mod full;
mod quantized;
mod recurrent;
mod rows;
mod shared;
mod sliding;
mod snapshot;

pub use full::Full;
pub use quantized::{Quantized, QuantizedRows};
pub use recurrent::{Recurrent, Writes, delta_write};
pub use shared::{KeyValues, owned};
pub use sliding::Sliding;
pub use snapshot::Snapshot;

use shared::Piece;

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

    /// All that is remembered, as plain arrays: to have it computed, or to compare it.
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

    /// Whether some of it exists at the present position alone, so that it can be resumed from only
    /// where [`Cache::fixed`] was taken.
    pub fn has_fixed(&self) -> bool {
        let fixed =
            |layer: &LayerCache| matches!(layer, LayerCache::Sliding(_) | LayerCache::Recurrent(_));
        self.layers.iter().any(fixed)
    }

    /// Whether rows of all layers that keep them can be cut into groups of so many elements.
    pub fn rows_divide_by(&self, group: i32) -> bool {
        let divides = |layer: &LayerCache| match layer {
            LayerCache::Full(full) => full.shape()[1] % group == 0,
            _ => true,
        };
        self.layers.iter().all(divides)
    }

    /// What exists at the present position alone: recurrent states and sliding windows, two arrays a
    /// layer.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX rejects a slice.
    pub fn fixed(&self) -> Result<Vec<Array>> {
        let mut arrays = Vec::new();
        for layer in &self.layers {
            match layer {
                LayerCache::Full(_) | LayerCache::Quantized(_) => {}
                LayerCache::Sliding(sliding) => arrays.extend(sliding.state()?),
                LayerCache::Recurrent(recurrent) => arrays.extend(recurrent.state()),
            }
        }
        Ok(arrays)
    }

    /// Keys and values of the positions from `from` to `to`, in layers that keep those of all.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX rejects a slice.
    ///
    /// # Panics
    /// When `from` is not before `to`, or `to` behind the present position.
    pub fn key_values(&self, from: usize, to: usize) -> Result<KeyValues> {
        assert!(from < to && to <= self.position, "asked for rows that are not there");
        let layer = |layer: &LayerCache| match layer {
            LayerCache::Full(full) => Some(full.piece(from as i32, to as i32).map(|p| vec![p])),
            LayerCache::Quantized(quantized) => Some(quantized.pieces(from as i32, to as i32)),
            LayerCache::Sliding(_) | LayerCache::Recurrent(_) => None,
        };
        let layers = self.layers.iter().filter_map(layer).collect::<Result<_>>()?;
        Ok(KeyValues { count: to - from, layers })
    }

    /// The keys and values of positions from `from` to `to` whose arrays are these, in order.
    ///
    /// # Errors
    /// [`Error::SavedState`] when there are too few or too many of them for this model.
    pub fn key_values_of(&self, arrays: Vec<Array>, from: usize, to: usize) -> Result<KeyValues> {
        let mut arrays = arrays.into_iter();
        let mut piece = |count: usize| -> Result<Piece> {
            let piece: Piece = arrays.by_ref().take(count).collect();
            if piece.len() < count || piece.iter().any(|array| array.ndim() != 4) {
                return Err(Error::SavedState("saved rows have too few tensors".into()));
            }
            Ok(piece)
        };
        let mut layers = Vec::new();
        for layer in &self.layers {
            match layer {
                LayerCache::Full(_) => layers.push(vec![piece(2)?]),
                LayerCache::Quantized(quantized) => {
                    let (dense, packed) = quantized.split(from as i32, to as i32);
                    let sizes = [(dense, 2), (packed, 6)];
                    let present = sizes.into_iter().filter(|(rows, _)| !rows.is_empty());
                    layers.push(present.map(|(_, count)| piece(count)).collect::<Result<_>>()?);
                }
                LayerCache::Sliding(_) | LayerCache::Recurrent(_) => {}
            }
        }
        if arrays.next().is_some() {
            return Err(Error::SavedState("saved rows have too many tensors".into()));
        }
        Ok(KeyValues { count: to - from, layers })
    }

    /// Puts the state of `position` rows in place: `rows` of all of them, in order, and what
    /// [`Cache::fixed`] returned there.
    ///
    /// # Errors
    /// [`Error::SavedState`] when number or shapes of the arrays are not those of this model; the cache
    /// is then unchanged.
    pub fn restore(&mut self, rows: &[KeyValues], fixed: &[Array], position: usize) -> Result<()> {
        let mut layers = self.layers.clone();
        let (mut index, mut fixed) = (0, fixed.iter());
        let len = i32::try_from(position).unwrap_or(i32::MAX);
        for layer in &mut layers {
            if let LayerCache::Full(_) | LayerCache::Quantized(_) = layer {
                let pieces: Vec<&Piece> =
                    rows.iter().filter_map(|rows| rows.layers.get(index)).flatten().collect();
                index += 1;
                match layer {
                    LayerCache::Full(full) => full.restore(&pieces, len)?,
                    LayerCache::Quantized(quantized) => quantized.restore(&pieces, len)?,
                    _ => unreachable!("looked at above"),
                }
                continue;
            }
            let (a, b) = pair(&mut fixed)?;
            match layer {
                LayerCache::Sliding(sliding) => sliding.restore(a, b, len)?,
                LayerCache::Recurrent(recurrent) => recurrent.restore(a.clone(), b.clone())?,
                _ => unreachable!("looked at above"),
            }
        }
        if fixed.next().is_some() {
            return Err(Error::SavedState("a saved state has too many tensors".into()));
        }
        *self = Self { layers, position, mark: None };
        Ok(())
    }
}

/// The two arrays of the next layer.
fn pair<'a>(fixed: &mut impl Iterator<Item = &'a Array>) -> Result<(&'a Array, &'a Array)> {
    let missing = || Error::SavedState("a saved state has too few tensors".into());
    Ok((fixed.next().ok_or_else(missing)?, fixed.next().ok_or_else(missing)?))
}

/// The i-th array of each piece.
fn column<'a>(pieces: &[&'a Piece], i: usize) -> Result<Vec<&'a Array>> {
    let array = |piece: &&'a Piece| piece.get(i);
    let arrays: Option<Vec<&Array>> = pieces.iter().map(array).collect();
    arrays.ok_or_else(|| Error::SavedState("saved rows are of another kind".into()))
}

/// Refuses rows that are not `len` of the layer's [heads, width].
fn expect_rows(parts: &[&Array], [heads, width]: [i32; 2], len: i32) -> Result<()> {
    for part in parts {
        let rows = if part.ndim() == 4 { part.dim(2) } else { 0 };
        expect_shape(part, &[1, heads, rows, width])?;
    }
    let rows: i32 = parts.iter().map(|part| part.dim(2)).sum();
    if rows == len {
        return Ok(());
    }
    Err(Error::SavedState(format!("there are {rows} saved rows, not {len}")))
}

/// Refuses a tensor whose shape is not what the layer has.
fn expect_shape(array: &Array, shape: &[i32]) -> Result<()> {
    if array.shape() == shape {
        return Ok(());
    }
    Err(Error::SavedState(format!(
        "a snapshot has a tensor of shape {:?}, not {shape:?}",
        array.shape()
    )))
}
