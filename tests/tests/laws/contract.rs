//! What policies see of requests and plan for them, through the engine, with replays equal bit for bit.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::UNIX_EPOCH;

use steersman_engine::config::Profile;
use steersman_engine::policy::{
    Answer, Call, Caller, Grant, Param, Phase, Record, RequestView, shipped,
};
use steersman_engine::request::{FinishReason, Message, Request, ToolChoice};
use steersman_engine::{Error, RequestError};
use steersman_test_support::guest::{
    Answers, ELEMENT, case, component, data, importing, list, payload, record, text, word,
};
use steersman_tests::steered::{engine, replays, traced};
use steersman_tests::{Reply, ask, ask_weather, message, profile};

/// A profile with the policy `rules` and these rules, traced with texts.
fn ruled(rules: &str) -> Profile {
    let mut profile = profile("rules");
    profile.policy.params = BTreeMap::from([("rules".into(), Param::from(rules))]);
    profile.policy.trace_text = true;
    profile
}

/// What the policy saw of the request.
fn request_view(records: &[Record]) -> &RequestView {
    let views = records.iter().filter_map(|record| match &record.call {
        Call::Request(view) => Some(view.as_ref()),
        _ => None,
    });
    views.into_iter().next().expect("a plan was asked for")
}

fn rules_replay(records: &[Record]) {
    replays(shipped("rules").unwrap().0, "rules", records);
}

#[test]
fn a_policy_refuses_a_request_before_anything_is_computed_and_has_not_failed() {
    let rules = "[[rule]]\nwhen = { user_contains = \"weather\" }\n\
                 do = { refuse = \"No weather here.\", status = 429 }\n";
    let engine = engine([("house", ruled(rules))]);
    for _ in 0..10 {
        let (reply, records) = traced(&engine, "house", ask("What is the weather?"));
        let Err(Error::Request(RequestError::Refused { status: 429, message, .. })) = &reply.end
        else {
            panic!("{reply:?}")
        };
        assert_eq!(message, "No weather here.");
        assert_eq!((&*reply.answer, &*reply.fingerprint), ("", ""));
        let Call::Finish(summary) = &records.last().unwrap().call else { panic!("{records:?}") };
        assert_eq!((&*summary.reason, summary.answer_tokens), ("refused", 0));
        assert!(summary.prompt_tokens > 0);
        rules_replay(&records);
    }
    let report = engine.policies().report();
    let rules = report.policies.iter().find(|policy| policy.name == "rules").unwrap();
    assert_eq!(rules.profiles[0].health.failures, 0);
    let (reply, _) = traced(&engine, "house", ask("What is the capital of Italy?"));
    assert_eq!(reply.answer, "The capital of Italy is Rome.");
}

#[test]
fn a_policy_limits_the_reply_and_ends_it_at_stop_strings() {
    let profiles = [
        ("short", ruled("[[rule]]\ndo = { reasoning = false, max_tokens = 3 }\n")),
        ("stopped", ruled("[[rule]]\ndo = { reasoning = false, stop_at = [\" of\", \"Rome\"] }\n")),
    ];
    let engine = engine(profiles);
    let question = "What is the capital of Italy?";
    for (of_client, limit) in [(None, 3), (Some(50), 3), (Some(2), 2)] {
        let request = Request { max_tokens: of_client, ..ask(question) };
        let (reply, records) = traced(&engine, "short", request);
        let finished = reply.finished();
        assert_eq!(finished.reason, FinishReason::Length);
        assert_eq!(finished.usage.reply_tokens(), limit, "{of_client:?}");
        let noted = finished.notes.iter().any(|note| note == "max_tokens 3 by a policy");
        assert_eq!(noted, limit == 3, "{:?}", finished.notes);
        rules_replay(&records);
    }
    let (reply, records) = traced(&engine, "stopped", ask(question));
    assert_eq!(reply.answer, "The capital");
    assert_eq!(reply.finished().reason, FinishReason::StopString(" of".into()));
    rules_replay(&records);
    let of_client = Request { stop: vec!["capital".into()], ..ask(question) };
    assert_eq!(traced(&engine, "stopped", of_client).0.answer, "The ");
}

/// The wishes of an author: no such word in answers, and a hint at a number of reasoning tokens.
#[test]
fn rules_ban_and_replace_words_and_inject_a_hint_at_its_token() {
    let plain = "[[rule]]\ndo = { reasoning = false }\n";
    let replaces = "[[rule]]\ndo = { replace_words = { rome = \"Paris\" }, replace = { \" of \" = \" in \" } }\n";
    let hint = "[[rule]]\nwhen = { reasoning_tokens = 5 }\nunless = { text_contains = \"qwertz\" }\n\
                do = { inject = \" because\" }\n";
    let profiles = [
        ("replaced", ruled(&format!("{plain}{replaces}"))),
        ("banned", ruled(&format!("{plain}[[rule]]\ndo = {{ ban = \"Rome\" }}\n"))),
        ("hint", ruled(hint)),
    ];
    let engine = engine(profiles);
    let question = "What is the capital of Italy?";
    let (reply, records) = traced(&engine, "replaced", ask(question));
    assert_eq!(reply.answer, "The capital in Italy is Paris.");
    rules_replay(&records);
    let (reply, records) = traced(&engine, "banned", ask(question));
    assert!(!reply.answer.contains("Rome"), "{reply:?}");
    assert!(!reply.finished().notes.iter().any(|note| note.contains("not one")), "{reply:?}");
    rules_replay(&records);
    let request = Request { reasoning: Some(true), max_tokens: Some(60), ..ask(question) };
    let (reply, records) = traced(&engine, "hint", request);
    assert!(reply.reasoning.contains(" because"), "{reply:?}");
    let hints: Vec<_> = records
        .iter()
        .filter_map(|record| match (&record.call, &record.answer) {
            (Call::Step(step), Some(Answer::Step(actions))) if !actions.is_empty() => {
                Some(step.reasoning_tokens)
            }
            _ => None,
        })
        .collect();
    assert_eq!(hints, [5]);
    rules_replay(&records);
}

#[test]
fn a_policy_offers_fewer_tools_but_leaves_one_that_the_client_demands() {
    let profiles = [
        ("all", ruled("[[rule]]\ndo = { note = \"all\" }\n")),
        ("none", ruled("[[rule]]\ndo = { offer_tools = [] }\n")),
        ("other", ruled("[[rule]]\ndo = { offer_tools = \"other\" }\n")),
    ];
    let engine = engine(profiles);
    let (with, _) = traced(&engine, "all", ask_weather());
    assert_eq!(with.tool_calls.len(), 1, "{with:?}");
    let none = Request { tools: Vec::new(), ..ask_weather() };
    let (bare, _) = traced(&engine, "all", none);
    let (without, records) = traced(&engine, "none", ask_weather());
    // As if the client had sent none: the model does not read them.
    assert_eq!(without.answer, bare.answer);
    let prompt_tokens = |reply: &Reply| reply.finished().usage.prompt_tokens;
    assert_eq!(prompt_tokens(&without), prompt_tokens(&bare));
    assert!(prompt_tokens(&without) < prompt_tokens(&with) && without.tool_calls.is_empty());
    let view = request_view(&records);
    assert_eq!(
        (&view.tools[..], &view.tool_descriptions[..]),
        (&["get_weather".to_string()][..], &["get weather".to_string()][..])
    );
    rules_replay(&records);
    let demand = ToolChoice { is_required: true, ..ToolChoice::default() };
    let (demanded, _) = traced(&engine, "other", Request { tool_choice: demand, ..ask_weather() });
    assert_eq!(demanded.tool_calls.len(), 1, "{demanded:?}");
    let note = "left out no tools, as a policy planned: the client demands a tool call, and no tool would \
                be left for it";
    assert!(demanded.finished().notes.iter().any(|n| n == note), "{demanded:?}");
}

#[test]
fn a_policy_sees_who_asks_when_and_the_conversation() {
    let rules = "[[rule]]\nwhen = { caller_user = \"fedcba9876543210\", caller_key = \"0123456789abcdef\" }\n\
                 do = { note = \"known\" }\n";
    let engine = engine([("seen", ruled(rules))]);
    let caller = Caller {
        key: "0123456789abcdef".into(),
        user: "fedcba9876543210".into(),
        metadata: vec![("team".into(), "red".into())],
        headers: vec![("x-team".into(), "blue".into())],
    };
    let long = "ä".repeat(2000);
    let result = Message {
        role: "tool".into(),
        content: "sunny".into(),
        tool_call_id: Some("c".into()),
        ..Message::default()
    };
    let mut conversation = vec![message("user", "Hello"); 70];
    conversation.extend([message("assistant", &long), result, message("user", "Thanks!")]);
    let request =
        Request { messages: conversation, caller: caller.clone(), max_tokens: Some(3), ..ask("") };
    let before = UNIX_EPOCH.elapsed().unwrap().as_secs();
    let (reply, records) = traced(&engine, "seen", request);
    assert!(reply.finished().notes.contains(&"known".to_string()), "{reply:?}");
    let view = request_view(&records);
    let after = UNIX_EPOCH.elapsed().unwrap().as_secs();
    assert!((before..=after).contains(&view.time), "{}", view.time);
    assert_eq!((&view.caller, view.messages, view.conversation.len()), (&caller, 73, 64));
    let [answer, result, last] = &view.conversation[61..] else { panic!() };
    assert_eq!((&*answer.role, answer.bytes, &*answer.text), ("assistant", 4000, &long[..2048]));
    assert_eq!((&*result.role, result.bytes, &*result.text), ("tool", 5, ""));
    // printf sunny | sha256sum
    assert_eq!(result.digest.as_deref(), Some(SUNNY));
    assert_eq!((&*last.text, &last.digest), ("Thanks!", &None));
    rules_replay(&records);
    // Somebody else is not known.
    let other = Request { caller: Caller::default(), max_tokens: Some(3), ..ask("Hello") };
    assert!(!traced(&engine, "seen", other).0.finished().notes.contains(&"known".to_string()));
}

const SUNNY: &str = "c2333a7e3a607935";

/// A guest with this plan, whose steps do nothing.
fn watching(plan: &[(&'static str, u32)]) -> Vec<u8> {
    let mut answers = Answers::default();
    let plan = record(plan.iter().map(|&(field, value)| (field, word(value))));
    let plan = format!("i32.const {}", answers.add("on-request", &plan));
    let nothing = format!("i32.const {}", answers.add("on-step", &list([])));
    component(&[("on-request", &plan), ("on-step", &nothing)], &answers.data())
}

/// Index, phase and text of a step, and whether the phase has changed or the text has a line break.
type Seen = (u32, Phase, String, bool, bool);

/// The reply to a request and its steps under a guest with this plan.
fn steps(folder: &Path, plan: &[(&'static str, u32)]) -> (String, Vec<Seen>) {
    let name = plan.iter().map(|(field, _)| *field).collect::<Vec<_>>().join("-");
    let guest = watching(plan);
    let file = folder.join(format!("{name}.wasm"));
    std::fs::write(&file, &guest).unwrap();
    let mut profile = profile(file.display().to_string());
    profile.policy.trace_text = true;
    let engine = engine([("watched", profile)]);
    // The model reasons, and answers with a block of code.
    let question = "Write a Python function that sorts a list.";
    let request = Request { reasoning: Some(true), max_tokens: Some(120), ..ask(question) };
    let (reply, records) = traced(&engine, "watched", request);
    replays(&guest, &name, &records);
    let step = |record: &Record| {
        let Call::Step(step) = &record.call else { return None };
        assert_eq!(record.answer, Some(Answer::Step(Vec::new())));
        (!step.budget_reached).then(|| {
            let text = step.text.clone();
            (step.index, step.phase, text, step.phase_changed, step.newline)
        })
    };
    (reply.reasoning + "|" + &reply.answer, records.iter().filter_map(step).collect())
}

/// Beside a call for each token, those of a plan that asks for events are the ones that have them.
#[test]
fn on_step_is_called_for_the_events_that_the_plan_names_and_for_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let (reply, all) = steps(folder.path(), &[("every", 1)]);
    assert!(all.iter().all(|(_, _, _, phase, newline)| !phase && !newline));
    let newlines: Vec<u32> =
        all.iter().filter(|step| step.2.contains('\n')).map(|step| step.0).collect();
    assert!(newlines.len() > 1, "{all:?}");
    let changes = all.windows(2).filter(|pair| pair[0].1 != pair[1].1);
    let changes: Vec<u32> = changes.map(|pair| pair[1].0).collect();
    assert!(!changes.is_empty(), "{all:?}");
    let indices = |steps: &[Seen]| steps.iter().map(|step| step.0).collect::<Vec<_>>();

    let (same, on_newline) = steps(folder.path(), &[("on-newline", 1)]);
    assert_eq!((same, indices(&on_newline)), (reply.clone(), newlines.clone()));
    assert!(on_newline.iter().all(|(_, _, _, phase, newline)| !phase && *newline));
    let (same, on_phase) = steps(folder.path(), &[("on-phase", 1)]);
    assert_eq!((same, indices(&on_phase)), (reply.clone(), changes.clone()));
    assert!(on_phase.iter().all(|(_, _, _, phase, newline)| *phase && !newline));
    let (same, both) = steps(folder.path(), &[("on-phase", 1), ("on-newline", 1)]);
    let mut events = [newlines, changes].concat();
    events.sort_unstable();
    events.dedup();
    assert_eq!((same, indices(&both)), (reply, events));
}

/// A guest that counts under two keys, lets one of them expire later, and ends the reply with the key that is listed
/// after the other.
fn listing() -> Vec<u8> {
    let mut answers = Answers::default();
    let stop = answers.add("on-step", &list([case("stop", text(""))]));
    let reason = ELEMENT + payload("action");
    let plan = format!("i32.const {}", answers.add("on-request", &record([("every", word(1))])));
    let step = format!(
        "(call $kv.add (i32.const 512) (i32.const 3) (i64.const 1) (i32.const 64))
         (call $kv.add (i32.const 516) (i32.const 3) (i64.const 1) (i32.const 64))
         (drop (call $kv.expire (i32.const 512) (i32.const 3) (i32.const 60)))
         (call $kv.list (i32.const 512) (i32.const 2) (i32.const 512) (i32.const 3) (i32.const 8) (i32.const 64))
         (i64.store (i32.const {reason}) (i64.load (i32.load (i32.const 64))))
         i32.const {stop}"
    );
    // Keys and their list come at the same time, so each gets memory of its own.
    let allocate = "(global $next (mut i32) (i32.const 32768))
         (func (export \"cabi_realloc\") (param i32 i32 i32 i32) (result i32)
             (global.get $next)
             (global.set $next (i32.and
                 (i32.add (i32.add (global.get $next) (local.get 3)) (i32.const 7))
                 (i32.const -8))))";
    let extra = format!("{allocate} {} {}", data(512, b"n/a n/b"), answers.data());
    importing(&["kv"], &[("on-request", &plan), ("on-step", &step)], &extra)
}

#[test]
fn a_policy_lists_the_keys_that_it_has_stored() {
    let folder = tempfile::tempdir().unwrap();
    let (guest, file) = (listing(), folder.path().join("listing.wasm"));
    std::fs::write(&file, &guest).unwrap();
    let mut storing = profile(file.display().to_string());
    storing.policy.grants = vec![Grant::Kv];
    storing.policy.trace_text = true;
    let engine = engine([("storing", storing)]);
    for _ in 0..2 {
        let (reply, records) = traced(&engine, "storing", ask("Hello"));
        assert_eq!(reply.finished().reason, FinishReason::Policy("n/b".into()));
        replays(&guest, "listing", &records);
    }
}

#[test]
fn a_budget_is_used_up_by_replies_and_refuses_only_its_user() {
    let mut limited = profile("budget");
    limited.policy.grants = vec![Grant::Kv];
    limited.policy.trace_text = true;
    limited.policy.params = BTreeMap::from([("tokens_per_day".into(), Param::from("120"))]);
    let engine = engine([("limited", limited)]);
    let of = |user: &str| Request {
        caller: Caller { user: user.into(), ..Caller::default() },
        reasoning: Some(false),
        ..ask("What is the capital of Italy?")
    };
    let budget = shipped("budget").unwrap().0;
    let mut used = 0;
    let (mut replies, mut prompt) = (0, 0);
    let refusal = loop {
        let (reply, records) = traced(&engine, "limited", of("fedcba9876543210"));
        replays(budget, "budget", &records);
        match reply.end {
            Ok(finished) => {
                let usage = finished.usage;
                used += usage.prompt_tokens + usage.reply_tokens();
                assert!(used <= 120, "{used} tokens of 120");
                prompt = usage.prompt_tokens;
                replies += 1;
            }
            Err(error) => break error,
        }
    };
    assert!(used + prompt >= 120 && replies > 1, "{used} tokens in {replies} replies");
    let Error::Request(RequestError::Refused { status: 429, message, retry_after_s }) = refusal
    else {
        panic!("{refusal:?}")
    };
    assert!(message.contains("the budget of 120 tokens a day"), "{message}");
    assert!(retry_after_s.is_some_and(|seconds| seconds <= 86_400), "{retry_after_s:?}");
    let (other, _) = traced(&engine, "limited", of("0123456789abcdef"));
    assert_eq!(other.answer, "The capital of Italy is Rome.");
}
