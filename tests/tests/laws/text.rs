//! Prompts equal those of Python's Jinja2, tokens equal those of Python's
//! `tokenizers`, and decoding token by token equals decoding at once.

use std::io::BufReader;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use serde_json::{Map, Value};
use steersman_engine::request::Message;
use steersman_text::{Phase, Piece, Reply, Template, Text, Variables};

/// Noon of the day of the reference clock.
const TODAY: i64 = 1_721_995_200; // 26 July 2024

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/model/tiny-hybrid-4bit")
}

fn cases(file: &str) -> Vec<Value> {
    let path = fixtures().join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut all: Value = serde_json::from_str(&text).expect("fixtures are JSON");
    serde_json::from_value(all["cases"].take()).expect("cases are a list")
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("ids are a list of numbers")
}

/// What `template` renders with `variables`, or the message of its error.
fn rendered(template: &Template, variables: &Map<String, Value>) -> String {
    template.render(variables).unwrap_or_else(|error| error.to_string())
}

/// The variables of a conversation: its `messages`, `tools` and `kwargs`.
fn variables(conversation: &Value) -> Map<String, Value> {
    let mut variables = conversation["kwargs"].as_object().expect("kwargs are a map").clone();
    for key in ["messages", "tools"] {
        variables.insert(key.into(), conversation[key].clone());
    }
    variables.insert("documents".into(), Value::Null);
    variables
}

fn template(name: &str, source: &str) -> Template {
    Template::new(source).expect(name).at(TODAY).expect("a day of 2024")
}

/// The text that Python rendered, or the message of its error.
fn expected(case: &Value) -> &str {
    let text = case["rendered"].as_str().or(case["error"].as_str());
    text.expect("a case has a text or an error")
}

#[test]
fn every_template_renders_as_in_python() {
    let mut failures = Vec::new();
    let cases = cases("templates/cases.json");
    for case in &cases {
        let name = case["template"].as_str().expect("a case names its template");
        let path = match name {
            "tiny-hybrid" => tiny().join("chat_template.jinja"),
            name => fixtures().join(format!("templates/{name}.jinja")),
        };
        let source = std::fs::read_to_string(path).expect("the template is a fixture");
        let (ours, theirs) = (rendered(&template(name, &source), &variables(case)), expected(case));
        if theirs != ours {
            let conversation = &case["conversation"];
            failures.push(format!("{name} {conversation}\nours:   {ours:?}\ntheirs: {theirs:?}"));
        }
    }
    let count = failures.len();
    assert!(failures.is_empty(), "{count} of {}:\n{}", cases.len(), failures.join("\n\n"));
}

/// Why text that follows markup is not escaped, as it is in Jinja2.
const MARKUP: &str = "`'..' | safe + x` escapes `x` as HTML in Jinja2; a prompt is no HTML";

/// Public templates that are not rendered as in Python.
const DEVIATIONS: [(&str, &str); 2] =
    [("meetkai-functionary-medium-v3.1", MARKUP), ("SvalTek-Q3-CharThink-9B-temp", MARKUP)];

/// Renders all cases of a file of `fixtures/public_templates.py`.
fn check_public_templates(path: &Path) {
    let file = std::fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let all: Value =
        serde_json::from_reader(BufReader::new(GzDecoder::new(file))).expect("fixtures are JSON");
    let (mut failures, mut count) = (Vec::new(), 0);
    for entry in all["templates"].as_array().expect("templates are a list") {
        let text = |key: &str| entry[key].as_str().expect("an entry has texts");
        for key in ["name", "source", "license"] {
            assert!(!text(key).is_empty(), "an entry has no {key}");
        }
        let name = text("name");
        let template = template(name, text("text"));
        let deviation = DEVIATIONS.iter().find(|(deviating, _)| *deviating == name);
        let mut differences = Vec::new();
        for case in entry["cases"].as_array().expect("cases are a list") {
            count += 1;
            let conversation = case["conversation"].as_str().expect("a case names its messages");
            let variant = case["variant"].as_u64().expect("a case names its variant") as usize;
            let ours =
                rendered(&template, &variables(&all["conversations"][conversation][variant]));
            let theirs = expected(case);
            if theirs != ours {
                let place = ours.bytes().zip(theirs.bytes()).take_while(|(a, b)| a == b).count();
                let near = |text: &str| {
                    text[text.floor_char_boundary(place)..].chars().take(80).collect::<String>()
                };
                differences.push(format!(
                    "{name}, {conversation} {variant}, at byte {place}\nours:   {:?}\ntheirs: {:?}",
                    near(&ours),
                    near(theirs)
                ));
            }
        }
        match deviation {
            None => failures.extend(differences),
            Some(_) if differences.is_empty() => failures.push(format!("{name} is as in Python")),
            Some((_, reason)) => println!("{name}, {} cases: {reason}", differences.len()),
        }
    }
    println!("{count} cases");
    let failed = failures.len();
    assert!(failures.is_empty(), "{failed} of {count}:\n{}", failures.join("\n\n"));
}

#[test]
fn public_templates_render_as_in_python() {
    check_public_templates(&fixtures().join("templates/public.json.gz"));
}

#[test]
#[ignore = "needs a file of tests/fixtures/public_templates.py in PUBLIC_TEMPLATES"]
fn all_public_templates_render_as_in_python() {
    let path = std::env::var_os("PUBLIC_TEMPLATES").expect("PUBLIC_TEMPLATES is set");
    check_public_templates(Path::new(&path));
}

#[test]
fn typed_messages_render_like_json_messages() {
    let text = Text::load(&tiny()).expect("the bundled model loads");
    let mut compared = 0;
    for case in cases("templates/cases.json") {
        let Ok(messages) = serde_json::from_value::<Vec<Message>>(case["messages"].clone()) else {
            continue; // content that is not text: the server rejects it
        };
        if case["template"] != "tiny-hybrid" {
            continue;
        }
        let mut kwargs = case["kwargs"].as_object().cloned().unwrap_or_default();
        let reasoning = kwargs.remove("enable_thinking").and_then(|value| value.as_bool());
        let prompt = kwargs.remove("add_generation_prompt").and_then(|value| value.as_bool());
        let tools: Vec<Value> = serde_json::from_value(case["tools"].clone()).unwrap_or_default();
        let ours = text.render(&Variables {
            messages: &messages,
            tools: &tools,
            variables: &kwargs,
            reasoning,
            add_generation_prompt: prompt == Some(true),
            ..Variables::default()
        });
        let (ours, python) =
            (ours.expect("Python rendered it"), case["rendered"].as_str().unwrap());
        compared += 1;
        // The template drops system text after other turns, which `text::conversation` carries.
        let mut systems = messages.iter().filter(|message| message.is_system());
        if systems.clone().any(|message| !python.contains(&message.content)) {
            assert!(systems.all(|message| ours.contains(&message.content)), "{ours}");
            continue;
        }
        assert_eq!(ours, python, "{}", case["conversation"]);
    }
    assert!(compared > 20, "only {compared} cases were compared");
}

#[test]
fn tokens_equal_those_of_python() {
    let text = Text::load(&tiny()).expect("the bundled model loads");
    for case in cases("tokens.json") {
        let source = case["text"].as_str().expect("a case has a text");
        assert_eq!(text.encode(source).expect(source), ids(&case["ids"]), "{source:?}");
        assert_eq!(text.encode_plain(source).expect(source), ids(&case["plain"]), "{source:?}");
    }
}

#[test]
fn decoding_token_by_token_equals_decoding_at_once() {
    let text = Text::load(&tiny()).expect("the bundled model loads");
    for case in cases("tokens.json") {
        let tokens = ids(&case["plain"]);
        let mut reply = text.reply(&[], &[], &[]);
        let shown = answer(&mut reply, &tokens);
        assert_eq!(shown, text.decode(&tokens), "{}", case["text"]);
        assert_eq!(reply.take_text(), shown, "{}", case["text"]);
    }
}

#[test]
fn prompt_determines_the_first_phase() {
    let text = Text::load(&tiny()).expect("the bundled model loads");
    let forged = "What does <think> do?";
    for (reasoning, phase) in [(true, Phase::Reasoning), (false, Phase::Answer)] {
        let messages =
            [Message { role: "user".into(), content: forged.into(), ..Default::default() }];
        let reasoning = Some(reasoning);
        let variables = Variables { messages: &messages, reasoning, ..Variables::default() };
        let prompt = text.render(&variables);
        let prompt = text.encode(&prompt.expect("it renders")).expect("it encodes");
        assert_eq!(text.reply(&prompt, &[], &[]).phase(), phase);
    }
}

/// The answer in `tokens`.
fn answer(reply: &mut Reply, tokens: &[u32]) -> String {
    let mut pieces: Vec<Piece> = tokens.iter().flat_map(|token| reply.push(*token)).collect();
    pieces.extend(reply.finish());
    let text = |piece: &Piece| match piece {
        Piece::Answer(text) => text.clone(),
        other => panic!("{other:?}"),
    };
    pieces.iter().map(text).collect()
}
