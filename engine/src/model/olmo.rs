//! OLMo 2 and 3: Llama with norms of each block's output instead of its input, and norms of the queries and
//! keys of all heads together. OLMo 3 has windows in three of four layers; only the others have positions
//! that are stretched.
//!
//! Source: arXiv:2501.00656; `transformers` `models/olmo2` and `models/olmo3`; mlx-lm files of these names,
//! checked by the reference logits in `tests/fixtures`.

use serde_json::Value;

use super::llama::{AttentionConfig, Config, Llama, POST_NORM, dense_mlp};
use super::{Model, Weights};
use crate::error::Result;
use crate::nn::Scaling;

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 500_000.0;

/// Every `n`th layer has full attention if there are no `layer_types`.
const PATTERN: usize = 4;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let full = of_kind(config, weights, "full_attention")?;
    let mut sliding = of_kind(config, weights, "sliding_attention")?;
    let rope = &mut sliding.rope;
    for table in [&mut rope.rope_parameters, &mut rope.rope_scaling].into_iter().flatten() {
        table.scaling = Scaling::Default;
    }
    let [whole, near] = [&full, &sliding].map(|config| config.attention(ROPE_THETA));
    let attention = |layer| {
        let window = match full.layer_types {
            Some(_) => full.window(layer),
            None => full.sliding_window.filter(|_| !(layer + 1).is_multiple_of(PATTERN)),
        };
        let kind = if window.is_some() { &near } else { &whole };
        AttentionConfig { window, ..kind.clone() }
    };
    Ok(Box::new(Llama::load(&full, weights, POST_NORM, attention, dense_mlp)?))
}

/// The config with the rotation of layers of this `kind`: since transformers 5, OLMo 3 has a table for each.
fn of_kind(config: &Value, weights: &Weights, kind: &str) -> Result<Config> {
    let mut config = config.clone();
    if let Some(own) = config.get("rope_parameters").and_then(|tables| tables.get(kind)).cloned() {
        config["rope_parameters"] = own;
    }
    weights.config(&config)
}
