//! Parses the fields that change or report the probabilities of tokens: `logit_bias`, penalties,
//! `min_tokens`, `ignore_eos`, `logprobs`.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use steersman_engine::policy::TokenBias;
use steersman_engine::request::{Logprob, Penalties, Request, TokenLogprob};

use super::error::ApiError;

/// The fields that this module reads.
pub const FIELDS: [&str; 9] = [
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "repetition_context_size",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
];

/// Most tokens of `logit_bias`.
const BIASES: usize = 1024;

/// Most likely tokens that are reported at each position.
const TOP_LOGPROBS: u32 = 20;

/// The fields of a body that this module reads.
#[derive(Debug, Default, Deserialize)]
pub struct Probability {
    logit_bias: Option<Map<String, Value>>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    repetition_penalty: Option<f32>,
    repetition_context_size: Option<u32>,
    min_tokens: Option<u32>,
    ignore_eos: Option<bool>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
}

impl Probability {
    /// Checks the values and writes them into `request`.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn apply(mut self, request: &mut Request) -> Result<(), ApiError> {
        request.biases = self.logit_bias.take().map_or_else(|| Ok(Vec::new()), biases)?;
        let none = Penalties::default();
        let penalty = |name, value: Option<f32>| match value {
            Some(value) if !(-2.0..=2.0).contains(&value) => {
                Err(ApiError::value(name, format!("{name}: is {value}, must be from -2 to 2")))
            }
            value => Ok(value.unwrap_or(0.0)),
        };
        let repetition = self.repetition_penalty.unwrap_or(none.repetition);
        if !(repetition > 0.0 && repetition <= 10.0) {
            let name = "repetition_penalty";
            let message = format!("{name}: is {repetition}, must be above 0, at most 10");
            return Err(ApiError::value(name, message));
        }
        request.penalties = Penalties {
            presence: penalty("presence_penalty", self.presence_penalty)?,
            frequency: penalty("frequency_penalty", self.frequency_penalty)?,
            repetition,
            window: self.repetition_context_size.unwrap_or(none.window),
        };
        request.min_tokens = self.min_tokens.unwrap_or(0);
        request.ignores_end = self.ignore_eos.unwrap_or(false);
        if request.response_format.is_some() && (request.ignores_end || request.min_tokens > 0) {
            let name = if request.ignores_end { "ignore_eos" } else { "min_tokens" };
            let message = format!("{name}: the form of the reply decides where it ends; drop one");
            return Err(ApiError::value(name, message));
        }
        if let Some(most) = request.max_tokens
            && request.min_tokens > most
        {
            let least = request.min_tokens;
            let message = format!("min_tokens: is {least}, more than max_tokens, which is {most}");
            return Err(ApiError::value("min_tokens", message));
        }
        self.logprobs_of(request)
    }

    fn logprobs_of(&self, request: &mut Request) -> Result<(), ApiError> {
        let wanted = self.logprobs.unwrap_or(false);
        let top = self.top_logprobs.unwrap_or(0);
        if top > TOP_LOGPROBS {
            let message = format!("top_logprobs: is {top}, at most {TOP_LOGPROBS} are reported");
            return Err(ApiError::value("top_logprobs", message));
        }
        if top > 0 && !wanted {
            let message = "top_logprobs: requires \"logprobs\": true";
            return Err(ApiError::value("top_logprobs", message));
        }
        request.logprobs = wanted.then_some(top);
        Ok(())
    }
}

/// `logprobs` of a choice: null without any.
pub fn chat_logprobs(content: Vec<Value>) -> Value {
    match content.is_empty() {
        true => Value::Null,
        false => json!({"content": content, "refusal": null}),
    }
}

/// An element of `logprobs.content`.
pub fn chat_logprob(Logprob { token, top }: &Logprob) -> Value {
    let mut value = one(token);
    value["top_logprobs"] = top.iter().map(one).collect();
    value
}

fn one(TokenLogprob { bytes, logprob }: &TokenLogprob) -> Value {
    let token = String::from_utf8_lossy(bytes);
    json!({"token": token, "logprob": finite(*logprob), "bytes": bytes})
}

/// JSON has no infinity; OpenAI writes -9999 for what cannot come.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// `logit_bias`: from token ids, as text, to numbers from -100 to 100.
fn biases(biases: Map<String, Value>) -> Result<Vec<TokenBias>, ApiError> {
    if biases.len() > BIASES {
        let message = format!("logit_bias: has {} tokens, at most {BIASES}", biases.len());
        return Err(ApiError::value("logit_bias", message));
    }
    let bias = |(token, bias): (String, Value)| {
        let path = format!("logit_bias.{token}");
        let Ok(token) = token.parse() else {
            let message = format!("{path}: must be the id of a token");
            return Err(ApiError::value(path, message));
        };
        match bias.as_f64() {
            Some(bias) if (-100.0..=100.0).contains(&bias) => {
                Ok(TokenBias { token, bias: bias as f32 })
            }
            _ => {
                let message = format!("{path}: must be a number from -100 to 100");
                Err(ApiError::value(path, message))
            }
        }
    };
    biases.into_iter().map(bias).collect()
}
