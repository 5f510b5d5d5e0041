//! A GGUF file as a checkpoint: `config.json` and the tensors under MLX's names.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::thread;

use half::{bf16, f16};
use serde_json::{Map, Value, json};

use crate::arch::{ARCHITECTURES, Architecture, Change, FACTORS, NEXT_TOKENS, OUTSIDE, Part};
use crate::error::{Error, Result};
use crate::order::Order;
use crate::parts::joined;
use crate::quants::{self, Codes, GROUP, Type};
use crate::reader::{self, Entry, Header};

/// Most layers, as in the checks of `config.json`.
const LAYERS: u64 = 1 << 14;
/// Most elements of a tensor that `config.json` holds.
const FACTOR_ELEMENTS: usize = 1 << 14;
/// Most threads that convert a tensor.
const THREADS: usize = 8;
/// Bytes from which a tensor is converted by several threads.
const PART_BYTES: usize = 1 << 20;
/// Changes whenever the same file is read as other numbers: saved state depends on them.
const CONVERSION: u64 = 1;

/// A GGUF file of a known architecture.
pub struct Model {
    header: Header,
    architecture: &'static Architecture,
    tensors: Vec<Tensor>,
}

/// A tensor under MLX's name.
#[derive(Debug)]
pub struct Tensor {
    /// `model.layers.0.mlp.up_proj.weight`
    pub name: String,
    /// The shape for MLX; the last dimension is contiguous.
    pub shape: Vec<usize>,
    entry: Entry,
    change: Change,
    order: Order,
}

/// How a quantized matrix is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As f32.
    Floats,
    /// Packed, with the bits of its type.
    Packed,
    /// Packed with 4 or 8 bits.
    PackedEvenly,
}

/// Numbers of a tensor.
#[derive(Debug, PartialEq)]
pub enum Data {
    /// As they are.
    Floats(Floats),
    /// A matrix, or a stack of them, in MLX's affine format with groups of [`GROUP`].
    Packed {
        /// Bits of a code.
        bits: usize,
        /// [.., rows, columns * bits / 32]
        codes: Vec<u32>,
        /// [.., rows, columns / GROUP]
        scales: Floats,
        /// [.., rows, columns / GROUP]
        biases: Floats,
    },
}

/// Floats of one type.
#[derive(Debug, PartialEq)]
#[allow(missing_docs, reason = "the types' names")]
pub enum Floats {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// Numbers of the file by which `config.json` is written.
pub(crate) struct Facts<'a> {
    header: &'a Header,
    pub architecture: &'static str,
    /// Layers without those for multi-token prediction.
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub head_dim: u64,
}

impl Facts<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// `ARCHITECTURE.NAME`
    pub fn number(&self, name: &str) -> Result<u64> {
        self.optional(name)?
            .ok_or_else(|| Error::new(format!("the metadata key `{}` is missing", self.key(name))))
    }

    /// `ARCHITECTURE.NAME`, if there is such a key.
    pub fn optional(&self, name: &str) -> Result<Option<u64>> {
        self.header.number(&self.key(name))
    }

    /// `ARCHITECTURE.NAME`, if it is an array.
    pub fn by_layer(&self, name: &str) -> Option<&[f64]> {
        match self.header.get(&self.key(name)) {
            Some(reader::Value::Numbers(numbers)) => Some(numbers),
            _ => None,
        }
    }

    /// `ARCHITECTURE.NAME`, in the shortest decimal form of its f32.
    pub fn float(&self, name: &str) -> Result<Option<f64>> {
        let stored = self.header.float(&self.key(name))?;
        Ok(stored.map(|x| (x as f32).to_string().parse().unwrap_or(x)))
    }

    /// `layer_types`.
    pub fn kinds(&self, kind: impl Fn(u64) -> &'static str) -> Value {
        (0..self.layers).map(|layer| Value::from(kind(layer))).collect()
    }
}

impl Model {
    /// Opens the file at `path`, which is the first part of a model in parts.
    ///
    /// # Errors
    /// If it is damaged, or its architecture or one of its tensors is not supported.
    pub fn open(path: &Path) -> Result<Self> {
        let header = joined(Header::read(path)?)?;
        let architecture = architecture(&header)?;
        let mut model = Self { header, architecture, tensors: Vec::new() };
        model.tensors = model.map_tensors()?;
        Ok(model)
    }

    /// The file of the model, or the files of its parts.
    pub fn files(&self) -> &[PathBuf] {
        &self.header.files
    }

    /// Its weights.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn facts(&self) -> Result<Facts<'_>> {
        let mut facts = Facts {
            header: &self.header,
            architecture: self.architecture.name,
            layers: 0,
            hidden: 0,
            heads: 0,
            head_dim: 0,
        };
        let all = facts.number("block_count")?;
        let next = facts.optional("nextn_predict_layers")?.unwrap_or(0);
        (facts.hidden, facts.heads) =
            (facts.number("embedding_length")?, facts.number("attention.head_count")?);
        let name = self.architecture.name;
        let wrong = |key: &str, value: u64| {
            Error::new(format!("`{name}.{key}` is {value}, which makes no sense"))
        };
        facts.layers = match all.checked_sub(next) {
            Some(layers) if (1..=LAYERS).contains(&layers) => layers,
            _ => return Err(wrong("block_count", all)),
        };
        if facts.heads == 0 {
            return Err(wrong("attention.head_count", 0));
        }
        let head_dim = facts.optional("attention.key_length")?;
        facts.head_dim = head_dim.unwrap_or(facts.hidden / facts.heads);
        Ok(facts)
    }

    /// `config.json` of the checkpoint that the file was converted from, as far as it matters.
    ///
    /// # Errors
    /// Names the metadata key that is missing or wrong.
    pub fn config(&self) -> Result<Value> {
        let facts = self.facts()?;
        let heads = facts.heads;
        let rope_dims = facts.optional("rope.dimension_count")?;
        let part = rope_dims.filter(|dims| *dims != facts.head_dim && facts.head_dim > 0);
        let part = part.map(|dims| dims as f64 / facts.head_dim as f64);
        let embeddings = self.header.tensor("token_embd.weight");
        let embeddings = embeddings.and_then(|tensor| tensor.shape.first());
        let mut config = json!({
            "model_type": self.architecture.model_type,
            "vocab_size": embeddings,
            "hidden_size": facts.hidden,
            "intermediate_size": facts.optional("feed_forward_length")?,
            "num_hidden_layers": facts.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": facts.optional("attention.head_count_kv")?.unwrap_or(heads),
            "head_dim": facts.head_dim,
            "rms_norm_eps": facts.float("attention.layer_norm_rms_epsilon")?,
            "max_position_embeddings": facts.optional("context_length")?,
            "rope_theta": facts.float("rope.freq_base")?,
            "partial_rotary_factor": part,
            "rope_scaling": self.rope_scaling(&facts)?,
            "tie_word_embeddings": self.header.tensor("output.weight").is_none(),
            "gguf_conversion": CONVERSION,
        });
        if let Some(keys) = config.as_object_mut() {
            keys.extend((self.architecture.keys)(&facts)?);
            keys.retain(|_, value| !value.is_null());
        }
        Ok(config)
    }

    /// How rotary frequencies deviate from the powers of their base.
    fn rope_scaling(&self, facts: &Facts<'_>) -> Result<Option<Value>> {
        let trained = facts.optional("rope.scaling.original_context_length")?;
        let attention = facts.float("rope.scaling.attn_factor")?;
        if let Some(factors) = self.factors("rope_freqs.weight")? {
            // Llama 3's, worked out by the converter: wavelengths are multiplied, for all prompts.
            return Ok(Some(json!({
                "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
                "attention_factor": 1.0,
            })));
        }
        let [long, short] = ["rope_factors_long.weight", "rope_factors_short.weight"]
            .map(|name| self.factors(name));
        if let (Some(long), Some(short)) = (long?, short?) {
            return Ok(Some(json!({
                "rope_type": "longrope", "short_factor": short, "long_factor": long,
                "attention_factor": attention, "original_max_position_embeddings": trained,
            })));
        }
        let factor = facts.float("rope.scaling.factor")?;
        let factor = factor.or(facts.float("rope.scale_linear")?).filter(|factor| *factor != 0.0);
        let key = facts.key("rope.scaling.type");
        match (self.header.text(&key)?, factor) {
            (Some("none"), _) | (_, None) => Ok(None),
            (Some("linear") | None, Some(factor)) => {
                Ok(Some(json!({"rope_type": "linear", "factor": factor})))
            }
            (Some("yarn"), Some(factor)) => {
                // llama.cpp's factor comes on top of the growth that yarn defines.
                let grown = 0.1 * factor.max(1.0).ln() + 1.0;
                Ok(Some(json!({
                    "rope_type": "yarn", "factor": factor,
                    "original_max_position_embeddings": trained,
                    "beta_fast": facts.float("rope.scaling.yarn_beta_fast")?,
                    "beta_slow": facts.float("rope.scaling.yarn_beta_slow")?,
                    "attention_factor": attention.map(|factor| factor * grown),
                })))
            }
            (Some(other), _) => Err(Error::new(format!(
                "`{key}` is `{other}`, which is not supported; supported are none, linear and yarn"
            ))),
        }
    }

    /// The numbers of a small tensor.
    fn factors(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(entry) = self.header.tensor(name) else { return Ok(None) };
        if entry.shape.iter().product::<usize>() > FACTOR_ELEMENTS {
            return Err(Error::new(format!("tensor `{name}` has the shape {:?}", entry.shape)));
        }
        let numbers = quants::floats(entry.kind, &self.bytes(entry)?);
        if numbers.iter().any(|x| !x.is_finite()) {
            return Err(Error::new(format!("tensor `{name}` holds numbers that are not finite")));
        }
        Ok(Some(numbers))
    }

    fn map_tensors(&self) -> Result<Vec<Tensor>> {
        let facts = self.facts()?;
        let entries = self.header.tensors.iter();
        let weights = entries.filter(|entry| !FACTORS.contains(&entry.name.as_str()));
        weights.map(|entry| self.map_tensor(entry, &facts)).collect()
    }

    fn map_tensor(&self, entry: &Entry, facts: &Facts<'_>) -> Result<Tensor> {
        let Some((name, change)) = self.name_of(&entry.name, facts.layers) else {
            return Err(Error::new(format!(
                "tensor `{}` is no part of the architecture `{}` as it is supported",
                entry.name, self.architecture.name
            )));
        };
        let change = if change == Change::Norm { self.architecture.norms } else { change };
        let shape = &entry.shape;
        let misfit = |what: &str| {
            Error::new(format!(
                "tensor `{}` has the shape {shape:?}, which does not fit {what}",
                entry.name
            ))
        };
        let rows = shape.first().copied().unwrap_or(1);
        let halves = |heads: u64| match usize::try_from(heads) {
            Ok(heads) if heads > 0 && rows % (2 * heads) == 0 => {
                Ok(Order::Halves { size: rows / heads })
            }
            _ => Err(misfit("the number of heads")),
        };
        let order = match change {
            Change::Queries => halves(facts.heads)?,
            Change::Keys => {
                halves(facts.optional("attention.head_count_kv")?.unwrap_or(facts.heads))?
            }
            Change::None | Change::Norm | Change::PlusOne | Change::Row => Order::Same,
            _ => {
                let small = |name: &str| {
                    let number = facts.number(name)?;
                    match usize::try_from(number) {
                        Ok(n) if (1..1 << 20).contains(&n) => Ok(n),
                        _ => {
                            let key = facts.key(name);
                            Err(Error::new(format!("`{key}` is {number}, which makes no sense")))
                        }
                    }
                };
                let [heads, keys] = [small("ssm.time_step_rank")?, small("ssm.group_count")?];
                let [values, state] = [small("ssm.inner_size")?, small("ssm.state_size")?];
                if heads % keys != 0 || values % heads != 0 {
                    return Err(misfit("its heads of keys and values"));
                }
                let (skip, size) = match change {
                    Change::MixedRows | Change::Taps => (2 * keys * state, values / heads),
                    Change::ValueRows | Change::ValueColumns => (0, values / heads),
                    _ => (0, 1),
                };
                let columns = shape.last().copied().unwrap_or(1);
                let found = if change == Change::ValueColumns { columns } else { rows };
                if found != skip + heads * size {
                    return Err(misfit("its heads of keys and values"));
                }
                Order::Heads { skip, keys, per_key: heads / keys, size }
            }
        };
        let can_order = match (shape.len(), change) {
            (1, change) => change != Change::ValueColumns && entry.kind.block() == 1,
            (dimensions, _) => dimensions == 2,
        };
        if !matches!(order, Order::Same) && !can_order {
            return Err(misfit("its part of the layer"));
        }
        let mut shape = shape.clone();
        match change {
            Change::Taps if shape.len() == 2 => shape.push(1),
            Change::Row if shape.len() == 1 => shape.insert(0, 1),
            _ => {}
        }
        Ok(Tensor { name, shape, entry: entry.clone(), change, order })
    }

    /// MLX's name of a tensor.
    fn name_of(&self, name: &str, layers: u64) -> Option<(String, Change)> {
        let find =
            |parts: &'static [Part], part: &str| parts.iter().find(|(theirs, ..)| *theirs == part);
        // `ssm_a` has no ending.
        let named = |name: &str| match name.rsplit_once('.') {
            Some((part, ending @ ("weight" | "bias"))) => {
                (part.to_string(), Some(ending.to_string()))
            }
            _ => (name.to_string(), None),
        };
        let Some(within) = name.strip_prefix("blk.") else {
            let (part, ending) = named(name);
            let (_, ours, change) = find(OUTSIDE, &part)?;
            return Some((format!("{ours}.{}", ending?), *change));
        };
        let (layer, within) = within.split_once('.')?;
        let layer: u64 = layer.parse().ok()?;
        let (part, ending) = named(within);
        if layer >= layers
            && let Some((_, ours, change)) = find(NEXT_TOKENS, &part)
        {
            return Some((format!("{ours}.{}", ending?), *change));
        }
        let (_, ours, change) =
            self.architecture.parts.iter().find_map(|parts| find(parts, &part))?;
        let at = match layer.checked_sub(layers) {
            None => format!("model.layers.{layer}.{ours}"),
            Some(after) => format!("mtp.layers.{after}.{ours}"),
        };
        // MLX's names of these two have no ending.
        let bare = ours.ends_with("A_log") || ours.ends_with("dt_bias");
        Some((if bare { at } else { format!("{at}.{}", ending?) }, *change))
    }

    /// Bytes of a tensor.
    fn bytes(&self, entry: &Entry) -> Result<Vec<u8>> {
        let failed = |error: std::io::Error| {
            Error::new(format!("tensor `{}` cannot be read: {error}", entry.name))
        };
        let mut file = steersman_files::open(&self.header.files[entry.part]).map_err(failed)?;
        file.seek(SeekFrom::Start(entry.start)).map_err(failed)?;
        // The header was checked against the size of the file.
        let mut bytes = vec![0; entry.bytes];
        file.read_exact(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    /// Reads a tensor of this model.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&self, tensor: &Tensor, form: Form) -> Result<Data> {
        let entry = &tensor.entry;
        let mut bytes = self.bytes(entry)?;
        let columns = entry.shape.last().copied().unwrap_or(1);
        if entry.shape.len() > 1 {
            let row = columns / entry.kind.block() * entry.kind.bytes();
            bytes = tensor.in_order(bytes, row, Tensor::orders_rows);
        } else {
            bytes = tensor.in_order(bytes, entry.kind.bytes(), |_| entry.kind.block() == 1);
        }
        if let Some(bits) = tensor.bits(form) {
            let codes = in_parts(entry.kind, &bytes, |part| quants::pack(entry.kind, part, bits));
            let mut all = Codes::default();
            for part in codes {
                all.words.extend(part.words);
                all.scales.extend(part.scales);
                all.biases.extend(part.biases);
            }
            drop(bytes);
            if tensor.change == Change::ValueColumns {
                all = tensor.columns_in_order(all, columns / GROUP, bits);
            }
            return Ok(Data::Packed {
                bits,
                codes: all.words,
                scales: short(all.scales),
                biases: short(all.biases),
            });
        }
        if tensor.is_plain() && entry.kind == Type::F16 {
            let numbers = bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b));
            return Ok(Data::Floats(Floats::F16(numbers.collect())));
        }
        if tensor.is_plain() && entry.kind == Type::BF16 {
            let numbers = bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b));
            return Ok(Data::Floats(Floats::Bf16(numbers.collect())));
        }
        let mut numbers =
            in_parts(entry.kind, &bytes, |part| quants::floats(entry.kind, part)).concat();
        match tensor.change {
            Change::PlusOne => numbers.iter_mut().for_each(|x| *x -= 1.0),
            Change::Decay => numbers.iter_mut().for_each(|x| *x = (-*x).ln()),
            Change::ValueColumns => {
                let row = |row: &[f32]| -> Vec<f32> {
                    (0..columns).map(|i| row[tensor.order.source(i)]).collect()
                };
                numbers = numbers.chunks_exact(columns).flat_map(row).collect();
            }
            _ => {}
        }
        Ok(Data::Floats(Floats::F32(numbers)))
    }

    /// The tensors as the header of a safetensors file lists them: type and shape by name.
    pub fn listing(&self) -> Map<String, Value> {
        let mut listing = Map::new();
        for tensor in &self.tensors {
            let mut add = |name: String, dtype: &str, shape: &[usize]| {
                listing.insert(name, json!({"dtype": dtype, "shape": shape}));
            };
            let Some(bits) = tensor.bits(Form::Packed) else {
                let dtype = match tensor.entry.kind {
                    Type::F16 if tensor.is_plain() => "F16",
                    Type::BF16 if tensor.is_plain() => "BF16",
                    _ => "F32",
                };
                add(tensor.name.clone(), dtype, &tensor.shape);
                continue;
            };
            let dtype = match tensor.entry.kind {
                Type::Q4_K | Type::Q5_K | Type::Q6_K => "F32",
                _ => "F16",
            };
            add(tensor.name.clone(), "U32", &tensor.packed_shape(bits));
            let layer = tensor.layer();
            for part in ["scales", "biases"] {
                add(format!("{layer}.{part}"), dtype, &tensor.group_shape());
            }
        }
        listing
    }
}

impl Tensor {
    /// Its name without `.weight`.
    pub fn layer(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }

    /// Whether it is a stack of matrices.
    pub fn is_stack(&self) -> bool {
        self.entry.shape.len() > 2
    }

    /// The shape of packed codes, in words.
    pub fn packed_shape(&self, bits: usize) -> Vec<usize> {
        self.with_columns(|columns| columns / GROUP * bits)
    }

    /// The shape of scales and biases.
    pub fn group_shape(&self) -> Vec<usize> {
        self.with_columns(|columns| columns / GROUP)
    }

    fn with_columns(&self, change: impl Fn(usize) -> usize) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(columns) = shape.last_mut() {
            *columns = change(*columns);
        }
        shape
    }

    /// Bits of its codes in this form; `None` if its numbers are floats.
    fn bits(&self, form: Form) -> Option<usize> {
        let bits = self.entry.kind.bits()?;
        let can = match (self.change, self.order) {
            // Groups must move as wholes.
            (Change::ValueColumns, Order::Heads { size, .. }) => size.is_multiple_of(GROUP),
            (change, _) => {
                !matches!(change, Change::PlusOne | Change::Decay | Change::Taps | Change::Row)
            }
        };
        let can = can && self.entry.shape.len() > 1 && self.name.ends_with(".weight");
        match form {
            Form::Floats => None,
            Form::Packed => can.then_some(bits),
            Form::PackedEvenly => can.then_some(if bits == 4 { 4 } else { 8 }),
        }
    }

    /// Whether its numbers are those of the file, in another order at most.
    fn is_plain(&self) -> bool {
        !matches!(self.change, Change::PlusOne | Change::Decay | Change::ValueColumns)
    }

    fn orders_rows(&self) -> bool {
        self.change != Change::ValueColumns
    }

    /// Brings rows of `row` bytes into the order of the checkpoint.
    fn in_order(&self, bytes: Vec<u8>, row: usize, ordered: impl Fn(&Self) -> bool) -> Vec<u8> {
        if matches!(self.order, Order::Same) || row == 0 || !ordered(self) {
            return bytes;
        }
        let mut ordered = Vec::with_capacity(bytes.len());
        for i in 0..bytes.len() / row {
            let at = self.order.source(i) * row;
            ordered.extend_from_slice(&bytes[at..at + row]);
        }
        ordered
    }

    /// Brings groups of columns into the order of the checkpoint, in rows of `groups`.
    fn columns_in_order(&self, codes: Codes, groups: usize, bits: usize) -> Codes {
        let mut ordered = Codes::default();
        for row in 0..codes.scales.len() / groups.max(1) {
            for group in 0..groups {
                let at = row * groups + self.order.source(group * GROUP) / GROUP;
                ordered.words.extend_from_slice(&codes.words[at * bits..(at + 1) * bits]);
                ordered.scales.push(codes.scales[at]);
                ordered.biases.push(codes.biases[at]);
            }
        }
        ordered
    }
}

/// `convert` of whole blocks, on several threads if they are many.
fn in_parts<T: Send>(kind: Type, bytes: &[u8], convert: impl Fn(&[u8]) -> T + Sync) -> Vec<T> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let blocks = bytes.len() / kind.bytes();
    if threads == 1 || bytes.len() < PART_BYTES {
        return vec![convert(bytes)];
    }
    let part = blocks.div_ceil(threads).max(1) * kind.bytes();
    thread::scope(|scope| {
        let parts = bytes.chunks(part).map(|part| scope.spawn(|| convert(part)));
        let parts: Vec<_> = parts.collect();
        parts.into_iter().map(|part| part.join().expect("converting does not panic")).collect()
    })
}

/// Numbers in f16 if that is exact.
fn short(numbers: Vec<f32>) -> Floats {
    quants::exact_f16(&numbers).map_or(Floats::F32(numbers), Floats::F16)
}

fn architecture(header: &Header) -> Result<&'static Architecture> {
    let Some(name) = header.text("general.architecture")? else {
        return Err(Error::new("the metadata key `general.architecture` is missing"));
    };
    ARCHITECTURES.iter().find(|known| known.name == name).ok_or_else(|| {
        let known: Vec<_> = ARCHITECTURES.iter().map(|known| known.name).collect();
        Error::new(format!(
            "the architecture `{name}` is not supported; supported are: {}",
            known.join(", ")
        ))
    })
}
