//! Which models a hub has, by words of their names.
//!
//! One request, whose answer tells families and sizes, and which writes nothing: [`Hub::plan`] tells exactly what one of
//! them needs.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result, anyhow, ensure};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use steersman_gguf::family_of;

use super::client::{HubError, Stop};
use super::{Hub, is_repo_id, is_unreached};

/// Most models of a search.
pub const MOST: usize = 20;

/// Most bytes of the words.
const WORD_BYTES: usize = 200;

/// Most bytes of the answer. A model with its chat template takes some 40,000.
const ANSWER_BYTES: u64 = 4 << 20;

/// Most characters of a name that is shown.
const NAME_CHARS: usize = 120;

/// Bits of a weight in the GGUF file that is downloaded of a repo unless another is named (`Q4_K_M`), rounded up.
const GGUF_BITS: u64 = 5;

/// Types of the tensors of models that are not packed: floats, and indices and masks beside them.
const PLAIN: [&str; 6] = ["F64", "F32", "F16", "BF16", "I64", "BOOL"];

/// A model on a hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// `owner/name`
    pub repo_id: String,
    /// How often it was downloaded of late.
    pub downloads: u64,
    /// `model_type`, if the hub tells.
    pub family: Option<String>,
    /// `None` if the hub does not tell.
    pub weights: Option<Weights>,
}

/// The weights of a model, by what the hub tells of its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weights {
    /// Bytes in files. Of a repo with GGUF files those of one, as an estimate.
    pub bytes: u64,
    /// What is in the files.
    pub form: Form,
}

/// How weights are kept in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Safetensors with floats.
    Floats,
    /// Safetensors with packed numbers.
    Packed,
    /// GGUF files, one for each quantization.
    Gguf,
}

impl Form {
    /// The name of the form in lists.
    pub fn name(self) -> &'static str {
        match self {
            Self::Floats => "floats",
            Self::Packed => "packed",
            Self::Gguf => "GGUF",
        }
    }
}

/// `words` for a search, without spaces around them.
///
/// # Errors
/// If there are none, or too many.
pub fn check_words(words: &str) -> Result<&str, String> {
    let words = words.trim();
    match words.len() {
        0 => Err("there are no words to search for".into()),
        bytes if bytes > WORD_BYTES => {
            Err(format!("the words have {bytes} bytes, and {WORD_BYTES} at most are allowed"))
        }
        _ => Ok(words),
    }
}

impl Hub {
    /// The models whose names have `words`, as the hub searches: those that are downloaded most first, [`MOST`] at most.
    ///
    /// # Errors
    /// If there are no words or too many, or the hub must not be asked, cannot be reached, or answers wrong.
    pub fn search(&self, words: &str) -> Result<Vec<Match>> {
        let words = check_words(words).map_err(|problem| anyhow!(problem))?;
        ensure!(
            !self.offline,
            "HF_HUB_OFFLINE forbids asking {}; `steersman list` has the models on this machine",
            self.endpoint
        );
        let words = utf8_percent_encode(words, NON_ALPHANUMERIC);
        let expand = ["downloads", "config", "safetensors", "gguf"];
        let expand = expand.map(|field| format!("&expand%5B%5D={field}")).concat();
        let path =
            format!("/api/models?search={words}&sort=downloads&direction=-1&limit={MOST}{expand}");
        let answer = self.client(&Stop::default()).get_whole(&path, ANSWER_BYTES);
        let answer = answer.map_err(|error| self.explain_search(error))?;
        let Answer(found) = serde_json::from_slice(&answer)
            .with_context(|| format!("reading what {} has found", self.endpoint))?;
        Ok(found.into_iter().filter_map(Found::check).collect())
    }

    fn explain_search(&self, error: HubError) -> anyhow::Error {
        let endpoint = &self.endpoint;
        let advice = match &error {
            HubError::Request(cause) if is_unreached(cause) => {
                "it cannot be reached; check the connection, or name another hub with HF_ENDPOINT"
            }
            HubError::Status(401 | 403) if self.token.is_some() => {
                "the token in HF_TOKEN is not valid"
            }
            HubError::Status(401 | 403) => "it requires a token: set HF_TOKEN",
            HubError::Status(429) => "it limits the request rate: wait, or set HF_TOKEN",
            _ => "try again, or name another hub with HF_ENDPOINT",
        };
        anyhow!(error).context(format!("searching {endpoint} failed: {advice}"))
    }
}

/// The models of an answer, [`MOST`] at most: a hub may send more than it was asked for.
struct Answer(Vec<Found>);

/// What a hub tells of a model.
#[derive(Deserialize)]
struct Found {
    id: String,
    #[serde(default)]
    downloads: u64,
    config: Option<Config>,
    safetensors: Option<Safetensors>,
    gguf: Option<Gguf>,
}

#[derive(Deserialize)]
struct Config {
    model_type: Option<String>,
}

/// Numbers in the files, by their type.
#[derive(Deserialize)]
struct Safetensors {
    parameters: Option<BTreeMap<String, u64>>,
}

#[derive(Deserialize)]
struct Gguf {
    /// Weights of the model.
    total: Option<u64>,
    architecture: Option<String>,
}

impl<'de> Deserialize<'de> for Answer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Models;

        impl<'de> Visitor<'de> for Models {
            type Value = Answer;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of models")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Answer, A::Error> {
                let mut found = Vec::new();
                while found.len() < MOST {
                    let Some(model) = items.next_element()? else { return Ok(Answer(found)) };
                    found.push(model);
                }
                while items.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Answer(found))
            }
        }

        deserializer.deserialize_seq(Models)
    }
}

impl Found {
    /// The model, unless its name is none of a repo.
    fn check(self) -> Option<Match> {
        let Self { id, downloads, config, safetensors, gguf } = self;
        if !is_repo_id(&id) || id.len() > NAME_CHARS {
            return None;
        }
        let (family, weights) = match (safetensors.and_then(|files| files.parameters), gguf) {
            (Some(numbers), _) => {
                (config.and_then(|config| config.model_type), Some(Weights::of(&numbers)))
            }
            (None, Some(Gguf { total, architecture })) => {
                let known = |name: String| family_of(&name).map_or(name, str::to_owned);
                let family = architecture.map(known);
                let bytes = |total: u64| total.saturating_mul(GGUF_BITS) / 8;
                let weights = total.map(|total| Weights { bytes: bytes(total), form: Form::Gguf });
                (family, weights)
            }
            (None, None) => (config.and_then(|config| config.model_type), None),
        };
        let family = family.filter(|name| is_shown(name));
        Some(Match { repo_id: id, downloads, family, weights })
    }
}

impl Weights {
    /// The weights of safetensors with so many numbers of each type.
    fn of(numbers: &BTreeMap<String, u64>) -> Self {
        let bytes = numbers.iter().map(|(name, count)| count.saturating_mul(bytes_of(name)));
        let bytes = bytes.fold(0, u64::saturating_add);
        let is_plain = |name: &String| PLAIN.contains(&name.as_str());
        let form = if numbers.keys().all(is_plain) { Form::Floats } else { Form::Packed };
        Self { bytes, form }
    }
}

/// Bytes of a number of a type of safetensors. Those that are not listed have 8 bits or fewer.
fn bytes_of(name: &str) -> u64 {
    match name {
        "F64" | "I64" | "U64" => 8,
        "F32" | "I32" | "U32" => 4,
        "F16" | "BF16" | "I16" | "U16" => 2,
        _ => 1,
    }
}

/// Whether a name can be shown as it is.
fn is_shown(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=NAME_CHARS).contains(&name.len()) && name.chars().all(allowed)
}

#[cfg(test)]
mod tests {
    use axum::Json;
    use axum::extract::Request;
    use axum::http::StatusCode;
    use axum::response::IntoResponse;
    use serde_json::{Value, json};

    use super::super::tests::hub_at;
    use super::*;

    /// A hub that answers every search with `answer`.
    fn hub(answer: Value) -> Hub {
        hub_at(move |_: &Request| Json(&answer).into_response())
    }

    fn error(hub: &Hub, words: &str) -> String {
        format!("{:#}", hub.search(words).unwrap_err())
    }

    #[test]
    fn a_search_tells_families_and_sizes() {
        let answer = json!([
            {
                "id": "mlx-community/Qwen3-4B-4bit", "downloads": 9000, "tags": ["mlx"],
                "config": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
                "safetensors": {"parameters": {"BF16": 1000, "U32": 500}, "total": 1500},
            },
            {
                "id": "owner/floats", "config": {"model_type": "llama"},
                "safetensors": {"parameters": {"F32": 10, "F16": 10, "I64": 1}},
            },
            {
                "id": "owner/parts-GGUF", "downloads": 7,
                "gguf": {"total": 8000, "architecture": "qwen35", "chat_template": "{{ x }}"},
            },
            {"id": "owner/other-GGUF", "gguf": {"total": null, "architecture": "mamba"}},
            {"id": "owner/old", "downloads": 1, "config": null, "safetensors": null},
        ]);
        let hub = hub_at(move |request: &Request| {
            let query = request.uri().query().unwrap_or_default();
            assert_eq!(request.uri().path(), "/api/models");
            let begin = "search=qwen3%204bit%26sort&sort=downloads&direction=-1&limit=20&";
            assert!(query.starts_with(begin), "{query}");
            for field in ["downloads", "config", "safetensors", "gguf"] {
                assert!(query.contains(&format!("&expand%5B%5D={field}")), "{query}");
            }
            Json(&answer).into_response()
        });
        let found = hub.search(" qwen3 4bit&sort ").unwrap();
        let weights = |bytes, form| Some(Weights { bytes, form });
        let expected = [
            ("mlx-community/Qwen3-4B-4bit", 9000, Some("qwen3"), weights(4000, Form::Packed)),
            ("owner/floats", 0, Some("llama"), weights(68, Form::Floats)),
            // As the file would be loaded.
            ("owner/parts-GGUF", 7, Some("qwen3_5_text"), weights(5000, Form::Gguf)),
            ("owner/other-GGUF", 0, Some("mamba"), None),
            ("owner/old", 1, None, None),
        ];
        let expected = expected.map(|(id, downloads, family, weights)| Match {
            repo_id: id.into(),
            downloads,
            family: family.map(Into::into),
            weights,
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn a_search_that_fails_says_why() {
        let nowhere = Hub { endpoint: "http://127.0.0.1:1".into(), ..hub(json!([])) };
        assert!(error(&nowhere, "x").contains("cannot be reached; check the connection"));
        let offline = Hub { offline: true, ..nowhere.clone() };
        let problem = error(&offline, "x");
        assert!(problem.starts_with("HF_HUB_OFFLINE forbids asking http://127.0.0.1:1;"));
        assert!(error(&nowhere, "  ").contains("no words"));
        assert!(error(&nowhere, &"x".repeat(201)).contains("have 201 bytes, and 200 at most"));
        let status = |code: StatusCode| hub_at(move |_: &Request| code.into_response());
        for (code, words) in [
            (StatusCode::TOO_MANY_REQUESTS, "limits the request rate"),
            (StatusCode::UNAUTHORIZED, "set HF_TOKEN"),
            (StatusCode::BAD_GATEWAY, "status 502"),
        ] {
            let problem = error(&status(code), "x");
            assert!(problem.contains(words), "{problem}");
        }
        let wrong = Hub { token: Some("hf_wrong".into()), ..status(StatusCode::UNAUTHORIZED) };
        assert!(error(&wrong, "x").contains("the token in HF_TOKEN is not valid"));
        let problem = error(&hub(json!({"error": "no"})), "x");
        assert!(problem.starts_with("reading what http://127.0.0.1:"), "{problem}");
    }

    #[test]
    fn a_hostile_answer_is_bounded_and_shows_nothing_else() {
        let model = |id: &str| json!({"id": id});
        let many: Vec<_> = (0..1000).map(|i| model(&format!("owner/m{i}"))).collect();
        assert_eq!(hub(many.into()).search("m").unwrap().len(), MOST);
        let long = format!("owner/{}", "x".repeat(NAME_CHARS));
        let names = ["../etc", "owner/../x", "owner/a\u{1b}[2J", "plain", "a/b/c", long.as_str()];
        assert_eq!(hub(names.map(model).to_vec().into()).search("x").unwrap(), []);
        let answer = json!([{
            "id": "owner/x", "config": {"model_type": "a\u{1b}[2J"},
            "safetensors": {"parameters": {"F32": u64::MAX, "U32": u64::MAX}},
        }]);
        let found = hub(answer).search("x").unwrap();
        let weights = Some(Weights { bytes: u64::MAX, form: Form::Packed });
        let expected = Match { repo_id: "owner/x".into(), downloads: 0, family: None, weights };
        assert_eq!(found, [expected]);
        let large = json!([{"id": "owner/x", "about": "x".repeat(5 << 20)}]);
        assert!(error(&hub(large), "x").contains("more than 4194304 bytes"));
    }
}
