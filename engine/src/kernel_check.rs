//! The check of our own kernels on the user's device: each against the operations that are its reference.
//!
//! Kernels are tested before a release, on the devices that we have. On others a compiler may refuse one, or make
//! something else of it: such a kernel is turned off by name before a model is loaded, and layers compute its reference.
//! So a new device may be slower, and never gives wrong tokens or fails to start because of a kernel.
//!
//! Checks run once for each device, program and choice of kernels; their results are in the folder `kernel-checks` of the
//! data folder. The start of each check is noted there, so that a kernel that ends the process, or never returns, is off
//! after some starts. A check that a user or another process has interrupted runs again.

mod cases;
mod saved;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use serde::{Deserialize, Serialize};

use self::saved::File;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::kernels::{self, KernelKind};
use crate::model::{choose_device, enable_kernels};

/// Largest difference from the reference over its largest value, in f32: products of MLX on a GPU have 10 bits.
const BOUND_F32: f32 = 5e-3;

/// As [`BOUND_F32`], in bfloat16 with 8 bits.
const BOUND_BF16: f32 = 8e-2;

/// Checks of a kernel that may be interrupted; then it is off.
const INTERRUPTIONS: u32 = 3;

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
    Check { kernel: KernelKind::Norm, needs: &[], run: cases::run_norm },
    Check { kernel: KernelKind::Gate, needs: &[], run: cases::run_gate },
    Check { kernel: KernelKind::Products, needs: &[], run: cases::run_products },
    Check { kernel: KernelKind::Attention, needs: &[], run: cases::run_attention },
    Check { kernel: KernelKind::Heads, needs: &[KernelKind::Attention], run: cases::run_heads },
    Check { kernel: KernelKind::GatedDelta, needs: &[], run: cases::run_gated_delta },
    Check { kernel: KernelKind::Rewind, needs: &[KernelKind::GatedDelta], run: cases::run_rewind },
    Check { kernel: KernelKind::Experts, needs: &[KernelKind::Products], run: cases::run_experts },
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
        tracing::debug!(?outcomes, elapsed = ?start.elapsed(), "own kernels checked");
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;

    use super::*;
    use crate::cache::Span;
    use crate::config::Device;
    use crate::kernels::metal::emulate;

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

    /// Each check compares the Metal kernel, under the emulation, with its reference.
    #[test]
    fn kernels_for_metal_equal_their_references() {
        emulate(steersman_metal_emulation::compile);
        let outcomes = check_all(&config()).unwrap();
        for (name, outcome) in &outcomes {
            assert!(matches!(outcome, Outcome::Equal(_)), "{name}: {outcome:?}");
        }
        let there = ["products", "heads", "gated delta rule", "rewind", "experts"];
        for name in there {
            assert_ne!(outcomes[name], Outcome::Equal(0.0), "{name} is not compared");
        }
    }

    /// There is none on CPUs, so the check above compares nothing.
    #[test]
    fn attention_of_metal_is_compared_with_its_reference() {
        crate::kernels::metal::emulate(steersman_metal_emulation::compile);
        enable_kernels(&config(), true);
        let check = CHECKS.iter().find(|check| check.kernel == KernelKind::Attention).unwrap();
        let outcome = check.outcome(true);
        assert!(matches!(outcome, Outcome::Equal(most) if most > 0.0), "{outcome:?}");
        FAULT.set(Some((KernelKind::Attention, Fault::Value(1.0))));
        let outcome = check.outcome(true);
        FAULT.set(None);
        assert!(matches!(outcome, Outcome::Off(_)), "{outcome:?}");
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
