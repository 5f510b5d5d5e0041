//! The table of everything that the server answers, and `GET /openapi.json`, its description.
//!
//! A test compares the table with the router, others compare replies with their schemas.

use std::sync::LazyLock;

use axum::Json;
use serde_json::{Map, Value, json};

use super::anthropic::{self, Messages};
use super::chat::{self, Chat};
use super::completions::{self, Completions};
use super::embeddings::{self, Embeddings};
use super::ollama::{self, Embed, Ollama};
use super::openapi::{
    self, JSON, Key, LINES, NO_HEADERS, Operation, SCRIPT, SSE, TEXT, any, body, event,
    event_or_done, get, post, reply, text,
};
use super::protocol::Protocol;
use super::rerank::{self, Rerank};
use super::responses::{self, Responses};
use super::schema::shapes::{
    CreateKey, Detokenize, OpenSession, Pull, RevokeKey, ServeModel, Show, Tokenize,
};
use super::{
    cache, downloads, health, history, keys, log_lines, models, policies, profiles, pull, requests,
    search, serve, session, tokens, trace,
};

/// The header of replies to conversations.
const CONVERSATION: &[(&str, &str)] = &[(
    "x-steersman-prefix",
    "Names the beginning of the conversation, as `GET /health` does if this server holds its state",
)];

/// Everything that the server answers. Routes that exist with and without `/v1` are listed with it.
pub const OPERATIONS: &[Operation] = &[
    post(
        "/v1/chat/completions",
        "A chat completion",
        (JSON, Chat::schema),
        &[(JSON, reply::<chat::ChatCompletion>), (SSE, event_or_done::<chat::ChatCompletionChunk>)],
    )
    .with_headers(CONVERSATION),
    post(
        "/v1/responses",
        "A response",
        (JSON, Responses::schema),
        &[(JSON, reply::<responses::ResponseBody>), (SSE, event::<responses::ResponseEvent>)],
    )
    .with_headers(CONVERSATION),
    get("/v1/responses/{id}", "A stored response", &[(JSON, reply::<responses::ResponseBody>)]),
    Operation {
        method: "delete",
        path: "/v1/responses/{id}",
        summary: "Deletes a stored response",
        key: Key::Client,
        body: None,
        replies: &[(JSON, reply::<responses::DeletedResponse>)],
        headers: NO_HEADERS,
    },
    get(
        "/v1/responses/{id}/input_items",
        "The input of a stored response",
        &[(JSON, reply::<responses::InputItems>)],
    ),
    post(
        "/v1/completions",
        "A completion of a raw prompt",
        (JSON, Completions::schema),
        &[
            (JSON, reply::<completions::Completion>),
            (SSE, event_or_done::<completions::Completion>),
        ],
    ),
    post(
        "/v1/embeddings",
        "Embeddings of texts",
        (JSON, Embeddings::schema),
        &[(JSON, reply::<embeddings::EmbeddingList>)],
    ),
    post(
        "/v1/rerank",
        "Documents by their similarity to a query",
        (JSON, Rerank::schema),
        &[(JSON, reply::<rerank::Ranking>)],
    ),
    post(
        "/v1/messages",
        "A message of Anthropic's",
        (JSON, Messages::schema),
        &[(JSON, reply::<anthropic::MessageReply>), (SSE, event::<anthropic::StreamEvent>)],
    )
    .with_headers(CONVERSATION),
    post(
        "/v1/messages/count_tokens",
        "The tokens of a message's prompt",
        (JSON, Messages::schema),
        &[(JSON, reply::<anthropic::InputTokens>)],
    ),
    post(
        "/v1/tokenize",
        "The tokens of a text or a conversation",
        (JSON, body::<Tokenize>),
        &[(JSON, reply::<tokens::Tokenized>)],
    ),
    post(
        "/v1/detokenize",
        "The text of tokens",
        (JSON, body::<Detokenize>),
        &[(JSON, reply::<tokens::Detokenized>)],
    ),
    post(
        "/v1/apply-template",
        "The prompt of a chat, before policies change it",
        (JSON, Chat::schema),
        &[(JSON, reply::<tokens::Rendered>)],
    ),
    get("/v1/models", "Models and profiles", &[(JSON, reply::<models::ModelList>)]),
    get("/v1/models/{name}", "One model", &[(JSON, reply::<models::ListedModel>)]),
    post(
        "/v1/models/pull",
        "Downloads a model",
        (JSON, body::<Pull>),
        &[(SSE, event::<pull::Pulled>)],
    )
    .with_key(Key::Operator),
    get("/v1/models/pull", "The download that runs", &[(JSON, reply::<pull::PullState>)])
        .with_key(Key::Operator),
    Operation {
        method: "delete",
        path: "/v1/models/pull",
        summary: "Stops the download that runs",
        key: Key::Operator,
        body: None,
        replies: &[(JSON, reply::<pull::StoppedPull>)],
        headers: NO_HEADERS,
    },
    post(
        "/v1/models/serve",
        "Serves a model on the disk until the server ends",
        (JSON, body::<ServeModel>),
        &[(JSON, reply::<serve::ServedModel>)],
    )
    .with_key(Key::Operator),
    Operation {
        method: "delete",
        path: "/v1/models/serve",
        summary: "Ends the service of a model on the disk",
        key: Key::Operator,
        body: Some((JSON, body::<ServeModel>)),
        replies: &[(JSON, reply::<serve::ServedModel>)],
        headers: NO_HEADERS,
    },
    post(
        "/api/chat",
        "A chat of Ollama's",
        (JSON, Ollama::<true>::schema),
        &[
            (JSON, reply::<ollama::Line<ollama::ChatContent>>),
            (LINES, reply::<ollama::Line<ollama::ChatContent>>),
        ],
    )
    .with_headers(CONVERSATION),
    post(
        "/api/generate",
        "A reply to a prompt, for clients of Ollama",
        (JSON, Ollama::<false>::schema),
        &[
            (JSON, reply::<ollama::Line<ollama::GeneratedContent>>),
            (LINES, reply::<ollama::Line<ollama::GeneratedContent>>),
        ],
    )
    .with_headers(CONVERSATION),
    post(
        "/api/embed",
        "Embeddings of texts, for clients of Ollama",
        (JSON, Embed::<true>::schema),
        &[(JSON, reply::<ollama::Embedded>)],
    ),
    post(
        "/api/embeddings",
        "The embedding of a text, for older clients of Ollama",
        (JSON, Embed::<false>::schema),
        &[(JSON, reply::<ollama::OneEmbedding>)],
    ),
    get("/api/tags", "Models, for clients of Ollama", &[(JSON, reply::<ollama::ModelList>)]),
    get("/api/ps", "Loaded models, for clients of Ollama", &[(JSON, reply::<ollama::ModelList>)]),
    post(
        "/api/show",
        "One model, for clients of Ollama",
        (JSON, body::<Show>),
        &[(JSON, reply::<ollama::Shown>)],
    ),
    get(
        "/api/version",
        "The server's version, for clients of Ollama",
        &[(JSON, reply::<ollama::Version>)],
    ),
    post(
        "/api/pull",
        "Downloads a model, for clients of Ollama",
        (JSON, body::<Pull>),
        &[(JSON, reply::<pull::OllamaPulled>), (LINES, reply::<pull::OllamaPulled>)],
    )
    .with_key(Key::Operator),
    Operation {
        method: "delete",
        path: "/api/delete",
        summary: "Removes a downloaded model, for clients of Ollama",
        key: Key::Operator,
        body: Some((JSON, body::<Show>)),
        replies: &[],
        headers: NO_HEADERS,
    },
    get("/v1/cache", "The prefix cache", &[(JSON, reply::<cache::CacheBody>)]),
    get("/v1/downloads", "Models on the disk", &[(JSON, reply::<downloads::Downloads>)])
        .with_key(Key::Operator),
    get("/v1/search", "Models on the hub", &[(JSON, reply::<search::Found>)])
        .with_key(Key::Operator),
    get("/v1/history", "What the server did lately", &[(JSON, reply::<history::HistoryBody>)]),
    get("/v1/log", "The newest lines of the log", &[(LINES, reply::<log_lines::LogLine>)])
        .with_key(Key::Operator),
    get("/v1/keys", "Created keys", &[(JSON, reply::<keys::KeyList>)]).with_key(Key::Operator),
    post(
        "/v1/keys",
        "Creates a key",
        (JSON, body::<CreateKey>),
        &[(JSON, reply::<keys::CreatedKey>)],
    )
    .with_key(Key::Operator),
    post(
        "/v1/keys/{name}/revoke",
        "Revokes a key",
        (JSON, body::<RevokeKey>),
        &[(JSON, reply::<keys::RevokedKey>)],
    )
    .with_key(Key::Operator),
    get("/v1/policies", "Active versions of policies", &[(JSON, reply::<policies::PoliciesBody>)]),
    post(
        "/v1/policies/{name}",
        "Uploads a version of a policy",
        ("application/wasm", |_| json!({"type": "string", "format": "binary"})),
        &[(JSON, reply::<policies::ActivationBody>)],
    )
    .with_key(Key::Operator),
    Operation {
        method: "post",
        path: "/v1/policies/{name}/rollback",
        summary: "Returns to the version before",
        key: Key::Operator,
        body: None,
        replies: &[(JSON, reply::<policies::ActivationBody>)],
        headers: NO_HEADERS,
    },
    get(
        "/v1/policies/{name}/shadow",
        "What a policy answers as a shadow",
        &[(JSON, reply::<policies::Shadow>)],
    )
    .with_key(Key::Operator),
    get("/v1/profiles", "Profiles of the key", &[(JSON, reply::<profiles::ProfileList>)]),
    get("/v1/requests", "Running and ended requests", &[(JSON, reply::<requests::RequestList>)]),
    get(
        "/v1/requests/{id}/events",
        "One request as it runs",
        &[(SSE, event::<Map<String, Value>>)],
    )
    .with_key(Key::Operator),
    get(
        "/v1/requests/{id}/trace",
        "Decisions of policies in one request",
        &[(JSON, reply::<trace::TraceBody>)],
    ),
    get(
        "/metrics",
        "Metrics for Prometheus",
        &[("application/openmetrics-text", text), (TEXT, text)],
    ),
    post(
        "/v1/session",
        "An operator's key for the token of the one-time link",
        (JSON, body::<OpenSession>),
        &[(JSON, reply::<session::Session>)],
    )
    .with_key(Key::None),
    get("/health", "What the server does", &[(JSON, reply::<health::Health>)]).with_key(Key::None),
    get("/openapi.json", "This description", &[(JSON, any)]).with_key(Key::None),
    get("/docs", "A page that shows this description", &[("text/html", text)]).with_key(Key::None),
    get("/", "The console, or a line of text", &[(TEXT, text), ("text/html", text)])
        .with_key(Key::None),
    get("/console/{file}", "A file of the console", &[("text/css", text), (SCRIPT, text)])
        .with_key(Key::None),
];

/// The description of all operations.
pub fn document() -> Value {
    openapi::document(OPERATIONS)
}

/// `GET /openapi.json`
pub async fn json() -> Json<&'static Value> {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(document);
    Json(&DOCUMENT)
}
