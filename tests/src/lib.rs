//! What the laws share: where fixtures lie, and an engine over the bundled model.

use std::path::PathBuf;

use serde_json::Value;
use steersman_engine::config::{Config, Device, Dtype};
use steersman_engine::request::{Event, Finished, Message, Request, SamplingWish, ToolCall};
use steersman_engine::{Engine, Error};

/// `tests/fixtures`.
pub fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The bundled demonstration model.
pub fn bundled_model() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../server/model/tiny-hybrid-4bit")
}

/// A JSON fixture.
///
/// # Panics
/// When it cannot be read.
pub fn fixture(name: &str) -> Value {
    let bytes = std::fs::read(fixtures().join(name)).expect(name);
    serde_json::from_slice(&bytes).expect(name)
}

/// A configuration for tests: the CPU in f32, and whatever else is the default.
pub fn config() -> Config {
    let mut config = Config::default();
    config.model.device = Device::Cpu;
    config.model.dtype = Dtype::F32;
    config
}

/// A greedy request of one user message.
pub fn ask(question: &str) -> Request {
    Request {
        id: "test".into(),
        profile: "default".into(),
        messages: vec![message("user", question)],
        sampling: SamplingWish { temperature: Some(0.0), ..SamplingWish::default() },
        ..Request::default()
    }
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
    loop {
        match events.blocking_recv().expect("every request says how it ends") {
            Event::Reasoning(text) => reasoning.push_str(&text),
            Event::Answer(text) => answer.push_str(&text),
            Event::ToolCall(call) => tool_calls.push(call),
            Event::Finished(finished) => {
                return Reply { reasoning, answer, tool_calls, end: Ok(finished) };
            }
            Event::Failed(error) => {
                return Reply { reasoning, answer, tool_calls, end: Err(error) };
            }
        }
    }
}
