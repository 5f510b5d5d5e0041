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
    #[command(
        after_help = "Example:\n  steersman eval --items 5 --against ours=http://127.0.0.1:11436 --matrix thinking=on,off"
    )]
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_help_of_every_command_has_an_example_that_works() {
        let cli = Cli::command();
        for command in cli.get_subcommands() {
            let name = command.get_name();
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = help.strip_prefix("Example:\n");
            let example = example.unwrap_or_else(|| panic!("{name} has no example"));
            let words: Vec<_> = example.split_whitespace().collect();
            let called: &[&str] = match name {
                "eval" => &["steersman"],
                _ => &["steersman", "bench"],
            };
            assert!(words.starts_with(called) && words[called.len()] == name, "{example}");
            let parsed = Cli::try_parse_from(&words[called.len() - 1..]);
            assert!(parsed.is_ok(), "{example}: {:?}", parsed.err());
        }
    }
}
