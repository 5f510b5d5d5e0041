//! Failures of the database, by what follows.

use std::io;
use std::path::Path;
use std::sync::Arc;

use steersman_database::Fault;

use super::super::StoreError;

/// Why an operation on the database failed, by what follows.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum StoreFault {
    /// One part is damaged: drop it.
    #[error("{0}")]
    Part(String),
    /// Another process has the file: go on without it.
    #[error("in use by another process")]
    InUse,
    /// The file is damaged: start a new one.
    #[error("{0}")]
    Damaged(String),
    /// Another version wrote the file, or its format field is damaged: start a new one.
    #[error("unknown format {0:#x?}")]
    UnknownFormat(Option<u64>),
    /// The file is not the store's: leave it as it is.
    #[error("{0}")]
    Foreign(&'static str),
    /// The disk is full, not writable, failing: stop saving.
    #[error("{0}")]
    Io(Arc<io::Error>),
}

impl StoreFault {
    /// The error for callers outside the store.
    pub fn at(self, path: &Path) -> StoreError {
        let path = path.to_owned();
        match self {
            Self::InUse => StoreError::InUse(path),
            Self::Part(problem) | Self::Damaged(problem) => StoreError::Damaged(path, problem),
            Self::Foreign(what) => StoreError::Foreign(path, what),
            Self::UnknownFormat(found) => StoreError::UnknownFormat(path, found),
            Self::Io(error) => StoreError::io(path, error),
        }
    }

    /// Whether a new file has to replace this one.
    pub fn is_of_the_file(&self) -> bool {
        matches!(self, Self::Damaged(_) | Self::UnknownFormat(_))
    }
}

impl From<Fault> for StoreFault {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::InUse => Self::InUse,
            Fault::Damaged(problem) => Self::Damaged(problem),
            Fault::Io(error) => Self::Io(error),
        }
    }
}
