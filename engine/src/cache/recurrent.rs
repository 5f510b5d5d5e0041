//! Recurrent state of one layer: the matrix of a gated delta rule (also Kimi's) or of Mamba-2, and the tail of a
//! convolution. A layer that is a convolution alone (LFM2) has one 0 in place of the matrix.
//!
//! Its size does not depend on the prompt, and every row changes all of it, so it cannot be
//! truncated. After a draft mark the layer also records what each row writes (two vectors and a
//! number a row; the state is a matrix), and a rewind replays the accepted rows: with a kernel one by one, as the
//! kernels of the gated delta rule run them ([`RewindKernels`], which the layer hands in), else with [`delta_write`]. Nothing
//! is copied: MLX arrays are immutable, so the mark is a handle to the old state.

use std::rc::Rc;

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, exp, matmul};
use mlx_rs::{Array, Dtype};

use super::element::Element;
use super::expect_shape;
use crate::error::Result;

/// `state` f32 [1, H_v, D_v, D_k], or [1, 1] without a matrix, and `tail` [1, K - 1, C], zeros at the start.
#[derive(Debug, Clone)]
pub struct Recurrent {
    /// The delta rule's matrix, always f32 because errors add up over the whole context.
    state: Element,
    /// The convolution's last inputs, before the convolution and its activation.
    tail: Element,
    draft_mark: Option<DraftMark>,
    kernels: &'static RewindKernels,
}

/// State and tail after the first rows of one pass: of the state and tail before it, its writes, its inputs
/// [1, T, >= C], and the number of rows.
pub type Rewind = fn([&Element; 2], &WritesOf, &Element, i32) -> Result<Option<[Array; 2]>>;

/// Kernels that rewind a layer to the first rows after its draft mark. Each returns `None` if it has no kernel for the types,
/// the dimensions or the device.
#[derive(Debug)]
pub struct RewindKernels {
    /// State and tail after the first rows of one pass.
    pub rewind: Rewind,
    /// The state after the first rows of `writes`.
    pub replay: fn(&Element, &WritesOf, i32) -> Option<Result<Array>>,
    /// Rows `start..start + count` of the rows of all parts [1, T, C] one after another: [1, count, C].
    pub rows_of: fn(&[&Element], i32, i32) -> Option<Result<Array>>,
}

/// MLX's operations compute everything.
const NO_KERNELS: RewindKernels = RewindKernels {
    rewind: |_, _, _, _| Ok(None),
    replay: |_, _, _| None,
    rows_of: |_, _, _| None,
};

/// The state at the draft mark, and the rows since.
#[derive(Debug, Clone)]
struct DraftMark {
    state: Element,
    tail: Element,
    /// Rows [1, T, >= C] since, whose first C columns are the convolution's inputs.
    inputs: Vec<Element>,
    writes: Vec<WritesOf>,
}

/// The writes of one element of a batch. They are cut out when they are needed, which is seldom.
#[derive(Debug, Clone)]
pub struct WritesOf {
    /// The writes of all elements.
    pub batch: Rc<Writes>,
    /// The index of the element in the batch.
    pub index: i32,
}

impl WritesOf {
    /// The writes of this element's first `rows` rows.
    fn first(&self, rows: i32) -> Result<Writes> {
        let (index, Writes { k, correction, log_decay }) = (self.index, &*self.batch);
        let first = |a: &Array| a.try_index((index..index + 1, .., ..rows));
        Ok(Writes { k: first(k)?, correction: first(correction)?, log_decay: first(log_decay)? })
    }
}

/// What rows of a batch write to the states, all f32 and heads first.
#[derive(Debug, Clone)]
pub struct Writes {
    /// [B, H_v, T, D_k], unit vectors.
    pub k: Array,
    /// [B, H_v, T, D_v], added along `k`.
    pub correction: Array,
    /// [B, H_v, T], log of the factor by which the state decays before the row is written; [B, H_v, T, D_k] if each
    /// dimension of the keys has a factor of its own.
    pub log_decay: Array,
}

impl Writes {
    /// T, the number of rows.
    pub fn rows(&self) -> i32 {
        self.k.dim(2)
    }

    /// The writes of each element of a batch of `count`.
    pub fn all_of(self, count: i32) -> impl Iterator<Item = WritesOf> {
        let batch = Rc::new(self);
        (0..count).map(move |index| WritesOf { batch: batch.clone(), index })
    }
}

/// The state after `writes`: `S <- g S; S <- S + d k^T` for each row, in one product.
pub fn delta_write(state: &Array, writes: &Writes) -> Result<Array> {
    let Writes { k, correction, log_decay } = writes;
    let by_dimension = log_decay.ndim() == 4;
    // [.., T, 1], or [.., T, D_k]
    let log_decay = if by_dimension { log_decay.clone() } else { log_decay.expand_dims(3)? };
    let (mut k, mut correction, mut total) = (k.clone(), correction.clone(), log_decay.clone());
    if writes.rows() > 1 {
        let running = log_decay.cumsum(2, None, None)?;
        total = running.try_index((.., .., writes.rows() - 1.., ..))?;
        // The later rows decay what a row wrote.
        let left = exp(total.subtract(&running)?)?;
        if by_dimension {
            k = k.multiply(left)?;
        } else {
            correction = correction.multiply(left)?;
        }
    }
    let written = matmul(correction.swap_axes(2, 3)?, k)?;
    Ok(state.multiply(exp(total)?)?.add(written)?)
}

impl Recurrent {
    /// Zeros for a layer that is a convolution alone, with a `tail` in `dtype`.
    pub fn convolution(tail: &[i32], dtype: Dtype) -> Result<Self> {
        Self::new(&[1, 1], tail, dtype)
    }

    /// Zeros of the shapes `state` and `tail`, the tail in `dtype`.
    pub fn new(state: &[i32], tail: &[i32], dtype: Dtype) -> Result<Self> {
        Ok(Self {
            state: Element::alone(mlx_rs::ops::zeros_dtype(state, Dtype::Float32)?),
            tail: Element::alone(mlx_rs::ops::zeros_dtype(tail, dtype)?),
            draft_mark: None,
            kernels: &NO_KERNELS,
        })
    }

    /// This state, rewound by `kernels`.
    pub fn with_kernels(self, kernels: &'static RewindKernels) -> Self {
        Self { kernels, ..self }
    }

    /// The delta rule's matrix [1, H_v, D_v, D_k] and the convolution's tail [1, K - 1, C], after all
    /// rows.
    pub fn state(&self) -> (&Element, &Element) {
        (&self.state, &self.tail)
    }

    /// Replaces matrix and tail after further rows.
    pub fn advance(&mut self, matrix: Element, tail: Element) {
        (self.state, self.tail) = (matrix, tail);
    }

    /// Whether a draft mark is set, so that further rows must be recorded.
    pub fn has_draft_mark(&self) -> bool {
        self.draft_mark.is_some()
    }

    /// Records rows after the draft mark: the first C columns of `x` [1, T, >= C] are the inputs of the convolution, `writes`
    /// the updates of the matrix computed from them, if there is one.
    pub fn record(&mut self, x: Element, writes: Option<WritesOf>) {
        if let Some(mark) = &mut self.draft_mark {
            mark.inputs.push(x);
            mark.writes.extend(writes);
        }
    }

    /// Sets the draft mark to the present state.
    pub fn mark_draft(&mut self) {
        let (state, tail) = (self.state.clone(), self.tail.clone());
        self.draft_mark = Some(DraftMark { state, tail, inputs: Vec::new(), writes: Vec::new() });
    }

    /// Keeps the first `keep` rows after the draft mark, drops the others, and clears the mark.
    ///
    /// # Errors
    /// [`crate::Error::Array`] if fewer rows were written.
    pub fn rewind_draft(&mut self, keep: i32) -> Result<()> {
        let Some(mark) = self.draft_mark.take() else { return Ok(()) };
        let written: i32 = mark.inputs.iter().map(|rows| rows.shape()[1]).sum();
        if keep == written {
            return Ok(());
        }
        if keep == 0 {
            (self.state, self.tail) = (mark.state, mark.tail);
            return Ok(());
        }
        // One pass, as with every draft that a model verifies.
        if let ([x], [writes]) = (&mark.inputs[..], &mark.writes[..])
            && let Some(kept) = (self.kernels.rewind)([&mark.state, &mark.tail], writes, x, keep)?
        {
            [self.state, self.tail] = kept.map(Element::alone);
            return Ok(());
        }
        let (mut state, mut left) = (mark.state, keep);
        for writes in &mark.writes {
            let rows = writes.batch.rows().min(left);
            if rows > 0 {
                state = Element::alone(match (self.kernels.replay)(&state, writes, rows) {
                    Some(replayed) => replayed?,
                    None => delta_write(&state.array()?, &writes.first(rows)?)?,
                });
                left -= rows;
            }
        }
        let [_, taps, channels] = mark.tail.shape()[..] else {
            unreachable!("a tail has three dimensions")
        };
        let inputs = mark.inputs.iter().map(|x| x.columns(channels));
        let inputs = std::iter::once(Ok(mark.tail)).chain(inputs).collect::<Result<Vec<_>>>()?;
        let tail = match (self.kernels.rows_of)(&inputs.iter().collect::<Vec<_>>(), keep, taps) {
            Some(tail) => tail?,
            None => {
                let inputs = inputs.iter().map(Element::array).collect::<Result<Vec<_>>>()?;
                concatenate(&inputs, 1)?.try_index((.., keep..keep + taps, ..))?
            }
        };
        (self.state, self.tail) = (state, Element::alone(tail));
        Ok(())
    }

    /// State and tail.
    pub fn arrays(&self) -> Result<Vec<Array>> {
        Ok(vec![self.state.array()?, self.tail.array()?])
    }

    /// The batches in which state and tail lie, as they were computed.
    pub fn batches(&self) -> [&Array; 2] {
        [self.state.batch(), self.tail.batch()]
    }

    /// Bytes of state and tail.
    pub fn bytes(&self) -> u64 {
        self.state.bytes() + self.tail.bytes()
    }

    /// Replaces state and tail.
    ///
    /// # Errors
    /// [`crate::Error::SavedState`] if a shape does not fit this layer.
    pub fn restore(&mut self, state: Array, tail: Array) -> Result<()> {
        expect_shape(&state, &self.state.shape())?;
        expect_shape(&tail, &self.tail.shape())?;
        (self.state, self.tail) = (Element::alone(state), Element::alone(tail));
        self.draft_mark = None;
        Ok(())
    }
}
