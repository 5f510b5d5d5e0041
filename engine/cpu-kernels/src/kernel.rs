//! The inner loops, compiled for each instruction set, number of bits and group size.
//!
//! Each is a function of its own: in a larger one, the compiler moves sums from registers to memory, and the product
//! takes twice as long. For the same reason a kernel takes few rows of x: elements are unpacked to registers for each call,
//! while the units that multiply are busy, and the next call reads the words from the first-level cache.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use half::{bf16, f16};

use crate::float::Floats;
use crate::int8::{self, Factors, RowFactors, RowGroups, int8_kernels};
#[cfg(target_arch = "aarch64")]
use crate::lanes::neon::Neon;
use crate::lanes::{BLOCK, Isa, Lanes, enabled, portable::Portable, prefetch, unit};
use crate::product::Biases;
#[cfg(target_arch = "x86_64")]
use crate::{
    int8::vnni::Vnni,
    lanes::{avx2::Avx2, avx512::Avx512},
};

/// Columns of a span.
pub const SPAN: usize = 1024;

/// Rows of the matrix that a kernel takes at a time.
pub const OUT: usize = 4;

/// Most rows of x that a kernel takes at a time.
pub const MOST_ROWS: usize = 6;

/// Scales and biases of one span of [`OUT`] rows of the matrix, as f32.
#[derive(Debug, Default)]
pub struct Groups {
    /// Zeros beyond the span. Groups have at least 32 elements.
    pub scales: [[f32; SPAN / 32]; OUT],
    /// As `scales`.
    pub biases: [[f32; SPAN / 32]; OUT],
}

/// Floats that stand for biases behind a span of that many groups, or for their sums: whole vectors of any instruction set.
const fn biases_of(groups: usize) -> usize {
    groups.next_multiple_of(16)
}

/// A span of [`OUT`] rows of a matrix.
pub struct Span<'a> {
    /// Its first column.
    pub k: usize,
    /// Number of its columns.
    pub columns: usize,
    /// Elements of each row.
    pub lines: [*const u8; OUT],
    /// Scales and biases; zeros beyond the span.
    pub groups: &'a Groups,
    /// Number of groups in each row.
    pub count: usize,
    /// Bytes from each row to the one that is prefetched.
    pub ahead: usize,
}

/// `rows of x, floats from one to the next, span, sums`
type RowsProduct = unsafe fn(*const f32, usize, &Span<'_>, *mut [f32; OUT]);

/// The kernels for one format of matrices.
///
/// Products of a word's elements are summed up in one lane, and their sum is multiplied with the scale: an element then costs
/// one product. Biases are multiplied with the sums of the groups of x, which end its span.
///
/// All need the processor to have the instruction set, and pointers to be valid for a span: the columns of x and the
/// elements of each row of the matrix that it has. A matrix of floats has groups of [`BLOCK`], without scales.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// Floats of a span of x of that many columns, as `rows` read it.
    floats: fn(usize) -> usize,
    /// `source, target, count`: writes a span of `count` floats, whole groups, as `rows` read it.
    pub arrange: unsafe fn(*const f32, *mut f32, usize),
    /// 1, 2 and more rows of x times four rows of the matrix. Writes sums for each row of x.
    pub rows: &'static [RowsProduct],
    /// Those of packed matrices only.
    pub packed: Option<PackedKernels>,
}

/// Kernels for scales, and for [`Activations::Int8`](crate::Activations).
#[derive(Clone, Copy)]
pub struct PackedKernels {
    /// Reads scales and biases of four rows of the matrix: `scales, biases, index of each row's first group, number of groups,
    /// target`.
    pub groups: unsafe fn(&Floats<'_>, &Biases<'_>, &[usize; OUT], usize, &mut Groups),
    /// Those that multiply bytes.
    pub int8: int8::Kernels,
}

/// Compiles the kernels of an instruction set for packed matrices.
macro_rules! packed_kernels {
    ($isa:ident $features:tt $bits:ident $group:ident $rows:tt $int8:expr) => {
        match ($bits, $group) {
            (4, 32) => packed_kernels!(@ $isa $features 4, 32, $rows, $int8),
            (4, 64) => packed_kernels!(@ $isa $features 4, 64, $rows, $int8),
            (4, _) => packed_kernels!(@ $isa $features 4, 128, $rows, $int8),
            (_, 32) => packed_kernels!(@ $isa $features 8, 32, $rows, $int8),
            (_, 64) => packed_kernels!(@ $isa $features 8, 64, $rows, $int8),
            _ => packed_kernels!(@ $isa $features 8, 128, $rows, $int8),
        }
    };
    (@ $isa:ident $features:tt $bits:literal, $group:literal, $rows:tt, $int8:expr) => {
        Kernels {
            floats: |columns| padded::<$isa, $bits>(columns) + biases_of(columns / $group),
            arrange: enabled!($features arrange_words(
                from: *const f32, to: *mut f32, count: usize
            ) { arrange::<$isa, $bits, $group>(from, to, count) }),
            rows: packed_kernels!(@rows $isa $features $bits, $group, $rows),
            packed: Some(PackedKernels {
                groups: enabled!($features read_groups(
                    scales: &Floats<'_>, biases: &Biases<'_>, at: &[usize; OUT], count: usize, to: &mut Groups
                ) { groups::<$isa, $bits>(scales, biases, at, count, to) }),
                int8: $int8,
            }),
        }
    };
    (@rows $isa:ident $features:tt $bits:literal, $group:literal, [$($rows:literal)*]) => {
        &[$(enabled!($features packed_rows(
            x: *const f32, stride: usize, span: &Span<'_>, sums: *mut [f32; OUT]
        ) { packed_product::<$isa, $bits, $group, $rows>(x, stride, span, sums) })),*]
    };
}

/// Compiles the kernels of an instruction set for matrices of floats.
macro_rules! float_kernels {
    ($isa:ident $features:tt $floats:ident $rows:tt) => {
        match $floats {
            Floats::F32(_) => float_kernels!(@ $isa $features f32, $rows),
            Floats::Bf16(_) => float_kernels!(@ $isa $features bf16, $rows),
            Floats::F16(_) => float_kernels!(@ $isa $features f16, $rows),
        }
    };
    (@ $isa:ident $features:tt $float:ident, $rows:tt) => {
        Kernels {
            floats: |columns| columns,
            arrange: enabled!($features copy_floats(
                from: *const f32, to: *mut f32, count: usize
            ) { from.copy_to_nonoverlapping(to, count) }),
            rows: float_kernels!(@rows $isa $features $float, $rows),
            packed: None,
        }
    };
    (@rows $isa:ident $features:tt $float:ident, [$($rows:literal)*]) => {
        &[$(enabled!($features float_rows(
            x: *const f32, stride: usize, span: &Span<'_>, sums: *mut [f32; OUT]
        ) { float_product::<$isa, $float, $rows>(x, stride, span, sums) })),*]
    };
}

impl Kernels {
    /// Where the span of column `k` of `rows` rows of x begins, and the floats of one of them.
    pub fn span(&self, columns: usize, rows: usize, k: usize) -> (usize, usize) {
        let start = rows * (k / SPAN) * (self.floats)(SPAN);
        (start, (self.floats)(SPAN.min(columns - k)))
    }

    /// Those of packed matrices; 4 or 8 bits, groups of 32, 64 or 128.
    pub fn of_packed(isa: Isa, bits: usize, group: usize) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                packed_kernels!(Avx512 ["avx512f,avx512bw,avx512vl"] bits group [1 2 3] Self::int8_of_avx512(bits, group))
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                packed_kernels!(Avx2 ["avx2,fma,f16c"] bits group [1 2] int8_kernels!(Avx2 ["avx2,fma,f16c"] bits group))
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                packed_kernels!(Neon ["neon"] bits group [1 2 3] int8_kernels!(Portable ["neon"] bits group))
            }
            Isa::Portable => {
                packed_kernels!(Portable [] bits group [1 2] int8_kernels!(Portable [] bits group))
            }
        }
    }

    /// Those of matrices of such floats.
    pub fn of_floats(isa: Isa, floats: &Floats<'_>) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                float_kernels!(Avx512 ["avx512f,avx512bw,avx512vl"] floats [1 2 3 4 5 6])
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => float_kernels!(Avx2 ["avx2,fma,f16c"] floats [1 2 3]),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => float_kernels!(Neon ["neon"] floats [1 2 3 4 5]),
            Isa::Portable => float_kernels!(Portable [] floats [1 2]),
        }
    }

    /// The first processors with AVX-512 have no VNNI.
    #[cfg(target_arch = "x86_64")]
    fn int8_of_avx512(bits: usize, group: usize) -> int8::Kernels {
        if is_x86_feature_detected!("avx512vnni") {
            int8_kernels!(Vnni ["avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma"] bits group)
        } else {
            int8_kernels!(Avx2 ["avx512f,avx512bw,avx512vl,avx2,fma"] bits group)
        }
    }
}

/// Repeats a block with each constant value below `$end`. Where the compiler does not unroll a loop over an array of
/// vectors, it keeps them in memory, and the product takes twice as long.
macro_rules! unroll {
    ($i:ident < OUT, $body:block) => {
        unroll!($i in [0 1 2 3], OUT, $body)
    };
    ($i:ident < $end:expr, $body:block) => {
        unroll!($i in [0 1 2 3 4 5 6 7], $end, $body)
    };
    ($i:ident in [$($n:literal)*], $end:expr, $body:block) => {
        $({
            const $i: usize = $n;
            if $i < $end $body
        })*
    };
}
pub(crate) use unroll;

/// Columns of whole blocks.
const fn padded<L: Lanes, const BITS: usize>(columns: usize) -> usize {
    columns.next_multiple_of(L::LANES * 32 / BITS)
}

/// See [`Kernels::arrange`].
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn arrange<L: Lanes, const BITS: usize, const GROUP: usize>(
    from: *const f32,
    to: *mut f32,
    count: usize,
) {
    let (elements, columns) = (32 / BITS, padded::<L, BITS>(count));
    // SAFETY: `to` has room for whole blocks, a sum of each group, and zeros.
    unsafe {
        to.add(count - count % (L::LANES * elements)).write_bytes(0, columns - count);
        for word in 0..count / elements {
            let (block, lane) = (word / L::LANES, word % L::LANES);
            let to = to.add(block * L::LANES * elements + lane);
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

/// See [`PackedKernels::groups`].
///
/// # Safety
/// See [`Kernels`]; scales and stored biases have `count` elements from each of `at` on.
#[inline(always)]
unsafe fn groups<L: Lanes, const BITS: usize>(
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

/// See [`Kernels::rows`].
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn packed_product<L: Lanes, const BITS: usize, const GROUP: usize, const R: usize>(
    x: *const f32,
    stride: usize,
    span: &Span<'_>,
    parts: *mut [f32; OUT],
) {
    let Span { columns, lines: [a, b, c, d], groups, count, ahead, .. } = *span;
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
trait Float: Copy {
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

/// See [`Kernels::rows`].
///
/// # Safety
/// See [`Kernels`]; lines begin at floats of the type.
#[inline(always)]
unsafe fn float_product<L: Lanes, F: Float, const R: usize>(
    x: *const f32,
    stride: usize,
    span: &Span<'_>,
    parts: *mut [f32; OUT],
) {
    let lines = span.lines.map(|line| line.cast::<F>());
    // SAFETY: a span is whole vectors.
    unsafe {
        let mut sums = [[L::zero(); OUT]; R];
        let mut v = 0;
        while v < span.columns {
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
