//! What one request holds while it runs, layer by layer.
//!
//! A cache holds no weights, and [`crate::model::Model`] alone advances it. It knows positions, not
//! tokens.
//!
//! There are three ways back. After [`Cache::mark_draft`] every layer can drop the rows since, which
//! is how rejected drafts are forgotten. A policy's rewind goes further: where all layers are attention,
//! [`Cache::truncate`] cuts them at any position; else a [`Checkpoint`] restores one position.

mod checkpoint;
mod element;
mod full;
mod key_values;
mod kv_buffer;
mod quantized;
mod recurrent;
mod shared_rows;
mod sliding;

pub use checkpoint::{Checkpoint, State};
pub use element::Element;
pub use full::{Buffers, Full, Writer};
pub use key_values::{KeyValues, owned};
pub use kv_buffer::STEP;
pub use quantized::{Quantized, QuantizedKv};
pub use recurrent::{Recurrent, RewindKernels, Writes, WritesOf, delta_write};
pub use shared_rows::{SharedKv, SharedRows};
pub use sliding::Sliding;

use std::rc::Rc;

use mlx_rs::Array;

use self::key_values::LayerKv;
use self::shared_rows::whole_blocks;
use crate::error::{Error, Result};
use crate::lazy::is_available;
use crate::ranks::{Id, Log, Mirror, Operation};

/// The cache of one layer.
#[derive(Debug, Clone)]
pub enum LayerCache {
    /// Keys and values of every position.
    Full(Full),
    /// Keys and values of every position, quantized from some position on.
    Quantized(Quantized),
    /// Keys and values of a sliding window.
    Sliding(Sliding),
    /// Recurrent state of a GatedDeltaNet, Mamba-2 or convolution layer.
    Recurrent(Recurrent),
}

impl LayerCache {
    /// An empty cache for `heads` key-value heads of `head_dim`; full attention without `window`.
    pub fn attention(heads: i32, head_dim: i32, window: Option<i32>) -> Self {
        match window {
            Some(window) => Self::Sliding(Sliding::new(heads, head_dim, window)),
            None => Self::Full(Full::new(heads, head_dim)),
        }
    }

    /// Restores a window or a recurrent state from the next two of `arrays`.
    fn restore_recurrent<'a>(
        &mut self,
        arrays: &mut impl Iterator<Item = &'a Array>,
        len: i32,
    ) -> Result<()> {
        let (Some(first), Some(second)) = (arrays.next(), arrays.next()) else {
            return Err(Error::SavedState("too few recurrent tensors".into()));
        };
        match self {
            Self::Sliding(sliding) => sliding.restore(first, second, len),
            Self::Recurrent(recurrent) => recurrent.restore(first.clone(), second.clone()),
            Self::Full(_) | Self::Quantized(_) => unreachable!("has no recurrent state"),
        }
    }
}

/// Everything that one sequence holds in the model.
#[derive(Debug, Clone)]
pub struct Cache {
    /// One entry for each layer that keeps state, in the model's order.
    pub layers: Vec<LayerCache>,
    /// Rows that went through the model so far: the position of the next one.
    pub position: usize,
    draft_mark: Option<usize>,
    /// The rows that the layers share with other caches; the reference count is the number of these caches.
    shared: Option<Rc<SharedRows>>,
    /// The number under which other ranks have caches of their parts.
    mirror: Mirror,
}

/// Neighbouring rows of one sequence in a pass.
pub struct Span<'a> {
    /// Number of rows.
    pub rows: i32,
    /// The sequence's cache, which holds the rows before.
    pub cache: &'a mut Cache,
}

impl Span<'_> {
    /// Position of the first row.
    pub fn offset(&self) -> i32 {
        row(self.cache.position)
    }

    /// Counts the rows as run, after all layers have appended them.
    pub fn advance(&mut self) {
        self.cache.position += usize::try_from(self.rows).expect("a span has rows");
    }
}

/// The first rows of [`SharedRows`].
#[derive(Debug, Clone)]
pub struct SharedPart {
    /// All rows.
    pub rows: Rc<SharedRows>,
    /// Number of the first, whole blocks.
    pub count: usize,
}

/// A position as MLX indexes it.
fn row(position: usize) -> i32 {
    i32::try_from(position).expect("contexts are far shorter: checked at admission")
}

impl Cache {
    /// A cache at position 0 of these empty layers.
    pub fn new(layers: Vec<LayerCache>) -> Self {
        Self { layers, position: 0, draft_mark: None, shared: None, mirror: Mirror::default() }
    }

    /// This new cache, of which other ranks that read `log` have their parts.
    pub fn mirrored(self, log: &Rc<Log>, made: impl FnOnce(Id) -> Operation) -> Self {
        Self { mirror: Mirror::new(log, made), ..self }
    }

    /// The number under which other ranks have theirs.
    pub fn id(&self) -> Option<Id> {
        self.mirror.id()
    }

    /// Stores KV of full attention in `bits` bits from position `from` on. Lossy.
    ///
    /// # Errors
    /// [`Error::Config`] if heads of this dimension cannot be quantized.
    pub fn quantize(&mut self, bits: i32, from: i32) -> Result<()> {
        self.mirror.note(|cache| Operation::Quantize { cache, bits, from });
        for layer in &mut self.layers {
            if let LayerCache::Full(full) = layer {
                *layer = LayerCache::Quantized(Quantized::new(full, bits, from)?);
            }
        }
        Ok(())
    }

    /// States of recurrent layers that are not computed yet, such as those that [`Cache::rewind_draft`] leaves.
    pub fn uncomputed(&self) -> impl Iterator<Item = &Array> {
        let states = self.layers.iter().filter_map(|layer| match layer {
            LayerCache::Recurrent(recurrent) => Some(recurrent.batches()),
            _ => None,
        });
        states.flatten().filter(|state| !is_available(state))
    }

    /// Sets the draft mark to the present position. Replaces an earlier mark.
    ///
    /// Recurrent layers record every row until [`Cache::rewind_draft`] clears the mark, so it must
    /// not stay.
    pub fn mark_draft(&mut self) {
        self.mirror.note(|cache| Operation::MarkDraft { cache });
        for layer in &mut self.layers {
            match layer {
                LayerCache::Full(_) | LayerCache::Quantized(_) => {}
                LayerCache::Sliding(sliding) => sliding.mark_draft(),
                LayerCache::Recurrent(recurrent) => recurrent.mark_draft(),
            }
        }
        self.draft_mark = Some(self.position);
    }

    /// Drops rows `position..`, and clears the draft mark.
    ///
    /// Layers that an early exit did not run have fewer rows than the others. A rewind to the draft
    /// mark itself makes all layers equal again.
    ///
    /// # Errors
    /// [`Error::Array`] if MLX fails; the cache is then unusable.
    ///
    /// # Panics
    /// If `position` does not lie between the draft mark and the present position.
    pub fn rewind_draft(&mut self, position: usize) -> Result<()> {
        let mark = self.draft_mark.take().expect("a draft mark was set");
        assert!((mark..=self.position).contains(&position), "rewind to before the draft mark");
        self.mirror.note(|cache| Operation::RewindDraft { cache, position });
        let (len, keep) = (row(position), row(position - mark));
        for layer in &mut self.layers {
            match layer {
                LayerCache::Full(full) => full.truncate(len),
                LayerCache::Quantized(quantized) => quantized.truncate(len),
                LayerCache::Sliding(sliding) => sliding.rewind_draft(len),
                LayerCache::Recurrent(recurrent) => recurrent.rewind_draft(keep)?,
            }
        }
        self.position = position;
        Ok(())
    }

    /// All arrays, to evaluate or compare them. Shares the memory.
    pub fn arrays(&self) -> Result<Vec<Array>> {
        let mut arrays = Vec::with_capacity(2 * self.layers.len());
        for layer in &self.layers {
            arrays.extend(match layer {
                LayerCache::Full(full) => full.arrays()?,
                LayerCache::Quantized(quantized) => quantized.arrays()?,
                LayerCache::Sliding(sliding) => sliding.arrays()?,
                LayerCache::Recurrent(recurrent) => recurrent.arrays()?,
            });
        }
        Ok(arrays)
    }

    /// Bytes of `rows` rows in a cache like this one, whatever it holds, if an activation has `size`
    /// bytes.
    pub fn bytes(&self, rows: usize, size: u64) -> u64 {
        // A shape holds positive numbers.
        let kv = |[heads, head_dim]: [i32; 2], rows: u64| 2 * heads as u64 * head_dim as u64 * rows;
        let rows = rows as u64;
        let layer = |layer: &LayerCache| match layer {
            LayerCache::Full(full) => kv(full.shape(), rows) * size,
            LayerCache::Quantized(quantized) => quantized.bytes(rows, size),
            LayerCache::Sliding(sliding) => {
                let held = (sliding.window() + STEP) as u64;
                kv(sliding.shape(), rows.min(held)) * size
            }
            LayerCache::Recurrent(recurrent) => recurrent.bytes(),
        };
        self.layers.iter().map(layer).sum()
    }

    /// Bytes of the first `rows` rows of the layers that keep all positions without quantizing them, if an activation
    /// has `size` bytes.
    pub fn shareable_bytes(&self, rows: usize, size: u64) -> u64 {
        let layer = |layer: &LayerCache| match layer {
            LayerCache::Full(full) => full.shape().map(|n| n as u64).iter().product(),
            _ => 0,
        };
        2 * rows as u64 * size * self.layers.iter().map(layer).sum::<u64>()
    }

    /// Number of the layers that [`Cache::shareable_bytes`] counts, at least 1.
    pub fn shareable_layers(&self) -> u64 {
        let is_full = |layer: &&LayerCache| matches!(layer, LayerCache::Full(_));
        self.layers.iter().filter(is_full).count().max(1) as u64
    }

    /// Rows that the buffers of full attention have when the cache has `length` rows.
    pub fn capacity_at(&self, length: usize) -> usize {
        match self.first_full() {
            Some(full) => full.capacity_at(row(length)).try_into().expect("a number of rows"),
            None => length.next_multiple_of(STEP as usize),
        }
    }

    fn first_full(&self) -> Option<&Full> {
        self.layers.iter().find_map(|layer| match layer {
            LayerCache::Full(full) => Some(full),
            _ => None,
        })
    }

    /// Whether other caches can share the rows of this one without a copy of them for each pass: kernels of our own read
    /// the rows of all layers that keep all positions where they lie.
    pub fn is_shareable(&self) -> bool {
        let by_kernel = |layer: &LayerCache| match layer {
            LayerCache::Full(full) => full.is_read_in_place(),
            LayerCache::Quantized(_) => false,
            LayerCache::Sliding(_) | LayerCache::Recurrent(_) => true,
        };
        self.first_full().is_some() && self.layers.iter().all(by_kernel)
    }

    /// The rows that the cache shares, and how many of them it has.
    pub fn shared(&self) -> Option<SharedPart> {
        let count = self.shared_count();
        let rows = self.shared.clone().filter(|_| count > 0)?;
        Some(SharedPart { rows, count })
    }

    /// Number of shared rows.
    pub fn shared_count(&self) -> usize {
        let shared = self.first_full().map_or(0, Full::shared_rows);
        let shared = usize::try_from(shared).expect("a number of rows");
        SharedRows::whole_blocks(shared.min(self.position))
    }

    /// Lets other caches share the whole blocks of the rows of this one. Copies the rows after them, and all rows if it
    /// shares some already.
    ///
    /// # Panics
    /// If it shares all whole blocks already, or a layer has quantized rows.
    pub fn share(&mut self) -> Result<Rc<SharedRows>> {
        let (mut layers, mut buffers) = (self.layers.clone(), Vec::new());
        for layer in &mut layers {
            match layer {
                LayerCache::Full(full) => {
                    let (sharing, buffer) = full.sharing()?;
                    *full = sharing;
                    buffers.push(buffer);
                }
                LayerCache::Quantized(_) => panic!("quantized rows are not shared"),
                LayerCache::Sliding(_) | LayerCache::Recurrent(_) => {}
            }
        }
        let rows = whole_blocks(row(self.position));
        let mirror = self.mirror.make(|cache, new| Operation::Share { cache, new });
        let rows = Rc::new(SharedRows { rows, layers: buffers, mirror });
        (self.layers, self.shared) = (layers, Some(rows.clone()));
        Ok(rows)
    }

    /// Whether the cache can resume at any position. If not, it holds recurrent state and can
    /// resume only where [`Cache::recurrent_state`] was taken.
    pub fn is_truncatable(&self) -> bool {
        let all_positions =
            |layer: &LayerCache| matches!(layer, LayerCache::Full(_) | LayerCache::Quantized(_));
        self.layers.iter().all(all_positions)
    }

    /// Whether the head dimension of all full-attention layers is a multiple of `group`.
    pub fn head_dim_is_multiple_of(&self, group: i32) -> bool {
        let is_multiple = |layer: &LayerCache| match layer {
            LayerCache::Full(full) => full.shape()[1] % group == 0,
            _ => true,
        };
        self.layers.iter().all(is_multiple)
    }

    /// Recurrent states and sliding windows of the present position, two arrays a layer.
    pub fn recurrent_state(&self) -> Result<State> {
        let mirror = self.mirror.make(|cache, new| Operation::State { cache, new });
        Ok(State::new(self.recurrent_arrays()?, mirror))
    }

    fn recurrent_arrays(&self) -> Result<Vec<Array>> {
        let mut arrays = Vec::new();
        for layer in &self.layers {
            match layer {
                LayerCache::Full(_) | LayerCache::Quantized(_) => {}
                LayerCache::Sliding(sliding) => arrays.extend(sliding.arrays()?),
                LayerCache::Recurrent(recurrent) => arrays.extend(recurrent.arrays()?),
            }
        }
        Ok(arrays)
    }

    /// KV of positions `from..to`, of the layers that keep all positions.
    ///
    /// # Panics
    /// If the range is empty or ends after the present position.
    pub fn key_values(&self, from: usize, to: usize) -> Result<KeyValues> {
        assert!(from < to && to <= self.position, "KV of rows that the cache does not hold");
        let (first, end) = (row(from), row(to));
        let layer = |layer: &LayerCache| match layer {
            LayerCache::Full(full) => Some(full.key_values(first, end).map(|kv| vec![kv])),
            LayerCache::Quantized(quantized) => Some(quantized.key_values(first, end)),
            LayerCache::Sliding(_) | LayerCache::Recurrent(_) => None,
        };
        let layers = self.layers.iter().filter_map(layer).collect::<Result<_>>()?;
        let mirror = self.mirror.make(|cache, new| Operation::KeyValues { cache, from, to, new });
        Ok(KeyValues { count: to - from, layers, mirror })
    }

    /// KV of positions `from..to` from the arrays that [`KeyValues::arrays`] returned for them.
    ///
    /// # Errors
    /// [`Error::SavedState`] if their number does not fit this model.
    pub fn key_values_from(&self, arrays: Vec<Array>, from: usize, to: usize) -> Result<KeyValues> {
        let mut arrays = arrays.into_iter();
        let mut take = |count: usize| -> Result<LayerKv> {
            let kv: LayerKv = arrays.by_ref().take(count).collect();
            if kv.len() < count || kv.iter().any(|array| array.ndim() != 4) {
                return Err(Error::SavedState("too few KV tensors".into()));
            }
            Ok(kv)
        };
        let mut layers = Vec::new();
        for layer in &self.layers {
            match layer {
                LayerCache::Full(_) => layers.push(vec![take(2)?]),
                LayerCache::Quantized(quantized) => {
                    let (dense, packed) = quantized.split(row(from), row(to));
                    let counts = [(dense, 2), (packed, 6)];
                    let present = counts.into_iter().filter(|(rows, _)| !rows.is_empty());
                    layers.push(present.map(|(_, count)| take(count)).collect::<Result<_>>()?);
                }
                LayerCache::Sliding(_) | LayerCache::Recurrent(_) => {}
            }
        }
        if arrays.next().is_some() {
            return Err(Error::SavedState("too many KV tensors".into()));
        }
        Ok(KeyValues { count: to - from, layers, mirror: Mirror::default() })
    }

    /// Replaces the content with that of the first `position` rows: those that are `shared`, `kv` of all after them, in
    /// order, and the `recurrent` state that [`Cache::recurrent_state`] returned at `position`.
    ///
    /// # Errors
    /// [`Error::SavedState`] if number or shapes of the arrays do not fit this model; the cache is then
    /// unchanged.
    pub fn restore(
        &mut self,
        shared: Option<SharedPart>,
        kv: &[KeyValues],
        recurrent: &State,
        position: usize,
    ) -> Result<()> {
        self.mirror.note(|cache| Operation::Restore {
            cache,
            shared: shared.as_ref().and_then(|part| Some((part.rows.mirror.id()?, part.count))),
            kv: kv.iter().filter_map(|kv| kv.mirror.id()).collect(),
            state: recurrent.id(),
            position,
        });
        let mut layers = self.layers.clone();
        let mut buffers = shared.iter().flat_map(|shared| {
            let count = row(shared.count);
            debug_assert_eq!(whole_blocks(count), count);
            let part = move |buffer: &Rc<Array>| SharedKv { buffer: buffer.clone(), rows: count };
            shared.rows.layers.iter().map(part)
        });
        let (mut index, mut recurrent) = (0, recurrent.iter());
        let mut next_kv = || {
            let parts: Vec<&LayerKv> =
                kv.iter().filter_map(|kv| kv.layers.get(index)).flatten().collect();
            index += 1;
            parts
        };
        let len = row(position);
        for layer in &mut layers {
            match layer {
                LayerCache::Full(full) => full.restore(buffers.next(), &next_kv(), len)?,
                LayerCache::Quantized(quantized) => quantized.restore(&next_kv(), len)?,
                LayerCache::Sliding(_) | LayerCache::Recurrent(_) => {
                    layer.restore_recurrent(&mut recurrent, len)?;
                }
            }
        }
        if recurrent.next().is_some() {
            return Err(Error::SavedState("too many recurrent tensors".into()));
        }
        (self.layers, self.position) = (layers, position);
        (self.draft_mark, self.shared) = (None, shared.map(|shared| shared.rows));
        Ok(())
    }
}

/// The i-th array of each part.
fn column<'a>(parts: &[&'a LayerKv], i: usize) -> Result<Vec<&'a Array>> {
    let arrays: Option<Vec<&Array>> = parts.iter().map(|part| part.get(i)).collect();
    arrays.ok_or_else(|| Error::SavedState("its KV is in another format".into()))
}

/// Checks that `parts` hold `len` rows of the layer's [heads, width] together.
fn expect_rows(parts: &[&Array], [heads, width]: [i32; 2], len: i32) -> Result<()> {
    for part in parts {
        let rows = if part.ndim() == 4 { part.dim(2) } else { 0 };
        expect_shape(part, &[1, heads, rows, width])?;
    }
    let rows: i32 = parts.iter().map(|part| part.dim(2)).sum();
    if rows == len {
        return Ok(());
    }
    Err(Error::SavedState(format!("its KV has {rows} rows, expected {len}")))
}

fn expect_shape(array: &Array, shape: &[i32]) -> Result<()> {
    if array.shape() == shape {
        return Ok(());
    }
    Err(Error::SavedState(format!("a tensor has shape {:?}, expected {shape:?}", array.shape())))
}
