//! The loop that decides: it holds the running sequences and gives each turn's work to the model.
//!
//! The one room that knows model, policy, store and text. There is one decode path: each turn,
//! every sequence names the rows it needs (a chunk of its prompt, text that a policy injected, or
//! the token drawn last), all rows are joined and run by one `forward`, and the last row of each
//! sequence that has caught up draws its next token. A turn builds its graph from tokens that are
//! still being computed, and reads them while it runs, so that neither side waits for the other.

mod adjust;
mod admit;
mod ahead;
mod anchors;
mod apply;
pub mod calibrate;
mod draft;
mod governor;
pub mod loops;
mod rewind;
mod sample;
mod sequence;
mod speculate;
#[cfg(test)]
mod tests;
mod tool_calls;
pub mod verify;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::{async_eval, eval};
use mlx_rs::{Array, Dtype};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TryRecvError;

use self::ahead::Ahead;
use self::calibrate::Calibration;
use self::draft::Chance;
use self::governor::{Costs, Governor};
use self::sample::within;
use self::sequence::{Drawn, Rows, Sequence};
use crate::cache::Span;
use crate::config::{
    Config, DraftKind, EngineConfig, ModelConfig, Profile, SpeculationConfig, StoreConfig,
};
use crate::engine::{Engine, Info, Job};
use crate::error::{Error, Result};
use crate::model::{Loaded, Model, Pass};
use crate::policy::{Policies, Vocabulary, disk};
use crate::prefix::{Prefixes, Retention};
use crate::request::Event;
use crate::store::{Fingerprint, RedbStore, StoreError};
use crate::text::Text;

/// Sequences that decode at the same time. The loop takes any number; more than one waits for
/// its own scheduling (fairness of prefill against decode, memory), so the queue holds the rest.
const SEQUENCES: usize = 1;

/// The policies of all profiles of `config`, shared by all models, and loaded again when their files
/// change. What they keep is in the folder `data`.
///
/// # Errors
/// What keeps them from being loaded, with the profile and the policy at fault.
pub fn policies(config: &Config, data: &Path) -> Result<Arc<Policies>> {
    let kept = disk::open(data);
    let policies = Arc::new(Policies::load(&config.policy, &config.profiles, &kept)?);
    policies.watch();
    Ok(policies)
}

/// Loads the model in `folder` on a thread of its own and serves requests from there, steered by
/// `policies`. State is kept in the folder `data`.
///
/// Returns when the model is ready, with a handle and the thread. The thread ends when the last
/// handle is dropped, what it was doing is done, and what it saved is on disk: join it to be sure.
///
/// # Errors
/// Whatever keeps the engine from starting, with the file or key at fault.
pub fn start(
    config: Config,
    folder: &Path,
    data: &Path,
    policies: Arc<Policies>,
) -> Result<(Engine, JoinHandle<()>)> {
    let config = config.check()?;
    let (jobs, queue) = mpsc::channel(config.engine.queue);
    let (ready, loaded) = std::sync::mpsc::sync_channel(1);
    let (folder, data) = (folder.to_path_buf(), data.to_path_buf());
    let steering = policies.clone();
    let run = move || match Decoder::load(config, &folder, &data, steering) {
        Ok((decoder, info)) => {
            // Nobody waits for the answer only if `start` was abandoned.
            if ready.send(Ok(info)).is_ok() {
                decoder.run(queue);
            }
        }
        Err(error) => drop(ready.send(Err(error))),
    };
    let thread =
        std::thread::Builder::new().name("engine".into()).spawn(run).map_err(|_| Error::Stopped)?;
    let info = loaded.recv().map_err(|_| Error::Stopped)??;
    Ok((Engine::new(jobs, info, policies), thread))
}

/// Changes when the meaning of saved tensors does; part of the fingerprint.
const FORMAT: &str = "steersman state 2";

/// Everything that the engine thread owns.
pub struct Decoder {
    model: Box<dyn Model>,
    family: &'static str,
    name: String,
    text: Text,
    policies: Arc<Policies>,
    vocabulary_of_policies: Arc<dyn Vocabulary>,
    /// SHA-256 over weights, numbers and text, begun: a request's policies complete it.
    model_digest: Sha256,
    profiles: BTreeMap<String, Profile>,
    prefixes: Prefixes,
    ahead: Ahead,
    look_ahead: bool,
    store_min_tokens: usize,
    vocabulary: i32,
    context: usize,
    max_tokens: u32,
    prefill_chunk: usize,
    speculation: SpeculationConfig,
    /// Guesses for `model`, where there is one.
    draft_model: Option<Rc<dyn Model>>,
    /// Layers of an early exit, where one is known to be worth it.
    exit_layers: Option<usize>,
    /// Where what is known of the model is kept.
    calibration: PathBuf,
    /// Bits of keys and values; 0 for as they are.
    kv_bits: u32,
    /// Layers whose feed-forward block is left out, which `engine.skip_kl` allows.
    skip: Vec<usize>,
    /// What passes cost here; `None` where nothing drafts.
    costs: Option<Costs>,
    /// What drafts have learned in earlier requests, by kind, and what the governor has.
    known: [Vec<Chance>; DraftKind::ALL.len()],
    habits: Option<Governor>,
    /// Type of the activations, and margins below which it leaves two tokens near-ties.
    dtype: Dtype,
    tie: f32,
    sequences: Vec<Sequence>,
}

impl Decoder {
    /// Loads everything: model and text from `folder`, and the store in `data`.
    ///
    /// # Errors
    /// What is missing or wrong, with its file or key. A store that cannot be opened is only a
    /// warning.
    pub fn load(
        config: Config,
        folder: &Path,
        data: &Path,
        policies: Arc<Policies>,
    ) -> Result<(Self, Info)> {
        let text = Text::load(folder)?;
        let Loaded { model, family, context, digest, dtype, numbers } =
            crate::model::load(folder, &config.model)?;
        let vocabulary = i32::try_from(text.vocab_size()).unwrap_or(i32::MAX);
        let mut ahead = Ahead::default();
        for (name, profile) in &config.profiles {
            profile.warm.iter().try_for_each(|path| ahead.add_file(name, path))?;
        }
        let path = Calibration::path(data, &digest);
        let calibration = match Calibration::read(&path) {
            Err(error) if config.engine.skip_kl == 0.0 => {
                tracing::warn!(%error, "early-exit drafts are not used");
                None
            }
            read => read?,
        };
        let skip = skipped(config.engine.skip_kl, calibration.as_ref(), &path)?;
        let calibration = calibration.unwrap_or_default();
        let draft_model = load_draft_model(&config.speculation, &config.model, &text)?;
        let context = match config.engine.context {
            0 => context,
            limit => limit.min(context),
        };
        let name = if config.model.name.is_empty() {
            let name = folder.file_name().unwrap_or(folder.as_os_str());
            name.to_string_lossy().into_owned()
        } else {
            config.model.name
        };
        let mut sha = Sha256::new();
        sha.update(FORMAT);
        sha.update(digest);
        sha.update(text.digest());
        // What is computed without some of the blocks is another model's state.
        skip.iter().for_each(|layer| sha.update([*layer as u8]));
        let EngineConfig { kv_bits, kv_bits_from, .. } = config.engine;
        if kv_bits > 0 {
            sha.update(format!("{kv_bits} bits from {kv_bits_from}"));
        }
        if config.store.kv_bits > 0 {
            sha.update("rows in 8 bits on disk");
        }
        let fingerprint: Fingerprint = sha.clone().finalize().into();
        // Whether keys and values can be kept as configured is known now, not with the first request.
        let mut empty = model.new_cache()?;
        if kv_bits > 0 {
            empty.quantize(kv_bits as i32, i32::try_from(kv_bits_from).unwrap_or(i32::MAX))?;
        }
        let disk = open_store(&config.store, fingerprint, data);
        let StoreConfig { memory_bytes, kv_bits: saved_bits, .. } = config.store;
        let prefixes = Prefixes::new(empty, memory_bytes, disk, saved_bits)?;
        let info = Info {
            model: name.clone(),
            family: family.into(),
            context,
            numbers,
            profiles: config.profiles.keys().cloned().collect(),
            fingerprint: hex(&sha.clone().finalize()[..6]),
            prefixes: prefixes.reporter(),
            loaded: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        };
        let mut decoder = Self {
            model,
            family,
            name,
            vocabulary_of_policies: Arc::new(text.clone()),
            text,
            policies,
            model_digest: sha,
            prefixes,
            ahead,
            look_ahead: config.store.ahead,
            store_min_tokens: config.store.min_tokens,
            profiles: config.profiles,
            vocabulary,
            context,
            max_tokens: config.engine.max_tokens,
            prefill_chunk: config.engine.prefill_chunk,
            speculation: config.speculation,
            draft_model,
            exit_layers: calibration.exit_layers,
            kv_bits,
            skip,
            calibration: path,
            costs: None,
            known: Default::default(),
            habits: None,
            dtype,
            tie: speculate::tie(dtype, kv_bits),
            sequences: Vec::new(),
        };
        decoder.measure()?;
        Ok((decoder, info))
    }

    /// Which part of the model runs: all of it, but for what the configuration leaves out. The same
    /// for prompts and replies, so that saved state is the state that decoding would have.
    fn pass(&self) -> Pass<'_> {
        Pass { exit: None, skip: &self.skip }
    }

    /// Logits of hidden states [1, R, D] over the tokens there are: [1, R, V].
    fn logits(&self, hidden: &Array) -> Result<Array> {
        within(self.model.logits(hidden)?, self.vocabulary)
    }

    /// Finds out what passes and drafts cost on this machine.
    fn measure(&mut self) -> Result<()> {
        let mut drafts = self.drafts(&[])?;
        if drafts.is_empty() {
            return Ok(());
        }
        let start = Instant::now();
        let costs = Costs::measure(&*self.model, self.pass(), self.prefixes.empty(), &mut drafts)?;
        let kinds: Vec<_> = drafts.iter().map(|draft| draft.kind().name()).collect();
        tracing::info!(?kinds, ?costs, took = ?start.elapsed(), "speculation");
        self.costs = Some(costs);
        Ok(())
    }

    /// Serves jobs until every handle is gone, then waits for the store.
    pub fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        loop {
            if self.sequences.is_empty() {
                match jobs.try_recv() {
                    Ok(job) => self.accept(job),
                    Err(TryRecvError::Disconnected) => break,
                    Err(TryRecvError::Empty) if self.work_ahead() => continue,
                    Err(TryRecvError::Empty) => match jobs.blocking_recv() {
                        Some(job) => self.accept(job),
                        None => break,
                    },
                }
            }
            while self.sequences.len() < SEQUENCES {
                let Ok(job) = jobs.try_recv() else { break };
                self.accept(job);
            }
            self.turn();
        }
        if let Err(error) = self.prefixes.flush() {
            tracing::warn!(%error, "saving at the end");
        }
    }

    fn accept(&mut self, job: Job) {
        if job.events.is_closed() {
            return;
        }
        self.ahead.interrupt();
        match self.admit(&job) {
            Ok(sequence) => self.sequences.push(sequence),
            Err(error) => {
                tracing::debug!(request_id = job.request.id, %error, "refused");
                let _ = job.events.send(Event::Failed(error));
            }
        }
    }

    /// One turn: every sequence gets one step or one chunk of its prompt further.
    fn turn(&mut self) {
        let mut running = Vec::with_capacity(self.sequences.len());
        for mut sequence in std::mem::take(&mut self.sequences) {
            if sequence.is_cancelled() {
                sequence.cancel();
            } else {
                running.push(sequence);
            }
        }
        if let Err(error) = self.step(&mut running) {
            // The caches of all joined rows are suspect now.
            let problem = error.to_string();
            for sequence in &mut running {
                sequence.fail(Error::Array(problem.clone()));
            }
            return;
        }
        for mut sequence in running {
            if let Some(error) = sequence.take_failure() {
                sequence.fail(error);
            } else if sequence.has_ended() {
                sequence.finish();
                self.remember(&mut sequence);
                if let Some(keep) = sequence.reply_kept {
                    self.save(&sequence, keep);
                    if self.look_ahead {
                        self.ahead.add_turn(&sequence, keep);
                    }
                }
            } else {
                self.sequences.push(sequence);
            }
        }
    }

    /// Runs the rows of all sequences, and commits the tokens drawn a turn ago or accepted in this
    /// one.
    ///
    /// # Errors
    /// [`Error::Array`]; what goes wrong in one sequence alone ends that one, without an error.
    fn step(&mut self, running: &mut [Sequence]) -> Result<()> {
        let start = Instant::now();
        for sequence in &mut *running {
            self.draft(sequence)?;
        }
        let before: Vec<Option<Drawn>> = running.iter_mut().map(|s| s.drawn.clone()).collect();
        self.forward(running)?;
        let alone = running.len() == 1;
        for (sequence, drawn) in running.iter_mut().zip(before) {
            self.save_at_anchor(sequence);
            if let Some(drafted) = sequence.drafted.take() {
                self.accept_drafts(sequence, drafted)?;
            } else if let Some(drawn) = drawn {
                self.commit(sequence, drawn.read()?)?;
                // The step that was waited for was a plain one behind another.
                // What a rewind costs is no step's.
                let plain = alone && sequence.queued > 2 && sequence.is_caught_up();
                if let (Some(costs), true) = (&mut self.costs, plain) {
                    costs.learn_plain(start.elapsed().as_secs_f32());
                }
            }
            sequence.take_snapshot()?;
        }
        Ok(())
    }

    /// Joins the rows of all sequences, runs them, and draws a token for each that caught up.
    fn forward(&self, running: &mut [Sequence]) -> Result<()> {
        let mut ids = Vec::new();
        let mut ran = Vec::new();
        let mut spans = Vec::new();
        for (i, sequence) in running.iter_mut().enumerate() {
            // Which draw the last row is for: the token drawn last is not committed yet.
            let mut draw = sequence.adjust.draws();
            let rows = match sequence.next_rows(self.prefill_chunk)? {
                Rows::Known(tokens) => {
                    sequence.queued = 0;
                    Array::from_slice(&tokens, &[tokens.len() as i32])
                }
                Rows::Drafted(rows) => {
                    sequence.queued = 0;
                    rows
                }
                Rows::Drawn(rows) => {
                    sequence.queued += 1;
                    draw += 1;
                    rows
                }
                Rows::None => {
                    sequence.drawn = None;
                    continue;
                }
            };
            spans.push(Span { rows: rows.dim(0), cache: &mut sequence.cache });
            ids.push(rows);
            ran.push((i, draw));
        }
        if ids.is_empty() {
            return Ok(());
        }
        let joined = if ids.len() == 1 { ids[0].clone() } else { concatenate(&ids, 0)? };
        let hidden = self.model.forward(&joined, &mut spans, self.pass())?;

        let mut end = 0;
        let mut pending = Vec::new();
        for ((i, draw), rows) in ran.into_iter().zip(&ids) {
            let rows = rows.dim(0);
            end += rows;
            let sequence = &mut running[i];
            let own = hidden.try_index((.., end - rows..end))?;
            if sequence.drafted.is_some() {
                self.draw_drafted(sequence, own)?;
                continue;
            }
            if !sequence.is_caught_up() {
                // Otherwise the graphs of all chunks would pile up, and nobody could cancel.
                pending.extend(sequence.cache.arrays()?);
                continue;
            }
            sequence.observe(&own, sequence.cache.position - rows as usize)?;
            sequence.governor.iter_mut().for_each(Governor::stepped);
            let logits = self.logits(&own.try_index((.., rows - 1..))?)?.squeeze_axes(&[1])?;
            let index = sequence.cache.position as u64;
            let token = sequence.adjust.sample(&logits, draw, sequence.seed, index)?;
            sequence.drawn = Some(Drawn::Computing(token.clone()));
            sequence.row = Some((sequence.cache.position, logits));
            // MLX is lazy: the next step is queued before this token is read, or the device idles
            // for one round trip a token.
            async_eval([&token])?;
        }
        if !pending.is_empty() {
            eval(&pending)?;
        }
        Ok(())
    }

    /// Saves the state of a prompt where others will share it.
    fn save_at_anchor(&mut self, sequence: &mut Sequence) {
        if let Some(&(at, keep)) = sequence.anchors.front()
            && at == sequence.cache.position
        {
            sequence.anchors.pop_front();
            self.save(sequence, keep);
        }
    }

    /// Saves the state as it stands. Failing costs time later, nothing else.
    fn save(&mut self, sequence: &Sequence, keep: Retention) {
        let tokens = &sequence.tokens[..sequence.cache.position];
        if tokens.len() < self.store_min_tokens {
            return;
        }
        if let Err(error) = self.prefixes.save(&sequence.cache, tokens, keep) {
            tracing::warn!(request_id = sequence.request.id, %error, "state not saved");
        }
    }
}

impl Vocabulary for Text {
    fn encode(&self, text: &str) -> Option<Vec<u32>> {
        self.encode_plain(text).ok()
    }

    fn decode(&self, tokens: &[u32]) -> String {
        Self::decode(self, tokens)
    }

    fn size(&self) -> u32 {
        u32::try_from(self.vocab_size()).unwrap_or(u32::MAX)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The layers whose feed-forward blocks may be left out at a cost of `kl` nats a token.
///
/// # Errors
/// [`Error::Invalid`] where that is wanted, but nobody knows what it would cost.
fn skipped(kl: f32, found: Option<&Calibration>, path: &Path) -> Result<Vec<usize>> {
    if kl == 0.0 {
        return Ok(Vec::new());
    }
    let Some(found) = found else {
        let problem = format!(
            "is {kl}, but what layers cost is not known yet ({} is missing); run `steersman \
             calibrate` on this model first",
            path.display()
        );
        return Err(Error::Invalid { field: "engine.skip_kl", problem });
    };
    let Some(skip) = found.skip_within(kl) else {
        tracing::warn!(kl, "no layer can be skipped at so little loss");
        return Ok(Vec::new());
    };
    tracing::info!(layers = ?skip.layers, kl = skip.kl, "skipping feed-forward blocks: lossy");
    Ok(skip.layers.clone())
}

/// The model that drafts for `model` drafts, where the configuration names one.
///
/// # Errors
/// What is wrong with it, or that its vocabulary is another than `text`'s.
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
        let problem = format!("cannot draft, as its vocabulary is another one: {problem}");
        return Err(Error::Model { path: folder.join("tokenizer.json"), problem });
    }
    Ok(Some(crate::model::load(folder, model)?.model.into()))
}

/// The store on disk, where the configuration asks for one. One that cannot be opened is not worth
/// refusing to serve for: state is then kept in memory alone.
fn open_store(config: &StoreConfig, fingerprint: Fingerprint, data: &Path) -> Option<RedbStore> {
    if !config.enabled {
        return None;
    }
    let path = config.file(data);
    match RedbStore::open(&path, fingerprint, config) {
        Ok(store) => Some(store),
        Err(StoreError::InUse { path }) => {
            tracing::warn!(
                path = %path.display(),
                "another process, most likely a server, keeps its state in this file: this one runs \
                 without the disk tier; its state is kept in memory only and ends with it"
            );
            None
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "state is kept in memory only");
            None
        }
    }
}
