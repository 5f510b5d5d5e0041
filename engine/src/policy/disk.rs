//! What policies have on disk: a database, of what they keep (`kv`) and of what is kept of them (their
//! versions), and a folder with what was compiled of them.
//!
//! The database is apart from saved state, which may be deleted at any time: it holds what cannot be
//! computed again. What was compiled is machine code that is run as it lies there, so the folder is
//! for this user alone, as the data folder around it should be.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::backends::InMemoryBackend;
use redb::{Builder, Database, DatabaseError};

/// Name of the database in the data folder.
pub const FILE: &str = "policies.redb";

/// Name of the folder with what was compiled, in the data folder.
pub const COMPILED: &str = "compiled";

/// Where policies are kept.
#[derive(Clone)]
pub struct Disk {
    /// What they keep, and their versions.
    pub database: Arc<Database>,
    /// Where compiled ones go, so that nothing is compiled twice; `None` for nowhere.
    pub compiled: Option<PathBuf>,
}

/// What is in the folder `data`. Where its database cannot be opened (another server has it open, or
/// it is damaged), what policies keep lasts as long as this process, which the log says: no reason
/// not to serve.
pub fn open(data: &Path) -> Disk {
    let path = data.join(FILE);
    let opened = open_file(data, &path)
        .map_err(|error| DatabaseError::Storage(error.into()))
        .and_then(|file| Builder::new().create_file(file));
    let compiled = Some(data.join(COMPILED));
    match opened {
        Ok(database) => Disk { database: Arc::new(database), compiled },
        Err(error) => {
            let path = path.display();
            tracing::warn!(%path, %error, "what policies keep ends with this process");
            Disk { compiled, ..in_memory() }
        }
    }
}

/// Nothing on disk: all ends with its last handle.
///
/// # Panics
/// Never: memory takes what is written to it.
pub fn in_memory() -> Disk {
    let created = Builder::new().create_with_backend(InMemoryBackend::new());
    Disk { database: Arc::new(created.expect("memory is a sound backend")), compiled: None }
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
        let write = |disk: &Disk| {
            let transaction = disk.database.begin_write().unwrap();
            transaction.open_table(table).unwrap().insert(1, 2).unwrap();
            transaction.commit().unwrap();
        };
        write(&open(folder.path()));
        let has = |disk: &Disk| {
            let read = redb::ReadableDatabase::begin_read(&*disk.database).unwrap();
            read.open_table(table).is_ok()
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
