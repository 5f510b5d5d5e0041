//! Preempted sequences resume without a lost or changed token, and those that nobody wants are dropped.

use tokio::sync::mpsc::{self, UnboundedReceiver};

use super::scripted::{self, family};
use super::{ask, bundled_model, load_from};
use crate::config::{Config, Device, DraftKind};
use crate::decode::Decoder;
use crate::job::Job;
use crate::measure::verify::{DecodePath, verify};
use crate::policy::SamplingPatch;
use crate::request::{Event, Request};

/// Starts a request; returns its events.
fn start(decoder: &mut Decoder, request: Request) -> UnboundedReceiver<Event> {
    let (events, receiver) = mpsc::unbounded_channel();
    let prepared = decoder.policies.preparer().prepare(Job { request, events }).unwrap();
    decoder.start_request(prepared);
    receiver
}

#[test]
fn a_preempted_request_equals_one_that_never_was() {
    let mut decoder = super::decoder();
    decoder.speculation.set_exit_layers(Some(5));
    let story = ask("Write a story about an owl named Hugo who lives near the castle.");
    let copy = ask("Copy this text exactly:\nThe quiet fox walked near the river at night.");
    let filtered =
        SamplingPatch { temperature: Some(0.8), top_p: Some(0.95), ..Default::default() };
    let warm = SamplingPatch { temperature: Some(1.0), ..Default::default() };
    let sampled = |sampling, seed| Request { sampling, seed: Some(seed), ..story.clone() };
    let requests = [copy, sampled(filtered, 3), sampled(warm, 5)];
    let kinds = [DraftKind::Ngram, DraftKind::Mtp, DraftKind::EarlyExit];
    let mut paths = vec![DecodePath::Plain, DecodePath::Preempted(None)];
    paths.extend(kinds.map(|kind| DecodePath::Preempted(Some(kind))));
    for outcome in verify(&mut decoder, &requests, &paths, super::TOKENS, |_| ()).unwrap() {
        assert!(outcome.holds(), "{outcome:?}");
        let DecodePath::Preempted(kind) = outcome.path else { continue };
        assert_eq!(outcome.drafted[0] > 0, kind.is_some(), "{outcome:?}");
    }
}

/// Every kind of cache: recurrent states, sliding windows, full attention.
#[test]
fn a_preempted_request_of_every_kind_of_cache_equals_one_that_never_was() {
    let paths = [
        DecodePath::Plain,
        DecodePath::Preempted(None),
        DecodePath::Preempted(Some(DraftKind::Ngram)),
        DecodePath::Batched(5, None),
        DecodePath::Batched(5, Some(DraftKind::Ngram)),
    ];
    for name in ["llama", "gemma3", "qwen3_next", "qwen3_5"] {
        let mut config = Config::default();
        config.engine.prefill_chunk = 16;
        let decoder = &mut family(name, config, false);
        let request = scripted::ask("Where is the river that runs by the castle?", false, 40);
        for outcome in verify(decoder, &[request], &paths, 40, |_| ()).unwrap() {
            assert!(outcome.holds(), "{name}: {outcome:?}");
        }
    }
}

/// The state of a preempted request is read back from the store: only its last token runs again.
#[test]
fn a_preempted_request_resumes_from_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.model.device = Device::Cpu;
    config.store.path = folder.path().join("state.redb");
    let mut decoder = load_from(&bundled_model(), config);
    let story = ask("Write a story about an owl named Hugo who lives near the castle.");
    let _events = start(&mut decoder, story);
    (0..12).for_each(|_| decoder.step());
    decoder.saved.prefixes_mut().clear_memory();
    let mut sequence = decoder.schedule.running_mut().pop().expect("the request runs");
    let tokens = sequence.timeline().len();
    decoder.drop_state(&mut sequence).unwrap();
    assert_eq!((sequence.timeline().position(), sequence.timeline().len()), (0, tokens + 1));
    decoder.restore_state(&mut sequence).unwrap();
    assert_eq!(sequence.timeline().position(), tokens);
}

/// 100 clients that hang up at the same time, some of whose requests wait for memory.
#[test]
fn requests_of_clients_that_hang_up_are_dropped_before_the_next_step() {
    let decoder = &mut family("qwen3_next", Config::default(), false);
    let request = scripted::ask("Where is the river that runs by the castle?", false, 40);
    let events: Vec<_> = (0..100).map(|_| start(decoder, request.clone())).collect();
    (0..3).for_each(|_| decoder.step());
    for mut sequence in decoder.schedule.running_mut().split_off(60) {
        decoder.drop_state(&mut sequence).unwrap();
        decoder.schedule.push_preempted(sequence);
    }
    let passes = decoder.activity.report().passes;
    drop(events);
    decoder.step();
    assert!(decoder.schedule.running().is_empty() && decoder.schedule.preempted().is_empty());
    let report = decoder.activity.report();
    assert_eq!((report.running, report.preempted, report.passes), (0, 0, passes));
}
