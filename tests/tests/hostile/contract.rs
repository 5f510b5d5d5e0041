//! Both versions of the contract side by side, and every record of the newer one as it passes.

use std::path::Path;

use steersman_engine::policy::wasm::CONTRACT;
use steersman_engine::policy::{
    Action, Ban, Bias, LoopReport, Plan, Policy, Resample, SamplingChange, Step, Summary,
    TokenBias, ToolCallView, Verdict,
};
use steersman_tests::fixtures;
use steersman_tests::guest::{HOOKS, component, data, importing, words};

use super::corpus::{acting, stepper};
use super::{compile, host, limits, looping, prompt, run, tool_call, trial, view};

/// The default policy as it was built for contract 0.1, before there was another.
fn frozen() -> Vec<u8> {
    let path: &Path = &fixtures().join("policies/contract-0.1.wasm");
    std::fs::read(path).expect("contract-0.1.wasm")
}

#[test]
fn a_guest_of_contract_0_1_plans_and_acts_beside_one_of_0_2() {
    let host = host(&limits());
    let (old, new) = (compile(&host, &frozen()), compile(&host, &acting(6, &[0, 0], "")));
    assert_eq!((old.version(), new.version()), ("0.1.0", CONTRACT));
    assert_eq!(CONTRACT, "0.2.0");
    assert_eq!(old.hooks(), ["on-request", "on-step", "on-finish"]);
    let mut old = old.instantiate(&super::Scene::trial()).unwrap();
    let mut new = new.instantiate(&super::Scene::trial()).unwrap();
    for _ in 0..3 {
        let decisions = run(&mut old).unwrap();
        assert_eq!(decisions.plan.thinking, Some(true));
        assert_eq!(decisions.plan.think_budget, Some(8192 - 1024 - 32));
        assert!(decisions.plan.loops.is_some());
        assert_eq!(decisions.actions, [Action::CloseThinking("**Final Answer:**\n\n".into())]);
        assert_eq!((decisions.replacements, decisions.verdict), (vec![], Verdict::Accept));
        assert_eq!(run(&mut new).unwrap().actions, [Action::Stop(String::new())]);
    }
    let sure = Some(LoopReport { period: 100, repeats: 40, exact: true });
    let actions = old.on_step(&Step { loop_found: sure, ..Step::default() }).unwrap();
    assert_eq!(actions, [Action::Stop("the answer is a loop".into())]);
}

#[test]
fn a_policy_says_in_its_own_words_why_it_fails_and_needs_no_grant_for_it() {
    let host = host(&limits());
    let fails = |length: usize, words: &[u8]| {
        let body = format!("(call $failure.fail (i32.const 512) (i32.const {length})) i32.const 0");
        let bytes = importing(&["failure"], &[("on-step", &body)], &data(512, words));
        let component = compile(&host, &bytes);
        component.granted(&[]).unwrap();
        assert_eq!(component.imports(), [""; 0]);
        let mut policy = component.instantiate(&super::Scene::trial()).unwrap();
        policy.on_step(&looping()).unwrap_err().to_string()
    };
    let words = b"rule 2:\nno `when`";
    let told = r"policy `guest`: on-step: failed: rule 2:\nno `when`";
    assert_eq!(fails(words.len(), words), told);
    let long = fails(3000, &[b'x'; 3000]);
    assert_eq!(long, format!("policy `guest`: on-step: failed: {}", "x".repeat(1024)));
    assert!(fails(60_000, b"").contains("with more than"), "{}", fails(60_000, b""));
}

#[test]
fn a_component_that_exports_one_hook_alone_loads_and_the_rest_is_left_to_the_engine() {
    let host = host(&limits());
    for (hook, signature, _) in HOOKS {
        let body = if signature.contains("result") { "i32.const 0" } else { "" };
        let component = compile(&host, &component(&[(hook, body)], ""));
        assert_eq!(component.hooks(), [hook]);
        let mut policy = component.instantiate(&super::Scene::trial()).unwrap();
        let decisions = run(&mut policy).unwrap();
        assert_eq!(decisions.plan, Plan::default());
        assert_eq!((decisions.replacements, decisions.actions), (vec![], vec![]));
        assert_eq!(decisions.verdict, Verdict::Accept);
    }
}

#[test]
fn every_action_arrives_as_it_was_meant() {
    const NAMED: u32 = 256;
    let text = data(NAMED, b"so it is");
    let sampling = SamplingChange {
        temperature: Some(0.5),
        top_p: Some(0.25),
        top_k: Some(40),
        min_p: Some(0.125),
    };
    let option = |value: f32| [1, value.to_bits()];
    let drawn = [option(0.5), option(0.25), [1, 40], option(0.125)].concat();
    let tokens = data(NAMED, &words(&[7, 9]));
    let biases = data(NAMED, &words(&[7, 1.5f32.to_bits(), 9, (-100f32).to_bits()]));
    let cases = [
        (acting(0, &[NAMED, 8], &text), Action::Inject("so it is".into())),
        (acting(1, &[NAMED, 8], &text), Action::CloseThinking("so it is".into())),
        (acting(2, &[12], ""), Action::Rewind(12)),
        (acting(3, &[NAMED, 2, 5], &tokens), Action::Ban(Ban { tokens: vec![7, 9], steps: 5 })),
        (
            acting(4, &[NAMED, 2, 6], &biases),
            Action::Bias(Bias {
                tokens: vec![
                    TokenBias { token: 7, bias: 1.5 },
                    TokenBias { token: 9, bias: -100.0 },
                ],
                steps: 6,
            }),
        ),
        (
            acting(5, &[&drawn[..], &[8]].concat(), ""),
            Action::Sampling(Resample { sampling, steps: 8 }),
        ),
        (acting(6, &[NAMED, 8], &text), Action::Stop("so it is".into())),
    ];
    let host = host(&limits());
    for (bytes, action) in cases {
        assert_eq!(trial(&host, &bytes).on_step(&looping()).unwrap(), [action]);
    }
}

/// Memory that is never given back, so that what the host passes stays whole.
const BUMP: &str = r#"(global $top (mut i32) (i32.const 4096))
    (func $realloc (export "realloc") (param i32 i32 i32 i32) (result i32)
      (local $at i32)
      (local.set $at (i32.and (i32.add (global.get $top) (i32.const 7)) (i32.const -8)))
      (global.set $top (i32.add (local.get $at) (local.get 3)))
      (local.get $at))"#;

#[test]
fn a_guest_sees_what_the_host_says() {
    let host = host(&limits());
    let copy = |to: u32, from: &str, bytes: u32| {
        format!("(memory.copy (i32.const {to}) {from} (i32.const {bytes}))")
    };
    let at = |offset: u32| format!("(i32.add (local.get 0) (i32.const {offset}))");

    // The sampling and the user's words come back, and the seed as the budget.
    let body = [
        copy(20, &at(92), 32),
        "(i32.store (i32.const 4) (i32.const 1))".into(),
        copy(8, &at(128), 4),
        "(i32.store (i32.const 80) (i32.const 1))".into(),
        copy(84, &at(56), 8),
        "i32.const 0".into(),
    ];
    let mut policy = trial(&host, &component(&[("on-request", &body.concat())], BUMP));
    let sampling =
        SamplingChange { temperature: Some(0.5), top_k: Some(9), ..SamplingChange::default() };
    let request = super::RequestView { sampling, seed: 77, ..view() };
    let expected =
        Plan { sampling, think_budget: Some(77), note: Some(view().user), ..Plan::default() };
    assert_eq!(policy.on_request(&request).unwrap(), expected);

    // The first system text is replaced by the profile's name.
    let body = [
        "(i32.store (i32.const 0) (i32.const 16)) (i32.store (i32.const 4) (i32.const 1))".into(),
        copy(20, "(local.get 4)", 8),
        "(i32.store (i32.const 28) (local.get 0)) (i32.store (i32.const 32) (local.get 1))".into(),
        "i32.const 0".into(),
    ];
    let mut policy = trial(&host, &component(&[("on-prompt", &body.concat())], BUMP));
    let view = super::PromptView { profile: "agent".into(), ..prompt() };
    let replacements = policy.on_prompt(&view).unwrap();
    let replaced = super::Replacement {
        message: 0,
        old: "Be brief. Today is Monday.".into(),
        new: "agent".into(),
    };
    assert_eq!(replacements, [replaced]);

    // A call is repaired with the digest of what its first predecessor got.
    let body = "(i32.store (i32.const 0) (i32.load offset=16 (local.get 7)))
        (i64.store (i32.const 4) (i64.load offset=20 (local.get 7))) i32.const 0";
    let mut policy = trial(&host, &component(&[("on-tool-call", body)], BUMP));
    assert_eq!(policy.on_tool_call(&tool_call()).unwrap(), Verdict::Accept);
    let mut earlier = tool_call().earlier;
    earlier[0].answered = Some("0123456789abcdef".into());
    let verdict = policy.on_tool_call(&ToolCallView { earlier, ..tool_call() }).unwrap();
    assert_eq!(verdict, Verdict::Repair("0123456789abcdef".into()));

    // A step ends with as many tokens rewound as it saw.
    let body = "(i32.store (i32.const 0) (i32.const 16)) (i32.store (i32.const 4) (i32.const 1))
        (i32.store (i32.const 16) (i32.const 2)) (i32.store (i32.const 20) (local.get 6))
        i32.const 0";
    let mut policy = trial(&host, &stepper(body, BUMP));
    assert_eq!(policy.on_step(&looping()).unwrap(), [Action::Rewind(3)]);

    let body = "(if (i32.ne (local.get 6) (i32.const 7)) (then unreachable))";
    let mut policy = trial(&host, &component(&[("on-finish", body)], BUMP));
    policy.on_finish(&Summary { tool_calls: 7, ..Summary::default() }).unwrap();
    policy.on_finish(&Summary::default()).unwrap_err();
}
