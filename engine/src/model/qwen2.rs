//! Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, which the checkpoint contains.
//! Some declare windows for their upper layers. Also the text part of Qwen2-VL and Qwen2.5-VL, for whose three
//! positions of text are equal.
//!
//! # Why
//! Qwen2-MoE divides the shares of its experts by their sum if `norm_topk_prob` says so, as in `transformers`;
//! mlx-lm 0.32.2 ignores the key.
//!
//! Source: arXiv:2407.10671; `transformers` `models/qwen2` and `models/qwen2_5_vl`; mlx-lm `models/qwen2.py`
//! (which ignores the windows) and `models/qwen2_vl.py`, checked by the reference logits in
//! `tests/fixtures`.

use serde::Deserialize;
use serde_json::Value;

use super::llama::{self, AttentionConfig, Llama, PRE_NORM, dense_mlp};
use super::{Model, Weights};
use crate::error::Result;

/// `config.json`, or its `text_config` in multimodal checkpoints; of Qwen3 as well.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Config {
    #[serde(flatten)]
    pub llama: llama::Config,
    /// If false, `sliding_window` and `layer_types` are ignored.
    #[serde(default)]
    use_sliding_window: bool,
    /// The first layer with a window if there are no `layer_types`.
    #[serde(default)]
    max_window_layers: usize,
}

impl Config {
    /// The window of `layer`; `None` for full attention.
    pub fn window(&self, layer: usize) -> Option<i32> {
        if !self.use_sliding_window {
            None
        } else if self.llama.layer_types.is_some() {
            self.llama.window(layer)
        } else {
            self.llama.sliding_window.filter(|_| layer >= self.max_window_layers)
        }
    }
}

/// Base of the rotary frequencies if the config does not give one.
pub(super) const ROPE_THETA: f32 = 1_000_000.0;

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config.get("text_config").unwrap_or(config))?;
    weights.keep_language_model();
    let whole = config.llama.attention(ROPE_THETA);
    let attention = |layer| AttentionConfig { window: config.window(layer), ..whole.clone() };
    Ok(Box::new(Llama::load(&config.llama, weights, PRE_NORM, attention, dense_mlp)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The reference ignores windows here, so this tests the rule of `transformers`.
    #[test]
    fn upper_layers_have_windows() {
        let check = |keys: Value, expected: [Option<i32>; 3]| {
            let mut config = json!({
                "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                "rms_norm_eps": 1e-6, "sliding_window": 32, "max_window_layers": 2,
            });
            config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            let config: Config = serde_json::from_value(config).unwrap();
            assert_eq!([0, 1, 2].map(|layer| config.window(layer)), expected);
        };
        let kinds = json!(["sliding_attention", "full_attention", "full_attention"]);
        check(json!({}), [None; 3]);
        check(json!({"layer_types": kinds}), [None; 3]);
        check(json!({"use_sliding_window": true}), [None, None, Some(32)]);
        check(json!({"use_sliding_window": true, "layer_types": kinds}), [Some(32), None, None]);
        check(json!({"use_sliding_window": true, "sliding_window": null}), [None; 3]);
    }
}
