//! What a running server has besides its configuration.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use steersman_models::hub::Hub;

use crate::config::Reloads;
use crate::keys::KeyFile;
use crate::link::Link;
use crate::reload::ReloadCounts;
use steersman_log::Recent;

/// Handles of a running server. None of them is needed: tests and `steersman chat` serve without.
#[derive(Debug, Clone, Default)]
pub struct Wiring {
    /// Keys besides those of the configuration, which change while the server runs.
    pub keys: Option<Arc<KeyFile>>,
    /// The link that makes the owner of the server its operator.
    pub link: Option<Arc<Link>>,
    /// The folder where responses are stored.
    pub responses: Option<PathBuf>,
    /// Tells of changes of the configuration.
    pub reloads: Option<Reloads>,
    /// How reloads of the configuration have ended.
    pub reload_counts: Arc<ReloadCounts>,
    /// Where models are downloaded from, if not from the hub that the environment names.
    pub hub: Option<Hub>,
    /// The newest lines of the log.
    pub log: Recent,
    /// Time between two samples of what the server does; none are taken without it.
    pub samples: Option<Duration>,
}

impl Wiring {
    /// Whether a key was created, perhaps a revoked one.
    pub fn has_created_keys(&self) -> bool {
        self.keys.as_ref().is_some_and(|file| !file.keys().keys.is_empty())
    }

    /// Whether a key was created that opens all profiles.
    pub fn has_key(&self) -> bool {
        let created = self.keys.as_ref().map(|file| file.keys()).unwrap_or_default();
        created.has_client_key()
    }
}
