//! OpenAI's completions, and the routes of the tokenizer.

use axum::http::{StatusCode, header};
use serde_json::{Value, json};
use steersman_engine::request::{Logprob, PromptToken, RawPrompt, TokenLogprob};

use crate::*;

async fn post_to(app: &Router, path: &str, body: &Value) -> (StatusCode, Value) {
    let request = axum::http::Request::post(path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let response = send(app, request).await;
    (response.status(), json_of(response).await)
}

async fn complete(app: &Router, body: Value) -> (StatusCode, Value) {
    post_to(app, "/v1/completions", &body).await
}

/// The chunks of a stream.
async fn stream(app: &Router, body: Value) -> Vec<Value> {
    let mut body = body;
    body["stream"] = true.into();
    let request = axum::http::Request::post("/v1/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let stream = bytes(send(app, request).await).await;
    let lines = std::str::from_utf8(&stream).unwrap().lines();
    let data = lines.filter_map(|line| line.strip_prefix("data: "));
    let chunks = data.filter(|data| *data != "[DONE]");
    chunks.map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
}

/// The probabilities in chunks of one choice.
fn added_up(chunks: &[&Value]) -> Value {
    let mut sum =
        json!({"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []});
    for chunk in chunks {
        let logprobs = &chunk["choices"][0]["logprobs"];
        for (name, list) in sum.as_object_mut().unwrap() {
            let more = logprobs[name.as_str()].as_array().cloned().unwrap_or_default();
            list.as_array_mut().unwrap().extend(more);
        }
    }
    sum
}

#[tokio::test]
async fn completion_has_openai_format() {
    let (app, seen) = app(answer);
    let (status, mut reply) =
        complete(&app, json!({"prompt": "The capital is", "echo": true})).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert!(reply["id"].take().as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(reply["object"], "text_completion");
    let text = "The capital isIt is Rome.Rome\n.";
    let choice = json!({"index": 0, "text": text, "logprobs": null, "finish_reason": "stop"});
    assert_eq!(reply["choices"], json!([choice]));
    assert_eq!(reply["usage"]["prompt_tokens"], 20);
    let request = seen.last();
    assert_eq!(request.prompt, Some(RawPrompt::Text("The capital is".into())));
    assert_eq!((request.messages.len(), request.max_tokens), (0, Some(16)));
}

#[tokio::test]
async fn each_prompt_has_a_choice() {
    let (app, seen) = app(answer);
    for (prompt, prompts) in [
        (json!([1, 2, 3]), vec![RawPrompt::Tokens(vec![1, 2, 3])]),
        (json!([[1], [2, 3]]), vec![RawPrompt::Tokens(vec![1]), RawPrompt::Tokens(vec![2, 3])]),
        (json!(["a", "b"]), vec![RawPrompt::Text("a".into()), RawPrompt::Text("b".into())]),
    ] {
        seen.requests.lock().unwrap().clear();
        let (status, reply) = complete(&app, json!({"prompt": prompt, "max_tokens": 3})).await;
        assert_eq!(status, StatusCode::OK, "{reply}");
        let requests = seen.requests.lock().unwrap().clone();
        let got: Vec<_> = requests.into_iter().filter_map(|request| request.prompt).collect();
        assert_eq!(got, prompts);
        assert_eq!(reply["choices"].as_array().unwrap().len(), prompts.len());
        assert_eq!(reply["choices"][prompts.len() - 1]["index"], prompts.len() - 1);
        assert_eq!(reply["usage"]["prompt_tokens"], 20 * prompts.len());
    }
}

#[tokio::test]
async fn stream_of_several_prompts_adds_up_to_the_whole_reply() {
    let (app, _) = app(answer);
    let body = json!({"prompt": ["a", "b"], "echo": true, "stream": true,
                      "stream_options": {"include_usage": true}});
    let request = axum::http::Request::post("/v1/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let stream = bytes(send(&app, request).await).await;
    let lines = std::str::from_utf8(&stream).unwrap().lines();
    let chunks: Vec<&str> = lines.filter_map(|line| line.strip_prefix("data: ")).collect();
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!(*last, "[DONE]");
    let mut texts = [String::new(), String::new()];
    let mut ended = 0;
    for chunk in chunks {
        let chunk: Value = serde_json::from_str(chunk).unwrap();
        assert_eq!(chunk["object"], "text_completion");
        let Some(choice) = chunk["choices"].get(0) else {
            assert_eq!(chunk["usage"]["completion_tokens"], 24);
            continue;
        };
        texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
        ended += usize::from(choice["finish_reason"] == "stop");
    }
    assert_eq!(texts, ["aIt is Rome.Rome\n.", "bIt is Rome.Rome\n."]);
    assert_eq!(ended, 2);
}

fn with_logprobs() -> Vec<Act> {
    let one = |text: &[u8], logprob| TokenLogprob { bytes: text.to_vec(), logprob };
    let prompt = |text: &[u8], logprob, top: Vec<TokenLogprob>| {
        Say(Event::PromptToken(PromptToken { bytes: text.to_vec(), logprob, top }))
    };
    vec![
        prompt("é".as_bytes(), None, Vec::new()),
        prompt(b"b", Some(-1.5), vec![one(b"x", -0.5)]),
        Say(Event::Logprob(Logprob { token: one(b"\xf0\x9f", -0.25), top: Vec::new() })),
        Say(Event::Logprob(Logprob { token: one(b"\x98\x80", 0.0), top: Vec::new() })),
        Say(Event::Answer("😀".into())),
        finished(FinishReason::Length),
    ]
}

/// What lm-eval's `local-completions` sends and reads.
#[tokio::test]
async fn echo_with_logprobs_reports_the_tokens_of_the_prompt() {
    let (app, seen) = app(with_logprobs);
    let body = json!({"prompt": [[65, 66]], "echo": true, "logprobs": 1, "max_tokens": 1, "n": 2,
                      "temperature": 0, "seed": 1234});
    let (status, reply) = complete(&app, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let bytes = ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80"];
    let expected = json!({
        "tokens": ["é", "b", bytes[0], bytes[1]],
        "token_logprobs": [null, -1.5, -0.25, 0.0],
        "top_logprobs": [null, {"x": -0.5, "b": -1.5}, {bytes[0]: -0.25}, {bytes[1]: 0.0}],
        "text_offset": [0, 1, 2, 3],
    });
    assert_eq!(reply["choices"][0]["logprobs"], expected);
    let text = reply["choices"][0]["text"].as_str().unwrap();
    assert!(text.ends_with("😀") && text.len() > 4, "{text}");
    let requests = seen.requests.lock().unwrap().clone();
    assert_eq!(requests[0].prompt, Some(RawPrompt::Tokens(vec![65, 66])));
    let wanted: Vec<_> = requests.iter().map(|r| (r.logprobs, r.prompt_logprobs)).collect();
    assert_eq!(wanted, [(Some(1), Some(1)), (Some(1), None)], "the prompt runs once");
    let (status, reply) =
        complete(&app, json!({"prompt": "a", "echo": true, "logprobs": 0, "max_tokens": 0})).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert_eq!(seen.last().max_tokens, Some(0));
    assert_eq!(seen.last().prompt_logprobs, Some(0));
}

#[tokio::test]
async fn logprobs_of_a_stream_add_up_to_those_of_the_reply() {
    let (app, seen) = app(with_logprobs);
    let (_, whole) = complete(&app, json!({"prompt": "a", "logprobs": 2})).await;
    let expected = &whole["choices"][0]["logprobs"];
    assert_eq!(seen.last().prompt_logprobs, None);
    let chunks = stream(&app, json!({"prompt": "a", "logprobs": 2})).await;
    let found = added_up(&chunks.iter().collect::<Vec<_>>());
    // The tokens of the prompt belong to the echo only.
    let own = |name: &str| expected[name].as_array().unwrap()[2..].to_vec();
    assert_eq!(found["tokens"], json!(own("tokens")));
    assert_eq!(found["token_logprobs"], json!(own("token_logprobs")));
    assert_eq!(found["text_offset"], json!([0, 1]));
}

/// Before, a stream with both was refused.
#[tokio::test]
async fn echo_with_logprobs_is_streamed_before_each_choice() {
    let (app, _) = app(with_logprobs);
    let body = json!({"prompt": ["a", [65, 66]], "echo": true, "logprobs": 1, "n": 2});
    let (status, whole) = complete(&app, body.clone()).await;
    assert_eq!(status, StatusCode::OK, "{whole}");
    let chunks = stream(&app, body).await;
    for (index, whole) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let of_choice = |chunk: &&Value| chunk["choices"][0]["index"] == index;
        let chunks: Vec<&Value> = chunks.iter().filter(of_choice).collect();
        let texts = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap());
        assert_eq!(texts.collect::<String>(), whole["text"]);
        assert_eq!(added_up(&chunks), whole["logprobs"], "choice {index}");
        let first = &chunks[0]["choices"][0];
        assert_eq!(first["logprobs"]["tokens"], json!(["é", "b"]), "{first}");
        assert!(whole["text"].as_str().unwrap().starts_with(first["text"].as_str().unwrap()));
        assert_ne!(first["text"], "");
    }
    // Without a reply, the last chunk follows the prompt at once.
    let body = json!({"prompt": "a", "echo": true, "logprobs": 0, "max_tokens": 0});
    let chunks = stream(&app, body).await;
    assert_eq!(chunks[0]["choices"][0]["logprobs"]["token_logprobs"], json!([null, -1.5]));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
}

/// A choice whose events come before the prompt's is written after it.
#[tokio::test]
async fn choices_wait_for_the_echo() {
    enable_log();
    let (engine, _) = engine_that("owner/tiny", 8, |request| {
        let mut acts = with_logprobs();
        if request.prompt_logprobs.is_some() {
            acts.insert(0, Wait(Duration::from_millis(50)));
        } else {
            acts.drain(..2);
        }
        acts
    });
    let app = steersman::app(engine, &ServerConfig::default());
    let body = json!({"prompt": "a", "echo": true, "logprobs": 1, "n": 2, "stream": true});
    for chunk in stream(&app, body).await.iter().take(2) {
        assert_eq!(chunk["choices"][0]["text"], "a", "{chunk}");
    }
}

#[tokio::test]
async fn suffix_asks_for_what_stands_between() {
    let (app, seen) = app(answer);
    let body = json!({"prompt": "def f(", "suffix": "):\n", "echo": true});
    let (status, reply) = complete(&app, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert!(reply["choices"][0]["text"].as_str().unwrap().starts_with("def f("), "{reply}");
    let infill = RawPrompt::Infill { prefix: "def f(".into(), suffix: "):\n".into() };
    assert_eq!(seen.last().prompt, Some(infill.clone()));
    let generate = json!({"prompt": "def f(", "suffix": "):\n", "stream": false});
    let (status, reply) = post_to(&app, "/api/generate", &generate).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    assert_eq!(seen.last().prompt, Some(infill));
}

#[tokio::test]
async fn errors_of_completions_name_the_field() {
    let (app, _) = app(answer);
    for (body, code, param) in [
        (json!({}), "missing_required_parameter", "prompt"),
        (json!({"prompt": 3}), "invalid_type", "prompt"),
        (json!({"prompt": []}), "invalid_value", "prompt"),
        (json!({"prompt": [1, "a"]}), "invalid_type", "prompt[1]"),
        (json!({"prompt": [[1], [-2]]}), "invalid_type", "prompt[1][0]"),
        (json!({"prompt": ["a", null]}), "invalid_type", "prompt[1]"),
        (json!({"prompt": [1], "suffix": "b"}), "unsupported_parameter", "suffix"),
        (
            json!({"prompt": "a", "suffix": "b", "echo": true, "logprobs": 1}),
            "unsupported_parameter",
            "suffix",
        ),
        (json!({"prompt": "a", "logprobs": 21}), "invalid_value", "logprobs"),
        (json!({"prompt": "a", "logprobs": "all"}), "invalid_type", "logprobs"),
        (json!({"prompt": "a", "max_tokens": 0}), "invalid_value", "max_tokens"),
        (
            json!({"prompt": "a", "max_tokens": 0, "echo": true, "n": 2}),
            "invalid_value",
            "max_tokens",
        ),
        (json!({"prompt": "a", "n": 0}), "invalid_value", "n"),
        (json!({"prompt": vec!["a"; 128], "n": 2}), "invalid_value", "n"),
        (json!({"prompt": "a", "n": 2, "best_of": 3}), "unsupported_parameter", "best_of"),
        (json!({"prompt": [99_999_999], "echo": true}), "invalid_value", "prompt"),
    ] {
        let (status, reply) = complete(&app, body.clone()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body} {reply}");
        let error = &reply["error"];
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!(code), &json!(param)),
            "{body} {error}"
        );
    }
}

#[tokio::test]
async fn text_is_tokenized_and_back() {
    let (app, seen) = app(answer);
    let text = "Grüße, world <|im_end|>";
    let (status, reply) =
        post_to(&app, "/tokenize", &json!({"prompt": text, "return_token_strs": true})).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let tokens = reply["tokens"].as_array().unwrap();
    assert_eq!(reply["count"], tokens.len());
    assert_eq!(reply["max_model_len"], 32768);
    assert_eq!(reply["token_strs"].as_array().unwrap().last().unwrap(), "<|im_end|>");
    let (_, other) = post_to(&app, "/v1/tokenize", &json!({"content": text})).await;
    assert_eq!(other["tokens"], reply["tokens"]);
    let (status, back) = post_to(&app, "/detokenize", &json!({"tokens": tokens})).await;
    assert_eq!((status, &back["prompt"]), (StatusCode::OK, &json!(text)));

    let chat = json!({"messages": [{"role": "user", "content": "Hi"}],
                      "chat_template_kwargs": {"enable_thinking": false}});
    let (_, rendered) = post_to(&app, "/apply-template", &chat).await;
    let prompt = rendered["prompt"].as_str().unwrap();
    assert!(prompt.starts_with("<|im_start|>user\nHi<|im_end|>\n"), "{prompt}");
    assert!(prompt.ends_with("<think>\n\n</think>\n\n"), "{prompt}");
    let (_, of_chat) = post_to(&app, "/tokenize", &chat).await;
    let (_, of_text) = post_to(&app, "/tokenize", &json!({"prompt": prompt})).await;
    assert_eq!(of_chat["tokens"], of_text["tokens"]);
    assert!(seen.requests.lock().unwrap().is_empty(), "nothing reaches the engine's queue");
}

#[tokio::test]
async fn errors_of_the_tokenizer_name_the_field() {
    let (app, _) = app(answer);
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": "a", "colour": 1}), "colour"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/detokenize", json!({"tokens": [1, "a"]}), "tokens[1]"),
        ("/detokenize", json!({"tokens": [99_999_999]}), "tokens"),
        ("/apply-template", json!({"prompt": "a"}), "prompt"),
        ("/tokenize", json!({"model": "gpt", "prompt": "a"}), "model"),
    ] {
        let (status, reply) = post_to(&app, path, &body).await;
        assert!(status.is_client_error(), "{path} {body} {reply}");
        assert_eq!(reply["error"]["param"], param, "{path} {body} {reply}");
    }
}
