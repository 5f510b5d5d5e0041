//! The timeline of a sequence: its committed tokens, the cache that has run them, and the next
//! token.
//!
//! [`Timeline`] alone writes the tokens, and what is known of the next token ([`Next`]). Tokens are
//! committed and rewound at once. The cache follows: the rows of a pass advance it ([`Timeline::span`]), and
//! [`Timeline::settle`] rewinds it after its tokens were rewound. A cache of attention is cut; another
//! one goes to the newest checkpoint that is early enough, or to saved state, and the remaining tokens
//! run again. A rewind costs time and changes no number. The cache is lent to a pass and to the
//! drafters, which rewind what they run in it; nobody else writes it.
//!
//! Knows neither the reply nor a policy, and never runs the model.

use std::collections::VecDeque;
use std::rc::Rc;

use mlx_rs::Array;

use super::next_token::{Draft, Next, NextLogits, Rows, Sampled, SampledToken, VerifyPass};
use crate::cache::{Cache, Checkpoint, Span};
use crate::draft::DraftTokens;
use crate::error::{Error, Result};
use crate::lazy::submit;
use crate::prefix::{Prefixes, Retention};
use crate::sample::logprobs::Logprobs;
use crate::sample::row::Row;
use crate::sample::samples::{Logits, SampleOf, Samples};

/// Most checkpoints of a timeline.
const CHECKPOINTS: usize = 4;

/// Tokens, cache and next token of one sequence.
pub struct Timeline {
    /// Prompt and reply. Tokens from `cache.position` on have not run yet.
    tokens: Vec<u32>,
    /// Number of prompt tokens.
    prompt: usize,
    cache: Cache,
    next: Next,
    /// The logits of the token after the next one of a draft, which is being committed.
    ahead: Option<NextLogits>,
    /// The sampled token that is committed after the pass that runs now.
    pending: Option<Sampled>,
    /// Checkpoints of the cache, ascending by position.
    checkpoints: Vec<TokenCheckpoint>,
    /// Save points of the prompt that are still to come, ascending.
    save_points: VecDeque<(usize, Retention)>,
}

/// A checkpoint of the cache, with the logits [1, V] of the next token if they are known.
struct TokenCheckpoint {
    cache: Checkpoint,
    logits: Option<Array>,
}

impl TokenCheckpoint {
    fn position(&self) -> usize {
        self.cache.position()
    }
}

impl Timeline {
    /// The timeline of a prompt, whose beginning is in `cache`.
    pub(super) fn new(
        prompt: Vec<u32>,
        cache: Cache,
        save_points: Vec<(usize, Retention)>,
    ) -> Self {
        Self {
            prompt: prompt.len(),
            tokens: prompt,
            cache,
            next: Next::default(),
            ahead: None,
            pending: None,
            checkpoints: Vec::new(),
            save_points: save_points.into(),
        }
    }

    /// Prompt and reply.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of tokens of prompt and reply.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Number of prompt tokens.
    pub fn prompt(&self) -> usize {
        self.prompt
    }

    /// Number of rows that have run.
    pub fn position(&self) -> usize {
        self.cache.position
    }

    /// Returns true if all rows of the prompt have run.
    pub fn has_run_prompt(&self) -> bool {
        self.cache.position >= self.prompt
    }

    /// Returns true if all committed tokens have run, so that the next one can be sampled.
    pub fn is_caught_up(&self) -> bool {
        self.cache.position >= self.tokens.len()
    }

    /// The cache, to read it.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The cache for drafters, which rewind what they run in it, and the committed tokens.
    pub fn for_drafter(&mut self) -> (&mut Cache, &[u32]) {
        (&mut self.cache, &self.tokens)
    }

    /// Returns true if rows of the cache may be of other tokens than the committed ones.
    pub fn is_stale(&self) -> bool {
        matches!(self.next, Next::Stale { .. })
    }

    /// The next rows of a pass: tokens up to position `end`, the sampled token unless it `is_last`,
    /// or a draft. The token sampled before is then pending, until [`Timeline::take_pending`].
    pub(super) fn rows(&mut self, end: usize, is_last: bool) -> Rows {
        let position = self.cache.position;
        if let Next::Drafting { draft, .. } = &self.next {
            return Rows::Draft(self.tokens[position..].to_vec(), draft.tokens.clone());
        }
        if position < self.tokens.len() {
            let save_point = self.save_points.front().map_or(usize::MAX, |&(at, _)| at);
            let end = end.min(self.tokens.len()).min(save_point);
            return Rows::Tokens(self.tokens[position..end].to_vec());
        }
        self.pending = self.take_sampled();
        match &self.pending {
            Some(Sampled { token: SampledToken::Computing { sample, .. }, .. }) if !is_last => {
                Rows::Sampled(sample.clone())
            }
            _ => Rows::Nothing,
        }
    }

    /// The cache as a span of a pass over `rows` rows.
    pub fn span(&mut self, rows: i32) -> Span<'_> {
        Span { rows, cache: &mut self.cache }
    }

    /// The cache before a pass, to which a near-tie rewinds. `None` for a draft, whose margins are
    /// checked when it is accepted.
    pub fn before_pass(&self) -> Option<Checkpoint> {
        (!self.is_drafting()).then(|| self.cache.brief_checkpoint())
    }

    /// Notes that the last row has run: row `row` of `logits` holds the next token's logits. `sample` is
    /// the token, unless it is sampled later. `before` is the cache before a pass with other sequences,
    /// if it is needed.
    pub fn ran(
        &mut self,
        logits: Logits,
        row: usize,
        sample: Option<SampleOf>,
        before: Option<Checkpoint>,
    ) {
        let position = self.cache.position;
        let logits = NextLogits { position, logits, row, before: before.clone() };
        self.next = match sample {
            Some(sample) => {
                let token = SampledToken::Computing { sample, before };
                Next::Sampled { sampled: Sampled { token, logprobs: None }, logits: Some(logits) }
            }
            None => Next::Logits(logits),
        };
    }

    /// Notes that the rows of the draft have run.
    pub fn ran_draft(&mut self, pass: VerifyPass) {
        if let Next::Drafting { draft, .. } = &mut self.next {
            draft.pass = Some(pass);
        }
    }

    /// Waits for the token that is committed after the pass: the pending one, or the first of a
    /// draft.
    pub fn wait_for_pass(&self) -> Result<()> {
        match &self.next {
            Next::Drafting { draft: Draft { pass: Some(pass), .. }, .. } => {
                pass.first.token().map(drop)
            }
            _ => self.pending.as_ref().map_or(Ok(()), Sampled::wait),
        }
    }

    /// Waits for the sampled token, if there is one.
    pub fn wait_for_sampled(&self) -> Result<()> {
        match &self.next {
            Next::Sampled { sampled, .. } => sampled.wait(),
            _ => Ok(()),
        }
    }

    /// Takes the token that was sampled before the pass, to commit it.
    pub fn take_pending(&mut self) -> Option<Sampled> {
        self.pending.take()
    }

    /// Returns true if the next token is sampled.
    pub fn has_sampled(&self) -> bool {
        matches!(self.next, Next::Sampled { .. })
    }

    /// Returns true if the next token is sampled, and not on the host.
    pub fn is_unread(&self) -> bool {
        matches!(&self.next, Next::Sampled { sampled, .. } if !sampled.is_read())
    }

    /// Takes the sampled token, to commit it. The logits stay.
    pub fn take_sampled(&mut self) -> Option<Sampled> {
        if !self.has_sampled() {
            return None;
        }
        match std::mem::take(&mut self.next) {
            Next::Sampled { sampled, logits } => {
                self.next = Next::from_logits(logits);
                Some(sampled)
            }
            _ => None,
        }
    }

    /// Drops the sampled token, which is sampled again: its parameters or the tokens before it
    /// changed.
    pub(super) fn drop_sampled(&mut self) {
        self.take_sampled();
    }

    /// Samples the next token from its logits with `row`. `top`: the number of likeliest tokens
    /// whose probabilities are reported with that of the token, if they are; `with_entropy`: with
    /// the entropy.
    ///
    /// # Panics
    /// If the logits are not known: [`Timeline::can_sample`].
    pub(super) fn sample(&mut self, row: Row, top: Option<u32>, with_entropy: bool) -> Result<()> {
        let Next::Logits(next) = &self.next else { panic!("logits are known") };
        let rows = [row];
        let with_margins = next.before.is_some();
        let samples = Rc::new(Samples::after(&next.logits, next.row, &rows, with_margins)?);
        let logprobs = match top {
            Some(top) => Some(samples.logprobs(&next.own()?, &rows, top, with_entropy)?),
            None => None,
        };
        if !samples.is_read() || logprobs.is_some() {
            submit(samples.arrays().chain(logprobs.iter().flat_map(Logprobs::arrays)))?;
        }
        let (sample, before) = (SampleOf::new(samples, 0), next.before.clone());
        let sampled = Sampled { token: SampledToken::Computing { sample, before }, logprobs };
        self.next = Next::Sampled { sampled, logits: Some(next.clone()) };
        Ok(())
    }

    /// Returns true if the next token can be sampled now.
    pub(super) fn can_sample(&self) -> bool {
        let is_here = |logits: &NextLogits| logits.position == self.cache.position;
        self.is_caught_up() && matches!(&self.next, Next::Logits(logits) if is_here(logits))
    }

    /// Returns true if the next pass verifies a draft.
    pub fn is_drafting(&self) -> bool {
        matches!(self.next, Next::Drafting { .. })
    }

    /// The draft that the next pass verifies.
    pub fn draft(&self) -> Option<&Draft> {
        match &self.next {
            Next::Drafting { draft, .. } => Some(draft),
            _ => None,
        }
    }

    /// Lets the next pass verify a draft of `drafter`.
    pub fn begin_draft(&mut self, drafter: usize, tokens: DraftTokens) {
        let position = self.cache.position;
        self.cache.mark_draft();
        let draft = Draft { drafter, tokens, position, pass: None };
        self.next = Next::Drafting { draft, logits: self.take_logits() };
    }

    /// The logits of the token after the committed ones, if these have run.
    pub(super) fn next_logits(&self) -> Option<&NextLogits> {
        let known = self.ahead.as_ref().or(self.logits()).filter(|_| !self.is_stale());
        known.filter(|logits| logits.position == self.tokens.len())
    }

    /// Notes that a token of a draft is committed next, and that row `row` of `logits` holds the logits after it.
    pub fn look_ahead(&mut self, logits: &Logits, row: usize) {
        let position = self.tokens.len() + 1;
        self.ahead = Some(NextLogits { position, logits: logits.clone(), row, before: None });
    }

    /// Takes the draft whose pass has run. Its rows stay in the cache until
    /// [`Timeline::end_draft`].
    pub fn take_draft(&mut self) -> Option<Draft> {
        if !self.is_drafting() {
            return None;
        }
        match std::mem::take(&mut self.next) {
            Next::Drafting { draft, logits } => {
                self.next = Next::from_logits(logits);
                Some(draft)
            }
            _ => None,
        }
    }

    /// Rewinds the rows of a draft from `position` on. `next`: the token sampled after the last row
    /// that stays, if it follows the committed tokens.
    pub fn end_draft(&mut self, position: usize, next: Option<u32>) -> Result<()> {
        self.ahead = None;
        self.cache.rewind_draft(position)?;
        if let Some(token) = next {
            let sampled = Sampled { token: SampledToken::Read(token), logprobs: None };
            self.next = Next::Sampled { sampled, logits: self.take_logits() };
        }
        Ok(())
    }

    /// Returns true if the next pass runs without other sequences.
    pub fn runs_alone(&self) -> bool {
        matches!(self.next, Next::Missing { alone: true })
    }

    /// Lets the next pass run beside other sequences again: it runs alone now.
    pub fn begin_alone(&mut self) {
        if self.runs_alone() {
            self.next = Next::default();
        }
    }

    /// Rewinds the cache to `before` a pass that ended in a near-tie. Its row runs again, alone.
    pub fn run_again(&mut self, before: &Checkpoint) -> Result<()> {
        self.cache.rewind_to(before)?;
        self.next = Next::Missing { alone: true };
        Ok(())
    }

    /// Appends a token.
    pub(super) fn commit(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Marks that the sampled token is not committed, though the cache may have run it.
    pub(super) fn reject(&mut self) {
        let from = self.tokens.len();
        self.make_stale(from);
    }

    /// Removes the tokens from `to` on. The cache follows in [`Timeline::settle`].
    pub(super) fn rewind(&mut self, to: usize) {
        self.tokens.truncate(to);
        self.make_stale(to);
    }

    fn make_stale(&mut self, from: usize) {
        let from = match self.next {
            Next::Stale { from: earlier, .. } => from.min(earlier),
            _ => from,
        };
        self.next = Next::Stale { from, logits: self.take_logits() };
    }

    /// Rewinds the cache if its rows are of other tokens, or the next token cannot be sampled from
    /// it. `has_ended`: no further token is sampled. Returns the number of tokens that run again,
    /// if the cache was rewound.
    pub(super) fn settle(
        &mut self,
        has_ended: bool,
        prefixes: &mut Prefixes,
        vocabulary: i32,
    ) -> Result<Option<usize>> {
        let is_stale = self.is_stale();
        let to = match self.next {
            Next::Stale { from, .. } => {
                self.checkpoints.retain(|checkpoint| checkpoint.position() <= from);
                let logits = self.take_logits().filter(|logits| logits.position <= from);
                self.next = Next::from_logits(logits);
                from
            }
            _ => self.tokens.len(),
        };
        let is_final = self.has_sampled() || !self.is_caught_up() || has_ended;
        if is_final && !is_stale || self.is_usable(to, has_ended) {
            return Ok(None);
        }
        self.rewind_cache(to, prefixes, vocabulary)?;
        Ok(Some(self.tokens.len().saturating_sub(self.cache.position)))
    }

    /// Returns true if the cache holds at most `to` tokens, and the next token can be sampled from
    /// it.
    fn is_usable(&self, to: usize, has_ended: bool) -> bool {
        let position = self.cache.position;
        position <= to && (position < self.tokens.len() || self.can_sample() || has_ended)
    }

    /// Rewinds the cache to at most `to` tokens, so that the next token can be sampled from there.
    fn rewind_cache(&mut self, to: usize, prefixes: &mut Prefixes, vocabulary: i32) -> Result<()> {
        let length = self.tokens.len();
        if self.cache.is_truncatable() {
            // The last token runs again for its logits.
            self.cache.truncate(to.min(length - 1));
            return Ok(());
        }
        let is_usable = |checkpoint: &&TokenCheckpoint| {
            let position = checkpoint.position();
            position <= to
                && position <= self.cache.position
                && (position < length || checkpoint.logits.is_some())
        };
        if let Some(checkpoint) = self.checkpoints.iter().rev().find(is_usable) {
            self.cache.rewind_to(&checkpoint.cache)?;
            let position = checkpoint.position();
            let logits = checkpoint.logits.clone().map(|logits| {
                let logits = Logits::new(logits, vocabulary);
                NextLogits { position, logits, row: 0, before: None }
            });
            self.next = Next::from_logits(logits);
            return Ok(());
        }
        (self.cache, _) = prefixes.resume(&self.tokens)?;
        Ok(())
    }

    /// Takes a checkpoint if one is due: at `phase_start`, before which no rewind leads, and every
    /// `every` tokens.
    pub(super) fn take_checkpoint(&mut self, phase_start: usize, every: usize) -> Result<()> {
        let position = self.cache.position;
        let newest = self.checkpoints.last().map(TokenCheckpoint::position);
        let due = newest
            .is_none_or(|newest| newest < phase_start || position.saturating_sub(newest) >= every);
        let valid = (phase_start..=self.tokens.len()).contains(&position)
            && newest.is_none_or(|newest| newest < position);
        if !(due && valid) {
            return Ok(());
        }
        let cache = self.cache.checkpoint()?;
        let logits = self.logits().filter(|next| next.position == position);
        // A copy: the logits of a pass are those of all sequences.
        let logits = logits.map(|next| Ok::<_, Error>(next.own()?.contiguous()?)).transpose()?;
        // An unevaluated checkpoint would keep the inputs of its graph alive.
        submit(cache.arrays().iter().chain(&logits))?;
        self.checkpoints.push(TokenCheckpoint { cache, logits });
        // Rewinds end at the start of the phase, so one checkpoint at or before it is enough.
        let first = self.checkpoints.iter().rposition(|c| c.position() <= phase_start);
        self.checkpoints.drain(..first.unwrap_or(0));
        if self.checkpoints.len() > CHECKPOINTS {
            self.checkpoints.remove(checkpoint_to_evict(&self.checkpoints));
        }
        Ok(())
    }

    /// Takes the save point of the prompt at which the cache is, if it is at one.
    pub fn take_save_point(&mut self) -> Option<Retention> {
        let is_here = |&mut (at, _): &mut (usize, _)| at == self.cache.position;
        self.save_points.pop_front_if(is_here).map(|(_, retention)| retention)
    }

    /// Positions of the save points of the prompt that are still to come, ascending.
    pub fn save_points(&self) -> impl Iterator<Item = usize> {
        self.save_points.iter().map(|&(at, _)| at)
    }

    /// Adds a save point of the prompt.
    pub fn add_save_point(&mut self, at: usize) {
        if let Err(place) = self.save_points.binary_search_by_key(&at, |&(at, _)| at) {
            self.save_points.insert(place, (at, Retention::default()));
        }
    }

    /// Removes a save point of the prompt.
    #[cfg(test)]
    pub fn remove_save_point(&mut self, at: usize) {
        self.save_points.retain(|&(point, _)| point != at);
    }

    /// Lets other requests share the KV of the tokens that have run.
    pub fn share(&mut self, prefixes: &mut Prefixes) -> Result<()> {
        let position = self.cache.position;
        prefixes.share(&mut self.cache, &self.tokens[..position])
    }

    /// Takes the logits of the next token of `first`, which has the same prompt and a copy of its
    /// state.
    pub fn follow(&mut self, first: &Self) {
        self.next = Next::from_logits(first.logits().cloned());
    }

    /// Drops all that holds arrays. `empty` is a cache without rows.
    pub(super) fn drop_arrays(&mut self, empty: Cache) {
        self.cache = empty;
        self.checkpoints.clear();
        (self.next, self.ahead, self.pending) = (Next::default(), None, None);
    }

    /// Restores `cache`, which holds saved state of the first tokens.
    pub(super) fn restore(&mut self, cache: Cache) {
        // Another request may have saved more of the prompt than had run.
        self.save_points.retain(|&(at, _)| at > cache.position);
        self.cache = cache;
    }

    fn logits(&self) -> Option<&NextLogits> {
        self.next.logits()
    }

    fn take_logits(&mut self) -> Option<NextLogits> {
        std::mem::take(&mut self.next).into_logits()
    }
}

/// Index of the checkpoint to evict: the inner one that leaves the smallest gap, relative to the
/// age of the checkpoint before it. Spacing thus grows with age.
fn checkpoint_to_evict(checkpoints: &[TokenCheckpoint]) -> usize {
    let newest = checkpoints.last().map_or(0, TokenCheckpoint::position);
    let relative_gap = |i: usize| {
        let (before, after) = (checkpoints[i - 1].position(), checkpoints[i + 1].position());
        (after - before) as f64 / (newest - before) as f64
    };
    (1..checkpoints.len() - 1)
        .min_by(|&a, &b| relative_gap(a).total_cmp(&relative_gap(b)))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use mlx_rs::Dtype;

    use super::*;
    use crate::cache::{LayerCache, Recurrent};

    /// The timeline of five tokens, all of which have run.
    fn timeline() -> Timeline {
        let mut cache = Cache::new(Vec::new());
        cache.position = 5;
        Timeline::new(vec![1, 2, 3, 4, 5], cache, Vec::new())
    }

    #[test]
    fn rows_are_stale_from_the_earliest_change_on() {
        let mut timeline = timeline();
        timeline.rewind(2);
        timeline.commit(7);
        timeline.commit(8);
        timeline.rewind(3);
        timeline.reject();
        assert_eq!(timeline.tokens(), [1, 2, 7]);
        assert!(matches!(timeline.next, Next::Stale { from: 2, .. }));
    }

    /// The cache of a hybrid cannot be cut. It goes to the checkpoint, whose logits give the next token without a pass, with
    /// the checkpoint's logits and not those of the tokens that were rewound.
    #[test]
    fn a_rewind_to_a_checkpoint_with_logits_needs_no_pass() {
        let state = Recurrent::new(&[1, 1, 2, 2], &[1, 1, 2], Dtype::Float32).unwrap();
        let empty = Cache::new(vec![LayerCache::Recurrent(state)]);
        let mut prefixes = Prefixes::new(empty.clone(), 0, None, 0).unwrap();
        let mut timeline = Timeline::new(vec![1, 2, 3], empty, Vec::new());
        let ran = |timeline: &mut Timeline, values: [f32; 2]| {
            timeline.cache.position = timeline.len();
            timeline.ran(Logits::new(Array::from_slice(&values, &[1, 2]), 2), 0, None, None);
        };
        ran(&mut timeline, [0.0, 1.0]);
        timeline.take_checkpoint(3, 1).unwrap();
        timeline.commit(1);
        ran(&mut timeline, [1.0, 0.0]);
        timeline.rewind(3);
        assert_eq!(timeline.settle(false, &mut prefixes, 2).unwrap(), Some(0));
        assert_eq!((timeline.cache().position, timeline.tokens()), (3, &[1, 2, 3][..]));
        assert!(timeline.can_sample());
        let logits = timeline.logits().unwrap().own().unwrap();
        assert_eq!(logits.as_slice::<f32>(), [0.0, 1.0]);
    }

    #[test]
    fn only_the_next_pass_after_a_near_tie_runs_alone() {
        let mut timeline = timeline();
        let before = timeline.cache().brief_checkpoint();
        timeline.run_again(&before).unwrap();
        assert!(timeline.runs_alone());
        timeline.begin_alone();
        assert!(!timeline.runs_alone());
    }
}
