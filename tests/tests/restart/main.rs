//! State and policies that outlive a process: after a restart, after `kill -9`, after power loss, and when files are
//! damaged or replaced.
//!
//! Tests that kill a process start this program again with the name of a test ([`child`]).

mod prefix;
mod reload;
mod state;
mod store;

use std::process::Command;

/// This program, which will run the ignored test `test` of the module `module` only.
///
/// # Panics
/// If its own path is unknown.
fn child(module: &str, test: &str) -> Command {
    let (_, module) = module.split_once("::").expect("`module_path!()` begins with the program");
    let mut command = Command::new(std::env::current_exe().expect("the program has a path"));
    command.args(["--exact", &format!("{module}::{test}"), "--ignored", "--nocapture"]);
    command
}
