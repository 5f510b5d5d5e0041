//! Probabilities equal those of mlx-lm, whose logits are in the fixtures; prompts that are filled in.

use std::path::Path;

use mlx_rs::Array;
use serde_json::Value;
use tokio::sync::mpsc;

use super::scripted::*;
use crate::config::Config;
use crate::error::{Error, RequestError};
use crate::job::Job;
use crate::policy::TokenBias;
use crate::request::{Event, FinishReason, RawPrompt, Request};

/// The prompt of a family's fixture, and the logarithmic probabilities of all tokens after each of its
/// tokens, as mlx-lm computes them in f32.
fn fixture(name: &str) -> (Vec<u32>, Vec<Vec<f64>>) {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/families").join(name);
    let facts = std::fs::read(folder.join("reference.json")).unwrap();
    let facts: Value = serde_json::from_slice(&facts).unwrap();
    let prompt = serde_json::from_value(facts["prompt_ids"].clone()).unwrap();
    let arrays = Array::load_safetensors(folder.join("reference.safetensors")).unwrap();
    let logits = &arrays["logits"];
    let width = logits.dim(-1) as usize;
    let logprobs = |row: &[f32]| {
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        row.iter().map(|&logit| f64::from(logit) - sum.ln()).collect()
    };
    (prompt, logits.as_slice::<f32>().chunks(width).map(logprobs).collect())
}

/// What lm-eval asks for: all tokens of a prompt of ids, and one of the reply.
fn scored(prompt: &[u32]) -> Request {
    Request {
        messages: Vec::new(),
        prompt: Some(RawPrompt::Tokens(prompt.to_vec())),
        logprobs: Some(3),
        prompt_logprobs: Some(3),
        ..ask("", false, 1)
    }
}

fn config() -> Config {
    let mut config = Config::default();
    // Several chunks, none of which ends where the blocks of rows do.
    config.engine.prefill_chunk = 21;
    config
}

#[test]
fn probabilities_equal_those_of_mlx_lm() {
    for name in ["llama", "mistral", "gemma3", "qwen3_next", "qwen3_5"] {
        let mut decoder = family(name, config(), false);
        let (prompt, logprobs) = fixture(name);
        // The second time the prompt is saved.
        for _ in 0..2 {
            let ran = run_plain(&mut decoder, &scored(&prompt), Script::new(|_| Vec::new()));
            assert_eq!((ran.prompt_tokens.len(), ran.usage.cached_tokens), (prompt.len(), 0));
            assert_eq!(ran.prompt_tokens[0].logprob, None);
            let ends = ran.logprobs.iter().map(|found| (found.token.logprob, &found.top));
            let found = ran.prompt_tokens[1..].iter();
            let found = found.map(|token| (token.logprob.unwrap(), &token.top)).chain(ends);
            let tokens = ran.tokens[1..].iter();
            let mut compared = 0;
            for (((own, top), &token), expected) in found.zip(tokens).zip(&logprobs) {
                let close = |found: f32, expected: f64| {
                    assert!(
                        (f64::from(found) - expected).abs() < 1e-3,
                        "{name}: {found} {expected}"
                    );
                };
                close(own, expected[token as usize]);
                let mut best = expected.clone();
                best.sort_by(|a, b| b.total_cmp(a));
                assert_eq!(top.len(), 3);
                top.iter().zip(best).for_each(|(found, expected)| close(found.logprob, expected));
                compared += 1;
            }
            assert_eq!(
                compared,
                prompt.len(),
                "{name}: all tokens of the prompt, and the next one"
            );
        }
    }
}

/// lm-eval counts one token after the prompt, and drops it.
#[test]
fn the_token_that_ends_a_turn_is_reported() {
    let mut decoder = family("llama", config(), false);
    let (prompt, _) = fixture("llama");
    let biases = vec![TokenBias { token: END, bias: 100.0 }];
    let request = Request { biases, ..scored(&prompt) };
    let ran = run_plain(&mut decoder, &request, Script::new(|_| Vec::new()));
    assert_eq!((ran.reason, ran.logprobs.len()), (FinishReason::Stop, 1));
    assert_eq!(ran.logprobs[0].token.bytes, decoder.network.text().bytes(END));
}

#[test]
fn a_reply_of_no_tokens_reports_the_prompt() {
    let mut decoder = family("qwen3_5", config(), false);
    let (prompt, _) = fixture("qwen3_5");
    let request = Request { max_tokens: Some(0), ..scored(&prompt) };
    let ran = run_plain(&mut decoder, &request, Script::new(|_| Vec::new()));
    assert_eq!((ran.reply().len(), &ran.reason), (0, &FinishReason::Length));
    assert_eq!((ran.prompt_tokens.len(), ran.logprobs.len()), (prompt.len(), 0));
}

/// Each token once, whatever ran again.
#[test]
fn a_preempted_prompt_is_reported_once() {
    let decoder = &mut family("qwen3_5", config(), false);
    let (prompt, _) = fixture("qwen3_5");
    let (events, mut receiver) = mpsc::unbounded_channel();
    let prepared =
        decoder.policies.preparer().prepare(Job { request: scored(&prompt), events }).unwrap();
    decoder.start_request(prepared);
    (0..2).for_each(|_| decoder.step());
    let mut sequence = decoder.schedule.running_mut().pop().unwrap();
    assert!(sequence.reported() > 1 && sequence.reported() < prompt.len());
    decoder.drop_state(&mut sequence).unwrap();
    decoder.schedule.push_preempted(sequence);
    while !decoder.schedule.running().is_empty() || !decoder.schedule.preempted().is_empty() {
        decoder.step();
    }
    let mut bytes = Vec::new();
    while let Ok(event) = receiver.try_recv() {
        if let Event::PromptToken(token) = event {
            bytes.push(token.bytes);
        }
    }
    let expected: Vec<_> =
        prompt.iter().map(|&token| decoder.network.text().bytes(token)).collect();
    assert_eq!(bytes, expected);
}

#[test]
fn a_model_with_marks_fills_in_text() {
    let decoder = family("llama", Config::default(), false);
    let infill = |prefix: &str| RawPrompt::Infill { prefix: prefix.into(), suffix: "c".into() };
    let [before, after, between] = INFILL;
    let tokens = decoder.network.text().raw_prompt(&infill("ab")).unwrap();
    assert_eq!(tokens, [before, 97, 98, after, 99, between]);
    // The client's text spells no special tokens.
    let tokens = decoder.network.text().raw_prompt(&infill("<|fim_middle|>")).unwrap();
    assert_eq!(tokens.iter().filter(|token| **token == between).count(), 1);
    let refused = super::decoder().network.text().raw_prompt(&infill("ab"));
    let field = match refused {
        Err(Error::Request(RequestError::Field { field, .. })) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field, "suffix");
}
