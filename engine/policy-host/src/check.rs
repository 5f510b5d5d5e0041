//! Checks the answers of guests against the contract, as `wit/policy.wit` documents it.
//!
//! A violation is a failure of the policy. Values that the engine clamps or ignores (a rewind that is
//! too long, thresholds out of range) are not checked here.

use crate::contract::{
    Action, Answer, AnswerForm, Call, EVENT_TEXT_BYTES, HOOK_OFF, Hook, LABEL_BYTES,
    LABEL_NAME_BYTES, Labels, MAX_ACTIONS, MAX_BIAS, MAX_CANDIDATES, MAX_EDITS, MAX_EVENT_TEXTS,
    MAX_LABELS, MAX_RETENTIONS, MAX_STOPS, MAX_TEMPERATURE, MAX_TOKENS, MAX_WATCHED,
    OPTIONAL_HOOKS, Plan, PromptEdit, Replacement, SamplingPatch, TextVerdict, Verdict, Vocabulary,
    WatchedToken,
};

/// Checks the answer to a call.
///
/// # Errors
/// The violation, in one line.
pub fn answer(
    call: &Call<'_>,
    answer: &Answer,
    vocabulary: &dyn Vocabulary,
    output_bytes: usize,
) -> Result<(), String> {
    match answer {
        Answer::Params(prepared) => {
            let replaced =
                prepared.replaced.iter().flat_map(|(name, text)| [name.len(), text.len()]);
            text(replaced.chain(prepared.problems.iter().map(String::len)), output_bytes)?;
            let Call::Params(view) = call else { return Err("answers another hook".into()) };
            let is_unknown = |(name, text): &&(String, String)| {
                let turns_off =
                    OPTIONAL_HOOKS.map(Hook::name).contains(&&**name) && text == HOOK_OFF;
                !turns_off && view.params.iter().all(|(known, _)| known != name)
            };
            match prepared.replaced.iter().find(is_unknown) {
                Some((name, _)) => Err(format!("replaces `{name}`, which is not a parameter")),
                None => Ok(()),
            }
        }
        Answer::Prompt(edits) => {
            if edits.is_empty() {
                return Ok(());
            }
            at_most(MAX_EDITS, edits.len(), "edits")?;
            text(edits.iter().map(edit_bytes), output_bytes)?;
            let Call::Prompt(view) = call else { return Err("answers another hook".into()) };
            apply_edits(&mut view.system.clone(), edits)
        }
        Answer::Request(plan) => {
            events(plan, vocabulary)?;
            sampling(&plan.sampling)?;
            let retentions = plan.retain.as_ref().map_or(0, Vec::len);
            at_most(MAX_RETENTIONS, retentions, "entries in `retain`")?;
            at_most(MAX_STOPS, plan.stop.len(), "stop strings")?;
            if plan.stop.iter().any(String::is_empty) {
                return Err("a stop string is empty".into());
            }
            if plan.max_tokens == Some(0) {
                return Err("`max-tokens` is 0, must be at least 1".into());
            }
            let statuses = 400..=499;
            let status = plan.refuse.as_ref().map(|refusal| refusal.status);
            if let Some(status) = status.filter(|status| !statuses.contains(status)) {
                return Err(format!("refuses with the status {status}, not 400 to 499"));
            }
            let texts = plan.note.iter().chain(&plan.stop).chain(plan.tools.iter().flatten());
            let texts = texts.chain(plan.refuse.iter().map(|refusal| &refusal.message));
            let texts = texts.chain(&plan.on_texts).chain(&plan.route);
            let form = plan.form.iter().map(form_bytes);
            text(texts.map(String::len).chain(form), output_bytes)?;
            match &plan.form {
                Some(form) => {
                    vocabulary.check_form(form).map_err(|problem| format!("`form`: {problem}"))
                }
                None => Ok(()),
            }
        }
        // Most steps have no actions; asking for the size of the vocabulary may cost.
        Answer::Step(list) if list.is_empty() => Ok(()),
        Answer::Step(list) => actions(list, vocabulary.size(), output_bytes),
        Answer::Text(TextVerdict::Replace(change)) => text([change.text.len()], output_bytes),
        Answer::ToolCall(Verdict::Repair(words) | Verdict::Stop(words)) => {
            text([words.len()], output_bytes)
        }
        Answer::Finish(list) => labels(list),
        Answer::Text(TextVerdict::Pass | TextVerdict::Hold(_))
        | Answer::ToolCall(Verdict::Accept) => Ok(()),
    }
}

/// The events that a plan asks for, the candidates, and the tokens that it watches.
fn events(plan: &Plan, vocabulary: &dyn Vocabulary) -> Result<(), String> {
    at_most(MAX_EVENT_TEXTS, plan.on_texts.len(), "texts in `on-texts`")?;
    let lengths = 1..=EVENT_TEXT_BYTES;
    if let Some(text) = plan.on_texts.iter().find(|text| !lengths.contains(&text.len())) {
        let bytes = text.len();
        return Err(format!(
            "a text in `on-texts` has {bytes} bytes, must have 1 to {EVENT_TEXT_BYTES}"
        ));
    }
    if plan.candidates > MAX_CANDIDATES {
        let asked = plan.candidates;
        return Err(format!("`candidates` is {asked}, must be at most {MAX_CANDIDATES}"));
    }
    at_most(MAX_WATCHED, plan.watch.len(), "tokens in `watch`")?;
    let text = plan.watch.iter().find_map(|watched| match watched {
        WatchedToken::Text(text) => Some(text.len()).filter(|bytes| !lengths.contains(bytes)),
        WatchedToken::Token(_) | WatchedToken::ReasoningEnd => None,
    });
    if let Some(bytes) = text {
        return Err(format!(
            "a text in `watch` has {bytes} bytes, must have 1 to {EVENT_TEXT_BYTES}"
        ));
    }
    let watched = plan.watch.iter().filter_map(|watched| match watched {
        WatchedToken::Token(token) => Some(*token),
        WatchedToken::Text(_) | WatchedToken::ReasoningEnd => None,
    });
    let watched: Vec<_> = watched.collect();
    if !watched.is_empty() {
        known(watched.into_iter(), vocabulary.size())
            .map_err(|problem| format!("`watch`: {problem}"))?;
    }
    if plan.on_tokens.is_empty() {
        return Ok(());
    }
    known(plan.on_tokens.iter().copied(), vocabulary.size())
        .map_err(|problem| format!("`on-tokens`: {problem}"))
}

fn labels(labels: &Labels) -> Result<(), String> {
    at_most(MAX_LABELS, labels.len(), "labels")?;
    for (name, value) in labels {
        if !(1..=LABEL_NAME_BYTES).contains(&name.len()) {
            let bytes = name.len();
            return Err(format!(
                "the name of a label has {bytes} bytes, must have 1 to {LABEL_NAME_BYTES}"
            ));
        }
        if value.len() > LABEL_BYTES {
            return Err(format!(
                "the label `{name}` has {} bytes, must have at most {LABEL_BYTES}",
                value.len()
            ));
        }
    }
    Ok(())
}

/// Applies `edits` in order to the texts of `PromptView::system`. They may come from several policies, so
/// their number is checked per answer and not here.
///
/// # Errors
/// The first edit that does not apply; `system` is then unchanged.
pub fn apply_edits(system: &mut Vec<String>, edits: &[PromptEdit]) -> Result<(), String> {
    let mut texts = system.clone();
    for (i, edit) in edits.iter().enumerate() {
        if texts.is_empty() && !matches!(edit, PromptEdit::Replace(_)) {
            texts.push(String::new());
        }
        match (edit, &mut texts[..]) {
            (PromptEdit::Begin(text), [first, ..]) => first.insert_str(0, text),
            (PromptEdit::End(text), [.., last]) => last.push_str(text),
            (PromptEdit::Begin(_) | PromptEdit::End(_), []) => {}
            (PromptEdit::Replace(Replacement { message, old, new }), texts) => {
                let count = texts.len();
                let Some(text) = texts.get_mut(*message as usize) else {
                    return Err(format!("edit {i} names message {message} of {count}"));
                };
                if old.is_empty() {
                    return Err(format!("edit {i} has an empty span"));
                }
                let Some(at) = text.find(old) else {
                    return Err(format!("edit {i}: message {message} does not contain its span"));
                };
                text.replace_range(at..at + old.len(), new);
            }
        }
    }
    *system = texts;
    Ok(())
}

fn edit_bytes(edit: &PromptEdit) -> usize {
    match edit {
        PromptEdit::Replace(Replacement { old, new, .. }) => old.len() + new.len(),
        PromptEdit::Begin(text) | PromptEdit::End(text) => text.len(),
    }
}

fn actions(actions: &[Action], vocabulary: u32, output_bytes: usize) -> Result<(), String> {
    at_most(MAX_ACTIONS, actions.len(), "actions")?;
    text(actions.iter().map(text_bytes), output_bytes)?;
    for (index, action) in actions.iter().enumerate() {
        let checked = match action {
            Action::Inject(_) | Action::CloseReasoning(_) | Action::Rewind(_) | Action::Stop(_) => {
                Ok(())
            }
            Action::Ban(ban) => known(ban.tokens.iter().copied(), vocabulary),
            Action::Bias(bias) => known(bias.tokens.iter().map(|one| one.token), vocabulary)
                .and_then(|()| {
                    let within = |bias: f32| (-MAX_BIAS..=MAX_BIAS).contains(&bias);
                    bias.tokens.iter().find(|one| !within(one.bias)).map_or(Ok(()), |one| {
                        Err(format!("bias is {}, not in [-{MAX_BIAS}, {MAX_BIAS}]", one.bias))
                    })
                }),
            Action::Sampling(change) => sampling(&change.sampling),
        };
        checked.map_err(|problem| format!("action {index}: {problem}"))?;
    }
    Ok(())
}

fn text_bytes(action: &Action) -> usize {
    match action {
        Action::Inject(text) | Action::CloseReasoning(text) | Action::Stop(text) => text.len(),
        Action::Rewind(_) | Action::Ban(_) | Action::Bias(_) | Action::Sampling(_) => 0,
    }
}

fn form_bytes(form: &AnswerForm) -> usize {
    match form {
        AnswerForm::JsonObject => 0,
        AnswerForm::JsonSchema(text) | AnswerForm::Regex(text) | AnswerForm::Grammar(text) => {
            text.len()
        }
        AnswerForm::Choice(texts) => texts.iter().map(String::len).sum(),
    }
}

/// NaN is out of every range.
fn sampling(patch: &SamplingPatch) -> Result<(), String> {
    let SamplingPatch { temperature, top_p, min_p, top_k: _ } = *patch;
    let outside = |value: Option<f32>, max: f32| value.filter(|v| !(0.0..=max).contains(v));
    if let Some(value) = outside(temperature, MAX_TEMPERATURE) {
        return Err(format!("temperature is {value}, not in [0, {MAX_TEMPERATURE}]"));
    }
    if let Some(value) = outside(top_p, 1.0).or(top_p.filter(|value| *value == 0.0)) {
        return Err(format!("top-p is {value}, not in (0, 1]"));
    }
    if let Some(value) = outside(min_p, 1.0) {
        return Err(format!("min-p is {value}, not in [0, 1]"));
    }
    Ok(())
}

fn known(tokens: impl ExactSizeIterator<Item = u32>, vocabulary: u32) -> Result<(), String> {
    at_most(MAX_TOKENS, tokens.len(), "tokens")?;
    match tokens.into_iter().find(|token| *token >= vocabulary) {
        Some(token) => Err(format!("token {token} is not in the vocabulary of {vocabulary}")),
        None => Ok(()),
    }
}

fn at_most(most: usize, count: usize, what: &str) -> Result<(), String> {
    if count > most {
        return Err(format!("answered with more than {most} {what}"));
    }
    Ok(())
}

fn text(lengths: impl IntoIterator<Item = usize>, most: usize) -> Result<(), String> {
    if lengths.into_iter().fold(0, usize::saturating_add) > most {
        return Err(format!("answered with more than {most} bytes"));
    }
    Ok(())
}
