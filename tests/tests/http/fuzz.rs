//! Arbitrary bodies and configurations are accepted or rejected with a message, never with a panic.
//! `STEERSMAN_FUZZ_INPUTS` sets the number of inputs of each test; they are the same in every run.

use steersman::api::chat::Chat;
use steersman::api::json;
use steersman::api::protocol::Protocol;
use steersman::config::FileConfig;
use steersman_tests::{Random, fuzz_inputs};

/// A body with every field.
const BODY: &str = r#"{"model":"m@p","messages":[{"role":"system","content":"be \u00e9\ud83d\ude00 brief"},{"role":"user","content":[{"type":"text","text":"a","cache_control":{}}],"name":"x"},{"role":"assistant","content":null,"reasoning_content":"hm","tool_calls":[{"index":0,"id":"c","type":"function","function":{"name":"f","arguments":"{\"a\":[1,2.5e3]}"}}]},{"role":"tool","tool_call_id":"c","content":"done"}],"stream":true,"stream_options":{"include_usage":true},"max_tokens":9,"max_completion_tokens":9,"temperature":0.5,"top_p":0.9,"top_k":20,"min_p":0.1,"seed":-1,"stop":["X","Y"],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"},"strict":false}}],"tool_choice":{"type":"function","function":{"name":"f"}},"chat_template_kwargs":{"enable_thinking":true,"n":null},"reasoning_effort":"low","max_thinking_tokens":7,"user":"u","n":1,"logprobs":true,"top_logprobs":2,"logit_bias":{"5":-1},"presence_penalty":0.1,"repetition_penalty":1.1,"parallel_tool_calls":false,"response_format":{"type":"json_schema","json_schema":{"name":"x","strict":true,"schema":{"type":"object"}}}}"#;

/// Pieces that take the place of others.
const JSON: [&str; 24] = [
    "null",
    "true",
    "0",
    "-1",
    "1e999",
    "1e-999",
    "18446744073709551616",
    "\"\"",
    "\"\\ud800\"",
    "[]",
    "{}",
    "[[",
    "]]",
    "{\"",
    ",",
    ":",
    "\\",
    "\"",
    "\0",
    "\u{feff}",
    "\"role\"",
    "\"system\"",
    "\"content\":",
    "{\"\":{}}",
];

const TOML: [&str; 24] = [
    "nan",
    "-inf",
    "0",
    "-1",
    "9223372036854775807",
    "1e300",
    "\"\"",
    "'''",
    "[]",
    "[[",
    "]",
    "{}",
    "=",
    ".",
    "#",
    "\n",
    "\"\\u0000\"",
    "[server]\n",
    "[profiles.\"@\"]\n",
    "[profiles.x.sampling]\n",
    "true",
    "1979-05-27",
    "\u{7f}",
    "_",
];

/// Damages `text` in one to four places.
fn damage(random: &mut Random, text: &mut Vec<u8>, pieces: &[&str]) {
    for _ in 0..1 + random.below(4) {
        let at = random.below(text.len().max(1)).min(text.len());
        let end = (at + random.below(24)).min(text.len());
        match random.below(6) {
            0 => drop(text.splice(at..end, random.of(pieces).bytes())),
            1 => drop(text.splice(at..at, random.of(pieces).bytes())),
            2 => drop(text.drain(at..end)),
            3 => {
                let copy = text[at..end].to_vec();
                let to = random.below(text.len().max(1)).min(text.len());
                drop(text.splice(to..to, copy));
            }
            4 if at < text.len() => text[at] ^= 1 << random.below(8),
            _ => drop(text.splice(at..at, [random.below(256) as u8])),
        }
    }
}

/// Runs `check` on inputs from two threads; returns how many it accepted.
fn accepted(check: impl Fn(&mut Random) -> bool + Sync) -> usize {
    let half = |seed: u64| {
        let mut random = Random(seed);
        (0..fuzz_inputs() / 2).filter(|_| check(&mut random)).count()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| half(2));
        half(1) + other.join().expect("no input causes a panic")
    })
}

#[test]
fn arbitrary_bodies_are_parsed_or_rejected_with_a_message() {
    let accepted = accepted(|random| {
        let mut body = BODY.as_bytes().to_vec();
        if random.below(50) > 0 {
            damage(random, &mut body, &JSON);
        }
        let parsed = json::object(&body).and_then(Chat::parse).and_then(|parsed| parsed.call);
        if let Err(error) = &parsed {
            assert_eq!(error.status.as_u16(), 400, "{error:?}");
            assert!(!error.message.is_empty(), "{error:?}");
        }
        if let Ok(chat) = &parsed {
            let request = &chat.requests[0];
            assert!(!request.messages.is_empty());
            let sampling = request.sampling;
            assert!(sampling.temperature.is_none_or(|t| (0.0..=2.0).contains(&t)));
        }
        parsed.is_ok()
    });
    assert!(accepted > fuzz_inputs() / 100, "{accepted} accepted");
    assert!(accepted < fuzz_inputs() / 2, "{accepted} accepted");
}

#[test]
fn arbitrary_configurations_are_read_or_rejected_with_a_message() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/steersman.toml");
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().map(|line| line.strip_prefix("# ").unwrap_or(line));
    let is_toml = |line: &&str| line.starts_with('[') || line.contains(" = ");
    let lines: Vec<_> = lines.filter(is_toml).collect();
    let accepted = accepted(|random| {
        let from = random.below(lines.len());
        let chosen = &lines[from..(from + 1 + random.below(12)).min(lines.len())];
        let section = random.of(&[
            "server",
            "engine",
            "store",
            "policy",
            "profiles.x",
            "profiles.x.sampling",
        ]);
        let mut text = format!("[{section}]\n{}", chosen.join("\n")).into_bytes();
        if random.below(10) > 0 {
            damage(random, &mut text, &TOML);
        }
        let Ok(file) = FileConfig::parse(&String::from_utf8_lossy(&text))
            .inspect_err(|error| assert!(!error.to_string().is_empty()))
        else {
            return false;
        };
        let problems = file.problems();
        match file.check() {
            Ok(_) => {
                assert!(problems.is_empty(), "{problems:?}");
                true
            }
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains(':'), "{error}");
                assert!(
                    problems.iter().all(|problem| error.contains(problem)),
                    "{problems:?}: {error}"
                );
                false
            }
        }
    });
    assert!(accepted > fuzz_inputs() / 1000, "{accepted} accepted");
}
