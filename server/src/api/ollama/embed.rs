//! Ollama's embeddings: `POST /api/embed`, and `POST /api/embeddings` of its older clients. The vectors are those of
//! `POST /v1/embeddings`.

use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};
use steersman_engine::request::{Embedding, Finished, RawPrompt};

use super::reply::{EmbedReply, Embedded, OneEmbedding};
use super::request::{check_options, keep_alive, options_schema};
use crate::api::completions::place_of;
use crate::api::embeddings::{self, TEXTS, numbers};
use crate::api::error::ApiError;
use crate::api::extension::Extension;
use crate::api::protocol::{Call, Parsed, Protocol};
use crate::api::reply::{Head, Reply, usage};
use crate::api::schema::Schemas;
use crate::api::schema::shapes::{KeepAliveBody, Texts};
use crate::api::{fields, json};

/// The state of one response: of `/api/embed` if `MANY`, else of `/api/embeddings`.
#[derive(Debug)]
pub struct Embed<const MANY: bool> {
    /// Number of texts.
    texts: usize,
    /// See [`Protocol::keeps_model`].
    keep_alive: Option<Option<Duration>>,
}

/// The fields of both bodies that have an effect.
#[derive(Deserialize, JsonSchema)]
struct Body {
    model: Option<String>,
    /// One text, or several; without one, the model is loaded.
    #[schemars(with = "Option<Texts>")]
    input: Option<Value>,
    /// The text; without one, the model is loaded.
    prompt: Option<String>,
    /// Whether a text that is too long is cut, with a note, instead of refused; true unless set.
    truncate: Option<bool>,
    /// Keeps the first ones.
    #[schemars(range(min = 1))]
    dimensions: Option<u32>,
    /// Checked; an embedding does not depend on them.
    options: Option<Map<String, Value>>,
    #[schemars(with = "Option<KeepAliveBody>")]
    keep_alive: Option<Value>,
}

impl Body {
    fn check<const MANY: bool>(self) -> Result<Call<Embed<MANY>>, ApiError> {
        let keep_alive = keep_alive(self.keep_alive.unwrap_or_default())?;
        check_options(self.options.unwrap_or_default())?;
        let embedding = Embedding {
            dimensions: embeddings::dimensions(self.dimensions)?,
            truncates: self.truncate.unwrap_or(true),
        };
        let texts = match self.input.unwrap_or_default() {
            // An empty text asks for no embedding.
            Value::Null => self.prompt.into_iter().filter(|text| !text.is_empty()).collect(),
            Value::String(text) if text.is_empty() => Vec::new(),
            Value::String(text) => vec![text],
            list @ Value::Array(_) => json::typed::<Vec<String>>("input", &list)?,
            _ => {
                let message = "input: must be a string or a list of strings";
                return Err(ApiError::invalid("invalid_type", "input", message));
            }
        };
        if texts.len() > TEXTS {
            let message = format!("input: {} texts, at most {TEXTS}", texts.len());
            return Err(ApiError::value("input", message));
        }
        let protocol = Embed { texts: texts.len(), keep_alive };
        let request = |text| embeddings::request(RawPrompt::Text(text), embedding);
        Ok(Call::of_texts(protocol, texts.into_iter().map(request).collect()))
    }
}

impl<const MANY: bool> Embed<MANY> {
    const FIELDS: &'static [fields::Field] =
        if MANY { fields::OLLAMA_EMBED } else { fields::OLLAMA_EMBEDDINGS };
}

impl<const MANY: bool> Protocol for Embed<MANY> {
    type Whole = EmbedReply;

    const ID: &'static str = "ollama-";

    const OPERATION: &'static str = "embeddings";
    // As for the other routes of Ollama.
    const CONTENT_TYPE: Option<&'static str> = None;

    fn schema(schemas: &mut Schemas) -> Value {
        let parts = [schemas.of::<Body>()];
        let options = options_schema(schemas);
        let mut body = schemas.body(Self::FIELDS, &parts);
        body["properties"]["options"] = options;
        body
    }

    fn parse(fields: Map<String, Value>) -> Result<Parsed<Self>, ApiError> {
        fields::check(Self::FIELDS, &fields)?;
        let mut body: Body = json::typed_body(fields)?;
        Ok(Parsed { model: body.model.take(), stream: false, call: body.check() })
    }

    fn prompt_field(&self, index: usize) -> String {
        if MANY { place_of("input", index, self.texts) } else { "prompt".into() }
    }

    fn keeps_model(&self) -> Option<Option<Duration>> {
        self.keep_alive
    }

    fn whole(&mut self, head: &Head, replies: &[Reply]) -> EmbedReply {
        let mut vectors = replies.iter().map(|reply| numbers(&reply.embedding));
        if !MANY {
            let embedding = vectors.next().unwrap_or_default();
            return EmbedReply::One(OneEmbedding { embedding });
        }
        let steersman = replies.first().map(|first| {
            let notes = replies.iter().enumerate().flat_map(|(index, reply)| {
                let place = self.prompt_field(index);
                reply.finished.notes.iter().map(move |note| format!("{place}: {note}"))
            });
            let finished = Finished { notes: notes.collect(), ..first.finished.clone() };
            Extension::new(head, &finished)
        });
        EmbedReply::Many(Box::new(Embedded {
            model: head.model.clone(),
            embeddings: vectors.collect(),
            total_duration: head.times.ended,
            load_duration: head.times.started,
            prompt_eval_count: usage(head, replies).prompt_tokens,
            steersman,
        }))
    }
}
