//! Numbers: models compute what mlx-lm computes, however the rows are divided into passes.
//!
//! The expected values are mlx-lm 0.32.2's: `tests/fixtures/families.py` writes those of small
//! seeded checkpoints of each family, `tests/fixtures/reference.py` those of the bundled model. The
//! cases of a family are its folders in `tests/fixtures/families`.

use std::collections::{BTreeMap, HashMap};
use std::fs::DirEntry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;

use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis, take_along_axis};
use mlx_rs::ops::{concatenate, logsumexp_axis, stack};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use serde_json::Value;
use steersman_engine::config::{Compile, DraftKind, Dtype::Bf16, Kernels, ModelConfig};
use steersman_engine::internals::cache::{Cache, LayerCache, Span};
use steersman_engine::internals::model::{FAMILIES, Model, Pass, load};
use steersman_engine::request::{RawPrompt, Request};
use steersman_engine::tools::verify::{DecodePath, verify};
use steersman_tests::{bundled_model, config, fixture, fixtures, load_from};

/// Bound of the largest difference in a row over the row's largest logit.
const RELATIVE: f32 = 1e-3;

/// A checkpoint and its reference values.
struct Case {
    model: Box<dyn Model>,
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    expected: HashMap<String, Array>,
}

/// Names of all seeded checkpoints, sorted.
fn families() -> Vec<String> {
    let folder = fixtures().join("families");
    let name = |entry: std::io::Result<DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<_> = folder.read_dir().unwrap().map(name).collect();
    names.sort();
    names
}

fn family(name: &str, config: &ModelConfig) -> Case {
    let folder = fixtures().join("families").join(name);
    let facts = fixture(&format!("families/{name}/reference.json"));
    let expected = Array::load_safetensors(folder.join("reference.safetensors")).unwrap();
    Case::new(&folder, &facts, expected, config)
}

/// The bundled model in one of its forms.
fn tiny_hybrid(name: &str, folder: &Path, config: &ModelConfig) -> Case {
    let facts = &fixture("reference.json")["models"][name];
    let prefix = format!("{name}.");
    let expected = Array::load_safetensors(fixtures().join("reference.safetensors")).unwrap();
    let own = |(key, array): (String, Array)| Some((key.strip_prefix(&prefix)?.to_string(), array));
    Case::new(folder, facts, expected.into_iter().filter_map(own).collect(), config)
}

impl Case {
    fn new(
        folder: &Path,
        facts: &Value,
        expected: HashMap<String, Array>,
        config: &ModelConfig,
    ) -> Self {
        let ids = |key: &str| serde_json::from_value(facts[key].clone()).unwrap();
        let model = load(folder, config).unwrap().model;
        Self { model, prompt: ids("prompt_ids"), greedy: ids("greedy_ids"), expected }
    }

    /// Runs `tokens` and returns the logits of all of them, [T, V].
    fn run(&self, tokens: &[u32], cache: &mut Cache) -> Array {
        self.run_in(tokens, cache, Pass::WHOLE)
    }

    fn run_in(&self, tokens: &[u32], cache: &mut Cache, pass: Pass) -> Array {
        let rows = tokens.len() as i32;
        let ids = Array::from_slice(tokens, &[rows]);
        let hidden = self.model.forward(&ids, &mut [Span { rows, cache }], pass).unwrap();
        self.model.logits(&hidden).unwrap().squeeze_axes(&[0]).unwrap()
    }

    /// Logits of the prompt, prefilled in chunks of `chunk` tokens, and the cache after it.
    fn prefill(&self, chunk: usize) -> (Array, Cache) {
        let mut cache = self.model.new_cache().unwrap();
        let parts: Vec<Array> =
            self.prompt.chunks(chunk).map(|part| self.run(part, &mut cache)).collect();
        (concatenate(&parts, 0).unwrap(), cache)
    }

    /// Compares with all logits, or with the samples of them that the reference has.
    fn assert_logits(&self, logits: &Array, how: &str) {
        let close = |ours: &Array, reference: &Array, what: &str| {
            assert_close(ours, reference, RELATIVE, &format!("{how}: {what}"));
        };
        let expected = |key: &str| &self.expected[key];
        if self.expected.contains_key("logits") {
            return close(logits, expected("logits"), "all logits");
        }
        let last = logits.try_index(self.prompt.len() as i32 - 1).unwrap();
        close(&last, expected("last_logits"), "last row");
        close(&logsumexp_axis(logits, -1, false).unwrap(), expected("logsumexp"), "log-sum-exp");
        let sampled = logits.take_axis(expected("sample_ids"), 1).unwrap();
        close(&sampled, expected("sample_logits"), "64 ids of every row");
        let top = take_along_axis(logits, expected("top_ids"), -1).unwrap();
        close(&top, expected("top_logits"), "the 8 likeliest ids of every row");
    }

    fn assert_greedy(&self, logits: &Array, mut cache: Cache) {
        let mut row = logits.try_index(self.prompt.len() as i32 - 1).unwrap();
        let mut tokens = Vec::new();
        while tokens.len() < self.greedy.len() {
            let token = argmax_axis(&row, -1, None).unwrap().item_exact::<u32>();
            tokens.push(token);
            row = self.run(&[token], &mut cache).try_index(0).unwrap();
        }
        assert_eq!(tokens, self.greedy);
    }

    /// As [`Self::assert_greedy`], for the reference's tokens in one pass.
    fn assert_greedy_at_once(&self, logits: &Array, mut cache: Cache) {
        let last = logits.try_index(self.prompt.len() as i32 - 1..).unwrap();
        let (_, given) = self.greedy.split_last().unwrap();
        let rows = concatenate(&[last, self.run(given, &mut cache)], 0).unwrap();
        let tokens = argmax_axis(&rows, -1, None).unwrap();
        eval([&tokens]).unwrap();
        assert_eq!(tokens.as_slice::<u32>(), self.greedy);
    }
}

/// The largest difference of a row over the largest value of that row is less than `bound`.
fn assert_close(ours: &Array, expected: &Array, bound: f32, what: &str) {
    let scale = expected.abs().unwrap().max_axis(-1, true).unwrap();
    let distance = ours.subtract(expected).unwrap().abs().unwrap().divide(scale).unwrap();
    let worst = distance.max(None).unwrap().item_exact::<f32>();
    println!("{what}: {worst:e}");
    assert!(worst < bound, "{what} differs by {worst:e}");
}

fn check(case: &Case) {
    // 300 is the whole prompt; 64 is a chunk of the delta rule, 23 a part of one, 7 uses the short
    // form.
    for chunk in [300, 64, 23, 7] {
        let (logits, cache) = case.prefill(chunk);
        case.assert_logits(&logits, &format!("chunks of {chunk}"));
        // Token by token takes most of the time, so only two of these caches are continued in that way.
        if chunk == 300 {
            case.assert_greedy(&logits, cache);
        } else {
            case.assert_greedy_at_once(&logits, cache);
        }
    }
    // Decode steps only: one token of the prompt at a time.
    let (logits, cache) = case.prefill(1);
    case.assert_logits(&logits, "token by token");
    case.assert_greedy(&logits, cache);
}

#[test]
fn every_family_computes_what_mlx_lm_computes() {
    for name in families() {
        println!("{name}");
        check(&family(&name, &config().model));
    }
}

#[test]
fn every_family_has_a_checkpoint() {
    let model_type = |name| fixture(&format!("families/{name}/config.json"))["model_type"].clone();
    let covered: Vec<Value> = families().into_iter().map(model_type).collect();
    for row in FAMILIES {
        assert!(covered.contains(&row.model_type.into()), "{} has no folder", row.model_type);
    }
}

/// A single f32 constant promotes everything after it to f32: correct numbers at half the speed and
/// twice the memory.
#[test]
fn activations_keep_the_chosen_dtype() {
    let config = ModelConfig { dtype: Bf16, ..config().model };
    for name in families() {
        let case = family(&name, &config);
        let (logits, cache) = case.prefill(64);
        assert_eq!(logits.dtype(), Dtype::Bfloat16, "{name}");
        let recurrent = |layer: &&LayerCache| matches!(layer, LayerCache::Recurrent(_));
        // The delta rule's matrix is the exception: it sums over the whole context.
        let exceptions = cache.layers.iter().filter(recurrent).count();
        let state = cache.arrays().unwrap();
        let wide = state.iter().filter(|array| array.dtype() == Dtype::Float32).count();
        assert_eq!(wide, exceptions, "{name}");
    }
}

/// Speculation depends on this, for every kind of layer cache.
#[test]
fn rewound_cache_equals_cache_without_the_rows() {
    const ROWS: usize = 5;
    for name in families() {
        let case = family(&name, &config().model);
        let (_, prompt) = case.prefill(300);
        // Any tokens would do for the dropped rows.
        let tokens = &case.greedy[..ROWS];
        for keep in 0..=ROWS {
            let next = [case.greedy[ROWS]];
            let mut straight = prompt.clone();
            if keep > 0 {
                case.run(&tokens[..keep], &mut straight);
            }
            let expected = case.run(&next, &mut straight);
            for width in [ROWS, 1] {
                let mut cache = prompt.clone();
                cache.mark_draft();
                for rows in tokens.chunks(width) {
                    case.run(rows, &mut cache);
                }
                cache.rewind_draft(case.prompt.len() + keep).unwrap();
                let how = format!("{name}: {keep} of {ROWS} rows kept, {width} at a time");
                assert_close(&case.run(&next, &mut cache), &expected, 1e-4, &how);
            }
        }
    }
}

#[test]
fn the_bundled_model_computes_what_mlx_lm_computes() {
    check(&tiny_hybrid("tiny-hybrid-4bit", &bundled_model(), &config().model));
}

/// MLX's products with packed weights: the default on a GPU. The other tests run the default on a CPU.
#[test]
fn quantized_weights_compute_what_mlx_lm_computes() {
    let config = ModelConfig { kernels: Kernels::Mlx, ..config().model };
    let case = tiny_hybrid("tiny-hybrid-4bit", &bundled_model(), &config);
    case.assert_logits(&case.prefill(300).0, "quantized");
    let quantized =
        |name: &String| !fixture(&format!("families/{name}/config.json"))["quantization"].is_null();
    for name in families().iter().filter(|name| quantized(name)) {
        let case = family(name, &config);
        for chunk in [300, 7, 1] {
            case.assert_logits(&case.prefill(chunk).0, &format!("{name}: chunks of {chunk}"));
        }
    }
}

/// The bundled model before quantization. Too large for this repository.
#[test]
#[ignore = "needs the folder tiny-hybrid-bf16 in MODEL_DIR"]
fn the_published_model_computes_what_mlx_lm_computes() {
    let folder = PathBuf::from(std::env::var_os("MODEL_DIR").expect("MODEL_DIR is set"));
    check(&tiny_hybrid("tiny-hybrid-bf16", &folder.join("tiny-hybrid-bf16"), &config().model));
}

/// Real models, with longer windows than the seeded checkpoints.
#[test]
#[ignore = "needs the folders of tests/fixtures/real.py in MODEL_DIR"]
fn real_models_compute_what_mlx_lm_computes() {
    let models = PathBuf::from(std::env::var_os("MODEL_DIR").expect("MODEL_DIR is set"));
    let mut found = false;
    for folder in models.read_dir().unwrap().map(|entry| entry.unwrap().path()) {
        // Folders without a reference are other models; those of `real.py --gguf` are for `laws/gguf.rs`.
        let Ok(facts) = std::fs::read(folder.join("reference.json")) else { continue };
        if folder.extension().is_some_and(|extension| extension == "f32") {
            continue;
        }
        found = true;
        println!("{}", folder.display());
        let facts = serde_json::from_slice(&facts).unwrap();
        let expected = Array::load_safetensors(folder.join("reference.safetensors")).unwrap();
        let case = Case::new(&folder, &facts, expected, &config().model);
        let (logits, cache) = case.prefill(200);
        case.assert_logits(&logits, "chunks of 200");
        case.assert_greedy(&logits, cache);
    }
    assert!(found, "{} has no folder of tests/fixtures/real.py", models.display());
}

/// Checkpoints with shapes of their own in all formats of weights: logits as above, also of MLX's products
/// with packed weights, and mlx-lm's greedy tokens on every path of the decoder.
fn check_generated(models: &Path) {
    let mut folders: Vec<PathBuf> =
        models.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(!folders.is_empty(), "{} has no folder", models.display());
    let (mut table, mut failures) = (BTreeMap::<String, [usize; 2]>::new(), Vec::new());
    for folder in folders {
        let facts = std::fs::read(folder.join("reference.json")).expect("a reference");
        let facts: Value = serde_json::from_slice(&facts).unwrap();
        let checked = catch_unwind(AssertUnwindSafe(|| check_checkpoint(&folder, &facts)));
        let counts = table.entry(facts["family"].as_str().unwrap().into()).or_default();
        counts[0] += 1;
        if checked.is_err() {
            failures.push(format!("{}, {}", folder.display(), facts["format"]));
        } else {
            counts[1] += 1;
        }
    }
    for (family, [all, equal]) in &table {
        println!("{family}: {equal} of {all}");
    }
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}

fn check_checkpoint(folder: &Path, facts: &Value) {
    println!("{}, {}", folder.display(), facts["format"]);
    let expected = Array::load_safetensors(folder.join("reference.safetensors")).unwrap();
    let case = Case::new(folder, facts, expected, &config().model);
    for chunk in [300, 23, 1] {
        let (logits, cache) = case.prefill(chunk);
        case.assert_logits(&logits, &format!("chunks of {chunk}"));
        if chunk == 300 {
            case.assert_greedy(&logits, cache);
        }
    }
    let packed = ModelConfig { kernels: Kernels::Mlx, ..config().model };
    let packed = Case::new(folder, facts, case.expected.clone(), &packed);
    packed.assert_logits(&packed.prefill(300).0, "MLX's kernels");

    let data = tempfile::tempdir().unwrap();
    let mut config = config();
    config.store.enabled = false;
    config.engine.prefill_chunk = 16;
    let (mut decoder, _) = load_from(config, folder, data.path()).unwrap();
    let request = Request {
        profile: "default".into(),
        prompt: Some(RawPrompt::Tokens(case.prompt.clone())),
        ..Request::default()
    };
    let paths = [
        DecodePath::Plain,
        DecodePath::Chunked(7),
        DecodePath::Resumed,
        DecodePath::Rewound,
        DecodePath::Drafted(DraftKind::Ngram),
        DecodePath::Batched(3, Some(DraftKind::Ngram)),
        DecodePath::Preempted(Some(DraftKind::Ngram)),
    ];
    for outcome in verify(&mut decoder, &[request], &paths, case.greedy.len(), |_| ()).unwrap() {
        assert!(outcome.holds(), "{outcome:?}");
        assert_eq!(outcome.replies[0], case.greedy, "{}", outcome.path.name());
    }
}

#[test]
fn generated_models_compute_what_mlx_lm_computes() {
    check_generated(&fixtures().join("generated"));
}

/// Some hundred more.
#[test]
#[ignore = "needs the folders of tests/fixtures/generator.py in MODEL_DIR"]
fn all_generated_models_compute_what_mlx_lm_computes() {
    check_generated(Path::new(&std::env::var_os("MODEL_DIR").expect("MODEL_DIR is set")));
}

/// A pass with an early exit or skipped layers changes the logits, but not after a rewind.
#[test]
fn rewind_undoes_partial_passes() {
    for name in families() {
        let case = family(&name, &config().model);
        let (_, mut cache) = case.prefill(300);
        let next = &case.greedy[..3];
        let expected = case.run(next, &mut cache.clone());
        let depth = case.model.depth();
        let whole = case.run_in(next, &mut cache.clone(), Pass { exit: Some(depth), skip: &[] });
        assert_close(&whole, &expected, 1e-6, &format!("{name}: all layers"));
        for pass in [Pass { exit: Some(1), skip: &[] }, Pass { exit: None, skip: &[0, 1] }] {
            cache.mark_draft();
            let drafted = case.run_in(next, &mut cache, pass);
            let change = drafted.subtract(&expected).unwrap().abs().unwrap().max(None).unwrap();
            // Mamba-2 has no feed-forward blocks to skip.
            let changes = pass.exit.is_some() || name != "mamba2";
            assert!(
                !changes || change.item_exact::<f32>() > 1e-2,
                "{name}: {pass:?} runs all layers"
            );
            cache.rewind_draft(case.prompt.len()).unwrap();
            let again = case.run(next, &mut cache.clone());
            assert_close(&again, &expected, 1e-4, &format!("{name}: after {pass:?}"));
        }
    }
}

/// Steps of one row and of a draft's rows.
#[test]
fn compiled_steps_equal_plain_ones() {
    let gcc = Command::new("g++").arg("--version").output();
    if !gcc.is_ok_and(|output| output.status.success()) {
        return println!("SKIPPED: without g++, MLX compiles nothing on the CPU");
    }
    for name in families() {
        let plain = family(&name, &config().model);
        let (_, prompt) = plain.prefill(300);
        let steps = [1, 1, 5, 8, 2, 8];
        let run = |case: &Case| {
            let mut cache = prompt.clone();
            let mut tokens = case.greedy.iter().cycle().copied();
            let logits = steps.map(|rows| {
                let tokens: Vec<u32> = tokens.by_ref().take(rows).collect();
                case.run(&tokens, &mut cache)
            });
            concatenate(&logits, 0).unwrap()
        };
        let expected = run(&plain);
        expected.eval().unwrap();
        // Loading enables compiling.
        let compiled = family(&name, &ModelConfig { compile: Compile::On, ..config().model });
        assert_close(&run(&compiled), &expected, 1e-5, &name);
    }
}

/// Several requests in one step depend on this: rows of two sequences of different lengths, joined
/// in one pass, give the same as separate passes.
#[test]
fn joined_ragged_rows_equal_separate_rows() {
    for name in families() {
        let case = family(&name, &config().model);
        let (first, second) = case.prompt.split_at(57);
        let next = [case.greedy[0], case.greedy[1]];
        let alone = [(first, next[0]), (second, next[1])].map(|(tokens, next)| {
            let mut cache = case.model.new_cache().unwrap();
            case.run(tokens, &mut cache);
            case.run(&[next], &mut cache).try_index(0).unwrap()
        });
        let mut caches = [case.model.new_cache().unwrap(), case.model.new_cache().unwrap()];
        let mut run = |tokens: &[u32], rows: [i32; 2]| {
            let ids = Array::from_slice(tokens, &[tokens.len() as i32]);
            let mut spans: Vec<Span> =
                caches.iter_mut().zip(rows).map(|(cache, rows)| Span { rows, cache }).collect();
            case.model.forward(&ids, &mut spans, Pass::WHOLE).unwrap()
        };
        run(&case.prompt, [57, 13]);
        let hidden = run(&next, [1, 1]);
        let joined = case.model.logits(&hidden).unwrap().squeeze_axes(&[0]).unwrap();
        assert_close(&joined, &stack(&alone, 0).unwrap(), 1e-4, &name);
        assert_eq!([caches[0].position, caches[1].position], [58, 14], "{name}");
    }
}

/// The prefix store depends on this.
#[test]
fn restored_cache_equals_original_cache() {
    for name in families() {
        let case = family(&name, &config().model);
        // Shorter and longer than the windows.
        for rows in [9, 70] {
            let mut cache = case.model.new_cache().unwrap();
            case.run(&case.prompt[..rows], &mut cache);
            let mut restored = case.model.new_cache().unwrap();
            let parts = [(0, 5), (5, rows)].map(|(from, to)| cache.key_values(from, to).unwrap());
            restored.restore(None, &parts, &cache.recurrent_state().unwrap(), rows).unwrap();
            for next in case.greedy[..40].chunks(5) {
                let [expected, ours] = [&mut cache, &mut restored].map(|c| case.run(next, c));
                assert_close(&ours, &expected, 1e-4, &format!("{name} after {rows} rows"));
            }
        }
    }
}
