//! `steersman eval`: generated questions of ten tasks, or those of a file, graded by rules, without a judge model.
//!
//! A run is one server with one setting of reasoning and one profile. All runs get equal items, so two
//! runs are compared item by item, with McNemar's exact test.

mod grade;
mod sandbox;
mod sql;
mod suite;
mod task;

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::Args;

use crate::client::{Chat, Client, ThinkingField};
use crate::results::{Item, Line, Results, Skip, Writer};
use crate::scenario::tokens_from;
use crate::servers::ServerOptions;
use crate::stats::{mcnemar, wilson};
use crate::suite::new_run;
use crate::table::{columns_of, counted, write_each};
use suite::FileTask;
use task::{Question, TASKS, Task};

/// Answers are decoded greedily. README.md of server/bench describes tasks and results.
#[derive(Args)]
pub struct EvalOptions {
    #[command(flatten)]
    servers: ServerOptions,
    /// Seed of the items
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "suite")]
    seed: u64,
    /// Items of each task [default: 20, or all of a file]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    items: Option<u16>,
    /// File of questions instead of the generated ones, a JSON object a line
    #[arg(long, value_name = "FILE")]
    suite: Option<PathBuf>,
    /// Tasks to run [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    task: Vec<String>,
    /// Settings to run with each other: thinking=on,off,default or profile=NAME,.. (of a Steersman
    /// server). Can be repeated; `thinking` alone is thinking=on,off
    #[arg(long, value_name = "WHAT=VALUES", value_parser = axis)]
    matrix: Vec<Axis>,
    /// Most tokens of a reply, reasoning included
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// File for the results
    #[arg(long, value_name = "FILE", default_value = "eval.jsonl")]
    out: PathBuf,
}

/// Values of one setting.
#[derive(Clone, Debug, PartialEq)]
enum Axis {
    Thinking(Vec<Option<bool>>),
    Profile(Vec<String>),
}

fn axis(text: &str) -> Result<Axis, String> {
    let (name, values) = text.split_once('=').unwrap_or((text, "on,off"));
    let values: Vec<&str> = values.split(',').filter(|value| !value.is_empty()).collect();
    if values.is_empty() || (name == "profile" && !text.contains('=')) {
        return Err("has no values".into());
    }
    match name {
        "thinking" => {
            values.into_iter().map(thinking).collect::<Result<_, _>>().map(Axis::Thinking)
        }
        "profile" => Ok(Axis::Profile(values.into_iter().map(str::to_owned).collect())),
        _ => Err("is not thinking=.. or profile=..".into()),
    }
}

fn thinking(value: &str) -> Result<Option<bool>, String> {
    match value {
        "on" => Ok(Some(true)),
        "off" => Ok(Some(false)),
        "default" => Ok(None),
        _ => Err(format!("thinking={value}: is not on, off or default")),
    }
}

fn thinking_name(thinking: Option<bool>) -> &'static str {
    match thinking {
        Some(true) => "on",
        Some(false) => "off",
        None => "default",
    }
}

/// Items of a generated task, unless the command says how many.
const ITEMS: u16 = 20;

/// A task to run.
struct Asked {
    name: String,
    runs_code: bool,
    /// Number of questions.
    count: usize,
    /// Generated ones are made when their turn comes.
    questions: Box<dyn Iterator<Item = Question>>,
}

/// One server with one setting.
struct Setting {
    client: Client,
    thinking: Option<bool>,
}

/// Runs the evaluation.
pub fn run(options: &EvalOptions, out: &mut impl Write) -> Result<()> {
    let tasks = options.tasks()?;
    let servers = options.servers.connect()?;
    let clients = servers.iter().map(|server| server.client.clone()).collect();
    let settings = options.settings(clients)?;
    // The items of a file have no seed.
    let mut run = new_run("eval", options.suite.is_none().then_some(options.seed));
    run.rounds = tasks.iter().map(|task| task.count).max().unwrap_or(0);
    run.servers = servers.into_iter().map(|server| server.about).collect();
    let mut file = Writer::create(&options.out, &run)?;
    let mut results = Results::new(run);
    let can_run_code = sandbox::is_available();
    for task in tasks {
        if task.runs_code && !can_run_code {
            let skip = |setting: &Setting| Skip {
                server: setting.client.name.clone(),
                scenario: "eval".into(),
                case: task.name.clone(),
                reason: "running code needs python3 with its module `resource`".into(),
            };
            for setting in &settings {
                let line = Line::Skip(skip(setting));
                file.write(&line)?;
                results.push(line);
            }
            continue;
        }
        for (number, question) in task.questions.enumerate() {
            eprint!("\r{}: {} of {}    ", task.name, number + 1, task.count);
            // The order of runs alternates, as in the suite.
            let mut order: Vec<&Setting> = settings.iter().collect();
            if !number.is_multiple_of(2) {
                order.reverse();
            }
            for setting in order {
                let max_tokens = options.max_tokens as usize;
                let item = ask(setting, &task.name, number, &question, max_tokens);
                let line = Line::Item(item);
                file.write(&line)?;
                results.push(line);
            }
        }
        eprintln!();
    }
    write(&results, out)?;
    writeln!(out, "\nresults: {}", options.out.display())?;
    Ok(())
}

impl EvalOptions {
    /// The tasks to run, with as many items as were asked for.
    fn tasks(&self) -> Result<Vec<Asked>> {
        let all: Vec<Asked> = match &self.suite {
            Some(path) => suite::read(path)?.into_iter().map(|task| self.of_file(task)).collect(),
            None => TASKS.iter().map(|task| self.generated(task)).collect(),
        };
        let names: Vec<String> = all.iter().map(|task| task.name.clone()).collect();
        if let Some(unknown) = self.task.iter().find(|name| !names.contains(name)) {
            bail!("--task {unknown}: is not one of {}", names.join(", "));
        }
        let is_asked = |task: &Asked| self.task.is_empty() || self.task.contains(&task.name);
        Ok(all.into_iter().filter(is_asked).collect())
    }

    fn generated(&self, task: &'static Task) -> Asked {
        let (seed, count) = (self.seed, usize::from(self.items.unwrap_or(ITEMS)));
        let questions = Box::new((0..count).map(move |number| task.item(seed, number)));
        Asked { name: task.name.into(), runs_code: task.runs_code, count, questions }
    }

    fn of_file(&self, task: FileTask) -> Asked {
        let FileTask { name, runs_code, questions } = task;
        let count = self.items.map_or(usize::MAX, usize::from).min(questions.len());
        Asked { name, runs_code, count, questions: Box::new(questions.into_iter().take(count)) }
    }

    fn settings(&self, clients: Vec<Client>) -> Result<Vec<Setting>> {
        let (mut thinking, mut profiles) = (vec![None], vec![None]);
        for axis in &self.matrix {
            match axis {
                Axis::Thinking(values) => thinking.clone_from(values),
                Axis::Profile(names) => profiles = names.iter().cloned().map(Some).collect(),
            }
        }
        if thinking != [None] && self.servers.thinking_by == ThinkingField::None {
            bail!("--matrix thinking needs a field: choose --thinking-by kwargs or effort");
        }
        let mut settings = Vec::new();
        for client in clients {
            for profile in &profiles {
                for &thinking in &thinking {
                    let mut client = client.clone();
                    client.profile.clone_from(profile);
                    settings.push(Setting { client, thinking });
                }
            }
        }
        ensure!(!settings.is_empty(), "--matrix leaves nothing to run");
        Ok(settings)
    }
}

fn ask(
    Setting { client, thinking }: &Setting,
    task: &str,
    number: usize,
    question: &Question,
    max_tokens: usize,
) -> Item {
    let chat = Chat {
        messages: question.messages.clone(),
        max_tokens,
        thinking: *thinking,
        ..Chat::default()
    };
    let text = question.messages.last().and_then(|message| message["content"].as_str());
    let mut item = Item {
        server: client.name.clone(),
        thinking: thinking_name(*thinking).into(),
        profile: client.profile.clone(),
        used_profile: None,
        task: task.into(),
        item: number,
        about: question.about.clone(),
        correct: false,
        error: None,
        problem: None,
        question: text.unwrap_or_default().into(),
        answer: String::new(),
        tokens: 0,
        tokens_from: tokens_from(false),
        total_s: 0.0,
    };
    let reply = match client.chat(&chat) {
        Ok(reply) => reply,
        Err(failure) => {
            item.error = Some(failure.to_string());
            return item;
        }
    };
    let (tokens, is_usage) = reply.tokens();
    item.tokens = tokens;
    item.tokens_from = tokens_from(is_usage);
    item.total_s = reply.total.as_secs_f64();
    item.used_profile.clone_from(&reply.profile);
    item.error = reply.failure();
    if item.error.is_none() {
        let verdict = (question.grade)(&reply.answer);
        item.correct = verdict.is_ok();
        item.problem = verdict.err();
    }
    item.answer = reply.answer;
    item
}

/// Name of a run in tables.
fn run_name(item: &Item) -> String {
    let profile = item.profile.as_ref().map_or(String::new(), |profile| format!("@{profile}"));
    format!("{}{profile} thinking {}", item.server, item.thinking)
}

/// Names in the order of the first item.
fn names(results: &Results, name: impl Fn(&Item) -> String) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for item in &results.items {
        let name = name(item);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.sort();
    names
}

/// The items of a run, by task and number.
fn items_of<'a>(results: &'a Results, run: &str) -> Vec<&'a Item> {
    let mut items: Vec<&Item> = results.items.iter().filter(|item| run_name(item) == run).collect();
    items.sort_by(|a, b| (&a.task, a.item).cmp(&(&b.task, b.item)));
    items
}

/// Writes the tables: right answers with intervals, and runs compared in pairs.
fn write(results: &Results, out: &mut impl Write) -> Result<()> {
    let runs = names(results, run_name);
    // Generated tasks in the order of their table, then those of a file.
    let generated: Vec<String> = TASKS.iter().map(|task| task.name.to_owned()).collect();
    let of_file = names(results, |item| item.task.clone());
    let others: Vec<String> =
        of_file.into_iter().filter(|name| !generated.contains(name)).collect();
    let all_tasks: Vec<String> = [generated, others].concat();
    let mut rows = vec![[vec![String::new()], runs.clone()].concat()];
    let has_items = |task: &&str| results.items.iter().any(|item| item.task == **task);
    let tasks = all_tasks.iter().map(String::as_str).filter(has_items);
    for task in tasks.chain(["all"]) {
        let mut row = vec![task.to_owned()];
        for run in &runs {
            let items = items_of(results, run);
            let items: Vec<_> =
                items.into_iter().filter(|item| task == "all" || item.task == task).collect();
            row.push(share(&items));
        }
        rows.push(row);
    }
    let mut tokens = vec!["tokens a reply".to_owned()];
    let mut profiles = vec!["profile used".to_owned()];
    for run in &runs {
        let items = items_of(results, run);
        let sum: u64 = items.iter().map(|item| item.tokens).sum();
        let by_chunks =
            items.iter().any(|item| item.tokens_from == "chunks" && item.error.is_none());
        let from = if by_chunks { " (chunks)" } else { "" };
        tokens.push(format!("{:.0}{from}", sum as f64 / items.len().max(1) as f64));
        let mut used: Vec<&str> =
            items.iter().filter_map(|item| item.used_profile.as_deref()).collect();
        used.sort_unstable();
        used.dedup();
        profiles.push(if used.is_empty() { "not told".into() } else { used.join(", ") });
    }
    rows.extend([tokens, profiles]);
    columns_of(&rows, out)?;
    writeln!(
        out,
        "\nright of all, with Wilson intervals of 95 %; a failed request counts as wrong"
    )?;
    for (number, a) in runs.iter().enumerate() {
        for b in &runs[number + 1..] {
            writeln!(out, "{}", pair(a, &items_of(results, a), b, &items_of(results, b)))?;
        }
    }
    let failed = results.items.iter().filter_map(|item| {
        item.error.as_ref().map(|error| format!("failed: {}: {error}", run_name(item)))
    });
    let skipped = results
        .skips
        .iter()
        .map(|skip| format!("skipped: {}: {}: {}", skip.server, skip.case, skip.reason));
    write_each(counted(failed.chain(skipped)), out)
}

/// Right answers of all, with their interval, and failures.
fn share(items: &[&Item]) -> String {
    let right = items.iter().filter(|item| item.correct).count();
    let failed = items.iter().filter(|item| item.error.is_some()).count();
    let (low, high) = wilson(right, items.len());
    let failed = if failed > 0 { format!(", {failed} failed") } else { String::new() };
    format!("{right}/{} [{:.0}-{:.0} %]{failed}", items.len(), 100.0 * low, 100.0 * high)
}

/// A sentence that compares two runs on the items that both have.
fn pair(a: &str, items_a: &[&Item], b: &str, items_b: &[&Item]) -> String {
    let (mut only_a, mut only_b, mut both) = (0, 0, 0);
    for one in items_a {
        let equal = |other: &&&Item| {
            other.task == one.task && other.item == one.item && other.question == one.question
        };
        let Some(other) = items_b.iter().find(equal) else { continue };
        both += 1;
        only_a += usize::from(one.correct && !other.correct);
        only_b += usize::from(other.correct && !one.correct);
    }
    format!(
        "{a} and {b}: {both} equal items, {only_a} right only in the first, {only_b} only in the \
         second, p = {:.3} (McNemar, exact)",
        mcnemar(only_a, only_b)
    )
}

/// Compares the runs of two files, and says whether there was anything to compare.
pub fn diff(a: &Results, b: &Results, out: &mut impl Write) -> Result<bool> {
    let (runs_a, runs_b) = (names(a, run_name), names(b, run_name));
    let pairs: Vec<(&String, &String)> = match (&runs_a[..], &runs_b[..]) {
        ([one], [other]) => vec![(one, other)],
        _ => runs_a
            .iter()
            .filter_map(|run| Some((run, runs_b.iter().find(|b| *b == run)?)))
            .collect(),
    };
    for (run_a, run_b) in &pairs {
        let (items_a, items_b) = (items_of(a, run_a), items_of(b, run_b));
        writeln!(out, "A: {run_a}: {}", share(&items_a))?;
        writeln!(out, "B: {run_b}: {}", share(&items_b))?;
        writeln!(out, "{}", pair("A", &items_a, "B", &items_b))?;
    }
    Ok(!pairs.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::example;

    fn item(thinking: &str, number: usize, correct: bool) -> Item {
        Item {
            server: "ours".into(),
            thinking: thinking.into(),
            profile: Some("agent".into()),
            used_profile: Some("agent".into()),
            task: "needle".into(),
            item: number,
            about: None,
            correct,
            error: (number == 0).then(|| "status 500: oops".into()),
            problem: None,
            question: format!("{number}?"),
            answer: String::new(),
            tokens: 10,
            tokens_from: "usage".into(),
            total_s: 0.1,
        }
    }

    fn results() -> Results {
        let mut results = example();
        results.samples.clear();
        // Item 0 is wrong in both, 1 to 7 are right with reasoning only, 8 and 9 in both.
        for number in 0..10 {
            results.push(Line::Item(item("on", number, number > 0)));
            results.push(Line::Item(item("off", number, number > 7)));
        }
        results
    }

    #[test]
    fn runs_are_compared_item_by_item() {
        let mut text = Vec::new();
        write(&results(), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("9/10 [60-98 %], 1 failed"), "{text}");
        assert!(text.contains("2/10 [6-51 %], 1 failed"), "{text}");
        let expected = "10 equal items, 0 right only in the first, 7 only in the second, p = 0.016";
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("failed: ours@agent thinking on: status 500: oops\n"), "{text}");
        assert!(text.contains("ours@agent thinking on") && text.contains("profile used"), "{text}");
    }

    #[test]
    fn other_items_are_not_compared() {
        let mut other = results();
        for item in &mut other.items {
            item.question += " of another seed";
        }
        let mut text = Vec::new();
        assert!(diff(&results(), &other, &mut text).unwrap());
        assert!(String::from_utf8(text).unwrap().contains("0 equal items"));
    }

    #[test]
    fn a_matrix_names_settings_and_their_values() {
        assert_eq!(axis("thinking"), Ok(Axis::Thinking(vec![Some(true), Some(false)])));
        assert_eq!(axis("thinking=default"), Ok(Axis::Thinking(vec![None])));
        assert_eq!(axis("profile=a,b"), Ok(Axis::Profile(vec!["a".into(), "b".into()])));
        for wrong in ["profile", "profile=", "thinking=maybe", "model=x"] {
            assert!(axis(wrong).is_err(), "{wrong}");
        }
    }
}
