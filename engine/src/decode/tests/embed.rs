//! Embeddings equal those that mlx-lm's hidden states give.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;

use super::scripted::*;
use crate::config::{Config, Pooling};
use crate::decode::Decoder;
use crate::error::{Error, RequestError};
use crate::job::Job;
use crate::request::{Embedding, Event, RawPrompt, Request};

const POOLINGS: [(&str, Pooling); 2] = [("last", Pooling::Last), ("mean", Pooling::Mean)];

fn json(path: &str) -> Value {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    serde_json::from_slice(&std::fs::read(Path::new(&folder).join(path)).unwrap()).unwrap()
}

fn prompt(name: &str) -> Vec<u32> {
    let facts = json(&format!("families/{name}/reference.json"));
    serde_json::from_value(facts["prompt_ids"].clone()).unwrap()
}

fn embed(prompt: &[u32], dimensions: Option<u32>) -> Request {
    Request {
        profile: "default".into(),
        prompt: Some(RawPrompt::Tokens(prompt.to_vec())),
        embedding: Some(Embedding { dimensions, truncates: false }),
        max_tokens: Some(0),
        ..Request::default()
    }
}

fn decoder(name: &str, pooling: Pooling) -> Decoder {
    let mut config = Config::default();
    (config.engine.prefill_chunk, config.engine.max_running) = (21, 4);
    (config.model.pooling, config.store.min_tokens) = (pooling, 1);
    family(name, config, false)
}

/// The embedding of a request that has ended.
fn embedding(mut events: UnboundedReceiver<Event>) -> Result<Vec<f32>, Error> {
    let mut found = Vec::new();
    while let Ok(event) = events.try_recv() {
        match event {
            Event::Embedding(embedding) => found.push(embedding),
            Event::Finished(finished) => {
                assert_eq!((found.len(), finished.usage.answer_tokens), (1, 0));
                return Ok(found.remove(0));
            }
            Event::Failed(error) => return Err(error),
            Event::Started { cached_tokens, .. } => assert_eq!(cached_tokens, 0),
            Event::Note { .. } => {}
            event => panic!("{event:?}"),
        }
    }
    panic!("no end")
}

fn close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-4, "{what}: {found} is not {expected}");
    }
}

#[test]
fn embeddings_equal_those_of_mlx_lm() {
    let reference = json("embeddings.json");
    for name in ["llama", "gemma3_text", "qwen3_next", "qwen3_5"] {
        for (pooling, value) in POOLINGS {
            let decoder = &mut decoder(name, value);
            let expected: Vec<f32> =
                serde_json::from_value(reference[name][pooling].clone()).unwrap();
            // Nothing is saved that the second could resume from.
            for _ in 0..2 {
                let events = start_texts(decoder, vec![embed(&prompt(name), None)]);
                finish(decoder);
                let found = embedding(events.into_iter().next().unwrap()).unwrap();
                close(&found, &expected, &format!("{name} {pooling}"));
            }
            assert_eq!(decoder.saved.prefixes().bytes(), 0);
        }
    }
}

/// More texts than run at once, equal ones among them.
#[test]
fn texts_of_one_body_equal_texts_alone() {
    for (pooling, value) in POOLINGS {
        let decoder = &mut decoder("qwen3_5", value);
        let prompt = prompt("qwen3_5");
        let lengths = [70, 3, 70, 1, 44, 25, 60, 9, 33];
        let mut alone = Vec::new();
        for length in lengths {
            let events = start_texts(decoder, vec![embed(&prompt[..length], None)]);
            finish(decoder);
            alone.extend(events.into_iter().map(|events| embedding(events).unwrap()));
        }
        let requests = lengths.map(|length| embed(&prompt[..length], None));
        let events = start_texts(decoder, requests.to_vec());
        finish(decoder);
        for (events, alone) in events.into_iter().zip(&alone) {
            close(&embedding(events).unwrap(), alone, pooling);
        }
    }
}

#[test]
fn fewer_dimensions_are_the_first_ones_at_length_one() {
    let decoder = &mut decoder("llama", Pooling::Last);
    let mut run = |dimensions| {
        let events = start_texts(decoder, vec![embed(&prompt("llama"), dimensions)]);
        finish(decoder);
        embedding(events.into_iter().next().unwrap())
    };
    let all = run(None).unwrap();
    let length = all[..16].iter().map(|x| x * x).sum::<f32>().sqrt();
    let expected: Vec<f32> = all[..16].iter().map(|x| x / length).collect();
    close(&run(Some(16)).unwrap(), &expected, "16 dimensions");
    let refused = run(Some(65)).unwrap_err();
    let is_named =
        matches!(&refused, Error::Request(RequestError::Field { field: "dimensions", .. }));
    assert!(is_named, "{refused:?}");
}

#[test]
fn a_preempted_text_is_embedded_whole() {
    let reference = json("embeddings.json");
    for (pooling, value) in POOLINGS {
        let decoder = &mut decoder("qwen3_next", value);
        let events = start_texts(decoder, vec![embed(&prompt("qwen3_next"), None)]);
        (0..2).for_each(|_| decoder.step());
        let mut sequence = decoder.schedule.running_mut().pop().unwrap();
        decoder.drop_state(&mut sequence).unwrap();
        decoder.schedule.push_preempted(sequence);
        finish(decoder);
        let expected: Vec<f32> =
            serde_json::from_value(reference["qwen3_next"][pooling].clone()).unwrap();
        close(&embedding(events.into_iter().next().unwrap()).unwrap(), &expected, pooling);
    }
}

#[test]
fn a_client_that_hangs_up_ends_its_texts() {
    let decoder = &mut decoder("qwen3_5", Pooling::Mean);
    let prompt = prompt("qwen3_5");
    let events = start_texts(decoder, vec![embed(&prompt, None); 9]);
    decoder.step();
    drop(events);
    decoder.step();
    assert!(decoder.schedule.running().is_empty() && decoder.schedule.preempted().is_empty());
}

/// F25: Ollama's `truncate`.
#[test]
fn a_text_that_is_too_long_is_cut_if_the_client_allows_it() {
    let mut config = Config::default();
    config.engine.context = 41;
    let decoder = &mut family("llama", config, false);
    let prompt = prompt("llama");
    let mut run = |prompt: &[u32], truncates| {
        let mut request = embed(prompt, None);
        request.embedding = Some(Embedding { dimensions: None, truncates });
        let events = start_together(decoder, vec![request]);
        finish(decoder);
        embedding(events.into_iter().next().unwrap())
    };
    let expected = run(&prompt[..40], false).unwrap();
    close(&run(&prompt[..60], true).unwrap(), &expected, "cut");
    close(&run(&prompt[..40], true).unwrap(), &expected, "not cut");
    let prepare = |truncates| {
        let mut request = embed(&prompt[..60], None);
        request.embedding = Some(Embedding { dimensions: None, truncates });
        let (events, _receiver) = tokio::sync::mpsc::unbounded_channel();
        decoder.policies.preparer().prepare_choices(0, Job { request, events }, Vec::new())
    };
    assert_eq!(prepare(true).unwrap().notes, ["the text was cut: it has 60 tokens, 40 fit"]);
    let refused = prepare(false).err();
    let is_long = matches!(refused, Some(Error::Request(RequestError::ContextTooLong { .. })));
    assert!(is_long, "{refused:?}");
}
