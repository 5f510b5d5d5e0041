//! Checks the answers of guests against the contract, as `wit/policy.wit` documents it.
//!
//! A violation is a failure of the policy. Values that the engine clamps or ignores (a rewind that is
//! too long, thresholds out of range) are not checked here.

use crate::contract::{
    Action, Answer, Call, MAX_ACTIONS, MAX_BIAS, MAX_REPLACEMENTS, MAX_RETENTIONS, MAX_TEMPERATURE,
    MAX_TOKENS, Replacement, SamplingPatch, Verdict, Vocabulary,
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
        Answer::Prompt(replacements) => {
            if replacements.is_empty() {
                return Ok(());
            }
            at_most(MAX_REPLACEMENTS, replacements.len(), "replacements")?;
            text(replacements.iter().flat_map(|r| [r.old.len(), r.new.len()]), output_bytes)?;
            let Call::Prompt(view) = call else { return Err("answers another hook".into()) };
            apply_replacements(&mut view.system.clone(), replacements)
        }
        Answer::Request(plan) => {
            sampling(&plan.sampling)?;
            let retentions = plan.retain.as_ref().map_or(0, Vec::len);
            at_most(MAX_RETENTIONS, retentions, "entries in `retain`")?;
            text(plan.note.iter().map(String::len), output_bytes)
        }
        // Most steps have no actions; asking for the size of the vocabulary may cost.
        Answer::Step(list) if list.is_empty() => Ok(()),
        Answer::Step(list) => actions(list, vocabulary.size(), output_bytes),
        Answer::ToolCall(Verdict::Repair(words) | Verdict::Stop(words)) => {
            text([words.len()], output_bytes)
        }
        Answer::ToolCall(Verdict::Accept) | Answer::Finish(()) => Ok(()),
    }
}

/// Applies `replacements` in order to the texts of `PromptView::system`. They may come from several
/// policies, so their number is checked per answer and not here.
///
/// # Errors
/// The first replacement that does not apply; `system` is then unchanged.
pub fn apply_replacements(
    system: &mut [String],
    replacements: &[Replacement],
) -> Result<(), String> {
    let mut texts = system.to_vec();
    for (i, Replacement { message, old, new }) in replacements.iter().enumerate() {
        let count = texts.len();
        let Some(text) = texts.get_mut(*message as usize) else {
            return Err(format!("replacement {i} names message {message} of {count}"));
        };
        if old.is_empty() {
            return Err(format!("replacement {i} has an empty span"));
        }
        let Some(at) = text.find(old) else {
            return Err(format!("replacement {i}: message {message} does not contain its span"));
        };
        text.replace_range(at..at + old.len(), new);
    }
    system.clone_from_slice(&texts);
    Ok(())
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

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;
    use crate::contract::{
        Ban, Bias, Plan, PromptView, Retention, SamplingChange, SavePoint, Step, TokenBias,
    };

    const BYTES: usize = 100;
    const VOCABULARY: u32 = 512;

    struct Sized;

    impl Vocabulary for Sized {
        fn encode(&self, _: &str) -> Option<Vec<u32>> {
            None
        }

        fn decode(&self, _: &[u32]) -> String {
            String::new()
        }

        fn size(&self) -> u32 {
            VOCABULARY
        }
    }

    fn check(made: &Answer) -> Result<(), String> {
        let call = Call::Step(Cow::Owned(Step::default()));
        answer(&call, made, &Sized, BYTES)
    }

    fn check_actions(actions: &[Action]) -> Result<(), String> {
        check(&Answer::Step(actions.to_vec()))
    }

    fn check_plan(plan: &Plan) -> Result<(), String> {
        check(&Answer::Request(plan.clone()))
    }

    fn check_verdict(verdict: Verdict) -> Result<(), String> {
        check(&Answer::ToolCall(verdict))
    }

    fn bias(token: u32, bias: f32) -> Action {
        Action::Bias(Bias { tokens: vec![TokenBias { token, bias }], steps: 0 })
    }

    fn ban(tokens: Vec<u32>) -> Action {
        Action::Ban(Ban { tokens, steps: 0 })
    }

    #[test]
    fn values_beyond_a_limit_are_refused_with_the_limit() {
        let sampling = |sampling| Action::Sampling(SamplingChange { sampling, steps: 0 });
        let temperature =
            |value| sampling(SamplingPatch { temperature: Some(value), ..Default::default() });
        let top_p = |value| sampling(SamplingPatch { top_p: Some(value), ..Default::default() });
        let min_p = |value| sampling(SamplingPatch { min_p: Some(value), ..Default::default() });
        let cases = [
            (Action::Stop("x".repeat(BYTES + 1)), "more than 100 bytes"),
            (ban(vec![VOCABULARY]), "token 512 is not in the vocabulary of 512"),
            (ban(vec![0; MAX_TOKENS + 1]), "more than 256 tokens"),
            (bias(VOCABULARY, 0.0), "token 512 is not in"),
            (bias(0, f32::NAN), "bias is NaN, not in [-100, 100]"),
            (bias(0, f32::INFINITY), "bias is inf"),
            (bias(0, f32::NEG_INFINITY), "bias is -inf"),
            (bias(0, MAX_BIAS.next_up()), "not in [-100, 100]"),
            (temperature(f32::NAN), "temperature is NaN, not in [0, 10]"),
            (temperature(-0.1), "temperature is -0.1"),
            (temperature(MAX_TEMPERATURE.next_up()), "not in [0, 10]"),
            (top_p(0.0), "top-p is 0, not in (0, 1]"),
            (top_p(f32::INFINITY), "top-p is inf"),
            (min_p(1.5), "min-p is 1.5, not in [0, 1]"),
        ];
        for (action, problem) in cases {
            let error = check_actions(std::slice::from_ref(&action)).unwrap_err();
            assert!(error.contains(problem), "{action:?}: {error}");
        }
        let many = check_actions(&[const { Action::Rewind(1) }; MAX_ACTIONS + 1]);
        assert_eq!(many, Err("answered with more than 16 actions".into()));
        let half = Action::Inject("x".repeat(BYTES / 2 + 1));
        assert!(check_actions(&[half.clone(), half]).is_err(), "texts count together");
    }

    #[test]
    fn plans_and_verdicts_are_checked() {
        let retention = Retention { at: SavePoint::System, seconds: u32::MAX };
        let plan = Plan {
            retain: Some(vec![retention; MAX_RETENTIONS]),
            note: Some("x".repeat(BYTES)),
            ..Plan::default()
        };
        assert_eq!(check_plan(&plan), Ok(()));
        let long = Plan { note: Some("x".repeat(BYTES + 1)), ..plan.clone() };
        assert_eq!(check_plan(&long), Err("answered with more than 100 bytes".into()));
        let many = Plan { retain: Some(vec![retention; MAX_RETENTIONS + 1]), ..plan };
        assert!(check_plan(&many).is_err());
        let sampling = SamplingPatch { min_p: Some(f32::NAN), ..SamplingPatch::default() };
        assert!(check_plan(&Plan { sampling, ..Plan::default() }).is_err());
        assert_eq!(check_verdict(Verdict::Accept), Ok(()));
        assert_eq!(check_verdict(Verdict::Repair("x".repeat(BYTES))), Ok(()));
        assert!(check_verdict(Verdict::Stop("x".repeat(BYTES + 1))).is_err());
    }

    #[test]
    fn replacements_apply_in_order_or_not_at_all() {
        let long = "x".repeat(BYTES);
        let before = ["version 7; be brief; be brief".to_owned(), "date".to_owned()];
        let all = "version 7; be brief; be brief";
        type Case<'a> = (&'a [(u32, &'a str, &'a str)], Result<[&'a str; 2], &'a str>);
        let cases: [Case; 9] = [
            (&[], Ok([all, "date"])),
            (&[(0, "version 7; ", "")], Ok(["be brief; be brief", "date"])),
            (&[(0, "be brief", "speak")], Ok(["version 7; speak; be brief", "date"])),
            (&[(1, "date", "day"), (1, "day", "")], Ok([all, ""])),
            (&[(0, "7", "8"), (2, "x", "")], Err("message 2 of 2")),
            (&[(0, "7", "8"), (0, "7", "9")], Err("does not contain its span")),
            (&[(0, "", "8")], Err("empty span")),
            (&[(0, "7", &long)], Err("more than 100 bytes")),
            (&[(0, "7", "7"); MAX_REPLACEMENTS + 1], Err("more than 16 replacements")),
        ];
        for (replacements, expected) in cases {
            let replacements: Vec<Replacement> = replacements
                .iter()
                .map(|&(message, old, new)| Replacement {
                    message,
                    old: old.into(),
                    new: new.into(),
                })
                .collect();
            let view = PromptView { system: before.to_vec(), ..PromptView::default() };
            let call = Call::Prompt(Cow::Borrowed(&view));
            let checked = answer(&call, &Answer::Prompt(replacements.clone()), &Sized, BYTES);
            match expected {
                Ok(expected) => {
                    assert_eq!(checked, Ok(()));
                    let mut system = before.clone();
                    apply_replacements(&mut system, &replacements).unwrap();
                    assert_eq!(system, expected);
                }
                Err(problem) => {
                    let error = checked.unwrap_err();
                    assert!(error.contains(problem), "{error}");
                }
            }
        }
    }
}
