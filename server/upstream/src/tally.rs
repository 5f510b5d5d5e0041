//! Tokens of one reply, which several requests to the upstream may write, part by part.

use steersman_request::Usage;

use crate::piece::Counts;

/// Tokens of one reply. A part that the upstream has not counted has as many as it has pieces.
#[derive(Debug, Default)]
pub struct Tally {
    /// Tokens of the prompt, as the upstream has counted them.
    prompt: Counts,
    /// Tokens of the prompt, as the client was told.
    told: Counts,
    /// Tokens of the parts that have ended.
    ended: u32,
    /// Pieces of the upstream before the part that is being written.
    before: u32,
    /// Tokens of the part that is being written, or was last, as the upstream has counted them.
    part: Counts,
    /// Whether a part is being written.
    is_open: bool,
    /// Whether the reply was cut.
    has_cuts: bool,
}

impl Tally {
    /// Begins a part after so many pieces of the upstream.
    pub fn begin_part(&mut self, pieces: u32) {
        (self.part, self.before, self.is_open) = (Counts::default(), pieces, true);
    }

    /// Forgets a part that the upstream has not begun.
    pub fn drop_part(&mut self) {
        self.is_open = false;
    }

    /// Adds what the upstream has counted.
    pub fn add(&mut self, counts: Counts) {
        self.part = self.part.with(counts);
        if self.before == 0 || self.prompt.prompt.is_none() {
            self.prompt = of_prompt(self.part);
        }
    }

    /// Ends the part after so many pieces of the upstream. Returns its counts, and its number of pieces; `None` if it
    /// has ended already.
    pub fn end_part(&mut self, pieces: u32) -> Option<(Counts, u32)> {
        if !std::mem::take(&mut self.is_open) {
            return None;
        }
        let pieces = pieces.saturating_sub(self.before);
        self.ended = self.ended.saturating_add(self.part.reply.unwrap_or(pieces));
        Some((self.part, pieces))
    }

    /// Notes that policies cut the reply.
    pub fn cut(&mut self) {
        self.has_cuts = true;
    }

    /// Notes what the client is told of the prompt.
    pub fn tell(&mut self, counts: Counts) {
        self.told = of_prompt(counts);
    }

    /// Whether the client knows the counts of the prompt.
    pub fn is_told(&self) -> bool {
        self.told == self.prompt
    }

    /// The tokens of the reply, which has these pieces of reasoning and of the rest. What policies wrote counts as
    /// pieces.
    pub fn usage(&self, (reasoning, answer): (u32, u32)) -> Usage {
        let pieces = reasoning + answer;
        let total = if self.has_cuts { self.ended.max(pieces) } else { self.ended };
        let reasoning_tokens = match self.part.reasoning.filter(|_| !self.has_cuts) {
            Some(tokens) => tokens.min(total),
            // As many as its share of the pieces.
            None if pieces == 0 => 0,
            None => (u64::from(total) * u64::from(reasoning) / u64::from(pieces)) as u32,
        };
        Usage {
            prompt_tokens: self.prompt.prompt.unwrap_or(0),
            cached_tokens: self.prompt.cached.unwrap_or(0),
            reasoning_tokens,
            answer_tokens: total - reasoning_tokens,
            ..Usage::default()
        }
    }
}

/// The counts of the prompt alone.
fn of_prompt(counts: Counts) -> Counts {
    Counts { prompt: counts.prompt, cached: counts.cached, ..Counts::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of prompt, reasoning and answer of a reply that has these pieces of reasoning and answer.
    fn tokens(tally: &Tally, pieces: (u32, u32)) -> [u32; 3] {
        let usage = tally.usage(pieces);
        [usage.prompt_tokens, usage.reasoning_tokens, usage.answer_tokens]
    }

    #[test]
    fn a_reply_in_one_part_has_the_tokens_of_the_upstream() {
        let mut tally = Tally::default();
        tally.begin_part(0);
        tally.tell(Counts::default());
        assert!(tally.is_told());
        tally.add(Counts { prompt: Some(10), ..Counts::default() });
        assert!(!tally.is_told());
        tally.add(Counts { reply: Some(30), ..Counts::default() });
        assert_eq!(tally.end_part(20).unwrap().1, 20);
        // It is counted once.
        assert_eq!(tally.end_part(20), None);
        // Half of the pieces are reasoning.
        assert_eq!(tokens(&tally, (10, 10)), [10, 15, 15]);
        tally.add(Counts { reasoning: Some(12), ..Counts::default() });
        assert_eq!(tokens(&tally, (10, 10)), [10, 12, 18]);
    }

    #[test]
    fn parts_that_were_cut_count_once_and_their_prompts_do_not() {
        let mut tally = Tally::default();
        tally.begin_part(0);
        tally.add(Counts { prompt: Some(10), ..Counts::default() });
        // Cut before the upstream had counted: as many tokens as pieces.
        let (counts, pieces) = tally.end_part(8).unwrap();
        assert_eq!((counts.prompt, counts.reply, pieces), (Some(10), None, 8));
        tally.cut();
        tally.begin_part(8);
        tally.add(Counts { prompt: Some(18), reply: Some(12), ..Counts::default() });
        tally.end_part(16).unwrap();
        assert_eq!(tokens(&tally, (0, 16)), [10, 0, 20]);
        // Policies wrote more than the upstream.
        assert_eq!(tokens(&tally, (0, 40)), [10, 0, 40]);
    }
}
