//! What the store takes from its surroundings, and tests replace.

use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use ::redb::{Builder, Database, DatabaseError};

type OpenDatabase = dyn Fn(&Builder, &Path) -> Result<Database, DatabaseError> + Send + Sync;

/// The time of day.
#[derive(Clone)]
pub struct WallClock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl WallClock {
    /// A clock that shows what `now` returns.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Microseconds since 1970.
    pub(crate) fn micros(&self) -> u64 {
        let since = (self.0)().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    }

    /// Seconds since 1970.
    pub(crate) fn seconds(&self) -> u64 {
        self.micros() / 1_000_000
    }
}

impl Default for WallClock {
    fn default() -> Self {
        Self::new(SystemTime::now)
    }
}

/// Clock and storage of a store.
#[derive(Clone)]
pub struct StoreEnv {
    /// Times of use and of retention.
    pub clock: WallClock,
    /// Opens or creates the database of a path, at the start and after a failure: in a file, or on
    /// any other [`::redb::StorageBackend`].
    pub open: Arc<OpenDatabase>,
}

impl Default for StoreEnv {
    /// The system's clock, and files that only this user can read.
    fn default() -> Self {
        Self {
            clock: WallClock::default(),
            open: Arc::new(|builder, path| {
                builder.create_file(steersman_database::open_private(path)?)
            }),
        }
    }
}
