//! The path of a Mac, from decoding to its own kernels, on the CPU: kernels run under the emulation.

#![allow(unsafe_code, reason = "exports graphs through mlx-c, which mlx-rs does not")]

use std::collections::BTreeMap;
use std::env;
use std::ffi::{CString, c_char};
use std::time::Instant;

use mlx_rs::ops::zeros_dtype;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, fast};

use super::scripted::{ask, families, family, finish, reply, start_texts, turn};
use super::{Decoder, load};
use crate::cache::{Cache, LayerCache, Span};
use crate::config::{Compile, Config, DraftKind, Kernels};
use crate::draft::probe_tokens;
use crate::kernels::metal::{emulate, is_enabled, launches, take_fault};
use crate::measure::verify::{DecodePath, paths, verify};
use crate::model::Pass;
use crate::nn::token_ids;
use crate::request::{RawPrompt, Request};

/// The kernels, and families for which each must run; it may run for others. The first of them is in every run of the test.
const KERNELS: [(&str, &[&str]); 7] = [
    ("append", &["qwen3_5", "qwen3", "qwen3_next"]),
    ("attention", &["qwen3_5", "qwen3", "qwen3_next"]),
    ("experts_down", &["qwen3_next_4bit"]),
    (
        "gated_delta",
        &[
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "qwen3_next_4bit",
        ],
    ),
    (
        "heads",
        &[
            "gemma",
            "gemma2",
            "gemma3",
            "glm4_moe",
            "nemotron_h",
            "qwen3",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_moe",
            "qwen3_next",
        ],
    ),
    ("packed_rows", &["qwen3_next_4bit", "gemma4_moe_4bit"]),
    (
        "rewind",
        &[
            "falcon_h1",
            "granitemoehybrid",
            "mamba2",
            "nemotron_h",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_next",
            "qwen3_next_4bit",
        ],
    ),
];

/// Families of the fixtures, on every path of `verify` and preempted as well: each reply is the plain one, which is that of
/// MLX's operations. The emulation takes two minutes for all of them, so every eighth runs, and one for each kernel; with
/// STEERSMAN_ALL_FAMILIES, all.
#[test]
fn replies_of_families_through_metal_kernels_are_equal_on_every_path() {
    const TOKENS: usize = 8;
    let config = |kernels| {
        let mut config = Config::default();
        config.engine.prefill_chunk = 16;
        config.model.kernels = kernels;
        config.model.compile = Compile::Off;
        config
    };
    // Bytes of the smallest vocabulary, something to draft, and few: the emulation is slow.
    let request = || Request { ignores_end: true, ..ask("a cat, a cat", false, TOKENS as u32) };
    let all = families();
    for family in KERNELS.iter().flat_map(|(_, families)| *families) {
        assert!(all.iter().any(|name| name == family), "{family}");
    }
    let every = if env::var_os("STEERSMAN_ALL_FAMILIES").is_some() { 1 } else { 8 };
    let is_first = |name: &String| KERNELS.iter().any(|(_, families)| families[0] == name);
    let numbered = all.into_iter().enumerate();
    let families: Vec<String> = numbered
        .filter(|(i, name)| i % every == 0 || is_first(name))
        .map(|(_, name)| name)
        .collect();
    let plain: Vec<Vec<u32>> = families
        .iter()
        .map(|name| {
            let mut decoder = family(name, config(Kernels::Mlx), false);
            assert!(!is_enabled());
            let outcomes = verify(&mut decoder, &[request()], &[DecodePath::Plain], TOKENS, |_| ());
            outcomes.unwrap().swap_remove(0).replies.swap_remove(0)
        })
        .collect();
    // From here on, kernels of this test's thread are emulated.
    emulate(steersman_metal_emulation::compile);
    for (name, plain) in families.iter().zip(&plain) {
        assert_eq!(plain.len(), TOKENS, "{name}");
        let start = Instant::now();
        let before = KERNELS.map(|(kernel, _)| launches(kernel));
        let mut decoder = family(name, config(Kernels::Auto), false);
        assert!(is_enabled());
        let mut paths = paths(&decoder).unwrap();
        paths.extend([None, Some(DraftKind::Ngram)].map(DecodePath::Preempted));
        for outcome in verify(&mut decoder, &[request()], &paths, TOKENS, |_| ()).unwrap() {
            assert!(outcome.holds(), "{name}: {outcome:?}");
            assert_eq!(&outcome.replies[0], plain, "{name}: {outcome:?}");
            let was_taken = match outcome.path {
                DecodePath::Resumed => outcome.cached > 0,
                DecodePath::Rewound => outcome.drafted[0] > outcome.drafted[1],
                _ => true,
            };
            assert!(was_taken, "{name}: {outcome:?}");
        }
        let mut ran = String::new();
        for ((kernel, families), before) in KERNELS.into_iter().zip(before) {
            let count = launches(kernel) - before;
            assert!(count > 0 || !families.contains(&&**name), "{name}: {kernel} is not used");
            assert_eq!(take_fault(kernel), None, "{name}: {kernel}");
            if count > 0 {
                ran += &format!(", {count} launches of {kernel}");
            }
        }
        eprintln!("{name}: {:.1} s{ran}", start.elapsed().as_secs_f32());
    }
}

/// A request whose prompt begins with the same 600 tokens as all others, and has 12 of its own.
fn behind_a_prefix(own: u32) -> Request {
    let tokens = (0..600).map(|i| 3 + i % 90).chain((0..12).map(|i| 100 + (own + i) % 40));
    Request {
        prompt: Some(RawPrompt::Tokens(tokens.collect())),
        messages: Vec::new(),
        reasoning: None,
        ignores_end: true,
        ..ask("", false, 6)
    }
}

/// Requests that arrive together behind one prefix have its rows once: the kernel reads them where they lie, and the rest of
/// their prompts, more rows than it takes, runs over a joined view. Each reply is the one that it has alone, by MLX's
/// operations. The last layers of Gemma 4 read the KV of earlier ones.
#[test]
fn requests_behind_one_prefix_share_its_rows_on_metal() {
    for (name, streams) in [("qwen3", 32), ("qwen3_5", 3), ("gemma4_text", 3)] {
        let config = |kernels| {
            let mut config = Config::default();
            config.engine.max_running = streams;
            config.model.kernels = kernels;
            config.model.compile = Compile::Off;
            config
        };
        let requests = || (0..streams as u32).map(behind_a_prefix);
        let mut plain = family(name, config(Kernels::Mlx), false);
        assert!(!plain.saved.prefixes().shares());
        let alone = |request| {
            let events = start_texts(&mut plain, vec![request]);
            finish(&mut plain);
            events.into_iter().map(|events| reply(events).0).next().unwrap()
        };
        let expected: Vec<String> = requests().map(alone).collect();
        drop(plain);
        emulate(steersman_metal_emulation::compile);
        let mut decoder = family(name, config(Kernels::Auto), false);
        assert!(is_enabled() && decoder.saved.prefixes().shares());
        let events = start_texts(&mut decoder, requests().collect());
        let mut most = 0;
        while decoder.schedule.queue().waiting() > 0 || !decoder.schedule.running().is_empty() {
            turn(&mut decoder);
            let caches: Vec<&Cache> =
                decoder.schedule.running().iter().map(|s| s.timeline().cache()).collect();
            if caches.len() == streams && caches.iter().all(|cache| cache.position > 612) {
                let own = |cache: &&Cache| cache.capacity_at(cache.position) - cache.shared_count();
                let rows: usize = caches.iter().map(own).sum();
                assert!(caches.iter().all(|cache| cache.shared_count() >= 512), "{name}");
                // One buffer has the shared rows; one or two blocks have the own rows of each request.
                let all = decoder.saved.prefixes().shared_bytes();
                let row = caches[0].shareable_bytes(1, 4);
                assert!(all <= 768 * row, "{name}: {all} bytes");
                assert!(rows <= 128 * streams, "{name}: {rows} rows");
                most += 1;
            }
        }
        assert!(most > 0, "{name}: they did not run at the same time");
        let replies: Vec<String> = events.into_iter().map(|events| reply(events).0).collect();
        assert_eq!(replies, expected, "{name}");
    }
}

/// The operations of a graph, or of a layer: how many there are of each name.
type Operations = BTreeMap<String, usize>;

/// Operations that are views of their input, which a GPU does not run.
const VIEWS: [&str; 11] = [
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
    // Under the emulation only: outputs of one kernel with several types.
    "View",
];

/// What a layer is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Count {
    /// Number of operations of MLX.
    operations: usize,
    /// Number of operations that are not [`VIEWS`].
    dispatches: usize,
}

impl Count {
    fn of(operations: &Operations) -> Self {
        let all = || operations.iter().filter(|(name, _)| !VIEWS.contains(&name.as_str()));
        Self {
            operations: operations.values().sum(),
            dispatches: all().map(|(_, count)| count).sum(),
        }
    }
}

/// Replaces each group `parts`, which MLX builds on a CPU, by the operation `name`, which it builds on Metal. `mark` occurs once
/// in a group and nowhere else.
fn join(operations: &mut Operations, name: &str, parts: &Operations, mark: &str) {
    assert_eq!(parts[mark], 1, "{parts:?}");
    let count = operations.get(mark).copied().unwrap_or_default();
    for (part, each) in parts {
        let left = operations.get(part).copied().unwrap_or_default().checked_sub(each * count);
        operations.insert(part.clone(), left.unwrap_or_else(|| panic!("{part} of {name}")));
    }
    operations.insert(name.into(), count);
}

/// The operations of a layer as MLX 0.32.2 builds them on Metal. On a CPU, its `rms_norm` and `scaled_dot_product_attention` are
/// several; on Metal one each, attention for the 256 wide heads of Qwen3.5 (`mlx/fast.cpp`, and
/// `mlx/backend/metal/scaled_dot_product_attention.cpp`).
fn on_metal(mut operations: Operations, rows: i32) -> Operations {
    let array = |shape: &[i32]| Array::zeros::<f32>(shape).unwrap();
    let [x, weight] = [array(&[1, 1, 32]), array(&[32])];
    eval([&x, &weight]).unwrap();
    let norm = operations_of(&fast::rms_norm(&x, Some(&weight), 1e-6).unwrap());
    join(&mut operations, "RMSNorm", &norm, "Rsqrt");
    let [q, k] = [array(&[1, 4, rows, 32]), array(&[1, 2, 64, 32])];
    eval([&q, &k]).unwrap();
    let causal = (rows > 1).then_some(fast::ScaledDotProductAttentionMask::Causal);
    let attention = fast::scaled_dot_product_attention(&q, &k, &k, 0.1, causal, None).unwrap();
    join(&mut operations, "Attention", &operations_of(&attention), "Softmax");
    operations
}

/// The operations of each layer of the model, and whether it is recurrent.
fn layers(decoder: &Decoder, streams: usize, rows: usize) -> Vec<(bool, Operations)> {
    let new = || -> Vec<Cache> {
        let mut caches: Vec<Cache> = (0..streams).map(|_| after_one_row(decoder)).collect();
        let arrays: Vec<Array> = caches.iter().flat_map(|cache| cache.arrays().unwrap()).collect();
        eval(&arrays).unwrap();
        if rows > 1 {
            caches.iter_mut().for_each(Cache::mark_draft);
        }
        caches
    };
    // Graphs are made, and no kernel runs. A clone of a cache would be copied before it is written to.
    let of_first = |layers| operations_of(&forward(decoder, &mut new(), rows, Some(layers)));
    let caches = new();
    let depth = caches[0].layers.len();
    let graphs: Vec<Operations> = (0..=depth).map(of_first).collect();
    let layer = |i: usize| {
        let before = |name: &String| graphs[i].get(name).copied().unwrap_or_default();
        let own = graphs[i + 1].iter().map(|(name, count)| (name.clone(), count - before(name)));
        (matches!(caches[0].layers[i], LayerCache::Recurrent(_)), own.collect())
    };
    (0..depth).map(layer).collect()
}

/// A cache with the buffers for the keys and values of a row, as every pass but the first finds them.
fn after_one_row(decoder: &Decoder) -> Cache {
    let dtype = forward(decoder, &mut [decoder.empty_cache()], 1, Some(0)).dtype();
    let mut cache = decoder.empty_cache();
    for layer in &mut cache.layers {
        if let LayerCache::Full(full) = layer {
            let [heads, dim] = full.shape();
            full.append(&zeros_dtype(&[1, 2 * heads, 1, dim], dtype).unwrap()).unwrap();
        }
    }
    cache.position = 1;
    cache
}

/// The counts of the layer with the most operations: layers of another format of weights are not joined. One for recurrent
/// layers, and one for those with attention.
fn most(layers: &[(bool, Operations)]) -> [Count; 2] {
    [true, false].map(|recurrent| {
        let own = layers.iter().filter(|(is_recurrent, _)| *is_recurrent == recurrent);
        own.map(|(_, operations)| Count::of(operations)).max_by_key(|c| c.operations).unwrap()
    })
}

fn forward(decoder: &Decoder, caches: &mut [Cache], rows: usize, exit: Option<usize>) -> Array {
    let tokens = token_ids(&probe_tokens(rows * caches.len()));
    let rows = i32::try_from(rows).unwrap();
    let mut spans: Vec<_> = caches.iter_mut().map(|cache| Span { rows, cache }).collect();
    decoder.network().model().forward(&tokens, &mut spans, Pass { exit, skip: &[] }).unwrap()
}

/// The operations of the graph of an array.
fn operations_of(array: &Array) -> Operations {
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
    let mut operations = Operations::new();
    for name in names.filter_map(|line| line.split('"').nth(1)) {
        *operations.entry(name.into()).or_default() += 1;
    }
    operations
}

/// Most operations and dispatches of a layer with its feed-forward block, by streams and rows of each: of a recurrent layer
/// and of one with attention, with MLX's operations alone, as a CPU builds them, and with our kernels, as Metal builds them.
/// The aim is 16 and 14, for 8 streams as well. The caches have room: every 256 rows, attention has one more dispatch for each
/// stream, which copies its buffer. mlx-lm 0.32.2 has 27 dispatches for a GatedDeltaNet layer and a token, counted by hand.
const MOST: [(usize, usize, [[Count; 2]; 2]); 3] = [
    (1, 1, [[count(85, 49), count(146, 79)], [count(11, 10), count(21, 13)]]),
    (1, 4, [[count(111, 68), count(156, 83)], [count(11, 10), count(21, 13)]]),
    (8, 1, [[count(92, 51), count(305, 115)], [count(13, 10), count(14, 13)]]),
];

/// [`MOST`] for layers with experts and a shared one. The feed-forward block has 8 of the dispatches, of which three are our
/// kernels.
const MOST_WITH_EXPERTS: [(usize, usize, [[Count; 2]; 2]); 3] = [
    (1, 1, [[count(120, 68), count(181, 98)], [count(18, 14), count(28, 17)]]),
    (1, 4, [[count(146, 87), count(191, 102)], [count(18, 14), count(28, 17)]]),
    (8, 1, [[count(127, 70), count(340, 134)], [count(20, 14), count(21, 17)]]),
];

const fn count(operations: usize, dispatches: usize) -> Count {
    Count { operations, dispatches }
}

#[test]
fn layers_on_metal_have_few_operations() {
    check_counts(load, MOST);
}

#[test]
fn layers_with_experts_on_metal_have_few_operations() {
    check_counts(|config| family("qwen3_next_4bit", config, false), MOST_WITH_EXPERTS);
}

/// Compares the counts of the model that `load` loads with the table.
fn check_counts(load: fn(Config) -> Decoder, table: [(usize, usize, [[Count; 2]; 2]); 3]) {
    let decoder = |kernels| {
        let mut config = Config::default();
        config.model.kernels = kernels;
        config.model.compile = Compile::On;
        load(config)
    };
    let plain = decoder(Kernels::Mlx);
    let plain = table.map(|(streams, rows, _)| most(&layers(&plain, streams, rows)));
    emulate(steersman_metal_emulation::compile);
    let own = decoder(Kernels::Auto);
    assert!(is_enabled());
    let own = table.map(|(streams, rows, _)| {
        let mut layers = layers(&own, streams, rows);
        for (_, operations) in &mut layers {
            *operations = on_metal(std::mem::take(operations), i32::try_from(rows).unwrap());
        }
        most(&layers)
    });
    let counts: Vec<[[Count; 2]; 2]> = plain.into_iter().zip(own).map(|(a, b)| [a, b]).collect();
    let is_within = |most: &Count, count: &Count| {
        count.operations <= most.operations && count.dispatches <= most.dispatches
    };
    for ((streams, rows, most), own) in table.iter().zip(&counts) {
        let pairs = most.iter().flatten().zip(own.iter().flatten());
        assert!(
            pairs.into_iter().all(|(most, count)| is_within(most, count)),
            "{streams} streams, {rows} rows: at most {most:?}, all: {counts:?}"
        );
    }
}
