//! Bounds of profiles, on the bundled model.

use steersman_engine::config::{Profile, ProfileLimits};
use steersman_engine::error::Error;
use steersman_engine::request::{FinishReason, Request};
use steersman_tests::{Running, ask, config, run};

fn engine(limits: ProfileLimits, data: &std::path::Path) -> Running {
    let mut config = config();
    config.store.enabled = false;
    let profile = Profile { limits, ..Profile::default() };
    config.profiles.insert("bounded".into(), profile);
    Running::start(config, data)
}

fn bounded(question: &str, max_tokens: Option<u32>, thinking: bool) -> Request {
    Request { profile: "bounded".into(), max_tokens, thinking: Some(thinking), ..ask(question) }
}

#[test]
fn a_profile_bounds_prompt_thought_and_answer_and_says_where_it_cuts() {
    let data = tempfile::tempdir().unwrap();
    let limits =
        ProfileLimits { prompt_tokens: 60, think_budget: 7, max_tokens: 2, ..Default::default() };
    let engine = engine(limits, data.path());

    let reply = run(&engine, bounded(&"one more word ".repeat(40), None, false));
    let Err(Error::PromptTooLong { tokens, limit: 60, profile }) = &reply.end else {
        panic!("{reply:?}")
    };
    assert!(*tokens > 60 && profile == "bounded", "{reply:?}");

    for (max_tokens, cut) in [(None, false), (Some(4000), true)] {
        let reply = run(&engine, bounded("Write a story.", max_tokens, false));
        let finished = reply.finished();
        assert_eq!((&finished.reason, finished.usage.answer_tokens), (&FinishReason::Length, 2));
        let noted = finished.notes.iter().any(|note| note.contains("limit of 2"));
        assert_eq!(noted, cut, "{:?}", finished.notes);
    }

    let reply = run(&engine, bounded("Who is the tallest?", None, true));
    let usage = reply.finished().usage;
    // The hint is among the thought's tokens or the answer's; the marker ends the thought.
    assert!((7..16).contains(&usage.reasoning_tokens), "{usage:?}");
    assert!(reply.finished().notes.iter().any(|note| note.contains("budget")), "{reply:?}");

    let free = Request { profile: "default".into(), ..bounded("Write a story.", Some(9), false) };
    assert!(run(&engine, free).finished().usage.answer_tokens > 2, "the bounds are the profile's");
}
