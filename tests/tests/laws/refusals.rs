//! Requests that cannot be served: each ends with an error of its own and delays no other.

use std::time::{Duration, Instant};

use steersman_engine::config::Config;
use steersman_engine::request::{Event, Request};
use steersman_engine::{Error, RequestError};
use steersman_tests::{Reply, Running, ask, config, run};
use tokio::sync::mpsc::UnboundedReceiver;

/// An engine that tokenizes up to `prompt_bytes`.
fn engine(prompt_bytes: usize) -> Running {
    with(|config| config.engine.prompt_bytes = prompt_bytes)
}

fn with(change: impl FnOnce(&mut Config)) -> Running {
    let mut config = config();
    change(&mut config);
    config.speculation.drafts.clear();
    Running::without_store(config)
}

fn short() -> Request {
    Request { reasoning: Some(false), max_tokens: Some(8), ..ask("What is the capital of Italy?") }
}

/// A request that is decoded for a long time.
fn endless() -> Request {
    let story = "Write a story about a fox named Nora who lives near the river.";
    Request { reasoning: Some(false), max_tokens: Some(4000), ..ask(story) }
}

fn refusal(reply: &Reply) -> &RequestError {
    match reply.end.as_ref().unwrap_err() {
        Error::Request(error) => error,
        error => panic!("{error}"),
    }
}

/// Waits for the next event that is not a piece of the reply.
fn next(events: &mut UnboundedReceiver<Event>) -> Event {
    loop {
        match events.blocking_recv().expect("the last event is Finished or Failed") {
            Event::Reasoning(_) | Event::Answer(_) => {}
            event => return event,
        }
    }
}

/// 10.1 MB of spaces exceed the match limit of the tokenizer's regular expressions, which panics. That
/// ended the engine thread, and the server answered 503 from then on.
#[test]
fn a_prompt_that_panics_the_tokenizer_costs_one_request() {
    let engine = engine(64 << 20);
    let reply = run(&engine, ask(&" ".repeat(10_100_000)));
    assert!(matches!(reply.end, Err(Error::Panic { stage: "being prepared", .. })), "{reply:?}");
    run(&engine, short()).finished();
}

#[test]
fn text_beyond_the_limit_is_refused_before_it_is_tokenized() {
    let engine = engine(0);
    let limit = engine.info().prompt_bytes;
    assert_eq!(limit, 16 * engine.info().context);
    let error = engine.submit(ask(&"a".repeat(limit))).unwrap_err();
    let words = format!("the request has {} bytes of text, the limit is {limit}", limit + 12);
    assert!(error.to_string().contains(&words), "{error}");
    assert!(error.to_string().contains("engine.prompt_bytes"), "{error}");
    // The template adds text too.
    let reply = run(&engine, ask(&"a".repeat(limit - 20)));
    assert!(matches!(refusal(&reply), RequestError::PromptBytes { bytes, .. } if *bytes > limit));
}

/// Rendering and tokenizing ran on the engine thread: a prompt of 15 MB stopped all requests for half a
/// minute, even after its client had disconnected.
#[test]
fn a_long_preparation_delays_no_other_request() {
    let engine = engine(64 << 20);
    let long = || ask(&"The quiet fox walked near the river. ".repeat(250_000));
    let mut events = engine.submit(long()).unwrap();
    run(&engine, short()).finished();
    assert!(events.try_recv().is_err(), "the long prompt was prepared first");
    assert_eq!(engine.waiting(), 1);
    // The place is free at once, although its thread is busy.
    drop(engine.submit(long()).unwrap());
    assert_eq!(engine.waiting(), 1);
    match next(&mut events) {
        Event::Failed(Error::Request(RequestError::ContextTooLong { .. })) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(engine.waiting(), 0);
}

#[test]
fn a_request_that_waits_too_long_ends_while_another_one_runs() {
    let engine = with(|config| config.engine.max_running = 1);
    let mut running = engine.submit(endless()).unwrap();
    assert!(matches!(next(&mut running), Event::Started { .. }));
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let reply = run(&engine, Request { deadline, ..short() });
    assert!(matches!(refusal(&reply), RequestError::Deadline { stage: "waiting" }), "{reply:?}");
    assert_eq!(engine.waiting(), 0);
    assert!(!running.is_closed());
}

/// Replies that were cut off at the end of the server ended without any.
#[test]
fn a_stopped_engine_ends_every_request_with_an_error() {
    let engine = engine(0);
    let mut running = engine.submit(endless()).unwrap();
    assert!(matches!(next(&mut running), Event::Started { .. }));
    let mut waiting = engine.submit(short()).unwrap();
    engine.stop();
    for events in [&mut running, &mut waiting] {
        assert!(matches!(next(events), Event::Failed(Error::Stopped)));
    }
    assert!(matches!(engine.submit(short()), Err(Error::Stopped)));
}
