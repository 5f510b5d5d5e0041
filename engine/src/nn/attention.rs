//! Scaled dot-product attention over a cache (arXiv:1706.03762), grouped queries included.

use mlx_rs::Array;
use mlx_rs::fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention};

use crate::cache::Full;
use crate::error::Result;

/// Causal attention of `q` over all positions in `cache`, after appending `k` and `v` to it.
///
/// `q` [1, H_q, T, D]; `k`, `v` [1, H_kv, T, D]; returns [1, H_q, T, D] in `q`'s dtype.
/// `scale` is D^-0.5 unless the family's config says otherwise.
///
/// # Errors
/// [`crate::Error::Array`] when MLX rejects a shape.
pub fn attention(q: &Array, k: &Array, v: &Array, scale: f32, cache: &mut Full) -> Result<Array> {
    let (k, v) = cache.append(k, v)?;
    // One query sees everything that is cached, so only longer spans need the mask.
    let mask = (q.dim(2) > 1).then_some(ScaledDotProductAttentionMask::Causal);
    Ok(scaled_dot_product_attention(q, k, v, scale, mask, None)?)
}
