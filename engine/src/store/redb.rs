//! The store on disk: one redb file for all models, written behind by its own thread.
//!
//! Three tables: `meta` says which format the file has, `entries` has a small checksummed record
//! for each part, `chunks` the formatted bytes in rows of at most 1 MiB. The records are read once,
//! at open; from then on the [`Index`] in memory knows what there is, so that looking for a prefix,
//! counting a use and choosing what to forget touch no file. [`RedbStore::load`] reads on the
//! caller's thread; everything else happens on the writer's.
//!
//! - A save, what it displaces and the uses since the last one are one transaction, so a killed
//!   process loses the saves still queued and nothing else.
//! - A queued part can be found and loaded, from memory.
//! - A damaged part is dropped where it is met. A file that redb cannot read, or that a later
//!   version has written, is moved aside and a new one begun; that of an older version is cleared.
//! - A write that fails (the disk is full) turns saving off until the next start. What was saved
//!   can still be loaded.
//!
//! The only door to `redb`. Never waits for the disk in `save` or `longest`.
//!
//! # Why
//! - **Rows just below powers of two, 1 MiB at most.** redb's pages are powers of two with a few
//!   bytes of its own, so a value of exactly 1 MiB takes two, and one of 100 MB takes 128 MB and is
//!   copied on its way. 100 MB saved and loaded at 175 and 490 MB/s as one value, 485 and 1,800
//!   MB/s in these rows, 440 and 1,600 in rows of 256 KiB (redb 4.4, EPYC, 414 MB/s disk, page
//!   cache warm).
//! - **Quick repair.** Without it redb reads the whole file after a kill to find its free pages:
//!   2 GB took 3.8 s to open, with it 0.02 s. It costs each commit a second fsync and a few pages:
//!   8 ms for 1 MB instead of 4, on a thread that nobody waits for. `Durability::None` lost
//!   because it saves time where there is plenty, and frees no page until a durable commit.
//! - **`catch_unwind`.** redb compares page checksums only when it repairs, and panics on some
//!   damaged pages otherwise. A damaged store must not end a request.

mod database;
mod maintain;
mod portable;
mod reader;
#[cfg(test)]
mod tests;

use std::collections::{HashSet, VecDeque};
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use ::redb::Database;
use tracing::{debug, warn};

use self::database::{Batch, Opened, Trouble};
pub use self::maintain::{Prefix, Sizes, StoreFile, Verified};
pub use self::portable::Imported;
use self::reader::{Reader, in_parallel};
use super::index::Index;
use super::record::{Record, cost};
use super::report::Counts;
use super::{Fingerprint, Key, Part, Report, Reporter, Tensor, elements, format};
use crate::config::StoreConfig;
use crate::error::{Error, Result};

/// Most saves that may wait to be written, the one being written included.
const QUEUE_SAVES: usize = 16;
/// Most bytes of them, unless a single one has more.
const QUEUE_BYTES: u64 = 512 << 20;
/// Parts in a redb file, for one process at a time.
pub struct RedbStore {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

/// What the callers' threads and the writer's share.
///
/// Lock order: `database`, then `state`.
pub(super) struct Shared {
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
struct State {
    index: Index,
    /// Waiting to be written, oldest first.
    queue: VecDeque<Save>,
    /// Bytes of the queue and of the save being written.
    queued_bytes: u64,
    /// Forgotten by the index, perhaps still in the file.
    evicted: HashSet<Key>,
    /// Used or pinned since their records were written.
    touched: HashSet<Key>,
    /// What a load met, for the writer to deal with.
    trouble: Option<Trouble>,
    writing: bool,
    flushing: usize,
    closing: bool,
    counts: Counts,
    /// Why nothing is saved any more.
    off: Option<String>,
}

/// Parts that one transaction writes: those of them that the index still has by then.
struct Save {
    parts: Vec<Arc<Part>>,
    bytes: u64,
}

impl RedbStore {
    /// Opens the database at `path` for parts of one fingerprint, or begins a new one, readable by
    /// this user alone. Parts of other fingerprints stay, and share `config.budget_bytes`; the rest
    /// of `config` is the caller's business.
    ///
    /// A file that is damaged beyond redb's repair, or written by a later version, is moved to
    /// `NAME.damaged-N` with a warning; one of an older version is cleared. A file much larger than
    /// its content is compacted first.
    ///
    /// # Errors
    /// [`Error::Store`] when another process (or store) has the file open, or when neither it nor
    /// its folder can be written. The caller then goes on without it.
    pub fn open(path: &Path, fingerprint: Fingerprint, config: &StoreConfig) -> Result<Self> {
        let started = Instant::now();
        let budget_bytes = config.budget_bytes;
        let Opened { mut database, records, damaged } = database::open_or_begin_anew(path)?;
        let mut state = State::new(fingerprint);
        state.counts.damaged_parts = damaged;
        for (key, record) in records {
            let pinned = record.pinned;
            state.index.add(key, record, None);
            if pinned > seconds() {
                state.index.pin(&[key], pinned, budget_bytes / 2);
            }
        }
        state.shrink_to(budget_bytes);
        let batch = Batch { evicted: mem::take(&mut state.evicted), ..Batch::default() };
        let fit = database::write(&database, &batch).and_then(|()| {
            database::compact(&mut database, path, state.index.bytes(), budget_bytes)
        });
        if let Err(trouble) = fit {
            warn!(%trouble, "the store could not be brought within its budget");
            state.trouble = Some(trouble);
        }
        debug!(parts = state.index.len(), bytes = state.index.bytes(), ?path,
            elapsed = ?started.elapsed(), "store opened");

        let shared = Arc::new(Shared {
            path: path.to_owned(),
            fingerprint,
            budget_bytes,
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

    /// Whose parts these are; [`super::Keys`] wants it.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.shared.fingerprint
    }

    /// Length of the longest prefix of `tokens`, at most `limit`, at whose end a part stands, and
    /// whose rows are all here; where `needs_state`, its state too. Reads nothing, and does not
    /// count as a use.
    ///
    /// The last block may be a short one. A position within a block of which only the whole is
    /// here is not found.
    pub fn longest(&self, tokens: &[u32], limit: usize, needs_state: bool) -> Option<usize> {
        self.shared.state().index.longest(&tokens[..limit.min(tokens.len())], needs_state)
    }

    /// Whether there is such a part. Not a use.
    pub fn contains(&self, key: &Key) -> bool {
        self.shared.state().index.get(key).is_some()
    }

    /// The tensors of these parts, in this order, or `None` where one of them is not here or is
    /// damaged: it is logged and dropped then, and [`RedbStore::longest`] knows what is left.
    /// Counts as a use, as [`RedbStore::touch`] does. Reads these parts and no others.
    pub fn load(&self, keys: &[Key]) -> Option<Vec<Vec<Tensor>>> {
        let places = {
            let mut state = self.shared.state();
            let place = |key| {
                let entry = state.index.get(key)?;
                Some((key, entry.record.bytes, entry.queued.clone()))
            };
            let places = keys.iter().map(place).collect::<Option<Vec<_>>>()?;
            state.touch(keys);
            places
        };
        let tensors = {
            let database = self.shared.database.read().expect("nothing panics while it holds it");
            let reader = Reader::new(database.as_ref()?);
            let total = places.iter().map(|(_, bytes, _)| bytes).sum();
            in_parallel(&places, total, |(key, bytes, queued)| match (queued, &reader) {
                (Some(part), _) => Ok(part.tensors.clone()),
                (None, Ok(reader)) => reader.tensors(key, *bytes),
                (None, Err(trouble)) => Err(trouble.clone()),
            })
        };
        let mut loaded = Vec::with_capacity(keys.len());
        for (key, tensors) in keys.iter().zip(tensors) {
            match tensors {
                Ok(tensors) => loaded.push(tensors),
                Err(trouble) => self.shared.drop_damaged(key, trouble),
            }
        }
        if loaded.len() < keys.len() {
            return None;
        }
        let mut state = self.shared.state();
        state.counts.loads += 1;
        state.counts.loaded_parts += loaded.len() as u64;
        state.counts.loaded_bytes += loaded.iter().map(|part| elements(part)).sum::<u64>();
        Some(loaded)
    }

    /// Marks those of the parts that are here as used now, the first the most recently. Name the
    /// blocks from the start of the prompt on, then the state: so a state goes before the rows that
    /// it needs, and a late block before an early one.
    pub fn touch(&self, keys: &[Key]) {
        self.shared.state().touch(keys);
    }

    /// Keeps parts, which can be found from now on, and forgets the least recently used ones beyond
    /// the budget. They are written behind, in one transaction, so all of them may be lost when the
    /// process is killed, but not some. Those that are here already are not written again. All
    /// count as used, as [`RedbStore::touch`] does.
    ///
    /// Returns at once. If the queue is full, or the new parts do not fit the budget, all new ones
    /// are dropped with a warning.
    pub fn save(&self, parts: Vec<Part>) {
        let budget_bytes = self.shared.budget_bytes;
        let mut state = self.shared.state();
        let used: Vec<u64> = state.index.uses(parts.len(), micros()).collect();
        let (mut new, mut new_cost) = (Vec::new(), 0);
        for (part, used) in parts.into_iter().zip(used) {
            if !state.touch_at(&part.key, used) {
                new_cost += cost(format::encoded_len(&part.tensors));
                new.push((Arc::new(part), used));
            }
        }
        if new.is_empty() {
            return;
        }
        let bytes = new.iter().map(|(part, _)| part.bytes()).sum();
        let waiting = state.queue.len() + usize::from(state.writing);
        state.index.unpin(seconds());
        let room = budget_bytes.saturating_sub(state.index.pinned().bytes);
        let beyond = waiting > 0 && state.queued_bytes + bytes > QUEUE_BYTES;
        if state.off.is_some() || new_cost > room || beyond || waiting >= QUEUE_SAVES {
            state.counts.dropped_saves += 1;
            if state.off.is_none() && new_cost > room {
                warn!(new_cost, room, "state exceeds the store's budget, not saved");
            } else if state.off.is_none() {
                warn!(waiting, bytes = state.queued_bytes, "store is behind, state not saved");
            }
            return;
        }
        for (part, used) in &new {
            let record = Record {
                fingerprint: self.shared.fingerprint,
                kind: part.kind,
                end: part.end,
                bytes: format::encoded_len(&part.tensors),
                used: *used,
                pinned: 0,
            };
            state.index.add(part.key, record, Some(part.clone()));
        }
        state.queued_bytes += bytes;
        state
            .queue
            .push_back(Save { parts: new.into_iter().map(|(part, _)| part).collect(), bytes });
        state.shrink_to(budget_bytes);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Keeps these parts from eviction until that time, in seconds since 1970, or until a later one
    /// that was said before. False, and nothing is changed, where one of them is not here, all
    /// pinned ones would take more than half of the budget, or the time is past. Reaches the file
    /// with the next save.
    pub fn pin(&self, keys: &[Key], until: u64) -> bool {
        let now = seconds();
        let mut state = self.shared.state();
        state.index.unpin(now);
        let pinned = until > now && state.index.pin(keys, until, self.shared.budget_bytes / 2);
        if pinned && state.off.is_none() {
            state.touched.extend(keys);
        }
        pinned
    }

    /// Waits until everything that was saved, used or pinned is on disk.
    ///
    /// # Errors
    /// [`Error::Store`] when saving has been turned off after a failure.
    pub fn flush(&self) -> Result<()> {
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

    /// Counters and sizes.
    pub fn report(&self) -> Report {
        self.shared.report()
    }

    /// Asks for the report from other threads.
    pub fn reporter(&self) -> Reporter {
        Reporter(self.shared.clone())
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
    fn new(fingerprint: Fingerprint) -> Self {
        Self {
            index: Index::new(fingerprint),
            queue: VecDeque::new(),
            queued_bytes: 0,
            evicted: HashSet::new(),
            touched: HashSet::new(),
            trouble: None,
            writing: false,
            flushing: 0,
            closing: false,
            counts: Counts::default(),
            off: None,
        }
    }

    /// Whether the writer has something to do. Uses alone wait for the next save.
    fn has_work(&self) -> bool {
        let uses = !self.touched.is_empty() && (self.flushing > 0 || self.closing);
        !self.queue.is_empty() || !self.evicted.is_empty() || self.trouble.is_some() || uses
    }

    fn touch(&mut self, keys: &[Key]) {
        for (key, used) in keys.iter().zip(self.index.uses(keys.len(), micros())) {
            self.touch_at(key, used);
        }
    }

    /// Counts a use; false where there is no such part.
    fn touch_at(&mut self, key: &Key, used: u64) -> bool {
        let present = self.index.touch(key, used);
        if present && self.off.is_none() {
            self.touched.insert(*key);
        }
        present
    }

    /// Forgets parts until the rest is within the budget.
    fn shrink_to(&mut self, budget_bytes: u64) {
        self.index.unpin(seconds());
        let evicted = self.index.shrink_to(budget_bytes);
        self.counts.evicted_parts += evicted.len() as u64;
        evicted.iter().for_each(|key| self.has_left_the_index(key));
    }

    /// What the index forgot must leave the file. If it only waits to be written, there is nothing
    /// to remove, and it will not be written either.
    fn has_left_the_index(&mut self, key: &Key) {
        if self.off.is_none() {
            self.evicted.insert(*key);
        }
        self.touched.remove(key);
    }

    /// Takes what the next transaction writes, and the save that it ends.
    fn next_batch(&mut self) -> (Batch, Option<Save>) {
        let save = self.queue.pop_front();
        let mut batch = Batch { evicted: mem::take(&mut self.evicted), ..Batch::default() };
        let touched = mem::take(&mut self.touched);
        for part in save.iter().flat_map(|save| &save.parts) {
            // It may have been evicted since, and perhaps saved again: that one waits further back.
            if let Some(entry) = self.index.get(&part.key)
                && entry.queued.as_ref().is_some_and(|queued| Arc::ptr_eq(queued, part))
            {
                batch.parts.push(part.clone());
                batch.records.push((part.key, entry.record.clone()));
            }
        }
        for key in touched {
            // Those that still wait get their record when they are written.
            if let Some(entry) = self.index.get(&key)
                && entry.queued.is_none()
            {
                batch.records.push((key, entry.record.clone()));
            }
        }
        (batch, save)
    }

    /// Notes that a save waits no more: `parts` of it are in the file, or could not be `written`.
    fn has_left_the_queue(&mut self, save: &Save, parts: &[Arc<Part>], written: bool) {
        self.queued_bytes -= save.bytes;
        for part in parts {
            let Some(entry) = self.index.get_mut(&part.key) else { continue };
            // Another one waits if this one was evicted and saved again meanwhile.
            if !entry.queued.as_ref().is_some_and(|queued| Arc::ptr_eq(queued, part)) {
                continue;
            }
            entry.queued = None;
            if !written {
                self.index.remove(&part.key);
            }
        }
        if written {
            self.counts.saves += 1;
            self.counts.saved_parts += parts.len() as u64;
            self.counts.saved_bytes += parts.iter().map(|part| part.bytes()).sum::<u64>();
        } else {
            self.counts.dropped_saves += 1;
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it holds the state")
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).expect("nothing panics while it holds the state")
    }

    pub fn report(&self) -> Report {
        let file_bytes = database::size_on_disk(&self.path);
        let state = self.state();
        let [rows, states, others] = state.index.sizes();
        Report {
            path: self.path.clone(),
            file_bytes,
            budget_bytes: self.budget_bytes,
            rows,
            states,
            others,
            pinned: state.index.pinned(),
            queued_bytes: state.queued_bytes,
            counts: state.counts,
            off: state.off.clone(),
        }
    }

    /// Forgets a part that could not be read, and leaves worse trouble to the writer.
    fn drop_damaged(&self, key: &Key, trouble: Trouble) {
        let mut state = self.state();
        // Unless it was displaced between the look into the index and the one into the file.
        if let Some(entry) = state.index.get(key)
            && entry.queued.is_none()
        {
            let (kind, end) = (entry.record.kind.name(), entry.record.end);
            warn!(kind, end, %trouble, "damaged part dropped");
            state.index.remove(key);
            state.has_left_the_index(key);
            state.counts.damaged_parts += 1;
        }
        if !matches!(trouble, Trouble::Part(_)) {
            state.trouble = Some(trouble);
        }
        drop(state);
        self.changed.notify_all();
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
                let (batch, save) = state.next_batch();
                state.writing = true;
                drop(state);
                let written = self.write(&batch);
                state = self.state();
                state.writing = false;
                if let Some(save) = save {
                    state.has_left_the_queue(&save, &batch.parts, written.is_ok());
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

    fn write(&self, batch: &Batch) -> Result<(), Trouble> {
        let started = Instant::now();
        let database = self.database.read().expect("nothing panics while it holds the database");
        let Some(database) = database.as_ref() else { return Ok(()) };
        database::write(database, batch)?;
        debug!(parts = batch.parts.len(), evicted = batch.evicted.len(),
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
                    Ok(new) => *database = Some(new.database),
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
            state.counts.dropped_saves += state.queue.len() as u64;
            state.queue.clear();
            state.queued_bytes = 0;
            state.evicted.clear();
            state.touched.clear();
            state.index.retain(|entry| readable && entry.queued.is_none());
        } else {
            state.index.retain(|entry| entry.queued.is_some());
            state.evicted.clear();
        }
    }
}

/// Now, in microseconds since 1970.
fn micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Now, in seconds since 1970.
fn seconds() -> u64 {
    micros() / 1_000_000
}
