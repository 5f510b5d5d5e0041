//! The vocabulary of a model: text to tokens, special tokens and markers.
//!
//! In a rendered prompt, special tokens are parsed where the template wrote them, and not in the
//! text of the request ([`Tokenizer::encode_tainted`]). Text from policies is encoded plainly: it
//! yields no added token (`<|im_end|>`, `</think>`, `<tool_call>`). Neither can forge structure.
//! `detokenize` decodes replies; [`Tokenizer::decode`] decodes whole texts only.
//!
//! # Why onig
//! Models were trained with the published Python `tokenizers`, which splits words with Oniguruma:
//! its Unicode tables are the reference. It needs a C compiler, and so does MLX.
//!
//! Source: `tokenizers` 0.23; transformers' `split_special_tokens` for plain text.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

use sha2::{Digest, Sha256};
use steersman_jinja::taint::{self, Origin, Taint};
use tokenizers::{AddedToken, AddedVocabulary, DecoderWrapper};

use super::harmony;
use super::tool_call::Format;
use steersman_request::error::{ConfigError, Error, RequestError, Result};

/// A tag that changes the phase of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Marker {
    /// `<think>`, or another of [`REASONING_TAGS`].
    OpenReasoning,
    /// `</think>`
    CloseReasoning,
    /// The tag before calls, [`Format::open`].
    OpenCall,
    /// The tag after calls, [`Format::close`].
    CloseCall,
}

impl Marker {
    pub const ALL: [Self; 4] =
        [Self::OpenReasoning, Self::CloseReasoning, Self::OpenCall, Self::CloseCall];

    /// Its text, where reasoning stands between the tags `reasoning` and calls are written in `format`; `None` if
    /// the format has no such tag.
    fn text(self, reasoning: [&'static str; 2], format: &Format) -> Option<&'static str> {
        match self {
            Self::OpenReasoning => Some(reasoning[0]),
            Self::CloseReasoning => Some(reasoning[1]),
            Self::OpenCall => format.open,
            Self::CloseCall => format.close,
        }
    }
}

/// The tags of reasoning, which are tokens: Qwen and most others; Seed-OSS; Apertus; Cohere; Magistral; Gemma 4.
const REASONING_TAGS: [[&str; 2]; 6] = [
    ["<think>", "</think>"],
    ["<seed:think>", "</seed:think>"],
    ["<|inner_prefix|>", "<|inner_suffix|>"],
    ["<|START_THINKING|>", "<|END_THINKING|>"],
    ["[THINK]", "[/THINK]"],
    GEMMA_CHANNEL,
];

/// The tags around a channel of Gemma 4.
const GEMMA_CHANNEL: [&str; 2] = ["<|channel>", "<channel|>"];
/// The name of its channel of reasoning, which follows the tag.
const GEMMA_REASONING: &str = "thought\n";

/// Tokens around an answer, which are none of its text: Cohere; ERNIE 4.5.
const ANSWER_TAGS: [&str; 4] =
    ["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<response>", "</response>"];

/// The tokenizer of one model.
pub(super) struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Built when a text first spells a token that it must not contain.
    respelled: OnceLock<Respelled>,
    added: BTreeMap<u32, AddedToken>,
    /// The added tokens that carry structure, by spelling, and the lengths of these spellings.
    spellings: HashMap<String, u32>,
    lengths: BTreeSet<usize>,
    /// Tokens without text in replies: special and end-of-turn tokens.
    hidden: HashSet<u32>,
    /// Tokens that a client's text cannot contain; see [`Tokenizer::protect`].
    protected: HashSet<u32>,
    taint: Taint,
    /// The tags of reasoning.
    reasoning: [&'static str; 2],
    /// Whether these are text, see [`Tokenizer::spell_reasoning`].
    spells_reasoning: bool,
    /// How the model writes calls.
    format: &'static Format,
    markers: [Option<u32>; 4],
    /// The tokens within calls.
    call_tokens: HashMap<u32, &'static str>,
    /// The special tokens of messages, if replies consist of them.
    message_tags: HashMap<u32, harmony::Tag>,
    /// Whether encoding prepends a blank to the text.
    adds_space: bool,
    size: usize,
    digest: [u8; 32],
}

/// A copy of the tokenizer whose added tokens, except white space, are renamed to strings that cannot
/// occur in text; see [`taint::parsed`].
struct Respelled {
    inner: tokenizers::Tokenizer,
    /// The token that each spelling stands for.
    ids: HashMap<String, u32>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn load(path: &Path) -> Result<Self> {
        let bad =
            |problem: String| Error::Config(ConfigError::Model { path: path.into(), problem });
        let bytes = steersman_gguf::files::read_at(path).map_err(|e| {
            bad(format!("cannot be read ({e}); a model folder needs its tokenizer.json"))
        })?;
        let parsed = Self::parse(&bytes);
        parsed.map_err(|e| bad(format!("is not a supported tokenizer.json: {e}")))
    }

    /// Parses the bytes of a `tokenizer.json`.
    pub fn parse(bytes: &[u8]) -> tokenizers::Result<Self> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)?;
        // Some folders contain the truncation and padding of their training run.
        inner.with_truncation(None)?;
        inner.with_padding(None);
        let added: BTreeMap<_, _> = inner.get_added_tokens_decoder().into_iter().collect();
        let hidden = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let spellings: HashMap<_, _> = added
            .iter()
            .filter(|(_, token)| !is_blank(&token.content))
            .map(|(id, token)| (token.content.clone(), *id))
            .collect();
        let largest = inner.get_vocab(true).into_values().max();
        let letter = inner.encode_fast("a", false)?;
        let (reasoning, format) = (REASONING_TAGS[0], Format::of(""));
        let first = letter.get_ids().first().and_then(|id| inner.id_to_token(*id));
        Ok(Self {
            reasoning,
            spells_reasoning: false,
            format,
            markers: markers(&inner, reasoning, format),
            call_tokens: HashMap::new(),
            message_tags: HashMap::new(),
            adds_space: first.is_some_and(|token| token.starts_with(['▁', 'Ġ'])),
            inner,
            respelled: OnceLock::new(),
            added,
            lengths: spellings.keys().map(String::len).collect(),
            spellings,
            hidden,
            protected: HashSet::new(),
            taint: Taint::default(),
            size: largest.map_or(0, |id| id as usize + 1),
            digest: Sha256::digest(bytes).into(),
        })
    }

    /// Describes how two vocabularies differ; `None` if every token has the same id in both.
    pub fn vocabulary_difference(&self, other: &Self) -> Option<String> {
        if self.digest == other.digest {
            return None;
        }
        let (mine, theirs) = (self.inner.get_vocab(true), other.inner.get_vocab(true));
        if mine.len() != theirs.len() {
            return Some(format!("it has {} tokens, not {}", mine.len(), theirs.len()));
        }
        let token = mine.iter().find(|(token, id)| theirs.get(*token) != Some(*id))?.0;
        let id = |vocab: &HashMap<String, u32>| match vocab.get(token) {
            Some(id) => format!("token {id}"),
            None => "no token".into(),
        };
        Some(format!("`{token}` is {} there and {} here", id(&mine), id(&theirs)))
    }

    /// Sets how the model writes calls; before [`Tokenizer::protect`].
    pub fn set_format(&mut self, format: &'static Format) {
        let tag = |tag: harmony::Tag| Some((self.inner.token_to_id(tag.text())?, tag));
        let tags: Option<HashMap<_, _>> = harmony::Tag::ALL.into_iter().map(tag).collect();
        let tags = tags.filter(|_| format.has_messages());
        // Messages are read by their tokens only.
        let format = match format.has_messages() && tags.is_none() {
            true => Format::of(""),
            false => format,
        };
        self.message_tags = tags.unwrap_or_default();
        self.format = format;
        self.markers = markers(&self.inner, self.reasoning, format);
        let token = |text: &&'static str| Some((self.inner.token_to_id(text)?, *text));
        self.call_tokens = format.inner.iter().filter_map(token).collect();
    }

    /// Sets how the model writes reasoning: the tags that its chat template contains, and hides the tags that it
    /// writes answers in; before [`Tokenizer::protect`].
    pub fn set_reasoning(&mut self, template: &str) {
        let is_used = |tag: &str| self.inner.token_to_id(tag).is_some() && template.contains(tag);
        let used = REASONING_TAGS.into_iter().find(|tags| tags.iter().all(|tag| is_used(tag)));
        let frames = ANSWER_TAGS.into_iter().filter(|tag| is_used(tag));
        let frames: Vec<u32> = frames.filter_map(|tag| self.spellings.get(tag).copied()).collect();
        self.hidden.extend(frames);
        self.reasoning = used.unwrap_or(self.reasoning);
        self.markers = markers(&self.inner, self.reasoning, self.format);
    }

    /// For a model that reasons when its chat template tells it to: if `template` has `<think>`, which is no token,
    /// the model spells it, as Granite does; before [`Tokenizer::protect`].
    pub fn spell_reasoning(&mut self, template: &str) {
        let is_named = self.reasoning.iter().all(|tag| template.contains(tag));
        self.spells_reasoning = is_named && self.marker_id(Marker::OpenReasoning).is_none();
    }

    /// Whether the tags of reasoning are text.
    pub fn spells_reasoning(&self) -> bool {
        self.spells_reasoning
    }

    /// How the model writes calls.
    pub fn format(&self) -> &'static Format {
        self.format
    }

    /// The text of `marker`; empty if the model has no such tag.
    pub fn marker_text(&self, marker: Marker) -> &'static str {
        marker.text(self.reasoning, self.format).unwrap_or_default()
    }

    /// What the model writes after the tag that begins reasoning, and is none of it.
    pub fn reasoning_label(&self) -> Option<&'static str> {
        (self.reasoning == GEMMA_CHANNEL).then_some(GEMMA_REASONING)
    }

    /// The tags of reasoning, if they are tokens.
    pub fn reasoning_tags(&self) -> Option<[&'static str; 2]> {
        self.marker_id(Marker::CloseReasoning).map(|_| self.reasoning)
    }

    /// The text of `id`, if it is a special token within calls.
    pub fn call_token(&self, id: u32) -> Option<&'static str> {
        self.call_tokens.get(&id).copied()
    }

    /// The special token of messages that `id` is, if replies consist of messages.
    pub fn message_tag(&self, id: u32) -> Option<harmony::Tag> {
        self.message_tags.get(&id).copied()
    }

    /// Hides tokens in replies: end-of-turn tokens are not always marked special.
    pub fn hide(&mut self, ids: &[u32]) {
        self.hidden.extend(ids);
    }

    /// Keeps hidden tokens, markers and the added tokens that `is_used` by the chat template out of
    /// the text of clients. Other added tokens are ordinary words (Gemma's `<table>`).
    pub fn protect(&mut self, is_used: impl Fn(&str) -> bool) {
        let used = self.spellings.iter().filter(|(text, _)| is_used(text)).map(|(_, id)| *id);
        self.protected = used.chain(self.hidden.iter().copied()).collect();
        self.protected.extend(self.markers.iter().flatten());
        let spellings = self.spellings.iter().filter(|(_, id)| self.protected.contains(id));
        self.taint = Taint::new(spellings.map(|(text, _)| text.as_str()));
    }

    /// Spellings of up to 64 protected tokens.
    pub fn protected_spellings(&self) -> Vec<&str> {
        let tokens = self.protected.iter().filter_map(|id| self.added.get(id));
        let mut spellings: Vec<_> = tokens.map(|token| token.content.as_str()).collect();
        spellings.sort_unstable();
        spellings.truncate(64);
        spellings
    }

    /// How to taint the text of a request.
    pub fn taint(&self) -> &Taint {
        &self.taint
    }

    /// Tokens of a rendered prompt: special tokens in `text` are parsed, none are added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(&self.inner, text)
    }

    /// Tokens of a text with those that the tokenizer's post-processor adds.
    pub fn encode_document(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, true).map_err(tokenizer_error)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokens of a prompt that was rendered from tainted text. Clients' text yields no protected
    /// token, and earlier replies no hidden one: a reply may contain the others, so it encodes as it
    /// was generated. Text that spells none encodes as in [`Tokenizer::encode`].
    pub fn encode_tainted(&self, rendered: &str) -> Result<Vec<u32>> {
        let (text, origins) = Taint::restore(rendered);
        let is_parsed = |id: u32, key: usize| {
            let origin = origins.binary_search_by_key(&key, |(at, _)| *at).map(|i| origins[i].1);
            match origin {
                Ok(Origin::Client) => !self.protected.contains(&id),
                Ok(Origin::Model) => !self.hidden.contains(&id),
                Err(_) => true,
            }
        };
        if origins.is_empty() {
            return self.encode(&text);
        }
        let mut respelled = String::with_capacity(text.len());
        let (mut rest, mut all_parsed) = (&*text, true);
        while let Some(c) = rest.chars().next() {
            let mut length = c.len_utf8();
            let found = self.spelled_at_start(rest);
            let key = |spelling| taint::key(spelling).map_or(0, |(at, _)| at);
            match found {
                Some((spelling, id)) if is_parsed(id, text.len() - rest.len() + key(spelling)) => {
                    length = spelling.len();
                    respelled.push_str(&taint::parsed(spelling).unwrap_or_default());
                }
                _ => {
                    all_parsed &= found.is_none();
                    respelled.push(c);
                }
            }
            rest = &rest[length..];
        }
        if all_parsed { self.encode(&text) } else { self.respelled_ids(&respelled) }
    }

    /// Tokens of `text` as a continuation of other text. The only added tokens among them are white
    /// space: Gemma's line breaks and indents are added tokens, but carry no structure.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let ids = self.continuation(|text| self.encode(text), text)?;
        if !ids.iter().any(|id| self.is_structure(*id)) {
            return Ok(ids);
        }
        let text = taint::without_reserved(text);
        self.continuation(|text| self.respelled_ids(text), &text)
    }

    /// The token as spelled in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        match self.added.get(&id) {
            Some(token) => Some(token.content.clone()),
            None => self.inner.id_to_token(id),
        }
    }

    /// The id of the token spelled `text`.
    pub fn id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// The id of `marker`, if it is a single token.
    pub fn marker_id(&self, marker: Marker) -> Option<u32> {
        self.markers[marker as usize]
    }

    pub fn marker(&self, id: u32) -> Option<Marker> {
        Marker::ALL.into_iter().find(|marker| self.marker_id(*marker) == Some(id))
    }

    /// Whether `id` has no text in replies.
    pub fn is_hidden(&self, id: u32) -> bool {
        self.hidden.contains(&id)
    }

    /// Whether `id` carries structure, which text cannot spell: a hidden token, a marker, or a token of
    /// the chat template.
    pub fn is_protected(&self, id: u32) -> bool {
        self.protected.contains(&id) || self.is_hidden(id)
    }

    /// The largest id plus one.
    pub fn size(&self) -> usize {
        self.size
    }

    /// SHA-256 of the file.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    pub fn decoder(&self) -> Option<&DecoderWrapper> {
        self.inner.get_decoder()
    }

    /// Text of `ids` with special tokens.
    pub fn decode_all(&self, ids: &[u32]) -> String {
        if ids.is_empty() {
            return String::new(); // as in `decode`
        }
        self.inner.decode(ids, false).unwrap_or_default()
    }

    /// Text of `ids` without hidden tokens.
    pub fn decode(&self, ids: &[u32]) -> String {
        let ids: Vec<u32> = ids.iter().copied().filter(|id| !self.is_hidden(*id)).collect();
        if ids.is_empty() {
            return String::new(); // some decoders of `tokenizers` panic on empty input
        }
        // No decoder documents a failure; if one fails, losing text beats failing the request.
        self.inner.decode(&ids, true).unwrap_or_default()
    }

    fn ids(&self, inner: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
        match inner.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(tokenizer_error(error)),
        }
    }

    /// Encodes `text` without the blank that sentencepiece-like tokenizers prepend: encodes it after
    /// a prefix with known tokens, and drops those.
    fn continuation(
        &self,
        encode: impl Fn(&str) -> Result<Vec<u32>>,
        text: &str,
    ) -> Result<Vec<u32>> {
        if self.adds_space {
            for prefix in ["\n", ".", "a"] {
                let head = encode(prefix)?;
                let ids = encode(&format!("{prefix}{text}"))?;
                if let Some(tail) = ids.strip_prefix(head.as_slice()) {
                    return Ok(tail.to_vec());
                }
            }
        }
        encode(text)
    }

    /// Tokens of `text`, in which added tokens are parsed only where they are respelled.
    fn respelled_ids(&self, text: &str) -> Result<Vec<u32>> {
        let Respelled { inner, ids } = self.respelled.get_or_init(|| self.respell());
        // `encode_fast` leaves the spellings out.
        let encoding = inner.encode(text, false).map_err(tokenizer_error)?;
        let mut plain = Vec::new();
        for (id, token) in encoding.get_ids().iter().zip(encoding.get_tokens()) {
            if let Some(id) = ids.get(token) {
                plain.push(*id);
            } else if !self.is_structure(*id) {
                plain.push(*id);
            } else {
                // The vocabulary has the token as an ordinary word too (Gemma's `<h1>`): spell it.
                for c in self.token(*id).unwrap_or_default().chars() {
                    let encode = |text: &str| self.ids(inner, text);
                    let spelled = self.continuation(encode, c.encode_utf8(&mut [0; 4]))?;
                    plain.extend(spelled.into_iter().filter(|id| !self.is_structure(*id)));
                }
            }
        }
        Ok(plain)
    }

    fn respell(&self) -> Respelled {
        let mut inner = self.inner.clone();
        inner.with_added_vocabulary(AddedVocabulary::new());
        let mut ids = HashMap::new();
        let mut tokens = Vec::new();
        for (id, token) in &self.added {
            let blank = is_blank(&token.content).then(|| token.content.clone());
            let Some(content) = blank.or_else(|| taint::parsed(&token.content)) else { continue };
            ids.insert(content.clone(), *id);
            tokens.push(AddedToken { content, ..token.clone() });
        }
        if let Err(error) = inner.add_tokens(tokens) {
            tracing::warn!(%error, "special tokens cannot be kept apart from text that spells them");
        }
        Respelled { inner, ids }
    }

    /// The longest added token that `text` starts with, white space excepted.
    fn spelled_at_start(&self, text: &str) -> Option<(&str, u32)> {
        let starts = self.lengths.iter().rev().filter_map(|length| text.get(..*length));
        let (spelling, id) =
            starts.filter_map(|start| self.spellings.get_key_value(start)).next()?;
        Some((spelling, *id))
    }

    fn is_structure(&self, id: u32) -> bool {
        let added = self.added.get(&id).is_some_and(|token| !is_blank(&token.content));
        added || self.is_hidden(id) || self.markers.contains(&Some(id))
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("size", &self.size).finish_non_exhaustive()
    }
}

fn tokenizer_error(error: tokenizers::Error) -> Error {
    RequestError::Tokenizer(error.to_string()).into()
}

/// Ids of the markers. A marker without its counterpart is not one, unless the format has none.
fn markers(
    inner: &tokenizers::Tokenizer,
    reasoning: [&'static str; 2],
    format: &Format,
) -> [Option<u32>; 4] {
    let [think, end_think, call, end_call] =
        Marker::ALL.map(|marker| inner.token_to_id(marker.text(reasoning, format)?));
    let (think, end_think) = think.zip(end_think).unzip();
    if format.close.is_none() {
        return [think, end_think, call, None];
    }
    let (call, end_call) = call.zip(end_call).unzip();
    [think, end_think, call, end_call]
}

fn is_blank(text: &str) -> bool {
    text.chars().all(|c| c.is_whitespace() || c == '▁')
}
