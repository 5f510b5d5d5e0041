//! Requests to a server with OpenAI's interface, and what it tells about itself.
//!
//! Every request opens a connection of its own: the time to the first token includes it, for every
//! server alike. Never judges an answer.

use std::fmt;
use std::io::BufReader;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};
use ureq::http::Response;
use ureq::{Agent, Body, RequestBuilder};

use crate::stream::{Reply, error_of};

/// Largest response that is not a stream.
const RESPONSE_BYTES: u64 = 64 << 20;
/// Between two questions whether a server is ready.
const READY_INTERVAL: Duration = Duration::from_millis(100);

/// How a request asks for reasoning, which no standard defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ThinkingField {
    /// `chat_template_kwargs.enable_thinking`: Steersman, mlx_lm.server, llama.cpp, vLLM, SGLang
    Kwargs,
    /// `reasoning_effort`: `low` or `none`
    Effort,
    /// The server has no such field: what depends on it is skipped
    None,
}

/// A server to measure.
#[derive(Clone, Debug)]
pub struct Client {
    /// Its name in the results.
    pub name: String,
    /// Its address, with `/v1`.
    pub base: String,
    /// The model to ask for.
    pub model: String,
    /// Most tokens of prompt and reply together, if known.
    pub context: Option<usize>,
    /// The profile to ask a Steersman server for.
    pub profile: Option<String>,
    /// How to ask for reasoning.
    pub thinking_field: ThinkingField,
    key: Option<String>,
    agent: Agent,
}

/// A chat request, decoded greedily.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    /// The conversation.
    pub messages: Vec<Value>,
    /// Most tokens of the reply.
    pub max_tokens: usize,
    /// Whether to reason; `None` leaves it to the server.
    pub thinking: Option<bool>,
    /// Tools.
    pub tools: Vec<Value>,
    /// `response_format`.
    pub format: Option<Value>,
    /// Hang up after so many pieces.
    pub hang_up_after: Option<usize>,
}

impl Chat {
    /// A request with one message of the user.
    pub fn ask(text: impl Into<String>, max_tokens: usize) -> Self {
        Self { messages: vec![user(text)], max_tokens, ..Self::default() }
    }
}

/// A message of the user.
pub fn user(text: impl Into<String>) -> Value {
    json!({"role": "user", "content": text.into()})
}

/// A message of the assistant.
pub fn assistant(text: impl Into<String>) -> Value {
    json!({"role": "assistant", "content": text.into()})
}

/// A system message.
pub fn system(text: impl Into<String>) -> Value {
    json!({"role": "system", "content": text.into()})
}

/// Why a request has no reply.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// The HTTP status, if there was one.
    pub status: Option<u16>,
    /// What the server or the connection said.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status {
            Some(status) => write!(out, "status {status}: {}", self.message),
            None => write!(out, "{}", self.message),
        }
    }
}

impl Client {
    /// A client of the server at `url`. `model` is empty until [`Client::describe`] has asked for it.
    ///
    /// # Errors
    /// When the address is not one of HTTP.
    pub fn new(name: &str, url: &str, timeout: Duration) -> Result<Self> {
        let is_http = url.starts_with("http://") || url.starts_with("https://");
        ensure!(is_http, "--against {name}={url}: the address begins with http:// or https://");
        let url = url.trim_end_matches('/');
        let base = if url.ends_with("/v1") { url.to_owned() } else { format!("{url}/v1") };
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_idle_connections(0)
            .timeout_global(Some(timeout))
            .build();
        Ok(Self {
            name: name.into(),
            base,
            model: String::new(),
            context: None,
            profile: None,
            thinking_field: ThinkingField::Kwargs,
            key: None,
            agent: Agent::new_with_config(config),
        })
    }

    /// Sends this key with every request.
    pub fn set_key(&mut self, key: String) {
        self.key = Some(key);
    }

    /// The address without `/v1`.
    pub fn root(&self) -> &str {
        self.base.trim_end_matches("/v1")
    }

    /// Port and whether the server runs on this machine.
    pub fn local_port(&self) -> Option<u16> {
        let uri: ureq::http::Uri = self.base.parse().ok()?;
        let host = uri.host()?.trim_matches(['[', ']']);
        let is_local = host == "localhost" || host == "::1" || host.starts_with("127.");
        let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        is_local.then(|| uri.port_u16().unwrap_or(default))
    }

    /// Asks the server for its models. Sets model and context where they are not chosen.
    ///
    /// # Errors
    /// When it does not answer, or has no model of that name.
    pub fn describe(&mut self) -> Result<()> {
        let list = match self.get(&format!("{}/models", self.base)) {
            Ok(list) => list,
            // mlx_lm.server lists nothing without a cache of Hugging Face, and serves all the same.
            Err(_) if !self.model.is_empty() => return Ok(()),
            Err(error) => bail!(
                "{} does not list its models at {}/models ({error}); choose one with --model",
                self.name,
                self.base
            ),
        };
        let models = list["data"].as_array().map_or(&[][..], Vec::as_slice);
        let id = |model: &Value| model["id"].as_str().unwrap_or_default().to_owned();
        if self.model.is_empty() {
            let first = models.first().with_context(|| format!("{} serves no model", self.name))?;
            self.model = id(first);
        }
        let base = self.model.split('@').next().unwrap_or_default();
        let entry = models.iter().find(|model| id(model) == base);
        // Steersman; vLLM and SGLang; llama.cpp.
        let context = entry.and_then(|model| {
            let places = [&model["context"], &model["max_model_len"], &model["meta"]["n_ctx"]];
            places.into_iter().find_map(Value::as_u64)
        });
        self.context = self.context.or(context.map(|tokens| tokens as usize));
        Ok(())
    }

    /// Version of the server, where it tells it.
    pub fn version(&self) -> Option<String> {
        ["/version", "/api/version"].iter().find_map(|path| {
            let reply = self.get(&format!("{}{path}", self.root())).ok()?;
            reply["version"].as_str().map(str::to_owned)
        })
    }

    /// Whether `/health` says that the server is well; `None` if it has no such route.
    pub fn healthy(&self) -> Option<bool> {
        let reply = self.agent.get(format!("{}/health", self.root())).call();
        match reply.map(|reply| reply.status().as_u16()) {
            Ok(404 | 405) => None,
            Ok(status) => Some(status == 200),
            Err(_) => Some(false),
        }
    }

    /// Waits until the server lists its models.
    ///
    /// # Errors
    /// When it does not within `limit`.
    pub fn wait_until_ready(&self, limit: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            let reply = self.authorized(self.agent.get(format!("{}/models", self.base))).call();
            let problem = match reply {
                Ok(reply) if reply.status() == 200 => return Ok(()),
                Ok(reply) => format!("status {}", reply.status()),
                Err(error) => error.to_string(),
            };
            if start.elapsed() > limit {
                bail!("{} is not ready after {} s: {problem}", self.name, limit.as_secs());
            }
            std::thread::sleep(READY_INTERVAL);
        }
    }

    /// Sends a chat and reads the stream of its reply.
    ///
    /// # Errors
    /// When there is no stream: the connection fails, or the status is not 200. What happens later
    /// is part of the reply.
    pub fn chat(&self, chat: &Chat) -> Result<Reply, Failure> {
        let body = self.body(chat).to_string();
        let request = self.agent.post(format!("{}/chat/completions", self.base));
        let mut request = self.authorized(request).content_type("application/json");
        if let Some(profile) = &self.profile {
            request = request.header("X-Steersman-Profile", profile);
        }
        let start = Instant::now();
        let response = request.send(body).map_err(broken)?;
        let response = checked(response)?;
        let kind = response.headers().get("content-type");
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or("nothing").to_owned();
        if !kind.starts_with("text/event-stream") {
            let message = format!("the reply is {kind}, not a stream (text/event-stream)");
            return Err(Failure { status: None, message });
        }
        let lines = BufReader::new(response.into_body().into_reader());
        Ok(Reply::read(lines, || start.elapsed(), chat.hang_up_after))
    }

    fn body(&self, chat: &Chat) -> Value {
        let mut body = Map::new();
        let mut set = |name: &str, value: Value| body.insert(name.into(), value);
        set("model", json!(self.model));
        set("messages", json!(chat.messages));
        set("max_tokens", json!(chat.max_tokens));
        set("temperature", json!(0));
        set("stream", json!(true));
        set("stream_options", json!({"include_usage": true}));
        if !chat.tools.is_empty() {
            set("tools", json!(chat.tools));
        }
        if let Some(format) = &chat.format {
            set("response_format", format.clone());
        }
        match (self.thinking_field, chat.thinking) {
            (ThinkingField::Kwargs, Some(on)) => {
                set("chat_template_kwargs", json!({"enable_thinking": on}));
            }
            (ThinkingField::Effort, Some(on)) => {
                set("reasoning_effort", json!(if on { "low" } else { "none" }));
            }
            (ThinkingField::None, _) | (_, None) => {}
        }
        Value::Object(body)
    }

    /// A request with the key, if there is one.
    fn authorized<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        match &self.key {
            Some(key) => request.header("Authorization", format!("Bearer {key}")),
            None => request,
        }
    }

    fn get(&self, url: &str) -> Result<Value, Failure> {
        let request = self.authorized(self.agent.get(url));
        let mut response = checked(request.call().map_err(broken)?)?;
        let text = read(&mut response)?;
        serde_json::from_str(&text)
            .map_err(|_| Failure { status: None, message: format!("{url}: is not JSON") })
    }
}

fn broken(error: ureq::Error) -> Failure {
    Failure { status: None, message: error.to_string() }
}

fn read(response: &mut Response<Body>) -> Result<String, Failure> {
    let body = response.body_mut().with_config().limit(RESPONSE_BYTES);
    body.lossy_utf8(true).read_to_string().map_err(broken)
}

/// The response, if its status is 200.
fn checked(mut response: Response<Body>) -> Result<Response<Body>, Failure> {
    let status = response.status().as_u16();
    if status == 200 {
        return Ok(response);
    }
    let text = read(&mut response)?;
    let message = serde_json::from_str(&text).ok().and_then(|json: Value| error_of(&json));
    let message = message.unwrap_or_else(|| text.chars().take(200).collect());
    Err(Failure { status: Some(status), message })
}
