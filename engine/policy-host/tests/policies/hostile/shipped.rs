//! The shipped policies: the committed components behave like components built from their sources.

use std::path::{Path, PathBuf};

use steersman_policy_host::{LoopReport, PolicyConfig, RequestView, Step};

use super::{compile, host, looping, policy, start};

fn policies_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies")
}

/// The answers to requests and steps that reach every decision of the shipped policies.
fn decisions(bytes: &[u8]) -> Vec<String> {
    let component = compile(&host(&PolicyConfig::default()), bytes);
    let users = [
        "Extract the names as JSON.",
        "Write a Python function that sorts a list.",
        "Optimize this SQL query: SELECT 1",
        "Translate to French: the red house",
        "What is the secret code of project Onyx?",
        "Schreibe eine Funktion in Rust",
    ];
    let mut decisions = Vec::new();
    for user in users {
        for (reasoning, system_chars, context_left, tools) in [
            (None, 5000, 8192, vec![]),
            (Some(false), 5000, 8192, vec![]),
            (None, 0, 60, vec!["search".to_owned()]),
            (None, 0, 100_000, vec![]),
        ] {
            let mut instance = start(&component);
            let policy = policy(&mut instance);
            let view = RequestView {
                user: user.into(),
                can_reason: true,
                params: vec![("hint_sql".into(), "SQL now:\n".into())],
                reasoning,
                system_chars,
                context_left,
                tools,
                ..RequestView::default()
            };
            decisions.push(format!("{user}: {:?}", policy.ask(&view).unwrap()));
            decisions.push(format!("{:?}", policy.ask(&looping()).unwrap()));
            let loop_found = Some(LoopReport { period: 100, repeats: 40, exact: true });
            let answer = Step { loop_found, ..Step::default() };
            decisions.push(format!("{:?}", policy.ask(&answer).unwrap()));
            decisions.push(format!("{:?}", policy.ask(&Step::default()).unwrap()));
        }
    }
    decisions
}

#[test]
fn a_rebuilt_policy_decides_like_the_committed_one() {
    let build = policies_folder().join("build.sh");
    let check = std::process::Command::new(&build).arg("--check").output().unwrap();
    if !check.status.success() {
        println!("skipped: {}", String::from_utf8_lossy(&check.stderr));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let built =
        std::process::Command::new(&build).arg("--into").arg(folder.path()).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    for name in ["default", "passthrough"] {
        let file = format!("{name}.wasm");
        let committed = std::fs::read(policies_folder().join(name).join(&file)).unwrap();
        let rebuilt = std::fs::read(folder.path().join(&file)).unwrap();
        for (rebuilt, committed) in decisions(&rebuilt).iter().zip(decisions(&committed)) {
            assert_eq!(*rebuilt, committed, "{name}");
        }
    }
}
