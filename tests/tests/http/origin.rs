//! Web pages: `Host`, `Origin` and CORS, on all routes.

use axum::http::{Method, header};
use serde_json::Value;
use steersman::config::ServerConfig;
use steersman_tests::samples;

use crate::*;

/// Every route, with its method.
const ROUTES: [(&str, &str); 11] = [
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/owner/tiny"),
    ("GET", "/v1/cache"),
    ("GET", "/v1/policies"),
    ("POST", "/v1/policies/default"),
    ("GET", "/v1/requests/x/trace"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/"),
    ("POST", "/v1/rerank"),
];

fn request(method: &str, uri: &str, headers: &[(&str, &str)]) -> axum::http::Request<Body> {
    let mut request = axum::http::Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = if method == "POST" { body(json!({})).to_string().into() } else { Body::empty() };
    request.header(header::CONTENT_TYPE, "application/json").body(body).unwrap()
}

async fn code(app: &Router, request: axum::http::Request<Body>) -> (u16, Value) {
    let response = send(app, request).await;
    let status = response.status().as_u16();
    let bytes = bytes(response).await;
    let reply: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    (status, reply["error"]["code"].clone())
}

/// Attacks, section 5: the first of two origins decided, and `evil.com@127.0.0.1` was this machine.
#[tokio::test]
async fn ambiguous_hosts_and_origins_are_refused() {
    let (app, _) = app(answer);
    let own = [("host", "localhost:1"), ("origin", "http://localhost:1")];
    let of = |headers: &[(&str, &str)]| request("GET", "/v1/models", headers);
    assert_eq!(send(&app, of(&own)).await.status(), StatusCode::OK);
    // A proxy with TLS before this server keeps the host.
    let proxied = [("host", "localhost:1"), ("origin", "https://localhost:1")];
    assert_eq!(send(&app, of(&proxied)).await.status(), StatusCode::OK);
    for (headers, status, expected) in [
        ([own[0], own[1], ("origin", "http://evil.com")], 400, "invalid_origin"),
        ([own[0], ("origin", "http://evil.com"), own[1]], 400, "invalid_origin"),
        ([own[0], ("origin", "ftp://localhost:1"), ("x", "y")], 403, "origin_not_allowed"),
        ([("host", "evil.com@127.0.0.1"), ("x", "y"), ("y", "y")], 403, "host_not_allowed"),
    ] {
        assert_eq!(code(&app, of(&headers)).await, (status, json!(expected)), "{headers:?}");
    }
}

/// Before, a page that bound its name to 127.0.0.1 could use every route.
#[tokio::test]
async fn foreign_hosts_and_origins_are_refused_on_all_routes() {
    let (app, seen) = app(answer);
    for (method, path) in ROUTES.into_iter().chain([("GET", "/none"), ("OPTIONS", "/health")]) {
        for (header, value, expected) in [
            ("host", "evil.com", "host_not_allowed"),
            ("host", "evil.com:11436", "host_not_allowed"),
            ("origin", "https://evil.com", "origin_not_allowed"),
            ("origin", "http://localhost:3000", "origin_not_allowed"),
            ("origin", "null", "origin_not_allowed"),
        ] {
            let refused = code(&app, request(method, path, &[(header, value)])).await;
            assert_eq!(refused, (403, json!(expected)), "{method} {path} {header}: {value}");
        }
    }
    let rebound = [("host", "evil.com"), ("origin", "http://evil.com")];
    let refused = code(&app, request("GET", "/health", &rebound)).await;
    assert_eq!(refused, (403, json!("host_not_allowed")));
    let twice = [("host", "localhost"), ("host", "evil.com")];
    let refused = code(&app, request("GET", "/health", &twice)).await;
    assert_eq!(refused, (400, json!("invalid_host")));
    let absolute = request("GET", "http://evil.com/health", &[("host", "localhost")]);
    assert_eq!(code(&app, absolute).await, (403, json!("host_not_allowed")));
    assert!(seen.requests.lock().unwrap().is_empty());

    for headers in [
        &[][..],
        &[("host", "127.0.0.1:11436")],
        &[("host", "localhost:11436"), ("origin", "http://localhost:11436")],
        &[("host", "[::1]:11436")],
    ] {
        assert_eq!(code(&app, request("GET", "/health", headers)).await.0, 200, "{headers:?}");
    }
    let metrics = bytes(send(&app, request("GET", "/metrics", &[])).await).await;
    let metrics = samples(std::str::from_utf8(&metrics).unwrap());
    let count =
        |reason| metrics[&format!("steersman_refused_requests_total{{reason=\"{reason}\"}}")];
    assert_eq!(count("host_not_allowed"), 28.0);
    assert_eq!(count("origin_not_allowed"), 39.0);
    assert_eq!(count("invalid_host"), 1.0);
}

#[tokio::test]
async fn allowed_origins_are_answered_preflight_included() {
    let config = ServerConfig {
        cors: vec!["https://app.example".into(), "tauri://localhost".into()],
        api_keys: vec!["sk-one".into()],
        ..ServerConfig::default()
    };
    let (app, _) = app_with(&config, answer);
    let preflight = |origin: &'static str| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        request("OPTIONS", "/v1/chat/completions", &headers)
    };
    for origin in ["https://app.example", "tauri://localhost"] {
        let response = send(&app, preflight(origin)).await;
        assert_eq!(response.status(), StatusCode::OK);
        let headers = response.headers();
        assert_eq!(headers["access-control-allow-origin"], origin);
        assert_eq!(headers["access-control-allow-headers"], "authorization,content-type");
        assert!(headers["access-control-allow-methods"].to_str().unwrap().contains("POST"));
        assert!(headers["vary"].to_str().unwrap().contains("origin"));
    }
    assert_eq!(code(&app, preflight("https://evil.com")).await, (403, json!("origin_not_allowed")));

    let origin = [("origin", "https://app.example")];
    let key = [origin[0], ("authorization", "Bearer sk-one")];
    for (headers, status) in [(&origin[..], 401), (&key, 200)] {
        let response = send(&app, request("POST", "/v1/chat/completions", headers)).await;
        assert_eq!(response.status().as_u16(), status, "pages can read errors too");
        assert_eq!(response.headers()["access-control-allow-origin"], "https://app.example");
        let exposed = &response.headers()["access-control-expose-headers"];
        for header in ["x-request-id", "x-steersman-prefix"] {
            assert!(exposed.to_str().unwrap().contains(header), "{exposed:?}");
        }
    }
}

#[tokio::test]
async fn a_star_allows_all_origins() {
    let config = ServerConfig { cors: vec!["*".into()], ..ServerConfig::default() };
    let (app, _) = app_with(&config, answer);
    for origin in ["https://evil.com", "null"] {
        let response = send(&app, request("GET", "/v1/models", &[("origin", origin)])).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["access-control-allow-origin"], "*");
    }
    let host = request("GET", "/v1/models", &[("host", "evil.com")]);
    assert_eq!(code(&app, host).await, (403, json!("host_not_allowed")), "hosts are still checked");
}

#[test]
fn routes_are_methods_that_cors_allows() {
    for (method, _) in ROUTES {
        assert!([Method::GET, Method::POST].contains(&method.parse().unwrap()));
    }
}
