//! `GET /v1/downloads`: the models in the cache of this machine, for operators, as `steersman list` has them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use steersman_models::hub::Hub;
use steersman_models::snapshots::{self, Snapshot};

use super::access::Caller;
use super::app::App;
use super::blocking::{blocking, internal};
use super::error::ApiError;

/// The models in the cache, by name.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Downloads {
    models: Vec<Downloaded>,
}

/// A repo in the cache.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Downloaded {
    model: String,
    /// Bytes on disk.
    bytes: u64,
    /// Whether all files of a model are here.
    complete: bool,
    /// Whether the configuration names it: then it is not removed.
    served: bool,
}

/// `GET /v1/downloads`
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Downloads>, ApiError> {
    app.access.operator(&caller).inspect_err(|_| app.metrics.unauthorized())?;
    // It reads the sizes of all files.
    let models = blocking(move || -> Result<_, ApiError> {
        let hub = app.hub.clone().unwrap_or_else(Hub::from_env);
        let listed = snapshots::list(&hub).map_err(|error| internal(format!("{error:#}")))?;
        let served = Served::new(&app);
        let describe = |snapshot: Snapshot| Downloaded {
            bytes: snapshot.bytes,
            complete: !snapshot.models.is_empty(),
            served: served.has(&app, &snapshot),
            model: snapshot.repo_id,
        };
        Ok(listed.into_iter().map(describe).collect())
    });
    Ok(Json(Downloads { models: models.await?? }))
}

/// The files of the models that the configuration names.
pub struct Served(Vec<PathBuf>);

impl Served {
    /// Looks for the files. Blocks.
    pub fn new(app: &App) -> Self {
        Self(app.models.folders().map(|folder| real(&folder)).collect())
    }

    /// Whether `snapshot` is one of these models, or has files of one.
    pub fn has(&self, app: &App, snapshot: &Snapshot) -> bool {
        // OWNER/NAME is the folder `models--OWNER--NAME`, and its commits are two levels below.
        let repo =
            snapshot.folder.as_deref().and_then(|folder| folder.ancestors().nth(2)).map(real);
        let is_within = |repo: PathBuf| self.0.iter().any(|files| files.starts_with(&repo));
        app.models.resolve(&snapshot.repo_id).is_some() || repo.is_some_and(is_within)
    }
}

/// The path without links.
fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.into())
}
