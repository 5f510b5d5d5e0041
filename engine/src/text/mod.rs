//! Between people's text and a model's tokens: conversation to prompt, tokens to reply.
//!
//! [`Text`] is what one model folder says about text: chat template, tokenizer, tokens that end a
//! turn, sampling. It is immutable and shared by all requests. [`Reply`] is one request's state:
//! which part a token belongs to, characters not yet complete, stop strings, calls of tools.
//! Never sees an array, a policy, or a connection, and never decides what the model says next.
//!
//! | file | what it holds |
//! |---|---|
//! | `folder.rs` | the small files of a model folder |
//! | `template.rs`, `python.rs` | Jinja as transformers runs it; Python's way to write values |
//! | `tokenizer.rs` | text to tokens, markers |
//! | `detokenize.rs` | tokens to text, whole characters only |
//! | `reply.rs` | thought, answer, calls: what clients see |
//! | `tool_call.rs`, `stop.rs`, `trim.rs` | the parts of a reply's work that need no state of it |
//!
//! # Why no `bos` is added
//! A prompt is encoded as transformers' `apply_chat_template` and mlx-lm do it: special tokens in
//! the rendered text are parsed, and the tokenizer's post-processor adds none. Templates of
//! models that want a `bos` write it; adding one as well gives Llama 3 two of them, and adding one
//! where the template has none gives the model a prompt that it was not trained on.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::request::{Message, Sampling};

mod detokenize;
mod folder;
mod python;
mod reply;
mod stop;
mod template;
mod tokenizer;
mod tool_call;
mod trim;

#[cfg(test)]
mod tests;

pub use reply::{Phase, Piece, Reply};
pub use template::Template;

use folder::{Folder, Templates};
use tokenizer::{Marker, Tokenizer};

/// What one model folder says about text; immutable and cheap to clone.
#[derive(Debug, Clone)]
pub struct Text {
    tokenizer: Arc<Tokenizer>,
    templates: Arc<Templates>,
    special_tokens: Map<String, Value>,
    eos: Vec<u32>,
    sampling: Sampling,
}

impl Text {
    /// Reads the model folder `dir`: tokenizer.json, tokenizer_config.json, config.json, a chat
    /// template and, where it is there, generation_config.json.
    ///
    /// # Errors
    /// [`Error::Model`] names the file that is missing, damaged or incomplete.
    pub fn load(dir: &Path) -> Result<Self> {
        let folder = Folder::read(dir)?;
        let mut tokenizer = Tokenizer::load(&folder.file("tokenizer.json"))?;
        let special_tokens = folder.special_tokens();
        let mut eos = folder.eos();
        let named = special_tokens.get("eos_token").and_then(Value::as_str);
        if let Some(id) = named.and_then(|token| tokenizer.id(token))
            && !eos.contains(&id)
        {
            eos.push(id);
        }
        if eos.is_empty() {
            let path = folder.file("generation_config.json");
            let problem = "names no eos_token_id, nor do config.json and tokenizer_config.json: \
                the model would never end its turn";
            return Err(Error::Model { path, problem: problem.into() });
        }
        tokenizer.silence(&eos);
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            templates: Arc::new(folder.templates()?),
            special_tokens,
            eos,
            sampling: folder.sampling(),
        })
    }

    /// The conversation as the model's prompt, as transformers' `apply_chat_template` renders it.
    ///
    /// `variables` are the client's `chat_template_kwargs`. `reasoning` sets `enable_thinking`;
    /// `None` leaves it undefined, and templates differ in what they do then.
    ///
    /// # Errors
    /// [`Error::Template`] where the template refuses the conversation, in its own words;
    /// [`Error::Invalid`] where `variables` would replace the conversation itself.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[Value],
        variables: &Map<String, Value>,
        reasoning: Option<bool>,
        add_generation_prompt: bool,
    ) -> Result<String> {
        let mut context = self.special_tokens.clone();
        for (name, value) in variables {
            if ["messages", "tools", "documents", "add_generation_prompt"].contains(&name.as_str())
            {
                let problem = format!("`{name}` cannot be set here");
                return Err(Error::Invalid { field: "chat_template_kwargs", problem });
            }
            context.insert(name.clone(), value.clone());
        }
        if let Some(reasoning) = reasoning {
            context.insert("enable_thinking".into(), reasoning.into());
        }
        let template = self.templates.choose(!tools.is_empty());
        let developer = template.source().contains("developer");
        let messages = messages.iter().map(|message| template_message(message, developer));
        let messages = messages.collect::<Result<Vec<_>>>()?;
        let tools = if tools.is_empty() { Value::Null } else { tools.into() };
        context.insert("messages".into(), messages.into());
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        context.insert("tools".into(), tools);
        template.render(&context)
    }

    /// Tokens of a rendered prompt; special tokens in it are parsed, none are added (see the
    /// module).
    ///
    /// # Errors
    /// [`Error::Invalid`] where the tokenizer has no token for some of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer.encode(text)
    }

    /// Tokens of injected text, which goes on after other text: whatever it spells, no special
    /// token and no marker is among them.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer.encode_plain(text)
    }

    /// Text of `tokens`, decoded at once, special tokens left out.
    pub fn decode(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode(tokens)
    }

    /// The largest token id plus one. A model's logits may be longer, padded to a round number.
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.size()
    }

    /// Where the vocabulary of the model folder `other` differs from this one, in words; `None`
    /// where every token has the same id in both.
    ///
    /// # Errors
    /// [`Error::Model`] when its tokenizer.json cannot be read.
    pub fn vocabulary_difference(&self, other: &Path) -> Result<Option<String>> {
        let other = Tokenizer::load(&other.join("tokenizer.json"))?;
        Ok(other.vocabulary_difference(&self.tokenizer))
    }

    /// The tokens that end a turn; never empty.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Sampling where neither client nor profile says otherwise, from generation_config.json.
    ///
    /// `do_sample: false`, or neither `do_sample` nor a temperature, is greedy; `do_sample: true`
    /// without a temperature is temperature 1; what is missing filters nothing.
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// Whether the model has thoughts: `<think>` and `</think>` are single tokens, and the chat
    /// template knows of them.
    pub fn supports_reasoning(&self) -> bool {
        let source = self.templates.choose(false).source();
        let marked = |marker: Marker| source.contains(marker.text());
        self.tokenizer.marker_id(Marker::OpenReasoning).is_some()
            && (marked(Marker::OpenReasoning) || marked(Marker::CloseReasoning))
    }

    /// SHA-256 of tokenizer.json, for the fingerprint of saved state.
    pub fn digest(&self) -> [u8; 32] {
        self.tokenizer.digest()
    }

    /// The reply to `prompt`, at its beginning. `stop` are texts that end the answer; `tools` are
    /// the request's: they type the arguments of calls, and without tools nothing is a call.
    pub fn reply(&self, prompt: &[u32], stop: &[String], tools: &[Value]) -> Reply {
        Reply::new(self.tokenizer.clone(), prompt, stop, tools)
    }
}

/// A message as templates read it.
///
/// The thought goes by the names that transformers gives it. A `developer` is the `system` of
/// templates that do not know that role: most of them would leave the message out in silence.
fn template_message(message: &Message, developer: bool) -> Result<Value> {
    let mut value = serde_json::to_value(message).map_err(|e| Error::Template(e.to_string()))?;
    if message.role == "developer" && !developer {
        value["role"] = "system".into();
    }
    if let Some(thought) = &message.reasoning_content {
        value["thinking"] = thought.as_str().into();
    }
    Ok(value)
}
