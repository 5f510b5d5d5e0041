//! Writes the engine's events as one object or as a stream, in the words of a [`Protocol`].
//!
//! Both fold the events into [`Reply`]s; [`stream`] sends each event as it comes. Both own the
//! [`Events`]: a client that disconnects drops it, which cancels the requests.

use std::convert::Infallible;
use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use steersman_engine::request::{Event, Finished, PromptToken};
use steersman_engine::{Error, RequestError};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, sleep_until, timeout};

use super::error::ApiError;
use super::log::RequestLog;
use super::probability::{PROBABILITIES, Probabilities};
use super::protocol::{Framing, Protocol};
use super::reply::{Frame, Frames, Head, Part, Parts, Reply, usage};
use super::rounds::Progress;
use crate::shutdown::{Shutdown, Stage};

/// How long a stream waits for its first event before it responds with 200.
///
/// Until then an error (prompt too long, rejected by the template) gets its own status. During a
/// longer prefill, clients and proxies that receive nothing would give up.
const FIRST_EVENT: Duration = Duration::from_secs(10);

/// Interval of comments in an idle stream; common proxies close connections idle for 60 s.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The events of requests until all end, their deadline is over, or the server stops.
pub struct Events {
    sources: Vec<Source>,
    /// Whether each request has ended.
    ended: Vec<bool>,
    deadline: Instant,
    shutdown: Option<Shutdown>,
    started: bool,
}

/// Where the events of a request come from.
pub enum Source {
    /// The engine.
    Engine(UnboundedReceiver<Event>),
    /// The rounds of a request with MCP tools.
    Rounds(UnboundedReceiver<Progress>),
}

impl Source {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Progress>> {
        match self {
            Self::Engine(receiver) => {
                receiver.poll_recv(context).map(|event| event.map(Progress::Event))
            }
            Self::Rounds(receiver) => receiver.poll_recv(context),
        }
    }
}

/// Why a request has no further events.
pub enum Failure {
    /// The engine failed at a reply.
    Reply(usize, Error),
    /// The engine failed, or the deadline is over.
    Engine(Error),
    /// The server stops.
    Shutdown(Stage),
}

impl Events {
    /// The replies to requests that end at `deadline`, or when `shutdown` cuts them off.
    pub fn new(sources: Vec<Source>, deadline: Instant, shutdown: Option<Shutdown>) -> Self {
        let ended = vec![false; sources.len()];
        Self { sources, ended, deadline, shutdown, started: false }
    }

    /// The next event, which is never `Failed`, and the number of its request; `None` after all have
    /// ended. The first failure ends all requests.
    async fn next(&mut self) -> Result<Option<(usize, Progress)>, Failure> {
        if self.ended.iter().all(|ended| *ended) {
            return Ok(None);
        }
        let (sources, ended) = (&mut self.sources, &self.ended);
        let received = poll_fn(|context| {
            for (index, source) in sources.iter_mut().enumerate() {
                if !ended[index]
                    && let Poll::Ready(progress) = source.poll(context)
                {
                    return Poll::Ready((index, progress));
                }
            }
            Poll::Pending
        });
        let cut_off = async {
            match &mut self.shutdown {
                Some(shutdown) => shutdown.cuts_off().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            (index, progress) = received => match progress {
                None => Err(Failure::Engine(Error::Stopped)),
                Some(Progress::Event(Event::Failed(error))) => Err(Failure::Reply(index, error)),
                Some(progress) => {
                    self.started = true;
                    self.ended[index] = matches!(progress, Progress::Event(Event::Finished(_)));
                    Ok(Some((index, progress)))
                }
            },
            // The engine has the same deadline; a long step may make it late.
            () = sleep_until(self.deadline) => {
                let stage = if self.started { "being decoded" } else { "waiting" };
                Err(Failure::Engine(RequestError::Deadline { stage }.into()))
            }
            stage = cut_off => Err(Failure::Shutdown(stage)),
        }
    }
}

/// A reply while it is generated.
#[derive(Debug, Default)]
struct Partial {
    parts: Parts,
    prompt: Probabilities,
    embedding: Vec<f32>,
    /// Tokens of the prompt, and those that were saved, as `Head::usage` has them of this reply.
    told: (u32, u32),
    finished: Option<Finished>,
}

/// The replies to one body while they are generated.
struct Run<P> {
    protocol: P,
    head: Head,
    events: Events,
    log: RequestLog,
    replies: Vec<Partial>,
    /// Probabilities that are held.
    probabilities: usize,
    /// Whether the client has received the pieces, so that none can be dropped.
    is_stream: bool,
}

impl<P: Protocol> Run<P> {
    fn new(protocol: P, head: Head, events: Events, log: RequestLog, is_stream: bool) -> Self {
        let count = events.sources.len();
        let replies = (0..count).map(|_| Partial::default()).collect();
        Self { protocol, head, events, log, replies, probabilities: 0, is_stream }
    }

    /// Whether the probabilities of a token are held until the end, and not sent before.
    fn holds_logprobs(&self) -> bool {
        !self.is_stream || P::REPEATS_LOGPROBS
    }

    /// Counts the probabilities of an event that are held.
    ///
    /// # Errors
    /// 400 if there are too many.
    fn count_probabilities(&mut self, event: &Event) -> Result<(), ApiError> {
        self.probabilities += match event {
            Event::Logprob(logprob) if self.holds_logprobs() => 1 + logprob.top.len(),
            // Each choice has those of the prompt.
            Event::PromptToken(token) => (1 + token.top.len()) * self.head.choices,
            _ => 0,
        };
        if self.probabilities <= PROBABILITIES {
            return Ok(());
        }
        let message = format!(
            "logprobs: the replies have more than {PROBABILITIES} probabilities; ask for fewer likeliest \
             tokens, fewer choices or prompts, or a smaller max_tokens, or stream the replies"
        );
        Err(ApiError::value("logprobs", message))
    }

    /// The next event that the client sees, and the number of its reply; `None` at the end.
    async fn next(&mut self) -> Result<Option<(usize, Progress)>, ApiError> {
        loop {
            let next = tokio::select! {
                biased;
                next = self.events.next() => next,
                () = self.log.tracked.joining() => {
                    let replies = self.replies.iter().map(|reply| &reply.parts);
                    self.log.tracked.welcome(replies.map(|parts| parts.parts.iter().map(|(part, _)| part)));
                    continue;
                }
            };
            let next = next.map_err(|failure| {
                // Details of errors that the client does not get are logged here, with the fields of the request.
                let error = self.log.span().log(|| match failure {
                    Failure::Reply(index, error) => {
                        let prompt = self.protocol.prompt_field(index);
                        ApiError::from(error).in_fields(&prompt, &self.head.tool_fields)
                    }
                    Failure::Engine(error) => error.into(),
                    Failure::Shutdown(Stage::RankLost) => ApiError::rank_lost(),
                    Failure::Shutdown(_) => ApiError::stopping(),
                });
                self.log.failed(error)
            })?;
            let Some((index, progress)) = next else { return Ok(None) };
            let event = match progress {
                Progress::Event(event) => event,
                Progress::Ran(ran) => {
                    self.log.tracked.ran(index, &ran);
                    self.replies[index].parts.push(Part::Ran(ran.clone()));
                    self.head.ran.push((index, ran.clone()));
                    return Ok(Some((index, Progress::Ran(ran))));
                }
            };
            self.log.event(index, &event);
            if let Err(error) = self.count_probabilities(&event) {
                return Err(self.log.failed(error));
            }
            let holds_logprobs = self.holds_logprobs();
            let reply = &mut self.replies[index];
            self.log.tracked.event(index, &event);
            if holds_logprobs || !matches!(event, Event::Logprob(_)) {
                reply.parts.add(&event);
            }
            match &event {
                Event::Started {
                    fingerprint,
                    prompt_tokens,
                    cached_tokens,
                    max_tokens,
                    max_answer_tokens,
                } => {
                    self.head.fingerprint.clone_from(fingerprint);
                    if self.head.is_first_choice(index) {
                        self.head.usage.prompt_tokens += prompt_tokens;
                        self.head.usage.cached_tokens += cached_tokens;
                        reply.told = (*prompt_tokens, *cached_tokens);
                        let limits = (*max_tokens, *max_answer_tokens);
                        self.log.tracked.started(*prompt_tokens, *cached_tokens, limits);
                    }
                    self.head.times.started = self.log.elapsed_ns();
                }
                &Event::PromptCounted { prompt_tokens, cached_tokens } => {
                    if self.head.is_first_choice(index) {
                        // In place of what `Started` said.
                        let (prompt, cached) = std::mem::take(&mut reply.told);
                        let usage = &mut self.head.usage;
                        usage.prompt_tokens =
                            usage.prompt_tokens.saturating_sub(prompt) + prompt_tokens;
                        usage.cached_tokens =
                            usage.cached_tokens.saturating_sub(cached) + cached_tokens;
                        reply.told = (prompt_tokens, cached_tokens);
                    }
                }
                // A stream cannot take text back: answers are not revisable, and rewound reasoning
                // continues after the text already sent.
                Event::Rewound { .. } if self.is_stream => {}
                &Event::Rewound { reasoning, answer } => {
                    reply.parts.rewind(reasoning, answer);
                }
                Event::Reasoning(_)
                | Event::Answer(_)
                | Event::CallDelta(_)
                | Event::ToolCall(_) => {
                    if self.head.times.first_piece == 0 {
                        self.head.times.first_piece = self.log.elapsed_ns();
                        self.log.tracked.first_piece(self.log.elapsed_ms());
                    }
                    return Ok(Some((index, Progress::Event(event))));
                }
                Event::PromptToken(token) => {
                    if !self.is_stream {
                        let PromptToken { bytes, logprob, top } = token;
                        reply.prompt.push(bytes, *logprob, top);
                    }
                    return Ok(Some((index, Progress::Event(event))));
                }
                Event::Routed { model, profile } => {
                    let note = format!("routed to `{model}` with the profile `{profile}`");
                    self.log.tracked.note(index, 0, 0, &note);
                    self.head.notes.push(note);
                    (self.head.model, self.head.profile) = (model.clone(), profile.clone());
                }
                Event::Note { tokens, note } => {
                    let at = reply.parts.text_bytes();
                    self.log.tracked.note(index, *tokens, at, note);
                }
                Event::Embedding(embedding) => reply.embedding.clone_from(embedding),
                Event::Logprob(_) => return Ok(Some((index, Progress::Event(event)))),
                Event::Finished(finished) => {
                    reply.finished = Some(finished.clone());
                    return Ok(Some((index, Progress::Event(event))));
                }
                Event::Failed(_) => unreachable!("`Events` makes it a failure"),
            }
        }
    }

    /// The replies, after the last event.
    fn replies(&mut self) -> Vec<Reply> {
        self.head.times.ended = self.log.elapsed_ns();
        let whole =
            |Partial {
                 parts: Parts { parts, logprobs, .. }, prompt, embedding, finished, ..
             }| {
                let finished: Option<Finished> = finished;
                let finished = finished.expect("every request has finished");
                let (parts, logprobs_of) = parts.into_iter().unzip();
                Reply { parts, prompt, embedding, logprobs, logprobs_of, finished }
            };
        let replies: Vec<_> = std::mem::take(&mut self.replies).into_iter().map(whole).collect();
        self.log.finished(&self.head, &replies, usage(&self.head, &replies));
        replies
    }
}

/// The replies as one object.
///
/// # Errors
/// The engine's error.
pub async fn whole<P: Protocol>(
    protocol: P,
    head: Head,
    events: Events,
    log: RequestLog,
) -> Result<Response, ApiError> {
    let mut run = Run::new(protocol, head, events, log, false);
    while run.next().await?.is_some() {}
    let replies = run.replies();
    Ok(Json(run.protocol.whole(&run.head, &replies)).into_response())
}

/// The replies as a stream.
///
/// # Errors
/// The engine's error, if it comes first and within [`FIRST_EVENT`]. A later error ends the stream.
pub async fn stream<P: Protocol>(
    protocol: P,
    head: Head,
    events: Events,
    log: RequestLog,
) -> Result<Response, ApiError> {
    let run = Run::new(protocol, head, events, log, true);
    let mut stream = Stream { run, ready: Frames::default(), ended: false };
    // `None` if there is none yet.
    let first = timeout(FIRST_EVENT, stream.run.next()).await.ok().transpose()?;
    stream.run.protocol.begin(&stream.run.head, &mut stream.ready);
    if let Some(first) = first {
        stream.push(first);
    }
    let frames = futures_util::stream::unfold(stream, async |mut stream| {
        let frame = stream.next().await?;
        Some((frame, stream))
    });
    let mut response = match P::FRAMING {
        Framing::Sse => {
            let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).event(P::keep_alive());
            let events = frames.map(|frame| {
                let event = sse::Event::default();
                let event = frame.event.into_iter().fold(event, sse::Event::event);
                Ok::<_, Infallible>(event.data(frame.data))
            });
            Sse::new(Box::pin(events)).keep_alive(keep_alive).into_response()
        }
        Framing::Lines => {
            let lines = frames.map(|frame| Ok::<_, Infallible>(Bytes::from(frame.data + "\n")));
            let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
            (kind, Body::from_stream(lines)).into_response()
        }
    };
    // Tells nginx not to buffer the stream.
    let unbuffered = (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response.headers_mut().extend([unbuffered]);
    Ok(response)
}

/// A stream in progress.
struct Stream<P> {
    run: Run<P>,
    ready: Frames,
    /// Whether `ready` holds the last frame.
    ended: bool,
}

impl<P: Protocol> Stream<P> {
    /// The next frame; `None` at the end.
    async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.ready.next() {
                return Some(frame);
            }
            if self.ended {
                return None;
            }
            match self.run.next().await {
                Ok(event) => self.push(event),
                Err(error) => {
                    self.run.protocol.fail(&self.run.head, &error, &mut self.ready);
                    self.ended = true;
                }
            }
        }
    }

    fn push(&mut self, next: Option<(usize, Progress)>) {
        let Some((index, progress)) = next else {
            let replies = self.run.replies();
            self.run.protocol.end(&self.run.head, &replies, &mut self.ready);
            self.ended = true;
            return;
        };
        let (protocol, head) = (&mut self.run.protocol, &self.run.head);
        match progress {
            Progress::Event(event) => protocol.event(head, index, event, &mut self.ready),
            Progress::Ran(ran) => protocol.ran(head, index, &ran, &mut self.ready),
        }
    }
}
