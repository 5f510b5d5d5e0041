//! Products with activations in 8 bits: faster where unpacking to f32 is the limit, and not exact.
//!
//! Each group of a row of x has a scale, its largest magnitude over 127, and elements rounded to multiples of it: an
//! element is off by up to 1/254 of the largest of its group. Sums of products of integers are exact, so the matrix adds
//! no error of its own. A group contributes `scale * sum(element * x) + bias * sum(x)`, both sums over integers, times the
//! scale of x.
//!
//! A *chunk* is 64 columns, and its bytes of x have the order of the elements that [`Bytes::unpack`] gives: with 4 bits the
//! even columns and then the odd ones, as low and high halves of bytes; with 8 bits columns 0 to 15, 32 to 47, 16 to 31 and
//! 48 to 63. In both, the first 32 columns are in bytes 0 to 15 and 32 to 47.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

#[cfg(target_arch = "x86_64")]
pub mod avx2;
pub mod portable;

use crate::kernel::{Groups, OUT, Quad, SPAN, unroll};
use crate::lanes::{Lanes, prefetch};

/// Columns of a chunk.
pub const CHUNK: usize = 64;

/// Most rows of x that a kernel takes at a time.
pub const MOST_ROWS: usize = 2;

/// Groups have at least 32 elements.
const GROUPS: usize = SPAN / 32;

/// Bytes of an instruction set.
///
/// # Safety
/// As [`Lanes`].
pub unsafe trait Bytes {
    /// Its vectors of floats.
    type Floats: Lanes;
    /// A vector of 32 bytes.
    type V: Copy;

    /// What elements of `bits` bits are less by in [`Self::unpack`] than in the matrix.
    fn offset(bits: usize) -> f32;
    /// The elements of a chunk, of `8 * BITS` bytes, in the order of x.
    unsafe fn unpack<const BITS: usize>(words: *const u8) -> [Self::V; 2];
    /// Products of the elements of a chunk with 64 bytes of x, summed up in lanes: the first half of the lanes has the first
    /// 32 columns.
    unsafe fn dot<const BITS: usize>(
        elements: [Self::V; 2],
        x: *const i8,
    ) -> <Self::Floats as Lanes>::V;
    /// The first of two floats in the first half of the lanes, the second in the others.
    unsafe fn halves(floats: *const f32) -> <Self::Floats as Lanes>::V;
}

/// Groups of a span of a row of x; zeros beyond the span.
#[derive(Debug)]
#[repr(C)]
pub struct RowGroups {
    scales: [f32; GROUPS],
    /// Sums of a group's elements, as the scales and bytes represent them.
    sums: [f32; GROUPS],
}

/// Floats that stand for [`RowGroups`] before the bytes of a span of a row.
const ROW_GROUPS: usize = size_of::<RowGroups>() / 4;

/// Floats of a span of a row of x, whose bytes are filled up to whole chunks with zeros.
pub fn floats(columns: usize) -> usize {
    ROW_GROUPS + columns.next_multiple_of(CHUNK) / 4
}

/// What a kernel multiplies with the sums of a group: scale of the matrix times scale of x, for each row of x and of the
/// matrix.
pub type Factors = [RowFactors; MOST_ROWS];

/// Factors of a row of x.
pub type RowFactors = [[f32; GROUPS]; OUT];

/// `groups of the matrix, of x, their number, factors, sums`
type RowFactorsOf = unsafe fn(&Groups, &RowGroups, usize, &mut RowFactors, &mut [f32; OUT]);

/// `bytes of x, bytes between rows, rows of the matrix, factors, sums that are added to`
type Dot = unsafe fn(*const i8, usize, &Quad<'_>, &Factors, *mut [f32; OUT]);

/// The kernels for one format of matrices. As [`crate::kernel::Kernels`], and they need what those need.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// Factors of a row of x, and the sums that biases contribute.
    pub factors: RowFactorsOf,
    /// 1 and 2 rows of x times four rows of the matrix.
    pub dot: [Dot; MOST_ROWS],
}

/// Compiles the kernels of an instruction set; as `kernels!` of `kernel.rs`.
macro_rules! int8_kernels {
    ($isa:ident $features:tt $bits:literal, $group:literal) => {
        $crate::int8::Kernels {
            factors: enabled!($features row_factors(
                matrix: &Groups, x: &RowGroups, count: usize, factors: &mut RowFactors,
                sums: &mut [f32; OUT]
            ) { int8::factors::<$isa, $bits>(matrix, x, count, factors, sums) }),
            dot: [
                int8_kernels!(@dot $isa $features $bits, $group, 1),
                int8_kernels!(@dot $isa $features $bits, $group, 2),
            ],
        }
    };
    (@dot $isa:ident $features:tt $bits:literal, $group:literal, $rows:literal) => {
        enabled!($features dot_rows(
            x: *const i8, stride: usize, quad: &Quad<'_>, factors: &Factors, sums: *mut [f32; OUT]
        ) { int8::dot::<$isa, $bits, $group, $rows>(x, stride, quad, factors, sums) })
    };
}
pub(crate) use int8_kernels;

impl Kernels {
    /// Rows of x, from one to the next `stride` floats, times four rows of the matrix. Writes sums for each of the rows, which
    /// are at most [`MOST_ROWS`].
    ///
    /// # Safety
    /// `x` has the rows as [`arrange`] writes them; the quad is valid; the processor has the instructions.
    pub unsafe fn multiply(
        &self,
        x: *const f32,
        stride: usize,
        quad: &Quad<'_>,
        sums: &mut [[f32; OUT]],
    ) {
        let mut factors = Factors::default();
        for (i, (factors, sums)) in factors.iter_mut().zip(&mut *sums).enumerate() {
            // SAFETY: as this function.
            unsafe {
                let groups = &*x.add(i * stride).cast::<RowGroups>();
                (self.factors)(quad.groups, groups, quad.count, factors, sums);
            }
        }
        let dot = self.dot[sums.len() - 1];
        // SAFETY: `x` has that many rows, and so have the factors.
        unsafe { dot(x.add(ROW_GROUPS).cast(), 4 * stride, quad, &factors, sums.as_mut_ptr()) };
    }
}

/// See [`Kernels::arrange`](crate::kernel::Kernels::arrange).
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
pub unsafe fn arrange<const BITS: usize, const GROUP: usize>(
    from: *const f32,
    to: *mut f32,
    count: usize,
) {
    let columns = count.next_multiple_of(CHUNK);
    // SAFETY: promised by the caller: zeros follow the floats, and `to` has room for groups and whole chunks.
    let (from, groups, to) = unsafe {
        (
            std::slice::from_raw_parts(from, columns),
            &mut *to.cast::<RowGroups>(),
            std::slice::from_raw_parts_mut(to.add(ROW_GROUPS).cast::<i8>(), columns),
        )
    };
    let mut rounded = [0i8; SPAN];
    *groups = RowGroups { scales: [0.0; GROUPS], sums: [0.0; GROUPS] };
    for (g, (from, to)) in from.chunks(GROUP).zip(rounded.chunks_mut(GROUP)).enumerate() {
        // Magnitudes have the order of their bits, and the largest of integers is found in vectors.
        let most = from.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0);
        let most = f32::from_bits(most);
        // Rounding would hide a number that is not finite.
        let scale = if most.is_finite() { most / 127.0 } else { f32::NAN };
        let inverse = if scale > 0.0 { 127.0 / most } else { 0.0 };
        let mut sum = 0;
        for (x, to) in from.iter().zip(to) {
            let x = (x * inverse).round_ties_even();
            // Unlike `clamp`, no NaN is left, which a cast would have to look for.
            let x = if x > -127.0 { x } else { -127.0 };
            let x = if x < 127.0 { x } else { 127.0 };
            // SAFETY: it is between.
            let byte: i32 = unsafe { x.to_int_unchecked() };
            *to = byte as i8;
            sum += byte;
        }
        groups.scales[g] = scale;
        groups.sums[g] = scale * sum as f32;
    }
    for (from, to) in rounded.as_chunks::<CHUNK>().0.iter().zip(to.as_chunks_mut::<CHUNK>().0) {
        *to = if BITS == 4 {
            std::array::from_fn(|i| from[2 * (i % 32) + i / 32])
        } else {
            std::array::from_fn(|i| from[[0, 32, 16, 48][i / 16] + i % 16])
        };
    }
}

/// See [`Kernels::factors`].
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
pub unsafe fn factors<B: Bytes, const BITS: usize>(
    matrix: &Groups,
    x: &RowGroups,
    count: usize,
    factors: &mut RowFactors,
    sums: &mut [f32; OUT],
) {
    debug_assert!(count <= GROUPS);
    // SAFETY: all arrays have as many floats, whole vectors of them.
    unsafe {
        let offset = B::Floats::splat(B::offset(BITS));
        let mut totals = [B::Floats::zero(); OUT];
        unroll!(O < OUT, {
            let mut g = 0;
            while g < count {
                let scales = B::Floats::load(matrix.scales[O].as_ptr().add(g));
                let biases = B::Floats::load(matrix.biases[O].as_ptr().add(g));
                let biases = B::Floats::fma(scales, offset, biases);
                let x_scales = B::Floats::load(x.scales.as_ptr().add(g));
                let products = B::Floats::fma(scales, x_scales, B::Floats::zero());
                B::Floats::store(factors[O].as_mut_ptr().add(g), products);
                let x_sums = B::Floats::load(x.sums.as_ptr().add(g));
                totals[O] = B::Floats::fma(biases, x_sums, totals[O]);
                g += B::Floats::LANES;
            }
        });
        *sums = B::Floats::sum4(totals);
    }
}

/// See [`Kernels::dot`].
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
pub unsafe fn dot<B: Bytes, const BITS: usize, const GROUP: usize, const R: usize>(
    x: *const i8,
    stride: usize,
    quad: &Quad<'_>,
    factors: &Factors,
    sums: *mut [f32; OUT],
) {
    let &Quad { columns, ref lines, ahead, .. } = quad;
    let (bytes, whole) = (CHUNK * BITS / 8, columns / CHUNK);
    let mut copies = [[0u8; CHUNK]; OUT];
    if !columns.is_multiple_of(CHUNK) {
        for (copy, line) in copies.iter_mut().zip(lines) {
            // SAFETY: half a chunk is left of the span.
            unsafe {
                line.add(whole * bytes).copy_to_nonoverlapping(copy.as_mut_ptr(), bytes / 2);
            }
        }
    }
    // SAFETY: all chunks are in the span, but for one with half of its columns, which were copied.
    unsafe {
        let mut totals = [[B::Floats::zero(); OUT]; R];
        for chunk in 0..columns.div_ceil(CHUNK) {
            let words = if chunk < whole {
                [0, 1, 2, 3].map(|o| lines[o].wrapping_add(chunk * bytes))
            } else {
                [0, 1, 2, 3].map(|o| copies[o].as_ptr())
            };
            let x = x.add(chunk * CHUNK);
            let g = chunk * CHUNK / GROUP;
            unroll!(O < OUT, {
                // A chunk has half a cache line, or a whole one.
                prefetch(words[O].wrapping_add(ahead));
                let elements = B::unpack::<BITS>(words[O]);
                unroll!(I < R, {
                    let products = B::dot::<BITS>(elements, x.add(I * stride));
                    let factors = factors.get_unchecked(I)[O].as_ptr().add(g);
                    let factor =
                        if GROUP == 32 { B::halves(factors) } else { B::Floats::splat(*factors) };
                    totals[I][O] = B::Floats::fma(products, factor, totals[I][O]);
                });
            });
        }
        unroll!(I < R, {
            let parts = B::Floats::sum4(totals[I]);
            for (sum, part) in (*sums.add(I)).iter_mut().zip(parts) {
                *sum += part;
            }
        });
    }
}
