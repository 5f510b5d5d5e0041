//! The law of `config.json`: whatever it contains, loading neither panics nor hangs, and an error
//! is one line. The inputs are the same in every run.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use mlx_rs::{Array, Dtype};
use serde_json::{Map, Value, json};

use super::storage::Storage;
use super::{FAMILIES, Weights, check};

/// Values that a key may wrongly have.
fn values() -> Vec<Value> {
    vec![
        Value::Null,
        json!(0),
        json!(1),
        json!(-1),
        json!(3),
        json!(2147483647u32),
        json!(u64::MAX),
        json!(1e300),
        json!(0.5),
        json!(true),
        json!(""),
        json!("yarn"),
        json!([]),
        json!(["full_attention", "x"]),
        json!({}),
        json!({"rope_type": "yarn", "factor": 0.0}),
        json!({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 0}),
        json!({"full_attention": {"rope_type": "linear", "factor": -1}}),
        json!({"bits": 3, "group_size": 0}),
        json!({"quant_method": "fp8", "weight_block_size": [0, -1]}),
    ]
}

/// A deterministic number below `bound`.
fn below(state: &mut u64, bound: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize % bound
}

#[test]
fn no_configuration_panics() {
    // Each opens a folder, which takes as long as some dozens of other inputs.
    let inputs = crate::fuzz_inputs() / 20;
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/families");
    let configs: Vec<Value> = std::fs::read_dir(families)
        .unwrap()
        .map(|entry| std::fs::read(entry.unwrap().path().join("config.json")).unwrap())
        .map(|text| serde_json::from_slice(&text).unwrap())
        .collect();
    let keys: Vec<String> = configs
        .iter()
        .flat_map(|config| [Some(config), config.get("text_config")])
        .filter_map(|config| config?.as_object())
        .flat_map(|keys| keys.keys().cloned())
        .chain(["_sliding_window_pattern", "num_local_experts"].map(String::from))
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let one = Array::from_slice(&[1f32], &[1]);
    Array::save_safetensors([("a", &one)], None, folder.path().join("model.safetensors")).unwrap();
    let (values, mut random) = (values(), 8);
    let (mut loads, mut panics) = (0, BTreeMap::new());
    for number in 0..inputs {
        let mut config = configs[below(&mut random, configs.len())].clone();
        for _ in 0..=below(&mut random, 3) {
            let in_text = config.get("text_config").is_some() && below(&mut random, 2) == 0;
            let table = if in_text { &mut config["text_config"] } else { &mut config };
            let Some(table) = table.as_object_mut() else { continue };
            change(table, &keys, &values, &mut random);
        }
        if check::config(&mut config).is_err() {
            continue;
        }
        let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let family = FAMILIES.iter().find(|family| family.model_type == model_type);
        let Some(family) = family else { continue };
        loads += 1;
        let load = || {
            let open = Weights::open(folder.path(), &config, Dtype::Float32, Storage::Packed);
            open.and_then(|mut weights| (family.load)(&config, &mut weights))
        };
        match catch_unwind(AssertUnwindSafe(load)) {
            Ok(loaded) => {
                let error = loaded.err().expect("there are no weights").to_string();
                assert_eq!(error.lines().count(), 1, "input {number}: {error}");
            }
            Err(panic) => {
                let fixed = panic.downcast_ref::<&str>().map(|text| text.to_string());
                let text = panic.downcast_ref::<String>().cloned().or(fixed).unwrap_or_default();
                panics.entry(text).or_insert_with(|| format!("input {number}: {config}"));
            }
        }
    }
    assert!(panics.is_empty(), "{panics:#?}");
    assert!(loads * 4 > inputs, "only {loads} of {inputs} were loaded");
}

fn change(table: &mut Map<String, Value>, keys: &[String], values: &[Value], random: &mut u64) {
    let key = &keys[below(random, keys.len())];
    if below(random, 4) == 0 {
        table.remove(key);
    } else {
        table.insert(key.clone(), values[below(random, values.len())].clone());
    }
}
