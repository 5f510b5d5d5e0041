//! Prompts from a seed: short sentences of plain English, facts that are planted in them, tools.
//!
//! Every sentence is different in a typical prompt: repeated or random tokens would flatter
//! speculation. The words are those that the bundled demonstration model was trained on.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::{Value, json};

/// First names.
pub const NAMES: &[&str] = &[
    "Anna", "Boris", "Clara", "David", "Elena", "Farid", "Grace", "Hugo", "Irene", "Jonas",
    "Karin", "Liam", "Maria", "Nora", "Oscar", "Paula", "Quinn", "Rosa", "Simon", "Tara",
];
/// Countries and their capitals.
pub const CAPITALS: &[(&str, &str)] = &[
    ("France", "Paris"),
    ("Italy", "Rome"),
    ("Norway", "Oslo"),
    ("Egypt", "Cairo"),
    ("Peru", "Lima"),
    ("Japan", "Tokyo"),
    ("India", "Delhi"),
    ("Ecuador", "Quito"),
    ("Germany", "Berlin"),
    ("Spain", "Madrid"),
    ("Austria", "Vienna"),
    ("Ireland", "Dublin"),
    ("Greece", "Athens"),
    ("Portugal", "Lisbon"),
    ("Poland", "Warsaw"),
    ("Cuba", "Havana"),
    ("Kenya", "Nairobi"),
    ("Canada", "Ottawa"),
];
/// Things.
pub const ITEMS: &[&str] =
    &["lamps", "chairs", "pens", "books", "ropes", "tents", "boots", "maps", "bells", "coins"];
/// Animals.
pub const ANIMALS: &[&str] =
    &["fox", "owl", "bear", "wolf", "hare", "otter", "crow", "lynx", "mole", "deer"];
/// Places.
pub const PLACES: &[&str] = &[
    "forest", "river", "harbour", "village", "mountain", "meadow", "castle", "bridge", "garden",
    "market",
];
/// Names of projects.
pub const PROJECTS: &[&str] = &[
    "Aurora", "Basalt", "Cobalt", "Dorado", "Ember", "Falcon", "Granite", "Horizon", "Indigo",
    "Juniper", "Kestrel", "Lagoon", "Meridian", "Nimbus", "Onyx", "Pelican", "Quartz", "Raven",
];
const ADJECTIVES: &[&str] =
    &["quiet", "old", "bright", "small", "brave", "tired", "clever", "gentle", "proud", "lonely"];
const VERBS: &[&str] = &[
    "walked",
    "ran",
    "waited",
    "slept",
    "sang",
    "looked",
    "travelled",
    "worked",
    "rested",
    "listened",
];

/// Choices from a seed, the same in every version.
pub struct Pick(ChaCha8Rng);

impl Pick {
    /// The choices of a seed and a purpose: other purposes have other choices.
    pub fn new(seed: u64, purpose: &str) -> Self {
        // FNV-1a: stable, unlike the hashes of the standard library.
        let digest = purpose.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |digest, byte| {
            (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self(ChaCha8Rng::seed_from_u64(seed ^ digest))
    }

    /// A number below `limit`, which is above 0.
    pub fn below(&mut self, limit: usize) -> usize {
        // The remainder prefers small numbers by less than `limit` in 2^64.
        (self.0.next_u64() % limit as u64) as usize
    }

    /// A number from `low` up to, without, `high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low)
    }

    /// One of some values.
    pub fn one<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// `count` different ones of some values, in random order.
    pub fn some<T: Copy>(&mut self, values: &[T], count: usize) -> Vec<T> {
        let mut values = values.to_vec();
        for i in 0..count {
            let other = self.between(i, values.len());
            values.swap(i, other);
        }
        values.truncate(count);
        values
    }
}

/// A sentence.
pub fn sentence(pick: &mut Pick) -> String {
    let (adjective, animal) = (pick.one(ADJECTIVES), pick.one(ANIMALS));
    let (place, other) = (pick.one(PLACES), pick.one(PLACES));
    match pick.below(4) {
        0 => format!("The {adjective} {animal} {} near the {place}.", pick.one(VERBS)),
        1 => format!("{} {} from the {place} to the {other}.", pick.one(NAMES), pick.one(VERBS)),
        2 => format!("There are {} {} in the {place}.", pick.between(2, 99), pick.one(ITEMS)),
        _ => format!(
            "A {adjective} {animal} and a {} {} met at the {other}.",
            pick.one(ADJECTIVES),
            pick.one(ANIMALS)
        ),
    }
}

/// A number of sentences.
pub fn sentences(pick: &mut Pick, count: usize) -> Vec<String> {
    (0..count).map(|_| sentence(pick)).collect()
}

/// A text of some sentences.
pub fn text(pick: &mut Pick, count: usize) -> String {
    sentences(pick, count).join(" ")
}

/// Definitions of tools as an office might have them.
pub fn tools(pick: &mut Pick, count: usize) -> Vec<Value> {
    const ACTIONS: &[&str] = &["list", "find", "create", "update", "delete", "count", "export"];
    const THINGS: &[&str] = &[
        "invoice",
        "customer",
        "order",
        "shipment",
        "contract",
        "meeting",
        "employee",
        "project",
        "payment",
        "product",
        "warehouse",
        "ticket",
        "report",
        "device",
        "license",
    ];
    let tool = |index: usize| {
        let action = ACTIONS[index % ACTIONS.len()];
        let thing = THINGS[index / ACTIONS.len() % THINGS.len()];
        // The office has branches if there are more tools than pairs of action and thing.
        let branch = match index / (ACTIONS.len() * THINGS.len()) {
            0 => String::new(),
            number => format!("_branch_{number}"),
        };
        let mut property = |about: &str| {
            let about = format!("{about} {}", sentence(pick));
            json!({"type": "string", "description": about})
        };
        json!({"type": "function", "function": {
            "name": format!("{action}_{thing}{branch}"),
            "description": format!("{action} a {thing} in the books of the office."),
            "parameters": {"type": "object", "required": ["name"], "properties": {
                "name": property(&format!("Name of the {thing}.")),
                "city": property(&format!("City of the {thing}.")),
            }},
        }})
    };
    (0..count).map(tool).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_always_gives_the_same_text() {
        let first = text(&mut Pick::new(1, "test"), 3);
        assert_eq!(first, text(&mut Pick::new(1, "test"), 3));
        assert_ne!(first, text(&mut Pick::new(2, "test"), 3));
        assert_ne!(first, text(&mut Pick::new(1, "other"), 3));
        // Items of published results would change silently.
        let mut pick = Pick::new(1, "test");
        assert_eq!([pick.below(1000), pick.below(1000), pick.below(1000)], [675, 48, 233]);
    }

    #[test]
    fn sentences_of_a_prompt_hardly_repeat() {
        let mut all = sentences(&mut Pick::new(7, "test"), 400);
        all.sort();
        all.dedup();
        assert!(all.len() > 350, "{} of 400 sentences differ", all.len());
    }

    #[test]
    fn some_values_are_different_ones() {
        let mut found = Pick::new(3, "test").some(NAMES, NAMES.len());
        found.sort_unstable();
        assert_eq!(found, NAMES);
    }

    #[test]
    fn tools_have_different_names() {
        let tools = tools(&mut Pick::new(1, "tools"), 250);
        let mut names: Vec<_> =
            tools.iter().map(|tool| tool["function"]["name"].as_str()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 250);
    }
}
