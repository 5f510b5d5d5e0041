//! Prefix prefetch: computes, while the engine is idle, prefixes that requests will begin with.
//!
//! These are a profile's system text and tools (`profiles.NAME.warm`) and, after a turn, the
//! conversation as the template will render it when the client sends the reply back, without its
//! reasoning. They are tokenized like requests (`sequence/prepare.rs`). An arriving request takes precedence and
//! waits for at most one chunk.

use mlx_rs::transforms::eval;

use super::Decoder;
use crate::cache::{Cache, Span};
use crate::error::{Error, Result, catch_panic};
use crate::nn::token_ids;
use crate::prefix::Retention;
use crate::sequence::expected::Prefix;

/// Tokens of a chunk, for which a request waits at most.
const CHUNK: usize = 64;

/// A prefix that is being computed.
pub struct Prefetch {
    prefix: Prefix,
    cache: Cache,
}

impl Decoder {
    /// Stops computing a prefix so that a request can run. It starts again later, from the state saved
    /// last.
    pub(crate) fn interrupt_prefetch(&mut self) {
        if let Some(Prefetch { prefix, .. }) = self.prefetch.take() {
            self.queue.add_prefix(prefix);
        }
    }

    /// Computes one chunk; false if there is nothing to prefetch.
    pub(crate) fn prefetch_chunk(&mut self) -> bool {
        let running = match self.prefetch.take() {
            Some(running) => Ok(running),
            None => match self.queue.take_prefix() {
                Some(prefix) => Err(prefix),
                None => return false,
            },
        };
        let result = catch_panic("being prefetched", || {
            let mut running = running.or_else(|prefix| self.begin_prefetch(prefix))?;
            self.run_prefetch(&mut running)?;
            Ok(running)
        });
        match result {
            Ok(running) if running.cache.position < running.prefix.tokens.len() => {
                self.prefetch = Some(running);
            }
            Ok(_) => {}
            Err(error @ Error::Panic { .. }) => {
                tracing::error!(%error, "prefix prefetch panicked");
                self.recover_from(&error);
            }
            Err(error) => tracing::debug!(%error, "prefix prefetch failed"),
        }
        true
    }

    fn begin_prefetch(&mut self, mut prefix: Prefix) -> Result<Prefetch> {
        let tokens = &mut prefix.tokens;
        if tokens.len() < self.store_min_tokens || tokens.len() >= self.preparer.context {
            tokens.clear();
        }
        // Resuming leaves the last token to run; a request will have at least one more than the prefix.
        let (cache, _) = self.prefixes.resume(&[&tokens[..], &[0]].concat())?;
        Ok(Prefetch { prefix, cache })
    }

    /// Runs one chunk, and saves the state at the end of the prefix and at regular positions before.
    fn run_prefetch(&mut self, running: &mut Prefetch) -> Result<()> {
        let Prefetch { prefix: Prefix { tokens, retention }, cache } = running;
        let start = cache.position;
        if start >= tokens.len() {
            return self.prefixes.retain(tokens, *retention);
        }
        let every = self.prefixes.save_interval().unwrap_or(usize::MAX);
        let stop = (start / every + 1).saturating_mul(every);
        let end = tokens.len().min(start + CHUNK).min(stop);
        // Nothing is evicted for a request that may not come.
        self.memory.check(self.memory.of_step([(&*cache, end - start)]))?;
        self.set_threads(end - start);
        let ids = token_ids(&tokens[start..end]);
        self.model.forward(&ids, &mut [Span { rows: ids.dim(0), cache }], self.pass())?;
        eval(&cache.arrays()?)?;
        self.prefixes.reporter().count(|counts| counts.ahead_tokens += (end - start) as u64);
        if end == tokens.len() {
            let plan = self.prefixes.plan_save(cache, tokens, *retention);
            self.prefixes.save(cache, tokens, &plan)?;
        } else if end == stop {
            // Limits the work lost when a request interrupts.
            let plan = self.prefixes.plan_save(cache, &tokens[..end], Retention::default());
            self.prefixes.save(cache, &tokens[..end], &plan)?;
        }
        Ok(())
    }
}
