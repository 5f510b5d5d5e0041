//! Compares two results files.
//!
//! Measurements of equal prompts are pairs: same seed, scenario, case, round and index. Six pairs or
//! more are tested with Wilcoxon's signed ranks; otherwise, and without pairs, ranges are compared.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Result, bail};

use crate::results::{Better, FIGURES, Kind, Results, Sample};
use crate::stats::{Spread, mcnemar, rank_sums, signed_ranks};
use crate::table::{cell, columns_of, number, titled};

/// With five pairs or fewer the exact test can never find a difference at 5 %.
const PAIRS: usize = 6;
const SIGNIFICANT: f64 = 0.05;

/// Reads two files and writes the comparison.
///
/// # Errors
/// When a file cannot be read, or they have nothing in common.
pub fn run(a: &Path, b: &Path, out: &mut impl Write) -> Result<()> {
    write(&Results::read(a)?, &Results::read(b)?, out)
}

fn write(a: &Results, b: &Results, out: &mut impl Write) -> Result<()> {
    if !a.items.is_empty() && !b.items.is_empty() {
        return match crate::eval::diff(a, b, out)? {
            true => Ok(()),
            false => {
                bail!("the two files have no run in common: server, profile and reasoning differ")
            }
        };
    }
    if a.run.machine.cpu != b.run.machine.cpu || a.run.machine.cores != b.run.machine.cores {
        writeln!(out, "The machines differ: ratios say nothing about the servers.\n")?;
    }
    let servers = servers(a, b)?;
    let is_paired = has_equal_prompts(a, b);
    if !is_paired {
        writeln!(out, "The prompts differ: nothing is paired.\n")?;
    }
    let mut compared = 0;
    for (server_a, server_b) in &servers {
        writeln!(out, "A: {server_a} of {}   B: {server_b} of {}", a.run.started, b.run.started)?;
        let mut rows = vec![["", "figure", "A", "B", "B/A", ""].map(str::to_owned).to_vec()];
        for (scenario, case) in a.rows() {
            let samples = [a.of(server_a, &scenario, &case), b.of(server_b, &scenario, &case)]
                .map(Iterator::collect::<Vec<_>>);
            let mut name = format!("{scenario} {case}");
            if samples[1].is_empty() {
                rows.push(vec![name, "not in B".into()]);
                continue;
            }
            for kind in FIGURES {
                let Some(row) = compare(&samples, kind, is_paired) else { continue };
                rows.push([vec![std::mem::take(&mut name)], row].concat());
                compared += 1;
            }
            rows.extend(answers(&samples, is_paired).map(|row| [vec![name], row].concat()));
        }
        for row in &mut rows {
            row.resize(6, String::new());
        }
        columns_of(&rows, out)?;
        writeln!(out)?;
    }
    if compared == 0 {
        bail!("the two files have no scenario and case in common");
    }
    Ok(())
}

/// Whether prompts are equal: their texts depend on the seed, their lengths on the first tokenizer.
fn has_equal_prompts(a: &Results, b: &Results) -> bool {
    let lengths = |results: &Results| results.run.servers.first().map(|one| one.sentence_tokens);
    (a.run.seed, a.run.quick, lengths(a)) == (b.run.seed, b.run.quick, lengths(b))
}

/// Servers to compare: those with equal names, or the only one of each file.
fn servers(a: &Results, b: &Results) -> Result<Vec<(String, String)>> {
    let names = |results: &Results| {
        results.run.servers.iter().map(|server| server.name.clone()).collect::<Vec<_>>()
    };
    let (a, b) = (names(a), names(b));
    let common: Vec<_> =
        a.iter().filter(|name| b.contains(name)).map(|name| (name.clone(), name.clone())).collect();
    match (&common[..], &a[..], &b[..]) {
        ([], [one], [other]) => Ok(vec![(one.clone(), other.clone())]),
        ([], ..) => {
            bail!("no server is in both files: A has {}, B has {}", a.join(", "), b.join(", "))
        }
        _ => Ok(common),
    }
}

type Samples<'a> = [Vec<&'a Sample>; 2];

/// Figure, both medians, their ratio and what can be said about it.
fn compare(samples: &Samples, kind: &Kind, is_paired: bool) -> Option<Vec<String>> {
    let values = samples.each_ref().map(|list| values(list, kind.name));
    let lists = values.each_ref().map(|map| map.values().copied().collect::<Vec<f64>>());
    let [a, b] = [Spread::of(&lists[0])?, Spread::of(&lists[1])?];
    let ratio = b.median / a.median;
    let ratio = if ratio.is_finite() { number(ratio) } else { "-".into() };
    let pairs: Vec<f64> = if is_paired {
        values[0].iter().filter_map(|(key, a)| Some(values[1].get(key)? - a)).collect()
    } else {
        Vec::new()
    };
    let (test, p) = if pairs.len() >= PAIRS {
        (format!("{} pairs", pairs.len()), Some(signed_ranks(&pairs).unwrap_or(1.0)))
    } else if !is_paired && lists.iter().all(|list| list.len() >= PAIRS) {
        (format!("{} and {}", a.n, b.n), rank_sums(&lists[0], &lists[1]))
    } else {
        (format!("{} and {}, too few to test", a.n, b.n), None)
    };
    let better = match kind.better {
        Better::Neither => None,
        Better::Lower => Some(b.median < a.median),
        Better::Higher => Some(b.median > a.median),
    };
    let direction = match better {
        _ if a.median == b.median => "",
        None => "differs",
        Some(true) => "B is better",
        Some(false) => "B is worse",
    };
    let said = match p {
        Some(p) if p < SIGNIFICANT => format!("{direction}, p = {p:.3} ({test})"),
        Some(p) => format!("no clear difference, p = {p:.3} ({test})"),
        None if a.overlaps(&b) => format!("the ranges overlap ({test})"),
        None => format!("{direction}, the ranges do not overlap ({test})"),
    };
    Some(vec![titled(kind), cell(&a, kind), cell(&b, kind), ratio, said])
}

/// The values of a figure by round and index.
fn values(samples: &[&Sample], figure: &str) -> BTreeMap<(usize, usize), f64> {
    let value =
        |sample: &&Sample| Some(((sample.round, sample.index), *sample.figures.get(figure)?));
    samples.iter().filter_map(value).collect()
}

/// Right answers of both.
fn answers(samples: &Samples, is_paired: bool) -> Option<Vec<String>> {
    let right = samples.each_ref().map(|list| {
        list.iter()
            .map(|sample| ((sample.round, sample.index), sample.correct == Some(true)))
            .collect::<BTreeMap<_, _>>()
    });
    let text = right
        .each_ref()
        .map(|map| format!("{}/{}", map.values().filter(|right| **right).count(), map.len()));
    if text[0] == text[1] && text[0].split_once('/').is_some_and(|(right, all)| right == all) {
        return None;
    }
    let only = |one: usize, other: usize| {
        let lost = |key: &(usize, usize)| right[other].get(key) == Some(&false);
        right[one].iter().filter(|(key, right)| **right && lost(key)).count()
    };
    let said = if is_paired {
        let (a, b) = (only(0, 1), only(1, 0));
        format!("right only in A: {a}, only in B: {b}, p = {:.3}", mcnemar(a, b))
    } else {
        String::new()
    };
    let [a, b] = text;
    Some(vec!["right answers".into(), a, b, "-".into(), said])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::example;

    fn text(a: &Results, b: &Results) -> String {
        let mut text = Vec::new();
        write(a, b, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    /// A run with `rounds` values of one figure.
    fn with(values: &[f64]) -> Results {
        let mut results = example();
        let sample = results.samples[0].clone();
        results.run.servers.truncate(1);
        results.samples = values
            .iter()
            .enumerate()
            .map(|(round, value)| Sample {
                round,
                correct: Some(true),
                figures: [("ttft_s".to_owned(), *value)].into(),
                ..sample.clone()
            })
            .collect();
        results
    }

    #[test]
    fn six_pairs_that_all_differ_are_significant() {
        let a = with(&[0.10, 0.20, 0.30, 0.40, 0.50, 0.60]);
        let b = with(&[0.11, 0.22, 0.33, 0.44, 0.55, 0.66]);
        let found = text(&a, &b);
        assert!(found.contains("B is worse, p = 0.031 (6 pairs)"), "{found}");
        assert!(text(&b, &a).contains("B is better, p = 0.031"), "{}", text(&b, &a));
        assert!(text(&a, &a).contains("no clear difference, p = 1.000"), "{}", text(&a, &a));
    }

    #[test]
    fn few_pairs_are_said_to_be_too_few() {
        let (a, b) = (with(&[0.1, 0.2]), with(&[0.3, 0.4]));
        let found = text(&a, &b);
        assert!(found.contains("do not overlap (2 and 2, too few to test)"), "{found}");
        let found = text(&a, &with(&[0.15, 0.4]));
        assert!(found.contains("the ranges overlap"), "{found}");
    }

    #[test]
    fn runs_with_other_seeds_are_not_paired() {
        let a = with(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let mut b = with(&[11.0, 12.0, 13.0, 14.0, 15.0, 16.0]);
        b.run.seed = 2;
        let found = text(&a, &b);
        assert!(
            found.contains("nothing is paired") && found.contains("p = 0.002 (6 and 6)"),
            "{found}"
        );
    }

    #[test]
    fn runs_with_another_tokenizer_are_not_paired() {
        let (a, mut b) = (with(&[0.1]), with(&[0.1]));
        b.run.servers[0].sentence_tokens += 1.0;
        assert!(text(&a, &b).contains("nothing is paired"));
        assert!(!text(&a, &a).contains("nothing is paired"));
    }

    #[test]
    fn wrong_answers_are_compared_too() {
        let mut b = with(&[0.1; 6]);
        b.samples[0].correct = Some(false);
        let found = text(&with(&[0.1; 6]), &b);
        assert!(
            found.contains("6/6") && found.contains("right only in A: 1, only in B: 0"),
            "{found}"
        );
    }

    #[test]
    fn files_without_a_common_server_are_an_error() {
        let mut b = example();
        b.run.servers.truncate(1);
        b.run.servers[0].name = "else".into();
        let error = write(&example(), &b, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("B has else"), "{error}");
    }
}
