//! A request before it is sent: what its policies plan, and its limits.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use sha2::{Digest, Sha256};
use steersman_policy_host::{
    AnswerForm, Counted, Plan, Refusal, RequestView, SamplingPatch, Session, Summary,
};
use steersman_request::profile::{Profile, ProfileLimits};
use steersman_request::view::{self, add_stops, edit_system_text, offer};
use steersman_request::{Error, Request, RequestError, ResponseFormat};

use crate::capability::{Capabilities, FormKind, ReasoningField};
use crate::config::Protocol;
use crate::upstream::UpstreamModel;

/// Bytes of text of a token, about.
const TOKEN_BYTES: usize = 4;

/// Tokens of the context that policies see if nobody knows them.
const UNKNOWN_CONTEXT: u32 = 1 << 20;

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

/// Tokens of the prompt of `request`, about: the upstream has the tokenizer.
pub fn prompt_tokens(request: &Request) -> u32 {
    u32::try_from(request.text_bytes() / TOKEN_BYTES).unwrap_or(u32::MAX / 8)
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
    let prompt_tokens = prompt_tokens(&request);
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
    if let Some(Refusal { status, message, retry_after }) = plan.refuse.take() {
        finish("refused")?;
        return Err(RequestError::Refused { status, message, retry_after_s: retry_after }.into());
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
        (request.has_begun_answer(), "the client continues an answer"),
    ];
    if let Some((_, why)) = obstacles.iter().find(|(is_there, _)| *is_there) {
        return Err((*why).into());
    }
    let format = ResponseFormat::planned(form)?;
    let kind = FormKind::of(&format.form);
    if !capabilities.forms.contains(&kind) {
        return Err(format!("the upstream does not enforce the kind `{}`", kind.name()));
    }
    request.response_format = Some(format);
    Ok(())
}

#[cfg(test)]
mod tests {
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
}
