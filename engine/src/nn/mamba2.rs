//! Mamba-2: a state that decays by a factor that each token chooses, and to which each token is added.
//!
//! Per head and token, with state S [P, N], step dt > 0, input x [P], and B, C [N] shared by a group of heads:
//!
//! ```text
//! S <- e^(-e^(A_log) dt) S + dt x B^T;   y = S C + D x
//! ```
//!
//! It is the gated delta rule without the correction, so its writes to the state are [`Writes`] with k = B and
//! a correction of dt x, and a rewind replays them alike.
//!
//! Source: Mamba-2 (arXiv:2405.21060), in chunks by its section 6; checked against mlx-lm `models/ssm.py`.

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::{broadcast_to, concatenate, exp, logaddexp, matmul, maximum, minimum};
use mlx_rs::{Array, Dtype, fast};

use super::gated_delta::{CHUNK, convolve, heads_first, pairwise_decay};
use super::runs::by_run;
use super::{RmsNorm, mean_square, silu, swiglu};
use crate::cache::{Element, Recurrent, Span, Writes, delta_write};
use crate::error::Result;
use crate::kernels::REWIND;
use crate::ranks::Ranks;

/// Weights and shape of the recurrent part of a Mamba-2 layer.
#[derive(Debug, Clone)]
pub struct Mamba2 {
    /// Depthwise causal convolution over x, B and C: one [H P + 2 G N] for each tap, oldest first.
    pub conv1d: Vec<Array>,
    /// [H P + 2 G N]
    pub conv_bias: Option<Array>,
    /// f32 [H], log of the decay rate.
    pub a_log: Array,
    /// f32 [H], added to the step's input.
    pub dt_bias: Array,
    /// f32 [H], factor of the input in the output.
    pub d: Array,
    /// H
    pub heads: i32,
    /// G, groups of heads that share B and C.
    pub groups: i32,
    /// P
    pub head_dim: i32,
    /// N
    pub state: i32,
    /// Least and largest step.
    pub dt_limit: [f32; 2],
}

/// Inputs of the recurrence, all f32 and heads first.
struct Inputs {
    /// dt x, [B, H, T, P]
    v: Array,
    /// [B, H, T, N]
    b: Array,
    /// [B, H, T, N]
    c: Array,
    /// [B, H, T]
    log_decay: Array,
}

impl Mamba2 {
    /// An empty cache of this layer; activations are in `dtype`.
    pub fn new_cache(&self, dtype: Dtype) -> Result<Recurrent> {
        let taps = i32::try_from(self.conv1d.len()).expect("a convolution has a few taps");
        let channels = self.heads * self.head_dim + 2 * self.groups * self.state;
        let state = [1, self.heads, self.head_dim, self.state];
        Ok(Recurrent::new(&state, &[1, taps - 1, channels], dtype)?.with_kernels(&REWIND))
    }

    /// Runs the rows of all spans through convolution and recurrence: `xbc` [1, R, H P + 2 G N] and `dt`
    /// [1, R, H], to [1, R, H P]. `layer` is their entry in each span's cache.
    pub fn forward(
        &self,
        [xbc, dt]: [&Array; 2],
        spans: &mut [Span<'_>],
        layer: usize,
    ) -> Result<Array> {
        by_run([xbc, dt], spans, layer, |[xbc, dt], caches| self.run(&xbc, &dt, caches))
    }

    /// Runs the rows of a batch of B spans with the same number of rows: [B, T, H P].
    fn run(&self, xbc: &Array, dt: &Array, caches: &mut [&mut Recurrent]) -> Result<Array> {
        let &Self { heads, groups, head_dim, state: size, .. } = self;
        let [batch, rows] = [xbc.dim(0), xbc.dim(1)];
        let mut state = Element::stack(caches.iter().map(|cache| cache.state().0))?;
        let tail = Element::stack(caches.iter().map(|cache| cache.state().1))?;
        let joined = concatenate(&[&tail, xbc], 1)?;
        let tail = joined.try_index((.., rows.., ..))?;
        let mut mixed = convolve(&joined, &self.conv1d, rows)?;
        if let Some(bias) = &self.conv_bias {
            mixed = mixed.add(bias)?;
        }
        let ends = [heads * head_dim, heads * head_dim + groups * size];
        let parts = silu(&mixed)?.as_dtype(Dtype::Float32)?.split_at_indices(&ends, 2)?;
        // [B, T, G N] to [B, H, T, N], each group repeated for its heads.
        let of_heads = |a: &Array| -> Result<Array> {
            let a = a.reshape(&[batch, rows, groups, 1, size])?;
            let a = broadcast_to(&a, &[batch, rows, groups, heads / groups, size])?;
            heads_first(&a.reshape(&[batch, rows, heads, size])?)
        };
        let zero = Array::from_f32(0.0);
        let dt = logaddexp(dt.as_dtype(Dtype::Float32)?.add(&self.dt_bias)?, zero)?;
        let [least, most] = self.dt_limit.map(Array::from_f32);
        let dt = maximum(minimum(dt, most)?, least)?.swap_axes(1, 2)?;
        let x = heads_first(&parts[0].reshape(&[batch, rows, heads, head_dim])?)?;
        let rate = exp(&self.a_log)?.reshape(&[heads, 1])?;
        let inputs = Inputs {
            v: x.multiply(dt.expand_dims(3)?)?,
            b: of_heads(&parts[1])?,
            c: of_heads(&parts[2])?,
            log_decay: dt.multiply(rate)?.negative()?,
        };
        let mut ys = Vec::new();
        let mut start = 0;
        while start < rows {
            let end = rows.min(start + CHUNK);
            let y;
            (y, state) = inputs.rows(start..end)?.chunk(&state)?;
            ys.push(y);
            start = end;
        }
        let writes = inputs.writes().all_of(xbc.dim(0));
        for ((cache, x), writes) in caches.iter_mut().zip(Element::all_of(xbc.clone())).zip(writes)
        {
            cache.record(x, Some(writes));
        }
        let elements = Element::all_of(state).zip(Element::all_of(tail));
        for (cache, (state, tail)) in caches.iter_mut().zip(elements) {
            cache.advance(state, tail);
        }
        let y = if let [y] = &ys[..] { y.clone() } else { concatenate(&ys, 2)? };
        let y = y.add(x.multiply(self.d.reshape(&[heads, 1, 1])?)?)?;
        let y = y.swap_axes(1, 2)?.reshape(&[batch, rows, heads * head_dim])?;
        Ok(y.as_dtype(xbc.dtype())?)
    }
}

impl Inputs {
    fn rows(&self, rows: std::ops::Range<i32>) -> Result<Self> {
        let part = |a: &Array| -> Result<Array> {
            if rows.len() == a.dim(2) as usize {
                return Ok(a.clone());
            }
            Ok(a.try_index((.., .., rows.clone()))?)
        };
        Ok(Self {
            v: part(&self.v)?,
            b: part(&self.b)?,
            c: part(&self.c)?,
            log_decay: part(&self.log_decay)?,
        })
    }

    fn writes(&self) -> Writes {
        let Self { v, b, log_decay, .. } = self;
        Writes { k: b.clone(), correction: v.clone(), log_decay: log_decay.clone() }
    }

    /// All rows at once: y [B, H, T, P] without D x, and the state after the last one.
    ///
    /// With G the running sum of the log decays, `y_t = e^(G_t) S C_t + sum over i <= t of
    /// e^(G_t - G_i) (C_t . B_i) v_i`.
    fn chunk(&self, state: &Array) -> Result<(Array, Array)> {
        let running = self.log_decay.cumsum(2, None, None)?;
        let recalled = matmul(&self.c, state.swap_axes(2, 3)?)?;
        let recalled = recalled.multiply(exp(&running)?.expand_dims(3)?)?;
        let near = matmul(&self.c, self.b.swap_axes(2, 3)?)?.multiply(pairwise_decay(&running)?)?;
        let y = recalled.add(matmul(near, &self.v)?)?;
        Ok((y, delta_write(state, &self.writes())?))
    }
}

/// `norm(silu(gate) * y)`, in groups of neighbouring dimensions.
#[derive(Debug, Clone)]
pub struct GatedNorm {
    /// [H P]
    pub norm: RmsNorm,
    /// Parts that are normalised each by itself.
    pub groups: i32,
    /// Where the dimensions are a part of one group whose other parts other ranks have.
    pub part: Option<GroupPart>,
}

/// A part of a group of dimensions.
#[derive(Debug, Clone)]
pub struct GroupPart {
    /// The ranks that have parts of any group, as many of each.
    pub ranks: Ranks,
    /// Number of groups.
    pub groups: i32,
}

impl GroupPart {
    /// The mean square [1, R, 1] of the whole group, of that of this part.
    fn mean_square(&self, own: &Array) -> Result<Array> {
        let members = self.ranks.count() / self.groups;
        // Neighbouring ranks have the same group.
        let group = self.ranks.index() / members;
        let is_own: Vec<f32> = (0..self.groups).map(|i| f32::from(i == group)).collect();
        let by_group = own.multiply(Array::from_slice(&is_own, &[self.groups]))?;
        let sums = self.ranks.sum(by_group)?.try_index((.., .., group..group + 1))?;
        Ok(sums.divide(Array::from_f32(members as f32))?)
    }
}

impl GatedNorm {
    /// `y` and `gate` [1, R, H P], same shape back.
    pub fn forward(&self, y: Array, gate: Array) -> Result<Array> {
        let gated = swiglu(gate, y)?;
        if let Some(part) = &self.part {
            return self.norm.forward_by(&gated, &part.mean_square(&mean_square(&gated)?)?);
        }
        if self.groups == 1 {
            return self.norm.forward(&gated);
        }
        let shape = gated.shape();
        let parts = gated.reshape(&[shape[0], shape[1], self.groups, -1])?;
        let normed = fast::rms_norm(parts, None, self.norm.eps)?.reshape(shape)?;
        Ok(normed.multiply(&self.norm.weight)?)
    }
}
