//! `GET /v1/log` and `GET /v1/history`: what operators see without a monitoring system.

use axum::http::Request as ClientRequest;
use steersman_log::Recent;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::*;

async fn get(app: &Router, path: &str, key: &str) -> (u16, String) {
    let mut request = ClientRequest::get(path);
    if !key.is_empty() {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let response = send(app, request.body(Body::empty()).unwrap()).await;
    let status = response.status().as_u16();
    (status, String::from_utf8(bytes(response).await.to_vec()).unwrap())
}

/// A server with an operator, a client, and this wiring.
fn guarded(wiring: Wiring) -> Router {
    let config = ServerConfig {
        api_keys: vec!["sk-all".into()],
        admin_keys: vec!["sk-operator".into()],
        ..ServerConfig::default()
    };
    app_wired(&config, wiring, answer).0
}

/// The lines of the log after a number.
async fn lines(app: &Router, after: u64) -> Vec<Value> {
    let (status, text) = get(app, &format!("/v1/log?after={after}"), "sk-operator").await;
    assert_eq!(status, 200, "{text}");
    text.lines().map(|line| line.parse().unwrap()).collect()
}

#[tokio::test]
async fn operators_read_the_log_and_what_is_new_in_it() {
    let log = Recent::default();
    let app = guarded(Wiring { log: log.clone(), ..Wiring::default() });
    let _log = tracing_subscriber::registry().with(log.layer()).set_default();
    tracing::warn!(path = "/tmp/a b", "first");
    let first = lines(&app, 0).await;
    assert_eq!(first.len(), 1, "{first:?}");
    assert_eq!(first[0]["level"], "WARN");
    let line = first[0]["line"].as_str().unwrap();
    assert!(line.ends_with("first path=\"/tmp/a b\""), "{line}");
    let number = first[0]["number"].as_u64().unwrap();
    assert!(lines(&app, number).await.is_empty());
    // A request has its one line, and nothing of its text or key.
    let secret = json!([{"role": "user", "content": "my secret"}]);
    let mut request = post(body(json!({"messages": secret})).to_string());
    request.headers_mut().insert(header::AUTHORIZATION, "Bearer sk-all".parse().unwrap());
    assert_eq!(send(&app, request).await.status(), 200);
    let new = lines(&app, number).await;
    let text = json!(new).to_string();
    assert!(text.contains("request finished") && text.contains("profile=default"), "{text}");
    for hidden in ["my secret", "sk-all", "sk-operator"] {
        assert!(!text.contains(hidden), "{text}");
    }
    assert_eq!(new[0]["number"].as_u64(), Some(number + 1));
}

#[tokio::test]
async fn a_page_of_the_log_is_bounded() {
    let log = Recent::default();
    let app = guarded(Wiring { log: log.clone(), ..Wiring::default() });
    let _log = tracing_subscriber::registry().with(log.layer()).set_default();
    for number in 0..3000 {
        tracing::info!(number, "line");
    }
    // The newest 2,000 are kept, and read without a gap.
    let (mut all, mut after) = (Vec::new(), 0);
    loop {
        let page = lines(&app, after).await;
        assert!(page.len() <= 500, "{} lines", page.len());
        let Some(last) = page.last() else { break };
        after = last["number"].as_u64().unwrap();
        all.extend(page);
    }
    assert_eq!(all.len(), 2000);
    let ends = |line: &Value, end: &str| line["line"].as_str().unwrap().ends_with(end);
    assert!(ends(&all[0], "line number=1000") && ends(&all[1999], "line number=2999"));
    // Few long lines fill a page.
    for _ in 0..60 {
        tracing::info!(text = "x".repeat(20_000), "long");
    }
    let (_, text) = get(&app, &format!("/v1/log?after={after}"), "sk-operator").await;
    assert!(text.len() < 300 << 10 && text.lines().count() > 20, "{} bytes", text.len());
}

#[tokio::test]
async fn the_log_is_for_operators_and_the_history_for_clients() {
    let app = guarded(Wiring::default());
    for (key, status) in [("", 401), ("sk-wrong", 401), ("sk-all", 401), ("sk-operator", 200)] {
        assert_eq!(get(&app, "/v1/log", key).await.0, status, "{key}");
    }
    for (key, status) in [("", 401), ("sk-all", 200), ("sk-operator", 200)] {
        assert_eq!(get(&app, "/v1/history", key).await.0, status, "{key}");
    }
    for path in ["/v1/log?after=x", "/v1/log?after=-1", "/v1/history?after=1.5"] {
        let (status, text) = get(&app, path, "sk-operator").await;
        let error: Value = text.parse().unwrap();
        assert_eq!((status, &error["error"]["param"]), (400, &json!("after")), "{path}");
    }
    let (_, text) = get(&app, "/v1/history", "sk-all").await;
    assert_eq!(text.parse::<Value>().unwrap(), json!({"samples": []}), "none are taken");
}

#[tokio::test]
async fn the_history_counts_each_request_once() {
    let wiring = Wiring { samples: Some(Duration::from_millis(20)), ..Wiring::default() };
    let (app, _) = app_wired(&ServerConfig::default(), wiring, answer);
    for extra in [json!({}), json!({"stream": true}), json!({"n": 0})] {
        bytes(send(&app, post(body(extra).to_string())).await).await;
    }
    let history = async |after: u64| -> Vec<Value> {
        let (status, text) = get(&app, &format!("/v1/history?after={after}"), "").await;
        assert_eq!(status, 200, "{text}");
        text.parse::<Value>().unwrap()["samples"].as_array().unwrap().clone()
    };
    let sum = |samples: &[Value]| -> u64 {
        samples.iter().map(|sample| sample["requests"].as_u64().unwrap()).sum()
    };
    let mut samples = Vec::new();
    for _ in 0..1000 {
        samples = history(0).await;
        if sum(&samples) == 3 && samples.last().unwrap()["requests"] == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(sum(&samples), 3, "{samples:?}");
    // Two of them had a reply.
    let first = |sample: &&Value| sample["first_token_ms"].is_number();
    assert!((1..=2).contains(&samples.iter().filter(first).count()), "{samples:?}");
    let last = samples.last().unwrap();
    assert!(last["at"].as_u64().unwrap() > 1_700_000_000, "{last}");
    assert_eq!((&last["first_token_ms"], &last["running"]), (&Value::Null, &json!(0)), "{last}");
    assert!(history(u64::MAX).await.is_empty());
}
