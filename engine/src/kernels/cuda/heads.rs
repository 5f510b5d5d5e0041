//! Queries, keys and values from their projections: norms, rotation, and the write to the caches, in one kernel.

use mlx_rs::{Array, Dtype};

use super::attention::{AttentionSpan, Gates, ROWS, SPANS, attention, buffers_text, padded};
use super::{Kernel, Launch, is_enabled};
use crate::cache::Span;
use crate::error::Result;
use crate::kernels::{Destination, HeadsRows};
use crate::nn::{Heads, Outputs};

const INPUTS: &[&str] = &[
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
    "wavelengths",
    "rows",
    "kv0",
    "kv1",
    "kv2",
    "kv3",
    "kv4",
    "kv5",
    "kv6",
    "kv7",
    "kv8",
    "kv9",
    "kv10",
    "kv11",
    "kv12",
    "kv13",
    "kv14",
    "kv15",
    "kv16",
    "kv17",
    "kv18",
    "kv19",
    "kv20",
    "kv21",
    "kv22",
    "kv23",
    "kv24",
    "kv25",
    "kv26",
    "kv27",
    "kv28",
    "kv29",
    "kv30",
    "kv31",
];

/// Inputs before the buffers.
const FIXED: usize = 7;

/// Whether there is a kernel for these heads and the rows of `spans`.
pub fn has_heads(heads: &Heads<'_>, spans: &[Span<'_>]) -> bool {
    let rotates = heads.rope.is_none_or(|rope| rope.has_plain_halves());
    let (q_norm, k_norm) = (heads.q_norm, heads.k_norm);
    let is_per_head = |norm: &crate::nn::RmsNorm| norm.weight.dim(0) == heads.head_dim;
    let alike = match (q_norm, k_norm) {
        (Some(q), Some(k)) => {
            is_per_head(q) && is_per_head(k) && q.eps.to_bits() == k.eps.to_bits()
        }
        (None, None) => true,
        _ => false,
    };
    is_enabled()
        && spans.len() <= SPANS
        && spans.iter().all(|span| span.rows <= ROWS)
        && rotates
        && alike
        && [64, 96, 128, 192, 256].contains(&heads.head_dim)
}

/// [`crate::kernels::heads`]
pub fn attend_heads(
    of: &Heads<'_>,
    projected: &Outputs<3>,
    scale: f32,
    destinations: &[Destination<'_>],
) -> Result<HeadsRows> {
    let first = match projected {
        Outputs::Joined(all) => all,
        Outputs::Apart([q, ..]) => q,
    };
    let q = heads(of, projected, destinations)?;
    let span = |to: &Destination<'_>| AttentionSpan {
        rows: to.rows,
        keys: to.keys(),
        kv: to.buffer.clone(),
    };
    let spans: Vec<AttentionSpan> = destinations.iter().map(span).collect();
    let mixed = attention(&q, scale, &spans, of.gated.then_some(Gates(first)))?;
    let mixed = mixed.expect("checked by `has_heads`");
    Ok(HeadsRows { mixed, written_with: q })
}

/// Writes the keys and values of all rows to `destinations`, at most [`SPANS`], and returns the queries
/// [1, R, H_q, D]. The writes happen when these are evaluated.
fn heads(
    heads: &Heads<'_>,
    projected: &Outputs<3>,
    destinations: &[Destination<'_>],
) -> Result<Array> {
    let ([q, k, v], joined) = match projected {
        Outputs::Joined(all) => ([all; 3], 1),
        Outputs::Apart(parts) => (parts.each_ref(), 0),
    };
    let &Heads { heads: h, kv_heads: h_kv, head_dim: d, gated, rope, q_norm, k_norm, .. } = heads;
    let dtype = q.dtype();
    let mut table = Vec::new();
    for (span, to) in (0..).zip(destinations) {
        for row in 0..to.rows {
            table.extend([to.position + row, span, to.place + row, to.buffer.dim(2)]);
        }
    }
    let count = i32::try_from(table.len() / 4).expect("a pass has fewer than 2^31 rows");
    let table = Array::from_slice(&table, &[count, 4]);
    // Inputs that are not used are not read.
    let weight = |norm: Option<&crate::nn::RmsNorm>| norm.map(|norm| norm.weight.clone());
    let (q_weight, k_weight) = (weight(q_norm), weight(k_norm));
    let wavelengths = rope.and_then(|rope| rope.wavelengths());
    let mut inputs = vec![
        q,
        k,
        v,
        q_weight.as_ref().unwrap_or(q),
        k_weight.as_ref().unwrap_or(q),
        wavelengths.unwrap_or(&table),
        &table,
    ];
    let buffers: Vec<&Array> = destinations.iter().map(|to| to.buffer).collect();
    let spans = padded(&mut inputs, &buffers);
    let bits = |number: f32| number.to_bits().cast_signed();
    let kernel = Kernel {
        name: "heads",
        inputs: &INPUTS[..FIXED + spans],
        outputs: &["out"],
        numbers: &[],
        header: buffers_text(spans),
        source: include_str!("heads.cu"),
    };
    let shape = [1, count, h, d];
    let outputs = kernel.run(&Launch {
        inputs: &inputs,
        outputs: &[(&shape, dtype)],
        numbers: &[],
        constants: &[
            ("HQ", h),
            ("HKV", h_kv),
            ("D", d),
            ("GATED", i32::from(gated)),
            ("JOINED", joined),
            ("NORMED", i32::from(q_norm.is_some())),
            ("EPS", bits(q_norm.map_or(0.0, |norm| norm.eps))),
            ("DIMS", rope.map_or(0, |rope| rope.dims())),
            ("STRETCHED", i32::from(wavelengths.is_some())),
            ("BASE", bits(rope.map_or(1.0, |rope| rope.theta()).log2())),
            ("SCALE", bits(rope.map_or(1.0, |rope| rope.scale()))),
            ("SPANS", i32::try_from(spans).expect("a few spans")),
        ],
        dtype,
        blocks: [h + 2 * h_kv, count, 1],
        cluster: 1,
        threads: d,
        shared: 0,
    })?;
    debug_assert!(destinations.len() <= SPANS && dtype != Dtype::Float64);
    Ok(outputs.into_iter().next().expect("`run` returns as many arrays as there are outputs"))
}
