//! Several choices of one request: its prompt runs once.
//!
//! The first choice is a sequence like any other. The others wait with it, prepared, until its prompt has
//! run. Then each becomes a sequence with a copy of its cache, and samples its first token from the
//! same logits, with its own seed. So the first choice is what a request for a single choice gets, and each
//! other one what a request with its seed gets.
//!
//! A choice beside which somebody waits for a slot, or for which there is no room, waits for a turn of its profile
//! like a preempted sequence (`turns.rs`). So does a choice with another prompt, which its policies may have changed:
//! it starts alone.

use super::Decoder;
use super::admit::new_sequence;
use crate::error::{Error, RequestError, Result, catch_panic};
use crate::prefix::Retention;
use crate::request::Event;
use crate::sequence::Sequence;
use crate::sequence::prepare::{Prepared, log_refused};

/// Starts the choices of requests whose prompts have run.
pub fn start_choices(decoder: &mut Decoder) {
    let is_due = |sequence: &Sequence| {
        // The others fail with a first choice that has failed.
        sequence.has_others() && sequence.timeline().has_run_prompt() && !sequence.has_failed()
    };
    while let Some(at) = decoder.schedule.running().iter().position(is_due) {
        for other in decoder.schedule.running_mut()[at].take_others() {
            if other.events.is_closed() {
                continue;
            }
            let may_start = decoder.schedule.may_start_choice(&other, decoder.resources());
            let (id, span) = (other.request.id.clone(), other.request.span.clone());
            let events = other.events.clone();
            let first = decoder.schedule.running_mut().remove(at);
            let started = catch_panic("being admitted", || match may_start {
                true => start_choice(decoder, &first, other),
                false => postpone_choice(decoder, &first, other),
            });
            decoder.schedule.running_mut().insert(at, first);
            match started {
                Ok(sequence) => decoder.schedule.running_mut().extend(sequence),
                Err(error) => {
                    span.log(|| log_refused(&id, &error));
                    decoder.recover_from(&error);
                    let _ = events.send(Event::Failed(error));
                }
            }
        }
    }
}

/// The sequence of a choice beside `first`, unless it waits.
fn start_choice(
    decoder: &mut Decoder,
    first: &Sequence,
    other: Prepared,
) -> Result<Option<Sequence>> {
    if !has_prompt_of(first, &other) {
        return postpone_choice(decoder, first, other);
    }
    let cache = match decoder.saved.copy(first.timeline().cache()) {
        Err(Error::Request(RequestError::Memory { .. })) => {
            return postpone_choice(decoder, first, other);
        }
        cache => cache?,
    };
    let mut sequence = new_sequence(decoder, other, cache)?;
    sample_first(decoder, first, &mut sequence)?;
    sequence.take_checkpoint()?;
    decoder.schedule.queue().count_turn(&sequence.request().profile);
    Ok(Some(sequence))
}

/// Lets a choice beside `first` wait for room. It keeps its first token, and resumes from the state
/// after the prompt.
fn postpone_choice(
    decoder: &mut Decoder,
    first: &Sequence,
    other: Prepared,
) -> Result<Option<Sequence>> {
    let has_prompt = has_prompt_of(first, &other);
    // Shared: it is dropped before anything is written to it.
    let cache = if has_prompt { first.timeline().cache().clone() } else { decoder.saved.empty() };
    let mut sequence = new_sequence(decoder, other, cache)?;
    sequence.wait_since(decoder.schedule.queue().stamp());
    if has_prompt {
        decoder.saved.save(first, Retention::default());
        sample_first(decoder, first, &mut sequence)?;
        decoder.drop_state(&mut sequence)?;
    }
    if let Some(waiting) = decoder.unless_ended(sequence) {
        decoder.schedule.push_preempted(waiting);
    }
    Ok(None)
}

/// Samples the first token of `sequence` from the logits after the prompt of `first`.
fn sample_first(decoder: &mut Decoder, first: &Sequence, sequence: &mut Sequence) -> Result<()> {
    sequence.timeline_mut().follow(first.timeline());
    decoder.settle(sequence)
}

/// Returns true if the prompt of `other` has run with that of `first`.
fn has_prompt_of(first: &Sequence, other: &Prepared) -> bool {
    let prompt = &first.timeline().tokens()[..first.timeline().prompt()];
    !other.request.needs_whole_prompt() && prompt == other.prompt
}
