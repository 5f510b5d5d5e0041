//! Merges the answers of several policies so that a later policy cannot loosen what an earlier one
//! decided.
//!
//! If one answer is tighter it applies: the smaller budget, the larger reserve, the longer rewind,
//! every ban, a stop. If neither is (a temperature, a token's bias, a text), that of the earlier
//! policy applies for as long as that policy asked: [`Owners`].

use std::collections::BTreeMap;

use crate::contract::{
    Action, Bias, Counted, Plan, Retention, SamplingChange, SamplingPatch, Verdict,
};

/// Greatest common divisor; 0 is neutral.
pub fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The events, candidates and watched tokens of both plans, and the rest of the first.
pub fn events(plan: Plan, other: &Plan) -> Plan {
    let mut on_tokens = plan.on_tokens;
    for token in &other.on_tokens {
        if !on_tokens.contains(token) {
            on_tokens.push(*token);
        }
    }
    Plan {
        on_phase: plan.on_phase || other.on_phase,
        on_newline: plan.on_newline || other.on_newline,
        on_texts: united(plan.on_texts, other.on_texts.clone()),
        on_tokens,
        candidates: plan.candidates.max(other.candidates),
        watch: united(plan.watch, other.watch.clone()),
        ..plan
    }
}

/// Merges the plan of an earlier policy and that of a later one. The caller sets `every` and the note.
pub fn plans(earlier: Plan, later: Plan) -> Plan {
    let earlier = events(earlier, &later);
    Plan {
        reasoning: earlier.reasoning.or(later.reasoning),
        reasoning_budget: both(earlier.reasoning_budget, later.reasoning_budget, u32::min),
        answer_reserve: both(earlier.answer_reserve, later.answer_reserve, u32::max),
        sampling: earlier.sampling.or(later.sampling),
        loops: earlier.loops.or(later.loops),
        every: earlier.every,
        checkpoint_every: match (earlier.checkpoint_every, later.checkpoint_every) {
            (0, some) | (some, 0) => some,
            (a, b) => a.min(b),
        },
        note: None,
        retain: both(earlier.retain, later.retain, retentions),
        form: earlier.form.or(later.form),
        refuse: earlier.refuse.or(later.refuse),
        max_tokens: both(earlier.max_tokens, later.max_tokens, u32::min),
        stop: united(earlier.stop, later.stop),
        tools: both(earlier.tools, later.tools, |mut earlier, later| {
            earlier.retain(|name| later.contains(name));
            earlier
        }),
        on_phase: earlier.on_phase,
        on_newline: earlier.on_newline,
        on_texts: earlier.on_texts,
        on_tokens: earlier.on_tokens,
        candidates: earlier.candidates,
        watch: earlier.watch,
        route: earlier.route.or(later.route),
        limit_counts: both(earlier.limit_counts, later.limit_counts, tighter),
    }
}

/// A limit that counts the whole reply allows less than one that counts the answer.
fn tighter(earlier: Counted, later: Counted) -> Counted {
    if earlier == Counted::Reply { earlier } else { later }
}

/// Each text or token once.
fn united<T: PartialEq>(mut earlier: Vec<T>, later: Vec<T>) -> Vec<T> {
    for one in later {
        if !earlier.contains(&one) {
            earlier.push(one);
        }
    }
    earlier
}

fn both<T>(a: Option<T>, b: Option<T>, choose: impl FnOnce(T, T) -> T) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(choose(a, b)),
        (a, b) => a.or(b),
    }
}

/// The save points that both lists name, for the shorter time. Of several entries for one save point
/// the longest time counts.
fn retentions(earlier: Vec<Retention>, later: Vec<Retention>) -> Vec<Retention> {
    let longest = |list: &[Retention], at| {
        list.iter().filter(|other| other.at == at).map(|other| other.seconds).max()
    };
    let mut merged: Vec<Retention> = Vec::new();
    for &Retention { at, .. } in &earlier {
        if merged.iter().any(|other| other.at == at) {
            continue;
        }
        if let (Some(a), Some(b)) = (longest(&earlier, at), longest(&later, at)) {
            merged.push(Retention { at, seconds: a.min(b) });
        }
    }
    merged
}

/// A stop takes precedence over a repair, a repair over an acceptance, an earlier verdict over an equal
/// later one.
pub fn weight(verdict: &Verdict) -> u8 {
    match verdict {
        Verdict::Accept => 0,
        Verdict::Repair(_) => 1,
        Verdict::Stop(_) => 2,
    }
}

/// Merges the actions of several links, first to last. Actions after a stop, in the same list or a
/// later one, are dropped.
pub fn actions(answers: Vec<(usize, Vec<Action>)>, owners: &mut Owners) -> Vec<Action> {
    let mut rewind = None;
    let (mut changes, mut texts) = (Vec::new(), Vec::new());
    'all: for (link, actions) in answers {
        for action in actions {
            match action {
                Action::Rewind(tokens) => rewind = rewind.max(owners.rewind(link, tokens)),
                Action::Ban(_) => changes.push(action),
                Action::Bias(bias) => changes.extend(owners.bias(link, bias).map(Action::Bias)),
                Action::Sampling(change) => {
                    changes.extend(owners.sampling(link, change).map(Action::Sampling));
                }
                Action::Inject(_) | Action::CloseReasoning(_) => {
                    owners.injected(link);
                    texts.push(action);
                }
                Action::Stop(_) => {
                    texts.push(action);
                    break 'all;
                }
            }
        }
    }
    rewind.map(Action::Rewind).into_iter().chain(changes).chain(texts).collect()
}

/// Tokens that a rewind removes if injected text follows it. Without text the next step shows them.
pub fn rewound(actions: &[Action]) -> usize {
    let text = |action: &Action| matches!(action, Action::Inject(_) | Action::CloseReasoning(_));
    match actions.first() {
        Some(Action::Rewind(tokens)) if actions.iter().any(text) => *tokens as usize,
        _ => 0,
    }
}

/// Which link owns a sampling value or a token's bias, and for how long.
#[derive(Default)]
pub struct Owners {
    /// Sampling values; no value is in two entries.
    values: Vec<(SamplingPatch, Owner)>,
    /// By token.
    tokens: BTreeMap<u32, Owner>,
    /// Tokens sampled so far.
    sampled: u64,
    /// Tokens of the reply at this step.
    index: u32,
    /// The policies whose text was injected since the last step, and for each that injected any: tokens of
    /// the reply at the step after its newest text, which policies after it do not rewind.
    injected: Vec<usize>,
    floors: BTreeMap<usize, u32>,
    /// Repairs of tool calls by policy.
    pub repairs: BTreeMap<usize, u32>,
}

#[derive(Clone, Copy)]
struct Owner {
    link: usize,
    /// Count of sampled tokens at which ownership ends.
    until: u64,
}

impl Owners {
    /// Advances by `tokens` sampled tokens.
    pub fn sampled(&mut self, tokens: usize) {
        self.sampled += tokens as u64;
    }

    /// Begins a step after `index` tokens of the reply. Text that was injected before it ends here.
    pub fn begin(&mut self, index: u32) {
        self.index = index;
        self.floors.extend(self.injected.drain(..).map(|link| (link, index)));
    }

    /// Notes that text of `link` is injected.
    fn injected(&mut self, link: usize) {
        self.injected.push(link);
    }

    /// Notes that a call is replaced by text of `link`.
    pub fn repaired(&mut self, link: usize) {
        *self.repairs.entry(link).or_default() += 1;
        self.injected(link);
    }

    /// The tokens that `link` may rewind: none that an earlier link injected, or that came before.
    fn rewind(&self, link: usize, tokens: u32) -> Option<u32> {
        let floors = self.floors.range(..link).map(|(_, floor)| *floor);
        let Some(floor) = floors.max() else { return Some(tokens) };
        Some(tokens.min(self.index.saturating_sub(floor))).filter(|tokens| *tokens > 0)
    }

    /// Gives `link` the values of its plan that no earlier link owns, until the end of the reply.
    pub fn planned(&mut self, link: usize, sampling: &SamplingPatch) {
        let _ = self.sampling(link, SamplingChange { sampling: *sampling, steps: 0 });
    }

    /// The values that no earlier link owns.
    fn sampling(&mut self, link: usize, change: SamplingChange) -> Option<SamplingChange> {
        let owner = self.owner(link, change.steps);
        self.values.retain(|(values, owner)| owner.until > self.sampled && !values.is_empty());
        let earlier = self.values.iter().filter(|(_, other)| other.link < link);
        let free = earlier.fold(change.sampling, |free, (owned, _)| free.without(owned));
        self.values.iter_mut().for_each(|(owned, _)| *owned = owned.without(&free));
        self.values.push((free, owner));
        (!free.is_empty()).then_some(SamplingChange { sampling: free, ..change })
    }

    /// The tokens that no earlier link owns.
    fn bias(&mut self, link: usize, Bias { mut tokens, steps }: Bias) -> Option<Bias> {
        let (now, owner) = (self.sampled, self.owner(link, steps));
        self.tokens.retain(|_, owner| owner.until > now);
        tokens.retain(|biased| {
            let mut slot = self.tokens.get(&biased.token).copied();
            let free = take(&mut slot, owner, now);
            self.tokens.extend(slot.map(|owner| (biased.token, owner)));
            free
        });
        (!tokens.is_empty()).then_some(Bias { tokens, steps })
    }

    fn owner(&self, link: usize, steps: u32) -> Owner {
        let until = if steps == 0 { u64::MAX } else { self.sampled + u64::from(steps) };
        Owner { link, until }
    }
}

/// Gives `slot` to `owner`, unless an earlier link still owns it.
fn take(slot: &mut Option<Owner>, owner: Owner, now: u64) -> bool {
    let free = slot.is_none_or(|other| other.link >= owner.link || other.until <= now);
    if free {
        *slot = Some(owner);
    }
    free
}
