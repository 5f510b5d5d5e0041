//! The rounds of one reply: runs its calls of MCP tools, and lets the model continue with their results.
//!
//! Each round is a request of the engine, whose conversation has the calls and results before it. Its events
//! pass through, except for its own beginning, the calls that run here, and its end if a round follows. So a
//! protocol sees one reply, whose usage is the sum.
//!
//! A reply that calls tools of the client goes to the client, which has to answer them first: calls of MCP
//! tools beside them are not run, with a note, so that no effect gets lost with its result.

use std::sync::Arc;
use std::time::Duration;

use steersman_engine::policy::Labels;
use steersman_engine::request::{Event, FinishReason, Finished, Message, Request, ToolCall, Usage};
use steersman_engine::{Error, RequestError};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep};

use super::route::Routes;
use crate::mcp::{Ran, Toolbox};
use crate::models::Backend;

/// Pause before a round is queued again while the queue is full: a reply in progress is not given up.
const FULL_QUEUE: Duration = Duration::from_millis(100);

/// What a protocol gets of a reply.
#[derive(Debug)]
pub enum Progress {
    /// An event of the engine.
    Event(Event),
    /// A call that this server ran.
    Ran(Ran),
}

/// Follows a reply to `request` that sends `events`, through its rounds. Dropping the receiver cancels the
/// round and the call that run.
pub fn start(
    toolbox: Arc<Toolbox>,
    backend: Backend,
    routes: Routes,
    request: Arc<Request>,
    events: UnboundedReceiver<Event>,
) -> UnboundedReceiver<Progress> {
    let (out, receiver) = unbounded_channel();
    tokio::spawn(async move {
        let id = request.id.clone();
        let (usage, notes) = (Usage::default(), Vec::new());
        let closed = out.clone();
        let mut rounds = Rounds {
            toolbox,
            backend,
            routes,
            request,
            id,
            out,
            round: 0,
            separates_reasoning: false,
            separates_answer: false,
            usage,
            notes,
            labels: Labels::new(),
        };
        tokio::select! {
            () = closed.closed() => {}
            () = rounds.run(events) => {}
        }
    });
    receiver
}

struct Rounds {
    toolbox: Arc<Toolbox>,
    backend: Backend,
    routes: Routes,
    /// The request of the current round. It is copied when the next one is made, if its route holds it still.
    request: Arc<Request>,
    /// Id of the first one.
    id: String,
    out: UnboundedSender<Progress>,
    /// Rounds of calls so far.
    round: u32,
    /// Whether an empty line separates the next reasoning, and the next answer, from those of earlier rounds.
    separates_reasoning: bool,
    separates_answer: bool,
    /// Usage of the rounds that have ended.
    usage: Usage,
    notes: Vec<String>,
    labels: Labels,
}

/// The reply of one round.
#[derive(Default)]
struct Reply {
    reasoning: String,
    answer: String,
    /// The calls to run here.
    calls: Vec<ToolCall>,
    /// Whether it calls tools of the client.
    calls_client: bool,
}

impl Rounds {
    async fn run(&mut self, mut events: UnboundedReceiver<Event>) {
        while let Some((reply, finished)) = self.read(&mut events).await {
            self.usage = self.usage + finished.usage;
            self.notes.extend(finished.notes);
            // The newest count.
            self.labels = finished.labels;
            let stopped = self.stopped(&reply, &finished.reason, finished.usage);
            if let Some((reason, why)) = stopped {
                if let Some(why) = why {
                    let names: Vec<_> = reply.calls.iter().map(name_of).collect();
                    self.notes.push(format!("mcp: not run: {}: {why}", names.join(", ")));
                }
                return self.finish(reason);
            }
            self.round += 1;
            let results = self.call(&reply.calls).await;
            self.extend(reply, results, finished.usage);
            let Some(next) = self.submit().await else { return };
            events = next;
        }
    }

    /// Passes the events of a round on, and returns its reply; `None` if the request has failed.
    async fn read(&mut self, events: &mut UnboundedReceiver<Event>) -> Option<(Reply, Finished)> {
        let mut reply = Reply::default();
        // Whether the call that is being written runs here.
        let mut is_own = false;
        loop {
            // The engine's thread has ended: so does this channel.
            let event = events.recv().await?;
            match &event {
                Event::Started { .. } if self.round > 0 => continue,
                // The rounds share the limits of the reply, whoever set them.
                Event::Started { max_tokens, max_answer_tokens, .. } => {
                    let request = Arc::make_mut(&mut self.request);
                    request.max_tokens = Some(*max_tokens);
                    request.max_answer_tokens = *max_answer_tokens;
                }
                Event::Reasoning(piece) => {
                    if std::mem::take(&mut self.separates_reasoning) {
                        self.send(Event::Reasoning("\n\n".into()));
                    }
                    reply.reasoning += piece;
                }
                Event::Answer(piece) => {
                    if std::mem::take(&mut self.separates_answer) {
                        self.send(Event::Answer("\n\n".into()));
                    }
                    reply.answer += piece;
                }
                Event::Rewound { reasoning, answer } => {
                    reply.reasoning.truncate(reply.reasoning.len().saturating_sub(*reasoning));
                    reply.answer.truncate(reply.answer.len().saturating_sub(*answer));
                }
                Event::CallDelta(delta) => {
                    if let Some(name) = &delta.name {
                        is_own = !self.toolbox.is_clients(name);
                    }
                    if is_own {
                        continue;
                    }
                }
                Event::ToolCall(call) if !self.toolbox.is_clients(&call.function.name) => {
                    reply.calls.push(call.clone());
                    continue;
                }
                Event::ToolCall(_) => reply.calls_client = true,
                Event::Failed(Error::Request(error)) if self.round > 0 && is_too_long(error) => {
                    self.too_long(error);
                    return None;
                }
                Event::Finished(finished) => return Some((reply, finished.clone())),
                Event::Failed(_) => {
                    self.send(event);
                    return None;
                }
                Event::PromptToken(_)
                | Event::Embedding(_)
                | Event::Logprob(_)
                | Event::Routed { .. }
                | Event::Note { .. } => {}
                // Those of the first round are the reply's.
                Event::PromptCounted { .. } if self.round > 0 => continue,
                Event::PromptCounted { .. } => {}
            }
            self.send(event);
        }
    }

    /// Whether the reply ends with this round: for which reason, and why its calls are not run.
    fn stopped(
        &self,
        reply: &Reply,
        reason: &FinishReason,
        used: Usage,
    ) -> Option<(FinishReason, Option<String>)> {
        let limit = self.toolbox.rounds();
        let Request { max_tokens, max_answer_tokens, .. } = *self.request;
        let is_used = |limit: Option<u32>, tokens| limit.is_some_and(|limit| limit <= tokens);
        if reply.calls.is_empty() {
            Some((reason.clone(), None))
        } else if *reason != FinishReason::ToolCalls {
            Some((reason.clone(), Some("the reply ended before".into())))
        } else if reply.calls_client {
            let why = "the reply calls tools of the client too, whose results come first";
            Some((FinishReason::ToolCalls, Some(why.into())))
        } else if self.round == limit {
            let why = format!("the limit of {limit} rounds is reached (mcp.rounds)");
            Some((FinishReason::Length, Some(why)))
        } else if is_used(max_tokens, used.reply_tokens())
            || is_used(max_answer_tokens, used.answer_tokens)
        {
            Some((FinishReason::Length, Some("the limit on tokens is reached".into())))
        } else {
            None
        }
    }

    /// Runs the calls one after the other, because a later one may need the effect of an earlier one.
    async fn call(&self, calls: &[ToolCall]) -> Vec<Message> {
        let mut results = Vec::new();
        for call in calls {
            let (name, arguments) = (&call.function.name, (*call.function.arguments).clone());
            let text = call.function.arguments.to_json();
            let start = Instant::now();
            let output = self.toolbox.call(name, arguments).await;
            let ran = Ran {
                id: call.id.clone(),
                name: name.clone(),
                arguments: Some(text),
                output_bytes: output.text.len(),
                output: Some(output.text),
                is_error: output.is_error,
                round: self.round,
                milliseconds: start.elapsed().as_millis() as u64,
            };
            self.record(&ran);
            results.push(Message {
                role: "tool".into(),
                content: ran.result(),
                tool_call_id: Some(call.id.clone()),
                name: Some(name.clone()),
                ..Message::default()
            });
            // Without a receiver, `start` ends this task.
            drop(self.out.send(Progress::Ran(ran)));
        }
        results
    }

    fn record(&self, ran: &Ran) {
        let Ran { name, is_error, output_bytes, round, milliseconds, .. } = ran;
        let request = &self.id;
        tracing::info!(
            request,
            tool = name,
            is_error,
            output_bytes,
            round,
            milliseconds,
            "mcp tool called"
        );
        self.toolbox.record(&self.id, ran);
    }

    /// Makes the request of the next round. `used` is what the last one used of the client's limits.
    fn extend(&mut self, reply: Reply, results: Vec<Message>, used: Usage) {
        let Reply { reasoning, answer, calls, .. } = reply;
        self.separates_reasoning |= !reasoning.is_empty();
        self.separates_answer |= !answer.is_empty();
        let request = Arc::make_mut(&mut self.request);
        // What continues a message of the client's is the rest of that.
        let begun = request.continues.take().and_then(|_| request.messages.pop());
        let begun = begun.unwrap_or_default();
        let reasoning = begun.reasoning_content.unwrap_or_default() + &reasoning;
        request.messages.push(Message {
            role: "assistant".into(),
            content: begun.content + &answer,
            reasoning_content: Some(reasoning).filter(|reasoning| !reasoning.is_empty()),
            tool_calls: calls,
            ..Message::default()
        });
        request.messages.extend(results);
        request.id = format!("{}-round{}", self.id, self.round + 1);
        let tokens = used.reply_tokens();
        let left = |limit: Option<u32>, used| limit.map(|limit| limit.saturating_sub(used));
        request.max_tokens = left(request.max_tokens, tokens);
        request.max_answer_tokens = left(request.max_answer_tokens, used.answer_tokens);
        request.reasoning_budget = left(request.reasoning_budget, used.reasoning_tokens);
        request.min_tokens = request.min_tokens.saturating_sub(tokens);
        // The call that the client requires has been made.
        request.tool_choice.is_required = false;
    }

    /// Queues the next round; `None` if the reply ends instead.
    async fn submit(&mut self) -> Option<UnboundedReceiver<Event>> {
        self.toolbox.continues(&self.id, &self.request.id);
        loop {
            match self.routes.submit(&self.backend, self.request.clone()) {
                Ok(events) => return Some(events),
                Err(Error::Request(RequestError::QueueFull { .. })) => sleep(FULL_QUEUE).await,
                Err(Error::Request(error)) if is_too_long(&error) => {
                    self.too_long(&error);
                    return None;
                }
                Err(error) => {
                    self.send(Event::Failed(error));
                    return None;
                }
            }
        }
    }

    /// Ends the reply, whose results of tools do not fit.
    fn too_long(&mut self, error: &RequestError) {
        self.notes.push(format!("mcp: the reply ends after round {}: {error}", self.round));
        self.finish(FinishReason::Length);
    }

    fn finish(&mut self, reason: FinishReason) {
        let notes = std::mem::take(&mut self.notes);
        let labels = std::mem::take(&mut self.labels);
        self.send(Event::Finished(Finished { reason, usage: self.usage, notes, labels }));
    }

    fn send(&self, event: Event) {
        // Without a receiver, `start` ends this task.
        drop(self.out.send(Progress::Event(event)));
    }
}

fn name_of(call: &ToolCall) -> String {
    format!("`{}`", call.function.name)
}

/// Whether the conversation has become too long.
fn is_too_long(error: &RequestError) -> bool {
    use RequestError::{ContextTooLong, PromptBytes, PromptTooLong};
    matches!(error, ContextTooLong { .. } | PromptBytes { .. } | PromptTooLong { .. })
}
