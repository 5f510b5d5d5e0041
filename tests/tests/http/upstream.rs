//! Models of an upstream, in every protocol. The crate `steersman-upstream` has the tests of what upstreams do; here they
//! are one model among others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::Response;
use axum::routing::{get, post as post_route};
use axum::{Json, Router};
use serde_json::{Value, json};
use steersman::config::{ProfileAccess, ServerConfig};
use steersman::models::Models;
use steersman::wiring::Wiring;
use steersman_upstream::{UpstreamConfig, WithoutContinuation};
use tokio::net::TcpListener;

use super::{answer, bytes, chat, data, engine, json_of, post, send};

const KEY: &str = "sk-upstream-0123456789abcdef";

/// What the upstream answers, and what it was asked.
#[derive(Clone)]
struct Upstream {
    status: StatusCode,
    kind: &'static str,
    reply: String,
    seen: Arc<Mutex<Vec<Value>>>,
}

impl Upstream {
    /// One that streams an answer with reasoning.
    fn that_answers() -> Self {
        let chunk = |delta: Value, reason: Value| {
            format!(
                "data: {}\n\n",
                json!({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
            )
        };
        let usage = json!({"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 10}, "completion_tokens_details": {"reasoning_tokens": 4}}});
        let reply = [
            chunk(json!({"role": "assistant", "content": ""}), Value::Null),
            chunk(json!({"reasoning_content": "Italy, so "}), Value::Null),
            chunk(json!({"content": "Rome"}), Value::Null),
            chunk(json!({"content": "."}), "stop".into()),
            format!("data: {usage}\n\ndata: [DONE]\n\n"),
        ];
        let (status, kind) = (StatusCode::OK, "text/event-stream");
        Self { status, kind, reply: reply.concat(), seen: Arc::default() }
    }

    /// One that fails with this message.
    fn that_fails(status: StatusCode, message: &str) -> Self {
        let reply = json!({"error": {"message": message}}).to_string();
        Self { status, kind: "application/json", reply, seen: Arc::default() }
    }

    async fn serve(self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let models = json!({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]});
        let reply = |State(upstream): State<Self>, Json(body): Json<Value>| async move {
            upstream.seen.lock().unwrap().push(body);
            let response = Response::builder().status(upstream.status);
            response
                .header(header::CONTENT_TYPE, upstream.kind)
                .body(Body::from(upstream.reply))
                .unwrap()
        };
        let router = Router::new()
            .route("/v1/models", get(move || async move { Json(models) }))
            .route("/v1/chat/completions", post_route(reply))
            .with_state(self);
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    }
}

/// An app with a local model and an upstream, which `change` configures further.
async fn app(upstream: Upstream, change: impl FnOnce(&mut ServerConfig)) -> Router {
    wired(upstream, change, Wiring::default()).await
}

/// As [`app`], with this wiring.
async fn wired(
    upstream: Upstream,
    change: impl FnOnce(&mut ServerConfig),
    wiring: Wiring,
) -> Router {
    let url = upstream.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let key_file = folder.path().join("key");
    std::fs::write(&key_file, KEY).unwrap();
    let config = UpstreamConfig {
        url,
        key_file,
        retries: 0,
        without_continuation: WithoutContinuation::Ignore,
        ..UpstreamConfig::default()
    };
    let granted = ProfileAccess { upstreams: vec!["work".into()], ..ProfileAccess::default() };
    let mut server = ServerConfig {
        upstreams: BTreeMap::from([("work".to_string(), config)]),
        profiles: BTreeMap::from([("default".to_string(), granted)]),
        ..ServerConfig::default()
    };
    change(&mut server);
    let (engine, _) = engine(8, answer);
    let mut models = Models::from(engine);
    let settings = server.clone();
    // Asks the upstream, which runs on this thread.
    let models = tokio::task::spawn_blocking(move || {
        models.add_upstreams(&settings, &BTreeMap::new()).unwrap();
        models
    });
    let models = models.await.unwrap();
    drop(folder);
    steersman::app_with(models, &server, wiring)
}

fn asks() -> Value {
    json!({"model": "work/m", "messages": [{"role": "user", "content": "The capital of Italy?"}], "max_tokens": 100})
}

fn post_to(path: &str, body: &Value) -> axum::http::Request<Body> {
    let request = axum::http::Request::post(path).header(header::CONTENT_TYPE, "application/json");
    request.body(Body::from(body.to_string())).unwrap()
}

/// Charts of a server whose upstreams answer had no token.
#[tokio::test]
async fn the_history_has_tokens_of_upstreams() {
    let every = Duration::from_millis(20);
    let wiring = Wiring { samples: Some(every), ..Wiring::default() };
    let app = wired(Upstream::that_answers(), |_| (), wiring).await;
    assert_eq!(chat(&app, asks()).await.0, 200);
    let mut history = Value::Null;
    let mut rates = Vec::new();
    for _ in 0..1000 {
        let request = axum::http::Request::get("/v1/history").body(Body::empty()).unwrap();
        history = json_of(send(&app, request).await).await;
        let samples = history["samples"].as_array().unwrap().iter();
        rates = samples.map(|sample| sample["tokens_per_second"].as_f64().unwrap()).collect();
        if rates.iter().any(|rate| *rate > 0.0) {
            break;
        }
        tokio::time::sleep(every).await;
    }
    // Each token is counted once.
    assert_eq!(rates.iter().filter(|rate| **rate > 0.0).count(), 1, "{history}");
}

#[tokio::test]
async fn every_protocol_works_over_an_upstream() {
    let upstream = Upstream::that_answers();
    let seen = upstream.seen.clone();
    let app = app(upstream, |_| ()).await;
    let (status, reply) = chat(&app, asks()).await;
    assert_eq!(status, 200, "{reply}");
    let message = &reply["choices"][0]["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("Rome."), &json!("Italy, so "))
    );
    let usage = &reply["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(30), &json!(12)));
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 10);
    assert_eq!(reply["model"], "work/m");

    let messages = asks()["messages"].clone();
    let body = json!({"model": "work/m", "input": messages});
    let reply = json_of(send(&app, post_to("/v1/responses", &body)).await).await;
    assert!(reply["output"].to_string().contains("Rome."), "{reply}");
    assert_eq!(reply["usage"]["input_tokens"], 30);

    let request = axum::http::Request::post("/v1/messages")
        .header(header::CONTENT_TYPE, "application/json")
        .header("anthropic-version", "2023-06-01");
    let request = request.body(Body::from(asks().to_string())).unwrap();
    let reply = json_of(send(&app, request).await).await;
    assert!(reply["content"].to_string().contains("Rome."), "{reply}");
    assert_eq!(reply["usage"]["input_tokens"], 20);
    assert_eq!(reply["usage"]["cache_read_input_tokens"], 10);

    let body = json!({"model": "work/m", "messages": messages, "stream": false});
    let reply = json_of(send(&app, post_to("/api/chat", &body)).await).await;
    assert_eq!(reply["message"]["content"], "Rome.", "{reply}");
    assert_eq!(reply["prompt_eval_count"], 30);

    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 4);
    assert!(seen.iter().all(|body| body["model"] == "m" && body["stream"] == true));
}

#[tokio::test]
async fn a_stream_passes_on_and_has_the_counts_of_its_end() {
    let app = app(Upstream::that_answers(), |_| ()).await;
    let mut body = asks();
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let response = send(&app, post(body.to_string())).await;
    // Its state is not here.
    assert!(!response.headers().contains_key("x-steersman-prefix"));
    let stream = bytes(response).await;
    let chunks = data(&stream);
    let texts: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(texts, "Rome.");
    let usage = chunks.iter().find(|chunk| chunk["usage"].is_object()).unwrap();
    assert_eq!(usage["usage"]["prompt_tokens"], 30);
}

#[tokio::test]
async fn models_of_upstreams_are_listed_for_those_who_may_use_them() {
    let app = app(Upstream::that_answers(), |_| ()).await;
    let request = axum::http::Request::get("/v1/models").body(Body::empty()).unwrap();
    let listed = json_of(send(&app, request).await).await;
    let all = listed["data"].as_array().unwrap();
    let model =
        all.iter().find(|model| model["id"] == "work/m").unwrap_or_else(|| panic!("{listed}"));
    assert_eq!(model["state"], "upstream");
    let without = self::app(Upstream::that_answers(), |server| {
        server.profiles.get_mut("default").unwrap().upstreams.clear();
    });
    let without = without.await;
    let (status, reply) = chat(&without, asks()).await;
    assert_eq!((status.as_u16(), &reply["error"]["code"]), (404, &json!("model_not_found")));
    assert!(
        reply["error"]["message"].as_str().unwrap().contains("profiles.default.upstreams"),
        "{reply}"
    );
}

#[tokio::test]
async fn what_an_upstream_lacks_is_refused_by_the_name_of_the_field() {
    let app = app(Upstream::that_answers(), |server| {
        let upstream = server.upstreams.get_mut("work").unwrap();
        upstream.capabilities.sampling = Some(false);
    });
    let app = app.await;
    let mut body = asks();
    body["min_p"] = json!(0.1);
    let (status, reply) = chat(&app, body).await;
    assert_eq!((status.as_u16(), &reply["error"]["param"]), (400, &json!("min_p")));
    let request = post_to("/v1/embeddings", &json!({"model": "work/m", "input": "x"}));
    let reply = json_of(send(&app, request).await).await;
    assert_eq!(reply["error"]["param"], "input");
    let request = post_to("/tokenize", &json!({"model": "work/m", "prompt": "x"}));
    let reply = json_of(send(&app, request).await).await;
    assert!(reply["error"]["message"].as_str().unwrap().contains("the tokenizer"), "{reply}");
}

#[tokio::test]
async fn a_fallback_answers_for_an_upstream_that_fails() {
    let failing = Upstream::that_fails(StatusCode::INTERNAL_SERVER_ERROR, "out of memory");
    let app = app(failing, |server| {
        let upstream = server.upstreams.get_mut("work").unwrap();
        upstream.fallback = vec!["owner/tiny".into()];
        upstream.capabilities.earlier_reasoning = Some(false);
    });
    let app = app.await;
    let question = asks()["messages"].clone();
    // Of its reasoning there is a note, which came before the failure.
    let thought = json!({"role": "assistant", "content": "Hm.", "reasoning_content": "Italy?"});
    let later = json!([question[0], thought, question[0]]);
    for (stream, messages) in
        [(false, &question), (true, &question), (false, &later), (true, &later)]
    {
        let mut body = asks();
        body["messages"] = messages.clone();
        body["stream"] = stream.into();
        let text = bytes(send(&app, post(body.to_string())).await).await;
        let text = String::from_utf8(text.to_vec()).unwrap();
        assert!(text.contains("Rome") && text.contains("routed to `owner/tiny`"), "{text}");
    }
}

/// The client was told that a policy had routed its request to a model of which it knows nothing.
#[tokio::test]
async fn the_failure_of_an_upstream_stays_that_whatever_its_fallback_says() {
    let failing = Upstream::that_fails(StatusCode::INTERNAL_SERVER_ERROR, "out of memory");
    let app = app(failing, |server| {
        server.upstreams.get_mut("work").unwrap().fallback = vec!["no/such".into()];
    });
    let (status, reply) = chat(&app.await, asks()).await;
    assert_eq!((status.as_u16(), &reply["error"]["code"]), (502, &json!("upstream_failed")));
    assert!(reply["error"]["message"].as_str().unwrap().contains("out of memory"), "{reply}");
}

#[tokio::test]
async fn errors_of_upstreams_are_errors_here_and_no_reply_or_metric_has_their_key() {
    let quoting = format!("the key {KEY} and sk-upstream-0123****cdef");
    let mut said = String::new();
    for (status, expected, code) in [
        (400, 400, "refused_by_upstream"),
        (401, 502, "upstream_failed"),
        (429, 429, "upstream_busy"),
        (500, 502, "upstream_failed"),
        (503, 503, "upstream_unavailable"),
    ] {
        let upstream = Upstream::that_fails(StatusCode::from_u16(status).unwrap(), &quoting);
        let app = app(upstream, |_| ()).await;
        let (got, reply) = chat(&app, asks()).await;
        assert_eq!((got.as_u16(), &reply["error"]["code"]), (expected, &json!(code)), "{reply}");
        said += &reply.to_string();
        for path in ["/metrics", "/health", "/v1/models", "/v1/profiles", "/v1/requests"] {
            let request = axum::http::Request::get(path).body(Body::empty()).unwrap();
            said += &String::from_utf8_lossy(&bytes(send(&app, request).await).await);
        }
    }
    assert!(said.contains("steersman_upstream_failures_total"), "{said}");
    for part in [KEY, "sk-upstream", "0123456", "abcdef"] {
        assert!(!said.contains(part), "{part} is in {said}");
    }
}
