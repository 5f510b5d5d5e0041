use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;

/// The thresholds of the default policy.
const RULE: LoopRule = LoopRule { max_period: 1024, repeats: 3, min_tokens: 96, similarity: 0.87 };

/// Splits text into words and runs of punctuation with the space before them, and single digits:
/// close to byte-pair encodings of English and code.
fn tokens(text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let spaces = rest.len() - rest.trim_start_matches(' ').len();
        let visible = &rest[spaces..];
        let until = |end: fn(char) -> bool| visible.find(end).unwrap_or(visible.len());
        let length = match visible.chars().next() {
            Some(c) if c.is_alphabetic() => until(|c| !c.is_alphabetic()),
            Some(c) if c.is_ascii_punctuation() => until(|c| !c.is_ascii_punctuation()),
            first => first.map_or(0, char::len_utf8),
        };
        let (token, tail) = rest.split_at(spaces + length);
        let mut hasher = DefaultHasher::new();
        token.hash(&mut hasher);
        tokens.push((hasher.finish() as u32) >> 1);
        rest = tail;
    }
    tokens
}

/// A small deterministic random stream.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }
}

const NAMES: &[&str] = &["Anna", "Boris", "Clara", "David", "Elena", "Farid", "Grace", "Hugo"];
const CITIES: &[&str] = &["Rome", "Paris", "Oslo", "Cairo", "Lima", "Tokyo", "Delhi", "Quito"];
const PLACES: &[&str] = &["forest", "river", "harbour", "village", "mountain", "meadow"];
const DEEDS: &[&str] = &["walked", "slept", "sang near", "looked at", "travelled to", "painted"];

fn prose(random: &mut Random, sentences: usize) -> String {
    let mut text = String::new();
    for _ in 0..sentences {
        let (name, deed, place) = (random.pick(NAMES), random.pick(DEEDS), random.pick(PLACES));
        text += &match random.below(3) {
            0 => format!("{name} {deed} the {place}. "),
            1 => format!("One day {name} found {} coins in the {place}. ", random.below(90)),
            _ => format!("In the evening, {} {deed} the old {place} again. ", random.pick(NAMES)),
        };
    }
    text
}

/// The first report in a text, and the number of tokens read by then.
fn first(rule: LoopRule, text: &str) -> Option<(usize, LoopReport)> {
    let mut detector = Detector::new(rule);
    tokens(text).into_iter().enumerate().find_map(|(i, t)| Some((i + 1, detector.push(t)?)))
}

fn attempts(from: usize, to: usize) -> String {
    let attempt = |i| {
        format!(
            "Attempt {i}: suppose Anna is the tallest, but then I should check pair {} again. ",
            i + 1
        )
    };
    (from..to).map(attempt).collect()
}

#[test]
fn exact_loops_of_any_period_are_found_when_their_repeats_are_complete() {
    let mut random = Random(1);
    for period in 1..=300 {
        let block: Vec<u32> = (0..period).map(|_| random.below(100_000) as u32).collect();
        let prefix = tokens(&prose(&mut random, 20));
        let mut detector = Detector::new(RULE);
        assert!(prefix.iter().all(|&token| detector.push(token).is_none()));
        let stream = block.iter().cycle().take(2000);
        let found = stream.enumerate().find_map(|(i, &t)| Some((i + 1, detector.push(t)?)));
        let (after, report) = found.expect("a loop of 2,000 tokens");
        assert!(after <= (3 * period).max(96), "period {period} found after {after} tokens");
        assert_eq!((report.period as usize, report.exact), (period, true));
        assert!(report.repeats >= 3);
    }
}

#[test]
fn loops_of_the_demonstration_model_are_found() {
    let short = "Wait, let me re-check the list again. ".repeat(40);
    let long =
        "Let me think about the query on items again. The filter uses price, so the planner \
        reads every row of items and compares price with the constant. An index on price could \
        help, but it also costs space and slows writes, so I should weigh both sides before I \
        decide anything about items. "
            .repeat(8);
    let cases = [(short, true, 108), (long, true, 3 * 61), (attempts(1, 40), false, 216)];
    for (text, exact, within) in cases {
        let (after, report) = first(RULE, &text).expect("a loop");
        println!("found after {after} tokens: {report:?}");
        assert_eq!(report.exact, exact);
        assert!(after <= within, "{after} tokens, {report:?}");
    }
}

#[test]
fn counter_that_grows_by_a_digit_does_not_hide_a_near_repeat() {
    for from in [1, 5, 8, 95, 98, 994] {
        let (after, report) = first(RULE, &attempts(from, from + 30)).expect("a loop");
        assert!(!report.exact && after <= 300, "from {from}: {after} tokens, {report:?}");
    }
    // One token more or fewer in every block.
    let mut random = Random(2);
    let values = ["4", "17", "250", "31", "9", "128"];
    let block = |value: &str| {
        format!(
            "Hmm, the value {value} looks wrong, so I will read the whole table once more and \
            count the rows by hand. "
        )
    };
    let text: String = (0..30).map(|_| block(random.pick(&values))).collect();
    let (after, report) = first(RULE, &text).expect("a loop");
    assert!(!report.exact && after <= 240, "{after} tokens, {report:?}");
}

#[test]
fn ordinary_text_is_not_a_loop() {
    let mut random = Random(3);
    for _ in 0..50 {
        let story = prose(&mut random, 60);
        let mut record = |i| {
            let (name, city) = (random.pick(NAMES), random.pick(CITIES));
            let age = 18 + random.below(70);
            match i {
                0 => format!("{{\"name\": \"{name}\", \"age\": {age}, \"city\": \"{city}\"}}, "),
                1 => format!("| {name} | {age} | {city} |\n"),
                2 => format!("    total += prices[\"{name}\"] * {age}\n    print(total)\n"),
                3 => format!("{age} + {} = {}. ", 30 + age, 30 + 2 * age),
                _ => format!("- **{name}** ({city}): {age} years old\n"),
            }
        };
        let texts: Vec<String> =
            (0..5).map(|kind| (0..40).map(|_| record(kind)).collect()).collect();
        for text in texts.iter().chain([&story]) {
            assert_eq!(first(RULE, text), None, "{text}");
        }
    }
    for text in ["ha ".repeat(90), format!("| {}|", "--- | ".repeat(20)), "return x\n".repeat(20)] {
        assert_eq!(first(RULE, &text), None, "{text}");
    }
}

#[test]
fn loop_is_reported_again_while_it_lasts() {
    let mut random = Random(4);
    let mut detector = Detector::new(RULE);
    let mut repeats = |text: &str| -> Vec<u32> {
        let found = tokens(text).into_iter().filter_map(|token| detector.push(token));
        found.map(|report| report.repeats).collect()
    };
    // 600 tokens, six per repeat: a report after every 96.
    assert_eq!(repeats(&" Wait, let me see.".repeat(100)), [16, 32, 48, 64, 80, 96]);
    assert!(repeats(&prose(&mut random, 60)).is_empty());
}

#[test]
fn reset_detector_equals_new_detector() {
    let mut used = Detector::new(RULE);
    for token in tokens(&attempts(1, 60)) {
        used.push(token);
    }
    used.reset();
    let mut new = Detector::new(RULE);
    for token in tokens(&attempts(3, 60)) {
        assert_eq!(used.push(token), new.push(token));
    }
}

#[test]
fn similarity_of_one_finds_exact_loops_only() {
    let rule = LoopRule { similarity: 1.0, ..RULE };
    assert_eq!(first(rule, &attempts(1, 60)), None);
    assert!(first(rule, &"Wait, let me see. ".repeat(40)).is_some());
}

#[test]
fn thresholds_are_clamped_and_memory_is_bounded() {
    let all = [0, 1, 2, 70_000, u32::MAX];
    for (max_period, repeats, min_tokens) in
        all.iter().flat_map(|&p| all.iter().flat_map(move |&r| all.map(|m| (p, r, m))))
    {
        for similarity in [f32::NAN, f32::NEG_INFINITY, -1.0, 0.0, 0.5, 0.99999, 7.0] {
            let mut detector =
                Detector::new(LoopRule { max_period, repeats, min_tokens, similarity });
            for i in 0..20 {
                detector.push(i % 2);
            }
            assert!(detector.tokens.capacity() <= 2 * HISTORY);
        }
    }
    // Longer than LENGTH_MOST.
    let mut detector = Detector::new(RULE);
    for i in 0..200_000u32 {
        detector.push(i % 7);
    }
    assert!(detector.tokens.capacity() <= 2 * HISTORY);
}
