//! Loading of checkpoints that are wrong, and of layouts that published ones have: the fixtures'
//! folders with a few changes.

use std::path::{Path, PathBuf};

use mlx_rs::Array;
use serde_json::{Value, json};

use super::load;
use crate::config::{Device, Dtype, ModelConfig};

/// A copy of the fixture `family` whose config has the `changes`.
struct Folder {
    folder: tempfile::TempDir,
}

impl Folder {
    fn new(family: &str, changes: Value) -> Self {
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/families").join(family);
        let folder = tempfile::tempdir().unwrap();
        let name = "model.safetensors";
        std::fs::copy(source.join(name), folder.path().join(name)).unwrap();
        let config = std::fs::read(source.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&config).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        Self { folder }
    }

    fn weights(&self) -> PathBuf {
        self.folder.path().join("model.safetensors")
    }

    /// Replaces the tensor `name`.
    fn with(self, name: &str, change: impl Fn(&Array) -> Array) -> Self {
        let mut arrays = Array::load_safetensors(self.weights()).unwrap();
        let changed = change(&arrays[name]);
        arrays.insert(name.into(), changed);
        let all: Vec<(&str, &Array)> = arrays.iter().map(|(name, a)| (name.as_str(), a)).collect();
        let path = self.folder.path().join("changed.safetensors");
        Array::save_safetensors(all, None, &path).unwrap();
        std::fs::rename(path, self.weights()).unwrap();
        self
    }

    fn load(&self) -> Result<super::Loaded, String> {
        let config =
            ModelConfig { device: Device::Cpu, dtype: Dtype::F32, ..ModelConfig::default() };
        load(self.folder.path(), &config).map_err(|error| error.to_string())
    }

    /// Loading or the first pass fails with one line that contains `parts`.
    fn fails(&self, parts: &[&str]) {
        let probe = |loaded: super::Loaded| loaded.probe(self.folder.path());
        let probed = self.load().and_then(|loaded| probe(loaded).map_err(|e| e.to_string()));
        let error = probed.expect_err("the checkpoint is wrong");
        assert_eq!(error.lines().count(), 1, "{error}");
        for part in parts {
            assert!(error.contains(part), "`{error}` does not contain `{part}`");
        }
    }
}

#[test]
fn counts_that_do_not_fit_are_refused_by_name() {
    let check = |changes: Value, parts: &[&str]| Folder::new("llama", changes).fails(parts);
    check(json!({"max_position_embeddings": 0}), &["config.json", "max_position_embeddings"]);
    check(json!({"num_attention_heads": 0}), &["num_attention_heads", "from 1"]);
    check(json!({"num_key_value_heads": 3}), &["not a multiple of `num_key_value_heads` 3"]);
    check(json!({"num_hidden_layers": 9}), &["no tensor `model.layers.3.input_layernorm.weight`"]);
}

#[test]
fn tensors_of_another_shape_are_named_with_both_shapes() {
    let check = |changes: Value, parts: &[&str]| Folder::new("llama", changes).fails(parts);
    let query = "`model.layers.0.self_attn.q_proj.weight` has the shape [64, 64]";
    check(json!({"head_dim": 32}), &[query, "config.json makes [128, 64]"]);
    check(json!({"num_attention_heads": 2}), &[query, "[32, 64]"]);
    let key = "`model.layers.0.self_attn.k_proj.weight` has the shape [32, 64]";
    check(json!({"num_key_value_heads": 1}), &[key, "[16, 64]"]);
    let norm = "`model.layers.0.input_layernorm.weight` has the shape [64]";
    check(json!({"hidden_size": 32}), &[norm, "[32]"]);
    let down = "model.layers.1.mlp.down_proj";
    let transposed = |array: &Array| array.t().contiguous().unwrap();
    Folder::new("llama", json!({}))
        .with(&format!("{down}.weight"), transposed)
        .fails(&[&format!("`{down}.weight` has the shape [96, 64]"), "[64, 96]"]);
}

/// NaN answered with `!!!!`, since token 0 has the largest logit if there is none.
#[test]
fn model_that_computes_nan_is_refused() {
    for number in [f32::NAN, f32::INFINITY] {
        let broken = |array: &Array| array.multiply(Array::from_f32(number)).unwrap();
        Folder::new("llama", json!({}))
            .with("model.layers.2.mlp.up_proj.weight", broken)
            .fails(&["not finite"]);
    }
}

/// MLX cannot multiply by chosen experts in bf16 on a CPU: every request failed.
#[test]
fn model_that_cannot_run_is_refused() {
    let folder = Folder::new("qwen3_moe", json!({}));
    let config = ModelConfig { device: Device::Cpu, dtype: Dtype::Bf16, ..ModelConfig::default() };
    let loaded = load(folder.folder.path(), &config).map_err(|e| e.to_string()).unwrap();
    let error = loaded.probe(folder.folder.path()).unwrap_err().to_string();
    assert!(error.contains("the model cannot run") && error.contains("float32"), "{error}");
    assert!(!error.contains(".cpp"), "{error}");
}

#[test]
fn integers_are_not_taken_for_weights() {
    let bytes = |array: &Array| array.as_dtype(mlx_rs::Dtype::Uint8).unwrap();
    Folder::new("llama", json!({}))
        .with("model.layers.0.mlp.up_proj.weight", bytes)
        .fails(&["`model.layers.0.mlp.up_proj.weight` holds Uint8", "quantized"]);
}

#[test]
fn published_layouts_load() {
    let check = |family: &str, changes: Value| {
        let folder = Folder::new(family, changes);
        let loaded = folder.load().expect(family);
        loaded.probe(folder.folder.path()).expect("it computes");
        assert_eq!(loaded.embeddings, 256, "{family}");
    };
    check("gemma3_text", json!({"sliding_window_pattern": 6}));
    check("gemma3_text", json!({"layer_types": null, "rope_theta": null, "rope_parameters": null}));
    check("qwen3_moe", json!({"num_experts": null, "num_local_experts": 8}));
    check("qwen3_moe", json!({"num_local_experts": 8}));
    check("llama", json!({"tie_word_embeddings": null, "quantization": null, "layer_types": null}));
    check("qwen3_moe", json!({"max_window_layers": null, "use_sliding_window": null}));
}

#[cfg(unix)]
#[test]
fn pipes_are_not_read() {
    let folder = Folder::new("llama", json!({}));
    let path = folder.folder.path().join("config.json");
    std::fs::remove_file(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    folder.fails(&["config.json", "not a regular file"]);
    let text = crate::text::Text::load(folder.folder.path()).err().unwrap().to_string();
    assert!(text.contains("not a regular file"), "{text}");
}

#[test]
fn messages_of_mlx_name_no_source_files() {
    let error =
        crate::Error::from(Array::from_slice(&[1f32, 2.0], &[2]).reshape(&[3]).unwrap_err());
    let error = error.to_string();
    assert!(error.starts_with("MLX: [reshape] Cannot reshape"), "{error}");
    assert!(![".cpp", ".rs", "rustc", "\""].iter().any(|part| error.contains(part)), "{error}");
}
