//! Runs drafters: those of several sequences that draft with the same network run in joint passes.

use std::ops::Range;

use mlx_rs::Array;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::ops::stack;

use super::{DraftTokens, Drafter, FirstRows, Start};
use crate::cache::{Cache, Span};
use crate::config::DraftKind;
use crate::error::Result;
use crate::kernels::cpu;
use crate::lazy::reshape;
use crate::model::{Model, Pass};
use crate::nn::token_ids;
use crate::nn::{joined_rows, pick_rows};
use crate::sample::row::Row;
use crate::sample::sampler::Sampler;
use crate::sample::samples::{Logits, Samples};

/// The networks that draft, and the model that verifies.
#[derive(Clone, Copy)]
pub struct Networks<'a> {
    /// The model that will verify.
    pub model: &'a dyn Model,
    /// The part of it that runs.
    pub part: Pass<'a>,
    /// The smaller model that drafts.
    pub draft_model: Option<&'a dyn Model>,
    /// Layers of early-exit drafts.
    pub exit_layers: Option<usize>,
    /// Vocabulary size, without padding columns of the head.
    pub vocabulary: i32,
}

impl Networks<'_> {
    /// Runs rows of `spans` through the network of `kind`: `tokens` u32 [R], and for the prediction layer
    /// the hidden states [1, R, D] before them. Returns hidden states [1, R, D].
    fn forward(
        &self,
        kind: DraftKind,
        tokens: &Array,
        hidden: Option<&Array>,
        spans: &mut [Span<'_>],
    ) -> Result<Array> {
        match kind {
            DraftKind::Ngram => unreachable!("n-grams have no network"),
            DraftKind::Mtp => {
                let mtp = self.model.mtp().expect("a model without one has no such drafter");
                mtp.forward(hidden.expect("the drafter gives them"), tokens, spans)
            }
            DraftKind::Model => {
                let model = self.draft_model.expect("there is no such drafter without it");
                model.forward(tokens, spans, Pass::WHOLE)
            }
            DraftKind::EarlyExit => {
                self.model.forward(tokens, spans, Pass { exit: self.exit_layers, ..self.part })
            }
        }
    }

    /// Samples a token after each of the hidden states [1, R, D] of the network of `kind`.
    fn sample(&self, kind: DraftKind, hidden: &Array, rows: &[Row]) -> Result<Samples> {
        let model = match kind {
            DraftKind::Model => self.draft_model.expect("there is no such drafter without it"),
            _ => self.model,
        };
        let _at_once = cpu::run_at_once_after(hidden)?;
        let logits = model.logits(hidden)?;
        let logits = reshape(&logits, &[logits.dim(1), logits.dim(2)])?;
        Samples::after(&Logits::new(logits, self.vocabulary), 0, rows, false)
    }
}

/// A sequence that drafts.
pub struct Member<'a> {
    pub drafter: &'a mut dyn Drafter,
    /// The model's cache, which has run all of `tokens` but the last.
    pub cache: &'a mut Cache,
    /// Prompt and reply, committed.
    pub tokens: &'a [u32],
    pub sampler: &'a mut Sampler,
    /// Most tokens to draft.
    pub depth: usize,
}

impl Member<'_> {
    /// How drafted token `i` is sampled: as the model will sample at its position.
    fn row(&mut self, i: usize) -> Row {
        self.sampler.row(self.sampler.steps() + i as u64, self.tokens.len() + i)
    }
}

/// Drafts for all `members`, `None` for those that have nothing to draft.
pub fn propose(
    networks: &Networks<'_>,
    members: &mut [Member<'_>],
) -> Result<Vec<Option<DraftTokens>>> {
    let mut drafts = vec![None; members.len()];
    let mut groups: [(Vec<usize>, Vec<FirstRows>); DraftKind::ALL.len()] = Default::default();
    for (i, member) in members.iter_mut().enumerate() {
        let Member { drafter, cache, tokens, depth, .. } = member;
        match drafter.start(networks.model, cache, tokens, *depth)? {
            Start::Nothing => {}
            Start::Tokens(tokens) => drafts[i] = Some(DraftTokens::Known(tokens)),
            Start::Network(rows) => {
                let (group, first) = &mut groups[drafter.kind() as usize];
                group.push(i);
                first.push(rows);
            }
        }
    }
    for (kind, (group, first)) in DraftKind::ALL.into_iter().zip(groups) {
        if group.is_empty() {
            continue;
        }
        let own = members.iter_mut().enumerate().filter(|(i, _)| group.contains(i));
        let mut own: Vec<&mut Member<'_>> = own.map(|(_, member)| member).collect();
        for (i, draft) in group.iter().zip(run_network(networks, kind, &mut own, &first)?) {
            drafts[*i] = Some(draft);
        }
    }
    Ok(drafts)
}

/// Drafts with the network of `kind`, after the `first` rows that each member's drafter reads. All run to the greatest
/// depth; the tokens beyond a member's own depth are left out.
///
/// Nothing waits for a token's value: where passes are queued, the drafts become one graph with the pass that verifies
/// them.
fn run_network(
    networks: &Networks<'_>,
    kind: DraftKind,
    members: &mut [&mut Member<'_>],
    first: &[FirstRows],
) -> Result<Vec<DraftTokens>> {
    let tokens: Vec<u32> = first.iter().flat_map(|rows| &rows.tokens).copied().collect();
    let hidden: Vec<(&Array, Range<i32>)> = first
        .iter()
        .filter_map(|rows| rows.hidden.as_ref())
        .map(|hidden| (hidden, 0..hidden.dim(1)))
        .collect();
    let hidden = match hidden.first() {
        Some((first, _)) => {
            let _at_once = cpu::run_at_once_after(first)?;
            Some(joined_rows(&hidden)?)
        }
        None => None,
    };
    let counts: Vec<i32> = first.iter().map(|rows| rows.tokens.len() as i32).collect();
    let mut last = forward(networks, kind, members, &counts, &token_ids(&tokens), hidden.as_ref())?;
    if tokens.len() > members.len() {
        let ends = counts.iter().scan(-1, |end, rows| {
            *end += rows;
            Some(*end)
        });
        let _at_once = cpu::run_at_once_after(&last)?;
        last = pick_rows(&last, &ends.collect::<Vec<_>>())?;
    }
    for member in members.iter_mut() {
        member.drafter.begin(member.cache);
    }
    let depth = members.iter().map(|member| member.depth).max().unwrap_or(0);
    let one_each = vec![1; members.len()];
    // Of the members, for each drafted token.
    let mut drafted: Vec<Samples> = Vec::with_capacity(depth);
    loop {
        let rows: Vec<Row> = members.iter_mut().map(|member| member.row(drafted.len())).collect();
        let tokens = networks.sample(kind, &last, &rows)?;
        let next = tokens.tokens().clone();
        drafted.push(tokens);
        if drafted.len() >= depth {
            break;
        }
        last = forward(networks, kind, members, &one_each, &next, Some(&last))?;
    }
    for member in members.iter_mut() {
        member.drafter.end(member.cache)?;
    }
    if drafted.iter().all(Samples::is_read) {
        let read = drafted.iter().map(|tokens| Ok(tokens.read()?.0));
        let read: Vec<&[u32]> = read.collect::<Result<_>>()?;
        let own = |(i, member): (usize, &&mut Member<'_>)| {
            DraftTokens::Known(read[..member.depth].iter().map(|tokens| tokens[i]).collect())
        };
        return Ok(members.iter().enumerate().map(own).collect());
    }
    let drafted = stack(&drafted.iter().map(Samples::tokens).collect::<Vec<_>>(), 1)?;
    let own = |(i, member): (i32, &&mut Member<'_>)| {
        Ok(DraftTokens::Computing(drafted.try_index((i, ..member.depth as i32))?))
    };
    (0i32..).zip(members.iter()).map(own).collect()
}

/// A pass over `counts` rows of each member; the other arguments are those of [`Networks::forward`].
fn forward(
    networks: &Networks<'_>,
    kind: DraftKind,
    members: &mut [&mut Member<'_>],
    counts: &[i32],
    tokens: &Array,
    hidden: Option<&Array>,
) -> Result<Array> {
    let spans = members.iter_mut().zip(counts).map(|(member, &rows)| {
        let Member { drafter, cache, .. } = &mut **member;
        Span { rows, cache: drafter.cache(cache) }
    });
    networks.forward(kind, tokens, hidden, &mut spans.collect::<Vec<_>>())
}
