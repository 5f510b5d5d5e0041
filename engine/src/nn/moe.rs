//! Feed-forward blocks of many experts; a router chooses a few for each row.
//!
//! A prefill sorts rows by expert, so that an expert's weights are read once. A step of a few rows
//! gathers experts in the order of the rows.
//!
//! Source: arXiv:1701.06538; Qwen3-MoE (arXiv:2505.09388) for the router, Qwen2-MoE for the shared
//! expert and its gate; mlx-lm `models/switch_layers.py` for sorting.

use mlx_rs::ops::indexing::{TryIndexOp, take_along_axis};
use mlx_rs::ops::{argpartition_axis, argsort_axis, select, sigmoid, softmax_axis, sort_axis};
use mlx_rs::{Array, Dtype};

use super::{Block, Gate, GatedMlp, Input, Linear, RmsNorm, scaled};
use crate::error::Result;
use crate::kernels::{self, ExpertsView, SharedGate};
use crate::ranks::Ranks;

/// Sorting does not pay for fewer choices.
const SORTED_CHOICES: i32 = 64;

/// A feed-forward block of either kind.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant, reason = "there is one in a layer, and most are dense")]
pub enum Mlp {
    /// One block for all rows.
    Dense(Block),
    /// A few experts for each row.
    Sparse(Box<Moe>),
}

impl Mlp {
    /// `x` [1, R, D], same shape back.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match self {
            Self::Dense(mlp) => mlp.forward(x),
            Self::Sparse(moe) => moe.forward(x),
        }
    }

    /// `x + mlp(norm x)`; `x` [1, R, D], same shape back.
    pub fn residual(&self, x: &Array, norm: &RmsNorm) -> Result<Array> {
        match self {
            Self::Dense(mlp) => mlp.residual(x, norm),
            Self::Sparse(moe) => match moe.residual_by_kernel(x, norm)? {
                Some(y) => Ok(y),
                None => Ok(x.add(moe.forward(&norm.forward(x)?)?)?),
            },
        }
    }
}

/// `sum over the chosen e of p_e expert_e(x)`, with p the router's softmax, or its sigmoid if there are
/// `groups`.
#[derive(Debug, Clone)]
pub struct Moe {
    /// The router, [E, D].
    pub gate: Linear,
    /// All experts, stacked.
    pub experts: Experts,
    /// Experts a row.
    pub top_k: i32,
    /// Whether the chosen probabilities are scaled to a sum of 1.
    pub norm_topk_prob: bool,
    /// Factor of the chosen probabilities.
    pub scale: f32,
    /// How experts are chosen by sigmoids.
    pub groups: Option<Groups>,
    /// An expert for all rows.
    pub shared: Option<Shared>,
    /// The ranks that have parts of all experts, also of the shared one.
    pub ranks: Ranks,
}

/// Choice by sigmoids and a bias that balanced the experts in training: the best groups by the sum of their
/// two best experts, then the best experts of these (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
#[derive(Debug, Clone)]
pub struct Groups {
    /// f32 [E], added for the choice only.
    pub bias: Array,
    /// Groups of neighbouring experts.
    pub count: i32,
    /// Groups that are chosen.
    pub chosen: i32,
}

/// A stack of E blocks.
#[derive(Debug, Clone)]
pub struct Experts(pub Block);

/// `expert(x)`, times `sigmoid(gate x)` if there is a gate.
#[derive(Debug, Clone)]
pub struct Shared {
    /// May differ in width from the others.
    pub expert: Block,
    /// [1, D]
    pub gate: Option<Linear>,
}

impl Moe {
    /// `x` [1, R, D], same shape back.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let (chosen, shares) = self.choose(x)?;
        let y = self.experts.sum(x, &chosen, &shares)?;
        self.ranks.sum(match &self.shared {
            Some(shared) => y.add(shared.forward(x)?)?,
            None => y,
        })
    }

    /// `x + moe(norm x)`; `None` if there is no kernel.
    fn residual_by_kernel(&self, x: &Array, norm: &RmsNorm) -> Result<Option<Array>> {
        let Some(view) = self.view() else { return Ok(None) };
        let router = |x: Input<'_>| self.gate.apply(x, None);
        let expert = self.shared.as_ref().map(|shared| &shared.expert);
        let y = match expert {
            Some(expert) => {
                let shared = |x: Input<'_>| expert.forward_of(x);
                kernels::experts(&view, x, norm.view(), &router, Some(&shared))
            }
            None => kernels::experts(&view, x, norm.view(), &router, None),
        };
        y?.map(|y| self.ranks.sum(y)).transpose()
    }

    /// The block as kernels read it. `None` if they have another form.
    pub(crate) fn view(&self) -> Option<ExpertsView<'_>> {
        let Block::Gated(GatedMlp { gate: Gate::Silu, gate_up, down_proj }) = &self.experts.0
        else {
            return None;
        };
        let [gate_proj, up_proj] = gate_up.apart()?;
        let stack = |linear| match linear {
            &Linear::Quantized { ref weight, bias: None } => Some(weight.view()),
            _ => None,
        };
        let gate = self.shared.as_ref().and_then(|shared| shared.gate.as_ref());
        let shared_gate = match gate {
            None => None,
            Some(Linear::Dense { weight, bias: None }) => Some(SharedGate::Dense(&weight.weight)),
            Some(Linear::Quantized { weight, bias: None }) => {
                Some(SharedGate::Packed(weight.view()))
            }
            Some(_) => return None,
        };
        if self.groups.is_some() {
            return None;
        }
        Some(ExpertsView {
            stacks: [stack(gate_proj)?, stack(up_proj)?, stack(down_proj)?],
            shared_gate,
            top_k: self.top_k,
            norm_topk_prob: self.norm_topk_prob,
            scale: self.scale,
            adds_rows: self.ranks.is_first(),
        })
    }

    /// The experts of each row of `x` [1, R, D], [1, R, K] (u32), and their shares, [1, R, K].
    pub fn choose(&self, x: &Array) -> Result<(Array, Array)> {
        let scores = self.gate.forward(x)?;
        let (probabilities, ranks) = match &self.groups {
            // The softmax sums in f32; its result has x's dtype.
            None => {
                let probabilities = softmax_axis(scores, -1, true)?;
                (probabilities.clone(), probabilities)
            }
            Some(groups) => {
                let probabilities = sigmoid(scores.as_dtype(Dtype::Float32)?)?;
                let ranks = groups.ranks(&probabilities)?;
                (probabilities, ranks)
            }
        };
        let order = argpartition_axis(&ranks, -self.top_k, -1)?;
        let chosen = order.try_index((.., .., -self.top_k..))?;
        let mut shares = take_along_axis(&probabilities, &chosen, -1)?;
        if self.norm_topk_prob {
            // Also of a single expert, as in transformers; with sigmoids mlx-lm 0.32.2 leaves that one.
            shares = shares.divide(shares.sum_axis(-1, true)?)?;
        }
        if self.scale != 1.0 {
            shares = scaled(&shares, self.scale)?;
        }
        Ok((chosen, shares.as_dtype(x.dtype())?))
    }
}

impl Groups {
    /// What the choice goes by, [1, R, E]: 0 for experts of other groups than the best.
    fn ranks(&self, probabilities: &Array) -> Result<Array> {
        let ranks = probabilities.add(&self.bias)?;
        if self.count <= 1 || self.chosen >= self.count {
            return Ok(ranks);
        }
        let parts = ranks.reshape(&[1, ranks.dim(1), self.count, -1])?;
        let experts = parts.dim(3);
        let best = sort_axis(&parts, -1)?.try_index((.., .., .., (experts - 2).max(0)..))?;
        let sums = best.sum_axis(-1, true)?;
        let least = sort_axis(&sums, 2)?.try_index((.., .., -self.chosen, ..))?.expand_dims(2)?;
        let kept = select(sums.ge(least)?, parts, Array::from_f32(0.0))?;
        Ok(kept.reshape(ranks.shape())?)
    }
}

impl Shared {
    /// `x` [1, R, D], same shape back.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let y = self.expert.forward(x)?;
        match &self.gate {
            Some(gate) => Ok(y.multiply(sigmoid(gate.forward(x)?)?)?),
            None => Ok(y),
        }
    }
}

impl Experts {
    /// The sum of the `chosen` experts of each row of `x` [1, R, D], times their `shares`: [1, R, D]. Where ranks have parts of
    /// the experts, the caller sums that of all.
    pub fn sum(&self, x: &Array, chosen: &Array, shares: &Array) -> Result<Array> {
        let y = self.forward(x, chosen)?;
        Ok(y.multiply(shares.expand_dims(-1)?)?.sum_axis(-2, false)?)
    }

    /// `x` [1, R, D] through the experts `chosen` [1, R, K] (u32) of each row: [1, R, K, D].
    pub fn forward(&self, x: &Array, chosen: &Array) -> Result<Array> {
        let [rows, k, d] = [x.dim(1), chosen.dim(2), x.dim(2)];
        if rows * k < SORTED_CHOICES {
            let x = x.reshape(&[1, rows, 1, 1, d])?;
            return Ok(self.0.gather(&x, chosen, false)?.squeeze_axes(&[-2])?);
        }
        let flat = chosen.reshape(&[rows * k])?;
        let order = argsort_axis(&flat, 0)?;
        let row = order.floor_divide(Array::from_int(k).as_dtype(order.dtype())?)?;
        let x = x.reshape(&[rows, 1, d])?.take_axis(row, 0)?;
        let y = self.0.gather(&x, &flat.take_axis(&order, 0)?, true)?;
        // The argsort of a permutation is its inverse.
        Ok(y.take_axis(argsort_axis(&order, 0)?, 0)?.reshape(&[1, rows, k, d])?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Gate, GatedMlp, Joined, Mode, Packed, Quantization};
    use mlx_rs::ops::concatenate;
    use mlx_rs::random;

    fn normal(seed: u64, shape: &[i32]) -> Array {
        random::normal::<f32>(shape, None, None, &random::key(seed).unwrap()).unwrap()
    }

    fn dense(seed: u64, shape: &[i32]) -> Linear {
        let weight = normal(seed, shape).multiply(Array::from_f32(0.1)).unwrap();
        Linear::Dense { weight: weight.into(), bias: None }
    }

    fn packed(linear: &Linear) -> Linear {
        let Linear::Dense { weight, .. } = linear else { unreachable!("made dense above") };
        let quantization = Quantization { group_size: 32, bits: 8, mode: Mode::Affine };
        Linear::Quantized { weight: Packed::quantize(&weight.weight, quantization), bias: None }
    }

    fn assert_close(a: &Array, b: &Array, bound: f32) {
        let worst = a.subtract(b).unwrap().abs().unwrap().max(None).unwrap().item_exact::<f32>();
        assert!(worst < bound, "differs by {worst}");
    }

    /// Sorted or not, packed or not: every choice is its expert's product. 40 rows of 2 choices are
    /// sorted, a single row is not.
    #[test]
    fn rows_together_equal_rows_alone() {
        let [gate, up, down] =
            [dense(1, &[5, 64, 32]), dense(2, &[5, 64, 32]), dense(3, &[5, 32, 64])];
        let experts = |[gate, up, down_proj]: [Linear; 3]| {
            let gate_up = Joined::new([gate, up]).unwrap();
            Experts(GatedMlp { gate: Gate::Silu, gate_up, down_proj }.into())
        };
        let quantized = experts([packed(&gate), packed(&up), packed(&down)]);
        let experts = experts([gate, up, down]);
        let x = normal(4, &[1, 40, 32]);
        let chosen: Vec<u32> = (0..80).map(|i| i * 7 % 5).collect();
        let chosen = Array::from_slice(&chosen, &[1, 40, 2]);
        for (experts, bound) in [(&experts, 1e-5), (&quantized, 1e-4)] {
            let together = experts.forward(&x, &chosen).unwrap();
            let alone: Vec<Array> = (0..40)
                .map(|i| {
                    let row = |a: &Array| a.try_index((.., i..i + 1, ..)).unwrap();
                    experts.forward(&row(&x), &row(&chosen)).unwrap()
                })
                .collect();
            assert_close(&together, &concatenate(&alone, 1).unwrap(), bound);
        }
        let [exact, rounded] =
            [&experts, &quantized].map(|experts| experts.forward(&x, &chosen).unwrap());
        assert_close(&exact, &rounded, 0.05);
    }
}
