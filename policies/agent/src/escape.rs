//! The escape from a loop in reasoning: a rewind to the first block, then text that leads on.
//!
//! Greedy decoding would generate the block again from there, so the escape injects text and bans the
//! token that began the repeat for one step. The reasoning keeps its findings, which would be lost
//! among the repeats if it were closed at once.

use steersman_policy::{Action, Ban, LoopReport};

/// Actions that end a loop. `tokens` are the newest tokens of the reasoning; the ban needs them to
/// include all repeats. `text` replaces the repeats and may be empty.
pub fn actions(found: LoopReport, tokens: &[u32], text: &str) -> Vec<Action> {
    let repeats = found.period.saturating_mul(found.repeats.saturating_sub(1));
    let mut actions = vec![Action::Rewind(repeats)];
    let begin = tokens.len().checked_sub(repeats as usize).and_then(|at| tokens.get(at));
    if let (true, Some(&token)) = (found.exact, begin) {
        actions.push(Action::Ban(Ban { tokens: vec![token], steps: 1 }));
    }
    if !text.is_empty() {
        actions.push(Action::Inject(text.into()));
    }
    actions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_block_stays_and_its_first_token_is_banned_once() {
        let found = LoopReport { period: 2, repeats: 3, exact: true };
        let tokens = [1, 8, 9, 8, 9, 8, 9];
        let ban = Action::Ban(Ban { tokens: vec![8], steps: 1 });
        let inject = Action::Inject("So: ".into());
        assert_eq!(actions(found, &tokens, "So: "), [Action::Rewind(4), ban.clone(), inject]);
        assert_eq!(actions(found, &tokens, ""), [Action::Rewind(4), ban]);
    }

    #[test]
    fn the_first_token_of_a_repeat_is_banned_only_if_known() {
        let near = LoopReport { period: 2, repeats: 3, exact: false };
        assert_eq!(actions(near, &[8, 9, 8, 9, 8, 9], ""), [Action::Rewind(4)]);
        let long = LoopReport { period: 1000, repeats: 3, exact: true };
        assert_eq!(actions(long, &[7; 1024], ""), [Action::Rewind(2000)]);
    }
}
