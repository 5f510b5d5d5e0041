//! The order of measurements: rounds, scenarios, cases, and servers in turn.
//!
//! Within a case the servers take turns with equal prompts, and the order of the turns alternates with
//! the round: slow drifts of the machine reach all servers alike. One server works at a time.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::client::{Client, ThinkingField};
use crate::machine::{Machine, commit, listening_pid, resident};
use crate::results::{Line, Results, Run, SCHEMA, Skip, Writer};
use crate::scenario::{Case, Plan, SCENARIOS, Scenario, Visit};
use crate::servers::{Found, ServerOptions};
use crate::{report, table};

/// How long a restarted server may take to load its model.
const RESTART: Duration = Duration::from_secs(600);

/// Restarts a server, and returns once it is ready.
pub type Restart<'a> = Box<dyn Fn() -> Result<()> + 'a>;

/// Options of `bench suite`. Servers are asked in turn, and the order alternates. Every request is
/// greedy and opens a connection of its own. README.md of server/bench describes the results.
#[derive(Args)]
pub struct SuiteOptions {
    #[command(flatten)]
    servers: ServerOptions,
    #[command(flatten)]
    what: WhatOptions,
    /// Command that restarts a server and returns once it is started; NAME= may be left out if there
    /// is one server
    #[arg(long, value_name = "NAME=CMD")]
    restart: Vec<String>,
    /// List the scenarios and do nothing else
    #[arg(long, exclusive = true)]
    list: bool,
}

/// What is measured, and where the results go.
#[derive(Args)]
pub struct WhatOptions {
    /// Scenarios to run [default: all, or the short ones with --quick]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    scenario: Vec<String>,
    /// Rounds [default: 3, or 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: Option<u16>,
    /// The short form of the short scenarios
    #[arg(long)]
    quick: bool,
    /// Seed of the prompts [default: the time, so that no prompt is in a cache]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Folder for results, plots and the report
    #[arg(long, value_name = "DIR", default_value = "bench-report")]
    out: PathBuf,
    /// Fail if an answer is wrong or a request fails
    #[arg(long)]
    check: bool,
}

/// Runs the suite.
pub fn run(options: &SuiteOptions, out: &mut impl Write) -> Result<()> {
    if options.list {
        return list(out);
    }
    options.what.check()?;
    let commands = options.restarts()?;
    let servers = options.servers.connect()?;
    let servers: Vec<_> = servers.iter().collect();
    let restarts: Vec<_> = commands
        .iter()
        .zip(&servers)
        .map(|(command, server)| {
            let (command, client) = (command.as_deref()?, &server.client);
            Some(Box::new(move || restart_server(client, command)) as Restart<'_>)
        })
        .collect();
    measure(&options.what, &servers, &restarts, Vec::new(), out)
}

/// Measures `servers`, which have `restarts` or none. `skips`: what is known not to be measured.
pub fn measure(
    what: &WhatOptions,
    servers: &[&Found],
    restarts: &[Option<Restart<'_>>],
    skips: Vec<Skip>,
    out: &mut impl Write,
) -> Result<()> {
    let scenarios = what.scenarios()?;
    let run = what.describe(servers);
    let (plan, rounds) = (what.plan(servers[0], run.seed), run.rounds);
    let path = what.out.join("results.jsonl");
    let mut file = Writer::create(&path, &run)?;
    let mut results = Results::new(run);
    for line in skips.into_iter().map(Line::Skip) {
        file.write(&line)?;
        results.push(line);
    }
    for round in 0..rounds {
        for scenario in &scenarios {
            for case in (scenario.cases)(&plan) {
                eprintln!("round {} of {rounds}: {} {}", round + 1, scenario.name, case.name);
                for (turn, at) in order(servers.len(), round).into_iter().enumerate() {
                    let restart = restarts.get(at).and_then(Option::as_deref);
                    let lines = visit(servers[at], restart, scenario, &case, plan, round, turn);
                    for line in lines {
                        file.write(&line)?;
                        results.push(line);
                    }
                }
            }
        }
    }
    for figure in results.figures() {
        file.write(&Line::Figure(figure))?;
    }
    table::write(&results, out)?;
    report::write(&results, &what.out)?;
    writeln!(out, "\nresults: {}", path.display())?;
    writeln!(out, "report:  {}", what.out.join("report.html").display())?;
    if what.check { check(&results) } else { Ok(()) }
}

fn list(out: &mut impl Write) -> Result<()> {
    for Scenario { name, about, quick, .. } in SCENARIOS {
        writeln!(out, "{name:10} {about}{}", if *quick { " (also with --quick)" } else { "" })?;
    }
    Ok(())
}

/// The servers' turns: the order of one round is the reverse of the round before.
fn order(servers: usize, round: usize) -> Vec<usize> {
    let order = 0..servers;
    if round.is_multiple_of(2) { order.collect() } else { order.rev().collect() }
}

/// One server's turn in a case.
fn visit(
    server: &Found,
    restart: Option<&dyn Fn() -> Result<()>>,
    scenario: &Scenario,
    case: &Case,
    plan: Plan,
    round: usize,
    turn: usize,
) -> Vec<Line> {
    let Found { client, about, .. } = server;
    let skip = |reason: String| {
        vec![Line::Skip(Skip {
            server: client.name.clone(),
            scenario: scenario.name.into(),
            case: case.name.clone(),
            reason,
        })]
    };
    // Prompts are made for the tokenizer of the first server; another one may need more tokens.
    let tokens =
        (case.tokens as f64 * (about.sentence_tokens / plan.sentence_tokens).max(1.0)) as usize;
    match client.context {
        Some(context) if tokens > context => {
            return skip(format!("needs {tokens} tokens, the context has {context}"));
        }
        _ => {}
    }
    if case.sets_thinking && client.thinking_field == ThinkingField::None {
        return skip("no field turns reasoning on (--thinking-by none)".into());
    }
    let mut visit = Visit {
        client,
        // After a restart the process is another one.
        pid: about.pid.filter(|pid| resident(*pid).is_some()).or_else(|| pid_of(client)),
        restart,
        scenario: scenario.name,
        seed: plan.seed,
        round,
        turn,
        lines: Vec::new(),
    };
    (case.run)(&mut visit);
    for line in &visit.lines {
        if let Line::Sample(sample) = line
            && let Some(error) = &sample.error
        {
            eprintln!("{}: {} {}: {error}", sample.server, sample.scenario, sample.case);
        }
    }
    visit.lines
}

/// The process of a server on this machine.
pub fn pid_of(client: &Client) -> Option<u32> {
    client.local_port().and_then(listening_pid)
}

fn restart_server(client: &Client, command: &str) -> Result<()> {
    let status = Command::new("sh").args(["-c", command]).status().context(command.to_owned())?;
    ensure!(status.success(), "{command}: {status}");
    client.wait_until_ready(RESTART)
}

impl WhatOptions {
    fn scenarios(&self) -> Result<Vec<&'static Scenario>> {
        if self.scenario.is_empty() {
            return Ok(SCENARIOS.iter().filter(|one| one.quick || !self.quick).collect());
        }
        let find = |name: &String| {
            SCENARIOS.iter().find(|one| one.name == name).with_context(|| {
                let names: Vec<_> = SCENARIOS.iter().map(|one| one.name).collect();
                format!("--scenario {name}: is not one of {}", names.join(", "))
            })
        };
        self.scenario.iter().map(find).collect()
    }

    /// Fails before servers are asked if the scenarios are unknown or the results have no place.
    pub fn check(&self) -> Result<()> {
        self.scenarios()?;
        std::fs::create_dir_all(&self.out).with_context(|| format!("--out {}", self.out.display()))
    }

    fn describe(&self, servers: &[&Found]) -> Run {
        let default_rounds = if self.quick { 1 } else { 3 };
        Run {
            servers: servers.iter().map(|server| server.about.clone()).collect(),
            rounds: self.rounds.map_or(default_rounds, usize::from),
            quick: self.quick,
            ..new_run("suite", self.seed)
        }
    }

    fn plan(&self, first: &Found, seed: u64) -> Plan {
        Plan {
            seed,
            quick: self.quick,
            sentence_tokens: first.about.sentence_tokens,
            tool_tokens: first.tool_tokens,
        }
    }
}

impl SuiteOptions {
    /// The restart command of each server.
    fn restarts(&self) -> Result<Vec<Option<String>>> {
        let names: Vec<_> = self.servers.against.iter().map(|one| one.name.as_str()).collect();
        let mut commands = vec![None; names.len()];
        for text in &self.restart {
            let named = text.split_once('=').and_then(|(name, command)| {
                Some((names.iter().position(|one| *one == name)?, command))
            });
            let (at, command) = match named {
                Some(found) => found,
                None if names.len() == 1 => (0, text.as_str()),
                None => bail!("--restart {text}: begins with none of {}=", names.join("=, ")),
            };
            commands[at] = Some(command.to_owned());
        }
        Ok(commands)
    }
}

/// A run that starts now, on this machine. Without a seed it has one from the clock.
pub fn new_run(tool: &str, seed: Option<u64>) -> Run {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Run {
        schema: SCHEMA,
        tool: tool.into(),
        started: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        command: std::env::args().collect(),
        version: env!("CARGO_PKG_VERSION").into(),
        commit: commit(),
        machine: Machine::this(),
        seed: seed.unwrap_or(now.as_secs()),
        rounds: 0,
        quick: false,
        servers: Vec::new(),
    }
}

/// Fails if an answer is wrong, a request failed, or nothing was measured.
fn check(results: &Results) -> Result<()> {
    ensure!(!results.samples.is_empty(), "nothing was measured");
    let problems: Vec<String> = results
        .samples
        .iter()
        .filter(|sample| sample.correct != Some(true))
        .map(|sample| {
            let why = sample.error.clone().unwrap_or_else(|| sample.notes.join("; "));
            format!("{}: {} {}: {why}", sample.server, sample.scenario, sample.case)
        })
        .collect();
    ensure!(
        problems.is_empty(),
        "{} of {} replies are wrong or missing:\n{}",
        problems.len(),
        results.samples.len(),
        problems.join("\n")
    );
    Ok(())
}

/// Writes a file of the report.
pub fn write_file(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    std::fs::write(&path, text).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::example;

    #[test]
    fn the_order_of_servers_alternates() {
        assert_eq!(
            [order(3, 0), order(3, 1), order(3, 2)],
            [vec![0, 1, 2], vec![2, 1, 0], vec![0, 1, 2]]
        );
    }

    #[test]
    fn wrong_answers_and_failed_requests_fail_a_check() {
        let mut results = example();
        let wrong = format!("{:#}", check(&results).unwrap_err());
        assert!(wrong.contains("2 of 6 replies are wrong"), "{wrong}");
        for sample in &mut results.samples {
            sample.correct = Some(true);
        }
        check(&results).unwrap();
        results.samples[0].correct = None;
        results.samples[0].error = Some("status 500: oops".into());
        assert!(check(&results).unwrap_err().to_string().contains("status 500: oops"));
        results.samples.clear();
        assert!(check(&results).is_err());
    }

    #[test]
    fn scenarios_have_different_names_and_cases_that_fit_their_plan() {
        let plan = Plan { seed: 1, quick: false, sentence_tokens: 11.0, tool_tokens: 120.0 };
        for (number, scenario) in SCENARIOS.iter().enumerate() {
            assert!(SCENARIOS[..number].iter().all(|other| other.name != scenario.name));
            for quick in [false, true] {
                let cases = (scenario.cases)(&Plan { quick, ..plan });
                assert!(!cases.is_empty() && cases.iter().all(|case| case.tokens > 0));
            }
        }
    }
}
