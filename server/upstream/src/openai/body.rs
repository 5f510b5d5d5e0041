//! A request as a body of chat completions.

use serde_json::{Map, Value, json};
use steersman_request::{Effort, Form, Message, Request, RequestError, ToolCall};

use crate::ask::{Ask, Continuation};
use crate::capability::{Capabilities, Continues, FormKind, Kind, Lacks, ReasoningField};
use crate::memory::Memory;

/// Refuses what the client asks for and no field of this upstream carries.
///
/// # Errors
/// Names the field.
pub fn check(
    request: &Request,
    capabilities: &Capabilities,
    lacks: &Lacks,
) -> Result<(), RequestError> {
    let Capabilities {
        forms,
        tools,
        tool_choice,
        logprobs,
        seed,
        top_k,
        sampling,
        template_variables,
        ..
    } = capabilities;
    let own = [
        (request.sampling.top_k.is_some_and(|k| k > 0) && !top_k, "top_k"),
        (request.sampling.min_p.is_some_and(|p| p > 0.0) && !sampling, "min_p"),
        (request.min_tokens > 0 && !sampling, "min_tokens"),
        (request.ignores_end && !sampling, "ignore_eos"),
        (has_repetition(request) && !sampling, "repetition_penalty"),
        // Ollama's clients have a window with or without a penalty.
        (has_repetition(request) && request.penalties.window > 0, "repetition_context_size"),
        (!request.template_variables.is_empty() && !template_variables, "chat_template_kwargs"),
        (request.logprobs.is_some() && !logprobs, "logprobs"),
        (request.seed.is_some() && !seed, "seed"),
        (!request.tools.is_empty() && !tools, "tools"),
        (request.tool_choice.is_required && !tool_choice, "tool_choice"),
    ];
    if let Some((_, field)) = own.into_iter().find(|(is_lacking, _)| *is_lacking) {
        return Err(lacks.field(field));
    }
    match &request.response_format {
        Some(format) if !forms.contains(&FormKind::of(&format.form)) => {
            Err(lacks.form(format.field, FormKind::of(&format.form)))
        }
        _ => Ok(()),
    }
}

fn has_repetition(request: &Request) -> bool {
    (request.penalties.repetition - 1.0).abs() > f32::EPSILON
}

/// The body of a streamed request, and notes on what was left out of it.
pub fn body(ask: &Ask<'_>, notes: &mut Vec<String>) -> String {
    let Ask { request, capabilities, .. } = *ask;
    let mut body = Map::new();
    let mut set = |name: &str, value: Value| {
        body.insert(name.into(), value);
    };
    set("model", ask.model.into());
    let of_client = Continuation::of_client(request);
    let mut messages = messages(request, capabilities, ask.memory, notes);
    if of_client.is_some() {
        messages.pop();
    }
    if let Some(continuation) = ask.continuation.or(of_client.as_ref()) {
        messages.push(continued(continuation, capabilities.kind));
        if capabilities.continues == Continues::Told {
            set("continue_final_message", true.into());
            set("add_generation_prompt", false.into());
        }
    }
    set("messages", messages.into());
    set("stream", true.into());
    let mut stream_options = json!({"include_usage": true});
    if capabilities.kind == Kind::Vllm {
        // So that a stream that is cut has been counted.
        stream_options["continuous_usage_stats"] = true.into();
    }
    set("stream_options", stream_options);
    // Servers of before the newer name know this one; OpenAI's reasoning models know the newer one only.
    let limit = match capabilities.kind {
        Kind::OpenAi => "max_completion_tokens",
        _ => "max_tokens",
    };
    set(limit, ask.max_tokens.into());
    tools(request, capabilities, &mut set);
    let sampling = ask.sampling;
    let numbers = [("temperature", sampling.temperature), ("top_p", sampling.top_p)];
    for (name, value) in numbers {
        if let Some(value) = value {
            set(name, number(value));
        }
    }
    let further = [
        ("top_k", sampling.top_k.map(Value::from), capabilities.top_k),
        ("min_p", sampling.min_p.map(number), capabilities.sampling),
    ];
    for (name, value, is_known) in further {
        match value {
            Some(value) if is_known => set(name, value),
            // The client's was refused: this one is of a policy or the profile.
            Some(_) => notes.push(format!("left out `{name}`, which the upstream does not read")),
            None => {}
        }
    }
    let penalties = request.penalties;
    for (name, value) in
        [("presence_penalty", penalties.presence), ("frequency_penalty", penalties.frequency)]
    {
        if value != 0.0 {
            set(name, number(value));
        }
    }
    if has_repetition(request) {
        let name = match capabilities.kind {
            Kind::LlamaCpp => "repeat_penalty",
            _ => "repetition_penalty",
        };
        set(name, number(penalties.repetition));
    }
    if request.min_tokens > 0 {
        set("min_tokens", request.min_tokens.into());
    }
    if request.ignores_end {
        set("ignore_eos", true.into());
    }
    if !request.biases.is_empty() {
        let biases: Map<String, Value> =
            request.biases.iter().map(|bias| (bias.token.to_string(), number(bias.bias))).collect();
        set("logit_bias", biases.into());
    }
    if let Some(top) = request.logprobs {
        set("logprobs", true.into());
        set("top_logprobs", top.into());
    }
    if let Some(seed) = request.seed {
        // As the client sent it: a negative one stands for its two's complement.
        set("seed", seed.cast_signed().into());
    }
    if !request.stop.is_empty() {
        set("stop", request.stop.clone().into());
    }
    if let Some(format) = &request.response_format {
        let (name, value) = form(&format.form, capabilities.kind);
        set(name, value);
    }
    let mut variables = request.template_variables.clone();
    reasoning(ask, &mut variables, &mut set, notes);
    if !variables.is_empty() {
        set("chat_template_kwargs", variables.into());
    }
    Value::Object(body).to_string()
}

/// A number as it is written in decimals: as f64, an f32 prints like 0.699999988079071.
fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// Sets what tells the upstream whether, and how much, to reason.
fn reasoning(
    ask: &Ask<'_>,
    variables: &mut Map<String, Value>,
    set: &mut impl FnMut(&str, Value),
    notes: &mut Vec<String>,
) {
    let Ask { request, capabilities, reasoning, budget, .. } = *ask;
    // What closed reasoning is not begun again.
    let is_closed = ask.continuation.is_some_and(|continuation| !continuation.is_open);
    let is_always = capabilities.continues == Continues::Always;
    match capabilities.reasoning {
        // Where the reasoning is closed, the message says so; a server that continues in any case renders another.
        ReasoningField::Template if is_closed && is_always => {
            variables.insert("enable_thinking".into(), false.into());
        }
        ReasoningField::Template if is_closed && capabilities.kind == Kind::Steersman => {}
        ReasoningField::Template => {
            if let Some(wish) = reasoning {
                variables.insert("enable_thinking".into(), wish.into());
            }
        }
        ReasoningField::Effort => {
            let effort = match (reasoning, request.effort) {
                (Some(false), _) => Some(Effort::None),
                (_, Some(effort)) => Some(effort),
                (Some(true), None) => Some(of_budget(budget)),
                (None, None) => None,
            };
            // OpenAI has no level above.
            let effort = effort.map(|effort| match effort {
                Effort::Max => Effort::XHigh,
                effort => effort,
            });
            if let Some(effort) = effort {
                set("reasoning_effort", effort.word().into());
            }
        }
        ReasoningField::Never | ReasoningField::Budget | ReasoningField::Adaptive => {
            if reasoning.is_some() {
                notes.push("the upstream cannot be told whether to reason".into());
            }
        }
    }
    if let (Some(field), Some(budget)) = (&capabilities.budget_field, budget.filter(|_| !is_closed))
    {
        set(field, budget.into());
    }
}

/// The effort that is likely to stay within a budget.
fn of_budget(budget: Option<u32>) -> Effort {
    match budget {
        Some(budget) if budget <= Effort::Low.budget().unwrap_or(0) => Effort::Low,
        Some(budget) if budget <= Effort::Medium.budget().unwrap_or(0) => Effort::Medium,
        Some(_) | None => Effort::High,
    }
}

fn tools(request: &Request, capabilities: &Capabilities, set: &mut impl FnMut(&str, Value)) {
    let choice = &request.tool_choice;
    if request.tools.is_empty() {
        return;
    }
    let is_allowed = |tool: &&Value| {
        let name = tool["function"]["name"].as_str().unwrap_or_default();
        choice.allowed.as_ref().is_none_or(|allowed| allowed.iter().any(|one| one == name))
    };
    let allowed: Vec<Value> = request.tools.iter().filter(is_allowed).cloned().collect();
    if allowed.is_empty() {
        // A tool that it sees is called by an upstream that does not read the choice.
        if capabilities.tool_choice {
            // The definitions stay: earlier calls of the conversation name them.
            set("tools", request.tools.clone().into());
            set("tool_choice", "none".into());
        }
        return;
    }
    let only = match &allowed[..] {
        [only] if choice.is_required => Some(only["function"]["name"].clone()),
        _ => None,
    };
    set("tools", allowed.into());
    match (choice.is_required, only) {
        // llama.cpp reads only words, and takes anything else for `auto`; the tool is the only one that it gets.
        (true, Some(name)) if capabilities.kind != Kind::LlamaCpp => {
            set("tool_choice", json!({"type": "function", "function": {"name": name}}));
        }
        (true, _) => set("tool_choice", "required".into()),
        (false, _) => {}
    }
    if choice.is_single {
        set("parallel_tool_calls", false.into());
    }
}

/// The field of a form, and its value.
fn form(form: &Form, kind: Kind) -> (&'static str, Value) {
    let schema = |schema: &Value| {
        let named = json!({"name": "answer", "schema": schema, "strict": true});
        json!({"type": "json_schema", "json_schema": named})
    };
    match (form, kind) {
        (Form::JsonObject, _) => ("response_format", json!({"type": "json_object"})),
        (Form::JsonSchema(value), _) => ("response_format", schema(value)),
        (Form::Regex(regex), Kind::Sglang) => ("regex", regex.as_str().into()),
        (Form::Lark(grammar), Kind::Sglang) => ("ebnf", grammar.as_str().into()),
        (Form::Lark(grammar), Kind::LlamaCpp) => ("grammar", grammar.as_str().into()),
        (Form::Regex(regex), _) => ("structured_outputs", json!({"regex": regex})),
        (Form::Lark(grammar), _) => ("structured_outputs", json!({"grammar": grammar})),
        (Form::Choice(texts), _) => ("structured_outputs", json!({"choice": texts})),
    }
}

fn messages(
    request: &Request,
    capabilities: &Capabilities,
    memory: &Memory,
    notes: &mut Vec<String>,
) -> Vec<Value> {
    let drops_reasoning = !capabilities.earlier_reasoning
        && request.messages.iter().any(|message| message.reasoning_content.is_some());
    if drops_reasoning {
        notes.push(
            "left out the reasoning of earlier messages, which the upstream does not read".into(),
        );
    }
    request.messages.iter().map(|one| message(one, capabilities, memory)).collect()
}

fn message(message: &Message, capabilities: &Capabilities, memory: &Memory) -> Value {
    // All servers know this role; OpenAI takes it for the newer one.
    let role = if message.role == "developer" { "system" } else { &message.role };
    let mut out = json!({"role": role, "content": message.content});
    if !message.tool_calls.is_empty() {
        if message.content.is_empty() {
            out["content"] = Value::Null;
        }
        let call = |call: &ToolCall| {
            let arguments = call.function.arguments.to_json();
            let function = json!({"name": call.function.name, "arguments": arguments});
            let mut out = json!({"id": call.id, "type": "function", "function": function});
            if let Some(extra) = memory.of_call(&call.id) {
                out["extra_content"] = extra;
            }
            out
        };
        out["tool_calls"] = message.tool_calls.iter().map(call).collect();
    }
    if let Some(id) = &message.tool_call_id {
        out["tool_call_id"] = id.as_str().into();
    }
    if let Some(name) = message.name.as_ref().filter(|_| role != "tool") {
        out["name"] = name.as_str().into();
    }
    if let Some(reasoning) =
        message.reasoning_content.as_ref().filter(|_| capabilities.earlier_reasoning)
    {
        out["reasoning_content"] = reasoning.as_str().into();
    }
    out
}

/// The message that the upstream continues.
fn continued(continuation: &Continuation, kind: Kind) -> Value {
    let Continuation { reasoning, is_open, answer } = continuation;
    if kind == Kind::Steersman {
        let mut message = json!({"role": "assistant", "content": answer});
        if *is_open {
            message["content"] = Value::Null;
        }
        if *is_open || !reasoning.is_empty() {
            message["reasoning_content"] = reasoning.as_str().into();
        }
        return message;
    }
    // As chat templates write reasoning.
    let reasoning = reasoning.trim_matches('\n');
    let content = match (is_open, reasoning.is_empty()) {
        (true, _) => format!("<think>\n{reasoning}"),
        (false, true) => answer.clone(),
        (false, false) => format!("<think>\n{reasoning}\n</think>\n\n{answer}"),
    };
    json!({"role": "assistant", "content": content})
}
