//! Stop strings: cuts a text before the first of them, however the text arrives in pieces.
//!
//! Held back is the shortest end of the text that may still become a stop string, nothing more.
//! The cut does not depend on how the text was cut into pieces: the stop string that is complete
//! first wins, and among those that are complete at the same letter the one that began first.
//! Never looks at tokens or phases: `reply` feeds it the answer alone.

/// Watches one text.
#[derive(Debug, Clone, Default)]
pub(super) struct Stop {
    strings: Vec<String>,
    held: String,
    found: bool,
}

impl Stop {
    /// Watches for `strings`; empty ones never match.
    pub fn new(strings: &[String]) -> Self {
        let strings = strings.iter().filter(|text| !text.is_empty()).cloned().collect();
        Self { strings, ..Self::default() }
    }

    /// Whether a stop string was found: all text after it is swallowed.
    pub fn found(&self) -> bool {
        self.found
    }

    /// What is held back.
    pub fn held(&self) -> &str {
        &self.held
    }

    /// Adds text; returns what can be given out.
    pub fn push(&mut self, text: &str) -> String {
        if self.found {
            return String::new();
        }
        let mut text = std::mem::take(&mut self.held) + text;
        let ends = |stop: &String| text.find(stop.as_str()).map(|at| (at + stop.len(), at));
        if let Some((_, start)) = self.strings.iter().filter_map(ends).min() {
            self.found = true;
            text.truncate(start);
            return text;
        }
        let open = self.strings.iter().map(|stop| partial(&text, stop)).max().unwrap_or(0);
        self.held = text.split_off(text.len() - open);
        text
    }

    /// The text ends here: what is held back is given out.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` with which `stop` begins, `stop` as a whole left out.
pub(super) fn partial(text: &str, stop: &str) -> usize {
    let lengths = stop.char_indices().map(|(at, _)| at).rev();
    lengths.into_iter().find(|at| text.as_bytes().ends_with(&stop.as_bytes()[..*at])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes of `pieces` with `stops`, and whether it was stopped.
    fn check(stops: &[&str], pieces: &[&str], shown: &[&str], found: bool) {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let mut stop = Stop::new(&stops);
        let mut told: Vec<String> = pieces.iter().map(|piece| stop.push(piece)).collect();
        told.push(stop.flush());
        assert_eq!((told, stop.found()), (shown.iter().map(|s| s.to_string()).collect(), found));
    }

    #[test]
    fn a_stop_string_across_pieces_is_cut() {
        check(&["END"], &["Hi E", "N", "D there", "!"], &["Hi ", "", "", "", ""], true);
    }

    #[test]
    fn no_more_is_held_back_than_may_become_a_stop_string() {
        check(&["\n\nUser:"], &["a\n", "b\n\nU", "ser"], &["a", "\nb", "", "\n\nUser"], false);
    }

    #[test]
    fn the_stop_string_that_is_complete_first_wins_however_the_text_arrives() {
        check(&["abcd", "bc"], &["xabcdx"], &["xa", ""], true);
        check(
            &["abcd", "bc"],
            &["x", "a", "b", "c", "d", "x"],
            &["x", "", "", "a", "", "", ""],
            true,
        );
        check(&["c", "abc"], &["abc"], &["", ""], true);
    }

    #[test]
    fn letters_of_several_bytes_are_never_torn() {
        check(&["é!", "日本"], &["caf", "é", "?日", "曜"], &["caf", "", "é?", "日曜", ""], false);
    }

    #[test]
    fn without_stop_strings_nothing_is_held_back() {
        check(&["", ""], &["a", "b"], &["a", "b", ""], false);
    }
}
