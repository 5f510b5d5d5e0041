//! Settles a sequence after a commit: its cache follows its tokens, and its next token is sampled.

use std::time::Instant;

use super::mask_time::MaskTime;
use super::network::Network;
use crate::error::Result;
use crate::prefix::Prefixes;
use crate::sequence::Sequence;
use crate::sequence::next_token::Sampled;

/// Commits a sampled token and settles the consequences. A near-tie in a pass with other sequences
/// is computed again in a pass of its own instead: the token does not depend on who else is there.
pub fn commit_sampled(
    network: &Network,
    masks: &MaskTime,
    prefixes: &mut Prefixes,
    sequence: &mut Sequence,
    sampled: Sampled,
) -> Result<()> {
    let (token, near_tie) = sampled.read(network.near_tie_margin())?;
    if let Some(before) = near_tie {
        return sequence.timeline_mut().run_again(before);
    }
    sequence.commit(token, sampled.logprobs.as_ref(), network.text());
    settle(network, masks, prefixes, sequence)
}

/// Lets grammar and cache of `sequence` follow its tokens, and samples the next token if it was
/// dropped. While a call of its policies is away, its tokens are not final: later. A mask waits for
/// the next step if those of this step have taken too long.
pub fn settle(
    network: &Network,
    masks: &MaskTime,
    prefixes: &mut Prefixes,
    sequence: &mut Sequence,
) -> Result<()> {
    sequence.see_outlook(network.text())?;
    let start = Instant::now();
    if masks.is_spent() && sequence.postpone_mask(start) {
        return Ok(());
    }
    let followed = sequence.follow_grammar(network.text());
    masks.add_since(start);
    followed?;
    sequence.settle(prefixes, network.vocabulary())
}
