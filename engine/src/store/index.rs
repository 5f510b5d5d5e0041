//! What the store knows without touching the file: which parts there are, what they take, when each
//! was last used, and which must stay.
//!
//! Pure bookkeeping in memory, about 300 bytes a part. Never reads, writes or logs. Times are given
//! to it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound::{Excluded, Included};
use std::sync::Arc;

use super::record::Record;
use super::{BLOCK_TOKENS, Fingerprint, Key, Keys, Kind, Part, Size, state_key};

/// Parts by key.
pub(super) struct Index {
    /// Whose parts can be found. Those of other fingerprints share the budget.
    fingerprint: Fingerprint,
    entries: HashMap<Key, Entry>,
    /// What may be evicted, least recently used first.
    by_use: BTreeSet<(u64, Key)>,
    /// What may not, by the time until which that is so.
    pinned: BTreeSet<(u64, Key)>,
    pinned_bytes: u64,
    /// How many parts of this fingerprint and kind end at each position.
    ends: [BTreeMap<usize, usize>; 2],
    /// Rows and states of this fingerprint, and parts of others.
    sizes: [Size; 3],
    bytes: u64,
    /// The latest use.
    clock: u64,
}

/// One part.
pub(super) struct Entry {
    pub record: Record,
    /// Present until it is in the file.
    pub queued: Option<Arc<Part>>,
}

impl Index {
    pub fn new(fingerprint: Fingerprint) -> Self {
        Self {
            fingerprint,
            entries: HashMap::new(),
            by_use: BTreeSet::new(),
            pinned: BTreeSet::new(),
            pinned_bytes: 0,
            ends: Default::default(),
            sizes: Default::default(),
            bytes: 0,
            clock: 0,
        }
    }

    /// Length of the longest prefix of `tokens` that ends with a part, and whose rows are all here,
    /// and where `needs_state` its state too. Hashes the blocks that are here once, and then those
    /// ends that come in question, the last one first.
    pub fn longest(&self, tokens: &[u32], needs_state: bool) -> Option<usize> {
        let mut whole = vec![Keys::new(&self.fingerprint)];
        for block in tokens.chunks_exact(BLOCK_TOKENS) {
            let mut keys = whole.last().expect("never empty").clone();
            keys.extend(block);
            if !self.entries.contains_key(&keys.key()) {
                break;
            }
            whole.push(keys);
        }
        // Within the block behind the whole ones may be rows of a shorter one.
        let reach = tokens.len().min(whole.len() * BLOCK_TOKENS - 1);
        let kind = if needs_state { Kind::State } else { Kind::Rows };
        let ends = self.ends[kind as usize].range((Excluded(0), Included(reach))).rev();
        let is_here = |&end: &usize| {
            let mut keys = whole[end / BLOCK_TOKENS].clone();
            keys.extend(&tokens[keys.len()..end]);
            let rows = keys.key();
            let state_is_here = || self.entries.contains_key(&state_key(&rows));
            self.entries.contains_key(&rows) && (!needs_state || state_is_here())
        };
        ends.map(|(end, _)| *end).find(is_here)
    }

    pub fn get(&self, key: &Key) -> Option<&Entry> {
        self.entries.get(key)
    }

    pub fn get_mut(&mut self, key: &Key) -> Option<&mut Entry> {
        self.entries.get_mut(key)
    }

    /// Readings of the clock for `count` uses at once, the first of them the latest: consecutive
    /// numbers, with a gap to those before.
    pub fn uses(&mut self, count: usize, now: u64) -> impl Iterator<Item = u64> + use<> {
        let latest = now.max(self.clock + count as u64 + 1);
        self.clock = latest;
        (0..count as u64).map(move |i| latest - i)
    }

    /// Adds a part as its record says, in place of what was there. It is not pinned, whatever the
    /// record says; [`Index::pin`] does that.
    pub fn add(&mut self, key: Key, mut record: Record, queued: Option<Arc<Part>>) {
        self.remove(&key);
        record.pinned = 0;
        let cost = record.cost();
        self.clock = self.clock.max(record.used);
        self.bytes += cost;
        self.by_use.insert((record.used, key));
        self.sizes[self.sort(&record)].add(cost);
        if record.fingerprint == self.fingerprint {
            *self.ends[record.kind as usize].entry(record.end).or_default() += 1;
        }
        self.entries.insert(key, Entry { record, queued });
    }

    /// Notes a use at a time that [`Index::uses`] gave; false where there is no such part.
    pub fn touch(&mut self, key: &Key, used: u64) -> bool {
        let Some(Entry { record, .. }) = self.entries.get_mut(key) else { return false };
        let was = std::mem::replace(&mut record.used, used);
        if self.by_use.remove(&(was, *key)) {
            self.by_use.insert((used, *key));
        }
        true
    }

    pub fn remove(&mut self, key: &Key) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        let Record { used, pinned, kind, end, fingerprint, .. } = entry.record;
        let cost = entry.record.cost();
        self.bytes -= cost;
        if !self.by_use.remove(&(used, *key)) {
            self.pinned.remove(&(pinned, *key));
            self.pinned_bytes -= cost;
        }
        self.sizes[self.sort(&entry.record)].subtract(cost);
        if fingerprint == self.fingerprint {
            let ends = &mut self.ends[kind as usize];
            let count = ends.get_mut(&end).expect("add counted this end");
            *count -= 1;
            if *count == 0 {
                ends.remove(&end);
            }
        }
        Some(entry)
    }

    /// Keeps parts from eviction until then, or longer where that was said before: all of them, or,
    /// where one is not here or all pinned ones would take more than `most_bytes`, none.
    pub fn pin(&mut self, keys: &[Key], until: u64, most_bytes: u64) -> bool {
        let distinct: BTreeSet<&Key> = keys.iter().collect();
        let mut further = 0;
        for key in &distinct {
            match self.entries.get(*key) {
                None => return false,
                Some(entry) if entry.record.pinned == 0 => further += entry.record.cost(),
                Some(_) => {}
            }
        }
        if self.pinned_bytes + further > most_bytes {
            return false;
        }
        for key in distinct {
            let record = &mut self.entries.get_mut(key).expect("just seen").record;
            let was = record.pinned;
            record.pinned = until.max(was);
            let (used, pinned, cost) = (record.used, record.pinned, record.cost());
            if self.by_use.remove(&(used, *key)) {
                self.pinned_bytes += cost;
            } else {
                self.pinned.remove(&(was, *key));
            }
            self.pinned.insert((pinned, *key));
        }
        true
    }

    /// Ends the pins whose time has come.
    pub fn unpin(&mut self, now: u64) {
        while let Some(&(until, key)) = self.pinned.first()
            && until <= now
        {
            self.pinned.pop_first();
            let record = &mut self.entries.get_mut(&key).expect("pinned names entries").record;
            record.pinned = 0;
            let (used, cost) = (record.used, record.cost());
            self.pinned_bytes -= cost;
            self.by_use.insert((used, key));
        }
    }

    /// Removes the least recently used parts until the rest costs at most `budget` bytes, and
    /// returns their keys. What is pinned stays.
    pub fn shrink_to(&mut self, budget: u64) -> Vec<Key> {
        let mut removed = Vec::new();
        while self.bytes > budget
            && let Some(&(_, key)) = self.by_use.first()
        {
            self.remove(&key);
            removed.push(key);
        }
        removed
    }

    /// Removes every part that `keep` refuses.
    pub fn retain(&mut self, keep: impl Fn(&Entry) -> bool) {
        let refused: Vec<Key> =
            self.entries.iter().filter(|(_, e)| !keep(e)).map(|(key, _)| *key).collect();
        for key in refused {
            self.remove(&key);
        }
    }

    /// Cost of all parts together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Rows and states of this fingerprint, and parts of others.
    pub fn sizes(&self) -> [Size; 3] {
        self.sizes
    }

    pub fn pinned(&self) -> Size {
        Size { parts: self.pinned.len() as u64, bytes: self.pinned_bytes }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Place among [`Index::sizes`].
    fn sort(&self, record: &Record) -> usize {
        if record.fingerprint == self.fingerprint { record.kind as usize } else { 2 }
    }
}
