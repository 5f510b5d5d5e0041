//! KV that prefixes share: cut out of a cache, joined, and restored into another one.

use mlx_rs::Array;
use mlx_rs::ops::indexing::{TryIndexMutOp, TryIndexOp};
use mlx_rs::ops::{concatenate, zeros_dtype};
use mlx_rs::transforms::eval;

use super::row;
use crate::error::Result;

/// KV of one layer in one format: keys and values [1, H, T, D], or, if quantized, elements, scales
/// and biases of keys, then of values.
pub(super) type LayerKv = Vec<Array>;

/// Keys and values of neighbouring positions, of every layer that keeps all positions.
#[derive(Debug, Clone)]
pub struct KeyValues {
    pub(super) count: usize,
    /// A layer has two entries if it is dense up to a position and quantized after it.
    pub(super) layers: Vec<Vec<LayerKv>>,
}

impl KeyValues {
    /// Number of positions.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Positions `from..to` of these. Shares the memory.
    pub fn part(&self, from: usize, to: usize) -> Result<Self> {
        let layer = |formats: &Vec<LayerKv>| -> Result<Vec<LayerKv>> {
            let mut parts = Vec::new();
            let mut start = 0;
            for kv in formats {
                let end = start + kv[0].dim(2);
                let (from, to) = (row(from).max(start), row(to).min(end));
                if from < to {
                    let cut = |a: &Array| a.try_index((.., .., from - start..to - start, ..));
                    parts.push(kv.iter().map(cut).collect::<std::result::Result<_, _>>()?);
                }
                start = end;
            }
            Ok(parts)
        };
        let layers = self.layers.iter().map(layer).collect::<Result<_>>()?;
        Ok(Self { count: to - from, layers })
    }

    /// All arrays, layer by layer; [`super::Cache::key_values_from`] reads them back.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.layers.iter().flatten().flatten()
    }

    /// Joins parts that follow each other.
    pub fn join(parts: &[Self]) -> Result<Self> {
        let count = parts.iter().map(Self::count).sum();
        let layers = parts.first().map_or(0, |part| part.layers.len());
        let layer = |i: usize| -> Result<Vec<LayerKv>> {
            let kvs: Vec<&LayerKv> = parts.iter().flat_map(|part| &part.layers[i]).collect();
            let formats = kvs.chunk_by(|a, b| a.len() == b.len());
            formats.map(|kvs| (0..kvs[0].len()).map(|n| joined(kvs, n)).collect()).collect()
        };
        Ok(Self { count, layers: (0..layers).map(layer).collect::<Result<_>>()? })
    }

    /// Copies everything to memory of its own.
    pub fn owned(mut self) -> Result<Self> {
        let arrays: Vec<Array> = self.arrays().cloned().collect();
        let mut copies = owned(&arrays)?.into_iter();
        for array in self.layers.iter_mut().flatten().flatten() {
            *array = copies.next().expect("as many copies as arrays");
        }
        Ok(self)
    }
}

/// The n-th arrays of `kvs`, concatenated.
fn joined(kvs: &[&LayerKv], n: usize) -> Result<Array> {
    let arrays: Vec<&Array> = kvs.iter().map(|kv| &kv[n]).collect();
    Ok(concatenate(&arrays, 2)?)
}

/// Evaluated copies: the buffers that `arrays` are views of can be freed or written in place.
pub fn owned(arrays: &[Array]) -> Result<Vec<Array>> {
    let copy = |array: &Array| -> Result<Array> {
        // `contiguous` shares memory if it can.
        let mut copy = zeros_dtype(array.shape(), array.dtype())?;
        copy.try_index_mut(.., array)?;
        Ok(copy)
    };
    let copies = arrays.iter().map(copy).collect::<Result<Vec<_>>>()?;
    eval(&copies)?;
    Ok(copies)
}
