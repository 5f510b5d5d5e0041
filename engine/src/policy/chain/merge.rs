//! How the answers of several policies become one, so that a later policy cannot loosen what an
//! earlier one decided.
//!
//! Where one answer is tighter, it counts: the smaller budget, the larger reserve, the longer rewind,
//! every ban, a stop. Where neither is (a temperature, a token's bias, a text), the earlier policy's
//! counts, and for as long as it asked for: [`Holds`].

use std::collections::BTreeMap;

use crate::policy::{Action, Bias, Keep, Plan, Resample, SamplingChange, Verdict};

/// Greatest common divisor; 0 is no number.
pub fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// One plan of an earlier policy's and a later one's. `every` is the earlier's: what counts is that of
/// the chain.
pub fn plans(earlier: Plan, later: Plan) -> Plan {
    let notes: Vec<_> = earlier.note.into_iter().chain(later.note).collect();
    Plan {
        thinking: earlier.thinking.or(later.thinking),
        think_budget: both(earlier.think_budget, later.think_budget, u32::min),
        answer_reserve: both(earlier.answer_reserve, later.answer_reserve, u32::max),
        sampling: sampling(earlier.sampling, later.sampling),
        loops: earlier.loops.or(later.loops),
        every: earlier.every,
        checkpoint_every: match (earlier.checkpoint_every, later.checkpoint_every) {
            (0, some) | (some, 0) => some,
            (a, b) => a.min(b),
        },
        note: (!notes.is_empty()).then(|| notes.join("; ")),
        keep: both(earlier.keep, later.keep, keeps),
    }
}

fn both<T>(a: Option<T>, b: Option<T>, choose: impl FnOnce(T, T) -> T) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(choose(a, b)),
        (a, b) => a.or(b),
    }
}

fn sampling(earlier: SamplingChange, later: SamplingChange) -> SamplingChange {
    SamplingChange {
        temperature: earlier.temperature.or(later.temperature),
        top_p: earlier.top_p.or(later.top_p),
        top_k: earlier.top_k.or(later.top_k),
        min_p: earlier.min_p.or(later.min_p),
    }
}

/// What both lists name, for the shorter time. Of several entries for one anchor a list means that
/// with the most seconds.
fn keeps(earlier: Vec<Keep>, later: Vec<Keep>) -> Vec<Keep> {
    let longest = |list: &[Keep], keep: &Keep| {
        list.iter().filter(|other| other.at == keep.at).map(|other| other.seconds).max()
    };
    let mut merged: Vec<Keep> = Vec::new();
    for keep in &earlier {
        if merged.iter().any(|other| other.at == keep.at) {
            continue;
        }
        if let (Some(a), Some(b)) = (longest(&earlier, keep), longest(&later, keep)) {
            merged.push(Keep { at: keep.at, seconds: a.min(b) });
        }
    }
    merged
}

/// A stop counts before a repair, a repair before an acceptance; of two alike the earlier.
pub fn verdicts(earlier: Verdict, later: Verdict) -> Verdict {
    let weight = |verdict: &Verdict| match verdict {
        Verdict::Accept => 0,
        Verdict::Repair(_) => 1,
        Verdict::Stop(_) => 2,
    };
    if weight(&later) > weight(&earlier) { later } else { earlier }
}

/// One list of the answers of several links, first to last. What stands behind a stop, in the same
/// list or a later one, is dropped.
pub fn actions(answers: Vec<(usize, Vec<Action>)>, holds: &mut Holds) -> Vec<Action> {
    let mut rewind = None;
    let (mut draws, mut texts) = (Vec::new(), Vec::new());
    'all: for (link, actions) in answers {
        for action in actions {
            match action {
                Action::Rewind(tokens) => rewind = rewind.max(Some(tokens)),
                Action::Ban(_) => draws.push(action),
                Action::Bias(bias) => draws.extend(holds.bias(link, bias).map(Action::Bias)),
                Action::Sampling(other) => {
                    draws.extend(holds.sampling(link, other).map(Action::Sampling));
                }
                Action::Inject(_) | Action::CloseThinking(_) => texts.push(action),
                Action::Stop(_) => {
                    texts.push(action);
                    break 'all;
                }
            }
        }
    }
    rewind.map(Action::Rewind).into_iter().chain(draws).chain(texts).collect()
}

/// The tokens that these actions surely take back where text is put in their place; without text the
/// next step tells.
pub fn rewound(actions: &[Action]) -> usize {
    let text = |action: &Action| matches!(action, Action::Inject(_) | Action::CloseThinking(_));
    match actions.first() {
        Some(Action::Rewind(tokens)) if actions.iter().any(text) => *tokens as usize,
        _ => 0,
    }
}

/// Whose word counts for a sampling value or a token's bias, and until when.
#[derive(Default)]
pub struct Holds {
    /// Temperature, top-p, top-k, min-p.
    values: [Option<Hold>; 4],
    /// At most as many as the vocabulary has tokens.
    tokens: BTreeMap<u32, Hold>,
    /// Tokens drawn so far.
    drawn: u64,
}

#[derive(Clone, Copy)]
struct Hold {
    link: usize,
    /// Count of drawn tokens at which it ends.
    until: u64,
}

impl Holds {
    /// So many more tokens are drawn.
    pub fn drawn(&mut self, tokens: usize) {
        self.drawn += tokens as u64;
    }

    /// What the plan of `link` says counts to the end of the reply, where no earlier plan says it.
    pub fn planned(&mut self, link: usize, sampling: &SamplingChange) {
        let _ = self.sampling(link, Resample { sampling: *sampling, steps: 0 });
    }

    /// Those values that no earlier link holds.
    fn sampling(
        &mut self,
        link: usize,
        Resample { sampling, steps }: Resample,
    ) -> Option<Resample> {
        let (now, hold) = (self.drawn, self.hold(link, steps));
        let [temperature, top_p, top_k, min_p] = &mut self.values;
        let free = SamplingChange {
            temperature: sampling.temperature.filter(|_| take(temperature, hold, now)),
            top_p: sampling.top_p.filter(|_| take(top_p, hold, now)),
            top_k: sampling.top_k.filter(|_| take(top_k, hold, now)),
            min_p: sampling.min_p.filter(|_| take(min_p, hold, now)),
        };
        (free != SamplingChange::default()).then_some(Resample { sampling: free, steps })
    }

    /// Those tokens that no earlier link holds.
    fn bias(&mut self, link: usize, Bias { mut tokens, steps }: Bias) -> Option<Bias> {
        let (now, hold) = (self.drawn, self.hold(link, steps));
        self.tokens.retain(|_, hold| hold.until > now);
        tokens.retain(|biased| {
            let mut held = self.tokens.get(&biased.token).copied();
            let free = take(&mut held, hold, now);
            self.tokens.extend(held.map(|held| (biased.token, held)));
            free
        });
        (!tokens.is_empty()).then_some(Bias { tokens, steps })
    }

    fn hold(&self, link: usize, steps: u32) -> Hold {
        let until = if steps == 0 { u64::MAX } else { self.drawn + u64::from(steps) };
        Hold { link, until }
    }
}

/// Gives `slot` to `hold`, unless an earlier link has it still.
fn take(slot: &mut Option<Hold>, hold: Hold, now: u64) -> bool {
    let free = slot.is_none_or(|held| held.link >= hold.link || held.until <= now);
    if free {
        *slot = Some(hold);
    }
    free
}
