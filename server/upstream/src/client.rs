//! HTTP with deadlines. Follows no redirections, which could carry the key to another host.
//!
//! # Why
//! The client that the server has for MCP servers and `chat` has for servers: `hyper` with `rustls`. A response that
//! is dropped closes its connection, so that the upstream stops at once.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use steersman_request::UpstreamFault;
use tokio::time::timeout;

use crate::config::{Protocol, UpstreamConfig};
use crate::fault::{Fault, Mask};

/// Most bytes of a response that is not streamed.
const BODY_BYTES: usize = 32 << 20;

/// Most bytes of an error's body that are read.
const ERROR_BYTES: usize = 64 << 10;

/// Most bytes of the head of a response.
const HEAD_BYTES: usize = 64 << 10;

/// Time in which the body of an error must arrive.
const ERROR_TIME: Duration = Duration::from_secs(5);

/// The version of Anthropic's API.
const ANTHROPIC_VERSION: HeaderValue = HeaderValue::from_static("2023-06-01");

/// Sends requests to one upstream, with its key.
pub struct Client {
    http: HttpClient<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// Address of the routes, without a slash at its end.
    base: String,
    headers: HeaderMap,
    mask: Mask,
}

impl Client {
    /// The client of an upstream whose address was checked.
    pub fn new(config: &UpstreamConfig, key: Option<SecretString>) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(config.connect_timeout()));
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_webpki_roots()
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let mut http = HttpClient::builder(TokioExecutor::new());
        http.http1_max_buf_size(HEAD_BYTES);
        let mut headers = HeaderMap::new();
        if let Some(key) = &key {
            let (name, text) = match config.protocol {
                Protocol::OpenAi => (AUTHORIZATION, format!("Bearer {}", key.expose_secret())),
                Protocol::Anthropic => {
                    (HeaderName::from_static("x-api-key"), key.expose_secret().to_string())
                }
            };
            // Checked when the key was read.
            if let Ok(mut value) = HeaderValue::from_str(&text) {
                value.set_sensitive(true);
                headers.insert(name, value);
            }
        }
        if config.protocol == Protocol::Anthropic {
            headers.insert("anthropic-version", ANTHROPIC_VERSION);
        }
        Self { http: http.build(connector), base: base(config), headers, mask: Mask::new(key) }
    }

    /// Removes the key from texts.
    pub fn mask(&self) -> &Mask {
        &self.mask
    }

    /// Sends `body`; returns a response of success, whose head came `within` this time.
    ///
    /// # Errors
    /// If the upstream cannot be reached, is too late, or refuses.
    pub async fn post(
        &self,
        path: &str,
        body: String,
        within: Duration,
    ) -> Result<Response<Incoming>, Fault> {
        let response = timeout(within, self.send(Method::POST, path, body.into())).await;
        let response = response.map_err(|_| late("no reply began", within))??;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(self.refusal(response).await)
    }

    /// The JSON at `path`.
    ///
    /// # Errors
    /// If the upstream cannot be reached, is too late, refuses, or sends no JSON.
    pub async fn get(&self, path: &str, within: Duration) -> Result<Value, Fault> {
        let json = async {
            let response = self.send(Method::GET, path, Bytes::new()).await?;
            match response.status().is_success() {
                true => self.json(response).await,
                false => Err(self.refusal(response).await),
            }
        };
        timeout(within, json).await.map_err(|_| late("no answer came", within))?
    }

    /// The JSON of a response.
    ///
    /// # Errors
    /// If it is none, or too large.
    pub async fn json(&self, response: Response<Incoming>) -> Result<Value, Fault> {
        let body = Limited::new(response.into_body(), BODY_BYTES).collect().await;
        let body = body.map_err(|error| self.broken(&*error))?.to_bytes();
        serde_json::from_slice(&body)
            .map_err(|error| Fault::protocol(format!("sent what is no JSON: {error}")))
    }

    /// The fault of a connection that broke.
    pub fn broken(&self, error: &(dyn std::error::Error + 'static)) -> Fault {
        let problem = format!("broke the connection: {}", self.mask.apply(&causes(error)));
        Fault::new(UpstreamFault::Unavailable, problem)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, Fault> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if !body.is_empty() {
            request = request
                .header(CONTENT_TYPE, "application/json")
                .header(ACCEPT, "text/event-stream, application/json");
        }
        let request = request.body(Full::new(body));
        let mut request =
            request.map_err(|error| Fault::protocol(format!("has no valid address: {error}")))?;
        request.headers_mut().extend(self.headers.clone());
        self.http.request(request).await.map_err(|error| {
            let what = if error.is_connect() { "cannot be reached" } else { "did not answer" };
            let problem = format!("{what}: {}", self.mask.apply(&causes(&error)));
            Fault::new(UpstreamFault::Unavailable, problem)
        })
    }

    /// The fault of a response without success.
    async fn refusal(&self, response: Response<Incoming>) -> Fault {
        let (status, retry_after) = (response.status(), retry_after(response.headers()));
        let body = Limited::new(response.into_body(), ERROR_BYTES).collect();
        let body = match timeout(ERROR_TIME, body).await {
            Ok(Ok(body)) => body.to_bytes(),
            _ => Bytes::new(),
        };
        Fault::of_response(status, &body, retry_after, &self.mask)
    }
}

/// An error and its causes.
pub fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// The fault of an upstream that was too slow.
pub fn late(what: &str, within: Duration) -> Fault {
    let seconds = within.as_secs_f64();
    Fault::new(UpstreamFault::TimedOut, format!("took too long: {what} within {seconds:.0} s"))
}

/// The address before `/chat/completions` or `/v1/messages`.
fn base(config: &UpstreamConfig) -> String {
    let url = config.url.trim_end_matches('/');
    let has_path = config.uri().is_some_and(|uri| !uri.path().trim_matches('/').is_empty());
    match config.protocol {
        Protocol::OpenAi if has_path => url.to_string(),
        Protocol::OpenAi => format!("{url}/v1"),
        Protocol::Anthropic => url.trim_end_matches("/v1").to_string(),
    }
}

/// The time that a response asks to wait.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    let milliseconds = text("retry-after-ms").and_then(|text| text.parse::<f64>().ok());
    if let Some(milliseconds) = milliseconds {
        return Duration::try_from_secs_f64(milliseconds / 1000.0).ok();
    }
    let text = text(RETRY_AFTER.as_str())?;
    match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => {
            let at = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
            Some(at.duration_since(jiff::Timestamp::now()).try_into().unwrap_or_default())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_an_upstream_may_end_in_its_version_or_not() {
        let check = |url: &str, protocol| {
            base(&UpstreamConfig { url: url.into(), protocol, ..UpstreamConfig::default() })
        };
        assert_eq!(check("http://h:1", Protocol::OpenAi), "http://h:1/v1");
        assert_eq!(check("http://h:1/", Protocol::OpenAi), "http://h:1/v1");
        assert_eq!(check("https://h/v1beta/openai/", Protocol::OpenAi), "https://h/v1beta/openai");
        assert_eq!(check("https://h", Protocol::Anthropic), "https://h");
        assert_eq!(check("https://h/v1/", Protocol::Anthropic), "https://h");
    }

    #[test]
    fn the_time_to_wait_is_read_in_every_form() {
        let check = |name: &'static str, text: &str| {
            let headers = [(HeaderName::from_static(name), HeaderValue::from_str(text).unwrap())];
            retry_after(&headers.into_iter().collect())
        };
        assert_eq!(check("retry-after", "7"), Some(Duration::from_secs(7)));
        assert_eq!(check("retry-after-ms", "1500"), Some(Duration::from_millis(1500)));
        assert_eq!(check("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert_eq!(check("retry-after", "soon"), None);
        assert_eq!(check("retry-after", "-3"), None);
    }
}
