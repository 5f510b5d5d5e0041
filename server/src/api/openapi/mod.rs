//! `GET /openapi.json`, the description of this interface, and `GET /docs`, a page to read and try it.
//!
//! Bodies are described by the types that parse them and by the tables of [`fields`](super::fields), replies by
//! [`replies`]. A test compares [`OPERATIONS`] with the router, others compare replies with their schemas.

mod replies;
pub(crate) mod shapes;

use std::sync::LazyLock;

use axum::Json;
use axum::http::{HeaderMap, header};
use axum::response::{Html, IntoResponse};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::anthropic::Messages;
use super::cache::CacheBody;
use super::chat::Chat;
use super::completions::Completions;
use super::embeddings::Embeddings;
use super::error::Dialect;
use super::fields::{Field, Rule};
use super::ollama::{Embed, Ollama};
use super::policies::{ActivationBody, PoliciesBody};
use super::protocol::Protocol;
use super::query;
use super::rerank::Rerank;
use super::responses::Responses;
use shapes::{Detokenize, Pull, Show, Tokenize};

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

/// Generates schemas; those with names are components.
pub struct Schemas {
    bodies: SchemaGenerator,
    replies: SchemaGenerator,
}

/// Which key an operation requires.
#[derive(Clone, Copy, PartialEq)]
enum Key {
    None,
    Client,
    Operator,
}

/// Describes a body or a reply.
type Describe = fn(&mut Schemas) -> Value;

/// A reply or a body: its media type and its schema.
type Content = (&'static str, Describe);

/// One method of one path.
struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    key: Key,
    body: Option<Content>,
    /// With status 200. Of a stream, the schema is that of its items.
    replies: &'static [Content],
}

const JSON: &str = "application/json";
const SSE: &str = "text/event-stream";
const LINES: &str = "application/x-ndjson";
const TEXT: &str = "text/plain";
const SCRIPT: &str = "text/javascript";

/// A reply of type `T`.
fn reply<T: JsonSchema>(schemas: &mut Schemas) -> Value {
    schemas.replies.subschema_for::<T>().into()
}

/// An event of a stream of server-sent events, whose data has type `T`.
fn event<T: JsonSchema>(schemas: &mut Schemas) -> Value {
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
fn event_or_done<T: JsonSchema>(schemas: &mut Schemas) -> Value {
    let mut event = event::<T>(schemas);
    let data = &mut event["properties"]["data"];
    *data = json!({"anyOf": [{"const": "[DONE]"}, data.take()]});
    event
}

/// A body of type `T`.
fn body<T: JsonSchema>(schemas: &mut Schemas) -> Value {
    schemas.of::<T>().into()
}

fn text(_: &mut Schemas) -> Value {
    json!({"type": "string"})
}

fn any(_: &mut Schemas) -> Value {
    json!({"type": "object"})
}

const fn get(path: &'static str, summary: &'static str, replies: &'static [Content]) -> Operation {
    Operation { method: "get", path, summary, key: Key::Client, body: None, replies }
}

const fn post(
    path: &'static str,
    summary: &'static str,
    body: Content,
    replies: &'static [Content],
) -> Operation {
    Operation { method: "post", path, summary, key: Key::Client, body: Some(body), replies }
}

impl Operation {
    const fn with_key(self, key: Key) -> Self {
        Self { key, ..self }
    }
}

/// Everything that the server answers. Routes that exist with and without `/v1` are listed with it.
const OPERATIONS: &[Operation] = &[
    post(
        "/v1/chat/completions",
        "A chat completion",
        (JSON, Chat::schema),
        &[
            (JSON, reply::<replies::ChatCompletion>),
            (SSE, event_or_done::<replies::ChatCompletionChunk>),
        ],
    ),
    post(
        "/v1/responses",
        "A response",
        (JSON, Responses::schema),
        &[(JSON, reply::<replies::ResponseBody>), (SSE, event::<replies::ResponseEvent>)],
    ),
    get("/v1/responses/{id}", "A stored response", &[(JSON, reply::<replies::ResponseBody>)]),
    Operation {
        method: "delete",
        path: "/v1/responses/{id}",
        summary: "Deletes a stored response",
        key: Key::Client,
        body: None,
        replies: &[(JSON, reply::<replies::DeletedResponse>)],
    },
    get(
        "/v1/responses/{id}/input_items",
        "The input of a stored response",
        &[(JSON, reply::<replies::InputItems>)],
    ),
    post(
        "/v1/completions",
        "A completion of a raw prompt",
        (JSON, Completions::schema),
        &[(JSON, reply::<replies::Completion>), (SSE, event_or_done::<replies::Completion>)],
    ),
    post(
        "/v1/embeddings",
        "Embeddings of texts",
        (JSON, Embeddings::schema),
        &[(JSON, reply::<replies::EmbeddingList>)],
    ),
    post(
        "/v1/rerank",
        "Documents by their similarity to a query",
        (JSON, Rerank::schema),
        &[(JSON, reply::<replies::Ranking>)],
    ),
    post(
        "/v1/messages",
        "A message of Anthropic's",
        (JSON, Messages::schema),
        &[(JSON, reply::<replies::MessageReply>), (SSE, event::<replies::MessageEvent>)],
    ),
    post(
        "/v1/messages/count_tokens",
        "The tokens of a message's prompt",
        (JSON, Messages::schema),
        &[(JSON, reply::<replies::InputTokens>)],
    ),
    post(
        "/v1/tokenize",
        "The tokens of a text or a conversation",
        (JSON, body::<Tokenize>),
        &[(JSON, reply::<replies::Tokenized>)],
    ),
    post(
        "/v1/detokenize",
        "The text of tokens",
        (JSON, body::<Detokenize>),
        &[(JSON, reply::<replies::Detokenized>)],
    ),
    post(
        "/v1/apply-template",
        "The prompt of a chat, before policies change it",
        (JSON, Chat::schema),
        &[(JSON, reply::<replies::Rendered>)],
    ),
    get("/v1/models", "Models and profiles", &[(JSON, reply::<replies::ModelList>)]),
    get("/v1/models/{name}", "One model", &[(JSON, reply::<replies::ListedModel>)]),
    post(
        "/v1/models/pull",
        "Downloads a model",
        (JSON, body::<Pull>),
        &[(SSE, event::<replies::Pulled>)],
    )
    .with_key(Key::Operator),
    Operation {
        method: "delete",
        path: "/v1/models/pull",
        summary: "Stops the download that runs",
        key: Key::Operator,
        body: None,
        replies: &[(JSON, reply::<replies::StoppedPull>)],
    },
    post(
        "/api/chat",
        "A chat of Ollama's",
        (JSON, Ollama::<true>::schema),
        &[(JSON, reply::<replies::OllamaChat>), (LINES, reply::<replies::OllamaChat>)],
    ),
    post(
        "/api/generate",
        "A reply to a prompt, for clients of Ollama",
        (JSON, Ollama::<false>::schema),
        &[(JSON, reply::<replies::OllamaGenerated>), (LINES, reply::<replies::OllamaGenerated>)],
    ),
    post(
        "/api/embed",
        "Embeddings of texts, for clients of Ollama",
        (JSON, Embed::<true>::schema),
        &[(JSON, reply::<replies::OllamaEmbedded>)],
    ),
    post(
        "/api/embeddings",
        "The embedding of a text, for older clients of Ollama",
        (JSON, Embed::<false>::schema),
        &[(JSON, reply::<replies::OllamaEmbedding>)],
    ),
    get("/api/tags", "Models, for clients of Ollama", &[(JSON, reply::<replies::OllamaModels>)]),
    get(
        "/api/ps",
        "Loaded models, for clients of Ollama",
        &[(JSON, reply::<replies::OllamaModels>)],
    ),
    post(
        "/api/show",
        "One model, for clients of Ollama",
        (JSON, body::<Show>),
        &[(JSON, reply::<replies::OllamaShown>)],
    ),
    get(
        "/api/version",
        "The server's version, for clients of Ollama",
        &[(JSON, reply::<replies::OllamaVersion>)],
    ),
    post(
        "/api/pull",
        "Downloads a model, for clients of Ollama",
        (JSON, body::<Pull>),
        &[(JSON, reply::<replies::OllamaPulled>), (LINES, reply::<replies::OllamaPulled>)],
    )
    .with_key(Key::Operator),
    get("/v1/cache", "The prefix cache", &[(JSON, reply::<CacheBody>)]),
    get("/v1/policies", "Active versions of policies", &[(JSON, reply::<PoliciesBody>)]),
    post(
        "/v1/policies/{name}",
        "Uploads a version of a policy",
        ("application/wasm", |_| json!({"type": "string", "format": "binary"})),
        &[(JSON, reply::<ActivationBody>)],
    )
    .with_key(Key::Operator),
    Operation {
        method: "post",
        path: "/v1/policies/{name}/rollback",
        summary: "Returns to the version before",
        key: Key::Operator,
        body: None,
        replies: &[(JSON, reply::<ActivationBody>)],
    },
    get(
        "/v1/policies/{name}/shadow",
        "What a policy answers as a shadow",
        &[(JSON, reply::<replies::Shadow>)],
    )
    .with_key(Key::Operator),
    get("/v1/profiles", "Profiles of the key", &[(JSON, reply::<replies::ProfileList>)]),
    get("/v1/requests", "Running and ended requests", &[(JSON, reply::<replies::RequestList>)]),
    get(
        "/v1/requests/{id}/events",
        "One request as it runs",
        &[(SSE, event::<Map<String, Value>>)],
    )
    .with_key(Key::Operator),
    get(
        "/v1/requests/{id}/trace",
        "Decisions of policies in one request",
        &[(JSON, reply::<replies::Trace>)],
    ),
    get("/metrics", "Metrics for Prometheus", &[("application/openmetrics-text", text)]),
    get("/health", "What the server does", &[(JSON, reply::<replies::Health>)]).with_key(Key::None),
    get("/openapi.json", "This description", &[(JSON, any)]).with_key(Key::None),
    get("/docs", "A page that shows this description", &[("text/html", text)]).with_key(Key::None),
    get("/", "The console, or a line of text", &[(TEXT, text), ("text/html", text)])
        .with_key(Key::None),
    get("/console/{file}", "A file of the console", &[("text/css", text), (SCRIPT, text)])
        .with_key(Key::None),
];

impl Schemas {
    fn new() -> Self {
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
            settings.meta_schema = None;
        });
        Self {
            bodies: settings.clone().for_deserialize().into_generator(),
            replies: settings.for_serialize().into_generator(),
        }
    }

    /// The schema of a type that parses a body, or a part of one.
    pub fn of<T: JsonSchema>(&mut self) -> Schema {
        let mut schema = T::json_schema(&mut self.bodies);
        schema.remove("title");
        schema
    }

    /// The schema of an object with the fields of `table`, which `parts` parse.
    ///
    /// # Panics
    /// If `parts` lack a field that is read. A test generates all schemas.
    pub fn body(&self, table: &[Field], parts: &[Schema]) -> Value {
        let mut properties = Map::new();
        let mut required: Vec<Value> = Vec::new();
        for (name, rule) in table {
            let part = parts.iter().find_map(|part| {
                let property = part.get("properties")?.get(*name)?;
                Some((property.clone(), part.get("required").and_then(Value::as_array)))
            });
            let property = match rule {
                Rule::Read => {
                    let (property, needed) = part
                        .unwrap_or_else(|| panic!("`{name}` is read, but no type describes it"));
                    let is_required = needed.is_some_and(|needed| needed.contains(&json!(name)));
                    required.extend(is_required.then(|| json!(name)));
                    property
                }
                Rule::Ignored => json!({"description": "Accepted and not used."}),
                Rule::Only(neutral, advice) => {
                    let mut values: Vec<Value> = serde_json::from_str(neutral)
                        .expect("the table contains JSON lists: checked by a test");
                    values.push(Value::Null);
                    json!({"enum": values, "description": format!("Not supported: {advice}.")})
                }
            };
            properties.insert((*name).into(), property);
        }
        json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        })
    }
}

/// The description. OpenAPI 3.2 is the first version that can describe the items of streams.
pub fn document() -> Value {
    let mut schemas = Schemas::new();
    let examples: Value = serde_json::from_str(EXAMPLES).expect("the file contains JSON");
    let mut paths = Map::new();
    for operation in OPERATIONS {
        let described = describe(operation, &mut schemas, &examples);
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = described;
    }
    let errors = [reply::<replies::Error>, reply::<replies::AnthropicError>];
    errors.into_iter().chain([reply::<replies::OllamaError> as Describe]).for_each(|error| {
        error(&mut schemas);
    });
    let mut components = schemas.bodies.take_definitions(true);
    components.append(&mut schemas.replies.take_definitions(true));
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
        Dialect::OpenAi => reply::<replies::Error>(schemas),
        Dialect::Anthropic => reply::<replies::AnthropicError>(schemas),
        Dialect::Ollama => reply::<replies::OllamaError>(schemas),
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
    let mut responses = json!({
        "200": {"description": operation.summary, "headers": headers, "content": content},
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

/// `GET /openapi.json`
pub async fn json() -> Json<&'static Value> {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(document);
    Json(&DOCUMENT)
}

/// `GET /docs`
pub async fn page() -> impl IntoResponse {
    ([(header::CONTENT_SECURITY_POLICY, PAGE_POLICY.as_str())], Html(PAGE))
}
