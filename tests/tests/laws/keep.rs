//! Save points and retention in a policy's plan.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use steersman_engine::config::Profile;
use steersman_engine::policy::{OnFailure, PolicyConfig, RequestView, Retention, SavePoint};
use steersman_engine::report::PrefixReport;
use steersman_engine::request::Request;
use steersman_tests::guest::retaining;
use steersman_tests::{Reply, Running, ask, config, message, policies, run, session};

/// Names of the save points in the contract.
const SYSTEM: &str = "system";
const TURNS: &str = "turns";
const PROMPT: &str = "prompt";
const REPLY: &str = "reply";
const MB: u64 = 1 << 20;

/// A profile with a policy that plans only these save points.
fn profile(folder: &Path, name: &str, save_points: &[(&'static str, u32)]) -> Profile {
    let path = folder.join(format!("{name}.wasm"));
    std::fs::write(&path, retaining(save_points)).expect("a file in the folder");
    let policy = path.display().to_string();
    let mut profile = steersman_tests::profile(policy);
    profile.policy.on_failure = OnFailure::Closed;
    profile
}

/// An engine without a store, with such profiles by name.
fn start(
    folder: &Path,
    memory_bytes: u64,
    ahead: bool,
    save_points: &[(&str, &[(&'static str, u32)])],
) -> Running {
    let mut config = config();
    (config.store.enabled, config.store.ahead) = (false, ahead);
    config.store.memory_bytes = memory_bytes;
    config.speculation.drafts.clear();
    for (name, save_points) in save_points {
        config.profiles.insert((*name).into(), profile(folder, name, save_points));
    }
    Running::start(config, folder)
}

/// A question after a system text of some 300 tokens about `who`.
fn question(profile: &str, who: &str, about: &str) -> Request {
    let line = |i: usize| format!("{who} has counted {} bells in the village by the river.", i + 2);
    let system: Vec<String> = (0..16).map(line).collect();
    Request {
        profile: profile.into(),
        messages: vec![message("system", &system.join(" ")), message("user", about)],
        reasoning: Some(false),
        max_tokens: Some(8),
        ..ask(about)
    }
}

fn cached(reply: &Reply) -> u32 {
    reply.finished().usage.cached_tokens
}

fn report(engine: &Running) -> PrefixReport {
    engine.info().prefixes.report()
}

#[test]
fn plan_without_save_points_saves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let engine = start(folder.path(), 256 * MB, true, &[("none", &[])]);
    let asked = question("none", "Nora", "What is the capital of Italy?");
    for _ in 0..2 {
        assert_eq!(cached(&run(&engine, asked.clone())), 0);
        let report = report(&engine);
        assert_eq!((report.counts.saves, report.memory.bytes), (0, 0));
    }
    // Without the policy the same prompt is saved, for requests of all profiles.
    run(&engine, Request { profile: "default".into(), ..asked.clone() });
    assert!(cached(&run(&engine, asked)) > 200);
}

/// Nor where its prompt parts from one that another profile has saved.
#[test]
fn plan_without_save_points_saves_nothing_where_prompts_part() {
    let folder = tempfile::tempdir().unwrap();
    let engine = start(folder.path(), 256 * MB, false, &[("none", &[])]);
    let asked = |profile, end: &str| {
        let question = question(profile, "Nora", "?");
        let text = format!("{} {end}", question.messages[0].content);
        Request { messages: vec![message("user", &text)], ..question }
    };
    run(&engine, asked("default", "Which village is it?"));
    let cached_of = |profile, end| cached(&run(&engine, asked(profile, end)));
    assert!(cached_of("none", "How many bells are there?") < 20);
    assert!(cached_of("default", "And how many rivers?") < 20);
    // That one may save.
    assert!(cached_of("none", "Who has counted?") > 200);
}

/// Each save point alone: the next request resumes from there and from nowhere else, and the next
/// turn is prefetched only if the reply is saved.
#[test]
fn only_planned_save_points_are_saved() {
    let folder = tempfile::tempdir().unwrap();
    let save_points: [(&str, &[(&'static str, u32)]); 4] = [
        ("system", &[(SYSTEM, 0)]),
        ("turns", &[(TURNS, 0)]),
        ("prompt", &[(PROMPT, 0), (PROMPT, 9)]),
        ("reply", &[(REPLY, 0)]),
    ];
    let engine = start(folder.path(), 256 * MB, true, &save_points);
    let mut seen = Vec::new();
    for (name, who) in
        [("system", "Nora"), ("turns", "Hugo"), ("prompt", "Mira"), ("reply", "Otto")]
    {
        let mut asked = question(name, who, "What is the capital of Italy?");
        let early = "The bells of the village can be heard at the river, and far behind it. ";
        asked.messages.insert(1, message("user", &early.repeat(8)));
        asked.messages.insert(2, message("assistant", "So it is."));
        let counts = || report(&engine).counts;
        let before = counts().saves;
        let first = run(&engine, asked.clone());
        assert_eq!(cached(&first), 0, "{name}");
        let length = first.finished().usage.prompt_tokens;

        if name == "reply" {
            // The end of the reply, and the prefetched prefix.
            let started = Instant::now();
            while counts().saves < before + 2 {
                assert!(started.elapsed() < Duration::from_secs(60), "nothing is prefetched");
                sleep(Duration::from_millis(50));
            }
        } else {
            assert_eq!(counts().ahead_tokens, 0, "{name}");
        }
        let mut next = asked.clone();
        next.messages.push(message("assistant", &first.answer));
        next.messages.push(message("user", "What is the capital of Peru?"));
        let resumed_at = |request: &Request| cached(&run(&engine, request.clone()));
        let another = question(name, who, "What is the capital of Kenya?");
        let at = [resumed_at(&asked), resumed_at(&next), resumed_at(&another)];
        println!("{name}: {at:?} of {length}");
        seen.push((name, at, length));
    }
    let [system, turns, prompt, reply] = &seen[..] else { unreachable!() };
    assert!(system.1.iter().all(|&at| at == system.1[2] && at > 200), "{system:?}");
    assert!(system.1[0] < system.2 - 100, "{system:?}");
    // After the first answer, not after the last question.
    assert!(turns.1[0] > system.1[0] + 50 && turns.1[0] < turns.2 - 10, "{turns:?}");
    assert!(prompt.1[0] >= prompt.2 - 10 && prompt.1[0] < prompt.2, "{prompt:?}");
    assert_eq!(prompt.1[2], 0, "{prompt:?}");
    assert_eq!((reply.1[0], reply.1[2]), (0, 0), "{reply:?}");
    assert!(reply.1[1] >= reply.2, "{reply:?}");
}

/// Memory of one question with its system text retained for a minute, if there is room.
fn memory_of_one(folder: &Path, save_points: &[(&str, &[(&'static str, u32)])]) -> u64 {
    let alone = start(folder, 256 * MB, false, save_points);
    run(&alone, question("minute", "Nora", "What is the capital of Italy?"));
    report(&alone).memory.bytes
}

/// The other conversations exceed the memory.
#[test]
fn retained_system_text_outlives_other_conversations() {
    let folder = tempfile::tempdir().unwrap();
    let save_points: [(&str, &[(&'static str, u32)]); 2] =
        [("minute", &[(SYSTEM, 60)]), ("used", &[(SYSTEM, 0), (PROMPT, 0)])];
    let one = memory_of_one(folder.path(), &save_points);

    // The system text takes half of it.
    let memory_bytes = 2 * one;
    for (name, survives) in [("minute", true), ("used", false)] {
        let engine = start(folder.path(), memory_bytes, false, &save_points);
        run(&engine, question(name, "Nora", "What is the capital of Italy?"));
        for who in ["Hugo", "Mira", "Otto"] {
            run(&engine, question("used", who, "What is the capital of Kenya?"));
            let report = report(&engine);
            assert!(report.memory.bytes <= memory_bytes, "{report:?}");
        }
        assert!(report(&engine).counts.evictions > 0);
        let reply = run(&engine, question(name, "Nora", "What is the capital of Peru?"));
        assert_eq!(cached(&reply) > 200, survives, "{name}: {:?}", reply.finished().usage);
    }
}

/// The same with a byte less: the system text takes more than half, and is not retained.
#[test]
fn retention_takes_at_most_half_of_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let save_points: [(&str, &[(&'static str, u32)]); 1] = [("minute", &[(SYSTEM, 60)])];
    let one = memory_of_one(folder.path(), &save_points);

    let engine = start(folder.path(), 2 * one - 2, false, &save_points);
    for who in ["Nora", "Hugo", "Mira", "Otto"] {
        run(&engine, question("minute", who, "What is the capital of Italy?"));
    }
    let report = report(&engine);
    assert!(report.memory.bytes < 2 * one, "{report:?}");
    let reply = run(&engine, question("minute", "Nora", "What is the capital of Peru?"));
    assert_eq!(cached(&reply), 0);
}

/// Retention counts from the last request that resumes there.
#[test]
fn resuming_renews_retention() {
    let folder = tempfile::tempdir().unwrap();
    let save_points: [(&str, &[(&'static str, u32)]); 2] =
        [("minute", &[(SYSTEM, 60)]), ("used", &[(SYSTEM, 0), (PROMPT, 0)])];
    let memory_bytes = 3 * memory_of_one(folder.path(), &save_points);

    let engine = start(folder.path(), memory_bytes, false, &save_points);
    run(&engine, question("used", "Nora", "What is the capital of Italy?"));
    let resumed = run(&engine, question("minute", "Nora", "What is the capital of Kenya?"));
    assert!(cached(&resumed) > 200);
    for who in ["Hugo", "Mira", "Otto"] {
        run(&engine, question("used", who, "What is the capital of Kenya?"));
    }
    let reply = run(&engine, question("minute", "Nora", "What is the capital of Peru?"));
    assert!(cached(&reply) > 200, "{:?}", reply.finished().usage);
}

#[test]
fn sixteen_save_points_are_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let save_points = [vec![(REPLY, u32::MAX), (TURNS, 7)], vec![(SYSTEM, 0); 14]].concat();
    let profiles = [("default".to_string(), profile(folder.path(), "sixteen", &save_points))];
    let policies = policies(&PolicyConfig::default(), profiles).unwrap();
    let plan = session(&policies, "default").unwrap().ask(&RequestView::default()).unwrap();
    let planned = plan.retain.expect("a list");
    assert_eq!(planned.len(), 16);
    let expected = [(SavePoint::Reply, u32::MAX), (SavePoint::Turns, 7), (SavePoint::System, 0)];
    assert_eq!(planned[..3], expected.map(|(at, seconds)| Retention { at, seconds }));
}

/// The request ends with the policy's error.
#[test]
fn plan_with_too_many_save_points_is_a_policy_failure() {
    let folder = tempfile::tempdir().unwrap();
    let engine = start(folder.path(), 256 * MB, false, &[("many", &[(SYSTEM, 60); 17])]);
    let reply = run(&engine, question("many", "Nora", "What is the capital of Italy?"));
    let error = reply.end.unwrap_err().to_string();
    assert!(error.contains("answered with more than 16 entries in `retain`"), "{error}");
    assert_eq!(report(&engine).counts.saves, 0);
}
