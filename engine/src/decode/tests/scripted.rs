//! Small seeded models of several families with a tokenizer of single bytes, and scripted policies.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mlx_rs::Array;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use crate::cache::Span;
use crate::config::{Config, Device, DraftKind, Dtype};
use crate::decode::Decoder;
use crate::decode::admit::admit;
use crate::job::Job;
use crate::measure::verify::{DecodePath, restrict_drafting};
use crate::policy::{
    Action, Answer, Call, Chain, Failure, Hook, Labels, Link, Plan, Policy, PromptEdit, Recorder,
    Replacement, SamplingPatch, Session, Step, Summary, TextVerdict, TextView, ToolCallView,
    Verdict,
};
use crate::request::{
    CallDelta, Choice, Choices, Event, FinishReason, Logprob, Message, PromptToken, Request,
    Sampling, ToolCall, Usage,
};
use crate::sample::noise::mix;
use crate::sample::row::Row;
use crate::sample::rows::sample;
use crate::schedule::queue::Taken;
use crate::sequence::prepare::Prepared;
use crate::text::Piece;

/// The tokens before a prefix, before a suffix, and before what is filled in.
pub const INFILL: [u32; 3] = [248, 249, 250];
pub const CLOSE_CALL: u32 = 251;
pub const OPEN_CALL: u32 = 252;
pub const CLOSE_REASONING: u32 = 253;
pub const OPEN_REASONING: u32 = 254;
pub const END: u32 = 255;

/// The families that there are fixtures of.
pub fn families() -> Vec<String> {
    let entries = std::fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap());
    // macOS adds files of its own to folders.
    let folders = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> =
        folders.map(|folder| folder.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/families")
}

/// A family's model with a vocabulary in which every byte is a token. The tags of tool calls are tokens
/// if `call_tokens`, else text.
pub fn family(name: &str, config: Config, call_tokens: bool) -> Decoder {
    let [open_call, close_call] =
        if call_tokens { ["<tool_call>", "</tool_call>"] } else { ["<unused4>", "<unused5>"] };
    let added = [
        "<unused0>",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        close_call,
        open_call,
        "</think>",
        "<think>",
        "<|im_end|>",
    ];
    let template = "{% for tool in tools or [] %}{{ tool.function.name }}, {% endfor %}\
        {% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}\
        {% if add_generation_prompt %}it: {% if enable_thinking %}<think>{% endif %}{% endif %}";
    with_tokens(name, config, added, template)
}

/// The same with messages as in Harmony, whose special tokens have the ids from 248 on.
pub fn family_of_messages(name: &str, config: Config) -> Decoder {
    let tags = crate::text::harmony::TAGS;
    let added = ["<unused0>"].into_iter().chain(*tags).chain(["<|im_end|>"]);
    let added: Vec<&str> = added.collect();
    let template = "{#- <|channel|> #}{% for tool in tools or [] %}{{ tool.function.name }}, {% endfor %}\
        {% for m in messages %}<|start|>{{ m.role }}<|message|>\
        {{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}";
    with_tokens(name, config, added.try_into().unwrap(), template)
}

/// A family's model in which every byte is a token, as far as its vocabulary reaches; `added` are the last ones.
fn with_tokens(name: &str, mut config: Config, added: [&str; 9], template: &str) -> Decoder {
    let folder = tempfile::tempdir().unwrap();
    let family = fixtures().join(name);
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(family.join(file), folder.path().join(file)).unwrap();
    }
    let of_model = std::fs::read_to_string(family.join("config.json")).unwrap();
    let of_model: Value = serde_json::from_str(&of_model).unwrap();
    let size = of_model["vocab_size"].as_u64().or(of_model["text_config"]["vocab_size"].as_u64());
    let bytes = size.map_or(256, |size| size.min(256)) as u32 - added.len() as u32;
    // GPT-2's characters for bytes: bytes that cannot be printed are numbered from U+0100 on.
    let hidden = |byte: &u32| matches!(byte, 0..=32 | 127..=160 | 173);
    let letter = |byte: u32| {
        let number = 256 + (0..byte).filter(hidden).count() as u32;
        let code = if hidden(&byte) { number } else { byte };
        char::from_u32(code).unwrap().to_string()
    };
    let vocab: Map<String, Value> = (0..bytes).map(|byte| (letter(byte), byte.into())).collect();
    let end = bytes + added.len() as u32 - 1;
    let added: Vec<Value> = (bytes..)
        .zip(added)
        .map(|(id, content)| {
            let special = content != "<think>" && content != "</think>";
            json!({"id": id, "content": content, "special": special, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let split = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false});
    let tokenizer = json!({"version": "1.0", "added_tokens": added, "pre_tokenizer": split,
        "decoder": split, "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    for (file, text) in [
        ("tokenizer.json", tokenizer.to_string()),
        ("tokenizer_config.json", json!({"chat_template": template}).to_string()),
        ("generation_config.json", json!({"eos_token_id": end}).to_string()),
    ] {
        std::fs::write(folder.path().join(file), text).unwrap();
    }
    (config.model.device, config.model.dtype) = (Device::Cpu, Dtype::F32);
    config.store.enabled = false;
    config.speculation.drafts = vec![DraftKind::Ngram];
    super::load_from(folder.path(), config)
}

/// A greedy request whose reply can be rewound entirely.
pub fn ask(question: &str, thinking: bool, max_tokens: u32) -> Request {
    Request {
        profile: "default".into(),
        messages: vec![message("user", question)],
        reasoning: Some(thinking),
        max_tokens: Some(max_tokens),
        sampling: SamplingPatch { temperature: Some(0.0), ..SamplingPatch::default() },
        seed: Some(7),
        revisable: true,
        ..Request::default()
    }
}

pub fn message(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into(), ..Message::default() }
}

/// Replaces a span of the first system message.
pub fn replace(old: &str, new: &str) -> PromptEdit {
    PromptEdit::Replace(Replacement { message: 0, old: old.into(), new: new.into() })
}

type Steps = Box<dyn FnMut(&Step) -> Vec<Action> + Send>;
type Calls = Box<dyn FnMut(&ToolCallView) -> Verdict + Send>;
type Texts = Box<dyn FnMut(&TextView) -> TextVerdict + Send>;
type Finishes = Box<dyn FnMut(&Summary) + Send>;

/// A policy that a test scripts.
pub struct Script {
    pub edits: Vec<PromptEdit>,
    pub plan: Plan,
    pub steps: Steps,
    pub calls: Calls,
    /// Its hook `on-text`, if it has that.
    pub texts: Option<Texts>,
    pub finish: Finishes,
    /// Whether its calls run on the engine thread.
    pub is_quick: bool,
    /// Tokens that count as rewound from the start.
    pub rewound: usize,
    /// Whether it has the hook `on-tool-call`.
    pub judges_calls: bool,
    /// Policies that it stands for.
    pub policies: u32,
}

impl Script {
    /// Called after every token.
    pub fn new(steps: impl FnMut(&Step) -> Vec<Action> + Send + 'static) -> Self {
        Self {
            edits: Vec::new(),
            plan: Plan { every: 1, ..Plan::default() },
            steps: Box::new(steps),
            calls: Box::new(|_| Verdict::Accept),
            texts: None,
            finish: Box::new(|_| ()),
            is_quick: true,
            rewound: 0,
            judges_calls: true,
            policies: 1,
        }
    }
}

impl Policy for Script {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        Ok(match call {
            Call::Params(_) => call.default_answer(),
            Call::Prompt(_) => Answer::Prompt(self.edits.clone()),
            Call::Request(_) => Answer::Request(self.plan.clone()),
            Call::Step(step) => Answer::Step((self.steps)(step)),
            Call::Text(view) => {
                Answer::Text(self.texts.as_mut().map_or(TextVerdict::Pass, |f| f(view)))
            }
            Call::ToolCall(view) => Answer::ToolCall((self.calls)(view)),
            Call::Finish(summary) => {
                (self.finish)(summary);
                Answer::Finish(Labels::new())
            }
        })
    }

    fn is_quick(&self, _: Hook) -> bool {
        self.is_quick
    }

    fn has(&self, hook: Hook) -> bool {
        hook != Hook::OnText || self.texts.is_some()
    }
}

/// Starts a request under `policy`.
pub fn start(
    decoder: &mut Decoder,
    request: Request,
    policy: impl Policy + 'static,
) -> mpsc::UnboundedReceiver<Event> {
    let (prepared, receiver) = prepare(decoder, request, policy);
    decoder.start_request(prepared);
    receiver
}

/// Prepares a request under `policy`.
pub fn prepare(
    decoder: &Decoder,
    request: Request,
    policy: impl Policy + 'static,
) -> (Prepared, mpsc::UnboundedReceiver<Event>) {
    let (events, receiver) = mpsc::unbounded_channel();
    let prepared =
        decoder.policies.preparer().prepare_with(Job { request, events }, session(policy)).unwrap();
    (prepared, receiver)
}

fn session(policy: impl Policy + 'static) -> Session {
    Session {
        policy: Box::new(policy),
        params: Arc::default(),
        digest: [0; 32],
        judges_calls: true,
        shapes_text: false,
        sees_text: false,
        policies: 1,
    }
}

/// Starts the choices of a request, which differ in id and seed.
pub fn start_together(
    decoder: &mut Decoder,
    choices: Vec<Request>,
) -> Vec<mpsc::UnboundedReceiver<Event>> {
    let events = decoder.schedule.queue().add_all(vec![together(choices)]).unwrap();
    prepare_waiting(decoder);
    decoder.start_requests();
    events
}

/// Starts the texts of a body.
pub fn start_texts(
    decoder: &mut Decoder,
    texts: Vec<Request>,
) -> Vec<mpsc::UnboundedReceiver<Event>> {
    let body = texts.into_iter().map(Choices::from).collect();
    let events = decoder.schedule.queue().add_all(body).unwrap();
    prepare_waiting(decoder);
    decoder.start_requests();
    events
}

/// Requests that differ in id and seed as the choices of one.
pub fn together(choices: Vec<Request>) -> Choices {
    let mut choices = choices.into_iter();
    let request = choices.next().unwrap();
    let other = |Request { id, seed, live, .. }| Choice { id, seed, live };
    Choices { request, others: choices.map(other).collect() }
}

/// Prepares requests of the queue, as the threads do.
pub fn prepare_waiting(decoder: &Decoder) {
    while let Some(Taken { number, body, job, others }) = decoder.schedule.queue().try_take() {
        let prepared = decoder.policies.preparer().prepare_choices(body, job, others).unwrap();
        decoder.schedule.queue().ready(number, Box::new(prepared));
    }
}

/// Prepares what waits, and runs a step.
pub fn turn(decoder: &mut Decoder) {
    prepare_waiting(decoder);
    decoder.step();
}

/// Steps until no request is left, preempted ones included.
pub fn finish(decoder: &mut Decoder) {
    while !decoder.schedule.running().is_empty()
        || !decoder.schedule.preempted().is_empty()
        || decoder.schedule.queue().waiting() > 0
    {
        turn(decoder);
    }
}

/// The answer and the usage of a request that has succeeded.
pub fn reply(mut events: mpsc::UnboundedReceiver<Event>) -> (String, Usage) {
    let mut answer = String::new();
    // A thread may send the last event, after `on-finish`.
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Answer(piece) => answer += &piece,
            Event::Finished(finished) => return (answer, finished.usage),
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    panic!("no end")
}

/// A reply, and what the client received.
#[derive(Debug)]
pub struct Transcript {
    pub tokens: Vec<u32>,
    pub prompt: usize,
    pub reasoning: String,
    pub answer: String,
    pub calls: Vec<ToolCall>,
    pub prompt_tokens: Vec<PromptToken>,
    pub deltas: Vec<CallDelta>,
    pub logprobs: Vec<Logprob>,
    /// Bytes of reasoning and answer removed by each rewind.
    pub rewound: Vec<(usize, usize)>,
    pub reason: FinishReason,
    pub notes: Vec<String>,
    pub usage: Usage,
    /// The answer as the model wrote it.
    pub written: String,
    /// Position of the state saved at the end.
    pub saved: usize,
}

impl Transcript {
    pub fn reply(&self) -> &[u32] {
        &self.tokens[self.prompt..]
    }

    pub fn noted(&self, words: &str) -> bool {
        self.notes.iter().any(|note| note.contains(words))
    }
}

/// Runs `request` with `script` on `path`; `plain` holds its tokens, if known.
pub fn run(
    decoder: &mut Decoder,
    request: &Request,
    script: Script,
    path: DecodePath,
    plain: Option<&[u32]>,
) -> Transcript {
    let Script { rewound, judges_calls, policies, .. } = script;
    // A chain holds text back.
    let session = if script.texts.is_some() { chain(vec![script]) } else { session(script) };
    let session = Session { judges_calls, policies, ..session };
    run_session(decoder, request, session, rewound, path, plain)
}

/// The policies of a chain.
pub fn chain(scripts: Vec<Script>) -> Session {
    let shapes_text = scripts.iter().any(|script| script.texts.is_some());
    let policies = scripts.len() as u32;
    let link = |(index, script): (usize, Script)| Link {
        name: format!("script {index}"),
        sha256: [0; 32],
        shadow: false,
        policy: Box::new(script),
    };
    let links = scripts.into_iter().enumerate().map(link).collect();
    let sees_text = shapes_text;
    let chain = session(Chain::new(links, Recorder::off()));
    Session { policies, shapes_text, sees_text, ..chain }
}

/// [`run`] with these policies, of which `rewound` tokens count as rewound from the start.
pub fn run_session(
    decoder: &mut Decoder,
    request: &Request,
    session: Session,
    rewound: usize,
    path: DecodePath,
    plain: Option<&[u32]>,
) -> Transcript {
    let (events, mut receiver) = mpsc::unbounded_channel();
    let job = Job { request: request.clone(), events };
    let (judges_calls, sees_text) = (session.judges_calls, session.sees_text);
    let prepared = decoder.policies.preparer().prepare_with(job, session).unwrap();
    let mut sequence = admit(decoder, prepared).unwrap();
    sequence.set_rewound(rewound);
    restrict_drafting(&mut sequence, path, plain);
    let mut running = vec![sequence];
    while !running[0].has_ended() {
        decoder.wait_for_policies(&running);
        decoder.advance(&mut running).unwrap();
    }
    assert!(running[0].take_failure().is_none());
    while !running[0].complete(decoder.network.text()).unwrap() {
        decoder.wait_for_policies(&running);
    }
    let mut sequence = running.pop().unwrap();
    sequence.finish();
    decoder.save(&sequence);

    let (mut reasoning, mut answer) = (String::new(), String::new());
    let (mut calls, mut deltas, mut rewound) = (Vec::new(), Vec::new(), Vec::new());
    let (mut prompt_tokens, mut logprobs) = (Vec::new(), Vec::new());
    let finished = loop {
        match receiver.blocking_recv().unwrap() {
            Event::Started { .. }
            | Event::Embedding(_)
            | Event::Routed { .. }
            | Event::PromptCounted { .. }
            | Event::Note { .. } => {}
            Event::Reasoning(text) => reasoning.push_str(&text),
            Event::PromptToken(token) => prompt_tokens.push(token),
            Event::Logprob(logprob) => logprobs.push(logprob),
            Event::Answer(text) => answer.push_str(&text),
            Event::CallDelta(delta) => deltas.push(delta),
            Event::ToolCall(call) => calls.push(call),
            Event::Rewound { reasoning: of_reasoning, answer: of_answer } => {
                rewound.push((of_reasoning, of_answer));
                reasoning.truncate(reasoning.len() - of_reasoning);
                answer.truncate(answer.len() - of_answer);
            }
            Event::Finished(finished) => break finished,
            Event::Failed(error) => panic!("{error}"),
        }
    };
    // After any rewinds, the client has the text of the remaining tokens.
    let (prompt, reply) = sequence.timeline().tokens().split_at(sequence.timeline().prompt());
    let mut again = decoder.network.text().reply(prompt, &request.stop, &request.tools);
    if request.streams_calls && !judges_calls {
        again.stream_calls();
    }
    if !sequence.has_form() {
        again.read_untagged_calls();
    }
    let mut pieces: Vec<Piece> = reply.iter().flat_map(|&token| again.push(token)).collect();
    pieces.extend(again.finish());
    let (mut expected_reasoning, mut expected_answer) = (String::new(), String::new());
    for piece in pieces {
        match piece {
            Piece::Reasoning(text) => expected_reasoning.push_str(&text),
            Piece::Answer(text) => expected_answer.push_str(&text),
            Piece::CallDelta(_) | Piece::ToolCall(_) | Piece::Note(_) => {}
        }
    }
    assert_eq!(reasoning, expected_reasoning);
    if !sees_text {
        assert_eq!(answer, expected_answer);
    }
    Transcript {
        reasoning,
        answer,
        calls,
        prompt_tokens,
        deltas,
        logprobs,
        rewound,
        prompt: sequence.timeline().prompt(),
        saved: sequence.timeline().position(),
        tokens: sequence.timeline().tokens().to_vec(),
        reason: finished.reason,
        notes: finished.notes,
        usage: finished.usage,
        written: expected_answer,
    }
}

/// [`run`] with one token a pass.
pub fn run_plain(decoder: &mut Decoder, request: &Request, script: Script) -> Transcript {
    run(decoder, request, script, DecodePath::Plain, None)
}

/// Logits [R, V] after each of `tokens`, all computed in one pass.
pub fn logits(decoder: &Decoder, tokens: &[u32]) -> Array {
    let mut cache = decoder.saved.prefixes().empty();
    let rows = tokens.len() as i32;
    let span = Span { rows, cache: &mut cache };
    let ids = Array::from_slice(tokens, &[rows]);
    let hidden = decoder.network.forward(&ids, &mut [span]).unwrap();
    decoder.network.logits(&hidden).unwrap().squeeze_axes(&[0]).unwrap()
}

/// The token that plain decoding samples at each position of `ran`'s reply, without those in `banned`.
pub fn plain_samples(
    decoder: &Decoder,
    ran: &Transcript,
    sampling: &Sampling,
    banned: &[u32],
) -> Vec<u32> {
    let logits = logits(decoder, &ran.tokens);
    let mut never = vec![0.0f32; logits.dim(1) as usize];
    banned.iter().for_each(|token| never[*token as usize] = f32::NEG_INFINITY);
    let logits = logits.add(Array::from_slice(&never, &[never.len() as i32])).unwrap();
    // The row of the first token samples position 1.
    let row = |index| Row::new(*sampling, mix(7, index));
    let rows: Vec<Row> = (1..=logits.dim(0) as u64).map(row).collect();
    let sampled = sample(&logits, &rows).unwrap();
    sampled.as_slice::<u32>()[ran.prompt - 1..ran.tokens.len() - 1].to_vec()
}
