use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use super::source::{PARAM_BYTES, SHIPPED};
use super::*;
use crate::config::Grant;
use crate::contract::{Plan, RequestView, no_vocabulary};
use crate::error::Cause;

type Result<T, E = Error> = std::result::Result<T, E>;

fn profiles(list: &[(&str, &str)]) -> BTreeMap<String, ProfilePolicies> {
    let profile = |policy: &str| ProfilePolicies {
        policies: vec![policy.into()],
        ..ProfilePolicies::default()
    };
    list.iter().map(|(name, policy)| ((*name).into(), profile(policy))).collect()
}

fn load(list: &[(&str, &str)]) -> Result<Policies> {
    load_with(&PolicyConfig::default(), &profiles(list))
}

fn load_with(
    config: &PolicyConfig,
    profiles: &BTreeMap<String, ProfilePolicies>,
) -> Result<Policies> {
    Policies::load(config, profiles, &Storage::in_memory())
}

fn start(policies: &Policies, profile: &str) -> Result<Session> {
    policies.start(profile, "request", &no_vocabulary())
}

/// A policy without decisions, in different versions: a custom section has its name.
fn version(name: u8) -> Vec<u8> {
    let passthrough = SHIPPED.iter().find(|shipped| shipped.name == "passthrough").unwrap();
    // A custom section: id, size, and a name of one byte.
    [passthrough.component, &[0, 2, 1, name]].concat()
}

/// Activates a version as a change of its file would.
fn install(policies: &Policies, name: u8) -> Activation {
    let bundle = Bundle { component: version(name), golden: String::new() };
    policies.replace("mine", &policies.sources["mine"], &bundle, Origin::File).unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// A policy folder, storage, and a profile that names `mine`.
struct Site {
    folder: tempfile::TempDir,
    storage: Storage,
    profiles: BTreeMap<String, ProfilePolicies>,
}

impl Site {
    fn new() -> Self {
        let site = Self {
            folder: tempfile::tempdir().unwrap(),
            storage: Storage::in_memory(),
            profiles: profiles(&[("default", "mine")]),
        };
        fs::write(site.file(), version(b'a')).unwrap();
        site
    }

    fn file(&self) -> std::path::PathBuf {
        self.folder.path().join("mine.wasm")
    }

    fn load(&self) -> Result<Policies> {
        let folder = self.folder.path().into();
        let config = PolicyConfig { folder, ..PolicyConfig::default() };
        Policies::load(&config, &self.profiles, &self.storage)
    }

    /// Checks the active version, its origin, and the last problem.
    fn check(&self, policies: &Policies, component: &[u8], origin: Origin, problem: &str) {
        let report = policies.report();
        let mine = &report.policies[0];
        let message = mine.problem.as_ref().map_or("", |problem| &problem.message);
        assert_eq!(mine.sha256, sha256(component), "{message}");
        assert_eq!(mine.origin, origin, "{message}");
        assert!(message.contains(problem) && message.is_empty() == problem.is_empty(), "{message}");
        assert_eq!(mine.file, Some(self.file()));
        start(policies, "default").unwrap().ask(&RequestView::default()).unwrap();
    }
}

#[test]
fn the_shipped_policies_load_and_plan() {
    let policies = load(&[("default", "default"), ("off", "passthrough")]).unwrap();
    let view = RequestView { can_reason: true, context_left: 4096, ..RequestView::default() };
    let plan = start(&policies, "default").unwrap().ask(&view).unwrap();
    assert_eq!(plan.reasoning, Some(true));
    assert!(plan.loops.is_some());
    let plan = start(&policies, "off").unwrap().ask(&view).unwrap();
    assert_eq!(plan, Plan::default());
}

#[test]
fn an_unknown_profile_is_refused() {
    let policies = load(&[("default", "passthrough")]).unwrap();
    let error = start(&policies, "agent").err().unwrap().to_string();
    assert_eq!(error, "profile: `agent` does not exist, only default");
}

#[test]
fn load_errors_name_policy_profile_and_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("text.wasm"), "no component").unwrap();
    fs::create_dir(path("deep")).unwrap();
    fs::write(path("deep/text.wasm"), version(b'a')).unwrap();
    let config = PolicyConfig { folder: folder.path().into(), ..PolicyConfig::default() };
    let (text, deep, nowhere) = (path("text.wasm"), path("deep/text.wasm"), path("no.wasm"));
    for (entries, words) in [
        (&[nowhere.as_str()][..], &["policy `no`", "does not exist", "`default`"][..]),
        (&["absent"], &["policy `absent`", "absent.wasm"]),
        (&["not/../a name"], &["policy `a name`", "does not exist"]),
        (&["a name"], &["policy `a name`", "is not the name"]),
        (&["text"], &["policy `text`", "is not a valid component"]),
        (&["text", &deep], &["policy `text`", "is the name of both", &text, &deep]),
    ] {
        let mut profiles = profiles(&[("agent", "passthrough")]);
        let agent = profiles.get_mut("agent").unwrap();
        agent.policies = entries.iter().map(|entry| (*entry).to_owned()).collect();
        let error = load_with(&config, &profiles).err().expect(entries[0]).to_string();
        for word in words {
            assert!(error.contains(word), "`{word}` is not in {error}");
        }
        assert!(error.ends_with("(profile `agent`)"), "{error}");
    }
    let config = PolicyConfig { folder: path("none").into(), ..config };
    let error = load_with(&config, &profiles(&[("default", "passthrough")])).err().unwrap();
    assert!(error.to_string().ends_with("is not a folder; create it"), "{error}");
}

#[test]
fn a_policy_in_the_folder_takes_precedence_and_one_file_may_be_named_twice() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("passthrough.wasm");
    let mut profiles = profiles(&[("default", "passthrough"), ("other", "default")]);
    profiles.get_mut("other").unwrap().shadow.push(file.display().to_string());
    let config = PolicyConfig { folder: folder.path().into(), ..PolicyConfig::default() };
    let origins = |policies: &Policies| {
        policies.report().policies.iter().map(|policy| policy.origin).collect::<Vec<_>>()
    };
    let error = load_with(&config, &profiles).err().map(|error| error.to_string());
    assert_eq!(error, None, "the same file, by name and by path");
    fs::write(&file, version(b'a')).unwrap();
    let policies = load_with(&config, &profiles).unwrap();
    assert_eq!(origins(&policies), [Origin::Shipped, Origin::File]);
    let uses = policies.report().policies.remove(1).profiles;
    let uses: Vec<_> = uses.iter().map(|u| (u.profile.as_str(), u.position, u.shadow)).collect();
    assert_eq!(uses, [("default", 0, false), ("other", 1, true)]);
}

#[test]
fn the_digest_changes_with_everything_that_affects_decisions_only() {
    let digest = |config: &PolicyConfig, change: &dyn Fn(&mut ProfilePolicies)| {
        let mut profiles = profiles(&[("default", "passthrough")]);
        change(profiles.get_mut("default").unwrap());
        start(&load_with(config, &profiles).unwrap(), "default").unwrap().digest
    };
    let config = PolicyConfig::default();
    let base = digest(&config, &|_| ());
    let same: [&dyn Fn(&mut ProfilePolicies); 2] =
        [&|profile| profile.shadow = vec!["default".into()], &|profile| profile.trace_text = true];
    for change in same {
        assert_eq!(digest(&config, change), base);
    }
    let (both, turned) = (["default", "passthrough"], ["passthrough", "default"]);
    let other: [&dyn Fn(&mut ProfilePolicies); 6] = [
        &|profile| profile.policies = vec!["default".into()],
        &|profile| profile.policies = both.map(String::from).into(),
        &|profile| profile.policies = turned.map(String::from).into(),
        &|profile| drop(profile.params.insert("thinking".into(), "off".into())),
        &|profile| profile.on_failure = OnFailure::Closed,
        &|profile| profile.grants = vec![Grant::Kv],
    ];
    let mut digests = vec![base];
    digests.extend(other.map(|change| digest(&config, change)));
    digests.push(digest(&PolicyConfig { fuel: 1_000_000, ..config.clone() }, &|_| ()));
    digests.push(digest(&PolicyConfig { kv_bytes: 0, ..config }, &|_| ()));
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), 9);
}

#[test]
fn a_valid_version_is_activated_for_all_profiles_at_once() {
    let mut site = Site::new();
    site.profiles.extend(profiles(&[("other", "mine"), ("third", "passthrough")]));
    let policies = site.load().unwrap();
    let digests = || ["default", "other", "third"].map(|p| start(&policies, p).unwrap().digest);
    let before = digests();
    let running = start(&policies, "default").unwrap();
    let done = install(&policies, b'b');
    assert_eq!(done.sha256, sha256(&version(b'b')));
    assert_eq!(done.replaced, Some(sha256(&version(b'a'))));
    site.check(&policies, &version(b'b'), Origin::File, "");
    let after = digests();
    assert!(before[0] != after[0] && before[1] != after[1] && before[2] == after[2]);
    assert_eq!(running.digest, before[0]);

    let again = install(&policies, b'b');
    assert_eq!(again.replaced, None);
    let kept = policies.history("mine").unwrap();
    let kept: Vec<_> = kept.iter().map(|entry| entry.sha256.clone()).collect();
    assert_eq!(kept, [version(b'b'), version(b'a')].map(|bytes| sha256(&bytes)));
}

#[test]
fn a_rejected_version_changes_nothing_and_is_reported() {
    let site = Site::new();
    let policies = site.load().unwrap();
    let digest = start(&policies, "default").unwrap().digest;
    let error = policies.upload("mine", b"text").unwrap_err().to_string();
    assert!(error.starts_with("policy `mine`: is not a valid component"), "{error}");
    site.check(&policies, &version(b'a'), Origin::File, &error);
    assert_eq!(start(&policies, "default").unwrap().digest, digest);
    assert_eq!(fs::read(site.file()).unwrap(), version(b'a'));
    let error = policies.upload("other", &version(b'b')).unwrap_err();
    assert!(error.to_string().contains("no profile names it, only mine"), "{error}");
    install(&policies, b'b');
    site.check(&policies, &version(b'b'), Origin::File, "");
}

#[test]
fn an_upload_is_written_to_its_file_and_survives_a_restart() {
    let site = Site::new();
    let policies = site.load().unwrap();
    policies.upload("mine", &version(b'b')).unwrap();
    site.check(&policies, &version(b'b'), Origin::Upload, "");
    assert_eq!(fs::read(site.file()).unwrap(), version(b'b'));
    policies.reload();
    site.check(&policies, &version(b'b'), Origin::Upload, "");
    site.check(&site.load().unwrap(), &version(b'b'), Origin::File, "");

    let policies = load(&[("default", "passthrough")]).unwrap();
    let error = policies.upload("passthrough", &version(b'b')).unwrap_err();
    assert!(error.to_string().starts_with("policy.folder: is not set"), "{error}");
    assert_eq!(policies.report().policies[0].origin, Origin::Shipped);
}

#[test]
fn rollbacks_return_version_by_version_and_update_the_file() {
    let site = Site::new();
    let policies = site.load().unwrap();
    let error = policies.roll_back("mine").unwrap_err().to_string();
    assert_eq!(error, "policy `mine`: there is no earlier version");
    for name in [b'b', b'c'] {
        policies.upload("mine", &version(name)).unwrap();
    }
    for name in [b'b', b'a'] {
        let done = policies.roll_back("mine").unwrap();
        assert_eq!(done.sha256, sha256(&version(name)));
        site.check(&policies, &version(name), Origin::History, "");
        assert_eq!(fs::read(site.file()).unwrap(), version(name));
        policies.reload();
        site.check(&policies, &version(name), Origin::History, "");
    }
    policies.roll_back("mine").unwrap_err();
    site.check(&site.load().unwrap(), &version(b'a'), Origin::File, "");
    // A version that was rolled back is skipped unless it was uploaded again.
    policies.upload("mine", &version(b'd')).unwrap();
    assert_eq!(policies.roll_back("mine").unwrap().sha256, sha256(&version(b'a')));
    fs::write(site.file(), version(b'c')).unwrap();
    policies.reload();
    site.check(&policies, &version(b'c'), Origin::File, "");
}

#[test]
fn a_rollback_can_return_to_a_shipped_policy() {
    let folder = tempfile::tempdir().unwrap();
    let config = PolicyConfig { folder: folder.path().into(), ..PolicyConfig::default() };
    let policies = load_with(&config, &profiles(&[("default", "passthrough")])).unwrap();
    policies.upload("passthrough", &version(b'b')).unwrap();
    policies.roll_back("passthrough").unwrap();
    let shipped = SHIPPED.iter().find(|shipped| shipped.name == "passthrough").unwrap();
    assert_eq!(policies.report().policies[0].sha256, sha256(shipped.component));
    assert_eq!(fs::read(folder.path().join("passthrough.wasm")).unwrap(), shipped.component);
}

fn fail(policies: &Policies) {
    let cause = Cause::Trap("unreachable".into());
    let failure = Failure { policy: "mine".into(), hook: "on-step", cause };
    (0..3).for_each(|_| policies.current("mine").breaker.failed(&failure));
}

#[test]
fn a_version_that_fails_its_probation_is_rolled_back_and_not_loaded_again() {
    let site = Site::new();
    let policies = site.load().unwrap();
    fs::write(site.file(), version(b'b')).unwrap();
    policies.reload();
    site.check(&policies, &version(b'b'), Origin::File, "");
    let old = start(&policies, "default").unwrap();
    fail(&policies);
    let why = "failed in 3 of its first 4 requests: on-step: trapped: unreachable";
    site.check(&policies, &version(b'a'), Origin::File, why);
    assert_ne!(start(&policies, "default").unwrap().digest, old.digest);
    policies.reload();
    site.check(&policies, &version(b'a'), Origin::File, why);

    // Nor after a restart, once the history on disk has it.
    let started = Instant::now();
    while policies.failed_before("mine", &Sha256::digest(version(b'b')).into()).is_none() {
        assert!(started.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    let policies = site.load().unwrap();
    site.check(&policies, &version(b'a'), Origin::History, why);
    policies.reload();
    site.check(&policies, &version(b'a'), Origin::History, why);
    for name in [b'c', b'b'] {
        fs::write(site.file(), version(name)).unwrap();
        policies.reload();
        site.check(&policies, &version(name), Origin::File, "");
    }
}

#[test]
fn two_failing_versions_are_rolled_back_in_turn_and_the_first_version_never() {
    let site = Site::new();
    let policies = site.load().unwrap();
    for name in [b'b', b'c'] {
        install(&policies, name);
    }
    for name in [b'b', b'a', b'a'] {
        fail(&policies);
        site.check(&policies, &version(name), Origin::File, "failed in 3 of its first");
    }
}

#[test]
fn a_start_with_a_broken_file_loads_the_last_valid_version() {
    let site = Site::new();
    drop(site.load().unwrap());
    fs::write(site.file(), version(b'b')).unwrap();
    drop(site.load().unwrap());
    fs::write(site.file(), &version(b'c')[..1000]).unwrap();
    let policies = site.load().unwrap();
    site.check(&policies, &version(b'b'), Origin::History, "is not a valid component");
    fs::write(site.file(), version(b'c')).unwrap();
    policies.reload();
    site.check(&policies, &version(b'c'), Origin::File, "");
    // A missing file was removed on purpose.
    fs::remove_file(site.file()).unwrap();
    assert!(site.load().err().unwrap().to_string().contains("does not exist"));
}

#[test]
fn an_incomplete_or_missing_file_leaves_the_active_version() {
    let site = Site::new();
    let policies = site.load().unwrap();
    let whole = version(b'b');
    fs::write(site.file(), &whole[..whole.len() / 2]).unwrap();
    policies.reload();
    site.check(&policies, &version(b'a'), Origin::File, "is not a valid component");
    fs::remove_file(site.file()).unwrap();
    policies.reload();
    site.check(&policies, &version(b'a'), Origin::File, "no longer exists");
    fs::write(site.file(), version(b'a')).unwrap();
    policies.reload();
    site.check(&policies, &version(b'a'), Origin::File, "");
    fs::write(site.file(), &whole).unwrap();
    policies.reload();
    site.check(&policies, &whole, Origin::File, "");
}

#[test]
fn parameters_from_files_are_read_at_the_start_and_when_they_change() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.toml");
    let mut profiles = profiles(&[("default", "passthrough"), ("other", "passthrough")]);
    let param = Param::File { file: file.clone() };
    profiles.get_mut("default").unwrap().params.insert("rules".into(), param);
    let load = || load_with(&PolicyConfig::default(), &profiles);
    let refused = |words: &str| {
        let error = load().err().expect(words).to_string();
        for word in [words, "`default`", "`rules`", file.to_str().unwrap()] {
            assert!(error.contains(word), "`{word}` is not in {error}");
        }
    };
    refused("does not exist");
    fs::write(&file, vec![b' '; PARAM_BYTES + 1]).unwrap();
    refused("262144 bytes");
    fs::write(&file, [0xff]).unwrap();
    refused("utf-8");

    fs::write(&file, "one").unwrap();
    let policies = load().unwrap();
    let read = |text: &str, problem: bool| {
        policies.reload();
        let session = start(&policies, "default").unwrap();
        assert_eq!(*session.params, [("rules".to_owned(), text.to_owned())]);
        let report = policies.report().params.remove(0);
        assert_eq!((&*report.profile, &*report.param, &report.file), ("default", "rules", &file));
        assert_eq!(report.problem.is_some(), problem);
        session.digest
    };
    let one = read("one", false);
    fs::write(&file, "two").unwrap();
    assert_ne!(read("two", false), one);
    fs::remove_file(&file).unwrap();
    read("two", true);
    fs::write(&file, "one").unwrap();
    assert_eq!(read("one", false), one);
}

#[test]
fn a_watched_file_is_reloaded_and_the_watch_ends_with_the_policies() {
    let site = Site::new();
    let policies = Arc::new(site.load().unwrap());
    policies.watch();
    let beside = Path::new(&site.file()).with_extension("new");
    fs::write(&beside, version(b'b')).unwrap();
    fs::rename(&beside, site.file()).unwrap();
    let started = Instant::now();
    while policies.report().policies[0].sha256 != sha256(&version(b'b')) {
        assert!(started.elapsed() < Duration::from_secs(20), "the change was not reported");
        std::thread::sleep(Duration::from_millis(10));
    }
    let weak = Arc::downgrade(&policies);
    drop(policies);
    let started = Instant::now();
    while weak.upgrade().is_some() {
        assert!(started.elapsed() < Duration::from_secs(20), "the watch holds a handle");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn parameters_of_a_policy_that_the_profile_does_not_name_are_refused() {
    let mut profiles = profiles(&[("default", "default")]);
    let params = &mut profiles.get_mut("default").unwrap().params;
    params.insert("default.reasoning_budget".into(), "7".into());
    params.insert("agent.reasoning_budget".into(), "9".into());
    let error = load_with(&PolicyConfig::default(), &profiles).err().expect("a wrong name");
    let words = "params `agent.reasoning_budget` of profile `default`: the profile does not name that policy, \
         only default";
    assert!(error.to_string().contains(words), "{error}");
}
