//! The engine's configuration: plain structs, read from TOML by the server, written by hand in
//! tests. Each is checked once, in [`Config::check`]; later code never re-checks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Error, Result};
use crate::request::Sampling;

/// All that the engine needs to know to start.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Which weights, on which device, in which numbers.
    pub model: ModelConfig,
    /// Bounds of the engine thread.
    pub engine: EngineConfig,
    /// Guessing tokens ahead.
    pub speculation: SpeculationConfig,
    /// Saved state.
    pub store: StoreConfig,
    /// Limits on guests, for all policies.
    pub policy: PolicyConfig,
    /// Profiles by name. One named `default` always exists.
    pub profiles: BTreeMap<String, Profile>,
}

/// `[model]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// A local folder, or a Hugging Face repo id (`owner/name`); empty serves the bundled
    /// demonstration model.
    pub path: String,
    /// Name under which clients ask for the model; empty takes the folder's or repo's name.
    pub name: String,
    /// Where MLX computes.
    pub device: Device,
    /// Type of weights and activations.
    pub dtype: Dtype,
    /// Dequantize quantized weights at load on the CPU, where MLX's quantized matmul is slower
    /// than a dense one (6 times for 4-bit on x86-64). Costs memory: 8 times that of 4-bit in f32.
    pub cpu_dequantize: bool,
    /// Compile the formulas of a step, so that a few fused kernels take the place of many.
    pub compile: Compile,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            path: String::new(),
            name: String::new(),
            device: Device::Auto,
            dtype: Dtype::Auto,
            cpu_dequantize: true,
            compile: Compile::Auto,
        }
    }
}

/// Where MLX computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
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

/// Where a step's formulas are compiled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compile {
    /// On a GPU, where starting a kernel costs more than what many of them do; not on the CPU, where
    /// MLX calls g++ for each of them.
    #[default]
    Auto,
    /// Always. Without g++, the CPU goes on without.
    On,
    /// Never.
    Off,
}

/// Type of weights and activations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// As the checkpoint stores them on a GPU; f32 on the CPU, where it is the faster one.
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
    /// Requests that may wait; one more is refused with 429.
    pub queue: usize,
    /// Prompt tokens computed in one go; a cancelled request stops after at most so many.
    pub prefill_chunk: usize,
    /// Answer tokens of a request that does not say `max_tokens`.
    pub max_tokens: u32,
    /// Tokens of prompt, thought and answer together; 0 takes the model's own limit.
    pub context: usize,
    /// Nats a token that leaving out feed-forward blocks may cost, as `steersman calibrate` measured
    /// them: faster, and lossy. 0 leaves out none.
    pub skip_kl: f32,
    /// Bits of keys and values of full attention, 8 or 4: less memory, slower, and lossy. 0 keeps
    /// them as they are.
    pub kv_bits: u32,
    /// Positions at the beginning whose keys and values stay as they are all the same.
    pub kv_bits_from: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            queue: 32,
            prefill_chunk: 512,
            max_tokens: 4096,
            context: 0,
            skip_kl: 0.0,
            kv_bits: 0,
            kv_bits_from: 0,
        }
    }
}

/// `[speculation]`: drafts that the model verifies. They change how fast a reply comes, and nothing
/// else.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpeculationConfig {
    /// What may draft; none turns speculation off. A kind that the model has no weights for is
    /// left out, which the log says.
    pub drafts: Vec<DraftKind>,
    /// A smaller model with the same vocabulary, for `model` drafts: a local folder, or a Hugging
    /// Face repo id; empty for none.
    pub draft_model: String,
    /// Most tokens of one draft, 1 to 7.
    pub depth: usize,
    /// Verify a token again in a pass of its own where the two likeliest are so close that the
    /// rounding of a pass over several rows could have swapped them.
    pub exact: bool,
}

impl Default for SpeculationConfig {
    fn default() -> Self {
        let drafts = DraftKind::ALL.to_vec();
        Self { drafts, draft_model: String::new(), depth: DEPTH, exact: true }
    }
}

/// Most tokens of one draft. A pass of eight rows is where kernels stop being cheap.
pub const DEPTH: usize = 7;

/// What drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DraftKind {
    /// The text itself: what followed the same tokens before.
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
    /// Most bytes of state in memory, as live arrays; what was least recently used goes first.
    pub memory_bytes: u64,
    /// Whether state is kept on disk as well, and so survives a restart.
    pub enabled: bool,
    /// The database file; empty is `state.redb` in the data folder.
    pub path: PathBuf,
    /// Most bytes on disk; what was least recently used goes first.
    pub budget_bytes: u64,
    /// Prefixes shorter than this are not worth being saved.
    pub min_tokens: usize,
    /// Bits of keys and values on disk: 8 for a half or a quarter of the space, lossy; 0 for as they
    /// are.
    pub kv_bits: u32,
    /// Whether an idle engine computes what the next request of a conversation will begin with.
    pub ahead: bool,
}

impl StoreConfig {
    /// The database file, where `data` is the data folder.
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

/// `[policy]`: limits on every guest, and where policies and traces are.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// Fuel of one hook call, about one unit a Wasm instruction. Deterministic.
    pub fuel: u64,
    /// Wall-clock bound of one hook call, for what fuel does not count.
    pub deadline_ms: u64,
    /// Most linear memory of one instance. 256 times as much address space is reserved; what a
    /// policy does not touch takes no memory. JavaScript needs 9.5 MB, Python 12.9 MB, to begin with.
    pub memory_bytes: usize,
    /// Most bytes of text in one answer of a hook; more is a failure of the policy.
    pub output_bytes: usize,
    /// Most bytes that one policy may keep through `kv`, in one profile.
    pub kv_bytes: usize,
    /// Folder whose `NAME.wasm` are the policies `NAME`, before those that ship; empty for none.
    pub folder: PathBuf,
    /// Whether policies in files are loaded again when they change.
    pub watch: bool,
    /// Requests whose decisions are remembered.
    pub trace_requests: usize,
    /// File to which decisions are appended, a JSON object a line; empty for none.
    pub trace_file: PathBuf,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            fuel: 10_000_000,
            deadline_ms: 50,
            memory_bytes: 32 << 20,
            output_bytes: 16 << 10,
            kv_bytes: 1 << 20,
            folder: PathBuf::new(),
            watch: true,
            trace_requests: 256,
            trace_file: PathBuf::new(),
        }
    }
}

/// `[profiles.NAME]`: which policies steer a request, and how.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Profile {
    /// The model that it asks: a local folder or a repo id, as `model.path`; empty for that of
    /// `[model]`. The server loads each model once.
    pub model: String,
    /// The chain: names of policies (`default`, `passthrough`, `NAME` of `policy.folder`), or paths of
    /// components. A later one cannot loosen what an earlier one decides.
    pub policies: Vec<String>,
    /// Policies that see the same and decide nothing: their decisions are traced.
    pub shadow: Vec<String>,
    /// What happens when a policy fails.
    pub on_failure: OnFailure,
    /// What the policies may import.
    pub grants: Vec<Grant>,
    /// Handed to the policies as text: to all of the chain, and what is named `POLICY.NAME`, or stands
    /// in a table `POLICY`, to that policy alone, as `NAME`.
    #[serde(deserialize_with = "params")]
    pub params: BTreeMap<String, Param>,
    /// Whether traces hold text and tokens; else only their lengths, and no replay is exact.
    pub trace_text: bool,
    /// Keys that choose this profile, and allow no other.
    pub api_keys: Vec<String>,
    /// Bounds of its requests.
    pub limits: ProfileLimits,
    /// Files with what this profile's requests begin with, computed at the start:
    /// `{"messages": [..], "tools": [..]}` as in a chat request.
    pub warm: Vec<PathBuf>,
    /// Sampling where neither the client nor the model's `generation_config.json` says otherwise
    /// is greedy; what stands here overrides the latter.
    pub sampling: Option<Sampling>,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            model: String::new(),
            policies: vec!["default".into()],
            shadow: Vec::new(),
            on_failure: OnFailure::Open,
            grants: Vec::new(),
            params: BTreeMap::new(),
            trace_text: false,
            api_keys: Vec::new(),
            limits: ProfileLimits::default(),
            warm: Vec::new(),
            sampling: None,
        }
    }
}

/// Most policies of one profile, shadows included.
pub const CHAIN: usize = 8;

/// An interface that a policy may import where its profile grants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grant {
    /// Lines in the log.
    Log,
    /// A small map that outlives requests.
    Kv,
    /// The model's tokenizer.
    Tokenizer,
    /// Counters at `GET /metrics`.
    Counters,
}

impl Grant {
    /// All there are.
    pub const ALL: [Self; 4] = [Self::Log, Self::Kv, Self::Tokenizer, Self::Counters];

    /// Its name in configurations, which is also that of the interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Kv => "kv",
            Self::Tokenizer => "tokenizer",
            Self::Counters => "counters",
        }
    }
}

/// The value of a parameter: text, or `{ file = "rules.toml" }` for what a file holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Param {
    /// The text itself.
    Text(String),
    /// The text of a file.
    File {
        /// Relative to the working directory.
        file: PathBuf,
    },
}

/// Those of a table become `POLICY.NAME`.
fn params<'de, D: Deserializer<'de>>(written: D) -> Result<BTreeMap<String, Param>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "text, { file = \"PATH\" } or a table of one policy's own parameters"
    )]
    enum Written {
        One(Param),
        Own(BTreeMap<String, Param>),
    }
    let mut params = BTreeMap::new();
    for (name, written) in BTreeMap::<String, Written>::deserialize(written)? {
        match written {
            Written::One(param) => drop(params.insert(name, param)),
            Written::Own(own) => {
                params.extend(own.into_iter().map(|(own, param)| (format!("{name}.{own}"), param)));
            }
        }
    }
    Ok(params)
}

impl From<&str> for Param {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

/// `[profiles.NAME.limits]`; 0 is no limit of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProfileLimits {
    /// Most tokens of a prompt; a longer one is refused.
    pub prompt_tokens: usize,
    /// Most tokens of a thought, whatever client and policy say.
    pub think_budget: u32,
    /// Most tokens of an answer, whatever the client says.
    pub max_tokens: u32,
    /// Most requests of this profile that wait or run; one more is refused with 429.
    pub requests: usize,
}

/// What happens to a request whose policy fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFailure {
    /// The small native default takes over: static budget, loop guard. Never no policy.
    #[default]
    Open,
    /// The request ends with `policy_error`.
    Closed,
}

impl Config {
    /// Checks every bound and adds the `default` profile where it is missing.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the first key that is out of range.
    pub fn check(mut self) -> Result<Self> {
        let at_least = |field, value: u64, least: u64| {
            if value >= least {
                return Ok(());
            }
            Err(Error::Invalid { field, problem: format!("is {value}, must be at least {least}") })
        };
        at_least("engine.queue", self.engine.queue as u64, 1)?;
        at_least("engine.prefill_chunk", self.engine.prefill_chunk as u64, 1)?;
        at_least("engine.max_tokens", self.engine.max_tokens.into(), 1)?;
        if !(0.0..=10.0).contains(&self.engine.skip_kl) {
            let problem = format!("is {}, must be from 0 to 10", self.engine.skip_kl);
            return Err(Error::Invalid { field: "engine.skip_kl", problem });
        }
        let SpeculationConfig { drafts, draft_model, .. } = &self.speculation;
        if !draft_model.is_empty() && !drafts.contains(&DraftKind::Model) {
            let problem = "names a model, but `speculation.drafts` does not have \"model\"".into();
            return Err(Error::Invalid { field: "speculation.draft_model", problem });
        }
        if ![0, 4, 8].contains(&self.engine.kv_bits) {
            let problem = format!("is {}, must be 8, 4, or 0 for none", self.engine.kv_bits);
            return Err(Error::Invalid { field: "engine.kv_bits", problem });
        }
        at_least("speculation.depth", self.speculation.depth as u64, 1)?;
        if self.speculation.depth > DEPTH {
            let problem = format!("is {}, must be at most {DEPTH}", self.speculation.depth);
            return Err(Error::Invalid { field: "speculation.depth", problem });
        }
        let StoreConfig { kv_bits, .. } = self.store;
        if ![0, 8].contains(&kv_bits) {
            let problem = format!("is {kv_bits}, must be 8, or 0 for none");
            return Err(Error::Invalid { field: "store.kv_bits", problem });
        }
        if kv_bits > 0 && self.engine.kv_bits > 0 {
            let problem = "is of no use where `engine.kv_bits` has them in few bits already".into();
            return Err(Error::Invalid { field: "store.kv_bits", problem });
        }
        at_least("store.min_tokens", self.store.min_tokens as u64, 1)?;
        at_least("policy.fuel", self.policy.fuel, 1)?;
        at_least("policy.deadline_ms", self.policy.deadline_ms, 1)?;
        at_least("policy.memory_bytes", self.policy.memory_bytes as u64, 1 << 16)?;
        at_least("policy.output_bytes", self.policy.output_bytes as u64, 1)?;
        at_least("policy.trace_requests", self.policy.trace_requests as u64, 1)?;
        self.profiles.entry("default".into()).or_default();
        self.profiles.iter().try_for_each(|(name, profile)| profile.check(name))?;
        Ok(self)
    }
}

impl Profile {
    fn check(&self, name: &str) -> Result<()> {
        let refuse = |problem: &str| {
            let problem = format!("profile `{name}` {problem}");
            Err(Error::Invalid { field: "profiles", problem })
        };
        if name == "default" && !self.model.is_empty() {
            return refuse("asks the model of [model]: name yours in model.path");
        }
        if self.policies.is_empty() {
            return refuse("names no policy; `policies = [\"passthrough\"]` decides nothing");
        }
        if self.policies.len() + self.shadow.len() > CHAIN {
            return refuse(&format!("names more than {CHAIN} policies, shadows included"));
        }
        if self.api_keys.iter().any(|key| key.trim().is_empty() || key.trim() != key) {
            return refuse("has an api key that is empty, or begins or ends with a space");
        }
        Ok(())
    }
}
