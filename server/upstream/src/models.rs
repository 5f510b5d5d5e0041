//! What an upstream says of itself: its models, and what kind of server it is.

use std::collections::BTreeMap;
use std::time::Duration;

use secrecy::SecretString;
use serde_json::Value;

use crate::capability::{Kind, ReasoningField};
use crate::client::Client;
use crate::config::{Protocol, UpstreamConfig};
use crate::fault::Fault;
use crate::piece::tokens;

/// Time in which it must answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Most models of an upstream.
const MODELS: usize = 4096;

/// Longest name of a model.
const NAME_BYTES: usize = 256;

/// What an upstream says of itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Asked {
    /// The server that it is, if that is known.
    pub kind: Option<Kind>,
    /// Its models by name.
    pub models: BTreeMap<String, Model>,
}

/// What it says of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Model {
    /// Tokens of prompt and reply.
    pub context: Option<u32>,
    /// How it is told to reason.
    pub reasoning: Option<ReasoningField>,
}

/// Asks the upstream of `config`, with its key.
///
/// # Errors
/// If it does not answer, or not as its protocol does.
pub async fn ask(config: &UpstreamConfig, key: Option<SecretString>) -> Result<Asked, Fault> {
    let path = match config.protocol {
        Protocol::OpenAi => "/models",
        Protocol::Anthropic => "/v1/models?limit=1000",
    };
    // A client of its own: connections belong to the runtime of this call, which may end after it.
    let client = Client::new(config, key);
    let json = client.get(path, ANSWER).await?;
    read(&json).ok_or_else(|| Fault::protocol("lists its models in an unknown form"))
}

fn read(json: &Value) -> Option<Asked> {
    let listed = json["data"].as_array().or_else(|| json["models"].as_array())?;
    let mut asked = Asked::default();
    for one in listed.iter().take(MODELS) {
        let Some(id) = one["id"].as_str().or_else(|| one["name"].as_str()) else { continue };
        // Vendors put a folder before some names, which requests may leave out.
        let id = id.strip_prefix("models/").unwrap_or(id);
        if id.is_empty() || id.len() > NAME_BYTES || id.contains(is_no_name) {
            continue;
        }
        let kind = one["owned_by"].as_str().and_then(kind_of);
        asked.kind = asked.kind.or(kind);
        let contexts = [
            &one["max_model_len"],
            &one["context_length"],
            &one["context"],
            &one["max_input_tokens"],
            &one["meta"]["n_ctx"],
            &one["meta"]["n_ctx_train"],
        ];
        let context = contexts.into_iter().find_map(tokens).filter(|context| *context > 0);
        asked.models.insert(id.into(), Model { context, reasoning: reasoning(one) });
    }
    Some(asked)
}

/// Whether a character cannot be in the name of a model here.
fn is_no_name(c: char) -> bool {
    c == '@' || c.is_whitespace() || c.is_control()
}

/// The server whose models have this owner.
fn kind_of(owner: &str) -> Option<Kind> {
    match owner {
        "vllm" => Some(Kind::Vllm),
        "sglang" => Some(Kind::Sglang),
        "llamacpp" => Some(Kind::LlamaCpp),
        "steersman" => Some(Kind::Steersman),
        _ => None,
    }
}

/// How a model of Anthropic's is told to reason, where the list says so.
fn reasoning(model: &Value) -> Option<ReasoningField> {
    let thinking = &model["capabilities"]["thinking"];
    let supports = |value: &Value| value["supported"].as_bool();
    if supports(thinking) == Some(false) {
        return Some(ReasoningField::Never);
    }
    let types = &thinking["types"];
    match (supports(&types["adaptive"]), supports(&types["enabled"])) {
        (Some(true), _) => Some(ReasoningField::Adaptive),
        (_, Some(true)) => Some(ReasoningField::Budget),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_kind_of_a_server_is_found_in_its_list() {
        let check = |owner: &str| {
            let json = json!({"data": [{"id": "m", "owned_by": owner, "max_model_len": 4096}]});
            let asked = read(&json).unwrap();
            assert_eq!(asked.models["m"].context, Some(4096));
            asked.kind
        };
        assert_eq!(check("vllm"), Some(Kind::Vllm));
        assert_eq!(check("steersman"), Some(Kind::Steersman));
        assert_eq!(check("llamacpp"), Some(Kind::LlamaCpp));
        assert_eq!(check("google"), None);
    }

    #[test]
    fn odd_lists_are_read_as_far_as_they_go() {
        assert!(read(&json!([])).is_none());
        assert!(read(&json!({"data": 3})).is_none());
        let odd = json!({"data": [{}, {"id": 4}, {"id": "a@b"}, {"id": "a\nb"}, {"id": "x".repeat(300)}, {"id": "models/g"}]});
        assert_eq!(read(&odd).unwrap().models.keys().collect::<Vec<_>>(), ["g"]);
    }

    #[test]
    fn thinking_of_a_model_is_read() {
        let check = |thinking: Value| reasoning(&json!({"capabilities": {"thinking": thinking}}));
        let yes = json!({"supported": true});
        assert_eq!(check(json!({"supported": false})), Some(ReasoningField::Never));
        assert_eq!(
            check(json!({"supported": true, "types": {"adaptive": yes}})),
            Some(ReasoningField::Adaptive)
        );
        assert_eq!(
            check(json!({"supported": true, "types": {"enabled": yes}})),
            Some(ReasoningField::Budget)
        );
        assert_eq!(check(json!(null)), None);
    }
}
