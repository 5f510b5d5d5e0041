//! OpenAI's completions: `POST /v1/completions`, whose prompts no template renders.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use steersman_engine::request::{self, Event, Logprob, PromptToken, RawPrompt, Request};

use super::chat::{FinishReason, Usage, includes_usage};
use super::error::ApiError;
use super::extension::Extension;
use super::probability::{self, Probability, TextLogprobs};
use super::protocol::{Call, Parsed, Place, Protocol};
use super::reply::{Frames, Head, Part, Reply, usage};
use super::sampling::Sampling;
use super::schema::Schemas;
use super::schema::shapes::{Prompts, Texts};
use super::{fields, json, params};

/// Most prompts of a body: each is a request of its own.
const PROMPTS: usize = 128;

/// Most replies to a body.
const REPLIES: usize = 128;

/// Tokens of a reply if the client does not say, as OpenAI documents.
const MAX_TOKENS: u32 = 16;

/// The state of one response.
#[derive(Debug)]
pub struct Completions {
    /// Whether a stream ends with a chunk that has the usage; it is null in the others.
    include_usage: bool,
    /// Whether each text begins with its prompt.
    echo: bool,
    /// Choices of each prompt.
    choices: usize,
    /// The text of each prompt, if `echo`.
    prompts: Vec<String>,
    /// Whether the echo has the probabilities of the prompt.
    reports_prompts: bool,
    /// An echo of each prompt, if `reports_prompts`.
    echoes: Vec<Echo>,
    /// Probabilities of tokens of each choice, for its next chunk.
    logprobs: Vec<TextLogprobs>,
}

/// The echo of one prompt with its probabilities, which a stream sends when they are complete.
#[derive(Debug, Default)]
struct Echo {
    is_sent: bool,
    /// Events of choices that came before it.
    held: Vec<(usize, Event)>,
}

/// The fields of the body that have an effect.
#[derive(Deserialize, JsonSchema)]
struct Body {
    model: Option<String>,
    #[schemars(with = "Prompts")]
    prompt: Option<Value>,
    stream: Option<bool>,
    stream_options: Option<params::StreamOptions>,
    /// 16 if absent.
    #[schemars(range(min = -1))]
    max_tokens: Option<i64>,
    #[serde(default, deserialize_with = "params::seed")]
    #[schemars(with = "Option<i64>")]
    seed: Option<u64>,
    #[schemars(with = "Option<Texts>")]
    stop: Option<Value>,
    /// Puts the prompt before the text.
    echo: Option<bool>,
    /// Asks for the text between prompt and suffix.
    suffix: Option<String>,
    #[schemars(range(min = 1, max = 32))]
    n: Option<u64>,
    best_of: Option<u64>,
}

/// A completion, or one event of a streamed one.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Completion {
    id: String,
    #[schemars(extend("const" = "text_completion"))]
    object: &'static str,
    created: u64,
    model: String,
    system_fingerprint: String,
    choices: Vec<CompletionChoice>,
    /// In a stream only with `include_usage`, and null until the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    /// In a stream in the last chunk of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    steersman: Option<Extension>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct CompletionChoice {
    index: usize,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<FinishReason>,
    /// In a whole reply with several choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    steersman: Option<Extension>,
}

/// The schema of a body.
fn schema(schemas: &mut Schemas) -> Value {
    let parts = [schemas.of::<Body>(), schemas.of::<Sampling>(), schemas.of::<Probability>()];
    schemas.body(fields::COMPLETIONS, &parts)
}

/// Parses a body.
fn parse(mut fields: Map<String, Value>) -> Result<Parsed<Completions>, ApiError> {
    fields::check(fields::COMPLETIONS, &fields)?;
    let probability = fields::take(&mut fields, &probability::FIELDS);
    let probability: Probability = json::typed_body(probability)?;
    let sampling = Sampling::take("", &mut fields)?;
    let mut body: Body = json::typed_body(fields)?;
    let (model, stream) = (body.model.take(), body.stream.unwrap_or(false));
    Ok(Parsed { model, stream, call: body.check(sampling, probability) })
}

impl Body {
    fn check(
        self,
        sampling: Sampling,
        probability: Probability,
    ) -> Result<Call<Completions>, ApiError> {
        let echo = self.echo.unwrap_or(false);
        let choices = params::choices(self.n, self.best_of)?;
        let max_tokens = match self.max_tokens {
            None => Some(MAX_TOKENS),
            // Only the probabilities of the prompt.
            Some(0) if echo && choices == 1 => Some(0),
            limit => params::limit("max_tokens", limit)?,
        };
        let mut request = Request {
            max_tokens,
            sampling: sampling.check()?,
            seed: self.seed,
            stop: params::stops("stop", self.stop)?,
            ..Request::default()
        };
        probability.apply(&mut request)?;
        if echo {
            request.prompt_logprobs = request.logprobs;
        }
        let prompts = prompts("prompt", self.prompt.unwrap_or_default(), PROMPTS)?;
        let prompts = match self.suffix.filter(|suffix| !suffix.is_empty()) {
            Some(suffix) => infill(prompts, &suffix, &request)?,
            None => prompts,
        };
        let prompts = prompts.into_iter();
        let requests: Vec<_> =
            prompts.map(|prompt| Request { prompt: Some(prompt), ..request.clone() }).collect();
        if choices * requests.len() > REPLIES {
            let count = requests.len();
            let message = format!("n: {choices} choices of {count} prompts, at most {REPLIES}");
            return Err(ApiError::value("n", message));
        }
        let protocol = Completions {
            include_usage: includes_usage(self.stream_options),
            echo,
            choices,
            prompts: Vec::new(),
            reports_prompts: request.prompt_logprobs.is_some(),
            echoes: requests.iter().map(|_| Echo::default()).collect(),
            logprobs: vec![TextLogprobs::default(); choices * requests.len()],
        };
        let (tool_fields, notes) = (Vec::new(), Vec::new());
        Ok(Call { protocol, requests, choices, tool_fields, notes })
    }
}

/// Prompts for what stands between each of `prompts` and `suffix`.
fn infill(
    prompts: Vec<RawPrompt>,
    suffix: &str,
    request: &Request,
) -> Result<Vec<RawPrompt>, ApiError> {
    let refused = |message: &str| ApiError::unsupported("suffix", message);
    if request.prompt_logprobs.is_some() {
        return Err(refused("suffix: the prompt has no probabilities; drop echo or logprobs"));
    }
    let one = |prompt| match prompt {
        RawPrompt::Text(prefix) => Ok(RawPrompt::Infill { prefix, suffix: suffix.into() }),
        _ => Err(refused("suffix: the prompt must be text")),
    };
    prompts.into_iter().map(one).collect()
}

/// The prompts in the field `name`: a text, several, token ids, or several lists of them; at most `most`.
pub fn prompts(name: &str, prompt: Value, most: usize) -> Result<Vec<RawPrompt>, ApiError> {
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
            let message =
                format!("{name}: must be a string or a list of token ids, or a list of these");
            Err(ApiError::missing(name, message))
        }
        Value::String(text) => Ok(vec![RawPrompt::Text(text)]),
        Value::Array(list) if list.first().is_some_and(Value::is_number) => {
            Ok(vec![tokens(name, &list)?])
        }
        Value::Array(list) if list.is_empty() || list.len() > most => {
            let message = format!("{name}: {} texts, must be 1 to {most}", list.len());
            Err(ApiError::value(name, message))
        }
        Value::Array(list) => {
            let one = |(i, prompt): (usize, Value)| match prompt {
                Value::String(text) => Ok(RawPrompt::Text(text)),
                Value::Array(ids) => tokens(&format!("{name}[{i}]"), &ids),
                _ => Err(invalid(&format!("{name}[{i}]"))),
            };
            list.into_iter().enumerate().map(one).collect()
        }
        _ => Err(invalid(name)),
    }
}

/// The field of prompt `index` of `count` in the field `name`.
pub fn place_of(name: &str, index: usize, count: usize) -> String {
    if count > 1 { format!("{name}[{index}]") } else { name.into() }
}

impl Protocol for Completions {
    type Whole = Completion;

    const ID: &'static str = "cmpl-";

    const OPERATION: &'static str = "text_completion";

    fn schema(schemas: &mut Schemas) -> Value {
        schema(schemas)
    }

    fn parse(body: Map<String, Value>) -> Result<Parsed<Self>, ApiError> {
        parse(body)
    }

    fn prompt_field(&self, index: usize) -> String {
        place_of("prompt", index / self.choices, self.echoes.len())
    }

    fn resolve(&mut self, place: &Place<'_>, requests: &mut [Request]) -> Result<(), ApiError> {
        if self.echo {
            let text = |request: &Request| match &request.prompt {
                Some(RawPrompt::Text(text) | RawPrompt::Infill { prefix: text, .. }) => {
                    Ok(text.clone())
                }
                Some(RawPrompt::Tokens(tokens)) => {
                    place.admission.backend.detokenize("prompt", tokens)
                }
                None => Ok(String::new()),
            };
            self.prompts = requests.iter().map(text).collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        if !self.reports_prompts {
            (0..self.prompts.len()).for_each(|prompt| self.echo(head, prompt, out));
        }
    }

    fn event(&mut self, head: &Head, index: usize, event: Event, out: &mut Frames) {
        let prompt = index / self.choices;
        if !self.reports_prompts || self.echoes[prompt].is_sent {
            return self.write(head, index, event, out);
        }
        match event {
            Event::PromptToken(PromptToken { bytes, logprob, top }) => {
                for index in self.choices_of(prompt) {
                    self.logprobs[index].push(&bytes, logprob, &top);
                }
            }
            // The prompt runs for the first choice, which begins when it has run.
            event if index == self.choices_of(prompt).start => {
                self.echo(head, prompt, out);
                self.write(head, index, event, out);
                self.echoes[prompt].is_sent = true;
                for (index, event) in std::mem::take(&mut self.echoes[prompt].held) {
                    self.write(head, index, event, out);
                }
            }
            event => self.echoes[prompt].held.push((index, event)),
        }
    }

    fn end(&mut self, head: &Head, replies: &[Reply], out: &mut Frames) {
        if self.include_usage {
            let usage = Some(Some(usage(head, replies).into()));
            out.data(&Completion { usage, ..self.object(head, Vec::new()) });
        }
        out.done();
    }

    fn fail(&mut self, _: &Head, error: &ApiError, out: &mut Frames) {
        out.data(&error.openai());
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Completion {
        let extension = |reply: &Reply| Extension::new(head, &reply.finished);
        let choice = |(index, reply): (usize, &Reply)| {
            let mut text = self.prompts.get(index / self.choices).cloned().unwrap_or_default();
            for part in &reply.parts {
                if let Part::Reasoning(piece) | Part::Answer(piece) = part {
                    text += piece;
                }
            }
            // The prompt has run for the first choice.
            let prompt = &replies[index - index % self.choices].prompt;
            let mut logprobs = TextLogprobs::default();
            for PromptToken { bytes, logprob, top } in prompt.iter().chain(reply.logprobs.iter()) {
                logprobs.push(&bytes, logprob, &top);
            }
            let steersman = (replies.len() > 1).then(|| extension(reply));
            let reason = Some(&reply.finished.reason);
            CompletionChoice { steersman, ..choice(index, text, logprobs.take(), reason) }
        };
        let choices = replies.iter().enumerate().map(choice).collect();
        Completion {
            usage: Some(Some(usage(head, replies).into())),
            steersman: replies.first().map(extension),
            ..self.object(head, choices)
        }
    }
}

impl Completions {
    /// A chunk with these choices; or a whole reply, without usage and extension.
    fn object(&self, head: &Head, choices: Vec<CompletionChoice>) -> Completion {
        Completion {
            id: head.id.clone(),
            object: "text_completion",
            created: head.created,
            model: head.model.clone(),
            system_fingerprint: head.fingerprint.clone(),
            choices,
            usage: self.include_usage.then_some(None),
            steersman: None,
        }
    }

    fn choices_of(&self, prompt: usize) -> Range<usize> {
        prompt * self.choices..(prompt + 1) * self.choices
    }

    /// The first chunk of each choice of a prompt: the prompt, and the probabilities so far.
    fn echo(&mut self, head: &Head, prompt: usize, out: &mut Frames) {
        for index in self.choices_of(prompt) {
            let logprobs = self.logprobs[index].take();
            let first = choice(index, self.prompts[prompt].clone(), logprobs, None);
            out.data(&self.object(head, vec![first]));
        }
    }

    /// An event after the echo, if any.
    fn write(&mut self, head: &Head, index: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Reasoning(piece) | Event::Answer(piece) => {
                let logprobs = self.logprobs[index].take();
                out.data(&self.object(head, vec![choice(index, piece, logprobs, None)]));
            }
            Event::Logprob(Logprob { token, top }) => {
                self.logprobs[index].push(&token.bytes, Some(token.logprob), &top);
            }
            Event::Finished(finished) => {
                let logprobs = self.logprobs[index].take();
                let last = choice(index, String::new(), logprobs, Some(&finished.reason));
                let steersman = Some(Extension::new(head, &finished));
                out.data(&Completion { steersman, ..self.object(head, vec![last]) });
            }
            // There are no tools.
            Event::CallDelta(_)
            | Event::ToolCall(_)
            | Event::Started { .. }
            | Event::PromptToken(_)
            | Event::Embedding(_)
            | Event::Rewound { .. }
            | Event::Routed { .. }
            | Event::PromptCounted { .. }
            | Event::Note { .. }
            | Event::Failed(_) => {}
        }
    }
}

fn choice(
    index: usize,
    text: String,
    logprobs: Option<TextLogprobs>,
    reason: Option<&request::FinishReason>,
) -> CompletionChoice {
    // There are no tools.
    let finish_reason = reason.map(|reason| match reason {
        request::FinishReason::Length => FinishReason::Length,
        _ => FinishReason::Stop,
    });
    CompletionChoice { index, text, logprobs, finish_reason, steersman: None }
}
