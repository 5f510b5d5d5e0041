//! `GET /v1/cache`: content and use of the prefix cache and the prefix store.
//!
//! Copies the engine's report field by field: a field renamed there does not change what clients
//! read.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use steersman_engine::report::{PrefixCounts, PrefixReport, StoreCounts, StoreReport, StoredSize};

use super::app::App;
use super::error::ApiError;
use super::query::Query;
use crate::words::suggestion;

/// Body of the response.
#[derive(Serialize, JsonSchema)]
pub struct CacheBody {
    memory: MemoryBody,
    counts: CountsBody,
    /// Null without a prefix store.
    disk: Option<StoreBody>,
}

/// The prefix cache.
#[derive(Serialize, JsonSchema)]
struct MemoryBody {
    prefixes: usize,
    states: usize,
    bytes: u64,
    budget_bytes: u64,
}

/// [`PrefixCounts`]
#[derive(Serialize, JsonSchema)]
struct CountsBody {
    hits: u64,
    misses: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    read_tokens: u64,
    saves: u64,
    evictions: u64,
    ahead_tokens: u64,
}

/// [`StoreReport`]
#[derive(Serialize, JsonSchema)]
struct StoreBody {
    path: String,
    file_bytes: u64,
    budget_bytes: u64,
    rows: SizeBody,
    states: SizeBody,
    other_models: SizeBody,
    pinned: SizeBody,
    /// Damaged files, `parts` of them.
    set_aside: SizeBody,
    queued_bytes: u64,
    counts: StoreCountsBody,
    /// Why saving is off; null while it is on.
    off: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct SizeBody {
    parts: u64,
    bytes: u64,
}

/// [`StoreCounts`]
#[derive(Serialize, JsonSchema)]
struct StoreCountsBody {
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

/// The current report of the first model, or of `?model=NAME`.
pub async fn get(
    State(app): State<Arc<App>>,
    Extension(query): Extension<Query>,
) -> Result<Json<CacheBody>, ApiError> {
    let engine = match query.get("model") {
        None => Some(app.models.first()),
        Some(name) => app.models.named(name).and_then(|index| app.models.engine(index)),
    };
    let engine = engine.ok_or_else(|| {
        let name = query.get("model").unwrap_or_default();
        let known = app.models.own_names();
        let others = known.iter().map(String::as_str).filter(|known| *known != name);
        let near = suggestion(name, others);
        ApiError::model_not_found(format!(
            "there is no model `{name}` here, or it is not loaded; see GET /v1/models{near}"
        ))
    })?;
    Ok(Json(engine.info().prefixes.report().into()))
}

impl From<PrefixReport> for CacheBody {
    fn from(report: PrefixReport) -> Self {
        let PrefixReport { counts, memory, names: _, memory_budget, disk } = report;
        Self {
            memory: MemoryBody {
                prefixes: memory.nodes,
                states: memory.states,
                bytes: memory.bytes,
                budget_bytes: memory_budget,
            },
            counts: counts.into(),
            disk: disk.map(StoreBody::from),
        }
    }
}

impl From<PrefixCounts> for CountsBody {
    fn from(counts: PrefixCounts) -> Self {
        Self {
            hits: counts.hits,
            misses: counts.misses,
            prompt_tokens: counts.prompt_tokens,
            cached_tokens: counts.cached_tokens,
            read_tokens: counts.read_tokens,
            saves: counts.saves,
            evictions: counts.evictions,
            ahead_tokens: counts.ahead_tokens,
        }
    }
}

impl From<StoreReport> for StoreBody {
    fn from(report: StoreReport) -> Self {
        Self {
            path: report.path.display().to_string(),
            file_bytes: report.file_bytes,
            budget_bytes: report.budget_bytes,
            rows: report.rows.into(),
            states: report.states.into(),
            other_models: report.others.into(),
            pinned: report.retained.into(),
            set_aside: report.set_aside.into(),
            queued_bytes: report.queued_bytes,
            counts: report.counts.into(),
            off: report.off,
        }
    }
}

impl From<StoreCounts> for StoreCountsBody {
    fn from(counts: StoreCounts) -> Self {
        Self {
            saves: counts.saves,
            saved_parts: counts.saved_parts,
            saved_bytes: counts.saved_bytes,
            dropped_saves: counts.dropped_saves,
            evicted_parts: counts.evicted_parts,
            damaged_parts: counts.damaged_parts,
            loads: counts.loads,
            loaded_parts: counts.loaded_parts,
            loaded_bytes: counts.loaded_bytes,
        }
    }
}

impl From<StoredSize> for SizeBody {
    fn from(size: StoredSize) -> Self {
        Self { parts: size.parts, bytes: size.bytes }
    }
}
