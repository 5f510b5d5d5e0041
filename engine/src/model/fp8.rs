//! Published fp8 checkpoints (Ministral 3, Qwen3 FP8): E4M3 with a factor for the whole matrix or
//! for each block of it.
//!
//! MLX cannot multiply such matrices, so loading converts them to bfloat16, which doubles their
//! size. `mlx_lm.convert --q-mode mxfp8` makes a checkpoint that stays small.
//!
//! Source: DeepSeek-V3 (arXiv:2412.19437, section 3.3); `transformers`
//! `integrations/finegrained_fp8.py`.

use std::collections::HashMap;

use mlx_rs::ops::indexing::{Ellipsis, TryIndexOp};
use mlx_rs::ops::repeat_axis;
use mlx_rs::{Array, Dtype};

use crate::error::{Error, Result};
use crate::nn::from_fp8;

/// Suffix of the dequantization factor's name.
const FACTOR: &str = "_scale_inv";

/// Dequantizes every matrix that has a factor. `block` is `weight_block_size` of the config.
pub(super) fn unpack(arrays: &mut HashMap<String, Array>, block: [i32; 2]) -> Result<()> {
    let names: Vec<String> =
        arrays.keys().filter_map(|name| name.strip_suffix(FACTOR)).map(String::from).collect();
    for name in names {
        // A factor without its matrix stays, and is refused when nothing has used it.
        let Some(packed) = arrays.get(&name).cloned() else { continue };
        let Some(factor) = arrays.remove(&format!("{name}{FACTOR}")) else { continue };
        if factor.dtype() == Dtype::Uint8 {
            // Powers of two in a byte; no checkpoint with them is known.
            return Err(Error::Array(format!("`{name}{FACTOR}` is not a float")));
        }
        let matrix = from_fp8(&packed, Dtype::Bfloat16)?;
        let factor = if factor.ndim() < 2 { factor } else { spread(&factor, &matrix, block)? };
        arrays.insert(name, matrix.multiply(factor)?.as_dtype(Dtype::Bfloat16)?);
    }
    Ok(())
}

/// Repeats the factor of each block of a matrix, or of a stack of them, for its elements. The last blocks
/// may be smaller.
fn spread(factor: &Array, matrix: &Array, [rows, columns]: [i32; 2]) -> Result<Array> {
    let factor = repeat_axis::<f32>(factor.as_dtype(Dtype::Float32)?, rows, -2)?;
    let factor = repeat_axis::<f32>(factor, columns, -1)?;
    Ok(factor.try_index((Ellipsis, ..matrix.dim(-2), ..matrix.dim(-1)))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 0x38 is 1 in E4M3, 0xc0 is -2, 0x01 the smallest number.
    #[test]
    fn matrices_are_dequantized_whole_or_by_block() {
        let check = |factor: Array, expected: [f32; 6]| {
            let bytes = Array::from_slice(&[0x38u8, 0xc0, 0x38, 0x38, 0x01, 0x38], &[2, 3]);
            let mut arrays = HashMap::from([
                ("a.weight".to_string(), bytes),
                ("a.weight_scale_inv".to_string(), factor),
                ("b.weight".to_string(), Array::from_f32(7.0)),
            ]);
            unpack(&mut arrays, [1, 2]).unwrap();
            assert_eq!(arrays.len(), 2);
            let numbers = arrays["a.weight"].as_dtype(Dtype::Float32).unwrap();
            mlx_rs::transforms::eval([&numbers]).unwrap();
            assert_eq!(numbers.as_slice::<f32>(), expected);
        };
        let tiny = 2f32.powi(-9);
        check(Array::from_f32(0.5), [0.5, -1.0, 0.5, 0.5, 0.5 * tiny, 0.5]);
        let blocks = Array::from_slice(&[1f32, 2.0, 4.0, 8.0], &[2, 2]);
        check(blocks, [1.0, -2.0, 2.0, 4.0, 4.0 * tiny, 8.0]);
    }

    /// Experts are published as one tensor; its blocks were cut along the wrong axes.
    #[test]
    fn stacks_are_dequantized_by_block() {
        let ones = Array::from_slice(&[0x38u8; 12], &[2, 3, 2]);
        let factors = Array::from_slice(&[1f32, 2.0, 3.0, 4.0], &[2, 2, 1]);
        let mut arrays = HashMap::from([
            ("experts.down_proj".to_string(), ones),
            ("experts.down_proj_scale_inv".to_string(), factors),
        ]);
        unpack(&mut arrays, [2, 2]).unwrap();
        let numbers = arrays["experts.down_proj"].as_dtype(Dtype::Float32).unwrap();
        mlx_rs::transforms::eval([&numbers]).unwrap();
        let expected = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 4.0, 4.0];
        assert_eq!(numbers.as_slice::<f32>(), expected);
    }
}
