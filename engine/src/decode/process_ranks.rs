//! A decoder over ranks that are processes: this one is the first, or follows it.
//!
//! Whoever starts the processes gives each its place in the environment, which [`join_ranks`] reads, and connects them: what
//! the first rank writes into an output, another one reads.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use super::load::load_led;
use super::{Decoder, start_loaded_by};
use crate::config::{Config, Device, ModelConfig};
use crate::engine::{Engine, Info};
use crate::engine_thread::EngineThread;
use crate::error::{Error, Result};
use crate::model::{Loaded, WeightsDigest, choose_device, follow, load_part};
use crate::policy::Policies;
use crate::ranks::{Backend, Entry, Ranks, entries, join};

/// The outputs from which the other ranks read the log, one each.
pub type Outputs = Vec<Box<dyn Write + Send>>;

/// Joins the ranks that the environment names, on `device`: waits until all are there, without a deadline. A process can do
/// that once.
///
/// # Errors
/// [`Error::Array`] if this MLX lacks the backend, or the environment does not name the ranks.
pub fn join_ranks(device: Device, backend: Backend) -> Result<Ranks> {
    choose_device(device)?;
    join(backend)
}

/// As [`Decoder::load`], as the first of `ranks`. Each other rank reads one of `outputs`. There is no prefix store: it has the
/// parts of one rank.
///
/// # Errors
/// As [`Decoder::load`]; [`Error::Array`] if this is not the first of as many ranks as there are outputs.
pub fn load_as_first_rank(
    mut config: Config,
    folder: &Path,
    data: &Path,
    policies: Arc<Policies>,
    ranks: Ranks,
    outputs: Outputs,
) -> Result<(Decoder, Info)> {
    let (index, count) = (ranks.index(), ranks.count());
    if index != 0 || count as usize != outputs.len() + 1 {
        let others = outputs.len();
        return Err(Error::Array(format!(
            "this process is rank {index} of {count}, and not the first of those with {others} others"
        )));
    }
    if !ranks.are_several() {
        return Decoder::load(config, folder, data, policies);
    }
    config.store.enabled = false;
    load_led(config, folder, data, policies, Some((ranks, entries::write_to(outputs))))
}

/// As [`start`](super::start), as the first of `ranks`; see [`load_as_first_rank`].
///
/// # Errors
/// The errors of `start` and of [`load_as_first_rank`].
pub fn start_as_first_rank(
    config: Config,
    folder: &Path,
    data: &Path,
    policies: Arc<Policies>,
    ranks: Ranks,
    outputs: Outputs,
) -> Result<(Engine, EngineThread)> {
    let config = config.check()?;
    let (folder, data, own) = (folder.to_path_buf(), data.to_path_buf(), policies.clone());
    let load = move || load_as_first_rank(config, &folder, &data, own, ranks, outputs);
    start_loaded_by(load, policies)
}

/// SHA-256 over the weight files of the model in `folder`, which all ranks have in common. Digests of unchanged files are read
/// from the folder `data`.
///
/// # Errors
/// [`Error::Config`] names a file that is missing or cannot be read.
pub fn weights_digest(folder: &Path, data: &Path) -> Result<[u8; 32]> {
    WeightsDigest::start(folder, data)?.finish()
}

/// A rank that follows the first one.
pub struct FollowingRank {
    loaded: Loaded,
    ranks: Ranks,
}

impl FollowingRank {
    /// Loads the part of the model in `folder` that this one of `ranks` has.
    ///
    /// # Errors
    /// The errors of loading a model; an error names what the ranks cannot divide.
    pub fn load(config: &ModelConfig, folder: &Path, ranks: Ranks) -> Result<Self> {
        Ok(Self { loaded: load_part(folder, config, &ranks)?, ranks })
    }

    /// Executes the entries of the log until it ends.
    ///
    /// # Errors
    /// [`Error::Array`] if this rank differs from the first, or if another one has ended.
    pub fn follow(&self, log: impl IntoIterator<Item = Result<Entry>>) -> Result<()> {
        follow(&*self.loaded.model, &self.ranks, self.loaded.dtype, log)
    }
}
