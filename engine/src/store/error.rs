//! Errors of the store, by who can act on them.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why the store or one of its files cannot be used. Never ends a request.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// Another process has the file open: ask that one, or wait until it ends.
    #[error("state store: {path} is in use by another process; only one at a time can use it")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// Nothing was saved yet.
    #[error("state store: {path} does not exist; a server creates it when it saves state")]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// Another version of this program wrote the file, or its format field is damaged.
    #[error(
        "state store: {path} has an unknown format ({found:#x?}); use the version of steersman \
         that wrote it, or delete the file: it holds only a cache"
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// Value of its format field.
        found: Option<u64>,
    },
    /// The file is damaged as a whole. Damaged parts alone are dropped instead.
    #[error(
        "state store: {path} is damaged ({problem}); delete it, or start a server, which moves it \
         aside"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What redb reports.
        problem: String,
    },
    /// The disk or the user's quota is full.
    #[error("state store: no space left to write {path} ({error}); free some and restart")]
    Full {
        /// The file.
        path: PathBuf,
        /// What the system reports.
        error: Arc<io::Error>,
    },
    /// The file cannot be read or written.
    #[error("state store: {path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system reports.
        error: Arc<io::Error>,
    },
    /// The file to import is not an export, or is damaged: export it again.
    #[error("state store: cannot import {path}: {problem}")]
    Import {
        /// The file.
        path: PathBuf,
        /// What is wrong, and at which byte.
        problem: String,
    },
}

impl StoreError {
    pub(super) fn io(path: impl Into<PathBuf>, error: impl Into<Arc<io::Error>>) -> Self {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        let (path, error) = (path.into(), error.into());
        match error.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => Self::Full { path, error },
            _ => Self::Io { path, error },
        }
    }
}
