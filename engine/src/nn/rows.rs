//! Rows of passes: made of tokens, cut out, picked and joined. Where the operations of a pass run at once, picking and joining do as well.

use std::ops::Range;

use mlx_rs::Array;
use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;

use crate::error::Result;
use crate::kernels::cpu;

/// Token ids as an array, u32 [R].
pub fn token_ids(tokens: &[u32]) -> Array {
    let rows = i32::try_from(tokens.len()).expect("a context has fewer than 2^31 tokens");
    Array::from_slice(tokens, &[rows])
}

/// Rows of `x` [1, R, ..].
pub fn rows_of(x: &Array, rows: Range<i32>) -> Result<Array> {
    if rows.len() == x.dim(1) as usize { Ok(x.clone()) } else { Ok(x.try_index((.., rows))?) }
}

/// These rows of `x` [1, R, D], in this order: [1, rows, D].
pub fn pick_rows(x: &Array, rows: &[i32]) -> Result<Array> {
    let places: Vec<[i32; 2]> = rows.iter().map(|row| [0, *row]).collect();
    match cpu::pick_rows(&[x], &places) {
        Some(picked) => picked,
        None => Ok(x.take_axis(Array::from_slice(rows, &[rows.len() as i32]), 1)?),
    }
}

/// Rows of arrays [1, R, D] one after another: [1, sum of rows, D].
pub fn joined_rows(parts: &[(&Array, Range<i32>)]) -> Result<Array> {
    if let [(x, rows)] = parts
        && rows.len() == x.dim(1) as usize
    {
        return Ok((*x).clone());
    }
    let arrays: Vec<&Array> = parts.iter().map(|(x, _)| *x).collect();
    let places =
        (0i32..).zip(parts).flat_map(|(i, (_, rows))| rows.clone().map(move |row| [i, row]));
    match cpu::pick_rows(&arrays, &places.collect::<Vec<_>>()) {
        Some(joined) => joined,
        None => {
            let parts = parts.iter().map(|(x, rows)| rows_of(x, rows.clone()));
            Ok(concatenate(&parts.collect::<Result<Vec<_>>>()?, 1)?)
        }
    }
}

/// The columns of `a` [1, R, A], and those of `b` [1, R, B] beside them: [1, R, A + B].
pub fn beside(a: &Array, b: &Array) -> Result<Array> {
    match cpu::beside(a, b) {
        Some(joined) => joined,
        None => Ok(concatenate(&[a, b], 2)?),
    }
}
