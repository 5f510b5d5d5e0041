//! The demonstration model inside the executable, so that a first start needs no download.
//!
//! `tiny-hybrid-4bit` was trained for this project to show what the server does. It knows capital
//! cities and little else: it is no assistant.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// Name under which clients ask for it.
pub const NAME: &str = "tiny-hybrid-4bit";

/// Digits of the digest in the folder's name: enough to tell two releases apart.
const DIGEST_DIGITS: usize = 12;

macro_rules! files {
    ($($name:literal)*) => {
        &[$(($name, include_bytes!(concat!("../model/tiny-hybrid-4bit/", $name)))),*]
    };
}

/// Its files, by name.
const FILES: &[(&str, &[u8])] = files![
    "chat_template.jinja"
    "config.json"
    "generation_config.json"
    "model.safetensors"
    "model.safetensors.index.json"
    "tokenizer.json"
    "tokenizer_config.json"
];

/// The folder with the bundled model, unpacked under `data_dir` if it is not there yet.
///
/// The folder appears whole or not at all; one whose files are not the bundled ones, byte for byte,
/// is unpacked again.
///
/// # Errors
/// When `data_dir` cannot be written.
pub fn unpack(data_dir: &Path) -> Result<PathBuf> {
    let models = data_dir.join("models");
    let folder = models.join(format!("{NAME}-{}", digest()));
    if is_whole(&folder) {
        return Ok(folder);
    }
    let unpack = || -> std::io::Result<()> {
        fs::create_dir_all(&models)?;
        let fresh = tempfile::Builder::new().prefix(".unpacking-").tempdir_in(&models)?;
        for (name, bytes) in FILES {
            fs::write(fresh.path().join(name), bytes)?;
        }
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        match fs::rename(fresh.path(), &folder) {
            // Another process was faster, and unpacked the same bytes.
            Err(_) if is_whole(&folder) => Ok(()),
            renamed => renamed,
        }
    };
    unpack().with_context(|| format!("unpacking the bundled model to {}", folder.display()))?;
    Ok(folder)
}

fn is_whole(folder: &Path) -> bool {
    FILES.iter().all(|(name, bytes)| fs::read(folder.join(name)).is_ok_and(|file| file == *bytes))
}

/// The first digits of SHA-256 over names, lengths and contents.
fn digest() -> String {
    let mut sha = Sha256::new();
    for (name, bytes) in FILES {
        sha.update(format!("{name} {}\n", bytes.len()));
        sha.update(bytes);
    }
    let digits: String = sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    digits[..DIGEST_DIGITS].to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_bundled_model_is_unpacked_again() {
        let data = tempfile::tempdir().unwrap();
        let folder = unpack(data.path()).unwrap();
        assert!(is_whole(&folder));
        fs::write(folder.join("config.json"), "{}").unwrap();
        fs::remove_file(folder.join("tokenizer.json")).unwrap();
        assert_eq!(unpack(data.path()).unwrap(), folder);
        assert!(is_whole(&folder));
        let left: Vec<_> = fs::read_dir(data.path().join("models")).unwrap().collect();
        assert_eq!(left.len(), 1, "nothing of the unpacking stays behind");
    }

    #[test]
    fn every_file_of_the_bundled_model_is_in_the_executable() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("model").join(NAME);
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        for name in names {
            assert!(FILES.iter().any(|(known, _)| *known == name), "{name:?} is not in FILES");
        }
    }
}
