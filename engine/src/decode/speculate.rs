//! A turn in which a sequence drafts: propose, run, verify, go back.
//!
//! A drafting sequence commits its drawn token first, so that drafts go on from what is known, and
//! runs it together with the drafts. What the model draws behind each row decides how many drafts
//! are committed, one after the other as if each had been drawn alone: the policy, stop strings and
//! limits see no difference. Rows behind the last one committed are rewound, wherever the reply
//! turned: at a rejected draft, at an end of turn, at text that the policy put in.
//!
//! # What is promised
//! Verified tokens are those of plain decoding up to rounding: a pass over several rows may sum in
//! another order than a pass over one. With `exact`, a token whose margin is within that rounding
//! ([`tie`]) is not taken from such a pass: its row is run again alone. What then can still differ
//! is what rounding left in the cache, which is of the same size as the bound's reason and far
//! smaller than the bound in f32; in 16-bit types it is not, and near-ties may flip. So may, in any
//! type, whether a token at the very edge of top-p, top-k or min-p is kept.

use mlx_rs::ops::indexing::TryIndexOp;
use std::time::Instant;

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::Decoder;
use super::draft::{At, Draft, DraftModel, EarlyExit, MtpDraft, Ngram, forget};
use super::governor::{Governor, Mode};
use super::sequence::{Drawn, Sequence};
use crate::config::DraftKind;
use crate::error::{Error, Result};

/// Drafted tokens on their way through a pass.
pub struct Drafted {
    /// Index of the draft that proposed them.
    draft: usize,
    /// u32 [m]
    pub tokens: Array,
    /// Position of the row before them, that of the last committed token.
    position: usize,
    /// When they began to be drafted.
    start: Instant,
    ran: Option<Ran>,
}

/// What a pass said of the last committed token and the drafts behind it.
struct Ran {
    /// [1, m + 1, D]
    hidden: Array,
    /// u32 [m + 1], what the model draws behind each row.
    drawn: Array,
    /// f32 [m + 1], where near-ties are to be told.
    margins: Option<Array>,
}

/// Margins, relative to the largest logit, below which the rounding of passes of different shapes
/// may swap the two best tokens. In f32 that is some forty times the largest difference seen on the
/// demonstration model (2.5e-6).
pub fn tie(dtype: Dtype, kv_bits: u32) -> f32 {
    let numbers: f32 = match dtype {
        Dtype::Float32 => 1e-4,
        Dtype::Float16 => 4e-3,
        _ => 2e-2,
    };
    // A rounding in the last digit can move a key or value by one of the few steps it has.
    let cache: f32 = match kv_bits {
        0 => 0.0,
        8 => 4e-3,
        _ => 4e-2,
    };
    numbers.max(cache)
}

impl Decoder {
    /// The drafts that the configuration wants and the weights allow, for a request whose prompt
    /// is `tokens`.
    ///
    /// # Errors
    /// [`Error::Array`] when MLX cannot make a cache.
    pub(super) fn drafts(&self, tokens: &[u32]) -> Result<Vec<Box<dyn Draft>>> {
        let mut drafts: Vec<Box<dyn Draft>> = Vec::new();
        for kind in &self.speculation.drafts {
            match kind {
                DraftKind::Ngram => drafts.push(Box::new(Ngram::new(tokens))),
                DraftKind::Mtp => {
                    if let Some(mtp) = self.model.mtp() {
                        drafts.push(Box::new(MtpDraft::new(mtp)?));
                    }
                }
                DraftKind::Model => {
                    if let Some(model) = &self.draft_model {
                        drafts.push(Box::new(DraftModel::new(model.clone())?));
                    }
                }
                DraftKind::EarlyExit => {
                    if let Some(layers) = self.exit_layers {
                        drafts.push(Box::new(EarlyExit::new(layers)));
                    }
                }
            }
        }
        for draft in &mut drafts {
            let known = &self.known[draft.kind() as usize];
            if !known.is_empty() {
                draft.learned().copy_from_slice(known);
            }
        }
        Ok(drafts)
    }

    /// Decides for a request what drafts, with the habits of the one before.
    pub(super) fn governor(&self) -> Option<Governor> {
        let new = || Governor::new(Mode::Auto, self.speculation.depth);
        self.costs.map(|_| self.habits.clone().unwrap_or_else(new))
    }

    /// Lets `sequence` draft where that pays. Its drawn token is then read and committed already.
    ///
    /// # Errors
    /// [`Error::Array`]
    pub(super) fn draft(&mut self, sequence: &mut Sequence) -> Result<()> {
        if !sequence.is_caught_up() || sequence.drawn.is_none() {
            return Ok(());
        }
        // Whoever does not draft leaves the token unread, so that the next step is queued behind
        // it. What is known already is in nobody's way.
        let costs = self.costs.unwrap_or_default();
        let unread = matches!(sequence.drawn, Some(Drawn::Computing(_)));
        if unread && sequence.choose(&costs, true).is_none() {
            return Ok(());
        }
        let token = sequence.drawn.take().expect("looked at above").read()?;
        self.commit(sequence, token)?;
        let position = sequence.cache.position;
        if sequence.has_ended() || sequence.tokens.len() != position + 1 {
            return Ok(());
        }
        let Some(choice) = sequence.choose(&costs, false) else { return Ok(()) };
        if choice.is_try {
            forget(&mut *sequence.drafts[choice.draft]);
        }
        let start = Instant::now();
        let Sequence { drafts, cache, tokens, adjust, seed, .. } = sequence;
        let (model, part) = (&*self.model, self.pass());
        let (seed, vocabulary) = (*seed, self.vocabulary);
        let mut at = At { model, part, cache, tokens, adjust, seed, vocabulary };
        if let Some(tokens) = drafts[choice.draft].propose(&mut at, choice.depth)? {
            cache.mark_draft();
            sequence.drafted =
                Some(Drafted { draft: choice.draft, tokens, position, start, ran: None });
        }
        Ok(())
    }

    /// Draws behind each drafted row; `hidden` [1, m + 1, D] is what the pass said of them.
    ///
    /// # Errors
    /// [`Error::Array`]
    pub(super) fn draw_drafted(&self, sequence: &mut Sequence, hidden: Array) -> Result<()> {
        let drafted = sequence.drafted.as_mut().expect("these rows were drafted");
        let logits = self.logits(&hidden)?.squeeze_axes(&[0])?;
        // Nothing in force ends while drafts are verified: each row is drawn as the first one is.
        let (draw, index) = (sequence.adjust.draws(), drafted.position as u64 + 1);
        let (adjust, seed) = (&mut sequence.adjust, sequence.seed);
        let (drawn, margins) = if self.speculation.exact {
            let (drawn, margins) = adjust.sample_with_margin(&logits, draw, seed, index)?;
            (drawn, Some(margins))
        } else {
            (adjust.sample(&logits, draw, seed, index)?, None)
        };
        drafted.ran = Some(Ran { hidden, drawn, margins });
        Ok(())
    }

    /// Commits the drafts that are what the model drew, and rewinds the others.
    ///
    /// # Errors
    /// [`Error::Array`]
    pub(super) fn accept_drafts(
        &mut self,
        sequence: &mut Sequence,
        drafted: Drafted,
    ) -> Result<()> {
        let Drafted { draft, tokens, position, start, ran } = drafted;
        let Ran { hidden, drawn, margins } = ran.expect("the pass drew behind these rows");
        eval([&tokens, &drawn].into_iter().chain(&margins))?;
        let took = start.elapsed().as_secs_f32();
        let (tokens, drawn) = (read::<u32>(&tokens)?, read::<u32>(&drawn)?);
        let right = right(&tokens, &drawn);
        let doubtful = match &margins {
            Some(margins) => read::<f32>(margins)?.iter().position(|&margin| margin < self.tie),
            None => None,
        };
        let sure = doubtful.map_or(right, |row| right.min(row));

        let mut accepted = 0;
        let (mut turned, mut changed) = (false, false);
        let changes = sequence.adjust.changes();
        for &token in &tokens[..sure] {
            let length = sequence.tokens.len();
            sequence.commit_drawn(token, &self.text);
            accepted += 1;
            turned = sequence.has_ended()
                || sequence.stale.is_some()
                || sequence.tokens.len() != length + 1;
            // What follows was drawn as the policy no longer wants it.
            changed = sequence.adjust.changes() != changes;
            if turned || changed {
                break;
            }
        }
        let alone = !turned && (changed || doubtful == Some(accepted));
        // The row of the last token accepted stays, unless it is to be run again.
        let rows = accepted + usize::from(!alone);
        sequence.cache.rewind_draft(position + rows)?;
        if !turned && !alone {
            sequence.drawn = Some(Drawn::Known(drawn[accepted]));
        }
        if rows > 0 && sequence.stale.is_none() {
            sequence.observe(&hidden.try_index((.., ..rows as i32, ..))?, position)?;
        }
        let rejected = !turned && !alone && accepted < tokens.len();
        sequence.verified(tokens.len(), accepted);
        let Sequence { drafts, governor, .. } = sequence;
        let draft = &mut drafts[draft];
        draft.learn(accepted + usize::from(rejected), accepted)?;
        if let (Some(governor), Some(costs)) = (governor, &mut self.costs)
            // What had to catch up took longer than drafting does.
            && governor.verified(costs, &**draft, accepted > 0, rows, alone)
        {
            costs.learn_verify(draft.kind(), tokens.len() + 1, took);
        }
        self.settle(sequence)
    }

    /// Keeps what the drafts of `sequence` have learned for the next one.
    pub(super) fn remember(&mut self, sequence: &mut Sequence) {
        for draft in &mut sequence.drafts {
            self.known[draft.kind() as usize] = draft.learned().to_vec();
        }
        if let Some(governor) = &sequence.governor {
            self.habits = Some(governor.clone());
        }
    }
}

/// How many drafts are what the model drew in their place.
fn right(drafts: &[u32], drawn: &[u32]) -> usize {
    drafts.iter().zip(drawn).take_while(|(draft, drawn)| draft == drawn).count()
}

/// An array's values on the host.
fn read<T: mlx_rs::ArrayElement + Clone>(array: &Array) -> Result<Vec<T>> {
    let values = array.try_as_slice::<T>().map_err(|e| Error::Array(e.to_string()))?;
    Ok(values.to_vec())
}

#[cfg(test)]
mod tests {
    use super::super::sample::sample;
    use super::*;
    use crate::request::Sampling;

    /// What follows each of five tokens, as the model and as a draft that is only roughly right
    /// would have it.
    const MODEL: [[f32; 5]; 5] = [
        [0.10, 0.40, 0.20, 0.25, 0.05],
        [0.30, 0.05, 0.05, 0.10, 0.50],
        [0.20, 0.20, 0.20, 0.20, 0.20],
        [0.01, 0.02, 0.90, 0.03, 0.04],
        [0.45, 0.05, 0.15, 0.30, 0.05],
    ];
    const DRAFT: [[f32; 5]; 5] = [
        [0.05, 0.60, 0.10, 0.15, 0.10],
        [0.25, 0.25, 0.05, 0.05, 0.40],
        [0.50, 0.10, 0.10, 0.10, 0.20],
        [0.05, 0.05, 0.70, 0.10, 0.10],
        [0.20, 0.20, 0.20, 0.20, 0.20],
    ];

    fn rows(table: &[[f32; 5]; 5], tokens: &[u32]) -> Array {
        let logits: Vec<f32> =
            tokens.iter().flat_map(|&token| table[token as usize].map(f32::ln)).collect();
        Array::from_slice(&logits, &[tokens.len() as i32, 5])
    }

    /// `count` tokens by drafts of three, as sequences do it; and how many drafts were right.
    fn speculative(count: usize, sampling: &Sampling, seed: u64) -> (Vec<u32>, usize) {
        let (mut text, mut accepted) = (vec![0], 0);
        while text.len() < count {
            let mut drafts = vec![text[text.len() - 1]];
            for i in 0..3 {
                let logits = rows(&DRAFT, &drafts[i..]);
                let index = (text.len() + i) as u64;
                drafts
                    .extend(read::<u32>(&sample(&logits, sampling, seed, index).unwrap()).unwrap());
            }
            let logits = rows(&MODEL, &drafts);
            let drawn = sample(&logits, sampling, seed, text.len() as u64).unwrap();
            let drawn = read::<u32>(&drawn).unwrap();
            let right = right(&drafts[1..], &drawn);
            text.extend(&drawn[..=right]);
            accepted += right;
        }
        (text, accepted)
    }

    fn plain(count: usize, sampling: &Sampling, seed: u64) -> Vec<u32> {
        let mut text = vec![0];
        while text.len() < count {
            let logits = rows(&MODEL, &text[text.len() - 1..]);
            let drawn = sample(&logits, sampling, seed, text.len() as u64).unwrap();
            text.extend(read::<u32>(&drawn).unwrap());
        }
        text
    }

    /// Chi-square statistic of two samples of pairs of neighbouring tokens, and the cells it is
    /// over.
    fn chi_square(a: &[u32], b: &[u32]) -> (f64, usize) {
        let count = |text: &[u32]| {
            let mut cells = [0f64; 25];
            text.windows(2).for_each(|pair| cells[(pair[0] * 5 + pair[1]) as usize] += 1.0);
            cells
        };
        let (a, b) = (count(a), count(b));
        let ratio = (b.iter().sum::<f64>() / a.iter().sum::<f64>()).sqrt();
        let cells = a.iter().zip(&b).filter(|(a, b)| **a + **b > 0.0);
        let terms: Vec<f64> =
            cells.map(|(a, b)| (ratio * a - b / ratio).powi(2) / (a + b)).collect();
        (terms.iter().sum(), terms.len())
    }

    /// 20,000 tokens with drafts against 20,000 without, by another seed: pairs of neighbours, so
    /// that a bias behind a rejected draft would show. 52.6 is the 99.9 % quantile for 25 cells.
    #[test]
    fn drafts_leave_the_distribution_of_draws_as_it_is() {
        let warm = Sampling { temperature: 1.0, ..Sampling::default() };
        for sampling in
            [warm, Sampling { top_p: 0.8, ..warm }, Sampling { temperature: 0.7, top_k: 3, ..warm }]
        {
            let (drafted, accepted) = speculative(20_000, &sampling, 1);
            let (statistic, cells) = chi_square(&drafted[..20_000], &plain(20_000, &sampling, 2));
            println!("{sampling:?}: {statistic:.1} over {cells} cells, {accepted} accepted");
            assert!(statistic < 52.6, "{sampling:?}: {statistic} over {cells} cells");
            assert!(accepted > 5_000, "{sampling:?}: only {accepted} drafts were right");
        }
    }

    /// The statistic would notice: the draft's own distribution fails by far.
    #[test]
    fn the_statistic_tells_distributions_apart() {
        let warm = Sampling { temperature: 1.0, ..Sampling::default() };
        let cold = Sampling { temperature: 0.9, ..warm };
        let (statistic, _) = chi_square(&plain(20_000, &warm, 1), &plain(20_000, &cold, 2));
        assert!(statistic > 52.6, "{statistic}");
    }

    /// With the same seed the tokens themselves are the same.
    #[test]
    fn drafts_leave_draws_of_the_same_seed_as_they_are() {
        let sampling = Sampling { temperature: 1.0, top_p: 0.9, ..Sampling::default() };
        assert_eq!(speculative(500, &sampling, 3).0[..500], plain(500, &sampling, 3));
    }
}
