//! `steersman policy sim`: what a policy would have done to replies that exist, without a model.
//!
//! A reply is cut into words, which stand for its tokens, and the policy is called as the engine would call it:
//! with its plan, its steps, the text of the answer on its way to the client, the loops that the engine's detector
//! finds in the words, and the budget of reasoning. What a policy ends or cuts is counted. What it adds or bans
//! changes what a model would have written, which nobody knows here: the reply continues as it was, and the
//! action is counted.
//!
//! # Why
//! Words are not tokens; most tokenizers make three tokens of two words of English. Shares of a reply, places
//! and decisions are what a corpus can tell; exact counts are what `replay` of a trace tells.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use clap::Args;
use serde::Deserialize;
use steersman_policy_host::events::Watch;
use steersman_policy_host::loops::Detector;
use steersman_policy_host::{
    Action, Call, Component, Context, Golden, Hook, Instance, Observations, Phase, Plan, Policy,
    PromptView, RequestView, Step, Summary, TextVerdict, TextView, Texts,
};

use super::param::{self, Param};

/// Tokens that the context of the model still holds.
const CONTEXT_LEFT: u32 = 1 << 20;

/// The corpus.
#[derive(Args)]
pub struct Options {
    /// Replies, one JSON object a line: `text` is the answer; `reasoning`, `user` and `system` may be given. Or
    /// a trace with texts (`trace_text = true`)
    corpus: PathBuf,
    /// A parameter of the policy; `@FILE` is the text of a file. Can be repeated
    #[arg(long = "param", value_name = "NAME=TEXT|@FILE", value_parser = param::parse)]
    pub(super) params: Vec<Param>,
}

/// A line of a corpus.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reply {
    text: String,
    #[serde(default)]
    reasoning: String,
    #[serde(default)]
    user: String,
    #[serde(default)]
    system: String,
    /// Name of the reply in the output, instead of its line.
    id: Option<String>,
}

/// What came of one reply.
#[derive(Default)]
struct Outcome {
    /// Words of the reply, and how many of them a model would have computed.
    words: usize,
    kept: usize,
    /// What the policy did, in order.
    did: Vec<String>,
}

/// Runs the policy on each reply and prints what it did, and what it saved in all.
///
/// # Errors
/// When the corpus cannot be read, or the policy fails.
pub fn run(component: &Arc<Component>, options: &Options, out: &mut impl Write) -> Result<()> {
    let Options { corpus, params } = options;
    let params = &param::texts(params);
    let path = corpus.display();
    let text = std::fs::read_to_string(corpus).with_context(|| path.to_string())?;
    let replies = read(&text, corpus)?;
    let (mut words, mut kept, mut changed) = (0, 0, 0);
    let mut actions: BTreeMap<String, usize> = BTreeMap::new();
    for (place, reply) in &replies {
        let outcome =
            simulate(component, reply, params).with_context(|| format!("{path}: {place}"))?;
        words += outcome.words;
        kept += outcome.kept;
        if outcome.did.is_empty() {
            continue;
        }
        changed += 1;
        let saved = outcome.words - outcome.kept;
        writeln!(out, "{path}: {place}: {} words, {saved} saved", outcome.words)?;
        for what in &outcome.did {
            writeln!(out, "  {what}")?;
            let kind = what.split([' ', ':']).next().unwrap_or_default();
            *actions.entry(kind.into()).or_default() += 1;
        }
    }
    let saved = words - kept;
    let share = 100.0 * saved as f64 / (words.max(1)) as f64;
    writeln!(
        out,
        "{changed} of {} replies changed; {saved} of {words} words saved ({share:.1} %), about {} tokens",
        replies.len(),
        saved * 3 / 2,
    )?;
    let actions: Vec<_> = actions.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
    if !actions.is_empty() {
        writeln!(out, "{}", actions.join(", "))?;
    }
    Ok(())
}

/// The replies of a corpus or a trace, each with its place in the file.
fn read(text: &str, path: &Path) -> Result<Vec<(String, Reply)>> {
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let first: serde_json::Value = serde_json::from_str(first).unwrap_or_default();
    if first.get("hook").is_some() || first.get("dropped").is_some() {
        return traced(text).map_err(|problem| anyhow!("{}: {problem}", path.display()));
    }
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    let parse = |(number, line): (usize, &str)| {
        // A line may be the text alone.
        let reply = match serde_json::from_str::<String>(line) {
            Ok(text) => Reply { text, ..Reply::default() },
            Err(_) => serde_json::from_str(line).map_err(|error| {
                anyhow!("{}:{number}: {error}; a line is {{\"text\": \"..\"}}", path.display())
            })?,
        };
        let place = reply.id.clone().unwrap_or_else(|| format!("line {number}"));
        Ok((place, reply))
    };
    lines.map(parse).collect()
}

/// The replies of a trace: what its steps have shown, and of the answer what `on-text` was called with.
fn traced(text: &str) -> Result<Vec<(String, Reply)>, String> {
    let golden = Golden::parse(text)?;
    if let Some(why) = golden.inexact() {
        return Err(format!("the trace has no texts: {why}"));
    }
    let mut replies: BTreeMap<String, Reply> = BTreeMap::new();
    for case in &golden.cases {
        // A chain has recorded each step once for each policy.
        if replies.contains_key(&case.name) {
            continue;
        }
        let mut reply = Reply::default();
        let mut answer = String::new();
        for line in &case.lines {
            match &line.call {
                Call::Prompt(view) => reply.system = view.system.join("\n\n"),
                Call::Request(view) => reply.user.clone_from(&view.user),
                Call::Step(step) if step.phase == Phase::Reasoning => reply.reasoning += &step.text,
                Call::Step(step) => reply.text += &step.text,
                Call::Text(view) => {
                    // A rewind took back what was behind this position, or the policy had held it.
                    answer.truncate(answer.floor_char_boundary(view.position as usize));
                    answer += &view.text;
                }
                _ => {}
            }
        }
        // A policy that waits for no steps is called with the text only.
        if reply.text.is_empty() {
            reply.text = answer;
        }
        replies.insert(case.name.clone(), reply);
    }
    Ok(replies.into_iter().collect())
}

/// A word and the blanks before it.
fn split(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut start = 0;
    let mut in_word = false;
    for (at, c) in text.char_indices() {
        if c.is_whitespace() && in_word {
            words.push(&text[start..at]);
            (start, in_word) = (at, false);
        }
        in_word |= !c.is_whitespace();
    }
    if start < text.len() {
        words.push(&text[start..]);
    }
    words
}

fn simulate(
    component: &Arc<Component>,
    reply: &Reply,
    params: &[(String, String)],
) -> Result<Outcome> {
    let phases = [(Phase::Reasoning, split(&reply.reasoning)), (Phase::Answer, split(&reply.text))];
    let words: usize = phases.iter().map(|(_, words)| words.len()).sum();
    let mut outcome = Outcome { words, ..Outcome::default() };
    let mut instance = component.instantiate(&Context::dry_run())?;
    let system = Vec::from_iter((!reply.system.is_empty()).then(|| reply.system.clone()));
    let prompt = PromptView { params: params.to_vec(), system, ..PromptView::default() };
    instance.call(&Call::Prompt(std::borrow::Cow::Borrowed(&prompt)))?;
    let request = RequestView {
        params: params.to_vec(),
        user: reply.user.clone(),
        system_chars: reply.system.chars().count() as u32,
        messages: 1,
        can_reason: true,
        context_left: CONTEXT_LEFT,
        ..RequestView::default()
    };
    let plan = ask(&mut instance, &request)?;
    if let Some(refusal) = &plan.refuse {
        outcome.did.push(format!("refuses with {}: {}", refusal.status, refusal.message));
        return Ok(outcome);
    }
    let watch = Watch::new(&plan);
    let texts = component.needs(Hook::OnText, "", &request.params).then(|| Texts::new(1));
    let mut run = Run { instance, plan, watch, texts, outcome, step: Step::default(), seen: 0 };
    for (phase, words) in phases {
        if !run.phase(phase, &words)? {
            break;
        }
    }
    if run.step.answer_tokens > 0 {
        run.shape("", true)?;
    }
    let Run { mut instance, outcome, .. } = run;
    ask(&mut instance, &Summary::default())?;
    Ok(outcome)
}

fn ask<T: steersman_policy_host::HookInput>(policy: &mut Instance, input: &T) -> Result<T::Answer> {
    let policy: &mut dyn Policy = policy;
    Ok(policy.ask(input)?)
}

/// The simulation of one reply.
struct Run {
    instance: Instance,
    plan: Plan,
    watch: Option<Watch>,
    /// The answer on its way through `on-text`; `None` if the policy is not called with it.
    texts: Option<Texts>,
    outcome: Outcome,
    /// What the next step has.
    step: Step,
    /// Words since the last call.
    seen: u32,
}

/// What follows a step.
enum Next {
    Goes,
    EndsPhase,
    EndsReply,
}

impl Run {
    /// Runs one phase; whether the reply goes on behind it.
    fn phase(&mut self, phase: Phase, words: &[&str]) -> Result<bool> {
        if words.is_empty() {
            return Ok(true);
        }
        let is_reasoning = phase == Phase::Reasoning;
        if is_reasoning && self.plan.reasoning == Some(false) {
            self.outcome.did.push(format!("skips the reasoning: {} words", words.len()));
            return Ok(true);
        }
        self.step.phase_changed = self.step.index > 0;
        self.step.phase = phase;
        let budget = self.plan.reasoning_budget.filter(|_| is_reasoning);
        let mut detector = self.plan.loops.map(Detector::new);
        let mut answer = String::new();
        for word in words {
            self.outcome.kept += 1;
            self.seen += 1;
            let step = &mut self.step;
            step.index += 1;
            let counted =
                if is_reasoning { &mut step.reasoning_tokens } else { &mut step.answer_tokens };
            *counted += 1;
            let counted = *counted;
            step.text.push_str(word);
            step.newline |= word.contains('\n');
            step.observed = self.watch.as_mut().and_then(|watch| found(watch, word));
            step.loop_found = detector.as_mut().and_then(|detector| detector.push(token(word)));
            step.budget_reached = budget.is_some_and(|budget| counted >= budget);
            step.reasoning_left =
                budget.map_or(CONTEXT_LEFT, |budget| budget.saturating_sub(counted));
            let reaches_budget = step.budget_reached;
            let is_called = step.loop_found.is_some()
                || step.budget_reached
                || (self.plan.on_phase && step.phase_changed)
                || (self.plan.on_newline && step.newline)
                || step.observed.is_some()
                || (self.plan.every > 0 && self.seen >= self.plan.every);
            let stop = if is_reasoning {
                None
            } else {
                let start = answer.len();
                answer.push_str(word);
                let found = self.plan.stop.iter().find_map(|stop| Some((answer.find(stop)?, stop)));
                let stop = found.map(|(at, stop)| (at.max(start) - start, stop.clone()));
                // The engine sends a piece before it calls `on-step`, and searches stop strings before it sends.
                let sent = stop.as_ref().map_or(*word, |(at, _)| &word[..*at]);
                self.shape(sent, false)?;
                stop
            };
            let next = if is_called { self.call()? } else { Next::Goes };
            match next {
                Next::EndsReply => return Ok(false),
                Next::EndsPhase => return Ok(true),
                Next::Goes if reaches_budget => {
                    self.did("reaches its budget of reasoning", "");
                    return Ok(true);
                }
                Next::Goes => {}
            }
            if is_reasoning {
                continue;
            }
            if let Some((_, stop)) = stop {
                self.did("ends at the stop string", &stop);
                return Ok(false);
            }
            if self.plan.max_tokens.is_some_and(|most| self.step.index >= most) {
                self.did("reaches max_tokens", "");
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn call(&mut self) -> Result<Next> {
        self.seen = 0;
        let is_reasoning = self.step.phase == Phase::Reasoning;
        let found = self.step.loop_found;
        let actions = ask(&mut self.instance, &self.step)?;
        (self.step.text, self.step.newline, self.step.phase_changed) =
            (String::new(), false, false);
        let why = found.map_or_else(String::new, |found| {
            format!(" (a loop of {} words, {} times)", found.period, found.repeats)
        });
        let mut next = Next::Goes;
        for action in actions {
            match action {
                Action::Stop(reason) => {
                    self.did(&format!("stops{why}"), &reason);
                    return Ok(Next::EndsReply);
                }
                Action::CloseReasoning(text) if is_reasoning => {
                    self.did(&format!("closes the reasoning{why}"), &text);
                    next = Next::EndsPhase;
                }
                Action::CloseReasoning(_) => {}
                Action::Inject(text) => self.did("injects", &text),
                Action::Rewind(tokens) => self.did(&format!("rewinds {tokens} tokens{why}"), ""),
                Action::Ban(ban) => self.did(&format!("bans {} tokens", ban.tokens.len()), ""),
                Action::Bias(bias) => self.did(&format!("biases {} tokens", bias.tokens.len()), ""),
                Action::Sampling(_) => self.did("changes the sampling", ""),
            }
        }
        Ok(next)
    }

    /// Passes text of the answer to `on-text`, and notes what the policy makes of it.
    fn shape(&mut self, text: &str, end: bool) -> Result<()> {
        let Some(texts) = &mut self.texts else { return Ok(()) };
        let Some(view) = texts.view(0, text, end) else { return Ok(()) };
        let verdict = ask(&mut self.instance, &view)?;
        let change = change(&view, &verdict);
        texts.answer(0, verdict, end, false);
        texts.end(text.len());
        if let Some((what, new)) = change {
            self.did(&what, &new);
        }
        Ok(())
    }

    /// Notes what was done, and where.
    fn did(&mut self, what: &str, text: &str) {
        let text = if text.is_empty() { String::new() } else { format!(": {text:?}") };
        self.outcome.did.push(format!("{what} at word {}{text}", self.step.index));
    }
}

/// The texts of the plan that a word completes. Words have no tokens that a plan could wait for.
fn found(watch: &mut Watch, word: &str) -> Option<Observations> {
    watch.read(word);
    let (texts_found, token_found) = watch.found(u32::MAX);
    // Nobody knows what a model would draw after a word.
    let (drawn, outlook) = (Vec::new(), None);
    Observations { texts_found, token_found, drawn, outlook }.if_any()
}

/// What a verdict does to a text, and the new text; `None` if the client receives it as it is.
fn change(view: &TextView, verdict: &TextVerdict) -> Option<(String, String)> {
    let TextVerdict::Replace(change) = verdict else { return None };
    let seen = view.text.as_str();
    let held = seen.len().min(change.hold as usize);
    let old = &seen[..seen.ceil_char_boundary(seen.len() - held)];
    let new = change.text.as_str();
    let what = match (old, new) {
        _ if old == new => return None,
        ("", _) => "adds".to_owned(),
        (_, "") => format!("removes {old:?}"),
        _ => format!("replaces {old:?}"),
    };
    Some((what, new.to_owned()))
}

/// A number for a word; equal words have equal numbers.
fn token(word: &str) -> u32 {
    let mut hasher = DefaultHasher::new();
    word.hash(&mut hasher);
    hasher.finish() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_the_text() {
        for text in ["", " ", "a", " a  b\nc ", "größer als  x"] {
            assert_eq!(split(text).concat(), text);
        }
        assert_eq!(split(" a  b\nc "), [" a", "  b", "\nc", " "]);
    }
}
