//! Parameters: what a policy makes of them once, for all requests, and when a change of them is rejected.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steersman_policy_host::{
    Answer, Call, Component, Context, Cost, Hook, HookInput, Host, OnFailure, Param, ParamsView,
    Policies, Policy, PolicyConfig, ProfilePolicies, PromptView, RequestView, no_vocabulary,
    shipped,
};
use steersman_test_support::guest::{
    Answers, component, input, list, record, replace, text, tuple,
};

use crate::storage;

const PATIENCE: Duration = Duration::from_secs(60);

fn limits() -> PolicyConfig {
    PolicyConfig { deadline_ms: 10_000, ..PolicyConfig::default() }
}

fn compile(name: &str, bytes: &[u8]) -> Arc<Component> {
    let host = Host::new(&limits(), &storage()).unwrap();
    Arc::new(Component::load(&host, name, bytes).unwrap_or_else(|error| panic!("{error}")))
}

fn rules() -> Arc<Component> {
    compile("rules", shipped("rules").unwrap().0)
}

/// The answer to a call, and its cost.
fn ask(policy: &mut dyn Policy, call: &Call<'_>) -> (Answer, Cost) {
    let answer = policy.call(call).unwrap_or_else(|failure| panic!("{failure}"));
    (answer, policy.take_report().cost)
}

fn params(rules: &str) -> Vec<(String, String)> {
    vec![("rules".to_owned(), rules.to_owned())]
}

/// Rules for 400 topics, of all hooks.
fn many_rules() -> String {
    let rule = |i: usize| match i % 4 {
        0 => format!("when = {{ user_contains = \"topic {i}\" }}\ndo = {{ note = \"topic {i}\" }}"),
        1 => format!("when = {{ system_contains = \"x{i}\" }}\ndo = {{ temperature = 0.5 }}"),
        2 => format!("when = {{ text_contains = \"word {i}\" }}\ndo = {{ stop = \"word {i}\" }}"),
        _ => format!("when = {{ tool_called = \"t{i}\" }}\ndo = {{ repair = \"not {i}\" }}"),
    };
    (0..400).map(|i| format!("[[rule]]\n{}\n", rule(i))).collect()
}

/// 400 rules took all the fuel of each request, since each parsed them: they were silently off. Unpacked all at
/// once they took 11 %.
#[test]
fn four_hundred_rules_cost_a_twentieth_of_the_fuel_of_a_call_at_most() {
    let text = many_rules();
    assert!(text.len() > 20_000);
    let component = rules();
    let mut instance = component.instantiate(&Context::dry_run()).unwrap();
    let fuel = PolicyConfig::default().fuel;
    // Both hooks of a request together. `on-prompt` unpacks the rules for system text only, `on-request` all others.
    let most = fuel / 20;
    let prompt = PromptView {
        params: params(&text),
        system: vec!["You are brief.".into()],
        ..PromptView::default()
    };
    let (_, of_prompt) = ask(&mut instance, &prompt.call());
    let user = "Tell me about topic 8.".to_owned();
    let request = RequestView { params: params(&text), user, ..RequestView::default() };
    let (answer, cost) = ask(&mut instance, &request.call());
    let all = of_prompt.fuel + cost.fuel;
    assert!(of_prompt.fuel > 0 && all <= most, "{} + {} of {most}", of_prompt.fuel, cost.fuel);
    let Answer::Request(plan) = answer else { panic!("{answer:?}") };
    assert_eq!(plan.note.as_deref(), Some("topic 8"));
}

/// 256 KiB is what a parameter may have; a comment of that length used up the fuel, too.
#[test]
fn a_long_comment_costs_requests_nothing() {
    let rule = "[[rule]]\ndo = { note = \"found\" }\n";
    let text = format!("# {}\n{rule}", "long ".repeat((256 << 10) / 5 - 20));
    let component = rules();
    let fuel = |text: &str| {
        let mut instance = component.instantiate(&Context::dry_run()).unwrap();
        let request = RequestView { params: params(text), ..RequestView::default() };
        let (answer, cost) = ask(&mut instance, &request.call());
        let Answer::Request(plan) = answer else { panic!("{answer:?}") };
        assert_eq!(plan.note.as_deref(), Some("found"));
        cost.fuel
    };
    assert_eq!(fuel(&text), fuel(rule));
}

#[test]
fn parameters_are_prepared_once_and_mistakes_are_told_with_their_line() {
    let component = rules();
    let params = params("[[rule]]\ndo = { note = \"n\" }\n");
    let first = component.prepare("default", &params).unwrap();
    assert!(Arc::ptr_eq(&first, &component.prepare("default", &params).unwrap()));
    let names: Vec<_> = first.replaced.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        (&first.problems[..], &names[..]),
        (&[][..], &["on-text", "on-tool-call", "rules"][..])
    );
    let wrong = self::params("[[rule]]\nwhen = { usr_over = 5 }\ndo = { note = \"n\" }");
    let wrong = component.prepare("default", &wrong).unwrap();
    assert!(wrong.replaced.iter().all(|(name, text)| name != "rules" && text == "off"));
    let problem = "parameter `rules`: rule 1, line 2: unknown key `when.usr_over`";
    assert!(wrong.problems[0].starts_with(problem), "{:?}", wrong.problems);
    // A policy without the hook prepares nothing.
    let without = compile("without", &component_without());
    assert_eq!(*without.prepare("default", &params).unwrap(), Default::default());
}

fn component_without() -> Vec<u8> {
    component(&[("on-finish", "i32.const 0")], "")
}

#[test]
fn what_on_params_does_wrong_is_a_failure_of_the_policy() {
    let view = ParamsView { params: params("x"), ..ParamsView::default() };
    let answering = |name: &str, new: &str| {
        let mut answers = Answers::default();
        let replaced = list([tuple([text(name), text(new)])]);
        let at = answers.add("on-params", &record([("replaced", replaced)]));
        component(&[("on-params", &format!("i32.const {at}"))], &answers.data())
    };
    let cases = [
        (answering("other", "x"), "replaces `other`, which is not a parameter"),
        (answering("on-text", "of"), "replaces `on-text`, which is not a parameter"),
        (answering("on-step", "off"), "replaces `on-step`, which is not a parameter"),
        (
            component(&[("on-params", "(loop $l br $l) unreachable")], ""),
            "used up its fuel of 1000000000",
        ),
        (component(&[("on-params", "unreachable")], ""), "unreachable"),
    ];
    for (bytes, words) in cases {
        let component = compile("guest", &bytes);
        let failure = component.prepare(&view.profile, &view.params).unwrap_err().to_string();
        assert!(failure.contains("on-params") && failure.contains(words), "{failure}");
        // So do requests with these parameters.
        let mut instance = component.instantiate(&Context::dry_run()).unwrap();
        let request = RequestView { params: view.params.clone(), ..RequestView::default() };
        instance.call(&request.call()).unwrap_err();
    }
    let fine = compile("guest", &answering("rules", "new"));
    let prepared = fine.prepare(&view.profile, &view.params).unwrap();
    assert_eq!(prepared.replaced, [("rules".to_owned(), "new".to_owned())]);
    let mut instance = fine.instantiate(&Context::dry_run()).unwrap();
    let (answer, _) = ask(&mut instance, &view.call());
    assert_eq!(answer, Answer::Params((*prepared).clone()));
    assert_eq!(view.call().hook(), Hook::OnParams);
}

/// `rules` exports `on-text` and `on-tool-call`. Without a rule for them, answers and tool calls of its requests wait
/// for nothing, and clients get the probabilities that they ask for.
#[test]
fn rules_hold_answers_and_tool_calls_only_if_one_of_them_is_about_these() {
    let waits = |rules: &str| {
        let profile = ProfilePolicies {
            policies: vec!["rules".into()],
            params: BTreeMap::from([("rules.rules".into(), rules.into())]),
            ..ProfilePolicies::default()
        };
        let profiles = BTreeMap::from([("default".to_owned(), profile)]);
        let policies = Policies::load(&limits(), &profiles, &storage()).unwrap();
        let session = policies.start("default", "r", &no_vocabulary()).unwrap();
        assert_eq!(session.shapes_text, session.sees_text);
        (session.shapes_text, session.judges_calls)
    };
    assert_eq!(waits("[[rule]]\ndo = { note = 'n' }"), (false, false));
    assert_eq!(waits("[[rule]]\ndo = { replace = { a = 'b' } }"), (true, false));
    let stop = "[[rule]]\nwhen = { calls_over = 3 }\ndo = { stop = 'x' }";
    assert_eq!(waits(stop), (false, true));
}

/// A text in `ban` needs the tokenizer, which a profile grants to other policies only.
#[test]
fn a_shipped_policy_asks_the_tokenizer_without_a_grant_and_a_changed_one_does_not() {
    let own = rules();
    assert_eq!(own.needed_grants(), []);
    own.check_grants(&[]).unwrap();
    let names = own.import_names();
    assert!(names.len() == 1 && names[0].contains("/tokenizer@"), "{names:?}");
    let section = [0, 2, 1, b'x'];
    let changed = compile("rules", &[shipped("rules").unwrap().0, &section].concat());
    assert_eq!(changed.needed_grants(), [steersman_policy_host::Grant::Tokenizer]);
    changed.check_grants(&[]).unwrap_err();
}

/// A parameter file took effect untried: rules with a mistake, or too many of them, were off from then on.
#[test]
fn a_parameter_that_does_not_work_keeps_its_text_and_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.toml");
    let noting = |note: &str| format!("[[rule]]\ndo = {{ note = \"{note}\" }}\n");
    fs::write(&file, noting("one")).unwrap();
    let rules = Param::File { file: file.clone() };
    let profile = ProfilePolicies {
        policies: vec!["rules".into()],
        params: BTreeMap::from([("rules".into(), rules)]),
        ..ProfilePolicies::default()
    };
    let profiles = BTreeMap::from([("default".to_owned(), profile)]);
    let policies = Policies::load(&limits(), &profiles, &storage()).unwrap();
    let policies = Arc::new(policies);
    policies.watch();
    let note = || {
        let mut session = policies.start("default", "r", &no_vocabulary()).unwrap();
        let params = session.params.to_vec();
        session.ask(&RequestView { params, ..RequestView::default() }).unwrap().note.unwrap()
    };
    let problem = || {
        let problem = policies.report().params[0].problem.clone();
        problem.map(|problem| problem.message).unwrap_or_default()
    };
    let until = |what: &str, happened: &dyn Fn() -> bool| {
        let started = Instant::now();
        while !happened() {
            assert!(started.elapsed() < PATIENCE, "{what}: {} {}", note(), problem());
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    assert_eq!(note(), "one");
    replace(&file, b"[[rule]]\nwhen = { usr = 1 }\ndo = { note = \"wrong\" }\n");
    until("a mistake is reported", &|| {
        problem().contains("rule 1, line 2: unknown key `when.usr`")
    });
    assert_eq!(note(), "one");
    replace(&file, noting("two").as_bytes());
    until("a correct text is applied", &|| note() == "two" && problem().is_empty());
    replace(&file, (many_rules() + &noting("many")).as_bytes());
    until("many rules are applied", &|| note() == "many" && problem().is_empty());
}

/// Rules with a mistake were off from the start on, and neither a profile that fails closed nor a report said so.
#[test]
fn a_mistake_at_the_start_is_reported_and_a_profile_that_fails_closed_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.toml");
    fs::write(&file, "[[rule]]\nwhen = { usr = 1 }\ndo = { note = \"n\" }\n").unwrap();
    let load = |on_failure: OnFailure| {
        let profile = ProfilePolicies {
            policies: vec!["rules".into()],
            params: BTreeMap::from([("rules".into(), Param::File { file: file.clone() })]),
            on_failure,
            ..ProfilePolicies::default()
        };
        let profiles = BTreeMap::from([("default".to_owned(), profile)]);
        Policies::load(&limits(), &profiles, &storage())
    };
    let mistake = "rule 1, line 2: unknown key `when.usr`";
    let error = load(OnFailure::Closed).err().expect("it must not start").to_string();
    assert!(error.starts_with("profiles.default.params.rules: policy `rules`"), "{error}");
    assert!(error.contains(mistake), "{error}");
    let policies = Arc::new(load(OnFailure::Open).unwrap());
    policies.watch();
    let problem = || policies.report().params[0].problem.clone().map(|problem| problem.message);
    assert!(problem().is_some_and(|problem| problem.contains(mistake)), "{:?}", problem());
    replace(&file, b"[[rule]]\ndo = { note = \"n\" }\n");
    let started = Instant::now();
    while let Some(problem) = problem() {
        assert!(started.elapsed() < PATIENCE, "{problem}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A policy that traps in `on-request` if its first parameter is longer than 4 bytes, and only then.
fn fussy() -> Vec<u8> {
    let mut answers = Answers::default();
    let plan = answers.add("on-request", &record([]));
    let params = input("on-request", "params", 0);
    let body = format!(
        "(if (i32.gt_u (i32.load offset=12 {params}) (i32.const 4)) (then unreachable)) i32.const {plan}"
    );
    let realloc = r#"(global $top (mut i32) (i32.const 4096))
        (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
          (local $at i32)
          (local.set $at (i32.and (i32.add (global.get $top) (i32.const 7)) (i32.const -8)))
          (global.set $top (i32.add (local.get $at) (local.get 3)))
          (local.get $at))"#;
    // Above what the host writes.
    component(&[("on-request", &body)], &format!("{realloc} {}", answers.data()))
}

#[test]
fn a_parameter_with_which_the_golden_file_fails_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("word");
    fs::write(&file, "fine").unwrap();
    let bytes = fussy();
    fs::write(folder.path().join("mine.wasm"), bytes).unwrap();
    let golden = "{\"hook\":\"on-request\",\"input\":{\"params\":[[\"word\",\"good\"]]}}\n";
    fs::write(folder.path().join("mine.jsonl"), golden).unwrap();
    let profile = ProfilePolicies {
        policies: vec!["mine".into()],
        params: BTreeMap::from([("word".into(), Param::File { file: file.clone() })]),
        ..ProfilePolicies::default()
    };
    let config = PolicyConfig { folder: folder.path().into(), ..limits() };
    let profiles = BTreeMap::from([("default".to_owned(), profile)]);
    let policies = Arc::new(Policies::load(&config, &profiles, &storage()).unwrap());
    policies.watch();
    let word = || {
        let session = policies.start("default", "r", &no_vocabulary()).unwrap();
        session.params[0].1.clone()
    };
    let problem = || policies.report().params[0].problem.clone().map(|problem| problem.message);
    replace(&file, b"too long");
    let started = Instant::now();
    while problem().is_none() {
        assert!(started.elapsed() < PATIENCE, "no problem is reported");
        std::thread::sleep(Duration::from_millis(10));
    }
    let problem = problem().unwrap();
    assert!(problem.contains("tried with the golden file: golden line 1"), "{problem}");
    assert_eq!(word(), "fine");
}

/// A version that passed its golden file failed in every request of a profile whose parameter the file does not
/// have.
#[test]
fn a_version_that_fails_with_the_parameters_of_its_profile_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("mine.wasm"), component_without()).unwrap();
    let golden = "{\"hook\":\"on-request\",\"input\":{\"params\":[[\"word\",\"good\"]]}}\n";
    fs::write(folder.path().join("mine.jsonl"), golden).unwrap();
    let config = PolicyConfig { folder: folder.path().into(), ..limits() };
    let load = |word: &str| {
        let profile = ProfilePolicies {
            policies: vec!["mine".into()],
            params: BTreeMap::from([("word".into(), word.into())]),
            ..ProfilePolicies::default()
        };
        let profiles = BTreeMap::from([("default".to_owned(), profile)]);
        Policies::load(&config, &profiles, &storage())
    };
    // Known to no policy without `on-request`.
    assert!(load("fine").err().unwrap().to_string().contains("`mine` has no such parameter"));
    let mut answers = Answers::default();
    let plan = format!("i32.const {}", answers.add("on-request", &record([])));
    let patient = component(&[("on-request", &plan)], &answers.data());
    fs::write(folder.path().join("mine.wasm"), &patient).unwrap();
    load("fine").unwrap().upload("mine", &fussy()).unwrap();
    fs::write(folder.path().join("mine.wasm"), &patient).unwrap();
    let error = load("too long").unwrap().upload("mine", &fussy()).unwrap_err().to_string();
    assert!(error.contains("tried with the parameters of its profile: golden line 1"), "{error}");
    assert!(error.ends_with("(profile `default`)"), "{error}");
}
