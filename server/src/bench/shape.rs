//! `steersman bench shape`: checkpoints with the dimensions of published models and random weights, to measure speed
//! where no weights are.
//!
//! Matrices have 4 bits in groups of 64, or are bf16, and have names as mlx-lm writes them. Their values keep the size of a
//! row, so that no number overflows. Tokenizer and template are those of the bundled model, whose tokens are the first of the larger
//! vocabulary. What such a model writes has no meaning.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use serde_json::{Map, Value, json};

use crate::bundled;

/// What is written.
#[derive(Args, Debug)]
pub struct Options {
    /// The published model
    #[arg(value_parser = PossibleValuesParser::new(names()))]
    pub name: String,
    /// Folder to write, which must not exist
    pub folder: PathBuf,
}

/// Columns that share a scale.
const GROUP: usize = 64;

/// A model by its dimensions, as its `config.json` names them.
struct Shape {
    name: &'static str,
    model_type: &'static str,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Whether the embedding is the head, too.
    tied: bool,
    /// Whether matrices have 4 bits; bf16 otherwise.
    is_packed: bool,
    linear: Option<Linear>,
    experts: Option<Experts>,
}

/// GatedDeltaNet layers.
struct Linear {
    /// Every layer whose number is a multiple of this has full attention.
    interval: usize,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    taps: usize,
}

/// A mixture of experts in each layer.
struct Experts {
    count: usize,
    chosen: usize,
    /// Of an expert, and of the shared one.
    intermediate_size: usize,
}

const QWEN3_5: Linear =
    Linear { interval: 4, key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, taps: 4 };

const QWEN3_5_27B: Shape = Shape {
    name: "qwen3.5-27b",
    model_type: "qwen3_5",
    vocab_size: 248_320,
    hidden_size: 5120,
    intermediate_size: 17_408,
    layers: 64,
    heads: 24,
    kv_heads: 4,
    head_dim: 256,
    tied: false,
    is_packed: true,
    linear: Some(Linear { value_heads: 48, ..QWEN3_5 }),
    experts: None,
};

/// Shapes that can be written.
const SHAPES: [Shape; 7] = [
    QWEN3_5_27B,
    Shape { name: "qwen3.5-27b-bf16", is_packed: false, ..QWEN3_5_27B },
    Shape {
        name: "qwen3.5-9b",
        model_type: "qwen3_5",
        vocab_size: 248_320,
        hidden_size: 4096,
        intermediate_size: 12_288,
        layers: 32,
        heads: 16,
        kv_heads: 4,
        head_dim: 256,
        tied: false,
        is_packed: true,
        linear: Some(QWEN3_5),
        experts: None,
    },
    Shape {
        name: "qwen3.6-35b-a3b",
        model_type: "qwen3_5_moe",
        vocab_size: 248_320,
        hidden_size: 2048,
        intermediate_size: 0,
        layers: 40,
        heads: 16,
        kv_heads: 2,
        head_dim: 256,
        tied: false,
        is_packed: true,
        linear: Some(QWEN3_5),
        experts: Some(Experts { count: 256, chosen: 8, intermediate_size: 512 }),
    },
    Shape {
        name: "qwen3-4b",
        model_type: "qwen3",
        vocab_size: 151_936,
        hidden_size: 2560,
        intermediate_size: 9728,
        layers: 36,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        tied: true,
        is_packed: true,
        linear: None,
        experts: None,
    },
    Shape {
        name: "llama-3.1-8b",
        model_type: "llama",
        vocab_size: 128_256,
        hidden_size: 4096,
        intermediate_size: 14_336,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        tied: false,
        is_packed: true,
        linear: None,
        experts: None,
    },
    Shape {
        name: "gemma-3-4b",
        model_type: "gemma3_text",
        vocab_size: 262_208,
        hidden_size: 2560,
        intermediate_size: 10_240,
        layers: 34,
        heads: 8,
        kv_heads: 4,
        head_dim: 256,
        tied: true,
        is_packed: true,
        linear: None,
        experts: None,
    },
];

/// Names of the shapes.
pub fn names() -> Vec<&'static str> {
    SHAPES.iter().map(|shape| shape.name).collect()
}

/// What a tensor is filled with.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Content {
    /// Random words of packed numbers.
    Words,
    /// Random numbers of the size of this one in bf16, of both signs.
    Random(f32),
    /// One bf16.
    Bf16(f32),
    /// Zeros in f32.
    Zeros,
}

#[derive(Debug)]
struct Tensor {
    name: String,
    shape: Vec<usize>,
    content: Content,
}

impl Tensor {
    fn bytes(&self) -> usize {
        let size =
            if matches!(self.content, Content::Bf16(_) | Content::Random(_)) { 2 } else { 4 };
        size * self.shape.iter().product::<usize>()
    }
}

/// The tensors of a checkpoint.
struct Tensors {
    all: Vec<Tensor>,
    is_packed: bool,
}

impl Tensors {
    fn push(&mut self, name: String, shape: &[usize], content: Content) {
        self.all.push(Tensor { name, shape: shape.into(), content });
    }

    fn norm(&mut self, name: String, width: usize) {
        self.push(format!("{name}.weight"), &[width], Content::Bf16(1.0));
    }

    /// A matrix [out, in], or a stack of them. Packed numbers 0 to 15 are centred around 0.
    fn matrix(&mut self, name: &str, stack: &[usize], [out, columns]: [usize; 2]) {
        let shape = |columns: usize| [stack, &[out, columns]].concat();
        if !self.is_packed {
            let size = 1.0 / (columns as f32).sqrt();
            return self.push(format!("{name}.weight"), &shape(columns), Content::Random(size));
        }
        let scale = 1.0 / (4.6 * (columns as f32).sqrt());
        self.push(format!("{name}.weight"), &shape(columns / 8), Content::Words);
        self.push(format!("{name}.scales"), &shape(columns / GROUP), Content::Bf16(scale));
        self.push(format!("{name}.biases"), &shape(columns / GROUP), Content::Bf16(-7.5 * scale));
    }
}

impl Shape {
    /// Whether the text model is one part of the checkpoint.
    fn is_part(&self) -> bool {
        self.linear.is_some()
    }

    fn is_gemma(&self) -> bool {
        self.model_type == "gemma3_text"
    }

    fn tensors(&self) -> Vec<Tensor> {
        let mut all = Tensors { all: Vec::new(), is_packed: self.is_packed };
        let part = if self.is_part() { "language_model." } else { "" };
        let hidden = self.hidden_size;
        all.matrix(&format!("{part}model.embed_tokens"), &[], [self.vocab_size, hidden]);
        for layer in 0..self.layers {
            let at = &format!("{part}model.layers.{layer}");
            let mut norms = vec!["input_layernorm", "post_attention_layernorm"];
            if self.is_gemma() {
                norms.extend(["pre_feedforward_layernorm", "post_feedforward_layernorm"]);
            }
            for norm in norms {
                all.norm(format!("{at}.{norm}"), hidden);
            }
            self.feed_forward(&mut all, at);
            match &self.linear {
                Some(linear) if !(layer + 1).is_multiple_of(linear.interval) => {
                    self.linear_attention(&mut all, at, linear);
                }
                _ => self.attention(&mut all, at),
            }
        }
        all.norm(format!("{part}model.norm"), hidden);
        if !self.tied {
            all.matrix(&format!("{part}lm_head"), &[], [self.vocab_size, hidden]);
        }
        all.all
    }

    fn feed_forward(&self, all: &mut Tensors, at: &str) {
        let hidden = self.hidden_size;
        let mut block = |at: &str, stack: &[usize], width: usize| {
            all.matrix(&format!("{at}.gate_proj"), stack, [width, hidden]);
            all.matrix(&format!("{at}.up_proj"), stack, [width, hidden]);
            all.matrix(&format!("{at}.down_proj"), stack, [hidden, width]);
        };
        let Some(Experts { count, intermediate_size, .. }) = self.experts else {
            return block(&format!("{at}.mlp"), &[], self.intermediate_size);
        };
        block(&format!("{at}.mlp.switch_mlp"), &[count], intermediate_size);
        block(&format!("{at}.mlp.shared_expert"), &[], intermediate_size);
        all.matrix(&format!("{at}.mlp.gate"), &[], [count, hidden]);
        all.matrix(&format!("{at}.mlp.shared_expert_gate"), &[], [1, hidden]);
    }

    fn attention(&self, all: &mut Tensors, at: &str) {
        let (hidden, width) = (self.hidden_size, self.heads * self.head_dim);
        // Qwen3.5 has a gate beside each query.
        let queries = if self.linear.is_some() { 2 * width } else { width };
        let keys = self.kv_heads * self.head_dim;
        for (name, out) in [("q", queries), ("k", keys), ("v", keys)] {
            all.matrix(&format!("{at}.self_attn.{name}_proj"), &[], [out, hidden]);
        }
        all.matrix(&format!("{at}.self_attn.o_proj"), &[], [hidden, width]);
        if self.model_type != "llama" {
            all.norm(format!("{at}.self_attn.q_norm"), self.head_dim);
            all.norm(format!("{at}.self_attn.k_norm"), self.head_dim);
        }
    }

    fn linear_attention(&self, all: &mut Tensors, at: &str, linear: &Linear) {
        let &Linear { key_heads, value_heads, key_dim, value_dim, taps, .. } = linear;
        let (hidden, values) = (self.hidden_size, value_heads * value_dim);
        let channels = 2 * key_heads * key_dim + values;
        let at = format!("{at}.linear_attn");
        for (name, out) in
            [("qkv", channels), ("z", values), ("a", value_heads), ("b", value_heads)]
        {
            all.matrix(&format!("{at}.in_proj_{name}"), &[], [out, hidden]);
        }
        all.matrix(&format!("{at}.out_proj"), &[], [hidden, values]);
        all.norm(format!("{at}.norm"), value_dim);
        all.push(format!("{at}.A_log"), &[value_heads], Content::Zeros);
        all.push(format!("{at}.dt_bias"), &[value_heads], Content::Bf16(0.0));
        let tap = Content::Bf16(1.0 / taps as f32);
        all.push(format!("{at}.conv1d.weight"), &[channels, taps, 1], tap);
    }

    /// `config.json`, with the end tokens `end`.
    fn config(&self, end: &Value) -> Value {
        let mut text = json!({
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
        });
        let own = match self.model_type {
            "qwen3" => json!({ "max_position_embeddings": 40_960, "rope_theta": 1e6 }),
            "llama" => json!({
                "max_position_embeddings": 131_072, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            }),
            "gemma3_text" => json!({
                "max_position_embeddings": 131_072, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
                "rope_scaling": { "rope_type": "linear", "factor": 8.0 },
            }),
            _ => json!({
                "max_position_embeddings": 262_144,
                "rope_parameters": { "type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25 },
            }),
        };
        merge(&mut text, own);
        if let Some(linear) = &self.linear {
            let full = |layer: usize| (layer + 1).is_multiple_of(linear.interval);
            let kind = |layer| if full(layer) { "full_attention" } else { "linear_attention" };
            let kinds: Vec<&str> = (0..self.layers).map(kind).collect();
            merge(
                &mut text,
                json!({
                    "full_attention_interval": linear.interval,
                    "layer_types": kinds,
                    "linear_num_key_heads": linear.key_heads,
                    "linear_num_value_heads": linear.value_heads,
                    "linear_key_head_dim": linear.key_dim,
                    "linear_value_head_dim": linear.value_dim,
                    "linear_conv_kernel_dim": linear.taps,
                }),
            );
        }
        if let Some(Experts { count, chosen, intermediate_size }) = self.experts {
            merge(
                &mut text,
                json!({
                    "num_experts": count,
                    "num_experts_per_tok": chosen,
                    "moe_intermediate_size": intermediate_size,
                    "shared_expert_intermediate_size": intermediate_size,
                }),
            );
        }
        let mut config = json!({
            "model_type": self.model_type,
            "eos_token_id": end,
        });
        if self.is_packed {
            let quantization = json!({ "group_size": GROUP, "bits": 4 });
            merge(&mut config, json!({ "quantization": quantization }));
        }
        if self.is_part() {
            let own =
                json!({ "model_type": format!("{}_text", self.model_type), "dtype": "bfloat16" });
            merge(&mut text, own);
            merge(&mut config, json!({ "text_config": text, "tie_word_embeddings": self.tied }));
        } else {
            merge(&mut config, text);
            merge(&mut config, json!({ "torch_dtype": "bfloat16" }));
        }
        config
    }
}

/// Adds the keys of an object to another one.
fn merge(to: &mut Value, from: Value) {
    if let (Value::Object(to), Value::Object(from)) = (to, from) {
        to.extend(from);
    }
}

/// The folder of the shape `name` below `data_dir`, written if it is missing.
///
/// # Errors
/// If there is no such shape, or the files cannot be written.
pub fn prepare(name: &str, data_dir: &Path) -> Result<PathBuf> {
    let folder = data_dir.join("shapes").join(name);
    if !folder.exists() {
        write(name, &folder)?;
    }
    Ok(folder)
}

/// Writes the shape `name` to `folder`, which appears when it is complete.
///
/// # Errors
/// If there is no such shape, the folder exists, or it cannot be written.
pub fn write(name: &str, folder: &Path) -> Result<()> {
    let Some(shape) = SHAPES.iter().find(|shape| shape.name == name) else {
        bail!("no shape is called {name}; there are {}", names().join(", "));
    };
    write_shape(shape, folder)
}

fn write_shape(shape: &Shape, folder: &Path) -> Result<()> {
    if folder.exists() {
        bail!("{} exists; remove it, or name another folder", folder.display());
    }
    let parent = match folder.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let write = || -> Result<()> {
        fs::create_dir_all(parent)?;
        let fresh = tempfile::Builder::new().prefix(".writing-").tempdir_in(parent)?;
        let mut end = Value::Null;
        for (name, bytes) in bundled::files() {
            match *name {
                "config.json" => {
                    end = serde_json::from_slice::<Value>(bytes)?["eos_token_id"].take()
                }
                "model.safetensors" | "model.safetensors.index.json" => {}
                name => fs::write(fresh.path().join(name), bytes)?,
            }
        }
        let config = serde_json::to_vec_pretty(&shape.config(&end))?;
        fs::write(fresh.path().join("config.json"), config)?;
        write_tensors(&shape.tensors(), &fresh.path().join("model.safetensors"))?;
        fs::rename(fresh.keep(), folder)?;
        Ok(())
    };
    write().with_context(|| format!("writing {}", folder.display()))
}

/// Writes a safetensors file.
fn write_tensors(tensors: &[Tensor], path: &Path) -> Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": "mlx" }));
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += tensor.bytes();
        let dtype = match tensor.content {
            Content::Words => "U32",
            Content::Bf16(_) | Content::Random(_) => "BF16",
            Content::Zeros => "F32",
        };
        let entry = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end] });
        header.insert(tensor.name.clone(), entry);
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(text.len() as u64).to_le_bytes())?;
    file.write_all(&text)?;
    let mut random = Random(0);
    for tensor in tensors {
        let bytes = tensor.bytes();
        match tensor.content {
            Content::Words => {
                // Rows have whole groups, of 32 bytes.
                (0..bytes / 8).try_for_each(|_| file.write_all(&random.next().to_le_bytes()))?;
            }
            Content::Random(size) => {
                // Sign and fraction of each number are random. Rows have whole groups.
                let exponent = u64::from(size.to_bits() >> 16 & 0x7f80) * 0x0001_0001_0001_0001;
                let of = |word: u64| word & 0x807f_807f_807f_807f | exponent;
                (0..bytes / 8)
                    .try_for_each(|_| file.write_all(&of(random.next()).to_le_bytes()))?;
            }
            Content::Bf16(number) => {
                // The upper half of an f32.
                let number = ((number.to_bits() >> 16) as u16).to_le_bytes();
                (0..bytes / 2).try_for_each(|_| file.write_all(&number))?;
            }
            Content::Zeros => (0..bytes).try_for_each(|_| file.write_all(&[0]))?,
        }
    }
    file.flush()?;
    Ok(())
}

/// SplitMix64 (Steele, Lea, Flood 2014): fast, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
}

#[cfg(test)]
mod tests {
    use steersman_engine::config::Config;
    use steersman_engine::tools::Decoder;
    use steersman_engine::tools::passes::{self, Case, Plan};

    use super::*;

    /// A shape with few layers and heads, and otherwise the same.
    fn small(shape: &Shape) -> Shape {
        let linear =
            shape.linear.as_ref().map(|linear| Linear { key_heads: 1, value_heads: 2, ..*linear });
        let experts =
            shape.experts.as_ref().map(|_| Experts { count: 8, chosen: 2, intermediate_size: 64 });
        Shape {
            vocab_size: 4096,
            hidden_size: 128,
            intermediate_size: 192,
            layers: 8,
            heads: 2,
            kv_heads: 1,
            linear,
            experts,
            ..*shape
        }
    }

    #[test]
    fn every_shape_is_loaded_and_measured() {
        for shape in &SHAPES {
            let shape = small(shape);
            let data = tempfile::tempdir().unwrap();
            let folder = data.path().join("shape");
            write_shape(&shape, &folder).unwrap();
            assert!(write_shape(&shape, &folder).unwrap_err().to_string().contains("exists"));
            let mut config = Config::default();
            config.store.enabled = false;
            let policies = steersman_engine::policies(&config, data.path()).unwrap();
            let (mut decoder, info) =
                Decoder::load(config, &folder, data.path(), policies).unwrap();
            assert_eq!(info.family, shape.model_type, "{}", shape.name);
            let plan = Plan {
                prefill: vec![40],
                contexts: vec![16],
                rows: vec![1, 4],
                streams: vec![3],
                sums: Vec::new(),
                rounds: 1,
            };
            let mut seen = Vec::new();
            let measured =
                passes::measure_passes(&mut decoder, &plan, |done, all| seen.push((done, all)))
                    .unwrap();
            let cases: Vec<Case> = measured.iter().map(|measured| measured.case).collect();
            let expected = [
                Case::Prefill(40),
                Case::Decode(16),
                Case::Verify(1),
                Case::Verify(4),
                Case::Streams(3),
            ];
            assert_eq!(cases, expected);
            assert_eq!(seen, (0..=10).map(|done| (done, 10)).collect::<Vec<_>>());
            for measured in &measured {
                let [times] = measured.times[..] else { panic!("one round: {measured:?}") };
                let parts = times.build + times.encode + times.wait;
                assert!(times.total > 0.0 && (parts - times.total).abs() < 1e-9, "{measured:?}");
            }
        }
    }

    #[test]
    fn parameters_are_those_of_the_published_models() {
        let billions = |shape: &Shape| {
            let elements = |tensor: &Tensor| match tensor.content {
                Content::Words => 8 * tensor.shape.iter().product::<usize>(),
                Content::Random(_) => tensor.shape.iter().product(),
                Content::Bf16(_) | Content::Zeros => 0,
            };
            shape.tensors().iter().map(elements).sum::<usize>() as f64 / 1e9
        };
        let expected: [f64; SHAPES.len()] = [27.0, 27.0, 9.0, 34.7, 4.0, 8.0, 3.9];
        for (shape, expected) in SHAPES.iter().zip(expected) {
            let found = billions(shape);
            assert!((found - expected).abs() < 0.06 * expected, "{}: {found}", shape.name);
        }
    }

    #[test]
    fn unknown_shapes_are_refused() {
        let problem = write("qwen", Path::new("x")).unwrap_err().to_string();
        assert!(problem.contains("qwen3.5-9b, qwen3.6-35b-a3b"), "{problem}");
    }
}
