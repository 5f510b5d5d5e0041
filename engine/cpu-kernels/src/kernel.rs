//! The inner loops, compiled for each instruction set, number of bits and group size.
//!
//! Each is a function of its own: in a larger one, the compiler moves sums from registers to memory, and the product
//! takes twice as long.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use half::{bf16, f16};

use crate::float::Floats;
use crate::int8::{self, Factors, RowFactors, RowGroups, int8_kernels};
#[cfg(target_arch = "aarch64")]
use crate::lanes::neon::Neon;
use crate::lanes::{BLOCK, Isa, Lanes, enabled, portable::Portable};
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
pub const fn biases_of(groups: usize) -> usize {
    groups.next_multiple_of(16)
}

/// Floats of a panel of spans of the most groups.
pub const PANEL: usize = OUT * (SPAN + biases_of(SPAN / 32));

/// `rows of a panel, rows of x, floats of each, sums`
type PanelProduct = unsafe fn(*const f32, *const f32, usize, *mut [f32; OUT]);

/// The kernels for one format of matrices.
///
/// With biases, a span of x ends with the sums of its groups, which are multiplied with the biases like further elements
/// ([`biases_of`]): an element then costs one product with its scale, not a fused one with its bias as well.
///
/// All need the processor to have the instruction set, and pointers to be valid for a span: the columns of x and the
/// elements of each row of the matrix that it has. A matrix of floats has groups of [`BLOCK`], without scales.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// `source, target, count`: copies `count` floats, whole groups, into the order of lanes, followed by the sum of each group.
    pub arrange: unsafe fn(*const f32, *mut f32, usize),
    /// One row of x times four rows of the matrix: `x, rows, their scales and biases, number of groups, bytes from each row to
    /// the one that is prefetched, sums`.
    pub fused: unsafe fn(*const f32, &[*const u8; OUT], &Groups, usize, usize, *mut [f32; OUT]),
    /// Unpacks that many groups of four rows of the matrix and their biases, vector by vector: [columns / lanes, 4, lanes].
    pub unpack: unsafe fn(&[*const u8; OUT], &Groups, usize, *mut f32),
    /// 1, 2 and more rows of x times the four rows of a panel. Writes sums for each row of x.
    pub panel: &'static [PanelProduct],
    /// Those of packed matrices only.
    pub packed: Option<PackedKernels>,
}

/// Kernels for scales, and for [`Activations::Int8`](crate::Activations).
#[derive(Clone, Copy)]
pub struct PackedKernels {
    /// Reads scales and biases of four rows of the matrix: `scales, biases, index of each row's first group, number of groups,
    /// groups from each row to the one that is prefetched, target`.
    pub groups: unsafe fn(&Floats<'_>, &Floats<'_>, &[usize; OUT], usize, usize, &mut Groups),
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
            arrange: enabled!($features arrange_blocks(
                from: *const f32, to: *mut f32, count: usize
            ) { arrange::<$isa, $bits, $group>(from, to, count) }),
            fused: enabled!($features fused_row(
                x: *const f32, words: &[*const u8; OUT], groups: &Groups, count: usize, ahead: usize,
                sums: *mut [f32; OUT]
            ) { fused::<$isa, $bits, $group>(x, words, groups, count, ahead, sums) }),
            unpack: enabled!($features unpack_groups(
                words: &[*const u8; OUT], groups: &Groups, count: usize, panel: *mut f32
            ) { unpack::<$isa, $bits, $group>(words, groups, count, panel) }),
            panel: panel_kernels!($isa $features $rows),
            packed: Some(PackedKernels {
                groups: enabled!($features read_groups(
                    scales: &Floats<'_>, biases: &Floats<'_>, at: &[usize; OUT], count: usize, ahead: usize,
                    to: &mut Groups
                ) { groups::<$isa>(scales, biases, at, count, ahead, to) }),
                int8: $int8,
            }),
        }
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
            arrange: enabled!($features copy_blocks(
                from: *const f32, to: *mut f32, count: usize
            ) { from.copy_to_nonoverlapping(to, count) }),
            fused: enabled!($features fused_row(
                x: *const f32, lines: &[*const u8; OUT], _groups: &Groups, count: usize, _ahead: usize,
                sums: *mut [f32; OUT]
            ) { fused_floats::<$isa, $float>(x, lines, count, sums) }),
            unpack: enabled!($features unpack_floats_of(
                lines: &[*const u8; OUT], _groups: &Groups, count: usize, panel: *mut f32
            ) { unpack_floats::<$isa, $float>(lines, count, panel) }),
            panel: panel_kernels!($isa $features $rows),
            packed: None,
        }
    };
}

/// Compiles [`Kernels::panel`]: as many rows at a time as the registers hold sums of.
macro_rules! panel_kernels {
    ($isa:ident $features:tt [$($rows:literal)*]) => {
        &[$(enabled!($features panel_rows(
            panel: *const f32, x: *const f32, span: usize, sums: *mut [f32; OUT]
        ) { panel_product::<$isa, $rows>(panel, x, span, sums) })),*]
    };
}

impl Kernels {
    /// Those of packed matrices; 4 or 8 bits, groups of 32, 64 or 128.
    pub fn of_packed(isa: Isa, bits: usize, group: usize) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                packed_kernels!(Avx512 ["avx512f,avx512bw,avx512vl"] bits group [1 2 3 4 5 6] Self::int8_of_avx512(bits, group))
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                packed_kernels!(Avx2 ["avx2,fma,f16c"] bits group [1 2 3] int8_kernels!(Avx2 ["avx2,fma,f16c"] bits group))
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                packed_kernels!(Neon ["neon"] bits group [1 2 3 4 5] int8_kernels!(Portable ["neon"] bits group))
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
    // SAFETY: a group is whole blocks of both spans; `to` has room for a sum of each group and zeros.
    unsafe {
        for block in (0..count).step_by(BLOCK) {
            L::arrange::<BITS>(from.add(block), to.add(block));
        }
        let (ones, sums, groups) = (L::splat(1.0), to.add(count), count / GROUP);
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
/// See [`Kernels`]; scales and biases have `count` elements from each of `at` on.
#[inline(always)]
unsafe fn groups<L: Lanes>(
    scales: &Floats<'_>,
    biases: &Floats<'_>,
    at: &[usize; OUT],
    count: usize,
    ahead: usize,
    to: &mut Groups,
) {
    for (from, to) in [(scales, &mut to.scales), (biases, &mut to.biases)] {
        for (at, to) in at.iter().zip(to) {
            let next = from.start().wrapping_add((at + ahead) * from.size());
            // SAFETY: a prefetch does not fault; the rest is promised by the caller.
            unsafe {
                L::prefetch(next);
                match from {
                    Floats::F32(floats) => groups_of_row::<L, _>(&floats[*at..], count, to),
                    Floats::Bf16(floats) => groups_of_row::<L, _>(&floats[*at..], count, to),
                    Floats::F16(floats) => groups_of_row::<L, _>(&floats[*at..], count, to),
                }
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

/// See [`Kernels::fused`].
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn fused<L: Lanes, const BITS: usize, const GROUP: usize>(
    x: *const f32,
    words: &[*const u8; OUT],
    groups: &Groups,
    count: usize,
    ahead: usize,
    parts: *mut [f32; OUT],
) {
    // SAFETY: all blocks are in the span; a group is whole blocks.
    unsafe {
        let mut sums = [L::zero(); OUT];
        let [a, b, c, d] = *words;
        for g in 0..count {
            let mut tables = [L::zero(); OUT];
            unroll!(O < OUT, {
                tables[O] = L::table::<BITS>(*groups.scales[O].get_unchecked(g));
            });
            unroll!(B < GROUP / BLOCK, {
                let block = g * GROUP + B * BLOCK;
                let words = [a, b, c, d].map(|line| line.wrapping_add(block * BITS / 8));
                // Row by row, as the vectors that one row needs fit the registers.
                unroll!(O < OUT, {
                    L::prefetch(words[O].wrapping_add(ahead));
                    unroll!(I < L::VECTORS, {
                        let w = L::weights::<BITS>(words[O], I, tables[O]);
                        let x = L::load(x.add(block + I * L::LANES));
                        sums[O] = L::fma(w, x, sums[O]);
                    });
                });
            });
        }
        let x = x.add(count * GROUP);
        let mut g = 0;
        while g < biases_of(count) {
            let x = L::load(x.add(g));
            unroll!(O < OUT, {
                sums[O] = L::fma(L::load(groups.biases[O].as_ptr().add(g)), x, sums[O]);
            });
            g += L::LANES;
        }
        parts.write(L::sum4(sums));
    }
}

/// See [`Kernels::unpack`].
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn unpack<L: Lanes, const BITS: usize, const GROUP: usize>(
    words: &[*const u8; OUT],
    groups: &Groups,
    count: usize,
    panel: *mut f32,
) {
    // SAFETY: all blocks are in the span; a group is whole blocks.
    unsafe {
        for g in 0..count {
            unroll!(O < OUT, {
                let table = L::table::<BITS>(*groups.scales[O].get_unchecked(g));
                unroll!(B < GROUP / BLOCK, {
                    let block = g * GROUP + B * BLOCK;
                    unroll!(I < L::VECTORS, {
                        let w = L::weights::<BITS>(words[O].add(block * BITS / 8), I, table);
                        L::store(panel.add((block + I * L::LANES) * OUT + O * L::LANES), w);
                    });
                });
            });
        }
        let mut g = 0;
        while g < biases_of(count) {
            unroll!(O < OUT, {
                let biases = L::load(groups.biases[O].as_ptr().add(g));
                L::store(panel.add((count * GROUP + g) * OUT + O * L::LANES), biases);
            });
            g += L::LANES;
        }
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

/// See [`Kernels::fused`].
///
/// # Safety
/// See [`Kernels`]; lines begin at floats of the type.
#[inline(always)]
unsafe fn fused_floats<L: Lanes, F: Float>(
    x: *const f32,
    lines: &[*const u8; OUT],
    count: usize,
    parts: *mut [f32; OUT],
) {
    let lines = lines.map(|line| line.cast::<F>());
    // SAFETY: all blocks are in the span, and a block is whole vectors.
    unsafe {
        let mut sums = [L::zero(); OUT];
        let mut v = 0;
        while v < count * BLOCK {
            unroll!(I < L::VECTORS, {
                let x = L::load(x.add(v + I * L::LANES));
                unroll!(O < OUT, {
                    sums[O] = L::fma(F::load::<L>(lines[O].add(v + I * L::LANES)), x, sums[O]);
                });
            });
            v += BLOCK;
        }
        parts.write(L::sum4(sums));
    }
}

/// See [`Kernels::unpack`].
///
/// # Safety
/// As [`fused_floats`].
#[inline(always)]
unsafe fn unpack_floats<L: Lanes, F: Float>(
    lines: &[*const u8; OUT],
    count: usize,
    panel: *mut f32,
) {
    let lines = lines.map(|line| line.cast::<F>());
    // SAFETY: all blocks are in the span, and a block is whole vectors.
    unsafe {
        let mut v = 0;
        while v < count * BLOCK {
            unroll!(O < OUT, {
                L::store(panel.add(v * OUT + O * L::LANES), F::load::<L>(lines[O].add(v)));
            });
            v += L::LANES;
        }
    }
}

/// See [`Kernels::panel`].
///
/// # Safety
/// See [`Kernels`].
#[inline(always)]
unsafe fn panel_product<L: Lanes, const R: usize>(
    panel: *const f32,
    x: *const f32,
    span: usize,
    parts: *mut [f32; OUT],
) {
    // SAFETY: the panel has four rows of the span, x has R of them, and there is room for R rows of sums.
    unsafe {
        let mut sums = [[L::zero(); OUT]; R];
        let mut v = 0;
        while v < span {
            // The fewer vectors, of the rows or of the panel, stay in registers: with all of them, sums would not.
            if R < OUT {
                let mut rows = [L::zero(); R];
                unroll!(I < R, {
                    rows[I] = L::load(x.add(I * span + v));
                });
                unroll!(O < OUT, {
                    let w = L::load(panel.add(v * OUT + O * L::LANES));
                    unroll!(I < R, {
                        sums[I][O] = L::fma(w, rows[I], sums[I][O]);
                    });
                });
            } else {
                let mut w = [L::zero(); OUT];
                unroll!(O < OUT, {
                    w[O] = L::load(panel.add(v * OUT + O * L::LANES));
                });
                unroll!(I < R, {
                    let x = L::load(x.add(I * span + v));
                    unroll!(O < OUT, {
                        sums[I][O] = L::fma(w[O], x, sums[I][O]);
                    });
                });
            }
            v += L::LANES;
        }
        unroll!(I < R, {
            parts.add(I).write(L::sum4(sums[I]));
        });
    }
}
