//! One element of a batch of states that lie together in one array.
//!
//! A pass computes the states of several sequences as one array [B, ..]. Each sequence keeps its place in
//! it, and the next pass over the same sequences takes the array as it is. Copied are states of sequences
//! that join or leave only.

use std::rc::Rc;

use mlx_rs::Array;
use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::{Ellipsis, TryIndexOp};

use crate::error::Result;

/// The element [1, ..] at `index` of an array [B, ..].
#[derive(Debug, Clone)]
pub struct Element {
    batch: Rc<Array>,
    index: i32,
}

impl Element {
    /// An array [1, ..] of one element.
    pub fn alone(array: Array) -> Self {
        Self { batch: Rc::new(array), index: 0 }
    }

    /// Every element of `batch` [B, ..], in order.
    pub fn all_of(batch: Array) -> impl Iterator<Item = Self> {
        let (size, batch) = (batch.dim(0), Rc::new(batch));
        (0..size).map(move |index| Self { batch: batch.clone(), index })
    }

    /// The batch [B, ..] that it is an element of.
    pub fn batch(&self) -> &Array {
        &self.batch
    }

    /// Its index in the batch.
    pub fn index(&self) -> i32 {
        self.index
    }

    /// The element as an array [1, ..], a view of the batch.
    pub fn array(&self) -> Result<Array> {
        if self.batch.dim(0) == 1 {
            return Ok((*self.batch).clone());
        }
        Ok(self.batch.try_index(self.index..self.index + 1)?)
    }

    /// The batches in which `elements` lie, each once, and for each element which of them and its index there.
    pub fn batches<'a>(elements: &[&'a Self]) -> (Vec<&'a Array>, Vec<[usize; 2]>) {
        let mut batches: Vec<&Rc<Array>> = Vec::new();
        let mut places = Vec::with_capacity(elements.len());
        for element in elements {
            let known = batches.iter().position(|batch| Rc::ptr_eq(batch, &element.batch));
            let batch = known.unwrap_or_else(|| {
                batches.push(&element.batch);
                batches.len() - 1
            });
            places.push([batch, element.index as usize]);
        }
        (batches.into_iter().map(|batch| &**batch).collect(), places)
    }

    /// Its first `width` columns.
    pub fn columns(&self, width: i32) -> Result<Self> {
        if self.batch.dim(-1) == width {
            return Ok(self.clone());
        }
        let batch = Rc::new(self.batch.try_index((Ellipsis, ..width))?);
        Ok(Self { batch, index: self.index })
    }

    /// Dimensions of the element, the first of which is 1.
    pub fn shape(&self) -> Vec<i32> {
        let mut shape = self.batch.shape().to_vec();
        shape[0] = 1;
        shape
    }

    /// Bytes of the element.
    pub fn bytes(&self) -> u64 {
        (self.batch.nbytes() / self.batch.dim(0).max(1) as usize) as u64
    }

    /// The batch [B, ..] of these elements, in order. Neighbours in a batch stay together.
    pub fn stack<'a>(elements: impl Iterator<Item = &'a Self>) -> Result<Array> {
        let mut runs: Vec<(&Rc<Array>, i32, i32)> = Vec::new();
        for Self { batch, index } in elements {
            match runs.last_mut() {
                Some((last, _, end)) if *end == *index && Rc::ptr_eq(last, batch) => *end += 1,
                _ => runs.push((batch, *index, index + 1)),
            }
        }
        let parts = runs.into_iter().map(|(batch, start, end)| {
            let whole = end - start == batch.dim(0);
            if whole { Ok((**batch).clone()) } else { batch.try_index(start..end) }
        });
        let parts: Vec<Array> = parts.collect::<std::result::Result<_, _>>()?;
        match &parts[..] {
            [part] => Ok(part.clone()),
            parts => Ok(concatenate(parts, 0)?),
        }
    }
}
