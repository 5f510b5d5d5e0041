//! The policy `rules`: the parameter `rules` holds rules in TOML, for operators who write no code.
//!
//! ```toml
//! [[rule]]
//! when = { user_under = 200, system_over = 3000 }
//! do = { reasoning = true, reasoning_budget = 2048 }
//!
//! [[rule]]
//! when = { loop = true, phase = "reasoning" }
//! do = { close_reasoning = "**Final Answer:**\n\n" }
//! ```
//!
//! A rule matches if all conditions in `when` hold and none in `unless`. All rules that match
//! apply, in order; if several set the same value, the first wins, so special rules precede general
//! ones. Of the rules that inject text, close the reasoning or rewind in one step, only the first
//! applies. `policies/REFERENCE.md` lists the keys of `when` and `do`.
//!
//! Rules are parsed once for each text of the parameter; requests get them packed ([`pack`]).
//!
//! A change of the parameter that has a mistake is rejected. A mistake at the start of the server disables all
//! rules: requests run as without rules, and a note in each reply, and the log, report it with its line. With
//! the parameter `strict = "true"` such a request fails instead, and `on_failure` of the profile decides how it
//! continues.

mod effect;
mod entry;
mod pack;
mod parse;
mod replace;
mod rule;
mod when;

use entry::Mistakes;
use replace::Replacement;
use rule::{Effect, Rule, StepEffect};
use steersman_policy::{
    Action, EDITS, LoopRule, ParamsView, Plan, Policy, PreparedParams, PromptEdit, PromptView,
    RequestView, Step, TextVerdict, TextView, ToolCallView, Verdict,
};
use when::{Condition, Memory, SeenPrompt, SeenRequest};

/// Tokens between two checkpoints if a rule may rewind.
const CHECKPOINT_EVERY: u32 = 128;

/// Most stop strings of a plan.
const STOPS: usize = 16;

/// Most texts after which `on-step` can be called, and bytes of each.
const EVENT_TEXTS: usize = 16;
const EVENT_TEXT_BYTES: usize = 256;

/// Number of lines of each system text that `strip_lines` examines.
const STRIP_LINES: usize = 64;

/// Thresholds of the loop detectors if a rule waits for a loop and none sets them.
const LOOPS: LoopRule =
    LoopRule { max_period: 1024, repeats: 2, min_tokens: 128, similarity: 0.87 };

/// The policy `rules`, with the state of one request.
#[derive(Default)]
pub struct Rules {
    /// The rules that `on-prompt` parsed, for `on-request`; `None` if they were packed.
    parsed: Option<Result<Vec<Rule>, Mistakes>>,
    system: Vec<String>,
    /// The rules whose conditions on the request hold.
    rules: Vec<Rule>,
    /// One for each rule.
    states: Vec<State>,
    /// What these rules replace in answers.
    replaced: Vec<Replacement>,
}

/// State of a rule.
#[derive(Default)]
struct State {
    /// How often it has applied.
    applied: u32,
    memory: Memory,
}

impl Policy for Rules {
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        let mut prepared = PreparedParams::default();
        let rules = params.param("rules").map(parse::rules);
        let rules = rules.transpose().unwrap_or_else(|mistakes| {
            let mistakes = mistakes.iter().map(|mistake| format!("parameter `rules`: {mistake}"));
            prepared.problems.extend(mistakes);
            None
        });
        prepared.problems.extend(params.param("strict").and_then(problem_of_strict));
        let has = |is: fn(&Effect) -> bool| rules.iter().flatten().any(|rule| is(&rule.effect));
        // Else answers and tool calls would wait for rules that do not exist.
        let needed = [
            ("on-text", has(|effect| matches!(effect, Effect::Text(_)))),
            ("on-tool-call", has(|effect| matches!(effect, Effect::ToolCall(_)))),
        ];
        for (hook, _) in needed.into_iter().filter(|(_, is_needed)| !is_needed) {
            prepared.replaced.push((hook.into(), "off".into()));
        }
        prepared.replaced.extend(rules.map(|rules| ("rules".into(), pack::pack(&rules))));
        prepared
    }

    fn on_prompt(&mut self, mut prompt: PromptView) -> Vec<PromptEdit> {
        let text = take(&mut prompt.params);
        let seen = SeenPrompt::new(&prompt);
        let holds = |condition: &Condition| condition.in_prompt(&seen);
        let edits = match text.filter(|text| pack::is_packed(text)) {
            Some(packed) => {
                stripped(&pack::unpack(packed, true, holds).unwrap_or_default(), &prompt)
            }
            None => {
                let parsed = self.parsed.insert(parse(text));
                let rules = parsed.as_deref().unwrap_or_default().iter();
                let is_of_prompt = |rule: &&Rule| matches!(rule.effect, Effect::Prompt { .. });
                let holds = |one: &Condition| holds(one) != Some(false);
                let matches = |rule: &&Rule| is_of_prompt(rule) && rule.when.iter().all(holds);
                stripped(&rules.filter(matches).cloned().collect::<Vec<_>>(), &prompt)
            }
        };
        drop(seen);
        self.system = prompt.system;
        edits
    }

    fn on_request(&mut self, mut request: RequestView) -> Plan {
        let mut notes = unknown_params(&request);
        notes.extend(request.param("strict").and_then(problem_of_strict));
        let strict = request.param("strict") == Some("true");
        let text = take(&mut request.params);
        let seen = SeenRequest::new(&request, &self.system);
        let holds = |condition: &Condition| condition.in_request(&seen);
        let parsed = self.parsed.take();
        let rules = match text.and_then(|text| pack::unpack(text, false, holds)) {
            Some(rules) => Ok(rules),
            None => parsed.unwrap_or_else(|| parse(text)).map(|mut rules| {
                rules.retain(|rule| rule.when.iter().all(|one| holds(one) != Some(false)));
                rules
            }),
        };
        match rules {
            Ok(rules) => self.rules = rules,
            Err(mistakes) if strict => steersman_policy::failure::fail(&mistakes.join("; ")),
            Err(mistakes) => notes.push(format!("rules ignored: {}", mistakes.join("; "))),
        }
        for rule in &mut self.rules {
            match &mut rule.effect {
                Effect::Step(effects) => {
                    effects.iter_mut().for_each(|effect| effect.tokenize(&mut notes));
                    effects.retain(|effect| !effect.is_empty());
                }
                Effect::Text(replaced) => self.replaced.append(replaced),
                _ => {}
            }
        }
        self.states = self.rules.iter().map(|_| State::default()).collect();
        plan(&request, &self.rules, notes)
    }

    fn on_step(&mut self, step: Step) -> Vec<Action> {
        let mut actions = Vec::new();
        let mut redirected = false;
        for (rule, state) in self.rules.iter_mut().zip(&mut self.states) {
            if !matches!(rule.effect, Effect::Step(_) | Effect::PackedStep { .. })
                || rule.is_exhausted(state.applied)
                || !when::matches_step(&rule.when, &step, &mut state.memory)
            {
                continue;
            }
            rule.effect.unpack();
            let Effect::Step(effects) = &rule.effect else { continue };
            // "Rewind the first loop" precedes "close the reasoning": only one applies in a step.
            let redirects = effects.iter().any(StepEffect::redirects);
            if redirects && redirected {
                continue;
            }
            redirected |= redirects;
            state.applied += 1;
            actions.extend(effects.iter().filter_map(|effect| effect.action(&step)));
            if effects.iter().any(StepEffect::stops) {
                break;
            }
        }
        actions
    }

    fn on_text(&mut self, view: TextView) -> TextVerdict {
        replace::replaced(&self.replaced, &view)
    }

    fn on_tool_call(&mut self, call: ToolCallView) -> Verdict {
        for (rule, state) in self.rules.iter_mut().zip(&mut self.states) {
            if !matches!(rule.effect, Effect::ToolCall(_) | Effect::PackedToolCall(_))
                || rule.is_exhausted(state.applied)
                || !when::matches_call(&rule.when, &call)
            {
                continue;
            }
            rule.effect.unpack();
            let Effect::ToolCall(verdict) = &rule.effect else { continue };
            state.applied += 1;
            return verdict.clone();
        }
        Verdict::Accept
    }
}

steersman_policy::export!(Rules, with on_text);

/// Checks a text of rules.
///
/// # Errors
/// The mistakes, with their rules and lines.
pub fn check(text: &str) -> Result<(), String> {
    parse::rules(text).map(|_| ()).map_err(|mistakes| mistakes.join("; "))
}

/// Parses the parameter `rules`.
fn parse(text: Option<&str>) -> Result<Vec<Rule>, Mistakes> {
    parse::rules(text.ok_or_else(|| vec!["the parameter `rules` is missing".into()])?)
}

/// Takes the parameter `rules`. It stays in memory, which ends with the request, so that rules can borrow its texts.
fn take(params: &mut [(String, String)]) -> Option<&'static str> {
    let (_, text) = params.iter_mut().find(|(name, _)| name == "rules")?;
    Some(std::mem::take(text).leak())
}

/// Notes on unknown parameters.
fn unknown_params(request: &RequestView) -> Vec<String> {
    let names = request.params.iter().map(|(name, _)| name.as_str());
    let unknown = names.filter(|name| !["rules", "strict"].contains(name));
    unknown.map(|name| format!("unknown parameter `{name}`")).collect()
}

/// The problem of the parameter `strict`, if it is neither true nor false.
fn problem_of_strict(text: &str) -> Option<String> {
    let is_known = ["true", "false"].contains(&text);
    (!is_known).then(|| format!("parameter `strict` cannot be `{text}`: it is `true` or `false`"))
}

/// The edits that rules of `on-prompt` make in system text.
fn stripped(rules: &[Rule], prompt: &PromptView) -> Vec<PromptEdit> {
    let effects: Vec<_> = rules.iter().map(|rule| &rule.effect).collect();
    let is_stripped = |line: &str| {
        effects.iter().any(|effect| match effect {
            Effect::Prompt { lines, .. } => lines.iter().any(|prefix| line.starts_with(prefix)),
            _ => false,
        })
    };
    let mut found = prompt.edit_lines(STRIP_LINES, |line| is_stripped(line).then(String::new));
    for (message, mut text) in (0..).zip(prompt.edited(&found)) {
        for effect in &effects {
            let Effect::Prompt { spans, .. } = effect else { continue };
            for span in spans {
                if found.len() < EDITS && text.contains(span) {
                    text = text.replacen(span, "", 1);
                    let (old, new) = (span.clone(), String::new());
                    let removed = steersman_policy::Replacement { message, old, new };
                    found.push(PromptEdit::Replace(removed));
                }
            }
        }
    }
    found
}

/// The plan by the rules that match; values that they do not set are those of the client.
fn plan(request: &RequestView, rules: &[Rule], mut notes: Vec<String>) -> Plan {
    let mut plan = Plan::default();
    let mut waits_for_loop = false;
    for rule in rules {
        waits_for_loop |= when::waits_for_loop(&rule.when);
        match &rule.effect {
            Effect::Request(set) => {
                plan.reasoning = plan.reasoning.or(set.reasoning);
                plan.reasoning_budget = plan.reasoning_budget.or(set.reasoning_budget);
                plan.answer_reserve = plan.answer_reserve.or(set.answer_reserve);
                plan.sampling = plan.sampling.or(set.sampling);
                plan.loops = plan.loops.or(set.loops);
                plan.retain = plan.retain.take().or(set.retain.clone());
                plan.form = plan.form.take().or(set.form.clone());
                plan.refuse = plan.refuse.take().or(set.refuse.clone());
                plan.max_tokens = plan.max_tokens.or(set.max_tokens);
                plan.limit_counts = plan.limit_counts.or(set.limit_counts);
                plan.stop.extend(set.stop.iter().take(STOPS - plan.stop.len()).cloned());
                plan.tools = plan.tools.take().or(set.tools.clone());
                plan.route = plan.route.take().or(set.route.clone());
                notes.extend(set.note.clone());
            }
            Effect::Step(_) | Effect::PackedStep { .. } => {
                let on_texts = watch(&mut plan.on_texts, &rule.when);
                let every = [plan.every, when::every(&rule.when, on_texts)];
                plan.every = every.into_iter().filter(|every| *every > 0).min().unwrap_or_default();
                plan.on_phase |= when::needs_phases(&rule.when);
                if rule.effect.rewinds() {
                    plan.checkpoint_every = CHECKPOINT_EVERY;
                }
            }
            Effect::Prompt { .. }
            | Effect::Text(_)
            | Effect::ToolCall(_)
            | Effect::PackedToolCall(_) => {}
        }
    }
    if waits_for_loop {
        plan.loops = plan.loops.or(Some(LOOPS));
    }
    // The client can lower the budget, not raise it.
    plan.reasoning_budget =
        [plan.reasoning_budget, request.reasoning_budget].into_iter().flatten().min();
    plan.reasoning = plan.reasoning.or(request.reasoning);
    plan.note = (!notes.is_empty()).then(|| notes.join("; "));
    plan
}

/// Adds the texts that the conditions search to those after which `on-step` is called; whether all of them fit.
fn watch(on_texts: &mut Vec<String>, when: &[Condition]) -> bool {
    let before = on_texts.len();
    for text in when::texts(when) {
        // Of hundreds of rules, most find the list full: searching it for them would cost too much.
        if on_texts.len() == EVENT_TEXTS || text.len() > EVENT_TEXT_BYTES {
            on_texts.truncate(before);
            return false;
        }
        if !on_texts.iter().any(|known| known == text) {
            on_texts.push(text.to_owned());
        }
    }
    true
}

#[cfg(test)]
mod tests;
