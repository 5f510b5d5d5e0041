//! Errors as OpenAI's clients expect them: a status, and `{"error": {"message", "type", "param", "code"}}`.
//!
//! What the client did wrong is said in full and names the field. What went wrong in here is said
//! in full in the log only.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use steersman_engine::error::Error;

/// Seconds after which a client that met a full queue may try again.
const RETRY_AFTER_SECONDS: u32 = 2;

/// `type` of everything that the client can repair.
const INVALID: &str = "invalid_request_error";

/// An error that is on its way to the client.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// HTTP status; an error in the middle of a stream has no use for it.
    pub status: StatusCode,
    /// `type`: the kind of error.
    pub kind: &'static str,
    /// `code`: the error's name, for programs.
    pub code: &'static str,
    /// `param`: path of the offending field, as `messages[1].content`.
    pub param: Option<String>,
    /// For people.
    pub message: String,
}

impl ApiError {
    /// A request that has to be changed; `param` is the field, empty where there is none to name.
    pub fn invalid(
        code: &'static str,
        param: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, code, param, message)
    }

    /// A value out of its range or of the wrong type.
    pub fn value(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid("invalid_value", param, message)
    }

    /// Something that we know and cannot do.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid("unsupported_parameter", param, message)
    }

    /// A field that is missing.
    pub fn missing(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid("missing_required_parameter", param, message)
    }

    /// A model or profile that is not served.
    pub fn model_not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, INVALID, "model_not_found", "model", message)
    }

    /// A path that we do not have.
    pub fn not_found(path: &str) -> Self {
        let message = format!("there is no {path} here; see GET /v1/models and the README");
        Self::new(StatusCode::NOT_FOUND, INVALID, "not_found", "", message)
    }

    /// A path that we have, asked for with the wrong method.
    pub fn method_not_allowed(method: &str, path: &str) -> Self {
        let message = format!("{path} cannot be asked for with {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed", "", message)
    }

    /// A missing or wrong key.
    pub fn unauthorized() -> Self {
        let message = "this server wants a key: send `Authorization: Bearer KEY`, with a KEY out of \
                       api_keys in the server's configuration";
        let kind = "authentication_error";
        Self::new(StatusCode::UNAUTHORIZED, kind, "invalid_api_key", "", message)
    }

    /// A key that does not open what is asked for.
    pub fn forbidden(message: impl Into<String>) -> Self {
        let kind = "permission_error";
        Self::new(StatusCode::FORBIDDEN, kind, "profile_not_allowed", "", message)
    }

    /// Too many requests at a time.
    pub fn busy(message: impl Into<String>) -> Self {
        let (status, kind) = (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error");
        Self::new(status, kind, "too_many_requests", "", message)
    }

    /// Something that operators alone may do, without one of their keys.
    pub fn not_an_operator() -> Self {
        let message = "this wants an operator's key: send `Authorization: Bearer KEY`, with a KEY \
                       out of admin_keys in the server's configuration";
        let kind = "authentication_error";
        Self::new(StatusCode::UNAUTHORIZED, kind, "invalid_admin_key", "", message)
    }

    /// Something that operators alone may do, where there are none.
    pub fn no_operators() -> Self {
        let message = "this wants an operator's key, and this server has none: set \
                       server.admin_keys in its configuration";
        Self::new(StatusCode::FORBIDDEN, "permission_error", "admin_keys_not_set", "", message)
    }

    /// A policy that no profile names.
    pub fn policy_not_found(policy: &str) -> Self {
        let message = format!("no profile names a policy `{policy}`; see GET /v1/policies");
        Self::new(StatusCode::NOT_FOUND, INVALID, "policy_not_found", "", message)
    }

    /// A component that is not put in force.
    pub fn policy_refused(message: impl Into<String>) -> Self {
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        Self::new(status, INVALID, "policy_refused", "", message)
    }

    /// Something that cannot be done as things are.
    pub fn conflict(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, INVALID, code, "", message)
    }

    /// A request of which nothing is recorded.
    pub fn no_trace(request: &str) -> Self {
        let message = format!(
            "nothing is recorded of a request `{request}`: ask with the `id` of its reply, before \
             policy.trace_requests others have followed"
        );
        Self::new(StatusCode::NOT_FOUND, INVALID, "trace_not_found", "", message)
    }

    /// A body that is larger than `limit` bytes, which `what` sets.
    pub fn too_large(limit: usize, what: &str) -> Self {
        let message = format!("the body is larger than {limit} bytes, the limit {what}");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, "request_too_large", "", message)
    }

    /// A body that does not arrive.
    pub fn too_slow(seconds: u64) -> Self {
        let message = format!("the body did not arrive within {seconds} s (server.body_timeout_s)");
        Self::new(StatusCode::REQUEST_TIMEOUT, INVALID, "request_timeout", "", message)
    }

    /// A body that is not declared as what it must be.
    pub fn not_of_type(content_type: &str) -> Self {
        let message = format!("send the body with the header `Content-Type: {content_type}`");
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
        let param = Some(param.into()).filter(|param| !param.is_empty());
        Self { status, kind, code, param, message: message.into() }
    }

    /// The body, and what a stream says when it breaks off.
    pub fn to_json(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let server = |status, code, message: &str| {
            tracing::error!(code, details = %error, "request failed");
            Self::new(status, "server_error", code, "", message)
        };
        match &error {
            Error::ContextTooLong { .. } | Error::PromptTooLong { .. } => {
                Self::invalid("context_length_exceeded", "messages", message)
            }
            Error::QueueFull { .. } => {
                let (status, kind) = (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error");
                Self::new(status, kind, "queue_full", "", message)
            }
            Error::Stopped => server(StatusCode::SERVICE_UNAVAILABLE, "engine_stopped", &message),
            Error::Template(_) => Self::invalid("invalid_messages", "messages", message),
            Error::Invalid { field, .. } => Self::value(*field, message),
            Error::Policy { policy, .. } | Error::PolicyLate { policy, .. } => {
                tracing::error!(policy, details = %error, "request failed");
                let message = format!("the policy `{policy}` failed; the server's log says how");
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                Self::new(status, "policy_error", "policy_error", "", message)
            }
            Error::Model { .. }
            | Error::Warm { .. }
            | Error::Store(_)
            | Error::SavedState(_)
            | Error::Array(_) => {
                let message = "the engine failed; the server's log says how";
                server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        let headers = response.headers_mut();
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            headers.insert(header::RETRY_AFTER, RETRY_AFTER_SECONDS.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
