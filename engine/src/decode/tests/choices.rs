//! Several choices of a request cost one prefill, and equal the requests with their seeds.

use super::scripted::*;
use crate::config::Config;
use crate::decode::Decoder;
use crate::error::{Error, RequestError};
use crate::policy::SamplingPatch;
use crate::request::{Event, Penalties, Request, Usage};

/// A sampled request, whose prompt has some hundred tokens.
fn question(max_tokens: u32) -> Request {
    let text = "The bells of the village can be heard at the river, and far behind it. ".repeat(4);
    let sampling = SamplingPatch { temperature: Some(1.0), ..SamplingPatch::default() };
    Request { sampling, ..ask(&text, false, max_tokens) }
}

/// The choices of `request`, with the seeds that follow its own.
fn choices(request: &Request, count: u64) -> Vec<Request> {
    let seed = |choice| request.seed.map(|seed| seed + choice);
    (0..count).map(|choice| Request { seed: seed(choice), ..request.clone() }).collect()
}

fn replies(decoder: &mut Decoder, requests: Vec<Request>) -> Vec<(String, Usage)> {
    let events = start_together(decoder, requests);
    finish(decoder);
    events.into_iter().map(reply).collect()
}

/// A decoder with nothing saved.
fn decoder(name: &str, max_running: usize) -> Decoder {
    let mut config = Config::default();
    (config.engine.prefill_chunk, config.engine.max_running) = (64, max_running);
    config.store.memory_bytes = 0;
    let mut decoder = family(name, config, false);
    // The choices share the KV of the prompt.
    decoder.saved.prefixes_mut().share_from(Some(1));
    decoder
}

/// The last token of a reply does not run, so replies of one token run the prompt only.
#[test]
fn eight_choices_cost_one_prefill() {
    for name in ["llama", "gemma3", "qwen3_next", "qwen3_5"] {
        let decoder = &mut decoder(name, 8);
        let replies = replies(decoder, choices(&question(1), 8));
        let prompt = replies[0].1.prompt_tokens;
        assert!(prompt > 200);
        assert_eq!(decoder.activity.report().rows, u64::from(prompt), "{name}");
        for (choice, (_, usage)) in replies.iter().enumerate() {
            let cached = if choice == 0 { 0 } else { prompt };
            assert_eq!((usage.prompt_tokens, usage.cached_tokens), (prompt, cached), "{name}");
        }
    }
}

#[test]
fn each_choice_equals_the_reply_to_a_request_with_its_seed() {
    for name in ["llama", "gemma3", "qwen3_next", "qwen3_5"] {
        let decoder = &mut decoder(name, 8);
        let late = Request {
            penalties: Penalties { presence: 1.0, ..Penalties::default() },
            logprobs: Some(2),
            ..question(12)
        };
        for request in [question(12), late] {
            let requests = choices(&request, 8);
            let alone: Vec<String> = requests
                .iter()
                .map(|request| replies(decoder, vec![request.clone()]).remove(0).0)
                .collect();
            let together = replies(decoder, requests);
            let together: Vec<String> = together.into_iter().map(|(answer, _)| answer).collect();
            assert_eq!(together, alone, "{name}");
            assert_ne!(alone[0], alone[1], "{name}: the seeds differ");
        }
    }
}

/// Choices without room keep their first token and resume from the state after the prompt.
#[test]
fn choices_without_room_wait_and_equal_those_that_run_at_once() {
    for name in ["llama", "qwen3_next"] {
        let answers = |decoder: &mut Decoder| -> Vec<String> {
            let replies = replies(decoder, choices(&question(12), 8));
            replies.into_iter().map(|(answer, _)| answer).collect()
        };
        let at_once = answers(&mut decoder(name, 8));
        let mut config = Config::default();
        (config.engine.prefill_chunk, config.engine.max_running) = (64, 3);
        config.store.min_tokens = 1;
        let few = &mut family(name, config, false);
        let events = start_together(few, choices(&question(12), 8));
        while few.schedule.preempted().is_empty() {
            few.step();
        }
        // Some may have ended with their first token.
        assert_eq!(few.schedule.running().len(), 3);
        assert!((3..=5).contains(&few.schedule.preempted().len()), "{name}");
        let rows = few.activity.report().rows;
        finish(few);
        let waited: Vec<String> = events.into_iter().map(|events| reply(events).0).collect();
        assert_eq!(waited, at_once, "{name}");
        // No prompt ran again: at most a row for each token, and a few drafted ones.
        let more = few.activity.report().rows - rows;
        assert!(more < 8 * 12 * 3, "{name}: {more} rows");
    }
}

#[test]
fn cancelled_choices_are_dropped_before_the_next_step() {
    let decoder = &mut decoder("qwen3_next", 4);
    for steps in [1, 12] {
        let events = start_together(decoder, choices(&question(4000), 8));
        (0..steps).for_each(|_| decoder.step());
        assert_eq!(decoder.schedule.running().len(), if steps == 1 { 1 } else { 4 });
        drop(events);
        decoder.step();
        assert!(decoder.schedule.running().is_empty() && decoder.schedule.preempted().is_empty());
    }
    // One of them alone.
    let mut events = start_together(decoder, choices(&question(12), 3));
    drop(events.remove(1));
    finish(decoder);
    assert_eq!(events.into_iter().map(|events| reply(events).1.answer_tokens).max(), Some(12));
}

#[test]
fn a_failure_before_the_prompt_has_run_ends_every_choice() {
    let decoder = &mut decoder("qwen3_next", 8);
    let events = start_together(decoder, choices(&question(12), 3));
    decoder.step();
    let mut first = decoder.schedule.running_mut().pop().unwrap();
    let stage = first.stage();
    decoder.fail(&mut first, RequestError::Deadline { stage }.into());
    for mut events in events {
        let mut last = events.try_recv().unwrap();
        while let Ok(event) = events.try_recv() {
            last = event;
        }
        let is_late = matches!(last, Event::Failed(Error::Request(RequestError::Deadline { .. })));
        assert!(is_late, "{last:?}");
    }
}

/// The policies of each choice decide on their own: a prompt that they change is not shared.
#[test]
fn a_choice_with_another_prompt_starts_alone() {
    let decoder = &mut decoder("qwen3_next", 8);
    let mut request = question(12);
    request.messages.insert(0, message("system", "Be brief."));
    let quiet = || Script::new(|_| Vec::new());
    let other = Script { edits: vec![replace("brief", "kind")], ..quiet() };
    let (mut first, first_events) = prepare(decoder, request.clone(), quiet());
    let (second, second_events) = prepare(decoder, request.clone(), other);
    assert_ne!(first.prompt, second.prompt);
    first.others = vec![second];
    decoder.start_request(first);
    finish(decoder);
    let (_, usage) = reply(first_events);
    let (answer, other) = reply(second_events);
    assert_eq!(usage.prompt_tokens, other.prompt_tokens + 1);
    assert_eq!(other.answer_tokens, 12);
    request.messages[0] = message("system", "Be kind.");
    assert_eq!(replies(decoder, vec![request]).remove(0).0, answer);
}
