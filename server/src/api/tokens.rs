//! `POST /tokenize`, `/detokenize` and `/apply-template`: the text side of the model, without
//! generation. The names of the fields are those of vLLM and llama.cpp.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::Error;
use steersman_engine::request::{RawPrompt, Request};

use super::access::{Admission, Caller};
use super::app::App;
use super::chat::Chat;
use super::error::ApiError;
use super::json;
use super::protocol::{JSON, Parsed, Protocol};

/// The client's name of the model, and the rest of a body.
type Named<T> = (Option<String>, T);

/// The text that `POST /tokenize` gets.
struct Tokenize {
    request: Request,
    /// The field that has it.
    field: &'static str,
    /// Whether the answer has the text of each token.
    with_pieces: bool,
}

/// The tokens of a text.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    /// With `return_token_strs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_strs: Option<Vec<String>>,
}

/// A text, under two names.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Detokenized {
    prompt: String,
    content: String,
}

/// The prompt of a chat.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Rendered {
    prompt: String,
}

/// `POST /tokenize`: the tokens of a text (`prompt` or `content`), or of a conversation.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Tokenized>, ApiError> {
    let (mut call, admission) = read(&app, &caller, &headers, body, parse_tokenize).await?;
    let field = call.field;
    app.mcp.offer(&admission.profile, &admission.backend, &mut call.request, &mut Vec::new()).await;
    let reply = app.bodies.work(move || {
        let backend = &admission.backend;
        let tokens = backend.tokenize(&call.request);
        let tokens = tokens.map_err(|error| ApiError::from(error).in_fields(field, &[]))?;
        let texts = || -> Result<Vec<_>, Error> {
            tokens.iter().map(|token| backend.detokenize("tokens", &[*token])).collect()
        };
        let token_strs = call.with_pieces.then(texts).transpose()?;
        let (count, max_model_len) = (tokens.len(), backend.context().unwrap_or(0));
        Ok::<_, ApiError>(Tokenized { count, max_model_len, tokens, token_strs })
    });
    Ok(Json(reply.await??))
}

fn parse_tokenize(mut fields: Map<String, Value>) -> Result<Named<Tokenize>, ApiError> {
    let mut with_pieces = false;
    for name in ["return_token_strs", "with_pieces"] {
        let wish: Option<bool> = json::typed(name, &fields.shift_remove(name).unwrap_or_default())?;
        with_pieces |= wish == Some(true);
    }
    if fields.contains_key("messages") {
        let (model, request) = parse_chat(fields)?;
        return Ok((model, Tokenize { request, field: "messages", with_pieces }));
    }
    let model = model(&mut fields)?;
    let named = ["prompt", "content"].into_iter().find_map(|field| {
        let value = fields.shift_remove(field).filter(|value| !value.is_null());
        value.map(|value| (field, value))
    });
    let Some((field, Value::String(text))) = named else {
        let message = "prompt: must be a string; or send messages";
        return Err(ApiError::missing("prompt", message));
    };
    end(&fields, &["model", "prompt", "content", "messages", "return_token_strs", "with_pieces"])?;
    let request = Request { prompt: Some(RawPrompt::Text(text)), ..Request::default() };
    Ok((model, Tokenize { request, field, with_pieces }))
}

/// `POST /detokenize`: the text of `tokens`, with special tokens.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Detokenized>, ApiError> {
    let (tokens, admission) = read(&app, &caller, &headers, body, parse_detokenize).await?;
    let text = app.bodies.work(move || admission.backend.detokenize("tokens", &tokens)).await??;
    Ok(Json(Detokenized { prompt: text.clone(), content: text }))
}

fn parse_detokenize(mut fields: Map<String, Value>) -> Result<Named<Vec<u32>>, ApiError> {
    let model = model(&mut fields)?;
    let tokens = fields.shift_remove("tokens").unwrap_or_default();
    end(&fields, &["model", "tokens"])?;
    Ok((model, json::typed("tokens", &tokens)?))
}

/// `POST /apply-template`: the prompt of a chat request as text, before policies change it.
pub async fn apply_template(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Rendered>, ApiError> {
    let (mut request, admission) = read(&app, &caller, &headers, body, parse_chat).await?;
    app.mcp.offer(&admission.profile, &admission.backend, &mut request, &mut Vec::new()).await;
    let prompt = app.bodies.work(move || admission.backend.render(&request)).await?;
    let prompt = prompt.map_err(|error| ApiError::from(error).in_fields("messages", &[]))?;
    Ok(Json(Rendered { prompt }))
}

fn parse_chat(fields: Map<String, Value>) -> Result<Named<Request>, ApiError> {
    let Parsed { model, call, .. } = Chat::parse(fields)?;
    let request = call?.requests.into_iter().next().unwrap_or_default();
    Ok((model, request))
}

/// Takes the field `model`.
fn model(fields: &mut Map<String, Value>) -> Result<Option<String>, ApiError> {
    match fields.shift_remove("model") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(model)) => Ok(Some(model)),
        Some(_) => Err(ApiError::invalid("invalid_type", "model", "model: must be a string")),
    }
}

/// Rejects any field that is left and not null as unknown; `known` are the names of the fields.
fn end(fields: &Map<String, Value>, known: &[&str]) -> Result<(), ApiError> {
    match fields.iter().find(|(_, value)| !value.is_null()) {
        None => Ok(()),
        Some((name, _)) => Err(ApiError::unknown_field(name, known.iter().copied())),
    }
}

/// Reads, parses and admits a body.
async fn read<T: Send + 'static>(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body,
    parse: fn(Map<String, Value>) -> Result<Named<T>, ApiError>,
) -> Result<(T, Admission), ApiError> {
    let body = app.read_json(headers, body, JSON).await?;
    let (model, parsed) = app.bodies.parse(body.bytes, parse).await?;
    Ok((parsed, app.admit(caller, headers, model).await?))
}
