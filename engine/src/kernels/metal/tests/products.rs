//! Products of few rows with packed matrices, against MLX's dequantized ones.

use mlx_rs::Dtype;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::eval;

use super::super::packed_rows;
use super::enable;
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
