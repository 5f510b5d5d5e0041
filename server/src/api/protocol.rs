//! What a protocol is: it parses a body into the engine's requests, and renders the events of their replies.
//!
//! Everything between is in `handle.rs` and `respond.rs`.

use std::time::Duration;

use axum::response::sse;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::request::{Event, Request};

use super::access::{Admission, Caller};
use super::app::App;
use super::error::ApiError;
use super::reply::{Frames, Head, Reply};
use super::schema::Schemas;
use crate::mcp::Ran;

/// The content type of bodies.
pub const JSON: Option<&str> = Some("application/json");

/// How a protocol separates the parts of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// Server-sent events.
    Sse,
    /// One JSON object a line.
    Lines,
}

/// A protocol, with the state that rendering one reply needs.
pub trait Protocol: Sized + Send + Sync + 'static {
    /// The replies to a body as one object.
    type Whole: Serialize + JsonSchema;

    /// What ids of replies begin with.
    const ID: &'static str;

    /// Name of the operation in OpenTelemetry's conventions for generative AI.
    const OPERATION: &'static str = "chat";

    /// Whether the end of a stream has the probabilities of its tokens again.
    const REPEATS_LOGPROBS: bool = false;

    /// The content type that bodies must have, if any.
    const CONTENT_TYPE: Option<&'static str> = JSON;

    /// How streams are written.
    const FRAMING: Framing = Framing::Sse;

    /// Whether streams have the calls of tools while they are written.
    const STREAMS_CALLS: bool = true;

    /// Describes the bodies that [`Self::parse`] takes.
    fn schema(schemas: &mut Schemas) -> Value;

    /// Parses a body.
    ///
    /// # Errors
    /// 400 for what is wrong with it for any profile.
    fn parse(body: Map<String, Value>) -> Result<Parsed<Self>, ApiError>;

    /// Completes the requests of a body with what only the server knows.
    ///
    /// # Errors
    /// 400 or 404 naming the field.
    fn resolve(&mut self, _at: &Place<'_>, _requests: &mut [Request]) -> Result<(), ApiError> {
        Ok(())
    }

    /// The field of the body that has the prompt of reply `index`.
    fn prompt_field(&self, index: usize) -> String;

    /// How long the model stays loaded after the request; `Some(None)` without a limit, `None` if the request does not say.
    fn keeps_model(&self) -> Option<Option<Duration>> {
        None
    }

    /// The beginning of a stream. Protocols without streams leave out this and the next methods.
    fn begin(&mut self, _head: &Head, _out: &mut Frames) {}

    /// One event of reply `index` in a stream; never `Started`, `Embedding`, `Rewound` or `Failed`.
    fn event(&mut self, _head: &Head, _index: usize, _event: Event, _out: &mut Frames) {}

    /// A call that this server ran for reply `index` of a stream. The end names all of them.
    fn ran(&mut self, _head: &Head, _index: usize, _ran: &Ran, _out: &mut Frames) {}

    /// The end of a stream with these replies.
    fn end(&mut self, _head: &Head, _replies: &[Reply], _out: &mut Frames) {}

    /// The end of a stream that fails.
    fn fail(&mut self, _head: &Head, _error: &ApiError, _out: &mut Frames) {}

    /// The replies as one object.
    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Self::Whole;

    /// What an idle stream of server-sent events sends, so that proxies do not close it.
    fn keep_alive() -> sse::Event {
        sse::Event::default().comment("still working")
    }
}

/// A body, as far as it can be parsed without knowing the profile.
#[derive(Debug)]
pub struct Parsed<P> {
    /// The client's name of the model.
    pub model: Option<String>,
    /// Whether to stream the reply.
    pub stream: bool,
    /// The rest; or the first invalid value, which is reported after the profile is known.
    pub call: Result<Call<P>, ApiError>,
}

/// What a body asks for.
#[derive(Debug)]
pub struct Call<P> {
    /// Renders the reply.
    pub protocol: P,
    /// Without ids, profile and deadline.
    pub requests: Vec<Request>,
    /// Choices of each request, at least 1. They are numbered request by request.
    pub choices: usize,
    /// The fields of the body that have the schemas of the client's tools, in the order of the requests' tools.
    pub tool_fields: Vec<String>,
    /// What was left out of the requests, in words.
    pub notes: Vec<String>,
}

impl<P> Call<P> {
    /// Asks for the embeddings of texts.
    pub fn of_texts(protocol: P, requests: Vec<Request>) -> Self {
        let (tool_fields, notes) = (Vec::new(), Vec::new());
        Self { protocol, requests, choices: 1, tool_fields, notes }
    }
}

/// Where an admitted body goes.
pub struct Place<'a> {
    /// What all handlers share.
    pub app: &'a App,
    /// What the client's key opens.
    pub caller: &'a Caller,
    /// Engine and profile.
    pub admission: &'a Admission,
}
