//! `GET /v1/downloads`: the models in the cache of this machine, for operators, as `steersman list` has them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use steersman_models::named::is_model_id;
use steersman_models::snapshots::{self, Snapshot};

use super::access::Caller;
use super::app::App;
use super::blocking::{blocking, internal};
use super::error::ApiError;
use crate::config::OnDemandConfig;
use crate::models::NamedBy;

/// Who may have named a model.
const SERVED_BY: [Option<&str>; 3] = [Some("configuration"), Some("operator"), None];

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
    /// Whether a model of it is served, or drafts for one: then it is not removed.
    served: bool,
    /// What can be served: the whole repo, or each quantization of one with GGUF files.
    models: Vec<DownloadedModel>,
}

/// A model in the cache that is complete.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct DownloadedModel {
    model: String,
    /// Who has it served: the configuration, maybe under another name, or an operator; null if it is not served.
    #[schemars(extend("enum" = SERVED_BY))]
    served_by: Option<&'static str>,
    /// The lines of the configuration that serve it from the start.
    toml: String,
}

/// `GET /v1/downloads`
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Downloads>, ApiError> {
    app.access.operator(&caller).inspect_err(|_| app.metrics.unauthorized())?;
    // It reads the sizes of all files.
    let models = blocking(move || -> Result<_, ApiError> {
        let listed = snapshots::list(&app.hub()).map_err(|error| internal(format!("{error:#}")))?;
        let served = Served::new(&app);
        let describe = |snapshot: Snapshot| Downloaded {
            bytes: snapshot.bytes,
            complete: !snapshot.models.is_empty(),
            served: served.by(&app, &snapshot).is_some(),
            models: served.models(&app, &snapshot),
            model: snapshot.repo_id,
        };
        Ok(listed.into_iter().map(describe).collect())
    });
    Ok(Json(Downloads { models: models.await?? }))
}

/// The files of the models that are served.
pub struct Served(Vec<Files>);

/// The files of a model that is served.
struct Files {
    /// The folder or GGUF file of the model, with links resolved.
    path: PathBuf,
    /// What the entries of the folder lead to: they may be links into the cache.
    entries: Vec<PathBuf>,
    by: NamedBy,
}

impl Files {
    fn new(path: &Path, by: NamedBy) -> Self {
        let entries = path.read_dir().into_iter().flatten().flatten();
        Self { path: real(path), entries: entries.map(|entry| real(&entry.path())).collect(), by }
    }

    /// Whether one of them is in the folder `repo`.
    fn are_in(&self, repo: &Path) -> bool {
        self.path.starts_with(repo) || self.entries.iter().any(|entry| entry.starts_with(repo))
    }
}

impl Served {
    /// Looks for the files. Blocks.
    pub fn new(app: &App) -> Self {
        Self(app.models.folders().iter().map(|(path, by)| Files::new(path, *by)).collect())
    }

    /// Who has a model of `snapshot` served, under its name or with files of it; the configuration before an operator.
    pub fn by(&self, app: &App, snapshot: &Snapshot) -> Option<NamedBy> {
        let repo = real(snapshot.root());
        self.first(app.models.named_by(&snapshot.repo_id), |files| files.are_in(&repo))
    }

    /// The models of `snapshot`, with who has them served.
    fn models(&self, app: &App, snapshot: &Snapshot) -> Vec<DownloadedModel> {
        let one = |(tag, path): &(Option<String>, PathBuf)| {
            let repo = &snapshot.repo_id;
            let model = tag.as_ref().map_or(repo.clone(), |tag| format!("{repo}:{tag}"));
            let path = real(path);
            let by = self.first(app.models.named_by(&model), |files| files.path == path);
            let served_by = by.map(|by| match by {
                NamedBy::Configuration => "configuration",
                NamedBy::Operator => "operator",
            });
            let toml = OnDemandConfig::lines(&model);
            is_model_id(&model).then_some(DownloadedModel { model, served_by, toml })
        };
        snapshot.models.iter().filter_map(one).collect()
    }

    /// The configuration, if it is among `named` and who has named the models whose files are `these`; or else an
    /// operator.
    fn first(&self, named: Option<NamedBy>, these: impl Fn(&Files) -> bool) -> Option<NamedBy> {
        let of_files = self.0.iter().filter(|files| these(files)).map(|files| files.by);
        named.into_iter().chain(of_files).min_by_key(|by| *by == NamedBy::Operator)
    }
}

/// Whether a model that is not served any more has files of `snapshot` and is still in memory. Blocks.
pub fn is_in_memory(app: &App, snapshot: &Snapshot) -> bool {
    let repo = real(snapshot.root());
    app.models.leaving().iter().any(|path| Files::new(path, NamedBy::Operator).are_in(&repo))
}

/// The path without links.
fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.into())
}
