//! `GET`, `POST /v1/keys` and `POST /v1/keys/{name}/revoke`: the keys of `steersman keys`, for operators.
//!
//! A key is in the reply to its creation and nowhere else. Keys of the configuration are not listed.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State as AppState};
use axum::http::{HeaderMap, StatusCode};
use axum::{Extension, Json};
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::access::{Caller, key_of};
use super::app::App;
use super::blocking::{blocking, internal};
use super::error::ApiError;
use super::protocol::JSON;
use crate::keys::{
    Configured, Editing, FILE, Key, KeyDigest, KeyFile, Keys, LastOperator, NewKey, Opens, Refusal,
    RefusalKind, State, lifetime_s,
};

/// What a key may open.
const OPENS: [&str; 3] = ["all_profiles", "operator", "profile"];

/// The note to an operator by the one-time link, who has no other key: a server with created keys offers no link.
const OF_LINK: &str = "you are an operator by the link that this server printed, and it prints none when it starts \
                       again, since it has a key now: create a key of an operator for yourself";

/// The created keys, oldest first.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct KeyList {
    keys: Vec<ListedKey>,
}

/// What is kept of a key.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ListedKey {
    name: String,
    /// The first characters of the key.
    prefix: String,
    #[schemars(extend("enum" = OPENS))]
    opens: &'static str,
    /// The profile of a key for one.
    profile: Option<String>,
    /// Seconds since 1970.
    created: i64,
    /// Seconds since 1970; null for never.
    expires: Option<i64>,
    /// Seconds since 1970; null for never.
    revoked: Option<i64>,
    #[schemars(extend("enum" = State::NAMES))]
    state: &'static str,
    /// Whether this request was sent with it.
    current: bool,
}

/// A key that was created.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct CreatedKey {
    /// The key, this one time.
    key: String,
    entry: ListedKey,
    /// What its creator has to know.
    notes: Vec<String>,
}

/// A key that was revoked.
#[derive(Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct RevokedKey {
    entry: ListedKey,
    /// What its owner has to know.
    notes: Vec<String>,
}

impl ListedKey {
    /// `own` is the key of the request.
    fn new(key: &Key, own: Option<&KeyDigest>) -> Self {
        let (opens, profile) = match &key.opens {
            Opens::AllProfiles => (OPENS[0], None),
            Opens::Operator => (OPENS[1], None),
            Opens::Profile(name) => (OPENS[2], Some(name.clone())),
        };
        Self {
            name: key.name.clone(),
            prefix: key.prefix.clone(),
            opens,
            profile,
            created: key.created.as_second(),
            expires: key.expires.map(Timestamp::as_second),
            revoked: key.revoked.map(Timestamp::as_second),
            state: key.state_at(Timestamp::now()).name(),
            current: own.is_some_and(|own| key.is(own)),
        }
    }
}

/// `GET /v1/keys`
pub async fn list(
    AppState(app): AppState<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
) -> Result<Json<KeyList>, ApiError> {
    let file = operated(&app, &caller)?;
    let own = key_of(&headers);
    let read = blocking(move || Keys::read(&file.folder().join(FILE))).await?;
    let keys = read.map_err(|error| internal(format!("{error:#}")))?.keys;
    Ok(Json(KeyList { keys: keys.iter().map(|key| ListedKey::new(key, own.as_ref())).collect() }))
}

/// `POST /v1/keys`
pub async fn create(
    AppState(app): AppState<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<CreatedKey>, ApiError> {
    let file = operated(&app, &caller)?;
    let body = app.read_json(&headers, body, JSON).await?;
    let new = app.bodies.parse(body.bytes, parse_new).await?;
    let configured = app.access.configured();
    if let Opens::Profile(profile) = &new.opens
        && !configured.profiles.contains(profile)
    {
        let known = configured.profiles.iter().map(String::as_str);
        let error = ApiError::profile_not_found(profile, known);
        return Err(ApiError { param: Some("profile".into()), ..error });
    }
    let created = change(&app, file, configured, move |keys| {
        let mut created = keys.create(&new)?;
        if !keys.has_operator() {
            created.notes.push(OF_LINK.into());
        }
        Ok(created)
    });
    let created = created.await?;
    let entry = ListedKey::new(&created.entry, None);
    let (name, prefix, opens) = (&entry.name, &entry.prefix, entry.opens);
    tracing::info!(key = name, prefix, opens, "key created by an operator");
    Ok(Json(CreatedKey { key: created.key, entry, notes: created.notes }))
}

/// `POST /v1/keys/{name}/revoke`
pub async fn revoke(
    AppState(app): AppState<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<RevokedKey>, ApiError> {
    let file = operated(&app, &caller)?;
    let body = app.read_json(&headers, body, JSON).await?;
    let last = app.bodies.parse(body.bytes, parse_revocation).await?;
    let own = key_of(&headers);
    let configured = app.access.configured();
    let (key, notes) = change(&app, file, configured, move |keys| keys.revoke(&name, last)).await?;
    tracing::info!(key = key.name, prefix = key.prefix, "key revoked by an operator");
    Ok(Json(RevokedKey { entry: ListedKey::new(&key, own.as_ref()), notes }))
}

/// The file of keys, for an operator.
fn operated(app: &App, caller: &Caller) -> Result<Arc<KeyFile>, ApiError> {
    app.access.operator(caller).inspect_err(|_| app.metrics.unauthorized())?;
    app.access.key_file().cloned().ok_or_else(|| {
        let message = "this server has no data folder, in which keys could be kept";
        ApiError::conflict("keys_not_kept", message)
    })
}

/// Changes the keys under their lock, which other processes have, too.
async fn change<T: Send + 'static>(
    app: &App,
    file: Arc<KeyFile>,
    configured: Configured,
    work: impl FnOnce(&mut Editing<'_>) -> anyhow::Result<T> + Send + 'static,
) -> Result<T, ApiError> {
    // At most one thread waits for the lock, also if the client hangs up.
    let permit = app.key_changes.clone().acquire_owned().await;
    let permit = permit.expect("the semaphore is never closed");
    let changed = blocking(move || {
        let _permit = permit;
        let mut keys = Editing::begin(file.folder(), &configured)?;
        work(&mut keys)
    });
    changed.await?.map_err(|error| match error.downcast::<Refusal>() {
        Ok(refusal) => refused(&refusal),
        Err(error) => internal(format!("{error:#}")),
    })
}

fn refused(refusal: &Refusal) -> ApiError {
    let message = refusal.to_string();
    match refusal.kind {
        RefusalKind::Name => ApiError::value("name", format!("name: {message}")),
        RefusalKind::Profile => ApiError::value("profile", format!("profile: {message}")),
        RefusalKind::Lifetime => ApiError::value("expires", format!("expires: {message}")),
        RefusalKind::Unknown => ApiError {
            status: StatusCode::NOT_FOUND,
            ..ApiError::invalid("key_not_found", "", message)
        },
        RefusalKind::Taken => ApiError::conflict("key_exists", message),
        RefusalKind::Revoked => ApiError::conflict("key_revoked", message),
        RefusalKind::LastOperator => ApiError::conflict(
            "last_operator_key",
            format!("{message}; send `\"last\": true` to revoke it nevertheless"),
        ),
        RefusalKind::Full => ApiError::conflict("keys_full", message),
        RefusalKind::Locked => ApiError::conflict("keys_locked", message),
    }
}

fn parse_new(mut body: Map<String, Value>) -> Result<NewKey, ApiError> {
    let name = text(&mut body, "name")?
        .ok_or_else(|| ApiError::missing("name", "name: must be the name of the key"))?;
    let profile = text(&mut body, "profile")?;
    let operator = flag(&mut body, "operator")?;
    let lifetime = text(&mut body, "expires")?
        .map(|text| {
            lifetime_s(&text)
                .map_err(|problem| ApiError::value("expires", format!("expires: {problem}")))
        })
        .transpose()?;
    no_more(&body, &["name", "profile", "operator", "expires"])?;
    let opens = match (profile, operator) {
        (Some(_), true) => {
            let message = "operator: must be false for a key of a `profile`";
            return Err(ApiError::value("operator", message));
        }
        (Some(profile), false) => Opens::Profile(profile),
        (None, true) => Opens::Operator,
        (None, false) => Opens::AllProfiles,
    };
    Ok(NewKey { name, opens, lifetime_s: lifetime })
}

fn parse_revocation(mut body: Map<String, Value>) -> Result<LastOperator, ApiError> {
    let last = flag(&mut body, "last")?;
    no_more(&body, &["last"])?;
    Ok(if last { LastOperator::MayGo } else { LastOperator::Stays })
}

fn text(body: &mut Map<String, Value>, field: &'static str) -> Result<Option<String>, ApiError> {
    match body.shift_remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => {
            let message = format!("{field}: must be a string");
            Err(ApiError::invalid("invalid_type", field, message))
        }
    }
}

fn flag(body: &mut Map<String, Value>, field: &'static str) -> Result<bool, ApiError> {
    match body.shift_remove(field) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(flag),
        Some(_) => {
            let message = format!("{field}: must be a boolean");
            Err(ApiError::invalid("invalid_type", field, message))
        }
    }
}

fn no_more(body: &Map<String, Value>, known: &[&'static str]) -> Result<(), ApiError> {
    match body.iter().find(|(_, value)| !value.is_null()) {
        Some((name, _)) => Err(ApiError::unknown_field(name, known.iter().copied())),
        None => Ok(()),
    }
}
