//! The policy `redact`: patterns in answers are replaced before a client has them, streams included.
//!
//! Finds addresses of e-mail, keys of common services, numbers of payment cards (with a valid check digit), and texts
//! that the parameters name. The beginning of what may become one of them is held back: of a word until it ends, of
//! digits until another character follows. Words of more than 1,024 bytes are let through.
//!
//! It sees answers, not reasoning and tool calls.

use std::ops::Range;

use steersman_policy::{
    Labels, ParamsView, Plan, Policy, PreparedParams, RequestView, Summary, TextChange,
    TextVerdict, TextView, note, read_params, texts,
};

/// What takes the place of a match without the parameter `mark`.
const MARK: &str = "[redacted]";

/// What keys begin with.
const KEYS: [&str; 7] = ["sk-", "AKIA", "ghp_", "github_pat_", "glpat-", "xoxb-", "hf_"];

/// Characters of a key after its beginning, at least.
const KEY_LENGTH: usize = 16;

/// Digits of the number of a payment card.
const CARD: std::ops::RangeInclusive<usize> = 13..=19;

/// The policy `redact`, with the state of one request.
#[derive(Default)]
pub struct Redact {
    settings: Settings,
    redacted: u32,
}

/// The parameters.
struct Settings {
    email: bool,
    key: bool,
    card: bool,
    texts: Vec<String>,
    mark: String,
    problems: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        let (texts, problems) = (Vec::new(), Vec::new());
        Self { email: true, key: true, card: true, texts, mark: MARK.into(), problems }
    }
}

impl Settings {
    fn parse(params: &[(String, String)]) -> Self {
        let mut settings = Self::default();
        settings.problems = read_params(params, |name, text| match name {
            "patterns" => {
                let names = if text == "none" { Some(Vec::new()) } else { texts(text) };
                let names = names.filter(|names| {
                    names.iter().all(|name| ["email", "key", "card"].contains(&name.as_str()))
                });
                let has =
                    |name: &str| names.as_ref().is_none_or(|all| all.iter().any(|n| n == name));
                (settings.email, settings.key, settings.card) =
                    (has("email"), has("key"), has("card"));
                Some(names.is_some())
            }
            "texts" => {
                let named = texts(text);
                let is_usable = named.is_some();
                settings.texts = named.unwrap_or_default();
                Some(is_usable)
            }
            "mark" => {
                settings.mark = text.into();
                Some(true)
            }
            _ => None,
        });
        settings
    }

    /// What is to be replaced in `text`, in order, without overlaps.
    fn matches(&self, text: &str) -> Vec<Range<usize>> {
        let mut found: Vec<Range<usize>> = Vec::new();
        for named in &self.texts {
            found.extend(text.match_indices(named).map(|(at, part)| at..at + part.len()));
        }
        for word in words(text) {
            let inside = |range: Range<usize>| word.start + range.start..word.start + range.end;
            if self.email {
                found.extend(emails(&text[word.clone()]).map(inside));
            }
            if self.key {
                found.extend(keys(&text[word.clone()]).map(inside));
            }
        }
        if self.card {
            found.extend(numbers(text).filter(|range| is_card(&text[range.clone()])));
        }
        found.sort_by_key(|range| (range.start, std::cmp::Reverse(range.end)));
        let mut end = 0;
        found.retain(|range| {
            let is_apart = range.start >= end;
            end = if is_apart { range.end } else { end };
            is_apart
        });
        found
    }

    /// Where the part of `text` begins that may become a match.
    fn held_from(&self, text: &str) -> usize {
        let word = match self.email || self.key {
            true => text.trim_end_matches(|c: char| !c.is_whitespace()).len(),
            false => text.len(),
        };
        let digits = match self.card {
            true => text.trim_end_matches(|c: char| c.is_ascii_digit() || is_gap(c)),
            false => text,
        };
        let has_digit = text[digits.len()..].contains(|c: char| c.is_ascii_digit());
        let number = if has_digit { digits.len() } else { text.len() };
        let begins = |named: &String| {
            let ends: Vec<usize> = named.char_indices().map(|(at, _)| at).skip(1).collect();
            ends.into_iter().rev().find(|&end| text.ends_with(&named[..end])).unwrap_or(0)
        };
        let named = self.texts.iter().map(begins).max().unwrap_or(0);
        word.min(number).min(text.len() - named)
    }
}

/// Runs of characters other than white space.
fn words(text: &str) -> impl Iterator<Item = Range<usize>> + '_ {
    text.split_whitespace().map(|word| {
        let start = word.as_ptr() as usize - text.as_ptr() as usize;
        start..start + word.len()
    })
}

/// Addresses of e-mail in a word.
fn emails(word: &str) -> impl Iterator<Item = Range<usize>> + '_ {
    word.match_indices('@').filter_map(|(at, _)| {
        let is_local = |c: char| c.is_ascii_alphanumeric() || "._%+-".contains(c);
        let is_domain = |c: char| c.is_ascii_alphanumeric() || ".-".contains(c);
        let start = word[..at].trim_end_matches(is_local).len();
        let rest = &word[at + 1..];
        let domain = &rest[..rest.len() - rest.trim_start_matches(is_domain).len()];
        let domain = domain.trim_end_matches(['.', '-']);
        let top = domain.rsplit_once('.').map_or("", |(_, top)| top);
        let is_top = top.len() >= 2 && top.chars().all(|c| c.is_ascii_alphabetic());
        (start < at && is_top).then(|| start..at + 1 + domain.len())
    })
}

/// Keys in a word.
fn keys(word: &str) -> impl Iterator<Item = Range<usize>> + '_ {
    KEYS.iter().flat_map(move |begin| {
        word.match_indices(begin).filter_map(move |(at, _)| {
            let rest = &word[at + begin.len()..];
            let is_part = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            let length = rest.len() - rest.trim_start_matches(is_part).len();
            let is_begin = !word[..at].ends_with(|c: char| c.is_ascii_alphanumeric());
            (is_begin && length >= KEY_LENGTH).then(|| at..at + begin.len() + length)
        })
    })
}

/// What separates the groups of a number.
fn is_gap(c: char) -> bool {
    c == ' ' || c == '-'
}

/// Runs of digits with single gaps between them.
fn numbers(text: &str) -> impl Iterator<Item = Range<usize>> + '_ {
    let bytes = text.as_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + bytes[at..].iter().position(u8::is_ascii_digit)?;
        let mut end = start + 1;
        loop {
            match bytes.get(end) {
                Some(byte) if byte.is_ascii_digit() => end += 1,
                Some(byte)
                    if is_gap(*byte as char)
                        && bytes.get(end + 1).is_some_and(u8::is_ascii_digit) =>
                {
                    end += 2;
                }
                _ => break,
            }
        }
        at = end;
        Some(start..end)
    })
}

/// Whether a number has the digits and the check digit of a payment card (ISO/IEC 7812-1, Luhn).
fn is_card(number: &str) -> bool {
    let digits: Vec<u32> = number.chars().filter_map(|c| c.to_digit(10)).collect();
    let doubled = |(place, digit): (usize, &u32)| match (place % 2, 2 * digit) {
        (0, _) => *digit,
        (_, twice) => twice / 10 + twice % 10,
    };
    let sum: u32 = digits.iter().rev().enumerate().map(doubled).sum();
    CARD.contains(&digits.len()) && sum.is_multiple_of(10)
}

impl Policy for Redact {
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        let problems = Settings::parse(&params.params).problems;
        PreparedParams { problems, ..PreparedParams::default() }
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        self.settings = Settings::parse(&request.params);
        Plan { note: note(&self.settings.problems), ..Plan::default() }
    }

    fn on_text(&mut self, view: TextView) -> TextVerdict {
        let text = &view.text;
        let matches = self.settings.matches(text);
        let mut until = if view.end { text.len() } else { self.settings.held_from(text) };
        // A match is not cut.
        if let Some(cut) = matches.iter().find(|range| range.start < until && until < range.end) {
            until = cut.start;
        }
        let hold = (text.len() - until) as u32;
        let matches: Vec<_> = matches.into_iter().filter(|range| range.end <= until).collect();
        if matches.is_empty() {
            return if hold == 0 { TextVerdict::Pass } else { TextVerdict::Hold(hold) };
        }
        let (mut out, mut at) = (String::new(), 0);
        for range in matches {
            out.push_str(&text[at..range.start]);
            out.push_str(&self.settings.mark);
            at = range.end;
            self.redacted += 1;
        }
        out.push_str(&text[at..until]);
        TextVerdict::Replace(TextChange { text: out, hold })
    }

    fn on_finish(&mut self, _: Summary) -> Labels {
        match self.redacted {
            0 => Labels::new(),
            redacted => vec![("redacted".into(), redacted.to_string())],
        }
    }
}

steersman_policy::export!(Redact, without on_tool_call, with on_text);

#[cfg(test)]
mod tests {
    use super::*;

    /// Names and values.
    type Params = &'static [(&'static str, &'static str)];

    /// The answer of the policy to pieces of `bytes`, as the host applies it.
    fn redacted(params: Params, text: &str, bytes: usize) -> String {
        let mut policy = Redact::default();
        let params = params.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect();
        let plan = policy.on_request(RequestView { params, ..RequestView::default() });
        assert_eq!(plan.note, None);
        let (mut held, mut sent, mut at) = (String::new(), String::new(), 0);
        loop {
            let next = text.ceil_char_boundary((at + bytes).min(text.len()));
            held.push_str(&text[at..next]);
            let end = at == text.len();
            let (out, hold) =
                match policy.on_text(TextView { text: held.clone(), end, position: 0 }) {
                    TextVerdict::Pass => (held.clone(), 0),
                    TextVerdict::Hold(hold) => {
                        (held[..held.len() - hold as usize].to_owned(), hold)
                    }
                    TextVerdict::Replace(TextChange { text, hold }) => (text, hold),
                };
            sent.push_str(&out);
            held = held[held.len() - hold as usize..].to_owned();
            if end {
                assert_eq!(held, "");
                return sent;
            }
            at = next;
        }
    }

    #[test]
    fn patterns_are_replaced_however_the_text_is_cut() {
        const NAMED: Params = &[("texts", "Project Falcon|Anna")];
        let cases: [(Params, &str, &str); 9] = [
            (&[], "Write to anna.b@example.org, please.", "Write to [redacted], please."),
            (&[], "a@b and @home and x@y.z stay", "a@b and @home and x@y.z stay"),
            (&[], "the key (sk-abcdefghij0123456789) is", "the key ([redacted]) is"),
            (
                &[],
                "sk-short and task-abcdefghij0123456789",
                "sk-short and task-abcdefghij0123456789",
            ),
            (&[], "pay 4111 1111 1111 1111 now", "pay [redacted] now"),
            (&[], "pay 4111 1111 1111 1112 now", "pay 4111 1111 1111 1112 now"),
            (NAMED, "Project Falcon, and Anna.", "[redacted], and [redacted]."),
            (&[("patterns", "card"), ("mark", "#")], "a@b.org 4111-1111-1111-1111", "a@b.org #"),
            (&[("patterns", "none")], "a@b.org", "a@b.org"),
        ];
        for (params, text, expected) in cases {
            for bytes in 1..8 {
                assert_eq!(redacted(params, text, bytes), expected, "{text} by {bytes}");
            }
        }
    }

    #[test]
    fn unknown_patterns_are_problems() {
        let params = vec![("patterns".to_owned(), "email|phone".to_owned())];
        let view = ParamsView { params, ..ParamsView::default() };
        let problems = Redact::default().on_params(view).problems;
        assert_eq!(problems, ["parameter `patterns` cannot be `email|phone`"]);
    }
}
