//! What policies see of a request before it starts, and what their answers do to it.

use std::time::UNIX_EPOCH;

use crate::calls::digest;
use crate::error::Error;
use crate::policy::{
    Cause, DESCRIPTION_BYTES, Failure, Hook, MESSAGE_BYTES, MESSAGES, MessageView, Params, Plan,
    PromptEdit, PromptView, Replacement, RequestView, SYSTEM_BYTES, Session, USER_BYTES,
    apply_edits,
};
use crate::{Message, Request, ResponseFormat};

/// The policy's view of `request`, without what only the model that serves it knows: its name, family and
/// context, the parameters of the profile, limits and seed.
pub fn of_request(request: &Request) -> RequestView {
    let of_role = |role: &'static str| request.messages.iter().filter(move |m| m.role == role);
    let system = of_role("system").chain(of_role("developer"));
    let user = of_role("user").next_back().map_or("", |m| m.content.as_str());
    let description = |tool| cut(of_tool(tool, "description"), DESCRIPTION_BYTES);
    let older = request.messages.len().saturating_sub(MESSAGES);
    // Casts: counts within a request body fit.
    RequestView {
        id: request.id.clone(),
        profile: request.profile.clone(),
        messages: request.messages.len() as u32,
        system_chars: system.map(|m| m.content.chars().count() as u32).sum(),
        user: cut(user, USER_BYTES),
        tools: request.tools.iter().map(|tool| of_tool(tool, "name").to_string()).collect(),
        reasoning: request.reasoning,
        reasoning_budget: request.reasoning_budget,
        form: request.response_format.as_ref().map(ResponseFormat::seen),
        sampling: request.sampling,
        time: UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs()),
        caller: request.caller.clone(),
        conversation: request.messages[older..].iter().map(message_view).collect(),
        tool_descriptions: request.tools.iter().map(description).collect(),
        ..RequestView::default()
    }
}

/// Lets the policy edit the system text of `request`; returns a note for each edit.
///
/// # Errors
/// [`crate::Error::Policy`] if a policy failed and the profile fails closed.
pub fn edit_system_text(
    request: &mut Request,
    params: &Params,
    policy: &mut Session,
) -> Result<Vec<String>, Error> {
    if request.prompt.is_some() {
        return Ok(Vec::new());
    }
    let messages = request.messages.iter().filter(|message| message.is_system());
    let system = messages.map(|message| split_seen(&message.content).0.to_string());
    let view = PromptView {
        profile: request.profile.clone(),
        params: params.clone(),
        system: system.collect(),
    };
    if view.system.iter().all(String::is_empty) && !policy.policy.has(Hook::OnPrompt) {
        return Ok(Vec::new());
    }
    let edits = request.span.ask(policy, &view)?;
    let mut system = view.system;
    let is_new = system.is_empty();
    apply_edits(&mut system, &edits).map_err(|problem| Failure {
        policy: request.profile.clone(),
        hook: "on-prompt",
        cause: Cause::Answer(problem),
    })?;
    if is_new && !system.is_empty() {
        let message = Message { role: "system".into(), ..Message::default() };
        request.messages.insert(0, message);
    }
    let messages = request.messages.iter_mut().filter(|message| message.is_system());
    for (message, seen) in messages.zip(system) {
        let (_, rest) = split_seen(&message.content);
        message.content = seen + rest;
    }
    let note = |edit: &PromptEdit| match edit {
        PromptEdit::Replace(Replacement { message, old, new }) => {
            let (old, new) = (old.len(), new.len());
            format!("replaced {old} bytes of system message {message} with {new} bytes")
        }
        PromptEdit::Begin(text) => {
            format!("added {} bytes at the beginning of the system text", text.len())
        }
        PromptEdit::End(text) => {
            format!("added {} bytes at the end of the system text", text.len())
        }
    };
    Ok(edits.iter().map(note).collect())
}

/// The beginning of a text, at most `bytes`.
fn cut(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_string()
}

/// A text of a tool; empty if it has none.
fn of_tool<'a>(tool: &'a serde_json::Value, field: &str) -> &'a str {
    let text = tool.get("function").unwrap_or(tool).get(field);
    text.and_then(|text| text.as_str()).unwrap_or_default()
}

/// The policy's view of a message.
fn message_view(message: &Message) -> MessageView {
    let is_result = message.role == "tool";
    MessageView {
        role: message.role.clone(),
        // Within a request body.
        bytes: message.content.len() as u32,
        text: if is_result { String::new() } else { cut(&message.content, MESSAGE_BYTES) },
        calls: message.tool_calls.iter().map(|call| call.function.name.clone()).collect(),
        digest: is_result.then(|| digest(&message.content)),
    }
}

/// Adds the stop strings of the plan.
pub fn add_stops(request: &mut Request, plan: &mut Plan) {
    for stop in plan.stop.drain(..) {
        if !request.stop.contains(&stop) {
            request.stop.push(stop);
        }
    }
}

/// Leaves out the tools that `names` lacks; returns whether there were any.
///
/// # Errors
/// Why none are left out.
pub fn offer(request: &mut Request, names: &[String]) -> Result<bool, String> {
    let is_offered = |name: &str| names.iter().any(|offered| offered == name);
    let is_allowed = |tool: &str| {
        let allowed = request.tool_choice.allowed.as_ref();
        is_offered(tool) && allowed.is_none_or(|allowed| allowed.iter().any(|name| name == tool))
    };
    let is_left = request.tools.iter().any(|tool| is_allowed(of_tool(tool, "name")));
    if request.tool_choice.is_required && !is_left {
        return Err("the client demands a tool call, and no tool would be left for it".into());
    }
    let before = request.tools.len();
    request.tools.retain(|tool| is_offered(of_tool(tool, "name")));
    if let Some(allowed) = &mut request.tool_choice.allowed {
        allowed.retain(|name| is_offered(name));
    }
    Ok(request.tools.len() < before)
}

/// The part of a system text that policies see, and the rest.
fn split_seen(text: &str) -> (&str, &str) {
    text.split_at(text.floor_char_boundary(SYSTEM_BYTES))
}
