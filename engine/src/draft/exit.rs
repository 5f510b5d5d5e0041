//! Drafts from the model's own first layers: the hidden state after N layers, through the final
//! norm and the head.
//!
//! Needs no further weights, but its drafts are accepted only if the first layers already predict
//! the next token; `steersman calibrate` finds the N for which that pays, if there is one.
//!
//! Source: LayerSkip (arXiv:2404.16710), without its training.

use super::{Drafter, FirstRows, MovingRate, RateByDepth, Start};
use crate::cache::Cache;
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::Model;

pub struct EarlyExitDrafter {
    /// Position of the model's cache before the draft.
    position: usize,
    rates: RateByDepth,
}

impl EarlyExitDrafter {
    pub fn new() -> Self {
        Self { position: 0, rates: RateByDepth::prior(0.5) }
    }
}

impl Drafter for EarlyExitDrafter {
    fn kind(&self) -> DraftKind {
        DraftKind::EarlyExit
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
        cache: &mut Cache,
        tokens: &[u32],
        _depth: usize,
    ) -> Result<Start> {
        self.position = cache.position;
        cache.mark_draft();
        let tokens = tokens[tokens.len() - 1..].to_vec();
        Ok(Start::Network(FirstRows { tokens, hidden: None }))
    }

    /// The verifying pass runs the first layers again, together with the others.
    fn end(&mut self, of_model: &mut Cache) -> Result<()> {
        of_model.rewind_draft(self.position)
    }

    fn learn(&mut self, judged: usize, accepted: usize) -> Result<()> {
        self.rates.learn(judged, accepted);
        Ok(())
    }
}
