//! Forms, penalties and reported probabilities on small models with random weights, compared with plain
//! arithmetic over logits that one pass computes.

use serde_json::{Value, json};

use super::scripted::*;
use crate::config::{Config, DraftKind};
use crate::decode::Decoder;
use crate::measure::verify::DecodePath;
use crate::policy::{Action, AnswerForm, Plan, SamplingPatch, TokenBias, Vocabulary};
use crate::request::{
    Continued, FinishReason, Form, Message, Penalties, Request, ResponseFormat, ToolChoice,
};

const PATHS: [DecodePath; 3] =
    [DecodePath::Rewound, DecodePath::Drafted(DraftKind::Ngram), DecodePath::Batched(0, None)];

fn idle() -> Script {
    Script::new(|_| Vec::new())
}

fn with_form(form: Form, request: Request) -> Request {
    Request { response_format: Some(ResponseFormat { field: "response_format", form }), ..request }
}

fn warm(request: Request, seed: u64) -> Request {
    let sampling = SamplingPatch { temperature: Some(1.0), ..SamplingPatch::default() };
    Request { sampling, seed: Some(seed), ..request }
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "kind": {"enum": ["left", "right"]},
            "count": {"type": "integer", "minimum": 10, "maximum": 99},
            "on": {"type": "boolean"},
        },
        "required": ["kind", "count", "on"],
        "additionalProperties": false,
    })
}

/// Runs `request` on all paths; on the plain one, forced tokens are sampled.
fn on_all_paths(decoder: &mut Decoder, request: &Request) -> Transcript {
    decoder.speculation.set_forces_tokens(false);
    let plain = run_plain(decoder, request, idle());
    assert_eq!(plain.usage.forced_tokens, 0);
    decoder.speculation.set_forces_tokens(true);
    for path in PATHS {
        let ran = run(decoder, request, idle(), path, Some(&plain.tokens));
        assert_eq!(ran.tokens, plain.tokens, "{path:?}: {} is not {}", ran.answer, plain.answer);
        assert_eq!((&ran.answer, &ran.reason), (&plain.answer, &plain.reason));
    }
    plain
}

/// The plain path samples what others commit because it is forced.
#[test]
fn answers_of_random_models_follow_their_schema_on_every_path() {
    for family in ["qwen3_next", "gemma3_text", "llama"] {
        let mut decoder = super::scripted::family(family, Config::default(), true);
        for seed in 0..3 {
            let request = warm(ask("Where?", seed == 1, 80), seed);
            let request = Request { reasoning_budget: Some(9), ..request };
            let request = with_form(Form::JsonSchema(schema()), request);
            let ran = on_all_paths(&mut decoder, &request);
            if ran.reason != FinishReason::Stop {
                // White space, most likely.
                assert_eq!(ran.reason, FinishReason::Length, "{ran:?}");
                continue;
            }
            let answer: Value = serde_json::from_str(&ran.answer).expect(&ran.answer);
            assert!((10..100).contains(&answer["count"].as_i64().unwrap()), "{answer}");
            assert!(["left", "right"].contains(&answer["kind"].as_str().unwrap()), "{answer}");
        }
        let choice = Form::Choice(vec!["a certain text".into(), "another text".into()]);
        let ran = on_all_paths(&mut decoder, &with_form(choice, warm(ask("Which?", false, 80), 1)));
        assert!(["a certain text", "another text"].contains(&ran.answer.as_str()), "{ran:?}");
        assert_eq!(ran.reason, FinishReason::Stop);
    }
}

/// The model would end its turn at once.
#[test]
fn an_answer_follows_reasoning_in_which_the_model_ends_its_turn() {
    for family in ["qwen3_next", "gemma3_text", "llama"] {
        let mut decoder = super::scripted::family(family, Config::default(), true);
        let biases: Vec<_> = decoder
            .network
            .text()
            .eos()
            .iter()
            .map(|&token| TokenBias { token, bias: 100.0 })
            .collect();
        let choice = Form::Choice(vec!["a certain text".into(), "another text".into()]);
        for seed in 0..2 {
            let request = Request { biases: biases.clone(), ..warm(ask("Which?", true, 80), seed) };
            let request = with_form(choice.clone(), request);
            let ran = on_all_paths(&mut decoder, &request);
            assert!(["a certain text", "another text"].contains(&ran.answer.as_str()), "{ran:?}");
            assert_eq!(ran.reason, FinishReason::Stop);
            assert!(ran.noted("closed the reasoning"), "{:?}", ran.notes);
        }
    }
}

#[test]
fn forced_tokens_take_no_pass_of_their_own() {
    let mut decoder = family("llama", Config::default(), true);
    let text = "the only text that there is, and it is not short";
    let request = with_form(Form::Choice(vec![text.into()]), ask("Say it.", false, 80));
    let ran = run_plain(&mut decoder, &request, idle());
    assert_eq!(ran.answer, text);
    assert_eq!(ran.usage.forced_tokens as usize, text.len());
}

#[test]
fn policies_cannot_write_into_a_form() {
    let mut decoder = family("llama", Config::default(), true);
    let script = || {
        Script::new(|step| match step.index {
            1 => vec![Action::CloseReasoning("So:".into())],
            12 => vec![Action::Inject("hello".into())],
            _ => Vec::new(),
        })
    };
    let request = with_form(Form::Regex("[0-9]{20}".into()), warm(ask("Which?", true, 80), 3));
    let ran = run_plain(&mut decoder, &request, script());
    assert!(ran.answer.len() == 20 && ran.answer.bytes().all(|b| b.is_ascii_digit()), "{ran:?}");
    assert!(ran.noted("left out a hint") && ran.noted("did not inject"), "{:?}", ran.notes);
}

/// `finish_reason` was `stop`, and a client parsed a part of a form as the whole. The arguments of a call that a loop
/// ended were such a part.
#[test]
fn a_policy_that_stops_within_a_form_cuts_it_off() {
    let mut decoder = family("llama", Config::default(), true);
    let stop = || {
        Script::new(|step| match step.index {
            12 => vec![Action::Stop("the answer is a loop".into())],
            _ => Vec::new(),
        })
    };
    let mut digits = |least: u32| {
        let request = warm(ask("Which?", false, 80), 3);
        let request = Request { biases: vec![TokenBias { token: END, bias: -100.0 }], ..request };
        let form = Form::Regex(format!("[0-9]{{{least},}}"));
        let ran = run_plain(&mut decoder, &with_form(form, request), stop());
        assert!(
            ran.noted("stopped after 12 tokens (periodic call): the answer is a loop"),
            "{ran:?}"
        );
        assert_eq!(ran.answer.len(), 12);
        ran.reason
    };
    assert_eq!(digits(20), FinishReason::Length);
    assert_eq!(digits(5), FinishReason::Policy("the answer is a loop".into()));
}

/// A policy that plans a form.
fn planning(form: AnswerForm) -> Script {
    Script { plan: Plan { form: Some(form), ..Plan::default() }, ..idle() }
}

#[test]
fn a_policy_plans_the_form_unless_the_client_demands_one() {
    let mut decoder = family("llama", Config::default(), true);
    let texts = ["a certain text", "another text"].map(String::from).to_vec();
    let request = warm(ask("Which?", true, 80), 3);
    let request = Request { reasoning_budget: Some(9), ..request };
    let demanded = with_form(Form::Choice(texts.clone()), request.clone());
    let expected = run_plain(&mut decoder, &demanded, idle());
    assert!(texts.contains(&expected.answer), "{expected:?}");
    let planned = run_plain(&mut decoder, &request, planning(AnswerForm::Choice(texts)));
    assert_eq!((planned.tokens, planned.answer), (expected.tokens, expected.answer));
    assert!(!planned.notes.iter().any(|note| note.contains("form")), "{:?}", planned.notes);

    let demanded = with_form(Form::Regex("[0-9]{20}".into()), request);
    let both = run_plain(&mut decoder, &demanded, planning(AnswerForm::JsonObject));
    assert!(both.answer.len() == 20 && both.answer.bytes().all(|b| b.is_ascii_digit()), "{both:?}");
    assert!(both.noted("left out the form that a policy planned"), "{:?}", both.notes);
}

#[test]
fn a_planned_form_that_cannot_be_enforced_is_a_failure_of_the_policy() {
    let decoder = family("llama", Config::default(), true);
    for (form, expected) in [
        (AnswerForm::Regex("(".into()), "form: "),
        (
            AnswerForm::JsonSchema(r#"{"properties": {"a": {"not": {}}}}"#.into()),
            "form.properties.a.not",
        ),
        (AnswerForm::JsonSchema("{".into()), "the schema of `form`"),
        (AnswerForm::Choice(Vec::new()), "has no choice"),
    ] {
        let problem = decoder.policies.preparer().grammars.check_form(&form).unwrap_err();
        assert!(problem.contains(expected), "{problem}");
    }
    let choice = AnswerForm::Choice(vec!["yes".into()]);
    assert_eq!(decoder.policies.preparer().grammars.check_form(&choice), Ok(()));
}

#[test]
fn a_planned_form_gives_way_to_what_the_client_demands() {
    let mut decoder = family("llama", Config::default(), true);
    let request = ask("Which?", false, 8);
    let choice = || planning(AnswerForm::Choice(vec!["yes".into()]));
    let mut continues = Request { continues: Some(Continued::Answer), ..request.clone() };
    continues.messages.push(Message {
        role: "assistant".into(),
        content: "It is".into(),
        ..Message::default()
    });
    for (request, expected) in [
        (Request { min_tokens: 3, ..request.clone() }, "set min_tokens"),
        (Request { ignores_end: true, ..request.clone() }, "set ignore_eos"),
        (continues, "continues an answer"),
    ] {
        let expected = format!("left out the form that a policy planned: the client {expected}");
        let free = run_plain(&mut decoder, &request, idle());
        let ran = run_plain(&mut decoder, &request, choice());
        assert_eq!(ran.tokens, free.tokens);
        assert!(ran.notes.contains(&expected), "{:?}", ran.notes);
    }
    assert_eq!(run_plain(&mut decoder, &request, choice()).answer, "yes");
}

#[test]
fn a_form_without_an_allowed_token_ends_the_reply() {
    let mut decoder = family("llama", Config::default(), true);
    let biases =
        (b'0'..=b'9').map(|token| TokenBias { token: token.into(), bias: f32::NEG_INFINITY });
    let request = Request { biases: biases.collect(), ..ask("Which?", false, 80) };
    let ran = run_plain(&mut decoder, &with_form(Form::Regex("[0-9]+".into()), request), idle());
    assert_eq!(ran.reason, FinishReason::Length);
    assert!(ran.notes.iter().any(|note| note.contains("leave no token")), "{ran:?}");
    assert_eq!(ran.answer, "");
}

#[test]
fn strict_calls_of_random_models_are_calls() {
    let mut decoder = family("llama", Config::default(), true);
    let tool = json!({"type": "function", "function": {
        "name": "turn", "strict": true, "parameters": schema()}});
    for seed in 0..3 {
        let request = Request {
            tools: vec![tool.clone()],
            tool_choice: ToolChoice { is_required: true, is_single: true, allowed: None },
            ..warm(ask("Turn!", false, 120), seed)
        };
        let ran = on_all_paths(&mut decoder, &request);
        if ran.reason == FinishReason::Length {
            continue;
        }
        assert_eq!((ran.reason, ran.calls.len()), (FinishReason::ToolCalls, 1));
        assert!((10..100).contains(&ran.calls[0].function.arguments["count"].as_i64().unwrap()));
        // From the tag on only: nothing forces the model to call, but this bias.
        let lazy = Request {
            biases: vec![TokenBias { token: OPEN_CALL, bias: 100.0 }],
            tool_choice: ToolChoice { is_single: true, ..ToolChoice::default() },
            ..request
        };
        let ran = on_all_paths(&mut decoder, &lazy);
        assert!(
            ran.reason == FinishReason::Length || ran.calls[0].function.name == "turn",
            "{ran:?}"
        );
    }
}

/// The logits of each token of a reply, changed by plain arithmetic.
fn reference(decoder: &Decoder, request: &Request, ran: &Transcript) -> Vec<Vec<f32>> {
    let logits = logits(decoder, &ran.tokens);
    let width = logits.dim(1) as usize;
    let rows: Vec<Vec<f32>> = logits.as_slice::<f32>().chunks(width).map(<[f32]>::to_vec).collect();
    let Penalties { presence, frequency, repetition, window } = request.penalties;
    (ran.prompt..ran.tokens.len())
        .map(|position| {
            let mut row = rows[position - 1].clone();
            request.biases.iter().for_each(|b| row[b.token as usize] += b.bias);
            let before = &ran.tokens[..position];
            let counted = if window == 0 { 0 } else { position.saturating_sub(window as usize) };
            for (token, logit) in (0u32..).zip(&mut row) {
                if before[counted..].contains(&token) {
                    *logit = if *logit < 0.0 { *logit * repetition } else { *logit / repetition };
                }
                let count = before[ran.prompt..].iter().filter(|&&other| other == token).count();
                if count > 0 {
                    *logit -= presence + frequency * count as f32;
                }
            }
            row
        })
        .collect()
}

fn best(row: &[f32]) -> u32 {
    (0u32..).zip(row).max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0
}

#[test]
fn penalties_and_biases_equal_a_reference() {
    let mut decoder = family("qwen3_next", Config::default(), true);
    let none = Penalties::default();
    for penalties in [
        none,
        Penalties { presence: 1.5, ..none },
        Penalties { frequency: 0.7, ..none },
        Penalties { repetition: 1.3, ..none },
        Penalties { repetition: 1.5, window: 6, presence: -0.5, frequency: 0.25 },
    ] {
        let biases =
            vec![TokenBias { token: 65, bias: 0.5 }, TokenBias { token: END, bias: -100.0 }];
        let request = Request { penalties, biases, ..ask("Which?", false, 24) };
        let ran = run_plain(&mut decoder, &request, idle());
        let expected: Vec<u32> =
            reference(&decoder, &request, &ran).iter().map(|row| best(row)).collect();
        assert_eq!(ran.reply(), expected, "{penalties:?}");
        for path in PATHS {
            let other = run(&mut decoder, &request, idle(), path, Some(&ran.tokens));
            assert_eq!(other.tokens, ran.tokens, "{path:?} {penalties:?}");
        }
    }
}

#[test]
fn reported_probabilities_are_those_of_the_changed_logits() {
    let mut decoder = family("llama", Config::default(), true);
    let request = Request {
        logprobs: Some(3),
        penalties: Penalties { presence: 0.5, ..Penalties::default() },
        biases: vec![
            TokenBias { token: END, bias: -100.0 },
            TokenBias { token: OPEN_REASONING, bias: -100.0 },
        ],
        ..ask("Which?", false, 16)
    };
    let ran = run_plain(&mut decoder, &request, idle());
    let rows = reference(&decoder, &request, &ran);
    assert_eq!(ran.logprobs.len(), ran.reply().len());
    for ((row, found), &token) in rows.iter().zip(&ran.logprobs).zip(ran.reply()) {
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        let logprob = |token: u32| f64::from(row[token as usize]) - sum.ln();
        assert!((f64::from(found.token.logprob) - logprob(token)).abs() < 1e-3, "{found:?}");
        assert_eq!(found.token.bytes, decoder.network.text().bytes(token));
        let mut order: Vec<u32> = (0..row.len() as u32).collect();
        order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
        assert_eq!(found.top.len(), 3);
        for (top, &token) in found.top.iter().zip(&order) {
            assert!((f64::from(top.logprob) - logprob(token)).abs() < 1e-3, "{found:?}");
        }
    }
}

#[test]
fn a_reply_does_not_end_before_its_least_tokens() {
    let mut decoder = family("llama", Config::default(), true);
    let eager =
        Request { biases: vec![TokenBias { token: END, bias: 100.0 }], ..ask("Which?", false, 12) };
    assert_eq!(run_plain(&mut decoder, &eager, idle()).reply().len(), 1);
    let least = Request { min_tokens: 5, ..eager.clone() };
    assert_eq!(run_plain(&mut decoder, &least, idle()).reply().len(), 6);
    let endless = Request { ignores_end: true, ..eager };
    let ran = run_plain(&mut decoder, &endless, idle());
    assert_eq!((ran.reply().len(), ran.reason), (12, FinishReason::Length));
}
