//! Errors: a status, and JSON in the format of the protocol whose path was called.
//!
//! A client error explains the problem and names the field. Details of a server error go to the log
//! only.

mod body;

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use steersman_engine::policy::nearest;
use steersman_engine::request::UpstreamFault;
use steersman_engine::{Error, RequestError, policy};

pub use self::body::{AnthropicError, Dialect, ErrorBody, OllamaError, OpenAiError};
use crate::keys::{Key, State};
use crate::models::Refusal;
use crate::words::suggestion;

/// `Retry-After` of a 429 and of the errors in [`PASSING`], in seconds.
const RETRY_AFTER_SECONDS: u32 = 2;

/// Longest `Retry-After` for which clients of OpenAI and Anthropic wait by themselves, in seconds. After a longer one they repeat
/// the request at once, unless [`SHOULD_RETRY`] tells them not to.
const PATIENCE_S: u32 = 60;

/// Whether a client should repeat the request by itself: the packages of OpenAI and Anthropic obey this header.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// `code` of errors for lack of room.
const NO_ROOM: &str = "server_busy";

/// `code` of errors of upstreams that are overloaded or cannot be reached.
const UPSTREAM_UNAVAILABLE: &str = "upstream_unavailable";

/// `code` of errors while the models are loaded, and while the server stops.
const LOADING: &str = "server_loading";
const STOPPING: &str = "server_stopping";

/// `code` of errors when a process has ended that computes a part of the model.
const RANK_LOST: &str = "rank_lost";

/// `code` of errors with status 503 that pass without a change by anyone.
const PASSING: [&str; 5] = [NO_ROOM, UPSTREAM_UNAVAILABLE, LOADING, STOPPING, RANK_LOST];

/// `code` of errors about a key that has expired.
pub const KEY_EXPIRED: &str = "key_expired";

/// `code` of refusals by policies.
pub const REFUSED_BY_POLICY: &str = "refused_by_policy";

/// `code` of errors about keys that were revoked.
pub const KEY_REVOKED: &str = "key_revoked";

/// `code` of errors about prompts that do not fit.
const TOO_LONG: &str = "context_length_exceeded";

/// `type` of errors that the client can fix.
const INVALID: &str = "invalid_request_error";

/// Most bytes of a message and of a path: both quote what the client sent.
const MESSAGE_BYTES: usize = 4096;
const PARAM_BYTES: usize = 512;

/// The schema of a tool, as the engine names it in errors.
const TOOL_SCHEMA: &str = "function.parameters";

/// An error for the client.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// HTTP status; not used in the middle of a stream.
    pub status: StatusCode,
    /// `type`
    pub kind: &'static str,
    /// `code`: identifies the error for programs.
    pub code: &'static str,
    /// `param`: path of the field, as `messages[1].content`.
    pub param: Option<String>,
    /// `message`: explains the error to people.
    pub message: String,
    /// `request_id`: that of the HTTP request; empty if there is none.
    pub request_id: String,
    /// Whether it is about the prompt of a request, which each protocol sends in another field.
    pub is_about_prompt: bool,
    /// Seconds after which the client may try again, if somebody said so.
    pub retry_after_s: Option<u32>,
    /// Whether a repeated request would be refused as well, so that clients which repeat a 429 by themselves should not.
    pub is_final: bool,
}

/// Names that other APIs have for a field, the most general name first. Whoever leaves such a field out loses what it asks for.
const SAME_MEANING: [&[&str]; 7] = [
    &["reasoning_effort", "reasoning", "thinking", "think", "enable_thinking"],
    &["max_thinking_tokens", "thinking_budget", "budget_tokens", "thinking_budget_tokens"],
    &["max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"],
    &["stop", "stop_sequences"],
    &["messages", "input", "prompt"],
    &["instructions", "system"],
    &["parameters", "input_schema", "inputSchema"],
];

impl ApiError {
    /// An invalid request; `param` is the field, or empty.
    pub fn invalid(
        code: &'static str,
        param: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, code, param, message)
    }

    /// A value out of range.
    pub fn value(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid("invalid_value", param, message)
    }

    /// A field that is not known, at `path`; `known` are the names of those beside it.
    pub fn unknown_field<'a>(
        path: impl Into<String>,
        known: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let path = path.into();
        let name = path.rsplit_once('.').map_or(path.as_str(), |(_, name)| name);
        let known: Vec<_> = known.into_iter().collect();
        let same = SAME_MEANING.iter().filter(|names| names.contains(&name));
        let same = same.flat_map(|names| *names).find(|other| known.contains(other));
        let message = match (same, nearest(name, known.iter().copied())) {
            (Some(same), _) => {
                format!("`{path}` is an unknown field; this route has `{same}` for it")
            }
            (None, Some(near)) => format!("`{path}` is an unknown field; did you mean `{near}`?"),
            (None, None) => format!("`{path}` is an unknown field; leave it out"),
        };
        Self::invalid("unknown_parameter", path, message)
    }

    /// This error about an unknown field, which names `others` as well, so that a body is mended at once.
    pub fn and_unknown<'a>(
        mut self,
        others: impl Iterator<Item = &'a String>,
        known: impl Iterator<Item = &'a str> + Clone,
    ) -> Self {
        for other in others {
            let Self { message, .. } = Self::unknown_field(other, known.clone());
            self.message = cut(format!("{}. {message}", self.message), MESSAGE_BYTES);
        }
        self
    }

    /// A known but unsupported field or value.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid("unsupported_parameter", param, message)
    }

    /// A field that is missing.
    pub fn missing(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid("missing_required_parameter", param, message)
    }

    /// A profile that does not exist.
    pub fn profile_not_found<'a>(profile: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        let near = suggestion(profile, known);
        let message = format!("there is no profile `{profile}`; see GET /v1/models{near}");
        let (code, param) = ("profile_not_found", "X-Steersman-Profile");
        Self::new(StatusCode::NOT_FOUND, INVALID, code, param, message)
    }

    /// A model that is not served.
    pub fn model_not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, INVALID, "model_not_found", "model", message)
    }

    /// An unknown path.
    pub fn no_route(method: &str, path: &str) -> Self {
        let advice = match path.strip_prefix("/v1/v1/") {
            Some(_) => {
                "the client adds `/v1` itself, so leave that out there; GET /docs lists all routes"
            }
            None => "GET /docs lists all routes",
        };
        let message = format!(
            "this server has no route {method} {path}; check the client's base URL ({advice})"
        );
        Self::new(StatusCode::NOT_FOUND, INVALID, "route_not_found", "", message)
    }

    /// A stored response that does not exist.
    pub fn response_not_found(param: &str, id: &str) -> Self {
        let message = format!(
            "there is no response `{id}`: it was never stored, was deleted, or is older than \
             server.responses_days"
        );
        Self::new(StatusCode::NOT_FOUND, INVALID, "response_not_found", param, message)
    }

    /// A known path with a wrong method.
    pub fn method_not_allowed(method: &str, path: &str) -> Self {
        let message = format!("{path} does not support {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed", "", message)
    }

    /// A missing or wrong key.
    pub fn unauthorized() -> Self {
        let message = "the key is missing or wrong: send `Authorization: Bearer KEY` or `x-api-key: KEY`, \
                       with one of the api_keys of the server's configuration or one that \
                       `steersman keys create` made";
        let kind = "authentication_error";
        Self::new(StatusCode::UNAUTHORIZED, kind, "invalid_api_key", "", message)
    }

    /// A key that nobody has, on a server that answers requests without a key, but has profiles with keys.
    pub fn unknown_key() -> Self {
        let message = "this server does not know the key, and some of its profiles have keys: correct the key, or leave \
                       it out (clients that must send one send `none`) for the profiles without keys";
        let kind = "authentication_error";
        Self::new(StatusCode::UNAUTHORIZED, kind, "invalid_api_key", "", message)
    }

    /// A key that has expired, was revoked, or whose time has not come by the machine's clock.
    pub fn key_ended(key: &Key) -> Self {
        let name = &key.name;
        let kind = "authentication_error";
        if let Some(revoked) = key.revoked {
            let message = format!(
                "the key `{name}` was revoked at {revoked:.0}: ask an operator of this server for another"
            );
            return Self::new(StatusCode::UNAUTHORIZED, kind, KEY_REVOKED, "", message);
        }
        let message = match (key.state_at(Timestamp::now()), key.expires) {
            (State::NotYet, _) => format!(
                "the key `{name}` was created at {:.0}, long after what the server's clock says: set the clock",
                key.created
            ),
            (_, Some(expires)) => format!(
                "the key `{name}` has expired at {expires:.0}: ask an operator of this server for another \
                 (`steersman keys create`, or the console)"
            ),
            (_, None) => format!("the key `{name}` has expired"),
        };
        Self::new(StatusCode::UNAUTHORIZED, kind, KEY_EXPIRED, "", message)
    }

    /// A key that does not open the profile.
    pub fn forbidden(message: impl Into<String>) -> Self {
        let kind = "permission_error";
        Self::new(StatusCode::FORBIDDEN, kind, "profile_not_allowed", "", message)
    }

    /// Too many concurrent requests.
    pub fn busy(message: impl Into<String>) -> Self {
        let (status, kind) = (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error");
        Self::new(status, kind, "too_many_requests", "", message)
    }

    /// A `Host` that is not a name of this server.
    pub fn host_not_allowed(host: &str) -> Self {
        let message = format!(
            "the host `{host}` is not a name of this server; its operator can add it to server.hosts"
        );
        Self::new(StatusCode::FORBIDDEN, "permission_error", "host_not_allowed", "Host", message)
    }

    /// An `Origin` that may not use this server.
    pub fn origin_not_allowed(origin: &str) -> Self {
        let message = format!(
            "web pages of the origin `{origin}` may not use this server; its operator can add it \
             to server.cors"
        );
        let (kind, code) = ("permission_error", "origin_not_allowed");
        Self::new(StatusCode::FORBIDDEN, kind, code, "Origin", message)
    }

    /// No room for a large body.
    pub fn over_budget() -> Self {
        Self::no_room("the server has no room for a body of this size now; try again later")
    }

    /// No room for a connection.
    pub fn too_many_connections() -> Self {
        Self::no_room("the server has too many connections; try again later")
    }

    fn no_room(message: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", NO_ROOM, "", message)
    }

    /// The server has started, and is at this stage of loading.
    pub fn loading(stage: Option<&str>) -> Self {
        let stage = stage.unwrap_or("loading its models");
        let message = format!("the server is not ready yet: {stage}; repeat the request later");
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self::new(status, "server_error", LOADING, "", message)
    }

    /// A model that is served, but whose files are not here.
    pub fn model_missing(message: impl Into<String>) -> Self {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self::new(status, "server_error", "model_not_downloaded", "model", message)
    }

    /// A download that the hub or the network ended.
    pub fn download_failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "server_error", "download_failed", "model", message)
    }

    /// A search that the hub did not answer.
    pub fn hub_failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "server_error", "hub_failed", "", message)
    }

    /// A stop of a download while none runs.
    pub fn no_pull() -> Self {
        let message = "no download is running";
        Self::new(StatusCode::NOT_FOUND, INVALID, "no_pull", "", message)
    }

    /// A download that the disk has no room for.
    pub fn disk_full(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INSUFFICIENT_STORAGE, "server_error", "disk_full", "model", message)
    }

    /// The server stops before the reply is complete.
    pub fn stopping() -> Self {
        let message = "the server is stopping; repeat the request when it runs again";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self::new(status, "server_error", STOPPING, "", message)
    }

    /// A process has ended that computes a part of the model.
    pub fn rank_lost() -> Self {
        let message = "a rank that computes the model has ended, and all are started again; repeat the request later";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self::new(status, "server_error", RANK_LOST, "", message)
    }

    /// A request is being prepared for so long that others may wait behind it for ever.
    pub fn not_advancing(time: Duration) -> Self {
        let seconds = time.as_secs();
        let message = format!(
            "a request has been prepared for {seconds} s; restart the server if this goes on"
        );
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self::new(status, "server_error", "server_not_advancing", "", message)
    }

    /// Another protocol than HTTP/1.
    pub fn not_http_1() -> Self {
        let message = "this server speaks HTTP/1.1 only, without TLS";
        let status = StatusCode::HTTP_VERSION_NOT_SUPPORTED;
        Self::new(status, INVALID, "http_version_not_supported", "", message)
    }

    /// An error of which only the status and a text are known.
    pub fn of_status(status: StatusCode, text: &str) -> Self {
        let (kind, code) = if status.is_client_error() {
            (INVALID, "invalid_request")
        } else {
            ("server_error", "internal_error")
        };
        Self::new(status, kind, code, "", text)
    }

    /// An operation for operators, without one of their keys.
    pub fn not_an_operator() -> Self {
        let message = "an operator's key is required: send `Authorization: Bearer KEY`, with a key that \
                       `steersman keys create NAME --operator` makes, or one of server.admin_keys (`steersman \
                       policy` takes it from STEERSMAN_ADMIN_KEY or --key)";
        let kind = "authentication_error";
        Self::new(StatusCode::UNAUTHORIZED, kind, "invalid_admin_key", "", message)
    }

    /// The token of another link than this server's, or of one that was used.
    pub fn link_refused() -> Self {
        let message = "the link is not one of this server, or was used before: links work once, until the server \
                       ends. Restart the server for another, or create a key with \
                       `steersman keys create NAME --operator`";
        let kind = "authentication_error";
        Self::new(StatusCode::UNAUTHORIZED, kind, "invalid_link", "", message)
    }

    /// An operation for operators, on a server without operators.
    pub fn no_operators() -> Self {
        let message = "an operator's key is required, but this server has none: create one with \
                       `steersman keys create NAME --operator`, or set server.admin_keys in its configuration";
        Self::new(StatusCode::FORBIDDEN, "permission_error", "admin_keys_not_set", "", message)
    }

    /// A policy that no profile uses.
    pub fn policy_not_found<'a>(policy: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        let near = suggestion(policy, known);
        let message = format!("no profile uses a policy `{policy}`; see GET /v1/policies{near}");
        Self::new(StatusCode::NOT_FOUND, INVALID, "policy_not_found", "", message)
    }

    /// A component that is not activated.
    pub fn policy_refused(message: impl Into<String>) -> Self {
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        Self::new(status, INVALID, "policy_refused", "", message)
    }

    /// A component whose compiler was ended by something else.
    pub fn policy_not_compiled(message: impl Into<String>) -> Self {
        let message = format!("{}; upload it again", message.into());
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self::new(status, "server_error", "policy_not_compiled", "", message)
    }

    /// A request that a policy refuses with this status, 400 to 499. If it says when the request may be repeated, clients
    /// may wait for that themselves up to [`PATIENCE_S`]; otherwise nothing but time or the sender changes its answer.
    fn refused_by_policy(status: u16, message: String, retry_after_s: Option<u32>) -> Self {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::FORBIDDEN);
        let kind = match status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            _ => INVALID,
        };
        let is_final = retry_after_s.is_none_or(|seconds| seconds > PATIENCE_S);
        Self { retry_after_s, is_final, ..Self::new(status, kind, REFUSED_BY_POLICY, "", message) }
    }

    /// An upstream that did not answer.
    fn of_upstream(fault: UpstreamFault, retry_after_s: Option<u64>, message: String) -> Self {
        let (status, kind, code) = match fault {
            UpstreamFault::Busy => {
                (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "upstream_busy")
            }
            UpstreamFault::Unavailable => {
                (StatusCode::SERVICE_UNAVAILABLE, "server_error", UPSTREAM_UNAVAILABLE)
            }
            UpstreamFault::Failed => (StatusCode::BAD_GATEWAY, "server_error", "upstream_failed"),
            UpstreamFault::TimedOut => {
                (StatusCode::GATEWAY_TIMEOUT, "server_error", "upstream_timed_out")
            }
        };
        let retry_after_s = retry_after_s.and_then(|seconds| u32::try_from(seconds).ok());
        Self { retry_after_s, ..Self::new(status, kind, code, "", message) }
    }

    /// An operation that the current state does not allow.
    pub fn conflict(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, INVALID, code, "", message)
    }

    /// A request that is not listed.
    pub fn no_request(request: &str) -> Self {
        let message = format!(
            "there is no request `{request}`: use the `id` of its reply; GET /v1/requests lists those that run, \
             and the newest ones that have ended"
        );
        Self::new(StatusCode::NOT_FOUND, INVALID, "request_not_found", "", message)
    }

    /// A request without a trace.
    pub fn no_trace(request: &str) -> Self {
        let message = format!(
            "there is no trace of a request `{request}`: use the `id` of its reply; only the newest \
             policy.trace_requests requests have one"
        );
        Self::new(StatusCode::NOT_FOUND, INVALID, "trace_not_found", "", message)
    }

    /// A body larger than `limit` bytes, the value of the configuration key `key`.
    pub fn too_large(limit: usize, key: &str) -> Self {
        let message = format!("the body is larger than {limit} bytes, the limit {key}");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, "request_too_large", "", message)
    }

    /// A body that did not arrive in time.
    pub fn too_slow(seconds: u64) -> Self {
        let message = format!("the body did not arrive within {seconds} s (server.body_timeout_s)");
        Self::new(StatusCode::REQUEST_TIMEOUT, INVALID, "request_timeout", "", message)
    }

    /// A body with a wrong content type.
    pub fn not_of_type(content_type: &str) -> Self {
        let message = format!("send the body with the header `Content-Type: {content_type}`");
        let code = "unsupported_media_type";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, code, "", message)
    }

    /// A body that is compressed, or encoded in another way.
    pub fn encoded() -> Self {
        let message =
            "no Content-Encoding is supported; send the body as it is, without this header";
        let code = "unsupported_media_type";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, code, "", message)
    }

    fn new(
        status: StatusCode,
        kind: &'static str,
        code: &'static str,
        param: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        let param = Some(cut(param.into(), PARAM_BYTES)).filter(|param| !param.is_empty());
        let (message, request_id) = (cut(message.into(), MESSAGE_BYTES), String::new());
        Self {
            status,
            kind,
            code,
            param,
            message,
            request_id,
            is_about_prompt: false,
            retry_after_s: None,
            is_final: false,
        }
    }

    /// An error about the prompt of a request; [`Self::in_fields`] names its field.
    fn about_prompt(code: &'static str, message: String) -> Self {
        Self { is_about_prompt: true, ..Self::invalid(code, "", message) }
    }

    /// This error of the engine with the names of the client's fields: `prompt` has the prompt, and `tools` have
    /// the schemas of the request's tools.
    #[must_use]
    pub fn in_fields(mut self, prompt: &str, tools: &[String]) -> Self {
        if self.is_about_prompt {
            self.param = Some(prompt.into());
        }
        let Some(path) = &self.param else { return self };
        let found = tools.iter().enumerate().find_map(|(index, field)| {
            let own = format!("tools[{index}].{TOOL_SCHEMA}");
            let rest = path.strip_prefix(&own)?;
            rest.is_empty().then_some(()).or_else(|| rest.starts_with(['.', '[']).then_some(()))?;
            Some((own, format!("{field}{rest}"), field))
        });
        if let Some((own, param, field)) = found {
            if let Some(rest) = self.message.strip_prefix(&own) {
                self.message = format!("{field}{rest}");
            }
            self.param = Some(param);
        }
        self
    }

    /// The response in the format of `dialect`.
    pub fn respond(&self, dialect: Dialect) -> Response {
        let mut response = (self.status, Json(self.body(dialect))).into_response();
        let headers = response.headers_mut();
        let is_passing =
            self.status == StatusCode::TOO_MANY_REQUESTS || PASSING.contains(&self.code);
        let soon = (is_passing && !self.is_final).then_some(RETRY_AFTER_SECONDS);
        if let Some(seconds) = self.retry_after_s.or(soon) {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.is_final {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// `text`, cut to so many bytes.
fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text.push('…');
    }
    text
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let unavailable = |code, message: String| {
            Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", code, "", message)
        };
        match refusal {
            Refusal::Absent { ref model, ref problem } => {
                tracing::error!(model, problem, "model is not ready");
                Self::model_missing(format!(
                    "{refusal}; an operator can download them (POST /v1/models/pull)"
                ))
            }
            Refusal::TooLarge { .. } => {
                unavailable("out_of_memory", format!("{refusal} (server.models_bytes)"))
            }
            Refusal::NoRoom { .. } => Self::no_room(&format!("{refusal}; try again later")),
            Refusal::Withdrawn { .. } => Self::model_not_found(refusal.to_string()),
            // The reason may name files: the log has it.
            Refusal::Failed { model, .. } => unavailable(
                "model_load_failed",
                format!("loading `{model}` failed; the server's log has the reason"),
            ),
            Refusal::Deadline { .. } => {
                let status = StatusCode::GATEWAY_TIMEOUT;
                Self::new(status, "server_error", "deadline_exceeded", "", refusal.to_string())
            }
        }
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let server = |status, code, message: &str| {
            tracing::error!(code, details = %error, "engine failed");
            Self::new(status, "server_error", code, "", message)
        };
        match &error {
            Error::Request(problem) => match problem {
                RequestError::ContextTooLong { .. } | RequestError::PromptTooLong { .. } => {
                    Self::about_prompt(TOO_LONG, message)
                }
                RequestError::QueueFull { .. } => {
                    let (status, kind) = (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error");
                    Self::new(status, kind, "queue_full", "", message)
                }
                RequestError::Deadline { .. } => {
                    let status = StatusCode::GATEWAY_TIMEOUT;
                    Self::new(status, "server_error", "deadline_exceeded", "", message)
                }
                RequestError::PromptBytes { .. } => Self::about_prompt("prompt_too_large", message),
                RequestError::Memory { .. } => {
                    let status = StatusCode::SERVICE_UNAVAILABLE;
                    Self::new(status, "server_error", "out_of_memory", "", message)
                }
                RequestError::Cancelled => Self::invalid("cancelled", "", message),
                RequestError::Template(_) => Self::about_prompt("invalid_messages", message),
                RequestError::EmptyPrompt
                | RequestError::UnknownToken { .. }
                | RequestError::Tokenizer(_) => Self::about_prompt("invalid_value", message),
                RequestError::UnknownBias { token, .. } => {
                    Self::value(format!("logit_bias.{token}"), message)
                }
                RequestError::Structure { path, .. } => {
                    Self::invalid("unsupported_structure", path.clone(), message)
                }
                RequestError::Refused { status, retry_after_s, .. } => {
                    Self::refused_by_policy(*status, message, *retry_after_s)
                }
                // Nobody has followed it.
                RequestError::Routed { .. } => Self::invalid("routed", "model", message),
                RequestError::RouteClosed { .. } => {
                    let status = StatusCode::SERVICE_UNAVAILABLE;
                    Self::new(status, "server_error", "route_unavailable", "", message)
                }
                RequestError::Field { field, .. } => Self::value(*field, message),
                RequestError::UpstreamRefused { status, .. } => {
                    let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::BAD_REQUEST);
                    Self::new(status, INVALID, "refused_by_upstream", "", message)
                }
                RequestError::Upstream { fault, retry_after_s, .. } => {
                    Self::of_upstream(*fault, *retry_after_s, message)
                }
            },
            Error::Policy(problem) => {
                tracing::error!(details = %problem, "policy failed");
                let policy = match problem {
                    policy::Error::Failed(failure) => format!("the policy `{}`", failure.policy),
                    _ => "a policy".into(),
                };
                let message = format!("{policy} failed; see the server's log");
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                Self::new(status, "policy_error", "policy_error", "", message)
            }
            Error::Stopped => server(StatusCode::SERVICE_UNAVAILABLE, "engine_stopped", &message),
            Error::Config(_)
            | Error::Store(_)
            | Error::SavedState(_)
            | Error::Panic { .. }
            | Error::Array(_) => {
                let message = "the engine failed; see the server's log";
                server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
            }
        }
    }
}

impl IntoResponse for ApiError {
    /// In OpenAI's format; the middleware rewrites it for other protocols.
    fn into_response(self) -> Response {
        let mut response = self.respond(Dialect::OpenAi);
        response.extensions_mut().insert(self);
        response
    }
}
