//! `GET /v1/models` and `GET /v1/models/{id}`: the models, and `model@profile` for each profile but
//! `default`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use steersman_engine::Engine;

use super::App;
use super::error::ApiError;

pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let names = app.models.names();
    let models: Vec<_> = names.iter().map(|(name, engine)| model(name, engine)).collect();
    Json(json!({"object": "list", "data": models}))
}

pub async fn get(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let Some((engine, _)) = app.models.resolve(&name) else {
        let message = format!("there is no model `{name}`; see GET /v1/models");
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
