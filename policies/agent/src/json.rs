//! Validates JSON objects (RFC 8259) without building them.

/// Deepest nesting of objects and lists; deeper texts are rejected.
const DEPTH: u32 = 64;

/// Whether a text is one JSON object and nothing else.
pub fn is_object(text: &str) -> bool {
    let mut reader = Reader { rest: text.as_bytes() };
    reader.space();
    reader.rest.first() == Some(&b'{') && reader.value(0).is_some() && {
        reader.space();
        reader.rest.is_empty()
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn space(&mut self) {
        self.skip(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r'));
    }

    /// Skips bytes and returns their number.
    fn skip(&mut self, is: impl Fn(u8) -> bool) -> usize {
        let count = self.rest.iter().take_while(|byte| is(**byte)).count();
        self.rest = &self.rest[count..];
        count
    }

    fn take(&mut self, text: &str) -> Option<()> {
        self.rest = self.rest.strip_prefix(text.as_bytes())?;
        Some(())
    }

    fn value(&mut self, depth: u32) -> Option<()> {
        self.space();
        match self.rest.first()? {
            _ if depth > DEPTH => None,
            b'{' => self.items('}', |r| {
                r.space();
                r.string()?;
                r.space();
                r.take(":")?;
                r.value(depth + 1)
            }),
            b'[' => self.items(']', |r| r.value(depth + 1)),
            b'"' => self.string(),
            b't' => self.take("true"),
            b'f' => self.take("false"),
            b'n' => self.take("null"),
            _ => self.number(),
        }
    }

    /// The contents of brackets: nothing, or `item`s separated by commas.
    fn items(&mut self, end: char, item: impl Fn(&mut Self) -> Option<()>) -> Option<()> {
        self.rest = &self.rest[1..];
        self.space();
        let end = end as u8;
        if self.rest.first() == Some(&end) {
            self.rest = &self.rest[1..];
            return Some(());
        }
        loop {
            item(self)?;
            self.space();
            let (&byte, rest) = self.rest.split_first()?;
            self.rest = rest;
            match byte {
                b',' => {}
                _ if byte == end => return Some(()),
                _ => return None,
            }
        }
    }

    fn string(&mut self) -> Option<()> {
        self.take("\"")?;
        loop {
            self.skip(|byte| byte >= b' ' && byte != b'"' && byte != b'\\');
            let (&byte, rest) = self.rest.split_first()?;
            self.rest = rest;
            match byte {
                b'"' => return Some(()),
                b'\\' => {
                    let (&escaped, rest) = self.rest.split_first()?;
                    self.rest = rest;
                    match escaped {
                        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => {}
                        b'u' => {
                            let digits = self.rest.get(..4)?;
                            digits.iter().all(u8::is_ascii_hexdigit).then_some(())?;
                            self.rest = &self.rest[4..];
                        }
                        _ => return None,
                    }
                }
                _ => return None,
            }
        }
    }

    fn number(&mut self) -> Option<()> {
        let _ = self.take("-");
        let digits = |r: &mut Self| r.skip(|byte| byte.is_ascii_digit());
        let leads_with_zero = self.rest.first() == Some(&b'0');
        match digits(self) {
            0 => return None,
            count if leads_with_zero && count > 1 => return None,
            _ => {}
        }
        if self.take(".").is_some() && digits(self) == 0 {
            return None;
        }
        if self.take("e").or_else(|| self.take("E")).is_some() {
            let _ = self.take("+").or_else(|| self.take("-"));
            (digits(self) > 0).then_some(())?;
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_single_object_is_accepted() {
        let objects = [
            "{}",
            " { } ",
            r#"{"a": 1, "b": [true, false, null, -0.5e+3, 0], "c": {"d": "x\n\u00e9 ü"}}"#,
            "{\"a\"\n:\t[]}",
        ];
        let others = [
            "",
            "[]",
            "\"{}\"",
            "{",
            "{}{}",
            "{} x",
            "{a: 1}",
            "{'a': 1}",
            "{\"a\" 1}",
            "{\"a\": }",
            "{\"a\": 1,}",
            "{\"a\": [1,]}",
            "{\"a\": 01}",
            "{\"a\": 1.}",
            "{\"a\": 1e}",
            "{\"a\": \"\n\"}",
            "{\"a\": \"\\x\"}",
            "{\"a\": \"\\u12g4\"}",
            "{\"a\": \"",
            "{\"a\": tru}",
            "{\"a\": 1]",
            "{\"a\": [1}",
        ];
        for text in objects {
            assert!(is_object(text), "{text}");
        }
        for text in others {
            assert!(!is_object(text), "{text}");
        }
    }

    #[test]
    fn deep_nesting_is_rejected_without_stack_overflow() {
        assert!(!is_object(&format!("{{\"a\": {}", "[".repeat(100_000))));
    }
}
