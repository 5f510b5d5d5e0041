//! Profiles with their own keys and limits.

use std::collections::BTreeMap;

use axum::http::header;
use serde_json::json;
use steersman::config::{ProfileAccess, ServerConfig};

use crate::connection::{Lines, until};
use crate::*;

/// A server with a profile `strict` that has a key and a limit of one request.
fn config(server_keys: &[&str]) -> ServerConfig {
    let strict = ProfileAccess {
        api_keys: vec!["sk-strict".into()],
        requests: 1,
        ..ProfileAccess::default()
    };
    ServerConfig {
        api_keys: server_keys.iter().map(|key| (*key).into()).collect(),
        profiles: BTreeMap::from([
            ("default".into(), ProfileAccess::default()),
            ("strict".into(), strict),
        ]),
        ..ServerConfig::default()
    }
}

/// Digests of key and user, metadata, and the headers that the profile grants.
#[tokio::test]
async fn policies_see_who_sends_a_request_but_no_key() {
    let mut config = config(&["sk-all"]);
    config.profiles.get_mut("strict").unwrap().policy_headers =
        vec!["x-team".into(), "x-none".into()];
    let (app, seen) = app_with(&config, answer);
    // printf %s TEXT | sha256sum | cut -c1-16
    let send_as = async |key: &str, extra: Value| {
        let mut request = post(body(extra).to_string());
        let headers = request.headers_mut();
        headers.insert(header::AUTHORIZATION, format!("Bearer {key}").parse().unwrap());
        headers.insert("x-team", "red".parse().unwrap());
        headers.insert("x-other", "secret".parse().unwrap());
        assert_eq!(send(&app, request).await.status(), 200);
        seen.last().caller
    };
    let labels = json!({"user": "ann", "metadata": {"b": "2", "a": "1", "n": 3}});
    let caller = send_as("sk-strict", labels.clone()).await;
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(
        (caller.key, caller.user),
        ("f6b725819a96637a".to_string(), "49915e0d7d4b402e".to_string())
    );
    assert_eq!(caller.metadata, [pair("a", "1"), pair("b", "2")]);
    assert_eq!(caller.headers, [pair("x-team", "red")]);
    assert_eq!(seen.last().running_limit, 1, "limits.requests counts what a request splits into");
    // Another profile grants no headers.
    let caller = send_as("sk-all", labels).await;
    assert_eq!((caller.key, &caller.headers[..]), ("a046e4925c1c5162".to_string(), &[][..]));
    let caller = send_as("sk-all", json!({"safety_identifier": "bob"})).await;
    assert_eq!((caller.user, &caller.metadata[..]), ("81b637d8fcd2c6da".to_string(), &[][..]));
    let many: serde_json::Map<_, _> =
        (10..99).map(|i| (format!("{i}{}", "n".repeat(99)), "ä".repeat(300).into())).collect();
    let caller = send_as("sk-all", json!({"metadata": many})).await;
    assert_eq!((caller.user.as_str(), caller.metadata.len()), ("", 16));
    assert_eq!((caller.metadata[0].0.len(), caller.metadata[0].1.len()), (64, 512));
    // Without configured keys, the key of a request does not identify its sender.
    let (open, seen) = crate::app(answer);
    let mut request = post(body(json!({})).to_string());
    request.headers_mut().insert(header::AUTHORIZATION, "Bearer sk-any".parse().unwrap());
    send(&open, request).await;
    assert_eq!(seen.last().caller, Default::default());
    // Anthropic's clients name the user in the metadata.
    let body = json!({"model": "owner/tiny", "max_tokens": 5, "metadata": {"user_id": "eve"},
        "messages": [{"role": "user", "content": "Hi"}]});
    let request = axum::http::Request::post("/v1/messages")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body.to_string()))
        .unwrap();
    assert_eq!(send(&open, request).await.status(), 200);
    assert_eq!(seen.last().caller.user, "85262adf74518bbb".to_string());
}

/// Sends a chat request; returns the status, and the profile or the error code.
async fn ask(app: &Router, key: &str, model: &str, profile: &str) -> (u16, String) {
    let mut request = post(body(json!({"model": model})).to_string());
    if !key.is_empty() {
        let value = format!("Bearer {key}").parse().unwrap();
        request.headers_mut().insert(header::AUTHORIZATION, value);
    }
    if !profile.is_empty() {
        request.headers_mut().insert("x-steersman-profile", profile.parse().unwrap());
    }
    let response = send(app, request).await;
    let status = response.status().as_u16();
    let reply = json_of(response).await;
    let result =
        if status == 200 { &reply["steersman"]["profile"] } else { &reply["error"]["code"] };
    (status, result.as_str().unwrap().to_string())
}

#[tokio::test]
async fn key_of_a_profile_selects_it_and_opens_no_other() {
    let (model, strict, default) = ("owner/tiny", "owner/tiny@strict", "owner/tiny@default");
    for (server_keys, cases) in [
        (
            &["sk-all"][..],
            vec![
                ("sk-strict", model, "", 200, "strict"),
                ("sk-strict", strict, "", 200, "strict"),
                ("sk-strict", model, "strict", 200, "strict"),
                ("sk-strict", model, "default", 403, "profile_not_allowed"),
                ("sk-strict", default, "", 403, "profile_not_allowed"),
                ("sk-all", model, "", 200, "default"),
                ("sk-all", strict, "", 200, "strict"),
                ("sk-none", model, "", 401, "invalid_api_key"),
                ("", model, "", 401, "invalid_api_key"),
            ],
        ),
        (
            // Without server keys everyone may use the profiles that have no key.
            &[][..],
            vec![
                ("", model, "", 200, "default"),
                ("none", model, "", 200, "default"),
                ("sk-none", model, "", 401, "invalid_api_key"),
                ("", strict, "", 403, "profile_not_allowed"),
                ("none", model, "strict", 403, "profile_not_allowed"),
                ("sk-none", model, "strict", 401, "invalid_api_key"),
                ("sk-strict", model, "", 200, "strict"),
            ],
        ),
    ] {
        let (app, _) = app_with(&config(server_keys), answer);
        for (key, model, profile, status, result) in cases {
            let got = ask(&app, key, model, profile).await;
            assert_eq!(got, (status, result.to_string()), "{key:?} {model} {profile:?}");
        }
    }
}

/// Clients that need no key send `none`, or any other text where nobody has a key. Beside profiles with keys, that text may
/// be a mistyped key.
#[tokio::test]
async fn an_unknown_key_is_refused_beside_profiles_with_keys() {
    let answer_to = async |app: &Router, key: &str| {
        let mut request = post(body(json!({})).to_string());
        let value = format!("Bearer {key}").parse().unwrap();
        request.headers_mut().insert(header::AUTHORIZATION, value);
        let response = send(app, request).await;
        (response.status().as_u16(), json_of(response).await["error"]["message"].to_string())
    };
    let (app, _) = app_with(&config(&[]), answer);
    let (status, message) = answer_to(&app, "sk-strcit").await;
    assert_eq!(status, 401, "{message}");
    assert!(message.contains("correct the key, or leave it out"), "{message}");
    for key in ["none", "", "EMPTY", "ollama", "sk-strict"] {
        assert_eq!(answer_to(&app, key).await.0, 200, "{key}");
    }
    let (open, _) = app_with(&ServerConfig::default(), answer);
    assert_eq!(answer_to(&open, "sk-any").await.0, 200, "no profile has keys");
}

#[tokio::test]
async fn models_are_listed_with_the_profiles_that_the_caller_may_use() {
    let (app, _) = app_with(&config(&["sk-all"]), answer);
    let (open, _) = app_with(&config(&[]), answer);
    let strict = "owner/tiny@strict".to_string();
    for (app, key, lists_strict) in
        [(&app, "sk-all", true), (&app, "sk-strict", true), (&open, "none", false)]
    {
        let request = axum::http::Request::get("/v1/models")
            .header(header::AUTHORIZATION, format!("Bearer {key}"))
            .body(Body::empty())
            .unwrap();
        let listed = json_of(send(app, request).await).await;
        let ids = listed["data"].as_array().unwrap().iter().map(|model| model["id"].to_string());
        let ids: Vec<_> = ids.collect();
        assert!(ids.contains(&"\"owner/tiny\"".to_string()), "{ids:?}");
        assert_eq!(ids.contains(&format!("\"{strict}\"")), lists_strict, "{key}: {ids:?}");
    }
}

#[tokio::test]
async fn profile_limits_concurrent_requests() {
    let slow = || {
        let answer = answer();
        std::iter::once(Wait(Duration::from_millis(300))).chain(answer).collect()
    };
    let (app, _) = app_with(&config(&["sk-all"]), slow);
    let strict = || ask(&app, "sk-strict", "owner/tiny", "");
    let other = ask(&app, "sk-all", "owner/tiny", "");
    let (first, second, other) = tokio::join!(strict(), strict(), other);
    assert_eq!(first, (200, "strict".into()));
    assert_eq!(second, (429, "too_many_requests".into()));
    assert_eq!(other, (200, "default".into()), "the limit is that of the profile");
    assert_eq!(strict().await.0, 200, "the permit is free again");
}

/// Before, it named no profile, since the profile was recorded after admission.
#[tokio::test]
async fn log_line_of_a_429_names_the_profile() {
    let (app, seen) = app_with(&config(&["sk-all"]), || vec![UntilCancelled]);
    let lines = Lines::default();
    let _guard = lines.capture();
    let second = async {
        until(|| !seen.requests.lock().unwrap().is_empty()).await;
        ask(&app, "sk-strict", "owner/tiny", "").await
    };
    tokio::select! {
        first = ask(&app, "sk-strict", "owner/tiny", "") => panic!("{first:?}"),
        second = second => assert_eq!(second, (429, "too_many_requests".into())),
    }
    let log = lines.text();
    let line = log.lines().find(|line| line.contains("too_many_requests")).expect(&log);
    assert!(line.contains("profile=\"strict\""), "{line}");
}

#[tokio::test]
async fn disconnected_client_releases_its_permit() {
    let (app, seen) = app_with(&config(&["sk-all"]), || vec![UntilCancelled]);
    let disconnected =
        tokio::time::timeout(Duration::from_millis(200), ask(&app, "sk-strict", "owner/tiny", ""));
    assert!(disconnected.await.is_err());
    seen.wait_for_cancellation().await;
    let again =
        tokio::time::timeout(Duration::from_millis(200), ask(&app, "sk-strict", "owner/tiny", ""));
    assert!(again.await.is_err(), "the request waits for the engine and is not rejected");
}
