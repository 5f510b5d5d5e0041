//! Policies that are replaced through a running server.
//!
//! `engine/policy-host/tests/policies/reload.rs` has the laws that need no server.

mod keys;
mod load;
mod operator;
mod served;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use steersman::config::{ProfileAccess, ServerConfig};
use steersman_engine::config::{Config, Profile};
use steersman_engine::internals::queue::Queue;
use steersman_engine::policy::{
    CONTRACT, Param, Policies, PolicyConfig, RequestView, Step, Storage,
};
use steersman_engine::{Engine, Info};
use steersman_test_support::guest::{broken, named, replace};
use tower::ServiceExt;

const ADMIN: &str = "sk-admin";

/// Limit on events of another thread, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Of one call: a busy machine may stop a thread for longer than the default of 50 ms.
const DEADLINE_MS: u64 = 60_000;

fn version(name: &str) -> Vec<u8> {
    named(name, false)
}

/// A policy folder, a data folder and the configuration of a server.
struct Site {
    folder: tempfile::TempDir,
    data: tempfile::TempDir,
    profiles: BTreeMap<String, Profile>,
    admin_keys: Vec<String>,
    /// Profiles with a key, and the keys.
    profile_keys: Vec<(&'static str, &'static str)>,
}

impl Site {
    /// The policy `mine` in version `a`, which two profiles name.
    fn new() -> Self {
        let named = |entry: &str| steersman_tests::profile(entry);
        let profiles = ["default", "other"].map(|name| (name.to_owned(), named("mine")));
        let site = Self {
            folder: tempfile::tempdir().unwrap(),
            data: tempfile::tempdir().unwrap(),
            profiles: profiles.into(),
            admin_keys: vec![ADMIN.into()],
            profile_keys: Vec::new(),
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

    /// Starts a server without a model, which watches the files of these policies.
    fn serve(&self) -> Server {
        self.serve_with(&self.policy_config())
    }

    fn serve_with(&self, policy: &PolicyConfig) -> Server {
        let config = Config { profiles: self.profiles.clone(), ..Config::default() };
        let storage = Storage::open(self.data.path()).unwrap();
        let policies = Policies::load(policy, &config.profile_policies(), &storage);
        let policies = Arc::new(policies.unwrap_or_else(|error| panic!("{error}")));
        policies.watch();
        let info = Info {
            prefixes: Default::default(),
            store_enabled: false,
            text: steersman_tests::bundled_text(),
            activity: Default::default(),
            model: "tiny".into(),
            family: "qwen3_5".into(),
            context: 1024,
            prompt_bytes: 1 << 20,
            numbers: "none".into(),
            fingerprint: "fp".into(),
            profiles: self.profiles.keys().cloned().collect(),
            loaded: 0,
        };
        let engine = Engine::new(Queue::new(1).into(), info, policies.clone());
        let admin_keys = self.admin_keys.iter().map(|key| key.as_str().into()).collect();
        let access =
            |key: &str| ProfileAccess { api_keys: vec![key.into()], ..ProfileAccess::default() };
        let keys = self.profile_keys.iter();
        let profiles = keys.map(|(name, key)| ((*name).into(), access(key))).collect();
        let config = ServerConfig { admin_keys, profiles, ..ServerConfig::default() };
        Server { app: steersman::app(engine, &config), policies }
    }
}

struct Server {
    app: Router,
    policies: Arc<Policies>,
}

impl Server {
    /// Ends the server. Its database is closed when this returns.
    async fn end(self) {
        let Self { app, mut policies } = self;
        drop(app);
        let started = Instant::now();
        // The watch may hold another handle while it reads files. Dropping the last one joins it.
        while let Err(shared) = Arc::try_unwrap(policies) {
            assert!(started.elapsed() < PATIENCE, "the watch does not end");
            policies = shared;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
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

    /// The first policy of `GET /v1/policies`.
    async fn report(&self) -> Value {
        let (status, mut reply) = self.send(Request::get("/v1/policies"), Vec::new()).await;
        assert_eq!(status, 200, "{reply}");
        reply["policies"][0].take()
    }

    /// The version that a request of `profile` gets.
    fn version_in(&self, profile: &str) -> String {
        let mut session = steersman_tests::session(&self.policies, profile).unwrap();
        let plan = session.ask(&RequestView::default()).unwrap();
        session.ask(&Step::default()).unwrap();
        assert_eq!(session.take_notes(), [""; 0]);
        plan.note.unwrap_or_default()
    }

    /// The active version.
    fn version(&self) -> String {
        let name = self.version_in("default");
        assert_eq!(self.version_in("other"), name);
        name
    }

    async fn until_version(&self, name: &str) {
        // Not `version`: the version may change between its two requests.
        until(name, async || self.version_in("default") == name).await;
        assert_eq!(self.version(), name);
    }

    /// Waits until a problem with these words is reported; returns the message.
    async fn until_problem(&self, words: &str) -> String {
        let message = async || self.report().await["problem"]["message"].to_string();
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
async fn a_file_renamed_into_place_becomes_active_and_is_reported() {
    let site = Site::new();
    let server = site.serve();
    assert_eq!(server.version(), "a");
    for name in ["b", "c", "a"] {
        replace(&site.file(), &version(name));
        server.until_version(name).await;
    }
    let report = server.report().await;
    assert_eq!(report["origin"], "file");
    assert_eq!(report["contract"], CONTRACT);
    assert_eq!(report["hooks"], json!(["on-request", "on-step"]));
    assert_eq!(report["imports"], json!([]));
    assert_eq!(report["bytes"], version("a").len());
    assert_eq!(report["file"], site.file().to_str().unwrap());
    assert_eq!(report["problem"], Value::Null);
    for (place, profile) in ["default", "other"].into_iter().enumerate() {
        let mut used = report["profiles"][place].clone();
        assert_eq!(used["breaker"].take()["state"], "probation");
        assert_eq!(used["sha256"].take(), report["sha256"]);
        let expected = json!({"profile": profile, "position": 0, "shadow": false, "sha256": null, "breaker": null});
        assert_eq!(used, expected);
    }
}

#[tokio::test]
async fn a_rejected_file_or_upload_leaves_the_active_version_and_is_reported() {
    let site = Site::new();
    let server = site.serve();
    for (bytes, words) in [(broken(), "is not a valid component"), (b"text".to_vec(), "component")]
    {
        replace(&site.file(), &bytes);
        let problem = server.until_problem(words).await;
        assert!(problem.contains("policy `mine`"), "{problem}");
        assert_eq!(server.version(), "a");
        let (status, reply) = server.upload(bytes).await;
        assert_eq!((status, &reply["error"]["code"]), (422, &json!("policy_refused")), "{reply}");
        assert!(reply["error"]["message"].as_str().unwrap().contains(words), "{reply}");
        assert_eq!(server.version(), "a");
        replace(&site.file(), &version("a"));
        until("no problem", async || server.report().await["problem"].is_null()).await;
    }
}

#[tokio::test]
async fn an_upload_becomes_active_outlives_a_restart_and_can_be_rolled_back() {
    let site = Site::new();
    let server = site.serve();
    let (status, reply) = server.upload(version("b")).await;
    assert_eq!((status, &reply["changed"]), (200, &json!(true)), "{reply}");
    assert_eq!(server.version(), "b");
    let report = server.report().await;
    assert_eq!((&report["origin"], &report["sha256"]), (&json!("upload"), &reply["sha256"]));
    assert_eq!(report["profiles"][0]["breaker"]["state"], "probation");
    assert_eq!(report["earlier"][0]["sha256"], reply["replaced"]);
    let (_, again) = server.upload(version("b")).await;
    assert_eq!(again["changed"], false);

    server.end().await;
    let server = site.serve();
    assert_eq!(server.version(), "b");
    let back = "/v1/policies/mine/rollback";
    let (status, _) = server.post(back, Some(ADMIN), Vec::new()).await;
    assert_eq!((status, server.version().as_str()), (200, "a"));
    let report = server.report().await;
    assert_eq!(report["origin"], "history");
    assert_eq!(report["earlier"][0]["withdrawn"], "rolled back");
    let (status, reply) = server.post(back, Some(ADMIN), Vec::new()).await;
    assert_eq!((status, &reply["error"]["code"]), (409, &json!("cannot_roll_back")), "{reply}");
    server.end().await;
    assert_eq!(site.serve().version(), "a");
}

/// How a failed probation appears in `GET /v1/policies`.
#[tokio::test]
async fn a_version_that_fails_its_probation_is_reported_as_withdrawn() {
    let site = Site::new();
    let server = site.serve();
    let (status, reply) = server.upload(named("b", true)).await;
    assert_eq!(status, 200, "{reply}");
    for n in 0..6 {
        let profile = if n < 3 { "default" } else { "other" };
        let mut session = steersman_tests::session(&server.policies, profile).unwrap();
        assert_eq!(session.ask(&RequestView::default()).unwrap().note.as_deref(), Some("b"));
        session.ask(&Step::default()).unwrap();
    }
    assert_eq!(server.version(), "a");
    server.until_problem("failed in 3 of its first 3 requests: on-step: trapped").await;
    until("the withdrawal is stored", async || {
        let withdrawn = server.report().await["earlier"][0]["withdrawn"].clone();
        withdrawn.as_str().is_some_and(|reason| reason.contains("on-step: trapped"))
    })
    .await;
}

#[tokio::test]
async fn only_operators_replace_policies_and_only_policies_with_a_file() {
    let mut site = Site::new();
    let (upload, back) = ("/v1/policies/mine", "/v1/policies/mine/rollback");
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
    for path in [upload, back] {
        for key in [None, Some("sk-other"), Some("")] {
            check(&server, path, key, 401, "invalid_admin_key", "admin_keys").await;
        }
    }
    let absent = "/v1/policies/absent";
    check(&server, absent, Some(ADMIN), 404, "policy_not_found", "GET /v1/policies").await;
    let request = Request::post(upload).header(header::AUTHORIZATION, format!("Bearer {ADMIN}"));
    let (status, reply) = server.send(request, version("b")).await;
    assert_eq!(status, 415, "{reply}");
    assert!(reply["error"]["message"].as_str().unwrap().contains("application/wasm"), "{reply}");
    assert_eq!(server.version(), "a");
    server.end().await;

    site.admin_keys.clear();
    let server = site.serve();
    for path in [upload, back] {
        check(&server, path, Some(ADMIN), 403, "admin_keys_not_set", "server.admin_keys").await;
    }
    server.end().await;

    // Without a folder a shipped policy has no file.
    site.admin_keys.push(ADMIN.into());
    site.profiles = [("default".to_owned(), Profile::default())].into();
    let server = site.serve_with(&PolicyConfig::default());
    let path = "/v1/policies/default";
    check(&server, path, Some(ADMIN), 409, "policy_not_written", "policy.folder").await;
    let path = "/v1/policies/default/rollback";
    check(&server, path, Some(ADMIN), 409, "cannot_roll_back", "no earlier version").await;
    assert_eq!(server.report().await["origin"], "shipped");
}

#[tokio::test]
async fn an_admin_key_allows_what_other_keys_allow_and_not_conversely() {
    let site = Site::new();
    let server = site.serve();
    let api_keys = vec!["sk-one".into()];
    let config =
        ServerConfig { api_keys, admin_keys: vec![ADMIN.into()], ..ServerConfig::default() };
    let info = Info {
        prefixes: Default::default(),
        store_enabled: false,
        text: steersman_tests::bundled_text(),
        activity: Default::default(),
        model: "tiny".into(),
        family: String::new(),
        context: 1,
        prompt_bytes: 1 << 20,
        numbers: String::new(),
        fingerprint: String::new(),
        profiles: Vec::new(),
        loaded: 0,
    };
    let engine = Engine::new(Queue::new(1).into(), info, server.policies.clone());
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
async fn a_missing_parameter_file_is_reported_and_its_last_text_applies() {
    let mut site = Site::new();
    let file = site.folder.path().join("rules.toml");
    fs::write(&file, "one").unwrap();
    let param = Param::File { file: file.clone() };
    site.profiles.get_mut("default").unwrap().policy.params.insert("rules".into(), param);
    let server = site.serve();
    fs::remove_file(&file).unwrap();
    until("the missing file is reported", async || {
        let (_, report) = server.send(Request::get("/v1/policies"), Vec::new()).await;
        let problem = report["params"][0]["problem"]["message"].as_str().unwrap_or_default();
        problem.contains("does not exist")
    })
    .await;
    let session = steersman_tests::session(&server.policies, "default").unwrap();
    assert_eq!(session.params[0], ("rules".into(), "one".into()));
}
