//! Samples one request's tokens: its sampling parameters, and the biases and bans of its policy.
//!
//! The duration of a change is counted in sampled tokens: injected and rewound text does not shorten
//! it. Neither a bias nor a later ban loosens a ban.
//!
//! Makes the [`Row`] of each token of its request for [`super::rows`]; knows no policy, no sequence and no
//! array.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::noise::mix;
use super::row::Row;
use crate::policy::{SamplingPatch, TokenBias};
use crate::request::Sampling;

/// End of a change that lasts for the rest of the reply.
const NEVER: u64 = u64::MAX;

/// Sampling state of one request. A step, here, is one sampled and committed token.
#[derive(Debug, Clone)]
pub struct Sampler {
    seed: u64,
    sampling: Sampling,
    /// Temporary overrides, each with the step at which it ends. No parameter is in two of them.
    overrides: Vec<(SamplingPatch, u64)>,
    /// Banned tokens, each with the step at which the ban ends.
    bans: BTreeMap<u32, u64>,
    /// Biases of tokens' logits, each with the step at which it ends.
    biases: BTreeMap<u32, (f32, u64)>,
    /// Tokens sampled and committed, including those rewound since.
    steps: u64,
    /// The first step at which a temporary change ends.
    ends: u64,
    changes: u64,
    offsets: Option<Offsets>,
}

/// Offsets to logits, as in [`Row`], for the steps `from..until`.
#[derive(Debug, Clone)]
struct Offsets {
    from: u64,
    until: u64,
    values: Rc<[(u32, f32)]>,
}

impl Sampler {
    /// Samples with the noise of `seed`.
    pub fn new(sampling: Sampling, seed: u64) -> Self {
        Self {
            seed,
            sampling,
            overrides: Vec::new(),
            bans: BTreeMap::new(),
            biases: BTreeMap::new(),
            steps: 0,
            ends: NEVER,
            changes: 0,
            offsets: None,
        }
    }

    /// Changes sampling parameters for the next `steps` steps; 0 means for the rest of the reply.
    pub fn change(&mut self, change: SamplingPatch, steps: u32) {
        let until = self.until(steps);
        self.overrides.iter_mut().for_each(|(values, _)| *values = values.without(&change));
        self.overrides.retain(|(values, _)| !values.is_empty());
        if until == NEVER {
            self.sampling = self.sampling.with(&change);
        } else {
            self.overrides.push((change, until));
        }
        self.changed();
    }

    /// Bans `tokens` for the next `steps` steps; 0 means for the rest of the reply.
    pub fn ban(&mut self, tokens: &[u32], steps: u32) {
        let until = self.until(steps);
        for &token in tokens {
            let end = self.bans.entry(token).or_default();
            *end = until.max(*end);
        }
        self.changed();
    }

    /// Sets the biases of tokens for the next `steps` steps; 0 means for the rest of the reply.
    pub fn bias(&mut self, tokens: &[TokenBias], steps: u32) {
        let until = self.until(steps);
        for &TokenBias { token, bias } in tokens {
            self.biases.insert(token, (bias, until));
        }
        self.changed();
    }

    /// Number of changes, biases and bans so far.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Tokens sampled and committed so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Counts a sampled token that is being committed. Returns false if it is banned, which happens
    /// only if every token is.
    pub fn count_step(&mut self, token: u32) -> bool {
        let banned = self.bans.get(&token).is_some_and(|&until| self.steps < until);
        self.steps += 1;
        if self.steps >= self.ends {
            let now = self.steps;
            self.bans.retain(|_, until| now < *until);
            self.biases.retain(|_, (_, until)| now < *until);
            self.overrides.retain(|(_, until)| now < *until);
            self.ends = self.next_end();
        }
        !banned
    }

    /// How the token at position `index` is sampled, if it is the one of step `step`.
    pub fn row(&mut self, step: u64, index: usize) -> Row {
        let key = mix(self.seed, index as u64);
        Row { offsets: self.offsets(step), ..Row::new(self.sampling(step), key) }
    }

    /// How the tokens from position `index` on are sampled, if the first is the one of the next step.
    pub fn rows(&mut self, count: usize, index: usize) -> Vec<Row> {
        (0..count).map(|i| self.row(self.steps + i as u64, index + i)).collect()
    }

    fn sampling(&self, step: u64) -> Sampling {
        let active = self.overrides.iter().filter(|(_, until)| step < *until);
        active.fold(self.sampling, |sampling, (values, _)| sampling.with(values))
    }

    /// Biases and bans at `step` as offsets to logits.
    fn offsets(&mut self, step: u64) -> Rc<[(u32, f32)]> {
        if self.bans.is_empty() && self.biases.is_empty() {
            return Rc::default();
        }
        match &self.offsets {
            Some(offsets) if (offsets.from..offsets.until).contains(&step) => {
                offsets.values.clone()
            }
            _ => {
                let offsets = self.offsets_from(step);
                self.offsets.insert(offsets).values.clone()
            }
        }
    }

    fn offsets_from(&self, step: u64) -> Offsets {
        let biases = self.biases.iter().map(|(&token, &(bias, until))| (token, bias, until));
        // Bans come after the biases, so that no bias loosens a ban.
        let bans = self.bans.iter().map(|(&token, &until)| (token, f32::NEG_INFINITY, until));
        let mut values = BTreeMap::new();
        let mut ends = NEVER;
        for (token, offset, until) in biases.chain(bans).filter(|(_, _, until)| step < *until) {
            ends = ends.min(until);
            values.insert(token, offset);
        }
        Offsets { from: step, until: ends, values: values.into_iter().collect() }
    }

    fn until(&self, steps: u32) -> u64 {
        if steps == 0 { NEVER } else { self.steps + u64::from(steps) }
    }

    fn changed(&mut self) {
        self.changes += 1;
        self.offsets = None;
        self.ends = self.next_end();
    }

    fn next_end(&self) -> u64 {
        let bans = self.bans.values().copied();
        let biases = self.biases.values().map(|(_, until)| *until);
        let overrides = self.overrides.iter().map(|(_, until)| *until);
        bans.chain(biases).chain(overrides).min().unwrap_or(NEVER)
    }
}
