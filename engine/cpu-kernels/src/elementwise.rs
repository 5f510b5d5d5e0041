//! SwiGLU and RMS norm.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use crate::lanes::{Isa, Lanes, for_isa};
use crate::pool;

/// Elements of one piece of the work: some microseconds.
const PIECE: usize = 1 << 14;

/// `exp(x)`, with an error of at most 2 units in the last place; results beyond the range of f32 are clamped to its
/// ends. Without branches and calls, so that loops over it are vectorized.
///
/// Source: the polynomial and the reduction of Cephes (`expf.c`).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// Adding and subtracting it rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.3, 88.3);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // x - n ln 2, with ln 2 in two parts.
    let r = (x - n * 0.693_359_4) + n * 2.121_944_4e-4;
    let mut p = 1.987_569_2e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let y = p * r * r + r + 1.0;
    // The last bits of `shifted` count n.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    y * f32::from_bits(exponent << 23)
}

/// `x / (1 + exp(-x))`
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Sum of the squares of `length` floats. Its order depends on the length only.
///
/// # Safety
/// The processor has the instruction set, and `x` is valid for `length` floats.
#[inline(always)]
pub unsafe fn squares<L: Lanes>(x: *const f32, length: usize) -> f32 {
    // SAFETY: promised by the caller; all offsets are below `length`.
    unsafe {
        let mut sums = [L::zero(); 4];
        let step = 4 * L::LANES;
        let whole = length / step * step;
        for i in (0..whole).step_by(step) {
            for (part, sum) in sums.iter_mut().enumerate() {
                let v = L::load(x.add(i + part * L::LANES));
                *sum = L::fma(v, v, *sum);
            }
        }
        let mut total: f32 = L::sum4(sums).iter().sum();
        for i in whole..length {
            total += *x.add(i) * *x.add(i);
        }
        total
    }
}

/// The factor by which an RMS norm multiplies `x`.
///
/// # Safety
/// The processor has the instruction set.
#[inline(always)]
pub unsafe fn rms_factor<L: Lanes>(x: &[f32], eps: f32) -> f32 {
    // SAFETY: promised by the caller; the slice is valid for its length.
    let total = unsafe { squares::<L>(x.as_ptr(), x.len()) };
    1.0 / (total / x.len() as f32 + eps).sqrt()
}

/// `silu(gate) * up`, element by element.
///
/// # Panics
/// If the slices have different lengths.
pub fn swiglu(gate: &[f32], up: &[f32], y: &mut [f32]) {
    assert!(gate.len() == y.len() && up.len() == y.len());
    let (length, y) = (y.len(), Output(y.as_mut_ptr()));
    pool::run(length.div_ceil(PIECE), &|piece| {
        let start = piece * PIECE;
        let count = PIECE.min(length - start);
        let (gate, up) = (gate[start..].as_ptr(), up[start..].as_ptr());
        // SAFETY: the piece is its own part of each slice; `Isa::best` is what the processor has.
        unsafe {
            let y = y.at(start);
            for_isa!(Isa::best(), swiglu_piece(gate: *const f32, up: *const f32, y: *mut f32, count: usize));
        }
    });
}

#[inline(always)]
unsafe fn swiglu_piece<L: Lanes>(gate: *const f32, up: *const f32, y: *mut f32, count: usize) {
    // SAFETY: the caller's pointers are valid for `count` floats, and `y` overlaps nothing.
    unsafe {
        let gate = std::slice::from_raw_parts(gate, count);
        let up = std::slice::from_raw_parts(up, count);
        let y = std::slice::from_raw_parts_mut(y, count);
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            *y = silu(*gate) * up;
        }
    }
}

/// A norm by the root mean square.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// Factor of each dimension.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// `x / sqrt(mean(x^2) + eps) * weight` for each row of as many floats as `weight` has.
///
/// # Panics
/// If `x` is not whole rows, or `y` has another length.
pub fn rms_norm(x: &[f32], Norm { weight, eps }: Norm<'_>, y: &mut [f32]) {
    let width = weight.len();
    assert!(width > 0 && x.len().is_multiple_of(width) && x.len() == y.len());
    let (rows, y) = (x.len() / width, Output(y.as_mut_ptr()));
    let at_a_time = PIECE.div_ceil(width);
    pool::run(rows.div_ceil(at_a_time), &|piece| {
        let start = piece * at_a_time;
        let count = at_a_time.min(rows - start);
        let (x, weight) = (x[start * width..].as_ptr(), weight.as_ptr());
        // SAFETY: the piece is its own rows of both; `Isa::best` is what the processor has.
        unsafe {
            let y = y.at(start * width);
            for_isa!(Isa::best(), norm_rows(
                x: *const f32, weight: *const f32, eps: f32, y: *mut f32, count: usize, width: usize
            ));
        }
    });
}

#[inline(always)]
unsafe fn norm_rows<L: Lanes>(
    x: *const f32,
    weight: *const f32,
    eps: f32,
    y: *mut f32,
    count: usize,
    width: usize,
) {
    // SAFETY: the caller's pointers are valid for `count` rows, and for one of the weight; `y` overlaps nothing.
    unsafe {
        let weight = std::slice::from_raw_parts(weight, width);
        for row in 0..count {
            let x = std::slice::from_raw_parts(x.add(row * width), width);
            let y = std::slice::from_raw_parts_mut(y.add(row * width), width);
            let factor = rms_factor::<L>(x, eps);
            for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                *y = x * factor * weight;
            }
        }
    }
}

/// A slice whose parts are written by pieces of the work, each its own.
pub struct Output(pub *mut f32);

// SAFETY: pieces write disjoint parts, as each use states.
unsafe impl Sync for Output {}

impl Output {
    /// # Safety
    /// `offset` is within the slice.
    pub unsafe fn at(&self, offset: usize) -> *mut f32 {
        // SAFETY: promised by the caller.
        unsafe { self.0.add(offset) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exact_to_two_units_in_the_last_place() {
        for i in -8_700..8_830 {
            let x = i as f32 / 100.0 + 0.003;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) / exact - 1.0).abs();
            assert!(error < 2.0 * f64::from(f32::EPSILON), "{x}: {error:e}");
        }
        assert!(exp(-1e9) >= 0.0 && exp(-1e9) < 1e-37 && exp(1e9).is_finite());
        assert!(silu(-1e9).abs() < 1e-28 && silu(1e9) == 1e9);
    }

    #[test]
    fn swiglu_and_norm_equal_their_formulas() {
        for width in [1, 7, 64, 100, 4096, 40_000] {
            let x: Vec<f32> =
                (0..3 * width).map(|i| ((i * 37) % 101) as f32 / 20.0 - 2.5).collect();
            let up: Vec<f32> = x.iter().rev().copied().collect();
            let mut y = vec![0.0; x.len()];
            swiglu(&x, &up, &mut y);
            for ((y, x), up) in y.iter().zip(&x).zip(&up) {
                let exact = f64::from(*x) / (1.0 + (-f64::from(*x)).exp()) * f64::from(*up);
                assert!((f64::from(*y) - exact).abs() < 1e-5, "{width}");
            }
            let weight = &up[..width];
            rms_norm(&x, Norm { weight, eps: 1e-6 }, &mut y);
            for (x, y) in x.chunks(width).zip(y.chunks(width)) {
                let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
                for ((x, y), weight) in x.iter().zip(y).zip(weight) {
                    let exact = f64::from(*x) / (mean + 1e-6).sqrt() * f64::from(*weight);
                    assert!((f64::from(*y) - exact).abs() < 1e-5, "{width}");
                }
            }
        }
    }
}
