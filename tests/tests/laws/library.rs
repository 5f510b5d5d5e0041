//! The policies of the library, and what contract 0.6 adds, through the engine with the bundled model. Every replay is
//! equal bit for bit.

use std::path::Path;

use serde_json::Value;
use steersman::config::FileConfig;
use steersman_engine::config::Profile;
use steersman_engine::policy::{
    Answer, Call, Golden, Observations, Param, Record, Step, TokenBias, WatchedToken, shipped,
};
use steersman_engine::request::{FinishReason, Form, Penalties, Request, ResponseFormat};
use steersman_engine::{Error, RequestError};
use steersman_test_support::guest::{Answers, Value as Word, component, list, record, text, word};
use steersman_tests::steered::{engine, engine_with, replays, traced};
use steersman_tests::{Reply, Running, ask, ask_weather, bundled_text, message, profile};

const QUESTION: &str = "What is the capital of Italy?";

/// A profile with one shipped policy and these parameters, traced with texts.
fn library(policy: &str, params: &[(&str, &str)]) -> Profile {
    let mut profile = profile(policy);
    let param = |(name, text): &(&str, &str)| ((*name).to_owned(), Param::from(*text));
    profile.policy.params = params.iter().map(param).collect();
    profile.policy.trace_text = true;
    profile
}

/// The reply to a request of a profile that has the name of its policy; its records replay.
fn replayed(engine: &Running, policy: &str, request: Request) -> (Reply, Vec<Record>) {
    let (reply, records) = traced(engine, policy, request);
    replays(shipped(policy).unwrap().0, policy, &records);
    (reply, records)
}

fn label<'a>(reply: &'a Reply, name: &str) -> Option<&'a str> {
    let labels = &reply.finished().labels;
    labels.iter().find(|(label, _)| label == name).map(|(_, value)| value.as_str())
}

fn italy() -> Request {
    Request { reasoning: Some(false), ..ask(QUESTION) }
}

fn has_hook(records: &[Record], hook: &str) -> bool {
    records.iter().any(|record| record.call.hook().name() == hook)
}

#[test]
fn redact_replaces_text_before_any_client_has_it() {
    let engine = engine([("redact", library("redact", &[("texts", "Rome|of Italy")]))]);
    for revisable in [true, false] {
        let (reply, records) = replayed(&engine, "redact", Request { revisable, ..italy() });
        assert_eq!(reply.answer, "The capital [redacted] is [redacted].");
        assert_eq!(label(&reply, "redacted"), Some("2"));
        assert!(has_hook(&records, "on-text"));
    }
    // Probabilities would show the text.
    let (reply, _) = replayed(&engine, "redact", Request { logprobs: Some(2), ..italy() });
    let note = "left out probabilities of tokens: a policy changes the text";
    assert!(reply.finished().notes.iter().any(|n| n == note), "{reply:?}");
}

#[test]
fn cache_friendly_makes_prompts_equal_that_differ_in_their_billing_header() {
    let engine = engine([("cache-friendly", library("cache-friendly", &[]))]);
    let asked = |header: &str| {
        let system = message("system", &format!("{header}You answer briefly."));
        let messages = vec![system, message("user", QUESTION)];
        Request { messages, ..italy() }
    };
    let prompt_tokens = |reply: &Reply| reply.finished().usage.prompt_tokens;
    let (bare, _) = replayed(&engine, "cache-friendly", asked(""));
    for header in ["cc_version=2.1; cch=41c7b;", "cc_version=2.1; cch=0;"] {
        let header = format!("x-anthropic-billing-header: {header}\n");
        let (reply, _) = replayed(&engine, "cache-friendly", asked(&header));
        assert_eq!((prompt_tokens(&reply), &reply.answer), (prompt_tokens(&bare), &bare.answer));
        let edited = format!("replaced {} bytes of system message 0 with 0 bytes", header.len());
        assert!(reply.finished().notes.contains(&edited), "{reply:?}");
    }
}

#[test]
fn json_agent_enforces_json_and_adds_system_text_where_there_is_none() {
    let schema = r#"{"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                     "required": ["city"], "additionalProperties": false}"#;
    let engine = engine([("json-agent", library("json-agent", &[("schema", schema)]))]);
    let request = Request { max_tokens: Some(80), ..italy() };
    let (reply, _) = replayed(&engine, "json-agent", request);
    let answer: Value = serde_json::from_str(&reply.answer).expect(&reply.answer);
    assert!(["Rome", "Oslo"].contains(&answer["city"].as_str().unwrap()), "{answer}");
    assert_eq!(label(&reply, "json"), Some("enforced"));
    let added = |note: &String| note.starts_with("added ") && note.ends_with("of the system text");
    assert!(reply.finished().notes.iter().any(added), "{reply:?}");
    // Its tokens are in the prompt.
    let bare = traced(&engine, "default", italy()).0.finished().usage.prompt_tokens;
    assert!(reply.finished().usage.prompt_tokens > bare + 10);
}

#[test]
fn tool_guard_replaces_a_call_with_denied_arguments() {
    let profiles = [
        ("tool-guard", library("tool-guard", &[("deny", "oslo"), ("words", "I cannot look. ")])),
        ("default", profile("default")),
    ];
    let engine = engine(profiles);
    assert_eq!(traced(&engine, "default", ask_weather()).0.tool_calls.len(), 1);
    let request = Request { max_tokens: Some(60), ..ask_weather() };
    let (reply, records) = replayed(&engine, "tool-guard", request);
    assert!(reply.tool_calls.is_empty() && reply.answer.contains("I cannot look."), "{reply:?}");
    assert!(label(&reply, "calls_refused").is_some() && has_hook(&records, "on-tool-call"));
}

#[test]
fn router_routes_once_and_where_the_operator_allows() {
    let params = [("to", "large"), ("words", "italy")];
    let mut granted = library("router", &params);
    granted.routes = vec!["large".into()];
    let engine = engine([("router", granted), ("closed", library("router", &params))]);
    let (reply, records) = replayed(&engine, "router", italy());
    let Err(Error::Request(RequestError::Routed { route })) = &reply.end else {
        panic!("{reply:?}")
    };
    assert_eq!(route, "large");
    let Call::Finish(summary) = &records.last().unwrap().call else { panic!("{records:?}") };
    assert_eq!((&*summary.reason, summary.answer_tokens), ("routed", 0));
    for (profile, is_routed, why) in [
        ("router", true, "did not route to `large`: the request has been routed already"),
        ("closed", false, "did not route to `large`: the profile does not have it in `routes`"),
    ] {
        let (reply, _) = traced(&engine, profile, Request { is_routed, ..italy() });
        assert_eq!(reply.answer, "The capital of Italy is Rome.");
        assert!(reply.finished().notes.iter().any(|note| note == why), "{reply:?}");
    }
}

/// A request in whose reply the model prefers the tokens of `wanted`.
fn biased(wanted: &str, bias: f32) -> Request {
    let tokens = bundled_text().encode_plain(wanted).unwrap();
    let biases = tokens.into_iter().map(|token| TokenBias { token, bias });
    Request { biases: biases.collect(), max_tokens: Some(60), revisable: false, ..italy() }
}

#[test]
fn language_takes_foreign_letters_back_before_a_streaming_client_has_them() {
    let engine = engine([("language", library("language", &[]))]);
    // The form permits both, and the client prefers the first byte of the Cyrillic letter.
    let form = Form::Regex("(яя|Rome)".into());
    let mut request = biased("я", 30.0);
    request.biases.truncate(1);
    request.response_format = Some(ResponseFormat { field: "response_format", form });
    let (without, _) = traced(&engine, "default", request.clone());
    assert_eq!(without.answer, "яя");
    let (reply, records) = replayed(&engine, "language", request);
    assert_eq!(reply.answer, "Rome", "{reply:?}");
    assert_eq!(label(&reply, "foreign_tokens"), Some("1"));
    assert!(has_hook(&records, "on-text") && has_hook(&records, "on-step"));
}

#[test]
fn no_repeat_rewinds_a_loop_and_ends_an_answer_that_returns_to_it() {
    let params = [("times", "2"), ("cool_down", "8"), ("temperature", "1.0")];
    let engine = engine([("no-repeat", library("no-repeat", &params))]);
    let request = Request { max_tokens: Some(400), revisable: true, ..biased(" no", 100.0) };
    let (reply, _) = replayed(&engine, "no-repeat", request);
    let FinishReason::Policy(why) = &reply.finished().reason else { panic!("{reply:?}") };
    assert_eq!((&**why, label(&reply, "loops")), ("the answer repeats itself", Some("3")));
    assert!(reply.finished().notes.iter().any(|note| note.contains("rewound")), "{reply:?}");
}

/// A question about which the bundled model reasons for some sentences.
fn reasoned() -> Request {
    Request { reasoning: Some(true), max_tokens: Some(200), ..ask(QUESTION) }
}

/// What a policy sees of a watched token is of the model alone, and of the next token: with greedy decoding the likeliest one
/// is drawn next. Watching changes no token.
#[test]
fn watched_tokens_are_those_that_the_model_would_draw_next() {
    let profiles = || {
        let watching = library("brake", &[("min_tokens", "100000")]);
        [("brake", watching), ("passthrough", library("passthrough", &[]))]
    };
    let penalties = Penalties { presence: 0.01, ..Penalties::default() };
    for drafts in [true, false] {
        let engine = engine_with(profiles(), |config| {
            if !drafts {
                config.speculation.drafts.clear();
            }
        });
        sees_what_comes_next(&engine, reasoned());
        // Each token is drawn after those before it are on the host.
        sees_what_comes_next(&engine, Request { penalties, ..reasoned() });
        let logprobs = Request { logprobs: Some(0), ..reasoned() };
        sees_what_comes_next(&engine, logprobs);
    }
}

fn sees_what_comes_next(engine: &Running, request: Request) {
    let (plain, _) = replayed(engine, "passthrough", request.clone());
    let (reply, records) = replayed(engine, "brake", request);
    assert_eq!((&reply.reasoning, &reply.answer), (&plain.reasoning, &plain.answer));
    assert_eq!(label(&reply, "braked_at"), None);
    let steps: Vec<_> = records
        .iter()
        .filter_map(|record| match &record.call {
            Call::Step(step) => Some(step),
            _ => None,
        })
        .collect();
    assert!(steps.len() > 2, "{reply:?}");
    for pair in steps.windows(2) {
        let outlook = pair[0].observed.as_ref().and_then(|seen| seen.outlook.as_ref());
        let outlook = outlook.unwrap_or_else(|| panic!("no outlook in {:?}", pair[0]));
        assert_eq!(outlook.best.token, pair[1].tokens[0], "after {:?}", pair[0].text);
        let [end] = &outlook.watched[..] else { panic!("{outlook:?}") };
        assert_eq!(end.watched, WatchedToken::ReasoningEnd);
        assert!(end.logprob <= outlook.best.logprob && outlook.best.logprob <= 0.0, "{outlook:?}");
    }
}

#[test]
fn brake_closes_the_reasoning_at_the_end_of_a_sentence() {
    let params = [("min_tokens", "4"), ("margin", "20"), ("hint", "**Answer:** ")];
    let engine = engine([("brake", library("brake", &params))]);
    let (reply, _) = replayed(&engine, "brake", reasoned());
    let tokens: u32 = label(&reply, "braked_at").expect("it closes").parse().unwrap();
    assert!(tokens >= 4 && reply.reasoning.trim_end().ends_with(['.', '!', '?']), "{reply:?}");
    assert!(reply.answer.starts_with("**Answer:** "), "{reply:?}");
    // Equal requests end at the same sentence.
    let (again, _) = replayed(&engine, "brake", reasoned());
    assert_eq!(
        (label(&again, "braked_at"), &again.answer),
        (label(&reply, "braked_at"), &reply.answer)
    );
}

/// Masked records of a watching policy can be read again.
#[test]
fn masked_records_with_watched_tokens_are_read() {
    let mut masked = library("brake", &[("min_tokens", "4"), ("margin", "20")]);
    masked.policy.trace_text = false;
    let (reply, records) = traced(&engine([("brake", masked)]), "brake", reasoned());
    let lines: String =
        records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect();
    assert!(!lines.contains("logprob"), "{lines}");
    assert!(label(&reply, "braked_at").is_some());
    assert!(Golden::parse(&lines).unwrap().inexact().is_some());
}

#[test]
fn chains_of_the_configuration_answer() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/policies.toml");
    let (_, config) = FileConfig::read(Path::new(path)).unwrap().check().unwrap();
    let mut profiles = config.profiles;
    profiles.values_mut().for_each(|profile| profile.policy.trace_text = true);
    let names: Vec<_> = profiles.keys().cloned().collect();
    assert!(names.len() > 4, "{names:?}");
    let engine = engine(profiles.iter().map(|(name, profile)| (&**name, profile.clone())));
    for name in names {
        let (reply, records) = traced(&engine, &name, Request { max_tokens: Some(40), ..italy() });
        let finished = reply.finished();
        assert!(!reply.answer.is_empty(), "{name}: {reply:?}");
        let is_wrong = |note: &String| note.contains("parameter") || note.contains("took over");
        assert!(!finished.notes.iter().any(is_wrong), "{name}: {:?}", finished.notes);
        for policy in &profiles[&name].policy.policies {
            let own = records.iter().filter(|record| record.link.policy == *policy);
            let own: Vec<_> = own.cloned().collect();
            assert!(!own.is_empty(), "{name}: {policy}");
            replays(shipped(policy).unwrap().0, policy, &own);
        }
    }
}

/// The steps of a guest with this plan, whose answers are empty.
fn steps(name: &str, plan: Vec<(&'static str, Word)>) -> (Reply, Vec<Step>) {
    let mut answers = Answers::default();
    let plan = format!("i32.const {}", answers.add("on-request", &record(plan)));
    let nothing = format!("i32.const {}", answers.add("on-step", &list([])));
    let guest = component(&[("on-request", &plan), ("on-step", &nothing)], &answers.data());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(format!("{name}.wasm"));
    std::fs::write(&file, &guest).unwrap();
    let mut watched = profile(file.display().to_string());
    watched.policy.trace_text = true;
    let engine = engine([(name, watched)]);
    let (reply, records) = traced(&engine, name, italy());
    replays(&guest, name, &records);
    let step = |record: &Record| match &record.call {
        Call::Step(step) => {
            assert_eq!(record.answer, Some(Answer::Step(Vec::new())));
            Some(step.clone().into_owned())
        }
        _ => None,
    };
    (reply, records.iter().filter_map(step).collect())
}

#[test]
fn a_step_has_the_likeliest_tokens_if_the_plan_asks_for_them() {
    let (plain, every) = steps("every", vec![("every", word(1))]);
    assert!(every.iter().all(|step| step.observed.is_none()));
    let (reply, seen) = steps("candidates", vec![("every", word(4)), ("candidates", word(3))]);
    assert_eq!(reply.answer, plain.answer);
    let drawn: Vec<_> = seen
        .iter()
        .filter_map(|step| step.observed.as_ref())
        .flat_map(|observed| &observed.drawn)
        .collect();
    let tokens: Vec<u32> = seen.iter().flat_map(|step| step.tokens.clone()).collect();
    assert_eq!(drawn.iter().map(|drawn| drawn.token).collect::<Vec<_>>(), tokens);
    for (index, drawn) in drawn.iter().enumerate() {
        assert_eq!((drawn.index as usize, drawn.candidates.len()), (index, 3));
        // Greedy decoding draws the likeliest.
        assert_eq!(drawn.candidates[0].token, drawn.token);
        let logprobs: Vec<f32> = drawn.candidates.iter().map(|one| one.logprob).collect();
        assert!(logprobs.is_sorted_by(|a, b| a >= b) && logprobs[0] <= 0.0, "{drawn:?}");
        assert!((drawn.margin - (logprobs[0] - logprobs[1])).abs() < 1e-4, "{drawn:?}");
        // At least that of the likeliest token alone, at most that of an even distribution.
        let least = -logprobs[0].exp() * logprobs[0];
        assert!(drawn.entropy >= least - 1e-4 && drawn.entropy < 13.0, "{drawn:?}");
    }
}

#[test]
fn on_step_is_called_after_texts_and_tokens_of_the_plan() {
    let (_, all) = steps("all", vec![("every", word(1))]);
    let token = |word: &str| {
        let of_word = all.iter().find(|step| step.text.contains(word));
        of_word
            .map(|step| (step.index, step.tokens[0]))
            .unwrap_or_else(|| panic!("{word}: {all:?}"))
    };
    let texts = list([text("capital of"), text("nowhere")]);
    let (index, italy) = token("Italy");
    let plan = vec![("on-texts", texts), ("on-tokens", list([word(italy)]))];
    let (_, seen) = steps("events", plan);
    let [of_text, of_token] = &seen[..] else { panic!("{seen:?}") };
    let found = |texts_found: &[&str], token_found| {
        let texts_found = texts_found.iter().map(|&text| text.into()).collect();
        Some(Observations { texts_found, token_found, drawn: Vec::new(), outlook: None })
    };
    assert_eq!(of_text.observed, found(&["capital of"], false));
    assert!(of_text.text.ends_with("capital of"), "{of_text:?}");
    assert_eq!(of_token.observed, found(&[], true));
    assert_eq!((of_token.index, of_token.tokens.last()), (index, Some(&italy)));
}
