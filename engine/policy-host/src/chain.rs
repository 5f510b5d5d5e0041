//! Calls the policies of one request in order and merges their answers.
//!
//! Each policy is called as if it were alone: at its own period, with all tokens since its own last call,
//! those that any policy injected included. [`merge`] combines the answers so that a later policy cannot
//! loosen what an earlier one decided: it removes no text that an earlier one added, neither from the prompt
//! ([`added`]) nor by a rewind, brings back no answer text that an earlier one replaced ([`texts`]), and has
//! repairs of its own. A shadow is called with the same records; its answers and failures are traced and have no
//! effect.
//!
//! A chain of one passes calls and answers on unchanged and without a copy, except for answer text.

mod added;
mod differing;
mod merge;
mod notes;
mod texts;
mod unseen;

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::check::apply_edits;
use crate::contract::{
    Action, Answer, Call, CallReport, Hook, HookInput, Labels, MAX_REPAIRS, Params, Plan, Policy,
    PromptEdit, PromptView, RequestView, SYSTEM_BYTES, Step, TextChange, TextVerdict, TextView,
    Verdict,
};
use crate::error::{Cause, Failure};
use crate::trace::{Recorder, TracedPolicy};
use added::Added;
use merge::Owners;
use notes::Planned;
use unseen::Unseen;

pub use notes::unknown as unknown_in;
pub use texts::Texts;

/// One policy of a chain.
pub struct Link {
    /// Name of the policy.
    pub name: String,
    /// SHA-256 of its component.
    pub sha256: [u8; 32],
    /// Whether its answers are traced and not applied.
    pub shadow: bool,
    /// The policy, in its guard.
    pub policy: Box<dyn Policy>,
}

impl Link {
    fn traced(&self) -> TracedPolicy<'_> {
        TracedPolicy { name: &self.name, sha256: self.sha256, shadow: self.shadow }
    }
}

/// All policies of one request.
pub struct Chain {
    links: Vec<ActiveLink>,
    owners: Owners,
    texts: Texts,
    recorder: Recorder,
    report: CallReport,
}

struct ActiveLink {
    link: Link,
    /// `every` of its plan.
    every: u32,
    events: Events,
    unseen: Unseen,
    /// A shadow that has failed is not called again.
    ended: bool,
}

/// The events of a plan after which its policy is called.
#[derive(Default)]
struct Events {
    on_phase: bool,
    on_newline: bool,
    texts: Vec<String>,
    tokens: Vec<u32>,
}

impl Events {
    fn of(plan: &Plan) -> Self {
        Self {
            on_phase: plan.on_phase,
            on_newline: plan.on_newline,
            texts: plan.on_texts.clone(),
            tokens: plan.on_tokens.clone(),
        }
    }

    /// Whether one of them has happened.
    fn include(&self, step: &Step) -> bool {
        self.on_phase && step.phase_changed
            || self.on_newline && step.newline
            || step.observed.as_ref().is_some_and(|observed| {
                let last = step.tokens.last().filter(|_| observed.token_found);
                observed.texts_found.iter().any(|text| self.texts.contains(text))
                    || last.is_some_and(|last| self.tokens.contains(last))
            })
    }
}

impl Chain {
    /// A chain of `links`, first to last, traced by `recorder`.
    pub fn new(links: Vec<Link>, mut recorder: Recorder) -> Self {
        recorder.begin(links.iter().map(Link::traced));
        let active = |link| ActiveLink {
            link,
            every: 0,
            events: Events::default(),
            unseen: Unseen::default(),
            ended: false,
        };
        Self {
            texts: Texts::new(links.len()),
            links: links.into_iter().map(active).collect(),
            owners: Owners::default(),
            recorder,
            report: CallReport::default(),
        }
    }

    /// Calls link `index` and records the call; `None` for a shadow that has failed.
    fn ask<T: HookInput>(&mut self, index: usize, input: &T) -> Result<Option<T::Answer>, Failure> {
        let active = &mut self.links[index];
        if active.ended {
            return Ok(None);
        }
        let call = input.call();
        let answer = active.link.policy.call(&call);
        let mut report = active.link.policy.take_report();
        self.report.cost.fuel += report.cost.fuel;
        self.report.cost.nanoseconds += report.cost.nanoseconds;
        report.failure = report.failure.or_else(|| answer.as_ref().err().cloned());
        report.replaced |= report.failure.is_some();
        let notes = std::mem::take(&mut report.notes);
        self.recorder.record(index, &call, answer.as_ref().ok(), report);
        if active.link.shadow {
            active.ended |= answer.is_err();
            return Ok(answer.ok().and_then(T::answer));
        }
        self.report.notes.extend(notes);
        answer.map(T::answer)
    }

    fn is_shadow(&self, index: usize) -> bool {
        self.links[index].link.shadow
    }

    fn prompt(&mut self, asked: &PromptView) -> Result<Vec<PromptEdit>, Failure> {
        let mut view = Cow::Borrowed(asked);
        let mut all = Vec::new();
        let mut added = Added::default();
        for index in 0..self.links.len() {
            let own = own_params(&self.links[index].link.name, &view.params);
            let own = own.map(|params| PromptView { params, ..(*view).clone() });
            let Some(edits) = self.ask(index, own.as_ref().unwrap_or(&view))? else {
                continue;
            };
            if edits.is_empty() || self.is_shadow(index) {
                continue;
            }
            let system = &mut view.to_mut().system;
            let edits = added.permitted(index, system, edits);
            apply_edits(system, &edits).map_err(|problem| Failure {
                policy: self.links[index].link.name.clone(),
                hook: "on-prompt",
                cause: Cause::Answer(problem),
            })?;
            for text in system {
                text.truncate(text.floor_char_boundary(SYSTEM_BYTES));
            }
            all.extend(edits);
        }
        Ok(all)
    }

    fn request(&mut self, request: &RequestView) -> Result<Plan, Failure> {
        let mut merged: Option<Plan> = None;
        let (mut every, mut watching) = (0, Plan::default());
        let (several, mut planned) = (self.links.len() > 1, Vec::new());
        for index in 0..self.links.len() {
            let own = own_params(&self.links[index].link.name, &request.params);
            let own = own.map(|params| RequestView { params, ..request.clone() });
            let asked = own.as_ref().unwrap_or(request);
            let Some(mut plan) = self.ask(index, asked)? else { continue };
            self.links[index].every = plan.every;
            every = merge::gcd(every, plan.every);
            self.links[index].events = Events::of(&plan);
            if self.is_shadow(index) {
                watching = merge::events(watching, &plan);
                continue;
            }
            self.owners.planned(index, &plan.sampling);
            if several {
                let policy = &self.links[index].link.policy;
                let receives = policy.has(Hook::OnPrompt) || policy.has(Hook::OnRequest);
                planned.push(Planned::new(&asked.params, receives, plan.note.take()));
            }
            merged = Some(match merged {
                None => plan,
                Some(earlier) => merge::plans(earlier, plan),
            });
        }
        // A shadow is called as if it were applied.
        let mut merged = merge::events(merged.unwrap_or_default(), &watching);
        if several {
            merged.note = notes::merged(&planned);
        }
        Ok(Plan { every, ..merged })
    }

    fn step(&mut self, step: &Step) -> Result<Vec<Action>, Failure> {
        if let [only] = &self.links[..] {
            let shadow = only.link.shadow;
            let actions = self.ask(0, step)?.unwrap_or_default();
            return Ok(if shadow { Vec::new() } else { actions });
        }
        let is_told = step.loop_found.is_some() || step.budget_reached;
        let mut answers: Vec<(usize, Vec<Action>)> = Vec::new();
        self.owners.sampled(step.tokens.len());
        self.owners.begin(step.index);
        for index in 0..self.links.len() {
            let ActiveLink { every, events, unseen, .. } = &mut self.links[index];
            let event = is_told || events.include(step);
            let Some(seen) = unseen.due(step, *every, event) else { continue };
            if let Some(actions) = self.ask(index, &*seen)?
                && !actions.is_empty()
                && !self.is_shadow(index)
            {
                answers.push((index, actions));
            }
        }
        let merged = merge::actions(answers, &mut self.owners);
        // The engine shows injected text to several policies, and with it what was rewound before it.
        let several = self.links.iter().filter(|active| !active.link.shadow).count() > 1;
        let rewound = if several { 0 } else { merge::rewound(&merged) };
        self.links.iter_mut().for_each(|active| active.unseen.answered(rewound));
        Ok(merged)
    }

    fn text(&mut self, view: &TextView) -> Result<TextVerdict, Failure> {
        self.texts.begin(view.position as usize);
        let applied = self.links.iter().filter(|active| !active.link.shadow).count();
        let mut text = Cow::Borrowed(&*view.text);
        for index in 0..self.links.len() {
            let active = &self.links[index];
            let is_called = !active.ended && active.link.policy.has(Hook::OnText);
            let Some(own) = self.texts.view(index, &text, view.end) else {
                text = Cow::Borrowed("");
                continue;
            };
            let verdict = if is_called { self.ask(index, &own)? } else { None };
            let is_shadow = self.is_shadow(index);
            let verdict = verdict.unwrap_or_default();
            let is_checked = applied > 1 && !is_shadow;
            let (out, is_refused) = self.texts.answer(index, verdict, view.end, is_checked);
            if is_refused {
                let name = &self.links[index].link.name;
                self.report.notes.push(format!(
                    "did not replace answer text as `{name}` wants: it contains what a policy before it replaced"
                ));
            }
            if !is_shadow {
                text = Cow::Owned(out);
            }
        }
        self.texts.end(view.text.len());
        if *text == *view.text {
            return Ok(TextVerdict::Pass);
        }
        Ok(TextVerdict::Replace(TextChange { text: text.into_owned(), hold: 0 }))
    }

    /// Calls a hook whose record is the same for all, and merges the answers.
    fn each<T: HookInput>(
        &mut self,
        input: &T,
        mut merge: impl FnMut(usize, T::Answer),
    ) -> Result<(), Failure> {
        let mut failed = Ok(());
        for index in 0..self.links.len() {
            match self.ask(index, input) {
                Ok(Some(answer)) if !self.is_shadow(index) => merge(index, answer),
                Ok(_) => {}
                Err(failure) => failed = failed.and(Err(failure)),
            }
        }
        failed
    }
}

/// Parameters for one policy: its own take precedence over shared ones. `None` if no policy has
/// parameters of its own.
pub fn own_params(policy: &str, params: &Params) -> Option<Params> {
    if !params.iter().any(|(name, _)| name.contains('.')) {
        return None;
    }
    let own = |name: &str| Some(name.strip_prefix(policy)?.strip_prefix('.')?.to_owned());
    let shared = params.iter().filter(|(name, _)| !name.contains('.'));
    let mut merged: BTreeMap<_, _> = shared.cloned().collect();
    merged.extend(params.iter().filter_map(|(name, value)| Some((own(name)?, value.clone()))));
    Some(merged.into_iter().collect())
}

impl Policy for Chain {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        match call {
            // Each policy has its own parameters, outside of requests.
            Call::Params(_) => Ok(call.default_answer()),
            Call::Prompt(view) => self.prompt(view).map(Answer::Prompt),
            Call::Request(view) => self.request(view).map(Answer::Request),
            Call::Step(step) => self.step(step).map(Answer::Step),
            Call::Text(view) => self.text(view).map(Answer::Text),
            Call::ToolCall(view) => {
                let (mut merged, mut by) = (Verdict::default(), 0);
                let repairs = self.owners.repairs.clone();
                self.each(&**view, |index, verdict| {
                    let is_spent = repairs.get(&index).is_some_and(|count| *count == MAX_REPAIRS);
                    if matches!(verdict, Verdict::Repair(_)) && is_spent {
                        return;
                    }
                    let earlier = std::mem::take(&mut merged);
                    if merge::weight(&verdict) > merge::weight(&earlier) {
                        (merged, by) = (verdict, index);
                    } else {
                        merged = earlier;
                    }
                })?;
                if matches!(merged, Verdict::Repair(_)) && self.links.len() > 1 {
                    self.owners.repaired(by);
                }
                Ok(Answer::ToolCall(merged))
            }
            Call::Finish(summary) => {
                let mut all = Labels::new();
                let finished = self.each(&**summary, |_, labels| {
                    for (name, value) in labels {
                        if all.iter().all(|(other, _)| *other != name) {
                            all.push((name, value));
                        }
                    }
                });
                self.recorder.finish();
                finished.map(|()| Answer::Finish(all))
            }
        }
    }

    fn is_quick(&self, hook: Hook) -> bool {
        self.links.iter().all(|active| active.ended || active.link.policy.is_quick(hook))
    }

    fn has(&self, hook: Hook) -> bool {
        self.links.iter().any(|active| active.link.policy.has(hook))
    }

    fn take_report(&mut self) -> CallReport {
        std::mem::take(&mut self.report)
    }
}
