//! `GET /openapi.json`: every reply of these tests has the schema that it publishes.
//!
//! [`checked`] compares each reply with JSON that [`send`] gets; streams are compared here. `tests/openapi.py` sends
//! generated requests and the examples to a real server.

use std::collections::{BTreeSet, HashMap};
use std::sync::{LazyLock, Mutex};

use axum::body::HttpBody;
use axum::http::{Method, Request as ClientRequest};
use jsonschema::Validator;
use steersman::api::document;

use crate::*;

static DOCUMENT: LazyLock<Value> = LazyLock::new(document);

/// Validators by the place of their schema in [`DOCUMENT`].
static VALIDATORS: LazyLock<Mutex<HashMap<String, &'static Validator>>> =
    LazyLock::new(Mutex::default);

/// Checks `value` against the schema at this place.
fn check(place: &str, value: &Value) {
    let validator = *VALIDATORS.lock().unwrap().entry(place.to_string()).or_insert_with(|| {
        let mut schema = DOCUMENT.pointer(place).unwrap_or_else(|| panic!("no {place}")).clone();
        schema["components"] = DOCUMENT["components"].clone();
        Box::leak(Box::new(jsonschema::validator_for(&schema).unwrap()))
    });
    let errors: Vec<_> = validator.iter_errors(value).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{place}: {errors:?} in {value}");
}

/// The place of an operation in the document, if it is there.
fn operation(method: &Method, path: &str) -> Option<String> {
    let method = method.as_str().to_lowercase();
    [path.to_string(), format!("/v1{path}")].into_iter().find_map(|path| {
        let matches = |template: &str| {
            let mut parts = path.split('/');
            let same = |part: &str| {
                parts
                    .next()
                    .is_some_and(|own| own == part || part.starts_with('{') && !own.is_empty())
            };
            let begins = template.split('/').all(same);
            // Names of models have slashes.
            begins && (parts.next().is_none() || template == "/v1/models/{name}")
        };
        let paths = DOCUMENT["paths"].as_object().unwrap();
        let exact = paths.keys().find(|template| **template == path);
        let template = exact.or_else(|| paths.keys().find(|template| matches(template)))?;
        paths[template].get(&method)?;
        let template = template.replace('~', "~0").replace('/', "~1");
        Some(format!("/paths/{template}/{method}"))
    })
}

/// The response unchanged, after a comparison of its JSON with the schema of the operation.
pub async fn checked(method: &Method, path: &str, anthropic: bool, response: Response) -> Response {
    let kind = response.headers().get(header::CONTENT_TYPE).map(|kind| kind.to_str().unwrap());
    let status = response.status();
    let is_whole = response.body().size_hint().exact().is_some();
    let foreign = anthropic && !path.contains("messages");
    let Some(operation) = operation(method, path) else { return response };
    if kind != Some("application/json") || !is_whole || (foreign && !status.is_success()) {
        return response;
    }
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    if !bytes.is_empty() {
        let status =
            if status.is_success() { "200" } else { &format!("{}XX", status.as_u16() / 100) };
        // While a server loads or drains, `/health` has a state in place of an error.
        if !(path == "/health" && status == "5XX") {
            let place = format!("{operation}/responses/{status}/content/application~1json/schema");
            check(&place, &serde_json::from_slice(&bytes).unwrap());
        }
    }
    Response::from_parts(parts, bytes.into())
}

fn calls() -> Vec<Act> {
    let mut acts = answer();
    acts.pop();
    acts.extend(call_in_pieces(FinishReason::ToolCalls));
    acts
}

#[tokio::test]
async fn events_of_streams_have_their_schemas() {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let cases = [
        ("/v1/chat/completions", "text~1event-stream", json!({"messages": messages})),
        (
            "/v1/chat/completions",
            "text~1event-stream",
            json!({"messages": messages, "n": 2, "stream_options": {"include_usage": true}}),
        ),
        ("/v1/completions", "text~1event-stream", json!({"prompt": "Hi"})),
        ("/v1/responses", "text~1event-stream", json!({"input": "Hi"})),
        ("/v1/messages", "text~1event-stream", json!({"messages": messages, "max_tokens": 9})),
        ("/api/chat", "application~1x-ndjson", json!({"messages": messages})),
        ("/api/generate", "application~1x-ndjson", json!({"prompt": "Hi"})),
    ];
    for script in [answer, calls, || {
        vec![Say(Event::Answer("Hi".into())), cut_call().remove(0), finished(FinishReason::Length)]
    }] {
        for (path, kind, body) in &cases {
            let (app, _) = app(script);
            let mut body = body.clone();
            body["stream"] = true.into();
            let request = ClientRequest::post(*path)
                .header(header::CONTENT_TYPE, "application/json")
                .body(Body::from(body.to_string()));
            let response = send(&app, request.unwrap()).await;
            assert_eq!(response.status(), StatusCode::OK, "{path}");
            let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
            let lines = text.lines().filter_map(|line| match *kind {
                "application~1x-ndjson" => Some(line),
                _ => line.strip_prefix("data: "),
            });
            let items: Vec<_> = lines.filter(|line| *line != "[DONE]").collect();
            assert!(items.len() >= 2, "{path}: {text}");
            let operation = operation(&Method::POST, path).unwrap();
            let item = format!("{operation}/responses/200/content/{kind}/itemSchema");
            let data = DOCUMENT.pointer(&item).unwrap()["properties"]["data"].as_object();
            let place = match data.map(|data| data.contains_key("anyOf")) {
                None => item,
                Some(true) => format!("{item}/properties/data/anyOf/1/contentSchema"),
                Some(false) => format!("{item}/properties/data/contentSchema"),
            };
            items.iter().for_each(|item| check(&place, &serde_json::from_str(item).unwrap()));
        }
    }
}

#[tokio::test]
async fn examples_are_accepted_and_have_their_schemas() {
    let (app, _) = app(answer);
    let mut sent = 0;
    for (path, methods) in DOCUMENT["paths"].as_object().unwrap() {
        // A download needs an operator and a hub, a model to be served a cache, a session the token of this server,
        // keys an operator.
        if ["/pull", "/serve", "/session", "/keys", "/revoke"].iter().any(|end| path.ends_with(end))
        {
            continue;
        }
        let content = &methods["post"]["requestBody"]["content"]["application/json"];
        for (name, example) in content["examples"].as_object().into_iter().flatten() {
            let mut body = example["value"].clone();
            let schema = format!("{}/requestBody", operation(&Method::POST, path).unwrap());
            check(&format!("{schema}/content/application~1json/schema"), &body);
            if body.get("model").is_some() {
                body["model"] = "owner/tiny".into();
            }
            let request = ClientRequest::post(path)
                .header(header::CONTENT_TYPE, "application/json")
                .body(Body::from(body.to_string()));
            let response = send(&app, request.unwrap()).await;
            // The scripted engine has no embeddings.
            let status = response.status();
            let fits =
                status == StatusCode::OK || path.contains("embed") || path.contains("rerank");
            assert!(fits, "{path} {name}: {status} {:?}", bytes(response).await);
            sent += 1;
        }
    }
    assert!(sent >= 12, "{sent} examples");
}

#[tokio::test]
async fn the_page_and_the_description_need_no_key() {
    let config = ServerConfig { api_keys: vec!["k".to_string().into()], ..ServerConfig::default() };
    let (app, _) = app_with(&config, answer);
    let get = |path: &str| ClientRequest::get(path).body(Body::empty()).unwrap();
    assert_eq!(json_of(send(&app, get("/openapi.json")).await).await, *DOCUMENT);
    let page = send(&app, get("/docs")).await;
    let policy = page.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap().to_string();
    assert!(policy.contains("default-src 'none'") && policy.contains("connect-src 'self'"));
    // Before, scripts of anybody could run, and any page could show this one in a frame.
    assert!(policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"), "{policy}");
    let page = String::from_utf8(bytes(page).await.to_vec()).unwrap();
    // Nothing of another host, which the policy would refuse, too.
    assert!(!page.contains("http://") && !page.contains("https://"), "{page}");
    assert_eq!(send(&app, get("/v1/models")).await.status(), StatusCode::UNAUTHORIZED);
}

/// The routes of the router's source, as the description has them.
fn routes() -> BTreeSet<String> {
    let source = include_str!("../../../server/src/api/mod.rs");
    // Those of clients are nested in `/v1`, too.
    let (of_clients, others) = source.split_once("// Clients disagree whether").unwrap();
    let paths = |source: &str| -> Vec<String> {
        let path = |rest: &str| rest.split('"').nth(1).unwrap().replace("{*", "{");
        source.split(".route(").skip(1).map(path).collect()
    };
    let of_clients = paths(of_clients).into_iter().map(|path| format!("/v1{path}"));
    of_clients.chain(paths(others)).collect()
}

#[test]
fn every_route_is_described() {
    let paths = DOCUMENT["paths"].as_object().unwrap();
    assert_eq!(paths.keys().cloned().collect::<BTreeSet<_>>(), routes());
    for (path, methods) in paths {
        let content = &methods["post"]["requestBody"]["content"]["application/json"];
        assert!(content.is_null() || content["examples"].is_object(), "{path} has no example");
    }
}

/// The names of schemas that `value` refers to, and those that these refer to.
fn referred(value: &Value, names: &mut BTreeSet<String>) {
    match value {
        Value::Array(list) => list.iter().for_each(|value| referred(value, names)),
        Value::Object(fields) => {
            if let Some(name) = fields.get("$ref").and_then(Value::as_str) {
                let name = name.strip_prefix("#/components/schemas/").unwrap();
                if names.insert(name.to_string()) {
                    let schema = &DOCUMENT["components"]["schemas"][name];
                    assert!(schema.is_object(), "there is no schema {name}");
                    referred(schema, names);
                }
            }
            fields.values().for_each(|value| referred(value, names));
        }
        _ => {}
    }
}

/// Schemas of bodies and of replies are generated apart, and a type of one name would hide the other.
#[test]
fn names_of_schemas_are_unique() {
    let (mut bodies, mut replies) = (BTreeSet::new(), BTreeSet::new());
    for method in DOCUMENT["paths"].as_object().unwrap().values() {
        for described in method.as_object().unwrap().values() {
            referred(&described["requestBody"], &mut bodies);
            referred(&described["responses"], &mut replies);
        }
    }
    assert!(bodies.len() > 15 && replies.len() > 50, "{bodies:?} {replies:?}");
    assert_eq!(bodies.intersection(&replies).collect::<Vec<_>>(), [] as [&String; 0]);
    // As the generator renames the second of two types of one name.
    let numbered = bodies.iter().chain(&replies).filter(|name| name.ends_with('2'));
    assert_eq!(numbered.collect::<Vec<_>>(), [] as [&String; 0]);
}

/// Adds the names of the properties of `schema`, at any depth.
fn properties(schema: &Value, names: &mut BTreeSet<String>) {
    match schema {
        Value::Array(list) => list.iter().for_each(|schema| properties(schema, names)),
        Value::Object(fields) => {
            if let Some(Value::Object(own)) = fields.get("properties") {
                names.extend(own.keys().cloned());
            }
            fields.values().for_each(|schema| properties(schema, names));
        }
        _ => {}
    }
}

/// The words in backticks of `text`, at the separators of paths and JSON.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let code = text.split('`').skip(1).step_by(2);
    let is_apart = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    code.flat_map(move |code| code.split(is_apart)).filter(|word| !word.is_empty())
}

/// A field that is parsed and not documented, or documented and not parsed.
#[test]
fn the_reference_names_the_fields_of_every_body_and_no_others() {
    let (reference, fields) =
        (include_str!("../../../server/HTTP.md"), include_str!("../../../server/FIELDS.md"));
    let named: BTreeSet<&str> = reference.lines().chain(fields.lines()).flat_map(words).collect();
    let mut count = 0;
    for (path, methods) in DOCUMENT["paths"].as_object().unwrap() {
        for described in methods.as_object().unwrap().values() {
            let mut body =
                described["requestBody"]["content"]["application/json"]["schema"].clone();
            if let Some(name) = body["$ref"].as_str().and_then(|name| name.rsplit('/').next()) {
                body = DOCUMENT["components"]["schemas"][name].clone();
            }
            let Some(own) = body["properties"].as_object() else { continue };
            let unnamed: Vec<_> =
                own.keys().filter(|name| !named.contains(name.as_str())).collect();
            assert!(unnamed.is_empty(), "{path}: neither HTTP.md nor FIELDS.md names {unnamed:?}");
            count += own.len();
        }
    }
    assert!(count > 200, "{count} fields");
    let mut known = BTreeSet::new();
    properties(&DOCUMENT, &mut known);
    let rows = reference.split("\n\n").filter(|block| block.starts_with("| field |"));
    for row in rows.flat_map(|table| table.lines().skip(2)) {
        let cell = row.split('|').nth(1).unwrap();
        // A field, or a path to it; what it is set to follows a colon.
        for path in cell.split('`').skip(1).step_by(2) {
            let path = path.split([':', ' ', '=']).next().unwrap().trim_matches(['{', '"']);
            let unknown =
                path.split(['.', '[', ']']).find(|name| !name.is_empty() && !known.contains(*name));
            assert_eq!(unknown, None, "{row}");
        }
    }
}
