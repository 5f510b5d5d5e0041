//! The law of damaged calls: whatever a model writes, a stream has the calls of a whole reply, and no arguments
//! that are JSON and differ from what the model wrote.

use super::*;
use steersman_test_support::fuzz_inputs;

/// What damage puts into a call.
const PARTS: &[&str] = &[
    "\"",
    "'",
    "\\",
    "\\u",
    "\\ud83d",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    ";",
    "=",
    "<",
    ">",
    "\n",
    "\r\n",
    " ",
    "0",
    "-",
    "e5",
    "99999999999999999999",
    "null",
    "True",
    "rm -rf /",
    "</parameter>",
    "<parameter=count>",
    "</function>",
    "<function=f>",
    "<tool_call>",
    "</tool_call>",
    "```",
    "é",
    "🙂",
    "{\"name\": \"f\"",
    "\"arguments\": ",
];

/// `source` with one to three damages.
fn damaged(source: &str, random: &mut Random) -> String {
    let mut chars: Vec<char> = source.chars().collect();
    for _ in 0..=random.below(3) {
        let at = random.below(chars.len() + 1);
        let length = random.below(12).min(chars.len() - at);
        match random.below(6) {
            0 => chars.truncate(at),
            1 => drop(chars.drain(at..at + length)),
            2 => {
                let copy = chars[at..at + length].to_vec();
                chars.splice(at..at, copy);
            }
            3 => drop(chars.splice(at..at + length.min(1), random.pick(PARTS).chars())),
            // Half of all structure is where values begin and end.
            _ => {
                let special = |c: &char| "\"<>{}[](),:='".contains(*c);
                let places: Vec<usize> = (0..chars.len()).filter(|&i| special(&chars[i])).collect();
                if let Some(&at) = places.get(random.below(places.len().max(1))) {
                    match random.below(2) {
                        0 => drop(chars.remove(at)),
                        _ => drop(chars.splice(at..at, random.pick(PARTS).chars())),
                    }
                }
            }
        }
    }
    chars.into_iter().collect()
}

/// `text` without what escapes and white space are written with.
fn squashed(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace() && !"\\ntrbfu/\u{fffd}".contains(*c)).collect()
}

/// Whether the strings and numbers in `value` stand in `source`, which is squashed, with what ends them.
fn is_written(value: &Value, source: &str) -> bool {
    match value {
        Value::String(text) => {
            // A number that a `Value` does not hold is a string of its digits.
            let is_number = text.len() > 4 && text.parse::<f64>().is_ok();
            let text = squashed(text);
            let ends = |rest: &str| {
                let ends_number = is_number && rest.starts_with([',', '}', ']', ')']);
                let ends_text = rest.is_empty() || rest.starts_with(['"', '\'', '<', '\u{7f}']);
                ends_text || ends_number || text.is_empty()
            };
            let places = source.char_indices().map(|(at, _)| &source[at..]).chain([""]);
            places.filter_map(|rest| rest.strip_prefix(&text)).any(ends)
        }
        Value::Array(all) => all.iter().all(|one| is_written(one, source)),
        Value::Object(all) => all.values().all(|one| is_written(one, source)),
        _ => true,
    }
}

/// Every number in `json` outside of strings stands in `source`.
fn has_its_numbers(json: &str, source: &str) -> bool {
    let mut rest = json;
    while let Some(at) = rest.find(['"', '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9']) {
        rest = &rest[at..];
        if let Some(text) = rest.strip_prefix('"') {
            let (mut end, mut is_escaped) = (text.len(), false);
            for (at, c) in text.char_indices() {
                match c {
                    _ if is_escaped => is_escaped = false,
                    '\\' => is_escaped = true,
                    '"' => {
                        end = at;
                        break;
                    }
                    _ => {}
                }
            }
            rest = text.get(end + 1..).unwrap_or_default();
            continue;
        }
        let end = rest.find([',', '}', ']']).unwrap_or(rest.len());
        let number = &rest[..end];
        // `5.0` for an integer is `5`, and so is `5e0`.
        if !source.contains(number) && number.parse::<i64>().is_err() {
            return false;
        }
        rest = &rest[end..];
    }
    true
}

struct Account {
    calls: Vec<(String, String)>,
    open: Vec<String>,
    text: String,
}

fn account(reply: &Reply, tokens: &[u32], is_cut: bool, about: &str) -> Account {
    let mut reply = reply.clone();
    let mut pieces: Vec<_> = tokens.iter().flat_map(|token| reply.push(*token)).collect();
    pieces.extend(if is_cut { reply.finish() } else { reply.finish_turn() });
    let sent = reassembled(&pieces);
    let mut account = Account { calls: Vec::new(), open: Vec::new(), text: String::new() };
    let mut whole = Vec::new();
    for piece in &pieces {
        match piece {
            Piece::ToolCall(call) => {
                let json = call.function.arguments.to_json();
                let parts = sent.iter().find(|(id, ..)| *id == call.id);
                assert!(parts.is_none_or(|(_, _, all)| *all == json), "{json}: {about}");
                whole.push(call.id.clone());
                account.calls.push((call.function.name.clone(), json));
            }
            Piece::Answer(text) | Piece::Reasoning(text) => account.text += text,
            Piece::CallDelta(_) | Piece::Note(_) => {}
        }
    }
    account.text.retain(|c| !c.is_whitespace());
    account.open =
        sent.into_iter().filter(|(id, ..)| !whole.contains(id)).map(|(.., all)| all).collect();
    account
}

/// Fault F5 and its kind: in a stream, `{"title": "say "hi" now"}` was the call `{"title": "say "}`, while the
/// whole reply had text.
#[test]
fn damaged_calls_are_the_same_in_streams_and_never_say_what_the_model_did_not() {
    let tokenizers: Vec<_> = FORMATS
        .iter()
        .flat_map(|format| {
            let all: Vec<_> = format.tags().collect();
            let spelled = (!format.has_messages()).then(|| (format, tokenizer(format, &[])));
            [Some((format, tokenizer(format, &all))), spelled]
        })
        .flatten()
        .collect();
    let mut random = Random(49);
    let (mut complete, mut open, mut texts) = (0, 0, 0);
    let inputs = fuzz_inputs();
    for number in 0..inputs {
        let (format, tokenizer) = &tokenizers[number % tokenizers.len()];
        let calls = random.calls();
        let source = damaged(&written(format, &calls, &mut random), &mut random);
        let source = match random.below(4) {
            0 => format!("Look.\n{source}\nDone."),
            _ => source,
        };
        let tokens = tokens(tokenizer, format, &source, &[]);
        let is_cut = random.below(4) == 0;
        let mut reply = Reply::new(tokenizer.clone(), &prompt(tokenizer, format), &[], &tools());
        reply.read_untagged_calls();
        let about = format!("{} {number}, cut: {is_cut}: {source}", format.name);
        let whole = account(&reply, &tokens, is_cut, &about);
        reply.stream_calls();
        let streamed = account(&reply, &tokens, is_cut, &about);
        assert_eq!(streamed.calls, whole.calls, "{about}");
        for arguments in &streamed.open {
            assert!(serde_json::from_str::<Value>(arguments).is_err(), "{arguments}: {about}");
        }
        // Of what a stream has sent as a call, it has no text.
        match streamed.open.is_empty() {
            true => assert_eq!(streamed.text, whole.text, "{about}"),
            false => {
                let mut rest = whole.text.chars();
                let is_part = streamed.text.chars().all(|c| rest.any(|other| other == c));
                assert!(is_part, "{}: {}: {about}", streamed.text, whole.text);
            }
        }
        let seen = squashed(&source);
        for (_, json) in &whole.calls {
            let values = CallDraft { arguments: json.clone(), ..CallDraft::default() }.values();
            assert!(!values.is_empty() || json == "{}", "{json}: {about}");
            assert!(is_written(&values.into(), &seen), "{json}: {about}");
            assert!(has_its_numbers(json, &source), "{json}: {about}");
        }
        complete += whole.calls.len();
        open += streamed.open.len();
        texts += usize::from(whole.calls.is_empty());
    }
    println!(
        "{inputs} inputs: {complete} calls, {texts} replies without, {open} left open in streams"
    );
    assert!(complete * 4 > inputs && texts * 20 > inputs && open * 100 > inputs);
}
