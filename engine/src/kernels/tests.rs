//! Laws of kernels on any device, against the same formulas in MLX's operations.

use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype, random};

use super::has_heads;
use crate::cache::{Cache, Full, LayerCache, Span};
use crate::nn::{GatedDelta, Heads, Joined, Linear, Outputs, RmsNorm, Rope, Scores};

/// Kernels of a device.
pub struct Backend {
    /// Turns them on or off.
    pub enable: fn(bool),
    /// Whether they read joined projections.
    pub joins: bool,
    /// Whether they compute attention from the projections on.
    pub attends: bool,
    /// Whether each pass must be queued before the next one is made, as in decoding.
    pub queues: bool,
}

/// Random numbers of a normal distribution.
pub fn normal(seed: u64, shape: &[i32], dtype: Dtype) -> Array {
    let key = random::key(seed).unwrap();
    random::normal::<f32>(shape, None, None, &key).unwrap().as_dtype(dtype).unwrap()
}

/// Largest difference over the largest value of `b`.
pub fn error(a: &Array, b: &Array) -> f32 {
    assert_eq!((a.shape(), a.dtype()), (b.shape(), b.dtype()));
    let [a, b] = [a, b].map(|x| x.as_dtype(Dtype::Float32).unwrap());
    let largest = |x: Array| x.abs().unwrap().max(None).unwrap().item_exact::<f32>();
    largest(a.subtract(&b).unwrap()) / largest(b)
}

/// Attention from projections on, of passes over sequences: output of all passes. `shares` lets each sequence share its
/// rows after the pass, as far as there are whole blocks.
pub fn run_heads(
    backend: &Backend,
    kernel: bool,
    heads: &Heads<'_>,
    passes: &[&[i32]],
    shares: Option<usize>,
    dtype: Dtype,
) -> Vec<Array> {
    let &Backend { enable, joins, attends, queues } = backend;
    let &Heads { heads: h, kv_heads: h_kv, head_dim: d, gated, .. } = heads;
    let widths = [if gated { 2 * h * d } else { h * d }, h_kv * d, h_kv * d];
    let dense = |width| Linear::Dense { weight: normal(9, &[width, 8], dtype).into(), bias: None };
    enable(false);
    let projections = Joined::new(widths.map(dense)).unwrap();
    enable(kernel);
    let new = |_| Cache::new(vec![LayerCache::Full(Full::new(h_kv, d))]);
    let mut caches: Vec<Cache> = (0..passes[0].len()).map(new).collect();
    let scores = Scores { scale: (d as f32).powf(-0.5), softcap: None, sinks: None };
    let mut ys = Vec::new();
    for (pass, rows) in passes.iter().enumerate() {
        let all = rows.iter().sum();
        let parts =
            [0, 1, 2].map(|i| normal(10 * pass as u64 + i, &[1, all, widths[i as usize]], dtype));
        let projected = if kernel && joins && pass % 2 == 0 {
            Outputs::Joined(concatenate(&parts, 2).unwrap())
        } else {
            Outputs::Apart(parts)
        };
        let spans = caches.iter_mut().zip(rows.iter());
        let mut spans: Vec<_> = spans.map(|(cache, &rows)| Span { rows, cache }).collect();
        if kernel && attends && rows.iter().all(|rows| *rows <= 8) {
            assert!(has_heads(&heads.view(), &projected, &spans));
        }
        ys.push(heads.attend(projected, &projections, &scores, &mut spans, 0).unwrap());
        if queues {
            crate::lazy::submit(&ys[pass..]).unwrap();
        }
        spans.iter_mut().for_each(Span::advance);
        if shares == Some(pass) {
            for cache in caches.iter_mut().filter(|cache| cache.position >= 64) {
                cache.share().unwrap();
                assert!(cache.shared_count() > 0);
            }
        }
    }
    // The caches hold what the kernel wrote in place.
    let held = caches.iter().flat_map(|cache| {
        cache.key_values(0, cache.position).unwrap().arrays().cloned().collect::<Vec<_>>()
    });
    ys.extend(held);
    eval(&ys).unwrap();
    enable(false);
    ys
}

/// Attention by a kernel against the same in MLX's operations, for prompts, steps, drafts and growing buffers.
pub fn check_heads(backend: &Backend, dtype: Dtype, bound: f32) {
    for (shape, dims, gated) in [
        ([16, 4, 256], 64, true),
        ([8, 8, 64], 64, false),
        ([6, 2, 128], 0, true),
        ([4, 1, 96], 48, false),
    ] {
        let [heads, kv_heads, head_dim] = shape;
        let norm = |seed| RmsNorm { weight: normal(seed, &[head_dim], dtype), eps: 1e-6 };
        let (q_norm, k_norm, rope) = (norm(1), norm(2), Rope::new(dims, 10_000.0));
        for normed in [true, false] {
            let heads = Heads {
                heads,
                kv_heads,
                head_dim,
                gated,
                q_norm: normed.then_some(&q_norm),
                k_norm: normed.then_some(&k_norm),
                rope: (dims > 0).then_some(&rope),
            };
            // Prompts longer than the kernel's rows, steps, drafts, and a buffer that grows.
            let passes: [&[i32]; 5] =
                [&[300, 1, 250, 8], &[1, 2, 8, 1], &[1, 1, 1, 1], &[8, 8, 8, 8], &[20, 1, 1, 1]];
            let ours = run_heads(backend, true, &heads, &passes, None, dtype);
            let reference = run_heads(backend, false, &heads, &passes, None, dtype);
            for (i, (a, b)) in ours.iter().zip(&reference).enumerate() {
                let error = error(a, b);
                assert!(error < bound, "{dtype:?} {shape:?} {gated} {normed} {i}: {error:e}");
            }
            // Shared rows are read where they lie, in the same order: the same bits.
            for shares in [0, 2] {
                let shared = run_heads(backend, true, &heads, &passes, Some(shares), dtype);
                for (i, (a, b)) in shared.iter().zip(&ours).enumerate() {
                    let difference = error(a, b);
                    assert!(difference == 0.0, "{dtype:?} {shape:?} {gated} {normed} {i}, shared");
                }
            }
        }
    }
}

/// A copy of a cache has the rows that were written before, and not those written to the other one afterwards.
pub fn check_copies(&Backend { enable, .. }: &Backend, dtype: Dtype) {
    let heads = Heads {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        gated: false,
        q_norm: None,
        k_norm: None,
        rope: None,
    };
    let dense = |_| Linear::Dense { weight: normal(9, &[128, 8], dtype).into(), bias: None };
    let projections = Joined::new([0, 1, 2].map(dense)).unwrap();
    let scores = Scores { scale: 0.125, softcap: None, sinks: None };
    let step = |cache: &mut Cache, seed: u64| {
        let parts = [256, 128, 128].map(|width| normal(seed, &[1, 1, width], dtype));
        let mut spans = [Span { rows: 1, cache }];
        let projected = Outputs::Apart(parts);
        let y = heads.attend(projected, &projections, &scores, &mut spans, 0).unwrap();
        spans.iter_mut().for_each(Span::advance);
        eval([&y]).unwrap();
        y
    };
    enable(true);
    let mut first = Cache::new(vec![LayerCache::Full(Full::new(2, 64))]);
    step(&mut first, 1);
    let mut second = first.clone();
    let [a, b] = [step(&mut first, 2), step(&mut second, 3)];
    let [again_a, again_b] = [(2, 4), (3, 5)].map(|(own, next)| {
        let mut alone = Cache::new(vec![LayerCache::Full(Full::new(2, 64))]);
        step(&mut alone, 1);
        (step(&mut alone, own), step(&mut alone, next))
    });
    let (next_a, next_b) = (step(&mut first, 4), step(&mut second, 5));
    enable(false);
    for (x, y) in [(a, again_a.0), (b, again_b.0), (next_a, again_a.1), (next_b, again_b.1)] {
        assert_eq!(error(&x, &y), 0.0, "{dtype:?}");
    }
}

/// A layer with random weights, `heads` of keys and of values.
pub fn gated_delta(heads: [i32; 2], dim: i32, dtype: Dtype) -> GatedDelta {
    let [key_heads, value_heads] = heads;
    let channels = (2 * key_heads + value_heads) * dim;
    GatedDelta {
        conv1d: (0..4).map(|tap| normal(tap, &[channels], dtype)).collect(),
        a_log: normal(10, &[value_heads], Dtype::Float32),
        dt_bias: normal(11, &[value_heads], dtype),
        norm: RmsNorm { weight: normal(12, &[dim], dtype), eps: 1e-6 },
        key_heads,
        value_heads,
        key_dim: dim,
        value_dim: dim,
    }
}

/// Projections of `rows` rows, [1, R, outputs of all].
pub fn projected(layer: &GatedDelta, rows: i32, dtype: Dtype) -> Array {
    let (heads, values) = (layer.value_heads, layer.value_heads * layer.value_dim);
    let channels = 2 * layer.key_heads * layer.key_dim + values;
    normal(20, &[1, rows, channels + values + 2 * heads], dtype)
}

/// Rows of projections, in one array or in one for each layer.
pub fn outputs(layer: &GatedDelta, all: &Array, from: i32, to: i32, joined: bool) -> Outputs<4> {
    let all = Outputs::Joined(all.try_index((.., from..to)).unwrap());
    if joined {
        return all;
    }
    let parts = layer.parts(&all).unwrap();
    Outputs::Apart([parts.qkv, parts.z, parts.b, parts.a])
}

/// Output and final states of two sequences that run `passes` of rows each, with or without the kernel.
pub fn run_delta(
    &Backend { enable, .. }: &Backend,
    kernel: bool,
    layer: &GatedDelta,
    passes: &[i32],
    dtype: Dtype,
) -> Vec<Array> {
    enable(kernel);
    let x = projected(layer, 2 * passes.iter().sum::<i32>(), dtype);
    let new = || {
        let recurrent = layer.new_cache(dtype).unwrap();
        Cache::new(vec![LayerCache::Recurrent(recurrent)])
    };
    let (mut first, mut second) = (new(), new());
    let (mut ys, mut start) = ([Vec::new(), Vec::new()], 0);
    for (pass, &count) in passes.iter().enumerate() {
        // The last pass is recorded, and one row of it stays.
        let is_last = pass + 1 == passes.len();
        if is_last {
            [&mut first, &mut second].into_iter().for_each(Cache::mark_draft);
        }
        let end = start + 2 * count;
        let own = outputs(layer, &x, start, end, pass % 2 == 0);
        let mut spans = [&mut first, &mut second].map(|cache| Span { rows: count, cache });
        let y = layer.forward(&own, &mut spans, 0).unwrap();
        for (y, parts) in y.split_at_indices(&[count], 1).unwrap().into_iter().zip(&mut ys) {
            parts.push(y);
        }
        start = end;
        if is_last {
            for cache in [&mut first, &mut second] {
                let LayerCache::Recurrent(recurrent) = &mut cache.layers[0] else { unreachable!() };
                recurrent.rewind_draft(1).unwrap();
            }
        }
    }
    let mut result: Vec<Array> = ys.iter().map(|parts| concatenate(parts, 1).unwrap()).collect();
    for cache in [first, second] {
        result.extend(cache.arrays().unwrap());
    }
    // Not together with the operations that it is compared with.
    eval(&result).unwrap();
    enable(false);
    result
}

/// Most rows of a sequence in [`states_after`].
const MOST: i32 = 12;

/// States and tails of two sequences after two rows and `keep` further ones, which are the first of a draft of `rows` or a
/// pass of their own.
pub fn states_after(
    layer: &GatedDelta,
    keep: i32,
    rows: i32,
    joined: bool,
    dtype: Dtype,
) -> Vec<Array> {
    // The same numbers for all `rows`.
    let x = projected(layer, 2 * MOST, dtype);
    let new = || Cache::new(vec![LayerCache::Recurrent(layer.new_cache(dtype).unwrap())]);
    let mut caches = [new(), new()];
    let run = |caches: &mut [Cache; 2], from: i32, rows: i32| {
        let parts =
            [from, MOST + from].map(|start| x.try_index((.., start..start + rows)).unwrap());
        let own = outputs(layer, &concatenate(&parts, 1).unwrap(), 0, 2 * rows, joined);
        let mut spans = caches.each_mut().map(|cache| Span { rows, cache });
        layer.forward(&own, &mut spans, 0).unwrap();
        spans.iter_mut().for_each(Span::advance);
    };
    run(&mut caches, 0, 2);
    caches.iter_mut().for_each(Cache::mark_draft);
    run(&mut caches, 2, rows);
    caches.iter_mut().for_each(|cache| cache.rewind_draft(2 + keep as usize).unwrap());
    let states: Vec<Array> = caches.iter().flat_map(|cache| cache.arrays().unwrap()).collect();
    eval(&states).unwrap();
    states
}
