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
