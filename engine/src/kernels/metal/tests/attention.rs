//! Attention over several spans and shared rows.

use std::rc::Rc;

use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use steersman_metal_emulation::Order;

use super::{enable, without_barriers};
use crate::cache::{Buffers, Cache, Full, LayerCache, SharedKv, Span, State};
use crate::kernels::LaunchSpan;
use crate::kernels::metal::attention::{attention_by, is_worth, takes};
use crate::kernels::metal::kernel::Kernel;
use crate::kernels::metal::{attention, take_fault};
use crate::kernels::tests::{error, normal};
use crate::nn::{self, Scores, sigmoid_gated};

/// Heads of queries, those of keys, and their dimension.
type Shape = [i32; 3];

/// Attention of passes over four sequences, of which the last one begins with the first 128 rows of
/// the first one, and shares them if `shares`: prompts, steps, drafts, and a pass with more rows
/// than the kernel takes.
fn run(kernel: bool, [heads, kv_heads, dim]: Shape, shares: bool, dtype: Dtype) -> Vec<Array> {
    enable(kernel);
    let scores = Scores { scale: (dim as f32).powf(-0.5), softcap: None, sinks: None };
    let new = || Cache::new(vec![LayerCache::Full(Full::new(kv_heads, dim))]);
    let mut caches: Vec<Cache> = (0..3).map(|_| new()).collect();
    let mut results = Vec::new();
    let passes: [&[i32]; 5] =
        [&[150, 70, 9], &[1, 1, 1, 1], &[4, 1, 8, 3], &[1, 2, 1, 1], &[20, 1, 1, 9]];
    for (seed, rows) in (0..).step_by(4).zip(passes) {
        if rows.len() > caches.len() {
            let first = &mut caches[0];
            let kv = first.key_values(0, 128).unwrap();
            let mut last = new();
            if shares {
                first.share().unwrap();
                last.restore(first.shared(), &[], &State::default(), 128).unwrap();
                assert_eq!((first.shared_count(), last.shared_count()), (128, 128));
            } else {
                last.restore(None, &[kv], &State::default(), 128).unwrap();
            }
            caches.push(last);
        }
        let all = rows.iter().sum();
        let each = |i: u64, heads| normal(seed + i, &[1, all, heads, dim], dtype);
        let [q, k, v] = [(1, heads), (2, kv_heads), (3, kv_heads)].map(|(i, heads)| each(i, heads));
        let spans = caches.iter_mut().zip(rows);
        let mut spans: Vec<_> = spans.map(|(cache, &rows)| Span { rows, cache }).collect();
        results.push(nn::attention([&q, &k, &v], &scores, &mut spans, 0).unwrap());
        spans.iter_mut().for_each(Span::advance);
    }
    eval(&results).unwrap();
    assert_eq!(caches.iter().all(Cache::is_shareable), kernel);
    results
}

#[test]
fn attention_equals_its_operations_and_shared_rows_change_no_bit() {
    for (shape, dtype, bound) in [
        ([4, 2, 32], Dtype::Float32, 2e-6),
        ([6, 1, 64], Dtype::Bfloat16, 6e-2),
        ([2, 2, 96], Dtype::Float16, 1e-2),
        ([8, 2, 256], Dtype::Float32, 2e-6),
    ] {
        let reference = run(false, shape, false, dtype);
        let ours = run(true, shape, false, dtype);
        let shared = run(true, shape, true, dtype);
        for (pass, ours) in ours.iter().enumerate() {
            let difference = error(ours, &reference[pass]);
            assert!(difference < bound, "{dtype:?} {shape:?} {pass}: {difference:e}");
            assert_eq!(error(ours, &shared[pass]), 0.0, "{dtype:?} {shape:?} {pass}, shared");
            // The reference is not compared with itself.
            assert_eq!(pass > 0, difference > 0.0, "{dtype:?} {shape:?} {pass}");
        }
    }
    enable(false);
}

/// The newest rows of a sequence: their queries, and the keys and values before and of them.
#[derive(Clone)]
struct Rows {
    q: Array,
    shared: Option<SharedKv>,
    own: Array,
    /// Filled rows of `own`, the newest ones included.
    len: i32,
}

impl Rows {
    /// `rows` rows at the end of `len` own ones.
    fn new(seed: u64, [heads, kv_heads, dim]: Shape, rows: i32, len: i32) -> Self {
        let q = normal(seed, &[1, rows, heads, dim], Dtype::Float32);
        let capacity = (len + 63) / 64 * 64;
        let own = normal(seed + 1, &[1, 2 * kv_heads, capacity, dim], Dtype::Float32);
        Self { q, shared: None, own, len }
    }

    fn after(self, shared: &SharedKv) -> Self {
        Self { shared: Some(shared.clone()), ..self }
    }

    fn span(&self) -> LaunchSpan<'_> {
        let buffers =
            Buffers { shared: self.shared.as_ref(), own: &self.own, len: self.len, after: None };
        LaunchSpan::appended(self.q.dim(1), buffers)
    }
}

/// Rows that may be shared.
fn shared(seed: u64, [_, kv_heads, dim]: Shape, rows: i32) -> SharedKv {
    let buffer = normal(seed, &[1, 2 * kv_heads, rows + 64, dim], Dtype::Float32);
    SharedKv { buffer: Rc::new(buffer), rows }
}

/// The queries of all sequences, and their spans.
fn launch(sequences: &[Rows]) -> (Array, Vec<LaunchSpan<'_>>) {
    let queries: Vec<&Array> = sequences.iter().map(|rows| &rows.q).collect();
    (concatenate(&queries, 1).unwrap(), sequences.iter().map(Rows::span).collect())
}

/// Attention of all sequences in one launch.
fn together(sequences: &[Rows], gates: Option<&Array>) -> Array {
    let (q, spans) = launch(sequences);
    assert!(takes(&spans));
    let y = attention(&q, gates, 0.25, &spans).unwrap();
    eval([&y]).unwrap();
    y
}

/// A step, a draft, a draft without rows before it, and three sequences that share one or two
/// blocks of the same buffer.
fn sequences(shape: Shape) -> Vec<Rows> {
    let two = shared(50, shape, 128);
    let one = SharedKv { rows: 64, ..two.clone() };
    vec![
        Rows::new(1, shape, 1, 130),
        Rows::new(3, shape, 4, 70),
        Rows::new(5, shape, 8, 8),
        Rows::new(7, shape, 1, 1).after(&two),
        Rows::new(9, shape, 4, 67).after(&one),
        Rows::new(11, shape, 2, 30).after(&two),
    ]
}

#[test]
fn bits_of_a_span_do_not_depend_on_the_others() {
    enable(true);
    let shape = [4, 2, 64];
    let sequences = sequences(shape);
    let backwards: Vec<Rows> = sequences.iter().rev().cloned().collect();
    let (all, reversed) = (together(&sequences, None), together(&backwards, None));
    let (mut start, mut end) = (0, all.dim(1));
    for rows in &sequences {
        let count = rows.q.dim(1);
        let alone = together(std::slice::from_ref(rows), None);
        for (batch, from) in [(&all, start), (&reversed, end - count)] {
            let own = batch.try_index((.., from..from + count)).unwrap();
            assert!(own.eq_values(&alone).unwrap(), "{from}");
        }
        (start, end) = (start + count, end - count);
    }
}

#[test]
fn gates_multiply_the_result() {
    enable(true);
    let sequences = sequences([4, 1, 32]);
    let plain = together(&sequences, None);
    let gates = normal(60, plain.shape(), Dtype::Float32);
    let gated = together(&sequences, Some(&gates));
    let difference = error(&gated, &sigmoid_gated(gates, plain).unwrap());
    assert!(difference < 1e-6, "{difference:e}");
}

/// A buffer that several spans share is one of the 27 of a launch.
#[test]
fn a_launch_takes_the_spans_whose_buffers_fit() {
    let shape = [1, 1, 32];
    let step = Rows::new(1, shape, 1, 9);
    let [first, second] = [70, 71].map(|seed| step.clone().after(&shared(seed, shape, 64)));
    let fit =
        |sequences: &[&Rows]| takes(&sequences.iter().map(|rows| rows.span()).collect::<Vec<_>>());
    let many = |rows, count| vec![rows; count];
    assert!(fit(&many(&step, 27)) && !fit(&many(&step, 28)));
    assert!(fit(&many(&first, 26)) && !fit(&many(&first, 27)));
    assert!(fit(&[many(&first, 24), vec![&second]].concat()));
    assert!(!fit(&[many(&first, 25), vec![&second]].concat()));
    let [draft, prompt] = [8, 9].map(|rows| Rows::new(3, shape, rows, 9));
    assert!(fit(&[&draft, &step]) && !fit(&[&prompt]) && !fit(&[&step, &prompt]));
    // Partial results of several spans are limited; a draft over a long shared prefix has no other
    // way without a copy.
    let long = Rows { len: 1 << 17, ..draft };
    assert!(fit(&[&long]) && !fit(&[&long, &step]));
    assert!(!is_worth(&[]) && !is_worth(&[step.span()]));
    assert!(is_worth(&[first.span()]) && is_worth(&[step.span(), step.span()]));
}

/// Thirty steps run in two launches.
#[test]
fn more_spans_than_buffers_equal_their_operations() {
    let scores = Scores { scale: 0.2, softcap: None, sinks: None };
    let run = |kernel| {
        enable(kernel);
        let new = |_| Cache::new(vec![LayerCache::Full(Full::new(1, 32))]);
        let mut caches: Vec<Cache> = (0..30).map(new).collect();
        let mut results = Vec::new();
        for seed in [0, 3] {
            let [q, k, v] = [(1, 2), (2, 1), (3, 1)]
                .map(|(i, h)| normal(seed + i, &[1, 30, h, 32], Dtype::Float32));
            let mut spans: Vec<_> =
                caches.iter_mut().map(|cache| Span { rows: 1, cache }).collect();
            results.push(nn::attention([&q, &k, &v], &scores, &mut spans, 0).unwrap());
            spans.iter_mut().for_each(Span::advance);
        }
        eval(&results).unwrap();
        results
    };
    for (ours, reference) in run(true).iter().zip(&run(false)) {
        let difference = error(ours, reference);
        assert!(difference < 1e-6, "{difference:e}");
    }
}

/// The texts of the parts and of their join.
const SOURCES: [&str; 2] =
    [include_str!("../attention.metal"), include_str!("../attention_join.metal")];

/// The attention of kernels with other texts, and the fault that the emulation found.
fn planted(name: &str, sources: [String; 2]) -> (Array, Option<String>) {
    let shape = [2, 1, 64];
    // More parts than are joined at a time, and the same keys in fewer parts behind shared ones; a
    // draft comes last.
    let long = Rows::new(1, shape, 1, 64 * 65 + 3);
    let sequences =
        [long, Rows::new(3, shape, 1, 5).after(&shared(9, shape, 64)), Rows::new(5, shape, 3, 20)];
    let names: [&'static str; 2] = ["parts", "join"].map(|part| &*format!("{name}_{part}").leak());
    let [first, second] = sources;
    let kernel = |name, source: String| Kernel { name, source: source.leak() };
    let kernels = [kernel(names[0], first), kernel(names[1], second)];
    let (q, spans) = launch(&sequences);
    let y = attention_by(kernels, &q, None, 0.25, &spans).unwrap();
    eval([&y]).unwrap();
    (y, take_fault(names[0]).or_else(|| take_fault(names[1])))
}

/// Finds each missing barrier and each other fault, with the threads in an order that is set.
pub fn check_planted_faults(order: Order) {
    let texts = SOURCES.map(str::to_owned);
    let (right, fault) = planted("attention_right", texts.clone());
    assert_eq!(fault, None, "{order:?}");
    for (text, barriers) in [(0, 2), (1, 3)] {
        let without = without_barriers(SOURCES[text]);
        assert_eq!(without.len(), barriers);
        for (n, (line, source)) in without.into_iter().enumerate() {
            let mut texts = texts.clone();
            texts[text] = source;
            let (_, fault) = planted(&format!("attention_{text}_no_barrier_{n}"), texts);
            let fault = fault.unwrap_or_else(|| panic!("{order:?}: barrier {line} is not missed"));
            assert!(fault.contains("without a barrier"), "{fault}");
        }
    }
    // Those without a sentence are found by the result alone.
    for (name, text, part, other, expected) in [
        (
            "keys",
            0,
            "key < count; key += SIMDGROUPS",
            "key <= count; key += SIMDGROUPS",
            "out of bounds",
        ),
        (
            "bound",
            0,
            "parts[RESULT(b) * D + i]",
            "parts[RESULT(b) * D + i + 1]",
            "beside its elements",
        ),
        (
            "lanes",
            0,
            "score = simd_sum(score);",
            "if (lane > 3) score = simd_sum(score);",
            "collective",
        ),
        ("results", 0, "((results + ROW(b)", "((ROW(b)", "was not written"),
        ("causal", 0, "ROW(b) + 1 - start", "ROW(b) + 2 - start", ""),
        ("place", 0, "(is_shared ? 0 : shared_keys)", "0", ""),
        ("tile", 1, "part < now; part += D", "part < now - 1; part += D", "nothing has written"),
        ("row", 1, "(row - numbers[at]) * count", "0", ""),
        (
            "heads",
            1,
            "const int to = (row * HQ + head)",
            "const int to = (row * HQ)",
            "was not written",
        ),
    ] {
        assert!(SOURCES[text].contains(part), "{part}");
        let mut texts = texts.clone();
        texts[text] = SOURCES[text].replacen(part, other, 1);
        let (y, fault) = planted(&format!("attention_{name}"), texts);
        match fault {
            Some(fault) => assert!(fault.contains(expected), "{order:?} {name}: {fault}"),
            None => {
                let difference = error(&y, &right);
                assert!(difference > 1e-4 || difference.is_nan(), "{order:?}: {name} is not found");
                assert_eq!(expected, "", "{order:?} {name}: no fault");
            }
        }
    }
}
