//! The imports of the contract: log, kv, tokenizer, counters and failure.
//!
//! `wit/policy.wit` documents each function. Fuel does not count the work of the host, so a call of a
//! hook may use imports [`MAX_IMPORT_CALLS`] times and pass [`PASSED_BYTES`] through them. Results of
//! kv and tokenizer are recorded, and a replay returns the same.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

use super::{Context, State};
use crate::config::PolicyConfig;
use crate::contract::bindings::steersman::policy::kv::{AddRefusal, Refusal};
use crate::contract::bindings::steersman::policy::log::Level;
use crate::contract::bindings::steersman::policy::{counters, failure, kv, log, tokenizer};
use crate::contract::{ImportCall, Vocabulary};
use crate::error::Cause;
use crate::kv::{self as maps, KEY_BYTES, Kv, Map, Space};

/// Uses of imports in one call of a hook; one more is a failure.
const MAX_IMPORT_CALLS: u32 = 1024;

/// Bytes of arguments and results of imports in one call of a hook; more is a failure. The limit is
/// higher if `policy.kv_bytes` is so large that reading and writing all of it would exceed it.
const PASSED_BYTES: usize = 4 << 20;

/// Lines of one request in the log.
const MAX_LINES: u32 = 64;

/// Bytes of a line or message, before control characters are escaped.
const LINE_BYTES: usize = 1024;

/// Bytes of a text to encode.
const ENCODE_BYTES: usize = 64 << 10;

/// Tokens to decode.
const DECODE_TOKENS: usize = 16 << 10;

/// Counters of one policy.
const MAX_COUNTERS: usize = 32;

/// Bytes of the name of a counter.
const COUNTER_BYTES: usize = 64;

/// Bytes that may pass through imports in one call of a hook.
pub fn passed_bytes(limits: &PolicyConfig) -> usize {
    PASSED_BYTES.max(limits.kv_bytes.saturating_add(KEY_BYTES).saturating_mul(2))
}

/// Shared by the instances of all policies.
pub struct Services {
    /// `kv` values.
    pub kv: Kv,
    /// Counters.
    pub counters: Counters,
}

/// In place of the name of a call: a key and a value that a recording begins with.
pub const GIVEN_KV: &str = "kv.given";

/// The imports of one instance.
pub struct Imports {
    policy: String,
    request: String,
    services: Arc<Services>,
    vocabulary: Arc<dyn Vocabulary>,
    map: KvMap,
    max_bytes: usize,
    lines: u32,
    /// Uses, and bytes passed, in the current call of a hook.
    used: (u32, usize),
    hook_seen: bool,
    calls: Vec<ImportCall>,
}

/// The map behind `kv`.
enum KvMap {
    /// In the database.
    Stored(Space),
    /// A recording; calls that it lacks use a map in memory.
    Recorded { answers: Answers, map: Map, quota: usize },
}

/// Recorded results by call and arguments, in order.
type Answers = HashMap<(String, Vec<String>), VecDeque<Option<String>>>;

impl Imports {
    /// Imports of a new instance of `policy`.
    pub fn new(
        policy: &str,
        context: &Context,
        services: &Arc<Services>,
        limits: &PolicyConfig,
    ) -> Self {
        let map = match &context.recorded {
            None => KvMap::Stored(services.kv.space(&context.profile, policy)),
            Some(calls) => {
                let (mut answers, mut map) = (Answers::new(), Map::default());
                let quota = limits.kv_bytes;
                for ImportCall { call, arguments, answer } in calls.iter().cloned() {
                    match (call.as_str(), &arguments[..], answer) {
                        // What does not fit is missing, as in a server.
                        (GIVEN_KV, [key], Some(value)) => {
                            let _ = map.set(key, value, quota, maps::now());
                        }
                        (_, _, answer) => {
                            answers.entry((call, arguments)).or_default().push_back(answer);
                        }
                    }
                }
                KvMap::Recorded { answers, map, quota }
            }
        };
        Self {
            policy: policy.into(),
            request: context.request.clone(),
            services: services.clone(),
            vocabulary: context.vocabulary.clone(),
            map,
            max_bytes: passed_bytes(limits),
            lines: 0,
            used: (0, 0),
            hook_seen: false,
            calls: Vec::new(),
        }
    }

    /// Resets the limits at the beginning of a call.
    pub fn begin(&mut self) {
        self.used = (0, 0);
        // Calls of the start function are reported with the first call: nobody can take them before.
        if self.hook_seen {
            self.calls.clear();
        }
        self.hook_seen = true;
    }

    /// Import calls since the last [`Self::begin`].
    pub fn take(&mut self) -> Vec<ImportCall> {
        std::mem::take(&mut self.calls)
    }

    fn charge(&mut self, bytes: usize) -> Result<(), String> {
        self.used.1 = self.used.1.saturating_add(bytes);
        if self.used.1 > self.max_bytes {
            return Err(format!(
                "passed more than {} bytes through imports in one call",
                self.max_bytes
            ));
        }
        Ok(())
    }

    fn begin_call(&mut self) -> Result<(), String> {
        self.used.0 += 1;
        if self.used.0 > MAX_IMPORT_CALLS {
            return Err(format!("used imports more than {MAX_IMPORT_CALLS} times in one call"));
        }
        Ok(())
    }

    /// The next recorded answer to this call, if there is one.
    fn recorded(&mut self, call: &str, arguments: &[String]) -> Option<Option<String>> {
        let KvMap::Recorded { answers, .. } = &mut self.map else { return None };
        answers.get_mut(&(call.to_owned(), arguments.to_vec()))?.pop_front()
    }

    fn record(&mut self, call: &str, arguments: Vec<String>, answer: Option<String>) {
        self.calls.push(ImportCall { call: call.into(), arguments, answer });
    }
}

impl State {
    /// Serves the use of an import. An error ends the guest.
    fn serve<T>(
        &mut self,
        call: &str,
        serve: impl FnOnce(&mut Imports) -> Result<T, String>,
    ) -> wasmtime::Result<T> {
        let imports = self.imports.as_mut().expect("components with imports have them");
        imports
            .begin_call()
            .and_then(|()| serve(imports))
            .map_err(|problem| self.fail(Cause::Limit(format!("{call}: {problem}"))))
    }
}

impl failure::Host for State {
    fn fail(&mut self, message: String) -> wasmtime::Result<()> {
        let message = message[..message.floor_char_boundary(LINE_BYTES)].trim_end();
        Err(self.fail(Cause::Message(escaped(message))))
    }
}

impl log::Host for State {
    fn write(&mut self, level: Level, line: String) -> wasmtime::Result<()> {
        self.serve("log.write", |imports| {
            imports.charge(line.len())?;
            imports.lines = imports.lines.saturating_add(1);
            let (policy, request) = (imports.policy.as_str(), imports.request.as_str());
            if imports.lines > MAX_LINES {
                if imports.lines == MAX_LINES + 1 {
                    tracing::warn!(target: "policy", policy, request, "more than {MAX_LINES} lines; further lines are dropped");
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
        })
    }
}

impl kv::Host for State {
    fn get(&mut self, key: String) -> wasmtime::Result<Option<String>> {
        self.serve("kv.get", |imports| {
            imports.charge(key.len())?;
            let arguments = vec![key];
            let answer = match (imports.recorded("kv.get", &arguments), &imports.map) {
                (Some(answer), _) => answer,
                (None, KvMap::Stored(space)) => space.get(&arguments[0]),
                (None, KvMap::Recorded { map, .. }) => {
                    map.get(&arguments[0], maps::now()).map(str::to_owned)
                }
            };
            imports.charge(answer.as_ref().map_or(0, String::len))?;
            imports.record("kv.get", arguments, answer.clone());
            Ok(answer)
        })
    }

    fn set(&mut self, key: String, value: String) -> wasmtime::Result<Result<(), Refusal>> {
        self.serve("kv.set", |imports| {
            imports.charge(key.len().saturating_add(value.len()))?;
            let made = match &mut imports.map {
                KvMap::Stored(space) => space.set(&key, value.clone())?,
                KvMap::Recorded { map, quota, .. } => {
                    map.set(&key, value.clone(), *quota, maps::now())
                }
            };
            let arguments = vec![key, value];
            let answer = match imports.recorded("kv.set", &arguments).as_ref().map(Option::as_deref)
            {
                None => made,
                Some(None) => Ok(()),
                Some(Some("bad-key")) => Err(Refusal::BadKey),
                Some(Some(_)) => Err(Refusal::Full),
            };
            let refusal = answer.err().map(|refusal| match refusal {
                Refusal::BadKey => "bad-key".to_owned(),
                Refusal::Full => "full".to_owned(),
            });
            imports.record("kv.set", arguments, refusal);
            Ok(answer)
        })
    }

    fn delete(&mut self, key: String) -> wasmtime::Result<bool> {
        self.serve("kv.delete", |imports| {
            imports.charge(key.len())?;
            let deleted = match &mut imports.map {
                KvMap::Stored(space) => space.delete(&key)?,
                KvMap::Recorded { map, .. } => map.delete(&key, maps::now()),
            };
            let arguments = vec![key];
            let recorded = imports.recorded("kv.delete", &arguments).flatten();
            let deleted = recorded.map_or(deleted, |answer| answer == "true");
            imports.record("kv.delete", arguments, Some(deleted.to_string()));
            Ok(deleted)
        })
    }

    fn add(&mut self, key: String, by: i64) -> wasmtime::Result<Result<i64, AddRefusal>> {
        self.serve("kv.add", |imports| {
            imports.charge(key.len())?;
            let made = match &mut imports.map {
                KvMap::Stored(space) => space.add(&key, by)?,
                KvMap::Recorded { map, quota, .. } => map.add(&key, by, *quota, maps::now()),
            };
            let arguments = vec![key, by.to_string()];
            let answer = match imports.recorded("kv.add", &arguments).flatten().as_deref() {
                None => made,
                Some("bad-key") => Err(AddRefusal::BadKey),
                Some("full") => Err(AddRefusal::Full),
                Some(sum) => sum.parse().map_err(|_| AddRefusal::NotANumber),
            };
            let text = match answer {
                Ok(sum) => sum.to_string(),
                Err(AddRefusal::BadKey) => "bad-key".into(),
                Err(AddRefusal::Full) => "full".into(),
                Err(AddRefusal::NotANumber) => "not-a-number".into(),
            };
            imports.record("kv.add", arguments, Some(text));
            Ok(answer)
        })
    }

    fn expire(&mut self, key: String, seconds: u32) -> wasmtime::Result<bool> {
        self.serve("kv.expire", |imports| {
            imports.charge(key.len())?;
            let made = match &mut imports.map {
                KvMap::Stored(space) => space.expire(&key, seconds)?,
                KvMap::Recorded { map, .. } => map.expire(&key, seconds, maps::now()),
            };
            let arguments = vec![key, seconds.to_string()];
            let recorded = imports.recorded("kv.expire", &arguments).flatten();
            let exists = recorded.map_or(made, |answer| answer == "true");
            imports.record("kv.expire", arguments, Some(exists.to_string()));
            Ok(exists)
        })
    }

    fn list(&mut self, prefix: String, after: String, limit: u32) -> wasmtime::Result<Vec<String>> {
        self.serve("kv.list", |imports| {
            imports.charge(prefix.len().saturating_add(after.len()))?;
            let made = match &imports.map {
                KvMap::Stored(space) => space.list(&prefix, &after, limit as usize),
                KvMap::Recorded { map, .. } => {
                    map.list(&prefix, &after, limit as usize, maps::now())
                }
            };
            let arguments = vec![prefix, after, limit.to_string()];
            let recorded = imports.recorded("kv.list", &arguments).flatten();
            let recorded = recorded.and_then(|keys| serde_json::from_str(&keys).ok());
            let keys: Vec<String> = recorded.unwrap_or(made);
            imports.charge(keys.iter().map(String::len).sum::<usize>() + size_of_val(&*keys))?;
            imports.record("kv.list", arguments, Some(json(&keys)));
            Ok(keys)
        })
    }
}

impl tokenizer::Host for State {
    fn encode(&mut self, text: String) -> wasmtime::Result<Vec<u32>> {
        self.serve("tokenizer.encode", |imports| {
            if text.len() > ENCODE_BYTES {
                return Err(format!("text of more than {ENCODE_BYTES} bytes"));
            }
            imports.charge(text.len())?;
            let arguments = vec![text];
            let recorded = imports.recorded("tokenizer.encode", &arguments).flatten();
            let tokens = recorded.and_then(|tokens| serde_json::from_str(&tokens).ok());
            let tokens: Vec<u32> = tokens
                .or_else(|| imports.vocabulary.encode(&arguments[0]))
                .ok_or("the tokenizer failed")?;
            imports.charge(size_of_val(&*tokens))?;
            imports.record("tokenizer.encode", arguments, Some(json(&tokens)));
            Ok(tokens)
        })
    }

    fn decode(&mut self, tokens: Vec<u32>) -> wasmtime::Result<String> {
        self.serve("tokenizer.decode", |imports| {
            if tokens.len() > DECODE_TOKENS {
                return Err(format!("more than {DECODE_TOKENS} tokens"));
            }
            imports.charge(size_of_val(&*tokens))?;
            let arguments = vec![json(&tokens)];
            let recorded = imports.recorded("tokenizer.decode", &arguments).flatten();
            let text = recorded.unwrap_or_else(|| imports.vocabulary.decode(&tokens));
            imports.charge(text.len())?;
            imports.record("tokenizer.decode", arguments, Some(text.clone()));
            Ok(text)
        })
    }
}

impl counters::Host for State {
    fn add(&mut self, name: String, by: u64) -> wasmtime::Result<()> {
        self.serve("counters.add", |imports| {
            imports.charge(name.len())?;
            if matches!(imports.map, KvMap::Stored(_)) {
                imports.services.counters.add(&imports.policy, &name, by);
            }
            Ok(())
        })
    }
}

/// Counters by policy and name.
#[derive(Default)]
pub struct Counters(Mutex<BTreeMap<String, PolicyCounters>>);

#[derive(Default)]
struct PolicyCounters {
    values: BTreeMap<String, u64>,
    /// Whether a call was dropped, which is reported once.
    dropped: bool,
}

impl Counters {
    /// Adds to a counter of `policy`.
    pub fn add(&self, policy: &str, name: &str, by: u64) {
        let mut all = self.0.lock();
        let counters = all.entry(policy.into()).or_default();
        if let Some(value) = counters.values.get_mut(name) {
            *value = value.saturating_add(by);
            return;
        }
        let is_valid = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let valid = (1..=COUNTER_BYTES).contains(&name.len()) && name.chars().all(is_valid);
        if valid && counters.values.len() < MAX_COUNTERS {
            counters.values.insert(name.into(), by);
        } else if !std::mem::replace(&mut counters.dropped, true) {
            let head = escaped(&name[..name.floor_char_boundary(COUNTER_BYTES)]);
            tracing::warn!(
                target: "policy",
                policy,
                counter = head,
                "counter dropped: a name has 1 to {COUNTER_BYTES} letters, digits or `_`, a policy \
                 at most {MAX_COUNTERS} counters"
            );
        }
    }

    /// Policy, counter and value; sorted.
    pub fn list(&self) -> Vec<(String, String, u64)> {
        let all = self.0.lock();
        let each =
            all.iter().flat_map(|(policy, of)| of.values.iter().map(move |one| (policy, one)));
        each.map(|(policy, (name, value))| (policy.clone(), name.clone(), *value)).collect()
    }
}

/// Escapes control characters.
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

fn json<T: Serialize>(list: &[T]) -> String {
    serde_json::to_string(list).expect("numbers and texts become JSON")
}
