//! Which files are read, and quantizations that are not known.

use super::linear::Form;
use super::*;
use crate::kernels::cpu::Activations;
use crate::nn::Linear;

/// A folder with an index that lists `model.safetensors`, and the files `names`, each with a
/// tensor of that name.
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
    Weights::open(folder, config, Dtype::Float32, Storage::Packed)
}

/// Converters add files of MTP layers without changing the index. Other unlisted files are other
/// checkpoints (`consolidated.safetensors`).
#[test]
fn unlisted_mtp_files_are_read() {
    let names = ["model.safetensors", "mtp-q4.safetensors", "consolidated.safetensors"];
    let folder = folder(&names);
    let weights = open(folder.path(), &json!({})).unwrap();
    assert_eq!(names.map(|name| weights.has(name)), [true, true, false]);
}

#[test]
fn unknown_quantization_is_rejected_by_name() {
    let folder = folder(&["model.safetensors"]);
    let check = |config: Value, expected: &[&str]| {
        let error = open(folder.path(), &config).err().unwrap().to_string();
        for part in expected {
            assert!(error.contains(part), "`{error}` does not contain `{part}`");
        }
    };
    check(json!({"quantization": {"mode": "int2"}}), &["config.json", "int2", "mxfp4"]);
    let layer = json!({"bits": 4, "a.b": {"mode": "int2"}});
    check(json!({"quantization": layer}), &["config.json", "quantization.a.b", "int2"]);
    let published = json!({"quant_method": "awq", "bits": 4});
    check(json!({"quantization_config": published}), &["quant_method", "awq", "convert"]);
}

/// Only kernels of our own multiply with matrices of another type than the model's. They take whole blocks of 32 inputs.
#[test]
fn matrices_of_16_bits_stay_so_for_own_kernels() {
    let folder = folder(&["model.safetensors"]);
    let zeros = |shape: &[i32], dtype| mlx_rs::ops::zeros_dtype(shape, dtype).unwrap();
    let arrays = [
        ("short.weight", zeros(&[8, 64], Dtype::Bfloat16)),
        ("odd.weight", zeros(&[8, 20], Dtype::Bfloat16)),
        ("stack.weight", zeros(&[2, 8, 64], Dtype::Float16)),
        ("wide.weight", zeros(&[8, 64], Dtype::Float32)),
    ];
    let path = folder.path().join("model.safetensors");
    Array::save_safetensors(arrays.iter().map(|(name, array)| (*name, array)), None, path).unwrap();
    let stored = |storage, dtype| {
        let mut weights = Weights::open(folder.path(), &json!({}), dtype, storage).unwrap();
        ["short", "odd", "stack", "wide"].map(|name| {
            let form = Form { stack: (name == "stack").then_some(2), ..Form::default() };
            let Linear::Dense { weight, .. } = weights.linear_with(name, form).unwrap() else {
                panic!("{name} is not dense")
            };
            assert_eq!(weight.dtype, dtype, "{name}");
            (weight.own_kernel, weight.weight.dtype())
        })
    };
    let own = Storage::OwnKernels(Activations::Exact);
    let (bf16, f32) = (Dtype::Bfloat16, Dtype::Float32);
    assert_eq!(stored(own, f32), [(true, bf16), (false, f32), (false, f32), (true, f32)]);
    assert_eq!(stored(own, bf16), [(true, bf16), (false, bf16), (false, bf16), (true, bf16)]);
    assert_eq!(stored(Storage::Packed, f32), [(false, f32); 4]);
}
