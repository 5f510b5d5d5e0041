//! Checks the parameters of a profile.
//!
//! A policy may have a schema of its parameters ([`crate::schema`]): then a misspelt one, and a text that is not
//! of its type, are errors, here and whenever a parameter or a version changes ([`crate::schema::conform`]).
//!
//! Of a policy without a schema the host cannot see which parameters it knows. The policies that
//! ship, and others that follow the same convention, note unusable ones in their plan: "unknown parameter
//! `NAME`", "parameter `NAME` cannot be ..". So each policy plans an empty request in a dry run. One that
//! notes nothing may know every parameter, unless it exports neither of the hooks that receive them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::active::{PolicyEntry, Version};
use super::source::ProfileChain;
use crate::chain::own_params;
use crate::contract::{Hook, Params, Policy, RequestView};
use crate::error::Error;
use crate::sandbox::{Component, Context};
use crate::schema::{Schemas, conform};

/// Checks the parameters of `profile`; returns what its policies say of those that they cannot use, a line each.
///
/// # Errors
/// [`Error::Config`] names a parameter that no policy of the profile knows. It is logged instead if an
/// earlier version of a policy runs in place of a broken one, which may know it.
pub fn check(
    profile: &str,
    chain: &ProfileChain,
    policies: &BTreeMap<String, PolicyEntry>,
    params: &Params,
) -> Result<Vec<String>, Error> {
    let mut unusable = Vec::new();
    if params.is_empty() {
        return Ok(unusable);
    }
    let schemas = chain.links.iter().map(|(policy, _)| {
        let version = policies[policy].current.as_ref();
        (policy.clone(), version.and_then(|version| version.schema.clone()))
    });
    let schemas: Schemas = schemas.collect();
    conform(&schemas, params).map_err(|problem| Error::Config {
        field: "profiles",
        problem: format!("profile `{profile}`: {problem}"),
    })?;
    let mut unknown: BTreeSet<_> = params.iter().map(|(param, _)| param.clone()).collect();
    for (policy, _) in &chain.links {
        // Without a version it has a problem, and the rest is logged.
        let Some(version) = policies[policy].current.as_deref() else { continue };
        let Version { component, schema, .. } = version;
        let params = own_params(policy, params).unwrap_or_else(|| params.clone());
        let of_profile = |problem| format!("profile `{profile}`: policy `{policy}`: {problem}");
        let problems = match component.prepare(profile, &params) {
            Ok(prepared) => prepared.problems.clone(),
            Err(failure) => vec![failure.to_string()],
        };
        unusable.extend(problems.into_iter().map(of_profile));
        if let Some(schema) = schema {
            for name in schema.names() {
                unknown.remove(name);
                unknown.remove(&format!("{policy}.{name}"));
            }
            continue;
        }
        let Some(note) = note(component, profile, &params) else { continue };
        for (param, _) in &params {
            if note.contains(&format!("unknown parameter `{param}`")) {
                continue;
            }
            unknown.remove(param);
            unknown.remove(&format!("{policy}.{param}"));
            if note.contains(&format!("parameter `{param}`")) {
                unusable.push(of_profile(note.clone()));
            }
        }
    }
    let Some(param) = unknown.first() else { return Ok(unusable) };
    let names: Vec<_> = chain.links.iter().map(|(policy, _)| policy.as_str()).collect();
    let problem = format!(
        "params `{param}` of profile `{profile}`: no policy of the profile knows it, neither {}",
        names.join(" nor ")
    );
    if names.iter().any(|policy| policies[*policy].problem.is_some()) {
        tracing::warn!(problem, "parameter unknown");
        return Ok(unusable);
    }
    Err(Error::Config { field: "profiles", problem })
}

/// The note of a plan with these parameters; `None` if the policy receives none.
fn note(component: &Arc<Component>, profile: &str, params: &Params) -> Option<String> {
    let receives = [Hook::OnPrompt, Hook::OnRequest].map(Hook::name);
    if !component.hooks().iter().any(|hook| receives.contains(hook)) {
        return None;
    }
    let (profile, params) = (profile.to_owned(), params.clone());
    let view = RequestView { profile, params, ..RequestView::default() };
    let planned = component.instantiate(&Context::dry_run()).and_then(|mut instance| {
        let policy: &mut dyn Policy = &mut instance;
        policy.ask(&view)
    });
    match planned {
        Ok(plan) => Some(plan.note.unwrap_or_default()),
        Err(failure) => {
            tracing::warn!(profile = view.profile, %failure, "policy cannot plan with its parameters");
            Some(String::new())
        }
    }
}
