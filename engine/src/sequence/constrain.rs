//! Constrained decoding: the grammar of one reply, kept beside its tokens.
//!
//! The tokens of the sequence are the truth. [`Constraint::follow`] brings the grammar to their end,
//! whatever happened to them since: commits, rewinds, injected text.
//!
//! # Where it begins
//! With [`Scope::Answer`], where the answer begins; reasoning stays free, and is closed if the model ends its
//! turn there. The line breaks after `</think>`, which models write there, are committed first. With
//! [`Scope::Opening`], there too, until the answer is text. With [`Scope::Call`], after the tag of each call
//! outside of reasoning, up to its closing tag. With [`Scope::Message`], where each message begins, up to the
//! end of its header, or of its body if that is a call or an answer in a form.
//!
//! # When the mask is computed
//! The mask of a token needs the token before it on the host. The pass of that token is queued before it
//! is read, as for any sequence; it is read, the grammar advances and its mask is computed while the pass
//! runs, and sampling is queued behind the pass as a graph of its own. Only a mask that takes longer than
//! the pass delays the token.
//!
//! # Forced tokens
//! A token that must come next is the only one of its mask, whatever the logits. It is committed without
//! being sampled, and all that follow one another run in one pass: a form makes replies faster.
//! The drafters rest where a grammar applies, because each row of their pass would need a mask that
//! depends on the rows before it.

use std::rc::Rc;

use super::Sequence;
use crate::error::Result;
use crate::grammar::{Grammar, Scope};
use crate::request::{FinishReason, Request};
use crate::text::{Phase, Text};

/// Why a reply ends that no token may continue.
const NO_TOKEN: &str = "the form of the reply and the banned tokens leave no token";

/// The grammar of one reply.
pub struct Constraint {
    /// Before its first token.
    fresh: Grammar,
    running: Option<Running>,
    /// Whether forced tokens are committed without being sampled.
    forces: bool,
    /// The mask of the next token.
    mask: Option<Rc<[u32]>>,
}

/// A grammar that has begun.
struct Running {
    /// The position of its first token.
    start: usize,
    grammar: Grammar,
    /// Its tokens.
    tokens: Vec<u32>,
}

/// The state of the tokens so far in the grammar.
#[derive(Debug, PartialEq, Eq)]
enum Followed {
    /// They are in the form, or outside of its scope.
    Open,
    /// They are complete, and nothing can follow.
    Ended,
    /// The form does not contain them.
    Violated,
}

impl Constraint {
    /// At the start of a reply; `forces` is [`crate::config::SpeculationConfig::forced`].
    pub fn new(grammar: Grammar, forces: bool) -> Self {
        Self { fresh: grammar, running: None, forces, mask: None }
    }

    /// Where in the reply it applies.
    pub fn scope(&self) -> Scope {
        self.fresh.scope
    }

    /// The mask of the next token, after [`Sequence::follow_grammar`]; `None` if any may follow.
    pub fn mask(&self) -> Option<Rc<[u32]>> {
        self.mask.clone()
    }

    /// Brings the grammar to the end of `tokens`; it applies from `start`, or not at all now.
    fn follow(&mut self, tokens: &[u32], start: Option<usize>) -> Result<Followed> {
        self.mask = None;
        let Some(start) = start else {
            self.running = None;
            return Ok(Followed::Open);
        };
        if self.running.as_ref().is_none_or(|running| running.start != start) {
            let grammar = self.fresh.clone();
            self.running = Some(Running { start, grammar, tokens: Vec::new() });
        }
        let Some(Running { grammar, tokens: own, .. }) = &mut self.running else {
            return Ok(Followed::Open);
        };
        let tokens = &tokens[start..];
        let equal = own.iter().zip(tokens).take_while(|(own, token)| own == token).count();
        if equal < own.len() {
            grammar.rewind(own.len() - equal)?;
            own.truncate(equal);
        }
        for &token in &tokens[equal..] {
            if !grammar.commit(token)? {
                return Ok(Followed::Violated);
            }
            own.push(token);
        }
        Ok(if grammar.has_ended() { Followed::Ended } else { Followed::Open })
    }

    /// The tokens that must come next, now that the grammar is at the end of the tokens.
    fn forced(&mut self) -> Vec<u32> {
        match &mut self.running {
            Some(running) if self.forces => running.grammar.forced(),
            _ => Vec::new(),
        }
    }

    fn compute_mask(&mut self) -> Result<()> {
        let mask = self.running.as_mut().map(|running| running.grammar.mask()).transpose()?;
        self.mask = mask.map(Into::into);
        Ok(())
    }

    fn start(&self) -> Option<usize> {
        self.running.as_ref().map(|running| running.start)
    }
}

impl Sequence {
    /// Whether the next token is sampled only when all tokens before it are on the host: a grammar applies
    /// to it, or tokens before it change its logits, or its probability is reported, to the client or policies.
    pub fn samples_late(&self) -> bool {
        let Request { penalties, logprobs, .. } = &self.request;
        let is_reported = logprobs.is_some() || self.limits.candidates > 0;
        !penalties.is_empty() || is_reported || self.is_in_form()
    }

    /// Whether a grammar applies to the next token.
    pub fn is_in_form(&self) -> bool {
        let reply = &self.reply_state.reply;
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

    /// Whether the reply reasons, and an answer in a form must follow.
    pub fn awaits_form(&self) -> bool {
        self.is_answer_fixed() && self.reply_state.reply.phase() == Phase::Reasoning
    }

    /// Whether a form covers the whole answer.
    pub fn is_answer_fixed(&self) -> bool {
        self.constraint.as_ref().is_some_and(|constraint| {
            matches!(constraint.scope(), Scope::Answer | Scope::Message { is_fixed: true })
        })
    }

    /// Whether policies cannot write here: the form covers the rest of the reply.
    pub fn is_form_fixed(&self) -> bool {
        self.is_answer_fixed() && self.is_in_form()
    }

    /// Whether the mask of the next token has `token`.
    pub fn is_allowed(&self, token: u32) -> bool {
        let mask = self.constraint.as_ref().and_then(|constraint| constraint.mask.as_ref());
        let word = |mask: &Rc<[u32]>| mask.get(token as usize / 32).copied().unwrap_or(0);
        mask.is_none_or(|mask| word(mask) >> (token % 32) & 1 == 1)
    }

    /// Ends the reply because every token is banned or outside of the form.
    pub fn end_without_token(&mut self) -> Result<()> {
        self.note(format!("stopped after {} tokens: {NO_TOKEN}", self.reply_len()));
        self.end(FinishReason::Policy(NO_TOKEN.into()));
        Ok(())
    }

    /// Advances the grammar to the committed tokens, commits those that it forces, and computes the mask
    /// of the next one. Ends the reply where the form ends.
    pub fn follow_grammar(&mut self, text: &Text) -> Result<()> {
        while !self.has_ended() {
            let start = self.grammar_start(text)?;
            self.check_limits();
            if self.has_ended() {
                return Ok(());
            }
            let Some(constraint) = &mut self.constraint else { return Ok(()) };
            match constraint.follow(&self.tokens, start)? {
                Followed::Open => {}
                Followed::Ended
                    if matches!(constraint.scope(), Scope::Answer | Scope::Message { .. }) =>
                {
                    self.end(FinishReason::Stop);
                    return Ok(());
                }
                Followed::Ended => {}
                Followed::Violated => return self.end_without_token(),
            }
            let forced = constraint.forced();
            if forced.is_empty() {
                return constraint.compute_mask();
            }
            for token in forced {
                if self.has_ended() {
                    break;
                }
                let length = self.tokens.len();
                // Those of a token that was not committed.
                self.logprobs = None;
                self.commit_sampled(token, text);
                self.progress.forced += 1;
                if self.hooks.is_away() {
                    return Ok(());
                }
                // A policy rewound or injected text, or the tag of a call was reached.
                if self.tokens.len() != length + 1 {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Where the grammar applies from, if it applies to the next token.
    fn grammar_start(&mut self, text: &Text) -> Result<Option<usize>> {
        let Some(constraint) = self.constraint.as_ref().filter(|_| self.is_in_form()) else {
            return Ok(None);
        };
        if matches!(constraint.scope(), Scope::Message { .. }) {
            return Ok(self.reply_state.reply.message_start(self.prompt));
        }
        // A rewind may have taken its first tokens too.
        let start = constraint.start().filter(|&start| start <= self.tokens.len());
        if start.is_none() && constraint.scope() == Scope::Answer && self.is_after_reasoning(text) {
            for token in text.encode_plain("\n\n")? {
                if self.tokens_left() > 0 {
                    self.append(token);
                }
            }
        }
        Ok(Some(start.unwrap_or(self.tokens.len())))
    }

    /// Whether the last token is the `</think>` of the reply.
    fn is_after_reasoning(&self, text: &Text) -> bool {
        self.reply_len() > 0
            && self.tokens.last().is_some_and(|&token| text.closes_reasoning(token))
    }
}
