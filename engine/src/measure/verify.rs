//! Checks on the user's machine and weights that every decode path gives the reply of plain decoding.
//!
//! Each prompt is decoded plainly, then on every other path, so that noise on the machine affects all
//! paths alike. Replies are compared token by token, injected tokens included.
//!
//! If a reply differs, the first differing token is examined: a margin of the two best tokens below
//! rounding error (`decode/network.rs`) makes it a near-tie. In f32 a near-tie
//! counts as a difference; in 16-bit types, and with quantized KV, rounding may flip it, and it is
//! counted apart.

use std::time::{Duration, Instant};

use mlx_rs::ops::indexing::TryIndexOp;
use tokio::sync::mpsc;

use crate::cache::{Cache, Span};
use crate::config::{DEPTH, DraftKind};
use crate::decode::Decoder;
use crate::draft::{Drafter, MovingRate, Start};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::model::Model;
use crate::nn::token_ids;
use crate::policy::SamplingPatch;
use crate::request::{Event, Request, Sampling};
use crate::sample::noise::mix;
use crate::sample::row::Row;
use crate::sample::rows::sample_with_margins;
use crate::sequence::Sequence;

/// Depth of drafts on [`DecodePath::Drafted`].
const DRAFT_DEPTH: usize = 4;

/// Byte limit of the prefix cache while requests are verified.
const CACHE_BYTES: u64 = 256 << 20;

/// A way to compute a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodePath {
    /// One token a pass, nothing restored, the prompt in chunks as configured.
    Plain,
    /// The prompt in chunks of this many tokens.
    Chunked(usize),
    /// The prompt's state restored from the prefix cache.
    Resumed,
    /// Drafts with one wrong token, each time at the next place, so that the rows after it are rewound.
    Rewound,
    /// Drafts of this kind alone, in every step.
    Drafted(DraftKind),
    /// As requests are served: the governor decides.
    Governed,
    /// Among up to this many other requests, with drafts of a kind in every step or without. The others
    /// draft, join, are cancelled and are preempted at random steps, and the request is preempted as well.
    Batched(usize, Option<DraftKind>),
    /// Preempted after every step, or with drafts of a kind after every other.
    Preempted(Option<DraftKind>),
}

impl DecodePath {
    /// Name in reports.
    pub fn name(self) -> String {
        match self {
            Self::Plain => "plain".into(),
            Self::Chunked(tokens) => format!("prefill in chunks of {tokens}"),
            Self::Resumed => "resumed from saved state".into(),
            Self::Rewound => "rewound after forced rejections".into(),
            Self::Drafted(kind) => format!("{} drafts", kind.name()),
            Self::Governed => "governor".into(),
            Self::Batched(others, None) => format!("among {others} other requests"),
            Self::Batched(others, Some(kind)) => {
                format!("{} drafts among {others} other requests", kind.name())
            }
            Self::Preempted(None) => "preempted after every step".into(),
            Self::Preempted(Some(kind)) => format!("preempted with {} drafts", kind.name()),
        }
    }
}

/// Result of a path over all prompts.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The path.
    pub path: DecodePath,
    /// Replies equal to the plain one.
    pub equal: usize,
    /// Replies that differ from the plain one first at a near-tie, in a format that permits that.
    pub near_ties: usize,
    /// Other replies that differ: prompt, first differing token, and the relative margin of the two
    /// best tokens there.
    pub different: Vec<(usize, usize, f32)>,
    /// Tokens of each reply, without the prompt.
    pub replies: Vec<Vec<u32>>,
    /// Time of each reply from its first token to its last.
    pub times: Vec<Duration>,
    /// Tokens drafted, tokens accepted, and passes that verified them.
    pub drafted: [usize; 3],
    /// Prompt tokens restored instead of computed.
    pub cached: usize,
}

impl Outcome {
    /// Whether no reply differs.
    pub fn holds(&self) -> bool {
        self.different.is_empty()
    }

    /// Time of plain decoding over the time of this path, the median of the prompts.
    pub fn speedup(&self, plain: &Self) -> f64 {
        let ratio = |(a, b): (&Duration, &Duration)| a.as_secs_f64() / b.as_secs_f64().max(1e-9);
        let mut ratios: Vec<f64> = plain.times.iter().zip(&self.times).map(ratio).collect();
        ratios.sort_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(1.0)
    }
}

/// A computed reply. `tokens` includes the prompt.
#[derive(Clone)]
struct Reply {
    tokens: Vec<u32>,
    prompt: usize,
    cached: usize,
    time: Duration,
    drafted: [usize; 3],
}

/// The paths that this model and configuration have.
pub fn paths(decoder: &Decoder) -> Result<Vec<DecodePath>> {
    use DecodePath::{Batched, Chunked, Drafted, Governed, Plain, Resumed, Rewound};
    let mut paths = vec![Plain, Chunked(64), Chunked(7), Resumed, Rewound];
    paths.extend([Batched(1, None), Batched(7, None)]);
    for drafter in decoder.speculation().new_drafters(decoder.network(), &[])? {
        paths.extend([Drafted(drafter.kind()), Batched(3, Some(drafter.kind()))]);
    }
    if decoder.costs().drafts().is_some() {
        paths.push(Governed);
    }
    Ok(paths)
}

/// Computes the replies to `requests`, at most `tokens` tokens each, on each of `paths`, the first
/// of which is [`DecodePath::Plain`]. Calls `progress` with the number of finished prompts.
///
/// # Errors
/// When a request cannot be admitted or run.
pub fn verify(
    decoder: &mut Decoder,
    requests: &[Request],
    paths: &[DecodePath],
    tokens: usize,
    progress: impl FnMut(usize),
) -> Result<Vec<Outcome>> {
    compare(decoder, None, requests, paths, tokens, progress)
}

/// As [`verify`] for a decoder on several ranks, whose replies are compared with the plain ones of `alone`, one process with
/// the same model. Ranks add in another order, so near-ties are counted apart in every format.
///
/// # Errors
/// As [`verify`].
pub fn verify_ranks(
    decoder: &mut Decoder,
    alone: &mut Decoder,
    requests: &[Request],
    paths: &[DecodePath],
    tokens: usize,
    progress: impl FnMut(usize),
) -> Result<Vec<Outcome>> {
    compare(decoder, Some(alone), requests, paths, tokens, progress)
}

fn compare(
    decoder: &mut Decoder,
    mut alone: Option<&mut Decoder>,
    requests: &[Request],
    paths: &[DecodePath],
    tokens: usize,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Outcome>> {
    let empty = |&path| Outcome {
        path,
        equal: 0,
        near_ties: 0,
        different: Vec::new(),
        replies: Vec::new(),
        times: Vec::new(),
        drafted: [0; 3],
        cached: 0,
    };
    let mut outcomes: Vec<Outcome> = paths.iter().map(empty).collect();
    for i in 0..requests.len() {
        let alone_plain = alone
            .as_deref_mut()
            .map(|alone| reply(alone, requests, i, DecodePath::Plain, tokens, None));
        let mut plain = alone_plain.transpose()?;
        for outcome in &mut outcomes {
            let reply = reply(decoder, requests, i, outcome.path, tokens, plain.as_ref())?;
            outcome.replies.push(reply.tokens[reply.prompt..].to_vec());
            outcome.times.push(reply.time);
            outcome.cached += reply.cached;
            for (sum, value) in outcome.drafted.iter_mut().zip(reply.drafted) {
                *sum += value;
            }
            let expected = plain.get_or_insert_with(|| reply.clone());
            let same = expected.tokens.iter().zip(&reply.tokens);
            let same = same.take_while(|(a, b)| a == b).count();
            if same == expected.tokens.len().max(reply.tokens.len()) {
                outcome.equal += 1;
                continue;
            }
            let margin = margin(decoder, &expected.tokens[..same])?;
            let coarse = alone.is_some() || !decoder.network().is_precise();
            if coarse && margin < decoder.network().near_tie_margin() {
                outcome.near_ties += 1;
            } else {
                outcome.different.push((i, same - expected.prompt.min(same), margin));
            }
        }
        progress(i + 1);
    }
    Ok(outcomes)
}

/// Computes the reply to request `i` from an empty prefix cache; the others may run beside it.
/// `plain` is the expected reply, if known.
fn reply(
    decoder: &mut Decoder,
    requests: &[Request],
    i: usize,
    path: DecodePath,
    tokens: usize,
    plain: Option<&Reply>,
) -> Result<Reply> {
    let (chunk, trial_time) = (decoder.chunk(), decoder.speculation().trial_time());
    if let DecodePath::Chunked(tokens) = path {
        decoder.set_chunk(tokens);
    }
    // Prompts are short.
    decoder.forget_prefixes(CACHE_BYTES)?;
    if path == DecodePath::Resumed {
        complete(decoder, requests, i, path, 1, plain)?;
    }
    let reply = complete(decoder, requests, i, path, tokens, plain);
    decoder.set_chunk(chunk);
    if path != DecodePath::Governed {
        // Drafts that the governor does not choose cost it nothing, and plain steps earn it nothing.
        decoder.speculation_mut().set_trial_time(trial_time);
    }
    reply
}

fn complete(
    decoder: &mut Decoder,
    requests: &[Request],
    i: usize,
    path: DecodePath,
    tokens: usize,
    plain: Option<&Reply>,
) -> Result<Reply> {
    // Dropping a receiver cancels its request.
    let mut receivers = Vec::new();
    let mut sequence = admit_for_verification(decoder, &requests[i], &mut receivers)?;
    sequence.limit_reply(tokens);
    restrict_drafting(&mut sequence, path, plain.map(|plain| &plain.tokens[..]));
    let mut running = vec![sequence];
    let mut start = Instant::now();
    let mut step = 0;
    while !running[0].has_ended() {
        match path {
            DecodePath::Batched(others, _) => {
                change_others(decoder, &mut running, &mut receivers, requests, others, step)?;
                // A preempted sequence resumes with all drafters.
                restrict_drafting(&mut running[0], path, None);
            }
            // Drafts begin with the second step after it was resumed.
            DecodePath::Preempted(drafts) => {
                let sequence = &mut running[0];
                let is_due = drafts.is_none() || mix(1, step).is_multiple_of(2);
                if is_due && sequence.timeline().is_caught_up() {
                    preempt_and_resume(decoder, sequence)?;
                    restrict_drafting(sequence, path, None);
                }
            }
            _ => {}
        }
        if running[0].has_ended() {
            break;
        }
        decoder.wait_for_policies(&running);
        decoder.advance(&mut running)?;
        if running[0].reply().len() == 0 {
            start = Instant::now();
        }
        step += 1;
    }
    let time = start.elapsed();
    let mut sequence = running.swap_remove(0);
    if let Some(error) = sequence.take_failure() {
        return Err(error);
    }
    if path == DecodePath::Governed {
        decoder.speculation_mut().keep_learned_stats(&mut sequence);
    }
    decoder.save(&sequence);
    Ok(Reply {
        prompt: sequence.timeline().prompt(),
        cached: sequence.cached(),
        time,
        drafted: sequence.drafting().counts().map(|count| count as usize),
        tokens: sequence.timeline().tokens().to_vec(),
    })
}

/// Admits a request: greedy and with a fixed seed, unless the prompt's file sets them.
fn admit_for_verification(
    decoder: &mut Decoder,
    request: &Request,
    receivers: &mut Vec<mpsc::UnboundedReceiver<Event>>,
) -> Result<Sequence> {
    let (events, receiver) = mpsc::unbounded_channel();
    receivers.push(receiver);
    let greedy = SamplingPatch { temperature: Some(0.0), ..SamplingPatch::default() };
    let sampling = request.sampling.or(greedy);
    let request = Request { sampling, seed: request.seed.or(Some(0)), ..request.clone() };
    decoder.admit(Job { request, events })
}

/// Lets the sequences after the first join and leave at pseudo-random steps.
fn change_others(
    decoder: &mut Decoder,
    running: &mut Vec<Sequence>,
    receivers: &mut Vec<mpsc::UnboundedReceiver<Event>>,
    requests: &[Request],
    others: usize,
    step: u64,
) -> Result<()> {
    let first = running.remove(0);
    running.retain(|sequence| !sequence.has_ended());
    running.insert(0, first);
    let random = mix(others as u64, step) as usize;
    if running.len() <= others && random.is_multiple_of(3) {
        let mut request = requests[random / 3 % requests.len()].clone();
        // Every other one samples.
        request.sampling.temperature = Some((random / 64 % 2) as f32);
        request.seed = Some(step);
        let mut sequence = admit_for_verification(decoder, &request, receivers)?;
        // Every other one drafts.
        let depth = random / 128 % 2 * (1 + random / 256 % DEPTH);
        sequence.drafting_mut().set_depth(depth);
        running.push(sequence);
    } else if running.len() > 1 && random % 16 == 1 {
        running.remove(1 + random / 16 % (running.len() - 1));
    } else if random % 16 == 4 {
        let i = random / 16 % running.len();
        preempt_and_resume(decoder, &mut running[i])?;
    }
    Ok(())
}

/// Preempts a sequence, and resumes it at once unless it has ended.
fn preempt_and_resume(decoder: &mut Decoder, sequence: &mut Sequence) -> Result<()> {
    decoder.drop_state(sequence)?;
    if sequence.has_ended() { Ok(()) } else { decoder.restore_state(sequence) }
}

/// Tokens of prompt and reply, computed plainly; errors as those of [`verify`].
pub(crate) fn plain_text(
    decoder: &mut Decoder,
    request: &Request,
    tokens: usize,
) -> Result<Vec<u32>> {
    let requests = std::slice::from_ref(request);
    Ok(reply(decoder, requests, 0, DecodePath::Plain, tokens, None)?.tokens)
}

/// Leaves `sequence` the drafters and the governor of `path`. `plain` holds the tokens that it
/// will have, if known.
pub(crate) fn restrict_drafting(sequence: &mut Sequence, path: DecodePath, plain: Option<&[u32]>) {
    match (path, plain) {
        (DecodePath::Governed, _) => {}
        (
            DecodePath::Drafted(kind)
            | DecodePath::Preempted(Some(kind))
            | DecodePath::Batched(_, Some(kind)),
            _,
        ) => {
            sequence.drafting_mut().draft_always(Some(kind), DRAFT_DEPTH);
        }
        (DecodePath::Rewound, Some(plain)) => {
            let text = plain.to_vec();
            let drafter = Box::new(OneWrongToken { text, place: 0 });
            sequence.drafting_mut().draft_only_with(drafter, DEPTH);
        }
        _ => {
            sequence.drafting_mut().draft_always(None, 0);
        }
    }
}

/// Relative margin of the two best tokens to follow `tokens`.
fn margin(decoder: &Decoder, tokens: &[u32]) -> Result<f32> {
    let mut cache = decoder.empty_cache();
    let ids = token_ids(tokens);
    let rows = ids.dim(0);
    let span = Span { rows, cache: &mut cache };
    let hidden = decoder.network().forward(&ids, &mut [span])?;
    let last = hidden.try_index((.., rows - 1..))?;
    let logits = decoder.network().model().logits(&last)?.squeeze_axes(&[1])?;
    let (_, margin) = sample_with_margins(&logits, &[Row::new(Sampling::default(), 0)])?;
    margin.try_item_exact::<f32>().map_err(Error::from)
}

/// Drafts the known reply with one token changed: the first of a draft, then the second, and so on,
/// so that every place is rejected and every number of rows is rewound.
struct OneWrongToken {
    text: Vec<u32>,
    place: usize,
}

impl Drafter for OneWrongToken {
    /// The kind whose drafts cost nothing.
    fn kind(&self) -> DraftKind {
        DraftKind::Ngram
    }

    fn acceptance_rates(&self) -> [f32; DEPTH] {
        [1.0; DEPTH]
    }

    fn learned_rates(&mut self) -> &mut [MovingRate] {
        &mut []
    }

    fn start(
        &mut self,
        _model: &dyn Model,
        _cache: &mut Cache,
        tokens: &[u32],
        depth: usize,
    ) -> Result<Start> {
        let end = self.text.len().min(tokens.len() + depth);
        let mut draft = match self.text.get(tokens.len()..end) {
            Some(rest) if !rest.is_empty() => rest.to_vec(),
            _ => return Ok(Start::Nothing),
        };
        let place = self.place % draft.len();
        draft[place] = if draft[place] == 0 { 1 } else { draft[place] - 1 };
        self.place += 1;
        Ok(Start::Tokens(draft))
    }

    fn learn(&mut self, _judged: usize, _accepted: usize) -> Result<()> {
        Ok(())
    }
}
