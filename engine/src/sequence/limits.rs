//! The limits of a reply: what the client, the profile, the plan of the policies and the context
//! allow.
//!
//! Two counts are limited. `reply` bounds all tokens; `answer` bounds those of answer and tool
//! calls. A client limits either or both ([`Request::max_tokens`], [`Request::max_answer_tokens`]).
//! The limits of operators and policies count the whole reply. The budget of the reasoning follows
//! from them: it leaves the answer what it may need, so that reasoning is closed before it costs
//! the answer a token.

use super::reply_state::ReplyState;
use crate::config::ProfileLimits;
use crate::policy::{Counted, MIN_CHECKPOINT_EVERY, Plan};
use crate::request::Request;
use crate::text::Phase;

/// Most tokens that policies may inject into one request: a policy that injects at every step
/// would otherwise never let it end.
pub const INJECTED_TOKENS: usize = 4096;

/// Limits of one request.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Reasoning tokens, after which the reasoning is closed.
    pub reasoning: u32,
    /// Tokens of answer and tool calls; as many as `reply` if only the whole reply is limited.
    pub answer: u32,
    /// Tokens of the reply: reasoning, answer and tool calls.
    pub reply: u32,
    /// Tokens of prompt and reply together.
    pub context: usize,
    /// Tokens between two calls of `on-step`; 0 calls it on events only.
    pub every: u32,
    /// Whether `on-step` is called after a change of the phase.
    pub on_phase: bool,
    /// Whether `on-step` is called after a token with a line break.
    pub on_newline: bool,
    /// Likeliest tokens that policies see of each drawn token; 0 shows none.
    pub candidates: u32,
    /// Tokens between two checkpoints of the cache; 0 takes none.
    pub checkpoint_every: usize,
}

/// What limits a reply before its prompt is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Tokens of the whole reply; `None` if only the answer is limited.
    reply: Option<u32>,
    /// Tokens of answer and tool calls; `None` if only the whole reply is limited.
    pub answer: Option<u32>,
    /// `engine.max_tokens`: the reply of a request without a limit, and the reasoning of one whose
    /// limit counts the answer alone.
    default: u32,
}

impl Bounds {
    /// The limits of client and profile, and a note if the profile lowers the client's. `default`
    /// is `engine.max_tokens`.
    pub fn new(request: &Request, profile: ProfileLimits, default: u32) -> (Self, Option<String>) {
        let mut bounds =
            Self { reply: request.max_tokens, answer: request.max_answer_tokens, default };
        bounds.count(profile.limit_counts, request);
        let of_client = bounds.answer.or(bounds.reply);
        bounds.reply = match (bounds.reply, bounds.answer) {
            (None, None) => Some(default),
            (reply, _) => reply,
        };
        let Some(limit) = Some(profile.max_tokens).filter(|limit| *limit > 0) else {
            return (bounds, None);
        };
        bounds.lower(limit);
        let note = of_client
            .filter(|tokens| *tokens > limit)
            .map(|tokens| format!("max_tokens {tokens} exceeds the profile's limit of {limit}"));
        (bounds, note)
    }

    /// Lets the client's limit count as `counts` says. Everything of a raw prompt counts: it has no
    /// reasoning that a policy could have switched on.
    fn count(&mut self, counts: Option<Counted>, request: &Request) {
        let limit = [self.reply, self.answer].into_iter().flatten().min();
        if request.prompt.is_some() {
            (self.reply, self.answer) = (limit, None);
            return;
        }
        match counts {
            Some(Counted::Reply) => (self.reply, self.answer) = (limit, None),
            Some(Counted::Answer) => (self.reply, self.answer) = (None, limit),
            None => {}
        }
    }

    /// Limits the whole reply to `limit` tokens.
    fn lower(&mut self, limit: u32) {
        self.reply = Some(self.reply.map_or(limit, |reply| reply.min(limit)));
        self.answer = self.answer.map(|answer| answer.min(limit));
    }

    /// Most tokens of the whole reply, without text that policies inject.
    pub fn reply(&self) -> u32 {
        let answer = self.answer.unwrap_or(0);
        self.reply.unwrap_or(answer.saturating_add(self.default))
    }

    /// The bounds under `plan`, and a note if it lowers the limit of the reply.
    ///
    /// What the plan says about the count applies to the client's limit, unless the profile has it
    /// count the whole reply.
    pub fn planned(
        request: &Request,
        profile: ProfileLimits,
        default: u32,
        plan: &Plan,
    ) -> (Self, Option<String>) {
        let limit_counts = match (profile.limit_counts, plan.limit_counts) {
            (Some(Counted::Reply), _) => Some(Counted::Reply),
            (of_profile, of_plan) => of_plan.or(of_profile),
        };
        let (mut bounds, _) =
            Self::new(request, ProfileLimits { limit_counts, ..profile }, default);
        let limit = plan.max_tokens.filter(|limit| *limit < bounds.reply());
        limit.into_iter().for_each(|limit| bounds.lower(limit));
        (bounds, limit.map(|limit| format!("max_tokens {limit} by a policy")))
    }

    /// The limits of a reply under `plan`, with `left` tokens of the context after the prompt.
    pub fn limits(
        self,
        plan: &Plan,
        of_client: Option<u32>,
        of_profile: u32,
        [context, left]: [usize; 2],
    ) -> Limits {
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        let reserve = plan.answer_reserve.unwrap_or(0);
        // At most half is kept for the answer: a policy may reserve more than there is, and a
        // client may allow more than the context holds.
        let kept_of = |tokens: u32| self.answer.unwrap_or(reserve).min(tokens / 2);
        let of_context = match self.answer {
            Some(_) => left - kept_of(left),
            None => left.saturating_sub(reserve),
        };
        let of_reply = self.reply.map_or(self.default, |reply| reply - kept_of(reply));
        let of_profile = (of_profile > 0).then_some(of_profile);
        let budgets = [plan.reasoning_budget, of_client, of_profile];
        // Text that closes the reasoning, and other injected text, comes beside its budget. It does
        // not cost the answer.
        let injected = INJECTED_TOKENS as u32;
        let reply = self.reply.unwrap_or_else(|| self.reply().saturating_add(injected));
        Limits {
            reasoning: budgets.into_iter().flatten().fold(of_context.min(of_reply), u32::min),
            answer: self.answer.unwrap_or(reply),
            reply,
            context,
            every: plan.every,
            on_phase: plan.on_phase,
            on_newline: plan.on_newline,
            candidates: plan.candidates,
            checkpoint_every: match plan.checkpoint_every {
                0 => 0,
                every => every.max(MIN_CHECKPOINT_EVERY) as usize,
            },
        }
    }
}

impl Limits {
    /// Tokens that a reply in this state may still have; `length` is that of prompt and reply.
    pub fn left(&self, state: &ReplyState, length: usize) -> usize {
        let context = self.context.saturating_sub(length);
        let reply = self.reply.saturating_sub(state.tokens());
        let left = match self.answer.saturating_sub(state.answer_tokens) {
            0 => 0,
            // These tokens count for the reply only, however many there are before the answer.
            _ if state.reply.phase() == Phase::Reasoning => reply,
            answer => answer.min(reply),
        };
        context.min(left as usize)
    }

    /// Returns true if the limits cut `tokens` off if they follow a reply in this state; `length`
    /// is that of prompt and reply.
    pub fn cut_off(&self, state: &ReplyState, length: usize, tokens: &[u32]) -> bool {
        let mut state = state.clone();
        (length..).zip(tokens).any(|(length, &token)| {
            let is_cut = self.left(&state, length) == 0;
            state.push(token);
            is_cut
        })
    }
}
