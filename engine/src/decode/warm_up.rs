//! Warm-up: what a GPU compiles, loads or allocates at the first use happens before requests are served.
//!
//! Kernels of our own are compiled at the same time, for the passes that a server runs ([`prepare_kernels`]). The rest
//! is whatever MLX does at a first use, which only it knows: so requests run as they will be served, alone and together,
//! greedy and sampled, with each kind of draft ([`warm_up`]). Nothing of them is saved or learned.

use std::ops::Range;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Decoder;
use super::admit::admit;
use crate::cache::{Cache, Span};
use crate::config::{DEPTH, DraftKind};
use crate::error::Result;
use crate::job::Job;
use crate::kernels::cuda;
use crate::loading;
use crate::model::{Model, Pass};
use crate::nn::token_ids;
use crate::policy::SamplingPatch;
use crate::prefix::Prefixes;
use crate::request::{Penalties, RawPrompt, Request};
use crate::sequence::unsteered::unsteered;

/// Spans and rows of each in the passes whose kernels are compiled beforehand: steps, drafts, prompts.
const PASSES: [(usize, usize); 13] = [
    (1, 1),
    (1, 2),
    (1, 8),
    (1, 9),
    (1, 64),
    (1, 96),
    (1, 127),
    (2, 1),
    (9, 1),
    (16, 1),
    (17, 1),
    (32, 1),
    (3, 5),
];

/// The first of the requests that run at the same time, and how many, besides as many as are allowed. Alone, each samples in
/// another way: operations on one row have kernels of their own.
const RUNS: [(usize, usize); 8] = [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (0, 2), (0, 8)];

/// Tokens of the shortest prompt; those of the first fill a chunk and begin another.
const PROMPT: usize = 24;

/// Tokens of each reply: enough for drafts after plain steps.
const TOKENS: u32 = 10;

/// Byte limit of the prefix cache meanwhile; too few to save anything.
const CACHE_BYTES: u64 = 1;

/// Time between two lines of the log.
const PROGRESS: Duration = Duration::from_secs(1);

/// Compiles the kernels that passes of `model` use. A failure costs time later: each is compiled at its first use.
pub fn prepare_kernels(model: &dyn Model) {
    if !cuda::is_enabled() {
        return;
    }
    let start = Instant::now();
    let (mut count, mut logged) = (0, start);
    let prepared = cuda::prepare(
        || {
            for (spans, rows) in PASSES {
                make_pass(model, spans, rows, false)?;
                make_pass(model, spans, rows, true)?;
            }
            Ok(())
        },
        |done, all| {
            if logged.elapsed() >= PROGRESS {
                tracing::info!(done, all, "compiling kernels");
                logged = Instant::now();
            }
            loading::advance(done, all);
            count = all;
        },
    );
    match prepared {
        Ok(()) => {
            let elapsed_ms = start.elapsed().as_millis() as u64;
            tracing::info!(count, elapsed_ms, "kernels compiled");
        }
        Err(error) => tracing::warn!(%error, "kernels are compiled at their first use"),
    }
}

/// Makes the graph of a pass, with a draft or without, and drops it.
fn make_pass(model: &dyn Model, spans: usize, rows: usize, draft: bool) -> Result<()> {
    let mut caches = (0..spans).map(|_| model.new_cache()).collect::<Result<Vec<_>>>()?;
    if draft {
        caches.iter_mut().for_each(Cache::mark_draft);
    }
    let ids = token_ids(&vec![0; spans * rows]);
    let rows = ids.dim(0) / i32::try_from(spans).expect("a few spans");
    let mut spans: Vec<_> = caches.iter_mut().map(|cache| Span { rows, cache }).collect();
    let hidden = model.forward(&ids, &mut spans, Pass::WHOLE)?;
    model.logits(&hidden)?;
    drop(spans);
    // All but one of its rows are rejected.
    if draft {
        caches.iter_mut().try_for_each(|cache| cache.rewind_draft(1))?;
    }
    Ok(())
}

/// Runs requests of every kind. A failure costs time later.
pub fn warm_up(decoder: &mut Decoder) {
    let start = Instant::now();
    let (times, debt) = (decoder.costs.times(), decoder.schedule.debt());
    let trial_time = decoder.speculation.trial_time();
    let unsaved = match Prefixes::new(decoder.saved.empty(), CACHE_BYTES, None, 0) {
        Ok(prefixes) => prefixes,
        Err(error) => return tracing::warn!(%error, "not warmed up"),
    };
    let prefixes = std::mem::replace(decoder.saved.prefixes_mut(), unsaved);
    let ran = warm_up_all(decoder);
    *decoder.saved.prefixes_mut() = prefixes;
    decoder.costs.set_times(times);
    decoder.schedule.set_debt(debt);
    decoder.speculation.set_trial_time(trial_time);
    decoder.activity.forget_passes();
    match ran {
        Ok(()) => tracing::debug!(elapsed = ?start.elapsed(), "warmed up"),
        Err(error) => tracing::warn!(%error, "not warmed up: first requests may be slow"),
    }
}

fn warm_up_all(decoder: &mut Decoder) -> Result<()> {
    let drafters = decoder.speculation.new_drafters(&decoder.network, &[])?;
    let kinds = drafters.iter().map(|drafter| Some(drafter.kind()));
    let kinds: Vec<_> = std::iter::once(None).chain(kinds).collect();
    let most = decoder.schedule.max_running();
    let mut runs = RUNS.to_vec();
    runs.retain(|&(_, streams)| streams == 1 || streams < most);
    if most > 1 {
        runs.push((0, most));
    }
    let all = runs.len() * kinds.len();
    let runs = runs.iter().flat_map(|&run| kinds.iter().map(move |&kind| (run, kind)));
    for (done, ((first, streams), kind)) in runs.enumerate() {
        loading::advance(done, all);
        warm_up_with(decoder, first..first + streams, kind)?;
    }
    Ok(())
}

/// Runs these requests at the same time, with drafts of a kind or without.
fn warm_up_with(
    decoder: &mut Decoder,
    requests: Range<usize>,
    kind: Option<DraftKind>,
) -> Result<()> {
    let mut receivers = Vec::with_capacity(requests.len());
    let mut running = Vec::with_capacity(requests.len());
    for i in requests {
        let (events, receiver) = mpsc::unbounded_channel();
        receivers.push(receiver);
        let length = if i == 0 { decoder.schedule.chunk() + PROMPT } else { PROMPT + i };
        let preparer = decoder.policies.preparer();
        let request = request(i, length.min(preparer.context / 2));
        let prepared = preparer.prepare_with(Job { request, events }, unsteered())?;
        let mut sequence = admit(decoder, prepared)?;
        sequence.drafting_mut().draft_always(kind, 1 + 2 * i % DEPTH);
        running.push(sequence);
    }
    while !running.is_empty() {
        decoder.wait_for_policies(&running);
        decoder.advance(&mut running)?;
        for sequence in &mut running {
            if let Some(error) = sequence.take_failure() {
                return Err(error);
            }
        }
        running.retain(|sequence| !sequence.has_ended());
    }
    Ok(())
}

/// A request with a raw prompt of `length` tokens that repeat, so that n-grams draft as well. Eight in a row sample in each of the
/// ways that have operations of their own: with filters and without, and the same with banned tokens, which are those that end
/// the turn. The last one has a penalty as well: with it, nothing is drafted.
fn request(i: usize, length: usize) -> Request {
    let (temperature, top_p, top_k, min_p) = match i % 4 {
        0 => (0.0, None, None, None),
        1 => (0.7, Some(0.8), Some(20), None),
        2 => (0.7, None, None, None),
        _ => (0.7, Some(0.9), None, Some(0.05)),
    };
    let temperature = Some(temperature);
    let sampling = SamplingPatch { temperature, top_p, top_k, min_p };
    Request {
        id: "warm-up".into(),
        profile: "default".into(),
        prompt: Some(RawPrompt::Tokens((0..length).map(|at| 3 + (at % 17) as u32).collect())),
        max_tokens: Some(TOKENS),
        seed: Some(i as u64),
        ignores_end: i % 8 >= 4,
        sampling,
        penalties: Penalties {
            repetition: if i % 8 == 7 { 1.05 } else { 1.0 },
            ..Penalties::default()
        },
        ..Request::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ask, decoder};
    use super::*;
    use crate::measure::verify::plain_text;

    /// On any device: the requests of the warm-up leave no state, no statistics and no counts.
    #[test]
    fn a_warm_up_changes_no_reply_and_leaves_nothing_behind() {
        let requests: Vec<Request> = vec![ask("What is the capital of Italy?")];
        let mut decoder = decoder();
        let plain = plain_text(&mut decoder, &requests[0], 16).unwrap();
        decoder.schedule.set_max_running(3);
        warm_up_all(&mut decoder).unwrap();
        let before = (*decoder.costs.passes(), decoder.schedule.debt(), decoder.activity.report());
        let bytes = decoder.saved.prefixes().bytes();
        warm_up(&mut decoder);
        assert_eq!((*decoder.costs.passes(), decoder.schedule.debt()), (before.0, before.1));
        let after = decoder.activity.report();
        assert_eq!((after.passes, after.tokens), (0, 0), "{:?}", before.2);
        assert_eq!(decoder.saved.prefixes().bytes(), bytes);
        assert_eq!(plain_text(&mut decoder, &requests[0], 16).unwrap(), plain);
    }
}
