//! Records every call of every policy, with its answer and cost.
//!
//! The decode thread copies a call and its answer; JSON is generated when it is requested, or on the
//! thread that writes the file. Memory holds the newest requests, with three limits: requests
//! (`policy.trace_requests`), calls of one request ([`MAX_RECORDS`]) and bytes of all
//! ([`MEMORY_BYTES`]); the oldest requests are evicted first. The file (`policy.trace_file`) receives the
//! same records, [`CHUNK`] at a time.
//!
//! Unless its profile sets `trace_text`, a record is masked when it is serialized ([`mask`]).
//!
//! # Why
//! A record is a line of a golden file ([`crate::golden`]), so a trace can be replayed against the same
//! policy or another one, without a model. Calls are recorded as values: serializing them would cost
//! more than the call itself.

mod file;
mod mask;
mod record;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde::Serialize;

use crate::chain::Link;
use crate::config::PolicyConfig;
use crate::contract::{Answer, Call, Cost, ImportCall};
use crate::error::{Error, Failure};
use file::{Batch, Writer};
pub use record::Record;

/// Recorded calls of one request; `on-finish` is recorded in any case.
const MAX_RECORDS: usize = 16_384;

/// Bytes in memory of all recorded calls.
const MEMORY_BYTES: usize = 64 << 20;

/// Calls that are written to the file together, so that its thread wakes up rarely.
const CHUNK: usize = 64;

/// Traces of the newest requests.
pub struct Traces {
    requests: usize,
    newest: Mutex<VecDeque<Arc<TracedRequest>>>,
    bytes: AtomicUsize,
    writer: Option<Writer>,
}

impl Traces {
    /// Opens the trace file, if one is configured.
    ///
    /// # Errors
    /// [`Error::Config`] if it cannot be opened.
    pub fn new(config: &PolicyConfig) -> Result<Arc<Self>, Error> {
        let file = &config.trace_file;
        let writer = (!file.as_os_str().is_empty()).then(|| Writer::open(file)).transpose()?;
        Ok(Arc::new(Self {
            requests: config.trace_requests,
            newest: Mutex::default(),
            bytes: AtomicUsize::new(0),
            writer,
        }))
    }

    /// A recorder for one request. `text` disables masking.
    pub fn recorder(self: &Arc<Self>, request: &str, profile: &str, text: bool) -> Recorder {
        if self.requests == 0 && self.writer.is_none() {
            return Recorder::off();
        }
        let traced = TracedRequest {
            request: request.into(),
            profile: profile.into(),
            masked: !text,
            policies: Vec::new(),
            calls: Mutex::default(),
        };
        Recorder(Some(Active { traces: self.clone(), traced: Arc::new(traced) }))
    }

    /// The records of a request, in order; the newest request if several have this id. `None` if there
    /// are none, or if they were evicted.
    pub fn get(&self, request: &str) -> Option<Vec<Record>> {
        let newest = self.newest.lock();
        let traced = newest.iter().rev().find(|traced| traced.request == request)?.clone();
        drop(newest);
        let calls = traced.calls.lock();
        let entries = calls.chunks.iter().flat_map(|chunk| chunk.iter()).chain(&calls.open);
        let mut records: Vec<_> = entries.map(|entry| traced.record(entry)).collect();
        if let Some(last) = records.last_mut() {
            last.dropped = calls.dropped;
        }
        Some(records)
    }

    fn add(&self, traced: Arc<TracedRequest>) {
        let mut newest = self.newest.lock();
        newest.push_back(traced);
        while newest.len() > self.requests {
            self.evict_oldest(&mut newest);
        }
    }

    fn evict_to_limit(&self) {
        let mut newest = self.newest.lock();
        while self.bytes.load(Ordering::Relaxed) > MEMORY_BYTES && !newest.is_empty() {
            self.evict_oldest(&mut newest);
        }
    }

    fn evict_oldest(&self, newest: &mut VecDeque<Arc<TracedRequest>>) {
        let Some(oldest) = newest.pop_front() else { return };
        let mut calls = oldest.calls.lock();
        calls.evicted = true;
        calls.chunks.clear();
        self.bytes.fetch_sub(std::mem::take(&mut calls.bytes), Ordering::Relaxed);
    }
}

/// The trace of one request.
struct TracedRequest {
    request: String,
    profile: String,
    masked: bool,
    policies: Vec<TracedPolicy>,
    calls: Mutex<Calls>,
}

struct TracedPolicy {
    name: String,
    sha256: String,
    shadow: bool,
}

#[derive(Default)]
struct Calls {
    /// Full chunks, shared with the thread of the file.
    chunks: Vec<Arc<Vec<Entry>>>,
    /// At most [`CHUNK`] entries.
    open: Vec<Entry>,
    count: usize,
    bytes: usize,
    dropped: u64,
    /// Evicted from memory; further calls go to the file only.
    evicted: bool,
}

struct Entry {
    link: usize,
    call: Call<'static>,
    answer: Option<Answer>,
    outcome: Outcome,
}

/// The outcome of a call, apart from its answer.
pub struct Outcome {
    /// The failure.
    pub failure: Option<Failure>,
    /// Whether the policy has failed, in this call or an earlier one.
    pub replaced: bool,
    /// Fuel and time.
    pub cost: Cost,
    /// Uses of imports.
    pub imports: Vec<ImportCall>,
}

impl TracedRequest {
    fn record(&self, entry: &Entry) -> Record {
        let TracedPolicy { name, sha256, shadow } = &self.policies[entry.link];
        let Outcome { failure, replaced, cost, imports } = &entry.outcome;
        Record {
            request: self.request.clone(),
            profile: self.profile.clone(),
            policy: name.clone(),
            sha256: sha256.clone(),
            link: entry.link,
            shadow: *shadow,
            call: entry.call.clone(),
            answer: entry.answer.clone(),
            failure: failure.clone(),
            replaced: *replaced,
            masked: self.masked,
            cost: *cost,
            imports: imports.clone(),
            dropped: 0,
        }
    }

    /// Closes the open chunk and sends it to the file.
    fn close_chunk(self: &Arc<Self>, calls: &mut Calls, traces: &Traces, dropped: u64) {
        let chunk = Arc::new(std::mem::take(&mut calls.open));
        if chunk.is_empty() {
            return;
        }
        if !calls.evicted {
            calls.chunks.push(chunk.clone());
        }
        if let Some(writer) = &traces.writer {
            writer.write(Batch { traced: self.clone(), chunk, dropped });
        }
    }
}

/// Records the calls of one request.
pub struct Recorder(Option<Active>);

struct Active {
    traces: Arc<Traces>,
    traced: Arc<TracedRequest>,
}

impl Recorder {
    /// A recorder that records nothing.
    pub fn off() -> Self {
        Self(None)
    }

    /// Begins a request with these policies.
    pub(crate) fn begin(&mut self, links: &[Link]) {
        let Some(Active { traces, traced }) = &mut self.0 else { return };
        let policy = |link: &Link| TracedPolicy {
            name: link.name.clone(),
            sha256: hex::encode(link.sha256),
            shadow: link.shadow,
        };
        let unshared = Arc::get_mut(traced).expect("not shared before Recorder::begin");
        unshared.policies = links.iter().map(policy).collect();
        traces.add(traced.clone());
    }

    /// Records a call of the policy `link`.
    pub(crate) fn record(
        &self,
        link: usize,
        call: &Call<'_>,
        answer: Option<&Answer>,
        outcome: Outcome,
    ) {
        let Some(Active { traces, traced }) = &self.0 else { return };
        let mut calls = traced.calls.lock();
        if calls.count >= MAX_RECORDS && !matches!(call, Call::Finish(_)) {
            calls.dropped += 1;
            return;
        }
        if calls.evicted && traces.writer.is_none() {
            return;
        }
        let entry = Entry { link, call: call.to_owned(), answer: answer.cloned(), outcome };
        let bytes = if calls.evicted { 0 } else { entry.bytes() };
        calls.count += 1;
        calls.bytes += bytes;
        calls.open.push(entry);
        if calls.open.len() == CHUNK {
            traced.close_chunk(&mut calls, traces, 0);
        }
        // While the lock is held: eviction subtracts what was added.
        let all = traces.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        drop(calls);
        if all > MEMORY_BYTES {
            traces.evict_to_limit();
        }
    }

    /// Ends the request.
    pub(crate) fn finish(&mut self) {
        let Some(Active { traces, traced }) = self.0.take() else { return };
        let mut calls = traced.calls.lock();
        let dropped = calls.dropped;
        traced.close_chunk(&mut calls, &traces, dropped);
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Entry {
    /// Size in memory, estimated.
    fn bytes(&self) -> usize {
        let imports = |call: &ImportCall| {
            let texts = call.arguments.iter().chain(&call.answer);
            call.call.len() + texts.map(|text| text.len() + size_of::<String>()).sum::<usize>()
        };
        let call = match &self.call {
            Call::Step(step) => size_of_val(&step.tokens[..]) + step.text.len(),
            other => json_bytes(other),
        };
        let answer = match &self.answer {
            Some(Answer::Step(actions)) if actions.is_empty() => 0,
            answer => json_bytes(answer),
        };
        size_of::<Self>() + call + answer + self.outcome.imports.iter().map(imports).sum::<usize>()
    }
}

/// Length of a value as JSON, as an estimate of its texts and lists.
fn json_bytes(value: &impl Serialize) -> usize {
    struct Counter(usize);

    impl io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let mut counter = Counter(0);
    serde_json::to_writer(&mut counter, value).expect("records have string keys only");
    counter.0
}
