//! Files of policies in the data folder: a database with their `kv` values and versions, and a folder
//! with compiled components.
//!
//! The database is separate from the prefix store, which may be deleted at any time: its contents
//! cannot be recomputed. Compiled components are machine code that is loaded without a check, so their
//! folder is accessible to its owner only.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::backends::InMemoryBackend;
use redb::{Builder, Database, DatabaseError};

/// Name of the database in the data folder.
const DATABASE: &str = "policies.redb";

/// Name of the folder with compiled components in the data folder.
const COMPILED: &str = "compiled";

/// Where policies store data.
#[derive(Clone)]
pub struct Storage {
    /// `kv` values and versions.
    pub(crate) database: Arc<Database>,
    /// Folder of compiled components; `None` compiles at each start.
    pub(crate) compiled: Option<PathBuf>,
}

impl Storage {
    /// Opens the storage in the folder `data`. If the database cannot be opened (another server has
    /// it open, or it is damaged), its contents are held in memory and a warning is logged.
    pub fn open(data: &Path) -> Self {
        let path = data.join(DATABASE);
        let opened = create(data, &path)
            .map_err(|error| DatabaseError::Storage(error.into()))
            .and_then(|file| Builder::new().create_file(file));
        match opened {
            Ok(database) => {
                Self { database: Arc::new(database), compiled: Some(data.join(COMPILED)) }
            }
            Err(error) => {
                let path = path.display();
                tracing::warn!(%path, %error, "policy database unavailable; using memory");
                Self::compile_cache(data)
            }
        }
    }

    /// Storage in memory that caches compiled components in the folder `data`, even while a server
    /// has the database open.
    pub fn compile_cache(data: &Path) -> Self {
        Self { compiled: Some(data.join(COMPILED)), ..Self::in_memory() }
    }

    /// Storage in memory, which ends with its last handle.
    pub fn in_memory() -> Self {
        let created = Builder::new().create_with_backend(InMemoryBackend::new());
        let database = created.expect("memory accepts every write");
        Self { database: Arc::new(database), compiled: None }
    }
}

/// The file is readable by its owner only: policies may store parts of conversations.
fn create(data: &Path, path: &Path) -> io::Result<File> {
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
    fn a_second_server_on_one_data_folder_uses_memory() {
        let folder = tempfile::tempdir().unwrap();
        let first = Storage::open(folder.path());
        let table = redb::TableDefinition::<u8, u8>::new("test");
        let write = |storage: &Storage| {
            let transaction = storage.database.begin_write().unwrap();
            transaction.open_table(table).unwrap().insert(1, 2).unwrap();
            transaction.commit().unwrap();
        };
        write(&Storage::open(folder.path()));
        let has = |storage: &Storage| {
            let read = redb::ReadableDatabase::begin_read(&*storage.database).unwrap();
            read.open_table(table).is_ok()
        };
        assert!(!has(&first));
        write(&first);
        drop(first);
        assert!(has(&Storage::open(folder.path())));
    }

    #[cfg(unix)]
    #[test]
    fn the_database_is_readable_by_its_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        drop(Storage::open(folder.path()));
        let file = fs::metadata(folder.path().join(DATABASE)).unwrap();
        assert_eq!(file.permissions().mode() & 0o777, 0o600);
    }
}
