//! The form of a reply: where its grammar applies, and what it lets follow.

use std::rc::Rc;

use super::constrain::{Constraint, Followed};
use super::reply::ClientReply;
use super::steering::{Do, Now, Steering};
use crate::error::Result;
use crate::grammar::Scope;
use crate::request::FinishReason;
use crate::text::Phase;

/// Why a reply ends that no token may continue.
const NO_TOKEN: &str = "the form of the reply and the banned tokens leave no token";

impl Steering {
    /// The mask of the next token; `None` if any may follow.
    pub fn mask(&self) -> Option<Rc<[u32]>> {
        self.constraint.as_ref().and_then(Constraint::mask)
    }

    /// Returns true if the reply has a form.
    #[cfg(test)]
    pub fn has_form(&self) -> bool {
        self.constraint.is_some()
    }

    /// Returns true if a grammar applies to the next token.
    pub(super) fn is_in_form(&self, reply: &ClientReply) -> bool {
        let reply = reply.parsed();
        let phase = reply.phase();
        self.constraint.as_ref().is_some_and(|constraint| match constraint.scope() {
            Scope::Answer => phase != Phase::Reasoning,
            Scope::Opening => {
                phase == Phase::ToolCall || phase == Phase::Answer && reply.is_answer_blank()
            }
            Scope::Call => phase == Phase::ToolCall,
            Scope::Message { is_fixed } => {
                reply.in_header() || phase == Phase::ToolCall || is_fixed && phase == Phase::Answer
            }
        })
    }

    /// Returns true if the reply reasons, and an answer in a form must follow.
    pub fn awaits_form(&self, reply: &ClientReply) -> bool {
        self.is_answer_fixed() && reply.phase() == Phase::Reasoning
    }

    /// Returns true if a form covers the whole answer.
    pub(super) fn is_answer_fixed(&self) -> bool {
        self.constraint.as_ref().is_some_and(|constraint| {
            matches!(constraint.scope(), Scope::Answer | Scope::Message { is_fixed: true })
        })
    }

    /// Returns true if policies cannot write here: the form covers the rest of the reply.
    pub(super) fn is_form_fixed(&self, reply: &ClientReply) -> bool {
        self.is_answer_fixed() && self.is_in_form(reply)
    }

    /// Returns true if the mask of the next token has `token`.
    pub fn is_allowed(&self, token: u32) -> bool {
        self.constraint.as_ref().is_none_or(|constraint| constraint.allows(token))
    }

    /// Advances the grammar to the committed tokens, and computes the mask of the next one. Returns
    /// the tokens that it forces, if any, and the end of the reply where the form ends.
    pub fn follow(&mut self, reply: &mut ClientReply, now: &Now<'_>) -> Result<Do> {
        if now.has_ended {
            return Ok(Do::Nothing);
        }
        if let Some(token) = self.next_of_gap(reply, now)? {
            return Ok(Do::Commit(token));
        }
        if let Some(end) = now.end_at_limit(reply) {
            return Ok(end);
        }
        let start = self.grammar_start(reply, now);
        let Some(constraint) = &mut self.constraint else { return Ok(Do::Nothing) };
        match constraint.follow(now.tokens, start)? {
            Followed::Ended
                if matches!(constraint.scope(), Scope::Answer | Scope::Message { .. }) =>
            {
                return Ok(Do::End(FinishReason::Stop));
            }
            Followed::Open | Followed::Ended => {}
            Followed::Violated => return Ok(Do::End(no_token(reply))),
        }
        let forced = constraint.forced();
        if forced.is_empty() {
            constraint.compute_mask()?;
            return Ok(Do::Nothing);
        }
        Ok(Do::Force(forced))
    }

    /// Returns true if an end of the reply here would cut its form off.
    pub(super) fn is_form_open(&mut self, reply: &ClientReply, now: &Now<'_>) -> bool {
        let start = self.grammar_start(reply, now);
        let constraint = self.constraint.as_mut().zip(start);
        constraint.is_some_and(|(constraint, start)| constraint.is_cut_off(now.tokens, start))
    }

    /// The next of the line breaks that stand between the reasoning and an answer in a form.
    fn next_of_gap(&mut self, reply: &ClientReply, now: &Now<'_>) -> Result<Option<u32>> {
        let is_in_form = self.is_in_form(reply);
        let Some(constraint) = self.constraint.as_mut().filter(|_| is_in_form) else {
            return Ok(None);
        };
        if constraint.scope() != Scope::Answer {
            return Ok(None);
        }
        let has_begun = constraint.start().is_some_and(|start| start <= now.tokens.len());
        if constraint.gap.is_empty() && !has_begun && is_after_reasoning(now) {
            constraint.gap = now.text.encode_plain("\n\n")?.into();
        }
        if now.tokens_left(reply) == 0 {
            constraint.gap.clear();
        }
        Ok(constraint.gap.pop_front())
    }

    /// Where the grammar applies from, if it applies to the next token.
    fn grammar_start(&self, reply: &ClientReply, now: &Now<'_>) -> Option<usize> {
        let constraint = self.constraint.as_ref().filter(|_| self.is_in_form(reply))?;
        if matches!(constraint.scope(), Scope::Message { .. }) {
            return reply.parsed().message_start(now.prompt);
        }
        // A rewind may have taken its first tokens too.
        let start = constraint.start().filter(|&start| start <= now.tokens.len());
        Some(start.unwrap_or(now.tokens.len()))
    }
}

/// Notes that every token is banned or outside of the form, and returns the end of the reply: the
/// client has a part of the form, as at a limit.
pub fn no_token(reply: &mut ClientReply) -> FinishReason {
    reply.note(format!("stopped after {} tokens: {NO_TOKEN}", reply.len()));
    FinishReason::Length
}

/// Returns true if the last token is the `</think>` of the reply.
fn is_after_reasoning(now: &Now<'_>) -> bool {
    now.tokens.len() > now.prompt
        && now.tokens.last().is_some_and(|&token| now.text.closes_reasoning(token))
}
