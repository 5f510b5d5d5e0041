//! Stop strings: cuts a text before the first of them.
//!
//! Only the longest end of the text that may still become a stop string is held back.
//! The cut does not depend on how the text is split into pieces: the stop string that is complete
//! first wins; of those that end at the same character, the one that began first.
//! Each stop string is searched for with an automaton (Knuth, Morris, Pratt 1977): a byte of text costs a few
//! steps, however long the stop strings are. The crate `aho-corasick` does not say how much of a pattern the end
//! of a text may become, which is what is held back.
//! Knows nothing of tokens or phases: `reply` passes the answer only.

use std::sync::Arc;

#[derive(Debug, Clone, Default)]
pub(super) struct Stop {
    /// Shared by the copies of a reply.
    patterns: Arc<[Pattern]>,
    /// How many bytes of each pattern the text ends with.
    matched: Vec<usize>,
    held: String,
    /// Index into `patterns`.
    found: Option<usize>,
}

/// A stop string.
#[derive(Debug)]
struct Pattern {
    text: String,
    /// At `n`, the length of the longest proper end of the first `n + 1` bytes that the text begins with.
    fallback: Vec<u32>,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let mut pattern = Self { text: text.into(), fallback: Vec::with_capacity(text.len()) };
        let mut matched = 0;
        for (at, &byte) in text.as_bytes().iter().enumerate() {
            matched = if at == 0 { 0 } else { pattern.step(matched, byte) };
            // Cast: a request has less than 4 GiB.
            pattern.fallback.push(matched as u32);
        }
        pattern
    }

    /// The bytes matched after `byte`, of which `matched` were before it: less than all of them.
    fn step(&self, mut matched: usize, byte: u8) -> usize {
        let bytes = self.text.as_bytes();
        while matched > 0 && bytes[matched] != byte {
            matched = self.fallback[matched - 1] as usize;
        }
        matched + usize::from(bytes[matched] == byte)
    }
}

impl Stop {
    /// Empty strings never match.
    pub fn new(strings: &[String]) -> Self {
        let strings = strings.iter().filter(|text| !text.is_empty());
        let patterns: Arc<[Pattern]> = strings.map(|text| Pattern::new(text)).collect();
        Self { matched: vec![0; patterns.len()], patterns, ..Self::default() }
    }

    /// The stop string that was found; later text is dropped.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|index| self.patterns[index].text.as_str())
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
        let before = self.held.len();
        let mut all = std::mem::take(&mut self.held) + text;
        for (at, byte) in text.bytes().enumerate() {
            let steps = self.patterns.iter().zip(&mut self.matched);
            steps.for_each(|(pattern, matched)| *matched = pattern.step(*matched, byte));
            let is_complete = |&i: &usize| self.matched[i] == self.patterns[i].text.len();
            let complete = (0..self.patterns.len()).rev().filter(is_complete);
            if let Some(index) = complete.max_by_key(|&i| self.patterns[i].text.len()) {
                self.found = Some(index);
                all.truncate(before + at + 1 - self.patterns[index].text.len());
                return all;
            }
        }
        // At the end of a character, so is the end of what is matched.
        let open = self.matched.iter().max().copied().unwrap_or(0);
        self.held = all.split_off(all.len() - open);
        all
    }

    /// Ends the text; returns the text held back.
    pub fn flush(&mut self) -> String {
        self.matched.fill(0);
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

    /// Random texts over two letters, in pieces of any length: as a search of the whole text finds it.
    #[test]
    fn the_cut_is_that_of_a_search_in_the_whole_text() {
        let mut random = steersman_test_support::Random(21);
        let mut word = |most: usize| -> String {
            let length = 1 + random.below(most);
            (0..length).map(|_| ["a", "b", "é"][random.below(3)]).collect()
        };
        for _ in 0..2000 {
            let stops: Vec<String> = (0..3).map(|_| word(5)).collect();
            let pieces: Vec<String> = (0..6).map(|_| word(4)).collect();
            let text = pieces.concat();
            let ends = stops.iter().filter_map(|stop| {
                let at = text.find(stop)?;
                Some((at + stop.len(), at, stop))
            });
            let cut = ends.min();
            let mut matcher = Stop::new(&stops);
            let mut got = String::new();
            for (i, piece) in pieces.iter().enumerate() {
                got += &matcher.push(piece);
                let seen = pieces[..=i].concat();
                let open = stops.iter().map(|stop| partial(&seen, stop)).max().unwrap();
                if matcher.found().is_none() {
                    assert_eq!(matcher.held(), &seen[seen.len() - open..], "{stops:?} {seen}");
                }
            }
            got += &matcher.flush();
            assert_eq!(matcher.found(), cut.map(|(_, _, stop)| stop.as_str()), "{stops:?} {text}");
            assert_eq!(got, text[..cut.map_or(text.len(), |(_, at, _)| at)], "{stops:?} {text}");
        }
    }

    /// A4: each piece walked every stop string from its end: 16 of 900 kB took 65 times the time of a step, for all
    /// requests. Now a byte takes at most as many steps as there are bytes before it, whatever a stop string has.
    #[test]
    fn a_long_stop_string_costs_no_more_than_a_short_one() {
        let long = "ab".repeat(2000) + "c";
        let mut matcher = Stop::new(std::slice::from_ref(&long));
        let copy = matcher.clone();
        assert!(Arc::ptr_eq(&matcher.patterns, &copy.patterns), "copies share the stop strings");
        for _ in 0..3 {
            assert_eq!(matcher.push("xab"), "x");
            assert_eq!((matcher.held(), matcher.matched[0]), ("ab", 2));
            assert_eq!(matcher.push("x"), "abx");
        }
        assert_eq!(matcher.push(&long), "");
        assert_eq!(matcher.found(), Some(long.as_str()));
    }

    #[test]
    fn without_stop_strings_nothing_is_held_back() {
        check(&["", ""], &["a", "b"], &["a", "b", ""], false);
    }
}
