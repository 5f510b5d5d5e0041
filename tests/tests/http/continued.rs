//! `continue_final_message`: another server continues a reply here that it has cut off.

use serde_json::{Value, json};
use steersman_engine::request::Continued;

use super::{answer, app, body, chat, rejected};

fn asks(last: Value, extra: Value) -> Value {
    let mut body = body(json!({"continue_final_message": true, "add_generation_prompt": false}));
    body["messages"].as_array_mut().unwrap().push(last);
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn the_reply_continues_the_answer_or_the_reasoning_of_the_last_message() {
    let (app, seen) = app(answer);
    for (last, expected) in [
        (json!({"role": "assistant", "content": "It is"}), Continued::Answer),
        (
            json!({"role": "assistant", "content": "", "reasoning_content": "Italy."}),
            Continued::Answer,
        ),
        (
            json!({"role": "assistant", "content": null, "reasoning_content": "Ita"}),
            Continued::Reasoning,
        ),
        (json!({"role": "assistant", "reasoning_content": "Ita"}), Continued::Reasoning),
    ] {
        let (status, reply) = chat(&app, asks(last, json!({}))).await;
        assert_eq!(status, 200, "{reply}");
        assert_eq!(seen.last().continues, Some(expected));
        // The reply has the new text only.
        assert_eq!(reply["choices"][0]["message"]["content"], "Rome\n.");
    }
    let (status, _) = chat(&app, body(json!({"add_generation_prompt": true}))).await;
    assert_eq!((status.as_u16(), seen.last().continues), (200, None));
}

#[tokio::test]
async fn what_cannot_be_continued_is_refused() {
    let (app, _) = app(answer);
    let field = "continue_final_message";
    let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    for last in [
        json!({"role": "user", "content": "Hi"}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
    ] {
        let words = "the last message must be the assistant's";
        rejected(&app, asks(last, json!({})), 400, "invalid_value", field, words).await;
    }
    let last = json!({"role": "assistant", "content": "{"});
    let form = json!({"response_format": {"type": "json_object"}});
    rejected(&app, asks(last.clone(), form), 400, "unsupported_parameter", field, "form").await;
    let both = json!({"add_generation_prompt": true});
    rejected(&app, asks(last, both), 400, "invalid_value", "add_generation_prompt", "drop one")
        .await;
    let alone = body(json!({"add_generation_prompt": false}));
    rejected(&app, alone, 400, "unsupported_parameter", "add_generation_prompt", "only with").await;
}
