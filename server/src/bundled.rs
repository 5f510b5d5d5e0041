//! The demonstration model inside the executable, so that a first start needs no download.
//!
//! `tiny-hybrid-4bit` was trained for this project to demonstrate the server. It knows capital
//! cities and little else, and is not an assistant.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

/// Name of the model for clients.
pub const NAME: &str = "tiny-hybrid-4bit";

/// First digits of SHA-256 over names, lengths and contents of the files: enough to distinguish releases. A constant,
/// because hashing them takes a third of the processor time of a start.
const DIGEST: &str = "ab3a4ce0b812";

macro_rules! files {
    ($($name:literal)*) => {
        &[$(($name, include_bytes!(concat!("../model/tiny-hybrid-4bit/", $name)))),*]
    };
}

const FILES: &[(&str, &[u8])] = files![
    "chat_template.jinja"
    "config.json"
    "generation_config.json"
    "model.safetensors"
    "model.safetensors.index.json"
    "tokenizer.json"
    "tokenizer_config.json"
];

/// Its files, by name.
pub fn files() -> &'static [(&'static str, &'static [u8])] {
    FILES
}

/// The folder with the bundled model, unpacked below `data_dir` if it is missing.
///
/// The folder appears atomically. It is unpacked again if any file differs from the bundled one.
///
/// # Errors
/// If `data_dir` cannot be written.
pub fn unpack(data_dir: &Path) -> Result<PathBuf> {
    let models = data_dir.join("models");
    let folder = models.join(format!("{NAME}-{DIGEST}"));
    if is_intact(&folder) {
        return Ok(folder);
    }
    let unpack = || -> std::io::Result<()> {
        steersman_files::create_private_folder(&models)?;
        let fresh = tempfile::Builder::new().prefix(".unpacking-").tempdir_in(&models)?;
        steersman_files::give_to_owner_of_parent(fresh.path())?;
        for (name, bytes) in FILES {
            steersman_files::replace_losable(&fresh.path().join(name), bytes)?;
        }
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        match fs::rename(fresh.path(), &folder) {
            // Another process unpacked the same files first.
            Err(_) if is_intact(&folder) => Ok(()),
            renamed => renamed,
        }
    };
    unpack().with_context(|| format!("unpacking the bundled model to {}", folder.display()))?;
    Ok(folder)
}

/// Tokens of its context.
pub fn context() -> Option<usize> {
    let (_, config) = FILES.iter().find(|(name, _)| *name == "config.json")?;
    let config: Value = serde_json::from_slice(config).ok()?;
    usize::try_from(config["text_config"]["max_position_embeddings"].as_u64()?).ok()
}

fn is_intact(folder: &Path) -> bool {
    FILES.iter().all(|(name, bytes)| {
        steersman_files::read(&folder.join(name), bytes.len() as u64)
            .is_ok_and(|file| file == *bytes)
    })
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn name_of_the_folder_has_the_digest_of_the_files() {
        let mut sha = Sha256::new();
        for (name, bytes) in FILES {
            sha.update(format!("{name} {}\n", bytes.len()));
            sha.update(bytes);
        }
        assert_eq!(hex::encode(sha.finalize())[..DIGEST.len()], *DIGEST);
    }

    #[test]
    fn damaged_bundled_model_is_unpacked_again() {
        let data = tempfile::tempdir().unwrap();
        let folder = unpack(data.path()).unwrap();
        assert!(is_intact(&folder));
        fs::write(folder.join("config.json"), "{}").unwrap();
        fs::remove_file(folder.join("tokenizer.json")).unwrap();
        assert_eq!(unpack(data.path()).unwrap(), folder);
        assert!(is_intact(&folder));
        let left: Vec<_> = fs::read_dir(data.path().join("models")).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary folder is left");
    }

    #[test]
    fn executable_contains_every_file_of_the_bundled_model() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("model").join(NAME);
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        for name in names {
            assert!(FILES.iter().any(|(known, _)| *known == name), "{name:?} is not in FILES");
        }
    }
}
