//! `GET /v1/profiles`: the profiles that a key opens, their settings, and what the key may do.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::policy::{Counted, Grant, OnFailure, Param};
use steersman_engine::request::Sampling;

use super::access::Caller;
use super::app::App;
use crate::config::ProfileAccess;

/// Profiles that a key opens.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ProfileList {
    access: Access,
    profiles: Vec<ListedProfile>,
}

/// What a key may do.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Access {
    #[schemars(extend("enum" = ["operator", "server", "profile", "none"]))]
    key: &'static str,
    /// The profile of a key for one.
    profile: Option<String>,
    /// Whether there are keys of operators.
    operators: bool,
}

#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ListedProfile {
    name: String,
    /// The model that serves it.
    model: Option<String>,
    policies: Vec<String>,
    shadow: Vec<String>,
    #[schemars(with = "String")]
    on_failure: OnFailure,
    #[schemars(with = "Vec<String>")]
    grants: Vec<Grant>,
    /// Parameters of its policies, for operators.
    #[schemars(with = "Option<Map<String, Value>>")]
    params: Option<BTreeMap<String, Param>>,
    trace_text: bool,
    has_keys: bool,
    mcp: Vec<String>,
    /// Upstreams and single models of them that its requests may name.
    upstreams: Vec<String>,
    policy_headers: Vec<String>,
    /// Models and profiles to which its policies may route requests.
    routes: Vec<String>,
    limits: Limits,
    /// Null if the profile sets nothing.
    #[schemars(with = "Option<Map<String, Value>>")]
    sampling: Option<Value>,
}

/// Limits of a profile's requests; 0 is no limit.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "ProfileLimits")]
struct Limits {
    prompt_tokens: usize,
    think_budget: u32,
    max_tokens: u32,
    #[schemars(extend("enum" = ["api", "answer", "reply"]))]
    limit_counts: &'static str,
    /// Requests that wait or run.
    requests: usize,
}

/// `GET /v1/profiles`. Parameters of policies may hold what not every client should see: only operators do.
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Json<ProfileList> {
    let shown = app.profiles.read().clone();
    let opens = |name: &str| app.access.allow(&caller, name).is_ok();
    let profiles = shown.iter().filter(|(name, _)| opens(name));
    let profiles = profiles.map(|(name, profile)| describe(&app, &caller, name, profile)).collect();
    let (key, profile) = match &caller {
        Caller::Operator => ("operator", None),
        Caller::AllProfiles => ("server", None),
        Caller::Profile(name) => ("profile", Some(name.clone())),
        Caller::Anonymous => ("none", None),
    };
    let access = Access { key, profile, operators: app.access.has_operators() };
    Json(ProfileList { access, profiles })
}

fn describe(app: &App, caller: &Caller, name: &str, profile: &ProfileAccess) -> ListedProfile {
    let settings = &profile.settings;
    let model = app.models.serving(None, name).ok().map(|index| app.models.name(index));
    let policy = &settings.policy;
    let limits = Limits {
        prompt_tokens: settings.limits.prompt_tokens,
        think_budget: settings.limits.reasoning_budget,
        max_tokens: settings.limits.max_tokens,
        limit_counts: match settings.limits.limit_counts {
            None => "api",
            Some(Counted::Answer) => "answer",
            Some(Counted::Reply) => "reply",
        },
        requests: profile.requests,
    };
    ListedProfile {
        name: name.into(),
        model,
        policies: policy.policies.clone(),
        shadow: policy.shadow.clone(),
        on_failure: policy.on_failure,
        grants: policy.grants.clone(),
        params: (*caller == Caller::Operator).then(|| policy.params.clone()),
        trace_text: policy.trace_text,
        has_keys: !profile.api_keys.is_empty(),
        mcp: profile.mcp.clone(),
        upstreams: profile.upstreams.clone(),
        policy_headers: profile.policy_headers.clone(),
        routes: settings.routes.clone(),
        limits,
        sampling: settings.sampling.map(value),
    }
}

/// The JSON of sampling parameters, with the digits of an `f64`.
fn value(sampling: Sampling) -> Value {
    serde_json::to_value(sampling).expect("sampling parameters are numbers")
}
