//! Stop strings: cuts a text before the first of them.
//!
//! Only the longest end of the text that may still become a stop string is held back.
//! The cut does not depend on how the text is split into pieces: the stop string that is complete
//! first wins; of those that end at the same character, the one that began first.
//! Knows nothing of tokens or phases: `reply` passes the answer only.

#[derive(Debug, Clone, Default)]
pub(super) struct Stop {
    strings: Vec<String>,
    held: String,
    /// Index into `strings`.
    found: Option<usize>,
}

impl Stop {
    /// Empty strings never match.
    pub fn new(strings: &[String]) -> Self {
        let strings = strings.iter().filter(|text| !text.is_empty()).cloned().collect();
        Self { strings, ..Self::default() }
    }

    /// The stop string that was found; later text is dropped.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|index| self.strings[index].as_str())
    }

    /// The text held back.
    pub fn held(&self) -> &str {
        &self.held
    }

    /// Adds text; returns the text to emit.
    pub fn push(&mut self, text: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        let mut text = std::mem::take(&mut self.held) + text;
        let ends = |(index, stop): (usize, &String)| {
            text.find(stop.as_str()).map(|at| (at + stop.len(), at, index))
        };
        if let Some((_, start, index)) = self.strings.iter().enumerate().filter_map(ends).min() {
            self.found = Some(index);
            text.truncate(start);
            return text;
        }
        let open = self.strings.iter().map(|stop| partial(&text, stop)).max().unwrap_or(0);
        self.held = text.split_off(text.len() - open);
        text
    }

    /// Ends the text; returns the text held back.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that is a proper prefix of `stop`.
pub(super) fn partial(text: &str, stop: &str) -> usize {
    let lengths = stop.char_indices().map(|(at, _)| at).rev();
    lengths.into_iter().find(|at| text.as_bytes().ends_with(&stop.as_bytes()[..*at])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(stops: &[&str], pieces: &[&str], emitted: &[&str], found: bool) {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let mut stop = Stop::new(&stops);
        let mut got: Vec<String> = pieces.iter().map(|piece| stop.push(piece)).collect();
        got.push(stop.flush());
        assert_eq!(
            (got, stop.found().is_some()),
            (emitted.iter().map(|s| s.to_string()).collect(), found)
        );
    }

    #[test]
    fn stop_string_across_pieces_is_cut() {
        check(&["END"], &["Hi E", "N", "D there", "!"], &["Hi ", "", "", "", ""], true);
    }

    #[test]
    fn only_a_possible_stop_string_is_held_back() {
        check(&["\n\nUser:"], &["a\n", "b\n\nU", "ser"], &["a", "\nb", "", "\n\nUser"], false);
    }

    #[test]
    fn first_complete_stop_string_wins_for_any_pieces() {
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
    fn multibyte_characters_stay_whole() {
        check(&["é!", "日本"], &["caf", "é", "?日", "曜"], &["caf", "", "é?", "日曜", ""], false);
    }

    #[test]
    fn without_stop_strings_nothing_is_held_back() {
        check(&["", ""], &["a", "b"], &["a", "b", ""], false);
    }
}
