//! The tensors of a checkpoint while a model is loaded.
//!
//! Reads sharded safetensors or GGUF, casts, dequantizes if configured, and returns tensors by name.
//! Families name what they need; only this file and `nn::Linear` know how it is stored.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use mlx_rs::error::IoError;
use mlx_rs::ops::stack;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use steersman_files::{FilePath, NameError};
use steersman_gguf::files;

use self::read::Place;
use super::storage::Storage;
use super::{check, fp8, gguf};
use crate::error::{ConfigError, Error, Result};
use crate::kernels::cpu;
use crate::loading;
use crate::nn::{Mode, Quantization, scaled};
use crate::ranks::Ranks;
use crate::request::mlx;

mod cut;
mod layers;
mod linear;
mod read;

pub use cut::Cut;

/// Tensors by name, and how to turn them into layers.
pub struct Weights {
    folder: PathBuf,
    arrays: HashMap<String, Array>,
    /// Where the elements of those are that nothing has changed.
    places: HashMap<String, Place>,
    /// Number of tensors in the files.
    tensors: usize,
    dtype: Dtype,
    storage: Storage,
    /// Matrices that kernels of our own multiply with.
    own_kernels: usize,
    /// Packed matrices among [`Self::own_kernels`].
    own_packed: usize,
    /// Addresses of the matrices that [`Self::own_kernels`] counts.
    own_memory: Vec<Range<usize>>,
    quantization: Option<Quantization>,
    /// Layers with another quantization than the rest, by name without `.weight`.
    mixed: HashMap<String, Quantization>,
    /// `hidden_size` and `vocab_size` of the language model, and the length of its convolutions.
    hidden: Option<i32>,
    vocabulary: Option<i32>,
    taps: Option<i32>,
    /// Rows of the smallest embedding taken.
    embeddings: usize,
    /// The ranks that have parts of the model.
    ranks: Ranks,
    /// How layers and vectors are cut among them, by name without `.weight`.
    cuts: HashMap<String, Cut>,
    /// All tensors taken, as the family named and changed them.
    #[cfg(test)]
    taken: HashMap<String, Array>,
}

/// Keys of `config.json` with two names, both of which may be there: the other one, and ours.
const OTHER_NAMES: [(&str, &str); 6] = [
    ("_sliding_window_pattern", "sliding_window_pattern"),
    ("moe_renormalize", "norm_topk_prob"),
    ("n_routed_experts", "num_experts"),
    ("num_expert_group", "n_group"),
    ("num_experts_per_token", "num_experts_per_tok"),
    ("num_local_experts", "num_experts"),
];

/// Keys of the length of convolutions, one in each family that has them.
const TAPS: [&str; 4] = ["conv_L_cache", "conv_kernel", "linear_conv_kernel_dim", "mamba_d_conv"];

/// Keys whose `null` means that there is none, where a missing key means a default.
const NONE_IF_NULL: [&str; 3] =
    ["attn_logit_softcapping", "final_logit_softcapping", "global_head_dim"];

/// `quantization` of `config.json`, or its entry for one layer.
#[derive(Debug, Clone, Deserialize)]
struct QuantizationKeys {
    group_size: Option<i32>,
    bits: Option<i32>,
    #[serde(default)]
    mode: Mode,
}

/// Rows and columns that share a factor if an fp8 checkpoint does not state it.
const FP8_BLOCK: [i32; 2] = [128, 128];

impl From<QuantizationKeys> for Quantization {
    fn from(QuantizationKeys { group_size, bits, mode }: QuantizationKeys) -> Self {
        let (default_size, default_bits) = mode.defaults();
        let group_size = group_size.unwrap_or(default_size);
        Self { group_size, bits: bits.unwrap_or(default_bits), mode }
    }
}

impl Weights {
    /// Opens every `*.safetensors` of `folder` that its index names (all, if there is no index), and
    /// `mtp*.safetensors`, which converters add without listing them. A GGUF file is read whole, with its parts.
    ///
    /// Tensors are cast to `dtype` when they are taken.
    ///
    /// # Errors
    /// [`Error::Model`] names the file that is missing or unreadable, or the wrong key of
    /// `config.json`.
    pub fn open(folder: &Path, config: &Value, dtype: Dtype, storage: Storage) -> Result<Self> {
        let (mut arrays, mut places, mut mixed) = (HashMap::new(), HashMap::new(), HashMap::new());
        let paths = match files::is_gguf(folder) {
            true => {
                (arrays, mixed) = gguf::arrays(folder, storage)?;
                Vec::new()
            }
            false => shards(folder)?,
        };
        for path in paths {
            let problem =
                |problem| Error::Config(ConfigError::Model { path: path.clone(), problem });
            let file = Rc::new(path.clone());
            for (name, dtype, start) in check::layout(&path).map_err(problem)? {
                places.extend(Place::new(file.clone(), start, &dtype).map(|place| (name, place)));
            }
            let shard = Array::load_safetensors(&path).map_err(|error| match error {
                IoError::Exception(exception) => problem(mlx::message(&exception)),
                other => problem(other.to_string()),
            })?;
            arrays.extend(shard);
        }
        let text = config.get("text_config").unwrap_or(config);
        let number = |value: &Value| i32::try_from(value.as_i64()?).ok();
        let size = |key: &str| number(text.get(key)?);
        // Kimi Linear's.
        let nested = text.pointer("/linear_attn_config/short_conv_kernel_size").and_then(number);
        let tensors = arrays.len();
        let mut weights = Self {
            folder: folder.to_path_buf(),
            arrays,
            places,
            dtype,
            storage,
            own_kernels: 0,
            own_packed: 0,
            own_memory: Vec::new(),
            quantization: None,
            mixed,
            tensors,
            hidden: size("hidden_size"),
            vocabulary: size("vocab_size"),
            taps: TAPS.iter().find_map(|key| size(key)).or(nested),
            embeddings: usize::MAX,
            ranks: Ranks::alone(),
            cuts: HashMap::new(),
            #[cfg(test)]
            taken: HashMap::new(),
        };
        let places = [(config, "quantization"), (config, "quantization_config")];
        let keys = places.into_iter().chain([(text, "quantization_config")]);
        let keys = keys.filter_map(|(place, key)| place.get(key)).find(|keys| keys.is_object());
        if let Some(Value::Object(keys)) = keys {
            weights.read_quantization(keys)?;
        }
        Ok(weights)
    }

    /// Takes what one of `ranks` has of each layer from now on.
    pub fn for_ranks(self, ranks: &Ranks) -> Self {
        Self { ranks: ranks.clone(), ..self }
    }

    /// The ranks that have parts of the model.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Says how layers and vectors at `at` are cut among ranks when they are taken.
    pub fn cut(&mut self, at: &str, cuts: impl IntoIterator<Item = (&'static str, Cut)>) {
        let named = cuts.into_iter().map(|(name, cut)| (format!("{at}.{name}"), cut));
        self.cuts.extend(named);
    }

    /// `quantization` of `config.json`: the rule for all layers, then exceptions by layer name.
    /// `false` marks dense layers; their lack of scales shows that as well.
    fn read_quantization(&mut self, keys: &Map<String, Value>) -> Result<()> {
        let read = |name: &str, value: &Value| -> Result<Quantization> {
            QuantizationKeys::deserialize(value)
                .map(Quantization::from)
                .map_err(|e| self.problem("config.json", format!("quantization{name}: {e}")))
        };
        let all = match keys.get("quant_method").and_then(Value::as_str) {
            // Unpacked here, so `linear` finds no scales.
            Some("fp8") => {
                let block: Option<[i32; 2]> =
                    keys.get("weight_block_size").and_then(|b| Deserialize::deserialize(b).ok());
                self.places.clear();
                return fp8::unpack(&mut self.arrays, block.unwrap_or(FP8_BLOCK));
            }
            // Written by MLX's converter.
            None => read("", &Value::Object(keys.clone()))?,
            Some(mode @ ("mxfp4" | "mxfp8")) => read("", &json!({"mode": mode}))?,
            Some(other) => {
                let problem = format!(
                    "quantization_config: quant_method `{other}` is not supported; use a \
                     checkpoint that is not quantized, or convert it with `mlx_lm.convert`"
                );
                return Err(self.problem("config.json", problem));
            }
        };
        let mut mixed = HashMap::new();
        for (layer, value) in keys {
            if value.is_object() {
                mixed.insert(layer.clone(), read(&format!(".{layer}"), value)?);
            }
        }
        (self.quantization, self.mixed) = (Some(all), mixed);
        Ok(())
    }

    /// Reads a family's config; a key that is `null` is missing. The error names the key that is
    /// missing or wrong.
    pub fn config<T: DeserializeOwned>(&self, config: &Value) -> Result<T> {
        let mut config = config.clone();
        if let Some(keys) = config.as_object_mut() {
            for (other, name) in OTHER_NAMES {
                if let Some(value) = keys.remove(other)
                    && keys.get(name).is_none_or(Value::is_null)
                {
                    keys.insert(name.into(), value);
                }
            }
            keys.retain(|name, value| !value.is_null() || NONE_IF_NULL.contains(&name.as_str()));
        }
        serde_path_to_error::deserialize(config)
            .map_err(|e| self.problem("config.json", e.to_string()))
    }

    /// Type of the activations and of every tensor taken.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Whether there is a tensor `name`.
    pub fn has(&self, name: &str) -> bool {
        self.arrays.contains_key(name)
    }

    /// The tensor `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<&Array> {
        self.arrays.get(name)
    }

    /// All tensors that are not taken yet.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Array)> {
        self.arrays.iter().map(|(name, array)| (name.as_str(), array))
    }

    /// Drops vision and audio, and renames the language model of multimodal checkpoints to `model.*`
    /// and `lm_head.*`, whichever way it is published or converted.
    pub fn keep_language_model(&mut self) {
        const OTHER_MODALITIES: [&str; 7] = [
            "audio_tower",
            "embed_audio",
            "embed_vision",
            "multi_modal_projector",
            "vision_embedder",
            "vision_tower",
            "visual",
        ];
        self.rename(|name| {
            let inner = name.strip_prefix("model.").unwrap_or(name);
            if OTHER_MODALITIES.iter().any(|part| inner.starts_with(part)) {
                return None;
            }
            if let Some(published) = name.strip_prefix("model.language_model.") {
                return Some(format!("model.{published}"));
            }
            Some(name.strip_prefix("language_model.").unwrap_or(name).to_string())
        });
    }

    /// Renames every tensor, and the layers whose quantization is named, as their weights; `None` drops it.
    pub fn rename(&mut self, new: impl Fn(&str) -> Option<String>) {
        self.arrays = std::mem::take(&mut self.arrays)
            .into_iter()
            .filter_map(|(name, array)| Some((new(&name)?, array)))
            .collect();
        self.places = std::mem::take(&mut self.places)
            .into_iter()
            .filter_map(|(name, place)| Some((new(&name)?, place)))
            .collect();
        self.mixed = std::mem::take(&mut self.mixed)
            .into_iter()
            .filter_map(|(layer, quantization)| {
                let name = new(&format!("{layer}.weight"))?;
                Some((name.strip_suffix(".weight").unwrap_or(&name).to_string(), quantization))
            })
            .collect();
    }

    /// Replaces the tensors for which `change` returns others.
    pub fn map(&mut self, change: impl Fn(&str, &Array) -> Result<Option<Array>>) -> Result<()> {
        for (name, array) in &mut self.arrays {
            if let Some(changed) = change(name, array)? {
                *array = changed;
                self.places.remove(name);
            }
        }
        Ok(())
    }

    /// Takes a tensor, cast to the model's dtype.
    pub fn take(&mut self, name: &str) -> Result<Array> {
        let dtype = self.dtype;
        self.take_as(name, dtype)
    }

    /// Takes a tensor as f32, whatever the model's dtype is.
    pub fn take_f32(&mut self, name: &str) -> Result<Array> {
        self.take_as(name, Dtype::Float32)
    }

    fn take_as(&mut self, name: &str, dtype: Dtype) -> Result<Array> {
        let array = self.remove_part(name, None)?;
        let array = self.cast(name, array, dtype)?;
        eval([&array])?;
        Ok(array)
    }

    /// The `array` of the tensor `name` in another type.
    fn cast(&self, name: &str, array: Array, dtype: Dtype) -> Result<Array> {
        if !array.dtype().is_float() {
            let problem = format!(
                "`{name}` holds {:?}, not floats; if it is quantized, config.json must say how",
                array.dtype()
            );
            return Err(self.problem("", problem));
        }
        Ok(array.as_dtype(dtype)?)
    }

    /// Multiplies a layer without biases, dense or packed, with `factor`, in the type it is stored in. Does
    /// nothing if the checkpoint has no such layer.
    ///
    /// # Errors
    /// [`Error::Model`] if its scales are no floats.
    pub fn multiply(&mut self, layer: &str, factor: f32) -> Result<()> {
        let is_packed = self.has(&format!("{layer}.scales"));
        for part in if is_packed { &["scales", "biases"][..] } else { &["weight"] } {
            let name = format!("{layer}.{part}");
            let Some(array) = self.arrays.get_mut(&name) else { continue };
            if !array.dtype().is_float() {
                let problem =
                    format!("`{name}` holds {:?}, which cannot be multiplied", array.dtype());
                return Err(self.problem("", problem));
            }
            *array = scaled(array, factor)?;
            self.places.remove(&name);
        }
        Ok(())
    }

    /// Tokens that the embeddings taken have rows of.
    pub fn embeddings(&self) -> usize {
        self.embeddings
    }

    /// Backs the matrices taken that kernels of our own use with huge pages. Returns the bytes of the pages.
    pub fn use_huge_pages(&mut self) -> usize {
        cpu::use_huge_pages(std::mem::take(&mut self.own_memory))
    }

    /// Number of matrices taken that kernels of our own multiply with, and how many of them are packed.
    pub fn own_kernels(&self) -> (usize, usize) {
        (self.own_kernels, self.own_packed)
    }

    /// Stacks linear layers of one shape.
    ///
    /// # Errors
    /// [`Error::Model`] if one of them lacks a tensor that the first one has.
    pub fn stack(&mut self, layers: &[String], name: &str) -> Result<()> {
        for part in ["weight", "scales", "biases", "bias"] {
            if self.has(&format!("{}.{part}", layers[0])) {
                let parts: Vec<Array> = layers
                    .iter()
                    .map(|layer| self.remove(&format!("{layer}.{part}")))
                    .collect::<Result<_>>()?;
                self.insert(format!("{name}.{part}"), stack(&parts, 0)?);
            }
        }
        // Layers of different quantization could not be stacked: their shapes differ.
        if let Some(quantization) = self.mixed.get(&layers[0]).copied() {
            self.mixed.insert(name.to_string(), quantization);
        }
        Ok(())
    }

    /// Replaces a linear layer by N others; `rows` splits its matrix, or each of its packed arrays.
    pub fn divide<const N: usize>(
        &mut self,
        layer: &str,
        names: &[String; N],
        rows: impl Fn(&Array) -> Result<[Array; N]>,
    ) -> Result<()> {
        for part in ["weight", "scales", "biases"] {
            if let Some(whole) = self.arrays.remove(&format!("{layer}.{part}")) {
                for (name, array) in names.iter().zip(rows(&whole)?) {
                    self.insert(format!("{name}.{part}"), array);
                }
            }
        }
        if let Some(quantization) = self.mixed.get(layer).copied() {
            self.mixed.extend(names.iter().map(|name| (name.clone(), quantization)));
        }
        Ok(())
    }

    /// Adds a tensor.
    pub fn insert(&mut self, name: String, array: Array) {
        self.places.remove(&name);
        self.arrays.insert(name, array);
    }

    /// Takes a tensor as it is stored.
    pub fn remove(&mut self, name: &str) -> Result<Array> {
        loading::advance(self.tensors.saturating_sub(self.arrays.len()), self.tensors);
        let Some(array) = self.arrays.remove(name) else { return Err(self.missing(name)) };
        Ok(array)
    }

    fn missing(&self, name: &str) -> Error {
        self.problem("", format!("the weights have no tensor `{name}`"))
    }

    /// A scale whose matrix was taken without it, or that has none.
    ///
    /// # Errors
    /// [`Error::Model`] names it. Scales of parts that are not loaded have their matrices beside them.
    pub fn expect_no_scales(&self) -> Result<()> {
        let left = |(name, _): (&str, &Array)| {
            let matrix = match name.strip_suffix(".scales") {
                Some(layer) => format!("{layer}.weight"),
                None => ["_scale_inv", "_scale"]
                    .iter()
                    .find_map(|end| name.strip_suffix(end))
                    .filter(|matrix| matrix.ends_with("weight") || name.ends_with("_inv"))?
                    .to_string(),
            };
            (!self.has(&matrix)).then(|| name.to_string())
        };
        let Some(name) = self.iter().filter_map(left).min() else { return Ok(()) };
        let problem = format!(
            "`{name}` is a scale that nothing used: its matrix would be wrong without it; config.json must say \
             how the weights are quantized, in a way that is supported"
        );
        Err(self.problem("", problem))
    }

    /// All tensors taken, as the family named and changed them, and how each is cut among ranks.
    #[cfg(test)]
    pub fn taken(&self) -> impl Iterator<Item = (&str, &Array, Option<&Cut>)> {
        self.taken.iter().map(|(name, array)| {
            let layer = name.rsplit_once('.').map_or("", |(layer, _)| layer);
            (name.as_str(), array, self.cuts.get(name).or(self.cuts.get(layer)))
        })
    }

    /// An error about `file` of the model's folder.
    pub fn problem(&self, file: &str, problem: String) -> Error {
        Error::Config(ConfigError::Model { path: self.folder.join(file), problem })
    }
}

/// The weight files of a folder, sorted; a GGUF file is its own, or one of several. Fails if there are none or one of the index is missing.
pub(super) fn shards(folder: &Path) -> Result<Vec<PathBuf>> {
    if files::is_gguf(folder) {
        return gguf::files(folder);
    }
    #[derive(Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let problem =
        |path: PathBuf, problem: String| Error::Config(ConfigError::Model { path, problem });
    let index = folder.join("model.safetensors.index.json");
    let entries = folder.read_dir().map_err(|e| problem(folder.to_path_buf(), e.to_string()))?;
    let present = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
    let names: BTreeSet<PathBuf> = if index.is_file() {
        let text = steersman_gguf::files::read_at(&index)
            .map_err(|e| problem(index.clone(), e.to_string()))?;
        let parsed: Index =
            serde_json::from_slice(&text).map_err(|e| problem(index.clone(), e.to_string()))?;
        let beside = present.filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("mtp"))
        });
        let names = parsed.weight_map.values().map(|name| Ok(FilePath::new(name)?.within(folder)));
        let names: Result<BTreeSet<_>, NameError> = names.collect();
        names
            .map_err(|e| problem(index.clone(), e.to_string()))?
            .into_iter()
            .chain(beside)
            .collect()
    } else {
        present.collect()
    };
    if names.is_empty() {
        let text = "has no *.safetensors; a model folder holds config.json, tokenizer.json and \
                    *.safetensors";
        return Err(problem(folder.to_path_buf(), text.into()));
    }
    if let Some(missing) = names.iter().find(|path| !path.is_file()) {
        let text = "is missing or not a regular file; download the model again";
        return Err(problem(missing.clone(), text.into()));
    }
    Ok(names.into_iter().collect())
}

#[cfg(test)]
mod tests;
