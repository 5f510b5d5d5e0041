//! The trace file, written by a thread of its own.
//!
//! The decode thread never waits for the disk. Calls that do not fit into the queue are dropped and
//! counted, and a line `{"dropped":N}` takes their place.
//!
//! A file that reaches its limit is renamed to `NAME.1`, in place of the one before it, so that both together
//! take at most about twice the limit. A file that others rename or remove is created again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use super::record::Record;
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
    /// Opens a file for appending, which may have `limit` bytes; 0 is no limit. A new file is readable by its
    /// owner only.
    ///
    /// # Errors
    /// [`Error::Config`] with the file and the reason.
    pub fn open(path: &Path, limit: u64) -> Result<Self, Error> {
        let refuse = |error: io::Error| Error::Config {
            field: "policy.trace_file",
            problem: format!(
                "{} cannot be opened for appending ({error}); choose another file, or none",
                path.display()
            ),
        };
        let output = Output::open(path, limit).map_err(refuse)?;
        let (queue, chunks) = sync_channel(QUEUE);
        let queued = Arc::<Queued>::default();
        let theirs = queued.clone();
        let thread = std::thread::Builder::new()
            .name("policy-trace".into())
            .spawn(move || write(output, &chunks, &theirs))
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

#[cfg(test)]
impl Writer {
    /// Waits until all that was queued is written.
    pub fn wait_until_written(&self) {
        while self.queued.bytes.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
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

/// The file, and how much of its limit it takes.
struct Output {
    path: PathBuf,
    file: BufWriter<File>,
    bytes: u64,
    limit: u64,
}

impl Output {
    fn open(path: &Path, limit: u64) -> io::Result<Self> {
        // With `trace_text` it contains conversations.
        let file = steersman_files::open_private(path, OpenOptions::new().append(true))?;
        let metadata = file.metadata()?;
        // A device has no size, and stays where it is.
        let (bytes, limit) = if metadata.is_file() { (metadata.len(), limit) } else { (0, 0) };
        Ok(Self { path: path.to_path_buf(), file: BufWriter::new(file), bytes, limit })
    }

    /// Flushes what is written and continues in a new file, if this one is full or no longer at its path.
    fn begin(&mut self) -> io::Result<()> {
        let is_full = self.limit > 0 && self.bytes >= self.limit;
        if !is_full && self.is_in_place() {
            return Ok(());
        }
        self.file.flush()?;
        if is_full && self.is_in_place() {
            let mut earlier = self.path.clone().into_os_string();
            earlier.push(".1");
            fs::rename(&self.path, earlier)?;
        }
        *self = Self::open(&self.path, self.limit)?;
        tracing::info!(path = %self.path.display(), "trace file begun");
        Ok(())
    }

    /// Whether the path still names the open file.
    #[cfg(unix)]
    fn is_in_place(&self) -> bool {
        use std::os::unix::fs::MetadataExt;
        let id = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let open = self.file.get_ref().metadata().map(id);
        let there = fs::metadata(&self.path).map(id);
        matches!((open, there), (Ok(open), Ok(there)) if open == there)
    }

    /// An open file can be neither renamed nor removed.
    #[cfg(not(unix))]
    fn is_in_place(&self) -> bool {
        true
    }

    /// Writes calls, and before them how many were lost.
    fn write_chunk(&mut self, chunk: &[Record], lost: u64) -> io::Result<()> {
        self.begin()?;
        if lost > 0 {
            tracing::warn!(calls = lost, "trace file lacks calls");
            writeln!(self, "{{\"dropped\":{lost}}}")?;
        }
        for record in chunk {
            serde_json::to_writer(&mut *self, record)?;
            self.write_all(b"\n")?;
        }
        Ok(())
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes the queue, and flushes when it is empty.
fn write(mut output: Output, chunks: &Receiver<(Chunk, usize)>, queued: &Queued) {
    let mut failed = false;
    let mut next = chunks.recv().ok();
    while let Some((chunk, bytes)) = next {
        let lost = queued.lost.swap(0, Ordering::Relaxed);
        let written = output.write_chunk(&chunk, lost);
        queued.bytes.fetch_sub(bytes, Ordering::Relaxed);
        next = match chunks.try_recv() {
            Ok(next) => Some(next),
            Err(mpsc::TryRecvError::Disconnected) => None,
            Err(mpsc::TryRecvError::Empty) => {
                let flushed = written.and_then(|()| output.flush());
                if let Err(error) = &flushed
                    && !failed
                {
                    tracing::warn!(path = %output.path.display(), %error, "trace file not written");
                }
                failed = flushed.is_err();
                chunks.recv().ok()
            }
        };
    }
    if let Err(error) = output.flush() {
        tracing::warn!(path = %output.path.display(), %error, "trace file not flushed");
    }
}
