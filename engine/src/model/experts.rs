//! Experts on their way into a model: the layouts they come in.
//!
//! Stacked as MLX's converter leaves them (`switch_mlp.gate_proj.weight` [E, F, D]), one by one as
//! Qwen publishes them (`experts.0.gate_proj.weight` [F, D]), or stacked with gate and up in one
//! (`experts.gate_up_proj` [E, 2 F, D]), as Qwen has done since Qwen3.5.
//!
//! Source: mlx-lm `sanitize` of `models/qwen3_moe.py` and `models/qwen3_5_moe.py`.

use serde::Deserialize;

use super::Weights;
use crate::error::Result;
use crate::nn::{Experts, Mlp, Moe, Shared, SwiGlu, swiglu};

/// The keys of `config.json` that say how a row chooses. Which layers have experts is not read
/// (`decoder_sparse_step`, `mlp_only_layers`): the checkpoint has a router there or has it not.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Config {
    num_experts: usize,
    num_experts_per_tok: i32,
    norm_topk_prob: Option<bool>,
}

impl Config {
    /// Takes the feed-forward block at `at`, of whichever kind it is. `norm_topk_prob` where the
    /// config does not say.
    ///
    /// # Errors
    /// [`crate::Error::Model`] when a tensor is missing, or a key that layers of experts need.
    pub fn load(&self, weights: &mut Weights, at: &str, norm_topk_prob: bool) -> Result<Mlp> {
        if !weights.has(&format!("{at}.gate.weight")) {
            return Ok(Mlp::Dense(dense(weights, at)?));
        }
        if self.num_experts == 0 || self.num_experts_per_tok == 0 {
            let problem = "`num_experts` or `num_experts_per_tok` is missing; the weights have \
                           experts";
            return Err(weights.problem("config.json", problem.into()));
        }
        self.stack(weights, at)?;
        let shared = if weights.has(&format!("{at}.shared_expert.up_proj.weight")) {
            Some(Shared {
                expert: dense(weights, &format!("{at}.shared_expert"))?,
                gate: weights.linear(&format!("{at}.shared_expert_gate"))?,
            })
        } else {
            None
        };
        Ok(Mlp::Sparse(Box::new(Moe {
            gate: weights.linear(&format!("{at}.gate"))?,
            experts: Experts {
                gated: swiglu,
                gate_proj: weights.linear(&format!("{at}.switch_mlp.gate_proj"))?,
                up_proj: weights.linear(&format!("{at}.switch_mlp.up_proj"))?,
                down_proj: weights.linear(&format!("{at}.switch_mlp.down_proj"))?,
            },
            top_k: self.num_experts_per_tok,
            norm_topk_prob: self.norm_topk_prob.unwrap_or(norm_topk_prob),
            shared,
        })))
    }

    /// Brings the experts at `at` to `switch_mlp.*`.
    fn stack(&self, weights: &mut Weights, at: &str) -> Result<()> {
        let fused = format!("{at}.experts.gate_up_proj");
        if weights.has(&fused) {
            let halves = weights.remove(&fused)?.split_equal(2, 1)?;
            for (name, half) in ["gate_proj", "up_proj"].into_iter().zip(halves) {
                // Not a view into both halves, which kernels would copy at each step.
                weights.insert(format!("{at}.switch_mlp.{name}.weight"), half.contiguous()?);
            }
            let down = weights.remove(&format!("{at}.experts.down_proj"))?;
            weights.insert(format!("{at}.switch_mlp.down_proj.weight"), down);
        } else if weights.has(&format!("{at}.experts.0.up_proj.weight")) {
            for name in ["gate_proj", "up_proj", "down_proj"] {
                let one_by_one: Vec<String> =
                    (0..self.num_experts).map(|e| format!("{at}.experts.{e}.{name}")).collect();
                weights.stack(&one_by_one, &format!("{at}.switch_mlp.{name}"))?;
            }
        }
        Ok(())
    }
}

/// Takes a dense feed-forward block.
///
/// # Errors
/// [`crate::Error::Model`] when a tensor is missing.
pub(super) fn dense(weights: &mut Weights, at: &str) -> Result<SwiGlu> {
    Ok(SwiGlu {
        gate_proj: weights.linear(&format!("{at}.gate_proj"))?,
        up_proj: weights.linear(&format!("{at}.up_proj"))?,
        down_proj: weights.linear(&format!("{at}.down_proj"))?,
    })
}
