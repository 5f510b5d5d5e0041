//! Sampling: the next token of each row of logits.
//!
//! Knows logits, parameters and noise; no sequence, no draft and no policy. [`rows`] samples in MLX's graph, and
//! [`host`] does the same where the logits are in the host's memory. The noise of a token depends on seed and position
//! alone ([`noise`]), so that a token does not depend on what else runs.

pub mod adjust;
pub mod host;
pub mod logprobs;
pub mod noise;
pub mod penalties;
pub mod row;
pub mod rows;
pub mod sampler;
pub mod samples;
