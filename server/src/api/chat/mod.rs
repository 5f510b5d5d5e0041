//! OpenAI's chat completions: `POST /v1/chat/completions`.

mod message;
mod reply;
mod request;

use serde_json::{Map, Value};
use steersman_engine::request::{CallDelta, Event};

pub(crate) use self::reply::{
    CallPiece, ChatChoice, ChatCompletion, ChatCompletionChunk, ChatLogprobs, ChunkChoice,
    ChunkExtension, Delta, FinishReason, PromptTokens, Usage,
};
use super::error::ApiError;
use super::extension::{Extension, ToolRun};
use super::params::StreamOptions;
use super::probability::Probabilities;
use super::protocol::{Parsed, Protocol};
use super::reply::{Frames, Head, Reply, usage};
use super::schema::Schemas;
use crate::mcp::Ran;

/// The state of one response.
#[derive(Debug)]
pub struct Chat {
    /// Whether a stream ends with a chunk that has the usage; it is null in the others.
    include_usage: bool,
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
        let include_usage = includes_usage(options);
        Self { include_usage, choices: (0..choices).map(|_| Choice::default()).collect() }
    }

    /// Sends a piece of choice `index`.
    fn delta(&mut self, head: &Head, index: usize, delta: Delta, out: &mut Frames) {
        let choice = self.choice(index, delta, None);
        out.data(&self.chunk(head, vec![choice]));
    }

    fn choice(
        &mut self,
        index: usize,
        delta: Delta,
        finish_reason: Option<FinishReason>,
    ) -> ChunkChoice {
        let logprobs = ChatLogprobs::new(self.choices[index].logprobs.take());
        ChunkChoice { index, delta, logprobs, finish_reason }
    }

    fn chunk(&self, head: &Head, choices: Vec<ChunkChoice>) -> ChatCompletionChunk {
        ChatCompletionChunk {
            id: head.id.clone(),
            object: "chat.completion.chunk",
            created: head.created,
            model: head.model.clone(),
            system_fingerprint: head.fingerprint.clone(),
            choices,
            usage: self.include_usage.then_some(None),
            steersman: None,
        }
    }
}

impl Protocol for Chat {
    type Whole = ChatCompletion;

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
            self.delta(head, index, Delta::begin(), out);
        }
    }

    fn event(&mut self, head: &Head, index: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Reasoning(piece) => {
                self.delta(head, index, Delta::reasoning(piece), out);
            }
            Event::Logprob(logprob) => {
                self.choices[index].logprobs.push_logprob(&logprob);
            }
            Event::Answer(piece) => self.delta(head, index, Delta::answer(piece), out),
            Event::CallDelta(CallDelta { id, name: Some(name), arguments }) => {
                let choice = &mut self.choices[index];
                let call = CallPiece::begin(choice.tool_calls, id.clone(), name, arguments);
                (choice.tool_calls, choice.open_call) = (choice.tool_calls + 1, Some(id));
                self.delta(head, index, Delta::call(call), out);
            }
            Event::CallDelta(CallDelta { arguments, .. }) => {
                let open = self.choices[index].tool_calls.saturating_sub(1);
                self.delta(head, index, Delta::call(CallPiece::more(open, arguments)), out);
            }
            Event::ToolCall(call)
                if self.choices[index].open_call.take().as_ref() == Some(&call.id) => {}
            Event::ToolCall(call) => {
                let count = &mut self.choices[index].tool_calls;
                let call = CallPiece::whole(*count, &call);
                *count += 1;
                self.delta(head, index, Delta::call(call), out);
            }
            Event::Finished(finished) => {
                let reason = (&finished.reason).into();
                let last = self.choice(index, Delta::default(), Some(reason));
                let steersman = Some(ChunkExtension::End(Extension::new(head, &finished)));
                out.data(&ChatCompletionChunk { steersman, ..self.chunk(head, vec![last]) });
            }
            Event::Started { .. }
            | Event::PromptToken(_)
            | Event::Embedding(_)
            | Event::Rewound { .. }
            | Event::Routed { .. }
            | Event::PromptCounted { .. }
            | Event::Note { .. }
            | Event::Failed(_) => {}
        }
    }

    fn ran(&mut self, head: &Head, index: usize, ran: &Ran, out: &mut Frames) {
        let choice = self.choice(index, Delta::default(), None);
        let (profile, tool_run) = (head.profile.clone(), ToolRun::new(index, ran));
        let steersman = Some(ChunkExtension::Ran { profile, tool_run });
        out.data(&ChatCompletionChunk { steersman, ..self.chunk(head, vec![choice]) });
    }

    fn end(&mut self, head: &Head, replies: &[Reply], out: &mut Frames) {
        if self.include_usage {
            let usage = Some(Some(usage(head, replies).into()));
            out.data(&ChatCompletionChunk { usage, ..self.chunk(head, Vec::new()) });
        }
        out.done();
    }

    fn fail(&mut self, _: &Head, error: &ApiError, out: &mut Frames) {
        out.data(&error.openai());
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> ChatCompletion {
        let extension = |reply: &Reply| Extension::new(head, &reply.finished);
        let choice = |(index, reply): (usize, &Reply)| {
            let logprobs = reply.all_logprobs().map(|logprob| (&logprob).into()).collect();
            ChatChoice {
                index,
                message: reply.into(),
                logprobs: ChatLogprobs::new(logprobs),
                finish_reason: (&reply.finished.reason).into(),
                steersman: (replies.len() > 1).then(|| extension(reply)),
            }
        };
        ChatCompletion {
            id: head.id.clone(),
            object: "chat.completion",
            created: head.created,
            model: head.model.clone(),
            system_fingerprint: head.fingerprint.clone(),
            choices: replies.iter().enumerate().map(choice).collect(),
            usage: usage(head, replies).into(),
            steersman: replies.first().map(extension),
        }
    }
}

/// Whether a stream of chats or completions has the usage.
pub fn includes_usage(options: Option<StreamOptions>) -> bool {
    options.and_then(|options| options.include_usage).unwrap_or(false)
}
