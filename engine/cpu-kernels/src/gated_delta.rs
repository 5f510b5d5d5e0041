//! Rows of a GatedDeltaNet layer, from its projections to the gated norm: convolution, gates, unit vectors, delta rule and
//! norm, for one key head of a sequence and its value heads at a time.
//!
//! Rows run one after another, so their bits do not depend on how many there are. The formula is that of
//! `engine/src/nn/gated_delta.rs`, whose operations are the reference of the test there.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use crate::elementwise::{Output, exp, silu, squares};
use crate::lanes::{Isa, Lanes, for_isa};
use crate::pool;

/// Rows of a state that are multiplied at a time.
const OUT: usize = 4;

/// Added to the sum of squares of q and k before the root.
const L2_EPS: f32 = 1e-6;

/// Products of elements from which the heads are divided between threads.
const SHARED: usize = 1 << 15;

/// The layer, and what its rows are computed from. B sequences of T rows; H_k key heads, H_v value heads of D_k and D_v
/// dimensions; C = 2 H_k D_k + H_v D_v channels; a convolution of K taps.
#[derive(Debug, Clone)]
pub struct GatedDelta<'a> {
    /// H_k; divides H_v.
    pub key_heads: usize,
    /// H_v
    pub value_heads: usize,
    /// T
    pub rows: usize,
    /// Epsilon of the norm.
    pub eps: f32,
    /// [B, T, C]
    pub qkv: &'a [f32],
    /// [B, T, H_v D_v], the output gate.
    pub z: &'a [f32],
    /// [B, T, H_v], strength before the sigmoid.
    pub b: &'a [f32],
    /// [B, T, H_v], input of the decay.
    pub a: &'a [f32],
    /// [B, K - 1, C], the inputs of the convolution before these rows.
    pub tail: &'a [f32],
    /// [B, H_v, D_v, D_k]
    pub state: &'a [f32],
    /// [H_v]
    pub a_log: &'a [f32],
    /// [H_v]
    pub dt_bias: &'a [f32],
    /// [D_v]
    pub norm: &'a [f32],
    /// K taps of [C], oldest first.
    pub taps: &'a [&'a [f32]],
}

/// Where the results go.
#[derive(Debug)]
pub struct GatedDeltaResults<'a> {
    /// [B, T, H_v D_v]
    pub y: &'a mut [f32],
    /// [B, H_v, D_v, D_k]
    pub state: &'a mut [f32],
    /// [B, K - 1, C]
    pub tail: &'a mut [f32],
    /// What the rows write to the state, if asked for.
    pub writes: Option<GatedDeltaWrites<'a>>,
}

/// What rows write to a state.
#[derive(Debug)]
pub struct GatedDeltaWrites<'a> {
    /// [B, H_v, T, D_k]
    pub k: &'a mut [f32],
    /// [B, H_v, T, D_v]
    pub correction: &'a mut [f32],
    /// [B, H_v, T]
    pub log_decay: &'a mut [f32],
}

impl GatedDelta<'_> {
    /// Whether there is a kernel for heads of these dimensions.
    pub fn supports(key_dim: usize, value_dim: usize) -> bool {
        // The widest vectors have 16 lanes.
        key_dim > 0 && key_dim.is_multiple_of(16) && value_dim > 0 && value_dim.is_multiple_of(OUT)
    }
}

/// Sizes, and pointers to the results.
struct Work<'a> {
    x: &'a GatedDelta<'a>,
    key_dim: usize,
    value_dim: usize,
    channels: usize,
    y: Output,
    state: Output,
    tail: Output,
    writes: Option<[Output; 3]>,
}

/// Runs the rows of all sequences.
///
/// # Panics
/// If there is no kernel for the dimensions ([`GatedDelta::supports`]), or a slice has another length than its shape.
pub fn gated_delta(x: &GatedDelta<'_>, results: &mut GatedDeltaResults<'_>) {
    let (value_dim, key_heads, value_heads) = (x.norm.len(), x.key_heads, x.value_heads);
    let batch = x.b.len() / (x.rows * value_heads);
    let key_dim = x.state.len() / (batch * value_heads * value_dim);
    let channels = 2 * key_heads * key_dim + value_heads * value_dim;
    let rows = batch * x.rows;
    assert!(GatedDelta::supports(key_dim, value_dim) && value_heads.is_multiple_of(key_heads));
    assert_eq!(x.state.len(), batch * value_heads * value_dim * key_dim);
    assert_eq!([x.b.len(), x.a.len()], [rows * value_heads; 2]);
    assert_eq!([x.qkv.len(), x.z.len()], [rows * channels, rows * value_heads * value_dim]);
    assert_eq!([x.a_log.len(), x.dt_bias.len()], [value_heads; 2]);
    assert_eq!(x.tail.len(), batch * (x.taps.len() - 1) * channels);
    assert!(x.taps.iter().all(|tap| tap.len() == channels));
    let GatedDeltaResults { y, state, tail, writes } = results;
    assert_eq!([y.len(), state.len(), tail.len()], [x.z.len(), x.state.len(), x.tail.len()]);
    let output = |slice: &mut [f32]| Output(slice.as_mut_ptr());
    let writes = writes.as_mut().map(|GatedDeltaWrites { k, correction, log_decay }| {
        assert_eq!(k.len(), rows * value_heads * key_dim);
        assert_eq!([correction.len(), log_decay.len()], [x.z.len(), x.b.len()]);
        [output(k), output(correction), output(log_decay)]
    });
    let (y, state, tail) = (output(y), output(state), output(tail));
    let work = &Work { x, key_dim, value_dim, channels, y, state, tail, writes };
    let head = |piece: usize| {
        // SAFETY: each piece is its own key head, with its channels and value heads; `Isa::best` is what the
        // processor has.
        unsafe { for_isa!(Isa::best(), key_head(work: &Work<'_>, piece: usize)) };
    };
    let pieces = batch * key_heads;
    if rows * value_heads * value_dim * key_dim < SHARED {
        (0..pieces).for_each(head);
    } else {
        pool::run(pieces, &head);
    }
}

impl Work<'_> {
    /// Channels `first..` of the convolution's input at row `t` of a sequence; the rows before the first are in the
    /// tail.
    fn input(&self, sequence: usize, t: isize, first: usize) -> &[f32] {
        let before = self.x.taps.len() - 1;
        match usize::try_from(t) {
            Ok(t) => &self.x.qkv[(sequence * self.x.rows + t) * self.channels + first..],
            Err(_) => {
                let row = (before as isize + t) as usize;
                &self.x.tail[(sequence * before + row) * self.channels + first..]
            }
        }
    }

    /// Convolution and SiLU of the channels `first..first + width` of all rows: [T, width]. Also writes their part of
    /// the next tail.
    ///
    /// # Safety
    /// Nothing else writes these channels of the tail.
    #[inline(always)]
    unsafe fn convolve(&self, sequence: usize, first: usize, width: usize, out: &mut [f32]) {
        let (rows, before) = (self.x.rows as isize, self.x.taps.len() as isize - 1);
        for (t, out) in (0..rows).zip(out.chunks_exact_mut(width)) {
            out.fill(0.0);
            for (i, tap) in (0..).zip(self.x.taps) {
                let input = &self.input(sequence, t + i - before, first)[..width];
                let tap = &tap[first..first + width];
                for ((out, x), weight) in out.iter_mut().zip(input).zip(tap) {
                    *out += x * weight;
                }
            }
            out.iter_mut().for_each(|x| *x = silu(*x));
        }
        for row in 0..before {
            let input = &self.input(sequence, rows - before + row, first)[..width];
            let at = (sequence as isize * before + row) as usize * self.channels + first;
            // SAFETY: `at..at + width` are this row's channels; promised by the caller.
            unsafe { self.tail.at(at).copy_from_nonoverlapping(input.as_ptr(), width) };
        }
    }
}

/// Runs one key head of a sequence and its value heads: piece H_k * sequence + head.
///
/// # Safety
/// The processor has the instruction set, and no other call has the same piece.
#[inline(always)]
unsafe fn key_head<L: Lanes>(work: &Work<'_>, piece: usize) {
    let &Work { x, key_dim, value_dim, .. } = work;
    let (sequence, head) = (piece / x.key_heads, piece % x.key_heads);
    let (rows, repeats) = (x.rows, x.value_heads / x.key_heads);
    let mut scratch = vec![0.0; rows * (2 * key_dim + value_dim) + value_dim];
    let (q, rest) = scratch.split_at_mut(rows * key_dim);
    let (k, rest) = rest.split_at_mut(rows * key_dim);
    let (v, mixed) = rest.split_at_mut(rows * value_dim);
    // SAFETY: the channels are those of this head.
    unsafe {
        work.convolve(sequence, head * key_dim, key_dim, q);
        work.convolve(sequence, (x.key_heads + head) * key_dim, key_dim, k);
    }
    let scale = 1.0 / (key_dim as f32).sqrt();
    for (vectors, scale) in [(&mut *q, scale), (&mut *k, 1.0)] {
        for vector in vectors.chunks_exact_mut(key_dim) {
            // SAFETY: the vector has `key_dim` floats.
            let total = unsafe { squares::<L>(vector.as_ptr(), key_dim) };
            let factor = scale / (total + L2_EPS).sqrt();
            vector.iter_mut().for_each(|x| *x *= factor);
        }
    }
    for value_head in head * repeats..(head + 1) * repeats {
        let first = 2 * x.key_heads * key_dim + value_head * value_dim;
        let index = sequence * x.value_heads + value_head;
        let size = value_dim * key_dim;
        // SAFETY: channels, state, rows of y and writes are those of this head. The state has `size` floats.
        unsafe {
            work.convolve(sequence, first, value_dim, v);
            let state = work.state.at(index * size);
            state.copy_from_nonoverlapping(x.state[index * size..].as_ptr(), size);
            for t in 0..rows {
                let row = (sequence * rows + t) * x.value_heads + value_head;
                let duration = x.a[row] + x.dt_bias[value_head];
                let duration = duration.max(0.0) + exp(-duration.abs()).ln_1p();
                let log_decay = -exp(x.a_log[value_head]) * duration;
                let gates = [exp(log_decay), 1.0 / (1.0 + exp(-x.b[row]))];
                let [q, k] = [&*q, &*k].map(|x| &x[t * key_dim..(t + 1) * key_dim]);
                let v = &mut v[t * value_dim..(t + 1) * value_dim];
                delta_rule::<L>(state, [q, k], v, mixed, gates);
                if let Some([keys, corrections, log_decays]) = &work.writes {
                    let at = index * rows + t;
                    keys.at(at * key_dim).copy_from_nonoverlapping(k.as_ptr(), key_dim);
                    corrections.at(at * value_dim).copy_from_nonoverlapping(v.as_ptr(), value_dim);
                    *log_decays.at(at) = log_decay;
                }
                let total = squares::<L>(mixed.as_ptr(), value_dim);
                let factor = 1.0 / (total / value_dim as f32 + x.eps).sqrt();
                let y = std::slice::from_raw_parts_mut(work.y.at(row * value_dim), value_dim);
                let gate = &x.z[row * value_dim..(row + 1) * value_dim];
                for (((y, x), weight), z) in y.iter_mut().zip(&*mixed).zip(x.norm).zip(gate) {
                    *y = x * factor * weight * silu(*z);
                }
            }
        }
    }
}

/// One row: `state` [D_v, D_k] decays and is corrected towards `v` along k, `mixed` [D_v] is what q reads. `v` becomes
/// the correction.
///
/// # Safety
/// The processor has the instruction set. `state` is valid for D_v D_k floats, and dimensions are supported.
#[inline(always)]
unsafe fn delta_rule<L: Lanes>(
    state: *mut f32,
    [q, k]: [&[f32]; 2],
    v: &mut [f32],
    mixed: &mut [f32],
    [decay, strength]: [f32; 2],
) {
    let width = k.len();
    for first in (0..v.len()).step_by(OUT) {
        // SAFETY: four rows of the state, as D_v is a multiple of four; vectors are whole, as D_k is a multiple of
        // their lanes.
        unsafe {
            let rows: [*mut f32; OUT] = std::array::from_fn(|o| state.add((first + o) * width));
            let mut sums = [L::zero(); OUT];
            for i in (0..width).step_by(L::LANES) {
                let k = L::load(k.as_ptr().add(i));
                for (sum, row) in sums.iter_mut().zip(rows) {
                    *sum = L::fma(L::load(row.add(i)), k, *sum);
                }
            }
            let recalled = L::sum4(sums);
            for (v, recalled) in v[first..first + OUT].iter_mut().zip(recalled) {
                *v = strength * (*v - decay * recalled);
            }
            let corrections: [L::V; OUT] = std::array::from_fn(|o| L::splat(v[first + o]));
            let decay = L::splat(decay);
            let mut sums = [L::zero(); OUT];
            for i in (0..width).step_by(L::LANES) {
                let (k, q) = (L::load(k.as_ptr().add(i)), L::load(q.as_ptr().add(i)));
                for ((sum, row), correction) in sums.iter_mut().zip(rows).zip(corrections) {
                    let decayed = L::fma(L::load(row.add(i)), decay, L::zero());
                    let next = L::fma(correction, k, decayed);
                    L::store(row.add(i), next);
                    *sum = L::fma(next, q, *sum);
                }
            }
            mixed[first..first + OUT].copy_from_slice(&L::sum4(sums));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(seed: u32, length: usize) -> Vec<f32> {
        let mut x = seed.wrapping_mul(2_654_435_761) | 1;
        let mut next = || {
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            (x >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..length).map(|_| next()).collect()
    }

    /// Two sequences of rows with two key heads, four value heads of 8 and keys of 16; every result.
    fn run(from: usize, rows: usize, tail: &[f32], state: &[f32]) -> Vec<Vec<f32>> {
        let (channels, values) = (2 * 2 * 16 + 4 * 8, 4 * 8);
        // Rows `from..from + rows` of both sequences of 8 rows.
        let part = |seed, width: usize| -> Vec<f32> {
            let all = numbers(seed, 2 * 8 * width);
            let own = |sequence: usize| &all[(sequence * 8 + from) * width..][..rows * width];
            [own(0), own(1)].concat()
        };
        let (qkv, z, b, a) = (part(1, channels), part(2, values), part(3, 4), part(4, 4));
        let (a_log, dt_bias, norm) = (numbers(5, 4), numbers(6, 4), numbers(7, 8));
        let taps: Vec<Vec<f32>> = (0..4).map(|tap| numbers(10 + tap, channels)).collect();
        let taps: Vec<&[f32]> = taps.iter().map(Vec::as_slice).collect();
        let x = GatedDelta {
            key_heads: 2,
            value_heads: 4,
            rows,
            eps: 1e-6,
            qkv: &qkv,
            z: &z,
            b: &b,
            a: &a,
            tail,
            state,
            a_log: &a_log,
            dt_bias: &dt_bias,
            norm: &norm,
            taps: &taps,
        };
        let lengths = [z.len(), state.len(), tail.len(), 2 * rows * 4 * 16, z.len(), b.len()];
        let mut results = lengths.map(|length| vec![f32::NAN; length]);
        let [y, state, tail, k, correction, log_decay] = &mut results;
        let writes = Some(GatedDeltaWrites { k, correction, log_decay });
        gated_delta(&x, &mut GatedDeltaResults { y, state, tail, writes });
        results.to_vec()
    }

    /// Eight rows at once, and one after another: the same bits, state and tail included.
    #[test]
    fn rows_together_equal_rows_alone() {
        let (tail, state) = (numbers(20, 2 * 3 * 96), numbers(21, 2 * 4 * 8 * 16));
        let together = run(0, 8, &tail, &state);
        assert!(together.iter().flatten().all(|x| x.is_finite()));
        let (mut tail, mut state) = (tail, state);
        for row in 0..8 {
            let alone = run(row, 1, &tail, &state);
            for sequence in 0..2 {
                let own = &together[0][(sequence * 8 + row) * 32..][..32];
                assert_eq!(own, &alone[0][sequence * 32..][..32], "row {row}");
            }
            (state, tail) = (alone[1].clone(), alone[2].clone());
        }
        assert_eq!([&state, &tail], [&together[1], &together[2]]);
    }
}
