//! Loads a model from its folder: `config.json` selects the family, the configuration device and
//! dtype.

use std::path::Path;

use mlx_rs::{Device, DeviceType, Dtype, memory};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::storage::Storage;
use super::{FAMILIES, Model, Weights, check, model_types};
use crate::config::{self, ModelConfig};
use crate::device::{self, DeviceInfo};
use crate::error::{ConfigError, Error, Result};
use crate::kernels::cpu::{self, Activations};
use crate::kernels::cuda::{self, Capability};
use crate::kernels::metal;
use crate::nn::compile_steps;
use crate::ranks::Ranks;

/// A model ready to run, and its properties.
pub struct Loaded {
    /// The model.
    pub model: Box<dyn Model>,
    /// Its row in the table: `model_type` of `config.json`.
    pub family: &'static str,
    /// Positions it was trained for.
    pub context: usize,
    /// Tokens that it has embeddings of.
    pub embeddings: usize,
    /// Digest of config and numeric format; see [`Loaded::digest`].
    settings: [u8; 32],
    /// Whether MLX computes on the CPU.
    pub on_cpu: bool,
    /// Type of the activations.
    pub dtype: Dtype,
    /// Matrices that kernels of our own multiply with.
    pub own_kernels: usize,
    /// Device and dtype for people: `CPU, f32`.
    pub numbers: String,
}

impl Loaded {
    /// Runs a few tokens.
    ///
    /// # Errors
    /// [`Error::Model`] with `folder` if that fails, or if a number is not finite.
    pub fn probe(&self, folder: &Path) -> Result<()> {
        check::probe(&*self.model, self.embeddings)
            .map_err(|problem| Error::Config(ConfigError::Model { path: folder.into(), problem }))
    }
}

/// Tokens of context if neither `config.json` (`max_position_embeddings`) nor the family states it.
const CONTEXT: u64 = 4096;

/// Most bytes of freed buffers that MLX keeps on the CPU to use again (its default is 32 MiB). They are
/// resident memory that nothing counts.
///
/// Limits from 0 to 512 MiB cost the same processor time, within noise: prefill of 3 x 1,024 tokens 3.7
/// to 3.8 s, decoding of 3 x 128 tokens 4.2 to 4.7 s (Xeon with AVX-512, bundled model, f32;
/// `tests/tests/memory/counted.rs` repeats it).
const CPU_BUFFER_CACHE_BYTES: usize = 8 << 20;

/// Most bytes of freed buffers that MLX keeps on a GPU, where allocation is slow. Without a limit it keeps
/// almost all of the GPU's memory: the passes of a server have many shapes, and buffers of other sizes are
/// not reused.
const GPU_BUFFER_CACHE_BYTES: usize = 4 << 30;

/// [`GPU_BUFFER_CACHE_BYTES`], or an eighth of a small memory.
fn gpu_buffer_cache_bytes() -> Result<usize> {
    let limit = memory::memory_limit()? as u64;
    let (limit, _) = device::array_limit(limit, DeviceInfo::of_gpu().as_ref());
    Ok(GPU_BUFFER_CACHE_BYTES.min(usize::try_from(limit / 8).unwrap_or(usize::MAX)))
}

impl Loaded {
    /// Digest of weights, config and numeric format; `weights` is from
    /// [`WeightsDigest`](super::WeightsDigest). State is shared between models of equal digest.
    pub fn digest(&self, weights: [u8; 32]) -> [u8; 32] {
        Sha256::new().chain_update(self.settings).chain_update(weights).finalize().into()
    }
}

/// Loads the model in `folder` onto the configured device. Device and [`config::Compile`] become
/// the calling thread's.
///
/// # Errors
/// [`Error::Model`] names the file that is missing, damaged or of an unknown family.
pub fn load(folder: &Path, config: &ModelConfig) -> Result<Loaded> {
    load_part(folder, config, &Ranks::alone())
}

/// [`load`] of what one of `ranks` has of the model.
///
/// # Errors
/// [`Error::Model`] also where the ranks cannot divide a tensor.
pub fn load_part(folder: &Path, config: &ModelConfig, ranks: &Ranks) -> Result<Loaded> {
    let path = folder.join("config.json");
    let problem =
        |text: String| Error::Config(ConfigError::Model { path: path.clone(), problem: text });
    let bytes = steersman_gguf::files::read_at(&path).map_err(|e| problem(e.to_string()))?;
    let mut json = steersman_files::json(&bytes).map_err(|e| problem(e.to_string()))?;
    check::config(&mut json).map_err(&problem)?;
    let model_type = json.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let Some(family) = FAMILIES.iter().find(|family| family.model_type == model_type) else {
        let known = model_types().join(", ");
        return Err(problem(format!(
            "model_type `{model_type}` is not supported; supported are: {known}"
        )));
    };
    let text = json.get("text_config").unwrap_or(&json);
    let on_cpu = choose_device(config.device)?;
    let dtype = choose_dtype(config.dtype, on_cpu, text);
    let activations = match config.activations {
        config::Activations::Exact => Activations::Exact,
        config::Activations::Int8 if on_cpu => Activations::Int8,
        config::Activations::Int8 => {
            return Err(Error::Config(ConfigError::Key {
                field: "model.activations",
                problem: "is `int8`, which works on the CPU only; set `model.device` to `cpu`, or \
                          `exact`"
                    .into(),
            }));
        }
    };
    let as_gpu = is_gpu(config, on_cpu);
    let storage = match config.kernels {
        _ if on_cpu && config.cpu_dequantize => Storage::Dequantized,
        config::Kernels::Auto if !as_gpu => Storage::OwnKernels(activations),
        _ => Storage::Packed,
    };
    let compile = match config.compile {
        config::Compile::Auto => as_gpu,
        config::Compile::On => true,
        config::Compile::Off => false,
    };
    compile_steps(compile);
    let EnabledKernels { cuda: kernels, metal: metal_kernels } = enable_kernels(config, on_cpu);
    let buffers = if on_cpu { CPU_BUFFER_CACHE_BYTES } else { gpu_buffer_cache_bytes()? };
    memory::set_cache_limit(buffers)?;

    let mut weights = Weights::open(folder, &json, dtype, storage)?.for_ranks(ranks);
    let model = (family.load)(&json, &mut weights)?;
    weights.expect_no_scales()?;
    let embeddings = weights.embeddings();
    let unused = weights.iter().count();
    let (own_kernels, own_packed) = weights.own_kernels();
    let huge_pages_mib = weights.use_huge_pages() >> 20;
    let blas = mlx_sys::blas();
    tracing::debug!(
        family = family.model_type,
        ?dtype,
        ?storage,
        own_kernels,
        own_packed,
        huge_pages_mib,
        compile,
        cuda_kernels = ?kernels,
        metal_kernels,
        unused,
        blas,
        "model loaded"
    );

    let from_config = text.get("max_position_embeddings").and_then(Value::as_f64);
    let context = from_config.map(|x| x as u64).or(model.context()).unwrap_or(CONTEXT);
    let device = if on_cpu { "CPU" } else { "GPU" };
    let rounded = own_packed > 0 && activations == Activations::Int8;
    if activations == Activations::Int8 && !rounded {
        tracing::warn!(
            "model.activations is `int8`, but no weights are packed in 4 or 8 bits: all products are exact"
        );
    }
    let rounded = if rounded { ", products in 8 bits" } else { "" };
    let numbers = format!("{device}, {}{rounded}", dtype_name(dtype));
    let quantized = match storage {
        Storage::Dequantized => "dequantized",
        Storage::Packed if kernels.is_some() || metal_kernels => "as stored, own kernels",
        Storage::Packed => "as stored",
        Storage::OwnKernels(_) => "own kernels",
    };
    let part = match ranks.are_several() {
        true => format!(", rank {} of {}", ranks.index(), ranks.count()),
        false => String::new(),
    };
    Ok(Loaded {
        model,
        family: family.model_type,
        context: usize::try_from(context).unwrap_or(usize::MAX),
        embeddings,
        settings: Sha256::new()
            .chain_update(format!("{numbers}, {quantized}{part}"))
            .chain_update(&bytes)
            .finalize()
            .into(),
        on_cpu,
        dtype,
        own_kernels,
        numbers,
    })
}

/// Makes the configured device the default; true for the CPU.
///
/// # Errors
/// [`Error::Config`] if it is a GPU, and there is none.
pub fn choose_device(configured: config::Device) -> Result<bool> {
    let on_cpu = on_cpu(configured)?;
    Device::set_default(&if on_cpu { Device::cpu() } else { Device::gpu() });
    Ok(on_cpu)
}

/// The kernels that layers on a thread use.
pub struct EnabledKernels {
    /// The CUDA device for which there are some.
    pub cuda: Option<Capability>,
    /// Whether those for Metal are used, on a Mac or under an emulation.
    pub metal: bool,
}

/// Makes layers on this thread use our own kernels of the device, if `config` allows it.
pub fn enable_kernels(config: &ModelConfig, on_cpu: bool) -> EnabledKernels {
    let is_allowed = config.kernels == config::Kernels::Auto;
    let as_gpu = is_gpu(config, on_cpu);
    cpu::enable(is_allowed && !as_gpu);
    let capability = if on_cpu || !is_allowed { None } else { Capability::of_device() };
    EnabledKernels { cuda: cuda::enable(capability), metal: metal::enable(is_allowed && as_gpu) }
}

/// Whether layers are those of a GPU. A test that emulates Metal has what a Mac has.
fn is_gpu(config: &ModelConfig, on_cpu: bool) -> bool {
    !on_cpu || (config.kernels == config::Kernels::Auto && metal::is_emulated())
}

/// Whether MLX is to compute on the CPU.
///
/// # Errors
/// [`Error::Config`] if the configuration asks for a GPU and there is none.
pub fn on_cpu(configured: config::Device) -> Result<bool> {
    // Until it is set, MLX's default is the GPU if there is one.
    let has_gpu = matches!(Device::try_default()?.get_type()?, DeviceType::Gpu);
    match configured {
        config::Device::Auto => Ok(!has_gpu),
        config::Device::Cpu => Ok(true),
        config::Device::Gpu if has_gpu => Ok(false),
        config::Device::Gpu => Err(Error::Config(ConfigError::Key {
            field: "model.device",
            problem: "is `gpu`, but this MLX finds none; build with `--features cuda` or \
                      `--features metal`, or set `cpu`"
                .into(),
        })),
    }
}

fn choose_dtype(configured: config::Dtype, on_cpu: bool, text: &Value) -> Dtype {
    match configured {
        config::Dtype::F32 => Dtype::Float32,
        config::Dtype::Bf16 => Dtype::Bfloat16,
        config::Dtype::F16 => Dtype::Float16,
        config::Dtype::Auto if on_cpu => Dtype::Float32,
        config::Dtype::Auto => {
            let from_config = text.get("dtype").or_else(|| text.get("torch_dtype"));
            match from_config.and_then(Value::as_str) {
                Some("float32") => Dtype::Float32,
                Some("float16") => Dtype::Float16,
                _ => Dtype::Bfloat16,
            }
        }
    }
}

/// The dtype's name in safetensors files.
fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float32 => "f32",
        Dtype::Float16 => "f16",
        _ => "bf16",
    }
}
