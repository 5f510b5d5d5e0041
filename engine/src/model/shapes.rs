//! The law of shapes: a checkpoint of which a tensor has another shape than `config.json` makes is refused when it is
//! loaded, by an error of one line that names a tensor and both shapes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use mlx_rs::ops::concatenate;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::{Array, Dtype};
use serde_json::Value;

use super::storage::Storage;
use super::{FAMILIES, Weights, check};
use crate::error::Result;
use crate::kernels::cpu::Activations;

type Tensors = HashMap<String, Array>;

fn families() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/families")
}

/// Loads `tensors` as a checkpoint, and runs it if `runs`.
fn load(
    folder: &Path,
    config: &Value,
    tensors: &Tensors,
    runs: bool,
) -> std::result::Result<(), String> {
    let all = tensors.iter().map(|(name, array)| (name.as_str(), array));
    let path = folder.join("model.safetensors");
    // A file that is written over is flushed to the disk when it is closed.
    if path.exists() {
        std::fs::remove_file(&path).unwrap();
    }
    Array::save_safetensors(all.collect::<Vec<_>>(), None, path).unwrap();
    let model_type = config["model_type"].as_str().unwrap();
    let family = FAMILIES.iter().find(|family| family.model_type == model_type).unwrap();
    let load = || -> Result<_> {
        let mut weights =
            Weights::open(folder, config, Dtype::Float32, Storage::OwnKernels(Activations::Exact))?;
        let model = (family.load)(config, &mut weights)?;
        Ok((model, weights.embeddings()))
    };
    let (model, embeddings) = load().map_err(|error| error.to_string())?;
    if runs { check::probe(&*model, embeddings) } else { Ok(()) }
}

/// The name without numbers: layers and experts are alike.
fn kind(name: &str) -> String {
    name.split('.').filter(|part| part.parse::<u32>().is_err()).collect::<Vec<_>>().join(".")
}

/// The array with one row or column less.
fn shorter(array: &Array, axis: i32) -> Array {
    let keep: Vec<i32> = (0..array.dim(axis) - 1).collect();
    let keep = Array::from_slice(&keep, &[keep.len() as i32]);
    array.take_axis(keep, axis).unwrap()
}

/// Before, MLX said which shapes it could not multiply, in the first pass or in a request, or it computed with a
/// vector that it had stretched.
#[test]
fn tensors_of_other_shapes_are_refused_in_every_family() {
    let folder = tempfile::tempdir().unwrap();
    let mut accepted: BTreeMap<String, Vec<_>> = BTreeMap::new();
    let mut refused = 0;
    for entry in families().read_dir().unwrap() {
        let source = entry.unwrap().path();
        let name = source.file_name().unwrap().to_str().unwrap().to_string();
        let config = std::fs::read(source.join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        let tensors = Array::load_safetensors(source.join("model.safetensors")).unwrap();
        load(folder.path(), &config, &tensors, false).expect(&name);
        let mut seen = BTreeSet::new();
        let mut names: Vec<&String> = tensors.keys().collect();
        names.sort();
        for tensor in names {
            if !seen.insert(kind(tensor)) {
                continue;
            }
            // Multimodal configs of Gemma 3 leave out how many tokens there are.
            let text = config.get("text_config").unwrap_or(&config);
            if text.get("vocab_size").is_none() && tensor.ends_with("embed_tokens.weight") {
                continue;
            }
            let array = &tensors[tensor];
            let with = |array: Array| {
                let mut tensors = tensors.clone();
                tensors.insert(tensor.clone(), array);
                tensors
            };
            // What nothing reads may be anything. Tried for tensors that are not refused only: it takes a pass.
            let is_read = || {
                let not = Array::full::<f32>(array.shape(), Array::from_f32(f32::NAN)).unwrap();
                !array.dtype().is_float() || load(folder.path(), &config, &with(not), true).is_err()
            };
            // A scalar has no axis.
            let whole =
                &if array.ndim() == 0 { array.reshape(&[1]).unwrap() } else { array.clone() };
            let mut others = vec![concatenate(&[whole, whole], 0).unwrap()];
            if whole.dim(0) > 1 {
                others.push(shorter(whole, 0));
                others.push(whole.try_index(..1).unwrap());
            }
            // Fewer packed columns may be numbers of fewer bits.
            if whole.ndim() > 1 && whole.dim(-1) > 1 && whole.dtype().is_float() {
                others.push(shorter(whole, whole.ndim() as i32 - 1));
            }
            for other in others {
                let shape = other.shape().to_vec();
                match load(folder.path(), &config, &with(other), false) {
                    Err(error) if error.contains("shape") || error.contains("packed columns") => {
                        assert_eq!(error.lines().count(), 1, "{error}");
                        refused += 1;
                    }
                    _ if !is_read() => {}
                    result => {
                        let about = format!("{tensor} {:?} as {shape:?}", whole.shape());
                        accepted.entry(name.clone()).or_default().push((about, result));
                    }
                }
            }
        }
    }
    assert!(accepted.is_empty(), "{accepted:#?}");
    assert!(refused > 1000, "only {refused} were refused");
}
