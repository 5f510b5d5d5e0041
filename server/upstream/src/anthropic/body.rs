//! A request as a body of messages.

use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use steersman_policy_host::SavePoint;
use steersman_request::{Arguments, Effort, Form, Message, Request, RequestError};

use crate::ask::{Ask, Continuation};
use crate::capability::{Capabilities, FormKind, Lacks, ReasoningField};
use crate::memory::Memory;
use crate::openai;

/// Smallest budget of reasoning that the API takes.
const LEAST_BUDGET: u32 = 1024;

/// Smallest `top_p` that the API takes with reasoning.
const LEAST_TOP_P: f32 = 0.95;

/// Seconds for which state is saved unless it is asked for an hour.
const SHORT_S: u32 = 300;

/// A body without its messages, and these. Arguments of calls keep all digits of their numbers.
#[derive(Serialize)]
struct Body {
    #[serde(flatten)]
    fields: Map<String, Value>,
    messages: Vec<Turn>,
}

#[derive(Serialize)]
struct Turn {
    role: &'static str,
    content: Vec<Block>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Block {
    Call {
        r#type: &'static str,
        id: String,
        name: String,
        #[serde(serialize_with = "all_digits")]
        input: Arguments,
    },
    Other(Value),
}

fn all_digits<S: Serializer>(arguments: &Arguments, serializer: S) -> Result<S::Ok, S::Error> {
    match RawValue::from_string(arguments.to_json()) {
        Ok(json) => json.serialize(serializer),
        // Values are JSON in any case.
        Err(_) => arguments.serialize(serializer),
    }
}

/// Refuses what the client asks for and no field of this API carries.
///
/// # Errors
/// Names the field.
pub fn check(
    request: &Request,
    capabilities: &Capabilities,
    lacks: &Lacks,
) -> Result<(), RequestError> {
    let own = [
        (request.penalties.presence != 0.0, "presence_penalty"),
        (request.penalties.frequency != 0.0, "frequency_penalty"),
        (!request.biases.is_empty(), "logit_bias"),
    ];
    if let Some((_, field)) = own.into_iter().find(|(is_lacking, _)| *is_lacking) {
        return Err(lacks.field(field));
    }
    // A form over a call that must be made would never be reached.
    if let Some(format) =
        request.response_format.as_ref().filter(|_| request.tool_choice.is_required)
    {
        return Err(lacks.form(format.field, FormKind::of(&format.form)));
    }
    openai::check(request, capabilities, lacks)
}

/// The body of a streamed request, and notes on what was left out of it.
pub fn body(ask: &Ask<'_>, notes: &mut Vec<String>) -> String {
    let request = ask.request;
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| {
        fields.insert(name.into(), value);
    };
    set("model", ask.model.into());
    set("stream", true.into());
    let (mut system, mut messages) = turns(request, ask.memory, notes);
    save(request, &mut system, &mut messages);
    if !system.is_empty() {
        set("system", system.into());
    }
    if let Some(Continuation { answer, .. }) = ask.continuation {
        // The API refuses white space at the end of a beginning.
        let answer = answer.trim_end();
        if !answer.is_empty() {
            let block = Block::Other(json!({"type": "text", "text": answer}));
            messages.push(Turn { role: "assistant", content: vec![block] });
        }
    }
    let mut output = Map::new();
    let thinking = thinking(ask, &mut output, notes);
    let max_tokens = match thinking["budget_tokens"].as_u64() {
        // The budget must leave something for the answer.
        Some(budget) => ask.max_tokens.max(u32::try_from(budget).unwrap_or(u32::MAX / 8) + 1),
        None => ask.max_tokens,
    };
    set("max_tokens", max_tokens.into());
    let is_thinking = matches!(thinking["type"].as_str(), Some("enabled" | "adaptive"));
    if !thinking.is_null() {
        set("thinking", thinking);
    }
    tools(request, &mut set);
    let sampling = ask.sampling;
    for (name, value) in [("temperature", sampling.temperature), ("top_p", sampling.top_p)] {
        match value {
            Some(value) if is_thinking && (name == "temperature" || value < LEAST_TOP_P) => {
                let note = format!(
                    "left out `{name}` {value}, which the upstream does not take with reasoning"
                );
                notes.push(note);
            }
            // The API's range ends at 1.
            Some(value) => set(name, (f64::from((value.min(1.0) * 1e4).round()) / 1e4).into()),
            None => {}
        }
    }
    match sampling.top_k.filter(|k| *k > 0) {
        Some(_) if is_thinking => {
            notes.push("left out `top_k`, which the upstream does not take with reasoning".into());
        }
        Some(top_k) => set("top_k", top_k.into()),
        None => {}
    }
    if sampling.min_p.is_some_and(|p| p > 0.0) {
        notes.push("left out `min_p`, which the upstream does not read".into());
    }
    if !request.stop.is_empty() {
        set("stop_sequences", request.stop.clone().into());
    }
    if let Some(Form::JsonSchema(schema)) = request.response_format.as_ref().map(|one| &one.form) {
        output.insert("format".into(), json!({"type": "json_schema", "schema": schema}));
    }
    if !output.is_empty() {
        set("output_config", output.into());
    }
    serde_json::to_string(&Body { fields, messages }).expect("bodies have string keys only")
}

/// The value of `thinking`; null leaves it to the upstream.
fn thinking(ask: &Ask<'_>, output: &mut Map<String, Value>, notes: &mut Vec<String>) -> Value {
    let Ask { request, capabilities, reasoning, budget, .. } = *ask;
    if let Some(effort) = request.effort.filter(|effort| effort.reasons())
        && capabilities.reasoning == ReasoningField::Adaptive
    {
        let effort = match effort {
            Effort::Minimal => Effort::Low,
            effort => effort,
        };
        output.insert("effort".into(), effort.word().into());
    }
    if reasoning != Some(true) {
        return Value::Null;
    }
    if request.tool_choice.is_required {
        notes.push(
            "the model does not reason: the upstream does not while a tool call is demanded".into(),
        );
        return Value::Null;
    }
    if ask.continuation.is_some() {
        return Value::Null;
    }
    if ask.lacks_blocks() {
        notes.push(
            "the model does not reason: this server does not have its reasoning before the calls of this turn any more"
                .into(),
        );
        return Value::Null;
    }
    match capabilities.reasoning {
        ReasoningField::Adaptive => json!({"type": "adaptive"}),
        ReasoningField::Budget => {
            let of_effort = || request.effort.and_then(Effort::budget);
            let half = ask.max_tokens / 2;
            let budget = budget.or_else(of_effort).unwrap_or(half);
            // Whoever limits the reply limits its reasoning, too.
            let budget = budget.min(ask.max_tokens.saturating_sub(1)).max(LEAST_BUDGET);
            json!({"type": "enabled", "budget_tokens": budget})
        }
        ReasoningField::Never | ReasoningField::Effort | ReasoningField::Template => {
            notes.push("the upstream cannot be told to reason".into());
            Value::Null
        }
    }
}

fn tools(request: &Request, set: &mut impl FnMut(&str, Value)) {
    if request.tools.is_empty() {
        return;
    }
    let choice = &request.tool_choice;
    let name_of = |tool: &Value| tool["function"]["name"].as_str().unwrap_or_default().to_string();
    let is_allowed =
        |name: &String| choice.allowed.as_ref().is_none_or(|allowed| allowed.contains(name));
    let allowed: Vec<String> = request.tools.iter().map(name_of).filter(is_allowed).collect();
    let is_none = allowed.is_empty();
    // The definitions stay if none may be called: earlier calls of the conversation name them.
    let offered = request.tools.iter().filter(|tool| is_none || allowed.contains(&name_of(tool)));
    let tool = |tool: &Value| {
        let function = &tool["function"];
        let schema = match &function["parameters"] {
            schema @ Value::Object(_) => schema.clone(),
            _ => json!({"type": "object"}),
        };
        let mut out = json!({"name": function["name"], "input_schema": schema});
        if let Some(description) = function["description"].as_str() {
            out["description"] = description.into();
        }
        out
    };
    set("tools", offered.map(tool).collect());
    let mut choose = match (&allowed[..], choice.is_required) {
        ([], _) => json!({"type": "none"}),
        ([only], true) => json!({"type": "tool", "name": only}),
        (_, true) => json!({"type": "any"}),
        (_, false) => json!({"type": "auto"}),
    };
    if choice.is_single && !is_none {
        choose["disable_parallel_tool_use"] = true.into();
    }
    if choice.is_required || choice.is_single || is_none {
        set("tool_choice", choose);
    }
}

/// System text and turns. Messages of one role in a row are one turn.
fn turns(request: &Request, memory: &Memory, notes: &mut Vec<String>) -> (Vec<Value>, Vec<Turn>) {
    let (mut system, mut turns): (Vec<Value>, Vec<Turn>) = (Vec::new(), Vec::new());
    let text = |text: &str| Block::Other(json!({"type": "text", "text": text}));
    for message in &request.messages {
        let (role, content) = match message.role.as_str() {
            "system" | "developer" => {
                if message.content.is_empty() {
                    continue;
                }
                if !turns.is_empty() && !notes.iter().any(|note| note.starts_with("a late system"))
                {
                    notes.push("a late system message was moved to the system text: the upstream has no other".into());
                }
                system.push(json!({"type": "text", "text": message.content}));
                continue;
            }
            "assistant" => ("assistant", of_assistant(message, memory)),
            "tool" => {
                let mut result = json!({
                    "type": "tool_result",
                    "tool_use_id": message.tool_call_id.as_deref().unwrap_or_default(),
                });
                if !message.content.is_empty() {
                    result["content"] = message.content.as_str().into();
                }
                ("user", vec![Block::Other(result)])
            }
            _ if message.content.is_empty() => continue,
            _ => ("user", vec![text(&message.content)]),
        };
        if content.is_empty() {
            continue;
        }
        match turns.last_mut().filter(|turn| turn.role == role) {
            Some(turn) => turn.content.extend(content),
            None => turns.push(Turn { role, content }),
        }
    }
    (system, turns)
}

/// The blocks of a message of the assistant. Its reasoning comes back only as the upstream wrote it.
fn of_assistant(message: &Message, memory: &Memory) -> Vec<Block> {
    let mut blocks: Vec<Block> = match message.tool_calls.first() {
        Some(call) => memory.before_call(&call.id).into_iter().map(Block::Other).collect(),
        None => Vec::new(),
    };
    if !message.content.trim().is_empty() {
        blocks.push(Block::Other(json!({"type": "text", "text": message.content})));
    }
    blocks.extend(message.tool_calls.iter().map(|call| Block::Call {
        r#type: "tool_use",
        id: call.id.clone(),
        name: call.function.name.clone(),
        input: call.function.arguments.clone(),
    }));
    blocks
}

/// Marks the positions whose state the client wants saved.
fn save(request: &Request, system: &mut [Value], turns: &mut [Turn]) {
    let control = |seconds: u32| match seconds > SHORT_S {
        true => json!({"type": "ephemeral", "ttl": "1h"}),
        false => json!({"type": "ephemeral"}),
    };
    let longest = |is_of: fn(SavePoint) -> bool| {
        let seconds = request.retain.iter().filter(|one| is_of(one.at)).map(|one| one.seconds);
        seconds.max()
    };
    let of_prompt = longest(|at| !matches!(at, SavePoint::System));
    let of_system = longest(|at| matches!(at, SavePoint::System));
    // The API refuses a time after a shorter one.
    let of_system = of_system.map(|seconds| seconds.max(of_prompt.unwrap_or(0)));
    if let (Some(seconds), Some(last)) = (of_system, system.last_mut()) {
        last["cache_control"] = control(seconds);
    }
    let last = turns.last_mut().and_then(|turn| turn.content.last_mut());
    if let (Some(seconds), Some(Block::Other(last))) = (of_prompt, last) {
        last["cache_control"] = control(seconds);
    }
}
