//! Policies that are replaced while requests start: by files, by uploads, by an operator and by a
//! failed probation.
//!
//! `tests/tests/restart/reload` has the same through a server, and under load.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use steersman_policy_host::{
    Error, FAILURES, OnFailure, Origin, Param, Policies, PolicyConfig, PolicyReport,
    ProfilePolicies, RequestView, Step, Storage, Withdrawn, no_vocabulary, pack,
};
use steersman_test_support::guest::{broken, named, replace};

/// Limit on events of another thread, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time of one call: a busy machine may stop a thread for longer than the default of 50 ms.
const DEADLINE_MS: u64 = 60_000;

fn version(name: &str) -> Vec<u8> {
    named(name, false)
}

fn until(what: &str, happened: impl Fn() -> bool) {
    let started = Instant::now();
    while !happened() {
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A policy folder, a data folder and the profiles of a server.
struct Site {
    folder: tempfile::TempDir,
    data: tempfile::TempDir,
    profiles: BTreeMap<String, ProfilePolicies>,
}

impl Site {
    /// The policy `mine` in version `a`, which two profiles name. Profile `default` has a parameter
    /// from a file.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let profile = |policy: &str| ProfilePolicies {
            policies: vec![policy.into()],
            ..ProfilePolicies::default()
        };
        let mut profiles =
            BTreeMap::from(["default", "other"].map(|name| (name.to_owned(), profile("mine"))));
        let rules = folder.path().join("rules.toml");
        fs::write(&rules, "one").unwrap();
        let params = &mut profiles.get_mut("default").unwrap().params;
        params.insert("rules".into(), Param::File { file: rules });
        let site = Self { folder, data: tempfile::tempdir().unwrap(), profiles };
        fs::write(site.file(), version("a")).unwrap();
        site
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("mine.wasm")
    }

    fn rules(&self) -> PathBuf {
        self.folder.path().join("rules.toml")
    }

    fn config(&self) -> PolicyConfig {
        let folder = self.folder.path().into();
        PolicyConfig { folder, deadline_ms: DEADLINE_MS, ..PolicyConfig::default() }
    }

    /// Loads the policies as a server does at its start, and watches their files.
    fn start(&self) -> Server {
        let storage = Storage::open(self.data.path()).unwrap();
        let policies = Policies::load(&self.config(), &self.profiles, &storage);
        let policies = Arc::new(policies.unwrap_or_else(|error| panic!("{error}")));
        policies.watch();
        Server(policies)
    }
}

/// The policies of a running server.
struct Server(Arc<Policies>);

impl Server {
    /// Ends the server. Its database is closed when this returns.
    fn end(self) {
        let mut policies = self.0;
        let started = Instant::now();
        // The watch may hold another handle while it reads files. Dropping the last one joins it.
        while let Err(shared) = Arc::try_unwrap(policies) {
            assert!(started.elapsed() < PATIENCE, "the watch does not end");
            policies = shared;
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn report(&self) -> PolicyReport {
        self.0.report().policies.remove(0)
    }

    fn problem(&self) -> String {
        self.report().problem.map(|problem| problem.message).unwrap_or_default()
    }

    /// The version that a request of `profile` gets, and whether its step succeeds.
    fn request(&self, profile: &str) -> (String, bool) {
        let mut session = self.0.start(profile, "request", &no_vocabulary()).unwrap();
        let plan = session.ask(&RequestView::default()).unwrap();
        session.ask(&Step::default()).unwrap();
        (plan.note.unwrap_or_default(), session.take_notes().is_empty())
    }

    /// The active version.
    fn version(&self) -> String {
        let (name, _) = self.request("default");
        assert_eq!(self.request("other").0, name);
        name
    }

    fn until_version(&self, name: &str) {
        // Not `version`: the version may change between its two requests.
        until(&format!("version {name}"), || self.request("default").0 == name);
        assert_eq!(self.version(), name);
    }

    /// Waits until a problem with these words is reported; returns the message.
    fn until_problem(&self, words: &str) -> String {
        until(words, || self.problem().contains(words));
        self.problem()
    }

    fn rules(&self) -> (String, [u8; 32]) {
        let session = self.0.start("default", "request", &no_vocabulary()).unwrap();
        (session.params[0].1.clone(), session.digest)
    }

    /// Waits until the watch has read all files at least once more. Each pass reads the parameter once,
    /// after the components, so the second of two new texts is read by a pass that began after the first.
    fn until_reloaded(&self, site: &Site) {
        for text in ["before", "after"] {
            replace(&site.rules(), text.as_bytes());
            until("a reload", || self.rules().0 == text);
        }
    }
}

#[test]
fn a_file_renamed_into_place_becomes_active_in_every_profile_that_names_it() {
    let site = Site::new();
    let server = site.start();
    assert_eq!(server.version(), "a");
    for name in ["b", "c", "a"] {
        replace(&site.file(), &version(name));
        server.until_version(name);
    }
    let report = server.report();
    assert_eq!(report.origin, Origin::File);
    assert_eq!(report.hooks, ["on-request", "on-step"]);
    assert_eq!(report.imports, [""; 0]);
    assert_eq!(report.bytes, version("a").len());
    assert_eq!(report.file, Some(site.file()));
    assert_eq!(report.problem, None);
    let uses = report.profiles.iter().map(|u| (u.profile.as_str(), u.position, u.shadow));
    assert_eq!(uses.collect::<Vec<_>>(), [("default", 0, false), ("other", 0, false)]);
}

#[test]
fn a_file_written_in_pieces_becomes_active_when_it_is_complete() {
    let site = Site::new();
    let server = site.start();
    let whole = version("b");
    let mut file = fs::File::create(site.file()).unwrap();
    file.write_all(&whole[..whole.len() / 2]).unwrap();
    // The rest comes later than the watch waits for it.
    server.until_problem("is not a valid component");
    assert_eq!(server.version(), "a");
    file.write_all(&whole[whole.len() / 2..]).unwrap();
    drop(file);
    server.until_version("b");
    assert_eq!(server.report().problem, None);
    fs::remove_file(site.file()).unwrap();
    server.until_problem("no longer exists");
    assert_eq!(server.version(), "b");
}

/// `current -> v2` was not noticed: the server ran the code of `v1` until its restart.
#[cfg(unix)]
#[test]
fn a_policy_folder_whose_link_is_turned_is_the_one_that_the_link_names() {
    use std::os::unix::fs::symlink;
    let site = Site::new();
    let path = |name: &str| site.folder.path().join(name);
    for version in ["v1", "v2"] {
        fs::create_dir(path(version)).unwrap();
        fs::write(path(version).join("mine.wasm"), self::version(version)).unwrap();
    }
    let turn = |to: &str| {
        symlink(to, path("next")).unwrap();
        fs::rename(path("next"), path("current")).unwrap();
    };
    turn("v1");
    let config = PolicyConfig { folder: path("current"), ..site.config() };
    let storage = Storage::open(site.data.path()).unwrap();
    let policies = Arc::new(Policies::load(&config, &site.profiles, &storage).unwrap());
    policies.watch();
    let server = Server(policies);
    assert_eq!(server.version(), "v1");
    turn("v2");
    server.until_version("v2");
    replace(&path("v2").join("mine.wasm"), &version("v2 again"));
    server.until_version("v2 again");
    turn("nowhere");
    server.until_problem("no longer exists; the active version ends with the server");
    assert_eq!(server.version(), "v2 again");
    turn("v1");
    server.until_version("v1");
    fs::write(path("v2").join("mine.wasm"), broken()).unwrap();
    turn("v2");
    server.until_problem("is not a valid component");
    assert_eq!(server.version(), "v1");
    server.end();
}

#[test]
fn a_rejected_file_or_upload_leaves_the_active_version_and_is_reported() {
    let site = Site::new();
    let server = site.start();
    let importing = br#"(component (import "wasi:cli/environment@0.2.0" (instance
        (export "get-arguments" (func (result (list string))))))
        (instance $hook) (export "steersman:policy/on-step@0.6.0" (instance $hook)))"#;
    let importing = wat::parse_bytes(importing).unwrap().into_owned();
    for (bytes, words) in [
        (broken(), "is not a valid component"),
        (importing, "wasi:cli/environment"),
        (b"text".to_vec(), "is not a valid component"),
    ] {
        replace(&site.file(), &bytes);
        let problem = server.until_problem(words);
        assert!(problem.contains("policy `mine`"), "{problem}");
        assert_eq!(server.version(), "a");
        let error = server.0.upload("mine", &bytes).unwrap_err();
        assert!(matches!(error, Error::Refused { .. } | Error::NotCompiled { .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(server.version(), "a");
        replace(&site.file(), &version("a"));
        until("no problem", || server.report().problem.is_none());
    }
}

#[test]
fn an_upload_becomes_active_outlives_a_restart_and_can_be_rolled_back() {
    let site = Site::new();
    let server = site.start();
    let activation = server.0.upload("mine", &version("b")).unwrap();
    assert_eq!(server.version(), "b");
    let report = server.report();
    assert_eq!((report.origin, &report.sha256), (Origin::Upload, &activation.sha256));
    assert!(report.profiles[1].health.probation.is_some());
    assert_eq!(Some(&report.earlier[0].sha256), activation.replaced.as_ref());
    assert_eq!(server.0.upload("mine", &version("b")).unwrap().replaced, None);

    server.end();
    let server = site.start();
    assert_eq!(server.version(), "b");
    server.0.roll_back("mine").unwrap();
    assert_eq!(server.version(), "a");
    let report = server.report();
    assert_eq!(report.origin, Origin::History);
    assert_eq!(report.earlier[0].withdrawn, Some(Withdrawn::RolledBack));
    let error = server.0.roll_back("mine").unwrap_err();
    assert!(matches!(error, Error::CannotRollBack { .. }), "{error}");
    server.end();
    assert_eq!(site.start().version(), "a");
}

#[test]
fn a_version_that_fails_its_first_three_requests_is_rolled_back() {
    let site = Site::new();
    let server = site.start();
    let failing = named("b", true);
    let before = server.report().sha256;
    replace(&site.file(), &failing);
    // Not `until_version`, whose requests would count.
    until("the failing version", || server.report().sha256 != before);
    let words = "failed in 3 of its first 3 requests: on-step: trapped";
    for (profile, end) in [("default", " in profile `default`"), ("other", "before it")] {
        assert_eq!(server.report().earlier[0].withdrawn, None);
        for _ in 0..3 {
            assert_eq!(server.request(profile), ("b".into(), false));
        }
        assert_eq!(server.request(profile), ("a".into(), true));
        let problem = server.until_problem(words);
        let words = "; its file is unchanged; rolled back to the version before it";
        assert!(problem.contains(words), "{problem}");
        assert!(problem.ends_with(end), "{problem}");
        // Each profile is reported with the version that it gets.
        let report = server.report();
        let gets = |name: &str| report.profiles.iter().find(|one| one.profile == name).unwrap();
        assert_eq!(gets(profile).sha256, before);
        assert_eq!(gets("other").sha256 == before, profile == "other");
    }
    let withdrawn = server.report().earlier[0].withdrawn.clone();
    let Some(Withdrawn::Failed(reason)) = withdrawn else { panic!("{withdrawn:?}") };
    assert!(reason.contains("on-step: trapped"), "{reason}");
    // Its file still exists. It is not loaded again: neither by the watch nor at a start.
    replace(&site.file(), &failing);
    server.until_reloaded(&site);
    assert_eq!(server.version(), "a");
    server.end();
    let server = site.start();
    assert_eq!(server.version(), "a");
    server.until_problem("failed in 3 of its first 3 requests");
    replace(&site.file(), &version("c"));
    server.until_version("c");
}

/// All profiles had one breaker: requests of an open profile paused the guard of one with keys, and rolled
/// back its new version. So did requests that a policy saw as a shadow only.
#[test]
fn failures_in_one_profile_or_of_a_shadow_change_nothing_in_another() {
    let mut site = Site::new();
    site.profiles.get_mut("other").unwrap().on_failure = OnFailure::Closed;
    let shadowed = ProfilePolicies {
        policies: vec!["passthrough".into()],
        shadow: vec!["mine".into()],
        ..ProfilePolicies::default()
    };
    site.profiles.insert("shadowed".into(), shadowed);
    let server = site.start();
    server.0.upload("mine", &named("b", true)).unwrap();
    let version = |profile: &str| {
        let mut session = server.0.start(profile, "request", &no_vocabulary()).unwrap();
        session.ask(&RequestView::default()).unwrap().note.unwrap_or_default()
    };
    let uses = || server.report().profiles.into_iter().map(|u| (u.profile, u.health));
    let probation = |profile: &str| uses().find(|(name, _)| name == profile).unwrap().1.probation;
    for _ in 0..2 * FAILURES {
        let mut session = server.0.start("shadowed", "request", &no_vocabulary()).unwrap();
        session.ask(&Step { budget_reached: true, ..Step::default() }).unwrap();
    }
    let paused = uses().find(|(name, _)| name == "shadowed").unwrap().1;
    assert!(paused.paused.is_some() && paused.probation.is_none(), "{paused:?}");
    assert_eq!((version("default"), version("other")), ("b".into(), "b".into()));
    let before = probation("other");
    for _ in 0..2 * FAILURES {
        server.request("default");
    }
    assert_eq!(version("default"), "a");
    assert_eq!(version("other"), "b");
    assert_eq!(probation("other"), before.map(|left| left - 1));
    assert_eq!(server.report().earlier[0].withdrawn, None);
}

/// The withdrawal was written by a thread of its own, which held the database open: a restart in that
/// moment used memory, loaded the failed version again, and kept nothing from then on.
#[test]
fn a_restart_right_after_a_rollback_knows_it() {
    let site = Site::new();
    site.start().end();
    for n in 0..10 {
        replace(&site.file(), &version("a"));
        let server = site.start();
        replace(&site.file(), &named(&format!("b{n}"), true));
        let is_on_probation = || server.report().profiles[0].health.probation.is_some();
        until("the failing version", is_on_probation);
        while is_on_probation() {
            server.request("default");
            server.request("other");
        }
        server.end();
        let server = site.start();
        assert_eq!(server.version(), "a");
        server.end();
    }
}

#[test]
fn a_start_with_a_broken_file_loads_the_last_valid_version() {
    let site = Site::new();
    site.start().end();
    fs::write(site.file(), broken()).unwrap();
    let server = site.start();
    assert_eq!(server.version(), "a");
    let report = server.report();
    assert_eq!(report.origin, Origin::History);
    let problem = server.problem();
    assert!(problem.contains("is not a valid component"), "{problem}");
    replace(&site.file(), &version("b"));
    server.until_version("b");
    server.end();
    // A missing file was removed on purpose.
    fs::remove_file(site.file()).unwrap();
    let storage = Storage::open(site.data.path()).unwrap();
    let error = Policies::load(&site.config(), &site.profiles, &storage).err().unwrap();
    assert!(error.to_string().contains("does not exist"), "{error}");
}

#[test]
fn an_upload_needs_a_file_and_a_rollback_an_earlier_version() {
    let profiles = BTreeMap::from([("default".to_owned(), ProfilePolicies::default())]);
    let policies =
        Policies::load(&PolicyConfig::default(), &profiles, &Storage::in_memory()).unwrap();
    let error = policies.upload("default", &version("b")).unwrap_err();
    assert!(matches!(error, Error::NoFile { .. }), "{error}");
    assert!(error.to_string().contains("policy.folder"), "{error}");
    let error = policies.roll_back("default").unwrap_err();
    assert!(error.to_string().contains("there is no earlier version"), "{error}");
    let error = policies.upload("absent", &version("b")).unwrap_err();
    assert!(matches!(error, Error::UnknownPolicy { .. }), "{error}");
    assert_eq!(policies.report().policies[0].origin, Origin::Shipped);
}

#[test]
fn a_parameter_file_is_read_again_when_it_changes() {
    let site = Site::new();
    let server = site.start();
    let (one, digest) = server.rules();
    assert_eq!(one, "one");
    replace(&site.rules(), b"two");
    until("the new text", || server.rules().0 == "two");
    assert_ne!(server.rules().1, digest);
    fs::remove_file(site.rules()).unwrap();
    until("the missing file is reported", || {
        let problem = server.0.report().params.remove(0).problem;
        problem.is_some_and(|problem| problem.message.contains("does not exist"))
    });
    assert_eq!(server.rules().0, "two");
}

/// A watch holds a weak handle, so their number shows whether there is one.
#[test]
fn files_are_not_watched_if_the_configuration_disables_it() {
    let site = Site::new();
    for watch in [true, false] {
        let config = PolicyConfig { watch, ..site.config() };
        let policies = Policies::load(&config, &site.profiles, &Storage::in_memory()).unwrap();
        let policies = Arc::new(policies);
        policies.watch();
        assert_eq!(Arc::weak_count(&policies), usize::from(watch));
    }
}

/// A server of a project rolled back to the version of another project, and wrote it over its file.
#[test]
fn versions_of_files_with_one_name_are_kept_apart() {
    let first = Site::new();
    let server = first.start();
    server.0.upload("mine", &version("b")).unwrap();
    server.end();
    let mut second = Site::new();
    second.data = first.data;
    let server = second.start();
    assert_eq!(server.version(), "a");
    assert!(server.report().earlier.is_empty());
    let refused = server.0.roll_back("mine").unwrap_err().to_string();
    assert!(refused.contains("there is no earlier version"), "{refused}");
    server.end();
}

#[test]
fn a_path_names_one_file_and_takes_pushes_of_its_kind_only() {
    let mut site = Site::new();
    let bundle = |name: &str| pack("mine", [&version(name), b"", b"", b""]);
    let other = site.file().with_extension("steer");
    fs::write(&other, bundle("b")).unwrap();
    for profile in site.profiles.values_mut() {
        profile.policies = vec![site.folder.path().join("mine.wasm").display().to_string()];
        profile.params.clear();
    }
    let server = site.start();
    assert_eq!(server.version(), "a", "the bundle beside it is another policy's");
    let refused = server.0.upload("mine", &bundle("c")).unwrap_err().to_string();
    assert!(refused.contains("is a bundle, and the profiles name "), "{refused}");
    assert_eq!(server.0.upload("mine", &version("d")).unwrap().notes, [""; 0]);
    assert!(other.is_file());
    server.end();
    // A name has both.
    for profile in site.profiles.values_mut() {
        profile.policies = vec!["mine".into()];
    }
    let server = site.start();
    assert_eq!(server.version(), "b");
    let notes = server.0.upload("mine", &version("e")).unwrap().notes;
    assert!(notes[0].starts_with(&format!("removed {}", other.display())), "{notes:?}");
    assert!(!other.exists());
    server.end();
}

#[test]
fn a_rollback_tells_that_the_golden_file_does_not_fit() {
    let site = Site::new();
    let server = site.start();
    fs::write(
        site.file().with_extension("jsonl"),
        "{\"hook\":\"on-request\",\"answer\":{\"note\":\"b\"}}\n",
    )
    .unwrap();
    server.0.upload("mine", &version("b")).unwrap();
    let notes = server.0.roll_back("mine").unwrap().notes;
    assert!(notes[0].starts_with("restore the golden file of this version, too"), "{notes:?}");
    assert!(notes[0].contains("golden line 1"), "{notes:?}");
    server.end();
}
