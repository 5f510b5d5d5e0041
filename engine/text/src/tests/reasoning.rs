//! The tags that families write reasoning and answers in.

use super::calls::of_bytes;
use super::*;

/// What clients see of `parts`, tags of the tokenizer or other text, where the chat template contains `template`.
fn seen(tags: &[&str], template: &str, parts: &[&str]) -> String {
    let mut tokenizer = of_bytes(tags, false);
    tokenizer.set_reasoning(template);
    let tokens = parts.iter().flat_map(|part| match tokenizer.id(part) {
        Some(id) => vec![id],
        None => part.bytes().map(u32::from).collect(),
    });
    let tokens: Vec<u32> = tokens.collect();
    let mut reply = Reply::new(Arc::new(tokenizer), &[], &[], &[]);
    let mut pieces: Vec<_> = tokens.iter().flat_map(|token| reply.push(*token)).collect();
    pieces.extend(reply.finish_turn());
    summary(pieces)
}

#[test]
fn reasoning_is_read_between_the_tags_of_the_template() {
    for tags in [
        ["<think>", "</think>"],
        ["<seed:think>", "</seed:think>"],
        ["<|inner_prefix|>", "<|inner_suffix|>"],
        ["<|START_THINKING|>", "<|END_THINKING|>"],
        ["[THINK]", "[/THINK]"],
    ] {
        let [open, close] = tags;
        let template = format!("{{{{ '{open}' ~ x ~ '{close}' }}}}");
        let parts = [open, "Hm.", close, "\n\nYes."];
        assert_eq!(seen(&tags, &template, &parts), "reasoning[Hm.] answer[Yes.]", "{open}");
    }
    // A vocabulary that has several, as that of a base model does.
    let tags = ["<think>", "</think>", "<seed:think>", "</seed:think>"];
    let parts = ["<seed:think>", "Hm.", "</seed:think>", "<think> is a tag."];
    let shown = "reasoning[Hm.] answer[<think> is a tag.]";
    assert_eq!(seen(&tags, "<seed:think></seed:think>", &parts), shown);
    // No tokens: text.
    let parts = ["<seed:think>Hm.</seed:think>Yes."];
    assert_eq!(
        seen(&[], "<seed:think></seed:think>", &parts),
        "answer[<seed:think>Hm.</seed:think>Yes.]"
    );
}

#[test]
fn tags_around_an_answer_are_none_of_its_text() {
    let tags = [
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<response>",
        "</response>",
    ];
    let [open, close, start, end, response, end_response] = tags;
    let template = "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|>";
    let parts = [open, "Hm.", close, start, "Yes.", end];
    assert_eq!(seen(&tags, template, &parts), "reasoning[Hm.] answer[Yes.]");
    // A template that has no such tags.
    let parts = [response, "Yes.", end_response];
    assert_eq!(seen(&tags, template, &parts), "answer[<response>Yes.</response>]");
    assert_eq!(seen(&tags, "<response></response>", &parts), "answer[Yes.]");
}

/// Fault F12: an answer about the tags lost one: `Close it with </think> only.` came as `Close it with  only.`, while
/// `<think>` stayed. Only a tag before all of the answer separates something.
#[test]
fn closing_tag_in_an_answer_is_text() {
    for tags in [["<think>", "</think>"], ["[THINK]", "[/THINK]"]] {
        let [open, close] = tags;
        let template = format!("{open}{close}");
        for (parts, expected) in [
            (
                vec!["Close it with ", close, " only."],
                format!("answer[Close it with {close} only.]"),
            ),
            (vec!["A", close, close, "B"], format!("answer[A{close}{close}B]")),
            (
                vec!["A ", open, " B ", close, " C", close],
                format!("answer[A {open} B {close} C{close}]"),
            ),
            (vec![close, "\n\nYes."], "answer[Yes.]".into()),
            (
                vec![open, "Hm.", close, close, "Yes, ", close, "."],
                format!("reasoning[Hm.] answer[Yes, {close}.]"),
            ),
        ] {
            assert_eq!(seen(&tags, &template, &parts), expected, "{parts:?}");
        }
    }
}

/// Fault F13: two blocks of reasoning came as `firstsecond`.
#[test]
fn blocks_of_reasoning_are_separated() {
    let tags = ["<think>", "</think>"];
    let [open, close] = tags;
    for (parts, expected) in [
        (vec![open, "first", close, open, "second", close, "Yes."], "reasoning[first\n\nsecond]"),
        (
            vec![
                open,
                "\nfirst\n",
                close,
                "\n\n",
                open,
                "\n",
                close,
                open,
                "\nsecond",
                close,
                "Yes.",
            ],
            "reasoning[first\n\nsecond]",
        ),
        (vec![open, close, open, "only", close, "Yes."], "reasoning[only]"),
        (vec![open, "only", close, open, close, "Yes."], "reasoning[only]"),
    ] {
        let expected = format!("{expected} answer[Yes.]");
        assert_eq!(seen(&tags, "<think></think>", &parts), expected, "{parts:?}");
    }
}

/// Fault F9: Gemma 4's reasoning came as the answer `thought\nI think.\nThe answer.`
#[test]
fn channel_of_gemma_is_reasoning() {
    let tags = ["<|channel>", "<channel|>"];
    let [open, close] = tags;
    let template = "<|channel>thought <channel|>";
    for (parts, expected) in [
        (
            vec![open, "thought\nI think.\n", close, "The answer."],
            "reasoning[I think.] answer[The answer.]",
        ),
        (vec![open, "thou", "ght", "\n", "Hm", close, "Yes."], "reasoning[Hm] answer[Yes.]"),
        (vec![open, "thought\n", close, "Yes."], "answer[Yes.]"),
        (vec![open, "other\nHm.", close, "Yes."], "reasoning[other\nHm.] answer[Yes.]"),
        (
            vec![open, "thought\na", close, open, "thought\nb", close, "Yes."],
            "reasoning[a\n\nb] answer[Yes.]",
        ),
    ] {
        assert_eq!(seen(&tags, template, &parts), expected, "{parts:?}");
    }
}

/// Fault F9: Granite 3.3 spells its tags, and its reasoning came as the answer.
#[test]
fn spelled_tags_are_read_where_the_template_has_a_switch() {
    let text = |reply: &str| {
        let mut tokenizer = of_bytes(&[], false);
        tokenizer.spell_reasoning("Write your thoughts between <think></think>.");
        let mut state = Reply::new(Arc::new(tokenizer), &[], &[], &[]);
        let mut pieces: Vec<_> = reply.bytes().flat_map(|byte| state.push(byte.into())).collect();
        pieces.extend(state.finish_turn());
        summary(pieces)
    };
    for (reply, expected) in [
        ("<think>Hm.</think>\n<response>Yes.</response>", "reasoning[Hm.] answer[Yes.]"),
        (
            "<think>\nHm <b>.\n</think>\n\nYes, </think> <think>.",
            "reasoning[Hm <b>.] answer[Yes, </think> <think>.]",
        ),
        ("<response>1 < 2 </resp</response>", "answer[1 < 2 </resp]"),
        ("Yes, <response> and <think> are tags.", "answer[Yes, <response> and <think> are tags.]"),
        ("<think>a</think><think>b</think>c", "reasoning[a\n\nb] answer[c]"),
        (
            "<think>Hm.",
            "reasoning[Hm.] note[the model ended its reply within its reasoning, so there is no answer]",
        ),
    ] {
        assert_eq!(text(reply), expected, "{reply}");
    }
}
