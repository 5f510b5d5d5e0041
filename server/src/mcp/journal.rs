//! The calls of recent requests, for their traces.

use std::collections::VecDeque;

use parking_lot::Mutex;
use serde::Serialize;
use steersman_engine::request::{FunctionCall, ToolCall};

use super::{SEPARATOR, error_result};

/// Most bytes of texts in the journal.
const JOURNAL_BYTES: usize = 16 << 20;

/// A call that this server ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ran {
    /// Id of the call in the conversation.
    pub id: String,
    /// The tool, as SERVER__TOOL.
    pub name: String,
    /// The arguments as JSON; `None` in a trace without texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
    /// What the model got; `None` in a trace without texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// Bytes of the output.
    pub output_bytes: usize,
    /// Whether the tool failed, or could not be called.
    pub is_error: bool,
    /// After how many rounds of calls in its reply.
    pub round: u32,
    /// How long it took.
    pub milliseconds: u64,
}

impl Ran {
    /// Names of the server and of its tool.
    pub fn server_and_tool(&self) -> (&str, &str) {
        self.name.split_once(SEPARATOR).unwrap_or(("", &self.name))
    }

    /// The call as the model made it.
    pub fn call(&self) -> ToolCall {
        let arguments = self.arguments.as_deref().unwrap_or_default();
        let arguments = serde_json::from_str(arguments).unwrap_or_default();
        let function = FunctionCall { name: self.name.clone(), arguments };
        ToolCall { id: self.id.clone(), kind: "function".into(), function }
    }

    /// The result as the model gets it.
    pub fn result(&self) -> String {
        let output = self.output.as_deref().unwrap_or_default();
        if self.is_error { error_result(output) } else { output.to_string() }
    }

    /// The same without texts.
    #[must_use]
    pub fn masked(&self) -> Self {
        Self { arguments: None, output: None, ..self.clone() }
    }

    fn bytes(&self) -> usize {
        let texts = [&self.arguments, &self.output];
        let texts: usize = texts.into_iter().flatten().map(String::len).sum();
        size_of::<Self>() + self.id.len() + self.name.len() + texts
    }
}

/// The calls of the newest requests.
#[derive(Debug)]
pub struct Journal {
    /// Number of requests.
    limit: usize,
    entries: Mutex<VecDeque<Entry>>,
}

/// The calls of one request.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Id of its reply.
    pub request: String,
    /// Its profile.
    pub profile: String,
    /// Ids of the engine's requests: the first is `request`.
    pub rounds: Vec<String>,
    /// The calls, oldest first.
    pub calls: Vec<Ran>,
}

impl Journal {
    /// Keeps the calls of the newest `limit` requests.
    pub fn new(limit: usize) -> Self {
        Self { limit, entries: Mutex::default() }
    }

    /// Adds a call of `request`.
    pub fn add(&self, request: &str, profile: &str, call: Ran) {
        self.entry(request, profile, |entry| entry.calls.push(call));
    }

    /// Notes that the engine continues `request` under this id.
    pub fn continues(&self, request: &str, profile: &str, round: &str) {
        self.entry(request, profile, |entry| entry.rounds.push(round.into()));
    }

    /// The calls of `request`, if it had any and they were not displaced.
    pub fn get(&self, request: &str) -> Option<Entry> {
        let entries = self.entries.lock();
        entries.iter().rev().find(|entry| entry.request == request).cloned()
    }

    fn entry(&self, request: &str, profile: &str, change: impl FnOnce(&mut Entry)) {
        if self.limit == 0 {
            return;
        }
        let mut entries = self.entries.lock();
        match entries.iter_mut().rev().find(|entry| entry.request == request) {
            Some(entry) => change(entry),
            None => {
                let (request, profile) = (request.to_string(), profile.to_string());
                let rounds = vec![request.clone()];
                let mut entry = Entry { request, profile, rounds, calls: Vec::new() };
                change(&mut entry);
                entries.push_back(entry);
            }
        }
        let bytes = |entry: &Entry| entry.calls.iter().map(Ran::bytes).sum::<usize>();
        let mut all: usize = entries.iter().map(bytes).sum();
        while entries.len() > self.limit || (all > JOURNAL_BYTES && entries.len() > 1) {
            all -= entries.pop_front().as_ref().map_or(0, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(text: &str) -> Ran {
        Ran {
            id: "call_1".into(),
            name: "files__read".into(),
            arguments: Some("{}".into()),
            output: Some(text.into()),
            output_bytes: text.len(),
            is_error: false,
            round: 1,
            milliseconds: 3,
        }
    }

    #[test]
    fn the_oldest_requests_are_displaced() {
        let journal = Journal::new(2);
        for request in ["a", "b", "a", "c"] {
            journal.add(request, "default", call("x"));
        }
        assert!(journal.get("a").is_none());
        assert_eq!(journal.get("b").unwrap().calls, [call("x")]);
        journal.continues("c", "default", "c-round2");
        assert_eq!(journal.get("c").unwrap().rounds, ["c", "c-round2"]);
        journal.add("d", "default", call(&"x".repeat(JOURNAL_BYTES)));
        assert!(journal.get("c").is_none(), "texts are limited");
        assert_eq!(journal.get("d").unwrap().calls.len(), 1);
    }

    #[test]
    fn a_journal_of_no_requests_stays_empty() {
        let journal = Journal::new(0);
        journal.add("a", "default", call("x"));
        assert!(journal.get("a").is_none());
    }

    #[test]
    fn masked_calls_have_no_texts() {
        let line = serde_json::to_string(&call("secret").masked()).unwrap();
        let expected = r#"{"id":"call_1","name":"files__read","output_bytes":6,"is_error":false,"round":1,"milliseconds":3}"#;
        assert_eq!(line, expected);
    }
}
