//! Tool calls: how each family of models writes them.
//!
//! A [`Format`] is a row of [`FORMATS`]: where calls begin and end, how they are read, and how a grammar
//! writes them. It is chosen by the chat template of the model, or by its vocabulary ([`Format::of_model`]).
//! Each is read by one function over a [`Reader`]; [`Format::read`] calls it with all text that has arrived,
//! whenever more arrives. Its results are final: more text adds to them and changes nothing.
//!
//! # What is read of a malformed call
//! Complete calls are calls, whatever follows them. Arguments have the digits of numbers as the model wrote
//! them. What a call leaves open at the end of the model's turn is closed only if that drops and cuts nothing:
//! half a key makes the call malformed, and so does a value without an end, be it a string without its quote, or
//! a number or bare text after which nothing follows, not even the tag of the call.
//!
//! | file | contents |
//! |---|---|
//! | `formats.rs` | the table of formats |
//! | `reader.rs` | reads text as far as it has arrived, writes arguments as JSON |
//! | `json.rs` | formats whose arguments are JSON: Hermes, Llama 3, Mistral, DeepSeek, Kimi, Cohere, Apertus, Harmony and lists in tags |
//! | `blocks.rs` | formats with tags around bare values: Qwen, Seed-OSS, GLM, MiniMax, DeepSeek from V3.2 |
//! | `bare.rs` | where a bare value ends |
//! | `literals.rs` | pythonic calls, Gemma |
//! | `schema.rs` | values that the parameters of tools allow |
//! | `typed.rs` | bare texts as JSON of these types |
//!
//! # Why the text is read again
//! A parser that keeps its state at every byte is several times as long for each of these formats, and
//! its states are hard to test. Reading again costs time that grows with the square of a call, unless
//! it is done less often for long ones: [`next_read`] bounds the bytes read to 256 times those written.
//!
//! Sources: the chat templates of the models; Qwen3-Coder `qwen3coder_tool_parser.py`; Hermes function
//! calling format.

use serde_json::{Map, Value};

mod bare;
mod blocks;
mod formats;
mod json;
mod literals;
mod reader;
mod schema;
mod typed;
pub use formats::FORMATS;
pub use reader::CallDraft;
use reader::{Dialect, Read, Reader, Stop};
pub use schema::Schemas;

/// How a family of models writes calls.
#[derive(Debug)]
pub struct Format {
    /// For tests and messages.
    pub name: &'static str,
    /// A chat template that contains all of one of these lists writes calls so.
    signs: &'static [&'static [&'static str]],
    /// The tag before a call; `None` if there is none.
    pub open: Option<&'static str>,
    /// The tag after it; `None` if calls last to the end of the reply, or to the next tag.
    pub close: Option<&'static str>,
    /// Special tokens within calls.
    pub inner: &'static [&'static str],
    /// The character with which an answer begins that may be a call without a tag.
    pub bare: Option<char>,
    /// The text with which a call begins after its tag, where models leave out the tag.
    pub untagged: Option<&'static str>,
    /// What ids of calls look like.
    pub ids: Ids,
    dialect: Dialect,
    read: fn(&mut Reader<'_>) -> Read,
    /// How a grammar writes it.
    pub written: Written,
}

/// What ids of calls look like: the templates of some models show them to the model, or check them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ids {
    /// `call_` and 24 hexadecimal digits.
    Call,
    /// Nine letters and digits.
    Nine,
    /// `functions.name:0`, numbered in the conversation.
    Function,
}

/// How a grammar writes calls. Tags are part of it.
#[derive(Debug)]
pub struct Written {
    /// Before the first call, and after the last.
    pub section: [&'static str; 2],
    /// Before the name, between name and arguments, and after these.
    pub call: [&'static str; 3],
    /// Whether a number stands after the name.
    pub is_numbered: bool,
    /// Between two calls.
    pub between: &'static str,
    /// How arguments are written.
    pub arguments: Arguments,
}

/// How a grammar writes arguments.
#[derive(Debug)]
pub enum Arguments {
    /// As a JSON object.
    Json,
    /// One parameter after the other.
    Parameters {
        /// Before and after the key.
        key: [&'static str; 2],
        /// How strings are written; other values are JSON.
        text: Text,
        /// After the value.
        close: &'static str,
        /// Between two parameters.
        separator: &'static str,
    },
}

/// How a parameter that is a string is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Text {
    /// Bare, up to what comes after the value.
    Bare,
    /// Bare too. What comes after the key says that the value is a string; this comes there before other
    /// values, which are JSON.
    Declared(&'static str),
    /// As in JSON.
    Json,
    /// Between two of these tokens.
    Quoted(&'static str),
}

impl Format {
    /// The format in which this chat template writes calls.
    pub fn of(template: &str) -> &'static Self {
        Self::named(template).unwrap_or(&FORMATS[FORMATS.len() - 1])
    }

    /// The same; a template that names none has the first format of whose tags the vocabulary has all. The tag of
    /// Hermes alone names none: other formats have it, too.
    pub fn of_model(template: &str, has_token: impl Fn(&str) -> bool) -> &'static Self {
        let hermes = &FORMATS[FORMATS.len() - 1];
        let has_tags = |format: &&Self| {
            let is_own = format.open.is_some_and(|open| open.starts_with(['<', '[']))
                && (format.open != hermes.open || !format.inner.is_empty());
            let mut tags = format.open.iter().chain(&format.close).chain(format.inner);
            format.bare.is_none() && is_own && tags.all(|tag| has_token(tag))
        };
        let of_vocabulary = || FORMATS.iter().find(has_tags);
        Self::named(template).or_else(of_vocabulary).unwrap_or(hermes)
    }

    /// The format that the template names.
    fn named(template: &str) -> Option<&'static Self> {
        let has = |sign: &&str| template.contains(sign);
        let is_format = |format: &&Self| format.signs.iter().any(|all| all.iter().all(has));
        FORMATS.iter().find(is_format)
    }

    /// Whether a reply consists of messages, and calls are some of them; see [`super::harmony`].
    pub fn has_messages(&self) -> bool {
        self.open.is_none() && self.bare.is_none()
    }

    /// Reads `text`, what has arrived of one or several calls between their tags; `has_ended` if it is
    /// all. Without tags it `is_bare`.
    pub fn read(&self, text: &str, schemas: &Schemas, has_ended: bool, is_bare: bool) -> Reading {
        let reader = Reader { has_ended, is_bare, ..Reader::new(text, schemas, self.dialect) };
        read_with(reader, self.read)
    }

    /// Reads `text`, an answer that may be calls as JSON, whatever the format; see [`Format::may_answer_json`].
    pub fn read_answer(&self, text: &str, schemas: &Schemas, has_ended: bool) -> Reading {
        let reader =
            Reader { has_ended, is_bare: true, ..Reader::new(text, schemas, Dialect::Json) };
        read_with(reader, json::objects)
    }

    /// Whether an answer that is nothing but JSON objects which name tools is calls: models that forget
    /// their tags, or never learned them, write such.
    pub fn may_answer_json(&self) -> bool {
        self.bare.is_none() && !self.has_messages()
    }
}

fn read_with(mut reader: Reader<'_>, read: fn(&mut Reader<'_>) -> Read) -> Reading {
    let length = reader.rest.len();
    let state = match read(&mut reader) {
        Ok(()) => State::Complete,
        Err(Stop::Early) => State::Early { is_in_value: reader.is_in_value },
        Err(Stop::Malformed) => State::Malformed,
    };
    Reading {
        stopped: length - reader.rest.len(),
        tail: length - reader.left,
        calls: reader.calls,
        state,
        is_repaired: reader.is_repaired,
        is_pending: reader.is_pending,
        is_half: reader.is_half,
        ends_call: reader.ends_call,
    }
}

#[cfg(test)]
impl Format {
    /// Texts of a chat template that name the format.
    pub fn signs(&self) -> &'static [&'static str] {
        self.signs[0]
    }

    /// All tags.
    pub fn tags(&self) -> impl Iterator<Item = &'static str> {
        self.open.into_iter().chain(self.close).chain(self.inner.iter().copied())
    }
}

#[cfg(test)]
impl Written {
    /// These calls, as a model writes them.
    pub fn spell(&self, calls: &[(&str, &[(&str, Value)])]) -> String {
        fn value(of: &Value, text: Text) -> String {
            match (text, of) {
                (Text::Bare | Text::Declared(_), Value::String(text)) => text.clone(),
                (Text::Quoted(quote), Value::String(text)) => format!("{quote}{text}{quote}"),
                (Text::Quoted(_), Value::Array(all)) => {
                    let all: Vec<_> = all.iter().map(|one| value(one, text)).collect();
                    format!("[{}]", all.join(","))
                }
                (Text::Quoted(_), Value::Object(all)) => {
                    let all = all.iter().map(|(key, one)| format!("{key}:{}", value(one, text)));
                    format!("{{{}}}", all.collect::<Vec<_>>().join(","))
                }
                (_, other) => other.to_string(),
            }
        }
        let call = |(name, all): &(&str, &[(&str, Value)])| {
            let arguments = match &self.arguments {
                Arguments::Json => {
                    let all = all.iter().map(|(key, value)| (key.to_string(), value.clone()));
                    Value::from(all.collect::<Map<_, _>>()).to_string()
                }
                Arguments::Parameters { key: [open, after], text, close, separator } => {
                    let one = |(key, one): &(&str, Value)| {
                        let after = match *text {
                            Text::Declared(after) if !one.is_string() => after,
                            _ => after,
                        };
                        format!("{open}{key}{after}{}{close}", value(one, *text))
                    };
                    all.iter().map(one).collect::<Vec<_>>().join(separator)
                }
            };
            let number = if self.is_numbered { ":0" } else { "" };
            let [head, before, after] = self.call;
            format!("{head}{name}{number}{before}{arguments}{after}")
        };
        let calls: Vec<_> = calls.iter().map(call).collect();
        format!("{}{}{}", self.section[0], calls.join(self.between), self.section[1])
    }
}

/// What was read of calls.
#[derive(Debug)]
pub struct Reading {
    /// The calls, the last of which may be incomplete.
    pub calls: Vec<CallDraft>,
    /// How reading ended.
    pub state: State,
    /// Bytes before the place where reading stopped.
    pub stopped: usize,
    /// Bytes before the text after the last complete call.
    pub tail: usize,
    /// Whether something was read that the format does not allow.
    pub is_repaired: bool,
    /// Whether the text ends within something that the arguments do not have, or within quotes.
    is_pending: bool,
    /// Whether the text ends with a value whose end only a tag after it tells.
    is_half: bool,
    /// Whether the text ends with what is the end of the call, unless more text follows.
    pub ends_call: bool,
}

/// How reading ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// At the end, and nothing is missing.
    Complete,
    /// At the end of a text that is not complete.
    Early {
        /// Whether that is within a value, so that a tag there may belong to the value.
        is_in_value: bool,
    },
    /// At a text that is not in the format.
    Malformed,
}

impl Reading {
    /// Whether a name has been read.
    pub fn has_name(&self) -> bool {
        self.calls.iter().any(|call| !call.name.is_empty())
    }

    /// Whether only tags are missing after the last call.
    pub fn lacks_tags_only(&self) -> bool {
        let is_early = matches!(self.state, State::Early { .. }) && !self.is_pending;
        is_early && self.calls.last().is_some_and(|call| call.is_complete)
    }

    /// Whether text follows the last complete call that is part of none.
    pub fn has_tail(&self) -> bool {
        self.state == State::Malformed || self.is_pending
    }

    /// Number of calls before the first incomplete one.
    pub fn complete(&self) -> usize {
        self.calls.iter().take_while(|call| call.is_complete).count()
    }

    /// Closes what the text of the last call leaves open, if its last value is whole, and nothing else is
    /// missing; a tag after the call (`has_tag`) ends a value, too. Whether that call is complete now.
    pub fn close_last(&mut self, schemas: &Schemas, has_tag: bool) -> bool {
        let Some(last) = self.calls.last_mut() else { return false };
        let is_early = matches!(self.state, State::Early { .. });
        let is_whole = !self.is_pending && (has_tag || !self.is_half);
        let has_all = is_whole && last.arguments.len() > 1;
        if !last.is_complete && is_early && has_all && schemas.has(&last.name) {
            last.arguments = reader::closed(&last.arguments);
            last.is_complete = true;
        }
        last.is_complete
    }
}

impl CallDraft {
    /// The arguments; complete ones are JSON. A number beyond those of a [`Value`] is a string of its digits.
    pub fn values(&self) -> Map<String, Value> {
        match steersman_request::Arguments::parse(&self.arguments) {
            Some(arguments) => Map::clone(&arguments),
            None => {
                tracing::error!("arguments of a call are no JSON");
                Map::new()
            }
        }
    }
}

/// At which length a text of `length` bytes is read again.
pub fn next_read(length: usize) -> usize {
    length + length / 256 + 1
}
