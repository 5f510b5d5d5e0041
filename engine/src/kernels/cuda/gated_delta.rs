//! A GatedDeltaNet layer from its projections to the gated norm, in one kernel.

use mlx_rs::Dtype;

use super::{Kernel, Launch, MULTIPROCESSORS, enabled};
use crate::cache::{Element, Writes};
use crate::error::Result;
use crate::kernels::{DeltaView, GatedDeltaRows, Outputs};

const INPUTS: &[&str] = &[
    "qkv", "z", "b", "a", "tail", "state", "a_log", "dt_bias", "norm", "tap0", "tap1", "tap2",
    "tap3",
];

const KERNEL: Kernel = Kernel {
    name: "gated_delta",
    inputs: INPUTS,
    outputs: &["out", "next_state", "next_tail"],
    numbers: &["rows"],
    header: "#define RECORDED(x)\n",
    source: include_str!("gated_delta.cu"),
};

/// The same, recording what the rows write to the state: as much as the rows themselves, and needed with drafts
/// only.
const RECORDING_KERNEL: Kernel = Kernel {
    name: "gated_delta_recording",
    outputs: &["out", "next_state", "next_tail", "written_keys", "corrections", "log_decays"],
    header: "#define RECORDED(x) x\n",
    ..KERNEL
};

/// Warps of a block; each holds D_v / 16 rows of a state in registers.
pub const WARPS: i32 = 16;

/// Threads of a warp; each holds D_k / 32 columns.
pub const LANES: i32 = 32;

/// Most elements of a state that a thread holds without spilling registers.
const ELEMENTS: i32 = 64;

/// Parts of a head's values whose squares are added separately.
const QUARTERS: i32 = 4;

/// Blocks of each of `heads` heads of all sequences: as many as run at the same time.
fn parts(heads: i32, value_dim: i32) -> i32 {
    let fits = |&parts: &i32| heads * parts <= MULTIPROCESSORS && value_dim % (parts * WARPS) == 0;
    [QUARTERS, 2].into_iter().find(fits).unwrap_or(1)
}

/// Runs the rows `x` of a batch after the state and the tail of each sequence. Rows run one after
/// another: their bits do not depend on how many there are. `record` asks for what they write. `None` if there
/// is no kernel for the layer.
pub fn gated_delta(
    layer: &DeltaView<'_>,
    x: &Outputs<4>,
    before: [&[&Element]; 2],
    record: bool,
) -> Result<Option<GatedDeltaRows>> {
    let &DeltaView { key_heads, value_heads, key_dim, value_dim, .. } = layer;
    let [tap0, tap1, tap2, tap3] = layer.conv1d else { return Ok(None) };
    let fits = key_dim % LANES == 0
        && value_dim % WARPS == 0
        && (value_dim / WARPS) <= LANES
        && value_dim % QUARTERS == 0
        && key_dim / LANES * (value_dim / WARPS) <= ELEMENTS;
    let Some(device) = enabled() else { return Ok(None) };
    if !fits {
        return Ok(None);
    }
    let ([qkv, z, b, a], joined) = match x {
        Outputs::Joined(all) => ([all; 4], 1),
        Outputs::Apart(parts) => (parts.each_ref(), 0),
    };
    let [state, tail] = before.map(|elements| Element::stack(elements.iter().copied()));
    let (state, tail) = (state?, tail?);
    let [batch, rows, values] = [qkv.dim(0), qkv.dim(1), value_heads * value_dim];
    let dtype = qkv.dtype();
    let [shape_k, shape_v] = [key_dim, value_dim].map(|width| [batch, value_heads, rows, width]);
    let outputs: [(&[i32], Dtype); 6] = [
        (&[batch, rows, values], dtype),
        (state.shape(), Dtype::Float32),
        (tail.shape(), dtype),
        (&shape_k, Dtype::Float32),
        (&shape_v, Dtype::Float32),
        (&[batch, value_heads, rows], Dtype::Float32),
    ];
    let parts = if device.clusters { parts(batch * value_heads, value_dim) } else { 1 };
    let kernel = if record { RECORDING_KERNEL } else { KERNEL };
    let outputs = kernel.run(&Launch {
        inputs: &[
            qkv,
            z,
            b,
            a,
            &tail,
            &state,
            layer.a_log,
            layer.dt_bias,
            layer.norm.weight,
            tap0,
            tap1,
            tap2,
            tap3,
        ],
        outputs: &outputs[..kernel.outputs.len()],
        numbers: &[rows],
        spans: &[],
        constants: &[
            ("HK", key_heads),
            ("HV", value_heads),
            ("DK", key_dim),
            ("DV", value_dim),
            ("EPS", layer.norm.eps.to_bits().cast_signed()),
            ("JOINED", joined),
        ],
        dtype,
        blocks: [value_heads * parts, batch, 1],
        cluster: parts,
        threads: WARPS * LANES,
        shared: 0,
    })?;
    let mut outputs = outputs.into_iter();
    let mut next = || outputs.next().expect("`run` returns as many arrays as there are outputs");
    let (y, state, tail) = (next(), next(), next());
    let writes = record.then(|| Writes { k: next(), correction: next(), log_decay: next() });
    Ok(Some(GatedDeltaRows { y, state, tail, writes }))
}
