//! The command `steersman-policy`, without a model. Commands that ask a server get a recorded response.

mod authors;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::thread::JoinHandle;

use steersman_policy_host::shipped;
use tempfile::TempDir;

/// Runs the command; what it prints to stdout and stderr, and whether it succeeds.
fn run(arguments: &[&str]) -> (String, String, bool) {
    run_with_log("", arguments)
}

/// As [`run`], with a filter of the log.
fn run_with_log(filter: &str, arguments: &[&str]) -> (String, String, bool) {
    run_in(tempfile::tempdir().unwrap().path(), filter, arguments)
}

/// As [`run_with_log`], with the data folder `data`, which keeps what was compiled.
fn run_in(data: &Path, filter: &str, arguments: &[&str]) -> (String, String, bool) {
    let output = Command::new(env!("CARGO_BIN_EXE_steersman-policy"))
        .args(arguments)
        .env("STEERSMAN_DATA_DIR", data)
        .env("RUST_LOG", filter)
        .env_remove("STEERSMAN_LOG")
        .env_remove("STEERSMAN_CONFIG")
        .env_remove("STEERSMAN_ADMIN_KEY")
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr), output.status.success())
}

/// What a successful command prints to stdout.
fn succeed(arguments: &[&str]) -> String {
    let (out, error, success) = run(arguments);
    assert!(success, "{arguments:?}: {out}{error}");
    out
}

/// What a failing command prints.
fn fail(arguments: &[&str]) -> String {
    let (out, error, success) = run(arguments);
    assert!(!success, "{arguments:?}: {out}{error}");
    out + &error
}

fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn path(folder: &TempDir, name: &str) -> String {
    folder.path().join(name).to_str().unwrap().to_owned()
}

/// It silenced the log without a word, while the server reported it.
#[test]
fn a_log_filter_with_a_typo_is_reported() {
    let (_, error, success) = run_with_log("infoo", &["check", "passthrough"]);
    assert!(success, "{error}");
    assert!(error.contains("RUST_LOG names no level: `infoo`"), "{error}");
}

/// A request whose reasoning loops. `default` closes the reasoning; `passthrough` does nothing.
const LOOP: &str = r#"{"case":"a loop","hook":"on-request","input":{"can_reason":true}}
{"hook":"on-step","input":{"index":90,"phase":"Reasoning","loop_found":{"period":3,"repeats":50,"exact":true}}}
"#;

#[test]
fn shipped_policies_are_checked_and_pass_their_golden_files() {
    for (name, grants) in
        [("agent", None), ("default", None), ("passthrough", Some("log,kv")), ("rules", None)]
    {
        let grants = grants.map(|grants| ["--grants", grants]);
        let arguments: Vec<_> =
            ["check", name].into_iter().chain(grants.into_iter().flatten()).collect();
        let checked = succeed(&arguments);
        assert!(checked.contains("contract  0.6.0\nhooks     on-"), "{checked}");
        assert_eq!(checked.contains("grants    sufficient"), grants.is_some(), "{checked}");
        let tested = succeed(&["test", name]);
        assert!(tested.ends_with(" cases pass\n"), "{tested}");
    }
    let unknown = fail(&["check", "absent.wasm"]);
    assert!(unknown.contains("error: absent.wasm: No such file"), "{unknown}");
}

#[test]
fn an_unexpected_answer_is_reported_with_its_line() {
    let golden = r#"{"case":"reasons","hook":"on-request","input":{"can_reason":true},"answer":{"reasoning":true,"every":7}}"#;
    let folder = folder(&[("a.jsonl", golden), ("b.jsonl", r#"{"hook":"on-steep"}"#)]);
    let failed = fail(&["test", "passthrough", &path(&folder, "a.jsonl")]);
    assert!(failed.contains("a.jsonl:1: reasons: on-request: "), "{failed}");
    for line in ["  -   \"every\": 7\n", "  +   \"every\": 0\n"] {
        assert!(failed.contains(line), "{failed}");
    }
    assert!(failed.contains("error: unexpected answers: 1, in 1 case\n"), "{failed}");
    for (name, advice) in
        [("pasthrough", "did you mean `passthrough`?"), ("other", "the shipped policies are ")]
    {
        let failed = fail(&["test", name, &path(&folder, "a.jsonl")]);
        let words = format!(
            "error: there is no policy `{name}`, neither a shipped one nor a file; {advice}"
        );
        assert!(failed.contains(&words), "{failed}");
    }
    let misspelled = fail(&["test", "passthrough", &path(&folder, "b.jsonl")]);
    assert!(misspelled.contains("b.jsonl: line 1: "), "{misspelled}");
}

/// A line without `case` was reported under the name of the last case, as if it were that line.
#[test]
fn a_line_without_a_case_is_reported_with_the_line_in_which_its_case_begins() {
    let golden = r#"{"case":"a short one stays","hook":"on-request"}
{"hook":"on-step","input":{"phase":"Answer"},"answer":[]}
{"hook":"on-step","input":{"phase":"Reasoning"},"answer":[{"Stop":"x"}]}
{"hook":"on-request","answer":{"every":7}}
"#;
    let folder = folder(&[("a.jsonl", golden)]);
    let failed = fail(&["test", "passthrough", &path(&folder, "a.jsonl")]);
    let own = "a.jsonl:3: in the case of line 1, a short one stays: on-step: the answer differs";
    assert!(failed.contains(own), "{failed}");
    assert!(failed.contains("a.jsonl:4: from line 4: on-request: "), "{failed}");
}

#[test]
fn replay_prints_answers_and_diff_prints_where_they_differ() {
    let folder = folder(&[("trace.jsonl", LOOP)]);
    let trace = path(&folder, "trace.jsonl");
    let replayed = succeed(&["replay", "default", &trace]);
    assert_eq!(replayed.lines().count(), 2);
    assert!(
        replayed.contains(r#""hook":"on-step","step":90,"answer":[{"CloseReasoning":"#),
        "{replayed}"
    );
    assert_eq!(replayed, succeed(&["replay", "default", &trace]), "fuel is deterministic");

    assert_eq!(succeed(&["diff", "default", "default", &trace]), "2 answers, all equal\n");
    let differ = fail(&["diff", "default", "passthrough", &trace]);
    assert!(
        differ.contains("trace.jsonl:2: a loop: on-step at token 90\n  default: [{"),
        "{differ}"
    );
    assert!(differ.contains("\n  passthrough: []\n"), "{differ}");
    assert!(differ.contains("error: 2 of 2 answers differ"), "{differ}");
}

#[test]
fn parameters_are_added_and_calls_of_one_policy_are_selected() {
    let trace = r#"{"request":"r","policy":"default","hook":"on-request","input":{"can_reason":true,"context_left":8192},"answer":{"reasoning_budget":77}}
{"request":"r","policy":"other","link":1,"hook":"on-request","input":{"can_reason":true},"answer":{"reasoning_budget":5}}
"#;
    let folder = folder(&[("trace.jsonl", trace), ("budget", "77")]);
    let trace = path(&folder, "trace.jsonl");
    let several = fail(&["test", "default", &trace]);
    assert!(several.contains("has calls of default, other; choose one with --policy"), "{several}");
    let none = fail(&["test", "default", &trace, "--policy", "agent"]);
    assert!(none.contains("has no calls of agent, only of default, other"), "{none}");
    let file = format!("reasoning_budget=@{}", path(&folder, "budget"));
    for param in ["reasoning_budget=77", &file] {
        let passed = succeed(&["test", "default", &trace, "--policy", "default", "--param", param]);
        assert_eq!(passed, "1 case passes\n");
    }
    fail(&["test", "default", &trace, "--policy", "default", "--param", "reasoning_budget=78"]);
}

/// `--param` was ignored without a word where the trace had the parameter, and the policies seemed to decide the same.
#[test]
fn a_parameter_of_a_trace_is_replaced_in_a_replay_and_kept_in_a_test() {
    let trace = r#"{"hook":"on-request","input":{"can_reason":true,"context_left":8192,"params":[["reasoning_budget","77"]]},"answer":{"reasoning_budget":77}}
"#;
    let folder = folder(&[("trace.jsonl", trace)]);
    let trace = path(&folder, "trace.jsonl");
    let replaced = ["--param", "reasoning_budget=55"];
    let with = |command: &[&str]| succeed(&[command, &replaced].concat());
    assert!(with(&["replay", "default", &trace]).contains("\"reasoning_budget\":55"));
    assert_eq!(with(&["test", "default", &trace]), "1 case passes\n");
}

#[test]
fn only_the_table_policy_of_a_configuration_is_read() {
    let folder = folder(&[]);
    let config = path(&folder, "steersman.toml");
    let (component, golden) = shipped("passthrough").unwrap();
    fs::write(folder.path().join("mine.wasm"), component).unwrap();
    fs::write(folder.path().join("mine.jsonl"), golden).unwrap();
    let write = |keys: &str| {
        let policies = folder.path().display();
        let text = format!(
            "[policy]\nfolder = \"{policies}\"\n{keys}\n[model]\nno_such_key = 1\n[profiles.a]\nb = 2\n"
        );
        fs::write(&config, text).unwrap();
    };
    write("");
    let tested = succeed(&["--config", &config, "test", "mine"]);
    assert!(tested.ends_with(" cases pass\n"), "{tested}");
    write("fuel = 10");
    let failed = fail(&["test", "mine", "--config", &config]);
    assert!(failed.contains("used up its fuel of 10"), "{failed}");
    write("fuel = 0");
    let invalid = fail(&["test", "mine", "--config", &config]);
    assert!(invalid.contains("policy.fuel: is 0, must be at least 1"), "{invalid}");
    write("fule = 10");
    let misspelled = fail(&["test", "mine", "--config", &config]);
    assert!(misspelled.contains("fule"), "{misspelled}");
}

/// Answers one request with this body; returns the address, and the request.
fn serve_once(status: &str, body: &str) -> (String, JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let length = body.len();
    let response =
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
    let request = std::thread::spawn(move || {
        let mut stream = BufReader::new(listener.accept().unwrap().0);
        let (mut head, mut length) = (String::new(), 0);
        while !head.ends_with("\r\n\r\n") {
            let before = head.len();
            stream.read_line(&mut head).unwrap();
            let line = head[before..].to_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        stream.read_exact(&mut vec![0; length]).unwrap();
        stream.get_mut().write_all(response.as_bytes()).unwrap();
        head
    });
    (address, request)
}

#[test]
fn policies_of_a_server_are_listed() {
    let body = r#"{"policies": [{"name": "house", "sha256": "0123456789abcdef", "contract": "0.6.0",
        "origin": "upload", "bytes": 42,
        "profiles": [{"profile": "a", "shadow": false, "breaker": {"state": "open", "rests_s": 30}},
            {"profile": "b", "shadow": true, "sha256": "0123456789abcdef", "breaker": {"state": "closed"}},
            {"profile": "c", "shadow": false, "sha256": "fedcba9876543210",
                "breaker": {"state": "closed"}}],
        "problem": {"at": 1, "message": "traps"},
        "earlier": [{"sha256": "fedcba9876543210", "origin": "file", "withdrawn": "rolled back"}]}],
        "params": [{"profile": "a", "param": "budget", "problem": {"at": 1, "message": "is gone"}}]}"#;
    let (address, request) = serve_once("200 OK", body);
    let listed = succeed(&["list", "--url", &address, "--key", "sk-admin"]);
    let expected =
        "house  0123456789ab  contract 0.6.0, upload, 42 bytes, in a (paused for 30 s), b (shadow), c (rolled back, runs fedcba987654)
  update rejected: traps
  earlier: fedcba987654  file, withdrawn: rolled back
profiles.a.params.budget: is gone
";
    assert_eq!(listed, expected);
    let request = request.join().unwrap().to_lowercase();
    assert!(request.starts_with("get /v1/policies http"), "{request}");
    assert!(request.contains("authorization: bearer sk-admin"), "{request}");
}

#[test]
fn versions_are_pushed_and_rolled_back() {
    let folder = folder(&[("a.wasm", "component")]);
    let file = path(&folder, "a.wasm");
    let body = r#"{"name": "a b", "sha256": "0123456789abcdef", "replaced": "fedcba9876543210"}"#;
    let (address, request) = serve_once("200 OK", body);
    let pushed = succeed(&["push", "a b", &file, "--url", &address]);
    assert_eq!(pushed, "a b: 0123456789ab is active, replacing fedcba987654\n");
    assert!(request.join().unwrap().starts_with("POST /v1/policies/a%20b HTTP"));

    let body = r#"{"name": "a", "sha256": "0123456789abcdef", "replaced": null}"#;
    let (address, request) = serve_once("200 OK", body);
    let rolled_back = succeed(&["rollback", "a", "--url", &address]);
    assert_eq!(rolled_back, "a: 0123456789ab is already active\n");
    assert!(request.join().unwrap().starts_with("POST /v1/policies/a/rollback HTTP"));

    let (address, _) =
        serve_once("409 Conflict", r#"{"error": {"message": "no earlier version"}}"#);
    let refused = fail(&["rollback", "a", "--url", &address]);
    assert!(refused.contains("409 Conflict: no earlier version"), "{refused}");
    let (address, _) = serve_once("200 OK", "hello");
    let other = fail(&["list", "--url", &address]);
    assert!(other.contains("is not a Steersman server; it returned \"hello\""), "{other}");
}

#[test]
fn a_trace_is_printed_as_lines() {
    let body = r#"{"request": "r", "records": [{"hook": "on-request"}, {"hook": "on-finish"}]}"#;
    let (address, request) = serve_once("200 OK", body);
    let printed = succeed(&["trace", "chatcmpl-1", "--url", &address]);
    assert_eq!(printed, "{\"hook\":\"on-request\"}\n{\"hook\":\"on-finish\"}\n");
    assert!(request.join().unwrap().starts_with("GET /v1/requests/chatcmpl-1/trace HTTP"));
}

#[test]
#[ignore = "needs a compiler for WebAssembly"]
fn a_new_policy_in_rust_builds_and_passes_its_golden_file() {
    builds_and_passes("rust");
}

#[test]
#[ignore = "needs zig"]
fn a_new_policy_in_c_builds_and_passes_its_golden_file() {
    builds_and_passes("c");
}

#[test]
#[ignore = "needs componentize-js on PATH"]
fn a_new_policy_in_javascript_builds_and_passes_its_golden_file() {
    builds_and_passes("js");
}

#[test]
#[ignore = "needs componentize-py on PATH"]
fn a_new_policy_in_python_builds_and_passes_its_golden_file() {
    builds_and_passes("python");
}

fn builds_and_passes(lang: &str) {
    let folder = folder(&[]);
    // One for all commands: a component with an interpreter takes long to compile.
    let data = tempfile::tempdir().unwrap();
    let succeed = |arguments: &[&str]| {
        let (out, error, success) = run_in(data.path(), "", arguments);
        assert!(success, "{arguments:?}: {out}{error}");
        out
    };
    let into = folder.path().to_str().unwrap();
    let policy = path(&folder, "tool-guard");
    succeed(&["new", "tool-guard", "--lang", lang, "--into", into]);
    let built = succeed(&["build", &policy]);
    assert!(!built.contains("warning"), "{built}");
    let component = Path::new(&policy).join("tool-guard.wasm");
    let checked = succeed(&["check", component.to_str().unwrap()]);
    assert!(checked.contains("hooks     on-") && !checked.contains("param "), "{checked}");
    let tested = succeed(&["test", component.to_str().unwrap()]);
    assert_eq!(tested, "2 cases pass\n");
}

#[test]
fn no_mlx_is_linked() {
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--package", "steersman-policy-cli", "--prefix", "none"])
        .output()
        .unwrap();
    let tree = String::from_utf8(tree.stdout).unwrap();
    assert!(tree.contains("wasmtime v"), "{tree}");
    assert!(!tree.lines().any(|line| line.starts_with("mlx")), "{tree}");
}
