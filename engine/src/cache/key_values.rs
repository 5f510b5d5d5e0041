//! KV that prefixes share: cut out of a cache, joined, and restored into another one.

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, zeros_dtype};

use super::row;
use crate::error::Result;
use crate::lazy::submit;
use crate::ranks::{Id, Mirror, Operation};

/// KV of one layer in one format: keys and values [1, H, T, D], or, if quantized, elements, scales
/// and biases of keys, then of values.
pub(super) type LayerKv = Vec<Array>;

/// Keys and values of neighbouring positions, of every layer that keeps all positions.
#[derive(Debug, Clone)]
pub struct KeyValues {
    pub(super) count: usize,
    /// A layer has two entries if it is dense up to a position and quantized after it.
    pub(super) layers: Vec<Vec<LayerKv>>,
    /// The number under which other ranks have theirs.
    pub(super) mirror: Mirror,
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
        let mirror = self.mirror.make(|of, new| Operation::Part { of, from, to, new });
        Ok(Self { count: to - from, layers, mirror })
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
        let layers = (0..layers).map(layer).collect::<Result<_>>()?;
        let ids: Vec<Id> = parts.iter().filter_map(|part| part.mirror.id()).collect();
        let mirror = parts.first().map_or_else(Mirror::default, |first| {
            first.mirror.make(|_, new| Operation::Join { parts: ids, new })
        });
        Ok(Self { count, layers, mirror })
    }

    /// Copies everything to memory of its own.
    pub fn owned(mut self) -> Result<Self> {
        self.mirror.note(|object| Operation::Own { object });
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

/// Copies of `arrays` [1, ..], which are being computed: the buffers that they are views of can be freed
/// or written in place.
///
/// Copies of one shape and type share a buffer. MLX may give a buffer 8 KiB more than was asked for,
/// or twice as much: a buffer for each small array would take far more than its bytes.
///
/// # Why
/// Only `concatenate` of two or more arrays always copies. `slice_update` over the whole of an array
/// returns the update itself and `contiguous` shares a buffer of the right length, so a view of some
/// rows held the whole buffer of the sequence: 1.6 GB for 1.2 MB of saved state.
pub fn owned(arrays: &[Array]) -> Result<Vec<Array>> {
    let mut copies = arrays.to_vec();
    let mut left: Vec<usize> = (0..arrays.len()).collect();
    while let Some(&first) = left.first() {
        let like = &arrays[first];
        let is_alike =
            |i: &usize| arrays[*i].shape() == like.shape() && arrays[*i].dtype() == like.dtype();
        let (alike, others): (Vec<usize>, Vec<usize>) = left.into_iter().partition(is_alike);
        let mut shape = like.shape().to_vec();
        shape[0] = 0;
        let nothing = zeros_dtype(&shape, like.dtype())?;
        let parts: Vec<&Array> = alike.iter().map(|&i| &arrays[i]).chain([&nothing]).collect();
        let buffer = concatenate(&parts, 0)?;
        for (place, i) in (0..).zip(alike) {
            copies[i] = buffer.try_index(place..place + 1)?;
        }
        left = others;
    }
    submit(&copies)?;
    Ok(copies)
}
