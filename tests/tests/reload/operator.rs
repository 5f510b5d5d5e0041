//! `steersman policy` against a running server.

use std::fs;

use clap::{Command, FromArgMatches, Subcommand};
use serde_json::{Value, json};
use steersman_engine::policy::{CONTRACT, PolicyConfig, Storage, pack};
use steersman_policy_cli::{Task, run, url};
use steersman_test_support::guest::named;

use super::served::{Connection, Served};
use super::{ADMIN, broken, version};

/// The output of `steersman policy ARGUMENTS`, or its error.
async fn policy(arguments: Vec<String>) -> Result<String, String> {
    let words = ["policy".to_owned()].into_iter().chain(arguments);
    let matches = Task::augment_subcommands(Command::new("policy")).get_matches_from(words);
    let task = Task::from_arg_matches(&matches).unwrap();
    // The command blocks its thread until the server has replied.
    let ran = tokio::task::spawn_blocking(move || {
        let mut out = Vec::new();
        let (config, storage) = (PolicyConfig::default(), Storage::in_memory());
        let ran = run(task, &config, &storage, &url("127.0.0.1", 11436), &mut out);
        ran.map(|()| String::from_utf8(out).unwrap()).map_err(|error| format!("{error:#}"))
    });
    ran.await.unwrap()
}

impl Served {
    async fn ask(&self, key: &str, arguments: &[&str]) -> Result<String, String> {
        let url = format!("http://{}", self.address);
        let server = ["--url", &url, "--key", key];
        policy(arguments.iter().chain(&server).map(|word| (*word).to_owned()).collect()).await
    }

    /// A chat request; its reply.
    async fn chat(&self) -> Value {
        let body = json!({
            "model": "tiny@mine", "messages": [{"role": "user", "content": "w1 w2 w3"}],
            "temperature": 0, "max_tokens": 4
        });
        let (path, body) = ("/v1/chat/completions", body.to_string());
        let mut connection = Connection::open(self.address).await;
        let (status, reply) = connection.post(path, "application/json", body.as_bytes()).await;
        assert_eq!(status, 200, "{reply}");
        reply
    }

    /// A component in a file.
    fn component(&self, name: &str, bytes: &[u8]) -> String {
        // Not a file that the server watches.
        let file = self.folder.path().join(format!("{name}.version"));
        fs::write(&file, bytes).unwrap();
        file.to_str().unwrap().to_owned()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_lists_pushes_and_rolls_back_policies() {
    let served = Served::start(&["mine"]).await;
    let listed = served.ask(ADMIN, &["list"]).await.unwrap();
    let first = listed.lines().find(|line| line.starts_with("mine  ")).unwrap();
    assert!(first.contains(&format!("contract {CONTRACT}, file, ")), "{listed}");
    assert!(first.ends_with(", in mine"), "{listed}");

    let b = served.component("b", &version("b"));
    let pushed = served.ask(ADMIN, &["push", "mine", &b]).await.unwrap();
    assert!(pushed.starts_with("mine: ") && pushed.contains(" is active, replacing "), "{pushed}");
    assert_eq!(served.chat().await["steersman"]["notes"][0], "b");
    let again = served.ask(ADMIN, &["push", "mine", &b]).await.unwrap();
    assert!(again.ends_with(" is already active\n"), "{again}");
    let listed = served.ask(ADMIN, &["list"]).await.unwrap();
    assert!(listed.contains(" (on probation)\n  earlier: "), "{listed}");

    let bad = served.component("bad", &broken());
    let refused = served.ask(ADMIN, &["push", "mine", &bad]).await.unwrap_err();
    assert!(refused.contains("422") && refused.contains("is not a valid component"), "{refused}");
    let listed = served.ask(ADMIN, &["list"]).await.unwrap();
    assert!(
        listed.contains("update rejected: policy `mine`: is not a valid component"),
        "{listed}"
    );
    let absent = served.ask(ADMIN, &["push", "absent", &b]).await.unwrap_err();
    assert!(absent.contains("404") && absent.contains("absent"), "{absent}");
    for arguments in [&["push", "mine", &b][..], &["rollback", "mine"]] {
        let refused = served.ask("sk-other", arguments).await.unwrap_err();
        assert!(refused.contains("401") && refused.contains("admin_keys"), "{refused}");
    }

    let back = served.ask(ADMIN, &["rollback", "mine"]).await.unwrap();
    assert!(back.contains(" is active, replacing "), "{back}");
    assert_eq!(served.chat().await["steersman"]["notes"][0], "a");
    let listed = served.ask(ADMIN, &["list"]).await.unwrap();
    assert!(listed.contains("withdrawn: rolled back"), "{listed}");
    let none = served.ask(ADMIN, &["rollback", "mine"]).await.unwrap_err();
    assert!(none.contains("409") && none.contains("no earlier version"), "{none}");
    served.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_trace_of_a_request_replays_to_the_same_decisions() {
    let served = Served::start(&["mine"]).await;
    let reply = served.chat().await;
    let id = reply["id"].as_str().unwrap();
    let trace = served.ask(ADMIN, &["trace", id]).await.unwrap();
    let records: Vec<Value> =
        trace.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let hooks: Vec<_> = records.iter().map(|record| record["hook"].as_str().unwrap()).collect();
    assert_eq!(hooks, ["on-request", "on-step", "on-finish"]);
    for record in &records {
        assert_eq!((&record["policy"], &record["profile"]), (&json!("mine"), &json!("mine")));
        assert_eq!((&record["request"], &record["shadow"]), (&json!(id), &json!(false)));
    }
    let component = served.component("a", &version("a"));
    let file = served.component("trace", trace.as_bytes());
    let replayed = || async {
        let words = ["replay", &component, &file].map(str::to_owned).to_vec();
        policy(words).await.unwrap()
    };
    let decisions = replayed().await;
    assert_eq!(decisions, replayed().await);
    assert_eq!(decisions.lines().count(), records.len());
    for (line, record) in decisions.lines().zip(&records) {
        let decision: Value = serde_json::from_str(line).unwrap();
        assert_eq!((&decision["hook"], &decision["fuel"]), (&record["hook"], &record["fuel"]));
    }
    let unknown = served.ask(ADMIN, &["trace", "chatcmpl-none"]).await.unwrap_err();
    assert!(unknown.contains("404") && unknown.contains("chatcmpl-none"), "{unknown}");
    served.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_fails_the_golden_file_beside_it_is_refused() {
    let served = Served::start(&["mine"]).await;
    let golden = r#"{"case":"notes its name","hook":"on-request","answer":{"note":"b"}}"#;
    fs::write(served.file("mine").with_extension("jsonl"), golden).unwrap();
    let (b, c) = (served.component("b", &version("b")), served.component("c", &version("c")));
    let refused = served.ask(ADMIN, &["push", "mine", &c]).await.unwrap_err();
    let words = [
        "422",
        "golden line 1 (case `notes its name`): on-request: the answer differs",
        "\n  -   \"note\": \"b\"\n  +   \"note\": \"c\"\n",
    ];
    for words in words {
        assert!(refused.contains(words), "{refused}");
    }
    assert_eq!(served.chat().await["steersman"]["notes"][0], "a");
    served.ask(ADMIN, &["push", "mine", &b]).await.unwrap();
    assert_eq!(served.chat().await["steersman"]["notes"][0], "b");
    // A version that traps in a call of the golden file.
    let traps = served.component("traps", &named("b", true));
    let golden = format!("{golden}\n{}", r#"{"hook":"on-step"}"#);
    fs::write(served.file("mine").with_extension("jsonl"), golden).unwrap();
    let refused = served.ask(ADMIN, &["push", "mine", &traps]).await.unwrap_err();
    assert!(refused.contains("golden line 2") && refused.contains("trapped"), "{refused}");
    served.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bundle_is_pushed_and_a_wrong_one_is_refused() {
    let served = Served::start(&["mine"]).await;
    let golden =
        |note: &str| format!("{{\"hook\":\"on-request\",\"answer\":{{\"note\":\"{note}\"}}}}\n");
    let bundle = |name: &str, note: &str| {
        pack(name, [&version("b"), golden(note).as_bytes(), b"", b"# notes its name\n"])
    };
    let refused = [
        (bundle("other", "b"), "contains `other.wasm`; that of policy `mine` has just mine.wasm"),
        (bundle("mine", "c"), "-   \"note\": \"c\"\n  +   \"note\": \"b\""),
    ];
    for (bytes, words) in refused {
        let file = served.component("wrong", &bytes);
        let error = served.ask(ADMIN, &["push", "mine", &file]).await.unwrap_err();
        assert!(error.contains("422") && error.contains(words), "{error}");
        assert_eq!(served.chat().await["steersman"]["notes"][0], "a");
    }
    let file = served.component("right", &bundle("mine", "b"));
    served.ask(ADMIN, &["push", "mine", &file]).await.unwrap();
    assert_eq!(served.chat().await["steersman"]["notes"][0], "b");
    assert!(served.file("mine").with_extension("steer").is_file());
    served.ask(ADMIN, &["rollback", "mine"]).await.unwrap();
    assert_eq!(served.chat().await["steersman"]["notes"][0], "a");
    assert!(!served.file("mine").with_extension("steer").exists(), "a component replaces it");
    served.end().await;
}
