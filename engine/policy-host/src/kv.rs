//! The `kv` interface: a small map for each policy and profile, in memory and written to disk.
//!
//! Calls of a guest touch memory only. One thread writes changes to redb, those within
//! [`FLUSH_AFTER`] in one commit, and the rest when the maps are dropped. Failed writes are retried.
//!
//! # Why
//! A commit waits for the disk, 1 to 20 ms, and guests are called from the decode thread.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition, TableError};

use crate::contract::bindings::steersman::policy::kv::Refusal;

/// Longest key, in bytes. An empty key is refused.
pub const KEY_BYTES: usize = 256;

/// Keys of one policy with a change that is not yet on disk; one more is a failure of the policy.
const MAX_PENDING: usize = 65_536;

/// Time that a change waits for others, to share a commit.
const FLUSH_AFTER: Duration = Duration::from_millis(20);

/// Time before a failed commit is retried.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Values by profile, policy and key.
const TABLE: TableDefinition<(&str, &str, &str), &str> = TableDefinition::new("kv");

/// A map with a quota in bytes.
#[derive(Debug, Default)]
pub struct Map {
    values: BTreeMap<String, String>,
    bytes: usize,
}

impl Map {
    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str)
    }

    /// Sets it, unless all keys and values would then take more than `quota` bytes.
    ///
    /// # Errors
    /// Why not.
    pub fn set(&mut self, key: &str, value: String, quota: usize) -> Result<(), Refusal> {
        if key.is_empty() || key.len() > KEY_BYTES {
            return Err(Refusal::BadKey);
        }
        let old = self.values.get(key).map_or(0, |old| key.len() + old.len());
        let bytes = self.bytes - old + key.len() + value.len();
        if bytes > quota {
            return Err(Refusal::Full);
        }
        self.bytes = bytes;
        self.values.insert(key.to_owned(), value);
        Ok(())
    }

    /// Removes it; returns whether it existed.
    pub fn delete(&mut self, key: &str) -> bool {
        let Some(old) = self.values.remove(key) else { return false };
        self.bytes -= key.len() + old.len();
        true
    }
}

/// The maps of all policies. Dropping it writes all pending changes.
pub struct Kv {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The map of one policy in one profile.
#[derive(Clone)]
pub struct Space {
    shared: Arc<Shared>,
    index: usize,
}

struct Shared {
    state: Mutex<Maps>,
    changed: Condvar,
    quota: usize,
}

#[derive(Default)]
struct Maps {
    spaces: Vec<Stored>,
    closed: bool,
}

struct Stored {
    profile: String,
    policy: String,
    map: Map,
    /// Keys whose value differs from the one on disk.
    pending: BTreeSet<String>,
}

/// Profile, policy, key, and current value.
type Change = (String, String, String, Option<String>);

impl Kv {
    /// Reads `database` and starts the thread that writes to it. Each map may take `quota` bytes. If
    /// the database cannot be read the maps start empty, and a warning is logged.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn open(database: &Arc<Database>, quota: usize) -> std::io::Result<Self> {
        let spaces = read(database).unwrap_or_else(|error| {
            tracing::warn!(%error, "policy kv unreadable; starting empty");
            Vec::new()
        });
        let state = Mutex::new(Maps { spaces, closed: false });
        let shared = Arc::new(Shared { state, changed: Condvar::new(), quota });
        let (writer, database) = (shared.clone(), database.clone());
        let thread = std::thread::Builder::new()
            .name("policy-kv".into())
            .spawn(move || writer.write_behind(&database))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The map of a policy in a profile.
    pub fn space(&self, profile: &str, policy: &str) -> Space {
        let spaces = &mut self.shared.state.lock().spaces;
        let found = spaces.iter().position(|one| one.profile == profile && one.policy == policy);
        let index = found.unwrap_or_else(|| {
            spaces.push(Stored::new(profile, policy));
            spaces.len() - 1
        });
        Space { shared: self.shared.clone(), index }
    }
}

impl Drop for Kv {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_one();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("policy kv thread panicked");
        }
    }
}

impl Space {
    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<String> {
        self.shared.state.lock().spaces[self.index].map.get(key).map(str::to_owned)
    }

    /// As [`Map::set`].
    ///
    /// # Errors
    /// If [`MAX_PENDING`] keys wait for the disk; inside, why the value was not set.
    pub fn set(&self, key: &str, value: String) -> Result<Result<(), Refusal>, String> {
        let mut state = self.shared.state.lock();
        let stored = &mut state.spaces[self.index];
        stored.room(key)?;
        let set = stored.map.set(key, value, self.shared.quota);
        if set.is_ok() {
            stored.pending.insert(key.to_owned());
            self.shared.changed.notify_one();
        }
        Ok(set)
    }

    /// As [`Map::delete`].
    ///
    /// # Errors
    /// If [`MAX_PENDING`] keys wait for the disk.
    pub fn delete(&self, key: &str) -> Result<bool, String> {
        let mut state = self.shared.state.lock();
        let stored = &mut state.spaces[self.index];
        stored.room(key)?;
        let deleted = stored.map.delete(key);
        if deleted {
            stored.pending.insert(key.to_owned());
            self.shared.changed.notify_one();
        }
        Ok(deleted)
    }
}

impl Stored {
    fn new(profile: &str, policy: &str) -> Self {
        Self {
            profile: profile.into(),
            policy: policy.into(),
            map: Map::default(),
            pending: BTreeSet::new(),
        }
    }

    fn room(&self, key: &str) -> Result<(), String> {
        if self.pending.len() < MAX_PENDING || self.pending.contains(key) {
            return Ok(());
        }
        Err(format!("{MAX_PENDING} changes wait for the disk"))
    }
}

impl Shared {
    /// Writes changes until the maps are closed.
    fn write_behind(&self, database: &Database) {
        let quiet = |state: &mut Maps| {
            !state.closed && state.spaces.iter().all(|one| one.pending.is_empty())
        };
        let open = |state: &mut Maps| !state.closed;
        let mut pause = FLUSH_AFTER;
        loop {
            let mut state = self.state.lock();
            self.changed.wait_while(&mut state, quiet);
            self.changed.wait_while_for(&mut state, open, pause);
            let closed = state.closed;
            let changes = state.changes();
            drop(state);
            pause = FLUSH_AFTER;
            if let Err(error) = write(database, &changes) {
                tracing::warn!(%error, "policy kv not written; retrying");
                self.state.lock().restore(changes);
                pause = RETRY_AFTER;
            }
            if closed {
                return;
            }
        }
    }
}

impl Maps {
    /// Takes the pending changes.
    fn changes(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        for stored in &mut self.spaces {
            for key in std::mem::take(&mut stored.pending) {
                let value = stored.map.get(&key).map(str::to_owned);
                changes.push((stored.profile.clone(), stored.policy.clone(), key, value));
            }
        }
        changes
    }

    /// Makes `changes` pending again.
    fn restore(&mut self, changes: Vec<Change>) {
        for (profile, policy, key, _) in changes {
            let mut spaces = self.spaces.iter_mut();
            if let Some(one) = spaces.find(|one| one.profile == profile && one.policy == policy) {
                one.pending.insert(key);
            }
        }
    }
}

fn read(database: &Database) -> Result<Vec<Stored>, redb::Error> {
    let transaction = database.begin_read()?;
    let table = match transaction.open_table(TABLE) {
        Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
        table => table?,
    };
    let mut spaces: Vec<Stored> = Vec::new();
    for entry in table.iter()? {
        let (key, value) = entry?;
        let (profile, policy, key) = key.value();
        // The table is sorted, so the keys of a policy are adjacent.
        if spaces.last().is_none_or(|last| last.profile != profile || last.policy != policy) {
            spaces.push(Stored::new(profile, policy));
        }
        let map = &mut spaces.last_mut().expect("one was pushed").map;
        // A smaller quota applies to new values only.
        let _ = map.set(key, value.value().to_owned(), usize::MAX);
    }
    Ok(spaces)
}

fn write(database: &Database, changes: &[Change]) -> Result<(), redb::Error> {
    if changes.is_empty() {
        return Ok(());
    }
    let transaction = database.begin_write()?;
    {
        let mut table = transaction.open_table(TABLE)?;
        for (profile, policy, key, value) in changes {
            let key = (profile.as_str(), policy.as_str(), key.as_str());
            match value {
                Some(value) => table.insert(key, value.as_str())?,
                None => table.remove(key)?,
            };
        }
    }
    transaction.commit()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::Storage;

    const QUOTA: usize = 1000;

    #[test]
    fn maps_survive_a_restart_and_are_separate_per_profile_and_policy() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Kv::open(&Storage::open(folder.path()).database, QUOTA).unwrap();
        let kv = open();
        let space = kv.space("agent", "guard");
        space.set("seen", "1".into()).unwrap().unwrap();
        space.set("gone", "2".into()).unwrap().unwrap();
        kv.space("agent", "other").set("seen", "3".into()).unwrap().unwrap();
        assert!(space.delete("gone").unwrap());
        assert!(!space.delete("gone").unwrap());
        assert_eq!(kv.space("default", "guard").get("seen"), None);
        // The database closes when the thread drops the last handle.
        drop((kv, space));
        let kv = open();
        let space = kv.space("agent", "guard");
        assert_eq!(space.get("seen").as_deref(), Some("1"));
        assert_eq!(space.get("gone"), None);
        assert_eq!(kv.space("agent", "other").get("seen").as_deref(), Some("3"));
        assert_eq!(kv.space("default", "guard").get("seen"), None);
    }

    #[test]
    fn changes_reach_the_disk_without_a_restart() {
        let database = Storage::in_memory().database;
        let kv = Kv::open(&database, QUOTA).unwrap();
        kv.space("agent", "guard").set("seen", "1".into()).unwrap().unwrap();
        let found = || read(&database).unwrap().first().map(|one| one.map.get("seen") == Some("1"));
        let started = std::time::Instant::now();
        while found() != Some(true) {
            assert!(started.elapsed() < Duration::from_secs(30));
            std::thread::sleep(FLUSH_AFTER);
        }
    }

    #[test]
    fn keys_and_values_together_stay_within_the_quota() {
        let mut map = Map::default();
        let set = |map: &mut Map, key: &str, bytes: usize| map.set(key, "x".repeat(bytes), QUOTA);
        assert_eq!(set(&mut map, "", 1), Err(Refusal::BadKey));
        assert_eq!(set(&mut map, &"k".repeat(KEY_BYTES + 1), 1), Err(Refusal::BadKey));
        assert_eq!(set(&mut map, &"k".repeat(KEY_BYTES), QUOTA - KEY_BYTES), Ok(()));
        assert_eq!(set(&mut map, "b", 0), Err(Refusal::Full));
        assert_eq!(set(&mut map, &"k".repeat(KEY_BYTES), QUOTA - KEY_BYTES - 1), Ok(()));
        assert_eq!(set(&mut map, "b", 0), Ok(()));
        assert_eq!(set(&mut map, "b", 1), Err(Refusal::Full));
        assert!(map.delete(&"k".repeat(KEY_BYTES)));
        assert_eq!(set(&mut map, "b", QUOTA - 1), Ok(()));
        assert_eq!(map.bytes, QUOTA);
    }

    #[test]
    fn changes_that_wait_for_the_disk_are_bounded() {
        let mut stored = Stored::new("agent", "guard");
        stored.pending = (0..MAX_PENDING).map(|key| key.to_string()).collect();
        assert!(stored.room("new").is_err());
        assert!(stored.room("0").is_ok());
    }
}
