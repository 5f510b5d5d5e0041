//! State of one GatedDeltaNet layer: the delta rule's matrix and the convolution's tail.
//!
//! Fixed in size however long the prompt is, and changed by every row: it cannot be cut back to an
//! earlier position. After a checkpoint it therefore keeps what the rows wrote (two vectors and a
//! number a row, where the state is a matrix), and a rewind writes the rows that stay once more, by
//! [`delta_write`]. Nothing is copied: MLX's arrays are never changed, so the checkpoint is a handle
//! to the old one.

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, exp, matmul};
use mlx_rs::{Array, Dtype};

use super::expect_shape;
use crate::error::Result;

/// `state` f32 [1, H_v, D_v, D_k] and `tail` [1, K - 1, C], zeros at the start.
#[derive(Debug, Clone)]
pub struct Recurrent {
    /// The delta rule's matrix, always f32: errors add up over the whole context.
    state: Array,
    /// The convolution's last inputs, before the convolution and its activation.
    tail: Array,
    mark: Option<Mark>,
}

/// A checkpoint, and what was written since.
#[derive(Debug, Clone)]
struct Mark {
    state: Array,
    /// The convolution's inputs: the tail at the checkpoint, then all rows since.
    inputs: Vec<Array>,
    writes: Vec<Writes>,
}

/// What rows write to the state, all f32 and heads first.
#[derive(Debug, Clone)]
pub struct Writes {
    /// [1, H_v, T, D_k], unit vectors.
    pub k: Array,
    /// [1, H_v, T, D_v]: what is added along `k`.
    pub correction: Array,
    /// [1, H_v, T], log of what is left of the state before a row is written to it.
    pub log_decay: Array,
}

impl Writes {
    /// How many rows.
    pub fn rows(&self) -> i32 {
        self.k.dim(2)
    }

    /// The first `rows` of them.
    fn first(&self, rows: i32) -> Result<Self> {
        let first = |a: &Array| a.try_index((.., .., ..rows));
        Ok(Self {
            k: first(&self.k)?,
            correction: first(&self.correction)?,
            log_decay: first(&self.log_decay)?,
        })
    }
}

/// The state after `writes`: `S <- g S; S <- S + d k^T` for each row, in one product.
///
/// # Errors
/// [`crate::Error::Array`] when the shapes do not fit.
pub fn delta_write(state: &Array, writes: &Writes) -> Result<Array> {
    let Writes { k, correction, log_decay } = writes;
    let (mut correction, mut total) = (correction.clone(), log_decay.clone());
    if writes.rows() > 1 {
        let running = log_decay.cumsum(2, None, None)?;
        total = running.try_index((.., .., writes.rows() - 1..))?;
        // What the rows behind a row leave of it.
        let left = exp(total.subtract(&running)?)?.expand_dims(3)?;
        correction = correction.multiply(left)?;
    }
    let written = matmul(correction.swap_axes(2, 3)?, k)?;
    Ok(state.multiply(exp(total)?.expand_dims(3)?)?.add(written)?)
}

impl Recurrent {
    /// State before the first row: `state` and `tail` of these shapes, the tail in `dtype`.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot make them.
    pub fn new(state: &[i32], tail: &[i32], dtype: Dtype) -> Result<Self> {
        Ok(Self {
            state: mlx_rs::ops::zeros_dtype(state, Dtype::Float32)?,
            tail: mlx_rs::ops::zeros_dtype(tail, dtype)?,
            mark: None,
        })
    }

    /// The delta rule's matrix after all rows.
    pub fn matrix(&self) -> &Array {
        &self.state
    }

    /// Puts `x` [1, T, C] behind the convolution's tail, [1, K - 1 + T, C], and keeps the new tail.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when the shapes do not fit.
    pub fn convolution_input(&mut self, x: &Array) -> Result<Array> {
        if let Some(mark) = &mut self.mark {
            mark.inputs.push(x.clone());
        }
        let joined = concatenate(&[&self.tail, x], 1)?;
        self.tail = joined.try_index((.., x.dim(1).., ..))?;
        Ok(joined)
    }

    /// Takes over the matrix after further rows, which wrote `writes`.
    pub fn advance(&mut self, matrix: Array, writes: Writes) {
        self.state = matrix;
        if let Some(mark) = &mut self.mark {
            mark.writes.push(writes);
        }
    }

    /// From here on [`Recurrent::rewind`] can come back.
    pub fn checkpoint(&mut self) {
        let (state, inputs) = (self.state.clone(), vec![self.tail.clone()]);
        self.mark = Some(Mark { state, inputs, writes: Vec::new() });
    }

    /// Goes back to `keep` rows after the checkpoint, and ends it.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when fewer rows were written.
    pub fn rewind(&mut self, keep: i32) -> Result<()> {
        let Some(mark) = self.mark.take() else { return Ok(()) };
        let written: i32 = mark.writes.iter().map(Writes::rows).sum();
        if keep == written {
            return Ok(());
        }
        self.state = mark.state;
        let mut left = keep;
        for writes in &mark.writes {
            let rows = writes.rows().min(left);
            if rows > 0 {
                self.state = delta_write(&self.state, &writes.first(rows)?)?;
                left -= rows;
            }
        }
        let taps = self.tail.dim(1);
        self.tail = concatenate(&mark.inputs, 1)?.try_index((.., keep..keep + taps, ..))?;
        Ok(())
    }

    /// State and tail.
    pub fn state(&self) -> Vec<Array> {
        vec![self.state.clone(), self.tail.clone()]
    }

    /// Takes over state and tail.
    ///
    /// # Errors
    /// [`crate::Error::SavedState`] when a shape is not this layer's.
    pub fn restore(&mut self, state: Array, tail: Array) -> Result<()> {
        expect_shape(&state, self.state.shape())?;
        expect_shape(&tail, self.tail.shape())?;
        (self.state, self.tail, self.mark) = (state, tail, None);
        Ok(())
    }
}
