//! Parses the bodies of `POST /api/chat` and `POST /api/generate` into the engine's [`Request`].

use std::time::Duration;

use jiff::SignedDuration;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};
use steersman_engine::request::{Message, Penalties, RawPrompt, Request};

use crate::api::error::ApiError;
use crate::api::params::{self, Effort};
use crate::api::probability;
use crate::api::protocol::{Call, Parsed};
use crate::api::sampling::Sampling;
use crate::api::schema::Schemas;
use crate::api::schema::shapes::{EffortWord, Format, KeepAliveBody, Texts, Tool};
use crate::api::{fields, json};

/// Tokens that `repeat_penalty` counts if the client does not say.
const REPEAT_LAST_N: u32 = 64;

/// The fields of both bodies that have an effect.
#[derive(Deserialize, JsonSchema)]
struct Body {
    model: Option<String>,
    /// False for one object; otherwise lines.
    stream: Option<bool>,
    #[schemars(with = "Option<Think>")]
    think: Option<Value>,
    options: Option<Map<String, Value>>,
    /// `json`, or a schema.
    #[schemars(with = "Option<Format>")]
    format: Option<Value>,
    messages: Option<Vec<MessageBody>>,
    #[schemars(with = "Option<Vec<Tool>>")]
    tools: Option<Vec<Map<String, Value>>>,
    prompt: Option<String>,
    system: Option<String>,
    suffix: Option<String>,
    raw: Option<bool>,
    logprobs: Option<bool>,
    #[schemars(range(max = 20))]
    top_logprobs: Option<u32>,
    /// How long the model stays loaded after this request: a duration such as `10m`, or seconds; 0 unloads it,
    /// negative ones keep it.
    #[schemars(with = "Option<KeepAliveBody>")]
    keep_alive: Option<Value>,
}

/// Whether to think: true, false, or how much.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
enum Think {
    Flag(bool),
    Effort(#[schemars(with = "EffortWord")] Effort),
}

/// `think`: whether to reason, and how much.
fn think(value: &Value) -> Result<(Option<bool>, Option<Effort>), ApiError> {
    let effort = match value {
        Value::Null => return Ok((None, None)),
        Value::Bool(think) => return Ok((Some(*think), None)),
        value => json::typed::<Effort>("think", value),
    };
    let effort = effort.map_err(|error| {
        let message = format!("{}, or true or false without quotes", error.message);
        ApiError { message, ..error }
    })?;
    Ok((Some(effort.reasons()), Some(effort)))
}

/// How long the model stays loaded after a request; `Some(None)` without a limit, `None` if the request does not say.
pub type KeepAlive = Option<Option<Duration>>;

/// The options that have an effect.
#[derive(Deserialize, Default, JsonSchema)]
struct Options {
    #[serde(default, deserialize_with = "params::seed")]
    #[schemars(with = "Option<i64>")]
    seed: Option<u64>,
    #[schemars(with = "Option<Texts>")]
    stop: Option<Value>,
    num_predict: Option<i64>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
}

impl Options {
    /// Ollama's window: 64 tokens unless set, 0 for no penalty, -1 for all tokens.
    fn penalties(&self) -> Result<Penalties, ApiError> {
        let mut penalties = Penalties {
            presence: probability::penalty("options.presence_penalty", self.presence_penalty)?,
            frequency: probability::penalty("options.frequency_penalty", self.frequency_penalty)?,
            repetition: probability::repetition("options.repeat_penalty", self.repeat_penalty)?,
            window: REPEAT_LAST_N,
        };
        match self.repeat_last_n {
            None => {}
            Some(-1) => penalties.window = 0,
            Some(0) => penalties.repetition = Penalties::default().repetition,
            Some(window) => {
                penalties.window = u32::try_from(window).map_err(|_| {
                    let name = "options.repeat_last_n";
                    let message = format!("{name}: is {window}, must be 0 or more, or -1 for all");
                    ApiError::value(name, message)
                })?;
            }
        }
        Ok(penalties)
    }
}

#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "OllamaInputMessage")]
struct MessageBody {
    role: String,
    content: Option<String>,
    thinking: Option<String>,
    images: Option<Vec<Value>>,
    tool_calls: Option<Vec<CallBody>>,
    tool_name: Option<String>,
    tool_call_id: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "OllamaInputCall")]
struct CallBody {
    id: Option<String>,
    #[serde(rename = "type")]
    _kind: Option<String>,
    function: FunctionBody,
}

#[derive(Deserialize, JsonSchema)]
#[schemars(rename = "OllamaInputFunction")]
struct FunctionBody {
    name: String,
    #[serde(default)]
    arguments: Value,
    #[serde(rename = "index")]
    _index: Option<u32>,
}

/// The schema of a body with these fields.
pub fn schema(table: &[fields::Field], schemas: &mut Schemas) -> Value {
    let options = options_schema(schemas);
    let parts = [schemas.of::<Body>()];
    let mut body = schemas.body(table, &parts);
    body["properties"]["options"] = options;
    body
}

/// The schema of the field `options`.
pub fn options_schema(schemas: &mut Schemas) -> Value {
    let parts = [schemas.of::<Options>(), schemas.of::<Sampling>()];
    schemas.body(fields::OLLAMA_OPTIONS, &parts)
}

/// Parses a body of `POST /api/chat`.
///
/// # Errors
/// 400 naming the field.
pub fn parse_chat<P>(
    fields: Map<String, Value>,
    protocol: fn(KeepAlive) -> P,
) -> Result<Parsed<P>, ApiError> {
    fields::check(fields::OLLAMA_CHAT, &fields)?;
    parse(fields, protocol, |body, notes| {
        let messages = body.messages.take().unwrap_or_default();
        let messages = messages.into_iter().enumerate().map(|(i, body)| message(i, body, notes));
        let messages = messages.collect::<Result<_, _>>()?;
        let (tool_fields, tools) =
            params::offered(tools(body.tools.take().unwrap_or_default(), notes)?)?;
        let request = Request { messages, tools, ..Request::default() };
        // Without messages, the client only wants the model to be loaded.
        Ok((!request.messages.is_empty()).then_some((tool_fields, request)))
    })
}

/// Parses a body of `POST /api/generate`.
///
/// # Errors
/// 400 naming the field.
pub fn parse_generate<P>(
    fields: Map<String, Value>,
    protocol: fn(KeepAlive) -> P,
) -> Result<Parsed<P>, ApiError> {
    fields::check(fields::OLLAMA_GENERATE, &fields)?;
    parse(fields, protocol, |body, _| {
        let prompt = body.prompt.take().unwrap_or_default();
        if prompt.is_empty() {
            return Ok(None);
        }
        let system = body.system.take().unwrap_or_default();
        let suffix = body.suffix.take().filter(|suffix| !suffix.is_empty());
        let unused = match &suffix {
            Some(_) => "a prompt with a `suffix` is sent without a template",
            None => "a prompt with `raw` is sent without a template",
        };
        let prompt = match (suffix, body.raw) {
            (Some(suffix), _) => RawPrompt::Infill { prefix: prompt, suffix },
            (None, Some(true)) => RawPrompt::Text(prompt),
            (None, _) => {
                let user = Message { role: "user".into(), content: prompt, ..Message::default() };
                let messages = params::with_instructions(&system, vec![user]);
                return Ok(Some((Vec::new(), Request { messages, ..Request::default() })));
            }
        };
        if !system.is_empty() {
            let message = format!("system: {unused}; write the system text into the prompt");
            return Err(ApiError::unsupported("system", message));
        }
        Ok(Some((Vec::new(), Request { prompt: Some(prompt), ..Request::default() })))
    })
}

/// What a body asks for: the fields of the schemas of its tools, and the request; `None` if there is nothing to
/// generate.
type Content = Option<(Vec<String>, Request)>;

/// Parses what both have in common; `content` takes the rest.
fn parse<P>(
    fields: Map<String, Value>,
    protocol: fn(KeepAlive) -> P,
    content: impl FnOnce(&mut Body, &mut Vec<String>) -> Result<Content, ApiError>,
) -> Result<Parsed<P>, ApiError> {
    let mut body: Body = json::typed_body(fields)?;
    let (model, stream) = (body.model.take(), body.stream.unwrap_or(true));
    let mut notes = Vec::new();
    let keep_alive = keep_alive(body.keep_alive.take().unwrap_or_default());
    let call = content(&mut body, &mut notes).and_then(|content| {
        let (tool_fields, request) = content.unzip();
        let request = request.map(|request| with_options(request, body)).transpose()?;
        Ok(Call {
            protocol: protocol(keep_alive?),
            requests: request.into_iter().collect(),
            choices: 1,
            tool_fields: tool_fields.unwrap_or_default(),
            notes,
        })
    });
    Ok(Parsed { model, stream, call })
}

/// `keep_alive`: a duration in a string, or a number of seconds. Negative ones are no limit.
pub fn keep_alive(value: Value) -> Result<KeepAlive, ApiError> {
    let seconds = match &value {
        Value::Null => return Ok(None),
        Value::Number(seconds) => seconds.as_f64(),
        Value::String(text) => {
            let duration = text.trim().parse::<SignedDuration>().ok();
            duration.map(|duration| duration.as_secs_f64()).or_else(|| text.trim().parse().ok())
        }
        _ => None,
    };
    match seconds.filter(|seconds| !seconds.is_nan()) {
        // What is too long for a duration is no limit either.
        Some(seconds) => Ok(Some(Duration::try_from_secs_f64(seconds).ok())),
        None => {
            let message = format!(
                "keep_alive: is {value}, must be a duration such as \"10m\" or a number of seconds; 0 unloads the \
                 model after the request, -1 keeps it loaded"
            );
            Err(ApiError::value("keep_alive", message))
        }
    }
}

/// The field `options`, for a reply that does not depend on them.
///
/// # Errors
/// 400 naming the field.
pub fn check_options(fields: Map<String, Value>) -> Result<(), ApiError> {
    let (sampling, options) = options(fields)?;
    sampling.check()?;
    options.penalties()?;
    params::stops("options.stop", options.stop)?;
    Ok(())
}

/// Parses the field `options`.
fn options(mut options: Map<String, Value>) -> Result<(Sampling, Options), ApiError> {
    json::whole_numbers(&mut options);
    fields::check(fields::OLLAMA_OPTIONS, &options)?;
    let ignored = |name: &String| !fields::is_read(fields::OLLAMA_OPTIONS, name);
    options.retain(|name, _| !ignored(name));
    let sampling = Sampling::take("options", &mut options)?;
    Ok((sampling, json::typed("options", &Value::Object(options))?))
}

fn with_options(request: Request, body: Body) -> Result<Request, ApiError> {
    let (sampling, options) = options(body.options.unwrap_or_default())?;
    let (reasoning, effort) = think(&body.think.unwrap_or_default())?;
    let response_format = match body.format.unwrap_or_default() {
        Value::Null => None,
        Value::String(format) if format.is_empty() => None,
        Value::String(format) if format == "json" => Some(params::json_form("format", None)),
        schema @ Value::Object(_) => Some(params::json_form("format", Some(schema))),
        _ => {
            let message = "format: must be \"json\" or a JSON schema";
            return Err(ApiError::value("format", message));
        }
    };
    let wants_logprobs = body.logprobs.unwrap_or(false);
    let limit = match options.num_predict {
        // As many as the context has room for.
        Some(-2) => Some(u32::MAX),
        // Ollama's runner counts up to a limit above 0 only.
        Some(0) => None,
        limit => params::limit("options.num_predict", limit)?,
    };
    let mut request = Request {
        penalties: options.penalties()?,
        logprobs: probability::logprobs(wants_logprobs, body.top_logprobs, "\"logprobs\": true")?,
        response_format,
        reasoning,
        effort,
        reasoning_budget: effort.and_then(Effort::budget),
        sampling: sampling.check()?,
        seed: options.seed,
        stop: params::stops("options.stop", options.stop)?,
        ..request
    };
    // A prompt that no template renders has no reasoning apart from the answer.
    let counts_all = request.prompt.is_some() || request.reasoning == Some(true);
    params::limit_reply(&mut request, limit, counts_all);
    Ok(request)
}

/// The functions among the tools, each after the field of its schema.
fn tools(
    tools: Vec<Map<String, Value>>,
    notes: &mut Vec<String>,
) -> Result<Vec<(String, Value)>, ApiError> {
    let mut functions = Vec::new();
    for (i, tool) in tools.into_iter().enumerate() {
        let kind = tool.get("type").and_then(Value::as_str).unwrap_or("function").to_string();
        functions.extend(params::function(i, &kind, tool, notes)?);
    }
    Ok(functions)
}

fn message(i: usize, body: MessageBody, notes: &mut Vec<String>) -> Result<Message, ApiError> {
    if body.images.is_some_and(|images| !images.is_empty()) {
        let param = format!("messages[{i}].images");
        let message = format!("{param}: only text is supported");
        return Err(ApiError::unsupported(param, message));
    }
    if !["system", "user", "assistant", "tool"].contains(&body.role.as_str()) {
        let param = format!("messages[{i}].role");
        let message =
            format!("{param}: is `{}`, must be system, user, assistant or tool", body.role);
        return Err(ApiError::value(param, message));
    }
    let call = |(k, call): (usize, CallBody)| {
        let path = format!("messages[{i}].tool_calls[{k}].function.arguments");
        // Ollama's calls have no ids: results follow in the order of the calls.
        let id = call.id.unwrap_or_else(|| format!("call_{i}_{k}"));
        params::tool_call(&path, id, call.function.name, call.function.arguments, notes)
    };
    let calls = body.tool_calls.unwrap_or_default();
    Ok(Message {
        role: body.role,
        content: body.content.unwrap_or_default(),
        reasoning_content: body.thinking.filter(|thinking| !thinking.is_empty()),
        tool_calls: calls.into_iter().enumerate().map(call).collect(),
        tool_call_id: body.tool_call_id,
        name: body.tool_name,
    })
}

/// Parses a body of `POST /api/show` or `DELETE /api/delete`: the name of a model.
///
/// # Errors
/// 400 naming the field.
pub fn named(mut fields: Map<String, Value>) -> Result<Option<String>, ApiError> {
    let name = fields.shift_remove("model").or(fields.shift_remove("name")).unwrap_or_default();
    match name {
        Value::Null => Ok(None),
        Value::String(name) => Ok(Some(name)),
        _ => Err(ApiError::invalid("invalid_type", "model", "model: must be a string")),
    }
}
