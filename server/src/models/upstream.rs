//! Adds the models of upstreams: those of the configuration, those that it names elsewhere, and those that an upstream
//! lists when it is asked at the start.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, anyhow, bail};
use steersman_engine::config::Profile;
use steersman_engine::policy::{Hook, Origin, PolicyReport, Report};
use steersman_upstream::{
    Capabilities, Continues, Kind, Protocol, Upstream, UpstreamConfig, WithoutContinuation,
    is_upstream_of,
};
use tokio::runtime::Builder;

use super::{Backend, Models, NamedBy, Served};
use crate::config::ServerConfig;

impl Models {
    /// Adds the upstreams of the configuration and their models. Asks them; blocks meanwhile.
    ///
    /// # Errors
    /// If the key of an upstream cannot be read, or a profile has policies that an upstream cannot carry out. An upstream
    /// that does not answer is logged: what it can carry out is not known, and it is asked again.
    pub fn add_upstreams(
        &mut self,
        server: &ServerConfig,
        profiles: &BTreeMap<String, Profile>,
    ) -> Result<()> {
        if server.upstreams.is_empty() {
            return Ok(());
        }
        for (name, config) in &server.upstreams {
            let policies = self.policies.clone();
            let upstream = Upstream::new(name, config.clone(), policies, profiles.clone());
            self.upstreams.push(upstream.map_err(|problem| anyhow!(problem))?);
        }
        let listed = ask(&self.upstreams)?;
        let found = |name: &str| {
            let upstream = self.upstreams.iter().find(|upstream| upstream.name() == name);
            upstream.and_then(Upstream::known_capabilities)
        };
        let problems = problems_of_continuation(&self.policies.report(), server, found);
        if !problems.is_empty() {
            bail!("{}", problems.join("\n"));
        }
        for (upstream, listed) in self.upstreams.clone().into_iter().zip(listed) {
            let mut models: BTreeSet<String> = listed.into_iter().collect();
            models.extend(named(server, upstream.name()));
            for model in models {
                self.add_of_upstream(&upstream, &model, server);
            }
        }
        Ok(())
    }

    fn add_of_upstream(&mut self, upstream: &Upstream, model: &str, server: &ServerConfig) {
        let model = upstream.model(model);
        let name = model.name().to_string();
        let grants = |granted: &String| *granted == name || granted == upstream.name();
        let granted =
            server.profiles.iter().filter(|(_, access)| access.upstreams.iter().any(grants));
        let mut granted: BTreeSet<_> = granted.map(|(profile, _)| profile.clone()).collect();
        let own = server.profile_models.iter().filter(|(_, model)| **model == name);
        let own: Vec<_> = own.map(|(profile, _)| profile.clone()).collect();
        granted.extend(own.iter().cloned());
        let index = self.pool.add_loaded(&name, Backend::Upstream(model), 0);
        self.of_profile.extend(own.into_iter().map(|profile| (profile, index)));
        let (granted, facts) = (Some(granted), Arc::default());
        let named_by = NamedBy::Configuration;
        let served = Served { name, named_by, on_demand: false, granted, files: None, facts };
        self.served.write().push(served);
    }
}

/// Asks all upstreams at once for their models; those that do not answer have those of the configuration.
fn ask(upstreams: &[Upstream]) -> Result<Vec<Vec<String>>> {
    let upstreams = upstreams.to_vec();
    // A runtime of its own: this thread may be one of another's.
    let asking = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("starting a runtime")?;
        let one = |upstream: Upstream| async move {
            match upstream.ask().await {
                Ok(models) => models,
                Err(problem) => {
                    let (name, listed) = (upstream.name(), upstream.config().models.len());
                    tracing::warn!(
                        upstream = name,
                        problem,
                        listed,
                        "upstream does not list its models; those of the configuration are served"
                    );
                    upstream.config().models.clone()
                }
            }
        };
        let all = futures_util::future::join_all(upstreams.into_iter().map(one));
        anyhow::Ok(runtime.block_on(all))
    });
    asking.join().map_err(|_| anyhow!("asking the upstreams panicked"))?
}

/// The models of upstream `name` that the configuration names somewhere.
fn named(server: &ServerConfig, name: &str) -> impl Iterator<Item = String> {
    let of_profiles = server.profile_models.values();
    let granted = server.profiles.values().flat_map(|access| &access.upstreams);
    let routes = server.profiles.values().flat_map(|access| &access.settings.routes);
    let fallbacks = server.upstreams.values().flat_map(|upstream| &upstream.fallback);
    let aliases = server.aliases.values();
    let all = of_profiles.chain(granted).chain(routes).chain(fallbacks).chain(aliases);
    all.filter_map(move |model| {
        let model = model.split_once('@').map_or(model.as_str(), |(model, _)| model);
        Some(is_upstream_of(model, |upstream| upstream == name)?.1.to_string())
    })
}

/// Profiles whose policies may change what was written, of upstreams that cannot continue a message and whose
/// configuration does not say what becomes of that. `found` are the capabilities of an upstream, if they are known.
pub fn problems_of_continuation(
    report: &Report,
    server: &ServerConfig,
    found: impl Fn(&str) -> Option<Capabilities>,
) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, config) in &server.upstreams {
        let Some(capabilities) = found(name).or_else(|| configured(config)) else { continue };
        let is_settled = config.without_continuation != WithoutContinuation::Refuse;
        if is_settled || capabilities.continues_reasoning() {
            continue;
        }
        for (profile, access) in &server.profiles {
            let is_of = |model: &String| {
                model == name || is_upstream_of(model, |upstream| upstream == name).is_some()
            };
            let key = match server.profile_models.get(profile) {
                Some(model) if is_of(model) => "model",
                _ if access.upstreams.iter().any(is_of) => "upstreams",
                _ => continue,
            };
            let steps = report.policies.iter().filter(|policy| may_change(policy));
            let applied = steps.filter(|policy| {
                policy.profiles.iter().any(|used| used.profile == *profile && !used.shadow)
            });
            problems.extend(applied.map(|policy| {
                let policy = &policy.name;
                format!(
                    "profiles.{profile}.{key}: the policy `{policy}` may close the reasoning, inject text and rewind \
                     (on-step), which needs an upstream that continues a message, and `{name}` does not: set \
                     upstreams.{name}.without_continuation to `end` or `ignore`, or use policies without on-step"
                )
            }));
        }
    }
    problems
}

/// Whether a policy may change what was written. The `passthrough` that ships has all hooks but one, and does nothing in
/// them: a profile must name a policy, and this is the one for profiles that are not steered.
fn may_change(policy: &PolicyReport) -> bool {
    let is_passthrough = policy.origin == Origin::Shipped && policy.name == "passthrough";
    policy.hooks.contains(&Hook::OnStep.name()) && !is_passthrough
}

/// The capabilities of an upstream as far as its configuration says; `None` if it has to be asked.
fn configured(config: &UpstreamConfig) -> Option<Capabilities> {
    let kind = match (config.protocol, config.capabilities.kind, config.capabilities.continues) {
        (Protocol::Anthropic, _, _) => Kind::Anthropic,
        (Protocol::OpenAi, Some(kind), _) => kind,
        (Protocol::OpenAi, None, Some(Continues::Never)) => Kind::OpenAi,
        (Protocol::OpenAi, None, _) => return None,
    };
    Some(Capabilities::new(kind, &config.capabilities))
}
