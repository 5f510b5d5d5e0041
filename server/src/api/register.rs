//! The requests that run, and the newest ones that have ended, for operators.
//!
//! Each request has an [`Entry`], which holds numbers and notes but no text. The text of a reply exists once,
//! where it is folded (`reply.rs`): a watcher receives the text so far, and then each new piece. A request that
//! nobody watches costs a lock for each note and a few numbers, and nothing for each token.

mod watch;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;
use steersman_engine::policy::TOOK_OVER;
use steersman_engine::report::{Live, Stage};
use steersman_engine::request::{Event, FinishReason, Usage};
use tokio::sync::{Semaphore, mpsc};

use self::watch::Watcher;
pub use self::watch::{Frame, Watched};
use crate::api::error::ApiError;
use crate::api::reply::Part;
use crate::mcp::Ran;

/// Requests that have ended and are still listed.
const ENDED: usize = 200;

/// Notes of one request that are kept; the engine sends at most 256 for a choice.
/// Shortest time over which a rate of tokens says something, in seconds.
pub const MEASURABLE_S: f64 = 0.005;

const NOTES: usize = 512;

/// Frames that wait for one watcher. One that falls further behind is cut off, and may watch again.
const FRAMES: usize = 2048;

/// Watchers that may join one request between two of its events.
const JOINING: usize = 4;

/// Watchers of all requests.
const WATCHERS: usize = 32;

/// All entries, newest last.
pub struct Register {
    entries: Mutex<VecDeque<Arc<Entry>>>,
    next: AtomicU64,
    /// One permit for each watcher.
    pub watchers: Arc<Semaphore>,
}

impl Default for Register {
    fn default() -> Self {
        let watchers = Arc::new(Semaphore::new(WATCHERS));
        Self { entries: Mutex::default(), next: AtomicU64::new(1), watchers }
    }
}

impl Register {
    /// Enters a request that has just arrived at `route`. `id` is that of its reply, `request_id` that of its HTTP request.
    pub fn enter(&self, id: &str, request_id: &str, route: &str) -> Tracked {
        let (join, joining) = mpsc::channel(JOINING);
        let entry = Arc::new(Entry {
            number: self.next.fetch_add(1, Ordering::Relaxed),
            id: id.into(),
            request_id: request_id.into(),
            route: route.into(),
            arrived: SystemTime::now(),
            clock: Instant::now(),
            join,
            state: Mutex::default(),
        });
        let mut entries = self.entries.lock();
        entries.push_back(entry.clone());
        let mut ended = entries.iter().filter(|entry| entry.has_ended()).count();
        entries.retain(|entry| {
            let is_forgotten = ended > ENDED && entry.has_ended();
            ended -= usize::from(is_forgotten);
            !is_forgotten
        });
        Tracked { entry, joining, watchers: Vec::new() }
    }

    /// All entries, newest first.
    pub fn entries(&self) -> Vec<Arc<Entry>> {
        self.entries.lock().iter().rev().cloned().collect()
    }

    /// The request with this id, if it is still listed.
    pub fn get(&self, id: &str) -> Option<Arc<Entry>> {
        self.entries.lock().iter().rev().find(|entry| entry.id == id).cloned()
    }
}

/// One request, as other threads see it.
pub struct Entry {
    number: u64,
    /// Id of the reply.
    pub id: String,
    /// Id of the HTTP request, as in the log.
    request_id: String,
    route: String,
    arrived: SystemTime,
    clock: Instant,
    join: mpsc::Sender<Watcher>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    profile: Option<String>,
    model: Option<String>,
    stream: bool,
    /// State of each choice.
    live: Vec<Arc<Live>>,
    prompt_tokens: u32,
    cached_tokens: u32,
    max_tokens: u32,
    /// `None` unless the answer is limited apart from the reasoning.
    max_answer_tokens: Option<u32>,
    /// Milliseconds from its arrival to the first piece of its reply.
    first_piece_ms: Option<u64>,
    notes: Vec<Note>,
    end: Option<End>,
}

struct Note {
    choice: usize,
    tokens: u32,
    /// Bytes of the reply's text before it.
    at: usize,
    text: String,
}

/// How a request ended.
struct End {
    total_ms: u64,
    /// `finished`, `failed` or `cancelled`.
    phase: &'static str,
    /// `None` unless it has finished.
    usage: Option<Usage>,
    /// Finish reason of the first choice.
    reason: Option<String>,
    /// Status and code.
    error: Option<(u16, &'static str)>,
}

impl Entry {
    /// Its profile, once it is known.
    pub fn profile(&self) -> Option<String> {
        self.state.lock().profile.clone()
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.state.lock().end.is_some()
    }

    /// Adds a watcher: it gets the reply so far, and then each piece.
    ///
    /// # Errors
    /// If many others are joining. One of a request that has ended gets nothing.
    pub fn watch(&self) -> Result<Watched, ApiError> {
        let (frames, received) = mpsc::channel(FRAMES);
        let is_late = Arc::new(AtomicBool::new(false));
        let watcher = Watcher { frames, is_late: is_late.clone() };
        match self.join.try_send(watcher) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(Watched { received, is_late }),
            Err(mpsc::error::TrySendError::Full(_)) => {
                Err(ApiError::busy("too many clients begin to watch this request; try again"))
            }
        }
    }

    /// Whether its number is `text`, or one of its names or how it ended has it; `text` is in lower case. `sees_all` adds
    /// its id and the texts of its notes, which are for operators.
    pub fn has(&self, text: &str, sees_all: bool) -> bool {
        let has = |own: &str| own.to_lowercase().contains(text);
        let state = self.state.lock();
        let end = state.end.as_ref();
        let names = [
            Some(self.route.as_str()),
            state.profile.as_deref(),
            state.model.as_deref(),
            end.map(|end| end.phase),
            end.and_then(|end| end.reason.as_deref()),
            end.and_then(|end| end.error).map(|(_, code)| code),
        ];
        self.number.to_string() == text
            || has(&self.request_id)
            || names.into_iter().flatten().any(has)
            || sees_all && (has(&self.id) || state.notes.iter().any(|note| has(&note.text)))
    }

    /// Its notes, as frames.
    pub fn notes(&self) -> Vec<Frame> {
        self.state.lock().notes.iter().map(Note::frame).collect()
    }

    /// What it is and how far it is. The `id` of its reply is left out unless `shows_id`: it opens the trace.
    pub fn describe(&self, shows_id: bool) -> ListedRequest {
        let state = self.state.lock();
        let elapsed_ms = self.clock.elapsed().as_millis() as u64;
        let stages: Vec<Stage> = state.live.iter().map(|live| live.stage()).collect();
        let reply: u32 = state.live.iter().map(|live| live.reply_tokens()).sum();
        let prefilled = state.live.first().map_or(0, |live| live.prefilled_tokens());
        // Of several choices, one that is decoded says more than one that waits.
        let is_decoded =
            |stage: &&Stage| matches!(stage, Stage::Reasoning | Stage::Answer | Stage::ToolCall);
        let stage = stages.iter().find(is_decoded).or(stages.first());
        let mut listed = ListedRequest {
            number: self.number,
            id: shows_id.then(|| self.id.clone()),
            request_id: self.request_id.clone(),
            route: self.route.clone(),
            profile: state.profile.clone(),
            model: state.model.clone(),
            stream: state.stream,
            choices: state.live.len(),
            arrived: self.arrived.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            phase: stage.copied().unwrap_or_default().name(),
            elapsed_ms,
            first_piece_ms: state.first_piece_ms,
            prompt_tokens: state.prompt_tokens,
            cached_tokens: state.cached_tokens,
            prefilled_tokens: prefilled.max(state.cached_tokens),
            reply_tokens: reply,
            max_tokens: state.max_tokens,
            max_answer_tokens: state.max_answer_tokens,
            notes: state.notes.len(),
            policy_failed: state.notes.iter().any(|note| note.text.ends_with(TOOK_OVER)),
            end: None,
            tokens_per_second: None,
        };
        if let Some(end) = &state.end {
            listed.phase = end.phase;
            listed.elapsed_ms = end.total_ms;
            // As in the reply and in the log: the token that ended it does not count.
            listed.reply_tokens = end.usage.map_or(reply, |usage| usage.reply_tokens());
            listed.end = Some(ListedEnd {
                reasoning_tokens: end.usage.map(|usage| usage.reasoning_tokens),
                answer_tokens: end.usage.map(|usage| usage.answer_tokens),
                drafted_tokens: end.usage.map(|usage| usage.drafted_tokens),
                accepted_tokens: end.usage.map(|usage| usage.accepted_tokens),
                reason: end.reason.clone(),
                status: end.error.map(|(status, _)| status),
                error: end.error.map(|(_, code)| code),
            });
        }
        let until = listed.elapsed_ms;
        let seconds = state.first_piece_ms.map(|first| until.saturating_sub(first) as f64 / 1e3);
        // The first token of a reply belongs to its prompt.
        let tokens = f64::from(listed.reply_tokens.saturating_sub(listed.choices as u32));
        let rate =
            seconds.filter(|seconds| *seconds >= MEASURABLE_S).map(|seconds| tokens / seconds);
        listed.tokens_per_second = rate.map(|rate| (rate * 10.0).round() / 10.0);
        listed
    }
}

/// A request as clients see it.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ListedRequest {
    number: u64,
    /// For operators: it opens the trace.
    id: Option<String>,
    /// `X-Request-Id` of its HTTP request.
    request_id: String,
    route: String,
    profile: Option<String>,
    model: Option<String>,
    stream: bool,
    choices: usize,
    /// Seconds since 1970.
    arrived: u64,
    pub phase: &'static str,
    elapsed_ms: u64,
    /// Milliseconds until the first piece of the reply.
    first_piece_ms: Option<u64>,
    pub prompt_tokens: u32,
    cached_tokens: u32,
    pub prefilled_tokens: u32,
    pub reply_tokens: u32,
    /// Limit on all tokens of the reply.
    max_tokens: u32,
    /// Limit on answer and tool calls, if they are limited apart from the reasoning.
    max_answer_tokens: Option<u32>,
    notes: usize,
    /// Whether a policy failed and the native one took over.
    policy_failed: bool,
    #[serde(flatten)]
    end: Option<ListedEnd>,
    tokens_per_second: Option<f64>,
}

/// How a request ended.
#[derive(Debug, Serialize, JsonSchema)]
struct ListedEnd {
    reasoning_tokens: Option<u32>,
    answer_tokens: Option<u32>,
    drafted_tokens: Option<u32>,
    accepted_tokens: Option<u32>,
    reason: Option<String>,
    status: Option<u16>,
    error: Option<&'static str>,
}

impl Note {
    fn frame(&self) -> Frame {
        let data = json!({"choice": self.choice, "tokens": self.tokens, "note": self.text});
        Frame { event: "note", data: data.to_string() }
    }
}

/// The handler's side of an entry.
pub struct Tracked {
    entry: Arc<Entry>,
    joining: mpsc::Receiver<Watcher>,
    watchers: Vec<Watcher>,
}

impl Tracked {
    /// Who asks for what. `model` is its name in the configuration, until the client's is known.
    pub fn admitted(&self, model: &str, profile: &str, stream: bool) {
        let mut state = self.entry.state.lock();
        (state.profile, state.stream) = (Some(profile.into()), stream);
        state.model.get_or_insert_with(|| model.into());
    }

    /// The model that the client sees, and where the engine writes how far each choice is.
    pub fn queued(&self, model: &str, live: Vec<Arc<Live>>) {
        let mut state = self.entry.state.lock();
        (state.model, state.live) = (Some(model.into()), live);
    }

    /// Counts a prompt, whose reply has these limits on all of its tokens, and on those of its answer.
    pub fn started(
        &self,
        prompt_tokens: u32,
        cached_tokens: u32,
        (max_tokens, max_answer_tokens): (u32, Option<u32>),
    ) {
        let mut state = self.entry.state.lock();
        state.prompt_tokens += prompt_tokens;
        state.cached_tokens += cached_tokens;
        state.max_tokens = state.max_tokens.max(max_tokens);
        state.max_answer_tokens = state.max_answer_tokens.max(max_answer_tokens);
    }

    /// The first piece of the reply is here.
    pub fn first_piece(&self, milliseconds: u64) {
        self.entry.state.lock().first_piece_ms = Some(milliseconds);
    }

    /// Waits for the next watcher: for ever, if there is none.
    pub async fn joining(&mut self) {
        match self.joining.recv().await {
            Some(watcher) => self.watchers.push(watcher),
            // The entry holds a sender.
            None => std::future::pending().await,
        }
    }

    /// Sends the newest watcher the replies so far, with the notes in their places.
    pub fn welcome<'a, P: Iterator<Item = &'a Part>>(&mut self, replies: impl Iterator<Item = P>) {
        let Some(watcher) = self.watchers.last() else { return };
        let state = self.entry.state.lock();
        let mut frames = Vec::new();
        for (choice, parts) in replies.enumerate() {
            let notes: Vec<&Note> = state.notes.iter().filter(|n| n.choice == choice).collect();
            frames_so_far(choice, parts, &notes, &mut frames);
        }
        drop(state);
        if !frames.into_iter().all(|frame| watcher.send(frame)) {
            self.watchers.pop();
        }
    }

    /// Keeps and passes on a note that was made after `tokens` tokens and `at` bytes of text.
    pub fn note(&mut self, choice: usize, tokens: u32, at: usize, text: &str) {
        let note = Note { choice, tokens, at, text: text.into() };
        let frame = note.frame();
        let notes = &mut self.entry.state.lock().notes;
        if notes.len() < NOTES {
            notes.push(note);
        }
        self.watchers.retain(|watcher| watcher.send(frame.clone()));
    }

    /// Passes on an event of a reply.
    pub fn event(&mut self, choice: usize, event: &Event) {
        if self.watchers.is_empty() {
            return;
        }
        let frame = match event {
            Event::Reasoning(text) => Frame::text(choice, "reasoning", text),
            Event::Answer(text) => Frame::text(choice, "answer", text),
            Event::CallDelta(delta) => {
                Frame::call(choice, delta.name.as_deref().unwrap_or_default(), &delta.arguments)
            }
            Event::ToolCall(call) => {
                let arguments = call.function.arguments.to_json();
                let data = json!({"choice": choice, "kind": "whole-call", "id": call.id,
                    "name": call.function.name, "text": arguments});
                Frame { event: "piece", data: data.to_string() }
            }
            Event::Rewound { reasoning, answer } => {
                let data = json!({"choice": choice, "reasoning": reasoning, "answer": answer});
                Frame { event: "rewound", data: data.to_string() }
            }
            _ => return,
        };
        self.send(frame);
    }

    /// Passes on a call that this server ran.
    pub fn ran(&mut self, choice: usize, ran: &Ran) {
        if !self.watchers.is_empty() {
            self.send(Frame::ran(choice, ran));
        }
    }

    fn send(&mut self, frame: Frame) {
        self.watchers.retain(|watcher| watcher.send(frame.clone()));
    }

    /// How far the request is.
    pub fn progress(&self) -> ListedRequest {
        self.entry.describe(false)
    }

    /// The request succeeded.
    pub fn finished(&mut self, total_ms: u64, reason: Option<&FinishReason>, usage: Usage) {
        let reason = reason.map(|reason| match reason {
            FinishReason::Stop => "stop".into(),
            FinishReason::StopString(_) => "stop string".into(),
            FinishReason::Length => "length".into(),
            FinishReason::ToolCalls => "tool calls".into(),
            FinishReason::Policy(reason) => format!("policy: {reason}"),
        });
        self.end(End { total_ms, phase: "finished", usage: Some(usage), reason, error: None });
    }

    /// The request failed.
    pub fn failed(&mut self, total_ms: u64, status: u16, code: &'static str) {
        let (usage, error) = (None, Some((status, code)));
        self.end(End { total_ms, phase: "failed", usage, reason: None, error });
    }

    /// The client has disconnected.
    pub fn cancelled(&mut self, total_ms: u64) {
        self.end(End { total_ms, phase: "cancelled", usage: None, reason: None, error: None });
    }

    fn end(&mut self, end: End) {
        self.entry.state.lock().end = Some(end);
        self.watchers.clear();
        self.joining.close();
        while self.joining.try_recv().is_ok() {}
    }
}

/// The parts of one reply, cut at its notes.
fn frames_so_far<'a>(
    choice: usize,
    parts: impl Iterator<Item = &'a Part>,
    notes: &[&Note],
    frames: &mut Vec<Frame>,
) {
    let mut notes = notes.iter().peekable();
    let mut before = 0;
    for part in parts {
        let (kind, text) = match part {
            Part::Reasoning(text) => ("reasoning", text),
            Part::Answer(text) => ("answer", text),
            Part::OpenCall { name, arguments, .. } => {
                frames.push(Frame::call(choice, name, arguments));
                continue;
            }
            Part::ToolCall(call) => {
                let arguments = call.function.arguments.to_json();
                frames.push(Frame::call(choice, &call.function.name, &arguments));
                continue;
            }
            Part::Ran(ran) => {
                frames.push(Frame::ran(choice, ran));
                continue;
            }
        };
        let mut rest = text.as_str();
        while let Some(note) = notes.next_if(|note| note.at < before + text.len()) {
            let here = before + text.len() - rest.len();
            let cut = rest.floor_char_boundary(note.at.saturating_sub(here));
            if cut > 0 {
                frames.push(Frame::text(choice, kind, &rest[..cut]));
            }
            rest = &rest[cut..];
            frames.push(note.frame());
        }
        if !rest.is_empty() {
            frames.push(Frame::text(choice, kind, rest));
        }
        before += text.len();
    }
    frames.extend(notes.map(|note| note.frame()));
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn note(at: usize, text: &str) -> Note {
        Note { choice: 0, tokens: 1, at, text: text.into() }
    }

    #[test]
    fn who_joins_late_gets_each_note_in_its_place() {
        let parts = [Part::Reasoning("It is é.".into()), Part::Answer("Rome".into())];
        let notes = [note(0, "a"), note(5, "b"), note(11, "c"), note(99, "d")];
        let mut frames = Vec::new();
        frames_so_far(0, parts.iter(), &notes.iter().collect::<Vec<_>>(), &mut frames);
        let seen: Vec<String> = frames
            .iter()
            .map(|frame| {
                let data: Value = serde_json::from_str(&frame.data).unwrap();
                let text = data["note"].as_str().map(|note| format!("<{note}>"));
                text.unwrap_or_else(|| data["text"].as_str().unwrap().to_string())
            })
            .collect();
        assert_eq!(seen.concat(), "<a>It is<b> é.Ro<c>me<d>");
    }

    #[test]
    fn the_oldest_ended_requests_are_forgotten_and_no_running_one() {
        let register = Register::default();
        let running = register.enter("running", "req", "/v1/chat/completions");
        for number in 0..2 * ENDED {
            let mut ended =
                register.enter(&format!("ended-{number}"), "req", "/v1/chat/completions");
            ended.finished(1, None, Usage::default());
        }
        assert!(register.get("running").is_some());
        assert!(register.get("ended-0").is_none());
        assert!(register.get(&format!("ended-{}", 2 * ENDED - 1)).is_some());
        // The newest one had not ended when it was entered.
        assert_eq!(register.entries().len(), 1 + ENDED + 1);
        drop(running);
    }

    #[test]
    fn a_watcher_that_falls_behind_is_cut_off_and_told_so() {
        let register = Register::default();
        let mut tracked = register.enter("a", "req", "/v1/chat/completions");
        let mut watched = register.get("a").unwrap().watch().unwrap();
        tracked.watchers.extend(tracked.joining.try_recv());
        for _ in 0..2 * FRAMES {
            tracked.event(0, &Event::Answer("x".into()));
        }
        assert!(tracked.watchers.is_empty() && watched.is_late());
        let received = std::iter::from_fn(|| watched.received.try_recv().ok()).count();
        assert_eq!(received, FRAMES);
    }

    #[test]
    fn requests_are_found_by_their_names_and_by_operators_by_their_notes() {
        let register = Register::default();
        let mut tracked = register.enter("chatcmpl-7f", "of-my-proxy", "/chat/completions");
        tracked.admitted("owner/Tiny", "agents", false);
        tracked.queued("owner/Tiny", Vec::new());
        tracked.note(0, 1, 0, "closed the reasoning after 143 tokens (Loop)");
        tracked.failed(1, 400, "invalid_value");
        let entry = register.get("chatcmpl-7f").unwrap();
        assert!(entry.has("of-my-proxy", true) && entry.has("of-my-proxy", false));
        for text in ["agents", "owner/tiny", "completions", "1", "", "invalid_value", "failed"] {
            assert!(entry.has(text, false) && entry.has(text, true), "{text}");
        }
        for text in ["7f", "loop", "143"] {
            assert!(!entry.has(text, false) && entry.has(text, true), "{text}");
        }
        assert!(!entry.has("absent", true));
    }

    #[test]
    fn notes_of_a_request_are_bounded() {
        let register = Register::default();
        let mut tracked = register.enter("a", "req", "/v1/chat/completions");
        for _ in 0..2 * NOTES {
            tracked.note(0, 1, 0, "x");
        }
        assert_eq!(register.get("a").unwrap().notes().len(), NOTES);
    }
}
