//! Tokens to text, one at a time: whole characters only, each token looked at once.
//!
//! What comes out, joined, equals decoding all tokens at once. Byte-level vocabularies (Qwen,
//! Llama 3, DeepSeek) and sentencepiece-like ones (Llama 2, Gemma, Mistral) are decoded by the
//! bytes or pieces of each token; others by decoding a short window of tokens again.
//! Never sees markers, stop strings or phases: `reply` does.
//!
//! One difference from `tokenizers`, on purpose: its `ByteFallback` turns a run of byte tokens
//! that is not UTF-8 as a whole into U+FFFD, good characters included. Here characters
//! are given out as soon as they are complete, and only what is broken becomes U+FFFD.
//! Text is never tidied (`clean_up_tokenization_spaces`): that would break code.
//!
//! Source: `tokenizers` 0.23 `decoders/`, `DecodeStream` for the window.

use std::sync::{Arc, OnceLock};

use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{Decoder, DecoderWrapper};

use super::tokenizer::Tokenizer;

/// Tokens that the window may hold before it is given out as it stands. A character has four bytes
/// at most; what is incomplete after so many tokens never becomes a character.
const WINDOW: usize = 32;

/// Decodes one reply.
#[derive(Debug, Clone)]
pub(super) struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    kind: Kind,
    /// Whether a token has come yet.
    started: bool,
}

#[derive(Debug, Clone)]
enum Kind {
    /// Byte-level: each letter of a token is a byte.
    Bytes { pending: Vec<u8> },
    /// Each token is text, or one byte (`<0x0A>`).
    Pieces { steps: Vec<Step>, byte_fallback: bool, strip: Strip, pending: Vec<u8> },
    /// Anything else: decode the last tokens again.
    Window { ids: Vec<u32>, given: String, read: usize },
}

/// What happens to a token's text by itself.
#[derive(Debug, Clone)]
enum Step {
    Decode(DecoderWrapper),
    /// Blanks are spelt with a sign; those of the first token are dropped.
    Metaspace {
        sign: char,
        drop_first: bool,
    },
}

/// Characters still to be cut off at the start of the text.
#[derive(Debug, Clone, Default)]
struct Strip {
    content: char,
    left: usize,
}

impl Detokenizer {
    /// A decoder at the start of a text.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let kind = match tokenizer.decoder() {
            Some(DecoderWrapper::Sequence(sequence)) => pieces(sequence.get_decoders()),
            Some(decoder) => pieces(std::slice::from_ref(decoder)),
            None => None,
        };
        let window = Kind::Window { ids: Vec::new(), given: String::new(), read: 0 };
        Self { tokenizer, kind: kind.unwrap_or(window), started: false }
    }

    /// Whether part of a character is held back.
    pub fn is_pending(&self) -> bool {
        match &self.kind {
            Kind::Bytes { pending } | Kind::Pieces { pending, .. } => !pending.is_empty(),
            Kind::Window { ids, read, .. } => ids.len() > *read,
        }
    }

    /// Adds a token; appends what is now complete to `out`.
    pub fn push(&mut self, id: u32, out: &mut String) {
        let Some(token) = self.tokenizer.token(id) else { return };
        let first = !std::mem::replace(&mut self.started, true);
        match &mut self.kind {
            Kind::Bytes { pending } => {
                let bytes = byte_level();
                let start = pending.len();
                for c in token.chars() {
                    match bytes.get(c as usize).copied().flatten() {
                        Some(byte) => pending.push(byte),
                        // An added token in plain letters, not in the byte alphabet.
                        None => {
                            pending.truncate(start);
                            pending.extend_from_slice(token.as_bytes());
                            break;
                        }
                    }
                }
                take_characters(pending, out);
            }
            Kind::Pieces { steps, byte_fallback, strip, pending } => {
                let token = steps.iter().fold(token, |token, step| step.apply(token, first));
                let mut text = String::new();
                if let Some(byte) = byte_token(&token).filter(|_| *byte_fallback) {
                    pending.push(byte);
                    take_bytes(pending, &mut text);
                } else {
                    give_up(pending, &mut text);
                    text.push_str(&token);
                }
                out.push_str(strip.apply(&text));
            }
            Kind::Window { ids, given, read } => {
                ids.push(id);
                let text = self.tokenizer.decode(ids);
                let whole = !text.ends_with('\u{fffd}') || ids.len() - *read >= WINDOW;
                if whole && text.len() > given.len() && text.is_char_boundary(given.len()) {
                    out.push_str(&text[given.len()..]);
                    ids.drain(..*read);
                    *read = ids.len();
                    *given = self.tokenizer.decode(ids);
                }
            }
        }
    }

    /// The text ends here or is interrupted by a marker: what is held back becomes U+FFFD.
    pub fn flush(&mut self, out: &mut String) {
        self.started = true;
        match &mut self.kind {
            Kind::Bytes { pending } => {
                out.push_str(&String::from_utf8_lossy(pending));
                pending.clear();
            }
            Kind::Pieces { pending, .. } => give_up(pending, out),
            Kind::Window { ids, given, read } => {
                let text = self.tokenizer.decode(ids);
                out.push_str(text.get(given.len()..).unwrap_or_default());
                *read = ids.len();
                *given = text;
            }
        }
    }
}

impl Step {
    fn apply(&self, token: String, first: bool) -> String {
        match self {
            Self::Decode(decoder) => match decoder.decode_chain(vec![token.clone()]) {
                Ok(texts) => texts.concat(),
                Err(_) => token,
            },
            Self::Metaspace { sign, drop_first } if first && *drop_first => {
                token.chars().filter(|c| c != sign).collect()
            }
            Self::Metaspace { sign, .. } => token.replace(*sign, " "),
        }
    }
}

impl Strip {
    fn apply<'a>(&mut self, text: &'a str) -> &'a str {
        let mut rest = text;
        while self.left > 0 && !rest.is_empty() {
            match rest.strip_prefix(self.content) {
                Some(shorter) => {
                    rest = shorter;
                    self.left -= 1;
                }
                None => self.left = 0,
            }
        }
        rest
    }
}

/// The decoders of a sentencepiece-like or byte-level vocabulary; `None` where one of them is not
/// among those that can be applied to a token by itself.
fn pieces(decoders: &[DecoderWrapper]) -> Option<Kind> {
    if let [DecoderWrapper::ByteLevel(_)] = decoders {
        return Some(Kind::Bytes { pending: Vec::new() });
    }
    let mut steps = Vec::new();
    let mut byte_fallback = false;
    let mut fused = false;
    let mut strip = Strip::default();
    for decoder in decoders {
        match decoder {
            DecoderWrapper::Replace(_) if !byte_fallback && !fused => {
                steps.push(Step::Decode(decoder.clone()));
            }
            DecoderWrapper::Metaspace(metaspace) if !byte_fallback && !fused => {
                steps.push(metaspace_step(metaspace));
            }
            DecoderWrapper::ByteFallback(_) if !fused => byte_fallback = true,
            DecoderWrapper::Fuse(_) => fused = true,
            DecoderWrapper::Strip(cut) if fused && cut.stop == 0 && strip.left == 0 => {
                strip = Strip { content: cut.content, left: cut.start };
            }
            _ => return None,
        }
    }
    Some(Kind::Pieces { steps, byte_fallback, strip, pending: Vec::new() })
}

fn metaspace_step(metaspace: &Metaspace) -> Step {
    Step::Metaspace {
        sign: metaspace.get_replacement(),
        drop_first: metaspace.get_prepend_scheme() != PrependScheme::Never,
    }
}

/// The byte that `<0x0A>` stands for.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// Moves complete characters, and U+FFFD for what can no longer become one, to `out`.
fn take_characters(pending: &mut Vec<u8>, out: &mut String) {
    let mut start = 0;
    loop {
        match std::str::from_utf8(&pending[start..]) {
            Ok(text) => {
                out.push_str(text);
                pending.clear();
                return;
            }
            Err(error) => {
                let valid = start + error.valid_up_to();
                out.push_str(&String::from_utf8_lossy(&pending[start..valid]));
                let Some(broken) = error.error_len() else {
                    pending.drain(..valid);
                    return;
                };
                out.push('\u{fffd}');
                start = valid + broken;
            }
        }
    }
}

/// As [`take_characters`], with one U+FFFD for each broken byte, as `ByteFallback` has it.
fn take_bytes(pending: &mut Vec<u8>, out: &mut String) {
    while !pending.is_empty() {
        match std::str::from_utf8(pending) {
            Ok(text) => {
                out.push_str(text);
                pending.clear();
            }
            Err(error) if error.error_len().is_none() => return,
            Err(error) => {
                let valid = error.valid_up_to();
                out.push_str(&String::from_utf8_lossy(&pending[..valid]));
                let broken = error.error_len().unwrap_or(1);
                (0..broken).for_each(|_| out.push('\u{fffd}'));
                pending.drain(..valid + broken);
            }
        }
    }
}

/// Each byte that is held back becomes U+FFFD.
fn give_up(pending: &mut Vec<u8>, out: &mut String) {
    pending.drain(..).for_each(|_| out.push('\u{fffd}'));
}

/// Bytes of the letters of byte-level vocabularies: printable bytes stand for themselves, the
/// others are numbered from U+0100 on (GPT-2 `encoder.py`, `bytes_to_unicode`).
fn byte_level() -> &'static [Option<u8>] {
    static TABLE: OnceLock<Vec<Option<u8>>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = vec![None; 0x144];
        let mut next = 0x100;
        for byte in 0..=255u8 {
            if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
                table[byte as usize] = Some(byte);
            } else {
                table[next] = Some(byte);
                next += 1;
            }
        }
        table
    })
}
