//! Speculation: however a reply is drafted, rejected and rewound, it is the plain one.

use std::path::PathBuf;

use steersman_engine::config::{Config, DraftKind};
use steersman_engine::decode::Decoder;
use steersman_engine::decode::verify::{Outcome, Way};
use steersman_engine::request::{Message, Request};
use steersman_tests::{bundled_model, config, fixture};

/// Of each of the four kinds of prompts, the first few.
fn requests(of_each: usize) -> Vec<Request> {
    let prompts = fixture("speculation.json");
    let prompts = prompts.as_array().unwrap().iter().take(4 * of_each);
    let request = |prompt: &serde_json::Value| Request {
        id: prompt["kind"].as_str().unwrap().into(),
        profile: "default".into(),
        messages: serde_json::from_value::<Vec<Message>>(prompt["messages"].clone()).unwrap(),
        thinking: prompt["thinking"].as_bool(),
        ..Request::default()
    };
    prompts.map(request).collect()
}

fn decoder(config: Config) -> Decoder {
    let data = tempfile::tempdir().unwrap();
    Decoder::load(config.check().unwrap(), &bundled_model(), data.path()).unwrap().0
}

fn assert_equal(decoder: &mut Decoder, requests: &[Request], tokens: usize) -> Vec<Outcome> {
    let ways = decoder.ways().unwrap();
    let outcomes = decoder.verify(requests, &ways, tokens, |done| eprintln!("{done}")).unwrap();
    let plain = outcomes[0].clone();
    for outcome in &outcomes {
        let [drafted, accepted, passes] = outcome.drafted;
        println!(
            "{}: {} of {} equal, {} tokens, {passes} passes, {:.2} tokens a pass, acceptance {:.3}, gain {:.2}, cached {}, different {:?}",
            outcome.way.name(),
            outcome.equal,
            requests.len(),
            outcome.tokens.iter().sum::<usize>(),
            1.0 + accepted as f64 / passes.max(1) as f64,
            accepted as f64 / drafted.max(1) as f64,
            outcome.gain(&plain),
            outcome.cached,
            outcome.different,
        );
    }
    outcomes
}

#[test]
fn drafted_replies_equal_plain_ones() {
    let mut config = config();
    config.speculation.draft_model = std::env::var("DRAFT_MODEL").unwrap_or_default();
    let mut decoder = decoder(config);
    let of_each = std::env::var("OF_EACH").map_or(2, |n| n.parse().unwrap());
    let tokens = std::env::var("TOKENS").map_or(64, |n| n.parse().unwrap());
    let outcomes = assert_equal(&mut decoder, &requests(of_each), tokens);
    for outcome in outcomes {
        assert!(outcome.holds(), "{outcome:?}");
    }
    let _ = (PathBuf::new(), DraftKind::Ngram, Way::Plain);
}
