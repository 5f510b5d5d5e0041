//! Numbers: the model computes what mlx-lm computes, however its work is cut up.
//!
//! `tests/fixtures/reference.py` wrote the expected values with mlx-lm 0.32.2.

use std::collections::HashMap;
use std::path::PathBuf;

use mlx_rs::Array;
use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis};
use mlx_rs::ops::{logsumexp_axis, stack};
use serde_json::Value;
use steersman_engine::cache::Cache;
use steersman_engine::config::{Device, Dtype, ModelConfig};
use steersman_engine::model::{Model, Span, load};

/// The bound that the mission sets: largest difference of a row over the row's largest logit.
const RELATIVE: f32 = 1e-3;

struct Case {
    model: Box<dyn Model>,
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    expected: HashMap<String, Array>,
}

fn case(name: &str) -> Case {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let fixtures = root.join("fixtures");
    let folder = match name {
        "tiny-hybrid-4bit" => root.join("../server/model/tiny-hybrid-4bit"),
        name => fixtures.join(name),
    };
    let config = ModelConfig { device: Device::Cpu, dtype: Dtype::F32, ..ModelConfig::default() };
    let text = std::fs::read(fixtures.join("reference.json")).unwrap();
    let json: Value = serde_json::from_slice(&text).unwrap();
    let ids = |key: &str| -> Vec<u32> {
        serde_json::from_value(json["models"][name][key].clone()).unwrap()
    };
    let prefix = format!("{name}.");
    let expected = Array::load_safetensors(fixtures.join("reference.safetensors")).unwrap();
    Case {
        model: load(&folder, &config).unwrap().model,
        prompt: ids("prompt_ids"),
        greedy: ids("greedy_ids"),
        expected: expected
            .into_iter()
            .filter_map(|(key, array)| Some((key.strip_prefix(&prefix)?.to_string(), array)))
            .collect(),
    }
}

impl Case {
    /// Runs `tokens` and returns the logits of all of them, [T, V].
    fn run(&self, tokens: &[u32], cache: &mut Cache) -> Array {
        let rows = tokens.len() as i32;
        let ids = Array::from_slice(tokens, &[rows]);
        let hidden = self.model.forward(&ids, &mut [Span { rows, cache }]).unwrap();
        self.model.logits(&hidden).unwrap().squeeze_axes(&[0]).unwrap()
    }

    /// Logits of the prompt, prefilled in chunks of `chunk`, and the cache behind it.
    fn prefill(&self, chunk: usize) -> (Array, Cache) {
        let mut cache = self.model.new_cache().unwrap();
        let parts: Vec<Array> =
            self.prompt.chunks(chunk).map(|part| self.run(part, &mut cache)).collect();
        (mlx_rs::ops::concatenate(&parts, 0).unwrap(), cache)
    }

    fn assert_logits(&self, logits: &Array, how: &str) {
        let rows = self.prompt.len() as i32;
        let expected = |key: &str| &self.expected[key];
        let close = |ours: &Array, reference: &Array, what: &str| {
            let scale = reference.abs().unwrap().max_axis(-1, true).unwrap();
            let distance = ours.subtract(reference).unwrap().abs().unwrap().divide(scale).unwrap();
            let worst = distance.max(None).unwrap().item_exact::<f32>();
            println!("{how}: {what}: {worst:e}");
            assert!(worst < RELATIVE, "{how}: {what} differs by {worst:e}");
        };
        let last = logits.try_index(rows - 1).unwrap();
        close(&last, expected("last_logits"), "last row");
        close(&logsumexp_axis(logits, -1, false).unwrap(), expected("logsumexp"), "log-sum-exp");
        let sampled = logits.take_axis(expected("sample_ids"), 1).unwrap();
        close(&sampled, expected("sample_logits"), "64 ids of every row");
        let top = mlx_rs::ops::indexing::take_along_axis(logits, expected("top_ids"), -1).unwrap();
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
}

fn check(name: &str) {
    let case = case(name);
    for (chunk, how) in [(300, "whole prefill"), (64, "chunks of 64"), (7, "chunks of 7")] {
        let (logits, cache) = case.prefill(chunk);
        case.assert_logits(&logits, how);
        case.assert_greedy(&logits, cache);
    }
    // Decode alone: the prompt goes in a token at a time, too.
    let (logits, _) = case.prefill(1);
    case.assert_logits(&logits, "token by token");
}

#[test]
fn a_published_checkpoint_computes_what_mlx_lm_computes() {
    check("tiny-hybrid-bf16");
}

#[test]
fn a_converted_4_bit_checkpoint_computes_what_mlx_lm_computes() {
    check("tiny-hybrid-4bit");
}

/// The shape that several requests in one step need: rows of two sequences, of different lengths,
/// joined in one `forward`, give what each gives alone.
#[test]
fn joined_ragged_rows_equal_separate_rows() {
    let case = case("tiny-hybrid-bf16");
    let (first, second) = (&case.prompt[..90], &case.prompt[100..113]);
    let mut alone = Vec::new();
    for tokens in [first, second] {
        let mut cache = case.model.new_cache().unwrap();
        case.run(tokens, &mut cache);
        alone.push(case.run(&[5], &mut cache).try_index(0).unwrap());
    }
    let mut caches = [case.model.new_cache().unwrap(), case.model.new_cache().unwrap()];
    let mut run = |tokens: &[u32], rows: [i32; 2]| {
        let ids = Array::from_slice(tokens, &[tokens.len() as i32]);
        let mut spans: Vec<Span> =
            caches.iter_mut().zip(rows).map(|(cache, rows)| Span { rows, cache }).collect();
        case.model.forward(&ids, &mut spans).unwrap()
    };
    run(&[first, second].concat(), [90, 13]);
    let hidden = run(&[5, 5], [1, 1]);
    let joined = case.model.logits(&hidden).unwrap().squeeze_axes(&[0]).unwrap();
    let difference = joined.subtract(stack(&alone, 0).unwrap()).unwrap().abs().unwrap();
    let worst = difference.max(None).unwrap().item_exact::<f32>();
    assert!(worst < 1e-3, "logits differ by {worst:e}");
    assert_eq!([caches[0].position, caches[1].position], [91, 14]);
}
