//! What a policy may ask of its host, where its profile grants it.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steersman_engine::config::PolicyConfig;
use steersman_engine::policy::disk::{self, Disk};
use steersman_engine::policy::wasm::{Host, Scene};
use steersman_engine::policy::{Action, Ban, ImportCall, Policy, Vocabulary, no_vocabulary};
use steersman_tests::guest::{data, importing, words};
use tracing_subscriber::util::SubscriberInitExt;

use super::{compile, host, limits, looping};

/// A vocabulary of bytes, whose tokenizer takes its time.
struct Bytes(Duration);

impl Vocabulary for Bytes {
    fn encode(&self, text: &str) -> Option<Vec<u32>> {
        std::thread::sleep(self.0);
        Some(text.bytes().map(u32::from).collect())
    }

    fn decode(&self, tokens: &[u32]) -> String {
        tokens.iter().filter_map(|&token| char::from_u32(token)).collect()
    }

    fn size(&self) -> u32 {
        256
    }
}

fn scene(profile: &str) -> Scene {
    Scene {
        request: "request-7".into(),
        profile: profile.into(),
        vocabulary: Arc::new(Bytes(Duration::ZERO)),
        recorded: None,
    }
}

/// Answers with the action `stop`, whose text's place and length stand at byte 20.
const STOP: &str =
    "(i32.store (i32.const 0) (i32.const 16)) (i32.store (i32.const 4) (i32.const 1))
    (i32.store (i32.const 16) (i32.const 6))";

/// Ends a request with what another has kept, and keeps "seen".
fn remembering() -> Vec<u8> {
    let body = format!(
        "(call $kv.get (i32.const 512) (i32.const 3) (i32.const 64))
         (call $kv.set (i32.const 512) (i32.const 3) (i32.const 516) (i32.const 4) (i32.const 128))
         (if (i32.load (i32.const 64)) (then {STOP} (i64.store (i32.const 20) (i64.load (i32.const 68)))))
         i32.const 0"
    );
    importing(&["kv"], &[("on-step", &body)], &data(512, b"key seen"))
}

fn stop(reason: &str) -> Vec<Action> {
    vec![Action::Stop(reason.into())]
}

#[test]
fn what_a_policy_keeps_outlives_its_request_and_its_server_and_is_its_profiles_own() {
    let folder = tempfile::tempdir().unwrap();
    for restart in 0..2 {
        let host = Host::new(&limits(), &disk::open(folder.path())).unwrap();
        let component = compile(&host, &remembering());
        let ask =
            |profile| component.instantiate(&scene(profile)).unwrap().on_step(&looping()).unwrap();
        let first = if restart == 0 { vec![] } else { stop("seen") };
        assert_eq!(ask("agent"), first);
        assert_eq!(ask("agent"), stop("seen"));
        assert_eq!(ask("default"), first, "another profile's map is another");
        let mut trial = component.instantiate(&Scene::trial()).unwrap();
        assert_eq!(trial.on_step(&looping()).unwrap(), [], "a trial sees and keeps nothing");
    }
}

#[test]
fn what_does_not_fit_the_quota_is_refused_and_the_guest_is_told_why() {
    // Ends the request with what `set` answered: 0, or 1 and the reason.
    let set = |key: u32, value: u32| {
        let body = format!(
            "(call $kv.set (i32.const 512) (i32.const {key}) (i32.const 512) (i32.const {value}) (i32.const 64))
             {STOP} (i32.store (i32.const 20) (i32.const 600))
             (i32.store8 (i32.const 600) (i32.add (i32.load8_u (i32.const 64)) (i32.const 48)))
             (i32.store8 (i32.const 601) (i32.add (i32.load8_u (i32.const 65)) (i32.const 48)))
             (i32.store (i32.const 24) (i32.const 2)) i32.const 0"
        );
        importing(&["kv"], &[("on-step", &body)], "")
    };
    let host = host(&PolicyConfig { kv_bytes: 1000, ..limits() });
    for (key, value, answer) in
        [(3, 997, "00"), (3, 998, "11"), (0, 1, "10"), (257, 1, "10"), (256, 1, "11"), (3, 1, "00")]
    {
        let component = compile(&host, &set(key, value));
        let mut policy = component.instantiate(&scene("agent")).unwrap();
        assert_eq!(policy.on_step(&looping()).unwrap(), stop(answer), "{key} {value}");
        let reason = [None, Some("bad-key"), Some("full")];
        let reason = reason[match answer {
            "00" => 0,
            "10" => 1,
            _ => 2,
        }];
        assert_eq!(policy.take_imports()[0].answer.as_deref(), reason);
    }
}

#[test]
fn a_replay_answers_what_was_recorded_and_else_begins_with_an_empty_map() {
    let host = host(&limits());
    let component = compile(&host, &remembering());
    let mut recorded = Vec::new();
    let mut decided = Vec::new();
    for _ in 0..2 {
        let mut policy = component.instantiate(&scene("agent")).unwrap();
        decided = policy.on_step(&looping()).unwrap();
        recorded = policy.take_imports();
        assert_eq!(policy.take_imports(), []);
    }
    let call = |call: &str, arguments: &[&str], answer: Option<&str>| ImportCall {
        call: call.into(),
        arguments: arguments.iter().map(|&text| text.into()).collect(),
        answer: answer.map(str::to_owned),
    };
    let expected = [call("kv.get", &["key"], Some("seen")), call("kv.set", &["key", "seen"], None)];
    assert_eq!((&recorded[..], decided), (&expected[..], stop("seen")));

    let replay = |recorded: Vec<ImportCall>| {
        let scene = Scene { recorded: Some(recorded.into()), ..scene("other") };
        component.instantiate(&scene).unwrap()
    };
    let mut exact = replay(recorded.clone());
    assert_eq!(exact.on_step(&looping()).unwrap(), stop("seen"));
    assert_eq!(exact.take_imports(), recorded);
    let mut other = replay(vec![call("kv.get", &["key"], Some("told"))]);
    assert_eq!(other.on_step(&looping()).unwrap(), stop("told"));
    assert_eq!(other.on_step(&looping()).unwrap(), stop("seen"), "what it set itself");
    let mut bare = replay(Vec::new());
    assert_eq!(bare.on_step(&looping()).unwrap(), []);
    assert_eq!(bare.on_step(&looping()).unwrap(), stop("seen"));
    let mut real = component.instantiate(&scene("other")).unwrap();
    assert_eq!(real.on_step(&looping()).unwrap(), [], "a replay keeps nothing");
}

#[test]
fn calls_of_a_hook_that_nobody_took_are_dropped_at_the_next() {
    let host = host(&limits());
    let component = compile(&host, &remembering());
    let mut policy = component.instantiate(&scene("agent")).unwrap();
    for _ in 0..3 {
        policy.on_step(&looping()).unwrap();
    }
    assert_eq!(policy.take_imports().len(), 2);
}

/// Bans the tokens of "abc".
fn banning() -> Vec<u8> {
    let body = "(call $tokenizer.encode (i32.const 512) (i32.const 3) (i32.const 64))
        (i64.store (i32.const 20) (i64.load (i32.const 64))) i32.const 0";
    let memory = [data(0, &words(&[16, 1])), data(16, &words(&[3])), data(512, b"abc")];
    importing(&["tokenizer"], &[("on-step", body)], &memory.join(" "))
}

#[test]
fn the_tokenizer_is_the_models_own_and_a_replay_needs_no_model() {
    let host = host(&limits());
    let component = compile(&host, &banning());
    let banned = [Action::Ban(Ban { tokens: vec![97, 98, 99], steps: 0 })];
    let mut policy = component.instantiate(&scene("agent")).unwrap();
    assert_eq!(policy.on_step(&looping()).unwrap(), banned);
    let recorded = policy.take_imports();
    assert_eq!(recorded[0].answer.as_deref(), Some("[97,98,99]"));
    let replay =
        Scene { vocabulary: no_vocabulary(), recorded: Some(recorded.into()), ..scene("agent") };
    assert_eq!(component.instantiate(&replay).unwrap().on_step(&looping()).unwrap(), banned);

    let body = format!(
        "(call $tokenizer.decode (i32.const 512) (i32.const 2) (i32.const 64)) {STOP}
         (i64.store (i32.const 20) (i64.load (i32.const 64))) i32.const 0"
    );
    let tokens = data(512, &words(&[104, 105]));
    let component = compile(&host, &importing(&["tokenizer"], &[("on-step", &body)], &tokens));
    let mut policy = component.instantiate(&scene("agent")).unwrap();
    assert_eq!(policy.on_step(&looping()).unwrap(), stop("hi"));
}

#[test]
fn a_host_that_is_slow_counts_against_the_deadline() {
    let host = host(&PolicyConfig { deadline_ms: 20, ..limits() });
    let encode = "(call $tokenizer.encode (i32.const 512) (i32.const 3) (i32.const 64))";
    let body = format!("{} i32.const 0", encode.repeat(10));
    let component = compile(&host, &importing(&["tokenizer"], &[("on-step", &body)], ""));
    let vocabulary = Arc::new(Bytes(Duration::from_millis(30)));
    let mut policy = component.instantiate(&Scene { vocabulary, ..scene("agent") }).unwrap();
    let error = policy.on_step(&looping()).unwrap_err().to_string();
    assert!(error.contains("deadline of 20 ms"), "{error}");
}

#[test]
fn counters_add_up_over_requests_and_those_with_bad_names_are_dropped() {
    let host = host(&limits());
    let add = "(call $counters.add (i32.const 512) (i32.const 5) (i64.const 2))
        (call $counters.add (i32.const 517) (i32.const 3) (i64.const 1))
        (call $counters.add (i32.const 512) (i32.const 0) (i64.const 1))
        (call $counters.add (i32.const 600) (i32.const 65) (i64.const 1)) i32.const 0";
    let memory = [data(512, b"Loop1a-b"), data(600, &[b'x'; 65])].join(" ");
    let component = compile(&host, &importing(&["counters"], &[("on-step", add)], &memory));
    for _ in 0..3 {
        component.instantiate(&scene("agent")).unwrap().on_step(&looping()).unwrap();
    }
    component.instantiate(&Scene::trial()).unwrap().on_step(&looping()).unwrap();
    assert_eq!(host.counters(), [("guest".into(), "Loop1".into(), 6)]);

    // Two letters count up: 40 names, of which there is room for 31.
    let many = "(local $n i32) (loop $l
          (i32.store8 (i32.const 513) (i32.add (i32.const 65) (i32.rem_u (local.get $n) (i32.const 8))))
          (i32.store8 (i32.const 512) (i32.add (i32.const 65) (i32.div_u (local.get $n) (i32.const 8))))
          (call $counters.add (i32.const 512) (i32.const 2) (i64.const 1))
          (br_if $l (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const 40))))
        i32.const 0";
    let component = compile(&host, &importing(&["counters"], &[("on-step", many)], ""));
    component.instantiate(&scene("agent")).unwrap().on_step(&looping()).unwrap();
    assert_eq!(host.counters().len(), 32);
}

/// Where the log goes in a test.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn lines_of_the_log_are_named_escaped_cut_and_counted() {
    let lines = Lines::default();
    let writer = lines.clone();
    let host = host(&limits());
    let log = "(call $log.write (i32.const 2) (i32.const 512) (i32.const 11))
        (call $log.write (i32.const 0) (i32.const 600) (i32.const 1500)) i32.const 0";
    let memory = [data(512, b"a\nb\x1b[31m\0!c"), data(600, "ä".repeat(750).as_bytes())].join(" ");
    let component = compile(&host, &importing(&["log"], &[("on-step", log)], &memory));
    let _logging = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
        .with_writer(move || writer.clone())
        .set_default();
    let mut policy = component.instantiate(&scene("agent")).unwrap();
    for _ in 0..100 {
        policy.on_step(&looping()).unwrap();
    }
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 65, "{text}");
    assert!(lines[0].contains(r"WARN policy: a\nb\u{1b}[31m\u{0}!c"), "{}", lines[0]);
    assert!(lines[0].contains(r#"policy="guest" request="request-7""#), "{}", lines[0]);
    assert!(lines[1].contains("DEBUG policy:"), "{}", lines[1]);
    assert_eq!(lines[1].matches('ä').count(), 512);
    assert!(lines[64].contains("more than 64 lines; the rest is dropped"), "{}", lines[64]);
}

#[test]
fn what_was_compiled_is_kept_for_its_owner_alone_and_compiled_again_where_it_is_damaged() {
    fn files(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
    }
    let folder = tempfile::tempdir().unwrap();
    let compiled = folder.path().join(disk::COMPILED);
    let decides = || {
        let disk = Disk { compiled: Some(compiled.clone()), ..disk::in_memory() };
        let component = compile(&Host::new(&limits(), &disk).unwrap(), &remembering());
        component.instantiate(&scene("agent")).unwrap().on_step(&looping()).unwrap()
    };
    assert_eq!(decides(), []);
    let kept = files(&compiled);
    assert_ne!(kept, [""; 0].map(std::path::PathBuf::from));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(&compiled).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
    assert_eq!(decides(), []);
    for bytes in [&b""[..], b"damaged"] {
        kept.iter().for_each(|file| std::fs::write(file, bytes).unwrap());
        assert_eq!(decides(), []);
    }
}
