//! Attention of the few rows of each span in a pass over the span's own keys, for head sizes and numbers of
//! rows that MLX computes without a fused kernel.

use mlx_rs::{Array, Dtype};

use super::{Kernel, Launch, is_enabled};
use crate::error::Result;

const PARTS: Kernel = Kernel {
    name: "attention",
    inputs: &["q", "spans", "kv0", "kv1", "kv2", "kv3", "kv4", "kv5", "kv6", "kv7"],
    outputs: &["parts", "sums"],
    header: "",
    source: include_str!("attention.cu"),
    contiguous: true,
};

const JOIN: Kernel = Kernel {
    name: "attention_join",
    inputs: &["parts", "sums", "spans"],
    outputs: &["out"],
    header: "",
    source: include_str!("attention_join.cu"),
    contiguous: true,
};

/// Most spans of a launch.
pub const SPANS: usize = 8;

/// Most rows of a span. Each row reads the keys again, in groups of [`QUERIES`] queries.
pub const ROWS: i32 = 8;

/// Keys of a part. A constant, so that the order of sums depends on the length of a span only.
const SPLIT: i32 = 256;

/// Queries of a block.
const QUERIES: i32 = 4;

/// Threads of a block.
const THREADS: i32 = 256;

/// Keys and values of a span, and the rows that attend to them.
pub struct AttentionSpan {
    /// Rows of the span in `q`.
    pub rows: i32,
    /// Keys, those of the rows included.
    pub keys: i32,
    /// Keys and then values, [1, 2 H_kv, capacity, D].
    pub kv: Array,
}

/// Causal attention of `q` [1, R, H_q, D], the queries of the last rows of each span: [1, R, H_q D]. `None` if there
/// is no kernel for the shape.
pub fn attention(q: &Array, scale: f32, spans: &[AttentionSpan]) -> Result<Option<Array>> {
    let [rows, heads, dim] = [q.dim(1), q.dim(2), q.dim(3)];
    let kv_heads = spans[0].kv.dim(1) / 2;
    let fits = spans.len() <= SPANS
        && spans.iter().all(|span| span.rows <= ROWS)
        && [64, 96, 128, 192, 256].contains(&dim)
        && heads % kv_heads == 0;
    if !is_enabled() || !fits {
        return Ok(None);
    }
    let dtype = q.dtype();
    let mut table = Vec::with_capacity(4 * spans.len());
    let mut first = 0;
    for span in spans {
        table.extend([first, span.rows, span.keys, span.kv.dim(2)]);
        first += span.rows;
    }
    let count = i32::try_from(spans.len()).expect("a few spans");
    let table = Array::from_slice(&table, &[count, 4]);
    let longest = spans.iter().map(|span| span.keys).max().unwrap_or_default();
    let parts = (longest + SPLIT - 1) / SPLIT;
    let queries = spans.iter().map(|span| span.rows).max().unwrap_or_default() * (heads / kv_heads);

    let mut inputs = vec![q, &table];
    // Parameters without a span are not read.
    let all = spans.iter().chain(std::iter::repeat(&spans[0])).take(SPANS);
    inputs.extend(all.map(|span| &span.kv));
    let outputs = PARTS.run(&Launch {
        inputs: &inputs,
        outputs: &[
            (&[parts, rows, heads, dim], Dtype::Float32),
            (&[parts, rows, heads, 2], Dtype::Float32),
        ],
        constants: &[
            ("HQ", heads),
            ("HKV", kv_heads),
            ("D", dim),
            ("SPLIT", SPLIT),
            ("SCALE", scale.to_bits().cast_signed()),
        ],
        dtype,
        blocks: [parts, kv_heads * ((queries + QUERIES - 1) / QUERIES), count],
        threads: THREADS,
        shared: 0,
    })?;
    let outputs = JOIN.run(&Launch {
        inputs: &[&outputs[0], &outputs[1], &table],
        outputs: &[(&[1, rows, heads * dim], dtype)],
        constants: &[("HQ", heads), ("D", dim), ("SPLIT", SPLIT)],
        dtype,
        blocks: [heads, rows, 1],
        threads: dim,
        shared: 0,
    })?;
    Ok(outputs.into_iter().next())
}
