//! Kernels against the same formulas in MLX's operations. They need a CUDA device; without one they print that
//! they were skipped. With `MLX_USE_CUDA_GRAPHS=1` kernels have no clusters.

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, sort_axis};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Device, Dtype};

use super::tiled::QUANTIZATION;
use super::{Capability, Tiled};
use crate::cache::{Cache, Full, LayerCache, Span};
use crate::kernels::tests::{
    Backend, check_copies, check_heads, error, gated_delta, normal, outputs, projected, run_delta,
    states_after,
};
use crate::nn::{
    Block, DENSE_ROWS, Embedding, Experts, Gate, GatedMlp, Input, Joined, Linear, Mlp, Moe, Packed,
    RmsNorm, Scores, Shared, attention, swiglu,
};
use crate::ranks::Ranks;

const BACKEND: Backend = Backend { enable, joins: true, attends: true, queues: true };

/// Runs `test` with the types of models, if there is a device.
fn on_device(test: impl Fn(Dtype, f32)) {
    if Capability::of_device().is_none() {
        return println!("SKIPPED: MLX finds no CUDA device");
    }
    Device::set_default(&Device::gpu());
    test(Dtype::Float32, 2e-3);
    test(Dtype::Bfloat16, 6e-2);
}

/// Turns the kernels on or off.
fn enable(on: bool) {
    super::enable(if on { Capability::of_device() } else { None });
}

/// The reference runs on the CPU: products of MLX on a GPU are rounded to TF32.
#[test]
fn gated_delta_equals_its_operations() {
    on_device(|dtype, bound| {
        for (heads, dim) in [([16, 32], 128), ([2, 2], 64), ([1, 3], 32)] {
            let layer = gated_delta(heads, dim, dtype);
            for passes in [&[1][..], &[3, 1, 8, 2], &[9], &[70, 1, 1]] {
                let ours = run_delta(&BACKEND, true, &layer, passes, dtype);
                let operations = run_delta(&BACKEND, false, &layer, passes, dtype);
                Device::set_default(&Device::cpu());
                let reference = run_delta(&BACKEND, false, &layer, passes, dtype);
                Device::set_default(&Device::gpu());
                for (i, b) in reference.iter().enumerate() {
                    let (error, on_gpu) = (error(&ours[i], b), error(&operations[i], b));
                    let case = format!("{dtype:?} {heads:?} {dim} {passes:?} {i}");
                    println!("{case}: kernel {error:e}, operations {on_gpu:e}");
                    assert!(error < bound && on_gpu < bound, "{case}: {error:e}, {on_gpu:e}");
                }
            }
        }
    });
}

#[test]
fn a_rewound_draft_leaves_the_bits_of_a_shorter_pass() {
    on_device(|dtype, _| {
        enable(true);
        for (heads, dim) in [([16, 32], 128), ([2, 2], 64), ([1, 3], 32)] {
            let layer = gated_delta(heads, dim, dtype);
            for (keep, joined) in [(1, true), (1, false), (2, true), (8, false), (9, true)] {
                let rewound = states_after(&layer, keep, 10, joined, dtype);
                let alone = states_after(&layer, keep, keep, joined, dtype);
                for (a, b) in rewound.iter().zip(&alone) {
                    let equal = a.eq(b).unwrap().all(None).unwrap().item_exact::<bool>();
                    assert!(equal, "{dtype:?} {heads:?} {dim} {keep} {joined}: {:e}", error(a, b));
                }
            }
        }
        enable(false);
    });
}

/// Attention of passes over sequences, rows of each by pass: output of all passes.
fn run_attention(kernel: bool, shape: [i32; 3], passes: &[&[i32]], dtype: Dtype) -> Vec<Array> {
    enable(kernel);
    let [heads, kv_heads, dim] = shape;
    let new = |_| Cache::new(vec![LayerCache::Full(Full::new(kv_heads, dim))]);
    let mut caches: Vec<Cache> = (0..passes[0].len()).map(new).collect();
    let scores = Scores { scale: (dim as f32).powf(-0.5), softcap: None, sinks: None };
    let mut ys = Vec::new();
    for (pass, rows) in passes.iter().enumerate() {
        // A sequence's rows are the same whatever else runs.
        let each = |seed: u64, heads| {
            let parts = rows.iter().enumerate().map(|(i, &rows)| {
                normal(seed + 100 * pass as u64 + 10 * i as u64, &[1, rows, heads, dim], dtype)
            });
            concatenate(&parts.collect::<Vec<_>>(), 1).unwrap()
        };
        let (q, k, v) = (each(1, heads), each(2, kv_heads), each(3, kv_heads));
        let spans = caches.iter_mut().zip(rows.iter());
        let mut spans: Vec<_> = spans.map(|(cache, &rows)| Span { rows, cache }).collect();
        ys.push(attention([&q, &k, &v], &scores, &mut spans, 0).unwrap());
        drop(spans);
        caches
            .iter_mut()
            .zip(rows.iter())
            .for_each(|(cache, &rows)| cache.position += rows as usize);
    }
    eval(&ys).unwrap();
    enable(false);
    ys
}

/// Partial results of a launch are as many as its rows times the parts of its longest span.
#[test]
fn a_prompt_is_not_launched_beside_a_long_context() {
    let takes = |spans: &[(i32, i32)]| super::takes(spans.iter().copied());
    assert!(takes(&[(8, 1 << 20), (1, 1 << 20)]));
    assert!(takes(&[(64, 64), (33, 1000), (1, 500)]));
    assert!(takes(&[(64, 2048)]) && !takes(&[(64, 2049)]));
    assert!(!takes(&[(64, 64), (1, 100_000)]));
    assert!(!takes(&[(65, 65)]));
}

#[test]
fn attention_equals_its_operations() {
    on_device(|dtype, bound| {
        for shape in [[16, 4, 256], [8, 8, 64], [6, 2, 128], [2, 1, 96]] {
            let prompts: &[i32] = &[300, 1, 17, 1000, 256, 255, 3, 40, 9, 511];
            let rows =
                [[1; 10], [1, 2, 1, 8, 3, 4, 1, 5, 1, 2], [64, 1, 33, 9, 2, 65, 12, 64, 1, 17]];
            for next in rows {
                let passes = [prompts, &next, &[1; 10]];
                let ours = run_attention(true, shape, &passes, dtype);
                let reference = run_attention(false, shape, &passes, dtype);
                for (pass, (a, b)) in ours.iter().zip(&reference).enumerate() {
                    let error = error(a, b);
                    assert!(error < bound, "{dtype:?} {shape:?} {next:?} pass {pass}: {error:e}");
                }
            }
        }
    });
}

/// A quantized layer in MLX's order, and in tiles.
fn layers(seed: u64, shape: [i32; 2]) -> [Linear; 2] {
    let weight = Packed::quantize(&normal(seed, &shape, Dtype::Bfloat16), QUANTIZATION);
    enable(true);
    let tiled = Tiled::new(weight.view()).unwrap().unwrap();
    enable(false);
    let reference = Linear::Quantized { weight, bias: None };
    let own = Linear::Tiled { weight: tiled, bias: None };
    assert_eq!(own.shape(), shape);
    [reference, own]
}

fn input<'a>(x: &'a Array, norm: Option<&'a RmsNorm>) -> Input<'a> {
    norm.map_or(Input::Rows(x), |norm| Input::Normed(x, norm.view()))
}

/// The result of `run` with kernels, and its first row with kernels.
fn with_kernels(run: impl Fn(i32) -> Array, rows: i32) -> [Array; 2] {
    enable(true);
    let results = [run(rows), run(1)];
    eval(&results).unwrap();
    enable(false);
    results
}

/// Products with few rows and with many, with one turn of a block and with several, in all clusters. A row's bits do not
/// depend on the other rows.
#[test]
fn product_equals_its_operation() {
    on_device(|dtype, bound| {
        if dtype == Dtype::Float32 {
            // There is no kernel for it.
            return;
        }
        let shapes = [
            [4096, 4096],
            [512, 12288],
            [9728, 2560],
            [16, 256],
            [32, 9728],
            [40_000, 1024],
            [1544, 384],
            [20, 576],
        ];
        for [outputs, inputs] in shapes {
            let [reference, own] = layers(1, [outputs, inputs]);
            let [Linear::Tiled { weight: tiled, .. }, Linear::Quantized { weight, .. }] =
                [&own, &reference]
            else {
                unreachable!("made so by `layers`")
            };
            let packed = Packed::from_tiled(tiled).unwrap();
            for (a, b) in [(&packed.weight, &weight.weight), (&packed.scales, &weight.scales)] {
                assert_eq!(error(a, b), 0.0, "{inputs} {outputs}");
            }
            assert_eq!(error(&packed.biases.unwrap(), weight.biases.as_ref().unwrap()), 0.0);
            let dense = reference.dense().unwrap();
            // MLX rounds the product of an element and its scale.
            let difference = error(&own.dense().unwrap(), &dense);
            assert!(difference < 1e-2, "{inputs} {outputs}: {difference:e}");
            let ids = Array::from_slice(&[5u32, 0, 15], &[3]);
            let [rows, expected] =
                [&own, &reference].map(|layer| Embedding(layer.clone()).forward(&ids).unwrap());
            assert!(error(&rows, &expected) < 1e-2, "{inputs} {outputs}");
            let dense = dense.swap_axes(0, 1).unwrap();
            for rows in [1, 2, 5, 8, 9, 16, 17, 24, 25, 32, 33, 64, 127, 200] {
                let x = normal(2, &[1, rows, inputs], dtype);
                let run = |rows| own.forward(&x.try_index((.., ..rows)).unwrap()).unwrap();
                let [ours, first] = with_kernels(run, rows);
                let difference = error(&ours, &x.matmul(&dense).unwrap());
                assert!(difference < bound, "{dtype:?} {inputs} {outputs} {rows}: {difference:e}");
                if rows < DENSE_ROWS {
                    let row = ours.try_index((.., ..1)).unwrap();
                    assert_eq!(error(&row, &first), 0.0, "{inputs} {outputs} {rows}");
                }
            }
        }
    });
}

/// Norms of the rows of a product, sums of its results and SwiGLU of them are the same as in operations of their own.
#[test]
fn products_with_norms_sums_and_gates_equal_separate_operations() {
    on_device(|dtype, bound| {
        if dtype == Dtype::Float32 {
            return;
        }
        for [outputs, inputs] in
            [[512, 4096], [96, 2560], [64, 12288], [32, 256], [24_576, 1024], [64, 640]]
        {
            let [reference, own] = layers(1, [outputs, inputs]);
            let halves = [2, 3].map(|seed| layers(seed, [outputs / 2, inputs]));
            let [gates, ups] = halves;
            let [apart, joined] = [0, 1].map(|i| {
                enable(i == 1);
                let gate_up = Joined::new([gates[i].clone(), ups[i].clone()]).unwrap();
                enable(false);
                gate_up
            });
            let norm = RmsNorm { weight: normal(2, &[inputs], dtype), eps: 1e-6 };
            for rows in [1, 3, 8, 9, 16, 24, 33, 127, 130] {
                let all = normal(3, &[1, rows, inputs], dtype);
                let sums = normal(5, &[1, rows, outputs], dtype);
                let case = format!("{inputs} {outputs} {rows}");
                let first = |array: &Array, rows| array.try_index((.., ..rows)).unwrap();
                for normed in [false, true] {
                    let norm = normed.then_some(&norm);
                    for add in [false, true] {
                        let apply = |layer: &Linear, rows| {
                            let (x, sum) = (first(&all, rows), first(&sums, rows));
                            layer.apply(input(&x, norm), add.then_some(&sum)).unwrap()
                        };
                        let [ours, one] = with_kernels(|rows| apply(&own, rows), rows);
                        let error_of_all = error(&ours, &apply(&reference, rows));
                        assert!(error_of_all < bound, "{case} {normed} {add}: {error_of_all:e}");
                        if rows < DENSE_ROWS {
                            assert_eq!(error(&first(&ours, 1), &one), 0.0, "{case} {normed} {add}");
                        }
                    }
                    let [gate, up] =
                        apart.split(apart.outputs(input(&all, norm)).unwrap()).unwrap();
                    let expected = swiglu(gate, up).unwrap();
                    let gated = |rows| match joined.swiglu(input(&first(&all, rows), norm)).unwrap()
                    {
                        Some(y) => y,
                        None => {
                            assert!(rows >= DENSE_ROWS);
                            let outputs = joined.outputs(input(&first(&all, rows), norm)).unwrap();
                            let [gate, up] = joined.split(outputs).unwrap();
                            swiglu(gate, up).unwrap()
                        }
                    };
                    let [ours, one] = with_kernels(gated, rows);
                    let error_of_all = error(&ours, &expected);
                    assert!(error_of_all < bound, "{case} {normed} gated: {error_of_all:e}");
                    if rows < DENSE_ROWS {
                        assert_eq!(error(&first(&ours, 1), &one), 0.0, "{case} {normed} gated");
                    }
                }
            }
        }
    });
}

/// Layers whose outputs do not fill tiles are joined to one that does.
#[test]
fn layers_of_all_sizes_are_joined() {
    on_device(|dtype, bound| {
        if dtype == Dtype::Float32 {
            return;
        }
        let parts = [(1, 1024), (2, 512), (3, 4), (4, 4)].map(|(seed, outputs)| {
            let weight =
                Packed::quantize(&normal(seed, &[outputs, 384], Dtype::Bfloat16), QUANTIZATION);
            Linear::Quantized { weight, bias: None }
        });
        let apart = Joined::new(parts.clone()).unwrap();
        enable(true);
        let loaded = parts.map(|part| {
            let Linear::Quantized { weight, .. } = &part else { unreachable!("made above") };
            Tiled::new(weight.view())
                .unwrap()
                .map_or(part.clone(), |weight| Linear::Tiled { weight, bias: None })
        });
        assert!(matches!(
            loaded,
            [
                Linear::Tiled { .. },
                Linear::Tiled { .. },
                Linear::Quantized { .. },
                Linear::Quantized { .. }
            ]
        ));
        let joined = Joined::new(loaded).unwrap();
        enable(false);
        assert!(joined.apart().is_none());
        for rows in [1, 3, 130] {
            let x = normal(5, &[1, rows, 384], dtype);
            enable(true);
            let ours = joined.forward(&x).unwrap();
            eval(&ours).unwrap();
            enable(false);
            for (ours, expected) in ours.iter().zip(apart.forward(&x).unwrap()) {
                let difference = error(ours, &expected);
                assert!(difference < bound, "{rows} {:?}: {difference:e}", ours.shape());
            }
        }
    });
}

/// Experts of a few rows, with and without a shared one, equal MLX's operations, and a row's bits do not depend on the
/// other rows.
#[test]
fn experts_equal_their_operations() {
    on_device(|dtype, bound| {
        if dtype == Dtype::Float32 {
            // There is no kernel for it.
            return;
        }
        let packed = |seed: u64, shape: &[i32]| {
            let weight =
                normal(seed, shape, Dtype::Bfloat16).multiply(Array::from_f32(0.05)).unwrap();
            let weight = weight.as_dtype(Dtype::Bfloat16).unwrap();
            Linear::Quantized { weight: Packed::quantize(&weight, QUANTIZATION), bias: None }
        };
        // As a model is loaded. MLX's products of 8 rows do not have the bits of those of one.
        let tiled = |linear: Linear| {
            let Linear::Quantized { weight, .. } = &linear else { unreachable!("packed above") };
            Linear::Tiled { weight: Tiled::new(weight.view()).unwrap().unwrap(), bias: None }
        };
        let block = |sides: [Linear; 2], down_proj: Linear| {
            let gate_up = Joined::new(sides).unwrap();
            Block::from(GatedMlp { gate: Gate::Silu, gate_up, down_proj })
        };
        for ([count, d, f], top_k, shared) in [
            ([64, 512, 192], 4, Some(256)),
            ([256, 2048, 512], 8, Some(512)),
            ([48, 1280, 1088], 8, None),
        ] {
            enable(true);
            let experts = block(
                [10, 11].map(|seed| packed(seed, &[count, f, d])),
                packed(12, &[count, d, f]),
            );
            let shared = shared.map(|f| Shared {
                expert: block(
                    [20, 21].map(|seed| tiled(packed(seed, &[f, d]))),
                    tiled(packed(22, &[d, f])),
                ),
                gate: Some(packed(30, &[1, d])),
            });
            let moe = Mlp::Sparse(Box::new(Moe {
                gate: tiled(packed(1, &[count, d])),
                experts: Experts(experts),
                top_k,
                norm_topk_prob: true,
                scale: 1.0,
                groups: None,
                shared,
                ranks: Ranks::alone(),
            }));
            enable(false);
            let norm = RmsNorm { weight: normal(2, &[d], dtype), eps: 1e-6 };
            for rows in [1, 3, 8, 32] {
                let x = normal(3, &[1, rows, d], dtype);
                let first = |rows| x.try_index((.., ..rows)).unwrap();
                let run = |rows| moe.residual(&first(rows), &norm).unwrap();
                let [ours, alone] = with_kernels(run, rows);
                // Rows whose last expert is nearly as likely as the next one may have that one in the reference.
                let Mlp::Sparse(sparse) = &moe else { unreachable!("made above") };
                let scores = sparse.gate.forward(&norm.forward(&x).unwrap()).unwrap();
                let ranked = sort_axis(scores.as_dtype(Dtype::Float32).unwrap(), -1).unwrap();
                let last = ranked.try_index((.., ..rows, count - top_k)).unwrap();
                let next = ranked.try_index((.., ..rows, count - top_k - 1)).unwrap();
                let is_clear = last.subtract(next).unwrap().gt(Array::from_f32(0.05)).unwrap();
                let is_clear = is_clear.as_dtype(dtype).unwrap().expand_dims(2).unwrap();
                let clear = |y: &Array| y.multiply(&is_clear).unwrap().add(first(rows)).unwrap();
                let difference = error(&clear(&ours), &clear(&run(rows)));
                assert!(difference < bound, "{count} {d} {f} {rows}: {difference:e}");
                let row = ours.try_index((.., ..1)).unwrap();
                assert_eq!(error(&row, &alone), 0.0, "{count} {d} {f} {rows}");
            }
        }
    });
}

#[test]
fn heads_equal_their_operations() {
    on_device(|dtype, bound| check_heads(&BACKEND, dtype, bound));
}

#[test]
fn copies_of_a_cache_do_not_see_rows_written_in_place() {
    on_device(|dtype, _| check_copies(&BACKEND, dtype));
}

/// Bits do not depend on the number of rows or on other sequences.
#[test]
fn rows_alone_equal_rows_together() {
    on_device(|dtype, _| {
        let layer = gated_delta([16, 32], 128, dtype);
        let together = run_delta(&BACKEND, true, &layer, &[7, 1], dtype);
        // The rows of the first sequence.
        let alone = {
            enable(true);
            let x = projected(&layer, 16, dtype);
            let recurrent = layer.new_cache(dtype).unwrap();
            let mut cache = Cache::new(vec![LayerCache::Recurrent(recurrent)]);
            let ys = [0, 1, 2, 3, 4, 5, 6, 14].map(|row| {
                let x = outputs(&layer, &x, row, row + 1, true);
                layer.forward(&x, &mut [Span { rows: 1, cache: &mut cache }], 0).unwrap()
            });
            let y = concatenate(&ys, 1).unwrap();
            [vec![y], cache.arrays().unwrap()].concat()
        };
        for (a, b) in alone.iter().zip([&together[0], &together[2], &together[3]]) {
            assert_eq!(error(a, b), 0.0, "{dtype:?}");
        }
        let shape = [16, 4, 256];
        let many = run_attention(true, shape, &[&[600, 30, 1000], &[1, 3, 8]], dtype);
        let one = run_attention(true, shape, &[&[600], &[1]], dtype);
        let own = many[1].try_index((.., ..1)).unwrap();
        assert_eq!(error(&own, &one[1]), 0.0, "{dtype:?}");
    });
}
