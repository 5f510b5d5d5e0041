//! Keys and values of every position of one attention layer.
//!
//! Both lie in one buffer, values after keys as further heads: a step then writes once to it. The first positions may
//! lie in a buffer that other caches read as well ([`SharedKv`]).
//!
//! Source: mlx-lm `models/cache.py`, `KVCache`.

use std::rc::Rc;

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, zeros_dtype};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::key_values::LayerKv;
use super::kv_buffer::{KvBuffer, STEP, capacity_for, rows};
use super::shared_rows::{BLOCK, SharedKv, whole_blocks};
use super::{column, expect_rows};
use crate::error::Result;
use crate::lazy::submit;

/// Own rows after shared ones, up to which their buffer grows by [`BLOCK`] instead of [`STEP`]: many requests that share
/// a prefix have few rows of their own.
const FEW: i32 = STEP;

/// Keys and values, each [1, H_kv, len, D].
#[derive(Debug, Clone)]
pub struct Full {
    heads: i32,
    head_dim: i32,
    len: i32,
    /// The first positions.
    shared: Option<SharedKv>,
    /// The positions after them, [1, 2 H_kv, capacity, D].
    own: KvBuffer,
    /// Which kernel writes the newest rows in place, if one does.
    writer: Option<Writer>,
    /// Whether the layer reads few rows with a kernel of ours, in both buffers.
    is_read_in_place: bool,
}

/// A kernel that writes rows in place, in a buffer that is one of its inputs to MLX.
#[derive(Debug, Clone)]
pub struct Writer {
    /// An output of the kernel. The rows are written when it is evaluated.
    pub output: Rc<Array>,
    /// Whether the device runs kernels in the order in which they are submitted. On a Mac, a kernel waits for another one
    /// only if it reads one of the other's outputs.
    pub is_ordered: bool,
}

/// The buffers of a cache, as kernels read and write them.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// The first positions.
    pub shared: Option<&'a SharedKv>,
    /// The positions after them: keys and then values, [1, 2 H_kv, capacity, D].
    pub own: &'a Array,
    /// Number of positions in `own`.
    pub len: i32,
    /// An array that is evaluated after the newest rows of `own` were written, if a kernel writes them. Kernels that read or
    /// write `own` come after it.
    pub after: Option<&'a Rc<Array>>,
}

impl Buffers<'_> {
    /// Number of positions.
    pub fn positions(&self) -> i32 {
        self.shared.map_or(0, |shared| shared.rows) + self.len
    }
}

impl Full {
    /// An empty cache for `heads` key-value heads of `head_dim`.
    pub fn new(heads: i32, head_dim: i32) -> Self {
        let own = KvBuffer::default();
        Self { heads, head_dim, len: 0, shared: None, own, writer: None, is_read_in_place: false }
    }

    /// Number of key-value heads and their dimension.
    pub fn shape(&self) -> [i32; 2] {
        [self.heads, self.head_dim]
    }

    /// Number of cached positions.
    pub fn len(&self) -> i32 {
        self.len
    }

    /// Whether no position is cached.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of shared positions.
    pub fn shared_rows(&self) -> i32 {
        self.shared.as_ref().map_or(0, |shared| shared.rows)
    }

    /// Rows of all buffers when `len` positions are cached.
    pub(super) fn capacity_at(&self, len: i32) -> i32 {
        let shared = self.shared_rows();
        shared + capacity_for((len - shared).max(0), self.step(len))
    }

    /// Rows by which the buffer grows when `len` positions are cached.
    fn step(&self, len: i32) -> i32 {
        if self.shared.is_some() && len - self.shared_rows() <= FEW { BLOCK } else { STEP }
    }

    /// Returns true if a kernel reads all positions where they lie, unless a pass has many rows.
    pub(super) fn is_read_in_place(&self) -> bool {
        self.is_read_in_place
    }

    /// Sets whether a kernel reads all positions where they lie.
    pub fn set_read_in_place(&mut self, is: bool) {
        self.is_read_in_place = is;
    }

    /// Appends keys and values `kv` [1, 2 H_kv, T, D].
    pub fn append(&mut self, kv: &Array) -> Result<()> {
        self.order_writes()?;
        self.copy_last_block()?;
        let (own, len) = (self.len - self.shared_rows(), self.len + kv.dim(2));
        self.own.append(kv, own, self.step(len))?;
        self.len = len;
        self.writer = None;
        Ok(())
    }

    /// The buffers, with room for `rows` rows of `dtype` that a kernel writes in place; [`Full::wrote`] counts them.
    pub fn reserve(&mut self, rows: i32, dtype: Dtype) -> Result<Buffers<'_>> {
        self.copy_last_block()?;
        let own = self.len - self.shared_rows();
        if !self.own.has_own_room(own, rows) {
            self.order_writes()?;
            let like = zeros_dtype(&[1, 2 * self.heads, 1, self.head_dim], dtype)?;
            let step = self.step(self.len + rows);
            self.own.reserve(&like, own, rows, step)?;
            self.writer = None;
        }
        Ok(self.buffers())
    }

    /// Counts `rows` rows that a kernel writes in place. Kernels also read all positions where they lie.
    pub fn wrote(&mut self, rows: i32, writer: Writer) {
        self.len += rows;
        self.writer = Some(writer);
        self.is_read_in_place = true;
    }

    /// Makes what a kernel writes in place come before the operations that are made from the buffer next: MLX does not know
    /// that these depend on it. Where the device does not run what is submitted in order, this waits for the kernel.
    fn order_writes(&self) -> Result<()> {
        match &self.writer {
            Some(Writer { output, is_ordered: true }) => submit([&**output]),
            Some(Writer { output, is_ordered: false }) => Ok(eval([&**output])?),
            None => Ok(()),
        }
    }

    /// Copies what is left of the last shared block, if the cache was truncated within the shared rows: shared rows are
    /// whole blocks.
    fn copy_last_block(&mut self) -> Result<()> {
        let Some(shared) = self.shared.take_if(|shared| self.len < shared.rows) else {
            return Ok(());
        };
        let whole = whole_blocks(self.len);
        self.own = KvBuffer::fill(&[&rows(&shared.buffer, whole, self.len)?], BLOCK)?;
        self.shared = (whole > 0).then_some(SharedKv { rows: whole, ..shared });
        self.writer = None;
        Ok(())
    }

    /// The same cache with all whole blocks of its positions in a shared buffer, and that buffer. Copies the positions
    /// after them, and all positions if some are shared already.
    pub(super) fn sharing(&self) -> Result<(Self, Rc<Array>)> {
        self.order_writes()?;
        let (whole, before) = (whole_blocks(self.len), self.shared_rows());
        assert!(before < whole, "there is no new block to share");
        let rest = self.own.view(whole - before, self.len - before)?;
        let own = KvBuffer::fill(&[&rest], BLOCK)?;
        let buffer = match &self.shared {
            None => self.own.buffer().clone(),
            Some(shared) => {
                let first = rows(&shared.buffer, 0, before)?;
                concatenate(&[first, self.own.view(0, whole - before)?], 2)?
            }
        };
        let buffer = Rc::new(buffer);
        let shared = Some(SharedKv { buffer: buffer.clone(), rows: whole });
        Ok((Self { shared, own, writer: None, ..*self }, buffer))
    }

    /// Keys and values of all positions, [1, H_kv, len, D] each.
    pub fn view(&self) -> Result<(Array, Array)> {
        self.range(0, self.len)
    }

    /// Keys and values of positions `from..to`.
    fn range(&self, from: i32, to: i32) -> Result<(Array, Array)> {
        self.order_writes()?;
        let sides = |kv: &Array, from: i32, to: i32| -> Result<(Array, Array)> {
            let keys = kv.try_index((.., ..self.heads, from..to, ..))?;
            Ok((keys, kv.try_index((.., self.heads.., from..to, ..))?))
        };
        let before = self.shared_rows();
        let Some(shared) = self.shared.as_ref().filter(|_| from < before) else {
            return sides(self.own.shown(to - before), from - before, to - before);
        };
        let (keys, values) = sides(&shared.buffer, from, to.min(before))?;
        if to <= before {
            return Ok((keys, values));
        }
        let (own_keys, own_values) = sides(self.own.shown(to - before), 0, to - before)?;
        Ok((concatenate(&[keys, own_keys], 2)?, concatenate(&[values, own_values], 2)?))
    }

    /// The buffers of all positions.
    ///
    /// # Panics
    /// If there is no buffer for own rows yet.
    pub fn buffers(&self) -> Buffers<'_> {
        let len = self.len - self.shared_rows();
        let after = self.writer.as_ref().map(|writer| &writer.output);
        Buffers { shared: self.shared.as_ref(), own: self.own.buffer(), len, after }
    }

    /// Drops positions `len..`.
    pub fn truncate(&mut self, len: i32) {
        self.len = self.len.min(len);
    }

    /// What is filled of each buffer: keys and values; nothing if the cache is empty.
    pub fn arrays(&self) -> Result<Vec<Array>> {
        let shared = self.shared_rows().min(self.len);
        let mut arrays = Vec::new();
        for (from, to) in [(0, shared), (shared, self.len)] {
            if from < to {
                let (keys, values) = self.range(from, to)?;
                arrays.extend([keys, values]);
            }
        }
        Ok(arrays)
    }

    /// Keys and values of positions `from..to`.
    pub(super) fn key_values(&self, from: i32, to: i32) -> Result<LayerKv> {
        let (keys, values) = self.range(from, to)?;
        Ok(vec![keys, values])
    }

    /// Replaces the content with `shared` rows and `parts`, which hold `len` positions together.
    ///
    /// The buffers get the capacity that they would have without the interruption, so later steps
    /// run the same kernels on the same layout.
    ///
    /// # Errors
    /// [`crate::Error::SavedState`] if a shape does not fit this layer.
    pub(super) fn restore(
        &mut self,
        shared: Option<SharedKv>,
        parts: &[&LayerKv],
        len: i32,
    ) -> Result<()> {
        let mut fresh = Self { shared, ..Self::new(self.heads, self.head_dim) };
        let own = len - fresh.shared_rows();
        let side = |i: usize| -> Result<KvBuffer> {
            let parts = column(parts, i)?;
            expect_rows(&parts, [self.heads, self.head_dim], own)?;
            KvBuffer::fill(&parts, fresh.step(len))
        };
        let (keys, values) = (side(0)?, side(1)?);
        if own > 0 {
            fresh.own = KvBuffer::from(concatenate(&[keys.buffer(), values.buffer()], 1)?);
        }
        fresh.len = len;
        *self = fresh;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Cache, LayerCache, SharedRows, State};
    use mlx_rs::random;

    /// Keys and values of 200 positions, [1, 2 H_kv, 200, D].
    fn all() -> Array {
        random::normal::<f32>(&[1, 4, 200, 16], None, None, &random::key(1).unwrap()).unwrap()
    }

    fn part(from: i32, to: i32) -> Array {
        all().try_index((.., .., from..to, ..)).unwrap()
    }

    fn cache_of(len: i32) -> Cache {
        let mut cache = Cache::new(vec![LayerCache::Full(Full::new(2, 16))]);
        append(&mut cache, &part(0, len));
        cache
    }

    fn append(cache: &mut Cache, kv: &Array) {
        let LayerCache::Full(full) = &mut cache.layers[0] else { unreachable!() };
        full.append(kv).unwrap();
        cache.position += kv.dim(2) as usize;
    }

    /// Whether `cache` holds `expected` [1, 2 H_kv, T, D], as a whole and in pieces.
    fn holds(cache: &Cache, expected: &Array) -> bool {
        let len = expected.dim(2) as usize;
        let mut ranges = vec![(0, len), (0, 1), (len - 1, len), (len / 2, len)];
        ranges.extend([60, 63, 64, 65].map(|at| (at, at + 10)).into_iter().filter(|r| r.1 < len));
        cache.position == len
            && ranges.into_iter().all(|(from, to)| {
                let kv = cache.key_values(from, to).unwrap();
                let arrays: Vec<&Array> = kv.arrays().collect();
                let range = (.., .., from as i32..to as i32, ..);
                concatenate(&arrays, 1)
                    .unwrap()
                    .eq_values(expected.try_index(range).unwrap())
                    .unwrap()
            })
    }

    #[test]
    fn caches_share_their_first_rows_and_have_their_own_after_them() {
        let mut first = cache_of(150);
        let rows = first.share().unwrap();
        assert_eq!((rows.rows(), first.shared_count()), (128, 128));
        assert!(holds(&first, &part(0, 150)));
        // Another one has half of them.
        let mut second = Cache::new(vec![LayerCache::Full(Full::new(2, 16))]);
        let source = cache_of(100);
        let kv = source.key_values(64, 100).unwrap();
        let shared = crate::cache::SharedPart { rows: rows.clone(), count: 64 };
        second.restore(Some(shared.clone()), &[kv], &State::default(), 100).unwrap();
        assert!(holds(&second, &part(0, 100)));
        append(&mut first, &part(150, 200));
        append(&mut second, &part(0, 50));
        assert!(holds(&first, &part(0, 200)));
        assert!(holds(&second, &concatenate(&[part(0, 100), part(0, 50)], 2).unwrap()));
        // It shares its own rows as well, and the first one keeps the others.
        let longer = second.share().unwrap();
        assert_eq!((longer.rows(), second.shared_count(), first.shared_count()), (128, 128, 128));
        let whole = concatenate(&[part(0, 100), part(0, 50)], 2).unwrap();
        assert!(holds(&second, &whole) && holds(&first, &part(0, 200)));
        append(&mut second, &part(60, 130));
        assert!(holds(&second, &concatenate(&[whole, part(60, 130)], 2).unwrap()));
        // What is restored must fit.
        let kv = source.key_values(63, 100).unwrap();
        assert!(second.restore(Some(shared), &[kv], &State::default(), 100).is_err());
        assert_eq!(second.shared_count(), 128);
    }

    #[test]
    fn a_cache_that_is_truncated_within_shared_rows_keeps_the_others_unchanged() {
        for len in [1, 63, 64, 100, 128, 149] {
            let mut first = cache_of(150);
            first.share().unwrap();
            let mut second = first.clone();
            second.truncate(len);
            assert!(holds(&second, &part(0, len as i32)), "{len}");
            append(&mut second, &part(0, 40));
            let expected = concatenate(&[part(0, len as i32), part(0, 40)], 2).unwrap();
            assert!(holds(&second, &expected), "{len}");
            assert_eq!(second.shared_count(), SharedRows::whole_blocks(len.min(128)));
            assert!(holds(&first, &part(0, 150)), "{len}");
        }
    }

    /// What is counted is what is allocated.
    #[test]
    fn the_capacity_of_buffers_is_known_before_they_grow() {
        for shared in [false, true] {
            let mut cache = cache_of(130);
            if shared {
                cache.share().unwrap();
            }
            for _ in 0..12 {
                append(&mut cache, &part(0, 150));
                let LayerCache::Full(full) = &cache.layers[0] else { unreachable!() };
                let buffers = full.buffers();
                let rows = buffers.own.dim(2) + buffers.shared.map_or(0, |shared| shared.rows);
                assert_eq!(rows as usize, cache.capacity_at(cache.position), "{shared}");
            }
        }
    }
}
