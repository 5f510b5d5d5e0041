//! How one request's tokens are drawn: the sampling in force, and what a policy biases or bans.
//!
//! What holds for some of the next tokens is counted in draws: text that is put in or taken back in
//! between uses nothing up. A ban is never loosened, by a later one as little as by a bias.
//!
//! Works on logits before [`super::sample`] sees them; knows no policy and no sequence.

use std::collections::BTreeMap;

use mlx_rs::Array;

use super::sample::{sample, sample_with_margin};
use crate::error::Result;
use crate::policy::{SamplingChange, TokenBias};
use crate::request::Sampling;

/// The draw before which something ends that lasts for the rest of the reply.
const NEVER: u64 = u64::MAX;

/// What a request's draws are made with.
#[derive(Debug, Clone)]
pub struct Adjust {
    temperature: Setting<f32>,
    top_p: Setting<f32>,
    top_k: Setting<u32>,
    min_p: Setting<f32>,
    /// Tokens that are not drawn, and the draw from which on they may be again.
    bans: BTreeMap<u32, u64>,
    /// What is added to tokens' logits, and the draw from which on it no longer is.
    biases: BTreeMap<u32, (f32, u64)>,
    /// Tokens that were drawn and committed, those taken back since included.
    draws: u64,
    /// The first draw at which something ends.
    ends: u64,
    changes: u64,
    offsets: Option<Offsets>,
}

/// A value that may give way to another for a while.
#[derive(Debug, Clone, Copy)]
struct Setting<T> {
    always: T,
    passing: Option<(T, u64)>,
}

impl<T: Copy> Setting<T> {
    fn new(always: T) -> Self {
        Self { always, passing: None }
    }

    fn set(&mut self, value: Option<T>, until: u64) {
        match value {
            None => {}
            Some(always) if until == NEVER => *self = Self::new(always),
            Some(value) => self.passing = Some((value, until)),
        }
    }

    fn at(&self, draw: u64) -> T {
        self.passing.filter(|(_, until)| draw < *until).map_or(self.always, |(value, _)| value)
    }

    fn ends(&self) -> Option<u64> {
        self.passing.map(|(_, until)| until)
    }
}

/// What is added to logits of so many columns, f32 [V], for the draws `from..until`.
#[derive(Debug, Clone)]
struct Offsets {
    from: u64,
    until: u64,
    columns: i32,
    array: Option<Array>,
}

impl Adjust {
    /// Draws by `sampling` alone.
    pub fn new(sampling: Sampling) -> Self {
        let Sampling { temperature, top_p, top_k, min_p } = sampling;
        Self {
            temperature: Setting::new(temperature),
            top_p: Setting::new(top_p),
            top_k: Setting::new(top_k),
            min_p: Setting::new(min_p),
            bans: BTreeMap::new(),
            biases: BTreeMap::new(),
            draws: 0,
            ends: NEVER,
            changes: 0,
            offsets: None,
        }
    }

    /// Another way to draw, for the next `steps` draws; 0 is for all.
    pub fn resample(&mut self, change: SamplingChange, steps: u32) {
        let until = self.until(steps);
        self.temperature.set(change.temperature, until);
        self.top_p.set(change.top_p, until);
        self.top_k.set(change.top_k, until);
        self.min_p.set(change.min_p, until);
        self.changed();
    }

    /// Does not draw `tokens` for the next `steps` draws; 0 is for all.
    pub fn ban(&mut self, tokens: &[u32], steps: u32) {
        let until = self.until(steps);
        for &token in tokens {
            let known = self.bans.entry(token).or_default();
            *known = until.max(*known);
        }
        self.changed();
    }

    /// Adds to tokens' logits for the next `steps` draws, 0 is for all, in place of what was added
    /// before.
    pub fn bias(&mut self, tokens: &[TokenBias], steps: u32) {
        let until = self.until(steps);
        for &TokenBias { token, bias } in tokens {
            self.biases.insert(token, (bias, until));
        }
        self.changed();
    }

    /// Counts what was asked for here.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Tokens that were drawn and committed.
    pub fn draws(&self) -> u64 {
        self.draws
    }

    /// Whether something is in force that will end: then not every token is drawn alike.
    pub fn is_passing(&self) -> bool {
        self.ends != NEVER
    }

    /// A token was drawn and committed; false where it is banned, which says that nothing else was
    /// left to draw.
    pub fn draw(&mut self, token: u32) -> bool {
        let banned = self.bans.get(&token).is_some_and(|&until| self.draws < until);
        self.draws += 1;
        if self.draws >= self.ends {
            let draws = self.draws;
            self.bans.retain(|_, until| draws < *until);
            self.biases.retain(|_, (_, until)| draws < *until);
            for setting in [&mut self.temperature, &mut self.top_p, &mut self.min_p] {
                setting.passing.take_if(|(_, until)| *until <= draws);
            }
            self.top_k.passing.take_if(|(_, until)| *until <= draws);
            self.ends = self.next_end();
        }
        !banned
    }

    /// [`sample`] from `logits` [R, V], for the draw `draw`.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects the shapes.
    pub fn sample(&mut self, logits: &Array, draw: u64, seed: u64, index: u64) -> Result<Array> {
        let sampling = self.sampling(draw);
        match self.offsets(draw, logits.dim(-1)) {
            Some(offsets) => sample(&logits.add(offsets)?, &sampling, seed, index),
            None => sample(logits, &sampling, seed, index),
        }
    }

    /// [`sample_with_margin`] from `logits` [R, V], for the draw `draw`.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX rejects the shapes.
    pub fn sample_with_margin(
        &mut self,
        logits: &Array,
        draw: u64,
        seed: u64,
        index: u64,
    ) -> Result<(Array, Array)> {
        let sampling = self.sampling(draw);
        let offsets = self.offsets(draw, logits.dim(-1));
        sample_with_margin(logits, offsets, &sampling, seed, index)
    }

    fn sampling(&self, draw: u64) -> Sampling {
        Sampling {
            temperature: self.temperature.at(draw),
            top_p: self.top_p.at(draw),
            top_k: self.top_k.at(draw),
            min_p: self.min_p.at(draw),
        }
    }

    /// What is added to logits, f32 [columns], if anything.
    fn offsets(&mut self, draw: u64, columns: i32) -> Option<&Array> {
        if self.bans.is_empty() && self.biases.is_empty() {
            return None;
        }
        let fits = |o: &Offsets| o.columns == columns && (o.from..o.until).contains(&draw);
        if !self.offsets.as_ref().is_some_and(fits) {
            self.offsets = Some(self.offsets_from(draw, columns));
        }
        self.offsets.as_ref().and_then(|offsets| offsets.array.as_ref())
    }

    fn offsets_from(&self, draw: u64, columns: i32) -> Offsets {
        let biases = self.biases.iter().map(|(&token, &(bias, until))| (token, bias, until));
        // Behind the biases, so that no bias loosens a ban.
        let bans = self.bans.iter().map(|(&token, &until)| (token, f32::NEG_INFINITY, until));
        let mut values = vec![0.0; columns as usize];
        let (mut ends, mut any) = (NEVER, false);
        for (token, offset, until) in biases.chain(bans).filter(|(_, _, until)| draw < *until) {
            ends = ends.min(until);
            if let Some(value) = values.get_mut(token as usize) {
                (*value, any) = (offset, true);
            }
        }
        let array = any.then(|| Array::from_slice(&values, &[columns]));
        Offsets { from: draw, until: ends, columns, array }
    }

    fn until(&self, steps: u32) -> u64 {
        if steps == 0 { NEVER } else { self.draws + u64::from(steps) }
    }

    fn changed(&mut self) {
        self.changes += 1;
        self.offsets = None;
        self.ends = self.next_end();
    }

    fn next_end(&self) -> u64 {
        let bans = self.bans.values().copied();
        let biases = self.biases.values().map(|(_, until)| *until);
        let sampling = [&self.temperature, &self.top_p, &self.min_p].map(Setting::ends);
        let sampling = sampling.into_iter().chain([self.top_k.ends()]).flatten();
        bans.chain(biases).chain(sampling).min().unwrap_or(NEVER)
    }
}
