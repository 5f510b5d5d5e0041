//! Profiles with keys and bounds of their own.

use std::collections::BTreeMap;

use axum::http::header;
use serde_json::json;
use steersman::config::{ProfileAccess, ServerConfig};

use crate::*;

/// A server whose profile `strict` has a key and takes one request at a time.
fn config(server_keys: &[&str]) -> ServerConfig {
    let strict = ProfileAccess { api_keys: vec!["sk-strict".into()], requests: 1 };
    ServerConfig {
        api_keys: server_keys.iter().map(|key| (*key).into()).collect(),
        profiles: BTreeMap::from([
            ("default".into(), ProfileAccess::default()),
            ("strict".into(), strict),
        ]),
        ..ServerConfig::default()
    }
}

/// Asks with a key, by model and header; the status and the profile or the error's code.
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
    let told = if status == 200 { &reply["steersman"]["profile"] } else { &reply["error"]["code"] };
    (status, told.as_str().unwrap().to_string())
}

#[tokio::test]
async fn a_key_chooses_its_profile_and_opens_no_other() {
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
            // Without keys of the server everyone may come in, but not into a profile with a key.
            &[][..],
            vec![
                ("", model, "", 200, "default"),
                ("sk-none", model, "", 200, "default"),
                ("", strict, "", 403, "profile_not_allowed"),
                ("sk-none", model, "strict", 403, "profile_not_allowed"),
                ("sk-strict", model, "", 200, "strict"),
            ],
        ),
    ] {
        let (app, _) = app_with(&config(server_keys), answer);
        for (key, model, profile, status, told) in cases {
            let got = ask(&app, key, model, profile).await;
            assert_eq!(got, (status, told.to_string()), "{key:?} {model} {profile:?}");
        }
    }
}

#[tokio::test]
async fn a_profile_takes_as_many_requests_at_a_time_as_it_may() {
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
    assert_eq!(other, (200, "default".into()), "the bound is the profile's own");
    assert_eq!(strict().await.0, 200, "the place is free again");
}

#[tokio::test]
async fn a_client_that_hangs_up_gives_its_place_back() {
    let (app, seen) = app_with(&config(&["sk-all"]), || vec![UntilCancelled]);
    let hung_up =
        tokio::time::timeout(Duration::from_millis(200), ask(&app, "sk-strict", "owner/tiny", ""));
    assert!(hung_up.await.is_err());
    seen.a_cancellation().await;
    let again =
        tokio::time::timeout(Duration::from_millis(200), ask(&app, "sk-strict", "owner/tiny", ""));
    assert!(again.await.is_err(), "it waits for the engine and is not refused");
}
