//! Parses the body of `POST /v1/chat/completions` into the engine's [`Request`].
//!
//! [`parse`] checks the table of [`fields`] (which rejects what is not supported), then types, then
//! values. Each error names the field by its path.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};
use steersman_engine::request::{Continued, Request};

use super::Chat;
use super::message::{self, MessageBody};
use crate::api::error::ApiError;
use crate::api::params::{self, Effort};
use crate::api::probability::{self, Probability};
use crate::api::protocol::{Call, Parsed};
use crate::api::sampling::Sampling;
use crate::api::schema::Schemas;
use crate::api::schema::shapes::{EffortWord, Structure, Texts, Tool};
use crate::api::{fields, json, structure};

/// The fields of the body that have an effect.
#[derive(Deserialize, JsonSchema)]
struct Body {
    /// A model, `MODEL@PROFILE` or an alias; that of the profile if absent.
    model: Option<String>,
    #[schemars(required, length(min = 1))]
    messages: Option<Vec<MessageBody>>,
    /// Whether the reply is a stream of server-sent events.
    stream: Option<bool>,
    stream_options: Option<params::StreamOptions>,
    /// Limit on the tokens of answer and tool calls; -1 is the server's default.
    #[schemars(range(min = -1))]
    max_tokens: Option<i64>,
    /// The same; with the reasoning, if the request asks for reasoning.
    #[schemars(range(min = -1))]
    max_completion_tokens: Option<i64>,
    #[serde(default, deserialize_with = "params::seed")]
    #[schemars(with = "Option<i64>")]
    seed: Option<u64>,
    /// The answer ends before the first of these that it contains.
    #[schemars(with = "Option<Texts>")]
    stop: Option<Value>,
    /// Choices: replies to one prompt.
    #[schemars(range(min = 1, max = 32))]
    n: Option<u64>,
    /// Accepted if it equals `n`.
    best_of: Option<u64>,
    #[schemars(with = "Option<Vec<Tool>>")]
    tools: Option<Vec<Map<String, Value>>>,
    /// Variables of the chat template; `enable_thinking` asks for reasoning or none.
    chat_template_kwargs: Option<Map<String, Value>>,
    #[schemars(with = "Option<EffortWord>")]
    reasoning_effort: Option<Effort>,
    /// Budget of the reasoning; 0 for none.
    max_thinking_tokens: Option<u32>,
    /// Whether the reply continues the last message, which is the assistant's: its answer, or its reasoning if it has
    /// no `content`.
    continue_final_message: Option<bool>,
    /// `false`, if at all, beside `continue_final_message`.
    add_generation_prompt: Option<bool>,
}

/// The schema of a body.
pub fn schema(schemas: &mut Schemas) -> Value {
    let parts = [
        schemas.of::<Body>(),
        schemas.of::<Sampling>(),
        schemas.of::<Probability>(),
        schemas.of::<Structure>(),
    ];
    schemas.body(fields::FIELDS, &parts)
}

/// Parses a body.
///
/// # Errors
/// 400 naming the field.
pub fn parse(mut fields: Map<String, Value>) -> Result<Parsed<Chat>, ApiError> {
    fields::check(fields::FIELDS, &fields)?;
    let structure = fields::take(&mut fields, &structure::FIELDS);
    let probability = fields::take(&mut fields, &probability::FIELDS);
    let probability: Probability = json::typed_body(probability)?;
    let sampling = Sampling::take("", &mut fields)?;
    let mut body: Body = json::typed_body(fields)?;
    let (model, stream) = (body.model.take(), body.stream.unwrap_or(false));
    Ok(Parsed { model, stream, call: body.check(structure, sampling, probability) })
}

impl Body {
    /// Checks the values.
    ///
    /// # Errors
    /// 400 naming the field.
    fn check(
        self,
        structure: Map<String, Value>,
        sampling: Sampling,
        probability: Probability,
    ) -> Result<Call<Chat>, ApiError> {
        let stream = self.stream.unwrap_or(false);
        if !stream && self.stream_options.is_some() {
            let message = "stream_options requires \"stream\": true";
            return Err(ApiError::value("stream_options", message));
        }
        let mut template_variables = self.chat_template_kwargs.unwrap_or_default();
        let reasoning = Reasoning {
            switches: take_switches(&mut template_variables)?,
            effort: self.reasoning_effort,
            tokens: self.max_thinking_tokens,
        };
        let effort = reasoning.effort;
        let (reasoning, reasoning_budget) = reasoning.resolve()?;
        let mut notes = Vec::new();
        let (tool_fields, tools) =
            params::offered(tools(self.tools.unwrap_or_default(), &mut notes)?)?;
        let continues = continued(
            self.continue_final_message.unwrap_or(false),
            self.add_generation_prompt,
            self.messages.as_deref().unwrap_or_default(),
        )?;
        let mut request = Request {
            messages: message::parse(self.messages, &mut notes)?,
            continues,
            tools,
            template_variables,
            reasoning,
            effort,
            reasoning_budget,
            sampling: sampling.check()?,
            seed: self.seed,
            stop: params::stops("stop", self.stop)?,
            ..Request::default()
        };
        limit(&mut request, self.max_tokens, self.max_completion_tokens)?;
        structure::apply(structure, &mut request)?;
        if request.has_begun_answer() && request.response_format.is_some() {
            let message = "continue_final_message: an answer in a form cannot be continued; leave the form out";
            return Err(ApiError::unsupported("continue_final_message", message));
        }
        probability.apply(&mut request)?;
        if request.ignores_end {
            // The client wants a reply of this length, whatever it consists of.
            let of_answer = request.max_answer_tokens.take();
            request.max_tokens = request.max_tokens.or(of_answer);
        }
        let choices = params::choices(self.n, self.best_of)?;
        let protocol = Chat::new(self.stream_options, choices);
        Ok(Call { protocol, requests: vec![request], choices, tool_fields, notes })
    }
}

/// Where the reply continues the last of `messages`, if the client asks for that.
///
/// # Errors
/// 400 if it cannot be continued.
fn continued(
    is_asked: bool,
    add_generation_prompt: Option<bool>,
    messages: &[MessageBody],
) -> Result<Option<Continued>, ApiError> {
    match (is_asked, add_generation_prompt) {
        (true, Some(true)) => {
            let message = "add_generation_prompt: begins a message, and continue_final_message continues one; drop one";
            return Err(ApiError::value("add_generation_prompt", message));
        }
        (false, Some(false)) => {
            let message =
                "add_generation_prompt: can be false only with \"continue_final_message\": true";
            return Err(ApiError::unsupported("add_generation_prompt", message));
        }
        (false, _) => return Ok(None),
        (true, _) => {}
    }
    match messages.last().and_then(MessageBody::continued) {
        Some(part) => Ok(Some(part)),
        None => {
            let message = "continue_final_message: the last message must be the assistant's, with text and without \
                           tool calls";
            Err(ApiError::value("continue_final_message", message))
        }
    }
}

/// The parameters for reasoning, which may not contradict each other.
struct Reasoning {
    /// Values of [`SWITCHES`].
    switches: [Option<bool>; 2],
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
            (SWITCHES[0], self.switches[0]),
            (SWITCHES[1], self.switches[1]),
            ("reasoning_effort", self.effort.map(Effort::reasons)),
            ("max_thinking_tokens", self.tokens.map(|tokens| tokens > 0)),
        ];
        let mut given = parameters.iter().filter_map(|(name, on)| Some((name, (*on)?)));
        let Some((first, reasoning)) = given.next() else { return Ok((None, None)) };
        if let Some((other, _)) = given.find(|(_, on)| *on != reasoning) {
            let (on, off) = if reasoning { (first, other) } else { (other, first) };
            let message = format!("{on} enables reasoning, {off} disables it; drop one of them");
            return Err(ApiError::value(*other, message));
        }
        let of_effort = self.effort.and_then(Effort::budget);
        let budget = self.tokens.or(of_effort).filter(|_| reasoning);
        Ok((Some(reasoning), budget))
    }
}

/// Template variables by which clients ask for reasoning, or for none: of most templates, and of Granite's,
/// DeepSeek's and Kimi's.
const SWITCHES: [&str; 2] =
    ["chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking"];

/// Removes the variables of [`SWITCHES`], because the policy decides. The engine sets the one that the template has.
fn take_switches(variables: &mut Map<String, Value>) -> Result<[Option<bool>; 2], ApiError> {
    let enable_thinking = match variables.shift_remove("enable_thinking") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(enabled)) => Some(enabled),
        Some(_) => {
            let param = SWITCHES[0];
            let message = format!("{param}: must be true or false");
            return Err(ApiError::invalid("invalid_type", param, message));
        }
    };
    // Another value is that of another variable of this name.
    let thinking = variables.get("thinking").and_then(Value::as_bool);
    if thinking.is_some() {
        variables.shift_remove("thinking");
    }
    Ok([enable_thinking, thinking])
}

/// Checks the tools, and returns the functions among them unchanged, each after the field of its schema.
fn tools(
    tools: Vec<Map<String, Value>>,
    notes: &mut Vec<String>,
) -> Result<Vec<(String, Value)>, ApiError> {
    let mut functions = Vec::new();
    for (i, tool) in tools.into_iter().enumerate() {
        let kind = tool.get("type").and_then(Value::as_str).unwrap_or_default().to_string();
        if kind.is_empty() {
            let param = format!("tools[{i}].type");
            return Err(ApiError::missing(&param, format!("{param}: must be \"function\"")));
        }
        functions.extend(params::function(i, &kind, tool, notes)?);
    }
    Ok(functions)
}

/// Limits the reply by `max_tokens`, which counts answer and tool calls, or by `max_completion_tokens`, which counts
/// the reasoning that the client asks for, too.
fn limit(request: &mut Request, old: Option<i64>, new: Option<i64>) -> Result<(), ApiError> {
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        let message = format!("max_tokens is {old}, max_completion_tokens is {new}; drop one");
        return Err(ApiError::value("max_completion_tokens", message));
    }
    let old = params::limit("max_tokens", old)?;
    let new = params::limit("max_completion_tokens", new)?;
    match new {
        Some(_) => params::limit_reply(request, new, request.reasoning == Some(true)),
        None => request.max_answer_tokens = old,
    }
    Ok(())
}
