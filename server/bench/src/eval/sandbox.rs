//! Runs a function that a model wrote.
//!
//! The code runs in a Python process of its own (`sandbox.py`): without an environment and without
//! Python's site packages, with limits on time, memory and files, and only if its syntax tree has
//! nothing besides listed syntax, functions and methods. Imports, files, and attributes through which
//! a program could leave the list are refused before anything runs.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::scenario::Verdict;

const RUNNER: &str = include_str!("sandbox.py");
/// The process limits itself to 2 seconds of CPU time; this ends one that waits.
const LIMIT: Duration = Duration::from_secs(20);

/// Arguments of a function, and what it must return.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// The arguments.
    pub arguments: Vec<Value>,
    /// The result.
    pub expected: Value,
}

/// Whether the machine can run code.
pub fn is_available() -> bool {
    let mut python = python();
    python.args(["-c", "import resource"]).stdin(Stdio::null()).stderr(Stdio::null());
    python.status().is_ok_and(|status| status.success())
}

/// Right if the last function of `code` returns what each case expects.
pub fn run(code: &str, cases: &[Case]) -> Verdict {
    let task = json!({"code": code, "cases": cases}).to_string();
    let output = python()
        .args(["-c", RUNNER])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .and_then(|child| finish(child, &task));
    let output = output.map_err(|error| format!("the sandbox failed: {error}"))?;
    // Ended by its limits: then it printed nothing.
    let result: Value = serde_json::from_str(&output)
        .map_err(|_| "the code exceeds the sandbox's time or memory".to_owned())?;
    match result["problem"].as_str() {
        Some(problem) => Err(problem.into()),
        None => Ok(()),
    }
}

fn python() -> Command {
    let mut python = Command::new("python3");
    python.args(["-I", "-S", "-B"]);
    // Only what is needed to find the program.
    python.env_clear();
    python.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    python
}

/// What the process prints; one that does not end is killed.
fn finish(mut child: Child, input: &str) -> std::io::Result<String> {
    // A process that ends early closes the pipe; its output says why.
    let _ = child.stdin.take().expect("stdin is a pipe").write_all(input.as_bytes());
    let start = Instant::now();
    while child.try_wait()?.is_none() {
        if start.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut output = String::new();
    // A line: shorter than the pipe's buffer, so the process never waits for its reader.
    child.stdout.take().expect("stdout is a pipe").read_to_string(&mut output)?;
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(code: &str) -> Verdict {
        assert!(is_available(), "python3 is needed by this test");
        run(code, &[Case { arguments: vec![json!([1, 2, 4])], expected: json!(7) }])
    }

    #[test]
    fn right_functions_pass_and_wrong_ones_do_not() {
        assert_eq!(
            total("def f(xs):\n    r = 0\n    for x in xs:\n        r += x\n    return r"),
            Ok(())
        );
        assert_eq!(
            total("def half(x):\n    return x / 2\ndef f(xs):\n    return half(2 * sum(xs))"),
            Ok(())
        );
        let wrong = total("def f(xs):\n    return max(xs)").unwrap_err();
        assert!(wrong.contains("is 4 instead of 7"), "{wrong}");
        assert!(total("def f(").unwrap_err().contains("not Python"));
        assert!(total("x = 7").unwrap_err().contains("no function"));
        assert!(total("def f(xs):\n    return xs[9]").unwrap_err().contains("IndexError"));
    }

    #[test]
    fn code_that_could_leave_the_sandbox_is_refused() {
        for code in [
            "import os\ndef f(xs):\n    return 7",
            "def f(xs):\n    return ().__class__.__mro__",
            "def f(xs):\n    return __builtins__",
            "def f(xs):\n    return '{0.real}'.format(1)",
            "def f(xs):\n    global y\n    return 7",
        ] {
            let problem = total(code).unwrap_err();
            assert!(problem.contains("is not allowed"), "{code}: {problem}");
        }
        for code in
            ["def f(xs):\n    return open('/etc/passwd')", "def f(xs):\n    return eval('7')"]
        {
            assert!(total(code).unwrap_err().contains("NameError"), "{code}: {:?}", total(code));
        }
    }

    #[test]
    fn endless_code_and_endless_memory_end() {
        let endless = total("def f(xs):\n    while True:\n        pass").unwrap_err();
        assert!(endless.contains("exceeds"), "{endless}");
        let huge = total("def f(xs):\n    return [0] * 10 ** 12").unwrap_err();
        assert!(huge.contains("MemoryError") || huge.contains("exceeds"), "{huge}");
    }
}
