//! When `on-step` is called, and the actions of its answer, in the order that the contract defines.

use super::reply::ClientReply;
use super::steering::{Act, Ask, BUDGET_REACHED, Committed, Do, Now, Steering, Todo};
use crate::error::Result;
use crate::policy::{self, Action, Observations, SamplingPatch, Step};
use crate::request::FinishReason;
use crate::text::Phase;

/// Start of the note on a rewind that is not possible.
const NOT_REWOUND: &str = "did not rewind";

/// What makes a call of `on-step` due, besides what a token completed.
pub(super) struct Due {
    phase_changed: bool,
    budget_reached: bool,
}

impl Steering {
    /// Why a call of `on-step` is due after a commit; `None` if none is.
    pub(super) fn due(
        &self,
        committed: &Committed,
        reply: &ClientReply,
        now: &Now<'_>,
    ) -> Option<Due> {
        let Committed { loop_found, newline, texts_found, token_found } = committed;
        let limits = now.limits;
        let phase = reply.phase();
        let phase_changed = limits.on_phase && self.phase.is_some_and(|before| before != phase);
        // A header may begin an answer or a call.
        let budget_reached = phase == Phase::Reasoning
            && !reply.parsed().in_header()
            && reply.state().reasoning_tokens >= limits.reasoning;
        let unseen = now.tokens.len() - self.seen;
        let is_due = loop_found.is_some()
            || budget_reached
            || phase_changed
            || *newline
            || !texts_found.is_empty()
            || *token_found
            || limits.every > 0 && unseen >= limits.every as usize;
        is_due.then_some(Due { phase_changed, budget_reached })
    }

    /// The call of `on-step` after a commit, if one is due.
    pub(super) fn due_call(
        &mut self,
        committed: Committed,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Result<Todo> {
        let limits = now.limits;
        let phase = reply.phase();
        let due = self.due(&committed, reply, now);
        self.phase = Some(phase);
        let Some(Due { phase_changed, budget_reached }) = due else {
            return Ok(Todo::Nothing);
        };
        let Committed { loop_found, newline, texts_found, token_found } = committed;
        let reasoning_tokens = reply.state().reasoning_tokens;
        let unseen = &now.tokens[self.seen..];
        let newest = unseen.len().saturating_sub(policy::STEP_TOKENS);
        let why = match (loop_found, budget_reached) {
            (Some(found), _) => format!("loop of {} tokens", found.period),
            (None, true) => BUDGET_REACHED.to_string(),
            (None, false) if phase_changed => "change of the phase".to_string(),
            (None, false) if newline => "line break".to_string(),
            (None, false) if !texts_found.is_empty() => "text of the plan".to_string(),
            (None, false) if token_found => "token of the plan".to_string(),
            (None, false) => "periodic call".to_string(),
        };
        let drawn = std::mem::take(&mut self.drawn);
        let outlook = match (&self.lookout, now.next) {
            (Some(lookout), Some(next)) => Some(lookout.see(next)?),
            _ => None,
        };
        let observed = Observations { texts_found, token_found, drawn, outlook }.if_any();
        let step = Step {
            index: reply.len() as u32,
            phase: match phase {
                Phase::Reasoning => policy::Phase::Reasoning,
                Phase::Answer => policy::Phase::Answer,
                Phase::ToolCall => policy::Phase::ToolCall,
            },
            reasoning_tokens,
            answer_tokens: reply.state().answer_tokens,
            reasoning_left: limits.reasoning.saturating_sub(reasoning_tokens),
            tokens: unseen[newest..].to_vec(),
            text: reply.parsed_mut().take_text(),
            loop_found,
            budget_reached,
            phase_changed,
            newline,
            observed,
        };
        self.loops += u32::from(loop_found.is_some());
        self.seen = now.tokens.len();
        Ok(Todo::Ask(Box::new(Ask { step, why, budget_reached })))
    }

    /// Begins with the actions of an answer, up to the first stop. The longest rewind comes first.
    pub(super) fn begin_actions(
        &mut self,
        mut actions: Vec<Action>,
        why: String,
        budget_reached: bool,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Option<Do> {
        let stop = actions.iter().position(|action| matches!(action, Action::Stop(_)));
        actions.truncate(stop.map_or(actions.len(), |at| at + 1));
        let rewinds = actions.iter().filter_map(|action| match action {
            Action::Rewind(tokens) => Some(*tokens),
            _ => None,
        });
        let next =
            rewinds.max().and_then(|tokens| self.rewind_by(tokens as usize, &why, reply, now));
        self.todo = Todo::Apply(Act { actions: actions.into(), why, budget_reached });
        next
    }

    /// The rewind by `count` tokens, or to the start of the phase if that is nearer.
    fn rewind_by(
        &mut self,
        count: usize,
        why: &str,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Option<Do> {
        let (tokens, length) = (now.tokens.len(), reply.len());
        let to = tokens.saturating_sub(count).max(reply.earliest_rewind());
        let count = tokens - to;
        if count == 0 {
            return None;
        }
        let note = format!("rewound {count} tokens after {length} tokens ({why})");
        let rewind = self.rewind(to, Some(note), reply, now);
        // One note for all: a policy may ask for it in each of its steps.
        if rewind.is_none() && !reply.notes().iter().any(|note| note.starts_with(NOT_REWOUND)) {
            let reason = "the client already has the text";
            reply.note(format!("{NOT_REWOUND} after {length} tokens ({why}): {reason}"));
        }
        rewind
    }

    /// Applies the actions that change sampling. A token that is already sampled is sampled again
    /// from the same logits with the same noise. The actions that write or stop follow.
    pub(super) fn change_sampling(
        &mut self,
        act: Act,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Option<Do> {
        let mut has_changed = false;
        for action in act.actions.iter().filter(|_| !now.has_ended) {
            let (what, steps) = match action {
                Action::Ban(ban) => {
                    self.sampler.ban(&ban.tokens, ban.steps);
                    (format!("banned {} tokens", ban.tokens.len()), ban.steps)
                }
                Action::Bias(bias) => {
                    self.sampler.bias(&bias.tokens, bias.steps);
                    (format!("biased {} tokens", bias.tokens.len()), bias.steps)
                }
                Action::Sampling(change) => {
                    self.sampler.change(change.sampling, change.steps);
                    (format!("changed sampling to {}", describe(&change.sampling)), change.steps)
                }
                _ => continue,
            };
            let span = match steps {
                0 => "for the rest of the reply".to_string(),
                steps => format!("for the next {steps} tokens"),
            };
            reply.note(format!("{what} {span} after {} tokens ({})", reply.len(), act.why));
            has_changed = true;
        }
        let writes = |action: &Action| match action {
            Action::Inject(_) | Action::CloseReasoning(_) | Action::Stop(_) => true,
            Action::Rewind(_) | Action::Ban(_) | Action::Bias(_) | Action::Sampling(_) => false,
        };
        let actions = act.actions.into_iter().filter(writes).collect();
        self.todo = Todo::Act(Act { actions, ..act });
        has_changed.then_some(Do::Resample)
    }

    /// Carries out the next of the actions that write or stop. At their end, reasoning whose budget
    /// is used up is closed.
    pub(super) fn act(
        &mut self,
        mut act: Act,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Result<Option<Do>> {
        let is_reasoning = reply.phase() == Phase::Reasoning;
        if let Some(action) = act.actions.pop_front().filter(|_| !now.has_ended) {
            let next = self.write(action, &act.why, reply, now)?;
            self.todo = Todo::Act(act);
            return Ok(next);
        }
        if act.budget_reached && is_reasoning && !now.has_ended {
            // The budget is enforced for any answer.
            let next = self.close_reasoning("", BUDGET_REACHED, reply, now)?;
            self.todo = Todo::Act(Act { budget_reached: false, ..act });
            return Ok(next);
        }
        Ok(now.end_at_limit(reply))
    }

    /// Carries out an action that writes or stops.
    fn write(
        &mut self,
        action: Action,
        why: &str,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Result<Option<Do>> {
        let length = reply.len();
        match action {
            Action::Inject(words) => {
                let refused = |reply: &mut ClientReply, reason: &str| {
                    reply.note(format!(
                        "did not inject text after {length} tokens ({why}): {reason}"
                    ));
                    Ok(None)
                };
                if self.is_form_fixed(reply) {
                    return refused(reply, "the form of the reply is fixed");
                }
                let parsed = reply.parsed();
                let Some(mut tokens) = parsed.open_message_tokens(now.text, parsed.phase())? else {
                    return refused(reply, "a header is incomplete");
                };
                let words = now.text.encode_plain(&words)?;
                if reply.parsed().would_call(&tokens, &words) {
                    return refused(reply, "it would be part of a tool call");
                }
                tokens.extend(words);
                Ok(self.inject(tokens, "injected text", why, reply, now))
            }
            Action::CloseReasoning(hint) => self.close_reasoning(&hint, why, reply, now),
            Action::Stop(reason) => {
                reply.note(format!("stopped after {length} tokens ({why}): {reason}"));
                // The client has a part of a form, as at a limit. The note says why.
                Ok(Some(Do::End(match self.is_form_open(reply, now) {
                    true => FinishReason::Length,
                    false => FinishReason::Policy(reason),
                })))
            }
            Action::Rewind(_) | Action::Ban(_) | Action::Bias(_) | Action::Sampling(_) => Ok(None),
        }
    }

    /// Closes the reasoning, and lets `hint` follow.
    ///
    /// # Errors
    /// When the text cannot be tokenized.
    pub fn close_reasoning(
        &mut self,
        hint: &str,
        why: &str,
        reply: &mut ClientReply,
        now: &Now<'_>,
    ) -> Result<Option<Do>> {
        if reply.phase() != Phase::Reasoning {
            return Ok(None);
        }
        let is_answer_fixed = self.is_answer_fixed();
        if is_answer_fixed && !hint.is_empty() {
            reply.note(format!("left out a hint ({why}): the form of the answer is fixed"));
        }
        let hint = if is_answer_fixed { "" } else { hint };
        let mut tokens = reply.parsed().close_reasoning_tokens(now.text, hint)?;
        if !hint.is_empty() && reply.parsed().would_call(&[], &tokens) {
            tokens = reply.parsed().close_reasoning_tokens(now.text, "")?;
            reply.note(format!("left out a hint ({why}): it would be part of a tool call"));
        }
        if tokens.is_empty() {
            return Ok(None);
        }
        Ok(self.inject(tokens, "closed the reasoning", why, reply, now))
    }
}

/// A change of sampling, for a note.
fn describe(change: &SamplingPatch) -> String {
    // Through text: as JSON values, f32 would print like f64.
    let json = serde_json::to_string(change).unwrap_or_default();
    let values: serde_json::Map<_, _> = serde_json::from_str(&json).unwrap_or_default();
    let values = values.iter().filter(|(_, value)| !value.is_null());
    values.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
}
