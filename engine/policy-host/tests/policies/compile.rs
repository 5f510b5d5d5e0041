//! Components are compiled in a process of their own, within limits.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{TryRecvError, channel};
use std::time::{Duration, Instant};

use steersman_policy_host::{
    Component, Error, Host, LimitedBy, OnFailure, Policies, PolicyConfig, ProfilePolicies,
    RequestView, Step, Storage, compiler_limits, no_vocabulary,
};
use steersman_test_support::bomb;
use steersman_test_support::guest::{broken, named, replace};

/// Within which a bomb is refused.
const PATIENCE: Duration = Duration::from_secs(60);

fn config(folder: &Path) -> PolicyConfig {
    let compiler = Some(env!("CARGO_BIN_EXE_compile-component").into());
    PolicyConfig { folder: folder.into(), compiler, deadline_ms: 60_000, ..PolicyConfig::default() }
}

fn profile(policies: &[&str], on_failure: OnFailure) -> ProfilePolicies {
    let policies = policies.iter().map(|policy| (*policy).into()).collect();
    ProfilePolicies { policies, on_failure, ..ProfilePolicies::default() }
}

fn note(policies: &Policies, profile: &str) -> String {
    let mut session = policies.start(profile, "request", &no_vocabulary()).unwrap();
    let plan = session.ask(&RequestView::default()).unwrap();
    session.ask(&Step::default()).unwrap();
    let mut notes = session.take_notes();
    notes.extend(plan.note);
    notes.join("\n")
}

/// They were compiled in the server's process: 3 kB took 833 MB to over 6 GB, 313 kB took 195 s.
#[test]
fn a_component_that_takes_too_long_or_too_much_memory_to_compile_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let host = Host::new(&config(folder.path()), &Storage::in_memory()).unwrap();
    for (name, bytes) in bomb::bombs() {
        let started = Instant::now();
        let refused = Component::load(&host, "bomb", &bytes).err();
        let elapsed = started.elapsed();
        let Some(Error::NotCompiled { problem, .. }) = refused else {
            panic!("{name}: {refused:?}")
        };
        println!("{name}: {} bytes, {elapsed:.1?}: {problem}", bytes.len());
        assert!(elapsed < PATIENCE, "{name} took {elapsed:?}");
        assert_eq!(problem.lines().count(), 1, "{name}: {problem}");
        let is_named = ["has ", "takes more than "].iter().any(|begin| problem.starts_with(begin));
        assert!(is_named, "{name}: {problem}");
    }
}

#[test]
fn a_component_compiled_in_a_child_decides_as_one_compiled_here() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("mine.wasm"), named("a", false)).unwrap();
    let profiles =
        BTreeMap::from([("p".to_owned(), profile(&["mine", "default"], OnFailure::Open))]);
    let in_child = config(folder.path());
    let here = PolicyConfig { compiler: None, ..in_child.clone() };
    let notes = [in_child, here].map(|config| {
        let data = tempfile::tempdir().unwrap();
        let storage = Storage::open(data.path()).unwrap();
        // The second start loads what the first compiled.
        let notes =
            [(); 2].map(|()| note(&Policies::load(&config, &profiles, &storage).unwrap(), "p"));
        assert_eq!(notes[0], notes[1]);
        notes[0].clone()
    });
    assert_eq!(notes[0], "a");
    assert_eq!(notes[0], notes[1]);
}

/// A compiler that `script` stands before: it is started with the arguments of a child.
#[cfg(unix)]
fn behind(script: &str, folder: &Path) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = folder.join("compiler");
    let compiler = env!("CARGO_BIN_EXE_compile-component");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\nexec {compiler} \"$@\"\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// At nice 19 beside a compiler, `default` had no version for as long as the server ran, and nothing said so. Here the
/// compiler of a shipped policy, of one in a file, and of one that replaces the active version is ended by something else.
#[cfg(unix)]
#[test]
fn a_policy_whose_compiler_is_ended_by_the_machine_is_tried_again_until_it_is_active() {
    let folder = tempfile::tempdir().unwrap();
    let (file, well) = (folder.path().join("mine.wasm"), folder.path().join("well"));
    let script = format!("[ -e {} ] || kill -KILL $$", well.display());
    let compiler = Some(behind(&script, folder.path()));
    let config = PolicyConfig { compiler, ..config(folder.path()) };
    std::fs::write(&file, named("a", false)).unwrap();
    let policies =
        ["default", "mine"].map(|name| (name.to_owned(), profile(&[name], OnFailure::Closed)));
    let profiles = BTreeMap::from(policies);
    let policies = Policies::load(&config, &profiles, &Storage::in_memory()).unwrap();
    let policies = std::sync::Arc::new(policies);
    for report in policies.report().policies {
        let problem = report.problem.as_ref().unwrap().message.clone();
        let words = "cannot be compiled: the compiler ended with signal: 9";
        assert!(problem.contains(words), "{problem}");
        assert!(!report.is_active() && report.is_pending, "{}", report.name);
        assert!(policies.start(&report.name, "request", &no_vocabulary()).is_err());
    }
    std::fs::write(&well, "").unwrap();
    policies.watch();
    let start = Instant::now();
    let wait_until = |done: &dyn Fn() -> bool| {
        while !done() {
            assert!(start.elapsed() < PATIENCE, "{:?}", policies.report().policies);
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let are_active = || policies.report().policies.iter().all(|policy| policy.is_active());
    wait_until(&are_active);
    assert_eq!(note(&policies, "mine"), "a");
    policies.start("default", "request", &no_vocabulary()).unwrap();
    let reports = policies.report().policies;
    assert!(reports.iter().all(|policy| !policy.is_pending && policy.problem.is_none()));

    // The active version stays until the new one has been compiled.
    std::fs::remove_file(&well).unwrap();
    replace(&file, &named("b", false));
    wait_until(&|| policies.report().policies[1].is_pending);
    assert_eq!(note(&policies, "mine"), "a");
    std::fs::write(&well, "").unwrap();
    wait_until(&|| note(&policies, "mine") == "b");
    assert!(!policies.report().policies[1].is_pending);
}

/// `steersman doctor` says which limits are in force.
#[test]
fn the_limits_of_the_compiler_are_tried_in_a_child() {
    let limits = compiler_limits(env!("CARGO_BIN_EXE_compile-component").into()).unwrap();
    assert_eq!((limits.memory_bytes >> 20, limits.seconds), (512, 8));
    if cfg!(target_os = "linux") {
        assert_eq!((limits.memory, limits.processor), (LimitedBy::System, LimitedBy::System));
    }
    compiler_limits("/nowhere/compiler".into()).unwrap_err();
}

/// A rollback of another policy waited for over a minute.
#[test]
fn other_policies_are_replaced_while_a_component_is_compiled() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["slow", "quick"] {
        std::fs::write(folder.path().join(format!("{name}.wasm")), named("a", false)).unwrap();
    }
    let profiles = ["slow", "quick"].map(|name| (name.into(), profile(&[name], OnFailure::Open)));
    let storage = Storage::in_memory();
    let policies =
        Policies::load(&config(folder.path()), &BTreeMap::from(profiles), &storage).unwrap();
    std::thread::scope(|scope| {
        let (done, is_done) = channel();
        let policies = &policies;
        scope.spawn(move || done.send(policies.upload("slow", &bomb::slow())));
        policies.upload("quick", &named("b", false)).unwrap();
        assert_eq!(note(policies, "quick"), "b");
        policies.roll_back("quick").unwrap();
        assert_eq!(note(policies, "quick"), "a");
        assert!(matches!(is_done.try_recv(), Err(TryRecvError::Empty)), "the bomb was quicker");
        let refused = is_done.recv().unwrap().unwrap_err();
        assert!(matches!(refused, Error::NotCompiled { .. }), "{refused}");
    });
    assert_eq!(note(&policies, "slow"), "a");
}

/// The server did not start.
#[test]
fn a_server_starts_without_a_policy_that_does_not_compile() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.wasm");
    let profiles = BTreeMap::from([
        ("open".to_owned(), profile(&["mine"], OnFailure::Open)),
        ("closed".to_owned(), profile(&["mine"], OnFailure::Closed)),
        ("other".to_owned(), profile(&["passthrough"], OnFailure::Closed)),
    ]);
    let (_, doubled) = bomb::bombs().swap_remove(0);
    let module = wat::parse_str("(module)").unwrap();
    for bytes in [doubled, broken(), module, b"text".to_vec(), Vec::new()] {
        std::fs::write(&file, &bytes).unwrap();
        let policies =
            Policies::load(&config(folder.path()), &profiles, &Storage::in_memory()).unwrap();
        let report = policies.report().policies.remove(0);
        let problem = report.problem.unwrap().message;
        assert!(problem.starts_with("policy `mine`: "), "{problem}");
        assert_eq!((report.name.as_str(), report.sha256.as_str()), ("mine", ""));
        let missing = "policy `mine`: start: has no version that compiles";
        assert_eq!(note(&policies, "open"), format!("{missing}; the native policy took over"));
        let refused = policies.start("closed", "request", &no_vocabulary()).err().unwrap();
        assert_eq!(refused.to_string(), missing);
        assert_eq!(note(&policies, "other"), "");
        // Another version makes it work, and there is none to return to.
        policies.upload("mine", &named("b", false)).unwrap();
        assert_eq!(note(&policies, "closed"), "b");
        policies.roll_back("mine").unwrap_err();
        replace(&file, b"");
    }
}
