//! Replaces spans of system text, as `on-prompt` asks.

use super::{PromptView, Replacement, SYSTEM_BYTES};

/// Applies `replacements` in order to the texts of [`PromptView::system`]. Whoever only wants to know
/// whether they apply does it to a copy. They may be of several policies: that each answers no more
/// than [`super::REPLACEMENTS`] is checked where it answers.
///
/// # Errors
/// What is wrong with the first that does not apply, in words; `system` is then unchanged.
pub fn replace(system: &mut [String], replacements: &[Replacement]) -> Result<(), String> {
    let mut texts = system.to_vec();
    for (i, Replacement { message, old, new }) in replacements.iter().enumerate() {
        let count = texts.len();
        let Some(text) = texts.get_mut(*message as usize) else {
            return Err(format!("replacement {i} is in message {message} of {count}"));
        };
        if old.is_empty() {
            return Err(format!("replacement {i} is of an empty span"));
        }
        let Some(at) = text.find(old) else {
            return Err(format!("replacement {i}: message {message} does not have its span"));
        };
        text.replace_range(at..at + old.len(), new);
    }
    system.clone_from_slice(&texts);
    Ok(())
}

/// What a policy sees of a system text, and the rest.
pub fn seen(text: &str) -> (&str, &str) {
    text.split_at(text.floor_char_boundary(SYSTEM_BYTES))
}

/// Whether there is anything to ask about.
pub fn has_text(prompt: &PromptView) -> bool {
    prompt.system.iter().any(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(replacements: &[(u32, &str, &str)], expected: Result<[&str; 2], &str>) {
        let before = ["version 7; be brief; be brief".to_string(), "date".to_string()];
        let replacements: Vec<Replacement> = replacements
            .iter()
            .map(|&(message, old, new)| Replacement { message, old: old.into(), new: new.into() })
            .collect();
        let mut system = before.clone();
        match (replace(&mut system, &replacements), expected) {
            (Ok(()), Ok(expected)) => assert_eq!(system, expected),
            (Err(problem), Err(words)) => {
                assert!(problem.contains(words), "{problem}");
                assert_eq!(system, before);
            }
            (found, expected) => panic!("{found:?}, not {expected:?}"),
        }
    }

    #[test]
    fn replacements_apply_in_order_or_not_at_all() {
        let text = "version 7; be brief; be brief";
        check(&[], Ok([text, "date"]));
        check(&[(0, "version 7; ", "")], Ok(["be brief; be brief", "date"]));
        check(&[(0, "be brief", "speak")], Ok(["version 7; speak; be brief", "date"]));
        check(&[(1, "date", "day"), (1, "day", "")], Ok([text, ""]));
        check(&[(0, "7", "8"), (2, "x", "")], Err("message 2 of 2"));
        check(&[(0, "7", "8"), (0, "7", "9")], Err("does not have its span"));
        check(&[(0, "", "8")], Err("empty span"));
    }

    #[test]
    fn a_long_text_is_seen_up_to_a_whole_character() {
        let text = format!("{}é!", "a".repeat(SYSTEM_BYTES - 1));
        let (head, tail) = seen(&text);
        assert_eq!((head.len(), tail), (SYSTEM_BYTES - 1, "é!"));
        assert_eq!(seen("short"), ("short", ""));
    }
}
