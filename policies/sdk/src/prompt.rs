//! Editing lines of system text.

use crate::{PromptEdit, PromptView, Replacement};

/// Most edits that the host accepts from one call of `on_prompt`.
pub const EDITS: usize = 16;

/// Whether a line is the billing header that Claude Code puts in front of its system text. It differs
/// between conversations.
pub fn is_billing_header(line: &str) -> bool {
    const PREFIX: &str = "x-anthropic-billing-header:";
    let start = line.trim_start().get(..PREFIX.len());
    start.is_some_and(|start| start.eq_ignore_ascii_case(PREFIX))
}

impl PromptView {
    /// The system texts after `edits`, as the host applies them. An edit that the host would refuse changes
    /// nothing.
    pub fn edited(&self, edits: &[PromptEdit]) -> Vec<String> {
        let mut system = self.system.clone();
        for edit in edits {
            if system.is_empty() && !matches!(edit, PromptEdit::Replace(_)) {
                system.push(String::new());
            }
            match (edit, &mut system[..]) {
                (PromptEdit::Begin(text), [first, ..]) => first.insert_str(0, text),
                (PromptEdit::End(text), [.., last]) => last.push_str(text),
                (PromptEdit::Begin(_) | PromptEdit::End(_), []) => {}
                (PromptEdit::Replace(Replacement { message, old, new }), texts) => {
                    if let Some(text) = texts.get_mut(*message as usize) {
                        *text = text.replacen(old, new, 1);
                    }
                }
            }
        }
        system
    }

    /// Replaces lines among the first `lines` of each system text, at most [`EDITS`] in all.
    /// `edit` gets a line without its newline and returns the new line, an empty text to remove the
    /// line with its newline, or `None` to leave it unchanged.
    ///
    /// ```
    /// use steersman_policy::{PromptEdit, PromptView, Replacement};
    ///
    /// let prompt = PromptView { system: vec!["You are X.\nNow: 19:48\nBe brief.".into()], ..PromptView::default() };
    /// let found = prompt.edit_lines(8, |line| line.starts_with("Now:").then(String::new));
    /// let removed = Replacement { message: 0, old: "\nNow: 19:48\n".into(), new: "\n".into() };
    /// assert_eq!(found, [PromptEdit::Replace(removed)]);
    /// ```
    pub fn edit_lines(
        &self,
        lines: usize,
        edit: impl Fn(&str) -> Option<String>,
    ) -> Vec<PromptEdit> {
        let mut found = Vec::new();
        for (message, text) in (0..).zip(&self.system) {
            // The host searches for each span in the text that earlier replacements leave.
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
                // The host replaces the first occurrence. The newline in front excludes a match at
                // the end of an earlier line.
                let before = if at > 0 { "\n" } else { "" };
                let after = if edited.is_empty() { "" } else { &line[words.len()..] };
                let old = format!("{before}{line}");
                let new = format!("{before}{edited}{after}");
                if found.len() == EDITS {
                    return found;
                }
                if text.find(&old) != Some(at - before.len()) {
                    at = next;
                    continue;
                }
                at = next + new.len() - old.len();
                text = text.replacen(&old, &new, 1);
                found.push(PromptEdit::Replace(Replacement { message, old, new }));
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
        prompt.edited(&found).remove(0)
    }

    #[test]
    fn removing_lines_leaves_the_others_unchanged() {
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
    fn text_is_added_where_there_is_none() {
        let edits = [PromptEdit::End("b".into()), PromptEdit::Begin("a".into())];
        let system = |texts: &[&str]| {
            let system = texts.iter().map(|text| (*text).to_owned()).collect();
            PromptView { system, ..PromptView::default() }.edited(&edits)
        };
        assert_eq!(system(&[]), ["ab"]);
        assert_eq!(system(&["x", "y"]), ["ax", "yb"]);
    }

    #[test]
    fn replacements_stop_at_the_limit_of_the_host() {
        let prompt = PromptView { system: vec!["x\nx\n".into(); 10], ..PromptView::default() };
        let found = prompt.edit_lines(4, |_| Some(String::new()));
        let PromptEdit::Replace(last) = &found[15] else { panic!("{found:?}") };
        assert_eq!((found.len(), last.message), (EDITS, 7));
    }
}
