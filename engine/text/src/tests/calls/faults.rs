//! Calls that models wrote wrong, and what became of them, by fault.

use super::*;

fn faults_tools() -> Vec<Value> {
    let object = |properties: Value| json!({"type": "object", "properties": properties});
    let mut tools = tools();
    for (name, parameters) in [
        (
            "book",
            object(json!({
                "title": {"type": "string"}, "count": {"type": "integer"},
                "note": {"type": "string"}, "meta": {"type": "object"},
            })),
        ),
        ("ping", object(json!({}))),
        (
            "pick",
            json!({
                "$defs": {
                    "Level": {"enum": [1, 2]},
                    "Mode": {"oneOf": [{"const": "edit"}, {"const": 7}]},
                    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"const": true}]},
                },
                "allOf": [{"properties": {"both": {"type": "boolean"}}}],
                "properties": {
                    "level": {"anyOf": [{"const": 1}, {"const": 2}]},
                    "flag": {"const": true},
                    "named": {"$ref": "#/$defs/Level"},
                    "mode": {"$ref": "#/$defs/Mode"},
                    "loop": {"$ref": "#/$defs/Loop"},
                    "some": {"allOf": [{"type": ["integer", "string", "null"]}, {"minimum": 0}]},
                    "mixed": {"enum": ["1", 2, null]},
                    "text": {"const": "5"},
                    "keyed": {"properties": {"a": {"type": "integer"}}},
                },
            }),
        ),
    ] {
        tools.push(json!({"function": {"name": name, "parameters": parameters}}));
    }
    tools
}

/// The reply `source` of a model that writes calls in this format, with tags as tokens: its account, and the
/// same of a stream.
fn account(name: &str, source: &str) -> [String; 2] {
    let format = format(name);
    let tokenizer = tokenizer(format, &format.tags().collect::<Vec<_>>());
    let tokens = tokens(&tokenizer, format, source, &[]);
    let mut whole =
        Reply::new(tokenizer.clone(), &prompt(&tokenizer, format), &[], &faults_tools());
    whole.read_untagged_calls();
    let mut streamed = whole.clone();
    streamed.stream_calls();
    [whole, streamed].map(|mut reply| {
        let mut pieces: Vec<_> = tokens.iter().flat_map(|token| reply.push(*token)).collect();
        pieces.extend(reply.finish_turn());
        let calls = pieces.iter().filter_map(|piece| match piece {
            Piece::ToolCall(call) => {
                let json = call.function.arguments.to_json();
                Some(format!("{} {json}", call.function.name))
            }
            _ => None,
        });
        let mut seen: Vec<String> = calls.collect();
        let open = reassembled(&pieces).into_iter().filter_map(|(id, name, arguments)| {
            let is_closed =
                pieces.iter().any(|piece| matches!(piece, Piece::ToolCall(call) if call.id == id));
            (!is_closed).then(|| {
                assert!(serde_json::from_str::<Value>(&arguments).is_err(), "{arguments}");
                format!("open {name} {arguments}")
            })
        });
        seen.extend(open);
        let shown = pieces.iter().filter(|piece| matches!(piece, Piece::Answer(_))).cloned();
        seen.push(summary(shown.collect()));
        seen.retain(|part| !part.is_empty());
        seen.join("; ")
    })
}

/// Checks the account of each reply, whole and streamed; each is a format, a reply, and what it comes to.
fn check_all<S: AsRef<str>, E: AsRef<str>>(
    replies: impl IntoIterator<Item = (&'static str, S, E)>,
) {
    let mut wrong = Vec::new();
    for (name, source, expected) in replies {
        let (source, expected) = (source.as_ref(), expected.as_ref());
        let [whole, streamed] = account(name, source);
        if whole != expected || streamed != expected {
            wrong.push(format!(
                "{name}: {source}\n  whole:    {whole}\n  streamed: {streamed}\n  expected: {expected}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn hermes(arguments: &str) -> String {
    format!("<tool_call>{{\"name\": \"book\", \"arguments\": {arguments}}}</tool_call>")
}

fn qwen(body: &str) -> String {
    format!("<tool_call>\n<function=book>\n{body}</tool_call>")
}

/// Fault F5: in a stream, a malformed call became a shorter one that parsed: `say "hi" now` was the command
/// `say `. Now its arguments stay open, and so do not parse.
#[test]
fn no_malformed_call_becomes_a_shorter_one_in_a_stream() {
    for (name, source, open) in [
        ("hermes", hermes(r#"{"title": "say "hi" now"}"#), r#"open book {"title":"say ""#),
        ("hermes", hermes(r#"{"title": "A", "count": 007}"#), r#"open book {"title":"A""#),
        ("hermes", hermes(r#"{"title": "A", "count": NaN}"#), r#"open book {"title":"A""#),
        ("hermes", hermes(r#"{"title": "A", "meta": {"a": [1, +5]}}"#), "open book"),
        ("hermes", hermes(r#"{"title": "A"} oops"#), r#"open book {"title":"A""#),
        (
            "llama-3",
            r#"{"name": "book", "parameters": {"title": "mv a b" c"}}"#.into(),
            r#"open book {"title":"mv a b""#,
        ),
        (
            "gemma-4",
            "<|tool_call>call:book{title:<|\"|>A<|\"|>count:3}<tool_call|>".into(),
            r#"open book {"title":"A""#,
        ),
        ("pythonic", "[book(title='a' b')]".into(), r#"open book {"title":"a""#),
        // Half a key: closing the arguments would drop it.
        (
            "hermes",
            r#"<tool_call>{"name": "book", "arguments": {"title": "A", "co"#.into(),
            "open book",
        ),
    ] {
        let [whole, streamed] = account(name, &source);
        assert!(whole.starts_with("answer["), "{whole}");
        assert!(streamed.starts_with(open), "{streamed}");
    }
    // Nothing of these was certain, so streams have them as text, too.
    let as_text = [
        ("hermes", hermes(r#""Dune""#)),
        ("hermes", hermes(r#"{"count": 0x10}"#)),
        ("hermes", hermes("[1]")),
        ("hermes", r#"<tool_call>{"name": "book", "arguments": "{\"title\": \"A"#.into()),
        (
            "hermes",
            r#"<tool_call>{"name": "book", "name": "ping", "arguments": {}}</tool_call>"#.into(),
        ),
        ("gemma-4", "<|tool_call>call:book{title:Dune, count:3}<tool_call|>".into()),
        ("gemma-4", "<|tool_call>call:book{title:'Dune'}<tool_call|>".into()),
    ];
    check_all(as_text.map(|(name, source)| (name, source.clone(), format!("answer[{source}]"))));
}

/// A turn that ends in a value, as `rm -rf /tmp/x` of `rm -rf /tmp/x/cache`, was a call with the first half of it,
/// and brackets after a missing quote were part of the command.
#[test]
fn a_call_with_half_a_value_is_malformed() {
    let tagged = |text: &str| format!("<tool_call>{text}</tool_call>");
    for (name, source) in [
        ("hermes", tagged(r#"{"name": "book", "arguments": {"note": "rm -rf /tmp/x}}"#)),
        ("hermes", r#"<tool_call>{"name": "book", "arguments": {"note": "rm -rf /tmp/x"#.into()),
        ("hermes", r#"<tool_call>{"name": "book", "arguments": {"note": "rm -rf "#.into()),
        ("hermes", r#"<tool_call>{"name": "book", "arguments": {"note": "A", "count": 1"#.into()),
        ("llama-3", r#"{"name": "book", "parameters": {"note": "A", "meta": {"a": [1, 2"#.into()),
        (
            "mistral",
            r#"[TOOL_CALLS][{"name": "book", "arguments": {"note": "rm -rf /tmp/x}]"#.into(),
        ),
        ("gemma-4", "<|tool_call>call:book{note:<|\"|>rm -rf /tmp/x}<tool_call|>".into()),
        ("lfm2", "<|tool_call_start|>[book(note=\"rm -rf /tmp/x)]<|tool_call_end|>".into()),
        ("qwen", "<tool_call>\n<function=book>\n<parameter=note>\nrm -rf /tmp/x".into()),
        (
            "glm",
            "<tool_call>book\n<arg_key>note</arg_key>\n<arg_value>rm -rf /tmp/x".into(),
        ),
        (
            "minimax",
            "<minimax:tool_call>\n<invoke name=\"book\">\n<parameter name=\"note\">rm -rf /tmp/x".into(),
        ),
        (
            "deepseek-v3.2",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"book\">\n<｜DSML｜parameter name=\"note\" \
             string=\"true\">rm -rf /tmp/x"
                .into(),
        ),
    ] {
        let [whole, streamed] = account(name, &source);
        assert!(whole.starts_with("answer["), "{name}: {whole}");
        assert!(streamed.starts_with("open book {\"note\":\""), "{name}: {streamed}");
    }
    // Here only brackets and tags are missing.
    check_all([
        (
            "hermes",
            tagged(r#"{"name": "book", "arguments": {"title": "A""#),
            r#"book {"title":"A"}"#,
        ),
        ("hermes", tagged(r#"{"name": "book", "arguments": {"count": 3"#), r#"book {"count":3}"#),
        (
            "llama-3",
            r#"{"name": "book", "parameters": {"meta": {"a": [1, true"#.into(),
            r#"book {"meta":{"a":[1,true]}}"#,
        ),
        (
            "qwen",
            "<tool_call>\n<function=book>\n<parameter=title>\nA\n</parameter>".into(),
            r#"book {"title":"A"}"#,
        ),
    ]);
}

/// Fault F4: without `</parameter>` or `</function>`, tags became part of the value.
#[test]
fn bare_values_end_where_another_parameter_or_the_end_of_the_call_begins() {
    let minimax = |body: &str| {
        format!("<minimax:tool_call>\n<invoke name=\"book\">\n{body}</minimax:tool_call>")
    };
    check_all([
        ("qwen", qwen("<parameter=title>\nT\n</parameter>\n"), r#"book {"title":"T"}"#),
        (
            "qwen",
            qwen("<parameter=title>\nA\n</parameter>\n<parameter=note>\nsigned copy\n</function>\n"),
            r#"book {"title":"A","note":"signed copy"}"#,
        ),
        (
            "qwen",
            qwen("<parameter=meta>\n{\"mode\": \"eco\"}\n</function>\n"),
            r#"book {"meta":{"mode":"eco"}}"#,
        ),
        (
            "qwen",
            qwen("<parameter=title>\nDune\n<parameter=count>\n3\n</parameter>\n</function>\n"),
            r#"book {"title":"Dune","count":3}"#,
        ),
        (
            "qwen",
            qwen("<parameter=title>Dune<parameter=count>3</function>"),
            r#"book {"title":"Dune","count":3}"#,
        ),
        ("qwen", qwen("<parameter=count>\n3\n"), r#"book {"count":3}"#),
        (
            "qwen",
            qwen("<parameter=title>\nA\n</parameter>\n<function=ping>\n</function>\n"),
            r#"book {"title":"A"}; ping {}"#,
        ),
        (
            "qwen",
            "<tool_call>\r\n<function=book>\r\n<parameter=title>\r\nT\r\nU\r\n</parameter>\r\n\
             </function>\r\n</tool_call>"
                .into(),
            r#"book {"title":"T\r\nU"}"#,
        ),
        // What is no parameter of the tool is text, and so is what the call has already.
        (
            "qwen",
            qwen("<parameter=title>\n<parameter=x>\ny\n</parameter> end\n</parameter>\n</function>\n"),
            r#"book {"title":"<parameter=x>\ny\n</parameter> end"}"#,
        ),
        (
            "qwen",
            qwen("<parameter=title>\na <parameter=title> b </function> c\n</parameter>\n</function>\n"),
            r#"book {"title":"a <parameter=title> b </function> c"}"#,
        ),
        (
            "qwen",
            qwen(
                "<parameter=title>\n<function=ping>\n<parameter=x>\nz\n</parameter>\n</function>\n</parameter>\n\
                 <parameter=count>\n1\n</parameter>\n</function>\n",
            ),
            r#"book {"title":"<function=ping>\n<parameter=x>\nz\n</parameter>\n</function>","count":1}"#,
        ),
        ("minimax", minimax("<parameter name=\"title\">Dune\n</invoke>\n"), r#"book {"title":"Dune"}"#),
        (
            "minimax",
            minimax("<parameter name=\"title\">Dune\n<parameter name=\"count\">3</parameter>\n</invoke>\n"),
            r#"book {"title":"Dune","count":3}"#,
        ),
        (
            "minimax",
            minimax("<parameter name=\"title\">\nDune\n</parameter>\n</invoke>\n"),
            r#"book {"title":"Dune"}"#,
        ),
        (
            "seed-oss",
            "<seed:tool_call>\n<function=book>\n<parameter=title>Dune\n<parameter=count>3</parameter>\n\
             </function>\n</seed:tool_call>"
                .into(),
            r#"book {"title":"Dune","count":3}"#,
        ),
        (
            "glm",
            "<tool_call>book\n<arg_key>title</arg_key>\n<arg_value>Dune\n<arg_key>count</arg_key>\n\
             <arg_value>3</arg_value>\n</tool_call>"
                .into(),
            r#"book {"title":"Dune","count":3}"#,
        ),
        (
            "deepseek-v3.2",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"book\">\n<｜DSML｜parameter name=\"title\" \
             string=\"true\">Dune\n<｜DSML｜parameter name=\"count\" string=\"false\">3\n\
             </｜DSML｜invoke>\n</｜DSML｜function_calls>"
                .into(),
            r#"book {"title":"Dune","count":3}"#,
        ),
    ]);
}

/// `book" id="1` was the name of a tool, and `title" type="string` that of a parameter.
#[test]
fn tags_with_more_attributes_are_no_names() {
    for (name, body) in [
        (
            "minimax",
            "<minimax:tool_call>\n<invoke name=\"book\" id=\"1\">\n</invoke>\n</minimax:tool_call>",
        ),
        (
            "minimax",
            "<minimax:tool_call>\n<invoke name=\"book\">\n<parameter name=\"title\" type=\"string\">A</parameter>\n\
             </invoke>\n</minimax:tool_call>",
        ),
        (
            "deepseek-v3.2",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"book\" id=\"1\">\n</｜DSML｜invoke>\n\
             </｜DSML｜function_calls>",
        ),
        ("qwen", "<tool_call>\n<function=\"book\">\n</function>\n</tool_call>"),
    ] {
        check_all([(name, body, format!("answer[{body}]"))]);
    }
}

/// Fault F14: values of `const` came as strings.
#[test]
fn bare_values_have_the_types_of_constants_references_and_combinations() {
    let values = [
        ("level", "2", "2"),
        ("flag", "true", "true"),
        ("flag", "True", "true"),
        ("named", "1", "1"),
        ("named", "x", r#""x""#),
        ("mode", "7", "7"),
        ("mode", "edit", r#""edit""#),
        ("loop", "true", "true"),
        ("some", "5", "5"),
        ("some", "null", "null"),
        ("some", "five", r#""five""#),
        ("mixed", "1", r#""1""#),
        ("mixed", "2", "2"),
        ("mixed", "null", "null"),
        ("text", "5", r#""5""#),
        ("both", "false", "false"),
        ("keyed", r#"{"a": 1}"#, r#"{"a":1}"#),
    ];
    check_all(values.map(|(parameter, text, json)| {
        let source = format!(
            "<tool_call>\n<function=pick>\n<parameter={parameter}>\n{text}\n</parameter>\n</function>\n\
             </tool_call>"
        );
        ("qwen", source, format!("pick {{\"{parameter}\":{json}}}"))
    }));
}

/// Faults F15 and F16, and calls that the notes of the same search left open: several calls in one place,
/// brackets too many, and calls without their tag.
#[test]
fn several_calls_in_one_place_and_calls_without_a_tag_are_calls() {
    let one = r#"{"name": "book", "arguments": {"title": "A"}}"#;
    let two = r#"{"name": "book", "arguments": {"title": "B"}}"#;
    let both = r#"book {"title":"A"}; book {"title":"B"}"#;
    let first = r#"book {"title":"A"}"#;
    let block = "<function=book>\n<parameter=title>\nA\n</parameter>\n</function>";
    let tagged = |text: &str| format!("<tool_call>\n{text}\n</tool_call>");
    let with = |text: &str| format!("{first}; answer[{text}]");
    check_all([
        ("hermes", tagged(&format!("{one}\n{two}")), both.to_string()),
        ("hermes", tagged(&format!("{one},\n{two}")), both.into()),
        ("hermes", tagged(&format!("{one}}}")), first.into()),
        ("hermes", tagged(&format!("{one}}}]")), first.into()),
        ("hermes", tagged(&format!("```json\n{one}\n```")), first.into()),
        ("hermes", tagged(&format!("{one}, and so on")), with(", and so on\n")),
        // A complete call is one, whatever becomes of the next.
        ("hermes", tagged(&format!("{one}\n{{\"nam}}")), with("{\"nam}\n</tool_call>")),
        (
            "hermes",
            tagged(r#"{"function": {"name": "book", "arguments": {"title": "A"}}}"#),
            first.into(),
        ),
        ("llama-3", format!("{one};"), first.into()),
        ("llama-3", format!("{one}; then I stop."), with(" then I stop.")),
        ("llama-3", format!("{one}\n{two}"), both.into()),
        ("llama-3", format!("{one}, {two}"), both.into()),
        ("mistral", format!("[TOOL_CALLS][{one}]\n\n[{two}]"), both.into()),
        ("mistral", r#"[TOOL_CALLS]book{"title": "A"}"#.into(), first.into()),
        (
            "mistral",
            r#"[TOOL_CALLS]book[ARGS]{"title": "A"}, book[ARGS]{"title": "B"}"#.into(),
            both.into(),
        ),
        ("mistral", r#"[TOOL_CALLS]book[ARGS]{"title": "A"}}"#.into(), first.into()),
        (
            "gemma-4",
            "<|tool_call>call:default_api:book{title:<|\"|>A<|\"|>}<tool_call|>".into(),
            first.into(),
        ),
        ("gemma-4", "<|tool_call>call:ping<tool_call|>".into(), "ping {}".into()),
        (
            "olmo-3",
            "<function_calls>book(title=\"A\")\nbook(title=\"B\")</function_calls>".into(),
            both.into(),
        ),
        (
            "lfm2",
            "<|tool_call_start|>[book(title=\"A\"), book(title='B')]<|tool_call_end|>".into(),
            both.into(),
        ),
        (
            "lfm2",
            "<|tool_call_start|>\n```python\nbook(title=\"A\")\n```\n<|tool_call_end|>".into(),
            first.into(),
        ),
        (
            "lfm2",
            "<|tool_call_start|>[book(title=\"A\")]<|tool_call_end|>Checking.".into(),
            with("Checking."),
        ),
        // Without a tag.
        ("qwen", block.into(), first.into()),
        ("qwen", format!("{block}\n</tool_call>"), first.into()),
        ("qwen", format!("Plan.\n\n{block}\n{block}"), format!("{first}; {first}; answer[Plan.]")),
        ("qwen", format!("{block}\nDone."), with("Done.")),
        ("qwen", format!("{block}\nDone.\n{block}"), format!("{first}; {first}; answer[Done.]")),
        ("qwen", format!("Write `{block}`"), format!("answer[Write `{block}`]")),
        ("qwen", format!("So:\n```\n{block}\n```"), format!("answer[So:\n```\n{block}\n```]")),
        ("qwen", "<function=none>\nx".into(), "answer[<function=none>\nx]".into()),
        (
            "minimax",
            "<invoke name=\"book\">\n<parameter name=\"title\">A</parameter>\n</invoke>".into(),
            first.into(),
        ),
        (
            "kimi",
            "Go.<|tool_call_begin|>functions.book:0<|tool_call_argument_begin|>{\"title\": \"A\"}\
             <|tool_call_end|>"
                .into(),
            with("Go."),
        ),
        (
            "kimi",
            "<|tool_call_begin|>functions.book:0<|tool_call_argument_begin|>{\"title\": \"A\"}\
             <|tool_call_end|>"
                .into(),
            first.into(),
        ),
        // The whole answer, in any format.
        ("hermes", one.into(), first.into()),
        ("hermes", format!("{one}\n{two}\n"), both.into()),
        ("hermes", format!("[{one}, {two}]"), both.into()),
        ("granite-3", one.into(), first.into()),
        ("hermes", format!("{one} is a call."), format!("answer[{one} is a call.]")),
        (
            "hermes",
            r#"{"name": "Bob", "age": 5}"#.into(),
            r#"answer[{"name": "Bob", "age": 5}]"#.into(),
        ),
        (
            "hermes",
            r#"{"name": "book", "arguments": [1]}"#.into(),
            r#"answer[{"name": "book", "arguments": [1]}]"#.into(),
        ),
        ("hermes", format!("Hm. {one}"), format!("answer[Hm. {one}]")),
    ]);
}

/// Faults F17 and F18: integers beyond 64 bits lost digits, `1e400` and `\u` without digits made a call
/// malformed.
#[test]
fn numbers_keep_their_digits_and_wrong_escapes_are_text() {
    let written = [
        (r#"{"count": 18446744073709551616}"#, r#"{"count":18446744073709551616}"#),
        (r#"{"count": 10000000000000000000001}"#, r#"{"count":10000000000000000000001}"#),
        (r#"{"count": 1e400, "x": -0.0, "y": 0.1000}"#, r#"{"count":1e400,"x":-0.0,"y":0.1000}"#),
        (r#"{"title": "C:\new\users\x.txt"}"#, r#"{"title":"C:\new\\users\\x.txt"}"#),
        (r#"{"title": "x \ud83d y"}"#, r#"{"title":"x \\ud83d y"}"#),
        (r#"{"title": "\ud83d\u0041\ude00"}"#, r#"{"title":"\\ud83dA\\ude00"}"#),
        (r#"{"title": "\ud83d\ude00\u00e9\u12"}"#, r#"{"title":"😀é\\u12"}"#),
        (
            r#"{"title": "rm -rf /tmp/job\ud83d/cache"}"#,
            r#"{"title":"rm -rf /tmp/job\\ud83d/cache"}"#,
        ),
    ];
    check_all(written.map(|(json, expected)| ("hermes", hermes(json), format!("book {expected}"))));
    let big = "<parameter=count>\n18446744073709551616\n</parameter>\n<parameter=meta>\n\
               {\"a\": 1e400}\n</parameter>\n</function>\n";
    check_all([("qwen", qwen(big), r#"book {"count":18446744073709551616,"meta":{"a":1e400}}"#)]);
    // Among the values, with which templates write earlier calls, digits are not rounded either.
    let arguments =
        r#"{"a":1e400,"b":["1e400",2],"c":18446744073709551616,"d":18446744073709551615}"#;
    let values = CallDraft { arguments: arguments.into(), ..CallDraft::default() }.values();
    assert_eq!(
        Value::from(values),
        json!({"a": "1e400", "b": ["1e400", 2], "c": "18446744073709551616", "d": u64::MAX})
    );
}
