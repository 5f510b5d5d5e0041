//! Which prefixes of running sequences a request waits for, and when they are computed.

use tokio::sync::mpsc::{self, UnboundedReceiver};

use super::scripted::family;
use crate::config::Config;
use crate::decode::Decoder;
use crate::job::Job;
use crate::request::{Embedding, Event, RawPrompt, Request};
use crate::sequence::prepare::Prepared;

/// A request whose prompt has `common` tokens that all begin with, and `others` of its own.
fn request(common: usize, others: usize, of: u32) -> Request {
    let own = (0..others).map(|_| 100 + of);
    let tokens = (0..common as u32).map(|i| 3 + i % 90).chain(own).collect();
    let prompt = Some(RawPrompt::Tokens(tokens));
    Request { profile: "default".into(), prompt, max_tokens: Some(2), ..Request::default() }
}

fn prepare(decoder: &Decoder, request: Request) -> (Prepared, UnboundedReceiver<Event>) {
    let (events, receiver) = mpsc::unbounded_channel();
    (decoder.policies.preparer().prepare(Job { request, events }).unwrap(), receiver)
}

/// A decoder that runs a prompt of 1,000 common tokens and 500 others, of which it has computed `computed`.
fn decoder(name: &str, computed: usize) -> (Decoder, UnboundedReceiver<Event>) {
    let mut config = Config::default();
    config.engine.prefill_chunk = 64;
    let mut decoder = family(name, config, false);
    let (prepared, events) = prepare(&decoder, request(1000, 500, 1));
    decoder.start_request(prepared);
    while decoder.schedule.running()[0].timeline().position() < computed {
        decoder.step();
    }
    (decoder, events)
}

#[test]
fn a_request_waits_for_a_long_prefix_that_is_not_computed_yet() {
    for name in ["llama", "qwen3_5"] {
        let (mut decoder, _events) = decoder(name, 64);
        let awaited = |decoder: &Decoder, request: Request| {
            let (prepared, _events) = prepare(decoder, request);
            decoder
                .schedule
                .computing_prefix_of(&prepared, &decoder.saved)
                .map(|(_, tokens)| tokens)
        };
        assert_eq!(awaited(&decoder, request(1000, 20, 2)), Some(1000), "{name}");
        assert_eq!(awaited(&decoder, request(700, 20, 2)), Some(700), "{name}");
        // The last token runs again, for the logits after it.
        assert_eq!(awaited(&decoder, request(1000, 500, 1)), Some(1499), "{name}");
        assert_eq!(awaited(&decoder, request(511, 20, 2)), None, "{name}: short");
        let embedding = Some(Embedding::default());
        let whole = Request { embedding, max_tokens: Some(0), ..request(1000, 20, 2) };
        assert_eq!(awaited(&decoder, whole), None, "{name}: runs its whole prompt");
        // A save point of the sequence that is near will do.
        decoder.schedule.running_mut()[0].timeline_mut().add_save_point(950);
        assert_eq!(awaited(&decoder, request(1000, 20, 2)), Some(950), "{name}");
        decoder.schedule.running_mut()[0].timeline_mut().remove_save_point(950);
        // Its policy permits certain save points only.
        decoder.schedule.running_mut()[0].set_saves_anywhere(false);
        assert_eq!(awaited(&decoder, request(1000, 20, 2)), None, "{name}");
        decoder.schedule.running_mut()[0].set_saves_anywhere(true);
        while decoder.schedule.running()[0].timeline().position() < 1000 {
            // After the first regular save point of a hybrid, too little is left.
            let is_worth =
                name == "llama" || decoder.schedule.running()[0].timeline().position() < 512;
            let expected = is_worth.then_some(1000);
            assert_eq!(awaited(&decoder, request(1000, 20, 2)), expected, "{name}");
            decoder.step();
        }
        assert_eq!(awaited(&decoder, request(1000, 20, 2)), None, "{name}: computed");
    }
}

/// Others wait for 600 of its 1,500 tokens, so it is planned as a prompt of 600: before one of 900, and one of 500 comes
/// first.
#[test]
fn an_awaited_prefix_has_the_priority_of_its_own_length() {
    let (mut decoder, _events) = decoder("llama", 0);
    let add = |decoder: &mut Decoder, length: usize, of: u32| {
        let (prepared, events) = prepare(decoder, request(0, length, of));
        decoder.start_request(prepared);
        events
    };
    let _others = [add(&mut decoder, 900, 2), add(&mut decoder, 500, 3)];
    assert_eq!(
        decoder.schedule.plan_prefill(decoder.schedule.running(), decoder.costs.passes()),
        [0, 0, 64]
    );
    let (prepared, _waiting) = prepare(&decoder, request(600, 20, 4));
    decoder.schedule.await_prefix(prepared, 0, 600);
    assert_eq!(decoder.schedule.awaited_rows(&decoder.schedule.running()[0]), Some(600));
    assert_eq!(
        decoder.schedule.plan_prefill(decoder.schedule.running(), decoder.costs.passes()),
        [0, 0, 64]
    );
    decoder.schedule.running_mut().remove(2);
    assert_eq!(
        decoder.schedule.plan_prefill(decoder.schedule.running(), decoder.costs.passes()),
        [64, 0]
    );
    while decoder.schedule.running()[0].timeline().position() < 600 {
        decoder.step();
    }
    assert_eq!(
        (
            decoder.schedule.running()[0].timeline().position(),
            decoder.schedule.awaited_rows(&decoder.schedule.running()[0])
        ),
        (600, None)
    );
    assert_eq!(
        decoder.schedule.plan_prefill(decoder.schedule.running(), decoder.costs.passes()),
        [0, 64]
    );
}
