//! Incremental detokenizing: one token at a time, whole characters only.
//!
//! The joined output equals decoding all tokens at once. Byte-level vocabularies (Qwen, Llama 3,
//! DeepSeek) and sentencepiece-like ones (Llama 2, Gemma, Mistral) are decoded from the bytes or
//! pieces of each token; others by decoding a short window of tokens again.
//! Knows nothing of markers, stop strings or phases: `reply` handles these.
//!
//! One deliberate difference from `tokenizers`: its `ByteFallback` turns a whole run of byte tokens
//! into U+FFFD if any part of it is not UTF-8. Here each complete character is emitted, and only
//! invalid bytes become U+FFFD.
//! Never applies `clean_up_tokenization_spaces`, which would break code.
//!
//! Source: `tokenizers` 0.23 `decoders/`, `DecodeStream` for the window.

use std::sync::{Arc, OnceLock};

use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{Decoder, DecoderWrapper};

use super::tokenizer::Tokenizer;

/// Size of the window, in tokens, at which it is flushed. A character has at most four bytes, so
/// what is still incomplete then never becomes one.
const WINDOW: usize = 32;

/// Decodes one reply.
#[derive(Debug, Clone)]
pub(super) struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    kind: Kind,
    started: bool,
}

#[derive(Debug, Clone)]
enum Kind {
    /// Byte-level: each character of a token stands for a byte.
    Bytes { pending: Vec<u8> },
    /// Each token is text, or one byte (`<0x0A>`).
    Pieces { steps: Vec<Step>, byte_fallback: bool, strip: Strip, pending: Vec<u8> },
    /// Others: decodes the last tokens again. `emitted` is the text of the first `done` of `ids`.
    Window { ids: Vec<u32>, emitted: String, done: usize },
}

/// A decoder step that works on one token at a time.
#[derive(Debug, Clone)]
enum Step {
    Decode(DecoderWrapper),
    /// `symbol` stands for a blank; the first token may drop its blanks.
    Metaspace {
        symbol: char,
        drop_first: bool,
    },
}

/// Characters still to be removed from the start of the text.
#[derive(Debug, Clone, Default)]
struct Strip {
    content: char,
    left: usize,
}

impl Detokenizer {
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let kind = match tokenizer.decoder() {
            Some(DecoderWrapper::Sequence(sequence)) => by_token(sequence.get_decoders()),
            Some(decoder) => by_token(std::slice::from_ref(decoder)),
            None => None,
        };
        let window = Kind::Window { ids: Vec::new(), emitted: String::new(), done: 0 };
        Self { tokenizer, kind: kind.unwrap_or(window), started: false }
    }

    /// Whether part of a character is held back.
    pub fn is_pending(&self) -> bool {
        match &self.kind {
            Kind::Bytes { pending } | Kind::Pieces { pending, .. } => !pending.is_empty(),
            Kind::Window { ids, done, .. } => ids.len() > *done,
        }
    }

    /// Adds a token; appends complete characters to `out`.
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
                        // An added token is plain text, outside the byte alphabet.
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
                    replace_pending(pending, &mut text);
                    text.push_str(&token);
                }
                out.push_str(strip.apply(&text));
            }
            Kind::Window { ids, emitted, done } => {
                ids.push(id);
                let text = self.tokenizer.decode(ids);
                let whole = !text.ends_with('\u{fffd}') || ids.len() - *done >= WINDOW;
                if whole && text.len() > emitted.len() && text.is_char_boundary(emitted.len()) {
                    out.push_str(&text[emitted.len()..]);
                    ids.drain(..*done);
                    *done = ids.len();
                    *emitted = self.tokenizer.decode(ids);
                }
            }
        }
    }

    /// The bytes of token `id` within other text, which need not be whole characters.
    pub fn bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.tokenizer.token(id) else { return Vec::new() };
        match &self.kind {
            Kind::Bytes { .. } => {
                let bytes = byte_level();
                let byte = |c: char| bytes.get(c as usize).copied().flatten();
                // An added token is plain text, outside the byte alphabet.
                let bytes: Option<Vec<u8>> = token.chars().map(byte).collect();
                bytes.unwrap_or_else(|| token.into_bytes())
            }
            Kind::Pieces { steps, byte_fallback, .. } => {
                let token = steps.iter().fold(token, |token, step| step.apply(token, false));
                match byte_token(&token).filter(|_| *byte_fallback) {
                    Some(byte) => vec![byte],
                    None => token.into_bytes(),
                }
            }
            Kind::Window { .. } => self.tokenizer.decode(&[id]).into_bytes(),
        }
    }

    /// Ends the text, or interrupts it for a marker: incomplete characters become U+FFFD.
    pub fn flush(&mut self, out: &mut String) {
        self.started = true;
        match &mut self.kind {
            Kind::Bytes { pending } => {
                out.push_str(&String::from_utf8_lossy(pending));
                pending.clear();
            }
            Kind::Pieces { pending, .. } => replace_pending(pending, out),
            Kind::Window { ids, emitted, done } => {
                let text = self.tokenizer.decode(ids);
                out.push_str(text.get(emitted.len()..).unwrap_or_default());
                *done = ids.len();
                *emitted = text;
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
            Self::Metaspace { symbol, drop_first } if first && *drop_first => {
                token.chars().filter(|c| c != symbol).collect()
            }
            Self::Metaspace { symbol, .. } => token.replace(*symbol, " "),
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

/// Decoding of a byte-level or sentencepiece-like vocabulary; `None` if a decoder cannot be applied
/// to one token at a time.
fn by_token(decoders: &[DecoderWrapper]) -> Option<Kind> {
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
        symbol: metaspace.get_replacement(),
        drop_first: metaspace.get_prepend_scheme() != PrependScheme::Never,
    }
}

/// The byte that `<0x0A>` stands for.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// Moves complete characters to `out`, and U+FFFD for invalid bytes.
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

/// As [`take_characters`], with one U+FFFD for each invalid byte, as in `ByteFallback`.
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

/// Writes U+FFFD for each pending byte.
fn replace_pending(pending: &mut Vec<u8>, out: &mut String) {
    pending.drain(..).for_each(|_| out.push('\u{fffd}'));
}

/// The byte of each character of a byte-level vocabulary: printable bytes stand for themselves, the
/// others are numbered from U+0100 (GPT-2 `encoder.py`, `bytes_to_unicode`).
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
