//! The decode loop: it holds the running sequences and gives each step's rows to the model.
//!
//! The one room that knows model, policy, store and text. Requests are prepared on threads of their own
//! (`prepare.rs`); everything else here runs on the engine thread. In each step every sequence names the rows
//! it needs (a chunk of its prompt, injected text, the token sampled last, or that token and a
//! draft). All rows are joined and run by one `forward`, and each sequence that has caught up samples
//! its next token from its last row. A step builds its graph from tokens that are still being
//! computed and reads them while it runs, so that neither host nor device waits for the other.

mod adjust;
mod admit;
mod apply;
mod await_prefix;
pub mod calibrate;
mod choices;
mod constrain;
mod draft;
mod embed;
mod governor;
mod hooks;
mod host_sample;
mod limits;
mod logprobs;
pub mod machine;
mod machine_profile;
mod memory;
mod next_token;
mod noise;
mod outlet;
pub mod passes;
mod penalties;
mod plan;
mod preempt;
mod prefetch;
mod prepare;
mod rewind;
mod sample;
mod sampler;
mod samples;
mod save_points;
mod sequence;
mod serve;
mod speculate;
mod steer;
mod step;
#[cfg(test)]
mod tests;
mod threads;
mod tool_calls;
mod turns;
pub mod verify;
mod warm_up;

pub use crate::policy::loops;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use sha2::{Digest, Sha256};

use self::await_prefix::AwaitingPrefix;
use self::calibrate::Calibration;
use self::draft::MovingRate;
use self::governor::{Costs, Governor, ROWS, TrialTime};
use self::hooks::HookThreads;
use self::machine_profile::{Key, MachineProfile, MachineProfileFile};
pub use self::memory::Machine;
use self::memory::{Memory, Section};
use self::plan::{Debt, PassCosts};
use self::prefetch::Prefetch;
pub(crate) use self::prefetch::{Expected, Prefix};
pub(crate) use self::prepare::Prepared;
use self::prepare::Preparer;
use self::sample::within;
use self::sequence::Sequence;
use self::threads::{Products, Threads};
use self::warm_up::prepare_kernels;
use crate::activity::ActivityReporter;
use crate::cache::{Cache, Span};
use crate::config::{
    Config, DraftKind, EngineConfig, ModelConfig, Pooling, SpeculationConfig, StoreConfig,
};
use crate::engine::{Engine, Info};
use crate::engine_thread::EngineThread;
use crate::error::{ConfigError, Error, Result};
use crate::grammar::Grammars;
use crate::kernels::cuda;
use crate::loading;
use crate::model::{Loaded, Model, Pass, WeightsDigest};
use crate::policy::{Policies, Storage};
use crate::prefix::{Prefixes, Retention};
use crate::queue::Queue;
use crate::store::{Fingerprint, RedbStore, StoreError};
use crate::text::Text;

/// Requests that run at the same time if the configuration does not say. On two cores, 32 streams of the bundled model make
/// 1.2 to 1.3 times as many tokens a second together as 16 that run while 16 wait.
const RUNNING: usize = 32;

/// Rows of the passes whose times are measured at the start, on a CPU and on a GPU.
const TIMED_ROWS: [[usize; 2]; 2] = [[8, 32], [plan::LEAST_ROWS, 512]];

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

/// Fewest tokens of a context: one of a prompt and one of a reply.
const CONTEXT_LEAST: usize = 2;

/// Bytes of text for each token of the context, by default. Tokens of prose and code have 3 to 5 bytes,
/// those of deeply indented code 8.
const BYTES_PER_TOKEN: usize = 16;

/// Least default of `engine.prompt_bytes`, for very short contexts.
const PROMPT_BYTES_LEAST: usize = 64 << 10;

/// Part of the fingerprint; changes when the meaning of saved tensors changes.
const FORMAT: &str = "steersman state 2";

/// The state of the engine thread.
pub struct Decoder {
    model: Box<dyn Model>,
    text: Text,
    queue: Arc<Queue>,
    preparer: Arc<Preparer>,
    hook_threads: Rc<HookThreads>,
    prefixes: Prefixes,
    memory: Memory,
    activity: ActivityReporter,
    /// The prefix that is being computed while no request runs.
    prefetch: Option<Prefetch>,
    /// Whether to prefetch the next turn of a conversation.
    prefetch_turns: bool,
    store_min_tokens: usize,
    vocabulary: i32,
    /// Most sequences that run at the same time; further requests wait in the queue.
    max_running: usize,
    prefill_chunk: usize,
    /// See [`plan::Budget::stall`].
    stall: Duration,
    pass_costs: PassCosts,
    debt: Debt,
    /// Whether passes run on this thread, as one has; see [`step`].
    runs_at_once: bool,
    speculation: SpeculationConfig,
    /// The smaller model that drafts for `model`, if configured.
    draft_model: Option<Rc<dyn Model>>,
    /// Layers of early-exit drafts, if calibration found that they pay.
    exit_layers: Option<usize>,
    /// Path of the calibration file.
    calibration_path: PathBuf,
    /// How embeddings are made.
    pooling: Pooling,
    /// Bits of KV in the cache; 0 if not quantized.
    kv_bits: u32,
    /// Layers whose feed-forward block is skipped, as `engine.skip_kl` permits.
    skip: Vec<usize>,
    /// What is known of this machine before requests are served.
    machine: MachineProfileFile,
    /// Threads of matrix products; `None` if they are not ours to choose.
    threads: Option<Threads>,
    /// Costs of passes on this machine; `None` without drafters.
    costs: Option<Costs>,
    /// Acceptance rates learned in earlier requests, by kind of drafter.
    learned_rates: [Vec<MovingRate>; DraftKind::ALL.len()],
    /// Governor of the previous request.
    learned_governor: Option<Governor>,
    /// What drafts may lose.
    trial_time: TrialTime,
    /// Type of the activations.
    dtype: Dtype,
    /// See [`speculate::near_tie_margin`].
    near_tie_margin: f32,
    /// Running sequences, in the order of admission.
    sequences: Vec<Sequence>,
    /// Those that have been preempted, the first to resume first.
    preempted: VecDeque<Sequence>,
    /// Those that wait for a prefix which one of the sequences computes.
    awaiting_prefix: Vec<AwaitingPrefix>,
    /// Number of sequences so far.
    started: u64,
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
        let _load = loading::begin(&config.model.name, "reading weights");
        let section = Section::begin(None);
        memory::check_weights(config.engine.memory_limit_bytes, folder)?;
        let before_weights = memory::active()?;
        let text = Text::load(folder)?;
        // Hashed while the model is loaded from them.
        let weights = WeightsDigest::start(folder, data)?;
        cuda::keep_in(data.join("kernels"));
        let loaded = crate::model::load(folder, &config.model)?;
        let digest = loaded.digest(weights.finish()?);
        loading::stage("compiling kernels");
        prepare_kernels(&*loaded.model);
        loading::stage("measuring");
        loaded.probe(folder)?;
        let Loaded {
            model, family, context, embeddings, on_cpu, dtype, own_kernels, numbers, ..
        } = loaded;
        let text = text
            .with_embeddings(embeddings)
            .with_special_tokens_in_text(config.model.special_tokens_in_text);
        let vocabulary = i32::try_from(text.vocab_size()).unwrap_or(i32::MAX);
        let queue = Arc::new(Queue::new(config.engine.queue));
        for (name, profile) in &config.profiles {
            for path in &profile.warm {
                queue.expect(Expected::read(name, path)?);
            }
        }
        let path = Calibration::path(data, &digest);
        let calibration = match Calibration::read(&path) {
            Err(error) if config.engine.skip_kl == 0.0 => {
                tracing::warn!(%error, "calibration file unreadable; early-exit drafts are off");
                None
            }
            read => read?,
        };
        let skip = layers_to_skip(config.engine.skip_kl, calibration.as_ref(), &path)?;
        let calibration = calibration.unwrap_or_default();
        let draft_model = load_draft_model(&config.speculation, &config.model, &text)?;
        let context = match config.engine.context {
            0 => context,
            limit => limit.min(context),
        };
        // Positions are i32 in MLX and u32 in the contract: casts of them rely on this limit.
        let context = context.min(i32::MAX as usize);
        if context < CONTEXT_LEAST {
            let problem = format!(
                "says that the model's context holds {context} tokens; it must hold at least \
                 {CONTEXT_LEAST}"
            );
            let path = folder.join("config.json");
            return Err(Error::Config(ConfigError::Model { path, problem }));
        }
        let prompt_bytes = match config.engine.prompt_bytes {
            0 => context.saturating_mul(BYTES_PER_TOKEN).max(PROMPT_BYTES_LEAST),
            bytes => bytes,
        };
        let ModelConfig { compile, kernels, activations, cpu_dequantize, .. } = config.model;
        let kernels = format!("{kernels:?} {compile:?} {activations:?} {cpu_dequantize}");
        let name = if config.model.name.is_empty() {
            steersman_gguf::files::name_of(folder)
        } else {
            config.model.name
        };
        let mut sha = Sha256::new();
        sha.update(FORMAT);
        sha.update(digest);
        sha.update(text.digest());
        // Skipped blocks change the state of the layers after them.
        skip.iter().for_each(|&layer| sha.update((layer as u64).to_le_bytes()));
        let EngineConfig { kv_bits, kv_bits_from, .. } = config.engine;
        if kv_bits > 0 {
            sha.update(format!("{kv_bits} bits from {kv_bits_from}"));
        }
        if config.store.kv_bits > 0 {
            sha.update("rows in 8 bits on disk");
        }
        let fingerprint: Fingerprint = sha.clone().finalize().into();
        // Fails here, not with the first request, if this model's KV cannot be quantized as configured.
        let mut empty = model.new_cache()?;
        if kv_bits > 0 {
            empty.quantize(kv_bits as i32, i32::try_from(kv_bits_from).unwrap_or(i32::MAX))?;
        }
        let machine = MachineProfileFile::open(config.machine, data, || {
            Key::new(&fingerprint, on_cpu, &kernels, &config.speculation)
        });
        let disk = open_store(&config.store, fingerprint, data);
        let StoreConfig { memory_bytes, kv_bits: saved_bits, .. } = config.store;
        let prefixes = Prefixes::new(empty, memory_bytes, disk, saved_bits)?;
        let activity = ActivityReporter::default();
        let info = Info {
            model: name.clone(),
            family: family.into(),
            context,
            prompt_bytes,
            numbers,
            profiles: config.profiles.keys().cloned().collect(),
            fingerprint: hex::encode(&sha.clone().finalize()[..6]),
            prefixes: prefixes.reporter(),
            text: text.clone(),
            activity: activity.clone(),
            loaded: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        };
        let preparer = Arc::new(Preparer {
            text: text.clone(),
            grammars: Arc::new(Grammars::new(text.clone())),
            policies,
            profiles: config.profiles,
            name,
            family,
            model_digest: sha,
            context,
            max_tokens: config.engine.max_tokens,
            prompt_bytes,
            save_interval: prefixes.save_interval(),
        });
        let hook_threads = HookThreads::start(config.engine.policy_threads, queue.clone())
            .map_err(|_| Error::Stopped)?;
        let mut decoder = Self {
            model,
            text,
            queue,
            preparer,
            hook_threads,
            prefixes,
            activity,
            memory: Memory::unlimited(dtype, vocabulary, !on_cpu),
            prefetch: None,
            prefetch_turns: config.store.ahead,
            store_min_tokens: config.store.min_tokens,
            vocabulary,
            max_running: max_running(config.engine.max_running),
            prefill_chunk: config.engine.prefill_chunk,
            stall: Duration::from_millis(config.engine.stall_ms.into()),
            pass_costs: PassCosts::default(),
            debt: Debt::default(),
            runs_at_once: false,
            speculation: config.speculation,
            draft_model,
            exit_layers: calibration.exit_layers,
            pooling: config.model.pooling,
            kv_bits,
            skip,
            calibration_path: path,
            machine,
            threads: None,
            costs: None,
            learned_rates: Default::default(),
            learned_governor: None,
            trial_time: TrialTime::default(),
            dtype,
            near_tie_margin: speculate::near_tie_margin(dtype, kv_bits),
            sequences: Vec::new(),
            preempted: VecDeque::new(),
            awaiting_prefix: Vec::new(),
            started: 0,
        };
        let known = decoder.machine.profile();
        let products = Products::of(on_cpu, own_kernels > 0);
        decoder.threads = Threads::choose(products, |products| match known.threads {
            Some(counts) => Ok(counts),
            None => Threads::measure(
                &*decoder.model,
                decoder.pass(),
                &decoder.prefixes.empty(),
                products,
            ),
        })?;
        decoder.find_costs(known.costs)?;
        decoder.pass_costs = match known.prefill {
            Some(costs) => costs,
            None => decoder.measure_prefill(TIMED_ROWS[usize::from(!on_cpu)])?,
        };
        // As measured on a machine that does nothing else: not what prompts take beside other requests.
        let costs = decoder.pass_costs.of_prompts(decoder.prefill_chunk);
        decoder.prefixes.set_compute_costs(costs);
        let pass_bytes = decoder.measure_memory(
            // A GPU compiles kernels for these passes, which the first request must not wait for.
            known.pass_bytes.filter(|_| on_cpu),
            config.engine.memory_limit_bytes,
            before_weights,
            &section,
        )?;
        decoder.machine.measured(MachineProfile {
            threads: decoder.threads.as_ref().map(Threads::counts).or(known.threads),
            costs: decoder.costs.or(known.costs),
            prefill: Some(decoder.pass_costs),
            pass_bytes: Some(pass_bytes),
        });
        if !on_cpu {
            loading::stage("warming up");
            decoder.warm_up();
        }
        Ok((decoder, info))
    }

    /// The part of the model that runs: all but the skipped blocks. It is the same for prompts and
    /// replies, so that saved state equals the state of decoding.
    fn pass(&self) -> Pass<'_> {
        Pass { exit: None, skip: &self.skip }
    }

    /// Sets the threads of a pass over `rows` rows.
    fn set_threads(&mut self, rows: usize) {
        if let Some(threads) = &mut self.threads {
            threads.set_for(rows);
        }
    }

    /// Logits [1, R, V] of hidden states [1, R, D], without padding columns.
    fn logits(&self, hidden: &Array) -> Result<Array> {
        within(self.model.logits(hidden)?, self.vocabulary)
    }

    /// Sets the costs of passes and drafts on this machine, if there are drafters: those that are `known`, or measured ones.
    fn find_costs(&mut self, known: Option<Costs>) -> Result<()> {
        let mut drafters = self.new_drafters(&[])?;
        if drafters.is_empty() {
            return Ok(());
        }
        if known.is_some() {
            self.costs = known;
            return Ok(());
        }
        let start = Instant::now();
        let empty = self.prefixes.empty();
        let mut threads = self.threads.take();
        let prepare = |rows| threads.iter_mut().for_each(|threads| threads.set_for(rows));
        let costs = Costs::measure(
            &self.networks(),
            empty,
            &mut drafters,
            self.speculation.exact,
            prepare,
        )?;
        self.threads = threads;
        let drafters: Vec<_> = drafters.iter().map(|drafter| drafter.kind().name()).collect();
        let passes = [1, 2, 4, 8, 16, 32, ROWS].map(|rows| (rows, costs.pass(1, rows)));
        let (step, drafting) = (costs.plain(1), costs.draft);
        let elapsed = start.elapsed();
        tracing::info!(?drafters, step, ?passes, ?drafting, ?elapsed, "speculation costs measured");
        self.costs = Some(costs);
        Ok(())
    }

    /// Measures passes with two numbers of rows on this machine. The first run of each compiles kernels, which
    /// the first request need not wait for then.
    fn measure_prefill(&mut self, rows: [usize; 2]) -> Result<PassCosts> {
        let mut measure = |rows: usize| -> Result<(usize, f32)> {
            self.set_threads(rows);
            self.run_probe(rows, &mut self.prefixes.empty())?;
            let start = Instant::now();
            self.run_probe(rows, &mut self.prefixes.empty())?;
            Ok((rows, start.elapsed().as_secs_f32()))
        };
        let passes = [measure(rows[0])?, measure(rows[1])?];
        tracing::info!(?passes, "prefill measured");
        Ok(PassCosts::measured(passes))
    }

    /// Runs a pass of `rows` equal tokens, to measure it; returns its hidden states.
    fn run_probe(&self, rows: usize, cache: &mut Cache) -> Result<Array> {
        let ids = token_ids(&vec![0; rows]);
        let mut span = [Span { rows: ids.dim(0), cache }];
        let hidden = self.model.forward(&ids, &mut span, self.pass())?;
        eval(cache.arrays()?.iter().chain([&hidden]))?;
        Ok(hidden)
    }

    /// Saves the state of the prompt if the cache is at its next save point.
    fn save_at_save_point(&mut self, sequence: &mut Sequence) {
        let is_here = |&mut (position, _): &mut (usize, _)| position == sequence.cache.position;
        if let Some((_, retention)) = sequence.save_points.pop_front_if(is_here) {
            self.save(sequence, retention);
        }
    }

    /// Saves the state of the tokens that have run. A failure costs time later, nothing else.
    fn save(&mut self, sequence: &Sequence, retention: Retention) {
        let tokens = &sequence.tokens[..sequence.cache.position];
        if tokens.len() < self.store_min_tokens {
            return;
        }
        let plan = self.prefixes.plan_save(&sequence.cache, tokens, retention);
        let bytes = |rows| self.memory.of_saved(&sequence.cache, rows);
        // The store has a copy of its own until it is written.
        let room = self.make_room(bytes(tokens.len()) + plan.to_write.map_or(0, bytes));
        let saved = room.and_then(|()| self.prefixes.save(&sequence.cache, tokens, &plan));
        if let Err(error) = saved {
            let (id, span) = (&sequence.request.id, &sequence.request.span);
            span.log(|| tracing::warn!(request_id = id, %error, "saving state failed"));
        }
    }
}

/// Token ids as an array, u32 [R].
fn token_ids(tokens: &[u32]) -> Array {
    let rows = i32::try_from(tokens.len()).expect("a context has fewer than 2^31 tokens");
    Array::from_slice(tokens, &[rows])
}

/// The layers whose feed-forward blocks can be skipped at a cost of at most `kl` nats a token.
///
/// # Errors
/// [`Error::Config`] if `kl` is positive and the model has not been calibrated.
fn layers_to_skip(kl: f32, found: Option<&Calibration>, path: &Path) -> Result<Vec<usize>> {
    if kl == 0.0 {
        return Ok(Vec::new());
    }
    let Some(found) = found else {
        let problem = format!(
            "is {kl}, but the cost of skipping layers has not been measured ({} is missing); run \
             `steersman calibrate` on this model first",
            path.display()
        );
        return Err(Error::Config(ConfigError::Key { field: "engine.skip_kl", problem }));
    };
    let Some(skip) = found.skip_within(kl) else {
        tracing::warn!(kl, "no feed-forward block can be skipped within engine.skip_kl");
        return Ok(Vec::new());
    };
    tracing::info!(layers = ?skip.layers, kl = skip.kl, "skipping feed-forward blocks, replies change");
    Ok(skip.layers.clone())
}

/// Loads the smaller model that drafts, if the configuration names one.
///
/// # Errors
/// When it cannot be loaded, or its vocabulary differs from that of `text`.
fn load_draft_model(
    config: &SpeculationConfig,
    model: &ModelConfig,
    text: &Text,
) -> Result<Option<Rc<dyn Model>>> {
    if config.draft_model.is_empty() {
        return Ok(None);
    }
    let folder = Path::new(&config.draft_model);
    if let Some(problem) = text.vocabulary_difference(folder)? {
        let problem = format!("the draft model's vocabulary differs: {problem}");
        return Err(Error::Config(ConfigError::Model {
            path: folder.join("tokenizer.json"),
            problem,
        }));
    }
    let loaded = crate::model::load(folder, model)?;
    loaded.probe(folder)?;
    let Loaded { model, embeddings, .. } = loaded;
    if embeddings < text.vocab_size() {
        let size = text.vocab_size();
        let problem = format!("it has embeddings of {embeddings} tokens, the model of {size}");
        return Err(Error::Config(ConfigError::Model { path: folder.into(), problem }));
    }
    Ok(Some(model.into()))
}

/// Requests that run at the same time: as configured, or [`RUNNING`].
fn max_running(configured: usize) -> usize {
    if configured == 0 { RUNNING } else { configured }
}

/// Opens the prefix store, if enabled. If it cannot be opened, state is saved in memory only.
fn open_store(config: &StoreConfig, fingerprint: Fingerprint, data: &Path) -> Option<RedbStore> {
    if !config.enabled {
        return None;
    }
    let path = config.file(data);
    match RedbStore::open(&path, fingerprint, config) {
        Ok(store) => Some(store),
        Err(StoreError::InUse(path)) => {
            tracing::warn!(
                path = %path.display(),
                "prefix store is in use by another process; running without the disk tier"
            );
            None
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "prefix store cannot be opened; saving state in memory only");
            None
        }
    }
}
