//! Quality of the loop detectors: `cargo bench --workspace --profile dev --bench loop_quality [-- SEED]`.
//!
//! Runs each setting of the detectors over a corpus of labelled texts ([`corpus`]), in the tokens of the bundled model
//! or of the model in the folder `TOKENIZER_MODEL`. A loop counts as found if it is reported after it has begun to repeat
//! itself. A report in text that is no loop, or before a loop, is a lost answer. Tokens saved are those of a loop behind its
//! report, as a share of what follows its onset.
//!
//! Also tries detectors of repeated meaning, which the engine does not have: the share of n-grams in a window that
//! occurred before, and the compression ratio of a window.

mod corpus;
mod meaning;

use std::collections::BTreeMap;
use std::path::PathBuf;

use corpus::Sample;
use meaning::{Compression, Novelty};
use steersman_policy_host::LoopRule;
use steersman_policy_host::loops::Detector;
use steersman_tests::bundled_text;
use steersman_text::Text;

/// Texts of each kind.
const COUNT: usize = 150;

/// A text in tokens.
struct Sequence {
    kind: &'static str,
    tokens: Vec<u32>,
    /// Index of the token at which a loop begins to repeat itself.
    onset: Option<usize>,
}

/// A detector with a setting; returns the index of the token with which it reports a loop.
type Find = Box<dyn Fn(&[u32]) -> Option<usize>>;

fn main() {
    let text = match std::env::var_os("TOKENIZER_MODEL") {
        Some(folder) => Text::load(&PathBuf::from(folder)).expect("a folder with a tokenizer"),
        None => bundled_text(),
    };
    // cargo adds `--bench`.
    let seed = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(1);
    let sequences: Vec<Sequence> =
        corpus::corpus(COUNT, seed).iter().map(|sample| sequence(&text, sample)).collect();
    let loops = sequences.iter().filter(|sequence| sequence.onset.is_some()).count();
    let tokens: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
    println!(
        "{} texts: {loops} loops, {} others, {} tokens each on average",
        sequences.len(),
        sequences.len() - loops,
        tokens / sequences.len()
    );
    for (name, find) in settings() {
        print(&name, &sequences, find);
    }
}

fn sequence(text: &Text, sample: &Sample) -> Sequence {
    let encode = |text_: &str| text.encode_plain(text_).expect("plain text");
    let before = sample.onset.map(|onset| encode(&sample.text[..onset]).len());
    Sequence { kind: sample.kind, tokens: encode(&sample.text), onset: before }
}

/// Names and detectors.
fn settings() -> Vec<(String, Find)> {
    let mut settings: Vec<(String, Find)> = Vec::new();
    for repeats in [2, 3, 4] {
        for min_tokens in [64, 96, 128] {
            for similarity in [0.8, 0.83, 0.87, 0.9, 1.0] {
                let rule = LoopRule { max_period: 1024, repeats, min_tokens, similarity };
                let name =
                    format!("repeats {repeats}, {min_tokens} tokens, similarity {similarity}");
                settings.push((name, Box::new(move |tokens| first(Detector::new(rule), tokens))));
            }
        }
    }
    for n in [2, 3, 4] {
        for window in [512, 1024] {
            for share in [0.8, 0.9, 0.95] {
                let name = format!("{n}-grams, window {window}, {share} known");
                let find = move |tokens: &[u32]| Novelty::new(n, window, share).first(tokens);
                settings.push((name, Box::new(find)));
            }
        }
    }
    for window in [512, 1024, 2048] {
        for ratio in [3.0, 4.0, 6.0] {
            let name = format!("compression of {window} tokens, ratio {ratio}");
            let find = move |tokens: &[u32]| Compression { window, ratio }.first(tokens);
            settings.push((name, Box::new(find)));
        }
    }
    settings
}

fn first(mut detector: Detector, tokens: &[u32]) -> Option<usize> {
    tokens.iter().position(|token| detector.push(*token).is_some())
}

/// What a setting does with the texts of one kind.
#[derive(Default)]
struct Counts {
    texts: usize,
    found: usize,
    /// Reports where there is no loop, or before it.
    lost: usize,
    /// Tokens between onset and report of what was found.
    delays: Vec<usize>,
    saved: usize,
    to_save: usize,
}

fn print(name: &str, sequences: &[Sequence], find: Find) {
    let mut kinds: BTreeMap<(bool, &str), Counts> = BTreeMap::new();
    for Sequence { kind, tokens, onset } in sequences {
        let counts = kinds.entry((onset.is_none(), kind)).or_default();
        counts.texts += 1;
        counts.to_save += onset.map_or(0, |onset| tokens.len() - onset);
        match (find(tokens), onset) {
            (Some(at), Some(onset)) if at >= *onset => {
                counts.found += 1;
                counts.delays.push(at - onset);
                counts.saved += tokens.len() - at;
            }
            (Some(_), _) => counts.lost += 1,
            (None, _) => {}
        }
    }
    let sum = |of: fn(&Counts) -> usize| kinds.values().map(of).sum::<usize>();
    let (found, lost) = (sum(|counts| counts.found), sum(|counts| counts.lost));
    let loops: usize =
        kinds.iter().filter(|((is_other, _), _)| !is_other).map(|(_, c)| c.texts).sum();
    let mut delays: Vec<usize> = kinds.values().flat_map(|counts| counts.delays.clone()).collect();
    delays.sort_unstable();
    let percent = |part: usize, of: usize| 100.0 * part as f64 / of.max(1) as f64;
    println!(
        "{name}: recall {:.1} %, precision {:.1} %, {lost} answers lost, {:.1} % of tokens saved, median delay {}",
        percent(found, loops),
        percent(found, found + lost),
        percent(sum(|counts| counts.saved), sum(|counts| counts.to_save)),
        delays.get(delays.len() / 2).copied().unwrap_or_default(),
    );
    let line: Vec<String> = kinds
        .iter()
        .map(|((is_other, kind), counts)| match is_other {
            true if counts.lost == 0 => String::new(),
            true => format!("{kind} lost {}", counts.lost),
            false => format!("{kind} {:.0} %", percent(counts.found, counts.texts)),
        })
        .filter(|part| !part.is_empty())
        .collect();
    println!("    {}", line.join(", "));
}
