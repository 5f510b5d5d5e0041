//! Reads what a model writes in a call, as far as it has arrived.
//!
//! A [`Reader`] is a place in the text. Its methods take what the text must have next; [`Stop::Early`]
//! means that the text ends before it. What was read is in [`Reader::calls`] then. Arguments are written
//! as compact JSON, only as far as they are certain: more text only adds to them, and an open string,
//! list or object can be closed anywhere.

use serde_json::Value;

use super::super::stop::partial;
use super::schema::Schemas;

/// Most lists and objects within one another; `serde_json` reads 127.
const DEPTH: usize = 100;

/// Most bytes of a number.
const NUMBER_BYTES: usize = 512;

/// Why reading stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The text ends early.
    Early,
    /// The text is not in the format.
    Malformed,
}

pub type Read<T = ()> = Result<T, Stop>;

/// A call as far as it was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallDraft {
    /// Empty if it is not known yet.
    pub name: String,
    /// The certain part of the arguments.
    pub arguments: String,
    /// Whether nothing will be added.
    pub is_complete: bool,
}

/// How values are written that are not JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// They are JSON.
    Json,
    /// As in Python: `'text'`, `True`, `None`.
    Python,
    /// Strings stand between two of these, with nothing escaped; keys stand bare.
    Quoted(&'static str),
}

/// A place in the text of calls.
pub struct Reader<'a> {
    pub rest: &'a str,
    /// Whether no more text will come.
    pub has_ended: bool,
    pub schemas: &'a Schemas,
    pub dialect: Dialect,
    /// Whether a text is a call only if it names one of the tools, since no tag says that it is one.
    pub is_bare: bool,
    pub calls: Vec<CallDraft>,
    /// Bytes of the text after the last complete call.
    pub left: usize,
    /// Whether the text ends within a value, so that a tag after it may belong to the value.
    pub is_in_value: bool,
    /// Whether the text ends within a part of a call that the arguments do not have, such as a key, or within quotes:
    /// closing them would drop it, or make a shorter text of it.
    pub is_pending: bool,
    /// Whether the text ends with a value whose end only a tag after it tells: `1` may be half of `12`.
    pub is_half: bool,
    /// Whether the text ends with what is the end of the call, unless more text follows.
    pub ends_call: bool,
    /// Whether something was read that the format does not allow.
    pub is_repaired: bool,
}

impl<'a> Reader<'a> {
    /// The beginning of `rest`.
    pub fn new(rest: &'a str, schemas: &'a Schemas, dialect: Dialect) -> Self {
        Self {
            rest,
            has_ended: false,
            schemas,
            dialect,
            is_bare: false,
            calls: Vec::new(),
            left: rest.len(),
            is_in_value: false,
            is_pending: false,
            is_half: false,
            ends_call: false,
            is_repaired: false,
        }
    }

    /// The next character.
    pub fn peek(&self) -> Read<char> {
        self.rest.chars().next().ok_or(Stop::Early)
    }

    pub fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    pub fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// Whether `literal` comes next, which is skipped then.
    pub fn take(&mut self, literal: &str) -> Read<bool> {
        if let Some(rest) = self.rest.strip_prefix(literal) {
            self.rest = rest;
            return Ok(true);
        }
        if literal.starts_with(self.rest) { Err(Stop::Early) } else { Ok(false) }
    }

    /// Skips `literal`, which must come next.
    pub fn expect(&mut self, literal: &str) -> Read {
        if self.take(literal)? { Ok(()) } else { Err(Stop::Malformed) }
    }

    /// The text before `literal`, which is skipped too.
    pub fn until(&mut self, literal: &str) -> Read<&'a str> {
        let (text, rest) = self.rest.split_once(literal).ok_or(Stop::Early)?;
        self.rest = rest;
        Ok(text)
    }

    /// A name before `end` that has none of `<`, `{` and line breaks.
    pub fn name_until(&mut self, end: &str) -> Read<&'a str> {
        self.is_pending |= !self.rest.is_empty();
        let Some(at) = self.rest.find(end) else {
            let is_name =
                !self.rest[..self.rest.len() - partial(self.rest, end)].contains(FORBIDDEN);
            return Err(if is_name { Stop::Early } else { Stop::Malformed });
        };
        let name = self.rest[..at].trim();
        if name.is_empty() || name.contains(FORBIDDEN) {
            return Err(Stop::Malformed);
        }
        self.rest = &self.rest[at + end.len()..];
        Ok(name)
    }

    /// Begins a call of `name`, or of the tool that `name` means.
    pub fn begin(&mut self, name: &str) {
        let name = self.schemas.resolve(name).to_string();
        self.is_pending = false;
        self.calls.push(CallDraft { name, ..CallDraft::default() });
    }

    /// Whether a call is complete.
    pub fn has_call(&self) -> bool {
        self.calls.last().is_some_and(|call| call.is_complete)
    }

    /// Skips white space and brackets too many after a call. They belong to the call, and not to the text
    /// after it.
    pub fn skip_brackets_after_call(&mut self) {
        self.skip_space();
        if !self.has_call() {
            return;
        }
        while let Some(rest) = self.rest.strip_prefix(['}', ']']) {
            self.rest = rest;
            self.skip_space();
            self.left = self.rest.len();
            self.is_repaired = true;
        }
    }

    /// Skips the first line of a block of Markdown; returns whether there is one.
    pub fn open_fence(&mut self) -> Read<bool> {
        self.skip_space();
        if self.peek()? != '`' {
            return Ok(false);
        }
        self.expect("```")?;
        self.until("\n")?;
        self.skip_space();
        Ok(true)
    }

    /// Skips the end of a block of Markdown.
    pub fn close_fence(&mut self) -> Read {
        self.skip_space();
        self.expect("```")?;
        self.skip_space();
        self.left = self.rest.len();
        Ok(())
    }

    /// Reads the arguments of the last call with `read`, which writes them.
    pub fn arguments(&mut self, read: impl FnOnce(&mut Self, &mut String) -> Read) -> Read {
        let mut arguments = String::new();
        let result = read(self, &mut arguments);
        if let Some(call) = self.calls.last_mut() {
            call.arguments = arguments;
        }
        result
    }

    /// Ends the last call.
    pub fn complete(&mut self) {
        if let Some(call) = self.calls.last_mut() {
            call.is_complete = true;
        }
        self.left = self.rest.len();
    }

    /// Adds an element to a list or object: `head`, with a comma before it if it is not the first, and
    /// the value that `read` writes. An element without a certain value is left out.
    pub fn element(
        &mut self,
        out: &mut String,
        head: &str,
        read: impl FnOnce(&mut Self, &mut String) -> Read,
    ) -> Read {
        let start = out.len();
        if !out.ends_with(['{', '[']) {
            out.push(',');
        }
        out.push_str(head);
        let before = out.len();
        let result = read(self, out);
        if out.len() == before {
            out.truncate(start);
        }
        result
    }

    /// A value; `depth` counts the lists and objects that it is in.
    pub fn value(&mut self, out: &mut String, depth: usize) -> Read {
        if depth > DEPTH {
            return Err(Stop::Malformed);
        }
        match (self.dialect, self.peek()?) {
            (Dialect::Quoted(quote), _) if self.rest.starts_with(quote) => {
                self.expect(quote)?;
                self.quoted(out, quote)
            }
            (Dialect::Quoted(quote), _) if quote.starts_with(self.rest) => Err(Stop::Early),
            (_, '"') | (Dialect::Python, '\'') => self.string(out),
            (_, '{') => self.object(out, depth),
            (_, '[') => self.list(out, "[", "]", depth),
            (Dialect::Python, '(') => self.list(out, "(", ")", depth),
            _ => self.scalar(out),
        }
    }

    /// `{..}`
    pub fn object(&mut self, out: &mut String, depth: usize) -> Read {
        self.expect("{")?;
        self.is_pending = false;
        out.push('{');
        self.members("}", |reader, key| {
            reader.element(out, &head(&key), |reader, out| reader.value(out, depth + 1))
        })?;
        out.push('}');
        Ok(())
    }

    /// `key: value` and so on up to `close`; `read` reads the value.
    pub fn members(
        &mut self,
        close: &str,
        mut read: impl FnMut(&mut Self, String) -> Read,
    ) -> Read {
        let mut is_first = true;
        loop {
            self.skip_space();
            if self.take(close)? {
                return Ok(());
            }
            if !std::mem::replace(&mut is_first, false) {
                self.expect(",")?;
                self.skip_space();
                if self.take(close)? {
                    self.is_repaired = true;
                    return Ok(());
                }
            }
            self.is_pending = true;
            let key = self.key()?;
            self.skip_space();
            self.expect(":")?;
            self.skip_space();
            read(self, key)?;
        }
    }

    /// The key of a member.
    fn key(&mut self) -> Read<String> {
        let is_quoted = match (self.dialect, self.peek()?) {
            (Dialect::Quoted(quote), c) => {
                c == '"' || quote.starts_with(self.rest) || self.rest.starts_with(quote)
            }
            (Dialect::Python, c) => c == '"' || c == '\'',
            (Dialect::Json, c) if c != '"' => return Err(Stop::Malformed),
            (Dialect::Json, _) => true,
        };
        if !is_quoted {
            let end = self.rest.find([':', ',', '}', '\n']).ok_or(Stop::Early)?;
            let key = self.rest[..end].trim();
            self.rest = &self.rest[end..];
            return if key.is_empty() { Err(Stop::Malformed) } else { Ok(key.into()) };
        }
        let mut json = String::new();
        let result = self.value(&mut json, 0);
        // A tag in a key is not text of a value.
        (self.is_in_value, self.is_pending) = (false, true);
        result?;
        serde_json::from_str(&json).map_err(|_| Stop::Malformed)
    }

    fn list(&mut self, out: &mut String, open: &str, close: &str, depth: usize) -> Read {
        self.expect(open)?;
        self.is_pending = false;
        out.push('[');
        let mut is_first = true;
        loop {
            self.skip_space();
            if self.take(close)? {
                break;
            }
            if !std::mem::replace(&mut is_first, false) {
                self.expect(",")?;
                self.skip_space();
                if self.take(close)? {
                    self.is_repaired |= self.dialect != Dialect::Python;
                    break;
                }
            }
            self.element(out, "", |reader, out| reader.value(out, depth + 1))?;
        }
        out.push(']');
        Ok(())
    }

    /// A string in quotes with escapes.
    fn string(&mut self, out: &mut String) -> Read {
        let quote = self.peek()?;
        self.rest = &self.rest[1..];
        (self.is_in_value, self.is_pending) = (true, true);
        out.push('"');
        loop {
            let special = |c: char| c == quote || c == '\\' || c < ' ';
            let Some(at) = self.rest.find(special) else {
                push_text(out, self.rest);
                self.rest = "";
                return Err(Stop::Early);
            };
            push_text(out, &self.rest[..at]);
            self.rest = &self.rest[at..];
            match self.peek()? {
                '\\' => self.escape(out)?,
                c if c == quote => break,
                c => {
                    // A line break in a string, which JSON escapes.
                    self.is_repaired = true;
                    push_text(out, c.encode_utf8(&mut [0; 4]));
                    self.rest = &self.rest[1..];
                }
            }
        }
        self.rest = &self.rest[1..];
        (self.is_in_value, self.is_pending) = (false, false);
        out.push('"');
        Ok(())
    }

    /// An escape in a string.
    fn escape(&mut self, out: &mut String) -> Read {
        let Some(escaped) = self.rest[1..].chars().next() else {
            return if self.has_ended { self.wrong_escape(out, 1) } else { Err(Stop::Early) };
        };
        let length = 1 + escaped.len_utf8();
        let text = match escaped {
            '"' | '\\' | '/' => escaped.to_string(),
            '\'' if self.dialect == Dialect::Python => escaped.to_string(),
            '\n' if self.dialect == Dialect::Python => String::new(),
            'b' => "\u{8}".into(),
            'f' => "\u{c}".into(),
            'n' => "\n".into(),
            'r' => "\r".into(),
            't' => "\t".into(),
            'u' => return self.unicode(out),
            _ => return self.wrong_escape(out, length),
        };
        push_text(out, &text);
        self.rest = &self.rest[length..];
        Ok(())
    }

    /// Adds `length` bytes as they are, as in a path or an expression whose backslash should be escaped.
    fn wrong_escape(&mut self, out: &mut String, length: usize) -> Read {
        self.is_repaired = true;
        let (text, rest) = self.rest.split_at(length);
        push_text(out, text);
        self.rest = rest;
        Ok(())
    }

    /// `\u00e9`, or two of these for one character. Without four digits, and half a character alone, it is
    /// a wrong escape.
    fn unicode(&mut self, out: &mut String) -> Read {
        const LENGTH: usize = 6;
        let Some(first) = self.unit(0)? else { return self.wrong_escape(out, 2) };
        let (mut units, mut length) = (vec![first], LENGTH);
        if (0xd800..0xdc00).contains(&first)
            && let Some(second) = self.unit(LENGTH)?
        {
            units.push(second);
            length += LENGTH;
        }
        let is_pair = String::from_utf16(&units).is_ok();
        match String::from_utf16(&units[..if is_pair { units.len() } else { 1 }]) {
            Ok(text) => push_text(out, &text),
            Err(_) => return self.wrong_escape(out, LENGTH),
        }
        self.rest = &self.rest[length..];
        Ok(())
    }

    /// The number of the escape `\uXXXX` after `at` bytes; `None` if there is none.
    fn unit(&self, at: usize) -> Read<Option<u16>> {
        let text = &self.rest[at..];
        let is_so_far = |(i, byte): (usize, u8)| match i {
            0 => byte == b'\\',
            1 => byte == b'u',
            _ => byte.is_ascii_hexdigit(),
        };
        let length = text.bytes().take(6).enumerate().take_while(|one| is_so_far(*one)).count();
        match text.get(2..6) {
            Some(digits) if length == 6 => Ok(u16::from_str_radix(digits, 16).ok()),
            _ if length == text.len() && !self.has_ended => Err(Stop::Early),
            _ => Ok(None),
        }
    }

    /// The rest of a string up to `quote`, with nothing escaped.
    fn quoted(&mut self, out: &mut String, quote: &str) -> Read {
        self.is_pending = true;
        out.push('"');
        let Some((text, rest)) = self.rest.split_once(quote) else {
            self.is_in_value = true;
            let certain = self.rest.len() - partial(self.rest, quote);
            push_text(out, &self.rest[..certain]);
            return Err(Stop::Early);
        };
        push_text(out, text);
        out.push('"');
        (self.rest, self.is_pending) = (rest, false);
        Ok(())
    }

    /// A number, with the digits that the model wrote, a truth value or null.
    fn scalar(&mut self, out: &mut String) -> Read {
        let is_end = |c: char| ",}])<".contains(c) || c.is_whitespace();
        let end = match self.rest.find(is_end) {
            Some(end) => end,
            None if self.has_ended || self.rest.len() > NUMBER_BYTES => self.rest.len(),
            None => return Err(Stop::Early),
        };
        let text = &self.rest[..end];
        match text {
            "True" | "False" | "None" => {
                self.is_repaired |= self.dialect != Dialect::Python;
                out.push_str(&text.to_lowercase().replace("none", "null"));
            }
            "true" | "false" | "null" => out.push_str(text),
            _ if end <= NUMBER_BYTES && is_number(text) => {
                self.is_half = end == self.rest.len();
                out.push_str(text);
            }
            _ => return Err(Stop::Malformed),
        }
        self.is_pending = false;
        self.rest = &self.rest[end..];
        Ok(())
    }
}

/// Whether `text` is a number of JSON.
pub fn is_number(text: &str) -> bool {
    fn digits(text: &str) -> (usize, &str) {
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        (end, &text[end..])
    }
    let text = text.strip_prefix('-').unwrap_or(text);
    let (count, mut rest) = digits(text);
    if count == 0 || count > 1 && text.starts_with('0') {
        return false;
    }
    if let Some(fraction) = rest.strip_prefix('.') {
        let (count, after) = digits(fraction);
        if count == 0 {
            return false;
        }
        rest = after;
    }
    if let Some(exponent) = rest.strip_prefix(['e', 'E']) {
        let (count, after) = digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent));
        if count == 0 {
            return false;
        }
        rest = after;
    }
    rest.is_empty()
}

/// `text` as compact JSON, if it is one value of JSON and nothing else.
pub fn compact(text: &str) -> Option<String> {
    let schemas = Schemas::default();
    let mut reader = Reader { has_ended: true, ..Reader::new(text, &schemas, Dialect::Json) };
    let mut json = String::new();
    reader.value(&mut json, 0).ok()?;
    reader.skip_space();
    (reader.is_at_end() && !reader.is_repaired).then_some(json)
}

/// What no name has: it would be part of a tag, as in `<invoke name="f" id="1">`.
const FORBIDDEN: [char; 4] = ['<', '{', '\n', '"'];

/// `"key":`
pub fn head(key: &str) -> String {
    Value::from(key).to_string() + ":"
}

/// Adds `text` to an open JSON string.
pub fn push_text(out: &mut String, text: &str) {
    let json = Value::from(text).to_string();
    out.push_str(&json[1..json.len() - 1]);
}

/// `json`, with what is open closed.
pub fn closed(json: &str) -> String {
    let (mut open, mut is_string, mut is_escaped) = (Vec::new(), false, false);
    for c in json.chars() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_string => is_escaped = true,
            '"' => is_string = !is_string,
            _ if is_string => {}
            '{' => open.push('}'),
            '[' => open.push(']'),
            '}' | ']' => drop(open.pop()),
            _ => {}
        }
    }
    let quote = if is_string { "\"" } else { "" };
    let brackets: String = open.into_iter().rev().collect();
    if json.is_empty() { "{}".into() } else { format!("{json}{quote}{brackets}") }
}
