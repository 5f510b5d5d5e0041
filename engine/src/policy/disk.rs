//! The database of what policies keep (`kv`) and of what is kept of policies (their versions).
//!
//! Apart from saved state, which may be deleted at any time: this file holds what cannot be computed
//! again.

use std::path::Path;
use std::sync::Arc;

use redb::backends::InMemoryBackend;
use redb::{Database, DatabaseError};

/// Its name in the data folder.
pub const FILE: &str = "policies.redb";

/// Opens the database in the folder `data`. Where that fails (another server has it open, or it is
/// damaged), what policies keep lasts as long as this process, which the log says: no reason not to
/// serve.
pub fn open(data: &Path) -> Arc<Database> {
    let path = data.join(FILE);
    let opened = std::fs::create_dir_all(data)
        .map_err(|error| DatabaseError::Storage(error.into()))
        .and_then(|()| Database::create(&path));
    Arc::new(opened.unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "what policies keep ends with this process");
        in_memory()
    }))
}

/// A database that ends with its last handle.
///
/// # Panics
/// Never: memory takes what is written to it.
pub fn in_memory() -> Database {
    let created = Database::builder().create_with_backend(InMemoryBackend::new());
    created.expect("memory is a sound backend")
}
