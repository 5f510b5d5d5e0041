//! The models in the hub's cache: listing and removing them.
//!
//! A repo `owner/name` is the folder `models--owner--name` with `blobs`, `refs` and `snapshots`, in the
//! layout of Python's `huggingface_hub`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::hub::{self, Hub, PREFIX, RepoFolder};
use crate::named::near;

/// A repo in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// `owner/name`
    pub repo_id: String,
    /// The folder of the newest commit; `None` if a download never got that far.
    pub folder: Option<PathBuf>,
    /// The models that it has all files of: a folder, and GGUF files with their quantizations.
    pub models: Vec<(Option<String>, PathBuf)>,
    /// Bytes on disk of all its commits and unfinished downloads.
    pub bytes: u64,
    /// The folder with everything of this repo.
    repo: RepoFolder,
}

/// All models in the cache of `hub`, by name. Repos that hold no model are left out.
///
/// # Errors
/// If the cache exists and cannot be read.
pub fn list(hub: &Hub) -> Result<Vec<Snapshot>> {
    if !hub.cache.exists() {
        return Ok(Vec::new());
    }
    let read = || format!("reading the cache {}", hub.cache.display());
    let mut snapshots = Vec::new();
    for entry in fs::read_dir(&hub.cache).with_context(read)? {
        let entry = entry.with_context(read)?;
        let name = entry.file_name();
        let repo_id = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let repo_id = repo_id.map(|name| name.replacen("--", "/", 1));
        let Some(repo_id) = repo_id.filter(|id| hub::is_repo_id(id)) else { continue };
        // A folder that no download makes, such as one whose name ends in a dot, hides no other.
        let Ok(repo) = RepoFolder::new(&hub.cache, &repo_id) else { continue };
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            snapshots.push(Snapshot::read(repo, repo_id));
        }
    }
    snapshots.retain(|snapshot| !snapshot.models.is_empty() || snapshot.bytes > 0);
    snapshots.sort_by(|a, b| a.repo_id.cmp(&b.repo_id));
    Ok(snapshots)
}

impl Snapshot {
    /// The folder with everything of the repo.
    pub fn root(&self) -> &Path {
        self.repo.root()
    }

    fn read(repo: RepoFolder, repo_id: String) -> Self {
        let folder = repo.commit().map(|commit| repo.snapshot(&commit));
        let folder = folder.filter(|folder| folder.is_dir());
        let models = folder.as_deref().map(hub::models_in).unwrap_or_default();
        let bytes = bytes_of(repo.root());
        Self { repo_id, folder, models, bytes, repo }
    }
}

/// Removes the repo `repo_id` from the cache: all its commits. Returns what was removed.
///
/// # Errors
/// If the cache has no repo of exactly this name; the message has similar ones.
pub fn remove(hub: &Hub, repo_id: &str) -> Result<Snapshot> {
    let mut snapshots = list(hub)?;
    // Compared with what is listed: a file system may find `Owner/Name` under `owner/name`.
    let Some(at) = snapshots.iter().position(|snapshot| snapshot.repo_id == repo_id) else {
        let names: Vec<_> = snapshots.iter().map(|snapshot| snapshot.repo_id.as_str()).collect();
        bail!(
            "there is no model `{repo_id}` in the cache {}{}",
            hub.cache.display(),
            similar(repo_id, &names)
        );
    };
    let snapshot = snapshots.swap_remove(at);
    let removed = snapshot.repo.remove();
    removed.with_context(|| format!("removing {}", snapshot.root().display()))?;
    Ok(snapshot)
}

/// `; similar: a, b`, or nothing.
pub fn similar(name: &str, known: &[&str]) -> String {
    let near = near(name, known);
    if near.is_empty() { String::new() } else { format!("; similar: {}", near.join(", ")) }
}

/// Bytes of the files below `folder`. Links do not count.
fn bytes_of(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes_of(&entry.path()),
        Ok(found) if found.is_file() => found.len(),
        _ => 0,
    });
    bytes.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHA: &str = "0123456789abcdef";

    fn hub(cache: &Path) -> Hub {
        Hub {
            endpoint: "http://127.0.0.1:1".into(),
            cache: cache.into(),
            token: None,
            offline: true,
        }
    }

    fn add(hub: &Hub, folder: &str, files: &[&str]) {
        let repo = hub.cache.join(folder);
        let snapshot = repo.join("snapshots").join(SHA);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(repo.join("refs")).unwrap();
        fs::write(repo.join("refs/main"), SHA).unwrap();
        files.iter().for_each(|file| fs::write(snapshot.join(file), "{}").unwrap());
    }

    const COMPLETE: &[&str] = &["config.json", "tokenizer.json", "model.safetensors"];

    #[test]
    fn models_in_the_cache_are_listed_with_their_state() {
        let cache = tempfile::tempdir().unwrap();
        let hub = hub(&cache.path().join("hub"));
        assert_eq!(list(&hub).unwrap(), []);
        add(&hub, "models--owner--b", COMPLETE);
        add(&hub, "models--owner--a--c", &COMPLETE[..2]);
        add(&hub, "datasets--owner--x", COMPLETE);
        fs::write(hub.cache.join("version.txt"), "1").unwrap();
        let listed = list(&hub).unwrap();
        let seen: Vec<_> =
            listed.iter().map(|s| (s.repo_id.as_str(), s.models.len() == 1)).collect();
        assert_eq!(seen, [("owner/a--c", false), ("owner/b", true)]);
        assert_eq!(listed[1].bytes, 3 * 2 + SHA.len() as u64);
    }

    #[test]
    fn only_the_model_of_exactly_this_name_is_removed() {
        let cache = tempfile::tempdir().unwrap();
        let hub = hub(cache.path());
        add(&hub, "models--owner--small", COMPLETE);
        add(&hub, "models--owner--small-4bit", COMPLETE);
        for wrong in ["owner/smal", "Owner/small", "small", "../small", "owner/small/", "", "."] {
            let error = remove(&hub, wrong).unwrap_err().to_string();
            assert!(error.starts_with(&format!("there is no model `{wrong}`")), "{error}");
            assert_eq!(list(&hub).unwrap().len(), 2, "{wrong}");
        }
        let error = remove(&hub, "owner/smal").unwrap_err().to_string();
        assert!(error.ends_with("; similar: owner/small, owner/small-4bit"), "{error}");
        assert_eq!(remove(&hub, "owner/small").unwrap().repo_id, "owner/small");
        let left = list(&hub).unwrap();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].repo_id, "owner/small-4bit");
        assert_eq!(fs::read_dir(&hub.cache).unwrap().count(), 1, "no temporary folder is left");
    }

    /// A server that ended while it removed a repo left its files to nobody, and in a container, where all processes have
    /// one number, no repo could be removed any more.
    #[test]
    fn what_a_removal_left_behind_is_in_no_ones_way_and_deleted_by_the_next() {
        let cache = tempfile::tempdir().unwrap();
        let hub = hub(cache.path());
        let process = std::process::id();
        let rests = [format!(".removing-{process}"), format!(".removing-{process}-0")];
        for rest in &rests {
            add(&hub, rest, COMPLETE);
        }
        fs::write(hub.cache.join(".removing-none"), "a file").unwrap();
        add(&hub, "models--owner--small", COMPLETE);
        assert_eq!(list(&hub).unwrap().len(), 1, "rests are no models");
        remove(&hub, "owner/small").unwrap();
        let left: Vec<_> =
            fs::read_dir(&hub.cache).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, [".removing-none"]);
    }

    /// One folder, which no download makes, hid all models.
    #[test]
    fn a_folder_that_is_no_repo_hides_no_model() {
        let cache = tempfile::tempdir().unwrap();
        let hub = hub(cache.path());
        add(&hub, "models--owner--small", COMPLETE);
        add(&hub, "models--owner--dot.", COMPLETE);
        add(&hub, &format!("models--owner--{}", "x".repeat(236)), COMPLETE);
        let listed = list(&hub).unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(remove(&hub, "owner/small").unwrap().repo_id, "owner/small");
    }
}
