//! Saves the state of sequences in the prefix cache.

use super::Decoder;
use crate::prefix::Retention;
use crate::sequence::Sequence;

impl Decoder {
    /// Saves the state of the prompt if the cache is at its next save point.
    pub(crate) fn save_at_save_point(&mut self, sequence: &mut Sequence) {
        let is_here = |&mut (position, _): &mut (usize, _)| position == sequence.cache.position;
        if let Some((_, retention)) = sequence.save_points.pop_front_if(is_here) {
            self.save(sequence, retention);
        }
    }

    /// Saves the state of the tokens that have run. A failure costs time later, nothing else.
    pub(crate) fn save(&mut self, sequence: &Sequence, retention: Retention) {
        let tokens = &sequence.tokens[..sequence.cache.position];
        if tokens.len() < self.store_min_tokens {
            return;
        }
        let plan = self.prefixes.plan_save(&sequence.cache, tokens, retention);
        let bytes = |rows| self.memory.of_saved(&sequence.cache, rows);
        // The store has a copy of its own until it is written.
        let room = self.make_room(bytes(tokens.len()) + plan.to_write.map_or(0, bytes));
        let saved = room.and_then(|()| self.prefixes.save(&sequence.cache, tokens, &plan));
        if let Err(error) = saved {
            let (id, span) = (&sequence.request.id, &sequence.request.span);
            span.log(|| tracing::warn!(request_id = id, %error, "saving state failed"));
        }
    }
}
