//! Describes operations as OpenAPI does, and `GET /docs`, a page to read and try them.
//!
//! Knows no protocol: the table of operations is [`OPERATIONS`](super::operations::OPERATIONS).

use std::sync::LazyLock;

use axum::http::{HeaderMap, header};
use axum::response::{Html, IntoResponse};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use schemars::JsonSchema;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::error::{AnthropicError, Dialect, OllamaError, OpenAiError};
use super::fields::Rule;
use super::query;
use super::schema::Schemas;

/// Bodies that the server accepts, by method and path; a test sends them.
const EXAMPLES: &str = include_str!("examples.json");

/// The page of `GET /docs`.
const PAGE: &str = include_str!("page.html");

/// What the page may do: run its one script, with its one style, and call this server.
static PAGE_POLICY: LazyLock<String> = LazyLock::new(|| {
    let digest = |tag: &str| {
        let inside = PAGE
            .split_once(&format!("<{tag}>"))
            .and_then(|(_, rest)| rest.split_once(&format!("</{tag}>")));
        let (text, _) = inside.expect("the page has a script and a style: checked by a test");
        BASE64_STANDARD.encode(Sha256::digest(text))
    };
    format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        digest("script"),
        digest("style")
    )
});

/// Which key an operation requires.
#[derive(Clone, Copy, PartialEq)]
pub enum Key {
    /// None.
    None,
    /// A key of a client, if the server has keys.
    Client,
    /// A key of an operator.
    Operator,
}

/// Describes a body or a reply.
pub type Describe = fn(&mut Schemas) -> Value;

/// A reply or a body: its media type and its schema.
pub type Content = (&'static str, Describe);

/// One method of one path.
pub struct Operation {
    /// The method, in lower case.
    pub method: &'static str,
    /// The path, with names of its parts in braces.
    pub path: &'static str,
    /// The effect in a few words.
    pub summary: &'static str,
    /// The key that it requires.
    pub key: Key,
    /// The body of the request.
    pub body: Option<Content>,
    /// The replies with status 200. The schema of a stream is that of its items.
    pub replies: &'static [Content],
    /// Headers that replies with status 200 may have beside those that all have, and what they say.
    pub headers: &'static [(&'static str, &'static str)],
}

/// The media type of whole replies.
pub const JSON: &str = "application/json";
/// The media type of streams of server-sent events.
pub const SSE: &str = "text/event-stream";
/// The media type of streams of lines.
pub const LINES: &str = "application/x-ndjson";
/// The media type of text.
pub const TEXT: &str = "text/plain";
/// The media type of scripts.
pub const SCRIPT: &str = "text/javascript";

/// A reply of type `T`.
pub fn reply<T: JsonSchema>(schemas: &mut Schemas) -> Value {
    schemas.reply::<T>().into()
}

/// An event of a stream of server-sent events, whose data has type `T`.
pub fn event<T: JsonSchema>(schemas: &mut Schemas) -> Value {
    let data = json!({
        "type": "string", "contentMediaType": JSON, "contentSchema": reply::<T>(schemas),
    });
    json!({
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    })
}

/// As [`event`], for OpenAI's streams.
pub fn event_or_done<T: JsonSchema>(schemas: &mut Schemas) -> Value {
    let mut event = event::<T>(schemas);
    let data = &mut event["properties"]["data"];
    *data = json!({"anyOf": [{"const": "[DONE]"}, data.take()]});
    event
}

/// A body of type `T`.
pub fn body<T: JsonSchema>(schemas: &mut Schemas) -> Value {
    schemas.of::<T>().into()
}

/// A text.
pub fn text(_: &mut Schemas) -> Value {
    json!({"type": "string"})
}

/// Any object.
pub fn any(_: &mut Schemas) -> Value {
    json!({"type": "object"})
}

/// No headers beside those that all replies have.
pub const NO_HEADERS: &[(&str, &str)] = &[];

/// A `GET` for clients.
pub const fn get(
    path: &'static str,
    summary: &'static str,
    replies: &'static [Content],
) -> Operation {
    let (key, body, headers) = (Key::Client, None, NO_HEADERS);
    Operation { method: "get", path, summary, key, body, replies, headers }
}

/// A `POST` for clients.
pub const fn post(
    path: &'static str,
    summary: &'static str,
    body: Content,
    replies: &'static [Content],
) -> Operation {
    let (key, body, headers) = (Key::Client, Some(body), NO_HEADERS);
    Operation { method: "post", path, summary, key, body, replies, headers }
}

impl Operation {
    /// The operation with another key.
    pub const fn with_key(self, key: Key) -> Self {
        Self { key, ..self }
    }

    /// The operation with these headers of its replies.
    pub const fn with_headers(self, headers: &'static [(&'static str, &'static str)]) -> Self {
        Self { headers, ..self }
    }
}

/// The description of `operations`. OpenAPI 3.2 is the first version that can describe the items of streams.
pub fn document(operations: &[Operation]) -> Value {
    let mut schemas = Schemas::new();
    let examples: Value = serde_json::from_str(EXAMPLES).expect("the file contains JSON");
    let mut paths = Map::new();
    for operation in operations {
        let described = describe(operation, &mut schemas, &examples);
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = described;
    }
    let errors: [Describe; 3] =
        [reply::<OpenAiError>, reply::<AnthropicError>, reply::<OllamaError>];
    for describe in errors {
        describe(&mut schemas);
    }
    let components = schemas.take_components();
    json!({
        "openapi": "3.2.0",
        "info": {
            "title": "Steersman",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "Apache-2.0"},
            "description": "Routes under /v1 that OpenAI or Anthropic have, and those about models and tokens, \
                            exist without /v1 too. Fields that are not listed are rejected, unless they are null.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

fn describe(operation: &Operation, schemas: &mut Schemas, examples: &Value) -> Value {
    let error = match Dialect::of(operation.path, &HeaderMap::new()) {
        Dialect::OpenAi => reply::<OpenAiError>(schemas),
        Dialect::Anthropic => reply::<AnthropicError>(schemas),
        Dialect::Ollama => reply::<OllamaError>(schemas),
    };
    let headers = json!({"x-request-id": {"schema": {"type": "string"}}});
    let refused = |description: &str, schema: &Value| {
        json!({
            "description": description, "headers": headers, "content": {JSON: {"schema": schema}},
        })
    };
    let content: Map<String, Value> = operation
        .replies
        .iter()
        .map(|(media_type, schema)| {
            let name = if [SSE, LINES].contains(media_type) { "itemSchema" } else { "schema" };
            ((*media_type).to_string(), json!({name: schema(schemas)}))
        })
        .collect();
    let mut own_headers = headers.clone();
    for (name, description) in operation.headers {
        own_headers[*name] = json!({"schema": {"type": "string"}, "description": description});
    }
    let mut responses = json!({
        "200": {"description": operation.summary, "headers": own_headers, "content": content},
        "4XX": refused("The request is wrong, or not allowed", &error),
        "5XX": refused("The server cannot answer", &error),
    });
    if operation.path == "/health" {
        // While it loads or drains.
        responses["503"] = refused("The server is not ready", &json!({"type": "object"}));
    }
    let security = match operation.key {
        Key::None => json!([]),
        Key::Client => json!([{}, {"bearer": []}, {"header": []}]),
        Key::Operator => json!([{"bearer": []}, {"header": []}]),
    };
    let id = operation.path.replace(['/', '.', '-'], "_").replace(['{', '}'], "");
    let mut described = json!({
        "operationId": format!("{}{id}", operation.method),
        "summary": operation.summary,
        "security": security,
        "responses": responses,
    });
    let parameters = parameters(operation);
    if !parameters.is_empty() {
        described["parameters"] = parameters.into();
    }
    if let Some((media_type, schema)) = operation.body {
        let mut content = json!({"schema": schema(schemas)});
        let key = format!("{} {}", operation.method.to_uppercase(), operation.path);
        if let Some(examples) = examples.get(key) {
            content["examples"] = examples.clone();
        }
        described["requestBody"] = json!({"required": true, "content": {media_type: content}});
    }
    described
}

/// Parts of the path, and the query.
fn parameters(operation: &Operation) -> Vec<Value> {
    let parts =
        operation.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let schema = json!({"type": "string"});
    let part = |name| json!({"name": name, "in": "path", "required": true, "schema": schema});
    let mut parameters: Vec<_> = parts.map(part).collect();
    let method = operation.method.to_uppercase();
    for (name, rule) in query::parameters(&method, operation.path) {
        let description = match rule {
            Rule::Read => "Has an effect.",
            Rule::Ignored => "Accepted and not used.",
            Rule::Only(..) => continue,
        };
        let schema = match name.ends_with("[]") {
            true => json!({"type": "array", "items": schema}),
            false => schema.clone(),
        };
        parameters.push(json!({
            "name": name, "in": "query", "schema": schema, "description": description,
        }));
    }
    parameters
}

/// `GET /docs`
pub async fn page() -> impl IntoResponse {
    ([(header::CONTENT_SECURITY_POLICY, PAGE_POLICY.as_str())], Html(PAGE))
}
