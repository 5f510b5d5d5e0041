//! Translates between text and tokens: conversation to prompt, tokens to reply.
//!
//! [`Text`] holds the text side of one model folder: chat template, tokenizer, end-of-turn tokens,
//! sampling defaults. It is immutable and shared by all requests. [`Reply`] is the state of one
//! request: the current phase, incomplete characters, stop strings, tool calls.
//! Never sees an array, a policy or a connection, and never chooses a token.
//!
//! | file | contents |
//! |---|---|
//! | `folder.rs` | the small files of a model folder |
//! | `probe.rs`, `conversation.rs` | what the template can express, found when the model loads; how a conversation is written for it |
//! | `tokenizer.rs` | text to tokens, markers |
//! | `detokenize.rs` | tokens to text, whole characters only |
//! | `harmony.rs` | replies that consist of messages, as gpt-oss writes them |
//! | `reply.rs` | reasoning, answer and tool calls as clients see them |
//! | `tool_call/` | the formats of tool calls: reading them, and how grammars write them |
//! | `stop.rs`, `trim.rs` | stop strings, white space |
//!
//! `steersman-jinja` renders chat templates, and keeps the text of a request apart from the template's.
//!
//! # Why no `bos` is added
//! A prompt is encoded as in transformers' `apply_chat_template` and mlx-lm: special tokens that the
//! template wrote are parsed, and the tokenizer's post-processor adds none. A template that needs a
//! `bos` writes it: a second one doubles it for Llama 3, and one that the template does not write
//! makes a prompt that the model was not trained on.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use serde_json::{Map, Value};

use steersman_request::error::{ConfigError, Error, RequestError, Result};
use steersman_request::{Effort, Message, RawPrompt, Request, Sampling};

mod conversation;
mod detokenize;
mod folder;
pub mod grammar;
pub mod harmony;
mod probe;
mod reply;
mod stop;
mod tokenizer;
pub mod tool_call;
mod trim;

#[cfg(test)]
mod tests;

pub use reply::{Phase, Piece, Reply};
pub use steersman_jinja::Template;

use conversation::Written;
use detokenize::Detokenizer;
use folder::{Folder, Templates};
use steersman_jinja::taint::{self, Origin, Taint};
use tokenizer::{Marker, Tokenizer};
use tool_call::Format;

/// The special tokens before the prefix, before the suffix, and before what the model fills in: of Qwen's
/// coders and CodeGemma, of StarCoder, of SantaCoder, of DeepSeek's coders.
const INFILL_MARKS: [[&str; 3]; 4] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
];

/// Tokenizer, chat template and text settings of one model; immutable and cheap to clone.
#[derive(Debug, Clone)]
pub struct Text {
    tokenizer: Arc<Tokenizer>,
    templates: Arc<Templates>,
    special_tokens: Map<String, Value>,
    eos: Vec<u32>,
    sampling: Sampling,
    /// Number of tokens that the model has embeddings of.
    embeddings: usize,
    special_tokens_in_text: bool,
}

impl Text {
    /// Reads the model folder `dir`: tokenizer.json, tokenizer_config.json, config.json, a chat
    /// template and an optional generation_config.json.
    ///
    /// # Errors
    /// [`Error::Model`] names the file that is missing, damaged or incomplete.
    pub fn load(dir: &Path) -> Result<Self> {
        let folder = Folder::read(dir)?;
        let mut tokenizer = Tokenizer::load(&folder.file("tokenizer.json"))?;
        let special_tokens = folder.special_tokens();
        let mut eos = folder.eos();
        let eos_token = special_tokens.get("eos_token").and_then(Value::as_str);
        if let Some(id) = eos_token.and_then(|token| tokenizer.id(token))
            && !eos.contains(&id)
        {
            eos.push(id);
        }
        let mut templates = folder.templates()?;
        let source = templates.choose(true).source();
        let format = Format::of_model(source, |tag| tokenizer.id(tag).is_some());
        tokenizer.set_format(format);
        tokenizer.set_reasoning(source);
        templates.probe(&special_tokens, tokenizer.format());
        if templates.probed(false).has_switch() && !tokenizer.format().has_messages() {
            tokenizer.spell_reasoning(templates.choose(false).source());
        }
        if tokenizer.format().has_messages() {
            let ends = harmony::ENDS.iter().filter_map(|end| tokenizer.id(end));
            let new: Vec<u32> = ends.filter(|id| !eos.contains(id)).collect();
            eos.extend(new);
        }
        if eos.is_empty() {
            let path = folder.file("generation_config.json");
            let problem = "has no eos_token_id, nor do config.json and tokenizer_config.json: \
                the model would never end its turn; add the id of its end-of-turn token";
            return Err(Error::Config(ConfigError::Model { path, problem: problem.into() }));
        }
        tokenizer.hide(&eos);
        tokenizer.protect(|spelling| templates.contain(spelling));
        let text = Self {
            tokenizer: Arc::new(tokenizer),
            templates: Arc::new(templates),
            special_tokens,
            eos,
            sampling: folder.sampling(),
            embeddings: usize::MAX,
            special_tokens_in_text: false,
        };
        if text.depends_on_special_tokens() {
            tracing::warn!(
                folder = %dir.display(),
                "chat template depends on special tokens in text, which it gets as other text"
            );
        }
        Ok(text)
    }

    /// Whether the chat template renders tainted text otherwise than plain text.
    fn depends_on_special_tokens(&self) -> bool {
        let spelled = self.tokenizer.protected_spellings().concat();
        let message = |role: &str| Message {
            role: role.into(),
            content: format!("{spelled}a{spelled}"),
            ..Message::default()
        };
        let messages = [message("user"), message("assistant"), message("user")];
        let variables = Variables { messages: &messages, ..Variables::default() };
        let [plain, tainted] = [None, Some(self.tokenizer.taint())]
            .map(|taint| self.render_with(&variables, taint).unwrap_or_default().text);
        plain != taint::plain_text(&tainted)
    }

    /// For a model with this number of `embeddings`: encoding a text to a token beyond them is an
    /// error, where the model would read memory that is not its own.
    pub fn with_embeddings(self, embeddings: usize) -> Self {
        Self { embeddings, ..self }
    }

    /// Whether special tokens that the text of a request spells are parsed, which lets clients forge
    /// turns.
    pub fn with_special_tokens_in_text(self, special_tokens_in_text: bool) -> Self {
        Self { special_tokens_in_text, ..self }
    }

    /// Tokens of the conversation, rendered as [`Text::render`] does. Special tokens are parsed where
    /// the template writes them; those that the text of the request spells are encoded as text.
    ///
    /// # Errors
    /// As [`Text::render`] and [`Text::encode`].
    pub fn prompt(&self, variables: &Variables<'_>) -> Result<Vec<u32>> {
        self.encode_rendered(&self.render_prompt(variables)?)
    }

    /// The first half of [`Text::prompt`].
    pub fn render_prompt(&self, variables: &Variables<'_>) -> Result<Rendered> {
        let taint = (!self.special_tokens_in_text).then(|| self.tokenizer.taint());
        let mut rendered = self.render_with(variables, taint)?;
        let text = &mut rendered.text;
        let ends_reasoning = variables.add_generation_prompt && variables.reasoning == Some(false);
        // These templates cannot turn reasoning off. With tools, the model chooses the channel.
        if self.call_format().has_messages() {
            let is_free = variables.tools.is_empty() && text.ends_with(harmony::GENERATION_PROMPT);
            if ends_reasoning && is_free {
                text.push_str(harmony::ANSWER);
            }
        } else if ends_reasoning && let Some([open, close]) = self.tokenizer.reasoning_tags() {
            // A template that always begins reasoning, as that of DeepSeek R1.
            if text.trim_end().ends_with(open) {
                text.truncate(text.trim_end().len());
                text.push_str(&format!("\n\n{close}\n\n"));
            }
        }
        Ok(rendered)
    }

    /// The second half of [`Text::prompt`].
    pub fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<u32>> {
        if !rendered.is_tainted {
            return self.encode(&rendered.text);
        }
        self.embedded(self.tokenizer.encode_tainted(&rendered.text)?)
    }

    /// Renders the conversation as transformers' `apply_chat_template` does, after it was written for the template
    /// ([`conversation::Shape`]).
    ///
    /// # Errors
    /// [`Error::Template`] with the message of the template if it rejects the conversation, or what it would leave
    /// out; [`RequestError::Field`] if the client's variables would replace the conversation, or the template has
    /// no tools.
    pub fn render(&self, variables: &Variables<'_>) -> Result<String> {
        Ok(self.render_with(variables, None)?.text)
    }

    /// [`Text::render`], with the text of the request tainted.
    fn render_with(&self, variables: &Variables<'_>, taint: Option<&Taint>) -> Result<Rendered> {
        let &Variables {
            messages,
            tools,
            variables,
            reasoning,
            effort,
            budget,
            add_generation_prompt,
        } = variables;
        let mut own = Map::new();
        for (name, value) in variables {
            if ["messages", "tools", "documents", "add_generation_prompt"].contains(&name.as_str())
            {
                let problem = format!("`{name}` cannot be set here");
                return Err(Error::Request(RequestError::Field {
                    field: "chat_template_kwargs",
                    problem,
                }));
            }
            own.insert(name.clone(), value.clone());
        }
        let (template, probe) =
            (self.templates.choose(!tools.is_empty()), self.templates.probed(!tools.is_empty()));
        if !tools.is_empty() && !probe.has_tools {
            let problem = "this model does not support tools: its chat template has no place for them; leave them \
                           out, or use a model that has `tools` in /api/show";
            return Err(RequestError::Field { field: "tools", problem: problem.into() }.into());
        }
        let shape = probe.shape(!tools.is_empty());
        let Written { messages, mut notes } = shape.write(messages)?;
        let messages = messages.iter().map(|message| shape.value(message));
        let mut messages = messages.collect::<Result<Vec<_>>>()?;
        let mut tools = if tools.is_empty() { Value::Null } else { tools.into() };
        if let Some(taint) = taint {
            // A name is not rendered: the template asks for it.
            own.values_mut().for_each(|value| taint.value(value, Origin::Client));
            taint.value(&mut tools, Origin::Client);
            for message in &mut messages {
                let is_reply = message["role"] == "assistant";
                taint.value(message, if is_reply { Origin::Model } else { Origin::Client });
            }
        }
        let reasoning = probe.reasoning(reasoning, effort, budget);
        notes.extend(reasoning.notes);
        let mut context = self.special_tokens.clone();
        context.extend(reasoning.amount);
        context.extend(own);
        context.extend(reasoning.switches);
        context.insert("messages".into(), messages.into());
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        context.insert("tools".into(), tools);
        let text = template.render(&context)?;
        Ok(Rendered { text, is_tainted: taint.is_some(), notes })
    }

    /// `tokens`, if the model has embeddings of all of them.
    fn embedded(&self, tokens: Vec<u32>) -> Result<Vec<u32>> {
        let Some(id) = tokens.iter().find(|id| **id as usize >= self.embeddings) else {
            return Ok(tokens);
        };
        let token = self.tokenizer.token(*id).unwrap_or_default();
        let problem = format!(
            "it contains `{token}`, which is token {id}; the model has embeddings of {} tokens",
            self.embeddings
        );
        Err(RequestError::Tokenizer(problem).into())
    }

    /// Tokens of a rendered prompt: special tokens are parsed, none are added (see the module).
    ///
    /// # Errors
    /// [`RequestError::Tokenizer`] if the tokenizer has no token for part of the text, or the model
    /// no embedding of a token.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.embedded(self.tokenizer.encode(text)?)
    }

    /// Tokens of a prompt that no template renders. The tokenizer's post-processor adds its special
    /// tokens to text, as where models are trained on plain text.
    ///
    /// # Errors
    /// As [`Text::encode`]; [`RequestError::UnknownToken`] if a token is not one of the model's.
    pub fn raw_prompt(&self, prompt: &RawPrompt) -> Result<Vec<u32>> {
        match prompt {
            RawPrompt::Text(text) => self.embedded(self.tokenizer.encode_document(text)?),
            RawPrompt::Tokens(tokens) => {
                let Some(token) = self.unknown_token(tokens) else { return Ok(tokens.clone()) };
                Err(RequestError::UnknownToken { token, size: self.vocab_size() }.into())
            }
            RawPrompt::Infill { prefix, suffix } => self.embedded(self.infill(prefix, suffix)?),
        }
    }

    /// The prompt for what stands between `prefix` and `suffix`.
    fn infill(&self, prefix: &str, suffix: &str) -> Result<Vec<u32>> {
        let ids = |marks: &[&str; 3]| -> Option<Vec<u32>> {
            marks.iter().map(|mark| self.tokenizer.id(mark)).collect()
        };
        let Some(marks) = INFILL_MARKS.iter().find_map(ids) else {
            let problem = "the model has no tokens to fill in text; leave it out".into();
            return Err(RequestError::Field { field: "suffix", problem }.into());
        };
        // The tokenizer's own first token, if it has one.
        let mut tokens = self.tokenizer.encode_document("")?;
        for (mark, text) in marks.into_iter().zip([prefix, suffix, ""]) {
            tokens.push(mark);
            tokens.extend(self.tokenizer.encode_plain(text)?);
        }
        Ok(tokens)
    }

    /// Cuts `tokens` of a prompt that no template renders to `limit`; returns whether it did. The tokens that the
    /// tokenizer puts at the end of every text, such as the one whose hidden state is an embedding, stay there.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn truncate(&self, tokens: &mut Vec<u32>, limit: usize) -> Result<bool> {
        if tokens.len() <= limit {
            return Ok(false);
        }
        cut(tokens, &self.tokenizer.encode_document("")?, limit);
        Ok(true)
    }

    /// The first of `tokens` that is no id of the vocabulary.
    pub fn unknown_token(&self, tokens: &[u32]) -> Option<u32> {
        tokens.iter().copied().find(|id| *id as usize >= self.vocab_size())
    }

    /// Tokens of injected text, which continues other text. Never contains a special token or a
    /// marker, whatever the text spells.
    ///
    /// # Errors
    /// As [`Text::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.embedded(self.tokenizer.encode_plain(text)?)
    }

    /// Text of `tokens` with special tokens.
    pub fn decode_all(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode_all(tokens)
    }

    /// The bytes of each token within other text, by id; `None` for tokens that carry structure and
    /// for ids without a token.
    pub fn token_bytes(&self) -> Vec<Option<Vec<u8>>> {
        let decoder = Detokenizer::new(self.tokenizer.clone());
        let bytes = |id: usize| {
            // Ids fit u32: the tokenizer has them so.
            let id = id as u32;
            let bytes = (!self.tokenizer.is_protected(id)).then(|| decoder.bytes(id))?;
            (!bytes.is_empty()).then_some(bytes)
        };
        (0..self.vocab_size()).map(bytes).collect()
    }

    /// The bytes of a token within other text.
    pub fn bytes(&self, token: u32) -> Vec<u8> {
        Detokenizer::new(self.tokenizer.clone()).bytes(token)
    }

    /// How the model writes tool calls.
    pub fn call_format(&self) -> &'static Format {
        self.tokenizer.format()
    }

    /// The id of the special token spelled `text` with which calls are written; `None` if it is text.
    pub fn call_token(&self, text: &str) -> Option<u32> {
        let id = self.tokenizer.id(text)?;
        let marker = self.tokenizer.marker(id);
        let is_tag = matches!(marker, Some(Marker::OpenCall | Marker::CloseCall));
        (is_tag || self.tokenizer.call_token(id).is_some()).then_some(id)
    }

    /// Whether `token` is `</think>`.
    pub fn closes_reasoning(&self, token: u32) -> bool {
        self.reasoning_end() == Some(token)
    }

    /// The token that ends the reasoning; `None` if the model spells its marker in several, or has none.
    pub fn reasoning_end(&self) -> Option<u32> {
        self.tokenizer.marker_id(Marker::CloseReasoning)
    }

    /// The token that is `text`, special tokens included; `None` if it is several.
    pub fn single_token(&self, text: &str) -> Option<u32> {
        match self.encode(text).ok()?[..] {
            [token] => Some(token),
            _ => None,
        }
    }

    /// Text of `tokens` without special tokens.
    pub fn decode(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode(tokens)
    }

    /// The largest token id plus one, of the tokens that the model has embeddings of. Logits may be
    /// longer: checkpoints pad the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.size().min(self.embeddings)
    }

    /// Describes how the vocabulary of the model folder `other` differs from this one; `None` if
    /// every token has the same id in both.
    ///
    /// # Errors
    /// [`Error::Model`] if its tokenizer.json cannot be read.
    pub fn vocabulary_difference(&self, other: &Path) -> Result<Option<String>> {
        let other = Tokenizer::load(&other.join("tokenizer.json"))?;
        Ok(other.vocabulary_difference(&self.tokenizer))
    }

    /// The end-of-turn tokens; never empty.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Default sampling parameters, from generation_config.json. Client and profile override them.
    ///
    /// `do_sample: false`, or neither `do_sample` nor a temperature, is greedy; `do_sample: true`
    /// without a temperature is temperature 1; a missing filter is off.
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// Whether the model can reason: `<think>` and `</think>` are single tokens, and the chat
    /// template uses them, or has a switch and names them; or replies consist of messages.
    pub fn supports_reasoning(&self) -> bool {
        if self.call_format().has_messages() || self.tokenizer.spells_reasoning() {
            return true;
        }
        let source = self.templates.choose(false).source();
        let uses = |marker: Marker| source.contains(self.tokenizer.marker_text(marker));
        self.tokenizer.marker_id(Marker::OpenReasoning).is_some()
            && (uses(Marker::OpenReasoning) || uses(Marker::CloseReasoning))
    }

    /// Whether a request can change how the model reasons: it writes reasoning, or its chat template has a
    /// variable for it.
    pub fn can_be_told_to_reason(&self) -> bool {
        self.supports_reasoning() || self.templates.probed(false).controls_reasoning()
    }

    /// Whether definitions of tools reach the model.
    pub fn supports_tools(&self) -> bool {
        self.templates.probed(true).has_tools
    }

    /// SHA-256 of tokenizer.json, for the fingerprint of saved state.
    pub fn digest(&self) -> [u8; 32] {
        self.tokenizer.digest()
    }

    /// An empty reply to `prompt`. `stop` holds the stop strings; `tools` holds the request's tools,
    /// whose schemas type the arguments of calls. Without tools nothing is parsed as a call.
    pub fn reply(&self, prompt: &[u32], stop: &[String], tools: &[Value]) -> Reply {
        Reply::new(self.tokenizer.clone(), prompt, stop, tools)
    }
}

/// What a chat template renders.
#[derive(Debug, Clone, Copy)]
pub struct Variables<'a> {
    /// The conversation.
    pub messages: &'a [Message],
    /// Definitions of tools, as the client sent them.
    pub tools: &'a [Value],
    /// The client's `chat_template_kwargs`.
    pub variables: &'a Map<String, Value>,
    /// Whether the model shall reason; `None` leaves it to the template, which means on for some and off for
    /// others.
    pub reasoning: Option<bool>,
    /// How much the client wants it to.
    pub effort: Option<Effort>,
    /// Most tokens of reasoning that the client wants.
    pub budget: Option<u32>,
    /// Whether to render the beginning of the reply.
    pub add_generation_prompt: bool,
}

static NO_VARIABLES: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

impl Default for Variables<'_> {
    /// An empty conversation, and the beginning of the reply.
    fn default() -> Self {
        Self {
            messages: &[],
            tools: &[],
            variables: &NO_VARIABLES,
            reasoning: None,
            effort: None,
            budget: None,
            add_generation_prompt: true,
        }
    }
}

impl<'a> Variables<'a> {
    /// The variables of `request`, with `reasoning` as decided.
    pub fn of(request: &'a Request, reasoning: Option<bool>) -> Self {
        Self {
            messages: &request.messages,
            tools: &request.tools,
            variables: &request.template_variables,
            reasoning,
            effort: request.effort.filter(|effort| effort.reasons()),
            budget: request.reasoning_budget,
            add_generation_prompt: true,
        }
    }
}

/// A rendered conversation.
#[derive(Debug, Default)]
pub struct Rendered {
    text: String,
    is_tainted: bool,
    notes: Vec<String>,
}

impl Rendered {
    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.text.len()
    }

    /// What the client should know of how the template got its conversation.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }
}

/// Cuts `tokens`, which are more than `limit`, in front of the tokens that end `empty`, the tokens of an empty text.
fn cut(tokens: &mut Vec<u32>, empty: &[u32], limit: usize) {
    let pairs = tokens.iter().rev().zip(empty.iter().rev());
    let end = pairs.take_while(|(token, own)| token == own).count().min(limit);
    tokens.drain(limit - end..tokens.len() - end);
}
