//! The KV of prefixes that running requests share.
//!
//! The prefix cache has KV of its own, in runs of tokens. A running request needs it in one buffer, a copy. The first
//! request with a long prefix makes its copy a shared one, and the others take it as their first rows.

use std::cmp::Reverse;
use std::rc::{Rc, Weak};

use crate::cache::{Cache, SharedPart, SharedRows};
use crate::error::Result;

/// Tokens of the shortest prefix that is worth sharing.
pub const SHORTEST: usize = 512;

/// A cache shares rows only if it uses this part of them, and they are this part of those that it resumes from. A few rows
/// would hold a buffer of many, and those of a short prefix keep it from sharing a long one.
const LEAST_PART: usize = 4;

/// Shared rows, as long as a cache has them.
#[derive(Debug, Default)]
pub struct SharedPrefixes {
    /// Tokens of the shortest prefix that is shared; `None` if none is.
    shortest: Option<usize>,
    live: Vec<(Vec<u32>, Weak<SharedRows>)>,
}

impl SharedPrefixes {
    /// Sets the number of tokens of the shortest prefix that is shared; `None` to share none.
    pub fn set_shortest(&mut self, shortest: Option<usize>) {
        self.shortest = shortest;
    }

    /// Whether any prefix is shared.
    pub fn is_on(&self) -> bool {
        self.shortest.is_some()
    }

    /// What is shared of the beginning of `tokens`; `None` if that is too little.
    pub fn find(&self, tokens: &[u32]) -> Option<SharedPart> {
        self.longest(tokens).filter(|part| part.count * LEAST_PART >= tokens.len())
    }

    /// [`SharedPrefixes::find`], however few of `tokens` are shared.
    pub fn longest(&self, tokens: &[u32]) -> Option<SharedPart> {
        let shortest = self.shortest?;
        let common = |(prefix, rows): &(Vec<u32>, Weak<SharedRows>)| {
            let common = prefix.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            let (rows, count) = (rows.upgrade()?, SharedRows::whole_blocks(common));
            let is_enough = count >= shortest && count * LEAST_PART >= rows.rows();
            is_enough.then_some(SharedPart { rows, count })
        };
        let found = self.live.iter().filter_map(common);
        found.max_by_key(|part| (part.count, Reverse(part.rows.rows())))
    }

    /// Whether the rows of `cache` are worth sharing when it has `tokens` rows: its own ones are enough, and at least as many
    /// as it shares.
    pub fn will_share(&self, cache: &Cache, tokens: usize) -> bool {
        let shared = cache.shared_count();
        let own = SharedRows::whole_blocks(tokens).saturating_sub(shared);
        self.shortest.is_some_and(|shortest| own >= shortest.max(shared).max(1))
    }

    /// Shares the rows of `cache`, which holds exactly `tokens`, if they are worth it.
    pub fn share(&mut self, cache: &mut Cache, tokens: &[u32]) -> Result<()> {
        debug_assert_eq!(cache.position, tokens.len());
        if !self.will_share(cache, tokens.len()) {
            return Ok(());
        }
        let rows = cache.share()?;
        self.live.retain(|(_, rows)| rows.strong_count() > 0);
        self.live.push((tokens[..rows.rows()].to_vec(), Rc::downgrade(&rows)));
        Ok(())
    }

    /// Bytes of all shared rows.
    pub fn bytes(&self) -> u64 {
        self.live.iter().filter_map(|(_, rows)| rows.upgrade()).map(|rows| rows.bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Full, LayerCache};
    use crate::prefix::Prefixes;
    use mlx_rs::ops::ones;

    fn empty() -> Cache {
        Cache::new(vec![LayerCache::Full(Full::new(1, 16))])
    }

    fn append(cache: &mut Cache, rows: usize) {
        let LayerCache::Full(full) = &mut cache.layers[0] else { unreachable!() };
        full.append(&ones::<f32>(&[1, 2, rows as i32, 16]).unwrap()).unwrap();
        cache.position += rows;
    }

    fn cache_of(rows: usize) -> Cache {
        let mut cache = empty();
        append(&mut cache, rows);
        cache
    }

    /// Tokens that begin alike.
    fn tokens(common: usize, others: usize, of: u32) -> Vec<u32> {
        (0..common as u32).chain((0..others as u32).map(|i| 10_000 * of + i)).collect()
    }

    fn count(found: Option<SharedPart>) -> usize {
        found.map_or(0, |part| part.count)
    }

    #[test]
    fn rows_are_found_by_their_tokens_while_a_cache_has_them() {
        let mut shared = SharedPrefixes::default();
        let mut cache = cache_of(200);
        shared.share(&mut cache, &tokens(200, 0, 0)).unwrap();
        assert_eq!(count(shared.find(&tokens(200, 9, 1))), 0, "nothing is shared yet");
        shared.set_shortest(Some(128));
        shared.share(&mut cache, &tokens(200, 0, 0)).unwrap();
        assert_eq!(count(shared.find(&tokens(200, 9, 1))), 192);
        assert_eq!(count(shared.find(&tokens(130, 100, 1))), 128);
        assert_eq!(count(shared.find(&tokens(127, 100, 1))), 0, "too short");
        let second = cache.clone();
        drop(cache);
        assert_eq!(count(shared.find(&tokens(200, 9, 1))), 192);
        drop(second);
        assert_eq!((count(shared.find(&tokens(200, 9, 1))), shared.bytes()), (0, 0));
    }

    #[test]
    fn few_rows_neither_hold_a_long_buffer_nor_replace_a_long_prefix() {
        let mut shared = SharedPrefixes::default();
        shared.set_shortest(Some(64));
        let mut long = cache_of(1024);
        shared.share(&mut long, &tokens(1024, 0, 0)).unwrap();
        assert_eq!(count(shared.find(&tokens(255, 100, 1))), 0);
        assert_eq!(count(shared.find(&tokens(256, 100, 1))), 256);
        let mut short = cache_of(100);
        shared.share(&mut short, &tokens(100, 0, 0)).unwrap();
        assert_eq!(count(shared.find(&tokens(100, 156, 1))), 64);
        assert_eq!(count(shared.find(&tokens(100, 157, 1))), 0);
        assert_eq!(count(shared.longest(&tokens(100, 157, 1))), 64);
        // With as many of its own, it shares all of them.
        append(&mut short, 27);
        shared.share(&mut short, &tokens(100, 27, 2)).unwrap();
        assert_eq!(short.shared_count(), 64);
        append(&mut short, 1);
        shared.share(&mut short, &tokens(100, 28, 2)).unwrap();
        assert_eq!((short.shared_count(), count(shared.find(&tokens(100, 28, 2)))), (128, 128));
    }

    /// KV that is larger than the prefix cache.
    #[test]
    fn a_request_resumes_from_rows_that_only_another_one_has() {
        let mut prefixes = Prefixes::new(empty(), 0, None, 0).unwrap();
        prefixes.share_from(Some(64));
        let mut running = cache_of(200);
        prefixes.share(&mut running, &tokens(200, 0, 0)).unwrap();
        let prompt = tokens(150, 50, 1);
        assert_eq!((prefixes.known_tokens(&prompt), prefixes.shared_rows(&prompt)), (128, 128));
        let (cache, length) = prefixes.resume(&prompt).unwrap();
        assert_eq!((cache.position, cache.shared_count(), length), (128, 128, 128));
        drop(running);
        drop(cache);
        assert_eq!((prefixes.known_tokens(&prompt), prefixes.resume(&prompt).unwrap().1), (0, 0));
    }
}
