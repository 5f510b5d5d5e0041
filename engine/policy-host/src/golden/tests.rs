use super::case::Case;
use super::*;
use crate::config::PolicyConfig;
use crate::database::Storage;
use crate::sandbox::Host;

fn shipped(name: &str) -> Arc<Component> {
    let host = Host::new(&PolicyConfig::default(), &Storage::in_memory()).unwrap();
    Arc::new(Component::load(&host, name, crate::shipped::shipped(name).unwrap().0).unwrap())
}

/// The default policy closes reasoning over its budget.
const CLOSES: &str = r#"{"case":"closes","hook":"on-request","input":{"user":"Answer as JSON","can_reason":true,"context_left":8192},"answer":{"reasoning":true}}
{"hook":"on-step","input":{"phase":"Reasoning","budget_reached":true},"answer":[{"CloseReasoning":"**Final JSON:**\n\n```json\n"}]}

{"hook":"on-finish","input":{"reason":"stop"}}
{"case":"has nothing to do","hook":"on-step","answer":[]}"#;

fn problem(golden: &str) -> String {
    check_golden(&shipped("default"), golden).unwrap_err().to_string()
}

#[test]
fn a_file_passes_if_all_answers_match() {
    assert_eq!(check_golden(&shipped("default"), CLOSES).unwrap(), 2);
    let error = check_golden(&shipped("passthrough"), CLOSES).unwrap_err().to_string();
    assert_eq!(
        error,
        "policy `passthrough`: golden line 1 (case `closes`): on-request: the answer differs (- expected, \
         + found)\n    {\n  -   \"reasoning\": true\n  +   \"reasoning\": null\n    }\n\
         golden line 2 (case `closes` of line 1): on-step: the answer differs (- expected, + found)\n  - [\n  -   {\n  \
         -     \"CloseReasoning\": \"**Final JSON:**\\n\\n```json\\n\"\n  -   }\n  - ]\n  + []"
    );
}

#[test]
fn a_misspelled_key_is_an_error_with_its_line() {
    for (line, words) in [
        (r#"{"hook":"on-step","input":{"fase":"think"}}"#, "input.fase is not a field"),
        (
            r#"{"hook":"on-step","input":{"phase":"thought"}}"#,
            "input.phase: unknown variant `thought`",
        ),
        (r#"{"hook":"on-step","input":{"loop_found":{"period":1}}}"#, "missing field `repeats`"),
        (
            r#"{"hook":"on-request","input":{"params":[["a",1]]}}"#,
            "input.params[0][1]: is 1, expected a string",
        ),
        (r#"{"hook":"on-request","answer":{"budget":1}}"#, "answer.budget is not a field"),
        (
            r#"{"hook":"on-request","answer":{"sampling":{"top-p":1}}}"#,
            "answer.sampling.top-p is not a field",
        ),
        (r#"{"hook":"on-step","answer":[{"shout":"x"}]}"#, "answer[0]: unknown variant `shout`"),
        (
            r#"{"hook":"on-step","answer":[{"Ban":{"tokens":[1],"steps":2,"step":2}}]}"#,
            "step is not a field",
        ),
        (r#"{"hook":"on-steps"}"#, "unknown variant `on-steps`"),
        (r#"{"hook":"on-finish","answer":1}"#, "answer: is 1, expected a list"),
        (
            r#"{"hook":"on-step","input":{"index":"3"}}"#,
            "input.index: is \"3\", expected a whole number from 0 to 4294967295",
        ),
        (r#"{"hook":"on-step","input":{"loop_found":[]}}"#, "input.loop_found: "),
        (r#"{"hook":"on-step","input":5}"#, "is 5, expected an object"),
        (r#"{"hock":"on-step"}"#, "unknown field `hock`"),
        (r#"{"case":"x"}"#, "`hook` is missing"),
        (r#"{"hook":"on-step""#, "EOF"),
    ] {
        let error = problem(&format!("\n{CLOSES}\n{line}"));
        assert!(error.contains("golden line 7: ") && error.contains(words), "{line}: {error}");
    }
    assert!(problem("\n").ends_with("golden has no line with a hook"));
}

#[test]
fn a_failure_can_be_expected_and_is_reported_otherwise() {
    let host =
        Host::new(&PolicyConfig { fuel: 1_000, ..PolicyConfig::default() }, &Storage::in_memory());
    let bytes = crate::shipped::shipped("default").unwrap().0;
    let starved = Component::load(&host.unwrap(), "default", bytes).unwrap();
    let starved = Arc::new(starved);
    let long = "x ".repeat(4000);
    let line = format!(r#"{{"case":"long","hook":"on-request","input":{{"user":"{long}"}}}}"#);
    let error = check_golden(&starved, &line).unwrap_err().to_string();
    assert!(
        error.contains("(case `long`): on-request: failed: ") && error.contains("fuel"),
        "{error}"
    );
    let expected = line.replace("}}", r#"},"error":"fuel"}"#);
    assert_eq!(check_golden(&starved, &expected).unwrap(), 1);
    let error = problem(&expected);
    assert!(error.contains("expected a failure, got {\"reasoning\":"), "{error}");
}

#[test]
fn recorded_lines_are_grouped_by_request_policy_and_link() {
    let line = |request: &str, policy: &str, hook: &str| {
        format!(
            r#"{{"request":"{request}","profile":"p","policy":"{policy}","link":0,"shadow":false,"sha256":"","hook":"{hook}","fuel":1,"nanoseconds":2}}"#
        )
    };
    let text = [
        line("r", "a", "on-prompt"),
        line("r", "b", "on-prompt"),
        line("r", "a", "on-request"),
        line("s", "a", "on-request"),
        line("r", "b", "on-request"),
        line("r", "a", "on-step"),
        line("s", "a", "on-step"),
        line("s", "a", "on-request"),
    ]
    .join("\n");
    let mut golden = Golden::parse(&text).unwrap();
    let cases = |golden: &Golden| {
        let of = |case: &Case| {
            let lines: Vec<_> = case.lines.iter().map(|line| line.number).collect();
            (case.name.clone(), case.policy.clone().unwrap(), lines)
        };
        golden.cases.iter().map(of).collect::<Vec<_>>()
    };
    let case = |name: &str, policy: &str, lines: &[usize]| {
        (name.to_string(), policy.to_string(), lines.to_vec())
    };
    let expected = [
        case("r", "a", &[1, 3, 6]),
        case("r", "b", &[2, 5]),
        case("s", "a", &[4, 7]),
        case("s", "a", &[8]),
    ];
    assert_eq!(cases(&golden), expected);
    assert_eq!(golden.policies().into_iter().collect::<Vec<_>>(), ["a", "b"]);
    golden.retain_policy("b");
    assert_eq!(cases(&golden), expected[1..2]);
}

#[test]
fn an_incomplete_file_is_inexact() {
    assert_eq!(Golden::parse(CLOSES).unwrap().inexact(), None);
    let masked = CLOSES.replace(r#""input":{"phase""#, r#""masked":{},"input":{"phase""#);
    let masked = Golden::parse(&masked).unwrap();
    let told = masked.inexact().unwrap();
    assert!(told.starts_with("line 2: texts and tokens are masked; `trace_text"), "{told}");
    assert_eq!(
        (
            masked.without_expectation(),
            Golden::parse(r#"{"hook":"on-step"}"#).unwrap().without_expectation()
        ),
        (0, 1)
    );
    let missing = Golden::parse(&format!("{CLOSES}\n{{\"dropped\":7}}")).unwrap();
    assert_eq!(missing.inexact(), Some("line 6: 7 calls are missing"));
}

/// The note of `rules`, "`sorry` is 0 tokens of this model", stood in the difference, and a test has no model.
#[test]
fn a_difference_says_that_a_text_has_no_tokens_without_a_model() {
    let line = r#"{"hook":"on-request","input":{"params":[["rules","[[rule]]\ndo = { ban = \"sorry\" }"]]},"answer":{"note":null}}"#;
    let rules = shipped("rules");
    let error = check_golden(&rules, line).unwrap_err().to_string();
    let expected = "no tokenizer in a test, so these texts have no tokens: \"sorry\", \" sorry\"; give them in a \
                    line of the case, such as \"given\": {\"tokens\": {\"sorry\": [7]}}";
    assert!(error.contains(expected), "{error}");
    let given = line.replacen('{', "{\"given\":{\"tokens\":{\"sorry\":[7],\" sorry\":[8]}},", 1);
    assert_eq!(check_golden(&rules, &given).unwrap(), 1);
}
