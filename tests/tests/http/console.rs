//! The console and the routes that it needs: the page, the requests, one of them as it runs, the profiles.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use axum::http::Request as HttpRequest;
use steersman::config::ProfileAccess;

use crate::*;

/// A server with an operator's key, a key for all profiles, and one for `strict`.
fn guarded() -> ServerConfig {
    let mut strict =
        ProfileAccess { api_keys: vec!["sk-strict".into()], ..ProfileAccess::default() };
    strict.settings.policy.params = BTreeMap::from([("hint".into(), "hidden".into())]);
    ServerConfig {
        api_keys: vec!["sk-all".into()],
        admin_keys: vec!["sk-operator".into()],
        profiles: BTreeMap::from([
            ("default".into(), ProfileAccess::default()),
            ("strict".into(), strict),
        ]),
        ..ServerConfig::default()
    }
}

async fn get(app: &Router, path: &str, headers: &[(&str, &str)]) -> Response {
    let mut request = HttpRequest::get(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    send(app, request.body(Body::empty()).unwrap()).await
}

async fn get_as(app: &Router, path: &str, key: &str) -> (u16, Value) {
    let value = format!("Bearer {key}");
    let headers = if key.is_empty() { vec![] } else { vec![("authorization", value.as_str())] };
    let response = get(app, path, &headers).await;
    (response.status().as_u16(), json_of(response).await)
}

/// Sends a chat request in the background.
fn ask(app: &Router, key: &str, extra: Value) -> tokio::task::JoinHandle<Bytes> {
    let mut request = post(body(extra).to_string());
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    let app = app.clone();
    tokio::spawn(async move { bytes(send(&app, request).await).await })
}

/// The listed requests, once one has a phase that `is_right` accepts. Waits at most ten seconds.
async fn until(app: &Router, key: &str, is_right: fn(&str) -> bool) -> Vec<Value> {
    for _ in 0..1000 {
        let (status, mut body) = get_as(app, "/v1/requests", key).await;
        assert_eq!(status, 200);
        let requests = body["requests"].take();
        let requests = requests.as_array().unwrap();
        if requests.iter().any(|one| is_right(one["phase"].as_str().unwrap())) {
            return requests.clone();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("no request has the phase");
}

const ENDED: fn(&str) -> bool = |phase| ["finished", "failed", "cancelled"].contains(&phase);

/// The events of a stream: names and data.
fn events_of(stream: &[u8]) -> Vec<(String, Value)> {
    let text = std::str::from_utf8(stream).unwrap();
    let blocks = text.split("\n\n").filter(|block| !block.is_empty());
    let field = |block: &str, name: &str| {
        block.lines().find_map(|line| line.strip_prefix(name).map(str::to_string))
    };
    blocks
        .map(|block| {
            let data = field(block, "data: ").unwrap();
            (field(block, "event: ").unwrap(), serde_json::from_str(&data).unwrap())
        })
        .collect()
}

#[tokio::test]
async fn browsers_get_the_page_and_other_clients_a_line() {
    let (app, _) = app_with(&guarded(), answer);
    let loading = steersman::serve::once_loaded(Arc::new(OnceLock::new()));
    for app in [&app, &loading] {
        let response = get(app, "/", &[("accept", "text/html,*/*;q=0.8")]).await;
        assert_eq!(response.status(), 200);
        let policy = response.headers()["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(response.headers()["vary"], "accept");
        let page = bytes(response).await;
        assert!(page.starts_with(b"<!doctype html>"));
        for (file, kind) in [("main.js", "text/javascript"), ("style.css", "text/css")] {
            let response = get(app, &format!("/console/{file}"), &[]).await;
            assert_eq!(response.status(), 200);
            assert!(response.headers()["content-type"].to_str().unwrap().starts_with(kind));
        }
    }
    for missing in ["/console/none.js", "/console/..%2Fsrc%2Fmain.rs"] {
        assert_eq!(get(&app, missing, &[]).await.status(), 404, "{missing}");
    }
    for accept in [&[][..], &[("accept", "*/*")], &[("accept", "application/json")]] {
        let line = bytes(get(&app, "/", accept).await).await;
        assert_eq!(line, "Steersman is running\n");
    }
}

#[tokio::test]
async fn only_operators_watch_requests_and_compare_shadows() {
    let (app, _) = app_with(&guarded(), answer);
    for path in ["/v1/requests/x/events", "/v1/policies/default/shadow"] {
        for (key, status, code) in [
            ("", 401, "invalid_api_key"),
            ("wrong", 401, "invalid_api_key"),
            ("sk-all", 401, "invalid_admin_key"),
            ("sk-strict", 401, "invalid_admin_key"),
        ] {
            let (got, body) = get_as(&app, path, key).await;
            assert_eq!((got, &body["error"]["code"]), (status, &code.into()), "{path} {key}");
        }
        let (open, _) = app_with(&ServerConfig::default(), answer);
        let (got, body) = get_as(&open, path, "").await;
        assert_eq!((got, &body["error"]["code"]), (403, &"admin_keys_not_set".into()));
    }
    let (status, body) = get_as(&app, "/v1/requests/x/events", "sk-operator").await;
    assert_eq!((status, &body["error"]["code"]), (404, &"request_not_found".into()));
    let (status, body) = get_as(&app, "/v1/policies/none/shadow", "sk-operator").await;
    assert_eq!((status, &body["error"]["code"]), (404, &"policy_not_found".into()));
    let (status, body) = get_as(&app, "/v1/policies/default/shadow", "sk-operator").await;
    assert_eq!((status, &body["calls"]), (200, &0.into()));
    for path in ["/v1/requests", "/v1/profiles"] {
        assert_eq!(get_as(&app, path, "").await.0, 401, "{path}");
    }
}

/// An id opens the trace of a request, which may have its text.
#[tokio::test]
async fn ids_of_requests_are_listed_for_operators_only() {
    let (app, _) = app_with(&guarded(), answer);
    ask(&app, "sk-all", json!({})).await.unwrap();
    ask(&app, "sk-strict", json!({"stream": true})).await.unwrap();
    let (_, all) = get_as(&app, "/v1/requests", "sk-operator").await;
    let all = all["requests"].as_array().unwrap();
    assert_eq!(all.len(), 2);
    assert!(all.iter().all(|one| one["id"].as_str().unwrap().starts_with("chatcmpl-")));
    // Newest first.
    assert_eq!((&all[0]["profile"], &all[0]["stream"]), (&"strict".into(), &true.into()));
    assert_eq!(
        (&all[1]["profile"], &all[1]["route"]),
        (&"default".into(), &"/v1/chat/completions".into())
    );
    for one in all {
        let counts = ["prompt_tokens", "cached_tokens", "reply_tokens", "max_tokens", "choices"];
        assert_eq!(counts.map(|name| one[name].as_u64().unwrap()), [20, 16, 12, 50, 1], "{one}");
        assert_eq!((&one["phase"], &one["reason"]), (&"finished".into(), &"stop".into()));
    }
    for (key, count) in [("sk-all", 2), ("sk-strict", 1)] {
        let (_, seen) = get_as(&app, "/v1/requests", key).await;
        let seen = seen["requests"].as_array().unwrap();
        assert_eq!(seen.len(), count, "{key}");
        assert!(seen.iter().all(|one| one["id"].is_null()), "{key}");
    }
}

#[tokio::test]
async fn requests_that_fail_or_are_cancelled_say_so() {
    let (app, _) = app_with(&guarded(), || vec![UntilCancelled]);
    ask(&app, "sk-all", json!({"temperature": 9})).await.unwrap();
    let failed = until(&app, "sk-operator", ENDED).await;
    assert_eq!((&failed[0]["phase"], &failed[0]["status"]), (&"failed".into(), &400.into()));
    assert_eq!(failed[0]["error"], "invalid_value");
    let client = ask(&app, "sk-all", json!({}));
    until(&app, "sk-operator", |phase| phase == "waiting").await;
    client.abort();
    until(&app, "sk-operator", |phase| phase == "cancelled").await;
}

fn note(tokens: u32, note: &str) -> Act {
    Say(Event::Note { tokens, note: note.into() })
}

/// Requests whose policy failed open were listed as all others.
#[tokio::test]
async fn requests_in_which_the_native_policy_took_over_say_so() {
    fn fails() -> Vec<Act> {
        let mut acts = answer();
        acts.insert(0, note(0, "policy `brk`: on-step: failed: x; the native policy took over"));
        acts
    }
    fn closes() -> Vec<Act> {
        let mut acts = answer();
        acts.insert(0, note(0, "closed the reasoning"));
        acts
    }
    for (script, failed) in [(fails as fn() -> Vec<Act>, true), (closes, false)] {
        let (app, _) = app_with(&guarded(), script);
        ask(&app, "sk-all", json!({})).await.unwrap();
        let listed = until(&app, "sk-operator", ENDED).await;
        assert_eq!((&listed[0]["notes"], &listed[0]["policy_failed"]), (&1.into(), &failed.into()));
    }
}

#[tokio::test]
async fn requests_are_searched_by_what_the_caller_sees() {
    let (app, _) = app_with(&guarded(), || {
        let mut acts = answer();
        acts.insert(0, note(0, "closed the Reasoning"));
        acts
    });
    ask(&app, "sk-all", json!({})).await.unwrap();
    ask(&app, "sk-strict", json!({"stream": true})).await.unwrap();
    let (_, all) = get_as(&app, "/v1/requests", "sk-operator").await;
    let id = all["requests"][0]["id"].as_str().unwrap();
    for (key, search, count) in [
        ("sk-operator", "", 2),
        ("sk-operator", "STRICT", 1),
        ("sk-operator", "owner%2Ftiny", 2),
        ("sk-operator", "closed%20the%20reasoning", 2),
        ("sk-operator", id, 1),
        ("sk-operator", "absent", 0),
        ("sk-all", "strict", 1),
        // Notes and ids are for operators, other profiles for their keys.
        ("sk-all", "closed", 0),
        ("sk-all", id, 0),
        ("sk-strict", "default", 0),
    ] {
        let (status, found) = get_as(&app, &format!("/v1/requests?search={search}"), key).await;
        assert_eq!(status, 200, "{found}");
        let found = found["requests"].as_array().unwrap();
        assert_eq!(found.len(), count, "{key} {search}: {found:?}");
    }
    let long = format!("/v1/requests?search={}", "x".repeat(257));
    let (status, error) = get_as(&app, &long, "sk-operator").await;
    assert_eq!((status, &error["error"]["param"]), (400, &"search".into()));
}

/// A reply that stops in the middle until the test has seen it.
fn paused() -> Vec<Act> {
    vec![
        note(0, "routed"),
        Say(Event::Reasoning("It is".into())),
        note(2, "closed the reasoning"),
        Say(Event::Answer("Ro".into())),
        Wait(Duration::from_millis(1500)),
        Say(Event::Answer("me".into())),
        note(4, "stopped"),
        finished(FinishReason::Stop),
    ]
}

/// Whether it is watched from the beginning, from the middle, or not at all.
#[tokio::test]
async fn who_watches_gets_the_whole_reply_with_each_note_in_its_place() {
    for extra in [json!({}), json!({"stream": true})] {
        let (app, _) = app_with(&guarded(), paused);
        let client = ask(&app, "sk-all", extra.clone());
        let listed = until(&app, "sk-operator", |phase| !ENDED(phase)).await;
        let path = format!("/v1/requests/{}/events", listed[0]["id"].as_str().unwrap());
        tokio::time::sleep(Duration::from_millis(300)).await;
        let key = [("authorization", "Bearer sk-operator")];
        let stream = bytes(get(&app, &path, &key).await).await;
        let events = events_of(&stream);
        let shown: String = events
            .iter()
            .map(|(event, data)| match event.as_str() {
                "piece" => data["text"].as_str().unwrap().to_string(),
                "note" => format!("<{} {}>", data["tokens"], data["note"].as_str().unwrap()),
                _ => String::new(),
            })
            .collect();
        assert_eq!(shown, "<0 routed>It is<2 closed the reasoning>Rome<4 stopped>", "{extra}");
        assert!(events.iter().any(|(event, _)| event == "request"));
        let (last, data) = events.last().unwrap();
        assert_eq!((last.as_str(), &data["phase"]), ("end", &"finished".into()));
        // The client got the same, and nothing of the notes.
        let reply = client.await.unwrap();
        assert!(!String::from_utf8_lossy(&reply).contains("closed the reasoning"));
        // Its text is gone, its notes are not.
        let ended = events_of(&bytes(get(&app, &path, &key).await).await);
        let kinds: Vec<&str> =
            ended.iter().map(|(event, _)| event.as_str()).filter(|e| *e != "request").collect();
        assert_eq!(kinds, ["note", "note", "note", "end"]);
    }
}

#[tokio::test]
async fn too_many_watchers_are_refused() {
    let (app, _) = app_with(&guarded(), || vec![UntilCancelled]);
    let client = ask(&app, "sk-all", json!({}));
    let listed = until(&app, "sk-operator", |phase| phase == "waiting").await;
    let path = format!("/v1/requests/{}/events", listed[0]["id"].as_str().unwrap());
    let key = [("authorization", "Bearer sk-operator")];
    let mut open = Vec::new();
    let refused = loop {
        let response = get(&app, &path, &key).await;
        if response.status() != 200 {
            break response;
        }
        open.push(response);
        assert!(open.len() < 100, "watchers are not bounded");
        // Lets the request take the watcher in.
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!((refused.status().as_u16(), open.len()), (429, 32));
    // A watcher that leaves makes room.
    drop(open);
    assert_eq!(get(&app, &path, &key).await.status(), 200);
    client.abort();
}

#[tokio::test]
async fn profiles_show_settings_but_no_keys() {
    let (app, _) = app_with(&guarded(), answer);
    let (_, body) = get_as(&app, "/v1/profiles", "sk-operator").await;
    assert_eq!(body["access"], json!({"key": "operator", "profile": null, "operators": true}));
    let strict = &body["profiles"][1];
    assert_eq!((&strict["name"], &strict["has_keys"]), (&"strict".into(), &true.into()));
    assert_eq!(
        (&strict["model"], &strict["policies"]),
        (&"owner/tiny".into(), &json!(["default"]))
    );
    assert_eq!(strict["params"], json!({"hint": "hidden"}));
    let (_, body) = get_as(&app, "/v1/profiles", "sk-all").await;
    assert_eq!(body["access"]["key"], "server");
    assert!(!body.to_string().contains("hidden"), "{body}");
    let (_, body) = get_as(&app, "/v1/profiles", "sk-strict").await;
    assert_eq!(body["access"], json!({"key": "profile", "profile": "strict", "operators": true}));
    assert_eq!(body["profiles"].as_array().unwrap().len(), 1);
    assert!(!body.to_string().contains("sk-"), "{body}");
    let (open, _) = app_with(&ServerConfig::default(), answer);
    let (_, body) = get_as(&open, "/v1/profiles", "").await;
    assert_eq!(body["access"], json!({"key": "none", "profile": null, "operators": false}));
}
