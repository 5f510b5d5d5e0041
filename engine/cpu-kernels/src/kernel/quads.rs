//! Products of four rows of a matrix, whose elements become f32 in registers.
//!
//! Products of a word's elements are summed up in one lane, and their sum is multiplied with the scale: an element then costs
//! one product. Biases are multiplied with the sums of the groups of x, which end its span.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use half::{bf16, f16};

use super::{Groups, OUT, Quad, SPAN, biases_of, unroll};
use crate::float::Floats;
use crate::lanes::{BLOCK, Lanes, prefetch, unit};
use crate::product::Biases;

/// Columns of whole blocks.
pub const fn padded<L: Lanes, const BITS: usize>(columns: usize) -> usize {
    columns.next_multiple_of(L::LANES * 32 / BITS)
}

/// See [`Kernels::arrange`](super::Kernels::arrange).
///
/// # Safety
/// See [`Kernels`](super::Kernels).
#[inline(always)]
pub unsafe fn arrange<L: Lanes, const BITS: usize, const GROUP: usize>(
    from: *const f32,
    to: *mut f32,
    count: usize,
) {
    let (elements, columns) = (32 / BITS, padded::<L, BITS>(count));
    // SAFETY: `to` has room for whole blocks, a sum of each group, and zeros.
    unsafe {
        // Lanes without a word are in each vector of the last block.
        let block = L::LANES * elements;
        to.add(count / block * block).write_bytes(0, columns - count / block * block);
        for word in 0..count / elements {
            let to = to.add(word / L::LANES * block + word % L::LANES);
            for i in 0..elements {
                *to.add(i * L::LANES) = *from.add(word * elements + i) / unit::<BITS>(i);
            }
        }
        let (ones, sums, groups) = (L::splat(1.0), to.add(columns), count / GROUP);
        for g in 0..groups {
            let mut sum = L::zero();
            for at in (0..GROUP).step_by(L::LANES) {
                sum = L::fma(L::load(from.add(g * GROUP + at)), ones, sum);
            }
            let [sum, ..] = L::sum4([sum, L::zero(), L::zero(), L::zero()]);
            *sums.add(g) = sum;
        }
        sums.add(groups).write_bytes(0, biases_of(groups) - groups);
    }
}

/// See [`ReadGroups`](super::ReadGroups).
///
/// # Safety
/// See [`Kernels`](super::Kernels); scales and stored biases have `count` elements from each of `at` on.
#[inline(always)]
pub unsafe fn groups<L: Lanes, const BITS: usize>(
    scales: &Floats<'_>,
    biases: &Biases<'_>,
    at: &[usize; OUT],
    count: usize,
    to: &mut Groups,
) {
    // SAFETY: promised by the caller; both arrays of a row have whole vectors.
    unsafe {
        groups_of_rows::<L>(scales, at, count, &mut to.scales);
        match biases {
            Biases::Stored(biases) => {
                groups_of_rows::<L>(biases, at, count, &mut to.biases);
            }
            Biases::Symmetric => {
                let factor = L::splat(-((1 << (BITS - 1)) as f32));
                for (scales, biases) in to.scales.iter().zip(&mut to.biases) {
                    let mut i = 0;
                    while i < SPAN / 32 {
                        let bias = L::fma(L::load(scales.as_ptr().add(i)), factor, L::zero());
                        L::store(biases.as_mut_ptr().add(i), bias);
                        i += L::LANES;
                    }
                }
            }
        }
    }
}

/// Reads scales or biases of four rows.
///
/// # Safety
/// As [`groups`].
#[inline(always)]
unsafe fn groups_of_rows<L: Lanes>(
    from: &Floats<'_>,
    at: &[usize; OUT],
    count: usize,
    to: &mut [[f32; SPAN / 32]; OUT],
) {
    for (at, to) in at.iter().zip(to) {
        // SAFETY: promised by the caller.
        unsafe {
            match from {
                Floats::F32(floats) => groups_of_row::<L, _>(&floats[*at..], count, to),
                Floats::Bf16(floats) => groups_of_row::<L, _>(&floats[*at..], count, to),
                Floats::F16(floats) => groups_of_row::<L, _>(&floats[*at..], count, to),
            }
        }
    }
}

/// Writes the first `count` floats as f32, and zeros after them, for kernels that read whole vectors.
///
/// Reads whole vectors where enough floats follow, also of the next rows: a loop over the remainder of each row takes almost
/// half as long as the row's product. The number of vectors is constant, so that the compiler unrolls the loop: one that ends
/// with `count` makes the product 7 % slower.
///
/// # Safety
/// See [`Lanes`]; `count` is at most the length of `from` and of `to`.
#[inline(always)]
unsafe fn groups_of_row<L: Lanes, F: Float>(from: &[F], count: usize, to: &mut [f32; SPAN / 32]) {
    let mut i = 0;
    while i < SPAN / 32 {
        // SAFETY: whole vectors are in the floats, or in a copy of the last ones, and in `to`.
        unsafe {
            let v = if i + L::LANES <= from.len() {
                F::load::<L>(from.as_ptr().add(i))
            } else {
                let mut rest = [F::ZERO; BLOCK];
                let left = from.get(i..).unwrap_or_default();
                rest[..left.len()].copy_from_slice(left);
                F::load::<L>(rest.as_ptr())
            };
            L::store(to.as_mut_ptr().add(i), L::first(v, count.saturating_sub(i)));
        }
        i += L::LANES;
    }
}

/// See [`Form::Quads`](super::Form::Quads).
///
/// # Safety
/// See [`Kernels`](super::Kernels).
#[inline(always)]
pub unsafe fn packed_product<L: Lanes, const BITS: usize, const GROUP: usize, const R: usize>(
    x: *const f32,
    stride: usize,
    quad: &Quad<'_>,
    parts: *mut [f32; OUT],
) {
    let Quad { columns, lines: [a, b, c, d], groups, count, ahead } = *quad;
    let elements = 32 / BITS;
    let words = columns / elements;
    // Groups of a block of words.
    let spread = (L::LANES * elements / GROUP).max(1);
    // SAFETY: all words are in the span, and x has whole blocks. Scales and biases have whole vectors.
    unsafe {
        let mut sums = [[L::zero(); OUT]; R];
        let mut first = 0;
        while first < words {
            let lines = [a, b, c, d].map(|line| line.wrapping_add(4 * first));
            unroll!(O < OUT, {
                prefetch(lines[O].wrapping_add(ahead));
            });
            let block = if first + L::LANES <= words {
                lines.map(|line| L::load_words(line))
            } else {
                lines.map(|line| L::load_first_words(line, words - first))
            };
            let mut products = [[L::zero(); OUT]; R];
            unroll!(E < 32 / BITS, {
                let mut rows = [L::zero(); R];
                unroll!(I < R, {
                    rows[I] = L::load(x.add(I * stride + first * elements + E * L::LANES));
                });
                unroll!(O < OUT, {
                    let element = L::element::<BITS>(block[O], E);
                    unroll!(I < R, {
                        products[I][O] = L::fma(element, rows[I], products[I][O]);
                    });
                });
            });
            let group = first * elements / GROUP;
            unroll!(O < OUT, {
                let scales = L::spread(groups.scales[O].as_ptr().add(group), spread);
                unroll!(I < R, {
                    sums[I][O] = L::fma(products[I][O], scales, sums[I][O]);
                });
            });
            first += L::LANES;
        }
        let x = x.add(padded::<L, BITS>(columns));
        let mut g = 0;
        while g < biases_of(count) {
            unroll!(O < OUT, {
                let biases = L::load(groups.biases[O].as_ptr().add(g));
                unroll!(I < R, {
                    sums[I][O] = L::fma(biases, L::load(x.add(I * stride + g)), sums[I][O]);
                });
            });
            g += L::LANES;
        }
        unroll!(I < R, {
            parts.add(I).write(L::sum4(sums[I]));
        });
    }
}

/// A type of floats in memory.
pub trait Float: Copy {
    const ZERO: Self;
    /// A vector of them.
    ///
    /// # Safety
    /// As [`Lanes::load`].
    unsafe fn load<L: Lanes>(from: *const Self) -> L::V;
}

impl Float for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L::V {
        // SAFETY: promised by the caller.
        unsafe { L::load(from) }
    }
}

impl Float for bf16 {
    const ZERO: Self = Self::from_bits(0);

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L::V {
        // SAFETY: promised by the caller.
        unsafe { L::load_bf16(from.cast()) }
    }
}

impl Float for f16 {
    const ZERO: Self = Self::from_bits(0);

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const Self) -> L::V {
        // SAFETY: promised by the caller.
        unsafe { L::load_f16(from.cast()) }
    }
}

/// See [`Form::Quads`](super::Form::Quads).
///
/// # Safety
/// See [`Kernels`](super::Kernels); lines begin at floats of the type.
#[inline(always)]
pub unsafe fn float_product<L: Lanes, F: Float, const R: usize>(
    x: *const f32,
    stride: usize,
    quad: &Quad<'_>,
    parts: *mut [f32; OUT],
) {
    let lines = quad.lines.map(|line| line.cast::<F>());
    // SAFETY: a span is whole vectors.
    unsafe {
        let mut sums = [[L::zero(); OUT]; R];
        let mut v = 0;
        while v < quad.columns {
            let mut rows = [L::zero(); R];
            unroll!(I < R, {
                rows[I] = L::load(x.add(I * stride + v));
            });
            unroll!(O < OUT, {
                let floats = F::load::<L>(lines[O].add(v));
                unroll!(I < R, {
                    sums[I][O] = L::fma(floats, rows[I], sums[I][O]);
                });
            });
            v += L::LANES;
        }
        unroll!(I < R, {
            parts.add(I).write(L::sum4(sums[I]));
        });
    }
}
