//! `GET /v1/models` and `GET /v1/models/{id}`: the model, and the model with each further profile.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use steersman_engine::engine::Info;

use super::App;
use super::error::ApiError;
use super::request::profile_of;

/// All names under which this server answers.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let info = app.engine.info();
    let further = info.profiles.iter().filter(|profile| *profile != "default");
    let names = further.map(|profile| format!("{}@{profile}", info.model));
    let models: Vec<_> =
        std::iter::once(info.model.clone()).chain(names).map(|name| model(&name, info)).collect();
    Json(json!({"object": "list", "data": models}))
}

/// One of them.
pub async fn get(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let info = app.engine.info();
    if profile_of(&name, info).is_none() {
        let message = format!("there is no model `{name}` here; see GET /v1/models");
        return Err(ApiError::model_not_found(message));
    }
    Ok(Json(model(&name, info)))
}

fn model(name: &str, info: &Info) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": info.loaded,
        "owned_by": "steersman",
        "family": info.family,
        "context": info.context,
    })
}
