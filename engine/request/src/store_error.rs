//! Errors of the store, by who can act on them.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why a file of the store cannot be used. Never ends a request.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// Another process has the file open: ask that one, or wait until it ends.
    #[error("state store: {0} is in use by another process; only one at a time can use it")]
    InUse(PathBuf),
    /// Nothing was saved yet.
    #[error("state store: {0} does not exist; a server creates it when it saves state")]
    Missing(PathBuf),
    /// Another version of this program wrote the file, or its format field, given here, is damaged.
    #[error(
        "state store: {0} has an unknown format ({1:#x?}); use the version of steersman that wrote \
         it, or delete the file: it holds only a cache"
    )]
    UnknownFormat(PathBuf, Option<u64>),
    /// The file is damaged as a whole. Damaged parts alone are dropped instead.
    #[error("state store: {0} is damaged ({1}); delete it, or start a server, which sets it aside")]
    Damaged(PathBuf, String),
    /// Something else lies at the path of the store. It is left as it is.
    #[error(
        "state store: {0} {1}; it is left as it is: move it away, or set `store.path` to another file"
    )]
    Foreign(PathBuf, &'static str),
    /// The disk or the user's quota is full.
    #[error("state store: no space left to write {0} ({1}); free some, and saving resumes")]
    Full(PathBuf, Arc<io::Error>),
    /// The file cannot be read or written.
    #[error("state store: {0}: {1}")]
    Io(PathBuf, Arc<io::Error>),
    /// The file to import is not an export, or is damaged: export it again.
    #[error("state store: cannot import {0}: {1}")]
    Import(PathBuf, String),
}

impl StoreError {
    /// The error of an operation on the file `path`.
    pub fn io(path: impl Into<PathBuf>, error: impl Into<Arc<io::Error>>) -> Self {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        let (path, error) = (path.into(), error.into());
        match error.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => Self::Full(path, error),
            _ => Self::Io(path, error),
        }
    }
}
