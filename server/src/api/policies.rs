//! `GET /v1/policies`, `POST /v1/policies/NAME` and `POST /v1/policies/NAME/rollback`: active versions and
//! their replacement.
//!
//! The server sees no Wasm: it passes bytes to the policy host and gets reports. They are copied field
//! by field, so that a field renamed there does not change what clients read.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::policy::{
    Activation, BUNDLE_BYTES, Difference, Error, Health, HistoryEntry, ParamReport, Policies,
    PolicyReport, Problem, Record, Report, Use, Withdrawn,
};

use super::access::Caller;
use super::app::App;
use super::blocking::{blocking, internal};
use super::body::Limit;
use super::error::ApiError;
use super::metrics::breaker_state;

/// Media type of a component; a bundle is sent under it, too.
const WASM: &str = "application/wasm";

/// [`Report`]
#[derive(Serialize, JsonSchema)]
pub struct PoliciesBody {
    policies: Vec<PolicyBody>,
    /// Parameters that are read from files.
    params: Vec<ParamBody>,
}

/// [`PolicyReport`]
#[derive(Serialize, JsonSchema)]
struct PolicyBody {
    name: String,
    /// Empty if no version compiled at the start.
    sha256: String,
    contract: &'static str,
    origin: &'static str,
    /// Null for a shipped policy without `policy.folder`.
    file: Option<String>,
    /// The trusted key that signed it; null if none did.
    signed_by: Option<String>,
    since: u64,
    bytes: usize,
    hooks: Vec<&'static str>,
    imports: Vec<String>,
    profiles: Vec<UseBody>,
    /// Why the last update was rejected, or why no version is active; null if neither is so.
    problem: Option<ProblemBody>,
    /// Whether the server compiles it again by itself: something other than the component ended the compiler.
    retries: bool,
    earlier: Vec<EarlierBody>,
}

/// [`Use`]
#[derive(Serialize, JsonSchema)]
struct UseBody {
    profile: String,
    position: usize,
    shadow: bool,
    /// The version that requests of the profile get: not the active one where that was rolled back; empty if no
    /// version is active.
    sha256: String,
    breaker: BreakerBody,
}

/// [`Health`]
#[derive(Serialize, JsonSchema)]
struct BreakerBody {
    /// `closed`: called; `probation`: called and watched; `open`: not called.
    state: &'static str,
    failures_in_a_row: u32,
    /// Seconds until it is called again.
    rests_s: Option<u64>,
    /// Successful requests until its probation ends.
    probation_left: Option<u32>,
}

/// [`Problem`]
#[derive(Serialize, JsonSchema)]
struct ProblemBody {
    at: u64,
    message: String,
}

/// [`HistoryEntry`]
#[derive(Serialize, JsonSchema)]
struct EarlierBody {
    sha256: String,
    bytes: usize,
    origin: &'static str,
    since: u64,
    /// Why a rollback skips it; null if it does not.
    withdrawn: Option<String>,
}

/// [`ParamReport`]
#[derive(Serialize, JsonSchema)]
struct ParamBody {
    profile: String,
    /// Empty for a problem that a policy has with none of the parameters.
    param: String,
    /// The file; null if the text is in the configuration.
    file: Option<String>,
    problem: Option<ProblemBody>,
}

/// [`Activation`]
#[derive(Serialize, JsonSchema)]
pub struct ActivationBody {
    name: String,
    sha256: String,
    /// False if the version was active already.
    changed: bool,
    /// SHA-256 of the replaced version.
    replaced: Option<String>,
    /// What to know about the files of the policy: a bundle that was removed, a golden file that does not fit.
    notes: Vec<String>,
}

/// Answers of a policy that runs as a shadow, beside those that were applied.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Shadow {
    name: String,
    /// Requests in memory that had this shadow.
    requests: usize,
    /// Calls of the shadow that it answered.
    calls: usize,
    failures: usize,
    /// Answers of the shadow that differ from those of the applied policies.
    differing: usize,
    /// The newest of these, newest first.
    differences: Vec<ShadowDifference>,
}

/// Records without their inputs.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ShadowDifference {
    #[schemars(with = "Map<String, Value>")]
    shadow: Value,
    #[schemars(with = "Vec<Map<String, Value>>")]
    applied: Vec<Value>,
}

/// `GET /v1/policies`: the policies and parameters of the profiles that the caller may use.
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<PoliciesBody>, ApiError> {
    let policies = app.models.policies().clone();
    let Report { mut policies, mut params } = blocking(move || policies.report()).await?;
    let sees = |profile: &str| app.access.allow(&caller, profile).is_ok();
    let sees_all = policies.iter().all(|policy| policy.profiles.iter().all(|u| sees(&u.profile)));
    policies.iter_mut().for_each(|policy| policy.profiles.retain(|used| sees(&used.profile)));
    policies.retain(|policy| !policy.profiles.is_empty());
    params.retain(|param| sees(&param.profile));
    let mut policies: Vec<_> = policies.into_iter().map(PolicyBody::from).collect();
    if !sees_all {
        policies.iter_mut().for_each(PolicyBody::hide_reasons);
    }
    let params = params.into_iter().map(ParamBody::from).collect();
    Ok(Json(PoliciesBody { policies, params }))
}

/// `POST /v1/policies/NAME`, with a component or a bundle as its body.
pub async fn upload(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<ActivationBody>, ApiError> {
    let policies = operated(&app, &caller, &name)?;
    let _permit = app.uploads.acquire().await.expect("the semaphore is never closed");
    // No budget: only operators upload, one at a time.
    let limit = Limit { bytes: BUNDLE_BYTES, set_by: "for a bundle", has_budget: false };
    let component = app.bodies.read(&headers, body, Some(WASM), limit).await?.bytes;
    let activation = blocking(move || policies.upload(&name, &component)).await?;
    Ok(Json(activation.map_err(upload_error)?.into()))
}

/// `POST /v1/policies/NAME/rollback`
pub async fn roll_back(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<Json<ActivationBody>, ApiError> {
    let policies = operated(&app, &caller, &name)?;
    // Not that of uploads: it would wait while a component is compiled.
    let _permit = app.rollbacks.acquire().await.expect("the semaphore is never closed");
    let activation = blocking(move || policies.roll_back(&name)).await?;
    Ok(Json(activation.map_err(rollback_error)?.into()))
}

/// `GET /v1/policies/NAME/shadow`: what the policy would have changed in the newest requests that it shadowed.
/// Records are without their inputs, which the traces of the requests have.
pub async fn shadow(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<Json<Shadow>, ApiError> {
    let policies = operated(&app, &caller, &name)?;
    // As much work as the traces of all requests.
    let permit = app.trace_readers.clone().acquire_owned().await;
    let _permit = permit.expect("the semaphore is never closed");
    let body = blocking(move || {
        let report = policies.traces().compare_shadow(&name);
        Shadow {
            name,
            requests: report.requests,
            calls: report.calls,
            failures: report.failures,
            differing: report.differing,
            differences: report.differences.iter().map(ShadowDifference::from).collect(),
        }
    });
    Ok(Json(body.await?))
}

/// The policies, for an operator's request about the policy `name`.
fn operated(app: &App, caller: &Caller, name: &str) -> Result<Arc<Policies>, ApiError> {
    app.access.operator(caller).inspect_err(|_| app.metrics.unauthorized())?;
    let policies = app.models.policies().clone();
    if !policies.has(name) {
        let known = policies.report().policies;
        return Err(ApiError::policy_not_found(
            name,
            known.iter().map(|known| known.name.as_str()),
        ));
    }
    Ok(policies)
}

impl From<&Difference> for ShadowDifference {
    fn from(Difference { shadow, applied }: &Difference) -> Self {
        Self { shadow: without_input(shadow), applied: applied.iter().map(without_input).collect() }
    }
}

fn without_input(record: &Record) -> Value {
    let mut record = serde_json::to_value(record).unwrap_or_default();
    if let Some(record) = record.as_object_mut() {
        for field in ["input", "imports", "masked"] {
            record.shift_remove(field);
        }
    }
    record
}

fn upload_error(error: Error) -> ApiError {
    match error {
        Error::NotCompiled { is_transient: true, .. } => {
            ApiError::policy_not_compiled(error.to_string())
        }
        Error::Refused { .. } | Error::NotCompiled { .. } => {
            ApiError::policy_refused(error.to_string())
        }
        Error::UnknownPolicy { policy, .. } => ApiError::policy_not_found(&policy, []),
        Error::NoFile { .. } | Error::NotWritten { .. } => {
            ApiError::conflict("policy_not_written", error.to_string())
        }
        other => internal(other),
    }
}

fn rollback_error(error: Error) -> ApiError {
    match error {
        Error::UnknownPolicy { policy, .. } => ApiError::policy_not_found(&policy, []),
        Error::CannotRollBack { .. }
        | Error::Refused { .. }
        | Error::NotCompiled { .. }
        | Error::NoFile { .. }
        | Error::NotWritten { .. } => ApiError::conflict("cannot_roll_back", error.to_string()),
        other => internal(other),
    }
}

impl PolicyBody {
    /// Leaves out why versions were rejected or withdrawn: the reasons may concern profiles that the caller
    /// cannot use, and come from them.
    fn hide_reasons(&mut self) {
        if let Some(problem) = &mut self.problem {
            problem.message = "a key that opens all profiles shows the reason".into();
        }
        for earlier in &mut self.earlier {
            if let Some(withdrawn) = &mut earlier.withdrawn {
                *withdrawn = "withdrawn".into();
            }
        }
    }
}

impl From<PolicyReport> for PolicyBody {
    fn from(report: PolicyReport) -> Self {
        Self {
            name: report.name,
            sha256: report.sha256,
            contract: report.contract,
            origin: report.origin.name(),
            file: report.file.map(|file| file.display().to_string()),
            signed_by: report.signed_by,
            since: report.since,
            bytes: report.bytes,
            hooks: report.hooks,
            imports: report.imports,
            profiles: report.profiles.into_iter().map(UseBody::from).collect(),
            problem: report.problem.map(ProblemBody::from),
            retries: report.is_pending,
            earlier: report.earlier.into_iter().map(EarlierBody::from).collect(),
        }
    }
}

impl From<Use> for UseBody {
    fn from(Use { profile, position, shadow, sha256, health }: Use) -> Self {
        Self { profile, position, shadow, sha256, breaker: health.into() }
    }
}

impl From<Health> for BreakerBody {
    fn from(health: Health) -> Self {
        Self {
            state: breaker_state(&health),
            failures_in_a_row: health.failures,
            rests_s: health.paused.map(|pause| pause.as_secs() + 1),
            probation_left: health.probation,
        }
    }
}

impl From<Problem> for ProblemBody {
    fn from(Problem { at, message }: Problem) -> Self {
        Self { at, message }
    }
}

impl From<HistoryEntry> for EarlierBody {
    fn from(entry: HistoryEntry) -> Self {
        let withdrawn = entry.withdrawn.map(|reason| match reason {
            Withdrawn::Failed(reason) => reason,
            Withdrawn::RolledBack => "rolled back".into(),
        });
        Self {
            sha256: entry.sha256,
            bytes: entry.bytes,
            origin: entry.origin.name(),
            since: entry.since,
            withdrawn,
        }
    }
}

impl From<ParamReport> for ParamBody {
    fn from(report: ParamReport) -> Self {
        Self {
            profile: report.profile,
            param: report.param,
            file: report.file.map(|file| file.display().to_string()),
            problem: report.problem.map(ProblemBody::from),
        }
    }
}

impl From<Activation> for ActivationBody {
    fn from(activation: Activation) -> Self {
        Self {
            name: activation.policy,
            sha256: activation.sha256,
            changed: activation.replaced.is_some(),
            replaced: activation.replaced,
            notes: activation.notes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_a_status_by_who_can_act_on_them() {
        let check = |error: fn(String) -> Error, upload: (u16, &str), rollback: (u16, &str)| {
            let seen = [upload_error, rollback_error].map(|map| {
                let ApiError { status, code, .. } = map(error("house".into()));
                (status.as_u16(), code)
            });
            assert_eq!(seen, [upload, rollback], "{}", error("house".into()));
        };
        let (not_found, failed) = ((404, "policy_not_found"), (500, "internal_error"));
        let (not_written, no_rollback) = ((409, "policy_not_written"), (409, "cannot_roll_back"));
        check(
            |policy| Error::Refused { policy, profile: None, problem: "traps".into() },
            (422, "policy_refused"),
            no_rollback,
        );
        check(
            |policy| Error::NotCompiled {
                policy,
                problem: "has no end".into(),
                is_transient: false,
            },
            (422, "policy_refused"),
            no_rollback,
        );
        check(
            |policy| Error::NotCompiled {
                policy,
                problem: "the compiler was killed".into(),
                is_transient: true,
            },
            (503, "policy_not_compiled"),
            no_rollback,
        );
        check(
            |policy| Error::UnknownPolicy { policy, known: "default".into() },
            not_found,
            not_found,
        );
        check(|policy| Error::NoFile { policy }, not_written, no_rollback);
        check(
            |policy| {
                let (path, source) = ("house.wasm".into(), std::io::Error::other("disk full"));
                Error::NotWritten { policy, path, source }
            },
            not_written,
            no_rollback,
        );
        check(
            |policy| Error::CannotRollBack { policy, problem: "no earlier version".into() },
            failed,
            no_rollback,
        );
        check(|problem| Error::Config { field: "policy", problem }, failed, failed);
    }

    #[tokio::test]
    async fn a_panic_is_an_internal_error() {
        let error = blocking(|| -> () { panic!("out of registers") }).await.unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (500, "internal_error"));
        assert!(!error.message.contains("registers"), "{}", error.message);
    }
}
