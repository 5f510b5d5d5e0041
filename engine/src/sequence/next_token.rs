//! The next token of a sequence until it is committed, and the rows that run for it.

use mlx_rs::Array;

use crate::cache::Checkpoint;
use crate::draft::{DraftTokens, HiddenRows};
use crate::error::Result;
use crate::sample::logprobs::Logprobs;
use crate::sample::samples::{Logits, SampleOf};

/// What is known of the token after the committed ones.
///
/// Logits are usable while their position is that of the cache. Those of an earlier position stay
/// for a rewind to it, until the next pass.
pub(super) enum Next {
    /// Rows must run first. `alone`: in a pass without other sequences, because of a near-tie.
    Missing { alone: bool },
    /// It can be sampled from these logits.
    Logits(NextLogits),
    /// It is sampled, and not committed. It can be sampled again from the logits, if there are any.
    Sampled { sampled: Sampled, logits: Option<NextLogits> },
    /// The next pass verifies a draft.
    Drafting { draft: Draft, logits: Option<NextLogits> },
    /// The rows of the cache from `from` on may be of other tokens: tokens were rewound, or the
    /// token that has run was not committed.
    Stale { from: usize, logits: Option<NextLogits> },
}

impl Next {
    /// What is known of a token with these logits, if any.
    pub fn from_logits(logits: Option<NextLogits>) -> Self {
        logits.map_or(Self::Missing { alone: false }, Self::Logits)
    }

    /// The logits of the newest pass.
    pub fn logits(&self) -> Option<&NextLogits> {
        match self {
            Self::Missing { .. } => None,
            Self::Logits(logits) => Some(logits),
            Self::Sampled { logits, .. }
            | Self::Drafting { logits, .. }
            | Self::Stale { logits, .. } => logits.as_ref(),
        }
    }

    /// The logits of the newest pass.
    pub fn into_logits(self) -> Option<NextLogits> {
        match self {
            Self::Missing { .. } => None,
            Self::Logits(logits) => Some(logits),
            Self::Sampled { logits, .. }
            | Self::Drafting { logits, .. }
            | Self::Stale { logits, .. } => logits,
        }
    }
}

impl Default for Next {
    fn default() -> Self {
        Self::Missing { alone: false }
    }
}

/// Logits of a token.
#[derive(Debug, Clone)]
pub(super) struct NextLogits {
    /// Position of the token.
    pub position: usize,
    /// The logits of a pass.
    pub logits: Logits,
    /// The row of the token in `logits`.
    pub row: usize,
    /// The cache before the rows of the pass, if rows of other sequences ran in it.
    pub before: Option<Checkpoint>,
}

impl NextLogits {
    /// The logits of the token alone, [1, V].
    pub fn own(&self) -> Result<Array> {
        // A pass has fewer than 2^31 rows.
        let row = self.row as i32;
        self.logits.rows(row..row + 1)
    }
}

/// A sampled token.
#[derive(Debug)]
pub struct Sampled {
    pub(super) token: SampledToken,
    /// The probabilities of the token, if they are reported.
    pub logprobs: Option<Logprobs>,
}

#[derive(Debug)]
pub(super) enum SampledToken {
    /// On the host, as after the verification of a draft.
    Read(u32),
    /// Possibly still being computed. `before` is the cache before a pass with other sequences, to
    /// which a near-tie rewinds.
    Computing { sample: SampleOf, before: Option<Checkpoint> },
}

impl Sampled {
    /// Returns true if the token is on the host.
    pub(super) fn is_read(&self) -> bool {
        match &self.token {
            SampledToken::Computing { sample, .. } => sample.is_read(),
            SampledToken::Read(_) => true,
        }
    }

    /// Waits for the token. Returns it with the cache before its pass, if rounding in that pass may
    /// have decided it: its margin is less than `least_margin`.
    pub fn read(&self, least_margin: f32) -> Result<(u32, Option<&Checkpoint>)> {
        match &self.token {
            SampledToken::Read(token) => Ok((*token, None)),
            SampledToken::Computing { sample, before } => {
                let token = sample.token()?;
                let Some(before) = before else { return Ok((token, None)) };
                let is_near_tie = sample.margin()? < least_margin;
                Ok((token, is_near_tie.then_some(before)))
            }
        }
    }

    pub(super) fn wait(&self) -> Result<()> {
        match &self.token {
            SampledToken::Computing { sample, .. } => sample.token().map(drop),
            SampledToken::Read(_) => Ok(()),
        }
    }
}

/// Drafted tokens, from proposal to verification.
pub struct Draft {
    /// Index of the drafter that proposed them.
    pub drafter: usize,
    /// The drafted tokens.
    pub tokens: DraftTokens,
    /// Position of the row before them, that of the last committed token.
    pub position: usize,
    /// The result of the pass over them, once it has run.
    pub pass: Option<VerifyPass>,
}

/// Result of the pass over the last committed token and the drafted tokens.
pub struct VerifyPass {
    /// Hidden states of its m + 1 rows.
    pub hidden: HiddenRows,
    /// The token sampled after the first row. Those of the other rows follow it.
    pub first: SampleOf,
    /// The logits of the pass, and the row in them after the first row.
    pub logits: (Logits, usize),
}

/// The rows of a sequence in the next pass.
pub enum Rows {
    /// A chunk of the prompt, or injected text.
    Tokens(Vec<u32>),
    /// The token sampled last.
    Sampled(SampleOf),
    /// The last committed token, and this draft after it.
    Draft(Vec<u32>, DraftTokens),
    /// No rows: the sampled token ends the reply in any case, or there is none.
    Nothing,
}
