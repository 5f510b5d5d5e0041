//! Kimi Delta Attention: the gated delta rule with a decay of its own in each dimension of the keys.
//!
//! Per head and token, with state S [D, D], decay g in (0, 1)^D and strength beta in (0, 1):
//!
//! ```text
//! S <- S diag(g);   d = beta (v - S k);   S <- S + d k^T;   y = S q
//! ```
//!
//! Rows run in chunks of a few, each of which is some matrix products ([`chunk`]). Writes to the state are those of
//! [`super::gated_delta`] with vectors in place of factors, so a rewind replays them alike.
//!
//! # Why
//! Where a head has one factor, `e^(G_t - G_i)` stands before the product of two keys, with G the running sum of
//! log g. Here it stands within the product, as a vector. `e^G_t` and `e^-G_i` could be multiplied into the
//! two keys if the second did not overflow: a trained rate of 16 makes G -88, the logarithm of the smallest normal
//! number, in a few rows. So the vectors are computed for each pair of rows, T T D exponentials for
//! T rows, and chunks are shorter than those of the other rule.
//!
//! Source: Kimi Linear (arXiv:2510.26692); checked against `transformers` `models/kimi_linear` and mlx-lm
//! `models/kimi_linear.py`.

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{concatenate, exp, logaddexp, matmul, select, sigmoid, stack, tri};
use mlx_rs::{Array, Dtype, fast};

use super::gated_delta::{DeltaInputs, L2_EPS, convolve, heads_first, invert_unit_lower};
use super::runs::{SHORT_ROWS, by_run};
use super::{fused, scaled, silu};
use crate::cache::{Element, Recurrent, Span, Writes, delta_write};
use crate::error::Result;
use crate::kernels::REWIND;

/// Rows in a chunk.
const CHUNK: i32 = 16;

/// Weights and shape of the recurrent part of a layer.
#[derive(Debug, Clone)]
pub struct KimiDelta {
    /// Depthwise causal convolution over q, k and v: one [3 H D] for each tap, oldest first.
    pub conv1d: Vec<Array>,
    /// f32 [H], log of the decay rate.
    pub a_log: Array,
    /// f32 [H D], added to the decay's input.
    pub dt_bias: Array,
    /// H
    pub heads: i32,
    /// D
    pub head_dim: i32,
}

impl KimiDelta {
    /// An empty cache of this layer; activations are in `dtype`.
    pub fn new_cache(&self, dtype: Dtype) -> Result<Recurrent> {
        let &Self { heads, head_dim, .. } = self;
        let taps = i32::try_from(self.conv1d.len()).expect("a convolution has a few taps");
        let channels = 3 * heads * head_dim;
        let (state, tail) = ([1, heads, head_dim, head_dim], [1, taps - 1, channels]);
        Ok(Recurrent::new(&state, &tail, dtype)?.with_kernels(&REWIND))
    }

    /// Runs the rows of all spans through convolution and delta rule: [1, R, H D]. `layer` is their entry in each
    /// span's cache.
    ///
    /// `qkv` [1, R, 3 H D] are q, k and v before the convolution, `a` [1, R, H D] is the input of the decay, and `b`
    /// [1, R, H] the strength before the sigmoid.
    pub fn forward(
        &self,
        [qkv, a, b]: [&Array; 3],
        spans: &mut [Span<'_>],
        layer: usize,
    ) -> Result<Array> {
        by_run([qkv, a, b], spans, layer, |x, caches| self.run(x, caches))
    }

    /// Runs the rows of a batch of B spans with the same number of rows: [B, T, H D].
    fn run(&self, [qkv, a, b]: [Array; 3], caches: &mut [&mut Recurrent]) -> Result<Array> {
        let [batch, rows] = [qkv.dim(0), qkv.dim(1)];
        let state = Element::stack(caches.iter().map(|cache| cache.state().0))?;
        let tail = Element::stack(caches.iter().map(|cache| cache.state().1))?;
        let joined = concatenate(&[&tail, &qkv], 1)?;
        let tail = joined.try_index((.., rows.., ..))?;
        let mut inputs = vec![b, a, joined, state];
        inputs.extend([&self.a_log, &self.dt_bias].map(Array::clone));
        inputs.extend_from_slice(&self.conv1d);
        let (y, state, writes) = if rows <= SHORT_ROWS {
            let [y, state, k, correction, log_decay] = fused(&inputs, step)?;
            (y, state, Writes { k, correction, log_decay })
        } else {
            in_chunks(&delta_inputs(&inputs)?, &inputs[3])?
        };
        let writes = writes.all_of(qkv.dim(0));
        for ((cache, x), writes) in caches.iter_mut().zip(Element::all_of(qkv.clone())).zip(writes)
        {
            cache.record(x, Some(writes));
        }
        let elements = Element::all_of(state).zip(Element::all_of(tail));
        for (cache, (state, tail)) in caches.iter_mut().zip(elements) {
            cache.advance(state, tail);
        }
        let width = self.heads * self.head_dim;
        Ok(y.swap_axes(1, 2)?.reshape(&[batch, rows, width])?.as_dtype(qkv.dtype())?)
    }
}

/// A step of a few rows: `inputs` as in [`delta_inputs`]; returns y [B, H, T, D], the next state, and the fields
/// of [`Writes`].
fn step(inputs: &[Array]) -> Result<[Array; 5]> {
    let (y, state, writes) = chunk(&delta_inputs(inputs)?, &inputs[3])?;
    let Writes { k, correction, log_decay } = writes;
    Ok([y, state, k, correction, log_decay])
}

/// Runs the convolution of a span and computes unit vectors and gates.
///
/// `inputs`: `b` and `a` as in [`KimiDelta::forward`], the convolution's input, the state, and `a_log`, `dt_bias`
/// and the taps as in [`KimiDelta`].
fn delta_inputs(inputs: &[Array]) -> Result<DeltaInputs> {
    let [b, a, joined, state, a_log, dt_bias, taps @ ..] = inputs else {
        unreachable!("KimiDelta::run passes all of these")
    };
    let [batch, rows, heads, dim] = [b.dim(0), b.dim(1), state.dim(1), state.dim(3)];
    let shape = [batch, rows, heads, dim];
    let qkv = silu(&convolve(joined, taps, rows)?)?.split_equal(3, 2)?;
    let root = (dim as f32).powf(-0.5);
    let unit = |x: &Array| -> Result<Array> {
        // rms_norm divides by the root of the mean; the factor D^-0.5 makes it the root of the sum.
        let x = fast::rms_norm(x.reshape(&shape)?, None, L2_EPS / dim as f32)?;
        heads_first(&scaled(&x, root)?)
    };
    let a = a.as_dtype(Dtype::Float32)?.add(dt_bias)?;
    let duration = logaddexp(a, Array::from_f32(0.0))?.reshape(&shape)?;
    let rate = exp(a_log)?.reshape(&[heads, 1])?;
    Ok(DeltaInputs {
        q: scaled(&unit(&qkv[0])?, root)?,
        k: unit(&qkv[1])?,
        v: heads_first(&qkv[2].reshape(&shape)?)?,
        log_decay: heads_first(&duration.multiply(rate)?.negative()?)?,
        beta: heads_first(&sigmoid(b)?)?,
    })
}

/// [`chunk`] after [`chunk`].
fn in_chunks(x: &DeltaInputs, state: &Array) -> Result<(Array, Array, Writes)> {
    let rows = x.q.dim(2);
    let mut state = state.clone();
    let (mut ys, mut corrections) = (Vec::new(), Vec::new());
    let mut start = 0;
    while start < rows {
        let end = rows.min(start + CHUNK);
        let part = |a: &Array| a.try_index((.., .., start..end));
        let own = DeltaInputs {
            q: part(&x.q)?,
            k: part(&x.k)?,
            v: part(&x.v)?,
            log_decay: part(&x.log_decay)?,
            beta: part(&x.beta)?,
        };
        let (y, next, writes) = chunk(&own, &state)?;
        state = next;
        ys.push(y);
        corrections.push(writes.correction);
        start = end;
    }
    let (k, log_decay) = (x.k.clone(), x.log_decay.clone());
    let writes = Writes { k, correction: concatenate(&corrections, 2)?, log_decay };
    Ok((concatenate(&ys, 2)?, state, writes))
}

/// The delta rule over a few rows at once: y [B, H, T, D], the state after the last row, and the writes to it. The
/// state is read and written once, whatever T is.
///
/// With G the running sum of the log decays, the corrections D (rows d) solve `(I + A) D = beta (V - (K e^G) S^T)`
/// where `A[t, i] = beta_t sum over c of k_t[c] e^(G_t[c] - G_i[c]) k_i[c]` for i < t.
fn chunk(x: &DeltaInputs, state: &Array) -> Result<(Array, Array, Writes)> {
    let DeltaInputs { q, k, v, log_decay, beta } = x;
    let rows = q.dim(2);
    let beta = beta.expand_dims(3)?;
    let running = if rows > 1 { log_decay.cumsum(2, None, None)? } else { log_decay.clone() };
    let grown = exp(&running)?;
    // Products of keys and queries with the old state, then with the keys.
    let both = concatenate(&[k.multiply(&grown)?, q.multiply(&grown)?], 2)?;
    let recalled = matmul(&both, state.swap_axes(2, 3)?)?.split_at_indices(&[rows], 2)?;
    let mut correction = v.subtract(&recalled[0])?.multiply(&beta)?;
    let seen = if rows == 1 {
        q.multiply(k)?.sum_axis(-1, true)?
    } else {
        // [B, H, T, T, D] times [B, H, T, D, 2]
        let left = pairwise_decay(&running)?.multiply(k.expand_dims(2)?)?;
        let near = matmul(left, stack(&[k, q], 4)?)?;
        let [near, seen] = [0, 1].map(|which| near.try_index((.., .., .., .., which)));
        correction = matmul(invert_unit_lower(&near?.multiply(&beta)?)?, correction)?;
        seen?
    };
    let y = recalled[1].add(matmul(seen, &correction)?)?;
    let writes = Writes { k: k.clone(), correction, log_decay: log_decay.clone() };
    Ok((y, delta_write(state, &writes)?, writes))
}

/// e^(G_t - G_i) for i <= t, else 0: [.., T, T, D] of running sums G [.., T, D]. Masked before the exponential,
/// which would overflow above the diagonal.
fn pairwise_decay(running: &Array) -> Result<Array> {
    let exponent = running.expand_dims(-2)?.subtract(running.expand_dims(-3)?)?;
    let lower = tri::<f32>(running.dim(-2), None, None)?.as_type::<bool>()?.expand_dims(-1)?;
    Ok(exp(select(&lower, exponent, Array::from_f32(f32::NEG_INFINITY))?)?)
}

#[cfg(test)]
mod tests {
    use mlx_rs::ops::broadcast_to;
    use mlx_rs::random;

    use super::*;

    fn normal(seed: u64, shape: &[i32]) -> Array {
        random::normal::<f32>(shape, None, None, &random::key(seed).unwrap()).unwrap()
    }

    fn state() -> Array {
        normal(6, &[1, 4, 16, 16])
    }

    /// Random inputs of `rows` tokens for 4 heads of dimension 16, which decay by up to about e^`-rate` a row;
    /// `same_key` makes all keys equal.
    fn inputs(rows: i32, rate: f32, same_key: bool) -> DeltaInputs {
        let unit = |a: Array| scaled(&fast::rms_norm(&a, None, 0.0).unwrap(), 0.25).unwrap();
        let shape = [1, 4, rows, 16];
        let k = normal(2, &[1, 4, if same_key { 1 } else { rows }, 16]);
        DeltaInputs {
            q: unit(normal(1, &shape)),
            k: unit(broadcast_to(&k, &shape).unwrap()),
            v: normal(3, &shape),
            log_decay: scaled(&sigmoid(normal(4, &shape)).unwrap(), -rate).unwrap(),
            beta: sigmoid(normal(5, &[1, 4, rows])).unwrap(),
        }
    }

    /// The formula of the module, token by token.
    fn recurrent(x: &DeltaInputs, state: &Array) -> (Array, Array) {
        let mut state = state.clone();
        let mut ys = Vec::new();
        for t in 0..x.q.dim(2) {
            let row = |a: &Array| a.try_index((.., .., t..t + 1)).unwrap();
            let (q, k, v) = (row(&x.q), row(&x.k), row(&x.v));
            state = state.multiply(exp(row(&x.log_decay)).unwrap()).unwrap();
            let missing = v.subtract(matmul(&k, state.swap_axes(2, 3).unwrap()).unwrap()).unwrap();
            let d = missing.multiply(row(&x.beta).expand_dims(3).unwrap()).unwrap();
            state = state.add(matmul(d.swap_axes(2, 3).unwrap(), &k).unwrap()).unwrap();
            ys.push(matmul(&q, state.swap_axes(2, 3).unwrap()).unwrap());
        }
        (concatenate(&ys, 2).unwrap(), state)
    }

    fn largest_difference(a: &Array, b: &Array) -> f32 {
        a.subtract(b).unwrap().abs().unwrap().max(None).unwrap().item_exact::<f32>()
    }

    /// Decays of e^-40 a row would overflow if they were taken apart.
    #[test]
    fn chunks_equal_the_formula_row_by_row() {
        for (rate, same_key) in [(0.1, false), (0.1, true), (3.0, false), (40.0, false)] {
            for rows in [1, 2, 5, 8, 15, 16, 17, 33, 100] {
                let x = inputs(rows, rate, same_key);
                let (expected_y, expected_state) = recurrent(&x, &state());
                let check = |(y, next, writes): (Array, Array, Writes)| {
                    let replayed = delta_write(&state(), &writes).unwrap();
                    let pairs =
                        [(&y, &expected_y), (&next, &expected_state), (&replayed, &expected_state)];
                    for (ours, expected) in pairs {
                        let difference = largest_difference(ours, expected);
                        assert!(difference < 2e-5, "{rows} rows, rate {rate}: {difference}");
                    }
                };
                check(in_chunks(&x, &state()).unwrap());
                if rows <= CHUNK {
                    check(chunk(&x, &state()).unwrap());
                }
            }
        }
    }
}
