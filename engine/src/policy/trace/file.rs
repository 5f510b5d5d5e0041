//! The trace file: a thread of its own turns calls into lines and appends them.
//!
//! The decode thread never waits for the disk: what the queue has no room for is dropped, counted,
//! and where it is missing stands a line `{"dropped":N}`.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use super::{Entry, Traced};
use crate::error::{Error, Result};

/// Most batches that wait for the thread.
const QUEUE: usize = 256;

/// Most bytes of calls that wait for the thread.
const QUEUE_BYTES: usize = 16 << 20;

/// Calls of one request that go to the file together.
pub struct Batch {
    /// Whose.
    pub traced: Arc<Traced>,
    /// The calls.
    pub chunk: Arc<Vec<Entry>>,
    /// For the record of the last of them.
    pub dropped: u64,
}

/// Owner of the thread, which ends when this is dropped, with all written that was queued.
pub struct Writer {
    queue: Option<SyncSender<(Batch, usize)>>,
    waiting: Arc<Waiting>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Waiting {
    bytes: AtomicUsize,
    /// Calls dropped since the last batch was written.
    lost: AtomicU64,
}

impl Writer {
    /// Opens a file for appending, making it where it is not there, readable by its owner alone.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the key, the file and what is wrong with it.
    pub fn open(path: &Path) -> Result<Self> {
        let refuse = |error: std::io::Error| Error::Invalid {
            field: "policy.trace_file",
            problem: format!(
                "{} cannot be opened for appending ({error}); name another file, or none",
                path.display()
            ),
        };
        let mut options = OpenOptions::new();
        options.append(true).create(true);
        // It holds what users said, where a profile wants its texts traced.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(path).map_err(refuse)?;
        let (queue, batches) = sync_channel(QUEUE);
        let waiting = Arc::<Waiting>::default();
        let (theirs, path) = (waiting.clone(), path.to_path_buf());
        let thread = std::thread::Builder::new()
            .name("policy-trace".into())
            .spawn(move || write(BufWriter::new(file), &path, &batches, &theirs))
            .map_err(refuse)?;
        Ok(Self { queue: Some(queue), waiting, thread: Some(thread) })
    }

    /// Queues calls, or drops them where the queue is full.
    pub fn write(&self, batch: Batch) {
        let Some(queue) = &self.queue else { return };
        let count = batch.chunk.len() as u64;
        let bytes = batch.chunk.iter().map(Entry::bytes).sum();
        let before = self.waiting.bytes.fetch_add(bytes, Ordering::Relaxed);
        let sent = before + bytes <= QUEUE_BYTES
            && match queue.try_send((batch, bytes)) {
                Ok(()) => true,
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
            };
        if !sent {
            self.waiting.bytes.fetch_sub(bytes, Ordering::Relaxed);
            if self.waiting.lost.fetch_add(count, Ordering::Relaxed) == 0 {
                tracing::warn!("policy.trace_file: the disk lags behind, and calls are left out");
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that writes the trace file panicked");
        }
    }
}

/// The thread: writes what is queued, and flushes when nothing is.
fn write(
    mut file: BufWriter<File>,
    path: &Path,
    batches: &Receiver<(Batch, usize)>,
    waiting: &Waiting,
) {
    let mut failed = false;
    let mut next = batches.recv().ok();
    while let Some((batch, bytes)) = next {
        let lost = waiting.lost.swap(0, Ordering::Relaxed);
        let written = lines(&mut file, &batch, lost);
        waiting.bytes.fetch_sub(bytes, Ordering::Relaxed);
        next = match batches.try_recv() {
            Ok(next) => Some(next),
            Err(mpsc::TryRecvError::Disconnected) => None,
            Err(mpsc::TryRecvError::Empty) => {
                let flushed = written.and_then(|()| file.flush());
                if let Err(error) = &flushed
                    && !failed
                {
                    tracing::warn!(path = %path.display(), %error, "policy.trace_file: not written");
                }
                failed = flushed.is_err();
                batches.recv().ok()
            }
        };
    }
    if let Err(error) = file.flush() {
        tracing::warn!(path = %path.display(), %error, "policy.trace_file: not written to its end");
    }
}

fn lines(file: &mut BufWriter<File>, batch: &Batch, lost: u64) -> std::io::Result<()> {
    if lost > 0 {
        tracing::warn!(calls = lost, "policy.trace_file: calls were left out");
        writeln!(file, "{{\"dropped\":{lost}}}")?;
    }
    let last = batch.chunk.len() - 1;
    for (i, entry) in batch.chunk.iter().enumerate() {
        let mut record = batch.traced.record(entry);
        if i == last {
            record.dropped = batch.dropped;
        }
        serde_json::to_writer(&mut *file, &record)?;
        file.write_all(b"\n")?;
    }
    Ok(())
}
