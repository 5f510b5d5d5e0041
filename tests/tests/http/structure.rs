//! Forms of replies, tool choices and probabilities, as the engine gets them and as clients get them back.

use serde_json::{Value, json};
use steersman_engine::request::{Form, Logprob, Penalties, TokenLogprob, ToolChoice};

use crate::*;

#[tokio::test]
async fn every_name_of_a_form_reaches_the_engine() {
    let (app, seen) = app(answer);
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let nested = json!({"name": "x", "strict": true, "schema": schema});
    let of_schema = || Some(Form::JsonSchema(schema.clone()));
    let choice = || Some(Form::Choice(vec!["a".into(), "b".into()]));
    for (fields, field, form) in [
        (json!({"response_format": {"type": "text"}}), "", None),
        (json!({"response_format": null, "guided_json": null}), "", None),
        (
            json!({"response_format": {"type": "json_object"}}),
            "response_format",
            Some(Form::JsonObject),
        ),
        (
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            "response_format.schema",
            of_schema(),
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": nested}}),
            "response_format.json_schema.schema",
            of_schema(),
        ),
        (json!({"guided_json": schema}), "guided_json", of_schema()),
        (json!({"guided_json": schema.to_string()}), "guided_json", of_schema()),
        (json!({"json_schema": schema}), "json_schema", of_schema()),
        (json!({"guided_regex": "[a-z]+"}), "guided_regex", Some(Form::Regex("[a-z]+".into()))),
        (json!({"guided_choice": ["a", "b"]}), "guided_choice", choice()),
        (
            json!({"guided_grammar": "start: A"}),
            "guided_grammar",
            Some(Form::Lark("start: A".into())),
        ),
        (json!({"grammar": "start: A"}), "grammar", Some(Form::Lark("start: A".into()))),
        (
            json!({"structured_outputs": {"choice": ["a", "b"], "json": null}}),
            "structured_outputs.choice",
            choice(),
        ),
        (
            json!({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}),
            "structured_outputs.regex",
            Some(Form::Regex("a".into())),
        ),
    ] {
        let (status, reply) = chat(&app, body(fields.clone())).await;
        assert_eq!(status, StatusCode::OK, "{fields} {reply}");
        let got = seen.last().response_format;
        let got = got.map(|format| (format.field, format.form));
        assert_eq!(got, form.map(|form| (field, form)), "{fields}");
    }
}

#[tokio::test]
async fn every_tool_choice_reaches_the_engine() {
    let (app, seen) = app(answer);
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let named = |names: &[&str]| Some(names.iter().map(ToString::to_string).collect());
    let auto = ToolChoice::default();
    let required = ToolChoice { is_required: true, ..auto.clone() };
    for (fields, expected) in [
        (json!({"tool_choice": "auto"}), auto.clone()),
        (json!({"tool_choice": "required"}), required.clone()),
        (json!({"parallel_tool_calls": false}), ToolChoice { is_single: true, ..auto.clone() }),
        (
            json!({"tool_choice": tool("f")}),
            ToolChoice { allowed: named(&["f"]), ..required.clone() },
        ),
        (
            json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {
                "mode": "auto", "tools": [tool("f"), tool("g")]}}}),
            ToolChoice { allowed: named(&["f", "g"]), ..auto },
        ),
        (
            json!({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
                {"type": "function", "name": "g"}]}}),
            ToolChoice { allowed: named(&["g"]), ..required },
        ),
    ] {
        let mut fields = fields;
        fields["tools"] = json!([tool("f"), tool("g")]);
        let (status, reply) = chat(&app, body(fields.clone())).await;
        assert_eq!(status, StatusCode::OK, "{fields} {reply}");
        assert_eq!(seen.last().tool_choice, expected, "{fields}");
        assert_eq!(seen.last().tools.len(), 2);
    }
}

#[tokio::test]
async fn bad_forms_and_probabilities_are_rejected_by_path() {
    let (app, seen) = app(answer);
    for (fields, param) in [
        (json!({"response_format": "json"}), "response_format"),
        (json!({"response_format": {"type": "yaml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
            "response_format.json_schema.schema",
        ),
        (json!({"guided_json": "{"}), "guided_json"),
        (json!({"guided_choice": "a"}), "guided_choice"),
        (json!({"guided_json": {}, "guided_regex": "a"}), "guided_regex"),
        (json!({"structured_outputs": {"json": {}, "regex": "a"}}), "structured_outputs"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function"}}), "tool_choice.function.name"),
        (json!({"parallel_tool_calls": 1}), "parallel_tool_calls"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias.x"),
        (json!({"logit_bias": {"5": 101}}), "logit_bias.5"),
        (json!({"presence_penalty": 2.1}), "presence_penalty"),
        (json!({"frequency_penalty": -2.1}), "frequency_penalty"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"min_tokens": 9, "max_tokens": 8}), "min_tokens"),
        (json!({"ignore_eos": true, "guided_regex": "a"}), "ignore_eos"),
    ] {
        rejected(&app, body(fields), 400, "invalid_value", param, param).await;
    }
    assert!(seen.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn probabilities_reach_the_engine() {
    let (app, seen) = app(answer);
    let fields = json!({
        "logit_bias": {"7": -100, "9": 1.5}, "presence_penalty": 0.5, "frequency_penalty": -1,
        "repetition_penalty": 1.1, "repetition_context_size": 20, "min_tokens": 3,
        "ignore_eos": true, "logprobs": true, "top_logprobs": 2,
    });
    assert_eq!(chat(&app, body(fields)).await.0, StatusCode::OK);
    let request = seen.last();
    let biases: Vec<_> = request.biases.iter().map(|bias| (bias.token, bias.bias)).collect();
    assert_eq!(biases, [(7, -100.0), (9, 1.5)]);
    let expected = Penalties { presence: 0.5, frequency: -1.0, repetition: 1.1, window: 20 };
    assert_eq!(request.penalties, expected);
    assert_eq!((request.min_tokens, request.ignores_end), (3, true));
    assert_eq!((request.logprobs, request.revisable), (Some(2), false));
}

fn with_logprobs() -> Vec<Act> {
    let one = |text: &str, logprob| TokenLogprob { bytes: text.as_bytes().to_vec(), logprob };
    let logprob = |text: &str, top: Vec<TokenLogprob>| {
        Say(Event::Logprob(Logprob { token: one(text, -0.5), top }))
    };
    vec![
        logprob("Ro", vec![one("Ro", -0.5), one("Pa", f32::NEG_INFINITY)]),
        logprob("me", Vec::new()),
        Say(Event::Answer("Rome".into())),
        finished(FinishReason::Stop),
    ]
}

#[tokio::test]
async fn logprobs_stand_beside_the_text_of_their_tokens() {
    let (app, _) = app(with_logprobs);
    let entry = |token: &str, top: Value| json!({"token": token, "logprob": -0.5, "bytes": token.as_bytes(), "top_logprobs": top});
    let top = json!([
        {"token": "Ro", "logprob": -0.5, "bytes": b"Ro"},
        {"token": "Pa", "logprob": -9999.0, "bytes": b"Pa"},
    ]);
    let expected = json!({"content": [entry("Ro", top), entry("me", json!([]))], "refusal": null});
    let (_, reply) = chat(&app, body(json!({"logprobs": true}))).await;
    assert_eq!(reply["choices"][0]["logprobs"], expected);
    let streamed = body(json!({"logprobs": true, "stream": true}));
    let chunks = data(&bytes(send(&app, post(streamed.to_string())).await).await);
    let with_text = chunks.iter().find(|chunk| chunk["choices"][0]["delta"]["content"] == "Rome");
    assert_eq!(with_text.unwrap()["choices"][0]["logprobs"], expected);
}

/// A8: the probabilities of a whole reply took 16.8 kB a token, without a limit: n = 32 with 16,384 tokens each would
/// have taken 8.8 GB. A stream holds none of them.
#[tokio::test]
async fn whole_replies_have_a_limited_number_of_probabilities() {
    fn many() -> Vec<Act> {
        let one = TokenLogprob { bytes: b"a".to_vec(), logprob: -0.5 };
        let token = |_| {
            let (token, top) = (one.clone(), vec![one.clone(); 20]);
            [Say(Event::Logprob(Logprob { token, top })), Say(Event::Answer("a".into()))]
        };
        let tokens = (0..500).flat_map(token);
        tokens.chain([finished(FinishReason::Stop)]).collect()
    }
    let (app, _) = app(many);
    let ask = |n: u64| body(json!({"logprobs": true, "top_logprobs": 20, "n": n}));
    let (status, reply) = chat(&app, ask(2)).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let logprobs = &reply["choices"][1]["logprobs"]["content"];
    assert_eq!(logprobs.as_array().unwrap().len(), 500);
    rejected(&app, ask(25), 400, "invalid_value", "logprobs", "262144 probabilities").await;
}

/// A4: stop strings of any length were accepted, in each protocol.
#[tokio::test]
async fn long_stop_strings_are_refused_in_every_protocol() {
    let (app, _) = app(answer);
    let long = "a".repeat(5000);
    let stops = json!(["END", long]);
    let chat = body(json!({}));
    let with = |mut body: Value, more: Value| {
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for (route, body, param) in [
        ("/v1/chat/completions", with(chat.clone(), json!({"stop": stops})), "stop[1]"),
        ("/v1/chat/completions", with(chat.clone(), json!({"stop": long})), "stop: "),
        ("/v1/completions", json!({"prompt": "a", "stop": stops}), "stop[1]"),
        (
            "/v1/messages",
            with(chat.clone(), json!({"max_tokens": 9, "stop_sequences": stops})),
            "stop_sequences[1]",
        ),
        ("/api/chat", with(chat, json!({"options": {"stop": stops}})), "stop[1]"),
    ] {
        let request = axum::http::Request::post(route)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body.to_string()))
            .unwrap();
        let response = send(&app, request).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{route}");
        let reply = String::from_utf8(bytes(response).await.to_vec()).unwrap();
        let says = format!("{param}{}", if param.ends_with(' ') { "" } else { ": " });
        assert!(reply.contains(&says) && reply.contains("has 5000 bytes"), "{route} {reply}");
    }
}
