//! The noise of sampling: one number for each token at each position of a request.
//!
//! Every position has its own key, made of the request's seed and the index of the position ([`mix`]), so
//! earlier and discarded samples do not change later ones, and neither do other requests. Noise belongs
//! to tokens, not to ranks: two tokens that swap ranks within rounding error keep it.

#![allow(
    unsafe_code,
    reason = "mlx-rs has no function for the bits that random numbers are made of"
)]

use mlx_rs::ops::{concatenate, minimum};
use mlx_rs::{Array, Stream, random};
use mlx_sys::mlx_array;

use crate::error::{Error, Result};

/// Bytes of a random number.
const WIDTH: i32 = 4;

/// Random bits u32 [R, columns], a row for each key.
pub fn bits(keys: &[u64], columns: i32) -> Result<Array> {
    let rows = keys.iter().map(|&key| row_bits(key, columns)).collect::<Result<Vec<_>>>()?;
    match &rows[..] {
        [row] => Ok(row.clone()),
        rows => Ok(concatenate(rows, 0)?),
    }
}

fn row_bits(key: u64, columns: i32) -> Result<Array> {
    let (key, shape, stream) = (random::key(key)?, [1, columns], Stream::thread_local_or_default());
    let mut bits = mlx_array::default();
    // SAFETY: reads `shape` and `key`, which live as long as this function, and fills `bits` with a new
    // array or leaves it empty.
    let status = unsafe {
        mlx_sys::mlx_random_bits(
            &mut bits,
            shape.as_ptr(),
            shape.len(),
            WIDTH,
            key.as_ptr(),
            stream.as_ptr(),
        )
    };
    if status != 0 {
        return Err(Error::Array(format!("there are no random bits of shape {shape:?}")));
    }
    // SAFETY: just filled, and owned by nobody else.
    Ok(unsafe { Array::from_ptr(bits) })
}

/// Gumbel noise f32 of random `bits` u32, element by element: the noise of [`random::gumbel`].
pub fn gumbel(bits: &Array) -> Result<Array> {
    let uniform = bits.divide(Array::from_f32(u32::MAX as f32))?;
    let uniform = minimum(uniform, Array::from_f32(1.0f32.next_down()))?;
    Ok(uniform.log()?.negative()?.log()?.negative()?)
}

/// SplitMix64's finalizer over seed and index: neighbouring positions get unrelated keys.
pub fn mix(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A seed gives the noise that it gave before rows were joined.
    #[test]
    fn noise_of_joined_rows_is_that_of_each_key() {
        for columns in [1, 2, 7, 64, 1001] {
            let keys: Vec<u64> = (0..5).map(|index| mix(3, index)).collect();
            let joined = gumbel(&bits(&keys, columns).unwrap()).unwrap();
            let alone = keys.iter().map(|&key| {
                random::gumbel::<f32>(&[1, columns][..], &random::key(key).unwrap()).unwrap()
            });
            let alone = concatenate(&alone.collect::<Vec<_>>(), 0).unwrap();
            assert_eq!(joined.as_slice::<f32>(), alone.as_slice::<f32>(), "{columns} columns");
        }
    }
}
