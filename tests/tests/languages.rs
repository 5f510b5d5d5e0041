//! One small policy, written in Rust, JavaScript and Python, decides the same.
//!
//! The components are built from `policies/examples` and not committed: `policies/build.sh examples`
//! makes them, for which each language needs its tools (`policies/README.md`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use steersman_engine::config::PolicyConfig;
use steersman_engine::policy::disk;
use steersman_engine::policy::golden::{Decision, Golden};
use steersman_engine::policy::wasm::{Component, Host};

const LANGUAGES: [&str; 3] = ["rust", "javascript", "python"];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn built(language: &str) -> Vec<u8> {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| repository().join("target"), PathBuf::from);
    let path = target.join(format!("policies/brief-{language}.wasm"));
    std::fs::read(&path).unwrap_or_else(|error| {
        panic!("{}: {error}; run `policies/build.sh examples` first", path.display())
    })
}

/// Decisions without what they cost, which is another matter in each language.
fn decided(component: &Arc<Component>, golden: &Golden) -> Vec<Decision> {
    let mut decisions = golden.replay(component);
    decisions.iter_mut().for_each(|decision| decision.fuel = 0);
    decisions
}

#[test]
fn a_policy_in_rust_javascript_and_python_decides_the_same() {
    let path = repository().join("policies/examples/rust/brief.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let golden = Golden::parse(&text).unwrap();
    assert!(golden.cases.len() > 3, "{golden:?}");
    // A busy machine is no reason for a difference; fuel and memory are bounded as by default.
    let limits = PolicyConfig { deadline_ms: 10_000, ..PolicyConfig::default() };
    let host = Host::new(&limits, &disk::in_memory()).unwrap();
    let load = |language| Arc::new(Component::load(&host, language, &built(language)).unwrap());
    let components = LANGUAGES.map(load);
    for component in &components {
        assert_eq!(golden.check(component), [], "{}", component.name());
        component.granted(&[]).unwrap();
        // Twice, bit for bit: what an interpreter remembers of one request must not be seen in the
        // next.
        assert_eq!(golden.replay(component), golden.replay(component), "{}", component.name());
    }
    let [rust, javascript, python] = components.each_ref().map(|one| decided(one, &golden));
    assert_eq!(rust, javascript);
    assert_eq!(rust, python);
}
