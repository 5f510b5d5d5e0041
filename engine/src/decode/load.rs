//! Loading: from a folder with a model to a decoder that is ready for requests.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use steersman_database::patiently;

use super::Decoder;
use super::calibration::Calibration;
use super::costs::CostModels;
use super::machine_profile::{Key, MachineProfileFile};
use super::mask_time::MaskTime;
use super::network::{Network, NumberFormat};
use super::prefetch::Prefetch;
use super::preparation::PolicyThreads;
use super::probe::{Loading, find_machine_costs};
use super::speculate::Speculation;
use super::threads::Products;
use super::warm_up::{prepare_kernels, warm_up};
use crate::activity::ActivityReporter;
use crate::cache::Cache;
use crate::config::{
    Config, EngineConfig, MachineCosts, ModelConfig, SpeculationConfig, StoreConfig, context_note,
};
use crate::device::chip::Chip;
use crate::device::{DeviceInfo, wired};
use crate::engine::Info;
use crate::error::{ConfigError, Error, Result};
use crate::grammar::Grammars;
use crate::kernel_check;
use crate::kernels::{self, cuda};
use crate::loading;
use crate::model::{Lead, Loaded, Model, WeightsDigest, load_part};
use crate::policy::Policies;
use crate::prefix::Prefixes;
use crate::ranks::{Log, Ranks};
use crate::schedule::Schedule;
use crate::schedule::memory::{self, Memory, Section};
use crate::schedule::queue::Queue;
use crate::schedule::saved::SavedState;
use crate::sequence::expected::Expected;
use crate::sequence::hooks::HookThreads;
use crate::sequence::prepare::Preparer;
use crate::store::{Fingerprint, RedbStore, StoreError};
use crate::text::Text;

/// Requests that run at the same time if the configuration does not say. On two cores, 32 streams of the bundled model make
/// 1.2 to 1.3 times as many tokens a second together as 16 that run while 16 wait.
const RUNNING: usize = 32;

/// Fewest tokens of a context: one of a prompt and one of a reply.
const CONTEXT_LEAST: usize = 2;

/// Bytes of text for each token of the context, by default. Tokens of prose and code have 3 to 5 bytes,
/// those of deeply indented code 8.
const BYTES_PER_TOKEN: usize = 16;

/// Least default of `engine.prompt_bytes`, for very short contexts.
const PROMPT_BYTES_LEAST: usize = 64 << 10;

/// Part of the fingerprint; changes when the meaning of saved tensors changes.
const FORMAT: &str = "steersman state 2";

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
) -> Result<(Decoder, Info)> {
    load_led(config, folder, data, policies, None)
}

/// [`load`] where this process is the first of several ranks, if `lead` names them and the log that the others follow.
pub fn load_led(
    config: Config,
    folder: &Path,
    data: &Path,
    policies: Arc<Policies>,
    lead: Option<(Ranks, Rc<Log>)>,
) -> Result<(Decoder, Info)> {
    let _load = loading::begin(&config.model.name, "reading weights");
    let section = Section::begin(None);
    memory::check_weights(config.engine.memory_limit_bytes, folder)?;
    let before_weights = memory::active()?;
    let of_ranks = lead.as_ref().map(|(ranks, _)| format!(", {} ranks", ranks.count()));
    let text = Text::load(folder)?;
    check_kernels(&config, data)?;
    let (loaded, digest) = load_weights(&config.model, folder, data, lead)?;
    let Loaded { model, family, embeddings, on_cpu, dtype, own_kernels, numbers, .. } = loaded;
    let text = text
        .with_embeddings(embeddings)
        .with_special_tokens_in_text(config.model.special_tokens_in_text);
    let queue = queue_with_expected(&config)?;
    let calibration_path = Calibration::path(data, &digest);
    let calibration = read_calibration(&calibration_path, config.engine.skip_kl)?;
    let skip = layers_to_skip(config.engine.skip_kl, calibration.as_ref(), &calibration_path)?;
    let draft_model = load_draft_model(&config.speculation, &config.model, &text)?;
    let context = context_limit(config.engine.context, loaded.context, folder)?;
    let prompt_bytes = match config.engine.prompt_bytes {
        0 => context.saturating_mul(BYTES_PER_TOKEN).max(PROMPT_BYTES_LEAST),
        bytes => bytes,
    };
    let kernels = kernel_settings(&config.model);
    let name = match config.model.name.is_empty() {
        true => steersman_gguf::files::name_of(folder),
        false => config.model.name,
    };
    let sha = state_digest(digest, &text, &skip, &config.engine, &config.store);
    let fingerprint: Fingerprint = sha.clone().finalize().into();
    // Fails here, not with the first request, if this model's KV cannot be quantized as configured.
    let empty = empty_cache(&*model, &config.engine)?;
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
        numbers: numbers + &of_ranks.unwrap_or_default(),
        profiles: config.profiles.keys().cloned().collect(),
        fingerprint: hex::encode(&fingerprint[..6]),
        prefixes: prefixes.reporter(),
        store_enabled: config.store.enabled,
        text: text.clone(),
        activity: activity.clone(),
        loaded: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
    };
    let preparer = Preparer {
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
    };
    let woken = queue.clone();
    let wake = Arc::new(move || woken.wake());
    let hook_threads =
        HookThreads::start(config.engine.policy_threads, wake).map_err(|_| Error::Stopped)?;
    let format = NumberFormat { dtype, kv_bits: config.engine.kv_bits };
    let network = Network::new(model, text, format, skip, config.model.pooling);
    let memory = Memory::unlimited(dtype, network.vocabulary(), !on_cpu);
    let exit_layers = calibration.and_then(|found| found.exit_layers);
    let EngineConfig { max_running: most, prefill_chunk, stall_ms, .. } = config.engine;
    let stall = Duration::from_millis(stall_ms.into());
    let mut decoder = Decoder {
        network,
        schedule: Schedule::new(queue, max_running(most), prefill_chunk, stall),
        masks: MaskTime::new(stall),
        costs: CostModels::new(machine, prefixes.read_costs()),
        saved: SavedState::new(prefixes, memory, config.store.min_tokens),
        prefetch: Prefetch::new(config.store.ahead),
        speculation: Speculation::new(
            config.speculation,
            draft_model,
            exit_layers,
            calibration_path,
        ),
        policies: PolicyThreads::new(preparer, hook_threads),
        activity,
    };
    find_machine_costs(
        &mut decoder,
        &Loading {
            products: Products::of(on_cpu, own_kernels > 0),
            on_cpu,
            memory_limit: config.engine.memory_limit_bytes,
            before_weights,
            section: &section,
        },
    )?;
    keep_wired(on_cpu, config.engine.wired_idle_s)?;
    if !on_cpu {
        loading::stage("warming up");
        warm_up(&mut decoder);
    }
    Ok((decoder, info))
}

/// Has the arrays of models in use wired, up to the limit on all arrays, where a GPU shares the machine's memory.
fn keep_wired(on_cpu: bool, idle_s: u64) -> Result<()> {
    let limit = mlx_rs::memory::memory_limit()? as u64;
    let info = if on_cpu { None } else { DeviceInfo::of_gpu() };
    let bytes = info.map_or(0, |info| info.wired_bytes(limit));
    wired::configure(bytes, Duration::from_secs(idle_s));
    Ok(())
}

/// Turns own kernels off that differ from their references on this device. With a constant profile none is checked.
fn check_kernels(config: &Config, data: &Path) -> Result<()> {
    cuda::keep_in(data.join("kernels"));
    match config.machine {
        MachineCosts::Measured => {
            loading::stage("checking kernels");
            kernel_check::apply(&config.model, data)
        }
        MachineCosts::Fixed => {
            kernels::turn_off([]);
            Ok(())
        }
    }
}

/// Loads the model, or the part of it that the rank of `lead` has, and runs it once; returns it with its digest. Compiles
/// the kernels of a whole model; those of a part are compiled when they are first used, as passes run on all ranks.
fn load_weights(
    config: &ModelConfig,
    folder: &Path,
    data: &Path,
    lead: Option<(Ranks, Rc<Log>)>,
) -> Result<(Loaded, [u8; 32])> {
    // Hashed while the model is loaded from them.
    let weights = WeightsDigest::start(folder, data)?;
    let ranks = lead.as_ref().map_or_else(Ranks::alone, |(ranks, _)| ranks.clone());
    let mut loaded = load_part(folder, config, &ranks)?;
    let digest = loaded.digest(weights.finish()?);
    loading::stage("compiling kernels");
    match lead {
        Some((ranks, log)) => {
            loaded.model = Box::new(Lead::new(loaded.model, ranks, log, config.compare_ranks));
        }
        None => prepare_kernels(&*loaded.model),
    }
    loading::stage("measuring");
    loaded.probe(folder)?;
    Ok((loaded, digest))
}

/// An empty queue that expects the prefixes which the configuration names.
fn queue_with_expected(config: &Config) -> Result<Arc<Queue>> {
    let queue = Arc::new(Queue::new(config.engine.queue));
    for (name, profile) in &config.profiles {
        for path in &profile.warm {
            queue.expect(Expected::read(name, path)?);
        }
    }
    Ok(queue)
}

/// Reads the calibration file, which must be readable if blocks are skipped.
fn read_calibration(path: &Path, skip_kl: f32) -> Result<Option<Calibration>> {
    match Calibration::read(path) {
        Err(error) if skip_kl == 0.0 => {
            tracing::warn!(%error, "calibration file unreadable; early-exit drafts are off");
            Ok(None)
        }
        read => read,
    }
}

/// The tokens that prompt and reply may have together, for a model whose context holds `context`.
///
/// # Errors
/// [`Error::Config`] if the model's context is too short.
fn context_limit(configured: usize, context: usize, folder: &Path) -> Result<usize> {
    if let Some(note) = context_note(configured, context) {
        tracing::warn!(model = %folder.display(), "{note}");
    }
    let context = match configured {
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
    Ok(context)
}

/// What the machine profile depends on besides model and machine.
fn kernel_settings(config: &ModelConfig) -> String {
    let ModelConfig { compile, kernels, activations, cpu_dequantize, .. } = config;
    format!("{kernels:?} {compile:?} {activations:?} {cpu_dequantize}")
}

/// SHA-256 over all that saved state depends on. `digest` is that of weights and number format.
fn state_digest(
    digest: [u8; 32],
    text: &Text,
    skip: &[usize],
    engine: &EngineConfig,
    store: &StoreConfig,
) -> Sha256 {
    let mut sha = Sha256::new();
    sha.update(FORMAT);
    sha.update(digest);
    sha.update(text.digest());
    // Skipped blocks change the state of the layers after them.
    skip.iter().for_each(|&layer| sha.update((layer as u64).to_le_bytes()));
    let EngineConfig { kv_bits, kv_bits_from, .. } = engine;
    if *kv_bits > 0 {
        sha.update(format!("{kv_bits} bits from {kv_bits_from}"));
    }
    if store.kv_bits > 0 {
        sha.update("rows in 8 bits on disk");
    }
    sha
}

/// A cache of `model` without rows, quantized as configured.
fn empty_cache(model: &dyn Model, config: &EngineConfig) -> Result<Cache> {
    let EngineConfig { kv_bits, kv_bits_from, .. } = *config;
    let mut empty = model.new_cache()?;
    if kv_bits > 0 {
        empty.quantize(kv_bits as i32, i32::try_from(kv_bits_from).unwrap_or(i32::MAX))?;
    }
    Ok(empty)
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
    let layers = skip.layers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    tracing::info!(layers, kl = skip.kl, "skipping feed-forward blocks, replies change");
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

/// Opens the prefix store, if enabled. If it cannot be opened, state is saved in memory only.
fn open_store(config: &StoreConfig, fingerprint: Fingerprint, data: &Path) -> Option<RedbStore> {
    if !config.enabled {
        return None;
    }
    let path = config.file(data);
    let open = || RedbStore::open(&path, fingerprint, config);
    match patiently(open, |error| matches!(error, StoreError::InUse(_))) {
        Ok(store) => Some(store),
        Err(StoreError::InUse(path)) => {
            tracing::warn!(
                path = %path.display(),
                "prefix store is in use by another process; running without the disk tier until the next start"
            );
            None
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "prefix store cannot be opened; saving state in memory only");
            None
        }
    }
}

/// Requests that run at the same time: as configured, or [`RUNNING`], or fewer on a chip for which they are enough.
pub fn max_running(configured: usize) -> usize {
    let by_chip = || Chip::of_gpu().map_or(RUNNING, |chip| chip.max_running(RUNNING));
    if configured == 0 { by_chip() } else { configured }
}
