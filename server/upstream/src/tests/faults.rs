//! Upstreams that fail.

use std::sync::Mutex as StdMutex;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};

use super::*;
use crate::{BreakerState, Report};

fn error(status: u16, text: &str) -> Reaction {
    whole(status, &json!({"error": {"message": text}}))
}

#[tokio::test]
async fn a_request_is_repeated_while_nothing_of_its_reply_has_come() {
    let broken = streamed(vec![Break]);
    let wrong = streamed(vec![Raw("data: {\"choices\": [\n\n")]);
    let early = streamed(vec![Say(json!({"error": {"message": "no room", "code": 503}}))]);
    for first in [error(500, "oops"), error(503, "busy"), broken, wrong, early] {
        let upstream = Scripted::start(vec![first, says("hello")]).await;
        let events = all(begin(&model(&upstream.url, |_| ()), ask("?"))).await;
        assert_eq!(texts(&events).1, "hello");
        assert_eq!(upstream.count(), 2);
        let started = events.iter().filter(|event| matches!(event, Event::Started { .. }));
        assert_eq!(started.count(), 1);
    }
}

#[tokio::test]
async fn a_request_that_the_upstream_refuses_is_not_repeated() {
    for status in [400, 404, 413, 422] {
        let upstream = Scripted::start(vec![error(status, "the prompt is too long")]).await;
        let events = all(begin(&model(&upstream.url, |_| ()), ask("?"))).await;
        assert_eq!(upstream.count(), 1);
        assert!(failure(&events).ends_with("refuses the request: the prompt is too long"));
        let Some(Event::Failed(steersman_request::Error::Request(error))) = events.last() else {
            panic!("{events:?}")
        };
        let refused = steersman_request::RequestError::UpstreamRefused {
            upstream: "work".into(),
            status,
            message: "the prompt is too long".into(),
        };
        assert_eq!(format!("{error:?}"), format!("{refused:?}"));
    }
}

#[tokio::test]
async fn a_reply_that_breaks_off_fails_and_is_not_begun_again() {
    let endings = [
        vec![Break],
        vec![],
        vec![Raw("data: {\"cho\n\n")],
        vec![Say(json!({"error": {"message": "out of memory"}}))],
        vec![Raw("data: [DONE]\n\n")],
    ];
    for ending in endings {
        // What comes together with the end of a connection may be lost with it.
        let mut acts = vec![delta(json!({"content": "half"})), Wait(Duration::from_secs(1))];
        acts.extend(ending);
        let upstream = Scripted::start(vec![streamed(acts), says("other")]).await;
        let events = all(begin(&model(&upstream.url, |_| ()), ask("?"))).await;
        assert_eq!(texts(&events).1, "half");
        assert!(failure(&events).starts_with("the upstream `work` "), "{}", failure(&events));
        assert_eq!(upstream.count(), 1);
    }
}

/// After a 500 with `Retry-After` all repetitions were sent at once.
#[tokio::test]
async fn the_pause_that_an_upstream_asks_for_is_kept() {
    for status in [429, 500, 503] {
        let busy = error(status, "slow down").with("retry-after-ms", "700");
        let upstream = Scripted::start(vec![busy, says("hello")]).await;
        let model = model(&upstream.url, |_| ());
        let before = std::time::Instant::now();
        let events = all(begin(&model, ask("?"))).await;
        assert_eq!(texts(&events).1, "hello");
        assert!(before.elapsed() >= Duration::from_millis(700));
    }
}

/// The first event was a note on what was left out of the request, and no fallback was asked.
#[tokio::test]
async fn a_request_that_fails_before_its_reply_has_no_event_but_its_failure() {
    let thought = Message {
        role: "assistant".into(),
        content: "Rome.".into(),
        reasoning_content: Some("Italy.".into()),
        ..Message::default()
    };
    let mut request = ask("?");
    request.messages.extend([thought, ask("Sure?").messages.remove(0)]);
    let upstream = Scripted::start(vec![error(500, "oops"), says("Yes.")]).await;
    let model = model(&upstream.url, |config| config.retries = 0);
    let events = all(begin(&model, request.clone())).await;
    assert!(matches!(&events[..], [Event::Failed(_)]), "{events:?}");
    let events = all(begin(&model, request)).await;
    assert!(matches!(events[0], Event::Started { .. }), "{events:?}");
    let about = |note: &str| note.starts_with("left out the reasoning of earlier messages");
    assert!(events.iter().any(|event| matches!(event, Event::Note { note, .. } if about(note))));
    assert!(finished(&events).notes.iter().any(|note| about(note)));
}

#[tokio::test]
async fn a_long_pause_is_told_to_the_client_and_to_later_requests() {
    let busy = error(429, "slow down").with("retry-after", "100");
    let upstream = Scripted::start(vec![busy]).await;
    let model = model(&upstream.url, |_| ());
    for _ in 0..2 {
        let events = all(begin(&model, ask("?"))).await;
        let Some(Event::Failed(steersman_request::Error::Request(
            steersman_request::RequestError::Upstream { retry_after_s: Some(seconds), .. },
        ))) = events.last()
        else {
            panic!("{events:?}")
        };
        assert!((90..=100).contains(seconds), "{seconds}");
    }
    assert_eq!(upstream.count(), 1);
}

#[tokio::test]
async fn an_upstream_that_does_not_answer_is_not_waited_for() {
    let late = |acts: Vec<Act>| async move {
        let upstream = Scripted::start(vec![streamed(acts)]).await;
        let model = model(&upstream.url, |config| {
            (config.first_piece_timeout_s, config.piece_timeout_s) = (1, 1);
        });
        failure(&all(begin(&model, ask("?"))).await)
    };
    assert!(late(vec![Hang]).await.contains("no piece came within 1 s"));
    let pieces = vec![delta(json!({"content": "a"})), Raw(": ping\n\n"), Hang];
    assert!(late(pieces).await.contains("no piece came within 1 s"));
}

/// Pings, empty chunks and counts held a request for as long as they came.
#[tokio::test]
async fn events_without_text_are_not_waited_for_without_end() {
    let count = json!({"choices": [], "usage": {"prompt_tokens": 1}});
    let pause = Wait(Duration::from_millis(100));
    for quiet in [json!({"choices": []}), count] {
        let quiet: Vec<_> = (0..600).flat_map(|_| [Say(quiet.clone()), pause.clone()]).collect();
        let mut begun = vec![delta(json!({"content": "a"}))];
        begun.extend(quiet.clone());
        for acts in [quiet, begun] {
            let upstream = Scripted::start(vec![streamed(acts)]).await;
            let model = model(&upstream.url, |config| {
                (config.first_piece_timeout_s, config.piece_timeout_s) = (2, 1);
            });
            let said = failure(&all(begin(&model, ask("?"))).await);
            assert!(said.contains("no piece came within"), "{said}");
        }
    }
}

#[tokio::test]
async fn slow_pieces_within_their_time_are_waited_for() {
    let mut acts = Vec::new();
    for letter in ["a", "b", "c"] {
        acts.extend([delta(json!({"content": letter})), Wait(Duration::from_millis(400))]);
    }
    acts.extend(end("stop", 1, 3));
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let model = model(&upstream.url, |config| config.piece_timeout_s = 60);
    assert_eq!(texts(&all(begin(&model, ask("?"))).await).1, "abc");
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_request_at_the_upstream() {
    let acts = vec![delta(json!({"content": "a"})), Hang];
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let mut events = begin(&model(&upstream.url, |_| ()), ask("?"));
    while !matches!(events.recv().await, Some(Event::Answer(_))) {}
    drop(events);
    tokio::time::timeout(Duration::from_secs(60), upstream.closed()).await.unwrap();
}

/// The choices of one body took all requests that the upstream may run, whatever the limit of their profile.
#[tokio::test]
async fn requests_of_a_profile_wait_for_its_others() {
    let acts = vec![delta(json!({"content": "a"})), Hang];
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let model = model(&upstream.url, |_| ());
    let request = Request { running_limit: 1, ..ask("?") };
    let mut first = begin(&model, request.clone());
    while !matches!(first.recv().await, Some(Event::Answer(_))) {}
    let mut second = begin(&model, request);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(upstream.count(), 1);
    drop(first);
    while !matches!(second.recv().await, Some(Event::Answer(_))) {}
    assert_eq!(upstream.count(), 2);
}

/// What the upstream reports when it has counted tokens.
async fn counted(model: &UpstreamModel) -> Report {
    let counted = async {
        loop {
            let report = model.upstream().report();
            if report.tokens_today > 0 {
                return report;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), counted).await.expect("no tokens were counted")
}

/// Who left before the end of each reply used no tokens of the day.
#[tokio::test]
async fn the_tokens_of_a_reply_whose_client_leaves_are_counted() {
    let acts = vec![delta(json!({"content": "one two three four"})), Hang];
    let upstream = Scripted::start(vec![streamed(acts)]).await;
    let model = model(&upstream.url, |_| ());
    let mut events = begin(&model, ask("What comes then?"));
    while !matches!(events.recv().await, Some(Event::Answer(_))) {}
    drop(events);
    let report = counted(&model).await;
    // The last piece is not complete, and four bytes of the prompt are a token.
    assert_eq!(report.used[0].1.estimated_tokens, 3);
    assert_eq!(report.tokens_today, 3 + ask("What comes then?").text_bytes() as u64 / 4);
}

#[tokio::test]
async fn the_tokens_of_a_reply_that_its_deadline_ends_are_counted() {
    // A busy machine may need longer for the first piece.
    for seconds in [1, 4, 16, 64] {
        let acts = vec![delta(json!({"content": "one two three four"})), Hang];
        let upstream = Scripted::start(vec![streamed(acts)]).await;
        let model = model(&upstream.url, |_| ());
        let deadline = Some(std::time::Instant::now() + Duration::from_secs(seconds));
        let events = all(begin(&model, Request { deadline, ..ask("?") })).await;
        assert!(matches!(events.last(), Some(Event::Failed(_))), "{events:?}");
        if !texts(&events).1.is_empty() {
            assert_eq!(counted(&model).await.used[0].1.estimated_tokens, 3);
            return;
        }
    }
    panic!("nothing came in time");
}

#[tokio::test]
async fn an_upstream_that_keeps_failing_is_not_asked() {
    let upstream = Scripted::start(vec![error(500, "oops")]).await;
    let model = model(&upstream.url, |config| config.retries = 0);
    for _ in 0..8 {
        all(begin(&model, ask("?"))).await;
    }
    assert_eq!(upstream.count(), 5);
    assert_eq!(model.upstream().report().breaker, BreakerState::Open);
    assert!(failure(&all(begin(&model, ask("?"))).await).contains("has failed several times"));
}

#[tokio::test]
async fn nobody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let model = model(&url, |config| config.retries = 0);
    assert!(failure(&all(begin(&model, ask("?"))).await).contains("cannot be reached"));
    assert!(model.upstream().ask().await.unwrap_err().contains("cannot be reached"));
}

/// Everything that is logged.
#[derive(Clone, Default)]
struct Logged(Arc<StdMutex<String>>);

impl Visit for Logged {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let mut text = self.0.lock().unwrap();
        *text += &format!("{field}={value:?}\n");
    }
}

impl Subscriber for Logged {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("steersman") || metadata.target().starts_with("hyper")
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        attributes.record(&mut self.clone());
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        values.record(&mut self.clone());
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Vendors quote the key that they refuse, and some quote it in other errors.
#[tokio::test]
async fn the_key_is_in_no_error_log_or_count() {
    let logged = Logged::default();
    let _guard = tracing::subscriber::set_default(logged.clone());
    let quoting = format!("Incorrect API key provided: {KEY}. And sk-upstream-01234****cdef.");
    let mut said = String::new();
    let mut reactions: Vec<Reaction> =
        [400, 401, 403, 404, 429, 500, 503, 529].map(|status| error(status, &quoting)).into();
    reactions.push(streamed(vec![Say(json!({"error": {"message": quoting}}))]));
    let begun = delta(json!({"content": "a"}));
    reactions.push(streamed(vec![begun, Say(json!({"error": {"message": quoting}}))]));
    for reaction in reactions {
        let upstream = Scripted::start(vec![reaction]).await;
        let model = model(&upstream.url, |config| config.retries = 1);
        let events = all(begin(&model, ask("?"))).await;
        assert!(matches!(events.last(), Some(Event::Failed(_))));
        said += &format!("{events:?}\n{}\n{:?}\n", failure(&events), model.upstream().report());
        said += &format!("{:?}", model.upstream().config());
    }
    said += &logged.0.lock().unwrap();
    assert!(said.contains("repeating the request"), "{said}");
    for part in [KEY, "sk-upstream", "0123456", "abcdef"] {
        assert!(!said.contains(part), "{part} is in {said}");
    }
}
