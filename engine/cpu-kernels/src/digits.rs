//! Products with packed matrices in integers, with AVX-512 VNNI.
//!
//! Each group of a row of x has a scale, its largest magnitude over [`largest`], and elements rounded to multiples of it. A
//! multiple is one or three signed digits of 8 bits. An instruction multiplies 64 digits with 64 elements of the matrix and adds
//! each four products, so that a lane has the sum of a word's elements, without a rounding; the sums of the digits are joined in
//! integers. Times the scales of x and of the matrix, a word's sum is added to its lane in f32. Biases are multiplied with the
//! sums of the groups of x.
//!
//! With one digit, an element of x is off by up to 1/254 of the largest of its group ([`Activations::Int8`]). With three it is
//! off by 2^-24 of it, as that one is when it is rounded to f32 ([`Activations::Exact`]), and there are fewer roundings than in
//! a sum in f32. For one row this takes about half the instructions: elements need not be converted one by one.
//!
//! A *block* is 16 words. For each, a row of x has its digits, the highest first; each has 64 bytes for each element of a byte
//! of the matrix, the lowest bits first. Scales and sums of the span's groups follow, in whole vectors.
//!
//! [`Activations::Int8`]: crate::Activations::Int8
//! [`Activations::Exact`]: crate::Activations::Exact

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use std::arch::x86_64::*;

use crate::float::Floats;
use crate::kernel::{AHEAD, OUT, SPAN, Strip, TILE, biases_of, unroll};
use crate::lanes::avx512::{Avx512, first_lanes};
use crate::lanes::{Lanes, prefetch};
use crate::product::Biases;

/// Words of a block, and groups whose scales are read together: lanes of a vector.
const LANES: usize = 16;

/// A vector of integers for each row of the matrix.
type Quad = [__m512i; OUT];

/// The largest multiple: 127 in the highest digit, as one more in it would not fit 8 bits.
const fn largest(digits: usize) -> f32 {
    (127 << (8 * (digits - 1))) as f32
}

/// Elements of a byte of the matrix.
const fn in_byte(bits: usize) -> usize {
    8 / bits
}

/// Columns of a block.
const fn block_columns(bits: usize) -> usize {
    LANES * 32 / bits
}

/// Floats that a block of a row of x takes.
const fn block_floats(digits: usize, bits: usize) -> usize {
    LANES * digits * in_byte(bits)
}

/// Floats of a span of a row of x.
pub fn floats<const DIGITS: usize, const BITS: usize, const GROUP: usize>(columns: usize) -> usize {
    let blocks = columns.div_ceil(block_columns(BITS));
    blocks * block_floats(DIGITS, BITS) + 2 * biases_of(columns / GROUP)
}

/// See [`Kernels::arrange`](crate::kernel::Kernels::arrange).
///
/// # Safety
/// See [`Kernels`](crate::kernel::Kernels).
#[inline(always)]
pub unsafe fn arrange<const DIGITS: usize, const BITS: usize, const GROUP: usize>(
    from: *const f32,
    to: *mut f32,
    count: usize,
) {
    let blocks = count.div_ceil(block_columns(BITS));
    let room = biases_of(count / GROUP);
    // SAFETY: promised by the caller: `to` has room for the blocks, and for scales and sums after them.
    let (from, scales, sums) = unsafe {
        let scales = to.add(blocks * block_floats(DIGITS, BITS));
        (
            std::slice::from_raw_parts(from, count),
            std::slice::from_raw_parts_mut(scales, room),
            std::slice::from_raw_parts_mut(scales.add(room), room),
        )
    };
    scales.fill(0.0);
    sums.fill(0.0);
    let mut digits = [[0i8; SPAN]; DIGITS];
    for (g, from) in from.chunks_exact(GROUP).enumerate() {
        // SAFETY: the processor has the instructions; a group is whole vectors, in `from` and in `digits`.
        unsafe {
            let load = from.as_ptr();
            // Magnitudes have the order of their bits.
            let mut most = _mm512_setzero_si512();
            for at in (0..GROUP).step_by(LANES) {
                let x = _mm512_castps_si512(_mm512_abs_ps(Avx512::load(load.add(at))));
                most = _mm512_max_epu32(most, x);
            }
            let scale = scale_of(f32::from_bits(_mm512_reduce_max_epu32(most)), largest(DIGITS));
            let (inverse, bound) = (Avx512::splat(1.0 / scale), Avx512::splat(largest(DIGITS)));
            let mut sum = _mm512_setzero_si512();
            for at in (0..GROUP).step_by(LANES) {
                let x = _mm512_mul_ps(Avx512::load(load.add(at)), inverse);
                // The second operand stands in for a NaN.
                let x = _mm512_max_ps(x, _mm512_sub_ps(Avx512::zero(), bound));
                // Rounds to the nearest, and of two to the even one.
                let mut multiple = _mm512_cvtps_epi32(_mm512_min_ps(x, bound));
                sum = _mm512_add_epi32(sum, multiple);
                for digits in digits.iter_mut().rev() {
                    let to = digits.as_mut_ptr().add(g * GROUP + at);
                    _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(multiple));
                    let digit = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(multiple));
                    multiple = _mm512_srai_epi32::<8>(_mm512_sub_epi32(multiple, digit));
                }
            }
            scales[g] = scale;
            sums[g] = scale * _mm512_reduce_add_epi32(sum) as f32;
        }
    }
    let mut to = to.cast::<__m512i>();
    for block in 0..blocks {
        for digits in &digits {
            // SAFETY: a block is in `digits`, and there is room for it.
            unsafe {
                let from = digits.as_ptr().add(block * block_columns(BITS)).cast::<__m512i>();
                let first = _mm512_loadu_si512(from);
                if BITS == 8 {
                    _mm512_storeu_si512(to, first);
                } else {
                    // Even columns are in the lower bits of a byte of the matrix, odd ones in the higher.
                    let second = _mm512_loadu_si512(from.add(1));
                    _mm512_storeu_si512(to, low_bytes(first, second));
                    let [first, second] =
                        [_mm512_srli_epi16::<8>(first), _mm512_srli_epi16::<8>(second)];
                    _mm512_storeu_si512(to.add(1), low_bytes(first, second));
                }
                to = to.add(in_byte(BITS));
            }
        }
    }
}

/// The lower byte of each 16 bits of two vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn low_bytes(first: __m512i, second: __m512i) -> __m512i {
    let first = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(first));
    _mm512_inserti64x4::<1>(first, _mm512_cvtepi16_epi8(second))
}

/// The scale of a group whose largest magnitude is `most`, so that it becomes at most `largest`.
fn scale_of(most: f32, largest: f32) -> f32 {
    // Rounding would hide a number that is not finite. A smaller scale would have no inverse.
    if most.is_finite() { (most / largest).max(f32::MIN_POSITIVE) } else { f32::NAN }
}

/// See [`Form::Strips`](crate::kernel::Form::Strips).
///
/// # Safety
/// See [`Kernels`](crate::kernel::Kernels); the strip has scales.
#[inline(always)]
pub unsafe fn product<
    const DIGITS: usize,
    const BITS: usize,
    const GROUP: usize,
    const R: usize,
>(
    x: *const f32,
    stride: usize,
    strip: &Strip<'_>,
    sums: *mut f32,
) {
    let Strip { columns, outputs, scales: Some(packed), .. } = strip else {
        unreachable!("a packed matrix has scales");
    };
    let words = columns * BITS / 32;
    let blocks = columns.div_ceil(block_columns(BITS));
    let blocks_of_groups = LANES * GROUP / block_columns(BITS);
    let floats = block_floats(DIGITS, BITS);
    // SAFETY: all words are in the strip, and x has whole blocks. Scales and sums of x have whole vectors.
    unsafe {
        let x_scales = x.add(blocks * floats);
        let x_sums = x_scales.add(biases_of(packed.count));
        let zero = -f32::exp2(BITS as f32 - 1.0);
        let bias_unit =
            _mm512_set1_ps(if matches!(packed.biases, Biases::Symmetric) { zero } else { 1.0 });
        for n in (0..*outputs).step_by(OUT) {
            let rows = strip.quad(n);
            let lines = strip.lines(rows);
            let mut totals = [[Avx512::zero(); OUT]; R];
            for first_group in (0..packed.count).step_by(LANES) {
                let mut factors = [[Avx512::zero(); OUT]; R];
                unroll!(O < OUT, {
                    let group = packed.first + rows[O] * packed.of_row + first_group;
                    packed.prefetch(group + AHEAD * packed.of_row);
                    let count = packed.count - first_group;
                    let scales = read(&packed.scales, group, count);
                    let biases = match &packed.biases {
                        Biases::Stored(biases) => read(biases, group, count),
                        Biases::Symmetric => scales,
                    };
                    unroll!(I < R, {
                        let at = I * stride + first_group;
                        factors[I][O] = _mm512_mul_ps(scales, Avx512::load(x_scales.add(at)));
                        let x_sums = _mm512_mul_ps(bias_unit, Avx512::load(x_sums.add(at)));
                        totals[I][O] = Avx512::fma(biases, x_sums, totals[I][O]);
                    });
                });
                let first = first_group * GROUP / block_columns(BITS);
                for block in first..blocks.min(first + blocks_of_groups) {
                    let elements = unpack::<BITS>(&lines, block, words, strip.ahead());
                    let groups = groups_of_lanes::<BITS, GROUP>(block - first);
                    unroll!(I < R, {
                        let digits = x.add(I * stride + block * floats).cast();
                        let sums = words_product::<DIGITS, BITS>(&elements, digits);
                        unroll!(O < OUT, {
                            let factor = _mm512_permutexvar_ps(groups, factors[I][O]);
                            totals[I][O] = Avx512::fma(sums[O], factor, totals[I][O]);
                        });
                    });
                }
            }
            unroll!(I < R, {
                let sums = &mut *sums.add(I * TILE + n).cast::<[f32; OUT]>();
                for (sum, total) in sums.iter_mut().zip(Avx512::sum4(totals[I])) {
                    *sum += total;
                }
            });
        }
    }
}

/// Up to 16 floats, `count` if that is less, and zeros.
///
/// # Safety
/// There are as many from `at` on; the processor has AVX-512.
#[inline(always)]
unsafe fn read(floats: &Floats<'_>, at: usize, count: usize) -> __m512 {
    let lanes = first_lanes(count);
    // SAFETY: promised by the caller.
    unsafe {
        match floats {
            Floats::F32(floats) => _mm512_maskz_loadu_ps(lanes, floats.as_ptr().add(at)),
            Floats::Bf16(floats) => {
                let short = _mm256_maskz_loadu_epi16(lanes, floats.as_ptr().add(at).cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(short)))
            }
            Floats::F16(floats) => {
                _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, floats.as_ptr().add(at).cast()))
            }
        }
    }
}

/// The group of each lane's word in a block, counted from the first of the 16 that contain block 0.
#[inline]
#[target_feature(enable = "avx512f")]
fn groups_of_lanes<const BITS: usize, const GROUP: usize>(block: usize) -> __m512i {
    let shift = const { (GROUP * BITS / 32).ilog2() };
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let words = _mm512_add_epi32(lanes, _mm512_set1_epi32((block * LANES) as i32));
    _mm512_srl_epi32(words, _mm_cvtsi32_si128(shift as i32))
}

/// The elements of a block of four rows of `words` words, as bytes: with 4 bits the lower ones of each byte and the higher
/// ones. Prefetches what is `ahead` bytes ahead.
///
/// # Safety
/// The lines have the words; the processor has AVX-512.
#[inline(always)]
unsafe fn unpack<const BITS: usize>(
    lines: &[*const u8; OUT],
    block: usize,
    words: usize,
    ahead: usize,
) -> [Quad; 2] {
    let first = block * LANES;
    // SAFETY: promised by the caller.
    unsafe {
        let mut elements = [[_mm512_setzero_si512(); OUT]; 2];
        unroll!(O < OUT, {
            let line = lines[O].wrapping_add(4 * first);
            prefetch(line.wrapping_add(ahead));
            let words = if first + LANES <= words {
                Avx512::load_words(line)
            } else {
                Avx512::load_first_words(line, words - first)
            };
            if BITS == 8 {
                elements[0][O] = words;
            } else {
                let mask = _mm512_set1_epi8(15);
                elements[0][O] = _mm512_and_si512(words, mask);
                elements[1][O] = _mm512_and_si512(_mm512_srli_epi16::<4>(words), mask);
            }
        });
        elements
    }
}

/// Sums of the products of each word's elements with multiples of x.
///
/// The steps of the four rows are next to each other, so that they are computed at the same time.
///
/// # Safety
/// `digits` is a block of x; the processor has AVX-512 VNNI.
#[inline(always)]
unsafe fn words_product<const DIGITS: usize, const BITS: usize>(
    elements: &[Quad; 2],
    digits: *const __m512i,
) -> [__m512; OUT] {
    // SAFETY: promised by the caller.
    unsafe {
        let zero = [_mm512_setzero_si512(); OUT];
        let mut high = add::<BITS>(zero, elements, digits);
        if DIGITS == 1 {
            return converted(high);
        }
        let (middle, low) = (digits.add(in_byte(BITS)), digits.add(2 * in_byte(BITS)));
        unroll!(O < OUT, {
            high[O] = _mm512_slli_epi32::<8>(high[O]);
        });
        high = add::<BITS>(high, elements, middle);
        if BITS == 4 {
            // Sums of 8 products are below 8 * 15 * 2^23 < 2^30.
            unroll!(O < OUT, {
                high[O] = _mm512_slli_epi32::<8>(high[O]);
            });
            return converted(add::<BITS>(high, elements, low));
        }
        // Sums with elements of 8 bits would not fit an integer.
        let (high, mut sums) = (converted(high), converted(add::<BITS>(zero, elements, low)));
        unroll!(O < OUT, {
            sums[O] = Avx512::fma(high[O], Avx512::splat(256.0), sums[O]);
        });
        sums
    }
}

/// Adds the products of elements with a digit of x.
///
/// # Safety
/// As [`words_product`].
#[inline(always)]
unsafe fn add<const BITS: usize>(
    mut sums: Quad,
    elements: &[Quad; 2],
    digits: *const __m512i,
) -> Quad {
    // SAFETY: promised by the caller.
    unsafe {
        unroll!(I in [0 1], in_byte(BITS), {
            let digits = _mm512_loadu_si512(digits.add(I));
            unroll!(O < OUT, {
                sums[O] = _mm512_dpbusd_epi32(sums[O], elements[I][O], digits);
            });
        });
        sums
    }
}

/// The integers as floats.
#[inline]
#[target_feature(enable = "avx512f")]
fn converted(integers: Quad) -> [__m512; OUT] {
    let mut floats = [_mm512_setzero_ps(); OUT];
    unroll!(O < OUT, {
        floats[O] = _mm512_cvtepi32_ps(integers[O]);
    });
    floats
}
