//! `GET /v1/models` and `GET /v1/models/{id}`: the models, and `model@profile` for each further
//! profile.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use steersman_engine::Engine;

use super::App;
use super::error::ApiError;

/// All names under which this server answers.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let names = app.models.names();
    let models: Vec<_> = names.iter().map(|(name, engine)| model(name, engine)).collect();
    Json(json!({"object": "list", "data": models}))
}

/// One of them.
pub async fn get(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let engine = match app.models.profile_in(&name) {
        Some(Some(profile)) => app.models.of(profile),
        Some(None) => app.models.named(&name),
        None => None,
    };
    let Some(engine) = engine else {
        let message = format!("there is no model `{name}` here; see GET /v1/models");
        return Err(ApiError::model_not_found(message));
    };
    Ok(Json(model(&name, engine)))
}

fn model(name: &str, engine: &Engine) -> Value {
    let info = engine.info();
    json!({
        "id": name,
        "object": "model",
        "created": info.loaded,
        "owned_by": "steersman",
        "family": info.family,
        "context": info.context,
    })
}
