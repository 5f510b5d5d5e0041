//! The vocabulary of a model: text to tokens, and what single tokens mean to us.
//!
//! Two ways of encoding. A rendered prompt is encoded with its special tokens parsed, because the
//! template wrote them. Text from policies is encoded plainly: no added token (`<|im_end|>`,
//! `</think>`, `<tool_call>`) comes out, whatever the text says, so it cannot forge structure.
//! Never decodes: `detokenize` does, one token at a time.
//!
//! # Why onig
//! The published Python `tokenizers`, with which models were trained, split words by Oniguruma; its
//! tables of Unicode classes are the reference. It needs a C compiler, and MLX needs one anyway.
//!
//! Source: `tokenizers` 0.23; transformers' `split_special_tokens` for plain text.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

use sha2::{Digest, Sha256};
use tokenizers::{AddedToken, AddedVocabulary, DecoderWrapper};

use crate::error::{Error, Result};

/// A token that changes what a reply is made of, where the vocabulary has it as one token.
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

    /// The marker as text.
    pub const fn text(self) -> &'static str {
        match self {
            Self::OpenReasoning => "<think>",
            Self::CloseReasoning => "</think>",
            Self::OpenCall => "<tool_call>",
            Self::CloseCall => "</tool_call>",
        }
    }
}

/// The tokenizer of one model; immutable once loaded.
pub(super) struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The same without its added tokens; made when a plain text first asks for it.
    bare: OnceLock<tokenizers::Tokenizer>,
    added: BTreeMap<u32, AddedToken>,
    /// Tokens that have no text in replies: special ones and those that end a turn.
    silent: HashSet<u32>,
    markers: [Option<u32>; 4],
    adds_space: bool,
    size: usize,
    digest: [u8; 32],
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Model`] names the file and what is wrong with it.
    pub fn load(path: &Path) -> Result<Self> {
        let bad = |problem: String| Error::Model { path: path.into(), problem };
        let bytes = std::fs::read(path).map_err(|e| {
            bad(format!("cannot be read ({e}); a model folder needs its tokenizer.json"))
        })?;
        let parsed = Self::parse(&bytes);
        parsed.map_err(|e| bad(format!("is no tokenizer.json that we know: {e}")))
    }

    /// Takes the bytes of a `tokenizer.json`.
    pub fn parse(bytes: &[u8]) -> tokenizers::Result<Self> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)?;
        // Some folders hold the settings of their training run.
        inner.with_truncation(None)?;
        inner.with_padding(None);
        let added: BTreeMap<_, _> = inner.get_added_tokens_decoder().into_iter().collect();
        let silent = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let largest = inner.get_vocab(true).into_values().max();
        let letter = inner.encode_fast("a", false)?;
        let first = letter.get_ids().first().and_then(|id| inner.id_to_token(*id));
        Ok(Self {
            markers: markers(&inner),
            adds_space: first.is_some_and(|token| token.starts_with(['▁', 'Ġ'])),
            inner,
            bare: OnceLock::new(),
            added,
            silent,
            size: largest.map_or(0, |id| id as usize + 1),
            digest: Sha256::digest(bytes).into(),
        })
    }

    /// Where two vocabularies differ, in words; `None` where every token has the same id in both.
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

    /// Adds tokens without text in replies: those that end a turn need not be special.
    pub fn silence(&mut self, ids: &[u32]) {
        self.silent.extend(ids);
    }

    /// Tokens of a rendered prompt: special tokens in `text` are parsed, none are added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(&self.inner, text)
    }

    /// Tokens of `text` as if it went on after other text, with no added token among them except
    /// white space (Gemma has lines and indents as added tokens; they carry no structure).
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
            // The model's own vocabulary holds the token as an ordinary word (Gemma's `<h1>`):
            // letter by letter it is none.
            for c in self.token(id).unwrap_or_default().chars() {
                plain.extend(self.continuation(&self.inner, c.encode_utf8(&mut [0; 4]))?);
            }
        }
        plain.retain(|id| !self.is_structure(*id));
        Ok(plain)
    }

    /// The token as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        match self.added.get(&id) {
            Some(token) => Some(token.content.clone()),
            None => self.inner.id_to_token(id),
        }
    }

    /// The token spelt `text`.
    pub fn id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// The token of `marker`, where the vocabulary has one.
    pub fn marker_id(&self, marker: Marker) -> Option<u32> {
        self.markers[marker as usize]
    }

    /// What `id` marks.
    pub fn marker(&self, id: u32) -> Option<Marker> {
        Marker::ALL.into_iter().find(|marker| self.marker_id(*marker) == Some(id))
    }

    /// Whether `id` has no text in replies.
    pub fn is_silent(&self, id: u32) -> bool {
        self.silent.contains(&id)
    }

    /// The largest id plus one.
    pub fn size(&self) -> usize {
        self.size
    }

    /// SHA-256 of the file.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// How tokens become text.
    pub fn decoder(&self) -> Option<&DecoderWrapper> {
        self.inner.get_decoder()
    }

    /// Text of `ids` decoded at once, silent tokens left out.
    pub fn decode(&self, ids: &[u32]) -> String {
        let ids: Vec<u32> = ids.iter().copied().filter(|id| !self.is_silent(*id)).collect();
        if ids.is_empty() {
            return String::new(); // some decoders of `tokenizers` panic on nothing
        }
        // Decoders fail on no input that they document; a token is not worth a request.
        self.inner.decode(&ids, true).unwrap_or_default()
    }

    fn ids(&self, inner: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
        match inner.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(Error::Invalid {
                field: "messages",
                problem: format!("the model's tokenizer cannot encode this text: {error}"),
            }),
        }
    }

    /// Sentencepiece-like tokenizers put a blank before the text: behind other text it is cut off
    /// again, by encoding the text behind an anchor whose tokens are known.
    fn continuation(&self, inner: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
        if self.adds_space {
            for anchor in ["\n", ".", "a"] {
                let head = self.ids(inner, anchor)?;
                let ids = self.ids(inner, &format!("{anchor}{text}"))?;
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
        // A token outside of the model's vocabulary would get another id: it stays out.
        let kept = self.added.iter().filter(|(id, token)| {
            is_blank(&token.content) && bare.token_to_id(&token.content) == Some(**id)
        });
        let kept: Vec<AddedToken> = kept.map(|(_, token)| token.clone()).collect();
        if let Err(error) = bare.add_tokens(kept) {
            tracing::warn!(%error, "white space tokens stay out of injected text");
        }
        bare
    }

    fn is_structure(&self, id: u32) -> bool {
        let added = self.added.get(&id).is_some_and(|token| !is_blank(&token.content));
        added || self.is_silent(id) || self.markers.contains(&Some(id))
    }
}

impl fmt::Debug for Tokenizer {
    /// A vocabulary is too long to be shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("size", &self.size).finish_non_exhaustive()
    }
}

/// Ids of the markers. One without its counterpart marks nothing.
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
