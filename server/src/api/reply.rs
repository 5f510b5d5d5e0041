//! Replies as protocols get them: folded, and what all parts of a response share. [`Frames`] are what protocols send.

use std::collections::VecDeque;
use std::ops::Range;

use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use steersman_engine::request::{
    Arguments, CallDelta, Event, Finished, Logprob, PrefixName, ToolCall, Usage,
};

use super::probability::Probabilities;
use crate::mcp::Ran;

/// What all parts of a response share.
#[derive(Debug, Default)]
pub struct Head {
    /// The protocol's prefix and 24 hex digits.
    pub id: String,
    /// Unix time in seconds.
    pub created: u64,
    /// The client's name for the model.
    pub model: String,
    /// The profile of the requests.
    pub profile: String,
    /// Names the beginning of the conversation, if this server holds its state.
    pub prefix: Option<PrefixName>,
    /// Choices of each request: as many replies in a row have one prompt.
    pub choices: usize,
    /// The fields of the body that have the schemas of the client's tools.
    pub tool_fields: Vec<String>,
    /// What was left out of the requests, in words.
    pub notes: Vec<String>,
    /// Digest over weights and policies; empty until the engine starts the first request.
    pub fingerprint: String,
    /// Tokens of the prompts that the engine has started, and how many of them were saved.
    pub usage: Usage,
    /// Calls that this server ran, each with the number of its reply.
    pub ran: Vec<(usize, Ran)>,
    /// Nanoseconds from the arrival of the requests to the first piece of a reply, and to their end.
    pub times: Times,
}

impl Head {
    /// Whether reply `index` is the first choice of its request, which counts the prompt.
    pub fn is_first_choice(&self, index: usize) -> bool {
        index.is_multiple_of(self.choices)
    }
}

/// Nanoseconds since the requests arrived.
#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    pub started: u64,
    pub first_piece: u64,
    pub ended: u64,
}

/// One reply, folded.
#[derive(Debug)]
pub struct Reply {
    /// Its parts in order.
    pub parts: Vec<Part>,
    /// The embedding of its prompt, if the request asks for it.
    pub embedding: Vec<f32>,
    /// The tokens of its prompt, if the request asks for them.
    pub prompt: Probabilities,
    /// The probabilities of the tokens of its answer, if the request asks for them.
    pub logprobs: Probabilities,
    /// Range in `logprobs` of the tokens of each part.
    pub logprobs_of: Vec<Range<usize>>,
    pub finished: Finished,
}

/// A part of a reply.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    Reasoning(String),
    Answer(String),
    /// A call that is being written, or that a limit cut off: its id, its name, and the arguments so far.
    OpenCall {
        id: String,
        name: String,
        arguments: String,
    },
    ToolCall(ToolCall),
    /// A call that this server ran.
    Ran(Ran),
}

impl Reply {
    /// The whole reasoning.
    pub fn reasoning(&self) -> String {
        let text = |part: &Part| match part {
            Part::Reasoning(text) => text.clone(),
            Part::Answer(_) | Part::OpenCall { .. } | Part::ToolCall(_) | Part::Ran(_) => {
                String::new()
            }
        };
        self.parts.iter().map(text).collect()
    }

    /// The whole answer.
    pub fn answer(&self) -> String {
        let text = |part: &Part| match part {
            Part::Answer(text) => text.clone(),
            Part::Reasoning(_) | Part::OpenCall { .. } | Part::ToolCall(_) | Part::Ran(_) => {
                String::new()
            }
        };
        self.parts.iter().map(text).collect()
    }

    /// The probabilities of the tokens of part `index`, if it is an answer.
    pub fn logprobs_of(&self, index: usize) -> impl Iterator<Item = Logprob> {
        self.logprobs.logprobs(self.logprobs_of[index].clone())
    }

    /// The probabilities of all tokens of the answer.
    pub fn all_logprobs(&self) -> impl Iterator<Item = Logprob> {
        self.logprobs.logprobs(0..self.logprobs.len())
    }

    /// The tool calls that the client runs.
    pub fn tool_calls(&self) -> impl Iterator<Item = &ToolCall> {
        self.parts.iter().filter_map(|part| match part {
            Part::ToolCall(call) => Some(call),
            Part::Reasoning(_) | Part::Answer(_) | Part::OpenCall { .. } | Part::Ran(_) => None,
        })
    }
}

impl Part {
    /// The call that `delta` begins.
    pub fn open_call(delta: &CallDelta) -> Self {
        let CallDelta { id, name, arguments } = delta.clone();
        Self::OpenCall { id, name: name.unwrap_or_default(), arguments }
    }

    /// Adds a piece to an open call.
    pub fn add(&mut self, delta: &CallDelta) {
        if let Self::OpenCall { arguments, .. } = self {
            arguments.push_str(&delta.arguments);
        }
    }
}

/// The counts of several replies together. A prompt with several choices counts once.
pub fn usage(head: &Head, replies: &[Reply]) -> Usage {
    replies.iter().enumerate().fold(Usage::default(), |sum, (index, reply)| {
        let mut usage = reply.finished.usage;
        if !head.is_first_choice(index) {
            (usage.prompt_tokens, usage.cached_tokens) = (0, 0);
        }
        sum + usage
    })
}

/// Parts of a reply, in order.
#[derive(Debug, Default)]
pub struct Parts {
    /// With the probabilities of the tokens of an answer.
    pub parts: Vec<(Part, Range<usize>)>,
    pub logprobs: Probabilities,
    /// How many probabilities belong to a part already, or to a token without text, such as the tag of a call.
    /// The others came before the text of their tokens.
    assigned: usize,
}

impl Parts {
    /// Adds a piece; consecutive pieces of one kind form one part.
    pub fn add(&mut self, event: &Event) {
        match (event, self.parts.last_mut().map(|(part, _)| part)) {
            (Event::Reasoning(piece), Some(Part::Reasoning(text)))
            | (Event::Answer(piece), Some(Part::Answer(text))) => *text += piece,
            (Event::Reasoning(piece), _) => self.push(Part::Reasoning(piece.clone())),
            (Event::Answer(piece), _) => self.push(Part::Answer(piece.clone())),
            (Event::CallDelta(delta), Some(last)) if delta.name.is_none() => last.add(delta),
            (Event::CallDelta(delta), _) => self.push(Part::open_call(delta)),
            (Event::ToolCall(call), last) => {
                let whole = Part::ToolCall(call.clone());
                let is_open =
                    |last: &&mut Part| matches!(last, Part::OpenCall { id, .. } if *id == call.id);
                match last.filter(is_open) {
                    Some(open) => *open = whole,
                    None => self.push(whole),
                }
            }
            (Event::Logprob(logprob), _) => {
                self.logprobs.push_logprob(logprob);
                if let Some((Part::Answer(_), own)) = self.parts.last_mut() {
                    own.end = self.logprobs.len();
                    self.assigned = own.end;
                }
            }
            _ => {}
        }
    }

    /// Bytes of reasoning and answer.
    pub fn text_bytes(&self) -> usize {
        let bytes = |(part, _): &(Part, Range<usize>)| match part {
            Part::Reasoning(text) | Part::Answer(text) => text.len(),
            Part::OpenCall { .. } | Part::ToolCall(_) | Part::Ran(_) => 0,
        };
        self.parts.iter().map(bytes).sum()
    }

    /// Begins a part.
    pub fn push(&mut self, part: Part) {
        let end = self.logprobs.len();
        let start = if let Part::Answer(_) = part { self.assigned } else { end };
        self.assigned = end;
        self.parts.push((part, start..end));
    }

    /// Drops bytes from the end of the reasoning and of the answer.
    pub fn rewind(&mut self, mut reasoning: usize, mut answer: usize) {
        for (part, _) in self.parts.iter_mut().rev() {
            let (text, left) = match part {
                Part::Reasoning(text) => (text, &mut reasoning),
                Part::Answer(text) => (text, &mut answer),
                Part::OpenCall { .. } | Part::ToolCall(_) | Part::Ran(_) => continue,
            };
            let dropped = text.len().min(*left);
            text.truncate(text.len() - dropped);
            *left -= dropped;
        }
        self.parts.retain(|(part, _)| {
            !matches!(part, Part::Reasoning(text) | Part::Answer(text) if text.is_empty())
        });
    }
}

/// The parts of a stream that are to be sent.
#[derive(Debug, Default)]
pub struct Frames(VecDeque<Frame>);

/// A part of a stream.
#[derive(Debug)]
pub struct Frame {
    /// The type of the server-sent event, where the protocol names it.
    pub event: Option<&'static str>,
    /// The object as JSON, or OpenAI's last line.
    pub data: String,
}

impl Frames {
    /// Adds an object.
    pub fn data(&mut self, data: &impl Serialize) {
        self.0.push_back(Frame { event: None, data: text(data) });
    }

    /// Adds an object as an event of this type.
    pub fn event(&mut self, event: &'static str, data: &impl Serialize) {
        self.0.push_back(Frame { event: Some(event), data: text(data) });
    }

    /// Takes the next part.
    pub fn next(&mut self) -> Option<Frame> {
        self.0.pop_front()
    }

    /// Adds OpenAI's last line.
    pub fn done(&mut self) {
        self.0.push_back(Frame { event: None, data: "[DONE]".into() });
    }
}

/// Serializes arguments, where a protocol has them as an object, with all digits of their numbers.
pub fn all_digits<S: Serializer>(arguments: &Arguments, serializer: S) -> Result<S::Ok, S::Error> {
    let json = RawValue::from_string(arguments.to_json()).map_err(serde::ser::Error::custom)?;
    json.serialize(serializer)
}

/// The JSON of an object.
fn text(data: &impl Serialize) -> String {
    serde_json::to_string(data).expect("objects of replies have string keys only")
}
