//! Ranks that are processes, over MLX's ring.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Time after which the processes are believed to wait for each other: in one of many starts, one waits for ever for the next
/// one to connect, and no deadline of MLX ends that.
const PATIENCE: Duration = Duration::from_secs(240);

/// What the command with `arguments` writes on two ranks, which it has in `data`.
fn on_two_ranks(arguments: &[&str], data: &Path) -> String {
    let run = || {
        let mut child = Command::new(env!("CARGO_BIN_EXE_steersman"))
            .args(arguments)
            .args(["--device", "cpu", "--ranks", "2", "--over", "ring", "--data-dir"])
            .arg(data)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > end {
                child.kill().unwrap();
                child.wait().unwrap();
                return None;
            }
            thread::sleep(Duration::from_millis(50));
        };
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        Some((status, text))
    };
    // In one of many starts the ranks do not connect.
    let ended = (0..3).find_map(|_| run().filter(|(status, _)| status.success()));
    let (_, text) = ended.expect("the ranks connect, and the command succeeds");
    // Nothing is left of them.
    let left = std::fs::read_dir(data).unwrap();
    let left = left
        .filter(|file| file.as_ref().unwrap().file_name().to_string_lossy().starts_with("ranks-"));
    assert_eq!(left.count(), 0);
    text
}

/// Replies with drafts that are rejected, resumed state and batches are those of one process.
#[test]
fn ranks_that_are_processes_reply_as_one_process() {
    let data = tempfile::tempdir().unwrap();
    let prompts = data.path().join("prompts.json");
    std::fs::write(&prompts, r#"["Copy this text: owl, Rome, Anna."]"#).unwrap();
    // All ranks compute the same bits.
    let config = data.path().join("compare.toml");
    std::fs::write(&config, "[model]\ncompare_ranks = 4\n").unwrap();
    let (prompts, config) = (prompts.display().to_string(), config.display().to_string());
    let arguments = ["verify", "--tokens", "6", "--prompts", &prompts, "--config", &config];
    let table = on_two_ranks(&arguments, data.path());
    assert!(table.contains("f32, 2 ranks"), "{table}");
    let rows: Vec<_> = table.lines().filter(|line| line.contains("1/1")).collect();
    assert!(rows.len() > 8, "{table}");
}

/// The file says how many ranks there were.
#[test]
fn passes_of_a_model_are_measured_on_ranks() {
    let data = tempfile::tempdir().unwrap();
    let json = data.path().join("passes.json").display().to_string();
    let sizes = ["--prefill", "16", "--contexts", "16", "--rows", "2", "--streams", "2"];
    let arguments = [&["bench", "model", "--rounds", "1", "--json", &json][..], &sizes].concat();
    let table = on_two_ranks(&arguments, data.path());
    for name in ["prefill of 16", "step after 16", "sum of 1 row", "sum of 512 rows"] {
        assert!(table.contains(name), "{name}: {table}");
    }
    let report: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert_eq!((&report["ranks"], report["measured"].as_array().unwrap().len()), (&json!(2), 7));
}

/// Time in which a server is there again after all its ranks have ended, beside a compiler on all cores.
const AGAIN: Duration = Duration::from_secs(120);

/// Time in which a client hears that a rank is lost. Signs of life count for three seconds.
const ERROR: Duration = Duration::from_secs(5);

/// A server, or a machine that joins one, with what it logs.
struct Program {
    process: Child,
    url: String,
    log: Receiver<String>,
    /// The processes of its ranks, in the order in which they were started.
    started: RefCell<Vec<String>>,
    data: tempfile::TempDir,
}

impl Program {
    /// A server that is ready.
    fn serve(arguments: &[&str]) -> Self {
        Self::start(&[&["serve", "--port", "0"], arguments].concat()).ready()
    }

    fn start(arguments: &[&str]) -> Self {
        let data = tempfile::tempdir().unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_steersman"))
            .args(arguments)
            .args(["--device", "cpu", "--data-dir"])
            .arg(data.path())
            .env_remove("STEERSMAN_CONFIG")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let (sender, log) = channel();
        thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let (url, started) = (String::new(), RefCell::default());
        Self { process, url, log, started, data }
    }

    fn ready(mut self) -> Self {
        let ready = self.logged("models=");
        let address = value(&ready, "address");
        // `chat` and `run` find it.
        let announced = steersman::address::read(self.data.path());
        assert_eq!(announced, [address.parse().unwrap()]);
        self.url = format!("http://{address}");
        self
    }

    fn signal(&self, name: &str) {
        assert!(signal(&self.process.id().to_string(), name));
    }

    /// The next line of the log that contains `words`.
    fn logged(&self, words: &str) -> String {
        let end = Instant::now() + AGAIN;
        let mut seen = String::new();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.log.recv_timeout(left) {
                Ok(line) => {
                    if line.contains("rank started") {
                        self.started.borrow_mut().push(value(&line, "process"));
                    }
                    if line.contains(words) {
                        return line;
                    }
                    writeln!(seen, "{line}").unwrap();
                }
                Err(error) => panic!("no line has {words:?} ({error}):\n{seen}"),
            }
        }
    }

    fn reply(&self, question: &str) -> Option<Value> {
        let text = ask(&self.url, &chat(question, 24)).ok()?.read_to_string().ok()?;
        let reply: Value = serde_json::from_str(&text).unwrap();
        Some(reply["choices"][0]["message"].clone())
    }

    /// The first reply to `question` that the server gives when it is there again.
    fn reply_again(&self, question: &str) -> Value {
        let end = Instant::now() + AGAIN;
        while Instant::now() < end {
            if let Some(reply) = self.reply(question) {
                return reply;
            }
            thread::sleep(Duration::from_millis(100));
        }
        panic!("the server is not there again");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn ask(url: &str, body: &Value) -> Result<ureq::Body, ureq::Error> {
    let url = format!("{url}/v1/chat/completions");
    let request = ureq::post(url).header("content-type", "application/json");
    Ok(request.send(&body.to_string())?.into_body())
}

fn chat(question: &str, tokens: usize) -> Value {
    let messages = json!([{"role": "user", "content": question}]);
    json!({"messages": messages, "max_tokens": tokens, "temperature": 0})
}

/// What `line` of a log has as `name`.
fn value(line: &str, name: &str) -> String {
    let (_, rest) = line.split_once(&format!("{name}=")).unwrap_or_else(|| panic!("{line}"));
    rest.split_whitespace().next().unwrap_or_default().to_owned()
}

fn signal(process: &str, name: &str) -> bool {
    let mut kill = Command::new("kill");
    kill.args([&format!("-{name}"), process]).stderr(Stdio::null()).status().unwrap().success()
}

const QUESTIONS: [&str; 3] =
    ["What is the capital of Italy?", "Translate to French: the red house", "Who are you?"];

/// Also after requests that were cancelled, and after signals to its ranks, which service managers send.
#[test]
fn a_server_over_ranks_replies_as_one_process() {
    let alone = Program::serve(&[]);
    let mut ranks = Program::serve(&["--ranks", "2", "--over", "ring"]);
    for question in QUESTIONS {
        assert_eq!(ranks.reply(question).unwrap(), alone.reply(question).unwrap());
    }
    // Clients leave after each seventh piece.
    for pieces in (0..35).step_by(7) {
        let mut body = chat("Write a story about a fox.", 200);
        body["stream"] = true.into();
        let stream = ask(&ranks.url, &body).unwrap().into_reader();
        assert_eq!(BufReader::new(stream).lines().take(2 * pieces).count(), 2 * pieces);
        assert_eq!(ranks.reply(QUESTIONS[0]), alone.reply(QUESTIONS[0]), "after {pieces} pieces");
    }
    // The parent's end is that of its ranks, whose signals count for nothing.
    ranks.signal("TERM");
    assert_eq!(ranks.process.wait().unwrap().code(), Some(0));
}

/// Whatever ends or stops, and which rank it is: its client hears of it soon, and the server is there again by itself.
#[test]
fn a_rank_that_dies_or_freezes_is_an_error_within_seconds_and_all_start_again() {
    let server = Program::serve(&["--ranks", "2", "--over", "ring"]);
    let before = server.reply(QUESTIONS[0]).unwrap();
    let long = "fox ".repeat(3000);
    for (rank, name, is_in_prompt) in
        [(1, "KILL", false), (1, "STOP", true), (0, "KILL", true), (0, "STOP", false)]
    {
        let what = format!("SIG{name} of rank {rank}, in a prompt: {is_in_prompt}");
        let processes = server.started.take();
        let victim = &processes[rank];
        let mut body = chat(if is_in_prompt { &long } else { "Write a story about a fox." }, 2000);
        body["stream"] = true.into();
        let began = thread::scope(|scope| {
            let url = &server.url;
            let asked = scope.spawn(move || {
                let mut text = String::new();
                let read = ask(url, &body).map(|body| {
                    body.into_reader().read_to_string(&mut text).is_ok() && text.contains("[DONE]")
                });
                (read.is_ok_and(|complete| complete), Instant::now(), text)
            });
            thread::sleep(Duration::from_millis(700));
            let began = Instant::now();
            assert!(!asked.is_finished(), "{what}: the reply was too short");
            assert!(signal(victim, name), "{what}");
            let (complete, ended, text) = asked.join().unwrap();
            assert!(!complete, "{what}: {text}");
            assert!(ended - began < ERROR, "{what}: an error after {:?}", ended - began);
            began
        });
        assert_eq!(server.reply_again(QUESTIONS[0]), before, "{what}");
        println!("{what}: there again after {:?}", began.elapsed());
        server.logged("models=");
        for process in &processes {
            assert!(!signal(process, "0"), "{what}: process {process} is left");
        }
    }
}

/// As on two machines: each has a parent, a data folder and a port of its own.
#[test]
fn a_machine_that_joins_computes_a_rank_whenever_the_server_runs() {
    let folder = tempfile::tempdir().unwrap();
    let [key, other] = ["key", "other"].map(|name| folder.path().join(name).display().to_string());
    std::fs::write(&key, "a key of sixteen letters\n").unwrap();
    std::fs::write(&other, "another key of letters").unwrap();
    let alone = Program::serve(&[]).reply(QUESTIONS[0]).unwrap();

    let waiting = ["--wait-for", "1", "--rank-key", &key, "--rank-address", "127.0.0.1:0"];
    let server =
        Program::start(&[&["serve", "--port", "0", "--over", "ring"][..], &waiting].concat());
    let address = value(&server.logged("waiting for machines"), "address");
    let join = |key: &str| Program::start(&["join", &address, "--rank-key", key]);
    let mut stranger = join(&other);
    stranger.logged("the server has another key");
    assert_eq!(stranger.process.wait().unwrap().code(), Some(1));
    let first = join(&key);
    let server = server.ready();
    assert_eq!(server.reply(QUESTIONS[0]).unwrap(), alone);

    // The process of its rank dies.
    first.logged("rank started");
    assert!(signal(&first.started.take()[0], "KILL"));
    assert_eq!(server.reply_again(QUESTIONS[0]), alone);

    // The machine freezes, and another one takes its place.
    first.logged("rank started");
    let began = thread::scope(|scope| {
        let body = chat("Write a story about a fox.", 2000);
        let url = &server.url;
        let asked = scope.spawn(move || ask(url, &body).is_ok());
        thread::sleep(Duration::from_millis(700));
        first.signal("STOP");
        let began = Instant::now();
        assert!(!asked.join().unwrap());
        began
    });
    assert!(began.elapsed() < ERROR, "an error after {:?}", began.elapsed());
    let mut second = join(&key);
    assert_eq!(server.reply_again(QUESTIONS[0]), alone);
    first.signal("CONT");
    first.logged("a machine for each of its ranks");
    let old = first.started.take();
    assert!(!signal(&old[0], "0"), "the process of an earlier attempt is left");

    // It joins when there is a place, and the next server at the same address.
    second.signal("TERM");
    assert_eq!(second.process.wait().unwrap().code(), Some(0));
    assert_eq!(server.reply_again(QUESTIONS[0]), alone);
    drop(server);
    first.logged("the connection to the server has ended");
    let at = ["--rank-address", &address];
    let next = Program::start(
        &[&["serve", "--port", "0", "--over", "ring"][..], &waiting[..4], &at].concat(),
    );
    assert_eq!(next.ready().reply(QUESTIONS[0]).unwrap(), alone);
}
