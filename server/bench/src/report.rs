//! The report: one HTML file that requests nothing, and the plots as files beside it.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use minijinja::Environment;
use minijinja::value::Serde;
use serde::Serialize;
use serde_json::json;

use crate::plot;
use crate::results::{FIGURES, Results, Sample};
use crate::scenario::SCENARIOS;
use crate::suite::write_file;
use crate::table::{Counts, Loss, cell, losses, notes, titled};

/// Figures that a scenario has a plot of.
const PLOTS: &[&str] = &["ttft_s", "gap_p50_s", "gap_p99_s", "tokens_per_second"];

/// Reads results files and writes their report.
///
/// # Errors
/// When a file cannot be read or written, or two files measured the same case of the same server.
pub fn run(files: &[PathBuf], folder: &Path, out: &mut impl Write) -> Result<()> {
    let mut all = Vec::new();
    for file in files {
        all.push(Results::read(file)?);
    }
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    write(&merge(all)?, folder)?;
    writeln!(out, "report: {}", folder.join("report.html").display())?;
    Ok(())
}

/// One result with the servers and scenarios of all. A server that several files have is one if it had the same model and
/// context, as in a suite that ran in parts.
fn merge(all: Vec<Results>) -> Result<Results> {
    let mut all = all.into_iter();
    let mut first = all.next().context("no results")?;
    for other in all {
        let of =
            |sample: &Sample| [&sample.server, &sample.scenario, &sample.case].map(String::clone);
        let measured: HashSet<_> = first.samples.iter().map(of).collect();
        if let Some([name, scenario, case]) =
            other.samples.iter().map(of).find(|it| measured.contains(it))
        {
            bail!("two files measured {scenario} {case} of {name}; compare them with `diff`");
        }
        for server in other.run.servers {
            match first.run.servers.iter().find(|one| one.name == server.name) {
                None => first.run.servers.push(server),
                Some(one) if (&one.model, one.context) == (&server.model, server.context) => {}
                Some(_) => bail!(
                    "two files have a server called {}, with different models or contexts",
                    server.name
                ),
            }
        }
        first.run.command.push("&&".into());
        first.run.command.extend(other.run.command);
        first.samples.extend(other.samples);
        first.skips.extend(other.skips);
    }
    ensure!(!first.samples.is_empty(), "the files have no measurements of `suite`");
    Ok(first)
}

#[derive(Serialize)]
struct Section {
    name: String,
    about: String,
    plots: Vec<String>,
    head: Vec<String>,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    /// The case; empty in the rows of further servers.
    case: String,
    server: String,
    right: String,
    is_right: bool,
    cells: Vec<Cell>,
}

#[derive(Serialize)]
struct Cell {
    text: String,
    /// What is said about a loss of the first server; empty without one.
    loses: String,
    /// Whether the loss is within the spread.
    overlaps: bool,
}

/// Writes the report and its plots to a folder.
///
/// # Errors
/// When a file cannot be written.
pub fn write(results: &Results, folder: &Path) -> Result<()> {
    let lost = losses(results);
    let mut names: Vec<String> = results.rows().into_iter().map(|(scenario, _)| scenario).collect();
    names.dedup();
    let mut sections = Vec::new();
    for name in names {
        let mut plots = Vec::new();
        for figure in PLOTS {
            let kind = FIGURES.iter().find(|kind| kind.name == *figure);
            let kind = kind.expect("plots are of figures");
            if let Some(svg) = plot::bars(results, &name, kind) {
                write_file(folder, &format!("{name}-{figure}.svg"), &svg)?;
                plots.push(svg);
            }
        }
        sections.push(section(results, &lost, name, plots));
    }
    let html = render(results, &lost, &sections)?;
    write_file(folder, "report.html", &html)
}

fn section(results: &Results, lost: &[Loss], name: String, plots: Vec<String>) -> Section {
    let cases: Vec<String> =
        results.rows().into_iter().filter(|row| row.0 == name).map(|row| row.1).collect();
    let servers = &results.run.servers;
    let has = |figure: &str| {
        cases.iter().any(|case| {
            servers.iter().any(|server| results.spread(&server.name, &name, case, figure).is_some())
        })
    };
    let kinds: Vec<_> = FIGURES.iter().filter(|kind| has(kind.name)).collect();
    let mut rows = Vec::new();
    for case in &cases {
        for (number, server) in servers.iter().enumerate() {
            let counts = Counts::of(results.of(&server.name, &name, case));
            let loses = |figure: &str| {
                let lost = lost.iter().find(|loss| {
                    loss.scenario == name && loss.case == *case && loss.figure == figure
                });
                let loss = lost.filter(|_| number == 0)?;
                let spread = if loss.overlaps { ", within the spread" } else { "" };
                Some((format!("loses to {}: {}{spread}", loss.other, ratio(loss)), loss.overlaps))
            };
            let cells = kinds.iter().map(|kind| {
                let spread = results.spread(&server.name, &name, case, kind.name);
                let (loses, overlaps) = loses(kind.name).unwrap_or_default();
                let text = spread.map_or("-".into(), |spread| cell(&spread, kind));
                Cell { text, loses, overlaps }
            });
            let failed = counts.all - counts.complete;
            let failed = if failed > 0 { format!(", {failed} failed") } else { String::new() };
            rows.push(Row {
                case: if number == 0 { case.clone() } else { String::new() },
                server: server.name.clone(),
                right: match counts.all {
                    0 => "not run".into(),
                    all => format!("{} of {all}{failed}", counts.correct),
                },
                is_right: counts.all > 0 && counts.correct == counts.all,
                cells: cells.collect(),
            });
        }
    }
    let about = SCENARIOS.iter().find(|one| one.name == name).map_or("", |one| one.about);
    let head = kinds.iter().map(|kind| titled(kind)).collect();
    Section { about: about.into(), plots, head, rows, name }
}

/// How many times the better value the worse one is.
fn ratio(loss: &Loss) -> String {
    // A median of 0, as of cached tokens.
    if loss.ratio.is_finite() { format!("{:.2} times", loss.ratio) } else { "from 0".into() }
}

fn render(results: &Results, lost: &[Loss], sections: &[Section]) -> Result<String> {
    let mut environment = Environment::new();
    // The name decides that text is escaped.
    environment.add_template("report.html", include_str!("report.html"))?;
    let chunked = results.run.servers.iter().filter(|server| {
        let of = results.samples.iter().filter(|sample| sample.server == server.name);
        Counts::of(of).by_chunks > 0
    });
    let losses: Vec<_> = lost
        .iter()
        .map(|loss| {
            json!({
                "scenario": loss.scenario, "case": loss.case, "title": loss.title,
                "other": loss.other, "ratio": ratio(loss),
                "overlaps": loss.overlaps,
            })
        })
        .collect();
    let notes: Vec<_> = notes(results)
        .into_iter()
        .map(|(text, count)| json!({"text": text, "count": count}))
        .collect();
    let run = &results.run;
    let html = environment.get_template("report.html")?.render(Serde(json!({
        "run": run,
        "command": run.command.join(" "),
        "memory_gib": run.machine.memory_bytes.map(|bytes| bytes >> 30),
        "first": run.servers.first().map(|server| &server.name),
        "by_chunks": chunked.map(|server| &server.name).collect::<Vec<_>>(),
        "losses": losses,
        "notes": notes,
        "sections": sections,
    })))?;
    Ok(html)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::{example, text};

    fn html(results: &Results) -> String {
        let folder = tempfile::tempdir().unwrap();
        write(results, folder.path()).unwrap();
        assert!(folder.path().join("short-ttft_s.svg").is_file());
        std::fs::read_to_string(folder.path().join("report.html")).unwrap()
    }

    /// The cells of the report's tables, without markup.
    fn cells(html: &str) -> Vec<String> {
        let plain = |cell: &str| {
            let mut inside = false;
            let text: String = cell
                .chars()
                .filter(|c| {
                    inside = (inside || *c == '<') && *c != '>';
                    !inside && *c != '>'
                })
                .collect();
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        html.split("<td")
            .skip(1)
            .map(|part| {
                let cell = part.split("</td>").next().unwrap();
                plain(cell.split_once('>').unwrap().1)
            })
            .collect()
    }

    #[test]
    fn the_report_is_one_file_that_requests_nothing() {
        let html = html(&example());
        for request in ["src=", "href=\"http", "@import", "url(", "<script", "<link"] {
            assert!(!html.contains(request), "the report has {request}");
        }
        assert!(html.contains("prefers-color-scheme"));
    }

    #[test]
    fn the_report_has_every_figure_of_the_results() {
        let results = Results::parse(&text(&example())).unwrap();
        let html = html(&results);
        let cells = cells(&html);
        for expected in ["110 [100-120]", "220 [200-240]", "100", "2 of 3"] {
            assert!(cells.iter().any(|cell| cell == expected), "no {expected} in {cells:?}");
        }
        assert!(
            cells.iter().any(|cell| cell.starts_with("50.0") && cell.contains("loses to")),
            "{cells:?}"
        );
        assert!(html.contains("does not fit"));
        // Names of servers are text, not markup.
        assert!(!html.contains("theirs <b>") && html.contains("theirs &lt;b&gt;"));
    }

    #[test]
    fn files_with_other_servers_make_one_report() {
        let mut other = example();
        for server in &mut other.run.servers {
            server.name += "2";
        }
        for sample in &mut other.samples {
            sample.server += "2";
        }
        let merged = merge(vec![example(), other]).unwrap();
        assert_eq!((merged.run.servers.len(), merged.samples.len()), (4, 12));
        assert!(merge(vec![example(), example()]).unwrap_err().to_string().contains("ours"));
    }

    #[test]
    fn files_with_other_scenarios_of_a_server_make_one_report() {
        let with = |change: fn(&mut Results)| {
            let mut other = example();
            for sample in &mut other.samples {
                sample.scenario = "long".into();
            }
            change(&mut other);
            merge(vec![example(), other])
        };
        let merged = with(|_| ()).unwrap();
        assert_eq!((merged.run.servers.len(), merged.samples.len()), (2, 12));
        assert!(merged.run.command.contains(&"&&".to_owned()));
        let problem = with(|other| other.run.servers[0].model += "2").unwrap_err().to_string();
        assert!(problem.contains("ours, with different models"), "{problem}");
        let problem = with(|other| other.samples[0].scenario = "short".into()).unwrap_err();
        assert!(problem.to_string().contains("measured short"), "{problem}");
    }
}
