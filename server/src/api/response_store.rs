//! Stored responses: one file each, bounded in bytes and lifetime.
//!
//! The oldest are deleted first. Losing one costs a client its `previous_response_id` only, so a file
//! that cannot be read is one that does not exist. A response that is not stored says so to its client.
//!
//! The system's clock may jump, and may be wrong when a machine has just started. So ages are those of the clock that
//! moves least, and a response is deleted for its age only after it has been too old for [`CONFIRM`] of running time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};
use std::{fmt, io};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use steersman_engine::request::Message;
use steersman_files::FileName;

/// Running time between the first time that a response is found too old and its deletion.
const CONFIRM: Duration = Duration::from_secs(3600);

/// A stored response.
#[derive(Debug, Serialize, Deserialize)]
pub struct Stored {
    /// The profile of its request.
    pub profile: String,
    /// The conversation without instructions, the reply included.
    pub messages: Vec<Message>,
    /// The input of its request.
    pub input: Value,
    /// As it was sent.
    pub response: Value,
}

/// The folder of stored responses.
#[derive(Debug)]
pub struct ResponseStore {
    folder: PathBuf,
    limit_bytes: u64,
    lifetime: Duration,
    /// The oldest first, by their ids.
    files: Mutex<BTreeSet<(SystemTime, FileName, u64)>>,
    /// Since when each response that is too old was found so.
    expired: Mutex<BTreeMap<FileName, Instant>>,
    /// Both clocks when the folder was opened.
    opened: (SystemTime, Instant),
    /// Responses that could not be stored.
    failures: AtomicU64,
}

impl ResponseStore {
    /// Opens `folder`, which is created with the first response.
    pub fn open(folder: &Path, limit_bytes: u64, lifetime: Duration) -> Self {
        let entry = |entry: std::io::Result<fs::DirEntry>| {
            let entry = entry.ok()?;
            let id = FileName::new(entry.file_name().to_str()?.strip_suffix(".json")?).ok()?;
            let metadata = entry.metadata().ok()?;
            Some((metadata.modified().ok()?, id, metadata.len()))
        };
        let files = fs::read_dir(folder).into_iter().flatten().filter_map(entry).collect();
        let store = Self {
            folder: folder.into(),
            limit_bytes,
            lifetime,
            files: Mutex::new(files),
            expired: Mutex::default(),
            opened: (SystemTime::now(), Instant::now()),
            failures: AtomicU64::new(0),
        };
        store.evict();
        store
    }

    /// Stores a response.
    ///
    /// # Errors
    /// If it cannot be written, or alone takes more than the limit. The failure is logged and counted.
    pub fn put(&self, id: &str, stored: &Stored) -> Result<(), NotStored> {
        let name = FileName::new(id).map_err(|error| NotStored::File(io::Error::other(error)));
        let put = name.and_then(|id| {
            let bytes = self.write(&id, stored)?;
            self.files.lock().insert((SystemTime::now(), id, bytes));
            Ok(())
        });
        self.evict();
        if let Err(error) = &put {
            self.failures.fetch_add(1, Ordering::Relaxed);
            let (path, error) = (self.folder.display(), error.details());
            tracing::warn!(id, %path, error, "response not stored");
        }
        put
    }

    /// Number of responses that could not be stored.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// The response `id`.
    pub fn get(&self, id: &str) -> Option<Stored> {
        self.evict();
        let id = FileName::new(id).ok()?;
        let now = self.now();
        let is_kept = |(time, known, _): &&(SystemTime, FileName, u64)| {
            *known == id && !self.is_too_old(*time, now)
        };
        self.files.lock().iter().find(is_kept)?;
        // Whatever is there now: not one that grew, nor a pipe.
        let text = steersman_files::read(&self.path(&id), self.limit_bytes).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Deletes the response `id`; false if there is none.
    pub fn delete(&self, id: &str) -> bool {
        let Ok(id) = FileName::new(id) else { return false };
        let mut files = self.files.lock();
        let Some(file) = files.iter().find(|(_, known, _)| *known == id).cloned() else {
            return false;
        };
        files.remove(&file);
        fs::remove_file(self.path(&id)).is_ok()
    }

    fn write(&self, id: &FileName, stored: &Stored) -> Result<u64, NotStored> {
        let json = serde_json::to_vec(stored).map_err(|error| NotStored::File(error.into()))?;
        let (bytes, limit) = (json.len() as u64, self.limit_bytes);
        if bytes > limit {
            return Err(NotStored::TooLarge { bytes, limit });
        }
        // The disk would keep a worker waiting for each response.
        steersman_files::replace_losable(&self.path(id), &json).map_err(NotStored::File)?;
        Ok(bytes)
    }

    /// The time of the system's clock, but no later than when it has moved as this process has run.
    fn now(&self) -> SystemTime {
        let (opened, running) = self.opened;
        SystemTime::now().min(opened + running.elapsed())
    }

    fn is_too_old(&self, stored: SystemTime, now: SystemTime) -> bool {
        now.duration_since(stored).unwrap_or_default() > self.lifetime
    }

    /// Deletes responses that are too old, and the oldest while there are too many bytes.
    fn evict(&self) {
        self.evict_at(self.now(), Instant::now());
    }

    /// [`Self::evict`] at a time of the system's clock and one of the running time.
    fn evict_at(&self, now: SystemTime, running: Instant) {
        let (mut files, mut expired) = (self.files.lock(), self.expired.lock());
        let found_before = std::mem::take(&mut *expired);
        let mut bytes: u64 = files.iter().map(|(_, _, bytes)| bytes).sum();
        let mut gone = Vec::new();
        for file in files.iter() {
            let (time, id, size) = file;
            let is_too_old = self.is_too_old(*time, now);
            let since = found_before.get(id).copied().unwrap_or(running);
            let is_confirmed = is_too_old && running.duration_since(since) >= CONFIRM;
            if is_confirmed || bytes > self.limit_bytes {
                bytes -= size;
                gone.push(file.clone());
            } else if is_too_old {
                expired.insert(id.clone(), since);
            } else {
                break;
            }
        }
        for file in gone {
            // A file that is gone already needs no space.
            let _ = fs::remove_file(self.path(&file.1));
            files.remove(&file);
        }
    }

    fn path(&self, id: &FileName) -> PathBuf {
        self.folder.join(format!("{id}.json"))
    }
}

/// Why a response was not stored. Its text is for clients, and so names no file.
#[derive(Debug)]
pub enum NotStored {
    /// It is larger than all responses may be together.
    TooLarge { bytes: u64, limit: u64 },
    /// The file of the response could not be written.
    File(io::Error),
}

impl NotStored {
    /// The reason for the log, with the file.
    fn details(&self) -> String {
        match self {
            Self::TooLarge { .. } => self.to_string(),
            Self::File(error) => error.to_string(),
        }
    }
}

impl fmt::Display for NotStored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { bytes, limit } => {
                write!(f, "it has {bytes} bytes, server.responses_bytes is {limit}")
            }
            // The error itself may name the file.
            Self::File(error) => write!(f, "{}", error.kind()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(text: &str) -> Stored {
        let (messages, input) = (Vec::new(), Value::Null);
        Stored { profile: "default".into(), messages, input, response: text.into() }
    }

    #[test]
    fn stored_responses_outlive_the_process_within_their_limits() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("responses");
        let day = Duration::from_secs(86_400);
        let store = ResponseStore::open(&folder, 1 << 20, day);
        store.put("resp_1", &stored("one")).unwrap();
        store.put("resp_2", &stored("two")).unwrap();
        let store = ResponseStore::open(&folder, 1 << 20, day);
        assert_eq!(store.get("resp_1").unwrap().response, "one");
        assert!(store.delete("resp_1") && !store.delete("resp_1"));
        assert!(store.get("resp_1").is_none());
        for id in ["../resp_2", "", "resp_2.json"] {
            assert!(store.get(id).is_none() && !store.delete(id), "{id}");
        }
        // One more takes the space of the oldest.
        let store = ResponseStore::open(&folder, 1000, day);
        store.put("resp_3", &stored(&"x".repeat(900))).unwrap();
        assert!(store.get("resp_3").is_some() && store.get("resp_2").is_none());
        let store = ResponseStore::open(&folder, 1000, Duration::ZERO);
        assert!(store.get("resp_3").is_none());
        store.evict_at(SystemTime::now(), Instant::now() + CONFIRM);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }

    /// Fault A12: a stored response that had become a pipe kept a worker of the server for ever.
    #[cfg(unix)]
    #[test]
    fn a_stored_response_that_is_a_pipe_or_endless_does_not_exist() {
        let folder = tempfile::tempdir().unwrap();
        let store = ResponseStore::open(folder.path(), 1 << 20, Duration::from_secs(60));
        for (id, make) in [("resp_1", "mkfifo"), ("resp_2", "ln -s /dev/zero")] {
            store.put(id, &stored("one")).unwrap();
            let path = folder.path().join(format!("{id}.json"));
            fs::remove_file(&path).unwrap();
            let mut words = make.split(' ');
            let mut command = std::process::Command::new(words.next().unwrap());
            assert!(command.args(words).arg(&path).status().unwrap().success());
            assert!(store.get(id).is_none(), "{id}");
            assert!(store.delete(id), "{id}");
        }
    }

    /// Attacks, section 5: a clock that jumped 31 days forward deleted all stored responses for good.
    #[test]
    fn a_clock_that_jumps_deletes_no_stored_response() {
        let folder = tempfile::tempdir().unwrap();
        let day = Duration::from_secs(86_400);
        let store = ResponseStore::open(folder.path(), 1 << 20, 30 * day);
        store.put("resp_1", &stored("one")).unwrap();
        let (now, running) = (SystemTime::now(), Instant::now());
        let wrong = now + 31 * day;
        // For less than the time of confirmation, and again after the clock was right.
        store.evict_at(wrong, running);
        store.evict_at(wrong, running + CONFIRM / 2);
        store.evict_at(now, running + CONFIRM);
        store.evict_at(wrong, running + CONFIRM);
        store.evict_at(wrong, running + CONFIRM + CONFIRM / 2);
        // `get` would evict by the real clocks.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        // What stays too old is deleted.
        store.evict_at(wrong, running + 2 * CONFIRM);
        assert!(store.get("resp_1").is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// On a full disk, the note in the reply had the path of a temporary file.
    #[test]
    fn clients_learn_the_reason_and_the_log_the_file() {
        let text = "No space left on device (os error 28) at path \"/data/.tmpjYkiJP\"";
        let full = NotStored::File(io::Error::new(io::ErrorKind::StorageFull, text));
        assert_eq!(
            (full.to_string().as_str(), full.details().as_str()),
            ("no storage space", text)
        );
        let folder = tempfile::tempdir().unwrap();
        let store = ResponseStore::open(folder.path(), 10, Duration::from_secs(60));
        let error = store.put("resp_1", &stored("one")).unwrap_err().to_string();
        assert!(error.contains("server.responses_bytes is 10"), "{error}");
    }
}
