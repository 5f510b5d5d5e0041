//! Scaled dot-product attention over a cache (arXiv:1706.03762), grouped queries included.

use mlx_rs::fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention};
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{
    arange, broadcast_to, concatenate, matmul, quantized_matmul, select, softmax_axis,
};
use mlx_rs::{Array, Dtype};

use super::{rows_of, scaled, sigmoid_gated, softcap};
use crate::cache::{Full, LayerCache, QuantizedKv, Span, Writer};
use crate::error::Result;
use crate::kernels::{self, LaunchSpan};

/// How products of queries and keys become scores for the softmax.
#[derive(Debug, Clone)]
pub struct Scores {
    /// Factor, usually D^-0.5.
    pub scale: f32,
    /// If set, scores s become c tanh(s / c) (Gemma 2, arXiv:2408.00118).
    pub softcap: Option<f32>,
    /// [H_q]: for each head, a score that the softmax counts besides those of the keys, without a value
    /// (gpt-oss; arXiv:2309.17453).
    pub sinks: Option<Array>,
}

/// Causal attention of the rows of all spans, each over its own entry `layer` in its cache, after appending
/// their keys and values to it.
///
/// `q` [1, R, H_q, D]; `k`, `v` [1, R, H_kv, D]; returns [1, R, H_q D] in `q`'s dtype.
pub fn attention(
    [q, k, v]: [&Array; 3],
    scores: &Scores,
    spans: &mut [Span<'_>],
    layer: usize,
) -> Result<Array> {
    let kv = concatenate(&[k, v], 2)?.swap_axes(1, 2)?;
    append_and_attend(q, &kv, None, scores, spans, layer)
}

/// [`attention`] with keys and then values as further heads, heads first, [1, 2 H_kv, R, D]: one write to each cache. The
/// result is multiplied by the sigmoid of `gates` [1, R, H_q D].
pub fn append_and_attend(
    q: &Array,
    kv: &Array,
    gates: Option<&Array>,
    scores: &Scores,
    spans: &mut [Span<'_>],
    layer: usize,
) -> Result<Array> {
    let has_kernel = has_kernel(q, kv, scores);
    let takes = |span: &Span<'_>| {
        matches!(span.cache.layers[layer], LayerCache::Full(_)) && kernels::can_append(span.rows)
    };
    // A span alone is appended to in one operation, which other operations may follow without waiting.
    let has_several = has_kernel && spans.iter().filter(|span| takes(span)).count() > 1;
    let mut by_kernel = Vec::new();
    let mut start = 0;
    for span in &mut *spans {
        let end = start + span.rows;
        if has_several && takes(span) {
            by_kernel.push((start, span));
        } else {
            let own = match span.rows == kv.dim(2) {
                true => kv.clone(),
                false => kv.try_index((.., .., start..end))?,
            };
            append(&own, has_kernel, &mut span.cache.layers[layer])?;
        }
        start = end;
    }
    append_by_kernel(kv, by_kernel, layer)?;
    attend_appended(q, gates, scores, spans, layer)
}

/// Appends `kv` [1, 2 H_kv, T, D] to the cache of a layer. `has_kernel` tells whether a kernel reads that cache in place.
fn append(kv: &Array, has_kernel: bool, cache: &mut LayerCache) -> Result<()> {
    match cache {
        LayerCache::Full(full) => {
            full.append(kv)?;
            full.set_read_in_place(has_kernel);
            Ok(())
        }
        LayerCache::Quantized(quantized) => quantized.append(kv),
        LayerCache::Sliding(sliding) => {
            let sides = kv.split_equal(2, 1)?;
            sliding.append(&sides[0], &sides[1])
        }
        LayerCache::Recurrent(_) => unreachable!("new_cache made this layer's cache"),
    }
}

/// Appends rows of `kv` [1, 2 H_kv, R, D] to the caches of spans, each with the first of its rows in `kv`, in as few launches
/// as take all of them.
fn append_by_kernel(kv: &Array, mut spans: Vec<(i32, &mut Span<'_>)>, layer: usize) -> Result<()> {
    let mut left = &mut spans[..];
    while !left.is_empty() {
        let mut taken = Vec::new();
        for (start, span) in &mut *left {
            taken.push((*start, reserve(span, layer, kv.dtype())?));
            if !kernels::appends(&taken) {
                taken.pop();
                break;
            }
        }
        let (count, writer) = (taken.len(), kernels::append(kv, &taken)?);
        let (first, others) = left.split_at_mut(count);
        count_written(first.iter_mut().map(|(_, span)| &mut **span), layer, &writer);
        left = others;
    }
    Ok(())
}

/// A span with the buffers of its cache, which have room for its rows.
pub(super) fn reserve<'a>(
    span: &'a mut Span<'_>,
    layer: usize,
    dtype: Dtype,
) -> Result<LaunchSpan<'a>> {
    let (rows, position) = (span.rows, span.offset());
    Ok(LaunchSpan { rows, position, buffers: full(span, layer).reserve(rows, dtype)? })
}

/// Counts the rows of all spans as written by a kernel.
pub(super) fn count_written<'a, 'b: 'a>(
    spans: impl IntoIterator<Item = &'a mut Span<'b>>,
    layer: usize,
    writer: &Writer,
) {
    for span in spans {
        let rows = span.rows;
        full(span, layer).wrote(rows, writer.clone());
    }
}

/// The cache of a layer that keeps all positions.
fn full<'a>(span: &'a mut Span<'_>, layer: usize) -> &'a mut Full {
    match &mut span.cache.layers[layer] {
        LayerCache::Full(full) => full,
        _ => unreachable!("kernels write to caches of all positions only"),
    }
}

/// [`append_and_attend`] after the keys and values were appended, by this layer or another one that shares them.
pub fn attend_appended(
    q: &Array,
    gates: Option<&Array>,
    scores: &Scores,
    spans: &[Span<'_>],
    layer: usize,
) -> Result<Array> {
    let mut parts = Vec::new();
    let (mut start, mut left) = (0, spans);
    while let Some(span) = left.first() {
        let joined = kernel_spans(q, scores, left, layer);
        let count = joined.len().max(1);
        let end = start + left[..count].iter().map(|span| span.rows).sum::<i32>();
        let q = rows_of(q, start..end)?;
        let gates = gates.map(|gates| rows_of(gates, start..end)).transpose()?;
        parts.push(if joined.is_empty() {
            let mixed = attend(&q, scores, &span.cache.layers[layer])?;
            match gates {
                Some(gates) => sigmoid_gated(gates, mixed)?,
                None => mixed,
            }
        } else {
            kernels::attention(&q, gates.as_ref(), scores.scale, &joined)?
        });
        (start, left) = (end, &left[count..]);
    }
    match &parts[..] {
        [part] => Ok(part.clone()),
        parts => Ok(concatenate(parts, 1)?),
    }
}

/// The first of `spans` that a kernel takes in one launch.
fn kernel_spans<'a>(
    q: &Array,
    scores: &Scores,
    spans: &'a [Span<'_>],
    layer: usize,
) -> Vec<LaunchSpan<'a>> {
    let of_kernel = |span: &'a Span<'_>| match &span.cache.layers[layer] {
        LayerCache::Full(full) if has_kernel(q, full.buffers().own, scores) => {
            Some(LaunchSpan::appended(span.rows, full.buffers()))
        }
        _ => None,
    };
    kernels::first_spans(spans.iter().map_while(of_kernel))
}

/// Returns true if a kernel computes such scores of `q` [1, R, H_q, D] and of keys like `kv` [1, 2 H_kv, R, D].
fn has_kernel(q: &Array, kv: &Array, scores: &Scores) -> bool {
    scores.softcap.is_none() && scores.sinks.is_none() && kernels::has_attention(q, kv)
}

/// Causal attention of `q` [1, T, H_q, D], the queries of the last T positions in `cache`: [1, T, H_q D].
fn attend(q: &Array, scores: &Scores, cache: &LayerCache) -> Result<Array> {
    let [rows, heads, dim] = [q.dim(1), q.dim(2), q.dim(3)];
    let y = attend_heads(&q.swap_axes(1, 2)?, scores, cache)?;
    Ok(y.swap_axes(1, 2)?.reshape(&[1, rows, heads * dim])?)
}

/// [`attend`] with heads first: `q` and the result are [1, H_q, T, D].
fn attend_heads(q: &Array, scores: &Scores, cache: &LayerCache) -> Result<Array> {
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
        LayerCache::Quantized(quantized) => {
            let dense = quantized.dense()?.map(|(k, v)| Part::Dense { k, v });
            let packed = quantized.packed()?.map(|(k, v)| Part::Packed { k, v });
            let parts: Vec<Part> = dense.into_iter().chain(packed).collect();
            return attend_parts(q, &parts, scores, i32::MAX);
        }
        LayerCache::Recurrent(_) => unreachable!("new_cache made this layer's cache"),
    };
    if scores.softcap.is_some() {
        return attend_parts(q, &[Part::Dense { k, v }], scores, window);
    }
    // One query attends to all keys in view, so only longer spans need a mask.
    let keys = k.dim(2);
    let sinks = scores.sinks.as_ref();
    if rows == 1 || keys <= window {
        let causal = (rows > 1).then_some(ScaledDotProductAttentionMask::Causal);
        return Ok(scaled_dot_product_attention(q, k, v, scores.scale, causal, sinks)?);
    }
    let mask = mask(rows, keys, window)?;
    Ok(scaled_dot_product_attention(q, k, v, scores.scale, Some((&mask).into()), sinks)?)
}

/// bool [T, K]: true if query t, at the position of key K - T + t, attends to a key: to itself and
/// to the `window - 1` keys before it.
fn mask(rows: i32, keys: i32, window: i32) -> Result<Array> {
    let query = arange::<_, i32>(keys - rows, keys, None)?.expand_dims(1)?;
    let key = arange::<_, i32>(None, keys, None)?.expand_dims(0)?;
    let distance = query.subtract(key)?;
    let near = distance.lt(Array::from_int(window))?;
    Ok(distance.ge(Array::from_int(0))?.logical_and(near)?)
}

/// Neighbouring positions in one format.
enum Part {
    /// [1, H_kv, K, D] each.
    Dense { k: Array, v: Array },
    /// The same, quantized.
    Packed { k: QuantizedKv, v: QuantizedKv },
}

impl Part {
    fn keys(&self) -> i32 {
        match self {
            Self::Dense { k, .. } => k.dim(2),
            Self::Packed { k, .. } => k.elements.dim(2),
        }
    }

    /// `q` [1, H_kv, G, T, D] times the keys: [1, H_kv, G, T, K].
    fn scores(&self, q: &Array) -> Result<Array> {
        match self {
            Self::Dense { k, .. } => Ok(matmul(q, k.expand_dims(2)?.swap_axes(3, 4)?)?),
            Self::Packed { k, .. } => k.product(q, true),
        }
    }

    /// `weights` [1, H_kv, G, T, K] times the values: [1, H_kv, G, T, D].
    fn mix(&self, weights: &Array) -> Result<Array> {
        match self {
            Self::Dense { v, .. } => Ok(matmul(weights, v.expand_dims(2)?)?),
            Self::Packed { v, .. } => v.product(weights, false),
        }
    }
}

impl QuantizedKv {
    fn product(&self, x: &Array, transpose: bool) -> Result<Array> {
        let each = |a: &Array| a.expand_dims(2);
        let (rows, scales, biases) =
            (each(&self.elements)?, each(&self.scales)?, each(&self.biases)?);
        Ok(quantized_matmul(x, rows, scales, &biases, transpose, self.group, self.bits)?)
    }
}

/// Attention in plain operations, for cases without a fused kernel in MLX: capped scores, and
/// quantized keys and values.
fn attend_parts(q: &Array, parts: &[Part], scores: &Scores, window: i32) -> Result<Array> {
    let [heads, rows, dim] = [q.dim(1), q.dim(2), q.dim(3)];
    let dtype = q.dtype();
    let kv_heads = match &parts[0] {
        Part::Dense { k, .. } => k.dim(1),
        Part::Packed { k, .. } => k.elements.dim(1),
    };
    let q = scaled(q, scores.scale)?.reshape(&[1, kv_heads, heads / kv_heads, rows, dim])?;
    let products = parts.iter().map(|part| part.scores(&q)).collect::<Result<Vec<_>>>()?;
    let mut products = concatenate(&products, 4)?;
    if let Some(cap) = scores.softcap {
        products = softcap(&products, cap)?;
    }
    let keys = products.dim(4);
    if rows > 1 || keys > window {
        let never = Array::from_f32(f32::NEG_INFINITY).as_dtype(dtype)?;
        products = select(mask(rows, keys, window)?, products, never)?;
    }
    if let Some(sinks) = &scores.sinks {
        let sinks = sinks.as_dtype(dtype)?.reshape(&[1, kv_heads, heads / kv_heads, 1, 1])?;
        let column = broadcast_to(sinks, &[1, kv_heads, heads / kv_heads, rows, 1])?;
        products = concatenate(&[products, column], 4)?;
    }
    // The softmax sums in f32, as fused kernels do.
    let weights = softmax_axis(products.as_dtype(Dtype::Float32)?, -1, true)?.as_dtype(dtype)?;
    let mut start = 0;
    let mut sum: Option<Array> = None;
    for part in parts {
        let end = start + part.keys();
        let mixed = part.mix(&weights.try_index((.., .., .., .., start..end))?)?;
        sum = Some(match sum {
            Some(sum) => sum.add(mixed)?,
            None => mixed,
        });
        start = end;
    }
    let mixed = sum.expect("attention runs over at least one position");
    Ok(mixed.reshape(&[1, heads, rows, mixed.dim(4)])?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Cache, Full, Quantized};
    use mlx_rs::ops::{dequantize, quantize};
    use mlx_rs::random;

    fn normal(seed: u64, shape: &[i32]) -> Array {
        random::normal::<f32>(shape, None, None, &random::key(seed).unwrap()).unwrap()
    }

    /// Attention over quantized KV equals attention over the dequantized KV, and positions before the
    /// first quantized one stay exact, in any number of pieces.
    #[test]
    fn quantized_attention_equals_attention_over_dequantized_kv() {
        let (k, v) = (normal(1, &[1, 40, 2, 64]), normal(2, &[1, 40, 2, 64]));
        let q = normal(3, &[1, 40, 6, 64]);
        let plain = Scores { scale: 0.125, softcap: None, sinks: None };
        let sinks = Some(Array::from_slice(&[0.5f32, -1.0, 2.0, 0.0, 1.0, 3.0], &[6]));
        for scores in [plain.clone(), Scores { sinks, ..plain }] {
            check_quantized(&scores, [&q, &k, &v]);
        }
    }

    fn check_quantized(scores: &Scores, [q, k, v]: [&Array; 3]) {
        for (bits, from) in [(8, 0), (4, 0), (8, 13), (4, 39), (4, 40)] {
            let stored = |a: &Array| {
                let (w, s, b) = quantize(a, 64, bits).unwrap();
                let coarse = dequantize(w, s, &b, 64, bits).unwrap();
                let [head, _] = &a.split_at_indices(&[from], 1).unwrap()[..] else { panic!() };
                let [_, tail] = &coarse.split_at_indices(&[from], 1).unwrap()[..] else { panic!() };
                concatenate(&[head, tail], 1).unwrap()
            };
            let mix = |[q, k, v]: [&Array; 3], cache: &mut Cache| {
                let mut span = [Span { rows: q.dim(1), cache }];
                attention([q, k, v], scores, &mut span, 0).unwrap()
            };
            let mut full = Cache::new(vec![LayerCache::Full(Full::new(2, 64))]);
            let expected = mix([q, &stored(k), &stored(v)], &mut full);
            for pieces in [vec![], vec![1, 2, 17], vec![13], vec![39]] {
                let quantized = Quantized::new(&Full::new(2, 64), bits, from).unwrap();
                let mut cache = Cache::new(vec![LayerCache::Quantized(quantized)]);
                let split = |a: &Array| a.split_at_indices(&pieces, 1).unwrap();
                let parts = split(q).into_iter().zip(split(k)).zip(split(v));
                let ys: Vec<Array> =
                    parts.map(|((q, k), v)| mix([&q, &k, &v], &mut cache)).collect();
                let difference = concatenate(&ys, 1).unwrap().subtract(&expected).unwrap();
                let worst = difference.abs().unwrap().max(None).unwrap().item_exact::<f32>();
                assert!(worst < 1e-4, "{bits} bits from {from}, {pieces:?}: {worst}");
            }
        }
    }
}
