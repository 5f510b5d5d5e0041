//! Parses rules. `policies/REFERENCE.md` documents the keys; [`WHEN`] and [`DO`] state the hooks in which
//! each is available. `effect.rs` parses what a rule does.
//!
//! A rule applies in one hook: the first in which all its keys are available.

use steersman_policy::Phase;
use toml::de::{DeTable, DeValue};

use super::effect;
use super::entry::{Entry, MAX_MISTAKES, Mistakes, both, each, line, whole};
use super::rule::{Effect, Rule, StepEffect};
use super::when::{Condition, Texts, waits_for_event, waits_for_loop};

/// A set of hooks, one bit each.
pub type Hooks = u8;

const PROMPT: Hooks = 1;
const REQUEST: Hooks = 2;
const STEP: Hooks = 4;
const TOOL_CALL: Hooks = 8;
const TEXT: Hooks = 16;

/// The hooks that know the request.
const LATER: Hooks = REQUEST | STEP | TOOL_CALL | TEXT;

/// All hooks.
const ALL: Hooks = PROMPT | LATER;

/// The keys of `when` and `unless`, with the hooks in which they are known.
pub const WHEN: &[(&str, Hooks)] = &[
    ("profile", ALL),
    ("system_contains", ALL),
    ("system_over", ALL),
    ("model", LATER),
    ("family", LATER),
    ("user_contains", LATER),
    ("user_words", LATER),
    ("user_under", LATER),
    ("user_over", LATER),
    ("prompt_over", LATER),
    ("messages_over", LATER),
    ("tools", LATER),
    ("reasoning_requested", LATER),
    ("can_reason", LATER),
    ("form_requested", LATER),
    ("caller_key", LATER),
    ("caller_user", LATER),
    ("phase", STEP),
    ("loop", STEP),
    ("budget_reached", STEP),
    ("reasoning_tokens", STEP),
    ("reasoning_tokens_over", STEP),
    ("answer_tokens", STEP),
    ("answer_tokens_over", STEP),
    ("text_contains", STEP),
    ("tool_called", TOOL_CALL),
    ("arguments_contain", TOOL_CALL),
    ("repeats_over", TOOL_CALL),
    ("calls_over", TOOL_CALL),
];

/// The keys of `do`, with the hooks in which they can be applied.
pub const DO: &[(&str, Hooks)] = &[
    ("strip", PROMPT),
    ("strip_lines", PROMPT),
    ("reasoning", REQUEST),
    ("reasoning_budget", REQUEST),
    ("answer_reserve", REQUEST),
    ("loops", REQUEST),
    ("retain", REQUEST),
    ("form", REQUEST),
    ("refuse", REQUEST),
    ("status", REQUEST),
    ("max_tokens", REQUEST),
    ("limit_counts", REQUEST),
    ("stop_at", REQUEST),
    ("offer_tools", REQUEST),
    ("route", REQUEST),
    ("note", REQUEST),
    ("temperature", REQUEST | STEP),
    ("top_p", REQUEST | STEP),
    ("top_k", REQUEST | STEP),
    ("min_p", REQUEST | STEP),
    ("for", STEP),
    ("inject", STEP),
    ("close_reasoning", STEP),
    ("rewind", STEP),
    ("ban", STEP),
    ("bias", STEP),
    ("repair", TOOL_CALL),
    ("stop", STEP | TOOL_CALL),
    ("replace", TEXT),
    ("replace_words", TEXT),
];

/// Most actions of a step, and most entries of `retain`.
pub const MAX_ACTIONS: usize = 16;

/// Most texts in the bans and biases of all rules, each of which asks the tokenizer twice: a call may use imports
/// 1,024 times.
const MAX_WORDS: usize = 256;

/// Most texts that all rules together replace in answers.
const MAX_REPLACED: usize = 64;

/// Parses a text of rules.
///
/// # Errors
/// All mistakes up to [`MAX_MISTAKES`], as far as the text is TOML.
pub fn rules(text: &str) -> Result<Vec<Rule>, Mistakes> {
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line(text, span.start));
        vec![format!("line {line}: {}", error.message())]
    })?;
    let (mut rules, mut mistakes) = (Vec::new(), Mistakes::new());
    let (mut most, mut is_exceeded) = (Most::default(), false);
    for (key, value) in table.get_ref() {
        if mistakes.len() >= MAX_MISTAKES {
            break;
        }
        let list = match (key.get_ref().as_ref(), value.get_ref()) {
            ("rule", DeValue::Array(list)) => list,
            (other, _) => {
                let at = line(text, key.span().start);
                let problem = "rules begin with `[[rule]]`";
                mistakes.push(format!("line {at}: unknown key `{other}`; {problem}"));
                continue;
            }
        };
        for (number, value) in (1..).zip(list.iter()) {
            if mistakes.len() >= MAX_MISTAKES {
                break;
            }
            let at = value.span().start;
            let value = value.get_ref();
            let entry = Entry { rule: number, at, above: "", name: "rule", value, text };
            match rule(&entry) {
                Ok(rule) => {
                    // Each further rule would exceed it, too.
                    if !is_exceeded && let Err(problem) = most.add(&rule.effect, &entry) {
                        is_exceeded = true;
                        mistakes.push(problem);
                    }
                    rules.push(rule);
                }
                Err(some) => mistakes.extend(some),
            }
        }
    }
    if mistakes.is_empty() && rules.is_empty() {
        mistakes.push("no `[[rule]]` found".into());
    }
    if mistakes.is_empty() {
        return Ok(rules);
    }
    if mistakes.len() >= MAX_MISTAKES {
        mistakes.truncate(MAX_MISTAKES);
        mistakes.push("there may be more".into());
    }
    Err(mistakes)
}

/// What the rules so far may do at most.
#[derive(Default)]
struct Most {
    /// Actions of the rules that redirect, of which one applies in a step.
    redirecting: usize,
    /// Actions of the others, without the stop, which is last.
    others: usize,
    /// Texts of bans and biases.
    words: usize,
    replaced: usize,
}

impl Most {
    /// Adds a rule.
    ///
    /// # Errors
    /// The limit that the rule exceeds, with the rule and its line.
    fn add(&mut self, effect: &Effect, entry: &Entry) -> Result<(), String> {
        match effect {
            Effect::Step(effects) => {
                if effects.iter().any(StepEffect::redirects) {
                    self.redirecting = self.redirecting.max(effects.len());
                } else {
                    self.others += effects.iter().filter(|effect| !effect.stops()).count();
                }
                self.words += effects.iter().map(StepEffect::words).sum::<usize>();
            }
            Effect::Text(replaced) => self.replaced += replaced.len(),
            _ => {}
        }
        let place = entry.place();
        if self.redirecting + self.others + 1 > MAX_ACTIONS {
            return Err(format!(
                "{place}: with this rule, the rules can return more than {MAX_ACTIONS} actions in one \
                 step, the limit of the host: combine tokens in one ban or bias"
            ));
        }
        if self.words > MAX_WORDS {
            return Err(format!(
                "{place}: with this rule, bans and biases have more than {MAX_WORDS} texts"
            ));
        }
        if self.replaced > MAX_REPLACED {
            return Err(format!(
                "{place}: with this rule, more than {MAX_REPLACED} texts are replaced in answers"
            ));
        }
        Ok(())
    }
}

fn rule(entry: &Entry) -> Result<Rule, Mistakes> {
    let (mut when, mut unless) = (Vec::new(), Vec::new());
    let mut effect = None;
    let mut times = None;
    let read = each(entry.entries("")?, |(key, entry)| {
        match key {
            "when" => when = entry.entries("when")?,
            "unless" => unless = entry.entries("unless")?,
            "do" => effect = Some(entry.entries("do")?),
            "times" => times = Some(entry.number()?),
            _ => return entry.unknown(&["when", "unless", "do", "times"]),
        }
        Ok(())
    });
    let Some(effect) = effect.filter(|effect| !effect.is_empty()) else {
        // It may be no table.
        read?;
        return Err(vec![format!("{}: `do` is missing", entry.place())]);
    };
    let mut conditions = Vec::new();
    let negated = when.iter().map(|one| (one, false)).chain(unless.iter().map(|one| (one, true)));
    let conditioned = each(negated, |(one, is_negated)| {
        // What is unknown is the mistake of `hook`.
        if let Some(found) = condition(one)? {
            conditions.push(if is_negated { found.negated() } else { found });
        }
        Ok(())
    });
    let (hook, hooked) = hook(&effect, when.iter().chain(&unless));
    let read = both(both(read, conditioned), both(hooked, satisfiable(&when, &unless)));
    // The values of a wrong key are not read: nobody knows what was meant.
    let is_of_hook =
        |(key, _): &(&str, Entry)| DO.iter().any(|(name, hooks)| name == key && hooks & hook != 0);
    let effect: Vec<_> = effect.into_iter().filter(is_of_hook).collect();
    let effect = match hook {
        _ if effect.is_empty() => Err(Mistakes::new()),
        PROMPT => effect::of_prompt(&effect),
        REQUEST => effect::of_request(&effect),
        STEP => effect::of_step(&effect),
        TOOL_CALL => effect::of_tool_call(&effect),
        _ => effect::of_text(&effect),
    };
    let (_, effect) = both(read, effect)?;
    let has_times = hook & (STEP | TOOL_CALL) != 0;
    if times.is_some() && !has_times {
        let place = entry.place();
        let how_often = match hook {
            TEXT => "it replaces all texts",
            _ => "the rule applies once",
        };
        let problem = format!("{place}: `times` has no effect: {how_often}, {}", name(hook));
        return Err(vec![problem]);
    }
    let when = conditions;
    if let Effect::Step(effects) = &effect
        && effects.contains(&StepEffect::RewindLoop)
        && !waits_for_loop(&when)
    {
        let place = entry.place();
        return Err(vec![format!("{place}: `do.rewind` = \"loop\" needs `when.loop` = true")]);
    }
    let waits = hook != STEP || waits_for_event(&when);
    Ok(Rule { times: times.unwrap_or(if waits { 0 } else { 1 }), when, effect })
}

/// Fails if the conditions can never hold together, so that the rule would wait for ever.
fn satisfiable(when: &[(&str, Entry)], unless: &[(&str, Entry)]) -> Result<(), Mistakes> {
    let read = |one: &(&str, Entry)| condition(one).ok().flatten();
    each(when, |one| {
        let (key, entry) = one;
        let same = unless.iter().find(|(other, _)| other == key);
        if same.is_some_and(|same| read(same).is_some_and(|same| read(one) == Some(same))) {
            return entry.error("has the same value in `unless`: the rule can never apply");
        }
        let over = when.iter().find(|(other, _)| *key == "user_under" && *other == "user_over");
        let range = over.and_then(|(_, over)| Some((whole(over.value)?, whole(entry.value)?)));
        match range {
            Some((over, under)) if under <= over.saturating_add(1) => entry.error(&format!(
                "is {under} and `when.user_over` {over}: no text is between them, and the rule can never apply"
            )),
            _ => Ok(()),
        }
    })
}

/// The hook in which a rule applies: the first in which all its keys are available, wrong ones left out.
fn hook<'a>(
    effect: &'a [(&'a str, Entry<'a>)],
    when: impl Iterator<Item = &'a (&'a str, Entry<'a>)>,
) -> (Hooks, Result<(), Mistakes>) {
    let mut hooks = ALL;
    // `do` comes first, so that a message names the condition that does not fit.
    let all = effect.iter().map(|e| (DO, e)).chain(when.map(|e| (WHEN, e)));
    let read = each(all, |(table, (key, entry))| {
        let Some((_, known)) = table.iter().find(|(name, _)| name == key) else {
            let allowed: Vec<_> = table.iter().map(|(name, _)| *name).collect();
            return entry.unknown(&allowed);
        };
        if hooks & known == 0 {
            return entry.error(&format!(
                "is available {}, but the rule applies {}: split it into two rules, or remove a key",
                name(*known),
                name(hooks)
            ));
        }
        hooks &= known;
        Ok(())
    });
    (hooks & hooks.wrapping_neg(), read) // the lowest bit
}

/// When the first of these hooks is called, for messages.
fn name(hooks: Hooks) -> &'static str {
    match hooks & hooks.wrapping_neg() {
        PROMPT => "before the prompt is rendered",
        REQUEST => "before prefill",
        STEP => "during decoding",
        TOOL_CALL => "at a tool call",
        _ => "in answer text",
    }
}

/// A condition; `None` for an unknown key.
fn condition((key, entry): &(&str, Entry)) -> Result<Option<Condition>, Mistakes> {
    let texts = || entry.texts().map(Texts::from_iter);
    let lower = || entry.lower().map(Texts::from_iter);
    Ok(Some(match *key {
        "profile" => Condition::Profile(texts()?),
        "model" => Condition::Model(texts()?),
        "family" => Condition::Family(texts()?),
        "user_contains" => Condition::UserContains(lower()?),
        "user_words" => Condition::UserWords(lower()?),
        "user_under" => Condition::UserUnder(entry.number()?),
        "user_over" => Condition::UserOver(entry.number()?),
        "system_contains" => Condition::SystemContains(texts()?),
        "system_over" => Condition::SystemOver(entry.number()?),
        "prompt_over" => Condition::PromptOver(entry.number()?),
        "messages_over" => Condition::MessagesOver(entry.number()?),
        "tools" => match entry.value {
            DeValue::Boolean(has) => Condition::HasTools(*has),
            _ => Condition::Tools(texts()?),
        },
        "reasoning_requested" => Condition::ReasoningRequested(entry.bool()?),
        "can_reason" => Condition::CanReason(entry.bool()?),
        "form_requested" => Condition::FormRequested(entry.bool()?),
        "caller_key" => Condition::CallerKey(texts()?),
        "caller_user" => Condition::CallerUser(texts()?),
        "phase" => Condition::Phase(match entry.value.as_str() {
            Some("reasoning") => Phase::Reasoning,
            Some("answer") => Phase::Answer,
            Some("tool-call") => Phase::ToolCall,
            _ => return entry.error("must be \"reasoning\", \"answer\" or \"tool-call\""),
        }),
        "loop" => Condition::Loop(entry.bool()?),
        "budget_reached" => Condition::BudgetReached(entry.bool()?),
        "reasoning_tokens" => Condition::ReasoningTokens(entry.count()?),
        "answer_tokens" => Condition::AnswerTokens(entry.count()?),
        "reasoning_tokens_over" => Condition::ReasoningTokensOver(entry.number()?),
        "answer_tokens_over" => Condition::AnswerTokensOver(entry.number()?),
        "text_contains" => Condition::TextContains(texts()?),
        "tool_called" => Condition::ToolCalled(texts()?),
        "arguments_contain" => Condition::ArgumentsContain(texts()?),
        "repeats_over" => Condition::RepeatsOver(entry.number()?),
        "calls_over" => Condition::CallsOver(entry.number()?),
        _ => return Ok(None),
    }))
}
