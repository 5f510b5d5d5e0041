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
        "POST /api/embed" => ("/api/embed", json!({"input": "Hi"})),
        "POST /api/embeddings" => ("/api/embeddings", json!({"prompt": "Hi"})),
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
    let wiring = storing_in(&folder.path().join("responses"));
    let (app, _) = app_wired(&ServerConfig::default(), wiring, answer);
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

/// Values of every type of JSON.
fn odd_values() -> Vec<Value> {
    vec![
        json!(true),
        json!(-7),
        json!(1.5),
        json!("x"),
        json!([]),
        json!(["x"]),
        json!([{}]),
        json!({"x": 1}),
        json!({"type": 3}),
    ]
}

/// Words of this program and its libraries that mean nothing to a client.
const FOREIGN: [&str; 14] = [
    "untagged", "enum", "struct", "variant", "u8", "u32", "u64", "i64", "f32", "f64", "usize",
    "Option", "a map", "unit",
];

/// Bodies that have every field with an inside.
fn rich_bodies() -> Vec<(&'static str, Value)> {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d",
                      "parameters": schema, "strict": false}});
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let options = json!({"seed": 1, "stop": ["X"], "temperature": 0.5, "top_k": 3, "num_ctx": 9,
                         "repeat_last_n": 3, "repeat_penalty": 1.1, "num_predict": 5});
    let text =
        json!([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]);
    vec![
        (
            "/v1/chat/completions",
            json!({
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "a"}]},
                    {"role": "user", "content": "a", "name": "n"},
                    {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c", "content": "a"}
                ],
                "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}},
                "stop": ["X"], "chat_template_kwargs": {"enable_thinking": true},
                "logit_bias": {"5": 1},
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            }),
        ),
        (
            "/v1/responses",
            json!({
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "a"},
                    {"type": "mcp_call", "id": "m", "server_label": "s", "name": "f", "arguments": "{}", "output": "a"}
                ],
                "tools": [{"type": "function", "name": "f", "parameters": schema}],
                "reasoning": {"effort": "low", "summary": "auto"},
                "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}, "verbosity": "low"},
                "include": ["reasoning.encrypted_content"],
            }),
        ),
        (
            "/v1/messages",
            json!({
                "system": text, "max_tokens": 9,
                "messages": [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": "a", "signature": "s"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": text, "is_error": false}]}
                ],
                "tools": [{"name": "f", "description": "d", "input_schema": schema}],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
                "stop_sequences": ["X"], "cache_control": {"type": "ephemeral"},
            }),
        ),
        (
            "/api/chat",
            json!({
                "messages": [
                    {"role": "user", "content": "a", "images": []},
                    {"role": "assistant", "content": "", "thinking": "a", "tool_calls": [
                        {"id": "c", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}]},
                    {"role": "tool", "tool_name": "f", "content": "a"}
                ],
                "tools": [tool], "options": options, "think": "low", "stream": false,
            }),
        ),
        ("/api/generate", json!({"prompt": "a", "options": options, "stream": false})),
        ("/api/embed", json!({"input": ["a"], "options": options})),
        ("/api/embeddings", json!({"prompt": "a", "options": options})),
        ("/v1/completions", json!({"prompt": ["a", "b"], "stop": ["X"], "logit_bias": {"5": 1}})),
        ("/v1/embeddings", json!({"input": ["a", "b"]})),
        ("/v1/rerank", json!({"query": "a", "documents": ["a", {"text": "b"}]})),
        ("/tokenize", json!({"prompt": "a", "with_pieces": true})),
        ("/detokenize", json!({"tokens": [5, 6]})),
    ]
}

/// The paths of all values inside `value`.
fn paths(value: &Value, path: &str, all: &mut Vec<String>) {
    all.push(path.to_string());
    match value {
        Value::Array(list) => {
            list.iter()
                .enumerate()
                .for_each(|(i, value)| paths(value, &format!("{path}/{i}"), all));
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| paths(value, &format!("{path}/{name}"), all));
        }
        _ => {}
    }
}

/// F25 and its kind: `think: "true"` was answered with "did not match any variant of untagged enum Think", other
/// fields with `u32` and `struct MessageBody`, and a list was taken for an object. Every value of every body is
/// replaced by values of every type.
#[tokio::test]
async fn errors_about_types_name_the_field_in_the_words_of_json() {
    use steersman::api::fields as tables;
    let answers = app(answer).0;
    let embeds = app(|| vec![Say(Event::Embedding(vec![1.0])), finished(FinishReason::Stop)]).0;
    let mut bodies = Vec::new();
    for (path, rich) in rich_bodies() {
        let mut all = Vec::new();
        paths(&rich, "", &mut all);
        for pointer in all.iter().filter(|pointer| !pointer.is_empty()) {
            for value in odd_values() {
                let mut body = rich.clone();
                *body.pointer_mut(pointer).unwrap() = value;
                let field = pointer.split('/').nth(1).unwrap().to_string();
                bodies.push((path, body, field, pointer.clone()));
            }
        }
        let table = match path {
            "/v1/chat/completions" => tables::FIELDS,
            "/v1/responses" => tables::RESPONSES,
            "/v1/messages" => tables::MESSAGES,
            "/v1/completions" => tables::COMPLETIONS,
            "/v1/embeddings" => tables::EMBEDDINGS,
            "/v1/rerank" => tables::RERANK,
            "/api/chat" => tables::OLLAMA_CHAT,
            "/api/generate" => tables::OLLAMA_GENERATE,
            "/api/embed" => tables::OLLAMA_EMBED,
            "/api/embeddings" => tables::OLLAMA_EMBEDDINGS,
            _ => &[],
        };
        for (field, _) in table.iter().filter(|(field, _)| rich.get(*field).is_none()) {
            for value in odd_values() {
                let mut body = rich.clone();
                body[*field] = value;
                bodies.push((path, body, (*field).to_string(), (*field).to_string()));
            }
        }
    }
    let mut refused = 0;
    for (path, body, field, at) in bodies {
        let is_embedding = ["embed", "rerank"].iter().any(|word| path.contains(word));
        let app = if is_embedding { &embeds } else { &answers };
        let request = axum::http::Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body.to_string()))
            .unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        let status = response.status();
        if status == StatusCode::OK {
            continue;
        }
        refused += 1;
        let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
        let value = body.pointer(&at).or(body.get(&at)).unwrap();
        let case = format!("{path} {at} = {value}: {status} {text}");
        assert!(status.is_client_error(), "{case}");
        let error: Value = serde_json::from_str(&text).unwrap();
        let message = match &error["error"] {
            Value::String(message) => message,
            error => error["message"].as_str().unwrap(),
        };
        let name = at.rsplit('/').find(|part| part.parse::<u32>().is_err()).unwrap_or(&field);
        let param = error["error"]["param"].as_str().unwrap_or_default();
        let names = [field.as_str(), name, "stream", "n", "model"];
        let is_named = names.iter().any(|name| message.contains(name) || param.starts_with(name));
        assert!(is_named, "{case}");
        for word in FOREIGN {
            let words = message.split(|c: char| !c.is_alphanumeric());
            let is_there = if word.contains(' ') {
                message.contains(word)
            } else {
                words.clone().any(|w| w == word)
            };
            assert!(!is_there, "`{word}`: {case}");
        }
    }
    assert!(refused > 500, "{refused}");
}

/// A list was taken for an object whose fields have an order: `[["user", "Hi"]]` was a conversation.
#[tokio::test]
async fn a_list_is_no_object() {
    let (app, _) = app(answer);
    for (path, body, param) in [
        ("/v1/chat/completions", json!({"messages": [["user", "Hi"]]}), "messages[0]"),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "a"}], "stream": true, "stream_options": [true]}),
            "stream_options",
        ),
        ("/v1/messages", json!({"messages": [["user", "Hi"]]}), "messages[0]"),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": "a"}], "thinking": ["enabled", 1024]}),
            "thinking",
        ),
        ("/v1/responses", json!({"input": [["message", "user", "Hi"]]}), "input[0]"),
        ("/v1/responses", json!({"input": "a", "reasoning": ["low"]}), "reasoning"),
        ("/api/chat", json!({"messages": [["user", "Hi"]]}), "messages[0]"),
    ] {
        let (status, reply) = post_to(&app, path, &body).await;
        let reply: Value = serde_json::from_slice(&reply).unwrap();
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {body}: {reply}");
        match &reply["error"] {
            Value::String(message) => assert!(message.starts_with(param), "{message}"),
            error => assert_eq!(error["param"], param, "{reply}"),
        }
    }
}
