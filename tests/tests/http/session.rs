//! The one-time link: who has its token becomes an operator, once.

use axum::http::Request as ClientRequest;
use steersman::link::Link;

use crate::*;

/// A server that has printed a link; returns the token of it.
fn linked() -> (Router, String) {
    let (link, token) = Link::new().unwrap();
    let wiring = Wiring { link: Some(Arc::new(link)), ..Wiring::default() };
    (app_wired(&ServerConfig::default(), wiring, answer).0, token)
}

async fn open(app: &Router, body: &Value) -> (u16, Value) {
    let request = ClientRequest::post("/v1/session")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body.to_string()));
    let response = send(app, request.unwrap()).await;
    (response.status().as_u16(), json_of(response).await)
}

/// What `GET /v1/profiles` says of a key, and the status of an operation for operators.
async fn access(app: &Router, key: &str) -> (String, u16) {
    let request = |method: &str, path: &str| {
        let request = ClientRequest::builder()
            .method(method)
            .uri(path)
            .header(header::AUTHORIZATION, format!("Bearer {key}"));
        request.body(Body::empty()).unwrap()
    };
    let profiles = json_of(send(app, request("GET", "/v1/profiles")).await).await;
    let stopped = send(app, request("DELETE", "/v1/models/pull")).await;
    (profiles["access"]["key"].as_str().unwrap().into(), stopped.status().as_u16())
}

#[tokio::test]
async fn the_link_makes_an_operator_once() {
    let (app, token) = linked();
    assert_eq!(access(&app, &token).await, ("none".into(), 401), "the token is no key");
    let (status, session) = open(&app, &json!({"token": token})).await;
    assert_eq!(status, 200, "{session}");
    let key = session["key"].as_str().unwrap();
    // No download runs that could be stopped.
    assert_eq!(access(&app, key).await, ("operator".into(), 404));
    assert_eq!(access(&app, "").await, ("none".into(), 401));
    let (status, error) = open(&app, &json!({"token": token})).await;
    assert_eq!((status, &error["error"]["code"]), (401, &json!("invalid_link")));
    assert!(error["error"]["message"].as_str().unwrap().contains("was used before"), "{error}");
    assert_eq!(access(&app, key).await, ("operator".into(), 404), "the key stays");
    // Another process knows neither.
    let (other, _) = linked();
    assert_eq!(access(&other, key).await.0, "none");
}

#[tokio::test]
async fn other_tokens_open_nothing() {
    let (app, token) = linked();
    for (body, status, code) in [
        (json!({"token": ""}), 401, "invalid_link"),
        (json!({"token": token[..token.len() - 1]}), 401, "invalid_link"),
        (json!({"token": token.to_uppercase()}), 401, "invalid_link"),
        (json!({}), 400, "missing_required_parameter"),
        (json!({"token": 1}), 400, "missing_required_parameter"),
        (json!({"token": token, "key": "x"}), 400, "unknown_parameter"),
    ] {
        let (found, error) = open(&app, &body).await;
        assert_eq!((found, &error["error"]["code"]), (status, &json!(code)), "{body}: {error}");
    }
    let (without, _) = self::app(answer);
    assert_eq!(open(&without, &json!({"token": token})).await.0, 401);
    assert_eq!(open(&app, &json!({"token": token})).await.0, 200, "none of them used it up");
}

/// Anyone could send a body as large as those of clients, and keep these out while it was read and parsed.
#[tokio::test]
async fn a_body_without_a_key_is_small() {
    let (app, token) = linked();
    let (status, error) = open(&app, &json!({"token": "x".repeat(1 << 10)})).await;
    assert_eq!((status, &error["error"]["code"]), (413, &json!("request_too_large")), "{error}");
    assert_eq!(open(&app, &json!({"token": token})).await.0, 200);
}

/// A page of another site may send a request to this machine, but has no token and is refused
/// before.
#[tokio::test]
async fn pages_of_other_sites_are_refused() {
    let (app, token) = linked();
    let request = ClientRequest::post("/v1/session")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ORIGIN, "https://evil.test")
        .body(Body::from(json!({"token": token}).to_string()));
    assert_eq!(send(&app, request.unwrap()).await.status(), 403);
    assert_eq!(open(&app, &json!({"token": token})).await.0, 200);
}
