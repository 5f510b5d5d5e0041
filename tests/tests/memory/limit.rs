//! Requests that do not fit into memory wait, are preempted or are refused; saved state is evicted first.

use std::time::{Duration, Instant};

use mlx_rs::memory::active_memory;
use mlx_rs::ops::zeros;
use mlx_rs::transforms::eval;
use steersman_engine::policy::SamplingPatch;
use steersman_engine::request::{Event, Request};
use steersman_engine::{Error, RequestError};
use steersman_tests::{Running, ask, config, run};
use tokio::sync::mpsc::UnboundedReceiver;

use super::is_alone;

fn active() -> u64 {
    active_memory().unwrap() as u64
}

/// A request of `words` words.
fn long(words: usize) -> Request {
    let text = "fox river castle owl ".repeat(words / 4);
    Request { reasoning: Some(false), max_tokens: Some(4), ..ask(&text) }
}

#[test]
fn a_request_that_does_not_fit_is_refused_and_smaller_ones_are_served() {
    if !is_alone(
        module_path!(),
        "a_request_that_does_not_fit_is_refused_and_smaller_ones_are_served",
    ) {
        return;
    }
    let mut config = config();
    config.speculation.drafts.clear();
    let (weights, tokens_per_word) = {
        let engine = Running::without_store(config.clone());
        let tokens = run(&engine, long(200)).finished().usage.prompt_tokens;
        (active(), f64::from(tokens) / 200.0)
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
        let active = active();
        assert!(active <= limit, "{active} of {limit} bytes after {seed} requests");
    }
    let report = engine.info().prefixes.report();
    assert!(report.counts.evictions > 0, "{report:?}");
}

/// A long prompt and a long reply of its own.
fn story(i: u64, words: usize, max_tokens: u32) -> Request {
    let mut request = ask("Write a story about an owl named Hugo who lives near the castle.");
    request.messages[0].content.insert_str(0, &"fox river castle owl ".repeat(words / 4));
    Request {
        reasoning: Some(false),
        max_tokens: Some(max_tokens),
        sampling: SamplingPatch { temperature: Some(1.0), ..Default::default() },
        seed: Some(i),
        ..request
    }
}

/// The text of a reply; `look` is called while it is awaited.
fn text(mut events: UnboundedReceiver<Event>, mut look: impl FnMut()) -> String {
    let mut text = String::new();
    let start = Instant::now();
    loop {
        look();
        match events.try_recv() {
            Ok(Event::Answer(piece)) => text.push_str(&piece),
            Ok(Event::Finished(_)) => return text,
            Ok(Event::Started { .. }) => {}
            Ok(other) => panic!("{other:?}"),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
        assert!(start.elapsed() < Duration::from_secs(300), "no end after {text:?}");
    }
}

/// Before, an admission ignored what running requests would still take, and the steps of sequences were
/// checked one by one: together they took more than the limit, or most were refused.
#[test]
fn long_requests_that_do_not_fit_together_get_the_replies_of_each_alone() {
    if !is_alone(
        module_path!(),
        "long_requests_that_do_not_fit_together_get_the_replies_of_each_alone",
    ) {
        return;
    }
    let mut config = config();
    config.speculation.drafts.clear();
    config.store.memory_bytes = 4 << 20;
    config.engine.max_running = 8;
    // They share no prefix, which would be held once.
    let request = |i| {
        let mut request = story(i, 1200, 60);
        request.messages[0].content.insert_str(0, &format!("{i} "));
        request
    };
    let (alone, weights) = {
        let engine = Running::without_store(config.clone());
        let texts = |i| text(engine.submit(request(i)).unwrap(), || ());
        ((0..8).map(texts).collect::<Vec<_>>(), engine.info().activity.report().bytes.weights)
    };
    // Room for about five of them.
    let limit = active() + weights + (90 << 20);
    config.engine.memory_limit_bytes = limit;
    let engine = Running::without_store(config);
    let events: Vec<_> = (0..8).map(|i| engine.submit(request(i)).unwrap()).collect();
    let (mut most_bytes, mut most_running) = (0, 0);
    let mut look = || {
        most_bytes = most_bytes.max(active());
        most_running = most_running.max(engine.info().activity.report().running);
    };
    let together: Vec<_> = events.into_iter().map(|events| text(events, &mut look)).collect();
    assert_eq!(together, alone);
    assert!(most_bytes <= limit, "{most_bytes} of {limit} bytes");
    assert!((2..8).contains(&most_running), "{most_running} ran at the same time");
}

/// Another model, here the test, takes memory while requests run.
#[test]
fn requests_are_preempted_when_memory_gets_scarce_and_resume_later() {
    if !is_alone(module_path!(), "requests_are_preempted_when_memory_gets_scarce_and_resume_later")
    {
        return;
    }
    let mut config = config();
    config.store.memory_bytes = 0;
    config.engine.max_running = 4;
    let request = |i| story(i, 40, 300);
    let (alone, weights) = {
        let engine = Running::without_store(config.clone());
        let texts = |i| text(engine.submit(request(i)).unwrap(), || ());
        ((0..4).map(texts).collect::<Vec<_>>(), engine.info().activity.report().bytes.weights)
    };
    config.engine.memory_limit_bytes = active() + weights + (256 << 20);
    let engine = Running::without_store(config);
    let report = || engine.info().activity.report();
    let events: Vec<_> = (0..4).map(|i| engine.submit(request(i)).unwrap()).collect();
    while report().running < 4 || report().tokens < 40 {
        assert!(report().tokens < 400, "{:?}", report());
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut ballast = Vec::new();
    while report().preemptions < 2 {
        assert!(report().running + report().preempted > 2, "{:?}", report());
        let free = report().bytes.limit.saturating_sub(active());
        // In about twenty steps, while all of them run: smaller ones take until some have ended.
        let array = zeros::<u8>(&[i32::try_from(free / 6).unwrap().max(1 << 17)]).unwrap();
        eval([&array]).unwrap();
        ballast.push(array);
        // Until the engine has seen it.
        let passes = report().passes;
        while report().passes < passes + 2 && report().running > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // They may have resumed already, if another has ended or needs less than it did.
    assert!(report().running > 0, "{:?}", report());
    drop(ballast);
    let together: Vec<_> = events.into_iter().map(|events| text(events, || ())).collect();
    assert_eq!(together, alone);
}
