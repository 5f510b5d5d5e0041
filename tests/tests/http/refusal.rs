//! Rejected requests: fields, values, keys, bodies and paths.

use axum::body::Body;
use axum::http::{Method, Response, StatusCode, header};
use serde_json::{Value, json};
use steersman::config::ServerConfig;
use steersman_engine::{Error, RequestError};

use crate::*;

#[tokio::test]
async fn unsupported_fields_are_rejected_by_name() {
    let (app, seen) = app(answer);
    let unsupported = [
        ("best_of", json!(3)),
        ("functions", json!([{"name": "f"}])),
        ("function_call", json!("auto")),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "alloy", "format": "wav"})),
        ("prediction", json!({"type": "content", "content": "x"})),
        ("web_search_options", json!({})),
    ];
    let rows = unsupported.len();
    for (field, value) in unsupported {
        rejected(&app, body(json!({field: value})), 400, "unsupported_parameter", field, field)
            .await;
        assert_eq!(chat(&app, body(json!({field: null}))).await.0, StatusCode::OK, "{field}: null");
    }
    for field in ["frequency_penality", "options", "keep_alive", "guided_xml"] {
        rejected(&app, body(json!({field: 1})), 400, "unknown_parameter", field, field).await;
    }
    // All unknown fields are told at once.
    let slips = json!({"temprature": 1, "x_mine": 2, "max_tokns": 3, "x_null": null});
    let (status, reply) = chat(&app, body(slips)).await;
    let message = reply["error"]["message"].as_str().unwrap();
    assert_eq!(status, StatusCode::BAD_REQUEST);
    for words in ["did you mean `temperature`?", "`x_mine` is an unknown", "mean `max_tokens`?"] {
        assert!(message.contains(words), "{message}");
    }
    assert!(!message.contains("x_null"), "{message}");
    // Whoever leaves out a field of another API loses what it asks for.
    for (field, words) in [
        ("enable_thinking", "this route has `reasoning_effort` for it"),
        ("thinking", "this route has `reasoning_effort` for it"),
        ("stop_sequences", "this route has `stop` for it"),
        ("max_output_tokens", "this route has `max_tokens` for it"),
        ("input", "this route has `messages` for it"),
        ("max_token", "did you mean `max_tokens`?"),
        ("colour", "leave it out"),
    ] {
        rejected(&app, body(json!({field: 1})), 400, "unknown_parameter", field, words).await;
    }
    let function = json!({"name": "f", "parameter": {"type": "object"}});
    let (sent, field) = (
        json!({"tools": [{"type": "function", "function": function}]}),
        "tools[0].function.parameter",
    );
    rejected(&app, body(sent), 400, "unknown_parameter", field, "did you mean `parameters`?").await;
    assert_eq!(seen.requests.lock().unwrap().len(), rows, "only the requests with null");
}

#[tokio::test]
async fn invalid_values_are_rejected_by_path() {
    let (app, seen) = app(answer);
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let second = |message: Value| json!({"messages": [{"role": "user", "content": "a"}, message]});
    let tool = |tool: Value| json!({"tools": [tool]});
    let function = |schema: Value| json!({"type": "function", "function": {"name": "f", "parameters": schema}});
    let think = |on: Value| json!({"chat_template_kwargs": {"enable_thinking": on}});
    let both = |mut one: Value, other: Value| {
        one.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
        one
    };
    let content = "messages[1].content";
    for (extra, code, param, words) in [
        (json!({"model": 3}), "invalid_type", "model", "expected a string"),
        (json!({"messages": []}), "missing_required_parameter", "messages", "at least one"),
        (json!({"messages": "hi"}), "invalid_type", "messages", "expected a list"),
        (json!({"messages": ["hi"]}), "invalid_type", "messages[0]", "messages[0]"),
        (user(json!(3)), "invalid_type", "messages[0].content", "a string or a list"),
        (user(Value::Null), "invalid_value", "messages[0].content", "missing"),
        (user(json!([{"type": "text"}])), "invalid_type", "messages[0].content[0].text", "string"),
        (
            user(json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])),
            "unsupported_parameter",
            "messages[0].content[1].type",
            "`image_url`",
        ),
        (
            user(json!([{"type": "input_audio", "input_audio": {}}])),
            "unsupported_parameter",
            "messages[0].content[0].type",
            "`input_audio`",
        ),
        (
            user(json!([{"type": "text", "text": "a", "bold": true}])),
            "unknown_parameter",
            "messages[0].content[0].bold",
            "leave it out",
        ),
        (
            second(json!({"role": "robot", "content": "a"})),
            "invalid_value",
            "messages[1].role",
            "robot",
        ),
        (second(json!({"content": "a"})), "invalid_value", "messages[1].role", "missing"),
        (second(json!({"role": "user"})), "invalid_value", content, "missing"),
        (second(json!({"role": 1, "content": "a"})), "invalid_type", "messages[1].role", "string"),
        (
            second(json!({"role": "user", "content": "a", "colour": 1})),
            "unknown_parameter",
            "messages[1].colour",
            "unknown field",
        ),
        (
            second(json!({"role": "tool", "content": "a"})),
            "invalid_value",
            "messages[1].tool_call_id",
            "id of the call",
        ),
        (
            second(json!({"role": "user", "content": "a", "tool_call_id": "c"})),
            "invalid_value",
            "messages[1].tool_call_id",
            "only a tool message",
        ),
        (
            second(json!({"role": "user", "content": "a", "reasoning_content": "b"})),
            "invalid_value",
            "messages[1].reasoning_content",
            "only an assistant",
        ),
        (
            second(json!({"role": "assistant", "content": "a", "audio": {"id": "x"}})),
            "unsupported_parameter",
            "messages[1].audio",
            "not supported",
        ),
        (
            second(json!({"role": "assistant", "content": "a", "reasoning": "b",
                          "reasoning_content": "c"})),
            "invalid_value",
            "messages[1].reasoning",
            "drop one",
        ),
        (
            json!({"temperature": 2.5}),
            "invalid_value",
            "temperature",
            "is 2.5, must be from 0 to 2",
        ),
        (json!({"temperature": 1e308}), "invalid_value", "temperature", "is 1e308, must be"),
        (json!({"temperature": "hot"}), "invalid_type", "temperature", "temperature"),
        (json!({"top_p": -0.1}), "invalid_value", "top_p", "0 or above"),
        (json!({"top_p": 1.1}), "invalid_value", "top_p", "at most 1"),
        (json!({"min_p": -0.1}), "invalid_value", "min_p", "from 0 to 1"),
        (json!({"top_k": -2}), "invalid_value", "top_k", "at least 1"),
        (json!({"top_k": 2.5}), "invalid_type", "top_k", "top_k"),
        (json!({"max_tokens": -2}), "invalid_value", "max_tokens", "at least 1"),
        (json!({"seed": 0.5}), "invalid_type", "seed", "integer"),
        (json!({"max_tokens": 0}), "invalid_value", "max_tokens", "at least 1"),
        (json!({"max_completion_tokens": 0}), "invalid_value", "max_completion_tokens", "least 1"),
        (
            json!({"max_tokens": 1, "max_completion_tokens": 2}),
            "invalid_value",
            "max_completion_tokens",
            "drop one",
        ),
        (json!({"stop": 3}), "invalid_type", "stop", "a string or a list"),
        (json!({"stop": ["a", 3]}), "invalid_type", "stop[1]", "expected a string"),
        (json!({"stop": ["a", ""]}), "invalid_value", "stop", "empty"),
        (json!({"stop": vec!["a"; 17]}), "invalid_value", "stop", "at most 16"),
        (json!({"stream": "yes"}), "invalid_type", "stream", "boolean"),
        (
            json!({"stream_options": {"include_usage": true}}),
            "invalid_value",
            "stream_options",
            "stream",
        ),
        (
            json!({"stream": true, "stream_options": {"colour": 1}}),
            "unknown_parameter",
            "stream_options.colour",
            "unknown field",
        ),
        (
            json!({"stream": true, "stream_options": {"include_usge": true}}),
            "unknown_parameter",
            "stream_options.include_usge",
            "did you mean `include_usage`?",
        ),
        (
            json!({"temprature": 0.5}),
            "unknown_parameter",
            "temprature",
            "did you mean `temperature`?",
        ),
        (tool(json!({})), "missing_required_parameter", "tools[0].type", "function"),
        (tool(json!({"type": "function"})), "invalid_value", "tools[0].function.name", "name"),
        (
            json!({"tools": [function(json!(5))]}),
            "invalid_type",
            "tools[0].function.parameters",
            "an object",
        ),
        (
            json!({"tools": [function(json!({})), function(json!({"type": "object"}))]}),
            "invalid_value",
            "tools[1].function.name",
            "another tool has the name `f`",
        ),
        (
            think(json!("yes")),
            "invalid_type",
            "chat_template_kwargs.enable_thinking",
            "true or false",
        ),
        (json!({"reasoning_effort": "huge"}), "invalid_type", "reasoning_effort", "\"medium\""),
        (
            both(think(json!(false)), json!({"reasoning_effort": "high"})),
            "invalid_value",
            "reasoning_effort",
            "drop one of them",
        ),
        (
            both(think(json!(true)), json!({"max_thinking_tokens": 0})),
            "invalid_value",
            "max_thinking_tokens",
            "drop one of them",
        ),
    ] {
        rejected(&app, body(extra), 400, code, param, words).await;
    }
    assert!(seen.requests.lock().unwrap().is_empty(), "no request reached the engine");
}

#[tokio::test]
async fn invalid_json_is_rejected_with_its_position() {
    let (app, _) = app(answer);
    for (text, words) in [
        ("{\"model\": \"m\",\n \"messages\": [}", "line 2 column 15"),
        ("", "line 1 column 0"),
        ("[]", "must be a JSON object"),
        ("{\"model\": \"m\"} x", "trailing characters"),
        (&"[".repeat(200), "recursion limit"),
    ] {
        let response = send(&app, post(text.to_string())).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        let reply = json_of(response).await;
        assert_eq!(reply["error"]["code"], "invalid_json");
        let message = reply["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "`{words}` is not in `{message}`");
    }
}

#[tokio::test]
async fn server_with_keys_requires_one() {
    let keys = vec!["sk-one".into(), "sk-two".into()];
    let config = ServerConfig { api_keys: keys, ..ServerConfig::default() };
    let (app, _) = app_with(&config, answer);
    for (authorization, status) in [
        (None, 401),
        (Some("Bearer sk-one"), 200),
        (Some("bearer sk-two"), 200),
        (Some("Bearer sk-on"), 401),
        (Some("Bearer sk-one2"), 401),
        (Some("Bearer "), 401),
        (Some("Bearer"), 401),
        (Some("Basic sk-one"), 401),
        (Some("sk-one"), 401),
    ] {
        let mut request = post(body(json!({})).to_string());
        if let Some(value) = authorization {
            request.headers_mut().insert(header::AUTHORIZATION, value.parse().unwrap());
        }
        let response = send(&app, request).await;
        assert_eq!(response.status().as_u16(), status, "{authorization:?}");
        if status == 401 {
            assert_eq!(response.headers()[header::WWW_AUTHENTICATE], "Bearer");
            assert_eq!(json_of(response).await["error"]["code"], "invalid_api_key");
        }
    }
    let get = |path: &str| axum::http::Request::get(path).body(Body::empty()).unwrap();
    assert_eq!(send(&app, get("/v1/models")).await.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(send(&app, get("/health")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn body_has_a_content_type_and_a_maximum_size() {
    let config = ServerConfig { body_limit_bytes: 2048, ..ServerConfig::default() };
    let (app, _) = app_with(&config, answer);
    let long = body(json!({"user": "x".repeat(3000)}));
    let response = send(&app, post(long.to_string())).await;
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let reply = json_of(response).await;
    assert_eq!(reply["error"]["code"], "request_too_large");
    assert!(reply["error"]["message"].as_str().unwrap().contains("2048"));

    for kind in [None, Some("text/plain"), Some("application/x-www-form-urlencoded")] {
        let mut request = post(body(json!({})).to_string());
        request.headers_mut().remove(header::CONTENT_TYPE);
        if let Some(kind) = kind {
            request.headers_mut().insert(header::CONTENT_TYPE, kind.parse().unwrap());
        }
        let response = send(&app, request).await;
        assert_eq!(response.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE, "{kind:?}");
        assert_eq!(json_of(response).await["error"]["code"], "unsupported_media_type");
    }
    let mut request = post(body(json!({})).to_string());
    let kind = "application/json; charset=utf-8".parse().unwrap();
    request.headers_mut().insert(header::CONTENT_TYPE, kind);
    assert_eq!(send(&app, request).await.status(), StatusCode::OK);

    // A compressed body was "not valid JSON", and the header was ignored where the body was plain.
    for (coding, status) in [
        ("gzip", StatusCode::UNSUPPORTED_MEDIA_TYPE),
        ("identity, br", StatusCode::UNSUPPORTED_MEDIA_TYPE),
        ("Identity", StatusCode::OK),
    ] {
        let mut request = post(body(json!({})).to_string());
        request.headers_mut().insert(header::CONTENT_ENCODING, coding.parse().unwrap());
        let response = send(&app, request).await;
        assert_eq!(response.status(), status, "{coding}");
        if status != StatusCode::OK {
            let message = json_of(response).await["error"]["message"].to_string();
            assert!(message.contains("Content-Encoding"), "{message}");
        }
    }
}

/// Claude Code sends `HEAD /` before its first request, without a key. Before, it got a 404.
#[tokio::test]
async fn a_server_is_found_at_its_root_without_a_key() {
    let config = ServerConfig { api_keys: vec!["sk-one".into()], ..ServerConfig::default() };
    let (app, seen) = app_with(&config, answer);
    for (method, has_text) in [(Method::HEAD, false), (Method::GET, true)] {
        let request = axum::http::Request::builder().method(method.clone()).uri("/");
        let response = send(&app, request.body(Body::empty()).unwrap()).await;
        assert_eq!(response.status(), StatusCode::OK, "{method}");
        assert_eq!(!bytes(response).await.is_empty(), has_text, "{method}");
    }
    assert!(seen.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn unknown_paths_and_methods_are_errors_in_openai_format() {
    let (app, _) = app(answer);
    for (method, path, status, code) in [
        (Method::GET, "/v1", 404, "route_not_found"),
        (Method::POST, "/", 405, "method_not_allowed"),
        (Method::POST, "/v2/rerank", 404, "route_not_found"),
        (Method::POST, "/v1/v1/chat/completions", 404, "route_not_found"),
        (Method::GET, "/v1/chat/completions", 405, "method_not_allowed"),
        (Method::DELETE, "/v1/models", 405, "method_not_allowed"),
        (Method::POST, "/health", 405, "method_not_allowed"),
    ] {
        let request = axum::http::Request::builder().method(method).uri(path);
        let response = send(&app, request.body(Body::empty()).unwrap()).await;
        assert_eq!(response.status().as_u16(), status, "{path}");
        if status == 405 {
            assert!(response.headers().contains_key(header::ALLOW), "{path}");
        }
        let reply = json_of(response).await;
        assert_eq!(reply["error"]["code"], code, "{path}");
        assert_eq!(reply["error"]["type"], "invalid_request_error");
        let message = reply["error"]["message"].as_str().unwrap();
        assert!(message.contains(path));
        assert_eq!(message.contains("adds `/v1` itself"), path.starts_with("/v1/v1"), "{message}");
    }
}

/// The status and the words are the policy's; type and code tell programs what it is.
#[tokio::test]
async fn a_refusal_by_a_policy_reaches_the_client_in_its_dialect() {
    // What `Retry-After` and `x-should-retry` tell: a 429 without a time was repeated after two seconds.
    let told = |response: &Response<Body>| {
        ["retry-after", "x-should-retry"].map(|name| {
            response.headers().get(name).map(|value| value.to_str().unwrap().to_owned())
        })
    };
    let some = |text: &str| Some(text.to_owned());
    for (status, kind, of_anthropic, retry_after_s, expected) in [
        (402, "invalid_request_error", "invalid_request_error", None, [None, some("false")]),
        (403, "permission_error", "permission_error", None, [None, some("false")]),
        (429, "rate_limit_error", "rate_limit_error", None, [None, some("false")]),
        (429, "rate_limit_error", "rate_limit_error", Some(60), [some("60"), None]),
        (429, "rate_limit_error", "rate_limit_error", Some(61), [some("61"), some("false")]),
    ] {
        let (engine, _) = engine_that("owner/tiny", 8, move |_| {
            let message = "not today".into();
            let refused = RequestError::Refused { status, message, retry_after_s };
            vec![Say(Event::Failed(Error::Request(refused)))]
        });
        let app = steersman::app(engine, &ServerConfig::default());
        let (got, reply) = chat(&app, body(json!({}))).await;
        let error = &reply["error"];
        assert_eq!((got.as_u16(), error["type"].as_str()), (status, Some(kind)));
        assert_eq!(
            (&error["code"], &error["message"]),
            (&json!("refused_by_policy"), &json!("not today"))
        );
        let messages = json!({"model": "owner/tiny", "max_tokens": 5,
            "messages": [{"role": "user", "content": "Hi"}]});
        let request = axum::http::Request::post("/v1/messages")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(messages.to_string()))
            .unwrap();
        let response = send(&app, request).await;
        assert_eq!(response.status().as_u16(), status);
        assert_eq!(told(&response), expected);
        assert_eq!(json_of(response).await["error"]["type"], of_anthropic);
    }
}

/// F23: the bias of an id that the model does not have was ignored, and `+5` was taken for 5.
#[tokio::test]
async fn a_bias_of_a_token_that_does_not_exist_is_refused() {
    let (app, seen) = app(answer);
    let size = steersman_tests::bundled_text().vocab_size();
    let last = (size - 1).to_string();
    let biases = json!({"logit_bias": {"0": -100, last: 100.0}});
    assert_eq!(chat(&app, body(biases)).await.0, StatusCode::OK);
    assert_eq!(seen.last().biases.len(), 2);
    let many: serde_json::Map<_, _> = (0..1025).map(|id| (id.to_string(), json!(1))).collect();
    for (biases, param) in [
        (json!({size.to_string(): 1}), format!("logit_bias.{size}")),
        (json!({"5": 1, "4294967295": 0}), "logit_bias.4294967295".into()),
        (json!({"+5": 1}), "logit_bias.+5".into()),
        (json!({"05": 1}), "logit_bias.05".into()),
        (json!({"-1": 1}), "logit_bias.-1".into()),
        (json!({"": 1}), "logit_bias.".into()),
        (json!({"5": 100.5}), "logit_bias.5".into()),
        (json!({"5": -101}), "logit_bias.5".into()),
        (json!({"5": "1"}), "logit_bias.5".into()),
        (Value::Object(many), "logit_bias".into()),
    ] {
        let body = body(json!({"logit_bias": biases}));
        rejected(&app, body, 400, "invalid_value", &param, "logit_bias").await;
    }
}
