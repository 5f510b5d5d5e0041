//! Queries, keys and values from their projections: norms, rotation, and the write to the caches, in one kernel.

use mlx_rs::Array;

use super::attention::{Gates, attention, takes};
use super::{Kernel, Launch, is_enabled};
use crate::cache::Span;
use crate::error::Result;
use crate::kernels::{HeadsView, LaunchSpan, NormView, Outputs};

const KERNEL: Kernel = Kernel {
    name: "heads",
    inputs: &["q", "k", "v", "q_norm", "k_norm", "wavelengths"],
    outputs: &["out"],
    numbers: &[],
    header: "",
    source: include_str!("heads.cu"),
};

/// Returns true if there is a kernel for these heads and the rows of `spans`.
pub fn has_heads(heads: &HeadsView<'_>, spans: &[Span<'_>]) -> bool {
    let rotates = heads.rotation.is_none_or(|rotation| rotation.has_plain_halves);
    let (q_norm, k_norm) = (heads.q_norm, heads.k_norm);
    let is_per_head = |norm: NormView<'_>| norm.weight.dim(0) == heads.head_dim;
    let alike = match (q_norm, k_norm) {
        (Some(q), Some(k)) => {
            is_per_head(q) && is_per_head(k) && q.eps.to_bits() == k.eps.to_bits()
        }
        (None, None) => true,
        _ => false,
    };
    is_enabled()
        && takes(spans.iter().map(|span| (span.rows, span.offset() + span.rows)))
        && rotates
        && alike
        && [64, 96, 128, 192, 256].contains(&heads.head_dim)
}

/// [`crate::kernels::heads`], and the output of the kernel that appends keys and values.
pub fn attend_heads(
    of: &HeadsView<'_>,
    projected: &Outputs<3>,
    scale: f32,
    spans: &[LaunchSpan<'_>],
) -> Result<(Array, Array)> {
    let first = match projected {
        Outputs::Joined(all) => all,
        Outputs::Apart([q, ..]) => q,
    };
    let q = heads(of, projected, spans)?;
    let mixed = attention(&q, scale, spans, of.gated.then_some(Gates(first)))?;
    Ok((mixed, q))
}

/// Writes the keys and values of all rows to the buffers of `spans` and returns the queries [1, R, H_q, D]. The writes
/// happen when these are evaluated.
fn heads(heads: &HeadsView<'_>, projected: &Outputs<3>, spans: &[LaunchSpan<'_>]) -> Result<Array> {
    let ([q, k, v], joined) = match projected {
        Outputs::Joined(all) => ([all; 3], 1),
        Outputs::Apart(parts) => (parts.each_ref(), 0),
    };
    let &HeadsView { heads: h, kv_heads: h_kv, head_dim: d, gated, rotation, q_norm, k_norm } =
        heads;
    let dtype = q.dtype();
    // Inputs that are not used are not read.
    let [q_weight, k_weight] = [q_norm, k_norm].map(|norm| norm.map_or(q, |norm| norm.weight));
    let wavelengths = rotation.and_then(|rotation| rotation.wavelengths);
    let bits = |number: f32| number.to_bits().cast_signed();
    let rows = spans.iter().map(|span| span.rows).sum();
    let outputs = KERNEL.run(&Launch {
        inputs: &[q, k, v, q_weight, k_weight, wavelengths.unwrap_or(q)],
        outputs: &[(&[1, rows, h, d], dtype)],
        numbers: &[],
        spans,
        constants: &[
            ("HQ", h),
            ("HKV", h_kv),
            ("D", d),
            ("GATED", i32::from(gated)),
            ("JOINED", joined),
            ("NORMED", i32::from(q_norm.is_some())),
            ("EPS", bits(q_norm.map_or(0.0, |norm| norm.eps))),
            ("DIMS", rotation.map_or(0, |rotation| rotation.dims)),
            ("STRETCHED", i32::from(wavelengths.is_some())),
            ("BASE", bits(rotation.map_or(1.0, |rotation| rotation.theta).log2())),
            ("SCALE", bits(rotation.map_or(1.0, |rotation| rotation.scale))),
        ],
        dtype,
        blocks: [h + 2 * h_kv, rows, 1],
        cluster: 1,
        threads: d,
        shared: 0,
    })?;
    Ok(outputs.into_iter().next().expect("`run` returns as many arrays as there are outputs"))
}
