//! Preparation: a request's policies, prompt and plan, before the engine thread admits it.
//!
//! `on-prompt` edits system text, the conversation is rendered and tokenized, and `on-request` returns
//! the plan. A long conversation takes seconds, so that this is done on threads of its own (`decode/preparation.rs`):
//! the engine thread computes meanwhile, and other requests pass. Text is limited by
//! `engine.prompt_bytes`, template and policies have limits of their own, and a request that is no
//! longer wanted is dropped between two steps. A panic costs its request only.
//!
//! Never sees an array, the model or a cache.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use super::continued::{continued, continued_tokens};
use super::limits::{Bounds, Limits};
use super::unsteered::unsteered;
use crate::config::{Profile, ProfileLimits};
use crate::error::{Error, RequestError, Result};
use crate::grammar::{Grammar, Grammars};
use crate::job::{Job, OtherChoice};
use crate::policy::{
    AnswerForm, Params, Plan, Policies, Refusal, RequestView, Session, Summary, Vocabulary,
};
use crate::prefix::Retention;
use crate::request::view::{self, add_stops, edit_system_text, offer};
use crate::request::{Event, Request, ResponseFormat, Sampling};
use crate::text::{Reply, Text, Variables};

/// The stage of a request here, for errors.
pub const STAGE: &str = "being prepared";

/// What preparation needs to know of the model, the profiles and their policies.
pub struct Preparer {
    pub text: Text,
    pub grammars: Arc<Grammars>,
    pub policies: Arc<Policies>,
    pub profiles: BTreeMap<String, Profile>,
    pub name: String,
    pub family: &'static str,
    /// Unfinished SHA-256 over weights, number format and text; a request's policies complete it.
    pub model_digest: Sha256,
    /// Tokens of prompt and reply together.
    pub context: usize,
    /// Most tokens of a reply whose request sets no limit.
    pub max_tokens: u32,
    /// Most bytes of a rendered conversation.
    pub prompt_bytes: usize,
    /// [`crate::prefix::Prefixes::save_interval`]
    pub save_interval: Option<usize>,
}

/// A request that the engine thread can admit.
pub struct Prepared {
    pub request: Request,
    pub events: mpsc::UnboundedSender<Event>,
    /// Whether the prompt was rendered for reasoning; `None` if the model cannot reason and the client did not ask.
    pub reasoning: Option<bool>,
    pub prompt: Vec<u32>,
    /// What the form of the reply allows; `None` if it is free.
    pub grammar: Option<Grammar>,
    /// The empty reply to `prompt`.
    pub reply: Reply,
    pub plan: Plan,
    pub policy: Session,
    pub seed: u64,
    /// What policy and limits have changed so far, in words.
    pub notes: Vec<String>,
    /// Save points of the prompt, ascending.
    pub save_points: Vec<(usize, Retention)>,
    pub limits: Limits,
    pub sampling: Sampling,
    /// For [`Event::Started`].
    pub fingerprint: String,
    /// The other choices of the same request.
    pub others: Vec<Prepared>,
    /// Identifies the body that asks for it; 0 outside of the queue.
    pub body: u64,
}

impl Prepared {
    /// The channels of its choices, the first one first.
    pub fn channels(&self) -> Vec<mpsc::UnboundedSender<Event>> {
        let others = self.others.iter().map(|other| other.events.clone());
        std::iter::once(self.events.clone()).chain(others).collect()
    }
}

/// A prompt, and notes on how the template got the conversation.
type Tokenized = (Vec<u32>, Vec<String>);

/// The prompts of the choices of one request so far: a long conversation takes seconds to render and to
/// tokenize, and its choices would take them again and again.
#[derive(Default)]
struct Prompts {
    /// Prompts of the conversation as it was sent, by whether they are rendered for reasoning.
    as_sent: Vec<(Option<bool>, Tokenized)>,
    /// Tokens of the first choice.
    first: Option<Vec<u32>>,
}

impl Prompts {
    /// The prompt for `reasoning`, which `tokenize` computes unless another choice has it. Only the
    /// conversation as it was sent is the same for all.
    fn get(
        &mut self,
        is_as_sent: bool,
        reasoning: Option<bool>,
        tokenize: impl FnOnce() -> Result<Tokenized>,
    ) -> Result<Tokenized> {
        if !is_as_sent {
            return tokenize();
        }
        if let Some((_, known)) = self.as_sent.iter().find(|(known, _)| *known == reasoning) {
            return Ok(known.clone());
        }
        let prompt = tokenize()?;
        self.as_sent.push((reasoning, prompt.clone()));
        Ok(prompt)
    }

    /// Whether `prompt` is that of a first choice before this one, which it becomes if there is none.
    fn is_of_first(&mut self, prompt: &[u32]) -> bool {
        match &self.first {
            Some(first) => first == prompt,
            None => {
                self.first = Some(prompt.to_vec());
                false
            }
        }
    }
}

impl Preparer {
    /// Prepares a request of `body` with its other choices. The policies of each decide on their own; what
    /// they leave alone is rendered once, and held once.
    pub fn prepare_choices(
        &self,
        body: u64,
        job: Job,
        others: Vec<OtherChoice>,
    ) -> Result<Prepared> {
        let request = (!others.is_empty()).then(|| job.request.clone());
        let mut prompts = Prompts::default();
        let mut first = Prepared { body, ..self.prepare_beside(job, &mut prompts)? };
        for other in others {
            let Some(request) = &request else { break };
            let mut prepared = self.prepare_beside(other.of(request), &mut prompts)?;
            if let (Some(own), Some(grammar)) = (&mut prepared.grammar, &first.grammar) {
                own.share(grammar);
            }
            first.others.push(Prepared { body, ..prepared });
        }
        Ok(first)
    }

    /// Prepares a request.
    pub fn prepare(&self, job: Job) -> Result<Prepared> {
        self.prepare_beside(job, &mut Prompts::default())
    }

    /// [`Preparer::prepare`] of a choice whose other choices have these `prompts`.
    fn prepare_beside(&self, job: Job, prompts: &mut Prompts) -> Result<Prepared> {
        let span = job.request.span.clone();
        let _entered = span.0.enter();
        let Request { profile, id, embedding, .. } = &job.request;
        let session = match embedding {
            Some(_) => unsteered(),
            None => {
                let vocabulary: Arc<dyn Vocabulary> = self.grammars.clone();
                self.policies.start(profile, id, &vocabulary)?
            }
        };
        self.prepare_choice(job, session, prompts)
    }

    /// [`Preparer::prepare`], with the policies given.
    pub fn prepare_with(&self, job: Job, policy: Session) -> Result<Prepared> {
        self.prepare_choice(job, policy, &mut Prompts::default())
    }

    fn prepare_choice(
        &self,
        mut job: Job,
        mut policy: Session,
        prompts: &mut Prompts,
    ) -> Result<Prepared> {
        // First, so that a form that cannot be enforced is refused at once.
        let mut grammar = self.grammars.compile(&job.request)?;
        let params = policy.params.clone();
        let request = &mut job.request;
        let limits =
            self.profiles.get(&request.profile).map_or_else(Default::default, |p| p.limits);
        let (bounds, lowered) = Bounds::new(request, limits, self.max_tokens);
        let mut notes: Vec<_> = lowered.into_iter().collect();
        notes.extend(apply_budget(request, limits));
        let edited = edit_system_text(request, &params, &mut policy)?;
        let can_reason = request.prompt.is_none() && self.text.supports_reasoning();
        // A budget of zero tokens disables reasoning.
        let wish =
            if request.reasoning_budget == Some(0) { Some(false) } else { request.reasoning };
        if wish == Some(true) && request.prompt.is_none() && !self.text.can_be_told_to_reason() {
            notes.push("the model does not reason: the request for it has no effect".into());
        }
        // A wish reaches templates whose reasoning is not read, too.
        let mut reasoning = can_reason.then_some(wish.unwrap_or(true)).or(wish);
        let is_as_sent = edited.is_empty();
        let (mut prompt, mut written) =
            prompts.get(is_as_sent, reasoning, || self.tokenize(&job, reasoning))?;
        let seed = job.request.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        let view = self.view(&job.request, bounds, &params, prompt.len(), seed);
        let mut plan = job.request.span.ask(&mut policy, &view)?;
        if let Some(Refusal { status, message, retry_after }) = plan.refuse.take() {
            // Cast: positions fit i32.
            let (reason, prompt_tokens) = ("refused".into(), prompt.len() as u32);
            let summary = Summary { reason, prompt_tokens, ..Summary::default() };
            job.request.span.ask(&mut policy, &summary)?;
            return Err(
                RequestError::Refused { status, message, retry_after_s: retry_after }.into()
            );
        }
        if let Some(route) = plan.route.take() {
            match self.check_route(&job.request, &route) {
                Ok(()) => {
                    let (reason, prompt_tokens) = ("routed".into(), prompt.len() as u32);
                    let summary = Summary { reason, prompt_tokens, ..Summary::default() };
                    job.request.span.ask(&mut policy, &summary)?;
                    return Err(RequestError::Routed { route }.into());
                }
                Err(why) => notes.push(format!("did not route to `{route}`: {why}")),
            }
        }
        if policy.shapes_text && job.request.logprobs.take().is_some() {
            notes.push("left out probabilities of tokens: a policy changes the text".into());
        }
        add_stops(&mut job.request, &mut plan);
        let (bounds, lowered) = Bounds::planned(&job.request, limits, self.max_tokens, &plan);
        notes.extend(lowered);
        let offers_fewer = plan.tools.take().map(|names| offer(&mut job.request, &names));
        let offers_fewer = match offers_fewer {
            Some(Ok(offers_fewer)) => offers_fewer,
            Some(Err(why)) => {
                notes.push(format!("left out no tools, as a policy planned: {why}"));
                false
            }
            None => false,
        };
        if offers_fewer {
            grammar = self.grammars.compile(&job.request)?;
        }
        if let Some(form) = plan.form.take() {
            match self.plan_form(&mut job.request, form) {
                Ok(planned) => grammar = planned,
                Err(why) => notes.push(format!("left out the form that a policy planned: {why}")),
            }
        }
        let planned = can_reason.then_some(plan.reasoning.or(wish).unwrap_or(true)).or(wish);
        if planned != reasoning || offers_fewer {
            reasoning = planned;
            let is_as_sent = is_as_sent && !offers_fewer;
            (prompt, written) =
                prompts.get(is_as_sent, reasoning, || self.tokenize(&job, reasoning))?;
        }
        notes.extend(written);
        if job.request.embedding.is_some_and(|embedding| embedding.truncates) {
            let limit = self.longest_prompt(limits);
            let tokens = prompt.len();
            if self.text.truncate(&mut prompt, limit)? {
                notes.push(format!("the text was cut: it has {tokens} tokens, {limit} fit"));
            }
        }
        self.check_length(&prompt, &job.request.profile, limits)?;
        job.check(STAGE)?;
        // A prompt that runs for the first choice is saved by that.
        let save_points = match prompts.is_of_first(&prompt) {
            true => Vec::new(),
            // Its last message is none that a template has rendered.
            false if job.request.continues.is_some() => Vec::new(),
            false => self.save_points(&job.request, reasoning, &prompt, &plan)?,
        };
        notes.extend(policy.take_notes());
        notes.extend(edited);
        notes.extend(plan.note.clone());
        let Job { request, events } = job;
        let mut reply = self.text.reply(&prompt, &request.stop, &request.tools);
        // A verdict is on a whole call, which the client must not have before it.
        if request.streams_calls && !policy.judges_calls {
            reply.stream_calls();
        }
        if grammar.is_none() {
            reply.read_untagged_calls();
        }
        if request.tool_choice.is_required {
            reply.require_call();
        }
        Ok(Prepared {
            grammar,
            reply,
            limits: bounds.limits(
                &plan,
                request.reasoning_budget,
                limits.reasoning_budget,
                [self.context, self.context - prompt.len()],
            ),
            sampling: self.sampling(&request, &plan),
            fingerprint: self.fingerprint(&policy.digest),
            request,
            events,
            reasoning,
            prompt,
            plan,
            policy,
            seed,
            notes,
            save_points,
            others: Vec::new(),
            body: 0,
        })
    }

    /// Checks that `request` may be routed.
    ///
    /// # Errors
    /// Why not.
    fn check_route(&self, request: &Request, route: &str) -> std::result::Result<(), &'static str> {
        let routes = self.profiles.get(&request.profile).map_or(&[][..], |p| &p.routes);
        if request.is_routed {
            return Err("the request has been routed already");
        }
        if !routes.iter().any(|granted| granted == route) {
            return Err("the profile does not have it in `routes`");
        }
        Ok(())
    }

    /// Gives the answer the form that the policy plans; returns the grammar of the reply.
    ///
    /// # Errors
    /// Why the form does not apply.
    fn plan_form(
        &self,
        request: &mut Request,
        form: AnswerForm,
    ) -> std::result::Result<Option<Grammar>, String> {
        let obstacles = [
            (request.response_format.is_some(), "the client demands one"),
            (request.tool_choice.is_required, "the client demands a tool call"),
            (request.ignores_end, "the client set ignore_eos"),
            (request.min_tokens > 0, "the client set min_tokens"),
            (request.has_begun_answer(), "the client continues an answer"),
        ];
        if let Some((_, why)) = obstacles.iter().find(|(is_there, _)| *is_there) {
            return Err((*why).into());
        }
        request.response_format = Some(ResponseFormat::planned(form)?);
        // The form alone can be enforced, or the policy would have failed: so this is about the tools.
        self.grammars.compile(request).map_err(|error| {
            request.response_format = None;
            error.to_string()
        })
    }

    fn tokenize(&self, job: &Job, reasoning: Option<bool>) -> Result<Tokenized> {
        job.check(STAGE)?;
        if let Some(prompt) = &job.request.prompt {
            return Ok((self.text.raw_prompt(prompt)?, Vec::new()));
        }
        let continued = continued(&job.request);
        let mut variables = Variables::of(&job.request, reasoning);
        if let Some((message, _)) = continued {
            variables.messages = &job.request.messages[..job.request.messages.len() - 1];
            let reasons = message.reasoning_content.is_some();
            variables.reasoning =
                if self.text.supports_reasoning() { Some(reasons) } else { reasoning };
        }
        let mut prompt = self.text.render_prompt(&variables)?;
        // The template may repeat what the client sent once.
        let (bytes, limit) = (prompt.bytes(), self.prompt_bytes);
        if bytes > limit {
            return Err(RequestError::PromptBytes { bytes, limit }.into());
        }
        job.check(STAGE)?;
        let mut tokens = self.text.encode_rendered(&prompt)?;
        if let Some((message, part)) = continued {
            let begun = continued_tokens(&self.text, &tokens, message, part)?;
            tokens.extend(begun);
        }
        Ok((tokens, prompt.take_notes()))
    }

    /// Most tokens of a prompt.
    fn longest_prompt(&self, limits: ProfileLimits) -> usize {
        let of_profile = (limits.prompt_tokens > 0).then_some(limits.prompt_tokens);
        of_profile.map_or(self.context - 1, |limit| limit.min(self.context - 1))
    }

    fn check_length(&self, prompt: &[u32], profile: &str, limits: ProfileLimits) -> Result<()> {
        let tokens = prompt.len();
        if tokens == 0 {
            return Err(RequestError::EmptyPrompt.into());
        }
        let limit = limits.prompt_tokens;
        if limit > 0 && tokens > limit {
            let profile = profile.into();
            return Err(RequestError::PromptTooLong { tokens, limit, profile }.into());
        }
        let limit = self.context - 1;
        if tokens > limit {
            return Err(RequestError::ContextTooLong { tokens, limit }.into());
        }
        Ok(())
    }

    /// `system_fingerprint` of a request whose policies have this digest.
    fn fingerprint(&self, policies: &[u8; 32]) -> String {
        let mut sha = self.model_digest.clone();
        sha.update(policies);
        hex::encode(&sha.finalize()[..6])
    }

    /// The policy's view of the request.
    fn view(
        &self,
        request: &Request,
        bounds: Bounds,
        params: &Params,
        prompt_tokens: usize,
        seed: u64,
    ) -> RequestView {
        // Casts: positions fit i32 (see `Decoder::load`).
        RequestView {
            model: self.name.clone(),
            family: self.family.into(),
            params: params.clone(),
            prompt_tokens: prompt_tokens as u32,
            context_left: self.context.saturating_sub(prompt_tokens) as u32,
            can_reason: request.prompt.is_none() && self.text.supports_reasoning(),
            max_tokens: Some(bounds.reply()),
            max_answer_tokens: bounds.answer,
            seed,
            ..view::of_request(request)
        }
    }

    /// Sampling parameters, in order of precedence: plan, client, profile, the model's defaults.
    fn sampling(&self, request: &Request, plan: &Plan) -> Sampling {
        let profile = self.profiles.get(&request.profile).and_then(|p| p.sampling);
        let default = profile.unwrap_or_else(|| self.text.sampling());
        default.with(&plan.sampling.or(request.sampling))
    }
}

/// Logs why a request was not started.
pub fn log_refused(id: &str, error: &Error) {
    if let Error::Panic { .. } = error {
        tracing::error!(id, %error, "request panicked");
    } else {
        tracing::debug!(id, %error, "request refused");
    }
}

/// Applies the reasoning budget of the profile to the client's; returns a note if that is reduced. Without one of
/// the client's, [`Bounds::limits`] applies the profile's.
fn apply_budget(request: &mut Request, limits: ProfileLimits) -> Option<String> {
    let limit = limits.reasoning_budget;
    let budget =
        request.reasoning_budget.as_mut().filter(|budget| limit > 0 && **budget > limit)?;
    let note = format!("reasoning budget {budget} exceeds the profile's limit of {limit}");
    *budget = limit;
    Some(note)
}
