//! Experts of few rows, against the operations of their block.

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use steersman_metal_emulation::Order;

use super::super::experts::{Choice, Experts, KERNELS};
use super::super::kernel::Kernel;
use super::super::{launches, take_fault};
use super::{enable, expect_fault, with_fault};
use crate::kernels::tests::{error, normal};
use crate::kernels::{self, ExpertsView, Input, Rows};
use crate::nn::{
    Block, Experts as ExpertsOf, Gate, GatedMlp, Joined, Linear, Mlp, Mode, Moe, Packed,
    Quantization, RmsNorm, Shared,
};
use crate::ranks::Ranks;

/// Which experts there are.
#[derive(Debug, Clone, Copy)]
struct Form {
    /// Experts, inputs, and outputs of a gate.
    sizes: [i32; 3],
    top_k: i32,
    /// Bits and group size of gates and ups, and of downs.
    formats: [[i32; 2]; 2],
    gate: SharedForm,
    norm_topk_prob: bool,
    scale: f32,
}

/// The shared expert.
#[derive(Debug, Clone, Copy, PartialEq)]
enum SharedForm {
    None,
    WithoutGate,
    DenseGate,
    /// Bits of the gate.
    PackedGate(i32),
}

const FORMS: [Form; 4] = [
    Form {
        sizes: [40, 96, 32],
        top_k: 3,
        formats: [[4, 32], [8, 32]],
        gate: SharedForm::None,
        norm_topk_prob: true,
        scale: 1.0,
    },
    Form {
        sizes: [8, 320, 64],
        top_k: 8,
        formats: [[4, 64], [4, 64]],
        gate: SharedForm::PackedGate(8),
        norm_topk_prob: true,
        scale: 1.0,
    },
    Form {
        sizes: [16, 64, 288],
        top_k: 10,
        formats: [[8, 64], [3, 32]],
        gate: SharedForm::DenseGate,
        norm_topk_prob: false,
        scale: 2.5,
    },
    Form {
        sizes: [5, 128, 128],
        top_k: 1,
        formats: [[6, 128], [5, 64]],
        gate: SharedForm::WithoutGate,
        norm_topk_prob: false,
        scale: 1.0,
    },
];

fn packed(seed: u64, shape: &[i32], [bits, group_size]: [i32; 2], dtype: Dtype) -> Packed {
    let weight = normal(seed, shape, dtype).multiply(Array::from_f32(0.3)).unwrap();
    let quantization = Quantization { group_size, bits, mode: Mode::Affine };
    Packed::quantize(&weight.as_dtype(dtype).unwrap(), quantization)
}

fn dense(seed: u64, shape: &[i32], dtype: Dtype) -> Linear {
    let weight = normal(seed, shape, dtype).multiply(Array::from_f32(0.3)).unwrap();
    Linear::Dense { weight: weight.as_dtype(dtype).unwrap().into(), bias: None }
}

fn block(sides: [Linear; 2], down_proj: Linear) -> Block {
    GatedMlp { gate: Gate::Silu, gate_up: Joined::new(sides).unwrap(), down_proj }.into()
}

/// A block as a model has it.
fn moe(form: &Form, dtype: Dtype) -> Moe {
    let [count, d, f] = form.sizes;
    let stack = |seed, shape: [i32; 3], format| Linear::Quantized {
        weight: packed(seed, &shape, format, dtype),
        bias: None,
    };
    let [gate_up, down] = form.formats;
    let sides = [10, 11].map(|seed| stack(seed, [count, f, d], gate_up));
    let gate = match form.gate {
        SharedForm::None | SharedForm::WithoutGate => None,
        SharedForm::DenseGate => Some(dense(30, &[1, d], dtype)),
        SharedForm::PackedGate(bits) => {
            Some(Linear::Quantized { weight: packed(30, &[1, d], [bits, 64], dtype), bias: None })
        }
    };
    let shared = (form.gate != SharedForm::None).then(|| Shared {
        expert: block(
            [20, 21].map(|seed| dense(seed, &[48, d], dtype)),
            dense(22, &[d, 48], dtype),
        ),
        gate,
    });
    Moe {
        gate: dense(1, &[count, d], dtype),
        experts: ExpertsOf(block(sides, stack(12, [count, d, f], down))),
        top_k: form.top_k,
        norm_topk_prob: form.norm_topk_prob,
        scale: form.scale,
        groups: None,
        shared,
        ranks: Ranks::alone(),
    }
}

/// The norm before a block, and 8 rows.
fn norm_and_rows(d: i32, dtype: Dtype) -> (RmsNorm, Array) {
    let norm = RmsNorm { weight: normal(2, &[d], dtype), eps: 1e-6 };
    (norm, normal(3, &[1, 8, d], dtype))
}

#[test]
fn experts_equal_their_operations() {
    for (dtype, bound) in [(Dtype::Float32, 2e-5), (Dtype::Bfloat16, 4e-2)] {
        for form in &FORMS {
            enable(true);
            let moe = Mlp::Sparse(Box::new(moe(form, dtype)));
            let (norm, x) = norm_and_rows(form.sizes[1], dtype);
            for rows in [1, 8] {
                let x = x.try_index((.., ..rows)).unwrap();
                enable(true);
                let before = launches(KERNELS.down.name);
                let ours = moe.residual(&x, &norm).unwrap();
                eval([&ours]).unwrap();
                assert_eq!(launches(KERNELS.down.name), before + 1, "{form:?}");
                enable(false);
                let difference = error(&ours, &moe.residual(&x, &norm).unwrap());
                assert!(difference < bound, "{dtype:?} {form:?} {rows}: {difference:e}");
            }
        }
    }
}

/// The bits of a row depend neither on the number of rows nor on the others. Scores and the shared
/// expert are given: MLX's products have other bits for other numbers of rows.
#[test]
fn the_bits_of_a_row_are_those_of_the_row_alone() {
    enable(true);
    for dtype in [Dtype::Float32, Dtype::Bfloat16] {
        for form in &FORMS {
            let [count, d, _] = form.sizes;
            let moe = moe(form, dtype);
            let (norm, x) = norm_and_rows(d, dtype);
            let [scores, shared] =
                [(5, count), (6, d)].map(|(seed, n)| normal(seed, &[1, 8, n], dtype));
            let run = |from: i32, to: i32| {
                let rows = |all: &Array| all.try_index((.., from..to)).unwrap();
                let router = |_: Input<'_>| Ok(rows(&scores));
                let other = |_: Input<'_>| Ok(rows(&shared));
                let shared = moe.shared.is_some().then_some(&other as Rows<'_>);
                kernels::experts(&moe.view().unwrap(), &rows(&x), norm.view(), &router, shared)
                    .unwrap()
                    .unwrap()
            };
            let all = run(0, 8);
            for (from, to) in [(0, 1), (5, 6), (2, 5)] {
                let of_all = all.try_index((.., from..to)).unwrap();
                assert!(run(from, to).eq_values(of_all).unwrap(), "{dtype:?} {form:?} {from} {to}");
            }
        }
    }
}

/// One of the ranks that have parts of the experts adds the rows.
#[test]
fn rows_are_added_only_if_the_view_says_so() {
    enable(true);
    let form = &FORMS[0];
    let [count, d, _] = form.sizes;
    let (norm, x) = norm_and_rows(d, Dtype::Float32);
    let (moe, scores) = (moe(form, Dtype::Float32), normal(5, &[1, 8, count], Dtype::Float32));
    let run = |adds_rows: bool| {
        let view = ExpertsView { adds_rows, ..moe.view().unwrap() };
        let router = |_: Input<'_>| Ok(scores.clone());
        kernels::experts(&view, &x, norm.view(), &router, None).unwrap().unwrap()
    };
    let difference = error(&run(false).add(&x).unwrap(), &run(true));
    assert!(difference < 1e-6, "{difference:e}");
}

#[test]
fn more_rows_other_formats_and_unequal_gates_are_left_to_mlx() {
    enable(true);
    let form = &FORMS[0];
    let [count, d, _] = form.sizes;
    let norm = norm_and_rows(d, Dtype::Float32).0;
    let has_kernel = |moe: &Moe, rows: i32| {
        let x = normal(3, &[1, rows, d], Dtype::Float32);
        let router = |_: Input<'_>| Ok(normal(5, &[1, rows, count], Dtype::Float32));
        kernels::experts(&moe.view().unwrap(), &x, norm.view(), &router, None).unwrap().is_some()
    };
    let right = moe(form, Dtype::Float32);
    assert!(has_kernel(&right, 8) && !has_kernel(&right, 9));
    let many = Moe { top_k: 17, ..right.clone() };
    assert!(!has_kernel(&many, 1));
    let other = |change: fn(&mut Packed)| {
        let mut moe = right.clone();
        let Block::Gated(GatedMlp { down_proj: Linear::Quantized { weight, .. }, .. }) =
            &mut moe.experts.0
        else {
            unreachable!("made so above")
        };
        change(weight);
        moe
    };
    assert!(has_kernel(&other(|_| ()), 1));
    assert!(!has_kernel(&other(|down| down.quantization.mode = Mode::Mxfp4), 1));
    let sides = [(10, [4, 32]), (11, [8, 32])].map(|(seed, format)| Linear::Quantized {
        weight: packed(seed, &[count, 32, d], format, Dtype::Float32),
        bias: None,
    });
    let Block::Gated(GatedMlp { down_proj, .. }) = right.experts.0.clone() else {
        unreachable!("made so above")
    };
    assert!(!has_kernel(&Moe { experts: ExpertsOf(block(sides, down_proj)), ..right }, 1));
}

/// Such a choice leads to experts that exist, and to outputs that are no numbers either.
#[test]
fn scores_that_are_no_numbers_make_shares_that_are_none() {
    enable(true);
    let form = &FORMS[0];
    let [count, d, _] = form.sizes;
    let moe = moe(form, Dtype::Float32);
    let view = moe.view().unwrap();
    let experts = Experts::of(&view, Dtype::Float32).unwrap();
    let x = norm_and_rows(d, Dtype::Float32).1;
    let scores = Array::full::<f32>(&[1, 8, count], Array::from_f32(f32::NAN)).unwrap();
    let Choice { chosen, shares, .. } = experts.choose(&KERNELS.choose, &scores, &x).unwrap();
    eval([&chosen, &shares]).unwrap();
    assert!(chosen.as_slice::<u32>().iter().all(|expert| *expert < count as u32));
    assert!(shares.as_slice::<f32>().iter().all(|share| share.is_nan()));
}

/// Expects each of these faults to be found in an order of threads, and none in the kernels as they
/// are. A fault of a kernel ends the test of it: the next one would read what is no expert.
pub fn expect_planted_faults(order: Order) {
    let form = &FORMS[1];
    let dtype = Dtype::Float32;
    let moe = moe(form, dtype);
    let view = moe.view().unwrap();
    let experts = Experts::of(&view, dtype).unwrap();
    let x = norm_and_rows(form.sizes[1], dtype).1;
    let [scores, shared] =
        [(5, form.sizes[0]), (6, form.sizes[1])].map(|(seed, n)| normal(seed, &[1, 8, n], dtype));
    let choose = |kernel: Kernel| {
        let Choice { chosen, shares, shared_gate } = experts.choose(&kernel, &scores, &x).unwrap();
        let shared_gate = shared_gate.unwrap();
        eval([&chosen, &shares, &shared_gate]).unwrap();
        Choice { chosen, shares, shared_gate: Some(shared_gate) }
    };
    let choice = choose(KERNELS.choose);
    let gate_up = |kernel: Kernel| {
        let mid = experts.gate_up(&kernel, &x, &choice.chosen).unwrap();
        eval([&mid]).unwrap();
        mid
    };
    let mid = gate_up(KERNELS.gate_up);
    let down = |kernel: Kernel| {
        let y = experts.down(&kernel, &mid, &choice, Some(&shared), &x).unwrap();
        eval([&y]).unwrap();
        y
    };
    let y = down(KERNELS.down);
    for kernel in [KERNELS.choose, KERNELS.gate_up, KERNELS.down] {
        assert_eq!(take_fault(kernel.name), None, "{order:?}");
    }
    let barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);";
    for (name, part, other, expected) in [
        ("down: barrier", barrier, "", "without a barrier"),
        ("down: bound", "if (own < OUTS)", "if (own < OUTS + 1)", "out of bounds"),
        ("down: rows", "if (own < OUTS)", "if (own < OUTS - 1)", "was not written"),
        ("down: past", "out[i] =", "out[i + OUTS] =", "beside its elements"),
    ] {
        down(with_fault(KERNELS.down, name, part, other));
        expect_fault(order, name, expected);
    }
    for (name, part, other, expected) in [
        (
            "gate_up: lanes",
            "ROUNDED(simd_sum(ups[o]))",
            "ROUNDED(lane == 3 ? 0.0f : simd_sum(ups[o]))",
            "collective",
        ),
        ("gate_up: past", "mid[pair * F +", "mid[(pair + 1) * F +", "beside its elements"),
    ] {
        gate_up(with_fault(KERNELS.gate_up, name, part, other));
        expect_fault(order, name, expected);
    }
    for (name, part, other, expected) in [
        ("choose: rows", "if (lane < TOP_K)", "if (lane < TOP_K - 1)", "was not written"),
        (
            "choose: lanes",
            "= simd_max(best);",
            "= lane == 5 ? best : simd_max(best);",
            "collective",
        ),
        ("choose: branch", "(simdgroup_index_in_threadgroup > 0)", "(lane > 0)", "collective"),
    ] {
        choose(with_fault(KERNELS.choose, name, part, other));
        expect_fault(order, name, expected);
    }
    // What is read beside an input is not a number, and what belongs to another row changes the
    // result.
    let other = with_fault(KERNELS.down, "down: inputs", "at < F;", "at < F + PACK;");
    assert_ne!(error(&down(other), &y), 0.0, "{order:?}");
    let other = with_fault(KERNELS.gate_up, "gate_up: inputs", "at < D;", "at < D + PACK;");
    assert_ne!(error(&gate_up(other), &mid), 0.0, "{order:?}");
    assert_eq!(error(&down(KERNELS.down), &y), 0.0, "{order:?}");
}
