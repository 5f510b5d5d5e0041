//! Locates a model's files: a local folder, a GGUF file, a Hugging Face repo, or the bundled model.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use steersman_engine::config::Config;
use steersman_engine::tools::{Machine, model_types};
use steersman_models::catalogue;
use steersman_models::command::choice;
use steersman_models::facts::Facts;
pub use steersman_models::hub::Hub;
use steersman_models::named::{self, NamedAs, name_of_folder};

use crate::bundled;
use crate::words::suggestion;

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

/// Bytes by which a short name without a size gets one in all that follows: what models may take of the memory of the
/// device in `config`. Without that device, loading says so.
pub fn room(config: &Config) -> u64 {
    let gpu = Machine::of(config).ok().and_then(|machine| machine.gpu_bytes);
    catalogue::room(gpu, config.engine.memory_limit_bytes)
}

/// Finds the model that `[model] path` or `--model` names, downloading a repo that is not cached. Says on stderr which
/// size a short name without one stands for.
///
/// # Errors
/// If the model does not exist, is of a family that cannot be loaded, or cannot be downloaded; the message says what
/// to do.
pub fn find(path: &str, room: u64, data_dir: &Path) -> Result<Found> {
    if let Some(choice) = choice(path, room) {
        // Nobody may read it.
        let _ = writeln!(std::io::stderr(), "{choice}");
    }
    find_with(path, room, data_dir, |repo| Hub::from_env().fetch(repo, &model_types()))
}

/// What `path` is, the name of the bundled model included.
///
/// # Errors
/// If it names no model.
pub fn named_as(path: &str, room: u64) -> Result<NamedAs<'_>> {
    let named = named::named_as(if is_bundled(path) { "" } else { path }, room);
    named.map_err(|error| match suggestion(path, [bundled::NAME]) {
        near if near.is_empty() => error,
        near => anyhow!("there is no model {path}{near}"),
    })
}

/// Whether `path` is the name of the bundled model, or empty.
fn is_bundled(path: &str) -> bool {
    path.is_empty() || (path == bundled::NAME && !Path::new(path).exists())
}

/// Whether the files of the model that `path` names are on this machine; otherwise they would be downloaded.
///
/// # Errors
/// If `path` names no model, or may not be downloaded.
pub fn is_here(path: &str, room: u64) -> Result<bool> {
    if is_bundled(path) { Ok(true) } else { named::is_here(path, room) }
}

/// Tokens of the context of the model that `path` names, if its files are on this machine and tell.
pub fn context_of(path: &str, room: u64) -> Option<usize> {
    let folder = match named_as(path, room).ok()? {
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
pub fn find_here(path: &str, room: u64, data_dir: &Path) -> Result<Found> {
    find_with(path, room, data_dir, |repo| Hub::from_env().cached_or_error(repo))
}

fn find_with(
    path: &str,
    room: u64,
    data_dir: &Path,
    folder_of: impl FnOnce(&str) -> Result<PathBuf>,
) -> Result<Found> {
    let name = name_of(path);
    let (folder, bundled) = match named_as(path, room)? {
        NamedAs::Nothing => (bundled::unpack(data_dir)?, true),
        NamedAs::Folder(folder) => (folder, false),
        NamedAs::Repo(repo) => (folder_of(repo)?, false),
    };
    Ok(Found { folder, name, bundled })
}

/// The name of the model in `path` for clients, unless the configuration gives it another one.
pub fn name_of(path: &str) -> String {
    match named::folder(path) {
        _ if is_bundled(path) => bundled::NAME.into(),
        Some(folder) => name_of_folder(&folder),
        None => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use steersman_engine::config::Device;
    use steersman_models::machine::memory_bytes;

    use super::*;

    #[test]
    fn the_device_of_the_configuration_has_the_room_for_a_model() {
        let mut config = Config::default();
        config.model.device = Device::Cpu;
        assert_eq!(room(&config), memory_bytes().unwrap() / 10 * 6);
        config.engine.memory_limit_bytes = 1 << 30;
        assert_eq!(room(&config), 1 << 30);
    }
}
