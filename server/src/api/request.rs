//! From the body of `POST /v1/chat/completions` to the engine's [`Request`].
//!
//! Three steps: JSON, then the table of [`super::fields`] (what we cannot do is refused by name),
//! then types and ranges. Each error names the field by its path.

use axum::http::StatusCode;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use steersman_engine::request::{Request, SamplingOverrides};

use super::error::ApiError;
use super::fields;
use super::message::{self, MessageBody};
use crate::models::Models;

/// Most stop strings of a request; each is searched for at each step.
const STOPS: usize = 16;

/// Tokens that `reasoning_effort: "low"` allows a thought.
const LOW_EFFORT_TOKENS: u32 = 1024;

/// Tokens that `reasoning_effort: "medium"` allows a thought.
const MEDIUM_EFFORT_TOKENS: u32 = 8192;

/// What a chat request asks of the engine, and how the reply is to be written.
#[derive(Debug)]
pub struct ChatRequest {
    /// For the engine; its `id` is still empty.
    pub request: Request,
    /// The model as the client named it, which is how the reply names it.
    pub model: String,
    /// Whether the reply is a stream of events.
    pub stream: bool,
    /// Whether a stream ends with a chunk that has the usage.
    pub include_usage: bool,
}

/// The fields of the body that are read.
#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    messages: Option<Vec<MessageBody>>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    #[serde(default, deserialize_with = "seed")]
    seed: Option<u64>,
    stop: Option<Value>,
    tools: Option<Vec<Map<String, Value>>>,
    tool_choice: Option<String>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<Effort>,
    max_thinking_tokens: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// How long to think, in OpenAI's words.
#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    XHigh,
}

/// Reads a body; `header_profile` is the value of `X-Steersman-Profile`, `own_profile` the one whose
/// key the client has.
///
/// # Errors
/// 400 naming the field, 404 for a model that is not served.
pub fn parse(
    body: &[u8],
    header_profile: Option<&str>,
    own_profile: Option<&str>,
    models: &Models,
) -> Result<ChatRequest, ApiError> {
    let body: Value = serde_json::from_slice(body).map_err(|error| {
        ApiError::invalid("invalid_json", "", format!("the body is not valid JSON: {error}"))
    })?;
    let Value::Object(fields) = &body else {
        return Err(ApiError::invalid("invalid_json", "", "the body must be a JSON object"));
    };
    fields::check(fields)?;
    let body: Body = typed(body)?;

    let (model, profile) = model_and_profile(body.model, header_profile, own_profile, models)?;
    let stream = body.stream.unwrap_or(false);
    if !stream && body.stream_options.is_some() {
        let message = "stream_options has a meaning only with \"stream\": true";
        return Err(ApiError::value("stream_options", message));
    }
    let mut template_variables = body.chat_template_kwargs.unwrap_or_default();
    let thinking = Thinking {
        enabled: enable_thinking(&mut template_variables)?,
        effort: body.reasoning_effort,
        tokens: body.max_thinking_tokens,
    };
    let (reasoning, reasoning_budget) = thinking.decide()?;
    let tools_hidden = body.tool_choice.as_deref() == Some("none");
    let tools = tools(body.tools.unwrap_or_default())?;
    let request = Request {
        id: String::new(),
        profile,
        messages: message::parse(body.messages)?,
        tools: if tools_hidden { Vec::new() } else { tools },
        template_variables,
        reasoning,
        reasoning_budget,
        max_tokens: max_tokens(body.max_tokens, body.max_completion_tokens)?,
        sampling: SamplingOverrides {
            temperature: within("temperature", body.temperature, "from 0 to 2", |t| {
                (0.0..=2.0).contains(&t)
            })?,
            top_p: within("top_p", body.top_p, "above 0, at most 1", |p| p > 0.0 && p <= 1.0)?,
            top_k: body.top_k,
            min_p: within("min_p", body.min_p, "from 0 to 1", |p| (0.0..=1.0).contains(&p))?,
            seed: body.seed,
        },
        stop: stops(body.stop)?,
        revisable: !stream,
    };
    let include_usage = body.stream_options.and_then(|options| options.include_usage);
    Ok(ChatRequest { request, model, stream, include_usage: include_usage.unwrap_or(false) })
}

/// `value` as a `T`; what does not fit is named by its path.
fn typed<T: DeserializeOwned>(value: Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let message = format!("{path}: {}", error.inner());
        let unknown = error.inner().to_string().starts_with("unknown field");
        let code = if unknown { "unknown_parameter" } else { "invalid_type" };
        ApiError::invalid(code, path, message)
    })
}

/// The model as the client named it, and the profile: `model@profile`, the header, that of the key,
/// or the default.
fn model_and_profile(
    name: Option<String>,
    header: Option<&str>,
    own: Option<&str>,
    models: &Models,
) -> Result<(String, String), ApiError> {
    let first = &models.first().info().model;
    let Some(name) = name else {
        let message = format!("model: missing; this server serves `{first}`");
        return Err(ApiError::missing("model", message));
    };
    let Some(named) = models.profile_in(&name) else {
        let message = format!(
            "there is no model `{name}` here; this server serves `{first}` (see GET /v1/models)"
        );
        return Err(ApiError::model_not_found(message));
    };
    let profile = match (named, header) {
        (None, None) => own.unwrap_or("default"),
        (Some(profile), None) => profile,
        (Some(profile), Some(header)) if profile != header => {
            let message = format!(
                "the model asks for the profile `{profile}`, X-Steersman-Profile for `{header}`"
            );
            return Err(ApiError::value("model", message));
        }
        (_, Some(header)) => header,
    };
    let Some(engine) = models.of(profile) else {
        let message = format!("there is no profile `{profile}`; see GET /v1/models");
        let mut error = ApiError::invalid("profile_not_found", "X-Steersman-Profile", message);
        error.status = StatusCode::NOT_FOUND;
        return Err(error);
    };
    let served = &engine.info().model;
    if named.is_none() && name != *served {
        return Err(ApiError::model_not_found(format!(
            "the profile `{profile}` asks the model `{served}`, not `{name}`: name that, or another \
             profile as `{name}@PROFILE` (see GET /v1/models)"
        )));
    }
    let profile = profile.to_string();
    Ok((name, profile))
}

/// What a request says about thinking, in three ways that may not contradict each other.
struct Thinking {
    /// `chat_template_kwargs.enable_thinking`
    enabled: Option<bool>,
    /// `reasoning_effort`
    effort: Option<Effort>,
    /// `max_thinking_tokens`
    tokens: Option<u32>,
}

impl Thinking {
    /// Whether to think, and at most how many tokens, as far as the client says.
    ///
    /// An explicit number of tokens goes before the number that an effort stands for.
    fn decide(self) -> Result<(Option<bool>, Option<u32>), ApiError> {
        let wishes = [
            ("chat_template_kwargs.enable_thinking", self.enabled),
            ("reasoning_effort", self.effort.map(|e| e != Effort::None && e != Effort::Minimal)),
            ("max_thinking_tokens", self.tokens.map(|tokens| tokens > 0)),
        ];
        let mut said = wishes.iter().filter_map(|(name, wish)| Some((name, (*wish)?)));
        let Some((first, thinking)) = said.next() else { return Ok((None, None)) };
        if let Some((other, _)) = said.find(|(_, wish)| *wish != thinking) {
            let (on, off) = if thinking { (first, other) } else { (other, first) };
            let message = format!("{on} asks for a thought, {off} for none; drop one of them");
            return Err(ApiError::value(*other, message));
        }
        let of_effort = match self.effort {
            Some(Effort::Low) => Some(LOW_EFFORT_TOKENS),
            Some(Effort::Medium) => Some(MEDIUM_EFFORT_TOKENS),
            Some(Effort::None | Effort::Minimal | Effort::High | Effort::XHigh) | None => None,
        };
        let budget = self.tokens.or(of_effort).filter(|_| thinking);
        Ok((Some(thinking), budget))
    }
}

/// Takes `enable_thinking` out of the template's variables: it is the policy's to decide.
fn enable_thinking(variables: &mut Map<String, Value>) -> Result<Option<bool>, ApiError> {
    match variables.shift_remove("enable_thinking") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(enabled)) => Ok(Some(enabled)),
        Some(_) => {
            let param = "chat_template_kwargs.enable_thinking";
            let message = format!("{param}: must be true or false");
            Err(ApiError::invalid("invalid_type", param, message))
        }
    }
}

/// The tools as the client sent them, once it is sure that we can offer them.
fn tools(tools: Vec<Map<String, Value>>) -> Result<Vec<Value>, ApiError> {
    for (i, tool) in tools.iter().enumerate() {
        if tool.get("type") != Some(&Value::from("function")) {
            let message = format!("tools[{i}].type: only \"function\" is supported");
            return Err(ApiError::unsupported(format!("tools[{i}].type"), message));
        }
        let function = tool.get("function").and_then(Value::as_object);
        let name = function.and_then(|function| function.get("name")).and_then(Value::as_str);
        if name.is_none_or(str::is_empty) {
            let param = format!("tools[{i}].function.name");
            let message = format!("{param}: must be the function's name");
            return Err(ApiError::value(param, message));
        }
        if function.and_then(|function| function.get("strict")) == Some(&Value::Bool(true)) {
            let param = format!("tools[{i}].function.strict");
            let message = format!("{param}: arguments are not enforced yet; leave it out");
            return Err(ApiError::unsupported(param, message));
        }
    }
    Ok(tools.into_iter().map(Value::Object).collect())
}

/// Most tokens of the answer: both names mean the same here, since thoughts are not counted.
fn max_tokens(old: Option<u32>, new: Option<u32>) -> Result<Option<u32>, ApiError> {
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        let message = format!("max_tokens is {old}, max_completion_tokens is {new}; drop one");
        return Err(ApiError::value("max_completion_tokens", message));
    }
    let name = if new.is_some() { "max_completion_tokens" } else { "max_tokens" };
    match new.or(old) {
        Some(0) => Err(ApiError::value(name, format!("{name}: must be at least 1"))),
        tokens => Ok(tokens),
    }
}

/// `stop`: a string or a list of strings.
fn stops(stop: Option<Value>) -> Result<Vec<String>, ApiError> {
    let stops: Vec<String> = match stop {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(list @ Value::Array(_)) => {
            serde_path_to_error::deserialize(list).map_err(|error| {
                let path = format!("stop{}", error.path());
                let message = format!("{path}: {}", error.inner());
                ApiError::invalid("invalid_type", path, message)
            })?
        }
        Some(_) => {
            let message = "stop: must be a string or a list of strings";
            return Err(ApiError::invalid("invalid_type", "stop", message));
        }
    };
    if stops.len() > STOPS {
        let message = format!("stop: {} strings, at most {STOPS} are allowed", stops.len());
        return Err(ApiError::value("stop", message));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::value("stop", "stop: an empty string would stop every answer"));
    }
    Ok(stops)
}

/// `value`, if it is in range.
fn within(
    name: &str,
    value: Option<f32>,
    range: &str,
    contains: impl Fn(f32) -> bool,
) -> Result<Option<f32>, ApiError> {
    match value {
        Some(value) if !contains(value) => {
            Err(ApiError::value(name, format!("{name}: is {value}, must be {range}")))
        }
        value => Ok(value),
    }
}

/// A seed may be any integer of 64 bits; a negative one stands for its bits.
fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let Some(number) = Option::<serde_json::Number>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let bits = number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned));
    bits.map(Some).ok_or_else(|| D::Error::custom(format!("{number} is not an integer of 64 bits")))
}
