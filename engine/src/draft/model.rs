//! Drafts from a smaller model with the same vocabulary, hybrids included.
//!
//! Source: speculative decoding (arXiv:2211.17192).

use std::rc::Rc;

use super::{CATCH_UP, Drafter, FirstRows, MovingRate, RateByDepth, Start};
use crate::cache::Cache;
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::Model;

/// Tokens at the end of a prompt that are run before the first draft.
const FIRST_READ: usize = 256;

/// The smaller model and its cache for one request.
pub struct ModelDrafter {
    model: Rc<dyn Model>,
    cache: Cache,
    /// Tokens of the request that have been run or skipped.
    read: usize,
    /// Cache position before the draft, until `learn` verifies it.
    draft_start: Option<usize>,
    rates: RateByDepth,
}

impl ModelDrafter {
    pub fn new(model: Rc<dyn Model>) -> Result<Self> {
        let cache = model.new_cache()?;
        Ok(Self { model, cache, read: 0, draft_start: None, rates: RateByDepth::prior(0.6) })
    }
}

impl Drafter for ModelDrafter {
    fn kind(&self) -> DraftKind {
        DraftKind::Model
    }

    fn acceptance_rates(&self) -> [f32; DEPTH] {
        self.rates.values()
    }

    fn learned_rates(&mut self) -> &mut [MovingRate] {
        &mut self.rates.0
    }

    fn start(
        &mut self,
        _model: &dyn Model,
        _cache: &mut Cache,
        tokens: &[u32],
        _depth: usize,
    ) -> Result<Start> {
        // The first draft is worth more context than a later catch-up.
        let most = if self.read == 0 { FIRST_READ } else { CATCH_UP };
        if tokens.len() - self.read > most {
            self.cache = self.model.new_cache()?;
            self.read = tokens.len() - most;
        }
        let first = tokens[self.read..].to_vec();
        self.read = tokens.len();
        Ok(Start::Network(FirstRows { tokens: first, hidden: None }))
    }

    fn cache<'a>(&'a mut self, _of_model: &'a mut Cache) -> &'a mut Cache {
        &mut self.cache
    }

    fn begin(&mut self, _of_model: &mut Cache) {
        self.cache.mark_draft();
        self.draft_start = Some(self.cache.position);
    }

    /// Not every model's cache can be truncated, so a rewind past the read tokens starts a new one.
    fn rewind(&mut self, tokens: &[u32]) -> Result<()> {
        if self.read > tokens.len() || self.draft_start.is_some() {
            self.cache = self.model.new_cache()?;
            (self.read, self.draft_start) = (0, None);
        }
        Ok(())
    }

    fn learn(&mut self, judged: usize, accepted: usize) -> Result<()> {
        self.rates.learn(judged, accepted);
        if let Some(start) = self.draft_start.take() {
            // The last drafted token was sampled but has not run.
            let accepted = accepted.min(self.cache.position - start);
            self.cache.rewind_draft(start + accepted)?;
            self.read += accepted;
        }
        Ok(())
    }
}
