//! Attention of the few rows of several spans over their own keys, in one launch for the parts of
//! keys and one that joins them.
//!
//! MLX's operation reads the keys of one sequence from one array: a pass of N streams would have N
//! launches, and a prefix that requests share would be copied for each of them. The kernel reads
//! all buffers where they lie. A buffer that several spans share is one input; Metal has 31 of them
//! for a kernel, so up to [`MOST_BUFFERS`] hold keys, and further spans have another launch. For
//! one span without shared rows, layers compute MLX's operation, which is one launch. The speed of
//! none of it was measured on a Mac.

use std::rc::Rc;

use mlx_rs::{Array, Dtype};

use super::append::earlier;
use super::kernel::{BUFFERS, NAMES, choice};
use super::{Kernel, LANES, Launch, is_enabled};
use crate::cache::SharedKv;
use crate::error::Result;
use crate::kernels::LaunchSpan;

const KERNELS: [Kernel; 2] = [
    Kernel { name: "attention", source: include_str!("attention.metal") },
    Kernel { name: "attention_join", source: include_str!("attention_join.metal") },
];

/// Most rows of a span: those of a draft.
pub const MOST_ROWS: i32 = 8;

/// Largest sum over the spans of a launch of rows times keys. Each row has a partial result for
/// each [`SPLIT`] keys: with 16 heads of 256, they take at most 135 MB. A span alone may have more.
const ROWS_TIMES_KEYS: i64 = 1 << 19;

/// Keys of a part. A constant, so that the order of sums depends on the length of a span only, and
/// a block of shared rows, so that a part lies in one buffer.
const SPLIT: i32 = 64;

/// Queries of a threadgroup.
const QUERIES: i32 = 4;

/// Parts that are joined at a time.
const TIME: i32 = 64;

/// Most buffers of keys and outputs that are waited for: those of the kernel without queries, numbers, and the two outputs.
const MOST_BUFFERS: usize = BUFFERS - 4;

/// Buffers in a variant of the kernel. Other numbers of buffers are rounded up, so that few
/// variants are compiled.
const VARIANTS: [usize; 3] = [3, 9, MOST_BUFFERS];

/// Whether there is a kernel for queries [1, R, H_q, D] and this number of key heads.
pub fn has_attention(q: &Array, kv_heads: i32) -> bool {
    let [heads, dim] = [q.dim(2), q.dim(3)];
    is_enabled()
        && dim % LANES == 0
        && dim <= 256
        && heads % kv_heads == 0
        && matches!(q.dtype(), Dtype::Float32 | Dtype::Bfloat16 | Dtype::Float16)
}

/// Whether one launch takes these spans.
pub fn takes(spans: &[LaunchSpan<'_>]) -> bool {
    let products = spans.iter().map(|span| i64::from(span.rows) * i64::from(span.keys()));
    spans.iter().all(|span| span.rows <= MOST_ROWS)
        && (spans.len() == 1 || products.sum::<i64>() <= ROWS_TIMES_KEYS)
        && spans.len() + shared_buffers(spans).len() + earlier(spans).len() <= MOST_BUFFERS
}

/// Whether the kernel does better than MLX's operation for each of these spans, which copies shared rows, and waits for rows
/// that a kernel appends.
pub fn is_worth(spans: &[LaunchSpan<'_>]) -> bool {
    let is_slow =
        |span: &LaunchSpan<'_>| span.buffers.shared.is_some() || span.buffers.after.is_some();
    spans.len() > 1 || spans.iter().any(is_slow)
}

/// The buffers of shared rows, each once.
fn shared_buffers<'a>(spans: &[LaunchSpan<'a>]) -> Vec<&'a SharedKv> {
    let mut buffers: Vec<&SharedKv> = Vec::new();
    for shared in spans.iter().filter_map(|span| span.buffers.shared) {
        if !buffers.iter().any(|known| Rc::ptr_eq(&known.buffer, &shared.buffer)) {
            buffers.push(shared);
        }
    }
    buffers
}

/// Causal attention of `q` [1, R, H_q, D], the queries of the last rows of each span, times the
/// sigmoid of `gates` [1, R, H_q D]: [1, R, H_q D]. [`has_attention`] and [`takes`] must be true.
pub fn attention(
    q: &Array,
    gates: Option<&Array>,
    scale: f32,
    spans: &[LaunchSpan<'_>],
) -> Result<Array> {
    attention_by(KERNELS, q, gates, scale, spans)
}

/// [`attention`] by the kernels of parts and of their join.
pub(super) fn attention_by(
    [of_parts, join]: [Kernel; 2],
    q: &Array,
    gates: Option<&Array>,
    scale: f32,
    spans: &[LaunchSpan<'_>],
) -> Result<Array> {
    let [rows, heads, dim] = [q.dim(1), q.dim(2), q.dim(3)];
    let dtype = q.dtype();
    let kv_heads = spans[0].buffers.own.dim(1) / 2;
    let table = Table::new(spans);
    let count = i32::try_from(table.numbers.len()).expect("a launch has few spans");
    let numbers = Array::from_slice(&table.numbers, &[count]);
    let used = table.buffers.len();
    let variant = VARIANTS.into_iter().find(|most| *most >= used).unwrap_or(used);
    let mut inputs: Vec<(&str, &Array)> = vec![("q", q), ("numbers", &numbers)];
    // Names without a buffer are not read.
    let buffers = table.buffers.iter().copied().chain(std::iter::repeat(q));
    inputs.extend(NAMES.into_iter().zip(buffers).take(variant));
    let shape = [table.results, heads, dim];
    let queries = spans.iter().map(|span| span.rows).max().unwrap_or_default() * (heads / kv_heads);
    let shared_constants = [("HQ", heads), ("D", dim), ("SPLIT", SPLIT)];
    let [own, of_join] = [
        [("HKV", kv_heads), ("SCALE", scale.to_bits().cast_signed())],
        [("TIME", TIME), ("GATED", i32::from(gates.is_some()))],
    ];
    let parts = of_parts.run(&Launch {
        header: format!("#define BUFFER(i) {}\n", choice(&NAMES[..variant])),
        inputs: &inputs,
        in_place: &[],
        outputs: &[
            ("parts", &shape, Dtype::Float32),
            ("sums", &[table.results, heads, 2], Dtype::Float32),
        ],
        constants: &[&shared_constants[..], &own].concat(),
        dtype,
        groups: [table.parts, kv_heads * ((queries + QUERIES - 1) / QUERIES), 1],
        threads: dim,
    })?;
    let mut header = String::new();
    let mut inputs = vec![("parts", &parts[0]), ("sums", &parts[1]), ("numbers", &numbers)];
    match gates {
        Some(gates) => inputs.push(("gates", gates)),
        None => header += "#define gates parts\n",
    }
    let outputs = join.run(&Launch {
        header,
        inputs: &inputs,
        in_place: &[],
        outputs: &[("out", &[1, rows, heads * dim], dtype)],
        constants: &[&shared_constants[..], &of_join].concat(),
        dtype,
        groups: [1, heads, rows],
        threads: dim,
    })?;
    Ok(outputs.into_iter().next().expect("`run` returns as many arrays as there are outputs"))
}

/// What the kernels read of the spans.
struct Table<'a> {
    /// The number of spans, and the numbers of each that attention.metal names.
    numbers: Vec<i32>,
    /// The buffers of keys, those of own rows in the order of spans and then those of shared rows; then outputs of kernels
    /// that come before this one.
    buffers: Vec<&'a Array>,
    /// Parts of all spans.
    parts: i32,
    /// Partial results of all rows: one for each part of a row's span.
    results: i32,
}

impl<'a> Table<'a> {
    fn new(spans: &[LaunchSpan<'a>]) -> Self {
        let number = |count: usize| i32::try_from(count).expect("a launch has few buffers");
        let shared = shared_buffers(spans);
        let mut numbers = vec![number(spans.len())];
        let (mut row, mut parts, mut results) = (0, 0, 0);
        for (i, span) in spans.iter().enumerate() {
            let (keys, own) = (span.keys(), span.buffers.own);
            numbers.extend([row, span.rows, keys, results, parts]);
            let place =
                |kv: &SharedKv| shared.iter().position(|s| Rc::ptr_eq(&s.buffer, &kv.buffer));
            let [shared_rows, buffer, capacity] = match span.buffers.shared {
                Some(kv) => {
                    let place = place(kv).expect("`shared_buffers` has all of them");
                    [kv.rows, number(spans.len() + place), kv.buffer.dim(2)]
                }
                None => [0; 3],
            };
            numbers.extend([shared_rows, number(i), own.dim(2), buffer, capacity]);
            let own_parts = (keys + SPLIT - 1) / SPLIT;
            row += span.rows;
            parts += own_parts;
            results += own_parts * span.rows;
        }
        let own = spans.iter().map(|span| span.buffers.own);
        let earlier = earlier(spans).into_iter().map(|output| &**output);
        let buffers = own.chain(shared.iter().map(|kv| &*kv.buffer)).chain(earlier).collect();
        Self { numbers, buffers, parts, results }
    }
}
