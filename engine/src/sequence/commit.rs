//! The commit of a token, and all that follows until the next one can be sampled.
//!
//! [`Sequence::commit`] commits a token that was sampled or is forced, and performs what follows
//! from it: one [`Do`] after the other, as [`Steering::next`](super::steering::Steering::next)
//! returns them. [`Sequence::follow_grammar`] lets the grammar follow the tokens, and
//! [`Sequence::settle`] the cache; it samples the next token. Nothing here is called from within
//! itself.

use std::time::Instant;

use super::Sequence;
use super::form::no_token;
use super::reply::Pushed;
use super::steering::{Do, Now};
use crate::error::Result;
use crate::policy::LoopReport;
use crate::prefix::Prefixes;
use crate::request::FinishReason;
use crate::sample::logprobs::Logprobs;
use crate::sample::penalties::Penalty;
use crate::text::Text;

/// Most tokens that a request may make the model run again after rewinds and changes of sampling,
/// or twice its own tokens if that is more. A cache without checkpoints may run the whole reply
/// again for one token, and all other requests wait.
pub const RERUN_TOKENS: usize = 16 * 1024;

/// Tokens that a resumed cache counts as at least: resuming takes as long as some rows.
const LEAST_RERUN: usize = 16;

impl Sequence {
    /// Commits a sampled token: sends its text, calls the policy if it is due, and performs the
    /// answer.
    ///
    /// Injected text is committed here as well; the token sampled in the meantime is dropped, like
    /// a rejected draft. A policy that fails closed ends the request.
    pub fn commit(&mut self, token: u32, logprobs: Option<&Logprobs>, text: &Text) {
        let committed = self
            .commit_token(token, logprobs, text)
            .and_then(|first| first.map_or(Ok(()), |first| self.perform(first, text)));
        self.check(committed);
    }

    /// Continues what follows the last commit, after a call of the policy has ended.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when the policy failed and the profile fails closed.
    pub fn steer(&mut self, text: &Text) -> Result<()> {
        self.perform(Do::Nothing, text)
    }

    /// Makes the call of the policy that waits for the logits of the next token, once they are there.
    ///
    /// # Errors
    /// The errors of [`Sequence::steer`].
    pub fn see_outlook(&mut self, text: &Text) -> Result<()> {
        let is_due = self.steering.awaits_outlook() && self.timeline.next_logits().is_some();
        if is_due && !self.is_away() { self.steer(text) } else { Ok(()) }
    }

    /// Sends the rest of a reply that has ended; a call that its end completes gets its verdict
    /// first. False while the policy is called on a thread: then again after its answer.
    ///
    /// # Errors
    /// The errors of [`Sequence::steer`].
    pub fn complete(&mut self, text: &Text) -> Result<bool> {
        self.steering.finish(&mut self.reply);
        self.steer(text)?;
        Ok(!self.is_away())
    }

    /// Commits a sampled token. Returns the first thing to do then; `None` if the reply has ended
    /// without it.
    fn commit_token(
        &mut self,
        token: u32,
        logprobs: Option<&Logprobs>,
        text: &Text,
    ) -> Result<Option<Do>> {
        if !self.steering.sampler().count_step(token) {
            let reason = "all tokens are banned";
            self.reply.note(format!("stopped after {} tokens: {reason}", self.reply.len()));
            return self.reject(FinishReason::Policy(reason.into()));
        }
        if !self.steering.is_allowed(token) {
            let reason = no_token(&mut self.reply);
            return self.reject(reason);
        }
        if text.eos().contains(&token) {
            if self.steering.awaits_form(&self.reply) {
                self.timeline.reject();
                let why = "the model ended its turn before the answer";
                let has_ended = self.has_ended();
                let Self { request, limits, timeline, steering, reply, .. } = self;
                let now = Now::new(request, limits, timeline, has_ended, text);
                let next = steering.close_reasoning("", why, reply, &now)?;
                return Ok(Some(next.unwrap_or(Do::Nothing)));
            }
            // Clients that score a prompt count one token after it, whichever it is.
            if self.request.prompt.is_some() {
                self.report_logprobs(token, logprobs, text)?;
            }
            self.steering.end_turn(token, &mut self.reply);
            return Ok(Some(Do::Nothing));
        }
        self.report_logprobs(token, logprobs, text)?;
        let was_late = self.samples_late();
        let (pushed, loop_found) = self.append(token);
        if !was_late && self.samples_late() {
            // The next token was sampled without the mask.
            self.timeline.drop_sampled();
        }
        self.steering.committed(token, &pushed, loop_found, &self.reply, &self.limits);
        Ok(Some(Do::Nothing))
    }

    fn reject(&mut self, reason: FinishReason) -> Result<Option<Do>> {
        self.timeline.reject();
        self.end = Some(reason);
        Ok(None)
    }

    fn report_logprobs(&mut self, token: u32, found: Option<&Logprobs>, text: &Text) -> Result<()> {
        if let Some(found) = found {
            self.steering.keep_drawn(token, self.reply.len(), found, &self.limits)?;
        }
        self.reply.report_logprobs(token, found, &self.request, text)
    }

    /// Appends one token to the reply and sends the text that it completes; returns a loop if it
    /// completes one.
    fn append(&mut self, token: u32) -> (Pushed, Option<LoopReport>) {
        self.timeline.commit(token);
        self.drafting.read(&self.timeline);
        let pushed = self.reply.push(token);
        let loop_found = self.steering.read(token, &pushed, &self.reply);
        (pushed, loop_found)
    }

    /// Performs `next`, and then what steering returns, until nothing is left to do or a call of
    /// the policy is away.
    fn perform(&mut self, mut next: Do, text: &Text) -> Result<()> {
        loop {
            match next {
                Do::Nothing | Do::Away => {}
                Do::Commit(token) => {
                    self.append(token);
                }
                Do::Force(_) => {
                    unreachable!("the grammar forces tokens when nothing is left to do")
                }
                Do::Rewind(rewind, note) => {
                    let to = rewind.to;
                    self.reply.rewind(*rewind);
                    self.timeline.rewind(to);
                    self.steering.rewound(to, self.timeline.prompt());
                    self.drafting.rewind(&self.timeline)?;
                    note.into_iter().for_each(|note| self.reply.note(note));
                }
                Do::Resample => self.timeline.drop_sampled(),
                Do::EndTurn(token) => {
                    self.timeline.commit(token);
                    self.reply.count_end();
                    if !self.has_ended() {
                        self.end = Some(FinishReason::Stop);
                    }
                }
                Do::End(reason) => self.end = Some(reason),
                Do::Reject(reason) => {
                    self.timeline.reject();
                    self.end = Some(reason);
                }
            }
            let has_ended = self.has_ended();
            let Self { request, limits, timeline, steering, reply, .. } = self;
            next = steering.next(reply, &Now::new(request, limits, timeline, has_ended, text))?;
            if let Do::Nothing | Do::Away = next {
                return Ok(());
            }
        }
    }

    /// Lets the cache follow the tokens, and samples the next token if it was dropped. While a call
    /// of the policy is away, the tokens are not final: later.
    pub fn settle(&mut self, prefixes: &mut Prefixes, vocabulary: i32) -> Result<()> {
        if self.is_away() {
            return Ok(());
        }
        if let Some(again) = self.timeline.settle(self.has_ended(), prefixes, vocabulary)? {
            self.count_rerun(again);
        }
        if self.timeline.can_sample() && !self.has_ended() { self.sample() } else { Ok(()) }
    }

    /// Returns true if the grammar is to follow the tokens now: they are final, and the next one is
    /// to be sampled.
    fn is_grammar_due(&self) -> bool {
        let timeline = &self.timeline;
        let is_dropped =
            !timeline.has_sampled() && (timeline.is_caught_up() || timeline.is_stale());
        is_dropped && !self.is_away()
    }

    /// Lets the mask of the next token wait since `now`, if it is to be computed and does not wait
    /// already. Returns whether it waits.
    pub fn postpone_mask(&mut self, now: Instant) -> bool {
        let is_due = self.is_grammar_due() && !self.timeline.is_stale();
        let waits = is_due && self.steering.is_in_form(&self.reply);
        if waits {
            self.awaits_mask.get_or_insert(now);
            self.drafting.count_plain_step(false);
        }
        waits
    }

    /// Advances the grammar to the committed tokens, commits those that it forces, and computes the
    /// mask of the next one. While a call of the policy is away, or if the next token is sampled:
    /// later.
    ///
    /// # Errors
    /// The errors of [`Sequence::steer`] and of the grammar.
    pub fn follow_grammar(&mut self, text: &Text) -> Result<()> {
        if self.is_away() {
            return Ok(());
        }
        self.awaits_mask = None;
        if !self.is_grammar_due() {
            return Ok(());
        }
        loop {
            let has_ended = self.has_ended();
            let Self { request, limits, timeline, steering, reply, .. } = self;
            let now = Now::new(request, limits, timeline, has_ended, text);
            match steering.follow(reply, &now)? {
                Do::Commit(token) => {
                    self.append(token);
                }
                Do::Force(tokens) => {
                    for token in tokens {
                        if self.has_ended() {
                            break;
                        }
                        let length = self.timeline.len();
                        self.commit(token, None, text);
                        self.forced += 1;
                        if self.is_away() || self.steering.awaits_outlook() {
                            return Ok(());
                        }
                        // A policy rewound or injected text, or the tag of a call was reached.
                        if self.timeline.len() != length + 1 {
                            break;
                        }
                    }
                }
                Do::End(reason) => self.end = Some(reason),
                _ => return Ok(()),
            }
        }
    }

    /// Samples the next token from its logits, with the parameters of the next step.
    fn sample(&mut self) -> Result<()> {
        let position = self.timeline.position();
        let sampler = self.steering.sampler();
        let mut row = sampler.row(sampler.steps(), position);
        row.mask = self.steering.mask();
        if !self.request.penalties.is_empty() {
            let (tokens, prompt) = (self.timeline.tokens(), self.timeline.prompt());
            row.penalties = Penalty::all(&self.request.penalties, tokens, prompt);
        }
        // The margin is that of the second.
        let of_policies = (self.limits.candidates > 0).then(|| self.limits.candidates.max(2));
        let top = self.request.logprobs.max(of_policies);
        self.timeline.sample(row, top, of_policies.is_some())
    }

    /// Counts the tokens that run again after the cache was rewound; too many end the request.
    fn count_rerun(&mut self, tokens: usize) {
        self.rerun += tokens.max(LEAST_RERUN);
        let limit = RERUN_TOKENS.max(2 * self.timeline.len());
        if self.rerun > limit && !self.has_ended() {
            let reason = format!("the policy made the model run more than {limit} tokens again");
            self.reply.note(reason.clone());
            self.end = Some(FinishReason::Policy(reason));
        }
    }

    /// Takes a checkpoint if one is due.
    pub fn take_checkpoint(&mut self) -> Result<()> {
        let is_final = !self.has_ended() && !self.is_away();
        if !(is_final && self.takes_checkpoints()) {
            return Ok(());
        }
        self.timeline.take_checkpoint(self.reply.phase_start(), self.limits.checkpoint_every)
    }

    /// Returns true if rewinding the cache needs checkpoints, and the plan asks for them.
    pub(super) fn takes_checkpoints(&self) -> bool {
        self.limits.checkpoint_every > 0 && !self.timeline.cache().is_truncatable()
    }
}
