//! Results as JSON lines: the schema, its version, reading and writing.
//!
//! The first line is the run, then one line for each measurement, item and omission, in order. Lines
//! are written as they arise, so an interrupted run keeps what it measured. README.md describes every
//! field; a change that a reader notices raises [`SCHEMA`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::machine::Machine;
use crate::stats::Spread;

/// Version of the schema.
pub const SCHEMA: u32 = 1;

/// A line of a results file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    /// The run: the first line.
    Run(Run),
    /// One measurement of one server.
    Sample(Sample),
    /// What was not measured, and why.
    Skip(Skip),
    /// Median and spread of a figure over all rounds; follows from the samples.
    Figure(Figure),
    /// The answer to one item of `eval`.
    Item(Item),
}

/// What was run, where and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Version of the schema.
    pub schema: u32,
    /// `suite` or `eval`.
    pub tool: String,
    /// Start, in UTC.
    pub started: String,
    /// The command.
    pub command: Vec<String>,
    /// Version of this program.
    pub version: String,
    /// Commit of the folder that the command ran in, if it is a repository.
    pub commit: Option<String>,
    /// The machine of the client. Servers may run elsewhere.
    pub machine: Machine,
    /// Seed of the prompts.
    pub seed: u64,
    /// Rounds, or items of each task.
    pub rounds: usize,
    /// Whether it was the short form.
    pub quick: bool,
    /// The servers, the first being the one that others are compared with.
    pub servers: Vec<Server>,
}

/// A server, as it described itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Server {
    /// Its name in this file.
    pub name: String,
    /// Its address.
    pub url: String,
    /// The model it was asked for.
    pub model: String,
    /// Its version, if it tells it.
    pub version: Option<String>,
    /// `system_fingerprint` of a reply, if it sends one.
    pub fingerprint: Option<String>,
    /// Tokens of its context, if known.
    pub context: Option<usize>,
    /// Process whose memory was read, if it is known.
    pub pid: Option<u32>,
    /// Tokens of a typical sentence of the prompts.
    pub sentence_tokens: f64,
    /// Whether the server counted these; otherwise four characters are taken for a token.
    pub counts_tokens: bool,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Name of the server.
    pub server: String,
    /// The scenario.
    pub scenario: String,
    /// The case of the scenario.
    pub case: String,
    /// Round, from 0. Equal scenario, case, round and index are equal prompts for all servers.
    pub round: usize,
    /// Which server's turn it was in the round, from 0.
    pub turn: usize,
    /// Number of the measurement within case and round, from 0.
    pub index: usize,
    /// Why there is no complete reply; null if there is.
    pub error: Option<String>,
    /// Whether the answer is right; null without a reply.
    pub correct: Option<bool>,
    /// What is wrong with the answer, or what a reader should know.
    pub notes: Vec<String>,
    /// `usage` if the server counted the tokens of the reply, `chunks` if pieces were counted.
    pub tokens_from: Option<String>,
    /// Values by the names in [`FIGURES`].
    pub figures: BTreeMap<String, f64>,
}

/// What was not measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skip {
    /// Name of the server.
    pub server: String,
    /// The scenario.
    pub scenario: String,
    /// The case.
    pub case: String,
    /// Why.
    pub reason: String,
}

/// A summary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Name of the server.
    pub server: String,
    /// The scenario.
    pub scenario: String,
    /// The case.
    pub case: String,
    /// One of [`FIGURES`].
    pub figure: String,
    /// Median and spread.
    #[serde(flatten)]
    pub spread: Spread,
}

/// The answer to an item of `eval`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// Name of the server.
    pub server: String,
    /// `on`, `off`, or `default` if the request did not say.
    pub thinking: String,
    /// The profile that the request named; null if none.
    pub profile: Option<String>,
    /// The profile that the server says it used.
    pub used_profile: Option<String>,
    /// The task.
    pub task: String,
    /// Number of the item; equal tasks and numbers are equal items.
    pub item: usize,
    /// What the file of the suite says of the item; null for generated ones.
    #[serde(default)]
    pub about: Option<Value>,
    /// Whether the answer is right.
    pub correct: bool,
    /// Why there is no complete reply; such an item counts as wrong.
    pub error: Option<String>,
    /// What is wrong with the answer.
    pub problem: Option<String>,
    /// The question: the last message.
    pub question: String,
    /// The answer.
    pub answer: String,
    /// Tokens of the reply, reasoning included.
    pub tokens: u64,
    /// `usage` or `chunks`.
    pub tokens_from: String,
    /// Seconds to the end of the reply.
    pub total_s: f64,
}

/// Which direction of a figure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Smaller values.
    Lower,
    /// Larger values.
    Higher,
    /// It describes, and is no merit.
    Neither,
}

/// A figure: its name in results, its title, unit and what values are multiplied by to have it.
pub struct Kind {
    /// Name in results; its ending is the unit there: `_s` are seconds.
    pub name: &'static str,
    /// Title in tables.
    pub title: &'static str,
    /// Unit in tables.
    pub unit: &'static str,
    /// Units in tables for each unit in results.
    pub scale: f64,
    /// The better direction.
    pub better: Better,
}

/// All figures, in the order of tables.
pub const FIGURES: &[Kind] = &[
    kind("ttft_s", "first token", "ms", 1e3, Better::Lower),
    kind("ttft_max_s", "last first token", "ms", 1e3, Better::Lower),
    kind("gap_p50_s", "gap p50", "ms", 1e3, Better::Lower),
    kind("gap_p95_s", "gap p95", "ms", 1e3, Better::Lower),
    kind("gap_p99_s", "gap p99", "ms", 1e3, Better::Lower),
    kind("tokens_per_second", "tokens/s", "1/s", 1.0, Better::Higher),
    // Replies of different length are no merit.
    kind("total_s", "total", "s", 1.0, Better::Neither),
    kind("tokens", "tokens", "", 1.0, Better::Neither),
    kind("reasoning_tokens", "reasoning", "", 1.0, Better::Neither),
    kind("prompt_tokens", "prompt", "", 1.0, Better::Neither),
    kind("cached_tokens", "cached", "", 1.0, Better::Higher),
    kind("accepted_tokens", "drafts accepted", "", 1.0, Better::Neither),
    kind("rejected_tokens", "drafts rejected", "", 1.0, Better::Neither),
    // Of the whole machine, and more for a longer reply.
    kind("energy_j", "energy", "J", 1.0, Better::Neither),
    kind("peak_bytes", "peak memory", "MiB", 1.0 / (1 << 20) as f64, Better::Lower),
];

const fn kind(
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    scale: f64,
    better: Better,
) -> Kind {
    Kind { name, title, unit, scale, better }
}

/// A results file.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    /// The run.
    pub run: Run,
    /// Measurements, in order.
    pub samples: Vec<Sample>,
    /// What was not measured.
    pub skips: Vec<Skip>,
    /// Answers of `eval`.
    pub items: Vec<Item>,
}

impl Results {
    /// Results without measurements yet.
    pub fn new(run: Run) -> Self {
        Self { run, samples: Vec::new(), skips: Vec::new(), items: Vec::new() }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read, is of another version, or a line is not what the schema says.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// As [`Results::read`].
    pub fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let (_, first) = lines.next().context("the file is empty")?;
        let version = serde_json::from_str(first)
            .ok()
            .and_then(|line: serde_json::Value| line["schema"].as_u64())
            .context("line 1: is not the `run` of a results file")?;
        ensure!(
            version == u64::from(SCHEMA),
            "the file has version {version} of the schema; this program reads version {SCHEMA}"
        );
        let Line::Run(run) = serde_json::from_str(first).context("line 1")? else {
            bail!("line 1: is not the `run` of a results file");
        };
        let mut results = Self::new(run);
        for (number, line) in lines {
            let line =
                serde_json::from_str(line).with_context(|| format!("line {}", number + 1))?;
            results.push(line);
        }
        Ok(results)
    }

    /// Adds a line. Figures are not kept: they follow from the samples.
    pub fn push(&mut self, line: Line) {
        match line {
            Line::Run(run) => self.run = run,
            Line::Sample(sample) => self.samples.push(sample),
            Line::Skip(skip) => self.skips.push(skip),
            Line::Item(item) => self.items.push(item),
            Line::Figure(_) => {}
        }
    }

    /// Scenarios and cases, in the order of their first measurement.
    pub fn rows(&self) -> Vec<(String, String)> {
        let mut rows: Vec<(String, String)> = Vec::new();
        for sample in &self.samples {
            if !rows
                .iter()
                .any(|(scenario, case)| *scenario == sample.scenario && *case == sample.case)
            {
                rows.push((sample.scenario.clone(), sample.case.clone()));
            }
        }
        // Cases of a scenario stand together, also if one was first measured in a later round.
        let first = |name: &str| rows.iter().position(|(scenario, _)| scenario == name);
        let mut order: Vec<_> = rows.clone();
        order.sort_by_key(|(scenario, _)| first(scenario));
        order
    }

    /// The measurements of a row and server.
    pub fn of<'a>(
        &'a self,
        server: &'a str,
        scenario: &'a str,
        case: &'a str,
    ) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| {
            sample.server == server && sample.scenario == scenario && sample.case == case
        })
    }

    /// Median and spread of a figure of a row and server, over complete replies.
    pub fn spread(&self, server: &str, scenario: &str, case: &str, figure: &str) -> Option<Spread> {
        let values: Vec<f64> = self
            .of(server, scenario, case)
            .filter_map(|sample| sample.figures.get(figure).copied())
            .collect();
        Spread::of(&values)
    }

    /// All summaries.
    pub fn figures(&self) -> Vec<Figure> {
        let mut figures = Vec::new();
        for (scenario, case) in self.rows() {
            for server in &self.run.servers {
                for kind in FIGURES {
                    let spread = self.spread(&server.name, &scenario, &case, kind.name);
                    figures.extend(spread.map(|spread| Figure {
                        server: server.name.clone(),
                        scenario: scenario.clone(),
                        case: case.clone(),
                        figure: kind.name.into(),
                        spread,
                    }));
                }
            }
        }
        figures
    }
}

/// Writes lines as they arise.
pub struct Writer(File);

impl Writer {
    /// A new file; one that is there is replaced.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn create(path: &Path, run: &Run) -> Result<Self> {
        let file = File::create(path).with_context(|| path.display().to_string())?;
        let mut writer = Self(file);
        writer.write(&Line::Run(run.clone()))?;
        Ok(writer)
    }

    /// Adds a line.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&mut self, line: &Line) -> Result<()> {
        let mut text = serde_json::to_string(line).context("a line as JSON")?;
        text.push('\n');
        // One call, so that an interrupted run ends with a whole line.
        self.0.write_all(text.as_bytes()).context("writing the results")
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Results of two servers over three rounds; the second is twice as slow.
    pub fn example() -> Results {
        let server = |name: &str| Server {
            name: name.into(),
            url: "http://127.0.0.1:1/v1".into(),
            model: "m".into(),
            version: Some("1".into()),
            fingerprint: None,
            context: Some(4096),
            pid: None,
            sentence_tokens: 11.0,
            counts_tokens: true,
        };
        let run = Run {
            schema: SCHEMA,
            tool: "suite".into(),
            started: "2026-01-01T00:00:00Z".into(),
            command: vec!["steersman-bench".into(), "suite".into()],
            version: "0.1.0".into(),
            commit: None,
            machine: Machine::default(),
            seed: 1,
            rounds: 3,
            quick: false,
            servers: vec![server("ours"), server("theirs <b>")],
        };
        let mut results = Results::new(run);
        for round in 0..3 {
            for (turn, (name, factor)) in
                [("ours", 1.0), ("theirs <b>", 2.0)].into_iter().enumerate()
            {
                let time = factor * [0.1, 0.11, 0.12][round];
                // More is better: here the first server loses.
                let rate = factor * 50.0;
                let figures = [("ttft_s", time), ("tokens_per_second", rate), ("total_s", time)];
                results.push(Line::Sample(Sample {
                    server: name.into(),
                    scenario: "short".into(),
                    case: "capital".into(),
                    round,
                    turn,
                    index: 0,
                    error: None,
                    correct: Some(round > 0),
                    notes: vec![],
                    tokens_from: Some("usage".into()),
                    figures: figures.map(|(name, value)| (name.to_owned(), value)).into(),
                }));
            }
        }
        results.push(Line::Skip(Skip {
            server: "ours".into(),
            scenario: "needle".into(),
            case: "32000".into(),
            reason: "does not fit".into(),
        }));
        results
    }

    fn lines(results: &Results) -> Vec<Line> {
        let run = [Line::Run(results.run.clone())];
        let samples = results.samples.iter().cloned().map(Line::Sample);
        let skips = results.skips.iter().cloned().map(Line::Skip);
        let figures = results.figures().into_iter().map(Line::Figure);
        run.into_iter().chain(samples).chain(skips).chain(figures).collect()
    }

    /// The text of a results file.
    pub fn text(results: &Results) -> String {
        let json = |line: &Line| serde_json::to_string(line).unwrap() + "\n";
        lines(results).iter().map(json).collect()
    }

    #[test]
    fn results_are_read_as_they_were_written() {
        let results = example();
        assert_eq!(Results::parse(&text(&results)).unwrap(), results);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let mut writer = Writer::create(&path, &results.run).unwrap();
        for line in &lines(&results)[1..] {
            writer.write(line).unwrap();
        }
        assert_eq!(Results::read(&path).unwrap(), results);
    }

    #[test]
    fn a_file_that_is_no_result_is_an_error_with_its_line() {
        let error = |text: &str| format!("{:#}", Results::parse(text).unwrap_err());
        assert!(error("").contains("empty"));
        assert!(error("{}").contains("line 1"));
        let good = text(&example());
        assert!(error(&format!("{good}{{\"kind\":\"other\"}}")).contains("line "));
        let newer = good.replacen("\"schema\":1", "\"schema\":2", 1);
        assert!(error(&newer).contains("version 2"), "{}", error(&newer));
    }

    #[test]
    fn figures_have_the_median_of_all_rounds() {
        let results = example();
        let spread = results.spread("ours", "short", "capital", "ttft_s").unwrap();
        assert!((spread.median - 0.11).abs() < 1e-12 && spread.n == 3);
        assert_eq!(results.spread("ours", "short", "capital", "peak_bytes"), None);
        assert_eq!(results.figures().len(), 6);
    }
}
