use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use jsonschema::error::ValidationErrorKind;
use steersman_test_support::Random;

use super::*;
use crate::tool_call::{FORMATS, Format};
use steersman_request::ToolChoice;

mod closed;
mod corpus;
mod hostile;

/// The tokenizer of the bundled model, or of the model folder `STEERSMAN_TOKENIZER`.
fn text() -> Text {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../server/model/tiny-hybrid-4bit");
    let folder = std::env::var_os("STEERSMAN_TOKENIZER").map_or(bundled, Into::into);
    Text::load(&folder).expect("the bundled model has a tokenizer")
}

fn of_form(form: Form) -> Request {
    Request {
        response_format: Some(ResponseFormat { field: "format", form }),
        ..Request::default()
    }
}

fn allows(mask: &[u32], token: u32) -> bool {
    mask[token as usize / 32] >> (token % 32) & 1 == 1
}

/// Times of masks.
#[derive(Default)]
struct Times(Vec<Duration>);

/// A token of the vocabulary. Found once: each step of a sample looks at all that are allowed.
struct Token {
    bytes: Vec<u8>,
    ends_answer: bool,
    /// Whether it ends a string, an array, an object or `null`, or a part of one.
    closes: bool,
    ends_part: bool,
}

fn vocabulary(text: &Text) -> Vec<Token> {
    let token = |(id, bytes): (usize, Option<Vec<u8>>)| {
        let bytes = bytes.unwrap_or_default();
        Token {
            ends_answer: text.eos().contains(&(id as u32)),
            closes: matches!(*bytes, [b'"' | b'}' | b']' | b'n' | b',' | b':', ..])
                && bytes.len() < 3,
            ends_part: matches!(*bytes, [b'}' | b']']),
            bytes,
        }
    };
    text.token_bytes().into_iter().enumerate().map(token).collect()
}

/// Samples tokens that the grammar allows, mostly those that end something, until it is complete; `None`
/// if it is not after 2,000 tokens.
fn sample(
    vocabulary: &[Token],
    mut grammar: Grammar,
    random: &mut Random,
    times: &mut Times,
) -> Option<String> {
    let mut tokens = Vec::new();
    while !grammar.has_ended() && tokens.len() < 2000 {
        let forced = grammar.forced();
        let start = Instant::now();
        let mask = grammar.mask().expect("the mask is within its limits");
        if forced.is_empty() {
            times.0.push(start.elapsed());
        }
        let (mut allowed, mut all, mut closing, mut parts) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (id, token) in vocabulary.iter().enumerate() {
            let id = id as u32;
            if !allows(&mask, id) {
                continue;
            }
            allowed.push(id);
            if !token.ends_answer {
                all.push(id);
            }
            if token.closes {
                closing.push(id);
            }
            if token.ends_part {
                parts.push(id);
            }
        }
        assert!(!allowed.is_empty());
        if let Some(&first) = forced.first() {
            assert_eq!(allowed, [first], "a forced token is the only one");
        }
        if all.len() < allowed.len() && (random.below(3) > 0 || tokens.len() > 200) {
            break;
        }
        let closing = if tokens.len() > 200 && !parts.is_empty() { parts } else { closing };
        let close = !closing.is_empty() && (random.below(3) > 0 || tokens.len() > 200);
        let from = if close { &closing } else { &all };
        let Some(&token) = from.get(random.below(from.len().max(1))) else { break };
        assert!(grammar.commit(token).expect("the grammar goes on"), "an allowed token is taken");
        tokens.push(token);
    }
    if tokens.len() == 2000 {
        return None;
    }
    let written = tokens.iter().flat_map(|id| vocabulary[*id as usize].bytes.clone());
    Some(String::from_utf8(written.collect()).expect("only whole characters"))
}

/// Whether the validator, which divides in f64, cannot tell that an integer is a multiple.
fn is_inexact(error: &jsonschema::ValidationError<'_>) -> bool {
    let is_multiple = matches!(error.kind(), ValidationErrorKind::MultipleOf { .. });
    is_multiple && error.instance().as_f64().is_some_and(|number| number.abs() > 2f64.powi(53))
}

/// 200 schemas, or `STEERSMAN_SCHEMAS`. What is sampled under the mask is valid for each schema that is
/// supported; each other one is refused with the path of its keyword.
#[test]
fn sampled_answers_are_valid_or_their_schema_is_refused_by_path() {
    let count = std::env::var("STEERSMAN_SCHEMAS").ok();
    let count = count.map_or(200, |count| count.parse().expect("STEERSMAN_SCHEMAS is a number"));
    let (text, grammars) = (text(), Grammars::new(text()));
    let vocabulary = vocabulary(&text);
    let start = Instant::now();
    grammars.compile(&of_form(Form::JsonObject)).expect("any object");
    println!("vocabulary of {} tokens built in {:?}", text.vocab_size(), start.elapsed());
    let mut times = Times::default();
    let (mut valid, mut refused, mut unfinished, mut wrong) = (0, 0, 0, Vec::new());
    let mut problems: BTreeMap<String, usize> = BTreeMap::new();
    let mut compile = Vec::new();
    for number in 0..count {
        let corpus::Case { schema, refused: paths } = corpus::case(number);
        let start = Instant::now();
        let compiled = grammars.compile(&of_form(Form::JsonSchema(schema.clone())));
        if paths.is_empty() {
            compile.push(start.elapsed());
        }
        match compiled {
            Err(RequestError::Structure { path, problem }) => {
                refused += 1;
                let path = path.strip_prefix("format").expect("the path begins with the field");
                if !paths.iter().any(|expected| expected == path) {
                    wrong.push(format!(
                        "{number}: refused at {path}, not {paths:?}: {problem} {schema}"
                    ));
                }
                *problems.entry(problem).or_default() += 1;
            }
            Err(error) => panic!("{error}"),
            Ok(grammar) => {
                if !paths.is_empty() {
                    wrong.push(format!("{number}: not refused at {paths:?}: {schema}"));
                    continue;
                }
                let validator = jsonschema::options()
                    .should_validate_formats(true)
                    .build(&schema)
                    .expect("the schema is valid");
                let random = &mut Random(number as u64 + 77);
                match sample(&vocabulary, grammar.expect("a form"), random, &mut times) {
                    None => unfinished += 1,
                    Some(answer) => {
                        let parsed: Value = serde_json::from_str(&answer).expect(&answer);
                        if let Err(error) = validator.validate(&parsed)
                            && !is_inexact(&error)
                        {
                            wrong.push(format!("{number}: {error}: {answer} of {schema}"));
                        }
                        valid += 1;
                    }
                }
            }
        }
    }
    compile.sort_unstable();
    times.0.sort_unstable();
    let at = |times: &[Duration], part: f64| times[((times.len() - 1) as f64 * part) as usize];
    println!(
        "{count} schemas: {valid} valid, {refused} refused, {unfinished} unfinished; {} masks: median \
         {:?}, p99 {:?}; compiled: median {:?}, p99 {:?}; {problems:#?}",
        times.0.len(),
        at(&times.0, 0.5),
        at(&times.0, 0.99),
        at(&compile, 0.5),
        at(&compile, 0.99),
    );
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    // Random texts of unlimited length: the samples are cut, not the grammar.
    assert!(unfinished * 8 <= count, "{unfinished} answers have no end");
}

/// Whether the grammar of `request` takes all of `answer`, and whether it may end there.
fn takes(request: &Request, answer: &str) -> (bool, bool) {
    let text = text();
    let mut grammar = Grammars::new(text.clone()).compile(request).unwrap().expect("a form");
    for token in text.encode(answer).unwrap() {
        if !grammar.commit(token).unwrap() {
            return (false, false);
        }
    }
    let mask = grammar.mask().unwrap();
    (true, text.eos().iter().all(|&eos| allows(&mask, eos)))
}

#[test]
fn each_form_takes_its_texts_only() {
    let (whole, part, never) = ((true, true), (true, false), (false, false));
    let cases = [
        (Form::JsonObject, "{\"a\": [1, {}]}", whole),
        (Form::JsonObject, "{\n  \"a\": 1", part),
        (Form::JsonObject, "[1]", never),
        (Form::Regex("[a-c]+/[0-9]{2}".into()), "abc/42", whole),
        (Form::Regex("[a-c]+/[0-9]{2}".into()), "abc/4", part),
        (Form::Regex("[a-c]+".into()), "abd", never),
        (Form::Choice(vec!["yes".into(), "no \"way\"".into()]), "no \"way\"", whole),
        (Form::Choice(vec!["yes".into(), "no".into()]), "ye", part),
        (Form::Choice(vec!["yes".into(), "no".into()]), "maybe", never),
        (Form::Lark("start: sum\nsum: N (\"+\" N)*\nN: /[0-9]+/".into()), "1+23+4", whole),
        (Form::Lark("start: \"a\" \"b\"".into()), "ba", never),
        (Form::Lark("root ::= item (\",\" item)*\nitem ::= [0-9]+".into()), "1,23", whole),
        (Form::Lark("root ::= item (\",\" item)*\nitem ::= [0-9]+".into()), "1,a", never),
    ];
    for (form, answer, expected) in cases {
        let request = of_form(form);
        assert_eq!(takes(&request, answer), expected, "{:?} {answer}", request.response_format);
    }
}

#[test]
fn forms_that_are_no_forms_are_refused_with_their_field() {
    let huge = "x".repeat(FORM_BYTES + 1);
    for form in [
        Form::JsonSchema(5.into()),
        Form::JsonSchema(json!({"type": "strin"})),
        Form::JsonSchema(Value::Bool(false)),
        Form::Regex("(".into()),
        Form::Regex(huge.clone()),
        Form::Lark("start: missing".into()),
        Form::Lark(String::new()),
        Form::Choice(Vec::new()),
        Form::Choice(vec![huge]),
    ] {
        let request = of_form(form);
        match Grammars::new(text()).compile(&request) {
            Err(RequestError::Structure { path, .. }) => {
                assert!(path.starts_with("format"), "{path}")
            }
            other => panic!("{other:?} {:?}", request.response_format),
        }
    }
}

#[test]
fn a_rewound_grammar_equals_one_that_never_went_further() {
    let text = text();
    let schema = json!({"type": "object", "properties": {"list": {"type": "array", "items": {"type": "integer"}}}, "required": ["list"]});
    let request = of_form(Form::JsonSchema(schema));
    let mut grammar = Grammars::new(text.clone()).compile(&request).unwrap().unwrap();
    let tokens = text.encode("{\"list\": [1, 22, 3]}").unwrap();
    let mut masks = Vec::new();
    for &token in &tokens {
        masks.push(grammar.mask().unwrap());
        assert!(grammar.commit(token).unwrap());
    }
    assert!(grammar.has_ended());
    for to in (0..tokens.len()).rev() {
        let mut rewound = grammar.clone();
        rewound.rewind(tokens.len() - to).unwrap();
        assert_eq!(rewound.mask().unwrap(), masks[to], "after {to} tokens");
        for &token in &tokens[to..] {
            assert!(rewound.commit(token).unwrap());
        }
        assert!(rewound.has_ended());
    }
}

fn tools(is_strict: bool) -> Vec<Value> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "days"],
        "additionalProperties": false,
    });
    let weather = json!({"name": "weather", "strict": is_strict, "parameters": parameters});
    let time = json!({"name": "time", "parameters": {"type": "object"}});
    vec![
        json!({"type": "function", "function": weather}),
        json!({"type": "function", "function": time}),
    ]
}

#[test]
fn required_calls_are_well_formed_and_strict_ones_follow_their_schema() {
    let choice = ToolChoice { is_required: true, ..ToolChoice::default() };
    let request = |is_strict, tool_choice: &ToolChoice| Request {
        tools: tools(is_strict),
        tool_choice: tool_choice.clone(),
        ..Request::default()
    };
    let call = |name: &str, parameters: &str| {
        format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    };
    let days = |days: &str| {
        call(
            "weather",
            &format!(
                "<parameter=city>\nBonn <b>\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n"
            ),
        )
    };
    let strict = request(true, &choice);
    let (whole, never) = ((true, true), (false, false));
    assert_eq!(takes(&strict, &days("5")), whole);
    assert_eq!(takes(&strict, &days("12")), never);
    assert_eq!(takes(&strict, "Hello"), never);
    assert_eq!(takes(&strict, &call("weather", "")), never);
    assert_eq!(takes(&strict, &call("other", "")), never);
    let twice = format!("{}\n{}", days("5"), call("time", ""));
    assert_eq!(takes(&strict, &twice), whole);
    assert_eq!(takes(&request(false, &choice), &days("12")), whole);
    let single = ToolChoice { is_single: true, ..choice.clone() };
    assert_eq!(takes(&request(true, &single), &twice), never);
    let named = ToolChoice { allowed: Some(vec!["time".into()]), ..choice };
    assert_eq!(takes(&request(true, &named), &days("5")), never);
    assert_eq!(takes(&request(true, &named), &call("time", "")), whole);
    let missing = ToolChoice { allowed: Some(vec!["no".into()]), ..named };
    let refused = Grammars::new(text()).compile(&request(true, &missing));
    assert!(matches!(refused, Err(RequestError::Structure { path, .. }) if path == "tool_choice"));
}

/// The bundled model's tokenizer with `tags` as tokens, and a chat template that names `format`.
fn text_of(format: &Format, tags: &[&str]) -> Text {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../server/model/tiny-hybrid-4bit");
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(bundled.join(file), folder.path().join(file)).unwrap();
    }
    let mut tokenizer: Value =
        serde_json::from_slice(&std::fs::read(bundled.join("tokenizer.json")).unwrap()).unwrap();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.retain(|token| !token["content"].as_str().unwrap().contains("tool_call"));
    for (id, tag) in (4096..).zip(tags) {
        added.push(json!({"id": id, "content": tag, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}));
    }
    let signs = format.signs().join(" ");
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), format!("{{# {signs} #}}")).unwrap();
    let text = Text::load(folder.path()).unwrap();
    assert_eq!(text.call_format().name, format.name);
    text
}

/// What is written here is what [`crate`] reads: its tests have the calls of each template.
#[test]
fn calls_of_every_format_follow_the_schema() {
    for format in FORMATS {
        let all: Vec<_> = format.tags().collect();
        for tags in [&all, &[][..], format.inner] {
            if format.has_messages() && tags.is_empty() {
                // Its tags are tokens always.
                continue;
            }
            let text = text_of(format, tags);
            let grammars = Grammars::new(text.clone());
            let call = |name: &str, arguments: &[(&str, Value)]| {
                format.written.spell(&[(name, arguments)])
            };
            let choice = ToolChoice { is_required: true, ..ToolChoice::default() };
            let strict =
                Request { tools: tools(true), tool_choice: choice.clone(), ..Request::default() };
            let check = |request: &Request, source: &str, expected: bool| {
                let grammar = grammars.compile(request);
                let mut grammar =
                    grammar.unwrap_or_else(|e| panic!("{}: {e}", format.name)).unwrap();
                let tokens = text.encode(source).unwrap();
                let takes = tokens.iter().all(|token| grammar.commit(*token).unwrap());
                let is_whole = takes && {
                    let mask = grammar.mask().unwrap();
                    text.eos().iter().any(|&id| allows(&mask, id))
                };
                assert_eq!(is_whole, expected, "{} {tags:?}: {source}", format.name);
            };
            let city = ("city", json!("Bonn b"));
            let days = |days: u32| [city.clone(), ("days", json!(days))];
            let unit = |unit: &str| [city.clone(), ("days", json!(5)), ("unit", json!(unit))];
            check(&strict, &call("weather", &days(5)), true);
            check(&strict, &call("weather", &unit("C")), true);
            check(&strict, &call("weather", &unit("K")), false);
            check(&strict, &call("weather", &days(12)), false);
            check(&strict, &call("weather", &[]), false);
            check(&strict, &call("other", &[]), false);
            check(&strict, "Hello", false);
            check(&strict, &call("time", &[]), true);
            check(&strict, &call("time", &[("zone", json!("CET")), ("at", json!("now"))]), true);
            let twice = format.written.spell(&[("weather", &days(5)), ("time", &[])]);
            check(&strict, &twice, true);
            let single = ToolChoice { is_single: true, ..choice };
            let single = Request { tool_choice: single, ..strict.clone() };
            check(&single, &call("weather", &days(5)), true);
            check(&single, &twice, false);
            // From the tag on, where nothing requires a call.
            let lazy = Request { tool_choice: ToolChoice::default(), ..strict };
            let source = call("weather", &days(5));
            let wrong = call("weather", &days(12));
            match (format.bare, format.open) {
                (Some(_), _) => {
                    check(&lazy, &source, true);
                    check(&lazy, &wrong, false);
                    check(&lazy, "Hello {", true);
                }
                (None, Some(open)) => {
                    check(&lazy, source.strip_prefix(open).unwrap(), true);
                    check(&lazy, wrong.strip_prefix(open).unwrap(), false);
                }
                (None, None) => {
                    assert!(format.has_messages(), "{} has no beginning", format.name);
                    check(&lazy, &source, true);
                    check(&lazy, &wrong, false);
                    check(&lazy, "Hello", false);
                }
            }
        }
    }
}

/// Fault F3: in formats that write strings bare or in quotes of their own, a strict tool's `const`, `$ref`,
/// `anyOf`, `allOf` and lists of types were accepted and not enforced. Each is enforced, or refused with its path.
#[test]
fn strict_parameters_are_enforced_through_references_and_combinations_or_refused() {
    let defs = json!({
        "Mode": {"type": "string", "enum": ["list", "load"]},
        "Short": {"type": "string", "maxLength": 2},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}]},
    });
    let tool = |schema: &Value| {
        json!({"type": "function", "function": {"name": "book", "strict": true, "parameters": {
            "type": "object", "properties": {"title": schema}, "required": ["title"],
            "additionalProperties": false, "$defs": defs}}})
    };
    let choice = ToolChoice { is_required: true, ..ToolChoice::default() };
    let request = |schema: &Value| Request {
        tools: vec![tool(schema)],
        tool_choice: choice.clone(),
        ..Request::default()
    };
    let null_or = |schema: Value| json!({"anyOf": [schema, {"type": "null"}]});
    let bare = ["qwen", "gemma-4", "glm", "minimax", "seed-oss", "deepseek-v3.2", "function-gemma"];
    for format in FORMATS.iter().filter(|format| bare.contains(&format.name)) {
        let text = text_of(format, &format.tags().collect::<Vec<_>>());
        let grammars = Grammars::new(text.clone());
        for (schema, good, bad) in [
            (json!({"const": "list"}), json!(["list"]), json!(["lists", 1])),
            (json!({"$ref": "#/$defs/Mode"}), json!(["load"]), json!(["x"])),
            (json!({"anyOf": [{"const": "a"}, {"const": 2}]}), json!(["a", 2]), json!(["b", 3])),
            (null_or(json!({"enum": ["list"]})), json!(["list", null]), json!(["x", true])),
            (null_or(json!({"$ref": "#/$defs/Mode"})), json!(["list", null]), json!(["x"])),
            (
                json!({"type": ["string", "null"], "enum": ["a", null]}),
                json!(["a", null]),
                json!(["b", 1]),
            ),
            (json!({"enum": ["a", 1, true]}), json!(["a", 1, true]), json!(["b", 2, false])),
            (
                json!({"allOf": [{"$ref": "#/$defs/Mode"}, {"const": "load"}]}),
                json!(["load"]),
                json!(["list"]),
            ),
            (json!({"oneOf": [{"const": "a"}, {"const": "b"}]}), json!(["a", "b"]), json!(["c"])),
            (json!({"enum": ["a", "abc"], "maxLength": 2}), json!(["a"]), json!(["abc"])),
            (json!({"type": "integer", "maximum": 5}), json!([5]), json!([6, "x"])),
            (
                json!({"anyOf": [{"type": "integer"}, {"const": "auto"}]}),
                json!([5, "auto"]),
                json!(["x"]),
            ),
            (json!({"type": ["string", "null"]}), json!(["any text"]), json!([])),
        ] {
            for (values, expected) in [(good, true), (bad, false)] {
                for value in values.as_array().unwrap() {
                    let source = format.written.spell(&[("book", &[("title", value.clone())])]);
                    let grammar = grammars.compile(&request(&schema));
                    let mut grammar = grammar
                        .unwrap_or_else(|e| panic!("{}: {schema}: {e}", format.name))
                        .unwrap();
                    let tokens = text.encode(&source).unwrap();
                    let takes = tokens.iter().all(|token| grammar.commit(*token).unwrap());
                    assert_eq!(takes, expected, "{}: {schema}: {source}", format.name);
                }
            }
        }
        for (schema, path) in [
            (json!({"$ref": "#/$defs/Short"}), "$defs.Short.maxLength"),
            (
                null_or(json!({"type": "string", "pattern": "a+"})),
                "properties.title.anyOf[0].pattern",
            ),
            (
                json!({"allOf": [{"minLength": 2}, {"type": "string"}]}),
                "properties.title.allOf[0].minLength",
            ),
            (json!({"$ref": "#/$defs/Loop"}), "$defs.Loop.anyOf[0].$ref"),
            (json!({"allOf": [{"const": "a"}, {"const": "b"}]}), "properties.title"),
        ] {
            let refused = grammars.compile(&request(&schema));
            let path = format!("tools[0].function.parameters.{path}");
            assert!(
                matches!(&refused, Err(RequestError::Structure { path: at, .. }) if at.starts_with(&path)),
                "{}: {schema}: {refused:?}",
                format.name
            );
        }
    }
}

#[test]
fn a_request_without_a_form_has_no_grammar() {
    let grammars = Grammars::new(text());
    let compile =
        |request: &Request| grammars.compile(request).unwrap().map(|grammar| grammar.scope);
    assert_eq!(compile(&Request::default()), None);
    assert_eq!(compile(&Request { tools: tools(false), ..Request::default() }), None);
    assert_eq!(compile(&Request { tools: tools(true), ..Request::default() }), Some(Scope::Call));
    let both = Request { tools: tools(false), ..of_form(Form::JsonObject) };
    assert_eq!(compile(&both), Some(Scope::Answer));
    assert!(takes(&both, "{}").0);
    assert_eq!(
        takes(&both, "<tool_call>\n<function=time>\n</function>\n</tool_call>"),
        (true, true)
    );
}

/// Limits hold for forms that would take exponential time or memory: each is compiled or refused, and so
/// is each mask.
#[test]
fn hostile_forms_are_bounded() {
    let many: serde_json::Map<String, Value> = (0..2000)
        .map(|i| (format!("p{i}"), json!({"type": "string", "pattern": "a+b+c+"})))
        .collect();
    let deep = (0..100).fold(json!({}), |inner, _| json!({"type": "array", "items": inner}));
    for form in [
        Form::Regex("((a{1000}){1000}){1000}".into()),
        Form::Regex("(a|aa)*(a|b){500}[ab]{500}".into()),
        Form::Regex("(.*a.*b.*c.*d.*e){20}".into()),
        Form::Lark("start: start start | \"a\" | \"\"".into()),
        Form::Lark("start: a\na: b b b b\nb: c c c c\nc: a? a? a? \"x\"?".into()),
        Form::Choice((0..20_000).map(|i| format!("{i}{i}")).collect()),
        Form::JsonSchema(json!({"type": "object", "properties": many})),
        Form::JsonSchema(deep),
        Form::JsonSchema(json!({"$ref": "#"})),
        Form::JsonSchema(json!({"type": "string", "minLength": 1_000_000_000})),
        Form::JsonSchema(json!({"type": "array", "minItems": 1_000_000_000})),
        Form::JsonSchema(json!({"allOf": [{"$ref": "#"}]})),
    ] {
        let request = of_form(form);
        let Ok(Some(mut grammar)) = Grammars::new(text()).compile(&request) else { continue };
        for _ in 0..20 {
            let Ok(mask) = grammar.mask() else { break };
            let Some(token) = (0..4096).rev().find(|&token| allows(&mask, token)) else { break };
            if !grammar.commit(token).unwrap_or(false) || grammar.has_ended() {
                break;
            }
        }
    }
}
