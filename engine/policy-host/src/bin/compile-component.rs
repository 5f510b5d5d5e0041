//! The compiler of components as a program of its own, for tests.

use std::process::ExitCode;

use steersman_policy_host::compile_if_asked;

fn main() -> ExitCode {
    compile_if_asked().unwrap_or(ExitCode::FAILURE)
}
