//! Policies that are replaced while requests run: by files, by uploads, by hand and by themselves.

mod load;
mod operator;
mod served;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use steersman::config::ServerConfig;
use steersman_engine::Engine;
use steersman_engine::config::{Param, PolicyConfig, Profile};
use steersman_engine::engine::Info;
use steersman_engine::policy::{Policies, RequestView, Step, disk};
use steersman_tests::{guest, steer};
use tokio::sync::mpsc;
use tower::ServiceExt;

const ADMIN: &str = "sk-admin";

/// How long something may take that happens on another thread, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Of a call, which no guest here needs: a machine that is busy enough stops one for longer than the
/// usual 50 ms, and that would be a failure of the policy.
const DEADLINE_MS: u64 = 60_000;

/// A policy that plans with the note `name`, and at the first step stops with the reason `name`, or
/// traps.
fn guest(name: &str, traps: bool) -> Vec<u8> {
    let word = |n: usize| n.to_le_bytes()[..4].to_vec();
    // In the record `plan` the period of steps is at byte 72, that of checkpoints at 76 and the note at
    // 80; the list of actions is at 512, and its one action, a stop, behind it.
    let plan = [word(1), word(0), word(1), word(600), word(name.len())].concat();
    let actions = [word(520), word(1), word(6), word(600), word(name.len())].concat();
    let text = |bytes: &[u8]| bytes.iter().map(|b| format!("\\{b:02x}")).collect::<String>();
    let data = format!(
        r#"(data (i32.const 72) "{}") (data (i32.const 512) "{}") (data (i32.const 600) "{name}")"#,
        text(&plan),
        text(&actions),
    );
    let step = if traps { "unreachable" } else { "i32.const 512" };
    guest::component(&[("on-request", "i32.const 0"), ("on-step", step)], &data)
}

fn version(name: &str) -> Vec<u8> {
    guest(name, false)
}

fn broken() -> Vec<u8> {
    let whole = version("broken");
    whole[..whole.len() / 2].to_vec()
}

/// Replaces a file as editors do: by another that is renamed over it.
fn replace(file: &Path, bytes: &[u8]) {
    let beside = file.with_extension("new");
    fs::write(&beside, bytes).unwrap();
    fs::rename(&beside, file).unwrap();
}

/// A folder of policies, and what a server keeps of them.
struct Site {
    folder: tempfile::TempDir,
    data: tempfile::TempDir,
    profiles: BTreeMap<String, Profile>,
    admin_keys: Vec<String>,
}

impl Site {
    /// `mine` in version `a`, which two profiles name.
    fn new() -> Self {
        let named = |entry: &str| Profile { policies: vec![entry.into()], ..Profile::default() };
        let profiles = ["default", "other"].map(|name| (name.to_owned(), named("mine")));
        let site = Self {
            folder: tempfile::tempdir().unwrap(),
            data: tempfile::tempdir().unwrap(),
            profiles: profiles.into(),
            admin_keys: vec![ADMIN.into()],
        };
        fs::write(site.file(), version("a")).unwrap();
        site
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("mine.wasm")
    }

    fn policy_config(&self) -> PolicyConfig {
        let folder = self.folder.path().into();
        PolicyConfig { folder, deadline_ms: DEADLINE_MS, ..PolicyConfig::default() }
    }

    /// A server over these policies, which are watched; of the engine there is no more than that.
    fn serve(&self) -> Server {
        self.serve_with(&self.policy_config())
    }

    fn serve_with(&self, policy: &PolicyConfig) -> Server {
        let disk = disk::open(self.data.path());
        let policies = Policies::load(policy, &self.profiles, &disk);
        let policies = Arc::new(policies.unwrap_or_else(|error| panic!("{error}")));
        policies.watch();
        let info = Info {
            prefixes: Default::default(),
            model: "tiny".into(),
            family: "qwen3_5".into(),
            context: 1024,
            numbers: "none".into(),
            fingerprint: "fp".into(),
            profiles: self.profiles.keys().cloned().collect(),
            loaded: 0,
        };
        let engine = Engine::new(mpsc::channel(1).0, info, policies.clone());
        let admin_keys = self.admin_keys.iter().map(|key| key.as_str().into()).collect();
        let config = ServerConfig { admin_keys, ..ServerConfig::default() };
        Server { app: steersman::app(engine, &config), policies }
    }
}

struct Server {
    app: Router,
    policies: Arc<Policies>,
}

impl Server {
    /// Ends it: its database is free for the next one.
    async fn end(self) {
        let policies = Arc::downgrade(&self.policies);
        drop(self);
        // The watch may be reading files just now, and what it holds goes when it has read them.
        until("the watch has ended", async || policies.strong_count() == 0).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    async fn send(&self, request: axum::http::request::Builder, body: Vec<u8>) -> (u16, Value) {
        let response = self.app.clone().oneshot(request.body(Body::from(body)).unwrap()).await;
        let response = response.unwrap();
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    async fn post(&self, path: &str, key: Option<&str>, body: Vec<u8>) -> (u16, Value) {
        let mut request = Request::post(path).header(header::CONTENT_TYPE, "application/wasm");
        if let Some(key) = key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        self.send(request, body).await
    }

    async fn upload(&self, body: Vec<u8>) -> (u16, Value) {
        self.post("/v1/policies/mine", Some(ADMIN), body).await
    }

    /// What `GET /v1/policies` says of the first policy.
    async fn told(&self) -> Value {
        let (status, mut reply) = self.send(Request::get("/v1/policies"), Vec::new()).await;
        assert_eq!(status, 200, "{reply}");
        reply["policies"][0].take()
    }

    /// The version that a request of `profile` gets, and whether its step succeeds.
    fn runs_in(&self, profile: &str) -> (String, bool) {
        let mut policy = steer(&self.policies, profile).unwrap();
        let plan = policy.on_request(&RequestView::default()).unwrap();
        let name = plan.note.unwrap_or_default();
        policy.on_step(&Step::default()).unwrap();
        (name, policy.take_notes().is_empty())
    }

    fn runs(&self) -> String {
        let (name, _) = self.runs_in("default");
        assert_eq!(self.runs_in("other").0, name);
        name
    }

    /// Waits until this version runs.
    async fn comes_to_run(&self, name: &str) {
        // Between the two starts of `runs` it may just come.
        until(&format!("`{name}` runs"), async || self.runs_in("default").0 == name).await;
        assert_eq!(self.runs(), name);
    }

    /// Waits until these words are the last problem; returns all of it.
    async fn comes_to_say(&self, words: &str) -> String {
        let message = async || self.told().await["problem"]["message"].to_string();
        until(words, async || message().await.contains(words)).await;
        message().await
    }
}

async fn until(what: &str, happened: impl AsyncFn() -> bool) {
    let started = Instant::now();
    while !happened().await {
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_file_that_is_renamed_into_place_comes_to_run_in_every_profile_that_names_it() {
    let site = Site::new();
    let server = site.serve();
    assert_eq!(server.runs(), "a");
    for name in ["b", "c", "a"] {
        replace(&site.file(), &version(name));
        server.comes_to_run(name).await;
    }
    let told = server.told().await;
    assert_eq!(told["origin"], "file");
    assert_eq!(told["contract"], "0.2.0");
    assert_eq!(told["hooks"], json!(["on-request", "on-step"]));
    assert_eq!(told["imports"], json!([]));
    assert_eq!(told["bytes"], version("a").len());
    assert_eq!(told["file"], site.file().to_str().unwrap());
    assert_eq!(told["problem"], Value::Null);
    let uses = ["default", "other"].map(|p| json!({"profile": p, "position": 0, "shadow": false}));
    assert_eq!(told["profiles"], json!(uses));
}

#[tokio::test]
async fn a_file_that_is_written_bit_by_bit_comes_to_run_when_it_is_whole() {
    use std::io::Write;
    let site = Site::new();
    let server = site.serve();
    let whole = version("b");
    let mut file = fs::File::create(site.file()).unwrap();
    file.write_all(&whole[..whole.len() / 2]).unwrap();
    // Longer than anyone waits for the rest.
    server.comes_to_say("is not a valid component").await;
    assert_eq!(server.runs(), "a");
    file.write_all(&whole[whole.len() / 2..]).unwrap();
    server.comes_to_run("b").await;
    assert_eq!(server.told().await["problem"], Value::Null);
}

#[tokio::test]
async fn a_bad_file_leaves_the_old_version_and_says_why() {
    let site = Site::new();
    let server = site.serve();
    let importing = br#"(component (import "wasi:cli/environment@0.2.0" (instance
        (export "get-arguments" (func (result (list string))))))
        (instance $hook) (export "steersman:policy/on-step@0.2.0" (instance $hook)))"#;
    let importing = wat::parse_bytes(importing).unwrap().into_owned();
    for (bytes, words) in [
        (broken(), "is not a valid component"),
        (importing, "wasi:cli/environment"),
        (b"text".to_vec(), "is not a valid component"),
    ] {
        replace(&site.file(), &bytes);
        let said = server.comes_to_say(words).await;
        assert!(said.contains("policy `mine`"), "{said}");
        assert_eq!(server.runs(), "a");
        // The same again is nothing new.
        let (status, reply) = server.upload(bytes).await;
        assert_eq!((status, &reply["error"]["code"]), (422, &json!("policy_refused")), "{reply}");
        assert!(reply["error"]["message"].as_str().unwrap().contains(words), "{reply}");
        assert_eq!(server.runs(), "a");
        replace(&site.file(), &version("a"));
        until("all is well", async || server.told().await["problem"].is_null()).await;
    }
}

#[tokio::test]
async fn an_uploaded_policy_runs_at_once_outlives_a_restart_and_can_be_rolled_back() {
    let site = Site::new();
    let server = site.serve();
    let (status, reply) = server.upload(version("b")).await;
    assert_eq!((status, &reply["changed"]), (200, &json!(true)), "{reply}");
    assert_eq!(server.runs(), "b");
    let told = server.told().await;
    assert_eq!((&told["origin"], &told["sha256"]), (&json!("upload"), &reply["sha256"]));
    assert_eq!(told["breaker"]["state"], "probation");
    assert_eq!(told["earlier"][0]["sha256"], reply["replaced"]);
    let (_, again) = server.upload(version("b")).await;
    assert_eq!(again["changed"], false);

    server.end().await;
    let server = site.serve();
    assert_eq!(server.runs(), "b");
    let back = "/v1/policies/mine/rollback";
    let (status, _) = server.post(back, Some(ADMIN), Vec::new()).await;
    assert_eq!((status, server.runs().as_str()), (200, "a"));
    let told = server.told().await;
    assert_eq!(told["origin"], "kept");
    assert_eq!(told["earlier"][0]["withdrawn"], "rolled back");
    let (status, reply) = server.post(back, Some(ADMIN), Vec::new()).await;
    assert_eq!((status, &reply["error"]["code"]), (409, &json!("cannot_roll_back")), "{reply}");
    server.end().await;
    assert_eq!(site.serve().runs(), "a");
}

#[tokio::test]
async fn a_fresh_version_that_fails_three_requests_is_rolled_back_by_itself() {
    let site = Site::new();
    let server = site.serve();
    let failing = guest("b", true);
    replace(&site.file(), &failing);
    // Waiting costs requests, too.
    let path = |sha256: &Value| sha256.as_str().unwrap().to_owned();
    let first = path(&server.told().await["sha256"]);
    until("it is loaded", async || path(&server.told().await["sha256"]) != first).await;
    for _ in 0..3 {
        assert_eq!(server.runs_in("default"), ("b".into(), false));
    }
    assert_eq!(server.runs_in("default"), ("a".into(), true));
    let said = server.comes_to_say("failed in 3 of its first 3 requests: on-step: trapped").await;
    assert!(said.contains("the version before it is back"), "{said}");
    until("that is kept", async || {
        let withdrawn = server.told().await["earlier"][0]["withdrawn"].clone();
        withdrawn.as_str().is_some_and(|why| why.contains("on-step: trapped"))
    })
    .await;
    // Its file is still there, and nobody loads it: not now, and not at the next start.
    replace(&site.file(), &failing);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(server.runs(), "a");
    server.end().await;
    let server = site.serve();
    assert_eq!(server.runs(), "a");
    server.comes_to_say("failed in 3 of its first 3 requests").await;
    replace(&site.file(), &version("c"));
    server.comes_to_run("c").await;
}

#[tokio::test]
async fn a_start_with_a_broken_file_runs_the_last_good_version() {
    let site = Site::new();
    site.serve().end().await;
    fs::write(site.file(), broken()).unwrap();
    let server = site.serve();
    assert_eq!(server.runs(), "a");
    let told = server.told().await;
    assert_eq!(told["origin"], "kept");
    assert!(told["problem"]["message"].as_str().unwrap().contains("is not a valid component"));
    replace(&site.file(), &version("b"));
    server.comes_to_run("b").await;
}

#[tokio::test]
async fn only_operators_replace_policies_and_only_where_there_is_a_place_for_them() {
    let mut site = Site::new();
    let (install, back) = ("/v1/policies/mine", "/v1/policies/mine/rollback");
    let check = async |server: &Server, path: &str, key, status: u16, code: &str, words: &str| {
        let (got, reply) = server.post(path, key, version("b")).await;
        assert_eq!(
            (got, &reply["error"]["code"]),
            (status, &json!(code)),
            "{path} {key:?} {reply}"
        );
        let message = reply["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "`{words}` is not in {message}");
    };
    let server = site.serve();
    for path in [install, back] {
        for key in [None, Some("sk-other"), Some("")] {
            check(&server, path, key, 401, "invalid_admin_key", "admin_keys").await;
        }
    }
    let absent = "/v1/policies/absent";
    check(&server, absent, Some(ADMIN), 404, "policy_not_found", "GET /v1/policies").await;
    let request = Request::post(install).header(header::AUTHORIZATION, format!("Bearer {ADMIN}"));
    let (status, reply) = server.send(request, version("b")).await;
    assert_eq!(status, 415, "{reply}");
    assert!(reply["error"]["message"].as_str().unwrap().contains("application/wasm"), "{reply}");
    assert_eq!(server.runs(), "a");
    server.end().await;

    site.admin_keys.clear();
    let server = site.serve();
    for path in [install, back] {
        check(&server, path, Some(ADMIN), 403, "admin_keys_not_set", "server.admin_keys").await;
    }
    server.end().await;

    // A policy that ships has no file where there is no folder.
    site.admin_keys.push(ADMIN.into());
    site.profiles = [("default".to_owned(), Profile::default())].into();
    let server = site.serve_with(&PolicyConfig::default());
    let path = "/v1/policies/default";
    check(&server, path, Some(ADMIN), 409, "policy_not_written", "policy.folder").await;
    let path = "/v1/policies/default/rollback";
    check(&server, path, Some(ADMIN), 409, "cannot_roll_back", "no earlier version").await;
    assert_eq!(server.told().await["origin"], "shipped");
}

#[tokio::test]
async fn an_operators_key_opens_what_other_keys_open_and_not_the_other_way_round() {
    let site = Site::new();
    let server = site.serve();
    let api_keys = vec!["sk-one".into()];
    let config =
        ServerConfig { api_keys, admin_keys: vec![ADMIN.into()], ..ServerConfig::default() };
    let (jobs, _queue) = mpsc::channel(1);
    let info = Info {
        prefixes: Default::default(),
        model: "tiny".into(),
        family: String::new(),
        context: 1,
        numbers: String::new(),
        fingerprint: String::new(),
        profiles: Vec::new(),
        loaded: 0,
    };
    let engine = Engine::new(jobs, info, server.policies.clone());
    let server = Server { app: steersman::app(engine, &config), policies: server.policies };
    for (key, get, post) in [("sk-one", 200, 401), (ADMIN, 200, 200), ("sk-two", 401, 401)] {
        for path in ["/v1/policies", "/v1/cache", "/v1/models"] {
            let request = Request::get(path).header(header::AUTHORIZATION, format!("Bearer {key}"));
            assert_eq!(server.send(request, Vec::new()).await.0, get, "{key} {path}");
        }
        let (status, reply) = server.post("/v1/policies/mine", Some(key), version("b")).await;
        assert_eq!(status, post, "{key} {reply}");
    }
}

#[tokio::test]
async fn a_parameters_file_is_read_again_when_it_changes() {
    let mut site = Site::new();
    let file = site.folder.path().join("rules.toml");
    fs::write(&file, "one").unwrap();
    let param = Param::File { file: file.clone() };
    site.profiles.get_mut("default").unwrap().params.insert("rules".into(), param);
    let server = site.serve();
    let rules = || {
        let vocabulary = steersman_engine::policy::no_vocabulary();
        let steering = server.policies.start("default", "test", &vocabulary).unwrap();
        (steering.params["rules"].clone(), steering.digest)
    };
    let (one, digest) = rules();
    assert_eq!(one, "one");
    replace(&file, b"two");
    until("the new text", async || rules().0 == "two").await;
    assert_ne!(rules().1, digest);
    fs::remove_file(&file).unwrap();
    until("the missing file", async || {
        let (_, told) = server.send(Request::get("/v1/policies"), Vec::new()).await;
        let problem = told["params"][0]["problem"]["message"].as_str().unwrap_or_default();
        problem.contains("there is no file")
    })
    .await;
    assert_eq!(rules().0, "two");
}

#[tokio::test]
async fn without_a_watch_files_are_left_alone() {
    let site = Site::new();
    let server = site.serve_with(&PolicyConfig { watch: false, ..site.policy_config() });
    replace(&site.file(), &version("b"));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(server.runs(), "a");
}
