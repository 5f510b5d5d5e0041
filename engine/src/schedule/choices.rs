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

use mlx_rs::transforms::eval;
use tokio::sync::mpsc::UnboundedSender;

use crate::cache::Cache;
use crate::decode::Decoder;
use crate::error::{Error, RequestError, Result, catch_panic};
use crate::prefix::Retention;
use crate::request::Event;
use crate::sequence::Sequence;
use crate::sequence::prepare::{Prepared, log_refused};

impl Decoder {
    /// Starts the choices of requests whose prompts have run.
    pub(crate) fn start_choices(&mut self) {
        let is_due = |sequence: &Sequence| {
            // The others fail with a first choice that has failed.
            !sequence.others.is_empty()
                && sequence.cache.position >= sequence.prompt
                && !sequence.has_failed()
        };
        while let Some(at) = self.sequences.iter().position(is_due) {
            for other in std::mem::take(&mut self.sequences[at].others) {
                if other.events.is_closed() {
                    continue;
                }
                let may_start = self.may_start_choice(&other);
                let (id, span) = (other.request.id.clone(), other.request.span.clone());
                let events = other.events.clone();
                let first = self.sequences.remove(at);
                let started = catch_panic("being admitted", || match may_start {
                    true => self.start_choice(&first, other),
                    false => self.postpone_choice(&first, other),
                });
                self.sequences.insert(at, first);
                match started {
                    Ok(sequence) => self.sequences.extend(sequence),
                    Err(error) => {
                        span.log(|| log_refused(&id, &error));
                        self.recover_from(&error);
                        let _ = events.send(Event::Failed(error));
                    }
                }
            }
        }
    }

    /// The sequence of a choice beside `first`, unless it waits.
    fn start_choice(&mut self, first: &Sequence, other: Prepared) -> Result<Option<Sequence>> {
        if !first.has_prompt_of(&other) {
            return self.postpone_choice(first, other);
        }
        let cache = match self.copy(&first.cache) {
            Err(Error::Request(RequestError::Memory { .. })) => {
                return self.postpone_choice(first, other);
            }
            cache => cache?,
        };
        let mut sequence = self.sequence(other, cache)?;
        self.sample_first(first, &mut sequence)?;
        sequence.take_checkpoint()?;
        self.queue.count_turn(&sequence.request.profile);
        Ok(Some(sequence))
    }

    /// Lets a choice beside `first` wait for room. It keeps its first token, and resumes from the state
    /// after the prompt.
    fn postpone_choice(&mut self, first: &Sequence, other: Prepared) -> Result<Option<Sequence>> {
        let has_prompt = first.has_prompt_of(&other);
        // Shared: it is dropped before anything is written to it.
        let cache = if has_prompt { first.cache.clone() } else { self.prefixes.empty() };
        let mut sequence = self.sequence(other, cache)?;
        sequence.since = self.queue.stamp();
        if has_prompt {
            self.save(first, Retention::default());
            self.sample_first(first, &mut sequence)?;
            self.drop_state(&mut sequence)?;
        }
        let waiting = self.unless_ended(sequence);
        self.preempted.extend(waiting);
        Ok(None)
    }

    /// Samples the first token of `sequence` from the logits after the prompt of `first`.
    fn sample_first(&mut self, first: &Sequence, sequence: &mut Sequence) -> Result<()> {
        sequence.next_logits.clone_from(&first.next_logits);
        self.settle(sequence)
    }

    /// A copy that shares no buffer that is written in place.
    fn copy(&mut self, cache: &Cache) -> Result<Cache> {
        let mut copy = self.prefixes.empty();
        let (position, shared) = (cache.position, cache.shared_count());
        self.make_room(self.memory.growth_behind(&copy, shared, position))?;
        let kv = (shared < position).then(|| cache.key_values(shared, position)).transpose()?;
        copy.restore(cache.shared(), kv.as_slice(), &cache.recurrent_state()?, position)?;
        eval(&copy.arrays()?)?;
        Ok(copy)
    }
}

impl Sequence {
    /// Whether the prompt of `other` has run with its own.
    fn has_prompt_of(&self, other: &Prepared) -> bool {
        !other.request.needs_whole_prompt() && self.tokens[..self.prompt] == other.prompt
    }

    /// Where the events of the request go, and those of the choices that wait for its prompt, which end
    /// with it.
    pub(crate) fn take_receivers(&mut self) -> Vec<UnboundedSender<Event>> {
        let others = self.others.drain(..).map(|other| other.events);
        std::iter::once(self.events.clone()).chain(others).collect()
    }
}
