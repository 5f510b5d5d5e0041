//! OpenAI's embeddings: `POST /v1/embeddings`.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use steersman_engine::request::{Embedding, RawPrompt, Request};

use super::completions::{place_of, prompts};
use super::error::ApiError;
use super::protocol::{Call, Parsed, Protocol};
use super::reply::{self, Head, Reply};
use super::schema::Schemas;
use super::schema::shapes::Prompts;
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

/// The embeddings of the texts of a body.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct EmbeddingList {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    data: Vec<OneEmbedding>,
    model: String,
    usage: PromptUsage,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields, rename = "Embedding")]
struct OneEmbedding {
    #[schemars(extend("const" = "embedding"))]
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
enum Vector {
    Numbers(Vec<f64>),
    /// f32 values, little endian, in base64.
    Base64(String),
}

/// Counts of tokens of texts that are only read.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct PromptUsage {
    prompt_tokens: u32,
    total_tokens: u32,
}

impl PromptUsage {
    /// The tokens of the texts of `replies`.
    pub fn new(head: &Head, replies: &[Reply]) -> Self {
        let tokens = reply::usage(head, replies).prompt_tokens;
        Self { prompt_tokens: tokens, total_tokens: tokens }
    }
}

/// The numbers of an embedding, which JSON has with the digits of an `f64`.
pub fn numbers(embedding: &[f32]) -> Vec<f64> {
    embedding.iter().copied().map(f64::from).collect()
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
    type Whole = EmbeddingList;

    const ID: &'static str = "embd-";

    const OPERATION: &'static str = "embeddings";

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

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> EmbeddingList {
        let embedding = |values: &[f32]| match self.is_base64 {
            true => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                Vector::Base64(BASE64_STANDARD.encode(bytes))
            }
            false => Vector::Numbers(numbers(values)),
        };
        let one = |(index, reply): (usize, &Reply)| {
            let embedding = embedding(&reply.embedding);
            OneEmbedding { object: "embedding", index, embedding }
        };
        EmbeddingList {
            object: "list",
            data: replies.iter().enumerate().map(one).collect(),
            model: head.model.clone(),
            usage: PromptUsage::new(head, replies),
        }
    }
}
