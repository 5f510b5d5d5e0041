//! What cannot work is refused when it is loaded, and says why; tests/tests/fuzz.rs has what is
//! merely damaged.

use steersman_engine::config::{Grant, OnFailure};
use steersman_tests::guest::{TYPES, importing};

use super::{compile, host, limits, load, stepper};

/// A component that exports empty instances of these names.
fn exporting(names: &[&str]) -> Vec<u8> {
    let exports: String =
        names.iter().map(|name| format!(r#"(export "{name}" (instance $i))"#)).collect();
    wat::parse_str(format!("(component (instance $i) {exports})")).unwrap()
}

#[test]
fn a_policy_that_cannot_work_is_refused_at_load_with_its_reason() {
    let valid = stepper("i32.const 0", "");
    // One that would do, but for an import.
    let also_importing = |import: &str| {
        let text = format!(
            r#"(component {TYPES} (import {import}) (instance $i)
                 (export "steersman:policy/on-step@0.2.0" (instance $i)))"#
        );
        wat::parse_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    };
    let start = |body: &str| stepper("i32.const 0", &format!("(func $s {body}) (start $s)"));
    let shape = |version: &str| {
        let text = format!(
            r#"(component
                 (core module $m (func (export "f")))
                 (core instance $i (instantiate $m))
                 (func $f (canon lift (core func $i "f")))
                 (instance $h (export "on-step" (func $f)))
                 (export "steersman:policy/on-step@{version}" (instance $h)))"#
        );
        wat::parse_str(&text).unwrap()
    };
    let flood = importing(
        &["counters"],
        &[("on-step", "i32.const 0")],
        "(func $s (loop $l (call $counters.add (i32.const 0) (i32.const 1) (i64.const 1)) br $l))
         (start $s)",
    );
    let function = r#"(instance (export "f" (func)))"#;
    let wasi = r#""wasi:cli/environment@0.2.0" (instance (export "get-arguments" (func (result (list string)))))"#;
    let on_step = "steersman:policy/on-step";
    let cases = [
        (
            "WASI",
            also_importing(wasi),
            "imports `wasi:cli/environment@0.2.0`; contract 0.2.0 has only log, kv, tokenizer, counters",
        ),
        ("host", also_importing(r#""host" (func)"#), "imports `host`"),
        (
            "an interface of the contract that is not there",
            also_importing(&format!(r#""steersman:policy/clock@0.2.0" {function}"#)),
            "imports `steersman:policy/clock@0.2.0`",
        ),
        (
            "another version's import",
            also_importing(&format!(r#""steersman:policy/kv@0.3.0" {function}"#)),
            "imports `steersman:policy/kv@0.3.0`",
        ),
        (
            "types with a function",
            also_importing(&format!(r#""steersman:policy/types@0.1.0" {function}"#)),
            "imports `steersman:policy/types@0.1.0`",
        ),
        (
            "an import of another shape",
            also_importing(&format!(r#""steersman:policy/kv@0.2.0" {function}"#)),
            "cannot be linked",
        ),
        (
            "an import in 0.1",
            wat::parse_str(format!(
                r#"(component (import "steersman:policy/kv@0.2.0" {function}) (instance $i)
                     (export "{on_step}@0.1.0" (instance $i)))"#
            ))
            .unwrap(),
            "imports `steersman:policy/kv@0.2.0`; contract 0.1.0 has no imports",
        ),
        ("no hook", wat::parse_str("(component)").unwrap(), "exports none of the hooks"),
        (
            "too new",
            exporting(&[&format!("{on_step}@0.9.0")]),
            "speaks contract 0.9.0, this server speaks 0.2.0 and 0.1.0",
        ),
        ("no version", exporting(&[on_step]), "speaks contract no version"),
        (
            "a hook that 0.1 lacks",
            exporting(&["steersman:policy/on-prompt@0.1.0"]),
            "exports `on-prompt`, which contract 0.1.0 lacks",
        ),
        (
            "a hook that there is not",
            exporting(&["steersman:policy/on-token@0.2.0"]),
            "exports `on-token`, which contract 0.2.0 lacks",
        ),
        (
            "two versions",
            exporting(&[&format!("{on_step}@0.2.0"), "steersman:policy/on-finish@0.1.0"]),
            "exports hooks of contract 0.2.0 and of 0.1.0",
        ),
        ("another shape", shape("0.2.0"), "a hook of another shape"),
        ("another shape in 0.1", shape("0.1.0"), "a hook of another shape"),
        ("core module", wat::parse_str("(module)").unwrap(), "is not a valid component"),
        ("text", b"(component)".to_vec(), "is not a valid component"),
        ("empty", Vec::new(), "is not a valid component"),
        ("truncated", valid[..valid.len() / 2].to_vec(), "is not a valid component"),
        ("start loops", start("(loop $l br $l)"), "start: used up its fuel"),
        ("start traps", start("unreachable"), "start: trapped"),
        ("start grows", start("(drop (memory.grow (i32.const 1000)))"), "start: wanted"),
        ("start floods", flood, "start: counters.add: called more than 1024 times"),
        ("huge memory", stepper("i32.const 0", "(memory $big 1000)"), "policy.memory_bytes"),
        ("huge table", stepper("i32.const 0", "(table 1000000 funcref)"), "20000"),
    ];
    for (name, bytes, reason) in cases {
        // A profile that fails open is refused too: what never worked was never meant to.
        for on_failure in [OnFailure::Open, OnFailure::Closed] {
            let error = load(&bytes, on_failure).err().unwrap_or_else(|| panic!("{name} loads"));
            let error = error.to_string();
            assert!(error.contains(reason), "{name}: {error}");
            assert!(error.ends_with("(profile `default`)"), "{name}: {error}");
            assert_eq!(error.lines().count(), 1, "{name}: {error}");
        }
    }
}

#[test]
fn an_import_is_refused_by_its_name_unless_the_profile_grants_it() {
    let host = host(&limits());
    let asking = ["log", "kv", "tokenizer", "counters"];
    let component = compile(&host, &importing(&asking, &[("on-step", "i32.const 0")], ""));
    assert_eq!(
        component.imports(),
        asking.map(|name| format!("steersman:policy/{name}@0.2.0")),
        "in the order in which it imports them"
    );
    component.granted(&Grant::ALL).unwrap();
    for missing in Grant::ALL {
        let grants: Vec<_> = Grant::ALL.into_iter().filter(|grant| *grant != missing).collect();
        let name = missing.name();
        assert_eq!(
            component.granted(&grants).unwrap_err().to_string(),
            format!(
                "policy `guest`: imports `steersman:policy/{name}@0.2.0`, which the profile does \
                 not grant: add \"{name}\" to its `grants`"
            )
        );
    }
    let component = compile(&host, &stepper("i32.const 0", ""));
    assert_eq!(component.imports(), [""; 0]);
    component.granted(&[]).unwrap();
}
