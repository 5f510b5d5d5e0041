//! Ranks: processes, or threads of one, that compute a model together. Each has a part of its weights.
//!
//! A layer that is cut computes on each rank a part of its outputs, or outputs whose sum over all ranks is its output. [`Ranks`]
//! is what one of them knows: which it is, of how many, and how arrays of all are summed and gathered. A process that computes
//! alone is the only rank, for which both return what they are given.
//!
//! Never decides what is cut, which the families do, and knows no model, cache or request.

pub mod entries;
mod group;
mod log;
mod meeting;

use std::fmt::Debug;
use std::sync::Arc;

use mlx_rs::ops::zeros_dtype;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use sha2::{Digest, Sha256};

pub use self::group::{Backend, join};
pub use self::log::{Entry, Id, Layers, Log, Mirror, Operation, Rows};
pub use self::meeting::in_threads;
use crate::error::{Error, Result};

/// How ranks exchange arrays. All ranks call the same operations in the same order, with arrays of one shape and dtype.
pub trait Exchange: Debug + Send + Sync {
    /// The sum of the arrays of all ranks: the same bits on each.
    fn sum(&self, x: &Array) -> Result<Array>;

    /// The arrays [D, ..] of all ranks, one after the other: [N D, ..].
    fn gather(&self, x: &Array) -> Result<Array>;
}

/// The ranks that compute a model, as one of them sees them.
#[derive(Debug, Clone)]
pub struct Ranks {
    index: i32,
    count: i32,
    /// `None` if there is one rank.
    exchange: Option<Arc<dyn Exchange>>,
}

impl Ranks {
    /// The only rank.
    pub fn alone() -> Self {
        Self { index: 0, count: 1, exchange: None }
    }

    /// Rank `index` of `count`, which is more than one.
    pub fn new(index: i32, count: i32, exchange: Arc<dyn Exchange>) -> Self {
        assert!(count > 1 && (0..count).contains(&index), "rank {index} of {count}");
        Self { index, count, exchange: Some(exchange) }
    }

    /// Which rank this is, from 0 on.
    pub fn index(&self) -> i32 {
        self.index
    }

    /// Number of ranks, at least 1.
    pub fn count(&self) -> i32 {
        self.count
    }

    /// Returns true on rank 0, which adds what is added once: biases of outputs that are summed, and residuals.
    pub fn is_first(&self) -> bool {
        self.index == 0
    }

    /// Returns true if there are several ranks.
    pub fn are_several(&self) -> bool {
        self.count > 1
    }

    /// The part of `units` that each rank has, if the number of ranks divides them.
    pub fn share(&self, units: i32) -> i32 {
        units / self.count
    }

    /// As [`Ranks::share`] for units of which several ranks have the same one if there are more ranks than units.
    pub fn share_or_one(&self, units: i32) -> i32 {
        (units / self.count).max(1)
    }

    /// The sum of `x` over all ranks.
    pub fn sum(&self, x: Array) -> Result<Array> {
        match &self.exchange {
            Some(exchange) => exchange.sum(&x),
            None => Ok(x),
        }
    }

    /// Compares the bits of `x` [.., D] with those of all other ranks. Waits for it.
    ///
    /// # Errors
    /// [`Error::Array`] names the ranks that have others than the first one.
    pub fn compare(&self, x: &Array) -> Result<()> {
        let Some(exchange) = &self.exchange else { return Ok(()) };
        // Every float of 16 bits is one of 32.
        let floats = x.as_dtype(Dtype::Float32)?.reshape(&[-1])?;
        eval([&floats])?;
        let mut hash = Sha256::new();
        floats.try_as_slice::<f32>()?.iter().for_each(|x| hash.update(x.to_bits().to_le_bytes()));
        let digest = hash.finalize();
        let words: Vec<u32> = digest.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let all = exchange.gather(&Array::from_slice(&words, &[1, 8]))?;
        eval([&all])?;
        let digests: Vec<&[u32]> = all.try_as_slice::<u32>()?.chunks(8).collect();
        let differs = |rank: &usize| digests[*rank] != digests[0];
        let others: Vec<String> =
            (1..digests.len()).filter(differs).map(|rank| rank.to_string()).collect();
        match &others[..] {
            [] => Ok(()),
            others => Err(Error::Array(format!(
                "rank {} computed other hidden states than the first one",
                others.join(" and rank ")
            ))),
        }
    }

    /// `times` sums over all ranks of an array of zeros of this shape and dtype, one after the other.
    pub fn sums(&self, shape: &[i32], dtype: Dtype, times: usize) -> Result<Array> {
        (0..times).try_fold(zeros_dtype(shape, dtype)?, |x, _| self.sum(x))
    }

    /// What the first rank has as `x`. The others give zeros of the same shape and dtype.
    pub fn of_first(&self, x: Array) -> Result<Array> {
        self.sum(x)
    }

    /// The mean of `x` over all ranks.
    pub fn mean(&self, x: Array) -> Result<Array> {
        match &self.exchange {
            Some(exchange) => {
                let count = Array::from_f32(self.count as f32).as_dtype(x.dtype())?;
                Ok(exchange.sum(&x)?.divide(count)?)
            }
            None => Ok(x),
        }
    }

    /// The columns `x` [1, R, D] of all ranks side by side: [1, R, N D].
    pub fn gather(&self, x: Array) -> Result<Array> {
        match &self.exchange {
            Some(exchange) => {
                let [rows, columns] = [x.dim(1), x.dim(2)];
                let all = exchange.gather(&x)?.swap_axes(0, 1)?;
                Ok(all.reshape(&[1, rows, self.count * columns])?)
            }
            None => Ok(x),
        }
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::Device;

    use super::*;

    /// The smallest difference is found: of the last place of one number in bf16, on one rank.
    #[test]
    fn ranks_with_other_hidden_states_are_named_on_all_of_them() {
        for dtype in [Dtype::Float32, Dtype::Bfloat16] {
            for other in [None, Some(1), Some(2)] {
                let threads: Vec<_> = in_threads(3)
                    .into_iter()
                    .map(|ranks| {
                        std::thread::spawn(move || {
                            Device::set_default(&Device::cpu());
                            let last = if Some(ranks.index()) == other { 1.007_812_5 } else { 1.0 };
                            let x = Array::from_slice(&[0.5f32, -2.0, last], &[1, 1, 3]);
                            ranks.compare(&x.as_dtype(dtype).unwrap()).map_err(|e| e.to_string())
                        })
                    })
                    .collect();
                for thread in threads {
                    match (thread.join().unwrap(), other) {
                        (Ok(()), None) => {}
                        (Err(text), Some(rank)) => {
                            assert!(
                                text.contains(&format!("rank {rank} computed other")),
                                "{text}"
                            );
                        }
                        (result, other) => panic!("{other:?}: {result:?}"),
                    }
                }
            }
        }
    }
}
