//! `POST` and `DELETE /v1/models/serve`: models in the cache of this machine that are served until the server ends, for
//! operators.

use std::fmt::Display;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::tools::model_types;
use steersman_models::facts::{Facts, check_family};
use steersman_models::named::model_id;

use super::access::Caller;
use super::app::App;
use super::blocking::blocking;
use super::error::ApiError;
use super::protocol::JSON;
use crate::config::OnDemandConfig;
use crate::models::NamedBy;

/// A model in the cache.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ServedModel {
    /// Its name for clients.
    model: String,
    served: bool,
    /// The lines of the configuration that serve it from the start.
    toml: String,
}

/// `POST /v1/models/serve`
pub async fn serve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<ServedModel>, ApiError> {
    let asked = operators_model(&app, &caller, &headers, body).await?;
    // It reads the files' headers.
    let model = blocking(move || serve_cached(&app, &asked)).await??;
    Ok(Json(ServedModel { served: true, toml: OnDemandConfig::lines(&model), model }))
}

/// `DELETE /v1/models/serve`
pub async fn withdraw(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<ServedModel>, ApiError> {
    let asked = operators_model(&app, &caller, &headers, body).await?;
    let model = name_of(&app, &asked)?;
    if app.models.named_by(&model) == Some(NamedBy::Configuration) {
        return Err(configured(&model));
    }
    if !app.models.withdraw(&model) {
        let message = format!("the model `{model}` is not served; see GET /v1/models");
        return Err(ApiError::model_not_found(message));
    }
    tracing::info!(model, "service of a model ended by an operator");
    Ok(Json(ServedModel { served: false, toml: OnDemandConfig::lines(&model), model }))
}

/// Reads the body of an operator: the name of a model.
async fn operators_model(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body,
) -> Result<String, ApiError> {
    app.access.operator(caller).inspect_err(|_| app.metrics.unauthorized())?;
    let body = app.read_json(headers, body, JSON).await?;
    app.bodies.parse(body.bytes, parse).await
}

fn parse(mut body: Map<String, Value>) -> Result<String, ApiError> {
    let model = body.shift_remove("model").unwrap_or_default();
    if let Some(name) = body.keys().next() {
        return Err(ApiError::unknown_field(name, ["model"]));
    }
    match model {
        Value::String(model) => Ok(model),
        Value::Null => {
            Err(ApiError::missing("model", "model: must be the id of a repo (owner/name)"))
        }
        _ => Err(ApiError::invalid("invalid_type", "model", "model: must be a string")),
    }
}

/// The name for clients of the model that an operator calls `asked`: the same if it is served, or else the id on a hub.
fn name_of(app: &App, asked: &str) -> Result<String, ApiError> {
    if app.models.named_by(asked).is_some() {
        return Ok(asked.into());
    }
    let id = model_id(asked, app.models.room()).map_err(wrong)?;
    Ok(id.into())
}

/// Serves a model of the cache; returns its name for clients. Blocks.
fn serve_cached(app: &App, asked: &str) -> Result<String, ApiError> {
    // Nobody removes its files between the look for them and the name in the list.
    let _files = app.files.lock();
    let id = name_of(app, asked)?;
    match app.models.named_by(&id) {
        Some(NamedBy::Configuration) => return Err(configured(&id)),
        Some(NamedBy::Operator) => return Ok(id),
        None => {}
    }
    let hub = app.hub();
    let Some(folder) = hub.cached(&id) else {
        let message = format!(
            "the files of `{id}` are not all in the cache of this machine; download it first (POST /v1/models/pull)"
        );
        return Err(ApiError::model_not_found(message));
    };
    // What no process can load is refused before clients see it.
    let facts = Facts::read(&folder).map_err(|error| wrong(format!("{id}: {error:#}")))?;
    check_family(&facts.family, &model_types()).map_err(wrong)?;
    let recipe = app.models.recipe(&hub, &id).map_err(|error| wrong(format!("{error:#}")))?;
    if !app.models.serve(&id, recipe) {
        return Err(configured(&id));
    }
    tracing::info!(model = id, "model served by an operator");
    Ok(id)
}

/// A model that cannot be served, and why.
fn wrong(problem: impl Display) -> ApiError {
    ApiError::value("model", format!("model: {problem}"))
}

fn configured(model: &str) -> ApiError {
    let message = format!(
        "the configuration names `{model}`: it is served as configured, and until it is removed there and the server \
         is restarted"
    );
    ApiError::conflict("model_configured", message)
}
