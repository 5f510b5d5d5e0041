//! One request while it is decoded, as parts that own what they change.
//!
//! | part | owns |
//! |---|---|
//! | [`Timeline`] | committed tokens, cache and next token |
//! | [`ClientReply`] | the parsed reply, and what the client has of it |
//! | [`Steering`] | policies, grammar and sampling parameters |
//! | [`Drafting`] | drafters, and what drafts have gained |
//! | [`Limits`] | the limits of the reply |
//!
//! `commit.rs` commits tokens and performs what follows from them. Never runs the model:
//! `decode/step.rs` asks for the rows of the next pass, runs them, and commits the sampled token.
//!
//! Positions and counts of tokens fit i32, which casts rely on: `decode/load.rs` limits the
//! context.

pub mod apply;
pub mod commit;
pub mod constrain;
mod continued;
pub mod deliver;
pub mod drafting;
pub mod expected;
pub mod finish;
pub mod form;
pub mod hooks;
pub mod limits;
pub mod logprobs;
pub mod next_token;
pub mod outlet;
mod outlook;
pub mod prepare;
pub mod reply;
pub mod reply_state;
pub mod save_points;
pub mod steering;
pub mod timeline;
pub mod tool_calls;
pub mod unsteered;

use std::rc::Rc;
use std::time::Instant;

use mlx_rs::Array;

use self::constrain::Constraint;
use self::drafting::Drafting;
use self::hooks::{HookThreads, Hooks};
use self::limits::Limits;
use self::next_token::Rows;
use self::outlet::Outlet;
use self::outlook::Lookout;
use self::prepare::Prepared;
use self::reply::ClientReply;
use self::save_points::retention;
use self::steering::Steering;
use self::timeline::Timeline;
use crate::cache::Cache;
use crate::config::DEPTH;
use crate::draft::{Costs, Offer};
use crate::error::{Error, Result};
use crate::live::Stage;
use crate::policy::SavePoint;
use crate::prefix::Retention;
use crate::request::{Event, FinishReason, Request};
use crate::sample::sampler::Sampler;
use crate::text::{Phase, Text};

/// Most rows of a step of a sequence that has caught up: the last token and a draft.
pub const STEP_ROWS: usize = DEPTH + 1;

/// One request being decoded.
pub struct Sequence {
    request: Request,
    timeline: Timeline,
    reply: ClientReply,
    steering: Steering,
    drafting: Drafting,
    limits: Limits,
    /// How the reply has ended.
    end: Option<FinishReason>,
    /// The error that has ended the request.
    failure: Option<Error>,
    /// Whether the prompt was rendered for reasoning; `None` if the model cannot reason.
    reasoning: Option<bool>,
    /// Number of the sequence among those of the decoder.
    number: u64,
    /// Number of the body that asks for it.
    body: u64,
    /// Since when it waits for a turn, by the queue's stamp; 0 is before all others of its profile.
    since: u64,
    /// How often it was preempted.
    preemptions: u32,
    /// Steps in a row in which its prompt waited for those of others.
    passed_over: u32,
    /// Since when the mask of its next token waits for those of others; no row of the sequence runs
    /// until it is computed.
    awaits_mask: Option<Instant>,
    /// Prompt tokens restored from the prefix cache.
    cached: usize,
    /// Whether state may be saved outside of the save points: the plan does not restrict it.
    saves_anywhere: bool,
    /// Retention of the state at the end of the reply; `None` if it is not saved.
    reply_retention: Option<Retention>,
    /// Number of layers with a skipped feed-forward block, for the usage.
    skipped_layers: u32,
    /// Tokens of the prompt that the client has received, if they are reported.
    reported: usize,
    /// Sum of the hidden states so far, f32 [1, D], if it becomes an embedding.
    pooled: Option<Array>,
    /// Tokens that the form left no choice about.
    forced: u32,
    /// Tokens that ran again after rewinds.
    rerun: usize,
    /// The other choices of the same request, until its prompt has run.
    others: Vec<Prepared>,
    /// The span `prefill`, and then the span `decode`.
    phase_span: tracing::Span,
    /// Whether `phase_span` is the span `decode`.
    is_decoding: bool,
}

/// What admission adds to a prepared request.
pub struct Admitted {
    /// Number of the sequence among those of the decoder.
    pub number: u64,
    /// The cache, with saved state of the beginning of the prompt.
    pub cache: Cache,
    /// Drafters and governor.
    pub drafting: Drafting,
    /// The threads that call policies.
    pub hook_threads: Rc<HookThreads>,
    /// Whether tokens that a form forces are committed without being sampled.
    pub forces: bool,
    /// Number of layers with a skipped feed-forward block.
    pub skipped_layers: u32,
    /// Fewest tokens of a prompt that are worth saving.
    pub store_min_tokens: usize,
}

impl Sequence {
    /// The sequence of an admitted request. Sends the first events.
    pub fn new(prepared: Prepared, admitted: Admitted, text: &Text) -> Self {
        let Prepared {
            request,
            events,
            reasoning,
            prompt,
            grammar,
            reply,
            plan,
            policy,
            seed,
            mut notes,
            mut save_points,
            limits,
            sampling,
            fingerprint,
            others,
            body,
        } = prepared;
        let Admitted { number, cache, drafting, hook_threads, forces, .. } = admitted;
        let (cached, prompt_tokens) = (cache.position, prompt.len());
        let is_saved = request.embedding.is_none();
        let least = admitted.store_min_tokens;
        save_points.retain(|&(at, _)| is_saved && at >= least && at > cached);
        // Fails if the client has disconnected; the first step checks that.
        // Casts: positions fit i32.
        let _ = events.send(Event::Started {
            fingerprint,
            prompt_tokens: prompt_tokens as u32,
            cached_tokens: cached as u32,
            max_tokens: limits.reply,
            max_answer_tokens: (limits.answer < limits.reply).then_some(limits.answer),
        });
        let lookout = Lookout::new(&plan, text, &mut notes);
        for note in &notes {
            let _ = events.send(Event::Note { tokens: 0, note: note.clone() });
        }
        let mut sampler = Sampler::new(sampling, seed);
        if !request.biases.is_empty() {
            sampler.bias(&request.biases, 0);
        }
        if request.ignores_end {
            sampler.ban(text.eos(), 0);
        } else if request.min_tokens > 0 {
            sampler.ban(text.eos(), request.min_tokens);
        }
        let outlet = policy.sees_text.then(Outlet::default);
        let hooks = Hooks::new(hook_threads, policy, request.span.clone());
        let constraint = grammar.map(|grammar| Constraint::new(grammar, forces));
        Self {
            timeline: Timeline::new(prompt, cache, save_points),
            reply: ClientReply::new(&request, reply, prompt_tokens, events, outlet, notes),
            steering: Steering::new(
                &request,
                &plan,
                prompt_tokens,
                hooks,
                sampler,
                constraint,
                lookout,
            ),
            drafting,
            limits,
            end: None,
            failure: None,
            reasoning,
            number,
            body,
            since: 0,
            preemptions: 0,
            passed_over: 0,
            awaits_mask: None,
            cached,
            saves_anywhere: is_saved && plan.retain.is_none(),
            reply_retention: retention(&plan, &request.retain, SavePoint::Reply)
                .filter(|_| is_saved),
            skipped_layers: admitted.skipped_layers,
            reported: 0,
            pooled: None,
            forced: 0,
            rerun: 0,
            others,
            is_decoding: false,
            phase_span: request.span.prefill(prompt_tokens, cached),
            request,
        }
    }

    /// The request.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Committed tokens, cache and next token.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// The timeline, for passes over its rows.
    pub fn timeline_mut(&mut self) -> &mut Timeline {
        &mut self.timeline
    }

    /// The reply as its client has it.
    pub fn reply(&self) -> &ClientReply {
        &self.reply
    }

    /// The parameters of sampling.
    pub fn sampler(&mut self) -> &mut Sampler {
        self.steering.sampler()
    }

    /// Drafters, and what drafts have gained.
    pub fn drafting(&self) -> &Drafting {
        &self.drafting
    }

    /// The drafters, to draft with them.
    pub fn drafting_mut(&mut self) -> &mut Drafting {
        &mut self.drafting
    }

    /// The drafters with the timeline that they draft for, and the parameters of sampling.
    pub fn for_draft(&mut self) -> (&mut Drafting, &mut Timeline, &mut Sampler) {
        (&mut self.drafting, &mut self.timeline, self.steering.sampler())
    }

    /// The limits of the reply.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Ends the reply after at most `tokens` tokens, for measurements.
    pub fn limit_reply(&mut self, tokens: usize) {
        self.limits.context = self.limits.context.min(self.timeline.prompt() + tokens);
    }

    /// Returns true if the prompt was rendered for reasoning; `None` if the model cannot reason.
    pub fn reasoning(&self) -> Option<bool> {
        self.reasoning
    }

    /// Number of the sequence among those of the decoder.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Number of the body that asks for it.
    pub fn body(&self) -> u64 {
        self.body
    }

    /// Since when it waits for a turn, by the queue's stamp; 0 is before all others of its profile.
    pub fn since(&self) -> u64 {
        self.since
    }

    /// Lets it wait for a turn since `stamp`.
    pub fn wait_since(&mut self, stamp: u64) {
        self.since = stamp;
    }

    /// How often it was preempted.
    pub fn preemptions(&self) -> u32 {
        self.preemptions
    }

    /// Drops all that holds arrays, so that it is preempted. `empty` is a cache without rows.
    pub fn drop_arrays(&mut self, empty: Cache) {
        self.timeline.drop_arrays(empty);
        self.drafting.drop_arrays();
        self.awaits_mask = None;
    }

    /// Counts that it was preempted.
    pub fn count_preemption(&mut self) {
        self.preemptions += 1;
    }

    /// Resumes it with `cache`, which holds saved state of its first tokens.
    pub fn restore(&mut self, cache: Cache) {
        self.timeline.restore(cache);
        self.pooled = None;
    }

    /// Steps in a row in which its prompt waited for those of others.
    pub fn passed_over(&self) -> u32 {
        self.passed_over
    }

    /// Counts a step in which its prompt `waits` for those of others, or does not.
    pub fn count_wait(&mut self, waits: bool) {
        self.passed_over = if waits { self.passed_over + 1 } else { 0 };
    }

    /// Since when the mask of its next token waits for those of others.
    pub fn awaits_mask(&self) -> Option<Instant> {
        self.awaits_mask
    }

    /// Prompt tokens restored from the prefix cache.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Returns true if state may be saved outside of the save points.
    pub fn saves_anywhere(&self) -> bool {
        self.saves_anywhere
    }

    /// Retention of the state at the end of the reply; `None` if it is not saved.
    pub fn reply_retention(&self) -> Option<Retention> {
        self.reply_retention
    }

    /// Lets the state at the end of the reply not be saved.
    pub fn forget_reply(&mut self) {
        self.reply_retention = None;
    }

    /// Tokens of the prompt that the client has received, if they are reported.
    pub fn reported(&self) -> usize {
        self.reported
    }

    /// Counts `tokens` tokens of the prompt as received.
    pub fn set_reported(&mut self, tokens: usize) {
        self.reported = tokens;
    }

    /// Takes the sum of the hidden states so far, f32 [1, D].
    pub fn take_pooled(&mut self) -> Option<Array> {
        self.pooled.take()
    }

    /// Keeps the sum of the hidden states so far, f32 [1, D].
    pub fn set_pooled(&mut self, pooled: Array) {
        self.pooled = Some(pooled);
    }

    /// Returns true if other choices wait for its prompt.
    pub fn has_others(&self) -> bool {
        !self.others.is_empty()
    }

    /// Takes the choices that wait for its prompt.
    pub fn take_others(&mut self) -> Vec<Prepared> {
        std::mem::take(&mut self.others)
    }

    /// What it could draft in the next pass, of `streams` sequences, once its sampled token is
    /// committed.
    pub fn offer_draft(&self, costs: &Costs, streams: usize) -> Option<Offer> {
        let unread = self.timeline.has_sampled();
        // The last committed token has not run, and nothing else.
        let is_ready = self.timeline.position() + usize::from(!unread) == self.timeline.len();
        if !is_ready
            || self.samples_late()
            || self.timeline.runs_alone()
            || self.has_ended()
            || self.is_away()
        {
            return None;
        }
        let room = self.tokens_left().saturating_sub(1);
        self.drafting.offer(costs, streams, room, unread)
    }

    /// Rows of the prompt, or of a long text after a rewind, that must run before the next token
    /// can be sampled. 0 if there are so few that they run as a step, or none may run.
    pub fn prompt_rows(&self) -> usize {
        let rows = self.timeline.len().saturating_sub(self.timeline.position());
        if rows > STEP_ROWS && !self.has_ended() && !self.is_away() { rows } else { 0 }
    }

    /// Ends the span `prefill` if the prompt has run; true if it has just done so.
    pub fn begin_decode(&mut self) -> bool {
        let begins = !self.is_decoding && self.timeline.has_run_prompt();
        if begins {
            self.is_decoding = true;
            self.phase_span = self.request.span.decode();
        }
        begins
    }

    /// The rows of the next pass, at most `chunk` of a prompt.
    pub fn rows(&mut self, chunk: usize) -> Rows {
        if self.has_ended() {
            self.timeline.drop_sampled();
            return Rows::Nothing;
        }
        let (position, phase_start) = (self.timeline.position(), self.reply.phase_start());
        let stops = self.takes_checkpoints() && position < phase_start;
        let end = (position + chunk).min(if stops { phase_start } else { usize::MAX });
        // A token that ends the reply in any case need not run.
        let is_last = self.tokens_left() <= 1;
        self.timeline.rows(end, is_last)
    }

    /// Returns true if its next token is sampled in the next step.
    pub fn decodes(&self) -> bool {
        self.prompt_rows() == 0 && !self.has_ended() && !self.is_away()
    }

    /// Returns true if its next token is sampled only when all tokens before it are on the host.
    pub fn samples_late(&self) -> bool {
        self.steering.samples_late(&self.reply)
    }

    /// Returns true if its plan watches tokens.
    pub fn watches_tokens(&self) -> bool {
        self.steering.lookout.is_some()
    }

    /// Tokens that the limits of reply, answer and context leave in the current phase.
    fn tokens_left(&self) -> usize {
        self.limits.left(self.reply.state(), self.timeline.len())
    }

    /// Returns true if a call of the policies is away, or back without its answer having been
    /// taken. No row of the sequence runs then.
    pub fn is_away(&self) -> bool {
        self.steering.is_away()
    }

    /// Returns true if the call that was away has ended.
    pub fn is_back(&self) -> bool {
        self.steering.is_back()
    }

    /// Returns true if the client has disconnected.
    pub fn is_cancelled(&self) -> bool {
        self.reply.is_cancelled()
    }

    /// Returns true if its deadline has passed.
    pub fn is_late(&self) -> bool {
        self.request.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// What is done for the request, for errors.
    pub fn stage(&self) -> &'static str {
        if self.timeline.has_run_prompt() { "being decoded" } else { "in prefill" }
    }

    /// Returns true if the reply or an error has ended the request.
    pub fn has_ended(&self) -> bool {
        self.end.is_some() || self.failure.is_some()
    }

    /// Ends a reply for which the client wants no token, now that its prompt has run.
    pub fn end_after_prompt(&mut self) {
        self.timeline.drop_sampled();
        self.end = Some(FinishReason::Length);
    }

    /// Ends the request if `result` is an error.
    pub fn check(&mut self, result: Result<()>) {
        if let Err(error) = result {
            self.failure = Some(error);
        }
    }

    /// Returns true if an error has ended the request.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Takes the error that ended the request, if any.
    pub fn take_failure(&mut self) -> Option<Error> {
        self.failure.take()
    }

    /// Publishes stage and position for other threads.
    pub fn report_progress(&self) {
        let (position, prompt) = (self.timeline.position(), self.timeline.prompt());
        let stage = match self.reply.phase() {
            _ if position < prompt => Stage::Prefill,
            Phase::Reasoning => Stage::Reasoning,
            Phase::Answer => Stage::Answer,
            Phase::ToolCall => Stage::ToolCall,
        };
        self.request.live.set(stage, position.min(prompt), self.reply.len());
    }
}

/// Setters for tests, of values that are otherwise fixed when the sequence is made.
#[cfg(test)]
impl Sequence {
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.request.deadline = Some(deadline);
    }

    pub fn set_saves_anywhere(&mut self, saves_anywhere: bool) {
        self.saves_anywhere = saves_anywhere;
    }

    pub fn has_form(&self) -> bool {
        self.steering.has_form()
    }

    pub fn set_rewound(&mut self, tokens: usize) {
        self.steering.set_rewound(tokens);
    }
}
