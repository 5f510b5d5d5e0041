//! Scenarios with tools.

use serde_json::{Value, json};

use super::{Case, Plan, Verdict, Visit, excerpt, has_word};
use crate::client::{Chat, assistant, user};
use crate::prose::{CAPITALS, ITEMS, NAMES, Pick, tools};
use crate::stream::Reply;
use crate::suite::pid_of;

/// Tokens of the tool schema.
const SCHEMA: usize = 12_000;
const REPLY: usize = 96;

pub fn schema(plan: &Plan) -> Vec<Case> {
    let count = plan.tools(SCHEMA);
    let run = move |visit: &mut Visit| {
        let mut pick = visit.pick("schema");
        let tools = tools(&mut pick, count);
        let asked = pick.some(CAPITALS, 3);
        let ask = |visit: &mut Visit, case: &str, (country, capital): (&str, &str)| {
            let chat = Chat {
                messages: vec![user(format!("What is the capital of {country}?"))],
                max_tokens: 32,
                thinking: Some(false),
                tools: tools.clone(),
                ..Chat::default()
            };
            visit.ask(case, &chat, |reply| has_word(reply, capital));
        };
        ask(visit, "cold", asked[0]);
        ask(visit, "warm", asked[1]);
        let Some(restart) = visit.restart else {
            visit.skip("restart", "no command restarts the server (--restart)");
            return;
        };
        if let Err(error) = restart() {
            let sample = visit.sample("restart");
            visit.fail(sample, format!("the restart failed: {error:#}"));
            return;
        }
        // The process is another one now.
        visit.pid = pid_of(visit.client);
        // Loads and compiles what the server does only for its first request.
        let _ = visit.client.chat(&Chat::ask("Hello", 4));
        ask(visit, "restart", asked[2]);
    };
    vec![Case::new("schema", SCHEMA + REPLY + 128, run)]
}

/// A tool, its parameter, a question that calls for it, and what it returns.
struct Step {
    tool: &'static str,
    parameter: &'static str,
    value: &'static str,
    question: String,
    result: Value,
    /// A word that the answer has.
    word: String,
}

fn step(pick: &mut Pick) -> Step {
    match pick.below(3) {
        0 => {
            let (city, degrees) = (pick.one(CAPITALS).1, pick.between(2, 35));
            Step {
                tool: "get_weather",
                parameter: "city",
                value: city,
                question: format!("What is the weather in {city}?"),
                result: json!({"sky": pick.one(&["sunny", "rainy", "cloudy"]), "degrees": degrees}),
                word: degrees.to_string(),
            }
        }
        1 => {
            let (item, price) = (pick.one(ITEMS), pick.between(2, 99));
            Step {
                tool: "get_price",
                parameter: "item",
                value: item,
                question: format!("How much do {item} cost?"),
                result: json!({"price": price}),
                word: price.to_string(),
            }
        }
        _ => {
            let (name, city) = (pick.one(NAMES), pick.one(CAPITALS).1);
            Step {
                tool: "find_person",
                parameter: "name",
                value: name,
                question: format!("Where does {name} live?"),
                result: json!({"city": city}),
                word: city.into(),
            }
        }
    }
}

/// The tools that steps call.
fn office() -> Vec<Value> {
    let tool = |name: &str, parameter: &str| {
        json!({"type": "function", "function": {
            "name": name,
            "description": name.replace('_', " "),
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"}},
                "required": [parameter],
            },
        }})
    };
    vec![tool("get_weather", "city"), tool("get_price", "item"), tool("find_person", "name")]
}

/// Right if the reply is one call of the tool with the value.
fn calls(reply: &Reply, step: &Step) -> Verdict {
    let [call] = &reply.calls[..] else {
        let count = reply.calls.len();
        return Err(format!("{count} calls instead of one, and {}", excerpt(&reply.answer)));
    };
    let arguments: Value = serde_json::from_str(&call.arguments)
        .map_err(|error| format!("the arguments are not JSON ({error}): {}", call.arguments))?;
    if call.name == step.tool && arguments == json!({step.parameter: step.value}) {
        return Ok(());
    }
    Err(format!("called {}({arguments}) instead of {}({})", call.name, step.tool, step.value))
}

pub fn agent(plan: &Plan) -> Vec<Case> {
    let steps = if plan.quick { 1 } else { 20 };
    let run = move |visit: &mut Visit| {
        let mut pick = visit.pick("steps");
        let mut chat =
            Chat { max_tokens: REPLY, thinking: Some(false), tools: office(), ..Chat::default() };
        for number in 0..steps {
            let step = step(&mut pick);
            chat.messages.push(user(&step.question));
            visit.ask("call", &chat, |reply| calls(reply, &step));
            // The conversation goes on with the expected call and answer, whatever the reply was:
            // all servers then read the same prompts.
            let id = format!("call_{number}");
            let arguments = json!({step.parameter: step.value}).to_string();
            chat.messages.push(json!({"role": "assistant", "content": "", "tool_calls": [{
                "id": id, "type": "function",
                "function": {"name": step.tool, "arguments": arguments},
            }]}));
            let result = step.result.to_string();
            chat.messages.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
            let reply = visit.ask("answer", &chat, |reply| has_word(reply, &step.word));
            let answer = reply.map(|reply| reply.answer).filter(|answer| !answer.is_empty());
            chat.messages.push(assistant(answer.unwrap_or(result)));
        }
    };
    vec![Case::new("loop", steps * 160 + 400, run)]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stream::{Call, End};

    #[test]
    fn a_call_must_name_the_tool_and_the_value() {
        let step = Step {
            tool: "get_price",
            parameter: "item",
            value: "bells",
            question: String::new(),
            result: json!({}),
            word: String::new(),
        };
        let check = |found: &[(&str, &str)]| {
            let call = |(name, arguments): &(&str, &str)| Call {
                id: "a".into(),
                name: (*name).into(),
                arguments: (*arguments).into(),
            };
            let reply = Reply {
                pieces: vec![],
                answer: String::new(),
                reasoning: String::new(),
                calls: found.iter().map(call).collect(),
                finish: None,
                usage: None,
                fingerprint: None,
                profile: None,
                end: End::Done,
                total: Duration::ZERO,
            };
            calls(&reply, &step)
        };
        assert_eq!(check(&[("get_price", r#"{"item": "bells"}"#)]), Ok(()));
        assert!(check(&[]).is_err());
        assert!(check(&[("get_price", r#"{"item": "maps"}"#)]).is_err());
        assert!(check(&[("get_weather", r#"{"item": "bells"}"#)]).is_err());
        assert!(check(&[("get_price", "{")]).unwrap_err().contains("not JSON"));
    }
}
