//! `steersman`: the field of replies for what the formats of the protocols have no place for.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use steersman_engine::request::{FinishReason, Finished};

use super::reply::Head;
use crate::mcp::Ran;

/// What OpenAI's format has no place for.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Extension {
    /// The profile that steered the request.
    profile: String,
    /// What policies did and what was left out, in words.
    pub notes: Vec<String>,
    /// Why a policy ended the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<String>,
    /// What policies tell the client: names and values.
    #[serde(skip_serializing_if = "Map::is_empty")]
    #[schemars(with = "BTreeMap<String, String>")]
    labels: Map<String, Value>,
    /// Calls of MCP tools that the server ran.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_runs: Vec<ToolRun>,
    /// Tokens of the reasoning, in a protocol whose own fields do not count them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_tokens: Option<u32>,
}

impl Extension {
    /// The field of a request that asks for no reply, such as one that unloads a model.
    pub fn without_reply(head: &Head) -> Self {
        Self {
            profile: head.profile.clone(),
            notes: head.notes.clone(),
            stop_reason: None,
            labels: Map::new(),
            tool_runs: Vec::new(),
            reasoning_tokens: None,
        }
    }

    /// The field of a reply that has finished.
    pub fn new(head: &Head, finished: &Finished) -> Self {
        let stop_reason = match &finished.reason {
            FinishReason::Policy(reason) => Some(reason.clone()),
            _ => None,
        };
        Self {
            profile: head.profile.clone(),
            notes: head.notes.iter().chain(&finished.notes).cloned().collect(),
            stop_reason,
            labels: finished
                .labels
                .iter()
                .cloned()
                .map(|(name, label)| (name, label.into()))
                .collect(),
            tool_runs: head.ran.iter().map(|(index, ran)| ToolRun::new(*index, ran)).collect(),
            reasoning_tokens: None,
        }
    }
}

/// A call that this server ran. Its output is for the model, and left out.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct ToolRun {
    #[serde(flatten)]
    #[schemars(with = "Map<String, Value>")]
    ran: Ran,
    /// The number of the choice.
    index: usize,
}

impl ToolRun {
    /// The call `ran` of choice `index`.
    pub fn new(index: usize, ran: &Ran) -> Self {
        Self { ran: Ran { output: None, ..ran.clone() }, index }
    }
}
