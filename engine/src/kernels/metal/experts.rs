//! Feed-forward blocks of many experts for a few rows, in three kernels besides the norm, the
//! router's product and the shared expert: the choice, gates and ups, and downs with all that is
//! added. Each row reads its own experts.
//!
//! The norm is an operation of its own, because MLX's product of the router reads its result.
//!
//! Source: Qwen3-MoE (arXiv:2505.09388) for the choice, Qwen2-MoE for the gate of the shared
//! expert; MLX 0.32.2 `mlx/backend/metal/kernels/quantized.h`, `gather_qmv`, for the share of a
//! simdgroup.

use mlx_rs::{Array, Dtype};

use super::affine::{self, Affine};
use super::{Kernel, LANES, Launch, is_enabled, is_float};
use crate::error::Result;
use crate::kernels::{ExpertsView, Input, NormView, Rows, SharedGate};

/// The three kernels, in the order of their launches.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    pub choose: Kernel,
    pub gate_up: Kernel,
    pub down: Kernel,
}

pub const KERNELS: Kernels = Kernels {
    choose: Kernel { name: "choose", source: include_str!("choose.metal") },
    gate_up: Kernel { name: "experts_gate_up", source: include_str!("experts_gate_up.metal") },
    down: Kernel { name: "experts_down", source: include_str!("experts_down.metal") },
};

/// Most rows. With more, an expert is read for several of them.
const MOST_ROWS: i32 = 8;

/// Most experts of a row: each has a simdgroup of a threadgroup.
const TOP_K: i32 = 16;

/// Most experts, whose scores the lanes of a simdgroup hold in registers.
const EXPERTS: i32 = 512;

/// Outputs of a threadgroup of gates and ups, of two simdgroups.
const GATE_UP_OUTPUTS: i32 = 4;
const GATE_UP_SIMDGROUPS: i32 = 2;

/// Outputs of a threadgroup of downs.
const DOWN_OUTPUTS: i32 = 4;

/// The experts of rows, and what they count.
pub struct Choice {
    /// u32 [R K]
    pub chosen: Array,
    /// [R K]
    pub shares: Array,
    /// [R], factors of the shared expert's output; `None` if it has no gate.
    pub shared_gate: Option<Array>,
}

/// A block and its matrices.
pub struct Experts<'a> {
    view: ExpertsView<'a>,
    gate: Affine<'a>,
    up: Affine<'a>,
    down: Affine<'a>,
    dtype: Dtype,
}

/// As [`crate::kernels::experts`].
pub fn experts(
    moe: &ExpertsView<'_>,
    x: &Array,
    norm: NormView<'_>,
    router: Rows<'_>,
    shared: Option<Rows<'_>>,
) -> Result<Option<Array>> {
    if !is_enabled() || x.dim(1) > MOST_ROWS {
        return Ok(None);
    }
    let Some(experts) = Experts::of(moe, x.dtype()) else { return Ok(None) };
    let normed = norm.forward(x)?;
    let choice = experts.choose(&KERNELS.choose, &router(Input::Rows(&normed))?, &normed)?;
    let mid = experts.gate_up(&KERNELS.gate_up, &normed, &choice.chosen)?;
    let shared = shared.map(|shared| shared(Input::Rows(&normed))).transpose()?;
    let residual = moe.residual(x)?;
    experts.down(&KERNELS.down, &mid, &choice, shared.as_ref(), &residual).map(Some)
}

impl<'a> Experts<'a> {
    /// The block for rows of `dtype`; `None` if kernels do not support it.
    pub fn of(view: &ExpertsView<'a>, dtype: Dtype) -> Option<Self> {
        let [gate, up, down] = view.stacks.each_ref().map(Affine::of);
        let (gate, up, down) = (gate?, up?, down?);
        let count = gate.words.dim(0);
        let gate_fits = match view.shared_gate {
            None | Some(SharedGate::Dense(_)) => true,
            Some(SharedGate::Packed(weight)) => Affine::of(&weight).is_some(),
        };
        let fits = gate_fits
            && is_float(dtype)
            && [gate, up, down].iter().all(|stack| stack.words.ndim() == 3)
            && (gate.bits, gate.group_size) == (up.bits, up.group_size)
            && [gate, down].iter().all(|stack| stack.inputs() % 32 == 0)
            && count <= EXPERTS
            && view.top_k <= TOP_K.min(count);
        fits.then_some(Self { view: *view, gate, up, down, dtype })
    }

    /// The choice for rows whose `scores` are [1, R, E], with the gate of the shared expert for the
    /// rows `x` [1, R, D].
    pub fn choose(&self, kernel: &Kernel, scores: &Array, x: &Array) -> Result<Choice> {
        let (rows, k) = (x.dim(1), self.view.top_k);
        let (each, of_row) = ([rows * k], [rows]);
        let mut inputs = vec![("scores", scores), ("x", x)];
        let mut outputs: Vec<(&str, &[i32], Dtype)> =
            vec![("shares", &each, self.dtype), ("chosen", &each, Dtype::Uint32)];
        let mut header = affine::HEADER.to_owned();
        let product = match self.view.shared_gate {
            // Names of what is not there stand for what is not read.
            None => {
                header += "#define shared_gate shares\n";
                "0.0f".to_owned()
            }
            Some(SharedGate::Dense(weight)) => {
                inputs.push(("gate", weight));
                "product(gate + (at), inputs)".to_owned()
            }
            Some(SharedGate::Packed(weight)) => {
                let gate = Affine::of(&weight).expect("`of` has checked it");
                inputs.extend(gate.named(["gate", "gate_scales", "gate_biases"]));
                let Affine { bits, group_size, .. } = gate;
                format!(
                    "product<{bits}>(gate, gate_scales, gate_biases, (at) / 8, \
                     (at) / {group_size}, inputs, total)"
                )
            }
        };
        header += &format!("#define GATE_PRODUCT(at, inputs, total) {product}\n");
        let has_gate = self.view.shared_gate.is_some();
        if has_gate {
            outputs.push(("shared_gate", &of_row, self.dtype));
        }
        let mut results = kernel
            .run(&Launch {
                header,
                inputs: &inputs,
                in_place: &[],
                outputs: &outputs,
                constants: &[
                    ("E", self.gate.words.dim(0)),
                    ("TOP_K", k),
                    ("NORMED", i32::from(self.view.norm_topk_prob)),
                    ("SCALE", self.view.scale.to_bits().cast_signed()),
                    ("D", self.gate.inputs()),
                ],
                dtype: self.dtype,
                groups: [1, rows, 1],
                threads: LANES * (1 + i32::from(has_gate)),
            })?
            .into_iter();
        let mut next = || results.next().expect("`run` returns an array for each output");
        let (shares, chosen) = (next(), next());
        Ok(Choice { chosen, shares, shared_gate: has_gate.then(next) })
    }

    /// `silu(gate x) up x` of the `chosen` experts of the rows `x` [1, R, D]: [R K, F].
    pub fn gate_up(&self, kernel: &Kernel, x: &Array, chosen: &Array) -> Result<Array> {
        let (pairs, f) = (x.dim(1) * self.view.top_k, self.gate.outputs());
        let mut inputs = vec![("x", x), ("chosen", chosen)];
        inputs.extend(self.gate.named(["gate", "gate_scales", "gate_biases"]));
        inputs.extend(self.up.named(["up", "up_scales", "up_biases"]));
        let mid = kernel.run(&Launch {
            header: affine::HEADER.into(),
            inputs: &inputs,
            in_place: &[],
            outputs: &[("mid", &[pairs, f], self.dtype)],
            constants: &[
                ("D", self.gate.inputs()),
                ("F", f),
                ("TOP_K", self.view.top_k),
                ("BITS", self.gate.bits),
                ("GROUP", self.gate.group_size),
            ],
            dtype: self.dtype,
            groups: [1, f / GATE_UP_OUTPUTS, pairs],
            threads: LANES * GATE_UP_SIMDGROUPS,
        })?;
        Ok(mid.into_iter().next().expect("one output"))
    }

    /// `residual` [1, R, D], the outputs of the chosen experts for their `mid`, and that of the
    /// `shared` one: [1, R, D].
    pub fn down(
        &self,
        kernel: &Kernel,
        mid: &Array,
        choice: &Choice,
        shared: Option<&Array>,
        residual: &Array,
    ) -> Result<Array> {
        let (rows, d) = (residual.dim(1), self.gate.inputs());
        let Choice { chosen, shares, shared_gate } = choice;
        let mut inputs =
            vec![("mid", mid), ("chosen", chosen), ("shares", shares), ("residual", residual)];
        inputs.extend(self.down.named(["down", "down_scales", "down_biases"]));
        inputs.extend(shared.map(|shared| ("shared", shared)));
        inputs.extend(shared_gate.as_ref().map(|gate| ("shared_gate", gate)));
        let product = match (shared, shared_gate) {
            (None, _) => "0.0f",
            (Some(_), None) => "static_cast<float>(shared[i])",
            (Some(_), Some(_)) => {
                "ROUNDED(static_cast<float>(shared[i]) * static_cast<float>(shared_gate[row]))"
            }
        };
        let y = kernel.run(&Launch {
            header: format!("{}#define SHARED_EXPERT(i) {product}\n", affine::HEADER),
            inputs: &inputs,
            in_place: &[],
            outputs: &[("out", residual.shape(), self.dtype)],
            constants: &[
                ("D", d),
                ("F", self.down.inputs()),
                ("TOP_K", self.view.top_k),
                ("BITS", self.down.bits),
                ("GROUP", self.down.group_size),
            ],
            dtype: self.dtype,
            groups: [1, d / DOWN_OUTPUTS, rows],
            threads: LANES * self.view.top_k,
        })?;
        Ok(y.into_iter().next().expect("one output"))
    }
}
