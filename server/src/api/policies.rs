//! `GET /v1/policies`, `POST /v1/policies/NAME`, `POST /v1/policies/NAME/rollback`, and
//! `GET /v1/requests/ID/trace`: which policies run, how another takes the place of one, and what
//! they decided.
//!
//! The server sees no Wasm: it hands bytes to the engine and gets reports. As with
//! [`super::cache`] they are copied field by field, so that clients read what stands here.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::{Extension, Json};
use serde::Serialize;
use steersman_engine::Error;
use steersman_engine::policy::breaker::Health;
use steersman_engine::policy::registry::{
    self, Kept, Origin, ParamReport, PolicyReport, Withdrawn,
};
use steersman_engine::policy::trace::Record;
use steersman_engine::policy::wasm::COMPONENT_BYTES;

use super::access::Caller;
use super::error::ApiError;
use super::{App, Limit, read_body};

/// Media type of a component.
const WASM: &str = "application/wasm";

/// What is in force.
#[derive(Serialize)]
pub struct Policies {
    policies: Vec<Policy>,
    /// Parameters that come from files.
    params: Vec<Param>,
}

/// [`PolicyReport`]
#[derive(Serialize)]
struct Policy {
    name: String,
    sha256: String,
    contract: String,
    origin: &'static str,
    /// Null where the policy ships and there is no `policy.folder`.
    file: Option<String>,
    since: u64,
    bytes: usize,
    hooks: Vec<String>,
    imports: Vec<String>,
    profiles: Vec<Use>,
    breaker: Breaker,
    /// Null while nothing kept another version from running.
    problem: Option<Problem>,
    earlier: Vec<Earlier>,
}

/// [`registry::Use`]
#[derive(Serialize)]
struct Use {
    profile: String,
    position: usize,
    shadow: bool,
}

/// [`Health`]
#[derive(Serialize)]
struct Breaker {
    /// `closed`: it is called; `probation`: it is called and watched; `open`: it rests.
    state: &'static str,
    failures_in_a_row: u32,
    rests_s: Option<u64>,
    /// Requests still to succeed before its probation ends.
    probation_left: Option<u32>,
}

/// [`registry::Problem`]
#[derive(Serialize)]
struct Problem {
    at: u64,
    message: String,
}

/// [`Kept`]
#[derive(Serialize)]
struct Earlier {
    sha256: String,
    bytes: usize,
    origin: &'static str,
    since: u64,
    /// Why it is not gone back to; null for good ones.
    withdrawn: Option<String>,
}

/// [`ParamReport`]
#[derive(Serialize)]
struct Param {
    profile: String,
    param: String,
    file: String,
    problem: Option<Problem>,
}

/// What came of a change.
#[derive(Serialize)]
pub struct Installed {
    name: String,
    sha256: String,
    /// False where it ran already.
    changed: bool,
    /// SHA-256 of what ran before, if it is another.
    replaced: Option<String>,
}

/// What policies decided in one request.
#[derive(Serialize)]
pub struct Trace {
    request: String,
    records: Vec<Record>,
}

/// `GET /v1/policies`
pub async fn list(State(app): State<Arc<App>>) -> Result<Json<Policies>, ApiError> {
    let policies = app.models.policies().clone();
    // It reads what is kept on disk.
    let registry::Report { policies, params } = blocking(move || policies.report()).await?;
    Ok(Json(Policies {
        policies: policies.into_iter().map(Policy::from).collect(),
        params: params.into_iter().map(Param::from).collect(),
    }))
}

/// `POST /v1/policies/NAME`, with a component as its body.
pub async fn install(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Installed>, ApiError> {
    app.access.operator(&caller).inspect_err(|_| app.metrics.unauthorized())?;
    let policies = app.models.policies().clone();
    if !policies.has(&name) {
        return Err(ApiError::policy_not_found(&name));
    }
    let _turn = app.uploads.acquire().await.expect("the semaphore is never closed");
    let limit = Limit { bytes: COMPONENT_BYTES, set_by: "for a component" };
    let component = read_body(&app, &headers, body, WASM, limit).await?;
    let installed = blocking(move || policies.install(&name, &component, Origin::Upload)).await?;
    let installed = installed.map_err(|error| match error {
        Error::Policy { .. } | Error::PolicyLate { .. } => {
            ApiError::policy_refused(error.to_string())
        }
        Error::Invalid { .. } => ApiError::conflict("policy_not_written", error.to_string()),
        other => other.into(),
    })?;
    Ok(Json(installed.into()))
}

/// `POST /v1/policies/NAME/rollback`
pub async fn rollback(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<Json<Installed>, ApiError> {
    app.access.operator(&caller).inspect_err(|_| app.metrics.unauthorized())?;
    let policies = app.models.policies().clone();
    if !policies.has(&name) {
        return Err(ApiError::policy_not_found(&name));
    }
    let _turn = app.uploads.acquire().await.expect("the semaphore is never closed");
    let installed = blocking(move || policies.rollback(&name)).await?;
    let installed = installed.map_err(|error| match error {
        Error::Policy { .. } | Error::PolicyLate { .. } | Error::Invalid { .. } => {
            ApiError::conflict("cannot_roll_back", error.to_string())
        }
        other => other.into(),
    })?;
    Ok(Json(installed.into()))
}

/// `GET /v1/requests/ID/trace`
pub async fn trace(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(request): Path<String>,
) -> Result<Json<Trace>, ApiError> {
    let Some(records) = app.models.policies().traces().get(&request) else {
        return Err(ApiError::no_trace(&request));
    };
    if let Some(record) = records.first() {
        app.access.allow(&caller, &record.profile)?;
    }
    Ok(Json(Trace { request, records }))
}

/// Runs what compiles or reads files where it holds up no other request.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    // It fails only if `work` panicked, of which the log knows more.
    tokio::task::spawn_blocking(work).await.map_err(|_| Error::Stopped.into())
}

impl From<PolicyReport> for Policy {
    fn from(report: PolicyReport) -> Self {
        let uses = report.profiles.into_iter();
        Self {
            name: report.name,
            sha256: report.sha256,
            contract: report.contract,
            origin: report.origin.name(),
            file: report.file.map(|file| file.display().to_string()),
            since: report.since,
            bytes: report.bytes,
            hooks: report.hooks,
            imports: report.imports,
            profiles: uses
                .map(|registry::Use { profile, position, shadow }| Use {
                    profile,
                    position,
                    shadow,
                })
                .collect(),
            breaker: report.health.into(),
            problem: report.problem.map(Problem::from),
            earlier: report.earlier.into_iter().map(Earlier::from).collect(),
        }
    }
}

impl From<Health> for Breaker {
    fn from(health: Health) -> Self {
        let state = match (health.rests, health.probation) {
            (Some(_), _) => "open",
            (None, Some(_)) => "probation",
            (None, None) => "closed",
        };
        Self {
            state,
            failures_in_a_row: health.failures,
            rests_s: health.rests.map(|rest| rest.as_secs() + 1),
            probation_left: health.probation,
        }
    }
}

impl From<registry::Problem> for Problem {
    fn from(registry::Problem { at, what }: registry::Problem) -> Self {
        Self { at, message: what }
    }
}

impl From<Kept> for Earlier {
    fn from(kept: Kept) -> Self {
        let withdrawn = kept.withdrawn.map(|why| match why {
            Withdrawn::Failed(why) => why,
            Withdrawn::RolledBack => "rolled back".into(),
        });
        Self {
            sha256: kept.sha256,
            bytes: kept.bytes,
            origin: kept.origin.name(),
            since: kept.since,
            withdrawn,
        }
    }
}

impl From<ParamReport> for Param {
    fn from(report: ParamReport) -> Self {
        Self {
            profile: report.profile,
            param: report.param,
            file: report.file.display().to_string(),
            problem: report.problem.map(Problem::from),
        }
    }
}

impl From<registry::Installed> for Installed {
    fn from(installed: registry::Installed) -> Self {
        Self {
            name: installed.policy,
            sha256: installed.sha256,
            changed: installed.replaced.is_some(),
            replaced: installed.replaced,
        }
    }
}
