//! Steering: what is left to do for the committed tokens before the next one.
//!
//! A commit may complete tool calls, which get a verdict, end the reply, or make a call of `on-step` due.
//! The answers write text, and that text may complete tool calls again. [`Todo`] holds what is left, so
//! that a sequence whose policy is called on a thread ([`super::hooks`]) goes on where it stopped.

use std::collections::VecDeque;

use super::Sequence;
use crate::error::Result;
use crate::policy::loops::Detector;
use crate::policy::{Action, LoopReport, Step};
use crate::request::FinishReason;
use crate::text::{Phase, Reply, Text};

/// Why the reasoning is closed, for notes.
pub const BUDGET_REACHED: &str = "budget reached";

/// Most tokens that policies may inject into one request: a policy that injects at every step
/// would otherwise never let it end.
pub const INJECTED_TOKENS: usize = 4096;

/// What is left to do for the committed tokens, after the verdicts on tool calls and injected text.
#[derive(Default)]
pub enum Todo {
    #[default]
    Nothing,
    /// A token was committed.
    Committed(Committed),
    /// `on-step` is called.
    Ask(Box<Ask>),
    /// Actions of its answer that write text or stop.
    Act { actions: VecDeque<Action>, why: String, budget_reached: bool },
    /// The model ends the reply with `token`; `ended` is the reply then.
    EndTurn { token: u32, ended: Box<Reply> },
    /// The reply has ended.
    Finish,
}

/// What a committed token has completed.
pub struct Committed {
    pub loop_found: Option<LoopReport>,
    pub newline: bool,
    /// See [`crate::policy::events::Watch::found`].
    pub texts_found: Vec<String>,
    pub token_found: bool,
}

/// A call of `on-step`.
pub struct Ask {
    pub step: Step,
    /// Why it is called, for notes.
    pub why: String,
    pub budget_reached: bool,
}

/// Text that is being injected.
pub struct Injection {
    pub tokens: VecDeque<u32>,
    /// Whether the policy has seen all tokens before them.
    pub all_seen: bool,
}

impl Sequence {
    /// Does what is left to do, until a call of the policy is away.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when the policy failed and the profile fails closed.
    pub fn steer(&mut self, text: &Text) -> Result<()> {
        loop {
            if !(self.deliver()? && self.judge(text)? && self.deliver()?) {
                return Ok(());
            }
            if self.injection.is_some() {
                self.check_limits();
                match self.next_injected() {
                    Some(token) if !self.has_ended() => {
                        self.append(token);
                    }
                    _ => self.end_injection(),
                }
                continue;
            }
            let has_ended = self.has_ended();
            match std::mem::take(&mut self.todo) {
                Todo::Nothing => return Ok(()),
                Todo::Committed(committed) => {
                    self.end_at_stop();
                    self.check_limits();
                    if !self.has_ended() {
                        self.todo = self.due_call(committed);
                    }
                }
                Todo::Ask(ask) => {
                    let Some(actions) = self.hooks.ask(&ask.step)? else {
                        self.todo = Todo::Ask(ask);
                        return Ok(());
                    };
                    self.note_policy();
                    let Ask { why, budget_reached, .. } = *ask;
                    let actions = self.apply(actions, &why)?;
                    self.todo = Todo::Act { actions, why, budget_reached };
                }
                Todo::Act { mut actions, why, budget_reached } => {
                    let is_reasoning = self.reply_state.reply.phase() == Phase::Reasoning;
                    if let Some(action) = actions.pop_front().filter(|_| !has_ended) {
                        self.write(action, &why, text)?;
                        self.todo = Todo::Act { actions, why, budget_reached };
                    } else if budget_reached && is_reasoning && !has_ended {
                        // The budget is enforced for any answer.
                        self.close_reasoning("", BUDGET_REACHED, text)?;
                        self.todo = Todo::Act { actions, why, budget_reached: false };
                    } else {
                        self.check_limits();
                    }
                }
                Todo::EndTurn { token, ended } => {
                    self.reply_state.reply = *ended;
                    self.tokens.push(token);
                    if !has_ended {
                        self.end(FinishReason::Stop);
                    }
                }
                Todo::Finish => {
                    self.todo = Todo::Finish;
                    self.release()?;
                    return Ok(());
                }
            }
        }
    }

    /// Ends the reply at a stop string, or after its only call.
    fn end_at_stop(&mut self) {
        let stopped_by = self.reply_state.reply.stopped_by().map(str::to_string);
        let is_last_call =
            self.request.tool_choice.is_single && !self.progress.tool_calls.is_empty();
        if (stopped_by.is_some() || is_last_call) && !self.has_ended() {
            self.end(stopped_by.map_or(FinishReason::Stop, FinishReason::StopString));
        }
    }

    /// The model ends the reply with `token`; a call that this completes gets its verdict first.
    pub fn end_turn(&mut self, token: u32) {
        let mut ended = Box::new(self.reply_state.reply.clone());
        if ended.in_call() {
            self.progress.waiting = ended.finish_turn().into();
        }
        self.todo = Todo::EndTurn { token, ended };
    }

    /// Commits `tokens` as if the model had sampled them, in [`Sequence::steer`], up to the limits of the
    /// reply; `what` describes this in the note.
    pub fn inject(&mut self, tokens: Vec<u32>, what: &str, why: &str) {
        let length = self.reply_len();
        self.progress.injected += tokens.len();
        if self.progress.injected > INJECTED_TOKENS {
            let reason = format!("the policy injected more than {INJECTED_TOKENS} tokens");
            self.note(reason.clone());
            self.end(FinishReason::Policy(reason));
            return;
        }
        let cut = if self.cuts_off(&tokens) { ", cut off by a limit" } else { "" };
        self.note(format!("{what} after {length} tokens ({why}){cut}"));
        if tokens.is_empty() {
            return;
        }
        self.sampled = None;
        // A repair takes the place of the text that completed the call.
        let all_seen = self.progress.seen == self.tokens.len()
            || self.injection.as_ref().is_some_and(|injection| injection.all_seen);
        self.injection = Some(Injection { tokens: tokens.into(), all_seen });
    }

    fn next_injected(&mut self) -> Option<u32> {
        self.injection.as_mut()?.tokens.pop_front()
    }

    fn end_injection(&mut self) {
        let all_seen = self.injection.take().is_some_and(|injection| injection.all_seen);
        // A policy does not see its own text as new tokens. In a chain the others do, and so all.
        if all_seen && self.hooks.policies() < 2 {
            self.progress.seen = self.tokens.len();
            self.reply_state.reply.take_text();
        }
        self.detector.iter_mut().for_each(Detector::reset);
    }

    /// Sends the rest of a reply that has ended; a call that its end completes gets its verdict first.
    /// False while the policy is called on a thread: then again after its answer.
    ///
    /// # Errors
    /// The errors of [`Sequence::steer`].
    pub fn complete(&mut self, text: &Text) -> Result<bool> {
        if !matches!(self.todo, Todo::Finish) {
            self.progress.waiting = self.reply_state.reply.finish().into();
            self.todo = Todo::Finish;
        }
        self.steer(text)?;
        Ok(!self.hooks.is_away())
    }
}
