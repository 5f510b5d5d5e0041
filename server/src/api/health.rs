//! `GET /health` and `GET /metrics`: what the server does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use steersman_engine::policy::{PolicyReport, Use};
use steersman_engine::report::{NamedPrefix, PrefixReporter};
use steersman_engine::{Engine, Error};
use steersman_models::pool::Report;

use super::access::Caller;
use super::app::App;
use super::blocking::blocking;
use super::error::ApiError;
use super::metrics::{self, OPEN_METRICS, PLAIN};
use super::models::STATES;
use crate::connections::Connection;
use crate::system::Load;

/// Longest preparation of a request after which `/health` says that the server does not advance. Each step of it has
/// a limit of its own, the longest that of compiling a form.
const PREPARATION: Duration = Duration::from_secs(120);

/// What the server does.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Health {
    #[schemars(extend("const" = "ok"))]
    status: &'static str,
    /// The first model.
    model: String,
    waiting: usize,
    engines: Vec<EngineHealth>,
    models: Vec<ModelHealth>,
    /// This process, and how busy and warm the machine is.
    machine: Load,
    /// Policies of profiles that fail in every request, since no version of them is active.
    inactive_policies: Vec<InactivePolicy>,
    /// Policies that are not called in one of their profiles for a while, since they have failed there too often.
    open_breakers: Vec<String>,
}

/// A policy without a version; the reason is for operators.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct InactivePolicy {
    policy: String,
    /// Whether the server compiles it again by itself.
    retries: bool,
}

/// What an engine does.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct EngineHealth {
    model: String,
    running: usize,
    awaiting_policy: usize,
    awaiting_prefix: usize,
    waiting: usize,
    /// Seconds since the oldest preparation of a request began that has not ended; 0 if there is none.
    preparing_s: f64,
    preempted: usize,
    rows_per_pass: f64,
    tokens_per_second: f64,
    preemptions: u64,
    stalls: u64,
    /// Bytes of arrays by account.
    bytes: BTreeMap<&'static str, u64>,
    prefixes: PrefixHealth,
}

/// What the prefix cache of an engine has in memory.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct PrefixHealth {
    /// Runs of tokens.
    count: usize,
    /// Tokens with saved state, once for all conversations that share them.
    tokens: usize,
    /// The conversations that used it last, newest first: at most 256. Null without a key that opens all profiles, if
    /// the server has keys.
    held: Option<Vec<HeldPrefix>>,
}

/// A conversation from whose saved state a request can resume.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct HeldPrefix {
    /// The header `X-Steersman-Prefix` of its replies.
    prefix: String,
    /// Tokens of the longest prefix.
    tokens: usize,
}

/// Where a model is.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ModelHealth {
    model: String,
    #[schemars(extend("enum" = STATES))]
    state: &'static str,
    requests: usize,
    /// Seconds until it is unloaded unless it is used.
    expires_s: Option<u64>,
    loads: u64,
    unloads: u64,
}

/// `GET /health`: never waits for the engine and needs no key. 503 if an engine has stopped, or prepares a request
/// for too long.
pub async fn get(
    State(app): State<Arc<App>>,
    caller: Option<Extension<Caller>>,
) -> Result<Json<Health>, ApiError> {
    let sees_all = caller.is_some_and(|Extension(caller)| app.access.sees_all(&caller));
    let engines = app.models.engines();
    if engines.iter().any(Engine::has_stopped) {
        return Err(Error::Stopped.into());
    }
    let preparing = engines.iter().filter_map(Engine::preparing_for).max();
    if let Some(time) = preparing.filter(|time| *time > PREPARATION) {
        return Err(ApiError::not_advancing(time));
    }
    let all = app.models.clone();
    let (models, policies) =
        blocking(move || (all.states(), all.policies().report().policies)).await?;
    Ok(Json(Health {
        status: "ok",
        model: app.models.name(0),
        waiting: engines.iter().map(Engine::waiting).sum(),
        engines: engines.iter().map(|engine| EngineHealth::of(engine, sees_all)).collect(),
        models: models.into_iter().map(ModelHealth::from).collect(),
        machine: Load::now(),
        open_breakers: open_breakers(&policies),
        inactive_policies: policies.into_iter().filter_map(inactive).collect(),
    }))
}

fn inactive(policy: PolicyReport) -> Option<InactivePolicy> {
    let (is_active, retries) = (policy.is_active(), policy.is_pending);
    (!is_active).then_some(InactivePolicy { policy: policy.name, retries })
}

/// The policies whose breaker is open in a profile. That of a shadow changes no reply.
fn open_breakers(policies: &[PolicyReport]) -> Vec<String> {
    let is_open = |used: &Use| !used.shadow && used.health.paused.is_some();
    let open = policies.iter().filter(|policy| policy.profiles.iter().any(is_open));
    open.map(|policy| policy.name.clone()).collect()
}

impl From<(String, &'static str, Report)> for ModelHealth {
    fn from((model, state, report): (String, &'static str, Report)) -> Self {
        Self {
            model,
            state,
            requests: report.requests,
            expires_s: report.expires.map(|time| time.as_secs()),
            loads: report.loads,
            unloads: report.unloads,
        }
    }
}

impl EngineHealth {
    /// What `engine` does; the conversations that it holds for who `sees_all` of them.
    fn of(engine: &Engine, sees_all: bool) -> Self {
        let (info, activity) = (engine.info(), engine.info().activity.report());
        let mut bytes = BTreeMap::from([("limit", activity.bytes.limit)]);
        bytes.extend(metrics::accounts(&activity.bytes));
        Self {
            model: info.model.clone(),
            running: activity.running,
            awaiting_policy: activity.awaiting_policy,
            awaiting_prefix: activity.awaiting_prefix,
            waiting: engine.waiting(),
            preparing_s: rounded(engine.preparing_for().unwrap_or_default().as_secs_f64()),
            preempted: activity.preempted,
            rows_per_pass: rounded(activity.rows_mean),
            tokens_per_second: rounded(activity.tokens_per_second),
            preemptions: activity.preemptions,
            stalls: activity.stalls,
            bytes,
            prefixes: PrefixHealth::of(&info.prefixes, sees_all),
        }
    }
}

impl PrefixHealth {
    fn of(prefixes: &PrefixReporter, sees_all: bool) -> Self {
        let (memory, names) = prefixes.in_memory();
        let held = |NamedPrefix { name, tokens }| HeldPrefix { prefix: name.to_string(), tokens };
        Self {
            count: memory.nodes,
            tokens: memory.tokens,
            held: sees_all.then(|| names.into_iter().map(held).collect()),
        }
    }
}

/// With one decimal.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// `GET /metrics`: OpenMetrics, or the text format before it for clients that accept only that.
pub async fn scrape(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    connection: Option<Extension<Arc<Connection>>>,
) -> impl IntoResponse {
    let connections = connection.as_ref().map(|connection| connection.all());
    let responses = app.responses.as_deref();
    let text = metrics::text(&app.metrics, &app.models, responses, connections, &app.reload_counts);
    let accepted = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let is_plain = accepted
        .is_some_and(|types| types.contains("text/plain") && !types.contains("openmetrics"));
    let (kind, text) = if is_plain { (PLAIN, metrics::plain(&text)) } else { (OPEN_METRICS, text) };
    ([(header::CONTENT_TYPE, kind), (header::VARY, "accept")], text)
}

#[cfg(test)]
mod tests {
    use steersman_engine::policy::{Health as PolicyHealth, Origin};

    use super::*;

    fn policy(name: &str, shadow: bool, paused: Option<Duration>) -> PolicyReport {
        let health = PolicyHealth { paused, ..PolicyHealth::default() };
        PolicyReport {
            name: name.into(),
            sha256: "0123".into(),
            contract: "0.6.0",
            origin: Origin::File,
            file: None,
            signed_by: None,
            since: 0,
            bytes: 1,
            hooks: Vec::new(),
            imports: Vec::new(),
            profiles: vec![Use {
                profile: "default".into(),
                position: 0,
                shadow,
                sha256: String::new(),
                health,
            }],
            problem: None,
            is_pending: false,
            earlier: Vec::new(),
        }
    }

    /// Policies were paused, and `/health` named none of them.
    #[test]
    fn policies_that_are_paused_are_named() {
        let paused = Some(Duration::from_secs(30));
        let policies = [
            policy("broken", false, paused),
            policy("fine", false, None),
            policy("tried", true, paused),
        ];
        assert_eq!(open_breakers(&policies), ["broken"]);
    }
}
