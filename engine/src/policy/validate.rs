//! What a policy may answer: pure checks of plain records, each as `wit/policy.wit` states it.
//!
//! They run inside the door, so that what fails here is a failure of the policy. What the engine
//! clamps or ignores (a rewind that is too long, thresholds out of range) is no failure and is not
//! looked at here.

use super::{
    ACTIONS, Action, BIAS, Ban, Bias, KEEPS, Plan, REPLACEMENTS, Replacement, SamplingChange,
    TEMPERATURE, TOKENS, Verdict, prompt,
};

/// Checks an answer of `on_prompt` to these texts, which stay as they are.
///
/// # Errors
/// What is wrong, in one line: more than [`REPLACEMENTS`], more than `output_bytes` of text, or as
/// [`prompt::replace`] says.
pub fn replacements(
    system: &[String],
    replacements: &[Replacement],
    output_bytes: usize,
) -> Result<(), String> {
    if replacements.is_empty() {
        return Ok(());
    }
    at_most(REPLACEMENTS, replacements.len(), "replacements")?;
    text(replacements.iter().flat_map(|one| [one.old.len(), one.new.len()]), output_bytes)?;
    prompt::replace(&mut system.to_vec(), replacements)
}

/// Checks an answer of `on_request`.
///
/// # Errors
/// What is wrong, in one line: the sampling, more than [`KEEPS`] to keep, or a note of more than
/// `output_bytes`.
pub fn plan(plan: &Plan, output_bytes: usize) -> Result<(), String> {
    sampling(&plan.sampling)?;
    at_most(KEEPS, plan.keep.as_ref().map_or(0, Vec::len), "anchors to keep")?;
    text(plan.note.iter().map(String::len), output_bytes)
}

/// Checks an answer of `on_step`, under a vocabulary of so many tokens.
///
/// # Errors
/// What is wrong, in one line: more than [`ACTIONS`], more than `output_bytes` of text in all,
/// more than [`TOKENS`] in a ban or bias, a token that the vocabulary lacks, a bias or sampling that
/// is not finite or out of range.
pub fn actions(actions: &[Action], vocabulary: u32, output_bytes: usize) -> Result<(), String> {
    at_most(ACTIONS, actions.len(), "actions")?;
    text(actions.iter().map(text_bytes), output_bytes)?;
    for (index, action) in actions.iter().enumerate() {
        let checked = match action {
            Action::Inject(_) | Action::CloseThinking(_) | Action::Rewind(_) | Action::Stop(_) => {
                Ok(())
            }
            Action::Ban(Ban { tokens, .. }) => known(tokens.iter().copied(), vocabulary),
            Action::Bias(Bias { tokens, .. }) => {
                known(tokens.iter().map(|one| one.token), vocabulary).and_then(|()| {
                    let wild = tokens.iter().find(|one| !within(one.bias, -BIAS, BIAS));
                    wild.map_or(Ok(()), |one| {
                        Err(format!("a bias is {}, not in [-{BIAS}, {BIAS}]", one.bias))
                    })
                })
            }
            Action::Sampling(resample) => sampling(&resample.sampling),
        };
        checked.map_err(|problem| format!("action {index}: {problem}"))?;
    }
    Ok(())
}

/// Checks an answer of `on_tool_call`.
///
/// # Errors
/// More than `output_bytes` of text.
pub fn verdict(verdict: &Verdict, output_bytes: usize) -> Result<(), String> {
    match verdict {
        Verdict::Accept => Ok(()),
        Verdict::Repair(said) | Verdict::Stop(said) => text([said.len()], output_bytes),
    }
}

/// Checks how tokens shall be drawn.
///
/// # Errors
/// Names the value that is not finite or out of range.
pub fn sampling(change: &SamplingChange) -> Result<(), String> {
    let SamplingChange { temperature, top_p, min_p, top_k: _ } = *change;
    let wild = |value: Option<f32>, most: f32| value.filter(|&value| !within(value, 0.0, most));
    if let Some(value) = wild(temperature, TEMPERATURE) {
        return Err(format!("temperature is {value}, not in [0, {TEMPERATURE}]"));
    }
    if let Some(value) = top_p.filter(|&value| value == 0.0 || !within(value, 0.0, 1.0)) {
        return Err(format!("top-p is {value}, not in (0, 1]"));
    }
    if let Some(value) = wild(min_p, 1.0) {
        return Err(format!("min-p is {value}, not in [0, 1]"));
    }
    Ok(())
}

/// False for NaN, too.
fn within(value: f32, least: f32, most: f32) -> bool {
    (least..=most).contains(&value)
}

fn known(tokens: impl ExactSizeIterator<Item = u32>, vocabulary: u32) -> Result<(), String> {
    at_most(TOKENS, tokens.len(), "tokens")?;
    for token in tokens {
        if token >= vocabulary {
            return Err(format!("there is no token {token} in a vocabulary of {vocabulary}"));
        }
    }
    Ok(())
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

fn text_bytes(action: &Action) -> usize {
    match action {
        Action::Inject(text) | Action::CloseThinking(text) | Action::Stop(text) => text.len(),
        Action::Rewind(_) | Action::Ban(_) | Action::Bias(_) | Action::Sampling(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Anchor, Keep, Resample, TokenBias};
    use super::*;

    const BYTES: usize = 100;
    const VOCABULARY: u32 = 512;

    fn check(action: Action) -> Result<(), String> {
        actions(&[action], VOCABULARY, BYTES)
    }

    fn bias(token: u32, bias: f32) -> Action {
        Action::Bias(Bias { tokens: vec![TokenBias { token, bias }], steps: 0 })
    }

    fn ban(tokens: Vec<u32>) -> Action {
        Action::Ban(Ban { tokens, steps: 0 })
    }

    #[test]
    fn what_stays_within_every_bound_is_accepted_at_the_bound() {
        let edge = [
            Action::Inject("x".repeat(BYTES)),
            Action::Rewind(u32::MAX),
            ban(vec![VOCABULARY - 1; TOKENS]),
            bias(0, BIAS),
            bias(VOCABULARY - 1, -BIAS),
            Action::Sampling(Resample {
                sampling: SamplingChange {
                    temperature: Some(TEMPERATURE),
                    top_p: Some(1.0),
                    top_k: Some(u32::MAX),
                    min_p: Some(0.0),
                },
                steps: u32::MAX,
            }),
        ];
        for action in &edge {
            assert_eq!(check(action.clone()), Ok(()), "{action:?}");
        }
        assert_eq!(actions(&vec![Action::Rewind(1); ACTIONS], VOCABULARY, BYTES), Ok(()));
    }

    #[test]
    fn what_goes_beyond_a_bound_is_refused_and_the_bound_is_named() {
        let sampling = |sampling| Action::Sampling(Resample { sampling, steps: 0 });
        let temperature =
            |value| sampling(SamplingChange { temperature: Some(value), ..Default::default() });
        let top_p = |value| sampling(SamplingChange { top_p: Some(value), ..Default::default() });
        let min_p = |value| sampling(SamplingChange { min_p: Some(value), ..Default::default() });
        let cases = [
            (Action::Stop("x".repeat(BYTES + 1)), "more than 100 bytes"),
            (ban(vec![VOCABULARY]), "there is no token 512 in a vocabulary of 512"),
            (ban(vec![0; TOKENS + 1]), "more than 256 tokens"),
            (bias(VOCABULARY, 0.0), "there is no token 512"),
            (bias(0, f32::NAN), "a bias is NaN, not in [-100, 100]"),
            (bias(0, f32::INFINITY), "a bias is inf"),
            (bias(0, f32::NEG_INFINITY), "a bias is -inf"),
            (bias(0, BIAS.next_up()), "not in [-100, 100]"),
            (temperature(f32::NAN), "temperature is NaN, not in [0, 10]"),
            (temperature(-0.1), "temperature is -0.1"),
            (temperature(TEMPERATURE.next_up()), "not in [0, 10]"),
            (top_p(0.0), "top-p is 0, not in (0, 1]"),
            (top_p(f32::INFINITY), "top-p is inf"),
            (min_p(1.5), "min-p is 1.5, not in [0, 1]"),
        ];
        for (action, problem) in cases {
            let error = check(action.clone()).unwrap_err();
            assert!(error.contains(problem), "{action:?}: {error}");
        }
        let many = vec![Action::Rewind(1); ACTIONS + 1];
        assert_eq!(actions(&many, 1, BYTES), Err("answered with more than 16 actions".into()));
    }

    #[test]
    fn texts_count_together() {
        let half = Action::Inject("x".repeat(BYTES / 2 + 1));
        assert_eq!(check(half.clone()), Ok(()));
        assert!(actions(&[half.clone(), half], VOCABULARY, BYTES).is_err());
    }

    #[test]
    fn plans_and_verdicts_are_checked_too() {
        let keep = Some(vec![Keep { at: Anchor::System, seconds: u32::MAX }; KEEPS]);
        let mut made = Plan { keep, note: Some("x".repeat(BYTES)), ..Plan::default() };
        assert_eq!(plan(&made, BYTES), Ok(()));
        made.note = Some("x".repeat(BYTES + 1));
        assert_eq!(plan(&made, BYTES), Err("answered with more than 100 bytes".into()));
        let sampling = SamplingChange { min_p: Some(f32::NAN), ..SamplingChange::default() };
        assert!(plan(&Plan { sampling, ..Plan::default() }, BYTES).is_err());
        let keep = Some(vec![Keep { at: Anchor::System, seconds: 0 }; KEEPS + 1]);
        assert!(plan(&Plan { keep, ..Plan::default() }, BYTES).is_err());
        assert_eq!(verdict(&Verdict::Accept, 0), Ok(()));
        assert_eq!(verdict(&Verdict::Repair("x".repeat(BYTES)), BYTES), Ok(()));
        assert!(verdict(&Verdict::Stop("x".repeat(BYTES + 1)), BYTES).is_err());
    }

    #[test]
    fn replacements_are_few_short_and_apply() {
        let one = |message, old: &str, new: &str| {
            let (old, new) = (old.into(), new.into());
            Replacement { message, old, new }
        };
        let system = ["12; kept".to_owned(), "It is noon.".to_owned()];
        let list = [one(0, "12", "13"), one(0, "13; ", ""), one(1, " noon", "")];
        assert_eq!(replacements(&system, &list, BYTES), Ok(()));
        for (list, problem) in [
            (vec![one(u32::MAX, "a", "")], "message 4294967295 of 2"),
            (vec![one(0, "kept", ""), one(0, "kept", "")], "replacement 1"),
            (vec![one(0, "12", "x".repeat(BYTES).as_str())], "more than 100 bytes"),
            (vec![one(0, "1", "1"); REPLACEMENTS + 1], "more than 16 replacements"),
        ] {
            let error = replacements(&system, &list, BYTES).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
        assert_eq!(system[0], "12; kept", "a check changes nothing");
    }
}
