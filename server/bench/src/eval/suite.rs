//! Questions from a file: one JSON object a line, with the rule that grades its answer.
//!
//! `server/model/training/suite.py` writes such files. Every line is checked before the first request:
//! a file with a fault runs nothing.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;

use super::grade;
use super::sandbox::{self, Case};
use super::task::Question;
use crate::scenario::Verdict;

/// Most bytes of a file; 1,000 problems take less than 1 MB.
const MOST_BYTES: u64 = 256 << 20;

/// The questions of one task of a file, in the order of the file.
pub struct FileTask {
    /// Its name.
    pub name: String,
    /// Whether an answer is code that the sandbox runs.
    pub runs_code: bool,
    /// The questions.
    pub questions: Vec<Question>,
}

/// A line of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    task: String,
    /// What the results say of the item besides; no field of it is interpreted.
    #[serde(default)]
    about: Option<Value>,
    messages: Vec<Message>,
    grade: Rule,
}

/// A message of the conversation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Message {
    role: Role,
    content: String,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Role {
    System,
    User,
    Assistant,
}

/// A grader of [`grade`] or the sandbox, with its arguments.
#[derive(Deserialize)]
#[serde(tag = "rule", rename_all = "snake_case", deny_unknown_fields)]
enum Rule {
    LastNumber { expected: i64 },
    Exactly { expected: String, is_loose: bool },
    Phrase { expected: String },
    LastOf { candidates: Vec<String>, expected: String },
    Json { expected: Value },
    Code { cases: Vec<Case> },
}

impl Rule {
    fn check(&self) -> Result<()> {
        match self {
            Rule::Phrase { expected } | Rule::Exactly { expected, .. } => {
                ensure!(!grade::normal(expected).is_empty(), "grade.expected: has no word");
            }
            Rule::LastOf { candidates, expected } => {
                ensure!(
                    candidates.contains(expected),
                    "grade.expected: {expected:?} is not one of grade.candidates"
                );
            }
            Rule::Code { cases } => ensure!(!cases.is_empty(), "grade.cases: is empty"),
            Rule::LastNumber { .. } | Rule::Json { .. } => {}
        }
        Ok(())
    }

    fn grade(&self, answer: &str) -> Verdict {
        match self {
            Rule::LastNumber { expected } => grade::last_number(answer, *expected),
            Rule::Exactly { expected, is_loose } => grade::exactly(answer, expected, *is_loose),
            Rule::Phrase { expected } => grade::phrase(answer, expected),
            Rule::LastOf { candidates, expected } => {
                let candidates: Vec<&str> = candidates.iter().map(String::as_str).collect();
                grade::last_of(answer, &candidates, expected)
            }
            Rule::Json { expected } => grade::json(answer, expected),
            Rule::Code { cases } => sandbox::run(grade::block(answer), cases),
        }
    }
}

/// The tasks of a file, in the order of their first lines.
///
/// # Errors
/// If the file cannot be read, is too large, or a line is not a question: the error names the line.
pub fn read(path: &Path) -> Result<Vec<FileTask>> {
    let context = || format!("--suite {}", path.display());
    let mut text = String::new();
    let file = File::open(path).with_context(context)?;
    let size = file.take(MOST_BYTES + 1).read_to_string(&mut text).with_context(context)?;
    ensure!(size as u64 <= MOST_BYTES, "--suite {}: exceeds {MOST_BYTES} bytes", path.display());
    parse(&text).with_context(context)
}

fn parse(text: &str) -> Result<Vec<FileTask>> {
    let mut tasks: Vec<FileTask> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let (name, runs_code, question) =
            question(line).with_context(|| format!("line {}", number + 1))?;
        let at = match tasks.iter().position(|task| task.name == name) {
            Some(at) => at,
            None => {
                tasks.push(FileTask { name, runs_code: false, questions: Vec::new() });
                tasks.len() - 1
            }
        };
        tasks[at].runs_code |= runs_code;
        tasks[at].questions.push(question);
    }
    ensure!(!tasks.is_empty(), "has no lines");
    Ok(tasks)
}

/// The task of a line, whether its answer is code, and the question.
fn question(line: &str) -> Result<(String, bool, Question)> {
    let Line { task, about, messages, grade } = serde_json::from_str(line)?;
    ensure!(!task.is_empty(), "task: is empty");
    if messages.last().is_none_or(|message| message.role != Role::User) {
        bail!("messages: the last one is not of role user");
    }
    grade.check()?;
    let messages = messages.into_iter().map(|Message { role, content }| match role {
        Role::System => crate::client::system(content),
        Role::User => crate::client::user(content),
        Role::Assistant => crate::client::assistant(content),
    });
    let runs_code = matches!(grade, Rule::Code { .. });
    let messages = messages.collect();
    let question = Question { messages, about, grade: Box::new(move |answer| grade.grade(answer)) };
    Ok((task, runs_code, question))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn line(grade: &Value) -> String {
        let messages = json!([{"role": "user", "content": "What is 3 + 4?"}]);
        json!({"task": "chain", "about": {"level": 2}, "messages": messages, "grade": grade})
            .to_string()
    }

    /// Each rule accepts a right answer and refuses a wrong one.
    #[test]
    fn rules_of_a_file_are_the_graders_of_the_evaluation() {
        let cases = json!([{"arguments": [[1, 2]], "expected": 3}]);
        let rules = [
            (json!({"rule": "last_number", "expected": 7}), "3 + 4 = 7.", "3 + 4 = 8."),
            (json!({"rule": "exactly", "expected": "7", "is_loose": true}), " 7. ", "It is 7."),
            (json!({"rule": "exactly", "expected": "7.", "is_loose": false}), "7.", "7"),
            (json!({"rule": "phrase", "expected": "3 May"}), "On 3 May.", "On 13 May."),
            (
                json!({"rule": "last_of", "candidates": ["Anna", "Boris"], "expected": "Anna"}),
                "Not Boris: Anna.",
                "Not Anna: Boris.",
            ),
            (
                json!({"rule": "json", "expected": {"answer": 7}}),
                "```json\n{\"answer\": 7}\n```",
                "{\"answer\": 8}",
            ),
            (
                json!({"rule": "code", "cases": cases}),
                "```python\ndef f(xs):\n    return sum(xs)\n```",
                "def f(xs):\n    return max(xs)",
            ),
        ];
        for (rule, right, wrong) in rules {
            let tasks = parse(&line(&rule)).unwrap();
            let [FileTask { name, runs_code, questions }] = &tasks[..] else { panic!("{rule}") };
            assert_eq!((name.as_str(), questions.len()), ("chain", 1));
            assert_eq!(*runs_code, rule["rule"] == "code");
            assert_eq!(questions[0].about, Some(json!({"level": 2})));
            assert_eq!((questions[0].grade)(right), Ok(()), "{rule}");
            assert!((questions[0].grade)(wrong).is_err(), "{rule}");
        }
    }

    #[test]
    fn a_fault_is_named_with_its_line() {
        let good = line(&json!({"rule": "last_number", "expected": 7}));
        let other = good.replace("chain", "date");
        let tasks = parse(&format!("{good}\n{other}\n{good}\n")).unwrap();
        let counts: Vec<_> = tasks.iter().map(|task| (&*task.name, task.questions.len())).collect();
        assert_eq!(counts, [("chain", 2), ("date", 1)]);
        for (wrong, fault) in [
            (good.replace("last_number", "guess"), "unknown variant `guess`"),
            (good.replace("\"expected\":7", "\"expected\":7,\"or\":8"), "unknown field `or`"),
            (good.replace("about", "abuot"), "unknown field `abuot`"),
            (good.replace("\"user\"", "\"assistant\""), "the last one is not of role user"),
            (good.replace("\"chain\"", "\"\""), "task: is empty"),
            (
                line(&json!({"rule": "last_of", "candidates": ["Anna"], "expected": "Boris"})),
                "\"Boris\" is not one of grade.candidates",
            ),
            (line(&json!({"rule": "phrase", "expected": "!"})), "grade.expected: has no word"),
            (line(&json!({"rule": "code", "cases": []})), "grade.cases: is empty"),
            (String::new(), "EOF"),
        ] {
            let error = parse(&format!("{good}\n{wrong}\n{good}")).err().expect("a fault");
            let error = format!("{error:#}");
            assert!(error.starts_with("line 2: ") && error.contains(fault), "{error}");
        }
        assert!(parse("").err().is_some_and(|error| error.to_string() == "has no lines"));
        let missing = read(Path::new("/nowhere/suite.jsonl")).err().expect("no file");
        assert!(
            format!("{missing:#}").starts_with("--suite /nowhere/suite.jsonl: "),
            "{missing:#}"
        );
    }
}
