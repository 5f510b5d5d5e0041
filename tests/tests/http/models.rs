//! Servers with several models: each profile uses its own.

use axum::http::header;
use serde_json::json;
use steersman::config::ServerConfig;
use steersman::models::Models;

use crate::*;

/// `owner/tiny` for the profiles `default` and `strict`, `large@v2` for `agent` and `coder`.
fn two() -> (Router, Arc<Seen>, Arc<Seen>) {
    let (tiny, of_tiny) = engine(8, answer);
    let (large, of_large) = engine_of("large@v2", 8, answer);
    let mut models = Models::from(tiny);
    models.add(large, &["agent".into(), "coder".into()]);
    (steersman::app(models, &ServerConfig::default()), of_tiny, of_large)
}

fn get(path: &str) -> axum::http::Request<Body> {
    axum::http::Request::get(path).body(Body::empty()).unwrap()
}

#[tokio::test]
async fn profile_uses_its_own_model() {
    let (app, of_tiny, of_large) = two();
    for (model, header, expected) in [
        ("owner/tiny", "", Ok(("default", false))),
        ("owner/tiny@strict", "", Ok(("strict", false))),
        ("large@v2@agent", "", Ok(("agent", true))),
        ("large@v2", "coder", Ok(("coder", true))),
        ("large@v2@coder", "coder", Ok(("coder", true))),
        ("large@v2", "", Err((404, "model_not_found"))),
        ("owner/tiny", "agent", Err((404, "model_not_found"))),
        ("owner/tiny@agent", "", Err((404, "model_not_found"))),
        ("large@v2@strict", "", Err((404, "model_not_found"))),
        ("large@v2@agent", "coder", Err((400, "invalid_value"))),
        ("large@v2", "none", Err((404, "profile_not_found"))),
        ("large", "", Err((404, "model_not_found"))),
    ] {
        let mut request = post(body(json!({"model": model})).to_string());
        if !header.is_empty() {
            request.headers_mut().insert("x-steersman-profile", header.parse().unwrap());
        }
        let before = [&of_tiny, &of_large].map(|seen| seen.requests.lock().unwrap().len());
        let response = send(&app, request).await;
        let status = response.status().as_u16();
        let reply = json_of(response).await;
        let received: Vec<_> = [&of_tiny, &of_large]
            .iter()
            .zip(before)
            .map(|(seen, before)| seen.requests.lock().unwrap().len() - before)
            .collect();
        match expected {
            Ok((profile, large)) => {
                assert_eq!(reply["steersman"]["profile"], profile, "{model} {header}: {reply}");
                assert_eq!(reply["model"], model);
                assert_eq!(received, [usize::from(!large), usize::from(large)], "{model} {header}");
            }
            Err((code, name)) => {
                assert_eq!((status, &reply["error"]["code"]), (code, &json!(name)), "{reply}");
                assert_eq!(received, [0, 0]);
            }
        }
    }
}

/// The error listed what is served, and left the comparison to the reader.
#[tokio::test]
async fn the_model_or_profile_that_was_meant_is_named() {
    let (app, _, _) = two();
    for (model, header, meant) in [
        ("owner/tny", "", "owner/tiny"),
        ("owner/tiny@strct", "", "strict"),
        ("large@v2", "codr", "coder"),
    ] {
        let mut request = post(body(json!({"model": model})).to_string());
        if !header.is_empty() {
            request.headers_mut().insert("x-steersman-profile", header.parse().unwrap());
        }
        let reply = json_of(send(&app, request).await).await;
        let message = reply["error"]["message"].as_str().unwrap();
        assert!(message.ends_with(&format!("did you mean `{meant}`?")), "{message}");
    }
    let listed = json_of(send(&app, get("/v1/models/owner/tny")).await).await;
    let message = listed["error"]["message"].as_str().unwrap();
    assert!(message.ends_with("did you mean `owner/tiny`?"), "{message}");
}

#[tokio::test]
async fn absent_model_is_that_of_the_profile() {
    let absent = |stream: bool| {
        let mut body = body(json!({"stream": stream}));
        body.as_object_mut().unwrap().remove("model");
        body
    };
    let (one, seen) = app(answer);
    for body in [absent(false), body(json!({"model": null}))] {
        let (status, reply) = chat(&one, body).await;
        assert_eq!((status, &reply["model"]), (StatusCode::OK, &json!("owner/tiny")), "{reply}");
        assert_eq!(seen.last().profile, "default");
    }
    let mut request = post(absent(false).to_string());
    request.headers_mut().insert("x-steersman-profile", "strict".parse().unwrap());
    assert_eq!(send(&one, request).await.status(), StatusCode::OK);
    assert_eq!(seen.last().profile, "strict");

    let (several, _, _) = two();
    let (status, reply) = chat(&several, absent(false)).await;
    assert_eq!((status, &reply["model"]), (StatusCode::OK, &json!("owner/tiny")), "{reply}");
    let mut request = post(absent(false).to_string());
    request.headers_mut().insert("x-steersman-profile", "coder".parse().unwrap());
    let reply = json_of(send(&several, request).await).await;
    assert_eq!(reply["model"], "large@v2", "{reply}");
}

#[tokio::test]
async fn every_model_is_listed_and_reports_its_own_cache() {
    let (app, _, _) = two();
    let list = json_of(send(&app, get("/v1/models")).await).await;
    let names: Vec<_> = list["data"].as_array().unwrap().iter().map(|m| &m["id"]).collect();
    let expected = ["owner/tiny", "large@v2@agent", "large@v2@coder", "owner/tiny@strict"];
    assert_eq!(names, expected);
    for name in expected {
        let model = json_of(send(&app, get(&format!("/v1/models/{name}"))).await).await;
        assert_eq!(model["id"], name);
    }
    for (path, status) in [
        ("/v1/cache", 200),
        ("/v1/cache?model=large@v2", 200),
        ("/v1/cache?model=none", 404),
        ("/v1/models/owner/tiny@agent", 404),
    ] {
        assert_eq!(send(&app, get(path)).await.status().as_u16(), status, "{path}");
    }
    let response = send(&app, get("/metrics")).await;
    assert!(response.headers().contains_key(header::CONTENT_TYPE));
    let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
    for model in ["owner/tiny", "large@v2"] {
        assert!(text.contains(&format!("steersman_queue_length{{model=\"{model}\"}} 0")), "{text}");
    }
    let health = json_of(send(&app, get("/health")).await).await;
    assert_eq!(health["model"], "owner/tiny");
}
