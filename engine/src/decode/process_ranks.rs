//! A decoder over ranks that are processes: this one is the first, or follows it.
//!
//! Whoever starts the processes gives each its place in the environment (see [`join`]), and connects them: what the first rank
//! writes into an output, another one reads from its input.

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;

use super::Decoder;
use super::load::load_led;
use crate::config::{Config, ModelConfig};
use crate::engine::Info;
use crate::error::{Error, Result};
use crate::model::{choose_device, follow, load_part};
use crate::policy::Policies;
use crate::ranks::{Backend, entries, join};

/// As [`Decoder::load`], as the first of the ranks that the environment names. Each other rank reads one of `outputs`. There is
/// no prefix store: it has the parts of one rank.
///
/// # Errors
/// As [`Decoder::load`]; [`Error::Array`] if the ranks cannot be joined, or if this is not the first of as many as
/// there are outputs.
pub fn load_as_first_rank(
    mut config: Config,
    folder: &Path,
    data: &Path,
    policies: Arc<Policies>,
    backend: Backend,
    outputs: Vec<Box<dyn Write>>,
) -> Result<(Decoder, Info)> {
    choose_device(config.model.device)?;
    let ranks = join(backend)?;
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

/// Follows the first of the ranks that the environment names, whose log is `input`, until it ends.
///
/// # Errors
/// [`Error::Array`] if the ranks cannot be joined, if this one differs from the first, or if another one has ended; those of
/// loading the part of the model in `folder`.
pub fn follow_first_rank(
    config: &ModelConfig,
    folder: &Path,
    backend: Backend,
    input: impl BufRead,
) -> Result<()> {
    choose_device(config.device)?;
    let ranks = join(backend)?;
    let loaded = load_part(folder, config, &ranks)?;
    follow(&*loaded.model, &ranks, loaded.dtype, entries::read(input))
}
