//! A value of the TOML text, with its place for messages.

use toml::de::DeValue;

/// What is wrong with a text of rules, a sentence each, with the rule and its line.
pub type Mistakes = Vec<String>;

/// Mistakes after which no further ones are looked for: the lines of each are counted from the beginning of the text.
pub const MAX_MISTAKES: usize = 16;

/// The line of a byte offset, from 1.
pub fn line(text: &str, at: usize) -> usize {
    text[..at.min(text.len())].matches('\n').count() + 1
}

/// A whole number from 0 to 4294967295.
pub fn whole(value: &DeValue) -> Option<u32> {
    let number = value.as_integer()?;
    u32::from_str_radix(number.as_str(), number.radix()).ok()
}

/// Reads all entries; fails with the mistakes of each that has some.
pub fn each<E>(
    entries: impl IntoIterator<Item = E>,
    mut read: impl FnMut(E) -> Result<(), Mistakes>,
) -> Result<(), Mistakes> {
    let mistakes = entries.into_iter().filter_map(|entry| read(entry).err());
    let mistakes: Mistakes = mistakes.flatten().take(MAX_MISTAKES).collect();
    if mistakes.is_empty() { Ok(()) } else { Err(mistakes) }
}

/// Both results; fails with the mistakes of both.
pub fn both<A, B>(
    one: Result<A, Mistakes>,
    other: Result<B, Mistakes>,
) -> Result<(A, B), Mistakes> {
    match (one, other) {
        (Ok(one), Ok(other)) => Ok((one, other)),
        (one, other) => Err(one.err().into_iter().chain(other.err()).flatten().collect()),
    }
}

/// The name that is spelt most like `name`, if one is: a third of its letters may differ. All names are short, so that a
/// long one is compared with none.
fn nearest<'a>(name: &str, names: &[&'a str]) -> Option<&'a str> {
    if name.len() > 40 {
        return None;
    }
    let (most, near) = names.iter().map(|near| (distance(name, near), *near)).min()?;
    (most <= (name.len() / 3).max(1)).then_some(near)
}

/// The number of bytes to insert, remove, replace or swap with the next one, which make `a` to `b`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && (a[i - 1], a[i - 2]) == (b[j - 2], b[j - 1]) {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// A value with its position.
pub struct Entry<'a> {
    /// Number of the rule, from 1.
    pub rule: u32,
    /// Byte offset in `text`. Lines are counted only for messages, since a text has many entries.
    pub at: usize,
    /// Path of its table: "", "when", "unless", "do", "do.bias" or "do.loops".
    pub above: &'static str,
    pub name: &'a str,
    pub value: &'a DeValue<'a>,
    /// The whole text of the rules.
    pub text: &'a str,
}

impl<'a> Entry<'a> {
    pub fn place(&self) -> String {
        format!("rule {}, line {}", self.rule, line(self.text, self.at))
    }

    /// The name with the path of its table, `do.ban`.
    fn path(&self) -> String {
        let dot = if self.above.is_empty() { "" } else { "." };
        format!("{}{dot}{}", self.above, self.name)
    }

    pub fn error<T>(&self, problem: &str) -> Result<T, Mistakes> {
        Err(vec![format!("{}: `{}` {problem}", self.place(), self.path())])
    }

    /// The entries of this table by name; `above` is its path in messages.
    pub fn entries(&self, above: &'static str) -> Result<Vec<(&'a str, Entry<'a>)>, Mistakes> {
        let DeValue::Table(table) = self.value else {
            return self.error("must be a table: { key = value }");
        };
        let entries = table.iter().map(|(key, value)| {
            let name = key.get_ref().as_ref();
            let (at, value) = (key.span().start, value.get_ref());
            (name, Entry { rule: self.rule, at, above, name, value, text: self.text })
        });
        Ok(entries.collect())
    }

    pub fn unknown<T>(&self, allowed: &[&str]) -> Result<T, Mistakes> {
        let (place, key) = (self.place(), self.path());
        if let Some(near) = nearest(self.name, allowed) {
            return Err(vec![format!("{place}: unknown key `{key}`; did you mean `{near}`?")]);
        }
        let allowed = allowed.join(", ");
        let hint = match self.above {
            "when" => "; for the opposite of a condition, put it into `unless`",
            _ => "",
        };
        Err(vec![format!("{place}: unknown key `{key}`; expected one of {allowed}{hint}")])
    }

    pub fn text(&self) -> Result<String, Mistakes> {
        match self.value {
            DeValue::String(text) if !text.is_empty() => Ok(text.to_string()),
            _ => self.error("must be a text that is not empty"),
        }
    }

    pub fn texts(&self) -> Result<Vec<String>, Mistakes> {
        let list = match self.value {
            DeValue::String(text) => vec![Some(text.to_string())],
            DeValue::Array(list) => {
                list.iter().map(|v| v.get_ref().as_str().map(str::to_owned)).collect()
            }
            _ => Vec::new(),
        };
        let texts: Option<Vec<_>> = list.into_iter().collect();
        match texts {
            Some(texts) if !texts.is_empty() && texts.iter().all(|text| !text.is_empty()) => {
                Ok(texts)
            }
            _ => self.error("must be a text or a list of texts, not empty"),
        }
    }

    pub fn lower(&self) -> Result<Vec<String>, Mistakes> {
        Ok(self.texts()?.iter().map(|text| text.to_lowercase()).collect())
    }

    pub fn bool(&self) -> Result<bool, Mistakes> {
        match self.value {
            DeValue::Boolean(value) => Ok(*value),
            _ => self.error("must be true or false"),
        }
    }

    pub fn number(&self) -> Result<u32, Mistakes> {
        match whole(self.value) {
            Some(number) => Ok(number),
            None => self.error("must be a whole number from 0 to 4294967295"),
        }
    }

    /// A whole number that is not 0.
    pub fn count(&self) -> Result<u32, Mistakes> {
        match self.number()? {
            0 => self.error("must be at least 1"),
            count => Ok(count),
        }
    }

    pub fn float(&self, least: f32, most: f32) -> Result<f32, Mistakes> {
        let digits = match self.value {
            DeValue::Integer(number) if number.radix() == 10 => number.as_str(),
            DeValue::Float(number) => number.as_str(),
            _ => "",
        };
        // The parser has already removed the underscores of `1_000.5`.
        match digits.parse::<f32>() {
            Ok(number) if (least..=most).contains(&number) => Ok(number),
            _ => self.error(&format!("must be a number from {least} to {most}")),
        }
    }
}
