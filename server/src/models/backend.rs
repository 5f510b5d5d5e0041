//! What answers the requests of a model: an engine of this process, or an upstream.

use steersman_engine::request::{Choices, Event, Request};
use steersman_engine::{Engine, RequestError, Result};
use steersman_upstream::{ReasoningField, UpstreamModel};
use tokio::sync::mpsc::UnboundedReceiver;

/// What answers the requests of a model. Cheap to clone.
#[derive(Clone)]
pub enum Backend {
    /// An engine of this process.
    Engine(Engine),
    /// A model of an upstream.
    Upstream(UpstreamModel),
}

impl From<Engine> for Backend {
    fn from(engine: Engine) -> Self {
        Self::Engine(engine)
    }
}

impl Backend {
    /// The engine, if it is one.
    pub fn engine(&self) -> Option<&Engine> {
        match self {
            Self::Engine(engine) => Some(engine),
            Self::Upstream(_) => None,
        }
    }

    /// The engine, if it is one.
    pub fn into_engine(self) -> Option<Engine> {
        match self {
            Self::Engine(engine) => Some(engine),
            Self::Upstream(_) => None,
        }
    }

    /// Checks what is known at once of a request.
    ///
    /// # Errors
    /// Those of [`Engine::check`] and [`UpstreamModel::check`].
    pub fn check(&self, request: &Request) -> Result<()> {
        match self {
            Self::Engine(engine) => engine.check(request),
            Self::Upstream(model) => model.check(request),
        }
    }

    /// Begins a request. Dropping the receiver cancels it.
    ///
    /// # Errors
    /// Those of [`Engine::submit`] and [`UpstreamModel::submit`].
    pub fn submit(&self, request: Request) -> Result<UnboundedReceiver<Event>> {
        match self {
            Self::Engine(engine) => engine.submit(request),
            Self::Upstream(model) => model.submit(request),
        }
    }

    /// Begins the requests of a body; returns a receiver for each choice, request by request.
    ///
    /// # Errors
    /// Those of [`Engine::submit_all`] and [`UpstreamModel::submit_all`].
    pub fn submit_all(&self, body: Vec<Choices>) -> Result<Vec<UnboundedReceiver<Event>>> {
        match self {
            Self::Engine(engine) => engine.submit_all(body),
            Self::Upstream(model) => model.submit_all(body),
        }
    }

    /// Models that answer a request which this one cannot, as the configuration names them.
    pub fn fallback(&self) -> &[String] {
        match self {
            Self::Engine(_) => &[],
            Self::Upstream(model) => &model.upstream().config().fallback,
        }
    }

    /// Tokens of prompt and reply together, if they are known.
    pub fn context(&self) -> Option<usize> {
        match self {
            Self::Engine(engine) => Some(engine.info().context),
            // Casts: 32 bits.
            Self::Upstream(model) => model.context().map(|context| context as usize),
        }
    }

    /// Whether the model can call tools.
    pub fn supports_tools(&self) -> bool {
        match self {
            Self::Engine(engine) => engine.info().text.supports_tools(),
            Self::Upstream(model) => model.capabilities().tools,
        }
    }

    /// Whether a request for reasoning has an effect.
    pub fn can_be_told_to_reason(&self) -> bool {
        match self {
            Self::Engine(engine) => engine.info().text.can_be_told_to_reason(),
            Self::Upstream(model) => model.capabilities().reasoning != ReasoningField::Never,
        }
    }

    /// The tokens of a prompt, before policies change it. Blocks.
    ///
    /// # Errors
    /// Those of [`Engine::tokenize`]; [`RequestError::Field`] for an upstream, whose tokenizer is not here.
    pub fn tokenize(&self, request: &Request) -> Result<Vec<u32>> {
        self.local()?.tokenize(request)
    }

    /// The text of `tokens`, which the client sent as `field`.
    ///
    /// # Errors
    /// Those of [`Engine::detokenize`]; [`RequestError::Field`] for an upstream.
    pub fn detokenize(&self, field: &'static str, tokens: &[u32]) -> Result<String> {
        self.local()?.detokenize(field, tokens)
    }

    /// The prompt of a request as text. Blocks.
    ///
    /// # Errors
    /// Those of [`Engine::render`]; [`RequestError::Field`] for an upstream.
    pub fn render(&self, request: &Request) -> Result<String> {
        self.local()?.render(request)
    }

    fn local(&self) -> Result<&Engine> {
        match self {
            Self::Engine(engine) => Ok(engine),
            Self::Upstream(model) => {
                let problem = format!(
                    "the upstream `{}` has the tokenizer and the chat template of `{}`, and this server does not; \
                     name a model of this server",
                    model.upstream().name(),
                    model.name()
                );
                Err(RequestError::Field { field: "model", problem }.into())
            }
        }
    }
}
