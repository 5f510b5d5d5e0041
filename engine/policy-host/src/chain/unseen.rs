//! Tokens and text that a policy of a chain has not seen yet. The engine calls the chain at the
//! greatest common divisor of the periods; each policy is called at its own, with everything that was
//! committed since its own last call.

use std::borrow::Cow;

use crate::contract::{DrawnToken, Observations, STEP_TOKENS, Step};

/// Tokens and text since a policy's last call.
#[derive(Default)]
pub struct Unseen {
    /// At least the newest [`STEP_TOKENS`].
    tokens: Vec<u32>,
    text: String,
    /// Probabilities of the tokens that the model drew.
    drawn: Vec<DrawnToken>,
    /// Lengths of `tokens` and `text` after each call of the chain, so that a rewind of tokens finds the
    /// text to remove.
    pieces: Vec<(usize, usize)>,
    /// Number of tokens, including those dropped from `tokens`.
    count: usize,
    /// `Step::index` of the last call of the chain.
    index: u32,
    /// Tokens that the last answer of the chain rewinds.
    rewound: usize,
}

impl Unseen {
    /// The step to call the policy with, if it is due: after an event, or after `every` tokens.
    pub fn due<'a>(&mut self, step: &'a Step, every: u32, event: bool) -> Option<Cow<'a, Step>> {
        self.rewind(step);
        // The engine shows the newest tokens only; `index` counts all.
        let shown = step.tokens.len();
        let passed = step.index.saturating_sub(self.index) as usize;
        self.count += if shown < STEP_TOKENS { shown } else { shown.max(passed) };
        self.index = step.index;
        let due = event || (every > 0 && self.count >= every as usize);
        if due && self.tokens.is_empty() && self.text.is_empty() {
            self.count = 0;
            return Some(Cow::Borrowed(step));
        }
        self.add(step);
        if !due {
            return None;
        }
        let Self { mut tokens, text, mut drawn, .. } = std::mem::take(self);
        self.index = step.index;
        tokens.drain(..tokens.len().saturating_sub(STEP_TOKENS));
        drawn.drain(..drawn.len().saturating_sub(STEP_TOKENS));
        let now = step.observed.as_ref();
        let found = now.map(|now| (now.texts_found.clone(), now.token_found, now.outlook.clone()));
        let (texts_found, token_found, outlook) = found.unwrap_or_default();
        let observed = Observations { texts_found, token_found, drawn, outlook }.if_any();
        // `..step.clone()` would copy tokens and text.
        Some(Cow::Owned(Step {
            index: step.index,
            phase: step.phase,
            reasoning_tokens: step.reasoning_tokens,
            answer_tokens: step.answer_tokens,
            reasoning_left: step.reasoning_left,
            tokens,
            text,
            loop_found: step.loop_found,
            budget_reached: step.budget_reached,
            phase_changed: step.phase_changed,
            newline: step.newline,
            observed,
        }))
    }

    /// Notes the tokens that the answer of the chain rewinds, if they are known before the next step.
    pub fn answered(&mut self, rewound: usize) {
        self.rewound = rewound;
    }

    fn add(&mut self, step: &Step) {
        let drawn = step.observed.as_ref().map_or(&[][..], |observed| &observed.drawn);
        if let Some(first) = drawn.first() {
            // Later ones were rewound.
            self.drawn.retain(|drawn| drawn.index < first.index);
            self.drawn.extend_from_slice(drawn);
            let older = self.drawn.len().saturating_sub(STEP_TOKENS);
            self.drawn.drain(..older);
        }
        self.tokens.extend_from_slice(&step.tokens);
        self.text.push_str(&step.text);
        if self.tokens.len() > 2 * STEP_TOKENS {
            let old = self.tokens.len() - STEP_TOKENS;
            self.tokens.drain(..old);
            let gone = self.pieces.iter().take_while(|&&(tokens, _)| tokens <= old).count();
            // The last dropped entry stays: it marks where the text of the next one begins.
            self.pieces.drain(..gone.saturating_sub(1));
            self.pieces.iter_mut().for_each(|(tokens, _)| *tokens = tokens.saturating_sub(old));
        }
        self.pieces.push((self.tokens.len(), self.text.len()));
    }

    /// Removes what was rewound since the last call of the chain. A rewind followed by as many new
    /// tokens is invisible here; its tokens remain.
    fn rewind(&mut self, step: &Step) {
        let begin = (step.index as usize).saturating_sub(step.tokens.len());
        let visible = (self.index as usize).saturating_sub(begin);
        let rewound = std::mem::take(&mut self.rewound).max(visible);
        if rewound == 0 {
            return;
        }
        self.count = self.count.saturating_sub(rewound);
        self.tokens.truncate(self.tokens.len().saturating_sub(rewound));
        let left = self.tokens.len();
        self.pieces.retain(|&(tokens, _)| tokens <= left);
        let text = self.pieces.last().map_or(0, |&(_, text)| text);
        self.text.truncate(text);
        if let Some((tokens, _)) = self.pieces.last_mut() {
            *tokens = left;
        }
    }
}
