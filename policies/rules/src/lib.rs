//! The policy for those who write no code: the parameter `rules` holds rules in TOML.
//!
//! ```toml
//! [[rule]]
//! when = { user_under = 200, system_over = 3000 }
//! do = { think = true, reasoning_budget = 2048 }
//!
//! [[rule]]
//! when = { loop = true, phase = "think" }
//! do = { close_reasoning = "**Final Answer:**\n\n" }
//! ```
//!
//! All that `when` names must hold; without it a rule always applies. Of the rules that apply all
//! count, in their order, and where two decide the same the first does: special rules stand before
//! general ones. Of rules that in one step would write text, close the thought or rewind only the
//! first acts. What `when` and `do` may hold is told in `policies/README.md`.
//!
//! A text that is wrong anywhere is in force nowhere: requests go on as with no rules, and the notes
//! of each reply, and the log, say what is wrong and in which line. With the parameter
//! `strict = "true"` such a request fails instead, and the profile's `on_failure` says what follows.

mod parse;
mod rule;
mod when;

use rule::{Act, Rule};
use steersman_policy::{
    Action, LoopRule, Plan, Policy, PromptView, REPLACEMENTS, Replacement, RequestView, Step,
    ToolCallView, Verdict,
};
use when::Tail;

/// Tokens between two checkpoints of a request in which a rule may rewind.
const CHECKPOINT_EVERY: u32 = 128;

/// Lines of a system text that `strip_lines` looks at.
const STRIPPED_LINES: usize = 64;

/// What is a loop, where a rule waits for one and none says what it is.
const LOOPS: LoopRule = LoopRule { max_period: 1024, repeats: 3, min_tokens: 96, similarity: 0.87 };

/// The policy: its rules, and what they must remember of the request.
#[derive(Default)]
pub struct Rules {
    /// Read by the first hook that is called.
    rules: Option<Result<Vec<Rule>, String>>,
    system: Vec<String>,
    /// Of each rule.
    states: Vec<State>,
}

/// What is remembered of a rule.
#[derive(Default)]
struct State {
    /// Whether what it asks of the request holds.
    applies: bool,
    /// How often it has acted.
    acted: u32,
    tail: Tail,
}

impl Policy for Rules {
    fn on_prompt(&mut self, prompt: PromptView) -> Vec<Replacement> {
        self.rules = Some(rules(prompt.param("rules")));
        let replacements = stripped(self.rules(), &prompt);
        self.system = prompt.system;
        replacements
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        if self.rules.is_none() {
            self.rules = Some(rules(request.param("rules")));
        }
        let mut notes = complaints(&request);
        if let Some(Err(problem)) = &self.rules {
            if request.param("strict") == Some("true") {
                steersman_policy::failure::fail(problem);
            }
            notes.push(format!("rules ignored: {problem}"));
        }
        let holds = |rule: &Rule| rule.when.holds_of_request(&request, &self.system);
        let applies: Vec<_> = self.rules().iter().map(holds).collect();
        let rules = self.rules().iter().zip(&applies).filter(|(_, applies)| **applies);
        let plan = plan(&request, rules.map(|(rule, _)| rule), notes);
        let state = |applies| State { applies, ..State::default() };
        self.states = applies.into_iter().map(state).collect();
        plan
    }

    fn on_step(&mut self, step: Step) -> Vec<Action> {
        let Some(Ok(rules)) = &self.rules else { return Vec::new() };
        let mut actions = Vec::new();
        let mut led = false;
        for (rule, state) in rules.iter().zip(&mut self.states) {
            let Act::Step(deeds) = &rule.act else { continue };
            if !state.applies || rule.is_used_up(state.acted) {
                continue;
            }
            if rule.when.holds_of_step(&step, &mut state.tail) {
                // "Rewind the first loop" stands before "close the thought": one at a time.
                let leads = deeds.iter().any(rule::Deed::leads);
                if leads && led {
                    continue;
                }
                led |= leads;
                state.acted += 1;
                actions.extend(deeds.iter().filter_map(|deed| deed.action(&step)));
                if deeds.iter().any(rule::Deed::stops) {
                    break;
                }
            }
        }
        actions
    }

    fn on_tool_call(&mut self, call: ToolCallView) -> Verdict {
        let Some(Ok(rules)) = &self.rules else { return Verdict::Accept };
        for (rule, state) in rules.iter().zip(&mut self.states) {
            let Act::Tool(verdict) = &rule.act else { continue };
            let is_open = state.applies && !rule.is_used_up(state.acted);
            if is_open && rule.when.holds_of_call(&call) {
                state.acted += 1;
                return verdict.clone();
            }
        }
        Verdict::Accept
    }
}

steersman_policy::export!(Rules);

impl Rules {
    /// The rules in force.
    fn rules(&self) -> &[Rule] {
        self.rules.as_ref().and_then(|rules| rules.as_ref().ok()).map_or(&[], Vec::as_slice)
    }
}

/// Whether a text of rules can be used.
///
/// # Errors
/// What is wrong, with the rule and its line.
pub fn check(text: &str) -> Result<(), String> {
    parse::rules(text).map(|_| ())
}

fn rules(param: Option<&str>) -> Result<Vec<Rule>, String> {
    let text = param.ok_or("the parameter `rules` is missing; it holds the rules, in TOML")?;
    parse::rules(text)
}

/// Parameters that this policy does not know.
fn complaints(request: &RequestView) -> Vec<String> {
    let names = request.params.iter().map(|(name, _)| name.as_str());
    let unknown = names.filter(|name| !["rules", "strict"].contains(name));
    unknown.map(|name| format!("unknown parameter `{name}`")).collect()
}

/// What rules take out of system text.
fn stripped(rules: &[Rule], prompt: &PromptView) -> Vec<Replacement> {
    let rules = rules.iter().filter(|rule| rule.when.holds_of_prompt(prompt));
    let acts: Vec<_> = rules.map(|rule| &rule.act).collect();
    let is_stripped = |line: &str| {
        acts.iter().any(|act| match act {
            Act::Prompt { lines, .. } => lines.iter().any(|prefix| line.starts_with(prefix)),
            _ => false,
        })
    };
    let mut found = prompt.edit_lines(STRIPPED_LINES, |line| is_stripped(line).then(String::new));
    for (message, text) in (0..).zip(&prompt.system) {
        let earlier = found.iter().filter(|r| r.message == message);
        let mut text = earlier.fold(text.clone(), |text, r| text.replacen(&r.old, &r.new, 1));
        for act in &acts {
            let Act::Prompt { spans, .. } = act else { continue };
            for span in spans {
                if found.len() < REPLACEMENTS && text.contains(span) {
                    text = text.replacen(span, "", 1);
                    found.push(Replacement { message, old: span.clone(), new: String::new() });
                }
            }
        }
    }
    found
}

/// The plan of a request by the rules that apply: what the client asked for, where they say nothing.
fn plan<'a>(
    request: &RequestView,
    rules: impl Iterator<Item = &'a Rule>,
    mut notes: Vec<String>,
) -> Plan {
    let mut plan = Plan::default();
    let mut waits_for_loop = false;
    for rule in rules {
        waits_for_loop |= rule.when.waits_for_loop();
        match &rule.act {
            Act::Request(wish) => {
                plan.reasoning = plan.reasoning.or(wish.reasoning);
                plan.reasoning_budget = plan.reasoning_budget.or(wish.reasoning_budget);
                plan.answer_reserve = plan.answer_reserve.or(wish.answer_reserve);
                plan.sampling.temperature = plan.sampling.temperature.or(wish.sampling.temperature);
                plan.sampling.top_p = plan.sampling.top_p.or(wish.sampling.top_p);
                plan.sampling.top_k = plan.sampling.top_k.or(wish.sampling.top_k);
                plan.sampling.min_p = plan.sampling.min_p.or(wish.sampling.min_p);
                plan.loops = plan.loops.or(wish.loops);
                plan.retain = plan.retain.take().or(wish.retain.clone());
                notes.extend(wish.note.clone());
            }
            Act::Step(deeds) => {
                let every = [plan.every, rule.when.every()].into_iter().filter(|every| *every > 0);
                plan.every = every.min().unwrap_or_default();
                if deeds.iter().any(rule::Deed::rewinds) {
                    plan.checkpoint_every = CHECKPOINT_EVERY;
                }
            }
            Act::Prompt { .. } | Act::Tool(_) => {}
        }
    }
    if waits_for_loop {
        plan.loops = plan.loops.or(Some(LOOPS));
    }
    // A client may have less of a thought, not more.
    plan.reasoning_budget =
        [plan.reasoning_budget, request.reasoning_budget].into_iter().flatten().min();
    plan.reasoning = plan.reasoning.or(request.reasoning);
    plan.note = (!notes.is_empty()).then(|| notes.join("; "));
    plan
}

#[cfg(test)]
mod tests;
