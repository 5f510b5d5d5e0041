//! Drafts from the text itself: what followed the same tokens the last time.
//!
//! Every run of two, three and four tokens of prompt and reply points to the token that followed its
//! latest occurrence. The longest run at the end of the text gives the draft. The length of the match
//! selects an acceptance rate, which is learned from every committed token, drafted or not, at no
//! cost: the rates follow at once when the text starts or stops to repeat.
//!
//! Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); REST
//! (arXiv:2311.08252) for longest matches.

use std::collections::HashMap;

use super::{Drafter, MovingRate, Start};
use crate::cache::Cache;
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::Model;

/// Lengths of the runs that are indexed, longest first.
const RUNS: [usize; 3] = [4, 3, 2];

/// Tokens compared for the length of a match.
const LONGEST: usize = 32;

/// Classes of matches: least length, and the acceptance rate assumed before any observation.
const CLASSES: [(usize, f32); 7] =
    [(2, 0.3), (3, 0.4), (4, 0.5), (6, 0.65), (9, 0.75), (14, 0.85), (24, 0.9)];

pub struct NgramDrafter {
    /// Hash of a run, to the index of the token that followed it last.
    followers: HashMap<u64, u32>,
    rates: [MovingRate; CLASSES.len()],
    /// Best earlier occurrence of the end of the text: index of the token that followed it, and
    /// length of the match.
    found: Option<(usize, usize)>,
}

impl NgramDrafter {
    /// Indexes `tokens`.
    pub fn new(tokens: &[u32]) -> Self {
        let mut ngram = Self {
            followers: HashMap::with_capacity(RUNS.len() * tokens.len()),
            rates: CLASSES.map(|(_, prior)| MovingRate::prior(prior)),
            found: None,
        };
        for end in 1..=tokens.len() {
            ngram.index(&tokens[..end]);
        }
        ngram.find(tokens);
        ngram
    }

    /// Records the last token as the follower of each run before it.
    fn index(&mut self, tokens: &[u32]) {
        let last = tokens.len() - 1;
        for run in RUNS {
            if last >= run {
                // A context holds far fewer than 2^32 tokens.
                self.followers.insert(hash(&tokens[last - run..last]), last as u32);
            }
        }
    }

    /// Finds the earlier position with the longest match to the end of `tokens`.
    fn find(&mut self, tokens: &[u32]) {
        let match_length = |follower: usize| {
            let pairs = tokens.iter().rev().zip(tokens[..follower].iter().rev());
            pairs.take(LONGEST).take_while(|(a, b)| a == b).count()
        };
        // The previous match, one token on, may be longer than the latest occurrence.
        let continued = self.found.map(|(follower, _)| follower + 1).filter(|&f| f < tokens.len());
        let looked_up = RUNS.iter().filter(|&&run| tokens.len() >= run).find_map(|&run| {
            let follower = *self.followers.get(&hash(&tokens[tokens.len() - run..]))?;
            Some(follower as usize)
        });
        self.found = [looked_up, continued]
            .into_iter()
            .flatten()
            .map(|follower| (follower, match_length(follower)))
            .filter(|&(_, length)| length >= CLASSES[0].0)
            .max_by_key(|&(_, length)| length);
    }
}

impl Drafter for NgramDrafter {
    fn kind(&self) -> DraftKind {
        DraftKind::Ngram
    }

    fn acceptance_rates(&self) -> [f32; DEPTH] {
        let Some((_, length)) = self.found else { return [0.0; DEPTH] };
        std::array::from_fn(|i| self.rates[class(length + i)].value())
    }

    fn start(
        &mut self,
        _model: &dyn Model,
        _cache: &mut Cache,
        tokens: &[u32],
        depth: usize,
    ) -> Result<Start> {
        let Some((follower, _)) = self.found else { return Ok(Start::Nothing) };
        // A draft that reaches the end of the text continues it as a loop.
        let rest = &tokens[follower..];
        Ok(Start::Tokens(rest.iter().copied().cycle().take(depth).collect()))
    }

    fn learned_rates(&mut self) -> &mut [MovingRate] {
        &mut self.rates
    }

    /// Does nothing: `read` learns from every token.
    fn learn(&mut self, _judged: usize, _accepted: usize) -> Result<()> {
        Ok(())
    }

    fn read(&mut self, tokens: &[u32]) {
        if let Some((follower, length)) = self.found {
            let matches = tokens.last() == Some(&tokens[follower]);
            self.rates[class(length)].learn(matches);
            if !matches {
                self.found = None;
            }
        }
        self.index(tokens);
        self.find(tokens);
    }

    /// Builds the index again: rewound tokens may have overwritten earlier entries.
    fn rewind(&mut self, tokens: &[u32]) -> Result<()> {
        *self = Self { rates: self.rates, ..Self::new(tokens) };
        Ok(())
    }
}

/// Index in [`CLASSES`] of a match of this length.
fn class(length: usize) -> usize {
    CLASSES.iter().rposition(|&(least, _)| length >= least).unwrap_or(0)
}

/// FNV-1a over whole tokens. A collision costs a rejected draft, nothing else.
fn hash(run: &[u32]) -> u64 {
    run.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &token| {
        (hash ^ u64::from(token)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next token drafted after `text`, the first half of which is the prompt.
    fn draft(text: &[u32]) -> Option<u32> {
        let half = text.len() / 2;
        let mut ngram = NgramDrafter::new(&text[..half]);
        for end in half + 1..=text.len() {
            ngram.read(&text[..end]);
        }
        ngram.found.map(|(follower, _)| text[follower])
    }

    #[test]
    fn earlier_continuation_is_drafted() {
        assert_eq!(draft(&[1, 2, 3, 4, 5, 6, 7, 1, 2]), Some(3));
        assert_eq!(draft(&[1, 2, 3, 4, 5, 6, 7, 8, 2]), None);
        assert_eq!(draft(&[]), None);
        assert_eq!(draft(&[9]), None);
        assert_eq!(draft(&[9, 9, 9, 9]), Some(9));
    }

    /// `1 2` was followed by 7 last, but `5 1 2` by 3.
    #[test]
    fn longer_match_wins_over_later_match() {
        assert_eq!(draft(&[5, 1, 2, 3, 4, 4, 6, 1, 2, 7, 4, 5, 1, 2]), Some(3));
    }

    #[test]
    fn rates_follow_the_text() {
        let mut text: Vec<u32> = (0..40).collect();
        let mut ngram = NgramDrafter::new(&text);
        let mut push = |ngram: &mut NgramDrafter, token| {
            text.push(token);
            ngram.read(&text);
            ngram.acceptance_rates()[0]
        };
        // A copy of the first tokens: the rate rises.
        let rates: Vec<f32> = (0..30).map(|token| push(&mut ngram, token)).collect();
        assert_eq!(rates[0], 0.0);
        assert!(rates[29] > 0.9 && rates[29] > rates[2], "{rates:?}");
        // Pairs from the text, each followed by something new.
        for i in 0..60 {
            push(&mut ngram, 2 * i % 37);
            push(&mut ngram, 2 * i % 37 + 1);
            push(&mut ngram, 100 + i);
        }
        assert!(ngram.rates[0].value() < 0.1, "{:?}", ngram.rates);
    }
}
