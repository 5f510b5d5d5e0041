//! Replies that consist of messages, on small models with random weights: forms, calls, budgets, repairs.

use serde_json::{Value, json};

use super::scripted::*;
use crate::config::{Config, DraftKind};
use crate::decode::Decoder;
use crate::measure::verify::DecodePath;
use crate::policy::{Action, Bias, SamplingPatch, Step, TokenBias, Verdict};
use crate::request::{FinishReason, Form, Request, ResponseFormat, ToolChoice};

const FAMILIES: [&str; 3] = ["qwen3_next", "llama", "gpt_oss"];
const PATHS: [DecodePath; 3] =
    [DecodePath::Rewound, DecodePath::Drafted(DraftKind::Ngram), DecodePath::Batched(0, None)];

fn model(family: &str) -> Decoder {
    family_of_messages(family, Config::default())
}

fn warm(request: Request, seed: u64) -> Request {
    let sampling = SamplingPatch { temperature: Some(1.0), ..SamplingPatch::default() };
    Request { sampling, seed: Some(seed), reasoning_budget: Some(30), ..request }
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {"kind": {"enum": ["left", "right"]}, "on": {"type": "boolean"}},
        "required": ["kind", "on"],
        "additionalProperties": false,
    })
}

fn tool() -> Value {
    json!({"type": "function", "function": {"name": "look", "strict": true, "parameters": schema()}})
}

fn idle() -> Script {
    Script::new(|_| Vec::new())
}

/// Runs `request` on all paths; returns the plain one.
fn on_all_paths(
    decoder: &mut Decoder,
    request: &Request,
    script: impl Fn() -> Script,
) -> Transcript {
    let plain = run_plain(decoder, request, script());
    for path in PATHS {
        let ran = run(decoder, request, script(), path, Some(&plain.tokens));
        assert_eq!(ran.tokens, plain.tokens, "{path:?}: {ran:?}");
        assert_eq!((&ran.reasoning, &ran.answer), (&plain.reasoning, &plain.answer), "{path:?}");
        assert_eq!((&ran.calls, &ran.reason), (&plain.calls, &plain.reason), "{path:?}");
    }
    plain
}

fn markup(decoder: &Decoder, ran: &Transcript) -> String {
    decoder.network.text().decode_all(ran.reply())
}

fn follows_schema(values: &Value) -> bool {
    ["left", "right"].contains(&values["kind"].as_str().unwrap_or_default())
        && values["on"].is_boolean()
}

/// The reasoning is closed at its budget, and the header of the answer stands before it.
#[test]
fn answers_in_a_form_stand_in_the_final_message() {
    for family in FAMILIES {
        let decoder = &mut model(family);
        for seed in 0..4 {
            let form = Form::JsonSchema(schema());
            let format = Some(ResponseFormat { field: "response_format", form });
            let request =
                Request { response_format: format, ..warm(ask("Where?", seed > 0, 120), seed) };
            let ran = on_all_paths(decoder, &request, idle);
            let markup = decoder.network.text().decode_all(&ran.tokens);
            assert_eq!(markup.matches("<|channel|>final<|message|>{").count(), 1, "{markup}");
            assert!(
                seed > 0 || !markup.contains("analysis"),
                "the prompt has the header: {markup}"
            );
            if ran.reason == FinishReason::Stop {
                let answer: Value = serde_json::from_str(&ran.answer).expect(&markup);
                assert!(follows_schema(&answer), "{markup}");
            }
            assert!(!ran.noted("malformed"), "{:?}", ran.notes);
        }
    }
}

#[test]
fn required_calls_follow_their_schema_after_closed_reasoning() {
    for family in FAMILIES {
        let decoder = &mut model(family);
        let mut calls = 0;
        for seed in 0..4 {
            let is_single = seed % 2 == 0;
            let choice = ToolChoice { is_required: true, is_single, ..ToolChoice::default() };
            let request = warm(ask("Where?", true, 300), seed);
            let request = Request { tools: vec![tool()], tool_choice: choice, ..request };
            let ran = on_all_paths(decoder, &request, idle);
            let markup = markup(decoder, &ran);
            assert!(markup.contains("<|channel|>commentary to=functions.look "), "{markup}");
            assert!(!markup.contains("<|channel|>final"), "{markup}");
            // A call that a limit cuts off is text.
            assert!(ran.answer.is_empty() || ran.reason == FinishReason::Length, "{markup}");
            assert!(!is_single || ran.calls.len() <= 1, "{markup}");
            for call in &ran.calls {
                assert_eq!(call.function.name, "look");
                let values = Value::from(call.function.arguments.clone());
                assert!(follows_schema(&values), "{markup}");
            }
            calls += ran.calls.len();
        }
        assert!(calls >= 3, "{calls}");
    }
}

/// Where a call may be left out, headers are well formed, and the calls follow their schema.
#[test]
fn optional_calls_have_well_formed_headers() {
    let decoder = &mut model("llama");
    for seed in 0..6 {
        let request = Request { tools: vec![tool()], ..warm(ask("Where?", true, 60), seed) };
        let ran = on_all_paths(decoder, &request, idle);
        let markup = markup(decoder, &ran);
        assert!(!ran.noted("malformed header"), "{:?}: {markup}", ran.notes);
        for call in &ran.calls {
            assert!(follows_schema(&Value::from(call.function.arguments.clone())), "{markup}");
        }
    }
}

/// Forces these tokens, by biases, after the first one.
fn writes(tokens: Vec<u32>) -> impl FnMut(&Step) -> Vec<Action> {
    let mut written = 0;
    move |_| {
        let Some(&token) = tokens.get(written) else { return Vec::new() };
        written += 1;
        vec![Action::Bias(Bias { tokens: vec![TokenBias { token, bias: 100.0 }], steps: 1 })]
    }
}

#[test]
fn a_budget_closes_the_reasoning_with_the_header_of_the_answer() {
    for family in FAMILIES {
        let decoder = &mut model(family);
        let text = "analysis<|message|>".to_string();
        let tokens = decoder.network.text().encode(&text).unwrap();
        let channel = decoder.network.text().encode("<|channel|>").unwrap()[0];
        let biases = vec![TokenBias { token: channel, bias: 0.0 }];
        let request = Request { reasoning_budget: Some(30), biases, ..ask("Where?", true, 80) };
        // The first token has no step before it.
        let first = Request { biases: vec![TokenBias { token: channel, bias: 100.0 }], ..request };
        let script = || {
            let mut write = writes(tokens.clone());
            Script::new(move |step| {
                let mut actions = write(step);
                let never = TokenBias { token: channel, bias: -200.0 };
                actions.push(Action::Bias(Bias { tokens: vec![never], steps: 1 }));
                actions
            })
        };
        let ran = on_all_paths(decoder, &first, script);
        let markup = markup(decoder, &ran);
        assert!(ran.noted("closed the reasoning"), "{:?}: {markup}", ran.notes);
        let close = "<|end|><|start|>assistant<|channel|>final<|message|>";
        assert!(markup.contains(close), "{markup}");
        assert!(ran.usage.reasoning_tokens >= 30);
    }
}

/// A repair replaces the call with its header; the policy's text is a preamble.
#[test]
fn a_repaired_call_is_replaced_by_a_preamble() {
    let decoder = &mut model("llama");
    let source = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>\
        {\"kind\": \"left\", \"on\": true}<|end|>";
    let tokens = decoder.network.text().encode(source).unwrap();
    let biases = vec![TokenBias { token: tokens[0], bias: 100.0 }];
    let tool = json!({"type": "function", "function": {"name": "look", "parameters": {}}});
    let request =
        Request { tools: vec![tool], biases, revisable: false, ..ask("Where?", true, 160) };
    let channel = tokens[0];
    let script = || {
        let mut write = writes(tokens[1..].to_vec());
        let mut script = Script::new(move |step| {
            let mut actions = write(step);
            let never = TokenBias { token: channel, bias: -200.0 };
            actions.push(Action::Bias(Bias { tokens: vec![never], steps: 1 }));
            actions
        });
        let mut verdicts = vec![Verdict::Repair("Look again: ".into())];
        script.calls = Box::new(move |_| verdicts.pop().unwrap_or(Verdict::Accept));
        script
    };
    let ran = run_plain(decoder, &request, script());
    let markup = markup(decoder, &ran);
    assert!(markup.starts_with("<|channel|>commentary<|message|>Look again: "), "{markup}");
    assert!(ran.answer.starts_with("Look again: "), "{:?}", ran.answer);
    assert!(ran.noted("removed a call of `look`"), "{:?}", ran.notes);
}

/// Text of a policy opens the message that it belongs to.
#[test]
fn injected_text_is_in_a_message() {
    let decoder = &mut model("llama");
    let channel = decoder.network.text().encode("<|channel|>").unwrap()[0];
    let biases = vec![TokenBias { token: channel, bias: 100.0 }];
    let request = Request { biases, ..ask("Where?", true, 30) };
    let script = || {
        Script::new(move |step| match step.index {
            1 => {
                let never = TokenBias { token: channel, bias: -200.0 };
                let never = Action::Bias(Bias { tokens: vec![never], steps: 0 });
                vec![never, Action::Inject("Let me see".into())]
            }
            _ => Vec::new(),
        })
    };
    let ran = on_all_paths(decoder, &request, script);
    let markup = markup(decoder, &ran);
    assert!(markup.starts_with("<|channel|>analysis<|message|>Let me see"), "{markup}");
    assert!(ran.reasoning.starts_with("Let me see"), "{:?}", ran.reasoning);
}
