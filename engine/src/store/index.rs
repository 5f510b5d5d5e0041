//! All parts of the store: what each costs, when it was last used, which is evicted next.
//!
//! Pure bookkeeping in memory, about 300 bytes a part. Never reads, writes or logs; times are passed
//! in.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound::{Excluded, Included};
use std::sync::Arc;

use super::record::PartRecord;
use super::{
    BLOCK_TOKENS, Fingerprint, Key, KeyChain, Lru, PartKind, QueuedPart, Recency, SavedPrefix,
    StoredSize, state_key,
};

pub(super) struct PartIndex {
    /// Only parts of this fingerprint can be found. Those of others share the budget.
    fingerprint: Fingerprint,
    entries: HashMap<Key, IndexEntry>,
    lru: Lru<Key>,
    /// Number of parts that end at each position, for each kind of this fingerprint.
    ends: [BTreeMap<usize, usize>; 2],
    /// KV and state of this fingerprint, and parts of others.
    sizes: [StoredSize; 3],
    bytes: u64,
}

pub(super) struct IndexEntry {
    pub record: PartRecord,
    /// Present until the part is in the file.
    pub queued: Option<Arc<QueuedPart>>,
}

impl PartIndex {
    pub fn new(fingerprint: Fingerprint) -> Self {
        Self {
            fingerprint,
            entries: HashMap::new(),
            lru: Lru::default(),
            ends: Default::default(),
            sizes: Default::default(),
            bytes: 0,
        }
    }

    /// The longest prefix of `tokens` that ends with a part and whose KV is complete; with
    /// `needs_state`, its state is here too. Hashes each present block once, and then the candidate
    /// ends, the last one first.
    pub fn longest(&self, tokens: &[u32], needs_state: bool) -> Option<SavedPrefix> {
        let mut chains = vec![KeyChain::new(&self.fingerprint)];
        for block in tokens.chunks_exact(BLOCK_TOKENS) {
            let mut chain = chains.last().expect("never empty").clone();
            chain.extend(block);
            if !self.entries.contains_key(&chain.key()) {
                break;
            }
            chains.push(chain);
        }
        // A shorter prefix may end within the block after the complete ones.
        let reach = tokens.len().min(chains.len() * BLOCK_TOKENS - 1);
        let kind = if needs_state { PartKind::State } else { PartKind::Kv };
        let ends = self.ends[kind as usize].range((Excluded(0), Included(reach))).rev();
        let (tokens, last) = ends.map(|(end, _)| *end).find_map(|end| {
            let mut chain = chains[end / BLOCK_TOKENS].clone();
            chain.extend(&tokens[chain.len()..end]);
            let last = chain.key();
            let has_state = || self.entries.contains_key(&state_key(&last));
            let is_here = self.entries.contains_key(&last) && (!needs_state || has_state());
            is_here.then_some((end, last))
        })?;
        let blocks = chains[1..].iter().map(KeyChain::key).take(tokens / BLOCK_TOKENS);
        let mut keys: Vec<Key> = blocks.collect();
        keys.extend((!tokens.is_multiple_of(BLOCK_TOKENS)).then_some(last));
        keys.extend(needs_state.then(|| state_key(&last)));
        Some(SavedPrefix { tokens, keys })
    }

    pub fn get(&self, key: &Key) -> Option<&IndexEntry> {
        self.entries.get(key)
    }

    pub fn get_mut(&mut self, key: &Key) -> Option<&mut IndexEntry> {
        self.entries.get_mut(key)
    }

    /// Clock readings for `count` uses at once, the first of them the latest; `now` in microseconds.
    pub fn ticks(&mut self, count: usize, now: u64) -> impl Iterator<Item = u64> + use<> {
        let latest = self.lru.tick(count as u64, now);
        (0..count as u64).map(move |i| latest - i)
    }

    /// Adds or replaces a part. It is not retained, whatever its record says:
    /// [`PartIndex::retain`] checks the bound.
    pub fn add(&mut self, key: Key, mut record: PartRecord, queued: Option<Arc<QueuedPart>>) {
        self.remove(&key);
        record.recency.retained_until = 0;
        let cost = record.cost();
        self.bytes += cost;
        self.lru.insert(key, record.recency);
        self.sizes[self.class(&record)].add(cost);
        if record.fingerprint == self.fingerprint {
            *self.ends[record.kind as usize].entry(record.end).or_default() += 1;
        }
        self.entries.insert(key, IndexEntry { record, queued });
    }

    /// Records a use at a reading of [`PartIndex::ticks`]; false if there is no such part.
    pub fn touch(&mut self, key: &Key, used: u64) -> bool {
        let Some(IndexEntry { record, .. }) = self.entries.get_mut(key) else { return false };
        let new = Recency { used, ..record.recency };
        self.lru.update(*key, &mut record.recency, new);
        true
    }

    pub fn remove(&mut self, key: &Key) {
        let Some(IndexEntry { record, .. }) = self.entries.remove(key) else { return };
        self.bytes -= record.cost();
        self.lru.remove(*key, record.recency);
        self.sizes[self.class(&record)].subtract(record.cost());
        if record.fingerprint == self.fingerprint {
            let ends = &mut self.ends[record.kind as usize];
            let count = ends.get_mut(&record.end).expect("add counted this end");
            *count -= 1;
            if *count == 0 {
                ends.remove(&record.end);
            }
        }
    }

    /// Retains parts until `until` (seconds), or until the later time of an earlier call. Changes
    /// nothing and returns false if a part is missing, or if all retained parts would cost more than
    /// `most_bytes`.
    pub fn retain(&mut self, keys: &[Key], until: u64, now: u64, most_bytes: u64) -> bool {
        let all: BTreeSet<Key> = self.lru.retained(now).chain(keys.iter().copied()).collect();
        let costs: Option<Vec<u64>> =
            all.iter().map(|key| Some(self.entries.get(key)?.record.cost())).collect();
        if costs.is_none_or(|costs| costs.iter().sum::<u64>() > most_bytes) {
            return false;
        }
        for key in keys {
            let recency = &mut self.entries.get_mut(key).expect("just seen").record.recency;
            let retained_until = until.max(recency.retained_until);
            let new = Recency { retained_until, ..*recency };
            self.lru.update(*key, recency, new);
        }
        true
    }

    /// The parts that are retained at `now`, in seconds.
    pub fn retained(&self, now: u64) -> StoredSize {
        let mut size = StoredSize::default();
        self.lru.retained(now).for_each(|key| size.add(self.entries[&key].record.cost()));
        size
    }

    /// Evicts the least recently used parts until the others cost at most `budget` bytes, and
    /// returns their keys. Retained parts stay.
    pub fn shrink_to(&mut self, budget: u64, now: u64) -> Vec<Key> {
        let mut evicted = Vec::new();
        while self.bytes > budget
            && let Some(key) = self.lru.pop_oldest(now)
        {
            self.remove(&key);
            evicted.push(key);
        }
        evicted
    }

    /// Removes every part for which `is_wanted` is false.
    pub fn keep_only(&mut self, is_wanted: impl Fn(&IndexEntry) -> bool) {
        let unwanted = self.entries.iter().filter(|(_, entry)| !is_wanted(entry));
        let unwanted: Vec<Key> = unwanted.map(|(key, _)| *key).collect();
        unwanted.iter().for_each(|key| self.remove(key));
    }

    /// Cost of all parts together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// KV and state of this fingerprint, and parts of others.
    pub fn sizes(&self) -> [StoredSize; 3] {
        self.sizes
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Place of a part in [`PartIndex::sizes`].
    fn class(&self, record: &PartRecord) -> usize {
        if record.fingerprint == self.fingerprint { record.kind as usize } else { 2 }
    }
}
