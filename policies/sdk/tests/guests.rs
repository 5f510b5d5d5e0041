//! The shipped policies, natively: their own tests run here, where `cargo test --workspace` finds
//! them (the crates are apart from the workspace, since they are built for Wasm), and the committed
//! components are those of these sources.

use std::collections::BTreeMap;
use std::path::Path;

use sha2::{Digest, Sha256};

#[path = "../../agent/src/lib.rs"]
mod agent;
#[path = "../../examples/rust/src/lib.rs"]
mod brief;
#[path = "../../default/src/lib.rs"]
mod default;
#[path = "../../passthrough/src/lib.rs"]
mod passthrough;
#[path = "../../rules/src/lib.rs"]
mod rules;

#[test]
fn the_committed_components_are_built_from_these_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let list = std::fs::read_to_string(folder.join("SHA256SUMS")).expect("policies/SHA256SUMS");
    let sums: BTreeMap<_, _> = list
        .lines()
        .map(|line| line.split_once("  ").expect("the form of sha256sum"))
        .map(|(sum, path)| (path, sum))
        .collect();
    let shipped = ["agent", "default", "passthrough", "rules"];
    let shipped = shipped.map(|name| format!("{name}/{name}.wasm"));
    for needed in shipped.iter().map(String::as_str).chain(["../wit/policy.wit"]) {
        assert!(sums.contains_key(needed), "{needed} is not listed: run policies/build.sh");
    }
    for (path, expected) in sums {
        let bytes = std::fs::read(folder.join(path))
            .unwrap_or_else(|error| panic!("{path}: {error}; run policies/build.sh"));
        let sum: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(sum, expected, "{path} has changed: run policies/build.sh");
    }
}
