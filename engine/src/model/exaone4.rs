//! EXAONE 4: Llama with norms of each block's output, and of each head's queries and keys. Large models have
//! windows in three of four layers, and only those know positions.
//!
//! Source: arXiv:2507.11407; `transformers` `models/exaone4`; mlx-lm `models/exaone4.py`, checked by the
//! reference logits in `tests/fixtures`.

use serde::Deserialize;
use serde_json::Value;

use super::llama::{self, AttentionConfig, Llama, POST_NORM, dense_mlp};
use super::{Model, Weights};
use crate::error::Result;

/// `config.json`
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(flatten)]
    llama: llama::Config,
    /// Which layers have a window if there are no `layer_types`.
    sliding_window_pattern: Option<Pattern>,
}

/// `LLLG`, repeated, or 4, which means the same.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Pattern {
    Letters(String),
    Every(usize),
}

/// Base of the rotary frequencies if the config does not give one.
const ROPE_THETA: f32 = 1_000_000.0;

impl Config {
    /// The window of `layer`; `None` for full attention.
    fn window(&self, layer: usize) -> Option<i32> {
        if self.llama.layer_types.is_some() {
            return self.llama.window(layer);
        }
        let is_sliding = match &self.sliding_window_pattern {
            Some(Pattern::Letters(kinds)) => kinds.chars().cycle().nth(layer) == Some('L'),
            Some(Pattern::Every(n)) => *n > 0 && !(layer + 1).is_multiple_of(*n),
            None => false,
        };
        self.llama.sliding_window.filter(|_| is_sliding)
    }
}

pub(super) fn load(config: &Value, weights: &mut Weights) -> Result<Box<dyn Model>> {
    let config: Config = weights.config(config)?;
    let whole = config.llama.attention(ROPE_THETA);
    let is_mixed = config.llama.sliding_window.is_some();
    let attention = |layer| {
        let window = config.window(layer);
        let rope = whole.rope.clone().filter(|_| window.is_some() || !is_mixed);
        AttentionConfig { window, rope, ..whole.clone() }
    };
    Ok(Box::new(Llama::load(&config.llama, weights, POST_NORM, attention, dense_mlp)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn patterns_in_letters_and_numbers_are_the_same() {
        let windows = |pattern: Value| {
            let config: Config = serde_json::from_value(json!({
                "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
                "rms_norm_eps": 1e-5, "sliding_window": 9, "sliding_window_pattern": pattern,
            }))
            .unwrap();
            (0..8).map(|layer| config.window(layer).is_some()).collect::<Vec<_>>()
        };
        assert_eq!(windows(json!("LLLG")), windows(json!(4)));
        assert_eq!(windows(json!(4)), [true, true, true, false, true, true, true, false]);
        assert_eq!(windows(json!(null)), [false; 8]);
    }
}
