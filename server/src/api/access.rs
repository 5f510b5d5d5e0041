//! Who may ask for what: keys, the profiles that they open, and how many requests of a profile there
//! may be at a time.
//!
//! Keys of the server open every profile. A profile's own keys open that one and no other; a profile
//! that has some is closed to everyone else, the server's keys excepted. Where the server has no keys,
//! everyone may use what is not closed so.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::App;
use super::error::ApiError;
use crate::config::ServerConfig;

/// Keys, as digests of equal length.
pub struct Access {
    server: Vec<[u8; 32]>,
    /// Those of operators; where there are none, nobody may do what wants one.
    admin: Vec<[u8; 32]>,
    profiles: BTreeMap<String, Door>,
}

/// How one profile is entered.
struct Door {
    keys: Vec<[u8; 32]>,
    /// A permit for each request that may wait or run; none where any number may.
    places: Option<Arc<Semaphore>>,
    limit: usize,
}

/// What a request's key opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// Every profile, and what operators alone may do.
    Operator,
    /// Every profile.
    Everything,
    /// Every profile that has no keys of its own.
    Guest,
    /// One profile.
    Profile(String),
}

impl Access {
    /// The keys and bounds of the configuration.
    pub fn new(config: &ServerConfig) -> Self {
        let digests = |keys: &[String]| keys.iter().map(|key| Sha256::digest(key).into()).collect();
        let door = |limit: usize, keys: &[String]| Door {
            keys: digests(keys),
            places: (limit > 0).then(|| Arc::new(Semaphore::new(limit))),
            limit,
        };
        let profiles = config.profiles.iter();
        Self {
            server: digests(&config.api_keys),
            admin: digests(&config.admin_keys),
            profiles: profiles.map(|(n, p)| (n.clone(), door(p.requests, &p.api_keys))).collect(),
        }
    }

    /// Whom the headers show; none where a key is wanted and missing or wrong.
    pub fn caller(&self, headers: &HeaderMap) -> Option<Caller> {
        let key = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let key = key.and_then(|value| value.split_once(' ')).map(|(scheme, key)| {
            let bearer = scheme.eq_ignore_ascii_case("bearer");
            Sha256::digest(if bearer { key.trim() } else { "" })
        });
        // Digests of equal length, all of them compared to the end: the time taken tells nothing.
        let among = |keys: &[[u8; 32]]| {
            key.is_some_and(|key| {
                keys.iter().fold(0, |found, known| found | known.ct_eq(&key).unwrap_u8()) == 1
            })
        };
        let (operator, everything) = (among(&self.admin), among(&self.server));
        let of_profile = self.profiles.iter().fold(None, |found, (name, door)| {
            if among(&door.keys) { Some(Caller::Profile(name.clone())) } else { found }
        });
        match of_profile {
            _ if operator => Some(Caller::Operator),
            _ if everything => Some(Caller::Everything),
            Some(caller) => Some(caller),
            None => self.server.is_empty().then_some(Caller::Guest),
        }
    }

    /// Whether `caller` may use `profile`.
    ///
    /// # Errors
    /// 403 where not.
    pub fn allow(&self, caller: &Caller, profile: &str) -> Result<(), ApiError> {
        let closed = self.profiles.get(profile).is_some_and(|door| !door.keys.is_empty());
        match caller {
            Caller::Profile(own) if own != profile => Err(ApiError::forbidden(format!(
                "this key is for the profile `{own}`, not for `{profile}`"
            ))),
            Caller::Guest if closed => Err(ApiError::forbidden(format!(
                "the profile `{profile}` wants a key of its own: send `Authorization: Bearer KEY`"
            ))),
            _ => Ok(()),
        }
    }

    /// Whether `caller` may do what operators alone may.
    ///
    /// # Errors
    /// 403 where there are no operators, 401 where this is none.
    pub fn operator(&self, caller: &Caller) -> Result<(), ApiError> {
        match caller {
            Caller::Operator => Ok(()),
            _ if self.admin.is_empty() => Err(ApiError::no_operators()),
            _ => Err(ApiError::not_an_operator()),
        }
    }

    /// A place for one more request of `profile`, held until the permit is dropped; none where any
    /// number may run.
    ///
    /// # Errors
    /// 429 when all are taken.
    pub fn enter(&self, profile: &str) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        let Some(door) = self.profiles.get(profile) else { return Ok(None) };
        let Some(places) = &door.places else { return Ok(None) };
        places.clone().try_acquire_owned().map(Some).map_err(|_| {
            ApiError::busy(format!(
                "{} requests of the profile `{profile}` wait or run already, as many as may \
                 (profiles.{profile}.limits.requests)",
                door.limit
            ))
        })
    }
}

/// Lets a request pass if no key is wanted, or if it brings one of them.
pub async fn authorize(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let Some(caller) = app.access.caller(request.headers()) else {
        app.metrics.unauthorized();
        return ApiError::unauthorized().into_response();
    };
    request.extensions_mut().insert(caller);
    next.run(request).await
}
