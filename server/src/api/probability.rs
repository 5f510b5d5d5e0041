//! Parses the fields that change or report the probabilities of tokens: `logit_bias`, penalties,
//! `min_tokens`, `ignore_eos`, `logprobs`.

use std::collections::BTreeMap;
use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use steersman_engine::policy::TokenBias;
use steersman_engine::request::{Logprob, Penalties, PromptToken, Request, TokenLogprob};

use super::error::ApiError;
use super::schema::shapes::{Biases, Logprobs};

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

/// Most probabilities that are held for the replies to a body: those of tokens and of likeliest ones. As JSON they
/// take up to 800 bytes each, all at the same time.
pub const PROBABILITIES: usize = 1 << 18;

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

/// A token with its probability and the likeliest ones in its place: in chats, in responses and for Ollama.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "TokenLogprobs")]
pub struct TokenProbabilities {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
    top_logprobs: Vec<TokenProbability>,
}

#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "TokenLogprob")]
struct TokenProbability {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
}

impl From<&Logprob> for TokenProbabilities {
    fn from(Logprob { token, top }: &Logprob) -> Self {
        let TokenProbability { token, logprob, bytes } = token.into();
        Self { token, logprob, bytes, top_logprobs: top.iter().map(Into::into).collect() }
    }
}

impl From<&TokenLogprob> for TokenProbability {
    fn from(TokenLogprob { bytes, logprob }: &TokenLogprob) -> Self {
        let token = String::from_utf8_lossy(bytes).into_owned();
        Self { token, logprob: finite(*logprob), bytes: bytes.clone() }
    }
}

/// Probabilities of tokens of a reply or a prompt, until they are sent. Values of their own would take more than a
/// kilobyte for a token with 20 likeliest ones, and as JSON 16.
#[derive(Debug, Clone, Default)]
pub struct Probabilities {
    /// The texts of all entries.
    bytes: Vec<u8>,
    /// End of the text of each entry, and its probability; NaN if it has none.
    entries: Vec<(usize, f32)>,
    /// End of the entries of each token: the token itself, and then the likeliest ones.
    tokens: Vec<usize>,
}

impl Probabilities {
    /// Adds a token.
    pub fn push(&mut self, bytes: &[u8], logprob: Option<f32>, top: &[TokenLogprob]) {
        self.entry(bytes, logprob.unwrap_or(f32::NAN));
        top.iter().for_each(|TokenLogprob { bytes, logprob }| self.entry(bytes, *logprob));
        self.tokens.push(self.entries.len());
    }

    /// Adds a token of a reply.
    pub fn push_logprob(&mut self, Logprob { token, top }: &Logprob) {
        self.push(&token.bytes, Some(token.logprob), top);
    }

    fn entry(&mut self, bytes: &[u8], logprob: f32) {
        self.bytes.extend_from_slice(bytes);
        self.entries.push((self.bytes.len(), logprob));
    }

    /// Takes the tokens as they are sent in chats, in responses and for Ollama.
    pub fn take(&mut self) -> Vec<TokenProbabilities> {
        let held = std::mem::take(self);
        held.logprobs(0..held.len()).map(|logprob| (&logprob).into()).collect()
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The tokens.
    pub fn iter(&self) -> impl Iterator<Item = PromptToken> {
        (0..self.len()).map(|at| self.token(at))
    }

    /// The probabilities of the tokens of a reply in `range`.
    pub fn logprobs(&self, range: Range<usize>) -> impl Iterator<Item = Logprob> {
        range.map(|at| {
            let PromptToken { bytes, logprob, top } = self.token(at);
            Logprob { token: TokenLogprob { bytes, logprob: logprob.unwrap_or(0.0) }, top }
        })
    }

    fn token(&self, at: usize) -> PromptToken {
        let entry = |at: usize| {
            let start = at.checked_sub(1).map_or(0, |at| self.entries[at].0);
            let (end, logprob) = self.entries[at];
            TokenLogprob { bytes: self.bytes[start..end].to_vec(), logprob }
        };
        let (start, end) = (at.checked_sub(1).map_or(0, |at| self.tokens[at]), self.tokens[at]);
        let TokenLogprob { bytes, logprob } = entry(start);
        let logprob = (!logprob.is_nan()).then_some(logprob);
        PromptToken { bytes, logprob, top: (start + 1..end).map(entry).collect() }
    }
}

/// `logprobs` of a completion, which grows token by token.
#[derive(Debug, Clone, Default, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    #[schemars(with = "Vec<Option<BTreeMap<String, f64>>>")]
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
    /// Characters of the tokens so far.
    #[serde(skip)]
    offset: usize,
}

impl TextLogprobs {
    /// Adds a token. `top` gets the token itself as well.
    pub fn push(&mut self, bytes: &[u8], logprob: Option<f32>, top: &[TokenLogprob]) {
        let token = spelled(bytes);
        let mut likeliest = Map::new();
        for TokenLogprob { bytes, logprob } in top {
            likeliest.entry(spelled(bytes)).or_insert(finite(*logprob).into());
        }
        if let Some(logprob) = logprob {
            likeliest.entry(token.clone()).or_insert(finite(logprob).into());
        }
        self.tokens.push(token);
        self.token_logprobs.push(logprob.map(finite));
        self.top_logprobs.push(logprob.map(|_| likeliest));
        self.text_offset.push(self.offset);
        // A character counts where it begins.
        self.offset += bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count();
    }

    /// The tokens since the last call, if there are any.
    pub fn take(&mut self) -> Option<Self> {
        let rest = Self { offset: self.offset, ..Self::default() };
        let taken = std::mem::replace(self, rest);
        (!taken.tokens.is_empty()).then_some(taken)
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

/// JSON has no infinity; OpenAI writes -9999 for what cannot come. The digits are those of the `f32`.
fn finite(logprob: f32) -> f64 {
    logprob.max(-9999.0).into()
}

/// `logit_bias`: from token ids, as text, to numbers from -100 to 100.
fn biases(biases: Map<String, Value>) -> Result<Vec<TokenBias>, ApiError> {
    if biases.len() > BIASES {
        let message = format!("logit_bias: has {} tokens, at most {BIASES}", biases.len());
        return Err(ApiError::value("logit_bias", message));
    }
    let bias = |(token, bias): (String, Value)| {
        let path = format!("logit_bias.{token}");
        // Otherwise "5", "05" and "+5" were three fields for one token.
        let id = token.parse().ok().filter(|id: &u32| id.to_string() == token);
        let Some(token) = id else {
            let message = format!("{path}: must be the id of a token, in decimal digits");
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A8: the probabilities of a whole reply took 16.8 kB a token, counted nowhere.
    #[test]
    fn probabilities_are_held_compactly() {
        let one = |text: &str, logprob| TokenLogprob { bytes: text.into(), logprob };
        let tokens = [
            PromptToken { bytes: b"a".to_vec(), logprob: None, top: Vec::new() },
            PromptToken {
                bytes: b"\xf0\x9f".to_vec(),
                logprob: Some(-0.5),
                top: vec![one("", -1.0), one("word", f32::NEG_INFINITY)],
            },
            PromptToken { bytes: Vec::new(), logprob: Some(0.0), top: vec![one(" x", 0.0)] },
        ];
        let mut held = Probabilities::default();
        for PromptToken { bytes, logprob, top } in &tokens {
            held.push(bytes, *logprob, top);
        }
        assert_eq!(held.iter().collect::<Vec<_>>(), tokens);
        let logprob = held.logprobs(1..2).next().unwrap();
        assert_eq!((logprob.token.logprob, &logprob.top), (-0.5, &tokens[1].top));
        let top = vec![one(" the", -1.0); 20];
        let mut held = Probabilities::default();
        (0..1000).for_each(|_| held.push(b" the", Some(-1.0), &top));
        let bytes = held.bytes.len() + 16 * held.entries.len() + 8 * held.len();
        assert!(bytes / 1000 < 500, "{} bytes a token", bytes / 1000);
    }
}
