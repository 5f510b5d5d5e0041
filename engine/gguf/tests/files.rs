//! Files as llama.cpp's tools write them, and files that are damaged. `tests/fixtures/gguf_files.py` writes the former.

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use serde_json::Value;
use steersman_gguf::quants::{Type, floats};
use steersman_gguf::{Data, Form, Model, files};

const NAMES: [&str; 10] = [
    "gemma",
    "gemma2",
    "gemma3",
    "llama",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gguf")
}

fn fixture(name: &str) -> Vec<u8> {
    fs::read(fixtures().join(format!("{name}.gguf"))).unwrap()
}

/// Everything that is read of a file.
fn read(path: &Path) -> Result<(), String> {
    let model = Model::open(path).map_err(|error| error.to_string())?;
    for tensor in model.tensors() {
        for form in [Form::Floats, Form::Packed, Form::PackedEvenly] {
            model.read(tensor, form).map_err(|error| error.to_string())?;
        }
    }
    model.listing();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    {
        files::read(path, name).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Reads `bytes` as a file.
fn read_bytes(folder: &Path, bytes: &[u8]) -> Result<(), String> {
    let path = folder.join("model.gguf");
    fs::write(&path, bytes).unwrap();
    read(&path)
}

/// Where the header ends, at most: the names of tensors are in its last part.
fn header_end(bytes: &[u8]) -> usize {
    let last = bytes.windows(4).rposition(|window| window == b"blk.").unwrap();
    (last + 64).min(bytes.len())
}

/// ggml's own dequantization of the same blocks.
#[test]
fn blocks_are_the_numbers_that_ggml_makes_of_them() {
    let text = fs::read_to_string(fixtures().join("blocks.json")).unwrap();
    let blocks: Value = serde_json::from_str(&text).unwrap();
    let bytes = |value: &Value| -> Vec<u8> {
        let digits = value.as_str().unwrap();
        let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
        (0..digits.len()).step_by(2).map(byte).collect()
    };
    let mut checked = 0;
    for kind in Type::ALL.into_iter().filter(|kind| kind.bits().is_some()) {
        let case = &blocks[kind.to_string()];
        let expected = bytes(&case["floats"]);
        let expected: Vec<f32> =
            expected.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert_eq!(floats(kind, &bytes(&case["bytes"])), expected, "{kind}");
        checked += 1;
    }
    assert_eq!(checked, 8);
}

#[test]
fn whole_files_are_read() {
    for name in NAMES {
        read(&fixtures().join(format!("{name}.gguf"))).unwrap();
    }
}

/// Packed and as floats, the numbers of a matrix are the same.
#[test]
fn packed_matrices_equal_their_floats() {
    for name in NAMES {
        let model = Model::open(&fixtures().join(format!("{name}.gguf"))).unwrap();
        let mut packed = 0;
        for tensor in model.tensors() {
            let Data::Packed { bits, codes, scales, biases } =
                model.read(tensor, Form::Packed).unwrap()
            else {
                continue;
            };
            let Data::Floats(steersman_gguf::Floats::F32(expected)) =
                model.read(tensor, Form::Floats).unwrap()
            else {
                panic!("quantized matrices are f32");
            };
            let short = |numbers| match numbers {
                steersman_gguf::Floats::F16(numbers) => {
                    numbers.into_iter().map(f32::from).collect::<Vec<_>>()
                }
                other => panic!("scales of these types are exact in f16: {other:?}"),
            };
            let (scales, biases) = (short(scales), short(biases));
            let bit = |i: usize| codes[i / 32] >> (i % 32) & 1;
            let code = |i: usize| (0..bits).fold(0, |code, b| code | bit(i * bits + b) << b) as f32;
            let number = |i: usize| scales[i / 32] * code(i) + biases[i / 32];
            let found: Vec<f32> = (0..expected.len()).map(number).collect();
            assert_eq!(found, expected, "{name}: {}", tensor.name);
            packed += 1;
        }
        assert!(packed > 5, "{name}");
    }
}

/// A truncated file is refused with an error that reports the truncation.
#[test]
fn truncated_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for name in NAMES {
        let bytes = fixture(name);
        let header = header_end(&bytes);
        // The file may end with less than 32 bytes of padding.
        let last = bytes.len() - 32;
        let cuts = (0..64).chain((64..header).step_by(97)).chain((header..last).step_by(4001));
        for cut in cuts.chain([last]) {
            let error = read_bytes(folder.path(), &bytes[..cut]).expect_err("it is cut");
            assert!(!error.is_empty(), "{name} cut at {cut}");
        }
    }
}

/// Counts, lengths, types, shapes and offsets that make no sense are errors, or the file is read otherwise; nothing
/// panics, reads beyond the file or takes memory that the file does not have.
#[test]
fn changed_headers_do_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let mut state = 1u64;
    let mut random = move |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let (mut refused, mut tried) = (0, 0);
    for name in NAMES {
        let original = fixture(name);
        let header = header_end(&original);
        for round in 0..300 {
            let mut bytes = original.clone();
            for _ in 0..1 + random(3) {
                // The ends of the header have the keys and the tensors; its middle is the vocabulary.
                let at = match random(3) {
                    0 => random(2000.min(header)),
                    1 => header - 1 - random(2500.min(header)),
                    _ => random(header),
                };
                match random(4) {
                    0 => bytes[at] ^= 1 << random(8),
                    1 => bytes[at] = random(256) as u8,
                    2 => bytes[at..(at + 8).min(header)].fill(0xff),
                    _ => bytes[at..(at + 4).min(header)].fill(0),
                }
            }
            let path = folder.path().to_path_buf();
            let result = catch_unwind(|| read_bytes(&path, &bytes));
            let result = result.unwrap_or_else(|_| panic!("{name}, round {round}: it panics"));
            refused += usize::from(result.is_err());
            tried += 1;
        }
    }
    println!("{refused} of {tried} changed files refused");
    assert!(refused > tried / 4, "{refused} of {tried}");
}

/// Replaces a text of the header by another one of the same length.
fn replaced(name: &str, from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = fixture(name);
    let at = bytes.windows(from.len()).position(|part| part == from.as_bytes()).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    bytes
}

#[test]
fn what_is_not_supported_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let check = |bytes: &[u8], expected: &str| {
        let error = read_bytes(folder.path(), bytes).expect_err(expected);
        assert!(error.contains(expected), "{error}");
    };
    // The first `llama` is the architecture.
    check(&replaced("llama", "llama", "zebra"), "the architecture `zebra` is not supported");
    check(
        &replaced("llama", "blk.1.attn_v", "blk.1.attn_w"),
        "tensor `blk.1.attn_w.weight` is no part",
    );
    check(
        &replaced("qwen2", "qwen2.block_count", "qwen2.block_counz"),
        "`qwen2.block_count` is missing",
    );
    check(&replaced("qwen35", "gpt2", "bert"), "`tokenizer.ggml.model` is `bert`");
    check(&replaced("llama", "llama-bpe", "zebra-bpe"), "`tokenizer.ggml.pre` is `zebra-bpe`");
    check(&replaced("gemma3", "linear", "zigzag"), "is `zigzag`, which is not supported");
    check(&replaced("llama", "GGUF", "GGML"), "it is not a GGUF file");

    let mut bytes = fixture("qwen2");
    bytes[4] = 1;
    check(&bytes, "its version of GGUF is 1");
    bytes[4..8].copy_from_slice(&[0, 0, 0, 3]);
    check(&bytes, "big-endian");

    // After the name: dimensions, two sizes, then the type.
    let mut bytes = fixture("llama");
    let name = b"blk.0.ffn_up.weight";
    let at = bytes.windows(name.len()).position(|part| part == name).unwrap() + name.len() + 20;
    bytes[at] = 10;
    check(&bytes, "tensor `blk.0.ffn_up.weight` has the type Q2_K, which is not supported");
    bytes[at] = 200;
    check(&bytes, "tensor `blk.0.ffn_up.weight` has the type number 200");
    bytes[at] = 14;
    check(&bytes, "not whole blocks of 256 (Q6_K)");
}

#[test]
fn a_template_beside_the_file_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    fs::write(&path, fixture("qwen3")).unwrap();
    let template = path.join("chat_template.jinja");
    assert_eq!(files::within(&template), Some((path.as_path(), "chat_template.jinja")));
    let error = files::read(&path, "chat_template.jinja").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    fs::write(folder.path().join("m.jinja"), "x").unwrap();
    assert_eq!(files::read(&path, "chat_template.jinja").unwrap(), b"x");
    assert_eq!(files::within(folder.path()), None);
    assert_eq!(files::on_disk(&template), folder.path().join("m.jinja"));
    assert_eq!(files::on_disk(&path.join("config.json")), path);
    assert_eq!(
        files::on_disk(&folder.path().join("config.json")),
        folder.path().join("config.json")
    );
}
