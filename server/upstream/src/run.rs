//! One request, from its queue to its last event.
//!
//! The reply to it takes one request to the upstream, and another one for each cut. A request is repeated only while
//! nothing of its reply has come. The client's first event is sent when the upstream's first piece is there: until
//! then the request may still be answered elsewhere, by a fallback.
//!
//! Dropping the stream closes its connection, which is how the upstream learns that nobody wants the reply.

use std::sync::Arc;
use std::time::Duration;

use steersman_policy_host::{Labels, Phase, SamplingPatch, Session, Summary, Vocabulary};
use steersman_request::{
    Continued, Error, Event, FinishReason, Finished, Request, RequestError, UpstreamFault, Usage,
};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, sleep, sleep_until};

use crate::anthropic;
use crate::ask::{Ask, Continuation};
use crate::config::Protocol;
use crate::fault::{Fault, FaultKind};
use crate::hooks::Hooks;
use crate::openai;
use crate::piece::Piece;
use crate::prepare::{Prepared, prepare, prompt_tokens};
use crate::reply::Reply;
use crate::segment::{Pieces, parts};
use crate::steer::{Next, Steer};
use crate::stream::{Patience, Reader, Stream};
use crate::tally::Tally;
use crate::upstream::{Shared, UpstreamModel};
use crate::usage::Use;

/// Most requests to the upstream for one reply.
const LEGS: usize = 32;

/// First pause before a repetition; doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Time for which counts are waited for after the end of a reply.
const COUNTS: Duration = Duration::from_secs(5);

/// Answers `request` with `events`.
pub async fn run(model: UpstreamModel, request: Request, events: UnboundedSender<Event>) {
    let policies = model.policies().clone();
    let start = move |request: &Request, vocabulary: &Arc<dyn Vocabulary>| {
        Ok(policies.start(&request.profile, &request.id, vocabulary)?)
    };
    run_with(model, request, events, start).await;
}

/// [`run`] with the policies that `start` gives.
pub async fn run_with(
    model: UpstreamModel,
    request: Request,
    events: UnboundedSender<Event>,
    policies: impl FnOnce(&Request, &Arc<dyn Vocabulary>) -> Result<Session, Error> + Send + 'static,
) {
    let deadline = request.deadline.map(Instant::from_std);
    let (id, span) = (request.id.clone(), request.span.clone());
    let late = async {
        match deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(late);
    let prepared = tokio::select! {
        biased;
        () = events.closed() => return,
        () = &mut late => {
            let error = RequestError::Deadline { stage: "being prepared" };
            return drop(events.send(Event::Failed(error.into())));
        }
        prepared = start(&model, request, policies) => prepared,
    };
    let (prepared, pieces) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            span.log(|| tracing::debug!(id, %error, "request refused"));
            return drop(events.send(Event::Failed(error)));
        }
    };
    let mut run = Run::new(model, prepared, pieces, events.clone());
    let ended = tokio::select! {
        biased;
        () = events.closed() => {
            span.log(|| tracing::debug!(id, "request cancelled"));
            run.count();
            return drop(run.finish("cancelled").await);
        }
        () = &mut late => {
            let stage = if run.has_started { "being decoded" } else { "waiting" };
            Err(RequestError::Deadline { stage }.into())
        }
        ended = run.drive() => ended,
    };
    run.count();
    match ended {
        Ok(reason) => run.finished(reason).await,
        Err(error) => {
            span.log(|| tracing::debug!(id, %error, "request failed"));
            run.finish("error").await;
            run.reply.send(Event::Failed(error));
        }
    }
}

/// Starts the policies of a request, and asks them for their plan, on a thread.
async fn start(
    model: &UpstreamModel,
    request: Request,
    policies: impl FnOnce(&Request, &Arc<dyn Vocabulary>) -> Result<Session, Error> + Send + 'static,
) -> Result<(Prepared, Arc<Pieces>), Error> {
    let (model, pieces) = (model.clone(), Pieces::new());
    let vocabulary: Arc<dyn Vocabulary> = pieces.clone();
    let prepare = move || {
        let span = request.span.clone();
        let _entered = span.0.enter();
        let session = policies(&request, &vocabulary)?;
        prepare(&model, request, session)
    };
    let prepared = tokio::task::spawn_blocking(prepare).await;
    let prepared = prepared
        .map_err(|panic| Error::Panic { stage: "being prepared", message: panic.to_string() })?;
    Ok((prepared?, pieces))
}

/// A request that runs.
struct Run {
    model: UpstreamModel,
    request: Request,
    reasoning: Option<bool>,
    sampling: SamplingPatch,
    fingerprint: String,
    steer: Steer,
    reply: Reply,
    who: Use,
    has_started: bool,
    tally: Tally,
    /// Whether the part that is being written continues a message whose reasoning has ended. Parsers of some servers
    /// take it for reasoning, because they see no end of that in the new text.
    is_after_reasoning: bool,
    /// Notes on what the request to the upstream lacks, until the reply begins: a fallback may answer before, which
    /// looks at the first event.
    early_notes: Vec<String>,
    blocks: Vec<serde_json::Value>,
    wanted_back: Vec<(String, Option<serde_json::Value>)>,
    generated_ids: u32,
}

impl Run {
    fn new(
        model: UpstreamModel,
        prepared: Prepared,
        pieces: Arc<Pieces>,
        events: UnboundedSender<Event>,
    ) -> Self {
        let Prepared { request, session, plan, reasoning, limits, sampling, notes, fingerprint } =
            prepared;
        let hooks = Hooks::new(session, request.span.clone());
        let reply = Reply::new(&request, events, [hooks.sees_text, hooks.judges_calls], notes);
        let who = Use {
            model: model.model().into(),
            profile: request.profile.clone(),
            key: request.caller.key.clone(),
        };
        let without = model.upstream().config().without_continuation;
        let steer = Steer::new(hooks, &plan, limits, model.capabilities(), without, pieces);
        Self {
            model,
            request,
            reasoning,
            sampling,
            fingerprint,
            steer,
            reply,
            who,
            has_started: false,
            tally: Tally::default(),
            is_after_reasoning: false,
            early_notes: Vec::new(),
            blocks: Vec::new(),
            wanted_back: Vec::new(),
            generated_ids: 0,
        }
    }

    fn shared(&self) -> &Shared {
        self.model.upstream().shared()
    }

    fn error(&self, fault: Fault) -> Error {
        fault.error(self.model.upstream().name())
    }

    /// Runs the request to the end of its reply.
    async fn drive(&mut self) -> Result<FinishReason, Error> {
        let upstream = self.model.upstream().clone();
        let (profile, limit) = (self.request.profile.clone(), self.request.running_limit);
        let _place = upstream.shared().gate.place(&profile, limit).await;
        let permit = upstream.shared().gate.enter().await;
        let _permit = permit.map_err(|fault| self.error(fault))?;
        let mut continuation = None;
        for _ in 0..LEGS {
            match self.leg(continuation.as_ref()).await? {
                Next::End(reason) => return Ok(reason),
                Next::Read => return Ok(FinishReason::Stop),
                Next::Cut => {
                    self.tally.cut();
                    self.steer.close_piece(&mut self.reply);
                    let before = Continuation::of_client(&self.request);
                    continuation = Some(self.reply.continuation().after(before));
                }
            }
        }
        let reason = format!("the policies cut the reply {LEGS} times");
        self.reply.note(reason.clone());
        Ok(FinishReason::Policy(reason))
    }

    /// One request to the upstream.
    async fn leg(&mut self, continuation: Option<&Continuation>) -> Result<Next, Error> {
        self.is_after_reasoning = match continuation {
            Some(continuation) => !continuation.is_open,
            None => self.request.continues == Some(Continued::Answer),
        };
        let mut stream = self.open(continuation).await?;
        let upstream = self.model.upstream().clone();
        let mut end = None;
        // Only counts may follow the end, and some servers keep the connection open.
        let mut counts_until = None;
        // Counts alone are no piece of the reply.
        let mut newest_piece = Instant::now();
        let ended = loop {
            let patience = match counts_until {
                None => Patience::after(newest_piece, upstream.config()),
                Some(until) => Patience::until(until),
            };
            let pieces = match stream.next(&upstream.shared().client, patience).await {
                Ok(Some(pieces)) => pieces,
                Ok(None) => break Ok(Next::Read),
                Err(_) if end.is_some() => break Ok(Next::Read),
                Err(fault) => {
                    if fault.is_of_upstream() {
                        self.shared().breaker.ended(false);
                    }
                    self.shared().usage.failed(&self.who);
                    break Err(self.error(fault));
                }
            };
            let mut next = Next::Read;
            let are_counts = pieces.iter().all(Piece::is_counts);
            for piece in pieces {
                if let Piece::End(reason) = piece {
                    end = Some(reason);
                    counts_until = counts_until.or(Some(Instant::now() + COUNTS));
                    continue;
                }
                next = self.take(piece, end.is_some()).await?;
                if next != Next::Read {
                    break;
                }
            }
            if next != Next::Read {
                break Ok(next);
            }
            if !are_counts {
                newest_piece = Instant::now();
            }
        };
        drop(stream);
        self.count();
        match ended? {
            Next::Read => self.end_of_stream(end.unwrap_or(FinishReason::Stop)).await,
            next => Ok(next),
        }
    }

    /// The end of a stream that was read to its end.
    async fn end_of_stream(&mut self, reason: FinishReason) -> Result<Next, Error> {
        self.steer.close_piece(&mut self.reply);
        match self.end_call(reason == FinishReason::Length).await? {
            Next::Read => {}
            next => return Ok(next),
        }
        self.steer.release(&mut self.reply).await?;
        Ok(Next::End(reason))
    }

    /// Takes a piece of the stream.
    async fn take(&mut self, piece: Piece, has_ended: bool) -> Result<Next, Error> {
        let piece = match piece {
            Piece::Reasoning(text) if self.is_after_reasoning => Piece::Answer(text),
            piece => piece,
        };
        let Self { steer, reply, request, .. } = self;
        match piece {
            Piece::Counts(counts) => self.tally.add(counts),
            _ if has_ended => {}
            Piece::Reasoning(text) => return self.write(Phase::Reasoning, &text).await,
            Piece::Answer(text) => {
                match self.end_call(false).await? {
                    Next::Read => {}
                    next => return Ok(next),
                }
                return self.write(Phase::Answer, &text).await;
            }
            Piece::CallStart { id, name, extra } => {
                match self.end_call(false).await? {
                    Next::Read => {}
                    next => return Ok(next),
                }
                self.steer.release(&mut self.reply).await?;
                self.steer.enter(Phase::ToolCall, &mut self.reply);
                let id = if id.is_empty() { self.new_id() } else { id };
                self.wanted_back.push((id.clone(), extra));
                self.reply.begin_call(id, name);
                self.reply.show();
            }
            Piece::CallArguments(text) => {
                reply.add_arguments(&text);
                steer.count_arguments(&text, reply);
                reply.show();
                if let Some(end) = steer.end_at_limit(reply) {
                    return Ok(end);
                }
            }
            Piece::Logprob(logprob) => {
                if request.logprobs.is_some() {
                    reply.send(Event::Logprob(logprob));
                }
            }
            Piece::Block(block) => self.blocks.push(block),
            Piece::Note(note) => reply.note(note),
            Piece::End(_) => {}
        }
        Ok(Next::Read)
    }

    /// Writes text of the upstream.
    async fn write(&mut self, phase: Phase, text: &str) -> Result<Next, Error> {
        for part in parts(text) {
            match self.steer.write(phase, part, &self.request, &mut self.reply).await? {
                Next::Read => {}
                next => return Ok(next),
            }
        }
        Ok(Next::Read)
    }

    /// The open call is complete: it gets its verdict.
    async fn end_call(&mut self, is_cut_off: bool) -> Result<Next, Error> {
        let Some(call) = self.reply.end_call(is_cut_off) else { return Ok(Next::Read) };
        let next = self.steer.judge(call, &self.request, &mut self.reply).await?;
        let is_last = self.reply.has_last_call();
        Ok(if next == Next::Read && is_last { Next::End(FinishReason::ToolCalls) } else { next })
    }

    /// An id for a call to which the upstream gives none.
    fn new_id(&mut self) -> String {
        self.generated_ids += 1;
        format!("call_{}_{}", self.request.id, self.generated_ids)
    }

    /// Sends the request until a reply begins, or it may not be repeated.
    async fn open(&mut self, continuation: Option<&Continuation>) -> Result<Stream, Error> {
        let body = self.body(continuation);
        let retries = self.model.upstream().config().retries;
        let mut pause = FIRST_PAUSE;
        for attempt in 0.. {
            let fault = match self.attempt(&body, continuation).await {
                Ok(stream) => return Ok(stream),
                Err(fault) => fault,
            };
            if attempt >= retries || !fault.is_passing() {
                return Err(self.error(fault));
            }
            let (upstream, problem) = (self.model.upstream().name(), &fault.problem);
            let span = &self.request.span;
            span.log(|| {
                tracing::warn!(upstream, problem, "upstream failed; repeating the request")
            });
            // The gate keeps the pause that the upstream asks for, and an open breaker refuses at once.
            if fault.retry_after.is_none_or(|time| time < FIRST_PAUSE) {
                sleep(pause).await;
                pause *= 2;
            }
        }
        unreachable!("the loop has no end")
    }

    /// Sends the request once. The reply has begun when its first piece is there.
    async fn attempt(
        &mut self,
        body: &str,
        continuation: Option<&Continuation>,
    ) -> Result<Stream, Fault> {
        let upstream = self.model.upstream().clone();
        let (shared, config) = (upstream.shared(), upstream.config());
        shared.gate.wait().await?;
        let pass = shared.breaker.pass().map_err(|left| {
            let problem = "has failed several times, and is not asked for some time";
            let fault = Fault::new(UpstreamFault::Unavailable, problem);
            Fault {
                kind: FaultKind::Upstream(UpstreamFault::Unavailable),
                retry_after: Some(left),
                ..fault
            }
        })?;
        shared.usage.asked(&self.who);
        self.reply.show_sent();
        let written = self.written();
        self.tally.begin_part(written);
        let began = self.begin(body, continuation).await;
        match &began {
            Ok(_) => pass.ended(true),
            Err(fault) => {
                self.tally.drop_part();
                shared.usage.failed(&self.who);
                if let Some(time) = fault.retry_after.filter(|_| fault.is_passing()) {
                    shared.gate.pause_for(time);
                }
                if fault.is_of_upstream() {
                    pass.ended(false);
                }
            }
        }
        let stream = began?;
        if !self.has_started {
            self.has_started = true;
            let counts = stream.first.iter().find_map(|piece| match piece {
                Piece::Counts(counts) => Some(*counts),
                _ => None,
            });
            let counts = counts.unwrap_or_default();
            self.tally.tell(counts);
            self.reply.send(Event::Started {
                fingerprint: self.fingerprint.clone(),
                prompt_tokens: counts.prompt.unwrap_or(0),
                cached_tokens: counts.cached.unwrap_or(0),
                max_tokens: self.steer.limits.reply,
                max_answer_tokens: self.steer.limits.answer,
            });
            let notes = std::mem::take(&mut self.early_notes);
            notes.into_iter().for_each(|note| self.reply.note(note));
        }
        tracing::debug!(
            upstream = upstream.name(),
            timeout_s = config.piece_timeout_s,
            "reply began"
        );
        Ok(stream)
    }

    /// Sends the request, and reads up to the first piece.
    async fn begin(
        &self,
        body: &str,
        continuation: Option<&Continuation>,
    ) -> Result<Stream, Fault> {
        let upstream = self.model.upstream();
        let (client, config) = (&upstream.shared().client, upstream.config());
        let is_in_reasoning = match continuation {
            Some(continuation) => continuation.is_open,
            None => self.request.continues == Some(Continued::Reasoning),
        };
        let mask = client.mask().clone();
        let (path, reader) = match config.protocol {
            Protocol::OpenAi => {
                let capabilities = self.model.capabilities();
                let reader = openai::Reader::new(&capabilities, is_in_reasoning, mask);
                (openai::PATH, Reader::OpenAi(reader))
            }
            Protocol::Anthropic => {
                (anthropic::PATH, Reader::Anthropic(anthropic::Reader::new(mask)))
            }
        };
        Stream::begin(client, path, body.into(), reader, config.first_piece_timeout()).await
    }

    fn body(&mut self, continuation: Option<&Continuation>) -> String {
        let capabilities = self.model.capabilities();
        let limits = self.steer.limits;
        let used = self.reply.tokens();
        let mut notes = Vec::new();
        let ask = Ask {
            model: self.model.model(),
            request: &self.request,
            capabilities: &capabilities,
            reasoning: self.reasoning,
            budget: limits.budget.map(|budget| budget.saturating_sub(self.reply.counts.0)),
            sampling: self.sampling,
            max_tokens: limits.reply.saturating_sub(used).max(1),
            continuation,
            memory: &self.shared().memory,
        };
        let body = match self.model.upstream().config().protocol {
            Protocol::OpenAi => openai::body(&ask, &mut notes),
            Protocol::Anthropic => anthropic::body(&ask, &mut notes),
        };
        // Those of a continued reply are known.
        if continuation.is_none() {
            self.early_notes = notes;
        }
        body
    }

    /// Pieces that the upstream has written, also those that policies have taken back.
    fn written(&self) -> u32 {
        let Steer { rewound, injected, .. } = self.steer;
        let pieces = (self.reply.tokens() as usize + rewound).saturating_sub(injected);
        u32::try_from(pieces).unwrap_or(u32::MAX)
    }

    /// Counts the tokens of the request to the upstream that has ended, however it has. A prompt that the upstream has
    /// not counted takes of the tokens of the day what its text is worth: most servers count at the end of a reply
    /// only.
    fn count(&mut self) {
        let written = self.written();
        let Some((counts, pieces)) = self.tally.end_part(written) else { return };
        let shared = self.shared();
        shared.usage.count(&self.who, counts, pieces);
        let prompt = counts.prompt.unwrap_or_else(|| prompt_tokens(&self.request));
        let reply = counts.reply.unwrap_or(pieces);
        shared.gate.count(u64::from(prompt) + u64::from(reply));
    }

    /// Ends the request with a reply.
    async fn finished(mut self, reason: FinishReason) {
        let has_calls = !self.reply.calls.is_empty();
        let reason = match reason {
            FinishReason::Policy(_) => reason,
            _ if self.reply.has_broken_call => FinishReason::Length,
            FinishReason::Stop | FinishReason::StopString(_) if has_calls => {
                FinishReason::ToolCalls
            }
            FinishReason::ToolCalls if !has_calls => FinishReason::Stop,
            reason => reason,
        };
        let (calls, blocks) =
            (std::mem::take(&mut self.wanted_back), std::mem::take(&mut self.blocks));
        self.shared().memory.add(&calls, blocks);
        let name = match &reason {
            FinishReason::Stop | FinishReason::StopString(_) => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool-calls",
            FinishReason::Policy(_) => "policy",
        };
        // Ends by a policy and at limits may have left text with the policies.
        let released = self.steer.release(&mut self.reply).await;
        let (of_policy, labels) = self.finish(name).await;
        if let Err(error) = released {
            return self.reply.send(Event::Failed(error));
        }
        let usage = self.tally.usage(self.reply.counts);
        if !self.tally.is_told() {
            let Usage { prompt_tokens, cached_tokens, .. } = usage;
            self.reply.send(Event::PromptCounted { prompt_tokens, cached_tokens });
        }
        let mut notes = self.reply.take_notes();
        notes.extend(of_policy);
        self.reply.send(Event::Finished(Finished { reason, usage, notes, labels }));
    }

    /// Calls `on-finish`.
    async fn finish(&mut self, reason: &str) -> (Vec<String>, Labels) {
        let usage = self.tally.usage(self.reply.counts);
        let summary = Summary {
            reason: reason.into(),
            prompt_tokens: usage.prompt_tokens,
            reasoning_tokens: usage.reasoning_tokens,
            answer_tokens: usage.answer_tokens,
            loops: self.steer.loops,
            // Cast: as many as an upstream may send.
            tool_calls: self.reply.calls.len() as u32,
        };
        self.steer.hooks.finish(summary).await
    }
}
