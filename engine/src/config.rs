//! The engine's configuration: plain structs, read from TOML by the server. [`Config::check`] checks
//! all values once; later code does not check again.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use steersman_policy_host::{PolicyConfig, ProfilePolicies};

use crate::error::{ConfigError, Error, Result};
pub use crate::request::profile::{Profile, ProfileLimits};

/// Most requests that may wait.
const MAX_QUEUE: u64 = 4096;

/// Most requests that run at the same time.
const MAX_RUNNING: u64 = 256;

/// Most threads for calls of policies.
const MAX_THREADS: u64 = 64;

/// Most prompt tokens of a chunk.
const MAX_CHUNK: u64 = 65_536;

/// Most seconds of `engine.wired_idle_s`: a year.
const MAX_WIRED_IDLE_S: u64 = 365 * 24 * 3600;

/// The whole configuration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Config {
    /// Weights, device and numeric format.
    pub model: ModelConfig,
    /// Limits of the engine thread.
    pub engine: EngineConfig,
    /// Speculation.
    pub speculation: SpeculationConfig,
    /// Saved state.
    pub store: StoreConfig,
    /// Limits of guests, for all policies.
    pub policy: PolicyConfig,
    /// Costs of passes and drafts on this machine.
    pub machine: MachineCosts,
    /// Profiles by name. `default` always exists.
    pub profiles: BTreeMap<String, Profile>,
}

/// What is known of the machine when an engine starts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MachineCosts {
    /// The machine profile in the data folder; what it lacks is measured, and saved there.
    #[default]
    Measured,
    /// A constant profile, for tests: measuring takes seconds of each start, and differs from run to run.
    Fixed,
}

/// `[model]`
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// The model as the operator names it; the server resolves it to a folder.
    pub path: String,
    /// Name of the model for clients; empty uses the name of the folder or repo.
    pub name: String,
    /// Where MLX computes.
    pub device: Device,
    /// Type of weights and activations.
    pub dtype: Dtype,
    /// Dequantize all weights at load on the CPU. f32 takes 8 times the memory of 4 bits.
    pub cpu_dequantize: bool,
    /// Fuse the elementwise operations of a step into fewer kernels.
    pub compile: Compile,
    /// Which kernels compute the layers.
    pub kernels: Kernels,
    /// How products with packed matrices read their inputs on the CPU.
    pub activations: Activations,
    /// Parse special tokens that the text of a request spells. Clients can then forge turns.
    pub special_tokens_in_text: bool,
    /// How the embedding of a text is made of its hidden states.
    pub pooling: Pooling,
    /// Passes between two comparisons of the hidden states of all ranks; 0 for none.
    pub compare_ranks: u32,
}

/// How the embedding of a text is made of the hidden states of its tokens, after the final norm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The hidden state of the last token, which has seen all others.
    #[default]
    Last,
    /// The mean of all.
    Mean,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            path: String::new(),
            name: String::new(),
            device: Device::Auto,
            dtype: Dtype::Auto,
            cpu_dequantize: false,
            compile: Compile::Auto,
            kernels: Kernels::Auto,
            activations: Activations::Exact,
            special_tokens_in_text: false,
            pooling: Pooling::Last,
            compare_ranks: 0,
        }
    }
}

/// Where MLX computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The GPU where MLX has one (Metal, CUDA), else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU; an error where there is none.
    Gpu,
}

/// Where elementwise operations are fused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Compile {
    /// On a GPU, where launching a small kernel costs more than running it; not on the CPU, where MLX
    /// calls g++ for each fused kernel.
    #[default]
    Auto,
    /// Always. On a CPU without g++ the operations stay separate.
    On,
    /// Never.
    Off,
}

/// Which kernels compute the layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kernels {
    /// Steersman's, where there are some for the device, shape and type; else MLX's.
    #[default]
    Auto,
    /// MLX's only.
    Mlx,
}

/// How Steersman's kernels for CPUs read the inputs of products with packed matrices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// With the precision of f32.
    #[default]
    Exact,
    /// Rounded to 8 bits in groups of 32 to 128, as llama.cpp does: about half the arithmetic with AVX2 and AVX-512 VNNI.
    Int8,
}

/// Type of weights and activations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// The checkpoint's type on a GPU; f32 on the CPU, where it is faster.
    #[default]
    Auto,
    /// 32 bits.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

/// `[engine]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Requests that may wait; further ones are refused with 429.
    pub queue: usize,
    /// Requests that run at the same time; further ones wait. 0 is 32, or what suits the chip.
    pub max_running: usize,
    /// Milliseconds that a pass with rows of prompt may take while other requests decode.
    pub stall_ms: u32,
    /// Threads for calls of policies that are not known to be quick; 0 calls every policy on the engine
    /// thread.
    pub policy_threads: usize,
    /// Bytes of text in a request, before it is tokenized; 0 is 16 for each token of the context.
    pub prompt_bytes: usize,
    /// Most bytes of weights, running requests and prefix cache together, for all models; 0 is what
    /// the machine and the process's limits allow.
    pub memory_limit_bytes: u64,
    /// Seconds after the last request for which a Mac keeps weights and running state in memory (wired); 0 lets the
    /// system page them out at any time.
    pub wired_idle_s: u64,
    /// Prompt tokens of one prefill chunk. A cancelled request stops after at most one chunk.
    pub prefill_chunk: usize,
    /// Tokens of a reply, reasoning included, whose request has no limit of its own; and reasoning tokens where a
    /// request limits the answer alone.
    pub max_tokens: u32,
    /// Tokens of prompt and reply together; 0 uses the model's own limit.
    pub context: usize,
    /// Loss in nats a token that skipped feed-forward blocks may cost, as measured by `steersman
    /// calibrate`. Faster and lossy; 0 skips none.
    pub skip_kl: f32,
    /// Bits of the KV of full attention, 8 or 4: less memory, slower, lossy. 0 does not quantize.
    pub kv_bits: u32,
    /// Number of first positions whose KV is not quantized.
    pub kv_bits_from: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            queue: 32,
            max_running: 0,
            stall_ms: 100,
            policy_threads: 2,
            prompt_bytes: 0,
            memory_limit_bytes: 0,
            wired_idle_s: 300,
            prefill_chunk: 512,
            max_tokens: 16_384,
            context: 0,
            skip_kl: 0.0,
            kv_bits: 0,
            kv_bits_from: 0,
        }
    }
}

/// `[speculation]`: drafts that the model verifies. They change the speed of a reply and nothing else.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpeculationConfig {
    /// Kinds of drafts; an empty list disables speculation. Kinds that the model does not support are
    /// skipped, which the log reports.
    pub drafts: Vec<DraftKind>,
    /// Folder of a smaller model with the same vocabulary, for `model` drafts; empty for none.
    pub draft_model: String,
    /// Most tokens of one draft, 1 to 7.
    pub depth: usize,
    /// Verify a near-tie again in a pass of its own: rounding in a pass over several rows could swap
    /// the two candidates.
    pub exact: bool,
    /// Commit the tokens that the form of a reply leaves no choice about without sampling them.
    pub forced: bool,
}

impl Default for SpeculationConfig {
    fn default() -> Self {
        let drafts = DraftKind::ALL.to_vec();
        Self { drafts, draft_model: String::new(), depth: DEPTH, exact: true, forced: true }
    }
}

/// Most tokens of one draft: passes over more than eight rows cost much more than one row.
pub const DEPTH: usize = 7;

/// A kind of draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DraftKind {
    /// The tokens that followed the same n-gram before.
    Ngram,
    /// The checkpoint's multi-token-prediction layer.
    Mtp,
    /// The model in `draft_model`.
    Model,
    /// The model's own first layers.
    EarlyExit,
}

impl DraftKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Ngram, Self::Mtp, Self::Model, Self::EarlyExit];

    /// The name that configurations use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ngram => "ngram",
            Self::Mtp => "mtp",
            Self::Model => "model",
            Self::EarlyExit => "early-exit",
        }
    }
}

/// `[store]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreConfig {
    /// Bytes of saved state in memory; least recently used state is evicted first.
    pub memory_bytes: u64,
    /// Whether state is saved on disk too, and survives a restart.
    pub enabled: bool,
    /// The database file; empty is `state.redb` in the data folder.
    pub path: PathBuf,
    /// Bytes on disk; least recently used state is evicted first.
    pub budget_bytes: u64,
    /// Shortest prefix that is saved, in tokens.
    pub min_tokens: usize,
    /// Bits of KV on disk: 8 takes a half or a quarter of the space and is lossy; 0 does not quantize.
    pub kv_bits: u32,
    /// Whether an idle engine computes the prefix of the next request of a conversation.
    pub ahead: bool,
}

impl StoreConfig {
    /// The database file, if `data` is the data folder.
    pub fn file(&self, data: &Path) -> PathBuf {
        if self.path.as_os_str().is_empty() { data.join("state.redb") } else { self.path.clone() }
    }
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            memory_bytes: 1 << 30,
            enabled: true,
            path: PathBuf::new(),
            budget_bytes: 4 << 30,
            min_tokens: 16,
            kv_bits: 0,
            ahead: true,
        }
    }
}

impl Config {
    /// The part of each profile for the policy host.
    pub fn profile_policies(&self) -> BTreeMap<String, ProfilePolicies> {
        self.profiles.iter().map(|(name, profile)| (name.clone(), profile.policy.clone())).collect()
    }

    /// Checks all values, and adds the profile `default` if it is missing.
    ///
    /// # Errors
    /// [`ConfigError::Key`] names the first key that is out of range.
    pub fn check(mut self) -> Result<Self> {
        match self.problems().into_iter().next() {
            Some(problem) => Err(problem),
            None => {
                self.profiles.entry("default".into()).or_default();
                Ok(self)
            }
        }
    }

    /// All keys that are out of range or contradict each other, each with the problem.
    pub fn problems(&self) -> Vec<Error> {
        let EngineConfig { queue, prompt_bytes, prefill_chunk, max_tokens, context, .. } =
            self.engine;
        let EngineConfig { max_running, policy_threads, skip_kl, kv_bits, .. } = self.engine;
        let limits = [
            within("engine.max_running", max_running as u64, 0..=MAX_RUNNING),
            at_least("engine.stall_ms", self.engine.stall_ms.into(), 1),
            within("engine.wired_idle_s", self.engine.wired_idle_s, 0..=MAX_WIRED_IDLE_S),
            within("engine.policy_threads", policy_threads as u64, 0..=MAX_THREADS),
            within("engine.queue", queue as u64, 1..=MAX_QUEUE),
            (prompt_bytes > 0)
                .then(|| at_least("engine.prompt_bytes", prompt_bytes as u64, 1024))
                .flatten(),
            within("engine.prefill_chunk", prefill_chunk as u64, 1..=MAX_CHUNK),
            at_least("engine.max_tokens", max_tokens.into(), 1),
            (context > 0).then(|| at_least("engine.context", context as u64, 2)).flatten(),
            (!(0.0..=10.0).contains(&skip_kl)).then(|| {
                out_of_range("engine.skip_kl", format!("is {skip_kl}, must be from 0 to 10"))
            }),
            (![0, 4, 8].contains(&kv_bits)).then(|| {
                out_of_range("engine.kv_bits", format!("is {kv_bits}, must be 8, 4, or 0 for none"))
            }),
        ];
        let mut problems: Vec<_> = limits.into_iter().flatten().collect();
        let SpeculationConfig { drafts, draft_model, depth, .. } = &self.speculation;
        if !draft_model.is_empty() && !drafts.contains(&DraftKind::Model) {
            let problem = "names a model, but `speculation.drafts` does not have \"model\"";
            problems.push(out_of_range("speculation.draft_model", problem));
        }
        let ModelConfig { activations, kernels, cpu_dequantize, .. } = self.model;
        if activations == Activations::Int8 && (kernels == Kernels::Mlx || cpu_dequantize) {
            let problem = "is `int8`, which only Steersman's kernels for packed weights have; remove \
                           `model.kernels` and `model.cpu_dequantize`, or set `exact`";
            problems.push(out_of_range("model.activations", problem));
        }
        problems.extend(within("speculation.depth", *depth as u64, 1..=DEPTH as u64));
        let StoreConfig { kv_bits: stored_bits, min_tokens, .. } = self.store;
        if ![0, 8].contains(&stored_bits) {
            let problem = format!("is {stored_bits}, must be 8, or 0 for none");
            problems.push(out_of_range("store.kv_bits", problem));
        }
        if stored_bits > 0 && kv_bits > 0 {
            let problem = "has no effect if `engine.kv_bits` is set";
            problems.push(out_of_range("store.kv_bits", problem));
        }
        problems.extend(at_least("store.min_tokens", min_tokens as u64, 1));
        problems.extend(self.policy.problems().into_iter().map(Error::from));
        problems.extend(self.profiles.iter().flat_map(|(name, profile)| profile.problems(name)));
        problems
    }
}

/// What is to be said of an `engine.context` of `configured` tokens if a model's context has only `model`: less is no
/// problem, as several models share the limit.
pub fn context_note(configured: usize, model: usize) -> Option<String> {
    (configured > model).then(|| {
        format!(
            "engine.context: is {configured}, the context of the model has {model} tokens, which are the limit; 0 is the \
             model's own"
        )
    })
}

fn at_least(field: &'static str, value: u64, least: u64) -> Option<Error> {
    (value < least).then(|| out_of_range(field, format!("is {value}, must be at least {least}")))
}

fn within(field: &'static str, value: u64, range: RangeInclusive<u64>) -> Option<Error> {
    let (least, most) = (range.start(), range.end());
    (!range.contains(&value))
        .then(|| out_of_range(field, format!("is {value}, must be from {least} to {most}")))
}

fn out_of_range(field: &'static str, problem: impl Into<String>) -> Error {
    Error::Config(ConfigError::Key { field, problem: problem.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Sampling;

    /// `queue = 2^61` panicked, and requests failed or were answered with noise under the others.
    #[test]
    fn values_that_make_no_sense_are_refused_by_key() {
        let refused = |change: fn(&mut Config)| {
            let mut config = Config::default();
            config.profiles.insert("mine".into(), Profile::default());
            change(&mut config);
            config.check().unwrap_err().to_string()
        };
        fn sampling(config: &mut Config, sampling: Sampling) {
            config.profiles.get_mut("mine").unwrap().sampling = Some(sampling);
        }
        type Change = fn(&mut Config);
        let cases: [(Change, &[&str]); 13] = [
            (
                |c| {
                    c.model.activations = Activations::Int8;
                    c.model.kernels = Kernels::Mlx;
                },
                &["model.activations: is `int8`", "remove `model.kernels`"],
            ),
            (|c| c.engine.queue = 0, &["engine.queue: is 0", "from 1 to 4096"]),
            (|c| c.engine.queue = 1 << 61, &["engine.queue", "from 1 to 4096"]),
            (|c| c.engine.prompt_bytes = 1, &["engine.prompt_bytes", "at least 1024"]),
            (|c| c.engine.prefill_chunk = 1 << 40, &["engine.prefill_chunk", "from 1 to 65536"]),
            (|c| c.engine.max_running = 1 << 40, &["engine.max_running", "from 0 to 256"]),
            (|c| c.engine.context = 1, &["engine.context", "at least 2"]),
            (
                |c| sampling(c, Sampling { temperature: f32::NAN, ..Sampling::default() }),
                &["profiles.mine.sampling: ", "temperature is NaN"],
            ),
            (
                |c| sampling(c, Sampling { temperature: 9.0, ..Sampling::default() }),
                &["profiles.mine.sampling: ", "temperature is 9", "from 0 to 2"],
            ),
            (
                |c| sampling(c, Sampling { top_p: 0.0, ..Sampling::default() }),
                &["profiles.mine.sampling: ", "top_p is 0"],
            ),
            (
                |c| sampling(c, Sampling { top_p: 7.0, min_p: 2.0, ..Sampling::default() }),
                &["profiles.mine.sampling: ", "top_p is 7", "min_p is 2"],
            ),
            (
                |c| drop(c.profiles.insert("a@b".into(), Profile::default())),
                &["profiles.a@b: ", "name"],
            ),
            (
                |c| drop(c.profiles.insert(String::new(), Profile::default())),
                &["profiles.: ", "name"],
            ),
        ];
        for (change, words) in cases {
            let error = refused(change);
            for word in words {
                assert!(error.contains(word), "`{word}` is not in {error}");
            }
        }
    }
}
