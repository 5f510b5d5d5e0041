//! The vocabulary of a model: text to tokens, special tokens and markers.
//!
//! There are two encodings. In a rendered prompt, special tokens are parsed, because the template
//! wrote them. Text from policies is encoded plainly: it yields no added token (`<|im_end|>`,
//! `</think>`, `<tool_call>`), so it cannot forge structure.
//! `detokenize` decodes replies; [`Tokenizer::decode`] decodes whole texts only.
//!
//! # Why onig
//! Models were trained with the published Python `tokenizers`, which splits words with Oniguruma:
//! its Unicode tables are the reference. It needs a C compiler, and so does MLX.
//!
//! Source: `tokenizers` 0.23; transformers' `split_special_tokens` for plain text.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

use sha2::{Digest, Sha256};
use tokenizers::{AddedToken, AddedVocabulary, DecoderWrapper};

use crate::error::{ConfigError, Error, RequestError, Result};

/// A tag that changes the phase of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Marker {
    /// `<think>`
    OpenReasoning,
    /// `</think>`
    CloseReasoning,
    /// `<tool_call>`
    OpenCall,
    /// `</tool_call>`
    CloseCall,
}

impl Marker {
    pub const ALL: [Self; 4] =
        [Self::OpenReasoning, Self::CloseReasoning, Self::OpenCall, Self::CloseCall];

    pub const fn text(self) -> &'static str {
        match self {
            Self::OpenReasoning => "<think>",
            Self::CloseReasoning => "</think>",
            Self::OpenCall => "<tool_call>",
            Self::CloseCall => "</tool_call>",
        }
    }
}

/// The tokenizer of one model.
pub(super) struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// `inner` without its added tokens; built when plain text first needs it.
    bare: OnceLock<tokenizers::Tokenizer>,
    added: BTreeMap<u32, AddedToken>,
    /// Tokens without text in replies: special and end-of-turn tokens.
    hidden: HashSet<u32>,
    markers: [Option<u32>; 4],
    /// Whether encoding prepends a blank to the text.
    adds_space: bool,
    size: usize,
    digest: [u8; 32],
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn load(path: &Path) -> Result<Self> {
        let bad =
            |problem: String| Error::Config(ConfigError::Model { path: path.into(), problem });
        let bytes = std::fs::read(path).map_err(|e| {
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
        let largest = inner.get_vocab(true).into_values().max();
        let letter = inner.encode_fast("a", false)?;
        let first = letter.get_ids().first().and_then(|id| inner.id_to_token(*id));
        Ok(Self {
            markers: markers(&inner),
            adds_space: first.is_some_and(|token| token.starts_with(['▁', 'Ġ'])),
            inner,
            bare: OnceLock::new(),
            added,
            hidden,
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

    /// Hides tokens in replies: end-of-turn tokens are not always marked special.
    pub fn hide(&mut self, ids: &[u32]) {
        self.hidden.extend(ids);
    }

    /// Tokens of a rendered prompt: special tokens in `text` are parsed, none are added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(&self.inner, text)
    }

    /// Tokens of `text` as a continuation of other text. The only added tokens among them are white
    /// space: Gemma's line breaks and indents are added tokens, but carry no structure.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let ids = self.continuation(&self.inner, text)?;
        if !ids.iter().any(|id| self.is_structure(*id)) {
            return Ok(ids);
        }
        let mut plain = Vec::new();
        for id in self.continuation(self.bare.get_or_init(|| self.without_added()), text)? {
            if !self.is_structure(id) {
                plain.push(id);
                continue;
            }
            // The vocabulary has the token as an ordinary word too (Gemma's `<h1>`): spell it.
            for c in self.token(id).unwrap_or_default().chars() {
                plain.extend(self.continuation(&self.inner, c.encode_utf8(&mut [0; 4]))?);
            }
        }
        plain.retain(|id| !self.is_structure(*id));
        Ok(plain)
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
            Err(error) => Err(RequestError::Tokenizer(error.to_string()).into()),
        }
    }

    /// Encodes `text` without the blank that sentencepiece-like tokenizers prepend: encodes it after
    /// a prefix with known tokens, and drops those.
    fn continuation(&self, inner: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
        if self.adds_space {
            for prefix in ["\n", ".", "a"] {
                let head = self.ids(inner, prefix)?;
                let ids = self.ids(inner, &format!("{prefix}{text}"))?;
                if let Some(tail) = ids.strip_prefix(head.as_slice()) {
                    return Ok(tail.to_vec());
                }
            }
        }
        self.ids(inner, text)
    }

    fn without_added(&self) -> tokenizers::Tokenizer {
        let mut bare = self.inner.clone();
        bare.with_added_vocabulary(AddedVocabulary::new());
        // A token outside the model's own vocabulary would get another id.
        let kept = self.added.iter().filter(|(id, token)| {
            is_blank(&token.content) && bare.token_to_id(&token.content) == Some(**id)
        });
        let kept: Vec<AddedToken> = kept.map(|(_, token)| token.clone()).collect();
        if let Err(error) = bare.add_tokens(kept) {
            tracing::warn!(%error, "injected text is encoded without white space tokens");
        }
        bare
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

/// Ids of the markers. A marker without its counterpart is not one.
fn markers(inner: &tokenizers::Tokenizer) -> [Option<u32>; 4] {
    let [think, end_think, call, end_call] =
        Marker::ALL.map(|marker| inner.token_to_id(marker.text()));
    let (think, end_think) = think.zip(end_think).unzip();
    let (call, end_call) = call.zip(end_call).unzip();
    [think, end_think, call, end_call]
}

fn is_blank(text: &str) -> bool {
    text.chars().all(|c| c.is_whitespace() || c == '▁')
}
