//! Translates llama.cpp's GBNF to Lark: other names for rules, regular expressions for character classes.
//!
//! Source: llama.cpp `grammars/README.md`.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Whether `text` is GBNF: its first rule is defined by `::=`. In Lark that may stand in a literal only.
pub fn is_gbnf(text: &str) -> bool {
    let code = text.lines().map(|line| line.split_once('#').map_or(line, |(code, _)| code));
    let code: String = code.flat_map(|line| [line, "\n"]).collect();
    let code = code.trim_start();
    let name = code.find(|c| !is_name(c)).unwrap_or(code.len());
    name > 0 && code[name..].trim_start().starts_with("::=")
}

/// `text` in Lark.
///
/// # Errors
/// Says where the text breaks off.
pub fn to_lark(text: &str) -> Result<String, String> {
    let mut lark = String::new();
    let mut names = Names::default();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '#' => rest.find('\n').unwrap_or(rest.len()),
            '"' => {
                let length = quoted(rest, '"').ok_or("a string has no end")?;
                let characters = characters(&rest[1..length - 1])?;
                let literal: String = characters.into_iter().map(|(c, _)| c).collect();
                lark.push_str(&serde_json::Value::String(literal).to_string());
                length
            }
            '[' => {
                let length = quoted(rest, ']').ok_or("a character class has no end")?;
                let _ = write!(lark, "/{}/", class(&rest[1..length - 1])?);
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
                let name = names.of(name);
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

/// The names of rules in Lark: in lower case, without `-`, and different where those of GBNF are. The first
/// rule is `start`.
#[derive(Default)]
struct Names<'a> {
    known: HashMap<&'a str, String>,
    taken: HashSet<String>,
}

impl<'a> Names<'a> {
    fn of(&mut self, name: &'a str) -> String {
        if name == "root" {
            return "start".into();
        }
        if let Some(known) = self.known.get(name) {
            return known.clone();
        }
        let plain = format!("rule_{}", name.to_ascii_lowercase().replace('-', "_"));
        let mut own = plain.clone();
        let mut number = self.known.len();
        while !self.taken.insert(own.clone()) {
            number += 1;
            own = format!("{plain}_{number}");
        }
        self.known.insert(name, own.clone());
        own
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

/// The characters that `text` stands for, and whether each was escaped.
fn characters(text: &str) -> Result<Vec<(char, bool)>, String> {
    let mut all = Vec::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c != '\\' {
            all.push((c, false));
            continue;
        }
        let escape = rest.next().ok_or("a string ends in a backslash")?;
        let digits = match escape {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        let c = match escape {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            _ if digits > 0 => {
                let code = rest.as_str().get(..digits);
                let number = code.and_then(|code| u32::from_str_radix(code, 16).ok());
                rest = rest.as_str()[code.map_or(0, str::len)..].chars();
                number.and_then(char::from_u32).ok_or_else(|| {
                    format!(
                        "`\\{escape}` needs {digits} hexadecimal digits of a character behind it"
                    )
                })?
            }
            c if c.is_ascii_punctuation() => c,
            c => return Err(format!("`\\{c}` is no escape; write `\\\\` for a backslash")),
        };
        all.push((c, true));
    }
    Ok(all)
}

/// The expression of a character class with these contents.
fn class(text: &str) -> Result<String, String> {
    let all = characters(text)?;
    let (sign, all) = match &all[..] {
        [('^', false), others @ ..] => ("^", others),
        all => ("", all),
    };
    let mut class = format!("[{sign}");
    let mut rest = all;
    loop {
        match rest {
            [] => break,
            [(from, _), ('-', false), (to, _), others @ ..] => {
                let _ = write!(class, "{}-{}", in_class(*from), in_class(*to));
                rest = others;
            }
            [(c, _), others @ ..] => {
                class.push_str(&in_class(*c));
                rest = others;
            }
        }
    }
    class.push(']');
    Ok(class)
}

/// A character in a class of an expression that stands between slashes.
fn in_class(c: char) -> String {
    match c {
        '\\' | '[' | ']' | '^' | '-' | '&' | '~' | '/' | '"' | '#' => format!("\\{c}"),
        c if c.is_control() || c.is_whitespace() && c != ' ' => format!("\\x{{{:X}}}", c as u32),
        c => c.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(gbnf: &str) -> Vec<String> {
        let lark = to_lark(gbnf).unwrap();
        let lines = lark.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "));
        lines.filter(|line| !line.is_empty()).collect()
    }

    #[test]
    fn every_element_has_its_counterpart() {
        let gbnf = "# A list\nroot ::= item (\",\" item){1,3}\n  | \"none\\x21\"\nitem ::= Odd-Name? . [^\\]/]+ # one\nOdd-Name ::= \"#\"";
        assert_eq!(
            lines(gbnf),
            [
                "start: rule_item (\",\" rule_item){1,3} | \"none!\"",
                "rule_item: rule_odd_name? /(?s:.)/ /[^\\]\\/]/+",
                "rule_odd_name: \"#\"",
            ]
        );
        assert!(to_lark("root ::= \"a").is_err() && to_lark("root ::= [a").is_err());
    }

    /// F22: a backslash before `x1` became the character 1, rules that differ in case or in `-` and `_` were one
    /// rule, defined twice, and Lark with `::=` in a literal was read as GBNF.
    #[test]
    fn escapes_names_and_the_kind_of_a_grammar_are_what_llama_cpp_reads() {
        for (gbnf, lark) in [
            (r#"root ::= "C:\\x1""#, r#"start: "C:\\x1""#),
            (r#"root ::= "\x41\u00e9\U0001F600\"\n""#, "start: \"Aé😀\\\"\\n\""),
            (r"root ::= [\x41-Z\n\t\]^-]", r"start: /[A-Z\x{A}\x{9}\]\^\-]/"),
            (r"root ::= [^a-c&&[/]", r"start: /[^a-c\&\&\[\/]/"),
        ] {
            assert_eq!(lines(gbnf), [lark], "{gbnf}");
        }
        let rules = lines(
            "root ::= Item item i-t i_t\nItem ::= \"A\"\nitem ::= \"b\"\ni-t ::= \"c\"\ni_t ::= \"d\"",
        );
        let names: HashSet<_> = rules.iter().map(|rule| rule.split(':').next().unwrap()).collect();
        assert_eq!((rules.len(), names.len()), (5, 5), "{rules:?}");
        for wrong in [r#"root ::= "\q""#, r#"root ::= "\x4""#, r#"root ::= "\ud800""#] {
            assert!(to_lark(wrong).is_err(), "{wrong}");
        }
        assert!(is_gbnf("# one ::= two\n\nroot\n  ::= \"a\""));
        assert!(!is_gbnf("start: \"a ::= b\"") && !is_gbnf("// x ::= y\nstart: A\nA: /::=/"));
        assert!(!is_gbnf("") && !is_gbnf("::= a"));
    }
}
