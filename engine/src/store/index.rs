//! What both stores know without touching a snapshot: which keys there are, how long their
//! prefixes, how many bytes they take, and when each was last used.
//!
//! Pure bookkeeping in memory, about 200 bytes a snapshot. Never reads, writes or logs.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Fingerprint, Key, Keys};

/// Saved snapshots by key, each with a `value` that tells the store where it lies.
pub(super) struct Index<T> {
    entries: HashMap<Key, Entry<T>>,
    /// Least recently used first.
    by_use: BTreeSet<(u64, Key)>,
    /// How many entries of this fingerprint there are of each prefix length.
    lengths: BTreeMap<usize, usize>,
    bytes: u64,
    /// Counts uses, so that it orders them; not a time.
    clock: u64,
}

/// One snapshot.
pub(super) struct Entry<T> {
    /// Tokens of the prefix; `None` where the entry belongs to another fingerprint, whose entries
    /// share the budget but are never found.
    pub length: Option<usize>,
    /// Share of the budget.
    pub cost: u64,
    /// Reading of the use counter at the last use.
    pub used: u64,
    /// The store's own.
    pub value: T,
}

impl<T> Default for Index<T> {
    fn default() -> Self {
        Self {
            entries: HashMap::new(),
            by_use: BTreeSet::new(),
            lengths: BTreeMap::new(),
            bytes: 0,
            clock: 0,
        }
    }
}

impl<T> Index<T> {
    /// Length of the longest prefix of `tokens` here, at most `limit`: one pass over the tokens,
    /// with a look-up at each length that exists.
    pub fn longest(
        &self,
        fingerprint: &Fingerprint,
        tokens: &[u32],
        limit: usize,
    ) -> Option<usize> {
        let mut keys = Keys::new(fingerprint);
        let (mut walked, mut found) = (0, None);
        for &length in self.lengths.range(..=limit.min(tokens.len())).map(|(length, _)| length) {
            keys.extend(&tokens[walked..length]);
            walked = length;
            if self.entries.contains_key(&keys.key()) {
                found = Some(length);
            }
        }
        found
    }

    pub fn get(&self, key: &Key) -> Option<&Entry<T>> {
        self.entries.get(key)
    }

    pub fn get_mut(&mut self, key: &Key) -> Option<&mut T> {
        self.entries.get_mut(key).map(|entry| &mut entry.value)
    }

    /// Adds an entry as the most recently used one.
    pub fn add(&mut self, key: Key, length: usize, cost: u64, value: T) {
        let used = self.clock + 1;
        self.restore(key, Entry { length: Some(length), cost, used, value });
    }

    /// Adds an entry with the last use it had when it was written down.
    pub fn restore(&mut self, key: Key, entry: Entry<T>) {
        self.remove(&key);
        self.clock = self.clock.max(entry.used);
        self.bytes += entry.cost;
        self.by_use.insert((entry.used, key));
        if let Some(length) = entry.length {
            *self.lengths.entry(length).or_default() += 1;
        }
        self.entries.insert(key, entry);
    }

    /// Makes an entry the most recently used one; false where there is none.
    pub fn touch(&mut self, key: &Key) -> bool {
        let Some(entry) = self.entries.get_mut(key) else { return false };
        self.by_use.remove(&(entry.used, *key));
        self.clock += 1;
        entry.used = self.clock;
        self.by_use.insert((entry.used, *key));
        true
    }

    pub fn remove(&mut self, key: &Key) -> Option<Entry<T>> {
        let entry = self.entries.remove(key)?;
        self.bytes -= entry.cost;
        self.by_use.remove(&(entry.used, *key));
        if let Some(length) = entry.length {
            let count = self.lengths.get_mut(&length).expect("add counted this length");
            *count -= 1;
            if *count == 0 {
                self.lengths.remove(&length);
            }
        }
        Some(entry)
    }

    /// Removes the least recently used entries until the rest costs at most `budget` bytes, and
    /// returns them.
    pub fn shrink_to(&mut self, budget: u64) -> Vec<(Key, Entry<T>)> {
        let mut removed = Vec::new();
        while self.bytes > budget
            && let Some(&(_, key)) = self.by_use.first()
        {
            let entry = self.remove(&key).expect("by_use names entries only");
            removed.push((key, entry));
        }
        removed
    }

    /// Removes every entry whose value `keep` refuses.
    pub fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        let refused: Vec<Key> =
            self.entries.iter().filter(|(_, e)| !keep(&e.value)).map(|(key, _)| *key).collect();
        for key in refused {
            self.remove(&key);
        }
    }

    /// Cost of all entries together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }
}
