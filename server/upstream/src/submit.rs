//! How requests begin: what the upstream does not have is refused, and each request gets a task of its own.

use steersman_request::{Choices, Continued, Error, Event, Request, RequestError};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::capability::Lacks;
use crate::config::Protocol;
use crate::upstream::UpstreamModel;
use crate::{anthropic, openai, run};

impl UpstreamModel {
    /// Refuses what the client asks for and the upstream does not have. Within a runtime.
    ///
    /// # Errors
    /// Names the field.
    pub fn check(&self, request: &Request) -> Result<(), Error> {
        self.upstream().ask_again();
        let lacks = Lacks { upstream: self.upstream().name().into() };
        if request.embedding.is_some() {
            return Err(lacks.field("input").into());
        }
        if request.prompt.is_some() {
            let problem = format!(
                "the upstream `{}` takes conversations only; send messages, or use another model",
                lacks.upstream
            );
            return Err(RequestError::Field { field: "prompt", problem }.into());
        }
        if request.prompt_logprobs.is_some() {
            return Err(lacks.field("prompt_logprobs").into());
        }
        if request.messages.is_empty() {
            return Err(RequestError::EmptyPrompt.into());
        }
        let capabilities = self.capabilities();
        if let Some(part) = request.continues {
            let can = match part {
                Continued::Reasoning => capabilities.continues_reasoning(),
                Continued::Answer => capabilities.continues_answer(),
            };
            let is_known = self.upstream().config().protocol == Protocol::OpenAi;
            if !can || !is_known {
                return Err(lacks.field("continue_final_message").into());
            }
        }
        let checked = match self.upstream().config().protocol {
            Protocol::OpenAi => openai::check(request, &capabilities, &lacks),
            Protocol::Anthropic => anthropic::check(request, &capabilities, &lacks),
        };
        Ok(checked?)
    }

    /// Begins a request. Dropping the receiver cancels it, and closes its connection. Within a runtime.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn submit(&self, request: Request) -> Result<UnboundedReceiver<Event>, Error> {
        self.check(&request)?;
        Ok(self.start(request))
    }

    /// Begins the requests of a body, each of their choices as a request of its own. Returns a receiver for each
    /// choice, request by request.
    ///
    /// # Errors
    /// As [`Self::check`]; then none has begun.
    pub fn submit_all(&self, body: Vec<Choices>) -> Result<Vec<UnboundedReceiver<Event>>, Error> {
        body.iter().try_for_each(|choices| self.check(&choices.request))?;
        let requests: Vec<_> = body.iter().flat_map(Choices::requests).collect();
        Ok(requests.into_iter().map(|request| self.start(request)).collect())
    }

    fn start(&self, request: Request) -> UnboundedReceiver<Event> {
        let (events, receiver) = unbounded_channel();
        tokio::spawn(run::run(self.clone(), request, events));
        receiver
    }
}
