//! Shapes of replies, for `GET /openapi.json`.
//!
//! Protocols write their replies as JSON, so these types are read by nobody but the generator of schemas. Objects
//! of our own are closed: a field that a reply has and its schema lacks fails the tests, which compare every reply of
//! the HTTP tests with its schema.

#![expect(dead_code, reason = "only their schemas are used")]

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde_json::{Map, Value};

/// A chat completion.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ChatCompletion {
    /// Also the id of the request's trace.
    id: String,
    #[schemars(extend("const" = "chat.completion"))]
    object: String,
    /// Seconds since 1970.
    created: u64,
    model: String,
    /// Digest over weights, numeric format and the policies of the request.
    system_fingerprint: String,
    choices: Vec<ChatChoice>,
    usage: Usage,
    steersman: Option<Extension>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ChatChoice {
    index: u32,
    message: AssistantMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: FinishReason,
    /// With several choices only.
    #[schemars(skip_serializing_if = "Option::is_none")]
    steersman: Option<Extension>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct AssistantMessage {
    #[schemars(extend("const" = "assistant"))]
    role: String,
    /// Null if there are only calls.
    content: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<ToolCall>>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ToolCall {
    id: String,
    #[schemars(rename = "type", extend("const" = "function"))]
    kind: String,
    function: CalledFunction,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct CalledFunction {
    name: String,
    /// JSON in a string.
    arguments: String,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ChatLogprobs {
    content: Vec<TokenLogprobs>,
    refusal: Option<()>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct TokenLogprobs {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<TokenLogprob>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct TokenLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// Counts of tokens.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Usage {
    prompt_tokens: u32,
    /// Of reasoning and answer.
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokens,
    completion_tokens_details: CompletionTokens,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct PromptTokens {
    /// Restored from saved state instead of computed.
    cached_tokens: u32,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct CompletionTokens {
    reasoning_tokens: u32,
    /// Drafted tokens that were accepted.
    accepted_prediction_tokens: u32,
    rejected_prediction_tokens: u32,
    /// Tokens that the form left no choice about.
    forced_tokens: u32,
    /// Feed-forward blocks skipped in every pass.
    skipped_layers: u32,
}

/// What OpenAI's format has no place for.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Extension {
    /// The profile that steered the request.
    profile: String,
    /// What policies did and what was left out, in words.
    notes: Vec<String>,
    /// What policies tell the client: names and values.
    #[schemars(skip_serializing_if = "Option::is_none")]
    labels: Option<BTreeMap<String, String>>,
    /// Why a policy ended the request.
    #[schemars(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<String>,
    /// Calls of MCP tools that the server ran.
    #[schemars(skip_serializing_if = "Option::is_none")]
    tool_runs: Option<Vec<Map<String, Value>>>,
    /// Of a protocol whose own fields do not count it: tokens of the reasoning.
    #[schemars(skip_serializing_if = "Option::is_none")]
    reasoning_tokens: Option<u32>,
}

/// One event of a streamed chat completion.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ChatCompletionChunk {
    id: String,
    #[schemars(extend("const" = "chat.completion.chunk"))]
    object: String,
    created: u64,
    model: String,
    system_fingerprint: String,
    choices: Vec<ChunkChoice>,
    /// With `include_usage`: null until the last chunk.
    #[schemars(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    /// In the last chunk of a choice, and after a call of an MCP tool.
    #[schemars(skip_serializing_if = "Option::is_none")]
    steersman: Option<Map<String, Value>>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ChunkChoice {
    index: u32,
    delta: Delta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<FinishReason>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Delta {
    #[schemars(skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<CallPiece>>,
}

/// A piece of a call: the first has id and name.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct CallPiece {
    index: u32,
    #[schemars(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[schemars(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    function: FunctionPiece,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct FunctionPiece {
    #[schemars(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// A completion, or one event of a streamed one, which has no usage.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Completion {
    id: String,
    #[schemars(extend("const" = "text_completion"))]
    object: String,
    created: u64,
    model: String,
    system_fingerprint: String,
    choices: Vec<CompletionChoice>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    steersman: Option<Extension>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct CompletionChoice {
    index: u32,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<FinishReason>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    steersman: Option<Extension>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    text_offset: Vec<u64>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct EmbeddingList {
    #[schemars(extend("const" = "list"))]
    object: String,
    data: Vec<Embedding>,
    model: String,
    usage: PromptUsage,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Embedding {
    #[schemars(extend("const" = "embedding"))]
    object: String,
    index: u32,
    embedding: Vector,
}

#[derive(JsonSchema)]
#[schemars(untagged)]
enum Vector {
    Numbers(Vec<f32>),
    /// f32 values, little endian, in base64.
    Base64(String),
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct PromptUsage {
    prompt_tokens: u32,
    total_tokens: u32,
}

/// Documents by their similarity to the query, the best first.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Ranking {
    id: String,
    #[schemars(extend("const" = "list"))]
    object: String,
    model: String,
    results: Vec<Ranked>,
    usage: PromptUsage,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Ranked {
    /// Index in `documents`.
    index: u32,
    #[schemars(range(min = -1.0, max = 1.0))]
    relevance_score: f32,
    #[schemars(skip_serializing_if = "Option::is_none")]
    document: Option<RankedDocument>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct RankedDocument {
    text: String,
}

/// A response. It also has the fields of the request that OpenAI's repeat.
#[derive(JsonSchema)]
pub struct ResponseBody {
    id: String,
    #[schemars(extend("const" = "response"))]
    object: String,
    created_at: u64,
    status: ResponseStatus,
    error: Option<ResponseError>,
    incomplete_details: Option<Incomplete>,
    model: String,
    output: Vec<OutputItem>,
    usage: Option<ResponseUsage>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    steersman: Option<Extension>,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum ResponseStatus {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ResponseError {
    code: String,
    message: String,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Incomplete {
    reason: String,
}

/// Reasoning, a message, a call of a function, or a call of an MCP tool.
#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
enum OutputItem {
    Reasoning {
        id: String,
        status: String,
        summary: Vec<OutputPart>,
        content: Vec<OutputPart>,
    },
    Message {
        id: String,
        status: String,
        role: String,
        content: Vec<OutputPart>,
    },
    FunctionCall {
        id: String,
        status: String,
        call_id: String,
        name: String,
        arguments: String,
    },
    McpCall {
        id: String,
        status: String,
        server_label: String,
        name: String,
        arguments: Value,
        output: Option<String>,
        error: Option<String>,
        approval_request_id: Option<()>,
    },
}

#[derive(JsonSchema)]
struct OutputPart {
    #[schemars(rename = "type")]
    kind: String,
    text: String,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ResponseUsage {
    input_tokens: u32,
    input_tokens_details: PromptTokens,
    output_tokens: u32,
    output_tokens_details: ReasoningTokens,
    total_tokens: u32,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ReasoningTokens {
    reasoning_tokens: u32,
}

/// An event of a streamed response; more fields depend on its type.
#[derive(JsonSchema)]
pub struct ResponseEvent {
    #[schemars(rename = "type")]
    kind: String,
    sequence_number: u64,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct DeletedResponse {
    id: String,
    #[schemars(extend("const" = "response"))]
    object: String,
    deleted: bool,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct InputItems {
    #[schemars(extend("const" = "list"))]
    object: String,
    data: Vec<Map<String, Value>>,
    /// Null if there are no items.
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

/// A message of Anthropic's.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct MessageReply {
    id: String,
    #[schemars(rename = "type", extend("const" = "message"))]
    kind: String,
    #[schemars(extend("const" = "assistant"))]
    role: String,
    model: String,
    content: Vec<ContentBlock>,
    stop_reason: Option<StopReason>,
    stop_sequence: Option<String>,
    usage: MessageUsage,
    #[schemars(skip_serializing_if = "Option::is_none")]
    steersman: Option<Extension>,
}

#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
enum ContentBlock {
    Thinking { thinking: String, signature: String },
    Text { text: String },
    ToolUse { id: String, name: String, input: Map<String, Value> },
}

#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum StopReason {
    EndTurn,
    StopSequence,
    MaxTokens,
    ToolUse,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct MessageUsage {
    input_tokens: u32,
    cache_creation_input_tokens: u32,
    /// Restored from saved state.
    cache_read_input_tokens: u32,
    output_tokens: u32,
    output_tokens_details: ThinkingTokens,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ThinkingTokens {
    /// Those of `output_tokens` that are reasoning.
    thinking_tokens: u32,
}

/// An event of a streamed message; more fields depend on its type.
#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
pub enum MessageEvent {
    MessageStart { message: MessageReply },
    ContentBlockStart { index: u32, content_block: Map<String, Value> },
    ContentBlockDelta { index: u32, delta: Map<String, Value> },
    ContentBlockStop { index: u32 },
    MessageDelta { delta: Map<String, Value>, usage: MessageUsage, steersman: Extension },
    MessageStop {},
    Ping {},
    Error { error: Map<String, Value> },
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct InputTokens {
    input_tokens: u32,
}

/// The reply of `/api/chat`, or one line of it.
#[derive(JsonSchema)]
pub struct OllamaChat {
    message: OllamaMessage,
    #[schemars(flatten)]
    line: OllamaLine,
}

/// The reply of `/api/generate`, or one line of it.
#[derive(JsonSchema)]
pub struct OllamaGenerated {
    response: String,
    #[schemars(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    #[schemars(flatten)]
    line: OllamaLine,
}

#[derive(JsonSchema)]
struct OllamaLine {
    model: String,
    created_at: String,
    done: bool,
    #[schemars(skip_serializing_if = "Option::is_none")]
    done_reason: Option<OllamaReason>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<TokenLogprobs>>,
    /// Durations are in nanoseconds.
    #[schemars(skip_serializing_if = "Option::is_none")]
    total_duration: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    load_duration: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    prompt_eval_count: Option<u32>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    prompt_eval_duration: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    eval_count: Option<u32>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    eval_duration: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    steersman: Option<Extension>,
}

/// The reply of `/api/embed`.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OllamaEmbedded {
    model: String,
    /// Of length 1, one for each text.
    embeddings: Vec<Vec<f32>>,
    /// Durations are in nanoseconds.
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: u32,
    #[schemars(skip_serializing_if = "Option::is_none")]
    steersman: Option<Extension>,
}

/// The reply of `/api/embeddings`.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OllamaEmbedding {
    /// Of length 1; empty without a text.
    embedding: Vec<f32>,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum OllamaReason {
    Stop,
    Length,
    Load,
    Unload,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct OllamaMessage {
    #[schemars(extend("const" = "assistant"))]
    role: String,
    content: String,
    #[schemars(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<OllamaCall>>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct OllamaCall {
    id: String,
    function: OllamaFunction,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct OllamaFunction {
    index: u32,
    name: String,
    arguments: Map<String, Value>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OllamaModels {
    models: Vec<OllamaModel>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct OllamaModel {
    name: String,
    model: String,
    modified_at: String,
    /// Bytes.
    size: u64,
    digest: String,
    details: OllamaDetails,
    #[schemars(skip_serializing_if = "Option::is_none")]
    size_vram: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct OllamaDetails {
    parent_model: String,
    format: String,
    family: String,
    families: Vec<String>,
    parameter_size: String,
    quantization_level: String,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OllamaShown {
    modelfile: String,
    parameters: String,
    template: String,
    details: OllamaDetails,
    model_info: Map<String, Value>,
    capabilities: Vec<String>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OllamaVersion {
    version: String,
}

/// How far a download is.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OllamaPulled {
    status: String,
    #[schemars(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    completed: Option<u64>,
}

/// The download that was stopped.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct StoppedPull {
    model: String,
    stopped: bool,
}

/// How far a download is; more fields depend on the status.
#[derive(JsonSchema)]
pub struct Pulled {
    status: PullStatus,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum PullStatus {
    Downloading,
    Success,
    Failed,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Tokenized {
    count: u64,
    max_model_len: u64,
    tokens: Vec<u32>,
    /// With `return_token_strs`.
    #[schemars(skip_serializing_if = "Option::is_none")]
    token_strs: Option<Vec<String>>,
}

/// A text, under two names.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Detokenized {
    prompt: String,
    content: String,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Rendered {
    prompt: String,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ModelList {
    #[schemars(extend("const" = "list"))]
    object: String,
    data: Vec<ListedModel>,
}

/// A model, a model with a profile, or an alias.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ListedModel {
    id: String,
    #[schemars(extend("const" = "model"))]
    object: String,
    /// Seconds since 1970 when it was loaded; 0 while it is not.
    created: u64,
    owned_by: String,
    family: Option<String>,
    /// Tokens.
    context: Option<u64>,
    state: ModelState,
    /// Bytes of the files.
    size: Option<u64>,
    parameters: Option<u64>,
    quantization: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    alias_of: Option<String>,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum ModelState {
    Loaded,
    Loading,
    Unloading,
    #[schemars(rename = "on disk")]
    OnDisk,
    Missing,
}

/// Decisions that policies made in one request; records are lines of golden files.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Trace {
    request: String,
    records: Vec<Map<String, Value>>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    tool_runs: Option<Vec<Map<String, Value>>>,
}

/// Profiles that a key opens.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ProfileList {
    access: Access,
    profiles: Vec<ListedProfile>,
}

/// What a key may do.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct Access {
    #[schemars(extend("enum" = ["operator", "server", "profile", "none"]))]
    key: String,
    /// The profile of a key for one.
    profile: Option<String>,
    /// Whether there are keys of operators.
    operators: bool,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ListedProfile {
    name: String,
    /// The model that serves it.
    model: Option<String>,
    policies: Vec<String>,
    shadow: Vec<String>,
    on_failure: String,
    grants: Value,
    /// Parameters of its policies, for operators.
    params: Option<Map<String, Value>>,
    trace_text: bool,
    has_keys: bool,
    mcp: Value,
    policy_headers: Vec<String>,
    /// Models and profiles to which its policies may route requests.
    routes: Vec<String>,
    limits: Map<String, Value>,
    /// Null if the profile sets nothing.
    sampling: Option<Map<String, Value>>,
}

/// Requests that run, and the newest ones that have ended.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct RequestList {
    requests: Vec<ListedRequest>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ListedRequest {
    number: u64,
    /// For operators: it opens the trace.
    id: Option<String>,
    route: String,
    profile: Option<String>,
    model: Option<String>,
    stream: Option<bool>,
    choices: u64,
    /// Seconds since 1970.
    arrived: u64,
    phase: String,
    elapsed_ms: u64,
    /// Milliseconds until the first piece of the reply.
    first_piece_ms: Option<u64>,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    prefilled_tokens: Option<u64>,
    reply_tokens: u64,
    /// Limit on all tokens of the reply.
    max_tokens: Option<u64>,
    /// Limit on answer and tool calls, if they are limited apart from the reasoning.
    max_answer_tokens: Option<u64>,
    notes: u64,
    tokens_per_second: Option<f64>,
    /// This and the following: of a request that has ended.
    #[schemars(skip_serializing_if = "Option::is_none")]
    reasoning_tokens: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    answer_tokens: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    drafted_tokens: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    accepted_tokens: Option<u64>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    #[schemars(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Answers of a policy that runs as a shadow, beside those that were applied.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Shadow {
    name: String,
    /// Requests in memory that had this shadow.
    requests: u64,
    /// Its calls with an answer.
    calls: u64,
    failures: u64,
    /// Its answers that no applied policy gave.
    differing: u64,
    /// The newest of these, newest first.
    differences: Vec<ShadowDifference>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ShadowDifference {
    shadow: Map<String, Value>,
    applied: Vec<Map<String, Value>>,
}

/// What the server does.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Health {
    #[schemars(extend("const" = "ok"))]
    status: String,
    /// The first model.
    model: String,
    waiting: u64,
    engines: Vec<EngineHealth>,
    models: Vec<ModelHealth>,
    /// Policies of profiles that fail in every request, since no version of them is active.
    inactive_policies: Vec<InactivePolicy>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct InactivePolicy {
    policy: String,
    /// Whether the server compiles it again by itself.
    retries: bool,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct EngineHealth {
    model: String,
    running: u64,
    awaiting_policy: u64,
    awaiting_prefix: u64,
    waiting: u64,
    /// Seconds since the oldest preparation of a request began that has not ended; 0 if there is none.
    preparing_s: f64,
    preempted: u64,
    rows_per_pass: f64,
    tokens_per_second: f64,
    preemptions: u64,
    stalls: u64,
    /// Bytes of arrays by account.
    bytes: BTreeMap<String, u64>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ModelHealth {
    model: String,
    state: ModelState,
    requests: u64,
    /// Seconds until it is unloaded unless it is used.
    expires_s: Option<u64>,
    loads: u64,
    unloads: u64,
}

/// An error in OpenAI's format.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Error {
    error: ErrorBody,
    /// That of the reply's header `x-request-id`.
    #[schemars(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct ErrorBody {
    message: String,
    #[schemars(rename = "type")]
    kind: String,
    /// Path of the field, such as `messages[1].content`.
    param: Option<String>,
    /// Identifies the error for programs.
    code: String,
}

/// An error in Anthropic's format.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct AnthropicError {
    #[schemars(rename = "type", extend("const" = "error"))]
    kind: String,
    error: AnthropicErrorBody,
    /// That of the reply's header `x-request-id`.
    #[schemars(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
}

#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
struct AnthropicErrorBody {
    #[schemars(rename = "type")]
    kind: String,
    message: String,
    param: Option<String>,
    code: String,
    #[schemars(skip_serializing_if = "Option::is_none")]
    details: Option<Map<String, Value>>,
}

/// An error in Ollama's format.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OllamaError {
    error: String,
    /// That of the reply's header `x-request-id`.
    #[schemars(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
}
