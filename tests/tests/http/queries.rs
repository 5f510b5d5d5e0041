//! Parameters of queries: each is honored, or rejected by name.

use axum::http::{Method, StatusCode, header};
use serde_json::{Value, json};

use crate::*;

async fn ask(app: &Router, method: Method, path: &str, body: &Value) -> (StatusCode, Value) {
    let request = axum::http::Request::builder()
        .method(method)
        .uri(path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let response = send(app, request).await;
    let status = response.status();
    let text = bytes(response).await;
    (status, serde_json::from_slice(&text).unwrap_or_default())
}

fn storing(folder: &std::path::Path) -> Router {
    app_wired(&ServerConfig::default(), storing_in(folder), answer).0
}

/// F19 and its kind: the query of `GET /v1/responses/{id}/input_items?limit=1` was ignored, as was that of every other
/// route but `/v1/cache`. Bodies reject what they do not know; queries do now, on every route of the description.
#[tokio::test]
async fn an_unknown_parameter_of_a_query_is_rejected_by_name_on_every_route() {
    let (app, seen) = app(answer);
    let document = {
        let request = axum::http::Request::get("/openapi.json").body(Body::empty()).unwrap();
        json_of(app.clone().oneshot(request).await.unwrap()).await
    };
    let mut tried = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let real = path.replace("{id}", "x").replace("{name}", "x").replace("{file}", "x");
        for method in methods.as_object().unwrap().keys() {
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            let without = real.strip_prefix("/v1").filter(|_| {
                ["/chat", "/responses", "/models", "/tokenize"].iter().any(|known| {
                    real.strip_prefix("/v1").is_some_and(|path| path.starts_with(known))
                }) && !["/pull", "/serve"].iter().any(|end| real.ends_with(end))
            });
            for real in std::iter::once(real.as_str()).chain(without) {
                let uri = format!("{real}?colour=red");
                let (status, reply) = ask(&app, method.clone(), &uri, &json!({})).await;
                assert_eq!(status, StatusCode::BAD_REQUEST, "{method} {uri}: {reply}");
                let error = &reply["error"];
                let is_named = match error {
                    Value::String(message) => message.contains("`colour`"),
                    error => error["param"] == "colour" && error["code"] == "unknown_parameter",
                };
                assert!(is_named, "{method} {uri}: {reply}");
                tried += 1;
            }
        }
    }
    assert!(tried > 40, "{tried} routes");
    assert!(seen.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn parameters_that_clients_send_by_default_are_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let app = storing(folder.path());
    let (_, response) = ask(&app, Method::POST, "/v1/responses", &json!({"input": "Hi"})).await;
    let id = response["id"].as_str().unwrap();
    let messages = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9});
    for (method, path, body) in [
        (Method::POST, "/v1/messages?beta=true".into(), &messages),
        (Method::POST, "/messages/count_tokens?beta=true".into(), &messages),
        (Method::POST, "/v1/chat/completions?api-version=2026-01-01".into(), &messages),
        (Method::GET, "/v1/models?client_version=0.99.0".into(), &Value::Null),
        (Method::GET, "/v1/models/owner/tiny?api-version=preview".into(), &Value::Null),
        (Method::GET, format!("/v1/responses/{id}?stream=false"), &Value::Null),
        (
            Method::GET,
            format!("/v1/responses/{id}?include[]=reasoning.encrypted_content"),
            &Value::Null,
        ),
        (Method::GET, format!("/v1/responses/{id}?include_obfuscation=false"), &Value::Null),
        (Method::GET, "/v1/models".into(), &Value::Null),
    ] {
        let (status, reply) = ask(&app, method, &path, body).await;
        assert_eq!(status, StatusCode::OK, "{path}: {reply}");
    }
    for (path, code, param) in [
        (format!("/v1/responses/{id}?stream=true"), "unsupported_parameter", "stream"),
        (format!("/v1/responses/{id}?starting_after=3"), "unsupported_parameter", "starting_after"),
        (
            format!("/v1/responses/{id}?include=message.output_text.logprobs"),
            "invalid_value",
            "include",
        ),
        (format!("/v1/responses/{id}?include[]=everything"), "invalid_value", "include"),
        (format!("/v1/responses/{id}/input_items?limit=0"), "invalid_value", "limit"),
        (format!("/v1/responses/{id}/input_items?limit=101"), "invalid_value", "limit"),
        (format!("/v1/responses/{id}/input_items?limit=all"), "invalid_value", "limit"),
        (format!("/v1/responses/{id}/input_items?order=up"), "invalid_value", "order"),
        (format!("/v1/responses/{id}/input_items?after=x"), "invalid_value", "after"),
        (format!("/v1/responses/{id}/input_items?before=x"), "invalid_value", "before"),
        (format!("/v1/responses/{id}/input_items?limit=1&limit=2"), "invalid_value", "limit"),
        ("/v1/models?limit=1".into(), "unsupported_parameter", "limit"),
        ("/v1/cache?model=other".into(), "model_not_found", "model"),
    ] {
        let (_, reply) = ask(&app, Method::GET, &path, &Value::Null).await;
        let error = &reply["error"];
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!(code), &json!(param)),
            "{path} {reply}"
        );
    }
}

/// F19: items had no ids, and the list no `first_id` and `last_id`; `limit`, `order` and `after` were ignored.
#[tokio::test]
async fn input_items_have_ids_and_come_in_pages() {
    let folder = tempfile::tempdir().unwrap();
    let app = storing(folder.path());
    let own = json!({"type": "message", "id": "msg_own", "role": "assistant", "status": "completed",
                     "content": [{"type": "output_text", "text": "b", "annotations": []}]});
    let input = json!([
        {"role": "user", "content": "a"},
        own,
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "one"},
        own,
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
    ]);
    let (_, response) = ask(&app, Method::POST, "/v1/responses", &json!({"input": input})).await;
    let path = format!("/v1/responses/{}/input_items", response["id"].as_str().unwrap());
    let list = async |query: &str| {
        let (status, list) = ask(&app, Method::GET, &format!("{path}{query}"), &Value::Null).await;
        assert_eq!(status, StatusCode::OK, "{list}");
        list
    };
    let ids = |list: &Value| -> Vec<String> {
        let items = list["data"].as_array().unwrap().iter();
        items.map(|item| item["id"].as_str().unwrap().to_string()).collect()
    };
    let all = list("?order=asc").await;
    let every = ids(&all);
    assert_eq!(every.iter().collect::<std::collections::HashSet<_>>().len(), 6, "{every:?}");
    assert_eq!(every[1], "msg_own");
    let first = json!({"role": "user", "content": [{"type": "input_text", "text": "a"}],
                       "type": "message", "id": every[0], "status": "completed"});
    assert_eq!(all["data"][0], first);
    assert_eq!((&all["first_id"], &all["last_id"]), (&json!(every[0]), &json!(every[5])));
    assert_eq!(all["has_more"], false);
    let newest_first: Vec<_> = every.iter().rev().cloned().collect();
    assert_eq!(ids(&list("").await), newest_first);
    // All pages together are the list.
    for (order, expected) in [("asc", &every), ("desc", &newest_first)] {
        let (mut read, mut after) = (Vec::new(), String::new());
        loop {
            let page = list(&format!("?order={order}&limit=4{after}")).await;
            read.extend(ids(&page));
            after = format!("&after={}", page["last_id"].as_str().unwrap());
            if page["has_more"] == false {
                break;
            }
        }
        assert_eq!(read, *expected);
    }
    let before = list(&format!("?order=asc&limit=2&before={}", every[3])).await;
    assert_eq!((ids(&before), &before["has_more"]), (every[1..3].to_vec(), &json!(true)));
    // A page behind the last item.
    let empty = list(&format!("?order=asc&after={}", every[5])).await;
    assert_eq!((&empty["data"], &empty["first_id"]), (&json!([]), &Value::Null));
}
