//! Values that stand bare between tags, and are typed by the schema of the tool.
//!
//! The text of a value may contain tags: a model writes code about XML. So the tag after a value ends it only
//! where another parameter or the end of the call follows, and not the tag after a value again. A model may leave
//! that tag out, too: then the value ends where another parameter of the tool begins, or where the call ends.
//!
//! Source: Qwen3-Coder `qwen3coder_tool_parser.py`.

use super::reader::{Read, Reader, Stop, push_text};
use super::typed::{typed, typed_exactly};

/// Most bytes of a key.
const KEY_BYTES: usize = 256;

/// How a bare value ends, and what it is.
#[derive(Debug, Clone, Copy)]
pub struct BareValue<'a> {
    /// The tag after it.
    pub close: &'a str,
    /// The tags before and after the key of a parameter.
    pub parameter: [&'a str; 2],
    /// The tags before and after a call; empty if there are none.
    pub call: [&'a str; 2],
    pub lines: Lines,
    /// Whether its tag says that it is a string. One where the schema allows none is typed all the same.
    pub is_string: bool,
    /// The keys that the call has.
    pub given: &'a [&'a str],
}

/// Whether a value stands on lines of its own, whose line breaks are none of its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lines {
    /// The template writes it so.
    Always,
    /// The template does not; a model that writes both line breaks does.
    Both,
    /// It never does.
    Never,
}

/// Where a value ends.
enum End<'a> {
    /// After so many bytes; with the text that follows.
    At { at: usize, rest: &'a str, is_repaired: bool },
    /// It has not ended; so many bytes are certain. If the text ends with the end of the call, `ends_call`: more of it
    /// would tell whether that is the end of a call in the value.
    Open { certain: usize, ends_call: bool },
}

/// A value that has not ended, with so many certain bytes.
fn open_at<'a>(certain: usize) -> End<'a> {
    End::Open { certain, ends_call: false }
}

impl<'a> Reader<'a> {
    /// A bare value of `parameter` of `function`.
    pub fn bare_value(
        &mut self,
        out: &mut String,
        [function, parameter]: [&str; 2],
        value: BareValue<'_>,
    ) -> Read {
        let body = self.rest;
        let end = self.end_of(body, function, value);
        let (length, is_open) = match end {
            End::At { at, .. } => (at, false),
            End::Open { certain, .. } => (certain, !self.has_ended),
        };
        let has_close = matches!(end, End::At { is_repaired: false, .. });
        let is_text = match value.is_string {
            true => self.schemas.may_be_text(function, parameter),
            false => self.schemas.is_text(function, parameter),
        };
        let text = own_text(&body[..length], value.lines, is_open, has_close);
        match (&end, text) {
            (_, Some(text)) if is_text => {
                out.push('"');
                push_text(out, text);
                if let End::At { .. } = end {
                    out.push('"');
                }
                self.is_pending = false;
            }
            (End::At { .. }, Some(text)) => {
                out.push_str(&typed(self.schemas, function, parameter, text));
                self.is_pending = false;
            }
            // Half an object is not a string.
            (End::Open { .. }, Some(text)) if self.has_ended => {
                if let Some(json) = typed_exactly(self.schemas, function, parameter, text) {
                    out.push_str(&json);
                    self.is_pending = false;
                }
            }
            _ => {}
        }
        match end {
            End::At { rest, is_repaired, .. } => {
                self.is_repaired |= is_repaired;
                self.rest = rest;
                Ok(())
            }
            End::Open { ends_call, .. } => {
                (self.is_in_value, self.is_half, self.ends_call) = (true, true, ends_call);
                Err(Stop::Early)
            }
        }
    }

    /// Where the value ends with which `body` begins.
    fn end_of<'b>(&self, body: &'b str, function: &str, value: BareValue<'_>) -> End<'b> {
        let BareValue { close, parameter: [open, after], call: [begin, finish], given, .. } = value;
        let follow = [open, finish, begin];
        let follows =
            |text: &str| follow.iter().any(|tag| !tag.is_empty() && text.starts_with(tag));
        let may_follow = |text: &str| follow.iter().any(|tag| tag.starts_with(text));
        for (at, _) in body.match_indices('<') {
            let here = &body[at..];
            if let Some(rest) = here.strip_prefix(close) {
                let rest = rest.trim_start();
                // In a text about calls, the end of this value follows the end of the call in it.
                let outer = rest.strip_prefix(finish).filter(|_| !finish.is_empty());
                match outer.map(str::trim_start) {
                    Some(outer) if outer.starts_with(close) => continue,
                    Some(outer) if !self.has_ended && close.starts_with(outer) => {
                        return End::Open { certain: at, ends_call: outer.is_empty() };
                    }
                    _ => {}
                }
                if follows(rest) || self.has_ended && may_follow(rest) {
                    return End::At { at, rest, is_repaired: false };
                }
                if may_follow(rest) {
                    return open_at(at);
                }
            } else if let Some(rest) = here.strip_prefix(open) {
                let window = &rest[..rest.floor_char_boundary(KEY_BYTES)];
                let (key, is_whole) = match window.split_once(after) {
                    Some((key, _)) => (key.trim(), true),
                    None => (window, false),
                };
                let is_key = !key.contains(['<', '"', '\n']) && !given.contains(&key);
                if is_whole && is_key && self.schemas.declares(function, key) {
                    return End::At { at, rest: here, is_repaired: true };
                }
                if !is_whole && window.len() == rest.len() && !self.has_ended {
                    return open_at(at);
                }
            } else if !finish.is_empty()
                && let Some(rest) = here.strip_prefix(finish)
            {
                let rest = rest.trim_start();
                if rest.starts_with(begin) || rest.is_empty() && self.has_ended {
                    return End::At { at, rest: here, is_repaired: true };
                }
                if !self.has_ended && begin.starts_with(rest) {
                    return open_at(at);
                }
            } else if [close, open, finish].iter().any(|tag| tag.starts_with(here)) {
                if !self.has_ended {
                    return open_at(at);
                }
                // A tag that the model did not complete.
                if here.len() > 1 {
                    return End::At { at, rest: "", is_repaired: true };
                }
            }
        }
        open_at(body.len())
    }
}

/// `text` without the line breaks around it; `None` if these are not certain, as more may follow.
fn own_text(text: &str, lines: Lines, is_open: bool, has_close: bool) -> Option<&str> {
    if is_open && lines == Lines::Both && text.starts_with(['\r', '\n']) {
        return None;
    }
    let first = text.strip_prefix("\r\n").or_else(|| text.strip_prefix('\n'));
    // In lines that end with `\n`, a `\r` is text.
    let has_plain_lines = text.starts_with('\n');
    let without_last = |text: &'_ str| -> Option<usize> {
        let end = text.strip_suffix('\n')?;
        Some(end.strip_suffix('\r').filter(|_| !has_plain_lines).unwrap_or(end).len())
    };
    let has_both = first.is_some_and(|text| without_last(text).is_some());
    let strips = lines == Lines::Always || lines == Lines::Both && has_both;
    let text = first.filter(|_| strips).unwrap_or(text);
    let length = match is_open {
        // Of a line break, nothing is certain.
        true => {
            let end = text.strip_suffix('\n').unwrap_or(text);
            end.strip_suffix('\r').unwrap_or(end).len()
        }
        // The tags of a value without its closing tag stand on lines of their own.
        false if strips || !has_close => without_last(text).unwrap_or(text.len()),
        false => text.len(),
    };
    Some(&text[..length])
}
