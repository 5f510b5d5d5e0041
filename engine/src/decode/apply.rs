//! Asks the policy about steps and applies what it answers, in the order that the contract fixes.

use super::loops::Detector;
use super::sequence::Sequence;
use crate::error::Result;
use crate::policy::{self, Action, LoopReport, SamplingChange, Step};
use crate::request::FinishReason;
use crate::text::{Phase, Text};

/// Most tokens that policies may inject into one request: a policy that injects at every step
/// would otherwise never let it end.
pub const INJECTED_TOKENS: usize = 4096;

impl Sequence {
    /// Calls the policy where there is reason to, and applies its actions.
    ///
    /// # Errors
    /// [`crate::Error::Policy`] when it failed and fails closed.
    pub(super) fn ask_policy(&mut self, loop_found: Option<LoopReport>, text: &Text) -> Result<()> {
        let thinking = self.reply_state.reply.phase() == Phase::Reasoning;
        let budget_reached = thinking && self.reply_state.reasoning_tokens >= self.limits.reasoning;
        let unseen = &self.tokens[self.progress.seen..];
        let due = self.limits.every > 0 && unseen.len() >= self.limits.every as usize;
        if loop_found.is_none() && !budget_reached && !due {
            return Ok(());
        }
        let newest = unseen.len().saturating_sub(policy::STEP_TOKENS);
        let step = Step {
            index: self.reply_len() as u32,
            phase: match self.reply_state.reply.phase() {
                Phase::Reasoning => policy::Phase::Think,
                Phase::Answer => policy::Phase::Answer,
                Phase::ToolCall => policy::Phase::ToolCall,
            },
            think_tokens: self.reply_state.reasoning_tokens,
            answer_tokens: self.reply_state.answer_tokens,
            think_left: self.limits.reasoning.saturating_sub(self.reply_state.reasoning_tokens),
            tokens: unseen[newest..].to_vec(),
            text: self.reply_state.reply.take_text(),
            loop_found,
            budget_reached,
        };
        self.progress.loops += u32::from(loop_found.is_some());
        self.progress.seen = self.tokens.len();
        let actions = self.policy.on_step(&step)?;
        self.note_policy();
        let why = match (loop_found, budget_reached) {
            (Some(found), _) => format!("a loop of {} tokens", found.period),
            (None, true) => "the budget".to_string(),
            (None, false) => "no event".to_string(),
        };
        self.apply(actions, &why, text)?;
        // Budgets hold whatever the policy answers.
        if budget_reached && self.reply_state.reply.phase() == Phase::Reasoning && !self.has_ended()
        {
            self.close_thinking("", "the budget", text)?;
        }
        Ok(())
    }

    /// Applies `actions`: the longest rewind; sampling, biases and bans; texts in order; stop, behind
    /// which everything is dropped.
    fn apply(&mut self, mut actions: Vec<Action>, why: &str, text: &Text) -> Result<()> {
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
            self.adjust_by(action, why);
        }
        for action in actions {
            if self.has_ended() {
                break;
            }
            match action {
                Action::Inject(words) => {
                    self.inject(text.encode_plain(&words)?, "injected text", why, text)?;
                }
                Action::CloseThinking(hint) => self.close_thinking(&hint, why, text)?,
                Action::Stop(reason) => self.stop(reason, why),
                Action::Rewind(_) | Action::Ban(_) | Action::Bias(_) | Action::Sampling(_) => {}
            }
        }
        Ok(())
    }

    /// Changes how tokens are drawn. A token that is drawn already was drawn otherwise, and is
    /// dropped: the next draw from the same logits has the same seed.
    fn adjust_by(&mut self, action: &Action, why: &str) {
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
            Action::Sampling(resample) => {
                self.sampler.change(resample.sampling, resample.steps);
                (format!("changed sampling ({})", words(&resample.sampling)), resample.steps)
            }
            _ => return,
        };
        let span = match steps {
            0 => "for the rest of the reply".to_string(),
            steps => format!("for the next {steps} tokens"),
        };
        self.note(format!("{what} {span} after {} tokens, on {why}", self.reply_len()));
        self.sampled = None;
    }

    fn close_thinking(&mut self, hint: &str, why: &str, text: &Text) -> Result<()> {
        if self.reply_state.reply.phase() != Phase::Reasoning {
            return Ok(());
        }
        let tokens = self.reply_state.reply.close_reasoning_tokens(text, hint)?;
        self.inject(tokens, "closed the thought", why, text)
    }

    fn stop(&mut self, reason: String, why: &str) {
        self.note(format!("stopped after {} tokens, on {why}: {reason}", self.reply_len()));
        self.end(FinishReason::Policy(reason));
    }

    /// Commits `tokens` as if the model had drawn them; `what` is done with them for the notes.
    pub(super) fn inject(
        &mut self,
        tokens: Vec<u32>,
        what: &str,
        why: &str,
        text: &Text,
    ) -> Result<()> {
        let at = self.reply_len();
        self.progress.injected += tokens.len();
        if self.progress.injected > INJECTED_TOKENS {
            let reason = format!("the policy injected more than {INJECTED_TOKENS} tokens");
            self.note(reason.clone());
            self.end(FinishReason::Policy(reason));
            return Ok(());
        }
        if self.tokens.len() + tokens.len() > self.limits.context {
            self.note(format!("{what} after {at} tokens, on {why}: the context is full"));
            self.end(FinishReason::Length);
            return Ok(());
        }
        self.note(format!("{what} after {at} tokens, on {why}"));
        if tokens.is_empty() {
            return Ok(());
        }
        self.sampled = None;
        let all_seen = self.progress.seen == self.tokens.len();
        for token in tokens {
            self.append(token);
            // A call that is taken back takes the rest of the text with it.
            if self.judge(text)? || self.has_ended() {
                break;
            }
        }
        // Its own text is nothing new to a policy.
        if all_seen {
            self.progress.seen = self.tokens.len();
            self.reply_state.reply.take_text();
        }
        self.detector.iter_mut().for_each(Detector::reset);
        Ok(())
    }
}

/// A change of sampling for people.
fn words(change: &SamplingChange) -> String {
    let SamplingChange { temperature, top_p, top_k, min_p } = change;
    let value = |name: &str, value: Option<f32>| value.map(|value| format!("{name} {value}"));
    let top_k = top_k.map(|k| format!("top_k {k}"));
    let values =
        [value("temperature", *temperature), value("top_p", *top_p), top_k, value("min_p", *min_p)];
    values.into_iter().flatten().collect::<Vec<_>>().join(", ")
}
