//! The store on disk: one redb file for all models, written behind by its own thread.
//!
//! Three tables: `meta` says which format the file has, `entries` has a small checksummed record
//! for each snapshot, `chunks` the formatted bytes in rows of `CHUNK_BYTES`. The records are
//! read once, at open; from then on the [`Index`] in memory knows what there is, so that looking
//! for a prefix, counting a use and choosing what to forget touch no file. [`Store::load`] reads
//! on the caller's thread; everything else happens on the writer's.
//!
//! - A save, what it displaces and the uses since the last one are one transaction, so a killed
//!   process loses the snapshots still queued and nothing else.
//! - A queued snapshot can be found and loaded, from memory.
//! - A damaged entry is dropped where it is met. A file that redb cannot read, or whose format is
//!   not ours, is moved aside and a new one begun.
//! - A write that fails (the disk is full) turns saving off until the next start. What was saved
//!   can still be loaded.
//!
//! The only door to `redb`. Never waits for the disk in `save` or `longest`.
//!
//! # Why
//! - **Rows just below 1 MiB.** redb's pages are powers of two with a few bytes of its own, so a
//!   value of exactly 1 MiB takes two, and one of 100 MB takes 128 MB and is copied on its way.
//!   100 MB saved and loaded at 175 and 490 MB/s as one value, 485 and 1,800 MB/s in these rows,
//!   440 and 1,600 in rows of 256 KiB (redb 4.4, EPYC, 414 MB/s disk, page cache warm).
//! - **Quick repair.** Without it redb reads the whole file after a kill to find its free pages:
//!   2 GB took 3.8 s to open, with it 0.02 s. It costs each commit a second fsync and a few pages:
//!   8 ms for 1 MB instead of 4, on a thread that nobody waits for. `Durability::None` lost
//!   because it saves time where there is plenty, and frees no page until a durable commit.
//! - **`catch_unwind`.** redb compares page checksums only when it repairs, and panics on some
//!   damaged pages otherwise. A damaged store must not end a request.

mod database;
#[cfg(test)]
mod tests;

use std::collections::{HashSet, VecDeque};
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use ::redb::Database;
use tracing::{debug, warn};

use self::database::{Batch, Record, Trouble};
use super::index::{Entry, Index};
use super::{Fingerprint, Key, Keys, Snapshot, Store, format};
use crate::config::StoreConfig;
use crate::error::{Error, Result};

/// Most snapshots that may wait to be written, the one being written included.
const QUEUE_SNAPSHOTS: usize = 16;
/// Most bytes of them, unless a single one has more.
const QUEUE_BYTES: u64 = 512 << 20;

/// Snapshots in a redb file, for one process at a time.
pub struct RedbStore {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

/// What the callers' threads and the writer's share.
///
/// Lock order: `database`, then `state`.
struct Shared {
    path: PathBuf,
    fingerprint: Fingerprint,
    budget_bytes: u64,
    /// `None` when it could not be opened again after a failure: everything is a miss then.
    database: RwLock<Option<Database>>,
    state: Mutex<State>,
    /// Told of every change that the writer or a flush may wait for.
    changed: Condvar,
}

/// What is known without reading the file.
#[derive(Default)]
struct State {
    index: Index<Saved>,
    /// Waiting to be written, oldest first.
    queue: VecDeque<Arc<Snapshot>>,
    /// Bytes of the queue and of the snapshot being written.
    queued_bytes: u64,
    /// Forgotten by the index, still in the file.
    evicted: HashSet<Key>,
    /// Used since their records were written.
    touched: HashSet<Key>,
    /// What a load met, for the writer to deal with.
    trouble: Option<Trouble>,
    writing: bool,
    flushing: usize,
    closing: bool,
    /// Why nothing is saved any more.
    off: Option<String>,
}

/// Where an entry of the index lies.
struct Saved {
    fingerprint: Fingerprint,
    /// Length of its formatted bytes.
    bytes: u64,
    /// Present until it is in the file.
    queued: Option<Arc<Snapshot>>,
}

impl RedbStore {
    /// Opens the database at `path` for snapshots of one fingerprint, or begins a new one,
    /// readable by this user alone. Entries of other fingerprints stay, and share
    /// `config.budget_bytes`; `path` and `min_tokens` of `config` are the caller's business.
    ///
    /// A file that is damaged beyond redb's repair, or written in another format, is moved to
    /// `NAME.damaged-N` with a warning. A file much larger than its content is compacted first.
    ///
    /// # Errors
    /// [`Error::Store`] when another process (or store) has the file open, or when neither it nor
    /// its folder can be written. The caller then goes on without it.
    pub fn open(path: &Path, fingerprint: Fingerprint, config: &StoreConfig) -> Result<Self> {
        let started = Instant::now();
        let (mut database, records) = database::open_or_begin_anew(path)?;
        let mut state = State::default();
        for (key, record) in records {
            let length = (record.fingerprint == fingerprint).then_some(record.tokens);
            let Record { fingerprint, bytes, used, .. } = record;
            let value = Saved { fingerprint, bytes, queued: None };
            state.index.restore(key, Entry { length, cost: database::cost(bytes), used, value });
        }
        for (key, _) in state.index.shrink_to(config.budget_bytes) {
            state.evicted.insert(key);
        }
        let batch = Batch { evicted: mem::take(&mut state.evicted), ..Batch::default() };
        let fit = database::write(&database, &batch, None).and_then(|()| {
            database::compact(&mut database, path, state.index.bytes(), config.budget_bytes)
        });
        if let Err(trouble) = fit {
            warn!(%trouble, "the store could not be brought within its budget");
            state.trouble = Some(trouble);
        }
        debug!(snapshots = state.index.len(), bytes = state.index.bytes(), ?path,
            elapsed = ?started.elapsed(), "store opened");

        let shared = Arc::new(Shared {
            path: path.to_owned(),
            fingerprint,
            budget_bytes: config.budget_bytes,
            database: RwLock::new(Some(database)),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let writer = thread::Builder::new()
            .name("store-writer".into())
            .spawn({
                let shared = shared.clone();
                move || shared.write_behind()
            })
            .map_err(|error| Error::Store(format!("cannot start its thread: {error}")))?;
        Ok(Self { shared, writer: Some(writer) })
    }
}

impl Store for RedbStore {
    fn longest(&self, tokens: &[u32], limit: usize) -> Option<usize> {
        self.shared.state().index.longest(&self.shared.fingerprint, tokens, limit)
    }

    fn load(&self, tokens: &[u32]) -> Option<Snapshot> {
        let key = Keys::of(&self.shared.fingerprint, tokens);
        let mut state = self.shared.state();
        let queued = state.index.get(&key)?.value.queued.clone();
        state.touch(key);
        drop(state);
        match queued {
            Some(snapshot) => Some(Snapshot::clone(&snapshot)),
            None => self.shared.read(&key, tokens),
        }
    }

    fn save(&self, snapshot: Snapshot) {
        let key = Keys::of(&self.shared.fingerprint, &snapshot.tokens);
        let bytes = format::encoded_len(&snapshot);
        let cost = database::cost(bytes);
        let budget_bytes = self.shared.budget_bytes;
        let mut state = self.shared.state();
        if state.off.is_some() {
            return;
        }
        if state.touch(key) {
            return;
        }
        if cost > budget_bytes {
            warn!(cost, budget_bytes, "snapshot exceeds the store's budget, not saved");
            return;
        }
        let waiting = state.queue.len() + usize::from(state.writing);
        let beyond = waiting > 0 && state.queued_bytes + snapshot.bytes() > QUEUE_BYTES;
        if beyond || waiting >= QUEUE_SNAPSHOTS {
            warn!(waiting, bytes = state.queued_bytes, "store is behind, snapshot not saved");
            return;
        }
        let snapshot = Arc::new(snapshot);
        state.queued_bytes += snapshot.bytes();
        state.queue.push_back(snapshot.clone());
        let fingerprint = self.shared.fingerprint;
        let length = snapshot.tokens.len();
        state.index.add(key, length, cost, Saved { fingerprint, bytes, queued: Some(snapshot) });
        for (key, entry) in state.index.shrink_to(budget_bytes) {
            state.forget(key, entry.value);
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    fn cost(&self, snapshot: &Snapshot) -> u64 {
        database::cost(format::encoded_len(snapshot))
    }

    fn flush(&self) -> Result<()> {
        let mut state = self.shared.state();
        state.flushing += 1;
        self.shared.changed.notify_all();
        while state.writing || state.has_work() {
            state = self.shared.wait(state);
        }
        state.flushing -= 1;
        match &state.off {
            Some(reason) => Err(Error::Store(reason.clone())),
            None => Ok(()),
        }
    }
}

impl Drop for RedbStore {
    /// Waits until the queue is on disk.
    fn drop(&mut self) {
        self.shared.state().closing = true;
        self.shared.changed.notify_all();
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            warn!("the store's writer panicked");
        }
        if let Ok(mut database) = self.shared.database.write() {
            database::close(database.take());
        }
    }
}

impl State {
    /// Whether the writer has something to do. Uses alone wait for the next save.
    fn has_work(&self) -> bool {
        let uses = !self.touched.is_empty() && (self.flushing > 0 || self.closing);
        !self.queue.is_empty() || !self.evicted.is_empty() || self.trouble.is_some() || uses
    }

    /// Counts a use; false where there is no such entry.
    fn touch(&mut self, key: Key) -> bool {
        let present = self.index.touch(&key);
        if present && self.off.is_none() {
            self.touched.insert(key);
        }
        present
    }

    /// Deals with what the index forgot: what has not been written need not be, the rest has to
    /// leave the file. (A snapshot that is just being written is of the rest.)
    fn forget(&mut self, key: Key, saved: Saved) {
        let waiting =
            |queued: &Arc<Snapshot>| self.queue.iter().position(|q| Arc::ptr_eq(q, queued));
        if let Some(position) = saved.queued.as_ref().and_then(waiting) {
            self.queued_bytes -= self.queue[position].bytes();
            self.queue.remove(position);
        } else if self.off.is_none() {
            self.evicted.insert(key);
        }
        self.touched.remove(&key);
    }

    /// Notes that `snapshot` waits no more: it is in the file, or it could not be `written`.
    fn has_left_the_queue(&mut self, key: Key, snapshot: &Arc<Snapshot>, written: bool) {
        self.queued_bytes -= snapshot.bytes();
        let Some(saved) = self.index.get_mut(&key) else { return };
        // Another one waits if this one was evicted and saved again meanwhile.
        if !saved.queued.as_ref().is_some_and(|queued| Arc::ptr_eq(queued, snapshot)) {
            return;
        }
        saved.queued = None;
        if !written {
            self.index.remove(&key);
        }
    }

    /// Takes what the next transaction writes.
    fn next_batch(&mut self, fingerprint: &Fingerprint) -> (Batch, Option<Arc<Snapshot>>) {
        let snapshot = self.queue.pop_front();
        let own = snapshot.as_ref().map(|snapshot| Keys::of(fingerprint, &snapshot.tokens));
        let records = mem::take(&mut self.touched).into_iter().chain(own).filter_map(|key| {
            let entry = self.index.get(&key)?;
            // Those that still wait get their record when they are written.
            let written = entry.value.queued.is_none() || Some(key) == own;
            let (Saved { fingerprint, bytes, .. }, Some(tokens), used) =
                (&entry.value, entry.length, entry.used)
            else {
                return None;
            };
            written
                .then_some((key, Record { fingerprint: *fingerprint, tokens, bytes: *bytes, used }))
        });
        let records = records.collect();
        (Batch { evicted: mem::take(&mut self.evicted), records }, snapshot)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it holds the state")
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).expect("nothing panics while it holds the state")
    }

    /// Reads the snapshot under `key`, which the index says is in the file.
    fn read(&self, key: &Key, tokens: &[u32]) -> Option<Snapshot> {
        let database = self.database.read().expect("nothing panics while it holds the database");
        let found = database::read(database.as_ref()?, key);
        let problem = match found {
            Ok(Some(snapshot)) if snapshot.tokens == tokens => return Some(snapshot),
            Ok(Some(_)) => Some(Trouble::Entry("has other tokens".into())),
            // Displaced between the look into the index and this one, or lost with its file.
            Ok(None) => None,
            Err(problem) => Some(problem),
        };
        if let Some(problem) = &problem {
            warn!(tokens = tokens.len(), %problem, "damaged snapshot dropped");
        }
        let mut state = self.state();
        if state.index.get(key).is_some_and(|entry| entry.value.queued.is_none())
            && let Some(entry) = state.index.remove(key)
        {
            state.forget(*key, entry.value);
        }
        if !matches!(problem, None | Some(Trouble::Entry(_))) {
            state.trouble = problem;
        }
        drop(state);
        self.changed.notify_all();
        None
    }

    /// The writer's thread: one transaction after the other until the store is dropped.
    fn write_behind(&self) {
        let mut state = self.state();
        loop {
            if let Some(trouble) = state.trouble.take() {
                drop(state);
                self.recover(trouble);
                state = self.state();
            } else if state.has_work() {
                let (batch, snapshot) = state.next_batch(&self.fingerprint);
                state.writing = true;
                drop(state);
                let written = self.write(&batch, snapshot.as_deref());
                state = self.state();
                state.writing = false;
                if let Some(snapshot) = snapshot {
                    let key = Keys::of(&self.fingerprint, &snapshot.tokens);
                    state.has_left_the_queue(key, &snapshot, written.is_ok());
                }
                if let Err(trouble) = written {
                    state.trouble = Some(trouble);
                }
            } else if state.closing {
                return;
            } else {
                state = self.wait(state);
            }
            self.changed.notify_all();
        }
    }

    fn write(&self, batch: &Batch, snapshot: Option<&Snapshot>) -> Result<(), Trouble> {
        let started = Instant::now();
        let database = self.database.read().expect("nothing panics while it holds the database");
        let Some(database) = database.as_ref() else { return Ok(()) };
        let own =
            snapshot.map(|snapshot| (Keys::of(&self.fingerprint, &snapshot.tokens), snapshot));
        database::write(database, batch, own)?;
        debug!(bytes = snapshot.map_or(0, Snapshot::bytes), evicted = batch.evicted.len(),
            elapsed = ?started.elapsed(), "saved");
        Ok(())
    }

    /// After a failure redb refuses to go on with the open database. A damaged file is replaced by
    /// a new one; after any other failure (a full disk) it is opened again for reading only.
    fn recover(&self, trouble: Trouble) {
        let mut database = self.database.write().expect("nothing panics while it holds it");
        database::close(database.take());
        let off = match &trouble {
            Trouble::Damaged(_) => {
                database::move_aside(&self.path, &trouble);
                match database::open_or_begin_anew(&self.path) {
                    Ok((new, _)) => *database = Some(new),
                    Err(error) => warn!(%error, "no state is kept from now on"),
                }
                database.is_none()
            }
            _ => {
                warn!(%trouble, "saving state is turned off until the next start");
                *database = database::open(&self.path).ok();
                true
            }
        };
        let mut state = self.state();
        // Any trouble met meanwhile was with the database that is closed now.
        state.trouble = None;
        let readable = database.is_some() && !matches!(trouble, Trouble::Damaged(_));
        if off {
            state.off = Some(trouble.to_string());
            state.queue.clear();
            state.queued_bytes = 0;
            state.evicted.clear();
            state.touched.clear();
            state.index.retain(|saved| readable && saved.queued.is_none());
        } else {
            state.index.retain(|saved| saved.queued.is_some());
            state.evicted.clear();
        }
    }
}
