//! What a chat template can express, found by rendering small conversations when the model loads.
//!
//! A template is a program: what it does with a second system message, with the ids of calls, or with a
//! variable `thinking` stands in no table. [`Probe::of`] renders conversations whose texts are words that
//! nothing else contains, and looks for them in the prompts. For each part of a conversation it tries the ways
//! of [`Shape`] in turn, and keeps the first in which every text arrives, in order; a part that none carries
//! is [lost](Shape::lost). Variables that switch reasoning, and the efforts that a template knows, are those
//! that change a prompt.
//! Each rendering has at most [`FUEL`] instructions, and their number does not depend on the template.
//! Knows nothing of tokens.

use serde_json::{Map, Value, json};
use steersman_jinja::{Render, Template};

use super::conversation::{Beside, Part, Shape};
use super::tool_call::{Format, Ids};
use steersman_request::error::Result;
use steersman_request::{Effort, FunctionCall, Message, ToolCall};

/// Most instructions of one rendering: the heaviest known template needs a hundredth of it. Some 150 renderings
/// of a template that never ends take some seconds.
const FUEL: u64 = 500_000;

/// The words in the places of texts; no template contains them.
const WORDS: [&str; 6] = ["xqprobea", "xqprobeb", "xqprobec", "xqprobed", "xqprobee", "xqprobef"];
/// The word in an argument of a call, and of a second call.
const ARGUMENTS: [&str; 2] = ["xqargumenta", "xqargumentb"];
const REASONING: &str = "xqreasoning";
const TOOL: &str = "xqtool";
/// An effort that no template knows.
const NO_EFFORT: &str = "xqeffort";

/// Variables that switch reasoning, with the values for on and off.
const SWITCHES: [(&str, [Word; 2]); 6] = [
    ("enable_thinking", [Word::Bool(true), Word::Bool(false)]),
    ("thinking", [Word::Bool(true), Word::Bool(false)]),
    ("think", [Word::Bool(true), Word::Bool(false)]),
    ("reasoning", [Word::Bool(true), Word::Bool(false)]),
    ("add_think_prompt", [Word::Bool(true), Word::Bool(false)]),
    ("thinking_mode", [Word::Text("enabled"), Word::Text("disabled")]),
];
/// Variables for the effort of reasoning.
const EFFORTS: [&str; 3] = ["reasoning_effort", "reasoning_strength", "thinking_effort"];
/// Efforts that mean no reasoning.
const NO_REASONING: [&str; 2] = ["none", "no_think"];
/// The efforts of a template that writes whatever it gets into the prompt: gpt-oss was trained on these.
const USUAL: [Effort; 3] = [Effort::Low, Effort::Medium, Effort::High];
/// Variables for the budget of reasoning, in tokens.
const BUDGETS: [&str; 2] = ["thinking_budget", "reasoning_budget"];
/// A budget that no template contains.
const BUDGET: u32 = 7919;

/// A value of a template variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Bool(bool),
    Text(&'static str),
}

impl Word {
    fn value(self) -> Value {
        match self {
            Self::Bool(value) => value.into(),
            Self::Text(text) => text.into(),
        }
    }
}

/// What a chat template can express.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Probe {
    /// How conversations are written for requests without tools, and with.
    shapes: [Shape; 2],
    /// Whether definitions of tools reach the prompt.
    pub has_tools: bool,
    switches: Vec<(&'static str, [Word; 2])>,
    effort: Option<EffortVariable>,
    budget: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq)]
struct EffortVariable {
    name: &'static str,
    /// The efforts that it knows, ascending.
    known: Vec<Effort>,
    /// Whether others are errors, or words that mean nothing to the model.
    is_closed: bool,
    /// The value for no reasoning, if there is one.
    off: Option<&'static str>,
    /// Whether the model does not reason without a value.
    is_off_by_default: bool,
}

/// The variables of a rendering that say whether and how much the model reasons.
#[derive(Debug, Default, PartialEq)]
pub(super) struct ReasoningVariables {
    /// Take precedence over those of the client, whose wish they are already.
    pub switches: Map<String, Value>,
    /// Effort and budget.
    pub amount: Map<String, Value>,
    /// What the template cannot express, for the client.
    pub notes: Vec<String>,
}

impl Probe {
    /// Probes `template`, which a model with calls in `format` uses, with the variables `special_tokens`.
    pub fn of(template: &Template, special_tokens: &Map<String, Value>, format: &Format) -> Self {
        let probed = template.probe(FUEL, |render| {
            let renderer = Renderer { render, special_tokens, source: template.source() };
            Ok(renderer.probe(format))
        });
        probed.unwrap_or_default()
    }

    /// How conversations are written for requests with or without tools.
    pub fn shape(&self, has_tools: bool) -> &Shape {
        &self.shapes[usize::from(has_tools)]
    }

    /// Whether a variable turns reasoning on and off.
    pub fn has_switch(&self) -> bool {
        let effort = self.effort.as_ref();
        !self.switches.is_empty() || effort.is_some_and(|effort| effort.off.is_some())
    }

    /// Whether a variable changes how the model reasons.
    pub fn controls_reasoning(&self) -> bool {
        self.has_switch() || self.effort.is_some()
    }

    /// The variables for a request that shall reason or not, with this effort and budget if the client sets them.
    pub fn reasoning(
        &self,
        reasoning: Option<bool>,
        effort: Option<Effort>,
        budget: Option<u32>,
    ) -> ReasoningVariables {
        let mut out = ReasoningVariables::default();
        if let Some(reasoning) = reasoning {
            // Its meaning is the same in all templates that have it; others do not read it.
            out.switches.insert("enable_thinking".into(), reasoning.into());
            for (name, [on, off]) in &self.switches {
                let value = if reasoning { on } else { off };
                out.switches.insert((*name).into(), value.value());
            }
        }
        if reasoning == Some(false) {
            let off = self.effort.as_ref().and_then(|effort| Some((effort.name, effort.off?)));
            if let Some((name, off)) = off.filter(|_| self.switches.is_empty()) {
                out.switches.insert(name.into(), off.into());
            }
            return out;
        }
        if let (Some(name), Some(budget)) = (self.budget, budget) {
            out.amount.insert(name.into(), budget.into());
        }
        let Some(variable) = &self.effort else { return out };
        let default =
            (reasoning == Some(true) && variable.is_off_by_default).then_some(Effort::High);
        let Some(wanted) = effort.or(default) else { return out };
        let Some(nearest) = variable.nearest(wanted) else { return out };
        if effort.is_some_and(|effort| effort != nearest) {
            let known: Vec<_> = variable.known.iter().map(|effort| effort.word()).collect();
            out.notes.push(format!(
                "the reasoning effort {} is {} for this model, which knows {}",
                wanted.word(),
                nearest.word(),
                known.join(", ")
            ));
        }
        out.amount.insert(variable.name.into(), nearest.word().into());
        out
    }
}

impl EffortVariable {
    /// The effort to set for `effort`; `None` if the variable only turns reasoning off.
    fn nearest(&self, effort: Effort) -> Option<Effort> {
        // Above what it names, an open template does what it does without a value.
        let is_low = self.known.last().is_some_and(|most| *most < effort.min(Effort::High));
        if self.known.contains(&effort) || !self.is_closed && is_low {
            return Some(effort);
        }
        // The higher one of two at the same distance.
        let distance = |known: &&Effort| (**known as i32).abs_diff(effort as i32);
        self.known.iter().rev().min_by_key(distance).copied()
    }
}

/// Renders conversations with one template.
struct Renderer<'a> {
    render: &'a Render<'a>,
    special_tokens: &'a Map<String, Value>,
    source: &'a str,
}

impl Renderer<'_> {
    fn probe(&self, format: &Format) -> Probe {
        let without = self.shape(false, format);
        let has_tools = self.has_tools(&without);
        // Otherwise requests with tools are refused.
        let with = if has_tools { self.shape(true, format) } else { without.clone() };
        let mut probe = Probe { has_tools, ..Probe::default() };
        self.reasoning(&without, &mut probe);
        probe.shapes = [without, with];
        probe
    }

    /// The prompt of `messages`, written in `shape`; `None` if the template refuses it.
    fn prompt(
        &self,
        shape: &Shape,
        messages: &[Message],
        has_tools: bool,
        variables: &[(&str, Value)],
    ) -> Option<String> {
        let written = shape.write(messages).ok()?;
        let values = written.messages.iter().map(|message| shape.value(message));
        let values = values.collect::<Result<Vec<_>>>().ok()?;
        let mut context = self.special_tokens.clone();
        context.insert("messages".into(), values.into());
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), true.into());
        context.insert("tools".into(), if has_tools { tools() } else { Value::Null });
        context.extend(variables.iter().map(|(name, value)| ((*name).to_string(), value.clone())));
        (self.render)(&context).ok()
    }

    fn has_tools(&self, shape: &Shape) -> bool {
        self.source.contains("tools")
            && self.prompt(shape, &[user(0)], true, &[]).is_some_and(|prompt| prompt.contains(TOOL))
    }

    /// The first way of each part that carries it, one part after the other.
    fn shape(&self, has_tools: bool, format: &Format) -> Shape {
        let mut shape = Shape::default();
        let settle =
            |shape: &mut Shape, part, way: fn(&mut Shape), conversations: &[Vec<Message>]| {
                self.settle(shape, has_tools, part, way, conversations);
            };
        settle(&mut shape, Part::User, |s| s.has_parts = true, &[vec![user(0)]]);
        if shape.lost.contains(&Part::User) {
            if self.prompt(&Shape::default(), &[user(0)], has_tools, &[]).is_none() {
                // The client gets its error.
                shape.lost.clear();
            }
            return shape;
        }
        settle(
            &mut shape,
            Part::Users,
            |s| s.joins_users = true,
            &[vec![user(0), user(1)], vec![user(0), assistant(1), user(2), user(3)]],
        );
        for (part, conversation) in [
            (Part::Assistant, vec![user(0), assistant(1), user(2)]),
            (Part::LastOfAssistant, vec![user(0), assistant(1)]),
        ] {
            settle(&mut shape, part, |_| {}, &[conversation]);
        }
        let reasoned = Message { reasoning_content: Some(REASONING.into()), ..assistant(1) };
        settle(
            &mut shape,
            Part::Assistant,
            |s| s.answers_without_reasoning = true,
            &[vec![user(0), reasoned, user(2)]],
        );
        settle(
            &mut shape,
            Part::Assistants,
            |s| s.joins_assistants = true,
            &[vec![user(0), assistant(1), assistant(2), user(3)]],
        );
        settle(
            &mut shape,
            Part::System,
            |s| s.system_is_user = true,
            &[vec![system(0), user(1)], vec![system(0), user(1), assistant(2), user(3)]],
        );
        if self.source.contains("developer") {
            let developer = Shape { has_developer: true, ..shape.clone() };
            if self.carries(&developer, &[message("developer", 0), user(1)], has_tools) {
                shape = developer;
            }
        }
        settle(
            &mut shape,
            Part::Systems,
            |s| s.joins_systems = true,
            &[
                vec![system(0), system(1), user(2)],
                vec![system(0), message("developer", 1), system(2), user(3)],
            ],
        );
        let opening = vec![assistant(0), user(1), assistant(2), user(3)];
        settle(&mut shape, Part::Opening, |s| s.opens_with_user = true, &[opening]);
        settle(&mut shape, Part::NoUser, |s| s.needs_user = true, &[vec![system(0)]]);
        self.calls(&mut shape, has_tools, format);
        let mut late = vec![
            vec![system(0), user(1), system(2)],
            vec![user(0), system(1), assistant(2), user(3)],
            vec![system(0), user(1), assistant(2), system(3), user(4)],
            vec![user(0), message("developer", 1)],
        ];
        if !shape.lost.contains(&Part::Calls) && !shape.calls_are_text {
            late.push(vec![user(0), call("", &[0]), result(1, 0), system(2)]);
        }
        settle(&mut shape, Part::Late, |s| s.late_is_user = true, &late);
        shape
    }

    /// How calls and results are written.
    fn calls(&self, shape: &mut Shape, has_tools: bool, format: &Format) {
        let carries = |way: &Shape, messages: &[Message]| self.carries(way, messages, has_tools);
        let round = [user(0), call("", &[0]), result(1, 0)];
        let of_format = (format.ids == Ids::Function).then_some(Ids::Function);
        let mut ways = Vec::new();
        for ids in [of_format, Some(Ids::Nine)] {
            for arguments_are_text in [false, true] {
                for names_results in [false, true] {
                    ways.push(Shape { ids, arguments_are_text, names_results, ..shape.clone() });
                }
            }
        }
        ways.push(Shape { calls_are_text: true, ..shape.clone() });
        let Some(found) = ways.into_iter().find(|way| carries(way, &round)) else {
            shape.lost.insert(Part::Calls);
            return;
        };
        *shape = found;
        if shape.calls_are_text {
            return;
        }
        // Some templates write the system text beside the last message, if that is the user's.
        let begun = [[system(0), user(1)].as_slice(), &[call("", &[0]), result(2, 0)]].concat();
        let as_user = Shape { system_is_user: true, ..shape.clone() };
        if !carries(shape, &begun) && carries(&as_user, &begun) {
            *shape = as_user;
        }
        self.settle(
            shape,
            has_tools,
            Part::AfterResults,
            |s| s.bridges_results = true,
            &[
                vec![user(0), call("", &[0]), result(1, 0), user(2)],
                vec![user(0), call("", &[0]), result(1, 0), assistant(2), user(3)],
                vec![user(0), call("", &[0]), result(1, 0), user(2), assistant(3), user(4)],
            ],
        );
        self.settle(
            shape,
            has_tools,
            Part::ManyCalls,
            |s| s.splits_calls = true,
            &[vec![user(0), call("", &[0, 1]), result(1, 0), result(2, 1)]],
        );
        let beside = [
            vec![user(0), call(WORDS[1], &[0]), result(2, 0)],
            vec![user(0), call(WORDS[1], &[0]), result(2, 0), assistant(3), user(4)],
        ];
        let ways = [Beside::Kept, Beside::Apart].map(|beside| Shape { beside, ..shape.clone() });
        let found = ways.into_iter().find(|way| beside.iter().all(|c| carries(way, c)));
        match found {
            Some(found) => *shape = found,
            None => shape.beside = Beside::LeftOut,
        }
        // Templates may drop reasoning of the past, and may not take it beside both.
        let mut with_reasoning = beside[0].clone();
        with_reasoning[1].reasoning_content = Some(REASONING.into());
        let joined = Shape { text_joins_reasoning: true, ..shape.clone() };
        let is_kept = shape.beside == Beside::LeftOut || carries(shape, &with_reasoning);
        if !is_kept && carries(&joined, &with_reasoning) {
            *shape = joined;
        }
    }

    /// Leaves `shape` as it is if it carries `conversations`, changes it in this `way` if that does, or else
    /// marks the part as lost.
    fn settle(
        &self,
        shape: &mut Shape,
        has_tools: bool,
        part: Part,
        way: fn(&mut Shape),
        conversations: &[Vec<Message>],
    ) {
        let carries = |way: &Shape| conversations.iter().all(|c| self.carries(way, c, has_tools));
        if carries(shape) {
            return;
        }
        let mut changed = shape.clone();
        way(&mut changed);
        match carries(&changed) {
            true => *shape = changed,
            false => drop(shape.lost.insert(part)),
        }
    }

    /// Whether all texts of `messages` reach the prompt, those of different messages in order.
    fn carries(&self, shape: &Shape, messages: &[Message], has_tools: bool) -> bool {
        let Some(prompt) = self.prompt(shape, messages, has_tools, &[]) else { return false };
        let mut from = 0;
        for message in messages {
            let arguments = message
                .tool_calls
                .iter()
                .flat_map(|call| call.function.arguments.values().filter_map(Value::as_str));
            let texts = arguments.chain([message.content.as_str()]);
            let mut ends = Vec::new();
            for text in texts.filter(|text| !text.is_empty()) {
                // The results of calls that are split stand between them.
                let from = if shape.splits_calls { 0 } else { from };
                let Some(at) = prompt.find(text).filter(|at| *at >= from) else { return false };
                ends.push(at + text.len());
            }
            let names_tool = |call: &ToolCall| has_tools || prompt.contains(&call.function.name);
            if !message.tool_calls.iter().all(names_tool) {
                return false;
            }
            from = ends.into_iter().max().unwrap_or(from);
        }
        true
    }

    /// Finds the variables for reasoning.
    fn reasoning(&self, shape: &Shape, probe: &mut Probe) {
        let prompt =
            |name: &str, value: Value| self.prompt(shape, &[user(0)], false, &[(name, value)]);
        let default = self.prompt(shape, &[user(0)], false, &[]);
        for (name, [on, off]) in SWITCHES {
            if !self.source.contains(name) {
                continue;
            }
            if let [Some(with), Some(without)] = [on, off].map(|word| prompt(name, word.value()))
                && with != without
            {
                probe.switches.push((name, [on, off]));
            }
        }
        let reads = |name: &&&str| self.source.contains(**name);
        probe.effort = EFFORTS.iter().filter(reads).find_map(|name| {
            let unknown = prompt(name, NO_EFFORT.into());
            let is_written = unknown.as_ref().is_some_and(|prompt| prompt.contains(NO_EFFORT));
            let is_quoted = |word: &str| {
                self.source.contains(&format!("'{word}'"))
                    || self.source.contains(&format!("\"{word}\""))
            };
            let is_known = |word: &str| {
                let rendered = prompt(name, word.into());
                rendered.is_some() && (is_quoted(word) || !is_written && rendered != unknown)
            };
            let known = Effort::ALL.into_iter().filter(|effort| {
                effort.reasons()
                    && (is_known(effort.word()) || is_written && USUAL.contains(effort))
            });
            let known: Vec<Effort> = known.collect();
            let off = NO_REASONING.into_iter().find(|word| !is_written && is_known(word));
            let off_prompt = off.and_then(|word| prompt(name, word.into()));
            let is_off_by_default = off.is_some() && off_prompt == default;
            let changes = |effort: &Effort| prompt(name, effort.word().into()) != default;
            let has_effect = known.iter().any(changes) || off.is_some() && off_prompt != default;
            let is_closed = unknown.is_none() || is_written;
            has_effect.then_some(EffortVariable { name, known, is_closed, off, is_off_by_default })
        });
        probe.budget = BUDGETS.into_iter().filter(|name| self.source.contains(name)).find(|name| {
            let rendered = prompt(name, BUDGET.into());
            rendered.is_some_and(|prompt| prompt.contains(&BUDGET.to_string()))
        });
    }
}

fn message(role: &str, word: usize) -> Message {
    Message { role: role.into(), content: WORDS[word].into(), ..Message::default() }
}

fn system(word: usize) -> Message {
    message("system", word)
}

fn user(word: usize) -> Message {
    message("user", word)
}

fn assistant(word: usize) -> Message {
    message("assistant", word)
}

/// Calls with these arguments, beside `content`.
fn call(content: &str, arguments: &[usize]) -> Message {
    let call = |argument: &usize| {
        let arguments = Map::from_iter([("q".to_string(), ARGUMENTS[*argument].into())]);
        let function = FunctionCall { name: TOOL.into(), arguments: arguments.into() };
        ToolCall { id: id(*argument), kind: "function".into(), function }
    };
    Message {
        role: "assistant".into(),
        content: content.into(),
        tool_calls: arguments.iter().map(call).collect(),
        ..Message::default()
    }
}

/// The result of the call with this argument.
fn result(word: usize, argument: usize) -> Message {
    Message { tool_call_id: Some(id(argument)), ..message("tool", word) }
}

/// An id of another server.
fn id(argument: usize) -> String {
    format!("call_00000000000000000000000{argument}")
}

fn tools() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {"q": {"type": "string", "description": "The query."}},
        "required": ["q"],
    });
    let function = json!({"name": TOOL, "description": "Finds.", "parameters": parameters});
    json!([{"type": "function", "function": function}])
}
