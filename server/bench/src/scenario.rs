//! Scenarios: what is asked, and how an answer is checked. [`SCENARIOS`] is the table.
//!
//! A scenario has cases. A case is run for one server after the other, with the same prompts. Prompts
//! differ between rounds, so that a prefix cache has only what the case itself put there.

mod history;
mod load;
mod single;
mod tools;

use std::time::Duration;

use crate::client::{Chat, Client};
use crate::prose::Pick;
use crate::results::{Line, Sample, Skip};
use crate::stream::{Reply, gap_figures};
use crate::watch::Watch;

pub use single::people;

/// A scenario.
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// What it measures.
    pub about: &'static str,
    /// Whether `--quick` runs it.
    pub quick: bool,
    /// Its cases.
    pub cases: fn(&Plan) -> Vec<Case>,
}

/// All scenarios, in order.
pub const SCENARIOS: &[Scenario] = &[
    row("short", "short questions, one after the other", true, single::short),
    row("long", "a story of up to 512 tokens", false, single::long),
    row("thinking", "the same questions with reasoning on and off", true, single::thinking),
    row("needle", "a code planted at 6 positions of texts of 4 lengths", true, single::needle),
    row("json", "an answer that must follow a JSON schema", true, single::json),
    row(
        "tools",
        "a tool schema of 12,000 tokens, cold, warm and after a restart",
        false,
        tools::schema,
    ),
    row("agent", "an agent loop of 20 tool calls in one conversation", true, tools::agent),
    row("session", "a session of 5 turns after a text", true, history::session),
    row("edit", "a conversation whose middle is edited", true, history::edit),
    row("streams", "1, 8 and 32 streams of mixed lengths at once", true, load::streams),
    row("cancel", "a short question after 16 clients hung up", true, load::cancel),
];

const fn row(
    name: &'static str,
    about: &'static str,
    quick: bool,
    cases: fn(&Plan) -> Vec<Case>,
) -> Scenario {
    Scenario { name, about, quick, cases }
}

/// What cases are made from.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Seed of all prompts.
    pub seed: u64,
    /// The short form.
    pub quick: bool,
    /// Tokens of a sentence, as the first server counts them.
    pub sentence_tokens: f64,
    /// Tokens of a tool, as the first server counts them.
    pub tool_tokens: f64,
}

impl Plan {
    /// Sentences of about so many tokens.
    pub fn sentences(&self, tokens: usize) -> usize {
        ((tokens as f64 / self.sentence_tokens) as usize).max(1)
    }

    /// Tools of about so many tokens.
    pub fn tools(&self, tokens: usize) -> usize {
        ((tokens as f64 / self.tool_tokens) as usize).max(1)
    }
}

/// A case of a scenario.
pub struct Case {
    /// Its name.
    pub name: String,
    /// Tokens of the longest prompt and its reply.
    pub tokens: usize,
    /// Whether it needs a field that turns reasoning on or off.
    pub sets_thinking: bool,
    /// Runs it for one server.
    pub run: Box<dyn Fn(&mut Visit)>,
}

impl Case {
    /// A case whose longest prompt and reply have so many tokens.
    pub fn new(name: impl Into<String>, tokens: usize, run: impl Fn(&mut Visit) + 'static) -> Self {
        Self { name: name.into(), tokens, sets_thinking: false, run: Box::new(run) }
    }
}

/// One server's turn in a case.
pub struct Visit<'a> {
    /// The server.
    pub client: &'a Client,
    /// Process of the server, if its memory can be read.
    pub pid: Option<u32>,
    /// Restarts the server; `None` if the run has no way to.
    pub restart: Option<&'a dyn Fn() -> anyhow::Result<()>>,
    /// Name of the scenario.
    pub scenario: &'a str,
    /// Seed of all prompts.
    pub seed: u64,
    /// The round.
    pub round: usize,
    /// Which server's turn it is in the round.
    pub turn: usize,
    /// What was measured.
    pub lines: Vec<Line>,
}

/// Whether an answer is right; otherwise what is wrong with it.
pub type Verdict = Result<(), String>;

impl Visit<'_> {
    /// Choices for the prompts of this round: the same for every server.
    pub fn pick(&self, case: &str) -> Pick {
        Pick::new(self.seed, &format!("{}/{case}/{}", self.scenario, self.round))
    }

    /// Sends one request, judges its answer and records both.
    pub fn ask(
        &mut self,
        case: &str,
        chat: &Chat,
        check: impl Fn(&Reply) -> Verdict,
    ) -> Option<Reply> {
        let watch = Watch::start(self.pid);
        let reply = self.client.chat(chat);
        let used = watch.stop();
        let mut sample = self.sample(case);
        let reply = match reply {
            Ok(reply) => reply,
            Err(failure) => {
                self.fail(sample, failure.to_string());
                return None;
            }
        };
        if let Some(failure) = reply.failure() {
            self.fail(sample, failure);
            return None;
        }
        sample.notes.extend(reply.note());
        sample.figures = figures(&reply);
        sample.figures.extend(used);
        sample.tokens_from = Some(tokens_from(reply.tokens().1));
        self.judge(sample, check(&reply));
        Some(reply)
    }

    /// An empty measurement.
    pub fn sample(&self, case: &str) -> Sample {
        let index = self.lines.iter().filter(|line| match line {
            Line::Sample(sample) => sample.case == case,
            _ => false,
        });
        Sample {
            server: self.client.name.clone(),
            scenario: self.scenario.into(),
            case: case.into(),
            round: self.round,
            turn: self.turn,
            index: index.count(),
            error: None,
            correct: None,
            notes: Vec::new(),
            tokens_from: None,
            figures: Default::default(),
        }
    }

    /// Records a measurement and whether its answer is right.
    pub fn judge(&mut self, mut sample: Sample, verdict: Verdict) {
        sample.correct = Some(verdict.is_ok());
        sample.notes.extend(verdict.err());
        self.lines.push(Line::Sample(sample));
    }

    /// Records a measurement that has no reply.
    pub fn fail(&mut self, mut sample: Sample, error: String) {
        sample.error = Some(error);
        self.lines.push(Line::Sample(sample));
    }

    /// Records what is not measured.
    pub fn skip(&mut self, case: &str, reason: impl Into<String>) {
        self.lines.push(Line::Skip(Skip {
            server: self.client.name.clone(),
            scenario: self.scenario.into(),
            case: case.into(),
            reason: reason.into(),
        }));
    }
}

/// How tokens were counted, as results say it.
pub fn tokens_from(is_usage: bool) -> String {
    if is_usage { "usage" } else { "chunks" }.into()
}

/// The figures of a complete reply.
fn figures(reply: &Reply) -> std::collections::BTreeMap<String, f64> {
    let usage = reply.usage.unwrap_or_default();
    let count = |tokens: Option<u64>| tokens.map(|tokens| tokens as f64);
    let values = [
        ("ttft_s", reply.first().as_ref().map(Duration::as_secs_f64)),
        ("tokens_per_second", reply.tokens_per_second()),
        ("total_s", Some(reply.total.as_secs_f64())),
        ("tokens", count(Some(reply.tokens().0))),
        ("reasoning_tokens", count(usage.reasoning)),
        ("prompt_tokens", count(usage.prompt)),
        ("cached_tokens", count(usage.cached)),
        ("accepted_tokens", count(usage.accepted)),
        ("rejected_tokens", count(usage.rejected)),
    ];
    let values = values.into_iter().filter_map(|(name, value)| Some((name, value?)));
    values.chain(gap_figures(&reply.gaps())).map(|(name, value)| (name.into(), value)).collect()
}

/// Right if the answer has a word, whatever its case.
pub fn has_word(reply: &Reply, word: &str) -> Verdict {
    let is_part = |c: char| c.is_alphanumeric();
    let answer = reply.answer.to_lowercase();
    let found = answer.split(|c| !is_part(c)).any(|part| part == word.to_lowercase());
    found
        .then_some(())
        .ok_or_else(|| format!("the answer lacks {word}: {}", excerpt(&reply.answer)))
}

/// The beginning of a text, for notes.
pub fn excerpt(text: &str) -> String {
    let short: String = text.chars().take(160).collect();
    if short.len() < text.len() { format!("{short:?}..") } else { format!("{short:?}") }
}
