use super::*;

fn request(change: impl FnOnce(&mut RequestView)) -> Plan {
    let mut request = RequestView { user: "Write a story.".into(), ..RequestView::default() };
    change(&mut request);
    DefaultPolicy::default().on_request(request)
}

#[test]
fn an_explicit_choice_takes_precedence_over_needle_routing_and_parameters() {
    let cases = [
        (None, None, true),
        (Some(true), None, true),
        (Some(false), None, false),
        (None, Some(0), false),
        (Some(true), Some(0), false),
        (None, Some(100), true),
        (Some(false), Some(100), false),
    ];
    for (reasoning, reasoning_budget, expected) in cases {
        let plan = request(|r| {
            r.reasoning = reasoning;
            r.reasoning_budget = reasoning_budget;
            r.system_chars = 5000;
            r.user = "Where is it?".into();
        });
        assert_eq!(plan.reasoning, Some(expected), "{reasoning:?} {reasoning_budget:?}");
    }
}

#[test]
fn a_short_question_about_a_long_system_text_enables_reasoning_even_if_off() {
    let plan = |system_chars, user: &str| {
        request(|r| {
            r.params = vec![("reasoning".into(), "off".into())];
            r.system_chars = system_chars;
            r.user = user.into();
        })
    };
    let needle = plan(3001, "What is the secret code of project Onyx?");
    assert_eq!((needle.reasoning, needle.reasoning_budget), (Some(true), Some(2048)));
    assert_eq!(
        needle.note.as_deref(),
        Some("reasoning enabled: short question about a long system text")
    );
    assert_eq!(plan(3001, "tell me the code of project Onyx").reasoning, Some(true));
    assert_eq!(plan(3001, "Welchen Code hat das Projekt Onyx?").reasoning, Some(true));
    assert_eq!(plan(3000, "What is the secret code?").reasoning, Some(false));
    assert_eq!(plan(3001, "Write a story.").reasoning, Some(false));
    assert_eq!(plan(3001, &format!("What is {}?", "x".repeat(200))).reasoning, Some(false));
}

#[test]
fn reasoning_stays_disabled_if_the_model_does_not_support_it() {
    let plan = request(|r| {
        r.can_reason = false;
        r.reasoning = Some(true);
    });
    assert_eq!(plan.reasoning, Some(false));
}

#[test]
fn the_smallest_budget_applies_and_leaves_room_for_the_answer() {
    // (client's budget, max_tokens, context left), (budget, reserve)
    let cases = [
        ((None, None, 200_000), (32_768, 1024)),
        ((Some(500), None, 200_000), (500, 1024)),
        ((Some(99_999), None, 200_000), (32_768, 1024)),
        ((None, Some(4096), 200_000), (4096 - 1024 - 32, 1024)),
        ((None, Some(400), 8192), (200 - 32, 200)),
        ((None, Some(30_000), 32_768), (30_000 - 1024 - 32, 1024)),
        ((None, Some(30_000), 1000), (500 - 32, 500)),
        ((None, None, 1000), (500 - 32, 500)),
        ((None, None, 40), (0, 20)),
        ((None, None, 0), (0, 0)),
    ];
    for ((reasoning_budget, max_tokens, context_left), expected) in cases {
        let plan = request(|r| {
            r.reasoning_budget = reasoning_budget;
            r.max_tokens = max_tokens;
            r.context_left = context_left;
        });
        let got = (plan.reasoning_budget.unwrap(), plan.answer_reserve.unwrap());
        assert_eq!(got, expected, "{reasoning_budget:?} {max_tokens:?} {context_left}");
        assert!(got.0 + got.1 <= context_left);
    }
    for (context_left, max_tokens) in [(100, None), (32_768, Some(100))] {
        let small = |reasoning| {
            request(|r| {
                r.context_left = context_left;
                r.max_tokens = max_tokens;
                r.reasoning = reasoning;
            })
        };
        assert_eq!(small(None).reasoning, Some(false));
        assert_eq!(small(Some(true)).reasoning, Some(true));
    }
}

/// `max_tokens` of a chat limits the answer. At 160 it once left no room for reasoning, and retrieval questions that
/// are answered with reasoning were refused.
#[test]
fn a_limit_of_the_answer_costs_the_reasoning_nothing() {
    for limit in [1, 16, 60, 160, 400] {
        let plan = request(|r| {
            r.max_tokens = Some(16_384 + limit);
            r.max_answer_tokens = Some(limit);
            r.system_chars = 5000;
            r.user = "What is the secret code of project Onyx?".into();
        });
        let got = (plan.reasoning, plan.reasoning_budget, plan.answer_reserve);
        assert_eq!(got, (Some(true), Some(2048), Some(limit)));
    }
    // The answer keeps as many tokens as it may have, or half of the context.
    for (limit, reserve) in [(4000, 4000), (30_000, 16_384)] {
        let plan = request(|r| r.max_answer_tokens = Some(limit));
        let budget = 32_768 - reserve - 32;
        assert_eq!((plan.reasoning_budget, plan.answer_reserve), (Some(budget), Some(reserve)));
    }
}

#[test]
fn the_billing_header_is_removed_from_system_text() {
    let header = "x-anthropic-billing-header: cc_version=2.1; cch=41c7b;";
    let removed = |system: &str| {
        let prompt = PromptView { system: vec![system.into()], ..PromptView::default() };
        let found = DefaultPolicy::default().on_prompt(prompt.clone());
        prompt.edited(&found).remove(0)
    };
    assert_eq!(removed(&format!("{header}\n\nYou are X.")), "\nYou are X.");
    assert_eq!(removed("You are X."), "You are X.");
    let quoted = format!("Never send `{header}`.");
    assert_eq!(removed(&quoted), quoted);
}

#[test]
fn a_loop_or_a_used_up_budget_closes_the_reasoning_with_the_hint() {
    let mut policy = DefaultPolicy::default();
    policy.on_request(RequestView {
        user: "Extract the names as JSON.".into(),
        ..RequestView::default()
    });
    let near = Some(LoopReport { period: 23, repeats: 9, exact: false });
    let close = [Action::CloseReasoning("**Final JSON:**\n\n```json\n".into())];
    let reasoning = |loop_found, budget_reached| Step {
        phase: Phase::Reasoning,
        loop_found,
        budget_reached,
        ..Step::default()
    };
    assert_eq!(policy.on_step(reasoning(near, false)), close);
    assert_eq!(policy.on_step(reasoning(None, true)), close);
    assert_eq!(policy.on_step(reasoning(None, false)), []);
}

#[test]
fn an_answer_is_stopped_only_for_a_long_exact_loop() {
    let mut policy = DefaultPolicy::default();
    policy.on_request(RequestView::default());
    let mut answer = |period, repeats, exact| {
        let loop_found = Some(LoopReport { period, repeats, exact });
        let actions = policy.on_step(Step { loop_found, ..Step::default() });
        actions == [Action::Stop("the answer is a loop".into())]
    };
    assert!(!answer(11, 100, true));
    assert!(!answer(23, 100, false));
    assert!(answer(11, 187, true));
}

#[test]
fn unusable_parameters_are_noted() {
    let plan = request(|r| r.params = vec![("budget".into(), "1".into())]);
    assert_eq!(plan.note.as_deref(), Some("unknown parameter `budget`"));
}

#[test]
fn reasoning_is_closed_even_without_a_call_of_on_request() {
    let step = Step { phase: Phase::Reasoning, budget_reached: true, ..Step::default() };
    let close = [Action::CloseReasoning("**Final Answer:**\n\n".into())];
    assert_eq!(DefaultPolicy::default().on_step(step), close);
}
