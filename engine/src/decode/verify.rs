//! Tries on the user's machine and weights what is promised: however a reply is computed, it is the
//! one that plain greedy decoding gives.
//!
//! Every prompt is decoded plainly, then in each other way, in turn, so that noise on the machine
//! meets all of them alike. Replies are compared token by token, forced tokens included.
//!
//! A reply that differs is looked at where it first does: where the two best tokens are closer than
//! rounding ([`super::speculate::tie`]), it is a near-tie. In f32 near-ties count as different; in
//! 16-bit types, and with quantized keys and values, they are what rounding may do, and are counted
//! apart.

use std::time::{Duration, Instant};

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::{Array, Dtype};
use tokio::sync::mpsc;

use super::Decoder;
use super::draft::{At, Chance, Draft};
use super::governor::{Governor, Mode};
use super::sample::sample_with_margin;
use super::sequence::Sequence;
use crate::cache::Span;
use crate::config::{DEPTH, DraftKind};
use crate::engine::Job;
use crate::error::{Error, Result};
use crate::prefix::{Prefixes, Retention};
use crate::request::{Request, Sampling, SamplingWish};

/// Depth at which each kind of draft is tried.
const TRIED_DEPTH: usize = 4;

/// Bytes for what requests save while they are tried.
const STORE_BYTES: u64 = 256 << 20;

/// A way to compute a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// One token a pass, nothing saved, the prompt in chunks as configured.
    Plain,
    /// The prompt in chunks of so many tokens.
    Chunked(usize),
    /// The prompt's state taken from the store.
    Resumed,
    /// Drafts of which one, at a place that moves on, is wrong: what is behind it is rewound.
    Rewound,
    /// Drafts of this kind alone, always.
    Drafted(DraftKind),
    /// As requests are served: the governor decides.
    Governed,
}

impl Way {
    /// What it is called in reports.
    pub fn name(self) -> String {
        match self {
            Self::Plain => "plain".into(),
            Self::Chunked(tokens) => format!("prefill in chunks of {tokens}"),
            Self::Resumed => "resumed from saved state".into(),
            Self::Rewound => "rewound after forced rejections".into(),
            Self::Drafted(kind) => format!("{} drafts", kind.name()),
            Self::Governed => "governor".into(),
        }
    }
}

/// What a way did over all prompts.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The way.
    pub way: Way,
    /// Replies that are the plain one.
    pub equal: usize,
    /// Replies that leave the plain one at a near-tie, where the numbers promise no more.
    pub near_ties: usize,
    /// Replies that differ otherwise: prompt, token at which they do, and the relative margin of
    /// the two best tokens there.
    pub different: Vec<(usize, usize, f32)>,
    /// Tokens of each reply, and the time from its first to its last.
    pub tokens: Vec<usize>,
    /// See `tokens`.
    pub times: Vec<Duration>,
    /// Tokens drafted, tokens accepted, and passes that verified them.
    pub drafted: [usize; 3],
    /// Prompt tokens that were restored instead of computed.
    pub cached: usize,
}

impl Outcome {
    /// Whether all that is promised held.
    pub fn holds(&self) -> bool {
        self.different.is_empty()
    }

    /// Time of plain decoding over this way's, the median over the prompts.
    pub fn gain(&self, plain: &Self) -> f64 {
        let ratio = |(a, b): (&Duration, &Duration)| a.as_secs_f64() / b.as_secs_f64().max(1e-9);
        let mut ratios: Vec<f64> = plain.times.iter().zip(&self.times).map(ratio).collect();
        ratios.sort_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(1.0)
    }
}

/// A reply, and what it took.
#[derive(Clone)]
struct Reply {
    tokens: Vec<u32>,
    prompt: usize,
    cached: usize,
    time: Duration,
    drafted: [usize; 3],
}

impl Decoder {
    /// The ways that this model and configuration have.
    pub fn ways(&self) -> Result<Vec<Way>> {
        let mut ways = vec![Way::Plain, Way::Chunked(64), Way::Chunked(7), Way::Resumed];
        ways.push(Way::Rewound);
        ways.extend(self.drafts(&[])?.iter().map(|draft| Way::Drafted(draft.kind())));
        if self.costs.is_some() {
            ways.push(Way::Governed);
        }
        Ok(ways)
    }

    /// Computes the replies to `requests`, at most `tokens` tokens each, in each of `ways`, the
    /// first of which is [`Way::Plain`]. `progress` hears of each prompt that is done.
    ///
    /// # Errors
    /// What keeps a request from being run, or MLX's error.
    pub fn verify(
        &mut self,
        requests: &[Request],
        ways: &[Way],
        tokens: usize,
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<Outcome>> {
        let empty = |&way| Outcome {
            way,
            equal: 0,
            near_ties: 0,
            different: Vec::new(),
            tokens: Vec::new(),
            times: Vec::new(),
            drafted: [0; 3],
            cached: 0,
        };
        let mut outcomes: Vec<Outcome> = ways.iter().map(empty).collect();
        for (i, request) in requests.iter().enumerate() {
            let mut plain: Option<Reply> = None;
            for outcome in &mut outcomes {
                let reply = self.reply(request, outcome.way, tokens, plain.as_ref())?;
                outcome.tokens.push(reply.tokens.len() - reply.prompt);
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
                let margin = self.margin(&expected.tokens[..same])?;
                let coarse = self.dtype != Dtype::Float32 || self.kv_bits > 0;
                if coarse && margin < self.tie {
                    outcome.near_ties += 1;
                } else {
                    outcome.different.push((i, same - expected.prompt.min(same), margin));
                }
            }
            progress(i + 1);
        }
        Ok(outcomes)
    }

    /// Computes one reply. `plain` is what it should be, where that is known.
    fn reply(
        &mut self,
        request: &Request,
        way: Way,
        tokens: usize,
        plain: Option<&Reply>,
    ) -> Result<Reply> {
        let chunk = self.prefill_chunk;
        if let Way::Chunked(tokens) = way {
            self.prefill_chunk = tokens;
        }
        self.prefixes = Prefixes::new(self.prefixes.empty(), STORE_BYTES, None, 0)?;
        if way == Way::Resumed {
            self.complete(request, way, 1, plain)?;
        }
        let reply = self.complete(request, way, tokens, plain);
        self.prefill_chunk = chunk;
        reply
    }

    fn complete(
        &mut self,
        request: &Request,
        way: Way,
        tokens: usize,
        plain: Option<&Reply>,
    ) -> Result<Reply> {
        // Dropping the receiver would cancel the request.
        let (events, _receiver) = mpsc::unbounded_channel();
        // Greedy where the prompt does not say otherwise; drawn with one seed where it does.
        let SamplingWish { temperature, seed, .. } = request.sampling;
        let (temperature, seed) = (temperature.or(Some(0.0)), seed.or(Some(0)));
        let sampling = SamplingWish { temperature, seed, ..request.sampling };
        let request = Request { sampling, ..request.clone() };
        let mut sequence = self.admit(&Job { request, events })?;
        sequence.limits.context = self.context.min(sequence.prompt + tokens);
        self.prepare(&mut sequence, way, plain.map(|plain| &plain.tokens[..]));
        let mut running = vec![sequence];
        let mut start = Instant::now();
        while !running[0].has_ended() {
            self.step(&mut running)?;
            if running[0].tokens.len() == running[0].prompt {
                start = Instant::now();
            }
        }
        let time = start.elapsed();
        let mut sequence = running.pop().expect("there is one");
        if let Some(error) = sequence.take_failure() {
            return Err(error);
        }
        if way == Way::Governed {
            self.remember(&mut sequence);
        }
        self.save(&sequence, Retention::default());
        Ok(Reply {
            prompt: sequence.prompt,
            cached: sequence.cached,
            time,
            drafted: sequence.drafted_so_far(),
            tokens: sequence.tokens,
        })
    }

    /// Prompt and reply, computed in `way`.
    ///
    /// # Errors
    /// As [`Decoder::verify`].
    pub(super) fn text_of(
        &mut self,
        request: &Request,
        way: Way,
        tokens: usize,
    ) -> Result<Vec<u32>> {
        Ok(self.reply(request, way, tokens, None)?.tokens)
    }

    /// Gives `sequence` what drafts in this way; `plain` is what its tokens will be, where that is known.
    pub(super) fn prepare(&self, sequence: &mut Sequence, way: Way, plain: Option<&[u32]>) {
        let always = |depth| Some(Governor::new(Mode::Always(depth), depth));
        match (way, plain) {
            (Way::Governed, _) => {}
            (Way::Drafted(kind), _) => {
                sequence.drafts.retain(|draft| draft.kind() == kind);
                sequence.governor = always(TRIED_DEPTH);
            }
            (Way::Rewound, Some(plain)) => {
                let text = plain.to_vec();
                sequence.drafts = vec![Box::new(Wrong { text, place: 0 })];
                sequence.governor = always(DEPTH);
            }
            _ => {
                sequence.drafts.clear();
                sequence.governor = None;
            }
        }
    }

    /// Relative margin of the two best tokens behind `tokens`.
    fn margin(&self, tokens: &[u32]) -> Result<f32> {
        let mut cache = self.prefixes.empty();
        let rows = tokens.len() as i32;
        let ids = Array::from_slice(tokens, &[rows]);
        let span = Span { rows, cache: &mut cache };
        let hidden = self.model.forward(&ids, &mut [span], self.pass())?;
        let last = hidden.try_index((.., rows - 1..))?;
        let logits = self.model.logits(&last)?.squeeze_axes(&[1])?;
        let (_, margin) = sample_with_margin(&logits, None, &Sampling::default(), 0, 0)?;
        margin.try_item_exact::<f32>().map_err(|e| Error::Array(e.to_string()))
    }
}

/// Knows the reply and drafts it, but for one token: the first of a draft, then the second, and so
/// on, so that every place is rejected and every number of rows is rewound.
struct Wrong {
    text: Vec<u32>,
    place: usize,
}

impl Draft for Wrong {
    /// None of them; the closest is the one that reads ahead in a text.
    fn kind(&self) -> DraftKind {
        DraftKind::Ngram
    }

    fn chances(&self) -> [f32; DEPTH] {
        [1.0; DEPTH]
    }

    fn learned(&mut self) -> &mut [Chance] {
        &mut []
    }

    fn propose(&mut self, at: &mut At<'_>, depth: usize) -> Result<Option<Array>> {
        let end = self.text.len().min(at.tokens.len() + depth);
        let Some(rest) = self.text.get(at.tokens.len()..end) else { return Ok(None) };
        let mut guess = rest.to_vec();
        if guess.is_empty() {
            return Ok(None);
        }
        let place = self.place % guess.len();
        guess[place] = if guess[place] == 0 { 1 } else { guess[place] - 1 };
        self.place += 1;
        Ok(Some(Array::from_slice(&guess, &[guess.len() as i32])))
    }

    fn learn(&mut self, _judged: usize, _accepted: usize) -> Result<()> {
        Ok(())
    }
}
