//! The same policy, written in Rust, JavaScript, Python and C, makes the same decisions.
//!
//! `policies/build.sh examples` builds the components from `policies/examples`; they are not committed.
//! Without them the test is left out, except in CI, which builds them first.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use steersman_policy_host::{Component, Decision, Golden, PolicyConfig};

const LANGUAGES: [&str; 4] = ["rust", "javascript", "python", "c"];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn component_path(language: &str) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| repository().join("target"), PathBuf::from);
    target.join(format!("policies/brief-{language}.wasm"))
}

/// Whether all components are built. Absence is an error in CI.
fn examples_are_built() -> bool {
    let missing: Vec<_> =
        LANGUAGES.iter().map(|l| component_path(l)).filter(|path| !path.is_file()).collect();
    if missing.is_empty() {
        return true;
    }
    let message = format!("{missing:?} not found; run `policies/build.sh examples` to build them");
    assert!(std::env::var_os("CI").is_none(), "{message}");
    // Written directly: the output of a passing test is captured.
    writeln!(std::io::stderr(), "languages: test left out: {message}").expect("stderr is open");
    false
}

/// Decisions without their fuel, which differs between languages.
fn decisions(component: &Arc<Component>, golden: &Golden) -> Vec<Decision> {
    let mut decisions = golden.replay(component);
    decisions.iter_mut().for_each(|decision| decision.fuel = 0);
    decisions
}

#[test]
fn policies_in_all_languages_make_the_same_decisions() {
    if !examples_are_built() {
        return;
    }
    let text = std::fs::read_to_string(repository().join("policies/examples/rust/brief.jsonl"));
    let golden = Golden::parse(&text.unwrap()).unwrap();
    assert!(golden.cases.len() > 3, "{golden:?}");
    // The default limits on fuel and memory apply, but a busy machine must not cause a difference.
    let limits = PolicyConfig { deadline_ms: 10_000, ..PolicyConfig::default() };
    let host = steersman_tests::host(&limits);
    let components = LANGUAGES.map(|language| {
        let bytes = std::fs::read(component_path(language)).unwrap();
        Arc::new(Component::load(&host, language, &bytes).unwrap())
    });
    for component in &components {
        assert_eq!(golden.check(component), [], "{}", component.name());
        component.check_grants(&[]).unwrap();
        // Twice with equal fuel: an interpreter must not carry state from one request to the next.
        assert_eq!(golden.replay(component), golden.replay(component), "{}", component.name());
    }
    let [rust, others @ ..] = components.each_ref().map(|one| decisions(one, &golden));
    for (other, language) in others.iter().zip(&LANGUAGES[1..]) {
        assert_eq!(rust, *other, "{language}");
    }
}
