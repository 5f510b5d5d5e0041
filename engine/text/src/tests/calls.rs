//! Laws of tool calls in every format: a seeded generator writes calls, and replies read them, whole and
//! byte by byte.

use serde_json::{Map, Value, json};

use super::*;
use crate::tool_call::{Arguments, CallDraft, FORMATS, Format, Text as Spelling};
use steersman_request::CallDelta;

mod damaged;
mod faults;
mod samples;

const CALLS: usize = 60;

/// A tokenizer in which every byte is a token, and `tags` are too. The last token is hidden.
fn tokenizer(format: &'static Format, tags: &[&str]) -> Arc<Tokenizer> {
    let mut tokenizer = of_bytes(tags, true);
    tokenizer.set_format(format);
    Arc::new(tokenizer)
}

/// A tokenizer in which every byte is a token, and `tags` are too, which are `special` or not.
pub(super) fn of_bytes(tags: &[&str], special: bool) -> Tokenizer {
    let hidden = |byte: &u32| matches!(byte, 0..=32 | 127..=160 | 173);
    let letter = |byte: u32| {
        let number = 256 + (0..byte).filter(hidden).count() as u32;
        char::from_u32(if hidden(&byte) { number } else { byte }).unwrap().to_string()
    };
    let vocab: Map<String, Value> = (0..256).map(|byte| (letter(byte), byte.into())).collect();
    let tags = tags.iter().chain(&["<|im_end|>"]);
    let added = (256..).zip(tags).map(|(id, content)| {
        json!({"id": id, "content": content, "special": special, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false})
    });
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false});
    let json = json!({"version": "1.0", "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": bytes, "decoder": bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    Tokenizer::parse(json.to_string().as_bytes()).expect("it parses")
}

/// The end of a prompt, where the format needs it.
fn prompt(tokenizer: &Tokenizer, format: &Format) -> Vec<u32> {
    match format.has_messages() {
        true => tokenizer.encode("<|start|>assistant").expect("it encodes"),
        false => Vec::new(),
    }
}

fn tools() -> Vec<Value> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "text": {"type": "string"}, "path": {"type": "string"}, "count": {"type": "integer"},
            "ratio": {"type": "number"}, "flag": {"type": "boolean"}, "list": {"type": "array"},
            "map": {"type": "object"}, "maybe": {"type": ["integer", "null"]},
        },
    });
    ["look_up", "write-file", "f"]
        .map(|name| json!({"function": {"name": name, "parameters": parameters}}))
        .to_vec()
}

impl Random {
    fn string(&mut self) -> String {
        const PARTS: &[&str] = &[
            "a",
            "word ",
            " ",
            "\n",
            "\t",
            "\"",
            "'",
            "\\",
            "\\n",
            "{",
            "}",
            "[",
            "]",
            "(",
            ")",
            ":",
            ",",
            "=",
            "<",
            ">",
            "é",
            "日本",
            "🙂",
            "</parameter>",
            "<tool_call>",
            "</tool_call>",
            "```",
            "null",
            "5",
            "[TOOL_CALLS]",
            "<｜tool▁calls▁end｜>",
            "<|tool_call_end|>",
            "&lt;",
            "\u{7f}",
            "</arg_value>",
            "</｜DSML｜parameter>",
            "<think>",
            "\r",
        ];
        let text: String = (0..self.below(9)).map(|_| self.pick(PARTS)).collect();
        // A test token counts as a tag if its text begins like one.
        let text = if text.starts_with(['<', '[']) { format!("x{text}") } else { text };
        // Where GLM's tags are text, these two together end a call anywhere.
        let both = text.contains("</arg_value>") && text.contains("</tool_call>");
        let text = if both { text.replace("</tool_call>", "tag") } else { text };
        // Where tags are text, so do these two: the tag of the call between them may be missing.
        let both = text.contains("</parameter>") && text.contains("</tool_call>");
        let text = if both { text.replace("</tool_call>", "tag") } else { text };
        // On lines of its own, a bare value loses both line breaks.
        let has_both = text.starts_with(['\r', '\n']) && text.ends_with('\n');
        let text = if has_both { text + "." } else { text };
        // The bare values of some formats cannot end so.
        if text.trim_end().ends_with("</arg_value>") { text + "." } else { text }
    }

    fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 5 } else { 7 }) {
            0 => Value::Null,
            1 => (self.below(2) == 0).into(),
            2 => (self.below(2000) as i64 - 1000).into(),
            3 => json!(self.below(1000) as f64 / 8.0),
            4 => self.string().into(),
            5 => (0..self.below(4)).map(|_| self.value(depth - 1)).collect(),
            _ => (0..self.below(4))
                .map(|i| (format!("key{i}"), self.value(depth - 1)))
                .collect::<Map<_, _>>()
                .into(),
        }
    }

    fn arguments(&mut self) -> Map<String, Value> {
        let list = |value: Value| if value.is_array() { value } else { json!([value]) };
        let map = |value: Value| if value.is_object() { value } else { json!({"one": value}) };
        let mut arguments = Map::new();
        for _ in 0..self.below(5) {
            let (key, value) = match self.below(8) {
                0 => ("text", self.string().into()),
                1 => ("path", self.string().into()),
                2 => ("count", (self.below(99) as i64 - 50).into()),
                3 => ("ratio", json!(self.below(100) as f64 / 4.0 + 0.125)),
                4 => ("flag", (self.below(2) == 0).into()),
                5 => ("list", list(self.value(2))),
                6 => ("map", map(self.value(2))),
                _ => ("maybe", Value::Null),
            };
            arguments.insert(key.into(), value);
        }
        arguments
    }

    fn calls(&mut self) -> Vec<(&'static str, Map<String, Value>)> {
        let count = [1, 1, 1, 2, 3][self.below(5)];
        (0..count).map(|_| (self.pick(&["look_up", "write-file", "f"]), self.arguments())).collect()
    }
}

/// The calls as a model writes them, JSON in one line or in many. Each format has samples below, too.
fn written(format: &Format, calls: &[(&str, Map<String, Value>)], random: &mut Random) -> String {
    let pairs = |arguments: &Map<String, Value>| -> Vec<(String, Value)> {
        arguments.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    let calls: Vec<_> = calls.iter().map(|(name, arguments)| (*name, pairs(arguments))).collect();
    let calls: Vec<(&str, Vec<(&str, Value)>)> = calls
        .iter()
        .map(|(name, all)| (*name, all.iter().map(|(k, v)| (k.as_str(), v.clone())).collect()))
        .collect();
    let calls: Vec<(&str, &[(&str, Value)])> =
        calls.iter().map(|(name, all)| (*name, &all[..])).collect();
    let source = format.written.spell(&calls);
    match format.written.arguments {
        Arguments::Json if random.below(3) == 0 => spaced(&source),
        _ => source,
    }
}

/// White space around the commas and colons of JSON that are not in strings.
fn spaced(source: &str) -> String {
    let (mut out, mut is_string, mut is_escaped) = (String::new(), false, false);
    for (at, c) in source.char_indices() {
        out.push(c);
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_string => is_escaped = true,
            '"' => is_string = !is_string,
            ',' | '{' if !is_string => out.push_str("\n  "),
            ':' if !is_string && source[..at].ends_with('"') => out.push(' '),
            _ => {}
        }
    }
    out
}

/// Each tag of `format` as its token, if it has one, and all else byte by byte. Within values no tag is a
/// token, as a model's tokenizer writes text; so tags are those of `written` with the values left out.
fn tokens(tokenizer: &Tokenizer, format: &Format, source: &str, values: &[String]) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut rest = source;
    let tags: Vec<_> = format.tags().collect();
    while !rest.is_empty() {
        let value = values.iter().find(|value| !value.is_empty() && rest.starts_with(*value));
        let tag = tags.iter().find(|tag| rest.starts_with(*tag));
        let length = match (value, tag) {
            (Some(value), _) => {
                tokens.extend(value.bytes().map(u32::from));
                value.len()
            }
            (None, Some(tag)) if tokenizer.id(tag).is_some() => {
                tokens.extend(tokenizer.id(tag));
                tag.len()
            }
            _ => {
                tokens.push(rest.as_bytes()[0].into());
                if rest.is_char_boundary(1) {
                    rest = &rest[1..];
                } else {
                    let c = rest.chars().next().map_or(1, char::len_utf8);
                    tokens.extend(rest.as_bytes()[1..c].iter().map(|byte| u32::from(*byte)));
                    rest = &rest[c..];
                }
                continue;
            }
        };
        rest = &rest[length..];
    }
    tokens
}

/// The strings in arguments as `written` has them, which no tag may interrupt.
fn strings(value: &Value, format: &Format, out: &mut Vec<String>) {
    match value {
        Value::String(text) => {
            let json = value.to_string();
            match &format.written.arguments {
                Arguments::Parameters { text: Spelling::Bare, .. } => {
                    out.push(text.clone());
                    out.push(json);
                }
                Arguments::Parameters { text: Spelling::Quoted(_), .. } => out.push(text.clone()),
                _ => out.push(json),
            }
        }
        Value::Array(all) => all.iter().for_each(|value| strings(value, format, out)),
        Value::Object(all) => all.values().for_each(|value| strings(value, format, out)),
        _ => {}
    }
}

/// Names and arguments of the whole calls among `pieces`.
fn whole(pieces: &[Piece]) -> Vec<(String, Map<String, Value>)> {
    let call = |piece: &Piece| match piece {
        Piece::ToolCall(call) => {
            Some((call.function.name.clone(), Map::clone(&call.function.arguments)))
        }
        _ => None,
    };
    pieces.iter().filter_map(call).collect()
}

/// The pieces of calls put together: id, name, arguments.
fn reassembled(pieces: &[Piece]) -> Vec<(String, String, String)> {
    let mut calls: Vec<(String, String, String)> = Vec::new();
    for piece in pieces {
        let Piece::CallDelta(CallDelta { id, name, arguments }) = piece else { continue };
        match (name, calls.last_mut()) {
            (Some(name), _) => calls.push((id.clone(), name.clone(), arguments.clone())),
            (None, Some((last, _, all))) if last == id => all.push_str(arguments),
            other => panic!("{other:?} {id}"),
        }
    }
    calls
}

/// Tags of the format that are in `tags` are tokens.
fn check_format(format: &'static Format, tags: &[&str]) {
    let tokenizer = tokenizer(format, tags);
    let has_tags = format.tags().all(|tag| tags.contains(&tag));
    let prompt = prompt(&tokenizer, format);
    let mut random = Random(format.name.len() as u64 + tags.len() as u64);
    for number in 0..CALLS {
        let calls = random.calls();
        let has_text = format.bare.is_none() && !format.has_messages();
        let before = if has_text && number % 3 == 0 { "Let me see.\n" } else { "" };
        let source = format!("{before}{}", written(format, &calls, &mut random));
        let mut values = Vec::new();
        for (_, arguments) in &calls {
            strings(&Value::from(arguments.clone()), format, &mut values);
        }
        values.sort_by_key(|value| std::cmp::Reverse(value.len()));
        values.retain(|value| format.tags().any(|tag| value.contains(tag)));
        let tokens = tokens(&tokenizer, format, &source, &values);
        let about = format!("{} {number}: {source}", format.name);
        let expected: Vec<_> =
            calls.iter().map(|(name, arguments)| (name.to_string(), arguments.clone())).collect();
        let reply = Reply::new(tokenizer.clone(), &prompt, &[], &tools());

        let mut plain = reply.clone();
        let mut pieces: Vec<_> = tokens.iter().flat_map(|token| plain.push(*token)).collect();
        pieces.extend(plain.finish_turn());
        assert_eq!(whole(&pieces), expected, "{about}");
        assert_eq!(reassembled(&pieces), [], "{about}");
        let others = pieces.iter().filter(|piece| !matches!(piece, Piece::ToolCall(_)));
        let shown = summary(others.cloned().collect());
        let answer = before.trim_end();
        assert_eq!(
            shown,
            if answer.is_empty() { String::new() } else { format!("answer[{answer}]") }
        );

        let mut streamed = reply.clone();
        streamed.stream_calls();
        let mut pieces = Vec::new();
        for token in &tokens {
            pieces.extend(streamed.push(*token));
            // Where tags are text, a limit may cut one off, whose beginning is then taken for a value's.
            if number % 20 == 0 && has_tags {
                check_cut(&streamed, &pieces, &expected, &about);
            }
        }
        pieces.extend(streamed.finish_turn());
        assert_eq!(whole(&pieces), expected, "{about}");
        let ids = pieces.iter().filter_map(|piece| match piece {
            Piece::ToolCall(call) => Some(call.id.clone()),
            _ => None,
        });
        let parts = reassembled(&pieces);
        assert_eq!(parts.len(), expected.len(), "{about}");
        for ((id, name, arguments), ((of_call, values), call)) in
            parts.iter().zip(expected.iter().zip(ids))
        {
            assert_eq!((id, name), (&call, of_call), "{about}");
            // Equal in every byte to the arguments of the whole call.
            assert_eq!(*arguments, Value::from(values.clone()).to_string(), "{about}");
        }
        assert!(!pieces.iter().any(|piece| matches!(piece, Piece::Note(_))), "{about}");
        // They are written as the call is: long ones come in many pieces.
        let longest =
            expected.iter().map(|(_, all)| Value::from(all.clone()).to_string().len()).max();
        let deltas = pieces.iter().filter(|piece| matches!(piece, Piece::CallDelta(_))).count();
        assert!(deltas >= longest.unwrap_or(0) / 80, "{deltas} pieces: {about}");
    }
}

/// A reply that a limit cuts here has a prefix of the calls, and no more.
fn check_cut(
    reply: &Reply,
    before: &[Piece],
    expected: &[(String, Map<String, Value>)],
    about: &str,
) {
    let mut cut = reply.clone();
    let pieces = [before, &cut.finish()].concat();
    let calls = whole(&pieces);
    assert!(expected.starts_with(&calls), "{about}");
    for ((_, name, arguments), (of_call, values)) in reassembled(&pieces).iter().zip(expected) {
        assert_eq!(name, of_call, "{about}");
        let whole = Value::from(values.clone()).to_string();
        // What is left of a character that was cut.
        let certain = arguments.trim_end_matches('\u{fffd}');
        assert!(whole.starts_with(certain), "{arguments}: {about}");
    }
}

#[test]
fn calls_of_every_format_are_read_whole_and_cut_at_every_byte() {
    for format in FORMATS {
        let all: Vec<_> = format.tags().collect();
        check_format(format, &all);
        if format.has_messages() {
            // Its tags are tokens always.
            continue;
        }
        check_format(format, &[]);
        // DeepSeek's vocabulary has the middle of its tags only.
        check_format(format, format.inner);
    }
}

fn format(name: &str) -> &'static Format {
    FORMATS.iter().find(|format| format.name == name).expect("a format")
}

/// The reply `source` in a format, with tags as tokens: what clients see, and the same streamed.
fn check(name: &str, source: &str, expected: &str) {
    let format = format(name);
    let tokenizer = tokenizer(format, &format.tags().collect::<Vec<_>>());
    let tokens = tokens(&tokenizer, format, source, &[]);
    let prompt = prompt(&tokenizer, format);
    let reply = Reply::new(tokenizer, &prompt, &[], &tools());
    for streams in [false, true] {
        let mut reply = reply.clone();
        if streams {
            reply.stream_calls();
        }
        let mut pieces: Vec<_> = tokens.iter().flat_map(|token| reply.push(*token)).collect();
        pieces.extend(reply.finish_turn());
        assert_eq!(summary(pieces), expected, "{name}, streams: {streams}, {source}");
    }
}

/// A model that forgets the end of a call, writes a line break in a string, or text after the call.
#[test]
fn malformed_calls_are_repaired_with_a_note_or_come_as_text() {
    let repaired = "note[repaired a malformed call of `f`]";
    let call = r#"call[f {"text":"a"}]"#;
    for (name, source, expected) in [
        (
            "hermes",
            r#"<tool_call>{"name": "f", "arguments": {"text": "a"}</tool_call>"#,
            format!("{call} {repaired}"),
        ),
        (
            "hermes",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"text\": \"a\n\\d\",}}</tool_call>",
            format!(r#"call[f {{"text":"a\n\\d"}}] {repaired}"#),
        ),
        (
            "hermes",
            r#"<tool_call>{"name": "f", "arguments": {"flag": True}}</tool_call>"#,
            format!(r#"call[f {{"flag":true}}] {repaired}"#),
        ),
        ("qwen", "<tool_call><function=f><parameter=text>a</tool_call>", format!("{call} {repaired}")),
        (
            "qwen",
            "<tool_call><function=f><parameter=text>a</parameter></function> So.</tool_call>",
            format!("{call} {repaired} answer[ So.]"),
        ),
        ("llama-3", r#"{"name": "f", "parameters": {"text": "a"}"#, format!("{call} {repaired}")),
        ("pythonic", "[f(text='a'", format!("{call} {repaired}")),
        ("gemma-4", "<|tool_call>call:f{text:<|\"|>a<|\"|><tool_call|>", format!("{call} {repaired}")),
        // What is no call, or of no tool.
        ("llama-3", r#"{"name": "Bob", "age": 5}"#, r#"answer[{"name": "Bob", "age": 5}]"#.into()),
        ("llama-3", r#"{"city": "Rome"}"#, r#"answer[{"city": "Rome"}]"#.into()),
        ("pythonic", "[1, 2]", "answer[[1, 2]]".into()),
        ("pythonic", "[x] is done", "answer[[x] is done]".into()),
        ("glm", "<tool_call> is a tag", "answer[<tool_call> is a tag]".into()),
        (
            "hermes",
            r#"<tool_call>{"name": "no", "arguments": {</tool_call>"#,
            r#"note[sent a malformed call as text of `no`] answer[<tool_call>{"name": "no", "arguments": {</tool_call>]"#.into(),
        ),
    ] {
        check(name, source, &expected);
    }
}

/// Clients of streams have the beginning of a call before it turns out to be malformed: they must not be able to
/// run it (fault F5).
#[test]
fn streamed_calls_stay_open_where_they_become_malformed_and_at_a_limit() {
    let format = format("hermes");
    let tokenizer = tokenizer(format, &format.tags().collect::<Vec<_>>());
    let start = |source: &str| {
        let mut reply = Reply::new(tokenizer.clone(), &[], &[], &tools());
        reply.stream_calls();
        let tokens = tokens(&tokenizer, format, source, &[]);
        let pieces: Vec<_> = tokens.iter().flat_map(|token| reply.push(*token)).collect();
        (reply, pieces)
    };
    let source = r#"<tool_call>{"name": "f", "arguments": {"text": "a", oops}</tool_call>"#;
    let (mut reply, mut pieces) = start(source);
    pieces.extend(reply.finish_turn());
    let parts = reassembled(&pieces);
    assert_eq!(parts[0].2, r#"{"text":"a""#);
    assert_eq!(
        summary(pieces),
        "note[did not complete a malformed call of `f`] answer[oops}</tool_call>]"
    );

    let (mut reply, mut pieces) =
        start(r#"<tool_call>{"name": "f", "arguments": {"text": "rm -r /tmp"#);
    pieces.extend(reply.finish());
    assert_eq!(reassembled(&pieces)[0].2, r#"{"text":"rm -r /tmp"#);
    assert_eq!(summary(pieces), "note[did not complete a call of `f`]");
}

#[test]
fn long_arguments_are_streamed_while_they_are_written() {
    let format = format("qwen");
    let tokenizer = tokenizer(format, &format.tags().collect::<Vec<_>>());
    let mut reply = Reply::new(tokenizer.clone(), &[], &[], &tools());
    reply.stream_calls();
    let text = "line of a file\n".repeat(2000);
    let source = format!("<tool_call>\n<function=f>\n<parameter=text>\n{text}");
    let tokens = tokens(&tokenizer, format, &source, &[]);
    let pieces: Vec<_> = tokens.iter().flat_map(|token| reply.push(*token)).collect();
    let deltas = pieces.iter().filter(|piece| matches!(piece, Piece::CallDelta(_))).count();
    assert!(deltas > 1000, "{deltas}");
    let (_, _, arguments) = &reassembled(&pieces)[0];
    assert!(arguments.len() > text.len() * 99 / 100, "{}", arguments.len());
}

#[test]
fn ids_have_the_form_that_the_template_expects() {
    for (name, source, expected) in [
        ("mistral", "[TOOL_CALLS]f[ARGS]{}", None),
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0\
             <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            Some("functions.f:1"),
        ),
    ] {
        let format = format(name);
        let tokenizer = tokenizer(format, &format.tags().collect::<Vec<_>>());
        let tokens = tokens(&tokenizer, format, source, &[]);
        // The prompt has a call already.
        let mut reply = Reply::new(tokenizer, &tokens, &[], &tools());
        let mut pieces: Vec<_> = tokens.iter().flat_map(|token| reply.push(*token)).collect();
        pieces.extend(reply.finish_turn());
        let [Piece::ToolCall(call)] = &pieces[..] else { panic!("{pieces:?}") };
        match expected {
            Some(id) => assert_eq!(call.id, id),
            None => assert!(call.id.len() == 9 && call.id.chars().all(char::is_alphanumeric)),
        }
    }
}
