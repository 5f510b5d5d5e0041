//! OpenAI's chat completions: `POST /v1/chat/completions`.

mod message;
mod request;

use serde_json::{Map, Value, json};
use steersman_engine::request::{CallDelta, Event, FinishReason, Finished, ToolCall, Usage};

use super::error::ApiError;
use super::openapi::Schemas;
use super::params::StreamOptions;
use super::probability::{self, Probabilities};
use super::protocol::{Parsed, Protocol};
use super::reply::{self, Frames, Head, Reply};
use crate::mcp::Ran;

/// The state of one response.
#[derive(Debug)]
pub struct Chat {
    chunks: Chunks,
    choices: Vec<Choice>,
}

/// The state of one choice.
#[derive(Debug, Default)]
struct Choice {
    /// Number of tool calls so far: the index of the next one.
    tool_calls: usize,
    /// Id of the call whose pieces are being sent.
    open_call: Option<String>,
    /// Probabilities of tokens, for the next chunk.
    logprobs: Probabilities,
}

impl Chat {
    fn new(options: Option<StreamOptions>, choices: usize) -> Self {
        let chunks = Chunks::new("chat.completion.chunk", options);
        Self { chunks, choices: (0..choices).map(|_| Choice::default()).collect() }
    }

    fn delta(&mut self, head: &Head, index: usize, delta: Value, out: &mut Frames) {
        let choice = self.choice(index, delta, None);
        self.chunks.choice(head, choice, out);
    }

    fn choice(&mut self, index: usize, delta: Value, finish_reason: Option<&str>) -> Value {
        let logprobs = self.choices[index].logprobs.take_chat();
        let logprobs = probability::chat_logprobs(logprobs);
        json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})
    }
}

impl Protocol for Chat {
    const ID: &'static str = "chatcmpl-";

    fn schema(schemas: &mut Schemas) -> Value {
        request::schema(schemas)
    }

    fn parse(body: Map<String, Value>) -> Result<Parsed<Self>, ApiError> {
        request::parse(body)
    }

    fn prompt_field(&self, _: usize) -> String {
        "messages".into()
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        for index in 0..self.choices.len() {
            self.delta(head, index, json!({"role": "assistant", "content": ""}), out);
        }
    }

    fn event(&mut self, head: &Head, index: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Reasoning(piece) => {
                let delta = json!({"reasoning_content": piece, "reasoning": piece});
                self.delta(head, index, delta, out);
            }
            Event::Logprob(logprob) => {
                self.choices[index].logprobs.push_logprob(&logprob);
            }
            Event::Answer(piece) => self.delta(head, index, json!({"content": piece}), out),
            Event::CallDelta(CallDelta { id, name: Some(name), arguments }) => {
                let choice = &mut self.choices[index];
                let function = json!({"name": name, "arguments": arguments});
                let call = json!({
                    "index": choice.tool_calls, "id": id, "type": "function", "function": function,
                });
                (choice.tool_calls, choice.open_call) = (choice.tool_calls + 1, Some(id));
                self.delta(head, index, json!({"tool_calls": [call]}), out);
            }
            Event::CallDelta(CallDelta { arguments, .. }) => {
                let open = self.choices[index].tool_calls.saturating_sub(1);
                let call = json!({"index": open, "function": {"arguments": arguments}});
                self.delta(head, index, json!({"tool_calls": [call]}), out);
            }
            Event::ToolCall(call)
                if self.choices[index].open_call.take().as_ref() == Some(&call.id) => {}
            Event::ToolCall(call) => {
                let mut call = tool_call(&call);
                let count = &mut self.choices[index].tool_calls;
                call["index"] = (*count).into();
                *count += 1;
                self.delta(head, index, json!({"tool_calls": [call]}), out);
            }
            Event::Finished(finished) => {
                let last = self.choice(index, json!({}), Some(finish_reason(&finished.reason)));
                self.chunks.last_choice(head, last, &finished, out);
            }
            Event::Started { .. }
            | Event::PromptToken(_)
            | Event::Embedding(_)
            | Event::Rewound { .. }
            | Event::Routed { .. }
            | Event::Note { .. }
            | Event::Failed(_) => {}
        }
    }

    fn ran(&mut self, head: &Head, index: usize, ran: &Ran, out: &mut Frames) {
        let choice = self.choice(index, json!({}), None);
        self.chunks.ran(head, choice, &tool_run(index, ran), out);
    }

    fn end(&mut self, head: &Head, replies: &[Reply], out: &mut Frames) {
        self.chunks.end(head, replies, out);
    }

    fn fail(&mut self, _: &Head, error: &ApiError, out: &mut Frames) {
        out.data(&error.to_json());
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Value {
        let mut choices = Vec::new();
        for (index, reply) in replies.iter().enumerate() {
            let logprobs = reply.all_logprobs().map(|logprob| probability::chat_logprob(&logprob));
            choices.push(json!({
                "index": index,
                "message": message(reply),
                "logprobs": probability::chat_logprobs(logprobs.collect()),
                "finish_reason": finish_reason(&reply.finished.reason),
            }));
        }
        whole(head, "chat.completion", choices, replies)
    }
}

fn message(reply: &Reply) -> Value {
    let mut message = Map::from_iter([("role".to_string(), json!("assistant"))]);
    let calls: Vec<_> = reply.tool_calls().map(tool_call).collect();
    let (content, reasoning) = (reply.answer(), reply.reasoning());
    let calls_only = content.is_empty() && !calls.is_empty();
    message.insert("content".into(), if calls_only { Value::Null } else { content.into() });
    if !reasoning.is_empty() {
        message.insert("reasoning_content".into(), reasoning.clone().into());
        message.insert("reasoning".into(), reasoning.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    message.into()
}

/// Writes the chunks of a stream of chats or completions.
#[derive(Debug)]
pub struct Chunks {
    /// `object` of each chunk.
    object: &'static str,
    /// Whether a stream ends with a chunk that contains the usage.
    include_usage: bool,
}

impl Chunks {
    /// Chunks whose `object` is this.
    pub fn new(object: &'static str, options: Option<StreamOptions>) -> Self {
        let include_usage = options.and_then(|options| options.include_usage).unwrap_or(false);
        Self { object, include_usage }
    }

    /// A chunk with one choice.
    pub fn choice(&self, head: &Head, choice: Value, out: &mut Frames) {
        self.chunk(head, json!([choice]), None, out);
    }

    /// The last chunk of a choice.
    pub fn last_choice(&self, head: &Head, choice: Value, finished: &Finished, out: &mut Frames) {
        self.chunk(head, json!([choice]), Some(("steersman", extension(head, finished))), out);
    }

    /// A chunk about a call that this server ran.
    pub fn ran(&self, head: &Head, choice: Value, tool_run: &Value, out: &mut Frames) {
        let extension = json!({"profile": head.profile, "tool_run": tool_run});
        self.chunk(head, json!([choice]), Some(("steersman", extension)), out);
    }

    /// The end of the stream.
    pub fn end(&self, head: &Head, replies: &[Reply], out: &mut Frames) {
        if self.include_usage {
            self.chunk(head, json!([]), Some(("usage", usage(reply::usage(head, replies)))), out);
        }
        out.done();
    }

    /// With `include_usage`, the usage is null in all chunks but the last.
    fn chunk(&self, head: &Head, choices: Value, more: Option<(&str, Value)>, out: &mut Frames) {
        let mut chunk = object(head, self.object, choices);
        if self.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        chunk.extend(more.map(|(name, value)| (name.to_string(), value)));
        out.data(&chunk.into());
    }
}

/// Replies as one object of chats or completions.
pub fn whole(head: &Head, name: &str, mut choices: Vec<Value>, replies: &[Reply]) -> Value {
    if choices.len() > 1 {
        for (choice, reply) in choices.iter_mut().zip(replies) {
            choice["steersman"] = extension(head, &reply.finished);
        }
    }
    let mut whole = object(head, name, choices.into());
    whole.insert("usage".into(), usage(reply::usage(head, replies)));
    let first = replies.first().map(|reply| extension(head, &reply.finished));
    whole.insert("steersman".into(), first.unwrap_or_default());
    whole.into()
}

/// The fields that whole replies and chunks share.
fn object(head: &Head, object: &str, choices: Value) -> Map<String, Value> {
    Map::from_iter([
        ("id".to_string(), json!(head.id)),
        ("object".to_string(), json!(object)),
        ("created".to_string(), json!(head.created)),
        ("model".to_string(), json!(head.model)),
        ("system_fingerprint".to_string(), json!(head.fingerprint)),
        ("choices".to_string(), choices),
    ])
}

/// `steersman`: what OpenAI's format has no place for.
pub fn extension(head: &Head, finished: &Finished) -> Value {
    let notes: Vec<_> = head.notes.iter().chain(&finished.notes).collect();
    let mut extension = json!({"profile": head.profile, "notes": notes});
    if let FinishReason::Policy(reason) = &finished.reason {
        extension["stop_reason"] = json!(reason);
    }
    if !finished.labels.is_empty() {
        extension["labels"] = finished.labels.iter().cloned().collect();
    }
    if !head.ran.is_empty() {
        let runs = head.ran.iter().map(|(index, ran)| tool_run(*index, ran));
        extension["tool_runs"] = runs.collect();
    }
    extension
}

/// A call that this server ran for choice `index`. Its output is for the model.
fn tool_run(index: usize, ran: &Ran) -> Value {
    let mut run = json!(Ran { output: None, ..ran.clone() });
    run["index"] = index.into();
    run
}

fn finish_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop | FinishReason::StopString(_) | FinishReason::Policy(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
    }
}

/// A call in the API's format, with the arguments as JSON in a string.
fn tool_call(call: &ToolCall) -> Value {
    let arguments = call.function.arguments.to_json();
    json!({
        "id": call.id,
        "type": call.kind,
        "function": {"name": call.function.name, "arguments": arguments},
    })
}

/// `usage`, in the words of chats and completions.
fn usage(usage: Usage) -> Value {
    let completion_tokens = usage.reply_tokens();
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": usage.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            // OpenAI counts tokens here that the client predicted; these were drafted.
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
            "forced_tokens": usage.forced_tokens,
            "skipped_layers": usage.skipped_layers,
        },
    })
}
