//! Parses the body of `POST /v1/chat/completions` into the engine's [`Request`].
//!
//! [`parse`] checks the JSON, then the table of [`super::fields`] (which rejects what is not
//! supported), then types, then values. Each error names the field by its path.

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, de::DeserializeOwned};
use serde_ignored::Path;
use serde_json::{Map, Value};
use steersman_engine::policy::SamplingPatch;
use steersman_engine::request::Request;

use super::error::ApiError;
use super::fields;
use super::message::{self, MessageBody};
use super::probability::{self, Probability};
use super::structure;

/// Maximum number of JSON values in a body. A value takes up to a hundred bytes of memory, but only
/// two of the body; a long conversation has some thousands.
const VALUES: usize = 1 << 18;

/// Maximum number of stop strings of a request; each step searches for all of them.
const STOPS: usize = 16;

/// Reasoning budget of `reasoning_effort: "low"`.
const LOW_EFFORT_TOKENS: u32 = 1024;

/// Reasoning budget of `reasoning_effort: "medium"`.
const MEDIUM_EFFORT_TOKENS: u32 = 8192;

/// A body, as far as it could be parsed without knowing the profile.
#[derive(Debug)]
pub struct Parsed {
    /// `model`
    pub model: Option<String>,
    /// `stream`
    pub stream: bool,
    /// The request; or the first invalid value, which is reported after the profile is known.
    pub chat: Result<ChatRequest, ApiError>,
}

/// The engine's request and the form of the reply.
#[derive(Debug)]
pub struct ChatRequest {
    /// Without `id` and `profile`.
    pub request: Request,
    /// Whether to stream the reply.
    pub stream: bool,
    /// Whether a stream ends with a chunk that contains the usage.
    pub include_usage: bool,
}

/// The fields of the body that have an effect.
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
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<Effort>,
    max_thinking_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// OpenAI's levels of reasoning.
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

/// Parses a body.
///
/// # Errors
/// 400 naming the field.
pub fn parse(body: &[u8]) -> Result<Parsed, ApiError> {
    if values(body) > VALUES {
        let message = format!("the body has more than {VALUES} JSON values");
        return Err(ApiError::value("", message));
    }
    let body: Value = serde_json::from_slice(body).map_err(|error| {
        ApiError::invalid("invalid_json", "", format!("the body is not valid JSON: {error}"))
    })?;
    let Value::Object(mut fields) = body else {
        return Err(ApiError::invalid("invalid_json", "", "the body must be a JSON object"));
    };
    fields::check(&fields)?;
    let structure = fields::take(&mut fields, &structure::FIELDS);
    let probability = fields::take(&mut fields, &probability::FIELDS);
    let probability: Probability = typed(probability.into())?;
    let mut body: Body = typed(fields.into())?;
    let (model, stream) = (body.model.take(), body.stream.unwrap_or(false));
    Ok(Parsed { model, stream, chat: body.check(structure, probability) })
}

/// The number of values of a JSON text, or more: each but the first follows one of `[`, `{`, `,`, `:`.
fn values(json: &[u8]) -> usize {
    let (mut values, mut in_string, mut escaped) = (1, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' | b',' | b':' if !in_string => values += 1,
            _ => {}
        }
    }
    values
}

impl Body {
    /// Checks the values.
    ///
    /// # Errors
    /// 400 naming the field.
    fn check(
        self,
        structure: Map<String, Value>,
        probability: Probability,
    ) -> Result<ChatRequest, ApiError> {
        let stream = self.stream.unwrap_or(false);
        if !stream && self.stream_options.is_some() {
            let message = "stream_options requires \"stream\": true";
            return Err(ApiError::value("stream_options", message));
        }
        let mut template_variables = self.chat_template_kwargs.unwrap_or_default();
        let reasoning = Reasoning {
            enabled: take_enable_thinking(&mut template_variables)?,
            effort: self.reasoning_effort,
            tokens: self.max_thinking_tokens,
        };
        let (reasoning, reasoning_budget) = reasoning.resolve()?;
        let mut request = Request {
            messages: message::parse(self.messages)?,
            tools: tools(self.tools.unwrap_or_default())?,
            template_variables,
            reasoning,
            reasoning_budget,
            max_tokens: max_tokens(self.max_tokens, self.max_completion_tokens)?,
            sampling: SamplingPatch {
                temperature: within("temperature", self.temperature, "from 0 to 2", |t| {
                    (0.0..=2.0).contains(&t)
                })?,
                top_p: within("top_p", self.top_p, "above 0, at most 1", |p| p > 0.0 && p <= 1.0)?,
                top_k: self.top_k,
                min_p: within("min_p", self.min_p, "from 0 to 1", |p| (0.0..=1.0).contains(&p))?,
            },
            seed: self.seed,
            stop: stops(self.stop)?,
            revisable: !stream,
            ..Request::default()
        };
        structure::apply(structure, &mut request)?;
        probability.apply(&mut request)?;
        let include_usage = self.stream_options.and_then(|options| options.include_usage);
        Ok(ChatRequest { request, stream, include_usage: include_usage.unwrap_or(false) })
    }
}

/// Deserializes the body; an error names the field by its path.
///
/// Unknown fields are errors, except at the top, where [`fields::check`] decides.
fn typed<T: DeserializeOwned>(value: Value) -> Result<T, ApiError> {
    let mut track = serde_path_to_error::Track::new();
    let mut unknown = None;
    let body = serde_ignored::deserialize(
        serde_path_to_error::Deserializer::new(value, &mut track),
        |path| {
            if !matches!(path, Path::Map { parent: Path::Root, .. }) {
                unknown.get_or_insert_with(|| written(&path));
            }
        },
    );
    match (body, unknown) {
        (Err(error), _) => {
            let path = track.path().to_string();
            let message = format!("{path}: {error}");
            Err(ApiError::invalid("invalid_type", path, message))
        }
        (Ok(_), Some(path)) => {
            let message = format!("{path}: unknown field; leave it out");
            Err(ApiError::invalid("unknown_parameter", path, message))
        }
        (Ok(body), None) => Ok(body),
    }
}

/// `path` as `messages[1].content`.
fn written(path: &Path<'_>) -> String {
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", written(parent)),
        Path::Map { parent: Path::Root, key } => key.clone(),
        Path::Map { parent, key } => format!("{}.{key}", written(parent)),
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => written(parent),
    }
}

/// The three parameters for reasoning, which may not contradict each other.
struct Reasoning {
    /// `chat_template_kwargs.enable_thinking`
    enabled: Option<bool>,
    /// `reasoning_effort`
    effort: Option<Effort>,
    /// `max_thinking_tokens`
    tokens: Option<u32>,
}

impl Reasoning {
    /// Whether to reason, and the budget in tokens; `None` if the client does not say.
    ///
    /// `max_thinking_tokens` takes precedence over the budget of `reasoning_effort`.
    fn resolve(self) -> Result<(Option<bool>, Option<u32>), ApiError> {
        let parameters = [
            ("chat_template_kwargs.enable_thinking", self.enabled),
            ("reasoning_effort", self.effort.map(|e| e != Effort::None && e != Effort::Minimal)),
            ("max_thinking_tokens", self.tokens.map(|tokens| tokens > 0)),
        ];
        let mut given = parameters.iter().filter_map(|(name, on)| Some((name, (*on)?)));
        let Some((first, reasoning)) = given.next() else { return Ok((None, None)) };
        if let Some((other, _)) = given.find(|(_, on)| *on != reasoning) {
            let (on, off) = if reasoning { (first, other) } else { (other, first) };
            let message = format!("{on} enables reasoning, {off} disables it; drop one of them");
            return Err(ApiError::value(*other, message));
        }
        let of_effort = match self.effort {
            Some(Effort::Low) => Some(LOW_EFFORT_TOKENS),
            Some(Effort::Medium) => Some(MEDIUM_EFFORT_TOKENS),
            Some(Effort::None | Effort::Minimal | Effort::High | Effort::XHigh) | None => None,
        };
        let budget = self.tokens.or(of_effort).filter(|_| reasoning);
        Ok((Some(reasoning), budget))
    }
}

/// Removes `enable_thinking` from the template variables, because the policy decides it.
fn take_enable_thinking(variables: &mut Map<String, Value>) -> Result<Option<bool>, ApiError> {
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

/// Checks the tools, and returns them unchanged.
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
    }
    Ok(tools.into_iter().map(Value::Object).collect())
}

/// Maximum number of answer tokens. Both names mean the same here: reasoning is not counted.
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
        return Err(ApiError::value(
            "stop",
            "stop: must not contain an empty string, which would end every answer",
        ));
    }
    Ok(stops)
}

/// Checks that `value` is in `range`.
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

/// A seed is any 64-bit integer; a negative one stands for its two's complement.
fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let Some(number) = Option::<serde_json::Number>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let bits = number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned));
    bits.map(Some).ok_or_else(|| D::Error::custom(format!("{number} is not a 64-bit integer")))
}
