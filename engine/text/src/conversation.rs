//! What a conversation becomes before a chat template renders it, the same for all protocols.
//!
//! Clients send what their API allows: several system messages, late ones, neighbours of one role, calls with
//! the ids of other servers. Each template carries some of these shapes, raises an error at others, and drops
//! the text of the rest without a word. [`Shape`] says how a conversation has to be written for one template;
//! `probe` finds it by rendering when the model loads. [`Shape::write`] writes a conversation so that every
//! text of it reaches the prompt; what changes who says something, or when, is noted; what no way carries is
//! refused.
//! Never renders, and moves no text of a client into a message of the assistant: `taint` tells them apart by
//! role.
//!
//! # Prefixes
//! A message is written with what stands before it, and at most with its neighbours: the prompts of a growing
//! conversation keep their common prefix. A late system message that the template cannot carry becomes a text
//! of the user in its place. In the leading system text it would change the prompt from its first token on.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, VecDeque};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::tool_call::Ids;
use steersman_request::error::{Error, RequestError, Result};
use steersman_request::{Message, ToolCall};

/// Between texts that are joined.
const BETWEEN: &str = "\n\n";

/// A part of a conversation that a template may have no place for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// The text of the user.
    User,
    /// A system message before all turns.
    System,
    /// Several of them.
    Systems,
    /// A system message after a turn.
    Late,
    /// Messages of the user in a row.
    Users,
    /// Messages of the assistant in a row.
    Assistants,
    /// Messages of the assistant.
    Assistant,
    /// A message of the assistant after all others.
    LastOfAssistant,
    /// A message of the assistant before all of the user.
    Opening,
    /// No message of the user.
    NoUser,
    /// Calls and their results.
    Calls,
    /// Several calls of one message.
    ManyCalls,
    /// A message of the user after results.
    AfterResults,
}

impl Part {
    fn text(self) -> &'static str {
        match self {
            Self::User => "the text of the user",
            Self::System => "system messages",
            Self::Systems => "several system messages",
            Self::Late => "system messages after the first turn",
            Self::Users => "messages of the user in a row",
            Self::Assistants => "messages of the assistant in a row",
            Self::Assistant => "messages of the assistant",
            Self::LastOfAssistant => "a message of the assistant at the end",
            Self::Opening => "a message of the assistant before those of the user",
            Self::NoUser => "a conversation without a message of the user",
            Self::Calls => "calls and results of tools",
            Self::ManyCalls => "several calls in one message",
            Self::AfterResults => "a message of the user after the results of tools",
        }
    }
}

/// Where the text of an assistant's message goes that has calls too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Beside {
    /// It stays.
    #[default]
    Kept,
    /// To a message of its own, before the calls.
    Apart,
    /// Nowhere: the template has no place for it.
    LeftOut,
}

/// How conversations are written for one template. The default changes nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Shape {
    /// Contents are lists of parts.
    pub has_parts: bool,
    /// Arguments of calls are JSON in a string.
    pub arguments_are_text: bool,
    /// What ids of calls must look like; `None` for any.
    pub ids: Option<Ids>,
    /// Results have the name of their tool.
    pub names_results: bool,
    /// The template knows the role `developer`.
    pub has_developer: bool,
    /// System text is the user's: the template has no such role.
    pub system_is_user: bool,
    /// Leading system messages are one.
    pub joins_systems: bool,
    /// Late system messages are the user's.
    pub late_is_user: bool,
    /// Neighbours of the user are one.
    pub joins_users: bool,
    /// Neighbours of the assistant are one.
    pub joins_assistants: bool,
    /// An empty message of the user comes before the first of the assistant.
    pub opens_with_user: bool,
    /// System messages without one of the user are the user's.
    pub needs_user: bool,
    /// Calls and results are texts: the template does not render them.
    pub calls_are_text: bool,
    /// Each call is a message of its own, and its results follow it.
    pub splits_calls: bool,
    /// Text beside calls.
    pub beside: Beside,
    /// Text beside calls and reasoning is part of the reasoning: the template does not take all three.
    pub text_joins_reasoning: bool,
    /// Reasoning of an answer is left out: the template would write it in place of the answer.
    pub answers_without_reasoning: bool,
    /// An empty message of the assistant stands between results and the user.
    pub bridges_results: bool,
    /// What no way carries.
    pub lost: BTreeSet<Part>,
}

/// A conversation as one template reads it.
#[derive(Debug, PartialEq)]
pub(super) struct Written {
    pub messages: Vec<Message>,
    /// What was changed so that a client should know of it.
    pub notes: Vec<String>,
}

fn is_user(message: &Message) -> bool {
    message.role == "user"
}

fn is_assistant(message: &Message) -> bool {
    message.role == "assistant"
}

fn is_result(message: &Message) -> bool {
    message.role == "tool"
}

impl Shape {
    /// Writes a conversation.
    ///
    /// # Errors
    /// [`RequestError::Template`] names what the template would leave out.
    pub fn write(&self, messages: &[Message]) -> Result<Written> {
        let mut notes = Vec::new();
        let messages = self.systems(messages, &mut notes)?;
        let messages = self.calls(messages, &mut notes)?;
        let messages = self.turns(messages)?;
        if messages.last().is_some_and(is_assistant) {
            let note = "the conversation ends with a message of the assistant; the reply does not continue it, \
                        it is the next message";
            notes.push(note.into());
        }
        Ok(Written { messages, notes })
    }

    /// `message` as the template reads it. Reasoning gets both names in use, `reasoning_content` and `thinking`.
    ///
    /// # Errors
    /// [`RequestError::Template`] if it is no JSON, which does not happen.
    pub fn value(&self, message: &Message) -> Result<Value> {
        let mut value = serde_json::to_value(message)
            .map_err(|e| Error::Request(RequestError::Template(e.to_string())))?;
        if let Some(reasoning) = &message.reasoning_content {
            value["thinking"] = reasoning.as_str().into();
        }
        if self.has_parts {
            value["content"] = json!([{"type": "text", "text": message.content}]);
        }
        if self.arguments_are_text {
            for (i, call) in message.tool_calls.iter().enumerate() {
                let arguments = call.function.arguments.to_json();
                value["tool_calls"][i]["function"]["arguments"] = arguments.into();
            }
        }
        Ok(value)
    }

    fn check(&self, part: Part) -> Result<()> {
        if !self.lost.contains(&part) {
            return Ok(());
        }
        let problem = format!("it has no place for {}, which the model would not see", part.text());
        Err(RequestError::Template(problem).into())
    }

    /// Gives system messages their roles, and joins those before all turns.
    fn systems(&self, messages: &[Message], notes: &mut Vec<String>) -> Result<Vec<Message>> {
        let leading = messages.iter().take_while(|message| message.is_system()).count();
        let (leading, turns) = messages.split_at(leading);
        if !leading.is_empty() {
            self.check(Part::System)?;
        }
        if leading.len() > 1 {
            self.check(Part::Systems)?;
        }
        let becomes_user = self.system_is_user || self.needs_user && !turns.iter().any(is_user);
        let mut written: Vec<Message> = Vec::with_capacity(messages.len());
        for message in leading {
            let role = match message.role.as_str() {
                _ if becomes_user => "user",
                "developer" if self.has_developer => "developer",
                _ => "system",
            };
            let message = Message { role: role.into(), ..message.clone() };
            match written.last_mut() {
                Some(last) if self.joins_systems || becomes_user => join(last, message),
                _ => written.push(message),
            }
        }
        if becomes_user && !leading.is_empty() {
            let problem = match self.system_is_user {
                true => "the chat template has no system messages",
                false => "the chat template needs a message of the user",
            };
            notes.push(format!("gave the model the system text as the user's: {problem}"));
        }
        let mut late = 0;
        // Late ones between results, which templates read as one group.
        let mut after_results = Vec::new();
        for (i, message) in turns.iter().enumerate() {
            if !is_result(message) {
                written.append(&mut after_results);
            }
            if !message.is_system() {
                written.push(message.clone());
                continue;
            }
            self.check(Part::Late)?;
            late += 1;
            let is_between = turns.get(i + 1).is_some_and(is_result);
            let role = match message.role.as_str() {
                _ if self.late_is_user => "user",
                "developer" if self.has_developer => "developer",
                _ => "system",
            };
            let message = Message { role: role.into(), ..message.clone() };
            if is_between {
                after_results.push(message);
            } else {
                written.push(message);
            }
        }
        written.append(&mut after_results);
        if late > 0 && self.late_is_user {
            notes.push(format!(
                "gave the model {late} later system message{} as the user's: the chat template has system messages \
                 at the beginning only",
                if late > 1 { "s" } else { "" }
            ));
        }
        Ok(written)
    }

    /// Gives calls and results their ids, names and order.
    fn calls(&self, messages: Vec<Message>, notes: &mut Vec<String>) -> Result<Vec<Message>> {
        if !messages.iter().any(|message| !message.tool_calls.is_empty() || is_result(message)) {
            return Ok(messages);
        }
        self.check(Part::Calls)?;
        let mut messages = matched(messages, self.names_results);
        if let Some(ids) = self.ids {
            rename(&mut messages, ids);
        }
        if self.calls_are_text {
            notes.push(
                "gave the model calls and results of tools as text: the chat template has none"
                    .into(),
            );
            return Ok(messages.into_iter().map(as_text).collect());
        }
        if messages.iter().any(|message| message.tool_calls.len() > 1) {
            self.check(Part::ManyCalls)?;
        }
        if self.splits_calls {
            messages = split(messages);
        }
        let mut written = Vec::with_capacity(messages.len());
        let mut left_out = 0;
        for mut message in messages {
            if message.tool_calls.is_empty() || message.content.trim().is_empty() {
                written.push(message);
                continue;
            }
            if self.text_joins_reasoning && message.reasoning_content.is_some() {
                let reasoning = message.reasoning_content.get_or_insert_default();
                append(reasoning, &std::mem::take(&mut message.content));
            } else if self.beside == Beside::Apart {
                let calls = std::mem::take(&mut message.tool_calls);
                let name = message.name.clone();
                written.push(message);
                message = Message { tool_calls: calls, name, ..plain("assistant", "") };
            } else if self.beside == Beside::LeftOut {
                left_out += 1;
            }
            written.push(message);
        }
        if left_out > 0 {
            notes.push(format!(
                "the model does not see the text of {left_out} earlier message{} with calls: the chat template has no \
                 place for it",
                if left_out > 1 { "s" } else { "" }
            ));
        }
        Ok(written)
    }

    /// Joins neighbours, and adds the empty messages that a template needs between others.
    fn turns(&self, messages: Vec<Message>) -> Result<Vec<Message>> {
        let mut written: Vec<Message> = Vec::with_capacity(messages.len() + 1);
        self.check(Part::User)?;
        if !messages.iter().any(is_user) {
            self.check(Part::NoUser)?;
        }
        if messages.iter().any(is_assistant) {
            self.check(Part::Assistant)?;
        }
        if messages.last().is_some_and(is_assistant) {
            self.check(Part::LastOfAssistant)?;
        }
        let mut has_turn = false;
        for mut message in messages {
            let is_answer = message.tool_calls.is_empty() && !message.content.is_empty();
            if self.answers_without_reasoning && is_answer {
                message.reasoning_content = None;
            }
            if !has_turn && (is_assistant(&message) || is_result(&message)) {
                self.check(Part::Opening)?;
                if self.opens_with_user {
                    written.push(plain("user", ""));
                }
            }
            has_turn |= !message.is_system();
            let Some(last) = written.last_mut() else {
                written.push(message);
                continue;
            };
            let follows_results = is_result(last) || !last.tool_calls.is_empty();
            if is_user(&message) && follows_results {
                self.check(Part::AfterResults)?;
                if self.bridges_results {
                    written.push(plain("assistant", ""));
                }
            } else if is_user(&message) && is_user(last) {
                self.check(Part::Users)?;
                if self.joins_users {
                    join(last, message);
                    continue;
                }
            } else if is_assistant(&message) && is_assistant(last) && last.tool_calls.is_empty() {
                self.check(Part::Assistants)?;
                if self.joins_assistants {
                    join(last, message);
                    continue;
                }
            }
            written.push(message);
        }
        Ok(written)
    }
}

fn plain(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into(), ..Message::default() }
}

/// Appends `more` to `text`, with an empty line between them.
fn append(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push_str(BETWEEN);
    }
    text.push_str(more);
}

/// Appends a message to one of the same speaker.
fn join(first: &mut Message, second: Message) {
    append(&mut first.content, &second.content);
    if let Some(reasoning) = second.reasoning_content {
        append(first.reasoning_content.get_or_insert_default(), &reasoning);
    }
    first.tool_calls.extend(second.tool_calls);
    if first.name != second.name {
        first.name = None;
    }
}

/// The messages, in which every call has an id, and every result that of its call. A result without one, as
/// Ollama's clients send them, belongs to the first open call, of its tool if it names that.
fn matched(mut messages: Vec<Message>, names_results: bool) -> Vec<Message> {
    let mut open: VecDeque<(String, String)> = VecDeque::new();
    let mut calls = 0;
    for message in &mut messages {
        if is_assistant(message) && !message.tool_calls.is_empty() {
            open.clear();
            for call in &mut message.tool_calls {
                if call.id.is_empty() {
                    call.id = format!("call_{calls}");
                }
                calls += 1;
                open.push_back((call.id.clone(), call.function.name.clone()));
            }
        }
        if !is_result(message) {
            continue;
        }
        let id = message.tool_call_id.as_deref().filter(|id| !id.is_empty());
        let at = match (id, &message.name) {
            (Some(id), _) => open.iter().position(|(open, _)| open == id),
            (None, Some(name)) => open.iter().position(|(_, called)| called == name).or(Some(0)),
            (None, None) => Some(0),
        };
        if let Some((id, name)) = at.and_then(|at| open.remove(at)) {
            message.tool_call_id = Some(id);
            if names_results {
                message.name.get_or_insert(name);
            }
        }
    }
    messages
}

/// Gives calls and results ids of the kind that the template demands; those that are of it stay. Equal ids
/// become equal ones, whatever else the conversation has, so that its prompts keep their prefix.
fn rename(messages: &mut [Message], ids: Ids) {
    let mut renamed: HashMap<String, String> = HashMap::new();
    let mut calls = 0;
    for message in messages {
        for call in &mut message.tool_calls {
            let id = match ids {
                Ids::Function => function_id(call, calls),
                Ids::Nine | Ids::Call => nine(&call.id).into_owned(),
            };
            renamed.insert(std::mem::replace(&mut call.id, id.clone()), id);
            calls += 1;
        }
        if is_result(message) {
            let id = message.tool_call_id.take().unwrap_or_default();
            let unknown = || match ids {
                Ids::Function => id.clone(),
                Ids::Nine | Ids::Call => nine(&id).into_owned(),
            };
            message.tool_call_id = Some(renamed.get(&id).cloned().unwrap_or_else(unknown));
        }
    }
}

/// `id` if it is nine letters and digits, else nine of its digest.
fn nine(id: &str) -> Cow<'_, str> {
    if id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Cow::Borrowed(id);
    }
    const DIGITS: &[u8; 62] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    let digest = Sha256::digest(id.as_bytes());
    let digit = |byte: &u8| char::from(DIGITS[usize::from(*byte) % DIGITS.len()]);
    Cow::Owned(digest.iter().take(9).map(digit).collect())
}

/// The id of `call`, the `number`th of the conversation: its own if it is `functions.name:0`.
fn function_id(call: &ToolCall, number: usize) -> String {
    let name = &call.function.name;
    let of_name = call.id.strip_prefix("functions.").and_then(|id| id.strip_prefix(name.as_str()));
    let digits = of_name.and_then(|id| id.strip_prefix(':')).unwrap_or_default();
    if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return call.id.clone();
    }
    format!("functions.{name}:{number}")
}

/// A message with calls, or a result, as text in the tags that models without a format of their own use.
fn as_text(mut message: Message) -> Message {
    if is_result(&message) {
        return plain("user", &format!("<tool_response>\n{}\n</tool_response>", message.content));
    }
    for call in std::mem::take(&mut message.tool_calls) {
        let call = json!({"name": call.function.name, "arguments": call.function.arguments});
        append(&mut message.content, &format!("<tool_call>\n{call}\n</tool_call>"));
    }
    message
}

/// The messages, in which none has more than one call: each is followed by its results.
fn split(messages: Vec<Message>) -> Vec<Message> {
    let mut written = Vec::with_capacity(messages.len());
    let mut messages = messages.into_iter().peekable();
    while let Some(mut message) = messages.next() {
        if message.tool_calls.len() < 2 {
            written.push(message);
            continue;
        }
        let mut results = Vec::new();
        while let Some(result) = messages.next_if(is_result) {
            results.push(result);
        }
        for call in std::mem::take(&mut message.tool_calls) {
            let id = call.id.clone();
            let next = plain("assistant", "");
            written.push(Message { tool_calls: vec![call], ..message });
            message = next;
            let is_of_call = |result: &&Message| result.tool_call_id.as_deref() == Some(&id);
            written.extend(results.iter().filter(is_of_call).cloned());
            results.retain(|result| !is_of_call(&result));
        }
        written.append(&mut results);
    }
    written
}
