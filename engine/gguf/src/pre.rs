//! How byte-level tokenizers split text into words: the names of `tokenizer.ggml.pre`.
//!
//! The expressions are those of the models' `tokenizer.json`, which llama.cpp states beside its own. A name that is
//! not listed is an error: another split gives other tokens, silently.
//!
//! Source: llama.cpp `src/llama-vocab.cpp`; tokenizer.json of the models named here.

use serde_json::{Value, json};

use crate::error::{Error, Result};

/// A way to split.
pub(crate) struct Split {
    /// Values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    words: Words,
    /// Whether texts are normalized to NFC.
    pub nfc: bool,
    /// Whether a word that is a token is taken without merging.
    pub ignore_merges: bool,
    /// Whether a begin-of-text token is added if the file does not tell.
    pub adds_bos: bool,
}

#[derive(Clone, Copy)]
enum Words {
    /// Matches of an expression.
    Expression(&'static str),
    /// GPT-2's expression, which `tokenizers` knows.
    Gpt2,
    /// GPT-2's, with digits apart.
    Gpt2Digits,
}

/// cl100k's, as Llama 3 has it.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// With single digits.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// With marks as parts of words.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Mistral's, which splits before capitals.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// o200k's, of Phi-4-mini.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const PLAIN: Split =
    Split { names: &[], words: Words::Gpt2, nfc: false, ignore_merges: false, adds_bos: false };

const SPLITS: &[Split] = &[
    Split {
        names: &["llama-bpe", "llama-v3", "llama3", "falcon3"],
        words: Words::Expression(LLAMA3),
        ignore_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    Split { names: &["dbrx", "smaug-bpe"], words: Words::Expression(LLAMA3), ..PLAIN },
    Split { names: &["qwen2"], words: Words::Expression(QWEN2), nfc: true, ..PLAIN },
    Split { names: &["deepseek-r1-qwen"], words: Words::Expression(QWEN2), ..PLAIN },
    Split { names: &["qwen35"], words: Words::Expression(QWEN35), nfc: true, ..PLAIN },
    Split {
        names: &["tekken"],
        words: Words::Expression(TEKKEN),
        ignore_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    Split { names: &["gpt-4o"], words: Words::Expression(GPT4O), ..PLAIN },
    Split {
        names: &["smollm", "starcoder", "refact", "codeshell"],
        words: Words::Gpt2Digits,
        ..PLAIN
    },
    Split { names: &["gpt-2", "olmo"], words: Words::Gpt2, ..PLAIN },
];

impl Split {
    /// The way with this name.
    ///
    /// # Errors
    /// Lists the names that are known.
    pub fn named(name: Option<&str>) -> Result<&'static Self> {
        let Some(name) = name else {
            return Err(Error::new(
                "the metadata key `tokenizer.ggml.pre` is missing: convert the model again with a \
                 llama.cpp of May 2024 or later",
            ));
        };
        SPLITS.iter().find(|split| split.names.contains(&name)).ok_or_else(|| {
            let known: Vec<_> = SPLITS.iter().flat_map(|split| split.names).copied().collect();
            Error::new(format!(
                "`tokenizer.ggml.pre` is `{name}`, which is not supported; supported are: {}",
                known.join(", ")
            ))
        })
    }

    /// `pre_tokenizer` of tokenizer.json.
    pub fn pre_tokenizer(&self) -> Value {
        let bytes = |use_regex: bool| {
            json!({
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": use_regex,
            })
        };
        let first = match self.words {
            Words::Gpt2 => return bytes(true),
            Words::Gpt2Digits => json!({"type": "Digits", "individual_digits": true}),
            Words::Expression(expression) => json!({
                "type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated",
                "invert": false,
            }),
        };
        let then = bytes(matches!(self.words, Words::Gpt2Digits));
        json!({"type": "Sequence", "pretokenizers": [first, then]})
    }
}
