//! Feed-forward blocks of many experts for a few rows, in three kernels besides the router's product and the shared
//! expert: the choice, gates and ups, and downs with all that is added. Each row reads its own experts.

use mlx_rs::{Array, Dtype};

use super::tiled::QUANTIZATION;
use super::{Kernel, Launch, is_enabled};
use crate::error::Result;
use crate::kernels::{
    ExpertsView, Input, Mode, NormView, PackedView, Quantization, Rows, SharedGate,
};

const CHOOSE: Kernel = Kernel {
    name: "choose",
    inputs: &["scores", "x", "norm", "gate", "gate_scales", "gate_biases"],
    outputs: &["chosen", "shares", "shared_gate"],
    numbers: &[],
    header: "",
    source: include_str!("choose.cu"),
};

const GATE_UP: Kernel = Kernel {
    name: "experts_gate_up",
    inputs: &[
        "x",
        "norm",
        "chosen",
        "gate",
        "gate_scales",
        "gate_biases",
        "up",
        "up_scales",
        "up_biases",
    ],
    outputs: &["out"],
    numbers: &[],
    header: "",
    source: include_str!("experts_gate_up.cu"),
};

const DOWN: Kernel = Kernel {
    name: "experts_down",
    inputs: &[
        "mid",
        "chosen",
        "shares",
        "down",
        "scales",
        "biases",
        "shared",
        "shared_gate",
        "residual",
    ],
    outputs: &["out"],
    numbers: &[],
    header: "",
    source: include_str!("experts_down.cu"),
};

/// Most rows. With more, an expert is read for several of them.
const ROWS: i32 = 32;

/// Most experts of a row.
const TOP_K: i32 = 8;

/// Most experts and most inputs, which lanes hold in registers.
const EXPERTS: i32 = 512;
const INPUTS: i32 = 4096;

/// Warps of a block, and outputs of each in the two products.
const WARPS: i32 = 8;
const GATE_UP_OUTPUTS: i32 = 4;
const DOWN_OUTPUTS: i32 = 2;

/// Threads of a block that chooses.
const THREADS: i32 = 256;

/// Arrays of a stack of matrices in the kernels' format: words, scales and biases.
fn stack(matrices: PackedView<'_>) -> Option<[&Array; 3]> {
    packed(matrices, QUANTIZATION).filter(|[words, ..]| words.ndim() == 3)
}

fn packed(matrix: PackedView<'_>, quantization: Quantization) -> Option<[&Array; 3]> {
    let PackedView { words, scales, biases, .. } = matrix;
    let biases = biases?;
    let types = [scales.dtype(), biases.dtype()];
    let fits = matrix.quantization == quantization && types == [Dtype::Bfloat16; 2];
    fits.then_some([words, scales, biases])
}

/// The gate of a shared expert as the constant GATE, and its arrays; those of `x` where there are none.
fn shared_gate<'a>(gate: Option<SharedGate<'a>>, x: &'a Array) -> Option<(i32, [&'a Array; 3])> {
    match gate {
        None => Some((0, [x; 3])),
        Some(SharedGate::Dense(weight)) => {
            (weight.dtype() == Dtype::Bfloat16).then_some((1, [weight, x, x]))
        }
        Some(SharedGate::Packed(weight)) => [4, 8].into_iter().find_map(|bits| {
            let quantization = Quantization { group_size: 64, bits, mode: Mode::Affine };
            Some((bits, packed(weight, quantization)?))
        }),
    }
}

fn launch<'a>(
    inputs: &'a [&'a Array],
    outputs: &'a [(&'a [i32], Dtype)],
    constants: &'a [(&'a str, i32)],
    blocks: [i32; 3],
    threads: i32,
) -> Launch<'a> {
    Launch {
        inputs,
        outputs,
        numbers: &[],
        spans: &[],
        constants,
        dtype: Dtype::Bfloat16,
        blocks,
        cluster: 1,
        threads,
        shared: 0,
    }
}

/// As [`crate::kernels::experts`].
pub fn experts(
    moe: &ExpertsView<'_>,
    x: &Array,
    norm: NormView<'_>,
    router: Rows<'_>,
    shared: Option<Rows<'_>>,
) -> Result<Option<Array>> {
    let [rows, d] = [x.dim(1), x.dim(2)];
    let [Some(gate), Some(up), Some(down)] = moe.stacks.map(stack) else { return Ok(None) };
    let Some((gate_kind, gate_arrays)) = shared_gate(moe.shared_gate, x) else { return Ok(None) };
    let [count, f] = [gate[0].dim(0), gate[0].dim(1)];
    let fits = is_enabled()
        && rows <= ROWS
        && moe.top_k <= TOP_K
        && count <= EXPERTS
        && d <= INPUTS
        && f <= INPUTS
        && [x.dtype(), norm.weight.dtype()] == [Dtype::Bfloat16; 2];
    if !fits {
        return Ok(None);
    }
    let scores = router(Input::Normed(x, norm))?;
    if scores.dtype() != Dtype::Bfloat16 {
        return Ok(None);
    }
    let (k, bits) = (moe.top_k, |number: f32| number.to_bits().cast_signed());
    let [gate_words, gate_scales, gate_biases] = gate_arrays;
    let choice = CHOOSE.run(&launch(
        &[&scores, x, norm.weight, gate_words, gate_scales, gate_biases],
        &[(&[rows * k], Dtype::Uint32), (&[rows * k], Dtype::Bfloat16), (&[rows], Dtype::Bfloat16)],
        &[
            ("E", count),
            ("TOP_K", k),
            ("NORMED", i32::from(moe.norm_topk_prob)),
            ("SCALE", bits(moe.scale)),
            ("D", d),
            ("EPS", bits(norm.eps)),
            ("GATE", gate_kind),
            ("THREADS", THREADS),
        ],
        [rows, 1, 1],
        THREADS,
    ))?;
    let [chosen, shares, shared_gate] = &choice[..] else { unreachable!("three outputs") };
    let blocks = |outputs: i32, of_warp: i32| (outputs + WARPS * of_warp - 1) / (WARPS * of_warp);
    let mid = GATE_UP.run(&launch(
        &[x, norm.weight, chosen, gate[0], gate[1], gate[2], up[0], up[1], up[2]],
        &[(&[rows * k, f], Dtype::Bfloat16)],
        &[("D", d), ("F", f), ("TOP_K", k), ("EPS", bits(norm.eps)), ("WARPS", WARPS)],
        [blocks(f, GATE_UP_OUTPUTS), rows * k, 1],
        32 * WARPS,
    ))?;
    let shared = shared.map(|shared| shared(Input::Normed(x, norm))).transpose()?;
    let kind = match (&shared, gate_kind) {
        (None, _) => 0,
        (Some(_), 0) => 1,
        (Some(_), _) => 2,
    };
    let residual = moe.residual(x)?;
    let y = DOWN.run(&launch(
        &[
            &mid[0],
            chosen,
            shares,
            down[0],
            down[1],
            down[2],
            shared.as_ref().unwrap_or(x),
            shared_gate,
            &residual,
        ],
        &[(x.shape(), Dtype::Bfloat16)],
        &[("D", d), ("F", f), ("TOP_K", k), ("SHARED", kind), ("WARPS", WARPS)],
        [blocks(d, DOWN_OUTPUTS), rows, 1],
        32 * WARPS,
    ))?;
    Ok(y.into_iter().next())
}
