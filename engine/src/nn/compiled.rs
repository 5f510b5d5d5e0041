//! Formulas that MLX compiles: elementwise operations are fused into one kernel, and later calls
//! replay the graph that the first call recorded.
//!
//! A whole step cannot be compiled, because attention's keys grow at each step. The formulas between
//! matrix products and caches can. The plain form is the reference: [`fused`] uses it unless
//! [`compile_steps`] enabled compiling, and for prefill, which would record a graph for each length.
//!
//! # Why
//! A formula captures nothing, which is checked at compile time. So its type identifies it, and all
//! layers of all models share one recorded graph. MLX distinguishes shapes and dtypes itself, and
//! names kernels by their operations, so no kernel is built twice. MLX would treat captured arrays
//! as constants, and the weights of one layer would be used for all.
//!
//! Source: mlx-lm compiles the same parts (`models/activations.py`, `models/gated_delta.py`).

use std::any::TypeId;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use mlx_rs::Array;
use mlx_rs::error::Exception;
use mlx_rs::transforms::compile::compile;

use crate::error::{Error, Result};

/// Most rows of a pass that is compiled: steps of many sequences, or of some with drafts. Each number
/// of rows records a graph.
const STEP_ROWS: i32 = 32;

type Compiled = Rc<RefCell<dyn FnMut(&[Array]) -> std::result::Result<Vec<Array>, Exception>>>;

thread_local! {
    // MLX's cache of compiled functions is thread-local, too.
    static ON: Cell<bool> = const { Cell::new(false) };
    static FORMULAS: RefCell<HashMap<TypeId, Compiled>> = RefCell::default();
}

/// Sets whether [`fused`] compiles on this thread. The default is false.
pub fn compile_steps(on: bool) {
    ON.set(on);
}

/// `formula(x)`, compiled if [`compile_steps`] enabled it and `x[0]` [B, T, ..] has at most
/// [`STEP_ROWS`] rows, B T. The formula captures nothing, and its result depends on `x` only.
pub fn fused<F, const N: usize>(x: &[Array], formula: F) -> Result<[Array; N]>
where
    F: Fn(&[Array]) -> Result<[Array; N]> + 'static,
{
    const { assert!(size_of::<F>() == 0, "a compiled formula captures nothing") };
    if !ON.get() || x[0].dim(0) * x[0].dim(1) > STEP_ROWS {
        return formula(x);
    }
    let compiled = FORMULAS.with_borrow_mut(|formulas| {
        let entry = formulas.entry(TypeId::of::<F>());
        Rc::clone(entry.or_insert_with(|| {
            let recorded = move |x: &[Array]| -> std::result::Result<Vec<Array>, Exception> {
                Ok(formula(x).map_err(|e| Exception::custom(e.to_string()))?.into())
            };
            Rc::new(RefCell::new(compile(recorded, false)))
        }))
    });
    let y = (compiled.borrow_mut())(x)?;
    // After an error MLX keeps an empty graph for these shapes.
    y.try_into()
        .map_err(|_| Error::Array("a compiled formula failed before with these shapes".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Cache, LayerCache, Span};
    use crate::nn::{GatedDelta, Outputs, RmsNorm, clamped_swiglu, geglu, sigmoid_gated, swiglu};
    use mlx_rs::{Device, Dtype, random};
    use std::process::Command;

    fn normal(seed: u64, shape: &[i32], dtype: Dtype) -> Array {
        let key = random::key(seed).unwrap();
        random::normal::<f32>(shape, None, None, &key).unwrap().as_dtype(dtype).unwrap()
    }

    /// A step of `rows` after a step of three: its result, then the state and tail after it.
    fn delta_step(rows: i32, taps: u64, dtype: Dtype) -> Vec<Array> {
        let layer = GatedDelta {
            conv1d: (0..taps).map(|tap| normal(tap, &[2 * 2 * 32 + 4 * 16], dtype)).collect(),
            a_log: normal(10, &[4], Dtype::Float32),
            dt_bias: normal(11, &[4], dtype),
            norm: RmsNorm { weight: normal(12, &[16], dtype), eps: 1e-6 },
            key_heads: 2,
            value_heads: 4,
            key_dim: 32,
            value_dim: 16,
        };
        let mut cache = Cache::new(vec![LayerCache::Recurrent(layer.new_cache(dtype).unwrap())]);
        let mut forward = |seed, rows| {
            let x = Outputs::Apart([
                normal(seed, &[1, rows, 2 * 2 * 32 + 4 * 16], dtype),
                normal(seed + 1, &[1, rows, 64], dtype),
                normal(seed + 2, &[1, rows, 4], dtype),
                normal(seed + 3, &[1, rows, 4], dtype),
            ]);
            layer.forward(&x, &mut [Span { rows, cache: &mut cache }], 0).unwrap()
        };
        forward(20, 3);
        let y = forward(30, rows);
        [vec![y], cache.arrays().unwrap()].concat()
    }

    /// `formula` returns the same plain and compiled, up to `bound` of the largest value. Called
    /// twice, because the second call replays the graph of the first.
    fn check(what: &str, bound: f32, formula: &dyn Fn() -> Vec<Array>) {
        compile_steps(false);
        let plain = formula();
        compile_steps(true);
        for call in 0..2 {
            for (ours, plain) in formula().iter().zip(&plain) {
                assert_eq!((ours.shape(), ours.dtype()), (plain.shape(), plain.dtype()), "{what}");
                let number = |a: Array| {
                    let a = a.as_dtype(Dtype::Float32).unwrap().abs().unwrap();
                    a.max(None).unwrap().item_exact::<f32>()
                };
                let worst = number(ours.subtract(plain).unwrap()) / number(plain.clone());
                assert!(worst < bound, "{what}, call {call}: {worst:e}");
            }
        }
    }

    #[test]
    fn compiled_formulas_equal_plain_ones() {
        if !Command::new("g++").arg("--version").output().is_ok_and(|o| o.status.success()) {
            return println!("SKIPPED: without g++, MLX compiles nothing on the CPU");
        }
        Device::set_default(&Device::cpu());
        for (dtype, bound) in [(Dtype::Float32, 1e-5), (Dtype::Bfloat16, 2e-2)] {
            for rows in [1, 2, STEP_ROWS, STEP_ROWS + 1] {
                let x = || normal(1, &[1, rows, 96], dtype);
                let y = || normal(2, &[1, rows, 96], dtype);
                let check = |what: &str, formula: &dyn Fn() -> Vec<Array>| {
                    check(&format!("{what}, {rows} rows, {dtype:?}"), bound, formula);
                };
                check("swiglu", &|| vec![swiglu(x(), y()).unwrap()]);
                check("clamped_swiglu", &|| vec![clamped_swiglu(x(), y()).unwrap()]);
                check("geglu", &|| vec![geglu(x(), y()).unwrap()]);
                check("sigmoid_gated", &|| vec![sigmoid_gated(x(), y()).unwrap()]);
                for taps in [4, 2] {
                    let what = format!("gated delta rule, {taps} taps");
                    check(&what, &|| delta_step(rows, taps, dtype));
                }
            }
        }
        let formulas = FORMULAS.with_borrow(HashMap::len);
        assert_eq!(formulas, 6, "each formula was compiled");
    }

    /// An error while MLX records the graph is an error at the second call, too.
    #[test]
    fn failing_formula_fails_again() {
        compile_steps(true);
        let [a, b] = [&[1, 1, 3], &[1, 1, 4]].map(|shape| normal(1, shape, Dtype::Float32));
        for _ in 0..2 {
            assert!(swiglu(a.clone(), b.clone()).is_err());
        }
        assert!(swiglu(a.clone(), a).is_ok(), "other shapes still work");
    }
}
