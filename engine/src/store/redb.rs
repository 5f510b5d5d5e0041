//! The store on disk: one redb file for all models, written by a thread of its own.
//!
//! Three tables: `meta` holds the format, `entries` a small checksummed record for each part,
//! `chunks` the encoded parts in chunks of at most 1 MiB. The records are read once, at open; from
//! then on the [`PartIndex`] in memory finds prefixes, records uses and chooses what to evict without
//! touching the file. [`RedbStore::load`] reads on the caller's thread; everything else happens on
//! the writer's.
//!
//! - A save, its evictions and the uses since the last save are one transaction, so a killed process
//!   or a power loss loses the saves still queued and nothing else.
//! - A queued part can be found and loaded, from memory. What it is read from is read by the writer.
//! - A damaged part is dropped when it is read. A file of the store that redb cannot read, or that has
//!   an unknown format, is set aside and a new one created. Another program's file is an error.
//! - A failed write (the disk is full) turns saving off for a minute. Loads continue.
//! - A file that is deleted while it is open is created again.
//!
//! `save` and `longest` never wait for the disk.
//!
//! # Why
//! - **Chunks just below powers of two, 1 MiB at most.** redb's pages are powers of two with a few
//!   bytes of its own, so a value of exactly 1 MiB takes two, and one of 100 MB takes 128 MB and is
//!   copied on its way. 100 MB saved and loaded at 175 and 490 MB/s as one value, 485 and 1,800
//!   MB/s in these chunks, 440 and 1,600 in chunks of 256 KiB (redb 4.4, EPYC, 414 MB/s disk, page
//!   cache warm).
//! - **Quick repair.** Without it redb reads the whole file after a kill to find its free pages:
//!   2 GB took 3.8 s to open, with it 0.02 s. It costs each commit a second fsync and a few pages:
//!   8 ms for 1 MB instead of 4, on a thread that nobody waits for. `Durability::None` lost: it
//!   saves time that nobody misses, and frees no page until a durable commit.

mod aside;
mod database;
mod fault;
mod file;
mod maintain;
mod portable;
mod reader;
mod state;
#[cfg(test)]
mod tests;

use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use ::redb::Database;
use parking_lot::{Condvar, Mutex, RwLock};
use steersman_database::{close, size_on_disk};
use tracing::{debug, info, warn};

use self::database::{Opened, Transaction};
use self::fault::StoreFault;
pub use self::maintain::{KindSize, StoreFile, StoredPrefix, VerifyReport};
pub use self::portable::ImportReport;
use self::reader::{PartReader, in_parallel};
use self::state::{QueuedSave, Reopen, StoreState};
use super::index::IndexEntry;
use super::record::{PartRecord, cost};
use super::{
    Fingerprint, Key, QueuedPart, Recency, SavedPrefix, StoreEnv, StoreError, StoreReport, Tensor,
    element_bytes,
};
use crate::config::StoreConfig;

/// Most saves that may wait to be written, the one being written included.
const QUEUE_SAVES: usize = 64;
/// Most bytes of them, unless a single save has more.
const QUEUE_BYTES: u64 = 512 << 20;

/// Parts in a redb file, for one process at a time.
pub struct RedbStore {
    shared: Arc<StoreShared>,
    writer: Option<JoinHandle<()>>,
}

/// Shared by the callers' threads and the writer's.
///
/// Lock order: `database`, then `state`.
pub(super) struct StoreShared {
    path: PathBuf,
    fingerprint: Fingerprint,
    budget_bytes: u64,
    env: StoreEnv,
    /// `None` if it could not be opened again after a failure: every load is a miss then.
    database: RwLock<Option<Database>>,
    state: Mutex<StoreState>,
    /// Notified of every change that the writer or a flush may wait for.
    changed: Condvar,
}

impl RedbStore {
    /// Opens the file at `path`, or creates it, readable by this user only, for parts of one
    /// fingerprint. Parts of other fingerprints stay and share `config.budget_bytes`, the only field
    /// of `config` that is read.
    ///
    /// A file of the store that is damaged beyond redb's repair or has an unknown format is moved to
    /// `NAME.damaged-N` with a warning; such files share the budget, too. A file much larger than its
    /// content is compacted first.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if another process or store has the file open, [`StoreError::Foreign`] if
    /// it is not the store's, [`StoreError::Io`] or [`StoreError::Full`] if it or its folder cannot be
    /// written.
    pub fn open(
        path: &Path,
        fingerprint: Fingerprint,
        config: &StoreConfig,
    ) -> Result<Self, StoreError> {
        Self::open_in(StoreEnv::default(), path, fingerprint, config)
    }

    /// [`RedbStore::open`] with another clock or storage.
    pub fn open_in(
        env: StoreEnv,
        path: &Path,
        fingerprint: Fingerprint,
        config: &StoreConfig,
    ) -> Result<Self, StoreError> {
        let started = Instant::now();
        let budget_bytes = config.budget_bytes;
        let Opened { mut database, records, damaged } = database::open_or_replace(path, &env)?;
        let mut state = StoreState::new(fingerprint, env.clock.clone());
        state.counts.damaged_parts = damaged;
        state.adopt(path, records, budget_bytes);
        let evictions =
            Transaction { evicted: mem::take(&mut state.evicted), ..Transaction::default() };
        let fit = database::write(&database, &evictions).and_then(|()| {
            let live = state.index.bytes();
            database::compact_if_large(&mut database, path, live, state.budget_bytes)
        });
        if let Err(fault) = fit {
            warn!(path = %path.display(), %fault, "state store could not be reduced to its budget");
            state.reopen = Some(Reopen::Fault(fault));
        }
        debug!(parts = state.index.len(), bytes = state.index.bytes(), ?path,
            elapsed = ?started.elapsed(), "state store opened");

        let shared = Arc::new(StoreShared {
            path: path.to_owned(),
            fingerprint,
            budget_bytes,
            env,
            database: RwLock::new(Some(database)),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let writer = thread::Builder::new()
            .name("store-writer".into())
            .spawn({
                let shared = shared.clone();
                move || shared.run_writer()
            })
            .map_err(|error| StoreError::io(path, error))?;
        Ok(Self { shared, writer: Some(writer) })
    }

    /// Fingerprint of the parts, for [`super::KeyChain`].
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.shared.fingerprint
    }

    /// The longest prefix of `tokens`, of at most `limit` tokens, that ends with a part and whose KV
    /// is complete; with `needs_state`, its state is here too. Reads nothing, and is not a use.
    ///
    /// The last block may be a short one. A position within a block that was saved complete is not
    /// found.
    pub fn longest(&self, tokens: &[u32], limit: usize, needs_state: bool) -> Option<SavedPrefix> {
        self.shared.state.lock().index.longest(&tokens[..limit.min(tokens.len())], needs_state)
    }

    /// Whether there is a part with this key. Not a use.
    pub fn contains(&self, key: &Key) -> bool {
        self.shared.state.lock().index.get(key).is_some()
    }

    /// Bytes of the elements of these parts; those that are missing count as none.
    pub fn bytes(&self, keys: &[Key]) -> u64 {
        let state = self.shared.state.lock();
        keys.iter().filter_map(|key| state.index.get(key)).map(|entry| entry.record.bytes).sum()
    }

    /// The tensors of these parts, in order. `None` if one of them is missing or damaged; a damaged
    /// part is dropped with a warning, and [`RedbStore::longest`] finds what is left. A use, like
    /// [`RedbStore::touch`].
    pub fn load(&self, keys: &[Key]) -> Option<Vec<Vec<Tensor>>> {
        let places = {
            let mut state = self.shared.state.lock();
            let place = |key| {
                let entry = state.index.get(key)?;
                Some((key, entry.record.bytes, entry.queued.clone()))
            };
            let places = keys.iter().map(place).collect::<Option<Vec<_>>>()?;
            state.touch(keys);
            places
        };
        let tensors = {
            let database = self.shared.database.read();
            let reader = PartReader::new(database.as_ref()?);
            let total = places.iter().map(|(_, bytes, _)| bytes).sum();
            in_parallel(&places, total, |(key, bytes, queued)| match (queued, &reader) {
                (Some(part), _) => part
                    .tensors()
                    .map(<[Tensor]>::to_vec)
                    .map_err(|problem| StoreFault::Part(problem.into())),
                (None, Ok(reader)) => reader.tensors(key, *bytes),
                (None, Err(fault)) => Err(fault.clone()),
            })
        };
        let mut loaded = Vec::with_capacity(keys.len());
        for (key, tensors) in keys.iter().zip(tensors) {
            match tensors {
                Ok(tensors) => loaded.push(tensors),
                Err(fault) => self.shared.drop_damaged(key, fault),
            }
        }
        if loaded.len() < keys.len() {
            return None;
        }
        let counts = &mut self.shared.state.lock().counts;
        counts.loads += 1;
        counts.loaded_parts += loaded.len() as u64;
        counts.loaded_bytes += loaded.iter().map(|part| element_bytes(part)).sum::<u64>();
        Some(loaded)
    }

    /// Marks the present ones of these parts as used now, the first as the most recent. Name the
    /// blocks from the start of the prompt, then the state: so a state is evicted before the KV that
    /// it needs, and a late block before an early one.
    pub fn touch(&self, keys: &[Key]) {
        self.shared.state.lock().touch(keys);
    }

    /// Adds parts, which can be found from now on, and evicts the least recently used ones beyond
    /// the budget. The writer commits them in one transaction, so a killed process loses all of them
    /// or none. Parts that are present are not written again. A use, like [`RedbStore::touch`].
    ///
    /// Returns at once. If the queue is full, or the new parts do not fit the budget, all new ones
    /// are dropped with a warning.
    pub fn save(&self, parts: Vec<impl Into<QueuedPart>>) {
        let mut state = self.shared.state.lock();
        let used: Vec<u64> = state.ticks(parts.len()).collect();
        let (mut new, mut new_cost) = (Vec::new(), 0);
        for (part, used) in parts.into_iter().zip(used) {
            let part = part.into();
            if !state.touch_at(&part.key, used) {
                new_cost += cost(part.encoded_len);
                new.push((Arc::new(part), used));
            }
        }
        if new.is_empty() {
            return;
        }
        let bytes = new.iter().map(|(part, _)| part.bytes).sum();
        let waiting = state.queue.len() + usize::from(state.writing);
        let retained = state.index.retained(state.clock.seconds());
        let room = state.budget_bytes.saturating_sub(retained.bytes);
        let beyond = waiting > 0 && state.queued_bytes + bytes > QUEUE_BYTES;
        if state.off.is_some() || new_cost > room || beyond || waiting >= QUEUE_SAVES {
            state.counts.dropped_saves += 1;
            let now = state.clock.seconds();
            match &state.off {
                Some(off) if off.retry <= now && state.reopen.is_none() => {
                    state.reopen = Some(Reopen::Retry);
                    drop(state);
                    self.shared.changed.notify_all();
                }
                Some(_) => {}
                None if new_cost > room => {
                    warn!(new_cost, room, "save dropped: exceeds the store's budget");
                }
                None => {
                    let bytes = state.queued_bytes;
                    warn!(waiting, bytes, "save dropped: store's queue is full");
                }
            }
            return;
        }
        for (part, used) in &new {
            let record = PartRecord {
                fingerprint: self.shared.fingerprint,
                kind: part.kind,
                end: part.end,
                bytes: part.encoded_len,
                recency: Recency { used: *used, retained_until: 0 },
            };
            state.index.add(part.key, record, Some(part.clone()));
        }
        state.queued_bytes += bytes;
        let parts = new.into_iter().map(|(part, _)| part).collect();
        state.queue.push_back(QueuedSave { parts, bytes });
        state.shrink();
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Protects these parts from eviction until `until` (seconds since 1970), or until the later
    /// time of an earlier call. Changes nothing and returns false if one of them is missing, all
    /// retained parts would take more than half of the budget, or the time is past. Reaches the file
    /// with the next save.
    pub fn retain(&self, keys: &[Key], until: u64) -> bool {
        let mut state = self.shared.state.lock();
        let now = state.clock.seconds();
        let most = state.budget_bytes / 2;
        let retained = until > now && state.index.retain(keys, until, now, most);
        if retained && state.off.is_none() {
            state.touched.extend(keys);
        }
        retained
    }

    /// Waits until everything that was saved, used or retained is on disk. Returns the error after
    /// which saving was turned off, while it is off.
    pub fn flush(&self) -> Result<(), StoreError> {
        let mut state = self.shared.state.lock();
        state.flushing += 1;
        self.shared.changed.notify_all();
        while state.writing || state.has_work() {
            self.shared.changed.wait(&mut state);
        }
        state.flushing -= 1;
        state.off.as_ref().map_or(Ok(()), |off| Err(off.error.clone()))
    }

    /// Current sizes and counters.
    pub fn report(&self) -> StoreReport {
        self.shared.report()
    }

    /// Reports from other threads.
    pub fn reporter(&self) -> StoreReporter {
        StoreReporter(self.shared.clone())
    }
}

impl Drop for RedbStore {
    /// Waits until the queue is on disk.
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        self.shared.changed.notify_all();
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            warn!("state store's writer panicked");
        }
        close(self.shared.database.write().take());
    }
}

/// Reports on a store from any thread, even after the store was dropped.
#[derive(Clone)]
pub struct StoreReporter(Arc<StoreShared>);

impl StoreReporter {
    /// Current sizes and counters.
    pub fn report(&self) -> StoreReport {
        self.0.report()
    }
}

impl StoreShared {
    pub fn report(&self) -> StoreReport {
        let file_bytes = size_on_disk(&self.path);
        let mut state = self.state.lock();
        let [rows, states, others] = state.index.sizes();
        let mut off = state.off.as_ref().map(|off| off.error.to_string());
        if state.is_gone(&self.path) && !state.closing {
            state.reopen.get_or_insert(Reopen::Gone);
            self.changed.notify_all();
            off.get_or_insert("the file was deleted or replaced; it is created again".into());
        }
        StoreReport {
            path: self.path.clone(),
            file_bytes,
            budget_bytes: self.budget_bytes,
            rows,
            states,
            others,
            retained: state.index.retained(state.clock.seconds()),
            set_aside: state.aside,
            queued_bytes: state.queued_bytes,
            counts: state.counts,
            off,
        }
    }

    /// Drops a part that could not be read, and leaves any worse fault to the writer.
    fn drop_damaged(&self, key: &Key, fault: StoreFault) {
        // It may have been evicted and saved again since the look into the index. Tensors are not read under
        // the lock.
        let queued = self.state.lock().index.get(key).and_then(|entry| entry.queued.clone());
        let is_whole = queued.as_ref().is_some_and(|part| part.tensors().is_ok());
        let mut state = self.state.lock();
        let is_same = |entry: &IndexEntry| match (&entry.queued, &queued) {
            (Some(now), Some(then)) => Arc::ptr_eq(now, then),
            (None, None) => true,
            _ => false,
        };
        if let Some(entry) = state.index.get(key)
            && !is_whole
            && is_same(entry)
        {
            let (kind, end) = (entry.record.kind.name(), entry.record.end);
            warn!(kind, end, %fault, "damaged part dropped");
            state.index.remove(key);
            state.remove_from_file(key);
            state.counts.damaged_parts += 1;
        }
        if !matches!(fault, StoreFault::Part(_)) {
            state.reopen = Some(Reopen::Fault(fault));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Body of the writer's thread: one transaction after the other until the store is dropped.
    fn run_writer(&self) {
        let mut state = self.state.lock();
        loop {
            if state.has_work() && state.off.is_none() && state.is_gone(&self.path) {
                if state.closing {
                    warn!(path = %self.path.display(), "state store was deleted; nothing is saved at the end");
                    return;
                }
                state.reopen = Some(Reopen::Gone);
            }
            if let Some(why) = state.reopen.take() {
                // Otherwise a flush could return before `off` reports the failed save.
                state.writing = true;
                drop(state);
                self.reopen(&why);
                state = self.state.lock();
                state.writing = false;
            } else if state.has_work() {
                let (mut transaction, save) = state.next_transaction();
                state.writing = true;
                let queued = state.queued_parts();
                drop(state);
                // All of them, so that what they are read from is freed before this save is written.
                for part in &queued {
                    // A failure is reported when the part's save is written.
                    let _ = part.tensors();
                }
                for part in transaction.read_parts() {
                    let problem = part.tensors().err().unwrap_or_default();
                    self.drop_damaged(&part.key, StoreFault::Part(problem.into()));
                }
                let written = self.write(&transaction);
                state = self.state.lock();
                state.writing = false;
                if let Some(save) = save {
                    state.complete(&save, &transaction.parts, written.is_ok());
                }
                if let Err(fault) = written {
                    state.reopen = Some(Reopen::Fault(fault));
                }
            } else if state.closing {
                return;
            } else {
                self.changed.wait(&mut state);
            }
            self.changed.notify_all();
        }
    }

    fn write(&self, transaction: &Transaction) -> Result<(), StoreFault> {
        let started = Instant::now();
        let database = self.database.read();
        let Some(database) = database.as_ref() else { return Ok(()) };
        database::write(database, transaction)?;
        debug!(parts = transaction.parts.len(), evicted = transaction.evicted.len(),
            elapsed = ?started.elapsed(), "state saved");
        Ok(())
    }

    /// Opens the file again. A damaged file is replaced; after any other failure (a full disk) the
    /// file is open for loads only until [`Reopen::Retry`].
    fn reopen(&self, why: &Reopen) {
        let path = &self.path;
        let mut database = self.database.write();
        close(database.take());
        match why {
            Reopen::Fault(fault) if fault.is_of_the_file() => aside::set_aside(path, fault),
            Reopen::Gone => {
                warn!(path = %path.display(), "state store was deleted or replaced while it was open");
            }
            Reopen::Fault(_) | Reopen::Retry => {}
        }
        let mut records = Vec::new();
        let mut off = match database::open_or_replace(path, &self.env) {
            Ok(opened) => {
                *database = Some(opened.database);
                records = opened.records;
                None
            }
            Err(error) => Some(error),
        };
        if let Reopen::Fault(fault) = why
            && !fault.is_of_the_file()
        {
            off = Some(fault.clone().at(path));
        }
        let mut state = self.state.lock();
        // Any fault met meanwhile was of the database that is closed now.
        state.reopen = None;
        match off {
            Some(error) => state.turn_off(error),
            None => {
                if state.off.take().is_some() {
                    info!(path = %path.display(), "state is saved again");
                }
            }
        }
        state.adopt(path, records, self.budget_bytes);
    }
}
