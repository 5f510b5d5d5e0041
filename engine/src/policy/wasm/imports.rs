//! What a policy may ask of its host: lines in the log, a small map, the tokenizer, counters, and an
//! end in its own words.
//!
//! Each function as `wit/policy.wit` states it, for all versions of the contract. A hook may make
//! [`HOST_CALLS`] calls, through which [`HOST_BYTES`] may pass: fuel does not count what the host
//! does for a guest. What the map and the tokenizer answered is recorded, and a replay answers the
//! same.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use super::kv::{KEY_BYTES, Kv, Map, Refusal, Space};
use super::{Scene, State};
use crate::config::PolicyConfig;
use crate::policy::{ImportCall, Vocabulary};

/// Most calls of imports in one call of a hook; one more is a failure.
pub const HOST_CALLS: u32 = 1024;

/// Most bytes of arguments and answers of imports in one call of a hook, unless `policy.kv_bytes`
/// is so large that they would not do to read and write it all; more is a failure.
pub const HOST_BYTES: usize = 4 << 20;

/// Most lines of one request in the log.
pub const LINES: u32 = 64;

/// Most bytes of one of them, before control characters are escaped.
pub const LINE_BYTES: usize = 1024;

/// What stands before a guest's own words in a failure.
pub const OWN_WORDS: &str = "failed: ";

/// Most bytes of a text to encode.
pub const ENCODE_BYTES: usize = 64 << 10;

/// Most tokens to decode.
pub const DECODE_TOKENS: usize = 16 << 10;

/// Most counters of one policy.
pub const COUNTERS: usize = 32;

/// Longest name of a counter.
pub const COUNTER_BYTES: usize = 64;

/// Most bytes that pass in one call of a hook.
pub fn host_bytes(limits: &PolicyConfig) -> usize {
    HOST_BYTES.max(limits.kv_bytes.saturating_add(KEY_BYTES).saturating_mul(2))
}

/// What instances of all policies share.
pub struct Services {
    /// What they keep.
    pub kv: Kv,
    /// What they count.
    pub counters: Counters,
}

/// How much a line of the log matters.
#[derive(Debug, Clone, Copy)]
pub enum Level {
    /// For the policy's author.
    Debug,
    /// For the operator.
    Info,
    /// Something that should not be.
    Warn,
}

/// The host, as one instance sees it.
pub struct Imports {
    policy: String,
    request: String,
    services: Arc<Services>,
    vocabulary: Arc<dyn Vocabulary>,
    kept: Kept,
    most_bytes: usize,
    lines: u32,
    /// Of the current call of a hook.
    budget: Budget,
    hook_seen: bool,
    made: Vec<ImportCall>,
}

/// Where `kv` is.
enum Kept {
    /// In the database.
    Real(Space),
    /// In a recording, and in memory what it lacks.
    Recorded { answers: Answers, map: Map, quota: usize },
}

/// Recorded answers by call and arguments, in order.
type Answers = HashMap<(String, Vec<String>), VecDeque<Option<String>>>;

struct Budget {
    calls: u32,
    bytes: usize,
}

impl Imports {
    /// For an instance of `policy` that begins now.
    pub fn new(
        policy: &str,
        scene: &Scene,
        services: &Arc<Services>,
        limits: &PolicyConfig,
    ) -> Self {
        let kept = match &scene.recorded {
            None => Kept::Real(services.kv.space(&scene.profile, policy)),
            Some(calls) => {
                let mut answers = Answers::new();
                for ImportCall { call, arguments, answer } in calls.iter().cloned() {
                    answers.entry((call, arguments)).or_default().push_back(answer);
                }
                Kept::Recorded { answers, map: Map::default(), quota: limits.kv_bytes }
            }
        };
        Self {
            policy: policy.into(),
            request: scene.request.clone(),
            services: services.clone(),
            vocabulary: scene.vocabulary.clone(),
            kept,
            most_bytes: host_bytes(limits),
            lines: 0,
            budget: Budget { calls: 0, bytes: 0 },
            hook_seen: false,
            made: Vec::new(),
        }
    }

    /// A hook is called.
    pub fn begin(&mut self) {
        self.budget = Budget { calls: 0, bytes: 0 };
        // What the start function did is the first hook's: nobody can take it in between.
        if self.hook_seen {
            self.made.clear();
        }
        self.hook_seen = true;
    }

    /// What was asked since the last hook began, and answered.
    pub fn take(&mut self) -> Vec<ImportCall> {
        std::mem::take(&mut self.made)
    }

    fn charge(&mut self, bytes: usize) -> Result<(), String> {
        self.budget.bytes = self.budget.bytes.saturating_add(bytes);
        if self.budget.bytes > self.most_bytes {
            return Err(format!("more than {} bytes passed in one hook", self.most_bytes));
        }
        Ok(())
    }

    fn begin_call(&mut self) -> Result<(), String> {
        self.budget.calls += 1;
        if self.budget.calls > HOST_CALLS {
            return Err(format!("called more than {HOST_CALLS} times in one hook"));
        }
        Ok(())
    }

    /// Writes a line.
    pub fn log(&mut self, level: Level, line: &str) -> Result<(), String> {
        self.charge(line.len())?;
        self.lines = self.lines.saturating_add(1);
        let (policy, request) = (self.policy.as_str(), self.request.as_str());
        if self.lines > LINES {
            if self.lines == LINES + 1 {
                tracing::warn!(target: "policy", policy, request, "more than {LINES} lines; the rest is dropped");
            }
            return Ok(());
        }
        let line = escaped(&line[..line.floor_char_boundary(LINE_BYTES)]);
        match level {
            Level::Debug => tracing::debug!(target: "policy", policy, request, "{line}"),
            Level::Info => tracing::info!(target: "policy", policy, request, "{line}"),
            Level::Warn => tracing::warn!(target: "policy", policy, request, "{line}"),
        }
        Ok(())
    }

    /// The value of a key.
    pub fn get(&mut self, key: String) -> Result<Option<String>, String> {
        self.charge(key.len())?;
        let arguments = vec![key];
        let answer = match (self.recorded("kv.get", &arguments), &self.kept) {
            (Some(answer), _) => answer,
            (None, Kept::Real(space)) => space.get(&arguments[0]),
            (None, Kept::Recorded { map, .. }) => map.get(&arguments[0]).map(str::to_owned),
        };
        self.charge(answer.as_ref().map_or(0, String::len))?;
        self.record("kv.get", arguments, answer.clone());
        Ok(answer)
    }

    /// Sets it.
    pub fn set(&mut self, key: String, value: String) -> Result<Result<(), Refusal>, String> {
        self.charge(key.len().saturating_add(value.len()))?;
        let arguments = vec![key, value];
        let recorded = self.recorded("kv.set", &arguments);
        let [key, value] = &arguments[..] else { unreachable!("two were put there") };
        let mut answer = match &mut self.kept {
            Kept::Real(space) => space.set(key, value.clone())?,
            Kept::Recorded { map, quota, .. } => map.set(key, value.clone(), *quota),
        };
        if let Some(recorded) = recorded {
            answer = match recorded.as_deref() {
                None => Ok(()),
                Some("bad-key") => Err(Refusal::BadKey),
                Some(_) => Err(Refusal::Full),
            };
        }
        let told = answer.err().map(|refusal| match refusal {
            Refusal::BadKey => "bad-key".to_owned(),
            Refusal::Full => "full".to_owned(),
        });
        self.record("kv.set", arguments, told);
        Ok(answer)
    }

    /// Removes it.
    pub fn delete(&mut self, key: String) -> Result<bool, String> {
        self.charge(key.len())?;
        let arguments = vec![key];
        let recorded = self.recorded("kv.delete", &arguments).flatten();
        let deleted = match &mut self.kept {
            Kept::Real(space) => space.delete(&arguments[0])?,
            Kept::Recorded { map, .. } => map.delete(&arguments[0]),
        };
        let deleted = recorded.map_or(deleted, |answer| answer == "true");
        self.record("kv.delete", arguments, Some(deleted.to_string()));
        Ok(deleted)
    }

    /// Tokens of a text.
    pub fn encode(&mut self, text: String) -> Result<Vec<u32>, String> {
        if text.len() > ENCODE_BYTES {
            return Err(format!("the text has more than {ENCODE_BYTES} bytes"));
        }
        self.charge(text.len())?;
        let arguments = vec![text];
        let recorded = self.recorded("tokenizer.encode", &arguments).flatten();
        let tokens = recorded.and_then(|tokens| serde_json::from_str(&tokens).ok());
        let tokens: Vec<u32> = tokens
            .or_else(|| self.vocabulary.encode(&arguments[0]))
            .ok_or("the tokenizer failed")?;
        self.charge(size_of_val(&*tokens))?;
        self.record("tokenizer.encode", arguments, Some(json(&tokens)));
        Ok(tokens)
    }

    /// Text of tokens.
    pub fn decode(&mut self, tokens: &[u32]) -> Result<String, String> {
        if tokens.len() > DECODE_TOKENS {
            return Err(format!("there are more than {DECODE_TOKENS} tokens"));
        }
        self.charge(size_of_val(tokens))?;
        let arguments = vec![json(tokens)];
        let recorded = self.recorded("tokenizer.decode", &arguments).flatten();
        let text = recorded.unwrap_or_else(|| self.vocabulary.decode(tokens));
        self.charge(text.len())?;
        self.record("tokenizer.decode", arguments, Some(text.clone()));
        Ok(text)
    }

    /// Adds to a counter.
    pub fn count(&mut self, name: &str, by: u64) -> Result<(), String> {
        self.charge(name.len())?;
        if matches!(self.kept, Kept::Real(_)) {
            self.services.counters.add(&self.policy, name, by);
        }
        Ok(())
    }

    /// The next recorded answer to such a call, where there is one.
    fn recorded(&mut self, call: &str, arguments: &[String]) -> Option<Option<String>> {
        let Kept::Recorded { answers, .. } = &mut self.kept else { return None };
        answers.get_mut(&(call.to_owned(), arguments.to_vec()))?.pop_front()
    }

    fn record(&mut self, call: &str, arguments: Vec<String>, answer: Option<String>) {
        self.made.push(ImportCall { call: call.into(), arguments, answer });
    }
}

impl State {
    /// Ends the guest in its own words.
    pub fn fail(&mut self, why: &str) -> wasmtime::Error {
        let why = escaped(why[..why.floor_char_boundary(LINE_BYTES)].trim_end());
        let problem = format!("{OWN_WORDS}{why}");
        self.refused = Some(problem.clone());
        wasmtime::Error::msg(problem)
    }

    /// Serves a call of an import. What goes wrong ends the guest.
    pub fn call<T>(
        &mut self,
        call: &str,
        serve: impl FnOnce(&mut Imports) -> Result<T, String>,
    ) -> wasmtime::Result<T> {
        let imports = self.imports.as_mut().expect("made for each component that imports any");
        imports.begin_call().and_then(|()| serve(imports)).map_err(|problem| {
            let problem = format!("{call}: {problem}");
            self.refused = Some(problem.clone());
            wasmtime::Error::msg(problem)
        })
    }
}

/// What policies count, by policy and counter.
#[derive(Default)]
pub struct Counters(Mutex<Counted>);

#[derive(Default)]
struct Counted {
    values: BTreeMap<String, BTreeMap<String, u64>>,
    /// Policies of which something was dropped: the log has it.
    dropped: BTreeSet<String>,
}

impl Counters {
    /// Adds to a counter of `policy`.
    pub fn add(&self, policy: &str, name: &str, by: u64) {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !counted.values.contains_key(policy) {
            counted.values.insert(policy.into(), BTreeMap::new());
        }
        let counters = counted.values.get_mut(policy).expect("inserted above");
        if let Some(value) = counters.get_mut(name) {
            *value = value.saturating_add(by);
            return;
        }
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let named = !name.is_empty() && name.len() <= COUNTER_BYTES && name.chars().all(word);
        if named && counters.len() < COUNTERS {
            counters.insert(name.into(), by);
        } else if counted.dropped.insert(policy.into()) {
            let head = escaped(&name[..name.floor_char_boundary(COUNTER_BYTES)]);
            tracing::warn!(
                target: "policy",
                policy,
                counter = head,
                "dropped: a counter has 1 to {COUNTER_BYTES} letters, digits or `_`, and a policy \
                 at most {COUNTERS}"
            );
        }
    }

    /// Policy, counter and value of all.
    pub fn list(&self) -> Vec<(String, String, u64)> {
        let counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |(policy, counters): (&String, &BTreeMap<String, u64>)| {
            let list = counters.iter().map(|(name, &value)| (policy.clone(), name.clone(), value));
            list.collect::<Vec<_>>()
        };
        counted.values.iter().flat_map(of).collect()
    }
}

/// A text in which no control character is left.
fn escaped(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line
}

fn json(tokens: &[u32]) -> String {
    serde_json::to_string(tokens).expect("numbers become JSON")
}
