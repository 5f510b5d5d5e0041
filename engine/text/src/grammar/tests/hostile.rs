//! Forms that are made to take time, memory or stack: each ends, as a grammar or refused with its field.

use std::sync::mpsc::{RecvTimeoutError, channel};

use parking_lot::Mutex;

use super::*;
use steersman_policy_host::Vocabulary;

/// Elapsed time of a test of one form before it counts as endless; some 100 times what the slowest takes.
const ENDLESS: Duration = Duration::from_secs(60);

/// Tokens that are committed to a grammar.
const TOKENS: usize = 40;

fn grammars() -> Arc<Grammars> {
    Arc::new(Grammars::new(text()))
}

/// What happened to a form.
#[derive(Debug)]
struct Tried {
    refused: Option<(String, String)>,
    compiled: Duration,
    /// The longest mask.
    masked: Duration,
}

/// Compiles a form, and follows its grammar.
fn follow(grammars: &Grammars, form: &Form, random: &mut Random) -> Tried {
    let start = Instant::now();
    let compiled = grammars.compile(&of_form(form.clone()));
    let (compiled, took) = (compiled, start.elapsed());
    let mut tried = Tried { refused: None, compiled: took, masked: Duration::ZERO };
    let refused = |error: RequestError| match error {
        RequestError::Structure { path, problem } => Some((path, problem)),
        error => panic!("{error}"),
    };
    let mut grammar = match compiled {
        Ok(grammar) => grammar.expect("a form"),
        Err(error) => return Tried { refused: refused(error), ..tried },
    };
    for _ in 0..TOKENS {
        let start = Instant::now();
        let forced = grammar.forced();
        let mask = grammar.mask();
        tried.masked = tried.masked.max(start.elapsed());
        let mask = match mask {
            Ok(mask) => mask,
            Err(error) => return Tried { refused: refused(error), ..tried },
        };
        let allowed: Vec<u32> =
            (0..mask.len() as u32 * 32).filter(|&token| allows(&mask, token)).collect();
        let token = forced.first().copied().unwrap_or(allowed[random.below(allowed.len())]);
        if !grammar.commit(token).unwrap_or(false) || grammar.has_ended() {
            break;
        }
    }
    tried
}

/// [`follow`] on a thread with a small stack, as those that prepare requests have; fails if it does not end.
fn follow_in_time(grammars: &Arc<Grammars>, form: Form, seed: u64) -> Tried {
    let (sender, receiver) = channel();
    let (own, tried) = (grammars.clone(), form.clone());
    let thread = std::thread::Builder::new().stack_size(1 << 20).spawn(move || {
        let _ = sender.send(follow(&own, &tried, &mut Random(seed)));
    });
    match receiver.recv_timeout(ENDLESS) {
        Ok(tried) => tried,
        Err(RecvTimeoutError::Timeout) => panic!("{seed}: takes more than {ENDLESS:?}: {form:?}"),
        Err(RecvTimeoutError::Disconnected) => {
            panic!("{seed}: {:?}: {form:?}", thread.unwrap().join().unwrap_err())
        }
    }
}

fn chain(length: usize, part: impl Fn(Value) -> Value) -> Value {
    let step = |i: usize| (format!("d{i}"), part(json!({"$ref": format!("#/$defs/d{}", i + 1)})));
    let mut definitions: serde_json::Map<String, Value> = (0..length).map(step).collect();
    definitions.insert(format!("d{length}"), json!({"type": "string"}));
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

fn rules(length: usize) -> String {
    let rules = (0..length).map(|i| format!("r{i}: \"a\" r{}\n", i + 1));
    format!("start: r0\n{}r{length}: \"b\"\n", rules.collect::<String>())
}

/// A1: a chain of 250 references ended the process, which has no room on a stack of 2 MiB: "thread 'prepare' has
/// overflowed its stack". So did 700 rules of a grammar.
#[test]
fn long_chains_are_compiled_or_refused_on_any_stack() {
    let grammars = grammars();
    let any = |inner| json!({"anyOf": [inner, {"type": "null"}]});
    let object = |inner| json!({"type": "object", "properties": {"a": inner}});
    let all = |inner| json!({"allOf": [inner, {"minLength": 1}]});
    let plain = |inner| inner;
    let is_accepted = |form| follow_in_time(&grammars, form, 1).refused.is_none();
    for length in [250, 1_000] {
        assert!(is_accepted(Form::JsonSchema(chain(length, any))));
        assert!(is_accepted(Form::JsonSchema(chain(length, object))));
        assert!(is_accepted(Form::Lark(rules(length))));
    }
    for part in [all as fn(Value) -> Value, plain] {
        follow_in_time(&grammars, Form::JsonSchema(chain(2_500, part)), 1);
    }
    follow_in_time(&grammars, Form::Lark(rules(8_000)), 1);
    let tried = follow_in_time(&grammars, Form::JsonSchema(chain(2_500, any)), 1);
    let (path, problem) = tried.refused.unwrap();
    assert!(path == "format" && problem.contains("levels"), "{path}: {problem}");
    // These took a minute: which of the properties may be left out is found out step by step.
    let wide: serde_json::Map<_, _> = (0..9_000).map(|i| (format!("p{i}"), json!(true))).collect();
    let wide = Form::JsonSchema(json!({"type": "object", "properties": wide}));
    let (path, problem) = follow_in_time(&grammars, wide, 1).refused.unwrap();
    assert!(path == "format.properties" && problem.contains("9000"), "{path}: {problem}");
    let wide: serde_json::Map<_, _> = (0..1_000).map(|i| (format!("p{i}"), json!(true))).collect();
    assert!(is_accepted(Form::JsonSchema(json!({"type": "object", "properties": wide}))));
    follow_in_time(
        &grammars,
        Form::Regex(format!("{}a{}", "(".repeat(90_000), ")".repeat(90_000))),
        1,
    );
}

fn patterns(count: usize) -> Value {
    let pattern = |i: usize| json!({"pattern": format!("(a|b)*a(a|b){{{}}}", 5 + i)});
    json!({"type": "string", "allOf": (0..count).map(pattern).collect::<Vec<_>>()})
}

/// A2: the intersection of 13 patterns was tested for ever, and two such requests stopped all others. The same
/// test runs again at each token, on the engine's thread, so that a form may be hard behind its first text.
#[test]
fn intersections_end_wherever_they_stand() {
    let grammars = grammars();
    let refused = |form: Form, expected: &str| {
        let (path, problem) = follow_in_time(&grammars, form, 2).refused.expect(expected);
        assert_eq!(path, expected, "{problem}");
    };
    for count in [8, 13, 20] {
        refused(Form::JsonSchema(patterns(count)), "format.allOf");
        let merged = json!({"allOf": (0..count).map(|i| json!({
            "properties": {"a": {"type": "string", "pattern": format!("(a|b)*a(a|b){{{}}}", 5 + i)}}
        })).collect::<Vec<_>>()});
        refused(Form::JsonSchema(merged), "format.allOf");
        let all: Vec<_> = (0..count).map(|i| format!("/(a|b)*a(a|b){{{}}}/", 5 + i)).collect();
        let all = all.join(" & ");
        refused(Form::Lark(format!("start: T\nT: {all}")), "format");
        refused(Form::Lark(format!("start: \"x\" T\nT: {all}")), "format");
        refused(Form::Lark(format!("start: T\nT: /x/ ({all})")), "format");
        let json = format!("start: \"x\" %json {}", patterns(count));
        refused(Form::Lark(json), "format.allOf");
    }
    // A policy's plan is checked on the same thread.
    let planned = AnswerForm::JsonSchema(patterns(20).to_string());
    let problem = grammars.check_form(&planned).unwrap_err();
    assert!(problem.starts_with("form.allOf: "), "{problem}");
    // Few sets and long repetitions: this took three minutes, as sorting their alternatives is not counted.
    let repeated = "/((([g-z0-9])*)*)+(((é)+(\\s)?){8,})?/ & /((.){13}){2,}.*(a)*.{21}/ & /(.*é.{20}(é){23}|([a-m][g-z0-9])+(a)?){2,}/";
    refused(Form::Lark(format!("start: T\nT: {repeated}")), "format");
}

/// `multipleOf` has a state for each remainder: 1,000,003 took 20 s of a core, and four such requests all threads for
/// forms. Least common multiples and powers of ten overflowed: a panic, or in optimised builds another number.
#[test]
fn large_multiples_are_refused_with_the_path() {
    let grammars = grammars();
    let refused = |schema: Value| {
        follow_in_time(&grammars, Form::JsonSchema(schema), 5).refused.map(|(path, _)| path)
    };
    let number = |multiple: Value| json!({"type": "number", "multipleOf": multiple});
    for large in [json!(1_000_003), json!(1e-10), json!(0.123_456_7)] {
        assert_eq!(refused(number(large)).as_deref(), Some("format.multipleOf"));
    }
    let property = json!({"properties": {"a": {"items": number(json!(999_983))}}});
    assert_eq!(refused(property).as_deref(), Some("format.properties.a.items.multipleOf"));
    let several = json!({"allOf": [number(json!(9973)), number(json!(9967)), number(json!(9949))]});
    assert_eq!(refused(several).as_deref(), Some("format.allOf"));
    let definitions = json!({"a": number(json!(65_536))});
    let referred = json!({"$ref": "#/$defs/a", "multipleOf": 65_535, "$defs": definitions});
    assert_eq!(refused(referred).as_deref(), Some("format.$ref"));
    for common in [json!(0.01), json!(3600), json!(0.000_001), json!(25)] {
        assert_eq!(refused(number(common)), None);
    }
    assert_eq!(refused(json!({"allOf": [number(json!(0.5)), number(json!(3))]})), None);
    let request = of_form(Form::JsonSchema(
        json!({"type": "integer", "allOf": [{"multipleOf": 6}, {"multipleOf": 4}]}),
    ));
    assert!(takes(&request, "24").1 && !takes(&request, "18").1);
}

/// Intersections of two or three common patterns are enforced, as are formats with patterns.
#[test]
fn common_intersections_are_enforced() {
    let grammars = grammars();
    for schema in [
        json!({"type": "string", "allOf": [{"pattern": "^[a-z]"}, {"pattern": "[0-9]$"}, {"pattern": "^\\S+$"}]}),
        json!({"type": "string", "pattern": "^[A-Z]{2}\\d{2}[A-Z0-9]{1,30}$", "minLength": 15, "maxLength": 34}),
        json!({"type": "string", "format": "date-time", "pattern": "Z$", "minLength": 20}),
        json!({"type": "string", "pattern": "[a-z]", "allOf": [{"pattern": "[A-Z]"}, {"minLength": 8}]}),
        json!({"allOf": [
            {"type": "object", "properties": {"id": {"type": "string", "pattern": "^x-"}}, "required": ["id"]},
            {"properties": {"id": {"maxLength": 9}, "mail": {"type": "string", "format": "email"}}},
        ]}),
        json!({"type": "object", "additionalProperties": {"type": "string", "pattern": "^[^@]+@[^@]+$"},
            "patternProperties": {"^x-.*$": {"type": "string"}, "^y": {"type": "integer"}}, "properties": {"a": {}}}),
    ] {
        let tried = follow_in_time(&grammars, Form::JsonSchema(schema.clone()), 3);
        assert!(tried.refused.is_none(), "{:?} {schema}", tried.refused);
    }
}

/// F20: a property behind a pattern that no other name matches was accepted, and the reply ended in an error
/// behind its comma: "NoExtensionBias".
#[test]
fn a_form_that_leads_into_a_dead_end_is_refused_with_the_path() {
    let grammars = grammars();
    let overlapping = json!({
        "type": "object",
        "properties": {"score": {"type": "integer", "multipleOf": 5}},
        "required": ["score"],
        "additionalProperties": false,
        "patternProperties": {"^score$": {"type": "integer"}},
    });
    let within = json!({"type": "array", "items": overlapping});
    for (form, expected) in [
        (Form::JsonSchema(overlapping.clone()), "format"),
        (Form::JsonSchema(within), "format.items"),
        (Form::Lark("start: \"a\" (\"b\" T)*\nT: /x/ & /y/".into()), "format"),
        (Form::Lark("start: \"a\" T\nT: /[^\\s\\S]/".into()), "format"),
    ] {
        let refused = follow_in_time(&grammars, form.clone(), 4).refused;
        let (path, problem) = refused.unwrap_or_else(|| panic!("{form:?}"));
        assert!(path.starts_with(expected), "{path}: {problem}");
    }
    // Each ended with a word of llguidance's: "NoExtensionBias".
    for form in [
        Form::Lark("start: start".into()),
        Form::Regex("a[^\\s\\S]b".into()),
        Form::Lark("root ::= root \"a\"".into()),
        Form::JsonSchema(
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        ),
        Form::JsonSchema(json!({"allOf": [{"$ref": "#"}]})),
    ] {
        let (_, problem) = follow_in_time(&grammars, form.clone(), 4).refused.unwrap();
        assert!(problem.contains("no text is in this form"), "{problem} {form:?}");
    }
    // The names that no pattern leaves are no dead end if another name may follow.
    for schema in [
        json!({"type": "object", "patternProperties": {"^.*$": {"type": "integer"}}}),
        json!({"type": "object", "patternProperties": {"": {"type": "integer"}}, "properties": {"a": {}}}),
    ] {
        let tried = follow_in_time(&grammars, Form::JsonSchema(schema.clone()), 4);
        assert!(tried.refused.is_none(), "{:?} {schema}", tried.refused);
    }
}

/// F21: a choice of 4,000 texts was refused, with advice on left recursion, while an `enum` of 3,000 works. A
/// choice is one terminal.
#[test]
fn a_choice_of_thousands_of_texts_is_enforced() {
    let texts: Vec<String> = (0..4_000).map(|i| format!("option {i}")).collect();
    let request = of_form(Form::Choice(texts));
    assert_eq!(takes(&request, "option 3999"), (true, true));
    assert!(!takes(&request, "option 39999").0);
    let choice =
        |texts: &[&str]| of_form(Form::Choice(texts.iter().map(|t| t.to_string()).collect()));
    assert_eq!(takes(&choice(&["", "a", "ab"]), ""), (true, true));
    assert_eq!(takes(&choice(&["", "a", "ab"]), "ab"), (true, true));
    assert_eq!(takes(&choice(&["a\n\"\\", "b"]), "a\n\"\\"), (true, true));
}

/// F26: `uniqueItems: false`, which is the default, was refused. So were others that demand nothing.
#[test]
fn keywords_that_demand_nothing_are_accepted() {
    let schema = json!({
        "type": "array", "maxItems": 2, "uniqueItems": false, "unevaluatedItems": true,
        "items": {"type": "object", "propertyNames": {}, "unevaluatedProperties": true, "dependentRequired": {}},
    });
    assert_eq!(takes(&of_form(Form::JsonSchema(schema)), "[{}, {}]"), (true, true));
    let named = json!({"enum": [{"uniqueItems": false}]});
    assert_eq!(takes(&of_form(Form::JsonSchema(named)), "{\"uniqueItems\": false}"), (true, true));
}

/// A5: each of 32 choices compiled the form twice. A form is compiled once, whoever asks for it.
#[test]
fn a_form_is_compiled_once() {
    let grammars = grammars();
    let form = || Form::Choice(vec!["yes".into(), "no".into()]);
    let first = grammars.compile(&of_form(form())).unwrap().unwrap();
    let other = ResponseFormat { field: "other", form: form() };
    let request = Request { response_format: Some(other), ..Request::default() };
    let mut second = grammars.compile(&request).unwrap().unwrap();
    assert_eq!((first.digest, second.field), (second.digest, "other"));
    assert_eq!(grammars.compiler.compiled(), 1);
    // What one reply does to its grammar is not remembered.
    while !second.has_ended() {
        let mask = second.mask().unwrap();
        let token = (0..mask.len() as u32 * 32).find(|&token| allows(&mask, token)).unwrap();
        assert!(second.commit(token).unwrap());
    }
    assert!(!grammars.compile(&request).unwrap().unwrap().has_ended());
    for i in 0..100 {
        grammars.compile(&of_form(Form::Choice(vec![format!("text {i}")]))).unwrap();
    }
    assert_eq!(grammars.compiler.compiled(), 101);
    assert!(grammars.compiler.remembered() <= compile::FORMS);
    let tool = |strict| Request { tools: tools(strict), ..Request::default() };
    assert!(Grammars::has_form(&request) && Grammars::has_form(&tool(true)));
    assert!(!Grammars::has_form(&tool(false)) && !Grammars::has_form(&Request::default()));
}

/// The schemas of strict tools had no limit but the body's, and were copied with their definitions for each
/// parameter; references that fan out were followed on all ways.
#[test]
fn schemas_of_tools_are_bounded_as_forms_are() {
    let grammars = grammars();
    let tool = |parameters: Value| Request {
        tools: vec![
            json!({"type": "function", "function": {"name": "a", "strict": true, "parameters": parameters}}),
        ],
        ..Request::default()
    };
    let refused = |parameters: Value| match grammars.compile(&tool(parameters)) {
        Err(RequestError::Structure { path, .. }) => path,
        other => panic!("{other:?}"),
    };
    let path = "tools[0].function.parameters";
    let properties = |count: usize, schema: Value| -> serde_json::Map<String, Value> {
        (0..count).map(|i| (format!("p{i}"), schema.clone())).collect()
    };
    let large = json!({"type": "object", "description": "x".repeat(FORM_BYTES)});
    assert_eq!(refused(large), path);
    let copied = json!({"type": "object", "properties": properties(900, json!({})),
        "$defs": {"a": {"description": "x".repeat(FORM_BYTES / 2)}}});
    assert_eq!(refused(copied), path);
    let hard = json!({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": patterns(20)}}}});
    assert_eq!(refused(hard), format!("{path}.properties.a.properties.b.allOf"));
    let fan = |i: usize| vec![json!({"$ref": format!("#/$defs/d{}", i + 1)}); 30];
    let mut definitions: serde_json::Map<_, _> =
        (0..9).map(|i| (format!("d{i}"), json!({"anyOf": fan(i)}))).collect();
    definitions.insert("d9".into(), json!({"type": "integer"}));
    let fanned = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions});
    let _ = grammars.compile(&tool(fanned));
}

/// The end of an engine waits for its threads that prepare requests, and these waited up to 20 s for a compilation:
/// SIGTERM ended the process that much later than its grace.
#[test]
fn the_end_of_an_engine_waits_for_no_compilation() {
    let compiler = Arc::new(Compiler::default());
    let (release, held) = channel::<()>();
    let held = Arc::new(Mutex::new(held));
    // One more than may run.
    let wait = |_| {
        let (compiler, held) = (compiler.clone(), held.clone());
        std::thread::spawn(move || compiler.run(1 << 20, move || held.lock().recv().is_ok()))
    };
    let waits: Vec<_> = (0..=compile::COMPILATIONS).map(wait).collect();
    while compiler.running() < compile::COMPILATIONS {
        std::thread::yield_now();
    }
    compiler.end();
    for wait in waits {
        let problem = wait.join().unwrap().unwrap_err();
        assert!(problem.contains("the server stops"), "{problem}");
    }
    drop(release);
}

fn expression(random: &mut Random, depth: usize) -> String {
    let atoms = ["a", "b", ".", "[ab]", "[^a]", "\\w", "\\s", "é", "(a|b)", "[a-m]", "[g-z0-9]"];
    if depth == 0 {
        return atoms[random.below(atoms.len())].into();
    }
    let inner = expression(random, depth - 1);
    match random.below(7) {
        0 => format!("({inner})*"),
        1 => format!("({inner}){{{}}}", 1 + random.below(60)),
        2 => format!("({inner}){{{},}}", random.below(9)),
        3 => format!("({inner}|{})", expression(random, depth - 1)),
        4 => format!("{inner}{}", expression(random, depth - 1)),
        5 => format!(".*{inner}.{{{}}}", random.below(30)),
        _ => format!("({inner})+({})?", expression(random, depth - 1)),
    }
}

/// A schema whose parts apply together, refer to one another, and are many.
fn schema(random: &mut Random, depth: usize) -> Value {
    let most = if random.below(9) == 0 { 300 } else { 6 };
    let number = 1 + random.below(most);
    let nested = |random: &mut Random| schema(random, depth.saturating_sub(1));
    let few = |random: &mut Random| -> Vec<Value> {
        (0..2 + random.below(4)).map(|_| nested(random)).collect()
    };
    match random.below(if depth == 0 { 5 } else { 14 }) {
        0 => json!({"type": "string", "pattern": expression(random, 3)}),
        1 => {
            json!({"enum": (0..number * 9).map(|i| format!("value {i} {}", i * 7)).collect::<Vec<_>>()})
        }
        2 => {
            json!({"type": "string", "minLength": random.below(2000), "maxLength": 2000 + random.below(9000)})
        }
        3 => {
            json!({"type": "string", "format": random.of(&["date-time", "email", "uri", "uuid", "ipv6"]),
            "pattern": expression(random, 2)})
        }
        4 => json!({"type": "number", "multipleOf": 0.01, "minimum": -5, "maximum": 1e9}),
        5 => {
            json!({"type": "string", "allOf": (0..number).map(|_| json!({"pattern": expression(random, 2)})).collect::<Vec<_>>()})
        }
        6 => json!({"allOf": few(random)}),
        7 => json!({"anyOf": few(random), "type": ["string", "object"]}),
        8 => {
            json!({"oneOf": (0..number).map(|i| json!({"properties": {"kind": {"const": i}, "a": nested(random)},
            "type": "object", "required": ["kind"]})).take(40).collect::<Vec<_>>()})
        }
        9 => json!({"type": "object", "patternProperties": (0..number).map(|i|
            (format!("^{i}{}", expression(random, 1)), json!({"type": "integer"}))).collect::<serde_json::Map<_, _>>()}),
        10 => json!({"type": "object", "properties": (0..number).map(|i|
            (format!("p{i}"), json!({"type": "string"}))).collect::<serde_json::Map<_, _>>(), "minProperties": random.below(3)}),
        11 => json!({"type": "array", "items": nested(random), "minItems": random.below(1000)}),
        12 => chain(number * 3, |inner| match number % 3 {
            0 => json!({"allOf": [inner, {"pattern": "a.*b"}]}),
            1 => json!({"anyOf": [inner, {"type": "null"}]}),
            _ => json!({"type": "array", "items": inner, "maxItems": 3}),
        }),
        _ => json!({"$ref": "#", "allOf": [nested(random)]}),
    }
}

fn lark(random: &mut Random) -> String {
    let expressions: Vec<_> =
        (0..1 + random.below(9)).map(|_| format!("/{}/", expression(random, 3))).collect();
    let count = 1 + random.below(500);
    match random.below(8) {
        0 => format!("start: T\nT: {}", expressions.join(" & ")),
        1 => format!("start: \"x\" T \"y\"\nT: {}", expressions.join(" & ")),
        2 => format!(
            "start: \"x\" (T \",\")*\nT: /a*/ {} | ~({})",
            expressions[0],
            expressions.join(" | ")
        ),
        3 => rules(count * 4),
        4 => format!(
            "start: {}",
            (0..count).map(|i| format!("\"w{i}\"")).collect::<Vec<_>>().join(" | ")
        ),
        5 => "start: s\ns: s s | s \"a\" s | \"b\"? s? | \"c\"".into(),
        6 => format!(
            "start: a{{{count}}}\na: {} | (\"x\" a)~{}",
            expressions[0],
            1 + random.below(9)
        ),
        _ => format!("start: \"x\" %json {}", schema(random, 2)),
    }
}

fn gbnf(random: &mut Random) -> String {
    let mut text = String::from("root ::= r0\n");
    let count = 1 + random.below(400);
    for i in 0..count {
        let next = if random.below(9) == 0 { random.below(count) } else { i + 1 };
        let atom = random.of(&["[a-z]+", "\"x\\\\x1\"", "[^\"\\\\]*", "\"é\"{0,40}", "."]);
        text += &format!("r{i} ::= {atom} r{next} | \"{i}\"\n");
    }
    text + &format!("r{count} ::= \"end\"\n")
}

fn hostile(number: u64) -> Form {
    let random = &mut Random(number + 1);
    match random.below(10) {
        0..4 => Form::JsonSchema(schema(random, 3)),
        4 => Form::Regex(expression(random, 6)),
        5 => {
            let size = random.below(3000);
            Form::Choice(
                (0..1 + random.below(60))
                    .map(|i| format!("{i}{}", "lorem ".repeat(size / 30 + i)))
                    .collect(),
            )
        }
        6..8 => Form::Lark(lark(random)),
        8 => Form::Lark(gbnf(random)),
        _ => Form::Regex(
            (0..random.below(40)).map(|_| expression(random, 2)).collect::<Vec<_>>().join("|"),
        ),
    }
}

/// Each form compiles or is refused with its field, each mask is computed or ends its reply, and nothing panics, overflows
/// a stack or runs without end. The forms are a twentieth of [`fuzz_inputs`](steersman_test_support::fuzz_inputs), from number
/// `STEERSMAN_FUZZ_FIRST` on.
#[test]
fn generated_hostile_forms_end() {
    let first = std::env::var("STEERSMAN_FUZZ_FIRST");
    let first = first.map_or(0, |first| first.parse().expect("STEERSMAN_FUZZ_FIRST is a number"));
    // A form takes as long as some dozens of other inputs.
    let count = steersman_test_support::fuzz_inputs() as u64 / 20;
    let grammars = grammars();
    let (mut refused, mut slow) = (0, Vec::new());
    for number in first..first + count {
        let tried = follow_in_time(&grammars, hostile(number), number);
        if let Some((path, problem)) = &tried.refused {
            assert!(
                path.starts_with("format") && !problem.contains("panic"),
                "{number} {path}: {problem}"
            );
            refused += 1;
        }
        slow.push((tried.compiled.max(tried.masked), tried.compiled, tried.masked, number));
    }
    slow.sort_unstable();
    let [compiled, masked] =
        [|t: &(_, Duration, Duration, u64)| (t.1, t.3), |t: &(_, _, Duration, u64)| (t.2, t.3)]
            .map(|of| slow.iter().map(of).max());
    println!("{count} forms, {refused} refused; longest compilation {compiled:?}, mask {masked:?}");
    println!("slowest: {:?}", slow.iter().rev().take(9).collect::<Vec<_>>());
    let memory = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    println!(
        "{:?}",
        memory
            .lines()
            .filter(|l| l.starts_with("VmHWM") || l.starts_with("VmRSS"))
            .collect::<Vec<_>>()
    );
    // Most are within what is enforced, or the bounds are too narrow to test anything behind them.
    assert!(refused * 4 < count * 3, "{refused} of {count} are refused");
}
