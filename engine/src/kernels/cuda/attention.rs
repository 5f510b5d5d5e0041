//! Attention of the few rows of each span in a pass over the span's own keys, for head sizes and numbers of
//! rows that MLX computes without a fused kernel.

use mlx_rs::{Array, Dtype};

use super::{Kernel, Launch, is_enabled};
use crate::error::Result;

const INPUTS: &[&str] = &[
    "q", "spans", "kv0", "kv1", "kv2", "kv3", "kv4", "kv5", "kv6", "kv7", "kv8", "kv9", "kv10",
    "kv11", "kv12", "kv13", "kv14", "kv15", "kv16", "kv17", "kv18", "kv19", "kv20", "kv21", "kv22",
    "kv23", "kv24", "kv25", "kv26", "kv27", "kv28", "kv29", "kv30", "kv31",
];

/// Inputs before the buffers.
const FIXED: usize = 2;

const JOIN: Kernel = Kernel {
    name: "attention_join",
    inputs: &["parts", "sums", "spans", "gates"],
    outputs: &["out"],
    numbers: &["total_rows", "span_count"],
    header: "",
    source: include_str!("attention_join.cu"),
};

/// Most spans of a launch.
pub const SPANS: usize = 32;

/// Adds `buffers` to the inputs of a launch, and the first one again until there are 1, 8 or [`SPANS`]: for each of
/// these there is a variant. Returns how many there are. Those without a span are not read.
pub(super) fn padded<'a>(inputs: &mut Vec<&'a Array>, buffers: &[&'a Array]) -> usize {
    let count = [1, 8, SPANS].into_iter().find(|&count| count >= buffers.len()).unwrap_or(SPANS);
    inputs.extend(buffers.iter().copied().chain(std::iter::repeat(buffers[0])).take(count));
    count
}

/// Names the buffers of a launch.
pub(super) fn buffers_text(count: usize) -> &'static str {
    match count {
        1 => "#define BUFFERS {kv0}\n",
        8 => "#define BUFFERS {kv0, kv1, kv2, kv3, kv4, kv5, kv6, kv7}\n",
        _ => {
            "#define BUFFERS {kv0, kv1, kv2, kv3, kv4, kv5, kv6, kv7, kv8, kv9, kv10, kv11, kv12, kv13, \
             kv14, kv15, kv16, kv17, kv18, kv19, kv20, kv21, kv22, kv23, kv24, kv25, kv26, kv27, kv28, \
             kv29, kv30, kv31}\n"
        }
    }
}

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

/// Gates of the result, side by side with the queries: [1, R, ..], of which each row begins with a query and its gate
/// for each head.
pub struct Gates<'a>(pub &'a Array);

/// Causal attention of `q` [1, R, H_q, D], the queries of the last rows of each span: [1, R, H_q D], times the sigmoid of
/// `gates`. `None` if there is no kernel for the shape.
pub fn attention(
    q: &Array,
    scale: f32,
    spans: &[AttentionSpan],
    gates: Option<Gates<'_>>,
) -> Result<Option<Array>> {
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
    let buffers: Vec<&Array> = spans.iter().map(|span| &span.kv).collect();
    let buffers = padded(&mut inputs, &buffers);
    let kernel = Kernel {
        name: "attention",
        inputs: &INPUTS[..FIXED + buffers],
        outputs: &["parts", "sums"],
        numbers: &["total_rows"],
        header: buffers_text(buffers),
        source: include_str!("attention.cu"),
    };
    let outputs = kernel.run(&Launch {
        inputs: &inputs,
        outputs: &[
            (&[parts, rows, heads, dim], Dtype::Float32),
            (&[parts, rows, heads, 2], Dtype::Float32),
        ],
        numbers: &[rows],
        constants: &[
            ("HQ", heads),
            ("HKV", kv_heads),
            ("D", dim),
            ("SPLIT", SPLIT),
            ("SCALE", scale.to_bits().cast_signed()),
            ("SPANS", i32::try_from(buffers).expect("a few buffers")),
        ],
        dtype,
        blocks: [parts, kv_heads * ((queries + QUERIES - 1) / QUERIES), count],
        cluster: 1,
        threads: THREADS,
        shared: 0,
    })?;
    let gate_row = gates.as_ref().map_or(0, |gates| gates.0.dim(-1));
    let outputs = JOIN.run(&Launch {
        inputs: &[&outputs[0], &outputs[1], &table, gates.map_or(q, |gates| gates.0)],
        outputs: &[(&[1, rows, heads * dim], dtype)],
        numbers: &[rows, count],
        constants: &[("HQ", heads), ("D", dim), ("SPLIT", SPLIT), ("GATE_ROW", gate_row)],
        dtype,
        blocks: [heads, rows, 1],
        cluster: 1,
        threads: dim,
        shared: 0,
    })?;
    Ok(outputs.into_iter().next())
}
