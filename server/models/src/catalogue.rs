//! Short names of published models: `qwen3:4b`, or `qwen3` for the size that fits this machine.
//!
//! Every repo is of a family that the engine loads. Bytes are those of all files of a repo, rounded
//! up: enough to choose a size. [`Hub::plan`](crate::hub::Hub::plan) asks the hub for the exact
//! ones.

use std::fmt;

use indicatif::DecimalBytes;

use crate::machine;

/// A published model with a short name.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// The part of the short name before the colon.
    pub name: &'static str,
    /// The part after it: parameters, and for experts all of them.
    pub size: &'static str,
    /// The repo on the hub.
    pub repo: &'static str,
    /// Bytes of its files, rounded up.
    pub bytes: u64,
    /// How its weights are packed.
    pub quantization: &'static str,
}

const fn entry(
    name: &'static str,
    size: &'static str,
    repo: &'static str,
    megabytes: u64,
    quantization: &'static str,
) -> Entry {
    Entry { name, size, repo, bytes: megabytes * 1_000_000, quantization }
}

/// All models with short names. The sizes of a name stand together, the smallest first.
#[rustfmt::skip]
pub const CATALOGUE: &[Entry] = &[
    entry("qwen3.5", "0.8b", "mlx-community/Qwen3.5-0.8B-MLX-4bit", 650, "4 bits"),
    entry("qwen3.5", "2b", "mlx-community/Qwen3.5-2B-MLX-4bit", 1_750, "4 bits"),
    entry("qwen3.5", "4b", "mlx-community/Qwen3.5-4B-MLX-4bit", 3_060, "4 bits"),
    entry("qwen3.5", "9b", "mlx-community/Qwen3.5-9B-MLX-4bit", 6_000, "4 bits"),
    entry("qwen3.5", "27b", "mlx-community/Qwen3.5-27B-4bit", 16_200, "4 bits"),
    entry("qwen3.5", "35b", "mlx-community/Qwen3.5-35B-A3B-4bit", 20_500, "4 bits"),
    entry("qwen3", "0.6b", "mlx-community/Qwen3-0.6B-4bit", 360, "4 bits"),
    entry("qwen3", "1.7b", "mlx-community/Qwen3-1.7B-4bit", 990, "4 bits"),
    entry("qwen3", "4b", "mlx-community/Qwen3-4B-4bit", 2_290, "4 bits"),
    entry("qwen3", "8b", "mlx-community/Qwen3-8B-4bit", 4_630, "4 bits"),
    entry("qwen3", "14b", "mlx-community/Qwen3-14B-4bit", 8_330, "4 bits"),
    entry("qwen3", "30b", "mlx-community/Qwen3-30B-A3B-4bit", 17_200, "4 bits"),
    entry("llama3.2", "1b", "mlx-community/Llama-3.2-1B-Instruct-4bit", 720, "4 bits"),
    entry("llama3.2", "3b", "mlx-community/Llama-3.2-3B-Instruct-4bit", 1_830, "4 bits"),
    entry("gemma3", "4b", "mlx-community/gemma-3-4b-it-4bit", 3_450, "4 bits"),
    entry("gemma3", "12b", "mlx-community/gemma-3-12b-it-4bit", 8_100, "4 bits"),
    entry("gemma3", "27b", "mlx-community/gemma-3-27b-it-4bit", 16_900, "4 bits"),
    entry("mistral", "7b", "mlx-community/Mistral-7B-Instruct-v0.3-4bit", 4_080, "4 bits"),
    entry("phi4-mini", "3.8b", "mlx-community/Phi-4-mini-instruct-4bit", 2_180, "4 bits"),
    entry("gpt-oss", "20b", "mlx-community/gpt-oss-20b-MXFP4-Q8", 12_200, "MXFP4, 8 bits"),
];

/// Tenths of the machine's memory that weights and requests may take. The rest is for the system and other
/// programs.
const MEMORY_TENTHS: u64 = 6;

/// Bytes for requests and the prefix cache.
const REQUEST_BYTES: u64 = 2 << 30;

/// What a short name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// A name with a size: one model.
    One(&'static Entry),
    /// A name without a size: all of them, the smallest first.
    Any(&'static [Entry]),
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, size, repo, bytes, quantization } = self;
        let bytes = DecimalBytes(*bytes);
        write!(f, "{name}:{size} is {repo} ({quantization}, about {bytes})")
    }
}

impl Named {
    /// The model. Of several sizes it is the largest that has [`room`] in so many bytes, or else the smallest.
    pub fn entry(self, room: u64) -> &'static Entry {
        match self {
            Self::One(entry) => entry,
            Self::Any(sizes) => {
                sizes.iter().rfind(|entry| fits(entry.bytes, room)).unwrap_or(&sizes[0])
            }
        }
    }

    /// What a user is told about a name without a size: which one was chosen, and the others.
    pub fn choice(self, room: u64) -> Option<String> {
        let Self::Any(sizes) = self else { return None };
        let entry = self.entry(room);
        let others = sizes.iter().filter(|other| other.size != entry.size);
        let others: Vec<_> = others.map(|other| other.size).collect();
        (!others.is_empty()).then(|| {
            let (name, others) = (entry.name, others.join(", "));
            format!("{entry}: the size for this machine's memory; others, as {name}:SIZE: {others}")
        })
    }
}

/// What the short name `text` stands for: `NAME:SIZE`, `NAME` or `NAME:latest` in letters of any case.
///
/// # Errors
/// If the name is known and has no such size; with its sizes. `None` for another name.
pub fn find(text: &str) -> Result<Option<Named>, String> {
    let text = text.to_lowercase();
    let (name, size) = text.split_once(':').unwrap_or((&text, "latest"));
    let mut names = CATALOGUE.chunk_by(|one, next| one.name == next.name);
    let Some(sizes) = names.find(|sizes| sizes[0].name == name) else { return Ok(None) };
    if size == "latest" {
        return Ok(Some(Named::Any(sizes)));
    }
    match sizes.iter().find(|entry| entry.size == size) {
        Some(entry) => Ok(Some(Named::One(entry))),
        None => {
            let sizes: Vec<_> = sizes.iter().map(|entry| entry.size).collect();
            Err(format!("there is no `{text}`; sizes of {name}: {}", sizes.join(", ")))
        }
    }
}

/// Bytes that weights and requests may take, by which a short name without a size gets one: those that a process may
/// have of its GPU's memory, `gpu`, or without a GPU a part of the machine's memory. `limit` is the most that the
/// configuration allows; 0 if it sets none.
///
/// What is free now is not asked: the same name is the same model at the next start.
pub fn room(gpu: Option<u64>, limit: u64) -> u64 {
    let room = gpu.unwrap_or_else(|| part_of(machine::memory_bytes().unwrap_or(0)));
    if limit == 0 { room } else { room.min(limit) }
}

/// The part of the machine's memory that leaves room for others.
fn part_of(memory: u64) -> u64 {
    memory / 10 * MEMORY_TENTHS
}

/// Whether weights of `bytes` and requests take at most `room` bytes.
fn fits(bytes: u64, room: u64) -> bool {
    // Some of what is in a file is larger in memory.
    bytes + bytes / 8 + REQUEST_BYTES <= room
}

/// The names without sizes, each once.
pub fn names() -> Vec<&'static str> {
    let mut names: Vec<_> = CATALOGUE.iter().map(|entry| entry.name).collect();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::hub::is_repo_id;

    #[test]
    fn entries_are_distinct_and_ordered_by_size() {
        let all: BTreeSet<_> = CATALOGUE.iter().map(|entry| (entry.name, entry.size)).collect();
        assert_eq!(all.len(), CATALOGUE.len());
        let repos: BTreeSet<_> = CATALOGUE.iter().map(|entry| entry.repo).collect();
        assert_eq!(repos.len(), CATALOGUE.len());
        assert_eq!(names().len(), names().into_iter().collect::<BTreeSet<_>>().len());
        for entry in CATALOGUE {
            assert!(is_repo_id(entry.repo), "{entry}");
            // A name is found as it is printed, and is no path.
            assert!(!entry.name.contains(['/', ':', '@']), "{entry}");
            let text = format!("{}:{}", entry.name, entry.size);
            assert_eq!(find(&text), Ok(Some(Named::One(entry))));
        }
        for name in names() {
            let bytes = CATALOGUE.iter().filter(|entry| entry.name == name);
            assert!(bytes.map(|entry| entry.bytes).is_sorted(), "{name}");
        }
    }

    /// Numbers in names agree with the bytes: 4 bits with a scale and a bias of 16 bits for 64
    /// numbers take 4.5.
    #[test]
    fn bytes_are_those_of_the_parameters() {
        for entry in CATALOGUE.iter().filter(|entry| entry.quantization == "4 bits") {
            let billions: f64 = entry.size.strip_suffix('b').unwrap().parse().unwrap();
            let packed = billions * 1e9 * 4.5 / 8.0;
            let ratio = entry.bytes as f64 / packed;
            assert!((0.9..1.8).contains(&ratio), "{entry}: {ratio}");
        }
    }

    #[test]
    fn a_name_without_a_size_is_the_largest_that_fits() {
        let named = |name: &str| find(name).unwrap().unwrap();
        for (gib, expected) in [(1, "0.6b"), (8, "4b"), (16, "8b"), (32, "14b"), (64, "30b")] {
            let room = part_of(gib << 30);
            assert_eq!(named("qwen3").entry(room).size, expected, "{gib} GiB");
            assert_eq!(named("Qwen3:latest").entry(room).size, expected, "{gib} GiB");
            assert_eq!(named("qwen3:1.7b").entry(room).size, "1.7b");
        }
        let choice = named("qwen3").choice(part_of(16 << 30)).unwrap();
        for words in ["qwen3:8b is mlx-community/Qwen3-8B-4bit (4 bits, about 4.63 GB)", "14b, 30b"]
        {
            assert!(choice.contains(words), "`{words}` is not in {choice}");
        }
        assert_eq!(named("qwen3:8b").choice(0), None);
        assert_eq!(named("gpt-oss").choice(0), None);
    }

    /// The measure was the main memory: beside a GPU of 8 GB, a server with 256 GB got models that its GPU cannot hold.
    #[test]
    fn a_gpu_chooses_the_size_by_its_own_memory() {
        let size = |room| find("qwen3").unwrap().unwrap().entry(room).size;
        for (gpu, expected) in [
            // What MLX allows on NVIDIA's GPUs of 8, 24 and 141 GB, and Metal on Macs with 8, 16 and 128 GB.
            (7_600_000_000, "8b"),
            (22_800_000_000, "30b"),
            (133_900_000_000, "30b"),
            (5_726_633_984, "4b"),
            (11_453_251_584, "8b"),
            (103_079_215_104, "30b"),
        ] {
            assert_eq!(room(Some(gpu), 0), gpu);
            assert_eq!(size(room(Some(gpu), 0)), expected, "{gpu}");
        }
        // What the configuration allows is less than what there is.
        assert_eq!(size(room(Some(133_900_000_000), 6 << 30)), "4b");
        assert_eq!(room(Some(1 << 30), 6 << 30), 1 << 30);
        // Without a GPU.
        let memory = machine::memory_bytes().unwrap();
        assert_eq!(room(None, 0), memory / 10 * 6);
        assert_eq!(room(None, 1 << 20), 1 << 20);
    }

    #[test]
    fn sizes_that_do_not_exist_are_named() {
        let error = find("qwen3:7b").unwrap_err();
        assert_eq!(error, "there is no `qwen3:7b`; sizes of qwen3: 0.6b, 1.7b, 4b, 8b, 14b, 30b");
        assert_eq!(find("qwn3"), Ok(None));
    }
}
