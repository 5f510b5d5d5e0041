//! A reply: what the upstream wrote, and what the client has of it.
//!
//! The text as it was written is kept, because a continued message begins with it. What policies make of answer text
//! goes to the client alone.

use std::sync::Arc;

use steersman_policy_host::Phase;
use steersman_request::live::{Live, Stage};
use steersman_request::{Arguments, CallDelta, Event, FunctionCall, Request, ToolCall};
use tokio::sync::mpsc::UnboundedSender;

use crate::ask::Continuation;

/// Most notes of one reply; one more says that further notes were dropped.
const NOTES: usize = 256;

/// Most bytes by which policies may make an answer longer.
const ADDED_BYTES: usize = 64 << 10;

/// The reply of one request.
pub struct Reply {
    events: UnboundedSender<Event>,
    live: Arc<Live>,
    notes: Vec<String>,
    /// Where the next text goes.
    pub phase: Phase,
    /// The reasoning as it was written.
    pub reasoning: String,
    /// The answer as it was written.
    pub answer: String,
    /// Pieces of the reasoning, and of answer and calls.
    pub counts: (u32, u32),
    /// Bytes of the answer that policies have seen, and that the client had then.
    marks: Vec<(usize, usize)>,
    /// Bytes of the answer that policies have seen.
    pub seen: usize,
    /// Bytes of the answer that the client has.
    sent: usize,
    /// Whether policies may hold text back.
    pub is_held: bool,
    /// Whether policies see the text of the answer, so that the client may have another.
    is_shaped: bool,
    is_revisable: bool,
    is_single_call: bool,
    /// Whether calls are sent while they are written.
    streams_calls: bool,
    /// Calls that the client has.
    pub calls: Vec<ToolCall>,
    /// The call that is being written.
    pub open: Option<OpenCall>,
    /// Whether the client has a part of a call, and never the whole.
    pub has_broken_call: bool,
}

/// A call that is being written.
#[derive(Debug, Clone, Default)]
pub struct OpenCall {
    pub id: String,
    pub name: String,
    pub arguments: String,
}

impl Reply {
    /// The empty reply to `request`.
    pub fn new(
        request: &Request,
        events: UnboundedSender<Event>,
        [sees_text, judges_calls]: [bool; 2],
        notes: Vec<String>,
    ) -> Self {
        Self {
            events,
            live: request.live.clone(),
            notes,
            phase: Phase::Answer,
            reasoning: String::new(),
            answer: String::new(),
            counts: (0, 0),
            marks: Vec::new(),
            seen: 0,
            sent: 0,
            is_held: false,
            is_shaped: sees_text,
            is_revisable: request.revisable,
            is_single_call: request.tool_choice.is_single,
            streams_calls: request.streams_calls && !judges_calls,
            calls: Vec::new(),
            open: None,
            has_broken_call: false,
        }
    }

    /// Sends an event. A client that has disconnected ends the request elsewhere.
    pub fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// Pieces of the reply.
    pub fn tokens(&self) -> u32 {
        self.counts.0 + self.counts.1
    }

    /// Adds a note on what was done.
    pub fn note(&mut self, note: String) {
        if self.notes.len() < NOTES {
            self.send(Event::Note { tokens: self.tokens(), note: note.clone() });
            self.notes.push(note);
        } else if self.notes.len() == NOTES {
            self.notes.push("further notes dropped".into());
        }
    }

    /// Takes the notes, for the end.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Sends reasoning.
    pub fn reason(&mut self, text: &str) {
        self.reasoning.push_str(text);
        self.send(Event::Reasoning(text.into()));
    }

    /// Sends what policies made of the next `bytes` bytes of the answer; at its `end` they hold nothing back. Returns
    /// true if they have added too much.
    pub fn answer_shaped(&mut self, shaped: String, bytes: usize, end: bool) -> bool {
        self.seen += bytes;
        self.is_held = !end;
        self.sent += shaped.len();
        if !shaped.is_empty() {
            self.send(Event::Answer(shaped));
        }
        self.marks.push((self.seen, self.sent));
        self.sent > self.seen + ADDED_BYTES
    }

    /// The last call of the policies within the first `bytes` of the answer: what they had seen then, and what the
    /// client had.
    fn mark_within(&self, bytes: usize) -> (usize, usize) {
        if !self.is_shaped {
            return (bytes, bytes);
        }
        let marks = self.marks.iter().rev();
        marks.copied().find(|(seen, _)| *seen <= bytes).unwrap_or_default()
    }

    /// Takes `bytes` of the current phase back. Returns false if the client has text that it cannot drop. The policies
    /// get the text after [`Self::seen`] again.
    pub fn rewind(&mut self, bytes: usize) -> bool {
        if self.phase == Phase::Reasoning {
            let kept = self.reasoning.len().saturating_sub(bytes);
            let kept = self.reasoning.floor_char_boundary(kept);
            let dropped = self.reasoning.len() - kept;
            self.reasoning.truncate(kept);
            self.send(Event::Rewound { reasoning: dropped, answer: 0 });
            return true;
        }
        let kept = self.answer.floor_char_boundary(self.answer.len().saturating_sub(bytes));
        let (seen, sent) = self.mark_within(kept);
        let dropped = self.sent - sent;
        if dropped > 0 && !self.is_revisable {
            return false;
        }
        self.answer.truncate(kept);
        self.marks.retain(|(before, _)| *before <= seen);
        (self.seen, self.sent) = (seen, sent);
        self.is_held |= self.is_shaped && seen > 0;
        if dropped > 0 {
            self.send(Event::Rewound { reasoning: 0, answer: dropped });
        }
        true
    }

    /// The answer that the policies have not seen.
    pub fn unseen(&self) -> &str {
        &self.answer[self.seen.min(self.answer.len())..]
    }

    /// The message that the upstream continues.
    pub fn continuation(&self) -> Continuation {
        Continuation {
            reasoning: self.reasoning.clone(),
            is_open: self.phase == Phase::Reasoning,
            answer: self.answer.clone(),
        }
    }

    /// Returns true if the client has the only call that it wants.
    pub fn has_last_call(&self) -> bool {
        self.is_single_call && !self.calls.is_empty()
    }

    /// A call begins.
    pub fn begin_call(&mut self, id: String, name: String) {
        self.phase = Phase::ToolCall;
        if self.streams_calls && !self.has_last_call() {
            let (id, name) = (id.clone(), Some(name.clone()));
            self.send(Event::CallDelta(CallDelta { id, name, arguments: String::new() }));
        }
        self.open = Some(OpenCall { id, name, arguments: String::new() });
    }

    /// The next text of the arguments of the open call.
    pub fn add_arguments(&mut self, text: &str) {
        let is_sent = self.streams_calls && !self.has_last_call();
        let Some(open) = &mut self.open else { return };
        open.arguments.push_str(text);
        if is_sent {
            let (id, arguments) = (open.id.clone(), text.to_string());
            self.send(Event::CallDelta(CallDelta { id, name: None, arguments }));
        }
    }

    /// The call that was being written; `None` if there is none, or it is malformed, with a note.
    pub fn end_call(&mut self, is_cut_off: bool) -> Option<ToolCall> {
        let OpenCall { id, name, arguments } = self.open.take()?;
        let text = arguments.trim();
        let text = if text.is_empty() { "{}" } else { text };
        let Some(arguments) = Arguments::parse(text) else {
            self.has_broken_call |= is_cut_off || self.streams_calls;
            let why =
                if is_cut_off { "it was cut off" } else { "its arguments are no JSON object" };
            self.note(format!("dropped a call of `{name}`: {why}"));
            return None;
        };
        let function = FunctionCall { name, arguments };
        Some(ToolCall { id, kind: "function".into(), function })
    }

    /// Sends a call.
    pub fn send_call(&mut self, call: ToolCall) {
        if self.has_last_call() {
            let name = call.function.name;
            self.note(format!("left out a call of `{name}`: parallel_tool_calls is false"));
            return;
        }
        self.calls.push(call.clone());
        self.send(Event::ToolCall(call));
    }

    /// Writes how far the reply is, for other threads.
    pub fn show(&self) {
        let stage = match self.phase {
            Phase::Reasoning => Stage::Reasoning,
            Phase::Answer => Stage::Answer,
            Phase::ToolCall => Stage::ToolCall,
        };
        self.live.set(stage, 0, self.tokens() as usize);
    }

    /// Writes that the upstream was asked.
    pub fn show_sent(&self) {
        self.live.set_stage(Stage::Prefill);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;

    fn reply(request: &Request) -> (Reply, UnboundedReceiver<Event>) {
        let (events, receiver) = unbounded_channel();
        (Reply::new(request, events, [false, false], Vec::new()), receiver)
    }

    #[test]
    fn an_answer_that_the_client_has_is_taken_back_only_if_it_can_drop_it() {
        for revisable in [false, true] {
            let (mut reply, mut events) = reply(&Request { revisable, ..Request::default() });
            for text in ["one ", "two ", "three"] {
                reply.answer.push_str(text);
                reply.answer_shaped(text.into(), text.len(), false);
            }
            assert_eq!(reply.rewind(9), revisable);
            assert_eq!(reply.answer, if revisable { "one " } else { "one two three" });
            let rewound = std::iter::from_fn(|| events.try_recv().ok()).last();
            match rewound {
                Some(Event::Rewound { answer: 9, .. }) => assert!(revisable),
                other => assert!(!revisable, "{other:?}"),
            }
        }
    }

    #[test]
    fn malformed_calls_are_dropped_with_a_note() {
        let (mut reply, _events) = reply(&Request::default());
        reply.begin_call("a".into(), "f".into());
        reply.add_arguments("{\"x\":");
        assert!(reply.end_call(false).is_none());
        assert!(reply.take_notes()[0].contains("no JSON object"));
        reply.begin_call("b".into(), "f".into());
        assert_eq!(reply.end_call(false).unwrap().function.arguments.to_json(), "{}");
    }
}
