//! What the engine finds on this machine and chooses by it, for `steersman doctor` and `steersman init`.
//!
//! Choices come from the functions that choose when a model is loaded. What is measured here is a bound on what a model
//! reaches: the rate at which weights can be read, and the products of prefill.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use mlx_rs::ops::{matmul, ones_dtype};
use mlx_rs::random::{key, normal};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use steersman_cpu_kernels::{
    Activations, Biases, Floats, FloatsMut, Isa, Packed, max_threads, product,
};

use crate::config::{self, Config};
use crate::decode::max_running;
pub use crate::device::chip::Chip;
use crate::device::chip::gpu_cores;
use crate::error::{Error, Result};
use crate::kernels::cuda::Capability;
use crate::model::choose_device;
use crate::processor::{gpu_registry, isa_name};
pub use crate::processor::{processor, sysctl};
use crate::schedule::memory;

/// Operations that a GPU gets at a time.
const QUEUED: usize = 8;

/// Time for each measurement, at most, after the first run.
const MEASURING: Duration = Duration::from_millis(400);

/// Most runs of a measurement.
const RUNS: usize = 20;

/// Bytes that are read to measure the memory's rate on a CPU: more than caches hold.
const READ_BYTES: usize = 256 << 20;

/// As [`READ_BYTES`], of a GPU.
const GPU_READ_BYTES: usize = 1 << 30;

/// Rows and columns of the matrices whose product is measured, on a CPU and on a GPU.
const SIZE: [i32; 2] = [1024, 4096];

/// Outputs, inputs and group size of the packed matrix whose product with one row is measured: 32 MiB in 4 bits, more
/// than most caches hold.
const PACKED: [usize; 3] = [16_384, 4096, 64];

/// The machine, and what the engine chooses by it.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// Version of MLX's library.
    pub mlx: String,
    /// Whether models compute on a CPU.
    pub on_cpu: bool,
    /// Name of the GPU, if models compute on one.
    pub gpu: Option<String>,
    /// What computes f32 products on the CPU: OpenBLAS's configuration, or `None` for MLX's own BLAS.
    pub blas: Option<String>,
    /// The Apple chip that computes, if it is one that the table knows.
    pub chip: Option<Chip>,
    /// Number of its GPU cores, if the system tells.
    pub gpu_cores: Option<u32>,
    /// Instructions of our own kernels for the CPU.
    pub cpu_kernels: &'static str,
    /// Compute capability for which our own CUDA kernels run; `None` if they do not.
    pub cuda_kernels: Option<String>,
    /// Cores that the process may use.
    pub cores: usize,
    /// Most bytes of arrays, and what sets this limit.
    pub memory_limit: (u64, &'static str),
    /// Requests that run at the same time.
    pub max_running: usize,
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Bytes of the device's memory that are read in a second.
    pub read_bytes: f64,
    /// Operations a second of a product of large matrices: in f32 on a CPU, in bf16 on a GPU.
    pub product_flops: f64,
    /// Bytes of packed weights a second of our own kernel for one row; `None` on a GPU.
    pub packed_bytes: Option<f64>,
}

impl Machine {
    /// Inspects this machine as `config` says. Makes its device the default of this thread.
    ///
    /// # Errors
    /// If the configured device does not exist.
    pub fn inspect(config: &Config) -> Result<Self> {
        let on_cpu = choose_device(config.model.device)?;
        let own = !on_cpu && config.model.kernels == config::Kernels::Auto;
        Ok(Self {
            mlx: mlx_sys::version(),
            on_cpu,
            gpu: if on_cpu { None } else { mlx_sys::gpu_name() },
            blas: mlx_sys::blas(),
            chip: Chip::named(&processor()).copied(),
            gpu_cores: gpu_registry().and_then(|registry| gpu_cores(&registry)),
            cpu_kernels: isa_name(Isa::best()),
            cuda_kernels: own.then(Capability::of_device).flatten().map(|c| c.to_string()),
            cores: max_threads(),
            memory_limit: memory::find_limit(config.engine.memory_limit_bytes)?,
            max_running: max_running(config.engine.max_running),
        })
    }

    /// Measures this machine in less than three seconds, most of them for the first runs.
    ///
    /// # Errors
    /// If MLX fails.
    pub fn measure(&self) -> Result<Speed> {
        Ok(Speed {
            read_bytes: if self.on_cpu { self.read() } else { read_on_gpu()? },
            product_flops: self.multiply()?,
            packed_bytes: if self.on_cpu { Some(multiply_packed()?) } else { None },
        })
    }

    /// Bytes a second that all cores read together.
    fn read(&self) -> f64 {
        let words = vec![1u64; READ_BYTES / size_of::<u64>()];
        let seconds = best(|| {
            thread::scope(|scope| {
                for part in words.chunks(words.len().div_ceil(self.cores)) {
                    // Independent sums, so that none waits for another.
                    scope.spawn(move || {
                        let mut sums = [0u64; 32];
                        for words in part.chunks_exact(sums.len()) {
                            sums.iter_mut().zip(words).for_each(|(sum, word)| *sum ^= word);
                        }
                        black_box(sums)
                    });
                }
            });
            Ok(())
        });
        READ_BYTES as f64 / seconds.unwrap_or(f64::INFINITY)
    }

    /// Operations a second of a product of two square matrices.
    fn multiply(&self) -> Result<f64> {
        let size = SIZE[usize::from(!self.on_cpu)];
        let dtype = if self.on_cpu { Dtype::Float32 } else { Dtype::Bfloat16 };
        // Not of zeros or ones, with which GPUs take less power and run faster.
        let matrix = |seed| -> Result<Array> {
            Ok(normal::<f32>(&[size, size], None, None, &key(seed)?)?.as_dtype(dtype)?)
        };
        let [a, b] = [matrix(1)?, matrix(2)?];
        eval([&a, &b])?;
        let seconds = if self.on_cpu {
            best(|| Ok(eval([&matmul(&a, &b)?])?))?
        } else {
            best_on_gpu(|| Ok(matmul(&a, &b)?))?
        };
        Ok(2.0 * f64::from(size).powi(3) / seconds)
    }
}

/// Bytes a second that a GPU reads: a sum over them writes next to nothing.
fn read_on_gpu() -> Result<f64> {
    let length = i32::try_from(GPU_READ_BYTES / size_of::<f32>()).unwrap_or(i32::MAX);
    let x = ones_dtype(&[length], Dtype::Float32)?;
    eval([&x])?;
    let seconds = best_on_gpu(|| Ok(x.sum(None)?))?;
    Ok(GPU_READ_BYTES as f64 / seconds)
}

/// Seconds of an operation of some that a GPU runs one after another, so that it does not wait for the host.
fn best_on_gpu(operation: impl Fn() -> Result<Array>) -> Result<f64> {
    let seconds = best(|| {
        let results: Vec<Array> = (0..QUEUED).map(|_| operation()).collect::<Result<_>>()?;
        Ok(eval(&results)?)
    })?;
    Ok(seconds / QUEUED as f64)
}

/// Bytes a second of packed weights, as in a step of one sequence.
fn multiply_packed() -> Result<f64> {
    let [rows, columns, group_size] = PACKED;
    let groups = vec![0.01; rows * columns / group_size];
    let words = vec![0x1234_5678; rows * columns / 8];
    let scales = Floats::F32(&groups);
    let biases = Biases::Stored(scales);
    let matrix = Packed { words: &words, scales, biases, rows, columns, group_size, bits: 4 };
    let (x, mut y) = (vec![1.0; columns], vec![0.0; rows]);
    let seconds = best(|| {
        product(Activations::Exact, Floats::F32(&x), matrix, FloatsMut::F32(&mut y))
            .map_err(|error| Error::Array(error.to_string()))
    })?;
    Ok((size_of_val(&words[..]) + 2 * size_of_val(&groups[..])) as f64 / seconds)
}

/// Seconds of the fastest of some runs, after one that warms up.
fn best(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    let (start, mut best) = (Instant::now(), Duration::MAX);
    for _ in 0..RUNS {
        let before = Instant::now();
        run()?;
        best = best.min(before.elapsed());
        if start.elapsed() > MEASURING {
            break;
        }
    }
    Ok(best.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_configured_wins() {
        let mut config = Config::default();
        config.model.device = config::Device::Cpu;
        let machine = Machine::inspect(&config).unwrap();
        assert_eq!((machine.on_cpu, machine.max_running, &machine.gpu), (true, 32, &None));
        assert_ne!(machine.memory_limit.1, "engine.memory_limit_bytes");
        assert!(!machine.mlx.is_empty() && machine.cores > 0, "{machine:?}");
        (config.engine.max_running, config.engine.memory_limit_bytes) = (3, 64 << 20);
        let machine = Machine::inspect(&config).unwrap();
        assert_eq!(machine.max_running, 3);
        assert_eq!(machine.memory_limit, (64 << 20, "engine.memory_limit_bytes"));
    }
}
