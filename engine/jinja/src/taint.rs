//! Which characters of a rendered prompt came with the request, and not from the chat template.
//!
//! A special token may be parsed only where the template wrote it: `<|im_end|>` in the text of a
//! message would end its turn. A template renders one string, so the characters with which special
//! tokens begin (`<`, and `[` for some models) are *tainted* in the text of a request before it is
//! rendered, and restored afterwards ([`Taint::restore`]). A tainted character is the original one
//! in an unassigned plane of Unicode, which no text uses; one that a text uses nevertheless becomes
//! U+FFFD. Characters keep their number and order, so templates may cut, trim, join and dump text;
//! `operators` restores them where text is compared or searched. Names that templates read are never tainted.
//! Never encodes: the tokenizer decides what is a special token.
//!
//! # Why characters
//! To encode each text apart would change the tokens at its borders, and templates trim and split
//! what they get. To replace whole spellings misses those that a template joins from parts
//! (Gemma 4 drops thoughts from the middle of a text), and hides them from its conditions.

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Where the text of a request comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The client: messages, tools and their results, template variables.
    Client,
    /// The model, in an earlier reply: messages of the assistant.
    Model,
}

/// Distance of the characters of each origin from the originals; planes 4 to 13 are unassigned.
const CLIENT: u32 = 0x4_0000;
const MODEL: u32 = 0x5_0000;
/// Distance of the first character of tokens that may be parsed; see [`parsed`].
const PARSED: u32 = 0x6_0000;
const END: u32 = 0x7_0000;

/// The characters to taint.
#[derive(Debug, Default)]
pub struct Taint {
    /// The key characters of all spellings with one; see [`key`].
    keys: BTreeSet<char>,
    /// Spellings without a key character; their first letter is tainted where one is complete.
    words: Vec<String>,
}

/// Names that templates read in messages, calls, tools and schemas. A vocabulary may have a token that is spelled like one
/// of them; a template would not find a tainted name.
const FIELDS: [&str; 25] = [
    "role",
    "content",
    "text",
    "name",
    "id",
    "type",
    "tool_calls",
    "tool_call_id",
    "function",
    "arguments",
    "reasoning",
    "reasoning_content",
    "thinking",
    "description",
    "parameters",
    "strict",
    "properties",
    "required",
    "items",
    "enum",
    "anyOf",
    "oneOf",
    "allOf",
    "default",
    "return",
];

impl Taint {
    /// For special tokens with these `spellings`.
    pub fn new<'a>(spellings: impl Iterator<Item = &'a str>) -> Self {
        let mut taint = Self::default();
        for spelling in spellings {
            match key(spelling) {
                Some((_, key)) if is_key(key) => drop(taint.keys.insert(key)),
                Some(_) => taint.words.push(spelling.into()),
                None => {}
            }
        }
        taint
    }

    /// `text` with its characters tainted.
    pub fn text<'a>(&self, text: &'a str, origin: Origin) -> Cow<'a, str> {
        let distance = match origin {
            Origin::Client => CLIENT,
            Origin::Model => MODEL,
        };
        let is_start = |at: usize, c: char| {
            self.keys.contains(&c) || self.words.iter().any(|word| text[at..].starts_with(word))
        };
        if !text.char_indices().any(|(at, c)| is_reserved(c) || is_start(at, c)) {
            return Cow::Borrowed(text);
        }
        let taint = |(at, c)| match c {
            c if is_reserved(c) => char::REPLACEMENT_CHARACTER,
            c if is_start(at, c) => char::from_u32(c as u32 + distance).unwrap_or(c),
            c => c,
        };
        Cow::Owned(text.char_indices().map(taint).collect())
    }

    /// Taints all texts in `value`, keys of maps included.
    pub fn value(&self, value: &mut Value, origin: Origin) {
        match value {
            Value::String(text) => {
                if let Cow::Owned(tainted) = self.text(text, origin) {
                    *text = tainted;
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.value(item, origin)),
            Value::Object(map) => self.map(map, origin),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// Taints all texts in `map`, keys included but for [`FIELDS`].
    pub fn map(&self, map: &mut Map<String, Value>, origin: Origin) {
        *map = std::mem::take(map)
            .into_iter()
            .map(|(name, mut value)| {
                self.value(&mut value, origin);
                if FIELDS.contains(&name.as_str()) {
                    return (name, value);
                }
                (self.text(&name, origin).into_owned(), value)
            })
            .collect();
    }

    /// The text that `rendered` stands for, and the origin of each character that was tainted in
    /// it, by byte, ascending.
    pub fn restore(rendered: &str) -> (Cow<'_, str>, Vec<(usize, Origin)>) {
        if !is_tainted(rendered) {
            return (Cow::Borrowed(rendered), Vec::new());
        }
        let mut text = String::with_capacity(rendered.len());
        let mut origins = Vec::new();
        for c in rendered.chars() {
            if let Some(origin) = origin(c) {
                origins.push((text.len(), origin));
            }
            text.push(plain(c));
        }
        (Cow::Owned(text), origins)
    }
}

/// The character that is tainted in a special token, and its place in bytes: the first one that is
/// neither a letter nor white space, else the first one. Names of fields stay as they are.
pub fn key(spelling: &str) -> Option<(usize, char)> {
    let basic = |(_, c): &(usize, char)| (*c as u32) < 0x1_0000;
    let found = spelling.char_indices().find(|(_, c)| is_key(*c));
    found.or_else(|| spelling.char_indices().next()).filter(basic)
}

fn is_key(c: char) -> bool {
    !(c.is_alphanumeric() || c.is_whitespace() || c.is_control() || "_-.$\"'\\".contains(c))
}

/// `spelling` as a tokenizer for tainted prompts spells it, so that it may be parsed.
pub fn parsed(spelling: &str) -> Option<String> {
    let first = spelling.chars().next()?;
    let moved = char::from_u32(first as u32 + PARSED).filter(|_| (first as u32) < 0x1_0000)?;
    Some(format!("{moved}{}", &spelling[first.len_utf8()..]))
}

/// `text` without characters that this module uses for itself.
pub fn without_reserved(text: &str) -> Cow<'_, str> {
    if text.contains(is_reserved) {
        Cow::Owned(text.replace(is_reserved, "\u{fffd}"))
    } else {
        Cow::Borrowed(text)
    }
}

/// Whether a character of `text` is tainted.
pub(crate) fn is_tainted(text: &str) -> bool {
    // Their UTF-8 starts with this byte, and that of hardly any other text.
    text.as_bytes().contains(&0xf1) && text.chars().any(|c| origin(c).is_some())
}

/// Whether a text in `value` is tainted.
pub(crate) fn is_value_tainted(value: &Value) -> bool {
    match value {
        Value::String(text) => is_tainted(text),
        Value::Array(items) => items.iter().any(is_value_tainted),
        Value::Object(map) => {
            map.iter().any(|(name, value)| is_tainted(name) || is_value_tainted(value))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// `text` with its tainted characters restored.
pub fn plain_text(text: &str) -> Cow<'_, str> {
    Taint::restore(text).0
}

/// The character that `c` stands for.
pub(crate) fn plain(c: char) -> char {
    match origin(c) {
        Some(_) => char::from_u32(c as u32 & 0xffff).unwrap_or(c),
        None => c,
    }
}

fn origin(c: char) -> Option<Origin> {
    match c as u32 {
        CLIENT..MODEL => Some(Origin::Client),
        MODEL..PARSED => Some(Origin::Model),
        _ => None,
    }
}

fn is_reserved(c: char) -> bool {
    (CLIENT..END).contains(&(c as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tainted_text_is_restored_with_its_origin() {
        let taint = Taint::new(["<|end|>", "[INST]", "▁word", "stop", "\n<x>"].into_iter());
        let text = "a<b [c] stop it, ▁word stopped _ é 日本 🙂";
        for origin in [Origin::Client, Origin::Model] {
            let tainted = taint.text(text, origin);
            assert_eq!(tainted.chars().count(), text.chars().count());
            let (restored, origins) = Taint::restore(&tainted);
            assert_eq!(restored, text);
            let found: Vec<_> = origins.iter().map(|(at, _)| text[*at..].chars().next()).collect();
            assert_eq!(found, ['<', '[', 's', '▁', 's'].map(Some));
            assert!(origins.iter().all(|(_, found)| *found == origin));
        }
        assert!(matches!(taint.text("plain text\n", Origin::Client), Cow::Borrowed(_)));
        assert_eq!(taint.text("\u{4003c}|end|>", Origin::Client), "\u{fffd}|end|>");
        assert_eq!(taint.text("\u{6003c}|end|>", Origin::Client), "\u{fffd}|end|>");
    }

    #[test]
    fn all_texts_of_a_value_are_tainted() {
        let taint = Taint::new(["<s>"].into_iter());
        let mut value = serde_json::json!({"a<": ["<", {"b": "x<y"}, 1, null], "role": "user"});
        let original = value.clone();
        taint.value(&mut value, Origin::Client);
        let text = value.to_string();
        assert!(!text.contains('<'));
        assert_eq!(plain_text(&text), original.to_string());
        assert_eq!(value["role"], "user");
    }

    /// With a token `role`, each chat was refused: its template found no role in a message.
    #[test]
    fn names_that_templates_read_are_never_tainted() {
        let taint = Taint::new(["role", "parameters", "other"].into_iter());
        let mut value = serde_json::json!({"role": "role", "parameters": {"other": 1}});
        taint.value(&mut value, Origin::Client);
        assert_ne!(value["role"], "role");
        assert_eq!(plain_text(value["role"].as_str().unwrap()), "role");
        let names = value["parameters"].as_object().unwrap().keys();
        assert!(names.into_iter().all(|name| name != "other" && plain_text(name) == "other"));
    }
}
