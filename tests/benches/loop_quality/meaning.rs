//! Detectors of repeated meaning, as candidates.

use std::collections::{HashSet, VecDeque};
use std::io::Write;

use flate2::Compression as Level;
use flate2::write::DeflateEncoder;

/// Most of the newest n-grams occurred before.
pub struct Novelty {
    n: usize,
    window: usize,
    share: f64,
}

impl Novelty {
    /// Reports when the share of n-grams of the last `window` tokens that the text had before is at least `share`.
    pub fn new(n: usize, window: usize, share: f64) -> Self {
        Self { n, window, share }
    }

    /// The index of the first token with a report.
    pub fn first(&self, tokens: &[u32]) -> Option<usize> {
        let Self { n, window, share } = *self;
        let mut seen = HashSet::new();
        let mut newest = VecDeque::with_capacity(window + 1);
        let mut known = 0;
        for (index, gram) in tokens.windows(n).enumerate() {
            let is_known = !seen.insert(gram);
            known += usize::from(is_known);
            newest.push_back(is_known);
            if newest.len() > window {
                known -= usize::from(newest.pop_front() == Some(true));
            }
            if newest.len() == window && known as f64 >= share * window as f64 {
                return Some(index + n - 1);
            }
        }
        None
    }
}

/// The newest tokens compress well.
pub struct Compression {
    pub window: usize,
    pub ratio: f64,
}

/// Tokens between two looks.
const EVERY: usize = 64;

impl Compression {
    /// The index of the first token with a report.
    pub fn first(&self, tokens: &[u32]) -> Option<usize> {
        let Self { window, ratio } = *self;
        let mut ends = (window..=tokens.len()).step_by(EVERY);
        let is_found = |end: &usize| {
            // Two bytes a token, as text of one token is longer in one vocabulary than in another.
            let bytes: Vec<u8> = tokens[end - window..*end]
                .iter()
                .flat_map(|token| (*token as u16).to_le_bytes())
                .collect();
            let mut encoder = DeflateEncoder::new(Vec::new(), Level::new(6));
            encoder.write_all(&bytes).expect("memory");
            bytes.len() as f64 >= ratio * encoder.finish().expect("memory").len() as f64
        };
        ends.find(is_found).map(|end| end - 1)
    }
}
