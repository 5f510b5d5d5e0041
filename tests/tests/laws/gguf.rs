//! GGUF files compute what the checkpoints compute that they were converted from, and split texts as their tokenizers do.
//!
//! `tests/fixtures/gguf_files.py` writes seeded files with the package `gguf`, and what mlx-lm 0.32.2 and `tokenizers` make of
//! the same weights and vocabularies.

use std::path::{Path, PathBuf};

use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis};
use mlx_rs::{Array, Dtype};
use serde_json::{Map, Value};
use steersman_engine::config::{Dtype::Bf16, Kernels, ModelConfig};
use steersman_engine::internals::cache::{Cache, Span};
use steersman_engine::internals::model::{Model, Pass, load};
use steersman_engine::request::Request;
use steersman_models::facts::{Facts, Numbers, Unpacked};
use steersman_tests::{Running, ask, config, fixture, fixtures, run};
use steersman_text::Text;

/// Bound of the largest difference in a row over the row's largest logit, as in `reference.rs`.
const RELATIVE: f32 = 1e-3;

fn cases() -> Map<String, Value> {
    fixture("gguf/reference.json")["files"].as_object().expect("cases by name").clone()
}

fn file(name: &str) -> PathBuf {
    fixtures().join("gguf").join(format!("{name}.gguf"))
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("ids are numbers")
}

/// Logits of `tokens`, [T, V].
fn forward(model: &dyn Model, tokens: &[u32], cache: &mut Cache) -> Array {
    let rows = tokens.len() as i32;
    let ids = Array::from_slice(tokens, &[rows]);
    let hidden = model.forward(&ids, &mut [Span { rows, cache }], Pass::WHOLE).unwrap();
    model.logits(&hidden).unwrap().squeeze_axes(&[0]).unwrap()
}

/// `count` greedy tokens after `prompt`, and the logits of its last row.
fn greedy(model: &dyn Model, prompt: &[u32], count: usize) -> (Vec<u32>, Array) {
    let mut cache = model.new_cache().unwrap();
    let logits = forward(model, prompt, &mut cache);
    let last = logits.try_index(prompt.len() as i32 - 1).unwrap();
    let (mut row, mut tokens) = (last.clone(), Vec::new());
    while tokens.len() < count {
        tokens.push(argmax_axis(&row, -1, None).unwrap().item_exact::<u32>());
        row = forward(model, &tokens[tokens.len() - 1..], &mut cache).try_index(0).unwrap();
    }
    (tokens, last)
}

fn relative_distance(found: &Array, expected: &[f32]) -> f32 {
    let expected = Array::from_slice(expected, &[expected.len() as i32]);
    let largest = |array: Array| array.abs().unwrap().max(None).unwrap().item_exact::<f32>();
    largest(found.subtract(&expected).unwrap()) / largest(expected)
}

/// Packed by kernels of our own, packed by MLX's, and dequantized.
#[test]
fn seeded_files_compute_what_mlx_lm_computes() {
    let own = config().model;
    let mlx = ModelConfig { kernels: Kernels::Mlx, ..own.clone() };
    let dequantized = ModelConfig { cpu_dequantize: true, ..own.clone() };
    let cases = cases();
    assert_eq!(cases.len(), 10);
    for (name, case) in &cases {
        for (how, config) in [("own", &own), ("mlx", &mlx), ("dequantized", &dequantized)] {
            let loaded = load(&file(name), config).unwrap();
            assert_eq!(loaded.own_kernels > 0, how == "own", "{name}");
            let expected = ids(&case["greedy_ids"]);
            let (tokens, last) = greedy(&*loaded.model, &ids(&case["prompt_ids"]), expected.len());
            let logits: Vec<f32> = serde_json::from_value(case["last_logits"].clone()).unwrap();
            let distance = relative_distance(&last, &logits);
            println!("{name}, {how}: {distance:e}");
            assert!(distance < RELATIVE, "{name}, {how}: {distance:e}");
            assert_eq!(tokens, expected, "{name}, {how}");
        }
    }
}

/// Norms and recurrent constants are f32 in the file.
#[test]
fn activations_keep_the_chosen_dtype() {
    let config = ModelConfig { dtype: Bf16, ..config().model };
    for (name, case) in cases() {
        let loaded = load(&file(&name), &config).unwrap();
        let mut cache = loaded.model.new_cache().unwrap();
        let logits = forward(&*loaded.model, &ids(&case["prompt_ids"]), &mut cache);
        assert_eq!(logits.dtype(), Dtype::Bfloat16, "{name}");
    }
}

#[test]
fn tokenizers_of_files_split_texts_as_those_of_the_models() {
    let mut compared = 0;
    for (name, case) in cases() {
        let text = Text::load(&file(&name)).unwrap();
        for case in case["texts"].as_array().unwrap() {
            let source = case["text"].as_str().unwrap();
            assert_eq!(text.encode(source).unwrap(), ids(&case["ids"]), "{name}: {source:?}");
            compared += 1;
        }
        // A small vocabulary lacks most characters, and NFC changes some texts.
        let source = "A plain text: 12 words,\n\ttabs and ñandúes.";
        if case["texts"].as_array().unwrap().len() > 10 {
            assert_eq!(text.decode(&text.encode(source).unwrap()), source, "{name}");
        }
    }
    assert!(compared >= 75, "{compared}");
}

/// Weights, tokenizer, template and end of turn together.
#[test]
fn an_engine_answers_from_a_file() {
    let question = Request { max_tokens: Some(24), ..ask("What is in a license?") };
    let mut fingerprints = Vec::new();
    for name in cases().keys() {
        let data = tempfile::tempdir().unwrap();
        let engine = Running::try_start(config(), &file(name), data.path()).unwrap();
        assert_eq!(&engine.info().model, name);
        let reply = run(&engine, question.clone());
        let usage = reply.finished().usage;
        assert!(usage.reasoning_tokens + usage.answer_tokens <= 24, "{name}: {usage:?}");
        fingerprints.push(reply.fingerprint);
    }
    fingerprints.sort();
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), cases().len(), "state of one file must not match another");
}

/// State of a file is found again after a restart, and not by a file with other weights.
#[test]
fn fingerprints_cover_the_weights_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut bytes = std::fs::read(file("qwen3")).unwrap();
    let fingerprint = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let data = tempfile::tempdir().unwrap();
        let engine = Running::try_start(config(), &path, data.path()).unwrap();
        run(&engine, Request { max_tokens: Some(1), ..ask("Hello") }).fingerprint
    };
    let first = fingerprint(&bytes);
    assert_eq!(first, fingerprint(&bytes));
    // The last byte is a code of the last matrix.
    *bytes.last_mut().unwrap() ^= 1;
    assert_ne!(first, fingerprint(&bytes));
}

#[test]
fn errors_name_the_file_and_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let check = |name: &str, from: &str, to: &str, expected: &[&str]| {
        let mut bytes = std::fs::read(file(name)).unwrap();
        let at = bytes.windows(from.len()).position(|part| part == from.as_bytes()).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, bytes).unwrap();
        let data = tempfile::tempdir().unwrap();
        let started = Running::try_start(config(), &path, data.path());
        let error = started.err().expect("the file is refused").to_string();
        for words in expected {
            assert!(error.contains(words), "{words}: {error}");
        }
    };
    check("llama", "llama", "zebra", &["model.gguf", "architecture `zebra`", "qwen35"]);
    check("llama", "llama-bpe", "zebra-bpe", &["model.gguf", "tokenizer.ggml.pre", "`zebra-bpe`"]);
    check("qwen3", "blk.1.attn_v", "blk.1.attn_w", &["model.gguf", "`blk.1.attn_w.weight`"]);
    check("qwen3", "chat_template", "chat_temqlate", &["model.jinja", "not a chat model"]);
    // As many key heads as query heads is the default, which the weights contradict.
    check(
        "gemma3",
        "gemma3.attention.head_count_kv",
        "gemma3.attention.head_count_kx",
        &["model.gguf", "k_proj"],
    );
}

/// What `list`, `show`, `doctor` and the memory budget read.
#[test]
fn facts_of_a_file_are_read() {
    let facts = Facts::read(&file("qwen35")).unwrap();
    assert_eq!(facts.family, "qwen3_5_text");
    assert_eq!((facts.layers, facts.context), (Some(2), Some(4096)));
    assert_eq!(facts.files.len(), 1);
    let size = std::fs::metadata(file("qwen35")).unwrap().len();
    assert_eq!(facts.file_bytes(), size);
    // Packed codes and scales take about what they take in the file, whose header is a third of it.
    let packed = facts.weight_bytes(Numbers { float_bytes: 2, unpacked: Unpacked::Nothing });
    assert!((size / 2..size).contains(&packed), "{packed} of {size}");
}

/// The file of a real model and its checkpoint with the same numbers in f32, which `tests/fixtures/real.py --gguf` writes.
#[test]
#[ignore = "needs the folders of tests/fixtures/real.py --gguf in MODEL_DIR"]
fn real_files_compute_what_their_checkpoints_compute() {
    let models = PathBuf::from(std::env::var_os("MODEL_DIR").expect("MODEL_DIR is set"));
    let mut found = 0;
    for path in models.read_dir().unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_some_and(|ending| ending == "gguf") {
            compare(&path);
            found += 1;
        }
    }
    assert!(found > 0, "{} has no file of tests/fixtures/real.py --gguf", models.display());
}

fn compare(path: &Path) {
    let folder = path.with_extension("f32");
    let facts = std::fs::read(folder.join("reference.json")).unwrap();
    let facts: Value = serde_json::from_slice(&facts).unwrap();
    let (prompt, expected) = (ids(&facts["prompt_ids"]), ids(&facts["greedy_ids"]));
    // All types are exact in f32; Q6_K is rounded if it is packed.
    let exact = ModelConfig { cpu_dequantize: true, ..config().model };
    let loaded = load(path, &exact).unwrap();
    let (tokens, last) = greedy(&*loaded.model, &prompt, expected.len());
    let logits: Vec<f32> = serde_json::from_value(facts["last_logits"].clone()).unwrap();
    println!("{}: dequantized: {:e}", path.display(), relative_distance(&last, &logits));
    assert_eq!(tokens, expected, "{}", path.display());
    assert!(relative_distance(&last, &logits) < RELATIVE);
    drop(loaded);
    let loaded = load(path, &config().model).unwrap();
    let (tokens, last) = greedy(&*loaded.model, &prompt, expected.len());
    let equal = tokens.iter().zip(&expected).take_while(|(a, b)| a == b).count();
    let distance = relative_distance(&last, &logits);
    println!("{}: packed: {distance:e}, {equal} tokens equal", path.display());
    // Without Q6_K this is exact too.
    let bound = if facts["exact"] == true { RELATIVE } else { 0.05 };
    assert!(distance < bound, "{distance:e}");
    assert!(facts["exact"] != true || tokens == expected);
}
