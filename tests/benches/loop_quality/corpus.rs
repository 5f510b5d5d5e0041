//! Labelled texts: reasoning that never ends, in six ways, and long reasoning and answers that do.
//!
//! Texts are made by rules from a seed. The recorded ones are in `recorded.jsonl`, written by
//! `tests/fixtures/loops.py` from the bundled model.

use serde_json::Value;
use steersman_test_support::Random;

/// A labelled text.
pub struct Sample {
    pub kind: &'static str,
    pub text: String,
    /// Byte at which a loop begins to repeat itself; `None` for text that is no loop.
    pub onset: Option<usize>,
}

/// Characters of the longest text.
const LONGEST: usize = 16_000;

type Rule = fn(&mut Random) -> Sample;

/// Every kind of loop, and of text without one.
const KINDS: &[Rule] = &[
    exact,
    near,
    growing,
    alternating,
    rederived,
    drifting,
    story,
    cases,
    arithmetic,
    revisited,
    drafts,
    checklist,
    verses,
    records,
    table,
    listing,
    documents,
];

/// `count` texts of each kind, and the recorded ones.
pub fn corpus(count: usize, seed: u64) -> Vec<Sample> {
    let mut samples = recorded();
    for (number, rule) in KINDS.iter().enumerate() {
        let mut random = Random(seed.wrapping_mul(1009) + number as u64);
        samples.extend((0..count).map(|_| rule(&mut random)));
    }
    samples
}

fn recorded() -> Vec<Sample> {
    let sample = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("a line of JSON");
        let onset = line["onset"].as_u64().map(|onset| onset as usize);
        let text = line["text"].as_str().expect("has a text").to_owned();
        let kind = if onset.is_some() { "recorded loop" } else { "recorded" };
        Sample { kind, text, onset }
    };
    include_str!("recorded.jsonl").lines().map(sample).collect()
}

const NAMES: &[&str] = &[
    "Anna", "Boris", "Clara", "David", "Elena", "Farid", "Grace", "Hugo", "Irene", "Jonas",
    "Karin", "Liam", "Maria", "Nora", "Oscar", "Paula", "Quinn", "Rosa", "Simon", "Tara",
];
const PLACES: &[&str] = &[
    "forest", "river", "harbour", "village", "mountain", "meadow", "castle", "bridge", "garden",
    "market", "station", "library", "factory", "island", "valley", "museum",
];
const THINGS: &[&str] = &[
    "lamp", "chair", "ladder", "book", "rope", "tent", "boot", "map", "bell", "coin", "engine",
    "bottle", "letter", "mirror", "wheel", "basket",
];
const ADJECTIVES: &[&str] = &[
    "quiet", "old", "bright", "small", "brave", "tired", "clever", "gentle", "heavy", "narrow",
    "empty", "broken", "golden", "cheap", "strange", "sudden",
];
const VERBS: &[&str] = &[
    "carried",
    "found",
    "lost",
    "painted",
    "sold",
    "repaired",
    "hid",
    "measured",
    "forgot",
    "bought",
    "described",
    "moved",
    "counted",
    "dropped",
    "cleaned",
    "opened",
];
const TIMES: &[&str] = &[
    "In the evening",
    "After lunch",
    "Before dawn",
    "On Monday",
    "Much later",
    "In the same week",
    "Without a word",
    "During the storm",
    "As planned",
    "To everyone's surprise",
];
/// Beginnings of a step that goes back.
const AGAIN: &[&str] = &[
    "Wait, let me check that again.",
    "Hmm, I should verify this once more.",
    "Let me think about it again.",
    "But is that right?",
    "Actually, let me start over.",
    "Let me reconsider.",
];

fn number(random: &mut Random) -> usize {
    2 + random.below(98)
}

fn sentence(random: &mut Random) -> String {
    let (name, other) = (random.of(NAMES), random.of(NAMES));
    let (verb, adjective) = (random.of(VERBS), random.of(ADJECTIVES));
    let (thing, place) = (random.of(THINGS), random.of(PLACES));
    match random.below(8) {
        0 => format!("{name} {verb} the {adjective} {thing} near the {place}."),
        1 => format!("{}, {other} {verb} a {thing} and went to the {place}.", random.of(TIMES)),
        2 => format!(
            "There were {} {thing}s in the {adjective} {place}, so {name} waited.",
            number(random)
        ),
        3 => format!("The {place} is {adjective}, which {name} and {other} had not expected."),
        4 => format!("If {name} {verb} the {thing}, then {other} must have seen the {place}."),
        5 => format!("{other} asked why the {thing} cost {} coins.", number(random)),
        6 => {
            format!("A {adjective} {thing} lay between the {place} and the {}.", random.of(PLACES))
        }
        _ => format!("{}, nobody {verb} anything from the {adjective} {place}.", random.of(TIMES)),
    }
}

fn sentences(random: &mut Random, count: usize) -> String {
    (0..count).map(|_| sentence(random) + " ").collect()
}

/// From `least` to `most` sentences.
fn sentences_of(random: &mut Random, least: usize, most: usize) -> String {
    let count = least + random.below(most - least + 1);
    sentences(random, count)
}

/// A loop: `count` ordinary sentences, then what `next` writes for each round until the text is long.
fn endless(
    random: &mut Random,
    kind: &'static str,
    mut next: impl FnMut(&mut Random, usize) -> String,
) -> Sample {
    let mut text = sentences_of(random, 0, 24);
    text += &next(random, 0);
    let onset = text.len();
    for round in 1.. {
        if text.len() > LONGEST {
            break;
        }
        text += &next(random, round);
    }
    Sample { kind, text, onset: Some(onset) }
}

/// The same block again and again.
fn exact(random: &mut Random) -> Sample {
    let block = format!("{} {}", random.of(AGAIN), sentences_of(random, 1, 16));
    endless(random, "exact", |_, _| block.clone())
}

/// A block with numbers and a name that change.
fn near(random: &mut Random) -> Sample {
    let (place, thing, adjective) = (random.of(PLACES), random.of(THINGS), random.of(ADJECTIVES));
    let rest = sentences_of(random, 0, 3);
    let names = random.below(2) == 0;
    let mut fixed = random.of(NAMES);
    endless(random, "near-repeat", |random, round| {
        if names {
            fixed = random.of(NAMES);
        }
        format!(
            "Attempt {}: suppose {fixed} has the {adjective} {thing} from the {place}, but then I should check \
             pair {} again, because it may be wrong. {rest}",
            round + 1,
            round + 2,
        )
    })
}

/// Each round begins at the beginning and comes one sentence further.
fn growing(random: &mut Random) -> Sample {
    let mut list: Vec<String> = (0..1 + random.below(3)).map(|_| sentence(random)).collect();
    let again = random.of(AGAIN);
    endless(random, "growing", |random, _| {
        list.push(sentence(random));
        format!("{again} {} ", list.join(" "))
    })
}

/// Two to four blocks in no order.
fn alternating(random: &mut Random) -> Sample {
    let blocks: Vec<String> = (0..2 + random.below(3))
        .map(|_| format!("{} {}", random.of(AGAIN), sentences_of(random, 1, 6)))
        .collect();
    // The first round has each of them once.
    endless(random, "alternating", |random, round| match round {
        0 => blocks.concat(),
        _ => blocks[random.below(blocks.len())].clone(),
    })
}

/// The ways in which one step of a derivation can be said.
fn said(random: &mut Random, name: &str, thing: &str, value: usize) -> String {
    let opening =
        random.of(&["So", "Then", "This means that", "Therefore", "Now", "Again,", "Clearly"]);
    let verb = random.of(&["has", "owns", "holds", "must have", "ends up with", "is left with"]);
    let closing =
        random.of(&["", ", as before", ", which fits", ", if I read it right", " in total"]);
    match random.below(4) {
        0 => format!("{opening} {name} {verb} {value} {thing}s{closing}. "),
        1 => format!("{opening} the number of {thing}s of {name} is {value}{closing}. "),
        2 => format!("{value} {thing}s belong to {name}{closing}. "),
        _ => format!("For {name} I get {value} {thing}s{closing}. "),
    }
}

/// The same few facts, in another order and in other words each time.
fn rederived(random: &mut Random) -> Sample {
    let facts: Vec<_> = (0..3 + random.below(4))
        .map(|_| (random.of(NAMES), random.of(THINGS), number(random)))
        .collect();
    endless(random, "re-derivation", |random, _| {
        let mut text = format!("{} ", random.of(AGAIN));
        for _ in 0..facts.len() {
            let (name, thing, value) = facts[random.below(facts.len())];
            text += &said(random, name, thing, value);
        }
        text
    })
}

/// Copies of a block, each with a few of its words changed for good: neighbours are alike, the first and the last are
/// not.
fn drifting(random: &mut Random) -> Sample {
    let block = sentences_of(random, 3, 8);
    let mut words: Vec<&str> = block.split_whitespace().collect();
    endless(random, "drifting", |random, round| {
        for _ in 0..if round == 0 { 0 } else { 1 + words.len() / 20 } {
            let at = random.below(words.len());
            words[at] = random.of(&[NAMES, PLACES, THINGS, ADJECTIVES])[random.below(16)];
        }
        words.join(" ") + " "
    })
}

fn honest(kind: &'static str, text: String) -> Sample {
    Sample { kind, text, onset: None }
}

/// Between a quarter and all of the longest text.
fn length(random: &mut Random) -> usize {
    LONGEST / 4 + random.below(LONGEST * 3 / 4)
}

fn until_long(random: &mut Random, mut next: impl FnMut(&mut Random, usize) -> String) -> String {
    let (length, mut text) = (length(random), String::new());
    for round in 0.. {
        if text.len() > length {
            break;
        }
        text += &next(random, round);
    }
    text
}

fn story(random: &mut Random) -> Sample {
    honest("story", until_long(random, |random, _| sentence(random) + " "))
}

/// A proof by cases: each case has the same frame and other contents.
fn cases(random: &mut Random) -> Sample {
    let text = until_long(random, |random, round| {
        let (name, place, thing) = (random.of(NAMES), random.of(PLACES), random.of(THINGS));
        let steps = sentences_of(random, 2, 5);
        let outcome =
            random.of(&["a contradiction", "possible", "not excluded", "what the text denies"]);
        format!(
            "Case {}: {name} was at the {place} with the {thing}. {steps}This is {outcome}. ",
            round + 1
        )
    });
    honest("cases", text)
}

/// Sums written out line by line.
fn arithmetic(random: &mut Random) -> Sample {
    let text = until_long(random, |random, _| {
        let (a, b) = (100 + random.below(900), number(random));
        let (tens, ones) = (b / 10 * 10, b % 10);
        let close = random.of(&["That is", "So it is", "Together", "The sum is", "I get"]);
        format!(
            "{a} * {b}: {a} * {tens} = {}, and {a} * {ones} = {}. {close} {}.\n",
            a * tens,
            a * ones,
            a * b
        )
    });
    honest("arithmetic", text)
}

/// Reasoning that goes back to its premises now and then, says them again, and comes further.
fn revisited(random: &mut Random) -> Sample {
    let premises = sentences_of(random, 2, 4);
    let text = until_long(random, |random, _| {
        format!("{} {premises}{}", random.of(AGAIN), sentences_of(random, 8, 19))
    });
    honest("premises again", text)
}

/// A text or code that is written, looked at, and written again, once more or twice; every other time with changes.
fn drafts(random: &mut Random) -> Sample {
    let text = until_long(random, |random, _| {
        let draft = match random.below(3) {
            0 => function(random, 0),
            1 => (0..4 + random.below(8)).map(|_| format!("- {}\n", sentence(random))).collect(),
            _ => sentences_of(random, 5, 12),
        };
        let mut text = format!("{}Here is a draft:\n{draft}\n", sentences_of(random, 4, 10));
        for _ in 0..1 + random.below(2) {
            let mut words: Vec<&str> = draft.split(' ').collect();
            for _ in 0..random.below(2) * (1 + words.len() / 12) {
                let at = random.below(words.len());
                words[at] = random.of(ADJECTIVES);
            }
            text += &format!("{}\n{}\n", sentences_of(random, 1, 4), words.join(" "));
        }
        text
    });
    honest("drafts", text)
}

/// A list of checks in which little but a number changes.
fn checklist(random: &mut Random) -> Sample {
    let (thing, place) = (random.of(THINGS), random.of(PLACES));
    let text = until_long(random, |random, round| {
        let outcome = random.of(&["fits", "fits", "is too large", "is taken", "was not asked for"]);
        format!("The {thing} {} of the {place} {outcome}.\n", round + 1)
    });
    honest("checklist", text)
}

/// Verses with a refrain, which is sometimes sung twice in a row.
fn verses(random: &mut Random) -> Sample {
    let refrain = sentences_of(random, 2, 6);
    let text = until_long(random, |random, _| {
        format!("{}\n{}\n", sentences_of(random, 3, 8), refrain.repeat(1 + random.below(2)))
    });
    honest("verses", text)
}

fn records(random: &mut Random) -> Sample {
    let is_indented = random.below(2) == 0;
    let text = until_long(random, |random, round| {
        let (name, place, thing) = (random.of(NAMES), random.of(PLACES), random.of(THINGS));
        let note = sentence(random);
        if is_indented {
            format!(
                "  {{\n    \"id\": {round},\n    \"name\": \"{name}\",\n    \"place\": \"{place}\",\n    \
                 \"note\": \"{note}\"\n  }},\n"
            )
        } else {
            format!(
                "{{\"id\": {round}, \"name\": \"{name}\", \"{thing}s\": {}, \"note\": \"{note}\"}}\n",
                number(random)
            )
        }
    });
    honest("records", text)
}

fn table(random: &mut Random) -> Sample {
    let text = until_long(random, |random, _| {
        let (name, place, thing) = (random.of(NAMES), random.of(PLACES), random.of(THINGS));
        let (adjective, verb) = (random.of(ADJECTIVES), random.of(VERBS));
        format!(
            "| {name} | {} | {place} | {verb} | {adjective} {thing} | {}.{} |\n",
            number(random),
            number(random),
            random.below(10)
        )
    });
    honest("table", text)
}

/// Code in which functions are alike.
fn listing(random: &mut Random) -> Sample {
    honest("code", until_long(random, function))
}

fn function(random: &mut Random, suffix: usize) -> String {
    let (verb, thing, place) = (random.of(VERBS), random.of(THINGS), random.of(PLACES));
    let mut body = String::new();
    for _ in 0..1 + random.below(5) {
        let (other, name) = (random.of(THINGS), random.of(NAMES).to_lowercase());
        body += &match random.below(4) {
            0 => format!("    if {other}.size() > {}:\n        {name} = {other}\n", number(random)),
            1 => format!("    for {name} in {place}:\n        total += {name}.{other}\n"),
            2 => format!("    {name} = {thing}[{}] + {other}\n", random.below(9)),
            _ => format!("    {other}.append(({name}, {}))\n", number(random)),
        };
    }
    format!("def {verb}_{thing}_{suffix}({thing}, {place}):\n{body}    return {thing}\n\n")
}

/// The documents of this repository, from anywhere.
fn documents(random: &mut Random) -> Sample {
    const TEXTS: &[&str] = &[
        include_str!("../../../README.md"),
        include_str!("../../../engine/ARCHITECTURE.md"),
        include_str!("../../../server/HTTP.md"),
        include_str!("../../../server/OPERATIONS.md"),
        include_str!("../../../policies/README.md"),
        include_str!("../../../policies/REFERENCE.md"),
        include_str!("../../../server/bench/README.md"),
        include_str!("../../../engine/policy-host/src/registry.rs"),
        include_str!("../../../engine/text/src/reply.rs"),
        include_str!("../../../wit/policy.wit"),
    ];
    let text = random.of(TEXTS);
    let length = length(random).min(text.len());
    let start = text.floor_char_boundary(random.below(text.len() - length + 1));
    let end = text.floor_char_boundary(start + length);
    honest("documents", text[start..end].to_owned())
}
