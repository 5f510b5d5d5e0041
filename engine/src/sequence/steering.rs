//! Steering: what follows a commit until the next token is sampled.
//!
//! A commit may complete tool calls, which get a verdict, end the reply, or make a call of
//! `on-step` due. The answers write text, and that text may complete tool calls again.
//! [`Steering::next`] looks at the sequence and returns one [`Do`]; `commit.rs` performs it and
//! asks again. So policies, the grammar and the limits change neither tokens nor cache themselves,
//! and no commit runs inside another one.
//!
//! [`Todo`] holds what is left to do, so that a sequence whose policy is called on a thread
//! ([`super::hooks`]) continues where it stopped.

use std::collections::VecDeque;

use super::constrain::Constraint;
use super::hooks::Hooks;
use super::limits::{INJECTED_TOKENS, Limits};
use super::next_token::NextLogits;
use super::outlook::Lookout;
use super::reply::{ClientReply, Pushed, Rewind};
use super::timeline::Timeline;
use crate::error::Result;
use crate::policy::events::Watch;
use crate::policy::loops::Detector;
use crate::policy::{Action, DrawnToken, LoopReport, Plan, Step};
use crate::request::{FinishReason, Request};
use crate::sample::sampler::Sampler;
use crate::text::{Phase, Reply, Text};

/// Most tokens that policies may rewind in one request: a policy that rewinds at every step would
/// otherwise never let it end.
pub const REWOUND_TOKENS: usize = 16 * 1024;

/// Why the reasoning is closed, for notes.
pub const BUDGET_REACHED: &str = "budget reached";

/// What is to be done next with a sequence. `commit.rs` performs it.
pub enum Do {
    /// Nothing is left to do for the committed tokens.
    Nothing,
    /// Nothing can be done before a call of the policies on a thread has ended.
    Away,
    /// Commits a token that is not sampled.
    Commit(u32),
    /// Commits these tokens, the only ones that the form allows, as if they had been sampled.
    Force(Vec<u32>),
    /// Rewinds the reply, and adds a note, if there is one.
    Rewind(Box<Rewind>, Option<String>),
    /// Samples the next token again: its parameters changed, or other tokens come before it.
    Resample,
    /// Commits the token with which the model ends its turn.
    EndTurn(u32),
    /// Ends the reply.
    End(FinishReason),
    /// Ends the reply. The token that was sampled last is not committed, though the cache may have
    /// run it.
    Reject(FinishReason),
}

/// The sequence as [`Steering`] sees it.
pub struct Now<'a> {
    /// The request.
    pub request: &'a Request,
    /// Its limits.
    pub limits: &'a Limits,
    /// Prompt and reply, committed.
    pub tokens: &'a [u32],
    /// Number of prompt tokens.
    pub prompt: usize,
    /// Whether the reply has ended.
    pub has_ended: bool,
    /// The logits of the next token, if the committed ones have run.
    pub(super) next: Option<&'a NextLogits>,
    /// Tokenizer and template of the model.
    pub text: &'a Text,
}

impl<'a> Now<'a> {
    /// The sequence with these parts.
    pub fn new(
        request: &'a Request,
        limits: &'a Limits,
        timeline: &'a Timeline,
        has_ended: bool,
        text: &'a Text,
    ) -> Self {
        let (tokens, prompt) = (timeline.tokens(), timeline.prompt());
        let next = timeline.next_logits();
        Self { request, limits, tokens, prompt, has_ended, next, text }
    }

    /// Tokens that the limits leave in the current phase.
    pub fn tokens_left(&self, reply: &ClientReply) -> usize {
        self.limits.left(reply.state(), self.tokens.len())
    }

    /// The end of a reply that has reached its limits.
    pub fn end_at_limit(&self, reply: &ClientReply) -> Option<Do> {
        let is_at_limit = !self.has_ended && self.tokens_left(reply) == 0;
        is_at_limit.then_some(Do::End(FinishReason::Length))
    }
}

/// What is left to do for the committed tokens, after the verdicts on tool calls and injected text.
#[derive(Default)]
pub(super) enum Todo {
    #[default]
    Nothing,
    /// A token was committed.
    Committed(Committed),
    /// `on-step` is called.
    Ask(Box<Ask>),
    /// The actions of its answer that write nothing, after its rewind; then the others.
    Apply(Act),
    /// The actions of its answer that write text or stop.
    Act(Act),
    /// The model ends the reply with `token`; `ended` is the reply then.
    EndTurn { token: u32, ended: Box<Reply> },
    /// The reply has ended.
    Finish,
}

/// What a committed token has completed.
pub(super) struct Committed {
    pub loop_found: Option<LoopReport>,
    pub newline: bool,
    /// See [`Watch::found`].
    pub texts_found: Vec<String>,
    pub token_found: bool,
}

/// A call of `on-step`.
pub(super) struct Ask {
    pub step: Step,
    /// Why it is called, for notes.
    pub why: String,
    pub budget_reached: bool,
}

/// Actions of an answer that are to be carried out.
pub(super) struct Act {
    pub actions: VecDeque<Action>,
    /// Why they were asked for, for notes.
    pub why: String,
    /// Whether the budget of the reasoning is used up, which closes it in any case.
    pub budget_reached: bool,
}

/// Text that is being injected.
pub(super) struct Injection {
    pub tokens: VecDeque<u32>,
    /// Whether the policy has seen all tokens before them.
    pub all_seen: bool,
}

/// The replacement of a tool call whose tokens were rewound.
pub(super) struct Repair {
    /// Name of the call.
    pub name: String,
    /// Tokens of the reply with the call.
    pub length: usize,
    /// The text of the policy in its place.
    pub words: String,
}

/// Policies, grammar and sampling parameters of one sequence.
pub struct Steering {
    /// The policies. While a call of them is away, no row of the sequence runs.
    pub(super) hooks: Hooks,
    pub(super) todo: Todo,
    pub(super) repair: Option<Repair>,
    pub(super) injection: Option<Injection>,
    pub(super) sampler: Sampler,
    /// The form of the reply; `None` if it is free.
    pub(super) constraint: Option<Constraint>,
    detector: Option<Detector>,
    /// `None` if the plan names no texts and tokens.
    watch: Option<Watch>,
    /// `None` if the plan watches no tokens.
    pub(super) lookout: Option<Lookout>,
    /// Whether tokens before the next one change its logits, or its probability is reported.
    samples_late: bool,
    /// Tokens, prompt included, that the policy has seen or injected.
    pub(super) seen: usize,
    /// Sampled tokens that the policies have not seen.
    pub(super) drawn: Vec<DrawnToken>,
    /// The phase when `on-step` could last be called; `None` before the first token.
    pub(super) phase: Option<Phase>,
    /// Tokens that policies have injected.
    injected: usize,
    /// Tokens that policies have rewound.
    rewound: usize,
    pub(super) repairs: u32,
    pub(super) loops: u32,
}

impl Steering {
    /// The steering of a reply to a prompt of `prompt` tokens.
    pub fn new(
        request: &Request,
        plan: &Plan,
        prompt: usize,
        hooks: Hooks,
        sampler: Sampler,
        constraint: Option<Constraint>,
        lookout: Option<Lookout>,
    ) -> Self {
        let is_reported = request.logprobs.is_some() || plan.candidates > 0;
        Self {
            hooks,
            todo: Todo::Nothing,
            repair: None,
            injection: None,
            sampler,
            constraint,
            detector: plan.loops.map(Detector::new),
            watch: Watch::new(plan),
            lookout,
            samples_late: is_reported || !request.penalties.is_empty(),
            seen: prompt,
            drawn: Vec::new(),
            phase: None,
            injected: 0,
            rewound: 0,
            repairs: 0,
            loops: 0,
        }
    }

    /// The parameters of sampling.
    pub fn sampler(&mut self) -> &mut Sampler {
        &mut self.sampler
    }

    /// The policies.
    pub fn hooks(&mut self) -> &mut Hooks {
        &mut self.hooks
    }

    /// Returns true if a call of the policies is away, or back without its answer having been
    /// taken.
    pub fn is_away(&self) -> bool {
        self.hooks.is_away()
    }

    /// Returns true if the call that was away has ended.
    pub fn is_back(&self) -> bool {
        self.hooks.is_back()
    }

    /// Loops that were found.
    pub fn loops(&self) -> u32 {
        self.loops
    }

    /// Returns true if the next token is sampled only when all tokens before it are on the host: a
    /// grammar applies to it, or tokens before it change its logits, or its probability is
    /// reported, to the client or policies, or a call waits for its logits.
    pub fn samples_late(&self, reply: &ClientReply) -> bool {
        self.samples_late || self.is_in_form(reply) || self.awaits_outlook()
    }

    /// Returns true if a call of `on-step` waits until the committed tokens have run: its policy sees what the model
    /// would draw next.
    pub fn awaits_outlook(&self) -> bool {
        self.lookout.is_some() && matches!(self.todo, Todo::Committed(_))
    }

    /// What is to be done next.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when the policy failed and the profile fails closed.
    pub fn next(&mut self, reply: &mut ClientReply, now: &Now<'_>) -> Result<Do> {
        loop {
            if let Some(repair) = self.repair.take().filter(|_| !now.has_ended)
                && let Some(next) = self.write_repair(repair, reply, now)?
            {
                return Ok(next);
            }
            match self.deliver(reply)? {
                Do::Nothing => {}
                next => return Ok(next),
            }
            match self.judge(reply, now)? {
                Do::Nothing => {}
                next => return Ok(next),
            }
            match self.deliver(reply)? {
                Do::Nothing => {}
                next => return Ok(next),
            }
            if let Some(injection) = &mut self.injection {
                if let Some(end) = now.end_at_limit(reply) {
                    return Ok(end);
                }
                match injection.tokens.pop_front() {
                    Some(token) if !now.has_ended => return Ok(Do::Commit(token)),
                    _ => self.end_injection(reply, now),
                }
                continue;
            }
            let next = match std::mem::take(&mut self.todo) {
                Todo::Nothing => return Ok(Do::Nothing),
                Todo::Committed(committed) => self.after_commit(committed, reply, now)?,
                Todo::Ask(ask) => {
                    let Some(actions) = self.hooks.ask(&ask.step)? else {
                        self.todo = Todo::Ask(ask);
                        return Ok(Do::Away);
                    };
                    self.take_notes(reply);
                    let Ask { why, budget_reached, .. } = *ask;
                    self.begin_actions(actions, why, budget_reached, reply, now)
                }
                Todo::Apply(act) => self.change_sampling(act, reply, now),
                Todo::Act(act) => self.act(act, reply, now)?,
                Todo::EndTurn { token, ended } => {
                    reply.end_turn(*ended);
                    Some(Do::EndTurn(token))
                }
                Todo::Finish => {
                    self.todo = Todo::Finish;
                    return self.release(reply);
                }
            };
            if let Some(next) = next {
                return Ok(next);
            }
        }
    }

    /// Adds the policy's own notes to the reply.
    pub(super) fn take_notes(&mut self, reply: &mut ClientReply) {
        self.hooks.take_notes().into_iter().for_each(|note| reply.note(note));
    }

    /// Looks for loops, texts and tokens of the plan in a committed token; returns a loop if it
    /// completes one.
    pub fn read(&mut self, token: u32, pushed: &Pushed, reply: &ClientReply) -> Option<LoopReport> {
        if let Some(watch) = &mut self.watch {
            let new = reply.parsed().untaken_text().get(pushed.text_start..);
            watch.read(new.unwrap_or_default());
        }
        let detector = self.detector.as_mut()?;
        if pushed.now != pushed.before {
            detector.reset();
            return None;
        }
        detector.push(token)
    }

    /// A sampled token was committed, and completed a loop or not.
    pub fn committed(
        &mut self,
        token: u32,
        pushed: &Pushed,
        loop_found: Option<LoopReport>,
        reply: &ClientReply,
        limits: &Limits,
    ) {
        self.phase.get_or_insert(pushed.before);
        let new = reply.parsed().untaken_text().get(pushed.text_start..);
        let newline = limits.on_newline && new.is_some_and(|new| new.contains('\n'));
        let (texts_found, token_found) =
            self.watch.as_mut().map(|watch| watch.found(token)).unwrap_or_default();
        self.todo = Todo::Committed(Committed { loop_found, newline, texts_found, token_found });
    }

    /// The reply was rewound to the first `to` tokens of prompt and reply.
    pub fn rewound(&mut self, to: usize, prompt: usize) {
        self.watch.iter_mut().for_each(Watch::clear);
        self.drawn.retain(|drawn| (drawn.index as usize) < to - prompt);
        self.seen = self.seen.min(to);
        self.detector.iter_mut().for_each(Detector::reset);
    }

    /// The model ends the reply with `token`; a call that this completes gets its verdict first.
    pub fn end_turn(&mut self, token: u32, reply: &mut ClientReply) {
        let mut ended = Box::new(reply.parsed().clone());
        if ended.in_call() {
            reply.waiting = ended.finish_turn().into();
        }
        self.todo = Todo::EndTurn { token, ended };
    }

    /// The reply has ended: a call that its end completes gets its verdict, and the rest is sent.
    pub fn finish(&mut self, reply: &mut ClientReply) {
        if !matches!(self.todo, Todo::Finish) {
            reply.finish();
            self.todo = Todo::Finish;
        }
    }

    /// Ends the reply at a stop string, or after its only call, or at its limits; else `on-step` is
    /// called if it is due.
    fn after_commit(
        &mut self,
        committed: Committed,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Result<Option<Do>> {
        if now.has_ended {
            return Ok(None);
        }
        let stopped_by = reply.parsed().stopped_by().map(str::to_string);
        if stopped_by.is_some() || reply.has_last_call() {
            let reason = stopped_by.map_or(FinishReason::Stop, FinishReason::StopString);
            return Ok(Some(Do::End(reason)));
        }
        if let Some(end) = now.end_at_limit(reply) {
            return Ok(Some(end));
        }
        if self.lookout.is_some()
            && now.next.is_none()
            && self.due(&committed, reply, now).is_some()
        {
            self.todo = Todo::Committed(committed);
            return Ok(Some(Do::Nothing));
        }
        self.todo = self.due_call(committed, reply, now)?;
        Ok(None)
    }

    /// Rewinds the reply to `to` tokens, if the client can follow; `note` describes this. Too many
    /// rewinds end the request.
    pub(super) fn rewind(
        &mut self,
        to: usize,
        note: Option<String>,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Option<Do> {
        let rewind = reply.rewind_to(to, now.tokens, self.seen)?;
        self.rewound += now.tokens.len() - to;
        if self.rewound > REWOUND_TOKENS {
            let reason = format!("the policy rewound more than {REWOUND_TOKENS} tokens");
            reply.note(reason.clone());
            return Some(Do::Reject(FinishReason::Policy(reason)));
        }
        Some(Do::Rewind(Box::new(rewind), note))
    }

    /// Commits `tokens` one after the other, up to the limits of the reply; `what` describes this
    /// in the note. Too many injected tokens end the request.
    pub(super) fn inject(
        &mut self,
        tokens: Vec<u32>,
        what: &str,
        why: &str,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Option<Do> {
        self.injected += tokens.len();
        if self.injected > INJECTED_TOKENS {
            let reason = format!("the policy injected more than {INJECTED_TOKENS} tokens");
            reply.note(reason.clone());
            return Some(Do::End(FinishReason::Policy(reason)));
        }
        let is_cut = now.limits.cut_off(reply.state(), now.tokens.len(), &tokens);
        let cut = if is_cut { ", cut off by a limit" } else { "" };
        reply.note(format!("{what} after {} tokens ({why}){cut}", reply.len()));
        if tokens.is_empty() {
            return None;
        }
        // A repair takes the place of the text that completed the call.
        let all_seen = self.seen == now.tokens.len()
            || self.injection.as_ref().is_some_and(|injection| injection.all_seen);
        self.injection = Some(Injection { tokens: tokens.into(), all_seen });
        Some(Do::Resample)
    }

    fn end_injection(&mut self, reply: &mut ClientReply, now: &Now<'_>) {
        let all_seen = self.injection.take().is_some_and(|injection| injection.all_seen);
        // A policy does not see its own text as new tokens. In a chain the others do, and so all.
        if all_seen && self.hooks.policies() < 2 {
            self.seen = now.tokens.len();
            reply.parsed_mut().take_text();
        }
        self.detector.iter_mut().for_each(Detector::reset);
    }

    /// Counts `tokens` tokens as rewound.
    #[cfg(test)]
    pub fn set_rewound(&mut self, tokens: usize) {
        self.rewound = tokens;
    }
}
