//! Requests that do not fit into memory are refused; saved state is evicted for those that do.
//!
//! One test: MLX counts the arrays of the whole process.

use mlx_rs::memory::active_memory;
use steersman_engine::request::Request;
use steersman_engine::{Error, RequestError};
use steersman_tests::{Running, ask, config, run};

/// A request of `words` words.
fn long(words: usize) -> Request {
    let text = "fox river castle owl ".repeat(words / 4);
    Request { reasoning: Some(false), max_tokens: Some(4), ..ask(&text) }
}

#[test]
fn a_request_that_does_not_fit_is_refused_and_smaller_ones_are_served() {
    let mut config = config();
    config.speculation.drafts.clear();
    let (weights, tokens_per_word) = {
        let engine = Running::without_store(config.clone());
        let tokens = run(&engine, long(200)).finished().usage.prompt_tokens;
        (active_memory().unwrap() as u64, f64::from(tokens) / 200.0)
    };
    // Less than the weights: not even loaded.
    config.engine.memory_limit_bytes = weights / 4;
    let folder = tempfile::tempdir().unwrap();
    let error =
        Running::try_start(config.clone(), &steersman_tests::bundled_model(), folder.path());
    let error = error.err().expect("the engine does not start").to_string();
    assert!(error.contains("engine.memory_limit_bytes"), "{error}");

    // KV of 30,000 tokens has 60 MB.
    let limit = weights + (48 << 20);
    let most_words = (30_000.0 / tokens_per_word) as usize;
    config.engine.memory_limit_bytes = limit;
    let engine = Running::without_store(config);
    for round in 0..2 {
        let reply = run(&engine, long(most_words));
        match reply.end {
            Err(Error::Request(RequestError::Memory { needed, available, limit: of })) => {
                assert!(needed > available && available < limit && of == limit, "round {round}");
            }
            other => panic!("round {round}: {other:?}"),
        }
        run(&engine, long(200)).finished();
    }
    // Each leaves its state; together they are more than the limit allows.
    for seed in 0..40 {
        let request = long(200);
        let mut messages = request.messages.clone();
        messages[0].content.insert_str(0, &format!("{seed} "));
        run(&engine, Request { messages, ..request }).finished();
        let active = active_memory().unwrap() as u64;
        assert!(active <= limit, "{active} of {limit} bytes after {seed} requests");
    }
    let report = engine.info().prefixes.report();
    assert!(report.counts.evictions > 0, "{report:?}");
}
