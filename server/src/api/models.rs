//! `GET /v1/models` and `GET /v1/models/{id}`: the models, `model@profile` for each profile but `default`,
//! and the aliases.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use super::policies::blocking;
use crate::models::{Description, Name};

pub async fn list(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let (names, described) = described(&app).await?;
    let models: Vec<_> = names.iter().map(|name| model(name, &described[name.index])).collect();
    Ok(Json(json!({"object": "list", "data": models})))
}

pub async fn get(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let Some((index, _)) = app.models.resolve(&name) else {
        let message = format!("there is no model `{name}`; see GET /v1/models");
        return Err(ApiError::model_not_found(message));
    };
    let (names, described) = described(&app).await?;
    let listed = names.into_iter().find(|listed| listed.name == name);
    let name = listed.unwrap_or(Name { name, index, alias_of: None });
    Ok(Json(model(&name, &described[index])))
}

/// All names, and all models by index.
pub async fn described(app: &Arc<App>) -> Result<(Vec<Name>, Vec<Description>), ApiError> {
    let models = app.models.clone();
    blocking(move || (models.names(), models.describe())).await
}

fn model(name: &Name, described: &Description) -> Value {
    let info = described.engine.as_ref().map(|engine| engine.info());
    let facts = described.facts.as_deref();
    let family = info.map(|info| info.family.as_str());
    let context = info.map(|info| info.context as u64);
    let mut model = json!({
        "id": name.name,
        "object": "model",
        // Of the load; a model that is not loaded has no time.
        "created": info.map_or(0, |info| info.loaded),
        "owned_by": "steersman",
        "family": family.or(facts.map(|facts| facts.family.as_str())),
        "context": context.or(facts.and_then(|facts| facts.context)),
        "state": described.state,
        "size": facts.map(|facts| facts.file_bytes()),
        "parameters": facts.map(|facts| facts.parameters),
        "quantization": facts.map(|facts| facts.quantization.as_str()),
    });
    if let Some(target) = &name.alias_of {
        model["alias_of"] = target.as_str().into();
    }
    model
}
