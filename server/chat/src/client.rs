//! The HTTP client: what answers at an address, the models of a server, and streamed replies.

use std::error::Error as _;
use std::fmt;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use futures_util::StreamExt;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use sse_stream::SseStream;

/// Time in which a connection must be opened.
const CONNECT: Duration = Duration::from_secs(10);

/// Time in which a server answers `/health`, which waits for nothing. Longer than a busy machine needs.
const HEALTH: Duration = Duration::from_secs(10);

/// Largest reply that is not streamed: a list of models or an error.
const BODY_BYTES: usize = 16 << 20;

/// Characters of an unexpected reply that errors repeat.
const QUOTED: usize = 200;

/// The header with the profile of a request.
const PROFILE: &str = "x-steersman-profile";

/// A running server. Follows no redirections, which could carry the key to another host.
#[derive(Clone)]
pub struct Client {
    http: HttpClient<HttpsConnector<HttpConnector>, Full<Bytes>>,
    url: String,
    key: Option<HeaderValue>,
    is_in_this_process: bool,
}

/// What answers at an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Presence {
    /// No Steersman server, or one that cannot serve or ends.
    Absent,
    /// A server that loads its models: the one that is loaded now, if it says so.
    Loading(Option<String>),
    /// A server that answers requests.
    Ready,
}

/// A response whose status is not success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The status of the response.
    pub status: StatusCode,
    /// The server's words.
    pub message: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status, self.message)
    }
}

impl std::error::Error for Refused {}

/// The port on which a server listens unless its configuration or `--port` says otherwise.
const PORT: u16 = 11436;

/// The address that `text` names, without a slash at its end.
fn address(text: &str) -> Result<String> {
    let wrong = || anyhow!("{text:?} is not an address: write it as http://HOST:PORT");
    let url = text.trim();
    if !url.is_empty() && url.bytes().all(|byte| byte.is_ascii_digit()) {
        // A port of this machine.
        return url
            .parse::<u16>()
            .map(|port| format!("http://127.0.0.1:{port}"))
            .map_err(|_| wrong());
    }
    let has_scheme = url.contains("://");
    let url = if has_scheme { url.to_owned() } else { format!("http://{url}") };
    let url = url.trim_end_matches('/').trim_end_matches("/v1").trim_end_matches('/');
    let uri: http::Uri = url.parse().map_err(|_| wrong())?;
    let authority = uri.authority().ok_or_else(wrong)?;
    let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
    // `http:/HOST` and `http//HOST` begin with a host of the name http.
    let is_slip = !has_scheme && ["http", "https"].contains(&authority.host());
    if !is_http || is_slip || authority.host().is_empty() || authority.as_str().ends_with(':') {
        return Err(wrong());
    }
    Ok(match (has_scheme, authority.port_u16()) {
        (false, None) => url.replacen(authority.as_str(), &format!("{authority}:{PORT}"), 1),
        _ => url.to_owned(),
    })
}

/// Why a server cannot be reached, without the words of the libraries that say so.
fn unreachable(error: &hyper_util::client::legacy::Error) -> String {
    let mut causes = std::iter::successors(error.source(), |cause| (*cause).source());
    let is_tls = |cause: &&(dyn std::error::Error + 'static)| {
        let text = cause.to_string();
        text.contains("InvalidContentType") || text.contains("corrupt message")
    };
    if causes.clone().any(|cause| is_tls(&cause)) {
        return "it does not speak TLS: begin the address with http://".into();
    }
    let io = causes.find_map(|cause| cause.downcast_ref::<std::io::Error>());
    match io.map(std::io::Error::kind) {
        Some(ErrorKind::ConnectionRefused) => {
            "no server answers there; start one with `steersman serve`, or name another address with --url".into()
        }
        Some(ErrorKind::TimedOut) => "no server answers there in time".into(),
        _ if error.is_connect() => {
            // The last cause is that of the system, such as a name without an address.
            let last = std::iter::successors(error.source(), |cause| (*cause).source()).last();
            format!("no server can be reached there: {}", last.map_or_else(String::new, |last| last.to_string()))
        }
        _ => "the connection broke before the reply".into(),
    }
}

/// The address at which programs on this machine find the server that listens on `host` and `port`.
pub fn url(host: &str, port: u16) -> String {
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) if address.is_unspecified() => format!("http://127.0.0.1:{port}"),
        Ok(IpAddr::V6(address)) if address.is_unspecified() => format!("http://[::1]:{port}"),
        Ok(IpAddr::V6(address)) => format!("http://[{address}]:{port}"),
        _ => format!("http://{host}:{port}"),
    }
}

/// A part of a reply.
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text of the answer.
    Answer(String),
    /// The reply has ended.
    End(End),
}

/// How a reply ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct End {
    /// `stop`, `length` or `tool_calls`.
    pub reason: String,
    /// Tokens of the reply, reasoning included.
    pub tokens: u64,
    /// Tokens of the reasoning.
    pub reasoning_tokens: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that were restored from saved state.
    pub cached_tokens: u64,
    /// What policies did, in words.
    pub notes: Vec<String>,
}

/// A streamed reply. Dropping it closes its connection, and the server stops the request.
pub struct Reply {
    events: SseStream<Incoming>,
    end: End,
    /// Pieces of one event, the next last.
    waiting: Vec<Piece>,
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").field("end", &self.end).finish_non_exhaustive()
    }
}

impl Client {
    /// A client of the server at `url`, with or without `/v1` at its end. Without `http://` before it, the port is
    /// [`PORT`] if it names none.
    ///
    /// # Errors
    /// If the address is not one of HTTP, or the key cannot be sent.
    pub fn new(url: &str, key: Option<&str>) -> Result<Self> {
        let url = address(url)?;
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_webpki_roots()
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let key = key.map(|key| {
            let mut value = HeaderValue::try_from(format!("Bearer {key}"))
                .context("the key has characters that a header cannot hold")?;
            value.set_sensitive(true);
            anyhow::Ok(value)
        });
        let http = HttpClient::builder(TokioExecutor::new()).build(connector);
        Ok(Self { http, url, key: key.transpose()?, is_in_this_process: false })
    }

    /// This client, of a server that is in this process: its address is of no use to anybody else.
    pub fn in_this_process(self) -> Self {
        Self { is_in_this_process: true, ..self }
    }

    /// Where the server is, for people.
    pub fn place(&self) -> String {
        match self.is_in_this_process {
            true => "in this process".into(),
            false => format!("at {}", self.url),
        }
    }

    /// The server's address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// What answers at the address. Does not send the key.
    pub async fn presence(&self) -> Presence {
        let health = async {
            let unknown = Self { key: None, ..self.clone() };
            let response = unknown.request(Method::GET, "/health", None, None).await.ok()?;
            unknown.json(response).await.ok()
        };
        let Ok(Some(health)) = tokio::time::timeout(HEALTH, health).await else {
            return Presence::Absent;
        };
        match health["status"].as_str() {
            Some("loading") => Presence::Loading(health["model"].as_str().map(str::to_owned)),
            // Other servers have a status, but no engines.
            Some("ok") if health["engines"].is_array() => Presence::Ready,
            _ => Presence::Absent,
        }
    }

    /// Names of the models, and `model@profile` for each profile but `default`.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses.
    pub async fn models(&self) -> Result<Vec<String>> {
        let response = self.send(Method::GET, "/v1/models", None, None).await?;
        let json = self.json(response).await?;
        let models = json["data"].as_array().into_iter().flatten();
        let names: Vec<_> =
            models.filter_map(|model| Some(model["id"].as_str()?.to_owned())).collect();
        if names.is_empty() {
            bail!("{} lists no model", self.url);
        }
        Ok(names)
    }

    /// Sends the chat request `body`, which becomes a streamed one.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses; with its message.
    pub async fn chat(&self, mut body: Value, profile: Option<&str>) -> Result<Reply> {
        body["stream"] = true.into();
        body["stream_options"]["include_usage"] = true.into();
        let response =
            self.send(Method::POST, "/v1/chat/completions", Some(&body), profile).await?;
        let events = SseStream::new(response.into_body());
        Ok(Reply { events, end: End::default(), waiting: Vec::new() })
    }

    /// A successful response.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        profile: Option<&str>,
    ) -> Result<Response<Incoming>> {
        let response = self.request(method, path, body, profile).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let json = self.json(response).await.with_context(|| status.to_string())?;
        bail!(Refused { status, message: message(&json) });
    }

    /// A response of any status.
    async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        profile: Option<&str>,
    ) -> Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key);
        }
        if let Some(profile) = profile {
            request = request.header(PROFILE, profile);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = request.body(Full::from(body)).context("this request cannot be sent")?;
        let response = self.http.request(request).await;
        response.map_err(|error| anyhow!("{}: {}", self.url, unreachable(&error)))
    }

    async fn json(&self, response: Response<Incoming>) -> Result<Value> {
        let body = Limited::new(response.into_body(), BODY_BYTES).collect().await;
        let body = body.map_err(|error| anyhow!(error)).with_context(|| self.url.clone())?;
        let body = body.to_bytes();
        serde_json::from_slice(&body).map_err(|_| {
            let text: String = String::from_utf8_lossy(&body).chars().take(QUOTED).collect();
            anyhow!("{} is not a server of this kind; it returned {text:?}", self.url)
        })
    }
}

impl Reply {
    /// The next piece; the last is [`Piece::End`].
    ///
    /// # Errors
    /// If the request fails, or the connection ends before the reply does.
    pub async fn next(&mut self) -> Result<Piece> {
        loop {
            if let Some(piece) = self.waiting.pop() {
                return Ok(piece);
            }
            let event =
                self.events.next().await.context("the connection ended before the reply")?;
            let event = event.map_err(|error| anyhow!("{error}")).context("reading the reply")?;
            // Comments keep the connection open.
            let Some(data) = event.data else { continue };
            if data == "[DONE]" {
                return Ok(Piece::End(std::mem::take(&mut self.end)));
            }
            let chunk = serde_json::from_str(&data).context("reading the reply")?;
            self.read(&chunk)?;
        }
    }

    fn read(&mut self, chunk: &Value) -> Result<()> {
        if !chunk["error"].is_null() {
            bail!("{}", message(chunk));
        }
        let choice = &chunk["choices"][0];
        let text =
            |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let delta = &choice["delta"];
        let reasoning = text(&delta["reasoning_content"]).or_else(|| text(&delta["reasoning"]));
        self.waiting.extend(text(&delta["content"]).map(Piece::Answer));
        self.waiting.extend(reasoning.map(Piece::Reasoning));
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.end.reason = reason.into();
        }
        let notes = chunk["steersman"]["notes"].as_array().into_iter().flatten();
        self.end.notes.extend(notes.filter_map(text));
        if let usage @ Value::Object(_) = &chunk["usage"] {
            let number = |value: &Value| value.as_u64().unwrap_or(0);
            self.end.tokens = number(&usage["completion_tokens"]);
            self.end.prompt_tokens = number(&usage["prompt_tokens"]);
            self.end.cached_tokens = number(&usage["prompt_tokens_details"]["cached_tokens"]);
            let details = &usage["completion_tokens_details"];
            self.end.reasoning_tokens = number(&details["reasoning_tokens"]);
        }
        Ok(())
    }
}

/// The message of an error; the whole of one in another form.
fn message(json: &Value) -> String {
    json["error"]["message"].as_str().map_or_else(|| json.to_string(), str::to_owned)
}
