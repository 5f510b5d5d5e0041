//! `GET /v1/search`: models on the hub, for operators, as `steersman search` finds them.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use steersman_engine::tools::model_types;
use steersman_models::command::Fit;
use steersman_models::hub::{Match, check_words};

use super::access::Caller;
use super::app::App;
use super::blocking::blocking;
use super::error::ApiError;
use super::query::Query;

/// Names of [`steersman_models::hub::Form`].
const WEIGHTS: [Option<&str>; 4] = [Some("floats"), Some("packed"), Some("GGUF"), None];

/// The models that were found, those that are downloaded most first.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Found {
    models: Vec<FoundModel>,
}

/// A model on the hub. What the hub does not tell is null.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct FoundModel {
    model: String,
    /// Bytes of its weights in files.
    bytes: Option<u64>,
    family: Option<String>,
    /// How the weights are kept.
    #[schemars(extend("enum" = WEIGHTS))]
    weights: Option<&'static str>,
    /// Whether the server can load its family.
    supported: Option<bool>,
    /// Bytes of its weights in memory, as an estimate.
    memory: Option<u64>,
    /// Whether it can be loaded and its weights fit.
    fits: Option<bool>,
    /// How often it was downloaded of late.
    downloads: u64,
}

/// `GET /v1/search?words=WORDS`
pub async fn get(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Extension(query): Extension<Query>,
) -> Result<Json<Found>, ApiError> {
    app.access.operator(&caller).inspect_err(|_| app.metrics.unauthorized())?;
    let words = query.get("words").unwrap_or_default().to_owned();
    check_words(&words)
        .map_err(|problem| ApiError::value("words", format!("`words` of the query: {problem}")))?;
    let hub = app.hub();
    // It waits for the hub.
    let found = blocking(move || hub.search(&words)).await?;
    let found = found.map_err(|error| ApiError::hub_failed(format!("{error:#}")))?;
    let (families, numbers) = (model_types(), app.models.numbers());
    let describe = |found: Match| {
        let fit = Fit::of(&found, &families, numbers, app.models.budget());
        let Fit { is_supported, memory, fits } = fit;
        let Match { repo_id, downloads, family, weights } = found;
        FoundModel {
            model: repo_id,
            bytes: weights.map(|weights| weights.bytes),
            family,
            weights: weights.map(|weights| weights.form.name()),
            supported: is_supported,
            memory,
            fits,
            downloads,
        }
    };
    Ok(Json(Found { models: found.into_iter().map(describe).collect() }))
}
