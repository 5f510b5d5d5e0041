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
//! A drafter that is not used learns nothing, so each one is tried from time to time, as often as the loss
//! allows ([`TrialTime`](super::TrialTime)).
//!
//! Source: the expected gain is that of arXiv:2211.17192, section 3.3.

#[cfg(test)]
mod tests;

use super::costs::{Costs, Drafted, ROWS};
use super::trial_time::Permit;
use super::{Drafter, MovingRate};
use crate::config::DraftKind;

/// Least expected speed over plain decoding: the expectation is an estimate.
const GAIN: f32 = 1.1;

/// Fewest steps of a sequence between trials of a drafter that is not in use.
const TRIAL_INTERVAL: u32 = 8;

/// Steps after a draft that are slower than plain steps: the first computes rewound states, the second fills the
/// device's queue again.
const RECOVERY: u32 = 2;

/// Most tokens of a trial.
const TRIAL_DEPTH: usize = 2;

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
    /// Steps since each kind drafted last.
    unused: [u32; DraftKind::ALL.len()],
}

impl Governor {
    /// A governor that has learned nothing. Drafts are at most `depth` deep.
    pub fn new(mode: Mode, depth: usize) -> Self {
        let unused = [RECOVERY + 1; DraftKind::ALL.len()];
        Self { mode, depth, confident: MovingRate::prior(1.0), unused }
    }

    /// A governor of drafts of `depth` tokens in every step; `None` for no drafts.
    pub fn always(depth: usize) -> Option<Self> {
        (depth > 0).then(|| Self::new(Mode::Always(depth), depth))
    }

    /// A governor for the next request, which knows what this one has learned.
    pub fn for_next_request(&self) -> Self {
        Self { unused: self.unused.map(|steps| steps.max(RECOVERY + 1)), ..self.clone() }
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
            let unused = self.unused[kind as usize];
            if unused > TRIAL_INTERVAL && overdue.is_none_or(|(most, _)| unused > most) {
                let depth = depths[0].clamp(1, TRIAL_DEPTH.min(room));
                overdue = Some((unused, Choice { drafter, depth, is_trial: true }));
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
        for steps in &mut self.unused {
            *steps = steps.saturating_add(1);
        }
    }

    /// Learns from a draft of `kind`. `confident`: rows without a near-tie; `near_tie`: whether a near-tie ended it.
    pub fn learn(&mut self, kind: DraftKind, confident: usize, near_tie: bool) {
        for _ in 0..confident {
            self.confident.learn(true);
        }
        if near_tie {
            self.confident.learn(false);
        }
        self.count_step();
        self.unused[kind as usize] = 0;
    }

    /// Whether the sequence drafted in the last [`RECOVERY`] steps.
    pub fn has_just_drafted(&self) -> bool {
        self.unused.iter().any(|steps| *steps <= RECOVERY)
    }

    /// Whether a drafter drafted in the last step, so that it had nothing to catch up on.
    pub fn in_use(&self, kind: DraftKind) -> bool {
        kind == DraftKind::Ngram || self.unused[kind as usize] == 0
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
pub fn choose(
    costs: &Costs,
    streams: usize,
    offers: &[Option<Offer>],
    permit: Permit,
) -> Vec<Option<Choice>> {
    if offers.iter().flatten().any(|offer| offer.always.is_some()) {
        return offers.iter().map(|offer| offer.as_ref()?.always).collect();
    }
    let drafts: Vec<&DraftOffer> = offers.iter().flatten().map(|offer| &offer.draft).collect();
    let (speed, depths) = best_pass(costs, streams, &drafts);
    let pays = speed * costs.plain(streams) > GAIN * streams as f32 && permit >= Permit::Paying;
    let mut depths = depths.into_iter();
    let mut rows = streams;
    let choice = |offer: &Option<Offer>| {
        let Offer { draft, overdue, .. } = offer.as_ref()?;
        let choice = match depths.next().expect("one for each offer") {
            depth if pays && depth > 0 => Choice { drafter: draft.drafter, depth, is_trial: false },
            _ => overdue.filter(|_| permit == Permit::Trials)?,
        };
        rows += choice.depth;
        (rows <= ROWS).then_some(choice)
    };
    offers.iter().map(choice).collect()
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
    let mut drafted = Drafted::default();
    let mut tokens = streams as f32;
    let mut pass = costs.pass(streams, streams);
    // Tokens a second, and how many of the likeliest tokens are drafted for it.
    let mut best = (0.0, 0);
    for (count, &(gain, i)) in (1..).zip(&tokens_by_gain) {
        let kind = drafts[i].kind as usize;
        drafted[kind].0 += usize::from(depths[i] == 0);
        depths[i] += 1;
        drafted[kind].1 = drafted[kind].1.max(depths[i]);
        tokens += gain;
        pass += costs.row(streams + count - 1);
        let speed = tokens / (pass + costs.all_drafting(&drafted));
        if speed > best.0 {
            best = (speed, count);
        }
    }
    depths.fill(0);
    tokens_by_gain[..best.1].iter().for_each(|&(_, i)| depths[i] += 1);
    (best.0, depths)
}
