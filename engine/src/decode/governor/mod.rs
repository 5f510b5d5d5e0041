//! Chooses which sequences draft in the next pass, with which drafter and how deep, so that the pass commits
//! the most tokens a second. Often that is nobody.
//!
//! It knows the cost of passes on this machine ([`Costs`]) and the acceptance rates in each text
//! ([`Drafter::acceptance_rates`]). A draft of depth m with acceptance rates a_i adds
//! a_1 + a_1 a_2 + ... tokens to a pass, for m drafted tokens and as many further rows. Drafted tokens of
//! all sequences are added in the order of their chances, as long as the pass commits more tokens a second
//! for it; the best pass wins, the one without drafts included. One sequence alone is the same with fewer
//! candidates.
//!
//! A drafter that is not used learns nothing, so each one is tried again from time to time, less and
//! less often if it still does not pay.
//!
//! Source: the expected gain is that of arXiv:2211.17192, section 3.3.

mod costs;
#[cfg(test)]
mod tests;

pub use costs::{Costs, Drafted, ROWS, greedy_pass, probe_tokens};

use super::draft::{Drafter, MovingRate};
use crate::config::DraftKind;

/// Least expected speed over plain decoding: the expectation is an estimate.
const GAIN: f32 = 1.1;

/// Fewest and most steps between trials of a drafter that is not in use. A trial costs about one
/// token (the drafter may have to catch up first), so the longest wait costs a few thousandths.
const TRIAL_INTERVAL: [u32; 2] = [8, 512];

/// Most tokens of a trial.
const TRIAL_DEPTH: usize = 2;

/// After this many accepted trials in a row, trials that still do not pay become rarer again.
const ACCEPTED_TRIALS: u32 = 4;

/// The drafter of a step, by its index in the sequence's drafters, and the depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    pub drafter: usize,
    /// Most tokens to draft.
    pub depth: usize,
    /// Whether this is a trial of a drafter whose rates are old.
    pub is_trial: bool,
}

/// How the governor chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By costs and acceptance rates.
    Auto,
    /// The first drafter that can draft, always at this depth: for tests and measurements.
    Always(usize),
}

/// What the governor knows of one sequence.
#[derive(Debug, Clone)]
pub struct Governor {
    mode: Mode,
    depth: usize,
    /// Share of verified rows without a near-tie.
    confident: MovingRate,
    trials: [Trial; DraftKind::ALL.len()],
}

/// When a drafter is tried again.
#[derive(Debug, Clone, Copy)]
struct Trial {
    /// Steps between trials.
    interval: u32,
    /// Steps since it drafted last.
    since: u32,
    /// Accepted trials in a row, each of which brings the next one early.
    accepted: u32,
}

impl Governor {
    /// A governor that has learned nothing. Drafts are at most `depth` deep.
    pub fn new(mode: Mode, depth: usize) -> Self {
        let trial = Trial { interval: TRIAL_INTERVAL[0], since: 0, accepted: 0 };
        let trials = [trial; DraftKind::ALL.len()];
        Self { mode, depth, confident: MovingRate::prior(1.0), trials }
    }

    /// What the sequence could draft in a pass of `streams` sequences, at most `room` tokens; `None` if it
    /// must not draft.
    ///
    /// `unread`: its sampled token is still being computed, so an n-gram must predict that token too.
    pub fn offer(
        &self,
        costs: &Costs,
        streams: usize,
        drafters: &[Box<dyn Drafter>],
        room: usize,
        unread: bool,
    ) -> Option<Offer> {
        let room = room.min(self.depth);
        if room == 0 {
            return None;
        }
        if let Mode::Always(depth) = self.mode {
            let drafter = drafters.iter().position(|d| d.acceptance_rates()[0] > 0.0)?;
            let choice = Choice { drafter, depth: depth.min(room), is_trial: false };
            let kind = drafters[drafter].kind();
            let draft = DraftOffer { drafter, kind, gains: Vec::new() };
            return Some(Offer { draft, always: Some(choice), overdue: None });
        }
        let mut best: Option<(f32, DraftOffer)> = None;
        let mut overdue: Option<(u32, Choice)> = None;
        for (drafter, source) in drafters.iter().enumerate() {
            let (kind, rates) = (source.kind(), source.acceptance_rates());
            if rates[0] == 0.0 {
                continue;
            }
            let reached = if unread && kind == DraftKind::Ngram { rates[0] } else { 1.0 };
            let draft = DraftOffer { drafter, kind, gains: self.gains(&rates[..room], reached) };
            let (speed, depths) = best_pass(costs, streams, &[&draft]);
            let trial = self.trials[kind as usize];
            let interval = if trial.accepted > 0 { TRIAL_INTERVAL[0] } else { trial.interval };
            let late = trial.since.saturating_sub(interval);
            if late > 0 && overdue.is_none_or(|(most, _)| late > most) {
                let depth = depths[0].clamp(1, TRIAL_DEPTH.min(room));
                overdue = Some((late, Choice { drafter, depth, is_trial: true }));
            }
            if best.as_ref().is_none_or(|(most, _)| speed > *most) {
                best = Some((speed, draft));
            }
        }
        let overdue = overdue.map(|(_, choice)| choice);
        best.map(|(_, draft)| Offer { draft, always: None, overdue })
    }

    /// Tokens that each drafted token is expected to add to the pass, if the first is reached with
    /// probability `reached`.
    ///
    /// A near-tie ends what is committed of a pass: its row runs again.
    fn gains(&self, rates: &[f32], reached: f32) -> Vec<f32> {
        let confident = self.confident.value();
        let mut reached = reached * confident;
        let gain = |rate: &f32| {
            reached *= rate * confident;
            reached
        };
        let mut gains: Vec<f32> = rates.iter().map(gain).collect();
        // A plain step alone has no near-ties.
        gains[0] -= 1.0 - confident;
        gains
    }

    /// Counts a plain step.
    pub fn count_step(&mut self) {
        for trial in &mut self.trials {
            trial.since += 1;
        }
    }

    /// Learns from a draft of `drafter` in a pass of `streams` sequences. `any_accepted`: its first token
    /// was accepted; `confident`: rows without a near-tie; `near_tie`: whether a near-tie ended it.
    pub fn learn(
        &mut self,
        costs: &Costs,
        streams: usize,
        drafter: &dyn Drafter,
        any_accepted: bool,
        confident: usize,
        near_tie: bool,
    ) {
        for _ in 0..confident {
            self.confident.learn(true);
        }
        if near_tie {
            self.confident.learn(false);
        }
        self.count_step();
        let (kind, rates) = (drafter.kind(), drafter.acceptance_rates());
        let gains = self.gains(&rates[..self.depth], 1.0);
        let (speed, _) = best_pass(costs, streams, &[&DraftOffer { drafter: 0, kind, gains }]);
        let [shortest, longest] = TRIAL_INTERVAL;
        let trial = &mut self.trials[kind as usize];
        trial.since = 0;
        let pays = pays(costs, streams, speed);
        // A few accepted trials in a row mean that the text has changed. If drafts still do not pay
        // after them, acceptance is not enough on this machine.
        if pays {
            (trial.interval, trial.accepted) = (shortest, 0);
        } else if any_accepted && trial.accepted < ACCEPTED_TRIALS {
            trial.accepted += 1;
        } else {
            (trial.interval, trial.accepted) = ((trial.interval * 2).min(longest), 0);
        }
    }

    /// Whether a drafter drafted in the last step, so that it had nothing to catch up on.
    pub fn in_use(&self, kind: DraftKind) -> bool {
        kind == DraftKind::Ngram || self.trials[kind as usize].since == 0
    }
}

/// What a sequence could draft in the next pass.
#[derive(Debug, Clone)]
pub struct Offer {
    draft: DraftOffer,
    /// What it drafts in any case.
    always: Option<Choice>,
    /// The trial that is due, if it does not draft otherwise.
    overdue: Option<Choice>,
}

/// A draft, and what it is expected to bring.
#[derive(Debug, Clone)]
struct DraftOffer {
    /// Index in the sequence's drafters.
    drafter: usize,
    kind: DraftKind,
    /// Tokens that each drafted token is expected to add.
    gains: Vec<f32>,
}

/// Chooses the drafts of a pass of `streams` sequences from what they offer: one entry for each offer.
pub fn choose(costs: &Costs, streams: usize, offers: &[Option<Offer>]) -> Vec<Option<Choice>> {
    if offers.iter().flatten().any(|offer| offer.always.is_some()) {
        return offers.iter().map(|offer| offer.as_ref()?.always).collect();
    }
    let drafts: Vec<&DraftOffer> = offers.iter().flatten().map(|offer| &offer.draft).collect();
    let (speed, depths) = best_pass(costs, streams, &drafts);
    let pays = pays(costs, streams, speed);
    let mut depths = depths.into_iter();
    let mut rows = streams;
    let choice = |offer: &Option<Offer>| {
        let Offer { draft, overdue, .. } = offer.as_ref()?;
        let choice = match depths.next().expect("one for each offer") {
            depth if pays && depth > 0 => Choice { drafter: draft.drafter, depth, is_trial: false },
            _ => (*overdue)?,
        };
        rows += choice.depth;
        (rows <= ROWS).then_some(choice)
    };
    offers.iter().map(choice).collect()
}

/// Whether a pass with drafts that commits `speed` tokens a second pays.
fn pays(costs: &Costs, streams: usize, speed: f32) -> bool {
    speed * costs.plain(streams) > GAIN * streams as f32
}

/// The depths of `drafts` with which a pass of `streams` sequences commits the most tokens a second, and
/// these tokens a second. At least one token is drafted.
fn best_pass(costs: &Costs, streams: usize, drafts: &[&DraftOffer]) -> (f32, Vec<usize>) {
    let mut tokens_by_gain: Vec<(f32, usize)> = Vec::new();
    for (i, draft) in drafts.iter().enumerate() {
        tokens_by_gain.extend(draft.gains.iter().map(|&gain| (gain, i)));
    }
    // Stable: a token comes after those before it in its draft, whose gain is never smaller but for the
    // first one's near-tie.
    tokens_by_gain.sort_by(|a, b| b.0.total_cmp(&a.0));
    tokens_by_gain.truncate(ROWS.saturating_sub(streams));
    let mut depths = vec![0; drafts.len()];
    let mut best = (0.0, depths.clone());
    let mut drafted = Drafted::default();
    let mut tokens = streams as f32;
    let mut pass = costs.pass(streams, streams);
    for (rows, (gain, i)) in (streams..).zip(tokens_by_gain) {
        let kind = drafts[i].kind as usize;
        drafted[kind].0 += usize::from(depths[i] == 0);
        depths[i] += 1;
        drafted[kind].1 = drafted[kind].1.max(depths[i]);
        tokens += gain;
        pass += costs.row(rows);
        let speed = tokens / (pass + costs.all_drafting(&drafted));
        if speed > best.0 {
            best = (speed, depths.clone());
        }
    }
    best
}
