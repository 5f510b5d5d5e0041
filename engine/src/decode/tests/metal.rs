//! The path of a Mac, from decoding to its own kernels, on the CPU: kernels run under the emulation.

#![allow(unsafe_code, reason = "exports graphs through mlx-c, which mlx-rs does not")]

use std::ffi::{CString, c_char};

use mlx_rs::Array;
use mlx_rs::transforms::eval;

use super::scripted::{ask, family};
use super::{Decoder, load};
use crate::cache::{Cache, LayerCache, Span};
use crate::config::{Compile, Config, DraftKind, Kernels};
use crate::draft::probe_tokens;
use crate::kernels::metal::{emulate, is_enabled};
use crate::lazy::pending_operations;
use crate::measure::verify::{DecodePath, verify};
use crate::model::Pass;
use crate::nn::token_ids;

/// Chunks, restored state, rejected and accepted drafts, batches and preemption: each reply is the plain one, which is that of
/// MLX's operations.
#[test]
fn replies_through_metal_kernels_are_equal_on_every_path() {
    let paths = [
        DecodePath::Plain,
        DecodePath::Chunked(7),
        DecodePath::Resumed,
        DecodePath::Rewound,
        DecodePath::Drafted(DraftKind::Ngram),
        DecodePath::Batched(5, None),
        DecodePath::Batched(4, Some(DraftKind::Ngram)),
        DecodePath::Preempted(Some(DraftKind::Ngram)),
    ];
    for name in ["qwen3_next_4bit", "qwen3_5_moe"] {
        let config = |kernels| {
            let mut config = Config::default();
            config.engine.prefill_chunk = 16;
            config.model.kernels = kernels;
            config.model.compile = Compile::Off;
            config
        };
        let request = || ask("Where does the fox live?", false, 8);
        let mut plain = family(name, config(Kernels::Mlx), false);
        assert!(!is_enabled());
        let expected = verify(&mut plain, &[request()], &[DecodePath::Plain], 8, |_| ()).unwrap();
        emulate(steersman_metal_emulation::compile);
        let mut decoder = family(name, config(Kernels::Auto), false);
        assert!(is_enabled());
        for outcome in verify(&mut decoder, &[request()], &paths, 8, |_| ()).unwrap() {
            assert!(outcome.holds(), "{name}: {outcome:?}");
            if outcome.path == DecodePath::Plain {
                assert_eq!(outcome.replies, expected[0].replies, "{name}");
            }
        }
    }
}

/// What a pass of `rows` rows of each of `streams` sequences is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Count {
    /// Operations of MLX, as `bench model` counts them.
    operations: usize,
    /// Those that are not views of their input, which a GPU runs.
    dispatches: usize,
}

/// Counts of a layer of the bundled model: of recurrent ones, and of those with attention.
fn counts(decoder: &Decoder, streams: usize, rows: usize) -> [Count; 2] {
    let mut caches: Vec<Cache> = (0..streams).map(|_| decoder.empty_cache()).collect();
    // The first pass: the graphs are made, and no kernel runs. Attention makes the buffers of its cache in it, too.
    let arrays: Vec<Array> = caches.iter().flat_map(|cache| cache.arrays().unwrap()).collect();
    eval(&arrays).unwrap();
    if rows > 1 {
        caches.iter_mut().for_each(Cache::mark_draft);
    }
    let depth = caches[0].layers.len();
    let count = |layers: usize| {
        let hidden = forward(decoder, &mut caches.clone(), rows, Some(layers));
        Count { operations: pending_operations(&hidden), dispatches: dispatches(&hidden) }
    };
    let counts: Vec<Count> = (0..=depth).map(count).collect();
    let layer = |i: usize| Count {
        operations: counts[i + 1].operations - counts[i].operations,
        dispatches: counts[i + 1].dispatches - counts[i].dispatches,
    };
    // The one with most: layers of another format of weights are not joined.
    let most = |recurrent: bool| {
        let own = |i: &usize| matches!(caches[0].layers[*i], LayerCache::Recurrent(_)) == recurrent;
        (0..depth).filter(own).map(layer).max_by_key(|count| count.operations).unwrap()
    };
    [most(true), most(false)]
}

fn forward(decoder: &Decoder, caches: &mut [Cache], rows: usize, exit: Option<usize>) -> Array {
    let tokens = token_ids(&probe_tokens(rows * caches.len()));
    let rows = i32::try_from(rows).unwrap();
    let mut spans: Vec<_> = caches.iter_mut().map(|cache| Span { rows, cache }).collect();
    decoder.network().model().forward(&tokens, &mut spans, Pass { exit, skip: &[] }).unwrap()
}

/// Operations of a graph that are not views.
fn dispatches(array: &Array) -> usize {
    const VIEWS: [&str; 10] = [
        "AsStrided",
        "Broadcast",
        "ExpandDims",
        "Flatten",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unflatten",
    ];
    unsafe extern "C" {
        fn fopen(name: *const c_char, mode: *const c_char) -> *mut mlx_sys::FILE;
        fn fclose(file: *mut mlx_sys::FILE) -> i32;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("graph.dot");
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the file is open during the export, and what is made here is freed once.
    unsafe {
        let file = fopen(name.as_ptr(), c"w".as_ptr());
        assert!(!file.is_null());
        let outputs = mlx_sys::mlx_vector_array_new_value(array.as_ptr());
        let namer = mlx_sys::mlx_node_namer_new();
        assert_eq!(mlx_sys::mlx_export_to_dot(file, namer, outputs), 0);
        mlx_sys::mlx_node_namer_free(namer);
        mlx_sys::mlx_vector_array_free(outputs);
        assert_eq!(fclose(file), 0);
    }
    let text = std::fs::read_to_string(path).unwrap();
    let names = text.lines().filter(|line| line.contains("rectangle"));
    let names = names.filter_map(|line| line.split('"').nth(1));
    names.filter(|name| !VIEWS.contains(name)).count()
}

/// Most operations and dispatches of a layer with its feed-forward block, by streams and rows of each: of a recurrent layer
/// and of one with attention, with MLX's operations alone and with Metal's kernels. The aim is 16 and 14. mlx-lm 0.32.2 has
/// 27 dispatches for a GatedDeltaNet layer and a token, counted by hand.
const MOST: [(usize, usize, [[Count; 2]; 2]); 3] = [
    (1, 1, [[count(85, 49), count(147, 80)], [count(31, 22), count(53, 29)]]),
    (1, 4, [[count(111, 68), count(157, 84)], [count(31, 22), count(63, 33)]]),
    (8, 1, [[count(92, 51), count(320, 123)], [count(33, 22), count(224, 72)]]),
];

const fn count(operations: usize, dispatches: usize) -> Count {
    Count { operations, dispatches }
}

#[test]
fn layers_on_metal_have_few_operations() {
    let decoder = |kernels| {
        let mut config = Config::default();
        config.model.kernels = kernels;
        config.model.compile = Compile::On;
        load(config)
    };
    let plain = decoder(Kernels::Mlx);
    let plain = MOST.map(|(streams, rows, _)| counts(&plain, streams, rows));
    emulate(steersman_metal_emulation::compile);
    let own = decoder(Kernels::Auto);
    assert!(is_enabled());
    let own = MOST.map(|(streams, rows, _)| counts(&own, streams, rows));
    for ((streams, rows, most), counts) in MOST.into_iter().zip(plain.into_iter().zip(own)) {
        for (most, counts) in most.into_iter().zip([counts.0, counts.1]) {
            for (most, count) in most.into_iter().zip(counts) {
                let is_within =
                    count.operations <= most.operations && count.dispatches <= most.dispatches;
                assert!(is_within, "{streams} streams, {rows} rows: {count:?}, at most {most:?}");
            }
        }
    }
}
