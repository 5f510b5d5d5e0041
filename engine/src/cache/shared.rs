//! What prefixes share: keys and values of neighbouring positions, cut out of a cache and joined
//! to one again.

use mlx_rs::Array;
use mlx_rs::ops::indexing::{TryIndexMutOp, TryIndexOp};
use mlx_rs::ops::{concatenate, zeros_dtype};
use mlx_rs::transforms::eval;

use crate::error::Result;

/// Rows of one layer that are kept alike: keys and values [1, H, T, D], or for quantized ones their
/// elements, scales and biases each.
pub(super) type Piece = Vec<Array>;

/// Keys and values of neighbouring positions, of every layer that keeps those of all positions.
#[derive(Debug, Clone)]
pub struct KeyValues {
    /// Positions.
    pub(super) count: usize,
    /// A layer's rows are in more than one piece where they begin to be quantized.
    pub(super) layers: Vec<Vec<Piece>>,
}

impl KeyValues {
    /// How many positions.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Positions from `from` to `to` of these; the memory is shared.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects a slice.
    pub fn part(&self, from: usize, to: usize) -> Result<Self> {
        let layer = |pieces: &Vec<Piece>| -> Result<Vec<Piece>> {
            let mut parts = Vec::new();
            let mut start = 0;
            for piece in pieces {
                let end = start + piece[0].dim(2);
                let (from, to) = ((from as i32).max(start), (to as i32).min(end));
                if from < to {
                    let cut = |a: &Array| a.try_index((.., .., from - start..to - start, ..));
                    parts.push(piece.iter().map(cut).collect::<std::result::Result<_, _>>()?);
                }
                start = end;
            }
            Ok(parts)
        };
        let layers = self.layers.iter().map(layer).collect::<Result<_>>()?;
        Ok(Self { count: to - from, layers })
    }

    /// All arrays, layer by layer; [`super::Cache::key_values_of`] reads them back.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.layers.iter().flatten().flatten()
    }

    /// One of several that follow each other.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects the shapes.
    pub fn join(parts: &[Self]) -> Result<Self> {
        let count = parts.iter().map(Self::count).sum();
        let layers = parts.first().map_or(0, |part| part.layers.len());
        let layer = |i: usize| -> Result<Vec<Piece>> {
            let pieces: Vec<&Piece> = parts.iter().flat_map(|part| &part.layers[i]).collect();
            let alike = pieces.chunk_by(|a, b| a.len() == b.len());
            alike.map(|pieces| (0..pieces[0].len()).map(|n| joined(pieces, n)).collect()).collect()
        };
        Ok(Self { count, layers: (0..layers).map(layer).collect::<Result<_>>()? })
    }

    /// The same in memory of its own.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot compute or copy it.
    pub fn owned(mut self) -> Result<Self> {
        let arrays: Vec<Array> = self.arrays().cloned().collect();
        let mut copies = owned(&arrays)?.into_iter();
        for array in self.layers.iter_mut().flatten().flatten() {
            *array = copies.next().expect("one for each");
        }
        Ok(self)
    }
}

/// The n-th arrays of `pieces`, one behind the other.
fn joined(pieces: &[&Piece], n: usize) -> Result<Array> {
    let arrays: Vec<&Array> = pieces.iter().map(|piece| &piece[n]).collect();
    Ok(concatenate(&arrays, 2)?)
}

/// Copies, so that what they were part of can go, or be written to in place.
///
/// # Errors
/// [`crate::Error::Array`] when MLX cannot compute or copy them.
pub fn owned(arrays: &[Array]) -> Result<Vec<Array>> {
    let copy = |array: &Array| -> Result<Array> {
        // `contiguous` shares memory where it can.
        let mut copy = zeros_dtype(array.shape(), array.dtype())?;
        copy.try_index_mut(.., array)?;
        Ok(copy)
    };
    let copies = arrays.iter().map(copy).collect::<Result<Vec<_>>>()?;
    eval(&copies)?;
    Ok(copies)
}
