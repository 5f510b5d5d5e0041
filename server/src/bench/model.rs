//! `steersman bench model`: the times of a model's passes in this process, as a table and as JSON.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use clap::builder::PossibleValuesParser;
use indicatif::ProgressBar;
use serde::Serialize;
use steersman_engine::config::Config;
use steersman_engine::tools::passes::{self, Case, Measured, Plan, Times};
use steersman_models::facts::Facts;

use super::shape;
use crate::hub::Found;
use crate::ranks::{On, Over};
use crate::verify::load_on;

/// What is measured.
#[derive(Args, Debug)]
pub struct Options {
    /// Model to measure: a local folder or a Hugging Face repo id [default: the configured model, or else
    /// the bundled one]
    #[arg(value_name = "PATH|REPO")]
    pub model: Option<String>,
    /// Measure random weights with the dimensions of a published model, which are written once to the data
    /// folder
    #[arg(long, value_name = "NAME", conflicts_with = "model", value_parser = PossibleValuesParser::new(shape::names()))]
    pub shape: Option<String>,
    /// Lengths of prompts
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "64,512,2048")]
    prefill: Vec<usize>,
    /// Tokens before steps of one sequence
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "64,2048")]
    contexts: Vec<usize>,
    /// Rows of passes that verify drafts
    #[arg(long, value_name = "ROWS", value_delimiter = ',', default_value = "1,2,4,8")]
    rows: Vec<usize>,
    /// Numbers of sequences that step together
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "8,32")]
    streams: Vec<usize>,
    /// Measurements of each
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Compute with this many ranks: processes of this machine, each of which has a part of the weights
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64), value_name = "COUNT")]
    pub ranks: u32,
    /// What carries the arrays of several ranks [default: nccl on NVIDIA GPUs, ring otherwise]
    #[arg(long, value_enum)]
    pub over: Option<Over>,
    /// File for all measurements, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Rows of hidden states whose sums over ranks are measured: of a step, of several sequences, and of a prompt.
const SUMS: [usize; 3] = [1, 32, 512];

/// What the JSON file has.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    version: &'static str,
    ranks: u32,
    /// Bytes of the weights that a token reads on each rank.
    token_bytes: u64,
    /// Bytes a second that the device reads, if it was measured.
    bandwidth: Option<f64>,
    measured: &'a [Measured],
}

/// Measures the model in `found` on the ranks that compute, prints a table, and writes the JSON file if one is asked for.
///
/// # Errors
/// When the model cannot be loaded or run, or the file cannot be written.
pub fn run(
    mut config: Config,
    found: &Found,
    data_dir: &Path,
    options: &Options,
    on: On,
) -> Result<()> {
    let Options { prefill, contexts, rows, streams, rounds, ranks, json, .. } = options;
    for (option, sizes) in
        [("--prefill", prefill), ("--contexts", contexts), ("--rows", rows), ("--streams", streams)]
    {
        ensure!(sizes.iter().all(|size| *size > 0), "{option} has a 0; sizes are at least 1");
    }
    // No drafts: their costs would be measured before.
    config.speculation.drafts.clear();
    let token_bytes = Facts::read(&found.folder)?.token_bytes / u64::from(*ranks);
    let policies = steersman_engine::policies(&config, data_dir)?;
    let mut decoder = load_on(on, config, found, data_dir, policies)?;
    let plan = Plan {
        prefill: prefill.clone(),
        contexts: contexts.clone(),
        rows: rows.clone(),
        streams: streams.clone(),
        sums: if *ranks > 1 { SUMS.into() } else { Vec::new() },
        rounds: *rounds as usize,
    };
    let bandwidth = passes::measure_bandwidth(&decoder)?;
    let bar = ProgressBar::new(0).with_message("measurements");
    let measured = passes::measure_passes(&mut decoder, &plan, |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    print(&measured, token_bytes, bandwidth, &mut std::io::stdout().lock())?;
    if let Some(path) = json {
        let model = &found.folder.display().to_string();
        let version = env!("CARGO_PKG_VERSION");
        let report =
            Report { model, version, ranks: *ranks, token_bytes, bandwidth, measured: &measured };
        let text = serde_json::to_vec_pretty(&report)?;
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Tokens that a pass computes.
fn tokens(case: Case) -> usize {
    match case {
        Case::Decode(_) => 1,
        Case::Prefill(tokens)
        | Case::Verify(tokens)
        | Case::Streams(tokens)
        | Case::Sum(tokens) => tokens,
    }
}

fn print(
    measured: &[Measured],
    token_bytes: u64,
    bandwidth: Option<f64>,
    out: &mut impl Write,
) -> Result<()> {
    write!(out, "\nweights that a token reads: {:.3} GB", token_bytes as f64 / 1e9)?;
    if let Some(bandwidth) = bandwidth {
        write!(out, "; the device reads {:.0} GB/s", bandwidth / 1e9)?;
    }
    writeln!(out, "\nmedian milliseconds of a pass [least-most], and its parts\n")?;
    writeln!(
        out,
        "{:<20} {:>26} {:>9} {:>8} {:>8} {:>8} {:>10} {:>14} {:>8}",
        "", "", "tokens/s", "build", "encode", "wait", "operations", "weights", "peak"
    )?;
    let one_row = measured.iter().find(|measured| measured.case == Case::Verify(1)).map(total);
    for own in measured {
        let (case, spread) = (own.case, total(own));
        let name = match case {
            Case::Prefill(tokens) => format!("prefill of {tokens}"),
            Case::Decode(context) => format!("step after {context}"),
            Case::Verify(1) => "verify 1 row".into(),
            Case::Verify(rows) => format!("verify {rows} rows"),
            Case::Streams(1) => "1 stream".into(),
            Case::Streams(count) => format!("{count} streams"),
            Case::Sum(1) => "sum of 1 row".into(),
            Case::Sum(rows) => format!("sum of {rows} rows"),
        };
        let part = |of: fn(&Times) -> f64| {
            let values: Vec<f64> = own.times.iter().map(|times| 1e3 * of(times)).collect();
            Spread::new(values).median
        };
        let range = format!("{:.3} [{:.3}-{:.3}]", spread.median, spread.min, spread.max);
        let rate = tokens(case) as f64 / spread.median * 1e3;
        let read = token_bytes as f64 / spread.median * 1e3;
        let share = bandwidth.map_or(String::new(), |all| format!(" {:.0} %", 100.0 * read / all));
        let reads = match case {
            Case::Prefill(_) | Case::Sum(_) => String::new(),
            _ => format!("{:.0} GB/s{share}", read / 1e9),
        };
        let operations = match own.operations {
            0 => "-".into(),
            count => count.to_string(),
        };
        write!(
            out,
            "{name:<20} {range:>26} {rate:>9.1} {:>8.3} {:>8.3} {:>8.3} {operations:>10} {reads:>14} {:>8}",
            part(|times| times.build),
            part(|times| times.encode),
            part(|times| times.wait),
            format!("{:.2} GB", own.peak_bytes as f64 / 1e9),
        )?;
        if let (Case::Verify(2..), Some(one)) = (case, one_row) {
            write!(out, "  {:.2} times 1 row", spread.median / one.median)?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Milliseconds of a pass.
fn total(measured: &Measured) -> Spread {
    Spread::new(measured.times.iter().map(|times| 1e3 * times.total).collect())
}

/// Median and range of the rounds of one figure.
#[derive(Clone, Copy)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    /// The spread of `values`, of which there is at least one: a plan has a round.
    fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let last = values.len() - 1;
        let median = (values[last / 2] + values[last.div_ceil(2)]) / 2.0;
        Self { median, min: values[0], max: values[last] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_rates_and_ratios() {
        let own = |case, ms: f64| Measured {
            case,
            times: vec![Times { total: ms / 1e3, build: 0.0005, encode: 0.0, wait: 0.001 }; 3],
            operations: 7,
            peak_bytes: 2_000_000_000,
        };
        let measured = [
            own(Case::Prefill(512), 50.0),
            own(Case::Decode(64), 2.5),
            own(Case::Verify(1), 2.0),
            own(Case::Verify(4), 2.2),
            own(Case::Streams(32), 8.0),
        ];
        let mut out = Vec::new();
        print(&measured, 5_000_000_000, Some(4e12), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(text.contains("weights that a token reads: 5.000 GB; the device reads 4000 GB/s"));
        assert!(line("prefill of 512").contains("50.000 [50.000-50.000]"), "{text}");
        assert!(line("prefill of 512").contains(" 10240.0 "), "{text}");
        assert!(line("step after 64").contains("2000 GB/s 50 %"), "{text}");
        assert!(line("verify 4 rows").ends_with("1.10 times 1 row"), "{text}");
        assert!(!line("verify 1 row").contains("times"), "{text}");
        assert!(line("32 streams").contains(" 4000.0 "), "{text}");
    }
}
