//! Tokens by model, profile and key, for operators.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::piece::Counts;

/// Most combinations of model, profile and key; further keys are counted together.
const ROWS: usize = 4096;

/// The key under which further keys are counted.
const OTHERS: &str = "others";

/// Who used what.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Use {
    /// The model, without the name of its upstream.
    pub model: String,
    /// The profile.
    pub profile: String,
    /// The first digits of the digest of the client's key, as policies see it; empty without one.
    pub key: String,
}

/// How much was used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    /// Requests that the upstream was sent, repetitions and continuations included.
    pub requests: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were saved at the upstream.
    pub cached_tokens: u64,
    /// Tokens of replies.
    pub reply_tokens: u64,
    /// Tokens of replies that were cut before the upstream counted them: as many as they had pieces.
    pub estimated_tokens: u64,
}

/// The counts of one upstream.
#[derive(Default)]
pub struct Usage(Mutex<BTreeMap<Use, Used>>);

impl Usage {
    /// Changes the counts of `who`.
    fn with(&self, who: &Use, change: impl FnOnce(&mut Used)) {
        let rows = &mut *self.0.lock();
        if rows.len() >= ROWS && !rows.contains_key(who) {
            let others = Use { key: OTHERS.into(), ..who.clone() };
            return change(rows.entry(others).or_default());
        }
        change(rows.entry(who.clone()).or_default());
    }

    /// Counts a request.
    pub fn asked(&self, who: &Use) {
        self.with(who, |used| used.requests += 1);
    }

    /// Counts a request that failed.
    pub fn failed(&self, who: &Use) {
        self.with(who, |used| used.failures += 1);
    }

    /// Counts the tokens of a request. Those that the upstream has not counted are `estimated`.
    pub fn count(&self, who: &Use, counts: Counts, estimated: u32) {
        self.with(who, |used| {
            used.prompt_tokens += u64::from(counts.prompt.unwrap_or(0));
            used.cached_tokens += u64::from(counts.cached.unwrap_or(0));
            match counts.reply {
                Some(tokens) => used.reply_tokens += u64::from(tokens),
                None => used.estimated_tokens += u64::from(estimated),
            }
        });
    }

    /// All counts.
    pub fn report(&self) -> Vec<(Use, Used)> {
        self.0.lock().iter().map(|(who, used)| (who.clone(), *used)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_bounded_whatever_keys_there_are() {
        let usage = Usage::default();
        for key in 0..ROWS + 10 {
            usage.asked(&Use { key: key.to_string(), ..Use::default() });
        }
        let report = usage.report();
        assert_eq!(report.len(), ROWS + 1);
        let others = report.iter().find(|(who, _)| who.key == OTHERS).unwrap();
        assert_eq!(others.1.requests, 10);
    }

    #[test]
    fn what_the_upstream_did_not_count_is_told_apart() {
        let (usage, who) = (Usage::default(), Use::default());
        let counts = Counts { prompt: Some(7), reply: Some(5), ..Counts::default() };
        usage.count(&who, counts, 99);
        usage.count(&who, Counts::default(), 3);
        let used = usage.report()[0].1;
        assert_eq!((used.prompt_tokens, used.reply_tokens, used.estimated_tokens), (7, 5, 3));
    }
}
