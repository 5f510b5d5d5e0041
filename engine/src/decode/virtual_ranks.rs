//! A decoder over ranks that are threads of this process: it proves that everything a decoder does with caches and passes is
//! computed by ranks as by one process.
//!
//! Each thread has its part of the weights and follows the log of the decoder's. All of them are in one memory and on one
//! device, so nothing is saved by it.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use super::Decoder;
use super::load::load_led;
use crate::config::{Config, ModelConfig};
use crate::engine::Info;
use crate::error::{ConfigError, Error, Result};
use crate::model::{follow, load_part};
use crate::policy::Policies;
use crate::ranks::{Entry, Log, Ranks, in_threads};

/// Entries that the first rank may be ahead of another one: those of a few passes.
const ENTRIES_AHEAD: usize = 256;

/// Most ranks of a process: each is a thread with a part of the model.
const RANKS: usize = 8;

/// As [`Decoder::load`], for `count` ranks that are threads. There is no prefix store: it has the parts of one rank.
///
/// # Errors
/// As [`Decoder::load`]; [`Error::Config`] if `count` is not from 1 to 8, or the ranks cannot divide the model.
pub fn load_on_threads(
    mut config: Config,
    folder: &Path,
    data: &Path,
    policies: Arc<Policies>,
    count: usize,
) -> Result<(Decoder, Info)> {
    if !(1..=RANKS).contains(&count) {
        let problem = format!("is {count}, must be from 1 to {RANKS}");
        return Err(Error::Config(ConfigError::Key { field: "ranks", problem }));
    }
    let mut ranks = in_threads(count).into_iter();
    let Some(first) = ranks.next().filter(|first| first.are_several()) else {
        return Decoder::load(config, folder, data, policies);
    };
    config.store.enabled = false;
    let followers = Followers::start(ranks, folder, &config.model)?;
    let log = Log::new(move |entry| followers.send(entry));
    load_led(config, folder, data, policies, Some((first, log)))
}

/// The threads of the other ranks. They end when this is dropped.
struct Followers {
    logs: Vec<SyncSender<Entry>>,
    threads: Vec<JoinHandle<()>>,
}

impl Followers {
    fn start(
        ranks: impl Iterator<Item = Ranks>,
        folder: &Path,
        config: &ModelConfig,
    ) -> Result<Self> {
        let mut followers = Self { logs: Vec::new(), threads: Vec::new() };
        for ranks in ranks {
            let (sender, log) = sync_channel(ENTRIES_AHEAD);
            let (folder, config) = (folder.to_owned(), config.clone());
            let thread = Builder::new().name(format!("rank {}", ranks.index()));
            let thread = thread.spawn(move || {
                let followed = load_part(&folder, &config, &ranks).and_then(|loaded| {
                    follow(&*loaded.model, &ranks, loaded.dtype, log.into_iter().map(Ok))
                });
                if let Err(error) = followed {
                    tracing::error!(rank = ranks.index(), %error, "rank ended");
                }
            });
            followers.threads.push(thread.map_err(|_| Error::Stopped)?);
            followers.logs.push(sender);
        }
        Ok(followers)
    }

    /// Sends an entry to all; returns false if one of them has ended.
    fn send(&self, entry: &Entry) -> bool {
        self.logs.iter().all(|log| log.send(entry.clone()).is_ok())
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        self.logs.clear();
        for thread in self.threads.drain(..) {
            // Its panic was logged.
            let _ = thread.join();
        }
    }
}
