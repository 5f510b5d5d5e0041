//! OpenAI's responses: `POST /v1/responses`, and what was stored of them.

mod labels;
mod reply;
mod request;
mod stored;

use std::sync::Arc;

use serde_json::{Map, Value};
use steersman_engine::request::{CallDelta, Event, FinishReason, Message, Request, ToolCall};

pub use self::reply::{DeletedResponse, InputItems, ResponseBody, ResponseEvent};
pub use self::stored::{delete, get, input_items};

use self::reply::{
    CallItem, Incomplete, McpCallItem, MessageItem, OutputItem, OutputPart, ReasoningItem,
    ResponseError, Status,
};
use self::request::assistant;
use super::error::ApiError;
use super::extension::Extension;
use super::params;
use super::probability::TokenProbabilities;
use super::protocol::{Parsed, Place, Protocol};
use super::reply::{Frames, Head, Part, Reply, usage};
use super::response_store::{ResponseStore, Stored};
use super::schema::Schemas;
use crate::mcp::Ran;

/// The state of one response.
#[derive(Debug, Default)]
pub struct Responses {
    instructions: String,
    /// The conversation without instructions; first only the input, then what it continues too.
    messages: Vec<Message>,
    /// `previous_response_id`
    previous: Option<String>,
    /// The items of the input.
    input: Value,
    /// The fields of the request that a response repeats.
    repeated: Map<String, Value>,
    /// Whether to store the response.
    stores: bool,
    /// Whether the client reads reasoning as a summary; otherwise it is the content of its item.
    summarizes: bool,
    /// Where to store the response.
    store: Option<Arc<ResponseStore>>,
    /// Number of events sent.
    sequence: u64,
    /// The item that a stream has begun and not ended, as far as it has arrived.
    open: Option<Part>,
    /// Probabilities of the tokens of the open item.
    logprobs: Vec<TokenProbabilities>,
    /// Probabilities of tokens whose text has not arrived.
    next_logprobs: Vec<TokenProbabilities>,
    /// Number of items that a stream has ended.
    items: usize,
}

impl Protocol for Responses {
    type Whole = ResponseBody;

    const ID: &'static str = "resp_";

    const REPEATS_LOGPROBS: bool = true;

    fn schema(schemas: &mut Schemas) -> Value {
        request::schema(schemas)
    }

    fn parse(body: Map<String, Value>) -> Result<Parsed<Self>, ApiError> {
        request::parse(body)
    }

    fn prompt_field(&self, _: usize) -> String {
        "input".into()
    }

    fn resolve(&mut self, place: &Place<'_>, requests: &mut [Request]) -> Result<(), ApiError> {
        let store = place.app.responses.clone();
        if let Some(id) = &self.previous {
            let stored = store.as_ref().and_then(|store| store.get(id));
            let param = "previous_response_id";
            let stored = stored.ok_or_else(|| ApiError::response_not_found(param, id))?;
            place.app.access.allow(place.caller, &stored.profile)?;
            self.messages.splice(0..0, stored.messages);
        }
        if self.messages.is_empty() {
            return Err(ApiError::missing("input", "input: must have at least one message"));
        }
        self.store = store.filter(|_| self.stores);
        for request in requests {
            request.messages = params::with_instructions(&self.instructions, self.messages.clone());
        }
        Ok(())
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        let response = self.response(head, Status::InProgress, Vec::new());
        self.send_response("response.created", response.clone(), out);
        self.send_response("response.in_progress", response, out);
    }

    fn event(&mut self, head: &Head, _: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Reasoning(piece) => {
                if !matches!(self.open, Some(Part::Reasoning(_))) {
                    self.open(head, Part::Reasoning(String::new()), out);
                }
                self.delta(head, piece, out);
            }
            Event::Answer(piece) => {
                if !matches!(self.open, Some(Part::Answer(_))) {
                    self.open(head, Part::Answer(String::new()), out);
                }
                self.delta(head, piece, out);
            }
            Event::CallDelta(delta) => {
                if delta.name.is_some() {
                    let empty = CallDelta { arguments: String::new(), ..delta.clone() };
                    self.open(head, Part::open_call(&empty), out);
                }
                self.delta(head, delta.arguments, out);
            }
            Event::ToolCall(call) => {
                if !matches!(&self.open, Some(Part::OpenCall { id, .. }) if *id == call.id) {
                    let (id, name) = (call.id.clone(), call.function.name.clone());
                    let arguments = String::new();
                    self.open(head, Part::OpenCall { id, name, arguments }, out);
                    self.delta(head, arguments_of(&call), out);
                }
                self.open = Some(Part::ToolCall(call));
                self.close(head, false, out);
            }
            Event::Logprob(logprob) => {
                self.next_logprobs.push((&logprob).into());
            }
            Event::Started { .. }
            | Event::Rewound { .. }
            | Event::Routed { .. }
            | Event::PromptCounted { .. }
            | Event::Note { .. }
            | Event::PromptToken(_)
            | Event::Embedding(_)
            | Event::Finished(_)
            | Event::Failed(_) => {}
        }
    }

    fn ran(&mut self, head: &Head, _: usize, ran: &Ran, out: &mut Frames) {
        self.close(head, false, out);
        let part = Part::Ran(ran.clone());
        self.next_logprobs.clear();
        let begun = McpCallItem {
            status: Status::InProgress,
            arguments: Some(String::new()),
            output: None,
            error: None,
            ..mcp_call(head, self.items, ran)
        };
        self.send_item("response.output_item.added", OutputItem::McpCall(begun), out);
        let none = ResponseEvent::default;
        self.send_of_item(head, &part, "response.mcp_call.in_progress", none(), out);
        let arguments = ResponseEvent { arguments: ran.arguments.clone(), ..none() };
        self.send_of_item(head, &part, "response.mcp_call_arguments.done", arguments, out);
        let name = match ran.is_error {
            true => "response.mcp_call.failed",
            false => "response.mcp_call.completed",
        };
        self.send_of_item(head, &part, name, none(), out);
        let whole = mcp_call(head, self.items, ran);
        self.send_item("response.output_item.done", OutputItem::McpCall(whole), out);
        self.items += 1;
    }

    fn end(&mut self, head: &Head, replies: &[Reply], out: &mut Frames) {
        let is_cut = replies.first().is_some_and(is_cut);
        self.close(head, is_cut, out);
        let response = self.whole(head, replies);
        let name = match response.status {
            Status::Incomplete => "response.incomplete",
            _ => "response.completed",
        };
        self.send_response(name, response, out);
    }

    fn fail(&mut self, head: &Head, error: &ApiError, out: &mut Frames) {
        let (code, message) = (error.code, error.message.clone());
        let failed = ResponseBody {
            error: Some(ResponseError { code, message }),
            ..self.response(head, Status::Failed, Vec::new())
        };
        self.send_response("response.failed", failed, out);
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> ResponseBody {
        let reply = replies.first().expect("a body has one request: `request::parse` makes it");
        let is_whole = !is_cut(reply);
        let status = if is_whole { Status::Completed } else { Status::Incomplete };
        let item = |(index, part): (usize, &Part)| {
            let logprobs = reply.logprobs_of(index).map(|logprob| (&logprob).into()).collect();
            let is_cut = !is_whole && index + 1 == reply.parts.len();
            self.item(head, index, part, logprobs, ended(part, is_cut))
        };
        let output = reply.parts.iter().enumerate().map(item).collect();
        let mut extension = Extension::new(head, &reply.finished);
        let mut response = self.response(head, status, output);
        response.incomplete_details =
            (!is_whole).then_some(Incomplete { reason: "max_output_tokens" });
        response.usage = Some(usage(head, replies).into());
        if let Some(store) = &self.store {
            let mut messages = std::mem::take(&mut self.messages);
            messages.extend(turns(reply));
            let (profile, input) = (head.profile.clone(), std::mem::take(&mut self.input));
            let sent = ResponseBody { steersman: Some(extension.clone()), ..response.clone() };
            let response_json =
                serde_json::to_value(&sent).expect("a response has string keys only");
            let stored = Stored { profile, messages, input, response: response_json };
            // Before the client has the id, with which its next request may come at once.
            if let Err(error) = store.put(&head.id, &stored) {
                response.repeated.insert("store".into(), false.into());
                extension.notes.push(format!(
                    "the response was not stored ({error}): its id cannot be used as previous_response_id; send \
                     the conversation as input"
                ));
            }
        }
        response.steersman = Some(extension);
        response
    }
}

impl Responses {
    /// A response with these items.
    fn response(&self, head: &Head, status: Status, output: Vec<OutputItem>) -> ResponseBody {
        let mut repeated = self.repeated.clone();
        repeated.insert("store".into(), self.store.is_some().into());
        ResponseBody {
            id: head.id.clone(),
            object: "response",
            created_at: head.created,
            status,
            background: false,
            error: None,
            incomplete_details: None,
            model: head.model.clone(),
            output,
            usage: None,
            repeated,
            steersman: None,
        }
    }

    /// Item `index` of the output, with the probabilities of its tokens.
    fn item(
        &self,
        head: &Head,
        index: usize,
        part: &Part,
        logprobs: Vec<TokenProbabilities>,
        status: Status,
    ) -> OutputItem {
        let id = item_id(head, index, part);
        let call = |id, call_id: &str, name: &str, arguments| {
            let (call_id, name) = (call_id.into(), name.into());
            OutputItem::Call(CallItem {
                id,
                kind: "function_call",
                call_id,
                status,
                name,
                arguments,
            })
        };
        match part {
            Part::Reasoning(_) => {
                let (text, none) = (self.content(part, logprobs), Vec::new());
                let (summary, content) = if self.summarizes { (text, none) } else { (none, text) };
                OutputItem::Reasoning(ReasoningItem {
                    id,
                    kind: "reasoning",
                    summary,
                    content,
                    status,
                })
            }
            Part::Answer(_) => {
                let content = self.content(part, logprobs);
                let (kind, role) = ("message", "assistant");
                OutputItem::Message(MessageItem { id, kind, role, status, content })
            }
            Part::OpenCall { id: call_id, name, arguments } => {
                call(id, call_id, name, arguments.clone())
            }
            Part::ToolCall(whole) => call(id, &whole.id, &whole.function.name, arguments_of(whole)),
            Part::Ran(ran) => {
                OutputItem::McpCall(McpCallItem { status, ..mcp_call(head, index, ran) })
            }
        }
    }

    /// The content of an item with text; empty before its text has begun.
    fn content(&self, part: &Part, logprobs: Vec<TokenProbabilities>) -> Vec<OutputPart> {
        match part {
            Part::Reasoning(text) | Part::Answer(text) if text.is_empty() => Vec::new(),
            part => self.text_part(part, logprobs).into_iter().collect(),
        }
    }

    /// The part of an item with text.
    fn text_part(&self, part: &Part, logprobs: Vec<TokenProbabilities>) -> Option<OutputPart> {
        match part {
            Part::Reasoning(text) if self.summarizes => {
                Some(OutputPart::Summary { text: text.clone() })
            }
            Part::Reasoning(text) => Some(OutputPart::Reasoning { text: text.clone() }),
            Part::Answer(text) => {
                Some(OutputPart::Output { text: text.clone(), annotations: [], logprobs })
            }
            Part::OpenCall { .. } | Part::ToolCall(_) | Part::Ran(_) => None,
        }
    }

    /// Names of the events of `part`: part added, text delta, text done, part done. The arguments of a call are not a
    /// part of an item.
    fn words(&self, part: &Part) -> [&'static str; 4] {
        const CONTENT: [&str; 2] = ["response.content_part.added", "response.content_part.done"];
        match part {
            Part::Reasoning(_) if self.summarizes => [
                "response.reasoning_summary_part.added",
                "response.reasoning_summary_text.delta",
                "response.reasoning_summary_text.done",
                "response.reasoning_summary_part.done",
            ],
            Part::Reasoning(_) => [
                CONTENT[0],
                "response.reasoning_text.delta",
                "response.reasoning_text.done",
                CONTENT[1],
            ],
            Part::OpenCall { .. } | Part::ToolCall(_) | Part::Ran(_) => [
                "",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "",
            ],
            Part::Answer(_) => {
                [CONTENT[0], "response.output_text.delta", "response.output_text.done", CONTENT[1]]
            }
        }
    }

    /// An event about `part`, with the index of its text in the item: an item has one text. The arguments of a call have
    /// no index.
    fn indexed(&self, part: &Part) -> ResponseEvent {
        let (mut summary_index, mut content_index) = (None, None);
        match part {
            Part::Reasoning(_) if self.summarizes => summary_index = Some(0),
            Part::Reasoning(_) | Part::Answer(_) => content_index = Some(0),
            Part::OpenCall { .. } | Part::ToolCall(_) | Part::Ran(_) => {}
        }
        ResponseEvent { summary_index, content_index, ..ResponseEvent::default() }
    }

    /// Begins an item with an empty part.
    fn open(&mut self, head: &Head, part: Part, out: &mut Frames) {
        self.close(head, false, out);
        if !matches!(part, Part::Answer(_)) {
            // Of tokens without a text, such as the tag of a call.
            self.next_logprobs.clear();
        }
        let item = self.item(head, self.items, &part, Vec::new(), Status::InProgress);
        self.send_item("response.output_item.added", item, out);
        if !matches!(part, Part::OpenCall { .. }) {
            let [added, ..] = self.words(&part);
            let text = self.text_part(&part, Vec::new());
            let event = ResponseEvent { part: text, ..self.indexed(&part) };
            self.send_of_item(head, &part, added, event, out);
        }
        self.open = Some(part);
    }

    /// Adds a piece to the open item.
    fn delta(&mut self, head: &Head, piece: String, out: &mut Frames) {
        let Some(mut part) = self.open.take() else { return };
        if let Part::Reasoning(text) | Part::Answer(text) | Part::OpenCall { arguments: text, .. } =
            &mut part
        {
            *text += &piece;
        }
        let [_, delta, ..] = self.words(&part);
        let mut event = ResponseEvent { delta: Some(piece), ..self.indexed(&part) };
        if let Part::Answer(_) = part {
            let logprobs = std::mem::take(&mut self.next_logprobs);
            self.logprobs.extend(logprobs.iter().cloned());
            event.logprobs = Some(logprobs);
        }
        self.send_of_item(head, &part, delta, event, out);
        self.open = Some(part);
    }

    /// Ends the open item; `is_cut` if a limit does.
    fn close(&mut self, head: &Head, is_cut: bool, out: &mut Frames) {
        let Some(part) = self.open.take() else { return };
        let mut logprobs = std::mem::take(&mut self.logprobs);
        if let Part::Answer(_) = part {
            logprobs.append(&mut self.next_logprobs);
        }
        let [_, _, text_done, part_done] = self.words(&part);
        match &part {
            // A limit cut it off.
            Part::OpenCall { .. } | Part::Ran(_) => {}
            Part::ToolCall(call) => {
                let (name, arguments) = (call.function.name.clone(), arguments_of(call));
                let event = ResponseEvent {
                    name: Some(name),
                    arguments: Some(arguments),
                    ..self.indexed(&part)
                };
                self.send_of_item(head, &part, text_done, event, out);
            }
            Part::Reasoning(text) | Part::Answer(text) => {
                let is_answer = matches!(part, Part::Answer(_));
                let event = ResponseEvent {
                    text: Some(text.clone()),
                    logprobs: is_answer.then(|| logprobs.clone()),
                    ..self.indexed(&part)
                };
                self.send_of_item(head, &part, text_done, event, out);
                let whole = self.text_part(&part, logprobs.clone());
                let event = ResponseEvent { part: whole, ..self.indexed(&part) };
                self.send_of_item(head, &part, part_done, event, out);
            }
        }
        let item = self.item(head, self.items, &part, logprobs, ended(&part, is_cut));
        self.send_item("response.output_item.done", item, out);
        self.items += 1;
    }

    /// Sends an event about the whole response.
    fn send_response(&mut self, kind: &'static str, response: ResponseBody, out: &mut Frames) {
        let response = Some(response);
        self.send(ResponseEvent { kind, response, ..ResponseEvent::default() }, out);
    }

    /// Sends an event with the open item.
    fn send_item(&mut self, kind: &'static str, item: OutputItem, out: &mut Frames) {
        let (output_index, item) = (Some(self.items), Some(item));
        self.send(ResponseEvent { kind, output_index, item, ..ResponseEvent::default() }, out);
    }

    /// Sends an event about the open item.
    fn send_of_item(
        &mut self,
        head: &Head,
        part: &Part,
        kind: &'static str,
        event: ResponseEvent,
        out: &mut Frames,
    ) {
        let item_id = Some(item_id(head, self.items, part));
        self.send(ResponseEvent { kind, item_id, output_index: Some(self.items), ..event }, out);
    }

    fn send(&mut self, event: ResponseEvent, out: &mut Frames) {
        let event = ResponseEvent { sequence_number: self.sequence, ..event };
        self.sequence += 1;
        out.event(event.kind, &event);
    }
}

/// Whether a limit cut the reply off.
fn is_cut(reply: &Reply) -> bool {
    reply.finished.reason == FinishReason::Length
}

/// The status of an ended item, which a limit ended if `is_cut`. A call is whole or open, whatever ended the reply.
fn ended(part: &Part, is_cut: bool) -> Status {
    match part {
        Part::OpenCall { .. } => Status::Incomplete,
        Part::Reasoning(_) | Part::Answer(_) if is_cut => Status::Incomplete,
        Part::Ran(ran) if ran.is_error => Status::Failed,
        Part::Reasoning(_) | Part::Answer(_) | Part::ToolCall(_) | Part::Ran(_) => {
            Status::Completed
        }
    }
}

/// Item `index` of the output: a call that this server ran.
fn mcp_call(head: &Head, index: usize, ran: &Ran) -> McpCallItem {
    let (server, name) = ran.server_and_tool();
    let text = ran.output.clone();
    let (status, output, error) = match ran.is_error {
        true => (Status::Failed, None, text),
        false => (Status::Completed, text, None),
    };
    McpCallItem {
        id: item_id(head, index, &Part::Ran(ran.clone())),
        kind: "mcp_call",
        status,
        server_label: server.into(),
        name: name.into(),
        arguments: ran.arguments.clone(),
        output,
        error,
        approval_request_id: None,
    }
}

/// The arguments of a call as JSON.
fn arguments_of(call: &ToolCall) -> String {
    call.function.arguments.to_json()
}

/// The reply as messages of the conversation: calls that this server ran are followed by their results.
fn turns(reply: &Reply) -> Vec<Message> {
    let mut turns: Vec<Message> = Vec::new();
    // An empty line separates the rounds of a reply.
    let mut has_run = false;
    let own = |text: &str, before: &str, has_run: bool| {
        let text = if has_run && before.is_empty() { text.trim_start() } else { text };
        text.to_string()
    };
    for part in &reply.parts {
        match part {
            Part::Reasoning(text) => {
                let reasoning = assistant(&mut turns).reasoning_content.get_or_insert_default();
                *reasoning += &own(text, reasoning, has_run);
            }
            Part::Answer(text) => {
                let answer = &mut assistant(&mut turns).content;
                *answer += &own(text, answer, has_run);
            }
            // A limit cut it off.
            Part::OpenCall { .. } => {}
            Part::ToolCall(call) => assistant(&mut turns).tool_calls.push(call.clone()),
            Part::Ran(ran) => {
                request::add_call(&mut turns, ran.call(), ran.result());
                has_run = true;
            }
        }
    }
    if turns.last().is_none_or(|last| last.role != "assistant") {
        assistant(&mut turns);
    }
    turns
}

/// The id of item `index` of the output.
fn item_id(head: &Head, index: usize, part: &Part) -> String {
    let prefix = match part {
        Part::Reasoning(_) => "rs",
        Part::Answer(_) => "msg",
        Part::OpenCall { .. } | Part::ToolCall(_) => "fc",
        Part::Ran(_) => "mcp",
    };
    let digits = head.id.trim_start_matches(Responses::ID);
    format!("{prefix}_{digits}_{index}")
}
