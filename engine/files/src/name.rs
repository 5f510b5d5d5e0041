//! Names of files that come from outside: from a hub, a request, a model's index, a link in a cache.
//!
//! Such a text is never joined to a path. It is parsed into a [`FileName`], which is one component of a path on every
//! system, or a [`FilePath`], which is a few of them; functions on files take these types.

use std::fmt;
use std::path::{Path, PathBuf};

/// Most bytes of a name. File systems allow 255; the rest is for endings such as `.part`.
const NAME_BYTES: usize = 240;

/// Most components of a path.
const COMPONENTS: usize = 8;

/// Names of devices on Windows, with any ending.
const DEVICES: [&str; 6] = ["con", "prn", "aux", "nul", "conin$", "conout$"];

/// A text that is one component of a path, on every system.
///
/// It is not empty, `.` or `..`, has at most 240 bytes, no separator, colon or control character, neither ends in a dot
/// or a space, nor names a device of Windows. A leading `-` is allowed: a name is never an argument of a command.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileName(String);

/// One or more [`FileName`]s, separated by `/` in text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FilePath(Vec<FileName>);

/// What is wrong with a name. Shows the beginning of the name with control characters escaped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is no name of a file: {problem}")]
pub struct NameError {
    name: String,
    problem: &'static str,
}

impl FileName {
    /// Checks `text`.
    ///
    /// # Errors
    /// If it is not one component of a path on every system.
    pub fn new(text: &str) -> Result<Self, NameError> {
        match problem(text) {
            None => Ok(Self(text.into())),
            Some(problem) => Err(NameError { name: shown(text), problem }),
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path of the file with this name in `folder`.
    pub fn within(&self, folder: &Path) -> PathBuf {
        folder.join(&self.0)
    }
}

impl FilePath {
    /// Checks `text`: names that are separated by `/`.
    ///
    /// # Errors
    /// If a part is no [`FileName`], or there are more than 8.
    pub fn new(text: &str) -> Result<Self, NameError> {
        let error = |problem| NameError { name: shown(text), problem };
        let names = text.split('/').take(COMPONENTS + 1).map(|part| match problem(part) {
            None => Ok(FileName(part.into())),
            Some(problem) => Err(error(problem)),
        });
        let names: Vec<_> = names.collect::<Result<_, _>>()?;
        if names.len() > COMPONENTS {
            return Err(error("it has too many folders"));
        }
        Ok(Self(names))
    }

    /// The names of the folders, and of the file.
    pub fn names(&self) -> &[FileName] {
        &self.0
    }

    /// The path of the file below `folder`.
    pub fn within(&self, folder: &Path) -> PathBuf {
        self.0.iter().fold(folder.to_path_buf(), |path, name| name.within(&path))
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What is wrong with a name.
fn problem(text: &str) -> Option<&'static str> {
    let stem = text.split('.').next().unwrap_or_default().trim_end().to_ascii_lowercase();
    let is_port = |kind| {
        let number = stem.strip_prefix(kind).map(|number| number.chars().collect::<Vec<_>>());
        number.is_some_and(|number| matches!(number[..], ['0'..='9' | '¹' | '²' | '³']))
    };
    match text {
        "" => Some("it is empty"),
        "." | ".." => Some("it names a folder"),
        _ if text.len() > NAME_BYTES => Some("it is too long"),
        _ if text.contains(['/', '\\']) => Some("it has a separator of folders"),
        _ if text.contains(':') => Some("it has a colon"),
        _ if text.contains(char::is_control) => Some("it has a control character"),
        _ if text.ends_with(['.', ' ']) => Some("it ends in a dot or a space"),
        _ if DEVICES.contains(&stem.as_str()) || is_port("com") || is_port("lpt") => {
            Some("it names a device")
        }
        _ => None,
    }
}

/// The beginning of `text` for messages.
fn shown(text: &str) -> String {
    const SHOWN: usize = 60;
    let mut shown: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown += "..";
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault A6: a hub's ETag `/home/u/.ssh/authorized_keys` was joined to the folder of contents, and its bytes
    /// replaced the file of that name.
    #[test]
    fn only_one_component_of_a_path_is_a_name() {
        let long = "x".repeat(NAME_BYTES + 1);
        for text in [
            "",
            ".",
            "..",
            "/",
            "/etc/passwd",
            "../x",
            "a/b",
            "a/",
            "a\\b",
            "C:\\x",
            "c:x",
            "a\0b",
            "a\nb",
            "\u{7f}",
            "\u{85}",
            "a.",
            "a ",
            "...",
            "con",
            "NUL.json",
            "aux .txt",
            "com1",
            "LPT9.bin",
            "com¹",
            &long,
        ] {
            assert!(FileName::new(text).is_err(), "{text:?}");
        }
        for text in [
            "a",
            ".hidden",
            "-rf",
            "~",
            "config.json",
            "W_x",
            "a b",
            "é",
            "%2e%2e",
            "company",
            "com10",
        ] {
            let name = FileName::new(text).unwrap();
            assert_eq!(name.within(Path::new("/f")), Path::new("/f").join(text));
            assert_eq!(name.within(Path::new("/f")).parent(), Some(Path::new("/f")), "{text:?}");
        }
    }

    #[test]
    fn paths_consist_of_names() {
        for text in
            ["", "/a", "a//b", "a/../b", "../a", "a/", "a/b/c/d/e/f/g/h/i", "a/./b", "a/con/b"]
        {
            assert!(FilePath::new(text).is_err(), "{text:?}");
        }
        let path = FilePath::new("a/b c/d.json").unwrap();
        assert_eq!(path.within(Path::new("/f")), Path::new("/f/a/b c/d.json"));
        assert_eq!(path.names().len(), 3);
    }

    #[test]
    fn errors_show_a_short_name_without_control_characters() {
        let error =
            FileName::new(&format!("\u{1b}[2J{}", "x".repeat(5000))).unwrap_err().to_string();
        assert!(error.len() < 200 && !error.contains('\u{1b}'), "{error}");
        assert!(error.contains("it is too long"), "{error}");
    }
}
