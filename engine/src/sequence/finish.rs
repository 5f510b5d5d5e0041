//! The end of a request: finished, failed, cancelled or abandoned.

use tokio::sync::mpsc::UnboundedSender;

use super::Sequence;
use super::reply::add_note;
use crate::error::Error;
use crate::job::fail_all;
use crate::policy::Summary;
use crate::request::{Event, FinishReason, Finished, Usage};

impl Sequence {
    /// Ends the request after [`Sequence::complete`]: calls `on-finish`. Leaves the cache as it is.
    pub fn finish(&mut self) {
        let reason = self.end.clone().unwrap_or(FinishReason::Stop);
        // The end of the reply may have completed a call.
        let reason = match reason {
            // The client has part of a call, which it must not run.
            FinishReason::Stop
            | FinishReason::StopString(_)
            | FinishReason::ToolCalls
            | FinishReason::Policy(_)
                if self.reply.has_open_call() =>
            {
                FinishReason::Length
            }
            FinishReason::Stop | FinishReason::StopString(_)
                if !self.reply.tool_calls().is_empty() =>
            {
                FinishReason::ToolCalls
            }
            reason => reason,
        };
        let summary = self.summary(match &reason {
            FinishReason::Stop | FinishReason::StopString(_) => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool-calls",
            FinishReason::Policy(_) => "policy",
        });
        let (usage, events, id) =
            (self.usage(), self.reply.events().clone(), self.request.id.clone());
        let span = self.request.span.clone();
        let entered = span.clone();
        let _entered = entered.0.enter();
        tracing::debug!(
            id,
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.cached_tokens,
            reasoning_tokens = usage.reasoning_tokens,
            answer_tokens = usage.answer_tokens,
            drafted = usage.drafted_tokens,
            accepted = usage.accepted_tokens,
            verified = self.drafting.counts()[2],
            reason = ?reason,
            notes = ?self.reply.notes(),
            "request finished"
        );
        let mut notes = self.reply.take_notes();
        self.steering.hooks().finish(summary, move |finished| match finished {
            Ok((of_policy, labels)) => {
                of_policy.into_iter().for_each(|note| add_note(&mut notes, note));
                let _ = events.send(Event::Finished(Finished { reason, usage, notes, labels }));
            }
            Err(error) => {
                span.log(|| tracing::error!(id, %error, "request panicked"));
                let _ = events.send(Event::Failed(error));
            }
        });
    }

    /// Ends the request with an error.
    pub fn fail(&mut self, error: Error) {
        let id = &self.request.id;
        self.request.span.log(|| tracing::debug!(id, %error, "request failed"));
        let (summary, events) = (self.summary("error"), self.take_receivers());
        self.steering.hooks().finish(summary, move |_| fail_all(events, error));
    }

    /// Ends the request after a panic: nothing of the sequence is used any more, its policy
    /// included.
    pub fn abandon(&mut self, error: Error) {
        let id = &self.request.id;
        self.request.span.log(|| tracing::error!(id, %error, "request panicked"));
        fail_all(self.take_receivers(), error);
    }

    /// Where the events of the request go, and those of the choices that wait for its prompt, which
    /// end with it.
    fn take_receivers(&mut self) -> Vec<UnboundedSender<Event>> {
        let others = self.others.drain(..).map(|other| other.events);
        std::iter::once(self.reply.events().clone()).chain(others).collect()
    }

    /// Ends the request after its client has disconnected.
    pub fn cancel(&mut self) {
        tracing::debug!(id = self.request.id, tokens = self.timeline.len(), "request cancelled");
        let summary = self.summary("cancelled");
        self.steering.hooks().finish(summary, |_| ());
    }

    /// The summary for `on-finish`.
    fn summary(&self, reason: &str) -> Summary {
        Summary {
            reason: reason.into(),
            prompt_tokens: self.timeline.prompt() as u32,
            reasoning_tokens: self.reply.state().reasoning_tokens,
            answer_tokens: self.reply.state().answer_tokens,
            loops: self.steering.loops(),
            tool_calls: self.reply.tool_calls().len() as u32,
        }
    }

    fn usage(&self) -> Usage {
        let [drafted, accepted, _] = self.drafting.counts();
        Usage {
            prompt_tokens: self.timeline.prompt() as u32,
            cached_tokens: self.cached as u32,
            reasoning_tokens: self.reply.state().reasoning_tokens,
            answer_tokens: self.reply.state().answer_tokens,
            drafted_tokens: drafted,
            accepted_tokens: accepted,
            forced_tokens: self.forced,
            skipped_layers: self.skipped_layers,
        }
    }
}
