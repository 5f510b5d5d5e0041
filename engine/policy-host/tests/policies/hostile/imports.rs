//! What a policy may import, if its profile grants it.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steersman_policy_host::{
    Action, Ban, Component, Context, Host, ImportCall, Instance, Policy, PolicyConfig, Storage,
    Vocabulary, no_vocabulary,
};
use steersman_test_support::guest::{
    Answers, ELEMENT, Value, case, data, importing, list, offset, payload, record, text, words,
};
use tracing_subscriber::util::SubscriberInitExt;

use super::{compile, host, limits, looping, start};

/// A vocabulary of bytes. `encode` sleeps for the given duration.
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

fn context(profile: &str) -> Context {
    Context {
        request: "request-7".into(),
        profile: profile.into(),
        vocabulary: Arc::new(Bytes(Duration::ZERO)),
        recorded: None,
    }
}

/// A guest that imports `interface`. `body` ends with the address of its answer, where `{stop}` is that
/// of an action `stop` and `{text}` that of address and length of its text.
fn stopping(interface: &str, body: &str, extra: &str) -> Vec<u8> {
    let mut answers = Answers::default();
    let stop = answers.add("on-step", &list([case("stop", text(""))]));
    let text = ELEMENT + payload("action");
    let body = body.replace("{stop}", &stop.to_string()).replace("{text}", &text.to_string());
    importing(&[interface], &[("on-step", &body)], &format!("{extra} {}", answers.data()))
}

/// Ends a request with the value of `key`, if it has one, and sets it to "seen".
fn remembering() -> Vec<u8> {
    let body = "(call $kv.get (i32.const 512) (i32.const 3) (i32.const 64))
         (call $kv.set (i32.const 512) (i32.const 3) (i32.const 516) (i32.const 4) (i32.const 128))
         (i64.store (i32.const {text}) (i64.load (i32.const 68)))
         (i32.mul (i32.load8_u (i32.const 64)) (i32.const {stop}))";
    stopping("kv", body, &data(512, b"key seen"))
}

/// The actions of a step.
fn step(instance: &mut Instance) -> Vec<Action> {
    let policy: &mut dyn Policy = instance;
    policy.ask(&looping()).unwrap_or_else(|failure| panic!("{failure}"))
}

/// The actions of a step in a request of its own.
fn step_once(component: &Arc<Component>, profile: &str) -> Vec<Action> {
    step(&mut component.instantiate(&context(profile)).unwrap())
}

fn stop(reason: &str) -> Vec<Action> {
    vec![Action::Stop(reason.into())]
}

#[test]
fn stored_values_outlive_requests_and_servers_and_belong_to_one_profile() {
    let folder = tempfile::tempdir().unwrap();
    for restart in 0..2 {
        let host = Host::new(&limits(), &Storage::open(folder.path()).unwrap()).unwrap();
        let component = compile(&host, &remembering());
        let first = if restart == 0 { vec![] } else { stop("seen") };
        assert_eq!(step_once(&component, "agent"), first);
        assert_eq!(step_once(&component, "agent"), stop("seen"));
        assert_eq!(step_once(&component, "default"), first, "each profile has a map of its own");
        assert_eq!(step(&mut start(&component)), [], "a dry run reads and stores nothing");
    }
}

#[test]
fn a_value_beyond_the_quota_is_refused_with_the_reason() {
    // Stops with the result of `set` as its reason: 0, or 1 and the refusal.
    let set = |key: u32, value: u32| {
        let body = format!(
            "(call $kv.set (i32.const 512) (i32.const {key}) (i32.const 512) (i32.const {value}) (i32.const 64))
             (i32.store (i32.const {{text}}) (i32.const 600))
             (i32.store offset=4 (i32.const {{text}}) (i32.const 2))
             (i32.store8 (i32.const 600) (i32.add (i32.load8_u (i32.const 64)) (i32.const 48)))
             (i32.store8 (i32.const 601) (i32.add (i32.load8_u (i32.const 65)) (i32.const 48)))
             i32.const {{stop}}"
        );
        stopping("kv", &body, "")
    };
    let host = host(&PolicyConfig { kv_bytes: 1000, ..limits() });
    for (key, value, result, refusal) in [
        (3, 997, "00", None),
        (3, 998, "11", Some("full")),
        (0, 1, "10", Some("bad-key")),
        (257, 1, "10", Some("bad-key")),
        (256, 1, "11", Some("full")),
        (3, 1, "00", None),
    ] {
        let component = compile(&host, &set(key, value));
        let mut policy = component.instantiate(&context("agent")).unwrap();
        assert_eq!(step(&mut policy), stop(result), "{key} {value}");
        assert_eq!(policy.take_report().imports[0].answer.as_deref(), refusal);
    }
}

#[test]
fn a_replay_returns_recorded_results_and_otherwise_begins_with_an_empty_map() {
    let host = host(&limits());
    let component = compile(&host, &remembering());
    let mut recorded = Vec::new();
    let mut actions = Vec::new();
    for _ in 0..2 {
        let mut policy = component.instantiate(&context("agent")).unwrap();
        actions = step(&mut policy);
        recorded = policy.take_report().imports;
        assert_eq!(policy.take_report().imports, []);
    }
    let call = |call: &str, arguments: &[&str], answer: Option<&str>| ImportCall {
        call: call.into(),
        arguments: arguments.iter().map(|&text| text.into()).collect(),
        answer: answer.map(str::to_owned),
    };
    let expected = [call("kv.get", &["key"], Some("seen")), call("kv.set", &["key", "seen"], None)];
    assert_eq!((&recorded[..], actions), (&expected[..], stop("seen")));

    let replay = |recorded: Vec<ImportCall>| {
        let context = Context { recorded: Some(recorded.into()), ..context("other") };
        component.instantiate(&context).unwrap()
    };
    let mut exact = replay(recorded.clone());
    assert_eq!(step(&mut exact), stop("seen"));
    assert_eq!(exact.take_report().imports, recorded);
    let mut other = replay(vec![call("kv.get", &["key"], Some("recorded"))]);
    assert_eq!(step(&mut other), stop("recorded"));
    assert_eq!(step(&mut other), stop("seen"), "the value that it set itself");
    let mut empty = replay(Vec::new());
    assert_eq!(step(&mut empty), []);
    assert_eq!(step(&mut empty), stop("seen"));
    assert_eq!(step_once(&component, "other"), [], "a replay stores nothing");
}

#[test]
fn import_calls_that_are_not_taken_are_dropped_at_the_next_call() {
    let host = host(&limits());
    let component = compile(&host, &remembering());
    let mut policy = component.instantiate(&context("agent")).unwrap();
    for _ in 0..3 {
        step(&mut policy);
    }
    assert_eq!(policy.take_report().imports.len(), 2);
}

/// Bans the tokens of "abc".
fn banning() -> Vec<u8> {
    let mut answers = Answers::default();
    let no_tokens = record([("tokens", Value::Words(vec![0, 0]))]);
    let answer = answers.add("on-step", &list([case("ban", no_tokens)]));
    let tokens = ELEMENT + payload("action") + offset("ban", "tokens");
    let body = format!(
        "(call $tokenizer.encode (i32.const 512) (i32.const 3) (i32.const {tokens}))
         i32.const {answer}"
    );
    let extra = [answers.data(), data(512, b"abc")].concat();
    importing(&["tokenizer"], &[("on-step", &body)], &extra)
}

#[test]
fn the_tokenizer_is_that_of_the_model_and_a_replay_needs_no_model() {
    let host = host(&limits());
    let component = compile(&host, &banning());
    let banned = [Action::Ban(Ban { tokens: vec![97, 98, 99], steps: 0 })];
    let mut policy = component.instantiate(&context("agent")).unwrap();
    assert_eq!(step(&mut policy), banned);
    let recorded = policy.take_report().imports;
    assert_eq!(recorded[0].answer.as_deref(), Some("[97,98,99]"));
    let replay = Context {
        vocabulary: no_vocabulary(),
        recorded: Some(recorded.into()),
        ..context("agent")
    };
    assert_eq!(step(&mut component.instantiate(&replay).unwrap()), banned);

    let body = "(call $tokenizer.decode (i32.const 512) (i32.const 2) (i32.const {text}))
         i32.const {stop}";
    let component = compile(&host, &stopping("tokenizer", body, &data(512, &words(&[104, 105]))));
    assert_eq!(step_once(&component, "agent"), stop("hi"));
}

#[test]
fn time_in_imports_counts_against_the_deadline() {
    let host = host(&PolicyConfig { deadline_ms: 20, ..limits() });
    let encode = "(call $tokenizer.encode (i32.const 512) (i32.const 3) (i32.const 64))";
    let body = format!("{} i32.const 0", encode.repeat(10));
    let component = compile(&host, &importing(&["tokenizer"], &[("on-step", &body)], ""));
    let vocabulary = Arc::new(Bytes(Duration::from_millis(30)));
    let context = Context { vocabulary, ..context("agent") };
    let policy: &mut dyn Policy = &mut component.instantiate(&context).unwrap();
    let error = policy.ask(&looping()).unwrap_err().to_string();
    assert!(error.contains("deadline of 20 ms"), "{error}");
}

#[test]
fn counters_add_up_over_requests_and_invalid_names_are_dropped() {
    let host = host(&limits());
    let add = "(call $counters.add (i32.const 512) (i32.const 5) (i64.const 2))
        (call $counters.add (i32.const 517) (i32.const 3) (i64.const 1))
        (call $counters.add (i32.const 512) (i32.const 0) (i64.const 1))
        (call $counters.add (i32.const 600) (i32.const 65) (i64.const 1)) i32.const 0";
    let memory = [data(512, b"Loop1a-b"), data(600, &[b'x'; 65])].join(" ");
    let component = compile(&host, &importing(&["counters"], &[("on-step", add)], &memory));
    for _ in 0..3 {
        step_once(&component, "agent");
    }
    step(&mut start(&component));
    assert_eq!(host.counters(), [("guest".into(), "Loop1".into(), 6)]);

    // 40 names of two letters, of which 31 fit.
    let many = "(local $n i32) (loop $l
          (i32.store8 (i32.const 513) (i32.add (i32.const 65) (i32.rem_u (local.get $n) (i32.const 8))))
          (i32.store8 (i32.const 512) (i32.add (i32.const 65) (i32.div_u (local.get $n) (i32.const 8))))
          (call $counters.add (i32.const 512) (i32.const 2) (i64.const 1))
          (br_if $l (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const 40))))
        i32.const 0";
    let component = compile(&host, &importing(&["counters"], &[("on-step", many)], ""));
    step_once(&component, "agent");
    assert_eq!(host.counters().len(), 32);
}

/// Collects the log.
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
fn log_lines_are_named_escaped_truncated_and_limited() {
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
    let flood = || {
        let mut policy = component.instantiate(&context("agent")).unwrap();
        (0..100).for_each(|_| drop(step(&mut policy)));
    };
    // A test without a log that runs beside this one can be the first to use the same lines, and turn them off.
    flood();
    tracing::callsite::rebuild_interest_cache();
    lines.0.lock().unwrap().clear();
    flood();
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 65, "{text}");
    assert!(lines[0].contains(r"WARN policy: a\nb\u{1b}[31m\u{0}!c"), "{}", lines[0]);
    assert!(lines[0].contains(r#"policy="guest" request="request-7""#), "{}", lines[0]);
    assert!(lines[1].contains("DEBUG policy:"), "{}", lines[1]);
    assert_eq!(lines[1].matches('ä').count(), 512);
    assert!(lines[64].contains("more than 64 lines; further lines are dropped"), "{}", lines[64]);
}
