//! Forms of replies with the bundled model: answers and calls that cannot leave their form, on every
//! decode path.

use serde_json::{Value, json};
use steersman_engine::request::{FinishReason, Form, Request, ResponseFormat, ToolChoice};
use steersman_engine::{Error, RequestError};
use steersman_tests::{Reply, Running, ask, ask_weather, config, load, run};

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "colour": {"enum": ["red", "green", "blue"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        },
        "required": ["name", "age", "colour", "tags"],
        "additionalProperties": false,
    })
}

fn with_form(form: Form, request: Request) -> Request {
    Request { response_format: Some(ResponseFormat { field: "response_format", form }), ..request }
}

/// Keys in order, and values within their ranges.
fn check_person(reply: &Reply) {
    let answer: Value = serde_json::from_str(&reply.answer).expect(&reply.answer);
    let keys: Vec<&String> = answer.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["name", "age", "colour", "tags"], "{answer}");
    assert!((0..=150).contains(&answer["age"].as_i64().unwrap()), "{answer}");
    assert!(["red", "green", "blue"].contains(&answer["colour"].as_str().unwrap()), "{answer}");
    assert_eq!(reply.finished().reason, FinishReason::Stop);
}

#[test]
fn an_answer_follows_its_schema_and_reasoning_stays_free() {
    let engine = Running::without_store(config());
    for reasoning in [false, true] {
        let request = Request {
            reasoning: Some(reasoning),
            reasoning_budget: Some(40),
            max_tokens: Some(250),
            ..ask("Who is Nora?")
        };
        let reply = run(&engine, with_form(Form::JsonSchema(person()), request));
        check_person(&reply);
        assert_eq!(!reply.reasoning.is_empty(), reasoning, "{reply:?}");
        // Most of the keys: no choice is left after their first letters.
        assert!(reply.finished().usage.forced_tokens > 5, "{reply:?}");
    }
}

#[test]
fn every_form_ends_where_nothing_can_follow() {
    let engine = Running::without_store(config());
    let choice = || vec!["Yes, of course.".to_string(), "No, never.".to_string()];
    for (form, is_valid) in [
        (
            Form::Choice(choice()),
            (|text: &str| text == "Yes, of course." || text == "No, never.") as fn(&str) -> bool,
        ),
        (Form::Regex("[a-z]{3}-[0-9]{4}".into()), |text| {
            let (letters, digits) = text.split_once('-').unwrap_or_default();
            letters.len() == 3 && digits.len() == 4 && digits.bytes().all(|b| b.is_ascii_digit())
        }),
        (Form::Lark("start: \"<\" N \">\"\nN: /[0-9]{2}/".into()), |text| {
            text.len() == 4 && text.starts_with('<') && text.ends_with('>')
        }),
    ] {
        let request = Request { reasoning: Some(false), max_tokens: Some(64), ..ask("Is it?") };
        let reply = run(&engine, with_form(form, request));
        assert!(is_valid(&reply.answer), "{reply:?}");
        assert_eq!(reply.finished().reason, FinishReason::Stop);
    }
    let request = Request { reasoning: Some(false), max_tokens: Some(5), ..ask("Who is Nora?") };
    let cut = run(&engine, with_form(Form::JsonSchema(person()), request));
    assert_eq!(cut.finished().reason, FinishReason::Length);
    assert_eq!(cut.finished().usage.answer_tokens, 5);
}

#[test]
fn a_schema_that_cannot_be_enforced_is_refused_with_its_path() {
    let engine = Running::without_store(config());
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}});
    let reply = run(&engine, with_form(Form::JsonSchema(schema), ask("Hello")));
    match reply.end {
        Err(Error::Request(RequestError::Structure { path, .. })) => {
            assert_eq!(path, "response_format.properties.a.uniqueItems");
        }
        other => panic!("{other:?}"),
    }
}

fn add(choice: ToolChoice, is_strict: bool) -> Request {
    let mut request = ask_weather();
    request.tools[0]["function"]["strict"] = is_strict.into();
    request.tools.push(json!({"type": "function", "function": {
        "name": "add", "strict": is_strict, "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
            "required": ["a", "unit"],
            "additionalProperties": false,
        }}}));
    Request { tool_choice: choice, max_tokens: Some(200), ..request }
}

#[test]
fn required_calls_are_made_and_strict_ones_follow_their_schema() {
    let engine = Running::without_store(config());
    let required = ToolChoice { is_required: true, is_single: true, ..ToolChoice::default() };
    let named = ToolChoice { allowed: Some(vec!["add".into()]), ..required.clone() };
    let reply = run(&engine, Request { messages: ask("Hello").messages, ..add(required, false) });
    assert_eq!(reply.tool_calls.len(), 1, "{reply:?}");
    assert_eq!((reply.answer.as_str(), &reply.finished().reason), ("", &FinishReason::ToolCalls));
    let reply = run(&engine, add(named, true));
    let call = &reply.tool_calls[0].function;
    assert_eq!(call.name, "add");
    assert!((1..=9).contains(&call.arguments["a"].as_i64().unwrap()), "{call:?}");
    assert!(["C", "F"].contains(&call.arguments["unit"].as_str().unwrap()), "{call:?}");
    // The model may answer, but a call that it begins has only this name.
    let allowed = ToolChoice { allowed: Some(vec!["add".into()]), ..ToolChoice::default() };
    let reply = run(&engine, add(allowed, true));
    assert!(reply.tool_calls.iter().all(|call| call.function.name == "add"), "{reply:?}");
}

#[test]
fn replies_of_a_form_are_equal_on_every_path() {
    let data = tempfile::tempdir().unwrap();
    let (mut decoder, _) = load(config(), data.path()).unwrap();
    let paths = decoder.paths().unwrap();
    let question = |reasoning| Request { reasoning: Some(reasoning), ..ask("Who is Nora?") };
    let requests = [
        with_form(Form::JsonSchema(person()), question(false)),
        with_form(
            Form::JsonSchema(person()),
            Request { reasoning_budget: Some(20), ..question(true) },
        ),
        add(ToolChoice::default(), true),
        add(ToolChoice { is_required: true, ..ToolChoice::default() }, false),
    ];
    for outcome in decoder.verify(&requests, &paths, 40, |_| ()).unwrap() {
        assert!(outcome.holds() && outcome.equal == requests.len(), "{outcome:?}");
    }
}
