//! The imports of one instance: what they may use, and the record of their calls.
//!
//! Fuel does not count the work of the host, so a call of a hook may use imports
//! [`MAX_IMPORT_CALLS`] times and pass [`PASSED_BYTES`] through them. Results of kv and tokenizer
//! are recorded, and a replay returns the same.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::context::Context;
use super::counters::Counters;
use crate::config::PolicyConfig;
use crate::contract::{ImportCall, Vocabulary};
use crate::kv::{self as maps, KEY_BYTES, Kv, Map, Space};

/// Uses of imports in one call of a hook; one more is a failure.
const MAX_IMPORT_CALLS: u32 = 1024;

/// Bytes of arguments and results of imports in one call of a hook; more is a failure. The limit is
/// higher if `policy.kv_bytes` is so large that reading and writing all of it would exceed it.
const PASSED_BYTES: usize = 4 << 20;

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
    /// Name of the policy.
    pub policy: String,
    /// Request id.
    pub request: String,
    /// The services of all policies.
    pub services: Arc<Services>,
    /// The tokenizer.
    pub vocabulary: Arc<dyn Vocabulary>,
    /// The values of `kv`.
    pub map: KvMap,
    /// Lines written to the log.
    pub lines: u32,
    max_bytes: usize,
    /// Uses, and bytes passed, in the current call of a hook.
    used: (u32, usize),
    hook_seen: bool,
    calls: Vec<ImportCall>,
}

/// The map behind `kv`.
pub enum KvMap {
    /// In the database.
    Stored(Space),
    /// A recording; calls that it lacks use a map in memory.
    Recorded { answers: Answers, map: Map, quota: usize },
}

/// Recorded results by call and arguments, in order.
pub type Answers = HashMap<(String, Vec<String>), VecDeque<Option<String>>>;

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
        // Calls of the start function are reported with the first call: nobody can take them
        // before.
        if self.hook_seen {
            self.calls.clear();
        }
        self.hook_seen = true;
    }

    /// Import calls since the last [`Self::begin`].
    pub fn take(&mut self) -> Vec<ImportCall> {
        std::mem::take(&mut self.calls)
    }

    /// Counts bytes that pass through an import.
    ///
    /// # Errors
    /// The limit, if they exceed it.
    pub fn charge(&mut self, bytes: usize) -> Result<(), String> {
        self.used.1 = self.used.1.saturating_add(bytes);
        if self.used.1 > self.max_bytes {
            return Err(format!(
                "passed more than {} bytes through imports in one call",
                self.max_bytes
            ));
        }
        Ok(())
    }

    /// Counts the use of an import.
    ///
    /// # Errors
    /// The limit, if it is exceeded.
    pub fn begin_call(&mut self) -> Result<(), String> {
        self.used.0 += 1;
        if self.used.0 > MAX_IMPORT_CALLS {
            return Err(format!("used imports more than {MAX_IMPORT_CALLS} times in one call"));
        }
        Ok(())
    }

    /// The next recorded answer to this call, if there is one.
    pub fn recorded(&mut self, call: &str, arguments: &[String]) -> Option<Option<String>> {
        let KvMap::Recorded { answers, .. } = &mut self.map else { return None };
        answers.get_mut(&(call.to_owned(), arguments.to_vec()))?.pop_front()
    }

    /// Records a call with its result.
    pub fn record(&mut self, call: &str, arguments: Vec<String>, answer: Option<String>) {
        self.calls.push(ImportCall { call: call.into(), arguments, answer });
    }
}
