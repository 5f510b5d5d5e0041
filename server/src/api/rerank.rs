//! Reranking of documents by their similarity to a query: `POST /v1/rerank`, in the shape of Jina's and Cohere's.
//!
//! A bi-encoder: query and documents are embedded each for itself, as for `POST /v1/embeddings`, and a score is the
//! cosine similarity of two embeddings. No model reads query and document together.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use steersman_engine::request::{Embedding, RawPrompt};

use super::embeddings::{self, PromptUsage, TEXTS};
use super::error::ApiError;
use super::protocol::{Call, Parsed, Protocol};
use super::reply::{Head, Reply};
use super::schema::Schemas;
use super::{fields, json};

/// The state of one response.
#[derive(Debug)]
pub struct Rerank {
    /// Most results.
    top_n: usize,
    /// The documents, if the results have them.
    documents: Option<Vec<String>>,
}

#[derive(Deserialize, JsonSchema)]
struct Body {
    model: Option<String>,
    #[schemars(required)]
    query: Option<String>,
    #[schemars(with = "Vec<super::schema::shapes::Document>", length(min = 1, max = 256))]
    documents: Option<Vec<Value>>,
    /// Most results.
    #[schemars(range(min = 1))]
    top_n: Option<usize>,
    /// Whether results have the documents.
    return_documents: Option<bool>,
}

/// Documents by their similarity to the query, the best first.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Ranking {
    id: String,
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    model: String,
    results: Vec<Ranked>,
    usage: PromptUsage,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Ranked {
    /// Index in `documents`.
    index: usize,
    #[schemars(range(min = -1.0, max = 1.0))]
    relevance_score: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<RankedDocument>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
struct RankedDocument {
    text: String,
}

impl Body {
    fn check(self) -> Result<Call<Rerank>, ApiError> {
        let Some(query) = self.query else {
            return Err(ApiError::missing("query", "query: must be a string"));
        };
        let Some(documents) = self.documents else {
            let message = "documents: must be a list of strings, or of objects with a `text`";
            return Err(ApiError::missing("documents", message));
        };
        if documents.is_empty() || documents.len() > TEXTS {
            let message = format!("documents: {} texts, must be 1 to {TEXTS}", documents.len());
            return Err(ApiError::value("documents", message));
        }
        if self.top_n == Some(0) {
            return Err(ApiError::value("top_n", "top_n: must be at least 1"));
        }
        let documents = documents.into_iter().enumerate().map(|(i, value)| text(i, value));
        let documents = documents.collect::<Result<Vec<_>, _>>()?;
        let returned = self.return_documents.unwrap_or(false).then(|| documents.clone());
        let request = |text| embeddings::request(RawPrompt::Text(text), Embedding::default());
        let requests = std::iter::once(query).chain(documents).map(request).collect();
        let protocol = Rerank { top_n: self.top_n.unwrap_or(usize::MAX), documents: returned };
        Ok(Call::of_texts(protocol, requests))
    }
}

/// The text of document `i`: a string, or an object with nothing but a `text`.
fn text(i: usize, document: Value) -> Result<String, ApiError> {
    let path = format!("documents[{i}]");
    match document {
        Value::String(text) => Ok(text),
        Value::Object(_) => Ok(json::typed::<Document>(&path, &document)?.text),
        _ => {
            let message = format!("{path}: must be a string, or an object with a `text`");
            Err(ApiError::invalid("invalid_type", path, message))
        }
    }
}

#[derive(Deserialize)]
struct Document {
    text: String,
}

impl Protocol for Rerank {
    type Whole = Ranking;

    const ID: &'static str = "rerank-";

    const OPERATION: &'static str = "rerank";

    fn schema(schemas: &mut Schemas) -> Value {
        let parts = [schemas.of::<Body>()];
        schemas.body(fields::RERANK, &parts)
    }

    fn parse(fields: Map<String, Value>) -> Result<Parsed<Self>, ApiError> {
        fields::check(fields::RERANK, &fields)?;
        let mut body: Body = json::typed_body(fields)?;
        Ok(Parsed { model: body.model.take(), stream: false, call: body.check() })
    }

    fn prompt_field(&self, index: usize) -> String {
        // The first text is the query.
        index.checked_sub(1).map_or("query".into(), |index| format!("documents[{index}]"))
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Ranking {
        // The first text is the query.
        let scores = replies.split_first().map_or_else(Vec::new, |(query, documents)| {
            let score = |document: &Reply| cosine(&query.embedding, &document.embedding);
            documents.iter().map(score).collect()
        });
        let mut ranked: Vec<(usize, f32)> = scores.into_iter().enumerate().collect();
        // Equal documents stay in their order.
        ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        ranked.truncate(self.top_n);
        let result = |(index, score): (usize, f32)| {
            let text = |documents: &Vec<String>| RankedDocument { text: documents[index].clone() };
            let document = self.documents.as_ref().map(text);
            Ranked { index, relevance_score: score.into(), document }
        };
        Ranking {
            id: head.id.clone(),
            object: "list",
            model: head.model.clone(),
            results: ranked.into_iter().map(result).collect(),
            usage: PromptUsage::new(head, replies),
        }
    }
}

/// The cosine of the angle between two embeddings, which have the length 1.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let product: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    product.clamp(-1.0, 1.0) as f32
}
