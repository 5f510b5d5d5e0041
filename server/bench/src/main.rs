//! The program `steersman-bench`, which `steersman bench` and `steersman eval` run.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use steersman_bench::{EvalOptions, Task, run, run_eval};

/// Measures servers with OpenAI's chat completions, and the answers of their models.
#[derive(Parser)]
#[command(name = "steersman-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Bench(Task),
    /// Ask generated questions of ten tasks and grade the answers by rules
    Eval(EvalOptions),
}

fn main() -> ExitCode {
    let out = &mut std::io::stdout().lock();
    let done = match Cli::parse().command {
        Command::Bench(task) => run(task, out),
        Command::Eval(options) => run_eval(&options, out),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
