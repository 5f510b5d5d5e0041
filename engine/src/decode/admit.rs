//! Admission: turns a request into a sequence, with the policy's plan, the prompt, and saved state.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use sha2::Digest;

use super::loops::Detector;
use super::rewind::{PhaseStart, ReplyState};
use super::sampler::Sampler;
use super::save_points::{is_system, retention};
use super::sequence::{Limits, Progress, Sequence};
use super::{Decoder, hex};
use crate::config::ProfileLimits;
use crate::engine::Job;
use crate::error::{Error, RequestError, Result};
use crate::policy::{
    Cause, Failure, MIN_CHECKPOINT_EVERY, Params, Plan, PromptView, Replacement, RequestView,
    SYSTEM_BYTES, SavePoint, Session, USER_BYTES, apply_replacements,
};
use crate::request::{Event, Message, Request, Sampling};

impl Decoder {
    /// Prepares the sequence of a request. Runs policies, but not the model.
    pub(super) fn admit(&mut self, job: Job) -> Result<Sequence> {
        let Request { profile, id, .. } = &job.request;
        let session = self.policies.start(profile, id, &self.policy_vocabulary)?;
        self.admit_with(job, session)
    }

    /// [`Decoder::admit`], with the policies given.
    pub(super) fn admit_with(&mut self, job: Job, mut policy: Session) -> Result<Sequence> {
        let params = policy.params.clone();
        let Job { mut request, events } = job;
        let limits =
            self.profiles.get(&request.profile).map_or_else(Default::default, |p| p.limits);
        let mut notes = apply_limits(&mut request, limits, self.max_tokens);
        let replaced = replace_system_text(&mut request, &params, &mut policy)?;
        let can_reason = self.text.supports_reasoning();
        // A budget of zero tokens disables reasoning.
        let wish =
            if request.reasoning_budget == Some(0) { Some(false) } else { request.reasoning };
        let mut reasoning = can_reason.then_some(wish.unwrap_or(true));
        let mut prompt = self.tokenize(&request, reasoning)?;
        let seed = request.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        let plan = policy.ask(&self.view(&request, &params, prompt.len(), seed))?;
        let planned = can_reason.then_some(plan.reasoning.or(wish).unwrap_or(true));
        if planned != reasoning {
            reasoning = planned;
            prompt = self.tokenize(&request, reasoning)?;
        }
        if prompt.is_empty() {
            return Err(Error::Request(RequestError::Template(
                "the rendered prompt is empty".into(),
            )));
        }
        if limits.prompt_tokens > 0 && prompt.len() > limits.prompt_tokens {
            let (tokens, limit) = (prompt.len(), limits.prompt_tokens);
            return Err(Error::Request(RequestError::PromptTooLong {
                tokens,
                limit,
                profile: request.profile.clone(),
            }));
        }
        if prompt.len() >= self.context {
            return Err(Error::Request(RequestError::ContextTooLong {
                tokens: prompt.len(),
                limit: self.context - 1,
            }));
        }
        let reply = self.text.reply(&prompt, &request.stop, &request.tools);
        let mut save_points = self.save_points(&request, reasoning, &prompt, &plan)?;
        let (cache, cached) = self.prefixes.restore(&prompt)?;
        save_points.retain(|&(at, _)| at >= self.store_min_tokens);
        for &(at, retention) in save_points.iter().take_while(|&&(at, _)| at <= cached) {
            if let Err(error) = self.prefixes.retain(&prompt[..at], retention) {
                tracing::warn!(request_id = request.id, %error, "retaining saved state failed");
            }
        }
        save_points.retain(|&(at, _)| at > cached);
        notes.extend(policy.take_notes());
        notes.extend(replaced);
        notes.extend(plan.note.clone());
        let drafters = if self.costs.is_some() { self.new_drafters(&prompt)? } else { Vec::new() };
        // Fails if the client has disconnected; the first step checks that.
        let _ = events.send(Event::Started { fingerprint: self.fingerprint(&policy.digest) });
        let (prompt_tokens, reply_state) = (prompt.len(), ReplyState::new(reply));
        Ok(Sequence {
            reasoning,
            events,
            prompt: prompt_tokens,
            cached,
            cache,
            checkpoints: Vec::new(),
            stale_from: None,
            next_logits: None,
            save_points: save_points.into(),
            reply_retention: retention(&plan, SavePoint::Reply),
            sampled: None,
            drafters,
            governor: self.new_governor(),
            draft: None,
            queued_steps: 0,
            skipped_layers: self.skip.len() as u32,
            sampler: Sampler::new(self.sampling(&request, &plan)),
            seed,
            phase_start: PhaseStart { position: prompt_tokens, reply_state: reply_state.clone() },
            reply_state,
            rewind_limit: prompt_tokens,
            policy,
            detector: plan.loops.map(Detector::new),
            limits: self.limits(&request, &plan, limits, prompt_tokens),
            progress: Progress::new(notes, prompt_tokens),
            tokens: prompt,
            request,
        })
    }

    /// `system_fingerprint` of a request whose policies have this digest.
    fn fingerprint(&self, policies: &[u8; 32]) -> String {
        let mut sha = self.model_digest.clone();
        sha.update(policies);
        hex(&sha.finalize()[..6])
    }

    fn tokenize(&self, request: &Request, reasoning: Option<bool>) -> Result<Vec<u32>> {
        let variables = &request.template_variables;
        self.text.prompt(&request.messages, &request.tools, variables, reasoning, true)
    }

    /// The policy's view of the request.
    fn view(
        &self,
        request: &Request,
        params: &Params,
        prompt_tokens: usize,
        seed: u64,
    ) -> RequestView {
        let of_role = |role: &'static str| request.messages.iter().filter(move |m| m.role == role);
        let system = of_role("system").chain(of_role("developer"));
        let user = of_role("user").next_back().map_or("", |m| m.content.as_str());
        let name = |tool: &serde_json::Value| {
            let name = tool.get("function").unwrap_or(tool).get("name");
            name.and_then(|name| name.as_str()).unwrap_or_default().to_string()
        };
        // Casts: positions fit i32 (see `Decoder::load`), and so do counts within a request body.
        RequestView {
            id: request.id.clone(),
            profile: request.profile.clone(),
            model: self.name.clone(),
            family: self.family.into(),
            params: params.clone(),
            prompt_tokens: prompt_tokens as u32,
            context_left: self.context.saturating_sub(prompt_tokens) as u32,
            messages: request.messages.len() as u32,
            system_chars: system.map(|m| m.content.chars().count() as u32).sum(),
            user: user[..user.floor_char_boundary(USER_BYTES)].to_string(),
            tools: request.tools.iter().map(name).collect(),
            can_reason: self.text.supports_reasoning(),
            reasoning: request.reasoning,
            reasoning_budget: request.reasoning_budget,
            max_tokens: request.max_tokens,
            sampling: request.sampling,
            seed,
        }
    }

    /// The tightest limits of client, policy, profile and context.
    fn limits(
        &self,
        request: &Request,
        plan: &Plan,
        profile: ProfileLimits,
        prompt: usize,
    ) -> Limits {
        let left = u32::try_from(self.context - prompt).unwrap_or(u32::MAX);
        let reasoning = left.saturating_sub(plan.answer_reserve.unwrap_or(0));
        let of_profile = (profile.reasoning_budget > 0).then_some(profile.reasoning_budget);
        let budgets = [plan.reasoning_budget, request.reasoning_budget, of_profile];
        Limits {
            reasoning: budgets.into_iter().flatten().fold(reasoning, u32::min),
            answer: request.max_tokens.unwrap_or(self.max_tokens),
            context: self.context,
            every: plan.every,
            checkpoint_every: match plan.checkpoint_every {
                0 => 0,
                every => every.max(MIN_CHECKPOINT_EVERY) as usize,
            },
        }
    }

    /// Sampling parameters, in order of precedence: plan, client, profile, the model's defaults.
    fn sampling(&self, request: &Request, plan: &Plan) -> Sampling {
        let profile = self.profiles.get(&request.profile).and_then(|p| p.sampling);
        let default = profile.unwrap_or_else(|| self.text.sampling());
        default.with(&plan.sampling.or(request.sampling))
    }
}

/// Lets the policy replace parts of the system text of `request`; returns a note for each.
fn replace_system_text(
    request: &mut Request,
    params: &Params,
    policy: &mut Session,
) -> Result<Vec<String>> {
    let mut messages: Vec<&mut Message> =
        request.messages.iter_mut().filter(|message| is_system(message)).collect();
    let system = messages.iter().map(|message| split_seen(&message.content).0.to_string());
    let view = PromptView {
        profile: request.profile.clone(),
        params: params.clone(),
        system: system.collect(),
    };
    if view.system.iter().all(String::is_empty) {
        return Ok(Vec::new());
    }
    let replacements = policy.ask(&view)?;
    let mut system = view.system;
    apply_replacements(&mut system, &replacements).map_err(|problem| Failure {
        policy: request.profile.clone(),
        hook: "on-prompt",
        cause: Cause::Answer(problem),
    })?;
    for (message, seen) in messages.iter_mut().zip(system) {
        let (_, rest) = split_seen(&message.content);
        message.content = seen + rest;
    }
    let note = |Replacement { message, old, new }: &Replacement| {
        let (old, new) = (old.len(), new.len());
        format!("replaced {old} bytes of system message {message} with {new} bytes")
    };
    Ok(replacements.iter().map(note).collect())
}

/// The part of a system text that policies see, and the rest.
fn split_seen(text: &str) -> (&str, &str) {
    text.split_at(text.floor_char_boundary(SYSTEM_BYTES))
}

/// Applies the limits of the profile to `request`; returns a note for each value reduced. `max_tokens`
/// is the engine's limit on an answer, for requests without their own.
fn apply_limits(request: &mut Request, limits: ProfileLimits, max_tokens: u32) -> Vec<String> {
    let mut notes = Vec::new();
    let mut apply = |name: &str, value: &mut Option<u32>, limit: u32| {
        if let Some(value) = value.as_mut().filter(|value| limit > 0 && **value > limit) {
            notes.push(format!("{name} {value} exceeds the profile's limit of {limit}"));
            *value = limit;
        }
    };
    apply("max_tokens", &mut request.max_tokens, limits.max_tokens);
    // Without a value from the client, `Decoder::limits` applies the profile's.
    apply("reasoning budget", &mut request.reasoning_budget, limits.reasoning_budget);
    if limits.max_tokens > 0 {
        request.max_tokens.get_or_insert(limits.max_tokens.min(max_tokens));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_limits_apply_and_reductions_are_noted() {
        let limits = ProfileLimits { max_tokens: 100, reasoning_budget: 50, ..Default::default() };
        let ask = |max_tokens, reasoning_budget, limits| {
            let mut request = Request { max_tokens, reasoning_budget, ..Request::default() };
            let notes = apply_limits(&mut request, limits, 4096);
            ((request.max_tokens, request.reasoning_budget), notes)
        };
        assert_eq!(ask(None, None, limits), ((Some(100), None), vec![]));
        assert_eq!(ask(Some(9), Some(0), limits), ((Some(9), Some(0)), vec![]));
        let (applied, notes) = ask(Some(101), Some(51), limits);
        assert_eq!((applied, notes.len()), ((Some(100), Some(50)), 2));
        assert_eq!(notes[0], "max_tokens 101 exceeds the profile's limit of 100");
        let none = ProfileLimits::default();
        assert_eq!(ask(Some(9999), None, none), ((Some(9999), None), vec![]));
        let wide = ProfileLimits { max_tokens: 9999, ..none };
        assert_eq!(ask(None, None, wide).0, (Some(4096), None));
        assert_eq!(ask(Some(5000), None, wide).0, (Some(5000), None));
    }
}
