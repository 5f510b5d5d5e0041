//! Loading of checkpoints that are wrong, and of layouts that published ones have: the fixtures'
//! folders with a few changes.

use std::path::{Path, PathBuf};

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::repeat_axis;
use serde_json::{Value, json};

use super::load;
use crate::config::{Device, Dtype, ModelConfig};

/// `config.json` of the fixture `family`.
fn config_of(family: &str) -> Value {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/families");
    serde_json::from_slice(&std::fs::read(fixtures.join(family).join("config.json")).unwrap())
        .unwrap()
}

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
        let mut config = config_of(family);
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
        let arrays = Array::load_safetensors(self.weights()).unwrap();
        self.and(name, change(&arrays[name]))
    }

    /// Adds the tensor `name`.
    fn and(self, name: &str, array: Array) -> Self {
        let mut arrays = Array::load_safetensors(self.weights()).unwrap();
        arrays.insert(name.into(), array);
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
    let vocabulary = |family: &str| {
        let config = config_of(family);
        config.get("text_config").unwrap_or(&config)["vocab_size"].clone()
    };
    let check = |family: &str, changes: Value| {
        let folder = Folder::new(family, changes);
        let loaded = folder.load().expect(family);
        loaded.probe(folder.folder.path()).expect("it computes");
        assert_eq!(Value::from(loaded.embeddings), vocabulary(family), "{family}");
    };
    check("gemma3_text", json!({"sliding_window_pattern": 6}));
    check("gemma3_text", json!({"layer_types": null, "rope_theta": null, "rope_parameters": null}));
    check("qwen3_moe", json!({"num_experts": null, "num_local_experts": 8}));
    check("qwen3_moe", json!({"num_local_experts": 8}));
    check("llama", json!({"tie_word_embeddings": null, "quantization": null, "layer_types": null}));
    check("qwen3_moe", json!({"max_window_layers": null, "use_sliding_window": null}));
    // What transformers 5.23 writes in place of `global_head_dim` and `num_global_key_value_heads`.
    let of_full = json!({"head_dim": 32, "num_key_value_heads": 1});
    check(
        "gemma4_text",
        json!({"global_head_dim": null, "per_layer_config": {"2": of_full, "5": of_full}}),
    );
    let kinds = json!(["full_attention", "full_attention", "full_attention", "full_attention"]);
    let without_windows =
        json!({"sliding_window": null, "sliding_window_pattern": 0, "layer_types": kinds});
    check("exaone4", without_windows);
    let mut text = config_of("mistral3")["text_config"].clone();
    text.as_object_mut().unwrap().remove("model_type");
    check("mistral3", json!({"text_config": text}));
}

/// The same model, described by the keys that transformers 5 writes: it was refused, or computed something else.
#[test]
fn configs_of_transformers_5_describe_the_same_model() {
    let check = |family: &str, changes: Value| {
        let [expected, found] =
            [json!({}), changes.clone()].map(|c| logits(&Folder::new(family, c)));
        let difference = largest(&found.subtract(&expected).unwrap());
        assert_eq!(difference, 0.0, "{family}: {changes}");
    };
    let text_of = |family: &str, changes: Value| {
        let mut text = config_of(family)["text_config"].clone();
        for (key, value) in changes.as_object().unwrap() {
            text[key] = value.clone();
        }
        json!({"text_config": text})
    };
    let mut rope = config_of("llama")["rope_scaling"].clone();
    rope["rope_theta"] = json!(500_000.0);
    check("llama", json!({"rope_theta": null, "rope_scaling": null, "rope_parameters": rope}));
    check("gemma3_text", json!({"sliding_window_pattern": 6}));
    let by_kind = json!({
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    });
    let since_5 = json!({
        "rope_theta": null, "rope_local_base_freq": null, "rope_scaling": null, "rope_parameters": by_kind,
    });
    check("gemma3_text", since_5.clone());
    check("gemma3n", text_of("gemma3n", since_5));
    check("qwen3_moe", json!({"num_experts": null, "num_local_experts": 8}));
    check("qwen3_moe", json!({"num_local_experts": 8}));
    let of_full = json!({"head_dim": 32, "num_key_value_heads": 1});
    let layers = json!({"2": of_full, "5": of_full});
    check("gemma4_text", json!({"global_head_dim": null, "per_layer_config": layers}));
    // Values that are keys, as in the large models.
    let of_full = json!({
        "global_head_dim": null, "num_global_key_value_heads": null, "per_layer_config": {"1": of_full},
    });
    check("gemma4", text_of("gemma4", of_full));
    let linear = config_of("kimi_linear")["linear_attn_config"].clone();
    check(
        "kimi_linear",
        json!({
            "linear_attn_config": null, "linear_head_dim": linear["head_dim"],
            "linear_num_heads": linear["num_heads"],
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        }),
    );
    // MLX's converter writes the table twice.
    check("gemma4_moe_4bit", json!({"quantization": null}));
    let mut text = config_of("mistral3")["text_config"].clone();
    text.as_object_mut().unwrap().remove("model_type");
    check("mistral3", json!({"text_config": text}));
}

/// The logits of a few tokens.
fn logits(folder: &Folder) -> Array {
    let loaded = folder.load().unwrap();
    let mut cache = loaded.model.new_cache().unwrap();
    let tokens = Array::from_slice(&[7u32, 3, 250, 11, 9], &[5]);
    let spans = &mut [crate::cache::Span { rows: 5, cache: &mut cache }];
    let hidden = loaded.model.forward(&tokens, spans, super::Pass::WHOLE).unwrap();
    loaded.model.logits(&hidden).unwrap()
}

fn largest(a: &Array) -> f32 {
    a.abs().unwrap().max(None).unwrap().item_exact::<f32>()
}

/// The same model, once with the rows of queries and keys in the other order of its pairs.
#[test]
fn neighbouring_dimensions_rotate_together_if_the_config_says_so() {
    let halves = Folder::new("llama", json!({"rope_scaling": null}));
    let mut pairs = Folder::new("llama", json!({"rope_scaling": null, "rope_traditional": true}));
    for layer in 0..3 {
        for name in ["q_proj", "k_proj"] {
            pairs = pairs.with(&format!("model.layers.{layer}.self_attn.{name}.weight"), |array| {
                let [rows, columns] = [array.dim(0), array.dim(1)];
                let heads = array.reshape(&[rows / 16, 2, 8, columns]).unwrap();
                heads.swap_axes(1, 2).unwrap().reshape(&[rows, columns]).unwrap()
            });
        }
    }
    let [halves, pairs] = [logits(&halves), logits(&pairs)];
    assert!(largest(&halves.subtract(&pairs).unwrap()) < 1e-4 * largest(&halves));
}

/// Bytes were served as numbers: the garbage had finite logits.
#[test]
fn fp8_is_read_wherever_the_config_says_so() {
    let name = "model.layers.0.mlp.up_proj.weight";
    let fp8 = json!({"quant_method": "fp8"});
    let folder = |config: Value| {
        // 0x38 is 1 in E4M3.
        let ones = |array: &Array| {
            Array::full::<u8>(array.shape(), Array::from_slice(&[0x38u8], &[1])).unwrap()
        };
        Folder::new("mistral3", config)
            .with("model.language_model.layers.0.mlp.up_proj.weight", ones)
            .and("model.language_model.layers.0.mlp.up_proj.weight_scale_inv", Array::from_f32(0.1))
    };
    let mut text = config_of("mistral3")["text_config"].clone();
    text["quantization_config"] = fp8.clone();
    let [inside, outside] = [json!({"text_config": text}), json!({"quantization_config": fp8})]
        .map(|c| logits(&folder(c)));
    assert_eq!(largest(&inside.subtract(&outside).unwrap()), 0.0);
    folder(json!({})).fails(&[name, "Uint8", "config.json must say how"]);
}

/// Experts in one tensor of three dimensions: its blocks were cut along the wrong axes.
#[test]
fn stacked_experts_in_fp8_equal_dense_ones() {
    let at = "model.language_model.layers.1.mlp.experts";
    let experts = ["gate_up_proj", "down_proj"];
    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [16, 32]});
    let mut packed = Folder::new("qwen3_5_moe", json!({"quantization_config": fp8}));
    let mut dense = Folder::new("qwen3_5_moe", json!({}));
    for name in experts {
        let name = format!("{at}.{name}");
        let shape = Array::load_safetensors(dense.weights()).unwrap()[&name].shape().to_vec();
        let [e, rows, columns] = [shape[0], shape[1], shape[2]];
        let blocks = [e, (rows + 15) / 16, (columns + 31) / 32];
        let count: i32 = blocks.iter().product();
        let factors: Vec<f32> = (0..count).map(|i| 0.01 * (i % 7) as f32 - 0.02).collect();
        let factors = Array::from_slice(&factors, &blocks);
        // 0x38 is 1 in E4M3.
        let ones = Array::full::<u8>(&shape, Array::from_slice(&[0x38u8], &[1])).unwrap();
        let spread = repeat_axis::<f32>(factors.clone(), 16, 1).unwrap();
        let spread = repeat_axis::<f32>(spread, 32, 2).unwrap();
        let spread = spread.try_index((.., ..rows, ..columns)).unwrap();
        packed = packed.and(&name, ones).and(&format!("{name}_scale_inv"), factors);
        dense = dense.and(&name, spread.as_dtype(mlx_rs::Dtype::Bfloat16).unwrap());
    }
    let [packed, dense] = [logits(&packed), logits(&dense)];
    assert!(largest(&dense) > 0.0);
    assert_eq!(largest(&packed.subtract(&dense).unwrap()), 0.0);
}

/// A scale that no layer reads means that its matrix is served as other numbers.
#[test]
fn scales_that_nothing_used_are_refused() {
    let one = || Array::from_f32(0.1);
    let at = "model.layers.0.mlp.up_proj";
    let check = |config: Value, name: &str| {
        Folder::new("llama", config)
            .and(name, one())
            .fails(&[&format!("`{name}` is a scale"), "config.json"]);
    };
    check(json!({}), &format!("{at}.weight_scale_inv"));
    check(json!({}), &format!("{at}.weight_scale"));
    check(json!({}), "model.norm.scales");
    // The scale of a matrix with another name.
    check(
        json!({"quantization_config": {"quant_method": "fp8"}}),
        &format!("{at}.weights_scale_inv"),
    );
    // Scales of parts that are not loaded.
    let unread = |name: &str| {
        Folder::new("llama", json!({})).and(&format!("{name}_scale_inv"), one()).and(name, one())
    };
    unread("model.layers.61.mlp.up_proj.weight").load().unwrap();
    Folder::new("llama", json!({})).and(&format!("{at}.input_scale"), one()).load().unwrap();
}

/// `mlx_lm.convert` names layers of other bits, other tools do not.
#[test]
fn mixed_bits_are_read_from_shapes() {
    let whole = Folder::new("llama", json!({}));
    let name = "model.layers.1.mlp.up_proj";
    let arrays = Array::load_safetensors(whole.weights()).unwrap();
    let weight = arrays[&format!("{name}.weight")].as_dtype(mlx_rs::Dtype::Float32).unwrap();
    let expected = logits(&whole);
    for (group_size, bits) in [(64, 8), (32, 8), (64, 6)] {
        let quantization =
            crate::nn::Quantization { group_size, bits, mode: crate::nn::Mode::Affine };
        let packed = crate::nn::Packed::quantize(&weight, quantization);
        let folder = Folder::new("llama", json!({"quantization": {"group_size": 64, "bits": 4}}))
            .with(&format!("{name}.weight"), |_| packed.weight.clone())
            .and(&format!("{name}.scales"), packed.scales.clone())
            .and(&format!("{name}.biases"), packed.biases.clone().unwrap());
        let difference = largest(&logits(&folder).subtract(&expected).unwrap());
        assert!(difference < 0.05 * largest(&expected), "{bits} bits: {difference}");
    }
}

#[test]
fn heads_and_embeddings_of_another_shape_are_named() {
    let cut = |array: &Array| array.try_index((.., ..32)).unwrap();
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        Folder::new("llama_linear", json!({}))
            .with(name, cut)
            .fails(&[&format!("`{name}` has the shape [256, 32]"), "[256, 64]"]);
    }
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
