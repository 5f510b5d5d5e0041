//! Drafting of one sequence: its drafters, its governor, and what drafts have gained.

use super::timeline::Timeline;
use crate::config::DraftKind;
use crate::draft::{Costs, Drafter, Governor, HiddenRows, MovingRate, Offer};
use crate::error::Result;

/// Drafters and governor of one sequence.
#[derive(Default)]
pub struct Drafting {
    drafters: Vec<Box<dyn Drafter>>,
    /// `None` without speculation.
    governor: Option<Governor>,
    /// Plain steps in a row: of one row, queued while the previous one was computed or run at once.
    plain_steps: u32,
    drafted: u32,
    accepted: u32,
    /// Tokens that drafts added to passes: those accepted, less rows that run again.
    gained: i32,
    /// Passes that verified a draft.
    verified: u32,
}

impl Drafting {
    /// Drafting with these drafters, as `governor` chooses.
    pub fn new(drafters: Vec<Box<dyn Drafter>>, governor: Option<Governor>) -> Self {
        Self { drafters, governor, ..Self::default() }
    }

    /// What the sequence could draft in a pass of `streams` sequences, at most `room` tokens.
    /// `unread`: its sampled token is not committed.
    pub fn offer(&self, costs: &Costs, streams: usize, room: usize, unread: bool) -> Option<Offer> {
        self.governor.as_ref()?.offer(costs, streams, &self.drafters, room, unread)
    }

    /// Drafts with drafters of this kind alone, `depth` tokens in every step; never without a kind
    /// or a depth.
    pub fn draft_always(&mut self, kind: Option<DraftKind>, depth: usize) {
        self.drafters.retain(|drafter| Some(drafter.kind()) == kind);
        self.governor = kind.and_then(|_| Governor::always(depth));
    }

    /// Drafts with `drafter` alone, `depth` tokens in every step.
    pub fn draft_only_with(&mut self, drafter: Box<dyn Drafter>, depth: usize) {
        self.drafters = vec![drafter];
        self.governor = Governor::always(depth);
    }

    /// Drafts `depth` tokens in every step with the drafters that it has; never with a depth of 0.
    pub fn set_depth(&mut self, depth: usize) {
        self.governor = Governor::always(depth);
    }

    /// Returns true if there are drafters.
    pub fn has_drafters(&self) -> bool {
        !self.drafters.is_empty()
    }

    /// Returns true if there is a governor, so that a resumed sequence has drafters again.
    pub fn is_governed(&self) -> bool {
        self.governor.is_some()
    }

    /// Returns true if the governor has just had a draft.
    pub fn has_just_drafted(&self) -> bool {
        self.governor.as_ref().is_some_and(Governor::has_just_drafted)
    }

    /// Returns true if the governor uses the drafter with this index.
    pub fn is_in_use(&self, drafter: usize) -> bool {
        let kind = self.kind(drafter);
        self.governor.as_ref().is_some_and(|governor| governor.in_use(kind))
    }

    /// The kind of the drafter with this index.
    pub fn kind(&self, drafter: usize) -> DraftKind {
        self.drafters[drafter].kind()
    }

    /// The drafter with this index.
    pub fn drafter(&mut self, drafter: usize) -> &mut dyn Drafter {
        &mut *self.drafters[drafter]
    }

    /// Replaces the drafters, after the arrays of the others were dropped.
    pub fn set_drafters(&mut self, drafters: Vec<Box<dyn Drafter>>) {
        self.drafters = drafters;
    }

    /// Drops the drafters, which hold arrays.
    pub fn drop_arrays(&mut self) {
        self.drafters.clear();
        self.plain_steps = 0;
    }

    /// A token was committed.
    pub fn read(&mut self, timeline: &Timeline) {
        self.drafters.iter_mut().for_each(|drafter| drafter.read(timeline.tokens()));
    }

    /// Tokens were rewound.
    pub fn rewind(&mut self, timeline: &Timeline) -> Result<()> {
        self.drafters.iter_mut().try_for_each(|drafter| drafter.rewind(timeline.tokens()))
    }

    /// Passes the hidden states of rows from `position` on to the drafters.
    pub fn observe(&mut self, hidden: &HiddenRows, position: usize) {
        self.drafters.iter_mut().for_each(|drafter| drafter.observe(hidden, position));
    }

    /// Counts a step in which no draft is verified, for the governor.
    pub fn count_step(&mut self) {
        self.governor.iter_mut().for_each(Governor::count_step);
    }

    /// Counts a step for [`Drafting::is_plain`]; `is_plain`: it had one row.
    pub fn count_plain_step(&mut self, is_plain: bool) {
        self.plain_steps = if is_plain { self.plain_steps + 1 } else { 0 };
    }

    /// Returns true if the last step was a plain one after others.
    pub fn is_plain(&self) -> bool {
        self.plain_steps > 2
    }

    /// Learns from a draft of `drafted` tokens, of which `judged` were compared and `accepted`
    /// committed; `rows` of its rows stay. `run_again`: the last row runs again.
    pub fn learn(
        &mut self,
        drafter: usize,
        [drafted, judged, accepted, rows]: [usize; 4],
        run_again: bool,
    ) -> Result<()> {
        // At most DEPTH tokens a draft.
        self.gained += accepted as i32 - i32::from(run_again);
        self.drafted += drafted as u32;
        self.accepted += accepted as u32;
        self.verified += 1;
        let drafter = &mut self.drafters[drafter];
        drafter.learn(judged, accepted)?;
        if let Some(governor) = &mut self.governor {
            governor.learn(drafter.kind(), rows, run_again);
        }
        Ok(())
    }

    /// The rates that the drafters have learned, by kind.
    pub fn learned_rates(&mut self) -> impl Iterator<Item = (DraftKind, &mut [MovingRate])> {
        self.drafters.iter_mut().map(|drafter| (drafter.kind(), drafter.learned_rates()))
    }

    /// The governor, which the next request starts with.
    pub fn governor(&self) -> Option<&Governor> {
        self.governor.as_ref()
    }

    /// Tokens drafted, tokens accepted, and passes that verified them.
    pub fn counts(&self) -> [u32; 3] {
        [self.drafted, self.accepted, self.verified]
    }

    /// Tokens that drafts added to passes: those accepted, less rows that run again.
    pub fn gained(&self) -> i32 {
        self.gained
    }
}
