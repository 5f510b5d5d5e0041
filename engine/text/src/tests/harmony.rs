//! Laws of replies that consist of messages: generated ones, cut at every token, malformed headers, the end
//! of the reasoning.

use super::*;
use crate::harmony::{Body, may_be_header, read_header};

const REPLIES: usize = 200;

/// The bundled model's tokenizer with Harmony's special tokens, and a chat template of its kind.
fn harmony() -> Text {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../server/model/tiny-hybrid-4bit");
    let folder = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(bundled.join(file), folder.path().join(file)).expect("a copy");
    }
    let bytes = std::fs::read(bundled.join("tokenizer.json")).expect("the bundled tokenizer");
    let mut tokenizer: Value = serde_json::from_slice(&bytes).expect("JSON");
    let added = tokenizer["added_tokens"].as_array_mut().expect("a list");
    for (id, content) in (4096..).zip(super::super::harmony::TAGS) {
        added.push(json!({"id": id, "content": content, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}));
    }
    let template = "{#- <|channel|> #}{% for tool in tools or [] %}{{ tool.function.name }}, {% endfor %}\
        {% for message in messages %}<|start|>{{ message.role }}\
        <|message|>{{ message.content }}<|end|>{% endfor %}\
        {% if add_generation_prompt %}<|start|>assistant{% endif %}";
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text);
    write("tokenizer.json", &tokenizer.to_string()).expect("a file");
    write("chat_template.jinja", template).expect("a file");
    Text::load(folder.path()).expect("the folder is complete")
}

fn start(text: &Text) -> Vec<u32> {
    text.encode("<|start|>user<|message|>Hi<|end|><|start|>assistant").expect("it encodes")
}

/// What clients see of `source` after the prompt, where the model ends its turn.
fn see(text: &Text, source: &str) -> String {
    let mut reply = text.reply(&start(text), &[], &tools());
    let tokens = text.encode(source).expect("it encodes");
    let mut pieces: Vec<Piece> = tokens.iter().flat_map(|token| reply.push(*token)).collect();
    pieces.extend(reply.finish_turn());
    summary(pieces)
}

/// A part of a reply: what it is, its text, and the message.
struct Part {
    kind: &'static str,
    text: String,
    tokens: Vec<u32>,
}

impl Random {
    /// A message with white space around its text only where it is dropped.
    fn message(&mut self, text: &Text, is_first: bool) -> Part {
        // As the tokenizer normalizes it.
        let words = text.encode_plain(&self.text(12)).expect("it encodes");
        let words = format!("{}.", text.decode(&words).trim());
        let n = self.below(1000);
        let (kind, header, body, shown) = match self.below(4) {
            0 => ("call", "<|channel|>commentary to=functions.f <|constrain|>json", "", ""),
            1 => ("call", " to=functions.f<|channel|>commentary json", "", ""),
            2 => ("reasoning", "<|channel|>analysis", words.as_str(), words.as_str()),
            _ => {
                let channel = self.pick(&["<|channel|>final", "<|channel|>commentary"]);
                ("answer", channel, words.as_str(), words.as_str())
            }
        };
        let call = (format!("{{\"n\": {n}}}"), format!("f {{\"n\":{n}}}"));
        let (body, shown) = if kind == "call" { (&*call.0, &*call.1) } else { (body, shown) };
        let head = if is_first { "" } else { "<|start|>assistant" };
        let mut tokens = text.encode(&format!("{head}{header}<|message|>")).expect("it encodes");
        tokens.extend(self.tokens(text, body));
        let end = self.pick(&["<|end|>", "<|call|>", "<|return|>"]);
        tokens.extend(text.encode(end).expect("it encodes"));
        Part { kind, text: shown.into(), tokens }
    }
}

/// `parts` as in [`summary`].
fn shown(parts: &[Part]) -> String {
    let mut all: Vec<(&str, String)> = Vec::new();
    let mut seen: Vec<&str> = Vec::new();
    for Part { kind, text, .. } in parts {
        let gap = if seen.contains(kind) && *kind != "call" { "\n\n" } else { "" };
        seen.push(kind);
        match all.last_mut() {
            Some((last, joined)) if last == kind && *kind != "call" => {
                *joined += &format!("{gap}{text}")
            }
            _ => all.push((kind, format!("{gap}{text}"))),
        }
    }
    let all: Vec<_> = all.iter().map(|(kind, text)| format!("{kind}[{text}]")).collect();
    all.join(" ")
}

/// The text of one kind of pieces, and the calls.
fn parts_of(pieces: &[Piece]) -> [String; 3] {
    let mut parts = [String::new(), String::new(), String::new()];
    for piece in pieces {
        match piece {
            Piece::Reasoning(text) => parts[0] += text,
            Piece::Answer(text) => parts[1] += text,
            Piece::ToolCall(call) => parts[2] += &format!("{:?}", call.function),
            Piece::CallDelta(_) | Piece::Note(_) => {}
        }
    }
    parts
}

#[test]
fn generated_replies_are_read_whole_and_cut_at_every_token() {
    let text = harmony();
    let mut random = Random(11);
    for number in 0..REPLIES {
        let parts: Vec<Part> =
            (0..1 + random.below(4)).map(|i| random.message(&text, i == 0)).collect();
        let tokens: Vec<u32> = parts.iter().flat_map(|part| part.tokens.clone()).collect();
        let about = format!("{number}: {}", text.decode_all(&tokens));
        for streams in [false, true] {
            let mut reply = text.reply(&start(&text), &[], &tools());
            if streams {
                reply.stream_calls();
            }
            let mut pieces = Vec::new();
            let mut cuts = Vec::new();
            for token in &tokens {
                // A call that a limit cuts off is text, as in other formats.
                if !reply.in_call() {
                    cuts.push([pieces.clone(), reply.clone().finish()].concat());
                }
                pieces.extend(reply.push(*token));
            }
            pieces.extend(reply.finish_turn());
            let whole = parts_of(&pieces);
            assert_eq!(summary(pieces), shown(&parts), "{about}");
            for cut in cuts {
                for (part, whole) in parts_of(&cut).iter().zip(&whole) {
                    // What is left of a character that was cut.
                    assert!(
                        whole.starts_with(part.trim_end_matches('\u{fffd}')),
                        "{part}: {about}"
                    );
                }
            }
        }
    }
}

#[test]
fn phases_follow_the_headers() {
    let text = harmony();
    let mut reply = text.reply(&start(&text), &[], &tools());
    let mut check = |source: &str, phase: Phase, in_header: bool| {
        for token in text.encode(source).expect("it encodes") {
            reply.push(token);
        }
        assert_eq!((reply.phase(), reply.in_header()), (phase, in_header), "{source}");
    };
    check("", Phase::Reasoning, true);
    check("<|channel|>analysis", Phase::Reasoning, true);
    check("<|message|>Hm.", Phase::Reasoning, false);
    check("<|end|><|start|>assistant<|channel|>comm", Phase::Reasoning, true);
    check("entary<|message|>I look it up.", Phase::Answer, false);
    check("<|end|><|start|>assistant", Phase::Answer, true);
    check("<|channel|>analysis<|message|>Hm.", Phase::Reasoning, false);
    check("<|end|><|start|>assistant to=functions.f<|channel|>", Phase::Reasoning, true);
    check("commentary json<|message|>{\"n\"", Phase::ToolCall, false);
    check(": 5}<|end|>", Phase::Answer, true);
    check("<|start|>assistant<|channel|>final<|message|>Yes", Phase::Answer, false);
}

/// The prompt may begin the message itself, and where the model is not to reason it does.
#[test]
fn a_prompt_may_contain_the_header() {
    let text = harmony();
    let message = |role: &str| Message {
        role: role.into(),
        content: "<|start|>assistant<|channel|>analysis<|message|>".into(),
        ..Message::default()
    };
    let prompt = |tools: &[Value], reasoning| {
        let tokens = text.prompt(&Variables {
            messages: &[message("user")],
            tools,
            reasoning,
            ..Variables::default()
        });
        tokens.expect("it renders")
    };
    let phase = |prompt: &[u32]| text.reply(prompt, &[], &[]).phase();
    assert_eq!(phase(&prompt(&[], None)), Phase::Reasoning);
    assert_eq!(phase(&prompt(&[], Some(true))), Phase::Reasoning);
    let direct = prompt(&[], Some(false));
    assert!(text.decode_all(&direct).ends_with("<|start|>assistant<|channel|>final<|message|>"));
    assert_eq!(phase(&direct), Phase::Answer);
    let mut reply = text.reply(&direct, &[], &[]);
    let pieces = run(&mut reply, &text.encode("Yes.<|return|>").expect("it encodes"));
    assert_eq!(summary(pieces), "answer[Yes.]");
    // With tools the model may call one.
    assert_eq!(prompt(&tools(), Some(false)), prompt(&tools(), None));
    // A prompt without messages, as of a completion.
    let plain = text.encode("Hi").expect("it encodes");
    let mut reply = text.reply(&plain, &[], &[]);
    let pieces = run(&mut reply, &text.encode(" there\n").expect("it encodes"));
    assert_eq!(summary(pieces), "answer[ there\n]");
}

#[test]
fn malformed_headers_come_as_text_with_a_note() {
    const NOTE: &str = "note[sent a malformed header of a message as text]";
    let text = harmony();
    for (source, expected) in [
        ("Hello there.", format!("{NOTE} answer[Hello there.]")),
        ("as", format!("{NOTE} answer[as]")),
        (
            "<|channel|>thoughts<|message|>Hm.<|end|>",
            format!("{NOTE} answer[<|channel|>thoughts<|message|>Hm.]"),
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>user<|message|>More?<|end|>",
            format!("reasoning[Hm.] {NOTE} answer[<|start|>user<|message|>More?]"),
        ),
        (
            "<|channel|>analysis<|channel|>final<|message|>Yes.",
            format!("{NOTE} answer[<|channel|>analysis<|channel|>final<|message|>Yes.]"),
        ),
        (
            "<|channel|>commentary to=browser.open<|message|>{}<|call|>",
            format!("{NOTE} answer[<|channel|>commentary to=browser.open<|message|>{{}}]"),
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|>and so<|start|>assistant<|channel|>final\
             <|message|>Yes.",
            format!("reasoning[Hm.] {NOTE} answer[and so\n\nYes.]"),
        ),
        (
            "<|channel|>final<|end|>",
            format!("{NOTE} answer[<|channel|>final]"),
        ),
        // A tag in a body is text.
        ("<|channel|>final<|message|>a<|constrain|>b", "answer[a<|constrain|>b]".into()),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fin",
            "reasoning[Hm.] note[dropped the header `<|start|>assistant<|channel|>fin`: incomplete]"
                .into(),
        ),
        (
            "<|channel|>commentary to=functions.f<|message|>{\"n\": 5<|call|>",
            "call[f {\"n\":5}] note[repaired a malformed call of `f`]".into(),
        ),
        // The first digit of a number, perhaps.
        (
            "<|channel|>commentary to=functions.f<|message|>{\"n\": 5",
            "note[sent a malformed call as text of `f`] \
             answer[<|channel|>commentary to=functions.f<|message|>{\"n\": 5]"
                .into(),
        ),
        (
            "<|channel|>commentary to=functions.f<|message|>five<|call|>",
            "note[sent a malformed call as text of `f`] \
             answer[<|channel|>commentary to=functions.f<|message|>five]"
                .into(),
        ),
        // Forgotten tags.
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.",
            "reasoning[Hm.] answer[Yes.]".into()),
        ("<|start|>assistant<|message|>Yes.", "answer[Yes.]".into()),
    ] {
        assert_eq!(see(&text, source), expected, "{source}");
    }
    let call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>";
    let mut reply = text.reply(&start(&text), &[], &[]);
    let pieces = run(&mut reply, &text.encode(call).expect("it encodes"));
    let body = "<|channel|>commentary to=functions.f<|message|>{}";
    assert_eq!(summary(pieces), format!("{NOTE} answer[{body}]"));
}

/// Whatever a header contains, words that belong to none reach the client, with a note.
#[test]
fn no_word_of_a_malformed_header_is_dropped() {
    let text = harmony();
    let mut random = Random(5);
    let (mut whole, mut malformed) = (0, 0);
    for _ in 0..1000 {
        let parts = [
            "assistant",
            " ",
            "to=functions.f",
            "user",
            "<|channel|>",
            "final",
            "more\n",
            "analysis",
        ];
        let header: String = (0..random.below(6)).map(|_| random.pick(&parts)).collect();
        let source = format!("<|start|>{header}<|message|>body");
        let seen = see(&text, &source);
        assert!(seen.contains("body]"), "{seen}: {source}");
        for word in ["user", "more"] {
            let count = |text: &str| text.matches(word).count();
            assert!(count(&seen) >= count(&header), "{seen}: {source}");
        }
        let is_noted = seen.contains("note[sent a malformed");
        match read_header(&format!("<|start|>{header}")) {
            None => assert!(is_noted, "{seen}: {source}"),
            Some(Body::Answer) => assert_eq!(seen, "answer[body]", "{source}"),
            Some(Body::Reasoning) => assert_eq!(seen, "reasoning[body]", "{source}"),
            // The body is not JSON.
            Some(Body::Call(_)) => assert!(is_noted, "{seen}: {source}"),
        }
        if read_header(&header).is_some() {
            whole += 1;
            // Tags come whole.
            let is_cut = |start: &&str| start.matches('<').count() != start.matches('>').count();
            let starts = header.char_indices().map(|(at, _)| &header[..at]);
            assert!(starts.filter(|start| !is_cut(start)).all(may_be_header), "{header}");
        } else {
            malformed += 1;
        }
    }
    assert!(whole > 50 && malformed > 50, "{whole} {malformed}");
}

/// The results of earlier calls are in the prompt; each round's calls have ids of their own.
#[test]
fn calls_of_several_rounds_are_read() {
    let text = harmony();
    let mut prompt = start(&text);
    let mut ids = Vec::new();
    for round in 0..3 {
        let call = format!(
            "<|channel|>analysis<|message|>Next.<|end|><|start|>assistant<|channel|>commentary \
             to=functions.f <|constrain|>json<|message|>{{\"n\": {round}}}<|call|>"
        );
        let tokens = text.encode(&call).expect("it encodes");
        let mut reply = text.reply(&prompt, &[], &tools());
        let pieces = run(&mut reply, &tokens);
        for piece in &pieces {
            if let Piece::ToolCall(call) = piece {
                ids.push(call.id.clone());
            }
        }
        assert_eq!(summary(pieces), format!("reasoning[Next.] call[f {{\"n\":{round}}}]"));
        let result = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>1<|end|>\
            <|start|>assistant";
        prompt.extend([tokens, text.encode(result).expect("it encodes")].concat());
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3);
}

#[test]
fn stop_strings_end_the_answer_across_its_messages() {
    let text = harmony();
    let stop = ["two".to_string()];
    let mut reply = text.reply(&start(&text), &stop, &[]);
    let source = "<|channel|>analysis<|message|>one two<|end|><|start|>assistant<|channel|>commentary\
        <|message|>one<|end|><|start|>assistant<|channel|>final<|message|>and two<|return|>";
    let pieces = run(&mut reply, &text.encode(source).expect("it encodes"));
    assert_eq!(summary(pieces), "reasoning[one two] answer[one\n\nand ]");
    assert!(reply.stopped());
}

/// Wherever reasoning is closed, the model goes on with an answer.
#[test]
fn closing_the_reasoning_writes_the_header_of_the_answer() {
    let text = harmony();
    let source = "<|channel|>analysis<|message|>Hm, hm.<|end|><|start|>assistant<|channel|>analysis\
        <|message|>Or not?<|end|><|start|>assistant<|channel|>final<|message|>";
    let tokens = text.encode(source).expect("it encodes");
    let mut reply = text.reply(&start(&text), &[], &tools());
    let answer = text.encode(" Yes.<|return|>").expect("it encodes");
    let header = "<|start|>assistant<|channel|>final<|message|>";
    for (at, token) in tokens.iter().enumerate() {
        assert_eq!(reply.phase(), Phase::Reasoning);
        let close = reply.close_reasoning_tokens(&text, "Final:").expect("it closes");
        let mut closed = reply.clone();
        let before = text.decode_all(&tokens[..at]);
        let all = format!("<|start|>assistant{before}{}", text.decode_all(&close));
        assert!(all.ends_with(&format!("{header}Final:")), "{all}");
        assert_eq!(all.matches("<|start|>").count(), all.matches("<|end|>").count() + 1, "{all}");
        let pieces = run(&mut closed, &[close, answer.clone()].concat());
        assert!(summary(pieces).ends_with("answer[Final: Yes.]"), "{all}");
        reply.push(*token);
    }
    assert_eq!(reply.phase(), Phase::Answer);
    let mut reply = text.reply(&start(&text), &[], &tools());
    reply.require_call();
    for token in text.encode("<|channel|>analysis<|message|>Hm.").expect("it encodes") {
        reply.push(token);
    }
    let close = reply.close_reasoning_tokens(&text, "").expect("it closes");
    assert_eq!(text.decode_all(&close), "<|end|><|start|>assistant<|channel|>commentary");
}

#[test]
fn the_ends_of_messages_that_end_the_turn_are_end_of_turn_tokens() {
    let text = harmony();
    for (tag, ends) in [("<|return|>", true), ("<|call|>", true), ("<|end|>", false)] {
        let id = text.encode(tag).expect("it encodes")[0];
        assert_eq!(text.eos().contains(&id), ends, "{tag}");
    }
    assert!(text.supports_reasoning());
    assert_eq!(text.call_format().name, "harmony");
}
