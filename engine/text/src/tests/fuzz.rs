//! Laws of what models can write: tool calls, from fragments in random order, the same in every run.

use super::*;
use crate::tool_call::{Format, Schemas, State};
use steersman_test_support::fuzz_inputs;

/// Up to `most` of `parts`.
fn joined(random: &mut Random, parts: &[&str], most: usize) -> String {
    (0..=random.below(most)).map(|_| random.pick(parts)).collect()
}

const CALL_PARTS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    "f>",
    "n>",
    "\n",
    "5",
    " ",
    ">",
    "<",
    "{\"name\": \"f\"",
    ", \"arguments\": ",
    "{\"n\": 5}",
    "}",
    "{",
    "[",
    "]",
    ",",
    "\"",
    "\\",
    "\\\"",
    "null",
    "é",
    "🙂",
    "<think>",
    "</think>",
    "<|im_end|>",
    "\"{\\\"n\\\": 1}\"",
    "1e999",
    "-",
    "true",
];

#[test]
fn no_tool_call_panics_and_all_text_arrives() {
    let mut random = Random(7);
    let text = tiny();
    let schemas = Schemas::new(&tools());
    let mut calls = 0;
    for number in 0..fuzz_inputs() {
        let source = match random.below(3) {
            0 => joined(&mut random, CALL_PARTS, 12),
            1 => format!("<function=f>\n<parameter=n>{}", joined(&mut random, CALL_PARTS, 8)),
            _ => {
                let value = joined(&mut random, CALL_PARTS, 3);
                format!("<function=f>\n<parameter=n>\n{value}\n</parameter>\n</function>")
            }
        };
        let read = |source: &str| Format::of("").read(source, &schemas, true, false);
        let reading = read(&source);
        for call in reading.calls.iter().filter(|_| reading.state == State::Complete) {
            calls += 1;
            assert!(!call.name.is_empty(), "input {number}: {source}");
            let json = json!({"name": call.name, "arguments": call.values()}).to_string();
            let again = read(&json);
            assert_eq!(again.calls[0].values(), call.values(), "input {number}: {source}");
        }
        // In a reply, whatever is no call arrives as text, in any pieces.
        if number % 8 == 0 {
            let source = format!("<tool_call>{source}");
            let tokens = text.encode(&source).expect("it encodes");
            let mut whole = text.reply(&[], &[], &tools());
            let pieces = run(&mut whole, &tokens);
            let has_call = pieces.iter().any(|piece| matches!(piece, Piece::ToolCall(_)));
            let is_note = |piece: &Piece| matches!(piece, Piece::Note(_));
            let shown = summary(pieces.into_iter().filter(|piece| !is_note(piece)).collect());
            let markers = ["<think>", "</think>"].iter().any(|tag| source.contains(tag));
            if !has_call && !markers {
                assert_eq!(shown, format!("answer[{}]", text.decode(&tokens)), "input {number}");
            }
        }
    }
    assert!(calls * 10 > fuzz_inputs(), "only {calls} calls of {}", fuzz_inputs());
}
