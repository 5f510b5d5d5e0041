//! OpenAI's completions: `POST /v1/completions`, whose prompts no template renders.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use steersman_engine::request::{Event, FinishReason, RawPrompt, Request};

use super::chat::{Chunks, whole};
use super::error::ApiError;
use super::probability::{self, Probability};
use super::protocol::{Call, Parsed, Place, Protocol};
use super::reply::{Frames, Head, Part, Reply};
use super::{fields, json, params};

/// Most prompts of a body: each is a request of its own.
const PROMPTS: usize = 128;

/// Tokens of a reply if the client does not say, as OpenAI documents.
const MAX_TOKENS: u32 = 16;

/// The state of one response.
#[derive(Debug)]
pub struct Completions {
    chunks: Chunks,
    /// Whether each text begins with its prompt.
    echo: bool,
    /// The text of each prompt, if `echo`.
    prompts: Vec<String>,
}

/// The fields of the body that have an effect.
#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    prompt: Option<Value>,
    stream: Option<bool>,
    stream_options: Option<params::StreamOptions>,
    max_tokens: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    #[serde(default, deserialize_with = "params::seed")]
    seed: Option<u64>,
    stop: Option<Value>,
    echo: Option<bool>,
}

/// Parses a body.
fn parse(mut fields: Map<String, Value>) -> Result<Parsed<Completions>, ApiError> {
    fields::check(fields::COMPLETIONS, &fields)?;
    fields.shift_remove("logprobs");
    let probability = fields::take(&mut fields, &probability::FIELDS);
    let probability: Probability = json::typed_body(probability)?;
    let mut body: Body = json::typed_body(fields)?;
    let (model, stream) = (body.model.take(), body.stream.unwrap_or(false));
    Ok(Parsed { model, stream, call: body.check(probability) })
}

impl Body {
    fn check(self, probability: Probability) -> Result<Call<Completions>, ApiError> {
        let max_tokens = match self.max_tokens {
            None => Some(MAX_TOKENS),
            limit => params::limit("max_tokens", limit)?,
        };
        let mut request = Request {
            max_tokens,
            sampling: params::sampling(self.temperature, self.top_p, self.top_k, self.min_p)?,
            seed: self.seed,
            stop: params::stops("stop", self.stop)?,
            ..Request::default()
        };
        probability.apply(&mut request)?;
        let prompts = prompts(self.prompt.unwrap_or_default())?.into_iter();
        let requests =
            prompts.map(|prompt| Request { prompt: Some(prompt), ..request.clone() }).collect();
        let protocol = Completions {
            chunks: Chunks::new("text_completion", self.stream_options),
            echo: self.echo.unwrap_or(false),
            prompts: Vec::new(),
        };
        Ok(Call { protocol, requests, notes: Vec::new() })
    }
}

/// `prompt`: a text, several, token ids, or several lists of them.
fn prompts(prompt: Value) -> Result<Vec<RawPrompt>, ApiError> {
    let invalid = |path: &str| {
        let message =
            format!("{path}: must be a string or a list of token ids, or a list of these");
        ApiError::invalid("invalid_type", path, message)
    };
    let token = |path: &str, token: &Value| {
        token.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| invalid(path))
    };
    let tokens = |path: &str, ids: &[Value]| {
        let ids = ids.iter().enumerate().map(|(i, id)| token(&format!("{path}[{i}]"), id));
        Ok(RawPrompt::Tokens(ids.collect::<Result<_, ApiError>>()?))
    };
    match prompt {
        Value::Null => {
            let message = "prompt: must be a string or a list of token ids, or a list of these";
            Err(ApiError::missing("prompt", message))
        }
        Value::String(text) => Ok(vec![RawPrompt::Text(text)]),
        Value::Array(list) if list.first().is_some_and(Value::is_number) => {
            Ok(vec![tokens("prompt", &list)?])
        }
        Value::Array(list) if list.is_empty() || list.len() > PROMPTS => {
            let message = format!("prompt: {} prompts, must be 1 to {PROMPTS}", list.len());
            Err(ApiError::value("prompt", message))
        }
        Value::Array(list) => {
            let one = |(i, prompt): (usize, Value)| match prompt {
                Value::String(text) => Ok(RawPrompt::Text(text)),
                Value::Array(ids) => tokens(&format!("prompt[{i}]"), &ids),
                _ => Err(invalid(&format!("prompt[{i}]"))),
            };
            list.into_iter().enumerate().map(one).collect()
        }
        _ => Err(invalid("prompt")),
    }
}

impl Protocol for Completions {
    const ID: &'static str = "cmpl-";

    fn parse(body: Map<String, Value>) -> Result<Parsed<Self>, ApiError> {
        parse(body)
    }

    fn resolve(&mut self, place: &Place<'_>, requests: &mut [Request]) -> Result<(), ApiError> {
        if self.echo {
            let text = |request: &Request| match &request.prompt {
                Some(RawPrompt::Text(text)) => Ok(text.clone()),
                Some(RawPrompt::Tokens(tokens)) => {
                    place.admission.engine.detokenize("prompt", tokens)
                }
                None => Ok(String::new()),
            };
            self.prompts = requests.iter().map(text).collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        for (index, prompt) in self.prompts.iter().enumerate() {
            self.chunks.choice(head, choice(index, prompt, None), out);
        }
    }

    fn event(&mut self, head: &Head, index: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Reasoning(piece) | Event::Answer(piece) => {
                self.chunks.choice(head, choice(index, &piece, None), out);
            }
            Event::Finished(finished) => {
                let last = choice(index, "", Some(&finished.reason));
                self.chunks.last_choice(head, last, &finished, out);
            }
            // There are no tools.
            Event::CallDelta(_)
            | Event::ToolCall(_)
            | Event::Started { .. }
            | Event::Rewound { .. }
            | Event::Logprob(_)
            | Event::Failed(_) => {}
        }
    }

    fn end(&mut self, head: &Head, replies: &[Reply], out: &mut Frames) {
        self.chunks.end(head, replies, out);
    }

    fn fail(&mut self, _: &Head, error: &ApiError, out: &mut Frames) {
        out.data(&error.to_json());
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Value {
        let mut choices = Vec::new();
        for (index, reply) in replies.iter().enumerate() {
            let mut text = self.prompts.get(index).cloned().unwrap_or_default();
            for part in &reply.parts {
                if let Part::Reasoning(piece) | Part::Answer(piece) = part {
                    text += piece;
                }
            }
            choices.push(choice(index, &text, Some(&reply.finished.reason)));
        }
        whole(head, "text_completion", choices, replies)
    }
}

fn choice(index: usize, text: &str, reason: Option<&FinishReason>) -> Value {
    let reason = reason.map(|reason| match reason {
        FinishReason::Length => "length",
        _ => "stop",
    });
    json!({"index": index, "text": text, "logprobs": null, "finish_reason": reason})
}
