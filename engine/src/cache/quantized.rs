//! Keys and values of one attention layer, quantized from a position on.
//!
//! The first positions stay dense because attention returns to them all the time. The boundary
//! depends on the position alone, so the chunks of a prefill make no difference. Each row is
//! quantized by itself, once.
//!
//! Source: mlx-lm `models/cache.py`, `QuantizedKVCache`. Unlike this, mlx-lm converts a whole cache
//! once it is long enough.

use std::ops::Range;

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::quantize;

use super::key_values::LayerKv;
use super::kv_buffer::{KvBuffer, STEP};
use super::{Full, column, expect_rows};
use crate::error::{ConfigError, Error, Result};

/// Candidates for the number of elements that share a scale. The first one that divides the head's
/// dimension is used.
const GROUPS: [i32; 2] = [64, 32];

/// Dense keys and values up to a position, quantized ones from there on.
#[derive(Debug, Clone)]
pub struct Quantized {
    dense: Full,
    from: i32,
    bits: i32,
    group: i32,
    /// Quantized positions.
    len: i32,
    /// Elements, scales and biases.
    keys: [KvBuffer; 3],
    values: [KvBuffer; 3],
}

/// Quantized keys or values: x = scale * element + bias.
#[derive(Debug, Clone)]
pub struct QuantizedKv {
    /// u32 [1, H, T, D * bits / 32]
    pub elements: Array,
    /// [1, H, T, D / group]
    pub scales: Array,
    /// [1, H, T, D / group]
    pub biases: Array,
    /// Elements that share a scale.
    pub group: i32,
    /// Bits of an element.
    pub bits: i32,
}

impl Quantized {
    /// An empty cache of `full`'s shape that stores positions from `from` on in `bits` bits.
    ///
    /// # Errors
    /// [`Error::Config`] if heads of this dimension cannot be quantized.
    pub fn new(full: &Full, bits: i32, from: i32) -> Result<Self> {
        let [heads, head_dim] = full.shape();
        let Some(group) = GROUPS.into_iter().find(|group| head_dim % group == 0) else {
            let problem = format!(
                "cannot be used with this model: the dimension of its attention heads, \
                 {head_dim}, is not a multiple of 32"
            );
            return Err(Error::Config(ConfigError::Key { field: "engine.kv_bits", problem }));
        };
        let buffers = || std::array::from_fn(|_| KvBuffer::default());
        let dense = Full::new(heads, head_dim);
        Ok(Self { dense, from, bits, group, len: 0, keys: buffers(), values: buffers() })
    }

    /// Bytes of `rows` rows, if an activation has `size` bytes.
    pub(super) fn bytes(&self, rows: u64, size: u64) -> u64 {
        let [heads, head_dim] = self.dense.shape().map(|n| n as u64);
        let dense = rows.min(self.from as u64);
        // A scale and a bias for each group.
        let groups = head_dim / self.group as u64;
        let packed = head_dim * self.bits as u64 / 8 + 2 * groups * size;
        2 * heads * (dense * head_dim * size + (rows - dense) * packed)
    }

    /// Number of cached positions.
    pub fn len(&self) -> i32 {
        self.dense.len() + self.len
    }

    /// Whether no position is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends keys and values `kv` [1, 2 H_kv, T, D].
    pub fn append(&mut self, kv: &Array) -> Result<()> {
        let rows = kv.dim(2);
        let dense = (self.from - self.dense.len()).clamp(0, rows);
        let part = |a: &Array, from: i32, to: i32| a.try_index((.., .., from..to, ..));
        if dense > 0 {
            self.dense.append(&part(kv, 0, dense)?)?;
        }
        if dense < rows {
            let new = part(kv, dense, rows)?.split_equal(2, 1)?;
            for (new, buffers) in new.iter().zip([&mut self.keys, &mut self.values]) {
                let (elements, scales, biases) = quantize(new, self.group, self.bits)?;
                for (buffer, new) in buffers.iter_mut().zip([elements, scales, biases]) {
                    buffer.append(&new, self.len, STEP)?;
                }
            }
            self.len += rows - dense;
        }
        Ok(())
    }

    /// Keys and values of the dense positions, if there are any.
    pub fn dense(&self) -> Result<Option<(Array, Array)>> {
        (!self.dense.is_empty()).then(|| self.dense.view()).transpose()
    }

    /// Keys and values of the quantized positions, if there are any.
    pub fn packed(&self) -> Result<Option<(QuantizedKv, QuantizedKv)>> {
        if self.len == 0 {
            return Ok(None);
        }
        let packed = |buffers: &[KvBuffer; 3]| -> Result<QuantizedKv> {
            let view = |buffer: &KvBuffer| buffer.view(0, self.len);
            Ok(QuantizedKv {
                elements: view(&buffers[0])?,
                scales: view(&buffers[1])?,
                biases: view(&buffers[2])?,
                group: self.group,
                bits: self.bits,
            })
        };
        Ok(Some((packed(&self.keys)?, packed(&self.values)?)))
    }

    /// Drops positions `len..`.
    pub fn truncate(&mut self, len: i32) {
        self.dense.truncate(len);
        self.len = self.len.min((len - self.from).max(0));
    }

    /// The filled dense keys and values, then the quantized ones.
    pub fn arrays(&self) -> Result<Vec<Array>> {
        let mut arrays = self.dense.arrays()?;
        if let Some((keys, values)) = self.packed()? {
            for packed in [keys, values] {
                arrays.extend([packed.elements, packed.scales, packed.biases]);
            }
        }
        Ok(arrays)
    }

    /// KV of positions `from..to`: the dense part, then the quantized part.
    pub(super) fn key_values(&self, from: i32, to: i32) -> Result<Vec<LayerKv>> {
        let (dense, packed) = self.split(from, to);
        let mut parts = Vec::new();
        if !dense.is_empty() {
            parts.push(self.dense.key_values(dense.start, dense.end)?);
        }
        if !packed.is_empty() {
            let buffers = self.keys.iter().chain(&self.values);
            let views = buffers.map(|buffer| buffer.view(packed.start, packed.end));
            parts.push(views.collect::<Result<_>>()?);
        }
        Ok(parts)
    }

    /// The dense and the quantized rows of positions `from..to`.
    pub(super) fn split(&self, from: i32, to: i32) -> (Range<i32>, Range<i32>) {
        let packed = |position: i32| (position - self.from).max(0);
        (from.min(self.from)..to.min(self.from), packed(from)..packed(to))
    }

    /// Replaces the content with `parts`, which hold `len` positions together.
    ///
    /// # Errors
    /// [`Error::SavedState`] if arrays are missing or a shape does not fit this layer.
    pub(super) fn restore(&mut self, parts: &[&LayerKv], len: i32) -> Result<()> {
        let mut fresh = Self::new(&self.dense, self.bits, self.from)?;
        let (dense, packed): (Vec<&LayerKv>, Vec<&LayerKv>) =
            parts.iter().partition(|part| part.len() == 2);
        let quantized = (len - self.from).max(0);
        fresh.dense.restore(None, &dense, len - quantized)?;
        if quantized > 0 {
            let [heads, head_dim] = self.dense.shape();
            let widths = [head_dim * self.bits / 32, head_dim / self.group, head_dim / self.group];
            let buffers = fresh.keys.iter_mut().chain(&mut fresh.values);
            for (i, (buffer, width)) in buffers.zip(widths.into_iter().cycle()).enumerate() {
                let parts = column(&packed, i)?;
                expect_rows(&parts, [heads, width], quantized)?;
                *buffer = KvBuffer::fill(&parts, STEP)?;
            }
            fresh.len = quantized;
        }
        *self = fresh;
        Ok(())
    }
}
