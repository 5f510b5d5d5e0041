//! The decode loop: it holds the running sequences and gives each step's rows to the model.
//!
//! The room that knows model, policy, store and text. Requests are prepared on threads of their own
//! (`preparation.rs`); everything else here runs on the engine thread. In each step every sequence names the rows
//! it needs (a chunk of its prompt, injected text, the token sampled last, or that token and a
//! draft). All rows are joined and run by one `forward`, and each sequence that has caught up samples
//! its next token from its last row. A step builds its graph from tokens that are still being
//! computed and reads them while it runs, so that neither host nor device waits for the other.

mod admit;
mod calibration;
mod embed;
mod load;
mod machine_profile;
mod prefetch;
mod preparation;
mod probe;
mod prompt_logprobs;
mod save;
mod serve;
mod settle;
mod speculate;
mod step;
#[cfg(test)]
pub mod tests;
mod threads;
mod warm_up;

pub use self::calibration::{Calibration, Skip};
pub use self::load::max_running;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use mlx_rs::{Array, Dtype};

use self::machine_profile::MachineProfileFile;
use self::prefetch::Prefetch;
use self::threads::Threads;
use crate::activity::ActivityReporter;
use crate::config::{Config, DraftKind, Pooling, SpeculationConfig};
use crate::draft::{Costs, Governor, MovingRate, TrialTime};
use crate::engine::Engine;
use crate::engine_thread::EngineThread;
use crate::error::{Error, Result};
use crate::model::{Model, Pass};
use crate::policy::{Policies, Storage};
use crate::prefix::Prefixes;
use crate::sample::rows::within;
use crate::schedule::await_prefix::AwaitingPrefix;
use crate::schedule::memory::{self, Memory};
use crate::schedule::plan::{Debt, PassCosts};
use crate::schedule::queue::Queue;
use crate::sequence::Sequence;
use crate::sequence::hooks::HookThreads;
use crate::sequence::prepare::Preparer;
use crate::text::Text;

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
    let (ready, loaded) = std::sync::mpsc::sync_channel(1);
    let (folder, data) = (folder.to_path_buf(), data.to_path_buf());
    let own_policies = policies.clone();
    let run = move || match Decoder::load(config, &folder, &data, own_policies) {
        Ok((decoder, info)) => {
            // Fails only if `start` was abandoned.
            if ready.send(Ok((info, decoder.queue.clone()))).is_ok() {
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

/// The state of the engine thread.
pub struct Decoder {
    pub(crate) model: Box<dyn Model>,
    pub(crate) text: Text,
    pub(crate) queue: Arc<Queue>,
    pub(crate) preparer: Arc<Preparer>,
    pub(crate) hook_threads: Rc<HookThreads>,
    pub(crate) prefixes: Prefixes,
    pub(crate) memory: Memory,
    pub(crate) activity: ActivityReporter,
    /// The prefix that is being computed while no request runs.
    pub(crate) prefetch: Option<Prefetch>,
    /// Whether to prefetch the next turn of a conversation.
    pub(crate) prefetch_turns: bool,
    pub(crate) store_min_tokens: usize,
    pub(crate) vocabulary: i32,
    /// Most sequences that run at the same time; further requests wait in the queue.
    pub(crate) max_running: usize,
    pub(crate) prefill_chunk: usize,
    /// The longest time of a pass beside streams; see [`crate::schedule::plan::Budget`].
    pub(crate) stall: Duration,
    /// Time that this step has spent on grammars.
    pub(crate) mask_time: Duration,
    pub(crate) pass_costs: PassCosts,
    pub(crate) debt: Debt,
    /// Whether passes run on this thread, as one has; see [`step`].
    pub(crate) runs_at_once: bool,
    pub(crate) speculation: SpeculationConfig,
    /// The smaller model that drafts for `model`, if configured.
    pub(crate) draft_model: Option<Rc<dyn Model>>,
    /// Layers of early-exit drafts, if calibration found that they pay.
    pub(crate) exit_layers: Option<usize>,
    /// Path of the calibration file.
    pub(crate) calibration_path: PathBuf,
    /// How embeddings are made.
    pub(crate) pooling: Pooling,
    /// Bits of KV in the cache; 0 if not quantized.
    pub(crate) kv_bits: u32,
    /// Layers whose feed-forward block is skipped, as `engine.skip_kl` permits.
    pub(crate) skip: Vec<usize>,
    /// What is known of this machine before requests are served.
    pub(crate) machine: MachineProfileFile,
    /// Threads of matrix products; `None` if they are not ours to choose.
    pub(crate) threads: Option<Threads>,
    /// Costs of passes on this machine; `None` without drafters.
    pub(crate) costs: Option<Costs>,
    /// Acceptance rates learned in earlier requests, by kind of drafter.
    pub(crate) learned_rates: [Vec<MovingRate>; DraftKind::ALL.len()],
    /// Governor of the previous request.
    pub(crate) learned_governor: Option<Governor>,
    /// What drafts may lose.
    pub(crate) trial_time: TrialTime,
    /// Type of the activations.
    pub(crate) dtype: Dtype,
    /// See [`speculate::near_tie_margin`].
    pub(crate) near_tie_margin: f32,
    /// Running sequences, in the order of admission.
    pub(crate) sequences: Vec<Sequence>,
    /// Preempted sequences, in the order in which they resume.
    pub(crate) preempted: VecDeque<Sequence>,
    /// Requests that wait for a prefix which a running sequence computes.
    pub(crate) awaiting_prefix: Vec<AwaitingPrefix>,
    /// Number of sequences so far.
    pub(crate) started: u64,
}

impl Decoder {
    /// The part of the model that runs: all but the skipped blocks. It is the same for prompts and
    /// replies, so that saved state equals the state of decoding.
    pub(crate) fn pass(&self) -> Pass<'_> {
        Pass { exit: None, skip: &self.skip }
    }

    /// Sets the threads of a pass over `rows` rows.
    pub(crate) fn set_threads(&mut self, rows: usize) {
        if let Some(threads) = &mut self.threads {
            threads.set_for(rows);
        }
    }

    /// Logits [1, R, V] of hidden states [1, R, D], without padding columns.
    pub(crate) fn logits(&self, hidden: &Array) -> Result<Array> {
        within(self.model.logits(hidden)?, self.vocabulary)
    }
}
