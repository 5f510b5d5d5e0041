//! From a request to a sequence: the policy's plan, the prompt, and what the store remembers.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use sha2::Digest;

use super::anchors::kept;
use super::loops::Detector;
use super::sequence::{Limits, Progress, Sequence};
use super::{Decoder, hex};
use crate::engine::Job;
use crate::error::{Error, Result};
use crate::policy::{Anchor, Plan, RequestView, SamplingChange, Steering, USER_BYTES};
use crate::request::{Event, Request, Sampling, SamplingWish};

impl Decoder {
    /// Prepares a request; nothing has run when this returns.
    ///
    /// # Errors
    /// What is wrong with the request, its policy or its length.
    pub(super) fn admit(&mut self, job: &Job) -> Result<Sequence> {
        let request = &job.request;
        let vocabulary = &self.vocabulary_of_policies;
        let Steering { mut policy, params, digest } =
            self.policies.start(&request.profile, &request.id, vocabulary)?;
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
        if prompt.len() >= self.context {
            return Err(Error::ContextTooLong { tokens: prompt.len(), limit: self.context - 1 });
        }
        let reply = self.text.reply(&prompt, &request.stop, &request.tools);
        let mut anchors = self.anchors(request, thinking, &prompt, &plan)?;
        let (cache, cached) = self.prefixes.restore(&prompt)?;
        anchors.retain(|&(at, _)| at >= self.store_min_tokens);
        for &(at, keep) in anchors.iter().take_while(|&&(at, _)| at <= cached) {
            if let Err(error) = self.prefixes.keep(&prompt[..at], keep) {
                tracing::warn!(request_id = request.id, %error, "state not kept");
            }
        }
        anchors.retain(|&(at, _)| at > cached);
        let mut notes = policy.take_notes();
        notes.extend(plan.note.clone());
        let sequence = Sequence {
            request: request.clone(),
            thinking,
            events: job.events.clone(),
            prompt: prompt.len(),
            cached,
            cache,
            anchors: anchors.into(),
            reply_kept: kept(&plan, Anchor::Reply),
            drawn: None,
            drafts: if self.costs.is_some() { self.drafts(&prompt)? } else { Vec::new() },
            governor: self.governor(),
            drafted: None,
            queued: 0,
            skipped_layers: self.skip.len() as u32,
            sampling: self.sampling(request),
            seed,
            reply,
            policy,
            detector: plan.loops.map(Detector::new),
            limits: self.limits(request, &plan, prompt.len()),
            progress: Progress::new(notes),
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

    /// Bounds: the tightest of client, policy and context.
    fn limits(&self, request: &Request, plan: &Plan, prompt: usize) -> Limits {
        let left = u32::try_from(self.context - prompt).unwrap_or(u32::MAX);
        let think = left.saturating_sub(plan.answer_reserve.unwrap_or(0));
        let bounds = [plan.think_budget, request.think_budget];
        Limits {
            think: bounds.into_iter().flatten().fold(think, u32::min),
            answer: request.max_tokens.unwrap_or(self.max_tokens),
            context: self.context,
            every: plan.every,
        }
    }

    /// The client's wish, else the profile's, else the model's own default.
    fn sampling(&self, request: &Request) -> Sampling {
        let SamplingWish { temperature, top_p, top_k, min_p, .. } = request.sampling;
        let profile = self.profiles.get(&request.profile).and_then(|p| p.sampling);
        let default = profile.unwrap_or_else(|| self.text.sampling());
        Sampling {
            temperature: temperature.unwrap_or(default.temperature),
            top_p: top_p.unwrap_or(default.top_p),
            top_k: top_k.unwrap_or(default.top_k),
            min_p: min_p.unwrap_or(default.min_p),
        }
    }
}
