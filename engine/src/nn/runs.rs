//! Runs: spans of a pass that a recurrent layer computes together.
//!
//! Short spans of the same number of rows, such as the steps of all sequences that decode, are stacked in
//! one batch. Each element of a batch is computed as if it were alone.

use mlx_rs::Array;
use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;

use crate::cache::{LayerCache, Recurrent, Span};
use crate::error::Result;
use crate::lazy::reshape;

/// Spans up to this long are stacked, and use the short form of a recurrence. The chunked form costs the same
/// for 1 and 64 rows.
pub(super) const SHORT_ROWS: i32 = 8;

/// Neighbouring spans with the same number of rows.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// The first of them.
    first: usize,
    count: i32,
    /// Rows of each.
    rows: i32,
    /// The first row of the first.
    start: i32,
}

impl Run {
    /// The runs of a pass. Spans that are not short run alone.
    fn all(spans: &[Span<'_>]) -> Vec<Self> {
        let mut runs: Vec<Self> = Vec::new();
        let mut start = 0;
        for (first, span) in spans.iter().enumerate() {
            match runs.last_mut() {
                Some(run) if run.rows == span.rows && run.is_short() => run.count += 1,
                _ => runs.push(Self { first, count: 1, rows: span.rows, start }),
            }
            start += span.rows;
        }
        runs
    }

    fn is_short(&self) -> bool {
        self.rows <= SHORT_ROWS
    }

    fn spans(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.count as usize
    }

    /// Its rows of `x` [1, R, ..] as a batch [B, T, ..].
    fn rows_of(&self, x: &Array) -> Result<Array> {
        let &Self { start, count, rows, .. } = self;
        let end = start + count * rows;
        let part = if end - start == x.dim(1) { x.clone() } else { x.try_index((.., start..end))? };
        if count == 1 { Ok(part) } else { reshape(&part, &[count, rows, x.dim(-1)]) }
    }
}

/// Runs `mix` on batches of the rows `x` [1, R, ..] of all spans, and joins what it returns: [1, R, ..].
///
/// `mix` receives rows of B spans, [B, T, ..], and the entry `layer` of each of their caches, which it
/// advances. It returns [B, T, ..].
pub fn by_run<const N: usize>(
    x: [&Array; N],
    spans: &mut [Span<'_>],
    layer: usize,
    mut mix: impl FnMut([Array; N], &mut [&mut Recurrent]) -> Result<Array>,
) -> Result<Array> {
    let runs = Run::all(spans);
    let mut parts: Vec<Option<Array>> = vec![None; runs.len()];
    for (first, run) in runs.iter().enumerate() {
        if parts[first].is_some() {
            continue;
        }
        let stacked = |&i: &usize| i == first || (runs[i].rows == run.rows && run.is_short());
        let batch: Vec<usize> = (first..runs.len()).filter(stacked).collect();
        let own = x.map(|x| -> Result<Array> {
            let rows = batch.iter().map(|&i| runs[i].rows_of(x)).collect::<Result<Vec<_>>>()?;
            if let [rows] = &rows[..] { Ok(rows.clone()) } else { Ok(concatenate(&rows, 0)?) }
        });
        let own: Vec<Array> = own.into_iter().collect::<Result<_>>()?;
        let own = own.try_into().expect("as many arrays as there were");
        let members: Vec<usize> = batch.iter().flat_map(|&i| runs[i].spans()).collect();
        let caches = spans.iter_mut().enumerate().filter(|(i, _)| members.contains(i));
        let mut caches: Vec<_> = caches.map(|(_, span)| recurrent(span, layer)).collect();
        let y = mix(own, &mut caches)?;
        let mut start = 0;
        for i in batch {
            let Run { count, rows, .. } = runs[i];
            let own =
                if count == y.dim(0) { y.clone() } else { y.try_index(start..start + count)? };
            parts[i] = Some(reshape(&own, &[1, count * rows, y.dim(-1)])?);
            start += count;
        }
    }
    let parts: Vec<Array> = parts.into_iter().flatten().collect();
    match &parts[..] {
        [part] => Ok(part.clone()),
        parts => Ok(concatenate(parts, 1)?),
    }
}

/// The recurrent cache of a layer.
fn recurrent<'a>(span: &'a mut Span<'_>, layer: usize) -> &'a mut Recurrent {
    match &mut span.cache.layers[layer] {
        LayerCache::Recurrent(recurrent) => recurrent,
        _ => unreachable!("new_cache made this layer's cache"),
    }
}
