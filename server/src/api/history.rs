//! `GET /v1/history`: what the server did in the last two hours.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;

use super::app::App;
use super::error::ApiError;
use super::query::Query;
use super::samples::Sample;

/// Samples, oldest first.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct HistoryBody {
    samples: Vec<Sample>,
}

/// `GET /v1/history`: the samples later than `after`, in seconds since 1970.
pub async fn get(
    State(app): State<Arc<App>>,
    Extension(query): Extension<Query>,
) -> Result<Json<HistoryBody>, ApiError> {
    let after = query.number("after")?.unwrap_or_default();
    Ok(Json(HistoryBody { samples: app.samples.after(after) }))
}
