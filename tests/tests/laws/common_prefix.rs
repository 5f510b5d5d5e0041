//! Requests that begin alike. Of those that arrive together, one computes what they have in common, and the others wait for
//! it; of those that arrive one after the other, the third resumes where they part.

use std::path::Path;
use std::time::{Duration, Instant};

use steersman_engine::internals::store::BLOCK_TOKENS;
use steersman_engine::request::{Event, Request};
use steersman_engine::{Error, RequestError};
use steersman_tests::{
    Random, Reply, Running, ask, bundled_model, config, message, read, run, tiny_model, words,
};
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
    let system = words(&mut Random(3), WORDS);
    let mut request = ask(&words(&mut Random(100 + i as u64), 5 + i));
    request.messages.insert(0, message("system", &system));
    Request { reasoning: None, ignores_end: true, max_tokens: Some(12), ..request }
}

/// A request that has started, and computes its prompt.
fn start(engine: &Running) -> UnboundedReceiver<Event> {
    let mut events = engine.submit(about(0)).unwrap();
    assert!(matches!(events.blocking_recv(), Some(Event::Started { .. })));
    events
}

/// Prompt tokens that the request did not compute.
fn cached(reply: &Reply) -> usize {
    reply.finished().usage.cached_tokens as usize
}

#[test]
fn the_prefix_of_requests_that_arrive_together_is_computed_once() {
    let (tiny, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(tiny.path());
    for folder in [bundled_model(), tiny.path().to_path_buf()] {
        let together = engine(&folder, data.path(), 1 << 30);
        let events: Vec<_> = (0..6).map(|i| together.submit(about(i)).unwrap()).collect();
        let replies: Vec<_> = events.into_iter().map(read).collect();
        drop(together);
        let computed = replies.iter().filter(|reply| cached(reply) < WORDS);
        assert_eq!(computed.count(), 1, "{replies:?}");
        // As each alone, which computes all.
        let alone = engine(&folder, data.path(), 0);
        for (i, reply) in replies.iter().enumerate() {
            let expected = run(&alone, about(i));
            assert_eq!(cached(&expected), 0);
            assert_eq!(reply.answer, expected.answer, "{folder:?} {i}");
        }
    }
}

#[test]
fn when_the_request_that_computes_the_prefix_is_cancelled_the_next_one_does() {
    let data = tempfile::tempdir().unwrap();
    let engine = engine(&bundled_model(), data.path(), 1 << 30);
    let first = start(&engine);
    let events: Vec<_> = (1..5).map(|i| engine.submit(about(i)).unwrap()).collect();
    let waits = || engine.info().activity.report().awaiting_prefix > 0;
    let start = Instant::now();
    while !waits() && start.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(first);
    let cached: Vec<_> = events.into_iter().map(|events| cached(&read(events))).collect();
    assert!(cached.iter().filter(|cached| **cached < WORDS).count() <= 1, "{cached:?}");
    let report = engine.info().activity.report();
    assert_eq!(report.awaiting_prefix, 0);
}

/// Text `i` after `count` words that all have in common, within one message.
fn after(count: usize, i: usize) -> Request {
    let common = words(&mut Random(7), count);
    let own = words(&mut Random(200 + i as u64), 20);
    Request { ignores_end: true, max_tokens: Some(8), ..ask(&format!("{common} {own}")) }
}

/// Least number of tokens that these prompts have in common: all but those of the generation prompt.
fn common_tokens(engine: &Running, count: usize) -> usize {
    let whole = run(engine, ask(&words(&mut Random(7), count)));
    whole.finished().usage.prompt_tokens as usize - 16
}

/// A hybrid resumed at the last multiple of 512 tokens before the place where prompts part within a message, however often
/// it had computed what follows: after 1,520 common tokens at 1,024.
#[test]
fn the_third_prompt_with_a_beginning_computes_none_of_it() {
    let data = tempfile::tempdir().unwrap();
    let (saving, alone) =
        (engine(&bundled_model(), data.path(), 1 << 30), engine(&bundled_model(), data.path(), 0));
    for count in [20, 240, 620] {
        let replies: Vec<_> = (0..4).map(|i| run(&saving, after(count, i))).collect();
        let cached: Vec<_> = replies.iter().map(cached).collect();
        let common = common_tokens(&alone, count);
        assert!(cached[1] < common && cached[1].is_multiple_of(512), "{cached:?} of {common}");
        assert!(cached[2] >= common && cached[3] >= common, "{cached:?} of {common}");
        // One that saves where it parts, and one that resumes there.
        for i in [1, 2] {
            assert_eq!(replies[i].answer, run(&alone, after(count, i)).answer, "{count} {i}");
        }
    }
}

/// The second prompt finds the first one's tokens on disk, in blocks.
#[test]
fn the_third_prompt_with_a_beginning_resumes_behind_it_after_restarts() {
    let data = tempfile::tempdir().unwrap();
    let start = || {
        let mut config = config();
        config.store.ahead = false;
        Running::try_start(config, &bundled_model(), data.path()).unwrap()
    };
    let cached: Vec<_> = (0..3).map(|i| cached(&run(&start(), after(620, i)))).collect();
    let common = common_tokens(&start(), 620);
    let block = BLOCK_TOKENS;
    assert!(cached[1] < common - block && cached[2] > common - block, "{cached:?} of {common}");
}

#[test]
fn requests_that_wait_for_a_prefix_end_at_their_deadline_and_when_the_engine_stops() {
    let data = tempfile::tempdir().unwrap();
    let engine = engine(&bundled_model(), data.path(), 1 << 30);
    let first = start(&engine);
    let deadline = Some(Instant::now() + Duration::from_millis(40));
    let end = run(&engine, Request { deadline, ..about(1) }).end;
    assert!(matches!(end, Err(Error::Request(RequestError::Deadline { .. }))), "{end:?}");
    let waiting = engine.submit(about(2)).unwrap();
    engine.stop();
    for events in [first, waiting] {
        let end = read(events).end;
        assert!(matches!(end, Err(Error::Stopped)), "{end:?}");
    }
}
