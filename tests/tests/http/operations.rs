//! Metrics and the cache report. `tests/operations.rs` tests them with the real engine.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use steersman_engine::Error;
use steersman_tests::samples;

use crate::*;

fn get(path: &str) -> axum::http::Request<Body> {
    axum::http::Request::get(path).body(Body::empty()).unwrap()
}

async fn metrics(app: &Router) -> BTreeMap<String, f64> {
    let response = send(app, get("/metrics")).await;
    assert_eq!(response.status(), StatusCode::OK);
    let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned();
    assert_eq!(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    samples(std::str::from_utf8(&bytes(response).await).unwrap())
}

fn out_of_memory() -> Vec<Act> {
    vec![Say(Event::Failed(Error::Array("no memory".into())))]
}

fn fails_late() -> Vec<Act> {
    let mut acts = vec![Say(Event::Answer("Ro".into()))];
    acts.extend(out_of_memory());
    acts
}

/// Also streams, including one that fails after its status of 200.
#[tokio::test]
async fn every_chat_request_is_counted_once_by_outcome() {
    for (script, extra, status) in [
        (answer as fn() -> Vec<Act>, json!({}), "2xx"),
        (answer, json!({"stream": true}), "2xx"),
        (answer, json!({"n": 0}), "4xx"),
        (out_of_memory, json!({}), "5xx"),
        (out_of_memory, json!({"stream": true}), "5xx"),
        (fails_late, json!({"stream": true}), "5xx"),
    ] {
        let (app, _) = app(script);
        bytes(send(&app, post(body(extra.clone()).to_string())).await).await;
        let metrics = metrics(&app).await;
        for class in ["2xx", "4xx", "5xx", "cancelled"] {
            let count = metrics[&format!("steersman_requests_total{{status=\"{class}\"}}")];
            assert_eq!(count, f64::from(u8::from(class == status)), "{extra} {class}");
        }
    }
}

#[tokio::test]
async fn disconnected_client_is_counted_as_cancelled() {
    let (app, seen) = app(|| vec![Say(Event::Answer("Ro".into())), UntilCancelled]);
    let response = send(&app, post(body(json!({"stream": true})).to_string())).await;
    drop(response);
    seen.wait_for_cancellation().await;
    let metrics = metrics(&app).await;
    assert_eq!(metrics["steersman_requests_total{status=\"cancelled\"}"], 1.0);
    assert_eq!(metrics["steersman_requests_total{status=\"2xx\"}"], 0.0);
}

#[tokio::test]
async fn tokens_of_successful_requests_are_summed() {
    let (app, _) = app(answer);
    for extra in [json!({}), json!({"stream": true}), json!({"n": 0})] {
        bytes(send(&app, post(body(extra).to_string())).await).await;
    }
    let metrics = metrics(&app).await;
    let Usage { prompt_tokens, cached_tokens, reasoning_tokens, answer_tokens, .. } = USAGE;
    for (name, each) in [
        ("prompt", prompt_tokens),
        ("cached", cached_tokens),
        ("completion", reasoning_tokens + answer_tokens),
    ] {
        assert_eq!(metrics[&format!("steersman_{name}_tokens_total")], f64::from(2 * each));
    }
}

#[tokio::test]
async fn queue_length_counts_waiting_requests() {
    let (app, _) = app(|| vec![UntilCancelled]);
    let clients: Vec<_> = (0..3)
        .map(|_| {
            let app = app.clone();
            tokio::spawn(async move { send(&app, post(body(json!({})).to_string())).await })
        })
        .collect();
    for _ in 0..1000 {
        // The third is running.
        if metrics(&app).await["steersman_queue_length{model=\"owner/tiny\"}"] == 2.0 {
            clients.iter().for_each(|client| client.abort());
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the queue never had two requests");
}

/// Before, connections of a server that loads were accepted and never answered.
#[tokio::test]
async fn a_server_that_loads_its_models_says_so() {
    let app = Arc::new(OnceLock::new());
    let server = steersman::serve::once_loaded(app.clone());
    let response = send(&server, get("/health")).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(json_of(response).await, json!({"status": "loading"}));
    let load = steersman_engine::loading::begin("tiny", "reading weights");
    let loading = json_of(send(&server, get("/health")).await).await;
    let expected = json!({
        "status": "loading", "model": "tiny", "stage": "reading weights", "fraction": null,
    });
    assert_eq!(loading, expected);
    let error = json_of(send(&server, post(body(json!({})).to_string())).await).await;
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("not ready yet: reading weights"), "{message}");
    drop(load);
    let mut request = post(body(json!({})).to_string());
    request.headers_mut().insert("x-request-id", "trace-7".parse().unwrap());
    let response = send(&server, request).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["x-request-id"], "trace-7");
    assert_eq!(response.headers()[header::RETRY_AFTER], "2");
    let error = json_of(response).await;
    assert_eq!(
        (&error["error"]["code"], &error["request_id"]),
        (&json!("server_loading"), &json!("trace-7"))
    );
    app.get_or_init(|| self::app(answer).0);
    assert_eq!(json_of(send(&server, get("/health")).await).await["status"], "ok");
    let response = send(&server, post(body(json!({})).to_string())).await;
    assert_eq!(response.status(), StatusCode::OK);
}

#[tokio::test]
async fn cache_and_metrics_require_a_key() {
    let config = ServerConfig { api_keys: vec!["sk-one".into()], ..ServerConfig::default() };
    let (app, _) = app_with(&config, answer);
    let mut text = String::new();
    for path in ["/v1/cache", "/metrics"] {
        assert_eq!(send(&app, get(path)).await.status(), StatusCode::UNAUTHORIZED, "{path}");
        let mut request = get(path);
        request.headers_mut().insert(header::AUTHORIZATION, "Bearer sk-one".parse().unwrap());
        let response = send(&app, request).await;
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
    }
    assert_eq!(samples(&text)["steersman_unauthorized_requests_total"], 2.0);
}

#[tokio::test]
async fn engine_without_a_prefix_store_reports_none() {
    let (app, _) = app(answer);
    let cache = json_of(send(&app, get("/v1/cache")).await).await;
    assert_eq!(cache["disk"], Value::Null);
    assert_eq!(cache["memory"], json!({"prefixes": 0, "states": 0, "bytes": 0, "budget_bytes": 0}));
    let metrics = metrics(&app).await;
    for series in ["saving", "enabled"] {
        assert_eq!(metrics[&format!("steersman_cache_disk_{series}{{model=\"owner/tiny\"}}")], 0.0);
    }
    assert!(
        !metrics.keys().any(|name| name.starts_with("steersman_cache_disk_bytes")),
        "there is no prefix store"
    );
}
