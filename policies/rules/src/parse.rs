//! Parses rules. `policies/REFERENCE.md` documents the keys; [`WHEN`] and [`DO`] state the hooks in which
//! each is available.
//!
//! A rule applies in one hook: the first in which all its keys are available.

use steersman_policy::{
    Action, AnswerForm, Ban, Bias, Counted, LoopRule, Phase, Plan, Refusal, Retention,
    SamplingChange, SamplingPatch, SavePoint, TokenBias, Verdict,
};
use toml::de::{DeTable, DeValue};

use super::rule::{Effect, Rule, StepEffect};
use super::when::{Condition, Texts, every, waits_for_loop};
use super::{LOOPS, STOPS};

/// A set of hooks, one bit each.
pub type Hooks = u8;

const PROMPT: Hooks = 1;
const REQUEST: Hooks = 2;
const STEP: Hooks = 4;
const TOOL_CALL: Hooks = 8;

/// The keys of `when`, with the hooks in which they are known.
pub const WHEN: &[(&str, Hooks)] = &[
    ("profile", PROMPT | REQUEST | STEP | TOOL_CALL),
    ("system_contains", PROMPT | REQUEST | STEP | TOOL_CALL),
    ("system_over", PROMPT | REQUEST | STEP | TOOL_CALL),
    ("model", REQUEST | STEP | TOOL_CALL),
    ("family", REQUEST | STEP | TOOL_CALL),
    ("user_contains", REQUEST | STEP | TOOL_CALL),
    ("user_words", REQUEST | STEP | TOOL_CALL),
    ("user_under", REQUEST | STEP | TOOL_CALL),
    ("user_over", REQUEST | STEP | TOOL_CALL),
    ("prompt_over", REQUEST | STEP | TOOL_CALL),
    ("messages_over", REQUEST | STEP | TOOL_CALL),
    ("tools", REQUEST | STEP | TOOL_CALL),
    ("reasoning_requested", REQUEST | STEP | TOOL_CALL),
    ("can_reason", REQUEST | STEP | TOOL_CALL),
    ("form_requested", REQUEST | STEP | TOOL_CALL),
    ("caller_key", REQUEST | STEP | TOOL_CALL),
    ("caller_user", REQUEST | STEP | TOOL_CALL),
    ("phase", STEP),
    ("loop", STEP),
    ("budget_reached", STEP),
    ("reasoning_tokens_over", STEP),
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
];

/// Most tokens of a ban or a bias.
const MAX_TOKENS: usize = 256;

/// Most actions of a step, and most entries of `retain`.
const MAX_ACTIONS: usize = 16;

/// Parses a text of rules.
///
/// # Errors
/// The mistake, with the rule and its line.
pub fn rules(text: &str) -> Result<Vec<Rule>, String> {
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line(text, span.start));
        format!("line {line}: {}", error.message())
    })?;
    let mut rules = Vec::new();
    for (key, value) in table.get_ref() {
        let at = line(text, key.span().start);
        let list = match (key.get_ref().as_ref(), value.get_ref()) {
            ("rule", DeValue::Array(list)) => list,
            (key, _) => {
                return Err(format!("line {at}: unknown key `{key}`; rules begin with `[[rule]]`"));
            }
        };
        for (number, value) in (1..).zip(list.iter()) {
            let at = value.span().start;
            let value = value.get_ref();
            rules.push(rule(&Entry { rule: number, at, above: "", name: "rule", value, text })?);
        }
    }
    if rules.is_empty() {
        return Err("no `[[rule]]` found".into());
    }
    if most_actions(&rules) > MAX_ACTIONS {
        return Err(format!(
            "the rules can return more than {MAX_ACTIONS} actions in one step, the limit of the host: \
             combine tokens in one ban or bias"
        ));
    }
    Ok(rules)
}

/// Most actions that the rules can return for one step: only one rule redirects, and a stop is last.
fn most_actions(rules: &[Rule]) -> usize {
    let effects = rules.iter().filter_map(|rule| match &rule.effect {
        Effect::Step(effects) => Some(effects),
        _ => None,
    });
    let (redirecting, others): (Vec<_>, Vec<_>) =
        effects.partition(|effects| effects.iter().any(StepEffect::redirects));
    let redirecting = redirecting.iter().map(|effects| effects.len()).max().unwrap_or_default();
    let others =
        others.iter().map(|effects| effects.iter().filter(|effect| !effect.stops()).count());
    redirecting + others.sum::<usize>() + 1
}

fn line(text: &str, at: usize) -> usize {
    text[..at.min(text.len())].bytes().filter(|byte| *byte == b'\n').count() + 1
}

/// A value with its position.
struct Entry<'a> {
    rule: u32,
    /// Byte offset in `text`. Lines are counted only for messages, since a text has many entries.
    at: usize,
    /// Path of its table: "", "when", "do", "do.bias" or "do.loops".
    above: &'static str,
    name: &'a str,
    value: &'a DeValue<'a>,
    text: &'a str,
}

impl<'a> Entry<'a> {
    fn place(&self) -> String {
        format!("rule {}, line {}", self.rule, line(self.text, self.at))
    }

    fn error<T>(&self, problem: &str) -> Result<T, String> {
        let dot = if self.above.is_empty() { "" } else { "." };
        Err(format!("{}: `{}{dot}{}` {problem}", self.place(), self.above, self.name))
    }

    /// The entries of this table by name; `above` is its path in messages.
    fn entries(&self, above: &'static str) -> Result<Vec<(&'a str, Entry<'a>)>, String> {
        let DeValue::Table(table) = self.value else {
            return self.error("must be a table: { key = value }");
        };
        let entries = table.iter().map(|(key, value)| {
            let name = key.get_ref().as_ref();
            let (at, value) = (key.span().start, value.get_ref());
            (name, Entry { rule: self.rule, at, above, name, value, text: self.text })
        });
        Ok(entries.collect())
    }

    fn unknown<T>(&self, allowed: &[&str]) -> Result<T, String> {
        let dot = if self.above.is_empty() { "" } else { "." };
        let key = format!("{}{dot}{}", self.above, self.name);
        let place = self.place();
        Err(format!("{place}: unknown key `{key}`; expected one of {}", allowed.join(", ")))
    }

    fn text(&self) -> Result<String, String> {
        match self.value {
            DeValue::String(text) if !text.is_empty() => Ok(text.to_string()),
            _ => self.error("must be a text that is not empty"),
        }
    }

    fn texts(&self) -> Result<Vec<String>, String> {
        let list = match self.value {
            DeValue::String(text) => vec![Some(text.to_string())],
            DeValue::Array(list) => {
                list.iter().map(|v| v.get_ref().as_str().map(str::to_owned)).collect()
            }
            _ => Vec::new(),
        };
        let texts: Option<Vec<_>> = list.into_iter().collect();
        match texts {
            Some(texts) if !texts.is_empty() && texts.iter().all(|text| !text.is_empty()) => {
                Ok(texts)
            }
            _ => self.error("must be a text or a list of texts, not empty"),
        }
    }

    fn lower(&self) -> Result<Vec<String>, String> {
        Ok(self.texts()?.iter().map(|text| text.to_lowercase()).collect())
    }

    fn bool(&self) -> Result<bool, String> {
        match self.value {
            DeValue::Boolean(value) => Ok(*value),
            _ => self.error("must be true or false"),
        }
    }

    fn number(&self) -> Result<u32, String> {
        match whole(self.value) {
            Some(number) => Ok(number),
            None => self.error("must be a whole number from 0 to 4294967295"),
        }
    }

    fn float(&self, least: f32, most: f32) -> Result<f32, String> {
        let digits = match self.value {
            DeValue::Integer(number) if number.radix() == 10 => number.as_str(),
            DeValue::Float(number) => number.as_str(),
            _ => "",
        };
        // The parser has already removed the underscores of `1_000.5`.
        match digits.parse::<f32>() {
            Ok(number) if (least..=most).contains(&number) => Ok(number),
            _ => self.error(&format!("must be a number from {least} to {most}")),
        }
    }
}

fn whole(value: &DeValue) -> Option<u32> {
    let number = value.as_integer()?;
    u32::from_str_radix(number.as_str(), number.radix()).ok()
}

fn rule(entry: &Entry) -> Result<Rule, String> {
    let mut when = Vec::new();
    let mut effect = None;
    let mut times = None;
    for (key, entry) in entry.entries("")? {
        match key {
            "when" => when = entry.entries("when")?,
            "do" => effect = Some(entry.entries("do")?),
            "times" => times = Some(entry.number()?),
            _ => return entry.unknown(&["when", "do", "times"]),
        }
    }
    let Some(effect) = effect.filter(|effect| !effect.is_empty()) else {
        return Err(format!("{}: `do` is missing", entry.place()));
    };
    let hook = hook(&when, &effect)?;
    if times.is_some() && hook & (PROMPT | REQUEST) != 0 {
        let place = entry.place();
        return Err(format!(
            "{place}: `times` has no effect: the rule applies once, {}",
            name(hook)
        ));
    }
    let when = when.iter().map(condition).collect::<Result<Vec<_>, _>>()?;
    let effect = match hook {
        PROMPT => prompt_effect(&effect)?,
        REQUEST => request_effect(&effect)?,
        STEP => step_effect(&effect)?,
        _ => tool_call_effect(&effect)?,
    };
    if let Effect::Step(effects) = &effect
        && effects.contains(&StepEffect::RewindLoop)
        && !waits_for_loop(&when)
    {
        return Err(format!("{}: `do.rewind` = \"loop\" needs `when.loop` = true", entry.place()));
    }
    let waits = hook != STEP || every(&when, false) == 0;
    Ok(Rule { times: times.unwrap_or(if waits { 0 } else { 1 }), when, effect })
}

/// The hook in which a rule applies: the first in which all its keys are available.
fn hook(when: &[(&str, Entry)], effect: &[(&str, Entry)]) -> Result<Hooks, String> {
    let mut hooks = PROMPT | REQUEST | STEP | TOOL_CALL;
    // `do` comes first, so that a message names the condition that does not fit.
    for (table, (key, entry)) in
        effect.iter().map(|e| (DO, e)).chain(when.iter().map(|e| (WHEN, e)))
    {
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
    }
    Ok(hooks & hooks.wrapping_neg()) // the lowest bit
}

/// When the first of these hooks is called, for messages.
fn name(hooks: Hooks) -> &'static str {
    match hooks & hooks.wrapping_neg() {
        PROMPT => "before the prompt is rendered",
        REQUEST => "before prefill",
        STEP => "during decoding",
        _ => "at a tool call",
    }
}

fn condition((key, entry): &(&str, Entry)) -> Result<Condition, String> {
    let texts = || entry.texts().map(Texts::from_iter);
    let lower = || entry.lower().map(Texts::from_iter);
    Ok(match *key {
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
        "reasoning_tokens_over" => Condition::ReasoningTokensOver(entry.number()?),
        "answer_tokens_over" => Condition::AnswerTokensOver(entry.number()?),
        "text_contains" => Condition::TextContains(texts()?),
        "tool_called" => Condition::ToolCalled(texts()?),
        "arguments_contain" => Condition::ArgumentsContain(texts()?),
        "repeats_over" => Condition::RepeatsOver(entry.number()?),
        "calls_over" => Condition::CallsOver(entry.number()?),
        other => unreachable!("`hook` refused {other}"),
    })
}

fn prompt_effect(entries: &[(&str, Entry)]) -> Result<Effect, String> {
    let (mut spans, mut lines) = (Vec::new(), Vec::new());
    for (key, entry) in entries {
        match *key {
            "strip" => spans = entry.texts()?,
            _ => lines = entry.texts()?,
        }
    }
    Ok(Effect::Prompt { spans, lines })
}

fn request_effect(entries: &[(&str, Entry)]) -> Result<Effect, String> {
    let mut plan = Plan { sampling: sampling(entries)?, ..Plan::default() };
    let mut status = None;
    for (key, entry) in entries {
        match *key {
            "reasoning" => plan.reasoning = Some(entry.bool()?),
            "reasoning_budget" => plan.reasoning_budget = Some(entry.number()?),
            "answer_reserve" => plan.answer_reserve = Some(entry.number()?),
            "loops" => plan.loops = Some(loops(entry)?),
            "retain" => plan.retain = Some(retain(entry)?),
            "form" => plan.form = Some(form(entry)?),
            "refuse" => plan.refuse = Some(Refusal { status: 403, message: entry.text()? }),
            "status" => match entry.number()? {
                number @ 400..=499 => status = Some((number as u16, entry)),
                _ => return entry.error("must be an HTTP status from 400 to 499"),
            },
            "max_tokens" => match entry.number()? {
                0 => return entry.error("must be at least 1"),
                tokens => plan.max_tokens = Some(tokens),
            },
            "limit_counts" => match entry.text()?.as_str() {
                "answer" => plan.limit_counts = Some(Counted::Answer),
                "reply" => plan.limit_counts = Some(Counted::Reply),
                _ => return entry.error("must be \"answer\" or \"reply\""),
            },
            "stop_at" => match entry.texts()? {
                texts if texts.len() > STOPS => {
                    return entry.error(&format!("must have at most {STOPS} texts"));
                }
                texts => plan.stop = texts,
            },
            "offer_tools" => plan.tools = Some(tool_names(entry)?),
            "note" => plan.note = Some(entry.text()?),
            _ => {}
        }
    }
    match (&mut plan.refuse, status) {
        (Some(refusal), Some((status, _))) => refusal.status = status,
        (None, Some((_, entry))) => return entry.error("needs `do.refuse`"),
        (_, None) => {}
    }
    Ok(Effect::Request(Box::new(plan)))
}

/// Names of tools; an empty list names none.
fn tool_names(entry: &Entry) -> Result<Vec<String>, String> {
    if entry.value.as_array().is_some_and(|list| list.is_empty()) {
        return Ok(Vec::new());
    }
    entry.texts()
}

fn sampling(entries: &[(&str, Entry)]) -> Result<SamplingPatch, String> {
    let mut sampling = SamplingPatch::default();
    for (key, entry) in entries {
        match *key {
            "temperature" => sampling.temperature = Some(entry.float(0.0, 10.0)?),
            "top_p" => match entry.float(0.0, 1.0)? {
                0.0 => return entry.error("must be more than 0"),
                top_p => sampling.top_p = Some(top_p),
            },
            "top_k" => sampling.top_k = Some(entry.number()?),
            "min_p" => sampling.min_p = Some(entry.float(0.0, 1.0)?),
            _ => {}
        }
    }
    Ok(sampling)
}

fn loops(entry: &Entry) -> Result<LoopRule, String> {
    let mut loops = LOOPS;
    for (key, entry) in entry.entries("do.loops")? {
        match key {
            "max_period" => loops.max_period = entry.number()?,
            "repeats" => loops.repeats = entry.number()?,
            "min_tokens" => loops.min_tokens = entry.number()?,
            "similarity" => loops.similarity = entry.float(0.5, 1.0)?,
            _ => return entry.unknown(&["max_period", "repeats", "min_tokens", "similarity"]),
        }
    }
    Ok(loops)
}

fn retain(entry: &Entry) -> Result<Vec<Retention>, String> {
    let problem = "must be a list of { at = \"system\", \"turns\", \"prompt\" or \"reply\", \
                   seconds = a whole number }";
    let Some(list) = entry.value.as_array().filter(|list| list.len() <= MAX_ACTIONS) else {
        return entry.error(problem);
    };
    let mut retained = Vec::new();
    for value in list.iter() {
        let Some(table) = value.get_ref().as_table() else { return entry.error(problem) };
        let (mut at, mut seconds) = (None, Some(0));
        for (key, value) in table {
            match (key.get_ref().as_ref(), value.get_ref().as_str()) {
                ("at", Some("system")) => at = Some(SavePoint::System),
                ("at", Some("turns")) => at = Some(SavePoint::Turns),
                ("at", Some("prompt")) => at = Some(SavePoint::Prompt),
                ("at", Some("reply")) => at = Some(SavePoint::Reply),
                ("seconds", None) => seconds = whole(value.get_ref()),
                _ => return entry.error(problem),
            }
        }
        let (Some(at), Some(seconds)) = (at, seconds) else { return entry.error(problem) };
        retained.push(Retention { at, seconds });
    }
    Ok(retained)
}

fn form(entry: &Entry) -> Result<AnswerForm, String> {
    if entry.value.as_str() == Some("json") {
        return Ok(AnswerForm::JsonObject);
    }
    let problem =
        "must be \"json\" or a table with one of the keys json_schema, regex, grammar, choice";
    match entry.entries("do.form").as_deref() {
        Ok([("json_schema", schema)]) => Ok(AnswerForm::JsonSchema(schema.text()?)),
        Ok([("regex", regex)]) => Ok(AnswerForm::Regex(regex.text()?)),
        Ok([("grammar", grammar)]) => Ok(AnswerForm::Grammar(grammar.text()?)),
        Ok([("choice", choice)]) => Ok(AnswerForm::Choice(choice.texts()?)),
        _ => entry.error(problem),
    }
}

fn step_effect(entries: &[(&str, Entry)]) -> Result<Effect, String> {
    let mut steps = 0;
    let mut timed = false;
    for (_, entry) in entries.iter().filter(|(key, _)| *key == "for") {
        (steps, timed) = (entry.number()?, true);
    }
    let mut effects = Vec::new();
    let sampling = sampling(entries)?;
    let mut lasting = sampling != SamplingPatch::default();
    if lasting {
        effects.push(Action::Sampling(SamplingChange { sampling, steps }));
    }
    let mut rewinds_loop = false;
    for (key, entry) in entries {
        match *key {
            "inject" => effects.push(Action::Inject(entry.text()?)),
            // May be empty: then only the marker follows the reasoning.
            "close_reasoning" => match entry.value.as_str() {
                Some(text) => effects.push(Action::CloseReasoning(text.into())),
                None => return entry.error("must be a text"),
            },
            "rewind" if entry.value.as_str() == Some("loop") => rewinds_loop = true,
            "rewind" => match whole(entry.value) {
                Some(tokens) if tokens > 0 => effects.push(Action::Rewind(tokens)),
                _ => return entry.error("must be a number of tokens, or \"loop\""),
            },
            "ban" => {
                lasting = true;
                effects.push(Action::Ban(Ban { tokens: tokens(entry)?, steps }));
            }
            "bias" => {
                lasting = true;
                effects.push(Action::Bias(Bias { tokens: biases(entry)?, steps }));
            }
            "stop" => effects.push(Action::Stop(entry.text()?)),
            _ => {}
        }
    }
    if timed && !lasting {
        let (_, entry) = &entries[0];
        let place = entry.place();
        return Err(format!(
            "{place}: `do.for` limits a ban, a bias or sampling, and the rule has none"
        ));
    }
    // Actions after a stop are dropped.
    effects.sort_by_key(|effect| matches!(effect, Action::Stop(_)));
    let effects = effects.into_iter().map(StepEffect::Do);
    let rewind = rewinds_loop.then_some(StepEffect::RewindLoop);
    Ok(Effect::Step(rewind.into_iter().chain(effects).collect()))
}

fn tokens(entry: &Entry) -> Result<Vec<u32>, String> {
    let list = entry.value.as_array();
    let tokens: Option<Vec<_>> =
        list.and_then(|list| list.iter().map(|value| whole(value.get_ref())).collect());
    match tokens {
        Some(tokens) if (1..=MAX_TOKENS).contains(&tokens.len()) => Ok(tokens),
        _ => entry.error(&format!("must be a list of 1 to {MAX_TOKENS} token ids")),
    }
}

fn biases(entry: &Entry) -> Result<Vec<TokenBias>, String> {
    let entries = entry.entries("do.bias")?;
    if !(1..=MAX_TOKENS).contains(&entries.len()) {
        return entry.error(&format!("must name 1 to {MAX_TOKENS} tokens"));
    }
    let bias = |(key, entry): &(&str, Entry)| match key.parse() {
        Ok(token) => Ok(TokenBias { token, bias: entry.float(-100.0, 100.0)? }),
        Err(_) => entry.error("must be a token id"),
    };
    entries.iter().map(bias).collect()
}

fn tool_call_effect(entries: &[(&str, Entry)]) -> Result<Effect, String> {
    let [(key, entry)] = entries else {
        let (_, entry) = &entries[0];
        return entry
            .error("must be the only key of `do`: a call is either repaired or ends the request");
    };
    Ok(Effect::ToolCall(match *key {
        "repair" => Verdict::Repair(entry.text()?),
        _ => Verdict::Stop(entry.text()?),
    }))
}
