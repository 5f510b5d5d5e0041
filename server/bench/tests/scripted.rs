//! The suite and the evaluation against a scripted server: what goes wrong is shown, never silent.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use serde_json::{Value, json};

/// What the scripted server does with a chat request.
enum Act {
    /// Streams a right answer; the options say what is missing.
    Answer { text: String, done: bool, finish: bool, usage: bool },
    /// Answers with a status, as an overloaded or broken server.
    Refuse(&'static str, &'static str),
    /// Sends a piece and closes the connection within a chunk.
    BreakOff,
    /// Answers with an object instead of a stream.
    NoStream,
}

impl Act {
    fn right(text: impl Into<String>) -> Self {
        Self::Answer { text: text.into(), done: true, finish: true, usage: true }
    }
}

type Script = Arc<dyn Fn(&Value) -> Act + Send + Sync>;

/// Starts a server that acts by a script, and returns its address.
fn serve(script: impl Fn(&Value) -> Act + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let script: Script = Arc::new(script);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, script) = (stream.unwrap(), script.clone());
            // A client that hangs up makes writing fail.
            std::thread::spawn(move || answer(stream, &script));
        }
    });
    address
}

fn answer(mut stream: TcpStream, script: &Script) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut first = String::new();
    lines.read_line(&mut first)?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        lines.read_line(&mut line)?;
        let line = line.trim().to_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    lines.read_exact(&mut body)?;
    let path = first.split(' ').nth(1).unwrap_or_default();
    let plain = |status: &str, body: &str| {
        format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
             connection: close\r\n\r\n{body}",
            body.len()
        )
    };
    let models = r#"{"data": [{"id": "scripted", "context": 6000}]}"#;
    if path == "/v1/models" {
        return stream.write_all(plain("200 OK", models).as_bytes());
    }
    if path != "/v1/chat/completions" {
        return stream.write_all(plain("404 Not Found", "{}").as_bytes());
    }
    let body: Value = serde_json::from_slice(&body).unwrap();
    let prompt = body["messages"].to_string().len() + body["tools"].to_string().len();
    match script(&body) {
        Act::Refuse(status, message) => {
            let error = json!({"error": {"message": message}}).to_string();
            stream.write_all(plain(status, &error).as_bytes())
        }
        Act::NoStream => stream.write_all(plain("200 OK", "{\"choices\": []}").as_bytes()),
        Act::BreakOff => {
            head(&mut stream)?;
            piece(&mut stream, &json!({"choices": [{"delta": {"content": "The"}}]}))?;
            stream.write_all(b"ff\r\ndata: {\"choi")
        }
        Act::Answer { text, done, finish, usage } => {
            head(&mut stream)?;
            for word in text.split_inclusive(' ') {
                piece(&mut stream, &json!({"choices": [{"delta": {"content": word}}]}))?;
            }
            if finish {
                piece(&mut stream, &json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}))?;
            }
            if usage {
                let usage = json!({"prompt_tokens": prompt / 4, "completion_tokens": 7});
                piece(&mut stream, &json!({"choices": [], "usage": usage}))?;
            }
            if done {
                chunk(&mut stream, "data: [DONE]\n\n")?;
            }
            stream.write_all(b"0\r\n\r\n")
        }
    }
}

fn head(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\
          connection: close\r\n\r\n",
    )
}

fn piece(stream: &mut TcpStream, event: &Value) -> std::io::Result<()> {
    chunk(stream, &format!("data: {event}\n\n"))
}

fn chunk(stream: &mut TcpStream, text: &str) -> std::io::Result<()> {
    stream.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes())
}

fn last_text(body: &Value) -> &str {
    body["messages"].as_array().unwrap().last().unwrap()["content"].as_str().unwrap()
}

/// The right answer to a question for a capital; other text is repeated, which is a right answer to
/// many questions: names and codes are in it.
fn right_answer(body: &Value) -> Act {
    let text = last_text(body);
    const CAPITALS: &[(&str, &str)] = &[
        ("France", "Paris"),
        ("Italy", "Rome"),
        ("Norway", "Oslo"),
        ("Egypt", "Cairo"),
        ("Peru", "Lima"),
        ("Japan", "Tokyo"),
        ("India", "Delhi"),
        ("Ecuador", "Quito"),
        ("Germany", "Berlin"),
        ("Spain", "Madrid"),
        ("Austria", "Vienna"),
        ("Ireland", "Dublin"),
        ("Greece", "Athens"),
        ("Portugal", "Lisbon"),
        ("Poland", "Warsaw"),
        ("Cuba", "Havana"),
        ("Kenya", "Nairobi"),
        ("Canada", "Ottawa"),
    ];
    match CAPITALS.iter().find(|(country, _)| text.contains(country)) {
        Some((country, capital)) => Act::right(format!("The capital of {country} is {capital}.")),
        None => Act::right(text),
    }
}

fn bench(arguments: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_steersman-bench"))
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap()
}

/// Output and errors of a run, and whether it succeeded.
fn text(output: &Output) -> (String, String, bool) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr), output.status.success())
}

/// The short questions of the quick suite against one server.
fn short(address: &str, more: &[&str]) -> (String, String, bool) {
    let folder = tempfile::tempdir().unwrap();
    let server = format!("one={address}");
    let arguments =
        [&["suite", "--quick", "--scenario", "short", "--against", &server], more].concat();
    text(&bench(&arguments, folder.path()))
}

#[test]
fn a_right_server_passes_the_check_and_its_files_are_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (serve(right_answer), serve(right_answer));
    let (one, two) = (format!("one={one}"), format!("two={two}"));
    let arguments = [
        "suite",
        "--quick",
        "--check",
        "--rounds",
        "2",
        "--seed",
        "5",
        "--scenario",
        "short,session,edit,cancel",
        "--against",
        &one,
        "--against",
        &two,
    ];
    let (out, err, success) = text(&bench(&arguments, folder.path()));
    assert!(success, "{out}\n{err}");
    assert!(out.contains("8/8") && out.contains("loses"), "{out}");
    let report = folder.path().join("bench-report");
    let lines = std::fs::read_to_string(report.join("results.jsonl")).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&lines[0]["kind"], &lines[0]["schema"]), (&json!("run"), &json!(1)));
    assert_eq!(lines[0]["servers"][0]["context"], 6000);
    assert_eq!(lines[0]["servers"][0]["counts_tokens"], true);
    let turns: Vec<(u64, u64, &str)> = lines
        .iter()
        .filter(|line| line["kind"] == "sample" && line["case"] == "turn 1")
        .map(|line| (line["round"].as_u64(), line["turn"].as_u64(), line["server"].as_str()))
        .map(|(round, turn, server)| (round.unwrap(), turn.unwrap(), server.unwrap()))
        .collect();
    assert_eq!(turns, [(0, 0, "one"), (0, 1, "two"), (1, 0, "two"), (1, 1, "one")]);
    assert!(report.join("short-ttft_s.svg").is_file());

    let results = report.join("results.jsonl");
    let results = results.to_str().unwrap();
    let (out, err, success) = text(&bench(&["diff", results, results], folder.path()));
    assert!(success && out.contains("no clear difference, p = 1.000 (8 pairs)"), "{out}\n{err}");
    let (_, err, success) = text(&bench(&["report", results, "--out", "again"], folder.path()));
    assert!(success, "{err}");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    assert_eq!(read(&folder.path().join("again/report.html")), read(&report.join("report.html")));
}

#[test]
fn wrong_answers_fail_the_check_only() {
    let script = |_: &Value| Act::right("I do not know.");
    let (out, _, success) = short(&serve(script), &[]);
    assert!(success && out.contains("0/4") && out.contains("wrong: one: short"), "{out}");
    let (_, err, success) = short(&serve(script), &["--check"]);
    assert!(!success && err.contains("4 of 4 replies are wrong or missing"), "{err}");
}

/// The first requests, which count tokens, are answered; the script begins with the questions.
fn only_questions(act: fn() -> Act) -> impl Fn(&Value) -> Act {
    move |body| if last_text(body).starts_with("Hello") { Act::right("Hello.") } else { act() }
}

#[test]
fn refusals_and_broken_streams_are_counted_as_failures() {
    type Case = (fn() -> Act, &'static str);
    let cases: [Case; 5] = [
        (
            || Act::Refuse("429 Too Many Requests", "the queue is full"),
            "status 429: the queue is full",
        ),
        (|| Act::Refuse("500 Internal Server Error", "oops"), "status 500: oops"),
        (|| Act::BreakOff, "the stream broke"),
        (|| Act::NoStream, "not a stream"),
        (
            || Act::Answer { text: "Rome".into(), done: false, finish: false, usage: false },
            "without finish_reason and [DONE]",
        ),
    ];
    for (act, problem) in cases {
        let (out, err, success) = short(&serve(only_questions(act)), &[]);
        assert!(
            success && out.contains("4 failed") && out.contains(problem),
            "{problem}: {out}\n{err}"
        );
        let (_, err, success) = short(&serve(only_questions(act)), &["--check"]);
        assert!(!success && err.contains(problem), "{problem}: {err}");
    }
}

#[test]
fn a_stream_without_done_and_a_server_without_usage_are_noted() {
    let without = |body: &Value| match right_answer(body) {
        Act::Answer { text, .. } => Act::Answer { text, done: false, finish: true, usage: false },
        other => other,
    };
    let (out, err, success) = short(&serve(without), &["--check"]);
    assert!(success, "{out}\n{err}");
    assert!(out.contains("note: one: short capitals: the stream ended without [DONE]"), "{out}");
    assert!(out.contains("one reports no usage: its tokens are counted from the pieces"), "{out}");
}

#[test]
fn what_does_not_fit_the_context_is_skipped_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let server = format!("one={}", serve(right_answer));
    let arguments = ["suite", "--scenario", "tools,needle", "--rounds", "1", "--against", &server];
    let (out, err, _) = text(&bench(&arguments, folder.path()));
    assert!(out.contains("skipped: one: tools schema: needs"), "{out}\n{err}");
    assert!(out.contains("skipped: one: needle 8000 tokens: needs"), "{out}\n{err}");
    assert!(out.contains("needle 500 tokens"), "{out}\n{err}");
}

#[test]
fn a_server_that_is_not_there_is_an_error_that_names_it() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (_, err, success) = short(&format!("http://127.0.0.1:{port}"), &[]);
    assert!(!success && err.contains("one does not list its models"), "{err}");
    let (out, _, success) = text(&bench(&["suite", "--list"], Path::new(".")));
    assert!(success && out.contains("needle"), "{out}");
    let (_, err, success) = short("127.0.0.1:1", &[]);
    assert!(!success && err.contains("begins with http://"), "{err}");
    let (_, err, success) = short(&serve(right_answer), &["--model", "two=x"]);
    assert!(!success && err.contains("--model two=..: no server has this name"), "{err}");
}

#[test]
fn the_evaluation_grades_and_compares_runs() {
    let folder = tempfile::tempdir().unwrap();
    // Knows capitals of nothing but repeats: right for words to repeat, wrong with reasoning on.
    let server = serve(|body| match &body["chat_template_kwargs"]["enable_thinking"] {
        Value::Bool(true) => Act::Refuse("500 Internal Server Error", "oops"),
        _ => Act::right(last_text(body).rsplit(": ").next().unwrap_or_default()),
    });
    let server = format!("one={server}");
    let arguments = [
        "eval",
        "--against",
        &server,
        "--items",
        "12",
        "--task",
        "instructions,needle",
        "--matrix",
        "thinking",
    ];
    let (out, err, success) = text(&bench(&arguments, folder.path()));
    assert!(success, "{out}\n{err}");
    assert!(out.contains("one thinking off") && out.contains("12 failed"), "{out}");
    assert!(out.contains("McNemar") && out.contains("24 equal items"), "{out}");
    let lines = std::fs::read_to_string(folder.path().join("eval.jsonl")).unwrap();
    assert_eq!(lines.lines().count(), 1 + 48);
    assert!(lines.contains("\"correct\":true") && lines.contains("status 500: oops"), "{lines}");
    let (out, err, success) = text(&bench(&["diff", "eval.jsonl", "eval.jsonl"], folder.path()));
    assert!(success && out.contains("0 right only in the first"), "{out}\n{err}");
}

#[test]
fn the_questions_of_a_file_are_asked_and_graded_by_its_rules() {
    let folder = tempfile::tempdir().unwrap();
    let line = |task: &str, sum: u32| {
        let messages = json!([{"role": "user", "content": "What is 3 + 4?"}]);
        let grade = json!({"rule": "last_number", "expected": sum});
        json!({"task": task, "about": {"level": 2}, "messages": messages, "grade": grade})
    };
    let suite = format!("{}\n{}\n{}\n", line("chain", 7), line("chain", 8), line("date", 7));
    std::fs::write(folder.path().join("suite.jsonl"), &suite).unwrap();
    let server = format!("one={}", serve(|_| Act::right("3 + 4 = 7.")));
    let ask = |more: &[&str]| {
        let arguments =
            [&["eval", "--against", &server, "--suite", "suite.jsonl"][..], more].concat();
        text(&bench(&arguments, folder.path()))
    };
    let (out, err, success) = ask(&[]);
    assert!(success && out.contains("1/2 [") && out.contains("2/3 ["), "{out}\n{err}");
    let lines = std::fs::read_to_string(folder.path().join("eval.jsonl")).unwrap();
    assert_eq!(lines.matches("\"about\":{\"level\":2}").count(), 3, "{lines}");
    let (out, err, success) = ask(&["--items", "1", "--task", "chain", "--out", "one.jsonl"]);
    assert!(success && out.contains("1/1 [") && !out.contains("date"), "{out}\n{err}");

    let (_, err, success) = ask(&["--seed", "2"]);
    assert!(!success && err.contains("cannot be used with"), "{err}");
    let (_, err, success) = ask(&["--task", "needle"]);
    assert!(!success && err.contains("is not one of chain, date"), "{err}");
    // Nothing runs if one line is wrong.
    std::fs::write(folder.path().join("suite.jsonl"), suite.replace("last_number", "last"))
        .unwrap();
    let (_, err, success) = ask(&["--out", "none.jsonl"]);
    assert!(!success && err.contains("line 1") && err.contains("unknown variant"), "{err}");
    assert!(!folder.path().join("none.jsonl").exists());
}

#[test]
fn neither_mlx_nor_the_engine_is_linked() {
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--package", "steersman-bench", "--prefix", "none"])
        .output()
        .unwrap();
    let tree = String::from_utf8(tree.stdout).unwrap();
    assert!(tree.contains("rusqlite v"), "{tree}");
    let is_ours = |line: &str| line.starts_with("mlx") || line.starts_with("steersman-engine");
    assert!(!tree.lines().any(is_ours), "{tree}");
}
