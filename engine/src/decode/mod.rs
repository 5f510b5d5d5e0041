//! The decode loop: it holds the running sequences and gives each step's rows to the model.
//!
//! The room that knows model, policy, store and text. Requests are prepared on threads of their own
//! (`preparation.rs`); everything else here runs on the engine thread. In each step every sequence names the rows
//! it needs (a chunk of its prompt, injected text, the token sampled last, or that token and a
//! draft). All rows are joined and run by one `forward`, and each sequence that has caught up samples
//! its next token from its last row, or one after each row of a draft. A step builds its graph from
//! tokens that are still being computed and reads them while it runs, so that neither host nor device
//! waits for the other.

mod admit;
mod calibration;
mod choices;
mod costs;
mod embed;
mod load;
mod machine_profile;
mod mask_time;
mod network;
mod prefetch;
mod preparation;
mod probe;
mod process_ranks;
mod prompt_logprobs;
mod serve;
mod settle;
mod speculate;
mod start;
mod step;
#[cfg(test)]
pub mod tests;
mod threads;
mod virtual_ranks;
mod warm_up;

pub use self::calibration::{Calibration, Skip};
pub use self::load::max_running;
pub use self::process_ranks::{
    FollowingRank, Outputs, join_ranks, load_as_first_rank, start_as_first_rank, weights_digest,
};
pub use self::virtual_ranks::load_on_threads;

use std::path::Path;
use std::sync::Arc;

use self::costs::CostModels;
use self::mask_time::MaskTime;
use self::network::Network;
use self::prefetch::Prefetch;
use self::preparation::PolicyThreads;
use self::speculate::Speculation;
use crate::activity::ActivityReporter;
use crate::cache::Cache;
use crate::config::Config;
use crate::engine::{Engine, Info};
use crate::engine_thread::EngineThread;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::policy::{Policies, Storage};
use crate::prefix::{Prefixes, Retention};
use crate::schedule::Schedule;
use crate::schedule::memory;
use crate::schedule::saved::SavedState;
use crate::sequence::Sequence;

/// Loads the policies of all profiles of `config`, for all models to share. Reloads them when their
/// files change; their state is stored in the folder `data`.
///
/// # Errors
/// When a policy cannot be loaded; names the profile and the policy.
pub fn policies(config: &Config, data: &Path) -> Result<Arc<Policies>> {
    let storage = Storage::open(data)?;
    let policies = Arc::new(Policies::load(&config.policy, &config.profile_policies(), &storage)?);
    policies.watch();
    Ok(policies)
}

/// Loads the model in `folder` on a thread of its own and serves requests there, steered by `policies`.
/// State is saved in the folder `data`.
///
/// Returns a handle and the thread when the model is ready. After the last handle is dropped, the
/// thread finishes its requests, flushes saved state to disk, and ends: join it to wait for that. If it
/// ends before ([`Engine::ended`]), it cannot go on.
///
/// # Errors
/// When the engine cannot start; names the file or the key.
pub fn start(
    config: Config,
    folder: &Path,
    data: &Path,
    policies: Arc<Policies>,
) -> Result<(Engine, EngineThread)> {
    let config = config.check()?;
    let (folder, data, own) = (folder.to_path_buf(), data.to_path_buf(), policies.clone());
    start_loaded_by(move || Decoder::load(config, &folder, &data, own), policies)
}

/// [`start`] of the decoder that `load` returns, which is called on the engine's thread.
fn start_loaded_by(
    load: impl FnOnce() -> Result<(Decoder, Info)> + Send + 'static,
    policies: Arc<Policies>,
) -> Result<(Engine, EngineThread)> {
    let (ready, loaded) = std::sync::mpsc::sync_channel(1);
    let run = move || match load() {
        Ok((decoder, info)) => {
            // Fails only if `start` was abandoned.
            if ready.send(Ok((info, decoder.schedule.queue().clone()))).is_ok() {
                decoder.run();
                memory::release_buffers();
            }
        }
        Err(error) => drop(ready.send(Err(error))),
    };
    let thread = EngineThread::spawn(run).map_err(|_| Error::Stopped)?;
    let (info, queue) = loaded.recv().map_err(|_| Error::Stopped)??;
    Ok((Engine::new(queue, info, policies), thread))
}

/// The state of the engine thread, in parts that each own what they change.
pub struct Decoder {
    network: Network,
    schedule: Schedule,
    masks: MaskTime,
    saved: SavedState,
    prefetch: Prefetch,
    speculation: Speculation,
    policies: PolicyThreads,
    costs: CostModels,
    activity: ActivityReporter,
}

impl Decoder {
    /// Loads model, tokenizer and template from `folder`, and opens the prefix store in `data`.
    ///
    /// # Errors
    /// When something is missing or wrong; names the file or the key. A store that cannot be opened
    /// is only a warning.
    pub fn load(
        config: Config,
        folder: &Path,
        data: &Path,
        policies: Arc<Policies>,
    ) -> Result<(Self, Info)> {
        load::load(config, folder, data, policies)
    }

    /// The model, and how its passes run.
    pub(crate) fn network(&self) -> &Network {
        &self.network
    }

    /// The model, to run passes without sequences.
    pub(crate) fn network_mut(&mut self) -> &mut Network {
        &mut self.network
    }

    /// The drafters, and what was learned of them.
    pub(crate) fn speculation(&self) -> &Speculation {
        &self.speculation
    }

    /// The drafters, to be changed.
    pub(crate) fn speculation_mut(&mut self) -> &mut Speculation {
        &mut self.speculation
    }

    /// What passes cost on this machine.
    pub(crate) fn costs(&self) -> &CostModels {
        &self.costs
    }

    /// An empty cache.
    pub(crate) fn empty_cache(&self) -> Cache {
        self.saved.empty()
    }

    /// Returns true if arrays are in the memory of a GPU.
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.saved.memory().is_on_gpu()
    }

    /// Most rows of prompt in a pass.
    pub(crate) fn chunk(&self) -> usize {
        self.schedule.chunk()
    }

    /// Replaces the most rows of prompt in a pass, and returns the number before.
    pub(crate) fn set_chunk(&mut self, chunk: usize) -> usize {
        self.schedule.set_chunk(chunk)
    }

    /// Prepares a request on this thread, and admits it.
    pub(crate) fn admit(&mut self, job: Job) -> Result<Sequence> {
        let prepared = self.policies.preparer().prepare(job)?;
        admit::admit(self, prepared)
    }

    /// Saves the state of the tokens of a sequence that have run.
    pub(crate) fn save(&mut self, sequence: &Sequence) {
        self.saved.save(sequence, Retention::default());
    }

    /// Replaces the prefix cache by an empty one of at most `bytes` bytes, in which prefixes of any length are shared.
    pub(crate) fn forget_prefixes(&mut self, bytes: u64) -> Result<()> {
        let shares = self.saved.prefixes().shares();
        *self.saved.prefixes_mut() = Prefixes::new(self.saved.empty(), bytes, None, 0)?;
        self.saved.prefixes_mut().share_from(shares.then_some(1));
        Ok(())
    }
}
