//! The database of what policies keep (`kv`) and of what is kept of policies (their versions).
//!
//! Apart from saved state, which may be deleted at any time: this file holds what cannot be computed
//! again.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Arc;

use redb::backends::InMemoryBackend;
use redb::{Builder, Database, DatabaseError};

/// Its name in the data folder.
pub const FILE: &str = "policies.redb";

/// Opens the database in the folder `data`. Where that fails (another server has it open, or it is
/// damaged), what policies keep lasts as long as this process, which the log says: no reason not to
/// serve.
pub fn open(data: &Path) -> Arc<Database> {
    let path = data.join(FILE);
    let opened = open_file(data, &path)
        .map_err(|error| DatabaseError::Storage(error.into()))
        .and_then(|file| Builder::new().create_file(file));
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
    let created = Builder::new().create_with_backend(InMemoryBackend::new());
    created.expect("memory is a sound backend")
}

/// The file, for this user alone: policies may keep what was said.
fn open_file(data: &Path, path: &Path) -> io::Result<File> {
    fs::create_dir_all(data)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_server_on_one_folder_keeps_its_own_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let first = open(folder.path());
        let table = redb::TableDefinition::<u8, u8>::new("test");
        let write = |database: &Database| {
            let transaction = database.begin_write().unwrap();
            transaction.open_table(table).unwrap().insert(1, 2).unwrap();
            transaction.commit().unwrap();
        };
        write(&open(folder.path()));
        let has = |database: &Database| {
            redb::ReadableDatabase::begin_read(database).unwrap().open_table(table).is_ok()
        };
        assert!(!has(&first));
        write(&first);
        drop(first);
        assert!(has(&open(folder.path())), "what the first keeps outlives it");
    }

    #[cfg(unix)]
    #[test]
    fn only_its_owner_can_read_what_policies_keep() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        drop(open(folder.path()));
        let file = fs::metadata(folder.path().join(FILE)).unwrap();
        assert_eq!(file.permissions().mode() & 0o777, 0o600);
    }
}
