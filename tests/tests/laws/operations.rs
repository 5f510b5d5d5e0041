//! Reports on the prefix cache with the real engine: `GET /v1/cache`, `GET /metrics`, and two servers
//! on one data folder.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use steersman::config::ServerConfig;
use steersman_tests::{Running, bundled_model, config, samples};
use tower::ServiceExt;

/// Interval and maximum number of polls for work that follows a reply: one minute, for busy machines.
const POLL: Duration = Duration::from_millis(50);
const POLLS: usize = 1200;

/// An engine without prefix prefetch, so that it counts requests only.
fn start(data: &Path) -> Running {
    let mut config = config();
    config.store.ahead = false;
    Running::start(config, data)
}

fn app(engine: &Running) -> Router {
    steersman::app((**engine).clone(), &ServerConfig::default())
}

async fn send(app: &Router, request: Request<Body>) -> String {
    let response = app.clone().oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

async fn get(app: &Router, path: &str) -> String {
    send(app, Request::get(path).body(Body::empty()).unwrap()).await
}

async fn cache(app: &Router) -> Value {
    serde_json::from_str(&get(app, "/v1/cache").await).unwrap()
}

/// A metric of the bundled model.
fn of_model(metrics: &BTreeMap<String, f64>, name: &str) -> f64 {
    let model = bundled_model();
    let model = model.file_name().unwrap().display();
    metrics[&format!("steersman_{name}{{model=\"{model}\"}}")]
}

/// Asks after a system prompt that is long enough to be saved; returns the reply.
async fn chat(app: &Router, question: &str) -> Value {
    let system = "There are seven bells in the forest. The quiet owl walked near it. ".repeat(20);
    let body = json!({
        "model": bundled_model().file_name().unwrap().to_str(),
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "temperature": 0, "max_tokens": 20, "max_thinking_tokens": 0
    });
    let request = Request::post("/v1/chat/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into());
    serde_json::from_str(&send(app, request.unwrap()).await).unwrap()
}

/// The cache report and the metrics, once the last turn is on disk.
async fn when_idle(app: &Router) -> (Value, BTreeMap<String, f64>) {
    let mut before = cache(app).await;
    for _ in 0..POLLS {
        tokio::time::sleep(POLL).await;
        let metrics = get(app, "/metrics").await;
        let after = cache(app).await;
        // A turn is saved after its reply.
        if before == after && after["disk"]["queued_bytes"] == json!(0) {
            return (after, samples(&metrics));
        }
        before = after;
    }
    panic!("the cache is never idle: {before}");
}

#[tokio::test]
async fn cache_counts_a_request_and_its_repetition() {
    let data = tempfile::tempdir().unwrap();
    let engine = start(data.path());
    let app = app(&engine);
    let (empty, _) = when_idle(&app).await;
    for count in ["hits", "misses", "prompt_tokens", "cached_tokens", "saves"] {
        assert_eq!(empty["counts"][count], 0, "{count}");
    }
    assert_eq!(empty["memory"]["bytes"], 0);

    let first = chat(&app, "What is the capital of Italy?").await["usage"].take();
    let (saved, _) = when_idle(&app).await;
    let prompt = first["prompt_tokens"].as_u64().unwrap();
    assert_eq!(saved["counts"]["misses"], 1);
    assert_eq!(saved["counts"]["hits"], 0);
    assert_eq!(saved["counts"]["prompt_tokens"], prompt);
    assert_eq!(saved["counts"]["cached_tokens"], 0);
    let number = |value: &Value| value.as_u64().unwrap();
    assert!(number(&saved["counts"]["saves"]) > 0);
    let memory = &saved["memory"];
    assert!(number(&memory["prefixes"]) > 0 && number(&memory["states"]) > 0, "{memory}");
    assert!((1..=1 << 30).contains(&number(&memory["bytes"])), "{memory}");
    assert_eq!(memory["budget_bytes"], 1 << 30);

    let disk = &saved["disk"];
    assert!(disk["path"].as_str().unwrap().ends_with("state.redb"), "{disk}");
    assert_eq!(disk["budget_bytes"], 4_u64 << 30);
    assert_eq!(disk["off"], Value::Null);
    assert!(number(&disk["rows"]["parts"]) > 0 && number(&disk["states"]["parts"]) > 0, "{disk}");
    assert_eq!(disk["other_models"], json!({"parts": 0, "bytes": 0}));
    assert!(number(&disk["counts"]["saves"]) > 0, "{disk}");
    assert!(number(&disk["file_bytes"]) > 0, "{disk}");

    let repeat = chat(&app, "What is the capital of Italy?").await["usage"].take();
    let (resumed, _) = when_idle(&app).await;
    let cached = number(&repeat["prompt_tokens_details"]["cached_tokens"]);
    assert!(cached > prompt / 2, "{repeat}");
    assert_eq!(resumed["counts"]["misses"], 1);
    assert_eq!(resumed["counts"]["hits"], 1);
    assert_eq!(resumed["counts"]["prompt_tokens"], 2 * prompt);
    assert_eq!(resumed["counts"]["cached_tokens"], cached);
    assert_eq!(resumed["counts"]["read_tokens"], 0, "the prefix was in memory");
    assert_eq!(resumed["counts"]["ahead_tokens"], 0);
}

/// Compares all numbers that both report, by path in `/v1/cache`, including prefix prefetch, which
/// counts for no request.
#[tokio::test]
async fn metrics_equal_the_cache_report() {
    let data = tempfile::tempdir().unwrap();
    let engine = Running::start(config(), data.path());
    let app = app(&engine);
    let mut usage = [0; 3];
    for question in ["What is the capital of Italy?", "What is the capital of Peru?"] {
        let of = chat(&app, question).await["usage"].take();
        let cached = &of["prompt_tokens_details"]["cached_tokens"];
        for (sum, tokens) in
            usage.iter_mut().zip([&of["prompt_tokens"], cached, &of["completion_tokens"]])
        {
            *sum += tokens.as_u64().unwrap();
        }
    }
    let mut polls = 0;
    while cache(&app).await["counts"]["ahead_tokens"] == 0 {
        assert!(polls < POLLS, "no prefix prefetch");
        polls += 1;
        tokio::time::sleep(POLL).await;
    }
    let (cache, metrics) = when_idle(&app).await;
    for (path, name) in [
        ("/counts/hits", "cache_hits_total"),
        ("/counts/misses", "cache_misses_total"),
        ("/counts/prompt_tokens", "cache_prompt_tokens_total"),
        ("/counts/cached_tokens", "cache_cached_tokens_total"),
        ("/counts/read_tokens", "cache_read_tokens_total"),
        ("/counts/saves", "cache_saves_total"),
        ("/counts/evictions", "cache_evictions_total"),
        ("/counts/ahead_tokens", "cache_ahead_tokens_total"),
        ("/memory/prefixes", "cache_memory_prefixes"),
        ("/memory/states", "cache_memory_states"),
        ("/memory/bytes", "cache_memory_bytes"),
        ("/memory/budget_bytes", "cache_memory_budget_bytes"),
        ("/disk/budget_bytes", "cache_disk_budget_bytes"),
        ("/disk/file_bytes", "cache_disk_file_bytes"),
        ("/disk/queued_bytes", "cache_disk_queued_bytes"),
        ("/disk/pinned/bytes", "cache_disk_pinned_bytes"),
        ("/disk/counts/saves", "cache_disk_saves_total"),
        ("/disk/counts/saved_bytes", "cache_disk_saved_bytes_total"),
        ("/disk/counts/dropped_saves", "cache_disk_dropped_saves_total"),
        ("/disk/counts/evicted_parts", "cache_disk_evicted_parts_total"),
        ("/disk/counts/damaged_parts", "cache_disk_damaged_parts_total"),
        ("/disk/counts/loads", "cache_disk_loads_total"),
        ("/disk/counts/loaded_bytes", "cache_disk_loaded_bytes_total"),
    ] {
        let value = cache.pointer(path).and_then(Value::as_f64).expect(path);
        assert_eq!(of_model(&metrics, name), value, "{name}");
    }
    let of = |kind: &str| cache["disk"][kind]["bytes"].as_f64().unwrap();
    let bytes = of("rows") + of("states") + of("other_models");
    assert_eq!(of_model(&metrics, "cache_disk_bytes"), bytes);
    assert_eq!(of_model(&metrics, "cache_disk_saving"), 1.0);

    // The engine's counts equal the sums over replies.
    let counts = [&cache["counts"]["prompt_tokens"], &cache["counts"]["cached_tokens"]];
    assert_eq!(counts.map(|count| count.as_u64().unwrap()), usage[..2]);
    for (kind, tokens) in ["prompt", "cached", "completion"].iter().zip(usage) {
        assert_eq!(metrics[&format!("steersman_{kind}_tokens_total")], tokens as f64, "{kind}");
    }
    assert_eq!(metrics["steersman_requests_total{status=\"2xx\"}"], 2.0);
}

/// The log of all threads.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn second_server_on_one_folder_runs_without_the_prefix_store_and_logs_it_once() {
    let log = Log::default();
    let writer = log.clone();
    // Global, since the engine has its own thread. No other test in this process logs this line about this file.
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
    let data = tempfile::tempdir().unwrap();
    let first = start(data.path());
    let second = start(data.path());

    let (with_disk, without) = (app(&first), app(&second));
    assert_ne!(cache(&with_disk).await["disk"], Value::Null);
    let question = "What is the capital of Italy?";
    let mut replies = Vec::new();
    for app in [&with_disk, &without, &without] {
        replies.push(chat(app, question).await);
    }
    for reply in &replies[1..] {
        assert_eq!(reply["choices"], replies[0]["choices"]);
    }
    let cached = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!(cached(&replies[1]), 0, "the servers do not share memory");
    assert!(cached(&replies[2]).as_u64() > Some(100), "the second server has its own memory");
    let report = cache(&without).await;
    assert_eq!(report["disk"], Value::Null);
    assert_eq!(report["counts"]["hits"], 1);
    let metrics = samples(&get(&without, "/metrics").await);
    // The series of the alert: those of the store are missing, as nothing was opened.
    assert_eq!(of_model(&metrics, "cache_disk_saving"), 0.0);
    assert_eq!(of_model(&metrics, "cache_disk_enabled"), 1.0);

    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let file = data.path().join("state.redb");
    let ours = |line: &&str| line.contains(file.to_str().unwrap());
    let lines: Vec<_> =
        log.lines().filter(|l| l.contains("without the disk tier")).filter(ours).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("WARN"), "{log}");
}
