//! The text after a thought that was cut: it says what comes now, typed by task.
//!
//! A bare `</think>` does not end a loop, which goes on in the answer; the head of the right answer
//! does. Each text can be replaced by a parameter; `{language}` in `hint_code` is the language's
//! name, which may be empty.

use super::settings::Settings;
use super::task::{Task, task};

/// Parameters that replace a text.
pub const NAMES: &[&str] = &[
    "hint_json",
    "hint_code",
    "hint_sql",
    "hint_translation",
    "hint_table",
    "hint_answer",
    "hint_tools",
];

/// The text for a request: the contract first (tools), the user's words second.
pub fn hint(settings: &Settings, has_tools: bool, user: &str) -> String {
    if has_tools {
        // What comes next may be a call. A typed head would have the model write the code or the
        // JSON that a tool should get; this leaves both ways open.
        return text(settings, "hint_tools", "**Next Step:**\n\n");
    }
    match task(user) {
        Task::Json => text(settings, "hint_json", "**Final JSON:**\n\n```json\n"),
        Task::Code(language) => text(settings, "hint_code", "**Final Code:**\n\n```{language}\n")
            .replace("{language}", language),
        Task::Sql => text(settings, "hint_sql", "**Final SQL:**\n\n```sql\n"),
        Task::Translation => text(settings, "hint_translation", "**Final Translation:**\n\n"),
        Task::Table => text(settings, "hint_table", "**Final Table:**\n\n|"),
        Task::Answer => text(settings, "hint_answer", "**Final Answer:**\n\n"),
    }
}

fn text(settings: &Settings, name: &str, default: &str) -> String {
    let found = settings.hints.iter().find(|(key, _)| key == name);
    found.map_or(default, |(_, text)| text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_is_typed_by_tools_first_and_words_second() {
        let settings = Settings::default();
        let cases = [
            ("Extract the names as JSON.", "**Final JSON:**\n\n```json\n"),
            ("Write a Python function that sorts.", "**Final Code:**\n\n```python\n"),
            ("Write a function that sorts.", "**Final Code:**\n\n```\n"),
            ("Optimize this SQL query: SELECT 1", "**Final SQL:**\n\n```sql\n"),
            ("Translate to French: the car", "**Final Translation:**\n\n"),
            ("List the cities as a table.", "**Final Table:**\n\n|"),
            ("Who is the tallest?", "**Final Answer:**\n\n"),
        ];
        for (user, expected) in cases {
            assert_eq!(hint(&settings, false, user), expected, "{user}");
            assert_eq!(hint(&settings, true, user), "**Next Step:**\n\n", "{user}");
        }
    }

    #[test]
    fn a_parameter_replaces_the_text() {
        let hints = vec![("hint_code".into(), "```{language} now\n".into())];
        let settings = Settings { hints, ..Settings::default() };
        assert_eq!(hint(&settings, false, "Write a Rust function."), "```rust now\n");
        assert_eq!(hint(&settings, false, "Hello"), "**Final Answer:**\n\n");
    }
}
