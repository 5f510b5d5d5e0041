//! State: a resumed request equals an uninterrupted one, in the same process, after a restart, and
//! after a `kill -9`.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use steersman_engine::config::Profile;
use steersman_engine::request::Request;
use steersman_engine::text::Text;
use steersman_tests::{Reply, Running, ask, bundled_model, config, message, run};

fn start(data: &Path) -> Running {
    Running::start(config(), data)
}

/// A question behind a long system prompt, which is worth saving.
fn question(about: &str) -> Request {
    let animals = ["fox", "owl", "bear", "hare", "otter"];
    let places = ["forest", "river", "harbour", "village", "castle", "bridge", "garden"];
    let line = |i: usize| {
        let (animal, place) = (animals[i % animals.len()], places[i % places.len()]);
        format!(
            "There are {} bells in the {place}. The quiet {animal} walked near the {place}.",
            i + 2
        )
    };
    let system: Vec<String> = (0..30).map(line).collect();
    Request {
        messages: vec![message("system", &system.join(" ")), message("user", about)],
        reasoning: Some(true),
        ..ask(about)
    }
}

fn cached(reply: &Reply) -> u32 {
    reply.finished().usage.cached_tokens
}

fn assert_same(resumed: &Reply, whole: &Reply) {
    assert_eq!(resumed.reasoning, whole.reasoning);
    assert_eq!(resumed.answer, whole.answer);
    assert_eq!(resumed.finished().usage.answer_tokens, whole.finished().usage.answer_tokens);
}

/// Exact repeat, another question behind the same system prompt, and the next turn: each equals
/// what an engine says that has saved nothing.
#[test]
fn a_resumed_request_equals_an_uninterrupted_one() {
    let story = "Write a story about a fox named Nora who lives near the river.";
    let first = question(story);
    let other = question("What is the capital of Kenya?");
    let mut next = first.clone();

    let warm_data = tempfile::tempdir().unwrap();
    let warm = start(warm_data.path());
    let whole = run(&warm, first.clone());
    assert_eq!(cached(&whole), 0);
    next.messages.extend([
        message("assistant", &whole.answer),
        message("user", "What is the capital of Peru?"),
    ]);
    let repeat = run(&warm, first.clone());
    assert!(cached(&repeat) > repeat.finished().usage.prompt_tokens - 10, "{repeat:?}");
    assert_same(&repeat, &whole);

    for request in [other, next] {
        let resumed = run(&warm, request.clone());
        assert!(cached(&resumed) > 500, "{:?}", resumed.finished().usage);
        let cold_data = tempfile::tempdir().unwrap();
        let cold = start(cold_data.path());
        let whole = run(&cold, request);
        assert_eq!(cached(&whole), 0);
        assert_same(&resumed, &whole);
        drop(cold);
    }
    drop(warm);
}

/// Waits until the engine has nothing left to compute ahead.
fn wait_until_idle(engine: &Running) {
    let done = || engine.info().prefixes.report().counts.ahead_tokens;
    let mut before = u64::MAX;
    while before != done() {
        before = done();
        sleep(Duration::from_millis(400));
    }
}

/// Thoughts are not sent back, so what the client sends is not what was decoded: the engine computes
/// it while nobody asks, and each turn is left with its own words.
#[test]
fn the_fifth_turn_of_a_thinking_conversation_prefills_its_own_tokens_alone() {
    let data = tempfile::tempdir().unwrap();
    let engine = start(data.path());
    let text = Text::load(&bundled_model()).unwrap();
    let questions = ["Italy", "Kenya", "Peru", "Japan", "Norway"];
    let mut request = question("");
    request.messages.pop();
    for (turn, country) in questions.into_iter().enumerate() {
        let words = format!("What is the capital of {country}?");
        request.messages.push(message("user", &words));
        let reply = run(&engine, request.clone());
        let usage = reply.finished().usage;
        assert!(usage.reasoning_tokens > 0, "turn {turn} thinks: {usage:?}");
        let computed = usage.prompt_tokens - usage.cached_tokens;
        println!("turn {turn}: {} tokens, {computed} of them computed", usage.prompt_tokens);
        if turn > 0 {
            // `<|im_end|>`, a new line, `<|im_start|>assistant`, a new line, `<think>`, a new line.
            let own = text.encode(&words).unwrap().len() + 7;
            assert!(computed as usize <= own, "turn {turn} computes {computed} tokens, not {own}");
        }
        request.messages.push(message("assistant", &reply.answer));
        wait_until_idle(&engine);
    }
}

/// What a profile begins with is there before anyone asks.
#[test]
fn what_is_warm_is_computed_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.json");
    let asked = question("What is the capital of Italy?");
    let beginning = serde_json::json!({ "messages": [asked.messages[0]], "tools": [] });
    std::fs::write(&path, beginning.to_string()).unwrap();
    let with = |warm: &Path| {
        let mut config = config();
        let profile = Profile { warm: vec![warm.to_owned()], ..Profile::default() };
        config.profiles.insert("default".into(), profile);
        config
    };
    let engine = Running::start(with(&path), &folder.path().join("data"));
    wait_until_idle(&engine);
    let usage = run(&engine, asked).finished().usage;
    assert!(usage.prompt_tokens - usage.cached_tokens < 20, "{usage:?}");
    drop(engine);

    let missing = folder.path().join("none.json");
    let started = Running::try_start(with(&missing), &bundled_model(), folder.path());
    let Err(error) = started else { panic!("it started") };
    for words in ["profiles.default.warm", "none.json"] {
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn state_survives_a_restart() {
    let data = tempfile::tempdir().unwrap();
    let before = start(data.path());
    let whole = run(&before, question("What is the capital of Italy?"));
    drop(before);

    let after = start(data.path());
    let repeat = run(&after, question("What is the capital of Italy?"));
    assert!(cached(&repeat) > 500, "{:?}", repeat.finished().usage);
    assert_same(&repeat, &whole);
    drop(after);
}

/// Set in the child that [`a_server_killed_while_saving_goes_on_after_a_restart`] kills: the data
/// folder it serves from.
const CHILD: &str = "STEERSMAN_TEST_CHILD";

/// The child: answers one request after another, each with something new to save, until killed.
#[test]
#[ignore = "a child of the next test"]
fn child_that_saves_until_killed() {
    let Some(data) = std::env::var_os(CHILD) else { return };
    let engine = start(Path::new(&data));
    for turn in 0.. {
        run(&engine, question(&format!("What is the capital of Italy? {turn}")));
    }
}

fn spawn_child(data: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_saves_until_killed", "--ignored"])
        .env(CHILD, data)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Kills a server at moments spread over its saving. After each kill a new one on the same folder
/// answers the same, with reuse or a clean miss, and never with an error.
#[test]
fn a_server_killed_while_saving_goes_on_after_a_restart() {
    let cold_data = tempfile::tempdir().unwrap();
    let cold = start(cold_data.path());
    let whole = run(&cold, question("What is the capital of Italy?"));
    drop(cold);

    let data = tempfile::tempdir().unwrap();
    let mut reused = 0;
    for round in 0..8 {
        let mut child = spawn_child(data.path());
        // Wait until it has begun to write, then let it run into its saving for a while.
        let file = data.path().join("state.redb");
        let begun = Instant::now();
        let size = || file.metadata().map_or(0, |m| m.len());
        let at_first = size();
        while size() <= at_first && begun.elapsed() < Duration::from_secs(30) && round == 0 {
            sleep(Duration::from_millis(1));
        }
        sleep(Duration::from_millis(if round == 0 { 3 } else { 400 + 137 * round }));
        child.kill().unwrap();
        child.wait().unwrap();

        let after = start(data.path());
        let reply = run(&after, question("What is the capital of Italy?"));
        assert_same(&reply, &whole);
        reused += u32::from(cached(&reply) > 0);
        println!("round {round}: {:?}", reply.finished().usage);
        drop(after);
    }
    assert!(reused > 0, "nothing was ever reused");
}
