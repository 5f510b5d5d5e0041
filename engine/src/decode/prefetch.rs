//! Prefix prefetch: computes, while the engine is idle, prefixes that requests will begin with.
//!
//! These are a profile's system text and tools (`profiles.NAME.warm`) and, after a turn, the
//! conversation as the template will render it when the client sends the reply back, without its
//! reasoning. They are tokenized like requests (`sequence/prepare.rs`). An arriving request takes precedence and
//! waits for at most one chunk.

use mlx_rs::transforms::eval;

use super::network::Network;
use crate::cache::{Cache, Span};
use crate::error::{Error, Result, catch_panic};
use crate::nn::token_ids;
use crate::prefix::Retention;
use crate::schedule::memory::PassBytes;
use crate::schedule::queue::Queue;
use crate::schedule::saved::SavedState;
use crate::sequence::Sequence;
use crate::sequence::expected::{Expected, Prefix};

/// Tokens of a chunk, for which a request waits at most.
const CHUNK: usize = 64;

/// Computes prefixes while no request runs.
pub struct Prefetch {
    /// The prefix that is being computed.
    running: Option<Running>,
    /// Whether the next turn of a conversation is prefetched.
    turns: bool,
}

/// A prefix that is being computed.
struct Running {
    prefix: Prefix,
    cache: Cache,
}

impl Prefetch {
    /// Nothing is computed yet. `turns`: whether the next turn of a conversation is prefetched.
    pub fn new(turns: bool) -> Self {
        Self { running: None, turns }
    }

    /// Lets `queue` expect the next turn of a conversation, if it is to be prefetched.
    pub fn expect_turn(&self, queue: &Queue, sequence: &Sequence, retention: Retention) {
        // The next turn after a raw prompt is unknown: no template rendered it.
        if self.turns && sequence.request().prompt.is_none() {
            queue.expect(Expected::after(sequence, retention));
        }
    }

    /// Stops computing a prefix so that a request can run. It starts again later, from the state saved
    /// last.
    pub fn interrupt(&mut self, queue: &Queue) {
        if let Some(Running { prefix, .. }) = self.running.take() {
            queue.add_prefix(prefix);
        }
    }

    /// Computes one chunk of a prefix of `queue` that is shorter than `context`; false if there is nothing to prefetch.
    pub fn compute_chunk(
        &mut self,
        network: &mut Network,
        saved: &mut SavedState,
        bytes: &PassBytes,
        queue: &Queue,
        context: usize,
    ) -> bool {
        let running = match self.running.take() {
            Some(running) => Ok(running),
            None => match queue.take_prefix() {
                Some(prefix) => Err(prefix),
                None => return false,
            },
        };
        let result = catch_panic("being prefetched", || {
            let mut running = running.or_else(|prefix| Running::begin(saved, prefix, context))?;
            running.compute(network, saved, bytes)?;
            Ok(running)
        });
        match result {
            Ok(running) if running.cache.position < running.prefix.tokens.len() => {
                self.running = Some(running);
            }
            Ok(_) => {}
            Err(error @ Error::Panic { .. }) => {
                tracing::error!(%error, "prefix prefetch panicked");
                saved.recover_from(&error);
            }
            Err(error) => tracing::debug!(%error, "prefix prefetch failed"),
        }
        true
    }
}

impl Running {
    fn begin(saved: &mut SavedState, mut prefix: Prefix, context: usize) -> Result<Self> {
        let tokens = &mut prefix.tokens;
        if tokens.len() < saved.min_tokens() || tokens.len() >= context {
            tokens.clear();
        }
        // Resuming leaves the last token to run; a request will have at least one more than the prefix.
        let (cache, _) = saved.prefixes_mut().resume(&[&tokens[..], &[0]].concat())?;
        Ok(Self { prefix, cache })
    }

    /// Runs one chunk, and saves the state at the end of the prefix and at regular positions before.
    fn compute(
        &mut self,
        network: &mut Network,
        saved: &mut SavedState,
        bytes: &PassBytes,
    ) -> Result<()> {
        let Self { prefix: Prefix { tokens, retention, name }, cache } = self;
        let start = cache.position;
        if start >= tokens.len() {
            return saved.prefixes_mut().retain(tokens, *retention);
        }
        let every = saved.prefixes().save_interval().unwrap_or(usize::MAX);
        let stop = (start / every + 1).saturating_mul(every);
        let end = tokens.len().min(start + CHUNK).min(stop);
        // Nothing is evicted for a request that may not come.
        let memory = saved.memory();
        memory.check(memory.of_step(bytes, [(&*cache, end - start)]))?;
        network.set_threads(end - start);
        let ids = token_ids(&tokens[start..end]);
        network.forward(&ids, &mut [Span { rows: ids.dim(0), cache }])?;
        eval(&cache.arrays()?)?;
        let prefixes = saved.prefixes_mut();
        prefixes.reporter().count(|counts| counts.ahead_tokens += (end - start) as u64);
        if end == tokens.len() {
            let plan = prefixes.plan_save(cache, tokens, *retention).named(*name);
            prefixes.save(cache, tokens, &plan)?;
        } else if end == stop {
            // Limits the work lost when a request interrupts.
            let plan = prefixes.plan_save(cache, &tokens[..end], Retention::default()).named(*name);
            prefixes.save(cache, &tokens[..end], &plan)?;
        }
        Ok(())
    }
}
