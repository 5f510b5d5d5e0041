//! Memory: what arrays may take, and what a request will take.
//!
//! A failed allocation can end the process: MLX allocates on threads that cannot report it, and BLAS
//! exits. So bytes are counted before they are allocated, as a sum over all sequences: what the next
//! step takes, and what a sequence may still take. `preempt.rs` decides by these sums. The prefix cache
//! is evicted first to make room.
//!
//! The limit is `engine.memory_limit_bytes`, or what is least of: what the machine has for arrays
//! ([`device::array_limit`]), the limit of the cgroup, and `RLIMIT_AS` and `RLIMIT_DATA` of the process.
//! From the last three, what the process holds besides arrays after loading is subtracted, and a
//! [`RESERVE`] for what it will hold.
//!
//! What a pass takes besides the cache is measured: at the start (`decode/probe.rs`), and on every chunk of a
//! prompt. It grows with the rows, and where attention is not fused, with rows times positions.
//!
//! MLX counts all arrays of the process, so that all models share one limit. What one of them measures
//! counts only if no other ran, or was loaded, at the same time ([`Section`]).

use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use mlx_rs::Dtype;
use mlx_rs::memory::{
    active_memory, clear_cache, memory_limit, peak_memory, reset_peak_memory, set_memory_limit,
};
use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::config::{self, Config};
use crate::device::{self, DeviceInfo};
use crate::error::{ConfigError, Error, RequestError, Result};
use crate::model::on_cpu;
use crate::sequence::STEP_ROWS;

/// Bytes reserved for what is allocated after loading besides arrays: requests, policies, threads and the
/// allocator's gaps.
const RESERVE: u64 = 128 << 20;

/// As [`RESERVE`], for `RLIMIT_AS`: stacks and allocators reserve addresses, used or not (glibc 64 MiB for each of the first
/// threads).
const RESERVE_OF_ADDRESSES: u64 = 384 << 20;

/// Length at which half of what a pass takes unexpectedly is due to the lengths of its caches.
const LONG: usize = 2048;

/// Arrays of the vocabulary's length, in f32, that sampling a token takes at most: logits, noise, order,
/// sorted copies, probabilities.
const SAMPLING_ARRAYS: u64 = 8;

/// Tokens of a reply for which there must be room when its request is admitted. Longer replies grow
/// while there is room.
pub const REPLY_TOKENS: usize = 1024;

/// Rows by which caches grow, and which they hold beyond those that are filled.
const STEP: usize = crate::cache::STEP as usize;

/// The limit on arrays, and the bytes that caches and samples take.
pub struct Memory {
    limit: u64,
    /// Bytes of an activation.
    size: u64,
    /// Bytes that sampling a token takes.
    sampling: u64,
    /// Bytes of the recurrent state of a cache.
    state: u64,
    on_gpu: bool,
}

/// Bytes of a pass besides weights and caches: `fixed`, and for each sequence `rows * (per_row +
/// per_position * length)`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PassBytes {
    fixed: f64,
    per_row: f64,
    per_position: f64,
}

impl PassBytes {
    /// From two measured passes: their rows and bytes.
    pub fn measured([few, many]: [(usize, u64); 2]) -> Self {
        let [few, many] = [few, many].map(|(rows, bytes)| (rows as f64, bytes as f64));
        let per_row = ((many.1 - few.1) / (many.0 - few.0)).max(0.0);
        let fixed = (few.1 - per_row * few.0).max(0.0);
        Self { fixed, per_row, per_position: 0.0 }
    }

    /// Whether all numbers are possible.
    pub fn is_sound(&self) -> bool {
        [self.fixed, self.per_row, self.per_position].iter().all(|b| b.is_finite() && *b >= 0.0)
    }

    fn of_rows(&self, rows: usize, length: usize) -> u64 {
        (rows as f64 * (self.per_row + self.per_position * length as f64)) as u64
    }

    /// Bytes of the longest pass of a prompt of `tokens` tokens that runs in chunks of `chunk`.
    pub fn of_prompt(&self, tokens: usize, chunk: usize) -> u64 {
        self.of(chunk.min(tokens), tokens)
    }

    fn of(&self, rows: usize, length: usize) -> u64 {
        self.fixed as u64 + self.of_rows(rows, length)
    }

    /// Bytes of a pass over `rows` rows of a cache that has `length` then, beside other rows.
    pub fn of_chunk(&self, rows: usize, length: usize) -> u64 {
        self.of_rows(rows, length)
    }

    /// Learns from a pass that took `unexpected` bytes more than expected. They are due to the lengths of its caches, or
    /// are the same for every pass, such as a matrix that is dequantized: the longer the caches, the more are due to
    /// them. `rows` are all rows of the pass, `positions` the sum of rows times length.
    fn learn(&mut self, unexpected: u64, rows: usize, positions: usize) {
        let (unexpected, positions) = (unexpected as f64, positions.max(1) as f64);
        let due_to_length = positions / (positions + (rows * LONG) as f64);
        self.per_position += due_to_length * unexpected / positions;
        self.fixed += (1.0 - due_to_length) * unexpected;
    }

    /// Learns from a step that was expected to take `expected` and has been evaluated.
    pub fn learn_step(&mut self, before: &Before, expected: Expected) -> Result<()> {
        let taken = (peak_memory()? as u64).saturating_sub(before.0);
        let unexpected = taken.saturating_sub(expected.bytes);
        if unexpected > 0 {
            self.learn(unexpected, expected.rows, expected.positions);
            tracing::debug!(unexpected, ?expected, pass = ?self, "a pass took more memory than expected");
        }
        Ok(())
    }
}

/// What a step is expected to take.
#[derive(Debug, Clone, Copy)]
pub struct Expected {
    pub bytes: u64,
    rows: usize,
    /// The sum over all caches of rows times length.
    positions: usize,
}

/// Bytes of arrays before a pass.
pub struct Before(u64);

/// The sections of all engines of this process.
static SECTIONS: Sections = Sections { running: AtomicUsize::new(0), begun: AtomicU64::new(0) };

/// Counts of [`Section`]s.
struct Sections {
    /// Number of sections that have not ended.
    running: AtomicUsize,
    /// Number of sections that have begun.
    begun: AtomicU64,
}

/// A stretch of time in which an engine allocates arrays: a pass, or loading. Ends when it is dropped.
///
/// Without it, an engine that ran a chunk of a prompt while another model was loaded took the weights of that
/// for what the chunk needs, and refused requests later for lack of memory.
pub struct Section {
    all: &'static Sections,
    /// Whether others were running when it began.
    beside: bool,
    /// Its number.
    number: u64,
}

impl Section {
    /// Begins a section, which may be part of `outer`.
    pub fn begin(outer: Option<&Self>) -> Self {
        Self::begin_among(&SECTIONS, outer)
    }

    fn begin_among(all: &'static Sections, outer: Option<&Self>) -> Self {
        let running = all.running.fetch_add(1, Ordering::SeqCst);
        let number = all.begun.fetch_add(1, Ordering::SeqCst) + 1;
        Self { all, beside: running > usize::from(outer.is_some()), number }
    }

    /// Whether no other section has run since it began.
    pub fn is_alone(&self) -> bool {
        !self.beside && self.all.begun.load(Ordering::SeqCst) == self.number
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        self.all.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Memory {
    /// No limit. Activations are of `dtype`, logits have `vocabulary` columns.
    pub fn unlimited(dtype: Dtype, vocabulary: i32, on_gpu: bool) -> Self {
        let size = if dtype == Dtype::Float32 { 4 } else { 2 };
        let sampling = SAMPLING_ARRAYS * 4 * u64::try_from(vocabulary).unwrap_or(0);
        Self { limit: u64::MAX, size, sampling, state: 0, on_gpu }
    }

    /// Sets the limit, which MLX takes for its own as well: it keeps freed buffers of a GPU for reuse up to that. A
    /// cache grows from `empty`.
    pub fn set_limit(&mut self, limit: u64, empty: &Cache) -> Result<()> {
        set_memory_limit(usize::try_from(limit).unwrap_or(usize::MAX))?;
        (self.limit, self.state) = (limit, empty.bytes(0, self.size));
        Ok(())
    }

    /// Returns true if arrays are in the memory of a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.on_gpu
    }

    /// Bytes of a float of caches.
    pub fn float_bytes(&self) -> u64 {
        self.size
    }

    /// Bytes that arrays may still take.
    pub fn free(&self) -> Result<u64> {
        Ok(self.limit.saturating_sub(active()?))
    }

    /// Bytes of the cache of a prompt of `tokens` tokens, besides its first `shared` rows.
    pub fn of_prompt(&self, empty: &Cache, shared: usize, tokens: usize) -> u64 {
        let cache = empty.bytes(tokens + STEP, self.size);
        cache - empty.shareable_bytes(shared, self.size)
    }

    /// Bytes that a pass takes which runs the given number of rows of each cache.
    pub fn of_step<'a>(
        &self,
        bytes: &PassBytes,
        spans: impl IntoIterator<Item = (&'a Cache, usize)>,
    ) -> u64 {
        let of = |(cache, rows): (&Cache, usize)| {
            let length = cache.position + rows;
            let grows = cache.capacity_at(length) > cache.capacity_at(cache.position);
            let grown = if grows { self.growth(cache, length) } else { 0 };
            let sampled = rows.min(STEP_ROWS) as u64 * self.sampling;
            // MLX's attention over more rows needs shared and own keys in one array, and likewise the values.
            let is_joined = self.on_gpu && rows > STEP_ROWS && cache.shared_count() > 0;
            let joined = match is_joined {
                true => cache.shareable_bytes(length, self.size) / cache.shareable_layers(),
                false => 0,
            };
            // A pass makes a new state beside the old one, which a check of near-ties keeps.
            grown + joined + self.state + sampled + bytes.of_rows(rows, length)
        };
        bytes.fixed as u64 + spans.into_iter().map(of).sum::<u64>()
    }

    /// Bytes that `cache` takes more when it has grown to `length` rows, and while it grows.
    pub fn growth(&self, cache: &Cache, length: usize) -> u64 {
        self.growth_behind(cache, cache.shared_count(), length)
    }

    /// [`Memory::growth`] of a cache whose first rows will be `shared` ones.
    pub fn growth_behind(&self, cache: &Cache, shared: usize, length: usize) -> u64 {
        let shared = cache.shareable_bytes(shared, self.size);
        let then = cache.bytes(length + STEP, self.size).saturating_sub(shared);
        // A layer that grows is copied; two may be copied at a time.
        then.saturating_sub(self.of_cache(cache)) + 2 * then / cache.layers.len().max(1) as u64
    }

    /// Bytes that `cache` takes now, besides shared rows.
    pub fn of_cache(&self, cache: &Cache) -> u64 {
        if cache.position == 0 {
            return 0;
        }
        let shared = cache.shareable_bytes(cache.shared_count(), self.size);
        cache.bytes(cache.capacity_at(cache.position), self.size).saturating_sub(shared)
    }

    /// Bytes of a saved copy of the state of `cache` and of `rows` of its rows.
    pub fn of_saved(&self, cache: &Cache, rows: usize) -> u64 {
        cache.bytes(rows, self.size)
    }

    /// [`Memory::of_step`], to learn from.
    pub fn expect<'a>(
        &self,
        bytes: &PassBytes,
        spans: impl Iterator<Item = (&'a Cache, usize)> + Clone,
    ) -> Expected {
        let positions = |(cache, rows): (&Cache, usize)| rows * (cache.position + rows);
        let rows = spans.clone().map(|(_, rows)| rows).sum();
        let positions = spans.clone().map(positions).sum();
        Expected { rows, positions, bytes: self.of_step(bytes, spans) }
    }

    /// Checks that `needed` bytes are free.
    ///
    /// # Errors
    /// [`RequestError::Memory`] if they are not.
    pub fn check(&self, needed: u64) -> Result<()> {
        let available = self.free()?;
        if needed <= available { Ok(()) } else { Err(self.refuse(needed, available)) }
    }

    /// The error of a request that needs more than is available.
    pub fn refuse(&self, needed: u64, available: u64) -> Error {
        RequestError::Memory { needed, available, limit: self.limit }.into()
    }
}

impl Before {
    /// Starts the measurement of a pass.
    pub fn now() -> Result<Self> {
        reset_peak_memory()?;
        Ok(Self(active()?))
    }

    /// Most bytes that were in use besides those before and those that remain.
    pub fn transient(&self) -> Result<u64> {
        let remaining = active()?.max(self.0);
        Ok((peak_memory()? as u64).saturating_sub(remaining))
    }
}

/// What models may take on this machine, before any is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Most bytes of all arrays of this process: weights, running requests and prefix caches.
    pub memory_limit: u64,
    /// What sets this limit: a key, or the machine.
    pub limit_set_by: &'static str,
    /// Most bytes of arrays on its GPU, whatever else runs and the configuration allows; `None` if MLX computes on the
    /// CPU.
    pub gpu_bytes: Option<u64>,
    /// Whether MLX computes on the CPU.
    pub on_cpu: bool,
    /// Bytes of a float of weights and caches.
    pub float_bytes: u64,
}

impl Machine {
    /// With the device and numeric format of `config`.
    ///
    /// # Errors
    /// [`Error::Config`] if the device does not exist.
    pub fn of(config: &Config) -> Result<Self> {
        let on_cpu = on_cpu(config.model.device)?;
        let float_bytes = match config.model.dtype {
            config::Dtype::F32 => 4,
            config::Dtype::Auto if on_cpu => 4,
            config::Dtype::Auto | config::Dtype::Bf16 | config::Dtype::F16 => 2,
        };
        let (memory_limit, limit_set_by) = find_limit(config.engine.memory_limit_bytes)?;
        let gpu_bytes = if on_cpu { None } else { Some(device_limit()?.0) };
        Ok(Self { memory_limit, limit_set_by, gpu_bytes, on_cpu, float_bytes })
    }
}

/// Bytes of all arrays of this process.
pub fn active() -> Result<u64> {
    Ok(active_memory()? as u64)
}

/// Returns freed buffers, which MLX keeps for reuse, to the system: after an engine has ended.
pub fn release_buffers() {
    if let Err(error) = clear_cache() {
        tracing::warn!(%error, "releasing freed buffers failed");
    }
}

/// The error of a model that takes `used` bytes of a `limit` that `set_by` sets.
pub fn too_small(set_by: &'static str, used: u64, limit: u64) -> Error {
    let problem = format!(
        "allows {limit} bytes for arrays, but the model takes {used}; allow more, or choose a smaller model"
    );
    Error::Config(ConfigError::Key { field: set_by, problem })
}

/// Checks that the weights in `folder` fit before they are read.
///
/// # Errors
/// [`Error::Config`] if their files are larger than the limit.
pub fn check_weights(configured: u64, folder: &Path) -> Result<()> {
    let (limit, set_by) = find_limit(configured)?;
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let weights = files
        .filter(|file| Path::new(&file.file_name()).extension() == Some("safetensors".as_ref()));
    let bytes: u64 =
        weights.filter_map(|file| fs::metadata(file.path()).ok()).map(|m| m.len()).sum();
    let used = bytes + active()?;
    if used > limit { Err(too_small(set_by, used, limit)) } else { Ok(()) }
}

/// Most bytes of arrays, and what sets this limit.
pub fn find_limit(configured: u64) -> Result<(u64, &'static str)> {
    let machine = match configured {
        0 => device_limit()?,
        bytes => (bytes, "engine.memory_limit_bytes"),
    };
    let limits = process_limits(active()?);
    Ok(limits.into_iter().chain([machine]).min().expect("there is at least one limit"))
}

/// Most bytes of arrays on this machine, whatever else runs, and what sets this limit.
fn device_limit() -> Result<(u64, &'static str)> {
    Ok(device::array_limit(machine_limit()?, DeviceInfo::of_gpu().as_ref()))
}

/// The limits on the process and its container, as far as they bound `arrays` bytes of arrays and further ones.
fn process_limits(arrays: u64) -> Vec<(u64, &'static str)> {
    let mut limits = Vec::new();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let rlimits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    for (name, limit, used, reserve) in [
        ("RLIMIT_AS", "Max address space", "VmSize:", RESERVE_OF_ADDRESSES),
        ("RLIMIT_DATA", "Max data size", "VmData:", RESERVE),
    ] {
        if let (Some(limit), Some(used)) = (field(&rlimits, limit), field(&status, used)) {
            limits.push((for_arrays(limit, used << 10, arrays, reserve), name));
        }
    }
    if let Some((limit, used)) = cgroup() {
        limits.push((for_arrays(limit, used, arrays, RESERVE), "the cgroup's memory.max"));
    }
    limits
}

/// MLX's own limit. [`Memory::set_limit`] replaces it, so that of an earlier engine of this process
/// must not be taken for the machine's.
fn machine_limit() -> Result<u64> {
    static LIMIT: OnceLock<u64> = OnceLock::new();
    let limit = memory_limit()? as u64;
    Ok(*LIMIT.get_or_init(|| limit))
}

/// The part of a `limit` on the process that arrays may take. `used` counts the process, with `arrays`.
fn for_arrays(limit: u64, used: u64, arrays: u64, reserve: u64) -> u64 {
    limit.saturating_sub(used.saturating_sub(arrays)).saturating_sub(reserve)
}

/// The number after `name` at the beginning of a line; `None` for `unlimited`.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// The tightest memory limit of this process's cgroups (version 2), and what is in use under it
/// without the page cache, which the system can drop.
fn cgroup() -> Option<(u64, u64)> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    let group = root.join(own);
    let groups = group.ancestors().take_while(|group| group.starts_with(root));
    let limits = groups.filter_map(|group| {
        let number = |file| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
        let limit = number("memory.max")?;
        let stat = fs::read_to_string(group.join("memory.stat")).ok()?;
        Some((limit, number("memory.current")?.saturating_sub(field(&stat, "file ")?)))
    });
    limits.min_by_key(|(limit, used)| limit.saturating_sub(*used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_counts_only_without_others() {
        // Engines of other tests run at the same time.
        static ALL: Sections = Sections { running: AtomicUsize::new(0), begun: AtomicU64::new(0) };
        let begin = |outer| Section::begin_among(&ALL, outer);
        let loading = begin(None);
        let pass = begin(Some(&loading));
        assert!(pass.is_alone() && !loading.is_alone());
        let other = begin(None);
        assert!(!pass.is_alone() && !other.is_alone());
        drop((pass, other));
        // What has ended before does not count; what still runs does.
        assert!(begin(Some(&loading)).is_alone());
        assert!(!begin(None).is_alone());
    }

    #[test]
    fn a_gpu_has_the_memory_of_its_own_and_a_cpu_that_of_the_machine() {
        let of = |device| {
            let mut config = Config::default();
            config.model.device = device;
            config.engine.memory_limit_bytes = 1 << 20;
            Machine::of(&config)
        };
        let cpu = of(config::Device::Cpu).unwrap();
        assert!(cpu.on_cpu && cpu.gpu_bytes.is_none(), "{cpu:?}");
        // Without a GPU it is an error.
        if let Ok(gpu) = of(config::Device::Gpu) {
            assert_eq!(gpu.memory_limit, 1 << 20);
            assert!(gpu.gpu_bytes.unwrap() > 1 << 30, "{gpu:?}");
        }
    }

    #[test]
    fn limits_of_the_process_are_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                      Max data size             unlimited            unlimited            bytes\n\
                      Max address space         9600000000           unlimited            bytes\n";
        assert_eq!(field(limits, "Max address space"), Some(9_600_000_000));
        assert_eq!(field(limits, "Max data size"), None);
        assert_eq!(field("VmPeak:\t  9 kB\nVmSize:\t  123 kB\n", "VmSize:"), Some(123));
        assert_eq!(for_arrays(1 << 30, 300 << 20, 100 << 20, RESERVE), (1024 - 200 - 128) << 20);
        assert_eq!(for_arrays(1 << 20, 300 << 20, 0, RESERVE), 0);
    }

    #[test]
    fn passes_take_what_longer_ones_took() {
        let mut pass = PassBytes { fixed: 1e6, per_row: 1e3, per_position: 0.0 };
        assert_eq!(pass.of(10, LONG), 1_010_000);
        pass.learn(100_000, 10, 10 * LONG);
        assert_eq!(pass.of(10, LONG), 1_110_000);
        assert_eq!(pass.of(10, 2 * LONG), 1_160_000);
        pass.learn(0, 10, 10 * LONG);
        assert_eq!(pass.of(10, 2 * LONG), 1_160_000);
    }

    /// Before, all that a short first chunk took more was due to its length: 200 MB of a dequantized matrix after a
    /// prompt of 150 tokens, and one of 8,000 was expected to take 36 GB.
    #[test]
    fn what_a_short_prompt_takes_unexpectedly_is_mostly_the_same_for_long_ones() {
        let mut pass = PassBytes::default();
        pass.learn(200 << 20, 150, 150 * 150);
        let of_long = pass.of(512, 8000);
        assert!((200 << 20..3 << 30).contains(&of_long), "{of_long}");
        // What a long one takes more is due to its length.
        let mut pass = PassBytes::default();
        pass.learn(200 << 20, 512, 512 * 16_000);
        assert!(pass.fixed < f64::from(32 << 20) && pass.of(512, 32_000) > 370 << 20, "{pass:?}");
    }
}
