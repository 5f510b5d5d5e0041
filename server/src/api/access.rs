//! Access control: API keys, the profiles that they open, and the limit on concurrent requests of a
//! profile.
//!
//! A key of the server opens every profile. A key of a profile opens that profile only; a profile
//! with keys is closed to everyone else, except for the keys of the server. If the server has no
//! keys, everyone may use the profiles that have none.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, header};
use jiff::Timestamp;
use parking_lot::{Mutex, RwLock};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use steersman_engine::policy;
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};

use super::error::ApiError;
use crate::config::{ProfileAccess, ServerConfig};
use crate::keys::{self, Configured, KeyDigest, KeyFile, Opens, State};
use crate::link::Link;
use crate::models::{Backend, Lease, Models};
use crate::throttle::Throttle;
use crate::words::suggestion;

/// Where Anthropic's clients send their key.
pub const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Time between two answers to wrong keys, of all clients together.
const FAILURE_INTERVAL: Duration = Duration::from_millis(100);

/// Longest pause before the answer to a wrong key.
const FAILURE_PAUSE: Duration = Duration::from_secs(10);

/// What clients that cannot leave out the key send where none is needed: the words of this server's documents, and those of
/// the documents of other local servers.
const PLACEHOLDERS: [&str; 10] = [
    "",
    "none",
    "None",
    "EMPTY",
    "dummy",
    "lm-studio",
    "no-key",
    "not-needed",
    "ollama",
    "sk-no-key-required",
];

/// Keys of the server and of its profiles, which a reload of the configuration and `steersman keys` replace.
pub struct Access {
    /// Keys of the configuration and of `steersman keys` together.
    keys: RwLock<Arc<Keys>>,
    sources: Mutex<Sources>,
    file: Option<Arc<KeyFile>>,
    /// Makes who has read it an operator.
    link: Option<Arc<Link>>,
    failures: Failures,
    /// Limit on log lines about keys that have expired.
    refusals: Throttle,
}

/// Where the keys come from.
struct Sources {
    configured: Keys,
    created: keys::Keys,
}

/// Keys of one configuration, or of all sources.
#[derive(Clone)]
struct Keys {
    server_keys: Vec<KeyDigest>,
    /// Whether a client without a key is refused.
    requires_key: bool,
    /// Keys of operators.
    admin_keys: Vec<KeyDigest>,
    /// Without operators, operations on policies are closed to everyone.
    has_operators: bool,
    profiles: BTreeMap<String, ProfileGate>,
    /// Created keys that expire or have expired, which are among the keys above, too, and those that were revoked.
    ending: Vec<keys::Key>,
}

/// Keys and concurrency limit of one profile.
#[derive(Clone)]
struct ProfileGate {
    keys: Vec<KeyDigest>,
    /// Whether clients without a key are refused.
    requires_key: bool,
    /// One permit for each request that may wait or run; `None` for no limit.
    permits: Option<Arc<Semaphore>>,
    limit: usize,
    /// Headers that its policies see.
    headers: Vec<String>,
}

/// What the key of an HTTP request opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// Every profile, and the operations on policies.
    Operator,
    /// Every profile.
    AllProfiles,
    /// Every profile without keys.
    Anonymous,
    /// One profile.
    Profile(String),
}

impl Keys {
    fn new(config: &ServerConfig) -> Self {
        let digest = |key: &SecretString| digest(key.expose_secret());
        let digests = |keys: &[SecretString]| keys.iter().map(digest).collect();
        let gate = |profile: &ProfileAccess| ProfileGate {
            keys: digests(&profile.api_keys),
            requires_key: !profile.api_keys.is_empty(),
            permits: (profile.requests > 0).then(|| Arc::new(Semaphore::new(profile.requests))),
            limit: profile.requests,
            headers: profile.policy_headers.clone(),
        };
        let profiles = config.profiles.iter();
        Self {
            server_keys: digests(&config.api_keys),
            requires_key: !config.api_keys.is_empty(),
            admin_keys: digests(&config.admin_keys),
            has_operators: !config.admin_keys.is_empty(),
            profiles: profiles.map(|(name, profile)| (name.clone(), gate(profile))).collect(),
            ending: Vec::new(),
        }
    }

    /// Returns true if a `key` that opens nothing may be the mistyped one of a profile: such a request must not be answered
    /// by another profile, without the limits of its own.
    fn is_mistyped(&self, key: Option<&KeyDigest>) -> bool {
        let is_placeholder = |key: &KeyDigest| PLACEHOLDERS.iter().any(|text| digest(text) == *key);
        key.is_some_and(|key| !is_placeholder(key))
            && self.profiles.values().any(|gate| gate.requires_key)
    }
}

impl Sources {
    /// All keys. A revoked one opens nothing, and leaves closed what it opened.
    fn merged(&self) -> Keys {
        let mut keys = self.configured.clone();
        for key in &self.created.keys {
            let digest = key.digest();
            if key.expires.is_some() || key.revoked.is_some() {
                keys.ending.push(key.clone());
            }
            match &key.opens {
                Opens::AllProfiles => {
                    keys.server_keys.extend(digest);
                    keys.requires_key = true;
                }
                Opens::Operator => {
                    keys.admin_keys.extend(digest);
                    keys.has_operators = true;
                }
                Opens::Profile(name) => match keys.profiles.get_mut(name) {
                    Some(gate) => {
                        gate.keys.extend(digest);
                        gate.requires_key = true;
                    }
                    None => {
                        let (key, profile) = (&key.name, name);
                        tracing::warn!(key, profile, "key opens nothing: there is no such profile");
                    }
                },
            }
        }
        keys
    }
}

impl Access {
    /// The keys of `config`, of `file` and of `link`.
    pub fn new(config: &ServerConfig, file: Option<Arc<KeyFile>>, link: Option<Arc<Link>>) -> Self {
        let created = file.as_ref().map(|file| file.keys()).unwrap_or_default();
        let sources = Sources { configured: Keys::new(config), created };
        Self {
            keys: RwLock::new(Arc::new(sources.merged())),
            sources: Mutex::new(sources),
            file,
            link,
            failures: Failures::default(),
            refusals: Throttle::default(),
        }
    }

    /// Replaces keys and limits. Running requests keep their permits, and count against limits that stay.
    pub fn reload(&self, config: &ServerConfig) {
        let mut new = Keys::new(config);
        let mut sources = self.sources.lock();
        let old = &sources.configured;
        for (name, gate) in &mut new.profiles {
            if let Some(before) = old.profiles.get(name).filter(|old| old.limit == gate.limit) {
                gate.permits.clone_from(&before.permits);
            }
        }
        // Profiles that a restart would remove keep what they have: they can still be used.
        for (name, gate) in &old.profiles {
            new.profiles.entry(name.clone()).or_insert_with(|| gate.clone());
        }
        sources.configured = new;
        *self.keys.write() = Arc::new(sources.merged());
    }

    /// The keys, with what `steersman keys` has changed.
    fn keys(&self) -> Arc<Keys> {
        if let Some(file) = &self.file {
            let mut sources = self.sources.lock();
            if let Some(created) = file.changed() {
                sources.created = created;
                *self.keys.write() = Arc::new(sources.merged());
            }
        }
        self.keys.read().clone()
    }

    /// The file of created keys; `None` without a data folder.
    pub fn key_file(&self) -> Option<&Arc<KeyFile>> {
        self.file.as_ref()
    }

    /// What the configuration says of profiles and keys.
    pub fn configured(&self) -> Configured {
        let sources = self.sources.lock();
        let Keys { requires_key, has_operators, profiles, .. } = &sources.configured;
        let closed = profiles.iter().filter(|(_, gate)| gate.requires_key);
        Configured {
            profiles: profiles.keys().cloned().collect(),
            closed_profiles: closed.map(|(name, _)| name.clone()).collect(),
            is_closed: *requires_key,
            has_operators: *has_operators,
        }
    }

    /// The caller, from the key in the headers.
    ///
    /// # Errors
    /// 401 if a required key is missing or wrong, if a key is unknown while profiles have keys, or if it has expired.
    pub fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        let key = key_of(headers);
        // Compares with every key to the end, so the time taken reveals nothing.
        let is_among = |keys: &[KeyDigest]| {
            key.is_some_and(|key| {
                keys.iter().fold(0, |found, known| found | known.ct_eq(&key).unwrap_u8()) == 1
            })
        };
        let known = self.keys();
        // A client whose key has ended is not one without a key: it is told so also where it needs none.
        check_end(&known.ending, key.as_ref())?;
        let (operator, all_profiles) = (is_among(&known.admin_keys), is_among(&known.server_keys));
        let of_link = self.link.as_ref().zip(key.as_ref());
        let operator = of_link.is_some_and(|(link, key)| link.opens(key)) | operator;
        let of_profile = known.profiles.iter().fold(None, |found, (name, gate)| {
            if is_among(&gate.keys) { Some(Caller::Profile(name.clone())) } else { found }
        });
        match of_profile {
            _ if operator => Ok(Caller::Operator),
            _ if all_profiles => Ok(Caller::AllProfiles),
            Some(caller) => Ok(caller),
            None if known.requires_key => Err(ApiError::unauthorized()),
            None if known.is_mistyped(key.as_ref()) => Err(ApiError::unknown_key()),
            None => Ok(Caller::Anonymous),
        }
    }

    /// What policies of `profile` see of a caller: its key, if that was checked, and the headers that the
    /// profile names.
    pub fn seen_by_policies(
        &self,
        caller: &Caller,
        profile: &str,
        headers: &HeaderMap,
    ) -> policy::Caller {
        let key = key_of(headers).filter(|_| *caller != Caller::Anonymous);
        let known = self.keys();
        let names = known.profiles.get(profile).map_or(&[][..], |gate| &gate.headers);
        let seen = names.iter().filter_map(|name| {
            let text = headers.get(name)?.to_str().ok()?;
            let text = &text[..text.floor_char_boundary(policy::HEADER_BYTES)];
            Some((name.clone(), text.to_string()))
        });
        policy::Caller {
            key: key.map(|key| hex::encode(&key[..8])).unwrap_or_default(),
            headers: seen.collect(),
            ..policy::Caller::default()
        }
    }

    /// The operator's key for the token of the link; `None` if there is no link with this token that was not used.
    pub fn exchange(&self, token: &str) -> Option<String> {
        self.link.as_ref()?.exchange(token)
    }

    /// Waits before the answer to a wrong key or link, which has this code.
    pub async fn pause(&self, sender: &Sender, code: &str) {
        self.failures.pause(sender, code).await;
    }

    /// Logs that a request was refused because it has no key, or one that has expired.
    pub fn log_refusal(&self, sender: &Sender, error: &ApiError) {
        if let Some(suppressed) = self.refusals.pass() {
            let Sender { request_id, route, address } = sender;
            let (code, reason) = (error.code, &error.message);
            tracing::warn!(request_id, route, address, code, reason, suppressed, "request refused");
        }
    }

    /// Whether there are operators.
    pub fn has_operators(&self) -> bool {
        self.link.is_some() || self.keys().has_operators
    }

    /// Rejects callers that are not operators: 403 if the server has no operators, or else 401.
    pub fn operator(&self, caller: &Caller) -> Result<(), ApiError> {
        match caller {
            Caller::Operator => Ok(()),
            _ if !self.has_operators() => Err(ApiError::no_operators()),
            _ => Err(ApiError::not_an_operator()),
        }
    }

    /// Rejects a caller whose key does not open `profile`, with 403.
    pub fn allow(&self, caller: &Caller, profile: &str) -> Result<(), ApiError> {
        let closed = self.keys().profiles.get(profile).is_some_and(|gate| gate.requires_key);
        match caller {
            Caller::Profile(own) if own != profile => Err(ApiError::forbidden(format!(
                "this key opens the profile `{own}`, not `{profile}`"
            ))),
            Caller::Anonymous if closed => Err(ApiError::forbidden(format!(
                "the profile `{profile}` requires its own key, and the request has none, or one that this server does not \
                 know: send `Authorization: Bearer KEY`"
            ))),
            _ => Ok(()),
        }
    }

    /// Whether a caller sees what concerns the clients of all profiles: one with a key of an operator or of the server,
    /// and everyone on a server that has no keys.
    pub fn sees_all(&self, caller: &Caller) -> bool {
        match caller {
            Caller::Operator | Caller::AllProfiles => true,
            Caller::Profile(_) => false,
            Caller::Anonymous => {
                let Keys { requires_key, has_operators, profiles, .. } = &*self.keys();
                !requires_key && !has_operators && profiles.values().all(|gate| !gate.requires_key)
            }
        }
    }

    /// Most sequences of `profile` that run at the same time, whatever its requests split into; 0 is no limit.
    pub fn running_limit(&self, profile: &str) -> usize {
        self.keys().profiles.get(profile).map_or(0, |gate| gate.limit)
    }

    /// Acquires a permit for one request of `profile`, or 429; `None` if the profile has no limit.
    pub fn acquire(&self, profile: &str) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        let known = self.keys();
        let Some(gate) = known.profiles.get(profile) else { return Ok(None) };
        let Some(permits) = &gate.permits else { return Ok(None) };
        permits.clone().try_acquire_owned().map(Some).map_err(|_| {
            ApiError::busy(format!(
                "the profile `{profile}` has reached its limit on requests that wait or run, which is {} \
                 (profiles.{profile}.limits.requests); try again later",
                gate.limit
            ))
        })
    }
}

/// Where a request goes: it may go there, but its model need not be loaded.
pub struct Destination {
    /// Index of the model.
    index: usize,
    /// The profile that steers it.
    pub profile: String,
    /// The model in the reply: the client's name for it, or that of the profile's model.
    pub model: String,
}

/// A request whose model is loaded.
pub struct Admission {
    /// What answers the requests of the model.
    pub backend: Backend,
    /// Keeps the model loaded.
    pub lease: Arc<Lease>,
    /// The profile that steers it.
    pub profile: String,
    /// [`Destination::model`]
    pub model: String,
}

impl Destination {
    /// Admits a request for `model` with `header`, the value of `X-Steersman-Profile`.
    ///
    /// The profile is that of `model@profile`, of the header, of the caller's key, or `default`.
    /// Without `model` it is that of the profile.
    ///
    /// # Errors
    /// 400 or 404 for a model or profile that is missing or not served, 403 for a profile that the
    /// caller may not use.
    pub fn new(
        models: &Models,
        access: &Access,
        caller: &Caller,
        model: Option<String>,
        header: Option<&str>,
    ) -> Result<Self, ApiError> {
        let named = match &model {
            Some(name) => Some(models.resolve(name).ok_or_else(|| {
                if let Some((model, profile)) = name.rsplit_once('@')
                    && models.resolve(model).is_some()
                {
                    let near = suggestion(profile, models.profiles());
                    return ApiError::model_not_found(format!(
                        "the model `{model}` is served, but no profile `{profile}` of it (see GET /v1/models){near}"
                    ));
                }
                let (names, all) = (list(models), models.names());
                let near = suggestion(name, all.iter().map(|known| known.name.as_str()));
                ApiError::model_not_found(format!(
                    "there is no model `{name}`; this server serves {names} (see GET /v1/models){near}"
                ))
            })?),
            None => None,
        };
        let own = if let Caller::Profile(own) = caller { Some(own.as_str()) } else { None };
        let profile = match (named.as_ref().and_then(|(_, profile)| profile.as_deref()), header) {
            (Some(profile), Some(header)) if profile != header => {
                let message = format!(
                    "the model selects the profile `{profile}`, X-Steersman-Profile selects \
                     `{header}`; drop one of them"
                );
                return Err(ApiError::value("model", message));
            }
            (Some(profile), _) | (None, Some(profile)) => profile,
            (None, None) => own.unwrap_or("default"),
        };
        let named = named.as_ref().map(|(index, _)| *index);
        let index = models.serving(named, profile).map_err(|own| {
            let (Some(own), Some(named)) = (own, named) else {
                return ApiError::profile_not_found(profile, models.profiles());
            };
            let (served, name) = (models.name(own), models.name(named));
            if models.is_of_upstream(named) {
                return ApiError::model_not_found(format!(
                    "the profile `{profile}` may not use `{name}`, a model of an upstream; its operator can grant \
                     it (profiles.{profile}.upstreams)"
                ));
            }
            ApiError::model_not_found(format!(
                "the profile `{profile}` uses the model `{served}`, not `{name}`: ask for \
                 `{served}`, or for another profile as `{name}@PROFILE` (see GET /v1/models)"
            ))
        })?;
        access.allow(caller, profile)?;
        let profile = profile.to_string();
        Ok(Self { index, profile, model: model.unwrap_or_else(|| models.name(index)) })
    }

    /// Index of the model.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Waits until the model is loaded.
    ///
    /// # Errors
    /// 503 if that is not possible, 504 if `deadline` is over.
    pub async fn admit(self, models: &Models, deadline: Instant) -> Result<Admission, ApiError> {
        let lease = models.acquire(self.index, deadline).await?;
        let (backend, lease) = (lease.engine().clone(), Arc::new(lease));
        Ok(Admission { backend, lease, profile: self.profile, model: self.model })
    }
}

/// Refuses `key` if it is one of the keys `ending` that does not work now.
fn check_end(ending: &[keys::Key], key: Option<&KeyDigest>) -> Result<(), ApiError> {
    let Some(key) = key else { return Ok(()) };
    // To the end, so the time taken reveals nothing.
    let known =
        ending.iter().fold(None, |found, known| if known.is(key) { Some(known) } else { found });
    match known {
        Some(known) if known.state_at(Timestamp::now()) != State::Active => {
            Err(ApiError::key_ended(known))
        }
        Some(_) | None => Ok(()),
    }
}

/// The digest of the key in the headers, whether or not it is known.
pub fn key_of(headers: &HeaderMap) -> Option<KeyDigest> {
    let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let key = text(&header::AUTHORIZATION).and_then(|value| value.split_once(' '));
    let bearer =
        key.map(|(scheme, key)| if scheme.eq_ignore_ascii_case("bearer") { key } else { "" });
    bearer.or_else(|| text(&API_KEY)).map(|key| digest(key.trim()))
}

fn digest(key: &str) -> KeyDigest {
    Sha256::digest(key).into()
}

/// Whom a body names as its sender: user and metadata.
pub fn named_by(body: &Map<String, Value>) -> policy::Caller {
    let labels = body.get("metadata").and_then(Value::as_object);
    let cut = |text: &str, bytes| text[..text.floor_char_boundary(bytes)].to_string();
    let pair = |(name, value): (&String, &Value)| {
        let value = cut(value.as_str()?, policy::METADATA_BYTES);
        Some((cut(name, policy::METADATA_NAME_BYTES), value))
    };
    let mut metadata: Vec<_> = labels.into_iter().flatten().filter_map(pair).collect();
    metadata.sort();
    metadata.truncate(policy::METADATA);
    let of_anthropic = labels.and_then(|labels| labels.get("user_id"));
    let users = [body.get("user"), body.get("safety_identifier"), of_anthropic];
    let mut users = users.into_iter().flatten().filter_map(Value::as_str);
    let user = users.find(|user| !user.is_empty()).map(Sha256::digest);
    policy::Caller {
        user: user.map(|user| hex::encode(&user[..8])).unwrap_or_default(),
        metadata,
        ..policy::Caller::default()
    }
}

/// The names of all models, for messages.
fn list(models: &Models) -> String {
    let names: Vec<_> = models.own_names().iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

/// Where a request that is refused comes from, for the log.
pub struct Sender {
    /// Id of the HTTP request.
    pub request_id: String,
    /// The route that was asked for.
    pub route: Option<String>,
    /// Where the connection comes from.
    pub address: Option<String>,
}

/// The pace of answers to wrong keys.
#[derive(Default)]
struct Failures {
    /// When the last pause ends.
    last: Mutex<Option<Instant>>,
    log: Throttle,
}

impl Failures {
    /// Waits for [`FAILURE_INTERVAL`], after the answers to earlier failures.
    async fn pause(&self, sender: &Sender, code: &str) {
        if let Some(suppressed) = self.log.pass() {
            let Sender { request_id, route, address } = sender;
            tracing::warn!(request_id, route, address, code, suppressed, "request refused");
        }
        let end = {
            let mut last = self.last.lock();
            let now = Instant::now();
            let end = last.map_or(now, |last| last.max(now)) + FAILURE_INTERVAL;
            *last.insert(end.min(now + FAILURE_PAUSE))
        };
        sleep_until(end).await;
    }
}
