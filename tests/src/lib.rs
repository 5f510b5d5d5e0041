//! Shared test helpers: paths of fixtures, and an engine with the bundled model.

pub mod steered;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use serde_json::{Value, json};
use steersman_engine::config::{Config, Device, Dtype, MachineCosts, Profile};
use steersman_engine::policy::SamplingPatch;
use steersman_engine::policy::{
    self, Host, Policies, PolicyConfig, ProfilePolicies, Session, Storage, no_vocabulary,
};
use steersman_engine::request::{Event, Finished, Message, Request, ToolCall};
use steersman_engine::tools::Decoder;
use steersman_engine::{Engine, EngineThread, Error, Info};
use steersman_test_support::shared_policies;
pub use steersman_test_support::{Random, fuzz_inputs, guest};
use steersman_text::Text;
use tempfile::TempDir;
use tokio::sync::mpsc::UnboundedReceiver;

/// A profile with one policy.
pub fn profile(policy: impl Into<String>) -> Profile {
    let policy = ProfilePolicies { policies: vec![policy.into()], ..ProfilePolicies::default() };
    Profile { policy, ..Profile::default() }
}

/// `tests/fixtures`.
pub fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The bundled demonstration model.
pub fn bundled_model() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../server/model/tiny-hybrid-4bit")
}

/// Tokenizer and chat template of the bundled model, loaded once.
pub fn bundled_text() -> Text {
    static TEXT: LazyLock<Text> =
        LazyLock::new(|| Text::load(&bundled_model()).expect("the bundled model is complete"));
    TEXT.clone()
}

/// `count`, which suits CI, times the variable `STEERSMAN_TEST_SCALE`.
///
/// # Panics
/// If the variable is not a number.
pub fn scaled(count: usize) -> usize {
    let scale = std::env::var("STEERSMAN_TEST_SCALE");
    scale.map_or(count, |scale| count * scale.parse::<usize>().expect("STEERSMAN_TEST_SCALE"))
}

/// What happens to files: flipped bits, a cut, pages of zeros or random bytes, also the first one.
pub fn damage(bytes: &mut Vec<u8>, kind: usize, random: &mut Random) {
    const PAGE: usize = 4096;
    let pages = bytes.len().div_ceil(PAGE);
    let mut page = |at: usize, random: &mut Random, fill: fn(&mut Random) -> u8| {
        let end = bytes.len().min((at + 1) * PAGE);
        bytes[at * PAGE..end].iter_mut().for_each(|byte| *byte = fill(random));
    };
    let junk: fn(&mut Random) -> u8 = |random| random.below(256) as u8;
    match kind % 6 {
        // The first pages are redb's header and roots: half of the flipped bits go there.
        0 | 1 => {
            let extent = [bytes.len().min(16 * PAGE), bytes.len()][kind % 6];
            for _ in 0..1 + random.below(8) {
                let at = random.below(extent);
                bytes[at] ^= 1 << random.below(8);
            }
        }
        2 => bytes.truncate(random.below(bytes.len())),
        3 => page(random.below(pages), random, junk),
        4 => page(random.below(pages.min(16)), random, |_| 0),
        _ => page(0, random, junk),
    }
}

/// Writes a model folder with the smallest weights of the fixtures and the words `w0` to `w255`. A
/// request takes milliseconds.
///
/// # Panics
/// If it cannot be written.
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

/// Words that the model of [`tiny_model`] has as tokens.
pub fn words(random: &mut Random, count: usize) -> String {
    (0..count).map(|_| format!("w{} ", 1 + random.below(250))).collect()
}

/// A JSON fixture.
///
/// # Panics
/// If it cannot be read.
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

/// A configuration for tests: the CPU in f32, a machine whose costs are fixed, otherwise defaults.
pub fn config() -> Config {
    let mut config = Config { machine: MachineCosts::Fixed, ..Config::default() };
    config.model.device = Device::Cpu;
    config.model.dtype = Dtype::F32;
    config
}

/// An engine with the bundled model. Dropping it waits until its state is on disk and MLX is idle.
pub struct Running {
    engine: Option<Engine>,
    thread: Option<EngineThread>,
    /// Temporary data folder, deleted on drop.
    data: Option<TempDir>,
}

impl Running {
    /// Starts an engine that saves its state in `data`.
    ///
    /// # Panics
    /// If it cannot start.
    pub fn start(config: Config, data: &Path) -> Self {
        Self::try_start(config, &bundled_model(), data).expect("the engine starts")
    }

    /// Starts an engine without a prefix store. Policies store data in a temporary folder.
    ///
    /// # Panics
    /// If it cannot start.
    pub fn without_store(mut config: Config) -> Self {
        config.store.enabled = false;
        let data = tempfile::tempdir().expect("a folder");
        let mut running = Self::start(config, data.path());
        running.data = Some(data);
        running
    }

    /// Starts an engine with the model in `folder`.
    ///
    /// # Errors
    /// If it cannot start.
    pub fn try_start(config: Config, folder: &Path, data: &Path) -> Result<Self, Error> {
        let config = config.check()?;
        let policies = served_policies(&config, data)?;
        let (engine, thread) = steersman_engine::start(config, folder, data, policies)?;
        Ok(Self { engine: Some(engine), thread: Some(thread), data: None })
    }
}

/// As [`steersman_engine::policies`], with the compiled components that all tests share.
///
/// # Errors
/// When a policy cannot be loaded.
pub fn served_policies(config: &Config, data: &Path) -> Result<Arc<Policies>, Error> {
    let storage = Storage::open(data)?.with_compile_cache(&shared_policies());
    let policies = Arc::new(Policies::load(&config.policy, &config.profile_policies(), &storage)?);
    policies.watch();
    Ok(policies)
}

/// A host with these limits and the compiled components that all tests share.
///
/// # Panics
/// If this machine cannot run WebAssembly.
pub fn host(limits: &PolicyConfig) -> Host {
    Host::new(limits, &Storage::compile_cache(&shared_policies())).expect("a host")
}

/// A decoder with the bundled model, and its `Info`.
///
/// # Errors
/// If the model cannot be loaded.
pub fn load(config: Config, data: &Path) -> Result<(Decoder, Info), Error> {
    load_from(config, &bundled_model(), data)
}

/// A decoder with the model in `folder`, and its `Info`.
///
/// # Errors
/// If the model cannot be loaded.
pub fn load_from(config: Config, folder: &Path, data: &Path) -> Result<(Decoder, Info), Error> {
    let config = config.check()?;
    let policies = served_policies(&config, data)?;
    Decoder::load(config, folder, data, policies)
}

impl Deref for Running {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        self.engine.as_ref().expect("present until drop")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.engine.take());
        // After a failed test other handles may exist, and joining would hang.
        if !std::thread::panicking() {
            let ended = self.thread.take().map(EngineThread::join);
            assert!(matches!(ended, Some(Ok(()))), "the engine panicked");
        }
    }
}

/// Policies of these profiles, without a model.
///
/// # Errors
/// As [`Policies::load`].
pub fn policies(
    limits: &PolicyConfig,
    profiles: impl IntoIterator<Item = (String, Profile)>,
) -> Result<Policies, policy::Error> {
    let config = Config { profiles: profiles.into_iter().collect(), ..Config::default() };
    let storage = Storage::compile_cache(&shared_policies());
    Policies::load(limits, &config.profile_policies(), &storage)
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
        sampling: SamplingPatch { temperature: Some(0.0), ..SamplingPatch::default() },
        ..Request::default()
    }
}

/// As [`ask`], about the weather, with a tool that the bundled model calls.
pub fn ask_weather() -> Request {
    let tool = json!({"type": "function", "function": {
        "name": "get_weather", "description": "get weather", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}});
    let question = "What is the weather in Oslo?";
    Request { tools: vec![tool], reasoning: Some(false), ..ask(question) }
}

/// A message of `role`.
pub fn message(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into(), ..Message::default() }
}

/// The collected events of a request.
#[derive(Debug)]
pub struct Reply {
    /// The reasoning.
    pub reasoning: String,
    /// The answer.
    pub answer: String,
    /// The tool calls.
    pub tool_calls: Vec<ToolCall>,
    /// `system_fingerprint`; empty if the request was not admitted.
    pub fingerprint: String,
    /// The last event.
    pub end: Result<Finished, Error>,
}

impl Reply {
    /// The last event of a request that succeeded.
    ///
    /// # Panics
    /// If the request failed.
    pub fn finished(&self) -> &Finished {
        self.end.as_ref().expect("the request succeeded")
    }
}

/// Runs a request to its end.
///
/// # Panics
/// If the engine refuses it or sends no final event.
pub fn run(engine: &Engine, request: Request) -> Reply {
    read(engine.submit(request).expect("the queue has room"))
}

/// Reads the events of a request to its end.
///
/// # Panics
/// If there is no final event.
pub fn read(mut events: UnboundedReceiver<Event>) -> Reply {
    let (mut reasoning, mut answer) = (String::new(), String::new());
    let mut tool_calls = Vec::new();
    let mut fingerprint = String::new();
    let end = loop {
        match events.blocking_recv().expect("the last event is Finished or Failed") {
            Event::Started { fingerprint: value, .. } => fingerprint = value,
            Event::Reasoning(text) => reasoning.push_str(&text),
            Event::PromptToken(_)
            | Event::Embedding(_)
            | Event::Logprob(_)
            | Event::CallDelta(_)
            | Event::Routed { .. }
            | Event::PromptCounted { .. }
            | Event::Note { .. } => {}
            Event::Answer(text) => answer.push_str(&text),
            Event::ToolCall(call) => tool_calls.push(call),
            Event::Rewound { reasoning: reasoning_len, answer: answer_len } => {
                reasoning.truncate(reasoning.len() - reasoning_len);
                answer.truncate(answer.len() - answer_len);
            }
            Event::Finished(finished) => break Ok(finished),
            Event::Failed(error) => break Err(error),
        }
    };
    Reply { reasoning, answer, tool_calls, fingerprint, end }
}

/// Parses and validates an OpenMetrics text; returns its samples by name and labels. Each line is a
/// family's help, its type, its unit, or a sample of the last family; counters end in `_total`, names with a unit in
/// it, and no family occurs twice. The buckets of a histogram grow up to its count.
///
/// # Panics
/// If the text is invalid.
pub fn samples(text: &str) -> BTreeMap<String, f64> {
    let body = text.strip_suffix("# EOF\n").expect("an EOF marker");
    let (mut samples, mut families) = (BTreeMap::new(), BTreeSet::new());
    let (mut helped, mut family, mut kind) = ("", "", "");
    // Of the last bucket: its count.
    let mut in_bucket = 0.0;
    for line in body.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            (helped, _) = help.split_once(' ').expect("a name and a text");
        } else if let Some(typed) = line.strip_prefix("# TYPE ") {
            (family, kind) = typed.split_once(' ').expect("a name and a type");
            assert!(helped == family && families.insert(family), "{line}");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
        } else if let Some(unit) = line.strip_prefix("# UNIT ") {
            let (name, unit) = unit.split_once(' ').expect("a name and a unit");
            assert!(name == family && name.ends_with(&format!("_{unit}")), "{line}");
        } else {
            let (sample, value) = line.rsplit_once(' ').expect(line);
            let name = sample.split('{').next().unwrap_or_default();
            let suffix = name.strip_prefix(family).expect(line);
            let value: f64 = value.parse().expect(line);
            match kind {
                "counter" => assert_eq!(suffix, "_total", "{line}"),
                "gauge" => assert_eq!(suffix, "", "{line}"),
                _ => match suffix {
                    "_sum" => {}
                    "_count" => in_bucket = 0.0,
                    _ => {
                        assert!(suffix == "_bucket" && value >= in_bucket, "{line}");
                        in_bucket = if sample.contains("le=\"+Inf\"") { 0.0 } else { value };
                    }
                },
            }
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{line}");
            assert!(value.is_finite() && value >= 0.0, "{line}");
            assert!(samples.insert(sample.to_string(), value).is_none(), "{line} occurs twice");
        }
    }
    samples
}
