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
use crate::api::models::{described, described_for};

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
    /// Tokens of prompt and reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    context_length: Option<u64>,
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
pub async fn tags(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ModelList>, ApiError> {
    let (names, described) = described_for(&app, &caller).await?;
    let models = names.iter().map(|name| (name.name.as_str(), &described[name.index]));
    let models = models.filter(|(_, described)| described.state != "missing");
    let models = models.map(|(name, described)| model(name, described)).collect();
    Ok(Json(ModelList { models }))
}

/// `GET /api/ps`: the models in memory.
pub async fn running(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ModelList>, ApiError> {
    let (names, described) = described_for(&app, &caller).await?;
    let loaded = names.iter().filter_map(|name| {
        let described = &described[name.index];
        let context_length = Some(described.engine.as_ref()?.info().context as u64);
        let weights = described.report.bytes;
        let expires_at = described.report.expires.map(|expires| {
            let expires = SignedDuration::try_from(expires).unwrap_or_default();
            (Timestamp::now() + expires).to_string()
        });
        let model = model(&name.name, described);
        Some(Model { size: weights, size_vram: Some(weights), expires_at, context_length, ..model })
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
        context_length: None,
    }
}

fn family(described: &Description) -> &str {
    let info = described.engine.as_ref().map(|engine| engine.info());
    let facts = described.facts.as_ref();
    info.map(|info| info.family.as_str()).or(facts.map(|f| f.family.as_str())).unwrap_or_default()
}

fn details(described: &Description) -> Details {
    let (family, facts) = (family(described), described.facts.as_deref());
    let files = facts.map(|facts| facts.files.as_slice()).unwrap_or_default();
    let gguf = files.iter().map(|(name, _)| name.as_str()).find(|name| name.ends_with(".gguf"));
    Details {
        parent_model: "",
        format: if gguf.is_some() { "gguf" } else { "safetensors" },
        family: family.into(),
        families: [family.into()],
        parameter_size: facts.map(|facts| parameter_size(facts.parameters)).unwrap_or_default(),
        quantization_level: facts
            .map(|facts| quantization_level(&facts.quantization, gguf))
            .unwrap_or_default(),
    }
}

/// The number of parameters as Ollama writes it: `8.0B`, `494.03M`.
fn parameter_size(parameters: u64) -> String {
    let number = parameters as f64;
    match parameters {
        1_000_000_000.. => format!("{:.1}B", number / 1e9),
        1_000_000.. => format!("{:.2}M", number / 1e6),
        1_000.. => format!("{:.2}K", number / 1e3),
        _ => parameters.to_string(),
    }
}

/// The type of the weights in a word that Ollama uses: `Q4_K_M` as the name of a GGUF file has it, `int4` of packed
/// weights in safetensors, or the type of floats. `quantization` is that of the files: `4 bits in groups of 64`.
fn quantization_level(quantization: &str, gguf: Option<&str>) -> String {
    let is_type = |part: &&str| {
        let mut bytes = part.bytes();
        let digit = bytes.by_ref().find(|byte| !b"IQiq".contains(byte));
        part.len() > 1
            && part.starts_with(['Q', 'q', 'I', 'i'])
            && digit.is_some_and(|b| b.is_ascii_digit())
    };
    let of_name =
        gguf.and_then(|name| name.trim_end_matches(".gguf").rsplit(['-', '.']).find(is_type));
    match (of_name, quantization.split_once(" bits")) {
        (Some(name), _) => name.to_ascii_uppercase(),
        (None, Some((bits, _))) => format!("int{bits}"),
        (None, None) => quantization.into(),
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
    let name = app.bodies.parse(body.bytes, request::named).await?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// 18.9 million parameters were `0.0B`.
    #[test]
    fn sizes_and_types_are_written_as_by_ollama() {
        for (parameters, size) in [
            (18_900_000, "18.90M"),
            (494_032_768, "494.03M"),
            (8_030_000_000, "8.0B"),
            (70_600_000_000, "70.6B"),
            (12_345, "12.35K"),
            (7, "7"),
        ] {
            assert_eq!(parameter_size(parameters), size);
        }
        let four = "4 bits in groups of 64";
        for (quantization, gguf, level) in [
            (four, None, "int4"),
            ("8 bits in groups of 32", None, "int8"),
            ("BF16", None, "BF16"),
            (four, Some("Qwen3.5-4B-Q4_K_M.gguf"), "Q4_K_M"),
            (four, Some("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"), "Q4_K_M"),
            (four, Some("llama.IQ4_XS.gguf"), "IQ4_XS"),
            (four, Some("Qwen3-4B-Q8_0-00001-of-00002.gguf"), "Q8_0"),
            (four, Some("model.gguf"), "int4"),
            ("F16", Some("Qwen3-4B-F16.gguf"), "F16"),
        ] {
            assert_eq!(quantization_level(quantization, gguf), level, "{quantization} {gguf:?}");
        }
    }
}
