//! The inner loops, compiled for each instruction set, number of bits and group size.
//!
//! There are three kinds: elements become f32 in registers (`quads.rs`); rows of x are rounded to 8 bits
//! ([`int8`](crate::int8)); and, with AVX-512 VNNI, both kinds of rows are multiplied in integers (`digits.rs`).
//!
//! Each is a function of its own: in a larger one, the compiler moves sums from registers to memory, and the product
//! takes twice as long. For the same reason a kernel takes few rows of x: elements are unpacked to registers for each call,
//! while the units that multiply are busy, and the next call reads the words from the first-level cache.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

mod quads;

use half::{bf16, f16};

use crate::float::Floats;
use crate::int8::{self, Factors, RowFactors, RowGroups, int8_kernels};
#[cfg(target_arch = "aarch64")]
use crate::lanes::neon::Neon;
use crate::lanes::{Isa, enabled, portable::Portable, prefetch};
use crate::product::{Activations, Biases};
#[cfg(target_arch = "x86_64")]
use crate::{
    digits,
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
#[repr(align(64))]
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

/// Rows of the matrix whose sums are collected before they are written.
pub const TILE: usize = 64;

/// Rows of the matrix whose elements and scales are prefetched ahead: four calls of a kernel, as one call is shorter than the
/// latency of memory.
pub const AHEAD: usize = 4 * OUT;

/// A span of up to [`TILE`] rows of a matrix.
pub struct Strip<'a> {
    /// Columns of the span.
    pub columns: usize,
    /// Rows, at least one.
    pub outputs: usize,
    /// Elements of the first row.
    pub line: *const u8,
    /// Bytes from a row to the next.
    pub line_bytes: usize,
    /// Scales of a packed matrix.
    pub scales: Option<Scales<'a>>,
}

/// Scales and biases of a strip.
#[derive(Clone, Copy)]
pub struct Scales<'a> {
    pub scales: Floats<'a>,
    pub biases: Biases<'a>,
    /// Index of the first row's first group.
    pub first: usize,
    /// Groups from a row to the next.
    pub of_row: usize,
    /// Groups of the span.
    pub count: usize,
}

impl Strip<'_> {
    /// Four rows from `n` on. The last rows may be fewer: the last one stands in for the others.
    #[inline(always)]
    pub fn quad(&self, n: usize) -> [usize; OUT] {
        [0, 1, 2, 3].map(|o| (n + o).min(self.outputs - 1))
    }

    /// Elements of rows.
    #[inline(always)]
    pub fn lines(&self, rows: [usize; OUT]) -> [*const u8; OUT] {
        rows.map(|row| self.line.wrapping_add(row * self.line_bytes))
    }

    /// Bytes from each row to the one that is prefetched.
    #[inline(always)]
    pub fn ahead(&self) -> usize {
        AHEAD * self.line_bytes
    }

    /// Calls `each` with each four rows and the first of them. Reads their scales with `read`.
    ///
    /// # Safety
    /// The strip is valid; the processor has the instructions of `read`.
    unsafe fn for_quads(&self, read: Option<ReadGroups>, mut each: impl FnMut(usize, &Quad<'_>)) {
        let mut groups = Groups::default();
        for n in (0..self.outputs).step_by(OUT) {
            let rows = self.quad(n);
            let mut count = 0;
            if let (Some(read), Some(packed)) = (read, &self.scales) {
                let first = rows.map(|row| packed.first + row * packed.of_row);
                first.iter().for_each(|first| packed.prefetch(first + AHEAD * packed.of_row));
                count = packed.count;
                // SAFETY: each row has that many groups in the span.
                unsafe { read(&packed.scales, &packed.biases, &first, count, &mut groups) };
            }
            let (columns, lines) = (self.columns, self.lines(rows));
            each(n, &Quad { columns, lines, groups: &groups, count, ahead: self.ahead() });
        }
    }
}

impl Scales<'_> {
    /// Brings scales and stored biases, from a group on, to the caches. The group may be none of the matrix.
    #[inline(always)]
    pub fn prefetch(&self, group: usize) {
        let of = |floats: &Floats<'_>| prefetch(floats.start().wrapping_add(group * floats.size()));
        of(&self.scales);
        if let Biases::Stored(biases) = &self.biases {
            of(biases);
        }
    }
}

/// A span of [`OUT`] rows of a matrix.
pub struct Quad<'a> {
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

/// `rows of x, floats from one to the next, rows of the matrix, sums`
type QuadProduct = unsafe fn(*const f32, usize, &Quad<'_>, *mut [f32; OUT]);

/// As [`QuadProduct`]; adds to sums, those of the next row of x [`TILE`] floats behind.
type StripProduct = unsafe fn(*const f32, usize, &Strip<'_>, *mut f32);

/// Reads scales and biases of four rows of the matrix: `scales, biases, index of each row's first group, number of groups,
/// target`.
type ReadGroups = unsafe fn(&Floats<'_>, &Biases<'_>, &[usize; OUT], usize, &mut Groups);

/// The kernels for one format of matrices and of rows of x.
///
/// All need the processor to have the instruction set, and pointers to be valid for a span: the columns of x and the
/// elements of each row of the matrix that it has. A matrix of floats has groups of
/// [`BLOCK`](crate::lanes::BLOCK), without scales.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// Floats of a span of x of that many columns, as `form` reads it: whole cache lines.
    floats: fn(usize) -> usize,
    /// `source, target, count`: writes a span of `count` floats, whole groups, as `form` reads it. Zeros follow in the source,
    /// up to [`SPAN`].
    pub arrange: unsafe fn(*const f32, *mut f32, usize),
    form: Form,
}

/// A format of packed matrices and of the rows that they are multiplied with.
#[derive(Clone, Copy)]
pub struct Format {
    /// 4 or 8.
    pub bits: usize,
    /// 32, 64 or 128.
    pub group_size: usize,
    pub activations: Activations,
}

/// How kernels take rows of the matrix.
#[derive(Clone, Copy)]
pub enum Form {
    /// Four at a time, whose scales are read first. The products are those of 1, 2 and more rows of x, and write sums for each.
    Quads(&'static [QuadProduct], Option<ReadGroups>),
    /// Four at a time, with rows of x in 8 bits.
    Int8(int8::Kernels, ReadGroups),
    /// All of a strip, with 1, 2 and more rows of x.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "has kernels for x86-64 only")
    )]
    Strips(&'static [StripProduct]),
}

/// Compiles the kernels of an instruction set for packed matrices.
macro_rules! packed_kernels {
    ($isa:ident $features:tt $format:ident $rows:tt, $bytes:ident) => {
        match ($format.activations, $format.bits, $format.group_size) {
            (Activations::Exact, 4, 32) => packed_kernels!(@ $isa $features 4, 32, $rows),
            (Activations::Exact, 4, 64) => packed_kernels!(@ $isa $features 4, 64, $rows),
            (Activations::Exact, 4, _) => packed_kernels!(@ $isa $features 4, 128, $rows),
            (Activations::Exact, _, 32) => packed_kernels!(@ $isa $features 8, 32, $rows),
            (Activations::Exact, _, 64) => packed_kernels!(@ $isa $features 8, 64, $rows),
            (Activations::Exact, ..) => packed_kernels!(@ $isa $features 8, 128, $rows),
            (Activations::Int8, 4, 32) => packed_kernels!(@int8 $bytes $features 4, 32),
            (Activations::Int8, 4, 64) => packed_kernels!(@int8 $bytes $features 4, 64),
            (Activations::Int8, 4, _) => packed_kernels!(@int8 $bytes $features 4, 128),
            (Activations::Int8, _, 32) => packed_kernels!(@int8 $bytes $features 8, 32),
            (Activations::Int8, _, 64) => packed_kernels!(@int8 $bytes $features 8, 64),
            (Activations::Int8, ..) => packed_kernels!(@int8 $bytes $features 8, 128),
        }
    };
    (@groups $isa:ident $features:tt $bits:literal) => {
        enabled!($features read_groups(
            scales: &Floats<'_>, biases: &Biases<'_>, at: &[usize; OUT], count: usize, to: &mut Groups
        ) { quads::groups::<$isa, $bits>(scales, biases, at, count, to) })
    };
    (@int8 $isa:ident $features:tt $bits:literal, $group:literal) => {
        Kernels {
            floats: int8::floats,
            arrange: enabled!($features arrange_bytes(
                from: *const f32, to: *mut f32, count: usize
            ) { int8::arrange::<$bits, $group>(from, to, count) }),
            form: Form::Int8(
                int8_kernels!($isa $features $bits, $group),
                packed_kernels!(@groups $isa $features $bits),
            ),
        }
    };
    (@ $isa:ident $features:tt $bits:literal, $group:literal, $rows:tt) => {
        Kernels {
            floats: |columns| quads::padded::<$isa, $bits>(columns) + biases_of(columns / $group),
            arrange: enabled!($features arrange_words(
                from: *const f32, to: *mut f32, count: usize
            ) { quads::arrange::<$isa, $bits, $group>(from, to, count) }),
            form: Form::Quads(
                packed_kernels!(@rows $isa $features $bits, $group, $rows),
                Some(packed_kernels!(@groups $isa $features $bits)),
            ),
        }
    };
    (@rows $isa:ident $features:tt $bits:literal, $group:literal, [$($rows:literal)*]) => {
        &[$(enabled!($features packed_rows(
            x: *const f32, stride: usize, quad: &Quad<'_>, sums: *mut [f32; OUT]
        ) { quads::packed_product::<$isa, $bits, $group, $rows>(x, stride, quad, sums) })),*]
    };
}

/// Compiles the kernels of `digits.rs`.
#[cfg(target_arch = "x86_64")]
macro_rules! digits_kernels {
    ($digits:literal $format:ident) => {
        match ($format.bits, $format.group_size) {
            (4, 32) => digits_kernels!(@ $digits, 4, 32),
            (4, 64) => digits_kernels!(@ $digits, 4, 64),
            (4, _) => digits_kernels!(@ $digits, 4, 128),
            (_, 32) => digits_kernels!(@ $digits, 8, 32),
            (_, 64) => digits_kernels!(@ $digits, 8, 64),
            _ => digits_kernels!(@ $digits, 8, 128),
        }
    };
    (@ $digits:literal, $bits:literal, $group:literal) => {
        Kernels {
            floats: digits::floats::<$digits, $bits, $group>,
            arrange: enabled!(["avx512f,avx512bw,avx512vl,avx512vnni"] arrange_digits(
                from: *const f32, to: *mut f32, count: usize
            ) { digits::arrange::<$digits, $bits, $group>(from, to, count) }),
            form: Form::Strips(&[
                digits_kernels!(@ $digits, $bits, $group, 1),
                digits_kernels!(@ $digits, $bits, $group, 2),
                digits_kernels!(@ $digits, $bits, $group, 3),
            ]),
        }
    };
    (@ $digits:literal, $bits:literal, $group:literal, $rows:literal) => {
        enabled!(["avx512f,avx512bw,avx512vl,avx512vnni"] digits_strip(
            x: *const f32, stride: usize, strip: &Strip<'_>, sums: *mut f32
        ) { digits::product::<$digits, $bits, $group, $rows>(x, stride, strip, sums) })
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
            form: Form::Quads(float_kernels!(@rows $isa $features $float, $rows), None),
        }
    };
    (@rows $isa:ident $features:tt $float:ident, [$($rows:literal)*]) => {
        &[$(enabled!($features float_rows(
            x: *const f32, stride: usize, quad: &Quad<'_>, sums: *mut [f32; OUT]
        ) { quads::float_product::<$isa, $float, $rows>(x, stride, quad, sums) })),*]
    };
}

impl Kernels {
    /// Where the span of column `k` of `rows` rows of x begins, and the floats of one of them.
    pub fn span(&self, columns: usize, rows: usize, k: usize) -> (usize, usize) {
        let start = rows * (k / SPAN) * (self.floats)(SPAN);
        (start, (self.floats)(SPAN.min(columns - k)))
    }

    /// Adds the products of `rows` rows of x with a strip to `sums`, those of the next row [`TILE`] floats behind.
    ///
    /// # Safety
    /// The processor has the instructions. `x` has the rows as [`Self::arrange`] writes them, from one to the next `stride`
    /// floats, and `sums` whole tiles. The strip is valid and has the format of these kernels.
    pub unsafe fn multiply(
        &self,
        x: *const f32,
        stride: usize,
        rows: usize,
        strip: &Strip<'_>,
        sums: *mut f32,
    ) {
        let mut parts = [[0.0; OUT]; MOST_ROWS];
        // SAFETY: promised by the caller; `parts` has room for the rows of every kernel.
        unsafe {
            match &self.form {
                Form::Strips(products) => {
                    for (r, taken) in calls(rows, products.len()) {
                        products[taken - 1](x.add(r * stride), stride, strip, sums.add(r * TILE));
                    }
                }
                Form::Quads(products, read) => strip.for_quads(*read, |n, quad| {
                    for (r, taken) in calls(rows, products.len()) {
                        products[taken - 1](x.add(r * stride), stride, quad, parts.as_mut_ptr());
                        add(&parts[..taken], sums.add(r * TILE + n));
                    }
                }),
                Form::Int8(kernels, read) => strip.for_quads(Some(*read), |n, quad| {
                    for (r, taken) in calls(rows, int8::MOST_ROWS) {
                        kernels.multiply(x.add(r * stride), stride, quad, &mut parts[..taken]);
                        add(&parts[..taken], sums.add(r * TILE + n));
                    }
                }),
            }
        }
    }

    /// The kernels of packed matrices of that format.
    pub fn of_packed(isa: Isa, format: Format) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Vnni => match format.activations {
                Activations::Exact => digits_kernels!(3 format),
                Activations::Int8 => digits_kernels!(1 format),
            },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                packed_kernels!(Avx512 ["avx512f,avx512bw,avx512vl,avx2,fma"] format [1 2 3], Avx2)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => packed_kernels!(Avx2 ["avx2,fma,f16c"] format [1 2], Avx2),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => packed_kernels!(Neon ["neon"] format [1 2 3], Portable),
            Isa::Portable => packed_kernels!(Portable [] format [1 2], Portable),
        }
    }

    /// The kernels of matrices of such floats.
    pub fn of_floats(isa: Isa, floats: &Floats<'_>) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Vnni | Isa::Avx512 => {
                float_kernels!(Avx512 ["avx512f,avx512bw,avx512vl"] floats [1 2 3 4 5 6])
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => float_kernels!(Avx2 ["avx2,fma,f16c"] floats [1 2 3]),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => float_kernels!(Neon ["neon"] floats [1 2 3 4 5]),
            Isa::Portable => float_kernels!(Portable [] floats [1 2]),
        }
    }
}

/// The first row and the number of rows of each call of a kernel that takes at most `most`.
fn calls(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut first = 0;
    std::iter::from_fn(move || {
        // Two times two rows take less time than three and one.
        let taken = (rows - first).div_ceil((rows - first).div_ceil(most).max(1));
        first += taken;
        (taken > 0).then_some((first - taken, taken))
    })
}

/// Adds sums for each row of x to those of its tile.
///
/// # Safety
/// `sums` has a tile for each row.
unsafe fn add(parts: &[[f32; OUT]], sums: *mut f32) {
    for (i, part) in parts.iter().enumerate() {
        // SAFETY: promised by the caller.
        let sums = unsafe { &mut *sums.add(i * TILE).cast::<[f32; OUT]>() };
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
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
