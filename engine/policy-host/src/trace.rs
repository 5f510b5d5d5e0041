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
mod shadow;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::config::PolicyConfig;
use crate::contract::{Answer, Call, CallReport};
use crate::error::Error;
use file::Writer;
pub use record::{Record, RecordedLink};
pub use shadow::{Difference, ShadowReport};

/// Recorded calls of one request; `on-finish` is recorded in any case.
const MAX_RECORDS: usize = 16_384;

/// Bytes in memory of all recorded calls.
const MEMORY_BYTES: usize = 64 << 20;

/// Calls that are written to the file together, so that its thread wakes up rarely.
const CHUNK: usize = 64;

/// Bytes of calls that are written together: a chunk is at most this and one call.
const CHUNK_BYTES: usize = 1 << 20;

/// Traces of the newest requests.
pub struct Traces {
    requests: usize,
    newest: Mutex<VecDeque<Arc<Traced>>>,
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
        let open = || Writer::open(file, config.trace_file_bytes);
        let writer = (!file.as_os_str().is_empty()).then(open).transpose()?;
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
        let traced = Traced { request: request.into(), calls: Mutex::default() };
        let (profile, masked) = (profile.into(), !text);
        let traced = Arc::new(traced);
        Recorder(Some(Active { traces: self.clone(), traced, profile, masked, links: Vec::new() }))
    }

    /// The records of a request, in order; the newest request if several have this id. `None` if there
    /// are none, or if they were evicted.
    pub fn get(&self, request: &str) -> Option<Vec<Record>> {
        let chunks = self.chunks(request)?;
        Some(chunks.iter().flat_map(|chunk| chunk.iter()).cloned().collect())
    }

    /// As [`Self::get`], without a copy of most of them.
    pub fn chunks(&self, request: &str) -> Option<Vec<Arc<Vec<Record>>>> {
        let newest = self.newest.lock();
        let traced = newest.iter().rev().find(|traced| traced.request == request)?.clone();
        drop(newest);
        let calls = traced.calls.lock();
        let mut chunks = calls.chunks.clone();
        if !calls.open.is_empty() {
            chunks.push(Arc::new(calls.open.clone()));
        }
        // The last record of a request that has ended has it already.
        if let Some(last) = chunks.last_mut()
            && last.last().is_some_and(|record| record.dropped != calls.dropped)
            && let Some(record) = Arc::make_mut(last).last_mut()
        {
            record.dropped = calls.dropped;
        }
        Some(chunks)
    }

    /// Compares `policy` as a shadow with what was applied, over the requests in memory.
    pub fn compare_shadow(&self, policy: &str) -> ShadowReport {
        let newest: Vec<_> = self.newest.lock().iter().cloned().collect();
        let mut report = ShadowReport::default();
        for traced in newest {
            let calls = traced.calls.lock();
            let (chunks, open) = (calls.chunks.clone(), calls.open.clone());
            drop(calls);
            let records: Vec<&Record> =
                chunks.iter().flat_map(|chunk| chunk.iter()).chain(&open).collect();
            report.add_request(policy, &records);
        }
        report
    }

    fn add(&self, traced: Arc<Traced>) {
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

    fn evict_oldest(&self, newest: &mut VecDeque<Arc<Traced>>) {
        let Some(oldest) = newest.pop_front() else { return };
        let mut calls = oldest.calls.lock();
        calls.evicted = true;
        calls.chunks.clear();
        // What the file does not have yet goes there.
        calls.close_chunk(self);
        self.bytes.fetch_sub(std::mem::take(&mut calls.bytes), Ordering::Relaxed);
    }
}

/// The trace of one request.
struct Traced {
    request: String,
    calls: Mutex<Calls>,
}

#[derive(Default)]
struct Calls {
    /// Full chunks, shared with the thread of the file.
    chunks: Vec<Arc<Vec<Record>>>,
    /// At most [`CHUNK`] records.
    open: Vec<Record>,
    open_bytes: usize,
    count: usize,
    bytes: usize,
    dropped: u64,
    /// Evicted from memory; further calls go to the file only.
    evicted: bool,
}

impl Calls {
    /// Closes the open chunk and sends it to the file.
    fn close_chunk(&mut self, traces: &Traces) {
        self.open_bytes = 0;
        let chunk = Arc::new(std::mem::take(&mut self.open));
        if chunk.is_empty() {
            return;
        }
        if !self.evicted {
            self.chunks.push(chunk.clone());
        }
        if let Some(writer) = &traces.writer {
            writer.write(chunk);
        }
    }
}

/// A policy of a request whose calls are recorded.
pub(crate) struct TracedPolicy<'a> {
    /// Name of the policy.
    pub name: &'a str,
    /// SHA-256 of its component.
    pub sha256: [u8; 32],
    /// Whether its answers are recorded and not applied.
    pub shadow: bool,
}

/// Records the calls of one request.
pub struct Recorder(Option<Active>);

struct Active {
    traces: Arc<Traces>,
    traced: Arc<Traced>,
    profile: String,
    masked: bool,
    links: Vec<Arc<RecordedLink>>,
}

impl Recorder {
    /// A recorder that records nothing.
    pub fn off() -> Self {
        Self(None)
    }

    /// Begins a request with these policies, in the order of its chain.
    pub(crate) fn begin<'a>(&mut self, policies: impl Iterator<Item = TracedPolicy<'a>>) {
        let Some(Active { traces, traced, profile, masked, links }) = &mut self.0 else {
            return;
        };
        let recorded = |(index, policy): (usize, TracedPolicy<'_>)| RecordedLink {
            request: traced.request.clone(),
            profile: profile.clone(),
            policy: policy.name.into(),
            sha256: hex::encode(policy.sha256),
            index,
            shadow: policy.shadow,
            masked: *masked,
        };
        *links = policies.enumerate().map(recorded).map(Arc::new).collect();
        traces.add(traced.clone());
    }

    /// Records a call of the policy `link`, its answer, and what was reported of it.
    pub(crate) fn record(
        &self,
        link: usize,
        call: &Call<'_>,
        answer: Option<&Answer>,
        report: CallReport,
    ) {
        let Some(Active { traces, traced, links, .. }) = &self.0 else { return };
        let mut calls = traced.calls.lock();
        if calls.count >= MAX_RECORDS && !matches!(call, Call::Finish(_)) {
            calls.dropped += 1;
            return;
        }
        if calls.evicted && traces.writer.is_none() {
            return;
        }
        let CallReport { cost, imports, failure, replaced, notes: _ } = report;
        let (link, call, answer) = (links[link].clone(), call.to_owned(), answer.cloned());
        let record = Record { link, call, answer, failure, replaced, cost, imports, dropped: 0 };
        let size = record.bytes();
        let bytes = if calls.evicted { 0 } else { size };
        calls.count += 1;
        calls.bytes += bytes;
        calls.open_bytes += size;
        calls.open.push(record);
        // An evicted request holds nothing: what it held would not be counted.
        if calls.evicted || calls.open.len() == CHUNK || calls.open_bytes >= CHUNK_BYTES {
            calls.close_chunk(traces);
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
        let Some(Active { traces, traced, .. }) = self.0.take() else { return };
        let mut calls = traced.calls.lock();
        let dropped = calls.dropped;
        if let Some(last) = calls.open.last_mut() {
            last.dropped = dropped;
        }
        calls.close_chunk(&traces);
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.finish();
    }
}
