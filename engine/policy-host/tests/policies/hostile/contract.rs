//! Every record of the contract, as it passes from the host to a guest and back.

use std::sync::Arc;

use steersman_policy_host::{
    Action, AnswerForm, Ban, Bias, CONTRACT, Context, Hook, Plan, PromptEdit, PromptView,
    Replacement, RequestView, SamplingChange, SamplingPatch, Summary, TokenBias, ToolCallView,
    Verdict, Vocabulary, no_vocabulary,
};
use steersman_test_support::guest::{
    Answers, ELEMENT, Value, case, component, data, float, full_name, hooks, importing, input,
    list, offset, payload, record, some, text, word,
};
use steersman_test_support::hostile::{acting, stepper};

use super::{compile, dry_run, host, limits, looping, policy, prompt, run, start, tool_call, view};

#[test]
fn the_host_has_the_version_and_the_hooks_of_the_contract() {
    assert_eq!(full_name("on-step"), format!("steersman:policy/on-step@{CONTRACT}"));
    // The order differs: `Hook` has that of the calls in a request, a world that of its text.
    let mut exported = hooks();
    exported.sort_unstable();
    let mut known = Hook::ALL.map(Hook::name);
    known.sort_unstable();
    assert_eq!(exported, known);
}

#[test]
fn a_policy_reports_why_it_fails_and_needs_no_grant_for_it() {
    let host = host(&limits());
    let fails = |length: usize, message: &[u8]| {
        let body = format!("(call $failure.fail (i32.const 512) (i32.const {length})) i32.const 0");
        let bytes = importing(&["failure"], &[("on-step", &body)], &data(512, message));
        let component = compile(&host, &bytes);
        component.check_grants(&[]).unwrap();
        assert_eq!(component.needed_grants(), []);
        policy(&mut start(&component)).ask(&looping()).unwrap_err().to_string()
    };
    let message = b"rule 2:\nno `when`";
    let expected = "policy `guest`: on-step: failed: rule 2: no `when`";
    assert_eq!(fails(message.len(), message), expected);
    let long = fails(3000, &[b'x'; 3000]);
    assert_eq!(long, format!("policy `guest`: on-step: failed: {}", "x".repeat(1024)));
    // More than the host passes.
    let unreadable = fails(60_000, b"");
    assert!(unreadable.contains("(an answer may have 16384 bytes)"), "{unreadable}");
}

#[test]
fn hooks_that_are_not_exported_have_default_answers() {
    let host = host(&limits());
    for hook in hooks() {
        let component = compile(&host, &component(&[(hook, "i32.const 0")], ""));
        assert_eq!(component.hooks(), [hook]);
        let decisions = run(&mut start(&component)).unwrap();
        assert_eq!(decisions.plan, Plan::default());
        assert_eq!((decisions.edits, decisions.actions), (vec![], vec![]));
        assert_eq!(decisions.verdict, Verdict::Accept);
    }
}

#[test]
fn every_action_reaches_the_host_unchanged() {
    let patch = SamplingPatch {
        temperature: Some(0.5),
        top_p: Some(0.25),
        top_k: Some(40),
        min_p: Some(0.125),
    };
    let lowered = record([
        ("temperature", some(float(0.5))),
        ("top-p", some(float(0.25))),
        ("top-k", some(word(40))),
        ("min-p", some(float(0.125))),
    ]);
    let bias = |token, bias| record([("token", word(token)), ("bias", float(bias))]);
    let tokens = list([word(7), word(9)]);
    let biases = list([bias(7, 1.5), bias(9, -100.0)]);
    let cases = [
        (acting("inject", text("a text")), Action::Inject("a text".into())),
        (acting("close-reasoning", text("a text")), Action::CloseReasoning("a text".into())),
        (acting("rewind", word(12)), Action::Rewind(12)),
        (
            acting("ban", record([("tokens", tokens), ("steps", word(5))])),
            Action::Ban(Ban { tokens: vec![7, 9], steps: 5 }),
        ),
        (
            acting("bias", record([("tokens", biases), ("steps", word(6))])),
            Action::Bias(Bias {
                tokens: vec![
                    TokenBias { token: 7, bias: 1.5 },
                    TokenBias { token: 9, bias: -100.0 },
                ],
                steps: 6,
            }),
        ),
        (
            acting("sampling", record([("sampling", lowered), ("steps", word(8))])),
            Action::Sampling(SamplingChange { sampling: patch, steps: 8 }),
        ),
        (acting("stop", text("a text")), Action::Stop("a text".into())),
    ];
    let host = host(&limits());
    for (bytes, action) in cases {
        assert_eq!(policy(&mut dry_run(&host, &bytes)).ask(&looping()).unwrap(), [action]);
    }
}

/// An engine that cannot enforce regular expressions.
struct NoRegex;

impl Vocabulary for NoRegex {
    fn encode(&self, _: &str) -> Option<Vec<u32>> {
        None
    }

    fn decode(&self, _: &[u32]) -> String {
        String::new()
    }

    fn size(&self) -> u32 {
        0
    }

    fn check_form(&self, form: &AnswerForm) -> Result<(), String> {
        match form {
            AnswerForm::Regex(_) => Err("is no regex".into()),
            _ => Ok(()),
        }
    }
}

#[test]
fn every_form_reaches_the_host_unchanged_and_one_that_the_engine_refuses_is_a_failure() {
    let host = host(&limits());
    let context = |vocabulary| Context { vocabulary, ..Context::dry_run() };
    let plan = |form: Value, vocabulary| {
        let mut answers = Answers::default();
        let answer = answers.add("on-request", &record([("form", some(form))]));
        let body = format!("i32.const {answer}");
        let component = compile(&host, &component(&[("on-request", &body)], &answers.data()));
        let mut guest = component.instantiate(&context(vocabulary)).unwrap();
        policy(&mut guest).ask(&view()).map(|plan| plan.form.unwrap())
    };
    for (form, expected) in [
        (case("json-object", word(0)), AnswerForm::JsonObject),
        (case("json-schema", text("{}")), AnswerForm::JsonSchema("{}".into())),
        (case("regex", text("a text")), AnswerForm::Regex("a text".into())),
        (case("grammar", text("a text")), AnswerForm::Grammar("a text".into())),
        (
            case("choice", list([text("yes"), text("no")])),
            AnswerForm::Choice(vec!["yes".into(), "no".into()]),
        ),
    ] {
        assert_eq!(plan(form, no_vocabulary()).unwrap(), expected);
    }
    let long = "x".repeat(20_000);
    for (form, expected) in [
        (case("regex", text("a")), "`form`: is no regex"),
        (case("regex", text(&long)), "answered with more than 16384 bytes"),
    ] {
        let failure = plan(form, Arc::new(NoRegex)).unwrap_err().to_string();
        assert!(failure.contains(expected), "{failure}");
    }
}

/// A realloc that never reuses memory, so that all parts of an argument can be read.
const BUMP: &str = r#"(global $top (mut i32) (i32.const 4096))
    (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
      (local $at i32)
      (local.set $at (i32.and (i32.add (global.get $top) (i32.const 7)) (i32.const -8)))
      (global.set $top (i32.add (local.get $at) (local.get 3)))
      (local.get $at))"#;

/// Copies `words` words of the argument's field to an address.
fn copy(hook: &str, field: &str, words: u32, to: u32) -> String {
    let word = |word| {
        let (to, value) = (to + 4 * word, input(hook, field, word));
        format!("(i32.store (i32.const {to}) {value})")
    };
    (0..words).map(word).collect()
}

#[test]
fn every_kind_of_argument_reaches_the_guest_unchanged() {
    let host = host(&limits());

    // The plan has the sampling of the request, its user message as note, and its seed as budget.
    let words = |from: &str, to: &str, count| copy("on-request", from, count, offset("plan", to));
    let one = |to: &str| format!("(i32.store8 (i32.const {}) (i32.const 1))", offset("plan", to));
    let body = [
        words("sampling", "sampling", 8),
        one("reasoning-budget"),
        words("seed", "reasoning-budget.some", 1),
        one("note"),
        words("user", "note.some", 2),
        "i32.const 0".into(),
    ];
    let mut guest = dry_run(&host, &component(&[("on-request", &body.concat())], BUMP));
    let sampling =
        SamplingPatch { temperature: Some(0.5), top_k: Some(9), ..SamplingPatch::default() };
    let request = RequestView { sampling, seed: 77, ..view() };
    let note = Some(view().user);
    let expected = Plan { sampling, reasoning_budget: Some(77), note, ..Plan::default() };
    assert_eq!(policy(&mut guest).ask(&request).unwrap(), expected);

    // The first system text is replaced by the name of the profile.
    let mut answers = Answers::default();
    let one = case("replace", record([("old", text(""))]));
    let answer = answers.add("on-prompt", &list([one]));
    let element = ELEMENT + payload("prompt-edit");
    let old = element + offset("replacement", "old");
    let body = [
        format!("(i64.store (i32.const {old}) (i64.load {}))", input("on-prompt", "system", 0)),
        copy("on-prompt", "profile", 2, element + offset("replacement", "new")),
        format!("i32.const {answer}"),
    ];
    let extra = format!("{BUMP} {}", answers.data());
    let mut guest = dry_run(&host, &component(&[("on-prompt", &body.concat())], &extra));
    let view = PromptView { profile: "agent".into(), ..prompt() };
    let replaced = Replacement { message: 0, old: view.system[0].clone(), new: "agent".into() };
    assert_eq!(policy(&mut guest).ask(&view).unwrap(), [PromptEdit::Replace(replaced)]);

    // A call is repaired with the digest of the first earlier call's result, if that exists.
    let mut answers = Answers::default();
    let answer = answers.add("on-tool-call", &case("repair", text("")));
    let earlier = input("on-tool-call", "earlier", 0);
    let (answered, digest) =
        (offset("earlier-call", "answered"), offset("earlier-call", "answered.some"));
    let to = answer + payload("verdict");
    let body = format!(
        "(i64.store (i32.const {to}) (i64.load offset={digest} {earlier}))
         (i32.mul (i32.load8_u offset={answered} {earlier}) (i32.const {answer}))"
    );
    let extra = format!("{BUMP} {}", answers.data());
    let mut guest = dry_run(&host, &component(&[("on-tool-call", &body)], &extra));
    assert_eq!(policy(&mut guest).ask(&tool_call()).unwrap(), Verdict::Accept);
    let mut earlier = tool_call().earlier;
    earlier[0].answered = Some("0123456789abcdef".into());
    let verdict = policy(&mut guest).ask(&ToolCallView { earlier, ..tool_call() }).unwrap();
    assert_eq!(verdict, Verdict::Repair("0123456789abcdef".into()));

    // As many tokens are rewound as the step has.
    let mut answers = Answers::default();
    let answer = answers.add("on-step", &list([case("rewind", word(0))]));
    let (to, length) = (ELEMENT + payload("action"), input("on-step", "tokens", 1));
    let body = format!("(i32.store (i32.const {to}) {length}) i32.const {answer}");
    let mut guest = dry_run(&host, &stepper(&body, &format!("{BUMP} {}", answers.data())));
    assert_eq!(policy(&mut guest).ask(&looping()).unwrap(), [Action::Rewind(3)]);

    let calls = input("on-finish", "tool-calls", 0);
    let body = format!("(if (i32.ne {calls} (i32.const 7)) (then unreachable)) i32.const 0");
    let mut guest = dry_run(&host, &component(&[("on-finish", &body)], BUMP));
    policy(&mut guest).ask(&Summary { tool_calls: 7, ..Summary::default() }).unwrap();
    policy(&mut guest).ask(&Summary::default()).unwrap_err();
}
