//! Attention of the rows of sequences, from the projections on: norms of heads, rotation by position, the write to the
//! caches, scores, softmax (arXiv:1706.03762) and gates, for some rows and one key-value head with its query heads at a
//! time.
//!
//! Keys are read in tiles, and the softmax is corrected after each (arXiv:2205.14135), so nothing is as long as the
//! context. The order of all sums depends on the position of a row only, so its bits do not depend on how many rows there
//! are. The formula is that of `engine/src/nn/heads.rs`, whose operations are the reference of the test there.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use std::ops::Range;

use crate::elementwise::{Norm, Output, exp, rms_factor};
use crate::lanes::{Isa, Lanes, for_isa};
use crate::pool;

/// Keys that are read at a time by all queries of a head. With their values they fit the second-level cache.
const TILE: usize = 64;

/// Keys that are multiplied at a time.
const OUT: usize = 4;

/// Rows that read a tile together.
const ROWS: usize = 8;

/// Rows of all sequences, R in sum, one sequence after the other.
#[derive(Debug, Clone)]
pub struct Attention<'a> {
    /// H_q, a multiple of H_kv.
    pub heads: usize,
    /// H_kv
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
    /// Whether each query is followed by the gate of its result.
    pub gated: bool,
    /// Factor of the scores.
    pub scale: f32,
    /// [R, H_q, D], or [R, H_q, 2 D] with gates.
    pub q: &'a [f32],
    /// [R, H_kv, D]
    pub k: &'a [f32],
    /// [R, H_kv, D]
    pub v: &'a [f32],
    /// Norm of each query, [D].
    pub q_norm: Option<Norm<'a>>,
    /// Norm of each key, [D].
    pub k_norm: Option<Norm<'a>>,
    /// `None` if the layer does not know positions.
    pub rotation: Option<Rotation<'a>>,
}

/// A rotation of the first dimensions of heads, of which `i` is paired with `i + dims / 2`.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// [dims / 2], radians a position.
    pub frequencies: &'a [f32],
    /// Factor of positions.
    pub scale: f32,
}

/// The rows of a sequence, and its cache.
#[derive(Debug)]
pub struct Sequence<'a> {
    /// T, at least 1.
    pub rows: usize,
    /// Position of the first row.
    pub position: usize,
    /// Rows in `kv`, which those of the sequence are written after.
    pub cached: usize,
    /// Keys, and then values as further heads: [2 H_kv, capacity, D].
    pub kv: &'a mut [f32],
    /// Rows before those of `kv`, a multiple of 64.
    pub shared_rows: usize,
    /// Like `kv`, for the rows before. Not read if there are none.
    pub shared: &'a [f32],
}

impl Attention<'_> {
    /// Whether there is a kernel for heads of this dimension.
    pub fn supports(head_dim: usize) -> bool {
        // The widest vectors have 16 lanes.
        head_dim > 0 && head_dim.is_multiple_of(16)
    }

    /// Floats of a query, its gate included.
    fn width(&self) -> usize {
        if self.gated { 2 * self.head_dim } else { self.head_dim }
    }
}

/// A sequence, and where its rows begin.
struct Part<'a> {
    first: usize,
    rows: usize,
    cached: usize,
    capacity: usize,
    kv: Output,
    shared_rows: usize,
    /// [2 H_kv, capacity, D]
    shared: &'a [f32],
}

struct Work<'a> {
    x: &'a Attention<'a>,
    parts: Vec<Part<'a>>,
    /// [R, dims]: the cosines of a row's angles, then the sines.
    angles: Vec<f32>,
    y: Output,
}

/// Writes keys and values of all rows to the caches, and the result [R, H_q, D] to `y`: for each query, the mean of the
/// values up to its row, weighted by the softmax of their scores.
///
/// # Panics
/// If there is no kernel for the dimension ([`Attention::supports`]), or a slice has another length than its shape.
pub fn attention(x: &Attention<'_>, sequences: &mut [Sequence<'_>], y: &mut [f32]) {
    let &Attention { heads, kv_heads, head_dim, .. } = x;
    assert!(Attention::supports(head_dim) && kv_heads > 0 && heads.is_multiple_of(kv_heads));
    let rows = y.len() / (heads * head_dim);
    assert_eq!([x.k.len(), x.v.len()], [rows * kv_heads * head_dim; 2]);
    assert_eq!([x.q.len(), y.len()], [x.width(), head_dim].map(|width| rows * heads * width));
    for norm in [x.q_norm, x.k_norm].into_iter().flatten() {
        assert_eq!(norm.weight.len(), head_dim);
    }
    assert!(x.rotation.is_none_or(|rotation| 2 * rotation.frequencies.len() <= head_dim));
    let (mut parts, mut angles) = (Vec::with_capacity(sequences.len()), Vec::new());
    let (mut first, mut products) = (0, 0);
    for Sequence { rows, position, cached, kv, shared_rows, shared } in &mut *sequences {
        let capacity = kv.len() / (2 * kv_heads * head_dim);
        assert_eq!(kv.len(), 2 * kv_heads * capacity * head_dim);
        assert!(*rows > 0 && *cached + *rows <= capacity);
        // A tile lies in one buffer.
        assert!(shared_rows.is_multiple_of(TILE));
        assert!(*shared_rows == 0 || shared.len() >= 2 * kv_heads * *shared_rows * head_dim);
        let kv = Output(kv.as_mut_ptr());
        let (rows, cached, shared_rows) = (*rows, *cached, *shared_rows);
        parts.push(Part { first, rows, cached, capacity, kv, shared_rows, shared });
        first += rows;
        products += rows * heads * (shared_rows + cached + rows) * head_dim;
        for row in *position..*position + rows {
            x.rotation.iter().for_each(|rotation| rotation.push_angles(row, &mut angles));
        }
    }
    assert_eq!(first, rows);
    let work = &Work { x, parts, angles, y: Output(y.as_mut_ptr()) };
    let mut blocks = Vec::new();
    for part in &work.parts {
        for first in (0..part.rows).step_by(ROWS) {
            let rows = first..part.rows.min(first + ROWS);
            blocks.extend((0..kv_heads).map(|head| Block { part, rows: rows.clone(), head }));
        }
    }
    // SAFETY: each block has its own rows of a head of a cache; `Isa::best` is what the processor has.
    pool::run_if_large(x.k.len() + x.v.len(), blocks.len(), &|i| unsafe {
        let block = &blocks[i];
        for_isa!(Isa::best(), write_keys(work: &Work<'_>, block: &Block<'_>));
    });
    // SAFETY: as above; nothing writes to the caches now.
    pool::run_if_large(products, blocks.len(), &|i| unsafe {
        let block = &blocks[i];
        for_isa!(Isa::best(), attend(work: &Work<'_>, block: &Block<'_>));
    });
}

impl Rotation<'_> {
    /// Appends the cosines of the angles at a position, and then the sines.
    fn push_angles(&self, position: usize, angles: &mut Vec<f32>) {
        let position = position as f32 * self.scale;
        angles.extend(self.frequencies.iter().map(|frequency| (position * frequency).cos()));
        angles.extend(self.frequencies.iter().map(|frequency| (position * frequency).sin()));
    }
}

impl Work<'_> {
    /// Norms and rotates the head of a row in place.
    ///
    /// # Safety
    /// The processor has the instruction set.
    #[inline(always)]
    unsafe fn place<L: Lanes>(&self, head: &mut [f32], norm: Option<Norm<'_>>, row: usize) {
        if let Some(Norm { weight, eps }) = norm {
            // SAFETY: promised by the caller.
            let factor = unsafe { rms_factor::<L>(head, eps) };
            head.iter_mut().zip(weight).for_each(|(x, weight)| *x = *x * factor * weight);
        }
        if let Some(rotation) = self.x.rotation {
            let half = rotation.frequencies.len();
            let (cosines, sines) = self.angles[2 * half * row..][..2 * half].split_at(half);
            let (left, right) = head[..2 * half].split_at_mut(half);
            for (((a, b), cosine), sine) in left.iter_mut().zip(right).zip(cosines).zip(sines) {
                (*a, *b) = (*a * cosine - *b * sine, *a * sine + *b * cosine);
            }
        }
    }
}

/// A query while keys are read.
struct Query<'a> {
    /// Keys that it attends to.
    keys: usize,
    /// [D], times the factor of scores.
    q: &'a mut [f32],
    /// [D], the sum of weighted values.
    sum: &'a mut [f32],
    /// The largest score so far.
    largest: f32,
    /// The sum of the weights.
    total: f32,
}

/// Some rows of a sequence, and one of its key-value heads.
struct Block<'a> {
    part: &'a Part<'a>,
    rows: Range<usize>,
    head: usize,
}

impl Block<'_> {
    /// Keys and values of the head in the cache, [capacity, D] each.
    fn kv(&self, x: &Attention<'_>) -> [*mut f32; 2] {
        let size = self.part.capacity * x.head_dim;
        // SAFETY: the cache has as many keys and then as many values as there are heads.
        [self.head, x.kv_heads + self.head].map(|head| unsafe { self.part.kv.at(head * size) })
    }

    /// Keys and values of the head from row `first` on, up to the end of its tile.
    fn tile(&self, x: &Attention<'_>, first: usize) -> [*const f32; 2] {
        let part = self.part;
        if first >= part.shared_rows {
            let at = (first - part.shared_rows) * x.head_dim;
            return self.kv(x).map(|kv| kv.wrapping_add(at).cast_const());
        }
        let size = part.shared.len() / (2 * x.kv_heads);
        let heads = [self.head, x.kv_heads + self.head];
        heads.map(|head| part.shared[head * size + first * x.head_dim..].as_ptr())
    }
}

/// Writes the keys and values of a block's rows to the cache.
///
/// # Safety
/// The processor has the instruction set, and no other call has the same block.
#[inline(always)]
unsafe fn write_keys<L: Lanes>(work: &Work<'_>, block: &Block<'_>) {
    let x = work.x;
    let (part, d, [keys, values]) = (block.part, x.head_dim, block.kv(x));
    for t in block.rows.clone() {
        let (row, at) = (part.first + t, (part.cached + t) * d);
        let from = (row * x.kv_heads + block.head) * d;
        // SAFETY: the cache has room for the rows, and these are the block's own.
        unsafe {
            let key = std::slice::from_raw_parts_mut(keys.add(at), d);
            key.copy_from_slice(&x.k[from..from + d]);
            work.place::<L>(key, x.k_norm, row);
            let value = std::slice::from_raw_parts_mut(values.add(at), d);
            value.copy_from_slice(&x.v[from..from + d]);
        }
    }
}

/// Computes the result for a block's rows and the query heads of its key-value head.
///
/// # Safety
/// The processor has the instruction set, no other call has the same block, and keys and values of all rows are written.
#[inline(always)]
unsafe fn attend<L: Lanes>(work: &Work<'_>, block: &Block<'_>) {
    let x = work.x;
    let (part, head) = (block.part, block.head);
    let (d, width, group) = (x.head_dim, x.width(), x.heads / x.kv_heads);
    // The row and the query head of a query.
    let place = |i: usize| (block.rows.start + i / group, head * group + i % group);
    let mut scratch = vec![0.0; 2 * block.rows.len() * group * d];
    let mut queries = Vec::with_capacity(block.rows.len() * group);
    for (i, room) in scratch.chunks_exact_mut(2 * d).enumerate() {
        let (t, head) = place(i);
        let row = part.first + t;
        let from = (row * x.heads + head) * width;
        let (q, sum) = room.split_at_mut(d);
        q.copy_from_slice(&x.q[from..from + d]);
        // SAFETY: promised by the caller.
        unsafe { work.place::<L>(q, x.q_norm, row) };
        q.iter_mut().for_each(|q| *q *= x.scale);
        let keys = part.shared_rows + part.cached + t + 1;
        queries.push(Query { keys, q, sum, largest: f32::NEG_INFINITY, total: 0.0 });
    }
    for first in (0..part.shared_rows + part.cached + block.rows.end).step_by(TILE) {
        let [keys, values] = block.tile(x, first);
        for query in &mut queries {
            let count = query.keys.saturating_sub(first).min(TILE);
            if count > 0 {
                // SAFETY: `count` rows from `first` on are written.
                unsafe { read_tile::<L>(query, keys, values, count) };
            }
        }
    }
    for (i, query) in queries.iter().enumerate() {
        let (t, head) = place(i);
        let at = (part.first + t) * x.heads + head;
        // SAFETY: the row of y for this query, which is in this block only.
        let y = unsafe { std::slice::from_raw_parts_mut(work.y.at(at * d), d) };
        let factor = 1.0 / query.total;
        y.iter_mut().zip(&*query.sum).for_each(|(y, sum)| *y = sum * factor);
        if x.gated {
            let gates = &x.q[at * width + d..(at + 1) * width];
            y.iter_mut().zip(gates).for_each(|(y, gate)| *y /= 1.0 + exp(-gate));
        }
    }
}

/// Adds `count` keys and values to a query's sums.
///
/// # Safety
/// The processor has the instruction set, and both pointers are valid for `count` rows of D floats; 0 < `count` <=
/// [`TILE`].
#[inline(always)]
unsafe fn read_tile<L: Lanes>(
    query: &mut Query<'_>,
    keys: *const f32,
    values: *const f32,
    count: usize,
) {
    let d = query.q.len();
    // Keys beyond the last have no weight.
    let mut weights = [f32::NEG_INFINITY; TILE];
    for first in (0..count).step_by(OUT) {
        // The last key again, where there are fewer than four.
        let row = |o: usize| (first + o).min(count - 1) * d;
        // SAFETY: all rows are below `count`, and D is a multiple of the lanes.
        let scores = unsafe {
            let mut sums = [L::zero(); OUT];
            for i in (0..d).step_by(L::LANES) {
                let q = L::load(query.q.as_ptr().add(i));
                for (o, sum) in sums.iter_mut().enumerate() {
                    *sum = L::fma(L::load(keys.add(row(o) + i)), q, *sum);
                }
            }
            L::sum4(sums)
        };
        let own = OUT.min(count - first);
        weights[first..first + own].copy_from_slice(&scores[..own]);
    }
    let largest = weights.iter().fold(query.largest, |a, b| a.max(*b));
    let correction = exp(query.largest - largest);
    weights[..count].iter_mut().for_each(|weight| *weight = exp(*weight - largest));
    weights[count..].fill(0.0);
    query.largest = largest;
    // In a fixed order that vectors can follow.
    let mut totals = [0.0; 16];
    for part in weights.chunks_exact(16) {
        totals.iter_mut().zip(part).for_each(|(total, weight)| *total += weight);
    }
    query.total = query.total * correction + totals.iter().sum::<f32>();
    let sum = query.sum.as_mut_ptr();
    // SAFETY: all rows are below `count`, and D is a multiple of the lanes.
    unsafe {
        let correction = L::splat(correction);
        let step = OUT * L::LANES;
        let whole = d / step * step;
        for i in (0..whole).step_by(step) {
            let mut sums = [L::zero(); OUT];
            for (o, part) in sums.iter_mut().enumerate() {
                *part = L::fma(L::load(sum.add(i + o * L::LANES)), correction, L::zero());
            }
            for (j, weight) in weights[..count].iter().enumerate() {
                let weight = L::splat(*weight);
                for (o, part) in sums.iter_mut().enumerate() {
                    *part = L::fma(L::load(values.add(j * d + i + o * L::LANES)), weight, *part);
                }
            }
            for (o, part) in sums.into_iter().enumerate() {
                L::store(sum.add(i + o * L::LANES), part);
            }
        }
        for i in (whole..d).step_by(L::LANES) {
            let mut part = L::fma(L::load(sum.add(i)), correction, L::zero());
            for (j, weight) in weights[..count].iter().enumerate() {
                part = L::fma(L::load(values.add(j * d + i)), L::splat(*weight), part);
            }
            L::store(sum.add(i), part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers;

    const HEADS: usize = 6;
    const KV_HEADS: usize = 2;

    /// Runs rows `from..from + rows` of a sequence of 210 rows after as many in the cache; gated, normed and rotated.
    fn run(from: usize, rows: usize, d: usize, kv: &mut [f32]) -> Vec<f32> {
        let sequence =
            Sequence { rows, position: from, cached: from, kv, shared_rows: 0, shared: &[] };
        run_sequence(sequence, d)
    }

    fn run_sequence(sequence: Sequence<'_>, d: usize) -> Vec<f32> {
        let (rows, from) = (sequence.rows, sequence.position);
        let part = |seed, width: usize| {
            numbers(seed, 210 * width)[from * width..][..rows * width].to_vec()
        };
        let (q, k, v) = (part(1, HEADS * 2 * d), part(2, KV_HEADS * d), part(3, KV_HEADS * d));
        let (q_norm, k_norm) = (numbers(4, d), numbers(5, d));
        let frequencies = [1.0, 0.5, 0.01, 0.001];
        let x = Attention {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: d,
            gated: true,
            scale: 0.3,
            q: &q,
            k: &k,
            v: &v,
            q_norm: Some(Norm { weight: &q_norm, eps: 1e-6 }),
            k_norm: Some(Norm { weight: &k_norm, eps: 1e-6 }),
            rotation: Some(Rotation { frequencies: &frequencies, scale: 1.0 }),
        };
        let mut y = vec![f32::NAN; rows * HEADS * d];
        attention(&x, &mut [sequence], &mut y);
        y
    }

    /// Eleven rows at once, and one after another: the same bits, at the ends of tiles, too.
    #[test]
    fn rows_together_equal_rows_alone() {
        for d in [16, 64, 80, 128] {
            let kv = numbers(6, 2 * KV_HEADS * 208 * d);
            for from in [0, 3, 60, 63, 64, 150] {
                let (mut one, mut other) = (kv.clone(), kv.clone());
                let together = run(from, 11, d, &mut one);
                assert!(together.iter().all(|y| y.is_finite()));
                for (i, row) in together.chunks(HEADS * d).enumerate() {
                    assert_eq!(row, run(from + i, 1, d, &mut other), "{d}, {from} + {i}");
                }
                assert_eq!(one, other);
            }
        }
    }

    /// The first rows lie in a buffer of their own, which has more than are used.
    #[test]
    fn shared_rows_are_read_as_own_ones() {
        for (d, shared_rows, rows) in [(64, 64, 1), (64, 128, 11), (80, 64, 8), (16, 128, 70)] {
            let (from, capacity) = (shared_rows + 9, shared_rows + 90);
            let mut kv = numbers(6, 2 * KV_HEADS * capacity * d);
            let part = |rows: std::ops::Range<usize>| -> Vec<f32> {
                let heads = kv.chunks(capacity * d);
                heads.flat_map(|head| head[rows.start * d..rows.end * d].to_vec()).collect()
            };
            let (shared, mut own) = (part(0..shared_rows + 5), part(shared_rows..capacity));
            let expected = run(from, rows, d, &mut kv);
            let own = Sequence {
                rows,
                position: from,
                cached: from - shared_rows,
                kv: &mut own,
                shared_rows,
                shared: &shared,
            };
            assert_eq!(run_sequence(own, d), expected, "{d}, {shared_rows}, {rows}");
        }
    }

    /// In f64, without norms and rotation.
    #[test]
    fn the_result_is_a_mean_weighted_by_the_softmax() {
        for (d, cached) in [(16, 0), (64, 1), (64, 130), (256, 77)] {
            let (q, k, v) =
                (numbers(1, HEADS * d), numbers(2, KV_HEADS * d), numbers(3, KV_HEADS * d));
            let capacity = cached + 3;
            let mut kv = numbers(4, 2 * KV_HEADS * capacity * d);
            let x = Attention {
                heads: HEADS,
                kv_heads: KV_HEADS,
                head_dim: d,
                gated: false,
                scale: 2.0,
                q: &q,
                k: &k,
                v: &v,
                q_norm: None,
                k_norm: None,
                rotation: None,
            };
            let mut y = vec![0.0; q.len()];
            let (position, shared) = (cached, &[][..]);
            let sequence =
                Sequence { rows: 1, position, cached, kv: &mut kv, shared_rows: 0, shared };
            attention(&x, &mut [sequence], &mut y);
            for (head, y) in y.chunks(d).enumerate() {
                let row = |side: usize, j: usize| {
                    let head = side * KV_HEADS + head / (HEADS / KV_HEADS);
                    &kv[(head * capacity + j) * d..][..d]
                };
                let dot = |a: &[f32], b: &[f32]| -> f64 {
                    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                };
                let q = &q[head * d..][..d];
                let weights: Vec<f64> =
                    (0..=cached).map(|j| (2.0 * dot(q, row(0, j))).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (i, y) in y.iter().enumerate() {
                    let mixed =
                        weights.iter().enumerate().map(|(j, w)| w * f64::from(row(1, j)[i]));
                    let expected = mixed.sum::<f64>() / total;
                    assert!(
                        (f64::from(*y) - expected).abs() < 1e-5,
                        "{d}, {cached}: {y}, {expected}"
                    );
                }
            }
        }
    }
}
