//! Attention of the few rows of each span in a pass over the span's own keys: MLX has no fused kernel for some head sizes,
//! and compiles a plan of cuDNN for each new number of rows and keys (43 ms on an H200).

use mlx_rs::{Array, Dtype};

use super::kernel::SPANS;
use super::{Kernel, Launch, is_enabled};
use crate::error::Result;
use crate::kernels::LaunchSpan;

const KERNEL: Kernel = Kernel {
    name: "attention",
    inputs: &["q"],
    outputs: &["parts", "sums"],
    numbers: &["total_rows"],
    header: "",
    source: include_str!("attention.cu"),
};

const JOIN: Kernel = Kernel {
    name: "attention_join",
    inputs: &["parts", "sums", "gates"],
    outputs: &["out"],
    numbers: &["total_rows"],
    header: "",
    source: include_str!("attention_join.cu"),
};

/// Rows of a span that have the kernel after any number of keys: those of a draft.
const FEW: i32 = 8;

/// Most rows of a span in other launches.
const ROWS: i32 = 64;

/// Most rows of such a launch times the keys of its longest span. Each row reads the keys again, in groups of [`QUERIES`]
/// queries, and has a partial result for each [`SPLIT`] keys of the longest span.
const ROWS_TIMES_KEYS: i64 = 1 << 17;

/// Whether the kernel takes these spans in one launch: the rows of each, and the keys that its last row sees.
pub fn takes(spans: impl Iterator<Item = (i32, i32)>) -> bool {
    let (mut count, mut most, mut total, mut longest) = (0, 0, 0, 0);
    for (rows, keys) in spans {
        (most, total, longest) = (rows.max(most), total + i64::from(rows), keys.max(longest));
        count += 1;
    }
    let is_small = most <= ROWS && total * i64::from(longest) <= ROWS_TIMES_KEYS;
    count <= SPANS && (most <= FEW || is_small)
}

/// Whether there is a kernel for queries [1, R, H_q, D] and this number of key heads.
pub fn has_attention(q: &Array, kv_heads: i32) -> bool {
    is_enabled() && [64, 96, 128, 192, 256].contains(&q.dim(3)) && q.dim(2) % kv_heads == 0
}

/// Keys of a part. A constant, so that the order of sums depends on the length of a span only.
const SPLIT: i32 = 64;

/// Queries of a block.
const QUERIES: i32 = 4;

/// Threads of a block.
const THREADS: i32 = 256;

/// Gates of the result, side by side with the queries: [1, R, ..], of which each row begins with a query and its gate
/// for each head.
pub struct Gates<'a>(pub &'a Array);

/// Causal attention of `q` [1, R, H_q, D], the queries of the last rows of each span: [1, R, H_q D], times the sigmoid of
/// `gates`. [`has_attention`] and [`takes`] must be true.
pub fn attention(
    q: &Array,
    scale: f32,
    spans: &[LaunchSpan<'_>],
    gates: Option<Gates<'_>>,
) -> Result<Array> {
    let [rows, heads, dim] = [q.dim(1), q.dim(2), q.dim(3)];
    let kv_heads = spans[0].buffers.own.dim(1) / 2;
    let dtype = q.dtype();
    let count = i32::try_from(spans.len()).expect("a few spans");
    let longest = spans.iter().map(LaunchSpan::keys).max().unwrap_or_default();
    let parts = (longest + SPLIT - 1) / SPLIT;
    let queries = spans.iter().map(|span| span.rows).max().unwrap_or_default() * (heads / kv_heads);
    let outputs = KERNEL.run(&Launch {
        inputs: &[q],
        outputs: &[
            (&[parts, rows, heads, dim], Dtype::Float32),
            (&[parts, rows, heads, 2], Dtype::Float32),
        ],
        numbers: &[rows],
        spans,
        constants: &[
            ("HQ", heads),
            ("HKV", kv_heads),
            ("D", dim),
            ("SPLIT", SPLIT),
            ("SCALE", scale.to_bits().cast_signed()),
        ],
        dtype,
        blocks: [parts, kv_heads * ((queries + QUERIES - 1) / QUERIES), count],
        cluster: 1,
        threads: THREADS,
        shared: 0,
    })?;
    let gate_row = gates.as_ref().map_or(0, |gates| gates.0.dim(-1));
    let outputs = JOIN.run(&Launch {
        inputs: &[&outputs[0], &outputs[1], gates.map_or(q, |gates| gates.0)],
        outputs: &[(&[1, rows, heads * dim], dtype)],
        numbers: &[rows],
        spans,
        constants: &[("HQ", heads), ("D", dim), ("SPLIT", SPLIT), ("GATE_ROW", gate_row)],
        dtype,
        blocks: [heads, rows, 1],
        cluster: 1,
        threads: dim,
        shared: 0,
    })?;
    Ok(outputs.into_iter().next().expect("`run` returns as many arrays as there are outputs"))
}
