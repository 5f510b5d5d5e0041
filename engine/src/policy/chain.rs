//! The policies of one request, asked one after the other.
//!
//! Each is called exactly as it would be alone: at its own cadence, with all tokens since its own last
//! call. What they answer becomes one answer in [`merge`], where a later policy cannot loosen what an
//! earlier one decided. A shadow is asked the same as the others; what it decides, and that it
//! failed, is recorded and nothing else.
//!
//! A chain of one passes on what it gets and what it is answered, unchanged and uncopied: a step of
//! it costs what the policy costs.

mod merge;
mod unseen;

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::prompt;
use super::trace::{Exchange, Outcome, Recorder};
use super::{
    Action, Cost, Plan, Policy, PromptView, Replacement, RequestView, SYSTEM_BYTES, Step, Summary,
    ToolCallView, Verdict,
};
use crate::error::{Error, Result};
use merge::Holds;
use unseen::Unseen;

/// One policy of a chain.
pub struct Link {
    /// Its name.
    pub name: String,
    /// SHA-256 of its component.
    pub sha256: [u8; 32],
    /// Whether its decisions are recorded and not applied.
    pub shadow: bool,
    /// The policy, guarded.
    pub policy: Box<dyn Policy>,
}

/// All policies of one request.
pub struct Chain {
    links: Vec<Asked>,
    holds: Holds,
    recorder: Recorder,
    notes: Vec<String>,
    cost: Cost,
}

/// A link at work.
struct Asked {
    link: Link,
    /// Of its plan.
    every: u32,
    unseen: Unseen,
    /// It has failed, and what it answers since is what the native policy says.
    replaced: bool,
    /// A shadow that has failed is not asked again.
    over: bool,
}

impl Chain {
    /// A chain of `links`, first to last, whose decisions go to `recorder`.
    pub fn new(links: Vec<Link>, mut recorder: Recorder) -> Self {
        recorder.links(&links);
        let unseen = Unseen::default;
        let asked = |link| Asked { link, every: 0, unseen: unseen(), replaced: false, over: false };
        let links = links.into_iter().map(asked).collect();
        let (holds, cost) = (Holds::default(), Cost::default());
        Self { links, holds, recorder, notes: Vec::new(), cost }
    }

    /// Asks link `at`, and records what it was asked and answered; `None` where a shadow has failed.
    fn ask<'q, T>(
        &mut self,
        at: usize,
        hook: impl FnOnce(&mut dyn Policy) -> Result<T>,
        exchange: impl FnOnce(Option<&T>) -> Exchange<'q, '_>,
    ) -> Result<Option<T>> {
        let asked = &mut self.links[at];
        if asked.over {
            return Ok(None);
        }
        let policy = asked.link.policy.as_mut();
        let answer = hook(policy);
        let cost = policy.cost();
        self.cost.fuel += cost.fuel;
        self.cost.nanoseconds += cost.nanoseconds;
        let notes = policy.take_notes();
        // What a guarded policy has to say about itself is that it failed.
        let error = match &answer {
            Err(error) => Some(error.to_string()),
            Ok(_) => (!notes.is_empty()).then(|| notes.join("; ")),
        };
        asked.replaced |= error.is_some();
        let imports = policy.take_imports();
        let outcome = Outcome { error, replaced: asked.replaced, cost, imports };
        self.recorder.record(at, exchange(answer.as_ref().ok()), outcome);
        match answer {
            Err(_) if asked.link.shadow => {
                asked.over = true;
                Ok(None)
            }
            answer => {
                if !asked.link.shadow {
                    self.notes.extend(notes);
                }
                answer.map(Some)
            }
        }
    }

    /// The parameters that link `at` is shown: its own go before those of all. `None` where no policy
    /// has its own.
    fn own(
        &self,
        at: usize,
        params: &BTreeMap<String, String>,
    ) -> Option<BTreeMap<String, String>> {
        if !params.keys().any(|key| key.contains('.')) {
            return None;
        }
        let own = |key: &str| {
            key.strip_prefix(self.links[at].link.name.as_str())?
                .strip_prefix('.')
                .map(str::to_owned)
        };
        let of_all = params.iter().filter(|(key, _)| !key.contains('.'));
        let mut shown: BTreeMap<_, _> = of_all.map(|(k, v)| (k.clone(), v.clone())).collect();
        shown.extend(params.iter().filter_map(|(key, value)| Some((own(key)?, value.clone()))));
        Some(shown)
    }

    /// Begins a hook.
    fn indices(&mut self) -> std::ops::Range<usize> {
        self.cost = Cost::default();
        0..self.links.len()
    }

    fn is_shadow(&self, at: usize) -> bool {
        self.links[at].link.shadow
    }
}

impl Policy for Chain {
    fn on_prompt(&mut self, asked: &PromptView) -> Result<Vec<Replacement>> {
        let mut view = Cow::Borrowed(asked);
        let mut all = Vec::new();
        for at in self.indices() {
            let own = self.own(at, &view.params);
            let own = own.map(|params| PromptView { params, ..(*view).clone() });
            let seen = own.as_ref().unwrap_or(&view);
            let answer = self.ask(
                at,
                |policy| policy.on_prompt(seen),
                |answer| Exchange::Prompt(seen, answer.map(Vec::as_slice)),
            )?;
            let Some(replacements) = answer else { continue };
            if replacements.is_empty() || self.is_shadow(at) {
                continue;
            }
            let system = &mut view.to_mut().system;
            prompt::replace(system, &replacements).map_err(|problem| Error::Policy {
                policy: self.links[at].link.name.clone(),
                problem: format!("on-prompt: {problem}"),
            })?;
            for text in system {
                text.truncate(text.floor_char_boundary(SYSTEM_BYTES));
            }
            all.extend(replacements);
        }
        Ok(all)
    }

    fn on_request(&mut self, request: &RequestView) -> Result<Plan> {
        let mut merged: Option<Plan> = None;
        let mut every = 0;
        for at in self.indices() {
            let own = self.own(at, &request.params);
            let own = own.map(|params| RequestView { params, ..request.clone() });
            let seen = own.as_ref().unwrap_or(request);
            let answer = self.ask(
                at,
                |policy| policy.on_request(seen),
                |answer| Exchange::Request(seen, answer),
            )?;
            let Some(plan) = answer else { continue };
            self.links[at].every = plan.every;
            every = merge::gcd(every, plan.every);
            if self.is_shadow(at) {
                continue;
            }
            self.holds.planned(at, &plan.sampling);
            merged = Some(match merged {
                None => plan,
                Some(earlier) => merge::plans(earlier, plan),
            });
        }
        Ok(Plan { every, ..merged.unwrap_or_default() })
    }

    fn on_step(&mut self, step: &Step) -> Result<Vec<Action>> {
        let alone = self.links.len() == 1;
        let event = step.loop_found.is_some() || step.budget_reached;
        let mut answers: Vec<(usize, Vec<Action>)> = Vec::new();
        if !alone {
            self.holds.drawn(step.tokens.len());
        }
        for at in self.indices() {
            let Asked { every, unseen, .. } = &mut self.links[at];
            let seen = if alone {
                Cow::Borrowed(step)
            } else {
                match unseen.due(step, *every, event) {
                    Some(seen) => seen,
                    None => continue,
                }
            };
            let seen = &*seen;
            let answer = self.ask(
                at,
                |policy| policy.on_step(seen),
                |answer| Exchange::Step(seen, answer.map(Vec::as_slice)),
            )?;
            if let Some(actions) = answer
                && !actions.is_empty()
                && !self.is_shadow(at)
            {
                answers.push((at, actions));
            }
        }
        if alone {
            return Ok(answers.pop().map_or_else(Vec::new, |(_, actions)| actions));
        }
        let merged = merge::actions(answers, &mut self.holds);
        let lost = merge::rewound(&merged);
        self.links.iter_mut().for_each(|asked| asked.unseen.answered(lost));
        Ok(merged)
    }

    fn on_tool_call(&mut self, call: &ToolCallView) -> Result<Verdict> {
        let mut merged = Verdict::Accept;
        for at in self.indices() {
            let answer = self.ask(
                at,
                |policy| policy.on_tool_call(call),
                |answer| Exchange::ToolCall(call, answer),
            )?;
            if let Some(verdict) = answer
                && !self.is_shadow(at)
            {
                merged = merge::verdicts(merged, verdict);
            }
        }
        Ok(merged)
    }

    fn on_finish(&mut self, summary: &Summary) -> Result<()> {
        let mut ended = Ok(());
        for at in self.indices() {
            let hook = |policy: &mut dyn Policy| policy.on_finish(summary);
            let answer = self.ask(at, hook, |_| Exchange::Finish(summary));
            ended = ended.and(answer.map(drop));
        }
        self.recorder.finish();
        ended
    }

    fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// All links' together.
    fn cost(&self) -> Cost {
        self.cost
    }
}
