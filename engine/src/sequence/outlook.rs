//! What the model would draw next, for the policies that watch tokens.

use super::next_token::NextLogits;
use crate::error::Result;
use crate::policy::{Candidate, MIN_LOGPROB, Outlook, Plan, Watched, WatchedToken};
use crate::text::Text;

/// The tokens that a plan watches.
#[derive(Debug)]
pub struct Lookout {
    watched: Vec<WatchedToken>,
    /// Their ids.
    tokens: Vec<u32>,
}

impl Lookout {
    /// The lookout of `plan`; `None` if it watches nothing. Texts that are no single token are left out, with a note.
    pub fn new(plan: &Plan, text: &Text, notes: &mut Vec<String>) -> Option<Self> {
        if plan.watch.is_empty() {
            return None;
        }
        let (mut watched, mut tokens) = (Vec::new(), Vec::new());
        for one in &plan.watch {
            let token = match one {
                WatchedToken::Token(token) => Some(*token),
                WatchedToken::ReasoningEnd => text.reasoning_end(),
                WatchedToken::Text(wanted) => {
                    let token = text.single_token(wanted);
                    if token.is_none() {
                        notes.push(format!("`{wanted}` is no single token, so it is not watched"));
                    }
                    token
                }
            };
            if let Some(token) = token {
                watched.push(one.clone());
                tokens.push(token);
            }
        }
        Some(Self { watched, tokens })
    }

    /// What the model would draw, according to its `logits`.
    pub(super) fn see(&self, logits: &NextLogits) -> Result<Outlook> {
        let (best, logprobs) = logits.logits.outlook(logits.row, &self.tokens)?;
        let mut logprobs = logprobs.into_iter().map(|logprob| logprob.max(MIN_LOGPROB));
        let best = Candidate { token: best, logprob: logprobs.next().unwrap_or(MIN_LOGPROB) };
        let watched = self.watched.iter().zip(logprobs);
        let watched = watched.map(|(one, logprob)| Watched { watched: one.clone(), logprob });
        Ok(Outlook { best, watched: watched.collect() })
    }
}
