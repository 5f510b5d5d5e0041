//! Queries, keys and values from their projections: norms and rotation, in one kernel.
//!
//! The kernel does not write to the caches: one span is appended to by MLX's operation, and several by `append.rs`.

use mlx_rs::{Array, Dtype};

use super::{Kernel, LANES, Launch, is_enabled, is_float};
use crate::error::Result;
use crate::kernels::{HeadsView, KernelKind, NormView, Outputs};

const KERNEL: Kernel = Kernel { name: "heads", source: include_str!("heads.metal") };

/// Most rows of a launch. A threadgroup of a prompt does little, while MLX's operations read whole rows: a guess, not
/// measured on a Mac.
const MOST_ROWS: i32 = 64;

/// Heads of all rows, ready for attention.
pub struct RotatedHeads {
    /// [1, R, H_q, D]
    pub q: Array,
    /// [1, 2 H_kv, R, D]: the keys of all heads, and the values after them.
    pub kv: Array,
    /// [1, R, H_q D], before the sigmoid.
    pub gates: Option<Array>,
}

/// Norms and rotates the heads of all rows, whose positions are given. `None` if there is no kernel for them.
pub fn rotated_heads(
    heads: &HeadsView<'_>,
    projected: &Outputs<3>,
    positions: impl Iterator<Item = i32>,
) -> Result<Option<RotatedHeads>> {
    let &HeadsView { heads: h, kv_heads: h_kv, head_dim: d, gated, rotation, q_norm, k_norm } =
        heads;
    let (Outputs::Joined(first) | Outputs::Apart([first, ..])) = projected;
    let (rows, dtype) = (first.dim(1), first.dtype());
    let is_per_head = |norm: NormView<'_>| norm.weight.dim(0) == d;
    let norms_fit = match (q_norm, k_norm) {
        (Some(q), Some(k)) => {
            is_per_head(q) && is_per_head(k) && q.eps.to_bits() == k.eps.to_bits()
        }
        (None, None) => true,
        _ => false,
    };
    let fits = is_enabled()
        && KernelKind::Heads.is_on()
        && rows <= MOST_ROWS
        && d % LANES == 0
        && d <= 256
        && norms_fit
        && is_float(dtype)
        && rotation.is_none_or(|rotation| rotation.has_plain_halves && rotation.dims <= d);
    if !fits {
        return Ok(None);
    }
    let mut numbers = vec![rows];
    numbers.extend(positions);
    let numbers = Array::from_slice(&numbers, &[rows + 1]);
    let (mut inputs, joined): (Vec<(&str, &Array)>, bool) = match projected {
        Outputs::Joined(all) => (vec![("x_q", all)], true),
        Outputs::Apart([q, k, v]) => (vec![("x_q", q), ("x_k", k), ("x_v", v)], false),
    };
    let mut header = String::new();
    if joined {
        header += "#define x_k x_q\n#define x_v x_q\n";
    }
    inputs.push(("numbers", &numbers));
    // Names of what is not there stand for what is not read.
    match (q_norm, k_norm) {
        (Some(q), Some(k)) => inputs.extend([("q_norm", q.weight), ("k_norm", k.weight)]),
        _ => header += "#define q_norm x_q\n#define k_norm x_q\n",
    }
    match rotation {
        Some(rotation) => inputs.push(("frequencies", rotation.frequencies()?)),
        None => header += "#define frequencies x_q\n",
    }
    if !gated {
        header += "#define gates rotated\n";
    }
    let (q_shape, gates_shape) = ([1, rows, h, d], [1, rows, h * d]);
    let kv_shape = [1, 2 * h_kv, rows, d];
    let mut outputs: Vec<(&str, &[i32], Dtype)> =
        vec![("rotated", &q_shape[..], dtype), ("kv", &kv_shape[..], dtype)];
    if gated {
        outputs.push(("gates", &gates_shape[..], dtype));
    }
    let bits = |number: f32| number.to_bits().cast_signed();
    let results = KERNEL.run(&Launch {
        header,
        inputs: &inputs,
        in_place: &[],
        outputs: &outputs,
        constants: &[
            ("HQ", h),
            ("HKV", h_kv),
            ("D", d),
            ("GATED", i32::from(gated)),
            ("JOINED", i32::from(joined)),
            ("NORMED", i32::from(q_norm.is_some())),
            ("EPS", bits(q_norm.map_or(0.0, |norm| norm.eps))),
            ("DIMS", rotation.map_or(0, |rotation| rotation.dims)),
            ("SCALE", bits(rotation.map_or(1.0, |rotation| rotation.scale))),
        ],
        dtype,
        groups: [1, h + 2 * h_kv, rows],
        threads: d,
    })?;
    let mut results = results.into_iter();
    let (q, kv, gates) = (results.next(), results.next(), results.next());
    Ok(q.zip(kv).map(|(q, kv)| RotatedHeads { q, kv, gates }))
}
