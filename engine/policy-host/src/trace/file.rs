//! The trace file, written by a thread of its own.
//!
//! The decode thread never waits for the disk. Calls that do not fit into the queue are dropped and
//! counted, and a line `{"dropped":N}` takes their place.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use super::Record;
use crate::error::Error;

/// Chunks in the queue.
const QUEUE: usize = 256;

/// Bytes of calls in the queue.
const QUEUE_BYTES: usize = 16 << 20;

/// Calls of one request that are written together.
type Chunk = Arc<Vec<Record>>;

/// Owner of the thread. Dropping it writes the queue and ends the thread.
pub struct Writer {
    queue: Option<SyncSender<(Chunk, usize)>>,
    queued: Arc<Queued>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Queued {
    bytes: AtomicUsize,
    /// Calls dropped since the last chunk was written.
    lost: AtomicU64,
}

impl Writer {
    /// Opens a file for appending. A new file is readable by its owner only.
    ///
    /// # Errors
    /// [`Error::Config`] with the file and the reason.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let refuse = |error: std::io::Error| Error::Config {
            field: "policy.trace_file",
            problem: format!(
                "{} cannot be opened for appending ({error}); choose another file, or none",
                path.display()
            ),
        };
        let mut options = OpenOptions::new();
        options.append(true).create(true);
        // With `trace_text` it contains conversations.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(path).map_err(refuse)?;
        let (queue, chunks) = sync_channel(QUEUE);
        let queued = Arc::<Queued>::default();
        let (theirs, path) = (queued.clone(), path.to_path_buf());
        let thread = std::thread::Builder::new()
            .name("policy-trace".into())
            .spawn(move || write(BufWriter::new(file), &path, &chunks, &theirs))
            .map_err(refuse)?;
        Ok(Self { queue: Some(queue), queued, thread: Some(thread) })
    }

    /// Queues calls, or drops them if the queue is full.
    pub fn write(&self, chunk: Chunk) {
        let Some(queue) = &self.queue else { return };
        let count = chunk.len() as u64;
        let bytes = chunk.iter().map(Record::bytes).sum();
        let before = self.queued.bytes.fetch_add(bytes, Ordering::Relaxed);
        let sent = before + bytes <= QUEUE_BYTES
            && match queue.try_send((chunk, bytes)) {
                Ok(()) => true,
                Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
            };
        if !sent {
            self.queued.bytes.fetch_sub(bytes, Ordering::Relaxed);
            if self.queued.lost.fetch_add(count, Ordering::Relaxed) == 0 {
                tracing::warn!("trace file too slow; dropping calls");
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
            tracing::error!("trace file thread panicked");
        }
    }
}

/// Writes the queue, and flushes when it is empty.
fn write(
    mut file: BufWriter<File>,
    path: &Path,
    chunks: &Receiver<(Chunk, usize)>,
    queued: &Queued,
) {
    let mut failed = false;
    let mut next = chunks.recv().ok();
    while let Some((chunk, bytes)) = next {
        let lost = queued.lost.swap(0, Ordering::Relaxed);
        let written = lines(&mut file, &chunk, lost);
        queued.bytes.fetch_sub(bytes, Ordering::Relaxed);
        next = match chunks.try_recv() {
            Ok(next) => Some(next),
            Err(mpsc::TryRecvError::Disconnected) => None,
            Err(mpsc::TryRecvError::Empty) => {
                let flushed = written.and_then(|()| file.flush());
                if let Err(error) = &flushed
                    && !failed
                {
                    tracing::warn!(path = %path.display(), %error, "trace file not written");
                }
                failed = flushed.is_err();
                chunks.recv().ok()
            }
        };
    }
    if let Err(error) = file.flush() {
        tracing::warn!(path = %path.display(), %error, "trace file not flushed");
    }
}

fn lines(file: &mut BufWriter<File>, chunk: &[Record], lost: u64) -> std::io::Result<()> {
    if lost > 0 {
        tracing::warn!(calls = lost, "trace file lacks calls");
        writeln!(file, "{{\"dropped\":{lost}}}")?;
    }
    for record in chunk {
        serde_json::to_writer(&mut *file, record)?;
        file.write_all(b"\n")?;
    }
    Ok(())
}
