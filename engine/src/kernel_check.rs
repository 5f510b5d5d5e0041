//! The check of our own kernels on the user's device: each against the operations that are its reference.
//!
//! Kernels are tested before a release, on the devices that we have. On others a compiler may refuse one, or make
//! something else of it: such a kernel is turned off by name before a model is loaded, and layers compute its reference.
//! So a new device may be slower, and never gives wrong tokens or fails to start because of a kernel.
//!
//! Checks run once for each device, program and choice of kernels; their results are in the folder `kernel-checks` of the
//! data folder. The start of each check is noted there, so that a kernel that ends the process, or never returns, is off
//! after some starts. A check that a user or another process has interrupted runs again.

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Instant, UNIX_EPOCH};

use mlx_rs::ops::concatenate;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype, random};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use steersman_cpu_kernels::Isa;

use crate::cache::{Cache, Full, LayerCache, Span};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::file::{self, replace_private};
use crate::kernels::cpu::{self, Activations};
use crate::kernels::cuda::Tiled;
use crate::kernels::{self, KernelKind, Mode, Quantization};
use crate::model::{choose_device, enable_kernels};
use crate::nn::{
    Block, Dense, Experts, Gate, GatedDelta, GatedMlp, Heads, Joined, Linear, Mlp, Moe, Outputs,
    OwnKernel, Packed, RmsNorm, Rope, Scores, attention, swiglu,
};
use crate::processor::{isa_name, processor};

/// Version of the file's format and of the checks.
const VERSION: u32 = 1;

/// Largest difference from the reference over its largest value, in f32: products of MLX on a GPU have 10 bits.
const BOUND_F32: f32 = 5e-3;

/// As [`BOUND_F32`], in bfloat16 with 8 bits.
const BOUND_BF16: f32 = 8e-2;

/// Checks of a kernel that may be interrupted; then it is off.
const INTERRUPTIONS: u32 = 3;

/// Most bytes of a file with results.
const FILE_BYTES: u64 = 64 << 10;

/// How a kernel compares with its reference on this device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The largest difference, over the largest value.
    Equal(f32),
    /// Why it is off.
    Off(String),
    /// How many checks have begun; none of them has ended.
    Unfinished(u32),
}

/// Outcomes by the names of the kernels.
pub type Outcomes = BTreeMap<String, Outcome>;

/// A check: computes something with the kernel as it is switched on this thread, in a type of activations.
struct Check {
    kernel: KernelKind,
    /// Further kernels without which it does not run.
    needs: &'static [KernelKind],
    run: fn(Dtype) -> Result<Vec<Array>>,
}

/// All checks. A kernel of a new device needs a row only if it computes something else.
const CHECKS: [Check; 8] = [
    Check { kernel: KernelKind::Norm, needs: &[], run: run_norm },
    Check { kernel: KernelKind::Gate, needs: &[], run: run_gate },
    Check { kernel: KernelKind::Products, needs: &[], run: run_products },
    Check { kernel: KernelKind::Attention, needs: &[], run: run_attention },
    Check { kernel: KernelKind::Heads, needs: &[KernelKind::Attention], run: run_heads },
    Check { kernel: KernelKind::GatedDelta, needs: &[], run: run_gated_delta },
    Check { kernel: KernelKind::Rewind, needs: &[KernelKind::GatedDelta], run: run_rewind },
    Check { kernel: KernelKind::Experts, needs: &[KernelKind::Products], run: run_experts },
];

/// Checks the kernels that `config` lets models use, unless the folder `data` has the results of this device, and turns
/// those off that failed.
///
/// # Errors
/// If the device does not exist.
pub fn apply(config: &ModelConfig, data: &Path) -> Result<()> {
    let on_cpu = choose_device(config.device)?;
    enable_kernels(config, on_cpu);
    let file = File::new(config, on_cpu, data);
    let mut outcomes = file.read();
    let start = Instant::now();
    let mut has_checked = false;
    for check in &CHECKS {
        let begun = match outcomes.get(check.kernel.name()) {
            None => 0,
            Some(Outcome::Unfinished(begun)) => *begun,
            Some(Outcome::Equal(_) | Outcome::Off(_)) => continue,
        };
        has_checked = true;
        let outcome = if begun < INTERRUPTIONS {
            outcomes.insert(check.kernel.name().into(), Outcome::Unfinished(begun + 1));
            file.write(&outcomes);
            check.outcome(on_cpu)
        } else {
            Outcome::Off(format!("the program ended {begun} times while it was checked"))
        };
        outcomes.insert(check.kernel.name().into(), outcome);
    }
    if has_checked {
        file.write(&outcomes);
        tracing::info!(?outcomes, elapsed = ?start.elapsed(), "own kernels checked");
    }
    turn_off(&outcomes);
    Ok(())
}

/// Checks the kernels that `config` lets models use, whatever was found before.
///
/// # Errors
/// If the device does not exist.
pub fn check_all(config: &ModelConfig) -> Result<Outcomes> {
    let on_cpu = choose_device(config.device)?;
    enable_kernels(config, on_cpu);
    let outcome = |check: &Check| (check.kernel.name().to_owned(), check.outcome(on_cpu));
    let outcomes = CHECKS.iter().map(outcome).collect();
    turn_off(&outcomes);
    Ok(outcomes)
}

/// Turns the kernels off that failed.
fn turn_off(outcomes: &Outcomes) {
    let failed = |kernel: &KernelKind| match outcomes.get(kernel.name()) {
        Some(Outcome::Off(reason)) => {
            let kernel = kernel.name();
            tracing::warn!(kernel, reason, "own kernel is off: MLX's operations are used");
            true
        }
        _ => false,
    };
    kernels::turn_off(KernelKind::ALL.into_iter().filter(failed));
}

impl Check {
    /// Compares the kernel with its reference in each type that models have on the device.
    fn outcome(&self, on_cpu: bool) -> Outcome {
        let types: &[Dtype] =
            if on_cpu { &[Dtype::Float32] } else { &[Dtype::Bfloat16, Dtype::Float32] };
        let mut largest = 0.0_f32;
        for &dtype in types {
            let bound = if dtype == Dtype::Float32 { BOUND_F32 } else { BOUND_BF16 };
            match self.difference(dtype) {
                Ok(difference) if difference <= bound => largest = largest.max(difference),
                Ok(difference) => {
                    return Outcome::Off(format!(
                        "differs from its reference by {difference:e} in {dtype:?}"
                    ));
                }
                Err(problem) => return Outcome::Off(format!("fails in {dtype:?}: {problem}")),
            }
        }
        Outcome::Equal(largest)
    }

    /// The largest difference over the largest value; not a number if a result has one.
    fn difference(&self, dtype: Dtype) -> Result<f32, String> {
        let used = |kernel: &KernelKind| *kernel == self.kernel || self.needs.contains(kernel);
        let ours = evaluated(self.run, dtype, |kernel| !used(kernel));
        #[cfg(test)]
        let ours = tests::with_planted_fault(self.kernel, ours);
        let (ours, reference) = (ours?, evaluated(self.run, dtype, |_| true)?);
        let mut differences = ours.iter().zip(&reference).map(|(a, b)| difference(a, b));
        let largest = |most: f32, next: Result<f32>| -> Result<f32> {
            let next = next?;
            Ok(if next.is_nan() { next } else { most.max(next) })
        };
        differences.try_fold(0.0, largest).map_err(|error| error.to_string())
    }
}

/// The results of `run` without the kernels that are `off`, or why there are none.
fn evaluated(
    run: fn(Dtype) -> Result<Vec<Array>>,
    dtype: Dtype,
    off: impl Fn(&KernelKind) -> bool,
) -> Result<Vec<Array>, String> {
    kernels::turn_off(KernelKind::ALL.into_iter().filter(|kernel| off(kernel)));
    let results = catch_unwind(AssertUnwindSafe(|| {
        let results = run(dtype)?;
        eval(&results)?;
        Ok::<_, Error>(results)
    }));
    kernels::turn_off([]);
    results.map_err(|_| "a panic".to_owned())?.map_err(|error| error.to_string())
}

/// The largest difference of two arrays over the largest value of `b`.
fn difference(a: &Array, b: &Array) -> Result<f32> {
    if (a.shape(), a.dtype()) != (b.shape(), b.dtype()) {
        return Ok(f32::INFINITY);
    }
    let [a, b] = [a, b].map(|x| x.as_dtype(Dtype::Float32)?.contiguous());
    let (a, b) = (a?, b?);
    eval([&a, &b])?;
    // On the host: a maximum may leave out what is not a number.
    let (mut difference, mut size) = (0.0_f32, 0.0_f32);
    for (a, b) in a.try_as_slice::<f32>()?.iter().zip(b.try_as_slice::<f32>()?) {
        if !(a - b).is_finite() {
            return Ok(f32::NAN);
        }
        (difference, size) = (difference.max((a - b).abs()), size.max(b.abs()));
    }
    Ok(if difference == 0.0 { 0.0 } else { difference / size })
}

/// Where the results of a device are.
struct File {
    path: PathBuf,
    key: Key,
}

/// What results depend on.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Key {
    version: u32,
    /// Bytes and time of the program's file, which has the kernels: a build has other ones.
    program: [u64; 2],
    /// The GPU and its architecture, or the processor with the instructions of the kernels.
    device: String,
    settings: String,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    key: Key,
    outcomes: Outcomes,
}

impl File {
    fn new(config: &ModelConfig, on_cpu: bool, data: &Path) -> Self {
        let program = std::env::current_exe().and_then(fs::metadata).ok();
        let time = program.as_ref().and_then(|file| file.modified().ok());
        let time = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let device = match mlx_sys::gpu_name() {
            Some(gpu) if !on_cpu => {
                format!("{gpu} {}", mlx_sys::gpu_text(c"architecture").unwrap_or_default())
            }
            _ => format!("{} {}", processor(), isa_name(Isa::best())),
        };
        let key = Key {
            version: VERSION,
            program: [
                program.map_or(0, |file| file.len()),
                time.map_or(0, |time| time.as_nanos() as u64),
            ],
            device,
            settings: format!(
                "{:?} {:?} MLX {}",
                config.kernels,
                config.compile,
                mlx_sys::version()
            ),
        };
        let text = serde_json::to_string(&key).expect("plain data serializes");
        let digest = Sha256::digest(text.as_bytes());
        let name = format!("{}.json", hex::encode(&digest[..8]));
        Self { path: data.join("kernel-checks").join(name), key }
    }

    /// The results; none if there is no sound file.
    fn read(&self) -> Outcomes {
        let is_small = fs::metadata(&self.path).is_ok_and(|file| file.len() <= FILE_BYTES);
        let text = if is_small { file::read(&self.path).unwrap_or_default() } else { Vec::new() };
        match serde_json::from_slice::<Saved>(&text) {
            Ok(saved) if saved.key == self.key => saved.outcomes,
            _ => Outcomes::new(),
        }
    }

    /// Saves the results. A failure costs the time of the checks at the next start.
    fn write(&self, outcomes: &Outcomes) {
        #[derive(Serialize)]
        struct Saving<'a> {
            key: &'a Key,
            outcomes: &'a Outcomes,
        }
        let saving = Saving { key: &self.key, outcomes };
        let text = serde_json::to_string_pretty(&saving).expect("plain data serializes");
        if let Err(error) = replace_private(&self.path, text.as_bytes()) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "results of the kernels' check not saved");
        }
    }
}

/// Random numbers of a normal distribution.
fn normal(seed: u64, shape: &[i32], dtype: Dtype) -> Result<Array> {
    Ok(random::normal::<f32>(shape, None, None, &random::key(seed)?)?.as_dtype(dtype)?)
}

/// A packed matrix [outputs, inputs] or a stack of them, as loading stores it on this device.
fn packed(seed: u64, shape: &[i32]) -> Result<Packed> {
    let quantization = Quantization { group_size: 64, bits: 4, mode: Mode::Affine };
    let [rows @ .., inputs] = shape else { unreachable!("a matrix has inputs") };
    let with = |columns: i32| [rows, &[columns]].concat();
    let words = with(inputs / 8);
    let count = words.iter().product::<i32>() as u32;
    // Numbers of all sizes, in no order that a kernel could have.
    let word = |i: u32| (i + 7 * seed as u32).wrapping_mul(0x9E37_79B9).rotate_left(i % 31);
    let numbers: Vec<u32> = (0..count).map(word).collect();
    let groups = with(inputs / 64);
    // Means of 4 bits are 7.5 scales: the matrix has numbers of both signs.
    let scales = normal(seed, &groups, Dtype::Float32)?.multiply(Array::from_f32(0.01))?;
    let biases = scales.multiply(Array::from_f32(-7.5))?;
    let weight = Array::from_slice(&numbers, &words);
    let [scales, biases] = [scales, biases].map(|x| x.as_dtype(Dtype::Bfloat16));
    let mut packed = Packed {
        weight,
        scales: scales?,
        biases: Some(biases?),
        quantization,
        dtype: Dtype::Bfloat16,
        own_kernel: None,
    };
    if cpu::is_enabled() && cpu::supports(packed.view()) {
        packed.own_kernel =
            Some(OwnKernel { activations: Activations::Exact, is_symmetric: false });
    }
    Ok(packed)
}

/// A packed layer as loading stores it on this device.
fn linear(seed: u64, shape: &[i32]) -> Result<Linear> {
    let weight = packed(seed, shape)?;
    Ok(match Tiled::new(weight.view())? {
        Some(weight) => Linear::Tiled { weight, bias: None },
        None => Linear::Quantized { weight, bias: None },
    })
}

fn run_norm(dtype: Dtype) -> Result<Vec<Array>> {
    let norm = RmsNorm { weight: normal(1, &[320], dtype)?, eps: 1e-6 };
    Ok(vec![norm.forward(&normal(2, &[1, 5, 320], dtype)?)?])
}

fn run_gate(dtype: Dtype) -> Result<Vec<Array>> {
    let [gate, up] = [1, 2].map(|seed| normal(seed, &[1, 3, 200], dtype));
    Ok(vec![swiglu(gate?, up?)?])
}

/// Packed matrices with a norm before and a sum after, joined ones, and one of floats; steps, drafts and prompts.
fn run_products(dtype: Dtype) -> Result<Vec<Array>> {
    let own = linear(1, &[512, 256])?;
    let gate_up = Joined::new([linear(2, &[256, 256])?, linear(3, &[256, 256])?])?;
    let weight = normal(4, &[64, 256], dtype)?;
    let own_kernel = cpu::is_enabled() && cpu::supports_dense(&weight);
    let floats = Linear::Dense { weight: Dense { weight, dtype, own_kernel }, bias: None };
    let mut results = Vec::new();
    for rows in [1, 2, 5, 8, 33] {
        let x = normal(5, &[1, rows, 256], dtype)?;
        let sum = normal(6, &[1, rows, 512], dtype)?;
        results.push(own.apply(kernels::Input::Rows(&x), Some(&sum))?);
        results.extend(gate_up.forward(&x)?);
        results.push(floats.forward(&x)?);
    }
    Ok(results)
}

/// Rows of two sequences after prompts: steps and drafts.
const PASSES: [[i32; 2]; 4] = [[40, 9], [1, 1], [4, 1], [1, 8]];

fn run_attention(dtype: Dtype) -> Result<Vec<Array>> {
    let [heads, kv_heads, dim] = [8, 2, 64];
    let new = || Cache::new(vec![LayerCache::Full(Full::new(kv_heads, dim))]);
    let mut caches = [new(), new()];
    let scores = Scores { scale: 0.125, softcap: None, sinks: None };
    let mut results = Vec::new();
    for (seed, rows) in (0..).step_by(4).zip(PASSES) {
        let all = rows.iter().sum();
        let each = |i: u64, heads| normal(seed + i, &[1, all, heads, dim], dtype);
        let (q, k, v) = (each(1, heads)?, each(2, kv_heads)?, each(3, kv_heads)?);
        let mut spans = spans(&mut caches, rows);
        results.push(attention([&q, &k, &v], &scores, &mut spans, 0)?);
        spans.iter_mut().for_each(Span::advance);
    }
    Ok(results)
}

fn spans(caches: &mut [Cache; 2], rows: [i32; 2]) -> Vec<Span<'_>> {
    caches.iter_mut().zip(rows).map(|(cache, rows)| Span { rows, cache }).collect()
}

fn run_heads(dtype: Dtype) -> Result<Vec<Array>> {
    let [heads, kv_heads, head_dim] = [8, 2, 64];
    let norm =
        |seed| Ok::<_, Error>(RmsNorm { weight: normal(seed, &[head_dim], dtype)?, eps: 1e-6 });
    let (q_norm, k_norm, rope) = (norm(1)?, norm(2)?, Rope::new(32, 10_000.0));
    let own = Heads {
        heads,
        kv_heads,
        head_dim,
        gated: true,
        q_norm: Some(&q_norm),
        k_norm: Some(&k_norm),
        rope: Some(&rope),
    };
    let widths = [2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim];
    let [q, k, v] = widths.map(|width| normal(9, &[width, 8], dtype));
    let dense = |weight: Array| Linear::Dense { weight: weight.into(), bias: None };
    let projections = Joined::new([dense(q?), dense(k?), dense(v?)])?;
    let scores = Scores { scale: 0.125, softcap: None, sinks: None };
    let new = || Cache::new(vec![LayerCache::Full(Full::new(kv_heads, head_dim))]);
    let mut caches = [new(), new()];
    let mut results = Vec::new();
    for (seed, rows) in (0..).step_by(4).zip(PASSES) {
        let all = rows.iter().sum();
        let [q, k, v] = widths.map(|width| normal(seed + width as u64, &[1, all, width], dtype));
        let mut spans = spans(&mut caches, rows);
        let projected = Outputs::Apart([q?, k?, v?]);
        let y = own.attend(projected, &projections, &scores, &mut spans, 0)?;
        spans.iter_mut().for_each(Span::advance);
        // Kernels write caches in place: the next pass is made when this one is queued, as in decoding.
        eval([&y])?;
        results.push(y);
    }
    for cache in &caches {
        results.extend(cache.arrays()?);
    }
    Ok(results)
}

/// A layer with the dimensions of heads that published models have.
fn gated_delta(dtype: Dtype) -> Result<GatedDelta> {
    let [key_heads, value_heads, dim] = [2, 4, 128];
    let channels = (2 * key_heads + value_heads) * dim;
    let conv1d: Result<Vec<_>> = (0..4).map(|tap| normal(tap, &[channels], dtype)).collect();
    Ok(GatedDelta {
        conv1d: conv1d?,
        a_log: normal(10, &[value_heads], Dtype::Float32)?,
        dt_bias: normal(11, &[value_heads], dtype)?,
        norm: RmsNorm { weight: normal(12, &[dim], dtype)?, eps: 1e-6 },
        key_heads,
        value_heads,
        key_dim: dim,
        value_dim: dim,
    })
}

/// Runs passes of a layer over two sequences. `draft` keeps only one row of the last pass.
fn run_delta(dtype: Dtype, draft: bool) -> Result<Vec<Array>> {
    let layer = gated_delta(dtype)?;
    let (heads, values) = (layer.value_heads, layer.value_heads * layer.value_dim);
    let channels = 2 * layer.key_heads * layer.key_dim + values;
    let new = || -> Result<Cache> {
        Ok(Cache::new(vec![LayerCache::Recurrent(layer.new_cache(dtype)?)]))
    };
    let mut caches = [new()?, new()?];
    let mut results = Vec::new();
    let passes = [3, 70, 1, 1, 6];
    for (pass, rows) in (0..).zip(passes) {
        let is_draft = draft && pass + 1 == passes.len() as u64;
        if is_draft {
            caches.iter_mut().for_each(Cache::mark_draft);
        }
        let [qkv, z, b, a] = [channels, values, heads, heads]
            .map(|width| normal(20 + pass, &[1, 2 * rows, width], dtype));
        let x = Outputs::Apart([qkv?, z?, b?, a?]);
        let mut spans = spans(&mut caches, [rows, rows]);
        results.push(layer.forward(&x, &mut spans, 0)?);
        spans.iter_mut().for_each(Span::advance);
        if is_draft {
            let kept = usize::try_from(passes.iter().sum::<i32>() - rows + 1).unwrap_or(0);
            caches.iter_mut().try_for_each(|cache| cache.rewind_draft(kept))?;
        }
    }
    for cache in &caches {
        results.extend(cache.arrays()?);
    }
    Ok(results)
}

fn run_gated_delta(dtype: Dtype) -> Result<Vec<Array>> {
    run_delta(dtype, false)
}

fn run_rewind(dtype: Dtype) -> Result<Vec<Array>> {
    run_delta(dtype, true)
}

/// A sparse block whose router prefers the same experts for all rows by a wide margin: a near-tie would be another choice,
/// and no fault.
fn run_experts(dtype: Dtype) -> Result<Vec<Array>> {
    let [count, d, f] = [16, 256, 128];
    let stack = |seed, outputs, inputs| -> Result<Linear> {
        let weight = packed(seed, &[count, outputs, inputs])?;
        Ok(Linear::Quantized { weight: Packed { own_kernel: None, ..weight }, bias: None })
    };
    let gate_up = Joined::new([stack(1, f, d)?, stack(2, f, d)?])?;
    let experts =
        Experts(Block::from(GatedMlp { gate: Gate::Silu, gate_up, down_proj: stack(3, d, f)? }));
    // Expert `i` has the score `i` times the sum of a row.
    let ranks: Vec<f32> = (0..count).map(|rank| rank as f32 / 64.0).collect();
    let ranks = Array::from_slice(&ranks, &[count, 1]).as_dtype(dtype)?;
    let gate = concatenate(&vec![ranks; d as usize], 1)?;
    let moe = Mlp::Sparse(Box::new(Moe {
        gate: Linear::Dense { weight: gate.into(), bias: None },
        experts,
        top_k: 4,
        norm_topk_prob: true,
        scale: 1.0,
        groups: None,
        shared: None,
    }));
    let norm = RmsNorm { weight: normal(4, &[d], dtype)?.abs()?, eps: 1e-6 };
    let mut results = Vec::new();
    for rows in [1, 3, 8] {
        results.push(moe.residual(&normal(5, &[1, rows, d], dtype)?.abs()?, &norm)?);
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::config::Device;

    thread_local! {
        /// The kernel of this thread whose results are wrong, and how.
        static FAULT: Cell<Option<(KernelKind, Fault)>> = const { Cell::new(None) };
    }

    #[derive(Debug, Clone, Copy)]
    enum Fault {
        /// One number is wrong.
        Value(f32),
        DoesNotCompile,
    }

    /// What the kernel computed, with the fault that was planted in it.
    pub fn with_planted_fault(
        kernel: KernelKind,
        results: Result<Vec<Array>, String>,
    ) -> Result<Vec<Array>, String> {
        match FAULT.get() {
            Some((faulty, fault)) if faulty == kernel => match fault {
                Fault::DoesNotCompile => Err("cannot be compiled".into()),
                Fault::Value(value) => results.map(|mut arrays| {
                    let last = arrays.last_mut().unwrap();
                    let count: i32 = last.shape().iter().product();
                    let mut wrong = vec![0.0; count as usize];
                    wrong[count as usize / 2] = value;
                    let wrong = Array::from_slice(&wrong, last.shape()).as_dtype(last.dtype());
                    *last = last.add(wrong.unwrap()).unwrap();
                    arrays
                }),
            },
            _ => results,
        }
    }

    fn config() -> ModelConfig {
        ModelConfig { device: Device::Cpu, ..ModelConfig::default() }
    }

    /// Every check compares something: without its kernel, other code runs. A check whose shapes no kernel takes would
    /// compare the reference with itself.
    #[test]
    fn kernels_of_this_device_equal_their_references() {
        let outcomes = check_all(&config()).unwrap();
        for (name, outcome) in &outcomes {
            assert!(matches!(outcome, Outcome::Equal(_)), "{name}: {outcome:?}");
        }
        // There are none of these on CPUs.
        let none = ["attention", "experts"];
        let compared = outcomes.iter().filter(|(name, _)| !none.contains(&name.as_str()));
        for (name, outcome) in compared {
            assert_ne!(*outcome, Outcome::Equal(0.0), "{name} is not compared");
        }
    }

    #[test]
    fn a_kernel_with_a_fault_is_off_and_the_others_stay_on() {
        let data = tempfile::tempdir().unwrap();
        for (kernel, fault) in [
            (KernelKind::Norm, Fault::Value(1e4)),
            (KernelKind::Attention, Fault::Value(f32::NAN)),
            (KernelKind::GatedDelta, Fault::DoesNotCompile),
        ] {
            FAULT.set(Some((kernel, fault)));
            let folder = data.path().join(kernel.name());
            apply(&config(), &folder).unwrap();
            FAULT.set(None);
            let off: Vec<_> = KernelKind::ALL.into_iter().filter(|k| !k.is_on()).collect();
            assert_eq!(off, [kernel], "{fault:?}");
            // The next start reads what this one found.
            kernels::turn_off([]);
            apply(&config(), &folder).unwrap();
            assert!(!kernel.is_on());
            kernels::turn_off([]);
        }
    }

    /// Logits of the bundled model after a prompt, a step and a draft, with the kernels that are on.
    fn logits() -> Vec<Array> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/model/tiny-hybrid-4bit");
        let model = crate::model::load(&folder, &config()).unwrap().model;
        let mut cache = model.new_cache().unwrap();
        let passes = [&[5, 9, 200, 7, 31][..], &[11], &[4, 8, 15]];
        let forward = |ids: &[u32]| {
            let ids = crate::nn::token_ids(ids);
            let mut spans = [Span { rows: ids.dim(0), cache: &mut cache }];
            let hidden = model.forward(&ids, &mut spans, crate::model::Pass::WHOLE).unwrap();
            spans.iter_mut().for_each(Span::advance);
            let logits = model.logits(&hidden).unwrap();
            eval([&logits]).unwrap();
            logits
        };
        passes.map(forward).into()
    }

    /// The whole way of a faulty kernel: it is found, it is off when the model is loaded, and the model computes what it
    /// computes without any kernel of ours.
    #[test]
    fn a_model_computes_the_same_with_a_faulty_kernel_off() {
        kernels::turn_off(KernelKind::ALL);
        let reference = logits();
        let data = tempfile::tempdir().unwrap();
        for kernel in [KernelKind::Products, KernelKind::GatedDelta, KernelKind::Heads] {
            FAULT.set(Some((kernel, Fault::Value(1e4))));
            apply(&config(), &data.path().join(kernel.name())).unwrap();
            FAULT.set(None);
            assert!(!kernel.is_on());
            for (ours, reference) in logits().iter().zip(&reference) {
                let difference = difference(ours, reference).unwrap();
                assert!(difference < 1e-3, "{kernel:?}: {difference:e}");
            }
        }
        kernels::turn_off([]);
    }

    #[test]
    fn a_kernel_that_ends_the_program_again_and_again_is_off() {
        let data = tempfile::tempdir().unwrap();
        apply(&config(), data.path()).unwrap();
        let file = File::new(&config(), true, data.path());
        let mut outcomes = file.read();
        assert_eq!(outcomes.len(), CHECKS.len());
        // As the file is while the kernel is checked.
        outcomes.remove("heads");
        outcomes.insert("norm".into(), Outcome::Unfinished(1));
        outcomes.insert("gated delta rule".into(), Outcome::Unfinished(INTERRUPTIONS));
        file.write(&outcomes);
        apply(&config(), data.path()).unwrap();
        assert!(!KernelKind::GatedDelta.is_on() && KernelKind::Heads.is_on());
        assert!(KernelKind::Norm.is_on(), "a check that was interrupted once runs again");
        let outcomes = file.read();
        assert!(["heads", "norm"].iter().all(|name| matches!(outcomes[*name], Outcome::Equal(_))));
        // A damaged file is checked again.
        fs::write(&file.path, "{").unwrap();
        apply(&config(), data.path()).unwrap();
        assert!(KernelKind::GatedDelta.is_on());
    }
}
