//! Objects that list their properties have no others, unless something in their schema may need others.

use super::*;

/// Whether a reply of the form `schema` may be `answer`.
fn may_be(text: &Text, grammars: &Grammars, schema: &Value, answer: &Value) -> bool {
    let grammar = grammars.compile(&of_form(Form::JsonSchema(schema.clone())));
    let mut grammar = grammar.unwrap_or_else(|error| panic!("{schema}: {error}")).expect("a form");
    let tokens = text.encode(&answer.to_string()).unwrap();
    let taken = tokens.iter().all(|token| grammar.commit(*token).unwrap());
    let mask = taken.then(|| grammar.mask().unwrap());
    mask.is_some_and(|mask| text.eos().iter().all(|&eos| allows(&mask, eos)))
}

/// An object with the required property `a`, a number.
fn with_a() -> Value {
    json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
}

/// Small models wrote keys that the schema does not list, which other servers do not let them.
#[test]
fn objects_that_list_their_properties_have_no_others() {
    let (text, grammars) = (text(), Grammars::new(text()));
    let kind = |kind: &str, other: &str| {
        json!({"type": "object", "required": ["kind"],
            "properties": {"kind": {"const": kind}, other: {"type": "integer"}}})
    };
    let defs = json!({"A": with_a()});
    let node = json!({"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"const": 1}}});
    for (schema, good, bad) in [
        (with_a(), json!({"a": 1}), json!({"a": 1, "b": 2})),
        (json!({"properties": {"a": {}}}), json!({"a": 1}), json!({"b": 1})),
        (json!({"type": "object", "properties": {}}), json!({}), json!({"a": 1})),
        (
            json!({"type": "array", "items": with_a()}),
            json!([{"a": 1}, {"a": 2}]),
            json!([{"a": 1, "b": 2}]),
        ),
        (
            json!({"type": "object", "additionalProperties": with_a()}),
            json!({"x": {"a": 1}}),
            json!({"x": {"a": 1, "b": 2}}),
        ),
        (
            json!({"$ref": "#/$defs/A", "$defs": defs, "description": "One."}),
            json!({"a": 1}),
            json!({"a": 1, "b": 2}),
        ),
        (
            json!({"type": "object", "properties": {"one": {"allOf": [{"$ref": "#/$defs/A"}], "title": "One"}},
                "$defs": defs}),
            json!({"one": {"a": 1}}),
            json!({"one": {"a": 1, "b": 2}}),
        ),
        (
            json!({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": defs}),
            json!({"a": 1}),
            json!({"a": 1, "b": 2}),
        ),
        (
            json!({"oneOf": [kind("cat", "lives"), kind("dog", "age")]}),
            json!({"kind": "dog", "age": 2}),
            json!({"kind": "dog", "lives": 2}),
        ),
        (json!({"oneOf": [with_a(), {"type": "null"}]}), json!({"a": 1}), json!({"a": 1, "b": 2})),
        (node, json!({"next": {"n": 1}}), json!({"next": {"m": 1}})),
    ] {
        assert!(may_be(&text, &grammars, &schema, &good), "{schema}: {good}");
        assert!(!may_be(&text, &grammars, &schema, &bad), "{schema}: {bad}");
        assert!(jsonschema::is_valid(&schema, &good), "{schema}: {good}");
    }
}

#[test]
fn objects_that_may_need_other_properties_stay_open() {
    let (text, grammars) = (text(), Grammars::new(text()));
    let with_b = json!({"type": "object", "properties": {"b": {"type": "integer"}}});
    let both = |schema: &Value| {
        let mut orders = [json!({"a": 1, "b": 2}), json!({"b": 2, "a": 1})].into_iter();
        orders.any(|both| may_be(&text, &grammars, schema, &both))
    };
    let plus = |keyword: &str, value: Value| {
        let mut schema = with_a();
        schema[keyword] = value;
        schema
    };
    for schema in [
        plus("additionalProperties", json!(true)),
        plus("additionalProperties", json!({"type": "integer"})),
        plus("unevaluatedProperties", json!(true)),
        plus("patternProperties", json!({"^b$": {"type": "integer"}})),
        plus("required", json!(["a", "b"])),
        plus("allOf", json!([with_b])),
        plus("anyOf", json!([with_b, {"required": ["c"]}])),
        json!({"$ref": "#/$defs/B", "properties": {"a": {}}, "$defs": {"B": with_b}}),
        json!({"allOf": [with_a(), with_b]}),
        json!({"allOf": [{"anyOf": [with_a(), {"type": "null"}]}, with_b]}),
        json!({"allOf": [{"$ref": "#/$defs/A"}, with_b], "$defs": {"A": with_a()}}),
        json!({"allOf": [{"$ref": "#/$defs/A"}], "required": ["b"], "$defs": {"A": with_a()}}),
    ] {
        assert!(both(&schema), "{schema}");
    }
    // So do objects in a property that two schemas describe.
    let in_x = |schema: &Value| json!({"type": "object", "properties": {"x": schema}});
    for schema in [
        json!({"allOf": [in_x(&with_a()), in_x(&with_b)]}),
        json!({"$ref": "#/$defs/B", "properties": {"x": with_a()}, "$defs": {"B": in_x(&with_b)}}),
        json!({"type": "object", "properties": {"x": with_a()}, "patternProperties": {"^x$": with_b}}),
    ] {
        let mut orders = [json!({"a": 1, "b": 2}), json!({"b": 2, "a": 1})].into_iter();
        let may_be = |x: Value| may_be(&text, &grammars, &schema, &json!({"x": x}));
        assert!(orders.any(may_be), "{schema}");
    }
    // A definition that is one of several for an object is open wherever it is used.
    let twice = json!({
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/A"}, "two": {"allOf": [{"$ref": "#/$defs/A"}, with_b]}},
        "$defs": {"A": with_a()},
    });
    for answer in [json!({"one": {"a": 1, "c": 2}}), json!({"two": {"a": 1, "c": 2}})] {
        assert!(may_be(&text, &grammars, &twice, &answer), "{answer}");
    }
}

/// Closed, the options exclude each other, and `{"a": "x"}` would be a reply: the client's schema allows it twice, and
/// so not at all.
#[test]
fn options_that_overlap_as_they_were_written_are_refused_still() {
    let schema = json!({"oneOf": [
        {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"const": "y"}}},
    ]});
    assert!(!jsonschema::is_valid(&schema, &json!({"a": "x"})));
    let refused = Grammars::new(text()).compile(&of_form(Form::JsonSchema(schema)));
    let expected = "format.oneOf";
    assert!(
        matches!(&refused, Err(RequestError::Structure { path, .. }) if path == expected),
        "{refused:?}"
    );
}

/// Arguments of a strict tool have the parameters that it lists, and so have the objects within them, in formats that
/// write arguments as JSON and in those that write them one by one.
#[test]
fn arguments_of_strict_tools_have_no_other_parameters() {
    let parameters = json!({"type": "object", "properties": {"at": with_a()}, "required": ["at"]});
    let request = Request {
        tools: vec![json!({"type": "function", "function": {
            "name": "book", "strict": true, "parameters": parameters}})],
        tool_choice: ToolChoice { is_required: true, ..ToolChoice::default() },
        ..Request::default()
    };
    for name in ["hermes", "qwen"] {
        let format = FORMATS.iter().find(|format| format.name == name).unwrap();
        let text = text_of(format, &format.tags().collect::<Vec<_>>());
        let grammars = Grammars::new(text.clone());
        let takes = |arguments: &[(&str, Value)]| {
            let mut grammar = grammars.compile(&request).unwrap().expect("a form");
            let source = format.written.spell(&[("book", arguments)]);
            text.encode(&source).unwrap().iter().all(|token| grammar.commit(*token).unwrap())
        };
        assert!(takes(&[("at", json!({"a": 1}))]), "{name}");
        assert!(!takes(&[("at", json!({"a": 1, "b": 2}))]), "{name}");
        assert!(!takes(&[("at", json!({"a": 1})), ("b", json!(2))]), "{name}");
    }
}
