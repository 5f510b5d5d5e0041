//! Eviction order: least recently used first, retained entries never.
//!
//! Pure bookkeeping, shared by the prefix cache and the prefix store. Times are passed in.

use std::collections::BTreeSet;

/// When an entry was last used, and until when it must not be evicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Recency {
    /// A reading of [`Lru::tick`].
    pub used: u64,
    /// Seconds since 1970; 0 for an entry that was never retained.
    pub retained_until: u64,
}

/// The keys of all evictable entries. The owner of an entry stores its [`Recency`] and passes it
/// back to find the entry's place.
pub(crate) struct Lru<K> {
    /// Last use and key.
    free: BTreeSet<(u64, K)>,
    /// End of the retention, last use and key.
    retained: BTreeSet<(u64, u64, K)>,
    clock: u64,
}

impl<K> Default for Lru<K> {
    fn default() -> Self {
        Self { free: BTreeSet::new(), retained: BTreeSet::new(), clock: 0 }
    }
}

impl<K: Copy + Ord> Lru<K> {
    /// The latest of `count` new consecutive readings of the clock. Readings are unique, at least
    /// `now`, and leave a gap to the previous ones.
    pub fn tick(&mut self, count: u64, now: u64) -> u64 {
        self.clock = now.max(self.clock + count + 1);
        self.clock
    }

    pub fn insert(&mut self, key: K, recency: Recency) {
        self.clock = self.clock.max(recency.used);
        if recency.retained_until > 0 {
            self.retained.insert((recency.retained_until, recency.used, key));
        } else {
            self.free.insert((recency.used, key));
        }
    }

    /// Removes an entry; false if it is not here.
    pub fn remove(&mut self, key: K, recency: Recency) -> bool {
        self.free.remove(&(recency.used, key))
            || self.retained.remove(&(recency.retained_until, recency.used, key))
    }

    /// Changes `recency` to `new`, and moves the entry if it is here.
    pub fn update(&mut self, key: K, recency: &mut Recency, new: Recency) {
        if self.remove(key, *recency) {
            self.insert(key, new);
        }
        *recency = new;
    }

    /// Removes the least recently used entry that is not retained at `now`.
    pub fn pop_oldest(&mut self, now: u64) -> Option<K> {
        while self.retained.first().is_some_and(|(until, ..)| *until <= now)
            && let Some((_, used, key)) = self.retained.pop_first()
        {
            self.free.insert((used, key));
        }
        self.free.pop_first().map(|(_, key)| key)
    }

    /// The entries that are retained at `now`.
    pub fn retained(&self, now: u64) -> impl Iterator<Item = K> {
        self.retained.iter().filter(move |(until, ..)| *until > now).map(|(.., key)| *key)
    }

    /// The most recently used entries, newest first: at most `count` of them, after at most as many that are retained
    /// longest.
    pub fn newest(&self, count: usize) -> impl Iterator<Item = K> {
        let retained = self.retained.iter().rev().take(count).map(|(.., key)| *key);
        retained.chain(self.free.iter().rev().take(count).map(|(_, key)| *key))
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.free.len() + self.retained.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recency(used: u64, retained_until: u64) -> Recency {
        Recency { used, retained_until }
    }

    #[test]
    fn oldest_free_entry_is_popped_first() {
        let mut lru = Lru::default();
        for (key, used) in [('a', 3), ('b', 1), ('c', 2)] {
            lru.insert(key, recency(used, 0));
        }
        let mut of_b = recency(1, 0);
        let used = lru.tick(1, 0);
        lru.update('b', &mut of_b, recency(used, 0));
        assert_eq!(of_b, recency(5, 0));
        assert!(lru.remove('a', recency(3, 0)) && !lru.remove('a', recency(3, 0)));
        lru.update('a', &mut recency(3, 0), recency(9, 0));
        let popped: Vec<char> = std::iter::from_fn(|| lru.pop_oldest(0)).collect();
        assert_eq!(popped, ['c', 'b'], "an update does not insert");
    }

    #[test]
    fn retained_entries_are_popped_only_after_their_time() {
        let mut lru = Lru::default();
        lru.insert('a', recency(1, 100));
        lru.insert('b', recency(2, 0));
        lru.insert('c', recency(3, 50));
        assert_eq!(lru.retained(49).collect::<String>(), "ca");
        assert_eq!(lru.pop_oldest(49), Some('b'));
        assert_eq!(lru.pop_oldest(49), None);
        assert_eq!(lru.retained(50).collect::<String>(), "a");
        assert_eq!(lru.pop_oldest(50), Some('c'));
        lru.insert('d', recency(4, 0));
        assert_eq!(lru.pop_oldest(100), Some('a'), "its use is older");
        // An entry whose retention is over is found by the recency that it had.
        lru.insert('e', recency(5, 60));
        assert_eq!(lru.pop_oldest(70), Some('d'));
        assert!(lru.remove('e', recency(5, 60)));
        assert_eq!(lru.pop_oldest(u64::MAX), None);
    }

    #[test]
    fn the_newest_entries_come_first_after_those_that_are_retained() {
        let mut lru = Lru::default();
        for (key, used, until) in
            [('a', 1, 0), ('b', 4, 0), ('c', 2, 50), ('d', 3, 70), ('e', 5, 0)]
        {
            lru.insert(key, recency(used, until));
        }
        assert_eq!(lru.newest(2).collect::<String>(), "dceb");
        assert_eq!(lru.newest(9).collect::<String>(), "dceba");
        assert_eq!(lru.newest(0).count(), 0);
    }

    #[test]
    fn clock_readings_are_unique_and_follow_the_time() {
        let mut lru = Lru::<u8>::default();
        lru.insert(0, recency(70, 0));
        assert_eq!(lru.tick(3, 10), 74);
        assert_eq!(lru.tick(1, 1000), 1000);
        assert_eq!(lru.tick(1, 1000), 1002);
    }
}
