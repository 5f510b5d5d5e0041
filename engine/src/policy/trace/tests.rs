use std::collections::BTreeMap;

use super::super::chain::Chain;
use super::super::{
    Action, Ban, Plan, Policy, PromptView, Replacement, RequestView, Step, Summary, ToolCallView,
    Verdict,
};
use super::*;

/// Repeats whatever it is told, wherever it can.
#[derive(Default)]
struct Parrot {
    heard: String,
    imports: Vec<ImportCall>,
}

impl Parrot {
    fn hears(&mut self, words: &str) -> String {
        self.heard = words.into();
        self.imports = vec![ImportCall {
            call: "kv.get".into(),
            arguments: vec![words.into()],
            answer: Some(words.into()),
        }];
        words.into()
    }
}

impl Policy for Parrot {
    fn on_prompt(&mut self, prompt: &PromptView) -> Result<Vec<Replacement>> {
        let old = self.hears(&prompt.system[0]);
        Ok(vec![Replacement { message: 0, new: format!("{old}!"), old }])
    }

    fn on_request(&mut self, request: &RequestView) -> Result<Plan> {
        Ok(Plan { note: Some(self.hears(&request.user)), every: 1, ..Plan::default() })
    }

    fn on_step(&mut self, step: &Step) -> Result<Vec<Action>> {
        let said = self.hears(&step.text);
        let ban = Ban { tokens: step.tokens.clone(), steps: 1 };
        Ok(vec![
            Action::Inject(said.clone()),
            Action::CloseThinking(said.clone()),
            Action::Ban(ban),
            Action::Stop(said),
        ])
    }

    fn on_tool_call(&mut self, call: &ToolCallView) -> Result<Verdict> {
        Ok(Verdict::Repair(self.hears(&call.arguments)))
    }

    fn cost(&self) -> Cost {
        Cost { fuel: self.heard.len() as u64, nanoseconds: 5 }
    }

    fn take_imports(&mut self) -> Vec<ImportCall> {
        std::mem::take(&mut self.imports)
    }
}

const SECRET: &str = "the password is swordfish";

fn traces(config: PolicyConfig) -> Arc<Traces> {
    Traces::new(&config).unwrap()
}

fn parrot(recorder: Recorder) -> Chain {
    let policy = Box::new(Parrot::default());
    Chain::new(
        vec![Link { name: "parrot".into(), sha256: [171; 32], shadow: false, policy }],
        recorder,
    )
}

/// A request in which everything that is said is the secret.
fn talk(traces: &Arc<Traces>, id: &str, text: bool, steps: u32) {
    let mut chain = parrot(traces.recorder(id, "agent", text));
    let params = BTreeMap::from([("hint".to_string(), SECRET.to_string())]);
    let system = vec![SECRET.to_string()];
    let prompt = PromptView { system, params: params.clone(), ..PromptView::default() };
    chain.on_prompt(&prompt).unwrap();
    let request = RequestView { user: SECRET.into(), params, ..RequestView::default() };
    chain.on_request(&request).unwrap();
    for index in 1..=steps {
        let tokens = vec![987_654_321, 987_654_322];
        let step = Step { index, tokens, text: SECRET.into(), ..Step::default() };
        chain.on_step(&step).unwrap();
    }
    let call = ToolCallView { arguments: SECRET.into(), ..ToolCallView::default() };
    chain.on_tool_call(&call).unwrap();
    chain.on_finish(&Summary { reason: "stop".into(), ..Summary::default() }).unwrap();
}

fn lines(records: &[Record]) -> String {
    records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect()
}

#[test]
fn a_trace_holds_every_call_with_its_policy_and_its_cost() {
    let traces = traces(PolicyConfig::default());
    talk(&traces, "a", true, 2);
    let records = traces.get("a").unwrap();
    let hooks: Vec<_> = records.iter().map(|record| record.call.hook().name()).collect();
    let expected = ["on-prompt", "on-request", "on-step", "on-step", "on-tool-call", "on-finish"];
    assert_eq!(hooks, expected);
    assert!(records.iter().all(|record| record.sha256 == "ab".repeat(32)));
    let step = serde_json::to_string(&records[3]).unwrap();
    assert_eq!(
        step,
        format!(
            r#"{{"request":"a","profile":"agent","policy":"parrot","sha256":"{}","link":0,"shadow":false,"hook":"on-step","step":2,"input":{{"index":2,"phase":"answer","think_tokens":0,"answer_tokens":0,"think_left":0,"tokens":[987654321,987654322],"text":"{SECRET}","loop_found":null,"budget_reached":false}},"answer":[{{"inject":"{SECRET}"}},{{"close-thinking":"{SECRET}"}},{{"ban":{{"tokens":[987654321,987654322],"steps":1}}}},{{"stop":"{SECRET}"}}],"fuel":25,"nanoseconds":5,"imports":[{{"call":"kv.get","arguments":["{SECRET}"],"answer":"{SECRET}"}}]}}"#,
            "ab".repeat(32)
        )
    );
}

#[test]
fn nothing_that_was_said_is_in_a_masked_trace_but_how_long_it_was() {
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
        r#""answer[0].new":26"#,
        r#""input.params.hint":25"#,
        r#""input.user":25"#,
        r#""answer.note":25"#,
        r#""input.tokens":2"#,
        r#""answer[2].ban.tokens":2"#,
        r#""input.arguments":25"#,
        r#""answer.repair":25"#,
        r#""imports[0].answer":25"#,
    ] {
        assert!(masked.contains(length), "{length} in {masked}");
    }
    // But for the texts they are alike: the same policy decided the same.
    let shape = |text: &str| text.matches("close-thinking\":\"").count();
    assert_eq!((shape(&open), shape(&masked)), (2, 2));
}

#[test]
fn the_newest_requests_are_remembered_and_no_more() {
    let traces = traces(PolicyConfig { trace_requests: 3, ..PolicyConfig::default() });
    for id in ["a", "b", "c", "d"] {
        talk(&traces, id, true, 1);
    }
    assert!(traces.get("a").is_none());
    for id in ["b", "c", "d"] {
        assert_eq!(traces.get(id).unwrap().len(), 5, "{id}");
    }
    let off = self::traces(PolicyConfig { trace_requests: 0, ..PolicyConfig::default() });
    talk(&off, "a", true, 1);
    assert!(off.get("a").is_none());
}

#[test]
fn of_a_long_request_the_beginning_and_the_end_are_remembered_and_the_rest_is_counted() {
    let traces = traces(PolicyConfig::default());
    talk(&traces, "long", false, RECORDS as u32 + 10);
    let records = traces.get("long").unwrap();
    assert_eq!(records.len(), RECORDS + 1);
    let last = records.last().unwrap();
    assert_eq!(last.call.hook(), Hook::OnFinish);
    // Prompt, request, steps and the call of a tool, of which so many were recorded.
    assert_eq!(last.dropped, 13);
    assert!(serde_json::to_string(last).unwrap().ends_with(r#""dropped":13}"#));
}

#[test]
fn all_together_takes_no_more_than_its_bytes_and_the_newest_stay() {
    let traces = traces(PolicyConfig { trace_requests: 1000, ..PolicyConfig::default() });
    for id in 0..40 {
        let mut chain = parrot(traces.recorder(&id.to_string(), "agent", true));
        let step = Step { text: "x".repeat(500_000), ..Step::default() };
        chain.on_step(&step).unwrap();
        assert!(traces.bytes.load(Ordering::Relaxed) <= BYTES);
    }
    // Half a megabyte each of the step, three texts of the answer, and two of the import.
    assert!(traces.get("39").is_some() && traces.get("20").is_some());
    assert!(traces.get("0").is_none() && traces.get("15").is_none());
    let held = lock(&traces.newest).iter().map(|one| lock(&one.calls).bytes).sum::<usize>();
    assert_eq!(held, traces.bytes.load(Ordering::Relaxed));
}

#[test]
fn the_trace_file_gets_what_memory_got_and_is_appended_to() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    let config = || PolicyConfig { trace_file: file.clone(), ..PolicyConfig::default() };
    let mut expected = String::new();
    for (id, steps) in [("a", 3), ("b", 200)] {
        let traces = traces(config());
        talk(&traces, id, true, steps);
        expected += &lines(&traces.get(id).unwrap());
        // The last handle ends the thread, which first writes all that is queued.
        drop(traces);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
    }
    let nowhere = PolicyConfig { trace_file: folder.path().into(), ..PolicyConfig::default() };
    let error = Traces::new(&nowhere).err().unwrap().to_string();
    assert!(error.starts_with("policy.trace_file: "), "{error}");
    assert!(error.contains("cannot be opened for appending"), "{error}");
}

#[test]
fn why_a_policy_says_it_failed_is_hidden_and_what_the_host_found_is_not() {
    for (error, masked, length) in [
        (
            "policy `a`: on-step: failed: no swordfish; the native policy took over",
            "policy `a`: on-step: failed",
            41,
        ),
        (
            "policy `a`: on-step: used up its fuel of 7",
            "policy `a`: on-step: used up its fuel of 7",
            0,
        ),
    ] {
        let (mut told, mut lengths) = (Some(error.to_owned()), Lengths::default());
        mask::error(&mut told, &mut lengths);
        assert_eq!(told.as_deref(), Some(masked));
        assert_eq!(lengths.iter().map(|(_, length)| length).sum::<usize>(), length);
    }
}
