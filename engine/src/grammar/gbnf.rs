//! Translates llama.cpp's GBNF to Lark: other names for rules, regular expressions for character classes.
//!
//! Source: llama.cpp `grammars/README.md`.

use std::fmt::Write;

/// Whether `text` is GBNF: rules are defined by `::=`, which Lark does not have.
pub fn is_gbnf(text: &str) -> bool {
    text.contains("::=")
}

/// `text` in Lark.
///
/// # Errors
/// Says where the text breaks off.
pub fn to_lark(text: &str) -> Result<String, String> {
    let mut lark = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '#' => rest.find('\n').unwrap_or(rest.len()),
            '"' => {
                let length = quoted(rest, '"').ok_or("a string has no end")?;
                lark.push_str(&literal(&rest[..length]));
                length
            }
            '[' => {
                let length = quoted(rest, ']').ok_or("a character class has no end")?;
                let _ = write!(lark, "/{}/", rest[..length].replace('/', "\\/"));
                length
            }
            '.' => {
                lark.push_str("/(?s:.)/");
                1
            }
            _ if is_name(c) => {
                let length = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
                let (name, after) = rest.split_at(length);
                let after = after.trim_start();
                let name = rule(name);
                if let Some(body) = after.strip_prefix("::=") {
                    let _ = write!(lark, "\n{name}: ");
                    rest = body;
                    continue;
                }
                lark.push_str(&name);
                length
            }
            // The braces of a repetition contain digits.
            '{' => {
                let length = rest.find('}').ok_or("a repetition has no end")? + 1;
                lark.push_str(&rest[..length]);
                length
            }
            // A rule goes on over line breaks.
            c if c.is_whitespace() => {
                lark.push(' ');
                c.len_utf8()
            }
            c => {
                lark.push(c);
                c.len_utf8()
            }
        };
        rest = &rest[length..];
    }
    Ok(lark)
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Names of rules are in lower case in Lark, and the first is `start`.
fn rule(name: &str) -> String {
    match name {
        "root" => "start".into(),
        name => format!("rule_{}", name.to_ascii_lowercase().replace('-', "_")),
    }
}

/// Length of the text up to the first `end` after the first character that is not escaped.
fn quoted(text: &str, end: char) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == end => return Some(at + c.len_utf8()),
            _ => {}
        }
    }
    None
}

/// A string literal: Lark has no `\x41`.
fn literal(text: &str) -> String {
    text.replace("\\x", "\\u00")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_its_counterpart() {
        let gbnf = "# A list\nroot ::= item (\",\" item){1,3}\n  | \"none\\x21\"\nitem ::= Odd-Name? . [^\\]/]+ # one\nOdd-Name ::= \"#\"";
        let lark = to_lark(gbnf).unwrap();
        let lines: Vec<String> =
            lark.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines[1..],
            [
                "start: rule_item (\",\" rule_item){1,3} | \"none\\u0021\"",
                "rule_item: rule_odd_name? /(?s:.)/ /[^\\]\\/]/+",
                "rule_odd_name: \"#\"",
            ]
        );
        assert!(to_lark("root ::= \"a").is_err() && to_lark("root ::= [a").is_err());
    }
}
