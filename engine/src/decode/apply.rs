//! Calls `on-step` and applies the actions of its answer, in the order that the contract defines.

use super::loops::Detector;
use super::sequence::Sequence;
use crate::error::Result;
use crate::grammar::Scope;
use crate::policy::{self, Action, LoopReport, SamplingPatch, Step};
use crate::request::FinishReason;
use crate::text::{Phase, Text};

/// Most tokens that policies may inject into one request: a policy that injects at every step
/// would otherwise never let it end.
pub const INJECTED_TOKENS: usize = 4096;

const BUDGET_REACHED: &str = "budget reached";

impl Sequence {
    /// Calls the policy if a call is due, and applies its actions.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when the policy failed and the profile fails closed.
    pub(super) fn ask_policy(&mut self, loop_found: Option<LoopReport>, text: &Text) -> Result<()> {
        let is_reasoning = self.reply_state.reply.phase() == Phase::Reasoning;
        let budget_reached =
            is_reasoning && self.reply_state.reasoning_tokens >= self.limits.reasoning;
        let unseen = &self.tokens[self.progress.seen..];
        let due = self.limits.every > 0 && unseen.len() >= self.limits.every as usize;
        if loop_found.is_none() && !budget_reached && !due {
            return Ok(());
        }
        let newest = unseen.len().saturating_sub(policy::STEP_TOKENS);
        let step = Step {
            index: self.reply_len() as u32,
            phase: match self.reply_state.reply.phase() {
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
        };
        self.progress.loops += u32::from(loop_found.is_some());
        self.progress.seen = self.tokens.len();
        let actions = self.policy.ask(&step)?;
        self.note_policy();
        let why = match (loop_found, budget_reached) {
            (Some(found), _) => format!("loop of {} tokens", found.period),
            (None, true) => BUDGET_REACHED.to_string(),
            (None, false) => "periodic call".to_string(),
        };
        self.apply(actions, &why, text)?;
        // The budget is enforced for any answer.
        if budget_reached && self.reply_state.reply.phase() == Phase::Reasoning && !self.has_ended()
        {
            self.close_reasoning("", BUDGET_REACHED, text)?;
        }
        Ok(())
    }

    /// Applies `actions`: first the longest rewind; then sampling, biases and bans; then texts in
    /// order; then stop. Actions after a stop are dropped.
    pub(super) fn apply(&mut self, mut actions: Vec<Action>, why: &str, text: &Text) -> Result<()> {
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
        for action in actions {
            if self.has_ended() {
                break;
            }
            match action {
                Action::Inject(_) if self.is_form_fixed() => {
                    let length = self.reply_len();
                    self.note(format!(
                        "did not inject text after {length} tokens ({why}): the form of the reply is fixed"
                    ));
                }
                Action::Inject(words) => {
                    self.inject(text.encode_plain(&words)?, "injected text", why, text)?;
                }
                Action::CloseReasoning(hint) => self.close_reasoning(&hint, why, text)?,
                Action::Stop(reason) => self.stop(reason, why),
                Action::Rewind(_) | Action::Ban(_) | Action::Bias(_) | Action::Sampling(_) => {}
            }
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

    fn close_reasoning(&mut self, hint: &str, why: &str, text: &Text) -> Result<()> {
        if self.reply_state.reply.phase() != Phase::Reasoning {
            return Ok(());
        }
        let is_answer_fixed = self.constraint.as_ref().is_some_and(|c| c.scope() == Scope::Answer);
        if is_answer_fixed && !hint.is_empty() {
            self.note(format!("left out a hint ({why}): the form of the answer is fixed"));
        }
        let hint = if is_answer_fixed { "" } else { hint };
        let tokens = self.reply_state.reply.close_reasoning_tokens(text, hint)?;
        self.inject(tokens, "closed the reasoning", why, text)
    }

    fn stop(&mut self, reason: String, why: &str) {
        self.note(format!("stopped after {} tokens ({why}): {reason}", self.reply_len()));
        self.end(FinishReason::Policy(reason));
    }

    /// Commits `tokens` as if the model had sampled them; `what` describes this in the note.
    pub(super) fn inject(
        &mut self,
        tokens: Vec<u32>,
        what: &str,
        why: &str,
        text: &Text,
    ) -> Result<()> {
        let length = self.reply_len();
        self.progress.injected += tokens.len();
        if self.progress.injected > INJECTED_TOKENS {
            let reason = format!("the policy injected more than {INJECTED_TOKENS} tokens");
            self.note(reason.clone());
            self.end(FinishReason::Policy(reason));
            return Ok(());
        }
        if self.tokens.len() + tokens.len() > self.limits.context {
            self.note(format!("{what} after {length} tokens ({why}): the context is full"));
            self.end(FinishReason::Length);
            return Ok(());
        }
        self.note(format!("{what} after {length} tokens ({why})"));
        if tokens.is_empty() {
            return Ok(());
        }
        self.sampled = None;
        let all_seen = self.progress.seen == self.tokens.len();
        for token in tokens {
            self.append(token);
            // A repaired call replaces the rest of the text.
            if self.judge(text)? || self.has_ended() {
                break;
            }
        }
        // A policy does not see its own text as new tokens.
        if all_seen {
            self.progress.seen = self.tokens.len();
            self.reply_state.reply.take_text();
        }
        self.detector.iter_mut().for_each(Detector::reset);
        Ok(())
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
