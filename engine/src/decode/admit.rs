//! From a request to a sequence: the policy's plan, the prompt, and what the store remembers.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use sha2::Digest;

use super::adjust::Adjust;
use super::anchors::{is_system, kept};
use super::loops::Detector;
use super::rewind::{Floor, Said};
use super::sequence::{Limits, Progress, Sequence};
use super::{Decoder, hex};
use crate::config::ProfileLimits;
use crate::engine::Job;
use crate::error::{Error, Result};
use crate::policy::{
    Anchor, CHECKPOINT_EVERY, Plan, Policy, PromptView, Replacement, RequestView, SamplingChange,
    Steering, USER_BYTES, prompt,
};
use crate::request::{Event, Message, Request, Sampling, SamplingWish};

impl Decoder {
    /// Prepares a request; nothing has run when this returns.
    ///
    /// # Errors
    /// What is wrong with the request, its policy or its length.
    pub(super) fn admit(&mut self, job: &Job) -> Result<Sequence> {
        let Request { profile, id, .. } = &job.request;
        let steering = self.policies.start(profile, id, &self.vocabulary_of_policies)?;
        self.admit_with(job, steering)
    }

    /// [`Decoder::admit`], steered by these policies.
    ///
    /// # Errors
    /// As there.
    pub(super) fn admit_with(&mut self, job: &Job, steering: Steering) -> Result<Sequence> {
        let Steering { mut policy, params, digest } = steering;
        let limits =
            self.profiles.get(&job.request.profile).map_or_else(Default::default, |p| p.limits);
        let (mut request, cut) = bounded(&job.request, limits, self.max_tokens);
        let replaced = ask_about_prompt(&mut request, &params, policy.as_mut())?;
        let request = &request;
        let can_think = self.text.thinks();
        // A bound of zero tokens is a wish not to think.
        let wish = if request.think_budget == Some(0) { Some(false) } else { request.thinking };
        let mut thinking = can_think.then_some(wish.unwrap_or(true));
        let mut prompt = self.tokenize(request, thinking)?;
        let seed = request.sampling.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        let plan = policy.on_request(&self.view(request, &params, prompt.len(), seed))?;
        let planned = can_think.then_some(plan.thinking.or(wish).unwrap_or(true));
        if planned != thinking {
            thinking = planned;
            prompt = self.tokenize(request, thinking)?;
        }
        if prompt.is_empty() {
            return Err(Error::Template("they render to nothing".into()));
        }
        if limits.prompt_tokens > 0 && prompt.len() > limits.prompt_tokens {
            let (tokens, limit) = (prompt.len(), limits.prompt_tokens);
            return Err(Error::PromptTooLong { tokens, limit, profile: request.profile.clone() });
        }
        if prompt.len() >= self.context {
            return Err(Error::ContextTooLong { tokens: prompt.len(), limit: self.context - 1 });
        }
        let reply = self.text.reply(&prompt, &request.stop, &request.tools);
        let mut anchors = self.anchors(request, thinking, &prompt, &plan)?;
        let (cache, cached) = self.prefixes.restore(&prompt)?;
        anchors.retain(|&(at, _)| at >= self.store_min_tokens);
        for &(at, keep) in anchors.iter().take_while(|&&(at, _)| at <= cached) {
            if let Err(error) = self.prefixes.retain(&prompt[..at], keep) {
                tracing::warn!(request_id = request.id, %error, "state not kept");
            }
        }
        anchors.retain(|&(at, _)| at > cached);
        let mut notes = cut;
        notes.extend(policy.take_notes());
        notes.extend(replaced);
        notes.extend(plan.note.clone());
        let (prompt_tokens, said) = (prompt.len(), Said::new(reply));
        let sequence = Sequence {
            request: request.clone(),
            thinking,
            events: job.events.clone(),
            prompt: prompt_tokens,
            cached,
            cache,
            standings: Vec::new(),
            stale: None,
            row: None,
            anchors: anchors.into(),
            reply_kept: kept(&plan, Anchor::Reply),
            drawn: None,
            drafts: if self.costs.is_some() { self.drafts(&prompt)? } else { Vec::new() },
            governor: self.governor(),
            drafted: None,
            queued: 0,
            skipped_layers: self.skip.len() as u32,
            adjust: Adjust::new(self.sampling(request, &plan)),
            seed,
            floor: Floor { at: prompt_tokens, said: said.clone() },
            said,
            kept: prompt_tokens,
            policy,
            detector: plan.loops.map(Detector::new),
            limits: self.limits(request, &plan, limits, prompt_tokens),
            progress: Progress::new(notes, prompt_tokens),
            tokens: prompt,
        };
        // A closed channel is a client that hung up; the first turn sees to that.
        let _ = job.events.send(Event::Started { fingerprint: self.fingerprint(&digest) });
        Ok(sequence)
    }

    /// `system_fingerprint` of a request whose policies have this digest.
    fn fingerprint(&self, policies: &[u8; 32]) -> String {
        let mut sha = self.model_digest.clone();
        sha.update(policies);
        hex(&sha.finalize()[..6])
    }

    fn tokenize(&self, request: &Request, thinking: Option<bool>) -> Result<Vec<u32>> {
        let variables = &request.template_variables;
        let text = &self.text;
        text.encode(&text.render(&request.messages, &request.tools, variables, thinking, true)?)
    }

    /// What the policy may see.
    fn view(
        &self,
        request: &Request,
        params: &BTreeMap<String, String>,
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
        let SamplingWish { temperature, top_p, top_k, min_p, .. } = request.sampling;
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
            can_think: self.text.thinks(),
            thinking: request.thinking,
            think_budget: request.think_budget,
            max_tokens: request.max_tokens,
            sampling: SamplingChange { temperature, top_p, top_k, min_p },
            seed,
        }
    }

    /// Bounds: the tightest of client, policy, profile and context.
    fn limits(
        &self,
        request: &Request,
        plan: &Plan,
        profile: ProfileLimits,
        prompt: usize,
    ) -> Limits {
        let left = u32::try_from(self.context - prompt).unwrap_or(u32::MAX);
        let think = left.saturating_sub(plan.answer_reserve.unwrap_or(0));
        let of_profile = (profile.think_budget > 0).then_some(profile.think_budget);
        let bounds = [plan.think_budget, request.think_budget, of_profile];
        Limits {
            think: bounds.into_iter().flatten().fold(think, u32::min),
            answer: request.max_tokens.unwrap_or(self.max_tokens),
            context: self.context,
            every: plan.every,
            checkpoint_every: match plan.checkpoint_every {
                0 => 0,
                every => every.max(CHECKPOINT_EVERY) as usize,
            },
        }
    }

    /// The policy's plan, else the client's wish, else the profile's, else the model's own default.
    fn sampling(&self, request: &Request, plan: &Plan) -> Sampling {
        let SamplingWish { temperature, top_p, top_k, min_p, .. } = request.sampling;
        let profile = self.profiles.get(&request.profile).and_then(|p| p.sampling);
        let default = profile.unwrap_or_else(|| self.text.sampling());
        let planned = plan.sampling;
        Sampling {
            temperature: planned.temperature.or(temperature).unwrap_or(default.temperature),
            top_p: planned.top_p.or(top_p).unwrap_or(default.top_p),
            top_k: planned.top_k.or(top_k).unwrap_or(default.top_k),
            min_p: planned.min_p.or(min_p).unwrap_or(default.min_p),
        }
    }
}

/// Lets the policy replace spans of `request`'s system text; returns a note for each.
///
/// # Errors
/// [`Error::Policy`] when the policy failed and fails closed.
fn ask_about_prompt(
    request: &mut Request,
    params: &BTreeMap<String, String>,
    policy: &mut dyn Policy,
) -> Result<Vec<String>> {
    let mut messages: Vec<&mut Message> =
        request.messages.iter_mut().filter(|message| is_system(message)).collect();
    let system = messages.iter().map(|message| prompt::seen(&message.content).0.to_string());
    let view = PromptView {
        profile: request.profile.clone(),
        params: params.clone(),
        system: system.collect(),
    };
    if !prompt::has_text(&view) {
        return Ok(Vec::new());
    }
    let replacements = policy.on_prompt(&view)?;
    let mut system = view.system;
    prompt::replace(&mut system, &replacements).map_err(|problem| Error::Policy {
        policy: request.profile.clone(),
        problem: format!("on-prompt: {problem}"),
    })?;
    for (message, seen) in messages.iter_mut().zip(system) {
        let (_, rest) = prompt::seen(&message.content);
        message.content = seen + rest;
    }
    let note = |Replacement { message, old, new }: &Replacement| {
        let (old, new) = (old.len(), new.len());
        format!("replaced {old} bytes of system message {message} by {new}")
    };
    Ok(replacements.iter().map(note).collect())
}

/// The request within the bounds of its profile, and what was cut, in words. `max_tokens` is the bound
/// of an answer where the client names none.
fn bounded(request: &Request, limits: ProfileLimits, max_tokens: u32) -> (Request, Vec<String>) {
    let mut request = request.clone();
    let mut cut = Vec::new();
    let mut bound = |what: &str, asked: &mut Option<u32>, limit: u32| {
        if let Some(asked) = asked.as_mut().filter(|asked| limit > 0 && **asked > limit) {
            cut.push(format!("{what} {asked} is over the profile's limit of {limit}"));
            *asked = limit;
        }
    };
    bound("max_tokens", &mut request.max_tokens, limits.max_tokens);
    // Where the client names none, the limit counts beside the policy's: see `Decoder::limits`.
    bound("the thought's budget of", &mut request.think_budget, limits.think_budget);
    if limits.max_tokens > 0 {
        request.max_tokens.get_or_insert(limits.max_tokens.min(max_tokens));
    }
    (request, cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_bounds_thought_and_answer_and_says_where_it_cut_what_was_asked() {
        let limits = ProfileLimits { max_tokens: 100, think_budget: 50, ..Default::default() };
        let ask = |max_tokens, think_budget, limits| {
            let request = Request { max_tokens, think_budget, ..Request::default() };
            let (request, cut) = bounded(&request, limits, 4096);
            ((request.max_tokens, request.think_budget), cut)
        };
        assert_eq!(ask(None, None, limits), ((Some(100), None), vec![]));
        assert_eq!(ask(Some(9), Some(0), limits), ((Some(9), Some(0)), vec![]));
        let (bounds, cut) = ask(Some(101), Some(51), limits);
        assert_eq!((bounds, cut.len()), ((Some(100), Some(50)), 2));
        assert_eq!(cut[0], "max_tokens 101 is over the profile's limit of 100");
        let none = ProfileLimits::default();
        assert_eq!(ask(Some(9999), None, none), ((Some(9999), None), vec![]));
        let wide = ProfileLimits { max_tokens: 9999, ..none };
        assert_eq!(ask(None, None, wide).0, (Some(4096), None));
        assert_eq!(ask(Some(5000), None, wide).0, (Some(5000), None));
    }
}
