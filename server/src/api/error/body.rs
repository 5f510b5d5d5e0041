//! The bodies of errors, in the formats of the protocols.

use axum::http::HeaderMap;
use schemars::JsonSchema;
use serde::Serialize;

use super::{ApiError, TOO_LONG};

/// A format of errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// [`OpenAiError`]
    OpenAi,
    /// [`AnthropicError`]
    Anthropic,
    /// [`OllamaError`]
    Ollama,
}

impl Dialect {
    /// The format of a request: the path decides, and where several protocols have one, the header that
    /// Anthropic's clients always send.
    pub fn of(path: &str, headers: &HeaderMap) -> Self {
        let path = path.strip_prefix("/v1").unwrap_or(path);
        if path.starts_with("/messages") || headers.contains_key("anthropic-version") {
            Self::Anthropic
        } else if path.starts_with("/api/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }
}

/// The body of an error.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum ErrorBody {
    /// The body of [`Dialect::OpenAi`].
    OpenAi(OpenAiError),
    /// The body of [`Dialect::Anthropic`].
    Anthropic(AnthropicError),
    /// The body of [`Dialect::Ollama`].
    Ollama(OllamaError),
}

/// An error in OpenAI's format.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "Error")]
pub struct OpenAiError {
    error: Problem,
    /// The reply's header `x-request-id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "ErrorBody")]
struct Problem {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    /// Path of the field, such as `messages[1].content`.
    param: Option<String>,
    /// Identifies the error for programs.
    code: &'static str,
}

/// An error in Anthropic's format.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct AnthropicError {
    #[serde(rename = "type")]
    #[schemars(extend("const" = "error"))]
    kind: &'static str,
    error: AnthropicProblem,
    /// The reply's header `x-request-id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "AnthropicErrorBody")]
struct AnthropicProblem {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: &'static str,
    /// Anthropic's tool runners ask for a thread first. After this code they send the whole conversation.
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Unsupported>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Unsupported {
    error_code: &'static str,
    unsupported: Vec<&'static str>,
}

/// An error in Ollama's format.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OllamaError {
    error: String,
    /// The reply's header `x-request-id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
}

impl ApiError {
    /// The body in OpenAI's format; a failing stream ends with it.
    pub fn openai(&self) -> OpenAiError {
        let error = Problem {
            message: self.message.clone(),
            kind: self.kind,
            param: self.param.clone(),
            code: self.code,
        };
        OpenAiError { error, request_id: self.named_request() }
    }

    /// The body in Anthropic's format.
    pub fn anthropic(&self) -> AnthropicError {
        let is_about_thread = self.param.as_deref() == Some("thread");
        let error = AnthropicProblem {
            kind: self.anthropic_type(),
            message: self.anthropic_message(),
            param: self.param.clone(),
            code: self.code,
            details: is_about_thread.then(|| Unsupported {
                error_code: "thread_unsupported_request",
                unsupported: vec!["thread"],
            }),
        };
        AnthropicError { kind: "error", error, request_id: self.named_request() }
    }

    /// The body in Ollama's format.
    pub fn ollama(&self) -> OllamaError {
        OllamaError { error: self.message.clone(), request_id: self.named_request() }
    }

    /// The body in the format of `dialect`.
    pub fn body(&self, dialect: Dialect) -> ErrorBody {
        match dialect {
            Dialect::OpenAi => ErrorBody::OpenAi(self.openai()),
            Dialect::Anthropic => ErrorBody::Anthropic(self.anthropic()),
            Dialect::Ollama => ErrorBody::Ollama(self.ollama()),
        }
    }

    fn named_request(&self) -> Option<String> {
        Some(self.request_id.clone()).filter(|id| !id.is_empty())
    }

    fn anthropic_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            _ if self.status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        }
    }

    /// Clients recognize a prompt that is too long by these words, and make it shorter.
    fn anthropic_message(&self) -> String {
        match self.code {
            TOO_LONG => format!("prompt is too long: {}", self.message),
            _ => self.message.clone(),
        }
    }
}
