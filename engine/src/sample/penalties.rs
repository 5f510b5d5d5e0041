//! Penalties of tokens that have occurred: from the tokens of a sequence to changes of their logits.
//!
//! Knows no array: [`super::rows`] applies the changes. Order and arithmetic are those of mlx-lm's
//! `sample_utils.py` (repetition, then presence, then frequency) but for what counts: presence and
//! frequency count the reply, as OpenAI's do, and repetition its window of prompt and reply.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::request::Penalties;

/// A change of the logit of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Penalty {
    pub token: u32,
    /// A positive logit is divided by it, a negative one multiplied.
    pub factor: f32,
    /// Subtracted then.
    pub offset: f32,
}

impl Penalty {
    /// The changes after `tokens`, of which the first `prompt` are the prompt; each token once.
    pub fn all(penalties: &Penalties, tokens: &[u32], prompt: usize) -> Rc<[Self]> {
        let Penalties { presence, frequency, repetition, window } = *penalties;
        let mut changes: BTreeMap<u32, Self> = BTreeMap::new();
        let new = |token| Self { token, factor: 1.0, offset: 0.0 };
        if repetition != 1.0 {
            let window = match window {
                0 => tokens,
                window => &tokens[tokens.len().saturating_sub(window as usize)..],
            };
            for &token in window {
                changes.entry(token).or_insert_with(|| new(token)).factor = repetition;
            }
        }
        if presence != 0.0 || frequency != 0.0 {
            let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
            tokens[prompt..].iter().for_each(|&token| *counts.entry(token).or_default() += 1);
            for (token, count) in counts {
                let change = changes.entry(token).or_insert_with(|| new(token));
                change.offset = presence + frequency * count as f32;
            }
        }
        changes.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_penalty_counts_its_tokens() {
        let tokens = [1, 2, 3, 3, 5, 3];
        let of = |penalties: Penalties| {
            let changes = Penalty::all(&penalties, &tokens, 3);
            changes.iter().map(|p| (p.token, p.factor, p.offset)).collect::<Vec<_>>()
        };
        let none = Penalties::default();
        assert!(none.is_empty() && of(none).is_empty());
        assert_eq!(of(Penalties { presence: 0.5, ..none }), [(3, 1.0, 0.5), (5, 1.0, 0.5)]);
        assert_eq!(of(Penalties { frequency: 0.5, ..none }), [(3, 1.0, 1.0), (5, 1.0, 0.5)]);
        let repetition = Penalties { repetition: 1.5, ..none };
        assert_eq!(of(repetition).len(), 4);
        assert_eq!(of(Penalties { window: 2, ..repetition }), [(3, 1.5, 0.0), (5, 1.5, 0.0)]);
        let all = Penalties { presence: 1.0, frequency: 0.5, repetition: 2.0, window: 0 };
        assert_eq!(of(all), [(1, 2.0, 0.0), (2, 2.0, 0.0), (3, 2.0, 2.0), (5, 2.0, 1.5)]);
    }
}
