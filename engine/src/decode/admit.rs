//! Admission: turns a prepared request into a sequence, with saved state.

use super::Decoder;
use crate::cache::Cache;
use crate::error::Result;
use crate::sequence::drafting::Drafting;
use crate::sequence::prepare::Prepared;
use crate::sequence::{Admitted, Sequence};

/// The sequence of a prepared request, with saved state. Does not run the model.
pub fn admit(decoder: &mut Decoder, prepared: Prepared) -> Result<Sequence> {
    let saved = &mut decoder.saved;
    let prompt = &prepared.prompt;
    let is_whole = prepared.request.needs_whole_prompt();
    let (chunk, bytes) = (decoder.schedule.chunk(), decoder.costs.bytes());
    saved.make_room_for(prompt, is_whole, chunk, bytes)?;
    let (cache, cached) = match is_whole {
        true => (saved.empty(), 0),
        false => saved.prefixes_mut().restore(prompt)?,
    };
    for &(at, retention) in prepared.save_points.iter().take_while(|&&(at, _)| at <= cached) {
        if at < saved.min_tokens() {
            continue;
        }
        if let Err(error) = saved.prefixes_mut().retain(&prompt[..at], retention) {
            let id = &prepared.request.id;
            prepared
                .request
                .span
                .log(|| tracing::warn!(id, %error, "retaining saved state failed"));
        }
    }
    let parting = match is_whole {
        true => None,
        false => saved.prefixes().parting(prompt, cached).filter(|at| *at >= saved.min_tokens()),
    };
    let mut sequence = new_sequence(decoder, prepared, cache)?;
    // A policy may permit some save points only.
    if let Some(at) = parting.filter(|_| sequence.saves_anywhere()) {
        sequence.timeline_mut().add_save_point(at);
    }
    Ok(sequence)
}

/// The sequence of a prepared request whose `cache` holds the beginning of its prompt.
pub fn new_sequence(decoder: &mut Decoder, prepared: Prepared, cache: Cache) -> Result<Sequence> {
    let Decoder { network, saved, speculation, policies, schedule, costs, .. } = decoder;
    let (drafters, governor) = match costs.drafts() {
        Some(_) => {
            (speculation.new_drafters(network, &prepared.prompt)?, Some(speculation.new_governor()))
        }
        None => (Vec::new(), None),
    };
    let admitted = Admitted {
        number: schedule.next_number(),
        cache,
        drafting: Drafting::new(drafters, governor),
        hook_threads: policies.hooks().clone(),
        forces: speculation.forces_tokens(),
        skipped_layers: network.skipped_layers() as u32,
        store_min_tokens: saved.min_tokens(),
    };
    Ok(Sequence::new(prepared, admitted, network.text()))
}
