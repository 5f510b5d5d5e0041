//! Locates a model's files: a local folder, a Hugging Face repo, or the bundled model.

use std::path::{Path, PathBuf};

use anyhow::Result;
pub use steersman_models::hub::{Hub, is_here};
use steersman_models::hub::{NamedAs, name_of_folder, named_as};

use crate::bundled;

/// A model whose files are on this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// The folder with `config.json`, weights and tokenizer, or a GGUF file.
    pub folder: PathBuf,
    /// Name of the folder, id of the repo, or name of the bundled model.
    pub name: String,
    /// Whether this is the bundled demonstration model.
    pub bundled: bool,
}

/// Finds the model that `[model] path` or `--model` names, downloading a repo that is not cached.
///
/// # Errors
/// If the model does not exist or cannot be downloaded; the message says what to do.
pub fn find(path: &str, data_dir: &Path) -> Result<Found> {
    find_with(path, data_dir, |repo| Hub::from_env().fetch(repo))
}

/// As [`find`], without downloading anything.
///
/// # Errors
/// If the model does not exist or is not on this machine.
pub fn find_here(path: &str, data_dir: &Path) -> Result<Found> {
    find_with(path, data_dir, |repo| Hub::from_env().cached_or_error(repo))
}

fn find_with(
    path: &str,
    data_dir: &Path,
    folder_of: impl FnOnce(&str) -> Result<PathBuf>,
) -> Result<Found> {
    let name = name_of(path);
    let (folder, bundled) = match named_as(path)? {
        NamedAs::Nothing => (bundled::unpack(data_dir)?, true),
        NamedAs::Folder(folder) => (folder, false),
        NamedAs::Repo(repo) => (folder_of(repo)?, false),
    };
    Ok(Found { folder, name, bundled })
}

/// The name of the model in `path` for clients, unless the configuration gives it another one.
pub fn name_of(path: &str) -> String {
    match named_as(path) {
        Ok(NamedAs::Nothing) => bundled::NAME.into(),
        Ok(NamedAs::Folder(folder)) => name_of_folder(&folder),
        Ok(NamedAs::Repo(_)) | Err(_) => path.into(),
    }
}
