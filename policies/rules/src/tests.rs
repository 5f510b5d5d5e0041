use steersman_policy::{
    AnswerForm, Ban, Caller, Counted, EarlierCall, LoopReport, Phase, Refusal, Retention,
    SamplingChange, SamplingPatch, SavePoint,
};

use super::*;

mod wishes;

/// A policy with these rules, and its plan for `request`.
fn with(rules: &str, request: RequestView) -> (Rules, Plan) {
    let mut policy = Rules::default();
    let params = vec![("rules".to_owned(), rules.to_owned())];
    let plan = policy.on_request(RequestView { params, ..request });
    (policy, plan)
}

fn user(text: &str) -> RequestView {
    RequestView { user: text.into(), ..RequestView::default() }
}

fn answer(text: &str) -> Step {
    Step { text: text.into(), ..Step::default() }
}

#[test]
fn all_matching_rules_apply_and_the_first_takes_precedence() {
    let rules = r#"
        rule = [
            { when = { user_contains = ["haiku", "Sonnet"] }, do = { reasoning_budget = 50, note = "verse" } },
            { when = { user_under = 20 }, do = { reasoning_budget = 100, temperature = 0.5 } },
            { do = { reasoning_budget = 2048, top_p = 0.9, loops = { repeats = 4 }, note = "all" } },
        ]"#;
    let plan = |text| with(rules, user(text)).1;
    let short = plan("A SONNET, please.");
    assert_eq!((short.reasoning_budget, short.note.as_deref()), (Some(50), Some("verse; all")));
    assert_eq!(
        short.sampling,
        SamplingPatch { temperature: Some(0.5), top_p: Some(0.9), ..SamplingPatch::default() }
    );
    assert_eq!(short.loops, Some(LoopRule { repeats: 4, ..LOOPS }));
    assert_eq!(plan("Hello").reasoning_budget, Some(100));
    assert_eq!(plan("Tell me about the history of Rome.").reasoning_budget, Some(2048));
    assert_eq!(short.every, 0);
}

#[test]
fn the_client_can_lower_the_budget_but_not_raise_it() {
    let rules = "[[rule]]\ndo = { reasoning = false, reasoning_budget = 100 }";
    let with_budget = |reasoning_budget| RequestView {
        reasoning: Some(true),
        reasoning_budget,
        ..RequestView::default()
    };
    assert_eq!(with(rules, with_budget(Some(50))).1.reasoning_budget, Some(50));
    assert_eq!(with(rules, with_budget(Some(500))).1.reasoning_budget, Some(100));
    assert_eq!(with(rules, with_budget(None)).1.reasoning, Some(false));
    let silent = "[[rule]]\ndo = { note = \"x\" }";
    let plan = with(silent, with_budget(Some(50))).1;
    assert_eq!((plan.reasoning, plan.reasoning_budget), (Some(true), Some(50)));
}

#[test]
fn each_condition_on_a_request_is_checked() {
    let request = RequestView {
        profile: "p".into(),
        model: "m".into(),
        family: "f".into(),
        user: "Straße nach Rom".into(),
        system_chars: 100,
        prompt_tokens: 50,
        messages: 3,
        tools: vec!["search".into()],
        reasoning: Some(false),
        ..RequestView::default()
    };
    let cases = [
        ("profile = 'p'", true),
        ("profile = 'x'", false),
        ("model = ['x', 'm']", true),
        ("model = 'x'", false),
        ("family = 'f'", true),
        ("family = ['x']", false),
        ("user_contains = 'STRASSE'", false),
        ("user_contains = 'STRAßE'", true),
        ("user_words = 'rom'", true),
        ("user_words = 'ro'", false),
        ("user_under = 15", false),
        ("user_under = 16", true),
        ("user_over = 14", true),
        ("user_over = 15", false),
        ("system_over = 99", true),
        ("system_over = 100", false),
        ("prompt_over = 49", true),
        ("prompt_over = 50", false),
        ("messages_over = 2", true),
        ("messages_over = 3", false),
        ("tools = true", true),
        ("tools = false", false),
        ("tools = 'search'", true),
        ("tools = ['read']", false),
        ("reasoning_requested = false", true),
        ("reasoning_requested = true", false),
        ("can_reason = true", true),
        ("can_reason = false", false),
        ("system_contains = 'x'", false),
        ("tools = true, user_under = 1", false),
    ];
    for (condition, expected) in cases {
        let rules = format!("[[rule]]\nwhen = {{ {condition} }}\ndo = {{ reasoning_budget = 7 }}");
        let plan = with(&rules, request.clone()).1;
        assert_eq!(plan.note, None, "{condition}");
        assert_eq!(plan.reasoning_budget == Some(7), expected, "{condition}");
    }
}

#[test]
fn waiting_for_a_loop_needs_no_calls_between_events() {
    let rules = r#"
        [[rule]]
        when = { loop = true, phase = "reasoning" }
        times = 1
        do = { rewind = "loop", temperature = 1.0, for = 16 }
        [[rule]]
        when = { loop = true, phase = "reasoning" }
        do = { close_reasoning = "**Final Answer:**\n\n" }"#;
    let (mut policy, plan) = with(rules, RequestView::default());
    assert_eq!((plan.every, plan.checkpoint_every, plan.loops), (0, CHECKPOINT_EVERY, Some(LOOPS)));
    let found = Some(LoopReport { period: 10, repeats: 4, exact: true });
    let step = Step { phase: Phase::Reasoning, loop_found: found, ..Step::default() };
    let hot = SamplingPatch { temperature: Some(1.0), ..SamplingPatch::default() };
    let close = Action::CloseReasoning("**Final Answer:**\n\n".into());
    let change = Action::Sampling(SamplingChange { sampling: hot, steps: 16 });
    assert_eq!(policy.on_step(step.clone()), [Action::Rewind(30), change]);
    assert_eq!(policy.on_step(step.clone()), std::slice::from_ref(&close));
    assert_eq!(policy.on_step(step), [close]);
    assert_eq!(policy.on_step(Step { loop_found: found, ..Step::default() }), []);
}

#[test]
fn text_is_found_across_calls_and_ends_the_answer() {
    let rules = r#"
        [[rule]]
        when = { text_contains = "as an AI", phase = "answer" }
        do = { stop = "a refusal" }"#;
    let (mut policy, plan) = with(rules, RequestView::default());
    assert_eq!((plan.every, plan.on_texts), (0, vec!["as an AI".to_owned()]));
    assert_eq!(policy.on_step(answer("Sorry, as a")), []);
    assert_eq!(policy.on_step(answer("n AI model")), [Action::Stop("a refusal".into())]);
    assert_eq!(policy.on_step(answer("as an AI")), [], "once is enough");
}

#[test]
fn more_texts_than_events_allow_are_searched_every_8_tokens() {
    let of = |texts: &[&str]| {
        let rule = |text| {
            format!("[[rule]]\nwhen = {{ text_contains = '{text}' }}\ndo = {{ stop = 'x' }}\n")
        };
        let (_, plan) = with(&texts.iter().map(rule).collect::<String>(), RequestView::default());
        (plan.every, plan.on_texts.len())
    };
    let texts: Vec<String> = (0..17).map(|index| format!("text {index}")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    assert_eq!(of(&texts[..16]), (0, 16));
    assert_eq!(of(&texts), (8, 16), "the last one");
    assert_eq!(of(&["a", "a"]), (0, 1));
    assert_eq!(of(&["a", &"b".repeat(257)]), (8, 1));
}

#[test]
fn tokens_are_banned_from_the_first_step_on() {
    let rules = "[[rule]]\nwhen = { user_words = \"short\" }\ndo = { ban = [5, 0x10], bias = { 7 = -1.5 } }";
    let (mut policy, plan) = with(rules, user("Be short."));
    assert_eq!(plan.every, 1);
    let actions = policy.on_step(answer("a"));
    assert_eq!(actions[0], Action::Ban(Ban { tokens: vec![5, 16], steps: 0 }));
    assert!(
        matches!(&actions[1], Action::Bias(b) if b.tokens[0].bias == -1.5 && b.tokens[0].token == 7)
    );
    assert_eq!(policy.on_step(answer("b")), []);
    let (mut policy, plan) = with(rules, user("Be long."));
    assert_eq!((plan.every, policy.on_step(answer("a"))), (0, vec![]));
}

#[test]
fn a_tool_loop_is_repaired_and_then_ends_the_request() {
    let rules = r#"
        [[rule]]
        when = { repeats_over = 1 }
        times = 1
        do = { repair = "Another way: " }
        [[rule]]
        when = { repeats_over = 1 }
        do = { stop = "tool loop" }
        [[rule]]
        when = { tool_called = "shell", arguments_contain = "rm -rf" }
        do = { stop = "not here" }"#;
    let (mut policy, _) = with(rules, RequestView::default());
    let earlier =
        EarlierCall { name: "a".into(), arguments: "d".into(), answered: Some("r".into()) };
    let call = |times| ToolCallView {
        name: "a".into(),
        digest: "d".into(),
        earlier: vec![earlier.clone(); times],
        ..ToolCallView::default()
    };
    assert_eq!(policy.on_tool_call(call(1)), Verdict::Accept);
    assert_eq!(policy.on_tool_call(call(2)), Verdict::Repair("Another way: ".into()));
    assert_eq!(policy.on_tool_call(call(2)), Verdict::Stop("tool loop".into()));
    let shell = |arguments: &str| ToolCallView {
        name: "shell".into(),
        arguments: arguments.into(),
        ..ToolCallView::default()
    };
    assert_eq!(
        policy.on_tool_call(shell("{\"c\": \"rm -rf /\"}")),
        Verdict::Stop("not here".into())
    );
    assert_eq!(policy.on_tool_call(shell("{\"c\": \"ls\"}")), Verdict::Accept);
}

#[test]
fn rules_remove_spans_and_lines_of_system_text() {
    let rules = r#"
        [[rule]]
        do = { strip_lines = "build: ", strip = [" (beta)"] }
        [[rule]]
        when = { system_contains = "secret" }
        do = { strip = "secret" }"#;
    let prompt = PromptView {
        params: vec![("rules".into(), rules.into())],
        system: vec!["You are X (beta).\nbuild: 17\nBe brief.".into()],
        ..PromptView::default()
    };
    let found = Rules::default().on_prompt(prompt.clone());
    assert_eq!((found.len(), prompt.edited(&found)), (2, vec!["You are X.\nBe brief.".to_owned()]));
}

#[test]
fn retention_is_given_in_seconds() {
    let rules = "[[rule]]\ndo = { retain = [{ at = 'system', seconds = 3600 }, { at = 'reply' }] }";
    let retain = with(rules, RequestView::default()).1.retain;
    let system = Retention { at: SavePoint::System, seconds: 3600 };
    assert_eq!(retain, Some(vec![system, Retention::at(SavePoint::Reply)]));
}

#[test]
fn a_form_is_planned_unless_the_client_demands_one() {
    let rules =
        "[[rule]]\nwhen = { form_requested = false }\ndo = { form = { choice = ['yes', 'no'] } }
        [[rule]]\ndo = { form = 'json' }";
    let planned = |form| with(rules, RequestView { form, ..RequestView::default() }).1.form;
    assert_eq!(planned(None), Some(AnswerForm::Choice(vec!["yes".into(), "no".into()])));
    let demanded = AnswerForm::Regex("a+".into());
    assert_eq!(planned(Some(demanded)), Some(AnswerForm::JsonObject));
    let texts = [
        ("json_schema = '{}'", AnswerForm::JsonSchema("{}".into())),
        ("regex = 'a+'", AnswerForm::Regex("a+".into())),
        ("grammar = 'start: \"a\"'", AnswerForm::Grammar("start: \"a\"".into())),
    ];
    for (text, form) in texts {
        let rules = format!("[[rule]]\ndo = {{ form = {{ {text} }} }}");
        assert_eq!(with(&rules, RequestView::default()).1.form, Some(form));
    }
}

#[test]
fn a_mistake_is_reported_with_its_line_and_the_expected_keys() {
    let cases = [
        ("[[rule]]\ndo = { reasoning = ", "line 2: "),
        ("", "no `[[rule]]` found"),
        (
            "[[rules]]\ndo = { reasoning = true }",
            "line 1: unknown key `rules`; rules begin with `[[rule]]`",
        ),
        ("[[rule]]\nwhen = { tools = true }", "rule 1, line 1: `do` is missing"),
        ("[[rule]]\ndo = {}", "rule 1, line 1: `do` is missing"),
        (
            "[[rule]]\ndo = { reasoning = true }\n\n[[rule]]\nif = 1",
            "rule 2, line 5: unknown key `if`; expected one of when, unless, do, times",
        ),
        (
            "[[rule]]\nwhen = { user_has = 'x' }\ndo = { reasoning = true }",
            "rule 1, line 2: unknown key `when.user_has`; expected one of profile, ",
        ),
        (
            "[[rule]]\ndo = { reason = true }",
            "rule 1, line 2: unknown key `do.reason`; expected one of strip, ",
        ),
        (
            "[[rule]]\ntimes = 2\ndo = { reasoning = true }",
            "rule 1, line 1: `times` has no effect: the rule applies once, before prefill",
        ),
        (
            "[[rule]]\ndo = { reasoning = 'yes' }",
            "rule 1, line 2: `do.reasoning` must be true or false",
        ),
        (
            "[[rule]]\ndo = { reasoning_budget = -1 }",
            "`do.reasoning_budget` must be a whole number from 0 to 4294967295",
        ),
        ("[[rule]]\ndo = { temperature = 11 }", "`do.temperature` must be a number from 0 to 10"),
        ("[[rule]]\ndo = { min_p = nan }", "`do.min_p` must be a number from 0 to 1"),
        (
            "[[rule]]\ndo = { ban = [] }",
            "`do.ban` must be a text, or a list of token ids and texts",
        ),
        ("[[rule]]\ndo = { ban = [-1] }", "`do.ban` must be a text, or a list of token ids and"),
        ("[[rule]]\ndo = { ban = 5 }", "`do.ban` must be a text, or a list of token ids and texts"),
        ("[[rule]]\ndo = { ban = [''] }", "`do.ban` must be a text, or a list of token ids and"),
        ("[[rule]]\ndo = { bias = { 7 = 101 } }", "`do.bias.7` must be a number from -100 to 100"),
        (
            "[[rule]]\ndo = { bias = { '' = 1 } }",
            "`do.bias.` must be a token id, or a text of 1 to",
        ),
        (
            "[[rule]]\ndo = { bias = {} }",
            "`do.bias` must have 1 to 256 tokens; a text stands for 2",
        ),
        ("[[rule]]\ndo = { replace = 'x' }", "`do.replace` must be a table"),
        ("[[rule]]\ndo = { replace = {} }", "`do.replace` must have entries: { \"old text\" = "),
        (
            "[[rule]]\ndo = { replace = { x = 1 } }",
            "rule 1, line 2: `do.replace.x` must be a text, which may be empty",
        ),
        (
            "[[rule]]\ntimes = 1\ndo = { replace_words = { x = '' } }",
            "`times` has no effect: it replaces all texts, in answer text",
        ),
        (
            "[[rule]]\nwhen = { phase = 'answer' }\ndo = { replace = { x = '' } }",
            "`when.phase` is available during decoding, but the rule applies in answer text: split",
        ),
        (
            "[[rule]]\n\nunless = { loop = true }\ndo = { reasoning = true }",
            "rule 1, line 3: `unless.loop` is available during decoding, but the rule applies before",
        ),
        (
            "[[rule]]\nunless = { text_has = 'x' }\ndo = { stop = 'x' }",
            "rule 1, line 2: unknown key `unless.text_has`; expected one of profile, ",
        ),
        (
            "[[rule]]\nwhen = { text_lacks = 'x' }\ndo = { stop = 'x' }",
            "calls_over; for the opposite of a condition, put it into `unless`",
        ),
        (
            "[[rule]]\nwhen = { reasoning_tokens = 0 }\ndo = { stop = 'x' }",
            "`when.reasoning_tokens` must be at least 1",
        ),
        ("[[rule]]\ndo = { route = '' }", "`do.route` must be a text that is not empty"),
        (
            "[[rule]]\ndo = { loops = { period = 1 } }",
            "unknown key `do.loops.period`; expected one of max_period, ",
        ),
        ("[[rule]]\ndo = { retain = [{ at = 'all' }] }", "`do.retain` must be a list of { at = "),
        ("[[rule]]\ndo = { form = 'xml' }", "`do.form` must be \"json\" or a table with one of"),
        ("[[rule]]\ndo = { form = { regex = 'a', choice = ['b'] } }", "`do.form` must be \"json\""),
        ("[[rule]]\ndo = { form = { regex = 1 } }", "`do.form.regex` must be a text"),
        (
            "[[rule]]\nwhen = { phase = 'think' }\ndo = { stop = 'x' }",
            "`when.phase` must be \"reasoning\", ",
        ),
        (
            "[[rule]]\nwhen = { text_contains = '' }\ndo = { stop = 'x' }",
            "`when.text_contains` must be a text or a list",
        ),
        (
            "[[rule]]\nwhen = { loop = true }\ndo = { reasoning = true }",
            "`when.loop` is available during decoding, but the rule applies before prefill: split it",
        ),
        (
            "[[rule]]\nwhen = { user_under = 3 }\ndo = { strip = 'x' }",
            "`when.user_under` is available before prefill, but the rule applies before the prompt",
        ),
        (
            "[[rule]]\ndo = { inject = 'x', repair = 'y' }",
            "`do.repair` is available at a tool call, but the rule applies during decoding",
        ),
        (
            "[[rule]]\nwhen = { tool_called = 'x' }\ndo = { repair = 'x', stop = 'y' }",
            "must be the only key of `do`",
        ),
        ("[[rule]]\ndo = { rewind = 'loop' }", "`do.rewind` = \"loop\" needs `when.loop` = true"),
        ("[[rule]]\ndo = { inject = 'x', for = 3 }", "`do.for` limits a ban"),
        ("[[rule]]\ndo = { stop = '' }", "`do.stop` must be a text that is not empty"),
    ];
    for (text, expected) in cases {
        let problem = check(text).expect_err(text);
        assert!(problem.contains(expected), "{text}\n{problem}\n{expected}");
        let note = with(text, RequestView::default()).1.note.expect("a note");
        assert_eq!(note, format!("rules ignored: {problem}"));
    }
    let many = "[[rule]]\ndo = { ban = [1] }\n".repeat(16);
    let problem = check(&many).unwrap_err();
    assert!(problem.starts_with("rule 16, line 31: with this rule, "), "{problem}");
    assert!(problem.contains("more than 16 actions"), "{problem}");
    let entries = |n: u32| (0..n).map(|i| format!("'a{i}' = ''")).collect::<Vec<_>>().join(", ");
    let replace = |n| format!("[[rule]]\ndo = {{ replace = {{ {} }} }}\n", entries(n));
    assert_eq!(check(&replace(64)), Ok(()));
    let problem = check(&(replace(64) + &replace(1))).unwrap_err();
    assert!(problem.starts_with("rule 2, line 3: with this rule, more than 64 texts"), "{problem}");
    let texts = |n: u32| (0..n).map(|i| format!("'a{i}'")).collect::<Vec<_>>().join(", ");
    let ban = |n| format!("[[rule]]\ndo = {{ ban = [{}] }}\n", texts(n));
    assert_eq!(check(&ban(128).repeat(2)), Ok(()));
    assert!(check(&ban(129)).unwrap_err().contains("for at most 256 tokens; a text stands for 2"));
    let problem = check(&(ban(128).repeat(2) + &ban(1))).unwrap_err();
    assert!(problem.contains("rule 3, line 5: with this rule, bans and biases have more than 256"));
    assert_eq!(check("[[rule]]\ndo = { close_reasoning = '' }"), Ok(()));
}

#[test]
fn a_rule_refuses_a_request_or_limits_its_reply_and_tools() {
    let rules = r#"
        [[rule]]
        when = { caller_key = "0123456789abcdef", user_contains = "secret" }
        do = { refuse = "Not here.", status = 451 }
        [[rule]]
        when = { caller_user = "fedcba9876543210" }
        do = { max_tokens = 100, stop_at = ["END", "\n\n"], offer_tools = ["search"] }
        [[rule]]
        do = { max_tokens = 500, limit_counts = "reply", stop_at = "STOP", offer_tools = [] }"#;
    let request = |user: &str, key: &str, of: &str| {
        let caller = Caller { key: key.into(), user: of.into(), ..Caller::default() };
        with(rules, RequestView { user: user.into(), caller, ..RequestView::default() }).1
    };
    let refusal = Refusal { status: 451, message: "Not here.".into(), retry_after: None };
    assert_eq!(request("A secret?", "0123456789abcdef", "").refuse, Some(refusal));
    assert_eq!(request("A secret?", "", "").refuse, None);
    let known = request("Hello", "", "fedcba9876543210");
    assert_eq!((known.refuse, known.max_tokens), (None, Some(100)));
    assert_eq!(known.stop, ["END", "\n\n", "STOP"]);
    assert_eq!(known.tools.as_deref(), Some(&["search".to_owned()][..]));
    let other = request("Hello", "", "");
    assert_eq!((other.max_tokens, other.tools), (Some(500), Some(Vec::new())));
    assert_eq!(other.limit_counts, Some(Counted::Reply));
    for (mistake, problem) in [
        ("status = 429", "`do.status` needs `do.refuse`"),
        ("refuse = 'x', status = 500", "`do.status` must be an HTTP status from 400 to 499"),
        ("max_tokens = 0", "`do.max_tokens` must be at least 1"),
        ("limit_counts = 'all'", "`do.limit_counts` must be \"answer\" or \"reply\""),
        ("stop_at = []", "`do.stop_at` must be a text or a list of texts, not empty"),
    ] {
        let rules = format!("[[rule]]\ndo = {{ {mistake} }}");
        assert_eq!(check(&rules), Err(format!("rule 1, line 2: {problem}")));
    }
}

#[test]
fn rules_are_packed_once_and_a_mistake_is_a_problem() {
    let on_params = |rules: &str| {
        let params = vec![("rules".to_owned(), rules.to_owned()), ("strict".into(), "true".into())];
        Rules::default().on_params(ParamsView { params, ..ParamsView::default() })
    };
    let prepared = on_params("[[rule]]\ndo = { note = 'n' } # a comment");
    let [text, call, (name, packed)] = &prepared.replaced[..] else { panic!("{prepared:?}") };
    assert_eq!((&**name, &prepared.problems[..]), ("rules", &[][..]));
    let off = |hook: &str| (hook.to_owned(), "off".to_owned());
    assert_eq!((text, call), (&off("on-text"), &off("on-tool-call")));
    let replaces = on_params("[[rule]]\ndo = { replace = { a = 'b' } }").replaced;
    assert_eq!((&replaces[0], replaces.len()), (&off("on-tool-call"), 2));
    let repairs = on_params("[[rule]]\nwhen = { calls_over = 1 }\ndo = { repair = 'b' }").replaced;
    assert_eq!((&repairs[0], repairs.len()), (&off("on-text"), 2));
    assert!(!packed.contains("comment"));
    assert_eq!(with(packed, RequestView::default()).1.note.as_deref(), Some("n"));
    let wrong = on_params("[[rule]]\ndo = { nte = 'n' }");
    assert_eq!(wrong.replaced, [off("on-text"), off("on-tool-call")]);
    assert!(
        wrong.problems[0].starts_with("parameter `rules`: rule 1, line 2: unknown key `do.nte`")
    );
}

/// `strict = "maybe"` was `false`, and a rule that can never apply was accepted.
#[test]
fn what_can_have_no_effect_is_a_mistake() {
    let problems = |name: &str, text: &str| {
        let params = [("rules", "[[rule]]\ndo.note = 'n'"), (name, text)];
        let params = params.map(|(name, text)| (name.to_owned(), text.to_owned())).to_vec();
        let view = ParamsView { params: params.clone(), ..ParamsView::default() };
        let problems = Rules::default().on_params(view).problems;
        let request = RequestView { params, ..RequestView::default() };
        (problems, Rules::default().on_request(request).note.unwrap_or_default())
    };
    let maybe = "parameter `strict` cannot be `maybe`: it is `true` or `false`";
    assert_eq!(problems("strict", "maybe"), (vec![maybe.to_owned()], format!("{maybe}; n")));
    for known in ["true", "false"] {
        assert_eq!(problems("strict", known), (Vec::new(), "n".into()));
    }
    for (conditions, expected) in [
        ("when.tools = ['a']\nunless.tools = ['a']", "`when.tools` has the same value in `unless`"),
        (
            "when.can_reason = true\nunless.can_reason = true",
            "`when.can_reason` has the same value",
        ),
        (
            "when = { user_under = 11, user_over = 10 }",
            "`when.user_under` is 11 and `when.user_over` 10",
        ),
        ("when = { user_under = 5, user_over = 10 }", "no text is between them"),
    ] {
        let problem = check(&format!("[[rule]]\n{conditions}\ndo.note = 'n'")).unwrap_err();
        assert!(problem.starts_with("rule 1, line 2: "), "{problem}");
        assert!(problem.contains(expected) && problem.contains("can never apply"), "{problem}");
    }
    for conditions in [
        "when.tools = ['a']\nunless.tools = ['b']",
        "when = { user_under = 12, user_over = 10 }",
        "when.user_under = 10\nunless.user_over = 20",
    ] {
        check(&format!("[[rule]]\n{conditions}\ndo.note = 'n'")).unwrap();
    }
}

#[test]
fn a_key_that_is_spelt_like_another_is_told_with_it() {
    for (rule, expected) in [
        ("when = { user_contain = 'x' }", "`when.user_contain`; did you mean `user_contains`?"),
        ("unless = { usr_over = 1 }", "`unless.usr_over`; did you mean `user_over`?"),
        ("times = 1\ntims = 1", "`tims`; did you mean `times`?"),
        ("do.ntoe = 'n'", "`do.ntoe`; did you mean `note`?"),
        ("do.loops = { max_perio = 1 }", "`do.loops.max_perio`; did you mean `max_period`?"),
    ] {
        let problem = check(&format!("[[rule]]\n{rule}\ndo.note = 'n'")).unwrap_err();
        assert!(problem.contains(&format!("unknown key {expected}")), "{problem}");
    }
    let long = check(&format!("[[rule]]\ndo.{} = 'n'", "note".repeat(10_000))).unwrap_err();
    assert!(long.contains("`; expected one of strip, "), "{}", &long[long.len() - 400..]);
}

/// They were told one at a time: a text with five mistakes took five attempts.
#[test]
fn all_mistakes_are_told_with_their_rules_and_lines() {
    let rules = "[[rule]]\nwhen = { usr_over = 5, user_under = 'x' }\nunless = { phase = 'x' }\n\
                 do = { nte = 'n', ban = [] }\n\
                 [[rule]]\ndo = { reasoning = 1, temperature = 11, note = 'n', max_tokens = 0 }\n\
                 [[rule]]\ndo = { note = 'right' }\n\
                 [[rule]]\ndo = 5\nwhat = 1\n\
                 [[rule]]\ndo = { replace = { a = 1, b = 2 } }\n\
                 [other]\n";
    let params = vec![("rules".to_owned(), rules.to_owned())];
    let view = ParamsView { params, ..ParamsView::default() };
    let problems = Rules::default().on_params(view).problems;
    for expected in [
        "rule 1, line 2: `when.user_under` must be",
        "rule 1, line 3: `unless.phase` must be",
        "rule 1, line 4: unknown key `do.nte`",
        "rule 1, line 4: `do.ban` must be a text",
        "rule 1, line 2: unknown key `when.usr_over`",
        "rule 2, line 6: `do.reasoning` must be true or false",
        "rule 2, line 6: `do.temperature` must be",
        "rule 2, line 6: `do.max_tokens` must be at least 1",
        "rule 4, line 10: `do` must be a table",
        "rule 4, line 11: unknown key `what`",
        "rule 5, line 13: `do.replace.a` must be a text",
        "rule 5, line 13: `do.replace.b` must be a text",
        "line 14: unknown key `other`",
    ] {
        let expected = format!("parameter `rules`: {expected}");
        let count = problems.iter().filter(|problem| problem.starts_with(&expected)).count();
        assert_eq!(count, 1, "{expected} is in {problems:#?}");
    }
    assert_eq!(problems.len(), 13, "{problems:#?}");
    // A limit that all further rules exceed is one mistake, and of many mistakes the first are told.
    let many = check(&"[[rule]]\ndo = { ban = [1] }\n".repeat(40)).unwrap_err();
    assert_eq!(many.matches("with this rule").count(), 1, "{many}");
    let many = check(&"[[rule]]\ndo = { typo = 1 }\n".repeat(40)).unwrap_err();
    assert_eq!(many.matches("unknown key").count(), 16, "{many}");
    assert!(many.ends_with("; there may be more"), "{many}");
}

#[test]
fn a_mistake_in_one_rule_disables_all_rules() {
    let rules = "[[rule]]\ndo = { reasoning_budget = 5, ban = [1] }";
    assert!(check(rules).is_err());
    let rules = "[[rule]]\ndo = { stop = 'x' }\n[[rule]]\ndo = { typo = 1 }";
    let (mut policy, plan) = with(rules, RequestView::default());
    assert_eq!((plan.every, policy.on_step(answer("a"))), (0, vec![]));
    assert_eq!(policy.on_tool_call(ToolCallView::default()), Verdict::Accept);
}

#[test]
#[should_panic(expected = "`do` is missing")]
fn with_strict_a_mistake_fails_the_request() {
    let params = [("rules", "[[rule]]"), ("strict", "true")];
    let params = params.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
    Rules::default().on_request(RequestView { params, ..RequestView::default() });
}

#[test]
fn missing_rules_and_unknown_parameters_are_noted() {
    let params = vec![("rule".to_owned(), "x".to_owned())];
    let plan = Rules::default().on_request(RequestView { params, ..RequestView::default() });
    assert_eq!(
        plan.note.as_deref(),
        Some("unknown parameter `rule`; rules ignored: the parameter `rules` is missing")
    );
}

#[test]
fn the_reference_documents_all_keys_and_the_examples_are_valid() {
    let reference = include_str!("../../REFERENCE.md");
    let (_, section) = reference.split_once("## Rules\n").expect("the section on rules");
    for (key, _) in parse::WHEN.iter().chain(parse::DO) {
        assert!(section.contains(&format!("`{key}`")), "{key}");
    }
    let (_, guide) = include_str!("../../README.md").split_once("## Rules\n").expect("the guide");
    // The first block of the reference configures a profile.
    for (section, block) in [(section, 2), (guide, 1)] {
        let example = section.split("```toml\n").nth(block).and_then(|b| b.split("```").next());
        assert_eq!(check(example.expect("an example")), Ok(()));
    }
}

#[test]
fn any_number_of_rules_returns_at_most_16_actions() {
    let rules = "[[rule]]\ndo = { inject = 'x', ban = [1] }\n".repeat(40)
        + &"[[rule]]\ndo = { ban = [2] }\n".repeat(13)
        + &"[[rule]]\ndo = { stop = 'y' }\n".repeat(40);
    assert_eq!(check(&rules), Ok(()));
    let (mut policy, _) = with(&rules, RequestView::default());
    let actions = policy.on_step(answer("a"));
    assert_eq!(actions.len(), 16);
    assert_eq!(actions.last(), Some(&Action::Stop("y".into())));
}
