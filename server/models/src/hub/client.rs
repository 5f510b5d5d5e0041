//! Requests to a hub, within limits of time and size. Whatever the hub answers, a request ends.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ureq::http::{HeaderMap, Uri, header};
use ureq::{Agent, Body};

use super::Hub;

/// Most redirects of a request.
const REDIRECTS: usize = 10;

/// Most bytes of the headers of a reply.
const HEADER_BYTES: usize = 64 << 10;

/// How long a request may take.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// Until a host name has its addresses, and until a connection is open.
    pub connect: Duration,
    /// Until the head of a reply is here, and between two pieces of its body.
    pub silence: Duration,
    /// Until a reply that describes a repo is here.
    pub list: Duration,
    /// Time in which a download makes at least [`LEAST_BYTES`].
    pub window: Duration,
    /// Before the first retry of a download; the second waits twice as long.
    pub retry: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(30),
            silence: Duration::from_secs(60),
            list: Duration::from_secs(120),
            window: Duration::from_secs(60),
            retry: Duration::from_millis(500),
        }
    }
}

/// Bytes that a download gets at least in each [`Times::window`].
const LEAST_BYTES: u64 = 32 << 10;

/// Why a request to a hub failed.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The status of the reply.
    #[error("the hub answers with the status {0}")]
    Status(u16),
    /// The request or the connection failed.
    #[error("request error: {0}")]
    Request(Box<ureq::Error>),
    /// The body ended early or stalled.
    #[error("the connection failed: {0}")]
    Connection(#[source] io::Error),
    /// The body is not what the hub promised.
    #[error("{0}")]
    Promise(String),
    /// A file of the cache cannot be written.
    #[error("writing to the cache: {0}")]
    Cache(#[source] io::Error),
    /// [`Stop::stop`] was called.
    #[error("the download was stopped")]
    Stopped,
    /// As much has arrived as was wanted.
    #[error("enough bytes have arrived")]
    Enough,
}

impl HubError {
    /// Whether the same request may succeed now.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Status(status) => *status >= 500,
            Self::Request(_) | Self::Connection(_) => true,
            Self::Promise(_) | Self::Cache(_) | Self::Stopped | Self::Enough => false,
        }
    }
}

/// Whether `error` is that the disk is full.
pub fn is_disk_full(error: &anyhow::Error) -> bool {
    let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
    let is_full = |error: &io::Error| full.contains(&error.kind());
    error.chain().any(|cause| cause.downcast_ref().is_some_and(is_full))
}

/// Stops a download from another thread, at once.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    stopped: AtomicBool,
    /// Those whose connections are to end.
    agents: Mutex<Vec<Agent>>,
}

impl Stop {
    /// Ends the download, now and for good.
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::SeqCst);
        self.0.agents.lock().drain(..).for_each(Agent::shutdown);
    }

    /// Whether [`Stop::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        self.0.stopped.load(Ordering::SeqCst)
    }

    fn add(&self, agent: &Agent) {
        self.0.agents.lock().push(agent.clone());
        if self.is_stopped() {
            self.stop();
        }
    }
}

/// A client of one hub.
pub struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    times: Times,
    stop: Stop,
}

/// The beginning of a reply.
pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Body,
}

impl Client {
    /// A client of `hub` that `stop` ends.
    pub fn new(hub: &Hub, times: Times, stop: &Stop) -> Self {
        let agent: Agent = Agent::config_builder()
            .http_status_as_error(false)
            // Redirects are followed below: the token goes to the hub only.
            .max_redirects(0)
            .accept_encoding("identity")
            .user_agent(concat!("steersman/", env!("CARGO_PKG_VERSION")))
            .max_response_header_size(HEADER_BYTES)
            .timeout_resolve(Some(times.connect))
            .timeout_connect(Some(times.connect))
            .timeout_recv_response(Some(times.silence))
            .timeout_per_read(Some(times.silence))
            .build()
            .into();
        stop.add(&agent);
        let endpoint = hub.endpoint.trim_end_matches('/').to_string();
        Self { agent, endpoint, token: hub.token.clone(), times, stop: stop.clone() }
    }

    /// The body of the reply to `path`, of at most `limit` bytes, also when they are unpacked.
    ///
    /// # Errors
    /// If the hub does not answer with 200 in time, or with more bytes.
    pub fn get_whole(&self, path: &str, limit: u64) -> Result<Vec<u8>, HubError> {
        let mut reply = self.get(path, None, Some(self.times.list))?;
        if reply.status != 200 {
            return Err(HubError::Status(reply.status));
        }
        let mut bytes = Vec::new();
        let mut body = reply.body.as_reader().take(limit + 1);
        body.read_to_end(&mut bytes).map_err(|error| self.connection(error))?;
        if bytes.len() as u64 > limit {
            let problem = format!("the hub's answer has more than {limit} bytes");
            return Err(HubError::Promise(problem));
        }
        Ok(bytes)
    }

    /// The reply to `path`, from byte `from` on, after redirects.
    ///
    /// # Errors
    /// If there is none, or it leads elsewhere too often.
    pub fn get_from(&self, path: &str, from: u64) -> Result<Reply, HubError> {
        self.get(path, Some(from), None)
    }

    fn get(
        &self,
        path: &str,
        from: Option<u64>,
        within: Option<Duration>,
    ) -> Result<Reply, HubError> {
        let bad_address =
            |text: &str| HubError::Promise(format!("`{}` is no address", text.escape_debug()));
        let home: Uri = self.endpoint.parse().map_err(|_| bad_address(&self.endpoint))?;
        let url = format!("{}{path}", self.endpoint);
        let mut url: Uri = url.parse().map_err(|_| bad_address(&url))?;
        let end = within.map(|within| Instant::now() + within);
        for _ in 0..=REDIRECTS {
            if self.stop.is_stopped() {
                return Err(HubError::Stopped);
            }
            let mut request = self.agent.get(&url);
            if let Some(token) = self.token.as_ref().filter(|_| is_same_server(&home, &url)) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some(from) = from {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            if let Some(end) = end {
                let left = end.saturating_duration_since(Instant::now());
                request = request.config().timeout_global(Some(left)).build();
            }
            let reply = request.call().map_err(|error| self.request(error))?;
            let (head, body) = reply.into_parts();
            let status = head.status.as_u16();
            let to = head.headers.get(header::LOCATION);
            let Some(to) = to.filter(|_| matches!(status, 301 | 302 | 303 | 307 | 308)) else {
                return Ok(Reply { status, headers: head.headers, body });
            };
            let text = to.to_str().unwrap_or_default();
            let next = resolve(&url, text).ok_or_else(|| bad_address(text))?;
            if url.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
                let problem = format!("the hub redirects to `{next}`, which is not encrypted");
                return Err(HubError::Promise(problem));
            }
            url = next;
        }
        Err(HubError::Promise(format!("the hub redirects more than {REDIRECTS} times")))
    }

    /// Reads `body` to its end, `limit` bytes at most, and gives the pieces to `take`.
    ///
    /// # Errors
    /// Those of `take`; if the connection fails, is silent or too slow; [`HubError::Promise`] if there are more bytes.
    pub fn read(
        &self,
        body: &mut Body,
        limit: u64,
        take: &mut dyn FnMut(&[u8]) -> Result<(), HubError>,
    ) -> Result<(), HubError> {
        let mut bytes = vec![0; 256 << 10];
        let (mut left, mut reader) = (limit, body.as_reader());
        let (mut since, mut arrived) = (Instant::now(), 0);
        loop {
            let read = reader.read(&mut bytes).map_err(|error| self.connection(error))?;
            if self.stop.is_stopped() {
                return Err(HubError::Stopped);
            }
            if read == 0 {
                return Ok(());
            }
            let promised = || format!("the hub sends more than the {limit} bytes that it promised");
            left = left.checked_sub(read as u64).ok_or_else(|| HubError::Promise(promised()))?;
            take(&bytes[..read])?;
            arrived += read as u64;
            if since.elapsed() >= self.times.window {
                if arrived < LEAST_BYTES {
                    let problem = format!("only {arrived} bytes in {:?}", since.elapsed());
                    return Err(HubError::Connection(io::Error::new(
                        io::ErrorKind::TimedOut,
                        problem,
                    )));
                }
                (since, arrived) = (Instant::now(), 0);
            }
        }
    }

    /// Waits before retry `number`, which begins at 1.
    ///
    /// # Errors
    /// [`HubError::Stopped`]
    pub fn pause(&self, number: usize) -> Result<(), HubError> {
        const LOOK_EVERY: Duration = Duration::from_millis(50);
        let end = Instant::now() + self.times.retry * u32::try_from(number).unwrap_or(1);
        while Instant::now() < end && !self.stop.is_stopped() {
            std::thread::sleep(LOOK_EVERY.min(end.saturating_duration_since(Instant::now())));
        }
        self.refuse_if_stopped()
    }

    /// Ends what takes long without a request.
    ///
    /// # Errors
    /// [`HubError::Stopped`]
    pub fn refuse_if_stopped(&self) -> Result<(), HubError> {
        if self.stop.is_stopped() { Err(HubError::Stopped) } else { Ok(()) }
    }

    fn request(&self, error: ureq::Error) -> HubError {
        if self.stop.is_stopped() { HubError::Stopped } else { HubError::Request(Box::new(error)) }
    }

    fn connection(&self, error: io::Error) -> HubError {
        if self.stop.is_stopped() { HubError::Stopped } else { HubError::Connection(error) }
    }
}

/// Whether two addresses have one scheme, host and port.
fn is_same_server(a: &Uri, b: &Uri) -> bool {
    let server = |uri: &Uri| {
        let port = uri.port_u16().or(match uri.scheme_str() {
            Some("https") => Some(443),
            _ => Some(80),
        });
        (uri.scheme_str().map(str::to_lowercase), uri.host().map(str::to_lowercase), port)
    };
    server(a) == server(b)
}

/// The address that `to` means on the page `from`; `None` if it is none for HTTP.
fn resolve(from: &Uri, to: &str) -> Option<Uri> {
    let (scheme, authority) = (from.scheme_str()?, from.authority()?);
    let is_scheme =
        |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric());
    let text = if to.split_once("://").is_some_and(|(begin, _)| is_scheme(begin)) {
        to.to_string()
    } else if to.starts_with("//") {
        format!("{scheme}:{to}")
    } else if to.starts_with('/') {
        format!("{scheme}://{authority}{to}")
    } else {
        let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{to}")
    };
    let uri: Uri = text.parse().ok()?;
    matches!(uri.scheme_str()?, "http" | "https").then_some(uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_to_addresses_of_http_only() {
        let from: Uri = "https://hub.test/a/b?c".parse().unwrap();
        for (to, expected) in [
            ("/x", Some("https://hub.test/x")),
            ("x?y=://", Some("https://hub.test/a/x?y=://")),
            ("//cdn.test/x", Some("https://cdn.test/x")),
            ("http://cdn.test/x", Some("http://cdn.test/x")),
            ("file:///etc/passwd", None),
            ("ftp://cdn.test/x", None),
        ] {
            let found = resolve(&from, to).map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), expected, "{to}");
        }
    }

    #[test]
    fn the_token_is_for_the_server_of_the_hub() {
        let home: Uri = "https://hub.test".parse().unwrap();
        for (url, expected) in [
            ("https://hub.test/a", true),
            ("https://HUB.test:443/a", true),
            ("http://hub.test/a", false),
            ("https://hub.test:444/a", false),
            ("https://hub.test.evil/a", false),
            ("https://hub.test@evil/a", false),
        ] {
            assert_eq!(is_same_server(&home, &url.parse().unwrap()), expected, "{url}");
        }
    }
}
