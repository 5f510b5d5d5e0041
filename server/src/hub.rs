//! Locates a model's files: a local folder, a GGUF file, a Hugging Face repo, or the bundled model.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Result;
use steersman_engine::tools::model_types;
use steersman_models::command::choice;
use steersman_models::facts::Facts;
pub use steersman_models::hub::Hub;
use steersman_models::named::{self, NamedAs, name_of_folder};

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

/// Finds the model that `[model] path` or `--model` names, downloading a repo that is not cached. Says on stderr which
/// size a short name without one stands for.
///
/// # Errors
/// If the model does not exist, is of a family that cannot be loaded, or cannot be downloaded; the message says what
/// to do.
pub fn find(path: &str, data_dir: &Path) -> Result<Found> {
    if let Some(choice) = choice(path) {
        // Nobody may read it.
        let _ = writeln!(std::io::stderr(), "{choice}");
    }
    find_with(path, data_dir, |repo| Hub::from_env().fetch(repo, &model_types()))
}

/// What `path` is, the name of the bundled model included.
///
/// # Errors
/// If it names no model.
pub fn named_as(path: &str) -> Result<NamedAs<'_>> {
    let is_bundled = path == bundled::NAME && !Path::new(path).exists();
    named::named_as(if is_bundled { "" } else { path })
}

/// Whether the files of the model that `path` names are on this machine; otherwise they would be downloaded.
///
/// # Errors
/// If `path` names no model, or may not be downloaded.
pub fn is_here(path: &str) -> Result<bool> {
    if let NamedAs::Nothing = named_as(path)? { Ok(true) } else { named::is_here(path) }
}

/// Tokens of the context of the model that `path` names, if its files are on this machine and tell.
pub fn context_of(path: &str) -> Option<usize> {
    let folder = match named_as(path).ok()? {
        NamedAs::Nothing => return bundled::context(),
        NamedAs::Folder(folder) => folder,
        NamedAs::Repo(repo) => Hub::from_env().cached(repo)?,
    };
    usize::try_from(Facts::read(&folder).ok()?.context?).ok()
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
