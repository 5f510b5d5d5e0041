//! Digest of a checkpoint's weight files, by which saved state of one checkpoint never matches
//! another.
//!
//! It covers every byte: a fine-tune has the names, shapes and sizes of its base. Files are hashed on
//! threads of their own while the model is loaded from them, so most of what they read is in the
//! operating system's cache. The digest of a file is kept in `weights.json` in the data folder, with
//! what tells that the file is unchanged.
//!
//! # Why
//! SHA-256 over the SHA-256 of pieces, because pieces can be hashed in parallel. BLAKE3 is faster on
//! one thread, but not where processors have SHA instructions and the disk is the limit, and it would
//! be one more dependency.

use std::fs::{self, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::weights::shards;
use crate::error::{ConfigError, Error, Result};
use steersman_files::replace_private;

/// Name of the file with digests in the data folder.
const NAME: &str = "weights.json";
/// Bytes that one thread hashes at once.
const PIECE_BYTES: u64 = 8 << 20;
/// Most threads that hash.
const THREADS: usize = 8;
/// Most files whose digests are kept.
const FILES: usize = 1024;
/// A file that changed less than this before it was hashed may change again within the resolution of
/// its time, so its digest is not kept.
const SETTLED: Duration = Duration::from_secs(2);

/// Weights that are being hashed.
pub struct WeightsDigest(JoinHandle<Result<[u8; 32]>>);

impl WeightsDigest {
    /// Starts to hash the weight files of the model in `folder`. Digests of unchanged files are read
    /// from the folder `data`.
    ///
    /// # Errors
    /// [`Error::Config`] names the file that is missing.
    pub fn start(folder: &Path, data: &Path) -> Result<Self> {
        let (paths, data) = (shards(folder)?, data.to_path_buf());
        let thread = thread::Builder::new().name("weights-digest".into());
        let hash = move || digest(&paths, &data, SystemTime::now());
        Ok(Self(thread.spawn(hash).map_err(|_| Error::Stopped)?))
    }

    /// Waits for the digest.
    ///
    /// # Errors
    /// [`Error::Config`] names the file that cannot be read.
    pub fn finish(self) -> Result<[u8; 32]> {
        self.0.join().map_err(|_| Error::Stopped)?
    }
}

/// A file and its digest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct HashedFile {
    path: PathBuf,
    size: u64,
    /// Last change of the content and of anything else, in nanoseconds since 1970. The latter cannot
    /// be set by a program that copies times.
    modified: u64,
    changed: u64,
    inode: u64,
    /// In hex.
    sha256: String,
}

impl HashedFile {
    /// The file without a digest.
    fn unhashed(path: &Path, metadata: &Metadata) -> Self {
        let nanos = |time: SystemTime| {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
        };
        let modified = metadata.modified().map_or(0, nanos);
        #[cfg(unix)]
        let (changed, inode) = {
            use std::os::unix::fs::MetadataExt;
            let seconds = u64::try_from(metadata.ctime()).unwrap_or(0);
            let rest = u64::try_from(metadata.ctime_nsec()).unwrap_or(0);
            (seconds * 1_000_000_000 + rest, metadata.ino())
        };
        #[cfg(not(unix))]
        let (changed, inode) = (modified, 0);
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        Self { path, size: metadata.len(), modified, changed, inode, sha256: String::new() }
    }

    fn is_settled(&self, now: SystemTime) -> bool {
        let last = UNIX_EPOCH + Duration::from_nanos(self.modified.max(self.changed));
        now.duration_since(last).is_ok_and(|age| age > SETTLED)
    }

    fn is_same_file(&self, other: &Self) -> bool {
        Self { sha256: String::new(), ..self.clone() }
            == Self { sha256: String::new(), ..other.clone() }
    }
}

/// Content of `weights.json`.
#[derive(Default, Serialize, Deserialize)]
struct HashedFiles {
    files: Vec<HashedFile>,
    /// Digest of `files`, in hex: a damaged entry must not name another checkpoint.
    check: String,
}

impl HashedFiles {
    /// Reads the file in `data`; nothing if it is missing or damaged.
    fn read(data: &Path) -> Vec<HashedFile> {
        let path = data.join(NAME);
        let bytes = match steersman_gguf::files::read_at(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "digests of weights cannot be read");
                return Vec::new();
            }
        };
        match serde_json::from_slice::<Self>(&bytes) {
            Ok(read) if read.check == check(&read.files) => read.files,
            _ => {
                tracing::warn!(path = %path.display(), "digests of weights are damaged; hashing the weights again");
                Vec::new()
            }
        }
    }

    fn write(data: &Path, files: Vec<HashedFile>) -> io::Result<()> {
        let hashed = Self { check: check(&files), files };
        replace_private(&data.join(NAME), &serde_json::to_vec_pretty(&hashed)?)
    }
}

fn check(files: &[HashedFile]) -> String {
    let json = serde_json::to_vec(files).expect("paths are UTF-8: they were read from JSON");
    hex::encode(Sha256::digest(json))
}

/// Digest over the weight files, in order. Their names do not matter. `now` is not later than the
/// time of day.
fn digest(paths: &[PathBuf], data: &Path, now: SystemTime) -> Result<[u8; 32]> {
    let started = Instant::now();
    let known = HashedFiles::read(data);
    let (mut files, mut new, mut bytes) = (Vec::new(), Vec::new(), 0);
    for path in paths {
        let failed = |error: io::Error| {
            Error::Config(ConfigError::Model { path: path.clone(), problem: error.to_string() })
        };
        let mut file = HashedFile::unhashed(path, &fs::metadata(path).map_err(failed)?);
        if let Some(hashed) = known.iter().find(|known| known.is_same_file(&file)) {
            files.push(hashed.clone());
            continue;
        }
        file.sha256 = hash_file(path, file.size).map_err(failed)?;
        bytes += file.size;
        let after = HashedFile::unhashed(path, &fs::metadata(path).map_err(failed)?);
        let is_utf8 = file.path.to_str().is_some();
        if is_utf8 && file.is_settled(now) && after.is_same_file(&file) {
            new.push(file.clone());
        }
        files.push(file);
    }
    if bytes > 0 {
        tracing::info!(bytes, elapsed_ms = started.elapsed().as_millis() as u64, "weights hashed");
    }
    if !new.is_empty() {
        let is_current = |known: &HashedFile| {
            known.path.exists() && !new.iter().any(|file| file.path == known.path)
        };
        let mut kept: Vec<HashedFile> = known.into_iter().filter(is_current).collect();
        kept.extend(new);
        kept.drain(..kept.len().saturating_sub(FILES));
        if let Err(error) = HashedFiles::write(data, kept) {
            tracing::warn!(%error, "digests of weights not saved; the next start hashes them again");
        }
    }
    let mut sha = Sha256::new();
    for file in files {
        sha.update(file.size.to_le_bytes());
        sha.update(file.sha256);
    }
    Ok(sha.finalize().into())
}

/// SHA-256 over the SHA-256 of each piece, in hex.
fn hash_file(path: &Path, size: u64) -> io::Result<String> {
    let pieces = usize::try_from(size.div_ceil(PIECE_BYTES)).unwrap_or(usize::MAX);
    let next = AtomicUsize::new(0);
    let work = || -> io::Result<Vec<(usize, [u8; 32])>> {
        let mut file = steersman_files::open(path)?;
        let (mut hashed, mut piece) = (Vec::new(), Vec::new());
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= pieces {
                return Ok(hashed);
            }
            piece.clear();
            file.seek(SeekFrom::Start(n as u64 * PIECE_BYTES))?;
            (&mut file).take(PIECE_BYTES).read_to_end(&mut piece)?;
            hashed.push((n, Sha256::digest(&piece).into()));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS).min(pieces);
    let mut hashed = thread::scope(|scope| -> io::Result<Vec<_>> {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut hashed = work()?;
        for other in others {
            hashed.extend(other.join().expect("hashing does not panic")?);
        }
        Ok(hashed)
    })?;
    hashed.sort_unstable();
    let mut sha = Sha256::new();
    hashed.iter().for_each(|(_, digest)| sha.update(digest));
    Ok(hex::encode(sha.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two files, the first of more than two pieces, and an empty folder for digests.
    fn files() -> (tempfile::TempDir, Vec<PathBuf>) {
        let folder = tempfile::tempdir().unwrap();
        let bytes = |count: u64| (0..count).map(|i| (i % 251) as u8).collect::<Vec<u8>>();
        let paths = ["1", "2"].map(|name| folder.path().join(name));
        fs::write(&paths[0], bytes(2 * PIECE_BYTES + 5)).unwrap();
        fs::write(&paths[1], bytes(100)).unwrap();
        (folder, paths.into())
    }

    fn later() -> SystemTime {
        SystemTime::now() + 2 * SETTLED
    }

    /// Sampled digests gave a fine-tune the state of its base. Also with the time of the last change
    /// set back, as copies do.
    #[test]
    fn every_byte_changes_the_digest() {
        let (folder, paths) = files();
        let original = fs::read(&paths[0]).unwrap();
        let time = fs::metadata(&paths[0]).unwrap().modified().unwrap();
        let mut seen = vec![digest(&paths, folder.path(), later()).unwrap()];
        let piece = PIECE_BYTES as usize;
        for at in [0, 1000, piece - 1, piece, original.len() / 2, 2 * piece, original.len() - 1] {
            let mut bytes = original.clone();
            bytes[at] ^= 1;
            fs::write(&paths[0], bytes).unwrap();
            fs::File::options().write(true).open(&paths[0]).unwrap().set_modified(time).unwrap();
            let digest = digest(&paths, folder.path(), later()).unwrap();
            assert!(!seen.contains(&digest), "byte {at}");
            seen.push(digest);
        }
        fs::write(&paths[0], &original).unwrap();
        assert_eq!(digest(&paths, folder.path(), later()).unwrap(), seen[0]);
        assert_ne!(digest(&paths[..1], folder.path(), later()).unwrap(), seen[0]);
        let swapped = [paths[1].clone(), paths[0].clone()];
        assert_ne!(digest(&swapped, folder.path(), later()).unwrap(), seen[0]);
    }

    #[test]
    fn digests_of_unchanged_files_are_kept_and_checked() {
        let (folder, paths) = files();
        let data = folder.path().join("data");
        let kept = data.join(NAME);
        let of_file = digest(&paths, &data, SystemTime::now()).unwrap();
        assert!(!kept.exists(), "a file that may still change");
        assert_eq!(digest(&paths, &data, later()).unwrap(), of_file);
        let mut files = HashedFiles::read(&data);
        assert_eq!(files.len(), 2);

        // Another digest with a correct check is taken: the file is not read.
        let original = fs::read(&kept).unwrap();
        files[0].sha256 = files[1].sha256.clone();
        HashedFiles::write(&data, files).unwrap();
        assert_ne!(digest(&paths, &data, later()).unwrap(), of_file);

        for at in (0..original.len()).step_by(7) {
            let mut damaged = original.clone();
            damaged[at] ^= 1;
            fs::write(&kept, damaged).unwrap();
            assert_eq!(digest(&paths, &data, SystemTime::now()).unwrap(), of_file, "byte {at}");
        }
        fs::write(&kept, "").unwrap();
        assert_eq!(digest(&paths, &data, later()).unwrap(), of_file);
        assert_eq!(HashedFiles::read(&data).len(), 2, "written again");
    }
}
