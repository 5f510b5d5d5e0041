//! `GET /v1/profiles`: the profiles that a key opens, their settings, and what the key may do.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use serde_json::{Value, json};
use steersman_engine::policy::Counted;

use super::App;
use super::access::Caller;
use crate::config::ProfileAccess;

/// Settings of all profiles by name, without their keys.
pub type Profiles = BTreeMap<String, ProfileAccess>;

/// `GET /v1/profiles`. Parameters of policies may hold what not every client should see: only operators do.
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Json<Value> {
    let shown = app.profiles.read().clone();
    let opens = |name: &str| app.access.allow(&caller, name).is_ok();
    let profiles = shown.iter().filter(|(name, _)| opens(name));
    let profiles: Vec<Value> =
        profiles.map(|(name, profile)| describe(&app, &caller, name, profile)).collect();
    let (key, profile) = match &caller {
        Caller::Operator => ("operator", None),
        Caller::AllProfiles => ("server", None),
        Caller::Profile(name) => ("profile", Some(name)),
        Caller::Anonymous => ("none", None),
    };
    let access = json!({"key": key, "profile": profile, "operators": app.access.has_operators()});
    Json(json!({"access": access, "profiles": profiles}))
}

fn describe(app: &App, caller: &Caller, name: &str, profile: &ProfileAccess) -> Value {
    let settings = &profile.settings;
    let model = app.models.serving(None, name).ok().map(|index| app.models.name(index));
    let policy = &settings.policy;
    let limits = json!({
        "prompt_tokens": settings.limits.prompt_tokens,
        "think_budget": settings.limits.reasoning_budget,
        "max_tokens": settings.limits.max_tokens,
        "limit_counts": match settings.limits.limit_counts {
            None => "api",
            Some(Counted::Answer) => "answer",
            Some(Counted::Reply) => "reply",
        },
        "requests": profile.requests,
    });
    json!({
        "name": name,
        "model": model,
        "policies": policy.policies,
        "shadow": policy.shadow,
        "on_failure": policy.on_failure,
        "grants": policy.grants,
        "params": (*caller == Caller::Operator).then_some(&policy.params),
        "trace_text": policy.trace_text,
        "has_keys": !profile.api_keys.is_empty(),
        "mcp": profile.mcp,
        "policy_headers": profile.policy_headers,
        "routes": settings.routes,
        "limits": limits,
        "sampling": settings.sampling,
    })
}

/// Takes over what a reload of the configuration changes.
pub fn reload(shown: &mut Profiles, new: &Profiles) {
    for (name, profile) in shown {
        if let Some(new) = new.get(name) {
            profile.api_keys.clone_from(&new.api_keys);
            profile.policy_headers.clone_from(&new.policy_headers);
            profile.requests = new.requests;
        }
    }
}
