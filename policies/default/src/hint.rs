//! The hint: text that follows reasoning that was closed early, chosen by the kind of answer.
//!
//! A bare `</think>` does not end a loop, which continues in the answer; the beginning of a fitting
//! answer does. A parameter replaces each hint; `{language}` in `hint_code` stands for the name of the
//! language, which may be empty.

use super::settings::Settings;
use super::task::{Task, task};

/// Parameters that replace a hint.
pub const NAMES: &[&str] = &[
    "hint_json",
    "hint_code",
    "hint_sql",
    "hint_translation",
    "hint_table",
    "hint_answer",
    "hint_tools",
];

/// The hint for a request. Tools take precedence over the words of the user.
pub fn hint(settings: &Settings, has_tools: bool, user: &str) -> String {
    if has_tools {
        // A tool call may follow. With a typed hint the model would write the code or JSON itself
        // instead of passing it to a tool; this one allows both.
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
    fn tools_take_precedence_over_the_kind_of_answer() {
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
    fn a_parameter_replaces_the_hint() {
        let hints = vec![("hint_code".into(), "```{language} now\n".into())];
        let settings = Settings { hints, ..Settings::default() };
        assert_eq!(hint(&settings, false, "Write a Rust function."), "```rust now\n");
        assert_eq!(hint(&settings, false, "Hello"), "**Final Answer:**\n\n");
    }
}
