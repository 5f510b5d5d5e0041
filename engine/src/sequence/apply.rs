//! When `on-step` is called, and the actions of its answer, in the order that the contract defines.

use std::collections::VecDeque;

use super::Sequence;
use super::steer::{Ask, BUDGET_REACHED, Committed, Todo};
use crate::error::Result;
use crate::policy::{self, Action, Observations, SamplingPatch, Step};
use crate::request::FinishReason;
use crate::text::{Phase, Text};

impl Sequence {
    /// The call of `on-step` after a commit, if one is due.
    pub fn due_call(&mut self, committed: Committed) -> Todo {
        let Committed { loop_found, newline, texts_found, token_found } = committed;
        let phase = self.reply_state.reply.phase();
        let is_reasoning = phase == Phase::Reasoning;
        let before = self.progress.phase.replace(phase);
        let phase_changed = self.limits.on_phase && before.is_some_and(|before| before != phase);
        // A header may begin an answer or a call.
        let budget_reached = is_reasoning
            && !self.reply_state.reply.in_header()
            && self.reply_state.reasoning_tokens >= self.limits.reasoning;
        let unseen = &self.tokens[self.progress.seen..];
        let due = self.limits.every > 0 && unseen.len() >= self.limits.every as usize;
        let is_found = !texts_found.is_empty() || token_found;
        let is_event =
            loop_found.is_some() || budget_reached || phase_changed || newline || is_found;
        if !is_event && !due {
            return Todo::Nothing;
        }
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
        let drawn = std::mem::take(&mut self.progress.drawn);
        let observed = Observations { texts_found, token_found, drawn }.if_any();
        let step = Step {
            index: self.reply_len() as u32,
            phase: match phase {
                Phase::Reasoning => policy::Phase::Reasoning,
                Phase::Answer => policy::Phase::Answer,
                Phase::ToolCall => policy::Phase::ToolCall,
            },
            reasoning_tokens: self.reply_state.reasoning_tokens,
            answer_tokens: self.reply_state.answer_tokens,
            reasoning_left: self.limits.reasoning.saturating_sub(self.reply_state.reasoning_tokens),
            tokens: unseen[newest..].to_vec(),
            text: self.reply_state.reply.take_text(),
            loop_found,
            budget_reached,
            phase_changed,
            newline,
            observed,
        };
        self.progress.loops += u32::from(loop_found.is_some());
        self.progress.seen = self.tokens.len();
        Todo::Ask(Box::new(Ask { step, why, budget_reached }))
    }

    /// Applies the actions that write nothing: the longest rewind; then sampling, biases and bans.
    /// Returns the others, up to the first stop, in order.
    pub fn apply(&mut self, mut actions: Vec<Action>, why: &str) -> Result<VecDeque<Action>> {
        let stop = actions.iter().position(|action| matches!(action, Action::Stop(_)));
        actions.truncate(stop.map_or(actions.len(), |at| at + 1));
        let rewinds = actions.iter().filter_map(|action| match action {
            Action::Rewind(tokens) => Some(*tokens),
            _ => None,
        });
        if let Some(tokens) = rewinds.max() {
            self.rewind_by(tokens as usize, why)?;
        }
        for action in &actions {
            self.change_sampling(action, why);
        }
        let writes = |action: &Action| match action {
            Action::Inject(_) | Action::CloseReasoning(_) | Action::Stop(_) => true,
            Action::Rewind(_) | Action::Ban(_) | Action::Bias(_) | Action::Sampling(_) => false,
        };
        Ok(actions.into_iter().filter(writes).collect())
    }

    /// Carries out an action that [`Sequence::apply`] returned.
    pub fn write(&mut self, action: Action, why: &str, text: &Text) -> Result<()> {
        match action {
            Action::Inject(_) if self.is_form_fixed() => {
                let length = self.reply_len();
                self.note(format!(
                    "did not inject text after {length} tokens ({why}): the form of the reply is fixed"
                ));
            }
            Action::Inject(words) => {
                let reply = &self.reply_state.reply;
                let Some(mut tokens) = reply.open_message_tokens(text, reply.phase())? else {
                    let length = self.reply_len();
                    self.note(format!(
                        "did not inject text after {length} tokens ({why}): a header is incomplete"
                    ));
                    return Ok(());
                };
                let words = text.encode_plain(&words)?;
                if reply.would_call(&tokens, &words) {
                    let length = self.reply_len();
                    self.note(format!(
                        "did not inject text after {length} tokens ({why}): it would be part of a tool call"
                    ));
                    return Ok(());
                }
                tokens.extend(words);
                self.inject(tokens, "injected text", why);
            }
            Action::CloseReasoning(hint) => self.close_reasoning(&hint, why, text)?,
            Action::Stop(reason) => self.stop(reason, why),
            Action::Rewind(_) | Action::Ban(_) | Action::Bias(_) | Action::Sampling(_) => {}
        }
        Ok(())
    }

    /// Changes sampling. A token that is already sampled is dropped: it is sampled again from the same
    /// logits with the same noise.
    fn change_sampling(&mut self, action: &Action, why: &str) {
        if self.has_ended() {
            return;
        }
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
            _ => return,
        };
        let span = match steps {
            0 => "for the rest of the reply".to_string(),
            steps => format!("for the next {steps} tokens"),
        };
        self.note(format!("{what} {span} after {} tokens ({why})", self.reply_len()));
        self.sampled = None;
    }

    pub fn close_reasoning(&mut self, hint: &str, why: &str, text: &Text) -> Result<()> {
        if self.reply_state.reply.phase() != Phase::Reasoning {
            return Ok(());
        }
        let is_answer_fixed = self.is_answer_fixed();
        if is_answer_fixed && !hint.is_empty() {
            self.note(format!("left out a hint ({why}): the form of the answer is fixed"));
        }
        let hint = if is_answer_fixed { "" } else { hint };
        let reply = &self.reply_state.reply;
        let mut tokens = reply.close_reasoning_tokens(text, hint)?;
        if !hint.is_empty() && reply.would_call(&[], &tokens) {
            tokens = reply.close_reasoning_tokens(text, "")?;
            self.note(format!("left out a hint ({why}): it would be part of a tool call"));
        }
        if tokens.is_empty() {
            return Ok(());
        }
        self.inject(tokens, "closed the reasoning", why);
        Ok(())
    }

    fn stop(&mut self, reason: String, why: &str) {
        self.note(format!("stopped after {} tokens ({why}): {reason}", self.reply_len()));
        self.end(FinishReason::Policy(reason));
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
