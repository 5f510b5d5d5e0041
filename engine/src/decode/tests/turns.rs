//! No request delays one of another profile by more than a turn, whatever it asks for.

use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use super::scripted::*;
use crate::config::{Config, Profile};
use crate::decode::Decoder;
use crate::policy::SamplingPatch;
use crate::request::{Choices, Embedding, Event, Form, RawPrompt, Request, ResponseFormat};

/// Sequences that run at once.
const SLOTS: usize = 4;

/// Profiles of small requests beside a large one.
const SMALL: [&str; 6] = ["small-0", "small-1", "small-2", "small-3", "small-4", "small-5"];

/// A decoder for the profiles `default`, `other`, `third` and [`SMALL`].
fn decoder(name: &str) -> Decoder {
    let mut config = Config::default();
    (config.engine.prefill_chunk, config.engine.max_running) = (64, SLOTS);
    config.store.min_tokens = 1;
    for profile in ["other", "third"].into_iter().chain(SMALL) {
        config.profiles.insert(profile.into(), Profile::default());
    }
    let mut decoder = family(name, config, false);
    // Accepted drafts would save steps.
    decoder.costs.forget_drafts();
    decoder
}

fn request(profile: &str, prompt: usize, max_tokens: u32) -> Request {
    let tokens = (0..prompt as u32).map(|i| 3 + (i + prompt as u32) % 90).collect();
    Request {
        profile: profile.into(),
        prompt: Some(RawPrompt::Tokens(tokens)),
        max_tokens: Some(max_tokens),
        ignores_end: true,
        sampling: SamplingPatch { temperature: Some(1.0), ..SamplingPatch::default() },
        seed: Some(7),
        ..Request::default()
    }
}

fn choices(request: Request, count: u64) -> Choices {
    let seed = |choice| request.seed.map(|seed| seed + choice);
    together((0..count).map(|choice| Request { seed: seed(choice), ..request.clone() }).collect())
}

fn text(tokens: usize) -> Choices {
    let embedding = Some(Embedding { dimensions: None, truncates: false });
    Request { embedding, ignores_end: false, ..request("default", tokens, 0) }.into()
}

/// Every kind of body that fans out. Embeddings and reranking are both texts.
fn large_bodies() -> [(&'static str, Vec<Choices>); 3] {
    [
        ("n", vec![choices(request("default", 150, 24), 16)]),
        ("prompts", (0..3).map(|i| choices(request("default", 90 + i, 16), 6)).collect()),
        ("texts", (0..24).map(|i| text(200 + i)).collect()),
    ]
}

/// Tokens of a reply that has ended, or the numbers of an embedding.
fn reply(events: &mut UnboundedReceiver<Event>) -> Option<(String, Vec<f32>)> {
    let (mut answer, mut numbers) = (String::new(), Vec::new());
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Answer(piece) | Event::Reasoning(piece) => answer += &piece,
            Event::Embedding(embedding) => numbers = embedding,
            Event::Finished(_) => return Some((answer, numbers)),
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    None
}

/// Steps with a pass until this request has ended, without those that a near-tie of any sequence runs alone.
fn steps(decoder: &mut Decoder, request: Request) -> usize {
    let request = Request { id: "small".into(), ..request };
    let mut events = decoder.schedule.queue().add(request).unwrap();
    let (mut steps, mut has_run) = (0, false);
    for _ in 0..2000 {
        let passes = decoder.activity.report().passes;
        let is_alone = decoder.schedule.running().iter().any(|s| s.timeline().runs_alone());
        turn(decoder);
        let has_run_pass = decoder.activity.report().passes > passes;
        steps += usize::from(has_run_pass && !is_alone);
        while let Ok(event) = events.try_recv() {
            assert!(!matches!(event, Event::Failed(_)), "{event:?}");
        }
        let runs = decoder.schedule.running().iter().any(|s| s.request().id == "small");
        has_run |= runs;
        if has_run
            && !runs
            && decoder.schedule.preempted().iter().all(|s| s.request().id != "small")
        {
            return steps;
        }
    }
    panic!("no end")
}

/// A3: one request took all places until it ended, up to an hour: chats with n = 32, completions of several
/// prompts, 256 texts of an embedding. A small request of another profile got nothing, as choices and texts waited
/// "like preempted sequences, before all requests of the queue". Steps are counted, not time. All of the large
/// request ends too, with the replies that it has alone.
#[test]
fn one_request_delays_another_profile_by_at_most_a_turn() {
    for name in ["llama", "qwen3_next"] {
        // Each small request has a profile of its own, so that it owes the streams nothing for the prompts of the others.
        let small = |i: usize| request(SMALL[i], 12, 4);
        let idle = steps(&mut decoder(name), small(0));
        for ((kind, body), (_, same)) in large_bodies().into_iter().zip(large_bodies()) {
            let alone = &mut decoder(name);
            let events = alone.schedule.queue().add_all(same).unwrap();
            finish(alone);
            let expected: Vec<_> = events.into_iter().map(|mut e| reply(&mut e)).collect();

            let decoder = &mut decoder(name);
            let events = decoder.schedule.queue().add_all(body).unwrap();
            (0..8).for_each(|_| turn(decoder));
            for i in 0..SMALL.len() {
                let taken = steps(decoder, small(i));
                assert!(taken <= idle + 1, "{name}, {kind}: small {i} took {taken}, alone {idle}");
            }
            finish(decoder);
            for (i, (mut events, expected)) in events.into_iter().zip(expected).enumerate() {
                let found = reply(&mut events);
                match (&found, &expected) {
                    (Some((a, x)), Some((b, y))) => {
                        assert_eq!(a, b, "{name}, {kind} {i}");
                        let is_close = x.iter().zip(y).all(|(x, y)| (x - y).abs() < 1e-5);
                        assert!(x.len() == y.len() && is_close, "{name}, {kind} {i}");
                    }
                    _ => panic!("{name}, {kind} {i}: no end"),
                }
            }
        }
    }
}

/// The masks of 32 choices were computed in each step, one after another: a form whose masks take a tenth of a second
/// made every step take three seconds for all. Here a step has time for one mask. Each choice in a form gets its own in
/// turn, a request without a form runs in every step, and the replies are those of a decoder with time for all.
#[test]
fn masks_of_one_request_delay_others_by_one_of_them() {
    for name in ["llama", "qwen3_next"] {
        let form = Form::Regex("([0-9]{9},){3}".into());
        let form = ResponseFormat { field: "response_format", form };
        let body = || {
            let format = Request { ignores_end: false, ..request("default", 12, 30) };
            vec![choices(Request { response_format: Some(form.clone()), ..format }, 3)]
        };
        let replies = |decoder: &mut Decoder| -> Vec<_> {
            decoder.speculation.set_forces_tokens(false);
            let events = decoder.schedule.queue().add_all(body()).unwrap();
            finish(decoder);
            events.into_iter().map(|mut events| reply(&mut events).unwrap().0).collect()
        };
        let expected = replies(&mut decoder(name));
        assert!(expected.iter().all(|text| text.len() == 30), "{expected:?}");

        let decoder = &mut decoder(name);
        decoder.masks.set_limit(Duration::ZERO);
        decoder.speculation.set_forces_tokens(false);
        // Of a profile of its own, so that `other` owes the streams nothing for this prompt.
        let idle = steps(decoder, request("third", 12, 4));
        let events = decoder.schedule.queue().add_all(body()).unwrap();
        (0..6).for_each(|_| turn(decoder));
        let length = |decoder: &Decoder, profile: &str| -> Vec<usize> {
            let own = decoder.schedule.running().iter().filter(|s| s.request().profile == profile);
            own.map(|sequence| sequence.reply().len()).collect()
        };
        let before = length(decoder, "default");
        let taken = steps(decoder, request("other", 12, 4));
        assert!(taken <= idle + 1, "{name}: {taken} steps, alone {idle}");
        let after = length(decoder, "default");
        let gained: Vec<_> =
            after.iter().zip(&before).map(|(after, before)| after - before).collect();
        // One of them each step, and no choice twice before the others.
        assert!(gained.iter().sum::<usize>() <= taken + 1, "{name}: {gained:?} in {taken} steps");
        assert!(
            gained.iter().max().unwrap() - gained.iter().min().unwrap() <= 1,
            "{name}: {gained:?}"
        );
        finish(decoder);
        let found: Vec<_> =
            events.into_iter().map(|mut events| reply(&mut events).unwrap().0).collect();
        assert_eq!(found, expected, "{name}");
    }
}

/// Slots are shared: of two profiles whose requests fan out each gets half, and a third one its part.
#[test]
fn profiles_share_the_slots() {
    let decoder = &mut decoder("llama");
    let running = |decoder: &Decoder, profile: &str| {
        decoder.schedule.running().iter().filter(|s| s.request().profile == profile).count()
    };
    let _first =
        decoder.schedule.queue().add_all(vec![choices(request("default", 20, 500), 32)]).unwrap();
    (0..4).for_each(|_| turn(decoder));
    assert_eq!(running(decoder, "default"), 4);
    let _second =
        decoder.schedule.queue().add_all(vec![choices(request("other", 20, 500), 32)]).unwrap();
    (0..8).for_each(|_| turn(decoder));
    assert_eq!((running(decoder, "default"), running(decoder, "other")), (2, 2));
    let _third = decoder.schedule.queue().add(request("third", 20, 500)).unwrap();
    (0..4).for_each(|_| turn(decoder));
    assert_eq!(running(decoder, "third"), 1);
    // Nobody is preempted for ever: what is equal stays.
    let preemptions = decoder.activity.report().preemptions;
    (0..20).for_each(|_| turn(decoder));
    assert_eq!(decoder.activity.report().preemptions, preemptions);
}

/// `limits.requests` counted bodies only: with a limit of 1, one request had 32 sequences. They run one after
/// another, and every one ends.
#[test]
fn the_limit_of_a_profile_counts_what_a_request_splits_into() {
    for (kind, mut body) in large_bodies() {
        for choices in &mut body {
            choices.request.running_limit = 2;
        }
        if kind == "n" {
            body[0].request.max_tokens = Some(5);
        }
        let decoder = &mut decoder("llama");
        let events = decoder.schedule.queue().add_all(body).unwrap();
        let mut most = 0;
        while !decoder.schedule.running().is_empty()
            || !decoder.schedule.preempted().is_empty()
            || decoder.schedule.queue().waiting() > 0
        {
            turn(decoder);
            most = most.max(decoder.schedule.running().len());
        }
        assert!((1..=2).contains(&most), "{kind}: {most}");
        assert!(events.into_iter().all(|mut events| reply(&mut events).is_some()), "{kind}");
    }
}

/// Within a profile the bodies take turns: a small request waits for one slot, and not for the rest of the choices
/// or texts.
#[test]
fn a_small_request_of_the_same_profile_comes_at_its_turn() {
    for (kind, body) in large_bodies() {
        let decoder = &mut decoder("llama");
        let _events = decoder.schedule.queue().add_all(body).unwrap();
        (0..8).for_each(|_| turn(decoder));
        let taken = steps(decoder, request("default", 12, 4));
        // Two turns of 24 steps, and its own steps; all of the large one takes 75 and more.
        assert!(taken <= 48 + 10, "{kind}: {taken}");
    }
}
