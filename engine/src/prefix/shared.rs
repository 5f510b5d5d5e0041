//! The KV of prefixes that running requests share.
//!
//! The prefix cache has KV of its own, in runs of tokens. A running request needs it in one buffer, a copy. The first
//! request with a long prefix makes its copy a shared one, and the others take it as their first rows.

use std::rc::{Rc, Weak};

use crate::cache::{Cache, SharedPart, SharedRows};
use crate::error::Result;

/// Tokens of the shortest prefix that is worth sharing.
pub const SHORTEST: usize = 512;

/// A cache shares rows that are at least this part of those that it resumes from. Those of a short prefix would keep it
/// from sharing a long one.
const LEAST_PART: usize = 4;

/// Shared rows, as long as a cache has them.
#[derive(Debug, Default)]
pub struct SharedPrefixes {
    /// Tokens of the shortest prefix that is shared; `None` if none is.
    shortest: Option<usize>,
    live: Vec<(Vec<u32>, Weak<SharedRows>)>,
}

impl SharedPrefixes {
    /// Shares prefixes of at least so many tokens from now on.
    pub fn set_shortest(&mut self, shortest: Option<usize>) {
        self.shortest = shortest;
    }

    /// Whether any prefix is shared.
    pub fn is_on(&self) -> bool {
        self.shortest.is_some()
    }

    /// Offers later requests nothing of what is shared now.
    pub fn forget(&mut self) {
        self.live.clear();
    }

    /// What is shared of the beginning of `tokens`, and the number of tokens. `None` if too few are.
    pub fn find(&self, tokens: &[u32]) -> Option<(Rc<SharedRows>, usize)> {
        let common = |(prefix, rows): &(Vec<u32>, Weak<SharedRows>)| {
            let common = prefix.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            Some((rows.upgrade()?, common))
        };
        let longest = self.live.iter().filter_map(common).max_by_key(|&(_, common)| common);
        let is_enough = |count| {
            self.shortest.is_some_and(|shortest| count >= shortest)
                && count * LEAST_PART >= tokens.len()
        };
        let (rows, common) = longest?;
        let count = SharedRows::whole_blocks(common);
        is_enough(count).then_some((rows, count))
    }

    /// Shares the rows of `cache`, which holds exactly `tokens`, if they are enough and it shares none yet.
    pub fn share(&mut self, cache: &mut Cache, tokens: &[u32]) -> Result<()> {
        debug_assert_eq!(cache.position, tokens.len());
        let count = SharedRows::whole_blocks(tokens.len());
        let is_long = self.shortest.is_some_and(|shortest| count >= shortest);
        if !is_long || cache.shared().is_some() {
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

/// The first `count` of `rows`.
pub fn part((rows, count): &(Rc<SharedRows>, usize)) -> SharedPart<'_> {
    SharedPart { rows, count: *count }
}
