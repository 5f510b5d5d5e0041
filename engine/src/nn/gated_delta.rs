//! The gated delta rule: linear attention with a state that decays by a gate and is corrected by
//! each token.
//!
//! Per head and token, with state S [D_v, D_k], decay g in (0, 1) and strength beta in (0, 1):
//!
//! ```text
//! S <- g S;   d = beta (v - S k);   S <- S + d k^T;   y = S q
//! ```
//!
//! Prefill uses [`delta_rule_chunked`], which turns a chunk of tokens into a few matrix products.
//! Decode steps and the few rows of a verified draft use [`delta_rule_short`], the same in one small
//! chunk. [`delta_rule_recurrent`] is the formula above, the reference in tests. All are equal up to
//! rounding.
//!
//! Source: Gated Delta Networks (arXiv:2412.06464), chunked by the UT transform of
//! arXiv:2406.06484; checked against mlx-lm `models/gated_delta.py`.

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{
    broadcast_to, concatenate, exp, eye, logaddexp, matmul, pad, select, sigmoid, stack, tri,
};
use mlx_rs::{Array, Dtype, fast};

use super::runs::{SHORT_ROWS, by_run};
use super::{Outputs, RmsNorm, fused, scaled, silu};
use crate::cache::{Element, Recurrent, Span, Writes, delta_write};
use crate::error::Result;
use crate::kernels::{self, DeltaView, GatedDeltaRows, REWIND};

/// Tokens in a chunk. Longer chunks mean fewer sequential steps but a larger triangle to invert; 64
/// is the paper's choice.
pub const CHUNK: i32 = 64;

/// Added to the sum of squares of q and k before the root. A constant of the reference
/// implementation, not the configured epsilon.
pub(super) const L2_EPS: f32 = 1e-6;

/// Weights and shape of the recurrent part of a GatedDeltaNet layer.
#[derive(Debug, Clone)]
pub struct GatedDelta {
    /// Depthwise causal convolution over q, k and v: one [C] for each tap, oldest first.
    pub conv1d: Vec<Array>,
    /// f32 [H_v], log of the decay rate.
    pub a_log: Array,
    /// [H_v], added to the decay's input.
    pub dt_bias: Array,
    /// [D_v], norm of the output before the gate.
    pub norm: RmsNorm,
    /// H_k, heads of q and k. Each serves H_v / H_k value heads.
    pub key_heads: i32,
    /// H_v
    pub value_heads: i32,
    /// D_k
    pub key_dim: i32,
    /// D_v
    pub value_dim: i32,
}

/// Projections of rows: of all in a pass (B = 1), or of spans with the same number of rows. As the [`Outputs`] of joined
/// layers they stand side by side, in this order.
#[derive(Debug, Clone)]
pub struct Projected {
    /// [B, T, C]: q, k and v before the convolution, C = 2 H_k D_k + H_v D_v.
    pub qkv: Array,
    /// [B, T, H_v D_v], the output gate.
    pub z: Array,
    /// [B, T, H_v], strength before the sigmoid.
    pub b: Array,
    /// [B, T, H_v], input of the decay.
    pub a: Array,
}

impl GatedDelta {
    /// An empty cache of this layer; activations are in `dtype`.
    pub fn new_cache(&self, dtype: Dtype) -> Result<Recurrent> {
        let taps = i32::try_from(self.conv1d.len()).expect("a convolution has a few taps");
        let state = [1, self.value_heads, self.value_dim, self.key_dim];
        let tail = [1, taps - 1, self.view().channels()];
        Ok(Recurrent::new(&state, &tail, dtype)?.with_kernels(&REWIND))
    }

    /// Runs the rows `x` of all spans through convolution, delta rule, norm and gate: [1, R, H_v D_v].
    /// `layer` is their entry in each span's cache.
    pub fn forward(&self, x: &Outputs<4>, spans: &mut [Span<'_>], layer: usize) -> Result<Array> {
        match x {
            Outputs::Joined(all) => {
                by_run([all], spans, layer, |[all], caches| self.run(&Outputs::Joined(all), caches))
            }
            Outputs::Apart(parts) => by_run(parts.each_ref(), spans, layer, |parts, caches| {
                self.run(&Outputs::Apart(parts), caches)
            }),
        }
    }

    /// The projections one by one.
    pub fn parts(&self, x: &Outputs<4>) -> Result<Projected> {
        let [qkv, z, b, a] = self.view().parts(x)?;
        Ok(Projected { qkv, z, b, a })
    }

    /// The layer as kernels read it.
    fn view(&self) -> DeltaView<'_> {
        DeltaView {
            conv1d: &self.conv1d,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            norm: self.norm.view(),
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
        }
    }

    /// Runs the rows `x` of a batch of B spans with the same number of rows: [B, T, H_v D_v].
    fn run(&self, x: &Outputs<4>, caches: &mut [&mut Recurrent]) -> Result<Array> {
        let (states, tails): (Vec<&Element>, Vec<&Element>) =
            caches.iter().map(|cache| cache.state()).unzip();
        let record = caches.iter().any(|cache| cache.has_draft_mark());
        let by_kernel = kernels::gated_delta(&self.view(), x, [&states, &tails], record)?;
        let GatedDeltaRows { y, state, tail, writes } = match by_kernel {
            Some(rows) => rows,
            None => {
                let state = Element::stack(states.into_iter())?;
                let tail = Element::stack(tails.into_iter())?;
                self.run_operations(&self.parts(x)?, state, &tail)?
            }
        };
        if let Some(writes) = writes.filter(|_| record) {
            // The first columns of joined projections are those of the convolution.
            let (Outputs::Joined(qkv) | Outputs::Apart([qkv, ..])) = x;
            let writes = writes.all_of(qkv.dim(0));
            for ((cache, x), writes) in
                caches.iter_mut().zip(Element::all_of(qkv.clone())).zip(writes)
            {
                cache.record(x, Some(writes));
            }
        }
        let elements = Element::all_of(state).zip(Element::all_of(tail));
        for (cache, (state, tail)) in caches.iter_mut().zip(elements) {
            cache.advance(state, tail);
        }
        Ok(y)
    }

    /// [`kernels::gated_delta`] in MLX's operations.
    fn run_operations(&self, x: &Projected, state: Array, tail: &Array) -> Result<GatedDeltaRows> {
        let [batch, rows, values] = [x.qkv.dim(0), x.qkv.dim(1), self.value_heads * self.value_dim];
        let dtype = x.qkv.dtype();
        let joined = concatenate(&[tail, &x.qkv], 1)?;
        let tail = joined.try_index((.., rows.., ..))?;
        let mut inputs = vec![x.b.clone(), x.a.clone(), joined, state];
        inputs.extend([&self.a_log, &self.dt_bias].map(Array::clone));
        inputs.extend_from_slice(&self.conv1d);
        let (y, state, writes) = if rows <= SHORT_ROWS {
            let [y, state, k, correction, log_decay] = fused(&inputs, step)?;
            (y, state, Writes { k, correction, log_decay })
        } else {
            delta_rule_chunked(&delta_inputs(&inputs)?, &inputs[3])?
        };
        let y = self.norm.forward(&y.swap_axes(1, 2)?.as_dtype(dtype)?)?;
        let y = y.reshape(&[batch, rows, values])?;
        let [y] = fused(&[y, x.z.clone()], |x| {
            let gate = silu(&x[1].as_dtype(Dtype::Float32)?)?;
            Ok([x[0].multiply(gate)?.as_dtype(x[0].dtype())?])
        })?;
        Ok(GatedDeltaRows { y, state, tail, writes: Some(writes) })
    }
}

/// A step of a few rows, from the projections to the norm: `inputs` as in [`delta_inputs`]; returns
/// y [B, H, T, D_v], the next state, and the fields of [`Writes`].
fn step(inputs: &[Array]) -> Result<[Array; 5]> {
    let (y, state, writes) = delta_rule_short(&delta_inputs(inputs)?, &inputs[3])?;
    let Writes { k, correction, log_decay } = writes;
    Ok([y, state, k, correction, log_decay])
}

/// Runs the convolution of a span and computes unit vectors and gates.
///
/// `inputs`: `b` and `a` as in [`Projected`], the convolution's input, the state, and `a_log`,
/// `dt_bias` and the taps as in [`GatedDelta`].
fn delta_inputs(inputs: &[Array]) -> Result<DeltaInputs> {
    let [b, a, joined, state, a_log, dt_bias, taps @ ..] = inputs else {
        unreachable!("GatedDelta::forward passes all of these")
    };
    let [batch, rows] = [b.dim(0), b.dim(1)];
    let [value_heads, value_dim, key_dim] = [state.dim(1), state.dim(2), state.dim(3)];
    let keys = (joined.dim(2) - value_heads * value_dim) / 2;
    let qkv = silu(&convolve(joined, taps, rows)?)?.split_at_indices(&[keys, 2 * keys], 2)?;
    // [B, T, H_k D_k] to unit vectors [B, T, H_v, D_k], each head repeated for its value heads.
    let unit_heads = |x: &Array| -> Result<Array> {
        let x = x.reshape(&[batch, rows, keys / key_dim, 1, key_dim])?;
        // rms_norm divides by the root of the mean; the factor D^-0.5 makes it the root of the sum.
        let dim = key_dim as f32;
        let unit = scaled(&fast::rms_norm(x, None, L2_EPS / dim)?, dim.powf(-0.5))?;
        let repeats = value_heads / (keys / key_dim);
        let unit = broadcast_to(&unit, &[batch, rows, keys / key_dim, repeats, key_dim])?;
        Ok(unit.reshape(&[batch, rows, value_heads, key_dim])?)
    };
    let zero = Array::from_f32(0.0).as_dtype(a.dtype())?;
    let duration = logaddexp(a.add(dt_bias)?, zero)?;
    let log_decay = exp(a_log)?.multiply(duration)?.negative()?;

    // The state sums over the whole context, so these are f32 whatever the weights' dtype is.
    Ok(DeltaInputs {
        q: scaled(&heads_first(&unit_heads(&qkv[0])?)?, (key_dim as f32).powf(-0.5))?,
        k: heads_first(&unit_heads(&qkv[1])?)?,
        v: heads_first(&qkv[2].reshape(&[batch, rows, value_heads, value_dim])?)?,
        log_decay: heads_first(&log_decay)?,
        beta: heads_first(&sigmoid(b)?)?,
    })
}

/// `a` [B, T, H, ..] as f32 [B, H, T, ..].
///
/// Copied where B and H are not one stride apart: on CUDA, MLX 0.32.2 multiplies such batches through arrays of pointers,
/// and products of several rows are wrong in some runs (`kernels/cuda/tests.rs` prints by how much).
pub fn heads_first(a: &Array) -> Result<Array> {
    let (is_batch, is_short) = (a.dim(0) > 1, a.dim(1) == 1);
    let a = a.as_dtype(Dtype::Float32)?.swap_axes(1, 2)?;
    if is_batch && !is_short { Ok(a.contiguous()?) } else { Ok(a) }
}

/// Causal depthwise convolution of `x` [B, K - 1 + T, C] with K taps [C].
pub fn convolve(x: &Array, taps: &[Array], rows: i32) -> Result<Array> {
    let mut sum: Option<Array> = None;
    for (tap, weight) in (0i32..).zip(taps) {
        let term = x.try_index((.., tap..tap + rows, ..))?.multiply(weight)?;
        sum = Some(match sum {
            Some(sum) => sum.add(term)?,
            None => term,
        });
    }
    Ok(sum.expect("a kernel has at least one tap: checked by the loader"))
}

/// Inputs of the delta rule, all f32 and heads first.
#[derive(Debug, Clone)]
pub struct DeltaInputs {
    /// [B, H, T, D_k], scaled unit vectors.
    pub q: Array,
    /// [B, H, T, D_k], unit vectors.
    pub k: Array,
    /// [B, H, T, D_v]
    pub v: Array,
    /// [B, H, T], log of g; [B, H, T, D_k] in [`super::kimi_delta`].
    pub log_decay: Array,
    /// [B, H, T]
    pub beta: Array,
}

/// The delta rule token by token: y [1, H, T, D_v] and the state after the last token.
pub fn delta_rule_recurrent(x: &DeltaInputs, state: &Array) -> Result<(Array, Array)> {
    let mut state = state.clone();
    let mut ys = Vec::new();
    for t in 0..x.q.dim(2) {
        let row = |a: &Array| a.try_index((.., .., t..t + 1));
        let (q, k, v) = (row(&x.q)?, row(&x.k)?, row(&x.v)?);
        state = state.multiply(exp(row(&x.log_decay)?.expand_dims(3)?)?)?;
        let missing = v.subtract(matmul(&k, state.swap_axes(2, 3)?)?)?;
        let correction = missing.multiply(row(&x.beta)?.expand_dims(3)?)?;
        state = state.add(matmul(correction.swap_axes(2, 3)?, &k)?)?;
        ys.push(matmul(&q, state.swap_axes(2, 3)?)?);
    }
    Ok((concatenate(&ys, 2)?, state))
}

/// The delta rule over a few tokens at once: y [B, H, T, D_v], the state after the last token, and
/// the writes to it. The state is read and written once, whatever T is.
///
/// Corrections D solve the same equation as those of [`delta_rule_chunked`].
pub fn delta_rule_short(x: &DeltaInputs, state: &Array) -> Result<(Array, Array, Writes)> {
    let DeltaInputs { q, k, v, log_decay, beta } = x;
    let rows = q.dim(2);
    if rows == 1 {
        return delta_rule_one(x, state);
    }
    let beta = beta.expand_dims(3)?;
    let running = log_decay.cumsum(2, None, None)?;
    let grown = exp(&running)?.expand_dims(3)?;
    // Products of keys and queries with the old state, then with the keys.
    let both = concatenate(&[k, q], 2)?;
    let recalled = matmul(&both, state.swap_axes(2, 3)?)?.split_at_indices(&[rows], 2)?;
    let missing = v.subtract(recalled[0].multiply(&grown)?)?.multiply(&beta)?;
    let near = matmul(&both, k.swap_axes(2, 3)?)?.split_at_indices(&[rows], 2)?;
    let decay = pairwise_decay(&running)?;
    let a = near[0].multiply(&decay)?.multiply(&beta)?;
    let correction = matmul(invert_unit_lower(&a)?, missing)?;
    let seen = near[1].multiply(decay)?;
    let y = recalled[1].multiply(&grown)?.add(matmul(seen, &correction)?)?;
    let writes = Writes { k: k.clone(), correction, log_decay: log_decay.clone() };
    Ok((y, delta_write(state, &writes)?, writes))
}

/// [`delta_rule_short`] of one token, in two products and few other operations: a step is short, and each costs a launch.
fn delta_rule_one(x: &DeltaInputs, state: &Array) -> Result<(Array, Array, Writes)> {
    let DeltaInputs { q, k, v, log_decay, beta } = x;
    let decay = exp(log_decay)?.expand_dims(3)?;
    let recalled = matmul(k, state.swap_axes(2, 3)?)?;
    let correction = v.subtract(recalled.multiply(&decay)?)?.multiply(beta.expand_dims(3)?)?;
    // An outer product whose factors are read as the state is: a matrix product would write it first.
    let written = correction.swap_axes(2, 3)?.multiply(k)?;
    let state = state.multiply(&decay)?.add(written)?;
    let y = matmul(q, state.swap_axes(2, 3)?)?;
    let writes = Writes { k: k.clone(), correction, log_decay: log_decay.clone() };
    Ok((y, state, writes))
}

/// e^(G_t - G_i) for i <= t, else 0: [.., T, T] of running sums G [.., T]. Masked before the
/// exponential, which would overflow above the diagonal.
pub(super) fn pairwise_decay(running: &Array) -> Result<Array> {
    let rows = running.dim(-1);
    let exponent = running.expand_dims(-1)?.subtract(running.expand_dims(-2)?)?;
    let lower = tri::<f32>(rows, None, None)?.as_type::<bool>()?;
    Ok(exp(select(&lower, exponent, Array::from_f32(f32::NEG_INFINITY))?)?)
}

/// The delta rule in chunks of [`CHUNK`] tokens: y [1, H, T, D_v], the state after the last token,
/// and the writes to it.
///
/// With G the running sum of log g inside a chunk, the corrections D (rows d) solve
/// `(I + A) D = beta (V - e^G K S^T)` where `A[t, i] = beta_t e^(G_t - G_i) k_t . k_i` for i < t.
/// The inverse and everything else that does not depend on S is computed for all chunks at once.
pub fn delta_rule_chunked(x: &DeltaInputs, state: &Array) -> Result<(Array, Array, Writes)> {
    let [heads, rows] = [x.q.dim(1), x.q.dim(2)];
    let chunks = (rows + CHUNK - 1) / CHUNK;
    let padding = chunks * CHUNK - rows;
    // A padded token has k = v = beta = 0 and g = 1, so it changes nothing.
    let split = |a: &Array| -> Result<Array> {
        let mut widths = vec![(0, 0); a.ndim()];
        widths[2] = (0, padding);
        let a = if padding > 0 { pad(a, &widths[..], None, None)? } else { a.clone() };
        let mut shape = vec![1, heads, chunks, CHUNK];
        shape.extend(&a.shape()[3..]);
        Ok(a.reshape(&shape)?)
    };
    let (q, k, v) = (split(&x.q)?, split(&x.k)?, split(&x.v)?);
    let beta = split(&x.beta)?.expand_dims(4)?;
    let running = split(&x.log_decay)?.cumsum(3, None, None)?;

    let decay = pairwise_decay(&running)?;
    let grown = exp(&running)?.expand_dims(4)?;

    let k_t = k.swap_axes(3, 4)?;
    let a = matmul(&k, &k_t)?.multiply(&decay)?.multiply(&beta)?;
    let inverse = invert_unit_lower(&a)?;
    let u = matmul(&inverse, v.multiply(&beta)?)?;
    let w = matmul(&inverse, k.multiply(&beta)?.multiply(&grown)?)?;
    let within = matmul(&q, &k_t)?.multiply(&decay)?;
    let q = q.multiply(&grown)?;
    // e^(G_end - G_i): the share of token i's correction that remains at the end of its chunk.
    let last = CHUNK - 1;
    let left = decay.try_index((.., .., .., last, ..))?.expand_dims(4)?;
    let k = k.multiply(left)?;
    let total = grown.try_index((.., .., .., last.., ..))?;

    let mut state = state.clone();
    let (mut ys, mut corrections) = (Vec::new(), Vec::new());
    for c in 0..chunks {
        let chunk = |a: &Array| a.try_index((.., .., c, .., ..));
        let state_t = state.swap_axes(2, 3)?;
        let d = chunk(&u)?.subtract(matmul(chunk(&w)?, &state_t)?)?;
        ys.push(matmul(chunk(&q)?, &state_t)?.add(matmul(chunk(&within)?, &d)?)?);
        state = state.multiply(chunk(&total)?)?.add(matmul(d.swap_axes(2, 3)?, chunk(&k)?)?)?;
        corrections.push(d);
    }
    let joined = |parts: &[Array]| -> Result<Array> {
        let all = stack(parts, 2)?.reshape(&[1, heads, chunks * CHUNK, x.v.dim(3)])?;
        Ok(all.try_index((.., .., ..rows, ..))?)
    };
    let (k, log_decay) = (x.k.clone(), x.log_decay.clone());
    Ok((joined(&ys)?, state, Writes { k, correction: joined(&corrections)?, log_decay }))
}

/// `(I + A)^-1` [.., T, T] with A the part of `a` below its diagonal; the rest is not read.
///
/// Inverts diagonal blocks of 1, 2, 4 ... rows: for a pair of blocks with inverses X and the part M
/// of A that couples them, the inverse of the pair is `X - X M X`. As stable as forward
/// substitution, in log2(T) products. The Neumann series needs as many, but its powers grow like
/// binomials if keys repeat, as they do in a loop.
pub(super) fn invert_unit_lower(a: &Array) -> Result<Array> {
    let rows = a.dim(-1);
    let mut inverse = broadcast_to(eye::<f32>(rows, None, None)?, a.shape())?;
    let mut block = 1;
    while block < rows {
        let coupling = a.multiply(coupling_mask(rows, block))?;
        inverse = if block == 1 {
            inverse.subtract(coupling)?
        } else {
            inverse.subtract(matmul(matmul(&inverse, coupling)?, &inverse)?)?
        };
        block *= 2;
    }
    Ok(inverse)
}

/// f32 [T, T]: 1 if the row is in the second and the column in the first block of the same pair.
fn coupling_mask(rows: i32, block: i32) -> Array {
    let mask: Vec<f32> = (0..rows * rows)
        .map(|at| {
            let (row, column) = (at / rows / block, at % rows / block);
            f32::from(u8::from(row % 2 == 1 && column == row - 1))
        })
        .collect();
    Array::from_slice(&mask, &[rows, rows])
}

#[cfg(test)]
mod tests;
