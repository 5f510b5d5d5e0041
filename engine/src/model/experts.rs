//! Loading of feed-forward blocks with experts, and the layouts of their weights.
//!
//! Stacked as MLX's converter writes them (`switch_mlp.gate_proj.weight` [E, F, D]), one by one as
//! Qwen publishes them (`experts.0.gate_proj.weight` [F, D]), or stacked with gate and up fused
//! (`experts.gate_up_proj` [E, 2 F, D]), as Qwen has done since Qwen3.5.
//!
//! Source: mlx-lm `sanitize` of `models/qwen3_moe.py` and `models/qwen3_5_moe.py`.

use serde::Deserialize;

use super::{Weights, llama};
use crate::error::Result;
use crate::nn::{Experts, Gate, Groups, Mlp, Moe, Shared};

/// The keys of `config.json` that state how a row chooses experts. `decoder_sparse_step` and
/// `mlp_only_layers` are not read: layers with experts have a router in the checkpoint.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Config {
    num_experts: usize,
    num_experts_per_tok: i32,
    norm_topk_prob: Option<bool>,
    /// Groups of experts, and those of them that a row chooses from.
    n_group: Option<i32>,
    topk_group: Option<i32>,
    /// Factor of the chosen probabilities.
    routed_scaling_factor: Option<f32>,
}

/// `config.json` of variants of Llama with experts.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct SparseLlama {
    #[serde(flatten)]
    pub llama: llama::Config,
    #[serde(flatten)]
    pub experts: Config,
}

impl Config {
    /// Takes the feed-forward block at `at`, dense or with experts. The parameter `norm_topk_prob`
    /// is the family's default.
    pub fn load(&self, weights: &mut Weights, at: &str, norm_topk_prob: bool) -> Result<Mlp> {
        if !weights.has(&format!("{at}.gate.weight")) {
            return Ok(Mlp::Dense(weights.gated_mlp(at, Gate::Silu)?.into()));
        }
        if self.num_experts == 0 || self.num_experts_per_tok == 0 {
            let problem = "`num_experts` or `num_experts_per_tok` is missing; the weights have \
                           experts";
            return Err(weights.problem("config.json", problem.into()));
        }
        let stacked = format!("{at}.switch_mlp");
        divide_fused(weights, &format!("{at}.experts"), &stacked)?;
        stack(weights, self.num_experts, &format!("{at}.experts"), &stacked)?;
        // Routers with sigmoids have a bias.
        let names = ["gate.e_score_correction_bias", "e_score_correction_bias", "expert_bias"];
        let bias =
            names.map(|name| format!("{at}.{name}")).into_iter().find(|name| weights.has(name));
        let count = i32::try_from(self.num_experts).unwrap_or(i32::MAX);
        let bias = bias.map(|name| weights.vector_f32(&name, count)).transpose()?;
        let shared = if weights.has(&format!("{at}.shared_experts.up_proj.weight")) {
            let expert = weights.gated_mlp(&format!("{at}.shared_experts"), Gate::Silu)?;
            Some(Shared { expert: expert.unsummed().into(), gate: None })
        } else if weights.has(&format!("{at}.shared_expert.up_proj.weight")) {
            let expert = weights.gated_mlp(&format!("{at}.shared_expert"), Gate::Silu)?;
            Some(Shared {
                expert: expert.unsummed().into(),
                gate: Some(weights.linear_to(&format!("{at}.shared_expert_gate"), 1)?),
            })
        } else {
            None
        };
        Ok(Mlp::Sparse(Box::new(Moe {
            gate: weights.linear_to(&format!("{at}.gate"), count)?,
            experts: Experts(weights.gated_experts(&stacked, Gate::Silu, self.num_experts)?.into()),
            top_k: self.num_experts_per_tok,
            norm_topk_prob: self.norm_topk_prob.unwrap_or(norm_topk_prob),
            scale: self.routed_scaling_factor.unwrap_or(1.0),
            groups: bias.map(|bias| Groups {
                bias,
                count: self.n_group.unwrap_or(1),
                chosen: self.topk_group.unwrap_or(1),
            }),
            shared,
            ranks: weights.ranks().clone(),
        })))
    }
}

/// Stacks `count` experts that are stored one by one at `at`.
pub(super) fn stack(weights: &mut Weights, count: usize, at: &str, stacked: &str) -> Result<()> {
    for name in ["gate_proj", "up_proj", "down_proj"] {
        if weights.has(&format!("{at}.0.{name}.weight")) {
            let one_by_one: Vec<String> = (0..count).map(|e| format!("{at}.{e}.{name}")).collect();
            weights.stack(&one_by_one, &format!("{stacked}.{name}"))?;
        }
    }
    Ok(())
}

/// Moves experts with fused gate and up from `at` to the three layers of `stacked`.
pub(super) fn divide_fused(weights: &mut Weights, at: &str, stacked: &str) -> Result<()> {
    let fused = format!("{at}.gate_up_proj");
    if !weights.has(&fused) {
        return Ok(());
    }
    let halves = weights.remove(&fused)?.split_equal(2, 1)?;
    for (name, half) in ["gate_proj", "up_proj"].into_iter().zip(halves) {
        // A view into both halves would be copied by the kernels at each step.
        weights.insert(format!("{stacked}.{name}.weight"), half.contiguous()?);
    }
    let down = weights.remove(&format!("{at}.down_proj"))?;
    weights.insert(format!("{stacked}.down_proj.weight"), down);
    Ok(())
}
