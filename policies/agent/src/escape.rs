//! The way out of a loop in a thought: back to where its block stood once, then words that lead on.
//!
//! Greedy decoding would write the block again from there, so the text goes in, and the token that
//! began the repeat is not drawn next. The thought keeps what it had found out, which a thought that
//! is closed at once, with two thirds of it repeats, does not put to use.

use steersman_policy::{Action, Ban, LoopReport};

/// What ends a loop. `tokens`: the newest of the thought, at least the repeats where they are to be
/// banned from; `text`: what stands in place of the repeats, may be empty.
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
    fn one_block_is_left_of_a_loop_and_its_first_token_is_not_drawn_again() {
        let found = LoopReport { period: 2, repeats: 3, exact: true };
        let tokens = [1, 8, 9, 8, 9, 8, 9];
        let ban = Action::Ban(Ban { tokens: vec![8], steps: 1 });
        let inject = Action::Inject("So: ".into());
        assert_eq!(actions(found, &tokens, "So: "), [Action::Rewind(4), ban.clone(), inject]);
        assert_eq!(actions(found, &tokens, ""), [Action::Rewind(4), ban]);
    }

    #[test]
    fn what_began_a_repeat_is_banned_only_where_it_is_known() {
        let near = LoopReport { period: 2, repeats: 3, exact: false };
        assert_eq!(actions(near, &[8, 9, 8, 9, 8, 9], ""), [Action::Rewind(4)]);
        let long = LoopReport { period: 1000, repeats: 3, exact: true };
        assert_eq!(actions(long, &[7; 1024], ""), [Action::Rewind(2000)]);
    }
}
