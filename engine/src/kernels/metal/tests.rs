//! Kernels under the emulation, against the same formulas in MLX's operations and in f64.
//!
//! On a machine with an NVIDIA GPU, `engine/metal-emulation/cuda/run.sh` runs the same texts there, a simdgroup as a warp.

mod append;
mod attention;
mod experts;
mod products;

use mlx_rs::ops::concatenate;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Device, Dtype};
use steersman_metal_emulation::{Order, compile, set_order};

use super::kernel::{Kernel, Launch};
use super::{emulate, enable as enable_metal, take_fault};
use crate::cache::{Cache, LayerCache, Span};
use crate::kernels::tests::{
    Backend, check_copies, error, gated_delta, normal, outputs, projected, run_delta, run_heads,
    states_after,
};
use crate::nn::{GatedDelta, Heads, RmsNorm, Rope};

const BACKEND: Backend = Backend { enable, joins: true, attends: false, queues: false };

/// Turns the kernels on or off.
fn enable(on: bool) {
    Device::set_default(&Device::cpu());
    emulate(compile);
    assert_eq!(enable_metal(on), on);
}

/// Each case is another set of texts to compile.
#[test]
fn gated_delta_equals_its_operations() {
    let steps = [vec![3, 1, 8, 2], vec![40, 1, 1]];
    let cases = [
        ([2, 6], 32, steps.to_vec(), Dtype::Float32, 2e-5),
        ([2, 6], 32, steps[..1].to_vec(), Dtype::Bfloat16, 6e-2),
        ([1, 2], 128, vec![vec![5, 2]], Dtype::Float32, 2e-5),
    ];
    for (heads, dim, all, dtype, bound) in cases {
        let layer = gated_delta(heads, dim, dtype);
        for passes in &all {
            let ours = run_delta(&BACKEND, true, &layer, passes, dtype);
            let reference = run_delta(&BACKEND, false, &layer, passes, dtype);
            for (i, (a, b)) in ours.iter().zip(&reference).enumerate() {
                let error = error(a, b);
                assert!(error < bound, "{dtype:?} {heads:?} {dim} {passes:?} {i}: {error:e}");
            }
        }
    }
}

#[test]
fn a_rewound_draft_leaves_the_bits_of_a_shorter_pass() {
    enable(true);
    for dtype in [Dtype::Float32, Dtype::Bfloat16] {
        let layer = gated_delta([2, 4], 32, dtype);
        for (keep, joined) in [(1, true), (2, false), (9, true)] {
            let rewound = states_after(&layer, keep, 10, joined, dtype);
            let alone = states_after(&layer, keep, keep, joined, dtype);
            for (a, b) in rewound.iter().zip(&alone) {
                assert_eq!(error(a, b), 0.0, "{dtype:?} {keep} {joined}");
            }
        }
    }
}

#[test]
fn heads_equal_their_operations() {
    for (shape, dims, gated, normed, dtype, bound) in [
        ([4, 2, 64], 32, true, true, Dtype::Float32, 2e-5),
        ([4, 2, 64], 32, true, true, Dtype::Bfloat16, 6e-2),
        ([2, 2, 32], 0, false, true, Dtype::Float32, 2e-5),
        ([2, 1, 96], 48, true, false, Dtype::Float32, 2e-5),
    ] {
        let [heads, kv_heads, head_dim] = shape;
        let norm = |seed| RmsNorm { weight: normal(seed, &[head_dim], dtype), eps: 1e-6 };
        let (q_norm, k_norm, rope) = (norm(1), norm(2), Rope::new(dims, 10_000.0));
        let heads = Heads {
            heads,
            kv_heads,
            head_dim,
            gated,
            q_norm: normed.then_some(&q_norm),
            k_norm: normed.then_some(&k_norm),
            rope: (dims > 0).then_some(&rope),
        };
        // A prompt, a batch of steps, drafts.
        let passes: [&[i32]; 4] = [&[70, 3], &[1, 1], &[1, 4], &[1, 1]];
        let run = |kernel| run_heads(&BACKEND, kernel, &heads, &passes, None, dtype);
        for (i, (a, b)) in run(true).iter().zip(&run(false)).enumerate() {
            let error = error(a, b);
            assert!(error < bound, "{dtype:?} {shape:?} {gated} {normed} {i}: {error:e}");
        }
    }
}

#[test]
fn copies_of_caches_stay_apart() {
    check_copies(&BACKEND, Dtype::Float32);
}

/// Steps of `count` sequences that began one by one, so that each has a batch of its own: outputs, states and tails.
fn steps(layer: &GatedDelta, count: i32, together: bool) -> Vec<Array> {
    let dtype = Dtype::Float32;
    let x = projected(layer, 2 * count, dtype);
    let new = |_| Cache::new(vec![LayerCache::Recurrent(layer.new_cache(dtype).unwrap())]);
    let mut caches: Vec<Cache> = (0..count).map(new).collect();
    for (i, cache) in (0i32..).zip(&mut caches) {
        let own = outputs(layer, &x, i, i + 1, false);
        layer.forward(&own, &mut [Span { rows: 1, cache }], 0).unwrap();
    }
    let mut ys = Vec::new();
    if together {
        let own = outputs(layer, &x, count, 2 * count, true);
        let mut spans: Vec<_> = caches.iter_mut().map(|cache| Span { rows: 1, cache }).collect();
        ys.push(layer.forward(&own, &mut spans, 0).unwrap());
    } else {
        for (i, cache) in (count..).zip(&mut caches) {
            let own = outputs(layer, &x, i, i + 1, true);
            ys.push(layer.forward(&own, &mut [Span { rows: 1, cache }], 0).unwrap());
        }
    }
    let mut all = vec![concatenate(&ys, 1).unwrap()];
    all.extend(caches.iter().flat_map(|cache| cache.arrays().unwrap()));
    eval(&all).unwrap();
    all
}

/// Up to 9 batches of states are read where they lie; more are stacked first. Either way the bits are those of a sequence that
/// runs alone.
#[test]
fn sequences_of_many_batches_have_the_bits_of_one_alone() {
    enable(true);
    let layer = gated_delta([1, 2], 32, Dtype::Float32);
    for count in [3, 9, 12] {
        let (ours, alone) = (steps(&layer, count, true), steps(&layer, count, false));
        for (a, b) in ours.iter().zip(&alone) {
            assert_eq!(error(a, b), 0.0, "{count}");
        }
    }
}

/// One launch of a text of GatedDeltaNet, and what it read and wrote.
struct Launched {
    layer: GatedDelta,
    x: Array,
    state: Array,
    tail: Array,
    /// The rows after the gated norm, the next state and the next tail.
    outputs: Vec<Array>,
}

/// Launches `kernel` for one sequence of `rows` rows.
fn launch(kernel: Kernel, rows: i32, [key_heads, heads]: [i32; 2], dim: i32) -> Launched {
    let layer = gated_delta([key_heads, heads], dim, Dtype::Float32);
    let x = projected(&layer, rows, Dtype::Float32);
    let channels = (2 * key_heads + heads) * dim;
    let [state, tail] = [vec![1, heads, dim, dim], vec![1, 3, channels]]
        .map(|shape| normal(30, &shape, Dtype::Float32));
    let numbers = Array::from_slice(&[rows, 0, 0, 0, 0], &[5]);
    let outputs = kernel
        .run(&Launch {
            header: "#define RECORDED(x)\n#define STATE(i) state0\n#define TAIL(i) tail0\n\
                     #define x_z x_qkv\n#define x_b x_qkv\n#define x_a x_qkv\n"
                .into(),
            inputs: &[
                ("x_qkv", &x),
                ("numbers", &numbers),
                ("a_log", &layer.a_log),
                ("dt_bias", &layer.dt_bias),
                ("norm", &layer.norm.weight),
                ("tap0", &layer.conv1d[0]),
                ("tap1", &layer.conv1d[1]),
                ("tap2", &layer.conv1d[2]),
                ("tap3", &layer.conv1d[3]),
                ("state0", &state),
                ("tail0", &tail),
            ],
            in_place: &[],
            outputs: &[
                ("out", &[1, rows, heads * dim], Dtype::Float32),
                ("next_state", state.shape(), Dtype::Float32),
                ("next_tail", tail.shape(), Dtype::Float32),
            ],
            constants: &[
                ("HK", key_heads),
                ("HV", heads),
                ("DK", dim),
                ("DV", dim),
                ("EPS", 1e-6f32.to_bits().cast_signed()),
                ("JOINED", 1),
            ],
            dtype: Dtype::Float32,
            groups: [1, heads, 1],
            threads: 32 * dim / 8,
        })
        .unwrap();
    eval(&outputs).unwrap();
    Launched { layer, x, state, tail, outputs }
}

/// The same in f64, one head and one row after another: the rows after the gated norm, and the next state.
fn in_f64(launched: &Launched) -> [Vec<f64>; 2] {
    let Launched { layer, x, state, tail, .. } = launched;
    let numbers = |array: &Array| -> Vec<f64> {
        array.as_slice::<f32>().iter().map(|x| f64::from(*x)).collect()
    };
    let size = |number: i32| usize::try_from(number).unwrap();
    let [rows, all] = [size(x.dim(1)), size(x.dim(2))];
    let [key_heads, heads, dim] = [layer.key_heads, layer.value_heads, layer.key_dim].map(size);
    let channels = (2 * key_heads + heads) * dim;
    let (x, tail, mut state) = (numbers(x), numbers(tail), numbers(state));
    let taps: Vec<Vec<f64>> = layer.conv1d.iter().map(numbers).collect();
    let [a_log, dt_bias, norm] = [&layer.a_log, &layer.dt_bias, &layer.norm.weight].map(numbers);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let convolved = |t: usize, c: usize| {
        let input = |at: usize| {
            if at < 3 { tail[at * channels + c] } else { x[(at - 3) * all + c] }
        };
        let sum: f64 = taps.iter().enumerate().map(|(i, tap)| tap[c] * input(t + i)).sum();
        sum * sigmoid(sum)
    };
    let mut y = vec![0.0; rows * heads * dim];
    for (h, state) in state.chunks_exact_mut(dim * dim).enumerate() {
        let key_head = h / (heads / key_heads);
        for t in 0..rows {
            let unit = |first: usize, scale: f64| -> Vec<f64> {
                let x: Vec<f64> = (0..dim).map(|i| convolved(t, first + i)).collect();
                let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                x.iter().map(|x| x / length * scale).collect()
            };
            let q = unit(key_head * dim, (dim as f64).powf(-0.5));
            let k = unit((key_heads + key_head) * dim, 1.0);
            let gate = |i: usize| x[t * all + channels + i];
            let values = heads * dim;
            let duration = (gate(values + heads + h) + dt_bias[h]).exp().ln_1p();
            let decay = (-a_log[h].exp() * duration).exp();
            let strength = sigmoid(gate(values + h));
            let mut own = vec![0.0; dim];
            for (r, row) in state.chunks_exact_mut(dim).enumerate() {
                let seen: f64 = row.iter().zip(&k).map(|(s, k)| decay * s * k).sum();
                let d = strength * (convolved(t, (2 * key_heads + h) * dim + r) - seen);
                row.iter_mut().zip(&k).for_each(|(s, k)| *s = decay * *s + d * k);
                own[r] = row.iter().zip(&q).map(|(s, q)| s * q).sum();
            }
            let mean = own.iter().map(|y| y * y).sum::<f64>() / dim as f64;
            for (r, own) in own.iter().enumerate() {
                let z = gate(h * dim + r);
                y[(t * heads + h) * dim + r] =
                    own / (mean + 1e-6).sqrt() * norm[r] * z * sigmoid(z);
            }
        }
    }
    [y, state]
}

#[test]
fn gated_delta_equals_f64() {
    enable(true);
    let kernel = Kernel { name: "in_f64", source: include_str!("gated_delta.metal") };
    for (rows, heads, dim) in [(1, [1, 2], 64), (7, [2, 6], 32)] {
        let launched = launch(kernel, rows, heads, dim);
        for (ours, right) in launched.outputs.iter().zip(&in_f64(&launched)) {
            let largest = right.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            let off =
                ours.as_slice::<f32>().iter().zip(right).map(|(a, b)| (f64::from(*a) - b).abs());
            let worst = off.fold(0.0, |most: f64, x| if x > most || x.is_nan() { x } else { most });
            assert!(worst < 1e-6 * largest, "{rows} {heads:?} {dim}: {worst:e} of {largest:e}");
        }
    }
}

/// A kernel's text with another part.
fn with_fault(kernel: Kernel, name: &'static str, part: &str, other: &str) -> Kernel {
    assert_eq!(kernel.source.matches(part).count(), 1, "{part}");
    Kernel { name, source: kernel.source.replace(part, other).leak() }
}

/// Expects the fault of the kernel `name` that was planted in an order of threads.
fn expect_fault(order: Order, name: &str, expected: &str) {
    let fault = take_fault(name);
    let fault = fault.unwrap_or_else(|| panic!("{order:?}: {name} is not found"));
    assert!(fault.contains(expected), "{order:?}: {name}: {fault}");
}

/// The text without each of its barriers, and the line of that barrier.
fn without_barriers(source: &str) -> Vec<(usize, String)> {
    let barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);";
    let without = |(at, _): (usize, &str)| {
        let (before, after) = source.split_at(at);
        (before.lines().count(), [before, &after[barrier.len()..]].concat())
    };
    source.match_indices(barrier).map(without).collect()
}

/// The output of GatedDeltaNet with another text, for 6 rows, and the fault that the emulation found.
fn planted(name: &str, source: String) -> (Array, Option<String>) {
    let name: &'static str = name.to_owned().leak();
    let launched = launch(Kernel { name, source: source.leak() }, 6, [2, 2], 32);
    (launched.outputs[0].clone(), take_fault(name))
}

/// The orders of threads are the process's, so this test has all of them.
#[test]
fn planted_faults_are_found_in_every_order() {
    enable(true);
    let source = include_str!("gated_delta.metal");
    let right = planted("right", source.into()).0;
    for order in [Order::Ascending, Order::Descending, Order::Random(7)] {
        set_order(order);
        attention::check_planted_faults(order);
        let (y, fault) = planted("right", source.into());
        assert_eq!((error(&y, &right), fault), (0.0, None), "{order:?}");
        let without = without_barriers(source);
        assert_eq!(without.len(), 4);
        for (n, (line, without)) in without.into_iter().enumerate() {
            let (_, fault) = planted(&format!("no_barrier_{n}"), without);
            let fault = fault.unwrap_or_else(|| panic!("{order:?}: barrier {line} is not missed"));
            assert!(fault.contains("without a barrier"), "{fault}");
        }
        for (name, part, other, expected) in [
            (
                "bound",
                "i < count * DV; i += THREADS) {\n    const int t = i / DV, j = i % DV;\n    out",
                "i < count * DV + 1; i += THREADS) {\n    const int t = i / DV, j = i % DV;\n    out",
                "",
            ),
            (
                "rows",
                "p < PER; p++) {\n    next_state",
                "p < PER - 1; p++) {\n    next_state",
                "was not written",
            ),
            (
                "lanes",
                "recalled = simd_sum(recalled);",
                "if (lane != 3) recalled = simd_sum(recalled);",
                "collective",
            ),
            (
                "past",
                "(heads * DV + simdgroup * ROWS + r) * DK",
                "(heads * DV + simdgroup * ROWS + r + 1) * DK",
                "beside its elements",
            ),
        ] {
            assert!(source.contains(part), "{part}");
            let (_, fault) = planted(name, source.replacen(part, other, 1));
            let fault = fault.unwrap_or_else(|| panic!("{order:?}: {name} is not found"));
            assert!(fault.contains(expected), "{name}: {fault}");
        }
        experts::expect_planted_faults(order);
        products::expect_planted_faults(order);
    }
    set_order(Order::Ascending);
}
