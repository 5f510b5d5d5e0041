//! The tests of the shipped policies, run natively. Their crates are built for Wasm and are not members
//! of the workspace, so `cargo test --workspace` finds their tests here. Also checks that the committed
//! components are built from the committed sources.

#![allow(
    clippy::duplicate_mod,
    reason = "`agent` and `cache-friendly` share a file, each in its own crate"
)]

use std::collections::BTreeMap;
use std::path::Path;

use sha2::{Digest, Sha256};

#[path = "../../agent/src/lib.rs"]
mod agent;
#[path = "../../brake/src/lib.rs"]
mod brake;
#[path = "../../examples/rust/src/lib.rs"]
mod brief;
#[path = "../../budget/src/lib.rs"]
mod budget;
#[path = "../../cache-friendly/src/lib.rs"]
mod cache_friendly;
#[path = "../../default/src/lib.rs"]
mod default;
#[path = "../../json-agent/src/lib.rs"]
mod json_agent;
#[path = "../../language/src/lib.rs"]
mod language;
#[path = "../../no-repeat/src/lib.rs"]
mod no_repeat;
#[path = "../../passthrough/src/lib.rs"]
mod passthrough;
#[path = "../../redact/src/lib.rs"]
mod redact;
#[path = "../../router/src/lib.rs"]
mod router;
#[path = "../../rules/src/lib.rs"]
mod rules;
/// What `steersman policy new` writes, with `MyPolicy` for the name of the policy.
#[path = "../../../server/policy-cli/src/template/lib.rs"]
mod template;
#[path = "../../tool-guard/src/lib.rs"]
mod tool_guard;

#[test]
fn committed_components_match_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let list = std::fs::read_to_string(folder.join("SHA256SUMS")).expect("policies/SHA256SUMS");
    let sums: BTreeMap<_, _> = list
        .lines()
        .map(|line| line.split_once("  ").expect("a line of sha256sum"))
        .map(|(sum, path)| (path, sum))
        .collect();
    let shipped = [
        "agent",
        "brake",
        "budget",
        "cache-friendly",
        "default",
        "json-agent",
        "language",
        "no-repeat",
        "passthrough",
        "redact",
        "router",
        "rules",
        "tool-guard",
    ];
    let shipped = shipped.map(|name| format!("{name}/{name}.wasm"));
    for needed in shipped.iter().map(String::as_str).chain(["../wit/policy.wit"]) {
        assert!(sums.contains_key(needed), "{needed} is not in SHA256SUMS: run policies/build.sh");
    }
    for (path, expected) in sums {
        let bytes = std::fs::read(folder.join(path))
            .unwrap_or_else(|error| panic!("{path}: {error}; run policies/build.sh"));
        let sum: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(sum, expected, "{path} has changed: run policies/build.sh");
    }
}
