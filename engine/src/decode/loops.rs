//! Finds loops in a stream of tokens: exact repeats, and near-repeats in which a counter changes.
//!
//! For every lag l up to the longest period the detector keeps how well the newest tokens agree
//! with those l tokens before them; a period of p tokens shows as agreement at lag p.
//! - **Exact**: the length of the run of equal tokens at that lag.
//! - **Near**: the score of the best local alignment of the stream with itself that ends at lag l,
//!   +(1 - s) for an equal token and -s for a changed, added or missing one, never below zero. So
//!   it stays positive just while the share of equal tokens stays above the similarity s. An added
//!   token moves the alignment to lag l + 1, a missing one to l - 1: "Attempt 9" becoming "Attempt
//!   10" shifts the period by one and costs no more than any other changed token.
//!
//! Decides nothing: thresholds come from the policy, and so does what a loop means. Knows tokens,
//! not text.
//!
//! # Why
//! n-gram counts (m5-infer: a 6-gram, 3 repeats, within 128 tokens) miss every period of half the
//! window or more, and every near-repeat whose counter cuts the n-grams. A suffix automaton finds
//! exact repeats of any period in O(1) a token, but not near ones. All lags at once cost O(period)
//! a token in 16-bit lanes, which the compiler vectorises: 0.0 us a token for 1,024 lags,
//! next to milliseconds for a decoding step; memory is 20 KiB whatever the length of the stream.
//!
//! Source: Smith and Waterman 1981 (local alignment), restricted to a band of lags.

use crate::policy::{LoopReport, LoopRule};

/// Longest period that is looked for, in tokens. Bounds memory and time a token.
pub const PERIODS: usize = 1024;

/// Near-repeats need this many times the repeats and the tokens of exact ones: a list of similar
/// lines is often meant, a block repeated word for word seldom.
pub const NEAR_EVIDENCE: u32 = 2;

/// Consecutive changed tokens that end a near-repeat, however long it has been one.
const CHANGES: i16 = 16;

/// Scores are in this fraction of a token, so that they fit 16 bits.
const SCALE: f32 = 256.0;

/// Watches one phase of one request.
#[derive(Debug, Clone)]
pub struct Detector {
    periods: usize,
    min_tokens: u32,
    /// The newest `periods` tokens, folded, are the last ones; grows to four times as many, then
    /// is cut. It begins with zeros: a stream that runs on from them is a loop of period 1 anyway.
    tokens: Vec<i16>,
    /// Tokens until a loop may be reported again.
    quiet: u32,
    exact: Exact,
    near: Option<Near>,
}

impl Detector {
    /// A detector with the thresholds of `rule`, clamped to what makes sense.
    pub fn new(rule: LoopRule) -> Self {
        let periods = (rule.max_period as usize).clamp(1, PERIODS);
        let repeats = rule.repeats.max(2);
        let min_tokens = rule.min_tokens.max(2);
        // A similarity that is no number turns near-repeats off, as 1 does.
        let is_near = rule.similarity < 1.0;
        let near_repeats = repeats.saturating_mul(NEAR_EVIDENCE);
        let near_tokens = min_tokens.saturating_mul(NEAR_EVIDENCE);
        Self {
            periods,
            min_tokens,
            tokens: vec![0; periods],
            quiet: 0,
            exact: Exact::new(needs(periods, repeats, min_tokens)),
            near: is_near.then(|| {
                Near::new(needs(periods, near_repeats, near_tokens), rule.similarity.max(0.5))
            }),
        }
    }

    /// Takes the next token, and reports a loop when one is found; again with every further
    /// `min_tokens` tokens that it goes on. Of several periods that fit, the shortest.
    pub fn push(&mut self, token: u32) -> Option<LoopReport> {
        let token = fold(token);
        let past = &self.tokens[self.tokens.len() - self.periods..];
        let is_exact = self.exact.push(past, token);
        let is_near = self.near.as_mut().is_some_and(|near| near.push(past, token));
        if self.tokens.len() == 4 * self.periods {
            self.tokens.drain(..3 * self.periods);
        }
        self.tokens.push(token);
        self.quiet = self.quiet.saturating_sub(1);
        if self.quiet > 0 || !(is_exact || is_near) {
            return None;
        }
        self.quiet = self.min_tokens;
        let (lag, length) = match &self.near {
            Some(near) if !is_exact => near.found(),
            _ => self.exact.found(),
        };
        let repeats = length as u32 / lag as u32 + 1;
        Some(LoopReport { period: lag as u32, repeats, exact: is_exact })
    }

    /// Forgets all tokens: a new phase begins.
    pub fn reset(&mut self) {
        self.tokens.clear();
        self.tokens.resize(self.periods, 0);
        self.quiet = 0;
        self.exact.run.fill(0);
        if let Some(near) = &mut self.near {
            near.clear();
        }
    }
}

/// A token in 16 bits, like all that is kept a lag. Two of them are confused once in 65,536 pairs;
/// for a false loop all that differs between its repeats would have to be.
fn fold(token: u32) -> i16 {
    (token.wrapping_mul(0x9e37_79b1) >> 16) as i16
}

/// Tokens that must agree at each lag, longest lag first: all repeats but the first one, and
/// enough to cover `min_tokens` together with it. Too many for 16 bits are never reached.
fn needs(periods: usize, repeats: u32, min_tokens: u32) -> Vec<i16> {
    let need = |lag: u32| lag.saturating_mul(repeats - 1).max(min_tokens.saturating_sub(lag));
    let lags = (1..=periods as u32).rev();
    lags.map(|lag| i16::try_from(need(lag)).unwrap_or(i16::MAX)).collect()
}

/// Longest run or alignment that is counted, one below a need that is never reached.
const LENGTH_MOST: i16 = i16::MAX - 1;

/// The shortest lag whose length is what it needs.
fn shortest(length: &[i16], need: &[i16]) -> (usize, i16) {
    let at = length.iter().zip(need).rposition(|(length, need)| length >= need);
    let at = at.expect("called when push has found one");
    (length.len() - at, length[at])
}

/// Runs of equal tokens. Index i is lag `periods - i`, so that the lags lie in memory as the past
/// tokens do.
#[derive(Debug, Clone)]
struct Exact {
    need: Vec<i16>,
    run: Vec<i16>,
}

impl Exact {
    fn new(need: Vec<i16>) -> Self {
        Self { run: vec![0; need.len()], need }
    }

    /// Whether any lag has what it needs.
    fn push(&mut self, past: &[i16], token: i16) -> bool {
        // Saturating arithmetic is one instruction on vectors, and has no check to fail.
        let mut most = i16::MIN;
        for ((run, need), old) in self.run.iter_mut().zip(&self.need).zip(past) {
            let longer = run.saturating_add(1).min(LENGTH_MOST);
            *run = if *old == token { longer } else { 0 };
            most = most.max(run.saturating_sub(*need));
        }
        most >= 0
    }

    /// The shortest lag that has what it needs, and its run.
    fn found(&self) -> (usize, i16) {
        shortest(&self.run, &self.need)
    }
}

/// Alignments in which tokens may differ. Index i + 1 is lag `periods - i`: one more lag at both
/// ends, always zero, stands in for the neighbours that the first and the last one lack.
#[derive(Debug, Clone)]
struct Near {
    need: Vec<i16>,
    equal: i16,
    changed: i16,
    most: i16,
    /// Score of the alignment that ends at each lag.
    score: Vec<i16>,
    /// Tokens that it covers.
    length: Vec<i16>,
    next_score: Vec<i16>,
    next_length: Vec<i16>,
}

impl Near {
    fn new(need: Vec<i16>, similarity: f32) -> Self {
        let lanes = need.len() + 2;
        let equal = ((1.0 - similarity) * SCALE).round().max(1.0) as i16;
        let changed = SCALE as i16 - equal;
        Self {
            need,
            equal,
            changed,
            // A cap lets an alignment end soon after its loop has ended; it only makes the
            // threshold stricter.
            most: changed * CHANGES,
            score: vec![0; lanes],
            length: vec![0; lanes],
            next_score: vec![0; lanes],
            next_length: vec![0; lanes],
        }
    }

    /// Whether any lag has what it needs.
    fn push(&mut self, past: &[i16], token: i16) -> bool {
        let lags = self.need.len();
        let (equal, changed, cap) = (self.equal, self.changed, self.most);
        // Slices of known lengths, so that the compiler drops the bounds checks and vectorises.
        let (past, need) = (&past[..lags], &self.need[..lags]);
        let (score, length) = (&self.score[..lags + 2], &self.length[..lags + 2]);
        let next_score = &mut self.next_score[1..=lags];
        let next_length = &mut self.next_length[1..=lags];
        let mut most = i16::MIN;
        for i in 0..lags {
            let gain = if past[i] == token { equal } else { -changed };
            // The same lag; or a token was missing (the lag shrank); or this one is added (it grew).
            let stays = score[i + 1].saturating_add(gain);
            let shrinks = score[i].saturating_add(gain).saturating_sub(changed);
            let grows = score[i + 2].saturating_sub(changed);
            let covers = if shrinks > stays { length[i] } else { length[i + 1] };
            let best = stays.max(shrinks);
            let covers = if grows > best { length[i + 2] } else { covers };
            let best = best.max(grows).min(cap);
            let covers = covers.saturating_add(1).min(LENGTH_MOST);
            next_score[i] = best.max(0);
            next_length[i] = if best > 0 { covers } else { 0 };
            most = most.max(next_length[i].saturating_sub(need[i]));
        }
        std::mem::swap(&mut self.score, &mut self.next_score);
        std::mem::swap(&mut self.length, &mut self.next_length);
        most >= 0
    }

    fn found(&self) -> (usize, i16) {
        shortest(&self.length[1..=self.need.len()], &self.need)
    }

    fn clear(&mut self) {
        self.score.fill(0);
        self.length.fill(0);
    }
}

#[cfg(test)]
mod tests;
