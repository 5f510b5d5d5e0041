//! What a policy of a chain has not seen yet: the engine calls the chain as often as its most eager
//! policy wants, and each of the others later, with all that was committed since its own last call.

use std::borrow::Cow;

use crate::policy::{STEP_TOKENS, Step};

/// Tokens and text since a policy's last call.
#[derive(Default)]
pub struct Unseen {
    /// At least the newest [`STEP_TOKENS`].
    tokens: Vec<u32>,
    text: String,
    /// Ends of tokens and text after each call of the chain, so that a rewind finds what of the text
    /// it takes back.
    pieces: Vec<(usize, usize)>,
    /// How many tokens there were, kept or not.
    count: usize,
    /// `Step::index` of the last call of the chain.
    index: u32,
    /// Tokens that the chain's last answer took back.
    lost: usize,
}

impl Unseen {
    /// What the policy sees now, if it is to be called: after an event, or every `every` tokens.
    pub fn due<'a>(&mut self, step: &'a Step, every: u32, event: bool) -> Option<Cow<'a, Step>> {
        self.rewind(step);
        // The engine shows the newest tokens only: the index tells of the others.
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
        let Self { mut tokens, text, .. } = std::mem::take(self);
        self.index = step.index;
        tokens.drain(..tokens.len().saturating_sub(STEP_TOKENS));
        // Field by field: a copy of the step would copy its tokens and its text.
        Some(Cow::Owned(Step {
            index: step.index,
            phase: step.phase,
            think_tokens: step.think_tokens,
            answer_tokens: step.answer_tokens,
            think_left: step.think_left,
            tokens,
            text,
            loop_found: step.loop_found,
            budget_reached: step.budget_reached,
        }))
    }

    /// The chain's answer takes back so many tokens, as far as it is known before the next step.
    pub fn answered(&mut self, lost: usize) {
        self.lost = lost;
    }

    fn add(&mut self, step: &Step) {
        self.tokens.extend_from_slice(&step.tokens);
        self.text.push_str(&step.text);
        if self.tokens.len() > 2 * STEP_TOKENS {
            let old = self.tokens.len() - STEP_TOKENS;
            self.tokens.drain(..old);
            let gone = self.pieces.iter().take_while(|&&(tokens, _)| tokens <= old).count();
            // The last of what is gone stays, as where the text of the others begins.
            self.pieces.drain(..gone.saturating_sub(1));
            self.pieces.iter_mut().for_each(|(tokens, _)| *tokens = tokens.saturating_sub(old));
        }
        self.pieces.push((self.tokens.len(), self.text.len()));
    }

    /// Forgets what was rewound since the last call of the chain. Where as many tokens went in as were
    /// taken back nobody sees it; then they stay.
    fn rewind(&mut self, step: &Step) {
        let begin = (step.index as usize).saturating_sub(step.tokens.len());
        let lost = std::mem::take(&mut self.lost).max((self.index as usize).saturating_sub(begin));
        if lost == 0 {
            return;
        }
        self.count = self.count.saturating_sub(lost);
        self.tokens.truncate(self.tokens.len().saturating_sub(lost));
        let left = self.tokens.len();
        self.pieces.retain(|&(tokens, _)| tokens <= left);
        let text = self.pieces.last().map_or(0, |&(_, text)| text);
        self.text.truncate(text);
        if let Some((tokens, _)) = self.pieces.last_mut() {
            *tokens = left;
        }
    }
}
