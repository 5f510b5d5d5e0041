//! The tensors of a checkpoint, on their way into a model.
//!
//! Reads sharded safetensors, casts, dequantizes where that is asked for, and hands tensors out
//! by name. Families say what they need; how it is stored is known here and in `nn::Linear` alone.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use mlx_rs::ops::stack;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::fp8;
use crate::error::{Error, Result};
use crate::nn::{Linear, Mode, Packed, Quantization, RmsNorm};

/// Tensors by name, with what is needed to turn them into layers.
pub struct Weights {
    folder: PathBuf,
    arrays: HashMap<String, Array>,
    dtype: Dtype,
    dequantize: bool,
    quantization: Option<Quantization>,
    /// Layers that are quantized otherwise than the rest, by name without `.weight`.
    mixed: HashMap<String, Quantization>,
}

/// `quantization` of `config.json`, or an entry of it for one layer.
#[derive(Debug, Clone, Deserialize)]
struct Stated {
    group_size: Option<i32>,
    bits: Option<i32>,
    #[serde(default)]
    mode: Mode,
}

/// Rows and columns that share a factor, where an fp8 checkpoint does not say.
const FP8_BLOCK: [i32; 2] = [128, 128];

impl From<Stated> for Quantization {
    fn from(Stated { group_size, bits, mode }: Stated) -> Self {
        let (default_size, default_bits) = mode.defaults();
        let group_size = group_size.unwrap_or(default_size);
        Self { group_size, bits: bits.unwrap_or(default_bits), mode }
    }
}

impl Weights {
    /// Opens every `*.safetensors` of `folder` that its index names (all, where there is none), and
    /// `mtp*.safetensors`, which converters put beside it.
    ///
    /// Floating-point tensors are cast to `dtype` as they are taken; `dequantize` makes dense
    /// layers of quantized ones.
    ///
    /// # Errors
    /// [`Error::Model`] names the file that is missing or unreadable, or the key of `config.json`
    /// that is off.
    pub fn open(folder: &Path, config: &Value, dtype: Dtype, dequantize: bool) -> Result<Self> {
        let mut arrays = HashMap::new();
        for path in shards(folder)? {
            let shard = Array::load_safetensors(&path)
                .map_err(|e| Error::Model { path: path.clone(), problem: e.to_string() })?;
            arrays.extend(shard);
        }
        let mut weights = Self {
            folder: folder.to_path_buf(),
            arrays,
            dtype,
            dequantize,
            quantization: None,
            mixed: HashMap::new(),
        };
        let stated = config.get("quantization").or_else(|| config.get("quantization_config"));
        if let Some(Value::Object(stated)) = stated {
            weights.read_quantization(stated)?;
        }
        Ok(weights)
    }

    /// `quantization` of `config.json`: the rule for all layers, then exceptions by layer name
    /// (`false` for layers that are not quantized, which their lack of scales says as well).
    fn read_quantization(&mut self, stated: &Map<String, Value>) -> Result<()> {
        let read = |name: &str, value: &Value| -> Result<Quantization> {
            Stated::deserialize(value)
                .map(Quantization::from)
                .map_err(|e| self.problem("config.json", format!("quantization{name}: {e}")))
        };
        let all = match stated.get("quant_method").and_then(Value::as_str) {
            // Has no scales that `linear` would ask about.
            Some("fp8") => {
                let block: Option<[i32; 2]> =
                    stated.get("weight_block_size").and_then(|b| Deserialize::deserialize(b).ok());
                return fp8::unpack(&mut self.arrays, block.unwrap_or(FP8_BLOCK));
            }
            // As MLX's converter writes it.
            None => read("", &Value::Object(stated.clone()))?,
            Some(mode @ ("mxfp4" | "mxfp8")) => read("", &json!({"mode": mode}))?,
            Some(other) => {
                let problem = format!(
                    "quantization_config: quant_method `{other}` cannot be loaded; take a \
                     checkpoint that is not quantized, or one that `mlx_lm.convert` made"
                );
                return Err(self.problem("config.json", problem));
            }
        };
        let mut mixed = HashMap::new();
        for (layer, value) in stated {
            if value.is_object() {
                mixed.insert(layer.clone(), read(&format!(".{layer}"), value)?);
            }
        }
        (self.quantization, self.mixed) = (Some(all), mixed);
        Ok(())
    }

    /// Reads a family's config, naming the key that is missing or off.
    ///
    /// # Errors
    /// [`Error::Model`] for `config.json`.
    pub fn config<T: DeserializeOwned>(&self, config: &Value) -> Result<T> {
        T::deserialize(config).map_err(|e| self.problem("config.json", e.to_string()))
    }

    /// Type of activations, and of every tensor taken.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Whether a tensor of this name is there.
    pub fn has(&self, name: &str) -> bool {
        self.arrays.contains_key(name)
    }

    /// All tensors that were not taken yet.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Array)> {
        self.arrays.iter().map(|(name, array)| (name.as_str(), array))
    }

    /// Renames every tensor; `None` drops it.
    pub fn rename(&mut self, new: impl Fn(&str) -> Option<String>) {
        self.arrays = std::mem::take(&mut self.arrays)
            .into_iter()
            .filter_map(|(name, array)| Some((new(&name)?, array)))
            .collect();
        self.mixed = std::mem::take(&mut self.mixed)
            .into_iter()
            .filter_map(|(name, q)| Some((new(&name)?, q)))
            .collect();
    }

    /// Changes every tensor.
    ///
    /// # Errors
    /// The first error of `change`.
    pub fn map(&mut self, change: impl Fn(&str, Array) -> Result<Array>) -> Result<()> {
        for (name, array) in &mut self.arrays {
            *array = change(name, array.clone())?;
        }
        Ok(())
    }

    /// Takes a tensor, cast to the model's dtype.
    ///
    /// # Errors
    /// [`Error::Model`] when there is none of this name.
    pub fn take(&mut self, name: &str) -> Result<Array> {
        let dtype = self.dtype;
        self.take_as(name, dtype)
    }

    /// Takes a tensor that stays f32 whatever the model's dtype is.
    ///
    /// # Errors
    /// As [`Weights::take`].
    pub fn take_f32(&mut self, name: &str) -> Result<Array> {
        self.take_as(name, Dtype::Float32)
    }

    fn take_as(&mut self, name: &str, dtype: Dtype) -> Result<Array> {
        let array = self.remove(name)?.as_dtype(dtype)?;
        eval([&array])?;
        Ok(array)
    }

    /// Takes the norm `NAME.weight`.
    ///
    /// # Errors
    /// As [`Weights::take`].
    pub fn norm(&mut self, name: &str, eps: f32) -> Result<RmsNorm> {
        Ok(RmsNorm { weight: self.take(&format!("{name}.weight"))?, eps })
    }

    /// Takes a linear layer: `NAME.weight`, with `.scales` and `.biases` where it is quantized
    /// and `.bias` where it has one.
    ///
    /// # Errors
    /// As [`Weights::take`].
    pub fn linear(&mut self, name: &str) -> Result<Linear> {
        let bias_name = format!("{name}.bias");
        let bias = if self.has(&bias_name) { Some(self.take(&bias_name)?) } else { None };
        let weight_name = format!("{name}.weight");
        if !self.has(&format!("{name}.scales")) {
            return Ok(Linear::Dense { weight: self.take(&weight_name)?, bias });
        }
        let Some(&quantization) = self.mixed.get(name).or(self.quantization.as_ref()) else {
            let problem = format!("`{name}` has scales, but there is no `quantization` key");
            return Err(self.problem("config.json", problem));
        };
        if self.has(&format!("{name}.global_scale")) {
            let problem = format!("`{name}` has a scale for the whole tensor, which is not known");
            return Err(self.problem("", problem));
        }
        let affine = quantization.mode == Mode::Affine;
        let scales = format!("{name}.scales");
        let packed = Packed {
            weight: self.remove(&weight_name)?,
            // Bytes that stand for floats stay bytes.
            scales: if affine { self.take(&scales)? } else { self.remove(&scales)? },
            biases: if affine { Some(self.take(&format!("{name}.biases"))?) } else { None },
            quantization,
            dtype: self.dtype,
        };
        if self.dequantize {
            let weight = packed.dequantize()?;
            eval([&weight])?;
            return Ok(Linear::Dense { weight, bias });
        }
        eval([&packed.weight, &packed.scales])?;
        Ok(Linear::Quantized { weight: packed, bias })
    }

    /// Joins linear layers of one shape to a stack.
    ///
    /// # Errors
    /// [`Error::Model`] when one of them lacks what the first one has.
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
        // Members of a stack are quantized alike: their shapes could not be joined otherwise.
        if let Some(quantization) = self.mixed.get(&layers[0]).copied() {
            self.mixed.insert(name.to_string(), quantization);
        }
        Ok(())
    }

    /// Replaces a linear layer by those that `rows` makes of its matrix, or of each of the packed
    /// ones.
    ///
    /// # Errors
    /// The first error of `rows`.
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

    /// Puts a tensor in, under a name of the family's choice.
    pub fn insert(&mut self, name: String, array: Array) {
        self.arrays.insert(name, array);
    }

    /// Takes a tensor as it is stored.
    ///
    /// # Errors
    /// As [`Weights::take`].
    pub fn remove(&mut self, name: &str) -> Result<Array> {
        self.arrays
            .remove(name)
            .ok_or_else(|| self.problem("", format!("the weights have no tensor `{name}`")))
    }

    /// What is wrong with a file of the folder.
    pub fn problem(&self, file: &str, problem: String) -> Error {
        Error::Model { path: self.folder.join(file), problem }
    }
}

/// The weight files of a folder, in a fixed order.
///
/// # Errors
/// [`Error::Model`] when there are none, or the index cannot be read or names a missing file.
pub(super) fn shards(folder: &Path) -> Result<Vec<PathBuf>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let problem = |path: PathBuf, problem: String| Error::Model { path, problem };
    let index = folder.join("model.safetensors.index.json");
    let entries = folder.read_dir().map_err(|e| problem(folder.to_path_buf(), e.to_string()))?;
    let there = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
    let names: BTreeSet<PathBuf> = if index.is_file() {
        let text = std::fs::read(&index).map_err(|e| problem(index.clone(), e.to_string()))?;
        let parsed: Index =
            serde_json::from_slice(&text).map_err(|e| problem(index.clone(), e.to_string()))?;
        let beside = there.filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("mtp"))
        });
        parsed.weight_map.values().map(|name| folder.join(name)).chain(beside).collect()
    } else {
        there.collect()
    };
    if names.is_empty() {
        let text = "has no *.safetensors; a model folder holds config.json, tokenizer.json and \
                    safetensors";
        return Err(problem(folder.to_path_buf(), text.into()));
    }
    if let Some(missing) = names.iter().find(|path| !path.is_file()) {
        let text = "is missing, though the index names it; download the model again";
        return Err(problem(missing.clone(), text.into()));
    }
    Ok(names.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with an index that names `model.safetensors`, and the files `names` with a tensor
    /// that is called like them.
    fn folder(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            let array = Array::from_slice(&[1f32], &[1]);
            Array::save_safetensors([(*name, &array)], None, folder.path().join(name)).unwrap();
        }
        let index = json!({"weight_map": {"model.safetensors": "model.safetensors"}});
        let path = folder.path().join("model.safetensors.index.json");
        std::fs::write(path, index.to_string()).unwrap();
        folder
    }

    fn open(folder: &Path, config: &Value) -> Result<Weights> {
        Weights::open(folder, config, Dtype::Float32, false)
    }

    /// Converters keep the index as they found it and put the layers that draft beside it; other
    /// files that are not named are other checkpoints (`consolidated.safetensors`).
    #[test]
    fn layers_that_draft_are_read_from_beside_the_index() {
        let names = ["model.safetensors", "mtp-q4.safetensors", "consolidated.safetensors"];
        let folder = folder(&names);
        let weights = open(folder.path(), &json!({})).unwrap();
        assert_eq!(names.map(|name| weights.has(name)), [true, true, false]);
    }

    #[test]
    fn a_quantization_that_is_not_known_is_refused_by_name() {
        let folder = folder(&["model.safetensors"]);
        let check = |config: Value, expected: &[&str]| {
            let error = open(folder.path(), &config).err().unwrap().to_string();
            for part in expected {
                assert!(error.contains(part), "`{error}` does not say `{part}`");
            }
        };
        check(json!({"quantization": {"mode": "int2"}}), &["config.json", "int2", "mxfp4"]);
        let layer = json!({"bits": 4, "a.b": {"mode": "int2"}});
        check(json!({"quantization": layer}), &["config.json", "quantization.a.b", "int2"]);
        let published = json!({"quant_method": "awq", "bits": 4});
        check(json!({"quantization_config": published}), &["quant_method", "awq", "convert"]);
    }
}
