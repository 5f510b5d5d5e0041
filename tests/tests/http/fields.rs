//! server/FIELDS.md: it has all published fields, and says of each what the server does.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use steersman_tests::fixtures;

use crate::*;

/// A row of a table.
#[derive(Debug)]
struct Row {
    field: String,
    status: String,
    /// Fields to add to a body.
    example: String,
}

/// The tables of the document, by heading.
fn tables() -> BTreeMap<String, Vec<Row>> {
    let path = fixtures().join("../../server/FIELDS.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut tables: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    let mut heading = String::new();
    for line in text.lines() {
        if let Some(text) = line.strip_prefix("## ") {
            heading = text.into();
        }
        let Some(row) = line.strip_prefix("| `") else { continue };
        let (field, row) = row.split_once("` | ").expect(line);
        let (status, row) = row.split_once(" | `").expect(line);
        let (example, _) = row.split_once("` |").expect(line);
        let row = Row { field: field.into(), status: status.into(), example: example.into() };
        tables.entry(heading.clone()).or_default().push(row);
    }
    tables
}

#[test]
fn tables_have_exactly_the_published_fields() {
    let published = std::fs::read_to_string(fixtures().join("fields.json")).unwrap();
    let published: BTreeMap<String, Vec<String>> = serde_json::from_str(&published).unwrap();
    let of = |rows: Vec<Row>| rows.into_iter().map(|row| row.field).collect::<Vec<_>>();
    let documented: BTreeMap<_, _> =
        tables().into_iter().map(|(heading, rows)| (heading, of(rows))).collect();
    assert_eq!(documented, published);
}

/// The smallest valid body of a request.
fn smallest(heading: &str) -> (&'static str, Value) {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    match heading {
        "POST /v1/chat/completions" => ("/v1/chat/completions", json!({"messages": messages})),
        "POST /v1/completions" => ("/v1/completions", json!({"prompt": "Hi"})),
        "POST /v1/embeddings" => ("/v1/embeddings", json!({"input": "Hi"})),
        "POST /v1/responses" => ("/v1/responses", json!({"input": "Hi"})),
        "POST /v1/messages" => ("/v1/messages", json!({"messages": messages, "max_tokens": 9})),
        "POST /v1/messages/count_tokens" => {
            ("/v1/messages/count_tokens", json!({"messages": messages}))
        }
        "POST /api/chat" | "options of Ollama" => ("/api/chat", json!({"messages": messages})),
        "POST /api/generate" => ("/api/generate", json!({"prompt": "Hi"})),
        heading => panic!("no request of `{heading}`"),
    }
}

async fn post_to(app: &Router, path: &str, body: &Value) -> (StatusCode, Bytes) {
    let request = axum::http::Request::post(path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let response = send(app, request).await;
    (response.status(), bytes(response).await)
}

#[tokio::test]
async fn each_field_does_what_its_table_says() {
    let folder = tempfile::tempdir().unwrap();
    let config = ServerConfig {
        responses_folder: Some(folder.path().join("responses")),
        ..ServerConfig::default()
    };
    let (app, _) = app_with(&config, answer);
    let (_, stored) = post_to(&app, "/v1/responses", &json!({"input": "Hi"})).await;
    let stored: Value = serde_json::from_slice(&stored).unwrap();
    let id = stored["id"].as_str().unwrap();
    let mut tried = 0;
    for (heading, rows) in tables() {
        let (path, smallest) = smallest(&heading);
        for Row { field, status, example } in rows {
            let example = example.replace("RESPONSE_ID", id);
            let example: Map<String, Value> = serde_json::from_str(&example).expect(&example);
            let given = example.get("options").and_then(Value::as_object).unwrap_or(&example);
            assert!(given.contains_key(&field) || example.contains_key(&field), "{field}");
            let mut body = smallest.clone();
            body.as_object_mut().unwrap().extend(example);
            let (code, reply) = post_to(&app, path, &body).await;
            let text = String::from_utf8_lossy(&reply);
            if status != "refused" {
                assert!(["works", "accepted"].contains(&status.as_str()), "{status}");
                assert_eq!(code, StatusCode::OK, "{heading} {body}: {text}");
                assert!(!text.contains("\"error\":{"), "{heading} {body}: {text}");
            } else {
                assert_eq!(code, StatusCode::BAD_REQUEST, "{heading} {body}: {text}");
                let error: Value = serde_json::from_slice(&reply).unwrap();
                // Ollama's errors are a text.
                let is_named = match &error["error"] {
                    Value::String(message) => message.contains(&format!("`{field}`")),
                    error => error["param"] == field.as_str(),
                };
                assert!(is_named, "{heading} {field}: {text}");
            }
            tried += 1;
        }
    }
    assert!(tried > 150, "{tried}");
}
