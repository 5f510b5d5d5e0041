//! The handles to an upstream and to one of its models.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use secrecy::SecretString;
use steersman_policy_host::Policies;
use steersman_request::profile::Profile;
use tokio::time::Instant;

use crate::breaker::{self, Breaker};
use crate::capability::{Capabilities, Kind};
use crate::client::Client;
use crate::config::{Protocol, UpstreamConfig};
use crate::gate::Gate;
use crate::memory::Memory;
use crate::models::{self, Asked};
use crate::usage::{Usage, Use, Used};

/// Time after which an upstream that did not answer is asked again for its models and its kind.
const ASK_AGAIN: Duration = Duration::from_secs(30);

/// A server that computes models. Cheap to clone.
#[derive(Clone)]
pub struct Upstream(Arc<Shared>);

/// What all handles to an upstream share.
pub(crate) struct Shared {
    name: String,
    config: UpstreamConfig,
    key: Option<SecretString>,
    pub(crate) client: Client,
    pub(crate) gate: Gate,
    pub(crate) breaker: Arc<Breaker>,
    pub(crate) usage: Usage,
    pub(crate) memory: Memory,
    policies: Arc<Policies>,
    profiles: BTreeMap<String, Profile>,
    /// What asking it has found; `None` until it has answered.
    asked: RwLock<Option<Asked>>,
    /// When it is asked again, after it did not answer.
    pub(crate) ask_again_at: Mutex<Option<Instant>>,
}

/// A model of an upstream: takes requests, and sends the events of their replies, as an engine does (`submit.rs`).
/// Cheap to clone.
#[derive(Clone)]
pub struct UpstreamModel {
    upstream: Upstream,
    /// The name `NAME/MODEL`.
    name: Arc<str>,
}

/// An upstream at one moment.
#[derive(Debug, Clone)]
pub struct Report {
    /// Name of the upstream.
    pub name: String,
    /// Whether its breaker lets requests through.
    pub breaker: breaker::State,
    /// Requests that run.
    pub running: usize,
    /// Requests that wait for others to end.
    pub waiting: usize,
    /// Tokens of this day.
    pub tokens_today: u64,
    /// Tokens by model, profile and key.
    pub used: Vec<(Use, Used)>,
}

impl Upstream {
    /// The upstream `name`, whose configuration was checked. `profiles` are those of the server.
    ///
    /// # Errors
    /// If its key cannot be read; names the key of the configuration.
    pub fn new(
        name: &str,
        config: UpstreamConfig,
        policies: Arc<Policies>,
        profiles: BTreeMap<String, Profile>,
    ) -> Result<Self, String> {
        let key = config.key(name)?;
        let shared = Shared {
            name: name.into(),
            client: Client::new(&config, key.clone()),
            key,
            gate: Gate::new(&config),
            breaker: Arc::default(),
            usage: Usage::default(),
            memory: Memory::default(),
            policies,
            profiles,
            asked: RwLock::default(),
            ask_again_at: Mutex::default(),
            config,
        };
        Ok(Self(Arc::new(shared)))
    }

    /// The name of the upstream.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its configuration.
    pub fn config(&self) -> &UpstreamConfig {
        &self.0.config
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.0
    }

    /// Asks it for its models and the server that it is. Returns the names of its models: those of the configuration,
    /// if that has some.
    ///
    /// # Errors
    /// If it does not answer, in words without its key. What the configuration says applies.
    pub async fn ask(&self) -> Result<Vec<String>, String> {
        let asked = models::ask(&self.0.config, self.0.key.clone()).await;
        let asked = asked.map_err(|fault| {
            *self.0.ask_again_at.lock() = Some(Instant::now() + ASK_AGAIN);
            fault.problem
        })?;
        let mut models: Vec<String> = asked.models.keys().cloned().collect();
        *self.0.asked.write() = Some(asked);
        if !self.0.config.models.is_empty() {
            models.clone_from(&self.0.config.models);
        }
        Ok(models)
    }

    /// Asks it again if it did not answer, some time ago. Within a runtime.
    pub(crate) fn ask_again(&self) {
        let at = &mut *self.0.ask_again_at.lock();
        if at.is_none_or(|at| at > Instant::now()) {
            return;
        }
        *at = None;
        let upstream = self.clone();
        tokio::spawn(async move {
            let name = upstream.name();
            match upstream.ask().await {
                Ok(_) => tracing::info!(upstream = name, "upstream lists its models now"),
                Err(problem) => {
                    tracing::debug!(upstream = name, problem, "upstream does not list its models");
                }
            }
        });
    }

    /// What it can, if it has answered or its configuration says so.
    pub fn known_capabilities(&self) -> Option<Capabilities> {
        let UpstreamConfig { protocol, capabilities, .. } = &self.0.config;
        let is_told = *protocol == Protocol::Anthropic || capabilities.kind.is_some();
        let is_known = is_told || self.0.asked.read().is_some();
        is_known.then(|| self.capabilities())
    }

    /// What it can; what OpenAI can, as long as it is not known.
    pub fn capabilities(&self) -> Capabilities {
        let of_config = self.0.config.capabilities.kind;
        let found = self.0.asked.read().as_ref().and_then(|asked| asked.kind);
        let kind = match self.0.config.protocol {
            Protocol::Anthropic => Kind::Anthropic,
            Protocol::OpenAi => of_config.or(found).unwrap_or_default(),
        };
        Capabilities::new(kind, &self.0.config.capabilities)
    }

    /// Its model `model`.
    pub fn model(&self, model: &str) -> UpstreamModel {
        let name = format!("{}/{model}", self.0.name).into();
        UpstreamModel { upstream: self.clone(), name }
    }

    /// The upstream now.
    pub fn report(&self) -> Report {
        let crowd = self.0.gate.crowd();
        Report {
            name: self.0.name.clone(),
            breaker: self.0.breaker.state(),
            running: crowd.running,
            waiting: crowd.waiting,
            tokens_today: crowd.tokens_today,
            used: self.0.usage.report(),
        }
    }
}

impl UpstreamModel {
    /// The name `NAME/MODEL`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The upstream's name of it.
    pub fn model(&self) -> &str {
        &self.name[self.upstream.name().len() + 1..]
    }

    /// Its upstream.
    pub fn upstream(&self) -> &Upstream {
        &self.upstream
    }

    /// What its upstream can with it.
    pub fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.upstream.capabilities();
        if let Some(reasoning) = self.asked(|model| model.reasoning)
            && self.upstream.config().capabilities.reasoning.is_none()
        {
            capabilities.reasoning = reasoning;
        }
        capabilities
    }

    /// Tokens of prompt and reply together, if they are known.
    pub fn context(&self) -> Option<u32> {
        let of_config = Some(self.upstream.config().context).filter(|context| *context > 0);
        of_config.or_else(|| self.asked(|model| model.context))
    }

    fn asked<T>(&self, of: impl FnOnce(&models::Model) -> Option<T>) -> Option<T> {
        self.upstream.0.asked.read().as_ref()?.models.get(self.model()).and_then(of)
    }

    pub(crate) fn profile(&self, name: &str) -> Option<&Profile> {
        self.upstream.0.profiles.get(name)
    }

    /// The policies of all profiles.
    pub fn policies(&self) -> &Arc<Policies> {
        &self.upstream.0.policies
    }
}
