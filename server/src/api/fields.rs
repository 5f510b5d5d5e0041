//! The tables of all fields of all protocols.
//!
//! A field that is not supported is rejected by name, never ignored, so a reply always honours the
//! whole request. Neutral values are accepted, since many clients always send them.

use serde_json::{Map, Value};

use super::error::ApiError;

/// How a field is handled.
pub enum Rule {
    /// Handled by the protocol.
    Read,
    /// Accepted and ignored: it does not affect the reply.
    Ignored,
    /// Not supported, except for null and these neutral values (a JSON list), which mean the same as
    /// no field.
    Only(&'static str, Advice),
}

/// A field and its rule.
pub type Field = (&'static str, Rule);

/// What the client can do instead.
type Advice = &'static str;

use Rule::{Ignored, Only, Read};

/// The fields of the body of `POST /v1/chat/completions`.
pub const FIELDS: &[Field] = &[
    ("model", Read),
    ("messages", Read),
    ("stream", Read),
    ("stream_options", Read),
    ("max_tokens", Read),
    ("max_completion_tokens", Read),
    ("temperature", Read),
    ("top_p", Read),
    ("top_k", Read),
    ("min_p", Read),
    ("seed", Read),
    ("stop", Read),
    ("tools", Read),
    // Read by `super::structure`.
    ("tool_choice", Read),
    ("parallel_tool_calls", Read),
    ("response_format", Read),
    ("structured_outputs", Read),
    ("guided_json", Read),
    ("guided_regex", Read),
    ("guided_choice", Read),
    ("guided_grammar", Read),
    ("json_schema", Read),
    ("grammar", Read),
    // Read by `super::probability`.
    ("logit_bias", Read),
    ("presence_penalty", Read),
    ("frequency_penalty", Read),
    ("repetition_penalty", Read),
    ("repetition_context_size", Read),
    ("min_tokens", Read),
    ("ignore_eos", Read),
    ("logprobs", Read),
    ("top_logprobs", Read),
    ("chat_template_kwargs", Read),
    ("reasoning_effort", Read),
    ("max_thinking_tokens", Read),
    // Fields of vLLM.
    ("continue_final_message", Read),
    ("add_generation_prompt", Read),
    // Labels for the operator of a service, and for policies.
    ("user", Ignored),
    ("metadata", Ignored),
    ("safety_identifier", Ignored),
    // Prefixes are found by their tokens and need no key.
    ("prompt_cache_key", Ignored),
    ("prompt_cache_options", Ignored),
    ("prompt_cache_retention", Ignored),
    // Chats are not listed anywhere, whether stored or not.
    ("store", Ignored),
    // All requests wait in one queue.
    ("service_tier", Ignored),
    // A wish that no model here was trained to follow.
    ("verbosity", Ignored),
    ("functions", Only("[]", "send them as `tools`")),
    ("function_call", Only("[]", "send `tools` and `tool_choice`")),
    ("n", Read),
    ("best_of", Read),
    ("modalities", Only(r#"[["text"]]"#, "only text is supported")),
    ("audio", Only("[]", "only text is supported")),
    ("prediction", Only("[]", "leave it out: it affects only the speed")),
    ("web_search_options", Only("[]", "provide a search tool")),
    ("moderation", Only("[]", "check texts in the client")),
];

/// The fields of the bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`.
pub const MESSAGES: &[Field] = &[
    ("model", Read),
    ("messages", Read),
    ("system", Read),
    ("max_tokens", Read),
    ("stream", Read),
    ("temperature", Read),
    ("top_p", Read),
    ("top_k", Read),
    ("stop_sequences", Read),
    ("tools", Read),
    ("tool_choice", Read),
    ("thinking", Read),
    ("output_config", Read),
    // Labels for the operator of a service, and for policies.
    ("metadata", Ignored),
    ("service_tier", Ignored),
    ("inference_geo", Ignored),
    ("cache_control", Read),
    // Nobody is billed.
    ("billing_policy", Ignored),
    // No request is declined, so there is nothing to fall back from.
    ("fallbacks", Ignored),
    // Asks why saved state was not found: the usage says how much was.
    ("diagnostics", Ignored),
    // The conversation is not edited: the client sends what the model reads.
    ("context_management", Ignored),
    ("speed", Only(r#"["standard"]"#, "there is one speed")),
    ("container", Only("[]", "nothing runs on this server but the model")),
    ("mcp_servers", Only("[[]]", "run the tools in the client")),
    ("compaction", Only("[]", "ask the model for a summary")),
    ("thread", Only("[]", "send all messages")),
    ("fallback_credit_token", Only("[]", "no request is declined here; leave it out")),
];

/// The fields of the body of `POST /v1/responses`.
pub const RESPONSES: &[Field] = &[
    ("model", Read),
    ("input", Read),
    ("instructions", Read),
    ("max_output_tokens", Read),
    ("stream", Read),
    ("temperature", Read),
    ("top_p", Read),
    ("tools", Read),
    ("tool_choice", Read),
    ("parallel_tool_calls", Read),
    ("reasoning", Read),
    ("text", Read),
    ("previous_response_id", Read),
    ("store", Read),
    // Probabilities of the text. Reasoning is sent in full, never encrypted.
    ("include", Read),
    ("top_logprobs", Read),
    // Labels for the operator of a service; a response repeats them.
    ("metadata", Ignored),
    ("user", Ignored),
    ("safety_identifier", Ignored),
    ("client_metadata", Ignored),
    // Prefixes are found by their tokens and need no key.
    ("prompt_cache_key", Ignored),
    ("prompt_cache_options", Ignored),
    ("prompt_cache_retention", Ignored),
    // All requests wait in one queue.
    ("service_tier", Ignored),
    ("stream_options", Ignored),
    // Limits the calls of tools that run at OpenAI.
    ("max_tool_calls", Ignored),
    ("truncation", Only(r#"["disabled"]"#, "send a shorter input")),
    ("background", Only("[false]", "wait for the reply, or stream it")),
    ("conversation", Only("[]", "send previous_response_id or the whole input")),
    ("context_management", Only("[[]]", "send a shorter input")),
    ("access_programs", Only("[]", "there are none here")),
    ("background_options", Only("[]", "wait for the reply, or stream it")),
    ("image", Only("[]", "only text is supported")),
    ("moderation", Only("[]", "check texts in the client")),
    ("prompt", Only("[]", "send the prompt as instructions and input")),
];

/// The fields of the body of `POST /v1/completions`.
pub const COMPLETIONS: &[Field] = &[
    ("model", Read),
    ("prompt", Read),
    ("stream", Read),
    ("stream_options", Read),
    ("max_tokens", Read),
    ("temperature", Read),
    ("top_p", Read),
    ("top_k", Read),
    ("min_p", Read),
    ("seed", Read),
    ("stop", Read),
    ("echo", Read),
    ("user", Ignored),
    ("suffix", Read),
    ("n", Read),
    ("best_of", Read),
    // Read by `super::probability`.
    ("logit_bias", Read),
    ("presence_penalty", Read),
    ("frequency_penalty", Read),
    ("repetition_penalty", Read),
    ("repetition_context_size", Read),
    ("min_tokens", Read),
    ("ignore_eos", Read),
    ("logprobs", Read),
];

/// The fields of the body of `POST /v1/embeddings`.
pub const EMBEDDINGS: &[Field] = &[
    ("model", Read),
    ("input", Read),
    ("dimensions", Read),
    ("encoding_format", Read),
    // A label for the operator of a service.
    ("user", Ignored),
];

/// The fields of the body of `POST /v1/rerank`.
pub const RERANK: &[Field] = &[
    ("model", Read),
    ("query", Read),
    ("documents", Read),
    ("top_n", Read),
    ("return_documents", Read),
    // A label for the operator of a service.
    ("user", Ignored),
    ("max_tokens_per_doc", Only("[]", "send shorter documents")),
    ("max_chunks_per_doc", Only("[]", "send shorter documents")),
    ("rank_fields", Only(r#"[["text"]]"#, "send the text to rank by")),
];

/// The fields of the body of `POST /api/chat`.
pub const OLLAMA_CHAT: &[Field] = &[
    ("model", Read),
    ("messages", Read),
    ("tools", Read),
    ("think", Read),
    ("stream", Read),
    ("options", Read),
    ("keep_alive", Read),
    ("format", Read),
    ("logprobs", Read),
    ("top_logprobs", Read),
];

/// The fields of the body of `POST /api/generate`.
pub const OLLAMA_GENERATE: &[Field] = &[
    ("model", Read),
    ("prompt", Read),
    ("system", Read),
    ("raw", Read),
    ("think", Read),
    ("stream", Read),
    ("options", Read),
    ("keep_alive", Read),
    ("format", Read),
    ("suffix", Read),
    ("template", Only(r#"[""]"#, "send the prompt rendered, and set `raw`")),
    ("images", Only("[[]]", "only text is supported")),
    ("width", Only("[0]", "only text is supported")),
    ("height", Only("[0]", "only text is supported")),
    ("steps", Only("[0]", "only text is supported")),
    ("context", Only("[[]]", "use /api/chat with all messages")),
    ("logprobs", Read),
    ("top_logprobs", Read),
];

/// The fields of the body of `POST /api/embed`.
pub const OLLAMA_EMBED: &[Field] = &[
    ("model", Read),
    ("input", Read),
    ("truncate", Read),
    ("dimensions", Read),
    ("options", Read),
    ("keep_alive", Read),
];

/// The fields of the body of `POST /api/embeddings`.
pub const OLLAMA_EMBEDDINGS: &[Field] =
    &[("model", Read), ("prompt", Read), ("options", Read), ("keep_alive", Read)];

/// The fields of `options` in Ollama's bodies.
pub const OLLAMA_OPTIONS: &[Field] = &[
    ("temperature", Read),
    ("top_p", Read),
    ("top_k", Read),
    ("min_p", Read),
    ("seed", Read),
    ("stop", Read),
    ("num_predict", Read),
    ("repeat_penalty", Read),
    ("repeat_last_n", Read),
    ("presence_penalty", Read),
    ("frequency_penalty", Read),
    // How a model is loaded; here the configuration says.
    ("num_ctx", Ignored),
    ("num_batch", Ignored),
    ("num_gpu", Ignored),
    ("main_gpu", Ignored),
    ("num_thread", Ignored),
    ("num_keep", Ignored),
    ("use_mmap", Ignored),
    ("use_mlock", Ignored),
    ("low_vram", Ignored),
    ("numa", Ignored),
    ("f16_kv", Ignored),
    ("logits_all", Ignored),
    ("vocab_only", Ignored),
    ("embedding_only", Ignored),
    ("typical_p", Only("[1]", "use top_p or min_p")),
    ("tfs_z", Only("[1]", "use top_p or min_p")),
    ("mirostat", Only("[0]", "use temperature, top_p or min_p")),
    ("mirostat_tau", Ignored),
    ("mirostat_eta", Ignored),
    ("penalize_newline", Ignored),
];

/// The tables of all protocols.
#[cfg(test)]
const TABLES: &[&[Field]] = &[
    FIELDS,
    MESSAGES,
    RESPONSES,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_OPTIONS,
];

/// Most further unknown fields that an error names.
const UNKNOWN_NAMED: usize = 8;

/// Whether the protocol reads the field `name`.
pub fn is_read(fields: &[Field], name: &str) -> bool {
    fields.iter().any(|(known, rule)| *known == name && matches!(rule, Read))
}

/// Takes the fields `names` out of a body.
pub fn take(body: &mut Map<String, Value>, names: &[&str]) -> Map<String, Value> {
    names.iter().filter_map(|name| body.shift_remove_entry(*name)).collect()
}

/// Rejects unknown fields, unless they are null, and unsupported ones.
///
/// # Errors
/// 400 naming the first such field and what to do instead, and further unknown ones.
pub fn check(fields: &[Field], body: &Map<String, Value>) -> Result<(), ApiError> {
    let is_known = |name: &str| fields.iter().any(|(known, _)| *known == name);
    for (name, value) in body {
        let Some((_, rule)) = fields.iter().find(|(known, _)| known == name) else {
            if value.is_null() {
                continue;
            }
            let known = fields.iter().map(|(known, _)| *known);
            // Ollama's routes have them below.
            if is_known("options") && OLLAMA_OPTIONS.iter().any(|(option, _)| option == name) {
                let message =
                    format!("`{name}` is an unknown field here: it belongs into `options`");
                return Err(ApiError::invalid("unknown_parameter", name, message));
            }
            let error = ApiError::unknown_field(name, known.clone());
            let is_other = |other: &&String| *other != name && !is_known(other);
            let others = body.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name);
            return Err(error.and_unknown(others.filter(is_other).take(UNKNOWN_NAMED), known));
        };
        if let Only(neutral, advice) = rule
            && !is_neutral(value, neutral)
        {
            let neutral = &neutral[1..neutral.len() - 1];
            let message = match neutral {
                "" => format!("`{name}` is not supported yet: {advice}"),
                _ => format!("`{name}` is not supported yet, except for {neutral}: {advice}"),
            };
            return Err(ApiError::unsupported(name, message));
        }
    }
    Ok(())
}

/// The values of a [`Rule::Only`].
pub fn neutral_values(neutral: &str) -> Vec<Value> {
    serde_json::from_str(neutral).expect("the table contains JSON lists: checked by a test")
}

/// Whether `value` is null or one of `neutral`; numbers are compared by value (0 equals 0.0).
fn is_neutral(value: &Value, neutral: &str) -> bool {
    let neutral = neutral_values(neutral);
    let equal = |other: &Value| match (value.as_f64(), other.as_f64()) {
        (Some(value), Some(other)) => value == other,
        _ => value == other,
    };
    value.is_null() || neutral.iter().any(equal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_neutral_value_in_the_table_is_accepted() {
        for table in TABLES {
            for (name, rule) in *table {
                let Only(neutral, _) = rule else { continue };
                let values: Vec<Value> = serde_json::from_str(neutral).unwrap();
                for value in values.into_iter().chain([Value::Null]) {
                    let body = Map::from_iter([(name.to_string(), value)]);
                    assert_eq!(check(table, &body), Ok(()), "{body:?}");
                }
                let body = Map::from_iter([(name.to_string(), "an unsupported value".into())]);
                assert_eq!(check(table, &body).unwrap_err().param.as_deref(), Some(*name));
            }
        }
    }

    #[test]
    fn numbers_are_compared_by_value() {
        assert!(is_neutral(&0.0.into(), "[0]"));
        assert!(is_neutral(&1.into(), "[1]"));
        assert!(!is_neutral(&0.1.into(), "[0]"));
    }
}
