//! Parses what a rule does: the table `do`, whose keys belong to one hook.

use steersman_policy::{
    Action, AnswerForm, Ban, Bias, Counted, LoopRule, Plan, Refusal, Retention, SamplingChange,
    SamplingPatch, SavePoint, TokenBias, Verdict,
};
use toml::de::DeValue;

use super::entry::{Entry, Mistakes, both, each, whole};
use super::parse::MAX_ACTIONS;
use super::replace::Replacement;
use super::rule::{Effect, StepEffect};
use super::{EVENT_TEXT_BYTES, LOOPS, STOPS};

/// Most tokens of a ban or a bias.
const MAX_TOKENS: usize = 256;

/// Most tokens that a text stands for: the text, and the text behind a space.
const TOKENS_OF_TEXT: usize = 2;

pub fn of_prompt(entries: &[(&str, Entry)]) -> Result<Effect, Mistakes> {
    let (mut spans, mut lines) = (Vec::new(), Vec::new());
    each(entries, |(key, entry)| {
        match *key {
            "strip" => spans = entry.texts()?,
            _ => lines = entry.texts()?,
        }
        Ok(())
    })?;
    Ok(Effect::Prompt { spans, lines })
}

pub fn of_request(entries: &[(&str, Entry)]) -> Result<Effect, Mistakes> {
    let (mut plan, mut status) = (Plan::default(), None);
    let read = each(entries, |(key, entry)| {
        match *key {
            "reasoning" => plan.reasoning = Some(entry.bool()?),
            "reasoning_budget" => plan.reasoning_budget = Some(entry.number()?),
            "answer_reserve" => plan.answer_reserve = Some(entry.number()?),
            "loops" => plan.loops = Some(loops(entry)?),
            "retain" => plan.retain = Some(retain(entry)?),
            "form" => plan.form = Some(form(entry)?),
            "refuse" => {
                let message = entry.text()?;
                plan.refuse = Some(Refusal { status: 403, message, retry_after: None });
            }
            "status" => match entry.number()? {
                number @ 400..=499 => status = Some((number as u16, entry)),
                _ => return entry.error("must be an HTTP status from 400 to 499"),
            },
            "max_tokens" => plan.max_tokens = Some(entry.count()?),
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
            "route" => plan.route = Some(entry.text()?),
            "note" => plan.note = Some(entry.text()?),
            _ => {}
        }
        Ok(())
    });
    (plan.sampling, ()) = both(sampling(entries), read)?;
    match (&mut plan.refuse, status) {
        (Some(refusal), Some((status, _))) => refusal.status = status,
        (None, Some((_, entry))) => return entry.error("needs `do.refuse`"),
        (_, None) => {}
    }
    Ok(Effect::Request(Box::new(plan)))
}

/// Names of tools; an empty list names none.
fn tool_names(entry: &Entry) -> Result<Vec<String>, Mistakes> {
    if entry.value.as_array().is_some_and(|list| list.is_empty()) {
        return Ok(Vec::new());
    }
    entry.texts()
}

fn sampling(entries: &[(&str, Entry)]) -> Result<SamplingPatch, Mistakes> {
    let mut sampling = SamplingPatch::default();
    each(entries, |(key, entry)| {
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
        Ok(())
    })?;
    Ok(sampling)
}

fn loops(entry: &Entry) -> Result<LoopRule, Mistakes> {
    let mut loops = LOOPS;
    each(entry.entries("do.loops")?, |(key, entry)| {
        match key {
            "max_period" => loops.max_period = entry.number()?,
            "repeats" => loops.repeats = entry.number()?,
            "min_tokens" => loops.min_tokens = entry.number()?,
            "similarity" => loops.similarity = entry.float(0.5, 1.0)?,
            _ => return entry.unknown(&["max_period", "repeats", "min_tokens", "similarity"]),
        }
        Ok(())
    })?;
    Ok(loops)
}

fn retain(entry: &Entry) -> Result<Vec<Retention>, Mistakes> {
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

fn form(entry: &Entry) -> Result<AnswerForm, Mistakes> {
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

pub fn of_step(entries: &[(&str, Entry)]) -> Result<Effect, Mistakes> {
    let (mut steps, mut timed) = (0, false);
    let timing = each(entries.iter().filter(|(key, _)| *key == "for"), |(_, entry)| {
        (steps, timed) = (entry.number()?, true);
        Ok(())
    });
    let mut effects = Vec::new();
    let sampled = sampling(entries);
    let sampling = sampled.clone().unwrap_or_default();
    let mut lasting = sampling != SamplingPatch::default();
    if lasting {
        effects.push(StepEffect::Do(Action::Sampling(SamplingChange { sampling, steps })));
    }
    let read = each(entries, |(key, entry)| {
        let action = match *key {
            "inject" => Action::Inject(entry.text()?),
            // May be empty: then only the marker follows the reasoning.
            "close_reasoning" => match entry.value.as_str() {
                Some(text) => Action::CloseReasoning(text.into()),
                None => return entry.error("must be a text"),
            },
            "rewind" if entry.value.as_str() == Some("loop") => {
                effects.push(StepEffect::RewindLoop);
                return Ok(());
            }
            "rewind" => match whole(entry.value) {
                Some(tokens) if tokens > 0 => Action::Rewind(tokens),
                _ => return entry.error("must be a number of tokens, or \"loop\""),
            },
            "ban" => {
                lasting = true;
                effects.push(ban(entry, steps)?);
                return Ok(());
            }
            "bias" => {
                lasting = true;
                effects.push(bias(entry, steps)?);
                return Ok(());
            }
            "stop" => Action::Stop(entry.text()?),
            _ => return Ok(()),
        };
        effects.push(StepEffect::Do(action));
        Ok(())
    });
    both(both(timing, sampled), read)?;
    if timed && !lasting {
        let (_, entry) = &entries[0];
        let place = entry.place();
        return Err(vec![format!(
            "{place}: `do.for` limits a ban, a bias or sampling, and the rule has none"
        )]);
    }
    // A rewind of a loop is the first action. Actions after a stop are dropped.
    effects.sort_by_key(|effect| match effect {
        StepEffect::RewindLoop => 0,
        StepEffect::Do(Action::Stop(_)) => 2,
        _ => 1,
    });
    Ok(Effect::Step(effects))
}

fn ban(entry: &Entry, steps: u32) -> Result<StepEffect, Mistakes> {
    let problem = format!(
        "must be a text, or a list of token ids and texts, for at most {MAX_TOKENS} tokens; a text stands \
         for {TOKENS_OF_TEXT}"
    );
    let single = [entry.value];
    let list: Vec<&DeValue> = match entry.value {
        DeValue::Array(list) => list.iter().map(|value| value.get_ref()).collect(),
        _ => single.into_iter().filter(|value| value.as_str().is_some()).collect(),
    };
    let (mut tokens, mut texts) = (Vec::new(), Vec::new());
    for value in &list {
        match (whole(value), value.as_str()) {
            (Some(token), _) => tokens.push(token),
            (None, Some(text)) if is_bannable(text) => texts.push(text.to_owned()),
            _ => return entry.error(&problem),
        }
    }
    if !(1..=MAX_TOKENS).contains(&(tokens.len() + TOKENS_OF_TEXT * texts.len())) {
        return entry.error(&problem);
    }
    let ban = Ban { tokens, steps };
    Ok(match texts.is_empty() {
        true => StepEffect::Do(Action::Ban(ban)),
        false => StepEffect::BanTexts(ban, texts),
    })
}

fn bias(entry: &Entry, steps: u32) -> Result<StepEffect, Mistakes> {
    let (mut tokens, mut texts) = (Vec::new(), Vec::new());
    each(entry.entries("do.bias")?, |(key, entry)| {
        let bias = entry.float(-100.0, 100.0)?;
        match key.parse() {
            Ok(token) => tokens.push(TokenBias { token, bias }),
            Err(_) if is_bannable(key) => texts.push((key.to_owned(), bias)),
            Err(_) => {
                return entry.error(&format!(
                    "must be a token id, or a text of 1 to {EVENT_TEXT_BYTES} bytes"
                ));
            }
        }
        Ok(())
    })?;
    if !(1..=MAX_TOKENS).contains(&(tokens.len() + TOKENS_OF_TEXT * texts.len())) {
        return entry.error(&format!(
            "must have 1 to {MAX_TOKENS} tokens; a text stands for {TOKENS_OF_TEXT}"
        ));
    }
    let bias = Bias { tokens, steps };
    Ok(match texts.is_empty() {
        true => StepEffect::Do(Action::Bias(bias)),
        false => StepEffect::BiasTexts(bias, texts),
    })
}

/// Whether a text may be a token.
fn is_bannable(text: &str) -> bool {
    (1..=EVENT_TEXT_BYTES).contains(&text.len())
}

pub fn of_tool_call(entries: &[(&str, Entry)]) -> Result<Effect, Mistakes> {
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

pub fn of_text(entries: &[(&str, Entry)]) -> Result<Effect, Mistakes> {
    let mut all = Vec::new();
    each(entries, |(key, entry)| {
        let (path, is_word) = match *key {
            "replace" => ("do.replace", false),
            _ => ("do.replace_words", true),
        };
        let mut replaced = Vec::new();
        each(entry.entries(path)?, |(old, entry)| {
            let Some(new) = entry.value.as_str().map(str::to_owned) else {
                return entry.error("must be a text, which may be empty");
            };
            if !(1..=EVENT_TEXT_BYTES).contains(&old.len()) {
                return entry.error(&format!("must have a name of 1 to {EVENT_TEXT_BYTES} bytes"));
            }
            let old = if is_word { old.to_lowercase() } else { old.to_owned() };
            replaced.push(Replacement { old, new, is_word });
            Ok(())
        })?;
        if replaced.is_empty() {
            return entry.error("must have entries: { \"old text\" = \"new text\" }");
        }
        all.append(&mut replaced);
        Ok(())
    })?;
    // Of two texts that begin at one place, the longer one is meant.
    all.sort_by_key(|replacement| std::cmp::Reverse(replacement.old.len()));
    Ok(Effect::Text(all))
}
