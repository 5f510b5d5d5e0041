//! Drafts from the text itself: what followed the same tokens the last time.
//!
//! Every run of two, three and four tokens of prompt and reply points to what came after it most
//! recently. The longest that the text now ends with gives the guess; how far the two places agree
//! further back says how much to trust it, and is learned from every token, drafted or not, at no
//! cost: text that begins to repeat is noticed at once, text that stops repeating too.
//!
//! Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); REST
//! (arXiv:2311.08252) for longest matches.

use std::collections::HashMap;

use mlx_rs::Array;

use super::{At, Chance, Draft};
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;

/// Lengths of the runs that are looked up, longest first.
const RUNS: [usize; 3] = [4, 3, 2];

/// Agreement further back than this changes nothing.
const LONGEST: usize = 32;

/// Least agreement of each class of trust, with what is expected of it before anything is known.
const TRUST: [(usize, f32); 7] =
    [(2, 0.3), (3, 0.4), (4, 0.5), (6, 0.65), (9, 0.75), (14, 0.85), (24, 0.9)];

/// What the text says of its own continuation.
pub struct Ngram {
    /// A run, hashed, to the index of the token that followed it last.
    followers: HashMap<u64, u32>,
    trust: [Chance; TRUST.len()],
    /// Where the text was like this before: index of the token that followed, and how many tokens
    /// before it agree.
    found: Option<(usize, usize)>,
}

impl Ngram {
    /// Knows `tokens`, all but the last of which may already be elsewhere in the text.
    pub fn new(tokens: &[u32]) -> Self {
        let mut ngram = Self {
            followers: HashMap::with_capacity(RUNS.len() * tokens.len()),
            trust: TRUST.map(|(_, prior)| Chance::prior(prior)),
            found: None,
        };
        for end in 1..=tokens.len() {
            ngram.index(&tokens[..end]);
        }
        ngram.find(tokens);
        ngram
    }

    /// Notes what follows each run that ends with the last token's predecessor.
    fn index(&mut self, tokens: &[u32]) {
        let last = tokens.len() - 1;
        for run in RUNS {
            if last >= run {
                self.followers.insert(hash(&tokens[last - run..last]), last as u32);
            }
        }
    }

    /// Looks for the best earlier place that ends as `tokens` does.
    fn find(&mut self, tokens: &[u32]) {
        let agreement = |follower: usize| {
            let pairs = tokens.iter().rev().zip(tokens[..follower].iter().rev());
            pairs.take(LONGEST).take_while(|(a, b)| a == b).count()
        };
        // The place that was right so far, one token on, may agree further back than the latest.
        let going_on = self.found.map(|(follower, _)| follower + 1).filter(|&f| f < tokens.len());
        let looked_up = RUNS.iter().filter(|&&run| tokens.len() >= run).find_map(|&run| {
            let follower = *self.followers.get(&hash(&tokens[tokens.len() - run..]))?;
            Some(follower as usize)
        });
        self.found = [looked_up, going_on]
            .into_iter()
            .flatten()
            .map(|follower| (follower, agreement(follower)))
            .filter(|&(_, agree)| agree >= TRUST[0].0)
            .max_by_key(|&(_, agree)| agree);
    }
}

impl Draft for Ngram {
    fn kind(&self) -> DraftKind {
        DraftKind::Ngram
    }

    fn chances(&self) -> [f32; DEPTH] {
        let Some((_, agree)) = self.found else { return [0.0; DEPTH] };
        std::array::from_fn(|i| self.trust[class(agree + i)].value())
    }

    fn propose(&mut self, at: &mut At<'_>, depth: usize) -> Result<Option<Array>> {
        let Some((follower, _)) = self.found else { return Ok(None) };
        // A guess that reaches the text's end goes on as the loop that it then is.
        let rest = &at.tokens[follower..];
        let guess: Vec<u32> = rest.iter().copied().cycle().take(depth).collect();
        Ok(Some(Array::from_slice(&guess, &[guess.len() as i32])))
    }

    fn learned(&mut self) -> &mut [Chance] {
        &mut self.trust
    }

    /// Nothing: [`Ngram::read`] learns from every token.
    fn learn(&mut self, _judged: usize, _accepted: usize) -> Result<()> {
        Ok(())
    }

    fn read(&mut self, tokens: &[u32]) {
        if let Some((follower, agree)) = self.found {
            let held = tokens.last() == Some(&tokens[follower]);
            self.trust[class(agree)].learn(held);
            if !held {
                self.found = None;
            }
        }
        self.index(tokens);
        self.find(tokens);
    }

    /// Reads all of it again: an earlier place may have been overwritten by one that is gone.
    fn rewind(&mut self, tokens: &[u32]) -> Result<()> {
        *self = Self { trust: self.trust, ..Self::new(tokens) };
        Ok(())
    }
}

/// Which class of trust so much agreement is in.
fn class(agree: usize) -> usize {
    TRUST.iter().rposition(|&(least, _)| agree >= least).unwrap_or(0)
}

/// FNV-1a over whole tokens. Runs that collide cost a wrong guess, nothing else.
fn hash(run: &[u32]) -> u64 {
    run.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &token| {
        (hash ^ u64::from(token)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guess after reading `text` a token at a time, the last half of it beyond the prompt.
    fn guess(text: &[u32]) -> Option<u32> {
        let half = text.len() / 2;
        let mut ngram = Ngram::new(&text[..half]);
        for end in half + 1..=text.len() {
            ngram.read(&text[..end]);
        }
        ngram.found.map(|(follower, _)| text[follower])
    }

    #[test]
    fn what_followed_before_is_guessed_again() {
        assert_eq!(guess(&[1, 2, 3, 4, 5, 6, 7, 1, 2]), Some(3));
        assert_eq!(guess(&[1, 2, 3, 4, 5, 6, 7, 8, 2]), None);
        assert_eq!(guess(&[]), None);
        assert_eq!(guess(&[9]), None);
        assert_eq!(guess(&[9, 9, 9, 9]), Some(9));
    }

    /// `1 2` was followed by 7 last, but `5 1 2` by 3.
    #[test]
    fn a_longer_agreement_wins_over_a_later_one() {
        assert_eq!(guess(&[5, 1, 2, 3, 4, 4, 6, 1, 2, 7, 4, 5, 1, 2]), Some(3));
    }

    #[test]
    fn trust_follows_what_happens() {
        let mut text: Vec<u32> = (0..40).collect();
        let mut ngram = Ngram::new(&text);
        let mut say = |ngram: &mut Ngram, token| {
            text.push(token);
            ngram.read(&text);
            ngram.chances()[0]
        };
        // Copies the first tokens: ever surer.
        let chances: Vec<f32> = (0..30).map(|token| say(&mut ngram, token)).collect();
        assert_eq!(chances[0], 0.0);
        assert!(chances[29] > 0.9 && chances[29] > chances[2], "{chances:?}");
        // Pairs from the text that are followed by anything but what followed there.
        for i in 0..60 {
            say(&mut ngram, 2 * i % 37);
            say(&mut ngram, 2 * i % 37 + 1);
            say(&mut ngram, 100 + i);
        }
        assert!(ngram.trust[0].value() < 0.1, "{:?}", ngram.trust);
    }
}
