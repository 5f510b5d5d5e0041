//! What the laws share: where fixtures lie, and an engine over the bundled model.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use serde_json::{Value, json};
use steersman_engine::config::{Config, Device, Dtype, Profile};
use steersman_engine::policy::{self, Policies, PolicyConfig, Session, Storage, no_vocabulary};
use steersman_engine::request::{Event, Finished, Message, Request, SamplingOverrides, ToolCall};
use steersman_engine::tools::Decoder;
use steersman_engine::{Engine, Error, Info};
pub use steersman_test_support::{Random, guest};
use tempfile::TempDir;

/// `tests/fixtures`.
pub fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The bundled demonstration model.
pub fn bundled_model() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../server/model/tiny-hybrid-4bit")
}

/// A model folder of the fixtures' smallest weights, whose words are `w0` to `w255`: requests come and
/// go in milliseconds.
///
/// # Panics
/// When it cannot be written.
pub fn tiny_model(folder: &Path) {
    let weights = fixtures().join("families/qwen3");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(weights.join(file), folder.join(file)).unwrap();
    }
    let vocab: serde_json::Map<_, _> = (0..256).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    });
    let template = "{% for message in messages %}{{ message.content }} {% endfor %}";
    for (file, json) in [
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", json!({"chat_template": template})),
        ("generation_config.json", json!({"eos_token_id": 255})),
    ] {
        std::fs::write(folder.join(file), json.to_string()).unwrap();
    }
}

/// A JSON fixture.
///
/// # Panics
/// When it cannot be read.
pub fn fixture(name: &str) -> Value {
    let bytes = std::fs::read(fixtures().join(name)).expect(name);
    serde_json::from_slice(&bytes).expect(name)
}

/// The first `count` prompts of each of these kinds in `fixtures/speculation.json`, as requests; see
/// `speculation.py` there.
///
/// # Panics
/// When the fixture cannot be read.
pub fn speculation_prompts(kinds: &[&str], count: usize) -> Vec<Request> {
    let prompts = fixture("speculation.json");
    let prompts = prompts.as_array().unwrap();
    let request = |prompt: &Value| Request {
        id: prompt["kind"].as_str().unwrap().into(),
        profile: "default".into(),
        messages: serde_json::from_value(prompt["messages"].clone()).unwrap(),
        reasoning: prompt["thinking"].as_bool(),
        ..Request::default()
    };
    let of_kind = |kind: &&str| {
        let prompts = prompts.iter().filter(|prompt| prompt["kind"] == **kind);
        prompts.take(count).map(request).collect::<Vec<_>>()
    };
    kinds.iter().flat_map(of_kind).collect()
}

/// A configuration for tests: the CPU in f32, and whatever else is the default.
pub fn config() -> Config {
    let mut config = Config::default();
    config.model.device = Device::Cpu;
    config.model.dtype = Dtype::F32;
    config
}

/// An engine over the bundled model that ends in good order when it is dropped: what it saved is on
/// disk then, and MLX is no longer at work when the process ends.
pub struct Running {
    engine: Option<Engine>,
    thread: Option<JoinHandle<()>>,
    /// What goes with it.
    data: Option<TempDir>,
}

impl Running {
    /// Starts an engine that keeps its state in `data`.
    ///
    /// # Panics
    /// When it cannot start.
    pub fn start(config: Config, data: &Path) -> Self {
        Self::try_start(config, &bundled_model(), data).expect("the engine starts")
    }

    /// Starts an engine that saves no state, and whose policies keep what they do until it ends.
    ///
    /// # Panics
    /// When it cannot start.
    pub fn keeping_nothing(mut config: Config) -> Self {
        config.store.enabled = false;
        let data = tempfile::tempdir().expect("a folder");
        let mut running = Self::start(config, data.path());
        running.data = Some(data);
        running
    }

    /// Starts an engine over the model in `folder`.
    ///
    /// # Errors
    /// Whatever keeps it from starting.
    pub fn try_start(config: Config, folder: &Path, data: &Path) -> Result<Self, Error> {
        let config = config.check()?;
        let policies = steersman_engine::policies(&config, data)?;
        let (engine, thread) = steersman_engine::start(config, folder, data, policies)?;
        Ok(Self { engine: Some(engine), thread: Some(thread), data: None })
    }
}

/// A decoder over the bundled model, and what it says of itself.
///
/// # Errors
/// Whatever keeps it from being loaded.
pub fn load(config: Config, data: &Path) -> Result<(Decoder, Info), Error> {
    load_from(config, &bundled_model(), data)
}

/// A decoder over the model in `folder`, and what it says of itself.
///
/// # Errors
/// Whatever keeps it from being loaded.
pub fn load_from(config: Config, folder: &Path, data: &Path) -> Result<(Decoder, Info), Error> {
    let config = config.check()?;
    let policies = steersman_engine::policies(&config, data)?;
    Decoder::load(config, folder, data, policies)
}

impl Deref for Running {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        self.engine.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.engine.take());
        // Of a test that has failed, others may hold the engine: it would not end.
        if !std::thread::panicking() {
            let ended = self.thread.take().map(JoinHandle::join);
            assert!(matches!(ended, Some(Ok(()))), "the engine panicked");
        }
    }
}

/// The policies of these profiles, without a model.
///
/// # Errors
/// As [`Policies::load`].
pub fn policies(
    limits: &PolicyConfig,
    profiles: impl IntoIterator<Item = (String, Profile)>,
) -> Result<Policies, policy::Error> {
    let config = Config { profiles: profiles.into_iter().collect(), ..Config::default() };
    Policies::load(limits, &config.profile_policies(), &Storage::in_memory())
}

/// The policies of `profile`, for one request.
///
/// # Errors
/// As [`Policies::start`].
pub fn session(policies: &Policies, profile: &str) -> Result<Session, policy::Error> {
    policies.start(profile, "test", &no_vocabulary())
}

/// A greedy request of one user message.
pub fn ask(question: &str) -> Request {
    Request {
        id: "test".into(),
        profile: "default".into(),
        messages: vec![message("user", question)],
        sampling: SamplingOverrides { temperature: Some(0.0), ..SamplingOverrides::default() },
        ..Request::default()
    }
}

/// The same, about the weather in Oslo, with a tool that tells it: the bundled model calls it.
pub fn ask_weather() -> Request {
    let tool = json!({"type": "function", "function": {
        "name": "get_weather", "description": "get weather", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}});
    let question = "What is the weather in Oslo?";
    Request { tools: vec![tool], reasoning: Some(false), ..ask(question) }
}

/// A message.
pub fn message(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into(), ..Message::default() }
}

/// A reply, folded.
#[derive(Debug)]
pub struct Reply {
    /// The thought.
    pub reasoning: String,
    /// The answer.
    pub answer: String,
    /// The calls.
    pub tool_calls: Vec<ToolCall>,
    /// `system_fingerprint`; empty when it was never admitted.
    pub fingerprint: String,
    /// How it ended.
    pub end: Result<Finished, Error>,
}

impl Reply {
    /// How it ended, where that was well.
    ///
    /// # Panics
    /// When the request failed.
    pub fn finished(&self) -> &Finished {
        self.end.as_ref().expect("the request ended well")
    }
}

/// Runs a request to its end.
///
/// # Panics
/// When the engine refuses it or says nothing of its end.
pub fn run(engine: &Engine, request: Request) -> Reply {
    let mut events = engine.submit(request).expect("the queue has room");
    let (mut reasoning, mut answer) = (String::new(), String::new());
    let mut tool_calls = Vec::new();
    let mut fingerprint = String::new();
    let end = loop {
        match events.blocking_recv().expect("every request says how it ends") {
            Event::Started { fingerprint: told } => fingerprint = told,
            Event::Reasoning(text) => reasoning.push_str(&text),
            Event::Answer(text) => answer.push_str(&text),
            Event::ToolCall(call) => tool_calls.push(call),
            Event::Rewound { reasoning: thought, answer: said } => {
                reasoning.truncate(reasoning.len() - thought);
                answer.truncate(answer.len() - said);
            }
            Event::Finished(finished) => break Ok(finished),
            Event::Failed(error) => break Err(error),
        }
    };
    Reply { reasoning, answer, tool_calls, fingerprint, end }
}

/// The samples of an OpenMetrics text, by name and labels, each line of which is checked: it is one
/// of a family's help, its type, or a sample of the family announced last; counters end in `_total`
/// and no family comes twice.
///
/// # Panics
/// When a line is none of these.
pub fn samples(text: &str) -> BTreeMap<String, f64> {
    let body = text.strip_suffix("# EOF\n").expect("it ends with a mark");
    let (mut samples, mut families) = (BTreeMap::new(), BTreeSet::new());
    let (mut helped, mut family, mut kind) = ("", "", "");
    for line in body.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            (helped, _) = help.split_once(' ').expect("a name and words");
        } else if let Some(typed) = line.strip_prefix("# TYPE ") {
            (family, kind) = typed.split_once(' ').expect("a name and a type");
            assert!(helped == family && families.insert(family), "{line}");
            assert!(["counter", "gauge"].contains(&kind), "{line}");
        } else {
            let (sample, value) = line.rsplit_once(' ').expect(line);
            let name = sample.split('{').next().unwrap_or_default();
            let suffix = if kind == "counter" { "_total" } else { "" };
            assert_eq!(name.strip_prefix(family), Some(suffix), "{line}");
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{line}");
            let value: f64 = value.parse().expect(line);
            assert!(value.is_finite() && value >= 0.0, "{line}");
            assert!(samples.insert(sample.to_string(), value).is_none(), "{line} comes twice");
        }
    }
    samples
}
