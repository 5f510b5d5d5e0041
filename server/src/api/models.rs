//! `GET /v1/models` and `GET /v1/models/{id}`: the models, `model@profile` for each profile but `default`,
//! and the aliases.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;

use super::access::Caller;
use super::app::App;
use super::blocking::blocking;
use super::error::ApiError;
use crate::models::{Description, Name};
use crate::words::suggestion;

/// All models.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ModelList {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    data: Vec<ListedModel>,
}

/// A model, a model with a profile, or an alias.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ListedModel {
    id: String,
    #[schemars(extend("const" = "model"))]
    object: &'static str,
    /// Seconds since 1970 when it was loaded; 0 while it is not.
    created: u64,
    owned_by: &'static str,
    family: Option<String>,
    /// Tokens.
    context: Option<u64>,
    #[schemars(extend("enum" = STATES))]
    state: &'static str,
    /// Bytes of the files.
    size: Option<u64>,
    parameters: Option<u64>,
    quantization: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias_of: Option<String>,
}

/// Where a model may be: [`Description::state`].
pub const STATES: [&str; 6] = ["loaded", "loading", "unloading", "on disk", "missing", "upstream"];

/// `GET /v1/models`: those that the caller may use.
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ModelList>, ApiError> {
    let (names, described) = described_for(&app, &caller).await?;
    let data = names.iter().map(|name| model(name, &described[name.index])).collect();
    Ok(Json(ModelList { object: "list", data }))
}

/// `GET /v1/models/{id}`
pub async fn get(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<ListedModel>, ApiError> {
    let Some((index, _)) = app.models.resolve(&name) else {
        let known = app.models.names();
        let near = suggestion(&name, known.iter().map(|known| known.name.as_str()));
        let message = format!("there is no model `{name}`; see GET /v1/models{near}");
        return Err(ApiError::model_not_found(message));
    };
    let (names, described) = described(&app).await?;
    let listed = names.into_iter().find(|listed| listed.name == name);
    let name = listed.unwrap_or(Name { name, index, alias_of: None });
    Ok(Json(model(&name, &described[index])))
}

/// The names that the caller may use, and all models by index.
pub async fn described_for(
    app: &Arc<App>,
    caller: &Caller,
) -> Result<(Vec<Name>, Vec<Description>), ApiError> {
    let (mut names, described) = described(app).await?;
    // Without a profile in its name, a model is used by that of the key.
    names.retain(|name| {
        let profile = app.models.resolve(&name.name).and_then(|(_, profile)| profile);
        match (profile, caller) {
            (Some(profile), _) => app.access.allow(caller, &profile).is_ok(),
            // A key of a profile shows what that may use of the upstreams.
            (None, Caller::Profile(own)) if app.models.is_of_upstream(name.index) => {
                app.models.serving(Some(name.index), own).is_ok()
            }
            (None, _) => true,
        }
    });
    Ok((names, described))
}

/// All names, and all models by index.
pub async fn described(app: &Arc<App>) -> Result<(Vec<Name>, Vec<Description>), ApiError> {
    let models = app.models.clone();
    blocking(move || (models.names(), models.describe())).await
}

fn model(name: &Name, described: &Description) -> ListedModel {
    let info = described.engine.as_ref().map(|engine| engine.info());
    let facts = described.facts.as_deref();
    let family = info.map(|info| info.family.as_str());
    let context = info.map(|info| info.context as u64);
    ListedModel {
        id: name.name.clone(),
        object: "model",
        created: info.map_or(0, |info| info.loaded),
        owned_by: "steersman",
        family: family.or(facts.map(|facts| facts.family.as_str())).map(Into::into),
        context: context.or(facts.and_then(|facts| facts.context)),
        state: described.state,
        size: facts.map(|facts| facts.file_bytes()),
        parameters: facts.map(|facts| facts.parameters),
        quantization: facts.map(|facts| facts.quantization.clone()),
        alias_of: name.alias_of.clone(),
    }
}
