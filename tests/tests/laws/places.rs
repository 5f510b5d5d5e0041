//! The architecture names places in the code, which exist.

use std::collections::BTreeSet;
use std::fs;

use crate::walls::root;

/// Sections whose items name files, and functions and types in them.
const SECTIONS: [&str; 2] = ["### A token's walk", "### Where is it?"];

/// The texts between backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The items of a section: rows of tables, points of lists, paragraphs.
fn items(section: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    for line in section.lines() {
        let begins = line.is_empty()
            || line.starts_with('|')
            || line.starts_with(|c: char| c.is_ascii_digit());
        if begins {
            items.push(String::new());
        }
        let item = items.last_mut().expect("there is one from the start");
        *item += line;
        item.push(' ');
    }
    items
}

/// Whether `code` defines a function or a type `name`, or has methods of it.
fn defines(code: &str, name: &str) -> bool {
    ["fn", "struct", "enum", "trait", "impl"].iter().any(|kind| {
        let start = format!("{kind} {name}");
        let ends = |at: usize| {
            code[at + start.len()..].starts_with(|c: char| !c.is_alphanumeric() && c != '_')
        };
        code.match_indices(&start).any(|(at, _)| ends(at))
    })
}

/// What `text` names that does not exist, and the number of functions and types that it names.
fn missing(text: &str) -> (BTreeSet<String>, usize) {
    let (mut missing, mut named) = (BTreeSet::new(), 0);
    for item in items(text) {
        let mut code = String::new();
        for file in quoted(&item).filter(|file| file.ends_with(".rs")) {
            let found = ["engine/src", "engine", ""]
                .iter()
                .find_map(|folder| fs::read_to_string(root().join(folder).join(file)).ok());
            match found {
                Some(text) => code += &text,
                None => drop(missing.insert(file.to_string())),
            }
        }
        for path in quoted(&item) {
            let is_name = |part: &str| {
                !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_')
            };
            if path.split("::").all(is_name) {
                named += 1;
                if !path.split("::").all(|part| defines(&code, part)) {
                    missing.insert(path.to_string());
                }
            }
        }
    }
    (missing, named)
}

#[test]
fn places_that_the_architecture_names_exist() {
    let text = fs::read_to_string(root().join("engine/ARCHITECTURE.md")).unwrap();
    for heading in SECTIONS {
        let section = text.split_once(heading).unwrap_or_else(|| panic!("no section {heading}")).1;
        let section = section.split("\n##").next().unwrap_or_default();
        let (missing, named) = missing(section);
        assert!(missing.is_empty(), "{heading}: {missing:?}");
        assert!(named > 5, "{heading}: {named}");
    }
}

#[test]
fn places_that_do_not_exist_are_found() {
    let found = |text: &str| missing(text).0.into_iter().collect::<Vec<_>>();
    assert!(found("`Timeline::commit` in `sequence/timeline.rs`").is_empty());
    assert_eq!(found("`Timeline::vanish` in `sequence/timeline.rs`"), ["Timeline::vanish"]);
    assert_eq!(found("| `commit` in `sequence/time.rs` |"), ["commit", "sequence/time.rs"]);
    assert_eq!(found("`comm` in `sequence/timeline.rs`"), ["comm"]);
    // Another row's file is not this one's.
    assert_eq!(found("| `sequence/timeline.rs` |\n| `rewind` |"), ["rewind"]);
}
