//! OpenAI's responses: `POST /v1/responses`, and what was stored of them.

mod request;
pub mod store;
mod stored;

use std::sync::Arc;

use serde_json::{Map, Value, json};
use steersman_engine::request::{
    CallDelta, Event, FinishReason, Message, Request, ToolCall, Usage,
};

pub use self::stored::{delete, get, input_items};

use self::request::assistant;
use self::store::{ResponseStore, Stored};
use super::chat::extension;
use super::error::ApiError;
use super::openapi::Schemas;
use super::params;
use super::probability;
use super::protocol::{Parsed, Place, Protocol};
use super::reply::{self, Frames, Head, Part, Reply};
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
    logprobs: Vec<Value>,
    /// Probabilities of tokens whose text has not arrived.
    next_logprobs: Vec<Value>,
    /// Number of items that a stream has ended.
    items: usize,
}

impl Protocol for Responses {
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
        let response = self.response(head, "in_progress", Vec::new());
        self.send("response.created", json!({"response": response}), out);
        self.send("response.in_progress", json!({"response": response}), out);
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
                self.next_logprobs.push(probability::chat_logprob(&logprob));
            }
            Event::Started { .. }
            | Event::Rewound { .. }
            | Event::Routed { .. }
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
        let index = self.items;
        let mut begun = self.item(head, index, &part, &[], "in_progress");
        let whole = self.item(head, index, &part, &[], ended(&part, false));
        begun["arguments"] = "".into();
        begun["output"] = Value::Null;
        begun["error"] = Value::Null;
        let added = json!({"output_index": index, "item": begun});
        self.send("response.output_item.added", added, out);
        let arguments = json!({"arguments": ran.arguments});
        self.send_of_item(head, &part, "response.mcp_call.in_progress", json!({}), out);
        self.send_of_item(head, &part, "response.mcp_call_arguments.done", arguments, out);
        let name = match ran.is_error {
            true => "response.mcp_call.failed",
            false => "response.mcp_call.completed",
        };
        self.send_of_item(head, &part, name, json!({}), out);
        let done = json!({"output_index": index, "item": whole});
        self.send("response.output_item.done", done, out);
        self.items += 1;
    }

    fn end(&mut self, head: &Head, replies: &[Reply], out: &mut Frames) {
        let is_cut = replies.first().is_some_and(is_cut);
        self.close(head, is_cut, out);
        let response = self.whole(head, replies);
        let name = match response["status"].as_str() {
            Some("incomplete") => "response.incomplete",
            _ => "response.completed",
        };
        self.send(name, json!({"response": response}), out);
    }

    fn fail(&mut self, head: &Head, error: &ApiError, out: &mut Frames) {
        let mut response = self.response(head, "failed", Vec::new());
        response["error"] = json!({"code": error.code, "message": error.message});
        self.send("response.failed", json!({"response": response}), out);
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Value {
        let Some(reply) = replies.first() else { return Value::Null };
        let finished = &reply.finished;
        let is_whole = !is_cut(reply);
        let status = if is_whole { "completed" } else { "incomplete" };
        let item = |(index, part): (usize, &Part)| {
            let logprobs =
                reply.logprobs_of(index).map(|logprob| probability::chat_logprob(&logprob));
            let is_cut = !is_whole && index + 1 == reply.parts.len();
            let status = ended(part, is_cut);
            self.item(head, index, part, &logprobs.collect::<Vec<_>>(), status)
        };
        let output = reply.parts.iter().enumerate().map(item).collect();
        let mut response = self.response(head, status, output);
        if !is_whole {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["usage"] = usage(reply::usage(head, replies));
        response["steersman"] = extension(head, finished);
        if let Some(store) = &self.store {
            let mut messages = std::mem::take(&mut self.messages);
            messages.extend(turns(reply));
            let (profile, input) = (head.profile.clone(), std::mem::take(&mut self.input));
            let stored = Stored { profile, messages, input, response: response.clone() };
            // Before the client has the id, with which its next request may come at once.
            if let Err(error) = store.put(&head.id, &stored) {
                response["store"] = false.into();
                let note = format!(
                    "the response was not stored ({error}): its id cannot be used as previous_response_id; send \
                     the conversation as input"
                );
                if let Some(notes) = response["steersman"]["notes"].as_array_mut() {
                    notes.push(note.into());
                }
            }
        }
        response
    }
}

impl Responses {
    /// A response with these items.
    fn response(&self, head: &Head, status: &str, output: Vec<Value>) -> Value {
        let mut response = json!({
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": null,
            "model": head.model,
            "output": output,
            "usage": null,
        });
        if let Some(response) = response.as_object_mut() {
            response.extend(self.repeated.clone());
            response.insert("store".into(), self.store.is_some().into());
        }
        response
    }

    /// Item `index` of the output, with the probabilities of its tokens.
    fn item(
        &self,
        head: &Head,
        index: usize,
        part: &Part,
        logprobs: &[Value],
        status: &str,
    ) -> Value {
        let id = item_id(head, index, part);
        match part {
            Part::Reasoning(_) => {
                let content = self.content(part, logprobs);
                let (summary, content) =
                    if self.summarizes { (content, json!([])) } else { (json!([]), content) };
                json!({"id": id, "type": "reasoning", "summary": summary, "content": content,
                       "status": status})
            }
            Part::Answer(_) => json!({
                "id": id, "type": "message", "role": "assistant", "status": status,
                "content": self.content(part, logprobs),
            }),
            Part::OpenCall { id: call_id, name, arguments } => json!({
                "id": id, "type": "function_call", "call_id": call_id, "status": status,
                "name": name, "arguments": arguments,
            }),
            Part::ToolCall(call) => json!({
                "id": id, "type": "function_call", "call_id": call.id, "status": status,
                "name": call.function.name, "arguments": arguments_of(call),
            }),
            Part::Ran(ran) => {
                let (server, name) = ran.server_and_tool();
                let (output, error) =
                    if ran.is_error { (None, &ran.output) } else { (ran.output.as_ref(), &None) };
                json!({
                    "id": id, "type": "mcp_call", "status": status, "server_label": server,
                    "name": name, "arguments": ran.arguments, "output": output, "error": error,
                    "approval_request_id": null,
                })
            }
        }
    }

    /// The content of an item with text; empty before its text has begun.
    fn content(&self, part: &Part, logprobs: &[Value]) -> Value {
        match part {
            Part::Reasoning(text) | Part::Answer(text) if text.is_empty() => json!([]),
            part => json!([self.text_part(part, logprobs)]),
        }
    }

    fn text_part(&self, part: &Part, logprobs: &[Value]) -> Value {
        match part {
            Part::Reasoning(text) if self.summarizes => {
                json!({"type": "summary_text", "text": text})
            }
            Part::Reasoning(text) => json!({"type": "reasoning_text", "text": text}),
            Part::Answer(text) => json!({
                "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs,
            }),
            Part::OpenCall { .. } | Part::ToolCall(_) | Part::Ran(_) => Value::Null,
        }
    }

    /// Names of the events of `part`: part added, text delta, text done, part done; then the name of its
    /// index field. The arguments of a call are not a part of an item and have no index.
    fn words(&self, part: &Part) -> [&'static str; 5] {
        const CONTENT: [&str; 2] = ["response.content_part.added", "response.content_part.done"];
        match part {
            Part::Reasoning(_) if self.summarizes => [
                "response.reasoning_summary_part.added",
                "response.reasoning_summary_text.delta",
                "response.reasoning_summary_text.done",
                "response.reasoning_summary_part.done",
                "summary_index",
            ],
            Part::Reasoning(_) => [
                CONTENT[0],
                "response.reasoning_text.delta",
                "response.reasoning_text.done",
                CONTENT[1],
                "content_index",
            ],
            Part::OpenCall { .. } | Part::ToolCall(_) | Part::Ran(_) => [
                "",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "",
                "",
            ],
            Part::Answer(_) => [
                CONTENT[0],
                "response.output_text.delta",
                "response.output_text.done",
                CONTENT[1],
                "content_index",
            ],
        }
    }

    /// Begins an item with an empty part.
    fn open(&mut self, head: &Head, part: Part, out: &mut Frames) {
        self.close(head, false, out);
        if !matches!(part, Part::Answer(_)) {
            // Of tokens without a text, such as the tag of a call.
            self.next_logprobs.clear();
        }
        let item = self.item(head, self.items, &part, &[], "in_progress");
        let added = json!({"output_index": self.items, "item": item});
        self.send("response.output_item.added", added, out);
        if !matches!(part, Part::OpenCall { .. }) {
            let [added, .., index] = self.words(&part);
            let fields = json!({index: 0, "part": self.text_part(&part, &[])});
            self.send_of_item(head, &part, added, fields, out);
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
        let [_, delta, .., index] = self.words(&part);
        let mut fields = json!({"delta": piece});
        if !index.is_empty() {
            fields[index] = json!(0);
        }
        if let Part::Answer(_) = part {
            let logprobs = std::mem::take(&mut self.next_logprobs);
            self.logprobs.extend(logprobs.iter().cloned());
            fields["logprobs"] = logprobs.into();
        }
        self.send_of_item(head, &part, delta, fields, out);
        self.open = Some(part);
    }

    /// Ends the open item; `is_cut` if a limit does.
    fn close(&mut self, head: &Head, is_cut: bool, out: &mut Frames) {
        let Some(part) = self.open.take() else { return };
        let mut logprobs = std::mem::take(&mut self.logprobs);
        if let Part::Answer(_) = part {
            logprobs.append(&mut self.next_logprobs);
        }
        match &part {
            // A limit cut it off.
            Part::OpenCall { .. } | Part::Ran(_) => {}
            Part::ToolCall(call) => {
                let [_, _, done, ..] = self.words(&part);
                let fields = json!({"name": call.function.name, "arguments": arguments_of(call)});
                self.send_of_item(head, &part, done, fields, out);
            }
            Part::Reasoning(text) | Part::Answer(text) => {
                let [_, _, text_done, part_done, index] = self.words(&part);
                let mut fields = json!({index: 0, "text": text});
                if let Part::Answer(_) = part {
                    fields["logprobs"] = json!(logprobs);
                }
                self.send_of_item(head, &part, text_done, fields, out);
                let fields = json!({index: 0, "part": self.text_part(&part, &logprobs)});
                self.send_of_item(head, &part, part_done, fields, out);
            }
        }
        let item = self.item(head, self.items, &part, &logprobs, ended(&part, is_cut));
        let done = json!({"output_index": self.items, "item": item});
        self.send("response.output_item.done", done, out);
        self.items += 1;
    }

    /// Sends an event about the open item.
    fn send_of_item(
        &mut self,
        head: &Head,
        part: &Part,
        name: &'static str,
        fields: Value,
        out: &mut Frames,
    ) {
        let mut event = json!({
            "item_id": item_id(head, self.items, part), "output_index": self.items,
        });
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        self.send(name, event, out);
    }

    fn send(&mut self, name: &'static str, fields: Value, out: &mut Frames) {
        let mut event = json!({"type": name, "sequence_number": self.sequence});
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        self.sequence += 1;
        out.event(name, &event);
    }
}

/// Whether a limit cut the reply off.
fn is_cut(reply: &Reply) -> bool {
    reply.finished.reason == FinishReason::Length
}

/// The status of an ended item, which a limit ended if `is_cut`. A call is whole or open, whatever ended the reply.
fn ended(part: &Part, is_cut: bool) -> &'static str {
    match part {
        Part::OpenCall { .. } => "incomplete",
        Part::Reasoning(_) | Part::Answer(_) if is_cut => "incomplete",
        Part::Ran(ran) if ran.is_error => "failed",
        Part::Reasoning(_) | Part::Answer(_) | Part::ToolCall(_) | Part::Ran(_) => "completed",
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

fn usage(usage: Usage) -> Value {
    let output_tokens = usage.reply_tokens();
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + output_tokens,
    })
}
