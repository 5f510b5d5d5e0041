//! `GET /v1/cache`: what is kept of earlier requests, in memory and on disk, and of what use it was.
//!
//! The engine's report, field by field, so that its types owe nothing to JSON and a field that is
//! renamed there does not change what clients read.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use serde::{Deserialize, Serialize};
use steersman_engine::{prefix, store};

use super::App;
use super::error::ApiError;

/// Both tiers.
#[derive(Serialize)]
pub struct Cache {
    memory: Memory,
    counts: Counts,
    /// Null where state is kept in memory only.
    disk: Option<Disk>,
}

/// What is in memory now.
#[derive(Serialize)]
struct Memory {
    prefixes: usize,
    states: usize,
    bytes: u64,
    budget_bytes: u64,
}

/// [`prefix::Counts`]: since the server started.
#[derive(Serialize)]
struct Counts {
    hits: u64,
    misses: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    read_tokens: u64,
    saves: u64,
    evictions: u64,
    ahead_tokens: u64,
}

/// [`store::Report`]: what is on disk now, or waits to be.
#[derive(Serialize)]
struct Disk {
    path: String,
    file_bytes: u64,
    budget_bytes: u64,
    rows: Size,
    states: Size,
    other_models: Size,
    pinned: Size,
    queued_bytes: u64,
    counts: DiskCounts,
    /// Why nothing is saved any more; null while it is.
    off: Option<String>,
}

#[derive(Serialize)]
struct Size {
    parts: u64,
    bytes: u64,
}

/// [`store::Counts`]: since the server started.
#[derive(Serialize)]
struct DiskCounts {
    saves: u64,
    saved_parts: u64,
    saved_bytes: u64,
    dropped_saves: u64,
    evicted_parts: u64,
    damaged_parts: u64,
    loads: u64,
    loaded_parts: u64,
    loaded_bytes: u64,
}

/// Whose cache.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    model: Option<String>,
}

/// The report as things are now: of the first model, or of `?model=NAME`.
pub async fn get(
    State(app): State<Arc<App>>,
    Query(wanted): Query<Wanted>,
) -> Result<Json<Cache>, ApiError> {
    let engine = match &wanted.model {
        None => app.models.first(),
        Some(name) => app.models.named(name).ok_or_else(|| {
            ApiError::model_not_found(format!(
                "there is no model `{name}` here; see GET /v1/models"
            ))
        })?,
    };
    Ok(Json(engine.info().prefixes.report().into()))
}

impl From<prefix::Report> for Cache {
    fn from(report: prefix::Report) -> Self {
        let prefix::Report { counts, memory, memory_budget, disk } = report;
        Self {
            memory: Memory {
                prefixes: memory.nodes,
                states: memory.states,
                bytes: memory.bytes,
                budget_bytes: memory_budget,
            },
            counts: Counts {
                hits: counts.hits,
                misses: counts.misses,
                prompt_tokens: counts.prompt_tokens,
                cached_tokens: counts.cached_tokens,
                read_tokens: counts.read_tokens,
                saves: counts.saves,
                evictions: counts.evictions,
                ahead_tokens: counts.ahead_tokens,
            },
            disk: disk.map(Disk::from),
        }
    }
}

impl From<store::Report> for Disk {
    fn from(report: store::Report) -> Self {
        let counts = report.counts;
        Self {
            path: report.path.display().to_string(),
            file_bytes: report.file_bytes,
            budget_bytes: report.budget_bytes,
            rows: report.rows.into(),
            states: report.states.into(),
            other_models: report.others.into(),
            pinned: report.pinned.into(),
            queued_bytes: report.queued_bytes,
            counts: DiskCounts {
                saves: counts.saves,
                saved_parts: counts.saved_parts,
                saved_bytes: counts.saved_bytes,
                dropped_saves: counts.dropped_saves,
                evicted_parts: counts.evicted_parts,
                damaged_parts: counts.damaged_parts,
                loads: counts.loads,
                loaded_parts: counts.loaded_parts,
                loaded_bytes: counts.loaded_bytes,
            },
            off: report.off,
        }
    }
}

impl From<store::Size> for Size {
    fn from(size: store::Size) -> Self {
        Self { parts: size.parts, bytes: size.bytes }
    }
}
