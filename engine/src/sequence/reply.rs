//! The reply of a sequence as its client has it: parsed, sent, and rewound.
//!
//! Tokens become pieces of reasoning, answer and tool calls. Pieces are sent as events, through the
//! [`Outlet`] if policies see the text of the answer. A tool call that the client does not have
//! waits until it has a verdict. The state of the reply at an earlier token is computed by pushing
//! the tokens of the phase again, without sending them; the client gets an event to drop the text
//! after it.
//!
//! Knows neither the model, the cache, nor the policies.

use std::collections::VecDeque;

use tokio::sync::mpsc::UnboundedSender;

use super::outlet::Outlet;
use super::reply_state::ReplyState;
use crate::request::{Event, Message, Request, ToolCall};
use crate::text::{Phase, Piece, Reply};

/// Most notes of one reply; one more says that further notes were dropped.
const NOTES: usize = 256;

/// The state of a reply at the start of its current phase.
#[derive(Debug, Clone)]
struct PhaseStart {
    /// Tokens before it, prompt included.
    position: usize,
    state: ReplyState,
}

/// A rewind that the client can follow.
pub struct Rewind {
    /// Tokens of prompt and reply that stay.
    pub to: usize,
    /// The reply then.
    state: ReplyState,
    /// Bytes of reasoning that the client drops.
    reasoning: usize,
    /// Bytes of the answer that the client drops.
    answer: usize,
}

/// The phases of the reply before and after a token.
pub struct Pushed {
    /// The phase before it.
    pub before: Phase,
    /// The phase after it.
    pub now: Phase,
    /// Bytes of the untaken text before it.
    pub text_start: usize,
}

/// The parsed reply, and what its client has of it.
pub struct ClientReply {
    state: ReplyState,
    /// The reply is not rewound past this.
    phase_start: PhaseStart,
    /// The reply is not rewound past this position either: the client has a tool call before it, or
    /// a part of one.
    rewind_limit: usize,
    /// Number of prompt tokens.
    prompt: usize,
    /// Tokens of the reply, the one that ends the turn included.
    length: usize,
    /// Closed when the client disconnects. Unbounded, so that a slow reader cannot block others: it
    /// holds at most one reply, which the limits bound.
    events: UnboundedSender<Event>,
    /// `None` if no policy sees the text of the answer.
    pub(super) outlet: Option<Outlet>,
    /// Whether the client wants a single tool call.
    is_single_call: bool,
    /// Whether the client can drop text of the answer.
    is_revisable: bool,
    /// End of the tokens whose probabilities the client has.
    reported_end: usize,
    /// Bytes of reasoning sent to the client.
    reasoning: usize,
    /// The answer as sent to the client, which will send it back in the next turn.
    answer: String,
    tool_calls: Vec<ToolCall>,
    /// Id of the newest call that the client has a part of, until it has the whole.
    open_call: Option<String>,
    /// Number of calls that the client has a part of, and not the whole.
    open_calls: usize,
    /// Pieces of the last token from a tool call on that has no verdict yet.
    pub(super) waiting: VecDeque<Piece>,
    /// The pieces before them, which are sent together with them.
    pub(super) judged: Vec<Piece>,
    /// Actions of the policy, for display.
    notes: Vec<String>,
}

impl ClientReply {
    /// The empty reply to a prompt of `prompt` tokens, with the notes of admission.
    pub fn new(
        request: &Request,
        reply: Reply,
        prompt: usize,
        events: UnboundedSender<Event>,
        outlet: Option<Outlet>,
        notes: Vec<String>,
    ) -> Self {
        let state = ReplyState::new(reply);
        Self {
            phase_start: PhaseStart { position: prompt, state: state.clone() },
            state,
            rewind_limit: prompt,
            prompt,
            length: 0,
            events,
            outlet,
            is_single_call: request.tool_choice.is_single,
            is_revisable: request.revisable,
            reported_end: 0,
            reasoning: 0,
            answer: String::new(),
            tool_calls: Vec::new(),
            open_call: None,
            open_calls: 0,
            waiting: VecDeque::new(),
            judged: Vec::new(),
            notes,
        }
    }

    /// The parsed reply.
    pub fn parsed(&self) -> &Reply {
        &self.state.reply
    }

    /// The parsed reply, for text that policies take from it.
    pub(super) fn parsed_mut(&mut self) -> &mut Reply {
        &mut self.state.reply
    }

    /// The parsed reply with its counts of tokens.
    pub fn state(&self) -> &ReplyState {
        &self.state
    }

    /// The phase of the next token.
    pub fn phase(&self) -> Phase {
        self.state.reply.phase()
    }

    /// Tokens of the reply.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Tokens of prompt and reply.
    fn position(&self) -> usize {
        self.prompt + self.length
    }

    /// Position of the start of the phase, before which no rewind leads.
    pub fn phase_start(&self) -> usize {
        self.phase_start.position
    }

    /// Calls that the client has.
    pub fn tool_calls(&self) -> &[ToolCall] {
        &self.tool_calls
    }

    /// Returns true if the client has a part of a call, and not the whole.
    pub fn has_open_call(&self) -> bool {
        self.open_calls > 0
    }

    /// Returns true if the client has the only call that it wants.
    pub fn has_last_call(&self) -> bool {
        self.is_single_call && !self.tool_calls.is_empty()
    }

    /// Returns true if the client has disconnected.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// The channel of the events.
    pub fn events(&self) -> &UnboundedSender<Event> {
        &self.events
    }

    /// Sends an event that is no part of the text. Fails silently if the client has disconnected;
    /// the next step checks that.
    pub fn send_event(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// The reply as the client will send it back in the next turn: without the reasoning.
    pub fn message(&self) -> Message {
        Message {
            role: "assistant".into(),
            content: self.answer.clone(),
            tool_calls: self.tool_calls.clone(),
            ..Message::default()
        }
    }

    /// Adds a committed token, and sends the text that it completes. Completed tool calls wait for
    /// a verdict.
    pub fn push(&mut self, token: u32) -> Pushed {
        let before = self.phase();
        let text_start = self.state.reply.untaken_text().len();
        let pieces = self.state.push(token);
        self.length += 1;
        if pieces.iter().any(|piece| self.is_new_call(piece)) {
            self.waiting = pieces.into();
        } else {
            self.send(pieces);
        }
        let now = self.phase();
        let reasoning_changed = (before == Phase::Reasoning) != (now == Phase::Reasoning);
        // A call without a verdict may still be rewound, to before the header that ended the
        // reasoning.
        if reasoning_changed && now != Phase::ToolCall && self.waiting.is_empty() {
            self.start_phase();
        }
        Pushed { before, now, text_start }
    }

    /// Replaces the parsed reply by `ended`, in which a token that is no text has ended the turn.
    pub fn end_turn(&mut self, ended: Reply) {
        self.state.reply = ended;
    }

    /// Counts the token that ended the turn.
    pub fn count_end(&mut self) {
        self.length += 1;
    }

    /// Lets the pieces of the end of the reply wait for their verdicts.
    pub fn finish(&mut self) {
        self.waiting = self.state.reply.finish().into();
    }

    /// Starts a phase here; later rewinds stop here.
    fn start_phase(&mut self) {
        let position = self.position();
        self.phase_start = PhaseStart { position, state: self.state.clone() };
        self.rewind_limit = position;
    }

    /// The client has all calls that waited: the reply is not rewound past them.
    pub(super) fn keep_calls(&mut self) {
        // The tag of a next call can still be rewound.
        match self.state.reply.call_start() {
            Some(next) => self.rewind_limit = self.rewind_limit.max(self.prompt + next),
            None => self.start_phase(),
        }
    }

    /// The earliest position to which a policy can rewind.
    pub fn earliest_rewind(&self) -> usize {
        // A call is rewound together with its opening tag: the client has neither.
        let start = match (self.phase(), self.state.reply.call_start()) {
            (Phase::ToolCall, Some(start)) => self.prompt + start,
            _ => self.phase_start.position,
        };
        start.max(self.rewind_limit)
    }

    /// The rewind to the first `to` of `tokens`, which must not be before the start of the phase.
    /// `None` if the client has text or probabilities of the answer that it cannot drop. The
    /// policies have `seen` tokens.
    pub fn rewind_to(&self, to: usize, tokens: &[u32], seen: usize) -> Option<Rewind> {
        if to < self.reported_end {
            return None;
        }
        let start = self.phase_start.position;
        let mut state = self.phase_start.state.clone();
        for (position, &token) in (start..to).zip(&tokens[start..]) {
            if position == seen {
                state.reply.take_text();
            }
            state.push(token);
        }
        if to <= seen {
            state.reply.take_text();
        }
        let reasoning = self.reasoning.saturating_sub(state.reasoning_bytes);
        // Text that the policies hold back can be taken back.
        let sent = match &self.outlet {
            Some(outlet) => outlet.sent_at(state.answer_bytes),
            None => state.answer_bytes,
        };
        let answer = self.answer.len().saturating_sub(sent);
        let is_possible = answer == 0 || self.is_revisable;
        is_possible.then_some(Rewind { to, state, reasoning, answer })
    }

    /// Rewinds the reply, and lets the client drop the text after it.
    pub fn rewind(&mut self, rewind: Rewind) {
        let Rewind { to, state, reasoning, answer } = rewind;
        self.outlet.iter_mut().for_each(|outlet| outlet.rewind(state.answer_bytes));
        self.state = state;
        self.length = to - self.prompt;
        self.reasoning -= reasoning;
        self.answer.truncate(self.answer.len() - answer);
        if reasoning + answer > 0 {
            self.send_event(Event::Rewound { reasoning, answer });
        }
    }

    /// Marks that the client has the probabilities of the token that is being committed.
    pub fn mark_reported(&mut self) {
        self.reported_end = self.position() + 1;
    }

    /// Adds a note on an action of the policy.
    pub fn note(&mut self, note: String) {
        if self.notes.len() < NOTES {
            let tokens = self.length as u32;
            self.send_event(Event::Note { tokens, note: note.clone() });
        }
        add_note(&mut self.notes, note);
    }

    /// The notes so far.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Takes the notes, for the end of the request.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Returns true if this is a tool call that the client does not have.
    pub(super) fn is_new_call(&self, piece: &Piece) -> bool {
        let Piece::ToolCall(call) = piece else { return false };
        // A call is parsed again after a rewind of its closing tag.
        !self.tool_calls.iter().any(|sent| sent.id == call.id)
    }

    /// Sends pieces to the client, through the outlet if there is one.
    pub(super) fn send(&mut self, pieces: Vec<Piece>) {
        match &mut self.outlet {
            Some(outlet) => outlet.add(pieces),
            None => self.send_at_once(pieces),
        }
    }

    /// Sends `shaped`, which the policies made of the next `bytes` bytes of the answer; at its
    /// `end` they hold nothing back. Returns true if they have added too much now.
    pub(super) fn send_shaped(&mut self, shaped: String, bytes: usize, end: bool) -> bool {
        let Some(outlet) = &mut self.outlet else { return false };
        if outlet.count_seen(bytes, end) && !shaped.is_empty() {
            self.send_at_once(vec![Piece::Answer(shaped)]);
        }
        let sent = self.answer.len();
        self.outlet.as_mut().is_some_and(|outlet| outlet.mark(sent))
    }

    /// Sends pieces to the client.
    pub(super) fn send_at_once(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            let is_new_call = self.is_new_call(&piece);
            let is_left_out = self.has_last_call();
            let event = match piece {
                Piece::Reasoning(text) => {
                    self.reasoning += text.len();
                    Event::Reasoning(text)
                }
                Piece::Answer(text) => {
                    self.answer.push_str(&text);
                    Event::Answer(text)
                }
                Piece::ToolCall(_) if !is_new_call => continue,
                Piece::Note(note) => {
                    self.note(note);
                    continue;
                }
                Piece::CallDelta(_) if is_left_out => continue,
                Piece::CallDelta(delta) => {
                    self.rewind_limit = self.position();
                    if delta.name.is_some() {
                        self.open_calls += 1;
                        self.open_call = Some(delta.id.clone());
                    }
                    Event::CallDelta(delta)
                }
                Piece::ToolCall(call) if is_left_out => {
                    let name = call.function.name;
                    self.note(format!("left out a call of `{name}`: parallel_tool_calls is false"));
                    continue;
                }
                Piece::ToolCall(call) => {
                    if self.open_call.take_if(|id| *id == call.id).is_some() {
                        self.open_calls -= 1;
                    }
                    self.tool_calls.push(call.clone());
                    Event::ToolCall(call)
                }
            };
            self.send_event(event);
        }
    }
}

/// Adds a note, or says once that further notes were dropped.
pub fn add_note(notes: &mut Vec<String>, note: String) {
    if notes.len() < NOTES {
        notes.push(note);
    } else if notes.len() == NOTES {
        notes.push("further notes dropped".into());
    }
}
