//! Bytes that the process holds. MLX counts the arrays of the whole process, so each of these tests starts this program
//! again for itself ([`is_alone`]).

mod counted;
mod limit;
mod on_demand;

use std::process::Command;

/// Whether this process runs the test `test` of the module `module` alone. Otherwise, runs it in a process of its own, so
/// that the caller has nothing left to do.
///
/// # Panics
/// If the test does not pass there.
fn is_alone(module: &str, test: &str) -> bool {
    const ALONE: &str = "STEERSMAN_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let (_, module) = module.split_once("::").expect("`module_path!()` begins with the program");
    let test = format!("{module}::{test}");
    let output = Command::new(std::env::current_exe().expect("the program has a path"))
        .args(["--exact", &test, "--include-ignored", "--nocapture"])
        .env(ALONE, "1")
        .output()
        .expect("the program starts");
    let [text, errors] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success() && text.contains(" 1 passed;"), "{test}:\n{text}{errors}");
    print!("{text}");
    false
}
