//! State: a resumed request equals an uninterrupted one, in the same process, after a restart and
//! after `kill -9`.

use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use steersman_engine::config::{Config, MachineCosts, Profile};
use steersman_engine::request::Request;
use steersman_tests::{
    Reply, Running, ask, bundled_model, config, load, load_from, message, run, scaled,
};
use steersman_text::Text;

use super::child;

fn start(data: &Path) -> Running {
    Running::start(config(), data)
}

/// The second start of a server took two seconds to measure what the first one had measured. Now the profile in the data
/// folder is read: a second measurement would give other numbers, and replace the file.
#[test]
fn second_start_reads_the_machine_profile_of_the_first() {
    let data = tempfile::tempdir().unwrap();
    let measured = Config { machine: MachineCosts::Measured, ..config() };
    let profiles = || {
        let files = std::fs::read_dir(data.path().join("machine")).unwrap();
        files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect::<Vec<_>>()
    };
    drop(load(measured.clone(), data.path()).unwrap());
    let first = profiles();
    assert_eq!(first.len(), 1);
    drop(load(measured.clone(), data.path()).unwrap());
    assert_eq!(profiles(), first);
    // Other drafters have other costs.
    let mut other = measured;
    other.speculation.drafts.clear();
    drop(load(other, data.path()).unwrap());
    assert_eq!(profiles().len(), 2);
}

/// A question after a long system prompt, which is worth saving.
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

/// An exact repeat, another question after the same system prompt, and the next turn: each equals
/// the reply of an engine without saved state.
#[test]
fn resumed_request_equals_uninterrupted_request() {
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

/// Waits until the engine has no prefix left to prefetch.
fn wait_until_idle(engine: &Running) {
    let done = || engine.info().prefixes.report().counts.ahead_tokens;
    let mut before = u64::MAX;
    while before != done() {
        before = done();
        sleep(Duration::from_millis(400));
    }
}

/// Clients do not send reasoning back, so the next prompt differs from what was decoded. The engine
/// prefetches that prefix while it is idle, and each turn computes only its own tokens.
#[test]
fn turn_after_reasoning_prefills_only_its_own_tokens() {
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
        assert!(usage.reasoning_tokens > 0, "turn {turn} has no reasoning: {usage:?}");
        let computed = usage.prompt_tokens - usage.cached_tokens;
        println!("turn {turn}: {} tokens, {computed} of them computed", usage.prompt_tokens);
        if turn > 0 {
            // `<|im_end|>`, newline, `<|im_start|>assistant`, newline, `<think>`, newline.
            let own = text.encode(&words).unwrap().len() + 7;
            assert!(computed as usize <= own, "turn {turn} computes {computed} tokens, not {own}");
        }
        request.messages.push(message("assistant", &reply.answer));
        wait_until_idle(&engine);
    }
}

#[test]
fn warm_prefixes_are_computed_at_the_start() {
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
    // On a busy machine the first chunk may take longer than `wait_until_idle` waits.
    let begun = Instant::now();
    while engine.info().prefixes.report().counts.ahead_tokens == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no prefix is prefetched");
        sleep(Duration::from_millis(10));
    }
    wait_until_idle(&engine);
    let usage = run(&engine, asked).finished().usage;
    assert!(usage.prompt_tokens - usage.cached_tokens < 20, "{usage:?}");
    drop(engine);

    let missing = folder.path().join("none.json");
    let started = Running::try_start(with(&missing), &bundled_model(), folder.path());
    let Err(error) = started else { panic!("the engine started without the warm file") };
    for words in ["profiles.default.warm", "none.json"] {
        assert!(error.to_string().contains(words), "{error}");
    }
}

/// Weights used to be sampled: a fine-tune of the same size could resume the state of its base. The
/// time of the last change does not tell them apart either.
#[test]
fn checkpoint_with_one_changed_byte_has_another_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    for file in bundled_model().read_dir().unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let data = tempfile::tempdir().unwrap();
    let fingerprint = || load_from(config(), folder.path(), data.path()).unwrap().1.fingerprint;
    let weights = folder.path().join("model.safetensors");
    let original = std::fs::read(&weights).unwrap();
    let time = weights.metadata().unwrap().modified().unwrap();
    let first = fingerprint();
    let mut bytes = original.clone();
    bytes[original.len() / 3] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    std::fs::File::options().write(true).open(&weights).unwrap().set_modified(time).unwrap();
    assert_ne!(fingerprint(), first);
    std::fs::write(&weights, original).unwrap();
    assert_eq!(fingerprint(), first);
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

/// Variable with the data folder of the child process that
/// [`server_killed_while_saving_recovers_after_restart`] kills.
const CHILD: &str = "STEERSMAN_TEST_CHILD";

/// The child: answers requests, each with something new to save, until it is killed.
#[test]
#[ignore = "child process of the next test"]
fn child_that_saves_until_killed() {
    let Some(data) = std::env::var_os(CHILD) else { return };
    let engine = start(Path::new(&data));
    for turn in 0.. {
        run(&engine, question(&format!("What is the capital of Italy? {turn}")));
    }
}

fn spawn_child(data: &Path) -> Child {
    child(module_path!(), "child_that_saves_until_killed")
        .env(CHILD, data)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Kills a server at different moments while it saves. After each kill a new server on the same
/// folder gives the same reply, from saved state or after a miss, and never an error.
#[test]
fn server_killed_while_saving_recovers_after_restart() {
    let cold_data = tempfile::tempdir().unwrap();
    let cold = start(cold_data.path());
    let whole = run(&cold, question("What is the capital of Italy?"));
    drop(cold);

    let data = tempfile::tempdir().unwrap();
    let mut reused = 0;
    for round in 0..scaled(8) as u64 {
        let mut child = spawn_child(data.path());
        // Wait until it writes, then let it save for a while.
        let file = data.path().join("state.redb");
        let begun = Instant::now();
        let size = || file.metadata().map_or(0, |m| m.len());
        let at_first = size();
        while size() <= at_first && begun.elapsed() < Duration::from_secs(30) && round == 0 {
            sleep(Duration::from_millis(1));
        }
        sleep(Duration::from_millis(if round == 0 { 3 } else { 400 + 137 * (round % 8) }));
        child.kill().unwrap();
        child.wait().unwrap();

        let after = start(data.path());
        let reply = run(&after, question("What is the capital of Italy?"));
        assert_same(&reply, &whole);
        reused += u32::from(cached(&reply) > 0);
        println!("round {round}: {:?}", reply.finished().usage);
        drop(after);
    }
    assert!(reused > 0, "no round reused saved state");
}
