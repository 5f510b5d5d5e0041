//! Shapes of fields that protocols parse by hand, for the schemas of their bodies.

#![expect(dead_code, reason = "only their schemas are used")]

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value};
use steersman_engine::request::Effort;

/// [`Effort`], whose type is the engine's.
pub struct EffortWord;

impl JsonSchema for EffortWord {
    fn schema_name() -> Cow<'static, str> {
        "Effort".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let words = Effort::ALL.map(Effort::word);
        json_schema!({"description": "Levels of reasoning.", "type": "string", "enum": words})
    }
}

/// One text, or several.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum Texts {
    One(String),
    Several(Vec<String>),
}

/// A text, ids of tokens, or a list of these.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum Prompts {
    Text(String),
    Tokens(Vec<u32>),
    Several(Vec<PromptOf>),
}

/// A text, or ids of tokens.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum PromptOf {
    Text(String),
    Tokens(Vec<u32>),
}

/// A text, or parts of one, which are joined.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum Content {
    Text(String),
    Parts(Vec<TextPart>),
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct TextPart {
    #[schemars(rename = "type", extend("const" = "text"))]
    kind: String,
    text: String,
    cache_control: Option<Value>,
}

/// A text, or a list of an open set of objects with a `type`.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum TextOrItems {
    Text(String),
    Items(Vec<Map<String, Value>>),
}

/// A function that the model may call. Tools of other types are left out, with a note.
#[derive(JsonSchema)]
pub struct Tool {
    #[schemars(rename = "type")]
    kind: String,
    function: Option<Function>,
}

#[derive(JsonSchema)]
pub struct Function {
    #[schemars(length(min = 1))]
    name: String,
    description: Option<String>,
    /// A JSON schema.
    parameters: Option<Value>,
    /// Whether calls follow the schema.
    strict: Option<bool>,
}

/// Whether to report probabilities, or of how many likeliest tokens.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum Logprobs {
    Flag(bool),
    Count(#[schemars(range(min = -1, max = 20))] i64),
}

/// From ids of tokens to what is added to their logits, -100 to 100.
pub type Biases = BTreeMap<String, f32>;

/// A text, or an object with nothing but a `text`.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum Document {
    Text(String),
    Object(DocumentText),
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct DocumentText {
    text: String,
}

/// A string that names JSON, or a schema.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum Format {
    Name(String),
    Schema(Map<String, Value>),
}

/// vLLM's object of one form.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct StructuredOutputs {
    /// A JSON schema, or one in a string.
    json: Option<Value>,
    /// Whether the answer is a JSON object.
    json_object: Option<bool>,
    /// A regular expression that the whole answer matches.
    regex: Option<String>,
    /// The answer is one of these texts.
    choice: Option<Vec<String>>,
    /// A grammar in llguidance's dialect of Lark, or in GBNF.
    grammar: Option<String>,
}

/// The fields that fix the form of a reply, and those about tools.
#[derive(JsonSchema)]
pub struct Structure {
    /// `{"type": "json_object"}`, or of type `json_schema`, `regex`, `grammar` or `text`.
    response_format: Option<Map<String, Value>>,
    structured_outputs: Option<StructuredOutputs>,
    /// A JSON schema, or one in a string.
    guided_json: Option<Value>,
    /// A regular expression that the whole answer matches.
    guided_regex: Option<String>,
    /// The answer is one of these texts.
    guided_choice: Option<Vec<String>>,
    /// A grammar in llguidance's dialect of Lark, or in GBNF.
    guided_grammar: Option<String>,
    /// A JSON schema, or one in a string.
    json_schema: Option<Value>,
    /// As `guided_grammar`.
    grammar: Option<String>,
    /// `"auto"`, `"none"`, `"required"`, a function, or `allowed_tools`.
    tool_choice: Option<Value>,
    /// False ends the reply after its first call.
    parallel_tool_calls: Option<bool>,
}

/// A text to tokenize, or a chat.
#[derive(JsonSchema)]
pub struct Tokenize {
    model: Option<String>,
    /// A text, in which special tokens are parsed.
    prompt: Option<String>,
    /// The same.
    content: Option<String>,
    /// Messages of a chat, instead; other fields of chats may stand beside.
    messages: Option<Vec<Map<String, Value>>>,
    /// Adds the text of each token.
    return_token_strs: Option<bool>,
    /// The same.
    with_pieces: Option<bool>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Detokenize {
    model: Option<String>,
    tokens: Vec<u32>,
}

/// The name of a model, under one of two names.
#[derive(JsonSchema)]
pub struct Show {
    model: Option<String>,
    name: Option<String>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Pull {
    /// A repo of the hub (`owner/name`, for GGUF files `owner/name:QUANTIZATION`), or a short name.
    model: String,
    /// False for one object at the end; only with `/api/pull`.
    stream: Option<bool>,
    insecure: Option<bool>,
}

/// A model in the cache of the server's machine.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ServeModel {
    /// As for a download.
    model: String,
}

/// The token of the link that the server printed.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OpenSession {
    token: String,
}

/// A new key. Without profile and operator it opens every client route and every profile.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct CreateKey {
    /// 1 to 64 letters, digits, and - _ . @
    name: String,
    /// The key opens this profile only.
    profile: Option<String>,
    /// The key opens everything.
    operator: Option<bool>,
    /// A lifetime such as `12h` or `30d`; without it, the key does not expire.
    expires: Option<String>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct RevokeKey {
    /// True revokes the last key of an operator, too.
    last: Option<bool>,
}

/// A duration, or seconds.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum KeepAliveBody {
    Duration(String),
    Seconds(f64),
}
