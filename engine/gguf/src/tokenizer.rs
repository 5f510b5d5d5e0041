//! `tokenizer.json` from the vocabulary of a file.
//!
//! Two kinds are read: `gpt2`, byte-level BPE with its merges, and `llama`, sentencepiece BPE, whose merges follow from
//! the scores of its tokens, as transformers derives them: a pair may be merged if the result is a token, the highest
//! score first, then the order of the vocabulary.
//!
//! Source: llama.cpp `conversion/base.py` for what becomes of a tokenizer.json; transformers `convert_slow_tokenizer.py`,
//! `LlamaConverter` and `generate_merges`; tokenizers 0.23 for the format.

use std::collections::HashMap;

use serde::Serialize;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::pre::Split;
use crate::reader::Header;

/// `tokenizer.ggml.token_type`
mod kind {
    pub const NORMAL: u8 = 1;
    pub const UNKNOWN: u8 = 2;
    pub const CONTROL: u8 = 3;
    pub const USER_DEFINED: u8 = 4;
    pub const BYTE: u8 = 6;
}

/// Most bytes of a token of sentencepiece: all its divisions are looked up.
const PIECE_BYTES: usize = 512;

/// sentencepiece's blank.
const BLANK: &str = "▁";

/// The vocabulary of a file.
pub(crate) struct Vocabulary<'a> {
    header: &'a Header,
    pub tokens: &'a [String],
    kinds: Vec<u8>,
}

#[derive(Serialize)]
struct Bpe<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: Option<f32>,
    unk_token: Option<&'a str>,
    continuing_subword_prefix: Option<&'static str>,
    end_of_word_suffix: Option<&'static str>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Entries<'a>,
    merges: Vec<[&'a str; 2]>,
}

/// Tokens with their ids, as an object.
struct Entries<'a>(Vec<(&'a str, usize)>);

impl Serialize for Entries<'_> {
    fn serialize<S: serde::Serializer>(
        &self,
        serializer: S,
    ) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, id)| (token, id)))
    }
}

#[derive(Serialize)]
struct Tokenizer<'a> {
    version: &'static str,
    truncation: Option<u8>,
    padding: Option<u8>,
    added_tokens: Vec<Value>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Bpe<'a>,
}

impl<'a> Vocabulary<'a> {
    /// The vocabulary of a file whose header was read with all elements.
    pub fn of(header: &'a Header) -> Result<Self> {
        let missing = |key: &str| Error::new(format!("the metadata key `{key}` is missing"));
        let key = "tokenizer.ggml.tokens";
        let tokens = header.texts(key)?.ok_or_else(|| missing(key))?;
        let key = "tokenizer.ggml.token_type";
        let kinds = match header.numbers(key)? {
            Some(kinds) if kinds.len() == tokens.len() => {
                kinds.iter().map(|kind| *kind as u8).collect()
            }
            Some(kinds) => {
                let problem =
                    format!("`{key}` has {} elements for {} tokens", kinds.len(), tokens.len());
                return Err(Error::new(problem));
            }
            None => vec![kind::NORMAL; tokens.len()],
        };
        Ok(Self { header, tokens, kinds })
    }

    /// The id and the text of the special token `name`: `eos` for `tokenizer.ggml.eos_token_id`.
    pub fn special(&self, name: &str) -> Result<Option<(u64, &'a str)>> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = self.header.number(&key)? else { return Ok(None) };
        let token = usize::try_from(id).ok().and_then(|id| self.tokens.get(id));
        match token {
            Some(token) => Ok(Some((id, token))),
            None => {
                let count = self.tokens.len();
                Err(Error::new(format!("`{key}` is {id}; the vocabulary has {count} tokens")))
            }
        }
    }

    /// Control tokens with their ids.
    pub fn controls(&self) -> impl Iterator<Item = (usize, &'a str)> {
        self.of_kind(&[kind::CONTROL])
    }

    fn of_kind(&self, wanted: &'static [u8]) -> impl Iterator<Item = (usize, &'a str)> {
        let tokens = self.tokens.iter().enumerate().map(|(id, token)| (id, token.as_str()));
        tokens.zip(&self.kinds).filter(|(_, kind)| wanted.contains(kind)).map(|(token, _)| token)
    }

    /// `tokenizer.json`
    pub fn json(&self) -> Result<Vec<u8>> {
        let key = "tokenizer.ggml.model";
        let tokenizer = match self.header.text(key)? {
            Some("gpt2") => self.byte_level()?,
            Some("llama") => self.sentencepiece()?,
            Some(other) => {
                return Err(Error::new(format!(
                    "`{key}` is `{other}`, which is not supported; supported are gpt2 and llama"
                )));
            }
            None => return Err(Error::new(format!("the metadata key `{key}` is missing"))),
        };
        serde_json::to_vec(&tokenizer)
            .map_err(|error| Error::new(format!("its vocabulary cannot be written: {error}")))
    }

    fn byte_level(&self) -> Result<Tokenizer<'a>> {
        let split = Split::named(self.header.text("tokenizer.ggml.pre")?)?;
        let key = "tokenizer.ggml.merges";
        let merges =
            self.header.texts(key)?.unwrap_or_default().iter().enumerate().map(|(i, pair)| {
                let halves = pair.split_once(' ').filter(|(_, right)| !right.contains(' '));
                let halves = halves.map(|(left, right)| [left, right]);
                halves.ok_or_else(|| {
                    Error::new(format!("`{key}` has no pair at {i}: `{}`", pair.escape_debug()))
                })
            });
        let merges = merges.collect::<Result<Vec<_>>>()?;
        let plain: Vec<_> = self.of_kind(&[kind::NORMAL, kind::UNKNOWN, kind::BYTE]).collect();
        let added: Vec<_> = self.of_kind(&[kind::CONTROL, kind::USER_DEFINED]).collect();
        // Published tokenizers leave added tokens that follow the others out of the vocabulary. `tokenizers` numbers them
        // in order, so others must be in it.
        let follow = plain.iter().chain(&added).enumerate().all(|(i, (id, _))| i == *id);
        let vocab = if follow { in_vocabulary(plain) } else { self.used() };
        Ok(Tokenizer {
            normalizer: if split.nfc { json!({"type": "NFC"}) } else { Value::Null },
            pre_tokenizer: split.pre_tokenizer(),
            decoder: json!({
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
            }),
            ..self.bpe(
                Bpe { ignore_merges: split.ignore_merges, merges, ..Bpe::new(vocab) },
                split.adds_bos,
            )?
        })
    }

    fn sentencepiece(&self) -> Result<Tokenizer<'a>> {
        let key = "tokenizer.ggml.scores";
        let scores = match self.header.numbers(key)? {
            Some(scores) if scores.len() == self.tokens.len() => scores,
            _ => {
                return Err(Error::new(format!("`{key}` does not hold a number for each token")));
            }
        };
        let prefix = self.header.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let blanks = json!({"type": "Replace", "pattern": {"String": " "}, "content": BLANK});
        let normalizer = if prefix {
            let first = json!({"type": "Prepend", "prepend": BLANK});
            json!({"type": "Sequence", "normalizers": [first, blanks]})
        } else {
            blanks
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": BLANK}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let unknown = self.special("unknown")?.map(|(_, token)| token);
        let unknown = unknown.or_else(|| Some(self.of_kind(&[kind::UNKNOWN]).next()?.1));
        let vocab = self.used();
        if let Some((token, id)) = vocab.iter().find(|(token, _)| token.len() > PIECE_BYTES) {
            let problem = format!(
                "`tokenizer.ggml.tokens` has a token of {} bytes at {id}; at most {PIECE_BYTES} can be",
                token.len()
            );
            return Err(Error::new(problem));
        }
        let merges = merges(&vocab, scores);
        Ok(Tokenizer {
            normalizer,
            decoder: json!({"type": "Sequence", "decoders": decoders}),
            ..self.bpe(
                Bpe {
                    unk_token: unknown,
                    fuse_unk: true,
                    byte_fallback: self.of_kind(&[kind::BYTE]).next().is_some(),
                    merges,
                    ..Bpe::new(vocab)
                },
                true,
            )?
        })
    }

    /// All tokens but those that only fill the vocabulary up.
    fn used(&self) -> Vec<(&'a str, usize)> {
        let used = &[kind::NORMAL, kind::UNKNOWN, kind::CONTROL, kind::USER_DEFINED, kind::BYTE];
        in_vocabulary(self.of_kind(used).collect())
    }

    fn bpe(&self, model: Bpe<'a>, adds_bos: bool) -> Result<Tokenizer<'a>> {
        let added = self.of_kind(&[kind::UNKNOWN, kind::CONTROL, kind::USER_DEFINED]);
        let added = added.map(|(id, token)| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": self.kinds[id] != kind::USER_DEFINED,
            })
        });
        Ok(Tokenizer {
            version: "1.0",
            truncation: None,
            padding: None,
            added_tokens: added.collect(),
            normalizer: Value::Null,
            pre_tokenizer: Value::Null,
            post_processor: self.post_processor(adds_bos)?,
            decoder: Value::Null,
            model,
        })
    }

    /// What surrounds a document; prompts are encoded without it.
    fn post_processor(&self, adds_bos: bool) -> Result<Value> {
        let adds = |name: &str, default: bool| -> Result<Option<(u64, &str)>> {
            let added = self.header.flag(&format!("tokenizer.ggml.add_{name}_token"))?;
            if added.unwrap_or(default) { self.special(name) } else { Ok(None) }
        };
        let (bos, eos) = (adds("bos", adds_bos)?, adds("eos", false)?);
        if bos.is_none() && eos.is_none() {
            return Ok(Value::Null);
        }
        let special = |token: Option<(u64, &str)>, sequence: &str| {
            token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": u8::from(sequence == "B")}}))
        };
        let around = |sequence: &str| {
            let type_id = u8::from(sequence == "B");
            let text = json!({"Sequence": {"id": sequence, "type_id": type_id}});
            let parts = [special(bos, sequence), Some(text), special(eos, sequence)];
            parts.into_iter().flatten().collect::<Vec<_>>()
        };
        let specials = [bos, eos].into_iter().flatten();
        let specials = specials.map(|(id, text)| {
            (text.to_string(), json!({"id": text, "ids": [id], "tokens": [text]}))
        });
        let pair = [around("A"), around("B")].concat();
        Ok(json!({
            "type": "TemplateProcessing", "single": around("A"), "pair": pair,
            "special_tokens": specials.collect::<serde_json::Map<_, _>>(),
        }))
    }
}

impl<'a> Bpe<'a> {
    fn new(vocab: Vec<(&'a str, usize)>) -> Self {
        Self {
            kind: "BPE",
            dropout: None,
            unk_token: None,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: false,
            vocab: Entries(vocab),
            merges: Vec::new(),
        }
    }
}

fn in_vocabulary(tokens: Vec<(usize, &str)>) -> Vec<(&str, usize)> {
    tokens.into_iter().map(|(id, token)| (token, id)).collect()
}

/// The merges of a vocabulary with scores, in order.
fn merges<'a>(vocab: &[(&'a str, usize)], scores: &[f64]) -> Vec<[&'a str; 2]> {
    let ids: HashMap<&str, usize> = vocab.iter().copied().collect();
    let mut pairs = Vec::new();
    for (token, id) in vocab {
        let ends = token.char_indices().skip(1).map(|(at, _)| at);
        let splits = ends.map(|at| token.split_at(at));
        let known = splits
            .filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?, [left, right])));
        let mut known: Vec<_> = known.collect();
        known.sort_unstable();
        pairs.extend(known.into_iter().map(|(.., pair)| (scores[*id], pair)));
    }
    // Stable: tokens of one score keep their order.
    pairs.sort_by(|a, b| b.0.total_cmp(&a.0));
    pairs.into_iter().map(|(_, pair)| pair).collect()
}
