//! The state that all handlers share, and what they do with it first: read a body, find its destination.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName};
use parking_lot::{Mutex, RwLock};
use steersman_models::hub::Hub;
use tokio::sync::Semaphore;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::access::{Access, Admission, Caller, Destination};
use super::body::{Bodies, Limit, ReadBody};
use super::error::ApiError;
use super::metrics::Metrics;
use super::origin::Origins;
use super::prefix_names::PrefixNames;
use super::pulls::Pulls;
use super::register::Register;
use super::response_store::ResponseStore;
use super::samples::Samples;
use crate::config::{ProfileAccess, Reloads, ServerConfig};
use crate::mcp::Mcp;
use crate::models::Models;
use crate::reload::ReloadCounts;
use crate::throttle::Throttle;
use crate::wiring::Wiring;
use steersman_log::Recent;

/// Traces that are read at a time.
const TRACE_READERS: usize = 4;

/// Selects a profile, like `model@profile`.
const PROFILE: HeaderName = HeaderName::from_static("x-steersman-profile");

/// State shared by all handlers.
pub struct App {
    pub(super) models: Models,
    pub(super) access: Access,
    /// Shared with the logs of running requests, which count their outcomes.
    pub(super) metrics: Arc<Metrics>,
    pub(super) origins: Origins,
    pub(super) prefix_names: PrefixNames,
    /// Limit on log lines about refused hosts and origins.
    pub(super) refusals: Throttle,
    pub(super) bodies: Bodies,
    /// The requests that run, and the newest that have ended.
    pub(super) register: Register,
    /// Settings of all profiles by name, without their keys, for display.
    pub(super) profiles: RwLock<BTreeMap<String, ProfileAccess>>,
    pub(super) mcp: Arc<Mcp>,
    /// `None` if no response is stored.
    pub(super) responses: Option<Arc<ResponseStore>>,
    /// Limits uploads of policies to one at a time: compiling a component occupies a core.
    pub(super) uploads: Semaphore,
    /// Limits rollbacks to one at a time.
    pub(super) rollbacks: Semaphore,
    /// Limits changes of keys to one at a time.
    pub(super) key_changes: Arc<Semaphore>,
    /// Limits traces that are read at a time.
    pub(super) trace_readers: Arc<Semaphore>,
    /// The download or the removal of a model that runs.
    pub(super) pulls: Arc<Pulls>,
    /// Held while a model of the cache begins to be served, or is removed.
    pub(super) files: Mutex<()>,
    /// Where models are downloaded from, if not what the environment says.
    hub: Option<Hub>,
    /// The newest lines of the log.
    pub(super) log: Recent,
    /// What the server did lately.
    pub(super) samples: Samples,
    /// How reloads of the configuration have ended, for metrics.
    pub(super) reload_counts: Arc<ReloadCounts>,
    pub(super) body_limit_bytes: usize,
    pub(super) request_timeout: Duration,
}

impl App {
    /// The state of a server with `models`.
    ///
    /// # Panics
    /// Outside of a runtime, if a profile grants MCP servers, or `wiring` has reloads or samples.
    pub fn new(models: Models, config: &ServerConfig, wiring: Wiring) -> Arc<Self> {
        let Wiring { keys, link, responses, reloads, reload_counts, hub, log, samples } = wiring;
        let lifetime = Duration::from_secs(config.responses_days * 86_400);
        let folder = responses.as_ref().filter(|_| config.responses_bytes > 0);
        let store = folder
            .map(|folder| Arc::new(ResponseStore::open(folder, config.responses_bytes, lifetime)));
        let app = Arc::new(Self {
            models,
            access: Access::new(config, keys, link),
            metrics: Arc::default(),
            origins: Origins::new(config),
            prefix_names: PrefixNames::default(),
            refusals: Throttle::default(),
            bodies: Bodies::new(config),
            register: Register::default(),
            profiles: RwLock::new(config.profiles.clone()),
            mcp: Mcp::start(config),
            responses: store,
            uploads: Semaphore::new(1),
            rollbacks: Semaphore::new(1),
            key_changes: Arc::new(Semaphore::new(1)),
            trace_readers: Arc::new(Semaphore::new(TRACE_READERS)),
            pulls: Arc::default(),
            files: Mutex::default(),
            hub,
            log,
            samples: Samples::default(),
            reload_counts,
            body_limit_bytes: config.body_limit_bytes,
            request_timeout: Duration::from_secs(config.request_timeout_s),
        });
        if let Some(reloads) = reloads {
            tokio::spawn(follow(Arc::downgrade(&app), reloads));
        }
        if let Some(period) = samples {
            tokio::spawn(sample(Arc::downgrade(&app), period));
        }
        app
    }

    /// The hub and its cache on this machine.
    pub fn hub(&self) -> Hub {
        self.hub.clone().unwrap_or_else(Hub::from_env)
    }

    /// Reads a JSON body of `content_type`, or of any if there is none.
    ///
    /// # Errors
    /// As [`Bodies::read`].
    pub async fn read_json(
        &self,
        headers: &HeaderMap,
        body: Body,
        content_type: Option<&str>,
    ) -> Result<ReadBody, ApiError> {
        let limit = Limit {
            bytes: self.body_limit_bytes,
            set_by: "server.body_limit_bytes",
            has_budget: true,
        };
        self.bodies.read(headers, body, content_type, limit).await
    }

    /// Admits a body for `model`, and waits until that is loaded.
    ///
    /// # Errors
    /// As [`Destination::new`] and [`Destination::admit`].
    pub async fn admit(
        &self,
        caller: &Caller,
        headers: &HeaderMap,
        model: Option<String>,
    ) -> Result<Admission, ApiError> {
        let deadline = Instant::now() + self.request_timeout;
        self.destination(caller, headers, model)?.admit(&self.models, deadline).await
    }

    /// Where a body for `model` goes.
    ///
    /// # Errors
    /// As [`Destination::new`].
    pub fn destination(
        &self,
        caller: &Caller,
        headers: &HeaderMap,
        model: Option<String>,
    ) -> Result<Destination, ApiError> {
        let profile = headers.get(PROFILE).map(|profile| profile.to_str().unwrap_or("?"));
        Destination::new(&self.models, &self.access, caller, model, profile)
    }
}

/// Applies what changes while the server runs.
async fn follow(app: Weak<App>, mut reloads: Reloads) {
    while reloads.changed().await.is_ok() {
        let config = reloads.borrow_and_update().clone();
        let (Some(app), Some(config)) = (app.upgrade(), config) else { return };
        app.access.reload(&config);
        reload_profiles(&mut app.profiles.write(), &config.profiles);
        app.models.set_aliases(config.aliases.clone());
    }
}

/// Takes a sample of what the server does every `period`, as long as there is the server.
async fn sample(app: Weak<App>, period: Duration) {
    let mut ticks = interval_at(Instant::now() + period, period);
    // A machine that was suspended has one sample of that time.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(app) = app.upgrade() else { return };
        app.samples.take(&app.metrics, &app.models);
    }
}

/// Takes over what a reload of the configuration changes.
fn reload_profiles(
    shown: &mut BTreeMap<String, ProfileAccess>,
    new: &BTreeMap<String, ProfileAccess>,
) {
    for (name, profile) in shown {
        if let Some(new) = new.get(name) {
            profile.api_keys.clone_from(&new.api_keys);
            profile.policy_headers.clone_from(&new.policy_headers);
            profile.requests = new.requests;
        }
    }
}
