//! Keys and values of one attention layer, quantized from a position on.
//!
//! The first positions stay as they are: attention returns to them all the time. Which ones is a
//! matter of their position alone, so that it makes no difference in how many pieces a prompt is
//! read. Each row is quantized for itself and never again.
//!
//! Source: mlx-lm `models/cache.py`, `QuantizedKVCache`, which converts whole caches instead once
//! they are long enough.

use std::ops::Range;

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::quantize;

use super::rows::Rows;
use super::shared::Piece;
use super::{Full, column, expect_rows};
use crate::error::{Error, Result};

/// Elements that share a scale: the first of these that divides a head.
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
    keys: [Rows; 3],
    values: [Rows; 3],
}

/// Quantized rows: u32 [1, H, T, D * bits / 32], scales and biases [1, H, T, D / group].
#[derive(Debug, Clone)]
pub struct QuantizedRows {
    /// The elements.
    pub rows: Array,
    /// What they are multiplied by.
    pub scales: Array,
    /// What is added then.
    pub biases: Array,
    /// Elements that share a scale.
    pub group: i32,
    /// Bits of an element.
    pub bits: i32,
}

impl Quantized {
    /// An empty cache like `full`, whose positions from `from` on are kept in `bits` bits.
    ///
    /// # Errors
    /// [`Error::Invalid`] when heads of this size cannot be quantized.
    pub fn new(full: &Full, bits: i32, from: i32) -> Result<Self> {
        let [heads, head_dim] = full.shape();
        let Some(group) = GROUPS.into_iter().find(|group| head_dim % group == 0) else {
            let problem = format!(
                "cannot be used with this model: its attention heads have {head_dim} dimensions, \
                 which is no multiple of 32"
            );
            return Err(Error::Invalid { field: "engine.kv_bits", problem });
        };
        let rows = || std::array::from_fn(|_| Rows::default());
        let dense = Full::new(heads, head_dim);
        Ok(Self { dense, from, bits, group, len: 0, keys: rows(), values: rows() })
    }

    /// Positions held.
    pub fn len(&self) -> i32 {
        self.dense.len() + self.len
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends `k`, `v` [1, H_kv, T, D].
    ///
    /// # Errors
    /// [`Error::Array`] when the shapes do not fit.
    pub fn append(&mut self, k: &Array, v: &Array) -> Result<()> {
        let rows = k.dim(2);
        let dense = (self.from - self.dense.len()).clamp(0, rows);
        let part = |a: &Array, from: i32, to: i32| a.try_index((.., .., from..to, ..));
        if dense > 0 {
            self.dense.append(&part(k, 0, dense)?, &part(v, 0, dense)?)?;
        }
        if dense < rows {
            for (new, kept) in [(k, &mut self.keys), (v, &mut self.values)] {
                let new = part(new, dense, rows)?;
                let (packed, scales, biases) = quantize(&new, self.group, self.bits)?;
                for (rows, new) in kept.iter_mut().zip([packed, scales, biases]) {
                    rows.append(&new, self.len)?;
                }
            }
            self.len += rows - dense;
        }
        Ok(())
    }

    /// The dense positions, if there are any.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX rejects a slice.
    pub fn dense(&self) -> Result<Option<(Array, Array)>> {
        (!self.dense.is_empty()).then(|| self.dense.view()).transpose()
    }

    /// The quantized positions, if there are any: keys and values.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX rejects a slice.
    pub fn packed(&self) -> Result<Option<(QuantizedRows, QuantizedRows)>> {
        if self.len == 0 {
            return Ok(None);
        }
        let packed = |kept: &[Rows; 3]| -> Result<QuantizedRows> {
            let view = |rows: &Rows| rows.view(0, self.len);
            Ok(QuantizedRows {
                rows: view(&kept[0])?,
                scales: view(&kept[1])?,
                biases: view(&kept[2])?,
                group: self.group,
                bits: self.bits,
            })
        };
        Ok(Some((packed(&self.keys)?, packed(&self.values)?)))
    }

    /// Forgets all positions from `len` on.
    pub fn rewind(&mut self, len: i32) {
        self.dense.rewind(len);
        self.len = self.len.min((len - self.from).max(0));
    }

    /// Dense keys and values, then quantized ones, as far as there are any.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX rejects a slice.
    pub fn state(&self) -> Result<Vec<Array>> {
        let mut arrays = self.dense.state()?;
        if let Some((keys, values)) = self.packed()? {
            for packed in [keys, values] {
                arrays.extend([packed.rows, packed.scales, packed.biases]);
            }
        }
        Ok(arrays)
    }

    /// Rows from `from` to `to`: the dense ones, then the quantized ones.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX rejects a slice.
    pub(super) fn pieces(&self, from: i32, to: i32) -> Result<Vec<Piece>> {
        let (dense, packed) = self.split(from, to);
        let mut pieces = Vec::new();
        if !dense.is_empty() {
            pieces.push(self.dense.piece(dense.start, dense.end)?);
        }
        if !packed.is_empty() {
            let rows = self.keys.iter().chain(&self.values);
            pieces
                .push(rows.map(|rows| rows.view(packed.start, packed.end)).collect::<Result<_>>()?);
        }
        Ok(pieces)
    }

    /// Which dense and which quantized rows stand for the positions from `from` to `to`.
    pub(super) fn split(&self, from: i32, to: i32) -> (Range<i32>, Range<i32>) {
        let packed = |at: i32| (at - self.from).max(0);
        (from.min(self.from)..to.min(self.from), packed(from)..packed(to))
    }

    /// Takes over the rows of `len` positions.
    ///
    /// # Errors
    /// [`Error::SavedState`] when arrays are missing or have other shapes.
    pub(super) fn restore(&mut self, pieces: &[&Piece], len: i32) -> Result<()> {
        let mut fresh = Self::new(&self.dense, self.bits, self.from)?;
        let (dense, packed): (Vec<&Piece>, Vec<&Piece>) =
            pieces.iter().partition(|piece| piece.len() == 2);
        let quantized = (len - self.from).max(0);
        fresh.dense.restore(&dense, len - quantized)?;
        if quantized > 0 {
            let [heads, head_dim] = self.dense.shape();
            let widths = [head_dim * self.bits / 32, head_dim / self.group, head_dim / self.group];
            let kept = fresh.keys.iter_mut().chain(&mut fresh.values);
            for (i, (rows, width)) in kept.zip(widths.into_iter().cycle()).enumerate() {
                let parts = column(&packed, i)?;
                expect_rows(&parts, [heads, width], quantized)?;
                *rows = Rows::fill(&parts)?;
            }
            fresh.len = quantized;
        }
        *self = fresh;
        Ok(())
    }
}
