//! What the files of a model say about it, without loading it: the keys of `config.json`, and the names,
//! types and shapes at the beginning of each safetensors or GGUF file. No weight is read.
//!
//! Bytes of memory are estimates by these shapes. The engine measures what it takes.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};
use steersman_gguf::{Model, files as gguf_files, quants};

/// Most bytes of the header of a safetensors file, as in the reference implementation.
const HEADER_BYTES: u64 = 100_000_000;

/// Most bytes of `config.json`.
pub const CONFIG_BYTES: u64 = 16 << 20;

/// Numbers that share a scale, if `config.json` does not tell.
const GROUP: u64 = 64;

/// Tokens for which the memory of the cache is given.
pub const CACHE_TOKENS: u64 = 1000;

/// A model by its files.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// `model_type` of `config.json`.
    pub family: String,
    /// Layers of the text model.
    pub layers: Option<u64>,
    /// Positions that it was trained for.
    pub context: Option<u64>,
    /// Numbers in its tensors; those of packed matrices count unpacked.
    pub parameters: u64,
    /// Type of its weights: `4 bits in groups of 64`, `BF16`.
    pub quantization: String,
    /// Files of the folder, or the parts of a GGUF file, with their bytes, by name.
    pub files: Vec<(String, u64)>,
    /// Bytes of the weights that a token reads, as they are in the files: of experts, those that are chosen.
    pub token_bytes: u64,
    tensors: Tensors,
    cache: Option<CacheShape>,
}

/// Bytes and numbers of tensors by how they are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Tensors {
    /// Numbers of 16 and 32 bits, and of 8 bits that become floats.
    floats: u64,
    /// Numbers of 16 bits in matrices that kernels of a CPU multiply with as they are stored.
    short_matrices: u64,
    /// Bytes of packed matrices and the numbers that they hold.
    packed: [u64; 2],
    /// The same of packed matrices that a CPU has no kernel for.
    packed_without_kernel: [u64; 2],
    /// Bytes of other types.
    others: u64,
}

/// Numbers in the cache of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
struct CacheShape {
    /// For each token.
    per_token: u64,
    /// At most, for windows, whatever the number of tokens.
    windows: u64,
}

/// How a process keeps weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    /// Bytes of a float.
    pub float_bytes: u64,
    /// Which packed matrices become floats.
    pub unpacked: Unpacked,
}

impl Numbers {
    /// Bytes of a float in a matrix whose floats have 16 bits in the files. Where a CPU has kernels, they stay so.
    pub fn short_float_bytes(self) -> u64 {
        if self.unpacked == Unpacked::WithoutKernel { 2 } else { self.float_bytes }
    }
}

/// Which packed matrices become floats when they are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unpacked {
    /// None.
    Nothing,
    /// Those that a CPU has no kernel for: experts, and others than 4 and 8 bits.
    WithoutKernel,
    /// All.
    All,
}

impl Facts {
    /// Reads the model in `folder`, or in a GGUF file.
    ///
    /// # Errors
    /// Names the file that is missing or not what it should be.
    pub fn read(folder: &Path) -> Result<Self> {
        let gguf = gguf_files::is_gguf(folder).then(|| Model::open(folder)).transpose();
        let reading = || format!("reading {}", folder.display());
        let gguf = gguf.with_context(reading)?;
        let config = match &gguf {
            Some(model) => match model.config().with_context(reading)? {
                Value::Object(keys) => keys,
                _ => Map::new(),
            },
            None => read_json(&folder.join("config.json"))?,
        };
        let text = config.get("text_config").and_then(Value::as_object).unwrap_or(&config);
        let of = |key: &str| text.get(key).or_else(|| config.get(key));
        let family = config.get("model_type").or_else(|| text.get("model_type"));
        let family = family.and_then(Value::as_str).unwrap_or("unknown").to_string();
        let mut facts = Self {
            family,
            layers: of("num_hidden_layers").and_then(Value::as_u64),
            context: of("max_position_embeddings").and_then(Value::as_u64),
            parameters: 0,
            quantization: String::new(),
            files: match &gguf {
                Some(model) => {
                    model.files().iter().map(|file| of_file(file)).collect::<Result<_>>()?
                }
                None => files(folder)?,
            },
            token_bytes: 0,
            tensors: Tensors::default(),
            cache: CacheShape::of(text),
        };
        let mut tensors = gguf.as_ref().map(Model::listing).unwrap_or_default();
        for (name, _) in facts.files.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
            let path = folder.join(name);
            let header = read_header(&path).with_context(|| format!("{}", path.display()))?;
            tensors.extend(header);
        }
        ensure!(!tensors.is_empty(), "{} has no safetensors weights", folder.display());
        facts.token_bytes = token_bytes(&tensors, |key| of(key).and_then(Value::as_u64));
        let packed = of("quantization").or_else(|| of("quantization_config"));
        let group =
            packed.and_then(|packed| packed["group_size"].as_u64()).filter(|size| *size > 0);
        let group = if gguf.is_some() { Some(quants::GROUP as u64) } else { group };
        let types = facts.tensors.add(&tensors, group.unwrap_or(GROUP), gguf.is_some());
        facts.parameters = types.values().sum();
        let most = types.into_iter().max_by_key(|(_, count)| *count);
        facts.quantization = match (most, group) {
            (Some((name, _)), Some(group)) if name.ends_with("bits") => {
                format!("{name} in groups of {group}")
            }
            (most, _) => most.map(|(name, _)| name).unwrap_or_default(),
        };
        Ok(facts)
    }

    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes that the loaded weights take, as an estimate.
    pub fn weight_bytes(&self, numbers: Numbers) -> u64 {
        let Tensors { floats, short_matrices, packed, packed_without_kernel, others } =
            self.tensors;
        let float = numbers.float_bytes;
        let packed = match numbers.unpacked {
            Unpacked::Nothing => packed[0] + packed_without_kernel[0],
            Unpacked::WithoutKernel => packed[0] + packed_without_kernel[1] * float,
            Unpacked::All => (packed[1] + packed_without_kernel[1]) * float,
        };
        floats * float + short_matrices * numbers.short_float_bytes() + packed + others
    }

    /// Bytes that the cache of a request takes for each [`CACHE_TOKENS`] tokens, as an estimate. `None` if
    /// `config.json` does not tell.
    pub fn cache_bytes(&self, numbers: Numbers) -> Option<u64> {
        let CacheShape { per_token, windows } = self.cache?;
        Some((per_token * CACHE_TOKENS + windows) * numbers.float_bytes)
    }
}

/// `model_type` of the `config.json` at `path`; `None` if it has none.
///
/// # Errors
/// If the file cannot be read, or is not JSON.
pub fn family(path: &Path) -> Result<Option<String>> {
    let config = read_json(path)?;
    Ok(config.get("model_type").and_then(Value::as_str).map(str::to_owned))
}

/// Checks that `family` is one of `known`, which the engine loads.
///
/// # Errors
/// If it is not, with those that are.
pub fn check_family(family: &str, known: &[&str]) -> Result<(), String> {
    match known.contains(&family) {
        true => Ok(()),
        false => {
            let known = known.join(", ");
            Err(format!("the family `{family}` is not supported; supported are: {known}"))
        }
    }
}

impl CacheShape {
    /// From the keys of the text model. Layers whose state has a constant size do not count.
    fn of(text: &Map<String, Value>) -> Option<Self> {
        let number = |key: &str| text.get(key).and_then(Value::as_u64);
        let layers = number("num_hidden_layers")?;
        let row = if let Some(latent) = number("kv_lora_rank") {
            // Keys and values are made from one latent and the rotated part of the keys.
            2 * (latent + number("qk_rope_head_dim")?)
        } else {
            let heads = number("num_attention_heads")?;
            let key_heads = number("num_key_value_heads").unwrap_or(heads);
            let size = number("head_dim").or_else(|| number("hidden_size")?.checked_div(heads))?;
            2 * key_heads * size
        };
        let kinds = text.get("layer_types").or_else(|| text.get("layers_block_type"));
        let [full, sliding] = match kinds.and_then(Value::as_array) {
            Some(kinds) => {
                let count = |names: &[&str]| {
                    let is =
                        |kind: &&Value| kind.as_str().is_some_and(|kind| names.contains(&kind));
                    kinds.iter().filter(is).count() as u64
                };
                [count(&["full_attention", "attention"]), count(&["sliding_attention"])]
            }
            None => {
                match (text.get("hybrid_override_pattern"), number("full_attention_interval")) {
                    (Some(pattern), _) => [pattern.as_str()?.matches('*').count() as u64, 0],
                    (None, Some(every)) => [layers.checked_div(every)?, 0],
                    (None, None) => [layers, 0],
                }
            }
        };
        let window = number("sliding_window").unwrap_or(0);
        Some(Self { per_token: full * row, windows: sliding * row * window })
    }
}

impl Tensors {
    /// Adds tensors; returns the numbers that they hold by type. Packed matrices have scales for groups of
    /// `group` numbers. A CPU keeps those with 5 bits of a GGUF file in 8.
    fn add(
        &mut self,
        tensors: &Map<String, Value>,
        group: u64,
        gguf: bool,
    ) -> BTreeMap<String, u64> {
        let mut types = BTreeMap::new();
        let mut count = |name: &str, numbers: u64| {
            *types.entry(name.to_string()).or_default() += numbers;
        };
        let of_layer = |name: &str, part: &str| tensors.get(&format!("{name}.{part}"));
        for (name, tensor) in tensors.iter().filter(|(name, _)| *name != "__metadata__") {
            let dtype = tensor["dtype"].as_str().unwrap_or_default();
            let numbers = elements(tensor);
            // The parts for images and sounds are not loaded.
            let is_loaded = !["visual", "vision_", "audio_"].iter().any(|part| name.contains(part));
            let (layer, part) = name.rsplit_once('.').unwrap_or(("", name));
            let scales = of_layer(layer, "scales").filter(|_| part == "weight" && dtype == "U32");
            if let Some(scales) = scales {
                // 32 numbers take as many columns as each has bits.
                let bits = columns(tensor) * 32 / (columns(scales) * group).max(1);
                let held = numbers * 32 / bits.max(1);
                count(&format!("{bits} bits"), held);
                // Experts are stacked: one more dimension.
                let is_widened = gguf && bits == 5;
                let has_kernel =
                    ([4, 8].contains(&bits) || is_widened) && shape(tensor).count() == 2;
                let kept =
                    if has_kernel { &mut self.packed } else { &mut self.packed_without_kernel };
                if is_loaded {
                    kept[0] += if is_widened { held } else { 4 * numbers };
                    kept[1] += held;
                }
                continue;
            }
            let of_packed =
                ["scales", "biases"].contains(&part) && of_layer(layer, "weight").is_some();
            if !of_packed {
                count(dtype, numbers);
            }
            match dtype {
                _ if !is_loaded => {}
                "F16" | "BF16" if has_kernel(tensor, part) => self.short_matrices += numbers,
                "F32" | "F16" | "BF16" | "F8_E4M3" | "F8_E5M2" => self.floats += numbers,
                "F64" | "I64" | "U64" => self.others += 8 * numbers,
                "I32" | "U32" => self.others += 4 * numbers,
                "I16" | "U16" => self.others += 2 * numbers,
                _ => self.others += numbers,
            }
        }
        types
    }
}

/// Bytes of the weights that a token reads. `number` reads a key of the configuration.
fn token_bytes(tensors: &Map<String, Value>, number: impl Fn(&str) -> Option<u64>) -> u64 {
    let experts =
        ["num_experts", "n_routed_experts", "num_local_experts"].into_iter().find_map(&number);
    let chosen = number("num_experts_per_tok");
    // Of an embedding that is not the head, too, a token reads a row.
    let has_head = tensors.keys().any(|name| name.contains("lm_head") || name == "output.weight");
    let is_read = |name: &str| {
        !["visual", "vision_", "audio_", "mtp.", "__metadata__"]
            .iter()
            .any(|part| name.contains(part))
            && !(has_head && (name.contains("embed_tokens") || name.starts_with("token_embd")))
    };
    let read = tensors.iter().filter(|(name, _)| is_read(name));
    read.map(|(name, tensor)| {
        let size = match tensor["dtype"].as_str().unwrap_or_default() {
            "F64" | "I64" | "U64" => 8,
            "F32" | "I32" | "U32" => 4,
            "F16" | "BF16" | "I16" | "U16" => 2,
            _ => 1,
        };
        let bytes = size * elements(tensor);
        match (experts, chosen) {
            (Some(experts), Some(chosen))
                if name.contains(".experts.") || name.contains("switch_mlp") =>
            {
                bytes * chosen / experts.max(1)
            }
            _ => bytes,
        }
    })
    .sum()
}

/// Whether a CPU's kernels read a tensor of floats as it is stored: a matrix, or scales of a packed one.
fn has_kernel(tensor: &Value, part: &str) -> bool {
    let is_read = match part {
        "weight" => columns(tensor).is_multiple_of(32),
        "scales" | "biases" => true,
        _ => false,
    };
    is_read && shape(tensor).count() == 2
}

/// The sizes of a tensor's dimensions.
fn shape(tensor: &Value) -> impl Iterator<Item = u64> {
    tensor["shape"].as_array().into_iter().flatten().filter_map(Value::as_u64)
}

fn elements(tensor: &Value) -> u64 {
    shape(tensor).fold(1, u64::saturating_mul)
}

fn columns(tensor: &Value) -> u64 {
    shape(tensor).last().unwrap_or(1)
}

/// A file by name.
fn of_file(path: &Path) -> Result<(String, u64)> {
    let file = fs::metadata(path).with_context(|| format!("reading {}", path.display()))?;
    Ok((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), file.len()))
}

/// The files in `folder`, by name. Links count as what they point to.
fn files(folder: &Path) -> Result<Vec<(String, u64)>> {
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries.flatten() {
        // A link to a file that is gone is none.
        if let Ok(file) = fs::metadata(entry.path())
            && file.is_file()
        {
            files.push((entry.file_name().to_string_lossy().into_owned(), file.len()));
        }
    }
    files.sort();
    Ok(files)
}

fn read_json(path: &Path) -> Result<Map<String, Value>> {
    let context = || format!("reading {}", path.display());
    let text = steersman_files::read(path, CONFIG_BYTES).with_context(context)?;
    let value = steersman_files::json(&text).with_context(context)?;
    serde_json::from_value(value).with_context(context)
}

/// The header of a safetensors file: tensors by name.
fn read_header(path: &Path) -> Result<Map<String, Value>> {
    let mut file = steersman_files::open(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length).context("the file ends before its header")?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES {
        bail!("is not a safetensors file: its header would have {length} bytes");
    }
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header)?;
    ensure!(header.len() as u64 == length, "the file ends within its header");
    serde_json::from_slice(&header).context("its header is not JSON")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Writes a model with these tensors, without their data.
    fn model(folder: &Path, config: &Value, tensors: &Value) {
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let header = tensors.to_string().into_bytes();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header);
        fs::write(folder.join("model.safetensors"), file).unwrap();
    }

    /// Fault F29: `serve --model` took a Mamba hybrid whose `time_step_limit` ends with `Infinity`, `show` and a model on
    /// demand refused it.
    #[test]
    fn a_configuration_as_python_writes_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        model(folder.path(), &json!({}), &json!({"a": {"dtype": "F32", "shape": [1]}}));
        let text = r#"{"model_type": "nemotron_h", "time_step_limit": [0.0, Infinity], "x": NaN}"#;
        fs::write(folder.path().join("config.json"), text).unwrap();
        assert_eq!(Facts::read(folder.path()).unwrap().family, "nemotron_h");
    }

    #[test]
    fn packed_matrices_count_as_the_numbers_that_they_hold() {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({
            "model_type": "x", "num_hidden_layers": 4, "num_attention_heads": 8,
            "num_key_value_heads": 2, "hidden_size": 512, "max_position_embeddings": 4096,
            "layer_types": ["linear_attention", "full_attention", "sliding_attention", "mamba"],
            "sliding_window": 128,
            "quantization": {"bits": 4, "group_size": 64}
        });
        let tensors = json!({
            "__metadata__": {"format": "mlx"},
            "a.weight": {"dtype": "U32", "shape": [512, 64]},
            "a.scales": {"dtype": "BF16", "shape": [512, 8]},
            "a.biases": {"dtype": "BF16", "shape": [512, 8]},
            "experts.weight": {"dtype": "U32", "shape": [2, 16, 128]},
            "experts.scales": {"dtype": "BF16", "shape": [2, 16, 8]},
            "norm.weight": {"dtype": "BF16", "shape": [512]},
            "odd.weight": {"dtype": "BF16", "shape": [512, 100]},
            "dense.weight": {"dtype": "BF16", "shape": [512, 64]},
            "visual.x": {"dtype": "BF16", "shape": [100]}
        });
        model(folder.path(), &config, &tensors);
        let facts = Facts::read(folder.path()).unwrap();
        // Experts of 8 bits: 128 columns for 8 groups of 64 numbers.
        let (packed, experts, floats) = (512 * 512, 2 * 16 * 512, 512 + 100 + 512 * (100 + 64));
        assert_eq!(facts.parameters, packed + experts + floats);
        assert_eq!(facts.quantization, "4 bits in groups of 64");
        assert_eq!((facts.layers, facts.context), (Some(4), Some(4096)));
        let numbers = |float_bytes, unpacked| Numbers { float_bytes, unpacked };
        let [gpu, cpu, unpacked] = [
            numbers(2, Unpacked::Nothing),
            numbers(4, Unpacked::WithoutKernel),
            numbers(4, Unpacked::All),
        ];
        // Matrices of 16 bits stay so on a CPU: one, and two of scales.
        let (short, floats) = (512 * 64 + 2 * 512 * 8, 512 + 512 * 100 + 2 * 16 * 8);
        let kept = |packed_bytes: u64, [short_bytes, float_bytes]: [u64; 2]| {
            packed_bytes + short * short_bytes + floats * float_bytes
        };
        assert_eq!(facts.weight_bytes(gpu), kept(packed / 2 + experts, [2, 2]));
        assert_eq!(facts.weight_bytes(cpu), kept(packed / 2 + 4 * experts, [2, 4]));
        assert_eq!(facts.weight_bytes(unpacked), kept(4 * (packed + experts), [4, 4]));
        // One layer keeps everything, one the last 128 tokens; heads have 64 numbers.
        let row = 2 * 2 * 64;
        assert_eq!(facts.cache_bytes(gpu), Some(2 * row * (1000 + 128)));
    }

    #[test]
    fn files_that_are_no_weights_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = |folder: &Path| format!("{:#}", Facts::read(folder).unwrap_err());
        assert!(error(folder.path()).contains("config.json"));
        fs::write(folder.path().join("config.json"), "{}").unwrap();
        assert!(error(folder.path()).contains("no safetensors"));
        let weights = folder.path().join("model.safetensors");
        for (bytes, words) in [
            (&b"x"[..], "ends before its header"),
            (&[255; 16][..], "is not a safetensors file"),
            (&[9, 0, 0, 0, 0, 0, 0, 0, b'{'][..], "ends within its header"),
            (&[1, 0, 0, 0, 0, 0, 0, 0, b'x'][..], "not JSON"),
        ] {
            fs::write(&weights, bytes).unwrap();
            let error = error(folder.path());
            assert!(error.contains(words) && error.contains("model.safetensors"), "{error}");
        }
    }
}
