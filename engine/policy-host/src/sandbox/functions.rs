//! The functions of the imports: failure, log, kv, tokenizer and counters.
//!
//! `wit/policy.wit` documents each of them.

use serde::Serialize;

use super::failure::{escaped, message_line};
use super::imports::KvMap;
use super::state::State;
use crate::contract::bindings::steersman::policy::kv::{AddRefusal, Refusal};
use crate::contract::bindings::steersman::policy::log::Level;
use crate::contract::bindings::steersman::policy::{counters, failure, kv, log, tokenizer};
use crate::error::Cause;
use crate::kv as maps;

/// Lines of one request in the log.
const MAX_LINES: u32 = 64;

/// Bytes of a line or message, before control characters are escaped.
const LINE_BYTES: usize = 1024;

/// Bytes of a text to encode.
const ENCODE_BYTES: usize = 64 << 10;

/// Tokens to decode.
const DECODE_TOKENS: usize = 16 << 10;

impl failure::Host for State {
    fn fail(&mut self, message: String) -> wasmtime::Result<()> {
        let message = &message[..message.floor_char_boundary(LINE_BYTES)];
        Err(self.fail(Cause::Message(message_line(message))))
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

fn json<T: Serialize>(list: &[T]) -> String {
    serde_json::to_string(list).expect("numbers and texts become JSON")
}
