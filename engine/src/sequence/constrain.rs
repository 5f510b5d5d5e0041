//! Constrained decoding: the grammar of one reply, kept beside its tokens.
//!
//! The tokens of the sequence are the truth. [`Constraint::follow`] brings the grammar to their
//! end, whatever happened to them since: commits, rewinds, injected text.
//!
//! # Where it begins
//! With [`Scope::Answer`], where the answer begins; reasoning stays free, and is closed if the
//! model ends its turn there. The line breaks after `</think>`, which models write there, are
//! committed first. With [`Scope::Opening`], there too, until the answer is text. With
//! [`Scope::Call`], after the tag of each call outside of reasoning, up to its closing tag. With
//! [`Scope::Message`], where each message begins, up to the end of its header, or of its body if
//! that is a call or an answer in a form.
//!
//! # When the mask is computed
//! The mask of a token needs the token before it on the host. The pass of that token is queued
//! before it is read, as for any sequence; it is read, the grammar advances and its mask is
//! computed while the pass runs, and sampling is queued behind the pass as a graph of its own. Only
//! a mask that takes longer than the pass delays the token.
//!
//! # Forced tokens
//! A token that must come next is the only one of its mask, whatever the logits. It is committed
//! without being sampled, and all that follow one another run in one pass: a form makes replies
//! faster. The drafters rest where a grammar applies, because each row of their pass would need a
//! mask that depends on the rows before it.

use std::collections::VecDeque;
use std::rc::Rc;

use crate::error::Result;
use crate::grammar::{Grammar, Scope};

/// The grammar of one reply.
pub struct Constraint {
    /// Before its first token.
    fresh: Grammar,
    running: Option<Running>,
    /// Whether forced tokens are committed without being sampled.
    forces: bool,
    /// The mask of the next token.
    mask: Option<Rc<[u32]>>,
    /// Line breaks after the reasoning that are still to be committed.
    pub(super) gap: VecDeque<u32>,
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
pub(super) enum Followed {
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
        Self { fresh: grammar, running: None, forces, mask: None, gap: VecDeque::new() }
    }

    /// Where in the reply it applies.
    pub fn scope(&self) -> Scope {
        self.fresh.scope
    }

    /// The mask of the next token, after [`Constraint::compute_mask`]; `None` if any may follow.
    pub fn mask(&self) -> Option<Rc<[u32]>> {
        self.mask.clone()
    }

    /// Returns true if the mask of the next token has `token`.
    pub fn allows(&self, token: u32) -> bool {
        let word = |mask: &Rc<[u32]>| mask.get(token as usize / 32).copied().unwrap_or(0);
        self.mask.as_ref().is_none_or(|mask| word(mask) >> (token % 32) & 1 == 1)
    }

    /// Brings the grammar to the end of `tokens`; it applies from `start`, or not at all now.
    pub(super) fn follow(&mut self, tokens: &[u32], start: Option<usize>) -> Result<Followed> {
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

    /// Returns true if the form would be cut off at the end of `tokens`, where it applies from `start`.
    pub(super) fn is_cut_off(&mut self, tokens: &[u32], start: usize) -> bool {
        match self.follow(tokens, Some(start)) {
            Ok(Followed::Open) => {
                self.running.as_mut().is_some_and(|running| !running.grammar.is_complete())
            }
            Ok(Followed::Ended) => false,
            Ok(Followed::Violated) | Err(_) => true,
        }
    }

    /// The tokens that must come next, now that the grammar is at the end of the tokens.
    pub(super) fn forced(&mut self) -> Vec<u32> {
        match &mut self.running {
            Some(running) if self.forces => running.grammar.forced(),
            _ => Vec::new(),
        }
    }

    /// Computes the mask of the next token.
    pub(super) fn compute_mask(&mut self) -> Result<()> {
        let mask = self.running.as_mut().map(|running| running.grammar.mask()).transpose()?;
        self.mask = mask.map(Into::into);
        Ok(())
    }

    /// The position of the first token of the grammar, if it has begun.
    pub(super) fn start(&self) -> Option<usize> {
        self.running.as_ref().map(|running| running.start)
    }
}
