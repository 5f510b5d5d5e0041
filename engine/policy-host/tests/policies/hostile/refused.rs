//! Components that cannot work are refused at load, with the reason.

use steersman_policy_host::{CONTRACT, Grant, OnFailure};
use steersman_test_support::guest::{full_name, importing};
use steersman_test_support::hostile::stepper;

use super::{compile, host, limits, load};

/// A component that exports empty instances with these names.
fn exporting(names: &[&str]) -> Vec<u8> {
    let exports: String =
        names.iter().map(|name| format!(r#"(export "{name}" (instance $i))"#)).collect();
    wat::parse_str(format!("(component (instance $i) {exports})")).unwrap()
}

#[test]
fn a_component_that_cannot_work_is_refused_at_load_with_the_reason() {
    let (on_step, kv) = (full_name("on-step"), full_name("kv"));
    let also_importing = |import: &str| {
        let text = format!(
            r#"(component (import {import}) (instance $i) (export "{on_step}" (instance $i)))"#
        );
        wat::parse_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    };
    let start = |body: &str| stepper("i32.const 0", &format!("(func $s {body}) (start $s)"));
    let other_type = format!(
        r#"(component
             (core module $m (func (export "f")))
             (core instance $i (instantiate $m))
             (func $f (canon lift (core func $i "f")))
             (instance $h (export "on-step" (func $f)))
             (export "{on_step}" (instance $h)))"#
    );
    // Imports are available in `_initialize`, not yet in a start function.
    let flood = importing(
        &["counters"],
        &[("on-step", "i32.const 0")],
        r#"(func (export "_initialize")
             (loop $l (call $counters.add (i32.const 0) (i32.const 1) (i64.const 1)) br $l))"#,
    );
    let function = r#"(instance (export "f" (func)))"#;
    let wasi = r#""wasi:cli/environment@0.2.0" (instance (export "get-arguments" (func (result (list string)))))"#;
    let no_wasi = format!(
        "imports `wasi:cli/environment@0.2.0`; contract {CONTRACT} has only log, kv, tokenizer, \
         counters"
    );
    let no_clock = format!("imports `steersman:policy/clock@{CONTRACT}`");
    let earlier = format!(
        "exports `on-step` of contract 0.1.0; this server has contract {CONTRACT}: build \
         it again for {CONTRACT}"
    );
    let unknown = format!("exports `on-token`, which contract {CONTRACT} does not have");
    let cases: [(_, _, &str); 19] = [
        ("WASI", also_importing(wasi), &no_wasi),
        ("host", also_importing(r#""host" (func)"#), "imports `host`"),
        (
            "an interface that the contract does not have",
            also_importing(&format!(r#""steersman:policy/clock@{CONTRACT}" {function}"#)),
            &no_clock,
        ),
        (
            "another version's import",
            also_importing(&format!(r#""steersman:policy/kv@0.9.0" {function}"#)),
            "imports `steersman:policy/kv@0.9.0`",
        ),
        (
            "types with a function",
            also_importing(&format!(r#""steersman:policy/types@0.1.0" {function}"#)),
            "imports `steersman:policy/types@0.1.0`",
        ),
        (
            "an import of another type",
            also_importing(&format!(r#""{kv}" {function}"#)),
            "cannot be linked",
        ),
        ("no hook", wat::parse_str("(component)").unwrap(), "exports none of the hooks"),
        ("an earlier contract", exporting(&["steersman:policy/on-step@0.1.0"]), &earlier),
        (
            "a later contract",
            exporting(&["steersman:policy/on-step@0.9.0"]),
            "exports `on-step` of contract 0.9.0; this server has",
        ),
        (
            "no version",
            exporting(&["steersman:policy/on-step"]),
            "exports `on-step` of contract without a version",
        ),
        (
            "an unknown hook",
            exporting(&[&format!("steersman:policy/on-token@{CONTRACT}")]),
            &unknown,
        ),
        (
            "two versions",
            exporting(&[&on_step[..], "steersman:policy/on-finish@0.1.0"]),
            "exports `on-finish` of contract 0.1.0",
        ),
        (
            "a hook of another type",
            wat::parse_str(&other_type).unwrap(),
            "exports a hook with another type than the contract",
        ),
        ("start loops", start("(loop $l br $l)"), "start: used up its fuel"),
        ("start traps", start("unreachable"), "start: trapped"),
        ("start grows", start("(drop (memory.grow (i32.const 1000)))"), "start: wanted"),
        ("start floods", flood, "start: counters.add: used imports more than 1024 times"),
        ("huge memory", stepper("i32.const 0", "(memory $big 1000)"), "policy.memory_bytes"),
        ("huge table", stepper("i32.const 0", "(table 1000000 funcref)"), "20000"),
    ];
    for (name, bytes, reason) in cases {
        // Also if the profile fails open: a policy that never worked is a mistake.
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
fn an_import_without_a_grant_is_refused_by_its_name() {
    let host = host(&limits());
    let interfaces = Grant::ALL.map(Grant::name);
    let component = compile(&host, &importing(&interfaces, &[("on-step", "i32.const 0")], ""));
    assert_eq!(component.needed_grants(), Grant::ALL, "in the order in which it imports them");
    assert_eq!(component.import_names(), interfaces.map(full_name));
    component.check_grants(&Grant::ALL).unwrap();
    for missing in Grant::ALL {
        let grants: Vec<_> = Grant::ALL.into_iter().filter(|grant| *grant != missing).collect();
        let name = missing.name();
        assert_eq!(
            component.check_grants(&grants).unwrap_err().to_string(),
            format!(
                "policy `guest`: imports `{}`, which the profile does not grant: add \"{name}\" to \
                 its `grants`",
                full_name(name)
            )
        );
    }
    let component = compile(&host, &stepper("i32.const 0", ""));
    assert_eq!(component.needed_grants(), []);
    component.check_grants(&[]).unwrap();
}
