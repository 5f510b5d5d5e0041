//! A request before it is sent: what its policies plan, its limits, and what the upstream is asked for.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use sha2::{Digest, Sha256};
use steersman_policy_host::{
    AnswerForm, Counted, Plan, Refusal, RequestView, SamplingPatch, Session, Summary,
};
use steersman_request::profile::{Profile, ProfileLimits};
use steersman_request::view::{self, add_stops, edit_system_text, offer};
use steersman_request::{Continued, Error, Request, RequestError, ResponseFormat};

use crate::capability::{Capabilities, FormKind, ReasoningField};
use crate::config::Protocol;
use crate::openai::form_kind;
use crate::upstream::UpstreamModel;

/// Bytes of text of a token, about.
const TOKEN_BYTES: usize = 4;

/// Tokens of the context that policies see if nobody knows them.
const UNKNOWN_CONTEXT: u32 = 1 << 20;

/// Most bytes of what upstreams want back.
const MEMORY_BYTES: usize = 32 << 20;

/// What a request asks an upstream for.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    /// The upstream's name of the model.
    pub model: &'a str,
    /// The request, after its policies.
    pub request: &'a Request,
    /// What the upstream can.
    pub capabilities: &'a Capabilities,
    /// Whether to reason; `None` leaves it to the upstream.
    pub reasoning: Option<bool>,
    /// Most reasoning tokens, if somebody limits them.
    pub budget: Option<u32>,
    /// Sampling parameters; those that are not set are the upstream's.
    pub sampling: SamplingPatch,
    /// Most tokens of the reply.
    pub max_tokens: u32,
    /// The message that it continues.
    pub continuation: Option<&'a Continuation>,
    /// What it wants back.
    pub memory: &'a Memory,
}

impl Ask<'_> {
    /// Returns true if the reasoning before a call of the current turn is not known any more.
    pub fn lacks_blocks(&self) -> bool {
        let turn = self.request.messages.iter().rev().take_while(|one| one.role != "user");
        let mut calls = turn.filter_map(|message| message.tool_calls.first());
        calls.any(|call| self.memory.before_call(&call.id).is_empty())
    }
}

/// A message of the assistant that the upstream is to continue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Continuation {
    /// Its reasoning.
    pub reasoning: String,
    /// Whether the reasoning goes on.
    pub is_open: bool,
    /// Its answer so far.
    pub answer: String,
}

impl Continuation {
    /// The message that the client wants continued.
    pub fn of_client(request: &Request) -> Option<Self> {
        let (message, part) = (request.messages.last()?, request.continues?);
        Some(Self {
            reasoning: message.reasoning_content.clone().unwrap_or_default(),
            is_open: part == Continued::Reasoning,
            answer: message.content.clone(),
        })
    }

    /// This message after what the client had of it.
    #[must_use]
    pub fn after(self, before: Option<Self>) -> Self {
        match before {
            None => self,
            Some(before) => Self {
                reasoning: before.reasoning + &self.reasoning,
                is_open: self.is_open,
                answer: before.answer + &self.answer,
            },
        }
    }
}

/// What an upstream lacks, as errors for the client.
pub struct Lacks {
    /// Name of the upstream.
    pub upstream: String,
}

impl Lacks {
    /// The error about a field.
    pub fn field(&self, field: &'static str) -> RequestError {
        let problem = format!(
            "is not supported by the upstream `{}`; leave it out, or use another model",
            self.upstream
        );
        RequestError::Field { field, problem }
    }

    /// The error about a form that `path` demands.
    pub fn form(&self, path: &str, kind: FormKind) -> RequestError {
        let problem = format!(
            "a form of the kind `{}` is not enforced by the upstream `{}`; leave it out, or use another model",
            kind.name(),
            self.upstream
        );
        RequestError::Structure { path: path.into(), problem }
    }
}

/// What upstreams want back with calls of earlier replies: blocks of reasoning with signatures, and signatures of
/// calls. Clients do not have them. The newest are kept.
#[derive(Default)]
pub struct Memory(Mutex<Remembered>);

#[derive(Default)]
struct Remembered {
    calls: HashMap<String, Entry>,
    order: VecDeque<String>,
    bytes: usize,
}

struct Entry {
    extra: Option<Value>,
    blocks: Arc<[Value]>,
    bytes: usize,
}

impl Memory {
    /// Remembers the calls of a reply, each with what the upstream wants back with it, and `blocks` before the first.
    pub fn add(&self, calls: &[(String, Option<Value>)], blocks: Vec<Value>) {
        let blocks: Arc<[Value]> = blocks.into();
        let shared = blocks.iter().map(|block| block.to_string().len()).sum::<usize>();
        let known = &mut *self.0.lock();
        for (id, extra) in calls {
            if extra.is_none() && blocks.is_empty() {
                continue;
            }
            let own = extra.as_ref().map_or(0, |extra| extra.to_string().len());
            let bytes = id.len() + own + shared;
            let entry = Entry { extra: extra.clone(), blocks: blocks.clone(), bytes };
            match known.calls.insert(id.clone(), entry) {
                Some(old) => known.bytes -= old.bytes,
                None => known.order.push_back(id.clone()),
            }
            known.bytes += bytes;
        }
        while known.bytes > MEMORY_BYTES
            && let Some(oldest) = known.order.pop_front()
        {
            known.bytes -= known.calls.remove(&oldest).map_or(0, |entry| entry.bytes);
        }
    }

    /// What the upstream wants back with a call.
    pub fn of_call(&self, id: &str) -> Option<Value> {
        self.0.lock().calls.get(id)?.extra.clone()
    }

    /// The blocks before a call.
    pub fn before_call(&self, id: &str) -> Vec<Value> {
        self.0.lock().calls.get(id).map(|entry| entry.blocks.to_vec()).unwrap_or_default()
    }
}

/// Limits of a reply. Tokens that we count are pieces of text (`segment.rs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of the reply.
    pub reply: u32,
    /// Tokens of answer and calls, if they are limited apart from the reasoning.
    pub answer: Option<u32>,
    /// Tokens of the reasoning.
    pub reasoning: u32,
    /// Tokens of the reasoning, if somebody limits these.
    pub budget: Option<u32>,
}

impl Limits {
    /// The limits of client, profile and plan; `default` is that of a request without one, and notes say what was
    /// lowered. A limit that counts the answer alone leaves room for reasoning if there is some.
    fn new(
        request: &Request,
        profile: ProfileLimits,
        plan: &Plan,
        default: u32,
        reasons: bool,
        notes: &mut Vec<String>,
    ) -> Self {
        let of_client = [request.max_tokens, request.max_answer_tokens].into_iter().flatten().min();
        let counts = match (profile.limit_counts, plan.limit_counts) {
            (Some(Counted::Reply), _) => Some(Counted::Reply),
            (of_profile, of_plan) => of_plan.or(of_profile),
        };
        let (mut reply, mut answer) = match counts {
            Some(Counted::Reply) => (of_client, None),
            Some(Counted::Answer) => (None, of_client),
            None => (request.max_tokens, request.max_answer_tokens),
        };
        if !reasons {
            (reply, answer) = ([reply, answer].into_iter().flatten().min(), None);
        }
        let mut limit = reply.unwrap_or_else(|| answer.unwrap_or(0).saturating_add(default));
        let of_profile = Some(profile.max_tokens).filter(|most| *most > 0);
        for (most, who) in [(of_profile, "the profile"), (plan.max_tokens, "a policy")] {
            if let Some(most) = most.filter(|most| *most < limit) {
                if of_client.is_some_and(|asked| asked > most) {
                    notes.push(format!("max_tokens {most} by {who}"));
                }
                limit = most;
            }
        }
        let answer = answer.map(|answer| answer.min(limit));
        let of_profile = Some(profile.reasoning_budget).filter(|most| *most > 0);
        let budgets = [plan.reasoning_budget, request.reasoning_budget, of_profile];
        let budget = budgets.into_iter().flatten().min();
        let reserve = answer.or(plan.answer_reserve).unwrap_or(0).min(limit / 2);
        let reasoning = budget.unwrap_or(u32::MAX).min(limit - reserve);
        Self { reply: limit, answer, reasoning, budget }
    }
}

/// A request that can be sent.
pub struct Prepared {
    pub request: Request,
    pub session: Session,
    pub plan: Plan,
    pub reasoning: Option<bool>,
    pub limits: Limits,
    pub sampling: SamplingPatch,
    pub notes: Vec<String>,
    pub fingerprint: String,
}

/// Asks the policies of a request for their edits and their plan. Blocks.
///
/// # Errors
/// If a policy refuses or routes it, or failed and the profile fails closed.
pub fn prepare(
    model: &UpstreamModel,
    mut request: Request,
    mut session: Session,
) -> Result<Prepared, Error> {
    let (capabilities, no_profile) = (model.capabilities(), Profile::default());
    let profile = model.profile(&request.profile).unwrap_or(&no_profile);
    let default = model.upstream().config().max_tokens;
    let params = session.params.clone();
    let mut notes = Vec::new();
    let edited = edit_system_text(&mut request, &params, &mut session)?;
    let prompt_tokens = u32::try_from(request.text_bytes() / TOKEN_BYTES).unwrap_or(u32::MAX / 8);
    let limit = profile.limits.prompt_tokens;
    if limit > 0 && prompt_tokens as usize > limit {
        let (tokens, profile) = (prompt_tokens as usize, request.profile.clone());
        return Err(RequestError::PromptTooLong { tokens, limit, profile }.into());
    }
    // A budget of zero tokens disables reasoning.
    let wish = if request.reasoning_budget == Some(0) { Some(false) } else { request.reasoning };
    let can_reason = capabilities.reasoning != ReasoningField::Never;
    let reasons = |reasoning: Option<bool>| match reasoning {
        Some(reasoning) => reasoning,
        None => capabilities.reasoning == ReasoningField::Template,
    };
    let unplanned = Plan::default();
    let before =
        Limits::new(&request, profile.limits, &unplanned, default, reasons(wish), &mut Vec::new());
    let context = model.context().unwrap_or(UNKNOWN_CONTEXT);
    let request_view = RequestView {
        model: model.name().into(),
        family: family(model.upstream().config().protocol, &capabilities),
        params: params.to_vec(),
        prompt_tokens,
        context_left: context.saturating_sub(prompt_tokens),
        can_reason,
        max_tokens: Some(before.reply),
        max_answer_tokens: before.answer,
        seed: request.seed.unwrap_or_else(|| RandomState::new().hash_one(0)),
        ..view::of_request(&request)
    };
    let mut plan = request.span.ask(&mut session, &request_view)?;
    let mut finish = |reason: &str| {
        let summary = Summary { reason: reason.into(), prompt_tokens, ..Summary::default() };
        request.span.ask(&mut session, &summary).map(drop)
    };
    if let Some(Refusal { status, message }) = plan.refuse.take() {
        finish("refused")?;
        return Err(RequestError::Refused { status, message }.into());
    }
    if let Some(route) = plan.route.take() {
        let is_granted = profile.routes.contains(&route);
        if is_granted && !request.is_routed {
            finish("routed")?;
            return Err(RequestError::Routed { route }.into());
        }
        let why = match request.is_routed {
            true => "the request has been routed already",
            false => "the profile does not have it in `routes`",
        };
        notes.push(format!("did not route to `{route}`: {why}"));
    }
    if session.shapes_text && request.logprobs.take().is_some() {
        notes.push("left out probabilities of tokens: a policy changes the text".into());
    }
    add_stops(&mut request, &mut plan);
    if let Some(names) = plan.tools.take()
        && let Err(why) = offer(&mut request, &names)
    {
        notes.push(format!("left out no tools, as a policy planned: {why}"));
    }
    if let Some(form) = plan.form.take()
        && let Err(why) = plan_form(&mut request, &capabilities, form)
    {
        notes.push(format!("left out the form that a policy planned: {why}"));
    }
    let reasoning = plan.reasoning.filter(|_| can_reason).or(wish);
    let limits =
        Limits::new(&request, profile.limits, &plan, default, reasons(reasoning), &mut notes);
    let reasoning = if limits.budget == Some(0) && can_reason { Some(false) } else { reasoning };
    let of_profile = profile.sampling.map(|sampling| SamplingPatch {
        temperature: Some(sampling.temperature),
        top_p: Some(sampling.top_p).filter(|p| *p < 1.0),
        top_k: Some(sampling.top_k).filter(|k| *k > 0),
        min_p: Some(sampling.min_p).filter(|p| *p > 0.0),
    });
    let sampling = plan.sampling.or(request.sampling).or(of_profile.unwrap_or_default());
    notes.extend(session.take_notes());
    notes.extend(edited);
    notes.extend(plan.note.clone());
    let fingerprint = Sha256::new().chain_update(model.name()).chain_update(session.digest);
    let fingerprint =
        fingerprint.finalize()[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Prepared { request, session, plan, reasoning, limits, sampling, notes, fingerprint })
}

/// The `family` that policies see: the protocol, and whether actions that change what was written apply.
fn family(protocol: Protocol, capabilities: &Capabilities) -> String {
    let continues = if capabilities.continues_answer() { "+continue" } else { "" };
    format!("{}{continues}", protocol.name())
}

/// Gives the answer the form that the policy plans.
fn plan_form(
    request: &mut Request,
    capabilities: &Capabilities,
    form: AnswerForm,
) -> Result<(), String> {
    let obstacles = [
        (request.response_format.is_some(), "the client demands one"),
        (request.tool_choice.is_required, "the client demands a tool call"),
        (request.ignores_end, "the client set ignore_eos"),
        (request.min_tokens > 0, "the client set min_tokens"),
    ];
    if let Some((_, why)) = obstacles.iter().find(|(is_there, _)| *is_there) {
        return Err((*why).into());
    }
    let format = ResponseFormat::planned(form)?;
    let kind = form_kind(&format.form);
    if !capabilities.forms.contains(&kind) {
        return Err(format!("the upstream does not enforce the kind `{}`", kind.name()));
    }
    request.response_format = Some(format);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::capability::{CapabilityConfig, Continues, Kind};

    #[test]
    fn limits_are_those_of_the_strictest_and_leave_room_for_reasoning_where_there_is_some() {
        let answer = |tokens| Request { max_answer_tokens: Some(tokens), ..Request::default() };
        let check = |request: &Request, plan: &Plan, reasons| {
            let profile = ProfileLimits { max_tokens: 5000, ..ProfileLimits::default() };
            Limits::new(request, profile, plan, 2000, reasons, &mut Vec::new())
        };
        let plan = Plan::default();
        // Without reasoning, the upstream counts as the client does.
        let plain = check(&answer(100), &plan, false);
        assert_eq!((plain.reply, plain.answer), (100, None));
        let reasons = check(&answer(100), &plan, true);
        assert_eq!((reasons.reply, reasons.answer, reasons.reasoning), (2100, Some(100), 2000));
        let planned =
            Plan { reasoning_budget: Some(300), max_tokens: Some(400), ..Plan::default() };
        let limits = check(&answer(100), &planned, true);
        assert_eq!((limits.reply, limits.reasoning, limits.budget), (400, 300, Some(300)));
        let none = check(&Request::default(), &plan, true);
        assert_eq!((none.reply, none.budget), (2000, None));
        let long = Request { max_tokens: Some(9000), ..Request::default() };
        assert_eq!(check(&long, &plan, true).reply, 5000);
    }

    #[test]
    fn policies_see_the_protocol_and_whether_the_upstream_continues_messages() {
        let told = CapabilityConfig { continues: Some(Continues::Told), ..Default::default() };
        let told = Capabilities::new(Kind::OpenAi, &told);
        assert_eq!(family(Protocol::OpenAi, &told), "openai+continue");
        let default = Capabilities::new(Kind::Anthropic, &CapabilityConfig::default());
        assert_eq!(family(Protocol::Anthropic, &default), "anthropic");
    }

    #[test]
    fn what_upstreams_want_back_is_kept_within_its_bound() {
        let memory = Memory::default();
        let block = json!({"type": "thinking", "signature": "s"});
        memory.add(&[("a".into(), Some(json!({"x": 1}))), ("b".into(), None)], vec![block.clone()]);
        assert_eq!(memory.of_call("a"), Some(json!({"x": 1})));
        assert_eq!(memory.before_call("b"), [block]);
        memory.add(&[("c".into(), None)], Vec::new());
        assert!(memory.before_call("c").is_empty());
        let large = json!("x".repeat(MEMORY_BYTES / 2));
        memory.add(&[("d".into(), Some(large.clone()))], Vec::new());
        memory.add(&[("e".into(), Some(large))], Vec::new());
        assert!(memory.of_call("a").is_none() && memory.of_call("e").is_some());
        assert!(memory.0.lock().bytes <= MEMORY_BYTES);
    }
}
