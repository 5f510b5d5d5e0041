use super::*;

fn params(params: &[(&str, &str)]) -> Vec<(String, String)> {
    params.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect()
}

fn reasoning(loop_found: Option<LoopReport>, budget_reached: bool) -> Step {
    Step { phase: Phase::Reasoning, loop_found, budget_reached, ..Step::default() }
}

#[test]
fn reasoning_is_short_and_the_client_can_shorten_it() {
    let plan = |reasoning_budget, context_left| {
        Agent::default().on_request(RequestView {
            reasoning_budget,
            context_left,
            ..RequestView::default()
        })
    };
    assert_eq!(plan(None, 32_768).reasoning_budget, Some(1024));
    assert_eq!(plan(Some(100), 32_768).reasoning_budget, Some(100));
    assert_eq!(plan(Some(5000), 32_768).reasoning_budget, Some(1024));
    assert_eq!(plan(None, 1000).reasoning_budget, Some(1000 - 500 - 32));
    assert_eq!(plan(Some(0), 32_768).reasoning, Some(false));
}

#[test]
fn reasoning_over_its_budget_is_closed_with_the_head_of_the_answer() {
    type Params = &'static [(&'static str, &'static str)];
    let cases: [(Params, &str, &str, bool, &str); 7] = [
        (&[], "", "Find the bug.", true, "**Next Step:**\n\n"),
        (&[], "Reply only in JSON.", "Who?", true, "**Next Step:**\n\n"),
        (&[], "Reply only in JSON.", "Who?", false, "{"),
        (&[], "", "Return the names as JSON.", false, "{"),
        (&[("json_head", "fence")], "", "Return JSON.", false, "```json\n"),
        (&[("answer", "json"), ("json_head", "list")], "", "Who?", true, "["),
        (&[], "", "Who?", false, "**Final Answer:**\n\n"),
    ];
    for (given, system, user, tools, expected) in cases {
        let mut policy = Agent::default();
        policy.on_prompt(PromptView {
            params: params(given),
            system: vec![system.into()],
            ..PromptView::default()
        });
        policy.on_request(RequestView {
            params: params(given),
            user: user.into(),
            tools: if tools { vec!["search".into()] } else { vec![] },
            ..RequestView::default()
        });
        assert_eq!(
            policy.on_step(reasoning(None, true)),
            [Action::CloseReasoning(expected.into())],
            "{given:?} {system} {user} {tools}"
        );
    }
}

#[test]
fn the_first_loop_is_rewound_and_the_second_closes_the_reasoning() {
    let found = Some(LoopReport { period: 40, repeats: 3, exact: true });
    let mut policy = Agent::default();
    assert_eq!(policy.on_request(RequestView::default()).checkpoint_every, 128);
    assert_eq!(policy.on_step(reasoning(found, false))[0], Action::Rewind(80));
    assert_eq!(
        policy.on_step(reasoning(found, false)),
        [Action::CloseReasoning("**Final Answer:**\n\n".into())]
    );
    // With the budget used up, a rewind is useless.
    let mut policy = Agent::default();
    policy.on_request(RequestView::default());
    assert!(matches!(policy.on_step(reasoning(found, true))[0], Action::CloseReasoning(_)));
}

#[test]
fn without_escapes_a_loop_closes_the_reasoning_and_no_checkpoints_are_taken() {
    let mut policy = Agent::default();
    let plan = policy
        .on_request(RequestView { params: params(&[("escapes", "0")]), ..RequestView::default() });
    assert_eq!(plan.checkpoint_every, 0);
    let found = Some(LoopReport { period: 40, repeats: 3, exact: true });
    assert!(matches!(policy.on_step(reasoning(found, false))[0], Action::CloseReasoning(_)));
}

#[test]
fn an_answer_is_stopped_only_for_a_long_exact_loop() {
    let stops = |period, repeats, exact| {
        let loop_found = Some(LoopReport { period, repeats, exact });
        let step = Step { phase: Phase::ToolCall, loop_found, ..Step::default() };
        Agent::default().on_step(step) == [Action::Stop("the answer is a loop".into())]
    };
    assert!(!stops(11, 100, true) && !stops(23, 100, false) && stops(11, 187, true));
}

#[test]
fn an_unusable_parameter_is_noted_and_keeps_its_default() {
    let plan = Agent::default().on_request(RequestView {
        params: params(&[("strip", "a||b"), ("thinkbudget", "9"), ("tool_repeats", "two")]),
        ..RequestView::default()
    });
    assert_eq!(
        plan.note.as_deref(),
        Some(
            "parameter `strip` cannot be `a||b`; unknown parameter `thinkbudget`; \
             parameter `tool_repeats` cannot be `two`"
        )
    );
    assert_eq!(plan.reasoning_budget, Some(1024));
}
