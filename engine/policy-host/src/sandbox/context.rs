//! The request that an instance serves, or the dry run.

use std::sync::Arc;

use super::ticker::Deadline;
use crate::config::PolicyConfig;
use crate::contract::{ImportCall, Vocabulary, no_vocabulary};

/// Shortest deadline of a call in a dry run. Fuel limits what the guest computes; the time it takes
/// on a busy machine says nothing about the policy.
const DRY_RUN_DEADLINE_MS: u64 = 10_000;

/// The request of an instance.
#[derive(Clone)]
pub struct Context {
    /// Request id.
    pub request: String,
    /// Profile of the request: together with the name of the policy, the namespace of `kv`.
    pub profile: String,
    /// Tokenizer of the served model.
    pub vocabulary: Arc<dyn Vocabulary>,
    /// `None` for a real request. In a dry run, recorded results of imports, which are returned
    /// again. Calls that are not recorded use an empty map in memory and `vocabulary`. Nothing is
    /// stored, logged or counted.
    pub recorded: Option<Arc<[ImportCall]>>,
}

impl Context {
    /// A dry run without a request, a model or recorded results.
    pub fn dry_run() -> Self {
        Self {
            request: String::new(),
            profile: String::new(),
            vocabulary: no_vocabulary(),
            recorded: Some(Arc::default()),
        }
    }

    /// The time limit of each call, in ticks of a host with these limits.
    pub(super) fn deadline(&self, limits: &PolicyConfig) -> Deadline {
        let least = if self.recorded.is_some() { DRY_RUN_DEADLINE_MS } else { 0 };
        Deadline::new(limits.deadline_ms.max(least), limits.deadline_ms)
    }
}
