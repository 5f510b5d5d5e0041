//! What the limit on tokens of each protocol counts, cell by cell: all of a reply, or its answer. Reasoning that a
//! client did not ask for never costs its answer.

use axum::http::{StatusCode, header};
use serde_json::{Value, json};

use crate::*;

/// What a limit of 9 tokens counts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Counts {
    /// Answer and tool calls.
    Answer,
    /// Reasoning too.
    Reply,
    /// There is no limit.
    Nothing,
}

use Counts::{Answer, Nothing, Reply};

/// Ways to ask for reasoning or for none, and what the limit counts then.
type Asked = Vec<(Value, Counts)>;

/// Ways to ask in a chat; `asked` is what the limit counts if the client asks for reasoning.
fn in_chats(asked: Counts) -> Asked {
    vec![
        (json!({}), Answer),
        (json!({"reasoning_effort": null}), Answer),
        (json!({"chat_template_kwargs": {"enable_thinking": null}}), Answer),
        (json!({"chat_template_kwargs": {"enable_thinking": false}}), Answer),
        (json!({"reasoning_effort": "none"}), Answer),
        (json!({"reasoning_effort": "minimal"}), Answer),
        (json!({"max_thinking_tokens": 0}), Answer),
        (json!({"chat_template_kwargs": {"enable_thinking": true}}), asked),
        (json!({"reasoning_effort": "low"}), asked),
        (json!({"reasoning_effort": "high"}), asked),
        (json!({"max_thinking_tokens": 5}), asked),
        // The reply has exactly as many tokens, whatever they are.
        (json!({"ignore_eos": true}), Reply),
    ]
}

#[tokio::test]
async fn each_field_counts_what_its_api_and_the_question_say() {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let chat = json!({"model": "owner/tiny", "messages": messages});
    let response = json!({"model": "owner/tiny", "input": "Hi"});
    let prompt = json!({"model": "owner/tiny", "prompt": "Hi"});
    let rows: Vec<(&str, &Value, Value, Asked)> = vec![
        ("/v1/chat/completions", &chat, json!({"max_tokens": 9}), in_chats(Answer)),
        ("/v1/chat/completions", &chat, json!({"max_completion_tokens": 9}), in_chats(Reply)),
        (
            "/v1/chat/completions",
            &chat,
            json!({"max_tokens": 9, "max_completion_tokens": 9}),
            in_chats(Reply),
        ),
        ("/v1/chat/completions", &chat, json!({"max_tokens": -1}), vec![(json!({}), Nothing)]),
        (
            "/v1/responses",
            &response,
            json!({"max_output_tokens": 9}),
            vec![
                (json!({}), Answer),
                (json!({"reasoning": {"summary": "auto"}}), Answer),
                (json!({"reasoning": {"effort": "none"}}), Answer),
                (json!({"reasoning": {"effort": "minimal"}}), Answer),
                (json!({"reasoning": {"effort": "low"}}), Reply),
                (json!({"reasoning": {"effort": "xhigh"}}), Reply),
            ],
        ),
        (
            "/v1/messages",
            &chat,
            json!({"max_tokens": 9}),
            vec![
                (json!({}), Answer),
                (json!({"thinking": null}), Answer),
                (json!({"thinking": {"type": "disabled"}}), Answer),
                (json!({"output_config": {"effort": "low"}}), Answer),
                (json!({"thinking": {"type": "adaptive"}}), Reply),
                (json!({"thinking": {"type": "enabled", "budget_tokens": 5}}), Reply),
            ],
        ),
        (
            "/api/chat",
            &chat,
            json!({"options": {"num_predict": 9}}),
            vec![
                (json!({}), Answer),
                (json!({"think": false}), Answer),
                (json!({"think": true}), Reply),
                (json!({"think": "low"}), Reply),
            ],
        ),
        (
            "/api/generate",
            &prompt,
            json!({"options": {"num_predict": 9}}),
            vec![
                (json!({}), Answer),
                (json!({"think": true}), Reply),
                (json!({"raw": true}), Reply),
                (json!({"suffix": "b"}), Reply),
            ],
        ),
        ("/api/chat", &chat, json!({"options": {"num_predict": -1}}), vec![(json!({}), Nothing)]),
        ("/v1/completions", &prompt, json!({"max_tokens": 9}), vec![(json!({}), Reply)]),
    ];
    let (app, seen) = app(answer);
    for (path, base, limit, asked) in rows {
        for (asked, counts) in asked {
            let mut body = base.clone();
            for more in [&limit, &asked, &json!({"stream": false})] {
                body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            }
            let request = axum::http::Request::post(path)
                .header(header::CONTENT_TYPE, "application/json")
                .body(body.to_string().into())
                .unwrap();
            let response = send(&app, request).await;
            let status = response.status();
            assert_eq!(status, StatusCode::OK, "{path} {body}: {}", json_of(response).await);
            let request = seen.last();
            let found = match (request.max_tokens, request.max_answer_tokens) {
                (None, Some(9)) => Answer,
                (Some(9), None) => Reply,
                (None, None) => Nothing,
                other => panic!("{path} {body}: {other:?}"),
            };
            assert_eq!(found, counts, "{path} {body}");
        }
    }
}

/// Clients see in the usage what the limits count.
#[tokio::test]
async fn each_protocol_reports_the_tokens_of_reasoning() {
    let (app, _) = app(answer);
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let chat = json!({"model": "owner/tiny", "messages": messages, "stream": false});
    let response = json!({"model": "owner/tiny", "input": "Hi"});
    let all = USAGE.reasoning_tokens + USAGE.answer_tokens;
    for (path, body, total, reasoning) in [
        (
            "/v1/chat/completions",
            &chat,
            "/usage/completion_tokens",
            "/usage/completion_tokens_details/reasoning_tokens",
        ),
        (
            "/v1/responses",
            &response,
            "/usage/output_tokens",
            "/usage/output_tokens_details/reasoning_tokens",
        ),
        (
            "/v1/messages",
            &chat,
            "/usage/output_tokens",
            "/usage/output_tokens_details/thinking_tokens",
        ),
        ("/api/chat", &chat, "/eval_count", "/steersman/reasoning_tokens"),
    ] {
        let request = axum::http::Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(body.to_string().into())
            .unwrap();
        let reply = json_of(send(&app, request).await).await;
        let found = [total, reasoning].map(|pointer| reply.pointer(pointer).cloned());
        let expected = [all, USAGE.reasoning_tokens].map(|tokens| Some(json!(tokens)));
        assert_eq!(found, expected, "{path}: {reply}");
    }
}
