//! How products are divided into pieces, and what a piece computes.

use std::cell::RefCell;
use std::ops::Range;

use half::{bf16, f16};

use super::{Activations, Finish, Input, Matrix};
use crate::elementwise::{rms_norm, silu};
use crate::float::Floats;
use crate::int8::{self, Factors};
use crate::kernel::{Groups, Kernels, MOST_ROWS, OUT, PackedKernels, SPAN, Span};
use crate::lanes::{Isa, Lanes, for_isa};
use crate::pool;

/// Rows of x that are multiplied together.
const ROWS: usize = 128;

/// Rows of the matrix whose sums are collected before they are written.
const TILE: usize = 64;

/// Rows of the matrix whose elements and scales are prefetched ahead: four calls of a kernel, as one call is shorter than the
/// latency of memory.
const AHEAD: usize = 4 * OUT;

/// Most rows of x with all their columns, in the first-level cache, whose products read the matrix in the order of memory. For
/// more rows it is read span by span.
const FEW: usize = 8;

/// Products of elements that one piece of the work has at least: some microseconds.
const PIECE: usize = 1 << 17;

/// Pieces for each thread, so that a delayed one does not delay the others.
const PIECES: usize = 4;

/// A cache line, so that no vector of a row spans two.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line(#[expect(dead_code, reason = "read through pointers")] [f32; 16]);

/// Rows of x on their way to the kernels.
#[derive(Default)]
struct Scratch {
    /// [rows, columns], after the norm.
    normed: Vec<f32>,
    /// As kernels read them: span by span, [rows, [`Kernels::span`]].
    floats: Vec<Line>,
    int8: int8::Rows,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// What a task multiplies.
#[derive(Clone, Copy)]
enum Rows<'a> {
    /// See [`Scratch::floats`].
    F32(*const f32),
    Int8(&'a int8::Rows, &'a int8::Kernels),
}

/// Where outputs are written. Pieces write disjoint ones.
#[derive(Clone, Copy)]
pub enum Out {
    F32(*mut f32),
    Bf16(*mut bf16),
    F16(*mut f16),
}

/// One product of a task.
pub struct Part<'a> {
    pub matrix: Matrix<'a>,
    pub finish: Finish<'a>,
    pub y: Out,
}

impl Part<'_> {
    /// Elements of its matrices.
    fn elements(&self) -> usize {
        let matrices = if matches!(self.finish, Finish::SwiGlu(_)) { 2 } else { 1 };
        matrices * self.matrix.rows() * self.matrix.columns()
    }
}

/// Up to [`ROWS`] rows of x times the matrices.
struct Task<'a> {
    parts: &'a [Part<'a>],
    isa: Isa,
    kernels: Kernels,
    x: Rows<'a>,
    /// The first of the rows.
    first: usize,
    rows: usize,
}

// SAFETY: threads only read through `x`, and write disjoint outputs through `y`.
unsafe impl Sync for Task<'_> {}

/// Computes the products of `count` rows.
///
/// # Safety
/// Lengths fit, the matrices have one format, and the processor has the instructions of `isa`.
pub unsafe fn run(isa: Isa, input: &Input<'_>, parts: &[Part<'_>], count: usize) {
    let Input { x, norm, activations } = *input;
    let matrix = &parts[0].matrix;
    let kernels = matrix.kernels(isa);
    let columns = matrix.columns();
    SCRATCH.with_borrow_mut(|Scratch { normed, floats, int8 }| {
        for first in (0..count).step_by(ROWS) {
            let length = ROWS.min(count - first);
            let (x, rows) = match (norm, x) {
                (Some(norm), Floats::F32(x)) => {
                    normed.resize(length * columns, 0.0);
                    rms_norm(&x[first * columns..][..length * columns], norm, normed);
                    (Floats::F32(normed), 0..length)
                }
                _ => (x, first..first + length),
            };
            // SAFETY: the processor has the instructions, and `floats` gets room for the rows.
            let x = unsafe {
                match (activations, &kernels.packed) {
                    (Activations::Int8, Some(PackedKernels { int8: kernels, .. })) => {
                        int8.fill(kernels, x, rows, columns);
                        Rows::Int8(int8, kernels)
                    }
                    _ => {
                        let last = columns.saturating_sub(1) / SPAN * SPAN;
                        let (start, room) = kernels.span(columns, length, last);
                        floats.resize((start + length * room).div_ceil(16), Line([0.0; 16]));
                        let start = floats.as_mut_ptr().cast::<f32>();
                        arrange(&kernels, x, rows, columns, start);
                        Rows::F32(start)
                    }
                }
            };
            Task { parts, isa, kernels, x, first, rows: length }.run();
        }
    });
}

impl Task<'_> {
    /// Divides the outputs of all parts into pieces, each of one part.
    fn run(&self) {
        let work = self.rows * self.parts.iter().map(Part::elements).sum::<usize>();
        let outputs: usize = self.parts.iter().map(|part| part.matrix.rows()).sum();
        let pieces = (work / PIECE).clamp(1, pool::threads() * PIECES);
        let length = outputs.div_ceil(pieces).next_multiple_of(OUT);
        let of = |part: &Part<'_>| part.matrix.rows().div_ceil(length);
        let run = |mut piece: usize| {
            for part in self.parts {
                let outputs = piece * length..part.matrix.rows().min((piece + 1) * length);
                if !outputs.is_empty() {
                    // SAFETY: as `run`; outputs of pieces are disjoint.
                    unsafe { multiply(self, part, outputs) };
                    return;
                }
                piece -= of(part);
            }
        };
        let count = self.parts.iter().map(of).sum();
        // Small parts have pieces of their own, and together no work for another thread.
        if pieces == 1 { (0..count).for_each(run) } else { pool::run(count, &run) }
    }
}

/// Writes `rows` of `x` to `to`, span by span, as kernels read them.
///
/// # Safety
/// `to` has room for them; the processor has the instructions of `kernels`.
unsafe fn arrange(
    kernels: &Kernels,
    x: Floats<'_>,
    rows: Range<usize>,
    columns: usize,
    to: *mut f32,
) {
    let mut wide = [0.0; SPAN];
    for (r, row) in rows.clone().enumerate() {
        for k in (0..columns).step_by(SPAN) {
            let span = SPAN.min(columns - k);
            x.widen(row * columns + k, &mut wide[..span]);
            let (start, floats) = kernels.span(columns, rows.len(), k);
            // SAFETY: this is the room for the span of the row.
            unsafe { (kernels.arrange)(wide.as_ptr(), to.add(start + r * floats), span) };
        }
    }
}

/// Sums of rows of x, [rows, outputs of a tile].
type Tile = [[f32; TILE]; ROWS];

/// Room of a thread.
#[repr(align(64))]
struct Room {
    matrix: MatrixRoom,
    tile: Tile,
    /// Of the second matrix of [`Finish::SwiGlu`].
    ups: Tile,
}

/// Four rows of a matrix while they are multiplied.
#[repr(align(64))]
struct MatrixRoom {
    groups: Groups,
    factors: Factors,
}

thread_local! {
    static ROOM: RefCell<Box<Room>> = RefCell::new(Box::new(Room {
        matrix: MatrixRoom {
            groups: Groups::default(),
            factors: Factors::default(),
        },
        tile: [[0.0; TILE]; ROWS],
        ups: [[0.0; TILE]; ROWS],
    }));
}

/// Computes `outputs` of all rows of `part`.
///
/// # Safety
/// The task is valid: lengths fit, nothing else writes these outputs, and the processor has the instructions.
unsafe fn multiply(task: &Task<'_>, part: &Part<'_>, outputs: Range<usize>) {
    ROOM.with_borrow_mut(|room| {
        let Room { matrix: room, tile: sums, ups } = &mut **room;
        for start in outputs.clone().step_by(TILE) {
            let tile = &(start..outputs.end.min(start + TILE));
            // SAFETY: as this function.
            unsafe {
                multiply_tile(task, &part.matrix, tile, room, sums);
                if let Finish::SwiGlu(matrix) = &part.finish {
                    multiply_tile(task, matrix, tile, room, ups);
                }
                for_isa!(task.isa, finish(
                    task: &Task<'_>, part: &Part<'_>, tile: &Range<usize>, sums: &mut Tile, ups: &Tile
                ));
                write(task, part, tile, sums);
            }
        }
    });
}

/// Sets `sums` to the products of all rows with `tile` of `matrix`.
///
/// # Safety
/// As [`multiply`]; `tile` has at most [`TILE`] outputs.
unsafe fn multiply_tile(
    task: &Task<'_>,
    matrix: &Matrix<'_>,
    tile: &Range<usize>,
    room: &mut MatrixRoom,
    sums: &mut Tile,
) {
    let spans = (0..matrix.columns()).step_by(SPAN);
    let quads = tile.clone().step_by(OUT);
    let mut multiply = |n, k| {
        // SAFETY: as this function.
        unsafe { multiply_span(task, matrix, tile, n, k, room, sums) }
    };
    if task.rows <= FEW {
        for n in quads {
            spans.clone().for_each(|k| multiply(n, k));
        }
    } else {
        for k in spans {
            quads.clone().for_each(|n| multiply(n, k));
        }
    }
}

/// Adds the span of columns from `k` on to the sums of four outputs of a tile, from `n` on; the first span sets them.
///
/// # Safety
/// As [`multiply_tile`].
unsafe fn multiply_span(
    task: &Task<'_>,
    matrix: &Matrix<'_>,
    tile: &Range<usize>,
    n: usize,
    k: usize,
    MatrixRoom { groups, factors }: &mut MatrixRoom,
    sums: &mut Tile,
) {
    let Task { rows, kernels, .. } = *task;
    let columns = SPAN.min(matrix.columns() - k);
    let count = columns / matrix.group_size();
    let (at, floats) = kernels.span(matrix.columns(), rows, k);
    // The last rows may be fewer than four: the last one stands in for the others, whose sums are not written.
    let quad = [0, 1, 2, 3].map(|o| (n + o).min(tile.end - 1));
    if let (Matrix::Packed(matrix), Some(kernels)) = (matrix, &kernels.packed) {
        quad.iter().for_each(|row| matrix.prefetch_groups(row + AHEAD, k));
        // SAFETY: each row has that many groups in the span.
        unsafe {
            let first = quad.map(|row| matrix.group(row, k));
            (kernels.groups)(&matrix.scales, &matrix.biases, &first, count, groups);
        }
    }
    let lines = quad.map(|row| matrix.line(row, k));
    let ahead = AHEAD * matrix.bytes(matrix.columns());
    let span = Span { k, columns, lines, groups, count, ahead };
    let mut parts = [[0.0; OUT]; MOST_ROWS];
    let mut r = 0;
    while r < rows {
        // SAFETY: the span is valid, its rows of x begin at `at`, and `parts` has room for the rows of every kernel.
        let taken = unsafe {
            match task.x {
                Rows::F32(x) => {
                    // Two times two rows take less time than three and one.
                    let calls = (rows - r).div_ceil(kernels.rows.len());
                    let taken = (rows - r).div_ceil(calls);
                    let x = x.add(at + r * floats);
                    kernels.rows[taken - 1](x, floats, &span, parts.as_mut_ptr());
                    taken
                }
                Rows::Int8(x, kernels) => x.multiply(kernels, r, &span, factors, &mut parts),
            }
        };
        for (sums, part) in sums[r..].iter_mut().zip(&parts[..taken]) {
            for (sum, part) in sums[n - tile.start..][..OUT].iter_mut().zip(part) {
                *sum = if k == 0 { *part } else { *sum + part };
            }
        }
        r += taken;
    }
}

/// Makes outputs of the sums of a tile.
///
/// # Safety
/// The processor has the instruction set.
#[inline(always)]
unsafe fn finish<L: Lanes>(
    task: &Task<'_>,
    part: &Part<'_>,
    tile: &Range<usize>,
    sums: &mut Tile,
    ups: &Tile,
) {
    for (r, (sums, ups)) in sums[..task.rows].iter_mut().zip(ups).enumerate() {
        let sums = &mut sums[..tile.len()];
        match part.finish {
            Finish::Add { bias, residual } => {
                if let Some(bias) = bias {
                    for (sum, bias) in sums.iter_mut().zip(&bias[tile.start..]) {
                        *sum += bias;
                    }
                }
                if let Some(residual) = residual {
                    let at = (task.first + r) * part.matrix.rows() + tile.start;
                    for (sum, residual) in sums.iter_mut().zip(&residual[at..]) {
                        *sum += residual;
                    }
                }
            }
            Finish::SwiGlu(_) => {
                for (gate, up) in sums.iter_mut().zip(ups) {
                    *gate = silu(*gate) * up;
                }
            }
        }
    }
}

/// Writes a tile to the outputs, rounded to their type.
///
/// # Safety
/// The outputs are valid, and nothing else writes them.
unsafe fn write(task: &Task<'_>, part: &Part<'_>, tile: &Range<usize>, sums: &Tile) {
    for (r, sums) in sums[..task.rows].iter().enumerate() {
        let at = (task.first + r) * part.matrix.rows() + tile.start;
        let sums = &sums[..tile.len()];
        // SAFETY: the outputs of row `first + r` that are in the tile begin at `at`.
        unsafe {
            match part.y {
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
