//! What policies do to a reply while it is written: by text, as the upstream sends it.
//!
//! A piece of the upstream's stream may have several tokens; `on-step` is called after it, not within it. An action
//! that changes what was written cuts the stream, and the run continues it with another request; an upstream that
//! cannot continue a message there has no such actions, and what becomes of them is configured.

use std::sync::Arc;

use steersman_policy_host::events::Watch;
use steersman_policy_host::loops::Detector;
use steersman_policy_host::{
    Action, LoopReport, MAX_REPAIRS, Observations, Phase, Plan, STEP_TOKENS, Step, TextChange,
    TextVerdict, TextView, Verdict,
};
use steersman_request::calls::view;
use steersman_request::{Error, FinishReason, Request, ToolCall};

use crate::capability::Capabilities;
use crate::config::WithoutContinuation;
use crate::hooks::Hooks;
use crate::prepare::Limits;
use crate::reply::Reply;
use crate::segment::{self, Pieces, Segmenter};

/// Most pieces that policies may inject into one reply.
const INJECTED: usize = 4096;

/// Most pieces that policies may rewind in one reply.
const REWOUND: usize = 16 * 1024;

/// Most bytes of text that a step has.
const STEP_BYTES: usize = 64 << 10;

const BUDGET_REACHED: &str = "budget reached";

/// What follows a piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// The next piece.
    Read,
    /// The stream is cut, and another request continues the reply.
    Cut,
    /// The reply ends.
    End(FinishReason),
}

/// Policies and limits of one reply.
pub struct Steer {
    pub hooks: Hooks,
    pub limits: Limits,
    capabilities: Capabilities,
    without: WithoutContinuation,
    every: u32,
    on_phase: bool,
    on_newline: bool,
    pieces: Arc<Pieces>,
    segmenter: Segmenter,
    detector: Option<Detector>,
    watch: Option<Watch>,
    /// Pieces that the policies have not seen, and their text.
    unseen: Vec<u32>,
    unseen_text: String,
    /// Bytes of each piece of the current phase.
    lengths: Vec<usize>,
    /// Bytes of the piece that is not complete.
    open_bytes: usize,
    /// The phase when `on-step` could last be called.
    phase: Option<Phase>,
    /// What the pieces of one part of the stream have completed.
    loop_found: Option<LoopReport>,
    token_found: bool,
    /// Pieces that policies have injected, and taken back.
    pub injected: usize,
    pub rewound: usize,
    repairs: u32,
    /// Loops that were found.
    pub loops: u32,
    /// Whether the budget of the reasoning has been dealt with.
    is_over_budget: bool,
}

impl Steer {
    pub fn new(
        hooks: Hooks,
        plan: &Plan,
        limits: Limits,
        capabilities: Capabilities,
        without: WithoutContinuation,
        pieces: Arc<Pieces>,
    ) -> Self {
        Self {
            hooks,
            limits,
            capabilities,
            without,
            every: plan.every,
            on_phase: plan.on_phase,
            on_newline: plan.on_newline,
            pieces,
            segmenter: Segmenter::default(),
            detector: plan.loops.map(Detector::new),
            watch: Watch::new(plan),
            unseen: Vec::new(),
            unseen_text: String::new(),
            lengths: Vec::new(),
            open_bytes: 0,
            phase: None,
            loop_found: None,
            token_found: false,
            injected: 0,
            rewound: 0,
            repairs: 0,
            loops: 0,
            is_over_budget: false,
        }
    }

    /// Adds text of the upstream, and asks the policies about it.
    ///
    /// # Errors
    /// If a policy failed and the profile fails closed.
    pub async fn write(
        &mut self,
        phase: Phase,
        text: &str,
        request: &Request,
        reply: &mut Reply,
    ) -> Result<Next, Error> {
        self.enter(phase, reply);
        self.add(text, reply);
        let found = match &mut self.watch {
            Some(watch) => {
                watch.read(text);
                watch.found(0).0
            }
            None => Vec::new(),
        };
        if let Some(end) = self.deliver(phase, text, reply).await? {
            return Ok(end);
        }
        reply.show();
        if let Some(end) = self.end_at_limit(reply) {
            return Ok(end);
        }
        self.step(text.contains('\n'), found, request, reply).await
    }

    /// A phase begins, if it is another one.
    pub fn enter(&mut self, phase: Phase, reply: &mut Reply) {
        if reply.phase == phase {
            return;
        }
        self.close_piece(reply);
        self.lengths.clear();
        self.detector.iter_mut().for_each(Detector::reset);
        reply.phase = phase;
    }

    /// Counts text, and looks for loops in it.
    fn add(&mut self, text: &str, reply: &mut Reply) {
        let Self {
            segmenter,
            pieces,
            detector,
            watch,
            unseen,
            lengths,
            loop_found,
            token_found,
            ..
        } = self;
        let mut complete = 0;
        segmenter.push(text, |piece| {
            let number = pieces.add(piece);
            unseen.push(number);
            lengths.push(piece.len());
            complete += piece.len();
            if let Some(found) = detector.as_mut().and_then(|detector| detector.push(number)) {
                *loop_found = Some(found);
            }
            *token_found |= watch.as_mut().is_some_and(|watch| watch.found(number).1);
            count(reply);
        });
        self.open_bytes = self.open_bytes + text.len() - complete;
        self.unseen_text.push_str(text);
        let surplus = self.unseen_text.len().saturating_sub(STEP_BYTES);
        self.unseen_text.drain(..self.unseen_text.ceil_char_boundary(surplus));
    }

    /// The open piece is complete: another phase begins, the stream has ended, or it was cut.
    pub fn close_piece(&mut self, reply: &mut Reply) {
        let Self { segmenter, pieces, unseen, lengths, .. } = self;
        segmenter.end(|piece| {
            unseen.push(pieces.add(piece));
            lengths.push(piece.len());
            count(reply);
        });
        self.open_bytes = 0;
    }

    /// Sends text to the client, as the policies change it.
    async fn deliver(
        &mut self,
        phase: Phase,
        text: &str,
        reply: &mut Reply,
    ) -> Result<Option<Next>, Error> {
        if phase == Phase::Reasoning {
            reply.reason(text);
            return Ok(None);
        }
        reply.answer.push_str(text);
        self.shape(text, false, reply).await
    }

    async fn shape(
        &mut self,
        text: &str,
        end: bool,
        reply: &mut Reply,
    ) -> Result<Option<Next>, Error> {
        let bytes = text.len();
        if !self.hooks.sees_text {
            reply.answer_shaped(text.into(), bytes, true);
            return Ok(None);
        }
        // Cast: an answer has fewer bytes than a reply may have.
        let view = TextView { position: reply.seen as u32, text: text.into(), end };
        let shaped = match self.hooks.ask(view).await? {
            TextVerdict::Replace(TextChange { text, .. }) => text,
            // The chain holds text back.
            TextVerdict::Pass | TextVerdict::Hold(_) => text.into(),
        };
        self.take_notes(reply);
        if !reply.answer_shaped(shaped, bytes, end) {
            return Ok(None);
        }
        let reason = "the policy added too much to the answer".to_string();
        reply.note(reason.clone());
        Ok(Some(Next::End(FinishReason::Policy(reason))))
    }

    /// Sends what the policies hold back: a call follows, or the end.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub async fn release(&mut self, reply: &mut Reply) -> Result<(), Error> {
        if reply.is_held {
            self.shape("", true, reply).await?;
        }
        Ok(())
    }

    /// The end of a reply at its limits. The upstream has them too; these hold if it does not keep them.
    pub fn end_at_limit(&self, reply: &Reply) -> Option<Next> {
        let (_, answer) = reply.counts;
        // The upstream counts the reply itself, in tokens, of which some scripts have half as many as pieces.
        let most = self.limits.reply.saturating_mul(2).saturating_add(16);
        let is_over =
            self.limits.answer.is_some_and(|limit| answer > limit) || reply.tokens() > most;
        is_over.then_some(Next::End(FinishReason::Length))
    }

    /// Calls `on-step` if it is due, and carries the answer out.
    async fn step(
        &mut self,
        newline: bool,
        texts_found: Vec<String>,
        request: &Request,
        reply: &mut Reply,
    ) -> Result<Next, Error> {
        let phase = reply.phase;
        let before = self.phase.replace(phase);
        let (loop_found, token_found) =
            (self.loop_found.take(), std::mem::take(&mut self.token_found));
        let phase_changed = self.on_phase && before.is_some_and(|before| before != phase);
        let newline = self.on_newline && newline;
        let budget_reached = phase == Phase::Reasoning
            && reply.counts.0 >= self.limits.reasoning
            // Of the whole reply, the upstream's own count holds (`end_at_limit`).
            && self.limits.reasoning < self.limits.reply
            && !self.is_over_budget;
        let due = self.every > 0 && self.unseen.len() >= self.every as usize;
        let why = match loop_found {
            Some(found) => format!("loop of {} pieces", found.period),
            None if budget_reached => BUDGET_REACHED.to_string(),
            None if phase_changed => "change of the phase".into(),
            None if newline => "line break".into(),
            None if !texts_found.is_empty() => "text of the plan".into(),
            None if token_found => "token of the plan".into(),
            None if due => "periodic call".into(),
            None => return Ok(Next::Read),
        };
        self.loops += u32::from(loop_found.is_some());
        let newest = self.unseen.len().saturating_sub(STEP_TOKENS);
        let step = Step {
            index: reply.tokens(),
            phase,
            reasoning_tokens: reply.counts.0,
            answer_tokens: reply.counts.1,
            reasoning_left: self.limits.reasoning.saturating_sub(reply.counts.0),
            tokens: self.unseen.split_off(newest),
            text: std::mem::take(&mut self.unseen_text),
            loop_found,
            budget_reached,
            phase_changed,
            newline,
            observed: Observations { texts_found, token_found, ..Observations::default() }.if_any(),
        };
        self.unseen.clear();
        let actions = self.hooks.ask(step).await?;
        self.take_notes(reply);
        self.act(actions, &why, budget_reached, request, reply).await
    }

    /// Carries actions out: the longest rewind, then what is written, up to the first stop.
    async fn act(
        &mut self,
        mut actions: Vec<Action>,
        why: &str,
        budget_reached: bool,
        request: &Request,
        reply: &mut Reply,
    ) -> Result<Next, Error> {
        let stop = actions.iter().position(|action| matches!(action, Action::Stop(_)));
        actions.truncate(stop.map_or(actions.len(), |at| at + 1));
        let at = reply.tokens();
        for action in &actions {
            // The tokens of policies are pieces of text here, which the upstream does not know.
            let what = match action {
                Action::Ban(_) => "ban tokens",
                Action::Bias(_) => "bias tokens",
                Action::Sampling(_) => "change sampling",
                _ => continue,
            };
            reply.note(format!(
                "did not {what} after {at} pieces ({why}): an upstream samples itself"
            ));
        }
        let is_reasoning = reply.phase == Phase::Reasoning;
        let rewind = actions.iter().filter_map(|action| match action {
            Action::Rewind(pieces) => Some(*pieces as usize),
            _ => None,
        });
        let rewind = rewind.max().unwrap_or(0);
        let closes = |action: &Action| matches!(action, Action::CloseReasoning(_)) && is_reasoning;
        let injects = |action: &Action| matches!(action, Action::Inject(_));
        let is_closed = is_reasoning && (budget_reached || actions.iter().any(closes));
        let changes = rewind > 0 || is_closed || actions.iter().any(injects);
        if changes && let Some(obstacle) = self.obstacle(request, reply, is_closed) {
            return Ok(self.without_cut(&actions, &obstacle, why, budget_reached, reply));
        }
        let mut is_cut = false;
        if rewind > 0 {
            match self.rewind(rewind, why, reply).await? {
                Next::Read => {}
                Next::Cut => is_cut = true,
                end => return Ok(end),
            }
        }
        for action in actions {
            let end = match action {
                Action::Inject(words) => {
                    is_cut = true;
                    self.inject(&words, "injected text", why, reply).await?
                }
                Action::CloseReasoning(hint) if reply.phase == Phase::Reasoning => {
                    is_cut = true;
                    self.close(&hint, why, request, reply).await?
                }
                Action::Stop(reason) => {
                    reply.note(format!("stopped after {at} pieces ({why}): {reason}"));
                    return Ok(Next::End(FinishReason::Policy(reason)));
                }
                _ => None,
            };
            if let Some(end) = end {
                return Ok(end);
            }
        }
        if budget_reached && reply.phase == Phase::Reasoning {
            is_cut = true;
            if let Some(end) = self.close("", BUDGET_REACHED, request, reply).await? {
                return Ok(end);
            }
        }
        Ok(if is_cut { Next::Cut } else { Next::Read })
    }

    /// Why nothing that was written can be changed here; `None` if it can.
    fn obstacle(&self, request: &Request, reply: &Reply, closes: bool) -> Option<String> {
        let can = match reply.phase {
            Phase::Reasoning => self.capabilities.continues_reasoning(),
            Phase::Answer | Phase::ToolCall => self.capabilities.continues_answer(),
        };
        if !can {
            return Some("the upstream cannot continue a message here".into());
        }
        if !reply.calls.is_empty() || reply.open.is_some() {
            return Some("the reply has a tool call".into());
        }
        let is_fixed = request.response_format.is_some() || request.tool_choice.is_required;
        (is_fixed && !closes).then(|| "the form of the reply is fixed".into())
    }

    /// What becomes of actions that cannot be carried out.
    fn without_cut(
        &mut self,
        actions: &[Action],
        obstacle: &str,
        why: &str,
        budget_reached: bool,
        reply: &mut Reply,
    ) -> Next {
        let at = reply.tokens();
        if let Some(Action::Stop(reason)) = actions.last() {
            reply.note(format!("stopped after {at} pieces ({why}): {reason}"));
            return Next::End(FinishReason::Policy(reason.clone()));
        }
        if budget_reached {
            self.is_over_budget = true;
            reply.note(format!("ended after {at} pieces ({BUDGET_REACHED}): {obstacle}"));
            return Next::End(FinishReason::Length);
        }
        if self.without == WithoutContinuation::End && !self.capabilities.continues_answer() {
            reply.note(format!("ended after {at} pieces ({why}): {obstacle}"));
            return Next::End(FinishReason::Policy(format!("{why}; {obstacle}")));
        }
        reply
            .note(format!("did not change what was written after {at} pieces ({why}): {obstacle}"));
        Next::Read
    }

    /// Takes back the newest `count` pieces of the phase, if the client can drop them.
    async fn rewind(&mut self, count: usize, why: &str, reply: &mut Reply) -> Result<Next, Error> {
        let (is_open, before) = (usize::from(self.open_bytes > 0), reply.tokens());
        let of_pieces = count.saturating_sub(is_open).min(self.lengths.len());
        let kept = self.lengths.len() - of_pieces;
        let bytes = self.open_bytes + self.lengths[kept..].iter().sum::<usize>();
        if !reply.rewind(bytes) {
            let reason = "the client already has the text";
            reply.note(format!("did not rewind after {before} pieces ({why}): {reason}"));
            return Ok(Next::Read);
        }
        self.lengths.truncate(kept);
        self.segmenter = Segmenter::default();
        self.open_bytes = 0;
        // Cast: as many as there were pieces.
        let dropped = of_pieces as u32;
        let count = match reply.phase {
            Phase::Reasoning => &mut reply.counts.0,
            Phase::Answer | Phase::ToolCall => &mut reply.counts.1,
        };
        *count = count.saturating_sub(dropped);
        self.unseen.clear();
        self.unseen_text.clear();
        self.detector.iter_mut().for_each(Detector::reset);
        self.watch.iter_mut().for_each(Watch::clear);
        let all = of_pieces + is_open;
        self.rewound += all;
        reply.note(format!("rewound {all} pieces after {before} pieces ({why})"));
        if self.rewound > REWOUND {
            let reason = format!("the policy rewound more than {REWOUND} pieces");
            reply.note(reason.clone());
            return Ok(Next::End(FinishReason::Policy(reason)));
        }
        // What came in one part with the text that is taken back, and stays.
        let again = reply.unseen().to_string();
        if reply.phase != Phase::Reasoning && !again.is_empty() {
            let end = self.shape(&again, false, reply).await?;
            return Ok(end.unwrap_or(Next::Cut));
        }
        Ok(Next::Cut)
    }

    /// Closes the reasoning, and lets `hint` follow.
    async fn close(
        &mut self,
        hint: &str,
        why: &str,
        request: &Request,
        reply: &mut Reply,
    ) -> Result<Option<Next>, Error> {
        let is_fixed = request.response_format.is_some() || request.tool_choice.is_required;
        if is_fixed && !hint.is_empty() {
            reply.note(format!("left out a hint ({why}): the form of the answer is fixed"));
        }
        self.enter(Phase::Answer, reply);
        let hint = if is_fixed { "" } else { hint };
        self.inject(hint, "closed the reasoning", why, reply).await
    }

    /// Writes text as if the upstream had.
    async fn inject(
        &mut self,
        words: &str,
        what: &str,
        why: &str,
        reply: &mut Reply,
    ) -> Result<Option<Next>, Error> {
        self.injected += segment::count(words);
        if self.injected > INJECTED {
            let reason = format!("the policy injected more than {INJECTED} pieces");
            reply.note(reason.clone());
            return Ok(Some(Next::End(FinishReason::Policy(reason))));
        }
        reply.note(format!("{what} after {} pieces ({why})", reply.tokens()));
        self.detector.iter_mut().for_each(Detector::reset);
        if words.is_empty() {
            return Ok(None);
        }
        let all_seen = self.unseen.is_empty() && self.unseen_text.is_empty();
        self.add(words, reply);
        let delivered = self.deliver(reply.phase, words, reply).await?;
        // A policy does not see its own text as new. In a chain the others do, and so all.
        if all_seen && self.hooks.policies < 2 {
            self.unseen.clear();
            self.unseen_text.clear();
        }
        self.detector.iter_mut().for_each(Detector::reset);
        self.loop_found = None;
        Ok(delivered)
    }

    /// Asks for a verdict on a call, and carries it out.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub async fn judge(
        &mut self,
        call: ToolCall,
        request: &Request,
        reply: &mut Reply,
    ) -> Result<Next, Error> {
        if !self.hooks.judges_calls {
            reply.send_call(call);
            return Ok(Next::Read);
        }
        let view = view(&call, &request.messages, &reply.calls, &[]);
        let verdict = self.hooks.ask(view).await?;
        self.take_notes(reply);
        let (name, at) = (call.function.name.clone(), reply.tokens());
        match verdict {
            Verdict::Accept => reply.send_call(call),
            Verdict::Stop(reason) => {
                reply.note(format!("stopped after {at} pieces (call of `{name}`): {reason}"));
                return Ok(Next::End(FinishReason::Policy(reason)));
            }
            Verdict::Repair(words) => {
                let limit = MAX_REPAIRS * self.hooks.policies;
                let obstacle = match self.repairs >= limit {
                    true => Some(format!("limit of {limit} repairs reached")),
                    false => self.obstacle_of_repair(request, reply),
                };
                if let Some(obstacle) = obstacle {
                    reply.note(format!("accepted a call of `{name}` without repair: {obstacle}"));
                    reply.send_call(call);
                    return Ok(Next::Read);
                }
                self.repairs += 1;
                reply.note(format!("removed a call of `{name}` after {at} pieces"));
                self.enter(Phase::Answer, reply);
                let end = self.inject(&words, "injected text", "tool call repair", reply).await?;
                return Ok(end.unwrap_or(Next::Cut));
            }
        }
        Ok(Next::Read)
    }

    fn obstacle_of_repair(&self, request: &Request, reply: &Reply) -> Option<String> {
        if !reply.calls.is_empty() {
            return Some("the client has a call before it".into());
        }
        let is_fixed = request.response_format.is_some() || request.tool_choice.is_required;
        if is_fixed {
            return Some("the form of the reply is fixed".into());
        }
        let can = self.capabilities.continues_answer();
        (!can).then(|| "the upstream cannot continue a message here".into())
    }

    /// Counts the arguments of a call, which may come between pieces of reasoning, or without a call.
    pub fn count_arguments(&mut self, text: &str, reply: &mut Reply) {
        self.enter(Phase::ToolCall, reply);
        self.segmenter.push(text, |_| count(reply));
    }

    fn take_notes(&self, reply: &mut Reply) {
        self.hooks.take_notes().into_iter().for_each(|note| reply.note(note));
    }
}

/// Counts a piece.
fn count(reply: &mut Reply) {
    match reply.phase {
        Phase::Reasoning => reply.counts.0 += 1,
        Phase::Answer | Phase::ToolCall => reply.counts.1 += 1,
    }
}
