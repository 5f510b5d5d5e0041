//! What sampling computes over a whole vocabulary: random bits, and sums of exponentials.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use crate::elementwise::exp;
use crate::lanes::{Isa, Lanes, for_isa};

/// Rotations of Threefry-2x32, four rounds each.
const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];

/// Numbers that are summed at the same time, in vectors.
const SUMS: usize = 16;

/// Threefry-2x32 with 20 rounds.
///
/// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#[inline(always)]
fn threefry(key: u64, counter: [u32; 2]) -> [u32; 2] {
    let (high, low) = ((key >> 32) as u32, key as u32);
    let keys = [high, low, 0x1BD1_1BDA ^ high ^ low];
    let [mut x, mut y] = [counter[0].wrapping_add(keys[0]), counter[1].wrapping_add(keys[1])];
    for group in 0..5 {
        for rotation in ROTATIONS[group % 2] {
            x = x.wrapping_add(y);
            y = y.rotate_left(rotation) ^ x;
        }
        x = x.wrapping_add(keys[(group + 1) % 3]);
        y = y.wrapping_add(keys[(group + 2) % 3]).wrapping_add(group as u32 + 1);
    }
    [x, y]
}

/// Random bits of a key, a number for each column: those of MLX's `random::bits` for this key and as many columns.
///
/// # Panics
/// If there are more columns than 2^32.
pub fn random_bits(key: u64, bits: &mut [u32]) {
    assert!(u32::try_from(bits.len()).is_ok(), "columns are numbered in 32 bits");
    let (columns, length) = (bits.as_mut_ptr(), bits.len());
    // SAFETY: the pointer is that of the slice; `Isa::best` is what the processor has.
    unsafe { for_isa!(Isa::best(), fill(key: u64, columns: *mut u32, length: usize)) };
}

#[inline(always)]
unsafe fn fill<L: Lanes>(key: u64, columns: *mut u32, length: usize) {
    // SAFETY: promised by the caller.
    let columns = unsafe { std::slice::from_raw_parts_mut(columns, length) };
    let (half, second) = (length / 2, length.div_ceil(2));
    let (firsts, seconds) = columns.split_at_mut(second);
    for (i, (a, b)) in firsts.iter_mut().zip(seconds).enumerate() {
        [*a, *b] = threefry(key, [i as u32, (second + i) as u32]);
    }
    if half < second {
        [firsts[half], _] = threefry(key, [half as u32, 0]);
    }
}

/// The number of one column of [`random_bits`].
pub fn random_bits_at(key: u64, columns: usize, column: usize) -> u32 {
    let (half, second) = (columns / 2, columns.div_ceil(2));
    let counter = |i: usize| [i as u32, if i < half { (second + i) as u32 } else { 0 }];
    if column < second {
        threefry(key, counter(column))[0]
    } else {
        threefry(key, counter(column - second))[1]
    }
}

/// The sum of `exp(x / divisor - most)` over all `x`.
pub fn sum_exp(x: &[f32], divisor: f32, most: f32) -> f64 {
    let (from, length, mut sum) = (x.as_ptr(), x.len(), 0.0);
    let to: *mut f64 = &raw mut sum;
    // SAFETY: the pointers are those of the slice and of `sum`; `Isa::best` is what the processor has.
    unsafe {
        for_isa!(Isa::best(), add_exp(from: *const f32, length: usize, divisor: f32, most: f32, to: *mut f64));
    };
    sum
}

#[inline(always)]
unsafe fn add_exp<L: Lanes>(
    from: *const f32,
    length: usize,
    divisor: f32,
    most: f32,
    to: *mut f64,
) {
    // SAFETY: promised by the caller.
    let x = unsafe { std::slice::from_raw_parts(from, length) };
    let (chunks, rest) = x.as_chunks::<SUMS>();
    let mut total = 0.0;
    // Sums of few numbers in f32, so that the last one is still added exactly enough.
    for chunks in chunks.chunks(64) {
        let mut sums = [0.0f32; SUMS];
        for chunk in chunks {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum += exp(x / divisor - most);
            }
        }
        total += sums.iter().map(|sum| f64::from(*sum)).sum::<f64>();
    }
    total += rest.iter().map(|x| f64::from(exp(x / divisor - most))).sum::<f64>();
    // SAFETY: promised by the caller.
    unsafe { *to = total };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_column_has_the_bits_of_all() {
        for length in [1, 2, 3, 7, 64, 1001] {
            let mut all = vec![0; length];
            random_bits(0x0123_4567_89AB_CDEF, &mut all);
            let each = (0..length).map(|i| random_bits_at(0x0123_4567_89AB_CDEF, length, i));
            assert!(each.eq(all.iter().copied()), "{length} columns");
        }
    }

    /// A known answer of Random123's `kat_vectors`.
    #[test]
    fn bits_are_those_of_threefry() {
        assert_eq!(threefry(0, [0, 0]), [0x6b20_0159, 0x99ba_4efe]);
        assert_eq!(threefry(u64::MAX, [u32::MAX; 2]), [0x1cb9_96fc, 0xbb00_2be7]);
    }

    #[test]
    fn sums_are_those_of_f64() {
        for length in [0, 1, 15, 16, 2000, 5003] {
            let x: Vec<f32> = crate::numbers(3, length).iter().map(|x| 20.0 * x).collect();
            let expected: f64 = x.iter().map(|x| (f64::from(*x) / 0.7 - 28.0).exp()).sum();
            let found = sum_exp(&x, 0.7, 28.0);
            assert!((found - expected).abs() <= 3e-6 * expected, "{length}: {found} {expected}");
        }
        // What cannot be sampled adds nothing.
        assert!((sum_exp(&[f32::NEG_INFINITY, 1.0], 1.0, 1.0) - 1.0).abs() < 1e-6);
    }
}
