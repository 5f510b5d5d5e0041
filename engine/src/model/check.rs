//! What is checked of a checkpoint beyond what loading needs: the layout of its files, the counts in
//! its configuration, and that the loaded model computes finite numbers.
//!
//! Shapes are checked where weights are taken (`weights.rs`).

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::{Array, Dtype};
use serde::Deserialize;
use serde_json::Value;

use super::{Model, Pass};
use crate::cache::Span;
use crate::error::{Error, Result};

/// Keys of `config.json` that count something, and the most that makes sense; the least is 1.
const COUNTS: [(&str, u64); 32] = [
    ("full_attention_interval", 1 << 16),
    ("global_head_dim", 1 << 14),
    ("head_dim", 1 << 14),
    ("hidden_size", 1 << 20),
    ("kv_lora_rank", 1 << 14),
    ("linear_head_dim", 1 << 14),
    ("linear_key_head_dim", 1 << 14),
    ("linear_num_heads", 1 << 14),
    ("linear_num_key_heads", 1 << 14),
    ("linear_num_value_heads", 1 << 14),
    ("linear_value_head_dim", 1 << 14),
    ("mamba_d_head", 1 << 14),
    ("mamba_d_state", 1 << 14),
    ("mamba_head_dim", 1 << 14),
    ("mamba_n_groups", 1 << 14),
    ("mamba_n_heads", 1 << 14),
    ("mamba_num_heads", 1 << 14),
    ("max_position_embeddings", u64::MAX),
    ("n_groups", 1 << 14),
    ("num_attention_heads", 1 << 14),
    ("num_global_key_value_heads", 1 << 14),
    ("num_heads", 1 << 14),
    ("num_hidden_layers", 1 << 14),
    ("num_key_value_heads", 1 << 14),
    ("q_lora_rank", 1 << 14),
    ("qk_nope_head_dim", 1 << 14),
    ("qk_rope_head_dim", 1 << 14),
    ("rotary_dim", 1 << 14),
    (PATTERN, 1 << 16),
    ("ssm_state_size", 1 << 14),
    ("state_size", 1 << 14),
    ("v_head_dim", 1 << 14),
];

const PATTERN: &str = "sliding_window_pattern";

/// Pairs of keys, the first of which is a multiple of the second.
const MULTIPLES: [(&str, &str); 5] = [
    ("mamba_n_heads", "mamba_n_groups"),
    ("mamba_num_heads", "n_groups"),
    ("num_attention_heads", "num_key_value_heads"),
    ("num_heads", "n_groups"),
    ("linear_num_value_heads", "linear_num_key_heads"),
];

/// Most bytes of the header of a safetensors file, as in the reference implementation.
const HEADER_BYTES: u64 = 100_000_000;

/// Tokens of the pass before a model is ready.
const PROBE: i32 = 4;

/// Checks the structure of `config.json` and the counts in it. The error names the key.
pub(super) fn config(config: &mut Value) -> Result<(), String> {
    let Some(keys) = config.as_object_mut() else { return Err("is not a JSON object".into()) };
    match keys.get("text_config") {
        Some(Value::Null) => drop(keys.remove("text_config")),
        Some(text @ Value::Object(_)) => counts(text)?,
        Some(other) => return Err(format!("`text_config` is {other}, must be an object")),
        None => {}
    }
    counts(config)
}

/// Objects within `config.json` that have counts, too.
const NESTED: [&str; 1] = ["linear_attn_config"];

/// Checks the counts in one object of `config.json`.
fn counts(config: &Value) -> Result<(), String> {
    let count = |key: &str| config.get(key).filter(|value| !value.is_null());
    for nested in NESTED.iter().filter_map(|key| count(key)) {
        counts(nested)?;
    }
    for (key, most) in COUNTS {
        let Some(value) = count(key) else { continue };
        // EXAONE's pattern is in letters, and 0 if there are no windows.
        if key == PATTERN && (value.is_string() || count("sliding_window").is_none()) {
            continue;
        }
        // Python writes some of them as floats.
        let number =
            value.as_u64().or(value.as_f64().filter(|x| x.fract() == 0.0).map(|x| x as u64));
        match number {
            Some(number) if (1..=most).contains(&number) => {}
            _ if most == u64::MAX => return Err(format!("`{key}` is {value}, must be at least 1")),
            _ => return Err(format!("`{key}` is {value}, must be from 1 to {most}")),
        }
    }
    for (whole, part) in MULTIPLES {
        let number = |key| count(key).and_then(Value::as_u64);
        if let (Some(of_whole), Some(of_part)) = (number(whole), number(part))
            && of_whole % of_part != 0
        {
            return Err(format!("`{whole}` {of_whole} is not a multiple of `{part}` {of_part}"));
        }
    }
    Ok(())
}

/// A tensor of a safetensors file: its name, its type there, and its first byte.
pub(super) type Stored = (String, String, u64);

/// The tensors of the safetensors file at `path`, after a check that they have the sizes of their shapes, lie
/// within the file and do not overlap: MLX reads what the header says.
pub(super) fn layout(path: &Path) -> Result<Vec<Stored>, String> {
    #[derive(Deserialize)]
    struct Tensor {
        dtype: String,
        shape: Vec<u64>,
        data_offsets: [u64; 2],
    }
    let failed = |e: std::io::Error| e.to_string();
    let mut file = steersman_files::open(path).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|_| "is damaged: it has no header")?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES.min(size.saturating_sub(8)) {
        return Err(format!("is damaged: its header has {length} bytes, the file {size}"));
    }
    let mut header = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
    file.read_exact(&mut header).map_err(failed)?;
    let mut entries: HashMap<String, Value> =
        serde_json::from_slice(&header).map_err(|e| format!("is damaged: its header: {e}"))?;
    entries.remove("__metadata__");
    let mut spans = Vec::with_capacity(entries.len());
    let mut all = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let tensor = Tensor::deserialize(entry)
            .map_err(|e| format!("is damaged: the header of `{name}`: {e}"))?;
        let [start, end] = tensor.data_offsets;
        let digits = tensor.dtype.trim_start_matches(|c: char| c.is_ascii_alphabetic());
        let digits = digits.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        let bits: u64 = if tensor.dtype == "BOOL" { 8 } else { digits.parse().unwrap_or(0) };
        let elements = tensor.shape.iter().try_fold(1u64, |all, n| all.checked_mul(*n));
        let bytes = elements.and_then(|n| n.checked_mul(bits)).map(|bits| bits.div_ceil(8));
        let has_size = end.checked_sub(start).is_some_and(|found| bytes == Some(found));
        if !has_size || end > size - 8 - length {
            return Err(format!(
                "is damaged: `{name}` {} {:?} cannot be the bytes from {start} to {end}; download \
                 the model again",
                tensor.dtype, tensor.shape
            ));
        }
        all.push((name.clone(), tensor.dtype, 8 + length + start));
        spans.push((start, end, name));
    }
    spans.sort_unstable();
    match spans.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        Some([(.., one), (.., other)]) => {
            Err(format!("is damaged: `{one}` and `{other}` overlap; download the model again"))
        }
        _ => Ok(all),
    }
}

/// Runs a few of the model's `embeddings` and checks that all logits are finite.
pub(super) fn probe(model: &dyn Model, embeddings: usize) -> Result<(), String> {
    let run = || -> Result<bool> {
        let last = i32::try_from(embeddings.saturating_sub(1)).unwrap_or(i32::MAX);
        let tokens: Vec<u32> = (0..PROBE).map(|id| id.min(last) as u32).collect();
        let tokens = Array::from_slice(&tokens, &[PROBE]);
        let mut cache = model.new_cache()?;
        let spans = &mut [Span { rows: PROBE, cache: &mut cache }];
        let logits = model.logits(&model.forward(&tokens, spans, Pass::WHOLE)?)?;
        // Columns beyond the embeddings pad the vocabulary.
        let columns = logits.dim(2).min(i32::try_from(embeddings).unwrap_or(i32::MAX));
        let logits = logits.try_index((.., .., ..columns))?.as_dtype(Dtype::Float32)?;
        // 0 times NaN or infinity is NaN.
        let sum = logits.multiply(Array::from_f32(0.0))?.sum(None)?;
        Ok(sum.try_item_exact::<f32>()? == 0.0)
    };
    match run() {
        Ok(true) => Ok(()),
        Ok(false) => {
            Err("the model computes numbers that are not finite: its weights are damaged, \
                          or too large for the dtype; download it again or set `model.dtype`"
                .into())
        }
        Err(Error::Array(error)) => {
            Err(format!("the model cannot run: a pass over {PROBE} tokens fails with: {error}"))
        }
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn counts_that_make_no_sense_are_named() {
        let check = |config: Value, expected: &str| {
            assert_eq!(counts(&config).expect_err(expected), expected);
        };
        check(
            json!({"max_position_embeddings": 0}),
            "`max_position_embeddings` is 0, must be at least 1",
        );
        check(
            json!({"num_attention_heads": 3, "num_key_value_heads": 2}),
            "`num_attention_heads` 3 is not a multiple of `num_key_value_heads` 2",
        );
        check(json!({"head_dim": -64}), "`head_dim` is -64, must be from 1 to 16384");
        check(json!({"hidden_size": "x"}), "`hidden_size` is \"x\", must be from 1 to 1048576");
        counts(&json!({"head_dim": null, "hidden_size": 64, "num_attention_heads": 4})).unwrap();
    }

    #[test]
    fn tensors_that_overlap_or_leave_the_file_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let check = |header: Value, data: usize| {
            let header = header.to_string();
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.as_bytes());
            bytes.resize(bytes.len() + data, 0);
            std::fs::write(&path, bytes).unwrap();
            layout(&path)
        };
        let tensor = |start: u64, end: u64| json!({"dtype": "F32", "shape": [2], "data_offsets": [start, end]});
        check(json!({"__metadata__": {}, "a": tensor(0, 8), "b": tensor(8, 16)}), 16).unwrap();
        let error = check(json!({"a": tensor(0, 8), "b": tensor(4, 12)}), 16).unwrap_err();
        assert!(error.contains("`a` and `b` overlap"), "{error}");
        let error = check(json!({"a": tensor(0, 8), "b": tensor(8, 16)}), 12).unwrap_err();
        assert!(error.contains("`b` F32 [2] cannot be the bytes from 8 to 16"), "{error}");
        let error = check(json!({"a": tensor(0, 4)}), 16).unwrap_err();
        assert!(error.contains("`a` F32 [2]"), "{error}");
        std::fs::write(&path, [0xff; 20]).unwrap();
        let error = layout(&path).unwrap_err();
        assert!(error.contains("its header has 18446744073709551615 bytes"), "{error}");
    }
}
