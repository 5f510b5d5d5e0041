//! Drafts from a smaller model with the same vocabulary, hybrids included.
//!
//! Source: speculative decoding (arXiv:2211.17192).

use std::rc::Rc;

use mlx_rs::Array;

use super::{At, CATCH_UP, Chain, Chance, Draft, last_row};
use crate::cache::{Cache, Span};
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::{Model, Pass};

/// Tokens of a prompt, its last, that are read when the model is asked for the first time.
const FIRST_READ: usize = 256;

/// The smaller model, and what it remembers of one request.
pub struct DraftModel {
    model: Rc<dyn Model>,
    cache: Cache,
    /// How many of the request's tokens it has read or passed over.
    read: usize,
    /// Where drafted rows begin that `learn` has not judged yet.
    mark: Option<usize>,
    chances: Chain,
}

impl DraftModel {
    /// Has read nothing.
    ///
    /// # Errors
    /// [`crate::Error::Array`] when MLX cannot make a cache.
    pub fn new(model: Rc<dyn Model>) -> Result<Self> {
        let cache = model.new_cache()?;
        Ok(Self { model, cache, read: 0, mark: None, chances: Chain::prior(0.6) })
    }

    fn run(&mut self, tokens: &Array) -> Result<Array> {
        let span = Span { rows: tokens.dim(0), cache: &mut self.cache };
        let hidden = self.model.forward(tokens, &mut [span], Pass::WHOLE)?;
        self.model.logits(&last_row(&hidden)?)
    }
}

impl Draft for DraftModel {
    fn kind(&self) -> DraftKind {
        DraftKind::Model
    }

    fn chances(&self) -> [f32; DEPTH] {
        self.chances.values()
    }

    fn learned(&mut self) -> &mut [Chance] {
        &mut self.chances.0
    }

    fn propose(&mut self, at: &mut At<'_>, depth: usize) -> Result<Option<Array>> {
        let all = at.tokens.len();
        // The beginning of a text is worth more than what was missed later.
        let most = if self.read == 0 { FIRST_READ } else { CATCH_UP };
        if all - self.read > most {
            self.cache = self.model.new_cache()?;
            self.read = all - most;
        }
        let missed = &at.tokens[self.read..];
        let first = self.run(&Array::from_slice(missed, &[missed.len() as i32]))?;
        self.read = all;
        self.cache.mark_draft();
        self.mark = Some(self.cache.position);
        Ok(Some(at.chain(&first, depth, |_, token| self.run(token))?))
    }

    /// What was read cannot be cut in every model, so it begins anew.
    fn rewind(&mut self, tokens: &[u32]) -> Result<()> {
        if self.read > tokens.len() || self.mark.is_some() {
            self.cache = self.model.new_cache()?;
            (self.read, self.mark) = (0, None);
        }
        Ok(())
    }

    fn learn(&mut self, judged: usize, accepted: usize) -> Result<()> {
        self.chances.learn(judged, accepted);
        if let Some(mark) = self.mark.take() {
            // The last draft was drawn but not run.
            let right = accepted.min(self.cache.position - mark);
            self.cache.rewind_draft(mark + right)?;
            self.read += right;
        }
        Ok(())
    }
}
