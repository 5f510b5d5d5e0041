//! Noise: text at the front of system text that changes with every request.
//!
//! One such line changes the prefix, so that no text after it can be reused. Removed from the first
//! [`LINES`] lines of each system text:
//!
//! 1. Lines that begin with `x-anthropic-billing-header:` or with a prefix that the operator names.
//! 2. Lines like `Request ID: ...`, also for a trace, message or span, with a value of one word that
//!    contains a digit; lines that consist of a UUID.
//! 3. In lines about the present (`Current date and time:`, `Now:`, ...) the time of day after an ISO
//!    date. The date stays: models need it, and it changes once a day. Such a line with a time of day
//!    and no ISO date is removed, as is a line that consists of an ISO timestamp with a time of day.
//!
//! Everything else stays, including dates without a time of day.

use std::str::FromStr;

use steersman_policy::{PromptEdit, PromptView, is_billing_header};

/// Number of lines examined in each text.
pub const LINES: usize = 16;

/// Longest line that can be noise, in bytes.
const LINE_BYTES: usize = 512;

/// The parameter `strip`: `auto`, `off`, or further prefixes of lines to remove, separated by `|`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strip {
    on: bool,
    prefixes: Vec<String>,
}

impl Default for Strip {
    fn default() -> Self {
        Self { on: true, prefixes: Vec::new() }
    }
}

impl FromStr for Strip {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::default()),
            "off" => Ok(Self { on: false, prefixes: Vec::new() }),
            _ => {
                let prefixes: Vec<_> = text.split('|').map(|p| p.trim().to_owned()).collect();
                // An empty prefix would match every line.
                let usable = prefixes.iter().all(|prefix| !prefix.is_empty());
                usable.then_some(Self { on: true, prefixes }).ok_or(())
            }
        }
    }
}

impl Strip {
    pub fn edits(&self, prompt: &PromptView) -> Vec<PromptEdit> {
        if !self.on {
            return Vec::new();
        }
        prompt.edit_lines(LINES, |line| denoised(line, &self.prefixes))
    }
}

/// A line without its noise; `None` if it has none.
fn denoised(line: &str, prefixes: &[String]) -> Option<String> {
    let words = line.trim();
    if words.is_empty() || line.len() > LINE_BYTES {
        return None;
    }
    let lower = words.to_ascii_lowercase();
    let is_noise = prefixes.iter().any(|prefix| words.starts_with(prefix.as_str()))
        || is_billing_header(words)
        || is_uuid(words)
        || is_id(&lower)
        || iso_time(words) == Some((0, words.len()));
    if is_noise {
        return Some(String::new());
    }
    if !PRESENT.contains(&label(&lower)?) {
        return None;
    }
    match iso_time(line) {
        // The date has ten bytes.
        Some((at, len)) => Some([&line[..at + 10], &line[at + len..]].concat()),
        None => has_time_of_day(&lower).then(String::new),
    }
}

/// Labels of lines about the present, in lower case, without decoration.
#[rustfmt::skip]
const PRESENT: &[&str] = &[
    "current date and time", "current date/time", "current datetime", "current date", "current time",
    "current local time", "current utc time", "current timestamp", "date and time", "date/time",
    "datetime", "today", "today's date", "today's date and time", "timestamp", "time", "now",
    "the current date and time is", "the current time is", "the current date is",
];

/// The label of a line: the text before its first colon or digit.
fn label(lower: &str) -> Option<&str> {
    let end = lower.find(|c: char| c == ':' || c.is_ascii_digit())?;
    let decoration = |c: char| !c.is_ascii_alphanumeric();
    Some(lower[..end].trim_matches(decoration))
}

/// Whether a line is only the id of a request: `request-id: 4f1c...`.
fn is_id(lower: &str) -> bool {
    let Some((label, value)) = lower.split_once([':', '=']) else { return false };
    let label: String = label.chars().filter(char::is_ascii_alphanumeric).collect();
    let value = value.trim();
    let one_word = !value.is_empty() && !value.contains(char::is_whitespace);
    ["requestid", "xrequestid", "traceid", "messageid", "spanid"].contains(&label.as_str())
        && one_word
        && value.contains(|c: char| c.is_ascii_digit())
}

/// Whether a text is a UUID: 8-4-4-4-12 hex digits.
fn is_uuid(text: &str) -> bool {
    let parts = text
        .split('-')
        .map(|part| if part.bytes().all(|b| b.is_ascii_hexdigit()) { part.len() } else { 0 });
    parts.eq([8, 4, 4, 4, 12])
}

/// Offset and length of the first ISO 8601 timestamp with a time of day.
fn iso_time(text: &str) -> Option<(usize, usize)> {
    (0..text.len()).find_map(|at| {
        let bytes = &text.as_bytes()[at..];
        let after_digit = at > 0 && text.as_bytes()[at - 1].is_ascii_digit();
        let minute = matches(bytes, b"dddd-dd-ddTdd:dd");
        if after_digit || !minute {
            return None;
        }
        let mut len = 16;
        if matches(&bytes[len..], b":dd") {
            len += 3;
        }
        if len == 19 && bytes.get(len).is_some_and(|b| *b == b'.' || *b == b',') {
            let digits = bytes[len + 1..].iter().take_while(|b| b.is_ascii_digit()).count();
            len += if digits > 0 { digits + 1 } else { 0 };
        }
        let zone = &bytes[len..];
        len += match zone {
            [b'Z', ..] => 1,
            _ if matches(zone, b"+dd:dd") => 6,
            _ if matches(zone, b"+dddd") => 5,
            _ if zone.starts_with(b" UTC") || zone.starts_with(b" GMT") => 4,
            _ => 0,
        };
        Some((at, len))
    })
}

/// Whether bytes begin with a pattern: `d` is a digit, `T` a `T` or a space, `+` a sign.
fn matches(bytes: &[u8], pattern: &[u8]) -> bool {
    bytes.len() >= pattern.len()
        && bytes.iter().zip(pattern).all(|(byte, pattern)| match pattern {
            b'd' => byte.is_ascii_digit(),
            b'T' => matches!(byte, b'T' | b't' | b' '),
            b'+' => matches!(byte, b'+' | b'-'),
            _ => byte == pattern,
        })
}

/// Whether a text contains a time of day: `7:48`, `19:48:10`.
fn has_time_of_day(lower: &str) -> bool {
    lower.as_bytes().windows(4).any(|w| matches(w, b"d:dd"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text that remains.
    fn left(text: &str, strip: &str) -> String {
        let prompt = PromptView { system: vec![text.into()], ..PromptView::default() };
        let found = strip.parse::<Strip>().expect("a strip").edits(&prompt);
        prompt.edited(&found).remove(0)
    }

    #[test]
    fn only_text_that_changes_with_every_request_is_removed() {
        let cases = [
            ("x-anthropic-billing-header: cc_version=1;\nYou are X.", "You are X."),
            ("You are X.\nRequest ID: 4f1c-9\nBe brief.", "You are X.\nBe brief."),
            ("request_id=req_011\nBe brief.", "Be brief."),
            ("0b8b1c1e-7a52-4a6b-9d35-3a4a0c6b1f2e\nBe brief.", "Be brief."),
            ("2026-11-21T19:48:10.123Z\nBe brief.", "Be brief."),
            (
                "Current date and time: 2026-11-21T19:48:10+01:00.",
                "Current date and time: 2026-11-21.",
            ),
            (
                "Current time: 2026-11-21 19:48 UTC\nBe brief.",
                "Current time: 2026-11-21\nBe brief.",
            ),
            ("Current date and time: Saturday, 7:48 PM\nBe brief.", "Be brief."),
            ("- **Now:** 19:48\nBe brief.", "Be brief."),
        ];
        for (text, expected) in cases {
            assert_eq!(left(text, "auto"), expected);
            assert_eq!(left(text, "off"), text);
        }
        let kept = [
            "Today's date: 2026-11-21",
            "Current date: Saturday, November 21",
            "The meeting is at 19:48.",
            "The release of 2026-11-21T19:48:10Z broke the build.",
            "Request ID: ask the user for it",
            "Trace ID: none",
            "0b8b1c1e-7a52-4a6b-9d35-3a4a0c6b1f2e is the project.",
            "Time: be quick",
            "",
        ];
        for text in kept {
            assert_eq!(left(text, "auto"), text);
        }
    }

    #[test]
    fn the_operator_can_add_prefixes() {
        let text = "cc-session: abc\nbuild 17\nYou are X.";
        assert_eq!(left(text, "cc-session: | build "), "You are X.");
        assert!("".parse::<Strip>().is_err() && "a||b".parse::<Strip>().is_err());
    }

    #[test]
    fn only_the_first_lines_are_examined() {
        let text = format!("{}Now: 19:48\n", "A line.\n".repeat(LINES));
        assert_eq!(left(&text, "auto"), text);
        assert_eq!(left(&text["A line.\n".len()..], "auto"), "A line.\n".repeat(LINES - 1));
    }
}
