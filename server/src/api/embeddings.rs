//! OpenAI's embeddings: `POST /v1/embeddings`.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use steersman_engine::request::{Embedding, RawPrompt, Request};

use super::completions::{place_of, prompts};
use super::error::ApiError;
use super::openapi::Schemas;
use super::openapi::shapes::Prompts;
use super::protocol::{Call, Parsed, Protocol};
use super::reply::{self, Head, Reply};
use super::{fields, json};

/// Most texts of a body.
pub const TEXTS: usize = 256;

/// The state of one response.
#[derive(Debug)]
pub struct Embeddings {
    /// Number of texts.
    texts: usize,
    /// Whether each embedding is written as base64 of its f32, little endian.
    is_base64: bool,
}

#[derive(Deserialize, JsonSchema)]
struct Body {
    model: Option<String>,
    #[schemars(with = "Prompts")]
    input: Option<Value>,
    /// Keeps the first ones.
    #[schemars(range(min = 1))]
    dimensions: Option<u32>,
    /// `float` or `base64`
    encoding_format: Option<String>,
}

impl Body {
    fn check(self) -> Result<Call<Embeddings>, ApiError> {
        let is_base64 = match self.encoding_format.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(format) => {
                let message = format!("encoding_format: is `{format}`, must be float or base64");
                return Err(ApiError::value("encoding_format", message));
            }
        };
        let embedding = Embedding { dimensions: dimensions(self.dimensions)?, truncates: false };
        let texts = prompts("input", self.input.unwrap_or_default(), TEXTS)?;
        let requests: Vec<_> = texts.into_iter().map(|text| request(text, embedding)).collect();
        Ok(Call::of_texts(Embeddings { texts: requests.len(), is_base64 }, requests))
    }
}

/// The request for the embedding of `prompt`.
pub fn request(prompt: RawPrompt, embedding: Embedding) -> Request {
    Request {
        prompt: Some(prompt),
        embedding: Some(embedding),
        max_tokens: Some(0),
        ..Request::default()
    }
}

/// The field `dimensions`, checked.
///
/// # Errors
/// 400 if it is 0.
pub fn dimensions(count: Option<u32>) -> Result<Option<u32>, ApiError> {
    if count == Some(0) {
        return Err(ApiError::value("dimensions", "dimensions: must be at least 1"));
    }
    Ok(count)
}

impl Protocol for Embeddings {
    const ID: &'static str = "embd-";

    fn schema(schemas: &mut Schemas) -> Value {
        let parts = [schemas.of::<Body>()];
        schemas.body(fields::EMBEDDINGS, &parts)
    }

    fn parse(fields: Map<String, Value>) -> Result<Parsed<Self>, ApiError> {
        fields::check(fields::EMBEDDINGS, &fields)?;
        let mut body: Body = json::typed_body(fields)?;
        Ok(Parsed { model: body.model.take(), stream: false, call: body.check() })
    }

    fn prompt_field(&self, index: usize) -> String {
        place_of("input", index, self.texts)
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> Value {
        let embedding = |values: &[f32]| match self.is_base64 {
            true => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                json!(BASE64_STANDARD.encode(bytes))
            }
            false => json!(values),
        };
        let one = |(index, reply): (usize, &Reply)| {
            let embedding = embedding(&reply.embedding);
            json!({"object": "embedding", "index": index, "embedding": embedding})
        };
        let data: Vec<Value> = replies.iter().enumerate().map(one).collect();
        let tokens = reply::usage(head, replies).prompt_tokens;
        json!({
            "object": "list",
            "data": data,
            "model": head.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        })
    }
}
