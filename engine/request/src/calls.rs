//! What policies see of tool calls: each with the calls before it, by digests.

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::policy::{ARGUMENT_BYTES, EARLIER_CALLS, EarlierCall, ToolCallView};
use crate::{Message, ToolCall};

/// The policy's view of `call`, with the earlier calls in `messages`, those `sent` in this reply,
/// and those `accepted` together with it.
pub fn view(
    call: &ToolCall,
    messages: &[Message],
    sent: &[ToolCall],
    accepted: &[ToolCall],
) -> ToolCallView {
    let arguments = call.function.arguments.to_json();
    let mut earlier = conversation(messages);
    earlier.extend(sent.iter().chain(accepted).map(|call| (call, None)));
    let older = earlier.len().saturating_sub(EARLIER_CALLS);
    let earlier_call = |(call, result): &(&ToolCall, Option<&str>)| EarlierCall {
        name: call.function.name.clone(),
        arguments: digest(&canonical(&call.function.arguments)),
        answered: result.map(digest),
    };
    ToolCallView {
        name: call.function.name.clone(),
        digest: digest(&canonical(&call.function.arguments)),
        arguments: arguments[..arguments.floor_char_boundary(ARGUMENT_BYTES)].to_string(),
        index: (sent.len() + accepted.len()) as u32,
        earlier: earlier[older..].iter().map(earlier_call).collect(),
    }
}

/// The calls of a conversation, oldest first, with their results. A result without a call id
/// belongs to the oldest call that has none yet.
fn conversation(messages: &[Message]) -> Vec<(&ToolCall, Option<&str>)> {
    let mut calls: Vec<(&ToolCall, Option<&str>)> = Vec::new();
    for message in messages {
        calls.extend(message.tool_calls.iter().map(|call| (call, None)));
        if message.role != "tool" {
            continue;
        }
        let open = |(_, result): &(&ToolCall, Option<&str>)| result.is_none();
        let id = message.tool_call_id.as_deref().filter(|id| !id.is_empty());
        let index = match id {
            // Ids may repeat in a long conversation; the newest call matches.
            Some(id) => calls.iter().rposition(|one| one.0.id == id && open(one)),
            None => calls.iter().position(open),
        };
        if let Some(index) = index {
            calls[index].1 = Some(&message.content);
        }
    }
    calls
}

/// The first 16 hex digits of a text's SHA-256.
pub fn digest(text: &str) -> String {
    hex::encode(&Sha256::digest(text)[..8])
}

fn compact(arguments: &Map<String, Value>) -> String {
    serde_json::to_string(arguments).expect("JSON values serialize")
}

/// Compact JSON with sorted keys, equal for equal arguments.
fn canonical(arguments: &Map<String, Value>) -> String {
    fn sorted(value: &Value) -> Value {
        match value {
            Value::Object(map) => Value::Object(sorted_map(map)),
            Value::Array(items) => items.iter().map(sorted).collect(),
            other => other.clone(),
        }
    }

    fn sorted_map(map: &Map<String, Value>) -> Map<String, Value> {
        let mut entries: Vec<(String, Value)> =
            map.iter().map(|(key, value)| (key.clone(), sorted(value))).collect();
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        entries.into_iter().collect()
    }

    compact(&sorted_map(arguments))
}
