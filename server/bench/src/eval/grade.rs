//! Graders: rules that say whether an answer is right, and otherwise what is wrong with it.

use serde_json::Value;

use crate::scenario::{Verdict, excerpt};

/// Words by which an answer says that it cannot know.
const UNKNOWN: &[&str] = &[
    "unknown",
    "not stated",
    "not mentioned",
    "does not say",
    "doesn't say",
    "not say",
    "not given",
    "cannot be",
    "can't be",
    "not known",
    "no information",
    "not provided",
    "cannot determine",
    "not specified",
    "does not mention",
    "doesn't mention",
];

/// Right if the last number of the answer is the expected one.
pub fn last_number(answer: &str, expected: i64) -> Verdict {
    match numbers(answer).last() {
        Some(found) if *found == expected as f64 => Ok(()),
        Some(found) => Err(format!("the last number is {found} instead of {expected}")),
        None => Err(format!("no number, but {}", excerpt(answer))),
    }
}

/// All numbers of a text; commas group thousands, and a dot before digits begins decimals.
pub fn numbers(text: &str) -> Vec<f64> {
    let chars: Vec<char> = text.chars().collect();
    let is_digit = |at: usize| chars.get(at).is_some_and(char::is_ascii_digit);
    let mut found = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        if !is_digit(at) {
            at += 1;
            continue;
        }
        let before = at.checked_sub(1).map(|at| chars[at]);
        let two_before = at.checked_sub(2).map(|at| chars[at]);
        // `7-4` has no negative number.
        let is_negative = before.is_some_and(|c| c == '-' || c == '\u{2212}')
            && !two_before.is_some_and(|c| c.is_alphanumeric());
        let mut digits = String::new();
        while is_digit(at) {
            digits.push(chars[at]);
            at += 1;
            let is_group = chars.get(at) == Some(&',')
                && (1..=3).all(|more| is_digit(at + more))
                && !is_digit(at + 4);
            let is_decimal =
                chars.get(at) == Some(&'.') && is_digit(at + 1) && !digits.contains('.');
            if is_group {
                at += 1;
            } else if is_decimal {
                digits.push('.');
                at += 1;
            }
        }
        let number: f64 = digits.parse().expect("digits with at most one dot are a number");
        found.push(if is_negative { -number } else { number });
    }
    found
}

/// The contents of the first fenced block of an answer, or the whole answer.
pub fn block(answer: &str) -> &str {
    let Some((_, rest)) = answer.split_once("```") else { return answer.trim() };
    // The first line is the name of the language.
    let body = rest.split_once('\n').map_or(rest, |(_, body)| body);
    body.split("```").next().unwrap_or(body).trim()
}

/// Right if the answer's JSON equals the expected one. Numbers may be strings: that is the schema's
/// business, not the extraction's.
pub fn json(answer: &str, expected: &Value) -> Verdict {
    let text = block(answer);
    let begin = text.find(['[', '{']).unwrap_or(0);
    let end = text.rfind([']', '}']).map_or(text.len(), |end| end + 1);
    let text = text.get(begin..end).unwrap_or(text);
    let found: Value = serde_json::from_str(text)
        .map_err(|error| format!("is not JSON ({error}): {}", excerpt(answer)))?;
    if plain(&found) == plain(expected) {
        Ok(())
    } else {
        Err(format!("{found} instead of {expected}"))
    }
}

/// JSON with numbers as strings and keys in order.
fn plain(value: &Value) -> Value {
    match value {
        Value::Number(number) => Value::String(number.to_string()),
        Value::Array(list) => list.iter().map(plain).collect(),
        Value::Object(map) => {
            let mut pairs: Vec<_> =
                map.iter().map(|(key, value)| (key.clone(), plain(value))).collect();
            pairs.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(pairs.into_iter().collect())
        }
        other => other.clone(),
    }
}

/// Lower case words without punctuation, with single spaces.
pub fn normal(text: &str) -> String {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_lowercase).collect::<Vec<_>>().join(" ")
}

/// Right if the answer has a phrase, whatever its case and punctuation.
pub fn phrase(answer: &str, expected: &str) -> Verdict {
    let found = format!(" {} ", normal(answer)).contains(&format!(" {} ", normal(expected)));
    found.then_some(()).ok_or_else(|| format!("lacks {expected:?}: {}", excerpt(answer)))
}

/// Right if the answer is exactly a text, apart from space at its ends and, if `is_loose`, from case
/// and punctuation.
pub fn exactly(answer: &str, expected: &str, is_loose: bool) -> Verdict {
    let equal = match is_loose {
        true => normal(answer) == normal(expected),
        false => answer.trim() == expected,
    };
    equal.then_some(()).ok_or_else(|| format!("{} instead of {expected:?}", excerpt(answer)))
}

/// Right if the candidate that the answer mentions last is the expected one.
pub fn last_of(answer: &str, candidates: &[&str], expected: &str) -> Verdict {
    let answer_words = normal(answer);
    let words: Vec<&str> = answer_words.split(' ').collect();
    let is_candidate = |word: &&&str| candidates.iter().any(|one| one.to_lowercase() == ***word);
    match words.iter().rev().find(|word| is_candidate(word)) {
        Some(word) if **word == expected.to_lowercase() => Ok(()),
        Some(word) => Err(format!("the last one named is {word} instead of {expected}")),
        None => Err(format!("names none of them: {}", excerpt(answer))),
    }
}

/// Right if a summary has all facts, at most so many words, and no number that the text lacks.
pub fn summary(answer: &str, text: &str, facts: &[String], most_words: usize) -> Verdict {
    for fact in facts {
        phrase(answer, fact)?;
    }
    let count = answer.split_whitespace().count();
    if count > most_words {
        return Err(format!("{count} words instead of at most {most_words}"));
    }
    let known = numbers(text);
    match numbers(answer).into_iter().find(|number| !known.contains(number)) {
        Some(number) => Err(format!("the number {number} is not in the text")),
        None => Ok(()),
    }
}

/// Right if the answer says that it cannot know, or if there is something to know, has it and none of
/// `candidates` besides.
pub fn known_or_not(answer: &str, expected: Option<&str>, candidates: &[String]) -> Verdict {
    let lower = answer.to_lowercase();
    let refuses = UNKNOWN.iter().any(|words| lower.contains(words));
    match expected {
        None if refuses => Ok(()),
        None => Err(format!("answers what the text does not say: {}", excerpt(answer))),
        Some(fact) if refuses => Err(format!("says that it does not know {fact}")),
        Some(fact) => {
            phrase(answer, fact)?;
            let other = |one: &&String| one.as_str() != fact && phrase(answer, one).is_ok();
            match candidates.iter().find(other) {
                Some(other) => Err(format!("names {other} beside {fact}: {}", excerpt(answer))),
                None => Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_read_as_people_write_them() {
        assert_eq!(numbers("12 + 3 = 15."), [12.0, 3.0, 15.0]);
        assert_eq!(numbers("about 1,234,567.5 or -3, 7-4"), [1_234_567.5, -3.0, 7.0, 4.0]);
        assert_eq!(numbers("1, 2,30"), [1.0, 2.0, 30.0]);
        assert!(numbers("none").is_empty());
        assert_eq!(last_number("12 + 3 = 15.", 15), Ok(()));
        assert!(last_number("15 or 16", 15).is_err() && last_number("fifteen", 15).is_err());
    }

    #[test]
    fn blocks_lose_their_fences() {
        assert_eq!(block("Here:\n```python\nx = 1\n```\nDone."), "x = 1");
        assert_eq!(block("```\nx\n"), "x");
        assert_eq!(block(" plain "), "plain");
    }

    #[test]
    fn json_is_compared_by_value() {
        let expected = json!([{"name": "Anna", "age": 30}]);
        for right in [
            "```json\n[{\"age\": 30, \"name\": \"Anna\"}]\n```",
            "The list: [{\"name\": \"Anna\", \"age\": \"30\"}].",
        ] {
            assert_eq!(json(right, &expected), Ok(()));
        }
        for wrong in
            ["[{\"name\": \"Anna\"}]", "[]", "Anna is 30", "[{\"name\": \"Anna\", \"age\": 31}]"]
        {
            assert!(json(wrong, &expected).is_err(), "{wrong}");
        }
    }

    #[test]
    fn phrases_are_whole_words() {
        assert_eq!(phrase("It is: La Maison  Rouge!", "la maison rouge"), Ok(()));
        assert!(phrase("la maison rougeaude", "la maison rouge").is_err());
    }

    #[test]
    fn exact_answers_allow_only_what_they_say() {
        assert_eq!(exactly(" fox, owl ", "fox, owl", false), Ok(()));
        assert!(exactly("Fox, owl", "fox, owl", false).is_err());
        assert_eq!(exactly("Fox owl.", "fox, owl", true), Ok(()));
        assert!(exactly("owl, fox", "fox, owl", true).is_err());
    }

    #[test]
    fn the_last_candidate_counts() {
        let candidates = ["Rome", "Oslo"];
        assert_eq!(last_of("Not Rome, but Oslo.", &candidates, "Oslo"), Ok(()));
        assert!(last_of("Oslo, or rather Rome", &candidates, "Oslo").is_err());
        assert!(last_of("Paris", &candidates, "Oslo").is_err());
    }

    #[test]
    fn a_summary_needs_its_facts_and_may_invent_no_number() {
        let text = "Anna opened a shop in Oslo in 1998. It rained.";
        let facts = ["Anna", "Oslo", "1998"].map(str::to_owned);
        assert_eq!(summary("In 1998 Anna opened a shop in Oslo.", text, &facts, 10), Ok(()));
        assert!(summary("Anna opened a shop in Oslo.", text, &facts, 10).is_err());
        assert!(
            summary("In 1998 Anna opened 3 shops in Oslo.", text, &facts, 10)
                .unwrap_err()
                .contains('3')
        );
        assert!(summary(text, text, &facts, 5).unwrap_err().contains("at most 5"));
    }

    #[test]
    fn not_knowing_is_right_only_where_nothing_can_be_known() {
        let ages = ["30", "45"].map(str::to_owned);
        let check = |answer: &str, expected| known_or_not(answer, expected, &ages);
        assert_eq!(check("Unknown.", None), Ok(()));
        assert_eq!(check("The text does not say how old she is.", None), Ok(()));
        assert!(check("Anna is 30.", None).is_err());
        assert_eq!(check("Anna is 30.", Some("30")), Ok(()));
        assert!(check("That is unknown.", Some("30")).is_err());
        assert!(check("Anna is 31.", Some("30")).is_err());
        assert!(check("Anna is 30 or 45.", Some("30")).is_err());
    }
}
