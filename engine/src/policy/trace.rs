//! Records what policies decide: every call of a hook, of every policy, with what it cost.
//!
//! On the decode thread a call is copied as the plain values that it is ([`Exchange`]); JSON is made of
//! it when somebody asks, or on the thread that writes the file. The calls of the newest requests are
//! in memory, bounded three times over: in requests (`policy.trace_requests`), in calls of one request
//! ([`RECORDS`]) and in bytes of all ([`BYTES`]), of which the oldest requests go first. The file
//! (`policy.trace_file`) gets the same, [`CHUNK`] calls at a time.
//!
//! Unless its profile sets `trace_text` a request is masked ([`mask`]): texts and tokens are empty, and
//! [`Record::masked`] has their lengths.
//!
//! # Why
//! A recorded line is a line of a golden file ([`super::golden`]): what happened once can be asked
//! again, of the same policy or of another, without a model. Plain values, since JSON would cost more than
//! the call: with them a step of the default policy takes 0.91 us instead of 0.78 us at the median, chain
//! and guard included (two x86-64 cores; `cost_of_a_step_of_the_whole_path` in tests/tests/replay.rs
//! repeats it).

mod file;
mod mask;
mod record;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::chain::Link;
use super::{Cost, ImportCall};
use crate::config::PolicyConfig;
use crate::error::Result;
use file::{Batch, Writer};
pub use mask::Lengths;
pub use record::{Call, Exchange, Hook, Record};

/// Most recorded calls of one request; `on-finish` is recorded all the same.
pub const RECORDS: usize = 16_384;

/// Most bytes in memory of all recorded calls.
pub const BYTES: usize = 64 << 20;

/// Calls that go to the file together, so that its thread is not woken for every one. What a request
/// still collects goes at its end.
pub const CHUNK: usize = 64;

/// The decisions of the newest requests.
pub struct Traces {
    requests: usize,
    newest: Mutex<VecDeque<Arc<Traced>>>,
    bytes: AtomicUsize,
    writer: Option<Writer>,
}

impl Traces {
    /// Remembers as the configuration says.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when the trace file cannot be opened.
    pub fn new(config: &PolicyConfig) -> Result<Arc<Self>> {
        let file = &config.trace_file;
        let writer = (!file.as_os_str().is_empty()).then(|| Writer::open(file)).transpose()?;
        Ok(Arc::new(Self {
            requests: config.trace_requests,
            newest: Mutex::default(),
            bytes: AtomicUsize::new(0),
            writer,
        }))
    }

    /// Records the decisions of one request; with texts and tokens where `text` says so.
    pub fn recorder(self: &Arc<Self>, request: &str, profile: &str, text: bool) -> Recorder {
        if self.requests == 0 && self.writer.is_none() {
            return Recorder::off();
        }
        let traced = Traced {
            request: request.into(),
            profile: profile.into(),
            text,
            policies: Vec::new(),
            calls: Mutex::default(),
        };
        Recorder(Some(At { traces: self.clone(), traced: Arc::new(traced) }))
    }

    /// What is recorded of a request, in order; of several with this name the newest. `None` where
    /// nothing is, or no longer.
    pub fn get(&self, request: &str) -> Option<Vec<Record>> {
        let newest = lock(&self.newest);
        let traced = newest.iter().rev().find(|traced| traced.request == request)?.clone();
        drop(newest);
        let calls = lock(&traced.calls);
        let entries = calls.chunks.iter().flat_map(|chunk| chunk.iter()).chain(&calls.open);
        let mut records: Vec<_> = entries.map(|entry| traced.record(entry)).collect();
        if let Some(last) = records.last_mut() {
            last.dropped = calls.dropped;
        }
        Some(records)
    }

    /// Room for a request that begins.
    fn add(&self, traced: Arc<Traced>) {
        let mut newest = lock(&self.newest);
        newest.push_back(traced);
        while newest.len() > self.requests {
            self.forget(&mut newest);
        }
    }

    fn forget_oldest(&self) {
        let mut newest = lock(&self.newest);
        while self.bytes.load(Ordering::Relaxed) > BYTES && !newest.is_empty() {
            self.forget(&mut newest);
        }
    }

    fn forget(&self, newest: &mut VecDeque<Arc<Traced>>) {
        let Some(oldest) = newest.pop_front() else { return };
        let mut calls = lock(&oldest.calls);
        calls.forgotten = true;
        calls.chunks.clear();
        self.bytes.fetch_sub(std::mem::take(&mut calls.bytes), Ordering::Relaxed);
    }
}

/// A request whose calls are recorded.
struct Traced {
    request: String,
    profile: String,
    text: bool,
    policies: Vec<Recorded>,
    calls: Mutex<Calls>,
}

/// A link of the request's chain.
struct Recorded {
    name: String,
    sha256: String,
    shadow: bool,
}

#[derive(Default)]
struct Calls {
    /// Full, and shared with the file's thread.
    chunks: Vec<Arc<Vec<Entry>>>,
    /// At most [`CHUNK`].
    open: Vec<Entry>,
    count: usize,
    bytes: usize,
    dropped: u64,
    /// No longer in memory; what comes still goes to the file.
    forgotten: bool,
}

/// A call of a hook.
struct Entry {
    link: usize,
    call: Call,
    outcome: Outcome,
    masked: Option<Lengths>,
}

/// What a call came to, apart from its answer.
pub struct Outcome {
    /// What failed.
    pub error: Option<String>,
    /// Whether the policy has failed, here or before: then the native policy answered, or nobody.
    pub replaced: bool,
    /// What it took.
    pub cost: Cost,
    /// What the host answered meanwhile.
    pub imports: Vec<ImportCall>,
}

impl Traced {
    fn record(&self, entry: &Entry) -> Record {
        let Recorded { name, sha256, shadow } = &self.policies[entry.link];
        let Outcome { error, replaced, cost, imports } = &entry.outcome;
        Record {
            request: self.request.clone(),
            profile: self.profile.clone(),
            policy: name.clone(),
            sha256: sha256.clone(),
            link: entry.link,
            shadow: *shadow,
            call: entry.call.clone(),
            error: error.clone(),
            replaced: *replaced,
            masked: entry.masked.clone(),
            fuel: cost.fuel,
            nanoseconds: cost.nanoseconds,
            imports: imports.clone(),
            dropped: 0,
        }
    }
}

/// Records the decisions of one request.
pub struct Recorder(Option<At>);

struct At {
    traces: Arc<Traces>,
    traced: Arc<Traced>,
}

impl Recorder {
    /// Records nothing.
    pub fn off() -> Self {
        Self(None)
    }

    /// The chain begins, with these links.
    pub(super) fn links(&mut self, links: &[Link]) {
        let Some(At { traces, traced }) = &mut self.0 else { return };
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let recorded = |link: &Link| Recorded {
            name: link.name.clone(),
            sha256: hex(&link.sha256),
            shadow: link.shadow,
        };
        let unshared = Arc::get_mut(traced).expect("it is shared from here on");
        unshared.policies = links.iter().map(recorded).collect();
        traces.add(traced.clone());
    }

    /// Link `link` was asked and has answered.
    pub(super) fn record(&self, link: usize, exchange: Exchange<'_, '_>, mut outcome: Outcome) {
        let Some(At { traces, traced }) = &self.0 else { return };
        let mut calls = lock(&traced.calls);
        if calls.count >= RECORDS && !matches!(exchange, Exchange::Finish(_)) {
            calls.dropped += 1;
            return;
        }
        if calls.forgotten && traces.writer.is_none() {
            return;
        }
        let (call, masked) = if traced.text {
            (exchange.copy(), None)
        } else {
            let mut lengths = Lengths::default();
            let call = exchange.mask(&mut lengths);
            mask::imports(&mut outcome.imports, &mut lengths);
            mask::error(&mut outcome.error, &mut lengths);
            (call, Some(lengths))
        };
        let entry = Entry { link, call, outcome, masked };
        let bytes = if calls.forgotten { 0 } else { entry.bytes() };
        calls.count += 1;
        calls.bytes += bytes;
        calls.open.push(entry);
        if calls.open.len() == CHUNK {
            traced.close(&mut calls, traces, 0);
        }
        // Before the lock is given back: who forgets this request subtracts what was added.
        let all = traces.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        drop(calls);
        if all > BYTES {
            traces.forget_oldest();
        }
    }

    /// The request has ended.
    pub(super) fn finish(&mut self) {
        let Some(At { traces, traced }) = self.0.take() else { return };
        let mut calls = lock(&traced.calls);
        let dropped = calls.dropped;
        traced.close(&mut calls, &traces, dropped);
    }
}

impl Drop for Recorder {
    /// A request that never began has an end, too.
    fn drop(&mut self) {
        self.finish();
    }
}

impl Traced {
    /// Closes the open chunk, and gives it to the file.
    fn close(self: &Arc<Self>, calls: &mut Calls, traces: &Traces, dropped: u64) {
        let chunk = Arc::new(std::mem::take(&mut calls.open));
        if chunk.is_empty() {
            return;
        }
        if !calls.forgotten {
            calls.chunks.push(chunk.clone());
        }
        if let Some(writer) = &traces.writer {
            writer.write(Batch { traced: self.clone(), chunk, dropped });
        }
    }
}

impl Entry {
    /// About what it takes in memory.
    fn bytes(&self) -> usize {
        let import = |call: &ImportCall| {
            let texts = call.arguments.iter().chain(&call.answer);
            call.call.len() + texts.map(|text| text.len() + size_of::<String>()).sum::<usize>()
        };
        size_of::<Self>()
            + self.call.bytes()
            + self.outcome.error.as_ref().map_or(0, String::len)
            + self.outcome.imports.iter().map(import).sum::<usize>()
            + self.masked.as_ref().map_or(0, Lengths::bytes)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing can panic between two changes of what these hold, so it is whole even when poisoned.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
