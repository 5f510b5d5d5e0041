//! Replacing lines of system text.

use crate::{PromptView, Replacement};

/// Most replacements that a host takes of one `on_prompt`.
pub const REPLACEMENTS: usize = 16;

impl PromptView {
    /// Replaces lines among the first `lines` of each system text, as far as a host takes
    /// replacements. `edit` gets a line without its newline, and answers what stands there instead;
    /// an empty text removes the line and its newline. `None` leaves it.
    ///
    /// ```
    /// use steersman_policy::{PromptView, Replacement};
    ///
    /// let prompt = PromptView { system: vec!["You are X.\nNow: 19:48\nBe brief.".into()], ..PromptView::default() };
    /// let found = prompt.edit_lines(8, |line| line.starts_with("Now:").then(String::new));
    /// assert_eq!(found, [Replacement { message: 0, old: "\nNow: 19:48\n".into(), new: "\n".into() }]);
    /// ```
    pub fn edit_lines(
        &self,
        lines: usize,
        edit: impl Fn(&str) -> Option<String>,
    ) -> Vec<Replacement> {
        let mut found = Vec::new();
        for (message, text) in (0..).zip(&self.system) {
            // What earlier replacements leave, in which the host looks for the next one.
            let mut text = text.clone();
            let mut at = 0;
            for _ in 0..lines {
                let Some(line) = text[at..].split_inclusive('\n').next() else { break };
                let words = line.strip_suffix('\n').unwrap_or(line);
                let next = at + line.len();
                let Some(edited) = edit(words).filter(|edited| edited != words) else {
                    at = next;
                    continue;
                };
                // The host replaces the first occurrence. The newline before it makes that the line,
                // and not the end of an earlier one.
                let before = if at > 0 { "\n" } else { "" };
                let after = if edited.is_empty() { "" } else { &line[words.len()..] };
                let old = format!("{before}{line}");
                let new = format!("{before}{edited}{after}");
                if found.len() == REPLACEMENTS {
                    return found;
                }
                if text.find(&old) != Some(at - before.len()) {
                    at = next;
                    continue;
                }
                at = next + new.len() - old.len();
                text = text.replacen(&old, &new, 1);
                found.push(Replacement { message, old, new });
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn removed(text: &str, is: impl Fn(&str) -> bool) -> String {
        let prompt = PromptView { system: vec![text.into()], ..PromptView::default() };
        let found = prompt.edit_lines(4, |line| is(line).then(String::new));
        found.iter().fold(text.to_owned(), |text, r| text.replacen(&r.old, &r.new, 1))
    }

    #[test]
    fn removed_lines_leave_all_others_as_they_are() {
        let is_x = |line: &str| line == "x";
        let cases = [
            ("x\na\nb", "a\nb"),
            ("a\nx\nb", "a\nb"),
            ("x\nx\na\nx", "a\n"),
            ("ax\nx\nb", "ax\nb"),
            ("a\n\nb", "a\n\nb"),
            ("a\nb\nc\nd\nx", "a\nb\nc\nd\nx"),
            ("x", ""),
            ("", ""),
        ];
        for (text, expected) in cases {
            assert_eq!(removed(text, is_x), expected, "{text:?}");
        }
    }

    #[test]
    fn replacements_end_where_the_host_takes_no_more() {
        let prompt = PromptView { system: vec!["x\nx\n".into(); 10], ..PromptView::default() };
        let found = prompt.edit_lines(4, |_| Some(String::new()));
        assert_eq!((found.len(), found[15].message), (REPLACEMENTS, 7));
    }
}
