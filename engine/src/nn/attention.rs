//! Scaled dot-product attention over a cache (arXiv:1706.03762), grouped queries included.

use mlx_rs::fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention};
use mlx_rs::ops::{arange, matmul, select, softmax_axis};
use mlx_rs::{Array, Dtype};

use super::{scaled, softcap};
use crate::cache::LayerCache;
use crate::error::Result;

/// What happens to the products of queries and keys before the softmax.
#[derive(Debug, Clone, Copy)]
pub struct Scores {
    /// Factor: D^-0.5 unless the family's config says otherwise.
    pub scale: f32,
    /// Scores s become c tanh(s / c), where given (Gemma 2, arXiv:2408.00118).
    pub softcap: Option<f32>,
}

/// Causal attention of `q` over what `cache` holds, after appending `k` and `v` to it.
///
/// `q` [1, H_q, T, D]; `k`, `v` [1, H_kv, T, D]; returns [1, H_q, T, D] in `q`'s dtype.
///
/// # Errors
/// [`crate::Error::Array`] when MLX rejects a shape.
pub fn attention(
    q: &Array,
    k: &Array,
    v: &Array,
    scores: Scores,
    cache: &mut LayerCache,
) -> Result<Array> {
    match cache {
        LayerCache::Full(full) => full.append(k, v)?,
        LayerCache::Sliding(sliding) => sliding.append(k, v)?,
        LayerCache::Recurrent(_) => unreachable!("new_cache made this layer's cache"),
    }
    attend(q, scores, cache)
}

/// Causal attention of `q`, the queries of the last T positions in `cache`, over what it holds.
///
/// # Errors
/// [`crate::Error::Array`] when MLX rejects a shape.
pub fn attend(q: &Array, scores: Scores, cache: &LayerCache) -> Result<Array> {
    let rows = q.dim(2);
    let (k, v, window) = match cache {
        LayerCache::Full(full) => {
            let (k, v) = full.view()?;
            (k, v, i32::MAX)
        }
        LayerCache::Sliding(sliding) => {
            let (k, v) = sliding.view(rows)?;
            (k, v, sliding.window())
        }
        LayerCache::Recurrent(_) => unreachable!("new_cache made this layer's cache"),
    };
    // One query sees all that is in view, so only longer spans need a mask.
    let keys = k.dim(2);
    if let Some(cap) = scores.softcap {
        let mask = (rows > 1).then(|| mask(rows, keys, window)).transpose()?;
        return capped(q, &k, &v, scores.scale, cap, mask.as_ref());
    }
    if rows == 1 || keys <= window {
        let causal = (rows > 1).then_some(ScaledDotProductAttentionMask::Causal);
        return Ok(scaled_dot_product_attention(q, k, v, scores.scale, causal, None)?);
    }
    let mask = mask(rows, keys, window)?;
    Ok(scaled_dot_product_attention(q, k, v, scores.scale, Some((&mask).into()), None)?)
}

/// bool [T, K]: true where query row t, which stands at key K - T + t, may look at a key: at itself
/// and the `window - 1` keys before it.
fn mask(rows: i32, keys: i32, window: i32) -> Result<Array> {
    let query = arange::<_, i32>(keys - rows, keys, None)?.expand_dims(1)?;
    let key = arange::<_, i32>(None, keys, None)?.expand_dims(0)?;
    let distance = query.subtract(key)?;
    let near = distance.lt(Array::from_int(window))?;
    Ok(distance.ge(Array::from_int(0))?.logical_and(near)?)
}

/// Attention whose scores pass a soft cap, for which MLX has no fused kernel.
fn capped(
    q: &Array,
    k: &Array,
    v: &Array,
    scale: f32,
    cap: f32,
    mask: Option<&Array>,
) -> Result<Array> {
    let [heads, rows, dim] = [q.dim(1), q.dim(2), q.dim(3)];
    let (kv_heads, keys) = (k.dim(1), k.dim(2));
    let grouped = [1, kv_heads, heads / kv_heads, rows, dim];
    let dtype = q.dtype();
    let q = scaled(q, scale)?.reshape(&grouped)?;
    let k = k.reshape(&[1, kv_heads, 1, keys, dim])?;
    let v = v.reshape(&[1, kv_heads, 1, keys, v.dim(3)])?;
    let mut scores = matmul(&q, k.swap_axes(3, 4)?)?;
    scores = softcap(&scores, cap)?;
    if let Some(mask) = mask {
        scores = select(mask, scores, Array::from_f32(f32::NEG_INFINITY).as_dtype(dtype)?)?;
    }
    // The softmax sums in f32, as fused kernels do.
    let weights = softmax_axis(scores.as_dtype(Dtype::Float32)?, -1, true)?.as_dtype(dtype)?;
    Ok(matmul(&weights, &v)?.reshape(&[1, heads, rows, v.dim(4)])?)
}
