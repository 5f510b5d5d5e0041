//! `steersman bench` and `steersman eval`: the speed of servers and the answers of models.
//!
//! A client of any server with OpenAI's chat completions. [`scenario`] is what is asked, [`suite`]
//! the order in which servers are asked, [`results`] the schema of what is kept, [`report`] and
//! [`diff`] read it again; [`eval`] grades answers; [`peers`] installs and starts other servers.
//! The crate links no MLX.

mod client;
mod diff;
mod eval;
mod machine;
mod peers;
mod plot;
mod prose;
mod report;
mod results;
mod scenario;
mod servers;
mod stats;
mod stream;
mod suite;
mod table;
mod watch;

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use clap::Subcommand;

pub use eval::EvalOptions;

/// The commands of `steersman bench`.
#[derive(Subcommand)]
pub enum Task {
    /// Run scenarios against one or more servers in turn, and write results, plots and a report
    #[command(
        after_help = "Example:\n  steersman bench suite --quick --against ours=http://127.0.0.1:11436 --against theirs=http://127.0.0.1:8080"
    )]
    Suite(suite::SuiteOptions),
    /// Install other servers, start them and this one on a model, and run the suite against all
    #[command(
        after_help = "Example:\n  steersman bench peers --model Qwen3.5-4B-MLX-4bit --scenario short,long"
    )]
    Peers(peers::PeersOptions),
    /// Compare two results files, figure by figure
    #[command(
        after_help = "Example:\n  steersman bench diff before/results.jsonl after/results.jsonl"
    )]
    Diff {
        /// The results that are compared with
        a: PathBuf,
        /// The results that are compared
        b: PathBuf,
    },
    /// Write the report of results files again
    #[command(
        after_help = "Example:\n  steersman bench report before/results.jsonl after/results.jsonl --out both"
    )]
    Report {
        /// Results files; servers and scenarios of later files are added to those of the first
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Folder for the report and its plots
        #[arg(long, value_name = "DIR", default_value = "bench-report")]
        out: PathBuf,
    },
}

/// Runs a command of `steersman bench` and writes its output to `out`.
///
/// # Errors
/// When an option is wrong, a server does not answer at the start, a file cannot be read or written,
/// or with `--check` a reply is wrong or missing.
pub fn run(task: Task, out: &mut impl Write) -> Result<()> {
    match task {
        Task::Suite(options) => suite::run(&options, out),
        Task::Peers(options) => peers::run(&options, out),
        Task::Diff { a, b } => diff::run(&a, &b, out),
        Task::Report { files, out: folder } => report::run(&files, &folder, out),
    }
}

/// Runs `steersman eval` and writes its output to `out`.
///
/// # Errors
/// When an option is wrong, a server does not answer at the start, or a file cannot be written.
pub fn run_eval(options: &EvalOptions, out: &mut impl Write) -> Result<()> {
    eval::run(options, out)
}
