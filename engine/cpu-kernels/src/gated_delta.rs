//! Rows of a GatedDeltaNet layer, from its projections to the gated norm: convolution, gates, unit vectors, delta rule and
//! norm, for one key head of a sequence and its value heads at a time.
//!
//! Rows run one after another, so their bits do not depend on how many there are. The rows of a state do not depend on
//! each other: a few of them stay in the first-level cache while all rows of a chunk pass. The formula is that of
//! `engine/src/nn/gated_delta.rs`, whose operations are the reference of the test there.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use crate::elementwise::{Output, exp, rms_factor, silu, squares};
use crate::lanes::{Isa, Lanes, for_isa};
use crate::pool;

/// Rows of a state that are multiplied at a time.
const OUT: usize = 4;

/// Rows that pass a part of the state at a time. What is computed from them fits the second-level cache.
const CHUNK: usize = 64;

/// If the states of a layer have at least as many bytes, a step of one row writes them past the caches: the next step would
/// not find them there, and a write through a cache reads the line first. 32 states of the bundled model (8 MiB a layer)
/// are 1.3 times as fast on two cores, EPYC and Xeon; 8 states are slower on the Xeon.
const LARGE_STATES: usize = 1 << 22;

/// Added to the sum of squares of q and k before the root.
const L2_EPS: f32 = 1e-6;

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
    /// For each sequence, [K - 1, C]: the inputs of the convolution before these rows.
    pub tails: &'a [&'a [f32]],
    /// For each sequence, [H_v, D_v, D_k].
    pub states: &'a [&'a [f32]],
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
    /// Whether the states are written past the caches, where they are aligned.
    past_caches: bool,
}

/// Runs the rows of all sequences.
///
/// # Panics
/// If there is no kernel for the dimensions ([`GatedDelta::supports`]), or a slice has another length than its shape.
pub fn gated_delta(x: &GatedDelta<'_>, results: &mut GatedDeltaResults<'_>) {
    let (value_dim, key_heads, value_heads) = (x.norm.len(), x.key_heads, x.value_heads);
    let batch = x.states.len();
    assert!(batch > 0 && x.rows > 0);
    let key_dim = x.states[0].len() / (value_heads * value_dim);
    let channels = 2 * key_heads * key_dim + value_heads * value_dim;
    let rows = batch * x.rows;
    assert!(GatedDelta::supports(key_dim, value_dim) && value_heads.is_multiple_of(key_heads));
    let (state_size, tail_size) =
        (value_heads * value_dim * key_dim, (x.taps.len() - 1) * channels);
    assert_eq!(x.tails.len(), batch);
    assert!(x.states.iter().all(|state| state.len() == state_size));
    assert!(x.tails.iter().all(|tail| tail.len() == tail_size));
    assert_eq!([x.b.len(), x.a.len()], [rows * value_heads; 2]);
    assert_eq!([x.qkv.len(), x.z.len()], [rows * channels, rows * value_heads * value_dim]);
    assert_eq!([x.a_log.len(), x.dt_bias.len()], [value_heads; 2]);
    assert!(x.taps.iter().all(|tap| tap.len() == channels));
    let GatedDeltaResults { y, state, tail, writes } = results;
    assert_eq!(y.len(), x.z.len());
    assert_eq!([state.len(), tail.len()], [state_size, tail_size].map(|size| batch * size));
    let output = |slice: &mut [f32]| Output(slice.as_mut_ptr());
    let writes = writes.as_mut().map(|GatedDeltaWrites { k, correction, log_decay }| {
        assert_eq!(k.len(), rows * value_heads * key_dim);
        assert_eq!([correction.len(), log_decay.len()], [x.z.len(), x.b.len()]);
        [output(k), output(correction), output(log_decay)]
    });
    let (y, state, tail) = (output(y), output(state), output(tail));
    let past_caches = x.rows == 1 && batch * state_size * size_of::<f32>() >= LARGE_STATES;
    let work = &Work { x, key_dim, value_dim, channels, y, state, tail, writes, past_caches };
    let head = |piece: usize| {
        // SAFETY: each piece is its own key head, with its channels and value heads; `Isa::best` is what the
        // processor has.
        unsafe { for_isa!(Isa::best(), key_head(work: &Work<'_>, piece: usize)) };
    };
    let pieces = batch * key_heads;
    pool::run_if_large(rows * value_heads * value_dim * key_dim, pieces, &head);
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
                &self.x.tails[sequence][row * self.channels + first..]
            }
        }
    }

    /// Convolution and SiLU of the channels `first..first + width` of the rows from `start` on: [.., width].
    #[inline(always)]
    fn convolve(&self, sequence: usize, start: usize, first: usize, width: usize, out: &mut [f32]) {
        let before = self.x.taps.len() as isize - 1;
        for (t, out) in (start as isize..).zip(out.chunks_exact_mut(width)) {
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
    }

    /// Writes the channels `first..first + width` of the next tail.
    ///
    /// # Safety
    /// Nothing else writes these channels.
    unsafe fn write_tail(&self, sequence: usize, first: usize, width: usize) {
        let (rows, before) = (self.x.rows as isize, self.x.taps.len() as isize - 1);
        for row in 0..before {
            let input = &self.input(sequence, rows - before + row, first)[..width];
            let at = (sequence as isize * before + row) as usize * self.channels + first;
            // SAFETY: `at..at + width` are this row's channels; promised by the caller.
            unsafe { self.tail.at(at).copy_from_nonoverlapping(input.as_ptr(), width) };
        }
    }

    /// The log of the decay, the decay and the strength of a row of a value head.
    fn gates(&self, row: usize, head: usize) -> [f32; 3] {
        let x = self.x;
        let duration = x.a[row * x.value_heads + head] + x.dt_bias[head];
        let duration = duration.max(0.0) + exp(-duration.abs()).ln_1p();
        let log_decay = -exp(x.a_log[head]) * duration;
        [log_decay, exp(log_decay), 1.0 / (1.0 + exp(-x.b[row * x.value_heads + head]))]
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
    let repeats = x.value_heads / x.key_heads;
    let most = x.rows.min(CHUNK);
    let mut scratch = vec![0.0; most * 2 * (key_dim + value_dim)];
    for start in (0..x.rows).step_by(CHUNK) {
        let rows = CHUNK.min(x.rows - start);
        let (q, rest) = scratch.split_at_mut(rows * key_dim);
        let (k, rest) = rest.split_at_mut(rows * key_dim);
        let (v, rest) = rest.split_at_mut(rows * value_dim);
        let mixed = &mut rest[..rows * value_dim];
        work.convolve(sequence, start, head * key_dim, key_dim, q);
        work.convolve(sequence, start, (x.key_heads + head) * key_dim, key_dim, k);
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
            work.convolve(sequence, start, first, value_dim, v);
            // SAFETY: value heads of a piece are its own.
            unsafe { value_rows::<L>(work, [sequence, start, value_head], [q, k], v, mixed) };
        }
    }
    // SAFETY: the channels are those of this piece.
    unsafe {
        work.write_tail(sequence, head * key_dim, key_dim);
        work.write_tail(sequence, (x.key_heads + head) * key_dim, key_dim);
        let first = 2 * x.key_heads * key_dim + head * repeats * value_dim;
        work.write_tail(sequence, first, repeats * value_dim);
    }
}

/// Runs the rows from `start` on through the state of a value head, whose q, k [T, D_k] and v [T, D_v] are given, and
/// writes their results. `mixed` [T, D_v] is room.
///
/// # Safety
/// The processor has the instruction set, and no other thread has this head of the sequence.
#[inline(always)]
unsafe fn value_rows<L: Lanes>(
    work: &Work<'_>,
    [sequence, start, head]: [usize; 3],
    [q, k]: [&[f32]; 2],
    v: &mut [f32],
    mixed: &mut [f32],
) {
    let &Work { x, key_dim, value_dim, .. } = work;
    let rows = v.len() / value_dim;
    let mut gates = [[0.0; 3]; CHUNK];
    for (t, gates) in gates[..rows].iter_mut().enumerate() {
        *gates = work.gates(sequence * x.rows + start + t, head);
    }
    let index = sequence * x.value_heads + head;
    let size = value_dim * key_dim;
    let from = &x.states[sequence][head * size..(head + 1) * size];
    // SAFETY: this head's state.
    let state = unsafe { work.state.at(index * size) };
    // Its rows are whole vectors.
    let past_caches = work.past_caches && state.addr().is_multiple_of(size_of::<L::V>());
    for first in (0..value_dim).step_by(OUT) {
        // SAFETY: four rows of the state, as D_v is a multiple of four, in the old state and in the new one, which is
        // this head's own.
        unsafe {
            let state = state.add(first * key_dim);
            let mut from = if start == 0 { from[first * key_dim..].as_ptr() } else { state };
            for (t, [_, decay, strength]) in gates[..rows].iter().enumerate() {
                let [q, k] = [q, k].map(|x| &x[t * key_dim..(t + 1) * key_dim]);
                let at = t * value_dim + first;
                let [v, mixed] = [&mut *v, &mut *mixed].map(|x| &mut x[at..at + OUT]);
                let gates = [*decay, *strength];
                if past_caches {
                    delta_rule::<L, true>((from, state), [q, k], v, mixed, gates);
                } else {
                    delta_rule::<L, false>((from, state), [q, k], v, mixed, gates);
                }
                from = state;
            }
        }
    }
    if past_caches {
        // SAFETY: promised by the caller.
        unsafe { L::fence() };
    }
    for (t, [log_decay, ..]) in gates[..rows].iter().enumerate() {
        let row = (sequence * x.rows + start + t) * x.value_heads + head;
        let [v, mixed] = [&*v, &*mixed].map(|x| &x[t * value_dim..(t + 1) * value_dim]);
        // SAFETY: writes and rows of y are those of this head.
        unsafe {
            if let Some([keys, corrections, log_decays]) = &work.writes {
                let (at, k) = (index * x.rows + start + t, &k[t * key_dim..]);
                keys.at(at * key_dim).copy_from_nonoverlapping(k.as_ptr(), key_dim);
                corrections.at(at * value_dim).copy_from_nonoverlapping(v.as_ptr(), value_dim);
                *log_decays.at(at) = *log_decay;
            }
            let factor = rms_factor::<L>(mixed, x.eps);
            let y = std::slice::from_raw_parts_mut(work.y.at(row * value_dim), value_dim);
            let gate = &x.z[row * value_dim..(row + 1) * value_dim];
            for (((y, x), weight), z) in y.iter_mut().zip(mixed).zip(x.norm).zip(gate) {
                *y = x * factor * weight * silu(*z);
            }
        }
    }
}

/// One row and four rows of the state [4, D_k]: read at `from`, they decay, are corrected towards `v` along k, and are
/// written at `to`, or past the caches. `mixed` is what q reads of the new ones; `v` becomes the correction.
///
/// # Safety
/// The processor has the instruction set. `from` and `to` are the same or do not overlap, and are valid for 4 D_k floats;
/// `to` is aligned to the vector if it is written past the caches. D_k is a multiple of the lanes, and `v` and `mixed` have
/// four floats.
#[inline(always)]
unsafe fn delta_rule<L: Lanes, const PAST_CACHES: bool>(
    (from, to): (*const f32, *mut f32),
    [q, k]: [&[f32]; 2],
    v: &mut [f32],
    mixed: &mut [f32],
    [decay, strength]: [f32; 2],
) {
    let width = k.len();
    // SAFETY: promised by the caller.
    unsafe {
        let from: [*const f32; OUT] = std::array::from_fn(|o| from.add(o * width));
        let to: [*mut f32; OUT] = std::array::from_fn(|o| to.add(o * width));
        let mut sums = [L::zero(); OUT];
        for i in (0..width).step_by(L::LANES) {
            let k = L::load(k.as_ptr().add(i));
            for (sum, row) in sums.iter_mut().zip(from) {
                *sum = L::fma(L::load(row.add(i)), k, *sum);
            }
        }
        let recalled = L::sum4(sums);
        for (v, recalled) in v.iter_mut().zip(recalled) {
            *v = strength * (*v - decay * recalled);
        }
        let corrections: [L::V; OUT] = std::array::from_fn(|o| L::splat(v[o]));
        let decay = L::splat(decay);
        let mut sums = [L::zero(); OUT];
        for i in (0..width).step_by(L::LANES) {
            let (k, q) = (L::load(k.as_ptr().add(i)), L::load(q.as_ptr().add(i)));
            for (o, (sum, correction)) in sums.iter_mut().zip(corrections).enumerate() {
                let decayed = L::fma(L::load(from[o].add(i)), decay, L::zero());
                let next = L::fma(correction, k, decayed);
                if PAST_CACHES {
                    L::store_past_caches(to[o].add(i), next);
                } else {
                    L::store(to[o].add(i), next);
                }
                *sum = L::fma(next, q, *sum);
            }
        }
        mixed.copy_from_slice(&L::sum4(sums));
    }
}

/// Rows of a sequence that wrote to a state.
#[derive(Debug, Clone, Copy)]
pub struct Replay<'a> {
    /// H_v
    pub heads: usize,
    /// [H_v, D_v, D_k], before the rows.
    pub state: &'a [f32],
    /// [H_v, T, D_k]
    pub k: &'a [f32],
    /// [H_v, T, D_v]
    pub correction: &'a [f32],
    /// [H_v, T]
    pub log_decay: &'a [f32],
    /// How many of the T rows are written.
    pub rows: usize,
}

/// Writes the first rows again. The bits of `state` [H_v, D_v, D_k] are those after a pass of these rows.
///
/// # Panics
/// If there is no kernel for the dimensions ([`GatedDelta::supports`]), or a slice has another length than its shape.
pub fn replay(writes: &Replay<'_>, state: &mut [f32]) {
    let &Replay { heads, rows, .. } = writes;
    let count = writes.log_decay.len() / heads;
    let (key_dim, value_dim) =
        (writes.k.len() / (heads * count), writes.correction.len() / (heads * count));
    assert!(GatedDelta::supports(key_dim, value_dim) && rows <= count);
    assert_eq!([writes.state.len(), state.len()], [heads * value_dim * key_dim; 2]);
    let (size, after) = (value_dim * key_dim, Output(state.as_mut_ptr()));
    let replay_head = |head: usize| {
        // SAFETY: each piece is its own head.
        let state = unsafe { std::slice::from_raw_parts_mut(after.at(head * size), size) };
        state.copy_from_slice(&writes.state[head * size..(head + 1) * size]);
        for row in head * count..head * count + rows {
            let k = &writes.k[row * key_dim..(row + 1) * key_dim];
            let correction = &writes.correction[row * value_dim..(row + 1) * value_dim];
            let decay = exp(writes.log_decay[row]);
            // SAFETY: `Isa::best` is what the processor has.
            unsafe {
                for_isa!(Isa::best(), write_row(
                    state: &mut [f32], k: &[f32], correction: &[f32], decay: f32
                ));
            }
        }
    };
    pool::run_if_large(rows * heads * size, heads, &replay_head);
}

/// As [`delta_rule`] writes a row to the state of a head.
///
/// # Safety
/// The processor has the instruction set; D_k is a multiple of the lanes.
#[inline(always)]
unsafe fn write_row<L: Lanes>(state: &mut [f32], k: &[f32], correction: &[f32], decay: f32) {
    // SAFETY: promised by the caller.
    unsafe {
        let decay = L::splat(decay);
        for (row, correction) in state.chunks_exact_mut(k.len()).zip(correction) {
            let correction = L::splat(*correction);
            for i in (0..k.len()).step_by(L::LANES) {
                let at = row.as_mut_ptr().add(i);
                let decayed = L::fma(L::load(at), decay, L::zero());
                L::store(at, L::fma(correction, L::load(k.as_ptr().add(i)), decayed));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers;

    /// Rows of each sequence: more than a chunk.
    const ROWS: usize = 70;

    /// Two sequences of rows with two key heads, four value heads of 8 and keys of 16; every result.
    fn run(from: usize, rows: usize, tail: &[f32], state: &[f32]) -> Vec<Vec<f32>> {
        let (channels, values) = (2 * 2 * 16 + 4 * 8, 4 * 8);
        // Rows `from..from + rows` of both sequences.
        let part = |seed, width: usize| -> Vec<f32> {
            let all = numbers(seed, 2 * ROWS * width);
            let own = |sequence: usize| &all[(sequence * ROWS + from) * width..][..rows * width];
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
            tails: &tail.chunks(tail.len() / 2).collect::<Vec<_>>(),
            states: &state.chunks(state.len() / 2).collect::<Vec<_>>(),
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

    /// Replays rows of the first of two sequences.
    #[test]
    fn replayed_rows_leave_the_bits_of_a_pass() {
        let (tail, state) = (numbers(20, 2 * 3 * 96), numbers(21, 2 * 4 * 8 * 16));
        let all = run(0, ROWS, &tail, &state);
        let [_, _, _, k, correction, log_decay] = &all[..] else { unreachable!("six results") };
        let half = |x: &Vec<f32>| x[..x.len() / 2].to_vec();
        let [before, k, correction, log_decay] = [&state, k, correction, log_decay].map(half);
        for rows in [0, 1, 3, 8, ROWS] {
            let mut after = vec![f32::NAN; before.len()];
            let writes = Replay {
                heads: 4,
                state: &before,
                k: &k,
                correction: &correction,
                log_decay: &log_decay,
                rows,
            };
            replay(&writes, &mut after);
            let expected =
                if rows == 0 { before.clone() } else { half(&run(0, rows, &tail, &state)[1]) };
            assert!(after == expected, "{rows} rows");
        }
    }

    /// All rows at once, and one after another: the same bits, state, tail and writes included.
    #[test]
    fn rows_together_equal_rows_alone() {
        let (tail, state) = (numbers(20, 2 * 3 * 96), numbers(21, 2 * 4 * 8 * 16));
        let together = run(0, ROWS, &tail, &state);
        assert!(together.iter().flatten().all(|x| x.is_finite()));
        let (mut tail, mut state) = (tail, state);
        for row in 0..ROWS {
            let alone = run(row, 1, &tail, &state);
            for sequence in 0..2 {
                let own = &together[0][(sequence * ROWS + row) * 32..][..32];
                assert_eq!(own, &alone[0][sequence * 32..][..32], "row {row}");
            }
            // Keys, corrections and decays: [sequences and value heads, rows, width].
            for (write, width) in [(3, 16), (4, 8), (5, 1)] {
                for head in 0..2 * 4 {
                    let own = &together[write][(head * ROWS + row) * width..][..width];
                    assert_eq!(own, &alone[write][head * width..][..width], "row {row}");
                }
            }
            (state, tail) = (alone[1].clone(), alone[2].clone());
        }
        assert_eq!([&state, &tail], [&together[1], &together[2]]);
    }

    /// A batch that is written past the caches, and each of its sequences alone: the same bits.
    #[test]
    fn states_written_past_the_caches_have_the_same_bits() {
        const DIM: usize = 128;
        const LINE: usize = 16;
        let (channels, state_size) = (3 * DIM, DIM * DIM);
        let batch = LARGE_STATES / (state_size * size_of::<f32>());
        let (qkv, z, gates) =
            (numbers(1, batch * channels), numbers(2, batch * DIM), numbers(3, batch));
        let (tails, states) = (numbers(4, batch * channels), numbers(5, batch * state_size));
        let (head, norm) = (numbers(6, 1), numbers(7, DIM));
        let taps: Vec<Vec<f32>> = (0..2).map(|tap| numbers(10 + tap, channels)).collect();
        let taps: Vec<&[f32]> = taps.iter().map(Vec::as_slice).collect();
        // y and states of the sequences `first..first + count`.
        let run = |first: usize, count: usize| {
            let part = |all: &[f32], width| all[first * width..][..count * width].to_vec();
            let (tails, states) = (part(&tails, channels), part(&states, state_size));
            let x = GatedDelta {
                key_heads: 1,
                value_heads: 1,
                rows: 1,
                eps: 1e-6,
                qkv: &part(&qkv, channels),
                z: &part(&z, DIM),
                b: &part(&gates, 1),
                a: &part(&gates, 1),
                tails: &tails.chunks(channels).collect::<Vec<_>>(),
                states: &states.chunks(state_size).collect::<Vec<_>>(),
                a_log: &head,
                dt_bias: &head,
                norm: &norm,
                taps: &taps,
            };
            let (mut y, mut tail) = (vec![f32::NAN; count * DIM], tails.clone());
            let mut buffer = vec![f32::NAN; count * state_size + LINE];
            let start = buffer.as_ptr().align_offset(LINE * size_of::<f32>());
            let state = &mut buffer[start..start + count * state_size];
            let mut results = GatedDeltaResults { y: &mut y, state, tail: &mut tail, writes: None };
            gated_delta(&x, &mut results);
            let state = results.state.to_vec();
            (y, state)
        };
        let (y, state) = run(0, batch);
        for sequence in 0..batch {
            let alone = run(sequence, 1);
            assert_eq!(y[sequence * DIM..][..DIM], alone.0, "{sequence}");
            let own = &state[sequence * state_size..][..state_size];
            assert!(own == alone.1, "{sequence}");
        }
    }
}
