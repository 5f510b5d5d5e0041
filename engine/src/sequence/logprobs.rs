//! Probabilities of committed tokens, for the client and the policies that ask for them.

use super::limits::Limits;
use super::reply::ClientReply;
use super::steering::Steering;
use crate::error::Result;
use crate::policy::{Candidate, DrawnToken, MAX_MARGIN, STEP_TOKENS};
use crate::request::{Event, Logprob, Request, TokenLogprob};
use crate::sample::logprobs::Logprobs;
use crate::text::{Phase, Text};

impl ClientReply {
    /// Sends the probabilities `found` of `token`, which is being committed, if it belongs to the
    /// answer and the client asks for them. A token that was forced is certain.
    pub fn report_logprobs(
        &mut self,
        token: u32,
        found: Option<&Logprobs>,
        request: &Request,
        text: &Text,
    ) -> Result<()> {
        let is_answer = self.phase() == Phase::Answer;
        if request.logprobs.is_none() || !(is_answer || request.prompt.is_some()) {
            return Ok(());
        }
        let one = |token: u32, logprob: f32| TokenLogprob { bytes: text.bytes(token), logprob };
        let logprob = match found {
            Some(found) => {
                let (values, top) = found.read()?;
                let (own, rest) =
                    values.split_first().map_or((0.0, &[][..]), |(own, rest)| (*own, rest));
                let top = top.into_iter().zip(rest).map(|(token, value)| one(token, *value));
                let top = top.take(request.logprobs.unwrap_or(0) as usize);
                Logprob { token: one(token, own), top: top.collect() }
            }
            None => {
                let certain = one(token, 0.0);
                let top = request.logprobs.is_some_and(|top| top > 0);
                Logprob {
                    top: if top { vec![certain.clone()] } else { Vec::new() },
                    token: certain,
                }
            }
        };
        self.send_event(Event::Logprob(logprob));
        self.mark_reported();
        Ok(())
    }
}

impl Steering {
    /// Keeps what the policies see of `token`, which the model drew as token `index` of the reply,
    /// if they ask for it.
    pub fn keep_drawn(
        &mut self,
        token: u32,
        index: usize,
        found: &Logprobs,
        limits: &Limits,
    ) -> Result<()> {
        if limits.candidates == 0 {
            return Ok(());
        }
        let (values, top) = found.read()?;
        let entropy = found.entropy()?;
        let mut likeliest = values[1..].iter().copied();
        let margin = match (likeliest.next(), likeliest.next()) {
            (Some(first), Some(second)) => (first - second).min(MAX_MARGIN),
            _ => MAX_MARGIN,
        };
        let candidates = top.into_iter().zip(&values[1..]).take(limits.candidates as usize);
        let candidates = candidates.filter(|(_, logprob)| logprob.is_finite());
        let candidate = |(token, &logprob): (u32, &f32)| Candidate { token, logprob };
        let index = index as u32;
        if self.drawn.len() >= 2 * STEP_TOKENS {
            self.drawn.drain(..STEP_TOKENS);
        }
        let candidates = candidates.map(candidate).collect();
        // No number that JSON lacks: traces replay.
        let entropy = entropy.max(0.0);
        self.drawn.push(DrawnToken { index, token, entropy, margin, candidates });
        Ok(())
    }
}
