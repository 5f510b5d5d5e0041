//! Products of few rows with packed matrices, against MLX's dequantized ones.

use mlx_rs::Dtype;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::eval;
use steersman_metal_emulation::Order;

use super::super::affine::Affine;
use super::super::kernel::Kernel;
use super::super::packed_rows::{KERNEL, packed_rows, product};
use super::super::take_fault;
use super::{enable, expect_fault, with_fault};
use crate::kernels::tests::{error, normal};
use crate::nn::{Mode, Packed, Quantization};

/// Every width and group size, and numbers of outputs that are no multiple of a threadgroup's. The
/// bits of a row do not depend on how many there are.
#[test]
fn products_of_few_rows_equal_those_of_the_dequantized_matrix() {
    for (dtype, bound) in [(Dtype::Float32, 1e-5), (Dtype::Bfloat16, 2e-2)] {
        for (i, bits) in (0i32..).zip([2, 3, 4, 5, 6, 8]) {
            for (group_size, outputs, inputs) in [(64, 21, 320), (32, 9, 96), (128, 3, 256)] {
                let quantization = Quantization { group_size, bits, mode: Mode::Affine };
                let weight = Packed::quantize(&normal(1, &[outputs, inputs], dtype), quantization);
                let x = normal(2, &[1, 8, inputs], dtype);
                enable(true);
                let all = packed_rows(&weight.view(), &x).unwrap().unwrap();
                eval([&all]).unwrap();
                enable(false);
                let reference = x.matmul(weight.dequantize().unwrap().t()).unwrap();
                let difference = error(&all, &reference);
                assert!(difference < bound, "{dtype:?} {quantization:?}: {difference:e}");
                // Each number of rows is another text to compile.
                if group_size == 64 {
                    let rows = 2 + i;
                    enable(true);
                    let few = weight.matmul(&x.try_index((.., ..rows)).unwrap()).unwrap();
                    let of_all = all.try_index((.., ..rows)).unwrap();
                    assert!(few.eq_values(of_all).unwrap(), "{dtype:?} {quantization:?} {rows}");
                }
            }
        }
    }
}

#[test]
fn one_row_or_many_are_left_to_mlx() {
    enable(true);
    let quantization = Quantization { group_size: 64, bits: 6, mode: Mode::Affine };
    let weight = Packed::quantize(&normal(1, &[8, 64], Dtype::Float32), quantization);
    let has_kernel = |rows| {
        let x = normal(2, &[1, rows, 64], Dtype::Float32);
        packed_rows(&weight.view(), &x).unwrap().is_some()
    };
    assert_eq!([1, 2, 8, 9].map(has_kernel), [false, true, true, false]);
}

/// Expects each of these faults to be found in an order of threads, and none in the kernel as it
/// is.
pub fn expect_planted_faults(order: Order) {
    let quantization = Quantization { group_size: 32, bits: 5, mode: Mode::Affine };
    let weight = Packed::quantize(&normal(1, &[21, 96], Dtype::Float32), quantization);
    let x = normal(2, &[1, 3, 96], Dtype::Float32);
    let run = |kernel: Kernel| {
        let y = product(&kernel, &Affine::of(&weight.view()).unwrap(), &x).unwrap();
        eval([&y]).unwrap();
        y
    };
    let right = run(KERNEL);
    assert_eq!(take_fault(KERNEL.name), None, "{order:?}");
    for (name, part, other, expected) in [
        ("products: bound", "first + o < N)", "first + o < N + 1)", "beside its elements"),
        ("products: rows", "first + o < N)", "first + o < N - 1)", "was not written"),
        (
            "products: lanes",
            "= simd_sum(sums[o][r]);",
            "= lane == 3 ? 0 : simd_sum(sums[o][r]);",
            "collective",
        ),
    ] {
        run(with_fault(KERNEL, name, part, other));
        expect_fault(order, name, expected);
    }
    // Weights beside the last ones make what is no number.
    let other = with_fault(KERNEL, "products: inputs", "at < K;", "at < K + PACK;");
    assert_ne!(error(&run(other), &right), 0.0, "{order:?}");
}
