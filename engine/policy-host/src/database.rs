//! Files of policies in the data folder.
//!
//! `policies.redb` has [`Database`]'s records: what policies store with `kv`, and their versions. It is
//! separate from the prefix store, which may be deleted at any time: its contents cannot be computed
//! again. `compiled/` has compiled components (`sandbox/compiled.rs`).
//!
//! No caller waits for the disk: a thread writes changes, those within [`FLUSH_AFTER`] in one commit,
//! and the rest when the last handle is dropped. Failed writes are retried.
//!
//! The file is verified whenever it is opened. A damaged one is set aside, and the records that can still
//! be read are copied to a new file first. A file that is not ours is an error, and remains as it is.
//!
//! # Why
//! - **A thread.** A commit waits for the disk, 1 to 20 ms, and guests are called from the decode thread.
//! - **`check_integrity`.** redb compares checksums only when it repairs.
//! - **A check in each record.** A damaged file is read without redb's checksums, and a wrong value would
//!   change decisions.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use redb::backends::InMemoryBackend;
use redb::{Builder, Database as Redb, ReadableDatabase, StorageBackend, TableDefinition};
use sha2::{Digest, Sha256};
use steersman_database::{
    Fault, Owner, close, guarded, open_private, owner, patiently, set_aside, tables, with_suffix,
};

use crate::error::Error;

/// Name of the database in the data folder.
const DATABASE: &str = "policies.redb";

/// Name of the folder with compiled components in the data folder.
const COMPILED: &str = "compiled";

/// Changes that wait for the disk; one more is a failure of the policy that makes it.
pub(crate) const MAX_PENDING: usize = 65_536;

/// Time that a change waits for others, to share a commit.
pub(crate) const FLUSH_AFTER: Duration = Duration::from_millis(20);

/// Time before a failed commit is retried.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Most bytes of a file whose records are copied when it is damaged, or whose tables are read in memory.
const SALVAGED_BYTES: u64 = 1 << 30;

const RECORDS_NAME: &str = "steersman policy records";

/// Name of a table that earlier builds wrote.
const EARLIER_NAME: &str = "policy versions";

/// The records. A value begins with its [`check_of`].
const RECORDS: TableDefinition<(&str, &str, &str), &[u8]> = TableDefinition::new(RECORDS_NAME);

/// Bytes of the check of a record.
const CHECK_BYTES: usize = 16;

/// Profile, policy and name of a value of `kv`. What belongs to a policy in all profiles has an empty
/// profile, which no profile has.
pub(crate) type Key = (String, String, String);

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
    /// it open, or the disk refuses), its contents are held in memory and a warning is logged.
    ///
    /// # Errors
    /// [`Error::NotOurs`] names a file in the place of the database that is something else.
    pub fn open(data: &Path) -> Result<Self, Error> {
        let path = data.join(DATABASE);
        let open = || {
            open_or_replace(&path).and_then(|redb| Ok(redb.map(Database::on_disk).transpose()?))
        };
        let opened = patiently(open, |fault| matches!(fault, Fault::InUse));
        match opened {
            Ok(Some(database)) => {
                Ok(Self { database: Arc::new(database), compiled: Some(data.join(COMPILED)) })
            }
            Ok(None) => Err(Error::NotOurs { path }),
            Err(fault) => {
                let path = path.display();
                tracing::warn!(%path, error = %fault, "policy database unavailable; using memory");
                Ok(Self::compile_cache(data))
            }
        }
    }

    /// Storage in memory that caches compiled components in the folder `data`, even while a server
    /// has the database open.
    pub fn compile_cache(data: &Path) -> Self {
        Self::in_memory().with_compile_cache(data)
    }

    /// This storage, with compiled components cached in the folder `data`.
    #[must_use]
    pub fn with_compile_cache(self, data: &Path) -> Self {
        Self { compiled: Some(data.join(COMPILED)), ..self }
    }

    /// Storage in memory, which ends with its last handle.
    pub fn in_memory() -> Self {
        Self { database: Arc::default(), compiled: None }
    }
}

/// Records. Dropping it writes all pending changes.
#[derive(Default)]
pub(crate) struct Database {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    /// `None` holds all records in memory, as changes.
    redb: Option<Redb>,
    pending: Mutex<Pending>,
    changed: Condvar,
}

#[derive(Default)]
struct Pending {
    changes: Changes,
    /// Number of the newest change.
    number: u64,
    closed: bool,
}

/// Changes with their numbers; `None` removes a record.
type Changes = BTreeMap<Key, (u64, Option<Arc<[u8]>>)>;

impl Database {
    fn on_disk(redb: Redb) -> io::Result<Self> {
        let shared = Arc::new(Shared { redb: Some(redb), ..Shared::default() });
        let writer = shared.clone();
        let thread =
            std::thread::Builder::new().name("policy-database".into()).spawn(move || {
                if let Some(redb) = &writer.redb {
                    writer.write_behind(redb);
                }
            })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The value of a record; `None`, with a warning, if it cannot be read.
    pub fn get(&self, key: &Key) -> Option<Vec<u8>> {
        if let Some((_, value)) = self.shared.pending.lock().changes.get(key) {
            return value.as_ref().map(|value| value.to_vec());
        }
        let redb = self.shared.redb.as_ref()?;
        let read = guarded(|| {
            let table = redb.begin_read()?.open_table(RECORDS)?;
            let record = table.get(borrowed(key))?;
            Ok(record.and_then(|record| checked(borrowed(key), record.value())))
        });
        read.unwrap_or_else(|error| {
            tracing::warn!(policy = key.1, record = key.2, %error, "policy record unreadable");
            None
        })
    }

    /// The values of all profiles, sorted by key.
    pub fn of_profiles(&self) -> Found {
        // Locked, so that no change is committed between the two reads.
        let pending = self.shared.pending.lock();
        let on_disk = self.shared.redb.as_ref().map_or(Ok(Found::new()), |r| readable(r, "\0"));
        let mut found = on_disk.unwrap_or_else(|(some, error)| {
            tracing::warn!(%error, "policy database unreadable; some values are missing");
            some
        });
        for (key, (_, value)) in pending.changes.iter().filter(|(key, _)| !key.0.is_empty()) {
            match value {
                Some(value) => drop(found.insert(key.clone(), value.to_vec())),
                None => drop(found.remove(key)),
            }
        }
        found
    }

    /// Whether a change of `key` fits into the queue.
    pub fn has_room(&self, key: &Key) -> bool {
        let pending = &self.shared.pending.lock().changes;
        self.shared.redb.is_none() || pending.len() < MAX_PENDING || pending.contains_key(key)
    }

    /// Sets a record, or removes it. It is on disk soon after.
    pub fn set(&self, key: Key, value: Option<&[u8]>) {
        let mut pending = self.shared.pending.lock();
        if self.shared.redb.is_none() && value.is_none() {
            pending.changes.remove(&key);
            return;
        }
        pending.number += 1;
        let number = pending.number;
        pending.changes.insert(key, (number, value.map(Arc::from)));
        self.shared.changed.notify_one();
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        self.shared.pending.lock().closed = true;
        self.shared.changed.notify_one();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("policy database thread panicked");
        }
    }
}

impl Shared {
    /// Writes changes until the database is dropped.
    fn write_behind(&self, redb: &Redb) {
        let mut failed = false;
        loop {
            let mut pending = self.pending.lock();
            self.changed.wait_while(&mut pending, |p| !p.closed && p.changes.is_empty());
            let pause = if failed { RETRY_AFTER } else { FLUSH_AFTER };
            self.changed.wait_while_for(&mut pending, |p| !p.closed, pause);
            let (changes, closed) = (pending.changes.clone(), pending.closed);
            drop(pending);
            let written = write(redb, &changes);
            if let Err(error) = &written
                && !failed
            {
                tracing::warn!(%error, "policy database not written; retrying");
            }
            failed = written.is_err();
            if !failed {
                // What has changed meanwhile remains.
                let remains = |key: &Key, (number, _): &mut (u64, _)| {
                    changes.get(key).is_none_or(|(written, _)| written != number)
                };
                self.pending.lock().changes.retain(remains);
            }
            if closed {
                return;
            }
        }
    }
}

/// Whether the file at `path` has our records, or had them before it was damaged, or does not exist: nothing
/// else is touched. redb writes to every file that it opens.
fn is_ours(path: &Path) -> Result<bool, Fault> {
    Ok(match owner(path, &[RECORDS_NAME.as_bytes(), EARLIER_NAME.as_bytes()])? {
        Owner::Nobody | Owner::Ours | Owner::Damaged | Owner::Unwritten => true,
        Owner::Foreign => false,
        // What is left of our file has no table, or cannot be opened; another one has tables.
        Owner::Unknown => {
            let bytes = steersman_files::read(path, SALVAGED_BYTES);
            let names = bytes.map_err(Fault::from).and_then(|bytes| {
                let redb = copy_in_memory(&bytes)?;
                let names = guarded(|| tables(&redb));
                close(Some(redb));
                names
            });
            let names = names.unwrap_or_default();
            names.is_empty() || names.iter().any(|name| name == RECORDS_NAME)
        }
    })
}

/// Opens the file. A new one replaces a damaged one, with the records that can still be read. `None` if it is not
/// ours.
fn open_or_replace(path: &Path) -> Result<Option<Redb>, Fault> {
    let new = with_suffix(path, ".new");
    if !path.exists() && new.exists() {
        // The process ended between the two renames below.
        fs::rename(&new, path)?;
    }
    if !is_ours(path)? {
        return Ok(None);
    }
    let problem = match open(path) {
        Err(Fault::Damaged(problem)) => problem,
        opened => return opened.map(Some),
    };
    let readable = readable_in(path);
    let _ = fs::remove_file(&new);
    let redb = open(&new)?;
    write(&redb, &readable)?;
    drop(redb);
    let aside = set_aside(path)?;
    fs::rename(&new, path)?;
    let (aside, records) = (aside.display(), readable.len());
    tracing::warn!(%aside, records, problem, "policy database damaged; set aside, its readable records kept");
    open(path).map(Some)
}

/// Opens and verifies a file, and creates it if there is none.
fn open(path: &Path) -> Result<Redb, Fault> {
    let file = open_private(path)?;
    let mut redb = guarded(|| Ok(Builder::new().create_file(file)?))?;
    let verified = guarded(|| {
        if !redb.check_integrity()? {
            tracing::warn!(path = %path.display(), "policy database repaired");
        }
        tables(&redb)
    });
    let fault = match verified {
        Ok(names) if names.iter().any(|name| name == RECORDS_NAME) => return Ok(redb),
        Ok(names) if names.is_empty() => match write(&redb, &Changes::new()) {
            Ok(()) => return Ok(redb),
            Err(fault) => fault,
        },
        Ok(_) => Fault::Damaged("has no records, or is of an earlier build".into()),
        Err(fault) => fault,
    };
    close(Some(redb));
    Err(fault)
}

/// A database with these bytes. The file itself remains as it is.
fn copy_in_memory(bytes: &[u8]) -> Result<Redb, Fault> {
    let backend = InMemoryBackend::new();
    backend.set_len(bytes.len() as u64).and_then(|()| backend.write(0, bytes))?;
    guarded(|| Ok(Builder::new().create_with_backend(backend)?))
}

/// The records of a damaged file that can still be read.
fn readable_in(path: &Path) -> Changes {
    let bytes = steersman_files::read(path, SALVAGED_BYTES).map_err(Fault::from);
    let Ok(redb) = bytes.and_then(|bytes| copy_in_memory(&bytes)) else { return Changes::new() };
    let (Ok(found) | Err((found, _))) = readable(&redb, "");
    close(Some(redb));
    found.into_iter().map(|(key, value)| (key, (0, Some(value.into())))).collect()
}

/// Values by key.
type Found = BTreeMap<Key, Vec<u8>>;

/// All records from profile `first` on. With an error, those before and after the damaged ones.
fn readable(redb: &Redb, first: &str) -> Result<Found, (Found, Fault)> {
    let mut found = Found::new();
    let mut read = |backwards: bool| {
        guarded(|| {
            let mut records = redb.begin_read()?.open_table(RECORDS)?.range((first, "", "")..)?;
            loop {
                let next = if backwards { records.next_back() } else { records.next() };
                let Some(record) = next else { return Ok(()) };
                let (key, value) = record?;
                let (profile, policy, name) = key.value();
                if let Some(value) = checked((profile, policy, name), value.value()) {
                    found.insert((profile.to_owned(), policy.to_owned(), name.to_owned()), value);
                }
            }
        })
    };
    match read(false).inspect_err(|_| drop(read(true))) {
        Ok(()) => Ok(found),
        Err(error) => Err((found, error)),
    }
}

/// Commits changes, and creates the table.
fn write(redb: &Redb, changes: &Changes) -> Result<(), Fault> {
    guarded(|| {
        let transaction = redb.begin_write()?;
        {
            let mut table = transaction.open_table(RECORDS)?;
            for (key, (_, value)) in changes {
                let key = borrowed(key);
                match value {
                    Some(value) => {
                        let record = [&check_of(key, value)[..], value].concat();
                        table.insert(key, record.as_slice())?
                    }
                    None => table.remove(key)?,
                };
            }
        }
        Ok(transaction.commit()?)
    })
}

fn borrowed((profile, policy, name): &Key) -> (&str, &str, &str) {
    (profile, policy, name)
}

/// The first bytes of a digest over key and value.
fn check_of((profile, policy, name): (&str, &str, &str), value: &[u8]) -> [u8; CHECK_BYTES] {
    let mut digest = Sha256::new();
    for part in [profile.as_bytes(), policy.as_bytes(), name.as_bytes(), value] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    *digest.finalize().first_chunk().expect("SHA-256 has 32 bytes")
}

/// The value of a record, unless it is damaged.
fn checked(key: (&str, &str, &str), record: &[u8]) -> Option<Vec<u8>> {
    let (check, value) = record.split_first_chunk()?;
    let intact = *check == check_of(key, value);
    if !intact {
        tracing::warn!(
            profile = key.0,
            policy = key.1,
            record = key.2,
            "damaged policy record dropped"
        );
    }
    intact.then(|| value.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        ("agent".into(), "guard".into(), name.into())
    }

    fn open(folder: &Path) -> Arc<Database> {
        Storage::open(folder).unwrap().database
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn records_outlive_their_database_and_a_second_one_uses_memory() {
        let folder = tempfile::tempdir().unwrap();
        let first = open(folder.path());
        first.set(key("a"), Some(b"1"));
        first.set(key("b"), Some(b"2"));
        first.set(key("a"), None);
        let second = open(folder.path());
        second.set(key("c"), Some(b"3"));
        drop((first, second));
        let again = open(folder.path());
        assert_eq!(again.of_profiles(), Found::from([(key("b"), b"2".to_vec())]));
        assert_eq!((again.get(&key("a")), again.get(&key("b"))), (None, Some(b"2".to_vec())));
    }

    #[test]
    fn a_change_is_on_disk_soon() {
        let folder = tempfile::tempdir().unwrap();
        let database = open(folder.path());
        database.set(key("a"), Some(b"1"));
        let started = std::time::Instant::now();
        while readable(database.shared.redb.as_ref().unwrap(), "").unwrap().is_empty() {
            assert!(started.elapsed() < Duration::from_secs(30));
            std::thread::sleep(FLUSH_AFTER);
        }
        assert_eq!(database.get(&key("a")), Some(b"1".to_vec()));
    }

    #[test]
    fn changes_that_wait_for_the_disk_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let database = open(folder.path());
        // The thread waits for this transaction.
        let writing = database.shared.redb.as_ref().unwrap().begin_write().unwrap();
        (0..MAX_PENDING).for_each(|n| database.set(key(&n.to_string()), None));
        assert!(!database.has_room(&key("new")) && database.has_room(&key("0")));
        writing.abort().unwrap();
    }

    /// A cut file stopped each start, or nothing was kept until somebody deleted it.
    #[test]
    fn a_damaged_file_is_moved_aside_and_its_readable_records_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(DATABASE);
        let database = open(folder.path());
        for n in 0..200 {
            database.set(key(&format!("{n:03}")), Some(&[b'x'; 2000]));
        }
        drop(database);
        let whole = fs::read(&path).unwrap();
        // In the middle of the values.
        let at = whole.windows(2000).rposition(|window| window == [b'x'; 2000]).unwrap();
        let mut flipped = whole.clone();
        flipped[at + 7] ^= 1;
        for (n, damaged) in [&flipped, &whole[..200], &vec![0; 5000]].into_iter().enumerate() {
            fs::write(&path, damaged).unwrap();
            let database = open(folder.path());
            let kept = database.of_profiles();
            assert_eq!(kept.len(), [199, 0, 0][n]);
            assert!(kept.values().all(|value| *value == [b'x'; 2000]));
            database.set(key("new"), Some(b"1"));
            drop(database);
            assert_eq!(open(folder.path()).get(&key("new")), Some(b"1".to_vec()));
            let aside = folder.path().join(format!("{DATABASE}.damaged-{}", n + 1));
            assert!(aside.exists());
        }
        let aside = |n: u32| format!("{DATABASE}.damaged-{n}");
        assert_eq!(names(folder.path()), [DATABASE.to_owned(), aside(1), aside(2), aside(3)]);
    }

    #[test]
    fn a_replacement_that_was_cut_off_between_its_renames_is_completed() {
        let folder = tempfile::tempdir().unwrap();
        open(folder.path()).set(key("a"), Some(b"1"));
        let path = folder.path().join(DATABASE);
        fs::rename(&path, with_suffix(&path, ".new")).unwrap();
        assert_eq!(open(folder.path()).get(&key("a")), Some(b"1".to_vec()));
        assert_eq!(names(folder.path()), [DATABASE]);
    }

    #[test]
    fn a_file_that_is_not_ours_is_an_error_and_remains() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(DATABASE);
        let other = Builder::new().create(folder.path().join("other")).unwrap();
        let transaction = other.begin_write().unwrap();
        let table = TableDefinition::<u8, u8>::new("someone's");
        transaction.open_table(table).unwrap().insert(1, 2).unwrap();
        transaction.commit().unwrap();
        drop(other);
        let other = fs::read(folder.path().join("other")).unwrap();
        for foreign in [&b"SQLite format 3"[..], &other] {
            fs::write(&path, foreign).unwrap();
            let before = fs::metadata(&path).unwrap().permissions();
            let error = Storage::open(folder.path()).err().unwrap().to_string();
            assert!(error.starts_with(&path.display().to_string()), "{error}");
            assert_eq!(fs::metadata(&path).unwrap().permissions(), before);
            assert_eq!(names(folder.path()), ["other", DATABASE]);
        }
        assert!(fs::read(&path).unwrap() == other);
    }

    #[cfg(unix)]
    #[test]
    fn files_are_private_and_what_exists_keeps_its_mode() {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        drop(open(&data));
        assert_eq!((mode(&data), mode(&data.join(DATABASE))), (0o700, 0o600));
        fs::set_permissions(&data, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(data.join(DATABASE), fs::Permissions::from_mode(0o640)).unwrap();
        drop(open(&data));
        assert_eq!((mode(&data), mode(&data.join(DATABASE))), (0o755, 0o640));
    }
}
