//! Stored responses: one file each, bounded in bytes and lifetime.
//!
//! The oldest are deleted first. Losing one costs a client its `previous_response_id` only, so a file
//! that cannot be read is one that does not exist.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use steersman_engine::request::Message;
use tempfile::NamedTempFile;

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
    /// The oldest first.
    files: Mutex<BTreeSet<(SystemTime, String, u64)>>,
}

impl ResponseStore {
    /// Opens `folder`, which is created with the first response.
    pub fn open(folder: &Path, limit_bytes: u64, lifetime: Duration) -> Self {
        let entry = |entry: std::io::Result<fs::DirEntry>| {
            let entry = entry.ok()?;
            let id = entry.file_name().to_str()?.strip_suffix(".json")?.to_string();
            let metadata = entry.metadata().ok()?;
            Some((metadata.modified().ok()?, id, metadata.len()))
        };
        let files = fs::read_dir(folder).into_iter().flatten().filter_map(entry).collect();
        let store = Self { folder: folder.into(), limit_bytes, lifetime, files: Mutex::new(files) };
        store.evict();
        store
    }

    /// Stores a response; a failure is logged.
    pub fn put(&self, id: &str, stored: &Stored) {
        match self.write(id, stored) {
            Ok(bytes) => {
                self.files.lock().insert((SystemTime::now(), id.into(), bytes));
                self.evict();
            }
            Err(error) => tracing::warn!(id, %error, "response not stored"),
        }
    }

    /// The response `id`.
    pub fn get(&self, id: &str) -> Option<Stored> {
        self.evict();
        let known = self.files.lock().iter().any(|(_, known, _)| known == id);
        serde_json::from_slice(&fs::read(known.then(|| self.path(id))?).ok()?).ok()
    }

    /// Deletes the response `id`; false if there is none.
    pub fn delete(&self, id: &str) -> bool {
        let mut files = self.files.lock();
        let Some(file) = files.iter().find(|(_, known, _)| known == id).cloned() else {
            return false;
        };
        files.remove(&file);
        fs::remove_file(self.path(id)).is_ok()
    }

    fn write(&self, id: &str, stored: &Stored) -> std::io::Result<u64> {
        let mut folder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut folder, 0o700);
        folder.recursive(true).create(&self.folder)?;
        let bytes = serde_json::to_vec(stored)?;
        let mut file = NamedTempFile::new_in(&self.folder)?;
        file.write_all(&bytes)?;
        file.persist(self.path(id))?;
        Ok(bytes.len() as u64)
    }

    /// Deletes responses that are too old, and the oldest while there are too many bytes.
    fn evict(&self) {
        let mut files = self.files.lock();
        let mut bytes: u64 = files.iter().map(|(_, _, bytes)| bytes).sum();
        while let Some((time, id, size)) = files.first() {
            let age = time.elapsed().unwrap_or_default();
            if age <= self.lifetime && bytes <= self.limit_bytes {
                break;
            }
            bytes -= size;
            // A file that is gone already needs no space.
            let _ = fs::remove_file(self.path(id));
            files.pop_first();
        }
    }

    /// Only ids of [`ResponseStore::files`] are paths: a client's id may contain anything.
    fn path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.json"))
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
        store.put("resp_1", &stored("one"));
        store.put("resp_2", &stored("two"));
        let store = ResponseStore::open(&folder, 1 << 20, day);
        assert_eq!(store.get("resp_1").unwrap().response, "one");
        assert!(store.delete("resp_1") && !store.delete("resp_1"));
        assert!(store.get("resp_1").is_none());
        for id in ["../resp_2", "", "resp_2.json"] {
            assert!(store.get(id).is_none() && !store.delete(id), "{id}");
        }
        // One more takes the space of the oldest.
        let store = ResponseStore::open(&folder, 1000, day);
        store.put("resp_3", &stored(&"x".repeat(900)));
        assert!(store.get("resp_3").is_some() && store.get("resp_2").is_none());
        let store = ResponseStore::open(&folder, 1000, Duration::ZERO);
        assert!(store.get("resp_3").is_none());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }
}
