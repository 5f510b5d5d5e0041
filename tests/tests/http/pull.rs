//! Downloads while the server runs, from a hub on this machine.

use std::path::Path;

use axum::extract::Request as HttpRequest;
use axum::http::{Method, Request as ClientRequest};
use axum::response::IntoResponse;
use steersman_models::hub::Hub;
use tempfile::TempDir;

use crate::*;

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

const FILES: [(&str, &str); 3] =
    [("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "weights")];

/// Answers as a hub with the repos `owner/tiny` and, with the same files, `owner/other`.
async fn answer_as_hub(request: HttpRequest) -> Response {
    let path = &request.uri().path().replacen("/owner/other/", "/owner/tiny/", 1);
    if path == "/api/models/owner/tiny/revision/main" {
        let file = |(name, text): (&str, &str)| json!({"rfilename": name, "size": text.len()});
        let files: Vec<_> = FILES.into_iter().map(file).collect();
        return axum::Json(json!({"sha": SHA, "siblings": files})).into_response();
    }
    let name = path.strip_prefix(&format!("/owner/tiny/resolve/{SHA}/")).unwrap_or_default();
    let Some((_, text)) = FILES.into_iter().find(|(known, _)| *known == name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let range = request.headers()[header::RANGE].to_str().unwrap();
    let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let from: usize = from.parse().unwrap();
    let to = to.parse().unwrap_or(text.len() - 1);
    Response::builder()
        .status(StatusCode::PARTIAL_CONTENT)
        .header("x-repo-commit", SHA)
        .header(header::ETAG, format!("\"{name}\""))
        .header(header::CONTENT_RANGE, format!("bytes {from}-{to}/{}", text.len()))
        .body(Body::from(&text.as_bytes()[from..=to]))
        .unwrap()
}

/// As [`answer_as_hub`], but the weights never come.
async fn answer_as_silent_hub(request: HttpRequest) -> Response {
    if request.uri().path().ends_with(".safetensors") {
        std::future::pending::<()>().await;
    }
    answer_as_hub(request).await
}

/// A server whose operator has the key `op`, and the cache of its hub.
async fn app_with_hub(cache: &Path) -> Router {
    app_with_routes(cache, Router::new().fallback(answer_as_hub)).await
}

async fn app_with_routes(cache: &Path, routes: Router) -> Router {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        axum::serve(listener, routes).await.unwrap();
    });
    let hub = Hub { endpoint, cache: cache.into(), token: None, offline: false };
    let config =
        ServerConfig { admin_keys: vec!["op".to_string().into()], ..ServerConfig::default() };
    app_wired(&config, Wiring { hub: Some(hub), ..Wiring::default() }, answer).0
}

async fn pull(app: &Router, path: &str, key: &str, body: &Value) -> (u16, String) {
    let request = ClientRequest::post(path)
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::AUTHORIZATION, format!("Bearer {key}"))
        .body(Body::from(body.to_string()));
    let response = send(app, request.unwrap()).await;
    let status = response.status().as_u16();
    (status, String::from_utf8(bytes(response).await.to_vec()).unwrap())
}

fn cache() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[tokio::test]
async fn operators_download_models_and_see_how_far_it_is() {
    let cache = cache();
    let app = app_with_hub(cache.path()).await;
    let path = "/v1/models/pull";
    let (status, text) = pull(&app, path, "op", &json!({"model": "owner/tiny"})).await;
    assert_eq!(status, 200, "{text}");
    let events: Vec<Value> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|json| serde_json::from_str(json).unwrap())
        .collect();
    let total: usize = FILES.iter().map(|(_, text)| text.len()).sum();
    let first = &events[0];
    assert_eq!((&first["status"], &first["total"]), (&json!("downloading"), &json!(total)));
    assert!(first["disk_free"].as_u64().unwrap() > 0, "{first}");
    assert!(first["memory"]["fits"].is_boolean(), "{first}");
    let before_last = &events[events.len() - 2];
    assert_eq!((&before_last["completed"], &before_last["left"]), (&json!(total), &json!(0)));
    let last = events.last().unwrap();
    assert_eq!(last["status"], "success", "{last}");
    let folder = Path::new(last["folder"].as_str().unwrap());
    for (name, text) in FILES {
        assert_eq!(std::fs::read_to_string(folder.join(name)).unwrap(), text);
    }
    // What is there is not downloaded again.
    let (status, text) = pull(&app, path, "op", &json!({"model": "owner/tiny"})).await;
    assert_eq!((status, text.matches("data: ").count()), (200, 1), "{text}");
}

#[tokio::test]
async fn clients_of_ollama_download_models_in_lines_or_at_once() {
    let cache = cache();
    let app = app_with_hub(cache.path()).await;
    let (status, text) = pull(&app, "/api/pull", "op", &json!({"model": "owner/tiny"})).await;
    assert_eq!(status, 200, "{text}");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["status"], "pulling manifest");
    assert!(lines.iter().any(|line| line["status"] == "pulling model.safetensors"), "{text}");
    assert_eq!(lines.last().unwrap(), &json!({"status": "success"}));
    let body = json!({"name": "owner/tiny", "stream": false, "insecure": false});
    let (status, text) = pull(&app, "/api/pull", "op", &body).await;
    assert_eq!((status, text.as_str()), (200, "{\"status\":\"success\"}"));
    // Programs that pull a model before they use it do so with the bundled one, too.
    for name in ["tiny-hybrid-4bit", "tiny-hybrid-4bit:latest"] {
        for stream in [false, true] {
            let body = json!({"model": name, "stream": stream});
            let (status, text) = pull(&app, "/api/pull", "op", &body).await;
            assert_eq!((status, text.trim_end()), (200, "{\"status\":\"success\"}"), "{name}");
        }
        let (status, text) = pull(&app, "/v1/models/pull", "op", &json!({"model": name})).await;
        assert!(status == 200 && text.contains("\"success\""), "{text}");
    }
}

#[tokio::test]
async fn clients_of_ollama_remove_models_that_the_configuration_does_not_name() {
    let cache = cache();
    let app = app_with_hub(cache.path()).await;
    let delete = async |key: &str, body: Value| {
        let request = ClientRequest::delete("/api/delete")
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::AUTHORIZATION, format!("Bearer {key}"))
            .body(Body::from(body.to_string()));
        let response = send(&app, request.unwrap()).await;
        let status = response.status().as_u16();
        (status, String::from_utf8(bytes(response).await.to_vec()).unwrap())
    };
    let body = json!({"model": "owner/other", "stream": false});
    assert_eq!(pull(&app, "/api/pull", "op", &body).await.0, 200);
    let folder = cache.path().join("models--owner--other");
    for (key, body, status, words) in [
        ("other", json!({"model": "owner/other"}), 401, "operator"),
        ("op", json!({}), 400, "model"),
        ("op", json!({"model": "owner/othr"}), 404, "similar: owner/other"),
        // It is served.
        ("op", json!({"model": "owner/tiny"}), 409, "the configuration names"),
    ] {
        let (found, text) = delete(key, body.clone()).await;
        assert_eq!(found, status, "{body}: {text}");
        assert!(text.contains(words), "`{words}` is not in {text}");
    }
    assert!(folder.is_dir());
    // The list says which may be removed.
    let list = async |key: &str| {
        let request = ClientRequest::get("/v1/downloads")
            .header(header::AUTHORIZATION, format!("Bearer {key}"))
            .body(Body::empty());
        let response = send(&app, request.unwrap()).await;
        (response.status().as_u16(), json_of(response).await)
    };
    assert_eq!(list("other").await.0, 401);
    assert_eq!(pull(&app, "/v1/models/pull", "op", &json!({"model": "owner/tiny"})).await.0, 200);
    let (_, mut all) = list("op").await;
    for model in all["models"].as_array_mut().unwrap() {
        assert!(model["bytes"].take().as_u64().unwrap() > 0, "{model}");
    }
    let entry = |model: &str, served: bool| {
        let toml = format!("[models.\"{model}\"]\npath = \"{model}\"\n");
        let served_by = served.then_some("configuration");
        let own = json!([{"model": model, "served_by": served_by, "toml": toml}]);
        json!({"model": model, "bytes": null, "complete": true, "served": served, "models": own})
    };
    assert_eq!(all, json!({"models": [entry("owner/other", false), entry("owner/tiny", true)]}));
    assert_eq!(delete("op", json!({"name": "owner/other"})).await, (200, String::new()));
    assert!(!folder.exists());
    let (_, left) = list("op").await;
    assert_eq!(left["models"].as_array().unwrap().len(), 1, "{left}");
}

#[tokio::test]
async fn downloads_are_for_operators_and_name_what_is_wrong() {
    let cache = cache();
    let app = app_with_hub(cache.path()).await;
    for (path, key, body, status, words) in [
        ("/v1/models/pull", "other", json!({"model": "owner/tiny"}), 401, "operator"),
        ("/api/pull", "other", json!({"model": "owner/tiny"}), 401, "operator"),
        ("/v1/models/pull", "op", json!({}), 400, "owner/name"),
        ("/v1/models/pull", "op", json!({"model": "../tiny"}), 400, "`../tiny`"),
        ("/v1/models/pull", "op", json!({"model": "owner/tiny", "to": "x"}), 400, "`to`"),
        ("/api/pull", "op", json!({"model": "owner/tiny", "insecure": true}), 400, "insecure"),
        ("/v1/models/pull", "op", json!({"model": "owner/none"}), 502, "neither such a repo"),
        ("/api/pull", "op", json!({"model": "owner/none", "stream": false}), 502, "neither"),
    ] {
        let (found, text) = pull(&app, path, key, &body).await;
        assert_eq!(found, status, "{body}: {text}");
        assert!(text.contains(words), "`{words}` is not in {text}");
    }
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0, "nothing was downloaded");
}

/// Answers a search for `tiny 4bit` only.
async fn answer_search(request: HttpRequest) -> Response {
    let query = request.uri().query().unwrap_or_default();
    if request.uri().path() != "/api/models" || !query.starts_with("search=tiny%204bit&") {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let model = |id: &str, family: &str| {
        json!({
            "id": id, "downloads": 3, "config": {"model_type": family},
            "safetensors": {"parameters": {"U32": 250}},
        })
    };
    let found = [model("owner/tiny", "qwen3"), model("owner/other", "florence2")];
    let unknown = json!({"id": "owner/unknown"});
    axum::Json(json!([found[0], found[1], unknown])).into_response()
}

#[tokio::test]
async fn operators_search_the_hub_for_what_the_server_can_load() {
    let cache = cache();
    let app = app_with_routes(cache.path(), Router::new().fallback(answer_search)).await;
    let search = async |query: &str, key: &str| {
        let request = ClientRequest::get(format!("/v1/search{query}"))
            .header(header::AUTHORIZATION, format!("Bearer {key}"))
            .body(Body::empty());
        let response = send(&app, request.unwrap()).await;
        (response.status().as_u16(), json_of(response).await)
    };
    let (status, found) = search("?words=tiny%204bit", "op").await;
    assert_eq!(status, 200, "{found}");
    let expected = |model: &str, family: &str, is_loaded: bool| {
        json!({
            "model": model, "bytes": 1000, "family": family, "weights": "packed",
            "supported": is_loaded, "memory": 1125, "fits": is_loaded, "downloads": 3,
        })
    };
    let unknown = json!({
        "model": "owner/unknown", "bytes": null, "family": null, "weights": null,
        "supported": null, "memory": null, "fits": null, "downloads": 0,
    });
    let (tiny, other) =
        (expected("owner/tiny", "qwen3", true), expected("owner/other", "florence2", false));
    assert_eq!(found, json!({"models": [tiny, other, unknown]}));
    assert_eq!(search("?words=tiny%204bit", "other").await.0, 401);
    let long = format!("?words={}", "x".repeat(201));
    for (query, status, code) in [
        ("", 400, "invalid_value"),
        ("?words=%20", 400, "invalid_value"),
        (long.as_str(), 400, "invalid_value"),
        ("?words=elsewhere", 502, "hub_failed"),
    ] {
        let (found, error) = search(query, "op").await;
        assert_eq!((found, &error["error"]["code"]), (status, &json!(code)), "{query}: {error}");
    }
}

/// As [`answer_as_hub`], with a family that no engine loads.
async fn answer_with_another_family(request: HttpRequest) -> Response {
    const CONFIG: &str = r#"{"model_type": "florence2"}"#;
    let path = request.uri().path();
    assert!(!path.ends_with(".safetensors"), "the weights are not asked for");
    if path.starts_with("/api/") {
        let names = ["config.json", "tokenizer.json", "model.safetensors"];
        let files = names.map(|name| json!({"rfilename": name, "size": CONFIG.len()}));
        return axum::Json(json!({"sha": SHA, "siblings": files})).into_response();
    }
    let range = format!("bytes 0-{}/{}", CONFIG.len() - 1, CONFIG.len());
    (StatusCode::PARTIAL_CONTENT, [(header::CONTENT_RANGE, range)], CONFIG).into_response()
}

#[tokio::test]
async fn a_family_that_cannot_be_loaded_is_refused_before_its_weights() {
    let cache = cache();
    let routes = Router::new().fallback(answer_with_another_family);
    let app = app_with_routes(cache.path(), routes).await;
    for path in ["/v1/models/pull", "/api/pull"] {
        let (status, text) = pull(&app, path, "op", &json!({"model": "owner/tiny"})).await;
        assert_eq!(status, 400, "{text}");
        assert!(text.contains("the family `florence2` is not supported; supported are:"), "{text}");
    }
    // Names without an owner are looked up, and no file is named by them.
    for (name, words) in [("qwn3", "did you mean qwen3?"), ("/etc/passwd", "there is no model")] {
        let (status, text) = pull(&app, "/api/pull", "op", &json!({"model": name})).await;
        assert_eq!(status, 400, "{text}");
        assert!(text.contains(words), "`{words}` is not in {text}");
    }
}

/// Fault A11: nothing stopped a download; a hub that sent nothing kept all others away until a restart.
#[tokio::test]
async fn a_download_is_stopped_by_an_operator_or_when_a_client_of_ollama_disconnects() {
    let cache = cache();
    let app = app_with_routes(cache.path(), Router::new().fallback(answer_as_silent_hub)).await;
    let request = |method: Method, path: &str, key: &str| {
        ClientRequest::builder()
            .method(method)
            .uri(path)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::AUTHORIZATION, format!("Bearer {key}"))
            .body(Body::from(json!({"model": "owner/tiny"}).to_string()))
            .unwrap()
    };
    let path = "/v1/models/pull";
    let stop = async |key| {
        let response = send(&app, request(Method::DELETE, path, key)).await;
        (response.status().as_u16(), json_of(response).await)
    };
    // Who has not asked for it sees it, too.
    let state = async |key| {
        let response = send(&app, request(Method::GET, path, key)).await;
        (response.status().as_u16(), json_of(response).await)
    };
    let (status, error) = stop("op").await;
    assert_eq!((status, &error["error"]["code"]), (404, &json!("no_pull")));
    assert_eq!(state("op").await, (200, json!({"running": null})));
    assert_eq!(state("other").await.0, 401);

    let running = send(&app, request(Method::POST, path, "op")).await;
    assert_eq!(running.status(), 200);
    let (status, text) = pull(&app, "/api/pull", "op", &json!({"model": "owner/tiny"})).await;
    assert_eq!(status, 409, "{text}");
    let (_, seen) = state("op").await;
    assert_eq!(seen["running"]["model"], "owner/tiny", "{seen}");
    assert!(seen["running"]["completed"].is_u64(), "{seen}");
    assert_eq!(stop("other").await.0, 401);
    assert_eq!(stop("op").await, (200, json!({"model": "owner/tiny", "stopped": true})));
    let text = String::from_utf8(bytes(running).await.to_vec()).unwrap();
    assert!(text.contains("the download was stopped"), "{text}");
    assert_eq!(state("op").await, (200, json!({"running": null})));

    // Who has read the last report may start the next one. It begins, as it is Ollama's, and ends with its client.
    let ollama = send(&app, request(Method::POST, "/api/pull", "op")).await;
    assert_eq!(ollama.status(), 200);
    drop(ollama);
    let next = loop {
        let next = send(&app, request(Method::POST, path, "op")).await;
        match next.status().as_u16() {
            409 => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
            _ => break next,
        }
    };
    assert_eq!(next.status(), 200);
    assert_eq!(stop("op").await.0, 200);
    drop(bytes(next).await);
}
