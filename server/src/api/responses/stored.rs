//! What was stored of a response: `GET` and `DELETE /v1/responses/{id}`, and the items of its input.

use std::collections::HashSet;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::{Extension, Json};
use serde_json::{Value, json};

use super::request::{LOGPROBS, check_include};
use super::{DeletedResponse, InputItems, Protocol, Responses};
use crate::api::access::Caller;
use crate::api::app::App;
use crate::api::error::ApiError;
use crate::api::query::Query;
use crate::api::response_store::Stored;

/// Items of a page unless the client sets another number, and most of them.
const PAGE: usize = 20;
const LARGEST_PAGE: usize = 100;

/// `GET /v1/responses/{id}`
pub async fn get(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Extension(query): Extension<Query>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    check_include(query.all("include"))?;
    let response = stored(&app, &caller, &id)?.response;
    if query.all("include").any(|name| name == LOGPROBS) && !has_logprobs(&response) {
        let message = format!(
            "include: the response was created without probabilities; create it with `{LOGPROBS}` in `include`"
        );
        return Err(ApiError::value("include", message));
    }
    Ok(Json(response))
}

/// Whether all texts of a response have probabilities.
fn has_logprobs(response: &Value) -> bool {
    let items = response["output"].as_array().into_iter().flatten();
    let mut parts = items
        .filter(|item| item["type"] == "message")
        .flat_map(|item| item["content"].as_array().into_iter().flatten());
    parts.all(|part| part["logprobs"].as_array().is_some_and(|list| !list.is_empty()))
}

/// `GET /v1/responses/{id}/input_items`
pub async fn input_items(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Extension(query): Extension<Query>,
    Path(id): Path<String>,
) -> Result<Json<InputItems>, ApiError> {
    check_include(query.all("include"))?;
    let digits = id.trim_start_matches(Responses::ID);
    let items = items(digits, stored(&app, &caller, &id)?.input);
    Ok(Json(page(items, &query)?))
}

/// `DELETE /v1/responses/{id}`
pub async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<DeletedResponse>, ApiError> {
    stored(&app, &caller, &id)?;
    let deleted = app.responses.as_ref().is_some_and(|store| store.delete(&id));
    Ok(Json(DeletedResponse { id, object: "response", deleted }))
}

/// A stored response of a profile that the caller may use.
fn stored(app: &App, caller: &Caller, id: &str) -> Result<Stored, ApiError> {
    let stored = app.responses.as_ref().and_then(|store| store.get(id));
    let stored = stored.ok_or_else(|| ApiError::response_not_found("", id))?;
    app.access.allow(caller, &stored.profile)?;
    Ok(stored)
}

/// The items of an input as OpenAI lists them: each has a type and an id of its own, messages have a status and
/// their content in parts.
fn items(digits: &str, input: Value) -> Vec<Value> {
    let Value::Array(mut items) = input else { return Vec::new() };
    let mut ids = HashSet::new();
    for (index, item) in items.iter_mut().enumerate() {
        let Some(fields) = item.as_object_mut() else { continue };
        let kind = fields.get("type").and_then(Value::as_str).unwrap_or("message").to_string();
        fields.insert("type".into(), kind.as_str().into());
        // A cursor names one item: the second of two with one id gets its own.
        let own = fields.get("id").and_then(Value::as_str).filter(|id| !id.is_empty());
        let own = own.map(str::to_string).filter(|own| ids.insert(own.clone()));
        let prefix = match kind.as_str() {
            "message" => "msg",
            "reasoning" => "rs",
            "function_call" => "fc",
            "function_call_output" => "fco",
            _ => "item",
        };
        let id = own.unwrap_or_else(|| format!("{prefix}_{digits}_in{index}"));
        ids.insert(id.clone());
        fields.insert("id".into(), id.into());
        if kind != "message" {
            continue;
        }
        fields.entry("status").or_insert_with(|| "completed".into());
        if let Some(Value::String(text)) = fields.get("content") {
            let part = match fields.get("role").and_then(Value::as_str) {
                Some("assistant") => {
                    json!({"type": "output_text", "text": text, "annotations": []})
                }
                _ => json!({"type": "input_text", "text": text}),
            };
            fields.insert("content".into(), json!([part]));
        }
    }
    items
}

/// A page of `items`: the newest first unless `order` says otherwise.
fn page(mut items: Vec<Value>, query: &Query) -> Result<InputItems, ApiError> {
    match query.get("order") {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(order) => {
            let message = format!("order: is `{order}`, must be asc or desc");
            return Err(ApiError::value("order", message));
        }
    }
    let limit = match query.get("limit") {
        None => PAGE,
        Some(text) => {
            let limit = text.parse().ok().filter(|limit| (1..=LARGEST_PAGE).contains(limit));
            limit.ok_or_else(|| {
                let message = format!("limit: is `{text}`, must be 1 to {LARGEST_PAGE}");
                ApiError::value("limit", message)
            })?
        }
    };
    let position = |name: &str| -> Result<Option<usize>, ApiError> {
        let Some(id) = query.get(name) else { return Ok(None) };
        let found = items.iter().position(|item| item["id"] == id);
        found.map(Some).ok_or_else(|| {
            let message = format!("{name}: the input has no item `{id}`");
            ApiError::value(name, message)
        })
    };
    let (after, before) = (position("after")?, position("before")?);
    let from = after.map_or(0, |index| index + 1);
    let to = before.unwrap_or(items.len()).max(from);
    // Before an item means the items next to it; otherwise a page begins at its start.
    let (from, to, has_more) = match (after, before) {
        (None, Some(_)) => (to.saturating_sub(limit).max(from), to, to - from > limit),
        _ => (from, to.min(from + limit), to - from > limit),
    };
    let data = items[from..to].to_vec();
    let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first_id, last_id) = (id(data.first()), id(data.last()));
    Ok(InputItems { object: "list", data, first_id, last_id, has_more })
}
