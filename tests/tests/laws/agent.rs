//! The policies `agent` and `rules` on the bundled model.

use steersman_engine::policy::Param;
use steersman_engine::request::{FinishReason, Request, Usage};
use steersman_tests::{Reply, Running, ask, ask_weather, config, message, run};

/// An engine without prefix store, with profiles for `agent`, `passthrough` and two rules.
fn engine() -> Running {
    let mut config = config();
    config.store.ahead = false;
    for policy in ["agent", "passthrough"] {
        let profile = steersman_tests::profile(policy);
        config.profiles.insert(policy.into(), profile);
    }
    for (profile, act) in [("repairs", "repair = 'Not Oslo. '"), ("stops", "stop = 'not Oslo'")] {
        let when = "tool_called = 'get_weather', arguments_contain = 'Oslo'";
        let rule = format!("[[rule]]\nwhen = {{ {when} }}\ntimes = 1\ndo = {{ {act} }}\n");
        let mut ruled = steersman_tests::profile("rules");
        ruled.policy.params.insert("rules".into(), Param::Text(rule));
        config.profiles.insert(profile.into(), ruled);
    }
    Running::without_store(config)
}

/// A request as agents send it: text that changes with every request precedes the system text.
fn clocked(profile: &str, time: &str, id: u32) -> Request {
    let rules = "There are seven bells in the forest. The quiet owl walked near it. ".repeat(20);
    let system = format!(
        "x-anthropic-billing-header: cc_version=2.1; cch={id}\nCurrent date and time: 2026-11-21 {time}\n{rules}"
    );
    let mut request = ask("What is the capital of Peru?");
    request.messages.insert(0, message("system", &system));
    Request { profile: profile.into(), reasoning: Some(false), ..request }
}

#[test]
fn agent_reuses_the_prefix_after_a_clock() {
    let engine = engine();
    let send = |profile, time, id| -> (Reply, Usage) {
        let reply = run(&engine, clocked(profile, time, id));
        let usage = reply.finished().usage;
        (reply, usage)
    };
    for (profile, reused) in [("passthrough", false), ("agent", true)] {
        let (_, first) = send(profile, "10:15:02", 1);
        assert_eq!(first.cached_tokens, 0, "{profile}");
        let (reply, second) = send(profile, "10:16:40", 2);
        let share = f64::from(second.cached_tokens) / f64::from(second.prompt_tokens);
        assert_eq!(share > 0.9, reused, "{profile}: {second:?}");
        let noted = reply.finished().notes.iter().any(|note| note.contains("replaced"));
        assert_eq!(noted, reused, "{:?}", reply.finished().notes);
    }
}

fn weather(profile: &str) -> Request {
    Request { profile: profile.into(), max_tokens: Some(200), ..ask_weather() }
}

#[test]
fn a_rule_repairs_a_call_or_ends_the_request_before_the_client_receives_it() {
    let engine = engine();
    let accepted = run(&engine, weather("agent"));
    assert_eq!(accepted.finished().reason, FinishReason::ToolCalls, "{accepted:?}");
    assert_eq!(accepted.tool_calls.len(), 1);
    let repaired = run(&engine, weather("repairs"));
    assert!(repaired.tool_calls.is_empty(), "{repaired:?}");
    assert!(repaired.answer.starts_with("Not Oslo. "), "{repaired:?}");
    let notes = &repaired.finished().notes;
    assert!(notes[0].starts_with("removed a call of `get_weather`"), "{notes:?}");
    let stopped = run(&engine, weather("stops"));
    assert!(stopped.tool_calls.is_empty() && stopped.answer.is_empty(), "{stopped:?}");
    assert_eq!(stopped.finished().reason, FinishReason::Policy("not Oslo".into()));
}
