//! Drafts from the model's own first layers: the hidden state after N layers, through the final
//! norm and the head.
//!
//! Needs no further weights, but its drafts are accepted only if the first layers already predict
//! the next token; `steersman calibrate` finds the N for which that pays, if there is one.
//!
//! Source: LayerSkip (arXiv:2404.16710), without its training.

use mlx_rs::Array;

use super::{DraftContext, Drafter, MovingRate, RateByDepth};
use crate::cache::Span;
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::Pass;

pub struct EarlyExitDrafter {
    layers: usize,
    rates: RateByDepth,
}

impl EarlyExitDrafter {
    /// Drafts with the first `layers` layers.
    pub fn new(layers: usize) -> Self {
        Self { layers, rates: RateByDepth::prior(0.5) }
    }

    fn run(&self, context: &mut DraftContext<'_>, token: &Array) -> Result<Array> {
        let pass = Pass { exit: Some(self.layers), ..context.part };
        let span = Span { rows: 1, cache: context.cache };
        context.model.logits(&context.model.forward(token, &mut [span], pass)?)
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

    fn propose(&mut self, context: &mut DraftContext<'_>, depth: usize) -> Result<Option<Array>> {
        let position = context.cache.position;
        context.cache.mark_draft();
        let last = Array::from_slice(&context.tokens[context.tokens.len() - 1..], &[1]);
        let first = self.run(context, &last)?;
        let draft =
            context.draft_sequentially(&first, depth, |context, token| self.run(context, token))?;
        // The verifying pass runs the first layers again, together with the others.
        context.cache.rewind_draft(position)?;
        Ok(Some(draft))
    }

    fn learn(&mut self, judged: usize, accepted: usize) -> Result<()> {
        self.rates.learn(judged, accepted);
        Ok(())
    }
}
