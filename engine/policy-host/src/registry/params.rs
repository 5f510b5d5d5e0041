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

use super::active::{Active, Version};
use super::source::ProfileChain;
use crate::chain::{own_params, unknown_in};
use crate::config::{OnFailure, Param};
use crate::contract::{Hook, Params, Policy, RequestView};
use crate::sandbox::{Component, Context};
use crate::schema::{Schema, Schemas, nearest, problems};
use crate::shipped::SHIPPED;

/// What is wrong with the parameters of a profile: each parameter with its problem, which names the policy.
#[derive(Default)]
pub struct Checked {
    /// Parameters because of which the server does not start.
    pub wrong: Vec<(String, String)>,
    /// Parameters that a policy cannot use, which it says in each reply; the name is empty if the policy names none.
    pub unusable: Vec<(String, String)>,
}

/// Checks the parameters `params` of `profile`; what could be one of a policy that is `broken`, or whose entry is no policy,
/// is not judged.
///
/// Wrong are those that do not fit a schema or that no policy of the profile knows; in a profile that fails closed, those that
/// its policies cannot use, too. If an earlier version of a policy runs in place of a broken one, unknown parameters are logged
/// instead: the newer version may know them.
pub fn check(
    profile: &str,
    chain: &ProfileChain,
    active: &Active,
    broken: &BTreeSet<&str>,
    params: &Params,
) -> Checked {
    let policies = &active.policies;
    let given = &chain.settings.params;
    let names: Vec<_> = chain.links.iter().map(|(policy, _)| policy.as_str()).collect();
    let settings = &chain.settings;
    let is_whole = names.len() == settings.policies.len() + settings.shadow.len();
    let foreign = given.keys().filter_map(|param| {
        let (near, problem) = of_no_policy(param, &names)?;
        let may_be = |policy: &str| !is_whole || broken.contains(policy);
        (!near.map_or(!is_whole, may_be)).then(|| (param.clone(), problem))
    });
    let foreign: Vec<_> = foreign.collect();
    // The key of a parameter and its problem; no key for a problem that is about none of them.
    let mut unusable: Vec<(String, String)> = Vec::new();
    let schemas = chain.links.iter().map(|(policy, _)| {
        let version = policies[policy].current.as_ref();
        (policy.clone(), version.and_then(|version| version.schema.clone()))
    });
    let schemas: Schemas = schemas.collect();
    let is_named = |param: &str| of_no_policy(param, &names).is_none();
    let mut wrong = problems(&schemas, params);
    wrong.retain(|(param, _)| is_named(param));
    let mut unknown: BTreeSet<_> = params.iter().map(|(param, _)| param.clone()).collect();
    for (param, _) in &wrong {
        unknown.remove(param);
    }
    unknown.retain(|param| is_named(param));
    for (policy, _) in &chain.links {
        // Without a version it has a problem, and the rest is logged.
        let Some(version) = policies[policy].current.as_deref() else { continue };
        let Version { component, schema, .. } = version;
        let params = own_params(policy, params).unwrap_or_else(|| params.clone());
        let prepared = component.prepare(profile, &params);
        match &prepared {
            Ok(prepared) => {
                let problems = own_problems(&prepared.problems);
                unusable.extend(problems.map(|problem| located(given, policy, problem)));
            }
            Err(failure) => {
                let problem = format!("{}: {}", failure.hook, failure.cause);
                unusable.push(located(given, policy, &problem));
            }
        }
        if let Some(schema) = schema {
            for name in schema.names() {
                unknown.remove(name);
                unknown.remove(&format!("{policy}.{name}"));
            }
            continue;
        }
        let Some(note) = note(component, profile, &params) else { continue };
        let reported = prepared.as_ref().map(|prepared| &prepared.problems[..]).unwrap_or_default();
        for (param, _) in &params {
            if is_reported_unknown(param, reported, &note) {
                continue;
            }
            unknown.remove(param);
            unknown.remove(&format!("{policy}.{param}"));
            if let Some(at) = note.find(&format!("parameter `{param}`")) {
                let found = located(given, policy, &note[at..]);
                // A policy may report a problem in `on-params` and note it, too.
                let by = format!("policy `{policy}`");
                let is_known =
                    |(key, text): &(String, String)| *key == found.0 && text.starts_with(&by);
                if !unusable.iter().any(is_known) {
                    unusable.push(found);
                }
            }
        }
    }
    unusable.retain(|(key, _)| wrong.iter().all(|(param, _)| param != key));
    let has_problem = |policy: &str| policies[policy].problem.is_some();
    // Without a version, nobody knows the parameters of a policy.
    let is_loaded = |policy: &str| policies[policy].current.is_some();
    let all_loaded = is_whole && names.iter().all(|policy| is_loaded(policy));
    for param in unknown {
        let owner = names.iter().find(|policy| own_name(&param, policy).is_some());
        let (is_judged, is_logged) = match owner {
            Some(policy) => (is_loaded(policy), has_problem(policy)),
            None => (all_loaded, names.iter().any(|policy| has_problem(policy))),
        };
        let found = unknown_param(param, &names, &schemas);
        match (is_judged, is_logged) {
            (_, true) => {
                let (param, problem) = found;
                tracing::warn!(profile, param, problem, "parameter unknown");
            }
            (true, false) => wrong.push(found),
            (false, false) => {}
        }
    }
    wrong.extend(foreign);
    if chain.settings.on_failure == OnFailure::Closed && !names.iter().any(|name| has_problem(name))
    {
        wrong.append(&mut unusable);
    }
    Checked { wrong, unusable }
}

/// Returns true if a policy reports `param` as unknown, in its problems or in the note of its plan.
fn is_reported_unknown(param: &str, reported: &[String], note: &str) -> bool {
    reported.iter().any(|problem| unknown_in(problem) == Some(param))
        || note.contains(&format!("unknown parameter `{param}`"))
}

/// The problems of parameters that a policy without a schema reports: those that it does not know, each with the most similar
/// name that it knows, and those whose value it cannot use, according to the note of its plan.
pub fn refused_params(component: &Arc<Component>, params: &Params) -> Vec<String> {
    let profile = "default";
    let prepared = component.prepare(profile, params);
    let reported = prepared.as_ref().map(|prepared| &prepared.problems[..]).unwrap_or_default();
    let note = note(component, profile, params).unwrap_or_default();
    let problem = |(param, _): &(String, String)| {
        if is_reported_unknown(param, reported, &note) {
            let (_, problem) = unknown_param(param.clone(), &[component.name()], &Schemas::new());
            return Some(format!("`{param}`: {problem}"));
        }
        unusable_in(&note, param).map(|value| format!("`{param}`: cannot {value}"))
    };
    params.iter().filter_map(problem).collect()
}

/// What the value of `param` cannot be, according to a note, which may name other parameters after it.
fn unusable_in<'a>(note: &'a str, param: &str) -> Option<&'a str> {
    let (_, said) = note.split_once(&format!("parameter `{param}` cannot "))?;
    let ends = ["; parameter `", "; unknown parameter `"].map(|next| said.find(next));
    let end = ends.into_iter().flatten().min().unwrap_or(said.len());
    Some(&said[..end])
}

/// The problems that a policy reports of its parameters, without those that it does not know: it gets all of its profile,
/// and those of other policies are none of its.
pub fn own_problems(problems: &[String]) -> impl Iterator<Item = &String> {
    problems.iter().filter(|problem| unknown_in(problem).is_none())
}

/// The key of the parameter of a profile that a `problem` of its `policy` is about, empty for none, and the problem
/// with the name of the policy, and with the file that the parameter is read from.
pub fn located(given: &BTreeMap<String, Param>, policy: &str, problem: &str) -> (String, String) {
    let named = problem.strip_prefix("parameter `").and_then(|rest| rest.split_once('`'));
    let found = named.and_then(|(name, rest)| {
        let own = given.get_key_value(&format!("{policy}.{name}"));
        Some((own.or_else(|| given.get_key_value(name))?, rest))
    });
    let Some(((key, value), rest)) = found else {
        return (String::new(), format!("policy `{policy}`: {problem}"));
    };
    let problem = match (value, rest.strip_prefix(": ")) {
        (Param::File { file }, Some(rest)) => format!("{}: {rest}", file.display()),
        (Param::File { file }, None) => format!("{}: {problem}", file.display()),
        (Param::Text(_), _) => problem.to_owned(),
    };
    (key.clone(), format!("policy `{policy}`: {problem}"))
}

/// The parameter `param`, which none of `policies` has, with its problem and the name that is spelt most like it.
fn unknown_param(param: String, policies: &[&str], schemas: &Schemas) -> (String, String) {
    let (owner, name) = match policies.iter().find_map(|policy| own_name(&param, policy)) {
        Some((policy, name)) => (Some(policy), name),
        None => (None, param.as_str()),
    };
    let is_asked = |policy: &str| owner.is_none_or(|owner| owner == policy);
    let shipped = SHIPPED.iter().filter(|shipped| policies.contains(&shipped.name));
    let shipped =
        shipped.filter(|shipped| is_asked(shipped.name)).flat_map(|shipped| shipped.params);
    let described = schemas.iter().filter(|(policy, _)| is_asked(policy));
    let described = described.filter_map(|(_, schema)| schema.as_ref()).flat_map(Schema::names);
    let near = nearest(name, shipped.copied().chain(described));
    let near = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
    let problem = match (owner, policies) {
        (Some(policy), _) => format!("the policy `{policy}` has no such parameter{near}"),
        (None, [policy]) => format!("the policy `{policy}` has no such parameter{near}"),
        (None, _) => {
            format!("none of the policies {} has such a parameter{near}", policies.join(", "))
        }
    };
    (param, problem)
}

/// The problem of `param` if it is a parameter of one policy, and of none of `policies`, after the one of them that is spelt
/// most like that policy.
fn of_no_policy<'a>(param: &str, policies: &[&'a str]) -> Option<(Option<&'a str>, String)> {
    let (owner, _) = param.split_once('.')?;
    if policies.iter().any(|policy| own_name(param, policy).is_some()) {
        return None;
    }
    let near = nearest(owner, policies.iter().copied());
    let hint = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
    let known = policies.join(", ");
    Some((near, format!("the profile does not name that policy, only {known}{hint}")))
}

/// The policy and the name of the parameter `POLICY.NAME`, if `param` is one of `policy`.
fn own_name<'a>(param: &'a str, policy: &'a str) -> Option<(&'a str, &'a str)> {
    Some((policy, param.strip_prefix(policy)?.strip_prefix('.')?))
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
