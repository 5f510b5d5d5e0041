//! Probabilities of committed tokens, for the client and the policies that ask for them.

use super::Sequence;
use crate::error::Result;
use crate::policy::{Candidate, DrawnToken, MAX_MARGIN, STEP_TOKENS};
use crate::request::{Event, Logprob, TokenLogprob};
use crate::sample::logprobs::Logprobs;
use crate::text::{Phase, Text};

impl Sequence {
    /// Keeps the probabilities of `token`, which is being committed, for the policies if they ask for them, and
    /// sends them if it belongs to the answer and the client asks for them. A token that was forced is certain.
    pub fn report_logprobs(&mut self, token: u32, text: &Text) -> Result<()> {
        let found = self.logprobs.take();
        if let Some(found) = found.as_ref().filter(|_| self.limits.candidates > 0) {
            self.keep_drawn(token, found)?;
        }
        let is_answer = self.reply_state.reply.phase() == Phase::Answer;
        if self.request.logprobs.is_none() || !(is_answer || self.request.prompt.is_some()) {
            return Ok(());
        }
        let one = |token: u32, logprob: f32| TokenLogprob { bytes: text.bytes(token), logprob };
        let logprob = match found {
            Some(found) => {
                let (values, top) = found.read()?;
                let (own, rest) =
                    values.split_first().map_or((0.0, &[][..]), |(own, rest)| (*own, rest));
                let top = top.into_iter().zip(rest).map(|(token, value)| one(token, *value));
                let top = top.take(self.request.logprobs.unwrap_or(0) as usize);
                Logprob { token: one(token, own), top: top.collect() }
            }
            None => {
                let certain = one(token, 0.0);
                let top = self.request.logprobs.is_some_and(|top| top > 0);
                Logprob {
                    top: if top { vec![certain.clone()] } else { Vec::new() },
                    token: certain,
                }
            }
        };
        // Fails if the client has disconnected; the next step checks that.
        let _ = self.events.send(Event::Logprob(logprob));
        self.progress.reported_end = self.tokens.len() + 1;
        Ok(())
    }

    /// Keeps what the policies see of `token`, which the model drew.
    fn keep_drawn(&mut self, token: u32, found: &Logprobs) -> Result<()> {
        let (values, top) = found.read()?;
        let entropy = found.entropy()?;
        let mut likeliest = values[1..].iter().copied();
        let margin = match (likeliest.next(), likeliest.next()) {
            (Some(first), Some(second)) => (first - second).min(MAX_MARGIN),
            _ => MAX_MARGIN,
        };
        let candidates = top.into_iter().zip(&values[1..]).take(self.limits.candidates as usize);
        let candidates = candidates.filter(|(_, logprob)| logprob.is_finite());
        let candidate = |(token, &logprob): (u32, &f32)| Candidate { token, logprob };
        let index = self.reply_len() as u32;
        let drawn = &mut self.progress.drawn;
        if drawn.len() >= 2 * STEP_TOKENS {
            drawn.drain(..STEP_TOKENS);
        }
        let candidates = candidates.map(candidate).collect();
        // No number that JSON lacks: traces replay.
        let entropy = entropy.max(0.0);
        drawn.push(DrawnToken { index, token, entropy, margin, candidates });
        Ok(())
    }
}
