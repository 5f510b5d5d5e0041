//! The product: y[r][n] = sum over k of x[r][k] * w[n][k].
//!
//! Columns are cut into spans of [`SPAN`]. An output is the sum of its spans, first to last; a span is one chain of
//! fused products a lane, whose lanes are added in the end. Nothing else decides the order of sums.
//!
//! Biases of a packed matrix are apart from its elements: they are multiplied with the sums of the groups of x, which end
//! its span. So the bound of an error is relative to `|element * scale| + |bias|`, not to the magnitude of their sum.
//!
//! One row is multiplied while elements are in registers. More rows share a panel: four rows of the matrix, one
//! span long, unpacked to 16 KiB of f32, which they then read from the first-level cache. Rows are taken 128 at a
//! time, so that their span stays in the second-level cache. With activations in 8 bits ([`int8`]), elements of the matrix
//! are unpacked to bytes for each two rows, and there is no panel.

#![allow(unsafe_code, reason = "vector instructions over pointers")]

use std::cell::RefCell;
use std::ops::Range;

use half::{bf16, f16};
use thiserror::Error as ThisError;

use crate::float::{Floats, FloatsMut};
use crate::int8::{self, Factors};
use crate::kernel::{Groups, Kernels, MOST_ROWS, OUT, PANEL, PackedKernels, SPAN, biases_of};
use crate::lanes::{BLOCK, Isa};
use crate::pool;

/// Rows of x that are multiplied together.
const ROWS: usize = 128;

/// Rows of the matrix whose sums are collected before they are written.
const TILE: usize = 64;

/// Most rows that are multiplied with elements in registers.
const FUSED: usize = 1;

/// Distance in rows of the matrix at which elements and scales are prefetched: four calls of a kernel, as one call is
/// shorter than the latency of memory.
const AHEAD: usize = 4 * OUT;

/// Products of elements that one piece of the work has at least: some microseconds.
const PIECE: usize = 1 << 18;

/// Pieces for each thread, so that a delayed one does not delay the others.
const PIECES: usize = 4;

/// A packed matrix: MLX's affine quantization.
#[derive(Debug, Clone, Copy)]
pub struct Packed<'a> {
    /// [rows, columns * bits / 32], elements from the lowest bits on.
    pub words: &'a [u32],
    /// [rows, columns / group_size]
    pub scales: Floats<'a>,
    /// As `scales`: an element is worth `element * scale + bias`.
    pub biases: Floats<'a>,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
    /// 32, 64 or 128.
    pub group_size: usize,
    /// 4 or 8.
    pub bits: usize,
}

/// A matrix of floats.
#[derive(Debug, Clone, Copy)]
pub struct Dense<'a> {
    /// [rows, columns]
    pub elements: Floats<'a>,
    /// Outputs.
    pub rows: usize,
    /// Inputs, in blocks of 32.
    pub columns: usize,
}

/// A matrix that rows are multiplied with.
#[derive(Debug, Clone, Copy)]
pub enum Matrix<'a> {
    /// Integers with scales.
    Packed(Packed<'a>),
    /// Floats.
    Dense(Dense<'a>),
}

impl<'a> From<Packed<'a>> for Matrix<'a> {
    fn from(matrix: Packed<'a>) -> Self {
        Self::Packed(matrix)
    }
}

impl<'a> From<Dense<'a>> for Matrix<'a> {
    fn from(matrix: Dense<'a>) -> Self {
        Self::Dense(matrix)
    }
}

/// How rows of x are multiplied with a packed matrix. Products with a dense one are always exact.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Activations {
    /// As f32, which all types of floats fit.
    #[default]
    Exact,
    /// Rounded to 8 bits in groups of the matrix's size: an element is off by up to 1/254 of its group's largest.
    Int8,
}

/// Why a product cannot be computed.
#[derive(Debug, ThisError)]
pub enum Error {
    /// Other group sizes or bits.
    #[error("no kernel for {bits} bits in groups of {group_size}")]
    Format {
        /// Bits of an element.
        bits: usize,
        /// Elements of a group.
        group_size: usize,
    },
    /// A slice does not have the length that the shape asks for.
    #[error("{what} has {found} elements, not {expected}")]
    Length {
        /// The argument.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length by the shape.
        expected: usize,
    },
}

impl Packed<'_> {
    /// Whether there is a kernel for a format.
    pub fn supports(bits: usize, group_size: usize) -> bool {
        matches!(bits, 4 | 8) && matches!(group_size, 32 | 64 | 128)
    }

    fn groups(&self) -> usize {
        self.columns / self.group_size
    }

    /// Checks the lengths that the shape asks for.
    fn check(&self) -> Result<(), Error> {
        let Self { rows, columns, group_size, bits, .. } = *self;
        if !Self::supports(bits, group_size) {
            return Err(Error::Format { bits, group_size });
        }
        length("words", self.words.len(), rows * (columns * bits / 32))?;
        length("scales", self.scales.len(), rows * self.groups())?;
        length("biases", self.biases.len(), rows * self.groups())
    }
}

impl Dense<'_> {
    /// Whether there is a kernel for rows of a length.
    pub fn supports(columns: usize) -> bool {
        columns.is_multiple_of(BLOCK)
    }
}

impl Matrix<'_> {
    fn rows(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.rows,
            Self::Dense(matrix) => matrix.rows,
        }
    }

    fn columns(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.columns,
            Self::Dense(matrix) => matrix.columns,
        }
    }

    /// Columns of a group.
    fn group_size(&self) -> usize {
        match self {
            Self::Packed(matrix) => matrix.group_size,
            Self::Dense(_) => BLOCK,
        }
    }

    /// Floats behind a span of x: the sums of its groups.
    fn sums(&self, columns: usize) -> usize {
        match self {
            Self::Packed(matrix) => biases_of(columns / matrix.group_size),
            Self::Dense(_) => 0,
        }
    }

    /// Where the span of column `k` of `rows` rows of x begins, and the floats of one of them.
    fn span(&self, rows: usize, k: usize) -> (usize, usize) {
        let columns = SPAN.min(self.columns() - k);
        (rows * (k + k / SPAN * self.sums(SPAN)), columns + self.sums(columns))
    }

    /// Bytes that elements of a row take. `columns` is a multiple of [`BLOCK`].
    fn bytes(&self, columns: usize) -> usize {
        match self {
            Self::Packed(matrix) => columns * matrix.bits / 8,
            Self::Dense(matrix) => columns * matrix.elements.size(),
        }
    }

    /// The first element's bytes.
    fn start(&self) -> *const u8 {
        match self {
            Self::Packed(matrix) => matrix.words.as_ptr().cast(),
            Self::Dense(matrix) => matrix.elements.start(),
        }
    }

    fn kernels(&self, isa: Isa) -> Kernels {
        match self {
            Self::Packed(matrix) => Kernels::of_packed(isa, matrix.bits, matrix.group_size),
            Self::Dense(matrix) => Kernels::of_floats(isa, &matrix.elements),
        }
    }

    /// Checks everything that the kernels rely on, and returns the number of rows of x.
    fn check(&self, x: &Floats<'_>, y: &FloatsMut<'_>) -> Result<usize, Error> {
        let (rows, columns) = (self.rows(), self.columns());
        match self {
            Self::Packed(matrix) => matrix.check()?,
            Self::Dense(matrix) => length("elements", matrix.elements.len(), rows * columns)?,
        }
        length("columns", columns, columns / self.group_size() * self.group_size())?;
        let count = x.len().checked_div(columns).unwrap_or(0);
        length("x", x.len(), count * columns)?;
        length("y", y.len(), count * rows)?;
        Ok(count)
    }
}

fn length(what: &'static str, found: usize, expected: usize) -> Result<(), Error> {
    if found == expected { Ok(()) } else { Err(Error::Length { what, found, expected }) }
}

/// `y` [R, rows] = `x` [R, columns] times the transposed matrix, with the best instructions of the processor.
///
/// # Errors
/// [`Error`] if lengths do not fit or the format has no kernel; `y` is then unchanged.
pub fn product<'a>(
    activations: Activations,
    x: Floats<'_>,
    matrix: impl Into<Matrix<'a>>,
    y: FloatsMut<'_>,
) -> Result<(), Error> {
    product_with(Isa::best(), activations, x, matrix, y)
}

/// As [`product`], with the instructions of `isa`, which must be one of [`Isa::available`].
///
/// # Errors
/// As [`product`].
///
/// # Panics
/// If the processor does not have `isa`.
pub fn product_with<'a>(
    isa: Isa,
    activations: Activations,
    x: Floats<'_>,
    matrix: impl Into<Matrix<'a>>,
    y: FloatsMut<'_>,
) -> Result<(), Error> {
    let matrix = &matrix.into();
    let count = matrix.check(&x, &y)?;
    if isa != Isa::best() {
        assert!(Isa::available().contains(&isa), "the processor does not have {isa:?}");
    }
    let kernels = matrix.kernels(isa);
    let y = match y {
        FloatsMut::F32(y) => Out::F32(y.as_mut_ptr()),
        FloatsMut::Bf16(y) => Out::Bf16(y.as_mut_ptr()),
        FloatsMut::F16(y) => Out::F16(y.as_mut_ptr()),
    };
    INPUT.with_borrow_mut(|input| {
        for first in (0..count).step_by(ROWS) {
            let rows = first..count.min(first + ROWS);
            let (length, columns) = (rows.len(), matrix.columns());
            // SAFETY: the processor has the instructions, and `floats` gets room for the rows.
            let x = unsafe {
                match (activations, &kernels.packed) {
                    (Activations::Int8, Some(PackedKernels { int8, .. })) => {
                        input.int8.fill(int8, x, rows, columns);
                        Rows::Int8(&input.int8, int8)
                    }
                    _ => {
                        let floats =
                            length * (columns + columns.div_ceil(SPAN) * matrix.sums(SPAN));
                        input.floats.resize(floats.div_ceil(16), Line([0.0; 16]));
                        let start = input.floats.as_mut_ptr().cast::<f32>();
                        arrange(&kernels, x, rows, matrix, start);
                        Rows::F32(start)
                    }
                }
            };
            let task = Task { matrix, kernels, x, first, rows: length, y };
            let (pieces, outputs) = (task.pieces(), matrix.rows());
            let length = outputs.div_ceil(pieces).next_multiple_of(OUT);
            pool::run(outputs.div_ceil(length), &|piece| {
                let outputs = piece * length..outputs.min((piece + 1) * length);
                // SAFETY: `check` has compared all lengths; outputs of pieces are disjoint; the processor has the
                // instructions.
                unsafe { multiply(&task, outputs) };
            });
        }
    });
    Ok(())
}

/// A cache line, so that no vector of a row spans two.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line(#[expect(dead_code, reason = "read through pointers")] [f32; 16]);

/// Rows of x as kernels read them.
#[derive(Default)]
struct Input {
    /// Span by span, [rows, columns of the span and sums of their groups] in the order of lanes.
    floats: Vec<Line>,
    int8: int8::Rows,
}

thread_local! {
    static INPUT: RefCell<Input> = RefCell::default();
}

/// What a task multiplies.
#[derive(Clone, Copy)]
enum Rows<'a> {
    /// See [`Input::floats`].
    F32(*const f32),
    Int8(&'a int8::Rows, &'a int8::Kernels),
}

/// Where outputs are written. Pieces write disjoint ones.
#[derive(Clone, Copy)]
enum Out {
    F32(*mut f32),
    Bf16(*mut bf16),
    F16(*mut f16),
}

/// Up to [`ROWS`] rows of x times the matrix.
struct Task<'a> {
    matrix: &'a Matrix<'a>,
    kernels: Kernels,
    x: Rows<'a>,
    /// The first of the rows.
    first: usize,
    rows: usize,
    y: Out,
}

// SAFETY: threads only read through `x`, and write disjoint outputs through `y`.
unsafe impl Sync for Task<'_> {}

impl Task<'_> {
    /// Number of pieces that the work is divided into.
    fn pieces(&self) -> usize {
        let work = self.matrix.rows() * self.matrix.columns() * self.rows;
        (work / PIECE).clamp(1, pool::threads() * PIECES)
    }
}

/// Writes `rows` of `x` to `to`, span by span, as f32 in the order of lanes.
///
/// # Safety
/// `to` has room for them; the processor has the instructions of `kernels`.
unsafe fn arrange(
    kernels: &Kernels,
    x: Floats<'_>,
    rows: Range<usize>,
    matrix: &Matrix<'_>,
    to: *mut f32,
) {
    let columns = matrix.columns();
    let mut wide = [0.0; SPAN];
    for (r, row) in rows.clone().enumerate() {
        for k in (0..columns).step_by(SPAN) {
            let span = SPAN.min(columns - k);
            x.widen(row * columns + k, &mut wide[..span]);
            let (start, floats) = matrix.span(rows.len(), k);
            // SAFETY: this is the room for the span of the row.
            unsafe { (kernels.arrange)(wide.as_ptr(), to.add(start + r * floats), span) };
        }
    }
}

/// Room of a thread.
#[repr(align(64))]
struct Room {
    panel: [f32; PANEL],
    tile: [[f32; TILE]; ROWS],
    groups: Groups,
    factors: Factors,
}

thread_local! {
    static ROOM: RefCell<Box<Room>> = RefCell::new(Box::new(Room {
        panel: [0.0; PANEL],
        tile: [[0.0; TILE]; ROWS],
        groups: Groups::default(),
        factors: Factors::default(),
    }));
}

/// Computes `outputs` of all rows of `task`.
///
/// # Safety
/// The task is valid: lengths fit, nothing else writes these outputs, and the processor has the instructions.
unsafe fn multiply(task: &Task<'_>, outputs: Range<usize>) {
    ROOM.with_borrow_mut(|room| {
        for start in outputs.clone().step_by(TILE) {
            let tile = start..outputs.end.min(start + TILE);
            for k in (0..task.matrix.columns()).step_by(SPAN) {
                // SAFETY: as this function.
                unsafe { multiply_span(task, tile.clone(), k, room) };
            }
            // SAFETY: as this function.
            unsafe { write(task, tile, &room.tile) };
        }
    });
}

/// Adds the span of columns from `k` on to the sums of a tile; the first span sets them.
///
/// # Safety
/// As [`multiply`]; `tile` has at most [`TILE`] outputs.
unsafe fn multiply_span(task: &Task<'_>, tile: Range<usize>, k: usize, room: &mut Room) {
    let Task { matrix, rows, kernels, .. } = *task;
    let Room { panel, tile: sums, groups, factors } = room;
    let span = SPAN.min(matrix.columns() - k);
    let (stride, start) = (matrix.bytes(matrix.columns()), matrix.bytes(k));
    let (at, floats) = matrix.span(rows, k);
    let ahead = AHEAD * stride;
    for n in tile.clone().step_by(OUT) {
        // The last rows may be fewer than four: the last one stands in for the others, whose sums are not written.
        let lines: [usize; OUT] = std::array::from_fn(|o| (n + o).min(tile.end - 1));
        let count = span / matrix.group_size();
        if let (Matrix::Packed(matrix), Some(kernels)) = (matrix, &kernels.packed) {
            let first = lines.map(|line| line * matrix.groups() + k / matrix.group_size);
            // SAFETY: each line has that many groups in the span.
            unsafe {
                let ahead = AHEAD * matrix.groups();
                (kernels.groups)(&matrix.scales, &matrix.biases, &first, count, ahead, groups);
            }
        }
        // SAFETY: each line is a row of the matrix, whose span begins there.
        let words = lines.map(|line| unsafe { matrix.start().add(line * stride + start) });
        let mut parts = [[0.0; OUT]; MOST_ROWS];
        let mut add = |r: usize, parts: &[[f32; OUT]]| {
            for (sums, part) in sums[r..].iter_mut().zip(parts) {
                for (sum, part) in sums[n - tile.start..][..OUT].iter_mut().zip(part) {
                    *sum = if k == 0 { *part } else { *sum + part };
                }
            }
        };
        let is_fused = rows <= FUSED;
        if matches!(task.x, Rows::F32(_)) && !is_fused {
            // SAFETY: `words` and `groups` are valid for the span, and the panel for four rows of it.
            unsafe { (kernels.unpack)(&words, groups, count, panel.as_mut_ptr()) };
        }
        let mut r = 0;
        while r < rows {
            // SAFETY: as above. The span's rows of x begin at `at`, and `parts` has room for the rows of every kernel.
            let taken = unsafe {
                match task.x {
                    Rows::F32(x) if is_fused => {
                        (kernels.fused)(
                            x.add(at),
                            &words,
                            groups,
                            count,
                            ahead,
                            parts.as_mut_ptr(),
                        );
                        1
                    }
                    Rows::F32(x) => {
                        let taken = (rows - r).min(kernels.panel.len());
                        let x = x.add(at + r * floats);
                        kernels.panel[taken - 1](panel.as_ptr(), x, floats, parts.as_mut_ptr());
                        taken
                    }
                    Rows::Int8(x, kernels) => {
                        let words = &words;
                        let span = int8::Span { k, columns: span, words, groups, count, ahead };
                        x.multiply(kernels, r, &span, factors, &mut parts)
                    }
                }
            };
            add(r, &parts[..taken]);
            r += taken;
        }
    }
}

/// Writes the sums of a tile to the outputs, rounded to their type.
///
/// # Safety
/// The outputs are valid, and nothing else writes them.
unsafe fn write(task: &Task<'_>, tile: Range<usize>, sums: &[[f32; TILE]; ROWS]) {
    for (r, sums) in sums[..task.rows].iter().enumerate() {
        let at = (task.first + r) * task.matrix.rows() + tile.start;
        let sums = &sums[..tile.len()];
        // SAFETY: the outputs of row `first + r` that are in the tile begin at `at`.
        unsafe {
            match task.y {
                Out::F32(y) => y.add(at).copy_from_nonoverlapping(sums.as_ptr(), sums.len()),
                Out::Bf16(y) => {
                    for (i, sum) in sums.iter().enumerate() {
                        y.add(at + i).write(bf16::from_f32(*sum));
                    }
                }
                Out::F16(y) => {
                    for (i, sum) in sums.iter().enumerate() {
                        y.add(at + i).write(f16::from_f32(*sum));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
