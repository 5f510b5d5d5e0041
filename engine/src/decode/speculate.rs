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
//! smaller than the bound in f32; in 16-bit types it is not, and near-ties may flip.

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::Decoder;
use super::draft::{At, Draft, DraftModel, EarlyExit, MtpDraft, Ngram};
use super::governor::Governor;
use super::sample::{sample, sample_with_margin};
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
/// may swap the two best tokens. Some fifty times the largest difference seen in f32 (2.5e-6).
pub fn tie(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::Float32 => 1e-4,
        Dtype::Float16 => 4e-3,
        _ => 2e-2,
    }
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
        Ok(drafts)
    }

    /// Decides for a request what drafts.
    pub(super) fn governor(&self) -> Option<Governor> {
        Some(Governor::new(self.mode, self.speculation.depth, self.costs?))
    }

    /// Lets `sequence` draft where that pays. Its drawn token is then read and committed already.
    ///
    /// # Errors
    /// [`Error::Array`]
    pub(super) fn draft(&self, sequence: &mut Sequence) -> Result<()> {
        if !sequence.is_caught_up() || sequence.drawn.is_none() {
            return Ok(());
        }
        // Whoever does not draft leaves the token unread, so that the next step is queued behind
        // it. What is known already is in nobody's way.
        let unread = matches!(sequence.drawn, Some(Drawn::Computing(_)));
        if unread && sequence.choose().is_none() {
            return Ok(());
        }
        let token = sequence.drawn.take().expect("looked at above").read()?;
        sequence.commit_drawn(token, &self.text);
        let position = sequence.cache.position;
        if sequence.has_ended() || sequence.tokens.len() != position + 1 {
            return Ok(());
        }
        let Some(choice) = sequence.choose() else { return Ok(()) };
        let Sequence { drafts, cache, tokens, sampling, seed, .. } = sequence;
        let (model, part) = (&*self.model, self.pass());
        let mut at = At { model, part, cache, tokens, sampling: *sampling, seed: *seed };
        if let Some(tokens) = drafts[choice.draft].propose(&mut at, choice.depth)? {
            cache.checkpoint();
            sequence.drafted = Some(Drafted { draft: choice.draft, tokens, position, ran: None });
        }
        Ok(())
    }

    /// Draws behind each drafted row; `hidden` [1, m + 1, D] is what the pass said of them.
    ///
    /// # Errors
    /// [`Error::Array`]
    pub(super) fn draw_drafted(&self, sequence: &mut Sequence, hidden: Array) -> Result<()> {
        let drafted = sequence.drafted.as_mut().expect("these rows were drafted");
        let logits = self.model.logits(&hidden)?.squeeze_axes(&[0])?;
        let (sampling, index) = (&sequence.sampling, drafted.position as u64 + 1);
        let (drawn, margins) = if self.speculation.exact {
            let (drawn, margins) = sample_with_margin(&logits, sampling, sequence.seed, index)?;
            (drawn, Some(margins))
        } else {
            (sample(&logits, sampling, sequence.seed, index)?, None)
        };
        drafted.ran = Some(Ran { hidden, drawn, margins });
        Ok(())
    }

    /// Commits the drafts that are what the model drew, and rewinds the others.
    ///
    /// # Errors
    /// [`Error::Array`]
    pub(super) fn accept_drafts(&self, sequence: &mut Sequence, drafted: Drafted) -> Result<()> {
        let Drafted { draft, tokens, position, ran } = drafted;
        let Ran { hidden, drawn, margins } = ran.expect("the pass drew behind these rows");
        eval([&tokens, &drawn].into_iter().chain(&margins))?;
        let (tokens, drawn) = (read::<u32>(&tokens)?, read::<u32>(&drawn)?);
        let right = tokens.iter().zip(&drawn).take_while(|(draft, drawn)| draft == drawn).count();
        let doubtful = match &margins {
            Some(margins) => read::<f32>(margins)?.iter().position(|&margin| margin < self.tie),
            None => None,
        };
        let sure = doubtful.map_or(right, |row| right.min(row));

        let mut accepted = 0;
        let mut turned = false;
        for &token in &tokens[..sure] {
            let length = sequence.tokens.len();
            sequence.commit_drawn(token, &self.text);
            accepted += 1;
            turned = sequence.has_ended() || sequence.tokens.len() != length + 1;
            if turned {
                break;
            }
        }
        let alone = !turned && doubtful == Some(accepted);
        // The row of the last token accepted stays, unless it is to be run again.
        let rows = accepted + usize::from(!alone);
        sequence.cache.rewind(position + rows)?;
        if !turned && !alone {
            sequence.drawn = Some(Drawn::Known(drawn[accepted]));
        }
        if rows > 0 {
            sequence.observe(&hidden.try_index((.., ..rows as i32, ..))?, position)?;
        }
        let rejected = !turned && !alone && accepted < tokens.len();
        sequence.drafts[draft].learn(accepted + usize::from(rejected), accepted)?;
        sequence.verified(draft, tokens.len(), accepted);
        Ok(())
    }
}

/// An array's values on the host.
fn read<T: mlx_rs::ArrayElement + Clone>(array: &Array) -> Result<Vec<T>> {
    let values = array.try_as_slice::<T>().map_err(|e| Error::Array(e.to_string()))?;
    Ok(values.to_vec())
}
