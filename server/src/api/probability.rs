//! Parses the fields that change or report the probabilities of tokens: `logit_bias`, penalties,
//! `min_tokens`, `ignore_eos`, `logprobs`.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use steersman_engine::policy::TokenBias;
use steersman_engine::request::{Logprob, Penalties, Request, TokenLogprob};

use super::error::ApiError;
use super::openapi::shapes::{Biases, Logprobs};

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
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub struct Probability {
    #[schemars(with = "Option<Biases>")]
    logit_bias: Option<Map<String, Value>>,
    /// Subtracted once from the logits of tokens of the reply.
    #[schemars(range(min = -2.0, max = 2.0))]
    presence_penalty: Option<f32>,
    /// Subtracted as often as a token occurs.
    #[schemars(range(min = -2.0, max = 2.0))]
    frequency_penalty: Option<f32>,
    /// Divides the logits of tokens of prompt and reply; above 0.
    #[schemars(range(min = 0.0, max = 10.0))]
    repetition_penalty: Option<f32>,
    /// Newest tokens that the repetition penalty counts; 0 for all.
    repetition_context_size: Option<u32>,
    /// Tokens before which the model cannot end its turn.
    min_tokens: Option<u32>,
    /// Whether the model cannot end its turn at all.
    ignore_eos: Option<bool>,
    #[schemars(with = "Option<Logprobs>")]
    logprobs: Option<Value>,
    #[schemars(range(max = 20))]
    top_logprobs: Option<u32>,
}

impl Probability {
    /// Checks the values and writes them into `request`.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn apply(mut self, request: &mut Request) -> Result<(), ApiError> {
        request.biases = self.logit_bias.take().map_or_else(|| Ok(Vec::new()), biases)?;
        request.penalties = Penalties {
            presence: penalty("presence_penalty", self.presence_penalty)?,
            frequency: penalty("frequency_penalty", self.frequency_penalty)?,
            repetition: repetition("repetition_penalty", self.repetition_penalty)?,
            window: self.repetition_context_size.unwrap_or(0),
        };
        request.min_tokens = self.min_tokens.unwrap_or(0);
        request.ignores_end = self.ignore_eos.unwrap_or(false);
        if request.response_format.is_some() && (request.ignores_end || request.min_tokens > 0) {
            let name = if request.ignores_end { "ignore_eos" } else { "min_tokens" };
            let message = format!("{name}: the form of the reply decides where it ends; drop one");
            return Err(ApiError::value(name, message));
        }
        if let Some(most) = request.max_tokens.or(request.max_answer_tokens)
            && request.min_tokens > most
        {
            let least = request.min_tokens;
            let message = format!("min_tokens: is {least}, more than max_tokens, which is {most}");
            return Err(ApiError::value("min_tokens", message));
        }
        self.logprobs_of(request)
    }

    fn logprobs_of(&self, request: &mut Request) -> Result<(), ApiError> {
        let invalid = || {
            let message = "logprobs: must be true, false, or a number of likeliest tokens";
            ApiError::invalid("invalid_type", "logprobs", message)
        };
        let (wanted, count) = match self.logprobs.as_ref().unwrap_or(&Value::Null) {
            Value::Null => (false, 0),
            Value::Bool(wanted) => (*wanted, 0),
            // What mlx_lm's clients send for none.
            Value::Number(count) if count.as_i64() == Some(-1) => (false, 0),
            Value::Number(count) => {
                let count = count.as_u64().ok_or_else(invalid)?;
                (true, u32::try_from(count).unwrap_or(u32::MAX))
            }
            _ => return Err(invalid()),
        };
        if count > TOP_LOGPROBS {
            let message = format!("logprobs: is {count}, at most {TOP_LOGPROBS} are reported");
            return Err(ApiError::value("logprobs", message));
        }
        let top = self.top_logprobs.unwrap_or(count);
        request.logprobs = logprobs(wanted, Some(top), "\"logprobs\": true")?;
        Ok(())
    }
}

/// [`Request::logprobs`], if the client wants them and `top_logprobs` likeliest tokens beside; `condition`
/// is what must be in its body for these.
///
/// # Errors
/// 400 naming `top_logprobs`.
pub fn logprobs(wanted: bool, top: Option<u32>, condition: &str) -> Result<Option<u32>, ApiError> {
    let top = top.unwrap_or(0);
    if top > TOP_LOGPROBS {
        let message = format!("top_logprobs: is {top}, at most {TOP_LOGPROBS} are reported");
        return Err(ApiError::value("top_logprobs", message));
    }
    if top > 0 && !wanted {
        let message = format!("top_logprobs: requires {condition}");
        return Err(ApiError::value("top_logprobs", message));
    }
    Ok(wanted.then_some(top))
}

/// What is subtracted from the logits of tokens that have occurred, in the field `name`.
pub fn penalty(name: &str, value: Option<f32>) -> Result<f32, ApiError> {
    match value {
        Some(value) if !(-2.0..=2.0).contains(&value) => {
            Err(ApiError::value(name, format!("{name}: is {value}, must be from -2 to 2")))
        }
        value => Ok(value.unwrap_or(0.0)),
    }
}

/// What the logits of tokens that have occurred are divided by, in the field `name`.
pub fn repetition(name: &str, value: Option<f32>) -> Result<f32, ApiError> {
    let value = value.unwrap_or(1.0);
    if value > 0.0 && value <= 10.0 {
        return Ok(value);
    }
    Err(ApiError::value(name, format!("{name}: is {value}, must be above 0, at most 10")))
}

/// `logprobs` of a choice: null without any.
pub fn chat_logprobs(content: Vec<Value>) -> Value {
    match content.is_empty() {
        true => Value::Null,
        false => json!({"content": content, "refusal": null}),
    }
}

/// The probabilities of a token in chats, in responses and for Ollama.
pub fn chat_logprob(Logprob { token, top }: &Logprob) -> Value {
    let mut value = one(token);
    value["top_logprobs"] = top.iter().map(one).collect();
    value
}

/// `logprobs` of a completion, which grows token by token.
#[derive(Debug, Clone, Default)]
pub struct TextLogprobs {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
    /// Characters of the tokens so far.
    offset: usize,
}

impl TextLogprobs {
    /// Adds a token. `top` gets the token itself too.
    pub fn push(&mut self, bytes: &[u8], logprob: Option<f32>, top: &[TokenLogprob]) {
        let token = spelled(bytes);
        let mut likeliest = Map::new();
        for TokenLogprob { bytes, logprob } in top {
            likeliest.entry(spelled(bytes)).or_insert(finite(*logprob).into());
        }
        if let Some(logprob) = logprob {
            likeliest.entry(token.clone()).or_insert(finite(logprob).into());
        }
        self.tokens.push(token.into());
        self.token_logprobs.push(logprob.map(finite).into());
        self.top_logprobs.push(logprob.map(|_| likeliest).into());
        self.text_offset.push(self.offset.into());
        // A character counts where it begins.
        self.offset += bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count();
    }

    /// The tokens since the last call: null if there are none.
    pub fn take(&mut self) -> Value {
        let Self { tokens, token_logprobs, top_logprobs, text_offset, .. } = self;
        if tokens.is_empty() {
            return Value::Null;
        }
        let take = std::mem::take::<Vec<Value>>;
        json!({
            "tokens": take(tokens),
            "token_logprobs": take(token_logprobs),
            "top_logprobs": take(top_logprobs),
            "text_offset": take(text_offset),
        })
    }
}

/// The text of a token; what is not whole characters as OpenAI writes it: `bytes:\xf0\x9f`.
fn spelled(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => {
            let hex: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            format!("bytes:{hex}")
        }
    }
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
