use super::*;
use crate::chain::Chain;
use crate::chain::Link;
use crate::contract::{
    Action, Ban, CallReport, Candidate, Cost, DrawnToken, Hook, HookInput, ImportCall, Labels,
    Observations, Plan, Policy, PromptEdit, PromptView, Replacement, RequestView, Step, Summary,
    TextChange, TextVerdict, TextView, ToolCallView, Verdict,
};
use crate::error::{Cause, Failure};

const SECRET: &str = "the password is swordfish";

/// Repeats the texts that it is called with in every field of its answers.
#[derive(Default)]
struct Parrot {
    heard: String,
}

impl Parrot {
    fn hear(&mut self, text: &str) -> String {
        self.heard = text.into();
        text.into()
    }
}

impl Policy for Parrot {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        Ok(match call {
            Call::Params(_) => call.default_answer(),
            Call::Prompt(prompt) => {
                let old = self.hear(&prompt.system[0]);
                let edit = Replacement { message: 0, new: format!("{old}!"), old };
                Answer::Prompt(vec![PromptEdit::Replace(edit)])
            }
            Call::Request(request) => {
                let note = Some(self.hear(&request.user));
                Answer::Request(Plan { note, every: 1, ..Plan::default() })
            }
            Call::Step(step) => {
                let text = self.hear(&step.text);
                let ban = Ban { tokens: step.tokens.clone(), steps: 1 };
                Answer::Step(vec![
                    Action::Inject(text.clone()),
                    Action::CloseReasoning(text.clone()),
                    Action::Ban(ban),
                    Action::Stop(text),
                ])
            }
            Call::Text(view) => {
                let change = TextChange { text: self.hear(&view.text), hold: 0 };
                Answer::Text(TextVerdict::Replace(change))
            }
            Call::ToolCall(view) => Answer::ToolCall(Verdict::Repair(self.hear(&view.arguments))),
            Call::Finish(_) => Answer::Finish(Labels::new()),
        })
    }

    fn take_report(&mut self) -> CallReport {
        let heard = std::mem::take(&mut self.heard);
        let import = ImportCall {
            call: "kv.get".into(),
            arguments: vec![heard.clone()],
            answer: Some(heard.clone()),
        };
        CallReport {
            cost: Cost { fuel: heard.len() as u64, nanoseconds: 5 },
            imports: if heard.is_empty() { Vec::new() } else { vec![import] },
            ..CallReport::default()
        }
    }
}

fn traces(config: PolicyConfig) -> Arc<Traces> {
    Traces::new(&config).unwrap()
}

fn parrot(recorder: Recorder) -> Box<dyn Policy> {
    let policy = Box::new(Parrot::default());
    let link = Link { name: "parrot".into(), sha256: [171; 32], shadow: false, policy };
    Box::new(Chain::new(vec![link], recorder))
}

/// A request in which every text is the secret.
fn talk(traces: &Arc<Traces>, id: &str, text: bool, steps: u32) {
    let mut chain = parrot(traces.recorder(id, "agent", text));
    let params = vec![("hint".to_string(), SECRET.to_string())];
    let system = vec![SECRET.to_string()];
    let prompt = PromptView { system, params: params.clone(), ..PromptView::default() };
    chain.ask(&prompt).unwrap();
    let request = RequestView { user: SECRET.into(), params, ..RequestView::default() };
    chain.ask(&request).unwrap();
    for index in 1..=steps {
        let tokens = vec![987_654_321, 987_654_322];
        let candidates = vec![Candidate { token: 987_654_324, logprob: -0.1 }];
        let drawn =
            DrawnToken { index: 1, token: 987_654_323, entropy: 0.5, margin: 1.25, candidates };
        let drawn = vec![drawn];
        let observed = Some(Observations { drawn, ..Observations::default() });
        let step = Step { index, tokens, text: SECRET.into(), observed, ..Step::default() };
        chain.ask(&step).unwrap();
    }
    chain.ask(&TextView { text: SECRET.into(), ..TextView::default() }).unwrap();
    let call = ToolCallView { arguments: SECRET.into(), ..ToolCallView::default() };
    chain.ask(&call).unwrap();
    chain.ask(&Summary { reason: "stop".into(), ..Summary::default() }).unwrap();
}

fn lines(records: &[Record]) -> String {
    records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect()
}

#[test]
fn a_trace_contains_every_call_with_its_policy_and_cost() {
    let traces = traces(PolicyConfig::default());
    talk(&traces, "a", true, 2);
    let records = traces.get("a").unwrap();
    let hooks: Vec<_> = records.iter().map(|record| record.call.hook().name()).collect();
    let expected =
        ["on-prompt", "on-request", "on-step", "on-step", "on-text", "on-tool-call", "on-finish"];
    assert_eq!(hooks, expected);
    assert!(records.iter().all(|record| record.link.sha256 == "ab".repeat(32)));
    let step = serde_json::to_string(&records[3]).unwrap();
    assert_eq!(
        step,
        format!(
            r#"{{"request":"a","profile":"agent","policy":"parrot","sha256":"{}","link":0,"shadow":false,"hook":"on-step","step":2,"input":{{"index":2,"phase":"Answer","reasoning_tokens":0,"answer_tokens":0,"reasoning_left":0,"tokens":[987654321,987654322],"text":"{SECRET}","loop_found":null,"budget_reached":false,"phase_changed":false,"newline":false,"observed":{{"texts_found":[],"token_found":false,"drawn":[{{"index":1,"token":987654323,"entropy":0.5,"margin":1.25,"candidates":[{{"token":987654324,"logprob":-0.1}}]}}],"outlook":null}}}},"answer":[{{"Inject":"{SECRET}"}},{{"CloseReasoning":"{SECRET}"}},{{"Ban":{{"tokens":[987654321,987654322],"steps":1}}}},{{"Stop":"{SECRET}"}}],"fuel":25,"nanoseconds":5,"imports":[{{"call":"kv.get","arguments":["{SECRET}"],"answer":"{SECRET}"}}]}}"#,
            "ab".repeat(32)
        )
    );
}

#[test]
fn a_masked_trace_has_lengths_in_place_of_texts_and_tokens() {
    let traces = traces(PolicyConfig::default());
    talk(&traces, "open", true, 2);
    talk(&traces, "masked", false, 2);
    let open = lines(&traces.get("open").unwrap());
    let masked = lines(&traces.get("masked").unwrap());
    for secret in ["password", "swordfish", "98765432"] {
        assert!(open.contains(secret) && !masked.contains(secret), "{secret} in {masked}");
    }
    assert!(masked.lines().all(|line| line.contains(r#""masked":{"#)), "{masked}");
    assert!(!open.contains("masked"), "{open}");
    for length in [
        r#""input.system[0]":25"#,
        r#""answer[0].Replace.new":26"#,
        r#""input.params.hint":25"#,
        r#""input.user":25"#,
        r#""answer.note":25"#,
        r#""input.tokens":2"#,
        r#""answer[2].Ban.tokens":2"#,
        r#""input.arguments":25"#,
        r#""input.observed.drawn":1"#,
        r#""answer.Replace.text":25"#,
        r#""answer.Repair":25"#,
        r#""imports[0].answer":25"#,
    ] {
        assert!(masked.contains(length), "{length} in {masked}");
    }
    // The decisions themselves are visible.
    let shape = |text: &str| text.matches("CloseReasoning\":\"").count();
    assert_eq!((shape(&open), shape(&masked)), (2, 2));
}

#[test]
fn traces_of_the_newest_requests_are_held() {
    let traces = traces(PolicyConfig { trace_requests: 3, ..PolicyConfig::default() });
    for id in ["a", "b", "c", "d"] {
        talk(&traces, id, true, 1);
    }
    assert!(traces.get("a").is_none());
    for id in ["b", "c", "d"] {
        assert_eq!(traces.get(id).unwrap().len(), 6, "{id}");
    }
    let off = self::traces(PolicyConfig { trace_requests: 0, ..PolicyConfig::default() });
    talk(&off, "a", true, 1);
    assert!(off.get("a").is_none());
}

#[test]
fn a_long_request_has_its_first_and_last_calls_and_a_count_of_the_others() {
    let traces = traces(PolicyConfig::default());
    talk(&traces, "long", false, MAX_RECORDS as u32 + 10);
    let records = traces.get("long").unwrap();
    assert_eq!(records.len(), MAX_RECORDS + 1);
    let last = records.last().unwrap();
    assert_eq!(last.call.hook(), Hook::OnFinish);
    // Prompt, request, steps, text and tool call are more than MAX_RECORDS by 14.
    assert_eq!(last.dropped, 14);
    assert!(serde_json::to_string(last).unwrap().ends_with(r#""dropped":14}"#));
}

#[test]
fn memory_is_bounded_in_bytes_and_the_oldest_requests_are_evicted() {
    let traces = traces(PolicyConfig { trace_requests: 1000, ..PolicyConfig::default() });
    for id in 0..40 {
        let mut chain = parrot(traces.recorder(&id.to_string(), "agent", true));
        let step = Step { text: "x".repeat(500_000), ..Step::default() };
        chain.ask(&step).unwrap();
        assert!(traces.bytes.load(Ordering::Relaxed) <= MEMORY_BYTES);
    }
    // Half a megabyte for the step, three texts of the answer, and two of the import.
    assert!(traces.get("39").is_some() && traces.get("20").is_some());
    assert!(traces.get("0").is_none() && traces.get("15").is_none());
    let held = traces.newest.lock().iter().map(|one| one.calls.lock().bytes).sum::<usize>();
    assert_eq!(held, traces.bytes.load(Ordering::Relaxed));
}

/// The open calls of an evicted request stayed, up to 64 of 4 MB, and a batch of them was too large for the
/// queue of the file: such a policy was missing from it.
#[test]
fn large_calls_are_neither_held_nor_lost() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    for trace_file in [file.clone(), std::path::PathBuf::new()] {
        let traces = traces(PolicyConfig { trace_file, ..PolicyConfig::default() });
        let mut chain = parrot(traces.recorder("large", "agent", true));
        for index in 0..40 {
            let step = Step { index, text: "x".repeat(500_000), ..Step::default() };
            chain.ask(&step).unwrap();
            let newest = traces.newest.lock();
            let held = newest.iter().map(|one| one.calls.lock().open_bytes).sum::<usize>();
            assert!(held < CHUNK_BYTES, "{held}");
            drop(newest);
            // Calls are dropped while the queue of the file is full.
            traces.writer.iter().for_each(Writer::wait_until_written);
        }
        drop(chain);
        drop(traces);
    }
    let written = std::fs::read_to_string(&file).unwrap();
    assert_eq!(written.lines().filter(|line| line.contains("on-step")).count(), 40);
}

/// Short texts and small numbers took up to ten times what was counted: their JSON is shorter than they are.
#[test]
fn a_record_counts_at_least_what_its_texts_and_lists_take() {
    let link = RecordedLink {
        request: String::new(),
        profile: String::new(),
        policy: String::new(),
        sha256: String::new(),
        index: 0,
        shadow: false,
        masked: true,
    };
    let link = Arc::new(link);
    let counted = |call: Call<'static>, answer, imports| {
        let (failure, replaced, cost, dropped) = (None, false, Cost::default(), 0);
        let link = link.clone();
        Record { link, call, answer, failure, replaced, cost, imports, dropped }.bytes()
    };
    let text = size_of::<String>() + 1;
    let params = vec![("a".to_string(), "b".to_string()); 1000];
    let request = RequestView { params, ..RequestView::default() };
    assert!(counted(request.call().to_owned(), None, Vec::new()) > 1000 * 2 * text);
    let system = vec!["a".to_string(); 1000];
    let prompt = PromptView { system, ..PromptView::default() };
    assert!(counted(prompt.call().to_owned(), None, Vec::new()) > 1000 * text);
    let actions = vec![Action::Rewind(1); 16];
    let bytes = counted(Step::default().call().to_owned(), Some(Answer::Step(actions)), Vec::new());
    assert!(bytes > size_of::<Record>() + 16 * size_of::<Action>());
    let call = ImportCall { call: "kv.get".into(), arguments: vec!["a".into()], answer: None };
    let bytes = counted(Step::default().call().to_owned(), None, vec![call; 1000]);
    assert!(bytes > 1000 * (size_of::<ImportCall>() + 6 + text));
}

/// Answers each call with the note, and each step with an injection, of this text.
struct Fixed(&'static str);

impl Policy for Fixed {
    fn call(&mut self, call: &Call<'_>) -> Result<Answer, Failure> {
        Ok(match call {
            Call::Request(_) => {
                Answer::Request(Plan { note: Some(self.0.into()), every: 1, ..Plan::default() })
            }
            Call::Step(_) if !self.0.is_empty() => {
                Answer::Step(vec![Action::Inject(self.0.into())])
            }
            other => other.default_answer(),
        })
    }

    fn take_report(&mut self) -> CallReport {
        CallReport::default()
    }
}

#[test]
fn a_shadow_is_compared_with_what_was_applied_to_the_same_call() {
    let traces = traces(PolicyConfig::default());
    let link = |name: &str, text, shadow| {
        let policy = Box::new(Fixed(text));
        Link { name: name.into(), sha256: [1; 32], shadow, policy }
    };
    let run = |id: &str, links: Vec<Link>| {
        let mut chain: Box<dyn Policy> =
            Box::new(Chain::new(links, traces.recorder(id, "agent", true)));
        chain.ask(&RequestView::default()).unwrap();
        for index in 1..=3 {
            chain.ask(&Step { index, tokens: vec![1], ..Step::default() }).unwrap();
        }
        chain.ask(&Summary::default()).unwrap();
    };
    // The same as the second policy of the chain; then another answer to each call.
    run("same", vec![link("a", "x", false), link("b", "y", false), link("shadow", "y", true)]);
    run("other", vec![link("a", "x", false), link("shadow", "z", true)]);
    run("none", vec![link("a", "x", false)]);
    let report = traces.compare_shadow("shadow");
    assert_eq!((report.requests, report.calls, report.failures), (2, 8, 0));
    assert_eq!((report.differing, report.differences.len()), (4, 4));
    let newest = &report.differences[0];
    assert_eq!(newest.shadow.answer, Some(Answer::Step(vec![Action::Inject("z".into())])));
    let applied: Vec<_> = newest.applied.iter().map(|record| &*record.link.policy).collect();
    assert_eq!(applied, ["a"]);
    assert!(report.differences.iter().all(|one| one.shadow.link.request == "other"));
    // A policy that is no shadow is compared with nothing.
    assert_eq!(traces.compare_shadow("a").calls, 0);
    for number in 0..40 {
        run(&number.to_string(), vec![link("a", "x", false), link("shadow", "z", true)]);
    }
    let report = traces.compare_shadow("shadow");
    assert_eq!((report.differing, report.differences.len()), (4 + 40 * 4, 50));
    // Alone, it is compared with a policy that leaves everything as it is.
    run("alone", vec![link("alone", "", true)]);
    let alone = traces.compare_shadow("alone");
    assert_eq!((alone.calls, alone.differing), (4, 1));
}

/// Up to a megabyte of each running request was held and not counted.
#[test]
fn an_evicted_request_holds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let trace_file = folder.path().join("trace.jsonl");
    let traces = traces(PolicyConfig { trace_requests: 1, trace_file, ..PolicyConfig::default() });
    let recorder = traces.recorder("evicted", "agent", true);
    let traced = recorder.0.as_ref().unwrap().traced.clone();
    let mut chain = parrot(recorder);
    let _next = parrot(traces.recorder("next", "agent", true));
    for index in 0..10 {
        chain.ask(&Step { index, ..Step::default() }).unwrap();
        let calls = traced.calls.lock();
        assert!(calls.evicted && calls.open.is_empty() && calls.chunks.is_empty());
    }
}

#[test]
fn the_trace_file_has_a_limit_and_one_file_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    let config = |trace_file_bytes| PolicyConfig {
        trace_file: file.clone(),
        trace_file_bytes,
        ..PolicyConfig::default()
    };
    for id in 0..20 {
        talk(&traces(config(20_000)), &id.to_string(), true, 20);
    }
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    let (newest, earlier) = (read("trace.jsonl"), read("trace.jsonl.1"));
    assert!(newest.len() + earlier.len() < 80_000, "{} {}", newest.len(), earlier.len());
    assert!(newest.contains(r#""request":"19""#) && !earlier.contains(r#""request":"19""#));
    assert!(earlier.len() >= 20_000 && !earlier.contains(r#""request":"0""#));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    talk(&traces(config(0)), "unlimited", true, 100);
    assert!(read("trace.jsonl").starts_with(&newest));
}

/// After `logrotate` had renamed the file, all further calls went to the renamed one.
#[cfg(unix)]
#[test]
fn a_trace_file_that_others_rename_or_remove_is_created_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    let traces = traces(PolicyConfig { trace_file: file.clone(), ..PolicyConfig::default() });
    let written = |id: &str| {
        talk(&traces, id, true, 1);
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let is_written = || std::fs::read_to_string(&file).is_ok_and(|text| text.contains(id));
        while !is_written() {
            assert!(std::time::Instant::now() < end, "{id}");
            std::thread::yield_now();
        }
    };
    written("request-a");
    std::fs::rename(&file, folder.path().join("renamed")).unwrap();
    written("request-b");
    std::fs::remove_file(&file).unwrap();
    written("request-c");
    let renamed = std::fs::read_to_string(folder.path().join("renamed")).unwrap();
    assert!(renamed.contains("request-a") && !renamed.contains("request-b"));
}

#[test]
fn the_trace_file_has_the_same_records_and_is_appended_to() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    let config = || PolicyConfig { trace_file: file.clone(), ..PolicyConfig::default() };
    let mut expected = String::new();
    for (id, steps) in [("a", 3), ("b", 200)] {
        let traces = traces(config());
        talk(&traces, id, true, steps);
        expected += &lines(&traces.get(id).unwrap());
        // Dropping the last handle writes the queue.
        drop(traces);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    }
    let nowhere = PolicyConfig { trace_file: folder.path().into(), ..PolicyConfig::default() };
    let error = Traces::new(&nowhere).err().unwrap().to_string();
    assert!(error.starts_with("policy.trace_file: "), "{error}");
    assert!(error.contains("cannot be opened for appending"), "{error}");
}

#[test]
fn the_message_of_a_failure_is_masked_and_the_host_s_own_text_is_not() {
    for (cause, masked, length) in [
        (Cause::Message("no swordfish".into()), "policy `a`: on-step: failed", Some(12)),
        (Cause::Fuel(7), "policy `a`: on-step: used up its fuel of 7", None),
    ] {
        let failure = Failure { policy: "a".into(), hook: "on-step", cause };
        let mut lengths = serde_json::Map::new();
        assert_eq!(mask::failure(&failure, &mut lengths), masked);
        assert_eq!(lengths.get("error").and_then(|length| length.as_u64()), length);
    }
}
