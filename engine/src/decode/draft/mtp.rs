//! Drafts from the checkpoint's multi-token-prediction layer, fed with the model's hidden states.
//!
//! Beyond its first guess it is fed with its own output, for which it was not trained: guesses get
//! worse with depth, which the chances by depth show to the governor.
//!
//! Its memory is a suffix of the text. Positions count from where it began to read, as rotary
//! attention depends on distances alone.
//!
//! Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2).

use mlx_rs::Array;
use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;

use super::{At, CATCH_UP, Chain, Chance, Draft, last_row};
use crate::cache::{Cache, Span};
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::Mtp;

/// What the layer remembers of one request.
pub struct MtpDraft {
    cache: Cache,
    /// Hidden states of rows that it has not read yet, [1, R, D] each, neighbours in order.
    hidden: Vec<Array>,
    /// Position behind the last of them.
    end: usize,
    /// Whether rows between those read and those not read yet are missing.
    gap: bool,
    chances: Chain,
}

impl MtpDraft {
    /// Has read nothing.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot make a cache.
    pub fn new(mtp: &dyn Mtp) -> Result<Self> {
        let (cache, hidden) = (mtp.new_cache()?, Vec::new());
        Ok(Self { cache, hidden, end: 0, gap: false, chances: Chain::prior(0.7) })
    }

    fn unread(&self) -> i32 {
        self.hidden.iter().map(|rows| rows.dim(1)).sum()
    }
}

impl Draft for MtpDraft {
    fn kind(&self) -> DraftKind {
        DraftKind::Mtp
    }

    fn chances(&self) -> [f32; DEPTH] {
        self.chances.values()
    }

    fn learned(&mut self) -> &mut [Chance] {
        &mut self.chances.0
    }

    fn propose(&mut self, at: &mut At<'_>, depth: usize) -> Result<Option<Array>> {
        let Some(mtp) = at.model.mtp() else { return Ok(None) };
        // Every row but the one of the last token has run, and was observed if it ran here.
        let rows = self.unread();
        if rows == 0 || self.end + 1 != at.tokens.len() {
            return Ok(None);
        }
        let run = |hidden: &Array, tokens: &Array, cache: &mut Cache| {
            mtp.forward(hidden, tokens, &mut Span { rows: tokens.dim(0), cache })
        };
        if std::mem::take(&mut self.gap) || rows > CATCH_UP as i32 {
            self.cache = mtp.new_cache()?;
        }
        let rows = rows.min(CATCH_UP as i32);
        let hidden = concatenate(&self.hidden, 1)?;
        let hidden = hidden.try_index((.., hidden.dim(1) - rows.., ..))?;
        let following = &at.tokens[at.tokens.len() - rows as usize..];
        let following = Array::from_slice(following, &[rows]);
        let mut last = last_row(&run(&hidden, &following, &mut self.cache)?)?;
        self.hidden.clear();

        let (position, cache) = (self.cache.position, &mut self.cache);
        cache.mark_draft();
        let first = at.model.logits(&last)?;
        let drafts = at.chain(&first, depth, |at, token| {
            last = run(&last, token, cache)?;
            at.model.logits(&last)
        })?;
        // The model's own hidden states will say it better.
        cache.rewind_draft(position)?;
        Ok(Some(drafts))
    }

    fn learn(&mut self, judged: usize, accepted: usize) -> Result<()> {
        self.chances.learn(judged, accepted);
        Ok(())
    }

    fn rewind(&mut self, _tokens: &[u32]) -> Result<()> {
        self.hidden.clear();
        (self.end, self.gap) = (0, true);
        Ok(())
    }

    fn observe(&mut self, hidden: &Array, position: usize) -> Result<()> {
        let rows = hidden.dim(1);
        if position != self.end {
            self.hidden.clear();
            self.gap = true;
        }
        self.end = position + rows as usize;
        // More than a catch-up reads is not kept, so that a long plain stretch costs no memory.
        if rows > CATCH_UP as i32 {
            self.hidden = vec![hidden.try_index((.., rows - CATCH_UP as i32 - 1.., ..))?];
            return Ok(());
        }
        self.hidden.push(hidden.clone());
        while self.unread() - self.hidden[0].dim(1) > CATCH_UP as i32 {
            self.hidden.remove(0);
        }
        Ok(())
    }
}
