//! Several choices of one request: `n`.

use serde_json::{Value, json};

use crate::*;

fn prompts_and_seeds(seen: &Seen) -> Vec<(String, Option<u64>)> {
    let requests = seen.requests.lock().unwrap();
    requests.iter().map(|request| (request.id.clone(), request.seed)).collect()
}

#[tokio::test]
async fn reply_has_a_choice_for_each_of_n() {
    let (app, seen) = app(answer);
    let (status, reply) = chat(&app, body(json!({"n": 3, "best_of": 3, "seed": 7}))).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let choices = reply["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(choice["message"]["content"], "Rome\n.");
        assert_eq!(choice["steersman"]["notes"], json!(["routed: plain"]));
    }
    // The prompt counts once.
    assert_eq!(reply["usage"]["prompt_tokens"], USAGE.prompt_tokens);
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], USAGE.cached_tokens);
    assert_eq!(reply["usage"]["completion_tokens"], 3 * 12);
    let seen = prompts_and_seeds(&seen);
    let seeds: Vec<_> = seen.iter().map(|(_, seed)| *seed).collect();
    assert_eq!(seeds, [Some(7), Some(8), Some(9)]);
    let first = &seen[0].0;
    assert_eq!([&seen[1].0, &seen[2].0], [&format!("{first}-1"), &format!("{first}-2")]);
}

#[tokio::test]
async fn stream_names_the_choice_of_each_chunk() {
    let (app, seen) = app(answer);
    let options = json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}});
    let stream = bytes(send(&app, post(body(options).to_string())).await).await;
    let chunks = data(&stream);
    let of =
        |index: usize| chunks.iter().filter(move |chunk| chunk["choices"][0]["index"] == index);
    for index in [0, 1] {
        let text = |chunk: &Value| -> String {
            let content = &chunk["choices"][0]["delta"]["content"];
            content.as_str().unwrap_or_default().into()
        };
        assert_eq!(of(index).map(text).collect::<String>(), "Rome\n.");
        let roles = of(index).filter(|chunk| chunk["choices"][0]["delta"]["role"] == "assistant");
        assert_eq!(roles.count(), 1);
        let ends = of(index).filter(|chunk| chunk["choices"][0]["finish_reason"] == "stop");
        assert_eq!(ends.count(), 1);
    }
    let usage = &chunks[chunks.len() - 2]["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(20), &json!(24)));
    assert_eq!(seen.requests.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn each_prompt_of_a_completion_has_n_choices() {
    let (app, seen) = app(answer);
    let body = json!({"prompt": ["a", "b"], "n": 2, "echo": true, "seed": 1});
    let request = axum::http::Request::post("/v1/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let reply = json_of(send(&app, request).await).await;
    let texts: Vec<_> = reply["choices"].as_array().unwrap().iter().map(|c| &c["text"]).collect();
    let [a, b] = ["aIt is Rome.Rome\n.", "bIt is Rome.Rome\n."];
    assert_eq!(texts, [a, a, b, b]);
    assert_eq!(reply["usage"]["prompt_tokens"], 40);
    let seeds: Vec<_> = prompts_and_seeds(&seen).into_iter().map(|(_, seed)| seed).collect();
    assert_eq!(seeds, [Some(1), Some(2), Some(1), Some(2)]);
}

#[tokio::test]
async fn n_has_limits() {
    let (app, _) = app(answer);
    for n in [json!(0), json!(33)] {
        rejected(&app, body(json!({"n": n})), 400, "invalid_value", "n", "1 to 32").await;
    }
    let invalid = body(json!({"n": -1}));
    rejected(&app, invalid, 400, "invalid_type", "n", "n").await;
    let more = body(json!({"n": 2, "best_of": 5}));
    rejected(&app, more, 400, "unsupported_parameter", "best_of", "equal to n").await;
}

#[tokio::test]
async fn a_client_that_disconnects_cancels_every_choice() {
    let (app, seen) = app(|| vec![Say(Event::Answer("Ro".into())), UntilCancelled]);
    let response = send(&app, post(body(json!({"n": 2, "stream": true})).to_string())).await;
    drop(response);
    for _ in 0..1000 {
        if seen.cancelled.lock().unwrap().len() == 2 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{:?}", seen.cancelled.lock().unwrap());
}
