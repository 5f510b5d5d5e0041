//! Drafts from the model's own first layers: the hidden state after N of them, put through the
//! final norm and the head.
//!
//! Needs no further weights, but guesses well only where the first layers already know the next
//! token; `steersman calibrate` finds out for which N that is, if for any.
//!
//! Source: LayerSkip (arXiv:2404.16710), without its training.

use mlx_rs::Array;

use super::{At, Chain, Chance, Draft};
use crate::cache::Span;
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::model::Pass;

/// The first layers as a draft model.
pub struct EarlyExit {
    layers: usize,
    chances: Chain,
}

impl EarlyExit {
    /// Leaves after `layers` layers.
    pub fn new(layers: usize) -> Self {
        Self { layers, chances: Chain::prior(0.5) }
    }

    fn run(&self, at: &mut At<'_>, token: &Array) -> Result<Array> {
        let pass = Pass { exit: Some(self.layers), ..at.part };
        let span = Span { rows: 1, cache: at.cache };
        at.model.logits(&at.model.forward(token, &mut [span], pass)?)
    }
}

impl Draft for EarlyExit {
    fn kind(&self) -> DraftKind {
        DraftKind::EarlyExit
    }

    fn chances(&self) -> [f32; DEPTH] {
        self.chances.values()
    }

    fn learned(&mut self) -> &mut [Chance] {
        &mut self.chances.0
    }

    fn propose(&mut self, at: &mut At<'_>, depth: usize) -> Result<Option<Array>> {
        let position = at.cache.position;
        at.cache.mark_draft();
        let last = Array::from_slice(&at.tokens[at.tokens.len() - 1..], &[1]);
        let first = self.run(at, &last)?;
        let drafts = at.chain(&first, depth, |at, token| self.run(at, token))?;
        // The pass that verifies runs the first layers again, together with the others.
        at.cache.rewind_draft(position)?;
        Ok(Some(drafts))
    }

    fn learn(&mut self, judged: usize, accepted: usize) -> Result<()> {
        self.chances.learn(judged, accepted);
        Ok(())
    }
}
