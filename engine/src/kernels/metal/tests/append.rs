//! Rows that a kernel appends to the caches of several spans.

use std::rc::Rc;

use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::enable;
use crate::cache::{Buffers, Cache, Full, LayerCache, Span};
use crate::kernels::LaunchSpan;
use crate::kernels::metal::append::{KERNEL, append_by, appends};
use crate::kernels::metal::kernel::Kernel;
use crate::kernels::metal::{launches, take_fault};
use crate::kernels::tests::{error, normal};
use crate::nn::{self, Scores};

const KV_HEADS: i32 = 2;
const DIM: i32 = 32;

/// Runs a pass of these rows over the caches, with the keys and values of `seed`, which are returned [1, 2 H_kv, R, D].
fn pass(caches: &mut [Cache], rows: &[i32], seed: u64) -> Array {
    let all = rows.iter().sum();
    let each = |i, heads| normal(seed + i, &[1, all, heads, DIM], Dtype::Float32);
    let [q, k, v] = [each(1, 2 * KV_HEADS), each(2, KV_HEADS), each(3, KV_HEADS)];
    let scores = Scores { scale: 0.2, softcap: None, sinks: None };
    let spans = caches.iter_mut().zip(rows);
    let mut spans: Vec<_> = spans.map(|(cache, &rows)| Span { rows, cache }).collect();
    let y = nn::attention([&q, &k, &v], &scores, &mut spans, 0).unwrap();
    spans.iter_mut().for_each(Span::advance);
    eval([&y]).unwrap();
    concatenate(&[k, v], 2).unwrap().swap_axes(1, 2).unwrap()
}

fn caches(count: usize) -> Vec<Cache> {
    let new = |_| Cache::new(vec![LayerCache::Full(Full::new(KV_HEADS, DIM))]);
    (0..count).map(new).collect()
}

/// Keys and values of positions `from..to`, [1, 2 H_kv, T, D].
fn held(cache: &Cache, from: usize, to: usize) -> Array {
    let kv = cache.key_values(from, to).unwrap();
    concatenate(&kv.arrays().collect::<Vec<_>>(), 1).unwrap()
}

/// Prompts, steps, drafts, a pass with a prompt beside a step, and more spans than a launch has buffers: the rows are those
/// of the passes, in every cache.
#[test]
fn rows_of_several_spans_are_appended_in_one_launch() {
    enable(true);
    for (count, passes, launched) in [
        (3, vec![vec![70, 3, 254], vec![1, 1, 1], vec![4, 1, 8], vec![9, 1, 1], vec![9, 9, 1]], 3),
        (30, vec![vec![1; 30], vec![1; 30]], 4),
    ] {
        let mut caches = caches(count);
        let mut expected: Vec<Vec<Array>> = vec![Vec::new(); count];
        let before = launches("append");
        for (seed, rows) in (0..).step_by(10).zip(&passes) {
            let kv = pass(&mut caches, rows, seed);
            let mut start = 0;
            for (rows, expected) in rows.iter().zip(&mut expected) {
                expected.push(kv.try_index((.., .., start..start + rows, ..)).unwrap());
                start += rows;
            }
        }
        assert_eq!(launches("append") - before, launched);
        for (cache, expected) in caches.iter().zip(&expected) {
            let expected = concatenate(expected, 2).unwrap();
            assert_eq!(error(&held(cache, 0, cache.position), &expected), 0.0);
        }
    }
}

/// What was read of a cache before it was rewound is not what is written after that, even if nothing has run it yet.
#[test]
fn rows_that_were_read_are_not_overwritten_after_a_rewind() {
    enable(true);
    let mut caches = caches(2);
    let first = pass(&mut caches, &[70, 9], 0);
    let second = pass(&mut caches, &[2, 1], 10);
    let read = held(&caches[0], 60, 72);
    for cache in &mut caches {
        cache.truncate(cache.position - 1);
    }
    let third = pass(&mut caches, &[2, 1], 20);
    let rows = |kv: &Array, from: i32, to: i32| kv.try_index((.., .., from..to, ..)).unwrap();
    let before = concatenate(&[rows(&first, 60, 70), rows(&second, 0, 2)], 2).unwrap();
    assert_eq!(error(&read, &before), 0.0);
    let after = [rows(&first, 60, 70), rows(&second, 0, 1), rows(&third, 0, 2)];
    assert_eq!(error(&held(&caches[0], 60, 73), &concatenate(&after, 2).unwrap()), 0.0);
}

/// An output that earlier rows wait for takes a place of a launch, once for all spans that wait for it.
#[test]
fn a_launch_takes_the_buffers_and_outputs_that_fit() {
    let own = normal(1, &[1, 2, 64, 32], Dtype::Float32);
    let outputs: Vec<Rc<Array>> = (0..2).map(|_| Rc::new(own.clone())).collect();
    let span = |after| {
        let buffers = Buffers { shared: None, own: &own, len: 9, after };
        (0, LaunchSpan { rows: 1, position: 9, buffers })
    };
    let [free, first, second] = [span(None), span(Some(&outputs[0])), span(Some(&outputs[1]))];
    assert!(appends(&[free; 28]) && !appends(&[free; 29]));
    assert!(appends(&[first; 27]) && !appends(&[first; 28]));
    let both = |count| [vec![first; count], vec![second]].concat();
    assert!(appends(&both(25)) && !appends(&both(26)));
}

/// The buffers after a launch of a kernel with this text for a step and a draft, and the fault that the emulation found.
fn planted(name: &str, source: String) -> (Array, Option<String>) {
    let name: &'static str = format!("append_{name}").leak();
    let buffers = [1, 2].map(|seed| normal(seed, &[1, 4, 64, 32], Dtype::Float32));
    eval(&buffers).unwrap();
    let span = |i: usize, rows, len| {
        let buffers = Buffers { shared: None, own: &buffers[i], len, after: None };
        LaunchSpan { rows, position: len, buffers }
    };
    let kv = normal(3, &[1, 4, 6, 32], Dtype::Float32);
    let kernel = Kernel { name, source: source.leak() };
    let writer = match append_by(kernel, &kv, &[(1, span(0, 1, 9)), (2, span(1, 4, 60))]) {
        Ok(writer) => writer,
        Err(error) => return (kv, Some(error.to_string())),
    };
    eval([&*writer.output]).unwrap();
    (concatenate(&buffers, 0).unwrap(), take_fault(name))
}

#[test]
fn planted_faults_are_found() {
    enable(true);
    let (right, fault) = planted("right", KERNEL.source.into());
    assert_eq!(fault, None);
    for (name, part, other, expected) in [
        ("constant", "(device T*)(BUFFER(span))", "BUFFER(span)", "const"),
        ("output", "if (head == 0", "if (head == 1 && head == 0", "was not written"),
        ("span", "span + 1 < numbers[0]", "span + 2 < numbers[0]", ""),
        ("place", "numbers[at + 3] + nth", "numbers[at + 3]", ""),
        ("row", "numbers[at + 1] + nth", "nth", ""),
        ("head", "size_t(head) * numbers[1]", "size_t(0) * numbers[1]", ""),
    ] {
        assert!(KERNEL.source.contains(part), "{part}");
        match planted(name, KERNEL.source.replacen(part, other, 1)) {
            (_, Some(fault)) => assert!(fault.contains(expected), "{name}: {fault}"),
            (buffers, None) => {
                assert!(error(&buffers, &right) > 1e-4, "{name} is not found");
                assert_eq!(expected, "", "{name}: no fault");
            }
        }
    }
}
