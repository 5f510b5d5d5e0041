//! Three models that do not fit together, with real engines: every request is answered, and no memory is lost.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use mlx_rs::memory::active_memory;
use serde_json::{Value, json};
use steersman::config::{OnDemandConfig, ServerConfig};
use steersman::models::{self, Loaded};
use steersman_models::facts::Facts;
use steersman_tests::{config, scaled, tiny_model};
use tower::ServiceExt;

use super::is_alone;

const NAMES: [&str; 3] = ["one", "two", "three"];

/// Requests to a model before the next one's turn.
const BURST: usize = 20;

/// Interval and most polls until models that are not used have left.
const POLL: Duration = Duration::from_millis(50);
const POLLS: usize = 1200;

/// A server with the bundled model, and the smallest model under three names, of which two fit. They leave
/// after a second.
fn load(folder: &Path, data: &Path) -> (Loaded, ServerConfig) {
    let mut engine = config();
    // Loading measures them, which takes time.
    engine.speculation.drafts.clear();
    let engine = engine.check().unwrap();
    let mut on_demand = BTreeMap::new();
    for name in NAMES {
        let folder = folder.join(name);
        fs::create_dir(&folder).unwrap();
        tiny_model(&folder);
        let path = folder.to_str().unwrap().to_string();
        on_demand.insert(name.into(), OnDemandConfig { path, keep_alive_s: 1, pinned: false });
    }
    let numbers = models::numbers(&engine).unwrap();
    let bytes = |folder: &Path| Facts::read(folder).unwrap().weight_bytes(numbers);
    let (bundled, each) = (bytes(&steersman_tests::bundled_model()), bytes(&folder.join("one")));
    let server = ServerConfig {
        models: on_demand,
        models_bytes: bundled + 2 * each + each / 2,
        aliases: [("gpt".into(), "two".into())].into(),
        ..ServerConfig::default()
    };
    let policies = steersman_tests::served_policies(&engine, data).unwrap();
    (models::load(engine, &server, data, &policies, steersman_engine::start).unwrap(), server)
}

async fn json_of(app: &Router, request: Request<Body>) -> (StatusCode, Value) {
    let response = app.clone().oneshot(request).await.unwrap();
    let status = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&bytes).unwrap())
}

async fn ask(app: Router, model: &'static str, number: usize) -> (StatusCode, Value) {
    let body = json!({
        "model": model, "max_tokens": 4, "temperature": 0,
        "messages": [{"role": "user", "content": format!("w{} w2 w3", number % 7)}],
    });
    let request = Request::post("/v1/chat/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body.to_string()));
    json_of(&app, request.unwrap()).await
}

/// Number of threads of engines, with those of MLX, which are named after them; 0 if the system does not tell. Fault A9:
/// each load left one behind, 107 after 101 loads.
fn engine_threads() -> usize {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let names = threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|name| name.trim() == "engine").count()
}

/// `/health` of each model on demand.
async fn health(app: &Router) -> Vec<Value> {
    let (_, health) = json_of(app, Request::get("/health").body(Body::empty()).unwrap()).await;
    health["models"].as_array().unwrap()[1..].to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_alternate_between_models_that_do_not_fit_together() {
    if !is_alone(module_path!(), "requests_alternate_between_models_that_do_not_fit_together") {
        return;
    }
    let (folder, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let paths = (folder.path().to_path_buf(), data.path().to_path_buf());
    let loading = tokio::task::spawn_blocking(move || load(&paths.0, &paths.1));
    let (Loaded { models, threads, .. }, server) = loading.await.unwrap();
    let app = steersman::app(models.clone(), &server);
    let before = active_memory().unwrap();

    let mut expected: BTreeMap<(&str, usize), Value> = BTreeMap::new();
    let mut threads_at_first = 0;
    for burst in 0..scaled(200) / BURST {
        // The first of each burst are asked at once, with one for the model before.
        let (model, previous) = (NAMES[burst % 3], NAMES[(burst + 2) % 3]);
        let name = if model == "two" && burst % 2 == 0 { "gpt" } else { model };
        let asked: Vec<_> = (0..BURST)
            .map(|i| (if i == 1 { previous } else { name }, i))
            .map(|(model, i)| (model, i, tokio::spawn(ask(app.clone(), model, i))))
            .collect();
        for (asked_for, number, reply) in asked {
            let (status, reply) = reply.await.unwrap();
            assert_eq!(status, StatusCode::OK, "{asked_for}: {reply}");
            // A model that was loaded again says the same.
            let answer = reply["choices"][0]["message"]["content"].clone();
            let model = if asked_for == "gpt" { "two" } else { asked_for };
            let known = expected.entry((model, number % 7)).or_insert_with(|| answer.clone());
            assert_eq!(*known, answer, "{asked_for} {number}");
        }
        if burst == 0 {
            threads_at_first = engine_threads();
        }
        let loaded = health(&app).await.iter().filter(|model| model["state"] == "loaded").count();
        assert!(loaded <= 2, "{loaded} models are loaded, and two fit");
    }

    let mut last = health(&app).await;
    for _ in 0..POLLS {
        if last.iter().all(|model| model["state"] == "on disk") {
            break;
        }
        tokio::time::sleep(POLL).await;
        last = health(&app).await;
    }
    let count = |key: &str| last.iter().map(|model| model[key].as_u64().unwrap()).sum::<u64>();
    assert!(
        last.iter().all(|model| model["requests"] == 0 && model["state"] == "on disk"),
        "{last:?}"
    );
    assert!(count("loads") > 3 && count("loads") == count("unloads"), "{last:?}");
    assert_eq!(active_memory().unwrap(), before, "all arrays of models that left are freed");
    // One engine more may have run at the same time since, on a thread with one of MLX.
    let now = engine_threads();
    assert!(now <= threads_at_first + 2, "{threads_at_first} threads became {now}");
    for name in NAMES {
        assert!(data.path().join(format!("state-{name}.redb")).is_file(), "{name}");
    }
    assert!(models.take_threads().is_empty());
    models.engines().iter().for_each(steersman_engine::Engine::stop);
    drop((app, models));
    tokio::task::spawn_blocking(|| threads.into_iter().for_each(|t| t.join().unwrap()))
        .await
        .unwrap();
}
