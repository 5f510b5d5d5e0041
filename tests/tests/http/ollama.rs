//! Ollama's protocol: chats, generation, and the routes that describe models.

use axum::http::{StatusCode, header};
use serde_json::{Value, json};
use steersman_engine::request::{
    Embedding, Event, FinishReason, Form, FunctionCall, Logprob, Penalties, RawPrompt,
    TokenLogprob, ToolCall,
};

use crate::*;

async fn lines(app: &Router, path: &str, body: &Value) -> (StatusCode, Vec<Value>) {
    let request = axum::http::Request::post(path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let response = send(app, request).await;
    let status = response.status();
    let text = String::from_utf8(bytes(response).await.to_vec()).unwrap();
    (status, text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

async fn get(app: &Router, path: &str) -> Value {
    let request = axum::http::Request::get(path).body(Body::empty()).unwrap();
    json_of(send(app, request).await).await
}

fn calls() -> Vec<Act> {
    let arguments = json!({"city": "Rome"}).as_object().unwrap().clone();
    let function = FunctionCall { name: "weather".into(), arguments: arguments.into() };
    let call = ToolCall { id: "call_a".into(), kind: "function".into(), function };
    vec![Say(Event::ToolCall(call)), finished(FinishReason::ToolCalls)]
}

fn two_calls() -> Vec<Act> {
    let mut acts = calls();
    acts.extend(calls());
    acts.remove(1);
    acts
}

/// Fault F11: every call of a stream had the index 0.
#[tokio::test]
async fn streamed_calls_are_numbered_as_those_of_a_whole_reply() {
    let (app, _) = app(two_calls);
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {}}});
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]});
    let (_, lines) = lines(&app, "/api/chat", &body).await;
    let calls = lines.iter().filter_map(|line| line["message"]["tool_calls"].as_array()).flatten();
    let indexes: Vec<_> = calls.map(|call| call["function"]["index"].clone()).collect();
    assert_eq!(indexes, [0, 1]);
}

/// Before, `curl -d` as in Ollama's documentation and the clients that send no type got a 415.
#[tokio::test]
async fn content_type_may_be_any() {
    let (app, _) = app(answer);
    for (path, body) in [
        ("/api/chat", json!({"messages": [{"role": "user", "content": "Hi"}]})),
        ("/api/generate", json!({"prompt": "Hi"})),
        ("/api/show", json!({"model": "owner/tiny"})),
    ] {
        for kind in [None, Some("application/x-www-form-urlencoded")] {
            let mut request = axum::http::Request::post(path);
            if let Some(kind) = kind {
                request = request.header(header::CONTENT_TYPE, kind);
            }
            let response = send(&app, request.body(body.to_string().into()).unwrap()).await;
            assert_eq!(response.status(), StatusCode::OK, "{path} {kind:?}");
        }
    }
}

#[tokio::test]
async fn chat_is_streamed_in_lines_by_default() {
    let (app, seen) = app(answer);
    let body = json!({
        "model": "owner/tiny:latest", "messages": [{"role": "user", "content": "Hi"}],
        "think": true, "keep_alive": "5m",
        "options": {"temperature": 0.5, "num_predict": 7, "num_ctx": 4096, "top_k": 3.0,
                    "stop": ["X"], "seed": 1}
    });
    let (status, lines) = lines(&app, "/api/chat", &body).await;
    assert_eq!(status, StatusCode::OK, "{lines:?}");
    let of = |field: &str| -> String {
        lines.iter().filter_map(|line| line["message"][field].as_str()).collect()
    };
    assert_eq!((of("thinking"), of("content")), ("It is Rome.".into(), "Rome\n.".into()));
    let (last, others) = lines.split_last().unwrap();
    assert!(others.iter().all(|line| line["done"] == false));
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("stop")));
    assert_eq!((&last["prompt_eval_count"], &last["eval_count"]), (&json!(20), &json!(12)));
    for field in ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"] {
        assert!(last[field].is_u64(), "{field}");
    }
    assert!(last["created_at"].as_str().unwrap().ends_with('Z'));
    let request = seen.last();
    assert_eq!(
        (request.reasoning, request.max_tokens, request.seed),
        (Some(true), Some(7), Some(1))
    );
    assert_eq!((request.sampling.top_k, request.stop.len()), (Some(3), 1));
}

#[tokio::test]
async fn chat_has_tools_in_several_rounds() {
    let (app, seen) = app(calls);
    let function = json!({"name": "weather", "parameters": {"type": "object"}});
    let body = json!({
        "stream": false,
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "thinking": "hm",
             "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bonn"}}}]},
            {"role": "tool", "tool_name": "weather", "content": "sunny"}
        ]
    });
    let (status, lines) = lines(&app, "/api/chat", &body).await;
    assert_eq!((status, lines.len()), (StatusCode::OK, 1), "{lines:?}");
    let call = &lines[0]["message"]["tool_calls"][0]["function"];
    assert_eq!((&call["name"], &call["arguments"]), (&json!("weather"), &json!({"city": "Rome"})));
    let messages = seen.last().messages;
    assert_eq!(messages[1].tool_calls[0].function.arguments["city"], "Bonn");
    assert_eq!(messages[1].reasoning_content.as_deref(), Some("hm"));
    assert_eq!((messages[2].role.as_str(), messages[2].content.as_str()), ("tool", "sunny"));
}

#[tokio::test]
async fn generate_takes_a_prompt_with_or_without_template() {
    let (app, seen) = app(answer);
    let body = json!({"prompt": "Hi", "system": "Be brief.", "stream": false, "think": false});
    let (status, reply) = lines(&app, "/api/generate", &body).await;
    assert_eq!(status, StatusCode::OK, "{reply:?}");
    assert_eq!((&reply[0]["response"], &reply[0]["done"]), (&json!("Rome\n."), &json!(true)));
    assert_eq!(reply[0]["thinking"], "It is Rome.");
    let request = seen.last();
    assert_eq!(request.reasoning, Some(false));
    let roles: Vec<_> = request.messages.iter().map(|message| message.role.as_str()).collect();
    assert_eq!(roles, ["system", "user"]);
    let body = json!({"prompt": "Hi", "raw": true, "stream": false});
    lines(&app, "/api/generate", &body).await;
    assert_eq!(seen.last().prompt, Some(RawPrompt::Text("Hi".into())));
}

#[tokio::test]
async fn penalties_reach_the_engine() {
    let (app, seen) = app(answer);
    let none = Penalties::default();
    for (options, expected) in [
        (json!({}), Penalties { window: 64, ..none }),
        (
            json!({"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -1}),
            Penalties { presence: 0.5, frequency: -1.0, repetition: 1.5, window: 64 },
        ),
        (
            json!({"repeat_penalty": 1.5, "repeat_last_n": 9}),
            Penalties { repetition: 1.5, window: 9, ..none },
        ),
        (
            json!({"repeat_penalty": 1.5, "repeat_last_n": -1}),
            Penalties { repetition: 1.5, ..none },
        ),
        (json!({"repeat_penalty": 1.5, "repeat_last_n": 0}), Penalties { window: 64, ..none }),
    ] {
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "options": options});
        let (status, reply) = lines(&app, "/api/chat", &body).await;
        assert_eq!(status, StatusCode::OK, "{reply:?}");
        assert_eq!(seen.last().penalties, expected, "{options}");
    }
}

/// As Ollama writes them since 0.12.11. Before, the fields were refused.
#[tokio::test]
async fn logprobs_are_in_the_lines_of_their_tokens() {
    let one = |text: &str, logprob| TokenLogprob { bytes: text.into(), logprob };
    let (app, seen) = app(|| {
        let one = |text: &str, logprob| TokenLogprob { bytes: text.into(), logprob };
        let logprob = |text: &str| {
            Say(Event::Logprob(Logprob { token: one(text, -0.5), top: vec![one("x", -2.0)] }))
        };
        vec![
            Say(Event::Reasoning("hm".into())),
            logprob("Ro"),
            logprob("me"),
            Say(Event::Answer("Rome".into())),
            logprob("<|im_end|>"),
            finished(FinishReason::Stop),
        ]
    });
    let entry = |text: &str| {
        let TokenLogprob { bytes, logprob } = one(text, -0.5);
        json!({"token": text, "logprob": logprob, "bytes": bytes,
               "top_logprobs": [{"token": "x", "logprob": -2.0, "bytes": b"x"}]})
    };
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for (path, mut body) in [
        ("/api/chat", json!({"messages": messages, "logprobs": true, "top_logprobs": 1})),
        ("/api/generate", json!({"prompt": "Hi", "logprobs": true, "top_logprobs": 1})),
    ] {
        let (status, streamed) = lines(&app, path, &body).await;
        assert_eq!(status, StatusCode::OK, "{streamed:?}");
        assert_eq!(seen.last().logprobs, Some(1));
        let logprobs: Vec<_> = streamed.iter().map(|line| line.get("logprobs").cloned()).collect();
        let last = json!([entry("<|im_end|>")]);
        assert_eq!(logprobs, [None, Some(json!([entry("Ro"), entry("me")])), Some(last)]);
        body["stream"] = false.into();
        let (_, whole) = lines(&app, path, &body).await;
        let all = json!([entry("Ro"), entry("me"), entry("<|im_end|>")]);
        assert_eq!(whole[0]["logprobs"], all);
    }
    for (body, words) in [
        (json!({"prompt": "Hi", "top_logprobs": 2}), "top_logprobs: requires"),
        (json!({"prompt": "Hi", "logprobs": true, "top_logprobs": 21}), "top_logprobs"),
    ] {
        let (status, reply) = lines(&app, "/api/generate", &body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{reply:?}");
        assert!(reply[0]["error"].as_str().unwrap().contains(words), "{reply:?}");
    }
    lines(&app, "/api/generate", &json!({"prompt": "Hi", "logprobs": false})).await;
    assert_eq!(seen.last().logprobs, None);
}

#[tokio::test]
async fn format_reaches_the_engine() {
    let (app, seen) = app(answer);
    let schema = json!({"type": "object"});
    for (format, form) in [
        (json!(""), None),
        (json!("json"), Some(Form::JsonObject)),
        (schema.clone(), Some(Form::JsonSchema(schema))),
    ] {
        let body = json!({"prompt": "a", "format": format, "stream": false});
        assert_eq!(lines(&app, "/api/generate", &body).await.0, StatusCode::OK);
        assert_eq!(seen.last().response_format.map(|format| format.form), form);
    }
}

/// Clients send it to load a model.
#[tokio::test]
async fn request_without_a_prompt_is_answered_at_once() {
    let (app, seen) = app(answer);
    for (path, body) in [
        ("/api/generate", json!({"model": "owner/tiny"})),
        ("/api/chat", json!({"model": "owner/tiny", "messages": [], "stream": false})),
    ] {
        let (status, reply) = lines(&app, path, &body).await;
        assert_eq!((status, reply.len()), (StatusCode::OK, 1));
        assert_eq!((&reply[0]["done"], &reply[0]["done_reason"]), (&json!(true), &json!("load")));
    }
    assert!(seen.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn models_are_described() {
    let (app, _) = app(answer);
    let tags = get(&app, "/api/tags").await;
    let names: Vec<_> = tags["models"].as_array().unwrap().iter().map(|m| &m["name"]).collect();
    assert_eq!(names, ["owner/tiny", "owner/tiny@strict"]);
    assert_eq!(tags["models"][0]["details"]["family"], "qwen3_5");
    assert!(get(&app, "/api/version").await["version"].is_string());
    let (status, shown) = lines(&app, "/api/show", &json!({"model": "owner/tiny:latest"})).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(shown[0]["model_info"]["qwen3_5.context_length"], 32768);
    assert_eq!(shown[0]["capabilities"], json!(["completion", "tools", "thinking"]));
}

#[tokio::test]
async fn errors_have_ollamas_format_and_name_the_field() {
    let (app, _) = app(answer);
    let chat = |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    for (path, body, status, words) in [
        ("/api/chat", chat(json!({"model": "gpt"})), 404, "no model `gpt`"),
        ("/api/chat", chat(json!({"format": "yaml"})), 400, "format"),
        ("/api/chat", chat(json!({"options": {"mirostat": 1}})), 400, "`mirostat`"),
        ("/api/chat", chat(json!({"options": {"temperature": 9}})), 400, "temperature"),
        ("/api/chat", chat(json!({"colour": 1})), 400, "`colour`"),
        ("/api/generate", json!({"prompt": "a", "width": 512}), 400, "`width`"),
        ("/api/chat", chat(json!({"options": {"repeat_penalty": 0}})), 400, "repeat_penalty"),
        ("/api/chat", chat(json!({"options": {"repeat_last_n": -2}})), 400, "repeat_last_n"),
        ("/api/chat", chat(json!({"options": {"presence_penalty": 3}})), 400, "presence_penalty"),
        ("/api/generate", json!({"prompt": "a", "images": ["x"]}), 400, "`images`"),
        ("/api/push", json!({}), 404, "no route"),
    ] {
        let (got, reply) = lines(&app, path, &body).await;
        assert_eq!(got.as_u16(), status, "{body} {reply:?}");
        let message = reply[0]["error"].as_str().unwrap();
        assert!(message.contains(words), "`{words}` is not in `{message}`");
    }
}

fn embedding() -> Vec<Act> {
    vec![Say(Event::Embedding(vec![0.6, -0.8])), finished(FinishReason::Length)]
}

/// F25: both routes were 404.
#[tokio::test]
async fn texts_have_embeddings() {
    let (app, seen) = app(embedding);
    let body = json!({"model": "owner/tiny", "input": ["a", "b"], "dimensions": 2, "truncate": false,
                      "options": {"num_ctx": 64, "temperature": 0.5}, "keep_alive": "5m"});
    let (status, reply) = lines(&app, "/api/embed", &body).await;
    assert_eq!(status, StatusCode::OK, "{reply:?}");
    let reply = &reply[0];
    let vectors: Vec<Vec<f32>> = serde_json::from_value(reply["embeddings"].clone()).unwrap();
    assert_eq!(vectors, [[0.6, -0.8], [0.6, -0.8]]);
    assert_eq!((&reply["model"], &reply["prompt_eval_count"]), (&json!("owner/tiny"), &json!(40)));
    assert!(reply["total_duration"].as_u64().unwrap() > 0);
    let request = seen.last();
    let wish = Embedding { dimensions: Some(2), truncates: false };
    assert_eq!(
        (request.embedding, request.prompt),
        (Some(wish), Some(RawPrompt::Text("b".into())))
    );
    let (_, reply) = lines(&app, "/api/embed", &json!({"input": "a"})).await;
    assert_eq!(reply[0]["embeddings"].as_array().unwrap().len(), 1);
    let wish = Embedding { dimensions: None, truncates: true };
    assert_eq!(seen.last().embedding, Some(wish));

    let body = json!({"prompt": "a", "options": {}, "keep_alive": 300});
    let (status, reply) = lines(&app, "/api/embeddings", &body).await;
    assert_eq!(status, StatusCode::OK, "{reply:?}");
    let vector: Vec<f32> = serde_json::from_value(reply[0]["embedding"].clone()).unwrap();
    assert_eq!(vector, [0.6, -0.8]);

    // Without a text, the model is only loaded.
    seen.requests.lock().unwrap().clear();
    for body in [json!({}), json!({"input": ""}), json!({"input": []}), json!({"keep_alive": 0})] {
        let (status, reply) = lines(&app, "/api/embed", &body).await;
        assert_eq!((status, &reply[0]["embeddings"]), (StatusCode::OK, &json!([])), "{reply:?}");
    }
    let (_, reply) = lines(&app, "/api/embeddings", &json!({"prompt": ""})).await;
    assert_eq!(reply[0]["embedding"], json!([]));
    assert!(seen.requests.lock().unwrap().is_empty());

    for (path, body, words) in [
        ("/api/embed", json!({"input": 3}), "input: must be"),
        ("/api/embed", json!({"input": ["a", 3]}), "input[1]: is 3, expected a string"),
        ("/api/embed", json!({"input": vec!["a"; 257]}), "input: 257 texts"),
        ("/api/embed", json!({"input": "a", "dimensions": 0}), "dimensions: must be at least 1"),
        ("/api/embed", json!({"input": "a", "truncate": "no"}), "truncate: is \"no\""),
        ("/api/embed", json!({"input": "a", "options": {"top_p": 2}}), "options.top_p"),
        ("/api/embed", json!({"input": "a", "options": {"colour": 2}}), "`colour`"),
        ("/api/embed", json!({"input": "a", "prompt": "a"}), "`prompt`"),
        ("/api/embeddings", json!({"prompt": "a", "truncate": true}), "`truncate`"),
        ("/api/embeddings", json!({"prompt": ["a"]}), "prompt: is a list, expected a string"),
        ("/api/embeddings", json!({"prompt": "a", "keep_alive": "soon"}), "keep_alive"),
    ] {
        let (status, reply) = lines(&app, path, &body).await;
        let message = reply[0]["error"].as_str().unwrap();
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
        assert!(message.contains(words), "{body}: {message}");
    }
}

/// F25: `raw` with `system` dropped the system text, as `suffix` did; `think: "true"` was refused in the words of a
/// library. `num_predict: 0`, which is no limit in Ollama, was refused.
#[tokio::test]
async fn fields_that_contradict_each_other_are_refused_by_name() {
    let (app, seen) = app(answer);
    for (body, words) in [
        (json!({"prompt": "a", "raw": true, "system": "s"}), "system: a prompt with `raw`"),
        (json!({"prompt": "a", "suffix": "b", "system": "s"}), "system: a prompt with a `suffix`"),
        (json!({"prompt": "a", "think": "true"}), "think: is \"true\", expected"),
        (json!({"prompt": "a", "think": 1}), "true or false without quotes"),
        (json!({"prompt": "a", "options": {"num_predict": -5}}), "options.num_predict"),
        (json!({"prompt": "a", "options": {"repeat_last_n": -2}}), "options.repeat_last_n"),
    ] {
        let (status, reply) = lines(&app, "/api/generate", &body).await;
        let message = reply[0]["error"].as_str().unwrap_or_default();
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}: {reply:?}");
        assert!(message.contains(words), "{body}: {message}");
    }
    for (body, think) in [
        (json!({"prompt": "a", "raw": true, "system": ""}), None),
        (json!({"prompt": "a", "think": "low"}), Some(true)),
        (json!({"prompt": "a", "think": "high"}), Some(true)),
        (json!({"prompt": "a", "think": false}), Some(false)),
        (json!({"prompt": "a", "options": {"num_predict": 0}}), None),
    ] {
        let (status, reply) = lines(&app, "/api/generate", &body).await;
        assert_eq!(status, StatusCode::OK, "{body}: {reply:?}");
        assert_eq!((seen.last().reasoning, seen.last().max_tokens), (think, None), "{body}");
    }
}
