//! Ollama's `DELETE /api/delete`: removes a downloaded model from the cache of this machine, for operators, as
//! `steersman rm` does.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use steersman_models::snapshots;

use super::access::Caller;
use super::app::App;
use super::blocking::{blocking, internal};
use super::downloads::{Served, is_in_memory};
use super::error::ApiError;
use super::ollama::named;
use super::pull::busy;
use crate::bundled;
use crate::models::NamedBy;

/// `DELETE /api/delete`
pub async fn delete_as_ollama(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, ApiError> {
    app.access.operator(&caller).inspect_err(|_| app.metrics.unauthorized())?;
    let body = app.read_json(&headers, body, None).await?;
    let name = app.bodies.parse(body.bytes, named).await?;
    let name =
        name.ok_or_else(|| ApiError::missing("model", "model: must be the name of a model"))?;
    // While it is removed, nobody downloads it.
    let turn = app.pulls.begin_removal().map_err(busy)?;
    blocking(move || {
        let removed = remove(&app, &name);
        drop(turn);
        removed
    })
    .await??;
    Ok(StatusCode::OK)
}

/// Removes the repo `name` from the cache, unless a model that is served or in memory has its files there. Blocks.
fn remove(app: &App, name: &str) -> Result<(), ApiError> {
    let hub = app.hub();
    // Nobody begins to serve it meanwhile.
    let _files = app.files.lock();
    let served = |by: NamedBy| {
        let message = match by {
            NamedBy::Configuration => format!(
                "the configuration names the model `{name}`; remove it there and restart the server first"
            ),
            NamedBy::Operator => {
                format!("the model `{name}` is served; end that first (DELETE /v1/models/serve)")
            }
        };
        ApiError::conflict("model_in_use", message)
    };
    if name.strip_suffix(":latest").unwrap_or(name) == bundled::NAME {
        let message = format!("`{name}` is part of the program and cannot be removed");
        return Err(ApiError::conflict("model_in_use", message));
    }
    if let Some(by) = app.models.named_by(name) {
        return Err(served(by));
    }
    let failed = |error: anyhow::Error| internal(format!("{error:#}"));
    let listed = snapshots::list(&hub).map_err(failed)?;
    let names: Vec<_> = listed.iter().map(|snapshot| snapshot.repo_id.as_str()).collect();
    let Some(snapshot) = listed.iter().find(|snapshot| snapshot.repo_id == name) else {
        let similar = snapshots::similar(name, &names);
        let message = format!("there is no model `{name}` in the cache of this machine{similar}");
        return Err(ApiError::model_not_found(message));
    };
    if let Some(by) = Served::new(app).by(app, snapshot) {
        return Err(served(by));
    }
    if is_in_memory(app, snapshot) {
        let message = format!(
            "the model `{name}` is not served any more, but requests still use it; try again when they have ended"
        );
        return Err(ApiError::conflict("model_in_use", message));
    }
    let removed = snapshots::remove(&hub, name).map_err(failed)?;
    tracing::info!(model = name, bytes = removed.bytes, "model removed by an operator");
    Ok(())
}
