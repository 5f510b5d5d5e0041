//! The model on the first of several ranks: it tells the others of each pass, and computes its own part.
//!
//! What it tells them it also submits, so that no rank waits for an array that this one never computes.

use std::cell::Cell;
use std::rc::Rc;

use mlx_rs::Array;

use super::{Model, Mtp, Pass};
use crate::cache::{Cache, Span};
use crate::error::{Error, Result};
use crate::lazy::{is_available, submit};
use crate::ranks::{Id, Layers, Log, Operation, Ranks, Rows};

/// A part of a model, with the log that the ranks with the others read.
pub struct Lead {
    part: Box<dyn Model>,
    ranks: Ranks,
    log: Rc<Log>,
    /// Passes between two comparisons; 0 for none.
    compare: u32,
    /// Passes since the last comparison.
    passes: Cell<u32>,
}

impl Lead {
    /// The first of `ranks`, which writes `log`, and compares the hidden states of all after `compare` passes each; never if it
    /// is 0.
    pub fn new(part: Box<dyn Model>, ranks: Ranks, log: Rc<Log>, compare: u32) -> Self {
        assert!(ranks.is_first(), "only the first rank decides");
        Self { part, ranks, log, compare, passes: Cell::new(0) }
    }

    /// The rows of a pass for the other ranks. Tokens that are being computed are not waited for.
    fn rows(tokens: &Array, spans: &[Span<'_>]) -> Result<Rows> {
        let number = |span: &Span<'_>| -> Result<(Id, usize, usize)> {
            let id = span.cache.id().ok_or_else(|| {
                Error::Array("a cache of another model runs on several ranks".into())
            })?;
            Ok((id, span.cache.position, usize::try_from(span.rows).unwrap_or(0)))
        };
        let spans = spans.iter().map(number).collect::<Result<_>>()?;
        let known = || tokens.try_as_slice::<u32>().ok().map(<[u32]>::to_vec);
        Ok(Rows { spans, tokens: is_available(tokens).then(known).flatten() })
    }

    /// The `tokens` of a pass as all ranks have them: those that were in its entry or, if they were not `known`, exchanged.
    fn tokens(&self, tokens: &Array, known: bool) -> Result<Array> {
        if known { Ok(tokens.clone()) } else { self.ranks.of_first(tokens.clone()) }
    }
}

/// The last dimension of hidden states.
fn width(hidden: &Array) -> usize {
    usize::try_from(hidden.dim(-1)).unwrap_or(0)
}

impl Model for Lead {
    fn depth(&self) -> usize {
        self.part.depth()
    }

    fn context(&self) -> Option<u64> {
        self.part.context()
    }

    fn new_cache(&self) -> Result<Cache> {
        Ok(self.part.new_cache()?.mirrored(&self.log, |new| Operation::NewCache { new }))
    }

    fn tell(&self, tokens: &Array, spans: &[Span<'_>], pass: Pass<'_>) -> Result<Option<Array>> {
        self.log.check()?;
        let rows = Self::rows(tokens, spans)?;
        let (known, exit) = (rows.tokens.is_some(), pass.exit);
        self.log.note(Operation::Forward(rows, Layers { exit, skip: pass.skip.to_vec() }));
        self.tokens(tokens, known).map(Some)
    }

    fn embed(&self, tokens: &Array) -> Result<Array> {
        self.part.embed(tokens)
    }

    fn layer_inputs(&self, tokens: &Array, embedded: &Array) -> Result<Option<Array>> {
        self.part.layer_inputs(tokens, embedded)
    }

    fn mix(&self, layer: usize, x: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        self.part.mix(layer, x, spans)
    }

    fn feed_forward(&self, layer: usize, x: &Array) -> Result<Array> {
        self.part.feed_forward(layer, x)
    }

    fn end_layer(&self, layer: usize, x: Array, inputs: Option<&Array>) -> Result<Array> {
        self.part.end_layer(layer, x, inputs)
    }

    fn final_norm(&self, x: &Array) -> Result<Array> {
        let hidden = self.part.final_norm(x)?;
        submit([&hidden])?;
        if self.compare > 0 {
            self.passes.set((self.passes.get() + 1) % self.compare);
            if self.passes.get() == 0 {
                self.log.note(Operation::Compare);
                self.ranks.compare(&hidden)?;
            }
        }
        Ok(hidden)
    }

    fn logits(&self, hidden: &Array) -> Result<Array> {
        self.log.check()?;
        let rows = usize::try_from(hidden.dim(1)).unwrap_or(0);
        self.log.note(Operation::Logits { rows, width: width(hidden) });
        let logits = self.part.logits(&self.ranks.of_first(hidden.clone())?)?;
        submit([&logits])?;
        Ok(logits)
    }

    fn sums(&self, like: &Array, times: usize) -> Result<Option<Array>> {
        self.log.check()?;
        let [rows, width] = [like.dim(1), like.dim(2)];
        self.log.note(Operation::Sums { rows, width, times });
        Ok(Some(self.ranks.sums(like.shape(), like.dtype(), times)?))
    }

    fn mtp(&self) -> Option<&dyn Mtp> {
        self.part.mtp().map(|_| self as &dyn Mtp)
    }
}

impl Lead {
    fn mtp_part(&self) -> &dyn Mtp {
        self.part.mtp().expect("`mtp` returned it")
    }
}

impl Mtp for Lead {
    fn new_cache(&self) -> Result<Cache> {
        let cache = self.mtp_part().new_cache()?;
        Ok(cache.mirrored(&self.log, |new| Operation::NewMtpCache { new }))
    }

    fn forward(&self, hidden: &Array, tokens: &Array, spans: &mut [Span<'_>]) -> Result<Array> {
        self.log.check()?;
        let rows = Self::rows(tokens, spans)?;
        let known = rows.tokens.is_some();
        self.log.note(Operation::Mtp(rows, width(hidden)));
        let tokens = self.tokens(tokens, known)?;
        let hidden = self.ranks.of_first(hidden.clone())?;
        let drafted = self.mtp_part().forward(&hidden, &tokens, spans)?;
        submit([&drafted])?;
        Ok(drafted)
    }
}
