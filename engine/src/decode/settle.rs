//! Settles a sequence after a commit: its cache follows its tokens, and its next token is sampled.

use std::time::Instant;

use super::Decoder;
use crate::error::Result;
use crate::sample::samples::Logits;
use crate::sequence::Sequence;
use crate::sequence::next_token::NextLogits;
use crate::sequence::rewind::ReplyCheckpoint;

impl Decoder {
    /// Commits a sampled token and settles the consequences.
    pub(crate) fn commit_and_settle(&mut self, sequence: &mut Sequence, token: u32) -> Result<()> {
        sequence.commit_sampled(token, &self.text);
        self.settle(sequence)
    }

    /// Rewinds the cache of `sequence` if its tokens were rewound, and samples the next token again
    /// if it was dropped. While its policy is called on a thread, its tokens are not final: later. So is a mask after
    /// those of this step have taken as long as a step may: 32 choices in a form with slow masks delay the others by
    /// one of them.
    pub(crate) fn settle(&mut self, sequence: &mut Sequence) -> Result<()> {
        if sequence.hooks.is_away() {
            return Ok(());
        }
        let waiting = sequence.awaits_mask.take();
        if sequence.sampled.is_none() && (sequence.is_caught_up() || sequence.stale_from.is_some())
        {
            let start = Instant::now();
            let is_late = self.mask_time > self.stall && sequence.stale_from.is_none();
            if is_late && sequence.is_in_form() {
                sequence.awaits_mask = waiting.or(Some(start));
                sequence.plain_steps = 0;
                return Ok(());
            }
            let followed = sequence.follow_grammar(&self.text);
            self.mask_time += start.elapsed();
            followed?;
            if sequence.hooks.is_away() {
                return Ok(());
            }
        }
        if let Some(to) = sequence.stale_from.take() {
            sequence.checkpoints.retain(|checkpoint| checkpoint.position() <= to);
            if sequence.next_logits.as_ref().is_some_and(|next| next.position > to) {
                sequence.next_logits = None;
            }
            if !cache_is_usable(sequence, to) {
                self.rewind_cache(sequence, to)?;
                sequence.count_rerun();
            }
        }
        if sequence.sampled.is_some() || !sequence.is_caught_up() || sequence.has_ended() {
            return Ok(());
        }
        if !cache_is_usable(sequence, sequence.tokens.len()) {
            self.rewind_cache(sequence, sequence.tokens.len())?;
            sequence.count_rerun();
            return Ok(());
        }
        sequence.sample_again()
    }

    /// Rewinds the cache of `sequence` to at most `to` tokens, so that the next token can be sampled
    /// from there.
    fn rewind_cache(&mut self, sequence: &mut Sequence, to: usize) -> Result<()> {
        let length = sequence.tokens.len();
        if sequence.cache.is_truncatable() {
            // The last token runs again for its logits.
            sequence.cache.truncate(to.min(length - 1));
            return Ok(());
        }
        let is_usable = |checkpoint: &&ReplyCheckpoint| {
            let position = checkpoint.position();
            position <= to
                && position <= sequence.cache.position
                && (position < length || checkpoint.logits.is_some())
        };
        if let Some(checkpoint) = sequence.checkpoints.iter().rev().find(is_usable) {
            sequence.cache.rewind_to(&checkpoint.cache)?;
            let position = checkpoint.position();
            sequence.next_logits = checkpoint.logits.clone().map(|logits| {
                let logits = Logits::new(logits, self.vocabulary);
                NextLogits { position, logits, row: 0, before: None }
            });
            return Ok(());
        }
        (sequence.cache, _) = self.prefixes.resume(&sequence.tokens)?;
        Ok(())
    }
}

/// Whether the cache holds at most `to` tokens and the next token can be sampled from it.
fn cache_is_usable(sequence: &Sequence, to: usize) -> bool {
    let position = sequence.cache.position;
    let has_logits = sequence.next_logits.as_ref().is_some_and(|next| next.position == position);
    position <= to && (position < sequence.tokens.len() || has_logits || sequence.has_ended())
}
