//! Reranking by the similarity of embeddings.

use axum::http::{StatusCode, header};
use serde_json::{Value, json};
use steersman_engine::request::{Embedding, RawPrompt};

use crate::*;

/// An engine whose embedding of a text `x y` has the direction (x, y).
fn app_of_directions() -> (Router, Arc<Seen>) {
    enable_log();
    let (engine, seen) = engine_that("owner/tiny", 8, |request| {
        let Some(RawPrompt::Text(text)) = &request.prompt else { panic!("{:?}", request.prompt) };
        let direction: Vec<f32> = text.split(' ').map(|x| x.parse().unwrap()).collect();
        let length = direction.iter().map(|x| x * x).sum::<f32>().sqrt();
        let embedding = direction.iter().map(|x| x / length).collect();
        vec![Say(Event::Embedding(embedding)), finished(FinishReason::Length)]
    });
    (steersman::app(engine, &ServerConfig::default()), seen)
}

async fn rerank(app: &Router, path: &str, body: &Value) -> (StatusCode, Value) {
    let request = axum::http::Request::post(path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into())
        .unwrap();
    let response = send(app, request).await;
    (response.status(), json_of(response).await)
}

#[tokio::test]
async fn documents_are_ranked_by_cosine_similarity() {
    let (app, seen) = app_of_directions();
    let documents = json!(["0 1", {"text": "3 0"}, "-1 0", "1 1", "2 0"]);
    let body = json!({"model": "owner/tiny", "query": "5 0", "documents": documents});
    for path in ["/v1/rerank", "/rerank"] {
        seen.requests.lock().unwrap().clear();
        let (status, reply) = rerank(&app, path, &body).await;
        assert_eq!(status, StatusCode::OK, "{reply}");
        let results = reply["results"].as_array().unwrap();
        let indices: Vec<_> = results.iter().map(|one| one["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, [1, 4, 3, 0, 2], "equal documents stay in their order");
        let expected = [1.0, 1.0, 0.5f64.sqrt(), 0.0, -1.0];
        for (result, expected) in results.iter().zip(expected) {
            let score = result["relevance_score"].as_f64().unwrap();
            assert!((score - expected).abs() < 1e-6, "{reply}");
            assert!(result.get("document").is_none());
        }
        assert_eq!(reply["model"], "owner/tiny");
        let tokens = 6 * USAGE.prompt_tokens;
        assert_eq!(reply["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
        let requests = seen.requests.lock().unwrap().clone();
        assert_eq!(requests.len(), 6);
        let whole = Some(Embedding::default());
        assert!(requests.iter().all(|r| r.embedding == whole && r.max_tokens == Some(0)));
    }
    let mut body = body;
    (body["top_n"], body["return_documents"]) = (2.into(), true.into());
    let (_, reply) = rerank(&app, "/v1/rerank", &body).await;
    let results = reply["results"].as_array().unwrap();
    let texts: Vec<_> = results.iter().map(|result| &result["document"]["text"]).collect();
    assert_eq!(texts, ["3 0", "2 0"]);
    // More texts than the queue has places, and more results than documents.
    let body = json!({"query": "1 0", "documents": vec!["1 0"; 30], "top_n": 99});
    let (status, reply) = rerank(&app, "/v1/rerank", &body).await;
    assert_eq!((status, reply["results"].as_array().unwrap().len()), (StatusCode::OK, 30));
}

#[tokio::test]
async fn errors_of_reranking_name_the_field() {
    let (app, _) = app_of_directions();
    for (body, code, param) in [
        (json!({"documents": ["1 0"]}), "missing_required_parameter", "query"),
        (json!({"query": "1 0"}), "missing_required_parameter", "documents"),
        (json!({"query": ["1 0"], "documents": ["1 0"]}), "invalid_type", "query"),
        (json!({"query": "1 0", "documents": "1 0"}), "invalid_type", "documents"),
        (json!({"query": "1 0", "documents": []}), "invalid_value", "documents"),
        (json!({"query": "1 0", "documents": vec!["1 0"; 257]}), "invalid_value", "documents"),
        (json!({"query": "1 0", "documents": ["1 0", 3]}), "invalid_type", "documents[1]"),
        (json!({"query": "1 0", "documents": [{}]}), "invalid_type", "documents[0]"),
        (
            json!({"query": "1 0", "documents": [{"text": "1 0", "title": "t"}]}),
            "unknown_parameter",
            "documents[0].title",
        ),
        (json!({"query": "1 0", "documents": ["1 0"], "top_n": 0}), "invalid_value", "top_n"),
        (
            json!({"query": "1 0", "documents": ["1 0"], "max_tokens_per_doc": 9}),
            "unsupported_parameter",
            "max_tokens_per_doc",
        ),
        (
            json!({"query": "1 0", "documents": ["1 0"], "stream": true}),
            "unknown_parameter",
            "stream",
        ),
    ] {
        let (status, reply) = rerank(&app, "/v1/rerank", &body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body} {reply}");
        let error = &reply["error"];
        assert_eq!((&error["code"], &error["param"]), (&json!(code), &json!(param)), "{body}");
    }
}
