//! Requests that arrive together and begin alike: one computes what they have in common, and the others wait for it.

use std::path::Path;
use std::time::{Duration, Instant};

use steersman_engine::request::{Event, Request};
use steersman_engine::{Error, RequestError};
use steersman_tests::{Random, Running, ask, bundled_model, config, message, tiny_model};
use tokio::sync::mpsc::UnboundedReceiver;

/// Words of the common prefix. Each is at least one token.
const WORDS: usize = 700;

/// An engine with the model in `folder`, without a prefix store.
fn engine(folder: &Path, data: &Path, memory_bytes: u64) -> Running {
    let mut config = config();
    (config.store.enabled, config.store.ahead) = (false, false);
    config.store.memory_bytes = memory_bytes;
    Running::try_start(config, folder, data).unwrap()
}

/// Question `i` after a long text.
fn about(i: usize) -> Request {
    let mut random = Random(3);
    let mut words =
        |count| -> String { (0..count).map(|_| format!("w{} ", 1 + random.below(250))).collect() };
    let system = words(WORDS);
    (0..i).for_each(|_| drop(words(1)));
    let mut request = ask(&words(5 + i));
    request.messages.insert(0, message("system", &system));
    Request { reasoning: None, ignores_end: true, max_tokens: Some(12), ..request }
}

/// The answer, the number of cached tokens and how it ended.
fn read(events: &mut UnboundedReceiver<Event>) -> (String, u32, Result<(), Error>) {
    let (mut answer, mut cached) = (String::new(), 0);
    loop {
        match events.blocking_recv().expect("a request has an end") {
            Event::Started { cached_tokens, .. } => cached = cached_tokens,
            Event::Answer(text) => answer.push_str(&text),
            Event::Finished(_) => return (answer, cached, Ok(())),
            Event::Failed(error) => return (answer, cached, Err(error)),
            _ => {}
        }
    }
}

#[test]
fn the_prefix_of_requests_that_arrive_together_is_computed_once() {
    let (tiny, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(tiny.path());
    for folder in [bundled_model(), tiny.path().to_path_buf()] {
        let together = engine(&folder, data.path(), 1 << 30);
        let mut events: Vec<_> = (0..6).map(|i| together.submit(about(i)).unwrap()).collect();
        let replies: Vec<_> = events.iter_mut().map(read).collect();
        drop(together);
        let computed = replies.iter().filter(|(_, cached, _)| (*cached as usize) < WORDS);
        assert_eq!(computed.count(), 1, "{replies:?}");
        // As each alone, which computes all.
        let alone = engine(&folder, data.path(), 0);
        for (i, (answer, _, end)) in replies.into_iter().enumerate() {
            end.unwrap();
            let (expected, cached, _) = read(&mut alone.submit(about(i)).unwrap());
            assert_eq!((answer, cached), (expected, 0), "{folder:?} {i}");
        }
    }
}

#[test]
fn when_the_request_that_computes_the_prefix_is_cancelled_the_next_one_does() {
    let data = tempfile::tempdir().unwrap();
    let engine = engine(&bundled_model(), data.path(), 1 << 30);
    let mut first = engine.submit(about(0)).unwrap();
    assert!(matches!(first.blocking_recv(), Some(Event::Started { .. })));
    let mut events: Vec<_> = (1..5).map(|i| engine.submit(about(i)).unwrap()).collect();
    let waits = || engine.info().activity.report().awaiting_prefix > 0;
    let start = Instant::now();
    while !waits() && start.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(first);
    let mut cached = Vec::new();
    for events in &mut events {
        let (_, tokens, end) = read(events);
        end.unwrap();
        cached.push(tokens as usize);
    }
    assert!(cached.iter().filter(|cached| **cached < WORDS).count() <= 1, "{cached:?}");
    let report = engine.info().activity.report();
    assert_eq!(report.awaiting_prefix, 0);
}

#[test]
fn requests_that_wait_for_a_prefix_end_at_their_deadline_and_when_the_engine_stops() {
    let data = tempfile::tempdir().unwrap();
    let engine = engine(&bundled_model(), data.path(), 1 << 30);
    let mut first = engine.submit(about(0)).unwrap();
    assert!(matches!(first.blocking_recv(), Some(Event::Started { .. })));
    let deadline = Some(Instant::now() + Duration::from_millis(40));
    let mut late = engine.submit(Request { deadline, ..about(1) }).unwrap();
    let (_, _, end) = read(&mut late);
    assert!(matches!(end, Err(Error::Request(RequestError::Deadline { .. }))), "{end:?}");
    let mut waiting = engine.submit(about(2)).unwrap();
    engine.stop();
    for events in [&mut first, &mut waiting] {
        let (_, _, end) = read(events);
        assert!(matches!(end, Err(Error::Stopped)), "{end:?}");
    }
}
