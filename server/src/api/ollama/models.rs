//! Ollama's routes that describe models: `/api/version`, `/api/tags`, `/api/ps` and `/api/show`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Extension, Json};
use jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::request;
use crate::api::access::Caller;
use crate::api::app::App;
use crate::api::error::ApiError;
use crate::api::models::described;

use crate::models::Description;

/// The server's version.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "OllamaVersion")]
pub struct Version {
    version: &'static str,
}

/// Models, all or those in memory.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "OllamaModels")]
pub struct ModelList {
    models: Vec<Model>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "OllamaModel")]
struct Model {
    name: String,
    model: String,
    modified_at: String,
    /// Bytes.
    size: u64,
    /// Known while it is loaded.
    digest: String,
    details: Details,
    #[serde(skip_serializing_if = "Option::is_none")]
    size_vram: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "OllamaDetails")]
struct Details {
    parent_model: &'static str,
    format: &'static str,
    family: String,
    families: [String; 1],
    parameter_size: String,
    quantization_level: String,
}

/// Facts about one model.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "OllamaShown")]
pub struct Shown {
    modelfile: &'static str,
    parameters: &'static str,
    template: &'static str,
    details: Details,
    model_info: Map<String, Value>,
    capabilities: Vec<&'static str>,
}

/// `GET /api/version`
pub async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}

/// `GET /api/tags`: the models, as in `GET /v1/models`. Those whose files are missing are left out.
pub async fn tags(State(app): State<Arc<App>>) -> Result<Json<ModelList>, ApiError> {
    let (names, described) = described(&app).await?;
    let models = names.iter().map(|name| (name.name.as_str(), &described[name.index]));
    let models = models.filter(|(_, described)| described.state != "missing");
    let models = models.map(|(name, described)| model(name, described)).collect();
    Ok(Json(ModelList { models }))
}

/// `GET /api/ps`: the models in memory.
pub async fn running(State(app): State<Arc<App>>) -> Result<Json<ModelList>, ApiError> {
    let (names, described) = described(&app).await?;
    let loaded = names.iter().filter_map(|name| {
        let described = &described[name.index];
        described.engine.as_ref()?;
        let weights = described.report.bytes;
        let expires_at = described.report.expires.map(|expires| {
            let expires = SignedDuration::try_from(expires).unwrap_or_default();
            (Timestamp::now() + expires).to_string()
        });
        let model = model(&name.name, described);
        Some(Model { size: weights, size_vram: Some(weights), expires_at, ..model })
    });
    Ok(Json(ModelList { models: loaded.collect() }))
}

fn model(name: &str, described: &Description) -> Model {
    let info = described.engine.as_ref().map(|engine| engine.info());
    let loaded = info.map_or(0, |info| info.loaded.cast_signed());
    Model {
        name: name.into(),
        model: name.into(),
        modified_at: Timestamp::from_second(loaded).unwrap_or_default().to_string(),
        size: described.facts.as_ref().map_or(0, |facts| facts.file_bytes()),
        digest: info.map(|info| info.fingerprint.clone()).unwrap_or_default(),
        details: details(described),
        size_vram: None,
        expires_at: None,
    }
}

fn family(described: &Description) -> &str {
    let info = described.engine.as_ref().map(|engine| engine.info());
    let facts = described.facts.as_ref();
    info.map(|info| info.family.as_str()).or(facts.map(|f| f.family.as_str())).unwrap_or_default()
}

fn details(described: &Description) -> Details {
    let (family, facts) = (family(described), described.facts.as_deref());
    let billions = |parameters: u64| format!("{:.1}B", parameters as f64 / 1e9);
    Details {
        parent_model: "",
        format: "safetensors",
        family: family.into(),
        families: [family.into()],
        parameter_size: facts.map(|facts| billions(facts.parameters)).unwrap_or_default(),
        quantization_level: facts.map(|facts| facts.quantization.clone()).unwrap_or_default(),
    }
}

/// `POST /api/show`: facts about one model, which need not be loaded. Whether it can reason, and whether it lacks
/// tools, is known only while it is loaded.
pub async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Shown>, ApiError> {
    let body = app.read_json(&headers, body, None).await?;
    let name = app.bodies.parse(body.bytes, request::shown).await?;
    let index = app.destination(&caller, &headers, name)?.index();
    let described = described(&app).await?.1.swap_remove(index);
    let info = described.engine.as_ref().map(|engine| engine.info());
    let mut capabilities = vec!["completion"];
    if info.is_none_or(|info| info.text.supports_tools()) {
        capabilities.push("tools");
    }
    if info.is_some_and(|info| info.text.can_be_told_to_reason()) {
        capabilities.push("thinking");
    }
    let of_files = described.facts.as_ref().and_then(|facts| facts.context);
    let context = info.map(|info| info.context as u64).or(of_files);
    let family = family(&described);
    let model_info = Map::from_iter([
        ("general.architecture".to_string(), json!(family)),
        (format!("{family}.context_length"), json!(context)),
    ]);
    Ok(Json(Shown {
        modelfile: "",
        parameters: "",
        template: "",
        details: details(&described),
        model_info,
        capabilities,
    }))
}
