//! The table of a run for a terminal, and what readers must not miss: losses, failures, omissions.

use std::io::Write;

use anyhow::Result;

use crate::results::{Better, FIGURES, Kind, Results, Sample};
use crate::stats::Spread;

/// Figures in the terminal; the report has all.
const COLUMNS: &[&str] = &[
    "ttft_s",
    "gap_p50_s",
    "gap_p95_s",
    "gap_p99_s",
    "tokens_per_second",
    "total_s",
    "cached_tokens",
    "prompt_tokens",
    "peak_bytes",
];

/// A figure in which the first server is worse than another.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// The scenario.
    pub scenario: String,
    /// The case.
    pub case: String,
    /// Title of the figure.
    pub title: &'static str,
    /// Its name.
    pub figure: &'static str,
    /// The better server.
    pub other: String,
    /// How many times the better value the worse one is: above 1.
    pub ratio: f64,
    /// Whether the ranges of the two overlap, so that the difference may be chance.
    pub overlaps: bool,
}

/// Where the first server loses.
pub fn losses(results: &Results) -> Vec<Loss> {
    let Some((first, others)) = results.run.servers.split_first() else { return Vec::new() };
    let mut losses = Vec::new();
    for (scenario, case) in results.rows() {
        for kind in FIGURES {
            let spread = |server: &str| results.spread(server, &scenario, &case, kind.name);
            let Some(ours) = spread(&first.name) else { continue };
            for other in others {
                let Some(theirs) = spread(&other.name) else { continue };
                let ratio = match kind.better {
                    Better::Lower => ours.median / theirs.median,
                    Better::Higher => theirs.median / ours.median,
                    Better::Neither => continue,
                };
                if ratio > 1.0 {
                    losses.push(Loss {
                        scenario: scenario.clone(),
                        case: case.clone(),
                        title: kind.title,
                        figure: kind.name,
                        other: other.name.clone(),
                        ratio,
                        overlaps: ours.overlaps(&theirs),
                    });
                }
            }
        }
    }
    losses
}

/// How many replies of a row are complete, and how many of them right.
pub struct Counts {
    /// Measurements.
    pub all: usize,
    /// With a complete reply.
    pub complete: usize,
    /// With a right answer.
    pub correct: usize,
    /// Whose tokens were counted from pieces.
    pub by_chunks: usize,
}

impl Counts {
    /// Counts measurements.
    pub fn of<'a>(samples: impl Iterator<Item = &'a Sample>) -> Self {
        let mut counts = Self { all: 0, complete: 0, correct: 0, by_chunks: 0 };
        for sample in samples {
            counts.all += 1;
            counts.complete += usize::from(sample.error.is_none());
            counts.correct += usize::from(sample.correct == Some(true));
            counts.by_chunks += usize::from(sample.tokens_from.as_deref() == Some("chunks"));
        }
        counts
    }
}

/// A figure's median, and its range if that is wider, in the unit of tables.
pub fn cell(spread: &Spread, kind: &Kind) -> String {
    let text = |value: f64| match kind.unit {
        // A count; the median of two may be half.
        "" if value.fract() == 0.0 => format!("{value:.0}"),
        _ => number(value * kind.scale),
    };
    let [median, min, max] = [spread.median, spread.min, spread.max].map(text);
    if min == max { median } else { format!("{median} [{min}-{max}]") }
}

/// Three significant digits.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 99.95 || size == 0.0 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Writes the table.
pub fn write(results: &Results, out: &mut impl Write) -> Result<()> {
    let columns: Vec<&Kind> = FIGURES.iter().filter(|kind| COLUMNS.contains(&kind.name)).collect();
    let losses = losses(results);
    let mut rows = vec![["", "server", "right"].map(str::to_owned).to_vec()];
    rows[0].extend(columns.iter().map(|kind| titled(kind)));
    for (scenario, case) in results.rows() {
        for (number, server) in results.run.servers.iter().enumerate() {
            let counts = Counts::of(results.of(&server.name, &scenario, &case));
            if counts.all == 0 {
                continue;
            }
            let failed = counts.all - counts.complete;
            let mut right = format!("{}/{}", counts.correct, counts.all);
            if failed > 0 {
                right += &format!(", {failed} failed");
            }
            let name = format!("{scenario} {case}");
            let mut row = vec![
                if rows.len() == 1 || number == 0 { name } else { String::new() },
                server.name.clone(),
                right,
            ];
            for kind in &columns {
                let spread = results.spread(&server.name, &scenario, &case, kind.name);
                let mut text = spread.map_or("-".into(), |spread| cell(&spread, kind));
                let lost = losses.iter().find(|loss| {
                    number == 0
                        && loss.scenario == scenario
                        && loss.case == case
                        && loss.figure == kind.name
                });
                text += lost.map_or("", |loss| if loss.overlaps { " ~" } else { " !" });
                row.push(text);
            }
            rows.push(row);
        }
    }
    columns_of(&rows, out)?;
    let rounds = results.run.rounds;
    let plural = if rounds == 1 { "" } else { "s" };
    writeln!(out, "\nmedian [smallest-largest] over {rounds} round{plural}")?;
    write_notes(results, &losses, out)
}

/// Losses, failures, omissions, and how tokens were counted.
fn write_notes(results: &Results, losses: &[Loss], out: &mut impl Write) -> Result<()> {
    if let [first, _, ..] = &results.run.servers[..] {
        let clear = losses.iter().filter(|loss| !loss.overlaps).count();
        writeln!(
            out,
            "{} loses {clear} comparisons (!), and {} more within the spread (~)",
            first.name,
            losses.len() - clear
        )?;
    }
    for server in &results.run.servers {
        let of = results.samples.iter().filter(|sample| sample.server == server.name);
        if Counts::of(of).by_chunks > 0 {
            writeln!(
                out,
                "{} reports no usage: its tokens are counted from the pieces of streams",
                server.name
            )?;
        }
    }
    write_each(notes(results), out)
}

/// Writes lines, those that occur several times with their number.
pub fn write_each(lines: Vec<(String, usize)>, out: &mut impl Write) -> Result<()> {
    for (text, count) in lines {
        let times = if count > 1 { format!(" ({count} times)") } else { String::new() };
        writeln!(out, "{text}{times}")?;
    }
    Ok(())
}

/// Failures, wrong answers, remarks and omissions, each with how often it occurs.
pub fn notes(results: &Results) -> Vec<(String, usize)> {
    let of_samples = results.samples.iter().flat_map(|sample| {
        let what = match (&sample.error, sample.correct) {
            (Some(_), _) => "failed",
            (None, Some(false)) => "wrong",
            _ => "note",
        };
        sample.error.iter().chain(&sample.notes).map(move |note| {
            format!("{what}: {}: {} {}: {note}", sample.server, sample.scenario, sample.case)
        })
    });
    let of_skips = results.skips.iter().map(|skip| {
        format!("skipped: {}: {} {}: {}", skip.server, skip.scenario, skip.case, skip.reason)
    });
    counted(of_samples.chain(of_skips))
}

/// Texts in the order of their first occurrence, each with how often it occurs.
pub fn counted(texts: impl Iterator<Item = String>) -> Vec<(String, usize)> {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for text in texts {
        match counts.iter_mut().find(|(other, _)| *other == text) {
            Some((_, count)) => *count += 1,
            None => counts.push((text, 1)),
        }
    }
    counts
}

/// A figure's title with its unit.
pub fn titled(kind: &Kind) -> String {
    if kind.unit.is_empty() || kind.title.contains("/s") {
        kind.title.into()
    } else {
        format!("{} {}", kind.title, kind.unit)
    }
}

/// Writes rows in columns; the first row is the head.
pub fn columns_of(rows: &[Vec<String>], out: &mut impl Write) -> Result<()> {
    let width = |column: usize| {
        rows.iter().filter_map(|row| Some(row.get(column)?.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    for (number, row) in rows.iter().enumerate() {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
        if number == 0 {
            let rule = widths.iter().sum::<usize>() + 2 * (widths.len() - 1);
            writeln!(out, "{}", "-".repeat(rule))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::example;

    #[test]
    fn rows_where_the_first_server_loses_are_marked() {
        let results = example();
        let [loss] = &losses(&results)[..] else { panic!("{:?}", losses(&results)) };
        assert_eq!((loss.figure, loss.ratio, loss.overlaps), ("tokens_per_second", 2.0, false));
        let mut text = Vec::new();
        write(&results, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("50.0 !") && text.contains("110 [100-120]"), "{text}");
        assert!(text.contains("ours loses 1 comparisons (!), and 0 more"), "{text}");
        assert!(text.contains("skipped: ours: needle 32000: does not fit"), "{text}");
        assert!(text.contains("2/3"), "{text}");
    }

    #[test]
    fn numbers_have_three_digits() {
        let found = [0.0, 0.012_34, 0.9996, 1.234, 12.34, 123.4, 99.96].map(number);
        assert_eq!(found, ["0", "0.012", "1.00", "1.23", "12.3", "123", "100"]);
    }

    #[test]
    fn counts_have_no_decimals() {
        let kind = FIGURES.iter().find(|kind| kind.name == "tokens").unwrap();
        assert_eq!(cell(&Spread::of(&[7.0, 12.0, 10.0]).unwrap(), kind), "10 [7-12]");
    }

    #[test]
    fn failures_and_chunk_counts_are_shown() {
        let mut results = example();
        results.samples[0].error = Some("status 429: busy".into());
        results.samples[0].correct = None;
        results.samples[2].tokens_from = Some("chunks".into());
        let mut text = Vec::new();
        write(&results, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(
            text.contains("1 failed")
                && text.contains("failed: ours: short capital: status 429: busy"),
            "{text}"
        );
        assert!(text.contains("ours reports no usage"), "{text}");
    }
}
