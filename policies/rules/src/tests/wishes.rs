//! What authors wished for: negation, exact numbers of tokens, words in place of tokens, routes,
//! other words in answers.

use super::*;

fn reasoning(tokens: u32, text: &str) -> Step {
    Step { phase: Phase::Reasoning, reasoning_tokens: tokens, text: text.into(), ..Step::default() }
}

/// The wish of an author: a hint after 60 tokens of reasoning that have no "because".
/// `reasoning_tokens_over` came at 64, and nothing could be negated.
#[test]
fn a_hint_comes_at_a_number_of_tokens_unless_the_reasoning_has_a_word() {
    let rules = r#"
        [[rule]]
        when = { reasoning_tokens = 60 }
        unless = { text_contains = "because" }
        do = { inject = "Why? Because " }"#;
    let hint = [Action::Inject("Why? Because ".into())];
    let start = || with(rules, RequestView::default());
    let (mut policy, plan) = start();
    assert_eq!((plan.every, plan.on_phase), (1, true));
    assert_eq!(plan.on_texts, ["because"]);
    assert_eq!(policy.on_step(reasoning(59, "It is so")), []);
    assert_eq!(policy.on_step(reasoning(60, ".")), hint);
    assert_eq!(policy.on_step(reasoning(61, ".")), []);
    let (mut policy, _) = start();
    assert_eq!(policy.on_step(reasoning(58, "It is so be")), []);
    assert_eq!(policy.on_step(reasoning(59, "cause of")), []);
    assert_eq!(policy.on_step(reasoning(60, " it")), []);
    // Injected text passes the number.
    let (mut policy, _) = start();
    assert_eq!(policy.on_step(reasoning(55, "So")), []);
    assert_eq!(policy.on_step(reasoning(63, "it is")), hint);
    // The number is an event: what comes later does not matter.
    let (mut policy, _) = start();
    policy.on_step(reasoning(59, "because"));
    assert_eq!(policy.on_step(reasoning(60, " it")), []);
    let change = Step { phase_changed: true, ..answer("</think>") };
    assert_eq!(policy.on_step(Step { reasoning_tokens: 61, ..change }), []);
}

#[test]
fn the_texts_of_a_phase_count_for_that_phase_only() {
    let rules = r#"
        [[rule]]
        when = { answer_tokens_over = 8, phase = "answer" }
        unless = { text_contains = ["Sources:", "Source:"] }
        times = 0
        do = { bias = { 7 = 5 } }"#;
    let (mut policy, plan) = with(rules, RequestView::default());
    assert_eq!((plan.every, plan.on_phase, plan.on_texts.len()), (8, true, 2));
    let mut step =
        |tokens, text: &str| policy.on_step(Step { answer_tokens: tokens, ..answer(text) }).len();
    assert_eq!(step(8, "Rome. "), 0);
    assert_eq!(step(16, "It is"), 1);
    assert_eq!(step(20, " so. Sour"), 1);
    assert_eq!(step(24, "ces: a"), 0);
    assert_eq!(step(32, " and b"), 0);
    let (mut policy, _) = with(rules, RequestView::default());
    assert_eq!(policy.on_step(reasoning(8, "Sources: none")), []);
    assert_eq!(policy.on_step(answer("</think>")), []);
    let late = Step { answer_tokens: 9, ..answer("Rome") };
    assert_eq!(policy.on_step(late).len(), 1, "the reasoning had it, the answer does not");
}

#[test]
fn every_condition_can_be_negated() {
    let planned = |rule: &str, request: RequestView| {
        with(&format!("[[rule]]\n{rule}\ndo = {{ note = 'n' }}"), request).1.note.is_some()
    };
    let request = || RequestView {
        model: "m".into(),
        tools: vec!["t".into()],
        prompt_tokens: 9,
        ..user("A haiku")
    };
    for (condition, holds) in [
        ("user_contains = 'haiku'", true),
        ("user_words = ['haikus', 'odes']", false),
        ("prompt_over = 8", true),
        ("prompt_over = 9", false),
        ("tools = true", true),
        ("tools = 'u'", false),
        ("model = ['m', 'n']", true),
        ("reasoning_requested = true", false),
        ("caller_key = 'k'", false),
    ] {
        assert_eq!(planned(&format!("when = {{ {condition} }}"), request()), holds, "{condition}");
        let unless = format!("unless = {{ {condition} }}");
        assert_eq!(planned(&unless, request()), !holds, "{condition}");
    }
    let rules = "[[rule]]\nunless = { tool_called = ['read', 'list'] }\ndo = { stop = 'no' }";
    let (mut policy, _) = with(rules, RequestView::default());
    let call = |name: &str| ToolCallView { name: name.into(), ..ToolCallView::default() };
    assert_eq!(policy.on_tool_call(call("list")), Verdict::Accept);
    assert_eq!(policy.on_tool_call(call("shell")), Verdict::Stop("no".into()));
    let rules =
        "[[rule]]\nwhen = { loop = true }\nunless = { phase = 'answer' }\ndo = { rewind = 9 }";
    let (mut policy, plan) = with(rules, RequestView::default());
    assert_eq!(plan.every, 0);
    let found = Some(LoopReport { period: 3, repeats: 9, exact: true });
    let looped = |step| Step { loop_found: found, ..step };
    assert_eq!(policy.on_step(looped(answer("a"))), []);
    assert_eq!(policy.on_step(looped(reasoning(9, "a"))), [Action::Rewind(9)]);
    let rules = "[[rule]]\nunless = { system_contains = 'keep' }\ndo = { strip = 'x' }";
    let edits = |system: &str| {
        let params = vec![("rules".into(), rules.into())];
        let system = vec![system.to_owned()];
        Rules::default().on_prompt(PromptView { params, system, ..PromptView::default() }).len()
    };
    assert_eq!((edits("x"), edits("keep x")), (1, 0));
}

/// The tokenizer of native tests has a token for each byte.
#[test]
fn a_text_is_banned_by_its_token_and_one_of_several_tokens_is_noted() {
    let rules = "[[rule]]\ndo = { ban = ['y', 5, 'no'], bias = { z = -2, 8 = 1 }, for = 4 }";
    let packed = || {
        let params = vec![("rules".to_owned(), rules.to_owned())];
        let prepared = Rules::default().on_params(ParamsView { params, ..ParamsView::default() });
        prepared.replaced.last().unwrap().1.clone()
    };
    for rules in [rules.to_owned(), packed()] {
        let (mut policy, plan) = with(&rules, RequestView::default());
        let note = "`no` is 2 tokens of this model, not one, so rules neither ban nor bias it";
        assert_eq!(plan.note.as_deref(), Some(note));
        let bias = |token, bias| steersman_policy::TokenBias { token, bias };
        let (ban, biases) = (vec![5, 121], vec![bias(8, 1.0), bias(122, -2.0)]);
        let biased = steersman_policy::Bias { tokens: biases, steps: 4 };
        let expected = [Action::Ban(Ban { tokens: ban, steps: 4 }), Action::Bias(biased)];
        assert_eq!(policy.on_step(answer("a")), expected);
    }
}

#[test]
fn a_long_prompt_is_routed_to_another_profile() {
    let rules = "[[rule]]\nwhen = { prompt_over = 2000 }\ndo = { route = 'long' }
        [[rule]]\nwhen = { tools = true }\ndo = { route = 'tools' }";
    let route = |prompt_tokens, tools: &[&str]| {
        let tools = tools.iter().map(|name| (*name).to_owned()).collect();
        with(rules, RequestView { prompt_tokens, tools, ..RequestView::default() }).1.route
    };
    assert_eq!(route(2000, &[]), None);
    assert_eq!(route(2001, &["t"]).as_deref(), Some("long"), "the first rule takes precedence");
    assert_eq!(route(5, &["t"]).as_deref(), Some("tools"));
}

#[test]
fn texts_of_answers_are_replaced_by_the_rules_that_match() {
    let rules = r#"
        [[rule]]
        do = { replace = { "as an AI" = "here", as = "like" } }
        [[rule]]
        when = { user_contains = "polite" }
        do = { replace_words = { Sorry = "I regret" } }"#;
    let text = |text: &str| TextView { text: text.into(), end: true, ..TextView::default() };
    let (mut policy, plan) = with(rules, user("Be polite."));
    assert_eq!((plan.every, &plan.on_texts[..]), (0, &[][..]));
    let changed = |text: &str| {
        let text = text.to_owned();
        TextVerdict::Replace(steersman_policy::TextChange { text, hold: 0 })
    };
    assert_eq!(policy.on_text(text("sorry, as an AI as")), changed("I regret, here like"));
    let (mut policy, _) = with(rules, user("Hello"));
    assert_eq!(policy.on_text(text("sorry")), TextVerdict::Pass);
}
