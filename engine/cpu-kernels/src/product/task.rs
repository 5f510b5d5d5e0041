//! How products are divided into pieces, and what a piece computes.

use std::cell::RefCell;
use std::ops::Range;

use half::{bf16, f16};

use super::{Finish, Input, Matrix};
use crate::elementwise::{rms_norm, silu};
use crate::float::Floats;
use crate::kernel::{Kernels, OUT, SPAN, TILE};
use crate::lanes::{Isa, Lanes, for_isa};
use crate::pool;

/// Rows of x that are multiplied together.
const ROWS: usize = 128;

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
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
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
    /// See [`Scratch::floats`].
    x: *const f32,
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
    let kernels = matrix.kernels(isa, activations);
    let columns = matrix.columns();
    SCRATCH.with_borrow_mut(|Scratch { normed, floats }| {
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
            let last = columns.saturating_sub(1) / SPAN * SPAN;
            let (start, room) = kernels.span(columns, length, last);
            floats.resize((start + length * room).div_ceil(16), Line([0.0; 16]));
            let to = floats.as_mut_ptr().cast::<f32>();
            // SAFETY: the processor has the instructions, and `floats` has room for the rows.
            unsafe { arrange(&kernels, x, rows, columns, to) };
            let x = to.cast_const();
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
            wide[span..].fill(0.0);
            let (start, floats) = kernels.span(columns, rows.len(), k);
            // SAFETY: this is the room for the span of the row.
            unsafe { (kernels.arrange)(wide.as_ptr(), to.add(start + r * floats), span) };
        }
    }
}

/// Sums of rows of x, [rows, outputs of a tile].
type Tile = [[f32; TILE]; ROWS];

/// Room of a thread.
struct Room {
    tile: Tile,
    /// The tile of the second matrix of [`Finish::SwiGlu`].
    ups: Tile,
}

thread_local! {
    static ROOM: RefCell<Box<Room>> = RefCell::new(Box::new(Room {
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
        let Room { tile: sums, ups } = &mut **room;
        for start in outputs.clone().step_by(TILE) {
            let tile = &(start..outputs.end.min(start + TILE));
            // SAFETY: as this function.
            unsafe {
                multiply_tile(task, &part.matrix, tile, sums);
                if let Finish::SwiGlu(matrix) = &part.finish {
                    multiply_tile(task, matrix, tile, ups);
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
    sums: &mut Tile,
) {
    let Task { x, rows, kernels, .. } = task;
    let columns = matrix.columns();
    sums[..*rows].as_flattened_mut().fill(0.0);
    let in_order = *rows <= FEW && columns > SPAN;
    let outputs = if in_order { OUT } else { TILE };
    for n in tile.clone().step_by(outputs) {
        for k in (0..columns).step_by(SPAN) {
            let (at, floats) = kernels.span(columns, *rows, k);
            let strip = matrix.strip(n, outputs.min(tile.end - n), k, SPAN.min(columns - k));
            let sums = sums.as_mut_ptr().cast::<f32>().wrapping_add(n - tile.start);
            // SAFETY: as this function. The rows of the span begin at `at`.
            unsafe { kernels.multiply(x.add(at), floats, *rows, &strip, sums) };
        }
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
